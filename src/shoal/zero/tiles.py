"""Tiles: the coordinates that name all sharded values.

A tile is a range of a parameter's values in their flat order (`layout`), at most `tile_numel` of them. Where the cuts
are depends on the model alone, not on how many ranks there are: so ranks of different groups can speak of the same
tile, and one tile's values and optimizer state can be kept, moved and versioned on their own. The owner of a tile is
looked up in the `Plan`, and computed nowhere else.

Buckets are values of parameters that lie side by side, and are reduced and gathered together.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from shoal.errors import LocalError
from shoal.zero.collectives import Run
from shoal.zero.parameters import flat as flatten
from shoal.zero.parameters import order_of, shaped

__all__ = [
    "ALIGNMENT",
    "BUCKET_BYTES",
    "Bucket",
    "Plan",
    "Tile",
    "assign",
    "assign_whole",
    "buckets_of",
    "cut",
    "tile_numel",
]

BUCKET_BYTES = 25 << 20
RUN_NUMEL = 1 << 19
"""A run has so many values at most, unless one tile is larger: a sum of it stays in the cache, and any place will do
to receive one."""
ALIGNMENT = 64
"""Where torch's memory on processors begins, in bytes: products of matrices that begin elsewhere are rounded
otherwise."""
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
        """The number of values."""
        return self.stop - self.start

    def of(self, values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Its values in a tensor that has the shape of its parameter."""
        return flatten(values, order_of(parameter))[self.start : self.stop]

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
    return Plan(tuple(tiles), tuple(owners), ranks)


def assign_whole(buckets: Iterable[Sequence[Tile]], ranks: int) -> Plan:
    """Give whole parameters to ranks, the largest first, each to the rank that has least.

    So no rank has more than its share and (1 - 1 / ranks) of the largest parameter. Small neighbours in a bucket go to
    one rank, as one piece: together they are no larger than a tile of a parameter that is cut (`tile_numel`).

    Args:
        buckets: tiles that are sent together, each a whole parameter.
        ranks: how many, above 0.
    """
    listed = [list(bucket) for bucket in buckets]
    small = tile_numel(_size(itertools.chain(*listed)))
    lots: list[list[Tile]] = []
    for bucket in listed:
        lots.append([])
        for tile in bucket:
            if lots[-1] and _size(lots[-1]) + tile.numel > small:
                lots.append([])
            lots[-1].append(tile)
    load, owners = [0] * ranks, dict[Tile, int]()
    for lot in sorted(lots, key=_size, reverse=True):
        owner = load.index(min(load))
        load[owner] += _size(lot)
        owners.update(dict.fromkeys(lot, owner))
    tiles = tuple(itertools.chain(*listed))
    return Plan(tiles, tuple(owners[tile] for tile in tiles), ranks)


def _size(tiles: Iterable[Tile]) -> int:
    return sum(tile.numel for tile in tiles)


# ------------------------------------------------------------------------------------------------------------ buckets


