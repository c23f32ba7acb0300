"""A peer that is behind gets in although the others go on: it follows their steps while it loads a state.

It follows from before it asks for the state, so no step between is missed. Then it takes the steps one by one, each as
the others took it: the same averages, the same optimizer, and the name that follows from the commit. On equal
arithmetic it ends with their bits (`docs/why/decisions/0015-catching-up.md`). It follows until it has taken a step
together with the others; as long as it is led on from where it stands, it needs no state.

Two members at a time are followed; each step is fetched from one of them, and from the other one if that is lost. A
member is asked for one step at a time, so a faster member is asked for more steps. This peer keeps the steps itself,
bounded by `max_bytes`: no other peer keeps more than two steps for us, and none waits for us. A step that nobody has
any more is a gap. Nothing leads over a gap: no more steps are fetched then, and none are kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from shoal.averaging import Averager
from shoal.averaging.allreduce.segments import RoundMemory
from shoal.averaging.allreduce.vector import Vector
from shoal.averaging.core import PeerCore
from shoal.base.clock import shielded
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes, Tasks
from shoal.errors import PeerError, PeerProtocolError
from shoal.events import PeerDropped, duration
from shoal.protocol.wire import Contact, FollowSteps, StepBytes, StepGone, StepsFrom, StepTaken, WantStep
from shoal.rpc import Stream
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.join.own_state import Update
from shoal.run.join.steps import Step, agreement_of, check, land, name_after, name_before, size_of
from shoal.run.view.progress import StateKey
from shoal.train.options import differences, misfit
from shoal.train.training_state import TrainingState

__all__ = ["CatchUp"]

_LOOK_AGAIN_S = 1.0
_PATIENCE_S = 2.0
"""The others told us that they are further; the step itself may come a little later."""

_SOURCES = 2
_GREETED_WITHIN_S = 3.0
_MORE_WITHIN_S, _READ_BYTES = 30.0, 32 << 10
"""The next bytes of a piece come within this time, which is longer than a piece is held back beside rounds; the number
of bytes. The link shows whether a member is lost."""

_URGENT_S = 10.0
"""A state waits this long for steps that come too slowly: less than its donors wait for us."""

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
    """A step that is being fetched, or is here.

    Attributes:
        since: when it was asked for (loop time).
        at: when more of it came last, or it was asked for (loop time).
    """

    step: Step
    source: _Source
    since: float
    at: float
    received: int = 0

    def is_late(self, until: float) -> bool:
        """Whether it comes so slowly that it will not be here by then (loop time)."""
        took_s = _now() - self.since
        missing = len(self.step.data) - self.received
        return took_s > _URGENT_S and self.received * (until - _now()) < missing * took_s


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
        giving: the members that are followed, and have given a step, whole and right, since then.
    """

    def __init__(self, core: PeerCore, run_id: str, vector: Callable[[bool], Vector], *, max_bytes: int) -> None:
        self._core, self._run_id, self._vector, self._max_bytes = core, run_id, vector, max_bytes
        self._sources: dict[PeerID, _Source] = {}
        self._tasks = Tasks(lambda error: None)  # a failure costs no more than the member that it is about
        self._refused: set[PeerID] = set()
        self._kept: dict[bytes, _Coming] = {}  # whole, by the digest of the state before
        self._due: dict[bytes, StepTaken] = {}  # told of, and not asked for yet
        self._coming: dict[bytes, _Coming] = {}
        self._news = Changes()
        self._closed = False
        self.base: StateKey | None = None
        self.step_bytes = 0
        self.missed = ""
        self.told: tuple[tuple[int, float], tuple[int, float]] | None = None
        self.giving: set[PeerID] = set()

    async def follow(self, contacts: Iterable[Contact]) -> None:
        """See to it that two of these are followed, if there are as many; returns when they have greeted us.

        One that owes us a step, and sends nothing of it, is followed no longer.
        """
        for coming in list(self._coming.values()):
            if _now() > coming.at + _MORE_WITHIN_S:
                self._drop(coming.source, f"it was asked for a step, and sends nothing of it for {_MORE_WITHIN_S:g} s")
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

    async def next(self, state: StateName, *, patience_s: float, until: float) -> Step | None:
        """The step that leads on from this state: waits while it comes; None if nobody tells of one, or it is late.

        Args:
            state: where we stand.
            patience_s: how long to wait for a member that stands there too, and may be about to take one.
            until: the end of any wait (loop time).
        """
        patient_until = min(until, _now() + patience_s)
        while (step := self.kept(state)) is None:
            coming = self._coming.get(state.digest)
            is_told = coming is not None or state.digest in self._due
            here = any(source.at == state for source in self._sources.values())
            deadline = until if is_told else patient_until
            late = coming is not None and coming.is_late(until)
            if late or not (is_told or here) or _now() >= deadline:
                return None
            await self._news.next(min(_LOOK_AGAIN_S, deadline - _now()))
        return step

    def kept(self, state: StateName) -> Step | None:
        """The step that leads on from this state, if it is here."""
        kept = self._kept.get(state.digest)
        return kept.step if kept is not None else None

    def refuse(self, state: StateName, reason: str) -> None:
        """The step that leads on from this state is none that can be taken: its giver is not followed any more."""
        source = self._kept.pop(state.digest).source
        self._drop(source, reason)

    def _drop(self, source: _Source, reason: str) -> None:
        peer = source.contact.peer
        self._core.env.events.emit(PeerDropped(peer=peer, where="catching up", reason=reason))
        self._refused.add(peer)
        if source.stream is not None:
            source.stream.abort()

    def forget(self, state: StateName) -> None:
        """We stand at this state: the steps that lead there are kept no longer."""
        for digest in [digest for digest, kept in self._kept.items() if name_before(kept.step.header).key < state.key]:
            del self._kept[digest]

    @property
    def kept_bytes(self) -> int:
        """The size of the steps that are kept or being fetched."""
        return sum(len(each.step.data) for each in (*self._kept.values(), *self._coming.values()))

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
            self._drop(source, error.message)
        except (PeerError, TimeoutError):
            pass  # it is lost, or follows somebody itself: there are others
        finally:
            if source.stream is not None:
                source.stream.abort()
            del self._sources[peer]
            self.giving.discard(peer)
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
        last = header.epoch, _now()
        if self.told is None or last[0] > self.told[1][0]:
            self.told = (self.told[0] if self.told else last, last)
        if not (self.missed or header.digest in self._kept or header.digest in self._coming):
            self._due[header.digest] = header
        await self._ask()

    async def _ask(self) -> None:
        """Ask each member that sends nothing for the oldest step that is due, of those that it tells of."""
        if any(all(digest not in source.tells for source in self._sources.values()) for digest in self._due):
            sometimes("a step is kept by nobody when it is due")
            self._miss("the members that were followed are gone, or kept it no longer when it was due")
        for source in list(self._sources.values()):
            digest = next((digest for digest in source.tells if digest in self._due), None)
            if digest is not None and all(coming.source is not source for coming in self._coming.values()):
                await self._want(source, self._due.pop(digest))

    async def _want(self, source: _Source, header: StepTaken) -> None:
        if self.kept_bytes + header.nbytes > self._max_bytes:
            what = f"{self.kept_bytes} bytes of {len(self._kept)} steps are kept, and at most {self._max_bytes} may be"
            sometimes("a peer that catches up has no room for another step")
            self._miss(f"{what} (catch_up_bytes)")
            return
        assert source.stream is not None
        self._coming[header.digest] = _Coming(Step(header, bytearray(header.nbytes)), source, _now(), _now())
        with suppress(PeerError):  # then it is lost, and its own task looks for another one
            await source.stream.send(WantStep(header.digest))

    async def _elsewhere(self, source: _Source) -> None:
        """Ask other members for steps that this one was to send, and does not tell of any more."""
        for digest, coming in list(self._coming.items()):
            if coming.source is source and digest not in source.tells:
                sometimes("the sender of a step is lost, and another one is asked for it")
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
        piece = memoryview(step.data)[coming.received : coming.received + nbytes]
        while piece:
            async with asyncio.timeout(_MORE_WITHIN_S):
                await source.stream.readinto(piece[:_READ_BYTES])
            coming.received, coming.at = coming.received + len(piece[:_READ_BYTES]), _now()
            piece = piece[_READ_BYTES:]
        if coming.received == len(step.data):
            vector = self._vector(not step.header.agreement)
            await self._core.env.executor.run(check, step.header, memoryview(step.data), vector)
            self.giving.add(source.contact.peer)
            if self._coming.pop(message.digest, None) is not None and not self.missed:
                self._kept[message.digest] = coming
            await self._ask()


