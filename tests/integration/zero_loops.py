"""What ranks do in the tests of sharded models in the loops of Accelerate and of the Trainer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]

import shoal.zero
from shoal.errors import ConfigError
from shoal.integrations.zero import attach
from tests.integration import zero_cases as cases
from tests.integration.zero_programs import said
from tests.integration.zero_start import tiny

STEPS, MICRO, CLIP = 3, 2, 0.05


class Lossy(torch.nn.Module):
    """A model that returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.Odd()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        return {"loss": torch.nn.functional.cross_entropy(self.inner(tokens).float(), labels)}


def data() -> list[dict[str, torch.Tensor]]:
    """Samples for all ranks."""
    made = torch.Generator().manual_seed(4)
    tokens, labels = torch.randint(0, 37, (2, 96), generator=made)
    return [{"tokens": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]


def sharded(stage: int, model: torch.nn.Module | None = None) -> Any:
    """The model and its optimizer."""
    model = model or Lossy()
    return shoal.zero.shard(model, lambda params: torch.optim.AdamW(params, lr=1e-2), stage=stage)


def schedule(optimizer: Any) -> Any:
    """Halves the rate at each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def plain(stage: int, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The loop that a program writes itself."""
    model, optimizer = sharded(stage)
    rates = schedule(optimizer)
    for first in range(0, MICRO * STEPS, MICRO):
        for number in range(MICRO):
            last = number == MICRO - 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                (model(**batches[first + number])["loss"] / MICRO).backward()
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return shoal.zero.full_state_dict(model)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """As torchrun starts a process."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update(names, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    try:
        yield
    finally:
        for name in (*names, "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


def recorded(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> None:
    """Keep the arguments of the model."""
    model.register_forward_pre_hook(
        lambda _, __, given: batches.append({key: each.clone() for key, each in given.items()}), with_kwargs=True
    )


def by_accelerate(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, int]:
    """The weights by its loop and by the plain one; the bytes of gradients sent, and those of a loop without sums."""
    with launched():
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
        assert accelerator.num_processes == dist.get_world_size()
        model, optimizer = sharded(stage)
        rates = schedule(optimizer)
        attach(accelerator, model, optimizer)
        loader: Any = torch.utils.data.DataLoader(data(), batch_size=4)  # type: ignore[arg-type]
        ready, stepper, loader = accelerator.prepare(model, optimizer, loader)
        assert ready is model
        batches: list[dict[str, torch.Tensor]] = []
        recorded(model, batches)
        for batch in loader:
            if len(batches) == MICRO * STEPS:
                break
            with accelerator.accumulate(model):
                accelerator.backward(ready(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                stepper.step()
                if accelerator.sync_gradients:
                    rates.step()
                stepper.zero_grad()
        return shoal.zero.full_state_dict(model), plain(stage, batches), optimizer.traffic().reduced, len(batches)


def arguments(folder: str, **options: Any) -> transformers.TrainingArguments:
    """Of a Trainer."""
    given: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": MICRO,
        "max_grad_norm": CLIP,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "logging_steps": 1,
    }
    return transformers.TrainingArguments(**{**given, **options})


def by_trainer(
    stage: int, folder: str, *, sharded_first: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float], float]:
    """The weights by the Trainer and by the plain loop, the norms that it logged, and the loss by `evaluate`."""
    with launched():
        samples: Any = data()
        before = sharded(stage, Lossy()) if sharded_first else None
        model = Lossy() if before is None else before[0]
        trainer = transformers.Trainer(model, arguments(folder), train_dataset=samples, eval_dataset=samples)
        model, optimizer = before or sharded(stage, trainer.model)
        attach(trainer, model, optimizer, schedule(optimizer))
        batches: list[dict[str, torch.Tensor]] = []
        recorded(model, batches)
        trainer.train()
        norms = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
        trained, found = list(batches), shoal.zero.full_state_dict(model)
        loss = trainer.evaluate()["eval_loss"]
        return found, plain(stage, trained), norms, loss


def refused(how: str, folder: str) -> str:
    """The message of `attach`."""
    with launched():
        model, optimizer = sharded(1)
        other: Any = torch.optim.SGD(Lossy().parameters(), lr=0.1)
        try:
            if how == "mixed precision":
                attach(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), model, optimizer)
            elif how == "another optimizer":
                attach(accelerate.Accelerator(cpu=True), model, other)
            else:
                options: dict[str, Any] = {"save_strategy": "steps"} if how == "save" else {}
                options.update({"bf16": True} if how == "bf16" else {})
                trainer = transformers.Trainer(Lossy() if how == "another" else model, arguments(folder, **options))
                if how in ("save", "bf16"):
                    model, optimizer = sharded(1, Lossy())
                    trainer.model = model
                attach(trainer, model, optimizer)
        except ConfigError as error:
            return str(error)
        return "it was taken"


def saved(stage: int, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a model that was saved and loaded, and those before."""
    model, optimizer = shoal.zero.shard(tiny("Bert"), lambda params: torch.optim.SGD(params, lr=0.1), stage=stage)
    tokens = torch.arange(24).view(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    found = shoal.zero.full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=dict(found) if stage == 3 else None)
    dist.barrier()
    return dict(transformers.BertForMaskedLM.from_pretrained(folder).state_dict()), found


def saved_by_loops(stage: int, folder: str) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor], str]:
    """Weights that a Trainer and an Accelerator have saved, those of the model, and what `save_state` says."""
    with launched():
        samples: Any = data()
        trainer = transformers.Trainer(tiny("Bert"), arguments(folder), train_dataset=samples)
        model, optimizer = sharded(stage, trainer.model)
        attach(trainer, model, optimizer)
        trainer.save_model(folder)
        dist.barrier()
        loaded = dict(transformers.BertForMaskedLM.from_pretrained(folder).state_dict())
        found = [loaded, trainer.accelerator.get_state_dict(model)]
        return found, shoal.zero.full_state_dict(model), said(lambda: trainer.accelerator.save_state(folder))
