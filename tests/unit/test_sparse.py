"""The top-k codec byte by byte."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from shoal.compression import TopKCompression, codec_by_name
from shoal.compression.bits import write_numbers
from shoal.errors import ConfigError


def half(value: float) -> bytes:
    """As bfloat16."""
    return struct.pack("<f", value)[2:]


VALUES = torch.zeros(600)
VALUES[3], VALUES[254], VALUES[255], VALUES[599], VALUES[100] = 1.0, -8.0, 2.0, 4.0, 0.5
LOW = bytes([0b1101, 0b1111, 0b1110, 0b0110, 0b1110, 0b0110, 0b1110])
"""Seven bits of 3, 254, 255 and 599, in planes."""

FLAGS = bytes([0b1_000_11_0_1, 0])
"""A place, a step of 128, two places, three steps, a place."""


def test_the_bytes_are_as_documented() -> None:
    """Values in the order of their places, the low bits of these, and where the other bits go up."""
    codec = TopKCompression(4 / 600)
    data = bytes(codec.encode(VALUES))
    assert data == b"".join(map(half, (1.0, -8.0, 2.0, 4.0))) + LOW + FLAGS
    decoded = codec.decode(data, 600, torch.float32)
    assert decoded[[3, 254, 255, 599]].tolist() == [1.0, -8.0, 2.0, 4.0]
    assert int((decoded != 0).sum()) == 4


def test_values_of_two_bits_are_as_documented() -> None:
    """The lowest absolute value and the span of a block; above the bits of places one of the size, then the sign."""
    codec = TopKCompression(4 / 600, bits=2)
    data = bytes(codec.encode(VALUES))
    assert data == half(1.0) + half(7.0) + LOW + bytes([0b1010, 0b0010]) + FLAGS
    decoded = codec.decode(data, 600, torch.float32)
    low, high = 1 + 7 / 16, 1 + 7 * 9 / 16
    assert decoded[[3, 254, 255, 599]].tolist() == [low, -high, low, high]


def test_values_of_two_tensors_share_no_block() -> None:
    """A small tensor beside a large one keeps its size, and there is room for one block more."""
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    values[300:] *= 1e-4  # fewer values of the first than are sent
    codec = TopKCompression(0.03, bits=2)
    sizes = (300, 19_700)
    assert codec.tensors_bytes(sizes, torch.float32) == codec.encoded_bytes(20_000, torch.float32) + 4
    decoded = codec.decode(codec.encode(values, sizes), 20_000, torch.float32, sizes)
    sent = decoded[300:] != 0
    assert int(sent.sum()) == 300
    torch.testing.assert_close(decoded[300:][sent], values[300:][sent], rtol=0.3, atol=0.0)


@pytest.mark.parametrize("bits", [None, 2, 4, 8])
def test_zeros_are_never_sent(bits: int | None) -> None:
    """Also where fewer values are left than there is room for: what nobody trained does not move."""
    codec = TopKCompression(0.25, bits=bits)
    for numel in (0, 1, 70):
        values = torch.zeros(1000)
        values[7 : 7 + numel] = torch.linspace(-3.0, 1.0, numel)
        decoded = codec.decode(codec.encode(values), 1000, torch.float32)
        assert torch.equal(decoded != 0, values != 0)
        assert bool(((decoded - values).abs() <= codec.error_bound(values)).all())


@pytest.mark.parametrize(("bits", "most"), [(2, 0.003), (4, 0.0004), (8, 0.00001)])
def test_few_bits_lose_little_beside_what_is_left_out(bits: int, most: float) -> None:
    """The error beside that of bfloat16 for the values, normal data."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))

    def rms(codec: TopKCompression) -> float:
        return float((codec.decode(codec.encode(values), values.numel(), values.dtype) - values).square().mean().sqrt())

    exact = rms(TopKCompression(0.03))
    assert exact * (1 - 1e-6) < rms(TopKCompression(0.03, bits=bits)) < exact * (1 + most)


