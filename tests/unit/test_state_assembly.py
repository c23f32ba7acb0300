"""Where a state is put together: memory, decoding, and the look at its values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import (
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    Uniform8BitQuantization,
    view_bytes,
)
from shoal.errors import PeerProtocolError
from shoal.state.digest import digest_of
from shoal.state.wire.assembly import Assembly
from shoal.state.wire.manifest import Manifest, StateTensorSpec, describe
from tests.codecs import CODECS

CHUNK = 1024


def encoded(tensors: list[torch.Tensor], codecs: Sequence[CompressionBase]) -> tuple[Manifest, bytes]:
    """A state, cut to small chunks."""
    specs = tuple(StateTensorSpec(tuple(t.shape), t.dtype, c) for t, c in zip(tensors, codecs, strict=True))
    out = bytearray(sum(spec.encoded_bytes for spec in specs))
    start = 0
    for each, tensor in zip(specs, tensors, strict=True):
        each.encode_into(tensor, memoryview(out)[start : start + each.encoded_bytes])
        start += each.encoded_bytes
    data = bytes(out)
    hashes = tuple(blake3(data[i : i + CHUNK]).digest() for i in range(0, len(data), CHUNK))
    return Manifest(b"s" * 16, 0, None, specs, CHUNK, hashes), data


def fill(assembly: Assembly, manifest: Manifest, data: bytes) -> None:
    """Write all chunks, the last one first."""
    for chunk in reversed(range(len(manifest.hashes))):
        start, _ = manifest.chunk_range(chunk)
        for place in assembly.buffers(chunk):
            place[:] = data[start : start + place.nbytes]
            start += place.nbytes
        assert digest_of(assembly.buffers(chunk)) == manifest.hashes[chunk]


def test_tensors_of_every_kind_come_out_as_they_went_in() -> None:
    """Chunks cross the borders of odd-sized, empty, 0-dim and compressed tensors."""
    plain, half = NoCompression(), Float16Compression()
    tensors = [
        torch.arange(999, dtype=torch.float16),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.arange(700, dtype=torch.float64).view(7, 100),
        torch.tensor(5, dtype=torch.int64),
        torch.arange(2000, dtype=torch.float32),
        torch.arange(300, dtype=torch.bfloat16),
    ]
    manifest, data = encoded(tensors, [plain, plain, plain, plain, plain, half, plain])
    assembly = Assembly(manifest)
    fill(assembly, manifest, data)
    for out, tensor in zip(assembly.finish(), tensors, strict=True):
        assert (out.dtype, out.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(out, tensor)


@given(st.integers(0, 200), st.sampled_from(CODECS), st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
def test_a_large_tensor_is_decoded_tile_by_tile(numel: int, codec: CompressionBase, dtype: torch.dtype) -> None:
    """Each tile as its codec decodes it alone; also where that takes more room than the values, or their memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.state.wire.manifest.TILE_ELEMENTS", 64)
        tensor = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3).to(dtype)
        used = codec if codec.supports(dtype) else NoCompression()
        manifest, data = encoded([tensor, torch.ones(3)], [used, NoCompression()])
        assembly = Assembly(manifest)
        fill(assembly, manifest, data)
        tiles = [tensor[first : first + 64] for first in range(0, numel, 64)]
        expected = [used.decode(used.encode(tile), tile.numel(), dtype).to(dtype) for tile in tiles]
        found, _ = assembly.finish()
        assert torch.equal(found, torch.cat(expected) if expected else tensor)


@pytest.mark.parametrize("codec", [Float16Compression(), Uniform8BitQuantization(), BlockwiseQuantization(bits=4)])
def test_a_compressed_tensor_is_received_and_decoded_in_its_final_memory(codec: CompressionBase) -> None:
    """What is received lies at its end: beyond the tensor itself, a tile is held at a time."""
    tensor = torch.arange(3_000_000, dtype=torch.float32)
    manifest, data = encoded([tensor], [codec])
    assembly = Assembly(manifest)
    fill(assembly, manifest, data)
    [found] = assembly.finish()
    assert found.untyped_storage().nbytes() == found.nbytes
    assert float((found - tensor).abs().max()) <= codec.max_error(tensor)


