"""One round: the group is formed, the values are copied in; at the end the averages are committed, or nothing happened.

`Round.run` returns when this member may apply the averages, or raises `RoundFailed`. After that the round stays able to
give averages and its verdict to members that were left out, until `close`: its owner closes the round when it needs the
vector for the next one. `RoundTable` finds the round that an incoming stream belongs to, and remembers recent verdicts.

An auxiliary member's time limits start with the first sign of a contributing member: such members may begin later, when
their values are ready.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from shoal.allreduce.commit import MemberRules, Order
from shoal.allreduce.control import Control, DeciderControl, FollowerControl
from shoal.allreduce.coordinator import Coordinator
from shoal.allreduce.digest import PartDigests
from shoal.allreduce.exchange import Exchange
from shoal.allreduce.interface import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    FormedGroup,
    Outcome,
    RoundOptions,
    is_sound,
    is_weight,
)
from shoal.allreduce.reference import common_reference
from shoal.allreduce.streams import DownStream
from shoal.allreduce.vector import Vector
from shoal.clock import to_the_end
from shoal.errors import ConfigError, PeerRefused, RoundFailed
from shoal.events import PeerDropped, Warned
from shoal.peer import PeerID
from shoal.rpc import LOOK_S, Endpoint
from shoal.wire import Abort, AskVerdict, Assign, Commit, Gone, PartAbsent, Reduce, Report, Verdict

__all__ = ["FormedGroup", "Outcome", "Round", "RoundOptions", "RoundTable"]

_LOOK_S = LOOK_S / 2
"""A round stands still while it waits for a silent member: a finer look finds that out earlier."""

_ARRIVAL_S = 10.0
_MAX_EARLY_STREAMS = 512
_REMEMBERED_VERDICTS = 64


class Round:
    """One member's part in one round.

    Args:
        table: the table in which incoming streams find the round.
        group: the members, the decider, and the slice that each member averages.
        vector: the numbers; `copy_in` was called, unless this member is an auxiliary one: then no tensor is read.
        weight: the weight of this member's values, 0 (takes part without counting) or within
            `MIN_WEIGHT`..`MAX_WEIGHT`. 0 for an auxiliary member.
        options: patience.

    Raises:
        ConfigError: the group's slices and parts do not fit the tensors, or the weight cannot be used.
    """

    def __init__(
        self, table: RoundTable, group: FormedGroup, vector: Vector, *, weight: float, options: RoundOptions
    ) -> None:
        self.endpoint, self.env = table.endpoint, table.endpoint.env
        self.round_id, self.members = group.round_id, list(group.members)
        self.me, self.decider = group.my_index, group.decider
        if not is_weight(weight):
            raise ConfigError(f"weight must be 0, or within {MIN_WEIGHT:g}..{MAX_WEIGHT:g}, got {weight!r}")
        contributes = self.members[self.me].contributes
        if not contributes:
            if weight:
                raise ConfigError(f"weight must be 0 for an auxiliary member, got {weight!r}")
            vector.forget()
        self.vector, self.weight, self.digests = vector, weight, PartDigests(group.round_id)
        reference = common_reference(self.members)
        if contributes and reference and reference != vector.reference_name:
            raise ConfigError("the group was formed for another reference than ours")
        vector.agree(on_reference=bool(reference))
        self.parts = vector.parts(group.slices, group.part_bytes)
        for part in self.parts:
            if not self.members[part.owner].reduces:
                raise ConfigError(f"member {part.owner} was given a slice, and cannot reduce")
        owners = [part.owner for part in self.parts]
        self.rules = MemberRules(self.me, owners, contributes=contributes)
        self._table, self._options = table, options
        self._loop, self._closed = asyncio.get_running_loop(), False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._news = asyncio.Event()
        self._sign = asyncio.Event()
        self._lost_sources: list[int] = []
        self._blamed: dict[tuple[PeerID, str], None] = {}
        self._asked: dict[int, int] = {}  # after the commit: part -> the member that was asked for it last
        self._exchange = Exchange(self, silence_s=options.silence_s)
        self._control = self._make_control(group, owners)
        self._unsubscribe = self.endpoint.on_lost(self._peer_lost)

    def _make_control(self, group: FormedGroup, owners: list[int]) -> Control:
        if self.me != self.decider:
            return FollowerControl(self, group.controls[self.members[self.decider].contact.peer])
        machine = Coordinator(
            self.round_id,
            owners,
            [member.reduces and not self.endpoint.way_shut(member.contact.peer) for member in self.members],
            [member.contributes for member in self.members],
            self.me,
            min_group_size=self._options.min_group_size,
            # An owner may wait this long for a silent sender before it goes on without.
            stall_s=(self._options.reducer_silence_s or 2 * self._options.silence_s) + 2 * self._options.report_s,
            now=self._loop.time(),
        )
        streams = {
            index: group.controls[member.contact.peer]
            for index, member in enumerate(self.members)
            if member.contact.peer in group.controls
        }
        return DeciderControl(self, machine, streams)

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
        self._table.add(self)
        self._control.start()
        self._exchange.start()
        self.spawn(self._report_loop())
        self.spawn(self._tick_loop())
        self.spawn(self._look_loop())
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._done
        except TimeoutError:
            self.give_up(f"not decided within {self._options.timeout_s:g} s")
        except asyncio.CancelledError:
            self.give_up("cancelled")
            raise
        if not self.rules.succeeded:
            raise self._failure()
        assert self.rules.commit is not None
        await to_the_end(self._exchange.settle_values(self.rules.commit))
        return Outcome.of(self.rules.commit, self.members)

    async def end_streams(self) -> None:
        """The verdict is known: end our streams, so that their connections can be used again.

        A round that succeeded goes on giving its averages to members that were left out, by streams of their own.
        """
        if self.rules.succeeded:
            await asyncio.gather(self._control.finish(), self._exchange.finish())

    async def close(self, *, orderly: bool = True) -> None:
        """Stop serving this round; afterwards nothing of it touches the vector. Safe to call twice.

        Args:
            orderly: `end_streams` first, if that was not done.
        """
        if self._closed:
            return
        self._unsubscribe()
        try:
            if orderly:
                await self.end_streams()
        finally:
            self._exchange.stop()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._exchange.settle()
            self._table.remove(self)
            self._let_go()

    def _let_go(self) -> None:
        """Cut the references between the parts of a round, so that its memory is freed when nobody holds it any more.

        Python's cycle collector would free it too, but late: it counts objects, and a round has few, with large
        buffers.
        """
        if not self._closed:
            self._closed = True
            self._unsubscribe = _nothing
            self._control.let_go()
            self._exchange.let_go()

    # ------------------------------------------------------------------------------------------------ what happens

    @property
    def decided(self) -> bool:
        """Return whether a verdict is known, or was given up."""
        return self.rules.commit is not None or self.rules.failed is not None

    @property
    def verdict(self) -> Verdict:
        """The state of the verdict, as others may hear it."""
        return Verdict(self.rules.commit, self._control.may_learn and self.rules.failed is None)

    def obey(self, message: Order) -> None:
        """The decider says something (or another member relays its commit)."""
        if self._closed:
            return
        self.heard()
        match message:
            case Assign():
                if 0 <= message.owner < len(self.members) and all(0 <= p < len(self.parts) for p in message.parts):
                    self._exchange.act(self.rules.assigned(message))
            case Gone(member):
                # We may never have had a connection with it, whose end would tell.
                if 0 <= member < len(self.members) and member != self.me:
                    if self.me != self.decider:  # it has said so already
                        self.blame(member, "gone: the decider has lost it")
                    self._exchange.exclude(member)
            case Commit():
                if self._fits(message):
                    for part in self.rules.committed(message):
                        self._fetch(part)
            case Abort():
                self.give_up(message.reason)
        self._check()

    def _fits(self, commit: Commit) -> bool:
        """Return whether this can be the verdict of this round."""
        return (
            commit.round_id == self.round_id
            and [held.part for held in commit.parts] == list(range(len(self.parts)))
            and all(is_sound(held, len(self.members)) for held in commit.parts)
        )

    def heard(self) -> None:
        """Another member has begun the round."""
        self._sign.set()

    def give_up(self, reason: str) -> None:
        """Fail the round here, unless it succeeded."""
        if self.rules.give_up(reason):
            self._control.give_up(reason)
            self._check()

    def cut_off(self, reason: str) -> None:
        """The values of the others do not come here: another member must average the parts owned here."""
        self._control.cut_off(reason)

    def blame(self, member: int, reason: str) -> None:
        """A member did not do its part: an event says so, once, and the error does if the round fails."""
        if self.decided:
            return  # a member that leaves after the verdict harms nobody
        peer = self.members[member].contact.peer
        if (peer, reason) not in self._blamed:
            self._blamed[peer, reason] = None
            self.env.events.emit(PeerDropped(peer=peer, where="all-reduce", reason=reason))

    def _failure(self) -> RoundFailed:
        """Return why there is no average here, and which members are to blame for it."""
        peers = dict.fromkeys(peer for peer, _ in self._blamed)
        return RoundFailed(self.rules.failed or "no verdict", tuple(peers), round_id=self.round_id)

    def step_aside(self) -> None:
        """Stop sending and receiving values: this member, the decider, has left itself out."""
        if self.rules.commit is None:
            self._exchange.step_aside()

    def news(self) -> None:
        """A part is held that was not held before."""
        self._news.set()
        self._check()

    def source_lost(self, member: int, absent: PartAbsent | None) -> None:
        """A member does not give a part that it was asked for."""
        if (commit := self.rules.commit) is not None:
            for part in [absent.part] if absent is not None else self.rules.missing():
                old = absent is not None and absent.attempt != commit.parts[part].attempt
                # Others may still be giving the part: only a refusal by the member asked last leaves us without it.
                if self.rules.held[part] is None and self._asked.get(part) == member and not old:
                    self._fetch(part)
        else:
            if absent is None:
                self.blame(member, "its averages stopped")
            self._lost_sources.append(member)
            self._news.set()

    def _fetch(self, part: int) -> None:
        """After the commit: ask one member after another for a part that is missing here."""
        assert self.rules.commit is not None
        owner = self.rules.owner[part]
        # The owner comes late: this member has probably waited for it in vain, if all others hold the part. Auxiliary
        # members come last: they hold only parts that they averaged themselves. The rest are spread over the parts.
        count = len(self.members)
        order = sorted(range(count), key=lambda i: (not self.members[i].contributes, i == owner, (i + part) % count))
        sources = [i for i in order if i != self.me and self.members[i].reduces]
        turn = sources.index(self._asked[part]) + 1 if part in self._asked else 0
        if turn >= len(sources):
            self.give_up("committed, but nobody who holds the averages could be reached")
        else:
            self._asked[part] = sources[turn]
            self._exchange.ask(part, self.rules.commit.parts[part].attempt, sources[turn])

    def _check(self) -> None:
        if not self._done.done() and (self.rules.succeeded or self.rules.failed is not None):
            self._done.set_result(None)

    def _peer_lost(self, peer: PeerID, reason: str) -> None:
        for index, member in enumerate(self.members):
            if member.contact.peer == peer:
                # The decider first: if no contributing member is left, that is the better reason.
                self._control.lost(index, reason)
                self._exchange.exclude(index)

    # -------------------------------------------------------------------------------------------------------- loops

    async def _report_loop(self) -> None:
        while not self.decided:
            try:
                async with asyncio.timeout(self._options.report_s):
                    await self._news.wait()
            except TimeoutError:
                pass  # a report is sent even without news: it carries the bytes moved
            self._news.clear()
            lost, self._lost_sources = self._lost_sources, []
            self._control.report(Report(self.rules.take_report(), sorted(set(lost)), self._exchange.moved_bytes))

    async def _tick_loop(self) -> None:
        period_s = min(self._options.report_s, self._options.silence_s / 4)
        if not self.rules.contributes:
            await self._sign.wait()
            self._exchange.begin(self._loop.time())
            self._control.begin(self._loop.time())
        while not self.decided:
            await asyncio.sleep(period_s)
            now = self._loop.time()
            self._exchange.tick(now)
            self._control.tick(now)

    async def _look_loop(self) -> None:
        """Stop waiting for silent members.

        The decider waits for any member, the others for the decider; after the commit, a member waits for those that it
        asked for averages.
        """
        others = {i for i in range(len(self.members)) if i != self.me} if self.me == self.decider else {self.decider}
        while not self._done.done():
            committed = self.rules.commit is not None
            for index in sorted(self._awaited() if committed else others):
                if not self._done.done() and self.endpoint.is_silent(self.members[index].contact.peer):
                    if committed:
                        self.source_lost(index, None)
                    else:
                        others.discard(index)
                        self._peer_lost(self.members[index].contact.peer, "silent")
            await asyncio.sleep(_LOOK_S)

    def _awaited(self) -> set[int]:
        """The members that were asked for averages which are still missing."""
        return {self._asked[part] for part in self.rules.missing() if part in self._asked}

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task of this round; an error in it fails the round here."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.env.events.emit(Warned(where="round", message=f"{type(error).__name__}: {error}"))
            self.give_up(f"internal error: {type(error).__name__}: {error}")

    async def serve(self, stream: DownStream) -> None:
        """Serve a member's stream of data (for `RoundTable`)."""
        for index, member in enumerate(self.members):
            if member.contact.peer == stream.peer_id and index != self.me and member.contributes:
                self.heard()
                await self._exchange.serve(stream, index)
                return
        raise PeerRefused("not a member of this round that contributes", stream.peer_id)


