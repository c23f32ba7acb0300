"""The connections of this peer with all others (call links, streams, idle ones), and the bytes that they carried."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal.base.ordered import OrderedSet
from shoal.base.peer import PeerID
from shoal.rpc.link import CallLink
from shoal.transport.base import Connection

__all__ = ["Connections", "PeerState"]


class PeerState:
    """The connections between us and one peer.

    Attributes:
        links: call links.
        dialing: the dial of a link that is under way.
        ahead: the dial of a connection for the next small stream that is under way.
        streams: connections of open streams, of both sides.
        inbound: how many streams the peer has open to us.
        idle: connections for the next streams that we open, oldest first, and whether they carried bulk data.
        accepted: connections for the streams that the peer opens, also while they wait for the next stream.
        received_before: bytes that came on connections that have ended since.
        leaves: whether the peer has said, since its last link was made, that it leaves.
        doubled: whether two processes with its key live (`twins`).
        doubles_us: whether it says that of our key.
        mute: whether the links carry nothing but signs of life, as two processes have one of the two keys.
    """

    __slots__ = (
        "accepted",
        "ahead",
        "dialing",
        "doubled",
        "doubles_us",
        "idle",
        "inbound",
        "leaves",
        "links",
        "mute",
        "received_before",
        "streams",
    )

    def __init__(self) -> None:
        self.links: list[CallLink] = []
        self.dialing: asyncio.Task[CallLink] | None = None
        self.ahead: asyncio.Task[Connection] | None = None
        self.streams = OrderedSet[Connection]()
        self.inbound = 0
        self.idle: dict[Connection, bool] = {}
        self.accepted = OrderedSet[Connection]()
        self.received_before = 0
        self.leaves = self.doubled = self.doubles_us = self.mute = False

    @property
    def link(self) -> CallLink | None:
        """A link that can carry a call: the newest, because a cut line may have left older ones stuck."""
        if self.mute:
            return None
        for link in reversed(self.links):
            if not link.closed:
                return link
        return None

    def set_twins(self, *, doubled: bool, doubles_us: bool) -> None:
        """Two processes have the key of this peer, or by its word our own, or have not any more."""
        self.doubled, self.doubles_us, self.mute = doubled, doubles_us, doubled or doubles_us

    @property
    def processes(self) -> int:
        """The number of processes of the peer that have answered on the links there are."""
        return len({link.process for link in self.links if link.process})

    def take_idle(self, *, bulk: bool) -> Connection | None:
        """Take an idle connection for a stream, if there is one. For bulk data those that have carried some come first.

        On these TCP has learned how fast the way is; a new connection takes seconds to get its share of a busy line. So
        other streams leave them alone.
        """
        suited = [connection for connection, carried in self.idle.items() if carried == bulk]
        if bulk and not suited:
            suited = list(self.idle)
        if not suited:
            return None
        del self.idle[suited[-1]]
        return suited[-1]

    @property
    def empty(self) -> bool:
        """Whether nothing is open or being dialed."""
        return not (self.links or self.dialing or self.ahead or self.streams or self.idle or self.accepted)


class Connections:
    """All connections of one endpoint.

    Attributes:
        peers: the peers with which something is open.
        connections: all open connections; `traffic` counts them.
        closed: whether none is made or taken any more.
    """

    def __init__(self) -> None:
        self.peers: dict[PeerID, PeerState] = {}
        self.connections = OrderedSet[Connection]()
        self.closed = False
        self._closed_traffic = (0, 0)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since the start, over all connections."""
        sent, received = self._closed_traffic
        for connection in self.connections:
            sent, received = sent + connection.bytes_sent, received + connection.bytes_received
        return sent, received

    @property
    def outbox_bytes(self) -> int:
        """The bytes that wait on all links."""
        return sum(link.outbox_bytes for state in self.peers.values() for link in state.links)

    def of(self, peer: PeerID) -> PeerState:
        """The connections with a peer, to be added to. Call `forget` if none was added."""
        return self.peers.setdefault(peer, PeerState())

    def link(self, peer: PeerID) -> CallLink | None:
        """A link with a peer that can carry a call."""
        state = self.peers.get(peer)
        return state.link if state is not None else None

    @property
    def linked(self) -> tuple[PeerID, ...]:
        """The peers with a link that can carry a call."""
        return tuple(peer for peer, state in self.peers.items() if state.link is not None)

    def ask(self, peer: PeerID) -> None:
        """Ask a linked peer for a sign of life, which also tells its time; never waits."""
        if (link := self.link(peer)) is not None:
            link.ask()

    def is_doubled(self, peer: PeerID) -> bool:
        """See `PeerState.doubled`."""
        state = self.peers.get(peer)
        return state is not None and state.doubled

    def is_mute(self, peer: PeerID) -> bool:
        """See `PeerState.mute`."""
        state = self.peers.get(peer)
        return state is not None and state.mute

    def forget(self, peer: PeerID) -> None:
        """Forget a peer if nothing is open with it."""
        if (state := self.peers.get(peer)) and state.empty:
            del self.peers[peer]

    def matters(self, peer: PeerID) -> bool:
        """Whether it should be known soon that a link of this peer is dead: a stream is open, or it is mute."""
        state = self.peers.get(peer)
        return state is not None and (bool(state.streams) or state.mute)

    def bytes_received(self, peer: PeerID) -> int:
        """The bytes that have come from a peer since there is a connection with it."""
        if (state := self.peers.get(peer)) is None:
            return 0
        links = (link.connection for link in state.links)
        # Idle connections count too: else their earlier bytes would seem to come when a stream takes them.
        now_open = {*links, *state.streams, *state.accepted, *state.idle}
        return state.received_before + sum(each.bytes_received for each in now_open)

    def bytes_acked(self, peer: PeerID) -> int:
        """The bytes that a peer's machine has taken on connections for streams."""
        if (state := self.peers.get(peer)) is None:
            return 0
        return sum(each.bytes_acked for each in {*state.streams, *state.accepted, *state.idle})

    def close(self) -> None:
        """Make and take no connection any more."""
        self.closed = True

    def watch(self, peer: PeerID) -> None:
        """A stream with this peer began or ended: its links watch it more or less closely from now on."""
        if (state := self.peers.get(peer)) is not None:
            for link in state.links:
                link.used()
                link.watch()

    def count(self, connection: Connection) -> None:
        """A connection has ended: keep what it carried."""
        if connection in self.connections:
            self.connections.discard(connection)
            sent, received = self._closed_traffic
            self._closed_traffic = (sent + connection.bytes_sent, received + connection.bytes_received)
            if (state := self.peers.get(connection.peer_id)) is not None:
                state.received_before += connection.bytes_received

    def drop(self, connection: Connection) -> None:
        """End a connection at once."""
        connection.abort()
        self.count(connection)

    def drop_all(self, connections: dict[Connection, Any]) -> None:
        """End these connections at once, and empty the collection."""
        dropped = list(connections)
        connections.clear()
        for connection in dropped:
            self.drop(connection)
