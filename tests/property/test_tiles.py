"""For any model and any number of ranks: tiles cover it once, and are shared out equally."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.layout import Tile, assign, assign_whole, cut, tile_numel

models = st.dictionaries(st.text("abc.", min_size=1, max_size=6), st.integers(0, 5_000), min_size=1, max_size=12)
sizes = st.integers(1, 700)
ranks = st.integers(1, 9)


@given(models, sizes)
def test_tiles_cover_every_parameter_once(model: dict[str, int], size: int) -> None:
    """Without a gap, in order, none larger than asked for, none over a border."""
    tiles = cut(model, size)
    assert [tile for name in model for tile in tiles if tile.name == name] == tiles
    for name, numel in model.items():
        own = [tile for tile in tiles if tile.name == name]
        assert sum(tile.numel for tile in own) == numel
        assert all(0 < tile.numel <= size for tile in own)
        assert all(one.stop == other.start for one, other in pairwise(own))


def buckets(tiles: list[Tile], count: int) -> list[list[Tile]]:
    """Tiles that are sent together."""
    return [tiles[number::count] for number in range(count)]


@given(models, sizes, ranks, st.integers(1, 5))
def test_shares_are_equal_to_a_tile(model: dict[str, int], size: int, count: int, parts: int) -> None:
    """No rank is further from its share than the largest tile; in a bucket each rank's tiles are side by side."""
    tiles = cut(model, size)
    grouped = buckets(tiles, parts)
    tiling = assign(grouped, count)
    assert sorted(tiling.tiles) == sorted(tiles)
    share = sum(tile.numel for tile in tiles) / count
    for rank in range(count):
        assert abs(sum(tile.numel for tile in tiling.owned(rank)) - share) <= size
    for bucket in grouped:
        owners = [tiling.owner(tile) for tile in bucket]
        assert owners == sorted(owners)


@given(models, ranks, st.integers(1, 5))
def test_whole_parameters_are_shared_out_to_the_largest(model: dict[str, int], count: int, parts: int) -> None:
    """No rank has more than its share and the largest parameter, or a lot of small ones."""
    tiles = cut(model, max(*model.values(), 1))
    tiling = assign_whole(buckets(tiles, parts), count)
    assert sorted(tiling.tiles) == sorted(tiles)
    assert all(len(tiling.of(name)) == (numel > 0) for name, numel in model.items())
    most = max([tile_numel(sum(model.values())), *(tile.numel for tile in tiles)])
    for rank in range(count):
        own = sum(tile.numel for tile in tiling.owned(rank))
        assert own <= sum(model.values()) / count + most * (1 - 1 / count)


@given(models, ranks, ranks)
def test_cuts_do_not_depend_on_the_ranks(model: dict[str, int], one: int, other: int) -> None:
    """Two groups mean the same by a tile; who owns it may differ."""
    tiles = cut(model, tile_numel(sum(model.values())))
    first, second = (assign([tiles], count) for count in (one, other))
    assert first.tiles == second.tiles
    for name, numel in model.items():
        if numel:
            assert list(first.of(name)) == [tile for tile in tiles if tile.name == name]


@given(st.integers(0, 10**12))
def test_tiles_are_small_and_not_too_many(numel: int) -> None:
    """A power of two; a 500th of the model or less, but for small ones, and never more than half a MiB of float32."""
    size = tile_numel(numel)
    assert size & (size - 1) == 0
    assert 64 <= size <= 1 << 17
    assert size == 64 or size * 256 <= numel
    assert size == 1 << 17 or size * 512 >= numel
