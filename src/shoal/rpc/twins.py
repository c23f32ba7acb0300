"""Whether two processes have one key. What others send to one of them may reach the other, and neither can know.

Their common neighbour can: each process has a random name, which it says with each sign of life. A process that was
started again has another name, too, but the one before is silent from then on. So two processes live at a time if the
earlier one answers a question that was asked after the later one was heard.

All that is remembered of a peer is one account for its key, which two processes would mix. So as long as there are
links with both, these carry nothing but signs of life (`PeerState.mute`), and for all that is built on links the peer
is lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from shoal.base.bounded import put_last
from shoal.base.clock import Env
from shoal.base.peer import PeerID
from shoal.events import Warned
from shoal.rpc.connections import Connections

__all__ = ["TWO_PROCESSES", "TwinWatch", "Twins"]

TWO_PROCESSES = "two processes have one identity, so what is meant for one of them may reach the other"
"""Why nothing is said to such a peer, and nothing taken from it."""

_MOST_TOLD = 16
"""So many peers with two processes are told of: keys are free, and whoever has one may show two."""

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


class TwinWatch:
    """Makes the links mute with peers of which two processes live, and those with peers that say so of us. Loop only.

    Args:
        connections: the open connections.
        env: chance, events.
        me: our own identity.
        lost: called with a peer that cannot be counted on from now on, and the reason.
        linked: called with a peer that counts again.

    Attributes:
        process: the name of this process.
        has_twin: whether a peer is, or was, connected with another process that has our identity; it was said.
    """

    def __init__(
        self,
        connections: Connections,
        env: Env,
        me: PeerID,
        *,
        lost: Callable[[PeerID, str], None],
        linked: Callable[[PeerID], None],
    ) -> None:
        self._open, self._events, self._me, self._lost, self._linked = connections, env.events, me, lost, linked
        self._twins = Twins(env.rng)
        self.process, self.has_twin = self._twins.process, False
        self._told = set[PeerID]()

    def answered(self, peer: PeerID, process: bytes, asked_at: float) -> None:
        """A process has answered that has this peer's key, and was asked at this time of the loop."""
        now, state = asyncio.get_running_loop().time(), self._open.of(peer)
        if self._twins.answered(peer, process, asked_at=asked_at, now=now):
            for link in [*state.links]:
                link.ask()
        if self._twins.has(peer) and state.processes > 1 and not state.doubled:
            self._set_mute(peer, doubled=True)
            self._tell_of(peer)

    def told(self, teller: PeerID, *, has_twin: bool) -> None:
        """A peer says whether it is connected with two processes that have our identity."""
        if has_twin != self._open.of(teller).doubles_us:
            self._set_mute(teller, doubles_us=has_twin)
        if has_twin and not self.has_twin:
            self.has_twin = True
            message = (
                f"another process has this peer's identity ({self._me.short()}), as {teller.short()} says, which "
                "is connected with both. A message to one of them may reach the other, so only one of them can take "
                "part. End one; give each an identity file of its own (identity_path), or none"
            )
            self._events.emit(Warned(where="DHT", message=message))

    def link_closed(self, peer: PeerID) -> None:
        """A link with this peer is gone, and with it, it may be, one of its processes."""
        state = self._open.of(peer)
        if state.doubled and state.processes < 2:
            self._set_mute(peer, doubled=False)
        if not state.links:
            state.set_twins(doubled=state.doubled, doubles_us=False)

    def _set_mute(self, peer: PeerID, *, doubled: bool | None = None, doubles_us: bool | None = None) -> None:
        """Two processes have the key of this peer, or by its word our own, or have not any more; None: as before."""
        state = self._open.of(peer)
        before = state.mute
        state.set_twins(
            doubled=state.doubled if doubled is None else doubled,
            doubles_us=state.doubles_us if doubles_us is None else doubles_us,
        )
        for link in [*state.links] if doubled is not None else ():
            link.ask()  # which tells it
        if state.mute and not before:
            self._lost(peer, TWO_PROCESSES)
            self._open.watch(peer)
        elif before and state.link is not None:
            self._linked(peer)

    def _tell_of(self, peer: PeerID) -> None:
        if peer not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(peer)
            message = (
                f"two processes have the identity of {peer.short()}, and this peer is connected with both. What is "
                "sent to one of them may reach the other, so it counts on neither until one ends. Both were told. If "
                "they are yours, end one; give each an identity file of its own (identity_path), or none"
            )
            self._events.emit(Warned(where="DHT", message=message, about=(peer,)))
