"""Codecs and the views of memory below them."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.compression import (
    DTYPES,
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TensorDescriptor,
    TensorRole,
    TopKCompression,
    Uniform8BitQuantization,
    allocate,
    as_tensor,
    codec_by_name,
    dtype_by_name,
    dtype_name,
    populate,
    register_codec,
    view_bytes,
)
from shoal.errors import ConfigError, LocalError
from tests.codecs import CODECS

ALL = [*CODECS, BlockwiseQuantization(bits=4, block_size=32)]
BAD_NAMES = [
    *("uniform8bit:", "blockwise", "blockwise:", "blockwise:8", "blockwise:8:", "blockwise:8:63", "blockwise:5:64"),
    *(
        "blockwise:8:064",
        "blockwise:8:64:1",
        "blockwise:8:-64",
        "blockwise:8:٦٤",
        "blockwise:8:131072",
        "blockwise:4:8",
    ),
    *("topk", "topk:", "topk:0", "topk:0.010", "topk:1", "topk:nan", "topk:1e-7", "topk:0.6", "topk:٠.٠١", "feedback:"),
    *("topk:0.1:", "topk:0.1:3", "topk:0.1:02", "topk:0.1:2:2", "topk:0.1:None", "topk:0.1:٢", "topk::2"),
    *("feedback", "feedback:feedback:topk:0.01", "feedback:nothing", "feedback:" * 20),
    *(f"blockwise:8:{'9' * 5000}", "SizeAdaptiveCompression(threshold=1, less=none, greater_equal=none)"),
]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Some values of this dtype, the same each time."""
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5)], ids=str)
def test_no_compression_is_bit_exact_for_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """What was encoded comes back with the same bits, in as many bytes as the tensor has."""
    values = sample(dtype, *shape)
    data = NoCompression().encode(values)
    assert data.nbytes == values.numel() * values.element_size()
    decoded = NoCompression().decode(data, values.numel(), dtype)
    assert decoded.dtype is dtype
    assert bytes(view_bytes(decoded)) == bytes(view_bytes(values.clone(memory_format=torch.contiguous_format)))


def test_no_compression_keeps_the_payload_of_a_nan() -> None:
    """A NaN is not replaced by another NaN."""
    bits = torch.tensor([0x7FC12345, -0x400000, 0x7F800000], dtype=torch.int32)
    data = NoCompression().encode(bits.view(torch.float32))
    assert torch.equal(NoCompression().decode(data, 3, torch.float32).view(torch.int32), bits)


def test_encoding_is_little_endian() -> None:
    """The bytes on the wire do not depend on the machine."""
    assert bytes(NoCompression().encode(torch.tensor([1], dtype=torch.int32))) == b"\x01\x00\x00\x00"
    assert bytes(NoCompression().encode(torch.tensor([1.0], dtype=torch.bfloat16))) == b"\x80\x3f"
    assert bytes(Float16Compression().encode(torch.tensor([1.0]))) == b"\x00\x3c"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_float16_cuts_finite_values_and_keeps_the_others(dtype: torch.dtype) -> None:
    """Finite stays finite; an infinity and NaN are still seen as such."""
    infinity = float("inf")
    values = torch.tensor([1e30, -1e30, infinity, -infinity, float("nan"), 1.5, -0.0], dtype=dtype)
    decoded = Float16Compression().decode(Float16Compression().encode(values), 7, dtype).float()
    assert decoded[:4].tolist() == [65504.0, -65504.0, infinity, -infinity]
    assert bool(torch.isnan(decoded[4]))
    assert decoded[5:].tolist() == [1.5, 0.0]
    assert bool(torch.signbit(decoded[6]))


def test_float16_cuts_the_values_that_rounding_would_take_out_of_range() -> None:
    """Just above the largest half: rounds down below 65520, is cut from there."""
    values = torch.tensor([65504.0, 65519.0, 65520.0, -65520.0, 70000.0])
    decoded = Float16Compression().decode(Float16Compression().encode(values), 5, torch.float32)
    assert decoded.tolist() == [65504.0, 65504.0, 65504.0, -65504.0, 65504.0]


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_encoding_takes_any_strides_and_leaves_the_values_alone(codec: CompressionBase) -> None:
    """A transposed, sliced tensor that requires a gradient is encoded in row-major order and not changed."""
    values = sample(torch.float32, 60, 80).t()[::2].requires_grad_()
    before = values.detach().clone()
    decoded = torch.empty(40, 60)
    codec.decode_into(codec.encode(values), torch.float32, decoded)
    assert torch.equal(values, before)
    assert bool(((decoded - before).abs() <= codec.error_bound(values)).all())


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_encoding_and_decoding_work_at_odd_addresses(codec: CompressionBase, offset: int) -> None:
    """Tensors follow one another without padding, so a buffer may begin anywhere; bytes beside it stay."""
    values = sample(torch.float64, 500)
    size = codec.encoded_bytes(500, torch.float64)
    buffer = bytearray(b"\xee" * (offset + size + 2))
    codec.encode_into(values, memoryview(buffer)[offset : offset + size])
    assert buffer[:offset] == b"\xee" * offset
    assert buffer[-2:] == b"\xee\xee"
    decoded = codec.decode(memoryview(buffer)[offset : offset + size], 500, torch.float64)
    assert bool(((decoded.double() - values).abs() <= codec.error_bound(values)).all())


