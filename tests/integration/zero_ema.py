"""What ranks do in the tests of moving averages, and the same on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shoal.zero
from shoal.errors import ConfigError, LocalError
from tests.integration import zero_cases as cases
from tests.integration.zero_programs import said

DECAY, STEPS = 0.9, 4


def alone(ranks: int, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The averages of torch's own AveragedModel."""
    model = cases.Odd()
    average: Any = get_ema_multi_avg_fn
    averaged = AveragedModel(model, multi_avg_fn=average(DECAY))
    optimizer = cases.make("adamw", model)([each for each in model.parameters() if each.requires_grad])
    for step in range(steps):
        cases.alone(ranks, "adamw", steps=1, first=step, model=model, optimizer=optimizer)
        averaged.update_parameters(model)
    return {name: each.clone() for name, each in averaged.module.state_dict().items()}


def step_and_update(model: Any, optimizer: Any, ema: Any, steps: int, first: int = 0) -> None:
    """Train, with an update after each step."""
    for step in range(first, first + steps):
        cases.train(optimizer, model, steps=1, first=step)
        ema.update()


def averaged(stage: int, dtype: torch.dtype | None = None) -> tuple[dict[str, torch.Tensor], bool, int]:
    """The averages as the model has them, whether its weights came back, and the bytes of averages on this rank."""
    model, optimizer = _sharded(stage, dtype)
    ema = shoal.zero.EMA(optimizer, decay=DECAY)
    step_and_update(model, optimizer, ema, STEPS)
    before = shoal.zero.full_state_dict(model)
    with ema.average_parameters():
        found = shoal.zero.full_state_dict(model)
        loss = cases.loss_of(model, 0, 0)
        try:
            ema.update()
        except LocalError:
            loss = loss * 1
    after = shoal.zero.full_state_dict(model)
    cases.train(optimizer, model, steps=1, first=STEPS)
    same = all(torch.equal(before[name], each) for name, each in after.items())
    return found, same, sum(each.nbytes for each in ema.averages)


def _sharded(stage: int, dtype: torch.dtype | None = None) -> Any:
    model = cases.Odd()
    return shoal.zero.shard(model, cases.make("adamw", model), stage=stage, dtype=dtype)


def saved(stage: int, path: str, consolidated: bool) -> None:
    """Half of a run."""
    model, optimizer = _sharded(stage)
    ema = shoal.zero.EMA(optimizer, decay=DECAY)
    step_and_update(model, optimizer, ema, 2)
    shoal.zero.save(path, model, optimizer, ema=ema, consolidated=consolidated)
    shoal.zero.save(f"{path}-without", model, optimizer)


def loaded(stage: int, path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, str]:
    """The averages from a checkpoint; what is said of one without; and a share that goes from object to object."""
    model, optimizer = _sharded(stage)
    ema = shoal.zero.EMA(optimizer, decay=DECAY)
    shoal.zero.load(path, model, optimizer, ema=ema)
    other = shoal.zero.EMA(optimizer, decay=0.5)
    other.load_state_dict(ema.state_dict())
    found = []
    for each in (ema, other):
        with each.average_parameters():
            found.append(shoal.zero.full_state_dict(model))
    try:
        shoal.zero.load(f"{path}-without", model, optimizer, ema=ema)
    except ConfigError as error:
        return found[0], found[1], ema.updates, str(error)
    return found[0], found[1], ema.updates, "it was taken"


def refused(path: str) -> dict[str, str]:
    """What is said of each wrong use, some of them on rank 1 alone; and that none of them has changed anything."""
    (model, optimizer), (other, another) = _sharded(1), _sharded(1)
    ema, foreign, wrong = shoal.zero.EMA(optimizer), shoal.zero.EMA(another), dist.get_rank() == 1
    step_and_update(model, optimizer, ema, 1)
    before = shoal.zero.full_state_dict(model)
    shoal.zero.save(f"{path}/saved", model, optimizer, ema=ema)
    bad: Any = "no average"
    decays: tuple[Any, ...] = (1.5, True, "0.9", None)
    state: Any = ema.state_dict()

    def within(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with ema.average_parameters():
                call()

        return run

    def with_decay(decay: Any) -> None:
        changed = shoal.zero.EMA(optimizer)
        changed.decay = decay
        changed.update()

    calls: dict[str, Callable[[], object]] = {
        **{f"decay {value}": partial(shoal.zero.EMA, optimizer, value) for value in decays},
        "later decay": lambda: with_decay("0.9"),
        "optimizer": lambda: shoal.zero.EMA(optimizer.inner),
        "share": lambda: ema.load_state_dict(state | {"share": {**state["share"], "rank": 2}}),
        "nothing to load": lambda: ema.load_state_dict(None),  # type: ignore[arg-type]
        "less to load": lambda: ema.load_state_dict({"share": state["share"]}),
        "save": lambda: shoal.zero.save(f"{path}/never", model, optimizer, ema=bad),
        "save another's": lambda: shoal.zero.save(f"{path}/never", model, optimizer, ema=foreign),
        "save on one rank": lambda: shoal.zero.save(f"{path}/never", model, optimizer, ema=ema if wrong else None),
        "load": lambda: shoal.zero.load(f"{path}/saved", model, optimizer, ema=bad),
        "load another's": lambda: shoal.zero.load(f"{path}/saved", model, optimizer, ema=foreign),
        "load on one rank": lambda: shoal.zero.load(f"{path}/saved", model, optimizer, ema=ema if wrong else None),
        "step within": within(lambda: cases.train(optimizer, model, steps=1)),
        "load within": within(lambda: shoal.zero.load(f"{path}/saved", model, optimizer)),
        "save within": within(lambda: shoal.zero.save(f"{path}/never", model, optimizer, ema=ema)),
    }
    found = {name: said(call) for name, call in calls.items()}
    if wrong:
        ema.update()
    found["average after unequal updates"] = said(within(lambda: None))
    found["save after unequal updates"] = said(lambda: shoal.zero.save(f"{path}/never", model, optimizer, ema=ema))
    after = shoal.zero.full_state_dict(model)
    assert all(torch.equal(before[name], each) for name, each in after.items())
    assert isinstance(other, cases.Odd)
    return found
