"""Does it last? ``python -m benchmarks.soak --peers 8 --minutes 15 --every 5``.

Real peers, processes of their own, average in a loop over loopback with TLS; every few seconds one of them, drawn at
random, is killed (SIGKILL) and a new one started. One more peer is never killed: the observer. Memory, threads and
descriptors of all are sampled twice a second, for as long as each of them lives. Each minute prints the rounds, those
that failed by reason, and what grew.

The verdict, and exit code 1, against

- a leak: the observer's memory grows by more than 0.5 MiB a minute (a straight line through its samples, the first
  quarter of the run left out), or that of the others by more than 3 MiB a minute (one slope for all, each compared with
  itself, the first 30 s of each left out: their lives are short, and memory comes and goes by some MiB with the parts
  on their way); or medians of the second and the last quarter of any life differ by more than 16 MiB and 5%, by more
  than 2 threads, or by more than 16 descriptors and a quarter;
- a hang: a step that takes longer than its timeout and 15 s, or a peer that says nothing for as long;
- a failed round without a reason; two different averages of one round; a peer that ends by itself; an internal error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shoal

OBSERVER_MIB, OTHERS_MIB = 0.5, 3.0
"""How much memory may grow in a minute."""

SETTLED_S = 30.0
"""In its first seconds a process grows: its flight recorder fills, its connections get their buffers."""

PATIENCE_S = 15.0
START_S = 180.0
"""Until a new peer has imported torch and joined, where many processes share few cores."""

MIB = 1 << 20


class Sample(NamedTuple):
    """What a process uses at one moment; `at_s` is its age since it was ready."""

    at_s: float
    memory: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int, at_s: float) -> Sample:
        """Read it from /proc."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(at_s, int(status["VmRSS"].split()[0]) << 10, int(status["Threads"]), descriptors)


class Book:
    """What all peers said; written by their readers' threads."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.rounds: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()
        self.took: list[float] = []
        self.digests: OrderedDict[str, str] = OrderedDict()
        self.wrong: list[str] = []

    def note(self, peer: str, said: dict[str, Any], limit_s: float) -> None:
        """One line of one peer."""
        with self.guard:
            if "round" in said:
                self.rounds["good"] += 1
                self.sizes[said["size"]] += 1
                self.took.append(said["took"])
                if self.digests.setdefault(said["round"], said["digest"]) != said["digest"]:
                    self.wrong.append(f"{peer}: another average of round {said['round']}")
                while len(self.digests) > 1000:
                    self.digests.popitem(last=False)
            elif "failed" in said:
                self.rounds["failed"] += 1
                self.failed[said["failed"]] += 1
                if not said["failed"].strip():
                    self.wrong.append(f"{peer}: a round failed without a reason")
            elif re.match(r"[^:]*: [A-Z][A-Za-z]*(Error|Exception)\b", said.get("warned", "")):
                self.wrong.append(f"{peer}: internal error: {said['warned']}")
            if said.get("took", 0.0) > limit_s:
                self.wrong.append(f"{peer}: a step took {said['took']:.1f} s")

    def take(self) -> tuple[Counter[str], Counter[str], Counter[int], list[float]]:
        """What came since the last time."""
        with self.guard:
            taken = self.rounds, self.failed, self.sizes, self.took
            self.rounds, self.failed, self.sizes, self.took = Counter(), Counter(), Counter(), []
        return taken


class Peer:
    """One process."""

    def __init__(self, name: str, args: argparse.Namespace, address: str, book: Book, logs: Path) -> None:
        self.name, self.samples, self.heard_s = name, list[Sample](), time.monotonic()
        self.ready_s: float | None = None
        self.log = logs / f"{name}.log"
        command = [sys.executable, "-m", "benchmarks.contenders.soak_peer", address, str(args.numel), str(args.timeout)]
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._limit_s = args.timeout + PATIENCE_S
        self._book = book
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            try:
                said = json.loads(line)
            except ValueError:
                continue  # killed in the middle of a line
            self.heard_s = time.monotonic()
            self.ready_s = self.ready_s or self.heard_s
            self._book.note(self.name, said, self._limit_s)

    def sample(self) -> None:
        """Note what it uses, once it is there."""
        if self.ready_s is not None:
            with contextlib.suppress(OSError):  # it has just ended, which `trouble` will tell
                self.samples.append(Sample.of(self.process.pid, time.monotonic() - self.ready_s))

    def end(self) -> None:
        """Kill it, and leave nothing of it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def trouble(self) -> str | None:
        """What is wrong with it, if something is."""
        if self.process.poll() is not None:
            return f"{self.name} ended by itself with {self.process.returncode}: {self.log.read_text()[-2000:]}"
        silent_s = time.monotonic() - self.heard_s
        if silent_s > (START_S if self.ready_s is None else self._limit_s + PATIENCE_S):
            return f"{self.name} has said nothing for {silent_s:.0f} s"
        return None


def leaks(peer: Peer) -> list[str]:
    """What grew in its life."""
    quarter = len(peer.samples) // 4
    if quarter < 3 or peer.samples[quarter].at_s < SETTLED_S:
        return []
    early, late = peer.samples[quarter : 2 * quarter], peer.samples[-quarter:]
    found = []
    for what, allowed, share, unit in (
        ("memory", 16 * MIB, 0.05, MIB),
        ("threads", 2, 0, 1),
        ("descriptors", 16, 0.25, 1),
    ):
        before, after = (statistics.median(getattr(sample, what) for sample in some) for some in (early, late))
        if after - before > allowed + share * before:
            found.append(f"{peer.name}: {what} grew from {before / unit:.0f} to {after / unit:.0f}")
    return found


