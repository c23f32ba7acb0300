"""Stages 1 and 2: every rank has all parameters, and keeps and steps the optimizer state of its own tiles only.

Gradients are reduced bucket by bucket, while the backward pass goes on. A bucket is some parameters in the reverse of
their order, about `BUCKET_BYTES`; its values lie in one flat tensor, of which the parameters are views, so that the new
values of other ranks are received in place. When all gradients of a bucket are there, each rank sends every tile's
owner what it has for it; the owner adds up in the order of the ranks.

- Stage 1 keeps all gradients, each bucket's in one tensor; those of the own tiles are where the mean goes.
- Stage 2 frees them as soon as they are sent; what it keeps is the mean for each own tile.

Gradients travel in the parameters' dtype. With 16-bit parameters sums are taken and kept in float32, and the optimizer
works on float32 copies of the own tiles. `backward` outside `no_sync` ends with everything reduced. Ranks
must call `backward` equally often; a parameter that got no gradient on a rank counts as zero there.

Invariant: between passes the `.grad` of each own tile is the mean over the ranks of all that was reduced since it was
cleared; what was not reduced is in the buckets' `local`; and in the parameters' own `.grad` there are stand-ins
(`standins`), which tell what the user clears.

Source: Rajbhandari et al., "ZeRO" (2020), sections 5.1 and 5.2.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from shoal.errors import LocalError
from shoal.zero.buckets import Bucket, buckets_of
from shoal.zero.collectives import Collectives, Pending, sum_in_order
from shoal.zero.copies import Copies
from shoal.zero.optimizer import Piece
from shoal.zero.roster import Roster
from shoal.zero.standins import StandIns
from shoal.zero.tiles import Tile, assign, cut, tile_numel

__all__ = ["FlatEngine"]

_IN_FLIGHT = 2
"""So many buckets are sent at once: what is received for them is the only memory that a reduction takes."""


class _Flight(NamedTuple):
    """A bucket that is on its way; `lent` is memory to give back."""

    pending: Pending
    lent: torch.Tensor | None


class FlatEngine:
    """Stage 1 or 2 for some parameters.

    Args:
        model: is only asked whether it is still the same.
        parameters: those that are trained, by name, in the order of the model. Equal on all ranks.
        stage: 1 or 2.
        collectives: among the ranks.
        wide: float32 values of parameters that have been made narrower, frozen ones among them: copies begin with them.

    Attributes:
        plan: who owns which tile.
        own: what the optimizer steps: each own tile's values, one-dimensional; the parameters' memory itself, or with
            16-bit parameters a float32 copy.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        stage: int,
        collectives: Collectives,
        wide: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        assert stage in (1, 2)
        self._stage, self._collectives, self._parameters = stage, collectives, dict(parameters)
        self._roster = Roster(model)
        size = tile_numel(sum(each.numel() for each in parameters.values()))
        self._buckets = buckets_of(parameters, size)
        self.plan = assign([bucket.tiles for bucket in self._buckets], collectives.ranks)
        self._holders: dict[str, list[Bucket]] = {name: [] for name in parameters}
        for bucket in self._buckets:
            bucket.share_out(self.plan)
            for name in bucket.parameters:
                self._holders[name].append(bucket)
        wide, rank = wide or {}, collectives.rank
        self.own = {tile: self._own(tile, wide) for tile in self.plan.owned(rank)}
        narrow = {name: each for name, each in parameters.items() if each.dtype != _wide(each.dtype)}
        self._copies = Copies(narrow, self.plan, self.own, collectives)
        frozen = {name: each for name, each in model.named_parameters() if name in wide.keys() - parameters.keys()}
        tiles = cut({name: each.numel() for name, each in frozen.items()}, size)
        plan = assign([tiles], collectives.ranks)
        kept = {tile: wide[tile.name].reshape(-1)[tile.start : tile.stop].clone() for tile in plan.owned(rank)}
        self._frozen = Copies(frozen, plan, kept, collectives)
        self._stand_ins = StandIns(parameters)
        self._totals: list[torch.Tensor] = []  # to see whether all is finite
        self._arrivals: set[str] = set()  # since they were cleared
        self._syncing = True
        self._task = -1  # autograd's number of the present pass
        self._running = False  # a backward pass that reduces
        self._launched = 0
        self._flying: deque[_Flight] = deque()
        # Tensor hooks would also run where autograd.grad() only asks for a gradient, and adds it to nothing.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters.values()]  # hooks live as long
        for node, (name, parameter) in zip(self._nodes, parameters.items(), strict=True):
            node.register_prehook(partial(_weakly(self._before), name))
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_weakly(self._arrived), name)
            )

    def _own(self, tile: Tile, wide: Mapping[str, torch.Tensor]) -> torch.nn.Parameter:
        values = self._values(tile)
        if tile.name in wide:
            values = wide[tile.name].reshape(-1)[tile.start : tile.stop].clone()
        return torch.nn.Parameter(values.to(_wide(values.dtype)))

    def _values(self, tile: Tile) -> torch.Tensor:
        return self._parameters[tile.name].detach().view(-1)[tile.start : tile.stop]

    # ----------------------------------------------------------------------------------------------- the backward pass

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block keep their gradients to this rank; they are reduced with the next one."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _before(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        """A gradient is about to be added to what is in `.grad`."""
        if gradients[0] is None:
            return  # nothing will be
        if self._task != (task := torch._C._current_graph_task_id()):  # noqa: SLF001 (there is no other way to ask)
            self._task = task
            self._look()
        self._stand_ins.lift(name)

    def _arrived(self, name: str, parameter: torch.Tensor) -> None:
        """A parameter has its gradient of this pass."""
        self._arrivals.add(name)
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        if not self._syncing:
            self._hold(name)
            return
        if self._running and any(bucket.sent for bucket in self._holders[name]):
            self._end()  # it comes once more: that pass broke off, or consists of several
        if not self._running:
            self._check_places()
            self._running, self._launched = True, 0
            for bucket in self._buckets:
                bucket.missing, bucket.sent = set(bucket.parameters), False
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001 (as FSDP2 does)
        for bucket in self._holders[name]:
            bucket.missing.discard(name)
        # In the same order on all ranks, whatever the order in which gradients come.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch()

    def _hold(self, name: str) -> None:
        """Add a gradient to those of this rank that are not reduced yet."""
        gradient = self._stand_ins.loose(name)
        assert gradient is not None
        for bucket in self._holders[name]:
            if bucket.local is None:
                dtype = _wide(bucket.flat.dtype)
                stays = self._stage == 1 and dtype == bucket.flat.dtype and not self._occupied(bucket)
                bucket.local = self._staying(bucket).zero_() if stays else torch.zeros_like(bucket.flat, dtype=dtype)
            bucket.place(bucket.local, name).add_(bucket.values(gradient, name))
        self._stand_ins.put(name)

    def _staying(self, bucket: Bucket) -> torch.Tensor:
        """Stage 1: where a bucket's gradients stay."""
        if bucket.gradients is None:
            bucket.gradients = torch.empty_like(bucket.flat)
        return bucket.gradients

    def _occupied(self, bucket: Bucket) -> bool:
        """Whether there are means of gradients that were reduced before."""
        rank = self._collectives.rank
        return any(self.own[tile].grad is not None for owner, tiles in bucket.runs if owner == rank for tile in tiles)

    def _launch(self) -> None:
        """Send the gradients of the next bucket to their owners."""
        while len(self._flying) >= _IN_FLIGHT:
            self._land()
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.sent = True
        sums, lent = bucket.local, None
        if sums is not None and sums.dtype == bucket.flat.dtype:
            gradients = sums
        elif self._stage == 1 and not self._occupied(bucket):
            gradients = self._staying(bucket)
        else:
            gradients = lent = self._collectives.scratch.take(bucket.flat)
        for name in bucket.parameters:
            gradient = self._stand_ins.loose(name)
            if sums is None:
                place = bucket.place(gradients, name)
                place.zero_() if gradient is None else place.copy_(bucket.values(gradient, name))  # not used, or used
            elif gradient is not None:
                bucket.place(sums, name).add_(bucket.values(gradient, name))
            if bucket is self._holders[name][-1]:
                self._stand_ins.put(name)
        if sums is not None and gradients is not sums:
            gradients[: sums.numel()].copy_(sums)
        bucket.local = None
        pending = self._collectives.reduce_scatter(
            bucket.pieces(gradients), lambda index, pieces: self._add(bucket, gradients, bucket.runs[index][1], pieces)
        )
        self._flying.append(_Flight(pending, lent))

    def _land(self) -> None:
        """Wait for the bucket that was sent first."""
        pending, lent = self._flying.popleft()
        pending.wait()
        if lent is not None:
            self._collectives.scratch.give(lent)

    def _add(
        self, bucket: Bucket, gradients: torch.Tensor, tiles: Sequence[Tile], pieces: Sequence[torch.Tensor]
    ) -> None:
        """Take in what all ranks have for some of our tiles, which lie side by side."""
        total = sum_in_order(pieces, self._collectives.rank).div_(self._collectives.ranks)
        self._totals.append(total.sum())
        offset = 0
        for tile in tiles:
            mean, values = total[offset : offset + tile.numel], self.own[tile]
            offset += tile.numel
            if values.grad is not None:
                values.grad += mean
            elif gradients is bucket.gradients and gradients.dtype == values.dtype:
                values.grad = bucket.part(gradients, tile).copy_(mean)  # our own piece holds what was there
            else:
                values.grad = mean.to(values.dtype, copy=True)

    def _end(self) -> None:
        """The pass is over: reduce what got no gradient in it, and wait for everything."""
        while self._launched < len(self._buckets):
            self._launch()
        while self._flying:
            self._land()
        self._running = False

    # ------------------------------------------------------------------------------------------------------- clearing

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        self._stand_ins.clear()
        for bucket in self._buckets:
            bucket.local = None
        for values in self.own.values():
            values.grad = None
        for forgotten in (self._totals, self._arrivals, self._flying):
            forgotten.clear()
        self._running = False  # a pass that broke off

    def _look(self) -> None:
        """Let go of the gradients that were cleared by others."""
        if names := set(self._stand_ins.cleared()):
            self._forget(names)

    def _forget(self, names: Collection[str]) -> None:
        held = self._stand_ins.held
        for bucket in self._buckets:
            if bucket.local is not None:
                for name in bucket.parameters.keys() & names:
                    bucket.place(bucket.local, name).zero_()
                if not bucket.parameters.keys() & held:
                    bucket.local = None
        for tile, values in self.own.items():
            if tile.name in names:
                values.grad = None
        self._arrivals.difference_update(names)
        self._totals = [values.grad.sum() for values in self.own.values() if values.grad is not None]

    # ------------------------------------------------------------------------------------------------------- the step

    def gradients(self) -> list[torch.Tensor]:
        """The own tiles' gradients, averaged over the ranks; they may be scaled in place.

        Raises:
            LocalError: the last backward passes were within `no_sync`.
        """
        self._look()
        if any(bucket.local is not None for bucket in self._buckets):
            raise LocalError(
                "the last backward pass was within no_sync(): run the last one before clipping or stepping outside it"
            )
        if by_hand := [name for name in self._parameters if self._stand_ins.loose(name) is not None]:
            raise LocalError(
                f"the gradient of {by_hand[0]} was set by hand, and is not reduced: only backward passes reduce any"
            )
        return [values.grad for values in self.own.values() if values.grad is not None]

    def finite(self) -> bool:
        """Whether they hold nothing infinite, and only numbers."""
        self.gradients()
        return not self._totals or bool(torch.stack(self._totals).isfinite().all())

    def absent(self) -> list[bool]:
        """For each parameter whether it got no gradient on this rank since it was cleared."""
        return [name not in self._arrivals for name in self._parameters]

    def hand_over(self, absent: Sequence[bool]) -> None:
        """The optimizer finds values and gradients where they are; no gradient where no rank had any.

        Args:
            absent: for each parameter whether it was absent on all ranks.
        """
        self._copies.adopt()
        nowhere = {name for name, gone in zip(self._parameters, absent, strict=True) if gone}
        for tile, values in self.own.items():
            if tile.name in nowhere:
                values.grad = None

    def publish(self) -> None:
        """Send the new values of the own tiles to all ranks, and receive theirs."""
        self._copies.publish()
        for pending in [self._collectives.all_gather(bucket.pieces(bucket.flat)) for bucket in self._buckets]:
            pending.wait()

    def pieces(self) -> Iterator[Piece]:
        """The own tiles."""
        self._copies.adopt()
        for tile, values in self.own.items():
            yield Piece(tile.name, tile.start, tile.stop, values, values.data)

    def wide(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and float32 values of each parameter that has fewer bits; frozen ones too, if `shard` narrowed them.

        All ranks go through all of it: one after another is gathered.
        """
        yield from self._copies.whole()
        yield from self._frozen.whole()

    def write(self, name: str, values: torch.Tensor) -> None:
        """Replace a frozen parameter that `shard` narrowed, by float32 values: the same on all ranks."""
        self._frozen.write(name, values)

    def kept(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """All gradients. And the float32 copies of 16-bit parameters."""
        self._look()
        buckets = [each for bucket in self._buckets for each in (bucket.gradients, bucket.local)]
        means = [values.grad for values in self.own.values()]
        copies = [*self._copies.own.values(), *self._frozen.own.values()]
        return [each for each in (*buckets, *means) if each is not None], copies

    def check(self) -> None:
        """Raise `LocalError` if the model has or trains other parameters, or they are no longer where they were."""
        self._roster.check()
        self._check_places()

    def _check_places(self) -> None:
        for bucket in self._buckets:
            if name := bucket.moved():
                raise LocalError(
                    f"{name} was moved, converted or replaced after the model was sharded: do that before shard()"
                )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are added up in, and stepped."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that ends with its object: what autograd refers to, Python's garbage collector does not see through."""
    found = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        if (alive := found()) is not None:
            alive(*args)

    return call
