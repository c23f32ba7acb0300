"""The streams of values and averages of one member of a round: one to each reducer, and one from each other member.

A stream that breaks costs the round nothing by itself: the reducer leaves the sender out of the tiles that are not done
yet; the sender looks for another source of what it lacks. An auxiliary member opens none: it serves those of the
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from shoal.averaging.allreduce.commit import Ask, Contribute
from shoal.averaging.allreduce.farewell import OpenStreams
from shoal.averaging.allreduce.member import MemberAction, MemberMachine
from shoal.averaging.allreduce.round_tiles import RoundTiles
from shoal.averaging.allreduce.streams import Answer, DownStream, ReducerStream, SenderStream, UpStream
from shoal.averaging.allreduce.witness import Witness
from shoal.base.ordered import OrderedSet
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Tasks
from shoal.errors import PeerError, PeerProtocolError, PeerRefused
from shoal.protocol.wire import CommitDigest, PartAbsent, PartAverage, PartData, PartRequest, Reduce
from shoal.rpc import Endpoint

__all__ = ["Exchange"]


class Exchange:
    """One member's streams.

    Args:
        endpoint: opens streams.
        opening: the first message on each of ours.
        machine: this member. It says what is wanted, and whose values are waited for.
        tiles: the memory.
        witness: hears of members that give something, and of those that break the protocol.
        tasks: those that read and write.
        done: this member has the verdict, or has given up.
        do: carries out what the machine answers.

    Attributes:
        open: the streams that have not ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        opening: Reduce,
        machine: MemberMachine,
        tiles: RoundTiles,
        witness: Witness,
        tasks: Tasks,
        done: asyncio.Future[None],
        *,
        do: Callable[[Iterable[MemberAction]], None],
    ) -> None:
        self._endpoint, self._opening, self._machine, self._tiles = endpoint, opening, machine, tiles
        self._witness, self._tasks, self._done, self._do = witness, tasks, done, do
        self._senders: dict[int, SenderStream] = {}
        self._reducing: dict[int, ReducerStream] = {}
        self._serving = OrderedSet[DownStream]()
        self._moved_before = 0  # on streams that are over
        self.open, self._over = OpenStreams(), False

    @property
    def moved_bytes(self) -> int:
        """Bytes of values and averages, sent and received so far."""
        streams: list[SenderStream | ReducerStream] = [*self._senders.values(), *self._reducing.values()]
        return self._moved_before + sum(stream.moved_bytes for stream in streams)

    def heard(self) -> Iterator[int]:
        """The members that have sent values since the last call."""
        return (sender for sender, stream in self._reducing.items() if stream.grew())

    # ------------------------------------------------------------------------------------ our values, their averages

    def put(self, action: Contribute | Ask) -> None:
        """Send a reducer our values of a tile, or ask a member for the average that it has."""
        if action.attempt or isinstance(action, Ask):  # at first nothing older can come
            self.free(action.tile)
        self._sender_to(action.reducer).put(action)

    def free(self, tile: int) -> None:
        """Stop receiving older bytes of a tile: their sender may be stuck, and the tile's memory is needed."""
        for sender in self._senders.values():
            if sender.landing == tile:
                sender.abort()

    def _sender_to(self, reducer: int) -> SenderStream:
        sender = self._senders.get(reducer)
        if sender is None or sender.done:
            if sender is not None:
                self._moved_before += sender.moved_bytes
            contact = self._machine.members[reducer].contact
            sender = SenderStream(self._endpoint, contact, self._opening, values=self._tiles.contribution)
            self._senders[reducer] = sender
            self._tasks.spawn(self._send(reducer, sender))
        return sender

    async def _send(self, reducer: int, sender: SenderStream) -> None:
        try:
            await sender.run(partial(self._answered, reducer))
        except PeerError as error:
            if isinstance(error, PeerProtocolError):
                self._witness.lied(reducer, error.message)
            if not sender.retired:
                self._witness.blame(reducer, f"its averages stopped: {error.message}")
                self._do(self._machine.source_lost(reducer, None))

    async def _answered(
        self, reducer: int, sender: SenderStream, stream: UpStream, message: Answer, nbytes: int
    ) -> None:
        self._witness.lives(reducer)
        if isinstance(message, CommitDigest):
            self._witness.compare(message, nbytes, stream.peer_id)
        elif isinstance(message, PartAverage):
            if await self._tiles.land(reducer, sender, stream, message.held, nbytes):
                self._do(self._machine.given(message.held.tile))
            elif self._machine.rules.commit is not None:  # another average than the committed one: ask the next
                self._do(self._machine.source_lost(reducer, PartAbsent(message.held.tile, message.held.attempt)))
        elif nbytes or not 0 <= message.tile < len(self._machine.rules.reducer):
            raise PeerProtocolError(f"no tile {message.tile}", stream.peer_id)
        else:
            self._do(self._machine.source_lost(reducer, message))

    # ------------------------------------------------------------------------------------ their values, our averages

    async def serve(self, stream: DownStream, sender: int) -> None:
        """Serve a member's stream: take its values, give it averages."""
        if self._over:
            raise PeerRefused("the round is over")
        served = ReducerStream(stream, self._tiles.average)
        if (older := self._reducing.get(sender)) is not None:
            self._moved_before += older.moved_bytes
        self._reducing[sender] = served
        self._serving.add(stream)
        self.open.opened(sender)
        rules = self._machine.rules
        for tile, held in enumerate(rules.held):
            if held is not None and rules.reducer[tile] == self._machine.me:
                served.offer(tile)
        pump = self._tasks.spawn(served.pump())
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                self._witness.lives(sender)
                if isinstance(message, PartData):
                    self._do(await self._tiles.add(message, nbytes, sender, stream.peer_id, served.read))
                elif isinstance(message, CommitDigest):
                    await self._told_commit(stream, message, nbytes)
                else:
                    self._requested(served, message, nbytes)
            served.close()
            await asyncio.wait((pump,))  # not `await pump`: it may have been cancelled with the round
        except PeerError as error:
            if isinstance(error, PeerProtocolError):
                self._witness.lied(sender, error.message)
            elif not self._over:
                self._witness.blame(sender, f"its values stopped: {error.message}")
            self._do(self._machine.contributions.exclude(sender))
            raise
        finally:
            pump.cancel()
            self._serving.discard(stream)
            self.open.ended(sender)

    def offer(self, tile: int) -> None:
        """The average of this tile is done: give it to everybody who has a stream to us."""
        for stream in self._reducing.values():
            stream.offer(tile)

    def _requested(self, served: ReducerStream, message: PartRequest, nbytes: int) -> None:
        tile = message.tile
        self._tiles.named(tile, message.attempt, served.stream.peer_id)
        if nbytes:
            raise PeerProtocolError("a request with a payload", served.stream.peer_id)
        rules = self._machine.rules
        held = rules.held[tile]
        if held is not None and held.attempt >= message.attempt:
            served.offer(tile)
        elif rules.reducer[tile] != self._machine.me or rules.failed is not None or rules.commit is not None:
            sometimes("an average is asked for where it will never be")
            served.refuse(tile, message.attempt)
        # otherwise it is made here, and given to everybody when it is done

    async def _told_commit(self, stream: DownStream, told: CommitDigest, nbytes: int) -> None:
        """A member that has ended its round tells us its commit. If it is not ours, it is to have the proof, too."""
        if not self._done.done():
            sometimes("a member tells its commit before its reducer has one")
            await asyncio.wait((self._done,))
        if (mine := self._witness.compare(told, nbytes, stream.peer_id)) is not None:
            await stream.send(mine)

    # ------------------------------------------------------------------------------------------------------- the end

    def step_aside(self) -> None:
        """This member takes part no more, as it is slow. After the commit it may ask for averages."""
        for sender in self._senders.values():
            self._moved_before += sender.moved_bytes
            sender.retired = True
            sender.abort()
        self._senders.clear()
        for stream in list(self._serving):
            stream.abort()

    def end(self, told: CommitDigest | None) -> None:
        """End our streams in order, with what the others are told of our commit. Theirs are served on until `stop`."""
        for reducer, sender in self._senders.items():
            self.open.keep(reducer, self._tasks.spawn(sender.finish(told)))

    def stop(self) -> None:
        """Serve nobody any more."""
        self._over = True
        for stream in list(self._serving):
            stream.abort()

    async def settled(self) -> None:
        """Wait until no stream is served: then, without the round's tasks, nothing uses the vector any more."""
        while self._serving:
            await self.open.one_ended()
