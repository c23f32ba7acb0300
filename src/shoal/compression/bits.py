"""Numbers of few bits as bytes, by bit planes: first the lowest bit of all numbers, then the next one, and so on.

A plane has eight bits in a byte, the first one lowest. Flags are numbers of one bit.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["numbers_bytes", "read_numbers", "write_numbers"]


def numbers_bytes(count: int, bits: int) -> int:
    """The bytes of so many numbers."""
    return bits * -(-count // 8)


def write_numbers(numbers: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Write the lowest bits of each number.

    Args:
        numbers: integers, in one dimension.
        bits: of each number.
        out: bytes for as many numbers, or for more, which are 0.
    """
    planes = torch.zeros(bits, 8 * (out.numel() // bits), dtype=torch.uint8, device="cpu")
    shifts = torch.arange(bits, dtype=numbers.dtype, device="cpu")
    planes[:, : numbers.numel()] = (numbers >> shifts[:, None]).bitwise_and_(1)
    eight = planes.view(torch.int64)
    # The lowest byte gets the bits of all eight: bit i of it, the one of byte i, is 7 i bits further up.
    for shift in (7, 14, 28):
        eight |= eight >> shift
    out.copy_(planes.view(-1)[::8])


def read_numbers(data: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers in these bytes: int32; flags as bytes."""
    planes = _bits_of_bytes().index_select(0, data.to(torch.int32)).view(torch.uint8).view(bits, -1)
    if bits == 1:
        return planes.view(-1)
    shifts = torch.arange(bits, dtype=torch.int32, device="cpu")
    return (planes.to(torch.int32) << shifts[:, None]).sum(dim=0, dtype=torch.int32)


@cache
def _bits_of_bytes() -> torch.Tensor:
    """The eight bits of each byte, as bytes of one int64."""
    numbers = torch.arange(256, dtype=torch.int64, device="cpu")
    return ((numbers[:, None] >> numbers[:8]) & 1).to(torch.uint8).view(torch.int64).view(-1)
