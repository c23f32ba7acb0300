"""Numbers of few bits as bytes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.bits import numbers_bytes, read_numbers, write_numbers


def test_the_bytes_are_bit_planes() -> None:
    """The lowest bits of all numbers first, the first number lowest in its byte."""
    out = torch.full((4,), 255, dtype=torch.uint8)
    write_numbers(torch.tensor([1, 2, 3, 0, 0, 0, 0, 1, 3]), 2, out)
    assert out.tolist() == [0b10000101, 0b1, 0b00000110, 0b1]
    assert read_numbers(out, 2).tolist() == [1, 2, 3, 0, 0, 0, 0, 1, 3, *[0] * 7]


@given(st.integers(1, 27), st.integers(1, 100), st.integers(0, 20), st.integers(0, 99))
def test_numbers_are_read_as_they_were_written(bits: int, count: int, more: int, seed: int) -> None:
    """Their lowest bits; what there is more room for is 0."""
    numbers = torch.randint(0, 1 << 31, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    out = torch.empty(numbers_bytes(count + more, bits), dtype=torch.uint8)
    write_numbers(numbers, bits, out)
    read = read_numbers(out, bits)
    assert torch.equal(read[:count].to(torch.int32), numbers & ((1 << bits) - 1))
    assert not bool(read[count:].any())
    again = torch.empty_like(out)
    write_numbers(read, bits, again)
    assert torch.equal(again, out)
