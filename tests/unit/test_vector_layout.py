"""The vector, its segments, shares and tiles; schemas and their first difference."""

from __future__ import annotations

import zlib
from functools import partial

import msgspec
import pytest

from shoal.averaging.allreduce.schema import (
    check_tile_bytes,
    first_difference,
    most_members,
    most_tiles,
    schema_of,
    tiling,
)
from shoal.errors import ConfigError
from shoal.layout import Segment, TensorSpec, Tile, Tiling, VectorLayout
from shoal.protocol.wire import MAX_GROUP_SIZE, MAX_TILES, Commit, Held, Report, encode
from shoal.rpc import Limits
from tests.cost import cost_of

_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def encoded_bytes(dtype: str, codec: str, count: int) -> int:
    """As the codecs have it; and one with a header, whose elements share bytes."""
    if codec == "packed":
        return 5 + (count + 1) // 2
    return count * (2 if codec == "float16" else _SIZES[dtype])


def spec(*shape: int, dtype: str = "float32", codec: str = "none") -> TensorSpec:
    """One tensor."""
    return TensorSpec(shape, dtype, codec)


def layout(*specs: TensorSpec) -> VectorLayout:
    """A layout of these."""
    return VectorLayout(specs, encoded_bytes)


# --------------------------------------------------------------------------------------------------------------- layout


def test_tensors_lie_one_after_another() -> None:
    """Offsets count elements; scalars have one, empty tensors none."""
    found = layout(spec(2, 3), spec(), spec(0, 7), spec(4))
    assert found.offsets == (0, 6, 0, 7)
    assert found.numel == 11


def test_tensors_of_one_kind_form_a_segment() -> None:
    """Of one dtype and codec, wherever they are; segments in the order of their first tensors, tensors in their own."""
    found = layout(
        spec(2),
        spec(3),
        spec(0, dtype="bfloat16"),
        spec(5, dtype="float64"),
        spec(5, dtype="float64", codec="float16"),
        spec(1),
        spec(7, dtype="float64"),
    )
    assert found.segments == (
        Segment("float32", "none", 0, [0, 2, 5, 6]),
        Segment("float64", "none", 6, [0, 5, 12]),
        Segment("float64", "float16", 18, [0, 5]),
    )
    assert found.offsets == (0, 2, 0, 6, 18, 5, 11)


def test_a_tile_says_how_much_of_each_tensor_it_holds() -> None:
    """Also of those that begin or end elsewhere; borders of tiles, shares and tensors may coincide."""
    found = layout(spec(100), spec(156), spec(10, codec="float16"), spec(0), spec(512))
    tiles, of = tiling(found, [50, 728], 1024).tiles, {segment.name: segment for segment in found.segments}
    assert [of[tile.name].sizes(tile) for tile in tiles] == [(50,), (50, 156, 33), (239,), (240,), (10,)]
    assert all(sum(of[tile.name].sizes(tile)) == tile.numel for tile in tiles)


def test_nothing_to_average_is_refused() -> None:
    """No tensors, or empty ones only; and more than a message can name."""
    for specs in ([], [spec(0)], [spec(3, 0), spec(0)]):
        with pytest.raises(ConfigError, match="no elements"):
            layout(*specs)
    with pytest.raises(ConfigError, match="262145 tensors, the most is 262144"):
        layout(*[spec()] * 262145)


# ---------------------------------------------------------------------------------------------------------------- tiles


def test_tiles_are_equal_within_shares_and_segments() -> None:
    """Each share is cut where segments change, and into equal tiles of at most `tile_bytes`."""
    found = layout(spec(1000), spec(300, dtype="float64"))
    tiles = (
        *(Tile("float32 none", start, start + 200) for start in (0, 200, 400, 600, 800)),
        *(Tile("float64 none", start, start + 100) for start in (0, 100, 200)),
    )
    assert tiling(found, [600, 0, 700], 1024) == Tiling(tiles, (0, 0, 0, 2, 2, 2, 2, 2))


def test_a_codec_that_halves_bytes_doubles_the_elements_of_a_tile() -> None:
    """The limit is on encoded bytes."""
    plain, coded = layout(spec(4096)), layout(spec(4096, codec="float16"))
    assert len(tiling(plain, [4096], 1024).tiles) == 16
    assert len(tiling(coded, [4096], 1024).tiles) == 8
    assert tiling(plain, [4096], 1024).tiles[0].numel == 256


@pytest.mark.parametrize("shares", [[], [9], [11], [5, 6], [-1, 11], [20, -10]])
def test_shares_that_do_not_cover_the_vector_are_refused(shares: list[int]) -> None:
    """Too short, too long, negative."""
    with pytest.raises(ConfigError, match="cover"):
        tiling(layout(spec(10)), shares, 1024)


