"""State download between real processes on loopback: ``python -m benchmarks.state_download --megabytes 400``.

Every peer is a process with one torch thread. For each number of donors the contenders (shoal, and with ``--against``
also hivemind 1.1.12, see `benchmarks.allreduce` for its environment, and `floor`: what shoal's connections and passes
over memory alone take, `contenders.floor_state`, from one donor) are started together and take turns: one newcomer
downloads the state, the values are compared, and it ends. Printed are medians, with the range in brackets:

- *MB/s*: size of the state / time of `load_state_from_peers`; with ``--fresh`` each run begins after the donors' copies
  were freed, so that it includes copying and hashing;
- *donor, receiver*: peak memory of one peer's processes beyond what they had before the download, as a part of the size
  of the state (VmHWM; for several donors the largest);
- *CPU s*: of all processes, per download.

``--cap MBS`` limits the upload of each donor (shoal only). ``--newcomers N`` measures instead the rounds of 4 peers
that average ``--train-megabytes`` in a loop, without and with N newcomers that download at once, in turns; the ratio of
the medians is printed. The crowd's processes are there and connected all the time. ``--elsewhere`` gives them only
processor time that nobody else wants (almost): as if they were on machines of their own, which newcomers are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.allreduce import SOURCES, ContenderFailed, Peer, process_s, processor, write

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("hivemind", "floor")
START_S, LOAD_S, STOP_S = 60.0, 400.0, 5.0
FREED_S = 22.0
"""After this time nobody has used the donors' copies for so long that they are freed (`linger_s`, twice)."""


class Run(NamedTuple):
    """One download. Memory in bytes."""

    seconds: float
    donor_bytes: float
    receiver_bytes: float
    cpu_s: float


async def start(name: str, role: str, invites: list[str], args: argparse.Namespace, logs: Path) -> tuple[Peer, str]:
    """Start a peer and let it join; returns it and its invite."""
    log = logs / f"{name}-{role}-{time.monotonic_ns()}.log"
    options = [f"--role={role}", f"--state-bytes={int(args.megabytes * 1e6)}", f"--cap-bytes-s={args.cap * 1e6}"]
    options += [f"--train-bytes={int(args.train_megabytes * 1e6)}", f"--trainers={args.trainers}"]
    python = args.hivemind_python if name == "hivemind" else sys.executable
    sources = getattr(args, "sources", SOURCES)
    peer = await Peer.spawn(python, f"{name}_state", options, log, sources=sources)
    try:
        return peer, (await peer.ask("start", START_S, invites=invites))["invite"]
    except ContenderFailed:
        await stop([peer])
        raise


async def stop(peers: Iterable[Peer]) -> None:
    async def end(peer: Peer) -> None:
        with contextlib.suppress(ContenderFailed):
            await peer.ask("stop", STOP_S)
        if peer.process.stdin is not None:
            peer.process.stdin.close()
        await peer.end()

    await asyncio.gather(*(end(peer) for peer in peers))


# ------------------------------------------------------------------------------------------------------- what it costs


