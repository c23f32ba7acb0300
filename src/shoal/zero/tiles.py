"""Tiles: the coordinates that name all sharded values.

A tile is a range of a parameter's values in their flat order (`layout`), at most `tile_numel` of them. Where the cuts
are depends on the model alone, not on how many ranks there are: so ranks of different groups can speak of the same
tile, and one tile's values and optimizer state can be kept, moved and versioned on their own. The owner of a tile is
looked up in the `Plan`, and computed nowhere else.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Plan", "Tile", "assign", "cut", "tile_numel"]

_TILES = 512
_LEAST_NUMEL, _MOST_NUMEL = 64, 1 << 17


class Tile(NamedTuple):
    """The values `start` to `stop` of one parameter.

    Attributes:
        name: the name of the parameter, as in `model.state_dict()`.
        start: the first of its flat values.
        stop: behind the last one.
    """

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many values."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Plan:
    """All tiles, and the owner of each.

    Attributes:
        tiles: all, in the order of the parameters; those of a parameter cover it without a gap.
        owners: the rank that owns each.
        ranks: how many ranks there are.
    """

    tiles: tuple[Tile, ...]
    owners: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        assert len(self.tiles) == len(self.owners)
        assert all(0 <= owner < self.ranks for owner in self.owners)

    @cached_property
    def _owner(self) -> dict[Tile, int]:
        return dict(zip(self.tiles, self.owners, strict=True))

    @cached_property
    def _of_parameter(self) -> dict[str, list[Tile]]:
        found: dict[str, list[Tile]] = {}
        for tile in self.tiles:
            found.setdefault(tile.name, []).append(tile)
        return found

    def owner(self, tile: Tile) -> int:
        """The rank that keeps and steps this tile."""
        return self._owner[tile]

    def of(self, name: str) -> Sequence[Tile]:
        """The tiles of one parameter: none if it has no values."""
        return self._of_parameter.get(name, ())

    def owned(self, rank: int) -> list[Tile]:
        """The tiles of one rank."""
        return [tile for tile, owner in zip(self.tiles, self.owners, strict=True) if owner == rank]

    @property
    def schema(self) -> str:
        """A hash of the cuts, whichever rank owns them: equal if tiles mean the same."""
        return hashlib.sha256("\n".join(map(str, self.tiles)).encode()).hexdigest()


def tile_numel(numel: int) -> int:
    """The largest size of a tile in a model of `numel` values: about a 500th of it, a power of two, 64 to 2^17.

    So ranks can be given equal shares to a 500th. Half a MiB of float32 is also what an optimizer on a processor steps
    fastest: it fits into its cache (Adam on 15 million values: 54 ms; with 4 MiB 82 ms, as one tensor 173 ms).
    """
    return min(max(1 << max(numel // _TILES - 1, 0).bit_length(), _LEAST_NUMEL), _MOST_NUMEL)


def cut(numels: Mapping[str, int], numel: int) -> list[Tile]:
    """Tiles of at most `numel` values that cover each parameter.

    Args:
        numels: how many values each parameter has; one without any has no tile.
        numel: the largest size, above 0.
    """
    return [
        Tile(name, start, min(start + numel, size)) for name, size in numels.items() for start in range(0, size, numel)
    ]


def assign(buckets: Iterable[Sequence[Tile]], ranks: int) -> Plan:
    """Give each rank an equal share of each bucket, to a tile, and of all buckets together.

    In a bucket each rank has consecutive tiles, so that it sends one piece to each other rank.

    Args:
        buckets: tiles that are sent together.
        ranks: how many, above 0.
    """
    tiles: list[Tile] = []
    owners: list[int] = []
    load = [0] * ranks
    for bucket in buckets:
        size = sum(tile.numel for tile in bucket)
        share = (sum(load) + size) / ranks
        # The share that each rank lacks is cut off the bucket, one after another; a tile goes to the owner of its
        # middle.
        lacks = [max(share - each, 0.0) for each in load]
        edges = [edge * size / sum(lacks) for edge in accumulate(lacks)] if size else []
        place = 0
        for tile in bucket:
            owner = min(bisect_right(edges, place + tile.numel / 2), ranks - 1)
            place += tile.numel
            load[owner] += tile.numel
            owners.append(owner)
        tiles += bucket
    return Plan(tuple(tiles), tuple(owners), ranks)
