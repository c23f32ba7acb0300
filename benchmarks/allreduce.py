"""Averaging side by side: ``python -m benchmarks.allreduce --against hivemind,gloo,transport``.

Every peer is a process with one torch thread, on loopback. All contenders are connected at the beginning and stay so;
in each round they take turns, one measures while the others are idle, so that whatever else the machine does hits all
alike. After every round the values are compared with the mean. Printed are medians, with the range in brackets:

- *all-reduce*: from the moment the group is known until the averaged values are in place, of the slowest peer;
- *MB/s per peer*: 2 (N - 1) / N x uncompressed size / that time, what each peer must at least send (and receive);
- *matchmaking*: from the last peer's call until the last peer knows its group;
- *whole round*: from the last peer's call until the last one has returned;
- *CPU s*: of all processes of all peers, per round;
- *times shoal*: this contender's all-reduce (and whole round) divided by shoal's of the same turn.

Contenders: `hivemind` 1.1.12 from an environment of its own (``python3 -m venv DIR``, then ``DIR/bin/pip install
torch==2.13.0``, then ``DIR/bin/pip install hivemind==1.1.12 "numpy<2.4" bitsandbytes==0.50.2``, of which only the
blockwise codec needs bitsandbytes; give ``--hivemind-python DIR/bin/python``),
`gloo` of torch.distributed (no encryption), `transport`, shoal's connections alone (the same bytes between the same
peers, nothing added up), `floor`, these with the work on the numbers that a round cannot do without, and of shoal, its
transport and the floor without encryption `clear`, `clear_transport` and `clear_floor`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
CONTENDERS = ("shoal", "hivemind", "gloo", "transport", "floor", "clear", "clear_transport", "clear_floor")
CODECS = ("none", "float16", "uniform8bit", "quantile8bit", "blockwise")
START_S, ROUND_S, STOP_S = 60.0, 90.0, 5.0
MISSED = 3
"""Exit code: measured to the end, but something is not as it should be. A traceback ends Python with 1."""


def process_s(pid: int) -> float:
    """CPU seconds of a process so far, by its clock on Linux (clock_getcpuclockid); `/proc` counts in ticks of 10 ms.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(~pid << 3 | 2)


class Round(NamedTuple):
    """One round of one contender; seconds."""

    allreduce_s: float
    matchmaking_s: float
    whole_s: float
    cpu_s: float


class Place(NamedTuple):
    """Where a peer runs: what its command begins with, and the address that it listens on."""

    command: tuple[str, ...] = ()
    host: str = "127.0.0.1"


class ContenderFailed(Exception):
    """A peer said so, did not answer in time, or ended."""


class Peer:
    """A child process, spoken to as `contenders.worker` says. It leads a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self.log = process, log

    @classmethod
    async def start(
        cls, name: str, python: str, rank: int, args: argparse.Namespace, logs: Path, place: Place | None = None
    ) -> Peer:
        place = place or Place()
        options = [f"--rank={rank}", f"--peers={args.peers}", f"--numel={args.numel}", f"--host={place.host}"]
        options.append(f"--compression={args.compression}")
        if args.part_bytes:
            options.append(f"--part-bytes={args.part_bytes}")
        options += getattr(args, "options", [])
        kind = name.removeprefix("clear").removeprefix("_") or "shoal"
        if name.startswith("clear"):
            options.append("--clear")
        log = logs / f"{name}-{args.compression}-{rank}.log"
        sources = getattr(args, "sources", SOURCES)
        return await cls.spawn(python, f"{kind}_peer", options, log, place.command, sources=sources)

    @classmethod
    async def spawn(
        cls,
        python: str,
        module: str,
        options: Sequence[str],
        log: Path,
        command: Sequence[str] = (),
        *,
        sources: Path = SOURCES,
    ) -> Peer:
        """Start `benchmarks.contenders.MODULE`, with one torch thread.

        Args:
            command: what starts it elsewhere.
            sources: where it finds shoal.
        """
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{sources}",
        }
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(*command, python, "-m", f"benchmarks.contenders.{module}", *options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=1 << 24,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        _keep_priority(process.pid)
        return cls(process, log)

    async def ask(self, do: str, timeout_s: float, **more: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
                await self.process.stdin.drain()
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise ContenderFailed(f"no answer to {do!r} within {timeout_s:g} s; {self.last_words()}") from None
        except OSError as error:
            raise ContenderFailed(f"{error}; {self.last_words()}") from None
        if not line:
            raise ContenderFailed(f"a peer ended; {self.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderFailed(str(answer["error"]))
        return answer

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"its last words: {lines[-1]!r}" if lines else "it printed nothing"

    async def stop(self) -> None:
        """Let it leave, then kill whatever is left of it and of its children."""
        with contextlib.suppress(ContenderFailed):
            if self.process.returncode is None:
                await self.ask("stop", STOP_S)
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.end()

    async def end(self) -> None:
        """Kill whatever is left of it and of its children."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def _keep_priority(pid: int) -> None:
    """Give a new session the priority of this one: Linux shares the processors among sessions, each with its own."""
    ours, theirs = (Path(f"/proc/{each}/autogroup") for each in ("self", pid))
    with contextlib.suppress(OSError):  # where there is no such thing, or we may not
        if nice := int(ours.read_text(encoding="ascii").split()[-1]):
            theirs.write_text(f"{nice}", encoding="ascii")


