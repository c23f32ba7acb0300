"""The data of a round: contributions out, averages in; and for the parts owned here, the other way round.

Each member opens one stream to each owner. The member sends its values of the owner's parts on it; the averages come
back on it, each as soon as it is done, so both directions are busy. A stream that breaks costs the round nothing by
itself: the owner leaves the sender out of the parts that are not done yet. The sender tells the decider which owner it
cannot reach, and gets another source or another owner. An auxiliary member opens no stream: it has nothing to send and
wants nothing. It serves the streams of the others.
"""

from __future__ import annotations

import asyncio

from shoal.allreduce.commit import Ask, Average, Contribute, MemberAction
from shoal.allreduce.interface import has_member, is_sound
from shoal.allreduce.owner import PartOwner
from shoal.allreduce.part_work import PartWork
from shoal.allreduce.partition import Part
from shoal.allreduce.streams import DownStream, Inbound, Outgoing, RoundView, UpStream, check_part
from shoal.errors import PeerError, PeerProtocolError, PeerRefused
from shoal.wire import Commit, Held, PartData, PartRequest

__all__ = ["Exchange"]

_FAREWELL_S = 1.0
"""A round waits so long at its end for the others to end their streams."""


class Exchange:
    """The data plane of one round, of one member.

    Args:
        round_: the round.
        silence_s: how long an owner waits for a silent sender.
    """

    def __init__(self, round_: RoundView, *, silence_s: float) -> None:
        self._round = round_
        self._work = PartWork(round_.vector, round_.env.executor, len(round_.parts))
        self._owner = PartOwner(round_, self._work, silence_s=silence_s, give=self._offer)
        self._outgoing: dict[int, Outgoing] = {}
        self._inbound: dict[int, Inbound] = {}
        self._moved_closed = 0
        self._serving: set[DownStream] = set()
        self._served = asyncio.Event()
        self._over = False

    # -------------------------------------------------------------------------------------------------------- start

    def start(self) -> None:
        """Send values to every owner, and begin to average the parts owned here."""
        for part in self._round.parts:
            if part.owner == self._round.me:
                self._owner.own(part.number, 0)
            elif self._round.rules.contributes:
                self._to(part.owner).put(Contribute(part.number, 0, part.owner))

    def act(self, actions: list[MemberAction]) -> None:
        """Carry out the decider's assignment."""
        for action in actions:
            match action:
                case Average(part, attempt):
                    self._free(part)
                    self._owner.own(part, attempt)
                case Contribute(part, _, owner) | Ask(part, _, owner):
                    self._free(part)
                    self._to(owner).put(action)
        self._owner.assigned()

    def ask(self, part: int, attempt: int, source: int) -> None:
        """Ask a member for an average that it should hold."""
        self._free(part)
        self._to(source).put(Ask(part, attempt, source))

    def _free(self, part: int) -> None:
        """Stop receiving older bytes of a part: their sender may be stuck, and the part's memory is needed."""
        for outgoing in self._outgoing.values():
            if outgoing.landing == part:
                outgoing.abort()

    def _to(self, owner: int) -> Outgoing:
        outgoing = self._outgoing.get(owner)
        if outgoing is None or outgoing.done:
            if outgoing is not None:
                self._moved_closed += outgoing.moved_bytes
            outgoing = self._outgoing[owner] = Outgoing(self._round, owner, self._land)
            self._round.spawn(outgoing.run())
        return outgoing

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received so far."""
        return (
            self._moved_closed
            + sum(outgoing.moved_bytes for outgoing in self._outgoing.values())
            + sum(inbound.moved_bytes for inbound in self._inbound.values())
        )

    def exclude(self, member: int) -> None:
        """Wait for this member's contributions no longer."""
        self._owner.exclude(member)

    def begin(self, now: float) -> None:
        """Nobody was silent before this moment."""
        self._owner.reducer.begin(now)

    def tick(self, now: float) -> None:
        """Check for members that send too slowly and members that are silent."""
        for sender, inbound in self._inbound.items():
            if inbound.grew():
                self._owner.reducer.heard(sender, now)
        self._owner.tick(now)

    # ------------------------------------------------------------------------------------------------------- serving

    async def serve(self, stream: DownStream, sender: int) -> None:
        """Serve a member's stream: take its contributions, give it averages."""
        if self._over:
            raise PeerRefused("the round is over")
        inbound = Inbound(self._round, stream, self._work)
        if (older := self._inbound.get(sender)) is not None:
            self._moved_closed += older.moved_bytes
        self._inbound[sender] = inbound
        self._serving.add(stream)
        for part, held in enumerate(self._round.rules.held):
            if held is not None and self._round.rules.owner[part] == self._round.me:
                inbound.offer(part)
        pump = self._round.spawn(inbound.pump())
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                if isinstance(message, PartData):
                    await self._owner.take(inbound, sender, message, nbytes)
                else:
                    self._requested(inbound, message, nbytes)
            inbound.close()
            await asyncio.wait((pump,))  # not `await pump`: it may have been cancelled with the round
        except PeerProtocolError as error:
            self._round.blame(sender, error.message)
            self._owner.exclude(sender)
            raise
        except PeerError as error:
            if not self._over:
                self._round.blame(sender, f"its values stopped: {error.message}")
            self._owner.exclude(sender)
            raise
        finally:
            pump.cancel()
            self._serving.discard(stream)
            self._served.set()

    def _offer(self, part: int) -> None:
        """Give an average to everybody who has a stream to us."""
        for inbound in self._inbound.values():
            inbound.offer(part)

    def _requested(self, inbound: Inbound, message: PartRequest, nbytes: int) -> None:
        part = check_part(self._round, message.part, message.attempt, inbound.stream)
        if nbytes:
            raise PeerProtocolError("a request with a payload", inbound.stream.peer_id)
        rules = self._round.rules
        held = rules.held[part.number]
        if held is not None and held.attempt >= message.attempt:
            inbound.offer(part.number)
        elif rules.owner[part.number] != self._round.me or rules.failed is not None or rules.commit is not None:
            inbound.refuse(part.number, message.attempt)
        # otherwise it is made here, and given to everybody when it is done

    # ------------------------------------------------------------------------------------------------------ receiving

    async def _land(self, outgoing: Outgoing, stream: UpStream, held: Held, nbytes: int) -> None:
        """Receive an average into its place, if it is wanted."""
        round_ = self._round
        part = check_part(round_, held.part, held.attempt, stream)
        if nbytes != round_.vector.encoded_bytes(part) or not is_sound(held, len(round_.members)):
            raise PeerProtocolError(f"a malformed average of part {part.number}", stream.peer_id)
        if round_.rules.wants(part.number, held.attempt):
            async with self._work.locks[part.number]:
                if round_.rules.wants(part.number, held.attempt):
                    await self._land_in_place(outgoing, stream, part, held, nbytes)
                    return
        await stream.readinto(outgoing.scratch(nbytes))

    async def _land_in_place(self, outgoing: Outgoing, stream: UpStream, part: Part, held: Held, nbytes: int) -> None:
        round_ = self._round
        round_.rules.expect(part.number, held.attempt)
        outgoing.landing = part.number
        try:
            place = round_.vector.landing(part)
            data = outgoing.scratch(nbytes) if place is None else place
            await stream.readinto(data)
            await self._work.light(part, round_.vector.land, part, data)
        except PeerProtocolError as error:
            raise PeerProtocolError(error.message, stream.peer_id) from None
        finally:
            outgoing.landing = None
        if round_.rules.averaged(held):
            round_.news()

    # --------------------------------------------------------------------------------------------------------- ending

    async def settle_values(self, commit: Commit) -> None:
        """Keep for the next round the average, and the losses of this member's encodings where these were counted."""
        round_, vector = self._round, self._round.vector
        vector.name_reference(b"")  # while the reference is neither the old one nor the new one
        for part, held in zip(round_.parts, commit.parts, strict=True):
            if vector.remembers(part):
                here = self._owner.averaged(part.number, held.attempt)
                counted = has_member(held.contributors, round_.me)
                await self._work.compute(part, vector.settle, part, averaged_here=here, counted=counted)
        if round_.rules.contributes:  # an auxiliary member has not got all averages
            vector.name_reference(round_.round_id)

    def step_aside(self) -> None:
        """The decider left itself out because it is slow: from now on it only decides. After the commit it may ask."""
        for outgoing in self._outgoing.values():
            self._moved_closed += outgoing.moved_bytes
            outgoing.retire()
        self._outgoing.clear()
        for stream in list(self._serving):
            stream.abort()

    async def finish(self) -> None:
        """The round is over: end our streams in order, and give the others a moment to end theirs."""
        await asyncio.gather(*(outgoing.finish() for outgoing in self._outgoing.values()))
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self.settle()
        except TimeoutError:
            pass  # a member that still wants something asks another one

    def stop(self) -> None:
        """Stop taking and giving values."""
        self._over = True
        for stream in list(self._serving):
            stream.abort()
        self._owner.stop()

    async def settle(self) -> None:
        """Wait until no stream is served: after `stop`, and the round's tasks, nothing uses the vector any more."""
        while self._serving:
            self._served.clear()
            await self._served.wait()

    def let_go(self) -> None:
        """All is over: drop all references to the round (see `Round.close`)."""
        self._outgoing.clear()
        self._inbound.clear()
        del self._round, self._owner
