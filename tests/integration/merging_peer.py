"""A peer that merges, and may be struck in the middle of a merge; prints JSON lines.

Run as `python -m tests.integration.merging_peer STRATEGY FOLDER SIGNAL`: SIGNAL is one that it sends itself in the
middle of a merge of its second fragment, or 0. The invite comes on stdin, an empty line for the first peer; later the
epoch at which the run ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch

import shoal
from shoal.events import EpochAdvanced, Event
from shoal.strategies import Decoupled, DiLoCo, Strategy, StreamingDiLoCo
from tests.integration.scripts import digest, say

BATCH = 4
STRUCK_IN = {signal.SIGKILL: 3, signal.SIGSTOP: 6}
STRATEGIES: dict[str, Strategy] = {
    "Decoupled": Decoupled(4, fragments=2, quorum=2),
    "StreamingDiLoCo": StreamingDiLoCo(4, fragments=2, overlap=2),
}
RARELY: dict[str, Strategy] = {
    "Decoupled, rarely": Decoupled(16, fragments=2, quorum=2),
    "StreamingDiLoCo, rarely": StreamingDiLoCo(16, fragments=2, overlap=2),
    "DiLoCo, rarely": DiLoCo(16),
}
"""Between two merges there is time for a signal from outside."""


def strike(swarm: shoal.Optimizer, number: int) -> None:
    """Send this process the signal in the middle of a merge."""
    averager: Any = swarm._chains.participants[1]._averager
    begin, rounds = averager._begin_round, 0

    async def begun(*about: Any) -> Any:
        nonlocal rounds
        found, rounds = await begin(*about), rounds + 1
        if rounds == STRUCK_IN[signal.Signals(number)]:
            say("struck")
            sys.stdout.flush()
            os.kill(os.getpid(), number)
        return found

    averager._begin_round = begun


def main() -> None:
    """Train to the end of the run."""
    strategy, folder, number = {**STRATEGIES, **RARELY}[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    invite = sys.stdin.readline().strip()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Linear(64, 2, bias=False))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with shoal.DHT([invite] if invite else [], start=True) as dht:
        swarm = shoal.Optimizer(
            dht=dht,
            run_id="run",
            strategy=strategy,
            batch_size_per_step=BATCH,
            optimizer=inner,
            model=model,
            checkpoint=folder,
            save_every=1,
        )

        def tell(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                say("epoch", event.epoch)

        dht.events.subscribe(tell)
        say("invite", str(dht.invite()))
        if number:
            strike(swarm, number)

        def end() -> None:
            swarm.announce_end(int(sys.stdin.readline()))

        threading.Thread(target=end, daemon=True).start()
        pause = threading.Event()
        while not swarm.finished:
            model(torch.randn(BATCH, 3)).square().mean().backward()
            swarm.step()
            swarm.zero_grad()
            pause.wait(0.02)  # a batch takes so long
        fragments = [[each.epoch, each.state.digest.hex()] for each in swarm._chains.participants]
        anchors = [tensor for each in swarm._chains.participants for tensor in each.training.export()[1]]
        say("end", [fragments, digest(anchors), digest(list(model.parameters()))])
        sys.stdout.flush()
        swarm.shutdown()


if __name__ == "__main__":
    main()
