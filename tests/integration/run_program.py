"""A program for the tests of `shoal run`: it trains a small model until the run ends. Argument: what it does then.

`raise`, `quiet` (exit_code=None), `handler` (a SIGTERM handler of its own), `fork` (a child of it ends),
`thread` (the main thread only starts the training).
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

import shoal

HOW = sys.argv[1] if sys.argv[1:] else ""


def main() -> None:
    """Print the invite, the first epoch, and each fifth one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    dht = shoal.DHT(initial_peers=[], start=True)
    print(dht.invite("run"), flush=True)
    swarm = shoal.Optimizer(
        dht=dht,
        run_id="run",
        target_batch_size=64,
        batch_size_per_step=16,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        model=model,
    )
    print(f"begins at {swarm.local_epoch}", flush=True)
    if HOW == "fork":
        if not (child := os.fork()):
            sys.exit(0)
        print(f"child {os.waitpid(child, 0)[1]}", flush=True)
    train(model, swarm)
    print(f"ends at {swarm.local_epoch}", flush=True)


def train(model: torch.nn.Module, swarm: shoal.Optimizer) -> None:
    """Until SIGTERM in the program's own block, or for ever."""
    if HOW == "quiet":
        with shoal.leave_on_sigterm(swarm.dht, exit_code=None) as leaving:
            steps(model, swarm, lambda: leaving.requested)
    elif HOW == "handler":
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
        steps(model, swarm, lambda: bool(told))
        print(swarm.save_last(), flush=True)
    else:
        steps(model, swarm, lambda: False)


def steps(model: torch.nn.Module, swarm: shoal.Optimizer, is_over: object) -> None:
    """Steps until it is over, or until 30 epochs are done and the program is to fail."""
    told = swarm.local_epoch
    while not is_over():  # type: ignore[operator]
        inputs = torch.randn(16, 8)
        torch.nn.functional.mse_loss(model(inputs), inputs.amax(1, keepdim=True)).backward()  # type: ignore[no-untyped-call]
        try:
            swarm.step()
        except shoal.ShoalError:
            if HOW == "quiet":
                return
            raise
        swarm.zero_grad()
        if swarm.local_epoch >= told + 5:
            told = swarm.local_epoch
            print(f"at {told}", flush=True)
            if HOW == "raise" and told >= 30:
                raise RuntimeError("of the program")


if __name__ == "__main__":
    if HOW == "thread":
        threading.Thread(target=main).start()
    else:
        main()
