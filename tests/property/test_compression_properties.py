"""What every codec promises, on values that hypothesis makes up."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    ErrorFeedback,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TopKCompression,
    Uniform8BitQuantization,
    as_tensor,
    codec_by_name,
    dtype_by_name,
    view_bytes,
)

FLOATS = ["float64", "float32", "float16", "bfloat16"]

ELEMENTWISE: list[CompressionBase] = [NoCompression(), Float16Compression(), BFloat16Compression()]
SHARING: list[CompressionBase] = [
    ScaledFloat16Compression(),
    Uniform8BitQuantization(),
    Quantile8BitQuantization(),
    BlockwiseQuantization(),
    BlockwiseQuantization(8, 16),
    BlockwiseQuantization(4),
    BlockwiseQuantization(4, 16),
    BlockwiseQuantization(2),
    BlockwiseQuantization(2, 16),
    TopKCompression(0.01),
    TopKCompression(0.001),
    TopKCompression(0.25),
    TopKCompression(0.3, bits=2),
    TopKCompression(0.1, bits=4),
    TopKCompression(0.03, bits=8),
    ErrorFeedback(TopKCompression(0.05)),
    ErrorFeedback(Uniform8BitQuantization()),
]

codecs = st.sampled_from([*ELEMENTWISE, *SHARING])
edges = [0.0, -0.0, 65504.0, 65519.99, 65520.0, 1e300, 5e-324, 2**-24, 2**-25, 2**-14, 1 + 2**-11 + 2**-40]
edges += [3.4028234663852886e38, -3.4028234663852886e38, 3.39e38, 3.4e38, 1.1754943508222875e-38, 1e-45, 2**-101]
numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1e5, 1e5),
    st.floats(-1e-4, 1e-4),
    st.sampled_from(edges),
)
unbounded = st.sampled_from([float("nan"), float("inf"), -float("inf")])


@st.composite
def small_tensors(draw: st.DrawFn, elements: st.SearchStrategy[float]) -> torch.Tensor:
    """A tensor of any floating dtype and of 0 to 3 dimensions, perhaps not contiguous."""
    dtype = dtype_by_name(draw(st.sampled_from(FLOATS)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = torch.empty(shape).numel()
    values = torch.tensor(draw(st.lists(elements, min_size=count, max_size=count)), dtype=torch.float64)
    tensor = _finite_in(values, dtype).view(shape)
    return tensor.transpose(0, -1) if tensor.dim() and draw(st.booleans()) else tensor


@st.composite
def large_tensors(draw: st.DrawFn, elements: st.SearchStrategy[float]) -> torch.Tensor:
    """Large enough for a codebook and several blocks: some distribution of some size around some middle, and outliers.

    Half-precision tensors of fewer than 1024 elements are sent as they are by the codec with the largest header.
    """
    dtype = dtype_by_name(draw(st.sampled_from(FLOATS)))
    count = draw(st.integers(330, 2200))
    made = torch.randn(count, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))), dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "tails", "sparse", "one sign", "constant", "levels"]))
    if kind == "tails":
        made = made * (made * 3).exp()
    elif kind == "sparse":
        made = made.where(made > 1.5, torch.zeros_like(made))
    elif kind == "one sign":
        made = made.square()
    elif kind == "constant":
        made = made * 0
    elif kind == "levels":
        made = made.round()
    sign = draw(st.sampled_from([1.0, -1.0]))
    size = 10.0 ** draw(st.sampled_from([0, 0, -3, 4, -7, -38, -44, 37, 38, 300]))
    values = (made * sign + draw(st.sampled_from([0.0, 0.0, 0.5, -3.0, 1000.0, 1e7]))) * size
    for element in draw(st.lists(elements, max_size=4)):
        values[draw(st.integers(0, count - 1))] = element
    return _finite_in(values, dtype)[:: draw(st.sampled_from([1, 1, 2]))]


def _finite_in(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To this dtype; what is too large becomes its largest number."""
    largest = torch.finfo(dtype).max
    cut = values.clamp(-largest, largest).where(values.isfinite(), values).to(dtype)
    return cut.clamp(-largest, largest).where(values.isfinite(), cut)


