"""What every codec promises, on values that hypothesis makes up."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    as_tensor,
    codec_by_name,
    dtype_by_name,
    view_bytes,
)

FLOATS = ["float64", "float32", "float16", "bfloat16"]

codecs = st.sampled_from([NoCompression(), Float16Compression()])
edges = [0.0, -0.0, 65504.0, 65519.99, 65520.0, 1e300, 5e-324, 2**-24, 2**-25, 2**-14, 1 + 2**-11 + 2**-40]
numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1e5, 1e5),
    st.floats(-1e-4, 1e-4),
    st.sampled_from(edges),
)


@st.composite
def tensors(draw: st.DrawFn, elements: st.SearchStrategy[float] = numbers) -> torch.Tensor:
    """A tensor of any floating dtype and of 0 to 3 dimensions, perhaps not contiguous."""
    dtype = dtype_by_name(draw(st.sampled_from(FLOATS)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = torch.empty(shape).numel()
    values = torch.tensor(draw(st.lists(elements, min_size=count, max_size=count)), dtype=torch.float64).to(dtype)
    tensor = values.view(shape)
    return tensor.transpose(0, -1) if tensor.dim() and draw(st.booleans()) else tensor


def decoded(codec: CompressionBase, tensor: torch.Tensor) -> torch.Tensor:
    """Through the codec and back, in float64."""
    out = torch.empty(tensor.shape, dtype=torch.float64)
    codec.decode_into(codec.encode(tensor), tensor.dtype, out)
    return out


@given(codecs, tensors())
def test_the_error_is_within_the_stated_bound(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """Element by element, wherever the value is finite."""
    finite = torch.isfinite(tensor)
    error = (decoded(codec, tensor) - tensor.double()).abs()
    assert bool((error <= codec.error_bound(tensor))[finite].all())


@given(codecs, tensors(st.one_of(numbers, st.sampled_from([float("nan"), float("inf"), -float("inf")]))))
def test_what_is_not_finite_stays_what_it_is(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """Finite stays finite, NaN stays NaN, an infinity keeps its sign."""
    back = decoded(codec, tensor)
    assert torch.equal(torch.isnan(back), torch.isnan(tensor))
    assert torch.equal(torch.isposinf(back), torch.isposinf(tensor))
    assert torch.equal(torch.isneginf(back), torch.isneginf(tensor))


@given(codecs, tensors())
def test_encoding_again_what_was_decoded_gives_the_same_bytes(codec: CompressionBase, tensor: torch.Tensor) -> None:
    """Values that were rounded once are not rounded further when they are passed on."""
    data = codec.encode(tensor)
    again = codec.decode(data, tensor.numel(), tensor.dtype).to(tensor.dtype)
    if tensor.dtype is not torch.bfloat16 or codec == NoCompression():  # bfloat16 cannot hold all of float16
        assert bytes(codec.encode(again)) == bytes(data)


@given(codecs, tensors(), st.integers(0, 9))
def test_the_bytes_do_not_depend_on_where_they_are_written(
    codec: CompressionBase, tensor: torch.Tensor, offset: int
) -> None:
    """At any address the same bytes are written, and nothing beside them."""
    data = codec.encode(tensor)
    buffer = bytearray(b"\xa5" * (data.nbytes + offset + 3))
    codec.encode_into(tensor, memoryview(buffer)[offset : offset + data.nbytes])
    assert bytes(buffer) == b"\xa5" * offset + bytes(data) + b"\xa5" * 3


@given(tensors(), codecs)
def test_the_name_and_the_size_are_enough_to_decode(tensor: torch.Tensor, codec: CompressionBase) -> None:
    """Another machine needs the codec's name, the dtype and the number of elements, and nothing else."""
    chosen = codec.choose(CompressionInfo.from_tensor(tensor))
    data = chosen.encode(tensor)
    assert data.nbytes == chosen.encoded_bytes(tensor.numel(), tensor.dtype)
    there = codec_by_name(chosen.name).decode(bytes(data), tensor.numel(), tensor.dtype)
    assert torch.equal(there, chosen.decode(data, tensor.numel(), tensor.dtype))


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
