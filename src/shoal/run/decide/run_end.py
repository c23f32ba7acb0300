"""The end of a run, and when a peer that got there may leave.

No single peer ends a run. Each peer says at which epoch the run ends for it, or says nothing, and may change its mind.
It says so when it joins a round. The run ends at the median of the epochs that the contributors to the last steps said,
weighted by their samples (see `committed`); a contributor that says nothing counts as "never". So the run ends where
peers that want no more do more than half of the work. A run does not end in its past: an end that was over when it was
said does not count.

All peers at one state know the same words and the same weights, so the run ends for all of them or for none. A peer
that is at the end may name a later end, or none: then it goes on.

A peer at a state of which it knows no steps goes by its own word, and so does one that has made all of them alone.
Without a word of its own it goes by the word of more than half of all sites that it knows (see `words`).

The first peer at the end holds data that the others still need: the last round may have failed for one of them, which
would then make a last step of its own, and end with other weights. So a peer at the end waits for the others it knows,
and compares with them what the last step has left (see `parameter_check`). After the last step its members average what
differs by design, and only then look who has the last state. A peer that took that step from them later, or downloaded
the state after it, is not among these: it waits until they tell of the average, or are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from shoal.base.peer import PeerID
from shoal.run.decide.committed import Committed, median_end
from shoal.run.view.progress import SwarmView
from shoal.run.view.words import weigh

__all__ = ["RunEnd"]


class RunEnd:
    """The end of a run, as one peer knows it.

    Args:
        me: this peer.
        patience_s: how long a peer at the end waits for the others, seconds.

    Attributes:
        said: the epoch at which the run ends for this peer; None if it has named none.
        epoch: the epoch at which the run ends; None if that is not settled.
    """

    def __init__(self, me: PeerID, patience_s: float) -> None:
        self.said: int | None = None
        self.epoch: int | None = None
        self._me = me
        self._patience_s = patience_s
        self._goes_on_at: int | None = None
        self._since: float | None = None
        self._over_at: int | None = None

    def say(self, end: int | None, epoch: int) -> None:
        """Set the end that this peer, now at `epoch`, names; None for no end."""
        was_over = self.reached(epoch) or self._goes_on_at == epoch
        self.said = end
        self._goes_on_at = epoch if was_over and (end is None or end > epoch) else None

    def word(self, epoch: int, model_epoch: int) -> int | None:
        """The end that this peer names in a round; None for none.

        Args:
            epoch: of the fragment of the model that the round merges.
            model_epoch: the merges that all fragments have had. Merges fail, so some fragments may be far ahead of the
                others. One that is past the end goes on until the others come to theirs, and ends with its next merge.
        """
        if self.said is None or epoch == model_epoch or epoch < self.said or model_epoch > self.said:
            return self.said
        return epoch + 1 if model_epoch >= self.said - 1 else None

    def expected(self, epoch: int, model_epoch: int) -> int | None:
        """The epoch at which the run ends, also if it is not settled: arguments and result as of `word`.

        A fragment that is past the end knows only so which merge is its last one.
        """
        word = self.word(epoch, model_epoch) if self.epoch is None else None
        return word if word is not None and word > epoch else self.epoch

    def settle(
        self,
        epoch: int,
        committed: Committed,
        words: Callable[[], Mapping[PeerID, int | None]],
        sites: Callable[[], Mapping[PeerID, bytes]] = dict,
    ) -> None:
        """Compute the epoch at which the run ends.

        Args:
            epoch: of this peer.
            committed: the steps that led to its state.
            words: returns the ends that other live peers name now. They matter where no steps are known.
            sites: returns the sites of these peers.
        """
        if self._goes_on_at == epoch:
            self.epoch = self.said
        elif not committed.samples.keys() <= {self._me}:
            self.epoch = committed.end
        elif self.said is not None or committed.samples or epoch == 0:
            self.epoch = self.said
        else:
            ends = words()
            self.epoch = median_end(ends, weigh(ends, committed=committed.weights, sites=sites()))

    def reached(self, epoch: int) -> bool:
        """Whether nothing is trained beyond this epoch."""
        return self.epoch is not None and epoch >= self.epoch

    def over(self, epoch: int) -> bool:
        """Whether a peer at this epoch may leave, by what it saw when it looked last."""
        return self.reached(epoch) and self._over_at == epoch

    def patient(self, now: float) -> bool:
        """Whether this peer has not waited long enough for the others at the end."""
        return self._since is None or now - self._since < self._patience_s

    def observe(
        self,
        epoch: int,
        view: SwarmView,
        now: float,
        *,
        average_due: bool = False,
        unlike: Collection[PeerID] = (),
        client: bool = False,
    ) -> bool:
        """A peer at this epoch sees the swarm. True if it may leave now, and could not before.

        It may leave when all peers that it knows have its state, or when it has waited long enough for them; never
        while there is a better state than its own. Those that are `unlike` name it, and may hold other parameters. If
        `average_due`, the last average is not here. Clients have nothing to do with each other: a client waits for
        peers that can be dialed, and for those that are `unlike`.
        """
        before = self.over(epoch)
        if not self.reached(epoch):
            self._since = None
        elif self._since is None:
            self._since = now
        over = self._since is not None and not view.behind
        enough = over and (
            before or not self.patient(now) or self._all_here(view, unlike, average_due=average_due, client=client)
        )
        self._over_at = epoch if enough else None
        return self.over(epoch) and not before

    @staticmethod
    def _all_here(view: SwarmView, unlike: Collection[PeerID], *, average_due: bool, client: bool) -> bool:
        others = {peer for peer, word in view.others.items() if word.contact.addresses or not client}
        return not unlike and others <= view.together - view.coming and not (average_due and others)
