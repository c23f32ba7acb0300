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
from collections.abc import Callable, Collection, Sequence

from shoal.averaging.matchmaking import events
from shoal.averaging.matchmaking.config import SETTLE_MAX_S, SETTLE_S, MatchmakingConfig
from shoal.averaging.matchmaking.declarations import DirectoryPoller, KnownDeclarations, Memory
from shoal.averaging.matchmaking.events import TRANSITIONS, Answer, Declaration, Precedence, SearchPhase
from shoal.base.ledger import WORTH_S
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Begin, Contact, JoinAccepted, JoinRedirected, JoinRefused, Member
from shoal.rpc.rhythm import LOOK_S

__all__ = ["LOOKED_AT", "GroupMachine"]

LOOKED_AT = 32
"""Of more peers than this only a leader looks at all."""

MISMATCH_CODES = frozenset({"schema", "settings"})
"""Refusals that mean: we can never be in one group."""

SOFT_CODES = frozenset({"full", "replaced"})
"""Refusals that mean: ask again in a while."""

PASSING_CODES = frozenset({"later", "not-looking", "started", "replaced"})
"""Refusals that come from any peer that is not asked in the right moment."""

_MAX_HOPS = 6
"""The most redirections in a row that a peer follows."""

_MAX_MISMATCHES = 8
_EXPECTED_POLL_S = 0.1
_CROWD_GROUPS = 4
"""So many full groups of declarers before a peer are a crowd."""

_LATER_S = 1e-3
_HEAD_START_S = 1.0
"""The leader of the last group declares itself earlier than the others by this, so that it can lead them again."""

_TEXT_CHARACTERS = 1000
_CODE_CHARACTERS = 64


