"""The few largest elements, and their places.

==================  ===============================  =================================================================
name                bytes, for k = fraction ·        error
                    elements, rounded up
==================  ===============================  =================================================================
topk:FRACTION       2 k for values, and places       what `bfloat16` loses of the k largest absolute values; all of
                                                     every other
topk:FRACTION:BITS  BITS · k / 8 for values, 4 for   of the k largest what `bfloat16` loses, and with N = 2^(BITS - 1)
                    each 64 of them, and places      ``(N - 1/4) / N²`` of the range of those sent of the same tensor;
                                                     all of every other
==================  ===============================  =================================================================

Places take ``(k (low + 1) + elements / 2^low) / 8`` bytes, where `low` is the base-2 logarithm of 1 / fraction, rounded
down: 8.6 bits for each at 0.01, 7.0 at 0.03. So 0.01 takes 0.031 bytes for each element of float32, and 0.03 with 2
bits 0.036. The elements are all that are encoded at once: a tile.

It is made for use with `ErrorFeedback`, which sends the left-out values later: otherwise small elements are never sent.

**Values of few bits.** One bit is the sign. The others say where the absolute value is in its block, 64 neighbours
among those sent, all of one tensor: of N equal intervals of the square root of the way from the lowest to the highest
one, it is in the middle of this one. So levels are denser near the lowest, where most values are: they are ``lowest +
span · ((i + 1/2) / N)²``. A span has 8 significant bits and a square 16, so their product is exact in float32, and the
sum is rounded once.

**Places** are coded as by Elias (1974) and Fano: the lowest bits of each as they are; the others, which only ascend, as
a flag for each place and for each step up between them. The size depends on the number of places only; it is half a bit
for each place above the least possible one; and all places are found at once.

*On the wire*: first the values, or the lowest ones of all blocks and then their spans (bfloat16). There is room for as
many blocks as k values may need; each tensor after the first may need one more. Then a number for each value, in bit
planes (`bits`): the low bits of its place, and above them the code of the value, if it has one, whose highest bit is
the sign. Then flags: in the order of the places 1 for a place, and 0 for a step of ``2^low``. Elements that are 0 are
not sent: with fewer than k others the rest is 0. Bytes that do not name places, or with a value, lowest value or span
that is not finite, decode to NaN.

Of several equal elements the first ones are sent. Encoding decoded values again gives other spans.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from shoal.compression.base import CompressionBase, register_codec
from shoal.compression.bits import numbers_bytes, read_numbers, write_numbers
from shoal.compression.floating import BFloat16Compression
from shoal.compression.joint import Blocks
from shoal.compression.memory import as_tensor
from shoal.compression.packed import PackedCompression
from shoal.errors import ConfigError

__all__ = ["TopKCompression"]

_MIN_FRACTION, _MAX_FRACTION = 1e-6, 0.5
_BLOCK = 64
_SAMPLE = 1 << 14
_AT_ONCE = 1 << 17
"""The values that are looked at together: they, and what is made of them, fit the processor's cache."""

_SMALLEST = 2.0**-149
_SMALLEST_SPAN = 2.0**-126
_LARGEST = torch.finfo(torch.float32).max
_LARGEST_SENT = torch.finfo(torch.bfloat16).max
_VALUES = BFloat16Compression()


