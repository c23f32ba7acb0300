"""Peers that went on from our state without us: whether this peer follows them at once. Pure bookkeeping.

The fork rule compares the samples that are in states. What the peers at a state have trained since then, and are about
to step or to merge, is in none yet. So one peer that stepped alone, a moment before all others did, had the better
state. The others gave up what they had trained, followed it, came late to its next step, and gave up that, too.

So a peer does not follow as long as all of this holds:

- The better state is of a later epoch, and a peer that is at it was at our state before; or it has gone on without us
  before, we have made the better state since, and it did not come to that. Two branches that meet, and an average of
  states, are followed at once.
- Of the contributors to the last steps those at our state, this peer included, outweigh those that have gone ahead.
  Only peers that are connected and heard count here. Weights are those of `words`: so no single peer leads the others
  back, and a peer that most have left behind follows them at once.
- By what they gave to the last steps, or have now, these peers' own step takes more samples than the better state is
  ahead of ours. If it comes, theirs is the better state.
- This peer has samples to give.
- No round at our state has failed since a better state was named, and twice the time of an epoch has not passed.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.run.decide.committed import Committed
from shoal.run.view.progress import StateKey, SwarmView

__all__ = ["Forerunners"]

_EPOCHS = 2.0
"""The peers at a state make their step within this time of an epoch, or follow."""


class Forerunners:
    """Remembers who was at our state, and since when others are ahead of it.

    Args:
        me: this peer.
    """

    def __init__(self, me: PeerID) -> None:
        self._me = me
        self._digest = b""
        self._together: frozenset[PeerID] = frozenset()
        self._were_here: set[PeerID] = set()
        self._since: float | None = None
        self._failed = False
        self._ahead: dict[PeerID, StateKey] = {}  # those that were at better states than ours, and at which
        self._overtaken: set[PeerID] = (
            set()
        )  # of those: we have made a better state since, and they have not come to it

    def observe(self, view: SwarmView, *, own: StateKey, now: float) -> None:
        """Take in a look at the swarm from our state `own` (`now`: local time, seconds)."""
        if own.inverted_digest != self._digest:
            self._overtaken.update(peer for peer, key in self._ahead.items() if key < own)
            self._overtaken.intersection_update(view.others)
            self._ahead = {}
            self._digest, self._were_here, self._since, self._failed = own.inverted_digest, set(), None, False
            self._together = frozenset()
        if view.together is not self._together:
            self._together = view.together
            self._were_here |= view.together
            self._overtaken -= view.together
        if view.behind:
            self._since = now if self._since is None else self._since
            self._ahead.update(dict.fromkeys(view.leaders, view.best))

    def steps_first(
        self,
        view: SwarmView,
        *,
        own: StateKey,
        committed: Committed,
        held: int,
        counts_samples: bool,
        hears: Callable[[PeerID], bool],
        epoch_s: float,
        now: float,
    ) -> bool:
        """Whether the peers at our state go on to their own step, though a better state is known.

        Args:
            view: of the swarm.
            own: the key of our state.
            committed: the last steps that led to it.
            held: the samples that this peer has trained at it.
            counts_samples: as in `Pace`: whether what peers say they have done are samples.
            hears: whether a peer is connected.
            epoch_s: the time that an epoch takes, seconds.
            now: local time, seconds.
        """
        if not view.behind or own.inverted_digest != self._digest:  # at a new state nobody was seen yet
            return False
        late = self._since is not None and now >= self._since + _EPOCHS * epoch_s
        if late or self._failed or not held or view.best.epoch <= own.epoch:
            return False
        if (self._were_here | self._overtaken).isdisjoint(view.leaders):
            return False
        weights = committed.weights
        here = {peer for peer in view.together.intersection(weights) if peer == self._me or hears(peer)} - view.absent
        ahead = [peer for peer in weights if peer in view.others and StateKey.of_peer(view.others[peer]) > own]
        if sum(weights[peer] for peer in here) <= sum(weights[peer] for peer in ahead):
            return False
        says = {peer: view.others[peer].done for peer in here if peer != self._me} if counts_samples else {}
        samples = sum(self._gives(peer, committed, held, says.get(peer, 0)) for peer in here)
        if view.best.samples - own.samples >= samples:
            return False
        sometimes("peers make their own step, though another one has gone ahead")
        return True

    def _gives(self, peer: PeerID, committed: Committed, held: int, says: int) -> float:
        """About how many samples this contributor gives to the next step from our state."""
        has = held if peer == self._me else min(says, committed.believed.get(peer, 0))
        return max(has, committed.samples[peer] / len(committed.steps))

    def round_failed(self) -> None:
        """A round at our state has failed: if a better state is known, it is followed now."""
        self._failed = self._since is not None
