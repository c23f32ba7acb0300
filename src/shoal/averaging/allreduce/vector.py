"""The numbers of a round: this peer's values, and the averages that it gathers until the round is decided.

Two flat copies of the averaged tensors, made once and used again in every round: `local`, copied in when the round
begins (the user may change the tensors meanwhile), and `result`, which collects the averages. The user's tensors are
written once, after the commit, all of them or none.

Sums are kept in float32, for float64 tensors in float64. An average is encoded once; its reducer uses the decoded bytes
like everyone else, so all members end bit-identical. Segments with error feedback have a `Residual` that encodes for
them. Segments whose codec is for differences have a `Reference`; values are coded against it if the whole group has the
same one.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from blake3 import blake3

from shoal.averaging.allreduce import schema
from shoal.averaging.allreduce.segments import LARGEST, RoundMemory, SegmentBuffers, sum_dtype
from shoal.averaging.allreduce.still import StillWatch
from shoal.compression import (
    DTYPES,
    CompressionBase,
    NoCompression,
    codec_by_name,
    dtype_by_name,
    dtype_name,
    view_bytes,
)
from shoal.compression.memory import overlaps, repeats_itself
from shoal.errors import ConfigError, PeerProtocolError
from shoal.layout import TensorSpec, Tile, Tiling, VectorLayout
from shoal.protocol.wire import Held
from shoal.transport.base import Buffer

__all__ = ["NO_DIGEST", "TileDigests", "Vector", "check_tensors", "describe"]

_SMALL = 2e19
"""The square of a larger float32 is infinite."""


_NARROW = ("float16", "bfloat16")
"""Codecs that round each value by itself."""

_SAID = struct.Struct(">IIdI")
"""Tile, attempt, weight, and the length of the contributors, which stand before it."""

NO_DIGEST = bytes(16)
"""The digest of a tile to which no member contributes: it has no average."""


class TileDigests:
    """Names for the averages of a round. Another round has another key, and other digests.

    The commit of a round names each average by a digest, and a member hashes what it gets. So members which succeed
    hold the same bytes, and were told the same of them, even if others lie
    (`docs/why/decisions/0066-receivers-hash.md`).

    Args:
        round_id: the id of the round, which all its members know.
    """

    def __init__(self, round_id: bytes) -> None:
        self._key = hashlib.sha256(b"shoal parts" + round_id).digest()

    def of(self, held: Held, data: Buffer) -> bytes:
        """The digest of an encoded average and of what is said of it: 16 bytes of BLAKE3; `held.digest` is not read.

        The data come first: BLAKE3 takes them in its widest steps only from the beginning of a block of its tree.
        """
        said = held.contributors + _SAID.pack(held.tile, held.attempt, held.weight, len(held.contributors))
        return blake3(data, key=self._key).update(said).digest(length=16)


def check_tensors(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise `ConfigError` for a tensor that cannot be averaged; each is given with the name that the user knows.

    Nor can memory that is given twice: the average would be applied to it twice.
    """
    for name, tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name} is {type(tensor).__name__}, not a torch.Tensor")
        if not tensor.dtype.is_floating_point or tensor.dtype not in DTYPES.values():
            raise ConfigError(
                f"{name} has dtype {tensor.dtype}: only float64, float32, float16 and bfloat16 can be averaged"
            )
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ConfigError(f"{name} is sparse or on the meta device: give a dense tensor")
        if repeats_itself(tensor):
            raise ConfigError(
                f"{name} has elements that share memory (as by expand): they cannot be set one by one; give the "
                "tensor that it was made of"
            )
    for first, second in overlaps([tensor for _, tensor in tensors]):
        raise ConfigError(f"{tensors[first][0]} and {tensors[second][0]} share memory (tied weights?): give it once")


