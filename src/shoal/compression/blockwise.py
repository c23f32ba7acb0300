"""Eight, four or two bits for each element, in steps that fit its block.

=================  ====================================  =====================================================
name               bytes                                 error, where `top` is the block's largest absolute value
=================  ====================================  =====================================================
blockwise:8:BLOCK  2 per block + 1 per element           ``top / 254``
blockwise:4:BLOCK  2 per block + 1 per two elements      ``top · 17.5 / 127``: half the widest gap of the levels
blockwise:2:BLOCK  2 per block + 1 per four elements     ``top · 77 / 127``, half of it for values of the sign that
                                                         the value farthest from 0 has
=================  ====================================  =====================================================

All times ``1 + 2^-7``, plus 2^-101 (8 bits), 18 · 2^-100 (4 bits) or 77.5 · 2^-100 (2 bits). The default block is 64:
8.25, 4.25 and 2.25 bits.

No block crosses a tensor's border: the last one of each tensor may be shorter. A block has one scale: its largest
absolute value / 127, as bfloat16. Eight bits: the nearest multiple of the scale, from -127 to 127. Four and two bits:
the nearest of 16 or 4 of these multiples, `_LEVELS`, denser around 0, where most values are.
Those of four bits were chosen by search, for least squared error in blocks of 64 on normal, Laplace and Student t (3)
data. All gaps but one are odd, so that the nearest level is found by way of the nearest multiple; an element that comes
first in a byte has its lowest bits.

Two bits: the scale has the sign of the value that is farthest from 0, which is thereby always the last level. So the
other levels need not reach as far as it does, there is a level 0, and one outlier costs the others in its block nothing
but that they become 0. `docs/reference/compression.md` compares the choices.

Scale times code is exact in float32 (8 and 7 significant bits), and the largest value of a block always takes the code
127 or -127, although the scale is rounded: 127 times half a unit in its last place is less than half a step. From both
it follows that decoded values encode to the same bytes again. This also holds after they were rounded to bfloat16 (a
test tries all scales and codes) or float16, except for 4 and 2 bits below 2^-14, where float16 is coarser than the
gaps. A block of zeros stays zeros. A block with a value that is not finite has a scale of NaN, and decodes to NaN.

Why equal steps for eight bits and not steps that grow with the value, as bitsandbytes has in blocks of 4096 (and
hivemind through it): in blocks of 64 they have about half the error (rms, normal data), and need no table to decode.
`docs/reference/compression.md` has the numbers.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from shoal.compression.base import CompressionBase, register_codec, wire_view
from shoal.compression.joint import Blocks, blocks_of
from shoal.compression.memory import as_tensor
from shoal.compression.packed import MIN_STEP, PackedCompression
from shoal.errors import ConfigError

__all__ = ["BlockwiseQuantization"]

_MIN_BLOCK, _MAX_BLOCK = 16, 1 << 16

_LEVELS = {
    4: (-127, -92, -67, -48, -33, -20, -9, 0, 7, 16, 27, 40, 55, 73, 96, 127),
    2: (-50, 0, 50, 127),
}
"""The multiples of the scale that the codes of so many bits stand for."""

_FARTHEST = {8: 0.5, 4: 17.5, 2: 77.0}
"""The steps that a value may be away from the nearest level."""

_TOP = torch.tensor(127.0, dtype=torch.float32, device="cpu")
"""The largest code. It is a tensor: dividing by a number takes three times as long."""


class BlockwiseQuantization(PackedCompression):
    """Codes of 8, 4 or 2 bits with one scale for each block of neighbours: see the module.

    Args:
        bits: 8, 4 or 2.
        block_size: elements in a block; a power of two from 16 to 65536. Small blocks are more exact, and have more
            scales to send.

    Raises:
        ConfigError: an argument is not one of these.
    """

    def __init__(self, bits: int = 8, block_size: int = 64) -> None:
        if not isinstance(bits, int) or bits not in _FARTHEST:
            raise ConfigError(f"bits={bits!r} is none of 8, 4 and 2")
        power = isinstance(block_size, int) and _MIN_BLOCK <= block_size <= _MAX_BLOCK
        if not power or block_size & (block_size - 1):
            raise ConfigError(f"block_size={block_size!r} is no power of two from {_MIN_BLOCK} to {_MAX_BLOCK}")
        self.bits, self.block_size = bits, block_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bits={self.bits}, block_size={self.block_size})"

    @property
    def name(self) -> str:
        return f"blockwise:{self.bits}:{self.block_size}"

    def idempotent(self, dtype: torch.dtype) -> bool:
        return self.bits == 8 or dtype is not torch.float16

    def packed_bytes(self, sizes: tuple[int, ...]) -> int:
        return 2 * self._blocks(sizes) + -(-sum(sizes) * self.bits // 8)

    def _pack(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        blocks = blocks_of(sizes, self.block_size)
        split = 2 * blocks.count
        wire, shared = wire_view(out[:split], torch.bfloat16)
        farthest = _farthest(blocks, values) if self.bits == 2 else blocks.top(values)
        top = farthest.abs() if self.bits == 2 else farthest
        scales = wire.copy_(top.div_(_TOP).clamp_min_(MIN_STEP)).float()
        all_finite = math.isfinite(scales.amax().item())
        if self.bits == 2:
            wire.copysign_(farthest)
            scales.copysign_(farthest)
        if not all_finite:
            wire[~torch.isfinite(scales)] = math.nan
        if not shared:
            as_tensor(out[:split], torch.uint8).copy_(wire.view(torch.uint8))
        steps = blocks.scale(values, scales.reciprocal_(), torch.empty_like(values))
        if not all_finite:
            steps.nan_to_num_(0.0, 0.0, 0.0)  # the processor decides which integer a NaN becomes
        if self.bits == 8:
            as_tensor(out[split:], torch.int8).copy_(steps.round_())
        else:
            self._write_codes(steps.round_(), as_tensor(out[split:], torch.uint8))

    def _write_codes(self, steps: torch.Tensor, out: torch.Tensor) -> None:
        """Write the codes of the nearest levels, several in a byte."""
        steps_of_bytes = torch.zeros(out.numel() * (8 // self.bits), dtype=torch.int8, device="cpu")
        steps_of_bytes[: steps.numel()].copy_(steps)
        if self.bits == 4:
            _gather(_pack_table(4), steps_of_bytes, out=out)
            return
        pairs = torch.empty(2 * out.numel(), dtype=torch.uint8, device="cpu")
        _gather(_pack_table(2), steps_of_bytes, out=pairs)
        torch.add(pairs[::2], pairs[1::2], alpha=16, out=out)

    def _unpack(self, data: memoryview, sizes: tuple[int, ...], out: torch.Tensor) -> None:
        blocks = blocks_of(sizes, self.block_size)
        split = 2 * blocks.count
        codes = as_tensor(data[split:], torch.int8)
        if self.bits != 8:
            codes = self._steps(codes)[: sum(sizes)]
        scales = as_tensor(data[:split], torch.bfloat16).float()
        blocks.scale(out.copy_(codes), scales, out)

    def _steps(self, codes: torch.Tensor) -> torch.Tensor:
        """The levels of all codes in these bytes."""
        if self.bits == 4:
            quads = torch.zeros(-(-codes.numel() // 2) * 2, dtype=torch.int8, device="cpu")
            quads[: codes.numel()].copy_(codes)
            unpacked = torch.empty(quads.numel() // 2, dtype=torch.int32, device="cpu")
            _gather(_unpack_table(4), quads, out=unpacked)
        else:
            unpacked = _unpack_table(2).index_select(0, codes.view(torch.uint8).to(torch.int32))
        return unpacked.view(torch.int8)

    def _packed_bound(self, values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        blocks = blocks_of(sizes, self.block_size)
        steps = _FARTHEST[self.bits]
        bound = blocks.spread(blocks.top(values)) / 127 * (steps * (1 + 2**-7))
        if self.bits == 2:
            bound[blocks.spread(_farthest(blocks, values)) * values > 0] /= 2
        return bound + MIN_STEP * (steps + 0.5)

    def _blocks(self, sizes: tuple[int, ...]) -> int:
        return sum(-(-size // self.block_size) for size in sizes)


def _farthest(blocks: Blocks, values: torch.Tensor) -> torch.Tensor:
    """The value of each block that is farthest from 0, the positive one of two; NaN if it holds a NaN."""
    low, high = blocks.extremes(values)
    return torch.where(high >= -low, high, low)


def _gather(table: torch.Tensor, pairs: torch.Tensor, *, out: torch.Tensor) -> None:
    """Look up each pair of neighbouring bytes in a table."""
    torch.index_select(table, 0, pairs.view(torch.uint16).to(torch.int32), out=out)


@cache
def _pack_table(bits: int) -> torch.Tensor:
    """The codes of the nearest levels, the first one lowest, for each pair of steps from -128 to 127, little-endian."""
    levels = torch.tensor(_LEVELS[bits], dtype=torch.int64, device="cpu")
    steps = torch.arange(256, dtype=torch.int64, device="cpu").to(torch.int8).to(torch.int64)
    nearest = torch.bucketize(steps * 2, levels[1:] + levels[:-1]).to(torch.uint8)
    return (nearest[None, :] + (nearest[:, None] << bits)).view(-1)


@cache
def _unpack_table(bits: int) -> torch.Tensor:
    """The four levels that each byte of codes (2 bits) or pair of bytes, little-endian (4 bits), stands for."""
    levels = torch.tensor(_LEVELS[bits], dtype=torch.int8, device="cpu")
    codes = torch.arange(1 << 4 * bits, dtype=torch.int64, device="cpu")
    four = [levels[(codes >> shift) % (1 << bits)] for shift in range(0, 4 * bits, bits)]
    return torch.stack(four, dim=1).view(torch.int32).view(-1)  # as one int32


def _make(parameters: str) -> CompressionBase:
    bits, _, block_size = parameters.partition(":")
    if not (bits.isascii() and bits.isdigit() and block_size.isascii() and block_size.isdigit()):
        raise ConfigError(f"codec 'blockwise' takes BITS:BLOCK_SIZE, got {parameters[:32]!r}")
    try:
        return BlockwiseQuantization(int(bits), int(block_size))
    except ConfigError as error:
        raise ConfigError(f"no codec 'blockwise:{parameters}': {error}") from error


register_codec("blockwise", _make)
