"""The companions of a peer: members of its last round that will soon be at its state; and the stragglers among them.

The first peer that has an average takes it. It then has a new state, which the others have not named yet: a trainer is
in the middle of its batch, or a commit is still on its way. The others have the same average and will be here soon. So
the members of a round count as together until they name this state, or another one that the round did not begin from,
or die. Their samples count when they are here.

Until the swarm has the samples for its next step, waiting for companions costs nothing. From then on a peer waits for
them as long as an epoch takes (the time to collect the samples and to average), and at least `_LEAST_S`. Then it goes
on, and the late companion catches up.

What is waited for in vain is charged to the companion: the time, counted in epochs, until it comes, if the next average
has none of its samples; and `_LATE` epochs if it does not come in time. A companion that has cost more than `_FORGIVEN`
epochs is not waited for in the next two rounds, and in twice as many after each further time. So a trainer whose
batches are too long does not slow the swarm down for good, whether it comes just in time or too late. A place in a
round does not forgive it: such a trainer is in most rounds, and has no samples in any. Absence does not forgive it
either: such a trainer is in no round while nobody waits for it. Samples that count do.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.base.ledger import Ledger
from shoal.base.peer import PeerID
from shoal.run.view.progress import StateKey, SwarmView

__all__ = ["Companions"]

_LEAST_S = 0.5
"""Processes of a busy machine come this late, however short an epoch is."""

_FORGIVEN, _LATE = 2.0, 2.0
"""Epochs of waiting. A trainer whose samples count only now and then, as its batch is about as long as an epoch, costs
0.4 between two times (`tests/sim/test_together.py`)."""

_FREE = 0.05
"""A part of an epoch: shorter waits are charged to nobody."""

_FIRST_SKIPPED, _MOST_SKIPPED = 2, 64
"""Rounds in which a companion is not waited for."""


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
        self._since: dict[PeerID, float] = {}
        self._waited: dict[PeerID, float] = {}
        self._charged = Ledger[PeerID](_FIRST_SKIPPED, _MOST_SKIPPED, free=_FORGIVEN)  # by rounds; epochs are charged
        self._awaited: frozenset[PeerID] | None = None

    def share(
        self, members: Collection[PeerID], before: StateKey, round_s: float, *, gave: Collection[PeerID] | None = None
    ) -> None:
        """A round gave its members the same new state.

        Args:
            members: of the round.
            before: the key of the state that they had.
            round_s: seconds.
            gave: the members whose samples are in its average: they are forgiven. None if it is no average of samples.
        """
        if gave is not None:
            for peer in gave:
                self._charged.forgive(peer)
                self._waited.pop(peer, None)
            for peer, waited_s in self._waited.items():
                if waited_s > _FREE * self._epoch_s:
                    self._charge(peer, waited_s / max(waited_s, self._epoch_s))
            self._waited = {}
        self._members, self._before, self._round_s = frozenset(members), before, round_s
        self._awaited = None

    def state_changed(self, now: float, *, step: bool = False) -> None:
        """We have another state now (`now`: local time, seconds), if `step` by a step of the swarm."""
        self._enough_at, self._over = None, False
        self._since = {}
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
            self._awaited = frozenset() if self._over else self._members - self._charged.pausing(self._rounds)
        return self._awaited

    def observe(self, view: SwarmView, now: float, *, enough: bool) -> bool:
        """Take in a view of the swarm. True if the wait for companions has just ended.

        Args:
            view: of the swarm.
            now: local time, seconds.
            enough: whether there is enough for a step.
        """
        if not enough:
            self._enough_at = None
            return False
        if self._enough_at is None:
            self._enough_at = now
            if self._stepped_at is not None:
                self._collected_s, self._stepped_at = now - self._stepped_at, None
        for peer in self._since.keys() - view.coming:
            self._waited[peer] = self._waited.get(peer, 0.0) + now - self._since.pop(peer)
        for peer in view.coming:
            self._since.setdefault(peer, now)
        if not view.coming or now < self._enough_at + self.patience_s:
            return False
        for peer in view.coming:
            self._charge(peer, _LATE)
        self._over, self._awaited, self._since = True, None, {}
        return True

    def _charge(self, peer: PeerID, epochs: float) -> None:
        """This peer was waited for in vain, for this number of epochs."""
        self._charged.failed(peer, self._rounds + 1, weight=epochs)  # the next round is the first without it

    @property
    def until(self) -> float | None:
        """The time from which on nobody is waited for: local time, seconds; None as long as the swarm lacks samples."""
        return None if self._over or self._enough_at is None else self._enough_at + self.patience_s

    @property
    def patience_s(self) -> float:
        """The time to wait for companions once the swarm has its samples, seconds."""
        return max(_LEAST_S, self._epoch_s)

    @property
    def _epoch_s(self) -> float:
        return self._collected_s + self._round_s