def test_a_tensor_that_is_not_aligned_is_encoded_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd number of bytes before a large tensor does not make the donor copy it twice."""
    seen: list[int] = []

    encode = NoCompression._encode

    def watched(codec: NoCompression, values: torch.Tensor, out: memoryview) -> None:
        seen.append(values.numel())
        encode(codec, values, out)

    monkeypatch.setattr(NoCompression, "_encode", watched)
    tensor = torch.arange(2_500_000, dtype=torch.float32)
    out = bytearray(tensor.nbytes + 1)
    StateTensorSpec((2_500_000,), torch.float32, NoCompression()).encode_into(tensor, memoryview(out)[1:])
    assert out[1:] == view_bytes(tensor)
    assert max(seen) == 1 << 20


def test_what_saves_nothing_is_sent_as_it_is() -> None:
    """A codebook for a handful of values would be larger than they are, and the receiver hold more than the state."""
    tensors = [torch.zeros(3), torch.zeros(100_000), torch.zeros(5, dtype=torch.float16)]
    codecs = [Quantile8BitQuantization(), Quantile8BitQuantization(), Float16Compression()]
    assert [spec.codec.name for spec in describe(tensors, codecs)] == ["none", codecs[1].name, "none"]


def test_an_uncompressed_tensor_is_received_in_its_final_memory() -> None:
    """No second copy of it is ever made."""
    manifest, data = encoded([torch.arange(600, dtype=torch.float32)], [NoCompression()])
    assembly = Assembly(manifest)
    fill(assembly, manifest, data)
    place = assembly.buffers(0)[0]
    [tensor] = assembly.finish()
    tensor[0] = -1.0
    assert bytes(place[:4]) == bytes(view_bytes(torch.tensor([-1.0])))


def test_memory_is_taken_when_bytes_arrive() -> None:
    """A donor that announces much and sends little costs little."""
    specs = tuple(StateTensorSpec((1 << 20,), torch.uint8, NoCompression()) for _ in range(1000))
    manifest = Manifest(b"s" * 16, 0, None, specs, 1 << 20, (b"h" * 32,) * 1000)
    assembly = Assembly(manifest)
    assert not assembly._buffers
    assembly.buffers(3)
    assert sum(data.nbytes for _, data in assembly._buffers.values()) == 1 << 20


def test_memory_that_this_machine_does_not_have_is_no_fault_of_the_donor() -> None:
    """The error says how much is needed."""
    spec = StateTensorSpec((1 << 60,), torch.uint8, NoCompression())
    assembly = Assembly(Manifest(b"s" * 16, 0, None, (spec,), 1 << 20, ()))
    with pytest.raises(MemoryError, match=f"this machine has no memory for a tensor of {1 << 60} bytes"):
        assembly.buffers(0)


def test_a_changed_byte_is_seen() -> None:
    """One wrong bit in one piece of a chunk spoils its hash."""
    manifest, data = encoded([torch.zeros(100), torch.zeros(100)], [NoCompression()] * 2)
    assembly = Assembly(manifest)
    fill(assembly, manifest, data)
    assembly.buffers(0)[0][407] ^= 1
    assert digest_of(assembly.buffers(0)) != manifest.hashes[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression()], ids=repr)
def test_values_that_are_not_finite_are_refused_unless_told_of(
    value: float, codec: NoCompression | Float16Compression
) -> None:
    """Checked before the tensors are handed over; the tensor is named. NaN is never meant."""
    bad = torch.zeros(3000)
    bad[2999] = value
    manifest, data = encoded([torch.zeros(2), bad], [codec] * 2)
    for infinite, taken in (((), False), ((0,), False), ((1,), not math.isnan(value))):
        told = replace(manifest, infinite=infinite)
        assembly = Assembly(told)
        fill(assembly, told, data)
        if taken:
            assert torch.equal(assembly.finish()[1], bad)
        else:
            with pytest.raises(PeerProtocolError, match="tensor 1 of its state holds"):
                assembly.finish()


def test_integers_need_not_be_looked_at() -> None:
    """A state of counters and masks passes the look at the values."""
    tensors = [torch.tensor([1, 2]), torch.tensor([True, False])]
    manifest, data = encoded(tensors, [NoCompression()] * 2)
    assembly = Assembly(manifest)
    fill(assembly, manifest, data)
    assert [t.tolist() for t in assembly.finish()] == [[1, 2], [True, False]]
