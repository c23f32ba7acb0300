"""Taking over a better state: its donors give it, or the steps that lead to it from our own. Loop only.

A state is downloaded beside the trainer's batches. It is taken over while the trainer stands still (see `fetching`),
under the lock of the parameters, name and values together. A newcomer waits for a run's state before it begins, for a
while: see `beginning`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from shoal.averaging import Averager
from shoal.averaging.core import PeerCore
from shoal.base.clock import shielded
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes
from shoal.errors import NoMemoryForState, StateUnavailable
from shoal.protocol.wire import Contact
from shoal.run.decide.beginning import Beginning, Stance
from shoal.run.decide.lineage import may_have_led
from shoal.run.decide.phases import Event, PhaseMachine
from shoal.run.decide.state_name import StateName
from shoal.run.gossip import ProgressGossip
from shoal.run.join.catch_up import CatchUp
from shoal.run.join.own_state import OwnState
from shoal.run.join.shared_state import Misfits, before_of, committed_of, history_of, is_average, name_of, why_not_ours
from shoal.run.outlook import Outlook
from shoal.run.report.notices import Notices, left_out
from shoal.run.view.progress import StateKey, SwarmView
from shoal.state.wire import Donor, DownloadedState, Intake, download_state
from shoal.train.options import kinds
from shoal.train.training_state import PreparedState

__all__ = ["Takeover"]

_MOST_DONORS = 256
_MANY_BATCHES = 10
"""A peer that loses fewer before the run's first step is not told, unless its program has set its first weights."""
_MANY_EPOCHS = 3
"""Nor is one that loses fewer which it has trained apart: peers step before they meet, or when a line fails. An epoch
of peers that merge may have many batches: they are told also of fewer if they lose `_MANY_BATCHES` of their own."""
_ONE_LOSS_S = 60.0
"""The fragments of a model that are given up within this time are told together."""
_SLOW_S = 20.0
"""The pace of a download is told after this time, if the rest would take longer than that."""


class _Fetch(NamedTuple):
    """A download that is under way.

    Attributes:
        intake: what has come.
        donors: those that it was begun with.
        since: local time, seconds.
        limit: ends it.
    """

    intake: Intake
    donors: frozenset[PeerID]
    since: float
    limit: asyncio.Timeout


