"""Buckets: values of parameters that lie side by side, and are reduced and gathered together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from shoal.zero.collectives import Run
from shoal.zero.parameters import flat as flatten
from shoal.zero.parameters import order_of, shaped
from shoal.zero.tiles import Plan, Tile, cut

__all__ = ["BUCKET_BYTES", "Bucket", "buckets_of"]

BUCKET_BYTES = 25 << 20


class Bucket:
    """Some parameters or a part of a large one, and their gradients on the way to the owners.

    Args:
        parameters: by name, all of one dtype and device.
        flat: their values, one after another; of a large parameter a part.
        offsets: where in `flat` each parameter begins; below 0 if that is in a bucket before this one.
        tile: the largest size of a tile.

    Attributes:
        tiles: the tiles that lie in `flat`, in its order.
        runs: the tiles of each owner; neighbouring tiles of one owner are one run.
        gradients: stage 1: laid out as `flat`, where this rank's gradients stay; None until there are some.
        local: laid out as `flat`, 16-bit values in float32: sums of this rank that are not reduced yet; None while
            there are none.
        missing: names of the parameters that have no gradient of the present pass yet.
        sent: whether it was, in the present pass.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        flat: torch.Tensor,
        offsets: Mapping[str, int],
        tile: int,
    ) -> None:
        self.parameters, self.flat, self._offsets = dict(parameters), flat, dict(offsets)
        places = {name: self._range(name) for name in parameters}
        every = cut({name: each.numel() for name, each in parameters.items()}, tile)
        self.tiles = [each for each in every if places[each.name][0] <= each.start < places[each.name][1]]
        self.runs: list[tuple[int, list[Tile]]] = []
        self.gradients: torch.Tensor | None = None
        self.local: torch.Tensor | None = None
        self.missing, self.sent = set(parameters), False

    def share_out(self, plan: Plan) -> None:
        """Look up the owner of each tile."""
        self.runs = []
        for tile in self.tiles:
            if not self.runs or self.runs[-1][0] != plan.owner(tile):
                self.runs.append((plan.owner(tile), []))
            self.runs[-1][1].append(tile)

    def _range(self, name: str) -> tuple[int, int]:
        """Which of a parameter's values are here."""
        offset = self._offsets[name]
        return max(-offset, 0), min(self.parameters[name].numel(), self.flat.numel() - offset)

    def place(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's place in a tensor that is laid out as `flat`, one-dimensional."""
        start, stop = self._range(name)
        return flat[self._offsets[name] + start : self._offsets[name] + stop]

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

    def moved(self) -> str | None:
        """The name of a parameter that is no longer where it was, if there is one."""
        for name, parameter in self.parameters.items():
            if parameter.data_ptr() != self.flat.data_ptr() + self._offsets[name] * self.flat.itemsize:
                return name
        return None


def buckets_of(parameters: Mapping[str, torch.nn.Parameter], tile: int) -> list[Bucket]:
    """Move the values of parameters into common memory, and divide it into buckets.

    Args:
        parameters: by name; none is empty. Those of a bucket follow each other backwards, as their gradients come.
        tile: the largest size of a tile. A parameter that is larger than a bucket is divided between tiles.
    """
    found = []
    for group in _grouped(parameters):
        flat = torch.cat([flatten(each.detach(), order_of(each)) for each in group.values()])
        offsets, offset = {}, 0
        for name, parameter in group.items():
            offsets[name] = offset
            values = flat[offset : offset + parameter.numel()]
            parameter.data = shaped(values, parameter.shape, order_of(parameter))
            offset += parameter.numel()
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
