"""Buckets: parameters whose values lie in one flat tensor, and are reduced and gathered together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from shoal.zero.collectives import Run
from shoal.zero.tiles import Plan, Tile

__all__ = ["BUCKET_BYTES", "Bucket", "grouped"]

BUCKET_BYTES = 25 << 20


class Bucket:
    """Some parameters, and their gradients on the way to the owners.

    Args:
        parameters: by name, all of one dtype and device. Their values move into a flat tensor.
        plan: who owns which tile.

    Attributes:
        parameters: see above.
        flat: their values.
        runs: who owns which tiles; those of one owner side by side are one run.
        gradients: laid out as `flat`, this rank's own; None while there are none.
        missing: names of the parameters that have no gradient of the present pass yet.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], plan: Plan) -> None:
        self.parameters = dict(parameters)
        self.flat = torch.cat([each.detach().reshape(-1) for each in parameters.values()])
        self.gradients: torch.Tensor | None = None
        self.missing = set(parameters)
        self._offsets: dict[str, int] = {}
        offset = 0
        for name, parameter in parameters.items():
            self._offsets[name] = offset
            offset += parameter.numel()
            parameter.data = self.whole(self.flat, name)
        self.runs: list[tuple[int, list[Tile]]] = []
        for tile in (tile for name in parameters for tile in plan.of(name)):
            if not self.runs or self.runs[-1][0] != plan.owner(tile):
                self.runs.append((plan.owner(tile), []))
            self.runs[-1][1].append(tile)

    def whole(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's part of a tensor that is laid out as `flat`, in the parameter's shape."""
        parameter, offset = self.parameters[name], self._offsets[name]
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    def part(self, flat: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's part of it, one-dimensional."""
        return flat[self._offsets[tile.name] + tile.start : self._offsets[tile.name] + tile.stop]

    def pieces(self, flat: torch.Tensor) -> list[Run]:
        """The runs of it."""

        def cut(first: Tile, last: Tile) -> torch.Tensor:
            return flat[self._offsets[first.name] + first.start : self._offsets[last.name] + last.stop]

        return [Run(owner, cut(tiles[0], tiles[-1])) for owner, tiles in self.runs]

    def collect(self, name: str) -> torch.Tensor:
        """Take a parameter's gradient into `gradients`, zeros where there is none; returns its place there."""
        assert self.gradients is not None
        place, gradient = self.whole(self.gradients, name), self.parameters[name].grad
        if gradient is None:
            place.zero_()
        elif gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
        self.missing.discard(name)
        return place

    def moved(self) -> str | None:
        """The name of a parameter that is no longer where it was, if there is one."""
        for name, parameter in self.parameters.items():
            if parameter.numel() and parameter.data_ptr() != self.whole(self.flat, name).data_ptr():
                return name
        return None


def grouped(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[dict[str, torch.nn.Parameter]]:
    """Parameters for one bucket each: backwards, as their gradients come; of one dtype and device."""
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
