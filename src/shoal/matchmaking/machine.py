"""The forming of a group, as a state machine. Sans-IO: events in, actions out, time and knowledge handed in.

Every peer that can lead declares itself in a directory with an expiration and then reads it. Peers are ordered by their
*key* (expiration, peer id). A peer asks the earliest declared peer before itself to lead. A peer that finds none before
itself leads the peers that ask it, until the group is full or all present peers have joined.

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
time (`lookout`), shows no live declarer that has not joined. Every peer declares before it looks (each holder of the
key takes a declaration, then shows its entries), so a peer that is not in that read came too late. A declarer that does
not come is *nudged*: the leader asks to join it. The declarer refuses, because the leader is earlier; but it learns of
the leader, and the leader learns whether it is alive.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

from shoal.matchmaking.declarers import Declarers
from shoal.matchmaking.followers import Follower, Followers
from shoal.matchmaking.lookout import Lookout
from shoal.matchmaking.signals import (
    Accept,
    Action,
    Ask,
    AskAccepted,
    AskLost,
    AskRedirected,
    AskRefused,
    BeginReceived,
    Cancel,
    Declaration,
    Declared,
    DeclareFailed,
    DirectoryFailed,
    DirectoryRead,
    Event,
    Fail,
    JoinAsked,
    JoinGone,
    Key,
    Memory,
    Mismatched,
    Nudged,
    PeerGone,
    Redirect,
    Refuse,
    Rules,
    Start,
    StopAsking,
    Tick,
)
from shoal.peer import PeerID
from shoal.wire import Contact

__all__ = ["LOOKED_AT", "GroupMachine", "Phase"]

LOOKED_AT = 32
"""Of more peers than this only a leader looks at all."""

MISMATCH_CODES = frozenset({"schema", "settings"})
"""Refusals that mean: we can never be in one group."""

SOFT_CODES = frozenset({"full", "replaced"})
"""Refusals that mean: ask again in a while."""

_MAX_HOPS = 6
_MAX_MISMATCHES = 8
_EXPECTED_POLL_S = 0.1
_CROWD_GROUPS = 4
_LATER_S = 1e-3
_HEAD_START_S = 1.0
"""The leader of the last group declares itself earlier than the others by this, so that it can lead them again."""

_Answer = AskAccepted | AskRefused | AskRedirected | AskLost | BeginReceived


class Phase(enum.Enum):
    """The state of a search."""

    LOOKING = enum.auto()
    """Follows and asks nobody; leads the peers that ask it."""
    ASKING = enum.auto()
    """Has asked another peer to lead; still leads the peers that ask it, but does not start."""
    FOLLOWING = enum.auto()
    """Waits for its leader's Begin."""
    OVER = enum.auto()
    """Started, begun, failed or cancelled."""


