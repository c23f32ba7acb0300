"""Stages 1 and 2: every rank has all parameters, and keeps and steps the optimizer state of its own tiles only.

Gradients are reduced bucket by bucket, while the backward pass goes on. A bucket is some parameters in the reverse of
their order, about `BUCKET_BYTES`; its values lie in one flat tensor, of which the parameters are views, so that the new
values of other ranks are received in place. When all gradients of a bucket are there, each rank sends every tile's
owner what it has for it; the owner adds up in the order of the ranks.

- Stage 1 keeps all gradients: those of the own tiles are where the sum goes.
- Stage 2 frees them as soon as they are sent; what it keeps is a sum for each own tile.

Gradients travel and are kept in the parameters' dtype. With 16-bit parameters sums are taken in float32, and the
optimizer works on float32 copies of the own tiles. `backward` outside `no_sync` ends with everything reduced. Ranks
must call `backward` equally often; a parameter that got no gradient on a rank counts as zero there.

Invariant: between passes a tile's gradient is the sum over ranks of all that was reduced since `zero_grad`, divided by
their number once `ready` was called.

Source: Rajbhandari et al., "ZeRO" (2020), sections 5.1 and 5.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from shoal.errors import LocalError
from shoal.zero.collectives import Collectives, Pending, Run, sum_in_order
from shoal.zero.optimizer import Piece
from shoal.zero.tiles import Plan, Tile, assign, cut, tile_numel

__all__ = ["BUCKET_BYTES", "FlatEngine"]

BUCKET_BYTES = 25 << 20
_IN_FLIGHT = 2
"""So many buckets are sent at once: what is received for them is the only memory that a reduction takes."""


class Bucket:
    """Parameters whose values lie in one flat tensor, and are reduced and gathered together.

    Args:
        parameters: by name, all of one dtype and device. Their values move into the flat tensor.
        plan: who owns which tile.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], plan: Plan) -> None:
        self.parameters = dict(parameters)
        self.flat = torch.cat([each.detach().reshape(-1) for each in parameters.values()])
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, parameter in parameters.items():
            self.offsets[name] = offset
            parameter.data = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        self.missing = set(parameters)
        self.runs = self._find_runs(plan)

    def _find_runs(self, plan: Plan) -> list[tuple[int, list[Tile]]]:
        """Tiles side by side that have one owner."""
        runs: list[tuple[int, list[Tile]]] = []
        for name in self.parameters:
            for tile in plan.of(name):
                owner = plan.owner(tile)
                if not runs or runs[-1][0] != owner:
                    runs.append((owner, []))
                runs[-1][1].append(tile)
        return runs

    def cut(self, flat: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's part of a tensor that is laid out as `flat`."""
        return flat[self.offsets[tile.name] + tile.start : self.offsets[tile.name] + tile.stop]

    def pieces(self, flat: torch.Tensor) -> list[Run]:
        """The runs in a tensor that is laid out as `flat`."""
        return [
            Run(
                owner,
                flat[self.offsets[tiles[0].name] + tiles[0].start : self.offsets[tiles[-1].name] + tiles[-1].stop],
            )
            for owner, tiles in self.runs
        ]

    def gradients(self) -> torch.Tensor:
        """All gradients, laid out as `flat`; zero where there is none."""
        return torch.cat(
            [
                torch.zeros(each.numel(), dtype=each.dtype, device=each.device)
                if each.grad is None
                else each.grad.reshape(-1)
                for each in self.parameters.values()
            ]
        )


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
        groups = list(_grouped(parameters))
        numels = {name: each.numel() for name, each in parameters.items()}
        size = tile_numel(sum(numels.values()))
        self.plan = assign([cut({name: numels[name] for name in group}, size) for group in groups], collectives.ranks)
        self._buckets = [Bucket(group, self.plan) for group in groups]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        self.own = {tile: self._own(tile, wide or {}) for tile in self.plan.owned(collectives.rank)}
        self._sums: dict[Tile, torch.Tensor] = {}
        self._arrivals: set[str] = set()  # since zero_grad
        self._syncing = True
        self._running = False  # a backward pass that reduces
        self._unreduced = False  # there are gradients of passes within no_sync
        self._spent = False  # stage 1: what is there for other ranks' tiles was sent
        self._divided = False
        self._launched = 0
        self._flying: list[Pending] = []
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
        return bucket.cut(bucket.flat, tile)

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
        """A gradient is about to be added to what is there."""
        if self._running:
            return
        if self._divided:
            for gradient in self._kept_gradients().values():
                gradient.mul_(self._collectives.ranks)
            self._divided = False
        if self._spent and self._stage == 1:
            self._forget_spent()
        self._spent = False

    def _arrived(self, name: str, parameter: torch.Tensor) -> None:
        """A parameter has its gradient of this pass."""
        self._arrivals.add(name)
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        if not self._syncing:
            self._unreduced = True
            return
        if not self._running:
            self._running, self._launched = True, 0
            for bucket in self._buckets:
                bucket.missing = set(bucket.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001 (as FSDP2 does)
        self._bucket_of[name].missing.discard(name)
        # In the same order on all ranks, whatever the order in which gradients come.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch()

    def _end(self) -> None:
        """The pass is over: reduce what got no gradient in it, and wait for everything."""
        while self._launched < len(self._buckets):
            self._launch()
        while self._flying:
            self._flying.pop(0).wait()
        self._running = self._unreduced = False
        self._spent = True

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        runs = bucket.pieces(bucket.gradients())
        if self._stage == 2:
            for parameter in bucket.parameters.values():
                parameter.grad = None
        while len(self._flying) >= _IN_FLIGHT:
            self._flying.pop(0).wait()
        self._flying.append(
            self._collectives.reduce_scatter(runs, lambda index, pieces: self._add(bucket.runs[index][1], pieces))
        )

    def _add(self, tiles: Sequence[Tile], pieces: Sequence[torch.Tensor]) -> None:
        """Take in what all ranks have for some of our tiles, which lie side by side."""
        total, offset = sum_in_order(pieces), 0
        for tile in tiles:
            part = total[offset : offset + tile.numel]
            offset += tile.numel
            if self._stage == 1:
                self._kept(tile).copy_(part)  # our own piece holds what was there
            elif tile in self._sums:
                self._sums[tile].copy_(part.add_(self._sums[tile]))
            else:
                self._sums[tile] = part.to(self._values(tile).dtype)

    def _kept(self, tile: Tile) -> torch.Tensor:
        """Stage 1: the gradient of one of our tiles."""
        parameter = self._bucket_of[tile.name].parameters[tile.name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad.view(-1)[tile.start : tile.stop]

    def _forget_spent(self) -> None:
        for bucket in self._buckets:
            for name, parameter in bucket.parameters.items():
                for tile in self.plan.of(name) if parameter.grad is not None else ():
                    if self.plan.owner(tile) != self._collectives.rank:
                        parameter.grad.view(-1)[tile.start : tile.stop].zero_()  # type: ignore[union-attr]

    def _kept_gradients(self) -> dict[Tile, torch.Tensor]:
        if self._stage == 2:
            return self._sums
        return {
            tile: self._kept(tile)
            for tile in self.own
            if self._bucket_of[tile.name].parameters[tile.name].grad is not None
        }

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for bucket in self._buckets:
            for parameter in bucket.parameters.values():
                parameter.grad = None
        for values in self.own.values():
            values.grad = None
        self._sums.clear()
        self._arrivals.clear()
        self._flying.clear()  # of a pass that broke off
        self._running = self._unreduced = self._spent = self._divided = False

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
        kept = self._kept_gradients()
        if not self._divided:
            for gradient in kept.values():
                gradient.div_(self._collectives.ranks)
            self._divided = True
        return list(kept.values())

    def absent(self) -> list[bool]:
        """For each parameter whether it got no gradient on this rank since `zero_grad`."""
        return [name not in self._arrivals for name in self._bucket_of]

    def hand_over(self, absent: Sequence[bool]) -> None:
        """Give the own tiles their gradients, for the optimizer; none where no rank had any.

        Args:
            absent: for each parameter whether it was absent on all ranks.
        """
        nowhere = {name for name, gone in zip(self._bucket_of, absent, strict=True) if gone}
        kept = self._kept_gradients()
        for tile, values in self.own.items():
            gradient = None if tile.name in nowhere else kept.get(tile)
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
        """Stage 2: the sums of gradients. And the float32 copies of 16-bit parameters."""
        copies = [values for tile, values in self.own.items() if values.dtype != self._values(tile).dtype]
        return list(self._sums.values()), copies

    def check(self) -> None:
        """Raise `LocalError` if the parameters are no longer where they were."""
        for bucket in self._buckets:
            for name, parameter in bucket.parameters.items():
                place = bucket.flat[bucket.offsets[name] :]
                if parameter.numel() and parameter.data_ptr() != place.data_ptr():
                    raise LocalError(
                        f"{name} was moved, converted or replaced after the model was sharded: do that before shard()"
                    )


def _grouped(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[dict[str, torch.nn.Parameter]]:
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
