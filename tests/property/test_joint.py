"""Several tensors that are encoded at once: each keeps the error that it has by itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Differences,
    ErrorFeedback,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TopKCompression,
    Uniform8BitQuantization,
    view_bytes,
)
from shoal.compression.joint import Tensors
from tests.codecs import CODECS

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BARS: dict[CompressionBase, float] = {
    Uniform8BitQuantization(): 0.02,
    Quantile8BitQuantization(): 0.03,
    BlockwiseQuantization(): 0.02,
}
"""Error by the tensor's own deviation that hivemind 1.1.12 has on `PROBES`."""

a_size = st.one_of(st.integers(1, 20), st.integers(21, 200), st.sampled_from([64, 768, 1023, 1024, 1025, 4099]))
sizes_of_tensors = st.one_of(
    st.lists(a_size, min_size=1, max_size=12),  # few enough to be worked on one by one
    st.lists(a_size, min_size=25, max_size=30),
    st.lists(st.sampled_from([64, 128, 4096]), min_size=25, max_size=30),
).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Tensors of very different sizes, some of one sign, some far from zero, some constant."""
    sizes = draw(sizes_of_tensors)
    dtype = draw(st.sampled_from(FLOATS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    made = []
    for size in sizes:
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        kind = draw(st.sampled_from(["normal", "normal", "one sign", "far", "constant", "tails"]))
        if kind == "one sign":
            values = -values.square()
        elif kind == "far":
            values = values + 1000
        elif kind == "constant":
            values = values * 0 + 1
        elif kind == "tails":
            values = values**3
        made.append(values * 10.0 ** draw(st.sampled_from([-7, -2, 0, 0, 1, 3])))
    largest = torch.finfo(dtype).max
    return torch.cat(made).clamp(-largest, largest).to(dtype), sizes


def through(codec: CompressionBase, values: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Encoded and decoded, in float64."""
    data = codec.encode(values, sizes)
    assert data.nbytes == codec.tensors_bytes(sizes, values.dtype)
    return codec.decode(data, values.numel(), values.dtype, sizes).to(torch.float64, copy=True)


def alone(codec: CompressionBase) -> bool:
    """Whether the codec keeps tensors apart in all that it does: top-k looks for the largest in all of them."""
    return codec.has_scales and "topk" not in codec.name


@settings(max_examples=300)
@given(st.sampled_from(CODECS), tensors())
def test_every_tensor_keeps_its_bound_whatever_is_beside_it(
    codec: CompressionBase, given: tuple[torch.Tensor, tuple[int, ...]]
) -> None:
    """The stated bound of all tensors, and of each what it has by itself: with a codebook in common four times that."""
    values, sizes = given
    back = through(codec, values, sizes)
    error = (back - values.double()).abs()
    assert bool((error <= codec.tensors_bound(values, sizes)).all())
    if not alone(codec):
        return
    for tensor, one in zip(torch.split(values, list(sizes)), torch.split(error, list(sizes)), strict=True):
        reach = float(tensor.double().max() - tensor.double().min())
        top = float(tensor.double().abs().max())
        assert float(one.max()) <= (0.62 if "blockwise:2" in codec.name else 0.15) * top
        assert "quantile" not in codec.name or float(one.max()) <= reach / 20 + top / 500


@settings(max_examples=200)
@given(st.sampled_from(CODECS), tensors(), st.data())
def test_a_tensor_that_is_not_finite_spoils_no_other(
    codec: CompressionBase, given: tuple[torch.Tensor, tuple[int, ...]], data: st.DataObject
) -> None:
    """It is seen, and its neighbours are as they are without it."""
    values, sizes = given
    if not alone(codec) or codec.tensors_bytes(sizes, values.dtype) == values.numel() * values.itemsize:
        return
    bad = data.draw(st.integers(0, len(sizes) - 1))
    spoiled = values.clone()
    spoiled[sum(sizes[:bad]) + data.draw(st.integers(0, sizes[bad] - 1))] = data.draw(
        st.sampled_from([float("nan"), float("inf"), -float("inf")])
    )
    back = through(codec, spoiled, sizes)
    finite = [bool(torch.isfinite(tensor).all()) for tensor in torch.split(back, list(sizes))]
    assert finite == [tensor != bad for tensor in range(len(sizes))]


