"""The averaged tensors between the user's threads and shoal's: who holds them, and who would wait for himself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from shoal.averager import TensorLock
from shoal.errors import LocalError

__all__ = ["HeldTensors"]

T = TypeVar("T")

_LOCK_TIMEOUT_S = 300.0
"""Far longer than copying any state takes: somebody has forgotten that he holds the tensors."""


class HeldTensors:
    """Tensors and their lock.

    Args:
        tensors: what the lock is for.

    Attributes:
        lock: as the async core takes it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.lock = TensorLock()
        self._exporters: set[int] = set()  # threads that export the state, while shoal holds the lock

    @contextmanager
    def held(self, *, wait: bool = True) -> Iterator[list[torch.Tensor]]:
        """Hold the tensors, and get a list of them; raises `LocalError` where that would wait for ever.

        Args:
            wait: for others that hold them, some minutes at most; False: `LocalError` at once.
        """
        if threading.get_ident() in self._exporters:
            yield list(self.tensors)
            return
        if self.lock.mine:
            raise LocalError("this thread holds the tensors already: leave the other `with get_tensors()` block first")
        holder = f"a get_tensors() block in thread {threading.current_thread().name!r}"
        limit_s = _LOCK_TIMEOUT_S if wait else 0.0
        with self.lock.holding(holder, limit_s) as has_come:
            if not has_come:
                other = self.lock.holder or "somebody"
                raise LocalError(f"no access to the tensors within {limit_s:g} s: {other} held them")
            try:
                yield list(self.tensors)  # a list: `tensors[0] += 1` also assigns
            finally:
                self.lock.generation += 1

    def check_not_held(self) -> None:
        """Raise `LocalError` if the calling thread holds them: it is about to wait for somebody who needs them."""
        if self.lock.mine:
            raise LocalError("this thread holds the tensors: leave the `with get_tensors()` block before you wait")

    def export(self, get_state: Callable[[], T]) -> T:
        """Call what exports the state, while shoal holds the lock: it may use `held`."""
        me = threading.get_ident()
        self._exporters.add(me)
        try:
            return get_state()
        finally:
            self._exporters.discard(me)
