"""A list of tensors as one flat vector, and the tiles of it. Integers only: no tensor is touched.

The tensors of one dtype and codec, in their order, form a *segment*: one flat tensor, contiguous in memory and on the
wire. The segments, in the order of their first tensors, form the *vector*. Its owners have *shares* of it, one after
another: so many elements each. A tile is a range of one segment that lies in one share: so it may hold elements of many
tensors. It is known how many it has of each tensor (`Segment.sizes`), because no scale of a codec may span two tensors.
All who know the tensors, the shares and the size of a tile cut the same tiles.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec

from shoal.errors import ConfigError
from shoal.layout.tiles import Tile, Tiling

__all__ = ["MAX_TENSORS", "EncodedBytes", "Segment", "TensorSpec", "VectorLayout"]

MAX_TENSORS = 1 << 18
"""The most tensors of a vector."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Name = Annotated[str, msgspec.Meta(max_length=512)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as peers compare it.

    Attributes:
        shape: its shape.
        dtype: name of its dtype, as `float32`.
        codec: name of the codec that it is sent with.
    """

    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=1 << 10)]
    dtype: _Name
    codec: _Name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


EncodedBytes = Callable[[str, str, int], int]
"""The encoded size for (dtype, codec, number of elements)."""


@dataclass(frozen=True)
class Segment:
    """The tensors of one dtype and codec.

    Attributes:
        dtype: theirs.
        codec: theirs.
        start: where the segment begins in the vector.
        borders: where each tensor that is not empty begins in the segment; then where the last one ends.
    """

    dtype: str
    codec: str
    start: int
    borders: Sequence[int]

    @property
    def name(self) -> str:
        """Names it in tiles."""
        return f"{self.dtype} {self.codec}"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.borders[-1]

    @property
    def stop(self) -> int:
        """Where it ends in the vector."""
        return self.start + self.numel

    def sizes(self, tile: Tile) -> tuple[int, ...]:
        """The number of elements that a tile has of each tensor, without those that have none in it."""
        inside = self.borders[bisect_right(self.borders, tile.start) : bisect_left(self.borders, tile.stop)]
        return tuple(after - before for before, after in pairwise((tile.start, *inside, tile.stop)))


class VectorLayout:
    """The place of each tensor in the vector: at `offsets`, in its segment.

    Args:
        specs: the tensors in order; at least one element in all.
        encoded_bytes: the bytes that so many elements take on the wire; more elements never take fewer bytes.

    Raises:
        ConfigError: there is nothing to average, or there are too many tensors.
    """

    def __init__(self, specs: Sequence[TensorSpec], encoded_bytes: EncodedBytes) -> None:
        if len(specs) > MAX_TENSORS:
            raise ConfigError(f"averaged_tensors has {len(specs)} tensors, the most is {MAX_TENSORS}")
        self.specs = tuple(specs)
        alike: dict[tuple[str, str], list[int]] = {}
        for index, spec in enumerate(specs):
            if spec.numel:
                alike.setdefault((spec.dtype, spec.codec), []).append(index)
        if not alike:
            raise ConfigError("averaged_tensors has no elements: give at least one tensor that is not empty")
        segments: list[Segment] = []
        offsets, stop = [0] * len(specs), 0
        for (dtype, codec), indices in alike.items():
            borders = list(accumulate((specs[index].numel for index in indices), initial=0))
            for index, border in zip(indices, borders, strict=False):
                offsets[index] = stop + border
            segments.append(Segment(dtype, codec, stop, borders))
            stop += borders[-1]
        self.segments, self.offsets, self.numel = tuple(segments), tuple(offsets), stop
        self._encoded_bytes = encoded_bytes

    def tiling(self, shares: Sequence[int], tile_bytes: int, codecs: Sequence[str] | None = None) -> Tiling:
        """Cut the vector to tiles.

        Args:
            shares: elements of the vector that each owner has, in order; they cover it exactly (`check`).
            tile_bytes: upper bound on a tile as encoded if it were of one tensor.
            codecs: the codec of each segment, if they are not those that the specs name.
        """
        tiles: list[Tile] = []
        owners: list[int] = []
        for owner, segment, start, stop, count in self._stretches(shares, tile_bytes, codecs):
            # Equal tiles rather than a short last one: the pipeline ends evenly.
            cuts = [start + (stop - start) * number // count for number in range(count + 1)]
            tiles += [Tile(segment.name, *cut) for cut in pairwise(cuts)]
            owners += [owner] * count
        return Tiling(tuple(tiles), tuple(owners))

    def count(self, tile_bytes: int, shares: Sequence[int] | None = None, codecs: Sequence[str] | None = None) -> int:
        """The number of tiles of such a tiling, which is not made; without `shares` one owner has all.

        Raises:
            ConfigError: the shares do not cover the vector exactly.
        """
        if shares is not None and (any(size < 0 for size in shares) or sum(shares) != self.numel):
            raise ConfigError(f"shares of {sum(shares)} elements do not cover the vector of {self.numel}")
        return sum(count for *_, count in self._stretches(shares or [self.numel], tile_bytes, codecs))

    def _stretches(
        self, shares: Sequence[int], tile_bytes: int, codecs: Sequence[str] | None
    ) -> Iterator[tuple[int, Segment, int, int, int]]:
        """Where no share and no segment ends: (owner, segment, start and stop in it, how many tiles), none empty."""
        coded = zip(self.segments, codecs or [segment.codec for segment in self.segments], strict=True)
        most = [self._elements_within(tile_bytes, segment, codec) for segment, codec in coded]
        number, start = 0, 0
        for owner, end in enumerate(accumulate(shares)):
            while start < end:
                segment = self.segments[number]
                stop = min(end, segment.stop)
                count = -(-(stop - start) // most[number])
                yield owner, segment, start - segment.start, stop - segment.start, count
                start = stop
                number += start == segment.stop

    def _elements_within(self, nbytes: int, segment: Segment, codec: str) -> int:
        """Return how many elements of this segment the codec can encode in so many bytes; one at least."""
        # By bisection: some codecs have a header, or scales of blocks. However few bytes they take, at most two
        # elements count for a byte: a tile is also what is worked on at once.
        counts = range(1, min(segment.numel, 2 * nbytes) + 1)
        return max(1, bisect_right(counts, nbytes, key=lambda count: self._encoded_bytes(segment.dtype, codec, count)))
