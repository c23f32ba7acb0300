"""What the members of a group have in common: the tensors, and how the vector of a round may be cut.

The *schema* must be equal: index, shape, dtype and codec of each tensor. The join message carries it as plain bytes, so
that a refusal can name the first tensor that differs.

The leader of a group sends shares and a size of tiles, by which all members cut the same tiles (`shoal.layout`). A
round has so many that its commit fits into one message.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated

import msgspec

from shoal.errors import ConfigError
from shoal.layout import MAX_TENSORS, TensorSpec, Tiling, VectorLayout
from shoal.protocol.wire import MAX_GROUP_SIZE, MAX_TILES, read

__all__ = [
    "MAX_TILE_BYTES",
    "MIN_TILE_BYTES",
    "check_tile_bytes",
    "first_difference",
    "most_members",
    "most_tiles",
    "schema_of",
    "tiling",
]

MIN_TILE_BYTES, MAX_TILE_BYTES = 1 << 10, 8 << 20
"""The smallest and the largest `part_size_bytes`."""

_COMMIT_BYTES, _HELD_BYTES = (1 << 20) - (1 << 12), 42
"""For this reason a large group has fewer tiles: each names its contributors, a bit each, and so many bytes more."""

_HEAD_BYTES, _SPEC_BYTES, _MOST_DIMENSIONS = 5, 1 << 14, 1 << 10
"""The most bytes of a schema before its first tensor, and of the description of one tensor; and its most dimensions."""

_SHOWN = 120

_Schema = Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]
_spec_decoder = msgspec.msgpack.Decoder(TensorSpec)
_schema_decoder: msgspec.msgpack.Decoder[tuple[TensorSpec, ...]] = msgspec.msgpack.Decoder(_Schema)


# --------------------------------------------------------------------------------------------------------------- tiles


def most_tiles(members: int) -> int:
    """The most tiles of a round of so many members."""
    return min(MAX_TILES, _COMMIT_BYTES // (_HELD_BYTES + (members + 7) // 8))


def tiling(layout: VectorLayout, shares: Sequence[int], tile_bytes: int, codecs: Sequence[str] | None = None) -> Tiling:
    """The tiles of a round, as its leader says: see `VectorLayout.tiling`.

    Raises:
        ConfigError: the shares do not cover the vector exactly, or the tiles would be too many or too large.
    """
    if not MIN_TILE_BYTES <= tile_bytes <= MAX_TILE_BYTES:
        raise ConfigError(f"part_size_bytes={tile_bytes} is not within {MIN_TILE_BYTES}..{MAX_TILE_BYTES}")
    if layout.count(tile_bytes, shares, codecs) > (most := most_tiles(len(shares))):
        raise ConfigError(f"more than {most} tiles: choose a larger part_size_bytes than {tile_bytes}")
    return layout.tiling(shares, tile_bytes, codecs)


def check_tile_bytes(layout: VectorLayout, tile_bytes: int, members: int, codecs: Sequence[str] | None = None) -> None:
    """Raise `ConfigError` if the tiles could be too many in a group of so many members, whatever the shares."""
    count, most = layout.count(tile_bytes, codecs=codecs) + members - 1, most_tiles(members)
    if count > most:
        raise ConfigError(
            f"part_size_bytes={tile_bytes} makes up to {count} tiles of these tensors, there can be {most}, "
            f"in a group of {members}: choose a larger part_size_bytes, or fewer different codecs"
        )


def most_members(layout: VectorLayout, tile_bytes: int, codecs: Sequence[str] | None = None) -> int:
    """The most members of a group that this vector can be divided among; 1 if it has too many tiles for more."""
    count = layout.count(tile_bytes, codecs=codecs)
    fit = (size for size in range(MAX_GROUP_SIZE, 1, -1) if count + size - 1 <= most_tiles(size))
    return next(fit, 1)


# -------------------------------------------------------------------------------------------------------------- schema


def schema_of(specs: Sequence[TensorSpec]) -> bytes:
    """The bytes that peers compare when they meet (compressed MessagePack)."""
    return zlib.compress(msgspec.msgpack.encode(specs), 1)


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
    if count > MAX_TENSORS:
        raise msgspec.DecodeError(f"a schema of {count} tensors, the most is {MAX_TENSORS}")
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