@pytest.mark.parametrize("tile_bytes", [-1, 0, 1023, (8 << 20) + 1, 1 << 60])
def test_tile_sizes_out_of_range_are_refused(tile_bytes: int) -> None:
    """Smaller than is sensible, or larger than a receive buffer may be."""
    with pytest.raises(ConfigError, match="part_size_bytes"):
        tiling(layout(spec(10)), [10], tile_bytes)


def test_too_many_tiles_are_refused() -> None:
    """Exactly as many as allowed, and one more."""
    most = MAX_TILES * 256
    assert len(tiling(layout(spec(most)), [most], 1024).tiles) == MAX_TILES
    with pytest.raises(ConfigError, match="larger part_size_bytes than 1024"):
        tiling(layout(spec(most + 1)), [most + 1], 1024)


def test_too_many_tiles_are_foreseen() -> None:
    """Each border between two members may cost one more; and a round may be sent in another codec."""
    most = (MAX_TILES - 7) * 256
    found = layout(spec(most))
    check_tile_bytes(found, 1024, 8)
    assert len(tiling(found, [1] * 7 + [most - 7], 1024).tiles) == MAX_TILES
    with pytest.raises(ConfigError, match=r"part_size_bytes=1024 makes up to 8193 tiles .* in a group of 9: choose"):
        check_tile_bytes(found, 1024, 9)
    half = layout(spec(most, codec="float16"))
    check_tile_bytes(half, 1024, 8)
    with pytest.raises(ConfigError, match="in a group of 9: choose a larger part_size_bytes"):
        check_tile_bytes(half, 1024, 9, ["none"])