class Contender:
    """All peers of one library."""

    def __init__(self, name: str, peers: list[Peer]) -> None:
        self.name, self.peers = name, peers
        self.rounds: list[Round | None] = []
        self.answers: list[dict[str, Any]] = []
        self.failure: str | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        args: argparse.Namespace,
        logs: Path,
        places: Sequence[Place] | None = None,
        *,
        join: bool = True,
    ) -> Contender:
        """Start the peers, and unless told otherwise let them join each other."""
        python = args.hivemind_python if name.startswith("hivemind") else sys.executable
        places = places or [Place()] * args.peers
        started = [await Peer.start(name, python, rank, args, logs, place) for rank, place in enumerate(places)]
        self = cls(name, started)
        if join:
            try:
                await self.join()
            except ContenderFailed as error:
                self.failure = str(error)
        return self

    async def join(self) -> None:
        """Let the peers find each other, and make what averages."""
        answers = await self.ask_all("start", START_S)
        await self.ask_all("join", START_S, invites=[answer["invite"] for answer in answers])

    async def ask_all(
        self, do: str, timeout_s: float, last: dict[str, Any] | None = None, /, **more: Any
    ) -> list[dict[str, Any]]:
        """Ask all peers the same; the last one is told `last`, too."""
        extra: list[dict[str, Any]] = [{} for _ in self.peers[1:]] + [last or {}]
        asked = (peer.ask(do, timeout_s, **more, **its) for peer, its in zip(self.peers, extra, strict=True))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if failures := [str(answer) for answer in answers if isinstance(answer, ContenderFailed)]:
            raise ContenderFailed("; ".join(dict.fromkeys(failures)))
        return [answer for answer in answers if isinstance(answer, dict)]

    async def measure(self, number: int) -> Round:
        """One round, checked."""
        await self.ask_all("fill", ROUND_S, round=number)
        result = await self.average(number)
        await self.check(number)
        return result

    async def average(self, number: int, last: dict[str, Any] | None = None) -> Round:
        """Average once. What the peers said of it is in `answers`; the last one is told `last`, too."""
        before = self.cpu_s()
        times = self.answers = await self.ask_all("average", ROUND_S, last, round=number)
        last_call = max(each["called"] for each in times)
        return Round(
            allreduce_s=max(each["done"] - each["formed"] for each in times),
            matchmaking_s=max(0.0, max(each["formed"] for each in times) - last_call),
            whole_s=max(each["done"] for each in times) - last_call,
            cpu_s=self.cpu_s() - before,
        )

    async def check(self, number: int) -> None:
        """Compare what all have with the mean."""
        checks = await self.ask_all("check", ROUND_S, round=number)
        if wrong := [each["wrong"] for each in checks if each["wrong"]]:
            raise ContenderFailed(wrong[0])

    async def turn(self, number: int, *, counts: bool) -> None:
        """One round, of which a failure is remembered. A contender that does not answer any more is out."""
        if self.failure is not None:
            return
        result = None
        try:
            result = await self.measure(number)
        except ContenderFailed as error:
            print(f"  {self.name}, round {number}: {error}", file=sys.stderr, flush=True)
            self.failed(error)
        if counts:
            self.rounds.append(result)

    def failed(self, error: ContenderFailed) -> None:
        """After a failure: who does not answer any more, or has ended, is out."""
        if not all(peer.process.returncode is None for peer in self.peers) or "no answer" in str(error):
            self.failure = str(error)

    def cpu_s(self) -> float:
        """CPU seconds of our processes so far. 0 where the system does not tell."""
        sessions = {peer.process.pid for peer in self.peers}
        total = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) in sessions:
                    total += process_s(int(stat.parent.name))
        return total

    async def stop(self) -> None:
        with contextlib.suppress(ContenderFailed):
            if self.failure is None:
                await self.ask_all("stop", STOP_S)
        for peer in self.peers:
            if peer.process.stdin is not None:
                peer.process.stdin.close()
        await asyncio.gather(*(peer.end() for peer in self.peers))


async def compare(args: argparse.Namespace, names: list[str]) -> list[Contender]:
    """Run all contenders against each other."""
    contenders: list[Contender] = []
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        try:
            for name in names:
                contenders.append(await Contender.start(name, args, Path(logs)))  # noqa: PERF401 (all are stopped)
            for number in range(args.warm_up + args.rounds):
                turn = number % len(contenders)
                for contender in contenders[turn:] + contenders[:turn]:
                    await contender.turn(number, counts=number >= args.warm_up)
        finally:
            await asyncio.gather(*(contender.stop() for contender in contenders))
    return contenders


