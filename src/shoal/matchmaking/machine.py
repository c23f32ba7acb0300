"""How a group forms, as a state machine. Sans-IO: events in, actions out, time and knowledge handed in.

Every peer that can lead declares itself in a directory with an expiration and then reads it. Peers are ordered by their
*key* (expiration, peer id). A peer asks the earliest declared peer before itself to lead. Whoever finds none before
itself leads those that ask it, until the group is full or everyone who is there has joined.

::

              nobody earlier: lead                 group full / all joined / window ends
            ┌──────────────┐                     ┌─────────────────────────────────────> Start
            │              v                     │
    Declare └───────── LOOKING ──────────────────┴─────> Fail   (last window ended, too few)
                        │    ^
          ask the       │    │ refused, lost, silent: ask the next one
          earliest      v    │
                       ASKING ──── accepted: send own followers to the leader ───> FOLLOWING ───> Begin
                         ^                                                            │
                         └──────────────── redirected: ask that one ──────────────────┤
                       LOOKING <────────── leader lost, refuses, silent ──────────────┘

*No cycles.* A peer accepts only while it follows nobody, and only an asker whose key, told in its `Join`, is later than
its own (or a client, which nobody follows). A key changes only in LOOKING with no followers (they are dismissed first)
and with no answer outstanding. So each follower that a leader counts has a later key than the leader has, and along a
chain of followers keys strictly decrease: it cannot return to where it began. A follower that was dismissed and does
not know it yet is counted by nobody; it learns so when the message arrives, when the stream ends, or when its former
leader asks it.

*One group at a time.* Start is only said in LOOKING, that is while following and asking nobody; Begin is only taken
from the leader that is followed. Whoever left a leader without the leader knowing is in its `Begin` nevertheless, and is
a dead member to that round: `Begin` is final with its first copy. So no two groups ever count on one peer's work, and
no clock is trusted for it: expirations decide who leads and how long somebody waits, never who is in a group.

*When a leader starts* a group that is not full: a read of the directory *begun* after the last join, and after a quiet
time, shows no live declarer who has not joined. As every peer declares before it looks, whoever is not in that read came
too late. The quiet time is short if everyone of the last group is there, long if somebody of it is missing, and
follows the gaps between joins where there is no last group of this kind. A declarer that does not come is *nudged*: asked
to join, which it refuses, being later, but so it learns of the leader, and the leader of whether it is alive.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

from shoal.matchmaking.declarers import Declarers
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
    Declare,
    Declared,
    DirectoryFailed,
    DirectoryRead,
    Event,
    Fail,
    JoinAsked,
    JoinGone,
    Memory,
    Mismatched,
    Nudge,
    Nudged,
    PeerGone,
    ReadDirectory,
    Redirect,
    Refuse,
    Rules,
    Start,
    StopAsking,
    Tick,
    Withdraw,
)
from shoal.peer import PeerID
from shoal.wire import Contact

__all__ = ["GroupMachine", "Phase"]

MISMATCH_CODES = frozenset({"schema", "settings"})
"""Refusals that say: we can never be in one group."""

_MAX_HOPS = 6
_MAX_NUDGES = 4
_POLL_MAX_S = 1.0
_EXPECTED_POLL_S = 0.1
_DECLARE_AGAIN_S = 0.5
# A quiet time of 8 mean gaps: of 16 peers that come evenly spread at random, 99 times in 100 no gap is longer.
_GAPS_WAITED = 8.0
_PRIOR_GAPS = 2


class Phase(enum.Enum):
    """Where a search stands."""

    LOOKING = enum.auto()
    """Follows and asks nobody; leads whoever asks."""
    ASKING = enum.auto()
    """Has asked somebody to lead; still leads whoever asks, but does not start."""
    FOLLOWING = enum.auto()
    """Waits for its leader's Begin."""
    OVER = enum.auto()
    """Started, begun, failed or cancelled."""