def test_many_members_and_tensors_of_two_kinds_in_turn_are_few_tiles() -> None:
    """A tile for each share, and one more where a segment ends within it: 256 members, 2,000 tensors."""
    specs = [spec(7, dtype=("float32", "bfloat16")[i % 2]) for i in range(2000)]
    found = layout(*specs)
    shares = [14000 // 256 + (i < 14000 % 256) for i in range(256)]
    assert 256 <= len(tiling(found, shares, 1 << 20).tiles) <= 257


@pytest.mark.parametrize("members", [2, 256, MAX_GROUP_SIZE])
def test_the_largest_commit_and_report_fit_in_a_message(members: int) -> None:
    """As many tiles as there may be in a group of so many: what decides the round can be sent."""
    held = Held(MAX_TILES - 1, members + 1, b"\xff" * ((members + 7) // 8), 1.5, b"d" * 16)
    tiles = [held] * most_tiles(members)
    assert len(encode(Commit(b"r" * 16, tiles))) < Limits().header_bytes
    assert len(encode(Report(tiles, list(range(members)), 1 << 50))) < Limits().header_bytes


def test_a_vector_of_many_tiles_has_smaller_groups() -> None:
    """The largest group whose tiles fit; none is larger, however few tiles there are."""
    assert most_members(layout(spec(7)), 1024) == MAX_GROUP_SIZE
    most = layout(spec(256 * (MAX_TILES - 255)))
    size = most_members(most, 1024)
    check_tile_bytes(most, 1024, size)
    assert size >= 256
    with pytest.raises(ConfigError, match="larger part_size_bytes"):
        check_tile_bytes(most, 1024, size + 1)


# --------------------------------------------------------------------------------------------------------------- schema


def difference(mine: bytes, theirs: bytes) -> str | None:
    """Between a schema of A and one of B."""
    return first_difference(mine, theirs, me="A", other="B")


def test_equal_schemas_have_no_difference() -> None:
    """Also if the same tensors were compressed another way."""
    specs = (spec(2, 3), spec(), spec(4, dtype="float64"))
    mine = schema_of(specs)
    assert difference(mine, schema_of(specs)) is None
    other = zlib.compress(msgspec.msgpack.encode(specs), 0)
    assert other != mine
    assert difference(mine, other) is None


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ([spec(2), spec(3, 4), spec(5)], "tensor 1 has shape [3] at A and [3, 4] at B"),
        ([spec(2), spec(3, dtype="float64"), spec(6)], "tensor 1 has dtype float32 at A and float64 at B"),
        ([spec(2, codec="float16"), spec(9)], "tensor 0 has codec none at A and float16 at B"),
        ([spec(2), spec(3)], "there are 3 tensors at A and 2 at B"),
        ([spec(2), spec(3), spec(5), spec(5)], "there are 3 tensors at A and 4 at B"),
        ([spec(2), spec(3), spec()], "tensor 2 has shape [5] at A and [] at B"),
    ],
)
def test_the_first_difference_is_named(theirs: list[TensorSpec], named: str) -> None:
    """The first tensor that differs, and in what."""
    mine = schema_of([spec(2), spec(3), spec(5)])
    assert difference(mine, schema_of(theirs)) == named


def test_a_long_difference_is_cut() -> None:
    """A hostile schema does not write our error messages at length."""
    long_name, long_shape = spec(3, codec="x" * 500), spec(*[1] * 1_000)
    for theirs in (long_name, long_shape):
        schema = zlib.compress(msgspec.msgpack.encode((theirs,)))
        text = difference(schema_of([spec(3)]), schema)
        assert text is not None
        assert len(text) < 400


def test_more_than_65536_tensors_could_not_be_averaged() -> None:
    """A mixture of experts may have more; the one that differs is named, however long the schemas are."""
    ours = [spec(3, codec="float16")] * 250_000
    assert difference(schema_of(ours), schema_of([*ours[:-1], spec(4, codec="float16")])) is not None
    assert len(schema_of(ours)) < 1 << 20


def bomb(plain: bytes) -> bytes:
    """Few bytes that unpack to these."""
    return zlib.compress(plain, 9)


@pytest.mark.parametrize("tensors", [1, 3000])
def test_a_schema_of_2_kb_that_unpacks_to_262144_tensors_held_the_loop_for_a_tenth_of_a_second(tensors: int) -> None:
    """All of it was unpacked and read before the first tensors were compared. Now only the one that differs is read."""
    ours = [spec(60_000, codec=f"{number}") for number in range(tensors)]
    mine, most = schema_of(ours), len(msgspec.msgpack.encode(ours))
    assert difference(mine, schema_of([spec(1)])) is not None  # ours is read once
    alike = msgspec.msgpack.encode([*ours, *[spec()] * 262_000])
    for plain in (
        msgspec.msgpack.encode([[[], "f", "n"]] * (1 << 18)),
        b"\xdd\0\4\0\0" + alike[alike.index(b"\x93") :],
        b"\x91\x93\xdd" + (4 * 10**6).to_bytes(4, "big") + b"\1" * (4 * 10**6),
        msgspec.msgpack.encode([[[1] * 32, "f", "n"]] * 110_000),
        msgspec.msgpack.encode([[[1], "f" * (4 * 10**6), "n"]]),
        bytes(40 << 20),
    ):
        cost = cost_of(partial(difference, mine, bomb(plain)))
        assert cost.lines < 500
        assert cost.peak_bytes < 8 * most + (150 << 10)


@pytest.mark.parametrize("tensors", [1, 20, 70_000])
def test_what_follows_equal_tensors_is_counted(tensors: int) -> None:
    """However the number of tensors is written: in 1, 3 or 5 bytes."""
    ours = [spec(2)] * tensors
    schema = schema_of(ours)
    assert difference(schema, schema_of([*ours, spec(2)])) == f"there are {tensors} tensors at A and {tensors + 1} at B"
    other = schema_of([*ours[:-1], spec(300, dtype="float64")])
    assert difference(schema, other) == f"tensor {tensors - 1} has shape [2] at A and [300] at B"
    with pytest.raises(msgspec.DecodeError, match="behind"):
        difference(schema, zlib.compress(zlib.decompress(schema) + b"x"))


@pytest.mark.parametrize(
    "schema",
    [
        b"",
        b"schema",
        zlib.compress(b""),
        zlib.compress(b"\xc1"),
        zlib.compress(msgspec.msgpack.encode([1, 2])),
        zlib.compress(msgspec.msgpack.encode([[[-1], "float32", "none"]])),
        zlib.compress(msgspec.msgpack.encode([[[1], "float32"]])),
        zlib.compress(b"\x91\x93\x91\x01\xa1\xff\xa1x"),
        zlib.compress(b"\x91" * 100_000),
        zlib.compress(b"\x91\x93\x91\xcd\0\1\xa7float32\xa4none"),
        zlib.compress(msgspec.msgpack.encode([[[1], "float32", "none"]]) * 2),
        zlib.compress(b"\xdd\xff\xff\xff\xff"),
        zlib.compress(bytes(40 << 20), 9),
        zlib.compress(b"\xdd\x00\x04\x00\x01" + b"\x93\x90\xa0\xa0" * 262145, 9),
        zlib.compress(msgspec.msgpack.encode((spec(3),)))[:-6],
    ],
)
def test_what_is_no_schema_is_one_kind_of_error(schema: bytes) -> None:
    """Noise, other values, text that is not UTF-8, nesting without end, bombs."""
    with pytest.raises(msgspec.MsgspecError):
        difference(schema_of([spec(1)]), schema)