def processes(peer: Peer) -> list[Path]:
    """What /proc has of a peer's processes."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == peer.process.pid:
                found.append(stat.parent)
    return found


def memory(peer: Peer, field: str) -> float:
    """`VmRSS` or `VmHWM` of all its processes, bytes."""
    total = 0
    for each in processes(peer):
        with contextlib.suppress(OSError):
            for line in (each / "status").read_text().splitlines():
                if line.startswith(field):
                    total += int(line.split()[1]) * 1024
    return total


def forget_peak(peer: Peer) -> None:
    """Let VmHWM begin anew."""
    for each in processes(peer):
        with contextlib.suppress(OSError):
            (each / "clear_refs").write_text("5")


def cpu_s(peers: Iterable[Peer]) -> float:
    total = 0.0
    for peer in peers:
        for each in processes(peer):
            with contextlib.suppress(OSError):
                total += process_s(int(each.name))
    return total


# ---------------------------------------------------------------------------------------------------------- downloads


async def download(name: str, donors: list[Peer], invites: list[str], args: argparse.Namespace, logs: Path) -> Run:
    """One newcomer."""
    newcomer, _ = await start(name, "receiver", invites, args, logs)
    try:
        peers = [*donors, newcomer]
        for peer in peers:
            forget_peak(peer)
        before, cpu_before = [memory(peer, "VmRSS") for peer in peers], cpu_s(peers)
        answer = await newcomer.ask("load", LOAD_S)
        cpu_after, peaks = cpu_s(peers), [memory(peer, "VmHWM") for peer in peers]
        if answer["wrong"]:
            raise ContenderFailed(answer["wrong"])
        extra = [peak - at_first for peak, at_first in zip(peaks, before, strict=True)]
        return Run(answer["seconds"], max(extra[:-1]), extra[-1], cpu_after - cpu_before)
    finally:
        await stop([newcomer])


async def compare(args: argparse.Namespace, count: int) -> dict[str, list[Run | None]]:
    """All contenders with so many donors: a run for each turn, None where it failed."""
    names = [name for name in args.names if name != "floor" or count == 1]
    runs: dict[str, list[Run | None]] = {name: [] for name in names}
    donors: dict[str, list[Peer]] = {name: [] for name in names}
    invites: dict[str, list[str]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as folder:
        try:
            for name in names:
                for _ in range(count):
                    peer, invite = await start(name, "donor", invites[name][:1], args, Path(folder))
                    donors[name].append(peer)
                    invites[name].append(invite)
            for number in range(args.runs):
                for name in names if number % 2 else reversed(names):
                    if args.fresh:
                        await asyncio.sleep(FREED_S)
                    run = None
                    try:
                        run = await download(name, donors[name], invites[name][:1], args, Path(folder))
                    except ContenderFailed as error:
                        print(f"  {name}, run {number}: {error}", file=sys.stderr, flush=True)
                    runs[name].append(run)
        finally:
            await stop([peer for each in donors.values() for peer in each])
    return runs


# -------------------------------------------------------------------------------------------------------------- crowds


async def crowd(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of the trainers without and with newcomers that download."""
    pairs: list[tuple[float, float]] = []
    downloads: list[float] = []
    failed = 0
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as folder:
        trainers: list[Peer] = []
        newcomers: list[Peer] = []
        try:
            invites: list[str] = []
            for role, count, group in (("trainer", args.trainers, trainers), ("receiver", args.newcomers, newcomers)):
                for _ in range(count):
                    peer, invite = await start("shoal", role, invites[:1], args, Path(folder))
                    group.append(peer)
                    invites.append(invite)
            for newcomer in newcomers if args.elsewhere else ():
                give_way(newcomer)
            await asyncio.gather(*(trainer.ask("train", START_S) for trainer in trainers))
            await rounds(trainers, 3.0)
            for _ in range(args.runs):
                calm, failures = await rounds(trainers, args.calm)
                began = time.perf_counter()
                answers, busy, more = await during(trainers, newcomers)
                downloads.append(time.perf_counter() - began)
                failed += failures + more + sum(bool(answer["wrong"]) for answer in answers)
                pairs.append((statistics.median(calm), statistics.median(busy)))
                print(
                    f"  {len(calm)} rounds of {statistics.median(calm) * 1e3:.0f} ms, with the crowd {len(busy)} of "
                    f"{statistics.median(busy) * 1e3:.0f} ms; all downloads in {downloads[-1]:.1f} s",
                    flush=True,
                )
        finally:
            await stop([*trainers, *newcomers])
    return {"pairs": pairs, "downloads_s": downloads, "failed": failed}


def give_way(peer: Peer) -> None:
    """Let a process have little of the processor while others want it."""
    pid = peer.process.pid
    groups = Path(f"/proc/{pid}/autogroup")
    if groups.exists():  # then nice counts only within a session, and each peer leads its own
        groups.write_text("19", encoding="ascii")
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


async def rounds(trainers: list[Peer], seconds: float) -> tuple[list[float], int]:
    """The rounds of all trainers in the next seconds."""
    await asyncio.gather(*(trainer.ask("rounds", START_S) for trainer in trainers))
    await asyncio.sleep(seconds)
    answers = await asyncio.gather(*(trainer.ask("rounds", START_S) for trainer in trainers))
    return [each for answer in answers for each in answer["rounds"]], sum(answer["failed"] for answer in answers)


