"""The control of a round: reports to the decider, assignments and the verdict back.

It runs on the streams by which the group was formed: one between the decider and each other member, in order both ways.
When such a stream ends before the verdict, the decider leaves that member out; a member that loses the decider asks the
others whether they know the verdict, and gives up when none of them can still learn it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from shoal.allreduce.commit import Order
from shoal.allreduce.coordinator import Coordinator, CoordinatorAction, LeftOut, Replaced, Send
from shoal.allreduce.interface import is_sound
from shoal.errors import PeerError
from shoal.rpc import Endpoint, Stream
from shoal.wire import Abort, AskVerdict, Commit, Leave, Member, Report

__all__ = ["Control", "DeciderControl", "FollowerControl"]

_ASK_TIMEOUT_S = 2.0
_ASK_PAUSE_S = 0.1
_FAREWELL_S = 1.0
_MAX_WAITING = 64


class ControlledRound(Protocol):
    """The side of a round that the control uses."""

    endpoint: Endpoint
    round_id: bytes
    members: list[Member]
    me: int
    decider: int

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task of this round."""
        ...

    def obey(self, message: Order) -> None:
        """Carry out an order of the decider."""
        ...

    def heard(self) -> None:
        """A member has begun the round."""
        ...

    def give_up(self, reason: str) -> None:
        """Fail the round here."""
        ...

    def blame(self, member: int, reason: str) -> None:
        """A member did not do its part."""
        ...

    def step_aside(self) -> None:
        """Stop sending and receiving values: this member has left itself out."""
        ...

    @property
    def decided(self) -> bool:
        """Return whether a verdict is known, or was given up."""
        ...


class Control(Protocol):
    """One member's side of the control."""

    may_learn: bool
    """The verdict can still come from the decider."""

    def start(self) -> None:
        """Begin to listen."""
        ...

    def report(self, report: Report) -> None:
        """Tell the decider."""
        ...

    def lost(self, member: int, reason: str) -> None:
        """A member's link is gone, or nobody waits for it any more."""
        ...

    def begin(self, now: float) -> None:
        """Nobody owed progress before this moment."""
        ...

    def tick(self, now: float) -> None:
        """Time passes."""
        ...

    def give_up(self, reason: str) -> None:
        """This member gives the round up."""
        ...

    def cut_off(self, reason: str) -> None:
        """The values of the others do not reach this member: its parts need another owner."""
        ...

    async def finish(self) -> None:
        """All messages were sent: end the streams in order."""
        ...

    def let_go(self) -> None:
        """All is over: drop all references to the round."""
        ...


