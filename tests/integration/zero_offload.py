"""What ranks do in the tests of `shard(offload=)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shoal.zero
from shoal.zero.memory import offload
from shoal.zero.optimizer import Memory, ShardedOptimizer
from tests.integration.zero_cases import Odd, make, train
from tests.integration.zero_programs import State, said, same
from tests.limits import files_up_to

STEPS = 3


def _sharded(
    stage: int, kind: str, where: str | None, dtype: torch.dtype | None = None
) -> tuple[Odd, ShardedOptimizer]:
    offload.WINDOW_NUMEL = 300  # a few tiles
    model = Odd()
    return shoal.zero.shard(model, make(kind, model), stage=stage, dtype=dtype, offload=where)


def _weights(model: torch.nn.Module) -> State:
    return {name: each.clone() for name, each in shoal.zero.full_state_dict(model).items()}


def _life(
    stage: int, kind: str, dtype: torch.dtype | None, where: str | None, folder: str
) -> tuple[list[State], Memory]:
    """Training, with all that a program does to state between steps: weights now and then, and memory at the end."""
    found = []
    model, optimizer = _sharded(stage, kind, where, dtype)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        train(optimizer, model, micro=2, sync=step == 1, clip=10.0, steps=1, first=step)
        scheduler.step()
    found.append(_weights(model))
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, model, steps=1, first=STEPS)
    found.append(_weights(model))
    name = f"{folder}/{stage}-{kind}-{dtype}-{where is None}"
    shoal.zero.save(name, model, optimizer)
    train(optimizer, model, steps=1, first=STEPS + 1)
    found.append(_weights(model))
    shoal.zero.load(name, model, optimizer)
    train(optimizer, model, steps=1, first=STEPS + 1)
    found.append(_weights(model))
    torch.autograd.backward(_loss(model))
    return found, optimizer.memory()


def _loss(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.arange(4)).square().mean()
    return loss


def lives(
    stage: int, kinds: Sequence[str], dtype: torch.dtype | None, folder: str
) -> dict[str, tuple[bool, bool, Memory, Memory]]:
    """With each optimizer: the same bits as without offload; the same after a load; memory with and without."""
    found = {}
    for kind in kinds:
        here, memory = _life(stage, kind, dtype, None, folder)
        there, less = _life(stage, kind, dtype, folder, folder)
        found[kind] = all(map(same, here, there)), same(there[2], there[3]), memory, less
    return found


def full_disk(*, at: int) -> AbstractContextManager[None]:
    """A rank whose files cannot be larger than 512 KiB. The group's are smaller."""
    return files_up_to(1 << 19) if dist.get_rank() == at else nullcontext()


@contextmanager
def nothing_prepared() -> Iterator[None]:
    """No room is allocated before it is needed, as if it were not known how much state there will be."""
    prepare, offload.Offload.prepare = offload.Offload.prepare, lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        offload.Offload.prepare = prepare  # type: ignore[method-assign]


def refused(stage: int, folder: str) -> list[tuple[str, bool]]:
    """What is said of each wrong folder, and whether the model is as it was, and can be sharded rightly then."""
    found = []
    mine = Path(folder) / f"rank-{dist.get_rank()}"
    mine.mkdir()
    wrong: list[Any] = [folder + "/none" if dist.get_rank() else folder, 3, "cpu" if dist.get_rank() else folder]
    for where in (*wrong, "full"):
        model = Odd()
        before = {name: each.clone() for name, each in model.state_dict().items()}

        def shard(where: Any, model: torch.nn.Module = model) -> ShardedOptimizer:
            return shoal.zero.shard(model, make("adamw", model), stage=stage, offload=where)[1]

        with full_disk(at=1 if where == "full" else -1):
            words = said(lambda: shard(str(mine) if where == "full" else where))  # noqa: B023 (called at once)
        kept = stage == 3 or same(model.state_dict(), before)
        optimizer = shard(str(mine))
        train(optimizer, model, steps=1)
        found.append((words, kept and optimizer.memory().offloaded > 0))
    found.append(("nothing is left", not any(mine.iterdir())))
    return found


