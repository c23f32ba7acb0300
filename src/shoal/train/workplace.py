"""Where an optimizer works, and how: on the host or where the parameters are, and as in the trainer's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.base.thread_state import ThreadState, way_of
from shoal.train.offload import Offload

__all__ = ["Workplace"]


class Workplace:
    """The place in which one optimizer and its schedule compute, in whatever thread that is done.

    Args:
        offload: lends the parameters host memory while the optimizer works; None: it works where they are.
        mixes: whether its steps make values of several others (see `mixes_values`).

    Attributes:
        on_host: whether steps are taken on the CPU, wherever the parameters are.
        offload: lends that memory, or does nothing.
    """

    def __init__(self, offload: Offload | None = None, *, mixes: bool = False) -> None:
        self.on_host, self.offload, self._mixes = offload is not None, offload or Offload([]), mixes
        self._beside: Workplace | None = None
        self.heed_thread()

    def heed_thread(self) -> None:
        """The trainer calls: what works here computes as in this thread from now on, in any thread."""
        self._heeded = ThreadState.here()

    def is_beside(self, other: Workplace) -> None:
        """Heed the thread that the other one heeds. Nothing is recorded here, whatever the trainer's loop does."""
        self._beside = other

    @property
    def thread(self) -> ThreadState:
        """The state of the thread in which the trainer has called last."""
        return self._heeded if self._beside is None else self._beside.thread._replace(gradients=False)

    @property
    def cores(self) -> int:
        """The cores that steps use here, if their rounding depends on that; else 0."""
        return self.thread.cores if self._mixes else 0

    @property
    def way(self) -> str:
        """The settings beside the optimizer's options that its steps depend on here, in words."""
        return way_of(self.thread, mixes=self._mixes)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the optimizer's own code work in the block."""
        with self.offload.on_host(), self.thread.in_force():
            yield