def describe(tensors: Sequence[torch.Tensor], codecs: Sequence[CompressionBase]) -> VectorLayout:
    """The layout of these tensors under these codecs.

    Raises:
        ConfigError: a tensor cannot be averaged; names it.
    """
    check_tensors([(f"averaged_tensors[{index}]", tensor) for index, tensor in enumerate(tensors)])
    specs = [
        TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype), codec.name)
        for tensor, codec in zip(tensors, codecs, strict=True)
    ]
    return VectorLayout(specs, encoded_bytes)


def encoded_bytes(dtype: str, codec: str, count: int) -> int:
    """Bytes that so many elements take on the wire."""
    return codec_by_name(codec).encoded_bytes(count, dtype_by_name(dtype))


class Vector:
    """Flat copies of a list of tensors.

    Args:
        tensors: the tensors to average; any floating dtype, shape, strides and device. Kept by reference.
        layout: the layout of these tensors.
        memory: memory for the copies; None for memory of its own.

    Attributes:
        reference_name: the round whose average later ones may code against; empty: none.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], layout: VectorLayout, memory: RoundMemory | None = None
    ) -> None:
        self.tensors, self.layout = tuple(tensors), layout
        self._segments = SegmentBuffers.of_all(layout.segments, memory or RoundMemory(tensors))
        self._places: list[tuple[SegmentBuffers, int, int]] = []  # of each tensor in its segment
        for start, tensor in zip(layout.offsets, self.tensors, strict=True):
            segment = next(segment for segment in reversed(layout.segments) if segment.start <= start)
            start -= segment.start
            self._places.append((self._segments[segment.name], start, start + tensor.numel()))
        self.reference_name = b""
        self._still: StillWatch | None = None
        self._sums: dict[Tile, torch.Tensor] = {}
        self._wire: dict[Tile, memoryview] = {}

    # ------------------------------------------------------------------------------------------- the user's tensors

    def copy_in(self, scale: float = 1.0, weight: float = 1.0) -> int | None:
        """Copy the tensors' values, times `scale`, to `local`. Call it under the lock of the tensors.

        Returns:
            The index of the first tensor with a value that cannot be counted with this `weight`, because it is not
            finite or too large to be summed; None if all can.

        Raises:
            ConfigError: a tensor has another size than it had at the beginning.
        """
        self.forget(weight)
        bad: int | None = None
        with torch.no_grad():
            for index, tensor in enumerate(self.tensors):
                copied = self._view(index, result=False)
                if tensor.numel() != copied.numel():
                    raise ConfigError(
                        f"averaged_tensors[{index}] has {tensor.numel()} elements now, and had {copied.numel()} when "
                        "the averager was made: make another averager for tensors of another size"
                    )
                if copied.numel():
                    copied.copy_(tensor.detach().reshape(-1))
                    if scale != 1.0:
                        copied.mul_(scale)
                    if bad is None and not _summable(copied, weight):
                        bad = index
        return bad

    def forget(self, weight: float = 0.0) -> None:
        """Drop the sums and encodings of the last round. `copy_in` does it; a peer that only assists has to call it."""
        self._sums.clear()
        self._wire.clear()
        if self._still is not None:
            self._still.begin()
        for segment in self._segments.values():
            if segment.residual is not None:
                segment.residual.begin(weight)

    def apply(self, alpha: float) -> None:
        """Move the tensors to the average. Call it under the lock of the tensors, after the round succeeded.

        With `alpha` 1 a tensor that did not change since `copy_in` is set to the average, bit by bit; otherwise it is
        moved by `alpha * (average - value at copy_in)`.
        """
        with torch.no_grad():
            for index, tensor in enumerate(self.tensors):
                if not tensor.numel():
                    continue
                before, average = self._view(index, result=False), self._view(index, result=True)
                target, wide = tensor.detach(), sum_dtype(tensor.dtype)
                if alpha == 1.0 and _same_bits(target, before):
                    target.copy_(average.view(tensor.shape))
                else:
                    moved = (average.to(wide) - before.to(wide)).view(tensor.shape).to(target.device)
                    # In `wide`: a difference of two float16 values may be out of their range.
                    target.copy_(target.to(wide).add(moved, alpha=alpha))

    def overwrite(self) -> None:
        """Set the tensors to the averages, whatever values they have now. Call it under the lock of the tensors."""
        with torch.no_grad():
            for index, tensor in enumerate(self.tensors):
                if tensor.numel():
                    tensor.detach().copy_(self._view(index, result=True).view(tensor.shape))

    def watch_still(self) -> None:
        """From now on look whether averages move the tensors, which go on from them as parameters do."""
        self._still = StillWatch(sum(tensor.numel() for tensor in self.tensors))

    def stood_still(self) -> str | None:
        """The round was committed: what is to be told of tensors that it did not move. See `StillWatch.committed`."""
        if self._still is None:
            return None
        narrow = {
            name: each.result
            for name, each in self._segments.items()
            if each.codec.name in _NARROW or sum_dtype(each.dtype) != each.dtype
        }
        return self._still.committed(narrow)

    def _view(self, tensor: int, *, result: bool) -> torch.Tensor:
        segment, start, stop = self._places[tensor]
        return (segment.result if result else segment.local)[start:stop]

    # ---------------------------------------------------------------------------------------------------- my values

    def encoded_bytes(self, tile: Tile) -> int:
        """Size of a tile on the wire."""
        segment = self._segments[tile.name]
        return segment.codec.tensors_bytes(segment.sizes(tile), segment.dtype)

    def is_light(self, tile: Tile) -> bool:
        """Return whether to decode, to add and to encode this tile takes little more than to copy it."""
        return self._segments[tile.name].codec.name in ("none", *_NARROW)

    def contribution(self, tile: Tile) -> Buffer:
        """My values of a tile, encoded; without a copy where they are sent as they are."""
        segment = self._segments[tile.name]
        values = segment.own_values(tile)
        if segment.residual is not None:
            return segment.residual.contribution(tile, values, segment.codec)
        return view_bytes(values) if segment.codec.name == "none" else segment.codec.encode(values, segment.sizes(tile))

    # ------------------------------------------------------------------------------------------ from round to round

    def agree(self, *, on_reference: bool) -> None:
        """Begin a round, before its tiles are cut: whether all that contribute have the same reference."""
        for segment in self._segments.values():
            if segment.reference is not None:
                segment.reference.agreed = on_reference

    def tiling(self, shares: Sequence[int], tile_bytes: int) -> Tiling:
        """The tiles of this round: see `schema.tiling`."""
        codecs = [segment.codec.name for segment in self._segments.values()]
        return schema.tiling(self.layout, shares, tile_bytes, codecs)

    def check_tile_bytes(self, tile_bytes: int, members: int) -> None:
        """Raise `ConfigError` if the tiles could be too many for so many members, with the widest of our codecs."""
        schema.check_tile_bytes(self.layout, tile_bytes, members, self._widest_codecs)

    def most_members(self, tile_bytes: int) -> int:
        """The most members of a group that this vector can be divided among, with the widest of our codecs."""
        return schema.most_members(self.layout, tile_bytes, self._widest_codecs)

    @property
    def _widest_codecs(self) -> list[str]:
        lossless = NoCompression().name
        return [segment.named.name if segment.reference is None else lossless for segment in self._segments.values()]

    def remembers(self, tile: Tile) -> bool:
        """Return whether `settle` has something to do for this tile."""
        segment = self._segments[tile.name]
        return segment.residual is not None or segment.reference is not None

    def settle(self, tile: Tile, *, averaged_here: bool, counted: bool = True) -> None:
        """Keep the data of a committed tile that the next round needs.

        Args:
            tile: its average is in place.
            averaged_here: whether this member made that average.
            counted: whether my values are in it.
        """
        segment = self._segments[tile.name]
        if segment.residual is not None and (averaged_here or counted):
            segment.residual.settle(tile, segment.own_values(tile), segment.codec, averaged_here=averaged_here)
        if segment.reference is not None:
            segment.reference.keep(tile, tile.of(segment.result))

    def name_reference(self, name: bytes) -> None:
        """Set the reference's name: the round's id after `settle` of all tiles, empty before."""
        if any(segment.reference is not None for segment in self._segments.values()):
            self.reference_name = name

    # ------------------------------------------------------------------------------------------------- tiles I own

    def begin_sum(self, tile: Tile, weight: float) -> None:
        """Start to sum a tile with my own values, which `copy_in` found finite; with none of them if `weight` is 0.

        Earlier sums are forgotten.
        """
        segment = self._segments[tile.name]
        mine, result = segment.own_values(tile), tile.of(segment.result)
        sums = (
            result
            if result.dtype == sum_dtype(segment.dtype)
            else torch.empty(tile.numel, dtype=torch.float32, device="cpu")
        )
        if not weight:
            sums.zero_()
        elif sums.dtype == mine.dtype:
            torch.mul(mine, weight, out=sums)
        else:
            sums.copy_(mine).mul_(weight)
        self._sums[tile] = sums
        self._wire.pop(tile, None)

    def decoded(self, tile: Tile, data: memoryview, weight: float) -> torch.Tensor:
        """The values of a contribution; a view of `data` where possible.

        Raises:
            PeerProtocolError: some are not finite, or too large to be counted with this weight.
        """
        segment = self._segments[tile.name]
        values = segment.codec.decode(data, tile.numel, segment.dtype, segment.sizes(tile))
        if not _summable(values, weight, segment.dtype):
            raise PeerProtocolError("values that are not finite, or too large")
        return values

    def add(self, tile: Tile, values: torch.Tensor, weight: float) -> None:
        """Add a contribution."""
        self._sums[tile].add_(values, alpha=weight)

    def finish(self, tile: Tile, total_weight: float) -> Buffer:
        """Divide, encode once, and put the decoded bytes in place. Returns the encoded average."""
        segment = self._segments[tile.name]
        sums, result = self._sums.pop(tile), tile.of(segment.result)
        if segment.residual is not None:
            wire = segment.residual.average(tile, sums, total_weight, segment.codec, result)
        elif segment.codec.name == "none":
            sums.div_(total_weight)
            if sums.data_ptr() != result.data_ptr():
                result.copy_(sums)
                if (watch := self._still) is not None:
                    watch.look(tile, watch.sample(sums, tile.start), result, dtype_name(segment.dtype))
            wire = view_bytes(result)
        else:
            sums.div_(total_weight)
            watch = self._still if segment.codec.name in _NARROW else None
            sample = None if watch is None else watch.sample(sums, tile.start)
            wire = segment.codec.encode(sums.to(segment.dtype), segment.sizes(tile))
            segment.codec.decode_into(wire, segment.dtype, result, segment.sizes(tile))
            if watch is not None and sample is not None:
                watch.look(tile, sample, result, segment.codec.name)
        if segment.against is not None:
            segment.against.restore(tile, result)
        self._wire[tile] = wire
        return wire

    def ready_bytes(self, tile: Tile) -> Buffer | None:
        """The encoded average of a tile, if it is at hand; None if `average_bytes` has to make it."""
        return self._wire.get(tile)

    def average_bytes(self, tile: Tile, held: Held, digests: TileDigests) -> Buffer | None:
        """The encoded average of a tile that is held here, for any member; None if it cannot be given bit by bit."""
        wire = self._wire.get(tile)
        if wire is None:
            segment = self._segments[tile.name]
            if segment.against is not None:
                return None
            values = tile.of(segment.result)
            wire = (
                view_bytes(values)
                if segment.codec.name == "none"
                else segment.codec.encode(values, segment.sizes(tile))
            )
            if digests.of(held, wire) != held.digest:
                return None
        return wire

    # --------------------------------------------------------------------------------------------- averages of others

    def landing(self, tile: Tile) -> memoryview | None:
        """Return where the encoded average of a tile may be received without a copy; None if it must be decoded."""
        segment = self._segments[tile.name]
        return view_bytes(tile.of(segment.result)) if segment.codec.name == "none" else None

    def land(self, tile: Tile, data: memoryview) -> None:
        """Decode a received average into place.

        Raises:
            PeerProtocolError: it holds values that are not finite.
        """
        segment = self._segments[tile.name]
        result = tile.of(segment.result)
        self._wire.pop(tile, None)  # of an older attempt, if it was averaged here before
        if segment.codec.name != "none":
            segment.codec.decode_into(data, segment.dtype, result, segment.sizes(tile))
            if segment.against is not None:
                segment.against.restore(tile, result)
            # Bytes that can be made again by encoding need not be kept. After decoding, a difference is no longer
            # there.
            if segment.against is not None or not segment.codec.idempotent(segment.dtype):
                self._wire[tile] = memoryview(bytes(data))
        if not _finite(result):
            raise PeerProtocolError("an average that is not finite")

    def in_order(self) -> list[torch.Tensor]:
        """The tensors in the order of their places, as `averages` has them: those of one dtype and codec together."""
        numbers = sorted(range(len(self.tensors)), key=self.layout.offsets.__getitem__)
        return [self.tensors[number] for number in numbers]

    def averages(self) -> list[memoryview]:
        """The memory of all averages, in order: a peer that was not in the round gets them as they are."""
        return [view_bytes(segment.result) for segment in self._segments.values()]

    def take_averages(self, data: memoryview) -> None:
        """Set all averages to those that `averages` gave at another peer.

        Raises:
            PeerProtocolError: some are not finite.
        """
        start = 0
        for segment in self._segments.values():
            place = view_bytes(segment.result)
            place[:] = data[start : start + place.nbytes]
            start += place.nbytes
            if not _finite(segment.result):
                raise PeerProtocolError("an average that is not finite")


def _same_bits(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Equal bit by bit: NaN is equal to itself, so that a tensor full of it can still be set to the average."""
    ours, theirs = tensor.reshape(-1).contiguous(), before.to(tensor.device)  # elements may lie apart, as in a column
    # Eight bytes at a time where they are aligned: comparing is the longest part of `apply`.
    width = 8 // ours.itemsize
    number = {1: torch.int64, 2: torch.int32, 4: torch.int16}[width]
    if ours.storage_offset() % width or theirs.storage_offset() % width:
        return torch.equal(ours.view(number), theirs.view(number))
    if rest := ours.numel() % width:
        if not torch.equal(ours[-rest:].view(number), theirs[-rest:].view(number)):
            return False
        ours, theirs = ours[:-rest], theirs[:-rest]
    return torch.equal(ours.view(torch.int64), theirs.view(torch.int64))


def _finite(values: torch.Tensor) -> bool:
    """NaN and infinities show in the extremes."""
    if _surely_small(values):
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _summable(values: torch.Tensor, weight: float, dtype: torch.dtype | None = None) -> bool:
    """Return whether all are finite, and small enough for sums (of tensors of `dtype`, by default the values' own)."""
    limit = LARGEST[sum_dtype(dtype or values.dtype)] / max(weight, 1.0)
    if limit >= _SMALL and _surely_small(values):
        return True
    low, high = torch.aminmax(values)
    return -limit <= low.item() and high.item() <= limit


def _surely_small(values: torch.Tensor) -> bool:
    """True only if all are finite and at most `_SMALL`: so is the sum of squares. Takes half as long as `aminmax`."""
    return values.dtype == torch.float32 and values.dim() == 1 and math.isfinite(torch.dot(values, values).item())
