"""The companions of a peer: members of its last round that will soon be at its state. Pure bookkeeping.

The first peer that has an average takes it. It then has a new state, which the others have not named yet: a trainer is
in the middle of its batch, or a commit is still on its way. The others have the same average and will be here soon. So
the members of a round count as together until they name this state, or another one that the round did not begin from,
or die. Their samples count when they are here.

Until the swarm has the samples for its next step, waiting for companions costs nothing. From then on a peer waits for
them as long as an epoch takes (the time to collect the samples and to average), and at least `_LEAST_S`. Then it goes
on, and the late companion catches up. A companion that was late twice, and gave no samples in between, is not waited
for in the next two rounds, and in twice as many after each further time: so a trainer whose batches are too long does
not slow the swarm down for good. A place in a round does not forgive it: such a trainer is in some rounds, just after
it caught up, and has no samples in any. Absence does not forgive it either: such a trainer is in no round while nobody
waits for it.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.peer import PeerID
from shoal.progress import StateKey, SwarmView

__all__ = ["Companions"]

_LEAST_S = 0.5
"""Processes of a busy machine come this late, however short an epoch is."""

_FORGIVEN = 1
_MOST_SKIPPED = 64
_MAX_REMEMBERED = 1024


class Companions:
    """Remembers which peers were in the last round, and which of them came late."""

    def __init__(self) -> None:
        self._members: frozenset[PeerID] = frozenset()
        self._before: StateKey | None = None
        self._stepped_at: float | None = None
        self._collected_s = self._round_s = 0.0
        self._enough_at: float | None = None
        self._over = False
        self._rounds = 0
        self._late: dict[PeerID, tuple[int, int]] = {}
        self._awaited: frozenset[PeerID] | None = None

    def share(
        self, members: Collection[PeerID], before: StateKey, round_s: float, *, gave: Collection[PeerID] = ()
    ) -> None:
        """A round of so many seconds gave its members the same new state.

        Args:
            members: of the round.
            before: the key of the state that they had.
            round_s: seconds.
            gave: the members whose samples are in its average: they are forgiven.
        """
        self._members, self._before, self._round_s = frozenset(members), before, round_s
        self._awaited = None
        for peer in gave:
            self._late.pop(peer, None)

    def renamed(self, now: float, *, step: bool = False) -> None:
        """We have another state now (`now`: local time, seconds), if `step` by a step of the swarm."""
        self._enough_at, self._over = None, False
        self._rounds += 1
        self._awaited = None
        self._stepped_at = now if step else None

    def forget(self) -> None:
        """The state that we have, or are about to take, is not that of the last round."""
        self._members, self._before = frozenset(), None
        self._awaited = None

    @property
    def before(self) -> StateKey | None:
        """A companion at this state, or at a worse one, may be on its way; None if there are no companions."""
        return self._before

    @property
    def awaited(self) -> frozenset[PeerID]:
        """The members of the last round that we wait for, if they are not here."""
        if self._awaited is None:
            waits = {peer for peer, (_, until) in self._late.items() if until >= self._rounds}
            self._awaited = frozenset() if self._over else self._members - waits
        return self._awaited

    def look(self, view: SwarmView, target: int, now: float) -> bool:
        """Take in a view of the swarm (`now`: local time, seconds). True if the wait for companions has just ended."""
        if view.samples < target:
            self._enough_at = None
            return False
        if self._enough_at is None:
            self._enough_at = now
            if self._stepped_at is not None:
                self._collected_s, self._stepped_at = now - self._stepped_at, None
        if not view.coming or now < self._enough_at + self.patience_s:
            return False
        for peer in view.coming:
            times = self._late.get(peer, (0, 0))[0] + 1
            skipped = min(2 ** (times - _FORGIVEN), _MOST_SKIPPED) if times > _FORGIVEN else 0
            self._late.pop(peer, None)
            self._late[peer] = times, self._rounds + skipped
        while len(self._late) > _MAX_REMEMBERED:
            del self._late[next(iter(self._late))]
        self._over, self._awaited = True, None
        return True

    @property
    def until(self) -> float | None:
        """When nobody is waited for any more: local time, seconds; None as long as the swarm lacks samples."""
        return None if self._over or self._enough_at is None else self._enough_at + self.patience_s

    @property
    def patience_s(self) -> float:
        """How long to wait for companions once the swarm has its samples, seconds."""
        return max(_LEAST_S, self._collected_s + self._round_s)
