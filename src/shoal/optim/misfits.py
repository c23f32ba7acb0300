"""Offered states that turned out not to fit: one of the same kind is not downloaded a third time.

Most misfits are seen in the manifest, before anything is downloaded. The rest shows when a step is tried. A
single donor's state may be broken, so a kind has two downloads. States are of one kind if they differ in numbers only:
the next epoch's is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from shoal.compression import dtype_name
from shoal.optim.optimizer_state import AnyTensor
from shoal.wire import encode

__all__ = ["Misfits"]

_DOWNLOADS = 2
_REMEMBERED = 64


class Misfits:
    """The states that were downloaded in vain, by kind."""

    def __init__(self) -> None:
        self._failed: dict[bytes, tuple[int, str]] = {}

    def add(self, values: Any, tensors: Sequence[AnyTensor], why: str) -> None:
        """A downloaded state did not fit."""
        kind = _kind(values, tensors)
        times, _ = self._failed.pop(kind, (0, ""))
        self._failed[kind] = times + 1, why
        if len(self._failed) > _REMEMBERED:
            del self._failed[next(iter(self._failed))]

    def why_not(self, values: Any, tensors: Sequence[AnyTensor]) -> str | None:
        """Why a state like this is not downloaded again; None if it may be."""
        times, why = self._failed.get(_kind(values, tensors), (0, "")) if self._failed else (0, "")
        return f"{why} (it was downloaded {times} times)" if times >= _DOWNLOADS else None


def _kind(values: Any, tensors: Sequence[AnyTensor]) -> bytes:
    forms = [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in tensors]
    return hashlib.sha256(encode([_without_numbers(values), forms])).digest()


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return [[_without_numbers(key), _without_numbers(item)] for key, item in value.items()]
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value
