"""How peers are reached: their known addresses, and the dials of call links and of connections for streams.

If several callers want a link with a peer at a time, it is dialed once. A stream takes an idle connection if there is
one. A call link is there when a stream begins, because the link's heartbeat tells when a silent peer is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shoal.base.bounded import put_last
from shoal.base.clock import Backoff, seconds_text
from shoal.base.peer import Address, PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Tasks
from shoal.errors import ClosedError, PeerError, PeerRefused, PeerTimeout, PeerUnreachable
from shoal.protocol.wire import Contact, Hello
from shoal.rpc.connections import Connections
from shoal.rpc.dial_limits import BoundedDials
from shoal.rpc.framing import Kind, Limits, pack
from shoal.rpc.lending import Lending
from shoal.rpc.link import CallLink
from shoal.rpc.routes import Routes
from shoal.rpc.twins import TWO_PROCESSES
from shoal.transport.base import Connection, Transport

__all__ = ["Dialer"]

_MAX_CONTACTS = 8192
"""Peers whose addresses are remembered."""

_MAX_ADDRESSES = 8
"""As many as fit in a `Contact`."""

T = TypeVar("T")


class Dialer:
    """Dials for one endpoint.

    Args:
        transport: how peers are reached.
        connections: the open connections.
        limits: how long dialing may take.
        me: how others reach us.
        add_link: makes a call link of a new connection.
        tasks: the endpoint's.

    Attributes:
        routes: to live peers.
        dials: makes the connections.
        lending: takes those that another peer makes for us.
    """

    def __init__(
        self,
        transport: Transport,
        connections: Connections,
        limits: Limits,
        *,
        me: Callable[[], Contact],
        add_link: Callable[[Connection], CallLink],
        tasks: Tasks,
    ) -> None:
        self._me_id, self._open, self._limits = transport.peer_id, connections, limits
        self.dials = BoundedDials(transport)
        self.lending = Lending(limits.dial_timeout_s, connections.drop)
        self.routes = Routes(
            self.dials,
            limits.dial_timeout_s,
            link=connections.link,
            borrow=self.lending.borrow,
            tasks=tasks,
            keep=self._keep_again,
        )
        self._me, self._add_link, self._tasks = me, add_link, tasks
        self._told: dict[PeerID, tuple[Address, ...]] = {}  # by the peers themselves, the last one at the end
        self._heard: dict[PeerID, tuple[Address, ...]] = {}  # from others
        self._worked: dict[PeerID, Address] = {}  # the last one that led to the peer

    def learn(self, contact: Contact, *, by_itself: bool) -> None:
        """Remember where a peer listens. Foreign addresses are ignored.

        Args:
            contact: the peer. Without addresses it says, if `by_itself`, that it only dials; else this teaches nothing.
            by_itself: whether the peer itself says so. The addresses that others name are tried after its own: they may
                be lies, or newer. Of a connected peer that only dials they are lies, or older.
        """
        addresses = tuple(address for address in contact.addresses if address.peer_id == contact.peer)
        known = self._told if by_itself else self._heard
        if (addresses or by_itself) and contact.peer != self._me_id:
            put_last(known, contact.peer, addresses, _MAX_CONTACTS)
            if not addresses:
                self._worked.pop(contact.peer, None)
                self._heard.pop(contact.peer, None)

    def moved(self, contact: Contact) -> None:
        """A peer says that it listens here from now on; nowhere, if it names no address."""
        self._heard.pop(contact.peer, None)
        self.routes.forget(contact.peer)
        self.learn(contact, by_itself=True)

    def contact(self, peer: PeerID) -> Contact:
        """Where a peer listens: by its own word, or else where it was reached, and then by the word of others.

        Without addresses if nobody has said so.
        """
        return self.dialable(Contact(peer, (self._told.get(peer) or self._addresses(peer))[:_MAX_ADDRESSES]))

    def _only_dials(self, peer: PeerID) -> bool:
        """Whether a connected peer has said itself that it listens nowhere."""
        return self._told.get(peer) == () and self._open.link(peer) is not None

    def dialable(self, contact: Contact) -> Contact:
        """The same, without addresses if dialing the peer there has failed though it lives, or it is mute."""
        peer = contact.peer
        return Contact(peer) if self._open.is_mute(peer) or self.routes.closed(peer, contact.addresses) else contact

    async def link(self, peer: PeerID, timeout_s: float) -> CallLink:
        """The call link with a peer; dialed if there is none.

        Raises:
            PeerTimeout, PeerUnreachable, PeerRefused: there is no connection.
            ClosedError: this endpoint was closed.
        """
        state = self._open.of(peer)
        if state.link is not None:
            return state.link
        if state.dialing is None:
            state.dialing = self._tasks.spawn(self._dial_link(peer))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._result(state.dialing)
        except PeerTimeout:
            raise
        except TimeoutError:
            raise PeerTimeout(f"not connected within {seconds_text(timeout_s)}", peer) from None

    async def _result(self, dialing: asyncio.Task[T]) -> T:
        """The result of a dial. A caller that is cancelled does not end the dial."""
        current = asyncio.current_task()
        try:
            return await asyncio.shield(dialing)
        except asyncio.CancelledError:
            if dialing.cancelled() and current is not None and not current.cancelling():  # by `close`, not our caller
                raise ClosedError("this peer was shut down") from None
            raise
        finally:
            del dialing, current  # they hold their exceptions, whose traceback holds this frame

    async def _dial_link(self, peer: PeerID) -> CallLink:
        state = self._open.of(peer)
        try:
            return await self._greet(await self._dial(peer))
        finally:
            state.dialing = None
            self._open.forget(peer)

    async def _greet(self, connection: Connection) -> CallLink:
        await self._say_hello(connection)
        return self._add_link(connection)

    async def _say_hello(self, connection: Connection, *, lends: bool = False) -> None:
        try:
            await connection.write(pack(Kind.HELLO, Hello(self._me(), lends)))
        except BaseException:
            self._open.drop(connection)
            raise

    async def lend(self, peer: PeerID) -> Connection:
        """Dial a connection for a stream that this peer, which has a link with us, opens. See `Lending`.

        Raises:
            PeerRefused: it has as many streams open to us as it may have.
            PeerTimeout, PeerUnreachable: there is no connection.
        """
        if len(self._open.of(peer).accepted) >= self._limits.streams_per_peer:
            raise PeerRefused("too many connections", peer, code="busy")
        addresses = self._addresses(peer)
        if not addresses:
            raise PeerUnreachable("no address is known", peer)
        connection = self._opened(await self.routes.dial(peer, addresses))
        await self._say_hello(connection, lends=True)
        return connection

    async def link_anew(self, peer: PeerID, silent: Callable[[], bool], rng: random.Random) -> None:
        """Make a new link with a peer that has fallen silent, in place of the links on which it is silent.

        After a cut, TCP tries again ever more rarely, and notices seconds late that the line works again; a new
        connection asks every second. If the peer's machine takes the bytes that we send, the peer is not dialed: its
        line works, and its process stands still.

        Args:
            peer: the silent peer.
            silent: returns whether it is still silent.
            rng: for jitter: a peer that was cut off has many peers to dial, and many dial it.
        """
        stuck, limit_s = list(self._open.of(peer).links), self._limits.dial_timeout_s
        backoff = Backoff(rng, first_s=0.2, max_s=2.0)
        while silent() and any(link.stuck for link in stuck) and not self.routes.shut(peer):
            await asyncio.sleep(backoff.next_s())
            try:
                connection = await self.dials.dial(peer, self._addresses(peer), timeout_s=limit_s)
            except PeerTimeout:
                backoff.reset()
                continue
            except PeerError:
                continue
            if not silent():
                connection.abort()
                return
            link = await self._greet(self._opened(connection))
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await link.heard.wait()
                    sometimes("a peer whose links were stuck is reached by a new one")
                    for old in stuck:
                        if old.stuck:
                            old.abort()  # calls that wait for an answer there fail now, and are made again
                    return

    def _addresses(self, peer: PeerID) -> tuple[Address, ...]:
        if self._only_dials(peer):
            return ()
        worked = (self._worked[peer],) if peer in self._worked else ()
        return tuple(dict.fromkeys(self._told.get(peer, ()) + worked + self._heard.get(peer, ())))

    async def _dial(self, peer: PeerID) -> Connection:
        if self._open.is_mute(peer):
            raise PeerUnreachable(TWO_PROCESSES, peer)
        addresses = self._addresses(peer)
        if (not addresses or self.routes.lends(peer)) and (link := self._open.link(peer)) is not None:
            return await self.lending.borrow(link)
        if not addresses:
            raise PeerUnreachable("no address is known, and it has not dialed us", peer)
        if self.routes.closed(peer, addresses):
            raise PeerUnreachable("it lives, but cannot be reached at the address that it announces", peer)
        return self._opened(await self.routes.dial(peer, addresses))

    def _opened(self, connection: Connection) -> Connection:
        if self._open.closed:
            connection.abort()
            raise ClosedError("this peer was shut down")
        self._open.connections.add(connection)
        peer, host = connection.peer_id, connection.remote_host
        if (worked := next((each for each in self._addresses(peer) if each.host == host), None)) is not None:
            put_last(self._worked, peer, worked, _MAX_CONTACTS)
        return connection

    def _keep_again(self, connection: Connection) -> None:
        with suppress(ClosedError):
            self.keep(self._opened(connection), bulk=False)

    async def stream_connection(self, peer: PeerID, timeout_s: float, *, bulk: bool) -> Connection:
        """A connection for a stream, from the pool or new; when this returns there is a call link too.

        Args:
            peer: the other side.
            timeout_s: the longest time of a dial, seconds.
            bulk: whether megabytes will go on it.

        Raises:
            PeerTimeout, PeerUnreachable, PeerRefused: there is no connection.
            ClosedError: this endpoint was closed.
        """
        await self.link(peer, timeout_s)
        state = self._open.of(peer)
        while (connection := state.take_idle(bulk=bulk)) is not None:
            if not connection.closed:
                return connection
            self._open.drop(connection)
        dialing, state.ahead = state.ahead or self._tasks.spawn(self._dial(peer)), None
        try:
            connection = await self._result(dialing)
        except asyncio.CancelledError:
            sometimes("the caller of a dial is cancelled, and the connection is kept")
            # A dial takes four round trips. The caller no longer needs this connection, but the next stream does.
            dialing.add_done_callback(self._keep)
            raise
        finally:
            del dialing  # it holds its exception, whose traceback holds this frame
        try:
            await self.link(peer, timeout_s)  # it may be gone by now
        except BaseException:
            self._open.drop(connection)
            raise
        return connection

    def dial_ahead(self, peer: PeerID, *, link: bool) -> bool:
        """Dial a connection for the next small stream with a peer, in the background. See `Endpoint.dial_ahead`."""

        def linked(dialed: asyncio.Task[CallLink]) -> None:
            if not dialed.cancelled() and dialed.exception() is None:
                self.dial_ahead(peer, link=False)

        state = self._open.of(peer)
        if not self.contact(peer).addresses:
            self._open.forget(peer)
            return False
        if state.link is None:
            if link and state.dialing is None:
                state.dialing = self._tasks.spawn(self._dial_link(peer))
                state.dialing.add_done_callback(linked)
            self._open.forget(peer)
            return state.dialing is not None
        if state.ahead is not None or len(state.idle) >= self._limits.idle_streams or not all(state.idle.values()):
            return True

        def dialed_late(dialed: asyncio.Task[Connection]) -> None:
            if state.ahead is dialed:  # else a stream took it
                state.ahead = None
                self._keep(dialed)
                self._open.forget(peer)

        state.ahead = self._tasks.spawn(self._dial(peer))
        state.ahead.add_done_callback(dialed_late)
        return True

    def _keep(self, dialed: asyncio.Task[Connection]) -> None:
        if not dialed.cancelled() and dialed.exception() is None:
            self.keep(dialed.result(), bulk=False)
            self._open.forget(dialed.result().peer_id)

    def keep(self, connection: Connection, *, bulk: bool) -> None:
        """Keep a connection for the next stream that we open, if there is room for it."""
        state = self._open.of(connection.peer_id)
        if state.links and not self._open.closed and len(state.idle) < self._limits.idle_streams:
            state.idle[connection] = bulk
        else:
            self._open.drop(connection)
