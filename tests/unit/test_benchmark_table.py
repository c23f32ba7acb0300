"""From the results of benchmarks to the table: numbers, ratios, verdicts, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as suite
from benchmarks import collect, cost, dht, memory
from benchmarks.allreduce import MISSED
from benchmarks.entries import ENTRIES, Entry
from benchmarks.plot import draw
from benchmarks.report import SUMMARY, keep, load, report
from benchmarks.rows import Row, Section, Spread, at_least, at_most, cells, markdown, verdict


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
    assert (row.beside, row.its, row.line) == ("hivemind", 3.0, "round, 4 peers x 10M (1 failed)")
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
    assert (cells(row)[3], cells(row)[6]) == ("failed", "not judged")


def test_without_others_the_number_alone_is_left() -> None:
    """With how many rounds failed; that all did is an error."""
    assert collect.whole_rounds({})(rounds(shoal=[0.5])) == [Row("round, 4 peers x 10M", 0.5, "s")]
    assert collect.whole_rounds({})(rounds(shoal=[0.5, None]))[0].line == "round, 4 peers x 10M (1 failed)"
    with pytest.raises(ValueError, match="no round of shoal succeeded"):
        collect.whole_rounds({})(rounds(shoal=[None], gloo=[1.0]))


def test_bars_against_hivemind_do_not_vanish_without_it() -> None:
    """Each stays in the table, not judged; those against others are."""
    content = rounds(shoal=[0.5], transport=[0.1])
    found = {row.beside: row for row in collect.whole_rounds({"hivemind": at_least(3.0)})(content)}
    assert (found["hivemind"].absent, found["transport"].absent) == (True, False)
    (state,) = collect.state_download({"megabytes": 400.0, "1": {"shoal": [{"seconds": 1.0}]}})
    (search,) = collect.dht({"nodes": 8, "results": {"shoal": {"failed": {}, "get": {"p50_s": 0.1}}}})
    for row in (found["hivemind"], state, search):
        assert (row.beside, row.absent, row.its, verdict(row)) == ("hivemind", True, None, None)
        assert row.bar is not None


def coded(encode: float, decode: float, *, whose: tuple[str, ...] = ("shoal", "hivemind")) -> list[dict[str, Any]]:
    """As `benchmarks.compression` writes it of one tensor."""
    speeds = {"encode_gb_s": 1.0, "decode_gb_s": 2.0}
    times = {"times_encode": [encode, encode, encode], "times_decode": [decode, decode, decode]}
    return [
        {"who": who, "codec": codec, **speeds, **({"theirs": theirs} if who == "shoal" else times)}
        for codec, theirs in (("none", "No"), ("uniform8bit", "Uniform"), ("topk", None))
        for who in whose
        if theirs or who == "shoal"
    ]


def test_a_codec_is_judged_by_its_slowest_direction() -> None:
    """In each size, on the tensor where it is slowest; decoding of `none` copies nothing, and is no speed."""
    sizes = {
        "1000": {"normal": coded(3.0, 2.0), "outliers": coded(0.9, 4.0)},
        "16384": {"normal": coded(3.0, 2.0), "outliers": coded(4.0, 5.0)},
    }
    plain, small, _, large = collect.codecs({"missing": {}, "sizes": sizes})
    assert (plain.line, plain.ratio) == ("codec none, 1,000 values: encode", Spread(0.9, 0.9, 0.9))
    assert (small.line, small.ratio) == ("codec uniform8bit, 1,000 values: encode", Spread(0.9, 0.9, 0.9))
    assert (large.line, large.ratio) == ("codec uniform8bit, 16,384 values: decode", Spread(2.0, 2.0, 2.0))
    assert [verdict(row) for row in (small, large)] == [False, True]


@pytest.mark.parametrize("missing", [{}, {"Uniform": "ImportError"}])
def test_a_codec_without_hiveminds_is_not_judged(missing: dict[str, str]) -> None:
    """Because hivemind is not there, or its codec fails."""
    content = {"missing": missing, "sizes": {"1000": {"normal": coded(0.0, 0.0, whose=("shoal",))}}}
    _, row = collect.codecs(content)
    assert (row.beside, row.its, row.absent, verdict(row)) == ("hivemind", None, not missing, None)
    assert (row.line, row.measured) == ("codec uniform8bit, 1,000 values: encode", 1.0)


def test_a_state_is_compared_for_one_donor() -> None:
    """One is what hivemind takes it from, however many there are: more donors are shown without a bar."""
    runs = {"shoal": [{"seconds": 1.0}], "hivemind": [{"seconds": 6.0}]}
    one, three = collect.state_download({"megabytes": 400.0, "1": runs, "3": runs})
    assert (one.measured, one.ratio, verdict(one)) == (400.0, Spread(6.0, 6.0, 6.0), True)
    assert verdict(three) is None


def test_downloads_are_paired_by_turn() -> None:
    """One that failed leaves its turn out on both sides, and moves no other."""

    def runs(*seconds: float | None) -> list[dict[str, float] | None]:
        return [None if each is None else {"seconds": each} for each in seconds]

    content = {"megabytes": 400.0, "1": {"shoal": runs(None, 1.0, 2.0), "hivemind": runs(8.0, 6.0, 8.0)}}
    (row,) = collect.state_download(content)
    assert row.ratio == Spread(5.0, 4.0, 6.0)
    with pytest.raises(ValueError, match="no download of shoal from 1 succeeded"):
        collect.state_download({"megabytes": 400.0, "1": {"shoal": runs(None)}})


def test_latencies_are_compared_turn_by_turn() -> None:
    """The ratio is the median of the turns', not that of all operations together."""
    mine, its = dht.Network("shoal"), dht.Network("hivemind")
    for network, turns in ((mine, ([1.0, 1.0, 1.0], [2.0], [2.0])), (its, ([2.0, 2.0, 2.0], [8.0], [10.0]))):
        network.seconds = {what: [list(turn) for turn in turns] for what in dht.LATENCIES}
        network.per_s = {what: [1.0, 1.0, 1.0] for what in dht.RATES}
    results = {network.name: dht.summary(network, mine) for network in (mine, its)}
    row = next(row for row in collect.dht({"nodes": 8, "results": results}) if row.line.endswith(": get"))
    assert row.ratio == Spread(4.0, 2.0, 5.0)
    assert (row.measured, row.its) == (1000.0, 2000.0)


