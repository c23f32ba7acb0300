"""One search for a group: runs a `GroupMachine` on streams, timers and the directory.

- Every event goes through `feed`, in the loop thread, one at a time; actions are carried out at once or start a task.
- A read, a declaration and each exchange of `outbound` has a deadline, and ends in one event unless it is stopped.
- Streams of peers that asked us are served in the endpoint's own handlers (`inbound`).
- When the search is over, tasks that the matchmaker owns send the last messages to others in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from shoal.clock import Env
from shoal.errors import PeerProtocolError, RoundFailed, SchemaMismatch, ShoalError
from shoal.events import PeerDropped
from shoal.matchmaking.group import WHERE, ControlStream, Group, GroupDirectory, check_join
from shoal.matchmaking.inbound import Inbound
from shoal.matchmaking.machine import GroupMachine, Phase
from shoal.matchmaking.outbound import Outbound
from shoal.matchmaking.signals import (
    Accept,
    Action,
    Ask,
    Cancel,
    Declaration,
    Declare,
    Declared,
    DeclareFailed,
    DirectoryFailed,
    DirectoryRead,
    Event,
    Fail,
    JoinAsked,
    JoinGone,
    Mismatched,
    Nudge,
    ReadDirectory,
    Redirect,
    Refuse,
    Start,
    StopAsking,
    Tick,
    Withdraw,
)
from shoal.matchmaking.terms import Terms
from shoal.peer import PeerID
from shoal.rpc import Endpoint
from shoal.wire import Begin, Contact, Join, JoinAccepted, JoinRedirected, JoinRefused, Member

__all__ = ["Owner", "Search"]

_WITHDRAW_AFTER_S = 0.1


class Owner(Protocol):
    """The services that a search needs from its matchmaker, which outlives it."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that may outlive the search."""
        ...

    def write(self, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Write to the directory, after the write that goes on there has been stopped."""
        ...

    def farewell(self, stream: ControlStream, *, leave: bool) -> None:
        """End a stream in order, in the background."""
        ...

    def hold(self, inbounds: Sequence[Inbound]) -> None:
        """Note that these streams belong to a group now."""
        ...

    def release(self, streams: Sequence[ControlStream], inbounds: Sequence[Inbound]) -> None:
        """A group is over: end its control streams."""
        ...


class Search:
    """One search.

    Args:
        endpoint: opens streams.
        env: chance and events.
        directory: the directory in which peers declare themselves.
        owner: the matchmaker.
        terms: the terms of the search.
        machine: not started yet.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        env: Env,
        directory: GroupDirectory,
        owner: Owner,
        terms: Terms,
        machine: GroupMachine,
    ) -> None:
        self._endpoint, self._env, self._directory, self._owner = endpoint, env, directory, owner
        self._terms, self._machine = terms, machine
        self._outbound = Outbound(endpoint, env, terms, self.feed, self._take, owner.farewell)
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[Group] = self._loop.create_future()
        self._inbound: dict[PeerID, Inbound] = {}
        self._ask: asyncio.Task[None] | None = None
        self._read: asyncio.Task[None] | None = None
        self._nudges: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # --------------------------------------------------------------------------------------------------- running

    async def run(self) -> Group:
        """Search until there is a group.

        Raises:
            RoundFailed: there is none; says why.
        """
        self._carry_out(lambda: self._machine.start(self._loop.time()))
        try:
            group = await self._result
        except RoundFailed:
            # The future holds its exception, whose traceback holds this frame, and so us.
            self._result = self._loop.create_future()
            self._result.cancel()
            raise
        if group.leads:
            # Begin is on its way to everyone; a member that it does not reach in time is a dead member in the round.
            pending = [inbound.begun for inbound in self._inbound.values()]
            if pending:
                left_s = max(0.0, self._machine.over_at - self._loop.time())
                await asyncio.wait(pending, timeout=min(self._terms.request_timeout_s, left_s))
            for inbound in self._inbound.values():
                if not inbound.begun.done():
                    inbound.stream.abort()
        return group

    def feed(self, event: Event) -> None:
        """Hand an event to the machine and carry out its actions."""
        self._machine.set_wall_clock(self._env.clock.time() - self._loop.time())
        self._carry_out(lambda: self._machine.handle(event, self._loop.time()))

    def fail(self, error: BaseException) -> None:
        """The search cannot go on; `run` raises `error`."""
        if not self._result.done():
            self._result.set_exception(error)

    def close(self) -> None:
        """The search is over: stop everything, and tell those that wait for us. Safe to call twice."""
        if self._closed:
            return
        self.feed(Cancel())
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._read, *self._nudges):
            if task is not None:
                task.cancel()
        # Drop the objects that refer to us: otherwise a search stays in memory until Python's cycle collector finds it.
        self._ask = self._read = None
        del self._outbound

    def abandon(self) -> None:
        """Nobody waits for the result any more: a group that was formed is released."""
        result = self._result
        if result.done() and not result.cancelled() and result.exception() is None:
            result.result().release()

    def _carry_out(self, decide: Callable[[], list[Action]]) -> None:
        if self._closed:
            return
        try:
            for action in decide():
                self._do(action)
        except Exception as error:  # noqa: BLE001 (raised by `run`, to our caller)
            self.fail(error)
        self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self.feed, Tick())

    def _do(self, action: Action) -> None:
        match action:
            case Accept(peer):
                self._answer(peer, JoinAccepted())
            case Refuse(peer, code, text):
                self._answer(peer, JoinRefused(code, text[:1000]))
            case Redirect(peer, leader):
                self._answer(peer, JoinRedirected(leader))
            case Ask(contact, expiration):
                self._ask = self._spawn(self._outbound.ask(contact, expiration))
            case StopAsking():
                if self._ask is not None:
                    self._ask.cancel()
            case Start(followers):
                self._begin(followers)
            case Fail(reason, peers, mismatch):
                self.fail((SchemaMismatch if mismatch else RoundFailed)(reason, peers))
            case _:
                self._look(action)

    def _look(self, action: Declare | Withdraw | ReadDirectory | Nudge) -> None:
        match action:
            case Declare(expiration):
                self._owner.write(lambda: self._declare(expiration))
            case Withdraw():
                self._owner.write(self._withdraw)
            case ReadDirectory():
                if self._read is not None:
                    self._read.cancel()
                self._read = self._spawn(self._read_directory())
            case Nudge(contact, expiration):
                task = self._spawn(self._outbound.nudge(contact, expiration))
                self._nudges.add(task)
                task.add_done_callback(self._nudges.discard)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._owner.spawn(coroutine)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    # ------------------------------------------------------------------------------------------------- directory

    async def _declare(self, expiration: float) -> None:
        terms = self._terms
        try:
            async with asyncio.timeout(terms.request_timeout_s):
                entries = await self._directory.declare(terms.group_key, expiration, terms.member.contact)
        except (ShoalError, TimeoutError) as error:
            self.feed(DeclareFailed(str(error) or "no answer in time"))
        except Exception as error:  # noqa: BLE001 (raised by `run`)
            self.fail(error)
        else:
            self.feed(Declared(self._declarations(entries)))

    async def _withdraw(self) -> None:
        """Take our declaration back, in a moment: others may wait for their `Begin`, and a new declaration replaces it.

        Until then we refuse each peer that asks us, which costs it one answer.
        """
        await asyncio.sleep(_WITHDRAW_AFTER_S)
        async with asyncio.timeout(self._terms.request_timeout_s):
            await self._directory.withdraw(self._terms.group_key)

    async def _read_directory(self) -> None:
        terms = self._terms
        try:
            async with asyncio.timeout(terms.request_timeout_s):
                entries = await self._directory.read(terms.group_key)
        except (ShoalError, TimeoutError) as error:
            self.feed(DirectoryFailed(str(error) or "no answer in time"))
        else:
            self.feed(DirectoryRead(self._declarations(entries)))

    # ---------------------------------------------------------------------------------------------- being asked

    async def serve(self, stream: ControlStream, join: Join) -> None:
        """Serve a peer that asks us, for as long as its stream is ours or belongs to a group.

        Raises:
            PeerProtocolError: the peer contradicts itself.
        """
        peer, terms = stream.peer_id, self._terms
        try:
            check_join(join, peer)
        except PeerProtocolError as error:
            self._env.events.emit(PeerDropped(peer=peer, where=WHERE, reason=error.message))
            raise
        if self._machine.phase is Phase.OVER:
            await stream.send(JoinRefused("started", "the group has started"))
            return
        if join.group != terms.group_key:
            await stream.send(JoinRefused("not-looking", "looking for a group under another key"))
            return
        if (refusal := terms.refusal(join)) is not None:
            self.feed(Mismatched(peer, refusal.text))
            await stream.send(refusal)
            return
        others = [join.member, *(inbound.member for inbound in self._inbound.values())]
        if not terms.has_room(others, self._endpoint.limits.header_bytes):
            await stream.send(JoinRefused("full", "what the members gathered is too much for one message"))
            return
        if (old := self._inbound.get(peer)) is not None:
            if join.expiration < old.expiration:  # streams are not ordered among each other: this Join is an older one
                await stream.send(JoinRefused("later", "you have asked again since"))
                return
            self._answer(peer, JoinRefused("replaced", "you have asked again"))
            self.feed(JoinGone(peer))
        inbound = self._inbound[peer] = Inbound(stream, join.member, join.expiration)
        contact = self._endpoint.dialable(join.member.contact)
        reduces = join.member.reduces and bool(contact.addresses)
        self.feed(JoinAsked(contact, join.expiration, reduces, join.member.contributes))
        try:
            await inbound.run()
        finally:
            if self._inbound.get(peer) is inbound:
                del self._inbound[peer]
                self.feed(JoinGone(peer))

    def _answer(self, peer: PeerID, answer: JoinAccepted | JoinRefused | JoinRedirected) -> None:
        if (inbound := self._inbound.get(peer)) is not None:
            inbound.post(answer)
            if not isinstance(answer, JoinAccepted):
                del self._inbound[peer]

    def _begin(self, followers: Sequence[PeerID]) -> None:
        terms, rng = self._terms, self._env.rng
        self._inbound = {peer: self._inbound[peer] for peer in followers}
        members = [terms.member, *(inbound.member for inbound in self._inbound.values())]
        rng.shuffle(members)
        mine = members.index(terms.member)
        try:
            slices, part_bytes = terms.plan([self._as_reducer(member) for member in members])
        except Exception:
            for peer in followers:
                self._answer(peer, JoinRefused("not-looking", "the leader could not divide the work"))
            raise
        begin = Begin(rng.randbytes(16), members, mine, slices, part_bytes)
        inbounds = list(self._inbound.values())
        self._owner.hold(inbounds)
        for inbound in inbounds:
            inbound.begin(begin)
        self._found(begin, mine, {peer: self._inbound[peer].stream for peer in followers}, inbounds)

    def _as_reducer(self, member: Member) -> Member:
        """The member as the plan sees it: it reduces nothing if this peer has dialed it twice in vain."""
        shut = member.reduces and self._endpoint.way_shut(member.contact.peer)
        return replace(member, reduces=False) if shut else member

    def _found(
        self, begin: Begin, my_index: int, controls: dict[PeerID, ControlStream], inbounds: Sequence[Inbound] = ()
    ) -> None:
        streams, owner = () if inbounds else tuple(controls.values()), self._owner
        group = Group(
            round_id=begin.round_id,
            members=tuple(begin.members),
            my_index=my_index,
            coordinator=begin.coordinator,
            slices=tuple(begin.slices),
            part_bytes=begin.part_bytes,
            controls=controls,
            on_release=lambda: owner.release(streams, inbounds),
        )
        if self._result.done():  # cancelled meanwhile
            group.release()
        else:
            self._result.set_result(group)

    def _take(self, begin: Begin, my_index: int, stream: ControlStream) -> bool:
        """A checked `Begin` came from our leader; returns whether we are in that group and keep the stream."""
        if self._machine.phase is not Phase.FOLLOWING:
            return False
        for member in begin.members:
            self._endpoint.learn(member.contact)
        self._found(begin, my_index, {stream.peer_id: stream})
        return True

    def _declarations(self, entries: Iterable[tuple[Contact, float]]) -> tuple[Declaration, ...]:
        return tuple(Declaration(self._endpoint.dialable(contact), expiration) for contact, expiration in entries)
