"""One peer that trains by `shoal.Optimizer`: a child of `benchmarks.turns`. Its models are small, but for `wide`.

=========  ==========================================  =============================================================
request    meaning                                     answer
=========  ==========================================  =============================================================
start      join the peers at `invites` (none: begin)   `invite`
work       one turn of the case                        `seconds`
stop       leave                                       nothing
=========  ==========================================  =============================================================
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import shoal
from benchmarks.contenders.orders import obey
from benchmarks.optimizer_overhead import CASES, Swarm

_LAYERS, _WIDTH = 24, 64
_MANY = 1 << 36


class Steps:
    """Nothing but calls of `step`: 48 tensors, 100,000 parameters, gradients that stay, AdamW.

    Args:
        target: samples of the swarm in one step; each call has 1.
        batch_s: the time that a batch takes, seconds. Without any, one peer fills each step before it has heard of the
            others, and a step of one peer alone is put off while the others are at their first batch.
    """

    def __init__(self, dht: shoal.DHT, target: int, batch_s: float = 0.0) -> None:
        self.batch_s = batch_s
        torch.manual_seed(0)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        self.parameters = list(torch.nn.Sequential(*layers).parameters())
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer = shoal.Optimizer(
            dht=dht,
            run_id="turns",
            target_batch_size=target,
            batch_size_per_step=1,
            optimizer=torch.optim.AdamW(self.parameters, lr=1e-4),
        )

    def local(self) -> None:
        """Steps that only accumulate."""
        if not self.optimizer.local_epoch:
            self.optimizer.step(batch_size=_MANY)
        for _ in range(400):
            self.optimizer.step()

    def epochs(self, count: int) -> None:
        """As many steps of the swarm."""
        goal = self.optimizer.local_epoch + count
        while self.optimizer.local_epoch < goal:
            time.sleep(self.batch_s)
            self.optimizer.step()


def make(case: str, dht: shoal.DHT) -> Callable[[], Any]:
    """What one turn of a case does."""
    match case:
        case "local":
            return Steps(dht, _MANY).local
        case "alone":
            steps = Steps(dht, 1)
            return lambda: steps.epochs(60)
        case "together":
            steps = Steps(dht, 2, batch_s=0.02)
            return lambda: steps.epochs(10)
        case _:
            return Swarm(CASES[case](), 4, dht).turn


class Peer:
    """Makes its optimizer when it is started."""

    def __init__(self, case: str) -> None:
        self.case = case

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "start":
                self.dht = shoal.DHT(initial_peers=request["invites"], start=True)
                self.turn = make(self.case, self.dht)
                return {"invite": str(self.dht.get_visible_maddrs()[0])}
            case "work":
                began = time.perf_counter()
                self.turn()
                return {"seconds": time.perf_counter() - began}
            case _:
                self.dht.shutdown()
                return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    obey(Peer(sys.argv[1]).answer)