def _nothing() -> None:
    """Stands in after `close`: it tells nobody anything."""


class RoundTable:
    """The rounds of one endpoint: brings incoming streams to them, and answers for recent ones.

    Args:
        endpoint: the endpoint of this peer; several averagers share one table.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._rounds: dict[bytes, Round] = {}
        self._early: dict[bytes, list[asyncio.Future[Round]]] = {}
        self._verdicts: OrderedDict[bytes, Commit] = OrderedDict()
        endpoint.serve_stream(Reduce, self._serve)
        endpoint.serve(AskVerdict, self._answer)

    def add(self, round_: Round) -> None:
        """A round has begun here."""
        self._rounds[round_.round_id] = round_
        for waiting in self._early.pop(round_.round_id, []):
            if not waiting.done():
                waiting.set_result(round_)

    def remove(self, round_: Round) -> None:
        """A round is over; its verdict stays known for a while."""
        self._rounds.pop(round_.round_id, None)
        if round_.rules.commit is not None:
            self._verdicts[round_.round_id] = round_.rules.commit
            while len(self._verdicts) > _REMEMBERED_VERDICTS:
                self._verdicts.popitem(last=False)

    async def _serve(self, stream: DownStream, opening: Reduce) -> None:
        round_ = self._rounds.get(opening.round_id)
        if round_ is None:
            round_ = await self._arrival(opening.round_id)
        await round_.serve(stream)

    async def _arrival(self, round_id: bytes) -> Round:
        """A member may hear of the beginning before we do."""
        if round_id in self._verdicts or sum(map(len, self._early.values())) >= _MAX_EARLY_STREAMS:
            raise PeerRefused("this round is over, or too many wait")
        waiting: asyncio.Future[Round] = asyncio.get_running_loop().create_future()
        self._early.setdefault(round_id, []).append(waiting)
        try:
            async with asyncio.timeout(_ARRIVAL_S):
                return await waiting
        except TimeoutError:
            raise PeerRefused("no such round has begun here") from None
        finally:
            if waiting in (queue := self._early.get(round_id, [])):
                queue.remove(waiting)
            if not queue:
                self._early.pop(round_id, None)

    async def _answer(self, peer: PeerID, request: AskVerdict) -> Verdict:
        if (round_ := self._rounds.get(request.round_id)) is not None:
            return round_.verdict
        return Verdict(self._verdicts.get(request.round_id), may_learn=False)