class CatchUp:
    """Follows others while this peer is behind. Loop only, but for what an `Update` does.

    Args:
        core: this peer.
        run_id: names the run.
        training: what takes the steps.
        gradients: of the run's rounds.
        states: of its averagings of states.
        max_bytes: the most that is kept.
        counted: says how many samples that this peer gave at a state are in the step from there, as its record has so
            many: see `Gives.counted`.
    """

    def __init__(
        self,
        core: PeerCore,
        run_id: str,
        training: TrainingState,
        gradients: Averager,
        states: Averager,
        *,
        max_bytes: int,
        counted: Callable[[bytes, int], int],
    ) -> None:
        self._core, self._run_id, self._training, self._max_bytes = core, run_id, training, max_bytes
        self._counted = counted
        self._averagers = {False: gradients, True: states}
        self._vectors: dict[bool, Vector] = {}
        self._following: Following | None = None
        self._since = self._received_before = 0.0
        self._told = False

    def from_epoch(self, best: int) -> int:
        """From a state of this epoch, or of a later one, steps lead on to the best state, which is of epoch `best`.

        The members that are followed may be on the side of a fork that has the later epoch, and is worse.
        """
        base = self._following.base if self._following is not None else None
        return 0 if base is None else min(best, base.epoch)

    def useful_from(self, epoch: int) -> int:
        """A state of this epoch or of a later one is of use, where the best one is of `epoch`.

        The last step before that may be here or on its way. No more than that is believed.
        """
        first = self.from_epoch(epoch)
        return max(epoch - 1, first) if first else epoch

    @property
    def giving(self) -> frozenset[PeerID]:
        """The members that are followed, and have given us a step."""
        return frozenset(self._following.giving if self._following is not None else ())

    @asynccontextmanager
    async def following(self, contacts: Callable[[], Sequence[Contact]]) -> AsyncIterator[None]:
        """Follow two of these in the block, and afterwards until `leave`; others in place of those that are lost."""
        if self._following is None:
            self._since, self._received_before = _now(), self._core.endpoint.traffic[1]
            self._following = Following(self._core, self._run_id, self._vector, max_bytes=self._max_bytes)
        following = self._following
        await following.follow(contacts())

        async def follow() -> None:
            while True:
                await asyncio.sleep(_LOOK_AGAIN_S)
                await following.follow(contacts())

        task = asyncio.get_running_loop().create_task(follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def steps_first(self) -> None:
        """Return when the steps come as fast as they are made: a state has time, and a step is kept for two epochs."""
        if self._following is not None:
            await self._following.first()

    async def next(self, state: StateName, committed: Committed, *, until: float) -> Update | None:
        """The update that leads on from this state, once it is here; None if nobody tells of one that can be taken.

        Args:
            state: where we are.
            committed: the steps that led there.
            until: the end of any wait for it (loop time).
        """
        if self._following is None:
            return None
        self._following.forget(state)
        following = self._following
        step = await following.next(state, patience_s=_PATIENCE_S, until=until)
        if step is None:
            return None
        if name_before(step.header) != state:  # only the digests are equal: others would not know the state after it
            following.refuse(state, "its step leads on from a state that has another epoch, or other samples")
            return None
        agreement, name, gave = agreement_of(step.header), name_after(step.header), 0
        vector = self._vector(agreement is None)
        try:
            await self._core.env.executor.run(land, step.header, memoryview(step.data), vector)
        except PeerProtocolError as error:
            sometimes("a step that was fetched cannot be taken")
            following.refuse(state, error.message)
            return None
        if agreement is not None:
            recorded = next((each.samples for each in agreement.contributors if each.peer == self._core.peer_id), 0)
            gave = self._counted(state.digest, recorded)
            committed = committed.after(agreement.contributors, state.epoch, agreement.options)
            mine = self._training.options()
            if agreement.options is not None and (why := misfit(mine, agreement.options)) is not None:
                self._following.missed = f"their options are {why}"
                return None
            if agreement.options is not None and differences(mine, agreement.options):
                why = await self._core.env.executor.run(self._training.why_not, agreement.options)
                if why is not None:
                    following.refuse(state, f"its options are {why}")
                    return None
        return Update(
            apply=partial(self._take, step, vector),
            name=name,
            committed=committed,
            peers=0,
            samples=name.samples - state.samples,
            is_step=agreement is not None,
            gave=gave,
        )

    def _take(self, step: Step, vector: Vector) -> None:
        """Do to parameters and optimizer what the step did to those of its members (under their lock).

        Args:
            step: its averages have landed.
            vector: where they have.
        """
        agreement = agreement_of(step.header)
        if agreement is None:
            vector.copy_in()
            vector.apply(self._averagers[True].settings.averaging_alpha)
        else:
            if any(each.peer == self._core.peer_id for each in agreement.contributors):
                self._training.given_is_in()
            vector.overwrite()
            self._training.use_accumulators()
            self._training.step(agreement.options, agreement.unused, agreement.cores)

    def _vector(self, averaging: bool) -> Vector:
        """A vector of our own tensors, beside the averager's: that one may be in a round."""
        if not self._vectors:
            memory = RoundMemory(*(averager.tensors for averager in self._averagers.values()))
            for kind, averager in self._averagers.items():
                self._vectors[kind] = Vector(averager.tensors, averager.vector.layout, memory)
        return self._vectors[averaging]

    async def give_up(self, took_s: float) -> str | None:
        """The reason why nothing has led on from our state for this time; None if nothing is missing.

        If something is, nobody is followed any more: with the next state it is tried anew. It is told once until this
        peer takes part.
        """
        following = self._following
        if following is None or not following.missed:
            return None
        rate = (self._core.endpoint.traffic[1] - self._received_before) / max(_now() - self._since, 1e-3)
        (epoch, since), (last, until) = following.told or ((0, 0.0), (0, 0.0))
        pace = f"takes them about {duration((until - since) / (last - epoch))} and " if last > epoch else ""
        await self.leave()
        if self._told:
            return None
        self._told = True
        return (
            f"the download of the state took {duration(took_s)}, and one of the steps that the others took meanwhile "
            f"is missing: {following.missed}. A step {pace}has {following.step_bytes} bytes; this line carried "
            f"{rate:.0f} bytes/s. Raise target_batch_size (the strategy's every) so that a step takes "
            "longer, make steps smaller (the strategy's compression), or give this peer a faster line, or more "
            "catch_up_bytes"
        )

    async def joined(self) -> None:
        """This peer has taken a step of the swarm itself: it follows nobody any more."""
        self._told = False
        await self.leave()

    async def leave(self) -> None:
        """Follow nobody any more. Safe to call twice."""
        following, self._following = self._following, None
        self._vectors.clear()
        if following is not None:
            await shielded(following.close())


def _now() -> float:
    return asyncio.get_running_loop().time()
