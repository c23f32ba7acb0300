"""Stages 1 and 2: every rank has all parameters, and keeps and steps the optimizer state of its own tiles only.

Gradients are reduced bucket by bucket, while the backward pass goes on. A bucket is some parameters in the reverse of
their order, about `BUCKET_BYTES`; its values lie in one flat tensor, of which the parameters are views, so that the new
values of other ranks are received in place. When all gradients of a bucket are there, each rank sends every tile's
owner what it has for it; the owner adds up in the order of the ranks.

- Stage 1 keeps all gradients, each bucket's in one tensor; those of the own tiles are where the mean goes.
- Stage 2 frees them as soon as they are sent; what it keeps is the mean for each own tile.

Gradients travel and are kept in the parameters' dtype. With 16-bit parameters sums are taken in float32, and the
optimizer works on float32 copies of the own tiles. `backward` outside `no_sync` ends with everything reduced. Ranks
must call `backward` equally often; a parameter that got no gradient on a rank counts as zero there.

Invariant: between passes `_kept` has, for each own tile, the mean over the ranks of all that was reduced since
`zero_grad`.

Source: Rajbhandari et al., "ZeRO" (2020), sections 5.1 and 5.2.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from shoal.errors import LocalError
from shoal.zero.buckets import Bucket, grouped
from shoal.zero.collectives import Collectives, Pending, sum_in_order
from shoal.zero.optimizer import Piece
from shoal.zero.tiles import Tile, assign, cut, tile_numel

__all__ = ["FlatEngine"]

_IN_FLIGHT = 2
"""So many buckets are sent at once: what is received for them is the only memory that a reduction takes."""


class FlatEngine:
    """Stage 1 or 2 for some parameters.

    Args:
        parameters: those that are trained, by name, in the order of the model. Equal on all ranks.
        stage: 1 or 2.
        collectives: among the ranks.
        wide: float32 values of parameters that have been made narrower; the optimizer's copies begin with them.

    Attributes:
        plan: who owns which tile.
        own: what the optimizer steps: each own tile's values, one-dimensional; the parameters' memory itself, or with
            16-bit parameters a float32 copy.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        stage: int,
        collectives: Collectives,
        wide: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        assert stage in (1, 2)
        self._stage, self._collectives = stage, collectives
        groups = list(grouped(parameters))
        numels = {name: each.numel() for name, each in parameters.items()}
        size = tile_numel(sum(numels.values()))
        self.plan = assign([cut({name: numels[name] for name in group}, size) for group in groups], collectives.ranks)
        self._buckets = [Bucket(group, self.plan) for group in groups]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        self.own = {tile: self._own(tile, wide or {}) for tile in self.plan.owned(collectives.rank)}
        self._kept: dict[Tile, torch.Tensor] = {}  # gradients of the own tiles, averaged
        self._totals: list[torch.Tensor] = []  # to see whether all is finite
        self._arrivals: set[str] = set()  # since zero_grad
        self._syncing = True
        self._running = False  # a backward pass that reduces
        self._unreduced = False  # there are gradients of passes within no_sync
        self._spent = False  # stage 1: what is there was sent, and the own tiles' part of it is the mean
        self._launched = 0
        self._flying: deque[tuple[Bucket, Pending]] = deque()
        for name, parameter in parameters.items():
            parameter.register_hook(lambda _: self._before())  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]

    def _own(self, tile: Tile, wide: Mapping[str, torch.Tensor]) -> torch.nn.Parameter:
        values = self._values(tile)
        if tile.name in wide:
            values = wide[tile.name].reshape(-1)[tile.start : tile.stop].clone()
        elif values.itemsize < torch.float32.itemsize:
            values = values.float()
        return torch.nn.Parameter(values)

    def _values(self, tile: Tile) -> torch.Tensor:
        bucket = self._bucket_of[tile.name]
        return bucket.part(bucket.flat, tile)

    # ----------------------------------------------------------------------------------------------- the backward pass

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block keep their gradients to this rank; they are reduced with the next one."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _before(self) -> None:
        """A gradient is about to be added to what is there. Stage 1: to sums, and to nothing that was sent already."""
        if self._running or not self._spent:
            return
        self._spent = False
        for gradient in self._kept.values():
            gradient.mul_(self._collectives.ranks)
        self._kept.clear()
        for bucket in self._buckets:
            assert bucket.gradients is not None
            for owner, part in bucket.pieces(bucket.gradients):
                if owner != self._collectives.rank:
                    part.zero_()

    def _arrived(self, name: str, parameter: torch.Tensor) -> None:
        """A parameter has its gradient of this pass."""
        self._arrivals.add(name)
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        if not self._syncing:
            self._unreduced = True
            return
        if not self._running:
            self.check()
            self._running, self._launched = True, 0
            for bucket in self._buckets:
                bucket.missing = set(bucket.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001 (as FSDP2 does)
        self._collect(self._bucket_of[name], name)
        # In the same order on all ranks, whatever the order in which gradients come.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch()

    def _collect(self, bucket: Bucket, name: str) -> None:
        if bucket.gradients is None:
            scratch = self._collectives.scratch
            bucket.gradients = torch.empty_like(bucket.flat) if self._stage == 1 else scratch.take(bucket.flat)
        place = bucket.collect(name)
        bucket.parameters[name].grad = place if self._stage == 1 else None

    def _launch(self) -> None:
        """Send the gradients of the next bucket to their owners."""
        bucket = self._buckets[self._launched]
        self._launched += 1
        for name in sorted(bucket.missing):  # not used in this pass
            self._collect(bucket, name)
        while len(self._flying) >= _IN_FLIGHT:
            self._land()
        assert bucket.gradients is not None
        runs = bucket.pieces(bucket.gradients)
        pending = self._collectives.reduce_scatter(
            runs, lambda index, pieces: self._add(bucket, bucket.runs[index][1], pieces)
        )
        self._flying.append((bucket, pending))

    def _land(self) -> None:
        """Wait for the bucket that was sent first."""
        bucket, pending = self._flying.popleft()
        pending.wait()
        if self._stage == 2 and bucket.gradients is not None:
            self._collectives.scratch.give(bucket.gradients)
            bucket.gradients = None

    def _add(self, bucket: Bucket, tiles: Sequence[Tile], pieces: Sequence[torch.Tensor]) -> None:
        """Take in what all ranks have for some of our tiles, which lie side by side."""
        total = sum_in_order(pieces, self._collectives.rank).div_(self._collectives.ranks)
        self._totals.append(total.sum())
        offset = 0
        for tile in tiles:
            mean = total[offset : offset + tile.numel]
            offset += tile.numel
            if self._stage == 1:
                assert bucket.gradients is not None
                self._kept[tile] = bucket.part(bucket.gradients, tile).copy_(mean)  # our own piece holds what was there
            elif tile in self._kept:
                self._kept[tile] += mean
            else:
                self._kept[tile] = mean.to(bucket.flat.dtype, copy=True)

    def _end(self) -> None:
        """The pass is over: reduce what got no gradient in it, and wait for everything."""
        while self._launched < len(self._buckets):
            self._launch()
        while self._flying:
            self._land()
        self._running = self._unreduced = False
        self._spent = self._stage == 1

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for bucket in self._buckets:
            for parameter in bucket.parameters.values():
                parameter.grad = None
            if self._stage == 2:
                bucket.gradients = None
        for values in self.own.values():
            values.grad = None
        for forgotten in (self._kept, self._totals, self._arrivals, self._flying):
            forgotten.clear()
        self._running = self._unreduced = self._spent = False  # of a pass that broke off, too

    # ------------------------------------------------------------------------------------------------------- the step

    def gradients(self) -> list[torch.Tensor]:
        """The own tiles' gradients, averaged over the ranks, in the parameters' dtype; they may be scaled in place.

        Raises:
            LocalError: the last backward passes were within `no_sync`.
        """
        if self._unreduced:
            raise LocalError(
                "the last backward pass was within no_sync(): run the last one before clipping or stepping outside it"
            )
        return list(self._kept.values())

    def finite(self) -> bool:
        """Whether they hold nothing infinite, and only numbers."""
        self.gradients()
        return not self._totals or bool(torch.stack(self._totals).isfinite().all())

    def absent(self) -> list[bool]:
        """For each parameter whether it got no gradient on this rank since `zero_grad`."""
        return [name not in self._arrivals for name in self._bucket_of]

    def hand_over(self, absent: Sequence[bool]) -> None:
        """Give the own tiles their gradients, for the optimizer; none where no rank had any.

        Args:
            absent: for each parameter whether it was absent on all ranks.
        """
        nowhere = {name for name, gone in zip(self._bucket_of, absent, strict=True) if gone}
        for tile, values in self.own.items():
            gradient = None if tile.name in nowhere else self._kept.get(tile)
            values.grad = None if gradient is None else gradient.to(values.dtype)

    def publish(self) -> None:
        """Send the new values of the own tiles to all ranks, and receive theirs."""
        for tile, values in self.own.items():
            values.grad = None
            if values.dtype != (target := self._values(tile)).dtype:
                target.copy_(values)
        for pending in [self._collectives.all_gather(bucket.pieces(bucket.flat)) for bucket in self._buckets]:
            pending.wait()

    def adopt(self) -> None:
        """The parameters were changed from outside, equally on all ranks: take that over into the float32 copies."""
        for tile, values in self.own.items():
            if values.dtype != (source := self._values(tile)).dtype:
                values.data.copy_(source)

    def pieces(self) -> Iterator[Piece]:
        """The own tiles."""
        for tile, values in self.own.items():
            yield Piece(tile.name, tile.start, tile.stop, values, values.data)

    def kept(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """All gradients. And the float32 copies of 16-bit parameters."""
        copies = [values for tile, values in self.own.items() if values.dtype != self._values(tile).dtype]
        gradients = [bucket.gradients for bucket in self._buckets if bucket.gradients is not None]
        return [*gradients, *self._kept.values()], copies

    def check(self) -> None:
        """Raise `LocalError` if the parameters are no longer where they were."""
        for bucket in self._buckets:
            if name := bucket.moved():
                raise LocalError(
                    f"{name} was moved, converted or replaced after the model was sharded: do that before shard()"
                )
