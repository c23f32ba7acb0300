"""A peer that saves each epoch, and goes on from what it has saved; prints JSON lines.

Run as `python -m tests.integration.checkpoint_peer END FOLDER`; the invite comes on stdin, an empty line for the first
peer; then a line when all are there.
"""

from __future__ import annotations

import sys

import torch

import shoal
from shoal.events import EpochAdvanced, Event
from tests.integration.scripts import digest, say
from tests.integration.workers import until

BATCH, TARGET = 4, 12


def main() -> None:
    """Train to the end of the run."""
    end, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    invite = sys.stdin.readline().strip()
    torch.manual_seed(len(invite))
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.99)

    def held() -> str:
        state = [*model.parameters(), *(kept[key] for kept in inner.state.values() for key in sorted(kept))]
        return digest([*state, torch.tensor(inner.param_groups[0]["lr"], dtype=torch.float64)])

    with shoal.DHT([invite] if invite else [], start=True) as dht:
        swarm = shoal.Optimizer(
            dht=dht,
            run_id="run",
            target_batch_size=TARGET,
            batch_size_per_step=BATCH,
            optimizer=inner,
            scheduler=schedule,
            model=model,
            checkpoint=folder,
            save_every=1,
        )

        def tell(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                say("epoch", [event.epoch, held()])

        dht.events.subscribe(tell)
        say("invite", str(dht.invite()))
        say("resumed", [swarm.local_epoch, held()])
        sys.stdin.readline()  # the others are there

        async def others() -> int:
            return len(swarm.collaboration.view().others)

        until(lambda: dht.loop_thread.run(others(), 10.0) == TARGET // BATCH - 1)  # else it steps alone meanwhile
        swarm.announce_end(end)
        while not swarm.finished:
            model(torch.randn(BATCH, 3)).square().mean().backward()
            swarm.step()
            swarm.zero_grad()
        state = swarm.collaboration.state
        say("end", [state.epoch, state.samples, state.digest.hex(), held()])
        sys.stdout.flush()
        swarm.shutdown()


if __name__ == "__main__":
    main()
