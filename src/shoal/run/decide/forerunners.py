"""Peers that went on from our state without us: whether this peer follows them at once. Pure bookkeeping.

The fork rule compares the samples that are in states. What the peers at a state have trained since then, and are about
to step or to merge, is in none yet. So one peer that stepped alone, a moment before all others did, had the better
state. The others gave up what they had trained, followed it, came late to its next step, and gave up that, too.

So a peer does not follow as long as all of this holds:

- A peer that is at the better state left this branch: it was at our state, the better one is of a later epoch, and this
  peer has samples to give; or it was at our last state, and is still ahead after our step from there; or it was at one
  of our states before, we have made a better one since, and it did not come to that. The last two only if those that
  took our step outweighed those that did not: of two parts of a swarm never both go on. Two branches that meet, and an
  average of states, are followed at once.
- Of the contributors to the last steps those at our state, this peer included, outweigh those that have gone ahead.
  Only peers that are connected and heard count here. Weights are those of `words`: so no single peer leads the others
  back, and a peer that most have left behind follows them at once.
- By what they gave to the last steps, or have now, these peers' own step takes more samples than the better state is
  ahead of ours. If it comes, theirs is the better state. Where a step waits for a number of samples, it takes that many
  at least, if several peers are here, and have them within the time below.
- No round at our state has failed since a better state was named, and twice the time of an epoch has not passed.

Peers that kept rounds waiting, and on which it does not count for a while, need not have left this branch, nor be
outweighed: no round brings the two together meanwhile. They are not followed for less than two steps of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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
        self._weights: Mapping[PeerID, int] = {}  # of the contributors to the last steps to our state
        self._since: float | None = None
        self._failed = False
        self._pursued: set[PeerID] = set()  # were at our last state, and were still ahead after our step from there
        self._apart: set[PeerID] = (
            set()
        )  # were at a state of ours, and have not come to a better one that we made since

    def observe(self, view: SwarmView, *, own: StateKey, committed: Committed, now: float) -> None:
        """Take in a look at the swarm from our state `own`, to which these steps led (`now`: local time, seconds)."""
        if own.inverted_digest != self._digest:
            said = {peer: StateKey.of_peer(word) for peer, word in view.others.items()}
            left = ((self._were_here | self._pursued) & said.keys()) - view.together
            if _weight(self._weights, view.together) <= _weight(self._weights, left):
                left = set()
            further = {peer for peer in left if said[peer].samples > own.samples}
            self._apart = self._apart & said.keys() | (left - further)
            self._pursued = further - self._pursued
            self._weights = committed.weights
            self._digest, self._were_here, self._since, self._failed = own.inverted_digest, set(), None, False
            self._together = frozenset()
        if view.together is not self._together:
            self._together = view.together
            self._were_here |= view.together
            self._apart -= view.together
            self._pursued -= view.together
        if view.behind and self._since is None:
            self._since = now

    def steps_first(  # noqa: PLR0913 (all but one by name)
        self,
        view: SwarmView,
        *,
        own: StateKey,
        committed: Committed,
        held: int,
        target: int | None,
        hears: Callable[[PeerID], bool],
        idle: frozenset[PeerID],
        epoch_s: float,
        now: float,
    ) -> bool:
        """Whether the peers at our state go on to their own step, though a better state is known.

        Args:
            view: of the swarm.
            own: the key of our state.
            committed: the last steps that led to it.
            held: the samples that this peer has trained at it.
            target: the samples of all peers at a state that a step waits for; None: their number does not matter, and
                what peers say they have done are no samples.
            hears: whether a peer is connected.
            idle: the peers that kept rounds waiting, and on which this one does not count for a while.
            epoch_s: the time that an epoch takes, seconds.
            now: local time, seconds.
        """
        if not view.behind or own.inverted_digest != self._digest:  # at a new state nobody was seen yet
            return False
        leaders = view.leaders
        if self._since is not None and now >= self._since + _EPOCHS * epoch_s:
            return False
        lead = view.best.samples - own.samples
        if leaders and idle.issuperset(leaders):
            sometimes("only peers on which this one does not count have gone ahead")
            return lead <= _EPOCHS * self._gives(self._me, committed, held, 0)
        if self._failed:
            return False
        left = self._apart | self._pursued
        if held and view.best.epoch > own.epoch:
            left |= self._were_here
        if left.isdisjoint(leaders):
            return False
        weights = committed.weights
        here = {peer for peer in view.together.intersection(weights) if peer == self._me or hears(peer)} - view.absent
        ahead = [peer for peer in weights if peer in view.others and StateKey.of_peer(view.others[peer]) > own]
        if _weight(weights, here) <= _weight(weights, ahead):
            return False
        says = {peer: view.others[peer].done for peer in here if peer != self._me} if target is not None else {}
        samples = sum(self._gives(peer, committed, held, says.get(peer, 0)) for peer in here)
        full = target if target is not None and len(here) > 1 else 0
        if lead >= samples and lead > min(full, _EPOCHS * samples):
            return False
        sometimes("peers make their own step, though another one has gone ahead")
        return True

    def _gives(self, peer: PeerID, committed: Committed, held: int, says: int) -> float:
        """About how many samples this contributor gives to the next step from our state."""
        has = held if peer == self._me else min(says, committed.believed.get(peer, 0))
        return max(has, committed.samples.get(peer, 0) / max(1, len(committed.steps)))

    def round_failed(self) -> None:
        """A round at our state has failed: if a better state is known, it is followed now."""
        self._failed = self._since is not None


def _weight(weights: Mapping[PeerID, int], peers: Iterable[PeerID]) -> int:
    return sum(weights.get(peer, 0) for peer in peers)
