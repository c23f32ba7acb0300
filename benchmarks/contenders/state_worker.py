"""One peer of `benchmarks.state_download`, in a process of its own, told what to do by lines of JSON. Imports nothing
of shoal: it also runs in the environment of hivemind.

=========  ==========================================  =============================================================
request    meaning                                     answer
=========  ==========================================  =============================================================
start      join the peers at `invites` (none: begin)   `invite`: how others find this peer
load       download the state, and look at it          `seconds`, and `wrong`: what is wrong with it, or null
train      average in a loop from now on               nothing
rounds     what the loop has done since last asked     `rounds`: seconds of each round, `failed`: how many failed
stop       leave                                       nothing
=========  ==========================================  =============================================================

An answer may be `error` instead. The process ends when its input does, so that it never outlives the benchmark.
"""

from __future__ import annotations

import argparse
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.contenders.orders import obey

TENSORS = 10


class Options(NamedTuple):
    """What a peer is told when it is started."""

    role: str
    """donor, receiver or trainer."""

    state_bytes: int
    train_bytes: int
    trainers: int
    cap_bytes_s: float


class StatePeer(Protocol):
    """One peer of the library that is measured."""

    def start(self, invites: list[str]) -> str:
        """Join; returns how others find this peer."""
        ...

    def load(self) -> list[torch.Tensor]:
        """Download the state."""
        ...

    def average(self) -> None:
        """One round with the other trainers; raises if it fails."""
        ...

    def stop(self) -> None:
        """Leave."""
        ...


def state(nbytes: int) -> list[torch.Tensor]:
    """The state that all donors have: equal float32 tensors, no two values of one alike."""
    numel = nbytes // 4 // TENSORS
    return [torch.arange(numel, dtype=torch.float32).mul_(0.5).add_(i) for i in range(TENSORS)]


def difference(got: list[torch.Tensor], nbytes: int) -> str | None:
    """Compare without a second copy of everything."""
    numel = nbytes // 4 // TENSORS
    if len(got) != TENSORS:
        return f"{len(got)} tensors"
    for i, tensor in enumerate(got):
        for start in range(0, numel, 1 << 20):
            part = tensor[start : start + (1 << 20)]
            if not torch.equal(part, torch.arange(start, start + len(part), dtype=torch.float32).mul_(0.5).add_(i)):
                return f"tensor {i} differs"
    return None


class Training:
    """Averages again and again in a thread."""

    def __init__(self, peer: StatePeer) -> None:
        self._peer, self._lock = peer, threading.Lock()
        self._rounds: list[float] = []
        self._failed = 0
        self.going_on = True
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.going_on:
            started = time.perf_counter()
            try:
                self._peer.average()
                failed = False
            except Exception:  # noqa: BLE001 (counted)
                traceback.print_exc()
                failed = True
            with self._lock:
                self._failed += failed
                if not failed:
                    self._rounds.append(time.perf_counter() - started)

    def take(self) -> dict[str, Any]:
        """What was done since the last call."""
        with self._lock:
            found = {"rounds": self._rounds, "failed": self._failed}
            self._rounds, self._failed = [], 0
        return found


def serve(make: Callable[[Options], StatePeer]) -> None:
    """Be a peer until the input ends."""
    torch.set_num_threads(1)
    options = parse()
    peer = make(options)
    training: Training | None = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal training
        match request["do"]:
            case "start":
                return {"invite": peer.start(request["invites"])}
            case "load":
                return load(peer, options)
            case "train":
                training = Training(peer)
            case "rounds" if training is not None:
                return training.take()
            case "stop":
                if training is not None:
                    training.going_on = False
                peer.stop()
        return {}

    obey(answer, leave_s=1.0)


def load(peer: StatePeer, options: Options) -> dict[str, Any]:
    started = time.perf_counter()
    got = peer.load()
    return {"seconds": time.perf_counter() - started, "wrong": difference(got, options.state_bytes)}


def parse() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", required=True)
    for name in ("state-bytes", "train-bytes", "trainers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--cap-bytes-s", type=float, default=0.0)
    args = parser.parse_args()
    return Options(args.role, args.state_bytes, args.train_bytes, args.trainers, args.cap_bytes_s)
