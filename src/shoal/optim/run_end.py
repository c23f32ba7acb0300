"""Where a run ends, and when a peer that got there may leave.

No single word ends a run. Each peer says where it ends as far as it is concerned, or says nothing, and may change its
mind. The run ends at the median of what the contributors to the last rounds say, weighted by their samples (see
`committed`); one that says nothing says "never". So it ends where more than half of the work is done by peers that want
no more. A run does not end in its past: an end that others announce below the epoch is none.

Who has been in no round yet does not know the contributors. It ends where the donor of its state said that the run
ends, else where more than half of all whom it knows say so.

Who is first at the end holds what the others still need: the last round may have failed for one of them, which would
then make a last step of its own, and end with other weights. So a peer at the end waits for the others it knows.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.optim.committed import Committed
from shoal.peer import PeerID
from shoal.progress import SwarmView

__all__ = ["RunEnd"]


class RunEnd:
    """The end of a run, as one peer knows it.

    Args:
        me: this peer.
        patience_s: how long a peer at the end waits for the others, seconds.

    Attributes:
        said: where it ends as far as this peer is concerned; None if it has not said so.
        epoch: where it ends; None if that is not settled.
    """

    def __init__(self, me: PeerID, patience_s: float) -> None:
        self.said: int | None = None
        self.epoch: int | None = None
        self._me = me
        self._heard: dict[PeerID, int | None] = {}  # of the contributors, also of those that are gone
        self._given: int | None = None
        self._patience_s = patience_s
        self._since: float | None = None
        self._over_at: int | None = None

    def say(self, epoch: int | None) -> bool:
        """As far as this peer is concerned the run ends there, None for nowhere. True if it was news."""
        news, self.said = epoch != self.said, epoch
        return news

    def given(self, epoch: int | None) -> None:
        """The donor of our state says that the run ends there."""
        self._given = epoch

    def settle(self, epoch: int, words: Mapping[PeerID, int | None], committed: Committed) -> None:
        """Find out where the run ends.

        Args:
            epoch: of this peer.
            words: what the others say who are alive.
            committed: what each contributor has done.
        """
        weights = committed.samples
        self._heard = {peer: word for peer, word in self._heard.items() if peer in weights}
        self._heard.update((peer, word) for peer, word in words.items() if peer in weights)
        if weights:
            said = {peer: self._heard.get(peer) for peer in weights if peer != self._me}
            self.epoch = _median(epoch, said, self.said, weights, self._me)
        elif self.said is not None:
            self.epoch = self.said
        elif self._given is not None and self._given >= epoch > 0:
            self.epoch = self._given
        else:
            self.epoch = _median(epoch, words, None, dict.fromkeys(words, 1), self._me) if epoch > 0 else None

    def reached(self, epoch: int) -> bool:
        """Whether nothing is trained beyond this epoch."""
        return self.epoch is not None and epoch >= self.epoch

    def over(self, epoch: int) -> bool:
        """Whether a peer at this epoch may leave, by what it saw when it looked last."""
        return self.reached(epoch) and self._over_at == epoch

    def look(self, epoch: int, view: SwarmView, now: float) -> bool:
        """A peer at this epoch sees the swarm. True if it may leave now, and could not before.

        It may when everybody it knows has its state, or when it has waited long enough for them; never while there is a
        better state than its own.
        """
        before = self.over(epoch)
        if not self.reached(epoch):
            self._since = None
        elif self._since is None:
            self._since = now
        all_here = len(view.together - view.coming) == len(view.peers)
        waited = self._since is not None and now - self._since >= self._patience_s
        self._over_at = epoch if self._since is not None and not view.behind and (all_here or waited) else None
        return self.over(epoch) and not before


def _median(
    epoch: int, said: Mapping[PeerID, int | None], mine: int | None, weights: Mapping[PeerID, int], me: PeerID
) -> int | None:
    """The earliest epoch of which more than half say that the run ends there, or before; None if there is none."""
    half = sum(weights.values()) / 2
    words = [(word, weights[peer]) for peer, word in said.items() if word is not None and word >= epoch]
    if mine is not None:
        words.append((mine, weights.get(me, 0)))
    ended = 0
    for word, weight in sorted(words):
        ended += weight
        if ended > half:
            return word
    return None