def test_decoding_shares_writable_memory_and_copies_read_only_memory() -> None:
    """A received buffer is decoded without a copy; bytes, which nobody may write, are copied."""
    buffer = bytearray(8)
    assert NoCompression().decode(buffer, 2, torch.float32).tolist() == [0.0, 0.0]
    shared = NoCompression().decode(buffer, 2, torch.float32)
    buffer[:] = NoCompression().encode(torch.tensor([1.0, 2.0]))
    assert shared.tolist() == [1.0, 2.0]
    frozen = bytes(buffer)
    NoCompression().decode(frozen, 2, torch.float32).zero_()
    assert frozen == bytes(buffer)


def test_a_bool_from_elsewhere_is_zero_or_one() -> None:
    """Any byte but 0 is True, and only 0 and 1 are in memory afterwards."""
    decoded = NoCompression().decode(bytearray(b"\x00\x01\x07\xff"), 4, torch.bool)
    assert bytes(view_bytes(decoded)) == b"\x00\x01\x01\x01"


def test_decode_into_converts_to_the_dtype_of_the_accumulator() -> None:
    """Bfloat16 travels as 2 bytes and is added up in float32."""
    values = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    total = torch.empty(2)
    NoCompression().decode_into(NoCompression().encode(values), torch.bfloat16, total)
    assert total.tolist() == [1.0, -2.5]


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_wrong_sizes_are_refused(codec: CompressionBase) -> None:
    """A buffer that does not fit is an error, never a short copy."""
    values, size = torch.zeros(400), codec.encoded_bytes(400, torch.float32)
    with pytest.raises(LocalError, match="writable buffer"):
        codec.encode_into(values, memoryview(bytearray(size + 1)))
    with pytest.raises(LocalError, match="writable buffer"):
        codec.encode_into(values, memoryview(bytes(size)))
    with pytest.raises(ConfigError, match=f"not in {size - 1}"):
        codec.decode(bytearray(size - 1), 400, torch.float32)
    with pytest.raises(ConfigError, match="not in 1"):
        codec.decode(bytearray(1), 0, torch.float32)


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_size_that_is_announced_is_the_size_that_is_written(codec: CompressionBase, dtype: torch.dtype) -> None:
    """For tensors that are sent as they are and for those that have a header."""
    for count in (0, 1, 10, 5000):
        assert codec.encode(sample(dtype, count)).nbytes == codec.encoded_bytes(count, dtype)


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        (NoCompression(), 40_000),
        (Float16Compression(), 20_000),
        (BFloat16Compression(), 20_000),
        (ScaledFloat16Compression(), 20_005),
        (Uniform8BitQuantization(), 10_003),
        (Quantile8BitQuantization(), 11_029),
        (BlockwiseQuantization(), 10_314),
        (BlockwiseQuantization(8, 4096), 10_006),
        (BlockwiseQuantization(4), 5_314),
        (BlockwiseQuantization(2), 2_814),
        (TopKCompression(0.01), 311),
        (TopKCompression(0.01, bits=2), 145),
    ],
    ids=repr,
)
def test_how_many_bytes_ten_thousand_floats_take(codec: CompressionBase, size: int) -> None:
    """Headers, scales and codes, and nothing else."""
    assert codec.encoded_bytes(10_000, torch.float32) == size


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_small_tensors_are_no_larger_than_they_are(codec: CompressionBase) -> None:
    """A bias of two elements is sent as it is rather than with a codebook: exactly."""
    values = torch.tensor([1.1, -3e-7])
    assert codec.encoded_bytes(2, torch.float32) <= 8
    if codec.encoded_bytes(2, torch.float32) == 8:
        assert codec.max_error(values) == 0.0
        assert torch.equal(codec.decode(codec.encode(values), 2, torch.float32), values)


