"""The feed for peers that catch up: the last steps that this peer knows of, with their averages.

While nobody follows, nothing is kept. While somebody does, the last step is kept for the next follower, which is told
of it first. So a new follower gets a step at once, however long an epoch lasts, and a copy of the state before that
step is of use to it.

A follower has a stream open. It is told of each step as it is committed, and fetches the step's averages within the
time of about two steps: this peer keeps the last `KEPT` of them, and those that are being sent. While a round of this
peer is under way it sends none of them, or little if the round takes long (`HOLD_S`). A follower needs one step for
each round, so its share of the line between two rounds is bounded.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from shoal.allreduce.vector import Vector
from shoal.averager import Averager, StepResult
from shoal.core import PeerCore
from shoal.errors import PeerProtocolError, PeerRefused
from shoal.optim.agreement import Agreement
from shoal.optim.state_name import StateName
from shoal.optim.steps import Step, name_after, name_before, of_round, of_step_alone
from shoal.rpc import Stream
from shoal.state import Pacer
from shoal.state.pace import FREE_PIECE_BYTES, HELD_PIECE_BYTES
from shoal.state.upload import Upload
from shoal.tasks import Changes
from shoal.wire import FollowSteps, StepBytes, StepGone, StepsFrom, StepTaken, WantStep

__all__ = ["HOLD_S", "KEPT", "MAX_FOLLOWERS", "StepFeed"]

KEPT = 2
"""Steps that are kept while somebody follows: the last one, and the one before."""

MAX_FOLLOWERS = 16
MAX_WANTED = 16
HOLD_S = 1.5
"""A piece waits no longer than this for the end of a round, seconds."""

_SEND_WITHIN_S = 30.0
"""For one piece; a follower that takes nothing for so long is dropped."""

_Answer = StepsFrom | StepTaken | StepBytes | StepGone


class StepFeed:
    """Tells followers of this peer's steps. Loop only.

    Args:
        core: this peer.
        run_id: names the run.
        state: returns the state from which a new follower is told of all steps, as soon as there is one.
        averagers: of this peer; their rounds come first.
    """

    def __init__(
        self,
        core: PeerCore,
        run_id: str,
        state: Callable[[], Awaitable[StateName]],
        averagers: Sequence[Averager],
    ) -> None:
        self._core, self._state, self._averagers = core, state, averagers
        self._followers: set[_Follower] = set()
        self._hosts: Counter[str] = Counter()  # of the followers
        self._last: Step | None = None
        self._unserve = core.endpoint.serve_stream(FollowSteps, self._serve, scope=run_id)

    async def add_round(
        self, name: StateName, result: StepResult, vector: Vector, agreement: Agreement | None = None
    ) -> None:
        """A round was committed. Call it before the next one of this vector begins.

        Args:
            name: of the state that it was made at.
            result: of the round.
            vector: that was averaged.
            agreement: how the step is taken; None if states were averaged.
        """
        if self._followers:
            self._add(await self._core.env.executor.run(of_round, name, result, vector, agreement))

    async def add_alone(
        self, name: StateName, chance: bytes, samples: int, vector: Vector, agreement: Agreement
    ) -> None:
        """This peer is about to step alone, from the tensors of this vector (call it under their lock)."""
        if self._followers:
            peer, run = self._core.peer_id.raw, self._core.env.executor.run
            self._add(await run(of_step_alone, name, chance, peer, samples, vector, agreement))

    def _add(self, step: Step | None) -> None:
        if step is not None and self._followers:
            self._last = step
            for follower in self._followers:
                follower.add(step)

    def close(self) -> None:
        """Tell nobody anything more. Safe to call twice."""
        self._unserve()

    async def _serve(self, stream: Stream[_Answer, WantStep], opening: FollowSteps) -> None:
        host = self._core.endpoint.hosts_of(stream.peer_id)[1]
        # Keys are free: a host that has all other places does not get the last quarter.
        if len(self._followers) >= MAX_FOLLOWERS or self._hosts[host] >= MAX_FOLLOWERS - MAX_FOLLOWERS // 4:
            raise PeerRefused("busy: too many peers catch up at the moment", code="busy")
        follower = _Follower(stream, self._core.pacer(), self._averagers)
        self._followers.add(follower)
        self._hosts[host] += 1
        try:
            with Upload.of(self._core.endpoint).stream(stream):  # it is no round, to which states give way
                state, last = await self._state(), self._last
                if last is not None and name_after(last.header) == state:
                    follower.add(last)
                    state = name_before(last.header)
                await follower.run(state)
        finally:
            self._followers.discard(follower)
            self._hosts -= Counter({host: 1})
            if not self._followers:
                self._last = None
            await follower.close()


class _Follower:
    """One peer that catches up: the steps that it was told of, and those that it has asked for."""

    def __init__(self, stream: Stream[_Answer, WantStep], pacer: Pacer, averagers: Sequence[Averager]) -> None:
        self._stream, self._pacer, self._averagers = stream, pacer, averagers
        self._kept: dict[bytes, Step] = {}  # by the digest of the state before
        self._untold: deque[StepTaken] = deque()
        self._wanted: dict[bytes, int] = {}  # and how much of it was sent
        self._news = Changes()
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self._reader.add_done_callback(lambda _: self._news.notify())

    def add(self, step: Step) -> None:
        """Tell it of this step, once, and forget the oldest that is not being sent."""
        if step.header.digest in self._kept:
            return
        self._kept[step.header.digest] = step
        for digest in list(self._kept)[:-KEPT]:
            if not self._wanted.get(digest):
                del self._kept[digest]
        self._untold.append(step.header)
        self._news.notify()

    async def run(self, state: StateName) -> None:
        """Serve it until it follows no more."""
        await self._send(StepsFrom(*state))
        while not self._reader.done():
            seen = self._news.count
            if self._untold:
                await self._send(self._untold.popleft())
            elif self._wanted:
                await self._send_some(next(iter(self._wanted)))
            else:
                await self._news.after(seen)
        self._reader.result()

    async def close(self) -> None:
        """Read no more."""
        self._reader.cancel()
        await asyncio.wait((self._reader,))
        if not self._reader.cancelled():
            self._reader.exception()  # the stream has ended for a reason that its sender knows, or will learn

    async def _send_some(self, digest: bytes) -> None:
        """One piece of a step, or that it is not kept any more."""
        if (step := self._kept.get(digest)) is None:
            del self._wanted[digest]
            await self._send(StepGone(digest))
            return
        sent, total = self._wanted[digest], len(step.data)
        most = FREE_PIECE_BYTES if await self._between_rounds() else HELD_PIECE_BYTES
        nbytes = min(self._pacer.piece_bytes(total - sent), most)
        if (wait_s := self._pacer.reserve(nbytes, asyncio.get_running_loop().time())) > 0:
            await asyncio.sleep(wait_s)
        self._wanted[digest] = sent + nbytes
        await self._send(StepBytes(digest, sent), memoryview(step.data)[sent : sent + nbytes])
        if sent + nbytes == total:
            del self._wanted[digest]

    async def _between_rounds(self) -> bool:
        """Wait until no round is under way, for `HOLD_S` at most; whether there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                for averager in self._averagers:
                    await averager.between_rounds()
                return True
        return False

    async def _send(self, message: _Answer, payload: memoryview | None = None) -> None:
        async with asyncio.timeout(_SEND_WITHIN_S):
            await self._stream.send(message, payload)

    async def _read(self) -> None:
        while True:
            await self._stream.ready()  # a `recv` that is cancelled would end the connection before we can say why
            if (received := await self._stream.recv()) is None:
                return
            message, nbytes = received
            if nbytes:
                raise PeerProtocolError(f"sent {nbytes} bytes to the peer that it follows", self._stream.peer_id)
            if len(self._wanted) > MAX_WANTED:
                raise PeerProtocolError("wants more steps than are kept", self._stream.peer_id)
            self._wanted.setdefault(message.digest, 0)
            self._news.notify()
