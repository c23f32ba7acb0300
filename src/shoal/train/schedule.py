"""Schedules that a trainer makes over our optimizer, as those of Hugging Face do: they follow the swarm's epochs.

Such a schedule is meant to be stepped by the training loop, and each peer's loop has a pace of its own. Here it is
found and *followed*: it becomes the schedule of the run, moved once for each epoch of the swarm, and its own `step`
does nothing any more. All else of it (`get_last_lr`, `state_dict`) stays. A `schedule.step` that somebody took before,
for a list of callbacks, is the old function: it moves the schedule, which `put_back` undoes.

Torch keeps no list of the schedules of an optimizer. But each writes to the parameter groups when it is made and when
it moves. So when somebody else has changed them since our last step, the schedule is looked for among all objects of
its classes, by the groups that it changes, also through wrappers (Accelerate's).
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.errors import ConfigError
from shoal.train.inner import Scheduler

__all__ = [
    "ScheduleWatch",
    "advance",
    "count_of",
    "follow",
    "is_moved",
    "put_back",
    "rates_of",
    "restore_rates",
    "set_rate",
    "tell_rates",
]

_kinds: dict[type, type] = {}

_MOVED = ("momentum", "betas")
"""What some schedules write to the groups beside the rate (`OneCycleLR`, `CyclicLR`)."""


class _Left(NamedTuple):
    """A schedule as we left it.

    Attributes:
        state: its state dict.
        rates: the very list that it has computed: each step makes a new one, and no other change does.
        groups: the values of `_MOVED` in the groups.
    """

    state: dict[str, Any]
    rates: object
    groups: list[dict[str, Any]]


_left: WeakKeyDictionary[LRScheduler, _Left] = WeakKeyDictionary()
"""Of each followed schedule; not in the schedule itself, as it would become a part of its state_dict."""


def follow(scheduler: Scheduler) -> None:
    """From now on only `advance` moves it: its `step` does nothing. No effect on schedulers that are not torch's."""
    kind = type(scheduler)
    if isinstance(scheduler, LRScheduler) and not _is_followed(scheduler):
        if kind not in _kinds:
            names = {"step": _do_nothing, "load_state_dict": _load, "followed_kind": kind}
            names |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
            _kinds[kind] = type(kind.__name__, (kind,), names)
        # A class of its own, rather than a `step` of its own: that would become part of its state_dict.
        scheduler.__class__ = _kinds[kind]
        _leave(scheduler)


def advance(scheduler: Scheduler) -> None:
    """Move it by one step from where we left it.

    After a download that is before this peer's first own step, of which torch warns: it is right here.
    """
    if getattr(getattr(scheduler, "optimizer", None), "_opt_called", False):
        _advance(scheduler)
        return
    with warnings.catch_warnings():  # not at each step: Python then shows every warning again that it has shown once
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
        _advance(scheduler)


def _advance(scheduler: Scheduler) -> None:
    if _is_followed(scheduler):
        put_back(scheduler)
        try:
            type(scheduler).followed_kind.step(scheduler)
        finally:
            _leave(scheduler)
    else:
        scheduler.step()


def put_back(scheduler: Scheduler | None) -> bool:
    """If somebody else has moved a followed schedule by a step, bring it and the rates back to where we left them.

    Returns:
        Whether it had moved.
    """
    if scheduler is None or (left := _moved_from(scheduler)) is None:
        return False
    type(scheduler).followed_kind.load_state_dict(scheduler, _kept(left.state))
    for group, values in zip(_groups_of(scheduler), left.groups, strict=False):
        group.update(values)
    restore_rates(scheduler, _groups_of(scheduler))
    _leave(scheduler)
    return True


def is_moved(scheduler: Scheduler | None) -> bool:
    """Whether somebody else has moved a followed schedule by a step."""
    return _moved_from(scheduler) is not None


def count_of(scheduler: Scheduler | None) -> object:
    """Its own count of steps, which the user may have loaded or set; without steps that `put_back` would undo."""
    left = _moved_from(scheduler)
    return getattr(scheduler, "last_epoch", None) if left is None else left.state.get("last_epoch")


def _moved_from(scheduler: Scheduler | None) -> _Left | None:
    """Where we left a schedule, if somebody else has moved it by a step since."""
    if scheduler is None or not _is_followed(scheduler):
        return None
    left = _left.get(scheduler)
    return None if left is None or left.rates is vars(scheduler).get("_last_lr") else left


def _leave(scheduler: LRScheduler) -> None:
    """Remember where it is now. If its state cannot be read (the user's own code), it is never put back."""
    _left.pop(scheduler, None)
    try:
        state = _kept(scheduler.state_dict())
    except Exception:  # noqa: BLE001 (the user's own code)
        return
    groups = [{name: group[name] for name in _MOVED if name in group} for group in _groups_of(scheduler)]
    _left[scheduler] = _Left(state, vars(scheduler).get("_last_lr"), groups)


def _groups_of(scheduler: LRScheduler) -> list[dict[str, Any]]:
    return list(getattr(getattr(scheduler, "optimizer", None), "param_groups", ()))


