"""Float32 values of 16-bit parameters, each tile's with its owner.

The optimizer steps those of trained parameters; the copies of frozen ones hold their values before narrowing, for
callers that ask for the whole model. If a program writes into a parameter, in whatever way, the new value counts: a
parameter that differs from its rounded copy was written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from shoal.zero.collectives import Collectives, Run
from shoal.zero.parameters import flat, order_of, shaped
from shoal.zero.tiles import Plan, Tile

__all__ = ["Copies"]


class Copies:
    """The copies of some parameters.

    Args:
        parameters: the parameters, of 16 bits, by name.
        plan: the owner of each tile of them.
        own: float32 values of the tiles of this rank, one-dimensional.
        collectives: among the ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: Plan,
        own: Mapping[Tile, torch.Tensor],
        collectives: Collectives,
    ) -> None:
        self._parameters, self._plan, self._collectives = dict(parameters), plan, collectives
        self.own = {tile: values.detach() for tile, values in own.items() if tile.name in parameters}

    def _narrow(self, tile: Tile) -> torch.Tensor:
        parameter = self._parameters[tile.name]
        return flat(parameter.detach(), order_of(parameter))[tile.start : tile.stop]

    def adopt(self) -> None:
        """Take over values that were written into parameters, equally on all ranks."""
        written = [self._narrow(tile) != values.to(self._narrow(tile).dtype) for tile, values in self.own.items()]
        if written and torch.stack([each.any() for each in written]).any():
            for where, (tile, values) in zip(written, self.own.items(), strict=True):
                values.copy_(torch.where(where, self._narrow(tile).to(values.dtype), values))

    def publish(self) -> None:
        """Round this rank's copies into the parameters."""
        for tile, values in self.own.items():
            self._narrow(tile).copy_(values)

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and float32 values of each parameter, gathered one after another. All ranks go through all of it."""
        self.adopt()
        for name, parameter in self._parameters.items():
            found = torch.empty(parameter.numel(), dtype=torch.float32, device=parameter.device)
            ends: list[tuple[int, int, int]] = []  # owner, start, stop
            for tile in self._plan.of(name):
                owner, start = self._plan.owner(tile), tile.start
                if ends and ends[-1][0] == owner:
                    start = ends.pop()[1]
                ends.append((owner, start, tile.stop))
                if tile in self.own:
                    found[tile.start : tile.stop].copy_(self.own[tile])
            self._collectives.all_gather([Run(owner, found[start:stop]) for owner, start, stop in ends]).wait()
            yield name, shaped(found, parameter.shape, order_of(parameter))

    def write(self, name: str, values: torch.Tensor) -> bool:
        """Replace a parameter, the same on all ranks: the copies take the values, the parameter their rounding.

        Returns:
            Whether there are copies of it.
        """
        if name not in self._parameters:
            return False
        self._parameters[name].detach().copy_(values)
        for tile in self._plan.of(name):
            if tile in self.own:
                self.own[tile].copy_(flat(values, order_of(self._parameters[name]))[tile.start : tile.stop])
        return True
