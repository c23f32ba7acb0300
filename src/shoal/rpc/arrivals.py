"""The connections that other peers make to this one: each is a call link, one that we asked for, or carries streams."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from itertools import takewhile
from typing import NamedTuple

import msgspec

from shoal.base.bounded import put_last
from shoal.base.peer import PeerID
from shoal.base.tasks import Tasks, WhileMoving
from shoal.errors import PeerProtocolError, PeerUnreachable
from shoal.events import EventBus, PeerDropped
from shoal.protocol.wire import Hello, LendConnection, Noted, decode
from shoal.rpc.allowance import stream_cost
from shoal.rpc.connections import Connections
from shoal.rpc.dialing import Dialer
from shoal.rpc.framing import Kind, Limits, read_frame
from shoal.rpc.links import Links
from shoal.rpc.serving import Services
from shoal.transport.base import Connection

__all__ = ["Arrivals", "Incoming"]

_OPEN_TIMEOUT_S = 10.0
"""The longest wait for the first frame of an incoming connection, while little comes."""

_LENDING_COST = 20.0
"""A call that makes us dial costs as much as so many small ones: each dial is a handshake, with signatures."""

_MOST_INCOMING = 1024
"""So many peers that have dialed us are remembered."""


class Incoming(NamedTuple):
    """A connection that a peer has made to us, which proves that it gets in.

    Attributes:
        peer: that has dialed, and proved its identity.
        at: when, in the loop's time.
        own: the address of this machine that the connection came to.
        host: the address that it came from.
    """

    peer: PeerID
    at: float
    own: str
    host: str


class Arrivals:
    """Takes incoming connections, and makes those that another peer asks to be lent. Loop only.

    Args:
        connections: the open connections.
        services: take streams.
        dialer: dials, and waits for the connections that we asked for.
        links: are made of connections that begin with a `Hello`.
        limits: what one peer may cost.
        events: the bus.
        tasks: the endpoint's.
    """

    def __init__(
        self,
        connections: Connections,
        services: Services,
        dialer: Dialer,
        links: Links,
        *,
        limits: Limits,
        events: EventBus,
        tasks: Tasks,
    ) -> None:
        self._open, self._services, self._dialer, self._links = connections, services, dialer, links
        self._limits, self._events, self._tasks = limits, events, tasks
        self._last: dict[PeerID, Incoming] = {}  # the last one of each peer; the newest at the end
        services.calls.add(LendConnection, "", self._lend)
        links.on_lost(self._lost)

    def since(self, at: float) -> list[Incoming]:
        """The last connection that each peer has made to us, of those since then (the loop's time), newest first."""
        return list(takewhile(lambda each: each.at >= at, reversed(self._last.values())))

    def accept(self, connection: Connection) -> None:
        """A peer has dialed us."""
        if self._open.closed:
            connection.abort()
            return
        peer, now = connection.peer_id, asyncio.get_running_loop().time()
        came = Incoming(peer, now, connection.local_host, connection.remote_host)
        put_last(self._last, peer, came, _MOST_INCOMING)
        self._open.connections.add(connection)
        self._tasks.spawn(self._serve(connection))

    async def _lend(self, peer: PeerID, _: LendConnection) -> Noted:
        if (link := self._open.link(peer)) is not None:
            link.spend(_LENDING_COST)
        connection = await self._dialer.lend(peer)
        self._tasks.spawn(self._serve(connection))
        return Noted()

    async def _serve(self, connection: Connection) -> None:
        handed_on, peer = False, connection.peer_id
        self._open.of(peer).accepted.add(connection)
        try:
            # A peer that we have a link with may dial ahead of its next stream.
            limit = WhileMoving(_OPEN_TIMEOUT_S, lambda: connection.bytes_received)
            async with nullcontext() if self._open.link(peer) is not None else limit:
                frame = await read_frame(connection, self._limits)
            if frame.kind is Kind.HELLO:
                handed_on = self._hand_on(connection, decode(frame.header, Hello))
                return
            while True:
                # A stream costs as much as a call: whoever opens too many waits, as with calls.
                cost, now = stream_cost(len(frame.header)), asyncio.get_running_loop().time()
                link, host = self._open.link(peer), connection.remote_host
                if (pause_s := self._links.allowances.spend(host, link, cost, now)) > 0.0:
                    await asyncio.sleep(pause_s)
                if not await self._services.serve_stream(connection, frame):
                    break
                frame = await read_frame(connection, self._limits)
        except TimeoutError:
            pass  # said nothing: dropped below
        except PeerUnreachable:
            pass  # the dialer closed an idle stream connection, as it may
        except (PeerProtocolError, msgspec.MsgspecError) as error:
            self._events.emit(PeerDropped(peer=peer, where="rpc", reason=str(error)))
        finally:
            if not handed_on:
                self._open.drop(connection)
            self._open.of(peer).accepted.discard(connection)
            self._open.forget(peer)

    def _hand_on(self, connection: Connection, hello: Hello) -> bool:
        """Give a connection to those who read on; False if nobody does."""
        if hello.contact.peer == connection.peer_id:
            self._dialer.learn(hello.contact, by_itself=True)
        if hello.lends:
            return self._dialer.lending.lent(connection)
        self._links.add(connection)  # it reads on by itself
        return True

    def _lost(self, peer: PeerID, _: str) -> None:
        if (state := self._open.peers.get(peer)) is not None and state.accepted:
            self._tasks.spawn(self._drop_accepted(peer))

    async def _drop_accepted(self, peer: PeerID) -> None:
        """Drop what a lost peer has open here, unless it makes a new link: it may have lost only the old one."""
        await asyncio.sleep(_OPEN_TIMEOUT_S)
        if (state := self._open.peers.get(peer)) is not None and not state.links:
            self._open.drop_all(state.accepted)
