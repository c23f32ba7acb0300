"""What a peer makes of those that lead its groups (decisions 0085, 0131, 0132). Sans-IO.

`LeaderMemory` is kept from one search to the next; `Leaders` belongs to one search. A leader is

- *shunned*: it has led badly or kept rounds waiting (`Conduct`), or was followed in this search for long and began no
  group. It leads us no more.
- *avoided*: others come to other groups, and not to its own, or it failed this peer again and again. That proves
  nothing. So it is followed all the same where nobody follows us, or where others send us there.
- *on trial*: others were missing in its groups, or late. Another peer leads the next group, neither the leader nor one
  of the missing peers. If these come there, the leader is avoided.

A search tells `Leaders` what happens, and asks it few questions: does a peer lead us, which ones are expected still,
how early do we declare ourselves? A leader has *failed* us if we relied on it in a search, and are not in its group.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.averaging.matchmaking.config import MatchmakingConfig
from shoal.averaging.matchmaking.expected import Expected
from shoal.base.bounded import put_last
from shoal.base.ledger import WORTH_S, Ledger
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Contact

__all__ = ["LeaderMemory", "Leaders"]

_PASSING_CODES = frozenset({"later", "not-looking", "started", "replaced"})
"""Refusals that come from any peer that is not asked in the right moment."""

_STRANDED = 1.25
"""Twice of three times. Once may be chance: the peer came when the group had begun."""

_AVOIDED_WINDOWS, _MOST_AVOIDED_WINDOWS = 10, 64
"""Whoever leads groups to which others do not come leads none for so long: at first, and at most. It harms nobody."""

_NOW_AND_THEN = 0.25
"""Once of the last three times. If others were missing in the other two, their leader may choose whom it leaves out."""

_EXCUSED_ROUNDS = 8, 128
"""Whoever is missing under all leaders is missed no more for so many rounds: at first, and at most."""

_FORGOTTEN, _MAX_STRANDED = 0.1, 64


@dataclass(slots=True)
class LeaderMemory:
    """What a peer remembers of those that led its groups, from one search to the next. Bounded.

    Attributes:
        last: the leader of the last group that waited for all expected peers; None if there is none.
        led: whether that was this peer.
        stranded: peers that we expected, or sent on to our leader, and that were not in its group: how often lately.
            Each time adds one, and each group halves it.
        avoided: the leaders that are to lead no group of ours, as others come to other groups and not to theirs, and
            until when (loop time).
        vain_s: the leaders that we have followed lately while half of the others did not, and for how long (seconds).
        vain: the leaders that we have relied on lately in vain: how often. As with `stranded`.
        windows: for how many windows each leader was avoided last.
        awaited: the live peers that should have been in the group that our leader has begun.
        on_trial: the leader of groups in which others were missing, while another one is to lead; None: nobody.
        there: how many members of the last group were there in time.
        rounds: the number of rounds of these groups.
        excused: the peers that were missing under one leader after another: for some rounds nobody misses them.
        idled: the leaders that we followed for half of a window or longer in the last search, and that began no group
            although there were enough peers, as far as we know: they led us no more in that search.
        turned_away: the peers that did not take us in the last search, as their groups were full, and fewer peers are
            here than that.
    """

    last: Contact | None = None
    led: bool = False
    stranded: dict[PeerID, float] = field(default_factory=dict)
    avoided: dict[PeerID, float] = field(default_factory=dict)
    vain_s: dict[PeerID, float] = field(default_factory=dict)
    vain: dict[PeerID, float] = field(default_factory=dict)
    windows: dict[PeerID, int] = field(default_factory=dict)
    awaited: frozenset[PeerID] = frozenset()
    on_trial: PeerID | None = None
    there: int = 0
    rounds: int = 0
    excused: Ledger[PeerID] = field(default_factory=lambda: Ledger[PeerID](*_EXCUSED_ROUNDS))
    idled: list[PeerID] = field(default_factory=list)
    turned_away: set[PeerID] = field(default_factory=set)

    def begin_search(self) -> frozenset[PeerID]:
        """A search begins. Is the last leader on trial? Then these were missing in its groups; else nobody."""
        self.idled, self.turned_away, self.on_trial = [], set(), None
        missed = frozenset[PeerID]() if self.last is None else self.missed(self.last.peer)
        if self.last is not None and missed:
            self.on_trial = self.last.peer
        return missed

    def take_failures(self) -> tuple[list[PeerID], set[PeerID]]:
        """The peers that failed us in the last search, once: `idled` and `turned_away`."""
        failures = self.idled, self.turned_away
        self.idled, self.turned_away = [], set()
        return failures

    def missed(self, leader: PeerID) -> frozenset[PeerID]:
        """The peers that were in few of the last groups, and should have been: they may not reach this leader."""
        enough, times = self._enough(leader), {peer: n for peer, n in self.stranded.items() if peer != leader}
        in_turns = sum(times.values()) >= max(enough, len(self.awaited) / 2)
        return frozenset(peer for peer, n in times.items() if n >= (_NOW_AND_THEN if in_turns else enough))

    def _enough(self, leader: PeerID) -> float:
        """From how many times on others are to lead: one that was avoided before has had its chance."""
        return 1.0 if leader in self.windows else _STRANDED

    def avoid(self, leader: PeerID, now: float, window_s: float, members: int) -> None:
        """Groups like one of so many members have another leader for a while, each time for twice as long.

        Half of the members lead in any case: else a peer that stays away from the groups of all others, one leader
        after another, would leave none that leads.
        """
        windows = self.windows.get(leader, 0)
        if self.avoided.get(leader, -math.inf) <= now:
            windows = min(2 * windows, _MOST_AVOIDED_WINDOWS) or _AVOIDED_WINDOWS
        put_last(self.windows, leader, windows, _MAX_STRANDED)
        put_last(self.avoided, leader, now + windows * window_s, max(1, members // 2))

    def played(self, leader: PeerID | None, there: Collection[PeerID]) -> PeerID | None:
        """A round of the last group is over (`leader` None: we led it). These were there, by what came here from them.

        What a leader says of its members is no proof: it may name one that it has told nothing, or too late.

        Returns:
            Another leader, in whose groups some were missing that are there now; None: there is none.
        """
        tried, before, self.on_trial, self.there = self.on_trial, self.there, None, len(there)
        self.rounds += 1
        for peer in there:
            self.excused.forgive(peer)
        if tried is None and leader is not None:
            missing = self.awaited.difference(there, self.excused.pausing(self.rounds))
            for peer in {*self.stranded, *missing}:
                _count(self.stranded, peer, again=peer in missing)
            return None
        missed = self.missed(tried) if tried is not None else frozenset[PeerID]()
        self.trial_ended(missed.difference(there))
        # Whoever leads is in its own group: that says nothing about others. And nobody gains by a smaller group.
        better = len(there) >= before and missed.intersection(there) - {leader}
        return tried if better and tried != leader else None

    def trial_ended(self, missed: Collection[PeerID]) -> None:
        """These did not come where another peer led, either: after the second time nobody misses them for a while."""
        self.stranded.clear()
        for peer in missed:
            self.excused.failed(peer, self.rounds)

    def relied(self, leaders: Collection[PeerID], in_vain: Collection[PeerID]) -> list[PeerID]:
        """We have relied on these leaders, on some in vain; returns those that failed us twice of three times."""
        for leader in leaders:
            _count(self.vain, leader, again=leader in in_vain)
        return [leader for leader in in_vain if self.vain.get(leader, 0.0) >= self._enough(leader)]

    def followed_in_vain(self, leader: PeerID, seconds: float) -> float:
        """Note that we have followed this leader while half of the others did not; returns for how long in all."""
        vain_s = self.vain_s.pop(leader, 0.0) + seconds
        put_last(self.vain_s, leader, vain_s, _MAX_STRANDED)
        return vain_s


def _count(times: dict[PeerID, float], peer: PeerID, *, again: bool) -> None:
    """Halve what was there before, and add one if it has happened again."""
    count = times.pop(peer, 0.0) / 2 + again
    if count > _FORGOTTEN:
        put_last(times, peer, count, _MAX_STRANDED)


class Leaders:
    """What one search makes of those that may lead it.

    Args:
        me: the searching peer.
        config: times and sizes.
        memory: what is kept between searches; changed in place. The search begins.
        expected: the peers that are expected to join.
        shunned: the peers that do not lead us.
        now: loop time, seconds.
    """

    def __init__(
        self,
        me: PeerID,
        config: MatchmakingConfig,
        memory: LeaderMemory,
        expected: Expected,
        *,
        shunned: Collection[PeerID],
        now: float,
    ) -> None:
        self._me, self._config, self._memory, self._expected = me, config, memory, expected
        self._shunned = set(shunned)
        self._avoided = {peer for peer, until in memory.avoided.items() if until > now}
        # Missing in the groups of a leader that is on trial: the two do not reach each other, or one of them is at
        # fault. Do the others come where another peer leads?
        self._missed = memory.begin_search()
        if memory.on_trial is not None:
            # Neither of the two leads: whoever leads is in its own group, and may keep the other one out.
            self._avoided |= {memory.on_trial, *self._missed}
        self._relied_on: set[PeerID] = set()  # the expected peers that we asked to lead us
        self._declined: set[PeerID] = set()  # they do not let us lead them
        self._sent_on: set[PeerID] = set()  # to the leader that we follow
        self._hoped_for: set[PeerID] = set()  # the expected peers, while we followed a leader
        self._followed_at = now

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def head_starts(self) -> int:
        """How many head starts we take: we must lead a peer that we shun, or it waits for us, and we wait for it."""
        return 2 * bool(self._shunned or self._avoided) + self._memory.led

    def shuns(self, peer: PeerID) -> bool:
        """Whether this peer does not lead us at all."""
        return peer in self._shunned

    def avoids(self, peer: PeerID) -> bool:
        """Whether this peer leads us only where others lead us to it, or nobody follows us."""
        return peer in self._avoided

    def doubts(self, peer: PeerID) -> bool:
        """Whether we shun or avoid this peer."""
        return peer in self._shunned or peer in self._avoided

    def at_once(self) -> Contact | None:
        """The leader of the last group if it is to lead this one: it searches now too, and to ask it saves a read."""
        last = self._memory.last
        fit = last is not None and last.peer not in self._avoided and last.peer in (self.expected() or ())
        return last if fit else None

    def expected(self) -> frozenset[PeerID] | None:
        """The peers that are expected to join and not known to be gone; None if none, or if not known.

        One that leads badly may come. It may also wait for us to follow it: see `may_be_on_its_way`.
        """
        expected = self._expected.peers()
        if expected is None:
            return None
        others = expected - self._shunned - (self._avoided - self._missed) - self._declined - {self._me}
        return self._expected.not_gone(others, among=len(expected)) or None

    def may_be_on_its_way(self, followers: Collection[PeerID], *, awaits: bool, joined_at: float, now: float) -> bool:
        """Whether an expected peer that leads badly may be about to join, as the others have only just come.

        It may be honest: it was frozen once, or cut off. It knows nothing of its fault, and is sent on to us. And those
        that its groups have lacked get some time to come to this one, though nobody expects them any more: else nothing
        would be known of either.

        Args:
            followers: the peers that have come.
            awaits: whether others may still be on their way to us.
            joined_at: when the last one came (loop time, seconds).
            now: loop time, seconds.
        """
        expected, awaited = self._expected.all(), set[PeerID]()
        if awaits:
            awaited |= expected & (self._shunned | self._avoided)
        if now < joined_at + WORTH_S:
            awaited |= self._missed
        awaited -= {*self._declined, self._me, *followers}
        return bool(self._expected.not_gone(frozenset(awaited), among=len(expected)))

    # ---------------------------------------------------------------------------------------------- what happens

    def accepted(self, leader: PeerID, sent_on: Collection[PeerID], now: float) -> None:
        """This leader accepted us; our followers were sent on to it."""
        self._followed_at, self._sent_on = now, set(sent_on)
        self._relied_on.add(leader)

    def sent_on(self, peer: PeerID) -> None:
        """We sent a peer that asked us on to our leader."""
        self._sent_on.add(peer)

    def look_at_others(self, leader: PeerID) -> None:
        """Look at the other followers: if our leader is silent, the next one is not to wait for silent ones as well."""
        self._hoped_for |= self._expected.look_at_others({self._me, leader})

    def refused(self, peer: PeerID, code: str) -> None:
        """A peer that we asked to lead us refused."""
        expected = self._expected.all()
        if code == "full" and peer in expected and len(expected) < self._config.full_size:
            sometimes("a leader says that its group is full, and there are too few peers for that")
            self._memory.turned_away.add(peer)
        if code == "declined":
            self._declined.add(peer)
        if code not in _PASSING_CODES:
            self._relied_on.add(peer)

    def redirected(self, peer: PeerID, leader: PeerID | None) -> None:
        """A peer that we asked sent us on to this leader, which we ask; None: we do not."""
        self._relied_on.discard(peer)
        if leader is not None:
            self._relied_on.add(leader)  # others follow it

    def declined(self, peer: PeerID) -> None:
        """This peer does not let us lead it."""
        self._declined.add(peer)

    def lost(self, leader: PeerID) -> None:
        """The peer that we asked or followed, or were about to ask, is silent or lost."""
        self._relied_on.add(leader)

    def left(self, leader: PeerID, now: float) -> bool:
        """We follow this leader no more. If we did for long, and it began no group, we shun it; returns whether.

        It would have us wait again.
        """
        if now < self._followed_at + self._config.window_s / 2:
            return False
        sometimes("a leader was followed for long, and began no group")
        self._shunned.add(leader)
        self._memory.idled.append(leader)
        return True

    def most_stay(self, followers: Collection[PeerID]) -> None:
        """Only these come. If they are fewer than came to the leader on trial, the others stay with it: so do we."""
        memory = self._memory
        if memory.on_trial is None or 1 + len(followers) >= memory.there:
            return
        sometimes("a leader is on trial, and most others stay with it")
        self._avoided -= {memory.on_trial, *self._missed} - memory.avoided.keys()
        memory.trial_ended(self._missed.difference(followers))
        memory.on_trial, self._missed = None, frozenset()

    def begun(self, leader: PeerID, members: Collection[PeerID], now: float) -> None:
        """Our leader began a group of these members: the search is over."""
        expected = self._expected.all()  # those that we avoid, too: they are to be members
        expected = self._expected.not_gone(expected - self._declined - {self._me}, among=len(expected))
        self._memory.awaited = expected.union(members, self._sent_on) - self._shunned - {self._me, leader}
        self._followed_alone(leader, members, now)
        self._relied_on.discard(leader)
        self.ended(members, now)

    def gave_up(self, leader: PeerID | None, followers: Collection[PeerID], now: float) -> None:
        """The search is over without a group, while we followed this leader, or these followed us."""
        if self._memory.on_trial is not None:
            self._memory.trial_ended(self._missed.difference(followers))
        if leader is not None:
            self._relied_on.add(leader)
        self.ended((), now)
        if leader is not None:
            self._followed_alone(leader, (), now)

    def ended(self, members: Collection[PeerID], now: float) -> None:
        """The search is over: those that we asked to lead us, and that are not in our group, have failed us.

        Args:
            members: of the group; nobody if there is none.
            now: loop time, seconds.
        """
        in_vain = self._relied_on.difference(members)
        for leader in self._memory.relied(self._relied_on, in_vain):
            sometimes("a peer avoids a leader that fails it again and again")
            self._memory.avoid(leader, now, self._config.window_s, len(self._expected.all()) + 1)

    def _followed_alone(self, leader: PeerID, members: Collection[PeerID], now: float) -> None:
        """Was this leader followed for long, and did half of the others not come to its group of these members?

        It may have lied to them alone. That proves nothing, so it is avoided. Whoever shuns a peer knows why others do
        not come.
        """
        hoped_for = frozenset(self._hoped_for - {self._me, leader} - self._shunned - self._avoided)
        hoped_for = self._expected.not_gone(hoped_for, among=len(self._hoped_for))
        came = 1 + len(hoped_for.intersection(members))
        if 2 * came > 1 + len(hoped_for):
            self._memory.vain_s.pop(leader, None)
        elif self._memory.followed_in_vain(leader, now - self._followed_at) >= self._config.window_s / 2:
            sometimes("a peer avoids a leader to which half of the others do not come")
            self._memory.avoid(leader, now, self._config.window_s, len(hoped_for) + 2)