class GroupMachine:
    """One search for a group.

    Args:
        me: this peer.
        rules: sizes and times.
        memory: the memory that is kept between searches; changed in place.
        now: loop time, seconds.
        wall_offset_s: wall clock minus loop time, seconds; only used to write and read expirations.
        expected: returns the peers that are expected to join, None if not known. Called often; the group starts as soon
            as all of them that are alive have joined, and otherwise waits for them to the end of the window.
        silent: called every `look_s` for a peer that is waited for; returns whether to stop waiting for it. The
            second argument is True for an expected member: giving up the leader costs more.
        contact_of: returns what is known of an expected peer's addresses.

    Attributes:
        over_at: when the search is over, whatever goes on (loop time, seconds); infinity without a deadline.
    """

    def __init__(
        self,
        me: PeerID,
        rules: Rules,
        memory: Memory,
        *,
        now: float,
        wall_offset_s: float,
        expected: Callable[[], frozenset[PeerID] | None] | None = None,
        silent: Callable[[PeerID, bool], bool] = lambda _, soon: False,
        contact_of: Callable[[PeerID], Contact] = Contact,
    ) -> None:
        self._me, self._rules, self._memory, self._expected, self._silent = me, rules, memory, expected, silent
        self._contact_of = contact_of
        self._asked_unseen: list[PeerID] = []  # beside the directory, in this search
        self._asked_unseen_at = -math.inf
        self._declarers = Declarers(me, rules, memory, wall_offset_s=wall_offset_s)
        self._lookout = Lookout(me, rules, memory, self._declarers, now=now)
        self._out: list[Action] = []
        self._phase = Phase.LOOKING
        self._started_at = self._decided_at = self._window_end = now
        self.over_at = math.inf if rules.deadline_s is None else now + rules.deadline_s
        one_window = rules.one_window or rules.deadline_s is None
        self._end = min(now + rules.window_s, self.over_at) if one_window else self.over_at
        self._expiration = math.inf
        self._leader: Contact | None = None
        self._chain: set[PeerID] = set()
        self._group = Followers(rules)
        self._followers = self._group.members
        self._met = False
        self._mismatches: dict[PeerID, str] = {}
        self._lost_now: set[PeerID] = set()  # in this search
        self._trouble: tuple[str, tuple[PeerID, ...]] = ("nobody else is looking for one", ())

    # --------------------------------------------------------------------------------------------------- outside

    @property
    def phase(self) -> Phase:
        """The state of the search."""
        return self._phase

    @property
    def followers(self) -> tuple[PeerID, ...]:
        """The peers that were accepted and have neither left nor been sent away."""
        return tuple(self._followers)

    @property
    def leader(self) -> PeerID | None:
        """The peer that is followed or asked; None in LOOKING."""
        return self._leader.peer if self._leader else None

    @property
    def key(self) -> Key:
        """Our place in the order."""
        return self._expiration, self._me

    def set_wall_clock(self, offset_s: float) -> None:
        """Take over the current offset of the wall clock: the loop's time stands still while the process is stopped."""
        self._declarers.wall_offset_s = offset_s

    def start(self, now: float) -> list[Action]:
        """Begin the search; call it once, before `handle`."""
        self._new_window(now)
        leader, expected = self._memory.leader, self._expected_members() or ()
        if leader is not None and leader.peer in expected and not self._silent(leader.peer, False):
            self._ask(leader)  # it expects us and searches now too: asking at once saves a read
        return self._done(now)

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions upon `event`. After the search is over there are none, but joins are refused."""
        match event:
            case JoinAsked(contact) if self._phase is Phase.OVER:
                self._out.append(Refuse(contact.peer, "not-looking", "not looking for a group now"))
            case _ if self._phase is Phase.OVER:
                pass
            case JoinAsked():
                self._on_join(event, now)
            case JoinGone(peer):
                self._followers.pop(peer, None)
            case Mismatched(peer, text):
                self._mismatch(peer, text)
            case AskAccepted() | AskRefused() | AskRedirected() | AskLost() | BeginReceived():
                self._on_answer(event, now)
            case PeerGone(peer):
                self._followers.pop(peer, None)
                self._lost_now.add(peer)
                if peer == self.leader:
                    self._abandon(peer, "its connection is lost")
            case Tick():
                self._on_tick(now)
            case Cancel():
                self._give_up("its search was cancelled")
            case _:
                self._on_directory(event, now)
        return self._done(now)

    def deadline(self) -> float | None:
        """Return when to call with `Tick` if nothing happens before (loop time, seconds); None: not needed."""
        look_at = self._decided_at + self._rules.look_s
        if self._phase is Phase.FOLLOWING:
            return min(self._follow_end, self.over_at, look_at)
        if self._phase is Phase.ASKING:
            return min(self.over_at, look_at)
        if self._phase is Phase.OVER:
            return None
        due = self._lookout.due(self.key, self._followers, self._decided_at)
        due = min(due, self._window_end, self._declarers.next_change(self._decided_at))
        return min(due, look_at if self._expected is None else self._decided_at + _EXPECTED_POLL_S)

    def _on_directory(
        self, event: Declared | DeclareFailed | DirectoryRead | DirectoryFailed | Nudged, now: float
    ) -> None:
        match event:
            case Declared(declarations):
                self._lookout.declared(declarations, now)
            case DeclareFailed(error):
                self._lookout.declare_failed(now)
                self._trouble = (f"could not declare ourselves: {error}", ())
            case DirectoryRead(declarations):
                self._lookout.read_done(declarations, now)
            case DirectoryFailed(error):
                self._lookout.read_failed()
                self._trouble = (f"could not read who is looking: {error}", ())
            case Nudged():
                self._on_nudged(event)

    # ------------------------------------------------------------------------------------------------ being asked

    def _on_join(self, event: JoinAsked, now: float) -> None:
        peer = event.contact.peer
        asker = Declaration(event.contact, event.expiration)
        self._met = True
        self._lost_now.discard(peer)
        self._declarers.hear(asker, now)
        if self._phase is Phase.FOLLOWING and peer == self.leader and asker.key > self.key:
            # It has declared anew, so it no longer leads us; its message about that is on the way.
            self._out.append(StopAsking(peer))
            self._look_again()
        if self._phase is Phase.FOLLOWING and self._leader is not None:
            if peer == self.leader:
                self._out.append(Refuse(peer, "later", "I follow you"))  # its nudge and our Join have crossed
            else:
                self._out.append(Redirect(peer, self._leader))
        elif not self._rules.leads:
            self._out.append(Refuse(peer, "not-looking", "a client does not lead"))
        elif event.contact.addresses and asker.key < self.key:
            self._followers.pop(peer, None)
            self._out.append(Refuse(peer, "later", "you are earlier: lead me"))
        elif not self._group.has_room(peer, contributes=event.contributes):
            self._out.append(Refuse(peer, "full", self._full_text()))
        else:
            if peer not in self._followers:
                self._lookout.joined(now)
            if (other := self._group.in_the_way(peer)) is not None:
                del self._followers[other]
                self._out.append(Refuse(other, "full", self._full_text()))
            self._followers[peer] = Follower(event.reduces, event.contributes)
            self._out.append(Accept(peer))

    def _full_text(self) -> str:
        return f"the group has its {self._rules.full_size} members"

    def _mismatch(self, peer: PeerID, text: str) -> None:
        self._declarers.spend(peer, math.inf)
        if len(self._mismatches) < _MAX_MISMATCHES:
            self._mismatches[peer] = text

    # ----------------------------------------------------------------------------------------- asking, following

    def _ask(self, contact: Contact) -> None:
        self._phase, self._leader = Phase.ASKING, contact
        self._chain.add(contact.peer)
        self._silent(contact.peer, False)  # the first look at it: the next one is a while later
        self._out.append(Ask(contact, self._expiration))

    def _on_answer(self, event: _Answer, now: float) -> None:
        match event:
            case _ if event.peer != self.leader:
                pass  # the answer of a peer that we no longer ask
            case AskAccepted(peer) if peer in self._followers:
                self._abandon(peer, "it follows us and would lead us")
            case AskAccepted(peer) if self._phase is Phase.ASKING:
                self._follow()
            case AskAccepted():
                pass  # said twice
            case BeginReceived() if self._phase is Phase.FOLLOWING:
                self._phase = Phase.OVER
                self._out += self._lookout.withdraw()
            case BeginReceived(peer):
                self._abandon(peer, "it began without having accepted us")
            case AskRefused(peer, code, text):
                self._on_refused(peer, code, text, now)
            case AskRedirected(peer, leader):
                self._on_redirected(peer, leader, now)
            case AskLost(peer, reason):
                self._lost(peer, reason)

    def _follow(self) -> None:
        """Our declaration stands until Begin: we send on peers that ask us, and can be found if we lose our leader."""
        if self._leader is not None:
            self._phase, self._met = Phase.FOLLOWING, True
            self._out += [Redirect(peer, self._leader) for peer in self._followers]
            self._followers.clear()

    def _on_refused(self, peer: PeerID, code: str, text: str, now: float) -> None:
        if code != "later":  # it comes to us instead
            self._trouble = (f"refused by the peer that was asked to lead: {text or code}", (peer,))
        if code in MISMATCH_CODES:
            self._mismatch(peer, text)
        else:
            self._met = True
            if code in SOFT_CODES or self._declarers.expiration_of(peer) is None:
                # We know the latter from a redirection only, without its expiration: we cannot tell which declaration
                # is of no use.
                self._declarers.pause(peer, now + 4 * self._rules.settle_s)
            else:
                self._declarers.spend(peer, self._expiration_of(peer))
        self._look_again()

    def _on_redirected(self, peer: PeerID, leader: Contact, now: float) -> None:
        self._met = True
        unfit = leader.peer in self._chain or leader.peer == self._me or leader.peer in self._followers
        if unfit or len(self._chain) >= _MAX_HOPS or self._declarers.set_aside(leader.peer, now):
            # One of us knows less than the other; the next messages mend that.
            self._trouble = ("sent in a circle, or to a peer that is gone or has no place", (peer, leader.peer))
            self._declarers.pause(peer, now + 2 * self._rules.settle_s)
            self._look_again()
        else:
            self._ask(leader)

    def _on_nudged(self, event: Nudged) -> None:
        expiration = self._lookout.nudged(event.peer)
        if event.code in MISMATCH_CODES:
            self._mismatch(event.peer, event.text)
        elif event.code == "lost":
            self._memory.lose(event.peer, expiration)
            self._lost_now.add(event.peer)
        else:
            self._met = True
            if event.code != "later":
                self._declarers.spend(event.peer, expiration)
            if event.leader is not None:
                self._on_other_leader(event.leader)

    def _on_other_leader(self, leader: Contact) -> None:
        """There is another leader. If it is earlier it will take us; if not, it will refuse and come to us."""
        peer = leader.peer
        unknown = self._declarers.expiration_of(peer) is None and not self._declarers.is_lost(peer)
        if self._phase is Phase.LOOKING and unknown and peer != self._me and peer not in self._followers:
            self._chain.clear()
            self._ask(leader)

    def _on_tick(self, now: float) -> None:
        if self._leader is not None and now >= self.over_at:
            late = "did not begin" if self._phase is Phase.FOLLOWING else "gave no answer"
            self._fail(f"{self._waited(now)}: the peer that was asked to lead {late}", (self._leader.peer,))
        elif self._phase is Phase.FOLLOWING and self._leader is not None and now >= self._follow_end:
            self._abandon(self._leader.peer, "it did not begin in time")
        elif self._leader is not None:
            self._look_at_expected()
            if self._silent(self._leader.peer, False):
                self._abandon(self._leader.peer, "it is silent")

    def _look_at_expected(self) -> None:
        """Look at the other followers: if our leader is silent, the next one is not to wait for silent ones as well."""
        expected = (self._expected() if self._expected is not None else None) or frozenset()
        if len(expected) <= LOOKED_AT:
            for peer in expected - {self._me, self.leader}:
                self._silent(peer, True)

    def _abandon(self, peer: PeerID, reason: str) -> None:
        """Leave the one that we ask or follow."""
        self._out.append(StopAsking(peer))
        self._lost(peer, reason)

    def _lost(self, peer: PeerID, reason: str) -> None:
        self._memory.lose(peer, self._expiration_of(peer))
        self._lost_now.add(peer)
        self._trouble = (f"the peer that was to lead is gone: {reason}", (peer,))
        self._look_again()

    def _look_again(self) -> None:
        self._phase, self._leader = Phase.LOOKING, None
        self._chain.clear()
        self._lookout.disappointed()

    def _expiration_of(self, peer: PeerID) -> float:
        known = self._declarers.expiration_of(peer)
        # A leader that is known from a redirection only is earlier than we are.
        return self._expiration if known is None else known

    @property
    def _follow_end(self) -> float:
        return self._window_end + self._rules.follow_grace_s

    # -------------------------------------------------------------------------------------------------- deciding

    def _done(self, now: float) -> list[Action]:
        self._decided_at = now
        if self._phase is Phase.LOOKING:
            self._decide(now)
        out, self._out = self._out, []
        return out

    def _decide(self, now: float) -> None:
        self._part_with_silent()
        if self._group.full or now >= self._window_end:
            self._conclude(now)
            return
        expected = self._expected_members()
        if self._group.can_start and expected is not None and expected <= self._followers.keys():
            self._start()
            return
        self._out += self._lookout.declare(self._expiration, now)
        earlier = self._declarers.earlier(self.key if self._rules.leads else None, self._followers, now)
        leader = self._whom_to_ask(earlier, now)
        may_start = self._group.can_start and not earlier and expected is None
        if leader is not None and not self._lookout.outdated(now):
            self._ask(leader.contact)
        elif (unseen := self._unseen(expected or frozenset(), now)) is not None:
            self._asked_unseen_at = now
            self._asked_unseen.append(unseen.peer)
            self._ask(unseen)
        elif may_start and self._lookout.all_joined(self._followers, now, lambda peer: self._silent(peer, False)):
            self._start()
        else:
            self._out += self._lookout.nudge(self.key, self._followers, now)
            self._out += self._lookout.read(self._followers, now)

    def _part_with_silent(self) -> None:
        """Send away followers that fell silent while others were waited for: the round would wait for them, too."""
        if self._expected is None or len(self._followers) > LOOKED_AT:
            return
        for peer in [peer for peer in self._followers if self._silent(peer, True)]:
            del self._followers[peer]
            self._out.append(Refuse(peer, "not-looking", "it gave no sign of life while the group formed"))

    def _whom_to_ask(self, earlier: Sequence[Declaration], now: float) -> Declaration | None:
        """The peer among these that should lead us; None if there is none, or if we should rather lead.

        All ask the earliest one, unless there is a crowd. With several full groups before us we split by our order:
        every `full_size`-th peer leads those after it. Otherwise the groups would fill one after another.
        """
        full = self._rules.full_size
        first = len(earlier) // full * full
        if first < _CROWD_GROUPS * full:
            return earlier[0] if earlier else None
        if first < len(earlier):
            return earlier[first]
        # We are such a leader. If nobody has come for a while, the others do not see us as one: then ask the peer
        # before us.
        return None if self._rules.leads and self._lookout.awaits_followers(now) else earlier[-1]

    def _expected_members(self) -> frozenset[PeerID] | None:
        """The peers that are expected to join and not known to be gone; None if none, or if not known."""
        expected = self._expected() if self._expected is not None else None
        if expected is None:
            return None
        return frozenset(p for p in expected - {self._me} if p in self._followers or not self._gone(p)) or None

    def _unseen(self, expected: frozenset[PeerID], now: float) -> Contact | None:
        """An expected peer to ask, as none has come here or stands in the directory: lying nodes there may hide them.

        Whatever it says shows the way: it leads, sends us to its leader, or has heard of us now and comes here.
        """
        due = max(self._lookout.declared_at, self._asked_unseen_at) + self._rules.settle_max_s
        if now < due or not expected or self._followers:
            return None
        if any(each.peer in expected for each in self._declarers.earlier(None, (), now)):
            return None
        able = [peer for peer in expected if not self._declarers.set_aside(peer, now)]
        able.sort(key=lambda peer: (self._asked_unseen.count(peer), peer < self._me, peer))
        return next((contact for contact in map(self._contact_of, able) if contact.addresses), None)

    def _gone(self, peer: PeerID) -> bool:
        """Return whether an expected peer is not waited for. One that was lost before this search may be here again."""
        return peer in self._lost_now or self._silent(peer, True)

    def _start(self) -> None:
        self._phase = Phase.OVER
        self._out.append(Start(tuple(self._followers)))
        self._out += self._lookout.withdraw()

    def _new_window(self, now: float) -> None:
        self._window_end = min(now + self._rules.window_s, self._end)
        # Later than our last expiration: others were told between two searches that the last one is over.
        last, self._expiration = self._memory.declared, self._window_end + self._declarers.wall_offset_s
        if self._memory.led:
            self._expiration -= min(_HEAD_START_S, self._rules.window_s / 10)
        if 0 <= last - self._expiration < self._rules.window_s:  # a larger gap means that the clock was set back
            self._expiration = last + _LATER_S
        self._memory.declared = self._expiration
        self._lookout.renew()

    def _conclude(self, now: float) -> None:
        """The group is full, or the window ended."""
        too_few = self._group.why_not()
        waited = self._waited(now)
        if self._group.can_start:
            self._start()
        elif self._group.enough and not self._group.reduces:
            self._fail("nobody in the group can reduce: all are clients or have bandwidth 0", tuple(self._followers))
        elif self._mismatches and not self._met:
            peers = tuple(self._mismatches)
            self._fail(self._mismatches[peers[0]], peers, mismatch=True)
        elif now < self._end:
            if self._followers:
                self._trouble = (too_few, ())
            self._out += [Refuse(peer, "too-few", too_few) for peer in self._followers]
            self._followers.clear()
            self._new_window(now)
            self._lookout.disappointed()
            self._decide(now)
        elif self._followers:
            self._fail(f"{waited}: {too_few}", ())
        else:
            self._fail(f"{waited}: {self._trouble[0]}", self._trouble[1])

    def _waited(self, now: float) -> str:
        return f"no group within {now - self._started_at:.1f} s"

    def _fail(self, reason: str, peers: tuple[PeerID, ...], *, mismatch: bool = False) -> None:
        self._give_up(reason)
        self._out.append(Fail(reason, peers, mismatch))

    def _give_up(self, reason: str) -> None:
        if self._leader is not None:
            self._out.append(StopAsking(self._leader.peer))
        code = "not-looking" if self._group.reduces else "no-reducer"
        self._out += [Refuse(peer, code, f"the leader gave up: {reason}") for peer in self._followers]
        self._followers.clear()
        self._phase, self._leader = Phase.OVER, None
        self._out += self._lookout.withdraw()
