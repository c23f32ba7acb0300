"""Tiles: named tensors are cut into ranges of their values, and each range has one owner.

A tile is a range of a tensor's values in their flat order (`order`). In ZeRO the tensors are the model's parameters,
and where the cuts are depends on the model alone, not on how many ranks there are: so ranks of different groups can
speak of the same tile, and one tile's values and optimizer state can be kept, moved and versioned on their own. In a
round of averaging the tensors are the segments of the vector, which are cut as its `Begin` says (`vector`).

Who owns a tile is looked up in the `Tiling`, and computed nowhere else.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

__all__ = ["Tile", "Tiling", "assign", "assign_whole", "cut", "divide_whole", "tile_numel"]

_TILES = 512
_LEAST_NUMEL, _MOST_NUMEL = 64, 1 << 17


class Tile(NamedTuple):
    """The values `start` to `stop` of one tensor, in their flat order.

    Attributes:
        name: of the tensor: of a parameter as in `model.state_dict()`, or of a segment of a vector.
        start: the first of its values.
        stop: behind the last one.
    """

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of values."""
        return self.stop - self.start

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Its values among all those of its tensor, which are one-dimensional; a view."""
        return values[self.start : self.stop]


@dataclass(frozen=True)
class Tiling:
    """Tiles, and the owner of each.

    Attributes:
        tiles: in order; those of a tensor cover it without a gap.
        owners: who owns each: the number of a rank, or of a member of a group.
    """

    tiles: tuple[Tile, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tiles) == len(self.owners)

    @cached_property
    def _owner(self) -> dict[Tile, int]:
        return dict(zip(self.tiles, self.owners, strict=True))

    @cached_property
    def _of_tensor(self) -> dict[str, list[Tile]]:
        found: dict[str, list[Tile]] = {}
        for tile in self.tiles:
            found.setdefault(tile.name, []).append(tile)
        return found

    def owner(self, tile: Tile) -> int:
        """Who owns this tile."""
        return self._owner[tile]

    def of(self, name: str) -> Sequence[Tile]:
        """The tiles of one tensor: none if it has no values."""
        return self._of_tensor.get(name, ())

    def owned(self, owner: int) -> list[Tile]:
        """The tiles of one owner."""
        return [tile for tile, found in zip(self.tiles, self.owners, strict=True) if found == owner]


def tile_numel(numel: int) -> int:
    """The largest size of a tile in a model of `numel` values: about a 500th of it, a power of two, 64 to 2^17.

    So ranks can be given equal shares to a 500th. Half a MiB of float32 is also what an optimizer on a processor steps
    fastest: it fits into its cache (Adam on 15 million values: 54 ms; with 4 MiB 82 ms, as one tensor 173 ms).
    """
    return min(max(1 << max(numel // _TILES - 1, 0).bit_length(), _LEAST_NUMEL), _MOST_NUMEL)


def cut(numels: Mapping[str, int], numel: int) -> list[Tile]:
    """Tiles of at most `numel` values that cover each tensor.

    Args:
        numels: how many values each tensor has; one without any has no tile.
        numel: the largest size, above 0.
    """
    return [
        Tile(name, start, min(start + numel, size)) for name, size in numels.items() for start in range(0, size, numel)
    ]


def assign(buckets: Iterable[Sequence[Tile]], ranks: int) -> Tiling:
    """Give each rank an equal share of each bucket, to a tile, and of all buckets together.

    In a bucket each rank has consecutive tiles, so that it is sent them in one message.

    Args:
        buckets: tiles that are sent together.
        ranks: how many, above 0.
    """
    tiles: list[Tile] = []
    owners: list[int] = []
    load = [0] * ranks
    for bucket in buckets:
        size = _size(bucket)
        share = (sum(load) + size) / ranks
        # The share that each rank lacks is cut off the bucket, one after another; a tile goes to the owner of its
        # middle.
        lacks = [max(share - each, 0.0) for each in load]
        edges = [edge * size / sum(lacks) for edge in itertools.accumulate(lacks)] if size else []
        place = 0
        for tile in bucket:
            owner = min(bisect_right(edges, place + tile.numel / 2), ranks - 1)
            place += tile.numel
            load[owner] += tile.numel
            owners.append(owner)
        tiles += bucket
    return Tiling(tuple(tiles), tuple(owners))


def assign_whole(buckets: Iterable[Sequence[Tile]], ranks: int) -> Tiling:
    """Give whole tensors to ranks (`divide_whole`).

    So no rank has more than its share and (1 - 1 / ranks) of the largest tensor. Small neighbours in a bucket go to one
    rank, in one message: together they are no larger than a tile of a tensor that is cut (`tile_numel`).

    Args:
        buckets: tiles that are sent together, each a whole tensor.
        ranks: how many, above 0.
    """
    listed = [list(bucket) for bucket in buckets]
    small = tile_numel(_size(itertools.chain(*listed)))
    together: list[list[Tile]] = []
    for bucket in listed:
        together.append([])
        for tile in bucket:
            if together[-1] and _size(together[-1]) + tile.numel > small:
                together.append([])
            together[-1].append(tile)
    owners = zip(together, divide_whole([*map(_size, together)], ranks), strict=True)
    return Tiling(tuple(itertools.chain(*together)), tuple(owner for neighbours, owner in owners for _ in neighbours))


def divide_whole(sizes: Sequence[int], owners: int) -> list[int]:
    """The owner of each of several things that are not cut: the largest first, each goes to the owner that has least.

    Args:
        sizes: of the things.
        owners: how many owners there are, above 0.
    """
    found, load = [0] * len(sizes), [(0, 0)] * owners  # sizes, and how many things
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = found[index] = load.index(min(load))
        load[owner] = load[owner][0] + sizes[index], load[owner][1] + 1
    return found


def _size(tiles: Iterable[Tile]) -> int:
    return sum(tile.numel for tile in tiles)
