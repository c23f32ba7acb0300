"""The layout of a state: its tensors, and the chunks in which it travels. Pure values: no loop, no network.

A state is metadata (plain MessagePack) and tensors, each encoded by a codec of its own, a large one tile by tile, so
that neither side needs room for a tensor twice. The encodings follow one another without gaps and are cut to chunks of
equal size, each with its digest. A model of 200,000 tensors has few kinds of them, so kinds are described, and named
for each tensor. A manifest from the network is checked here before anything is allocated for it, and nothing else in it
is believed:

- there are no more tensors than the receiver takes, and sizes follow from shapes, dtypes and codecs; the sum is within
  the receiver's limit;
- there are as many hashes as chunks;
- tensors that hold infinities are named in order, and their dtypes can hold some. NaN is shared nowhere: a donor looks
  at its tensors when it copies them, and a receiver at those that it has put together;
- metadata is plain: None, bool, int, float, str, bytes, list, dict.

Two manifests of the same layout describe the same bytes wherever their hashes are equal, whichever donors made them.
Because of that, a download takes chunks from several donors, and goes on from one to the next. Encoding and cutting
follow from values, shapes, dtypes and codecs alone, so donors of equal states have equal hashes. Each donor says itself
which tensors hold infinities (masks, bounds); a donor that names others has another state. Metadata is not compared: it
may hold values of a donor's own, and comes from one of the donors.
"""

from __future__ import annotations

import bisect
import math
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import torch

from shoal.compression import CompressionBase, NoCompression, codec_by_name, dtype_by_name, dtype_name
from shoal.errors import ConfigError, PeerProtocolError
from shoal.protocol.wire import MAX_KINDS, ManifestReply, decode_plain, encode_plain

__all__ = [
    "Accept",
    "Manifest",
    "StateTensorSpec",
    "chunk_size",
    "describe",
    "matching",
    "read_manifest",
    "shares",
]

MIN_CHUNK_BYTES = 1 << 10
"""The smallest chunks that a receiver takes."""

CHUNK_BYTES = 1 << 20
"""The size of a chunk. It is doubled until the chunks are few enough."""

MAX_CHUNK_BYTES = 16 << 20
"""The largest chunks."""

MAX_CHUNKS = 4096
"""So many hashes fit into one message beside the other fields; larger states get larger chunks."""

TILE_ELEMENTS = 1 << 20
"""A tile of a tensor, whose elements are encoded together, has so many at most."""

MAX_METADATA_BYTES = 1 << 20
"""The longest metadata of a state."""

_MAX_EXPANSION, _SMALL_BYTES = 256, 16 << 20
"""A state is at most so many times as large as its encoding, unless it is small: taking memory must cost bytes."""

MAX_TENSORS = 1 << 20
"""The most tensors in a state, for a receiver that has none of its own to compare with."""

_NUMBER = "I"
"""Of `array`: a kind of tensor takes 4 bytes."""

_MAX_DIMS = 32
_MAX_ELEMENTS = 1 << 44


@dataclass(frozen=True, slots=True)
class StateTensorSpec:
    """One tensor of a state, without its values. Tensors of one kind mostly have the same object.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        codec: how it is encoded; it supports the dtype.
        numel: number of elements.
        raw_bytes: size in memory.
        encoded_bytes: size as it is sent.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: CompressionBase
    numel: int = field(init=False, repr=False, compare=False)
    raw_bytes: int = field(init=False, repr=False, compare=False)
    encoded_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        tiles, rest = divmod(numel, TILE_ELEMENTS)
        encoded_bytes = (tiles * self._tile_bytes(TILE_ELEMENTS) if tiles else 0) + self._tile_bytes(rest)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "raw_bytes", numel * self.dtype.itemsize)
        object.__setattr__(self, "encoded_bytes", encoded_bytes)

    @property
    def raw(self) -> bool:
        """Return whether the encoding is the tensor's memory itself."""
        return self.codec == NoCompression()

    def tiles(self) -> Iterator[tuple[int, int, int, int]]:
        """The tiles: (first element, the one after the last, first byte, the one after the last)."""
        start = 0
        for first in range(0, self.numel, TILE_ELEMENTS):
            last = min(first + TILE_ELEMENTS, self.numel)
            stop = start + self._tile_bytes(last - first)
            yield first, last, start, stop
            start = stop

    def _tile_bytes(self, numel: int) -> int:
        return self.codec.encoded_bytes(numel, self.dtype) if numel else 0

    def encode_into(self, tensor: torch.Tensor, out: memoryview) -> None:
        """Fill `out` with the encoding of a tensor of this kind. One that is not contiguous may be copied for that."""
        if self.raw and not tensor.is_contiguous():
            self.codec.encode_into(tensor, out)
            return
        flat = tensor.detach().reshape(-1)
        for first, last, start, stop in self.tiles():
            self.codec.encode_into(flat[first:last], out[start:stop])


