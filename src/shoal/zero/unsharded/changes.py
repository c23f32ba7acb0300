"""Changes of a model's weights: all ranks make the same ones, and an interrupt must not leave a part of one.

Those of a program are compared at the next step (`check_alike`): if one rank alone has made a change, each rank would
go on from its own share of it.

Ctrl+C waits for the end of the short part that the ranks do together (`uninterrupted`). Whatever ends a change in its
middle nevertheless leaves the model marked (`begin` without `end`), and nobody can use its weights before a `load`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from shoal.errors import ConfigError, LocalError
from shoal.zero.ranks.watch import Agreement

__all__ = ["begin", "check_alike", "check_whole", "end", "is_whole", "uninterrupted"]

_PATIENCE = 2
"""So many interrupts wait for the end of a block; a later one ends it."""
_changing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def begin(model: torch.nn.Module) -> None:
    """From here to `end` ranks may have other weights, or a part of new ones."""
    _changing.add(model)


def end(model: torch.nn.Module) -> None:
    """All ranks have whole weights."""
    _changing.discard(model)


def is_whole(model: torch.nn.Module) -> bool:
    """Whether each change of the model, or of one that it is a part of, has come to its end."""
    return not any(_is_within(model, each) or _is_within(each, model) for each in list(_changing))


def _is_within(part: torch.nn.Module, model: torch.nn.Module) -> bool:
    return any(part is each for each in model.modules())


def check_whole(model: torch.nn.Module) -> None:
    """Raise `LocalError` if one has not."""
    if not is_whole(model):
        raise LocalError(
            "the weights were changed (by a step, a load or average_parameters()), and that was interrupted: each rank "
            "may have others now. Load a checkpoint (shoal.zero.load, with ema= if there are averages) on all ranks, "
            "or start anew"
        )


def check_alike(agreement: Agreement, writes: Mapping[str, tuple[bool, str]]) -> None:
    """Raise `ConfigError`, on all ranks, if programs have changed weights otherwise on some. All ranks call it.

    Args:
        agreement: among them.
        writes: of each weight whether it was changed on this rank since the last step; and a digest, the same on all
            ranks that have made the same changes.
    """
    said = [json.loads(each) for each in agreement.gather(json.dumps(writes))]
    for name, (_, first) in said[0].items():
        other = next((rank for rank, each in enumerate(said) if each[name][1] != first), None)
        if other is None:
            continue
        changed = [str(rank) for rank, each in enumerate(said) if each[name][0]]
        how = f"to other values on rank {other} than on rank 0"
        if 0 < len(changed) < len(said):
            how = f"on rank {' and '.join(changed)} alone"
        raise ConfigError(
            f"the program has changed {name} {how}, since the last step: ranks would go on from a mixture. Make the "
            "same change on all ranks, with the same values (random ones after the same torch.manual_seed); or on rank "
            "0 before shard(), from which all take over. To go on here, load weights on all ranks with "
            "shoal.zero.load(weights, model, optimizer), or start anew"
        )


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Python handlers of SIGINT and SIGTERM run at the end of this block; those of a third signal at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread
        return
    came: list[tuple[int, FrameType | None]] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > _PATIENCE:
            hand_on()

    def hand_on() -> None:
        number, frame = came[-1]
        came.clear()
        before[number](number, frame)

    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in before:
            signal.signal(number, keep)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            hand_on()