def test_an_import_is_compared_with_one_that_loads_the_same() -> None:
    """`import shoal` loads no torch, `import hivemind` does."""

    def peer(*import_s: float) -> tuple[dict[str, Any], list[dict[str, float]]]:
        raw = [{"import_s": each, "start_s": 0.1, "processes": 1, "rss_times_torch": 1.1} for each in import_s]
        return {field: {"median": raw[0][field]} for field in raw[0]}, raw

    shoal, hivemind = peer(2.0, 2.0, 4.0), peer(3.0, 4.0, 4.0)
    results = {"shoal": {"import_s": {"median": 0.01}}, "shoal-peer": shoal[0], "hivemind-peer": hivemind[0]}
    content = {"results": results, "raw": {"shoal-peer": shoal[1], "hivemind-peer": hivemind[1]}}
    found = {row.line: row for row in collect.idle(content) if "import " in row.line}
    alone, like = found.values()
    assert (alone.beside, alone.measured, verdict(alone)) == ("", 0.01, True)
    assert (like.beside, like.measured, like.its, like.bar) == ("hivemind", 2.0, 3.0, None)
    assert like.ratio == Spread(1.5, 1.0, 2.0)


def test_a_simulation_of_one_line_is_read_as_one_of_many() -> None:
    """A file with one line of JSON is one value."""
    row = {"nodes": 100, "hops": 2.0, "found_after_crash": 1.0}
    assert collect.dht_sim(row) == collect.dht_sim([row])


def test_each_size_of_a_group_has_its_own_bar() -> None:
    """Seconds of the last peer; hivemind's stand beside, and decide nothing."""

    def formed(p50: float) -> dict[str, Any]:
        return {"last_s": {"p50": p50}, "full_part": 1.0, "joins": 10}

    content = {peers: {"results": {"shoal": formed(0.08), "hivemind": formed(0.5)}} for peers in ("2", "8", "16")}
    rows = [row for row in collect.forming(content) if row.bar is not None]
    assert [verdict(row) for row in rows] == [False, True, True]
    assert {row.its for row in rows} == {0.5}