@dataclass(frozen=True)
class Manifest:
    """One snapshot of one donor.

    Attributes:
        snapshot: its name at the donor.
        epoch: the epoch that the donor says it is of.
        metadata: plain values that go with the tensors.
        tensors: the tensors in order.
        chunk_bytes: size of every chunk but the last.
        hashes: digest of every chunk.
        infinite: positions of the tensors that hold infinities, ascending.
    """

    snapshot: bytes
    epoch: int
    metadata: Any
    tensors: tuple[StateTensorSpec, ...]
    chunk_bytes: int
    hashes: tuple[bytes, ...]
    infinite: tuple[int, ...] = ()
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The places at which the tensors' encodings begin, and at which the last one ends."""

    def __post_init__(self) -> None:
        sizes = (spec.encoded_bytes for spec in self.tensors)
        object.__setattr__(self, "offsets", tuple(accumulate(sizes, initial=0)))

    @property
    def total_bytes(self) -> int:
        """Size of the encoded state."""
        return self.offsets[-1]

    def same_layout(self, other: Manifest) -> bool:
        """Return whether chunk `i` covers the same elements in both."""
        return self.tensors == other.tensors and self.chunk_bytes == other.chunk_bytes

    def same_content(self, other: Manifest) -> bool:
        """Return whether both describe the same tensors, bit for bit. Metadata and epoch are each donor's own."""
        return self.same_layout(other) and self.hashes == other.hashes and self.infinite == other.infinite

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk within the encoded state, and the byte after its last."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.total_bytes)

    def pieces(self, chunk: int, offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """The ranges that a chunk covers, in order.

        Args:
            chunk: its number.
            offsets: where places begin in the encoded state, and where the last one ends: those of the tensors, say.

        Yields:
            The number of the place, the first byte within it, and the byte after the last.
        """
        start, stop = self.chunk_range(chunk)
        place = bisect.bisect_right(offsets, start) - 1
        while start < stop:
            first, end = offsets[place], min(offsets[place + 1], stop)
            if end > start:
                yield place, start - first, end - first
            start, place = max(start, end), place + 1

    def to_message(self) -> ManifestReply:
        """The manifest as it is sent. Raises `ConfigError` if it cannot be; says why."""
        try:
            metadata = encode_plain(self.metadata)
        except ValueError as error:
            raise ConfigError(f"the state's metadata must be plain values: {error}") from error
        if len(metadata) > MAX_METADATA_BYTES:
            raise ConfigError(
                f"the state's metadata takes {len(metadata)} bytes, at most {MAX_METADATA_BYTES} can be sent: "
                "put large values into tensors"
            )
        numbers = {spec: number for number, spec in enumerate(dict.fromkeys(self.tensors))}
        if len(numbers) > MAX_KINDS:
            raise ConfigError(
                f"the state has tensors of {len(numbers)} kinds (shape, dtype, codec), at most {MAX_KINDS} fit"
            )
        kinds = [(list(s.shape), dtype_name(s.dtype), s.codec.name, s.encoded_bytes) for s in numbers]
        order = zlib.compress(array(_NUMBER, map(numbers.__getitem__, self.tensors)).tobytes())
        hashes, infinite = list(self.hashes), list(self.infinite)
        return ManifestReply(self.snapshot, self.epoch, metadata, kinds, order, self.chunk_bytes, hashes, infinite)


Accept = Callable[[Manifest], str | None]
"""Checks a manifest before anything is fetched: None to take it, else the reason against it."""


def describe(tensors: Sequence[torch.Tensor], codecs: Sequence[CompressionBase] | None) -> tuple[StateTensorSpec, ...]:
    """The layout of a state. `codecs` has one per tensor; None: no compression. One that saves nothing is not used.

    Raises:
        ConfigError: numbers differ, or a codec does not support its tensor.
    """
    chosen = [NoCompression()] * len(tensors) if codecs is None else list(codecs)
    if len(chosen) != len(tensors):
        raise ConfigError(f"a state of {len(tensors)} tensors needs as many codecs, got {len(chosen)}")
    specs = []
    for position, (tensor, codec) in enumerate(zip(tensors, chosen, strict=True)):
        dtype_name(tensor.dtype)
        if not codec.supports(tensor.dtype):
            raise ConfigError(f"codec {codec.name!r} does not support tensor {position} of the state ({tensor.dtype})")
        spec = _kind(tuple(tensor.shape), tensor.dtype, codec)
        specs.append(spec if spec.encoded_bytes < spec.raw_bytes else _kind(spec.shape, spec.dtype, NoCompression()))
    return tuple(specs)


def chunk_size(total_bytes: int) -> int:
    """The chunk size for a state of this size: 1 MiB, and more only where there would be too many chunks.

    It follows from the size alone, so that donors of equal states cut them alike.

    Raises:
        ConfigError: the state is larger than can be shared (64 GiB).
    """
    size = CHUNK_BYTES
    while total_bytes > size * MAX_CHUNKS:
        size *= 2
    if size > MAX_CHUNK_BYTES:
        raise ConfigError(
            f"a state of {total_bytes} bytes cannot be shared, the limit is {MAX_CHUNK_BYTES * MAX_CHUNKS}"
        )
    return size


def shares(specs: Sequence[StateTensorSpec], count: int = 2) -> list[range]:
    """The positions of tensors in at most `count` shares, in order and about as large.

    Two are faster than one for work that passes over memory; the executor of a peer has two threads.
    """
    ends = list(accumulate((spec.raw_bytes for spec in specs), initial=0))
    cuts = [bisect.bisect_left(ends, ends[-1] * number / count) for number in range(count)] + [len(specs)]
    return [range(first, last) for first, last in pairwise(cuts) if first < last]


def matching(tensors: Sequence[torch.Tensor]) -> Accept:
    """Accept only states whose tensors have these shapes and dtypes."""
    ours = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]

    def accept(manifest: Manifest) -> str | None:
        theirs = [(spec.shape, spec.dtype) for spec in manifest.tensors]
        for position, (have, want) in enumerate(zip(theirs, ours, strict=False)):
            if have != want:
                return f"tensor {position} of its state is {_show(have)}, ours is {_show(want)}"
        if len(theirs) != len(ours):
            return f"its state has {len(theirs)} tensors, ours has {len(ours)}"
        return None

    return accept


