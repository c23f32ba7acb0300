"""What becomes of the call links of this peer: where a peer comes with one, and is lost with its last.

Links are with machines, and the rest of shoal asks for peers. A peer is *linked* with its first link. It is *lost* with
its last one, unless that was closed as idle: then it is only at rest, and dialed again when there is something to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shoal.base.clock import Env
from shoal.base.peer import PeerID
from shoal.base.tasks import Tasks
from shoal.errors import PeerError, PeerProtocolError
from shoal.events import PeerConnected, PeerDropped, PeerLost
from shoal.rpc.allowance import Allowances
from shoal.rpc.clocks import Clocks
from shoal.rpc.connections import Connections
from shoal.rpc.dialing import Dialer
from shoal.rpc.framing import Limits
from shoal.rpc.link import THE_PEER_LEFT, CallLink
from shoal.rpc.serving import Services
from shoal.rpc.silence import Silence
from shoal.rpc.trust import Trust
from shoal.rpc.twins import TwinWatch
from shoal.transport.base import Connection

__all__ = ["Links"]

_Callback = TypeVar("_Callback", bound=Callable[..., None])

_MAX_LINKS = 4
"""Call links with one peer; of more the oldest is closed. Two come about if both peers dial at once, another one if a
line broke and nobody has noticed yet."""


class Links:
    """The call links of one endpoint. Loop only.

    Args:
        connections: the open connections.
        services: take calls and notes.
        dialer: dials.
        me: our own identity.
        trust: whose word counts on the time.
        env: chance, events.
        limits: what one peer may cost, and heartbeat periods.
        tasks: the endpoint's.

    Attributes:
        limits: as given.
        allowances: what each host may ask of us.
        clocks: our clock, and those of the peers.
        silence: asks peers for signs of life.
        twins: tells the processes of a peer apart.
    """

    def __init__(
        self,
        connections: Connections,
        services: Services,
        dialer: Dialer,
        *,
        me: PeerID,
        trust: Trust,
        env: Env,
        limits: Limits,
        tasks: Tasks,
    ) -> None:
        self._open, self._services, self._dialer, self._events = connections, services, dialer, env.events
        self.limits, self._tasks = limits, tasks
        self.allowances = Allowances(limits.calls_per_host_s, limits.calls_s)
        self.clocks = Clocks(connections, trust, env)
        self.silence = Silence(connections, dialer, env, limits, tasks)
        self.twins = TwinWatch(connections, env, me, lost=self._lost, linked=self._linked)
        self._linked_callbacks: list[Callable[[PeerID], None]] = []
        self._lost_callbacks: list[Callable[[PeerID, str], None]] = []

    def on_linked(self, callback: Callable[[PeerID], None]) -> Callable[[], None]:
        """See `Endpoint.on_linked`."""
        return _listed(self._linked_callbacks, callback)

    def on_lost(self, callback: Callable[[PeerID, str], None]) -> Callable[[], None]:
        """See `Endpoint.on_lost`."""
        return _listed(self._lost_callbacks, callback)

    def add(self, connection: Connection) -> CallLink:
        """Make a call link of a new connection."""
        state = self._open.of(connection.peer_id)
        self._dialer.dials.prove(connection.remote_host)
        link = CallLink(connection, self, self._open, self._services, self._tasks)
        self.allowances.add(connection.remote_host, link, asyncio.get_running_loop().time())
        state.links.append(link)
        state.leaves = False
        link.start()
        if len(state.links) > _MAX_LINKS:
            state.links[0].abort()
        if len(state.links) == 1:
            self._linked(connection.peer_id)
        return link

    def _linked(self, peer: PeerID) -> None:
        self._events.emit(PeerConnected(peer=peer))
        for callback in list(self._linked_callbacks):
            callback(peer)

    def closed(self, link: CallLink, error: PeerError, expected: bool) -> None:
        """A call link is gone; it is `expected` if one side has closed it as idle."""
        peer = link.peer_id
        self.allowances.remove(link.connection.remote_host, link)
        self._open.count(link.connection)
        state = self._open.of(peer)
        state.leaves |= link.leaves
        with suppress(ValueError):
            state.links.remove(link)
        if isinstance(error, PeerProtocolError):
            self._events.emit(PeerDropped(peer=peer, where="rpc", reason=error.message))
        self.twins.link_closed(peer)
        if not state.links:
            self.clocks.forget(peer)
        if not state.links and not self._open.closed:
            self._dialer.routes.forget(peer)
            if not expected:
                self._lost(peer, THE_PEER_LEFT if state.leaves else error.message)
            elif state.streams and self._dialer.contact(peer).addresses:
                self._tasks.spawn(self._link_again(peer))
            else:
                self._open.drop_all(state.idle)
        self._open.forget(peer)

    async def _link_again(self, peer: PeerID) -> None:
        """Dial again: the other side closed its link as idle, but open streams need the link's heartbeat."""
        try:
            await self._dialer.link(peer, self.limits.dial_timeout_s)
        except PeerError as error:
            self._lost(peer, error.message)

    def _lost(self, peer: PeerID, reason: str) -> None:
        state = self._open.of(peer)
        self.silence.rhythm.forget(peer)
        self._open.drop_all(state.streams)
        self._open.drop_all(state.idle)
        self._open.forget(peer)
        self._events.emit(PeerLost(peer=peer, reason=reason))
        for callback in list(self._lost_callbacks):
            callback(peer, reason)


def _listed(callbacks: list[_Callback], callback: _Callback) -> Callable[[], None]:
    """Have this callback called, too; returns a function that ends it, and is safe to call twice."""
    callbacks.append(callback)

    def unsubscribe() -> None:
        with suppress(ValueError):
            callbacks.remove(callback)

    return unsubscribe