def test_three_percent_with_two_bits_take_a_hundredth_of_float32() -> None:
    """The bytes that the documents name, for each element."""
    numel = 1_000_000
    for fraction, bits, bytes_each in ((0.01, None, 0.0307), (0.01, 2, 0.0138), (0.02, 2, 0.0252), (0.03, 2, 0.0358)):
        size = TopKCompression(fraction, bits=bits).encoded_bytes(numel, torch.float32)
        assert size / numel == pytest.approx(bytes_each, abs=0.0001)


@pytest.mark.parametrize("numel", [2000, 60_000])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.2, 0.5])
def test_exactly_the_largest_are_sent(fraction: float, numel: int) -> None:
    """Also where a sample tells beforehand which they may be, where all are equal, and where most are 0."""
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    sorted_, few = normal.sort().values, normal.where(normal > 3.0, torch.zeros(()))
    codec = TopKCompression(fraction)
    count = math.ceil(fraction * numel)
    for values in (normal, sorted_, few, torch.ones(numel)):
        decoded = codec.decode(codec.encode(values), numel, torch.float32)
        limit = values.abs().topk(count).values[-1]
        assert int((decoded != 0).sum()) == min(count, int((values != 0).sum()))
        sent = values.abs() > limit
        torch.testing.assert_close(decoded[sent], values[sent], rtol=2**-8, atol=0.0)
        assert not bool(decoded[values.abs() < limit].any())


@pytest.mark.parametrize(
    ("low", "ones"),
    [
        ([5, 5, 7, 9], [0, 1, 2, 3]),
        ([9, 7, 5, 3], [0, 1, 2, 3]),
        ([1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ([1, 2, 3, 88], [0, 1, 2, 7]),
        ([1, 2, 3, 4], [0, 1, 2, 8]),
        ([1, 2, 3, 4], [15]),
    ],
)
@pytest.mark.parametrize("bits", [None, 2])
def test_places_that_are_none_are_seen(low: list[int], ones: list[int], bits: int | None) -> None:
    """Twice the same, not ascending, too many, beyond the end: all becomes NaN, which nobody applies."""
    codec = TopKCompression(4 / 600, bits=bits)
    width = 7 + (bits or 0)
    numbers, flags = torch.empty(width, dtype=torch.uint8), torch.empty(2, dtype=torch.uint8)
    write_numbers(torch.tensor(low, dtype=torch.int32), width, numbers)
    write_numbers(torch.zeros(16, dtype=torch.uint8).index_fill_(0, torch.tensor(ones), 1), 1, flags)
    sent = b"".join(map(half, (1.0, 2.0, 3.0, 4.0)[: 2 if bits else 4]))
    data = sent + bytes(numbers.tolist()) + bytes(flags.tolist())
    assert bool(codec.decode(data, 600, torch.float32).isnan().all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lowest_values_and_spans_that_are_not_finite_are_seen(bits: int) -> None:
    """Wherever they are; and finite ones never become infinite."""
    codec = TopKCompression(0.25, bits=bits)
    data = bytearray(codec.encode(torch.randn(1000)))
    for place in (0, 6, 8, 14):
        for bad in (math.nan, math.inf, -math.inf):
            spoiled = data.copy()
            spoiled[place : place + 2] = half(bad)
            assert bool(codec.decode(spoiled, 1000, torch.float32).isnan().all())
    huge = data[16:]
    for sign in (1, -1):
        most = half(sign * 3.38e38) * 8
        assert bool(torch.isfinite(codec.decode(most + huge, 1000, torch.float32)).all())


@pytest.mark.parametrize("bits", [0, 1, 3, 16, 2.0, "2"])
def test_bits_that_are_none_are_refused(bits: object) -> None:
    """With the possible ones."""
    with pytest.raises(ConfigError, match="is none of 2, 4, 8 and None"):
        TopKCompression(0.01, bits=bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, math.nan, 1, "0.1"])
def test_fractions_that_are_none_are_refused(fraction: float) -> None:
    """With the limits."""
    with pytest.raises(ConfigError, match=r"is no number from 1e-06 to 0\.5"):
        TopKCompression(fraction)


def test_a_fraction_from_numpy_has_the_same_name() -> None:
    """As a peer reads it."""
    codec = TopKCompression(np.float64(0.01))
    assert codec.name == "topk:0.01"
    assert codec_by_name(codec.name).name == codec.name