@settings(max_examples=200)
@given(st.sampled_from(CODECS), tensors())
def test_tensors_that_were_decoded_encode_to_the_same_bytes(
    codec: CompressionBase, given: tuple[torch.Tensor, tuple[int, ...]]
) -> None:
    """Where the codec says so: whoever holds an average can prove it."""
    values, sizes = given
    data = codec.encode(values, sizes)
    again = torch.empty_like(values)
    codec.decode_into(data, values.dtype, again, sizes)
    assert bool(torch.isfinite(again).all())
    if codec.idempotent(values.dtype):
        assert bytes(codec.encode(again, sizes)) == bytes(data)


@settings(max_examples=200)
@given(st.sampled_from(CODECS), sizes_of_tensors, st.sampled_from(FLOATS), st.integers(0, 99))
def test_any_bytes_decode_as_tensors(
    codec: CompressionBase, sizes: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    """Whatever a peer sends in the right size: that many numbers, the same each time."""
    size = codec.tensors_bytes(sizes, dtype)
    noise = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    one, other = (codec.decode(bytes(view_bytes(noise)), sum(sizes), dtype, sizes) for _ in range(2))
    assert one.shape == (sum(sizes),)
    assert torch.equal(one.double().nan_to_num(), other.double().nan_to_num())


@given(st.sampled_from(CODECS), tensors())
def test_zeros_of_every_tensor_stay_zeros(codec: CompressionBase, given: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    """What nobody trained does not move, whatever is trained beside it."""
    values, sizes = given
    values[::7] = 0.0
    assert not bool(through(codec, values, sizes)[::7].any())


@settings(max_examples=60)
@given(sizes_of_tensors, st.integers(0, 99), st.data())
def test_tensors_are_worked_on_together_as_each_alone(sizes: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    """Extremes, and what is done with a number for each tensor: wherever the borders are."""
    generator = torch.Generator().manual_seed(seed)
    tensors, values = Tensors(sizes), torch.randn(sum(sizes), generator=generator)
    if bad := data.draw(st.sampled_from([0.0, math.nan, math.inf])):
        values[data.draw(st.integers(0, sum(sizes) - 1))] = bad
    alone = torch.split(values, list(sizes))
    expected = [(tensor.min().item(), tensor.max().item()) for tensor in alone]
    assert torch.equal(torch.tensor(tensors.extremes(values)).nan_to_num(), torch.tensor(expected).nan_to_num())
    addends, factors = (torch.randn(len(sizes), generator=generator).tolist() for _ in range(2))
    each = list(zip(alone, addends, factors, strict=True))
    for addends_, made in (
        (addends, tensors.affine(addends, factors, values)),
        ([0.0] * len(sizes), tensors.scale(values.clone(), factors)),
    ):
        wanted = [tensor * factor + addend for (tensor, _, factor), addend in zip(each, addends_, strict=True)]
        assert torch.allclose(made, torch.cat(wanted), rtol=1e-5, atol=1e-5, equal_nan=True)
    shifted = torch.cat([tensor + addend for tensor, addend, _ in each])
    assert torch.equal(tensors.shift(values.clone(), addends).nan_to_num(), shifted.nan_to_num())


@given(st.sampled_from(CODECS), tensors())
def test_tensors_decode_alike_into_memory_of_any_kind(
    codec: CompressionBase, given: tuple[torch.Tensor, tuple[int, ...]]
) -> None:
    """Straight into contiguous float32 values, and by way of a copy."""
    values, sizes = given
    data = codec.encode(values, sizes)
    straight, apart = torch.empty(values.numel()), torch.empty(values.numel(), 2)[:, 0]
    for out in (straight, apart):
        codec.decode_into(data, values.dtype, out, sizes)
    assert torch.equal(straight, apart)
    assert torch.equal(straight, codec.decode(data, values.numel(), values.dtype, sizes).float())


PROBES = [
    (small, large, size, first)
    for small in (64, 1000, 4096, 50_000)
    for large in (1000, 50_000, 200_000)
    for size in (5.0, 28.0)
    for first in (True, False)
]


@pytest.mark.parametrize("codec", BARS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_do_not_cross_tensors(codec: CompressionBase, dtype: torch.dtype) -> None:
    """One of size 0.01 beside one of 5 to 28: within 1.1 times of hivemind's error, by its own deviation."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for small, large, size, first in PROBES:
        tensors = [torch.randn(small, generator=generator) * 0.01, torch.randn(large, generator=generator) * size]
        tensors = [tensor.to(dtype) for tensor in (tensors if first else tensors[::-1])]
        sizes = (tensors[0].numel(), tensors[1].numel())
        back = torch.split(through(codec, torch.cat(tensors), sizes), list(sizes))
        for tensor, decoded in zip(tensors, back, strict=True):
            error = (decoded - tensor.double()).square().mean().sqrt() / tensor.double().std()
            worst = max(worst, float(error))
    print(f"{codec.name}, {dtype}: {worst:.2%}")
    assert worst < 1.1 * BARS[codec]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_scales_for_each_tensor_take_hardly_more_bytes(codec: CompressionBase) -> None:
    """Two tensors at once, beside one as large as both: at most 1.02 times the bytes, and top-k's 4 for its scales."""
    header = 4 if codec.has_scales and not alone(codec) else 0
    for small, large in [(100, 100), *((probe[0], probe[1]) for probe in PROBES)]:
        apart, joined = (codec.tensors_bytes(sizes, torch.float32) for sizes in ((small, large), (small + large,)))
        assert apart - header <= 1.02 * joined


SMALL: dict[CompressionBase, dict[int, float]] = {
    Uniform8BitQuantization(): {16: 1.187, 64: 1.047, 100: 1.030, 150: 1.020, 250: 1.012},
    Quantile8BitQuantization(): {16: 1.293, 64: 1.077, 100: 1.049, 150: 1.033, 250: 1.020},
    ScaledFloat16Compression(): {16: 1.156, 64: 1.039, 100: 1.025, 150: 1.017, 250: 1.010},
    BlockwiseQuantization(): {16: 1.091, 64: 1.000, 100: 1.008, 150: 1.008, 250: 1.001},
}
"""How many times the bytes of one tensor a thousand small ones take."""


@pytest.mark.parametrize("codec", SMALL, ids=lambda codec: codec.name)
def test_a_thousand_small_tensors_take_the_bytes_that_are_documented(codec: CompressionBase) -> None:
    """Headers weigh most there; decision 0016 has the numbers."""
    for numel, ratio in SMALL[codec].items():
        apart, joined = (codec.tensors_bytes(sizes, torch.float32) for sizes in ((numel,) * 1000, (1000 * numel,)))
        print(f"{codec.name}: 1,000 tensors of {numel}: {apart / joined:.4f}")
        assert apart / joined == pytest.approx(ratio, abs=0.0005)


def test_tiny_tensors_are_sent_as_they_are() -> None:
    """Under every codec with scales, also within others; and the rest is not."""
    for codec in (
        *(ScaledFloat16Compression(), Uniform8BitQuantization(), Quantile8BitQuantization(), TopKCompression()),
        *(BlockwiseQuantization(4), ErrorFeedback(TopKCompression()), Differences(BlockwiseQuantization())),
        SizeAdaptiveCompression(0, less=NoCompression(), greater_equal=Uniform8BitQuantization()),
    ):
        assert codec.choose(CompressionInfo.from_tensor(torch.zeros(3, 5))) == NoCompression()
        assert codec.choose(CompressionInfo.from_tensor(torch.zeros(4, 4))) != NoCompression()
    assert Float16Compression().choose(CompressionInfo.from_tensor(torch.zeros(1))) == Float16Compression()