class Followers(dict[PeerID, events.JoinRequested]):
    """The peers that a leader has accepted and that have neither left nor been sent away. Are they a group with it?

    Args:
        leader: the leader's word about itself.
        config: the sizes of groups.
    """

    def __init__(self, leader: Member, config: MatchmakingConfig) -> None:
        super().__init__()
        self._leader, self._config = leader, config
        self._leads = bool(leader.contact.addresses)

    @property
    def size(self) -> int:
        """The size of the group, including the leader."""
        return 1 + len(self)

    @property
    def full(self) -> bool:
        """Return whether nobody else may join."""
        return self._leads and self.size >= self._config.full_size and self.contributes

    @property
    def enough(self) -> bool:
        """Return whether there are enough members for a group."""
        return self._leads and self.size >= self._config.min_group_size

    @property
    def reduces(self) -> bool:
        """Return whether anybody can reduce a share."""
        return self._leader.reduces or any(each.reduces for each in self.values())

    @property
    def contributes(self) -> bool:
        """Return whether anybody has values."""
        return self._leader.contributes or any(each.contributes for each in self.values())

    @property
    def can_start(self) -> bool:
        """Return whether these are a group. One without values fails at once on each of its members (decision 0007)."""
        return self.enough and self.reduces


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
        idled: the leaders that we followed for half of a window or longer, and that began no group although there were
            enough peers, as far as we know: they lead us no more in this search.
        turned_away: the peers that did not take us, as their groups were full, and fewer peers are here than that.
        over_at: when the search is over, whatever goes on (loop time, seconds); infinity without a deadline.
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
        self._config, self._memory, self._expected = config, memory, expected
        self._is_silent, self._contact_of = is_silent, contact_of
        self._precedence = precedence
        self._known = KnownDeclarations(self._me, config, memory, wall_offset_s=wall_offset_s, precedence=precedence)
        self._shunned = set[PeerID]()
        for peer in precedence.shunned:
            self._shun(peer)
        self._avoided = {peer for peer, until in memory.avoided.items() if until > now}
        self.idled: list[PeerID] = []
        self.turned_away: set[PeerID] = set()
        self._missed = frozenset[PeerID]()  # those that were missing in the groups of a leader that is on trial
        self._relied_on: set[PeerID] = set()  # the expected peers that we asked to lead us
        self._declined: set[PeerID] = set()  # they do not let us lead them, in this search
        self._now = self._followed_at = now
        self._poller = DirectoryPoller(self._me, leads=self._leads, memory=memory, known=self._known, now=now)
        self._followers = Followers(member, config)
        self._out: list[events.Action] = []
        self.phase, self._cause = SearchPhase.LOOKING, "start"
        self._started_at = self._decided_at = self._window_end = now
        self.over_at = math.inf if deadline_s is None else now + deadline_s
        last_window = one_window or deadline_s is None
        self._end = min(now + config.window_s, self.over_at) if last_window else self.over_at
        self._expiration = math.inf
        self._leader: Contact | None = None
        self._asked_in_a_row: set[PeerID] = set()
        self._met_one = False
        self._mismatches: dict[PeerID, str] = {}
        self._lost_now: set[PeerID] = set()  # in this search
        self._sent_on: set[PeerID] = set()  # to the leader that we follow
        self._hoped_for: set[PeerID] = set()  # the expected peers, while we followed a leader
        self._asked_hidden: list[PeerID] = []  # beside the directory, in this search
        self._asked_hidden_at = -math.inf
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
        return self._precedence.key(self._me, self._expiration)

    @property
    def group_size(self) -> int:
        """The size of the group as it is now, including this peer."""
        return self._followers.size

    @property
    def joined_at(self) -> float:
        """When the last peer joined; when the search began if none has (loop time, seconds)."""
        return self._poller.joined_at

    def set_wall_clock(self, offset_s: float) -> None:
        """Take over the current offset of the wall clock: the loop's time stands still while the process is stopped."""
        self._known.wall_offset_s = offset_s

    def start(self, now: float) -> list[events.Action]:
        """Begin the search; call it once, before `handle`."""
        leader, memory = self._memory.leader, self._memory
        memory.on_trial = None
        if leader is not None and (missed := memory.missed(leader.peer)):
            # The two do not reach each other, or one of them is at fault. Do the others come where another peer leads?
            memory.on_trial, self._missed = leader.peer, missed
            # Neither of the two leads: whoever leads is in its own group, and may keep the other one out.
            self._avoided |= {leader.peer, *missed}
        self._begin_window(now)
        if (
            leader is not None
            and leader.peer not in self._avoided
            and leader.peer in (self._expected_members() or ())
            and not self._leads_before(leader.peer)
            and not self._is_silent(leader.peer, False)
        ):
            self._ask(leader)  # it searches now too: asking at once saves a read
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
                self._lost_now.add(peer)
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
            return min(self._follow_end if self.phase is SearchPhase.FOLLOWING else math.inf, self.over_at, look_at)
        due = self._poller.due(self.key, self._followers, self._decided_at)
        due = min(due, self._window_end, self._known.next_change(self._decided_at))
        return min(due, look_at if self._expected is None else self._decided_at + _EXPECTED_POLL_S)

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
        if phase is SearchPhase.FOLLOWING:
            self._followed_at = self._now
        self.phase, self._leader = phase, leader

    def _judge_leader(self, peer: PeerID) -> None:
        """A leader that was followed for long, and began no group, leads us no more: it would have us wait again."""
        if self._now >= self._followed_at + self._config.window_s / 2:
            sometimes("a leader was followed for long, and began no group")
            self._shun(peer)
            self.idled.append(peer)

    def _followed_alone(self, leader: PeerID, members: Collection[PeerID]) -> None:
        """Was this leader followed for long, and did half of the others not come to its group of these members?

        It may have lied to them alone. That proves nothing, so it is avoided. Whoever shuns a peer knows why others do
        not come.
        """
        hoped_for = frozenset(self._hoped_for - {self._me, leader} - self._shunned - self._avoided)
        hoped_for = self._not_gone(hoped_for, among=len(self._hoped_for))
        came = 1 + len(hoped_for.intersection(members))
        if 2 * came > 1 + len(hoped_for):
            self._memory.vain_s.pop(leader, None)
        elif self._memory.followed_in_vain(leader, self._now - self._followed_at) >= self._config.window_s / 2:
            sometimes("a peer avoids a leader to which half of the others do not come")
            self._avoid(leader, len(hoped_for) + 2)

    def _avoid(self, leader: PeerID, members: int) -> None:
        self._memory.avoid(leader, self._now, self._config.window_s, members)

    def _relied(self, members: Collection[PeerID]) -> None:
        """The search is over: those that we asked to lead us, and that are not in our group, have failed us."""
        in_vain = self._relied_on.difference(members)
        for leader in self._memory.relied(self._relied_on, in_vain):
            sometimes("a peer avoids a leader that fails it again and again")
            self._avoid(leader, len(self._all_expected()) + 1)

    def _shun(self, peer: PeerID) -> None:
        self._shunned.add(peer)
        self._known.spend(peer, math.inf)

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
        self._lost_now.discard(peer)
        self._known.hear(asker, now)
        wants_to_follow = key > self.key or not event.contact.addresses  # else it nudges us: we are to follow it
        if peer == self.leader and wants_to_follow:
            sometimes("a peer is asked to lead by its own leader")
            # It has declared anew, so it leads us no more, and will not; its message about that is on the way.
            self._out.append(events.LeaveLeader(peer))
            self._look_again()
        full = f"the group has its {self._config.full_size} members"
        has_place = peer in self._followers or self._followers.size < self._config.full_size
        if self.phase is SearchPhase.FOLLOWING and self._leader is not None:
            if peer == self.leader:
                self._refuse(peer, "later", "I follow you")  # its nudge and our Join have crossed
            else:
                if not self._is_before(event, self._leader.peer):  # else it does not want to follow that one
                    self._sent_on.add(peer)
                self._out.append(Answer(peer, JoinRedirected(self._leader)))
        elif not self._leads:
            self._refuse(peer, "not-looking", "a client does not lead")
        elif not wants_to_follow:
            self._followers.pop(peer, None)
            if peer in self._shunned or (peer in self._avoided and self._leads_now(now)):
                self._refuse(peer, "declined", "I do not follow you")
            else:
                self._refuse(peer, "later", "you are earlier: lead me")
        elif not has_place and (giving_way := self._gives_way(event)) is None:
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

    def _gives_way(self, event: events.JoinRequested) -> PeerID | None:
        """The follower in a full group whose place this peer takes; None if there is none."""
        followers = self._followers
        if not followers.contributes and event.contributes:  # nobody has values yet
            sometimes("a peer with values takes the place of an auxiliary one")
            return next(reversed(followers))
        if self._precedence.is_strange(event.contact.peer):
            return None
        return next((peer for peer in reversed(followers) if self._precedence.is_strange(peer)), None)

    def _note_mismatch(self, peer: PeerID, text: str) -> None:
        self._known.spend(peer, math.inf)
        if len(self._mismatches) < _MAX_MISMATCHES:
            self._mismatches[peer] = text

    # ----------------------------------------------------------------------------------------- asking, following

    def _ask(self, contact: Contact) -> None:
        self._change_phase(SearchPhase.ASKING, contact)
        self._asked_in_a_row.add(contact.peer)
        self._is_silent(contact.peer, False)  # the first look at it: the next one is a while later
        self._out.append(events.AskToLead(contact, self._expiration))

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
                self._relied_on.add(peer)
                if self._followers:
                    sometimes("a leader with followers finds an earlier one, and sends them on")
                self._out += [Answer(follower, JoinRedirected(leader)) for follower in self._followers]
                self._sent_on = set(self._followers)
                self._followers.clear()
            case JoinAccepted():
                pass  # said twice
            case Begin() as begin if self.phase is SearchPhase.FOLLOWING:
                members = {member.contact.peer for member in begin.members}
                expected = self._all_expected()  # those that we avoid, too: they are to be members
                expected = self._not_gone(expected - self._declined - {self._me}, among=len(expected))
                self._memory.awaited = (expected | members | self._sent_on) - self._shunned - {self._me, peer}
                self._followed_alone(peer, members)
                self._relied_on.discard(peer)
                self._relied(members)
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
        expected = self._all_expected()
        if code == "full" and peer in expected and len(expected) < self._config.full_size:
            sometimes("a leader says that its group is full, and there are too few peers for that")
            self.turned_away.add(peer)
        if code == "declined":
            self._declined.add(peer)
        if code not in PASSING_CODES | MISMATCH_CODES:
            self._relied_on.add(peer)
        if code in MISMATCH_CODES:
            self._note_mismatch(peer, text)
        else:
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
        self._relied_on.discard(peer)
        unfit = leader.peer in self._asked_in_a_row or leader.peer == self._me or leader.peer in self._followers
        unfit = unfit or self._leads_before(leader.peer) or (leader.peer in self._avoided and bool(self._followers))
        if unfit or len(self._asked_in_a_row) >= _MAX_HOPS or self._known.is_set_aside(leader.peer, now):
            sometimes("peers are sent in a circle")
            # One of us knows less than the other; the next messages mend that.
            self._trouble = ("sent in a circle, or to a peer that is gone or has no place", (peer, leader.peer))
            self._known.pause(peer, now + 2 * SETTLE_S)
            self._look_again()
        else:
            self._relied_on.add(leader.peer)  # others follow it
            self._ask(leader)

    def _on_nudged(self, event: events.Nudged) -> None:
        peer, expiration = event.peer, self._poller.note_nudged(event.peer)
        match event.answer:
            case None:
                self._memory.lose(peer, expiration)
                self._lost_now.add(peer)
            case JoinRefused(code, text) if code in MISMATCH_CODES:
                self._note_mismatch(peer, text)
            case JoinRefused("later"):
                self._met_one = True
            case JoinRefused("declined"):
                self._met_one = True
                self._declined.add(peer)
                self._come_after(peer)
            case JoinRefused():
                self._met_one = True
                self._known.spend(peer, expiration)
            case JoinRedirected(leader):
                self._met_one = True
                self._known.spend(peer, expiration)
                other = leader.peer
                unknown = self._known.expiration_of(other) is None and not self._known.is_lost(other, self._now)
                unknown = unknown and other not in self._shunned | self._avoided and not self._leads_before(other)
                if self.phase is SearchPhase.LOOKING and unknown and other not in {self._me, *self._followers}:
                    # If this other leader is earlier it will take us; if not, it will refuse and come to us.
                    self._asked_in_a_row.clear()
                    self._ask(leader)

    def _come_after(self, peer: PeerID) -> None:
        """This peer does not follow us. If nobody does, we follow it: else each of us would wait for the other."""
        expiration = self._known.expiration_of(peer)
        free = self.phase is SearchPhase.LOOKING and not self._followers
        if free and expiration is not None and peer not in self._shunned | self._avoided:
            sometimes("a peer that is not followed comes after the one that does not follow it")
            self._expiration = self._memory.declared = max(self._expiration, expiration) + _LATER_S
            self._poller.renew()

    def _on_tick(self, now: float) -> None:
        if self._leader is None:
            return
        peer, follows = self._leader.peer, self.phase is SearchPhase.FOLLOWING
        if now >= self.over_at:
            late = "did not begin" if follows else "gave no answer"
            self._fail(f"{self._waited(now)}: the peer that was asked to lead {late}", (peer,))
        elif follows and now >= self._follow_end:
            sometimes("followers leave a leader that does not begin")
            self._abandon(peer, "it did not begin in time")
        else:
            # Look at the other followers: if our leader is silent, the next one is not to wait for silent ones as well.
            expected = self._all_expected()
            self._hoped_for |= expected
            for other in expected - {self._me, peer} if len(expected) <= LOOKED_AT else ():
                self._is_silent(other, True)
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
        self._lost_now.add(peer)
        self._relied_on.add(peer)
        self._trouble = (f"the peer that was to lead is gone: {reason}", (peer,))

    def _look_again(self, *, excused: bool = False) -> None:
        if self.phase is SearchPhase.FOLLOWING and self._leader is not None and not excused:
            self._judge_leader(self._leader.peer)
        self._change_phase(SearchPhase.LOOKING)
        self._asked_in_a_row.clear()
        self._poller.doubt()

    def _expiration_of(self, peer: PeerID) -> float:
        known = self._known.expiration_of(peer)
        # A leader that is known from a redirection only is earlier than we are.
        return self._expiration if known is None else known

    @property
    def _follow_end(self) -> float:
        return self._window_end + self._config.request_timeout_s

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
        if self._followers.full or now >= self._window_end:
            self._conclude(now)
            return
        self._look_at_trial(now)
        expected = self._expected_members()
        all_came = self._followers.can_start and expected is not None and expected <= self._followers.keys()
        if all_came and not self._may_be_on_its_way(now):
            self._start()
            return
        self._out += self._poller.declare(self._expiration, now)
        earlier, leader = self._choose_leader(now)
        may_start = self._followers.can_start and not earlier and expected is None
        if leader is not None and not self._poller.is_outdated(now):
            self._ask(leader.contact)
        elif (hidden := self._choose_hidden(expected or frozenset(), now)) is not None:
            sometimes("an expected peer that the directory does not show is asked")
            self._asked_hidden_at = now
            self._asked_hidden.append(hidden.peer)
            self._ask(hidden)
        elif may_start and self._poller.all_joined(self._followers, now, lambda peer: self._is_silent(peer, False)):
            self._start()
        else:
            self._out += self._poller.nudge(self.key, self._followers, now)
            self._out += self._poller.read(self._followers, now)

    def _look_at_trial(self, now: float) -> None:
        """Fewer have come than to the leader that is on trial: the others stay with it, and so do we."""
        memory = self._memory
        if memory.on_trial is None or self._poller.awaits_followers(now) or self._followers.size >= memory.there:
            return
        sometimes("a leader is on trial, and most others stay with it")
        self._avoided -= {memory.on_trial, *self._missed} - memory.avoided.keys()
        memory.trial_ended(self._missed.difference(self._followers))
        memory.on_trial, self._missed = None, frozenset()

    def _dismiss_silent(self) -> None:
        """Send away followers that fell silent while others were waited for: the round would wait for them, too."""
        if self._expected is None or len(self._followers) > LOOKED_AT:
            return
        for peer in [peer for peer in self._followers if self._is_silent(peer, True)]:
            sometimes("a follower falls silent while its group forms")
            del self._followers[peer]
            self._refuse(peer, "not-looking", "it gave no sign of life while the group formed")

    def _choose_leader(self, now: float) -> tuple[list[Declaration], Declaration | None]:
        """The peers before us, and the one among them that should lead us, if any: none that is known to be silent."""
        while True:
            earlier = self._known.earlier(self.key if self._leads else None, self._followers, now)
            if self._leads_now(now):
                earlier = [each for each in earlier if each.peer not in self._avoided]
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

    def _all_expected(self) -> frozenset[PeerID]:
        """The peers that are expected; none if nobody knows them."""
        return (self._expected() if self._expected is not None else None) or frozenset()

    def _expected_members(self) -> frozenset[PeerID] | None:
        """The peers that are expected to join and not known to be gone; None if none, or if not known.

        One that leads badly may come. It may also wait for us to follow it: see `_may_be_on_its_way`.
        """
        expected = self._expected() if self._expected is not None else None
        if expected is None:
            return None
        others = expected - self._shunned - (self._avoided - self._missed) - self._declined - {self._me}
        return self._not_gone(others, among=len(expected)) or None

    def _may_be_on_its_way(self, now: float) -> bool:
        """Whether an expected peer that leads badly may be about to join, as the others have only just come.

        It may be honest: it was frozen once, or cut off. It knows nothing of its fault, and is sent on to us. And those
        that its groups have lacked get some time to come to this one, though nobody expects them any more: else nothing
        would be known of either.
        """
        if self._expected is None:
            return False
        expected, awaited = self._all_expected(), set[PeerID]()
        if self._poller.awaits_followers(now):
            awaited |= expected & (self._shunned | self._avoided)
        if now < self.joined_at + WORTH_S:
            awaited |= self._missed
        awaited -= self._declined | {self._me} | self._followers.keys()
        return bool(self._not_gone(frozenset(awaited), among=len(expected)))

    def _not_gone(self, peers: frozenset[PeerID], *, among: int) -> frozenset[PeerID]:
        looks = bool(self._followers) or among <= LOOKED_AT  # to look at a peer is to ask it, or to dial it
        return frozenset(p for p in peers if p in self._followers or not self._is_gone(p, looks=looks))

    def _choose_hidden(self, expected: frozenset[PeerID], now: float) -> Contact | None:
        """An expected peer to ask, as most have not come here, and do not stand in the directory.

        Lying nodes there may hide them, or the clocks of a few are so wrong that they see each other alone. Whatever it
        says shows the way: it leads, sends us to its leader, or has heard of us now and comes here.
        """
        if now < max(self._poller.declared_at, self._asked_hidden_at) + SETTLE_MAX_S:
            return None
        seen = {each.peer for each in self._known.earlier(None, (), now)}
        hidden = expected - seen - self._followers.keys()
        if 2 * len(hidden) <= len(expected):
            return None
        able = [peer for peer in hidden if not self._known.is_set_aside(peer, now)]
        able = [peer for peer in able if not self._leads_before(peer)]
        able.sort(key=lambda peer: (self._asked_hidden.count(peer), peer < self._me, peer))
        return next((contact for contact in map(self._contact_of, able) if contact.addresses), None)

    def _leads_before(self, peer: PeerID) -> bool:
        """Whether this peer can lead, and never follows that one, whatever that declares: it is a stranger."""
        return self._leads and self._precedence.is_strange(peer) and not self._precedence.is_strange(self._me)

    def _is_gone(self, peer: PeerID, *, looks: bool) -> bool:
        # One that was lost before this search may be here again.
        return peer in self._lost_now or (looks and self._is_silent(peer, True))

    def _start(self) -> None:
        self._change_phase(SearchPhase.OVER)
        self._relied(self._followers)
        self._out += [events.Start(tuple(self._followers)), *self._poller.withdraw()]

    def _begin_window(self, now: float) -> None:
        window_s = self._config.window_s
        self._window_end = min(now + window_s, self._end)
        # Later than our last expiration: others were told between two searches that the last one is over.
        last, self._expiration = self._memory.declared, self._window_end + self._known.wall_offset_s
        # We must lead a peer that we shun, or at least not wait for it while it waits for us.
        head_starts = 2 * bool(self._shunned or self._avoided) + self._memory.led
        self._expiration -= head_starts * min(_HEAD_START_S, window_s / 10)
        if 0 <= last - self._expiration < window_s:  # a larger gap means that the clock was set back
            self._expiration = last + _LATER_S
        self._memory.declared = self._expiration
        self._poller.renew()

    def _conclude(self, now: float) -> None:
        """The group is full, or the window ended."""
        group, waited = self._followers, self._waited(now)
        too_few = f"the window ended with {group.size} of at least {self._config.min_group_size} peers"
        if group.can_start:
            self._start()
        elif group.enough and not group.reduces:
            self._fail("nobody in the group can reduce: all are clients or have bandwidth 0", self.followers)
        elif self._mismatches and not self._met_one:
            peers = tuple(self._mismatches)
            self._fail(self._mismatches[peers[0]], peers, mismatch=True)
        elif now < self._end:
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

    def _waited(self, now: float) -> str:
        return f"no group within {now - self._started_at:.1f} s"

    def _fail(self, reason: str, peers: tuple[PeerID, ...], *, mismatch: bool = False) -> None:
        self._give_up(reason)
        self._out.append(events.Fail(reason, peers, mismatch))

    def _give_up(self, reason: str) -> None:
        if self._memory.on_trial is not None:
            self._memory.trial_ended(self._missed.difference(self._followers))
        follows = self._leader is not None and self.phase is SearchPhase.FOLLOWING
        if self._leader is not None and follows:  # one that has yet to answer has not failed us
            self._relied_on.add(self._leader.peer)
        self._relied(())
        if self._leader is not None:
            if follows:
                self._followed_alone(self._leader.peer, ())
            self._out.append(events.LeaveLeader(self._leader.peer))
        self._refuse_followers(
            "not-looking" if self._followers.reduces else "no-reducer", f"the leader gave up: {reason}"
        )
        self._change_phase(SearchPhase.OVER)
        self._out += self._poller.withdraw()
