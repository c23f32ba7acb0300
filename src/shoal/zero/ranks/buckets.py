"""Buckets: values of parameters that lie side by side, and are reduced and gathered together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from shoal.errors import LocalError
from shoal.layout import Tile, Tiling, cut, order_of, shaped
from shoal.layout import flat as flatten
from shoal.zero.ranks.collectives import Owned

__all__ = ["ALIGNMENT", "BUCKET_BYTES", "Bucket", "Homes", "buckets_of"]

BUCKET_BYTES = 25 << 20
MESSAGE_NUMEL = 1 << 19
"""A message has so many values at most, unless one tile is larger: a sum of it stays in the cache, and any place will
do to receive one."""
ALIGNMENT = 64
"""Where torch's memory on processors begins, in bytes: products of matrices that begin elsewhere are rounded
otherwise."""


class Bucket:
    """Some parameters, or some tiles of a large one, and their gradients on the way to the owners.

    Args:
        parameters: by name, all of one dtype and device.
        flat: their values, one after another, or with gaps; of a large parameter some tiles.
        offsets: where in `flat` each parameter begins; below 0 if that is in a bucket before this one.
        tile: the largest size of a tile.

    Attributes:
        tiles: the tiles that lie in `flat`, in its order.
        messages: the tiles of each owner that are sent as one: neighbours with no gap between them, of at most
            `MESSAGE_NUMEL` values.
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
        self.messages: list[tuple[int, list[Tile]]] = []
        self.gradients: torch.Tensor | None = None
        self.local: torch.Tensor | None = None
        self.filled: set[str] = set()
        self.missing, self.sent = set(parameters), False

    def share_out(self, tiling: Tiling) -> None:
        """Look up the owner of each tile."""
        self.messages, end, numel = [], -1, 0
        for tile in self.tiles:
            start, numel = self._offsets[tile.name] + tile.start, numel + tile.numel
            if start != end or self.messages[-1][0] != tiling.owner(tile) or numel > MESSAGE_NUMEL:
                self.messages.append((tiling.owner(tile), []))
                numel = tile.numel
            self.messages[-1][1].append(tile)
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

    def place_of(self, flat: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's place in a tensor that is laid out as `flat`."""
        return flat[self._offsets[tile.name] + tile.start : self._offsets[tile.name] + tile.stop]

    def owned(self, flat: torch.Tensor) -> list[Owned]:
        """The messages, of a tensor that is laid out as `flat`."""

        def between(first: Tile, last: Tile) -> torch.Tensor:
            return flat[self._offsets[first.name] + first.start : self._offsets[last.name] + last.stop]

        return [Owned(owner, between(tiles[0], tiles[-1])) for owner, tiles in self.messages]


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
