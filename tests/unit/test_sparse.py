"""The top-k codec byte by byte."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from shoal.compression import TopKCompression, codec_by_name
from shoal.errors import ConfigError


def half(value: float) -> bytes:
    """As bfloat16."""
    return struct.pack("<f", value)[2:]


def test_the_bytes_are_as_documented() -> None:
    """Values in the order of their places, their offsets in blocks of 255, and how many of each block there are."""
    values = torch.zeros(600)
    values[3], values[254], values[255], values[599], values[100] = 1.0, -8.0, 2.0, 4.0, 0.5
    codec = TopKCompression(4 / 600)
    data = bytes(codec.encode(values))
    assert data == b"".join(map(half, (1.0, -8.0, 2.0, 4.0))) + bytes([3, 254, 0, 89]) + bytes([2, 1, 1])
    decoded = codec.decode(data, 600, torch.float32)
    values[100] = 0.0
    assert torch.equal(decoded, values)


def test_small_fractions_have_blocks_of_65535() -> None:
    """Two bytes for each offset and count."""
    values = torch.zeros(65536 + 5)
    values[65534], values[65535] = 1.0, -2.0
    codec = TopKCompression(2 / values.numel())
    data = bytes(codec.encode(values))
    assert data == half(1.0) + half(-2.0) + struct.pack("<HH", 65534, 0) + struct.pack("<HH", 1, 1)
    assert torch.equal(codec.decode(data, values.numel(), torch.float32), values)


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
    ("places", "counts"),
    [
        ([5, 5, 7, 9], [4, 0, 0]),
        ([9, 7, 5, 3], [4, 0, 0]),
        ([1, 2, 3, 4], [3, 0, 0]),
        ([1, 2, 3, 4], [5, 0, 0]),
        ([1, 2, 3, 255], [3, 0, 1]),
        ([255, 0, 3, 4], [1, 3, 0]),
    ],
)
def test_places_that_are_none_are_seen(places: list[int], counts: list[int]) -> None:
    """Twice the same, not ascending, too few, too many, beyond the end: all becomes NaN, which nobody applies."""
    data = b"".join(map(half, (1.0, 2.0, 3.0, 4.0))) + bytes(places) + bytes(counts)
    assert bool(TopKCompression(4 / 600).decode(data, 600, torch.float32).isnan().all())


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
