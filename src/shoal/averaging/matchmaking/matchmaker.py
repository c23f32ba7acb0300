"""The matchmaker of one averager: forms one group after another.

It is the shell of the pure `GroupMachine`, which makes every decision of a search: it owns the streams, the timer, the
directory and the tasks, hands each event to the machine (`_feed`), and carries out the machine's actions (`_do`).

- Everything happens in the loop thread, one event at a time; an action is carried out at once or starts a task.
- A read, a declaration and each join has a deadline, and ends in one event unless it is stopped.
- When a search is over, its events are dropped. Last messages to others are sent in the background, in bounded time.

The matchmaker outlives each search and keeps the knowledge for the next search (`Memory`): peers whose links were lost,
the members of the last group, how long the directory takes. If the expected peers are known and the last round
succeeded, the leader of the last group leads the next one too. It declares itself a little earlier than the others, and
they ask it at once, without the directory. A peer that asks while we do not search is refused: its read is stale, and
it finds us again by our next declaration.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from shoal.averaging.group import ControlStream, Group
from shoal.averaging.matchmaking import events
from shoal.averaging.matchmaking.config import MANY, MatchmakingConfig
from shoal.averaging.matchmaking.declarations import Memory
from shoal.averaging.matchmaking.directory import GroupDirectory
from shoal.averaging.matchmaking.expected import LOOKED_AT
from shoal.averaging.matchmaking.joins import (
    BEGIN_OVERHEAD_BYTES,
    JoinRequest,
    JoinTerms,
    check_join,
    check_last_answer,
    end_stream,
    member_bytes,
    receive_answer,
)
from shoal.averaging.matchmaking.machine import GroupMachine
from shoal.base.clock import Env, seconds_text
from shoal.base.ordered import OrderedSet
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes, Tasks, WhileMoving
from shoal.errors import (
    ClosedError,
    ConfigError,
    LocalError,
    PeerError,
    PeerProtocolError,
    PeerRefused,
    RoundFailed,
    SchemaMismatch,
    ShoalError,
)
from shoal.events import GroupFormed, PeerDropped, Warned
from shoal.protocol.wire import Begin, Contact, Join, JoinAccepted, JoinRedirected, JoinRefused, Member
from shoal.rpc import LOOK_S, Endpoint

__all__ = ["Matchmaker"]

_WHERE = "matchmaking"
_FAREWELL_S = 3.0
"""The longest time for a stream to end in order, in the background."""

_WITHDRAW_AFTER_S = 0.1
"""The time from the end of a search to the withdrawal of its declaration."""

_WITHDRAW_AGAIN_S = 1.5
"""The pause before it is tried again, twice: a peer that was stopped finds its links broken at first."""

_HELD_S = 0.5
"""If the leader of the last group does not search yet, it waits so long before it refuses a peer that asks it: the news
that made that peer search may be on its way here too."""

Plan = Callable[[Sequence[Member]], tuple[list[int], int]]
"""From a group's members, in order: how many elements each reduces, and the most bytes of one encoded tile."""


@dataclass(eq=False, slots=True)
class _Search:
    """The state of one search.

    Attributes:
        group_key: the key that is looked under.
        member: this peer's word about itself, which all others will see.
        machine: decides.
        result: the group, or why there is none.
        precedence: of the others: see `Precedence`.
        group: the group, also if nobody waits for the result.
        requests: the peers that asked us, and have not been refused.
        asking: asks a peer to lead us, and stays with it.
        leader_stream: the stream of `asking`.
        reading: reads the directory.
        nudging: the nudges, by peer.
        timer: wakes the machine.
        ended: nothing happens in this search any more.
    """

    group_key: str
    member: Member
    machine: GroupMachine
    result: asyncio.Future[Group]
    precedence: events.Precedence
    group: Group | None = None
    requests: dict[PeerID, JoinRequest] = field(default_factory=dict)
    asking: asyncio.Task[None] | None = None
    leader_stream: ControlStream | None = None
    reading: asyncio.Task[None] | None = None
    nudging: dict[PeerID, asyncio.Task[None]] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    ended: bool = False

    def fail(self, error: BaseException) -> None:
        """The search cannot go on; `form_group` raises `error`."""
        if not self.result.done():
            self.result.set_exception(error)


