"""One round: the group is formed, the values are copied in; at the end the averages are committed, or nothing happened.

`Round.run` returns when this member may apply the averages, or raises `RoundFailed`. After that the round stays able to
give averages and its verdict to members that were left out, until `close`: the caller closes the round when it needs
the vector for the next one. `RoundTable` finds the round that an incoming stream belongs to, and remembers recent
verdicts.

What to do is decided by two pure machines: `MemberMachine`, and at the coordinator also `Coordinator`. Here are the
tasks, the streams and the time. The coordinator and each other member talk on the stream by which the group was formed.
When such a stream ends before the verdict, the coordinator leaves that member out; a member that loses the coordinator
asks the others whether they know the verdict, and gives up when none of them can still learn it. Values and averages go
on streams of their own, from each member to each reducer. A stream of these that breaks costs the round nothing by
itself: the reducer leaves the sender out of the tiles that are not done yet; the sender tells the coordinator which
reducer it cannot reach, and gets another source or another reducer. An auxiliary member opens no such stream: it serves
those of the others.

An auxiliary member's time limits start with the first sign of a contributing member: such members may begin later, when
their values are ready.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from blake3 import blake3

from shoal.averaging.allreduce.commit import Ask, Average, Contribute, Order
from shoal.averaging.allreduce.coordinator import Coordinator, CoordinatorAction, LeftOut, Lied, Replaced, Send
from shoal.averaging.allreduce.interface import MAX_WEIGHT, MIN_WEIGHT, Outcome, RoundOptions, any_weight, is_weight
from shoal.averaging.allreduce.lateness import LEAST_S
from shoal.averaging.allreduce.member import AskOthers, Blame, CutOff, Finish, LookAt, MemberAction, MemberMachine
from shoal.averaging.allreduce.round_tiles import RoundTiles
from shoal.averaging.allreduce.segments import common_reference
from shoal.averaging.allreduce.signed import SignedWords
from shoal.averaging.allreduce.slow_lines import promised_s
from shoal.averaging.allreduce.streams import Answer, DownStream, ReducerStream, SenderStream, UpStream
from shoal.averaging.allreduce.vector import Vector
from shoal.averaging.group import ControlStream, Group
from shoal.base.bounded import put_last
from shoal.base.clock import seconds_text, shielded
from shoal.base.ordered import OrderedSet
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes, Tasks
from shoal.errors import ConfigError, PeerError, PeerProtocolError, PeerRefused, RoundFailed
from shoal.events import PeerDropped, Warned
from shoal.layout import Tiling
from shoal.protocol.identity import Identity
from shoal.protocol.wire import (
    MAX_GROUP_SIZE,
    Abort,
    AskVerdict,
    Commit,
    CommitDigest,
    Contact,
    Held,
    Leave,
    PartAbsent,
    PartAverage,
    PartData,
    PartRequest,
    Reduce,
    Report,
    Shown,
    Verdict,
    encode,
)
from shoal.rpc import LOOK_S, Endpoint, Stream

__all__ = ["Outcome", "Round", "RoundOptions", "RoundTable", "Seen"]

_LOOK_S = LOOK_S / 2
"""A round stands still while it waits for a silent member: a finer look finds that out earlier."""

_FAREWELL_S = 1.0
"""A round waits so long at its end for the others to end their streams."""

_ASK_TIMEOUT_S = 2.0
"""The longest time for an `AskVerdict`."""

_ASK_PAUSE_S = 0.1
"""The pause until the others are asked for the verdict again."""

_ARRIVAL_S = 10.0
"""A `Reduce` stream waits so long for its round to begin here."""

_SHARE = 0.75
"""Members with slow lines are waited for for this part of the longest time of a round at most: then averages follow."""

_MAX_EARLY_STREAMS = 2 * MAX_GROUP_SIZE
"""The most `Reduce` streams that wait for their rounds: those of all members of two."""

_BUNDLE_S, _REPORTS_PER_S = 0.05, 10_000
"""A report waits so long for further news, unless somebody may be waiting for it; in a large group longer: all members
together send the coordinator so many a second."""

_TICKS_PER_S = 1000
"""Who is late is looked at twice in `LEAST_S`; in a large group more rarely: for so many members a second."""

_REMEMBERED_IDS = 4096
"""The number of rounds whose ids are remembered: this peer takes part in no other round with one of them."""

_REMEMBERED_VERDICTS = 64
"""The number of rounds whose verdicts are remembered."""


class Seen(NamedTuple):
    """What one member saw of the others in a round."""

    late: frozenset[PeerID]
    """They kept all others waiting: their averages were late, see `MemberMachine.late`; or they were the coordinator,
    and were lost, or did not decide in time."""
    unheard: frozenset[PeerID]
    """Their values or averages did not come to this member in time."""
    bad_lines: frozenset[PeerID]
    """This member did not wait for what they give (see `Round`)."""
    hurried: frozenset[PeerID]
    """They were waited for briefly, and left out, as all others were done."""
    waited_s: float
    """The time in which nobody was waited for but those that are waited for briefly."""
    lost_s: float
    """The time for which the slowest of the others were waited for, see `MemberMachine.lost_s`."""
    reduced: frozenset[PeerID]
    """They own tiles, after all that were moved."""
    led_badly: bool
    """Another member led the round, and aborted it though we gave values, was lost, or decided far too late; or what it
    said was false."""
    decided_late: bool
    """Another member led the round, and decided it later than is usual, see `MemberMachine.decided_late`."""


class Round:
    """One member's part in one round.

    Args:
        table: the table in which incoming streams find the round.
        group: the members, the coordinator, and the share that each member averages.
        vector: the numbers; `copy_in` was called, unless this member is an auxiliary one: then no tensor is read.
        weight: the weight of this member's values, 0 (takes part without counting) or within
            `MIN_WEIGHT`..`MAX_WEIGHT`. 0 for an auxiliary member.
        options: patience.
        brief_s: how long these are waited for when all others have done their part, seconds (`brief`). They can have
            the averages all the same.
        bad_lines: this member waits for no values and averages of these by the lines between them, unless that is more
            than half of all others: then its own line may be the bad one.
        on_lie: called, with the coordinator, if its signatures prove that it has told members different commits.

    Attributes:
        machine: this member's part, without input and output.
        begun: the digest of the message with which the leader began the round.
        terms: its first bytes, by which two members find that they were told different things.
        kept: the members that had not ended their streams when `end_streams` stopped waiting for them.

    Raises:
        ConfigError: the group's shares and tiles do not fit the tensors, or the weight cannot be used.
    """

    def __init__(
        self,
        table: RoundTable,
        group: Group,
        vector: Vector,
        *,
        weight: float,
        options: RoundOptions,
        brief_s: Mapping[PeerID, float] = MappingProxyType({}),
        bad_lines: Collection[PeerID] = (),
        on_lie: Callable[[PeerID], None] = lambda _: None,
    ) -> None:
        self.endpoint, self.env = table.endpoint, table.endpoint.env
        self.round_id, self.members = group.round_id, list(group.members)
        self.me, self.coordinator = group.my_index, group.coordinator
        self.tiling = _cut(group, vector, weight)
        self.begun = blake3(encode(group.begin)).digest()
        self.terms = self.begun[:16]
        reducers = self.tiling.owners
        self._table, self._options, self._on_lie = table, options, on_lie
        peers = [member.contact.peer for member in self.members]
        self._words = SignedWords(table.identity, self.begun, peers, self.coordinator)
        self._loop, self._over, self._closed = asyncio.get_running_loop(), False, False
        self._promised_s = self._promises(vector)
        self._index = {member.contact.peer: index for index, member in enumerate(self.members)}
        self._brief_s = {index: brief_s[peer] for peer, index in self._index.items() if peer in brief_s}
        self._brief_s.pop(self.me, None)
        self.machine = MemberMachine(
            self.round_id,
            self.me,
            self.coordinator,
            self.members,
            reducers,
            silence_s=options.silence_s,
            now=self._loop.time(),
            promised_s=self._promised_s,
            spare_s=options.spare_s,
            brief_s=self._brief_s,
            most_weight=options.most_weight or any_weight,
        )
        self._tiles = RoundTiles(vector, self.tiling.tiles, self.machine, self.env.executor, weight=weight)
        self._coordinating = self._new_coordinator(reducers) if self.me == self.coordinator else None
        # Of the coordinator: to each other member; of another member: to the coordinator.
        self._control: dict[int, ControlStream] = {
            index: group.controls[peer] for peer, index in self._index.items() if peer in group.controls
        }
        self._to_say: dict[int, asyncio.Queue[Order | None]] = {index: asyncio.Queue() for index in self._control}
        self._senders: dict[int, SenderStream] = {}
        self._reducing: dict[int, ReducerStream] = {}
        self._serving = OrderedSet[DownStream]()
        self._ended_one = Changes()
        # The streams of data, and of control, with each member that have not ended.
        self._open, self._talking = Counter[int](), Counter[int]()
        self.kept = frozenset[PeerID]()
        self._moved_before = 0  # on streams that are over
        # Tasks that are over are not kept: their errors know this round, and memory in cycles is freed late.
        self._tasks, self._talks, self._reporting = (Tasks(self._failed) for _ in range(3))
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._news, self._urgent = Changes(), Changes()
        self._sign = asyncio.Event()
        self._bad_lines = {index for peer, index in self._index.items() if peer in bad_lines}
        if 2 * len(self._bad_lines) > len(self.members) - 1:
            self._bad_lines = set()
        self._late, self._began = set[int](), self._loop.time()
        self._ended: float | None = None
        # How far the members other than the coordinator were, and since when.
        self._moved: tuple[int, int] | None = None
        self._moved_at = self._began
        self._gives, self._led_badly = weight > 0, False
        self._looked_at: dict[int, bool] = {}  # called gone by the coordinator; whether they gave us something since
        self._told: set[int] = set()  # those that were told of another group
        self._blamed: dict[tuple[PeerID, str], None] = {}
        self._leaving = ExitStack()
        self._leaving.callback(self.endpoint.on_lost(self._peer_lost))

    def _promises(self, vector: Vector) -> list[float]:
        """How long each member is waited for, by what it has to send and the line that it has announced."""
        members, options = self.members, self._options
        if options.since_last_s <= 0:
            return [0.0] * len(members)
        reduced = [0] * len(members)
        for tile, reducer in zip(self.tiling.tiles, self.tiling.owners, strict=True):
            reduced[reducer] += vector.encoded_bytes(tile)
        total, takers = sum(reduced), sum(member.contributes for member in members)
        return promised_s(
            [
                (total - own) * member.contributes + own * (takers - member.contributes)
                for own, member in zip(reduced, members, strict=True)
            ],
            [member.bandwidth for member in members],
            since_last_s=options.since_last_s,
            margin_s=options.silence_s,
            most_s=_SHARE * options.timeout_s,
        )

    @property
    def leader(self) -> PeerID:
        """The peer that decides the round."""
        return self.members[self.coordinator].contact.peer

    @property
    def _stall_s(self) -> float:
        """A reducer may wait this long for a silent sender before it goes on without."""
        return (self._options.reducer_silence_s or 2 * self._options.silence_s) + 2 * self._options.report_s

    @property
    def _tick_s(self) -> float:
        options = self._options
        return min(options.report_s, options.silence_s / 4, max(LEAST_S / 2, len(self.members) / _TICKS_PER_S))

    @property
    def _margin_s(self) -> float:
        """Reducers are waited for so long beyond twice the time of the median.

        One may spare as much for a slow sender, or somewhat more than this peer, and sees that a tick later.
        """
        return min(self._stall_s / 2, max(self._options.spare_s, self._options.report_s) + self._tick_s)

    def _new_coordinator(self, reducers: Sequence[int]) -> Coordinator:
        options = self._options
        return Coordinator(
            self.round_id,
            reducers,
            [member.reduces and not self.endpoint.route_shut(member.contact.peer) for member in self.members],
            [member.contributes for member in self.members],
            self.me,
            min_group_size=options.min_group_size,
            stall_s=self._stall_s,
            now=self._loop.time(),
            margin_s=self._margin_s,
            brief_s=self._brief_s,
            allowed_s=max(self._promised_s),
            is_signed=self._words.has_signed,
        )

    # ----------------------------------------------------------------------------------------------------- one round

    async def run(self) -> Outcome:
        """Take part until the verdict.

        Returns:
            The agreed result; the vector holds the averages (for an auxiliary member: only some of them).

        Raises:
            RoundFailed: no average for this member; nothing was touched.
        """
        if not any(member.contributes for member in self.members):
            self.give_up("all members of the group are auxiliary: nobody has values to average")
            raise self._failure()
        if (first := self._table.add(self)) is not None:
            sometimes("the id of a round is used again")
            if first == self.leader:  # else one of the two has the id from the other
                self._lied(self.coordinator, "has begun another round with this id before")
            self.give_up("its id was used before")
            raise self._failure()
        self._begin_control()
        self._do(self.machine.start(self._loop.time(), self._bad_lines))
        self._reporting.spawn(self._report_loop())
        self._tasks.spawn(self._tick_loop())
        self._tasks.spawn(self._look_loop())
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._done
        except TimeoutError:
            sometimes("a round is not decided in time")
            self._late.add(self.coordinator)
            self.give_up(f"not decided within {seconds_text(self._options.timeout_s)}")
        except asyncio.CancelledError:
            sometimes("a round is cancelled by its caller")
            self.give_up("cancelled")
            raise
        self._ended = self._loop.time()
        commit = self.machine.rules.commit
        if not self.machine.rules.succeeded or commit is None:
            raise self._failure()
        await shielded(self._tiles.settle(commit))
        return Outcome.of(commit, self.members, self.tiling.owners)

    async def end_streams(self, and_then: Callable[[], None] = lambda: None) -> None:
        """The verdict is known: end our streams, so that their connections can be used again.

        A round that succeeded goes on giving its averages to members that were left out, by streams of their own.

        Args:
            and_then: called once the streams of the group have ended; those of data may need longer.
        """
        if not self.machine.rules.succeeded:
            return
        await asyncio.gather(self._end_control(and_then), self._end_data())

    async def close(self, *, orderly: bool = True) -> None:
        """Stop serving this round; afterwards nothing of it touches the vector. Safe to call twice.

        Args:
            orderly: `end_streams` first, if that was not done.
        """
        if self._closed:
            return
        self._leaving.close()
        try:
            if orderly:
                await self.end_streams()
        finally:
            self._over = True
            for stream in list(self._serving):
                stream.abort()
            self._tiles.stop()
            await asyncio.gather(*(tasks.cancel() for tasks in (self._reporting, self._talks, self._tasks)))
            await self._settled()
            self._table.remove(self)
            self._closed = True

    # -------------------------------------------------------------------------------------------------- what happens

    @property
    def seen(self) -> Seen:
        """What this member saw of the others, once the round is over."""

        def peers(members: Iterable[int]) -> frozenset[PeerID]:
            return frozenset(self.members[member].contact.peer for member in members)

        # Where the round fails here alone, our own line may be the bad one: then only a lost coordinator counts. And
        # nobody is to blame for what comes late where the coordinator has not told all members the same.
        judges = self._coordinating is not None or self.machine.rules.succeeded
        judges = judges and not self._word_was_false
        unheard = self.machine.unheard if judges else set()
        late = self._late | (self.machine.late(self._margin_s, self._options.report_s) if judges else set())
        briefs = [self.machine.contributions.brief, *([] if (c := self._coordinating) is None else [c.brief])]
        waited_s = sum(brief.waited_s for brief in briefs)
        hurried = set[int]().union(*(brief.left for brief in briefs))
        away = self._brief_s.keys() | {self.me}
        return Seen(
            late=peers(late - away),
            unheard=peers(unheard - away - self._bad_lines),
            bad_lines=peers(self._bad_lines),
            hurried=peers(hurried),
            waited_s=waited_s,
            lost_s=self.machine.lost_s(self._ended or self._began, waited_s),
            reduced=peers(set(self.machine.rules.reducer)),
            led_badly=self._led_badly or self._word_was_false or self.machine.committed_in_vain,
            decided_late=self.machine.decided_late(self._ended or self._began),
        )

    @property
    def _word_was_false(self) -> bool:
        """Whether members that the coordinator called gone, or left out, were there, or it had most reducers replaced.

        Those that have lied are replaced for a reason.
        """
        replaced = self.machine.rules.replaced - self.machine.liars
        reducers = set(self.tiling.owners)
        return self._coordinating is None and (
            (self.machine.left_out and self._gives)
            or any(self._looked_at.values())
            or (len(replaced) > 1 and 2 * len(replaced) > len(reducers))
        )

    @property
    def verdict(self) -> Verdict:
        """The state of the verdict, as others may hear it."""
        rules = self.machine.rules
        return Verdict(rules.commit, self.machine.may_learn and rules.failed is None)

    def obey(self, message: Order) -> bool:
        """The coordinator says something (or another member relays its commit). False if that cannot be said."""
        if self._closed:
            return True
        if not self.machine.fits(message):
            return False
        if isinstance(message, Shown) and not self.machine.is_new(message):
            return True  # there is nothing to check
        if not self._words.takes(message):
            return False
        self._sign.set()
        if isinstance(message, Abort) and self._coordinating is None and self._gives:
            self._led_badly = True
        self._do(self.machine.obey(message, self._loop.time()))
        self._tiles.heard()
        return True

    def _obey_myself(self, message: Order) -> None:
        """This member, as the coordinator, says something."""
        if not self.obey(message):  # our own commit: we hold a tile of which all others say something else
            self.give_up("the reports of the others contradict what this peer holds")

    def _do(self, actions: Iterable[MemberAction]) -> None:
        """Carry out what this member is to do."""
        for action in actions:
            match action:
                case Average(tile, attempt):
                    self._free(tile)
                    self._tiles.own(tile, attempt)
                    self._tasks.spawn(self._begin(tile, attempt))
                case Finish(tile, attempt):
                    self._tasks.spawn(self._finish(tile, attempt))
                case Contribute(tile, attempt, member) | Ask(tile, attempt, member):
                    if attempt or isinstance(action, Ask):  # at first nothing older can come
                        self._free(tile)
                    self._sender_to(member).put(action)
                case Blame(member, reason, True):
                    self._lied(member, reason)
                case Blame(member, reason):
                    self._blame(member, reason)
                case CutOff(reason) if self._coordinating is not None:  # it goes on deciding
                    self._tell(self._coordinating.leave_out(self.me, reason, self._loop.time()))
                case CutOff(reason):
                    self.give_up(reason)
                case LookAt(member):
                    self._called_gone(member)
                case AskOthers():
                    self._tasks.spawn(self._ask_others())
        self._look_at_machine()

    def _tell(self, actions: Iterable[CoordinatorAction]) -> None:
        """Carry out what the coordinator is to do."""
        for action in actions:
            match action:
                case LeftOut(member, reason):
                    if member == self.me and self.machine.rules.commit is None:
                        self._step_aside()
                    self._blame(member, f"left out of the round: {reason}")
                case Lied(member, reason):
                    self._lied(member, reason)
                case Replaced(member):
                    self._blame(member, "nobody gets its averages: others average its tiles")
                case Send(member, message) if member == self.me:
                    signed = self._words.signed(message)
                    self._loop.call_soon(self._obey_myself, signed)  # not at once: what follows may call this again
                case Send(member, message) if member in self._to_say:
                    self._to_say[member].put_nowait(self._words.signed(message))
                    if isinstance(message, Commit | Abort):
                        self._to_say[member].put_nowait(None)

    def _called_gone(self, member: int) -> None:
        """The coordinator says that a member is gone. It may have a bad line, or lie: we see for ourselves."""
        if member in self._looked_at:
            return  # said twice
        if member == self.me:
            self._looked_at[member] = True
            return
        if self.endpoint.connected(self.members[member].contact.peer):
            self._looked_at[member] = False
            self._tasks.spawn(self._look_at(member))
            return
        # We may never have had a connection with it, whose end would tell.
        self._blame(member, "gone: the coordinator has lost it")
        self._do(self.machine.member_lost(member))

    async def _look_at(self, member: int) -> None:
        """Ask a member that the coordinator calls gone: it may have given us all that it has to give."""
        contact = self.members[member].contact
        with suppress(PeerError):
            verdict = await self.endpoint.call(contact, AskVerdict(self.round_id), timeout_s=_ASK_TIMEOUT_S)
            if verdict.may_learn or verdict.commit is not None:  # else it has given up itself
                self._lives(member)

    def _lives(self, member: int) -> None:
        """A member has just given us something, or answered."""
        if member in self._looked_at:
            sometimes("a member that the coordinator calls gone is there")
            self._looked_at[member] = True

    def _look_at_machine(self) -> None:
        if self.machine.news:
            self._news.notify()
        if self.machine.urgent:
            self._urgent.notify()
        rules = self.machine.rules
        if not self._done.done() and (rules.succeeded or rules.failed is not None):
            self._done.set_result(None)

    def give_up(self, reason: str) -> None:
        """Fail the round here, unless it succeeded."""
        if self.machine.give_up(reason):
            if self._coordinating is not None:
                self._tell(self._coordinating.give_up(reason))
            self._look_at_machine()

    def _blame(self, member: int, reason: str, *, lied: bool = False) -> None:
        """A member did not do its part: an event says so, once, and the error does if the round fails."""
        if self.machine.decided and not lied:
            return  # a member that leaves after the verdict harms nobody
        peer = self.members[member].contact.peer
        if (peer, reason) not in self._blamed:
            self._blamed[peer, reason] = None
            self.env.events.emit(PeerDropped(peer=peer, where="all-reduce", reason=reason))

    @property
    def outweighing(self) -> tuple[PeerID, float, float] | None:
        """Another member with nearly all of the weight of a tile averaged here, its weight, and that of all others."""
        if (found := self._tiles.outweighing) is None or found[0] == self.me:
            return None
        return self.members[found[0]].contact.peer, *found[1:]

    def _failure(self) -> RoundFailed:
        """Return why there is no average here, and which members are to blame for it."""
        peers = dict.fromkeys(peer for peer, _ in self._blamed)
        return RoundFailed(self.machine.rules.failed or "no verdict", tuple(peers), round_id=self.round_id)

    def _peer_lost(self, peer: PeerID, reason: str) -> None:
        if (index := self._index.get(peer)) is not None:
            # The coordinator first: if no contributing member is left, that is the better reason.
            self._control_lost(index, reason)
            self._looked_at.pop(index, None)
            self._do(self.machine.member_lost(index))

    # --------------------------------------------------------------------------------------------------------- control

    def _begin_control(self) -> None:
        if self._coordinating is None:
            self._keeps(
                self._talking,
                self.coordinator,
                self._talks.spawn(self._obey_coordinator(self._control[self.coordinator])),
            )
            return
        for member, stream in self._control.items():
            self._keeps(self._talking, member, self._talks.spawn(self._hear(member, stream)))
            self._keeps(self._talking, member, self._talks.spawn(self._talk(member, stream)))
        for member in sorted(set(range(len(self.members))) - self._control.keys() - {self.me}):
            self._control_lost(member, "it has no control stream")

    async def _obey_coordinator(self, stream: ControlStream) -> None:
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                if nbytes or not isinstance(message, Order) or not self.obey(message):
                    stream.abort()
                    self._lied(self.coordinator, f"a {type(message).__name__} that has no place in this round")
                    break
        except PeerProtocolError as error:
            self._lied(self.coordinator, error.message)
        except PeerError:
            pass  # the coordinator is lost, for whatever reason
        self._control_lost(self.coordinator, "its control stream ended")

    async def _hear(self, member: int, stream: Stream[Any, Report | Leave]) -> None:
        assert self._coordinating is not None
        reason = "it gave up"
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                if isinstance(message, Leave):
                    break
                if nbytes or not self._is_sound(message):
                    stream.abort()
                    reason = "a malformed report"
                    break
                if self.members[member].contributes:
                    self._sign.set()
                self._tell(self._coordinating.reported(member, message, self._loop.time()))
        except PeerError as error:
            reason = error.message  # any error: without its stream a member cannot report
        self._control_lost(member, reason)

    def _is_sound(self, report: Report) -> bool:
        members, tiles = len(self.members), len(self.tiling.tiles)
        return all(lost < members for lost in report.lost) and all(
            held.tile < tiles and self.machine.is_sound(held) for held in report.held
        )

    def _lied(self, member: int, reason: str) -> None:
        """A member broke the protocol: it is named, whatever the verdict, and the next rounds do not wait for it."""
        self.machine.unheard.add(member)
        self._led_badly |= member == self.coordinator
        self._blame(member, reason, lied=True)

    def _told_otherwise(self, member: int) -> None:
        """A member was told of other members, words or shares than this one: the two cannot take the same step.

        Or it says so: then others believe it once or twice, as it gives nothing to them. If it is said by more than
        half of the others, this round is over.
        """
        self.machine.unheard.add(member)
        if self._coordinating is not None:  # we know what we have told all
            self._lied(member, "says that we have begun another group with it")
        elif member not in self._brief_s:
            self._told.add(member)
            self._lied(self.coordinator, f"has begun another group with {self.members[member].contact.peer.short()}")
        self._do(self.machine.contributions.exclude(member))
        if 2 * len(self._told) > len(self.members) - 2 and len(self.members) > 2:
            self._control_lost(self.coordinator, "it has begun another group with most members")

    async def _talk(self, member: int, stream: ControlStream) -> None:
        """Tell a member what the coordinator has to say, up to the verdict."""
        try:
            while (message := await self._to_say[member].get()) is not None:
                await stream.send(message)
            await stream.end()
        except PeerError as error:
            self._control_lost(member, error.message)

    def _control_lost(self, member: int, reason: str) -> None:
        """No word comes from a member, or goes to it, any more."""
        if self._coordinating is not None:
            self._tell(self._coordinating.gone(member, reason, self._loop.time()))
        elif member == self.coordinator:
            if not self.machine.decided:
                self._led_badly |= self._gives
                if self._loop.time() > self._began + self._options.silence_s:
                    self._late.add(member)
            self._do(self.machine.coordinator_lost(reason))

    async def _ask_others(self) -> None:
        """Ask the others for the verdict, until one knows it, or none of them can learn it any more.

        Each is asked by itself, and a silent one counts as gone: one that stands still would hold up all.
        """
        others = [m.contact for i, m in enumerate(self.members) if i not in (self.me, self.coordinator)]
        may_learn = {contact.peer: True for contact in others}
        until = self._loop.time() + self._patience_s  # they may say so for ever
        for contact in others:
            self._tasks.spawn(self._ask(contact, may_learn))
        while not self.machine.decided:
            able = [peer for peer, may in may_learn.items() if may and not self.endpoint.is_silent(peer)]
            if not able or self._loop.time() > until:
                sometimes("nobody can tell the verdict of a coordinator that is lost")
                self.give_up("outcome unknown: the coordinator was lost before its verdict came")
                return
            await asyncio.sleep(_ASK_PAUSE_S)

    async def _ask(self, contact: Contact, may_learn: dict[PeerID, bool]) -> None:
        """Ask one of the others for the verdict, as long as it is unknown; note whether that one may still learn it."""
        while not self.machine.decided:
            try:
                verdict = await self.endpoint.call(contact, AskVerdict(self.round_id), timeout_s=_ASK_TIMEOUT_S)
            except PeerError:
                verdict = Verdict(None, may_learn=False)
            if verdict.commit is not None and not self.machine.decided and self.obey(verdict.commit):
                sometimes("another member tells the verdict of a coordinator that is lost")
            may_learn[contact.peer] = verdict.may_learn
            await asyncio.sleep(_ASK_PAUSE_S)

    async def _end_control(self, and_then: Callable[[], None]) -> None:
        """All was said: end the streams in order."""
        if self._coordinating is None:
            self._keeps(self._talking, self.coordinator, self._talks.spawn(self._say_no_more()))
        await self._farewell(self._talking)
        if self._talks and self._coordinating is None:
            self._control[self.coordinator].abort()
        # A member that does not take the verdict in this time asks the others for it.
        await self._talks.cancel()  # the group's streams are read by nobody from now on
        and_then()

    async def _say_no_more(self) -> None:
        await self._reporting.cancel()  # it may be about to send
        stream = self._control[self.coordinator]
        try:
            await stream.end()
        except PeerError:
            stream.abort()

    async def _end_data(self) -> None:
        """End our streams in order. Those that others leave open are served until `close`: nobody waits for them."""
        commit = self.machine.rules.commit
        told = self._words.told(commit) if commit is not None else None
        for reducer, sender in self._senders.items():
            self._keeps(self._open, reducer, self._tasks.spawn(sender.finish(told)))
        await self._farewell(self._open)

    async def _farewell(self, streams: Counter[int]) -> None:
        """Give the others a moment to end these, or less if they are waited for briefly; note those that do not."""
        most_s, began = min(_FAREWELL_S, self._options.spare_s), self._loop.time()
        briefs = {member: min(most_s, patience_s) for member, patience_s in self._brief_s.items()}
        for until_s in sorted({most_s, *briefs.values()}):
            others = {member for member, patience_s in briefs.items() if patience_s < until_s}
            while not streams.keys() <= others and (left_s := began + until_s - self._loop.time()) > 0:
                await self._ended_one.next(left_s)
        self.kept |= {self.members[member].contact.peer for member in streams}

    def _keeps(self, streams: Counter[int], member: int, task: asyncio.Task[None]) -> None:
        """One of these streams with this member is open until this task ends."""
        streams[member] += 1
        task.add_done_callback(lambda _: self._has_ended(streams, member))

    def _has_ended(self, streams: Counter[int], member: int) -> None:
        """One of these streams with this member is over."""
        streams[member] -= 1
        if not streams[member]:
            del streams[member]
        self._ended_one.notify()

    # ------------------------------------------------------------------------------------------ values and averages

    async def _begin(self, tile: int, attempt: int) -> None:
        self._do(await self._tiles.begin(tile, attempt))

    async def _finish(self, tile: int, attempt: int) -> None:
        match await self._tiles.finish(tile, attempt):
            case CutOff() as cut_off:
                self._do([cut_off])
            case Held() as held:
                if any(held.contributors):
                    for stream in self._reducing.values():  # give it to everybody who has a stream to us
                        stream.offer(tile)
                self._look_at_machine()

    def _free(self, tile: int) -> None:
        """Stop receiving older bytes of a tile: their sender may be stuck, and the tile's memory is needed."""
        for sender in self._senders.values():
            if sender.landing == tile:
                sender.abort()

    def _sender_to(self, reducer: int) -> SenderStream:
        sender = self._senders.get(reducer)
        if sender is None or sender.done:
            if sender is not None:
                self._moved_before += sender.moved_bytes
            contact, opening = self.members[reducer].contact, Reduce(self.round_id, self.terms)
            sender = SenderStream(self.endpoint, contact, opening, values=self._tiles.contribution)
            self._senders[reducer] = sender
            self._tasks.spawn(self._send(reducer, sender))
        return sender

    async def _send(self, reducer: int, sender: SenderStream) -> None:
        try:
            await sender.run(partial(self._answered, reducer))
        except PeerError as error:
            if isinstance(error, PeerProtocolError):
                self._lied(reducer, error.message)
            if not sender.retired:
                self._blame(reducer, f"its averages stopped: {error.message}")
                self._do(self.machine.source_lost(reducer, None))

    async def _answered(
        self, reducer: int, sender: SenderStream, stream: UpStream, message: Answer, nbytes: int
    ) -> None:
        self._lives(reducer)
        if isinstance(message, CommitDigest):
            self._compare(message, nbytes, stream.peer_id)
        elif isinstance(message, PartAverage):
            if await self._tiles.land(reducer, sender, stream, message.held, nbytes):
                self._do(self.machine.given(message.held.tile))
            elif self.machine.rules.commit is not None:  # if it is another average than the committed one, ask the next
                self._do(self.machine.source_lost(reducer, PartAbsent(message.held.tile, message.held.attempt)))
        elif nbytes or not 0 <= message.tile < len(self.machine.rules.reducer):
            raise PeerProtocolError(f"no tile {message.tile}", stream.peer_id)
        else:
            self._do(self.machine.source_lost(reducer, message))

    async def serve(self, stream: DownStream, opening: Reduce) -> None:
        """Serve a member's stream: take its values, give it averages (for `RoundTable`)."""
        sender = self._index.get(stream.peer_id, self.me)
        if sender == self.me or not self.members[sender].contributes:
            raise PeerRefused("not a member of this round that contributes", stream.peer_id)
        if opening.terms and opening.terms != self.terms:
            self._told_otherwise(sender)
            raise PeerRefused("the leader has begun another group with this peer", stream.peer_id)
        self._sign.set()
        await self._serve(stream, sender)

    async def _serve(self, stream: DownStream, sender: int) -> None:
        if self._over:
            raise PeerRefused("the round is over")
        served = ReducerStream(stream, self._tiles.average)
        if (older := self._reducing.get(sender)) is not None:
            self._moved_before += older.moved_bytes
        self._reducing[sender] = served
        self._serving.add(stream)
        self._open[sender] += 1
        for tile, held in enumerate(self.machine.rules.held):
            if held is not None and self.machine.rules.reducer[tile] == self.me:
                served.offer(tile)
        pump = self._tasks.spawn(served.pump())
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                self._lives(sender)
                if isinstance(message, PartData):
                    self._do(await self._tiles.add(message, nbytes, sender, stream.peer_id, served.read))
                elif isinstance(message, CommitDigest):
                    await self._told_commit(stream, message, nbytes)
                else:
                    self._requested(served, message, nbytes)
            served.close()
            await asyncio.wait((pump,))  # not `await pump`: it may have been cancelled with the round
        except PeerError as error:
            if isinstance(error, PeerProtocolError):
                self._lied(sender, error.message)
            elif not self._over:
                self._blame(sender, f"its values stopped: {error.message}")
            self._do(self.machine.contributions.exclude(sender))
            raise
        finally:
            pump.cancel()
            self._serving.discard(stream)
            self._has_ended(self._open, sender)

    def _requested(self, served: ReducerStream, message: PartRequest, nbytes: int) -> None:
        tile = message.tile
        self._tiles.named(tile, message.attempt, served.stream.peer_id)
        if nbytes:
            raise PeerProtocolError("a request with a payload", served.stream.peer_id)
        rules = self.machine.rules
        held = rules.held[tile]
        if held is not None and held.attempt >= message.attempt:
            served.offer(tile)
        elif rules.reducer[tile] != self.me or rules.failed is not None or rules.commit is not None:
            sometimes("an average is asked for where it will never be")
            served.refuse(tile, message.attempt)
        # otherwise it is made here, and given to everybody when it is done

    async def _told_commit(self, stream: DownStream, told: CommitDigest, nbytes: int) -> None:
        """A member that has ended its round tells us its commit. If it is not ours, it is to have the proof, too."""
        if not self._done.done():
            sometimes("a member tells its commit before its reducer has one")
            await asyncio.wait((self._done,))
        if (mine := self._compare(told, nbytes, stream.peer_id)) is not None:
            await stream.send(mine)

    def _compare(self, told: CommitDigest, nbytes: int, teller: PeerID) -> CommitDigest | None:
        """Look whether another member has got our commit. If the leader has lied: what that member is to know of ours.

        Raises:
            PeerProtocolError: it says what the leader has not said.
        """
        if nbytes:
            raise PeerProtocolError("a digest of a commit with a payload", teller)
        commit, known = self.machine.rules.commit, self._words.proved
        if commit is None or not self._words.prove_a_lie(commit, told, teller):
            return None
        if not known:
            sometimes("a coordinator has signed two commits of one round")
            self._blame(self.coordinator, "has signed two different commits of one round", lied=True)
            self._on_lie(self.leader)
        return self._words.told(commit)

    @property
    def _moved_bytes(self) -> int:
        """Bytes of values and averages, sent and received so far."""
        streams: list[SenderStream | ReducerStream] = [*self._senders.values(), *self._reducing.values()]
        return self._moved_before + sum(stream.moved_bytes for stream in streams)

    def _step_aside(self) -> None:
        """The coordinator left itself out because it is slow: now it only decides. After the commit it may ask."""
        for sender in self._senders.values():
            self._moved_before += sender.moved_bytes
            sender.retired = True
            sender.abort()
        self._senders.clear()
        for stream in list(self._serving):
            stream.abort()

    async def _settled(self) -> None:
        """Wait until no stream is served: then, without the round's tasks, nothing uses the vector any more."""
        while self._serving:
            await self._ended_one.next()

    # ----------------------------------------------------------------------------------------------------------- loops

    async def _report_loop(self) -> None:
        seen = moved_bytes = 0
        counted_at, bundle_s = -math.inf, max(_BUNDLE_S, len(self.members) / _REPORTS_PER_S)
        while not self.machine.decided:
            # Even without news: a report carries the bytes moved.
            if await self._news.after(seen, self._options.report_s) and not self.machine.urgent:
                await self._urgent.next(bundle_s)
            seen, now = self._news.count, self._loop.time()
            if now >= counted_at + self._options.report_s / 2:  # an average that is news shows progress by itself
                counted_at, moved_bytes = now, self._moved_bytes
            report = self.machine.report(moved_bytes)
            if self._coordinating is not None:
                self._tell(self._coordinating.reported(self.me, report, self._loop.time()))
                continue
            if self.machine.has_made(report):
                report = self._words.signed_report(report)
            try:
                await self._control[self.coordinator].send(report)  # news that come meanwhile go into the next one
            except PeerError as error:
                self._control_lost(self.coordinator, error.message)
                return

    async def _tick_loop(self) -> None:
        options = self._options
        period_s = self._tick_s
        if not self.machine.rules.contributes:
            await self._sign.wait()
            self.machine.contributions.begin(self._loop.time())
            if self._coordinating is not None:
                self._coordinating.begin(self._loop.time())
        while not self.machine.decided:
            await asyncio.sleep(period_s)
            now = self._loop.time()
            for sender, stream in self._reducing.items():
                if stream.grew():
                    self.machine.contributions.heard(sender, now)
            self._watch_coordinator(now)
            self._do(self.machine.tick(now))
            if self._coordinating is not None:
                # A slow sender may still give its averages, as long as there is time to spare for that.
                short = options.spare_s < options.silence_s
                left_out = self.machine.contributions.lateness.left_out if short else ()
                self._tell(self._coordinating.tick(now, left_out))

    @property
    def _patience_s(self) -> float:
        """A coordinator decides, or replaces members, within so long after all others have done their part here.

        It may have more time to spare than this peer: an honest one is not to blame for that.
        """
        took_s = self._moved_at - self._began
        return self._stall_s + self._options.silence_s + took_s + max(self._promised_s)

    def _watch_coordinator(self, now: float) -> None:
        """Give the coordinator up if it does nothing, where an honest one would long have left the slow members out.

        As long as less than half of the reducers are done, all may wait for a slow member.
        """
        rules = self.machine.rules
        if self._coordinating is not None or not rules.contributes:
            return
        missing = rules.missing()
        lacking, reducers = {rules.reducer[tile] for tile in missing}, set(rules.reducer)
        awaited = sum(rules.reducer[tile] != self.coordinator for tile in missing)
        moved = awaited, self._moved_bytes if awaited else 0
        if moved != self._moved or 2 * len(reducers - lacking) < len(reducers):
            self._moved, self._moved_at = moved, now
        elif now > self._moved_at + self._patience_s:
            sometimes("a coordinator that decides nothing is given up")
            self._led_badly |= self._gives
            self._control_lost(self.coordinator, "it decides nothing")

    async def _look_loop(self) -> None:
        """Stop waiting for silent members.

        The coordinator waits for any member, the others for the coordinator; after the commit, a member waits for those
        that it asked for averages.
        """
        others = set(self._control)
        while self.machine.rules.commit is None and not self._done.done():
            for index in sorted(others | self._looked_at.keys() - {self.me}):
                peer = self.members[index].contact.peer
                if not self._done.done() and self.endpoint.is_silent(peer):
                    sometimes("a member falls silent in a round")
                    others.discard(index)
                    self._peer_lost(peer, "silent")
            await asyncio.sleep(_LOOK_S)
        await self._look_at_sources()

    async def _look_at_sources(self) -> None:
        """After the commit: stop waiting for members that are silent, or give none of the averages that they have.

        An average may take as long as the round has taken until its verdict: no longer.
        """
        patience_s = self._options.silence_s + (self._loop.time() - self._began)
        missing: dict[int, tuple[int, float]] = {}
        while not self._done.done():
            now, awaited = self._loop.time(), self.machine.awaited
            missing = {
                index: missing[index] if index in missing and missing[index][0] == count else (count, now)
                for index, count in awaited.items()
            }
            for index, (_, since) in sorted(missing.items()):
                if self._done.done():
                    return
                if self.endpoint.is_silent(self.members[index].contact.peer):
                    sometimes("a member falls silent that was asked for a committed average")
                elif now > since + patience_s:
                    sometimes("a member gives nothing that was asked for a committed average")
                    self._blame(index, "was asked for averages that are committed, and gives none", lied=True)
                    self._led_badly |= index == self.coordinator and self._gives
                else:
                    continue
                self._do(self.machine.source_lost(index, None))
            await asyncio.sleep(_LOOK_S)

    def _failed(self, error: BaseException) -> None:
        """A task of this round failed: a defect of shoal."""
        text = f"{type(error).__name__}: {error}"
        self.env.events.emit(Warned(where="round", message=text))
        self.give_up(f"internal error: {text}")


def _cut(group: Group, vector: Vector, weight: float) -> Tiling:
    """The tiles of a round of this group, whose values are in `vector`.

    Raises:
        ConfigError: shares and tiles do not fit the tensors, or the weight cannot be used.
    """
    if not is_weight(weight):
        raise ConfigError(f"weight must be 0, or within {MIN_WEIGHT:g}..{MAX_WEIGHT:g}, got {weight!r}")
    contributes = group.members[group.my_index].contributes
    if not contributes:
        if weight:
            raise ConfigError(f"weight must be 0 for an auxiliary member, got {weight!r}")
        vector.forget()
    reference = common_reference(group.members)
    if contributes and reference and reference != vector.reference_name:
        raise ConfigError("the group was formed for another reference than ours")
    vector.agree(on_reference=bool(reference))
    tiling = vector.tiling(group.shares, group.tile_bytes)
    for reducer in tiling.owners:
        if not group.members[reducer].reduces:
            raise ConfigError(f"member {reducer} was given a share, and cannot reduce")
    return tiling


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
            Who led another round with the same id: then this one must not begin, as what was signed in the other one
            could be shown in it. None if there was no such round.
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
