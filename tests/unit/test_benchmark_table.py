"""From the results of benchmarks to the table: numbers, ratios, verdicts, what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as suite
from benchmarks import collect, cost, memory
from benchmarks.entries import ENTRIES, Entry
from benchmarks.plot import draw
from benchmarks.rows import Row, Spread, at_least, at_most, cells, markdown, verdict


def rounds(**whole_s: list[float | None]) -> dict[str, Any]:
    """As `benchmarks.allreduce` writes it."""
    taken = {name: [each and {"whole_s": each} for each in times] for name, times in whole_s.items()}
    return {"peers": 4, "numel": 10_000_000, "compression": "none", "rounds": taken}


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_a_bar_is_met_from_its_own_value_on() -> None:
    """At least and at most, both with the limit itself."""
    fast = Row("x", 1.0, ratio=Spread(4.0, 3.0, 5.0))
    assert verdict(fast._replace(bar=at_least(4.0)))
    assert not verdict(fast._replace(bar=at_least(4.01)))
    assert verdict(Row("x", 2.0, bar=at_most(2.0)))
    assert not verdict(Row("x", 2.01, bar=at_most(2.0)))
    assert verdict(fast) is None


def test_the_ratio_decides_where_there_is_one() -> None:
    """Otherwise the measured number."""
    assert verdict(Row("x", 100.0, ratio=Spread(0.5, 0.5, 0.5), bar=at_least(0.75))) is False


def test_cells_carry_units_ranges_and_the_verdict() -> None:
    """Three digits, and the bar in the unit of what it is for."""
    row = Row("round", 0.5031, "s", "hivemind", 1.302, Spread(2.654, 2.33, 3.36), at_least(4.0))
    assert cells(row) == ("round", "0.503 s", "hivemind", "1.30 s", "2.65 (2.33 to 3.36)", "≥ 4.00", "NO")
    assert cells(Row("start", 0.25, "s", bar=at_most(0.3)))[-2:] == ("≤ 0.300 s", "yes")
    assert cells(Row("rate", 12345.6, "per s"))[1:] == ("12,346 per s", "", "", "", "", "")
    assert cells(Row("threads", 0, bar=at_most(0)))[-2:] == ("≤ 0", "yes")


def test_the_table_for_a_page_has_a_line_for_each_row() -> None:
    """And two for its head."""
    lines = markdown([Row("a", 1.0), Row("b", 2.0)]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1


# ---------------------------------------------------------------------------------------------------------- collecting


def test_ratios_come_from_rounds_of_the_same_turn() -> None:
    """A round that failed leaves its turn out on both sides."""
    content = rounds(shoal=[1.0, 2.0, None, 1.0], hivemind=[4.0, None, 9.0, 2.0])
    (row,) = collect.whole_rounds({"hivemind": at_least(3.0)})(content)
    assert row.ratio == Spread(3.0, 2.0, 4.0)
    assert (row.beside, row.its, row.line) == ("hivemind", 3.0, "round, 4 peers x 10M")
    assert verdict(row)


def test_the_round_without_encryption_stands_beside_gloo_not_beside_shoal() -> None:
    """Its bar is gloo's; the transport alone is shown without one."""
    content = rounds(shoal=[1.0], clear=[0.5], clear_transport=[0.25], gloo=[0.3])
    found = {row.beside: row for row in collect.whole_rounds({"gloo": at_least(0.8)}, ours="clear")(content)}
    assert list(found) == ["clear_transport", "gloo"]
    assert found["gloo"].ratio == Spread(0.6, 0.6, 0.6)
    assert verdict(found["gloo"]) is False
    assert verdict(found["clear_transport"]) is None


def test_a_contender_that_failed_is_named_and_decides_nothing() -> None:
    """It must not look as if nobody had tried."""
    (row,) = collect.whole_rounds({"hivemind": at_least(3.0)})(rounds(shoal=[0.5], hivemind=[None]))
    assert (row.beside, row.its, verdict(row)) == ("hivemind", None, None)
    assert cells(row)[3] == "failed"


def test_without_others_the_number_alone_is_left() -> None:
    """And nothing at all where every round failed."""
    assert collect.whole_rounds({})(rounds(shoal=[0.5])) == [Row("round, 4 peers x 10M", 0.5, "s")]
    assert collect.whole_rounds({})(rounds(shoal=[None], gloo=[1.0])) == []


