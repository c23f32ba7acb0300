"""Does it last? ``python -m benchmarks.soak --peers 8 --minutes 15 --every 5``.

Real peers, processes of their own, average in a loop over loopback with TLS; every few seconds one of them is killed
(SIGKILL, drawn at random) and a new one started. The first two are never killed: they are the witnesses, whose memory,
threads and descriptors are watched. Each minute prints the rounds, those that failed by reason, and the witnesses.

The verdict, and exit code 1, against

- a leak: medians of the witnesses' second and last quarter of the time differ by more than 16 MiB and 5%, by more than
  2 threads, or by more than 16 descriptors and a quarter;
- a hang: a step that takes longer than its timeout and 15 s, or a peer that says nothing for as long;
- a failed round without a reason; two different averages of one round; a peer that ends by itself; an internal error.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any, NamedTuple

import shoal

WITNESSES = 2
PATIENCE_S = 15.0
START_S = 180.0
"""Until a new peer has imported torch and joined, where many processes share few cores."""

MIB = 1 << 20


class Sample(NamedTuple):
    """What a process uses at one moment."""

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
        self.name, self.samples, self.heard_s, self.ready = name, list[Sample](), time.monotonic(), False
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
            self.heard_s, self.ready = time.monotonic(), True
            self._book.note(self.name, said, self._limit_s)

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
        if silent_s > (self._limit_s + PATIENCE_S if self.ready else START_S):
            return f"{self.name} has said nothing for {silent_s:.0f} s"
        return None


def leaks(peer: Peer) -> list[str]:
    """What grew at a witness."""
    quarter = len(peer.samples) // 4
    if quarter < 3:
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


def slope(peer: Peer) -> float:
    """Growth of memory since the second quarter, MiB per minute."""
    samples = peer.samples[len(peer.samples) // 4 :]
    if len(samples) < 3 or samples[0].at_s == samples[-1].at_s:
        return 0.0
    fit = statistics.linear_regression([each.at_s for each in samples], [each.memory for each in samples])
    return fit.slope * 60 / MIB


def report(minute: float, book: Book, peers: list[Peer], kills: int) -> tuple[int, Counter[str]]:
    """Print what happened since the last time."""
    rounds, failed, sizes, took = book.take()
    tail = f", p50 {statistics.median(took):.2f} s, longest {max(took):.2f} s" if took else ""
    print(f"{minute:5.1f} min: {rounds['good']} steps succeeded{tail}, {rounds['failed']} failed; {kills} kills so far")
    print(f"           groups of {', '.join(f'{size}: {count}' for size, count in sorted(sizes.items()))}")
    for reason, count in failed.most_common():
        print(f"           {count} x {reason}")
    for peer in peers[:WITNESSES]:
        last = peer.samples[-1]
        print(
            f"           {peer.name}: {last.memory / MIB:.0f} MiB ({slope(peer):+.2f} MiB/min), "
            f"{last.threads} threads, {last.descriptors} descriptors",
            flush=True,
        )
    return rounds["good"], failed


def play(args: argparse.Namespace) -> list[str]:
    """The whole run; returns what was wrong."""
    rng, book, wrong = random.Random(args.seed), Book(), list[str]()
    good, reasons = 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as logs, shoal.DHT(start=True) as meeting:
        address = str(meeting.get_visible_maddrs()[0])
        peers = [Peer(f"witness{i}", args, address, book, Path(logs)) for i in range(WITNESSES)]
        peers += [Peer(f"peer{i}", args, address, book, Path(logs)) for i in range(WITNESSES, args.peers)]
        pause = threading.Event()
        while not all(peer.ready or peer.trouble() for peer in peers):
            pause.wait(0.5)
        began = time.monotonic()
        next_kill, next_report, kills = args.every, 60.0, 0
        try:
            while (now := time.monotonic() - began) < args.minutes * 60 and not wrong:
                pause.wait(0.5)
                wrong += [trouble for peer in peers if (trouble := peer.trouble()) is not None]
                if wrong:
                    break
                for peer in peers[:WITNESSES]:
                    peer.samples.append(Sample.of(peer.process.pid, now))
                if now >= next_kill:
                    next_kill += args.every
                    kills += 1
                    place = rng.randrange(WITNESSES, len(peers))
                    peers[place].end()
                    peers[place] = Peer(f"peer{args.peers + kills}", args, address, book, Path(logs))
                if now >= next_report:
                    next_report += 60.0
                    counted, failed = report(now / 60, book, peers, kills)
                    good, reasons = good + counted, reasons + failed
            counted, failed = report((time.monotonic() - began) / 60, book, peers, kills)
            good, reasons = good + counted, reasons + failed
            wrong += [leak for peer in peers[:WITNESSES] for leak in leaks(peer)]
        finally:
            for peer in peers:
                peer.end()
    print(f"in all: {good} steps succeeded, {reasons.total()} failed, {kills} kills; reasons: {dict(reasons)}")
    return wrong + book.wrong + ([] if good else ["no step succeeded at all"])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8, help="at a time, at least 3")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--numel", type=int, default=250_000, help="float32 values that are averaged")
    parser.add_argument("--timeout", type=float, default=30.0, help="of one step, seconds")
    parser.add_argument("--seed", type=int, default=1, help="decides who is killed")
    args = parser.parse_args()
    if args.peers <= WITNESSES:
        parser.error(f"--peers must be more than {WITNESSES}")
    wrong = play(args)
    for line in wrong:
        print(f"WRONG: {line}")
    print("verdict: " + ("it does not last" if wrong else "nothing leaked, nothing hung, every failure has a reason"))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
