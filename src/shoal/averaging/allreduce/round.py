"""One round: the group is formed, the values are copied in; at the end the averages are committed, or nothing happened.

`Round.run` returns when this member may apply the averages, or raises `RoundFailed`. After that the round stays able to
give averages and its verdict to members that were left out, until `close`: the caller closes the round when it needs
the vector for the next one.

What to do is decided by two pure machines: `MemberMachine`, and at the coordinator also `Coordinator`. This module has
the time, and carries out what they say. Streams are in two modules: `control` has those between the coordinator and
each other member, `exchange` those of values and averages. A member that loses the coordinator asks the others whether
they know the verdict, and gives up when none of them can still learn it. `Witness` notes what this member sees of the
others.

An auxiliary member's time limits start with the first sign of a contributing member: such members may begin later, when
their values are ready.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType

from blake3 import blake3

from shoal.averaging.allreduce.commit import Ask, Average, Contribute, Order
from shoal.averaging.allreduce.control import Control
from shoal.averaging.allreduce.coordinator import Coordinator, CoordinatorAction, LeftOut, Lied, Replaced, Send
from shoal.averaging.allreduce.exchange import Exchange
from shoal.averaging.allreduce.interface import MAX_WEIGHT, MIN_WEIGHT, Outcome, RoundOptions, any_weight, is_weight
from shoal.averaging.allreduce.lateness import LEAST_S
from shoal.averaging.allreduce.member import AskOthers, Blame, CutOff, Finish, LookAt, MemberAction, MemberMachine
from shoal.averaging.allreduce.round_tiles import RoundTiles
from shoal.averaging.allreduce.segments import common_reference
from shoal.averaging.allreduce.signed import SignedWords
from shoal.averaging.allreduce.slow_lines import promised_s
from shoal.averaging.allreduce.streams import DownStream
from shoal.averaging.allreduce.table import RoundTable
from shoal.averaging.allreduce.vector import Vector
from shoal.averaging.allreduce.witness import Seen, Witness
from shoal.averaging.group import Group
from shoal.base.clock import seconds_text, shielded
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes, Tasks, weakly
from shoal.errors import ConfigError, PeerError, PeerRefused, RoundFailed
from shoal.events import Warned
from shoal.layout import Tiling
from shoal.protocol.wire import Abort, AskVerdict, Contact, Held, Reduce, Report, Shown, Verdict, encode
from shoal.rpc import LOOK_S

__all__ = ["Outcome", "Round", "RoundOptions"]

_LOOK_S = LOOK_S / 2
"""A round stands still while it waits for a silent member: a finer look finds that out earlier."""

_FAREWELL_S = 1.0
"""A round waits so long at its end for the others to end their streams."""

_ASK_TIMEOUT_S = 2.0
"""The longest time for an `AskVerdict`."""

_ASK_PAUSE_S = 0.1
"""The pause until the others are asked for the verdict again."""

_SHARE = 0.75
"""Members with slow lines are waited for for this part of the longest time of a round at most: then averages follow."""

_BUNDLE_S, _REPORTS_PER_S = 0.05, 10_000
"""A report waits so long for further news, unless somebody may be waiting for it; in a large group longer: all members
together send the coordinator so many a second."""

_TICKS_PER_S = 1000
"""Who is late is looked at twice in `LEAST_S`; in a large group more rarely: for so many members a second."""


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
        self._table, self._options = table, options
        peers = [member.contact.peer for member in self.members]
        self._words = SignedWords(table.identity, self.begun, peers, self.coordinator)
        self._loop, self._closed = asyncio.get_running_loop(), False
        self._promised_s = self._promises(vector)
        self._index = {peer: index for index, peer in enumerate(peers)}
        self._brief_s = {index: brief_s[peer] for peer, index in self._index.items() if peer in brief_s}
        self._brief_s.pop(self.me, None)
        self.machine = MemberMachine(
            self.round_id,
            self.me,
            self.coordinator,
            self.members,
            self.tiling.owners,
            silence_s=options.silence_s,
            now=self._loop.time(),
            promised_s=self._promised_s,
            spare_s=options.spare_s,
            brief_s=self._brief_s,
            most_weight=options.most_weight or any_weight,
        )
        self._coordinating = self._new_coordinator(self.tiling.owners) if group.leads else None
        self._witness = Witness(
            self.machine,
            self._words,
            self.env.events,
            on_lie=on_lie,
            gives=weight > 0,
            away=self._brief_s,
            bad_lines={index for peer, index in self._index.items() if peer in bad_lines},
        )
        self._tiles = RoundTiles(vector, self.tiling.tiles, self.machine, self.env.executor, weight=weight)
        # Tasks that are over are not kept: their errors know this round, and memory in cycles is freed late.
        self._tasks, self._talks, self._reporting = (Tasks(self._failed) for _ in range(3))
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._control = Control(
            {index: group.controls[peer] for peer, index in self._index.items() if peer in group.controls},
            self._talks,
            heard=weakly(self._heard),
            lied=self._witness.lied,
            lost=weakly(self._control_lost),
        )
        self._exchange = Exchange(
            self.endpoint,
            Reduce(self.round_id, self.terms),
            self.machine,
            self._tiles,
            self._witness,
            self._tasks,
            self._done,
            do=weakly(self._do),
        )
        self._news, self._urgent = Changes(), Changes()
        self._sign = asyncio.Event()
        self._began = self._loop.time()
        self._ended: float | None = None
        # How far the members other than the coordinator were, and since when.
        self._moved: tuple[int, int] | None = None
        self._moved_at = self._began
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
    def leads(self) -> bool:
        """Whether this peer decides the round."""
        return self._witness.leads

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

    @property
    def _farewell_s(self) -> float:
        return min(_FAREWELL_S, self._options.spare_s)

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
                self._witness.lied(self.coordinator, "has begun another round with this id before")
            self.give_up("its id was used before")
            raise self._failure()
        self._begin_control()
        self._do(self.machine.start(self._loop.time(), self._witness.bad_lines))
        self._reporting.spawn(self._report_loop())
        self._tasks.spawn(self._tick_loop())
        self._tasks.spawn(self._look_loop())
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._done
        except TimeoutError:
            sometimes("a round is not decided in time")
            self._witness.led_late()
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

    async def _end_control(self, and_then: Callable[[], None]) -> None:
        """All was said: end the streams in order."""
        if self._coordinating is None:
            self._control.open.keep(self.coordinator, self._talks.spawn(self._say_no_more()))
        await self._control.open.farewell(self._farewell_s, self._brief_s)
        if self._talks and self._coordinating is None:
            self._control.abort()
        # A member that does not take the verdict in this time asks the others for it.
        await self._talks.cancel()  # the group's streams are read by nobody from now on
        and_then()

    async def _say_no_more(self) -> None:
        await self._reporting.cancel()  # it may be about to send
        await self._control.say_no_more()

    async def _end_data(self) -> None:
        """End our streams in order. Those that others leave open are served until `close`: nobody waits for them."""
        commit = self.machine.rules.commit
        self._exchange.end(self._words.told(commit) if commit is not None else None)
        await self._exchange.open.farewell(self._farewell_s, self._brief_s)

    @property
    def kept(self) -> frozenset[PeerID]:
        """The members that had not ended their streams when `end_streams` stopped waiting for them."""
        kept = self._control.open.kept | self._exchange.open.kept
        return frozenset(self.members[member].contact.peer for member in kept)

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
            self._exchange.stop()
            self._tiles.stop()
            await asyncio.gather(*(tasks.cancel() for tasks in (self._reporting, self._talks, self._tasks)))
            await self._exchange.settled()
            self._table.remove(self)
            self._closed = True

    # -------------------------------------------------------------------------------------------------- what happens

    def seen(self) -> Seen:
        """What this member saw of the others, once the round is over."""
        briefs, stalled = [self.machine.contributions.brief], set[int]()
        if self._coordinating is not None:
            briefs.append(self._coordinating.brief)
            stalled = self._coordinating.stalled
        ended = self._ended or self._began
        return self._witness.seen(ended, self._margin_s, self._options.report_s, briefs, stalled)

    def there(self, outcome: Outcome, seen: Seen) -> frozenset[PeerID]:
        """The members that were there in time, once the round is over, by what came here from them, or to others."""
        machine, gave = self.machine, outcome.gave
        # What others got, and this member did not: the line between the two is bad, whoever leads.
        elsewhere = ((seen.unheard & gave) | seen.bad_lines) - seen.late
        unheard = {peer for peer, index in self._index.items() if index in machine.unheard}
        lost = (unheard | seen.late | seen.hurried) - elsewhere
        # One that has no values of its own now says so to those that reduce: only these can tell that it was there.
        silent = set[PeerID]()
        if self.me in machine.first_reducer:
            silent = {
                peer
                for peer, index in self._index.items()
                if self.members[index].contributes and not self._tiles.has_told(index)
            }
        return frozenset(self._index).difference(lost, silent - gave)

    def counted(self, outcome: Outcome) -> bool:
        """Whether our values counted in a round that succeeded, if we gave any."""
        return not self._witness.gives or outcome.share(self.members[self.me].contact.peer) > 0

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
        if isinstance(message, Abort):
            self._witness.aborted(after_silence=self._loop.time() > self._began + self._options.silence_s)
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
                    self._exchange.free(tile)
                    self._tiles.own(tile, attempt)
                    self._tasks.spawn(self._begin(tile, attempt))
                case Finish(tile, attempt):
                    self._tasks.spawn(self._finish(tile, attempt))
                case Contribute() | Ask():
                    self._exchange.put(action)
                case Blame(member, reason, True):
                    self._witness.lied(member, reason)
                case Blame(member, reason):
                    self._witness.blame(member, reason)
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
                        self._exchange.step_aside()
                    self._witness.blame(member, f"left out of the round: {reason}")
                case Lied(member, reason):
                    self._witness.lied(member, reason)
                case Replaced(member):
                    self._witness.blame(member, "nobody gets its averages: others average its tiles")
                case Send(member, message) if member == self.me:
                    signed = self._words.signed(message)
                    self._loop.call_soon(self._obey_myself, signed)  # not at once: what follows may call this again
                case Send(member, message):
                    self._control.say(member, self._words.signed(message))

    def _called_gone(self, member: int) -> None:
        """The coordinator says that a member is gone. It may have a bad line, or lie: we see for ourselves."""
        if member in self._witness.looked_at:
            return  # said twice
        peer = self.members[member].contact.peer
        if member == self.me or self.endpoint.connected(peer):
            self._witness.doubt(member)
            if member != self.me:
                self._tasks.spawn(self._look_at(member))
            return
        # We may never have had a connection with it, whose end would tell.
        self._witness.blame(member, "gone: the coordinator has lost it")
        self._do(self.machine.member_lost(member))

    async def _look_at(self, member: int) -> None:
        """Ask a member that the coordinator calls gone: it may have given us all that it has to give."""
        contact = self.members[member].contact
        with suppress(PeerError):
            verdict = await self.endpoint.call(contact, AskVerdict(self.round_id), timeout_s=_ASK_TIMEOUT_S)
            if verdict.may_learn or verdict.commit is not None:  # else it has given up itself
                self._witness.lives(member)

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

    @property
    def outweighing(self) -> tuple[PeerID, float, float] | None:
        """Another member with nearly all of the weight of a tile averaged here, its weight, and that of all others."""
        if (found := self._tiles.outweighing) is None or found[0] == self.me:
            return None
        return self.members[found[0]].contact.peer, *found[1:]

    def _failure(self) -> RoundFailed:
        """Return why there is no average here, and which members are to blame for it."""
        return RoundFailed(self.machine.rules.failed or "no verdict", self._witness.blamed, round_id=self.round_id)

    def _peer_lost(self, peer: PeerID, reason: str) -> None:
        if (index := self._index.get(peer)) is not None:
            # The coordinator first: if no contributing member is left, that is the better reason.
            self._control_lost(index, reason)
            self._witness.lost(index)
            self._do(self.machine.member_lost(index))

    # --------------------------------------------------------------------------------------------------------- control

    def _begin_control(self) -> None:
        if self._coordinating is None:
            self._control.hear_coordinator()
            return
        self._control.hear_members()
        for member in sorted(set(range(len(self.members))) - self._control.members - {self.me}):
            self._control_lost(member, "it has no control stream")

    def _heard(self, member: int, message: Order | Report) -> bool:
        """Somebody says something on a stream of control. False if that cannot be said."""
        if not isinstance(message, Report):
            return self.obey(message)
        if not self._is_sound(message) or self._coordinating is None:
            return False
        if self.members[member].contributes:
            self._sign.set()
        self._tell(self._coordinating.reported(member, message, self._loop.time()))
        return True

    def _is_sound(self, report: Report) -> bool:
        members, tiles = len(self.members), len(self.tiling.tiles)
        return all(lost < members for lost in report.lost) and all(
            held.tile < tiles and self.machine.is_sound(held) for held in report.held
        )

    def _control_lost(self, member: int, reason: str) -> None:
        """No word comes from a member, or goes to it, any more."""
        if self._coordinating is not None:
            self._tell(self._coordinating.gone(member, reason, self._loop.time()))
        elif member == self.coordinator:
            if not self.machine.decided:
                self._witness.led_badly()
                if self._loop.time() > self._began + self._options.silence_s:
                    self._witness.led_late()
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

    # ------------------------------------------------------------------------------------------ values and averages

    async def _begin(self, tile: int, attempt: int) -> None:
        self._do(await self._tiles.begin(tile, attempt))

    async def _finish(self, tile: int, attempt: int) -> None:
        match await self._tiles.finish(tile, attempt):
            case CutOff() as cut_off:
                self._do([cut_off])
            case Held() as held:
                if any(held.contributors):
                    self._exchange.offer(tile)
                self._look_at_machine()

    async def serve(self, stream: DownStream, opening: Reduce) -> None:
        """Serve a member's stream: take its values, give it averages (for `RoundTable`)."""
        sender = self._index.get(stream.peer_id, self.me)
        if sender == self.me or not self.members[sender].contributes:
            raise PeerRefused("not a member of this round that contributes", stream.peer_id)
        if opening.terms and opening.terms != self.terms:
            is_over = self._witness.told_otherwise(sender)
            self._do(self.machine.contributions.exclude(sender))
            if is_over:
                self._control_lost(self.coordinator, "it has begun another group with most members")
            raise PeerRefused("the leader has begun another group with this peer", stream.peer_id)
        self._sign.set()
        await self._exchange.serve(stream, sender)

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
                counted_at, moved_bytes = now, self._exchange.moved_bytes
            report = self.machine.report(moved_bytes)
            if self._coordinating is not None:
                self._tell(self._coordinating.reported(self.me, report, self._loop.time()))
                continue
            if self.machine.has_made(report):
                report = self._words.signed_report(report)
            if not await self._control.report(report):  # news that come meanwhile go into the next one
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
            for sender in self._exchange.heard():
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
        moved = awaited, self._exchange.moved_bytes if awaited else 0
        if moved != self._moved or 2 * len(reducers - lacking) < len(reducers):
            self._moved, self._moved_at = moved, now
        elif now > self._moved_at + self._patience_s:
            sometimes("a coordinator that decides nothing is given up")
            self._witness.led_badly()
            self._control_lost(self.coordinator, "it decides nothing")

    async def _look_loop(self) -> None:
        """Stop waiting for silent members.

        The coordinator waits for any member, the others for the coordinator; after the commit, a member waits for those
        that it asked for averages.
        """
        others = set(self._control.members)
        while self.machine.rules.commit is None and not self._done.done():
            for index in sorted(others | self._witness.looked_at.keys() - {self.me}):
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
                    self._witness.blame(index, "was asked for averages that are committed, and gives none", lied=True)
                    if index == self.coordinator:
                        self._witness.led_badly()
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