def test_integers_stay_exact_under_any_codec() -> None:
    """A lossy codec is not chosen for step counters and masks, and refuses them when asked directly."""
    counter = torch.tensor(3)
    info = CompressionInfo.from_tensor(counter, key="step", role=TensorRole.OPTIMIZER)
    assert info.descriptor == TensorDescriptor((), torch.int64)
    assert info.descriptor.numel == 1
    for codec in ALL:
        assert codec.choose(info) == NoCompression()
        assert codec.choose(CompressionInfo.from_tensor(torch.zeros(16))) == codec
    with pytest.raises(ConfigError, match="does not support"):
        Float16Compression().encode_into(counter, memoryview(bytearray(8)))


def test_complex_tensors_are_refused_by_name() -> None:
    """What cannot be sent is said with what can."""
    with pytest.raises(ConfigError, match=r"complex64.*float32"):
        NoCompression().encode(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="complex64"):
        Float16Compression().choose(CompressionInfo.from_tensor(torch.zeros(1, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match="complex64"):
        dtype_name(torch.complex64)
    with pytest.raises(ConfigError, match="unknown dtype"):
        dtype_by_name("float31")


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_a_codec_is_found_by_its_name(codec: CompressionBase) -> None:
    """The name on the wire gives an equal codec, with an equal hash."""
    found = codec_by_name(codec.name)
    assert found == codec
    assert len({found, codec}) == 1


@pytest.mark.parametrize("name", ["", "zip", "none:", "none:1", "float16:x", "NONE", "x" * 10_000, *BAD_NAMES])
def test_unknown_codec_names_are_refused(name: str) -> None:
    """A name from the network that is not exactly a codec's name is an error that lists the codecs."""
    with pytest.raises(ConfigError, match="codec") as caught:
        codec_by_name(name)
    assert len(str(caught.value)) < 200


def test_a_family_is_registered_once() -> None:
    """Nobody replaces a codec that others rely on."""
    with pytest.raises(ConfigError, match="registered already"):
        register_codec("none", lambda _: NoCompression())


def test_bytes_of_a_tensor_are_its_memory() -> None:
    """Writing through the view changes the tensor; the view alone keeps the memory alive."""
    tensor, data = allocate(3, torch.int16)
    data[:] = b"\x01\x00\x02\x00\x03\x00"
    assert tensor.tolist() == [1, 2, 3]
    part = data[2:4]
    del tensor, data
    gc.collect()
    others = [torch.full((3,), -1, dtype=torch.int16) for _ in range(100)]  # would take the memory if it were free
    assert bytes(part) == b"\x02\x00"
    assert len(others) == 100


def test_bytes_of_a_view_begin_where_the_view_begins() -> None:
    """A slice of a larger tensor is seen from its own first element."""
    tensor = torch.arange(10, dtype=torch.uint8)
    assert bytes(view_bytes(tensor[4:6])) == b"\x04\x05"


def test_populated_memory_is_there_and_as_it_was() -> None:
    """Whatever lies in it, wherever a view begins. Before, new memory is not there."""
    resident = Path("/proc/self/statm")
    # Of the system itself: an allocator may have memory that was used before.
    data = memoryview(mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    data[5:9] = b"abcd"
    before = int(resident.read_text().split()[1])
    populate([data[7:7], data[6 : 48 << 20], memoryview(bytearray())])
    pages = int(resident.read_text().split()[1]) - before
    assert bytes(data[5:9]) == b"abcd"
    assert pages * mmap.PAGESIZE == pytest.approx(48 << 20, rel=0.05)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 4).t()[:2], torch.zeros(4)[::2], torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")],
    ids=["transposed", "strided", "sparse", "meta"],
)
def test_memory_that_is_not_one_run_of_bytes_is_refused(tensor: torch.Tensor) -> None:
    """Only contiguous host memory has a view."""
    with pytest.raises(ConfigError, match="copy it first"):
        view_bytes(tensor)


def test_as_tensor_refuses_a_broken_element() -> None:
    """Half an element is an error."""
    with pytest.raises(ConfigError, match="whole number"):
        as_tensor(bytearray(3), torch.float16)


def test_max_error_of_nothing_is_zero() -> None:
    """An empty tensor has no error."""
    assert Float16Compression().max_error(torch.empty(0)) == 0.0
    assert NoCompression().max_error(torch.ones(3)) == 0.0


@pytest.mark.parametrize(
    "arguments", [{"bits": 8.0}, {"bits": 5}, {"block_size": 64.0}, {"block_size": 48}, {"block_size": 8}]
)
def test_blocks_that_are_none_are_refused(arguments: dict[str, Any]) -> None:
    """A name with them would be understood by nobody."""
    with pytest.raises(ConfigError, match=r"is none of 8, 4 and 2|is no power of two"):
        BlockwiseQuantization(**arguments)