@dataclass(slots=True, kw_only=True)
class Takeover:
    """Takes over better states for one peer, with these parts of it.

    Attributes:
        core: this peer.
        own: its state.
        outlook: says which state is better.
        machine: the phases of the run; no average is due after a takeover.
        beginning: says how long a newcomer waits.
        gossip: knows how peers are reached.
        catch_up: follows the steps of others.
        states: the averager of states, whose donors are asked.
        notices: tell the user.
        news: told when a state was withheld.
        keep: saves our state, which is about to be given up (under the lock of the parameters, in the executor);
            returns where it is kept, or None if nothing is.
        first: that of the model's first fragment, if this is of another one: they tell of a loss together.
        took_over: whether the last `run` changed the state.
        why_not: says why the last state was not taken over; empty if none failed.
        downloads: bytes and seconds of each download that was taken over.
        has_stepped: whether a step was made here, of any fragment of the model; of the first one.
    """

    core: PeerCore
    own: OwnState
    outlook: Outlook
    machine: PhaseMachine
    beginning: Beginning
    gossip: ProgressGossip
    catch_up: CatchUp
    states: Averager
    notices: Notices
    news: Changes
    keep: Callable[[], object] | None = None
    first: Takeover | None = None
    took_over: bool = False
    why_not: str = ""
    downloads: list[tuple[int, float]] = field(default_factory=list)
    has_stepped: bool = False
    _misfits: Misfits = field(default_factory=Misfits)
    _tried_with: object = None  # the kinds of our options when a state was refused; None if none was
    _fetch: _Fetch | None = None  # the download that is under way
    _too_slow: AbstractSet[PeerID] = frozenset()  # the donors of the last one that was, if it came too slowly
    _passed_over: AbstractSet[PeerID] = frozenset()  # donors that are asked last, as their states came too slowly
    _told_loss_at: float = -math.inf  # by one of the model's fragments

    async def run(self, timeout_s: float) -> None:
        """Take over the best state, or the steps that lead to it, within `timeout_s` seconds.

        Raises:
            StateUnavailable: no donor gave it.
        """
        began, self.took_over, claimed = _now(), False, self.outlook.claimed().best
        try:
            async with self.catch_up.following(self._to_follow):
                # A state has half of the time, however slowly a step comes. We also ask for it if the steps end below
                # the best claim. Otherwise a liar among the members of the rounds could hold us up.
                steps = await self._take_steps(began + timeout_s / 2)
                if (not steps or self.own.name.key < claimed) and not self._holds_up:
                    await self._take_state(began + timeout_s)
                    await self._take_steps(began + timeout_s)
        except StateUnavailable as error:
            self.why_not = str(error)
            raise
        finally:
            if self.outlook.claimed().behind and (trouble := await self.catch_up.give_up(_now() - began)) is not None:
                self.notices.warn(trouble)
            if self.took_over:
                self.why_not = ""
                self.beginning.state_taken()

    def look_at_options(self) -> None:
        """What was refused counts again once our options are of other kinds: somebody has set them right."""
        if self._tried_with is not None and kinds(self.own.training.options()) != self._tried_with:
            sometimes("options that were set right let a state be taken")
            self._tried_with, self._misfits = None, Misfits()
            self.outlook.known.forget_withheld()
            self.outlook.fetching.again()

    def stepped(self, peers: int) -> None:
        """A step was taken, by this number of peers."""
        (self.first or self).has_stepped = True
        if peers > 1 and not self.outlook.known.further(self.own.name.key):
            self.beginning.joined()

    def may_not_begin(self, view: SwarmView) -> bool:
        """Whether this peer waits for the state of a run that is further than its own beginning."""
        outlook, epoch = self.outlook, self.own.name.epoch
        on_its_own = epoch > 0 and not (view.behind or view.steps_first or outlook.at_end)
        further = outlook.known.further(self.own.name.key, outlook.giving) if on_its_own else {}
        further = {peer: its for peer, its in further.items() if peer not in view.refused}  # that is told by itself
        self.notices.without(further, epoch, self.why_not)
        stance = self.stance(view)
        return stance is Stance.WAITING or (stance is Stance.TIMED_OUT and bool(self.beginning.required))

    def stance(self, view: SwarmView) -> Stance:
        """Whether this peer may go on with its own state, as far as a run that is further is concerned.

        A model whose fragments have made steps here is no newcomer, though one of them is at its beginning.
        """
        known, epoch = self.outlook.known, self.own.name.epoch
        if epoch > 0 or (self.first or self).has_stepped:
            return Stance.FREE
        now, giving = _now(), self._giving()
        further = known.further(self.own.name.key, self.outlook.giving)
        self._leave_slow_donors(further, giving)
        stance = self.beginning.judge(
            further,
            # Of those that are known by a record alone nobody knows whether they are there.
            others_here=sum(map(self.core.endpoint.connected, view.together)),
            now=now,
            refusing=known.refusing(now),
            giving=giving,
            left=known.left,
        )
        offered = view.behind or bool(giving) or bool(self._left_out_by(view))  # an error is told by `check_beginning`
        self.notices.beginning(self.beginning, offered=offered, why_not=self.why_not)
        return stance

    def check_beginning(self, view: SwarmView) -> None:
        """Raise `StateUnavailable` if this peer needs a state that others have, and has waited for it long enough."""
        begins, epoch = self.beginning, self.own.name.epoch
        if left_out_by := self._left_out_by(view):
            raise StateUnavailable(left_out(left_out_by, epoch, begins.patience_s, self.why_not))
        if epoch == 0 and begins.required and begins.stance is Stance.TIMED_OUT:
            raise StateUnavailable(
                f"no peer of the run gave a state within {begins.patience_s:.0f} s (load_state_timeout), and this one "
                "may not begin by itself (require_state=True): check whether initial_peers lead to the run, or start "
                "one peer without require_state"
            )

    def _left_out_by(self, view: SwarmView) -> Mapping[PeerID, int]:
        """The peers (with their epochs) that went on without this peer for longer than it may wait; mostly none."""
        name, outlook = self.own.name, self.outlook
        further = {} if outlook.at_end else outlook.known.further(name.key)
        left_out = self.beginning.is_left_out(further, others_here=len(view.together) - 1, now=_now())
        return further if left_out else {}

    def _giving(self) -> AbstractSet[PeerID]:
        """The donors of the download, if it may end before this peer begins without them.

        While it waits for a donor that is busy, the peers that give us steps; but for those whose state came too slowly
        before, as it would again.
        """
        if self._fetch is None:
            return frozenset()
        intake, now = self._fetch.intake, _now()
        if intake.missing_bytes is None:
            return self.catch_up.giving - self._too_slow
        return intake.donors if intake.in_time(now, self.beginning.until(now)) else frozenset()

    def _leave_slow_donors(self, further: Collection[PeerID], giving: AbstractSet[PeerID]) -> None:
        """End a download that cannot be here in time, if peers that came further since it began may give theirs.

        Newcomers begin together beside such a donor. One that was not there at their first step takes their state.
        """
        fetch = self._fetch
        if fetch is None or _now() < fetch.since + _SLOW_S:
            return
        is_described = fetch.intake.missing_bytes is not None  # else the steps that it gives say nothing of its state
        if is_described and giving:
            return
        if not fetch.donors.issuperset(further):
            sometimes("a download that comes too slowly makes way for the state of others")
            fetch.limit.reschedule(_now())

    def _to_follow(self) -> list[Contact]:
        """Peers with the best state that can be dialed, in random order, so that not all follow the same ones."""
        contacts = [self.gossip.contact(peer) for peer in self._leaders(self.outlook.claimed())]
        contacts = [each for each in contacts if each.addresses and each.peer not in self._passed_over]
        self.core.env.rng.shuffle(contacts)
        return contacts

    def _leaders(self, view: SwarmView) -> Sequence[PeerID]:
        """The peers with the best state that are asked for it, or for the steps to it.

        Others may name the same state, and give something else. They are asked if the peers whose words count gave
        nothing at the last try, or cannot be asked. A newcomer asks all: it knows only the peer that invited it.
        """
        leaders, giving = view.leaders, self.outlook.giving
        trusted = [peer for peer in leaders if peer in view.vouching]
        may_give = any(view.others[peer].contact.addresses or peer in giving for peer in trusted)
        return trusted if may_give and self.own.name.epoch and not self.why_not else leaders

    @property
    def _holds_up(self) -> bool:
        """Whether the trainer stands still, and would go on otherwise: then nothing more is waited for.

        What comes later is taken by another fetch, which begins at once.
        """
        return self.outlook.trains_on and self.outlook.fetching.has_news

    async def _take_steps(self, deadline: float) -> int:
        """Take the steps that lead on from our state, as far as the others tell of them; returns how many."""
        steps = 0
        while self.outlook.claimed().behind and _now() < deadline:
            before = self.own.name
            until = _now() if self._holds_up else deadline
            update = await self.catch_up.next(before, self.own.committed, until=until)
            if update is None:
                break
            await self.outlook.fetching.parked()
            if self.own.name != before:
                continue  # by a step of our own, before the trainer stood still
            async with self.own.hold() as holds:
                if not holds:
                    break
                self.machine.happened(Event.STATES_OVER)
                self.own.follow(update)
                self.took_over = True
                try:
                    await shielded(self.core.env.executor.run(self.own.step))
                finally:
                    self.own.drop_update()
                    self.outlook.state_replaced()
            if self.own.name != update.name:
                break
            self.own.has_followed(update)
            steps += 1
        return steps

    def _donors(self, view: SwarmView) -> list[Donor]:
        """The peers to ask: all that say that they have a better state, those at the best one first.

        A peer that says so and does not give its state cannot keep us from asking the others.
        """
        mend_from = self.own.mend_from
        leaders = [peer for peer in view.leaders if peer in mend_from] or self._leaders(view)
        useful = self.catch_up.useful_from(view.epoch)
        if not self.outlook.is_client:  # a copy of an epoch before ours is refused, though steps may lead on from it
            useful = max(useful, min(self.own.name.epoch, view.epoch))
        donors = [
            Donor(
                self.gossip.contact(peer), -2.0 if peer in self._passed_over else float(peer in view.vouching), useful
            )
            for peer in leaders
        ]
        if not mend_from:
            better = self.outlook.known.better(self.outlook.place(), _now(), self.outlook.giving)
            lower = sorted((peer, key) for peer, key in better.items() if peer not in leaders)
            # Below the leaders, in the order of their samples; those whose state came too slowly are the last.
            donors += [Donor(self.gossip.contact(peer), -1.0 / (1 + key.samples), key.epoch) for peer, key in lower]
        return donors[:_MOST_DONORS]

    async def _take_state(self, deadline: float) -> None:
        """Download the best state, and load it."""
        # A client's state is nobody else's: it takes that of the others also where its own came further.
        view, ours = self.outlook.claimed(), None if self.outlook.is_client else self.own.name.key
        state = await self._download(view, ours, deadline)
        name, values = name_of(state.metadata), state.metadata["training"]

        await self.outlook.fetching.parked()
        if ours is not None and name.key <= self.own.name.key:
            return  # we came further meanwhile
        tell_loss: Callable[[], None] = _nothing

        async def take_over() -> None:
            nonlocal tell_loss
            training, committed, before = self.own.training, committed_of(state.metadata), before_of(state.metadata)
            prepared = await self.core.env.executor.run(training.prepare, values, state.tensors)
            prepared = prepared._replace(epoch=name.epoch)  # by which all is decided, whatever the values say
            follows = before == self.own.name.digest
            history = history_of(state.metadata)
            tell_loss = await self._loss(name, history)
            if follows and committed.gave_last(self.core.peer_id):
                await self.core.env.executor.run(training.given_is_in)
            await self._load(prepared, follows=follows)
            self.own.take_over(name, committed, before, history, average=is_average(state.metadata))
            self.took_over, self._passed_over = True, frozenset()
            self.outlook.state_replaced()
            self.machine.happened(Event.STATES_OVER)

        async with self.own.hold() as holds:
            if not holds:
                raise StateUnavailable(f"it is here, but {self.own.lock.holder or 'somebody'} has held the parameters")
            try:
                await shielded(take_over())  # also when the trainer is interrupted: the parameters have one name
            except StateUnavailable as error:
                self._misfits.add(values, state.tensors, str(error))
                self._withheld(view.leaders)
                raise
        self.outlook.known.note_given(state.donors)
        tell_loss()
        self.downloads.append((state.bytes_received, state.duration_s))
        self.notices.downloaded(state.duration_s, self.core.reachability.shut_out)

    async def _download(self, view: SwarmView, ours: StateKey | None, deadline: float) -> DownloadedState:
        """The best state that the others give, if it is better than ours (None: whatever it is)."""
        donors, limit = self._donors(view), asyncio.timeout(None)
        self._fetch = fetch = _Fetch(Intake(_now()), frozenset(each.peer for each in donors), _now(), limit)
        telling = asyncio.get_running_loop().call_later(_SLOW_S, self._tell_pace, fetch.intake)
        training, known = self.own.training, self.outlook.known
        try:
            async with limit:
                return await download_state(
                    self.core.endpoint,
                    self.core.env,
                    self.states.prefix,
                    donors,
                    timeout_s=max(0.001, deadline - _now()),
                    min_epoch=self.catch_up.from_epoch(view.epoch),
                    accept=lambda manifest: why_not_ours(training, manifest, ours, self._misfits, known.is_false),
                    limits=msgspec.structs.replace(self.states.sharing.limits, max_tensors=training.tensors.most),
                    may_read=self.catch_up.steps_first,
                    intake=fetch.intake,
                )
        except TimeoutError:
            self._withheld(view.leaders)
            self._passed_over = frozenset(fetch.intake.asked) or fetch.donors
            await self.catch_up.leave()  # from what others offer their steps do not lead on
            raise StateUnavailable("it came too slowly, and others offer theirs") from None
        except StateUnavailable as error:
            if not isinstance(error, NoMemoryForState):
                self._withheld(view.leaders)
            raise
        finally:
            telling.cancel()
            self._ended(fetch.intake)

    def _ended(self, intake: Intake) -> None:
        """A download is over; it may have failed."""
        giving = self._giving()
        self.beginning.note_giving(giving)
        if intake.asked:
            self._too_slow = intake.asked - giving
        self._fetch = None

    async def _load(self, prepared: PreparedState, *, follows: bool) -> None:
        try:
            await self.core.env.executor.run(partial(self.own.training.take_over, prepared, follows=follows))
        except Exception:
            self.own.loading()  # a part of it may be here: it is nobody's state
            raise

    async def _loss(self, taken: StateName, history: Sequence[bytes]) -> Callable[[], None]:
        """Tells of what is lost with our state if this one takes its place: on first weights, or apart from others.

        What was trained apart is kept on the disk, if it can be. A few batches or epochs are not told, as peers that
        start together have trained some before they meet.
        """
        own, outlook, speed = self.own, self.outlook, self.outlook.speed
        samples = own.training.pending.samples if speed.batches >= _MANY_BATCHES else 0
        if taken.epoch == own.name.epoch == 0 and (samples or own.written == own.name):
            if outlook.settings.fragment:
                return _nothing
            return partial(self.notices.begins_anew, samples, written=own.written == own.name)
        apart = own.apart_from(taken, history)
        if apart is None:
            steps = outlook.witness.steps_since(self.core.peer_id)
            is_lost = not may_have_led(own.name, taken, len(history), steps)
        else:
            rarely = outlook.terms.meets_rarely
            is_lost = apart.epochs >= _MANY_EPOCHS
            is_lost |= rarely and apart.own * speed.batches >= _MANY_BATCHES * speed.processed > 0
        all_fragments = self.first or self
        if not is_lost or all_fragments.has_told_loss:
            return _nothing
        if own.shared:
            sometimes("a peer gives up steps of its own and of others for those of a fork")
        kept = None if self.keep is None else await self.core.env.executor.run(self.keep)
        return partial(all_fragments.tell_loss, partial(self.notices.gave_up, own.name, apart, taken, kept))

    @property
    def has_told_loss(self) -> bool:
        """Whether what is lost with one fragment of the model was told just now."""
        return self.outlook.settings.fragments > 1 and _now() < self._told_loss_at + _ONE_LOSS_S

    def tell_loss(self, tell: Callable[[], None]) -> None:
        """Tell of what is lost with a fragment, if that was not told of another one just now."""
        if not self.has_told_loss:
            self._told_loss_at = _now()
            tell()

    def _tell_pace(self, intake: Intake) -> None:
        received, missing = intake.received_bytes, intake.missing_bytes
        if missing is not None and 0 < received < missing:
            self.notices.slow(intake.donors, received, missing, _SLOW_S)

    def _withheld(self, peers: Iterable[PeerID]) -> None:
        sometimes("a peer names a better state, and does not give it")
        self._tried_with = kinds(self.own.training.options())
        self.outlook.known.note_withheld(peers, _now())
        self.news.notify()


def _nothing() -> None:
    """There is nothing to tell."""


def _now() -> float:
    return asyncio.get_running_loop().time()