class Bucket:
    """Some parameters or a part of a large one, and their gradients on the way to the owners.

    Args:
        parameters: by name, all of one dtype and device.
        flat: their values, one after another, or with gaps; of a large parameter a part.
        offsets: where in `flat` each parameter begins; below 0 if that is in a bucket before this one.
        tile: the largest size of a tile.

    Attributes:
        tiles: the tiles that lie in `flat`, in its order.
        runs: the tiles of each owner; neighbouring tiles of one owner, with no gap between them, are one run while
            that has at most `RUN_NUMEL` values.
        gradients: stage 1: laid out as `flat`, where this rank's gradients stay; None until there are some.
        local: laid out as `flat`, 16-bit values in float32: sums of this rank that are not reduced yet; None while
            there are none.
        filled: names of the parameters that have a sum in `local`; in the places of others anything may be.
        missing: names of the parameters that have no gradient of the present pass yet.
        sent: whether it was, in the present pass.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], flat: torch.Tensor, offsets: Mapping[str, int], tile: int
    ) -> None:
        self.parameters, self.flat, self._offsets = dict(parameters), flat, dict(offsets)
        places = {name: self._range(name) for name in parameters}
        every = cut({name: each.numel() for name, each in parameters.items()}, tile)
        self.tiles = [each for each in every if places[each.name][0] <= each.start < places[each.name][1]]
        self.runs: list[tuple[int, list[Tile]]] = []
        self.gradients: torch.Tensor | None = None
        self.local: torch.Tensor | None = None
        self.filled: set[str] = set()
        self.missing, self.sent = set(parameters), False

    def share_out(self, plan: Plan) -> None:
        """Look up the owner of each tile."""
        self.runs, end, numel = [], -1, 0
        for tile in self.tiles:
            start, numel = self._offsets[tile.name] + tile.start, numel + tile.numel
            if start != end or self.runs[-1][0] != plan.owner(tile) or numel > RUN_NUMEL:
                self.runs.append((plan.owner(tile), []))
                numel = tile.numel
            self.runs[-1][1].append(tile)
            end = start + tile.numel

    def _range(self, name: str) -> tuple[int, int]:
        """Which of a parameter's values are here."""
        offset = self._offsets[name]
        return max(-offset, 0), min(self.parameters[name].numel(), self.flat.numel() - offset)

    def place(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's place in a tensor that is laid out as `flat`, one-dimensional."""
        start, stop = self._range(name)
        return flat[self._offsets[name] + start : self._offsets[name] + stop]

    def add(self, flat: torch.Tensor, name: str, gradient: torch.Tensor | None) -> None:
        """Add a gradient to the parameter's sum in `flat`, if it is one of `filled`, or begin one.

        Args:
            flat: a tensor that is laid out as `flat`.
            name: of the parameter.
            gradient: has the parameter's shape; None for zeros.
        """
        place = self.place(flat, name)
        if gradient is None:
            if name not in self.filled:
                place.zero_()
        elif name in self.filled:
            place.add_(self.values(gradient, name))
        else:
            place.copy_(self.values(gradient, name))
        self.filled.add(name)

    def forget(self) -> None:
        """There are no sums that are not reduced yet."""
        self.local = None
        self.filled.clear()

    def values(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The values that belong there of a tensor with the parameter's shape."""
        start, stop = self._range(name)
        return flatten(tensor, order_of(self.parameters[name]))[start:stop]

    def part(self, flat: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's part of a tensor that is laid out as `flat`."""
        return flat[self._offsets[tile.name] + tile.start : self._offsets[tile.name] + tile.stop]

    def pieces(self, flat: torch.Tensor) -> list[Run]:
        """The runs of a tensor that is laid out as `flat`."""

        def between(first: Tile, last: Tile) -> torch.Tensor:
            return flat[self._offsets[first.name] + first.start : self._offsets[last.name] + last.stop]

        return [Run(owner, between(tiles[0], tiles[-1])) for owner, tiles in self.runs]


class Homes:
    """Where the values of parameters are, in the memory of buckets, for as long as the model is carried.

    A program may give a parameter other memory (``parameter.data = values``, `vector_to_parameters`): its values count.

    Args:
        parameters: by name; they are there now.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._homes = {name: each.detach() for name, each in parameters.items()}
        self._tensors = {name: each._cdata for name, each in parameters.items()}  # noqa: SLF001 (that of no other one)

    def check(self) -> None:
        """Raise `LocalError` if a parameter was converted, or moved to another device, or tied to another one."""
        self._moved()

    def take_back(self) -> None:
        """Put parameters back, with the values that they have. Raises as `check` does."""
        for name in self._moved():
            self._homes[name].copy_(self._parameters[name].detach())
            self._parameters[name].data = self._homes[name]

    def _moved(self) -> list[str]:
        found = [
            name
            for name, now in self._parameters.items()
            if now.data_ptr() != self._homes[name].data_ptr() or now._cdata != self._tensors[name]  # noqa: SLF001
        ]
        if not found:
            return []
        taken = {home.untyped_storage().data_ptr() for home in self._homes.values()}
        for name in found:
            home, now = self._homes[name], self._parameters[name]
            if now._cdata != self._tensors[name]:  # noqa: SLF001 (as above)
                raise LocalError(
                    f"{name} was swapped with another tensor after the model was sharded (torch.utils.swap_tensors, or "
                    "torch.__future__.set_swap_module_params_on_conversion), and would not be trained: write values "
                    "into it with copy_(), or do it before shard()"
                )
            alike = (now.shape, now.dtype, now.device) == (home.shape, home.dtype, home.device)
            others = [other for other in found if other != name]
            tied = now.untyped_storage().data_ptr() in taken or any(
                self._parameters[other].data_ptr() == now.data_ptr() for other in others
            )
            if not alike or tied:
                raise LocalError(
                    f"{name} was moved, converted or tied to another parameter after the model was sharded: do that "
                    "before shard(), or write values into it (with copy_())"
                )
        return found


def buckets_of(parameters: Mapping[str, torch.nn.Parameter], tile: int, alignment: int = 1) -> list[Bucket]:
    """Move the values of parameters into common memory, and divide it into buckets.

    Args:
        parameters: by name; none is empty. Those of a bucket follow each other backwards, as their gradients come.
        tile: the largest size of a tile. A parameter that is larger than a bucket is divided between tiles.
        alignment: each parameter begins at a multiple of so many bytes.
    """
    found = []
    for group in _grouped(parameters):
        first, offsets, end = next(iter(group.values())), dict[str, int](), 0
        for name, parameter in group.items():
            offsets[name] = end + -end % max(alignment // first.itemsize, 1)
            end = offsets[name] + parameter.numel()
        flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        for name, parameter in group.items():
            values = flat[offsets[name] : offsets[name] + parameter.numel()]
            values.copy_(flatten(parameter.detach(), order_of(parameter)))
            parameter.data = shaped(values, parameter.shape, order_of(parameter))
        found.append(Bucket(group, flat, offsets, tile))
    return found


def _grouped(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[dict[str, torch.nn.Parameter]]:
    """Parameters side by side: of one dtype and device, together no larger than a bucket, if there are several."""
    group: dict[str, torch.nn.Parameter] = {}
    size, kind = 0, None
    for name, parameter in reversed(list(parameters.items())):
        if group and (kind != (parameter.dtype, parameter.device) or size + parameter.nbytes > BUCKET_BYTES):
            yield group
            group, size = {}, 0
        kind = (parameter.dtype, parameter.device)
        group[name] = parameter
        size += parameter.nbytes
    if group:
        yield group
