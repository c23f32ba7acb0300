"""Reduce-scatter and all-gather as direct sends between ranks, in which every message may have its own size.

Each rank sends each other rank the values that it should get, and nothing else. So a reduce-scatter moves (N-1)/N of
the data, on gloo too, whose own reduce-scatter is an all-reduce of which a part is kept (PyTorch issue 118911).
Contributions are added in the order of the ranks, so that the sum has the same bits whichever rank computes it, on
every backend.

Several models may be sharded over one group. On gloo a message of one model is never taken for another's, and ranks
that are not at the same model learn that (`Collectives.tell`).

Every byte that is sent is counted. When a rank is gone, or silent for the group's timeout, the error names it
(`watch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from shoal.errors import LocalError
from shoal.zero.ranks.parting import Turn
from shoal.zero.ranks.watch import Watch

__all__ = ["Collectives", "Owned", "Pending", "Scratch", "Traffic", "sum_in_order"]


_TOLD = 4
"""Every message of `tell` has this many numbers, so that one message cannot be taken for two."""
_COMMON = 0
"""The tag of `tell` among all models of a group; the models' own tags are above it."""


@dataclass(slots=True)
class Traffic:
    """The bytes that this rank has sent, by purpose.

    Attributes:
        reduced: gradients, for their owners.
        gathered: parameters of this rank, for the others.
        steps: how many optimizer steps were taken.
    """

    reduced: int = 0
    gathered: int = 0
    steps: int = 0

    @property
    def sent(self) -> int:
        """All of it."""
        return self.reduced + self.gathered


class Owned(NamedTuple):
    """Values that have one owner, and go as one message.

    Attributes:
        owner: a rank.
        data: one-dimensional and contiguous, not empty.
    """

    owner: int
    data: torch.Tensor