def test_a_codec_is_judged_by_its_slowest_direction() -> None:
    """On the tensor where it is slowest; decoding of `none` copies nothing, and is no speed."""

    def kind(encode: float, decode: float) -> list[dict[str, Any]]:
        speeds = {"encode_gb_s": 1.0, "decode_gb_s": 1.0}
        times = {"times_encode": [encode, encode, encode], "times_decode": [decode, decode, decode]}
        return [
            {"who": who, "codec": codec, **speeds, **(times if who == "hivemind" else {})}
            for codec in ("none", "uniform8bit")
            for who in ("shoal", "hivemind")
        ]

    (row,) = collect.codecs({"results": {"normal": kind(3.0, 2.0), "outliers": kind(0.9, 4.0)}})
    assert row.line == "codec uniform8bit: encode"
    assert row.ratio == Spread(0.9, 0.9, 0.9)
    assert verdict(row) is False


def test_a_state_is_compared_for_one_donor() -> None:
    """One is what hivemind takes it from, however many there are: more donors are shown without a bar."""
    runs = {"shoal": [{"seconds": 1.0}], "hivemind": [{"seconds": 6.0}]}
    one, three = collect.state_download({"megabytes": 400.0, "1": runs, "3": runs})
    assert (one.measured, one.ratio, verdict(one)) == (400.0, Spread(6.0, 6.0, 6.0), True)
    assert verdict(three) is None


def test_each_size_of_a_group_has_its_own_bar() -> None:
    """Seconds of the last peer; hivemind's stand beside, and decide nothing."""

    def formed(p50: float) -> dict[str, Any]:
        return {"last_s": {"p50": p50}, "full_part": 1.0, "joins": 10}

    content = {peers: {"results": {"shoal": formed(0.08), "hivemind": formed(0.5)}} for peers in ("2", "8", "16")}
    rows = [row for row in collect.forming(content) if row.bar is not None]
    assert [verdict(row) for row in rows] == [False, True, True]
    assert {row.its for row in rows} == {0.5}


def test_a_contender_that_gave_up_is_said_to_have() -> None:
    """It has no time then, but a part of its joins; one that never joined is not shown."""
    mine: dict[str, Any] = {"last_s": {"p50": 0.1}, "full_part": 1.0, "joins": 10}
    its: dict[str, Any] = {"last_s": {}, "full_part": 0.5, "joins": 4, "left_out": "left out after round 2"}
    time, part = collect.forming({"16": {"results": {"shoal": mine, "hivemind": its}}})
    assert (time.beside, verdict(time)) == ("", True)
    assert (part.beside, part.its) == ("hivemind, left out after round 2", 0.5)
    alone = collect.forming({"16": {"results": {"shoal": mine, "hivemind": its | {"joins": 0}}}})
    assert not any(row.beside for row in alone)


def test_slow_links_have_a_wider_bar_with_losses() -> None:
    """1.15 without, 1.5 with; hivemind's number of the same links stands beside."""
    links = [(name, loss) for name in ("shoal", "hivemind") for loss in (0.0, 0.01)]
    content = {
        "rows": [
            {
                "name": name,
                "loss": loss,
                "compression": "none",
                "round / allowed": {"median": 1.3 if name == "shoal" else 9},
            }
            for name, loss in links
        ]
    }
    clean, lossy = collect.shaped(content)
    assert (verdict(clean), verdict(lossy)) == (False, True)
    assert clean.its == 9


def test_slowdowns_stand_beside_each_other_process() -> None:
    """One line for the loop and one for the round, for each that it is compared with."""

    def slow(loop: float, its_round: float) -> dict[str, Any]:
        return {"loop_slowdown": {"median": loop}, "round_slowdown": {"median": its_round}}

    content = {"results": {"python": {"shoal": slow(3.0, 1.5), "another process": slow(2.0, 1.1)}}}
    assert [(row.measured, row.its) for row in collect.beside(content)] == [(3.0, 2.0), (1.5, 1.1)]


def test_losses_have_bars_for_eight_bits_and_for_four_with_feedback() -> None:
    """The others are shown."""
    codecs = ("uniform8bit", "difference:blockwise:8:64", "feedback:blockwise:4:64", "blockwise:4:64", "topk:0.01")
    rows = collect.lossy({"results": [{"what": "gradients", "codec": codec, "ratios": [1.007]} for codec in codecs]})
    assert [verdict(row) for row in rows] == [False, False, True, None, None]


def test_memory_is_counted_beyond_what_any_peer_needs() -> None:
    """In copies of the vector; less memory than before is no growth."""
    copies = memory.copies([90.0, 70.0], [10.0, 10.0], 40)
    assert copies == {"median": 1.75, "min": 1.5, "max": 2.0}
    grown = {"memory": -5, "threads": 1, "descriptors": 0}
    rows = collect.memory({"peers": 2, "numel": 10, "copies": copies, "growth": grown, "rounds": 1000})
    assert [verdict(row) for row in rows] == [True, True, False, True]


