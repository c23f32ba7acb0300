"""A peer that trains by Accelerate: prints its epochs as JSON lines.

Run as `python -m tests.integration.accelerate_peer STEPS PRECISION`, with so many batches accumulated; the invite
comes on stdin, an empty line for the first peer; then a line when training may begin.
"""

from __future__ import annotations

import sys

import accelerate  # type: ignore[import-untyped]
import torch

import shoal
from shoal.events import EpochAdvanced, Event, Warned
from tests.integration.scripts import digest, say

TARGET, EPOCHS = 45, 20


def main() -> None:
    """Train to the end of the run."""
    steps, precision = sys.argv[1:]
    torch.set_num_threads(1)
    invite = sys.stdin.readline().strip()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=int(steps))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.1, EPOCHS)
    with shoal.DHT([invite] if invite else [], start=True) as dht:
        swarm = shoal.Optimizer(
            dht=dht, run_id="run", target_batch_size=TARGET, optimizer=inner, scheduler=schedule, model=model
        )

        def tell(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                kept = [inner.state[each][name] for each in model.parameters() for name in sorted(inner.state[each])]
                say("epoch", [event.epoch, digest([*model.parameters(), *kept]), event.peers])
            elif isinstance(event, Warned):
                say("warned", event.message)

        dht.events.subscribe(tell)
        say("invite", str(dht.invite()))
        sys.stdin.readline()
        swarm.announce_end(EPOCHS)
        inputs = torch.randn(45, 8)
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=shoal.data.PeerSampler(data, swarm))
        trained, optimizer, loader, scheduler = accelerator.prepare(model, swarm, loader, schedule)
        while not swarm.finished:
            for inputs, targets in loader:
                with accelerator.accumulate(trained):
                    loss = torch.nn.functional.mse_loss(trained(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if swarm.finished:
                    break
        say("end", [swarm.local_epoch, schedule.get_last_lr(), digest([*model.parameters()])])
        swarm.shutdown()


if __name__ == "__main__":
    main()
