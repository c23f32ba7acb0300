"""Changes of a model's weights that need several steps: an interrupt in the middle must not pass for a whole one.

Ctrl+C waits for the end of the short part that the ranks do together (`uninterrupted`). Whatever ends a change in its
middle nevertheless leaves the model marked (`begin` without `end`), and nobody can use its weights before a `load`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from shoal.errors import LocalError

__all__ = ["begin", "check_whole", "end", "is_whole", "uninterrupted"]

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