class Matchmaker:
    """Forms groups for one averager. Loop thread only.

    Args:
        endpoint: calls and streams of this peer; not owned.
        env: clock, chance, events.
        directory: the directory in which peers declare themselves.
        config: sizes and times.
        prefix: the averager's name; group keys are `prefix.0b` and bits.
        terms: what must be the same at all members.
        plan: takes a group's members, in order; returns how many elements each reduces, and the bytes of one tile.

    Attributes:
        stop_serving: lets nobody join here any more. Safe to call twice.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        env: Env,
        directory: GroupDirectory,
        config: MatchmakingConfig,
        *,
        prefix: str,
        terms: JoinTerms,
        plan: Plan,
    ) -> None:
        self._endpoint, self._env, self._directory, self._config = endpoint, env, directory, config
        self._prefix, self._terms, self._plan = prefix, terms, plan
        self._memory = Memory()
        self._companions: tuple[str, frozenset[PeerID]] = ("", frozenset())
        self._search: _Search | None = None
        self._begun = Changes()
        self._tasks = Tasks(self._on_failure)
        self._looking: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._requests = OrderedSet[JoinRequest]()
        self._closed = False
        self.stop_serving = endpoint.serve_stream(Join, self._serve_join, scope=prefix)
        self._unsubscribe = endpoint.on_lost(self._on_lost), endpoint.on_linked(self._on_linked)

    # --------------------------------------------------------------------------------------------------- the work

    @property
    def group_size(self) -> int:
        """The size of the group that joins us in this search, including this peer; 0 between searches."""
        return 0 if self._search is None else self._search.machine.group_size

    @property
    def joined_at(self) -> float:
        """When a peer joined us last in this search, or it began (loop time, seconds); -infinity between searches."""
        return -math.inf if self._search is None else self._search.machine.joined_at

    async def form_group(
        self,
        *,
        group_key: str,
        gathered: bytes = b"",
        reference: bytes = b"",
        deadline_s: float | None = None,
        one_window: bool = False,
        expected: Callable[[], frozenset[PeerID] | None] | None = None,
        precedence: events.Precedence = events.Precedence(),  # noqa: B008 (frozen)
    ) -> Group:
        """Find a group and agree on it. The owner of the group must `release` it.

        Args:
            group_key: `prefix.0b` and bits: peers that look under the same key can meet.
            gathered: our value for all other members, at most 64 KiB.
            reference: the name of the average that our values may be coded against; empty: none.
            deadline_s: see `GroupMachine`.
            one_window: see `GroupMachine`.
            expected: see `GroupMachine`.
            precedence: see `GroupMachine`.

        Raises:
            RoundFailed: there is no group; says why.
            SchemaMismatch: only peers whose tensors or settings differ were met; names the first difference.
            LocalError: a search is going on.
            ConfigError: this peer is auxiliary, and cannot be dialed.
            ClosedError: the matchmaker was closed.
        """
        if self._closed:
            raise ClosedError("this matchmaker was closed")
        if self._search is not None:
            raise LocalError("form_group was called while another form_group is running: one group at a time")
        loop, endpoint = asyncio.get_running_loop(), self._endpoint
        started, member = loop.time(), self._member(gathered, reference)
        self._memory.companions = self._companions[1] if self._companions[0] == group_key else frozenset()
        machine = GroupMachine(
            member,
            self._config,
            self._memory,
            now=started,
            wall_offset_s=self._env.clock.time() - started,
            deadline_s=deadline_s,
            one_window=one_window,
            expected=expected,
            is_silent=lambda peer, soon: endpoint.is_silent(peer, soon=soon),
            contact_of=endpoint.contact_of,
            precedence=precedence,
        )
        search = self._search = _Search(group_key, member, machine, loop.create_future(), precedence)
        self._begun.notify()
        try:
            self._feed(search, None)
            group = await search.result
            await self._send_begins(search)
        except BaseException:
            if search.group is not None:
                search.group.release()
            raise
        finally:
            self._search = None
            self._end(search)
            del search  # an error's traceback holds this frame, and the search's result holds the error
        self._companions = (group_key, frozenset(group.peers))
        self._remember(group if expected is not None else None)
        self._emit_formed(group, loop.time() - started)
        return group

    def _emit_formed(self, group: Group, waited_s: float) -> None:
        coordinator = group.peers[group.coordinator]
        event = GroupFormed(
            prefix=self._prefix, round_id=group.round_id, peers=group.peers, coordinator=coordinator, waited_s=waited_s
        )
        self._env.events.emit(event)

    def _member(self, gathered: bytes, reference: bytes) -> Member:
        config = self._config
        contact = Contact(self._endpoint.peer_id) if config.client_mode else self._endpoint.contact
        reduces = bool(contact.addresses) and config.bandwidth != 0
        if config.auxiliary and not reduces:
            raise ConfigError(
                "auxiliary=True needs a peer that can be dialed, and a bandwidth other than 0: give it both"
            )
        bandwidth = self._endpoint.upload_bytes_per_s if config.bandwidth is None else config.bandwidth
        return Member(contact, reduces, bandwidth, gathered, not config.auxiliary, reference)

    def _feed(self, search: _Search, event: events.Event | None) -> None:
        """Hand an event (None: the begin of the search) to the machine, and carry out its actions."""
        if search.ended:
            return
        loop, machine = asyncio.get_running_loop(), search.machine
        now = loop.time()
        machine.set_wall_clock(self._env.clock.time() - now)
        try:
            for action in machine.start(now) if event is None else machine.handle(event, now):
                self._do(search, action)
        except Exception as error:  # noqa: BLE001 (raised by `form_group`, to our caller)
            search.fail(error)
        if search.timer is not None:
            search.timer.cancel()
        deadline = machine.deadline()
        search.timer = None if deadline is None else loop.call_at(deadline, self._feed, search, events.Tick())

    def _do(self, search: _Search, action: events.Action) -> None:
        match action:
            case events.Declare() | events.Withdraw():
                self._writing = self._tasks.spawn(self._write(search, action, self._writing))
            case events.ReadDirectory():
                if search.reading is not None:
                    search.reading.cancel()
                search.reading = self._tasks.spawn(self._fetch_declarations(search))
            case events.Nudge(contact, expiration):
                search.nudging[contact.peer] = self._tasks.spawn(self._join(search, contact, expiration, nudge=True))
            case events.AskToLead(contact, expiration):
                search.asking = self._tasks.spawn(self._join(search, contact, expiration, nudge=False))
            case events.LeaveLeader():
                if search.asking is not None:
                    search.asking.cancel()
            case events.Answer(peer, answer):
                self._answer(search, peer, answer)
            case events.Start(followers):
                self._begin(search, followers)
            case events.Enter(begin):
                self._enter(search, begin)
            case events.Fail(reason, peers, mismatch):
                search.fail((SchemaMismatch if mismatch else RoundFailed)(reason, peers))

    # ------------------------------------------------------------------------------------------------- directory

    async def _write(
        self, search: _Search, action: events.Declare | events.Withdraw, before: asyncio.Task[None] | None
    ) -> None:
        """Declare ourselves, or withdraw that, after the write to the directory that goes on has been stopped."""
        if before is not None and not before.done():
            before.cancel()
            await asyncio.wait((before,), timeout=self._config.request_timeout_s)
        if isinstance(action, events.Declare):
            await self._fetch_declarations(search, action.expiration)
            return
        # Others may wait for their `Begin`, and a new declaration replaces ours. Until then we refuse each peer that
        # asks us, which costs it one answer.
        why = ""
        for pause_s in (_WITHDRAW_AFTER_S, _WITHDRAW_AGAIN_S, _WITHDRAW_AGAIN_S):
            if why and self._closed:
                break
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(self._config.request_timeout_s):
                    await self._directory.withdraw(search.group_key)
                return
            except ClosedError:
                return  # this peer leaves
            except (ShoalError, TimeoutError) as error:
                why = str(error) or "no answer in time"
        self._warn(
            f"could not withdraw a declaration ({why}): until it expires, others may ask this peer in vain, which "
            "costs each one answer. If this comes often, check the line of this peer: `shoal doctor INVITE`"
        )

    async def _fetch_declarations(self, search: _Search, expiration: float | None = None) -> None:
        """Read the directory; or declare ourselves until `expiration`, which shows the same."""
        key = search.group_key
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                if expiration is None:
                    entries = await self._directory.read(key)
                else:
                    entries = await self._directory.declare(key, expiration, search.member.contact)
        except (ShoalError, TimeoutError) as error:
            failed = events.DirectoryFailed if expiration is None else events.DeclareFailed
            self._feed(search, failed(str(error) or "no answer in time"))
        else:
            found = tuple(events.Declaration(self._endpoint.dialable(contact), until) for contact, until in entries)
            self._feed(search, events.DirectoryRead(found) if expiration is None else events.Declared(found))

    # ----------------------------------------------------------------------------------------------- asking others

    async def _join(self, search: _Search, contact: Contact, expiration: float, *, nudge: bool) -> None:
        """Ask a peer to lead us, and stay with it for as long as it does; or nudge it, and take its first answer.

        A message that has no place in the exchange costs the other peer its role as our leader. The stream is finished
        in order if the other side finished it, and is left with `Leave` otherwise. Only the stream of a `Begin` that
        the machine took stays open, for the round.
        """
        peer, timeout_s, terms = contact.peer, self._config.request_timeout_s, self._terms
        join = Join(search.group_key, terms.schema, dict(terms.settings), expiration, search.member)
        stream: ControlStream | None = None
        answer: object = None
        event: events.Event = events.Nudged(peer, None)
        try:
            try:
                stream = await self._endpoint.open(contact, join, timeout_s=timeout_s)
                async with WhileMoving(timeout_s, lambda: stream.bytes_moved):
                    answer = await receive_answer(stream)
                if nudge:
                    event = events.Nudged(peer, answer if isinstance(answer, JoinRefused | JoinRedirected) else None)
                else:
                    search.leader_stream = stream
                    while isinstance(answer, JoinAccepted):
                        self._feed(search, events.Answered(peer, answer))
                        answer = await receive_answer(stream)
                    last = check_last_answer(answer, peer, search.member, self._config.min_group_size)
                    event = events.Answered(peer, last)
            except PeerRefused as refusal:
                refused = JoinRefused("not-looking", refusal.message)
                event = events.Nudged(peer, refused) if nudge else events.Answered(peer, refused)
            except (PeerError, TimeoutError) as error:
                late = f"no answer within {seconds_text(timeout_s)}"
                reason = error.message if isinstance(error, PeerError) else late
                if isinstance(error, PeerProtocolError):
                    self._env.events.emit(PeerDropped(peer=peer, where=_WHERE, reason=reason))
                event = event if nudge else events.LeaderLost(peer, reason)
            self._feed(search, event)
        finally:
            kept = not nudge and isinstance(answer, Begin) and search.leader_stream is None
            if stream is not None and not kept:
                self._end_stream(stream, leave=not isinstance(answer, JoinRefused | JoinRedirected))

    def _enter(self, search: _Search, begin: Begin) -> None:
        """Our leader began a group with us."""
        stream, search.leader_stream = search.leader_stream, None
        assert stream is not None
        for member in begin.members:
            self._endpoint.learn(member.contact)
        self._found(search, begin, {stream.peer_id: stream}, lambda: self._end_stream(stream, leave=False))

    # ------------------------------------------------------------------------------------------------- being asked

    async def _serve_join(self, stream: ControlStream, join: Join) -> None:
        """Serve a peer that asks us, for as long as its stream is ours or belongs to a group.

        Raises:
            PeerProtocolError: the peer contradicts itself.
        """
        if self._search is None and self._memory.leaders.led:
            await self._begun.next(_HELD_S)
        peer, search = stream.peer_id, self._search
        if search is None:
            await stream.send(JoinRefused("not-looking", "not looking for a group now"))
            return
        try:
            check_join(join, peer)
            refusal = self._refusal(search, join)
        except PeerProtocolError as error:
            self._env.events.emit(PeerDropped(peer=peer, where=_WHERE, reason=error.message))
            raise
        if refusal is not None:
            await stream.send(refusal)
            return
        if peer in search.requests:
            sometimes("a peer asks again before its last question is over")
            self._answer(search, peer, JoinRefused("replaced", "you have asked again"))
            self._feed(search, events.JoinEnded(peer))
        request = search.requests[peer] = JoinRequest(stream, join)
        self._requests.add(request)
        contact, contributes = self._endpoint.dialable(join.member.contact), join.member.contributes
        reduces = join.member.reduces and bool(contact.addresses)
        self._feed(search, events.JoinRequested(contact, join.expiration, reduces, contributes))
        try:
            await request.run()
        finally:
            self._requests.discard(request)
            if search.requests.get(peer) is request:
                del search.requests[peer]
                self._feed(search, events.JoinEnded(peer))

    def _refusal(self, search: _Search, join: Join) -> JoinRefused | None:
        """The reason why a peer cannot join, before the machine hears of it; None if there is none."""
        peer = join.member.contact.peer
        if search.machine.phase is events.SearchPhase.OVER:
            return JoinRefused("started", "the group has started")
        if join.group != search.group_key:
            return JoinRefused("not-looking", "looking for a group under another key")
        if (refusal := self._terms.refusal(join, self._endpoint.peer_id)) is not None:
            self._feed(search, events.Mismatched(peer, refusal.text))
            return refusal
        nbytes = BEGIN_OVERHEAD_BYTES + member_bytes(search.member) + member_bytes(join.member)
        nbytes += sum(request.nbytes for request in search.requests.values())
        most = self._endpoint.limits.header_bytes
        if nbytes > (most // 2 if search.precedence.is_strange(peer) else most):
            return JoinRefused("full", "what the members gathered is too much for one message")
        if peer in search.requests and join.expiration < search.requests[peer].expiration:
            # Streams are not ordered among each other: this Join is an older one.
            return JoinRefused("later", "you have asked again since")
        return None

    def _answer(self, search: _Search, peer: PeerID, answer: JoinAccepted | JoinRefused | JoinRedirected) -> None:
        if (request := search.requests.get(peer)) is not None:
            request.post(answer)
            if not isinstance(answer, JoinAccepted):
                del search.requests[peer]

    def _begin(self, search: _Search, followers: Sequence[PeerID]) -> None:
        """Fix members, shares and tiles of a group that we lead, and tell its members."""
        rng, requests = self._env.rng, {peer: search.requests[peer] for peer in followers}
        search.requests = requests
        members = [search.member, *(request.member for request in requests.values())]
        rng.shuffle(members)
        try:
            shares, tile_bytes = self._plan(self._usable(search, members, members.index(search.member)))
        except Exception:
            for peer in followers:
                self._answer(search, peer, JoinRefused("not-looking", "the leader could not divide the work"))
            raise
        begin = Begin(rng.randbytes(16), members, members.index(search.member), shares, tile_bytes)
        for request in requests.values():
            request.post(begin)

        def release() -> None:
            for request in requests.values():
                request.release()

        self._found(search, begin, {peer: request.stream for peer, request in requests.items()}, release)

    def _usable(self, search: _Search, members: Sequence[Member], leader: int) -> list[Member]:
        """The members as a plan takes them: one reduces nothing if this peer has dialed it twice in vain."""
        able = [each.reduces and not self._endpoint.route_shut(each.contact.peer) for each in members]
        proved = [a and not search.precedence.spares(each.contact.peer) for a, each in zip(able, members, strict=True)]
        able = proved if any(proved) else able
        if len(members) > MANY and sum(able) > 1:
            able[leader] = False
        return [replace(each, reduces=r) for each, r in zip(members, able, strict=True)]

    def _found(
        self, search: _Search, begin: Begin, controls: dict[PeerID, ControlStream], on_release: Callable[[], None]
    ) -> None:
        usable = self._usable(search, begin.members, begin.coordinator)
        follows = begin.members[begin.coordinator] is not search.member and any(member.reduces for member in usable)
        group = search.group = Group(
            round_id=begin.round_id,
            members=tuple(begin.members),
            my_index=begin.members.index(search.member),
            coordinator=begin.coordinator,
            shares=tuple(begin.shares),
            tile_bytes=begin.tile_bytes,
            fair=tuple(self._plan(usable)[0]) if follows else (),
            controls=controls,
            on_release=on_release,
        )
        if not search.result.done():  # else `form_group` is cancelled, and releases it
            search.result.set_result(group)

    async def _send_begins(self, search: _Search) -> None:
        """Wait until all followers were sent `Begin`. One that is not reached in time is a dead member of the round."""
        left_s = max(0.0, search.machine.over_at - asyncio.get_running_loop().time())
        if begun := {request.begun: request.stream for request in search.requests.values()}:
            await asyncio.wait(begun, timeout=min(self._config.request_timeout_s, left_s))
            for sent, stream in begun.items():
                if not sent.done():
                    sometimes("a follower cannot be told that its group begins")
                    stream.abort()

    # ---------------------------------------------------------------------------------------------- between searches

    def _remember(self, group: Group | None) -> None:
        self._memory.leaders.led = group is not None and group.leads
        self._memory.leaders.last = None if group is None or group.leads else group.members[group.coordinator].contact
        if group is not None and self._looking is None and len(group.members) <= LOOKED_AT:
            self._looking = self._tasks.spawn(self._look_loop())

    async def _look_loop(self) -> None:
        """Between searches: look at the peers that the next one would wait for, so that it knows which are silent.

        Members of a large group are not looked at: a silent one is noticed in the search.
        A follower will ask the leader of the last group first; the leader will wait for its members.
        """
        leaders = self._memory.leaders
        while not self._closed and (leaders.led or leaders.last is not None):
            awaited = self._companions[1] if leaders.last is None else {leaders.last.peer}
            for peer in awaited if self._search is None and len(awaited) <= LOOKED_AT else ():
                self._endpoint.is_silent(peer, soon=leaders.led)
            await asyncio.sleep(LOOK_S)
        self._looking = None

    def avoid(self, leader: PeerID, members: int) -> None:
        """Another peer is to lead groups like the last one, which had so many members: see `LeaderMemory.avoid`."""
        self._memory.leaders.avoid(leader, asyncio.get_running_loop().time(), self._config.window_s, members)

    def played(self, group: Group, there: frozenset[PeerID], *, counted: bool) -> None:
        """The round of a group is over: these members were there in time, and our values counted, or did not."""
        leader = None if group.leads else group.peers[group.coordinator]
        if (other := self._memory.leaders.played(leader, there)) is not None:
            sometimes("a peer comes to a group that another peer leads than before")
            self.avoid(other, len(group.members))
        if leader is not None:
            for each in self._memory.leaders.relied((leader,), () if counted else (leader,)):
                self.avoid(each, len(group.members))

    def forget_leader(self) -> None:
        """The round of the last group failed: its leader has no privilege in the next one."""
        self._remember(None)

    def take_failures(self) -> tuple[list[PeerID], set[PeerID]]:
        """The peers that failed us in the last search, once: see `LeaderMemory.take_failures`."""
        return self._memory.leaders.take_failures()

    def _on_lost(self, peer: PeerID, _reason: str) -> None:
        # Each declaration that it made before now ends at the latest one window from now.
        self._memory.lose(peer, self._env.clock.time() + self._config.window_s)
        if self._search is not None:
            self._feed(self._search, events.PeerLost(peer))

    def _on_linked(self, peer: PeerID) -> None:
        """It is here again: what it declares counts. To ask a peer in vain that has not declared anew costs little."""
        self._memory.lost.pop(peer, None)

    # --------------------------------------------------------------------------------------------------- the end

    def _end(self, search: _Search) -> None:
        """The search is over: stop everything, and tell those that wait for us. Safe to call twice."""
        if search.ended:
            return
        self._feed(search, events.Cancel())
        search.ended = True
        if search.timer is not None:
            search.timer.cancel()
        for task in (search.reading, *search.nudging.values()):
            if task is not None:
                task.cancel()
        search.asking = search.reading = None  # a cancelled task holds its error, whose traceback holds the search
        search.nudging.clear()

    def _end_stream(self, stream: ControlStream, *, leave: bool) -> None:
        """End a stream in order, in the background."""
        if not stream.closed:
            self._tasks.spawn(end_stream(stream, leave=leave))

    def _on_failure(self, error: BaseException) -> None:
        """A task failed for a reason of our own."""
        if self._search is not None:
            self._search.fail(error)
        else:
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, message: str) -> None:
        self._env.events.emit(Warned(where=_WHERE, message=message))

    async def close(self) -> None:
        """Stop: a running `form_group` raises `ClosedError`, groups are released, our declaration is withdrawn.

        Takes a few seconds at most. Safe to call twice.
        """
        if self._closed:
            return
        self._closed = True
        self.stop_serving()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        if self._search is not None:
            self._search.fail(ClosedError("this matchmaker was closed"))
            self._end(self._search)
        for request in self._requests:
            request.release()
        await self._tasks.wait(_FAREWELL_S)
        await self._tasks.cancel()