class DeciderControl:
    """The decider's side: hears reports, decides, tells everybody."""

    def __init__(self, round_: ControlledRound, machine: Coordinator, streams: dict[int, Stream[Any, Any]]) -> None:
        self.may_learn = True
        self._round, self._machine, self._streams = round_, machine, streams
        self._queues: dict[int, asyncio.Queue[Order | None]] = {i: asyncio.Queue() for i in streams}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for member, stream in self._streams.items():
            self._tasks.append(self._round.spawn(self._listen(member, stream)))
            self._tasks.append(self._round.spawn(self._talk(member, stream)))
        for member in range(len(self._round.members)):
            if member not in self._streams and member != self._round.me:
                self.lost(member, "it has no control stream")

    async def _listen(self, member: int, stream: Stream[Any, Report | Leave]) -> None:
        reason = "it gave up"
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                if isinstance(message, Leave):
                    break
                if nbytes or not all(is_sound(held, len(self._round.members)) for held in message.held):
                    stream.abort()
                    reason = "a malformed report"
                    break
                if self._round.members[member].contributes:
                    self._round.heard()
                self._do(self._machine.reported(member, message, self._now()))
        except PeerError as error:
            reason = error.message  # any error: without its stream a member cannot report
        self.lost(member, reason)

    async def _talk(self, member: int, stream: Stream[Order, Any]) -> None:
        try:
            while (message := await self._queues[member].get()) is not None:
                await stream.send(message)
            await stream.end()
        except PeerError as error:
            self.lost(member, error.message)

    def _do(self, actions: list[CoordinatorAction]) -> None:
        for action in actions:
            match action:
                case LeftOut(member, reason):
                    if member == self._round.me:
                        self._round.step_aside()
                    self._round.blame(member, f"left out of the round: {reason}")
                case Replaced(member):
                    self._round.blame(member, "nobody gets its averages: others average its parts")
                case Send(member, message) if member == self._round.me:
                    # Not at once: its consequences may call this again.
                    asyncio.get_running_loop().call_soon(self._round.obey, message)
                case Send(member, message) if member in self._queues:
                    self._queues[member].put_nowait(message)
                    if isinstance(message, Commit | Abort):
                        self._queues[member].put_nowait(None)

    def report(self, report: Report) -> None:
        self._do(self._machine.reported(self._round.me, report, self._now()))

    def lost(self, member: int, reason: str) -> None:
        self._do(self._machine.gone(member, reason, self._now()))

    def begin(self, now: float) -> None:
        self._machine.begin(now)

    def tick(self, now: float) -> None:
        self._do(self._machine.tick(now))

    def give_up(self, reason: str) -> None:
        self._do(self._machine.give_up(reason))

    def cut_off(self, reason: str) -> None:
        self._do(self._machine.leave_out(self._round.me, reason, self._now()))  # it goes on deciding

    async def finish(self) -> None:
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
        except TimeoutError:
            pass  # a member that does not take the verdict in this time asks the others for it

    def let_go(self) -> None:
        self._tasks.clear()
        del self._round

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class FollowerControl:
    """Every other member's side: reports, obeys, and looks for the verdict when the decider is lost."""

    def __init__(self, round_: ControlledRound, stream: Stream[Report | Leave, Any]) -> None:
        self.may_learn = True
        self._round, self._stream = round_, stream
        self._queue: asyncio.Queue[Report] = asyncio.Queue()
        self._listening: asyncio.Task[None] | None = None
        self._talking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._listening = self._round.spawn(self._listen())
        self._talking = self._round.spawn(self._talk())

    async def _listen(self) -> None:
        try:
            while (received := await self._stream.recv()) is not None:
                message, nbytes = received
                if nbytes or not isinstance(message, Order):
                    self._stream.abort()
                    break
                self._round.obey(message)
        except PeerError:
            pass  # the decider is lost, for whatever reason
        self.lost(self._round.decider, "its control stream ended")

    async def _talk(self) -> None:
        try:
            while True:
                await self._stream.send(await self._queue.get())
        except PeerError as error:
            self.lost(self._round.decider, error.message)

    def report(self, report: Report) -> None:
        # Many reports without parts can only come from a member that says again and again that it has none.
        if report.held or self._queue.qsize() < _MAX_WAITING:
            self._queue.put_nowait(report)

    def lost(self, member: int, reason: str) -> None:
        if member == self._round.decider and self.may_learn:
            self.may_learn = False
            self._round.blame(member, f"lost, and it was to decide: {reason}")
            if not self._round.decided:
                self._round.spawn(self._ask_others())

    async def _ask_others(self) -> None:
        round_ = self._round
        others = [m.contact for i, m in enumerate(round_.members) if i not in (round_.me, round_.decider)]
        hope = True
        while hope and not round_.decided:
            hope = False
            calls = (round_.endpoint.call(c, AskVerdict(round_.round_id), timeout_s=_ASK_TIMEOUT_S) for c in others)
            for verdict in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(verdict, BaseException):
                    if not isinstance(verdict, PeerError):
                        raise verdict
                elif verdict.commit is not None and not round_.decided:
                    round_.obey(verdict.commit)
                else:
                    hope = hope or verdict.may_learn
            if hope and not round_.decided:
                await asyncio.sleep(_ASK_PAUSE_S)
        if not round_.decided:
            round_.give_up("outcome unknown: the decider was lost before its verdict came")

    def begin(self, now: float) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def give_up(self, reason: str) -> None:
        self.may_learn = False

    def cut_off(self, reason: str) -> None:
        self._round.give_up(reason)

    async def finish(self) -> None:
        if self._talking is not None:
            self._talking.cancel()
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._stream.end()
                if self._listening is not None:
                    await asyncio.gather(self._listening, return_exceptions=True)
        except (PeerError, TimeoutError):
            self._stream.abort()

    def let_go(self) -> None:
        self._listening = self._talking = None
        del self._round
