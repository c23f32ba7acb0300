"""The feed for peers that catch up: the last steps that this peer knows of, with their averages.

While nobody follows, nothing is kept. While somebody does, the last step is kept for the next follower, which is told
of it first. So a new follower gets a step at once, however long an epoch lasts, and a copy of the state before that
step is of use to it.

A follower has a stream open. It is told of each step as it is committed, and fetches the step's averages before two
more steps are taken: this peer keeps the last `KEPT` of them. Older ones that are still being sent it keeps as far as
they fit in `SPARE_BYTES`, so for small models only. With a step of `n` bytes (those of the averaged values) the feed
holds `KEPT * n + min((MOST_KEPT - KEPT) * n, SPARE_BYTES)` at most, however many followers there are, and however
slowly they read: the oldest goes before the next one is made. While a round of this peer is under way it sends none of
them, or little if the round takes long (`HOLD_S`). A follower needs one step for each round, so its share of the line
between two rounds is bounded. When all places are taken, one that fetches no step makes way for the next.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from shoal.averaging import Averager, StepResult
from shoal.averaging.allreduce.vector import Vector
from shoal.averaging.core import PeerCore
from shoal.base.bounded import bound, put_last
from shoal.base.ordered import OrderedSet
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes, WhileMoving, stopped
from shoal.errors import PeerProtocolError, PeerRefused
from shoal.protocol.wire import FollowSteps, StepBytes, StepGone, StepsFrom, StepTaken, WantStep
from shoal.rpc import Stream
from shoal.run.decide.agreement import Agreement
from shoal.run.decide.state_name import StateName
from shoal.run.join.steps import Step, name_after, name_before, of_round, of_step_alone
from shoal.run.report.notices import Notices
from shoal.state.wire import Pacer
from shoal.state.wire.pace import FREE_PIECE_BYTES, HELD_PIECE_BYTES
from shoal.state.wire.upload import Upload

__all__ = ["HOLD_S", "KEPT", "MAX_FOLLOWERS", "MOST_KEPT", "SPARE_BYTES", "StepFeed"]

KEPT = 2
"""Steps that are kept while somebody follows: the last one, and the one before."""

MOST_KEPT = 2 * KEPT
"""With those that are being sent. A follower that is still being sent an older one is told that it is gone."""

SPARE_BYTES = 256 << 20
"""The most bytes of steps that are being sent, beside the last `KEPT`, all together."""

MAX_FOLLOWERS = 16
MAX_WANTED = 16
MAX_UNTOLD = 32
HOLD_S = 1.5
"""A piece waits no longer than this for the end of a round, seconds."""

_FETCH_WITHIN_S = 10.0
"""A follower that was told of `MOST_KEPT` steps, and has got none within this time, makes way when others wait."""

_SEND_WITHIN_S = 30.0
"""A follower that takes nothing for this time is dropped."""

_Answer = StepsFrom | StepTaken | StepBytes | StepGone


class StepFeed:
    """Tells followers of this peer's steps. Loop only.

    Args:
        core: this peer.
        run_id: names the run.
        state: returns the state from which a new follower is told of all steps, as soon as there is one.
        averagers: of this peer; their rounds come first.
        notices: tell of steps that could not be kept: this peer takes its own all the same.
    """

    def __init__(
        self,
        core: PeerCore,
        run_id: str,
        state: Callable[[], Awaitable[StateName]],
        averagers: Sequence[Averager],
        notices: Notices,
    ) -> None:
        self._core, self._state, self._averagers, self._notices = core, state, averagers, notices
        self._followers = OrderedSet[_Follower]()
        self._sites: Counter[str] = Counter()  # of the followers
        self._kept: dict[bytes, Step] = {}  # by the digest of the state before; the last one at the end
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
            with self._whole():
                self._add(await self._core.env.executor.run(of_round, name, result, vector, agreement))

    async def add_alone(
        self, name: StateName, chance: bytes, samples: int, vector: Vector, agreement: Agreement
    ) -> None:
        """This peer is about to step alone, from the tensors of this vector (call it under their lock)."""
        if self._followers:
            peer, run = self._core.peer_id.to_bytes(), self._core.env.executor.run
            with self._whole():
                self._add(await run(of_step_alone, name, chance, peer, samples, vector, agreement))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Make room for a step. If it cannot be kept, nobody follows from here: the steps after it lead nowhere."""
        spare = SPARE_BYTES
        bound(self._kept, MOST_KEPT - 1)
        for digest in reversed(list(self._kept)[: 1 - KEPT]):
            nbytes = len(self._kept[digest].data)
            if nbytes <= spare and any(follower.is_sent(digest) for follower in self._followers):
                spare -= nbytes
            else:
                del self._kept[digest]
        try:
            yield
        except Exception as error:  # noqa: BLE001 (no memory for it: those who catch up can do without)
            self._kept.clear()
            for follower in self._followers:
                follower.end()
            self._notices.skipped("a step for peers that catch up was", error)

    def _add(self, step: Step | None) -> None:
        if step is None or not self._followers:
            return
        put_last(self._kept, step.header.digest, step, MOST_KEPT)
        for follower in self._followers:
            follower.add(step.header)

    @property
    def kept_bytes(self) -> int:
        """The size of the steps that are kept, for all followers together."""
        return sum(len(step.data) for step in self._kept.values())

    def close(self) -> None:
        """Tell nobody anything more. Safe to call twice."""
        self._unserve()

    async def _serve(self, stream: Stream[_Answer, WantStep], opening: FollowSteps) -> None:
        site = self._core.endpoint.site_of(stream.peer_id)
        # Keys and hosts are free: a site that has all other places does not get the last quarter.
        if len(self._followers) >= MAX_FOLLOWERS or self._sites[site] >= MAX_FOLLOWERS - MAX_FOLLOWERS // 4:
            for each in [each for each in self._followers if each.fetches_nothing]:
                sometimes("a follower that fetches nothing makes way")
                each.leave()
            raise PeerRefused("busy: too many peers catch up at the moment", code="busy")
        follower = _Follower(stream, self._core.pacer(), self._averagers, self._kept)
        self._followers.add(follower)
        self._sites[site] += 1
        try:
            with Upload.of(self._core.endpoint).stream(stream):  # it is no round, to which states give way
                state = await self._state()
                last = next((step.header for step in reversed(self._kept.values())), None)
                if last is not None and name_after(last) == state:
                    follower.add(last)
                    state = name_before(last)
                await follower.run(state)
        finally:
            self._followers.discard(follower)
            self._sites -= Counter({site: 1})
            if not self._followers:
                self._kept.clear()
            await follower.close()


