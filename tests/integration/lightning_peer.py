"""A peer that trains by Lightning's Trainer: prints what happens as JSON lines.

Run as `python -m tests.integration.lightning_peer KIND MAX_STEPS`, KIND `callback` or `strategy`; the invite comes on
stdin, an empty line for the first peer; then a line when training may begin.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import lightning
import torch

import shoal
from shoal.events import EpochAdvanced, Event, StateDownloaded, Warned
from shoal.integrations.lightning import SwarmCallback, SwarmStrategy
from tests.integration.scripts import digest, say

TARGET, BATCH = 32, 8


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Finds the sum of eight numbers.

    Args:
        samples: of the data set.
        by_hand: optimizes by hand.
        dtype: of the weights and the data.
        schedule: what `configure_optimizers` says of the schedule; None for none.
    """

    def __init__(
        self,
        samples: int = 45,
        *,
        by_hand: bool = False,
        dtype: torch.dtype = torch.float64,
        schedule: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 1, dtype=dtype)
        self.samples, self.kind, self.schedule = samples, dtype, schedule
        self.seen: list[list[float]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One batch."""
        self.seen.append(batch[0][:, 0].tolist())
        loss: torch.Tensor = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.schedule is not None:
                self.lr_schedulers().step()
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """It does not count."""
        self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        """As users write it."""
        optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-2)
        if self.schedule is None:
            return optimizer
        made = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, **self.schedule}}

    def dataset(self) -> torch.utils.data.Dataset[Any]:
        """The same on all peers."""
        generator = torch.Generator().manual_seed(1)
        return torch.utils.data.TensorDataset(torch.randn(self.samples, 8, generator=generator, dtype=self.kind))

    def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """Shuffled, as usual."""
        return torch.utils.data.DataLoader(self.dataset(), batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """For the sanity check, too."""
        return torch.utils.data.DataLoader(self.dataset(), batch_size=BATCH)


def held(module: Module, swarm: shoal.Optimizer) -> str:
    """A hash of the parameters and of the optimizer's statistics."""
    state = swarm.state
    return digest([*module.parameters(), *(state[each][name] for each in state for name in sorted(state[each]))])


def main() -> None:
    """Train to the end of the run."""
    kind, max_steps = sys.argv[1:]
    torch.set_num_threads(1)
    invite = sys.stdin.readline().strip()
    lightning.seed_everything(7, verbose=False)
    module = Module(schedule={"interval": "step"}, dtype=torch.float32)
    with shoal.DHT([invite] if invite else [], start=True) as dht, tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"dht": dht, "run_id": "run", "target_batch_size": TARGET, "max_grad_norm": 10.0}
        given: tuple[str, Any]
        if kind == "strategy":
            strategy = SwarmStrategy(**settings)
            swarm, given = strategy.swarm, ("strategy", strategy)
        else:
            swarm = SwarmCallback(**settings)
            given = ("callbacks", [swarm])

        def tell(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                assert swarm.optimizer is not None
                say("epoch", [event.epoch, held(module, swarm.optimizer), event.peers])
            elif isinstance(event, StateDownloaded):
                say("downloaded")
            elif isinstance(event, Warned):
                say("warned", event.message)

        dht.events.subscribe(tell)
        say("invite", str(dht.invite()))
        sys.stdin.readline()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=int(max_steps),
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **dict([given]),
        )
        try:
            trainer.fit(module)
        finally:
            assert swarm.optimizer is not None
            say("end", [swarm.optimizer.local_epoch, held(module, swarm.optimizer)])
            say("seen", module.seen[0])
            say("metrics", {name: float(value) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
