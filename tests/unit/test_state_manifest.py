"""The layout of a state, and what is believed of a manifest from the network."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import Float16Compression, NoCompression, TopKCompression
from shoal.errors import ConfigError, PeerProtocolError
from shoal.protocol.wire import ManifestReply, decode, encode
from shoal.state.wire.manifest import (
    CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_TENSORS,
    Manifest,
    StateTensorSpec,
    chunk_size,
    describe,
    matching,
    read_manifest,
)

LIMIT = 1 << 20


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> StateTensorSpec:
    """An uncompressed tensor."""
    return StateTensorSpec(shape, dtype, NoCompression())


def manifest(*specs: StateTensorSpec, chunk_bytes: int = 1024, metadata: Any = None, epoch: int = 0) -> Manifest:
    """A manifest with some hashes."""
    total = sum(s.encoded_bytes for s in specs)
    hashes = tuple(hashlib.sha256(bytes([i % 256])).digest() for i in range(-(-total // chunk_bytes)))
    return Manifest(b"s" * 16, epoch, metadata, specs, chunk_bytes, hashes)


def packed(*kinds: int) -> bytes:
    """The kinds of tensors, as they are sent."""
    return zlib.compress(b"".join(kind.to_bytes(4, "little") for kind in kinds))


def reply(**changes: Any) -> ManifestReply:
    """A good manifest message of one float32[300], changed."""
    return msgspec.structs.replace(manifest(spec(300)).to_message(), **changes)


def test_a_manifest_goes_over_the_wire_unchanged() -> None:
    """What the receiver reads is what the donor described."""
    lossy = StateTensorSpec((2, 3), torch.float64, Float16Compression())
    metadata = {"epoch": 3, "lr": [0.5, None, True], "b": b"\x00", "name": "x"}
    sent = manifest(spec(300), spec(), spec(0, 5), lossy, spec(7, dtype=torch.bool), metadata=metadata, epoch=3)
    sent = replace(sent, infinite=(0, 3))
    message = decode(encode(sent.to_message()), ManifestReply)
    assert read_manifest(message, max_state_bytes=LIMIT) == sent


def test_a_state_without_tensors_has_no_chunks() -> None:
    """Metadata alone is a state too."""
    empty = read_manifest(manifest(metadata=[1]).to_message(), max_state_bytes=0)
    assert (empty.total_bytes, empty.hashes, empty.metadata) == (0, (), [1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kinds": [([300], "float32", "none", 1201)]}, "should take 1200 bytes"),
        ({"kinds": [([301], "float32", "none", 1200)]}, "should take 1204 bytes"),
        ({"kinds": [([-300], "float32", "none", 1200)]}, "shape"),
        ({"kinds": [([1] * 33, "float32", "none", 4)]}, "shape"),
        ({"kinds": [([0, 1 << 62, 1 << 62], "float32", "none", 0)]}, "too many elements"),
        ({"kinds": [([300], "float31", "none", 1200)]}, "unknown dtype"),
        ({"kinds": [([300], "float32", "zip", 1200)]}, "unknown codec"),
        ({"kinds": [([300], "int32", "float16", 600)]}, "does not support"),
        ({"kinds": [([300_000], "float32", "none", 1_200_000)]}, "limit is 1048576"),
        ({"kinds": [([300_000], "float64", "float16", 600_000)]}, "limit is 1048576"),
        ({"kinds": []}, "of kind 0, and 0 are described"),
        ({"order": packed()}, "2 hashes for 0 chunks"),
        ({"order": packed(0, 1)}, "of kind 1, and 1 are described"),
        ({"order": b"noise"}, "manifest"),
        ({"order": packed(0)[:-1]}, "not in their form"),
        ({"order": packed(0) + b"x"}, "not in their form"),
        ({"order": zlib.compress(bytes(5))}, "not in their form"),
        ({"order": zlib.compress(bytes(4 * MAX_TENSORS + 4))}, f"more than {MAX_TENSORS} tensors"),
        ({"hashes": []}, "0 hashes for 2 chunks"),
        ({"hashes": [b"h" * 32] * 3}, "3 hashes for 2 chunks"),
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"chunk_bytes": -1024}, "chunks of -1024 bytes"),
        ({"chunk_bytes": MAX_CHUNK_BYTES + 1}, "chunks of"),
        ({"infinite": [1]}, "infinities"),
        ({"infinite": [-1]}, "infinities"),
        ({"infinite": [0, 0]}, "infinities"),
        ({"kinds": [([150], "int64", "none", 1200)], "infinite": [0]}, "infinities"),
        ({"metadata": b""}, "manifest"),
        ({"metadata": b"\xc1"}, "manifest"),
        ({"metadata": b"\xa1\xff"}, "not UTF-8"),
        ({"metadata": b"\x91" * 100_000}, "manifest"),
        ({"metadata": b"\xdd\xff\xff\xff\xff\x00"}, "manifest"),
        ({"metadata": msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x"))}, "a MessagePack extension"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Each contradiction, and each limit, is named; nothing else than `PeerProtocolError` is raised."""
    with pytest.raises(PeerProtocolError, match=reason) as caught:
        read_manifest(reply(**changes), max_state_bytes=LIMIT)
    assert len(str(caught.value)) < 500


