"""The averaged tensors and their lock, for the user's threads and shoal's. No thread waits for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from shoal.averaging import TensorLock, Turn
from shoal.base.clock import seconds_text
from shoal.errors import LocalError

__all__ = ["LockedTensors"]

T = TypeVar("T")

_LOCK_TIMEOUT_S = 300.0
"""The longest wait for the tensors. Copying any state takes far less: after this, some thread never lets go of them."""


class _Block(Turn):
    """A `with get_tensors()` block."""

    tensors: tuple[torch.Tensor, ...]
    lock: TensorLock

    def __enter__(self) -> list[torch.Tensor]:  # type: ignore[override]
        try:
            if not self.wait_in_line():
                other = self.lock.holder or "somebody"
                raise LocalError(f"no access to the tensors within {seconds_text(self.timeout_s)}: {other} held them")
            self.lock.may_change()
            return list(self.tensors)  # a list: `tensors[0] += 1` also assigns
        except BaseException:
            self.leave()
            raise


class LockedTensors:
    """Tensors and their lock.

    Args:
        tensors: the tensors that the lock protects.

    Attributes:
        lock: the lock, in the form that the async core takes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.lock = TensorLock()
        self._exporters: set[int] = set()  # threads that export the state, while shoal holds the lock

    def acquire(self, *, wait: bool = True) -> AbstractContextManager[list[torch.Tensor]]:
        """Hold the tensors within a `with` statement, which gets a list of them.

        Args:
            wait: wait for others that hold them, some minutes at most; False: `LocalError` at once.

        Raises:
            LocalError: this thread would wait for itself; or, at the statement, others held them for all of the time.
        """
        if threading.get_ident() in self._exporters:
            return nullcontext(list(self.tensors))
        if self.lock.held_by_this_thread:
            raise LocalError("this thread holds the tensors already: leave the other `with get_tensors()` block first")
        holder = f"a get_tensors() block in thread {threading.current_thread().name!r}"
        block = self.lock.acquire_in_thread(holder, _LOCK_TIMEOUT_S if wait else 0.0, _Block)
        assert isinstance(block, _Block)
        block.tensors, block.lock = self.tensors, self.lock
        return block

    def check_not_held(self) -> None:
        """Raise `LocalError` if the calling thread holds the tensors: it is about to wait for code that needs them."""
        if self.lock.held_by_this_thread:
            raise LocalError("this thread holds the tensors: leave the `with get_tensors()` block before you wait")

    def export(self, get_state: Callable[[], T]) -> T:
        """Call the function that exports the state while shoal holds the lock; the function may use `held`."""
        me = threading.get_ident()
        self._exporters.add(me)
        try:
            return get_state()
        finally:
            self._exporters.discard(me)
