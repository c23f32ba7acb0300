"""For any tensors, shares and tile sizes: the tiles cover the vector exactly once."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.averaging.allreduce.schema import first_difference, schema_of, tiling
from shoal.errors import ConfigError
from shoal.layout import TensorSpec, VectorLayout

_KINDS = [
    ("float32", "none", 4),
    ("float64", "none", 8),
    ("bfloat16", "none", 2),
    ("float32", "float16", 2),
    ("float32", "packed", 0),
]
_BYTES = {(dtype, codec): nbytes for dtype, codec, nbytes in _KINDS}

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
specs = st.lists(
    st.tuples(shapes, st.sampled_from(_KINDS)).map(lambda pair: TensorSpec(pair[0], pair[1][0], pair[1][1])),
    min_size=1,
    max_size=12,
).filter(lambda found: sum(each.numel for each in found) > 0)


def encoded_bytes(dtype: str, codec: str, count: int) -> int:
    """Some have a header, and elements that share a byte."""
    return 5 + (count + 1) // 2 if codec == "packed" else count * _BYTES[dtype, codec]


def make(found: list[TensorSpec]) -> VectorLayout:
    """The layout of these."""
    return VectorLayout(found, encoded_bytes)


@st.composite
def shares_of(draw: st.DrawFn, numel: int) -> list[int]:
    """Sizes of shares that cover `numel`; some are empty."""
    borders = sorted(draw(st.lists(st.integers(0, numel), max_size=8)))
    return [b - a for a, b in pairwise([0, *borders, numel])]


@given(st.data(), specs, st.sampled_from([1024, 1025, 1031, 4096, 65536, 8 << 20]))
def test_tiles_cover_the_vector_exactly_once(data: st.DataObject, found: list[TensorSpec], tile_bytes: int) -> None:
    """In order, within one segment and one share, none empty, none too large, all between two borders nearly equal."""
    layout = make(found)
    shares = data.draw(shares_of(layout.numel))
    made = tiling(layout, shares, tile_bytes)
    assert layout.count(tile_bytes, shares) == len(made.tiles) == len(made.owners)
    of, borders = {segment.name: segment for segment in layout.segments}, [0, *accumulate(shares)]
    end = 0
    for tile, owner in zip(made.tiles, made.owners, strict=True):
        segment = of[tile.name]
        assert 0 < encoded_bytes(segment.dtype, segment.codec, tile.numel) <= tile_bytes
        assert 0 <= tile.start < tile.stop <= segment.numel
        start, stop = segment.start + tile.start, segment.start + tile.stop
        assert start == end
        end = stop
        assert borders[owner] <= start < stop <= borders[owner + 1]
        sizes = segment.sizes(tile)
        assert min(sizes) > 0
        assert sum(sizes) == tile.numel
        inside = set(accumulate(sizes, initial=start))
        assert {each for each in layout.offsets if start < each < stop} <= inside
        assert inside <= {start, stop, *layout.offsets}
    assert end == layout.numel
    for (before, one), (after, other) in pairwise(zip(made.tiles, made.owners, strict=True)):
        if (before.name, one) == (after.name, other):
            assert abs(before.numel - after.numel) <= 1
    assert [sum(tile.numel for tile in made.owned(owner)) for owner in range(len(shares))] == shares


@given(specs)
def test_segments_cover_the_vector_and_never_join(found: list[TensorSpec]) -> None:
    """There is one segment of each kind; every tensor lies in that of its own, in order, and nowhere else."""
    layout = make(found)
    assert layout.numel == sum(spec.numel for spec in found)
    assert [segment.start for segment in layout.segments] == [0, *(segment.stop for segment in layout.segments[:-1])]
    assert layout.segments[-1].stop == layout.numel
    assert len({(segment.dtype, segment.codec) for segment in layout.segments}) == len(layout.segments)
    stops = {(segment.dtype, segment.codec): segment.start for segment in layout.segments}
    for spec, start in zip(found, layout.offsets, strict=True):
        if spec.numel:
            assert start == stops[spec.dtype, spec.codec]
            stops[spec.dtype, spec.codec] += spec.numel
    assert set(stops.values()) == {segment.stop for segment in layout.segments}


@given(specs, specs)
def test_a_difference_is_found_if_there_is_one(mine: list[TensorSpec], theirs: list[TensorSpec]) -> None:
    """None exactly for equal tensors; the sentence names the first position that differs."""
    ours, others = schema_of(mine), schema_of(theirs)
    text = first_difference(ours, others, me="A", other="B")
    assert (text is None) == (mine == theirs)
    first = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    if first is not None:
        assert text is not None
        assert text.startswith(f"tensor {first} has ")
    elif text is not None:
        assert text.startswith(f"there are {len(mine)} tensors at A and {len(theirs)}")


@given(specs, st.lists(st.integers(-50, 5000), max_size=6), st.integers(-(2**70), 2**70))
def test_any_plan_is_cut_or_refused(found: list[TensorSpec], shares: list[int], tile_bytes: int) -> None:
    """What a leader sends: tiles that cover, or a `ConfigError`."""
    layout = make(found)
    if min(shares, default=0) < 0 or sum(shares) != layout.numel or not 1 << 10 <= tile_bytes <= 8 << 20:
        with pytest.raises(ConfigError):
            tiling(layout, shares, tile_bytes)
    else:
        assert sum(tile.numel for tile in tiling(layout, shares, tile_bytes).tiles) == layout.numel
