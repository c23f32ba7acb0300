"""Stages 1 and 2: every rank has all parameters, and keeps and steps the optimizer state of its own tiles only.

Gradients are reduced bucket by bucket, while the backward pass goes on (`reduction`). A bucket is some parameters in
the reverse of their order, about `BUCKET_BYTES`; its values lie in one flat tensor, of which the parameters are views,
so that the new values of other ranks are received in place.

Gradients travel in the parameters' dtype. With 16-bit parameters sums are taken and kept in float32, and the optimizer
works on float32 copies of the own tiles (`Copies`). `backward` outside `no_sync` ends with everything reduced. Ranks
must call `backward` equally often; a parameter that got no gradient on a rank counts as zero there.

Source: Rajbhandari et al., "ZeRO" (2020), sections 5.1 and 5.2.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch.autograd.graph import increment_version

from shoal.compression import view_bytes
from shoal.errors import LocalError
from shoal.layout import Order, Tile, Tiling, assign, assign_whole, cut, flat, like, order_of, shaped, tile_numel
from shoal.zero.flat.reduction import Reduction
from shoal.zero.flat.sparse import Tables
from shoal.zero.flat.topk import Fraction
from shoal.zero.memory.offload import Offload
from shoal.zero.parameters import OwnTile, Roster, hooks_of, named_parameters, wide_dtype
from shoal.zero.ranks.buckets import ALIGNMENT, Bucket, Homes, buckets_of
from shoal.zero.ranks.collectives import Collectives, Owned

__all__ = ["FlatEngine"]

LOOKED_AT = 4
"""So many values of each weight are looked at, to see whether a program has changed it."""
_engines: weakref.WeakKeyDictionary[torch.nn.Module, FlatEngine] = weakref.WeakKeyDictionary()
"""The engine of each carried model. An engine lives as long as its model, to which it does not refer."""


class FlatEngine:
    """Stage 1 or 2 for some parameters.

    Args:
        model: the model; only used to check whether it is still the same.
        parameters: the trained ones, by name, in the order of the model. Equal on all ranks.
        stage: 1 or 2.
        collectives: among the ranks.
        offload: where to keep what only the optimizer needs.
        whole: no parameter is cut, for an optimizer that needs whole tensors: a tile is a parameter.
        wide: float32 values of parameters that have been made narrower, frozen ones among them: copies begin with them.
        tables: those of the parameters whose gradients are few rows; None for none.

    Attributes:
        tiling: the owner of each tile.
        own: the tensors that the optimizer steps: each own tile's values, one-dimensional, or with `whole` of the
            parameter's shape and memory format; the parameters' memory itself, or with 16-bit parameters a float32
            copy, or a copy on the CPU.
        tables: the parameters whose gradients are few rows: they are in no bucket, and `own` has the touched rows.
        reduction: the gradients, on their way to these tensors.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        stage: int,
        collectives: Collectives,
        offload: Offload,
        *,
        whole: bool = False,
        wide: Mapping[str, torch.Tensor] | None = None,
        tables: Tables | None = None,
    ) -> None:
        self._collectives, self._parameters, self._roster = collectives, dict(parameters), Roster(model)
        numels, self._whole, self._offload = [each.numel() for each in parameters.values()], whole, offload
        size = max(numels, default=1) if whole else tile_numel(sum(numels))
        self.tables = tables or Tables([], collectives)
        dense = {name: each for name, each in parameters.items() if name not in self.tables.of}
        self._buckets = buckets_of(dense, size, ALIGNMENT if whole else 1)
        self.tiling = (assign_whole if whole else assign)([bucket.tiles for bucket in self._buckets], collectives.ranks)
        for bucket in self._buckets:
            bucket.share_out(self.tiling)
        wide, rank = wide or {}, collectives.rank
        self.own = {tile: self._own(tile, wide) for tile in self.tiling.owned(rank)}
        copied = {name: each for name, each in dense.items() if self._is_copied(each)}
        self._copies = Copies(copied, self.tiling, self.own, collectives)
        others = wide.keys() - parameters.keys()  # of no values, too: those may be trained, and nobody keeps them
        frozen = {name: each for name, each in named_parameters(model) if name in others and each.numel()}
        tiles = cut({name: each.numel() for name, each in frozen.items()}, size)
        tiling = assign([tiles], collectives.ranks)
        kept = {tile: offload.copy(_values(tile, wide[tile.name], frozen[tile.name])) for tile in tiling.owned(rank)}
        self._frozen = Copies(frozen, tiling, kept, collectives)
        self.own.update({table.tile: table.values for table in self.tables.of.values()})
        self._homes = Homes(parameters)
        self.reduction = Reduction(
            parameters, self._buckets, self.own, stage, collectives, offload, self.tables, self._homes
        )
        self._hooks = {name: hooks_of(each) for name, each in parameters.items()}
        self._writes = Writes(dict(named_parameters(model)), self._buckets, self.tables.of)
        _engines[model] = self

    def _is_copied(self, parameter: torch.Tensor) -> bool:
        return self._offload.elsewhere or parameter.dtype != wide_dtype(parameter.dtype)

    def _own(self, tile: Tile, wide: Mapping[str, torch.Tensor]) -> torch.nn.Parameter:
        parameter = self._parameters[tile.name]
        values = _values(tile, wide.get(tile.name, parameter.detach()), parameter)
        if copied := self._is_copied(parameter):
            values = self._offload.copy(values, wide_dtype(values.dtype))
        own = torch.nn.Parameter(like(values, parameter) if self._whole else values)
        if copied:
            self._offload.attach(own, values)
        return own

    def share(self, tile: Tile, value: torch.Tensor) -> torch.Tensor:
        """A tile's share of a statistic of its parameter; a single number is copied."""
        parameter = self._parameters[tile.name]
        if value.shape != parameter.shape:
            return value.clone()
        values = tile.of(flat(value, self.orders()[tile.name])).clone()
        return values if tile.name in self.tables.of else like(values, self.own[tile])

    def hand_over(self, used: Sequence[bool], inner: torch.optim.Optimizer) -> None:
        """The optimizer finds no gradient where no rank had any.

        Args:
            used: for each parameter whether any rank has a gradient of it.
            inner: the optimizer.
        """
        unused = {name for name, has in zip(self._parameters, used, strict=True) if not has}
        for tile, values in self.own.items():
            if tile.name in unused:
                values.grad = None
        for table in self.tables.of.values():
            table.expect(inner)

    def adopt(self, stepped: Iterable[torch.Tensor] | None = None) -> None:
        """Take over values that were written into parameters, for these of `own`; None for all."""
        self._homes.take_back()
        self._copies.adopt(stepped)
        for table in self.tables.among(stepped):
            table.begin()

    def write_out(self, stepped: Iterable[torch.Tensor] | None = None) -> None:
        """Put the values of these of `own` into the parameters; None for all."""
        self._copies.write_out(stepped)
        for table in self.tables.among(stepped):
            table.end()

    def publish(self) -> None:
        """Send the values of the own tiles in the parameters to all ranks, and receive theirs."""
        self.tables.publish()
        for pending in [self._collectives.all_gather(bucket.owned(bucket.flat)) for bucket in self._buckets]:
            pending.wait()
        increment_version(self._parameters.values())  # values computed from the old ones have no gradient any more
        self._writes.forget()

    def own_tiles(self) -> Iterator[OwnTile]:
        """The own tiles."""
        self._homes.take_back()
        self._copies.adopt()
        for tile, values in self.own.items():
            if tile.name in self.tables.of:
                if tile.numel:
                    yield self.tables.of[tile.name].own_tile()
            else:
                yield OwnTile(tile, values, flat(values.data, order_of(values)), self._whole)

    def orders(self) -> Mapping[str, Order]:
        """The order in which tiles count a parameter's values."""
        tables = self.tables.of
        return {
            name: tables[name].order if name in tables else order_of(each) for name, each in self._parameters.items()
        }

    def residuals(self) -> Mapping[str, torch.Tensor]:
        """What this rank has not sent yet of each parameter's gradients, by name; in memory that may be written."""
        tables = self.tables.of.items()
        return {name: table.residual.kept for name, table in tables if table.residual is not None}

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and float32 values of frozen parameters that `shard` narrowed. All ranks go through all of it."""
        return self._frozen.whole()

    def write(self, name: str, values: torch.Tensor) -> bool:
        """Replace a frozen parameter that `shard` narrowed, by float32 values, the same on all ranks.

        Returns:
            Whether it is one.
        """
        return self._frozen.write(name, values)

    def kept(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """All gradients. And the copies of parameters."""
        tables = [each.wide for each in self.tables.of.values() if each.wide is not None]
        return self.reduction.tensors(), [*self._copies.tensors(), *self._frozen.tensors(), *tables]

    @property
    def fraction(self) -> Fraction | None:
        """The share of a gradient that is sent in a step; None if `shard` was given none."""
        return self.tables.fraction

    def trainable(self, _: Collection[str]) -> Collection[str]:
        """Names of the parameters that may be trained: those that required a gradient at `shard`."""
        return self._roster.trained

    def written(self) -> int:
        """A number that is the same on all ranks while programs change weights alike. Raises `LocalError`, as `check`.

        It may differ where a change was taken back: see `writes`.
        """
        self._homes.take_back()
        return self._writes.number()

    def writes(self) -> dict[str, tuple[bool, str]]:
        """Of each weight whether a program has changed it since the last step; and a digest, the same on all ranks."""
        return self._writes.digests()

    def check(self) -> None:
        """Raise `LocalError` if the model has other parameters, or they were moved, or have other hooks."""
        self._roster.check()
        self.reduction.check()
        self._homes.take_back()
        for name, each in self._parameters.items():
            if hooks_of(each) > self._hooks[name]:
                raise LocalError(
                    f"{name} got a hook (register_post_accumulate_grad_hook) after shard(), when its gradient may be "
                    "elsewhere: register it before shard(), and it sees this rank's own gradient"
                )


def _values(tile: Tile, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tile's values in a tensor that has the shape of its parameter."""
    return tile.of(flat(tensor, order_of(parameter)))


