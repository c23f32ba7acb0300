"""Limits of this process, for tests of what happens without room."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["files_up_to"]


@contextmanager
def files_up_to(nbytes: int) -> Iterator[None]:
    """No file that is written may be larger: a full disk that needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
