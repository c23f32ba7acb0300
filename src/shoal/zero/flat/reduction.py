"""Stages 1 and 2, the backward pass: gradients on their way to the owners of tiles.

When all gradients of a bucket are there, it is sent, while the backward pass goes on; the owner adds up in the order of
the ranks, in float32 if the values have 16 bits. The end of a pass waits for all that is on its way. A pass that an
exception ends on this rank is carried to its end as well, before the program sees the exception, and the others are
told: they wait for its messages.

- Stage 1 keeps all gradients, each bucket's in one tensor, to which they go when they come; those of the own tiles are
  where the mean goes. Places of gradients that others have by now, or that have not come yet, are where values of
  others are received.
- Stage 2 frees them as soon as they are sent; it keeps only the mean for each own tile.

- Gradients of a few rows (`sparse`) are sent at the end of the pass, in both stages.

Invariant: between passes the `.grad` of each own tile is the mean over the ranks of all gradients reduced since it was
cleared. Gradients that were not reduced are in the `local` of buckets and tables. The parameters' own `.grad` hold
stand-ins (`standins`), which show what the user clears, or sets to zeros.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from shoal.base.warning_names import named
from shoal.errors import LocalError, RankLost
from shoal.layout import Tile, flat, like, order_of
from shoal.zero.flat.sparse import Tables
from shoal.zero.flat.standins import StandIns
from shoal.zero.memory.offload import Offload
from shoal.zero.parameters import present_pass, weakly, wide_dtype
from shoal.zero.ranks.buckets import Bucket, Homes
from shoal.zero.ranks.collectives import Collectives, Pending, sum_in_order
from shoal.zero.unsharded.changes import uninterrupted

__all__ = ["Reduction"]

_logger = logging.getLogger("shoal.zero")
PATIENCE_S = 5.0
"""How long a backward pass waits for buckets that are on their way, the first time; afterwards it does not."""
_IN_FLIGHT = 2
"""So many buckets are sent at once: the memory for their messages is the only memory that a reduction takes."""


class _Flight(NamedTuple):
    """A bucket that is on its way.

    Attributes:
        bucket: which.
        pending: its messages.
        lent: scratch memory to give back.
        borrowed: places for gradients of other buckets, in which values of others are received.
    """

    bucket: Bucket
    pending: Pending
    lent: torch.Tensor | None
    borrowed: list[tuple[Bucket, torch.Tensor]]


class _Rest:
    """The rest of a pass: autograd calls it, or drops it if an exception ends the pass.

    Args:
        end: called at the end of the pass.
        drop: called if it never gets there.
    """

    def __init__(self, end: Callable[[], None], drop: Callable[[], None]) -> None:
        self._end, self._drop = end, drop

    def __call__(self) -> None:
        """The graph is at its end."""
        self._drop = lambda: None
        self._end()

    def __del__(self) -> None:
        self._drop()


class Reduction:
    """The reduction of the gradients of some parameters.

    Args:
        parameters: by name, in the same order on all ranks.
        buckets: the buckets of these parameters.
        own: the tiles of this rank, which get the means.
        stage: 1 or 2.
        collectives: among the ranks.
        offload: where means are kept that are not in buckets.
        tables: those of the parameters that are in no bucket.
        homes: where the parameters are.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        buckets: Sequence[Bucket],
        own: Mapping[Tile, torch.nn.Parameter],
        stage: int,
        collectives: Collectives,
        offload: Offload,
        tables: Tables,
        homes: Homes,
    ) -> None:
        assert stage in (1, 2)
        self._offload, self._tables, self._homes = offload, tables, homes
        self._rooms: dict[Tile, torch.Tensor] = {}  # in files, for means that do not stay in buckets
        dense = {tile: values for tile, values in own.items() if tile.name not in tables.of}
        for tile, values in dense.items() if offload.folder is not None else ():
            if stage == 2 or offload.elsewhere or values.dtype != parameters[tile.name].dtype:
                self._rooms[tile] = offload.room(flat(values.detach(), order_of(values)))
                offload.attach(values, self._rooms[tile])
        self._stage, self._collectives, self._buckets, self._own = stage, collectives, buckets, own
        self._holders: dict[str, list[Bucket]] = {name: [] for name in parameters}
        for bucket in buckets:
            for name in bucket.parameters:
                self._holders[name].append(bucket)
        self._stand_ins = StandIns(parameters)
        self._totals: list[torch.Tensor] = []  # to see whether all is finite
        self._versions: dict[Tile, int] = {}  # of the means: to see who changes them
        self._arrivals: set[str] = set()  # since they were cleared
        self._passes: dict[str, int] = {}  # since they were cleared, in which they were reduced
        self._syncing = True
        self._task = -1  # autograd's number of the present pass
        self._asked = -1  # that to whose end we are called
        self._running = False  # a backward pass that reduces
        self._hear: Callable[[], object] | None = None  # waits until all are known to be at this model
        self._late = False  # whether a gradient came when its bucket was sent
        self._broken = False  # whether an exception has ended the present pass on this rank
        self._patience_s = PATIENCE_S
        self._fault: LocalError | None = None
        self._launched = 0
        self._flying: deque[_Flight] = deque()
        # Tensor hooks would also run where autograd.grad() only asks for a gradient, and adds it to nothing.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters.values()]  # hooks live as long
        for node, (name, parameter) in zip(self._nodes, parameters.items(), strict=True):
            node.register_prehook(partial(weakly(self._before), name))
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(weakly(self._arrived), name)
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block keep their gradients to this rank; they are reduced with the next one."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _before(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        """A gradient is about to be added to `.grad`."""
        if gradients[0] is None:
            return  # no gradient will be added
        if torch.is_grad_enabled():
            raise LocalError(
                "backward(create_graph=True) cannot be reduced: call torch.autograd.grad(create_graph=True) for what "
                "you differentiate twice, and backward() for the loss that is made of it"
            )
        if self._task != (task := present_pass()):
            self._task = task
            self._look()
        self._stand_ins.lift(name)

    def _arrived(self, name: str, parameter: torch.Tensor) -> None:
        """A parameter has its gradient of this pass."""
        self._arrivals.add(name)
        if parameter.grad is not None and parameter.grad.is_sparse and name not in self._tables.of:
            parameter.grad = parameter.grad.to_dense()
        if not self._syncing:
            self._hold(name)
            return
        if self._asked != (task := present_pass()):  # not all passes come by `_before`: see `Homes.check`
            self._asked = task
            self._call_at_the_end()
        if not self._running:
            self._check_order()
            self._running = True
            # Told in the order in which models come, whatever the order in which their buckets are complete.
            self._hear = self._collectives.tell() if self._collectives.tagged else None
            self._begin()
            self.check()  # others wait for this pass by now: it is carried to its end if this raises
        if any(bucket.sent for bucket in self._holders[name]):
            self._hold(name)  # it comes once more: this pass consists of several, or the last one broke off
            self._late = True
            return
        for bucket in self._holders[name]:
            bucket.missing.discard(name)
        with self._unless_lost():
            if all(self._has_place(bucket) for bucket in self._holders[name]):
                self._hold(name)  # at once: until the bucket is complete, it would be in memory beside its place
            # In the same order on all ranks, whatever the order in which gradients come.
            while self._is_complete(self._launched) and self._landed(self._may_launch):
                self._launch()

    def _begin(self) -> None:
        """Nothing of a pass was sent yet."""
        self._launched, self._late = 0, False
        for bucket in self._buckets:
            bucket.missing, bucket.sent = set(bucket.parameters), False

    def _is_complete(self, number: int) -> bool:
        """Whether there is such a bucket, and all its gradients are there."""
        return number < len(self._buckets) and not self._buckets[number].missing

    def _may_launch(self) -> bool:
        """Whether the next bucket may be sent."""
        return len(self._flying) < _IN_FLIGHT and not self._lends(self._buckets[self._launched])

    def _lends(self, bucket: Bucket) -> bool:
        """Whether values of others are received where its gradients stay."""
        return any(bucket is lender for flight in self._flying for lender, _ in flight.borrowed)

    def _has_place(self, bucket: Bucket) -> bool:
        """Whether a gradient can go to its bucket, in the middle of a pass."""
        return bucket.local is not None or (self._landed(lambda: not self._lends(bucket)) and self._stays(bucket))

    def _landed(self, enough: Callable[[], bool]) -> bool:
        """Wait for buckets that are on their way until it is enough, in the middle of a pass.

        A rank that waits here keeps others waiting which are at a collective of the program's own in their backward
        pass, and may have no gradients for us before that: then we are better patient at the end.

        Returns:
            Whether it is.
        """
        while not enough():
            if not self._flying[0].pending.done_within(self._patience_s):
                self._patience_s = 0.0
                return False
            self._land()
        return True

    def _call_at_the_end(self, *_: object) -> None:
        """Have `_ended` called when autograd is through with the present graph."""
        torch.autograd.Variable._execution_engine.queue_callback(  # noqa: SLF001 (as FSDP2 does)
            _Rest(self._ended, self._broke_off)
        )

    def _ended(self) -> None:
        """A graph is at its end: either the backward pass is, or a part of it (reentrant activation checkpointing)."""
        around = torch._C._current_autograd_node()  # noqa: SLF001 (there is no other way to ask)
        if around is None:
            self._end()
            return
        following = [node for node, _ in around.next_functions if node is not None]
        if not following:
            return  # the next graph's end, or the step, is ours

        def once(*_: object) -> None:
            handle.remove()
            self._call_at_the_end()

        # Of the graph around it, in which no callback can be queued from here.
        handle = following[0].register_prehook(once)

    def _broke_off(self) -> None:
        """An exception ends the pass on this rank: its messages are sent, since the others wait for them.

        Called while the exception is under way: what is raised here would be lost, and is raised by the next call.
        """
        if not self._running:
            return
        self._broken = True
        try:
            with torch.no_grad():
                self._end()
        except LocalError as error:
            self._fault = error
        except Exception as error:  # noqa: BLE001 (the one under way is what the program is to see)
            self._flying.clear()
            self._running = self._broken = False
            _logger.warning(named("a backward pass broke off, and others may wait for the rest of it: %s"), error)

    def _hold(self, name: str) -> None:
        """Add a gradient to those of this rank that are not reduced yet."""
        gradient = self._stand_ins.loose(name)
        assert gradient is not None
        if name in self._tables.of:
            self._tables.of[name].hold(gradient)
        for bucket in self._holders[name]:
            if bucket.local is None:
                dtype = wide_dtype(bucket.flat.dtype)
                stays = self._stays(bucket)
                bucket.local = self._staying(bucket) if stays else torch.empty_like(bucket.flat, dtype=dtype)
            bucket.add(bucket.local, name, gradient)
        self._stand_ins.put(name)

    def _stays(self, bucket: Bucket) -> bool:
        """Whether a bucket's sums may be where its gradients stay."""
        alike = wide_dtype(bucket.flat.dtype) == bucket.flat.dtype
        used = (self._running and bucket.sent) or self._occupied(bucket) or self._lends(bucket)
        return self._stage == 1 and alike and not used

    def _staying(self, bucket: Bucket) -> torch.Tensor:
        """Stage 1: where a bucket's gradients stay."""
        if bucket.gradients is None:
            bucket.gradients = torch.empty_like(bucket.flat)
        return bucket.gradients

    def _occupied(self, bucket: Bucket) -> bool:
        """Whether there are means of gradients that were reduced before."""
        return any(self._own[tile].grad is not None for tile in bucket.tiles if tile in self._own)

    def _idle(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Stage 1: places for gradients that others have by now, or that have not come yet, with their buckets."""
        if self._stage != 1:
            return
        borrowed = {place.data_ptr() for flight in self._flying for _, place in flight.borrowed}
        going = [flight.bucket for flight in self._flying]
        sent, coming = self._buckets[: self._launched - 1], self._buckets[self._launched :]
        for bucket in (*sent, *reversed(coming)):
            if bucket in going or bucket.filled:
                continue
            means = self._occupied(bucket)
            for owner, place in bucket.owned(self._staying(bucket)):
                if place.data_ptr() not in borrowed and not (means and owner == self._collectives.rank):
                    yield bucket, place

    def _launch(self) -> None:
        """Send the gradients of the next bucket to their owners."""
        while not self._may_launch():
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
            bucket.add(gradients if sums is None else sums, name, self._stand_ins.loose(name))
            if bucket is self._holders[name][-1]:
                self._stand_ins.put(name)
                self._passes[name] = self._passes.get(name, 0) + 1
        if sums is not None and gradients is not sums:
            gradients[: sums.numel()].copy_(sums)
        bucket.forget()
        idle, borrowed = self._idle(), list[tuple[Bucket, torch.Tensor]]()

        def room(like: torch.Tensor) -> torch.Tensor | None:
            for lender, place in idle:
                if place.numel() >= like.numel() and _kind(place) == _kind(like):
                    borrowed.append((lender, place))
                    return place
            return None

        pending = self._collectives.reduce_scatter(
            bucket.owned(gradients),
            lambda index, found: self._add(bucket, gradients, bucket.messages[index][1], found),
            self._hear,
            room=room,
        )
        self._hear = None
        self._flying.append(_Flight(bucket, pending, lent, borrowed))

    def _land(self) -> None:
        """Wait for the bucket that was sent first."""
        flight = self._flying.popleft()
        flight.pending.wait()
        if flight.lent is not None:
            self._collectives.scratch.give(flight.lent)

    def _add(
        self, bucket: Bucket, gradients: torch.Tensor, tiles: Sequence[Tile], contributions: Sequence[torch.Tensor]
    ) -> None:
        """Take in the values of all ranks for some of our tiles, which lie side by side."""
        total = sum_in_order(contributions, self._collectives.rank).div_(self._collectives.ranks)
        self._totals.append(total.sum())
        offset = 0
        for tile in tiles:
            values, mean = self._own[tile], total[offset : offset + tile.numel]
            offset += tile.numel
            if values.grad is not None:
                values.grad += like(mean, values).to(values.device)
            elif gradients is bucket.gradients and _kind(gradients) == _kind(values):
                values.grad = like(bucket.place_of(gradients, tile).copy_(mean), values)  # ours is in the sum
            elif tile in self._rooms:
                values.grad = like(self._rooms[tile].copy_(mean), values)
            else:
                values.grad = like(mean.to(values.device, values.dtype, copy=True), values)
        self._offload.let_go(self._rooms[tile] for tile in tiles if tile in self._rooms)

    def _end(self) -> None:
        """The pass is over: reduce parameters that got no gradient in it, and wait for everything.

        Raises:
            LocalError: an exception has ended it on another rank.
        """
        if not self._running:
            return
        broken: list[int] = []
        with self._unless_lost(), uninterrupted():
            while True:
                while self._launched < len(self._buckets):
                    self._launch()
                if self._hear is not None:  # there are no buckets
                    self._hear()
                    self._hear = None
                hear = self._collectives.tell(self._late, self._broken)
                while self._flying:
                    self._land()
                told = hear()
                broken = [rank for rank, (_, broke) in enumerate(told) if broke]
                if not any(late for late, _ in told):
                    break
                self._begin()  # all of it again, on all ranks
            self._reduce_tables()
        self._seal()
        self._running = False
        mine, self._broken = self._broken, False
        if broken and not mine:
            raise LocalError(
                f"the backward pass broke off on rank {', '.join(map(str, broken))}, where an exception was raised in "
                "it, and only a part of its gradients is here: see the error there, and clear gradients on all ranks "
                "(optimizer.zero_grad()) before the next pass"
            )

    def _reduce_tables(self) -> None:
        for name in self._tables.of:
            if self._stand_ins.loose(name) is not None:
                self._hold(name)
            self._stand_ins.put(name)
            self._passes[name] = self._passes.get(name, 0) + 1
        self._totals += self._tables.reduce()

    def _seal(self) -> None:
        """From here on nobody else may change gradients."""
        self._versions = {tile: self._version(tile) for tile, each in self._own.items() if each.grad is not None}

    @contextlib.contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """If a rank is lost or at another model, give up all messages under way: none of them arrives."""
        try:
            yield
        except (RankLost, LocalError) as error:
            self._flying.clear()
            self._running = self._broken = False
            self._fault = error if isinstance(error, LocalError) else None
            raise

    # ----------------------------------------------------------------------------------------- between backward passes

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Let go of all gradients; or set those that there are to zeros."""
        self._broke_off()  # if autograd has not said so: others wait for the rest of it
        kept = set() if set_to_none else set(self._stand_ins.present())
        arrivals = self._arrivals & kept
        self._stand_ins.clear()
        for table in self._tables.of.values():
            table.clear()
        for bucket in self._buckets:
            bucket.forget()
        for tile, values in self._own.items():
            if tile.name not in kept:
                values.grad = None
        for forgotten in (self._totals, self._versions, self._arrivals, self._passes):
            forgotten.clear()
        self._stand_ins.zero(kept)
        self._set_to_zeros(kept)
        self._arrivals |= arrivals

    def _look(self) -> None:
        """Let go of the gradients that were cleared by others, or set to zeros."""
        cleared, zeroed = set(self._stand_ins.cleared()), set(self._stand_ins.zeroed())
        if cleared or zeroed:
            self._drop(cleared | zeroed)
            for tile, values in self._own.items():
                if tile.name in cleared:
                    values.grad = None
            self._arrivals -= cleared
            self._set_to_zeros(zeroed)
            means = (values.grad for values in self._own.values())
            self._totals = [each.sum().to(self._collectives.device) for each in means if each is not None]

    def _drop(self, names: AbstractSet[str]) -> None:
        """Let go of what was not reduced yet, and forget what was."""
        for bucket in self._buckets:
            bucket.filled -= names
            if not bucket.filled:
                bucket.forget()
        for name in names & self._tables.of.keys():
            self._tables.of[name].clear()
        for name in names & self._passes.keys():
            del self._passes[name]

    def _set_to_zeros(self, names: AbstractSet[str]) -> None:
        """The optimizer finds zeros, as in one process: momentum and decay move a parameter then."""
        known = [tile for tile in self._versions if self._version(tile) == self._versions[tile]]
        for tile, values in self._own.items():
            if tile.name not in names or tile.name in self._tables.of:
                continue
            if values.grad is None:
                room = self._rooms.get(tile)
                values.grad = torch.zeros_like(values, requires_grad=False) if room is None else like(room, values)
            values.grad.zero_()
        self._versions.update((tile, self._version(tile)) for tile in known)  # means of one bucket have one version

    def _version(self, tile: Tile) -> int:
        """It counts changes of the tile's mean; -1 if there is none."""
        mean = self._own[tile].grad
        return -1 if mean is None else mean._version  # noqa: SLF001 (there is no other way to ask)

    def gradients(self) -> list[torch.Tensor]:
        """The own tiles' gradients, averaged over the ranks. They may be scaled in place.

        Raises:
            LocalError: the last backward passes were within `no_sync`, or others have changed gradients.
            RankLost: a backward pass broke off, and a rank is gone.
        """
        self._check_gradients()
        return [values.grad for values in self._own.values() if values.grad is not None]

    def _check_gradients(self) -> None:
        self._end()
        self._look()
        held = [bucket.local for bucket in self._buckets], [table.local for table in self._tables.of.values()]
        if any(each is not None for kind in held for each in kind):
            raise LocalError(
                "the last backward pass was within no_sync(): run the last one before clipping or stepping outside it"
            )
        if by_hand := [name for name in self._holders if self._stand_ins.loose(name) is not None]:
            raise LocalError(
                f"the gradient of {by_hand[0]} was set by hand, and is not reduced: only backward passes reduce any"
            )
        for tile, version in self._versions.items():
            if self._version(tile) not in (-1, version):
                raise LocalError(
                    "gradients in param_groups were changed, and each rank has others there: clip with "
                    "optimizer.clip_grad_norm_(), and change the loss instead of gradients"
                )
        self._versions.clear()  # the caller may change them

    def finite(self) -> bool:
        """Whether they hold nothing infinite, and only numbers. Raises as `gradients` does."""
        self._check_gradients()
        return not self._totals or bool(torch.stack(self._totals).isfinite().all())

    def used(self) -> list[bool]:
        """Whether it got a gradient on this rank since it was cleared, for each parameter."""
        return [name in self._arrivals for name in self._holders]

    def reduced(self) -> Mapping[str, int]:
        """The number of passes in which each parameter's gradient was reduced, since it was cleared."""
        return {name: self._passes.get(name, 0) for name in self._holders}

    def tensors(self) -> list[torch.Tensor]:
        """All gradients that there are."""
        self._look()
        buckets = [each for bucket in self._buckets for each in (bucket.gradients, bucket.local)]
        means = [values.grad for values in self._own.values()]
        rows = [each for table in self._tables.of.values() for each in table.gradients()]
        return [each for each in (*buckets, *means, *rows) if each is not None]

    def check(self) -> None:
        """Raise `LocalError` if the parameters are no longer what they were, or ranks were at different models."""
        self._check_order()
        self._homes.check()

    def _check_order(self) -> None:
        if self._fault is not None:
            raise self._fault


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device