def test_a_contender_that_gave_up_is_said_to_have() -> None:
    """It has no time then, but a part of its joins; one that never joined has failed."""
    mine: dict[str, Any] = {"last_s": {"p50": 0.1}, "full_part": 1.0, "joins": 10}
    its: dict[str, Any] = {"last_s": {}, "full_part": 0.5, "joins": 4, "left_out": "left out after round 2"}
    time, part = collect.forming({"16": {"results": {"shoal": mine, "hivemind": its}}})
    assert (time.beside, verdict(time)) == ("", True)
    assert (part.beside, part.its) == ("hivemind, left out after round 2", 0.5)
    _, never = collect.forming({"16": {"results": {"shoal": mine, "hivemind": its | {"joins": 0}}}})
    assert (never.beside, never.its, never.absent) == ("hivemind, left out after round 2", None, False)


@pytest.mark.parametrize("trouble", [{"left_out": "left out after round 2"}, {"last_s": {}}])
def test_shoal_misses_its_bar_where_it_did_not_go_on(trouble: dict[str, Any]) -> None:
    """Also if no group was ever full; other sizes are not touched."""
    mine: dict[str, Any] = {"last_s": {"p50": 0.01}, "full_part": 0.5, "joins": 10, "left_out": None}
    rows = collect.forming({"2": {"results": {"shoal": mine}}, "8": {"results": {"shoal": mine | trouble}}})
    assert [verdict(row) for row in rows if row.bar] == [True, False]
    assert cells(rows[2])[1] == "never"


def test_slow_links_have_a_wider_bar_with_losses() -> None:
    """1.15 without, 1.5 with; the others on the same links stand beside, without a bar."""

    def row(name: str, loss: float, *whole_s: float | None) -> dict[str, Any]:
        found = [each for each in whole_s if each is not None]
        return {
            "name": name,
            "loss": loss,
            "compression": "none",
            "all": [each and {"whole_s": each} for each in whole_s],
            **({"round / allowed": {"median": found[0]}} if found else {}),
        }

    content = {
        "rows": [
            *(row("shoal", 0.0, 1.3, None, 1.5), row("hivemind", 0.0, None), row("sockets", 0.0, 1.2, 1.1, 1.2)),
            *(row("shoal", 0.01, 1.3), row("hivemind", 0.01, 9.0)),
        ]
    }
    rows = collect.shaped(content)
    assert [verdict(row) for row in rows] == [False, None, None, True, None]
    assert [(row.beside, row.its) for row in rows[1:3]] == [("hivemind", None), ("sockets", 1.2)]
    assert rows[2].ratio == Spread.of([1.2 / 1.3, 1.2 / 1.5])
    assert rows[4].its == 9.0
    (broken,) = collect.shaped({"rows": [row("shoal", 0.0, None)]})
    assert (verdict(broken), cells(broken)[1]) == (False, "never")


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
    vectors = [{"numel": 10_000_000, "copies": copies, "beyond_mib": 7.0}]
    vectors += [{"numel": 40_000_000, "copies": {"median": 2.1}, "beyond_mib": 8.0}]
    grown = {"memory": -5, "threads": 1, "descriptors": 0}
    content = {"peers": 2, "vectors": vectors, "growth": grown, "first_rounds": 500, "rounds": 1000}
    rows = collect.memory(content)
    assert [verdict(row) for row in rows] == [True, None, False, None, True, False, True]
    assert (rows[3].line, rows[3].measured) == ("memory in a round beyond 2 copies, 2 peers x 40M", 8.0)
    assert (rows[3].beside, rows[3].its) == ("10M", 7.0)
    assert rows[4].line == "memory grown in 1000 rounds, after the first 500"


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
    """A bar that was missed takes nothing from it."""
    assert suite.read('{"a": 1}\n', MISSED) == ({"a": 1}, "")
    assert suite.read('{\n "a": 1\n}\n', 0) == ({"a": 1}, "")
    assert suite.read('{"a": 1}\n{"a": 2}\n', 0) == ([{"a": 1}, {"a": 2}], "")


@pytest.mark.parametrize(
    ("code", "said"), [(1, "it ended with code 1"), (-9, "ended by SIGKILL"), (None, "not done after 1800 s")]
)
def test_a_benchmark_that_died_is_not_complete(code: int | None, said: str) -> None:
    """Whatever it wrote before; a traceback ends with 1, wrong arguments with 2."""
    assert suite.read('{"a": 1}\n{"a": 2}\n', code) == ([{"a": 1}, {"a": 2}], said)
    with pytest.raises(suite.Broken, match=f"^{said}$"):
        suite.read("\n", code)
    with pytest.raises(suite.Broken, match=f"broken off; {said}"):
        suite.read('{"a": 1}\n{"a', code)