def tensors(elements: st.SearchStrategy[float] = numbers) -> st.SearchStrategy[torch.Tensor]:
    """Small ones with any elements, large ones with some."""
    return st.one_of(small_tensors(elements), large_tensors(elements))


def decoded(codec: CompressionBase, tensor: torch.Tensor) -> torch.Tensor:
    """Through the codec and back, in float64."""
    out = torch.empty(tensor.shape, dtype=torch.float64)
    codec.decode_into(codec.encode(tensor), tensor.dtype, out)
    return out


@settings(max_examples=600)
@given(codecs, tensors())
def test_the_error_is_within_the_stated_bound(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """Element by element, whatever else is in the tensor."""
    error = (decoded(codec, tensor) - tensor.double()).abs()
    assert bool((error <= codec.error_bound(tensor)).all())


@settings(max_examples=300)
@given(codecs, tensors())
def test_what_is_finite_stays_finite(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """Also in the tensor's own dtype, whose range a rounded step may leave."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    codec.decode_into(codec.encode(tensor), tensor.dtype, out)
    assert bool(torch.isfinite(out).all())


@settings(max_examples=300)
@given(codecs, tensors(st.one_of(numbers, unbounded)))
def test_what_is_not_finite_is_seen(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """It decodes to something that is not finite; if there is no such thing in the tensor, there is none afterwards."""
    finite = torch.isfinite(tensor)
    seen = torch.isfinite(decoded(codec, tensor))
    assert not bool(seen[~finite].any())
    assert bool(seen.all()) == bool(finite.all())


@given(st.sampled_from(ELEMENTWISE), tensors(st.one_of(numbers, unbounded)))
def test_elements_that_share_nothing_stay_what_they_are(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """NaN stays NaN, an infinity keeps its sign, and what is finite has its bound."""
    back = decoded(codec, tensor)
    assert torch.equal(torch.isnan(back), torch.isnan(tensor))
    assert torch.equal(torch.isposinf(back), torch.isposinf(tensor))
    assert torch.equal(torch.isneginf(back), torch.isneginf(tensor))
    finite = torch.isfinite(tensor)
    error = (back - tensor.double()).abs()
    assert bool((error <= codec.error_bound(tensor))[finite].all())


@settings(max_examples=300)
@given(st.sampled_from(SHARING), large_tensors(unbounded))
def test_what_shares_a_unit_with_what_is_not_finite_is_nan(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """Block or tensor: all of it or nothing, so that no value in between can be taken for a good one."""
    sound = torch.isfinite(tensor)
    data = codec.encode(tensor)
    if data.nbytes == tensor.numel() * tensor.element_size():
        return  # as it is
    back = codec.decode(data, tensor.numel(), tensor.dtype)
    unit = codec.block_size if isinstance(codec, BlockwiseQuantization) else tensor.numel()
    for start in range(0, tensor.numel(), unit):
        lost = torch.isnan(back[start : start + unit])
        assert bool(lost.all()) if not bool(sound[start : start + unit].all()) else not bool(lost.any())


@settings(max_examples=300)
@given(codecs, tensors())
def test_encoding_again_what_was_decoded_gives_the_same_bytes(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """Where the codec says so, decoded values prove what they were decoded from."""
    data = codec.encode(tensor)
    again = torch.empty(tensor.shape, dtype=tensor.dtype)
    codec.decode_into(data, tensor.dtype, again)
    if codec.idempotent(tensor.dtype):
        assert bytes(codec.encode(again)) == bytes(data)


@given(codecs, tensors(), st.integers(0, 9))
def test_the_bytes_do_not_depend_on_where_they_are_written(
    codec: CompressionBase, tensor: torch.Tensor, offset: int
) -> None:
    """At any address the same bytes are written, and nothing beside them; from any address the same values are read."""
    data = codec.encode(tensor)
    buffer = bytearray(b"\xa5" * (data.nbytes + offset + 3))
    place = memoryview(buffer)[offset : offset + data.nbytes]
    codec.encode_into(tensor, place)
    assert bytes(buffer) == b"\xa5" * offset + bytes(data) + b"\xa5" * 3
    there, here = (codec.decode(each, tensor.numel(), tensor.dtype) for each in (place, data))
    assert torch.equal(there, here)


@given(tensors(), codecs)
def test_the_name_and_the_size_are_enough_to_decode(tensor: torch.Tensor, codec: CompressionBase) -> None:
    """Another machine needs the codec's name, the dtype and the number of elements, and nothing else."""
    chosen = codec.choose(CompressionInfo.from_tensor(tensor))
    data = chosen.encode(tensor)
    assert data.nbytes == chosen.encoded_bytes(tensor.numel(), tensor.dtype)
    there = codec_by_name(chosen.name).decode(bytes(data), tensor.numel(), tensor.dtype)
    assert torch.equal(there, chosen.decode(data, tensor.numel(), tensor.dtype))


@given(codecs, st.sampled_from(FLOATS), st.integers(0, 1500), st.integers(1, 1500))
def test_more_elements_take_no_fewer_bytes_and_never_more_than_they_have(
    codec: CompressionBase, name: str, count: int, more: int
) -> None:
    """A part that is cut by the size of one element cannot be larger than it was cut for."""
    dtype = dtype_by_name(name)
    size = codec.encoded_bytes(count, dtype)
    assert size <= codec.encoded_bytes(count + more, dtype)
    assert size <= count * codec.encoded_bytes(1, dtype) <= count * dtype.itemsize


@settings(max_examples=300)
@given(codecs, st.sampled_from(FLOATS), st.integers(1, 1500), st.binary(min_size=1, max_size=64), st.integers(0, 99))
def test_any_bytes_decode(codec: CompressionBase, name: str, count: int, pattern: bytes, seed: int) -> None:
    """Whatever a peer sends in the right size becomes that many numbers, the same each time, and nothing worse."""
    dtype = dtype_by_name(name)
    size = codec.encoded_bytes(count, dtype)
    noise = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    for data in ((pattern * size)[:size], bytes(view_bytes(noise)), pattern + bytes(view_bytes(noise))[len(pattern) :]):
        if len(data) != size:
            continue
        values, again = (codec.decode(data, count, dtype) for _ in range(2))
        assert values.shape == (count,)
        assert values.dtype in {dtype, torch.float32, torch.float16, torch.bfloat16}
        assert torch.equal(values.isnan(), again.isnan())
        assert torch.equal(values.nan_to_num(), again.nan_to_num())


@given(codecs, large_tensors(numbers), st.integers(0, 1 << 20), st.integers(1, 255))
def test_an_encoding_with_a_wrong_byte_decodes(
    codec: CompressionBase, tensor: torch.Tensor, place: int, bits: int
) -> None:
    """Bytes that are nearly right come further than any others: to that many numbers, the same each time."""
    data = bytearray(codec.encode(tensor))
    data[place % len(data)] ^= bits
    values, again = (codec.decode(bytes(data), tensor.numel(), tensor.dtype) for _ in range(2))
    assert values.shape == (tensor.numel(),)
    assert torch.equal(values.nan_to_num(), again.nan_to_num())


@given(st.sampled_from(SHARING), large_tensors(numbers))
def test_a_zero_stays_a_zero(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """What nobody trained does not move: between values of both signs, or beside any, 0 decodes to 0."""
    tensor[::7] = 0.0
    back = codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype)
    assert not bool(back[::7].any())


@pytest.mark.parametrize("name", FLOATS)
@given(raw=st.binary(max_size=64))
def test_no_compression_passes_every_bit_pattern(name: str, raw: bytes) -> None:
    """Signalling NaNs, subnormals, negative zero: the bits that went in come out."""
    dtype = dtype_by_name(name)
    raw = raw[: len(raw) // dtype.itemsize * dtype.itemsize]
    tensor = as_tensor(raw, dtype)
    assert bytes(NoCompression().encode(tensor)) == raw
    assert bytes(view_bytes(NoCompression().decode(raw, tensor.numel(), dtype))) == raw


@given(st.lists(st.floats(width=16, allow_nan=False), max_size=20))
def test_float16_rounds_as_ieee_754_says(values: list[float]) -> None:
    """Half-precision values go through unchanged, and as Python's own struct writes them."""
    data = Float16Compression().encode(torch.tensor(values, dtype=torch.float32))
    assert bytes(data) == struct.pack(f"<{len(values)}e", *values)