def test_what_a_round_costs_stands_beside_what_must_be_paid() -> None:
    """With encryption and without; what took no turn has no line."""
    turns = [{"memcpy": 0.2, "crypto": 1.0, "sockets": 0.5}, {"memcpy": 0.1, "crypto": 0.8, "sockets": 0.4}]
    took = {name: [None, {"cpu_s": 3.0, "whole_s": whole}] for name, whole in (("transport", 3.0), ("shoal", 4.0))}
    measured = {"peers": 2, "numel": 1 << 27, "rounds": took | {"clear": [None, None]}, "primitives": turns}
    paid = cost.per_gib(measured)
    assert paid["memcpy + crypto + sockets"] == {"median": 1.5, "min": 1.3, "max": 1.7}
    assert cost.quotients(measured) == {"connections / round": {"median": 0.75, "min": 0.75, "max": 0.75}}
    size = {"title": cost.title(measured), "cpu_s_per_gib": paid, "quotients": cost.quotients(measured)}
    rows = collect.cost({"sizes": [size], "touched_in_all": 18.0})
    assert [(row.line, row.measured, row.its) for row in rows] == [
        ("CPU-s per GiB: connections", 3.0, 1.5),
        ("CPU-s per GiB: round", 3.0, 1.5),
        ("2 peers x 134.218M: connections / round", 0.75, None),
        ("bytes touched in a round, of the vector", 18.0, None),
    ]


# ------------------------------------------------------------------------------------------------------------- entries


def test_names_are_files_and_no_two_are_the_same() -> None:
    """Each entry has a file of its own."""
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert all(name.replace("_", "a").isalnum() for name in names)


def test_hivemind_is_left_out_where_it_is_not() -> None:
    """The others stay."""
    entry = Entry("x", "allreduce --rounds 9", against=("hivemind", "gloo"), quick="--rounds 1")
    assert entry.arguments(None, quick=False) == ["--rounds", "9", "--against", "gloo"]
    quick = entry.arguments("py", quick=True)
    assert quick[2:] == ["--rounds", "1", "--against", "hivemind,gloo", "--hivemind-python", "py"]
    alone = Entry("y", "dht", against=("hivemind",))
    assert alone.arguments(None, quick=False) == []


def test_a_benchmark_that_is_not_there_is_left_out() -> None:
    """So is one that the machine has no memory for."""
    with pytest.raises(suite.LeftOut, match=r"there is no benchmarks\.nowhere"):
        suite.measure(Entry("x", "nowhere"), None, quick=False)
    with pytest.raises(suite.LeftOut, match="it needs 1000000 GiB"):
        suite.measure(Entry("x", "rows", gib=1e6), None, quick=False)


def test_what_a_benchmark_wrote_is_one_value_or_one_on_each_line() -> None:
    """Nothing at all is a failure, whatever its exit code."""
    assert suite.read('{"a": 1}\n', 1) == {"a": 1}
    assert suite.read('{\n "a": 1\n}\n', 0) == {"a": 1}
    assert suite.read('{"a": 1}\n{"a": 2}\n', 0) == [{"a": 1}, {"a": 2}]
    with pytest.raises(suite.LeftOut, match="code 3"):
        suite.read("\n", 3)


def test_results_are_read_in_the_order_of_the_entries(tmp_path: Path) -> None:
    """What is not there is passed over; what cannot be read is said, and hides nothing else."""

    def row(content: Any) -> list[Row]:
        return [Row(content["name"], 1.0)]

    for name, content in (("b", {"name": "second"}), ("a", {"name": "first"}), ("c", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"content": content}))
    entries = [Entry(name, "x", row) for name in ("a", "missing", "b", "c")]
    rows, troubles = suite.collected(suite.load(tmp_path, entries))
    assert [each.line for each in rows] == ["first", "second"]
    assert troubles == ["c: its result cannot be read: KeyError: 'name'"]


def test_the_picture_is_the_same_for_the_same_rows(tmp_path: Path) -> None:
    """Nothing of the time or of chance is in it. Without a ratio there is none."""
    row = Row("round", 0.5, "s", "hivemind", 2.0, Spread(4.0, 3.0, 5.0), at_least(3.0))
    for name in ("a.svg", "b.svg"):
        draw([row, Row("no ratio", 1.0)], "somewhere", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    draw([Row("no ratio", 1.0)], "somewhere", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
