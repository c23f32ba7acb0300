"""From what a benchmark wrote with ``--json`` to lines of the table. Each function takes that, and returns rows.

A ratio says how many times as good shoal is, and is the median of pairs of the same turn. A contender that failed is
said to have; so is one that took no part (no Python with hivemind) where there is a bar against it. Where shoal itself
has no number, there is no row but a `ValueError`: its bars must not vanish.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.rows import Bar, Row, Spread, at_least, at_most

__all__ = ["Collector"]

STEPS, RATIOS = ("encode", "decode"), ("ratio", "cpu_ratio")
Collector = Callable[[Any], list[Row]]


def size(content: Mapping[str, Any]) -> str:
    """How much is averaged, as titles say it."""
    codec = content.get("compression", "none")
    return f"{content['peers']} peers x {content['numel'] / 1e6:g}M" + ("" if codec == "none" else f", {codec}")


def whole_rounds(bars: Mapping[str, Bar], *, ours: str = "shoal") -> Collector:
    """Whole rounds of `benchmarks.allreduce` against others, of which some have bars."""

    def collect(content: Mapping[str, Any]) -> list[Row]:
        rounds: dict[str, list[dict[str, float] | None]] = content["rounds"]
        mine = [each["whole_s"] for each in rounds.get(ours, ()) if each]
        if not mine:
            raise ValueError(f"no round of {ours} succeeded")
        failed = len(rounds[ours]) - len(mine)
        title = f"round, {size(content)}{'' if ours == 'shoal' else f', {ours}'}"
        alone = Row(f"{title} ({failed} failed)" if failed else title, statistics.median(mine), "s")
        seconds = {name: [each["whole_s"] if each else None for each in turns] for name, turns in rounds.items()}
        return against(alone, seconds, bars, ours=ours)

    return collect


def against(
    alone: Row,
    turns: Mapping[str, Sequence[float | None]],
    bars: Mapping[str, Bar],
    *,
    ours: str = "shoal",
    more_is_better: bool = False,
) -> list[Row]:
    """A row beside each of the others, and beside each that there is a bar against; the one `alone` if there is none.

    Args:
        alone: what was measured of shoal.
        turns: the number of each contender in each turn, None where it failed.
        bars: against others.
        ours: what is measured; others are all but that and `shoal`.
        more_is_better: of the numbers.
    """
    rows = []
    for name in dict.fromkeys([*turns, *bars]):
        if name in {ours, "shoal"}:
            continue
        row = alone._replace(beside=name, bar=bars.get(name), absent=name not in turns)
        if pairs := paired(turns[ours], turns.get(name, ())):
            ratio = Spread.of(a / b if more_is_better else b / a for a, b in pairs)
            row = row._replace(its=statistics.median(b for _, b in pairs), ratio=ratio)
        rows.append(row)
    return rows or [alone]


def paired(mine: Sequence[Any], its: Sequence[Any]) -> list[tuple[Any, Any]]:
    """What succeeded in the same turn; a contender that was out at some point has fewer."""
    return [(a, b) for a, b in zip(mine, its, strict=False) if a is not None and b is not None]


def forming(content: Mapping[str, Any]) -> list[Row]:
    """The time until the last peer of a round knows its group; "never" if none was full, or shoal did not go on."""
    bars = {"2": at_most(0.05), "8": at_most(0.1), "16": at_most(0.15)}
    rows = []
    for peers, each in content.items():
        mine, other = each["results"]["shoal"], each["results"].get("hivemind", {})
        stopped = mine.get("left_out")
        time = mine["last_s"]["p50"] if mine["last_s"] and not stopped else math.inf
        after = f" ({stopped})" if stopped else ""
        beside = ", ".join(["hivemind", *filter(None, [other.get("left_out")])]) if other else ""
        row = Row(f"forming a group of {peers}, p50{after}", time, "s", bar=bars.get(peers))
        rows.append(row._replace(beside=beside, its=other["last_s"]["p50"]) if other.get("last_s") else row)
        row = Row(f"groups of {peers}: joins that were full", mine["full_part"])
        rows.append(row._replace(beside=beside, its=other["full_part"] if other["joins"] else None) if other else row)
    return rows


def state_download(content: Mapping[str, Any]) -> list[Row]:
    """Megabytes per second for each number of donors; the bar is for one, as hivemind never uses more."""
    rows: list[Row] = []
    mb = content["megabytes"]
    for donors, bars in (("1", {"hivemind": at_least(5.0)}), ("3", {})):
        if donors not in content:
            continue
        runs: Mapping[str, Sequence[Mapping[str, float] | None]] = content[donors]
        rates = {name: [mb / run["seconds"] if run else None for run in each] for name, each in runs.items()}
        mine = [rate for rate in rates["shoal"] if rate is not None]
        if not mine:
            raise ValueError(f"no download of shoal from {donors} succeeded")
        alone = Row(f"state of {mb:g} MB, donors: {donors}", statistics.median(mine), "MB/s")
        rows += against(alone, rates, bars, more_is_better=True)
    return rows


def dht(content: Mapping[str, Any]) -> list[Row]:
    """Latencies and rates. The ratio is that of the turns' medians."""
    mine, its = content["results"]["shoal"], content["results"].get("hivemind")
    rows = []
    for what, value in mine.items():
        if what == "failed":
            continue
        field, unit, times = ("p50_s", "ms", 1e3) if "p50_s" in value else ("per_s", "per s", 1.0)
        replicas = f", {content['replicas']} replicas" if content.get("replicas") else ""
        title = f"DHT, {content['nodes']} nodes{replicas}: {what}"
        row = Row(title, times * value[field], unit, "hivemind", bar=at_least(3.0), absent=its is None)
        if its is not None:
            row = row._replace(its=times * its[what][field], ratio=Spread.of(its[what]["range"]))
        rows.append(row)
    return rows