def test_what_is_broken_off_leaves_one_entry_out() -> None:
    """Not the whole run; so does nothing at all."""
    with pytest.raises(suite.Broken, match="broken off; it ended well"):
        suite.read('{"a": [1, 2', 0)
    with pytest.raises(suite.Broken, match="it wrote nothing"):
        suite.read("", 0)


# -------------------------------------------------------------------------------------------------------------- report


def number(name: str) -> Entry:
    """An entry whose content is a number of its one line, which must not be above 2."""
    return Entry(name, "x", lambda content: [Row(f"line {name}", float(content), bar=at_most(2.0))])


def kept(folder: Path, entry: Entry, date: str, commit: str, **more: Any) -> None:
    """Enter a result as `benchmarks.__main__` does; its content is a number."""
    machine = {"cores": 2, "processor": "abacus", "memory_gib": 1.0}
    versions = {"python": "3.11", "torch": "2.13"}
    result = {"date": date, "commit": commit, "machine": machine, "versions": versions, "content": 1.0, **more}
    keep(folder, entry, result)


def test_old_lines_do_not_look_as_if_they_were_new(tmp_path: Path) -> None:
    """Each commit and day has a heading of its own, the newest first; within it the order is that of the entries."""
    kept(tmp_path, number("a"), "2026-01-01 10:00:00", "old")
    kept(tmp_path, number("b"), "2026-01-02 10:00:00", "new")
    kept(tmp_path, number("c"), "2026-01-01 11:00:00", "old")
    kept(tmp_path, number("d"), "2026-01-01 12:00:00", "old", quick=True)
    assert report(tmp_path, [number(name) for name in "cbad"])
    page = (tmp_path / "table.md").read_text()
    heads = ["2026-01-02, commit new:", "2026-01-01, commit old, a short run:", "2026-01-01, commit old:"]
    places = [page.index(what) for what in (f"## {heads[0]}", "line b", heads[1], "line d", heads[2])]
    assert [*places, page.index("line c"), page.index("line a")] == sorted(
        [*places, page.index("line c"), page.index("line a")]
    )
    assert "4 of 4 bars met, 0 not judged" in page


def test_what_was_left_out_is_listed_below_the_table(tmp_path: Path) -> None:
    """With the reason, and how old its lines are; what has no result at all, too."""
    kept(tmp_path, number("a"), "2026-01-01 10:00:00", "old")
    gone = {"date": "2026-01-03 10:00:00", "commit": "new", "reason": "no room"}
    for name in ("a", "b"):
        keep(tmp_path, number(name), {"left_out": gone})
    assert report(tmp_path, [number(name) for name in "abcd"])
    page = (tmp_path / "table.md").read_text()
    assert "- left out: a: no room (2026-01-03, commit new); its lines are of 2026-01-01\n" in page
    assert "- left out: b: no room (2026-01-03, commit new)\n" in page
    assert "- not measured yet: c, d\n" in page
    keep(tmp_path, number("a"), {"content": 1.0})
    assert "left_out" not in load(tmp_path)["a"]


def test_a_busy_machine_is_told_below_the_table(tmp_path: Path) -> None:
    """Nobody takes such a line for one of a quiet machine."""
    kept(tmp_path, number("a"), "2026-01-01 10:00:00", "new", load=12.3)
    kept(tmp_path, number("b"), "2026-01-01 10:00:00", "new", load=0.4)
    assert report(tmp_path, [number(name) for name in "ab"])
    page = (tmp_path / "table.md").read_text()
    assert "- beside other work: a: load 12.3 when it began\n" in page
    assert "load 0.4" not in page