def growth(lives: Iterable[Sequence[Sample]]) -> float:
    """How memory grows with age, MiB per minute: one slope for all, each life with a level of its own."""
    both = ages = 0.0
    for samples in lives:
        if samples:
            age = statistics.fmean(sample.at_s for sample in samples)
            memory = statistics.fmean(sample.memory for sample in samples)
            both += sum((sample.at_s - age) * (sample.memory - memory) for sample in samples)
            ages += sum((sample.at_s - age) ** 2 for sample in samples)
    return 60 / MIB * both / ages if ages else 0.0


class Soak:
    """One run.

    Attributes:
        observer: the peer that is never killed.
        peers: those that are.
        dead: those that were.
        wrong: what must not be, and was.
    """

    def __init__(self, args: argparse.Namespace, address: str, logs: Path) -> None:
        self._args, self._address, self._logs = args, address, logs
        self._rng = random.Random(args.seed)
        self._book = Book()
        self._good, self._reasons = 0, Counter[str]()
        self.wrong: list[str] = []
        self.dead: list[Peer] = []
        self.observer = self._start("observer")
        self.peers = [self._start(f"peer{number}") for number in range(args.peers)]

    def _start(self, name: str) -> Peer:
        return Peer(name, self._args, self._address, self._book, self._logs)

    @property
    def everybody(self) -> list[Peer]:
        """The live peers."""
        return [self.observer, *self.peers]

    def play(self) -> None:
        """All of it, up to the first thing that is wrong."""
        args, pause = self._args, threading.Event()
        while not all(peer.ready_s or peer.trouble() for peer in self.everybody):
            pause.wait(0.5)
        began = time.monotonic()
        next_kill, next_report = args.every, 60.0
        while (now := time.monotonic() - began) < args.minutes * 60 and not self.wrong:
            pause.wait(0.5)
            self.wrong += [trouble for peer in self.everybody if (trouble := peer.trouble()) is not None]
            for peer in self.everybody:
                peer.sample()
            if now >= next_kill and not self.wrong:
                next_kill += args.every
                self._kill(self._rng.randrange(len(self.peers)))
            if now >= next_report:
                next_report += 60.0
                self._report(now / 60)
        self._report((time.monotonic() - began) / 60)
        self._judge()

    def _kill(self, place: int) -> None:
        self.peers[place].end()
        self.dead.append(self.peers[place])
        self.peers[place] = self._start(f"peer{len(self.peers) + len(self.dead) - 1}")

    def _growth(self) -> tuple[float, float]:
        """The observer's and the others', MiB per minute."""
        watched = self.observer.samples
        lives = ([each for each in peer.samples if each.at_s >= SETTLED_S] for peer in [*self.dead, *self.peers])
        return growth([watched[len(watched) // 4 :]]), growth(lives)

    def _report(self, minute: float) -> None:
        """Print what happened since the last time."""
        rounds, failed, sizes, took = self._book.take()
        self._good, self._reasons = self._good + rounds["good"], self._reasons + failed
        tail = f", p50 {statistics.median(took):.2f} s, longest {max(took):.2f} s" if took else ""
        print(
            f"{minute:5.1f} min: {rounds['good']} steps succeeded{tail}, {rounds['failed']} failed; "
            f"{len(self.dead)} kills so far"
        )
        print(f"           groups of {', '.join(f'{size}: {count}' for size, count in sorted(sizes.items()))}")
        for reason, count in failed.most_common():
            print(f"           {count} x {reason}")
        mine, others = self._growth()
        for last in self.observer.samples[-1:]:
            print(
                f"           observer: {last.memory / MIB:.0f} MiB ({mine:+.2f} MiB/min), {last.threads} threads, "
                f"{last.descriptors} descriptors; the others {others:+.2f} MiB/min",
                flush=True,
            )

    def _judge(self) -> None:
        lives = [self.observer, *self.dead, *self.peers]
        self.wrong += [leak for peer in lives for leak in leaks(peer)]
        for who, grown, bar in zip(("observer", "others"), self._growth(), (OBSERVER_MIB, OTHERS_MIB), strict=True):
            if grown > bar:
                self.wrong.append(f"memory of the {who} grows by {grown:.2f} MiB a minute, the bar is {bar}")
        self.wrong += self._book.wrong + ([] if self._good else ["no step succeeded at all"])
        ages = sorted(sample.at_s for peer in lives[1:] for sample in peer.samples[-1:]) or [0.0]
        print(
            f"in all: {self._good} steps succeeded, {self._reasons.total()} failed, {len(self.dead)} kills; "
            f"reasons: {dict(self._reasons)}; lives of {statistics.median(ages):.0f} s (median) to {ages[-1]:.0f} s"
        )

    def end(self) -> None:
        """Kill what lives."""
        for peer in self.everybody:
            peer.end()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8, help="that may be killed, at a time; at least 1")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--numel", type=int, default=250_000, help="float32 values that are averaged")
    parser.add_argument("--timeout", type=float, default=30.0, help="of one step, seconds")
    parser.add_argument("--seed", type=int, default=1, help="decides who is killed")
    args = parser.parse_args()
    if args.peers < 1:
        parser.error("--peers must be 1 or more")
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as logs, shoal.DHT(start=True) as meeting:
        soak = Soak(args, str(meeting.get_visible_maddrs()[0]), Path(logs))
        try:
            soak.play()
        finally:
            soak.end()
    for line in soak.wrong:
        print(f"WRONG: {line}")
    verdict = "it does not last" if soak.wrong else "nothing leaked, nothing hung, every failure has a reason"
    print(f"verdict: {verdict}")
    sys.exit(1 if soak.wrong else 0)


if __name__ == "__main__":
    main()
