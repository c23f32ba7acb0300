"""A list of tensors becomes one flat vector, shares of it, and parts of shares. Integers only, no tensors.

The averaged tensors of one dtype and codec form a *segment*, in their order. The segments, in the order of their first
tensors, form the *flat vector*. Within a segment the vector is contiguous in memory and on the wire, so a tile may hold
pieces of many tensors. It says how many elements it has of each tensor, because no scale of a codec may span two
tensors. Share i belongs to member i; a *tile* is a piece of one share within one segment, of at most `tile_bytes` as
encoded if it were of one tensor. Everyone derives the same tiles from (layout, shares, tile_bytes), which the leader
sends once.

The *schema* must be equal for that: index, shape, dtype and codec of each tensor. The join message carries it as plain
bytes, so that a refusal can name the first tensor that differs.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, NamedTuple

import msgspec

from shoal.errors import ConfigError
from shoal.protocol.wire import MAX_GROUP_SIZE, MAX_TILES, Count, Name, read

__all__ = ["Layout", "Segment", "TensorSpec", "Tile", "first_difference", "most_tiles"]

_COMMIT_BYTES, _HELD_BYTES = (1 << 20) - (1 << 12), 42
"""For this reason a large group has fewer tiles: each names its contributors, a bit each, and so many bytes more."""

MIN_TILE_BYTES, MAX_TILE_BYTES = 1 << 10, 8 << 20
"""The smallest and the largest `part_size_bytes`."""

_MAX_TENSORS, _MOST_DIMENSIONS = 1 << 18, 1 << 10
_HEAD_BYTES, _SPEC_BYTES = 5, 1 << 14
"""The most bytes of a schema before its first tensor, and of the description of one tensor."""

_SHOWN = 120


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as peers compare it.

    Attributes:
        shape: its shape.
        dtype: name of its dtype, as `float32`.
        codec: name of the codec that it is sent with.
    """

    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    dtype: Name
    codec: Name

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


EncodedBytes = Callable[[str, str, int], int]
"""The encoded size for (dtype, codec, number of elements)."""

_Schema = Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=_MAX_TENSORS)]
_spec_decoder = msgspec.msgpack.Decoder(TensorSpec)
_schema_decoder: msgspec.msgpack.Decoder[tuple[TensorSpec, ...]] = msgspec.msgpack.Decoder(_Schema)


class Segment(NamedTuple):
    """The tensors of one dtype and codec: elements `start` to `stop` of the flat vector."""

    start: int
    stop: int
    dtype: str
    codec: str


