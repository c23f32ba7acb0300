"""The rounds of one endpoint: incoming streams find the round that they belong to, and recent verdicts stay known."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shoal.averaging.allreduce.streams import DownStream
from shoal.base.bounded import put_last
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes
from shoal.errors import PeerRefused
from shoal.protocol.identity import Identity
from shoal.protocol.wire import MAX_GROUP_SIZE, AskVerdict, Commit, Reduce, Verdict
from shoal.rpc import Endpoint

if TYPE_CHECKING:
    from shoal.averaging.allreduce.round import Round

__all__ = ["RoundTable"]

_ARRIVAL_S = 10.0
"""A `Reduce` stream waits so long for its round to begin here."""

_MAX_EARLY_STREAMS = 2 * MAX_GROUP_SIZE
"""The most `Reduce` streams that wait for their rounds: those of all members of two."""

_REMEMBERED_IDS = 4096
"""The number of rounds whose ids are remembered: this peer takes part in no other round with one of them."""

_REMEMBERED_VERDICTS = 64
"""The number of rounds whose verdicts are remembered."""


class RoundTable:
    """The rounds of one endpoint: brings incoming streams to them, and answers for recent ones.

    Args:
        endpoint: the endpoint of this peer; several averagers share one table.
        identity: signs what this peer commits.
    """

    def __init__(self, endpoint: Endpoint, identity: Identity) -> None:
        self.endpoint, self.identity = endpoint, identity
        self._rounds: dict[bytes, Round] = {}
        self._begun, self._early = Changes(), 0
        self._used: dict[bytes, PeerID] = {}
        self._verdicts: dict[bytes, Commit] = {}
        endpoint.serve_stream(Reduce, self._serve)
        endpoint.serve(AskVerdict, self._answer)

    def add(self, round_: Round) -> PeerID | None:
        """A round begins here.

        Returns:
            The leader of another round with the same id: then this one must not begin, as what was signed in the other
            one could be shown in it. None if there was no such round.
        """
        if (first := self._used.get(round_.round_id)) is not None:
            return first
        put_last(self._used, round_.round_id, round_.leader, _REMEMBERED_IDS)
        self._rounds[round_.round_id] = round_
        self._begun.notify()
        return None

    def remove(self, round_: Round) -> None:
        """A round is over; its verdict stays known for a while."""
        if self._rounds.get(round_.round_id) is round_:
            del self._rounds[round_.round_id]
        if round_.machine.rules.commit is not None:
            put_last(self._verdicts, round_.round_id, round_.machine.rules.commit, _REMEMBERED_VERDICTS)

    async def _serve(self, stream: DownStream, opening: Reduce) -> None:
        round_ = self._rounds.get(opening.round_id) or await self._arrival(opening.round_id)
        await round_.serve(stream, opening)

    async def _arrival(self, round_id: bytes) -> Round:
        """A member may hear of the beginning before we do."""
        if round_id in self._verdicts or self._early >= _MAX_EARLY_STREAMS:
            raise PeerRefused("this round is over, or too many wait")
        sometimes("values come before their round has begun here")
        self._early += 1
        try:
            async with asyncio.timeout(_ARRIVAL_S):
                while round_id not in self._rounds:
                    await self._begun.next()
        except TimeoutError:
            raise PeerRefused("no such round has begun here") from None
        finally:
            self._early -= 1
        return self._rounds[round_id]

    async def _answer(self, peer: PeerID, request: AskVerdict) -> Verdict:
        if (round_ := self._rounds.get(request.round_id)) is not None:
            return round_.verdict
        return Verdict(self._verdicts.get(request.round_id), may_learn=False)
