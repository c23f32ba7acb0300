"""A peer that trains by Hugging Face's Trainer, with its default schedule: prints its epochs as JSON lines.

Run as `python -m tests.integration.trainer PACE_S`; the invite comes on stdin, an empty line for the first peer; then a
line when all are there.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch
import transformers

import shoal
from shoal.events import EpochAdvanced, Event, StateDownloaded, Warned
from tests.integration.scripts import digest, say

TARGET, BATCH, EPOCHS = 32, 8, 100


class Examples(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Random classes of random tokens, without end."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for seed in itertools.count():
            generator = torch.Generator().manual_seed(seed)
            yield {
                "input_ids": torch.randint(0, 50, (8,), generator=generator),
                "labels": torch.randint(0, 2, (), generator=generator),
            }


class Pace(transformers.TrainerCallback):
    """Takes this long for each batch, and ends the training with the run.

    Args:
        optimizer: of the run.
        seconds: of each batch.
    """

    def __init__(self, optimizer: shoal.Optimizer, seconds: float) -> None:
        self._optimizer, self._seconds = optimizer, seconds

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before each batch."""
        threading.Event().wait(self._seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each batch."""
        if self._optimizer.finished:
            control.should_training_stop = True


def main() -> None:
    """Train to the end of the run."""
    torch.set_num_threads(1)
    invite = sys.stdin.readline().strip()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForSequenceClassification(config)
    with shoal.DHT([invite] if invite else [], start=True) as dht, tempfile.TemporaryDirectory() as folder:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = shoal.Optimizer(
            dht=dht, run_id="run", target_batch_size=TARGET, batch_size_per_step=BATCH, optimizer=inner
        )

        def tell(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                state = [*model.parameters(), *(each for kept in inner.state.values() for each in kept.values())]
                say("epoch", [event.epoch, digest(state), event.digest.hex(), event.peers])
            elif isinstance(event, StateDownloaded):
                say("downloaded")
            elif isinstance(event, Warned):
                say("warned", event.message)

        dht.events.subscribe(tell)
        say("invite", str(dht.invite()))
        sys.stdin.readline()  # the others are there
        optimizer.announce_end(EPOCHS)
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=10000,
            warmup_steps=10,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        pace = Pace(optimizer, float(sys.argv[1]))
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Examples(), optimizers=(optimizer, None), callbacks=[pace]
        )
        trainer.train()
        epoch, own, state = optimizer.collaboration.progress().check or (0, b"", b"")
        say("check", [epoch, own.hex(), state.hex()])
        schedule: Any = trainer.lr_scheduler
        say("schedule", [type(schedule).__name__, schedule.last_epoch])
        say("rates", [schedule.get_last_lr()[0], optimizer.param_groups[0]["lr"]])
        sys.stdout.flush()
        optimizer.shutdown()


if __name__ == "__main__":
    main()
