"""The memory of a round's tiles: sums, averages that arrive, and the work on them.

Summing, finishing and receiving a tile use the same memory. One lock for each tile keeps them apart; under it code
waits only for the bytes of that tile. Small work is done in the loop, large work in another thread.

`MemberMachine` says what is wanted and whose values are waited for; here the numbers are added, divided and received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

from msgspec.structs import replace

from shoal.averaging.allreduce.interface import OUTWEIGHS, has_member, is_weight
from shoal.averaging.allreduce.member import CutOff, Finish, MemberMachine, Work
from shoal.averaging.allreduce.streams import SenderStream, UpStream
from shoal.averaging.allreduce.vector import NO_DIGEST, TileDigests, Vector
from shoal.base.clock import Executor, shielded
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes
from shoal.errors import PeerProtocolError
from shoal.layout import Tile
from shoal.protocol.wire import Commit, Held, PartAbsent, PartAverage, PartData
from shoal.transport.base import Buffer

__all__ = ["RoundTiles", "TileWork"]

_INLINE_ELEMENTS = 1 << 14
"""Smaller tiles are computed in the loop: a hop to another thread would cost more."""

_LIGHT_ELEMENTS = 1 << 19
"""Up to this size the same holds for work that takes little more than a copy: adding, looking for NaN, finishing. A hop
there and back costs the loop 0.1 ms, adding 1 MiB takes as long."""

P = ParamSpec("P")
T = TypeVar("T")


class TileWork:
    """Runs the work on tiles, in the loop or in another thread.

    Args:
        vector: the numbers.
        executor: computes large tiles.
        tiles: how many tiles there are.

    Attributes:
        locks: one for each tile.
    """

    def __init__(self, vector: Vector, executor: Executor, tiles: int) -> None:
        self.locks = [asyncio.Lock() for _ in range(tiles)]
        self._vector, self._executor = vector, executor

    async def light(self, tile: Tile, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `compute`, for work that is small if the codec's work is small."""
        if tile.numel <= _LIGHT_ELEMENTS and self._vector.is_light(tile):
            return function(*args, **kwargs)
        return await self.compute(tile, function, *args, **kwargs)

    async def compute(self, tile: Tile, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a tile: in the loop or in another thread, as its size advises."""
        if tile.numel <= _INLINE_ELEMENTS:
            return function(*args, **kwargs)
        # A function that runs in another thread cannot be stopped: the tile is not free until it has ended, even if the
        # caller is cancelled meanwhile. The next attempt gets the memory as soon as it gets the lock.
        return await shielded(self._executor.run(function, *args, **kwargs))


class RoundTiles:
    """The tiles of one round, at one member.

    Args:
        vector: the numbers.
        tiles: all tiles of the round, in order.
        machine: this member.
        executor: computes large tiles.
        weight: of this member's values.

    Attributes:
        outweighing: a member with more than `OUTWEIGHS` times the weight of all others in a tile that is averaged here,
            its weight, and theirs together; None if there is none.
    """

    def __init__(
        self,
        vector: Vector,
        tiles: Sequence[Tile],
        machine: MemberMachine,
        executor: Executor,
        *,
        weight: float,
    ) -> None:
        self.outweighing: tuple[int, float, float] | None = None
        self._told: dict[int, float] = {machine.me: weight}  # the weight of each member, once it has told it
        self._vector, self._tiles, self._machine, self._weight = vector, tiles, machine, weight
        self._members = len(machine.members)
        self._work, self._digests = TileWork(vector, executor, len(tiles)), TileDigests(machine.round_id)
        self._weights: dict[Work, float] = {}
        self._begun: dict[Work, asyncio.Event] = {}
        self._orders = Changes()
        self._over = False

    def has_told(self, member: int) -> bool:
        """Whether this member has told the weight of its values, 0 included."""
        return member in self._told

    def named(self, number: int, attempt: int, sender: PeerID) -> Tile:
        """The tile that a message names.

        Raises:
            PeerProtocolError: there is none.
        """
        # There is at most one new attempt for each member that is lost.
        if not 0 <= number < len(self._tiles) or not 0 <= attempt <= self._members:
            raise PeerProtocolError(f"tile {number} attempt {attempt} is not in this round", sender)
        return self._tiles[number]

    def contribution(self, number: int, attempt: int) -> tuple[PartData, Buffer | None] | None:
        """My values of a tile, as they are sent; None if that attempt is over."""
        if self._machine.rules.attempt[number] != attempt:
            return None
        message = PartData(number, attempt, self._weight)
        return message, self._vector.contribution(self._tiles[number]) if self._weight > 0 else None

    # ------------------------------------------------------------------------------------------------- tiles owned here

    def own(self, number: int, attempt: int) -> None:
        """This tile is averaged here from now on: `begin` follows."""
        self._weights[number, attempt] = 0.0
        self._begun[number, attempt] = asyncio.Event()

    async def begin(self, number: int, attempt: int) -> list[Finish]:
        """Start to sum a tile, with my own values."""
        tile, work = self._tiles[number], (number, attempt)
        try:
            async with self._work.locks[number]:
                if self._machine.rules.attempt[number] != attempt:
                    sometimes("a tile has another reducer before its sum has begun")
                    return []  # it has another reducer already
                await self._work.light(tile, self._vector.begin_sum, tile, self._weight)
        finally:
            self._begun[work].set()  # in any case: streams wait for it
        self._weights[work] += self._weight
        return self._contributed(work, self._machine.me, counts=self._weight > 0)

    async def add(
        self, message: PartData, nbytes: int, sender: int, peer: PeerID, read: Callable[[int], Awaitable[memoryview]]
    ) -> list[Finish]:
        """Add a member's values of a tile.

        Args:
            message: names the tile.
            nbytes: of its payload.
            sender: index of the member.
            peer: the member.
            read: reads that many bytes.

        Raises:
            PeerProtocolError: the values are invalid.
            PeerUnreachable: the stream is lost.
        """
        weight, work = message.weight, (message.tile, message.attempt)
        tile = self.named(*work, peer)
        if not is_weight(weight):
            raise PeerProtocolError(f"weight {weight}", peer)
        if weight > (most := self._machine.most_weights[sender]):
            raise PeerProtocolError(f"weight {weight:g}, which is more than the {most:g} it may have", peer)
        if weight != self._told.setdefault(sender, weight):
            raise PeerProtocolError(f"weight {weight:g} after {self._told[sender]:g} in the same round", peer)
        if nbytes != (self._vector.encoded_bytes(tile) if weight > 0 else 0):
            raise PeerProtocolError(f"{nbytes} bytes for tile {message.tile}", peer)
        rules, contributions = self._machine.rules, self._machine.contributions
        await self._assigned(*work)
        data = await read(nbytes)
        if not contributions.expects(*work, sender):
            return []
        if weight == 0:
            return self._contributed(work, sender, counts=False)
        try:
            values = await self._work.light(tile, self._vector.decoded, tile, data, weight)
        except PeerProtocolError as error:
            raise PeerProtocolError(error.message, peer) from None
        if not contributions.expects(*work, sender):
            return []
        await self._begun[work].wait()
        # Counted before it is added; the tile cannot be finished in between, because that needs the lock too.
        async with self._work.locks[message.tile]:
            # A newer attempt may be in its place already: sums and received averages share their memory.
            if rules.attempt[message.tile] != message.attempt or not contributions.expects(*work, sender):
                return []
            self._weights[work] += weight
            ready = self._contributed(work, sender, counts=True)
            await self._work.light(tile, self._vector.add, tile, values, weight)
        return ready

    def _contributed(self, work: Work, sender: int, *, counts: bool) -> list[Finish]:
        now = asyncio.get_running_loop().time()
        return self._machine.contributions.contributed(*work, sender, counts=counts, now=now)

    async def finish(self, number: int, attempt: int) -> Held | CutOff | None:
        """Divide the sum of a tile: its average, if it is wanted still."""
        rules, tile, contributions = self._machine.rules, self._tiles[number], self._machine.contributions
        contributors = _mask(contributions.contributors[number, attempt], self._members)
        async with self._work.locks[number]:
            if rules.attempt[number] != attempt or not rules.wants(number, attempt):
                sometimes("a tile has another reducer when its sum is complete")
                return None  # it has another reducer by now
            if not any(contributors) and contributions.cut_off(number, attempt):
                sometimes("a reducer gets no values from anybody")
                return CutOff("no values with a weight came: members that contribute are lost or too slow")
            self._look_for_one(contributions.contributors[number, attempt])
            held = Held(number, attempt, contributors, self._weights[number, attempt], NO_DIGEST)
            if any(contributors):
                held = replace(held, digest=await self._work.light(tile, self._divided, tile, held))
            return held if self._averaged(held, self._machine.me) else None

    def _averaged(self, held: Held, giver: int) -> bool:
        return self._machine.averaged(held, asyncio.get_running_loop().time(), giver)

    def _divided(self, tile: Tile, held: Held) -> bytes:
        return self._digests.of(held, self._vector.finish(tile, held.weight))

    def _look_for_one(self, members: set[int]) -> None:
        """Look whether one member has nearly all of the weight of a tile."""
        weights = sorted((self._told[member], member) for member in members)
        if len(weights) > 1 and weights[-1][0] > OUTWEIGHS * (others := sum(weight for weight, _ in weights[:-1])):
            self.outweighing = weights[-1][1], weights[-1][0], others

    async def _assigned(self, number: int, attempt: int) -> None:
        """Wait until the attempt is known here: the sender may have heard of it before us, or made it up."""
        while self._machine.is_ahead(number, attempt) and not self._over:
            sometimes("a member sends something of an attempt that is not known here yet")
            await self._orders.next()

    def heard(self) -> None:
        """The coordinator has said something: tasks that wait for an attempt look again."""
        self._orders.notify()

    def stop(self) -> None:
        """Wake all tasks that wait."""
        self._over = True
        self._orders.notify()
        for begun in self._begun.values():
            begun.set()

    # ----------------------------------------------------------------------------------------------------- averages

    async def land(self, giver: int, sender: SenderStream, stream: UpStream, held: Held, nbytes: int) -> bool:
        """Receive an average into its place, if it is wanted; its bytes are read in any case.

        Args:
            giver: the member that it comes from.
            sender: the stream that it comes on.
            stream: the same, as it is read.
            held: names the average.
            nbytes: of its payload.

        Returns:
            Whether this member holds the tile now, and did not before.

        Raises:
            PeerProtocolError: it is malformed.
        """
        tile, rules = self.named(held.tile, held.attempt, stream.peer_id), self._machine.rules
        if nbytes != self._vector.encoded_bytes(tile):
            raise PeerProtocolError(f"a malformed average of tile {held.tile}", stream.peer_id)
        if not self._machine.is_sound(held):
            raise PeerProtocolError(f"an average of tile {held.tile} with the weight {held.weight:g}", stream.peer_id)
        await self._assigned(held.tile, held.attempt)
        if self._machine.takes(held.tile, held.attempt, giver):
            async with self._work.locks[held.tile]:
                if self._machine.takes(held.tile, held.attempt, giver):
                    rules.expect(held.tile, held.attempt)
                    await self._land_in_place(sender, stream, tile, held, nbytes)
                    return self._averaged(held, giver)
        sometimes("an average comes that is held already")
        await stream.readinto(sender.scratch(nbytes))
        return False

    async def _land_in_place(self, sender: SenderStream, stream: UpStream, tile: Tile, held: Held, nbytes: int) -> None:
        sender.landing = held.tile
        try:
            place = self._vector.landing(tile)
            data = sender.scratch(nbytes) if place is None else place
            await stream.readinto(data)
            await self._work.light(tile, self._checked, tile, held, data)
        except PeerProtocolError as error:
            raise PeerProtocolError(error.message, stream.peer_id) from None
        finally:
            sender.landing = None

    def _checked(self, tile: Tile, held: Held, data: memoryview) -> None:
        if self._digests.of(held, data) != held.digest:
            raise PeerProtocolError(f"an average of tile {held.tile} that is not the one that its digest names")
        self._vector.land(tile, data)

    async def average(self, number: int) -> tuple[PartAverage | PartAbsent, Buffer | None] | None:
        """The average of a tile that is held here, as it is sent; None if there is none to send."""
        held, tile = self._machine.rules.held[number], self._tiles[number]
        if held is None or not any(held.contributors):
            return None
        data = self._vector.ready_bytes(tile)
        if data is None:
            make = self._vector.average_bytes
            data = await self._work.compute(tile, make, tile, held, self._digests)
        return (PartAbsent(number, held.attempt), None) if data is None else (PartAverage(held), data)

    async def settle(self, commit: Commit) -> None:
        """Keep for the next round the average, and the losses of this member's encodings where these were counted."""
        vector = self._vector
        vector.name_reference(b"")  # while the reference is neither the old one nor the new one
        for tile, held in zip(self._tiles, commit.tiles, strict=True):
            if vector.remembers(tile):
                here = (held.tile, held.attempt) in self._weights  # each attempt has one reducer
                counted = has_member(held.contributors, self._machine.me)
                await self._work.compute(tile, vector.settle, tile, averaged_here=here, counted=counted)
        if self._machine.rules.contributes:  # an auxiliary member has not got all averages
            vector.name_reference(commit.round_id)


def _mask(members: set[int], count: int) -> bytes:
    """Bit i for member i."""
    return sum(1 << member for member in members).to_bytes((count + 7) // 8, "little")
