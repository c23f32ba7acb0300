"""A training loop in a process of its own, which averages nothing: what rounds cost it only shares the cores with."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from typing import Any

import torch

from benchmarks.contenders.worker import Contender, Options, Pending, Times, now, serve


class LoopPeer(Contender):
    """Its round lasts until SIGUSR1."""

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        self.ended: Future[Any] = Future()
        signal.signal(signal.SIGUSR1, lambda *_: self.ended.set_result(None))

    def start(self) -> str:
        return ""

    def join(self, invites: list[str]) -> None:
        """Nobody is there."""

    def begin(self) -> Pending:
        self.ended, called = Future(), now()
        return Pending(called, self.ended, lambda called, _, done: Times(called, called, done))

    def stop(self) -> None:
        """Nothing to leave."""


if __name__ == "__main__":
    serve(LoopPeer)