class _Follower:
    """One peer that catches up: the steps that it was told of, and those that it has asked for.

    Args:
        stream: the follower's.
        pacer: of what is sent.
        averagers: of this peer.
        kept: the steps that can be had, by the digest of the state before.
    """

    def __init__(
        self,
        stream: Stream[_Answer, WantStep],
        pacer: Pacer,
        averagers: Sequence[Averager],
        kept: Mapping[bytes, Step],
    ) -> None:
        self._stream, self._pacer, self._averagers, self._kept = stream, pacer, averagers, kept
        self._told: deque[bytes] = deque(maxlen=MOST_KEPT)
        self._untold: deque[StepTaken] = deque()
        self._wanted: dict[bytes, int] = {}  # and how much of it was sent
        self._news, self._over = Changes(), False
        self._told_in_vain, self._fetched_at = 0, asyncio.get_running_loop().time()
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self._reader.add_done_callback(lambda _: self._news.notify())

    def is_sent(self, digest: bytes) -> bool:
        """Return whether it has got some of this step, and not yet all."""
        return bool(self._wanted.get(digest))

    @property
    def fetches_nothing(self) -> bool:
        """Whether it has got none of the last steps, though it had time to."""
        since_s = asyncio.get_running_loop().time() - self._fetched_at
        return self._told_in_vain >= MOST_KEPT and since_s >= _FETCH_WITHIN_S

    def leave(self) -> None:
        """Serve it no more, at once: it may be in the midst of a piece that it reads slowly."""
        self._stream.abort()
        self.end()

    def add(self, header: StepTaken) -> None:
        """Tell it of this step, once. One that does not even read of the steps is dropped."""
        if header.digest in self._told:
            return
        self._told.append(header.digest)
        self._told_in_vain += 1
        self._untold.append(header)
        if len(self._untold) > MAX_UNTOLD:
            self._stream.abort()
        self._news.notify()

    async def run(self, state: StateName) -> None:
        """Serve it until it follows no more."""
        await self._send(StepsFrom(*state))
        while not self._reader.done() and not self._over:
            seen = self._news.count
            if self._untold:
                await self._send(self._untold.popleft())
            elif self._wanted:
                await self._send_some(next(iter(self._wanted)))
            else:
                await self._news.after(seen)
        if not self._over:
            self._reader.result()

    def end(self) -> None:
        """Serve it no more: it may follow anew."""
        self._over = True
        self._news.notify()

    async def close(self) -> None:
        """Read no more."""
        reader = self._reader
        del self._reader
        await stopped(reader)  # the stream has ended for a reason that its sender knows, or will learn

    async def _send_some(self, digest: bytes) -> None:
        """One piece of a step, or that it is not kept any more."""
        if (step := self._kept.get(digest)) is None:
            del self._wanted[digest]
            await self._send(StepGone(digest))
            return
        sent, total = self._wanted[digest], len(step.data)
        del step  # nothing is held while this waits: neither for its turn, nor for a slow reader
        most = FREE_PIECE_BYTES if await self._between_rounds() else HELD_PIECE_BYTES
        nbytes = min(self._pacer.piece_bytes(total - sent), most)
        if (wait_s := self._pacer.reserve(nbytes, asyncio.get_running_loop().time())) > 0:
            await asyncio.sleep(wait_s)
        if (step := self._kept.get(digest)) is None:
            return  # the next turn says so
        piece = bytes(memoryview(step.data)[sent : sent + nbytes])
        del step
        self._wanted[digest] = sent + nbytes
        await self._send(StepBytes(digest, sent), piece)
        if sent + nbytes == total:
            del self._wanted[digest]
            self._told_in_vain, self._fetched_at = 0, asyncio.get_running_loop().time()

    async def _between_rounds(self) -> bool:
        """Wait until no round is under way, for `HOLD_S` at most; whether there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                for averager in self._averagers:
                    await averager.between_rounds()
                return True
        return False

    async def _send(self, message: _Answer, payload: bytes | None = None) -> None:
        async with WhileMoving(_SEND_WITHIN_S, lambda: self._stream.bytes_moved):
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
