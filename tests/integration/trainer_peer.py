"""A peer that trains by an ordinary Trainer with a `SwarmCallback`: prints what happens as JSON lines.

Run as `python -m tests.integration.trainer_peer FOLDER MAX_STEPS PACE_S [resume|merge]`; the invite comes on stdin, an
empty line for the first peer; then a line when training may begin.
"""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import torch
import transformers

import shoal
from shoal.events import EpochAdvanced, Event, StateDownloaded, Warned
from shoal.integrations.transformers import SwarmCallback, latest_checkpoint
from shoal.strategies import DiLoCo
from tests.integration.scripts import digest, say

TARGET, BATCH, SAMPLES = 32, 8, 45


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same on all peers: 45, so that the last batch of a pass has 5."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not index < SAMPLES:
            raise IndexError(index)
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def tiny_model(seed: int = 0) -> transformers.BertForMaskedLM:
    """A BERT of some thousand random weights."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return transformers.BertForMaskedLM(config)


class Watch(transformers.TrainerCallback):
    """Says which samples it draws first, takes this long for each batch, and says what was saved.

    Args:
        seconds: of each batch.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before the first batch."""
        sampler = given["train_dataloader"].batch_sampler.sampler
        say("begun", [type(sampler).__name__, list(itertools.islice(sampler, BATCH))])
        say("random", torch.rand(()).item())

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before each batch."""
        threading.Event().wait(self._seconds)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each checkpoint."""
        say("saved", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """What a user sees."""
        say("log", logs)


class Interrupts(transformers.TrainerCallback):
    """Ctrl+C in the middle of the sixth step, once."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the first of two batches that are accumulated."""
        if state.global_step == 5:
            raise KeyboardInterrupt


def main() -> None:
    """Train to the end of the run."""
    folder, max_steps, pace_s, *mode = sys.argv[1:]
    run: dict[str, Any] = {"strategy": DiLoCo(every=5)} if "merge" in mode else {"target_batch_size": TARGET}
    torch.set_num_threads(1)
    invite = sys.stdin.readline().strip()
    model = tiny_model()
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=int(max_steps),
        warmup_steps=5,
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=10,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with shoal.DHT([invite] if invite else [], start=True) as dht:
        swarm = SwarmCallback(model, arguments, dht=dht, run_id="run", **run)

        def tell(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                state = swarm.optimizer.state
                kept = [state[each][name] for each in state for name in sorted(state[each])]
                held = digest([*model.parameters(), *kept])
                say("epoch", [event.epoch, held, event.digest.hex(), event.peers, event.samples])
            elif isinstance(event, StateDownloaded):
                say("downloaded", swarm.optimizer.local_epoch)
            elif isinstance(event, Warned):
                say("warned", event.message)

        dht.events.subscribe(tell)
        say("invite", str(dht.invite()))
        sys.stdin.readline()
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=Sentences(),
            optimizers=swarm.optimizers,
            callbacks=[swarm, Watch(float(pace_s))],
        )
        trainer.train(resume_from_checkpoint=latest_checkpoint(folder) if "resume" in mode else None)
        say("resumed", trainer._initial_global_step)
        say("end", [swarm.optimizer.local_epoch, trainer.state.global_step])
        say("weights", digest([*model.parameters()]))
        say("rate", swarm.optimizers[1].get_last_lr()[0])


if __name__ == "__main__":
    main()