class Writes:
    """What programs have written into weights since the last step, where each rank has all of each weight.

    All ranks have the same values after a step. A program may change them then, alike on all ranks: otherwise each tile
    would go on from the values of its owner. Torch counts changes, but not those through ``.data``: so each bucket is
    summed up, too. A few values of each trained weight tell who has changed it; of those in no bucket, of which a step
    reads few rows, there is nothing else.

    Args:
        parameters: all of the model, by name.
        buckets: those of trained ones.
        others: names of trained ones that are in no bucket.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], buckets: Sequence[Bucket], others: Iterable[str]
    ) -> None:
        # Torch counts no changes of frozen ones that were made in inference mode.
        self._parameters = {name: each for name, each in parameters.items() if not each.is_inference()}
        self._names, self._flats = [list(bucket.parameters) for bucket in buckets], [each.flat for each in buckets]
        self._places = [
            (bucket.flat, _spread([bucket.place(bucket.flat, name) for name in bucket.parameters]))
            for bucket in buckets
        ]
        for name in others:
            values = parameters[name].detach().reshape(-1)
            if values.numel():
                self._names.append([name])
                self._places.append((values, _spread([values])))
        self.forget()

    def _look(self) -> list[torch.Tensor]:
        return [values[places].view(torch.uint8) for values, places in self._places]

    def forget(self) -> None:
        """All ranks have the same values now."""
        self._versions = {name: each._version for name, each in self._parameters.items()}  # noqa: SLF001
        self._seen = self._look()

    def _counts(self) -> dict[str, int]:
        return {name: each._version - self._versions[name] for name, each in self._parameters.items()}  # noqa: SLF001

    def number(self) -> int:
        """The same on all ranks, if they have changed weights alike."""
        found = zlib.crc32(repr([*self._counts().values()]).encode())
        for each in [*self._look(), *map(_sum, self._flats)]:
            found = zlib.crc32(view_bytes(each.cpu()), found)
        return found

    def digests(self) -> dict[str, tuple[bool, str]]:
        """Of each weight whether it was changed here, and a checksum of all of its values."""
        changed = {name for name, count in self._counts().items() if count}
        for names, now, before in zip(self._names, self._look(), self._seen, strict=True):
            differ = (now != before).any(1).tolist()
            changed |= {name for name, other in zip(names, differ, strict=True) if other}
        return {name: (name in changed, f"{_checksum(each):x}") for name, each in self._parameters.items()}


def _spread(places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where some values of each of these views of a flat tensor are in it, shape (views, LOOKED_AT), int64."""
    found = [
        [each.storage_offset() + (2 * number + 1) * each.numel() // (2 * LOOKED_AT) for number in range(LOOKED_AT)]
        for each in places
    ]
    return torch.tensor(found, dtype=torch.int64, device=places[0].device)


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """A number that is another one if a single value is, in the time that it takes to read all: a CRC takes longer."""
    raw = flat.view(torch.uint8)
    whole = len(raw) // 8 * 8
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(view_bytes(tensor.detach().cpu().contiguous()))


class Copies:
    """Float32 values of 16-bit parameters, or values on the CPU of those on a device, each tile's with its owner.

    The optimizer steps those of trained parameters; the copies of frozen ones hold their values before narrowing, for
    callers that ask for the whole model. If a program writes into a parameter, in whatever way, the new value counts: a
    parameter that differs from its rounded copy was written to.

    Args:
        parameters: the parameters, by name.
        tiling: the owner of each tile of them.
        own: values of the tiles of this rank.
        collectives: among the ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        tiling: Tiling,
        own: Mapping[Tile, torch.Tensor],
        collectives: Collectives,
    ) -> None:
        self._parameters, self._tiling, self._collectives = dict(parameters), tiling, collectives
        self._own = {tile: values for tile, values in own.items() if tile.name in parameters}
        self._tiles = {values: tile for tile, values in self._own.items()}

    def tensors(self) -> list[torch.Tensor]:
        """All copies."""
        return list(self._own.values())

    def _narrow(self, tile: Tile) -> torch.Tensor:
        parameter = self._parameters[tile.name]
        return _values(tile, parameter.detach(), parameter)

    def _among(self, copies: Iterable[torch.Tensor] | None) -> list[tuple[Tile, torch.Tensor]]:
        if copies is None:
            copies = self._own.values()
        return [(self._tiles[each], flat(each.detach(), order_of(each))) for each in copies if each in self._tiles]

    def adopt(self, copies: Iterable[torch.Tensor] | None = None) -> None:
        """Take over values that were written into parameters, equally on all ranks, for some copies or all (None)."""
        some = [(self._narrow(tile).to(values.device), values) for tile, values in self._among(copies)]
        written = [narrow != values.to(narrow.dtype) for narrow, values in some]
        if written and torch.stack([each.any() for each in written]).any():
            for where, (narrow, values) in zip(written, some, strict=True):
                values.copy_(torch.where(where, narrow.to(values.dtype), values))

    def write_out(self, copies: Iterable[torch.Tensor] | None = None) -> None:
        """Round copies of this rank into the parameters: some, or all (None)."""
        for tile, values in self._among(copies):
            self._narrow(tile).copy_(values)

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and float32 values of each parameter, gathered one after another. All ranks go through all of it."""
        self.adopt()
        for name, parameter in self._parameters.items():
            found = torch.empty(parameter.numel(), dtype=torch.float32, device=parameter.device)
            ends: list[tuple[int, int, int]] = []  # owner, start, stop
            for tile in self._tiling.of(name):
                owner, start = self._tiling.owner(tile), tile.start
                if ends and ends[-1][0] == owner:
                    start = ends.pop()[1]
                ends.append((owner, start, tile.stop))
                if tile in self._own:
                    tile.of(found).copy_(flat(self._own[tile].detach(), order_of(self._own[tile])))
            self._collectives.all_gather([Owned(owner, found[start:stop]) for owner, start, stop in ends]).wait()
            yield name, shaped(found, parameter.shape, order_of(parameter))

    def write(self, name: str, values: torch.Tensor) -> bool:
        """Replace a parameter, the same on all ranks: the copies take the values, the parameter their rounding.

        Returns:
            Whether there are copies of it.
        """
        if name not in self._parameters:
            return False
        self._parameters[name].detach().copy_(values)
        for tile in self._tiling.of(name):
            if tile in self._own:
                own = self._own[tile].detach()
                flat(own, order_of(own)).copy_(_values(tile, values, self._parameters[name]))
        return True
