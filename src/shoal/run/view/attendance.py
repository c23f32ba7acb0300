"""Attendance: the stragglers of a search, so that rounds do not wait in vain again and again. Pure bookkeeping.

A peer may say that it is at our state and yet be in none of the groups: others cannot reach it, or it cannot find them.
Each round would wait a whole window for it. So once a peer has missed two rounds in a row, rounds do not wait for it
for four windows. Then one round waits for it again. After each further miss the pause is twice as long. The peer is in
a round again as soon as it comes to one.

A peer missed a round only if the round waited for it, for at least half of the time that it may take. Whether it is
still at our state when the group begins does not matter: it may have made a step alone meanwhile. A group may form
at once without an expected peer, because its leader has not heard yet that the peer is here. The peer comes to the next
round, if that waits for it. Once most peers are in the group it waits for the others no longer than an epoch takes:
nobody gives more than that by coming later.

Keys are free, so the time that is spent in vain is bounded for all peers together, by two budgets. One is for peers
that contributed to the last steps: two windows, and a tenth of the time after that. What rounds wait for slow members,
and what bad leaders cost, is paid from it, too. The other one is for *strangers*, that is all others: `_STRANGERS_S`,
and a fiftieth of the time after that. What the rounds themselves wait for strangers is paid from it, too. The time
itself counts. A liar that says that it is coming, and takes it back before that is a miss, pays like any other. A
newcomer that lives comes within a few round trips, as it was told of the round when it began, and so costs nothing. So
each search waits a moment for strangers even if nothing is left for them; a moment is free.

A peer beside which no other contributor is left holds up nobody else: it waits for strangers for two windows, and a
tenth of the time after that.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from shoal.averaging import Strangers
from shoal.averaging.allreduce.lateness import LEAST_S
from shoal.base.ledger import WORTH_S, Budget, Ledger
from shoal.base.peer import PeerID

__all__ = ["Attendance"]

_STRANGERS_S = 4.0
"""The time for which rounds wait in vain for all strangers together, seconds."""

_STRANGERS_PART, _KNOWN_PART = 0.02, 0.1
"""The share of the time that is added to `_STRANGERS_S`, and to the two windows for contributors."""


class _Awaited:
    """Whom a search waits for, and since when, at the expense of a budget.

    Args:
        budget: pays.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.begin()

    def begin(self) -> None:
        """A search begins."""
        self._awaited: set[PeerID] = set()
        self._since = math.inf

    def wait(self, peers: Collection[PeerID], now: float) -> None:
        """The search waits for these, among others."""
        if peers:
            self._awaited.update(peers)
            self._since = min(self._since, now)

    @property
    def patience_s(self) -> float:
        """The time that this search may wait."""
        return self.budget.left_s(self._since)

    def over(self, now: float, least_s: float = 0.0) -> bool:
        """Whether this search has waited for that, and for `least_s` at least."""
        return now > self._since + max(least_s, 0.0 if self.budget.is_spent(now) else self.patience_s)

    def formed(self, members: Collection[PeerID], now: float) -> set[PeerID]:
        """Pay for the time until now, but for a moment, if it was in vain; returns those that did not come."""
        if vain := self._awaited.difference(members):
            self.budget.pay(max(0.0, now - self._since - LEAST_S), now)
        self.begin()
        return vain


