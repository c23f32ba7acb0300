"""A lock that an interrupt at any moment leaves free."""

from __future__ import annotations

import _thread
import sys

__all__ = ["SafeLock"]


class SafeLock(_thread.RLock):  # type: ignore[misc]  # typeshed says final; CPython does not
    """A lock for `with` statements, which the thread that has it may take again.

    Python runs a signal's handler (Ctrl+C) between calls. Up to CPython 3.13 it does not look for signals between an
    `__enter__` in C and the block of the `with` statement. CPython 3.14 does: an interrupt there keeps the lock for
    ever. It does not look when a function of Python returns, so there the lock is taken within one.
    """

    if sys.version_info >= (3, 14):

        def __enter__(self) -> bool:
            """Take the lock."""
            before = self._recursion_count()
            try:
                return self.acquire()
            except BaseException:
                if self._recursion_count() > before:
                    self.release()
                raise
