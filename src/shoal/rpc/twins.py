"""Whether two processes have one key. What others send to one of them may reach the other, and neither can know.

Their common neighbour can: each process has a random name, which it says with each sign of life. A process that was
started again has another name, too, but the one before is silent from then on. So two processes live at a time if the
earlier one answers a question that was asked after the later one was heard.

All that is remembered of a peer is one account for its key, which two processes would mix. So as long as there are
links with both, these carry nothing but signs of life (`PeerState.mute`), and for all that is built on links the peer
is lost.
"""

from __future__ import annotations

import random

from shoal.base.bounded import put_last
from shoal.base.peer import PeerID

__all__ = ["TWO_PROCESSES", "Twins"]

TWO_PROCESSES = "two processes have one identity, so what is meant for one of them may reach the other"
"""Why nothing is said to such a peer, and nothing taken from it."""

_MOST_PEERS = 1024
_MOST_EARLIER = 8
"""So many earlier processes of a peer are remembered."""


class _Lives:
    """The processes that have answered with one key: the latest one, since when it is known, and those before."""

    def __init__(self) -> None:
        self.latest, self.since, self.twin = b"", 0.0, False
        self.earlier: dict[bytes, None] = {}


class Twins:
    """The processes of the peers that this one is connected with. Times are the loop's.

    Args:
        rng: source of the name. It stays as it is, so that no jitter depends on who asks for a name first.

    Attributes:
        process: the name of this process.
    """

    def __init__(self, rng: random.Random) -> None:
        ours = random.Random()
        ours.setstate(rng.getstate())
        self.process = ours.randbytes(8)
        self._lives: dict[PeerID, _Lives] = {}

    def answered(self, peer: PeerID, process: bytes, *, asked_at: float, now: float) -> bool:
        """A process with this peer's key has answered; returns whether all that have it are to be asked now."""
        if not process:
            return False
        put_last(self._lives, peer, lives := self._lives.get(peer) or _Lives(), _MOST_PEERS)
        if process == lives.latest:
            return False
        if process not in lives.earlier:
            is_other = bool(lives.latest)
            if is_other:
                put_last(lives.earlier, lives.latest, None, _MOST_EARLIER)
            lives.latest, lives.since, lives.twin = process, now, False
            return is_other
        if lives.twin or asked_at < lives.since:
            return False
        lives.twin = True
        return True

    def has(self, peer: PeerID) -> bool:
        """Whether two processes have the key of this peer."""
        return peer in self._lives and self._lives[peer].twin