class TopKCompression(PackedCompression):
    """The `fraction` of elements that are largest in absolute value; 0 for all others: see the module.

    Args:
        fraction: 1e-6 to 0.5.
        bits: of each value that is sent: 2, 4, 8, or None for bfloat16.

    Raises:
        ConfigError: an argument is not one of these.
    """

    def __init__(self, fraction: float = 0.01, bits: int | None = None) -> None:
        if not isinstance(fraction, float) or not _MIN_FRACTION <= fraction <= _MAX_FRACTION:
            raise ConfigError(f"fraction={fraction!r} is no number from {_MIN_FRACTION:g} to {_MAX_FRACTION:g}")
        if bits is not None and (not isinstance(bits, int) or bits not in (2, 4, 8)):
            raise ConfigError(f"bits={bits!r} is none of 2, 4, 8 and None")
        self.fraction = float(fraction)  # of numpy too, whose own would have another name on the wire
        self.bits = bits
        # As bfloat16 each value is sent by itself, and the largest of all tensors are wanted.
        self.has_scales = bits is not None
        self._low_bits = int(1 / self.fraction).bit_length() - 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fraction!r}" + (f", bits={self.bits})" if self.bits else ")")

    @property
    def name(self) -> str:
        return f"topk:{self.fraction!r}" + (f":{self.bits}" if self.bits else "")

    def idempotent(self, dtype: torch.dtype) -> bool:
        return False

    def packed_bytes(self, sizes: tuple[int, ...]) -> int:
        return self._ends(sizes)[-1]

    def _pack(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        values_end, numbers_end, _ = self._ends(sizes)
        sent = torch.zeros(values_end // 2, dtype=torch.float32, device="cpu")
        low, high = (extreme.item() for extreme in torch.aminmax(values))
        if math.isfinite(low) and math.isfinite(high):
            places = _largest(values, self._count(values.numel()))
        else:
            places = torch.empty(0, dtype=torch.int64, device="cpu")
            sent.fill_(math.nan)
        numbers = places.to(torch.int32) & ((1 << self._low_bits) - 1)
        if places.numel():
            chosen = values.index_select(0, places)
            if self.bits is None:
                sent[: places.numel()] = chosen
            else:
                numbers |= _codes(chosen, _counts(places, sizes), self.bits, sent) << self._low_bits
        _VALUES.encode_into(sent, out[:values_end])
        write_numbers(numbers, self._number_bits, as_tensor(out[values_end:numbers_end], torch.uint8))
        flags = torch.zeros(self._flags(values.numel()), dtype=torch.uint8, device="cpu")
        flags.index_fill_(0, (places >> self._low_bits).add_(_count_up(places.numel())), 1)
        write_numbers(flags, 1, as_tensor(out[numbers_end:], torch.uint8))

    def _unpack(self, data: memoryview, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        values_end, numbers_end, _ = self._ends(sizes)
        count = self._count(out.numel())
        sent = _VALUES.decode(data[:values_end], values_end // 2, torch.float32).to(torch.float32)
        ones = read_numbers(as_tensor(data[numbers_end:], torch.uint8), 1).nonzero().view(-1)
        sound = ones.numel() <= count and bool(torch.isfinite(sent).all())
        ones = ones[:count]
        numbers = read_numbers(as_tensor(data[values_end:numbers_end], torch.uint8), self._number_bits)[: ones.numel()]
        places = (ones - _count_up(ones.numel())) << self._low_bits
        places |= numbers & ((1 << self._low_bits) - 1)
        if places.numel():
            sound = sound and places[-1].item() < out.numel() and bool((places.diff() > 0).all())
        out.fill_(0.0 if sound else math.nan)
        if sound and places.numel():
            codes = numbers >> self._low_bits
            values = sent if self.bits is None else _values(codes, _counts(places, sizes), self.bits, sent)
            out.index_copy_(0, places, values[: places.numel()])

    def _packed_bound(self, values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        flat = values.float()
        size = flat.abs()
        smallest = size.topk(self._count(size.numel()), sorted=False).values.min()
        lost = _VALUES.error_bound(flat)
        if self.bits is not None:
            intervals, start = 1 << self.bits - 1, 0
            for tensor in torch.split(size, list(sizes)):
                among = tensor[tensor >= smallest]
                reach = float(among.max() - among.min()) if among.numel() else 0.0
                # A span that has no reciprocal has no codes: all of it may be lost.
                most = reach * (intervals - 0.25) / intervals**2 + _SMALLEST_SPAN
                lost[start : start + tensor.numel()] += most * (1 + 2**-6)
                start += tensor.numel()
        tied = (size == smallest) & (size > 0)
        return torch.where(size > smallest, lost, torch.where(tied, torch.maximum(lost, values.abs()), values.abs()))

    @property
    def _number_bits(self) -> int:
        return self._low_bits + (self.bits or 0)

    def _count(self, numel: int) -> int:
        return math.ceil(self.fraction * numel)

    def _flags(self, numel: int) -> int:
        """The flags of the places of so many elements: one for each place, and for each step between them."""
        return self._count(numel) + ((numel - 1) >> self._low_bits) + 1

    def _ends(self, sizes: tuple[int, ...]) -> tuple[int, int, int]:
        """The ends of values, numbers and flags, bytes."""
        count = self._count(sum(sizes))
        blocks = min(count, -(-count // _BLOCK) + len(sizes) - 1)
        values = 2 * count if self.bits is None else 4 * blocks
        numbers = values + numbers_bytes(count, self._number_bits)
        return values, numbers, numbers + numbers_bytes(self._flags(sum(sizes)), 1)


def _count_up(numel: int) -> torch.Tensor:
    """0, 1, 2, ... as places are."""
    return torch.arange(numel, dtype=torch.int64, device="cpu")


def _counts(places: torch.Tensor, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """How many of these places are in each tensor."""
    if len(sizes) == 1:
        return (places.numel(),)
    ends = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0)
    stops = torch.searchsorted(places, ends).tolist()
    return tuple(stop - start for start, stop in pairwise([0, *stops]))


def _codes(chosen: torch.Tensor, counts: tuple[int, ...], bits: int, sent: torch.Tensor) -> torch.Tensor:
    """The codes of these values (int32); the lowest values and the spans of their blocks are written to `sent`."""
    blocks, intervals = Blocks(counts, _BLOCK), 1 << bits - 1
    sizes = chosen.abs()
    lowest, highest = blocks.extremes(sizes)
    lowest = _as_sent(lowest)
    spans = _as_sent((highest - lowest).clamp_(min=0.0))
    room = sent.numel() // 2
    sent[: blocks.count], sent[room : room + blocks.count] = lowest, spans
    factors = spans.reciprocal().masked_fill_(~(spans >= _SMALLEST_SPAN), 0.0)
    ways = blocks.scale(sizes - blocks.spread(lowest), factors, torch.empty_like(sizes))
    codes = ways.clamp_(min=0.0).sqrt_().mul_(intervals).to(torch.int32).clamp_(max=intervals - 1)
    return codes.add_((chosen < 0).to(torch.int32), alpha=intervals)


def _values(codes: torch.Tensor, counts: tuple[int, ...], bits: int, sent: torch.Tensor) -> torch.Tensor:
    """The values that these codes stand for."""
    blocks, intervals = Blocks(counts, _BLOCK), 1 << bits - 1
    room = sent.numel() // 2
    squares = (torch.arange(0.5, intervals, dtype=torch.float32, device="cpu") / intervals).square_()
    sizes = squares.index_select(0, codes % intervals)
    blocks.scale(sizes, sent[room : room + blocks.count], sizes)
    sizes.add_(blocks.spread(sent[: blocks.count])).clamp_(-_LARGEST, _LARGEST)
    return torch.where(codes < intervals, sizes, -sizes)


def _as_sent(sizes: torch.Tensor) -> torch.Tensor:
    """Absolute values as bfloat16 has them, finite."""
    return sizes.to(torch.bfloat16).float().clamp_(max=_LARGEST_SENT)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest absolute values, ascending; of all that are not 0 if these are fewer.

    It looks only among values above a threshold. In a sample about a third more values than needed reach it.
    """
    sample = values[:: (values.numel() // _SAMPLE) | 1].abs()
    wanted = math.ceil(1.3 * count / values.numel() * sample.numel()) + 8
    limit = sample.topk(wanted, sorted=False).values.min().item() if wanted < sample.numel() // 2 else 0.0
    places, sizes = _from(values, max(limit, _SMALLEST))
    if places.numel() < count and limit > _SMALLEST:
        places, sizes = _from(values, _SMALLEST)
    if places.numel() <= count:
        return places
    border = sizes.topk(count, sorted=False).values.min()
    keep = sizes >= border
    if (more := int(keep.sum()) - count) > 0:  # several are equal to it
        keep[(sizes == border).nonzero().view(-1)[-more:]] = False
    return places[keep]


def _from(values: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of all absolute values from `limit` on, ascending, and these values."""
    size = torch.empty(min(_AT_ONCE, values.numel()), dtype=torch.float32, device="cpu")
    places, sizes = [], []
    for start, some in zip(range(0, values.numel(), _AT_ONCE), torch.split(values, _AT_ONCE), strict=True):
        torch.abs(some, out=size[: some.numel()])
        found = (size[: some.numel()] >= limit).nonzero().view(-1)
        sizes.append(size.index_select(0, found))
        places.append(found.add_(start))
    return torch.cat(places), torch.cat(sizes)


def _make(parameters: str) -> CompressionBase:
    fraction, _, bits = parameters.partition(":")
    try:
        return TopKCompression(float(fraction), int(bits) if bits else None)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"no codec 'topk:{parameters[:32]}': {error}") from error


register_codec("topk", _make)