def idle(content: Mapping[str, Any]) -> list[Row]:
    """A peer that does nothing. What `import shoal` loads is not what a peer needs: its import has a row of its own."""
    results, raw = content["results"], content["raw"]
    peer, theirs = results["shoal-peer"], results.get("hivemind-peer")
    plan = (
        ("memory, times torch's", "rss_times_torch", "", at_most(1.2)),
        ("processes", "processes", "", at_most(1.0)),
        ("start after import", "start_s", "s", at_most(0.3)),
        ("import of shoal, torch and all that a peer needs", "import_s", "s", None),
    )
    rows = [
        Row("import shoal, which loads nothing more", results["shoal"]["import_s"]["median"], "s", bar=at_most(0.1))
    ]
    for what, field, unit, bar in plan:
        row = Row(f"idle peer: {what}", peer[field]["median"], unit, bar=bar)
        if theirs is not None:
            row = row._replace(beside="hivemind", its=theirs[field]["median"])
        if theirs is not None and field == "import_s":
            pairs = zip(raw["shoal-peer"], raw["hivemind-peer"], strict=True)
            row = row._replace(ratio=Spread.of(b[field] / a[field] for a, b in pairs))
        rows.append(row)
    return rows


def memory(content: Mapping[str, Any]) -> list[Row]:
    """Copies of the vector, what there is beyond two, and what many rounds leave behind once some have been."""
    grown, vectors, rows = content["growth"], content["vectors"], []
    for vector in vectors:
        its_size = size(vector | {"peers": content["peers"]})
        rows.append(Row(f"memory in a round, {its_size}", vector["copies"]["median"], "copies", bar=at_most(2.0)))
        row = Row(f"memory in a round beyond 2 copies, {its_size}", vector["beyond_mib"], "MiB")
        if vector is not vectors[0]:
            row = row._replace(beside=f"{vectors[0]['numel'] / 1e6:g}M", its=vectors[0]["beyond_mib"])
        rows.append(row)
    when = f"in {content['rounds']} rounds, after the first {content['first_rounds']}"
    return [
        *rows,
        Row(f"memory grown {when}", max(0.0, grown["memory"] / 2**20), "MiB", bar=at_most(1.0)),
        Row(f"threads grown {when}", max(0.0, grown["threads"]), bar=at_most(0.5)),
        Row(f"descriptors grown {when}", max(0.0, grown["descriptors"]), bar=at_most(0.5)),
    ]


def codecs(content: Mapping[str, Any]) -> list[Row]:
    """For each size and each codec that hivemind has: the slowest direction, on the tensor where that is slowest."""
    rows = []
    for numel, kinds in content["sizes"].items():
        speeds = [{(row["who"], row["codec"]): row for row in kind} for kind in kinds.values()]
        theirs = {name: row["theirs"] for speed in speeds for (who, name), row in speed.items() if who == "shoal"}
        for codec, its_name in theirs.items():
            if its_name is None:
                continue
            # What decodes without a copy is not measured by the seconds that it takes.
            steps = STEPS[:1] if codec == "none" else STEPS
            each = [(speed["shoal", codec], speed.get(("hivemind", codec)), step) for speed in speeds for step in steps]
            measured, step = min((mine[f"{step}_gb_s"], step) for mine, _, step in each)
            row = Row("", measured, "GB/s", "hivemind", bar=at_least(1.0), absent=its_name not in content["missing"])
            if pairs := [
                (Spread(*its[f"times_{step}"]), step, mine[f"{step}_gb_s"], its[f"{step}_gb_s"])
                for mine, its, step in each
                if its is not None
            ]:
                ratio, step, measured, number = min(pairs)
                row = row._replace(measured=measured, its=number, ratio=ratio)
            rows.append(row._replace(line=f"codec {codec}, {int(numel):,} values: {step}"))
    return rows