# -------------------------------------------------------------------------------------------------------------- results


def summary(contender: Contender, reference: Contender, args: argparse.Namespace) -> dict[str, Any]:
    """Medians and ranges of one contender."""
    rounds = [each for each in contender.rounds if each is not None]
    result: dict[str, Any] = {"rounds": len(rounds), "failed": len(contender.rounds) - len(rounds)}
    if contender.failure is not None:
        result["failure"] = contender.failure
    if not rounds:
        return result
    for field in Round._fields:
        result[field] = spread(getattr(each, field) for each in rounds)
    sent = 2 * (args.peers - 1) / args.peers * args.numel * 4
    result["mb_per_s_per_peer"] = spread(sent / each.allreduce_s / 1e6 for each in rounds)
    pairs = [
        (mine, its)
        for mine, its in zip(contender.rounds, reference.rounds, strict=False)
        if mine is not None and its is not None
    ]
    if pairs:
        result["allreduce_times_shoal"] = spread(mine.allreduce_s / its.allreduce_s for mine, its in pairs)
        result["whole_times_shoal"] = spread(mine.whole_s / its.whole_s for mine, its in pairs)
    return result


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


COLUMNS = {
    "all-reduce s": ("allreduce_s", "{:.3f}"),
    "MB/s per peer": ("mb_per_s_per_peer", "{:.0f}"),
    "matchmaking s": ("matchmaking_s", "{:.3f}"),
    "whole round s": ("whole_s", "{:.3f}"),
    "CPU s": ("cpu_s", "{:.2f}"),
    "all-reduce / shoal's": ("allreduce_times_shoal", "{:.2f}"),
    "round / shoal's": ("whole_times_shoal", "{:.2f}"),
}


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [["", *COLUMNS]]
    for name, result in results.items():
        rows.append(
            [name, *(cell(result[field], form) if field in result else "-" for field, form in COLUMNS.values())]
        )
    return aligned(rows)


def cell(value: dict[str, float], form: str) -> str:
    """The median, and the range in brackets."""
    low, middle, high = (form.format(value[key]) for key in ("min", "median", "max"))
    return f"{middle} [{low}-{high}]"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table for the terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def report(contenders: list[Contender], args: argparse.Namespace) -> dict[str, Any]:
    results = {each.name: summary(each, contenders[0], args) for each in contenders}
    return {
        "peers": args.peers,
        "numel": args.numel,
        "compression": args.compression,
        "part_bytes": args.part_bytes,
        "machine": {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "results": results,
        "rounds": {each.name: [one and one._asdict() for one in each.rounds] for each in contenders},
    }


def exit_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl+C does: what it started is stopped, what it wrote for itself removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def write(path: Path, content: dict[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--numel", type=int, default=10_000_000, help="float32 values that are averaged")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--against", default="", help=f"with commas, any of {', '.join(CONTENDERS[1:])}")
    parser.add_argument("--hivemind-python", metavar="PATH", help="the Python of an environment with hivemind 1.1.12")
    parser.add_argument("--compression", choices=CODECS, default="none", help="of each library its own")
    parser.add_argument("--part-bytes", type=int, help="shoal's (and the transport's) part size instead of the default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    names = ["shoal", *filter(None, args.against.split(","))]
    if unknown := set(names) - set(CONTENDERS):
        parser.error(f"--against: unknown {', '.join(sorted(unknown))}")
    if args.peers < 2 or args.rounds < 1 or args.numel < args.peers:
        parser.error("at least 2 peers, 1 round, and as many values as peers")
    if "hivemind" in names and not args.hivemind_python:
        parser.error("--against hivemind needs --hivemind-python PATH (the module's docstring says how to make one)")
    if args.compression != "none" and "gloo" in names:
        parser.error("gloo does not compress: leave it out, or --compression none")
    return args, list(dict.fromkeys(names))


def main() -> int:
    args, names = parse()
    exit_on_sigterm()
    print(
        f"{args.peers} peers, {args.numel:,} float32 ({args.numel * 4 / 1e6:.1f} MB), compression {args.compression}, "
        f"{args.rounds} rounds; {processor()}, {os.cpu_count()} cores",
        flush=True,
    )
    contenders = asyncio.run(compare(args, names))
    content = report(contenders, args)
    print(table(content["results"]))
    for name, result in content["results"].items():
        if result["failed"] or "failure" in result:
            print(f"{name}: {result['failed']} rounds failed; {result.get('failure', '')}")
    if args.json:
        write(args.json, content)
    return 0 if content["results"]["shoal"]["rounds"] == args.rounds else MISSED


if __name__ == "__main__":
    sys.exit(main())