def _kept(value: Any) -> Any:
    """A copy of a state: its containers and tensors. What else is in it (a model of the user's) is not copied."""
    if type(value) is dict:
        return {name: _kept(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def _load(self: LRScheduler, state_dict: dict[str, Any]) -> None:
    """Load the state of the schedule, which goes on from there."""
    type(self).followed_kind.load_state_dict(self, state_dict)  # type: ignore[attr-defined]
    _leave(self)


def rates_of(scheduler: Scheduler | None) -> list[Any]:
    """The rates that it computed last, one for each group; none if it does not say."""
    return list(getattr(scheduler, "_last_lr", None) or ())


def restore_rates(scheduler: Scheduler | None, groups: Sequence[dict[str, Any]]) -> None:
    """Somebody else has set the rates: let them be those that it computed last."""
    for group, rate in zip(groups, rates_of(scheduler), strict=False):
        set_rate(group, rate)


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """A rate that is a tensor stays the one it is, as schedules leave it: a captured graph reads it."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = float(rate) if isinstance(rate, torch.Tensor) else rate


def tell_rates(scheduler: Scheduler | None, groups: Sequence[dict[str, Any]]) -> None:
    """Others than it computed are in force: its `get_last_lr` says them."""
    if rates_of(scheduler):
        vars(scheduler)["_last_lr"] = [copy.copy(group["lr"]) for group in groups]
    if scheduler is not None and _is_followed(scheduler):
        _leave(scheduler)


def _do_nothing(self: LRScheduler, *args: object, **options: object) -> None:
    """The schedule follows the epochs of the swarm."""


def _is_followed(scheduler: Scheduler) -> bool:
    return hasattr(type(scheduler), "followed_kind")


def _release(scheduler: Scheduler) -> None:
    """It is part of another one now, which moves it."""
    if _is_followed(scheduler):
        scheduler.__class__ = type(scheduler).followed_kind
        _left.pop(scheduler, None)


class ScheduleWatch:
    """Notices schedules that were made over these parameter groups.

    Args:
        groups: the list that the optimizer has.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups
        self._seen: tuple[list[bool], list[object]] | None = None  # one may be there already
        self._in_vain = self._changes = 0

    def seen(self) -> None:
        """The values that the groups hold now are our own doing."""
        self._seen = _marks(self._groups)

    def find(self) -> LRScheduler | None:
        """A new schedule, if somebody else has changed the groups and there is one; it is followed from now on.

        Looking takes about 0.1 s in a large program. Where nothing is found (rates that are set by hand) it is looked
        for at the first, second, fourth, ... change only.

        Raises:
            ConfigError: there are several.
        """
        marks = _marks(self._groups)
        if marks == self._seen or not any(marks[0]):
            return None
        self._changes += 1
        if self._changes < 2**self._in_vain // 2:
            return None
        if (found := _scheduler_over(self._groups)) is None:
            self._in_vain += 1
            return None
        self._in_vain = self._changes = 0
        follow(found)
        return found


def _marks(groups: Sequence[dict[str, Any]]) -> tuple[list[bool], list[object]]:
    """The groups that a schedule was made over; and the values that change when one moves."""
    rates = [group.get("lr") for group in groups]
    return (
        ["initial_lr" in group for group in groups],
        [rate._version if isinstance(rate, torch.Tensor) else rate for rate in rates],  # noqa: SLF001 (asks no device)
    )


def _scheduler_over(groups: list[dict[str, Any]]) -> LRScheduler | None:
    """The schedule over these groups that no other one moves, and that is not followed yet."""
    for attempt in range(2):
        # Each object refers to its class. A list of all objects would hold tuples that other threads are building, and
        # CPython gives up on a tuple that somebody else holds before it is whole (SystemError).
        found = gc.get_referrers(*_with_subclasses(LRScheduler))
        all_ = [each for each in found if issubclass(type(each), LRScheduler) and _moves(each, groups)]
        inner = [part for each in all_ for part in getattr(each, "_schedulers", ())]
        for part in inner:
            _release(part)
        new = [each for each in all_ if not _is_followed(each) and not any(each is part for part in inner)]
        if len(new) < 2:
            return new[0] if new else None
        if not attempt:
            gc.collect()  # some may be left over
    names = ", ".join(type(each).__name__ for each in new)
    raise ConfigError(
        f"{len(new)} schedules were made over this optimizer ({names}), but it can follow only one: join them in a "
        "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR, or delete the others"
    )


def _with_subclasses(kind: type) -> list[type]:
    direct: list[type] = type.__subclasses__(kind)
    return [kind, *(each for subclass in direct for each in _with_subclasses(subclass))]


def _moves(scheduler: LRScheduler, groups: list[dict[str, Any]]) -> bool:
    if issubclass(type(scheduler), ReduceLROnPlateau):
        return False  # each peer measures for itself: the options that the rounds agree on hold
    return getattr(getattr(scheduler, "optimizer", None), "param_groups", None) is groups
