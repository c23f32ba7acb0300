"""The parts that are owned here: contributions are added as they come, then divided, encoded and given to everybody.

`ReducerRules` knows which senders to wait for; here the numbers are added. An owner is cut off if it has no weight,
receives no values with weight, and a sender is missing: it then hands its parts on instead of reporting an average of
nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.allreduce.digest import NO_DIGEST
from shoal.allreduce.interface import is_weight
from shoal.allreduce.part_work import PartWork
from shoal.allreduce.partition import Part
from shoal.allreduce.reducer import ReducerRules
from shoal.allreduce.streams import Inbound, RoundView, check_part
from shoal.errors import PeerProtocolError
from shoal.wire import Held, PartData

__all__ = ["PartOwner"]


class PartOwner:
    """Averages the parts that this member owns.

    Args:
        round_: the round.
        work: computes parts.
        silence_s: how long a silent sender is waited for.
        give: called with each part that is done and has an average.

    Attributes:
        reducer: the rules that say which senders to wait for.
    """

    def __init__(self, round_: RoundView, work: PartWork, *, silence_s: float, give: Callable[[int], None]) -> None:
        self._round, self._work, self._give = round_, work, give
        self._loop = asyncio.get_running_loop()
        contributors = [i for i, member in enumerate(round_.members) if member.contributes]
        self.reducer = ReducerRules(round_.me, contributors, silence_s=silence_s, now=self._loop.time())
        self._weights: dict[tuple[int, int], float] = {}
        self._begun: dict[tuple[int, int], asyncio.Event] = {}
        self._assigned = asyncio.Event()
        self._over = False

    # ------------------------------------------------------------------------------------------------------ averaging

    def own(self, part: int, attempt: int) -> None:
        """Average this part from now on."""
        self._weights[part, attempt] = 0.0
        self._begun[part, attempt] = asyncio.Event()
        ready = self.reducer.own(part, attempt, self._loop.time())
        self._round.spawn(self._begin(self._round.parts[part], attempt))
        self._finish(ready)  # after `_begin`: the lock is given in order

    def averaged(self, part: int, attempt: int) -> bool:
        """Return whether the average of this part and attempt was made here: each attempt has one owner."""
        return (part, attempt) in self._weights

    async def _begin(self, part: Part, attempt: int) -> None:
        round_, work = self._round, (part.number, attempt)
        counts = round_.weight > 0
        try:
            async with self._work.locks[part.number]:
                if round_.rules.attempt[part.number] != attempt:
                    return  # it has another owner already
                await self._work.light(part, round_.vector.begin_sum, part, round_.weight)
        finally:
            self._begun[work].set()  # in any case: streams wait for it
        self._weights[work] += round_.weight
        self._finish(self.reducer.contributed(*work, round_.me, counts=counts, now=self._loop.time()))

    def _finish(self, ready: list[tuple[int, int]]) -> None:
        for work in ready:
            self._round.spawn(self._finish_part(*work))

    async def _finish_part(self, number: int, attempt: int) -> None:
        round_, part = self._round, self._round.parts[number]
        contributors = _mask(self.reducer.contributors[number, attempt], len(round_.members))
        async with self._work.locks[number]:
            if round_.rules.attempt[number] != attempt or not round_.rules.wants(number, attempt):
                return  # it has another owner by now
            if not any(contributors) and self.reducer.cut_off(number, attempt):
                round_.cut_off("no values with a weight came: members that contribute are lost or too slow")
                return
            total = self._weights[number, attempt]
            digest = NO_DIGEST
            if any(contributors):
                digest = await self._work.light(part, round_.vector.finish, part, total, round_.digests)
            held = Held(number, attempt, contributors, total, digest)
            news = round_.rules.averaged(held)
        if news:
            if any(contributors):
                self._give(number)
            round_.news()

    # --------------------------------------------------------------------------------------------------- contributions

    async def take(self, inbound: Inbound, sender: int, message: PartData, nbytes: int) -> None:
        """Take a member's values of a part.

        Raises:
            PeerProtocolError: the values are invalid.
            PeerUnreachable: the stream is lost.
        """
        stream, round_ = inbound.stream, self._round
        part = check_part(round_, message.part, message.attempt, stream)
        weight, work = message.weight, (message.part, message.attempt)
        if not is_weight(weight):
            raise PeerProtocolError(f"weight {weight}", stream.peer_id)
        if nbytes != (round_.vector.encoded_bytes(part) if weight > 0 else 0):
            raise PeerProtocolError(f"{nbytes} bytes for part {part.number}", stream.peer_id)
        while message.attempt > round_.rules.attempt[part.number] and not self._over:
            await self._assigned.wait()  # the sender heard of the new attempt before us
        data = await inbound.read(nbytes)
        if not self.reducer.expects(*work, sender):
            return
        if weight == 0:
            self._finish(self.reducer.contributed(*work, sender, counts=False, now=self._loop.time()))
            return
        try:
            values = await self._work.light(part, round_.vector.decoded, part, data, weight)
        except PeerProtocolError as error:
            raise PeerProtocolError(error.message, stream.peer_id) from None
        if not self.reducer.expects(*work, sender):
            return
        await self._begun[work].wait()
        # Counted before it is added; the part cannot be finished in between, because that needs the lock too.
        async with self._work.locks[part.number]:
            # A newer attempt may be in its place already: sums and received averages share their memory.
            if round_.rules.attempt[part.number] != message.attempt or not self.reducer.expects(*work, sender):
                return
            self._weights[work] += weight
            ready = self.reducer.contributed(*work, sender, counts=True, now=self._loop.time())
            await self._work.light(part, round_.vector.add, part, values, weight)
        self._finish(ready)

    def exclude(self, member: int) -> None:
        """Wait for this member's contributions no longer."""
        self._finish(self.reducer.exclude(member))

    def tick(self, now: float) -> None:
        """Check for members that are silent or far behind."""
        for sender in self.reducer.stalled(now):
            self._round.blame(sender, "too slow: left out of the parts that are not averaged yet")
            self.exclude(sender)

    # ------------------------------------------------------------------------------------------------------------ ends

    def assigned(self) -> None:
        """The decider has assigned something: tasks that wait for an attempt look again."""
        self._assigned.set()
        self._assigned = asyncio.Event()

    def stop(self) -> None:
        """Wake all tasks that wait."""
        self._over = True
        self._assigned.set()
        for begun in self._begun.values():
            begun.set()


def _mask(members: set[int], count: int) -> bytes:
    """Bit i for member i."""
    return sum(1 << member for member in members).to_bytes((count + 7) // 8, "little")