def shaped(content: Mapping[str, Any]) -> list[Row]:
    """Rounds over slow links, in units of what the links allow; and the others on the same links."""
    rows = []
    for mine in content["rows"]:
        if mine["name"] != "shoal":
            continue
        links = (mine["loss"], mine["compression"])
        links_are = "simulated slow links" if content.get("simulated") else "slow links"
        title = f"{links_are}, {mine['loss']:.0%} lost, {mine['compression']}: round / what they allow"
        whole = mine["round / allowed"]["median"] if "round / allowed" in mine else math.inf
        rows.append(Row(title, whole, bar=at_most(1.5 if mine["loss"] else 1.15)))
        for its in content["rows"]:
            if (its["loss"], its["compression"]) != links or its is mine:
                continue
            row = Row(title, whole, beside=its["name"])
            if pairs := [(a["whole_s"], b["whole_s"]) for a, b in paired(mine["all"], its["all"])]:
                row = row._replace(its=its["round / allowed"]["median"], ratio=Spread.of(b / a for a, b in pairs))
            rows.append(row)
    return rows


def beside(content: Mapping[str, Any]) -> list[Row]:
    """How many times as long the loop and the round take together, in one process; and what that is elsewhere."""
    rows = []
    for loop, each in content["results"].items():
        mine = each["shoal"]
        for field, what in (("loop_slowdown", "the loop takes"), ("round_slowdown", "the round takes")):
            if field in mine:
                row = Row(f"{loop} loop beside a round: {what}", mine[field]["median"], "times")
                others = {name: its[field]["median"] for name, its in each.items() if field in its and its is not mine}
                rows += [row._replace(beside=name, its=its) for name, its in others.items()] or [row]
    return rows


def growth(content: Mapping[str, Any]) -> list[Row]:
    """Messages of one peer with the fewest and the most peers."""
    rows = []
    kinds = dict.fromkeys((row["where"], row["what"]) for row in content["rows"])
    for where, what in kinds:
        line = sorted((r["peers"], r["messages"]) for r in content["rows"] if (r["where"], r["what"]) == (where, what))
        (few, first), (many, last) = line[0], line[-1]
        title = f"{what}, {where}: messages of a peer, {many:,} peers"
        rows.append(Row(title, last, "", f"{few} peers", first))
    return rows


def lossy(content: Mapping[str, Any]) -> list[Row]:
    """The loss at the end, times that of float32. With 8 bits and with 4 bits and feedback there is a bar."""
    bars = {"8bit": at_most(1.005), "blockwise:8:": at_most(1.005), "feedback:blockwise:4:": at_most(1.01)}
    rows = []
    for each in content["results"]:
        bar = next((bar for name, bar in bars.items() if name in each["codec"]), None)
        title = f"loss, {each['what']} with {each['codec']}: times float32's"
        rows.append(Row(title, statistics.fmean(each["ratios"]), bar=bar))
    return rows


def optimizer_overhead(content: Mapping[str, Any]) -> list[Row]:
    """`shoal.Optimizer` alone, and its floor, against plain torch."""
    bars = {"demo": at_least(0.97), "wide": at_least(0.92)}
    rows = []
    for name, each in content.items():
        how = f"{name}, freed memory kept" if each["keeps_memory"] else name
        for what, key, prefix in (("a step", "shoal", ""), ("its floor", "floor", "floor_")):
            speed, cpu = (Spread(*(each[f"{prefix}{ratio}{end}"] for end in ("", "_low", "_high"))) for ratio in RATIOS)
            title, bar = f"optimizer alone, {how}: {what}", None if prefix else bars.get(name)
            rows.append(Row(title, each[f"{key}_step_s"], "s", "plain torch", each["plain_step_s"], speed, bar))
            title += ", by processor time"
            rows.append(Row(title, each[f"{key}_cpu_s"], "s", "plain torch", each["plain_cpu_s"], cpu))
    return rows


def many_tensors(content: Mapping[str, Any]) -> list[Row]:
    """What a small tensor costs in an epoch of one peer, against a step of plain torch."""
    return [
        Row(
            f"{int(count):,} small tensors, {name}: each", each[key] * 1e-6, "s", "plain torch", each["plain_us"] * 1e-6
        )
        for count, each in content.items()
        for name, key in (("a peer alone", "alone_us"), ("two peers", "two_us"))
    ]


