"""How a list of tensors becomes one flat vector, slices of it, and parts of slices. Integers only; no tensor is touched.

All averaged tensors, one after another, form the *flat vector*. Neighbours with the same dtype and codec form a *run*:
within a run the vector is contiguous in memory and on the wire, so a part never cares where one tensor ends. Slice i
belongs to member i; a *part* is a piece of one slice within one run, of at most `part_bytes` as encoded. Everyone derives
the same parts from (layout, slices, part_bytes), which the leader sends once.

The *schema* is what must be equal for that: index, shape, dtype and codec of each tensor. It rides in the join as plain
bytes, so that a refusal can name the first tensor that differs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec

from shoal.errors import ConfigError

__all__ = ["MAX_PARTS", "Layout", "Part", "Run", "TensorSpec", "first_difference"]

MAX_PARTS = 1 << 16
"""More parts than this would make reports and commits too large: choose a larger `part_size_bytes`."""

MIN_PART_BYTES, MAX_PART_BYTES = 1 << 10, 8 << 20
_MAX_SCHEMA_BYTES = 16 << 20


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as peers compare it.

    Attributes:
        shape: its shape.
        dtype: name of its dtype, as `float32`.
        codec: name of the codec that it is sent with.
    """

    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    dtype: str
    codec: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Run(NamedTuple):
    """Neighbouring tensors of one dtype and codec: elements `start` to `stop` of the flat vector."""

    start: int
    stop: int
    dtype: str
    codec: str
    element_bytes: int


class Part(NamedTuple):
    """Elements `start` to `stop` of the flat vector, within one run, at first owned by member `owner`."""

    number: int
    owner: int
    run: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Layout:
    """Where each tensor lies in the flat vector.

    Args:
        specs: the tensors in order; at least one element in all.
        element_bytes: bytes that one element of (dtype, codec) takes on the wire.

    Raises:
        ConfigError: there is nothing to average.
    """

    def __init__(self, specs: Sequence[TensorSpec], element_bytes: Callable[[TensorSpec], int]) -> None:
        self.specs = tuple(specs)
        self.offsets = tuple(accumulate((spec.numel for spec in specs), initial=0))
        self.numel = self.offsets[-1]
        if not self.numel:
            raise ConfigError("averaged_tensors has no elements: give at least one tensor that is not empty")
        runs: list[Run] = []
        for spec, start, stop in zip(specs, self.offsets, self.offsets[1:], strict=False):
            if start == stop:
                continue
            if runs and (runs[-1].dtype, runs[-1].codec) == (spec.dtype, spec.codec):
                runs[-1] = runs[-1]._replace(stop=stop)
            else:
                runs.append(Run(start, stop, spec.dtype, spec.codec, element_bytes(spec)))
        self.runs = tuple(runs)

    @property
    def schema(self) -> bytes:
        """What is compared when peers meet (compressed MessagePack)."""
        return zlib.compress(msgspec.msgpack.encode(self.specs), 1)

    def parts(self, slices: Sequence[int], part_bytes: int) -> list[Part]:
        """Cut the slices to parts.

        Args:
            slices: elements of the flat vector that each member owns, in order.
            part_bytes: upper bound on a part as encoded.

        Raises:
            ConfigError: the slices do not cover the vector exactly, or the parts would be too many or too large.
        """
        if any(size < 0 for size in slices) or sum(slices) != self.numel:
            raise ConfigError(f"slices of {sum(slices)} elements do not cover the vector of {self.numel}")
        if not MIN_PART_BYTES <= part_bytes <= MAX_PART_BYTES:
            raise ConfigError(f"part_size_bytes={part_bytes} is not within {MIN_PART_BYTES}..{MAX_PART_BYTES}")
        if self._count(slices, part_bytes) > MAX_PARTS:
            raise ConfigError(f"more than {MAX_PARTS} parts: choose a larger part_size_bytes than {part_bytes}")
        parts: list[Part] = []
        begin = 0
        for owner, size in enumerate(slices):
            end = begin + size
            for number, run in enumerate(self.runs):
                start, stop = max(begin, run.start), min(end, run.stop)
                step = max(1, part_bytes // run.element_bytes)
                # Equal pieces rather than a short last one: the pipeline ends evenly.
                pieces = -(-(stop - start) // step)
                for piece in range(pieces):
                    cut = start + (stop - start) * piece // pieces
                    until = start + (stop - start) * (piece + 1) // pieces
                    parts.append(Part(len(parts), owner, number, cut, until))
            begin = end
        return parts

    def _count(self, slices: Sequence[int], part_bytes: int) -> int:
        borders = len(slices) * len(self.runs)
        return borders + sum((run.stop - run.start) * run.element_bytes // part_bytes for run in self.runs)


def first_difference(mine: bytes, theirs: bytes) -> str | None:
    """Compare two schemas: a sentence that names the first difference, None if they are equal.

    Raises:
        msgspec.MsgspecError: `theirs` is not a schema.
    """
    if mine == theirs:
        return None
    ours, others = _unpack(mine), _unpack(theirs)
    for index, (our, other) in enumerate(zip(ours, others, strict=False)):
        for field in ("shape", "dtype", "codec"):
            here, there = getattr(our, field), getattr(other, field)
            if here != there:
                return f"tensor {index} has {field} {_show(here)} here and {_show(there)} at the other peer"
    if len(ours) != len(others):
        return f"there are {len(ours)} tensors here and {len(others)} at the other peer"
    return None


def _unpack(schema: bytes) -> tuple[TensorSpec, ...]:
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(schema, _MAX_SCHEMA_BYTES)
    except zlib.error as error:
        raise msgspec.DecodeError(f"a schema that is not compressed: {error}") from error
    if unpacker.unconsumed_tail:
        raise msgspec.DecodeError(f"a schema of more than {_MAX_SCHEMA_BYTES} bytes")
    return msgspec.msgpack.decode(data, type=tuple[TensorSpec, ...])


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