class Scratch:
    """Memory for messages under way, lent and taken back: touching fresh memory takes longer than filling it.

    Attributes:
        nbytes: how much there is, lent or not.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self.nbytes = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """One-dimensional, at least as large as `like`, of its dtype and device. Anything may be in it."""
        free = self._free.setdefault((like.dtype, like.device), [])
        fitting = [buffer for buffer in free if buffer.numel() >= like.numel()]
        if fitting:
            found = min(fitting, key=torch.Tensor.numel)
            free[:] = [buffer for buffer in free if buffer is not found]
            return found
        if free:  # a larger one in place of one that was too small
            self.nbytes -= free.pop().nbytes
        found = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        self.nbytes += found.nbytes
        return found

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)


_abandoned: list[dist.Work] = []
"""Messages under way of models that are gone. On gloo the group fails or hangs if the memory of one is freed."""


class Pending:
    """Sends and receives under way. If it is let go before they have ended, they are kept all the same.

    Args:
        works: their handles in `torch.distributed`.
        watch: names the rank that is at fault when they fail.
        turn: their name for `watch`.
        then: called when all have ended.
        first: waits for what must have ended before.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        watch: Watch,
        turn: Turn,
        then: Callable[[], None] | None = None,
        first: Callable[[], object] | None = None,
    ) -> None:
        self._works, self._watch, self._turn, self._then, self._first = works, watch, turn, then, first
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __del__(self) -> None:
        _abandoned.extend(self._works)

    def wait(self) -> None:
        """Wait until they are done. Raises `RankLost` that names a rank which is gone."""
        if self._thread is None:
            self._wait()
        else:
            with self._watch.named(self._turn):
                self._thread.join()
        if self._error is not None:
            raise self._error
        if self._then is not None:
            self._then()
            self._then = None

    def done_within(self, seconds: float) -> bool:
        """Whether `wait` would have nothing to wait for, after so long at most.

        A message on gloo can be waited for, but not polled: so a thread waits.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_aside, daemon=True)
            self._thread.start()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _wait_aside(self) -> None:
        with self._watch.parting.aside():
            self._wait()

    def _wait(self) -> None:
        try:
            if self._first is not None:
                self._first()
            with self._watch.named(self._turn):
                for work in self._works:
                    work.wait()
            self._works = ()
        except Exception as error:  # noqa: BLE001 (raised in the code that waits)
            self._error = error


class Collectives:
    """The collectives of one process group.

    Args:
        group: the ranks.
        watch: the watch of all ranks.
        device: the device of the tensors.
        model: a number for the sharded model, above 0: the same on all ranks, another one for each model of the group.
        everyone: all ranks that train the model, of which `group` may be a part; None for those of `group`.

    Attributes:
        rank: ours in the group.
        ranks: how many there are.
        tagged: whether messages of several models carry tags: on gloo. Other backends have one order for all.
        traffic: the bytes sent so far.
        scratch: memory for messages under way.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        watch: Watch,
        device: torch.device,
        model: int = 1,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.watch, self.device, self.model = group, watch, device, model
        self.everyone = everyone or group
        self.rank, self.ranks, self.tagged = group.rank(), group.size(), _is_gloo(group, device)
        self.traffic, self.scratch = Traffic(), Scratch()
        watch.parting.cover(group)

    def reduce_scatter(
        self,
        owned: Sequence[Owned],
        finish: Callable[[int, Sequence[torch.Tensor]], None],
        first: Callable[[], object] | None = None,
        tag: int | None = None,
        room: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None,
    ) -> Pending:
        """Send all to their owners; `finish` gets what the others have sent for ours.

        Args:
            owned: they must not change until it is done. All ranks agree on owners and sizes.
            finish: called by `Pending.wait` for each of ours, with its index and the contributions of all ranks to it,
                in the order of the ranks; those of others may be written over, and are gone when it returns.
            first: waits for what must have ended before.
            tag: its messages meet only those of the same tag; None for the model's.
            room: finds memory to receive a message in that is as large as the given one, of its dtype and device, and
                that nobody needs until then; None for memory of `scratch`.
        """
        tag = self.model if tag is None else tag
        operations: list[dist.P2POp] = []
        ours: list[tuple[int, list[torch.Tensor]]] = []
        lent: list[torch.Tensor] = []
        for index, (owner, data) in enumerate(owned):
            if owner != self.rank:
                operations.append(self._send(data, owner, tag))
                self.traffic.reduced += data.nbytes
                continue
            contributions = [data] * self.ranks
            for rank in self._others():
                place = room(data)
                if place is None:
                    lent.append(place := self.scratch.take(data))
                contributions[rank] = place[: data.numel()]
                operations.append(self._receive(contributions[rank], rank, tag))
            ours.append((index, contributions))

        def finish_all() -> None:
            for index, contributions in ours:
                finish(index, contributions)
            for each in lent:
                self.scratch.give(each)

        return self._start("a reduce-scatter", operations, finish_all, first)

    def all_gather(
        self, owned: Sequence[Owned], first: Callable[[], object] | None = None, tag: int | None = None
    ) -> Pending:
        """Send ours to every other rank, and receive theirs in place; `first` and `tag` as in `reduce_scatter`."""
        self.traffic.gathered += sum(data.nbytes for owner, data in owned if owner == self.rank) * (self.ranks - 1)
        operations = self._gathering(owned, self.model if tag is None else tag)
        return self._start("an all-gather", operations, first=first)

    def tell(self, *numbers: int) -> Callable[[], list[list[int]]]:
        """Tell all ranks the next action of this one, whichever model they are at; not counted as traffic.

        Args:
            numbers: three at most.

        Returns:
            A function that waits for the numbers of each rank. It raises `LocalError` if one is at another model: on
            that one, too, if it tells something.
        """
        table = torch.zeros(self.ranks, _TOLD, dtype=torch.int64, device=self.device)
        table[self.rank, : 1 + len(numbers)] = torch.tensor(
            [self.model, *numbers], dtype=torch.int64, device=self.device
        )
        owned = [Owned(rank, row) for rank, row in enumerate(table)]
        pending = self._start("to tell what is next", self._gathering(owned, _COMMON))

        def hear() -> list[list[int]]:
            pending.wait()
            rows: list[list[int]] = table.tolist()
            for rank, (model, *_) in enumerate(rows):
                if model != self.model:
                    raise LocalError(
                        f"this rank is at the sharded model number {self.model}, and rank {rank} at number {model}: "
                        "models that are sharded each for itself must be run, and their backward passes, in the same "
                        "order on all ranks. Shard one module that holds them all. Start anew"
                    )
            return [row[: len(numbers)] for _, *row in rows]

        return hear

    def exchange(
        self, doing: str, messages: Mapping[int, torch.Tensor], sizes: Mapping[int, int] | None = None
    ) -> dict[int, torch.Tensor]:
        """Send each other rank a message of its own, and wait for theirs; the caller counts the traffic.

        Args:
            doing: what, for people.
            messages: bytes (uint8) for each other rank; an empty one is not sent.
            sizes: how many bytes come from each; None for as many as go there.
        """
        came = {
            rank: torch.empty(len(message) if sizes is None else sizes[rank], dtype=torch.uint8, device=self.device)
            for rank, message in messages.items()
        }
        operations = [self._send(messages[rank], rank, self.model) for rank in self._others() if len(messages[rank])]
        operations += [self._receive(came[rank], rank, self.model) for rank in self._others() if len(came[rank])]
        self._start(doing, operations).wait()
        return came

    def _gathering(self, owned: Sequence[Owned], tag: int) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = []
        for owner, data in owned:
            if owner != self.rank:
                operations.append(self._receive(data, owner, tag))
            else:
                operations += [self._send(data, rank, tag) for rank in self._others()]
        return operations

    def _others(self) -> list[int]:
        """The other ranks. The rank behind us is the first, so that not all send to the same one at once."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def _send(self, data: torch.Tensor, rank: int, tag: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, data, group=self.group, tag=tag, group_peer=rank)

    def _receive(self, data: torch.Tensor, rank: int, tag: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, data, group=self.group, tag=tag, group_peer=rank)

    def _start(
        self,
        doing: str,
        operations: list[dist.P2POp],
        then: Callable[[], None] | None = None,
        first: Callable[[], object] | None = None,
    ) -> Pending:
        turn = self.watch.turn(doing, f" of {sum(each.tensor.nbytes for each in operations):,} bytes")
        with self.watch.named(turn):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, self.watch, turn, then, first)


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors of a device go by gloo; a group may have a backend for each kind of device."""
    config = str(dist.get_backend_config(group))
    return dict(each.split(":") for each in config.split(",")).get(device.type) == "gloo"


def sum_in_order(contributions: Sequence[torch.Tensor], mine: int) -> torch.Tensor:
    """The sum of contributions, first to last. Those of 16 bits are added in float32, and so is their sum.

    Args:
        contributions: one-dimensional, of one size. All but `mine` may be written over.
        mine: the index of the one that is not to be changed.
    """
    if contributions[0].itemsize < torch.float32.itemsize:
        total = contributions[0].float()
        for contribution in contributions[1:]:
            total += contribution
        return total
    if len(contributions) == 1:
        return contributions[0].clone()
    total = torch.add(contributions[0], contributions[1], out=contributions[1 if mine == 0 else 0])
    for contribution in contributions[2:]:
        total += contribution
    return total
