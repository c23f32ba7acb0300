"""What a program may have set in torch around its loop: contexts, by what a test is named after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

import torch

__all__ = ["ODD"]

T = TypeVar("T")


@contextmanager
def _set(get: Callable[[], T], put: Callable[[T], object], value: T) -> Iterator[None]:
    """Of the whole process, but for threads; Lightning's `precision="bf16-true"` sets the dtype so within each step."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


_default_dtype = partial(_set, torch.get_default_dtype, torch.set_default_dtype)
_threads = partial(_set, torch.get_num_threads, torch.set_num_threads)
_precision = partial(_set, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)


@contextmanager
def _deterministic() -> Iterator[None]:
    """With memory that is filled with NaN before it is used."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@contextmanager
def _flushed() -> Iterator[None]:
    """Of one thread."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


ODD: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bfloat16 by default": partial(_default_dtype, torch.bfloat16),
    "float16 by default": partial(_default_dtype, torch.float16),
    "float64 by default": partial(_default_dtype, torch.float64),
    "no memory by default": partial(torch.device, "meta"),
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "deterministic algorithms": _deterministic,
    "two threads": partial(_threads, 2),
    "products of less precision": partial(_precision, "medium"),
    "flushed denormals": _flushed,
}
"""In each of these shoal computes the same."""