def time_to_loss(content: Mapping[str, Any]) -> list[Row]:
    """Seconds until a swarm has learned, and what a step takes beyond the all-reduce; a run may never come there."""
    rows, runs = [], content["runs"]
    for case in content["cases"]:
        turns: dict[str, dict[int, float]] = {}
        for each in (each for each in runs if each["case"] == case):
            turns.setdefault(each["library"], {})[each["turn"]] = each.get("seconds", math.inf)
        seconds = {
            name: [each if (each := found.get(turn, math.inf)) < math.inf else None for turn in sorted(turns["shoal"])]
            for name, found in turns.items()
        }
        mine = [each for each in seconds["shoal"] if each is not None]
        if not mine:
            raise ValueError(f"shoal did not come to the loss in the case {case!r}")
        title = "4 peers in churn" if case == "churn" else f"{case} peer{'' if case == '1' else 's'}"
        rows += against(Row(f"time to a loss, {title}", statistics.median(mine), "s"), seconds, {})
    for which in ("median", "worst"):
        lags: dict[str, list[float]] = {}
        for each in runs:
            lags.setdefault(each["library"], []).extend(lag[which] for lag in each.get("lags", ()))
        if mine := lags["shoal"]:
            row = Row(
                f"a step of 4 peers beyond the all-reduce, {which} peer",
                statistics.median(mine),
                "s",
                bar=at_most(0.05),
            )
            its = lags.get("hivemind")
            rows.append(row._replace(beside="hivemind", its=statistics.median(its)) if its else row)
    return rows


def optimizer_memory(content: Mapping[str, Any]) -> list[Row]:
    """Live tensors of a peer; the bar is for float32 without a codec."""
    return [
        Row(
            f"live tensors of a peer, {name}",
            each["peer"],
            "bytes per parameter",
            bar=at_most(28.01) if name == "float32" else None,
        )
        for name, each in content.items()
    ]


def drift(content: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Parameters with another arithmetic; the bars are the bounds of the check between peers."""
    return [
        Row(
            f"drift of parameters, {each['case']}, {each['way']} against native, {each['steps']} steps",
            each["relative"],
            bar=at_most(0.01 if "16" in each["case"] else 1e-5),
        )
        for each in content
    ]


def zero(content: Mapping[str, Any]) -> list[Row]:
    """`shoal.zero` beside the best of PyTorch's engines that send as many bytes, and of those of the same stage."""
    rows = []
    engines = [each for each in content["engines"] if each["engine"].startswith("shoal")]
    for each in engines:
        line = f"ZeRO stage {each['engine'][-1]}, {each['ranks']} ranks"
        rows.append(Row(f"{line}: bytes sent to the law", each["sent"] / each["law"], bar=at_most(1.01)))
        for what, field, unit in (("a step", "time", "s"), ("peak memory", "peak", "MiB")):
            mine = each["seconds"]["median"] if field == "time" else each["peak"] / (1 << 20)
            for kind, bar in (("bytes", at_least(1 / 1.1)), ("stage", None)):
                ratio = each[f"{field}_to_best_of_{kind}"]
                if ratio is not None:
                    beside = f"best of the same {kind}"
                    turns = each.get(f"{field}s_to_best_of_{kind}", [ratio])
                    spread = Spread(1 / ratio, 1 / max(turns), 1 / min(turns))
                    rows.append(Row(f"{line}: {what}", mine, unit, beside, mine / ratio, spread, bar))
    return rows


def transport(content: Mapping[str, Any]) -> list[Row]:
    """One connection."""
    return [Row("one connection, one way", content["median"]["mb_per_s"], "MB/s")]


def dht_sim(content: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Row]:
    """Hops, and what is found after a crash."""
    content = [content] if isinstance(content, Mapping) else content  # a file of one line
    rows = [Row(f"DHT, {each['nodes']} simulated nodes: hops", each["hops"]) for each in content]
    last = content[-1]
    return [*rows, Row(f"… found after half of {last['nodes']} crashed", last["found_after_crash"])]


def moshpit_sim(content: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Row]:
    """The variance after the first round against the law."""
    content = [content] if isinstance(content, Mapping) else content  # a file of one line
    return [
        Row(
            f"{each['way']} groups, {each['crash']:.0%} crash: variance left",
            each["ratio"],
            "",
            "the law",
            each["theory"],
        )
        for each in content
        if each["round"] == 1
    ]


def cost(content: Mapping[str, Any]) -> list[Row]:
    """CPU-seconds beside what must be paid, seconds beside the floor, and bytes touched."""
    rows, paid = [], content["sizes"][0]["cpu_s_per_gib"]
    for suffix, must in (("", "memcpy + crypto + sockets"), (", clear", "memcpy + sockets")):
        for name in ("connections", "floor", "round"):
            if mine := paid.get(name + suffix):
                row = Row(f"CPU-s per GiB: {name}{suffix}", mine["median"], "CPU-s", must, paid[must]["median"])
                rows.append(row)
    for size in content["sizes"]:
        rows += [Row(f"{size['title']}: {what}", each["median"]) for what, each in size["quotients"].items()]
    return [*rows, Row("bytes touched in a round, of the vector", content["touched_in_all"], "times")]