class Tile(NamedTuple):
    """Elements `start` to `stop` of the flat vector, within one segment, at first owned by member `reducer`.

    `sizes` are how many of them each tensor has that it holds a piece of.
    """

    number: int
    reducer: int
    segment: int
    start: int
    stop: int
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Layout:
    """The place of each tensor in the flat vector: at `offsets`, in its segment.

    Args:
        specs: the tensors in order; at least one element in all.
        encoded_bytes: the bytes that so many elements take on the wire; more elements never take fewer bytes.

    Raises:
        ConfigError: there is nothing to average, or there are too many tensors.
    """

    def __init__(self, specs: Sequence[TensorSpec], encoded_bytes: EncodedBytes) -> None:
        if len(specs) > _MAX_TENSORS:
            raise ConfigError(f"averaged_tensors has {len(specs)} tensors, the most is {_MAX_TENSORS}")
        self.specs = tuple(specs)
        alike: dict[tuple[str, str], list[int]] = {}
        for index, spec in enumerate(specs):
            if spec.numel:
                alike.setdefault((spec.dtype, spec.codec), []).append(index)
        if not alike:
            raise ConfigError("averaged_tensors has no elements: give at least one tensor that is not empty")
        segments: list[Segment] = []
        offsets = [0] * len(specs)
        stop = 0
        for (dtype, codec), indices in alike.items():
            start = stop
            for index in indices:
                offsets[index] = stop
                stop += specs[index].numel
            segments.append(Segment(start, stop, dtype, codec))
        self.segments, self.offsets, self.numel = tuple(segments), tuple(offsets), stop
        self._borders = [*sorted(offsets[index] for indices in alike.values() for index in indices), stop]
        self._encoded_bytes = encoded_bytes

    @property
    def schema(self) -> bytes:
        """The bytes that peers compare when they meet (compressed MessagePack)."""
        return zlib.compress(msgspec.msgpack.encode(self.specs), 1)

    def tiles(self, shares: Sequence[int], tile_bytes: int, codecs: Sequence[str] | None = None) -> list[Tile]:
        """Cut the shares to tiles.

        Args:
            shares: elements of the flat vector that each member owns, in order.
            tile_bytes: upper bound on a tile as encoded.
            codecs: the codec of each segment, if they are not those that the schema names.

        Raises:
            ConfigError: the shares do not cover the vector exactly, or the tiles would be too many or too large.
        """
        if any(size < 0 for size in shares) or sum(shares) != self.numel:
            raise ConfigError(f"shares of {sum(shares)} elements do not cover the vector of {self.numel}")
        if not MIN_TILE_BYTES <= tile_bytes <= MAX_TILE_BYTES:
            raise ConfigError(f"part_size_bytes={tile_bytes} is not within {MIN_TILE_BYTES}..{MAX_TILE_BYTES}")
        pieces = list(self._pieces(shares, tile_bytes, codecs))
        if sum(count for *_, count in pieces) > (most := most_tiles(len(shares))):
            raise ConfigError(f"more than {most} tiles: choose a larger part_size_bytes than {tile_bytes}")
        tiles: list[Tile] = []
        for reducer, number, start, stop, count in pieces:
            # Equal pieces rather than a short last one: the pipeline ends evenly.
            cuts = [start + (stop - start) * piece // count for piece in range(count + 1)]
            tiles += [
                Tile(len(tiles) + i, reducer, number, *cut, self._sizes(*cut)) for i, cut in enumerate(pairwise(cuts))
            ]
        return tiles

    def check_tile_bytes(self, tile_bytes: int, members: int, codecs: Sequence[str] | None = None) -> None:
        """Raise `ConfigError` if the tiles could be too many in a group of so many members, whatever the shares."""
        count, most = self._count(tile_bytes, codecs) + members - 1, most_tiles(members)
        if count > most:
            raise ConfigError(
                f"part_size_bytes={tile_bytes} makes up to {count} tiles of these tensors, there can be {most}, "
                f"in a group of {members}: choose a larger part_size_bytes, or fewer different codecs"
            )

    def most_members(self, tile_bytes: int, codecs: Sequence[str] | None = None) -> int:
        """The most members of a group that this vector can be divided among; 1 if it has too many tiles for more."""
        count = self._count(tile_bytes, codecs)
        fit = (size for size in range(MAX_GROUP_SIZE, 1, -1) if count + size - 1 <= most_tiles(size))
        return next(fit, 1)

    def _count(self, tile_bytes: int, codecs: Sequence[str] | None) -> int:
        """Return how many tiles one member would own that owns all."""
        return sum(count for *_, count in self._pieces([self.numel], tile_bytes, codecs))

    def _sizes(self, start: int, stop: int) -> tuple[int, ...]:
        """Return how many of these elements each tensor has, without those that have none."""
        inside = self._borders[bisect_right(self._borders, start) : bisect_left(self._borders, stop)]
        return tuple(after - before for before, after in pairwise((start, *inside, stop)))

    def _pieces(
        self, shares: Sequence[int], tile_bytes: int, codecs: Sequence[str] | None
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """The pieces that are each cut to tiles: (reducer, segment, start, stop, how many tiles)."""
        coded = zip(self.segments, codecs or [segment.codec for segment in self.segments], strict=True)
        most = [self._elements_within(tile_bytes, segment, codec) for segment, codec in coded]
        for reducer, number, start, stop in self._intervals(shares):
            yield reducer, number, start, stop, -(-(stop - start) // most[number])

    def _elements_within(self, nbytes: int, segment: Segment, codec: str) -> int:
        """Return how many elements of this segment the codec can encode in so many bytes; one at least."""
        # By bisection: some codecs have a header, or scales of blocks. However few bytes they take, at most two
        # elements count for a byte: a tile is also the unit of work.
        counts = range(1, min(segment.stop - segment.start, 2 * nbytes) + 1)
        return max(1, bisect_right(counts, nbytes, key=lambda count: self._encoded_bytes(segment.dtype, codec, count)))

    def _intervals(self, shares: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """The stretches in which no share and no segment ends: (reducer, segment, start, stop), in order, not empty."""
        number, start = 0, 0
        for reducer, end in enumerate(accumulate(shares)):
            while start < end:
                stop = min(end, self.segments[number].stop)
                yield reducer, number, start, stop
                start = stop
                number += start == self.segments[number].stop


def most_tiles(members: int) -> int:
    """The most tiles of a round of so many members."""
    return min(MAX_TILES, _COMMIT_BYTES // (_HELD_BYTES + (members + 7) // 8))


def first_difference(mine: bytes, theirs: bytes, *, me: str, other: str) -> str | None:
    """Compare two schemas: a sentence that names the first difference, None if they are equal.

    Anybody may send one, and it may unpack to a thousand times its size. So no more of it is unpacked than ours has,
    and only the tensor that differs is read.

    Args:
        mine: one schema.
        theirs: another one.
        me: the name of the peer that has the first schema, as both sides will read it.
        other: the name of the peer that has the second schema.

    Raises:
        msgspec.MsgspecError: `theirs` is not a schema, as far as it was read.
    """
    if mine == theirs:
        return None
    ours, borders = _own(mine)
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(theirs, _HEAD_BYTES + len(ours) + _SPEC_BYTES)
    except zlib.error as error:
        raise msgspec.DecodeError(f"a schema that is not compressed: {error}") from error
    if not (unpacker.eof or unpacker.unconsumed_tail):
        raise msgspec.DecodeError("a schema that ends too soon")
    count, begin = _array_at(data, 0)
    if count > _MAX_TENSORS:
        raise msgspec.DecodeError(f"a schema of {count} tensors, the most is {_MAX_TENSORS}")
    body = data[begin:]
    index = bisect_right(borders, _common(ours, body)) - 1
    start, tensors = borders[index], len(borders) - 1
    if index >= min(count, tensors):
        if count == tensors and body != ours:
            raise msgspec.DecodeError("bytes behind a schema")
        return None if count == tensors else f"there are {tensors} tensors at {me} and {count} at {other}"
    our = read(_spec_decoder, ours[start : borders[index + 1]])
    their = read(_spec_decoder, body[start : _end_of(body, start)])
    for field in ("shape", "dtype", "codec"):
        here, there = getattr(our, field), getattr(their, field)
        if here != there:
            return f"tensor {index} has {field} {_show(here)} at {me} and {_show(there)} at {other}"
    raise msgspec.DecodeError("a schema in which numbers are longer than they have to be")


@lru_cache(maxsize=16)
def _own(schema: bytes) -> tuple[bytes, list[int]]:
    """A schema of ours without its length, and where the description of each tensor in it begins; then its end."""
    data = zlib.decompress(schema)
    sizes = (len(msgspec.msgpack.encode(spec)) for spec in read(_schema_decoder, data))
    return data[_array_at(data, 0)[1] :], list(accumulate(sizes, initial=0))


def _common(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least


def _array_at(data: bytes, at: int) -> tuple[int, int]:
    """The length of the MessagePack array that begins there, and where its first item does."""
    first = data[at] if at < len(data) else 0xC1
    size = {0xDC: 2, 0xDD: 4}.get(first, 0)
    if not size and first & 0xF0 != 0x90:
        raise msgspec.DecodeError("a schema that is no list of tensors")
    return (int.from_bytes(data[at + 1 : at + 1 + size], "big") if size else first & 0x0F), at + 1 + size


def _end_of(data: bytes, at: int) -> int:
    """Where the tensor ends whose description begins there: two texts follow a shape of numbers."""
    fields, at = _array_at(data, at)
    sizes, at = _array_at(data, at)
    if fields != len(TensorSpec.__struct_fields__) or sizes > _MOST_DIMENSIONS:
        raise msgspec.DecodeError("a schema with something else than tensors")
    for item in range(sizes + fields - 1):
        first = data[at] if at < len(data) else 0xC1
        if item < sizes:
            at += 1 + {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(first, 0)
        else:
            size = {0xD9: 1, 0xDA: 2, 0xDB: 4}.get(first, 0)
            at += 1 + size + (int.from_bytes(data[at + 1 : at + 1 + size], "big") if size else first & 0x1F)
    return at


def _show(value: object) -> str:
    shown = str(list(value[:_SHOWN])) if isinstance(value, tuple) else str(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
