"""The forming of a group, as a state machine. Sans-IO: events in, actions out, time and knowledge handed in.

Every peer that can lead declares itself in a directory with an expiration and then reads it. Peers are ordered by their
*key* (whether it is a stranger, expiration, peer id; see `Precedence`). A peer asks the earliest declared peer before
itself to lead. A peer that finds none before itself leads the peers that ask it, until the group is full or all present
peers have joined.

::

                          group full / all joined / window ends, enough
                  LOOKING ───────────────────────────────────────────────> Start
                   │   ^  └── last window ends, too few ─────────────────> Fail
      ask the      │   │
      earliest     v   │ refused, lost, silent: ask the next one
                  ASKING ── accepted: own followers are sent there ──> FOLLOWING ──> Begin
                   ^                                                      │   │
                   └───────────── redirected: ask that one ───────────────┘   │
                  LOOKING <────── leader lost, refuses, silent ───────────────┘

*No cycles.* A peer accepts only while it follows nobody, and only an asker whose key, told in its `Join`, is later than
its own (or a client, which nobody follows). A key changes only in LOOKING, with no followers (they are dismissed first)
and with no answer outstanding. So each follower that a leader counts has a later key than the leader. Along a chain of
followers and leaders keys strictly decrease: the chain cannot return to its beginning. No leader counts a follower that
was dismissed and does not know it yet; the follower learns it when the message arrives, when the stream ends, or when
its former leader asks it.

*One group at a time.* Start is only said in LOOKING, that is while following and asking nobody; Begin is only taken
from the leader that is followed. A peer that left a leader before the leader knew of it is still in the leader's
`Begin`, and is a dead member in that round: `Begin` is final with its first copy. These rules trust no clock:
expirations decide which peer leads and how long a peer waits, never which peers are in a group.

*When a leader starts* a group that is not full: a read of the directory *begun* after the last join, and after a quiet
time (`declarations`), shows no live declarer that has not joined. Every peer declares before it looks (each holder of
the key takes a declaration, then shows its entries), so a peer that is not in that read came too late. A declarer that
does not come is *nudged*: the leader asks to join it. The declarer refuses, because the leader is earlier; but it
learns of the leader, and the leader learns whether it is alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shoal.averaging.matchmaking import events
from shoal.averaging.matchmaking.config import SETTLE_S, MatchmakingConfig
from shoal.averaging.matchmaking.declarations import DirectoryPoller, KnownDeclarations, Memory
from shoal.averaging.matchmaking.events import TRANSITIONS, Answer, Declaration, Precedence, SearchPhase
from shoal.averaging.matchmaking.expected import Expected
from shoal.averaging.matchmaking.followers import Followers
from shoal.averaging.matchmaking.hidden import HiddenPeers
from shoal.averaging.matchmaking.leaders import Leaders
from shoal.averaging.matchmaking.window import Window
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Begin, Contact, JoinAccepted, JoinRedirected, JoinRefused, Member
from shoal.rpc.rhythm import LOOK_S

__all__ = ["GroupMachine"]

MISMATCH_CODES = frozenset({"schema", "settings"})
"""Refusals that mean: we can never be in one group."""

SOFT_CODES = frozenset({"full", "replaced"})
"""Refusals that mean: ask again in a while."""

_MAX_HOPS = 6
"""The most redirections in a row that a peer follows."""

_MAX_MISMATCHES = 8
_CROWD_GROUPS = 4
"""So many full groups of declarers before a peer are a crowd."""

_TEXT_CHARACTERS = 1000
_CODE_CHARACTERS = 64


class GroupMachine:
    """One search for a group.

    Args:
        member: this peer's word about itself, which all others will see. Without addresses it is a client: it leads
            nobody.
        config: sizes and times.
        memory: the memory that is kept between searches; changed in place.
        now: loop time, seconds.
        wall_offset_s: wall clock minus loop time, seconds; only used to write and read expirations.
        deadline_s: seconds from now after which the search is over, even in the middle of something; None: one window
            only, plus the time that a leader that was found needs to answer and to begin.
        one_window: no second window begins, even if there is a deadline.
        expected: returns the peers that are expected to join, None if not known. Called often; the group starts as soon
            as all of them that are alive have joined, and otherwise waits for them to the end of the window.
        is_silent: called every `LOOK_S` for a peer that is waited for; returns whether to stop waiting for it. The
            second argument is True for an expected member: giving up the leader costs more.
        contact_of: returns what is known of an expected peer's addresses.
        precedence: of the others: in which order peers lead.

    Attributes:
        phase: the state of the search.
    """

    def __init__(  # noqa: PLR0913 (all but three by name)
        self,
        member: Member,
        config: MatchmakingConfig,
        memory: Memory,
        *,
        now: float,
        wall_offset_s: float,
        deadline_s: float | None = None,
        one_window: bool = False,
        expected: Callable[[], frozenset[PeerID] | None] | None = None,
        is_silent: Callable[[PeerID, bool], bool] = lambda _, soon: False,
        contact_of: Callable[[PeerID], Contact] = Contact,
        precedence: Precedence = Precedence(),  # noqa: B008 (frozen)
    ) -> None:
        self._me, self._leads = member.contact.peer, bool(member.contact.addresses)
        self._config, self._memory, self._is_silent, self._precedence = config, memory, is_silent, precedence
        self._known = KnownDeclarations(self._me, config, memory, wall_offset_s=wall_offset_s, precedence=precedence)
        for peer in precedence.shunned:
            self._known.spend(peer, math.inf)
        self._poller = DirectoryPoller(self._me, leads=self._leads, memory=memory, known=self._known, now=now)
        self._followers = Followers(member, config, precedence)
        self._expected = Expected(expected, is_silent, self._followers)
        self._leaders = Leaders(self._me, config, memory.leaders, self._expected, shunned=precedence.shunned, now=now)
        self._hidden = HiddenPeers(self._me, self._known, self._followers, contact_of)
        self._window = Window(config, memory, now=now, deadline_s=deadline_s, one_window=one_window)
        self._out: list[events.Action] = []
        self.phase, self._cause = SearchPhase.LOOKING, "start"
        self._now = self._decided_at = now
        self._leader: Contact | None = None
        self._asked_in_a_row: set[PeerID] = set()
        self._met_one = False
        self._mismatches: dict[PeerID, str] = {}
        self._trouble: tuple[str, tuple[PeerID, ...]] = ("nobody else is looking for one", ())

    # --------------------------------------------------------------------------------------------------- outside

    @property
    def followers(self) -> tuple[PeerID, ...]:
        """The peers that were accepted and have neither left nor been sent away."""
        return tuple(self._followers)

    @property
    def leader(self) -> PeerID | None:
        """The peer that is followed or asked; None in LOOKING."""
        return self._leader.peer if self._leader else None

    @property
    def key(self) -> events.Key:
        """Our place in the order."""
        return self._precedence.key(self._me, self._window.expiration)

    @property
    def group_size(self) -> int:
        """The size of the group as it is now, including this peer."""
        return self._followers.size

    @property
    def joined_at(self) -> float:
        """When the last peer joined; when the search began if none has (loop time, seconds)."""
        return self._poller.joined_at

    @property
    def over_at(self) -> float:
        """When the search is over, whatever goes on (loop time, seconds); infinity without a deadline."""
        return self._window.over_at

    def set_wall_clock(self, offset_s: float) -> None:
        """Take over the current offset of the wall clock: the loop's time stands still while the process is stopped."""
        self._known.wall_offset_s = offset_s

    def start(self, now: float) -> list[events.Action]:
        """Begin the search; call it once, before `handle`."""
        leader = self._leaders.at_once()
        self._begin_window(now)
        if leader is not None and not self._leads_before(leader.peer) and not self._is_silent(leader.peer, False):
            self._ask(leader)
        return self._decided(now)

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """The actions upon `event`. After the search is over there are none, but joins are refused."""
        self._cause, self._now = type(event.answer if isinstance(event, events.Answered) else event).__name__, now
        if self.phase is not SearchPhase.OVER:
            self._take(event, now)
        elif isinstance(event, events.JoinRequested):
            self._refuse(event.contact.peer, "not-looking", "not looking for a group now")
        return self._decided(now)

    def _take(self, event: events.Event, now: float) -> None:
        match event:
            case events.JoinRequested():
                self._on_join(event, now)
            case events.JoinEnded(peer):
                self._followers.pop(peer, None)
            case events.Mismatched(peer, text):
                self._note_mismatch(peer, text)
            case events.Answered():
                self._on_answer(event, now)
            case events.LeaderLost(peer, reason) if peer == self.leader:
                self._lose_leader(peer, reason)
            case events.Nudged():
                self._on_nudged(event)
            case events.PeerLost(peer):
                self._followers.pop(peer, None)
                self._expected.lost(peer)
                if peer == self.leader:
                    self._abandon(peer, "its connection is lost")
            case events.Tick():
                self._on_tick(now)
            case events.Cancel():
                self._give_up("its search was cancelled")
            case events.Declared() | events.DeclareFailed() | events.DirectoryRead() | events.DirectoryFailed():
                self._on_directory(event, now)

    def deadline(self) -> float | None:
        """Return when to call with `Tick` if nothing happens before (loop time, seconds); None: not needed."""
        if self.phase is SearchPhase.OVER:
            return None
        look_at = self._decided_at + LOOK_S
        if self.phase is not SearchPhase.LOOKING:
            return min(
                self._window.follow_end if self.phase is SearchPhase.FOLLOWING else math.inf, self.over_at, look_at
            )
        due = self._poller.due(self.key, self._followers, self._decided_at)
        due = min(due, self._window.ends_at, self._known.next_change(self._decided_at))
        return min(due, self._decided_at + self._expected.look_s)

    def _on_directory(self, event: events.DirectoryEvent, now: float) -> None:
        match event:
            case events.Declared(declarations):
                self._poller.note_declared(declarations, now)
            case events.DeclareFailed(error):
                self._poller.note_declared(None, now)
                self._trouble = (f"could not declare ourselves: {error}", ())
            case events.DirectoryRead(declarations):
                self._poller.note_read(declarations, now)
            case events.DirectoryFailed(error):
                self._poller.note_read(None, now)
                self._trouble = (f"could not read who is looking: {error}", ())

    def _change_phase(self, phase: SearchPhase, leader: Contact | None = None) -> None:
        assert (self.phase, self._cause, phase) in TRANSITIONS, (self.phase, self._cause, phase)
        self.phase, self._leader = phase, leader

    def _refuse(self, peer: PeerID, code: str, text: str) -> None:
        self._out.append(Answer(peer, JoinRefused(code, text[:_TEXT_CHARACTERS])))

    def _refuse_followers(self, code: str, text: str) -> None:
        for peer in self._followers:
            self._refuse(peer, code, text)
        self._followers.clear()

    # ------------------------------------------------------------------------------------------------ being asked

    def _on_join(self, event: events.JoinRequested, now: float) -> None:
        peer = event.contact.peer
        asker, key = Declaration(event.contact, event.expiration), self._precedence.key(peer, event.expiration)
        self._met_one = True
        self._expected.came(peer)
        self._known.hear(asker, now)
        wants_to_follow = key > self.key or not event.contact.addresses  # else it nudges us: we are to follow it
        if peer == self.leader and wants_to_follow:
            sometimes("a peer is asked to lead by its own leader")
            # It has declared anew, so it leads us no more, and will not; its message about that is on the way.
            self._out.append(events.LeaveLeader(peer))
            self._look_again()
        full = f"the group has its {self._config.full_size} members"
        has_place = self._followers.has_place(peer)
        if self.phase is SearchPhase.FOLLOWING and self._leader is not None:
            if peer == self.leader:
                self._refuse(peer, "later", "I follow you")  # its nudge and our Join have crossed
            else:
                if not self._is_before(event, self._leader.peer):  # else it does not want to follow that one
                    self._leaders.sent_on(peer)
                self._out.append(Answer(peer, JoinRedirected(self._leader)))
        elif not self._leads:
            self._refuse(peer, "not-looking", "a client does not lead")
        elif not wants_to_follow:
            self._followers.pop(peer, None)
            if self._leaders.shuns(peer) or (self._leaders.avoids(peer) and self._leads_now(now)):
                self._refuse(peer, "declined", "I do not follow you")
            else:
                self._refuse(peer, "later", "you are earlier: lead me")
        elif not has_place and (giving_way := self._followers.gives_way(event)) is None:
            sometimes("a group is full when one more peer asks")
            self._refuse(peer, "full", full)
        else:
            if peer not in self._followers:
                self._poller.note_join(now)
            if not has_place and giving_way is not None:
                del self._followers[giving_way]
                self._refuse(giving_way, "full", full)
            self._followers[peer] = event
            self._out.append(Answer(peer, JoinAccepted()))

    def _is_before(self, asker: events.JoinRequested, leader: PeerID) -> bool:
        """Whether a peer that asks us comes before our leader in the order, as far as we know."""
        expiration = self._known.expiration_of(leader)
        if expiration is None or not asker.contact.addresses:
            return False
        return self._precedence.key(asker.contact.peer, asker.expiration) < self._precedence.key(leader, expiration)

    def _note_mismatch(self, peer: PeerID, text: str) -> None:
        self._known.spend(peer, math.inf)
        if len(self._mismatches) < _MAX_MISMATCHES:
            self._mismatches[peer] = text

    # ----------------------------------------------------------------------------------------- asking, following

    def _ask(self, contact: Contact) -> None:
        self._change_phase(SearchPhase.ASKING, contact)
        self._asked_in_a_row.add(contact.peer)
        self._is_silent(contact.peer, False)  # the first look at it: the next one is a while later
        self._out.append(events.AskToLead(contact, self._window.expiration))

    def _on_answer(self, event: events.Answered, now: float) -> None:
        peer, leader = event.peer, self._leader
        if leader is None or peer != leader.peer:
            return  # the answer of a peer that we no longer ask
        match event.answer:
            case JoinAccepted() if self.phase is SearchPhase.ASKING:
                # Our declaration stands until Begin: we send on peers that ask us, and can be found if we lose our
                # leader.
                self._change_phase(SearchPhase.FOLLOWING, leader)
                self._met_one = True
                self._leaders.accepted(peer, self._followers, now)
                if self._followers:
                    sometimes("a leader with followers finds an earlier one, and sends them on")
                self._out += [Answer(follower, JoinRedirected(leader)) for follower in self._followers]
                self._followers.clear()
            case JoinAccepted():
                pass  # said twice
            case Begin() as begin if self.phase is SearchPhase.FOLLOWING:
                self._leaders.begun(peer, {member.contact.peer for member in begin.members}, now)
                self._change_phase(SearchPhase.OVER)
                self._out += [events.Enter(begin), *self._poller.withdraw()]
            case Begin():
                self._abandon(peer, "it began without having accepted us")
            case JoinRefused(code, text):
                self._on_refused(peer, code, text, now)
            case JoinRedirected(other):
                self._on_redirected(peer, other, now)

    def _on_refused(self, peer: PeerID, code: str, text: str, now: float) -> None:
        if code != "later":  # it comes to us instead
            reason = text or code[:_CODE_CHARACTERS]
            self._trouble = (f"refused by the peer that was asked to lead: {reason}", (peer,))
        # A leader that began no group is not to blame if we know of too few peers ourselves.
        excused = code == "too-few" and 1 + len(self._known.earlier(None, (), now)) < self._config.min_group_size
        if code in MISMATCH_CODES:
            self._note_mismatch(peer, text)
        else:
            self._leaders.refused(peer, code)
            self._met_one = True
            if code in SOFT_CODES or self._known.expiration_of(peer) is None:
                # We know the latter from a redirection only, without its expiration: we cannot tell which declaration
                # is of no use.
                self._known.pause(peer, now + 4 * SETTLE_S)
            else:
                self._known.spend(peer, self._expiration_of(peer))
        self._look_again(excused=excused)

    def _on_redirected(self, peer: PeerID, leader: Contact, now: float) -> None:
        self._met_one = True
        unfit = leader.peer in {self._me, *self._asked_in_a_row, *self._followers} or self._leads_before(leader.peer)
        unfit = unfit or (self._leaders.avoids(leader.peer) and bool(self._followers))
        if unfit or len(self._asked_in_a_row) >= _MAX_HOPS or self._known.is_set_aside(leader.peer, now):
            sometimes("peers are sent in a circle")
            self._leaders.redirected(peer, None)
            # One of us knows less than the other; the next messages mend that.
            self._trouble = ("sent in a circle, or to a peer that is gone or has no place", (peer, leader.peer))
            self._known.pause(peer, now + 2 * SETTLE_S)
            self._look_again()
        else:
            self._leaders.redirected(peer, leader.peer)
            self._ask(leader)

    def _on_nudged(self, event: events.Nudged) -> None:
        peer, expiration = event.peer, self._poller.note_nudged(event.peer)
        match event.answer:
            case None:
                self._memory.lose(peer, expiration)
                self._expected.lost(peer)
            case JoinRefused(code, text) if code in MISMATCH_CODES:
                self._note_mismatch(peer, text)
            case JoinRefused("later"):
                self._met_one = True
            case JoinRefused("declined"):
                self._met_one = True
                self._leaders.declined(peer)
                self._come_after(peer)
            case JoinRefused():
                self._met_one = True
                self._known.spend(peer, expiration)
            case JoinRedirected(leader):
                self._met_one = True
                self._known.spend(peer, expiration)
                other = leader.peer
                unknown = self._known.expiration_of(other) is None and not self._known.is_lost(other, self._now)
                unknown = unknown and not self._leaders.doubts(other) and not self._leads_before(other)
                if self.phase is SearchPhase.LOOKING and unknown and other not in {self._me, *self._followers}:
                    # If this other leader is earlier it will take us; if not, it will refuse and come to us.
                    self._asked_in_a_row.clear()
                    self._ask(leader)

    def _come_after(self, peer: PeerID) -> None:
        """This peer does not follow us. If nobody does, we follow it: else each of us would wait for the other."""
        expiration = self._known.expiration_of(peer)
        free = self.phase is SearchPhase.LOOKING and not self._followers
        if free and expiration is not None and not self._leaders.doubts(peer):
            sometimes("a peer that is not followed comes after the one that does not follow it")
            self._window.come_after(expiration)
            self._poller.renew()

    def _on_tick(self, now: float) -> None:
        if self._leader is None:
            return
        peer, follows = self._leader.peer, self.phase is SearchPhase.FOLLOWING
        if now >= self.over_at:
            late = "did not begin" if follows else "gave no answer"
            self._fail(f"{self._window.waited(now)}: the peer that was asked to lead {late}", (peer,))
        elif follows and now >= self._window.follow_end:
            sometimes("followers leave a leader that does not begin")
            self._abandon(peer, "it did not begin in time")
        else:
            self._leaders.look_at_others(peer)
            if self._is_silent(peer, False):
                sometimes("followers leave a leader that is silent")
                self._abandon(peer, "it is silent")

    def _abandon(self, peer: PeerID, reason: str) -> None:
        """Leave the peer that we ask or follow."""
        self._out.append(events.LeaveLeader(peer))
        self._lose_leader(peer, reason)

    def _lose_leader(self, peer: PeerID, reason: str) -> None:
        self._lose(peer, reason)
        self._look_again()

    def _lose(self, peer: PeerID, reason: str) -> None:
        self._memory.lose(peer, self._expiration_of(peer))
        self._expected.lost(peer)
        self._leaders.lost(peer)
        self._trouble = (f"the peer that was to lead is gone: {reason}", (peer,))

    def _look_again(self, *, excused: bool = False) -> None:
        leader = self._leader.peer if self._leader is not None and self.phase is SearchPhase.FOLLOWING else None
        if leader is not None and not excused and self._leaders.left(leader, self._now):
            self._known.spend(leader, math.inf)
        self._change_phase(SearchPhase.LOOKING)
        self._asked_in_a_row.clear()
        self._poller.doubt()

    def _expiration_of(self, peer: PeerID) -> float:
        known = self._known.expiration_of(peer)
        # A leader that is known from a redirection only is earlier than we are.
        return self._window.expiration if known is None else known

    # -------------------------------------------------------------------------------------------------- deciding

    def _decided(self, now: float) -> list[events.Action]:
        self._decided_at = now
        if self.phase is SearchPhase.LOOKING:
            self._cause = "decision"
            self._decide(now)
        out, self._out = self._out, []
        return out

    def _decide(self, now: float) -> None:
        self._dismiss_silent()
        if self._followers.full or now >= self._window.ends_at:
            self._conclude(now)
            return
        awaits = self._poller.awaits_followers(now)
        if not awaits:
            self._leaders.most_stay(self._followers)
        expected = self._leaders.expected()
        all_came = self._followers.can_start and expected is not None and expected <= self._followers.keys()
        if all_came and not self._leaders.may_be_on_its_way(
            self._followers, awaits=awaits, joined_at=self.joined_at, now=now
        ):
            self._start()
            return
        self._out += self._poller.declare(self._window.expiration, now)
        earlier, leader = self._choose_leader(now)
        may_start = self._followers.can_start and not earlier and expected is None
        if leader is not None and not self._poller.is_outdated(now):
            self._ask(leader.contact)
        elif hidden := self._hidden.next_to_ask(
            expected or frozenset(), self._leads_before, self._poller.declared_at, now
        ):
            self._ask(hidden)
        elif may_start and self._poller.all_joined(self._followers, now, lambda peer: self._is_silent(peer, False)):
            self._start()
        else:
            self._out += self._poller.nudge(self.key, self._followers, now)
            self._out += self._poller.read(self._followers, now)

    def _dismiss_silent(self) -> None:
        """Send away followers that fell silent while others were waited for."""
        for peer in self._expected.silent_followers():
            sometimes("a follower falls silent while its group forms")
            del self._followers[peer]
            self._refuse(peer, "not-looking", "it gave no sign of life while the group formed")

    def _choose_leader(self, now: float) -> tuple[list[Declaration], Declaration | None]:
        """The peers before us, and the one among them that should lead us, if any: none that is known to be silent."""
        while True:
            earlier = self._known.earlier(self.key if self._leads else None, self._followers, now)
            if self._leads_now(now):
                earlier = [each for each in earlier if not self._leaders.avoids(each.peer)]
            leader = self._first_to_ask(earlier, now)
            if leader is None or self._poller.is_outdated(now) or not self._is_silent(leader.peer, False):
                return earlier, leader
            self._lose(leader.peer, "it is silent")

    def _leads_now(self, now: float) -> bool:
        """Whether others follow us, or may be on their way to us: then we follow nobody that we avoid."""
        return bool(self._followers) or (self._leads and self._poller.awaits_followers(now))

    def _first_to_ask(self, earlier: Sequence[Declaration], now: float) -> Declaration | None:
        """The peer among these that should lead us; None if there is none, or if we should rather lead.

        All ask the earliest one, unless there is a crowd. With several full groups before us we split by our order:
        every `full_size`-th peer leads those after it. Otherwise the groups would fill one after another.
        """
        full = self._config.full_size
        first = len(earlier) // full * full
        if first < _CROWD_GROUPS * full:
            return earlier[0] if earlier else None
        if first < len(earlier):
            return earlier[first]
        # We are such a leader. If nobody has come for a while, the others do not see us as one: then ask the peer
        # before us.
        return None if self._leads and self._poller.awaits_followers(now) else earlier[-1]

    def _leads_before(self, peer: PeerID) -> bool:
        """Whether this peer can lead, and never follows that one, whatever that declares: it is a stranger."""
        return self._leads and self._precedence.is_strange(peer) and not self._precedence.is_strange(self._me)

    def _start(self) -> None:
        self._change_phase(SearchPhase.OVER)
        self._leaders.ended(self._followers, self._now)
        self._out += [events.Start(tuple(self._followers)), *self._poller.withdraw()]

    def _begin_window(self, now: float) -> None:
        offset_s, head_starts = self._known.wall_offset_s, self._leaders.head_starts
        self._window.begin(now, wall_offset_s=offset_s, head_starts=head_starts)
        self._poller.renew()

    def _conclude(self, now: float) -> None:
        """The group is full, or the window ended."""
        group, waited = self._followers, self._window.waited(now)
        too_few = f"the window ended with {group.size} of at least {self._config.min_group_size} peers"
        if group.can_start:
            self._start()
        elif group.enough and not group.reduces:
            self._fail("nobody in the group can reduce: all are clients or have bandwidth 0", self.followers)
        elif self._mismatches and not self._met_one:
            peers = tuple(self._mismatches)
            self._fail(self._mismatches[peers[0]], peers, mismatch=True)
        elif not self._window.is_last(now):
            if group:
                sometimes("a window ends with too few peers")
                self._trouble = (too_few, ())
            self._refuse_followers("too-few", too_few)
            self._begin_window(now)
            self._poller.doubt()
            self._decide(now)
        elif group:
            self._fail(f"{waited}: {too_few}", ())
        else:
            self._fail(f"{waited}: {self._trouble[0]}", self._trouble[1])

    def _fail(self, reason: str, peers: tuple[PeerID, ...], *, mismatch: bool = False) -> None:
        self._give_up(reason)
        self._out.append(events.Fail(reason, peers, mismatch))

    def _give_up(self, reason: str) -> None:
        follows = self.phase is SearchPhase.FOLLOWING  # one that has yet to answer has not failed us
        self._leaders.gave_up(self.leader if follows else None, self._followers, self._now)
        if self._leader is not None:
            self._out.append(events.LeaveLeader(self._leader.peer))
        self._refuse_followers(
            "not-looking" if self._followers.reduces else "no-reducer", f"the leader gave up: {reason}"
        )
        self._change_phase(SearchPhase.OVER)
        self._out += self._poller.withdraw()
