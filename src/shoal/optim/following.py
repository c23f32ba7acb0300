"""A peer that catches up follows others: it hears of each of their steps, and keeps them until it can take them.

Two members at a time are followed; each step is fetched from one of them, and from the other one if that is lost. A
member is asked for one step at a time, so a faster member is asked for more steps. This peer keeps the steps itself,
bounded by `max_bytes`: no other peer keeps more than two steps for us, and none waits for us. A step that nobody has
any more is a gap. Nothing leads over a gap: no more steps are fetched then, and none are kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from shoal.allreduce.vector import Vector
from shoal.core import PeerCore
from shoal.errors import PeerError, PeerProtocolError
from shoal.events import PeerDropped
from shoal.optim.state_name import StateName
from shoal.optim.steps import Step, check, name_after, name_before, size_of
from shoal.peer import PeerID
from shoal.progress import StateKey
from shoal.rpc import Stream
from shoal.tasks import Changes, Tasks
from shoal.wire import Contact, FollowSteps, StepBytes, StepGone, StepsFrom, StepTaken, WantStep

__all__ = ["Following"]

_SOURCES = 2
_GREETED_WITHIN_S = 3.0
_PIECE_WITHIN_S = 30.0
"""Longer than a piece is held back beside rounds; the link shows whether a member is lost."""

_URGENT_S = 10.0
"""A state waits so long for steps that come too slowly: less than its donors wait for us."""

_TOLD = 16
"""More steps of one member than it can still have."""


class _Source:
    """One member that is followed.

    Attributes:
        at: where it stands, as far as it has told us.
        tells: the steps that it can be asked for, by the digest of the state before.
        greeted: set when it has told us where it stands, or is lost.
    """

    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self.stream: Stream[WantStep, StepsFrom | StepTaken | StepBytes | StepGone] | None = None
        self.at: StateName | None = None
        self.tells: deque[bytes] = deque(maxlen=_TOLD)
        self.greeted = asyncio.Event()


@dataclass(slots=True)
class _Coming:
    """A step that is being fetched."""

    step: Step
    source: _Source
    received: int = 0


class Following:
    """The members that one peer follows, and their steps. Loop only.

    Args:
        core: this peer.
        run_id: names the run.
        vector: for each kind of step (whether states are averaged), one that has its sizes.
        max_bytes: the most that is kept.

    Attributes:
        base: from this state on, and from each later one, steps lead on; None while nobody is followed.
        step_bytes: of the largest one that we were told of.
        missed: why there is a gap; empty: there is none.
        told: of the first step that we were told of, and of the last one: its epoch, and when that was (loop time).
        gave_at: for each member, when the last step that it gave was here (loop time).
    """

    def __init__(self, core: PeerCore, run_id: str, vector: Callable[[bool], Vector], *, max_bytes: int) -> None:
        self._core, self._run_id, self._vector, self._max_bytes = core, run_id, vector, max_bytes
        self._sources: dict[PeerID, _Source] = {}
        self._tasks = Tasks(lambda error: None)  # a failure costs no more than the member that it is about
        self._refused: set[PeerID] = set()
        self._kept: dict[bytes, Step] = {}  # by the digest of the state before
        self._due: dict[bytes, StepTaken] = {}  # told of, and not asked for yet
        self._coming: dict[bytes, _Coming] = {}
        self._news = Changes()
        self._closed = False
        self.base: StateKey | None = None
        self.step_bytes = 0
        self.missed = ""
        self.told: tuple[tuple[int, float], tuple[int, float]] | None = None
        self.gave_at: dict[PeerID, float] = {}

    async def follow(self, contacts: Iterable[Contact]) -> None:
        """See to it that two of these are followed, if there are as many; returns when they have greeted us."""
        new = []
        for contact in contacts:
            if len(self._sources) >= _SOURCES:
                break
            if contact.peer not in self._sources and contact.peer not in self._refused:
                source = self._sources[contact.peer] = _Source(contact)
                self._tasks.spawn(self._listen(source))
                new.append(source)
        if new:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GREETED_WITHIN_S):
                    await asyncio.gather(*(source.greeted.wait() for source in new))

    async def first(self) -> None:
        """Return when no step waits for the one before it, or after a while, or if there is a gap already."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_URGENT_S):
                while self._due:
                    await self._news.next()

    async def next(self, state: StateName, *, patience_s: float) -> Step | None:
        """The step that leads on from this state: waits while it comes; None if nobody tells of one.

        Args:
            state: where we stand.
            patience_s: how long to wait for a member that stands there too, and may be about to take one.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        while (step := self._kept.get(state.digest)) is None:
            coming = state.digest in self._coming or state.digest in self._due
            here = any(source.at == state for source in self._sources.values())
            if not coming and not (here and loop.time() < until):
                return None
            await self._news.next(None if coming else until - loop.time())
        return step

    def forget(self, state: StateName) -> None:
        """We stand at this state: the steps that lead there are kept no longer."""
        for digest in [digest for digest, step in self._kept.items() if name_before(step.header).key < state.key]:
            del self._kept[digest]

    @property
    def kept_bytes(self) -> int:
        """The size of the steps that are kept or being fetched."""
        return sum(len(step.data) for step in self._kept.values()) + sum(
            len(coming.step.data) for coming in self._coming.values()
        )

    async def close(self) -> None:
        """Follow nobody any more, and keep nothing."""
        self._closed = True
        await self._tasks.cancel()
        self._kept.clear()
        self._due.clear()
        self._coming.clear()

    # ------------------------------------------------------------------------------------------------------- listening

    async def _listen(self, source: _Source) -> None:
        peer = source.contact.peer
        try:
            opening = FollowSteps(self._run_id)
            source.stream = await self._core.endpoint.open(source.contact, opening, timeout_s=_GREETED_WITHIN_S)
            while (received := await source.stream.recv()) is not None:
                message, nbytes = received
                await self._hear(source, message, nbytes)
                self._news.notify()
        except PeerProtocolError as error:
            self._core.env.events.emit(PeerDropped(peer=peer, where="catching up", reason=error.message))
            self._refused.add(peer)
            self.gave_at.pop(peer, None)
        except (PeerError, TimeoutError):
            pass  # it is lost, or follows somebody itself: there are others
        finally:
            if source.stream is not None:
                source.stream.abort()
            del self._sources[peer]
            source.greeted.set()
            source.tells.clear()
            if not self._closed:
                await self._elsewhere(source)
            self._news.notify()

    async def _hear(self, source: _Source, message: StepsFrom | StepTaken | StepBytes | StepGone, nbytes: int) -> None:
        if nbytes and not isinstance(message, StepBytes):
            raise PeerProtocolError(f"{nbytes} bytes where there should be none")
        match message:
            case StepsFrom():
                source.at = StateName(message.epoch, message.digest, message.samples)
                self.base = source.at.key if self.base is None else min(self.base, source.at.key)
                source.greeted.set()
            case StepTaken():
                await self._told(source, message)
            case StepGone():
                with suppress(ValueError):
                    source.tells.remove(message.digest)
                await self._elsewhere(source)
            case StepBytes():
                await self._receive(source, message, nbytes)

    async def _told(self, source: _Source, header: StepTaken) -> None:
        if source.at is None:
            raise PeerProtocolError("a step before it said where it stands")
        size_of(header, self._vector(not header.agreement))
        source.at = name_after(header)
        source.tells.append(header.digest)
        self.step_bytes = max(self.step_bytes, header.nbytes)
        last = header.epoch, asyncio.get_running_loop().time()
        if self.told is None or last[0] > self.told[1][0]:
            self.told = (self.told[0] if self.told else last, last)
        if not (self.missed or header.digest in self._kept or header.digest in self._coming):
            self._due[header.digest] = header
        await self._ask()

    async def _ask(self) -> None:
        """Ask each member that sends nothing for the oldest step that is due, of those that it tells of."""
        if any(all(digest not in source.tells for source in self._sources.values()) for digest in self._due):
            self._miss("the members that were followed are gone, or kept it no longer when it was due")
        for source in list(self._sources.values()):
            digest = next((digest for digest in source.tells if digest in self._due), None)
            if digest is not None and all(coming.source is not source for coming in self._coming.values()):
                await self._want(source, self._due.pop(digest))

    async def _want(self, source: _Source, header: StepTaken) -> None:
        if self.kept_bytes + header.nbytes > self._max_bytes:
            what = f"{self.kept_bytes} bytes of {len(self._kept)} steps are kept, and at most {self._max_bytes} may be"
            self._miss(f"{what} (catch_up_bytes)")
            return
        assert source.stream is not None
        self._coming[header.digest] = _Coming(Step(header, bytearray(header.nbytes)), source)
        with suppress(PeerError):  # then it is lost, and its own task looks for another one
            await source.stream.send(WantStep(header.digest))

    async def _elsewhere(self, source: _Source) -> None:
        """Ask other members for steps that this one was to send, and does not tell of any more."""
        for digest, coming in list(self._coming.items()):
            if coming.source is source and digest not in source.tells:
                self._due[digest] = self._coming.pop(digest).step.header
        await self._ask()

    def _miss(self, reason: str) -> None:
        """There is a gap."""
        self.missed = reason
        self._kept.clear()
        self._due.clear()

    async def _receive(self, source: _Source, message: StepBytes, nbytes: int) -> None:
        coming = self._coming.get(message.digest)
        if coming is None or coming.source is not source or message.offset != coming.received:
            raise PeerProtocolError("averages that were not asked for")
        step = coming.step
        if nbytes > len(step.data) - coming.received:
            raise PeerProtocolError("more averages than there are")
        assert source.stream is not None
        async with asyncio.timeout(_PIECE_WITHIN_S):
            await source.stream.readinto(memoryview(step.data)[coming.received : coming.received + nbytes])
        coming.received += nbytes
        if coming.received == len(step.data):
            vector = self._vector(not step.header.agreement)
            await self._core.env.executor.run(check, step.header, memoryview(step.data), vector)
            self.gave_at[source.contact.peer] = asyncio.get_running_loop().time()
            if self._coming.pop(message.digest, None) is not None and not self.missed:
                self._kept[message.digest] = step
            await self._ask()