class Large(torch.nn.Module):
    """A rank's half of its checkpoint is larger than any file on a full disk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Train."""
        values = torch.randn(2, 256, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        self(values).square().sum().backward()
        try:
            optimizer.step()
        finally:
            optimizer.zero_grad()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 256)."""
        for layer in self.layers:
            values = layer(values).tanh()
        return values


def _large(stage: int, where: str | None) -> tuple[Large, ShardedOptimizer]:
    return shoal.zero.shard(Large(), lambda each: torch.optim.AdamW(each, lr=1e-3), stage=stage, offload=where)


def full_later(stage: int, folder: str) -> list[tuple[str, bool]]:
    """The disk of rank 1 is full in the first step, in `load` and in `save`: what is said; whether that harms nothing.

    With the bits of training without offload, in a folder that is gone.
    """
    plain, alone = _large(stage, None)
    for number in range(3):
        plain.step(alone, number)
    mine = Path(folder) / f"disk-{dist.get_rank()}"
    mine.mkdir()
    with nothing_prepared():
        model, optimizer = _large(stage, str(mine))
    with full_disk(at=1):
        words = said(lambda: model.step(optimizer, 0))
    model.step(optimizer, 1)
    found = [(words, optimizer.memory().offloaded > optimizer.memory().state)]
    shoal.zero.save(f"{folder}/first", model, optimizer)
    before = _weights(model)
    with full_disk(at=1):
        words = said(lambda: shoal.zero.load(f"{folder}/first", model, optimizer))
    found.append((words, same(_weights(model), before)))
    with full_disk(at=1):
        words = said(lambda: shoal.zero.save(f"{folder}/second", model, optimizer))
    whole = sorted(each.name for each in Path(folder).iterdir() if each.name[:4] != "disk") == ["first"]
    shoal.zero.load(f"{folder}/first", model, optimizer)
    mine.rmdir()
    model.step(optimizer, 2)
    found.append((words, whole and same(_weights(model), _weights(plain))))
    return found


def gone_folder(folder: str) -> str:
    """What is said if the folder of rank 1 is gone when a file is needed there."""
    mine = Path(folder) / f"gone-{dist.get_rank()}"
    mine.mkdir()
    with nothing_prepared():
        model, optimizer = _large(1, str(mine))
    if dist.get_rank() == 1:
        mine.rmdir()
    return said(lambda: model.step(optimizer, 0))


def of_all_parameters(folder: str) -> str:
    """Prodigy in stage 3: what is said."""
    import pytorch_optimizer

    other: Any = pytorch_optimizer.load_optimizer("prodigy")
    return said(lambda: shoal.zero.shard(Odd(), lambda each: other(each, lr=1.0), stage=3, offload=folder))


def beside_a_device(stage: int, kind: str, dtype: torch.dtype | None, where: str, device: str) -> tuple[bool, Memory]:
    """The same bits if the optimizer's values are on the CPU beside a device; the CPU itself may stand in for it."""
    found = []
    prepare = offload.Offload.__init__

    def elsewhere(places: offload.Offload, where: str | None, device: torch.device) -> None:
        prepare(places, where, device)
        places.elsewhere = where is not None

    offload.Offload.__init__ = elsewhere  # type: ignore[method-assign, assignment]
    try:
        for place in (None, where):
            model = Odd().to(device)
            model, optimizer = shoal.zero.shard(model, make(kind, model), stage=stage, dtype=dtype, offload=place)
            for step in range(STEPS):
                tokens = torch.arange(3 * step, 3 * step + 4, device=device)
                torch.autograd.backward(model(tokens).float().square().mean())
                optimizer.clip_grad_norm_(10.0)
                optimizer.step()
                if step < STEPS - 1:
                    optimizer.zero_grad()
            found.append(_weights(model))
    finally:
        offload.Offload.__init__ = prepare  # type: ignore[method-assign]
    return same(*found), optimizer.memory()