class Attendance:
    """Remembers which peers missed rounds.

    Args:
        window_s: how long a group waits for expected peers, seconds.
        idle: the peers that came to rounds and gave nothing: they are not waited for either while their pause lasts.

    Attributes:
        contributors: the peers that contributed to the last steps. All others are strangers, unless there are none.
        alone: no other contributor is there.
        patience_s: the longest wait of this search for the last ones, once most are there.
    """

    def __init__(self, window_s: float, idle: Ledger[PeerID] | None = None) -> None:
        self._window_s = window_s
        self._idle = idle or Ledger(4 * window_s, 64 * window_s)
        self.contributors: Collection[PeerID] = ()
        self.alone = False
        self.patience_s = window_s
        self._since: dict[PeerID, float] = {}
        self._missed = Ledger[PeerID](4 * window_s, 64 * window_s)
        self._known = _Awaited(Budget(2 * window_s, _KNOWN_PART))
        self._beside = _Awaited(Budget(_STRANGERS_S, _STRANGERS_PART))
        self._alone = _Awaited(Budget(2 * window_s, _KNOWN_PART))
        self._vain, self._next_told = 0, 1  # rounds that waited for strangers in vain

    @property
    def _strange(self) -> _Awaited:
        """The strangers that are waited for: beside other contributors, or beside us alone."""
        return self._alone if self.alone else self._beside

    @property
    def strangers(self) -> Strangers:
        """Who is a stranger now."""
        return Strangers(self.contributors, self._strange.budget, self._known.budget)

    def contributed(self, peers: Collection[PeerID], *, alone: bool) -> None:
        """These peers contributed to the last steps; `alone` if none of them is there but this one."""
        self.contributors, self.alone = peers, alone

    def search(self, patience_s: float = math.inf) -> None:
        """A search for a group begins. If most are there, it waits for the others for `patience_s` at most."""
        self._since, self.patience_s = {}, min(self._window_s, max(WORTH_S, patience_s))
        for awaited in (self._known, self._beside, self._alone):
            awaited.begin()

    def wait_for(self, expected: frozenset[PeerID], now: float) -> frozenset[PeerID]:
        """Wait for these others, as far as that is of use (`now`: local time, seconds); called often in a search.

        Returns:
            The peers among them that the group is to wait for now.
        """
        present = expected - self._gone(now)
        strangers = self.strangers.among(present)
        known = present - strangers
        self._strange.wait(strangers, now)
        self._known.wait(known, now)
        for peer in known:
            self._since.setdefault(peer, now)
        if self._strange.over(now, LEAST_S):
            strangers = frozenset()
        if self._known.over(now, WORTH_S):
            return strangers
        return strangers.union(peer for peer in known if now <= self._since[peer] + self._window_s)

    def absent(self, peers: Collection[PeerID], now: float) -> frozenset[PeerID]:
        """The peers among these that rounds no longer wait for."""
        gone = self._gone(now)
        late = gone.intersection(peers) if gone else gone  # of a thousand peers, each time
        return late | self.strangers.among(peers) if self._strange.budget.is_spent(now) else late

    def unawaited(self, peers: Collection[PeerID], now: float) -> frozenset[PeerID]:
        """Those among these that no search waits for now: they missed rounds or gave nothing, or they are strangers."""
        spent = self._strange.over(now) or self._strange.budget.is_spent(now)
        gone = self._gone(now).intersection(peers)
        return self.strangers.among(peers) | gone if spent else gone

    def idle(self, now: float) -> frozenset[PeerID]:
        """Those that kept rounds waiting, and on which nobody counts for a while."""
        return self._idle.pausing(now)

    def _gone(self, now: float) -> frozenset[PeerID]:
        return self._missed.pausing(now) | self._idle.pausing(now)

    def formed(
        self, members: Collection[PeerID], now: float, elsewhere: Collection[PeerID] = ()
    ) -> list[tuple[PeerID, int]]:
        """These peers made a round. Returns the peers that rounds no longer wait for, with the rounds they missed.

        Those that have met elsewhere meanwhile missed nothing: it is this peer that was not there.

        For strangers it is one of them, and the rounds are those that any of them missed.
        """
        patience_s, members = min(self.patience_s, max(WORTH_S, self._known.patience_s)), set(members)
        there = members.union(elsewhere)
        late = [peer for peer, since in self._since.items() if peer not in there and now >= since + patience_s / 2]
        for peer in members:
            self._missed.forgive(peer, now)
        newly_absent = [(peer, missed) for peer in sorted(late) if (missed := self._missed.failed(peer, now))]
        self._known.formed(members, now)
        if vain := self._strange.formed(members, now):
            self._vain += 1
            if self._strange.budget.is_spent(now) and self._vain >= self._next_told:
                self._next_told = 2 * self._vain  # it is told ever more rarely
                newly_absent.append((min(vain), self._vain))
        self.search()
        return newly_absent
