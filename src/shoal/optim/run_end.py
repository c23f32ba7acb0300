"""Where a run ends, and when a peer that got there may leave.

Who is first at the end holds what the others still need: the last round may have failed for one of them, which would
then make a last step of its own, and end with other weights. So a peer at the end waits for the others it knows.
"""

from __future__ import annotations

from shoal.progress import SwarmView

__all__ = ["RunEnd"]


class RunEnd:
    """The announced end of a run, as one peer knows it.

    Args:
        patience_s: how long a peer at the end waits for the others, seconds.

    Attributes:
        epoch: the last one; None if none was announced.
    """

    def __init__(self, patience_s: float) -> None:
        self.epoch: int | None = None
        self._patience_s = patience_s
        self._since: float | None = None
        self._over_at: int | None = None

    def announce(self, epoch: int | None) -> bool:
        """Somebody says that the run ends there; the earliest announcement holds. True if it was news."""
        if epoch is None or (self.epoch is not None and self.epoch <= epoch):
            return False
        self.epoch = epoch
        return True

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