class GroupMachine:
    """One search for a group.

    Args:
        me: this peer.
        rules: sizes and times.
        memory: what is kept between searches; changed in place.
        now: loop time, seconds.
        wall_offset_s: wall clock minus loop time, seconds; only used to write and read expirations.
        expected: who is expected to join, None if not known. Asked often; the group starts as soon as all of them that
            are alive have joined, and otherwise waits for them to the end of the window.
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
    ) -> None:
        self._me, self._rules, self._memory, self._expected = me, rules, memory, expected
        self._wall_offset_s = wall_offset_s
        self._declarers = Declarers(me, rules, memory, wall_offset_s=wall_offset_s)
        self._out: list[Action] = []
        self._phase = Phase.LOOKING
        self._started_at = self._last_join = self._decided_at = now
        self._end = now + max(rules.window_s, rules.deadline_s or 0.0)
        self._window_end = now
        self._expiration = math.inf

        self._listed = self._declaring = False
        self._declared_at = now
        self._declare_again_at = math.inf

        self._reading = False
        self._read_begun = -math.inf
        self._last_read = -math.inf
        self._poll_s = rules.settle_s
        self._stale = False

        self._leader: Contact | None = None
        self._chain: set[PeerID] = set()
        self._followers: dict[PeerID, bool] = {}
        self._gaps: list[float] = []
        self._nudged: dict[PeerID, float] = {}
        self._nudges = 0

        self._met = False
        self._mismatches: dict[PeerID, str] = {}
        self._trouble: tuple[str, tuple[PeerID, ...]] | None = None
        self._windows = 0

    # --------------------------------------------------------------------------------------------------- outside

    @property
    def phase(self) -> Phase:
        """Where the search stands."""
        return self._phase

    @property
    def followers(self) -> tuple[PeerID, ...]:
        """Who was accepted and has neither left nor been sent away."""
        return tuple(self._followers)

    @property
    def leader(self) -> PeerID | None:
        """Who is followed, or asked; None in LOOKING."""
        return self._leader.peer if self._leader else None

    @property
    def expiration(self) -> float:
        """Our own expiration (wall clock, seconds)."""
        return self._expiration

    def start(self, now: float) -> list[Action]:
        """Begin the search; call it once, before `handle`."""
        self._new_window(now)
        return self._done(now)

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do upon `event`. After the search is over: nothing, but joins are refused."""
        if self._phase is Phase.OVER:
            if isinstance(event, JoinAsked):
                return [Refuse(event.contact.peer, "not-looking", "not looking for a group now")]
            return []
        match event:
            case Declared():
                self._on_declared(event, now)
            case DirectoryRead(declarations):
                self._memory.read_s = now - self._read_begun
                self._declarers.read(declarations, now)
                self._last_read, self._reading, self._stale = self._read_begun, False, False
            case DirectoryFailed(error):
                self._trouble = (f"could not read who is there: {error}", ())
                self._reading = False
            case JoinAsked():
                self._on_join(event, now)
            case JoinGone(peer):
                self._followers.pop(peer, None)
            case Mismatched(peer, text):
                self._mismatch(peer, text)
            case AskAccepted() | AskRefused() | AskRedirected() | AskLost() | BeginReceived():
                if self._leader is not None and event.peer == self._leader.peer:
                    self._on_answer(event, now)
            case Nudged():
                self._on_nudged(event)
            case PeerGone(peer):
                self._followers.pop(peer, None)
                if self.leader == peer:
                    self._abandon(now, "its connection is lost")
            case Tick():
                if self._phase is Phase.FOLLOWING and now >= self._follow_end:
                    self._abandon(now, "it did not begin in time")
            case Cancel():
                self._give_up("its search was cancelled")
        return self._done(now)

    def deadline(self) -> float | None:
        """When to call with `Tick` if nothing happens before (loop time, seconds); None: not needed."""
        if self._phase is Phase.FOLLOWING:
            return self._follow_end
        if self._phase is not Phase.LOOKING:
            return None  # an answer comes in bounded time
        due = [self._window_end, self._declare_again_at, self._declarers.next_change(self._decided_at)]
        if not self._reading:
            due.append(self._next_read())
        if self._nudges < _MAX_NUDGES:
            due += [at for _, at in self._to_nudge(self._decided_at)]
        if self._expected is not None:
            due.append(self._decided_at + _EXPECTED_POLL_S)
        return min(due)

    # ---------------------------------------------------------------------------------------------------- events

    def _on_declared(self, event: Declared, now: float) -> None:
        if not self._declaring:
            return
        self._declaring, self._declared_at = False, now
        if event.error is not None:
            self._declare_again_at = now + _DECLARE_AGAIN_S
            self._trouble = (f"could not declare: {event.error}", ())

    def _on_join(self, event: JoinAsked, now: float) -> None:
        peer = event.contact.peer
        asker = Declaration(event.contact, event.expiration)
        self._met = True
        self._declarers.hear(asker)
        if self._phase is Phase.FOLLOWING and self.leader == peer:
            self._out.append(StopAsking(peer))  # it asks: so it leads us no more, and the message is on its way
            self._look_again()
        if self._phase is Phase.FOLLOWING:
            assert self._leader is not None
            self._out.append(Redirect(peer, self._leader))
        elif not self._rules.leads:
            self._out.append(Refuse(peer, "not-looking", "a client does not lead"))
        elif event.contact.addresses and asker.key < self._key:
            self._followers.pop(peer, None)
            self._out.append(Refuse(peer, "later", "you are earlier: lead me"))
        elif self._size >= self._rules.full_size and peer not in self._followers:
            self._out.append(Refuse(peer, "full", f"the group has its {self._rules.full_size} members"))
        else:
            if peer not in self._followers:
                self._gaps.append(now - self._last_join)
                self._last_join = now
                self._poll_s = self._rules.settle_s
            self._followers[peer] = event.reduces
            self._out.append(Accept(peer))

    def _on_answer(
        self, event: AskAccepted | AskRefused | AskRedirected | AskLost | BeginReceived, now: float
    ) -> None:
        match event:
            case AskAccepted() if self._phase is Phase.ASKING:
                self._follow()
            case AskAccepted():
                pass  # said twice
            case BeginReceived() if self._phase is Phase.FOLLOWING:
                self._phase = Phase.OVER
            case BeginReceived(peer):
                self._out.append(StopAsking(peer))
                self._lost(peer, "it began a group that we are not in")
            case AskRefused(peer, code, text):
                self._on_refused(peer, code, text, now)
            case AskRedirected(peer, leader):
                self._on_redirected(peer, leader, now)
            case AskLost(peer, reason):
                self._lost(peer, reason)

    def _on_refused(self, peer: PeerID, code: str, text: str, now: float) -> None:
        self._trouble = (f"refused by the peer that was asked to lead: {text or code}", (peer,))
        if code in MISMATCH_CODES:
            self._mismatch(peer, text)
        else:
            self._met = True
            if code in {"later", "full"}:  # it will ask us; or it may yet have room
                self._declarers.pause(peer, now + self._rules.settle_max_s)
            else:
                self._declarers.spend(peer, self._expiration_of(peer))
        self._look_again()

    def _on_redirected(self, peer: PeerID, leader: Contact, now: float) -> None:
        self._met = True
        unfit = leader.peer in self._chain or leader.peer == self._me or leader.peer in self._followers
        if unfit or len(self._chain) >= _MAX_HOPS or self._declarers.is_lost(leader.peer):
            # One of us knows less than the other; that mends itself.
            self._trouble = ("redirected in a circle, or to a peer that is gone", (peer, leader.peer))
            self._declarers.pause(peer, now + 2 * self._rules.settle_s)
            self._look_again()
        else:
            self._ask(leader)

    def _on_nudged(self, event: Nudged) -> None:
        self._nudges -= 1
        expiration = self._nudged[event.peer]
        if event.code in MISMATCH_CODES:
            self._mismatch(event.peer, event.text)
        elif event.code == "lost":
            self._memory.lose(event.peer, expiration)
        else:
            self._met = True
            if event.code != "later":
                self._declarers.spend(event.peer, expiration)

    def _mismatch(self, peer: PeerID, text: str) -> None:
        self._declarers.spend(peer, math.inf)
        if len(self._mismatches) < _MAX_HOPS:
            self._mismatches[peer] = text

    # ------------------------------------------------------------------------------------------ asking, following

    def _ask(self, contact: Contact) -> None:
        self._phase, self._leader = Phase.ASKING, contact
        self._chain.add(contact.peer)
        self._out.append(Ask(contact, self._expiration))

    def _follow(self) -> None:
        assert self._leader is not None
        self._phase, self._met = Phase.FOLLOWING, True
        self._out += [Redirect(peer, self._leader) for peer in self._followers]
        self._followers.clear()
        self._withdraw()

    def _abandon(self, now: float, reason: str) -> None:
        """Leave the one that we ask or follow."""
        assert self._leader is not None
        peer = self._leader.peer
        self._out.append(StopAsking(peer))
        self._lost(peer, reason)

    def _lost(self, peer: PeerID, reason: str) -> None:
        self._memory.lose(peer, self._expiration_of(peer))
        self._trouble = (f"the peer that was to lead is gone: {reason}", (peer,))
        self._look_again()

    def _look_again(self) -> None:
        self._phase, self._leader = Phase.LOOKING, None
        self._chain.clear()
        self._stale = True
        self._poll_s = self._rules.settle_s
        self._declare()

    def _expiration_of(self, peer: PeerID) -> float:
        known = self._declarers.expiration_of(peer)
        # A leader that we know only from a redirection is earlier than us.
        return self._expiration if known is None else known

    @property
    def _key(self) -> tuple[float, PeerID]:
        return self._expiration, self._me

    @property
    def _size(self) -> int:
        return 1 + len(self._followers)

    @property
    def _follow_end(self) -> float:
        return self._window_end + self._rules.follow_grace_s

    # ------------------------------------------------------------------------------------------------- directory

    def _new_window(self, now: float) -> None:
        self._windows += 1
        self._window_end = min(now + self._rules.window_s, self._end)
        self._expiration = self._window_end + self._wall_offset_s
        self._listed = False
        self._poll_s = self._rules.settle_s
        self._declare()

    def _declare(self) -> None:
        if self._rules.leads and not self._listed:
            self._listed = self._declaring = True
            self._declare_again_at = math.inf
            self._out.append(Declare(self._expiration))

    def _withdraw(self) -> None:
        if self._listed:
            self._listed = self._declaring = False
            self._declare_again_at = math.inf
            self._out.append(Withdraw())

    def _next_read(self) -> float:
        """When the directory is to be read next, as far as is known now."""
        if self._read_begun == -math.inf or self._stale:
            return self._decided_at
        if self._declaring:
            return math.inf  # whoever looks only then would miss those that declare at the same time
        if self._read_begun < self._declared_at:
            return self._declared_at
        if self._followers and self._read_begun < (settled := self._last_join + self._settle_s()):
            return settled
        return self._read_begun + self._poll_s

    def _read(self, now: float) -> None:
        if not self._reading and now >= self._next_read():
            if self._read_begun >= max(self._declared_at, self._last_join):
                self._poll_s = min(2 * self._poll_s, _POLL_MAX_S)
            self._reading, self._read_begun = True, now
            self._out.append(ReadDirectory())

    def _to_nudge(self, now: float) -> list[tuple[Declaration, float]]:
        """Who is to be nudged, and when."""
        if not self._rules.leads:
            return []
        quiet_s = self._settle_s()
        return [
            (each, self._declarers.seen_at(each.peer) + quiet_s)
            for each in self._declarers.unjoined(self._followers, now)
            if each.key > self._key and each.contact.addresses and self._nudged.get(each.peer) != each.expiration
        ]

    # ------------------------------------------------------------------------------------------------- deciding

    def _done(self, now: float) -> list[Action]:
        self._decided_at = now
        if self._phase is Phase.LOOKING:
            self._decide(now)
        out, self._out = self._out, []
        return out

    def _decide(self, now: float) -> None:
        if self._size >= self._rules.full_size or now >= self._window_end:
            self._conclude(now)
            return
        expected = self._expected_members()
        if expected is not None and expected <= self._followers.keys() and self._can_start:
            self._start()
            return
        earlier = self._declarers.earliest(self._key if self._rules.leads else None, self._followers, now)
        if earlier is not None and not self._outdated(now):
            self._chain.clear()
            self._ask(earlier.contact)
            return
        if expected is None and earlier is None and self._can_start and self._all_joined(now):
            self._start()
            return
        if now >= self._declare_again_at:
            self._listed = False
            self._declare()
        for each, at in self._to_nudge(now):
            if at <= now and self._nudges < _MAX_NUDGES:
                self._nudges += 1
                self._nudged[each.peer] = each.expiration
                self._out.append(Nudge(each.contact, self._expiration))
        self._read(now)

    def _outdated(self, now: float) -> bool:
        """Whether the last read is too old to go by, after an answer that it had not foretold."""
        return self._stale and now - self._last_read > 2 * self._rules.settle_s

    def _expected_members(self) -> frozenset[PeerID] | None:
        """Who is expected to join and is not known to be gone; None: not known."""
        expected = self._expected() if self._expected is not None else None
        others = (expected or frozenset()) - {self._me}
        if not others:
            return None
        return frozenset(peer for peer in others if peer in self._followers or not self._declarers.is_lost(peer))

    def _settle_s(self) -> float:
        """How long it must have been quiet after the last join."""
        rules, companions = self._rules, self._memory.companions - {self._me}
        missing = {peer for peer in companions if peer not in self._followers and not self._declarers.is_lost(peer)}
        if missing:
            quiet_s = rules.settle_max_s
        elif companions and self._followers.keys() <= companions:
            quiet_s = rules.settle_s
        else:
            prior_s = _PRIOR_GAPS * rules.settle_s / 2
            gap_s = (prior_s + sum(self._gaps)) / (_PRIOR_GAPS + len(self._gaps))
            quiet_s = min(max(_GAPS_WAITED * gap_s, rules.settle_s), rules.settle_max_s)
        # Whoever was sent here needs about as many round trips as a read does.
        return max(quiet_s, min(self._memory.read_s, 2 * rules.settle_max_s))

    def _all_joined(self, now: float) -> bool:
        if self._declaring or self._reading:
            return False
        settled = max(self._last_join, self._declared_at) + self._settle_s()
        return self._last_read >= settled and not self._declarers.unjoined(self._followers, now)

    @property
    def _reducible(self) -> bool:
        return self._rules.reduces or any(self._followers.values())

    @property
    def _can_start(self) -> bool:
        return self._rules.leads and self._size >= self._rules.min_size and self._reducible

    def _start(self) -> None:
        self._phase = Phase.OVER
        self._out.append(Start(tuple(self._followers)))
        self._withdraw()

    def _conclude(self, now: float) -> None:
        """The group is full, or the window ended."""
        if self._can_start:
            self._start()
        elif self._rules.leads and self._size >= self._rules.min_size:
            self._fail("nobody in the group can reduce: all are clients or have bandwidth 0", tuple(self._followers))
        elif self._mismatches and not self._met:
            peers = tuple(self._mismatches)
            self._fail(self._mismatches[peers[0]], peers, mismatch=True)
        elif now >= self._end:
            self._fail(*self._why(now))
        else:
            text = f"the window ended with {self._size} of at least {self._rules.min_size} peers"
            self._out += [Refuse(peer, "too-few", text) for peer in self._followers]
            self._followers.clear()
            self._new_window(now)
            self._stale = True
            self._decide(now)

    def _why(self, now: float) -> tuple[str, tuple[PeerID, ...]]:
        spent_s = now - self._started_at
        if self._followers:
            reason = f"the window ended with {self._size} of at least {self._rules.min_size} peers"
            return f"no group within {spent_s:.1f} s: {reason}", ()
        if self._trouble is not None:
            reason, peers = self._trouble
            return f"no group within {spent_s:.1f} s: {reason}", peers
        return f"no group within {spent_s:.1f} s: nobody else is looking for one", ()

    def _fail(self, reason: str, peers: tuple[PeerID, ...], *, mismatch: bool = False) -> None:
        self._give_up(reason)
        self._out.append(Fail(reason, peers, mismatch))

    def _give_up(self, reason: str) -> None:
        if self._leader is not None:
            self._out.append(StopAsking(self._leader.peer))
        code = "no-reducer" if not self._reducible else "not-looking"
        self._out += [Refuse(peer, code, f"the leader gave up: {reason}") for peer in self._followers]
        self._followers.clear()
        self._phase, self._leader = Phase.OVER, None
        self._withdraw()