def read_manifest(reply: ManifestReply, *, max_state_bytes: int, max_tensors: int = MAX_TENSORS) -> Manifest:
    """Check a manifest from the network. Nothing is allocated for the state.

    Args:
        reply: the donor's message.
        max_state_bytes: the largest state that is taken, both encoded and decoded.
        max_tensors: the most tensors that are taken.

    Raises:
        PeerProtocolError: it contradicts itself, or is over a limit; says how.
    """
    try:
        metadata = decode_plain(reply.metadata)
        kinds = [_read_kind(*entry) for entry in reply.kinds]
        tensors = tuple(map(kinds.__getitem__, _read_order(reply.order, len(kinds), max_tensors)))
    except (msgspec.MsgspecError, zlib.error, ConfigError) as error:
        raise PeerProtocolError(f"bad manifest: {error}") from error
    encoded, size = sum(spec.encoded_bytes for spec in tensors), sum(spec.raw_bytes for spec in tensors)
    if max(encoded, size) > max_state_bytes:
        raise PeerProtocolError(f"bad manifest: a state of {max(encoded, size)} bytes, the limit is {max_state_bytes}")
    if size > _MAX_EXPANSION * encoded + _SMALL_BYTES:
        raise PeerProtocolError(f"bad manifest: {encoded} bytes that become {size}")
    if not MIN_CHUNK_BYTES <= reply.chunk_bytes <= MAX_CHUNK_BYTES:
        raise PeerProtocolError(f"bad manifest: chunks of {reply.chunk_bytes} bytes")
    infinite = tuple(reply.infinite)
    floats = all(0 <= each < len(tensors) and tensors[each].dtype.is_floating_point for each in infinite)
    if not floats or list(infinite) != sorted(set(infinite)):
        raise PeerProtocolError("bad manifest: what it says of infinities cannot be")
    hashes = tuple(reply.hashes)
    manifest = Manifest(reply.snapshot, reply.epoch, metadata, tensors, reply.chunk_bytes, hashes, infinite)
    chunks = -(-manifest.total_bytes // manifest.chunk_bytes)
    if len(manifest.hashes) != chunks:
        raise PeerProtocolError(f"bad manifest: {len(manifest.hashes)} hashes for {chunks} chunks")
    return manifest


_kind = lru_cache(4096)(StateTensorSpec)
"""Specs that are equal are one object, so that many are compared, and told apart, at once."""


def _read_order(packed: bytes, kinds: int, max_tensors: int) -> array[int]:
    """The kind of each tensor. No more is unpacked than is taken."""
    order, unpacking = array(_NUMBER), zlib.decompressobj()
    data = unpacking.decompress(packed, max_tensors * order.itemsize + 1)
    if len(data) > max_tensors * order.itemsize:
        raise ConfigError(f"more than {max_tensors} tensors")
    if not unpacking.eof or unpacking.unused_data or len(data) % order.itemsize:
        raise ConfigError("the kinds of its tensors are not in their form")
    order.frombytes(data)
    if order and max(order) >= kinds:
        raise ConfigError(f"a tensor is of kind {max(order)}, and {kinds} are described")
    return order


def _read_kind(shape: list[int], dtype: str, codec: str, nbytes: int) -> StateTensorSpec:
    if len(shape) > _MAX_DIMS or any(size < 0 for size in shape):
        raise ConfigError(f"a tensor has the shape {shape[: _MAX_DIMS + 1]}")
    # Empty dimensions do not excuse giant ones: strides are computed from them.
    if math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise ConfigError(f"a tensor has too many elements: {shape}")
    chosen, values = codec_by_name(codec), dtype_by_name(dtype)
    if not chosen.supports(values):
        raise ConfigError(f"a tensor is {dtype}, which codec {codec!r} does not support")
    spec = _kind(tuple(shape), values, chosen)
    if spec.encoded_bytes != nbytes:
        raise ConfigError(f"a tensor should take {spec.encoded_bytes} bytes, not {nbytes}")
    return spec


def _show(tensor: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{dtype_name(tensor[1])}{list(tensor[0])}"