def test_the_floor_of_the_optimizer_stands_beside_it() -> None:
    """By time and by processor time; the bar is for the optimizer's time alone."""
    spread = {f"{key}{end}": 0.9 for key in ("ratio", "cpu_ratio") for end in ("", "_low", "_high")}
    found = {**spread, **{f"floor_{key}": 0.95 for key in spread}, "keeps_memory": True}
    for who, taken_s in (("plain", 0.9), ("shoal", 1.0), ("floor", 0.95)):
        found |= {f"{who}_step_s": taken_s, f"{who}_cpu_s": taken_s}
    rows = collect.optimizer_overhead({"wide": found})
    assert [(row.line, row.ratio and row.ratio.median, row.bar is not None) for row in rows] == [
        ("optimizer alone, wide, freed memory kept: a step", 0.9, True),
        ("optimizer alone, wide, freed memory kept: a step, by processor time", 0.9, False),
        ("optimizer alone, wide, freed memory kept: its floor", 0.95, False),
        ("optimizer alone, wide, freed memory kept: its floor, by processor time", 0.95, False),
    ]


def test_results_that_are_not_complete_are_no_success(tmp_path: Path) -> None:
    """Nor are those that cannot be read; neither hides anything else."""
    kept(tmp_path, number("a"), "2026-01-01 10:00:00", "old", stopped="ended by SIGKILL")
    assert not report(tmp_path, [number("a")])
    assert "- not complete: a: ended by SIGKILL\n" in (tmp_path / "table.md").read_text()
    kept(tmp_path, number("a"), "2026-01-01 10:00:00", "old")
    assert report(tmp_path, [number("a")])
    kept(tmp_path, number("b"), "2026-01-01 10:00:00", "old", content=None)
    assert not report(tmp_path, [number(name) for name in "ab"])
    page = (tmp_path / "table.md").read_text()
    assert "b: its result makes no lines: TypeError" in page
    assert "line a" in page


def test_a_summary_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    """It has the results of days."""
    (tmp_path / SUMMARY).write_text('{"a": ')
    with pytest.raises(ValueError, match="Expecting value"):
        kept(tmp_path, number("a"), "2026-01-01 10:00:00", "old")
    assert (tmp_path / SUMMARY).read_text() == '{"a": '


def test_only_lines_are_kept(tmp_path: Path) -> None:
    """The raw answers of a whole run had megabytes."""
    kept(tmp_path, number("a"), "2026-01-01 10:00:00", "old")
    assert load(tmp_path)["a"]["rows"] == [["line a", 1.0, "", "", None, None, [2.0, False], False]]
    assert "content" not in load(tmp_path)["a"]


def test_bars_that_nothing_could_be_held_against_are_told(tmp_path: Path) -> None:
    """They are not met, and do not count as missed."""

    def compare(_: object) -> list[Row]:
        other = Row("away", 1.0, beside="hivemind", bar=at_least(3.0), absent=True)
        return [other, other._replace(line="down", absent=False), other._replace(line="no bar", bar=None)]

    kept(tmp_path, Entry("a", "x", compare), "2026-01-01 10:00:00", "old")
    assert report(tmp_path, [Entry("a", "x", compare)])
    page = (tmp_path / "table.md").read_text()
    assert "| away | 1.00 | hivemind | was not there |  | ≥ 3.00 | not judged |" in page
    assert "- not judged: hivemind was not there: away\n" in page
    assert "- not judged: hivemind failed: down\n" in page
    assert "0 of 0 bars met, 2 not judged" in page


def test_the_picture_is_the_same_for_the_same_rows(tmp_path: Path) -> None:
    """Nothing of the time or of chance is in it. Without a ratio there is none, nor an old one."""
    row = Row("round", 0.5, "s", "hivemind", 2.0, Spread(4.0, 3.0, 5.0), at_least(3.0))
    for name in ("a.svg", "b.svg"):
        draw([Section("here", (row, Row("no ratio", 1.0)))], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    draw([Section("here", (Row("no ratio", 1.0),))], tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


def test_the_picture_says_of_which_origin_each_line_is(tmp_path: Path) -> None:
    """By a raised number, where there is more than one."""
    row = Row("round", 0.5, "s", "hivemind", 2.0, Spread(4.0, 3.0, 5.0), at_least(3.0))
    draw([Section("today", (row,)), Section("long ago", (row,))], tmp_path / "two.svg")
    text = (tmp_path / "two.svg").read_text()
    assert all(f">{what}</text>" in text for what in ("round  / hivemind¹", "round  / hivemind²", "² long ago"))
    draw([Section("today", (row,))], tmp_path / "one.svg")
    assert ">round  / hivemind</text>" in (tmp_path / "one.svg").read_text()