async def during(trainers: list[Peer], newcomers: list[Peer]) -> tuple[list[dict[str, Any]], list[float], int]:
    """The rounds while all newcomers download."""
    await asyncio.gather(*(trainer.ask("rounds", START_S) for trainer in trainers))
    loading = [asyncio.create_task(newcomer.ask("load", LOAD_S)) for newcomer in newcomers]
    await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)  # the crowd is whole until then
    answers = await asyncio.gather(*(trainer.ask("rounds", START_S) for trainer in trainers))
    loaded = await asyncio.gather(*loading)
    return loaded, [each for answer in answers for each in answer["rounds"]], sum(a["failed"] for a in answers)


# -------------------------------------------------------------------------------------------------------------- results


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    values = list(values)
    low, middle, high = (form.format(each) for each in (min(values), statistics.median(values), max(values)))
    return f"{middle} [{low}-{high}]"


def show(count: int, runs: dict[str, list[Run | None]], args: argparse.Namespace) -> None:
    size = args.megabytes * 1e6
    for name, turns in runs.items():
        each = [run for run in turns if run is not None]
        if not each:
            print(f"{count} donors  {name:10} failed")
            continue
        rates, cpu = spread((size / run.seconds / 1e6 for run in each), "{:.0f}"), spread(run.cpu_s for run in each)
        donor, receiver = (spread(getattr(run, f) / size for run in each) for f in ("donor_bytes", "receiver_bytes"))
        print(f"{count} donors  {name:10} MB/s {rates}  donor {donor}  receiver {receiver}  CPU s {cpu}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--megabytes", type=float, default=400, help="size of the state, 10^6 bytes")
    parser.add_argument("--donors", default="1,3", help="numbers of donors, with commas")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cap", type=float, default=0.0, metavar="MBS", help="upload limit of each donor, MB/s")
    parser.add_argument("--fresh", action="store_true", help="begin each run when the donors hold no copy")
    parser.add_argument("--against", default="", help=f"with commas: {', '.join(OTHERS)}")
    parser.add_argument("--hivemind-python", metavar="PATH", help="the Python of an environment with hivemind 1.1.12")
    parser.add_argument("--newcomers", type=int, default=0, help="measure rounds beside so many downloads instead")
    parser.add_argument("--elsewhere", action="store_true", help="leave the processor to the trainers")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--train-megabytes", type=float, default=4)
    parser.add_argument("--calm", type=float, default=10, help="seconds without the crowd, in each turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    args.names = ["shoal", *filter(None, args.against.split(","))]
    if unknown := set(args.names) - {"shoal", *OTHERS}:
        parser.error(f"--against: unknown {', '.join(unknown)}")
    if "hivemind" in args.names and not args.hivemind_python:
        parser.error("--against hivemind needs --hivemind-python PATH")
    if args.against and args.cap:
        parser.error("only shoal has an upload limit: leave out --against or --cap")
    return args


def main() -> int:
    args = parse()
    print(f"{args.megabytes:g} MB, {args.runs} runs; {processor()}, {os.cpu_count()} cores", flush=True)
    content: dict[str, Any] = {"megabytes": args.megabytes, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    if args.newcomers:
        content |= asyncio.run(crowd(args))
        ratio = spread(busy / calm for calm, busy in content["pairs"])
        print(
            f"{args.trainers} trainers average {args.train_megabytes:g} MB beside {args.newcomers} newcomers: "
            f"round time x {ratio}, downloads {spread(content['downloads_s'])} s, {content['failed']} failures"
        )
    else:
        args.trainers = 2
        for count in (int(each) for each in args.donors.split(",")):
            runs = asyncio.run(compare(args, count))
            show(count, runs, args)
            content[str(count)] = {name: [run and run._asdict() for run in each] for name, each in runs.items()}
            if args.json:  # what is there is not lost if the next number of donors fails
                write(args.json, content)
    if args.json:
        write(args.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
