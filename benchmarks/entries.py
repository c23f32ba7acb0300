"""What `python -m benchmarks` measures. A new benchmark is one more line of `ENTRIES`, and a function in `collect`."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import collect
from benchmarks.collect import Collector, whole_rounds
from benchmarks.rows import Row, at_least

__all__ = ["ENTRIES", "Entry"]

HIVEMIND = ("hivemind",)


def nothing(_: object) -> list[Row]:
    """No lines in the table, only the file."""
    return []


@dataclass(frozen=True)
class Entry:
    """One call of a benchmark.

    Attributes:
        name: of its file, and for ``--only``.
        call: the module within `benchmarks`, and its arguments.
        rows: makes lines of the table from what it wrote.
        against: contenders for its ``--against``; those of hivemind only where there is a Python that has it.
        quick: arguments added in a short run, which overrule those of `call`.
        codecs_of: it takes ``--hivemind-python`` without ``--against``.
        printed: its ``--json`` takes no file: it prints a JSON value, or one on each line.
        gib: memory that must be free.
    """

    name: str
    call: str
    rows: Collector = nothing
    against: tuple[str, ...] = ()
    quick: str = ""
    codecs_of: tuple[str, ...] = ()
    printed: bool = False
    gib: float = 4.0

    @property
    def module(self) -> str:
        """What is run."""
        return f"benchmarks.{self.call.split()[0]}"

    def contenders(self, hivemind_python: str | None) -> tuple[str, ...]:
        """Those that can take part here."""
        return tuple(name for name in self.against if not name.startswith("hivemind") or hivemind_python)

    def arguments(self, hivemind_python: str | None, *, quick: bool) -> list[str]:
        """All but where its JSON goes."""
        found = self.call.split()[1:] + (self.quick.split() if quick else [])
        if contenders := self.contenders(hivemind_python):
            found += ["--against", ",".join(contenders)]
        if hivemind_python and "hivemind" in self.against + self.codecs_of:
            found += ["--hivemind-python", hivemind_python]
        return found


GIB = {"shoal": (0.3, 0.0165), "transport": (0.25, 0.015), "hivemind": (0.6, 0.022)}
"""What one peer takes, and how much more for each million of values."""


def rounds(peers: int, millions: int, bar: float, count: int = 10, *against: str) -> Entry:
    """Whole rounds beside hivemind's and the transport's."""
    against = against or ("hivemind", "transport")
    bars = {"hivemind": at_least(bar), "transport": at_least(0.75)}
    return Entry(
        "_".join([f"rounds_{peers}x{millions}M", *(against if len(against) == 1 else ())]),
        f"allreduce --peers {peers} --numel {millions}_000_000 --rounds {count}",
        whole_rounds({name: found for name, found in bars.items() if name in against}),
        against,
        "--rounds 2 --warm-up 1",
        gib=peers * sum(alone + each * millions for alone, each in map(GIB.__getitem__, ("shoal", *against))),
    )


ENTRIES = (
    # whole rounds: at least 0.75 of the transport alone; 4 times hivemind with 4 and 8 peers and 10M, elsewhere 3 times
    rounds(2, 1, 3.0, 20),
    rounds(2, 10, 3.0),
    rounds(2, 50, 3.0, 5),
    rounds(4, 1, 3.0, 20),
    rounds(4, 10, 4.0),
    rounds(4, 50, 3.0, 5),
    rounds(8, 1, 3.0, 20),
    rounds(8, 10, 4.0),
    rounds(8, 50, 3.0, 3, "transport"),
    rounds(8, 50, 3.0, 3, "hivemind"),
    *(
        Entry(
            f"rounds_{name}",
            f"allreduce --peers 4 --numel 10_000_000 --compression {codec}",
            whole_rounds({"hivemind": at_least(3.0)}),
            HIVEMIND,
            "--rounds 2 --warm-up 1",
        )
        for name, codec in (
            ("uniform8bit", "uniform8bit"),
            ("quantile8bit", "quantile8bit"),
            ("blockwise8bit", "blockwise"),
        )
    ),
    Entry(
        "rounds_clear",
        "allreduce --peers 4 --numel 10_000_000",
        whole_rounds({"gloo": at_least(0.8)}, ours="clear"),
        ("clear", "clear_transport", "gloo"),
        "--rounds 2 --warm-up 1",
    ),
    Entry("slow_links", "shaped", collect.shaped, ("hivemind", "transport", "sockets"), "--rounds 1 --numel 1_000_000"),
    Entry("beside_a_loop", "beside", collect.beside, HIVEMIND, "--turns 1"),
    Entry(
        "groups", "matchmaking --peers 2,8,16 --rounds 100", collect.forming, HIVEMIND, "--peers 2 --rounds 5", gib=16.0
    ),
    Entry(
        "state_download",
        "state_download --megabytes 400",
        collect.state_download,
        ("hivemind", "floor"),
        "--runs 1",
        gib=8.0,
    ),
    Entry("dht_8", "dht --nodes 8", collect.dht, HIVEMIND, "--turns 1"),
    Entry("dht_8_like_for_like", "dht --nodes 8 --replicas 5", collect.dht, HIVEMIND, "--turns 1"),
    Entry("dht_32", "dht --nodes 32 --per-process 4", collect.dht, HIVEMIND, "--turns 1", gib=16.0),
    Entry("idle", "idle", collect.idle, HIVEMIND, "--runs 1 --window 1"),
    Entry(
        "memory",
        "memory --numel 10_000_000,40_000_000",
        collect.memory,
        quick="--numel 1_000_000,4_000_000 --many 100 --rounds 2",
        gib=6.0,
    ),
    Entry("growth", "growth", collect.growth, quick="--groups 2,4 --swarms 16,64 --rounds 2"),
    Entry("codecs", "compression", collect.codecs, quick="--turns 3", codecs_of=HIVEMIND, printed=True),
    Entry("lossy", "lossy", collect.lossy, quick="--seeds 1 --steps 20"),
    Entry("optimizer", "optimizer_overhead", collect.optimizer_overhead, quick="--pairs 15 --cases wide"),
    Entry(
        "optimizer_keeps_memory",
        "optimizer_overhead --keep-memory",
        collect.optimizer_overhead,
        quick="--pairs 15 --cases wide",
    ),
    Entry(
        "many_tensors",
        "optimizer_overhead --tensors 20_000,200_000",
        collect.many_tensors,
        quick="--tensors 2_000",
        gib=8.0,
    ),
    Entry(
        "time_to_loss",
        "optimizer --turns 1 --limit 240",
        collect.time_to_loss,
        ("hivemind", "shoal_delayed", "hivemind_delayed"),
        "--quick",
        gib=8.0,
    ),
    Entry("optimizer_memory", "optimizer_memory", collect.optimizer_memory),
    Entry("drift", "drift", collect.drift, quick="--steps 1 10"),
    Entry("zero", "zero --params 30e6 --ranks 2,4", collect.zero, quick="--params 2e6 --ranks 2 --turns 1", gib=8.0),
    Entry("transport", "transport", collect.transport, quick="--runs 1", printed=True),
    Entry("dht_simulated", "dht_sim", collect.dht_sim, quick="--nodes 100", printed=True),
    Entry(
        "moshpit_simulated", "moshpit_sim --rounds 2", collect.moshpit_sim, quick="--peers 128 --target 8", printed=True
    ),
    Entry("cost", "cost", collect.cost, quick="--sizes 2x1 --turns 1", gib=14.0),
)
