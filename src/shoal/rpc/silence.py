"""What is done about silent peers: they are asked for a sign of life, and dialed anew. `rhythm` finds them silent."""

from __future__ import annotations

import asyncio

from shoal.base.clock import Env
from shoal.base.peer import PeerID
from shoal.base.tasks import Tasks
from shoal.events import PeerSilent
from shoal.rpc.connections import Connections
from shoal.rpc.dialing import Dialer
from shoal.rpc.framing import Limits
from shoal.rpc.rhythm import LOOK_S, Rhythm

__all__ = ["Silence"]

_MAX_LINKING_ANEW = 32
"""Silent peers that are dialed anew at a time."""


class Silence:
    """Looks at the peers of one endpoint. Loop only.

    Args:
        connections: the open connections.
        dialer: dials.
        env: chance, events.
        limits: the longest silence, and the longest dial.
        tasks: the endpoint's.

    Attributes:
        rhythm: finds them silent.
    """

    def __init__(self, connections: Connections, dialer: Dialer, env: Env, limits: Limits, tasks: Tasks) -> None:
        self._open, self._dialer, self._env, self._limits, self._tasks = connections, dialer, env, limits, tasks
        self.rhythm = Rhythm(
            self._ask,
            connections.bytes_received,
            connections.bytes_acked,
            self._fell_silent,
            most_s=limits.silence_s,
        )
        self._linking_anew: set[PeerID] = set()
        self._looking = False

    def watch_calls(self) -> None:
        """A call is made: look at the peers that have not answered theirs, as long as there are any."""
        if not self._looking:
            self._looking = True
            self._tasks.spawn(self._look_loop())

    async def _look_loop(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            waiting = [peer for peer, state in self._open.peers.items() if any(link.pending for link in state.links)]
            if not waiting:
                break
            for peer in waiting:
                self._is_silent(peer)
        self._looking = False

    def _is_silent(self, peer: PeerID) -> bool:
        return self.rhythm.is_silent(peer, asyncio.get_running_loop().time())

    def _ask(self, peer: PeerID) -> bool:
        """Ask a peer for a sign of life; False if it cannot be asked."""
        state = self._open.peers.get(peer)
        links = [link for link in state.links if not link.closed] if state is not None else []
        for link in links:
            link.ask()
        if not links and self._dialer.contact(peer).addresses and not self._open.closed:
            self._tasks.spawn(self._dial_and_ask(peer))
            return True
        return bool(links)

    async def _dial_and_ask(self, peer: PeerID) -> None:
        (await self._dialer.link(peer, self._limits.dial_timeout_s)).ask()

    def _fell_silent(self, peer: PeerID, waited_s: float) -> None:
        self._env.events.emit(PeerSilent(peer=peer, waited_s=waited_s))
        if (state := self._open.peers.get(peer)) is None or self._open.closed:
            return
        self._open.drop_all(state.idle)  # its line may have been cut: these would be as late as its links
        if peer not in self._linking_anew and len(self._linking_anew) < _MAX_LINKING_ANEW:
            self._linking_anew.add(peer)
            self._tasks.spawn(self._link_anew(peer))

    async def _link_anew(self, peer: PeerID) -> None:
        try:
            await self._dialer.link_anew(peer, lambda: self._is_silent(peer), self._env.rng)
        finally:
            self._linking_anew.discard(peer)