def test_a_little_that_becomes_much_is_refused() -> None:
    """A codec that keeps one value of thousands may be for gradients; as a state it would take memory for nothing."""
    codec = TopKCompression(1e-4)
    for numel, taken in ((1 << 20, True), (1 << 28, False)):
        large = StateTensorSpec((numel,), torch.float32, codec)
        chunks = -(-large.encoded_bytes // CHUNK_BYTES)
        entry = ([numel], "float32", codec.name, large.encoded_bytes)
        sent = reply(kinds=[entry], hashes=[b"h" * 32] * chunks, chunk_bytes=CHUNK_BYTES)
        if taken:
            assert read_manifest(sent, max_state_bytes=64 << 30).tensors == (large,)
        else:
            with pytest.raises(PeerProtocolError, match=f"{large.encoded_bytes} bytes that become {4 * numel}"):
                read_manifest(sent, max_state_bytes=64 << 30)


@given(st.lists(st.tuples(st.lists(st.integers(), max_size=4), st.text(), st.text(), st.integers()), max_size=3))
def test_made_up_tensors_are_refused_and_nothing_worse(tensors: list[tuple[list[int], str, str, int]]) -> None:
    """Any list that fits the message type is either consistent or a `PeerProtocolError`."""
    try:
        read = read_manifest(reply(kinds=tensors, order=packed(*range(len(tensors)))), max_state_bytes=LIMIT)
    except PeerProtocolError:
        return
    assert read.total_bytes == sum(nbytes for *_, nbytes in tensors)


@given(st.lists(st.integers(0, 700), max_size=8), st.integers(1, 300))
def test_chunks_cover_the_state_exactly_once(sizes: list[int], chunk_bytes: int) -> None:
    """The pieces of all chunks, in order, are all bytes of all tensors."""
    whole = Manifest(b"", 0, None, tuple(spec(n, dtype=torch.uint8) for n in sizes), chunk_bytes, ())
    covered: list[tuple[int, int]] = []
    for chunk in range(-(-whole.total_bytes // chunk_bytes)):
        pieces = list(whole.pieces(chunk, whole.offsets))
        assert all(stop > start for _, start, stop in pieces)
        start, stop = whole.chunk_range(chunk)
        assert sum(stop - start for _, start, stop in pieces) == stop - start <= chunk_bytes
        covered += [(tensor, byte) for tensor, first, end in pieces for byte in range(first, end)]
    assert covered == [(tensor, byte) for tensor, size in enumerate(sizes) for byte in range(size)]


def test_chunk_size_follows_from_the_state_size() -> None:
    """1 MiB until there would be too many hashes for a message, then doubled."""
    assert chunk_size(0) == chunk_size(CHUNK_BYTES * MAX_CHUNKS) == CHUNK_BYTES
    assert chunk_size(CHUNK_BYTES * MAX_CHUNKS + 1) == 2 * CHUNK_BYTES
    assert chunk_size(MAX_CHUNK_BYTES * MAX_CHUNKS) == MAX_CHUNK_BYTES
    with pytest.raises(ConfigError, match="limit"):
        chunk_size(MAX_CHUNK_BYTES * MAX_CHUNKS + 1)


def test_the_largest_state_fits_into_a_message() -> None:
    """4096 hashes beside a million tensors of a thousand kinds stay far under the 1 MiB that a message may have."""
    hashes = [b"\xff" * 32] * MAX_CHUNKS
    kinds = [([1024, 1024, 16], "bfloat16", "none", 1 << 25)] * 1000
    order = packed(*range(1000), *([1, 2, 2, 3] * 250_000))
    assert len(encode(reply(hashes=hashes, kinds=kinds, order=order))) < 200_000


def test_a_receiver_takes_no_more_tensors_than_it_says() -> None:
    """A kilobyte that becomes a million tensors takes no memory: nothing beyond the limit is unpacked."""
    sent = manifest(*[spec(0)] * 1000, spec(300)).to_message()
    assert len(read_manifest(sent, max_state_bytes=LIMIT, max_tensors=1001).tensors) == 1001
    with pytest.raises(PeerProtocolError, match="more than 1000 tensors"):
        read_manifest(sent, max_state_bytes=LIMIT, max_tensors=1000)


@pytest.mark.parametrize("metadata", [torch.zeros(1), {1: object()}, {"a": {torch.zeros(1)}}, 1 << 70])
def test_metadata_that_is_not_plain_is_refused_at_the_donor(metadata: Any) -> None:
    """No tensors, no objects: the donor learns it, not the receiver."""
    with pytest.raises(ConfigError, match="plain"):
        manifest(metadata=metadata).to_message()


def test_metadata_over_a_mebibyte_is_refused_at_the_donor() -> None:
    """Large values belong into tensors."""
    with pytest.raises(ConfigError, match="put large values into tensors"):
        manifest(metadata=b"x" * (1 << 20)).to_message()


def test_a_state_of_too_many_kinds_is_refused_at_the_donor() -> None:
    """Its receivers would take the donor for a liar."""
    specs = describe([torch.zeros(0, number) for number in range(8193)], None)
    with pytest.raises(ConfigError, match="8193 kinds"):
        manifest(*specs).to_message()


def test_describe_checks_codecs_against_tensors() -> None:
    """Too few codecs, or one that does not fit, is the caller's error and named."""
    tensors = [torch.zeros(2), torch.zeros((), dtype=torch.int64)]
    assert describe(tensors, None) == (spec(2), spec(dtype=torch.int64))
    with pytest.raises(ConfigError, match="as many codecs"):
        describe(tensors, [NoCompression()])
    with pytest.raises(ConfigError, match="tensor 1"):
        describe(tensors, [Float16Compression()] * 2)
    with pytest.raises(ConfigError, match="complex64"):
        describe([torch.zeros(1, dtype=torch.complex64)], None)


def test_layouts_are_the_same_only_if_every_byte_means_the_same() -> None:
    """Shape, dtype, codec and chunk size all count; epoch, metadata and hashes do not."""
    base = manifest(spec(300))
    assert base.same_layout(manifest(spec(300), metadata=1, epoch=5))
    for other in (
        manifest(spec(30, 10)),
        manifest(spec(300, dtype=torch.int32)),
        manifest(StateTensorSpec((600,), torch.float32, Float16Compression())),
        manifest(spec(300), chunk_bytes=2048),
        manifest(spec(300), spec(0)),
    ):
        assert not base.same_layout(other)


def test_who_tells_of_other_infinities_has_another_state() -> None:
    """So whoever hides one, or makes one up, does not feed the download of an honest donor's state."""
    base = manifest(spec(300))
    assert base.same_content(manifest(spec(300)))
    assert not base.same_content(replace(base, infinite=(0,)))


def test_matching_names_the_first_difference() -> None:
    """A state of another model, or of an earlier epoch, is not taken, and it is said why."""
    accept = matching([torch.zeros(3), torch.zeros(2, dtype=torch.float16)])
    good = (spec(3), spec(2, dtype=torch.float16))
    assert accept(manifest(*good)) is None
    assert accept(manifest(spec(3), spec(2))) == "tensor 1 of its state is float32[2], ours is float16[2]"
    assert accept(manifest(spec(3))) == "its state has 1 tensors, ours has 2"
