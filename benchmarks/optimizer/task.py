"""The demo's task: batches that are masked once for all, the held-out loss, and the one process to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.demo.model import Batch, MaskedLM
from shoal.demo.settings import Training
from shoal.demo.text import load_corpus
from shoal.demo.training import MaskedBatches, held_out, held_out_loss, make_model, make_optimizer, make_schedule

__all__ = ["Task"]

_SEQUENCES = 8192
"""To draw batches from: more than a run uses."""


class Task(NamedTuple):
    """Attributes:
    training: the demo's settings.
    data: sequences, their masks and what is to be guessed, as a trainer reads them.
    held_out: batches that no trainer sees.
    """

    training: Training
    data: dict[str, torch.Tensor]
    held_out: list[Batch]

    @classmethod
    def of_demo(cls) -> Task:
        """With the demo's text."""
        training = Training()
        corpus = load_corpus(vocabulary_size=training.vocabulary)
        drawn = MaskedBatches(corpus, batch_size=_SEQUENCES, sequence=training.sequence, seed=training.seed)
        batch = next(drawn)
        masked, targets = torch.zeros_like(batch.inputs, dtype=torch.bool), batch.inputs.clone()
        masked.view(-1)[batch.chosen] = True
        targets.view(-1)[batch.chosen] = batch.targets
        return cls(training, {"inputs": batch.inputs, "masked": masked, "targets": targets}, held_out(training, corpus))

    def job(self) -> dict[str, Any]:
        """What a trainer has to know of it."""
        training = self.training
        names = ("vocabulary", "sequence", "embedding", "hidden", "heads", "depth")
        return {
            "model": {name: getattr(training, name) for name in names},
            "model_seed": training.seed,
            "target": training.target_batch,
            "lr": training.learning_rate,
            "betas": training.betas,
            "warm_up_epochs": training.warm_up_epochs,
        }

    def loss(self, saved: Path) -> float:
        """Held-out loss of the parameters in a file."""
        model = make_model(self.training)
        model.load_state_dict(torch.load(saved))
        return self.loss_of(model)

    def loss_of(self, model: MaskedLM) -> float:
        """Held-out loss, nats per guessed token."""
        return held_out_loss(model, self.held_out)

    def alone(self, steps: int, batch: int) -> list[float]:
        """Held-out loss after each step of plain torch in one process, without a pace."""
        training, (inputs, masked, targets) = self.training, self.data.values()
        model, generator = make_model(training), torch.Generator().manual_seed(training.seed)
        optimizer = make_optimizer(training, model.parameters())
        schedule, losses = make_schedule(training, optimizer), []
        accumulate = training.target_batch // batch
        for _ in range(steps):
            for _ in range(accumulate):
                rows = torch.randint(len(inputs), (batch,), generator=generator)
                chosen = masked[rows].flatten().nonzero().squeeze(1)
                part = Batch(inputs[rows], chosen, targets[rows].flatten()[chosen])
                (model.loss(part) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(self.loss_of(model))
        return losses
