"""Which peer of a run does what only one needs to do, without a vote: rendezvous hashing (Thaler and Ravishankar 1996).

Each peer ranks the candidates by a hash with the epoch, and the highest is elected. All who know the same candidates
conclude the same. Every epoch elects anew: so the work goes round, and nothing waits long for a peer that has died.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from shoal.base.peer import PeerID

__all__ = ["elected"]


def elected(run_id: str, epoch: int, candidates: Iterable[PeerID]) -> PeerID:
    """The candidate that is elected for this epoch.

    Args:
        run_id: of the run.
        epoch: of its state.
        candidates: at least one.
    """
    key = f"{epoch} {run_id}".encode()
    return max(candidates, key=lambda peer: hashlib.sha256(peer + key).digest())
