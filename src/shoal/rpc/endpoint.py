"""The endpoint: every call and every stream of this peer goes through it.

- One call link per peer carries small calls and notes either way, whoever dialed. A peer that only dials (client mode)
  is reached over the link that it made.
- Each stream has a connection of its own, taken from a small pool, so bulk data never delays a call. Before a stream is
  opened there is a call link, whose heartbeat tells when a silent peer is gone; then all its streams are aborted.
- A peer's messages are decoded into the declared type before a handler sees them. A frame that is too long or unknown
  costs that peer its connection. A call whose fields are wrong gets the answer `bad`, one beyond an allowance `busy`.
  None of them raises here.
- Loop thread only. After `close` nothing is left: no task, no connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from shoal.base.clock import Env, seconds_text
from shoal.base.peer import Address, PeerID, site_of
from shoal.base.tasks import Tasks, WhileMoving
from shoal.errors import ClosedError, LocalError, PeerError, PeerProtocolError, PeerTimeout, PeerUnreachable
from shoal.events import PeerDropped, Warned
from shoal.protocol.wire import (
    Contact,
    Message,
    Note,
    Opening,
    OpenStream,
    Request,
    decode,
    encode,
    reply_type,
    stream_types,
)
from shoal.rpc.arrivals import Arrivals
from shoal.rpc.connections import Connections
from shoal.rpc.dialing import Dialer
from shoal.rpc.framing import Kind, Limits, pack
from shoal.rpc.link import LinkRetired
from shoal.rpc.links import Links
from shoal.rpc.serving import Services, tag_of
from shoal.rpc.stream import Stream
from shoal.rpc.trust import Trust
from shoal.transport.base import Connection, Transport

__all__ = ["Endpoint"]

R = TypeVar("R")
Up = TypeVar("Up", bound=Message)
Down = TypeVar("Down", bound=Message)

_logger = logging.getLogger("shoal.rpc")


class Endpoint:
    """Calls and streams of one peer.

    Args:
        transport: how peers are reached; the endpoint owns and closes it.
        env: clock, chance, executor, events.
        limits: what one peer may cost, and heartbeat periods.

    Attributes:
        env, limits: as given.
        clock: our machine's wall clock, and the network's.
        trust: the peers whose word counts on what we cannot see ourselves.
        arrivals: the connections that peers have made to us.
        dials: makes connections, within limits.
    """

    def __init__(self, transport: Transport, env: Env, *, limits: Limits | None = None) -> None:
        self.env, self.limits, self.trust = env, limits or Limits(), Trust()
        self._transport = transport
        self._open, self._tasks = Connections(), Tasks(self._task_failed)
        self._services = Services(self._open, self.limits, tasks=self._tasks, warn=self._warn)
        self._dialer = Dialer(
            transport,
            self._open,
            self.limits,
            me=lambda: self.contact,
            add_link=lambda connection: self._links.add(connection),  # noqa: PLW0108 (each of the two needs the other)
            tasks=self._tasks,
        )
        self._links = Links(
            self._open,
            self._services,
            self._dialer,
            me=self.peer_id,
            trust=self.trust,
            env=env,
            limits=self.limits,
            tasks=self._tasks,
        )
        self.arrivals = Arrivals(
            self._open,
            self._services,
            self._dialer,
            self._links,
            limits=self.limits,
            events=env.events,
            tasks=self._tasks,
        )
        self.clock, self.dials = self._links.clocks.ours, self._dialer.dials
        self._rhythm = self._links.silence.rhythm
        self._withheld = False
        self._reached_at: tuple[Address, ...] = ()
        self._named: tuple[object, Contact] = None, Contact(self.peer_id)  # our contact, and what it is made of

    # ------------------------------------------------------------------------------------------------- what we are

    @property
    def peer_id(self) -> PeerID:
        """Our own identity."""
        return self._transport.peer_id

    @property
    def contact(self) -> Contact:
        """How others reach us; without addresses while they are withheld."""
        if self._withheld:
            return Contact(self.peer_id)
        reached_at, listens_at = self._reached_at, self.listens_at
        named, contact = self._named
        if named != (reached_at, listens_at):  # each look at a run asks several times, and addresses change seldom
            contact = Contact(self.peer_id, tuple(dict.fromkeys((*reached_at, *listens_at)))[:8])
            self._named = (reached_at, listens_at), contact
        return contact

    @property
    def listens_at(self) -> tuple[Address, ...]:
        """The addresses that are announced to others, unless they are withheld."""
        return tuple(self._transport.addresses)

    def withhold(self) -> None:
        """Announce no address from now on: this peer only dials."""
        self._withheld = True

    def announce(self, *reached_at: Address) -> None:
        """Announce where we listen, and before that these addresses, at which others have reached us."""
        self._withheld, self._reached_at = False, reached_at

    @property
    def peers(self) -> tuple[PeerID, ...]:
        """The peers that we have a call link with now."""
        return self._open.linked

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since the start, over all connections."""
        return self._open.traffic

    @property
    def upload_bytes_per_s(self) -> float | None:
        """What this peer can send, bytes per second, as its line was full or is limited; None if this is not known."""
        return self._transport.uplink.bytes_per_s

    @property
    def clock_ahead_s(self) -> float:
        """How far our machine's clock is ahead of those of the connected hosts (median), seconds; 0.0 without any."""
        return self._links.clocks.ahead_s

    @property
    def has_twin(self) -> bool:
        """Whether a peer is, or was, connected with another process that has our identity; it was said."""
        return self._links.twins.has_twin

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._open.closed

    def ask(self, peer: PeerID) -> None:
        """Ask a connected peer for a sign of life, which also tells its time; never waits."""
        self._open.ask(peer)

    async def start(self, *, listen: bool = True) -> None:
        """Begin to accept connections (unless `listen` is False: client mode).

        Raises:
            ConfigError: the address cannot be listened on.
        """
        if listen:
            await self._transport.listen(self.arrivals.accept)

    # ------------------------------------------------------------------------------------------------ what we serve

    def serve(
        self,
        request: type[Request[R]],
        handler: Callable[[PeerID, Any], R | Coroutine[Any, Any, R]],
        *,
        scope: str = "",
    ) -> Callable[[], None]:
        """Answer requests of this type (and `scope`, see `wire.Message.scope`) with `handler(peer, request)`.

        The handler returns a coroutine, which then runs in a task of its own until the caller has stopped waiting. If
        the handler never waits and takes well under a millisecond, it may return the reply itself, which costs much
        less.

        A `PeerError` that the handler raises is told to the caller; anything else is logged and told as "internal".

        Returns:
            A function that ends it.

        Raises:
            ConfigError: this scope is served already; without a scope, the last handler counts.
        """
        return self._services.calls.add(request, scope, handler)

    def take_notes(
        self, kind: type[Message], handler: Callable[[PeerID, Any], None], *, scope: str = ""
    ) -> Callable[[], None]:
        """Call `handler(peer, message)` for each note of this type (and `scope`); it never waits.

        A `PeerError` that it raises costs the peer its link; anything else is logged.

        Returns:
            A function that ends it.

        Raises:
            ConfigError: this scope is served already; without a scope, the last handler counts.
        """
        return self._services.notes.add(kind, scope, handler)

    def serve_stream(
        self, opening: type[Opening[Up, Down]], handler: Callable[..., Awaitable[None]], *, scope: str = ""
    ) -> Callable[[], None]:
        """Run `await handler(stream, opening)` for each stream of this type (and `scope`) that a peer opens.

        When the handler returns, the stream is finished in order (END both ways). If it raises, the stream is given up.

        Returns:
            A function that ends it.

        Raises:
            ConfigError: this scope is served already; without a scope, the last handler counts.
        """
        return self._services.streams.add(opening, scope, handler)

    def serves_stream(self, opening: type[Opening[Up, Down]], *, scope: str = "") -> bool:
        """Whether streams of this type (and `scope`) are served here already."""
        return self._services.streams.has(opening, scope)

    def on_lost(self, callback: Callable[[PeerID, str], None]) -> Callable[[], None]:
        """Call `callback(peer, reason)` whenever a connected peer is gone; returns a function that ends it."""
        return self._links.on_lost(callback)

    def on_linked(self, callback: Callable[[PeerID], None]) -> Callable[[], None]:
        """Call `callback(peer)` whenever a peer is connected that was not; returns a function that ends it."""
        return self._links.on_linked(callback)

    def is_silent(self, peer: PeerID, *, soon: bool = False) -> bool:
        """Whether this peer was asked for a sign of life and gives none (`rhythm`), so that nobody should wait for it.

        Code that waits for the peer calls this every `LOOK_S`: this is also what asks the peer. With `soon`, half a
        second of silence is enough, because giving the peer up wrongly costs little.
        """
        return peer != self.peer_id and self._rhythm.is_silent(peer, asyncio.get_running_loop().time(), soon=soon)

    @property
    def silent(self) -> frozenset[PeerID]:
        """The peers that were found silent and have said nothing since."""
        return self._rhythm.silent(asyncio.get_running_loop().time())

    # ---------------------------------------------------------------------------------------------------- addresses

    def learn(self, contact: Contact) -> None:
        """Remember where a peer listens, by the word of another. The addresses that the peer itself names come first.

        A contact without addresses teaches nothing; addresses of another peer are ignored.
        """
        self._dialer.learn(contact, by_itself=False)

    def contact_of(self, peer: PeerID) -> Contact:
        """What is known of a peer's addresses."""
        return self._dialer.contact(peer)

    def connected(self, peer: PeerID) -> bool:
        """Whether there is a call link now: a call would not dial."""
        return self._open.link(peer) is not None

    def reachable(self, peer: PeerID) -> bool:
        """Whether there is a call link, or an address to dial."""
        return self.connected(peer) or bool(self._dialer.contact(peer).addresses)

    def is_mute(self, peer: PeerID) -> bool:
        """Whether two processes have this peer's key, or ours: as long as both live, it is as if it was not there."""
        return self._open.is_mute(peer)

    def moved(self, contact: Contact) -> None:
        """A peer says that it listens here from now on; nowhere, if it names no address."""
        self._dialer.moved(contact)

    def dialable(self, contact: Contact) -> Contact:
        """The contact, without addresses if dialing that live peer there has failed, or it is mute."""
        return self._dialer.dialable(contact)

    def route_shut(self, peer: PeerID) -> bool:
        """Whether this live peer was dialed twice in vain."""
        return self._dialer.routes.shut(peer)

    def on_route_shut(self, callback: Callable[[PeerID, tuple[Address, ...]], None]) -> None:
        """Call `callback(peer, addresses)` for each live peer that was dialed at these addresses twice in vain."""
        self._dialer.routes.on_shut(callback)

    def hosts_of(self, peer: PeerID) -> tuple[str, str]:
        """The addresses of this machine and of the other one on the call link with a peer; empty without a link."""
        link = self._open.link(peer)
        return (link.connection.local_host, link.connection.remote_host) if link is not None else ("", "")

    def site_of(self, peer: PeerID) -> str:
        """The site that the call link with a peer comes from, for limits that all keys of one owner share."""
        return site_of(self.hosts_of(peer)[1])

    def dial_ahead(self, peer: PeerID, *, link: bool = False) -> bool:
        """Dial a connection for the next small stream with a peer, in the background. Never fails.

        Args:
            peer: a connected peer.
            link: connect to it first if it is not connected.

        Returns:
            Whether the peer is connected, or being dialed.
        """
        return not self.closed and self._dialer.dial_ahead(peer, link=link)

    def drop_idle(self, peer: PeerID) -> None:
        """Close the idle connections with a peer: one of them was dead, so the others may be."""
        if (state := self._open.peers.get(peer)) is not None:
            self._open.drop_all(state.idle)
            self._open.forget(peer)

    # --------------------------------------------------------------------------------------------- calls and streams

    async def call(self, to: Contact | PeerID, request: Request[R], *, timeout_s: float) -> R:
        """Send a request and wait for its reply; dials if there is no link.

        Raises:
            PeerTimeout: no reply within `timeout_s` seconds, dialing included.
            PeerUnreachable: no connection could be made, or it broke.
            PeerRefused: the peer said no; `code` gives the reason.
            PeerProtocolError: the reply is not of the declared type.
            ClosedError: this endpoint is closed, or was before the call was sent.
            LocalError: the peer is this one, or the request is too long.
        """
        peer = self._peer_of(to)
        method, packed = tag_of(type(request)), encode(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._links.silence.watch_calls()
        while True:
            link = self._open.link(peer) or await self._dialer.link(peer, max(deadline - loop.time(), 0.0))
            with suppress(LinkRetired):  # it was idle, and closed while the call was on its way: the next one is fresh
                body = await link.call(method, packed, max(deadline - loop.time(), 0.001))
                break
        try:
            reply: R = decode(body, reply_type(type(request)))
            return reply
        except msgspec.MsgspecError as error:
            self.env.events.emit(PeerDropped(peer=peer, where=method, reason=str(error)))
            link.connection.abort()
            raise PeerProtocolError(f"undecodable reply to {method}: {error}", peer) from error

    def tell(self, peers: Iterable[PeerID], message: Message) -> list[PeerID]:
        """Send a note, which gets no answer, to those of the peers that have a link with us. Never waits, never dials.

        Returns:
            The peers that it was sent to.

        Raises:
            LocalError: the message is too long.
        """
        note, told = Note(tag_of(type(message)), msgspec.Raw(encode(message))), []
        frame = pack(Kind.CALL, note, limits=self.limits)
        for peer in peers:
            if (link := self._open.link(peer)) is not None:
                with suppress(PeerUnreachable):  # it does not read
                    link.tell(frame)
                    told.append(peer)
        return told

    async def open(self, to: Contact | PeerID, opening: Opening[Up, Down], *, timeout_s: float) -> Stream[Up, Down]:
        """Open a stream. If the other side refuses it, the first `recv` says so.

        Raises:
            PeerTimeout, PeerUnreachable, PeerRefused: no connection could be made.
            ClosedError: this endpoint is closed.
            LocalError: the peer is this one, or the opening message is too long.
        """
        peer = self._peer_of(to)
        frame = pack(Kind.OPEN, OpenStream(tag_of(type(opening)), msgspec.Raw(encode(opening))), limits=self.limits)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._dialer.stream_connection(peer, timeout_s, bulk=opening.bulk)
                state = self._open.of(peer)
                state.streams.add(connection)
                connection.bulk = opening.bulk
                self._open.watch(peer)
                stream: Stream[Up, Down] = Stream(
                    connection,
                    stream_types(type(opening))[1],
                    self.limits,
                    lambda reusable: self._stream_released(connection, bulk=opening.bulk, reusable=reusable),
                )
            try:
                async with WhileMoving(timeout_s, lambda: stream.bytes_moved):
                    await connection.write(frame)
            except BaseException:
                stream.abort()
                raise
            return stream
        except PeerTimeout:
            raise
        except TimeoutError:
            raise PeerTimeout(f"no stream within {seconds_text(timeout_s)}", peer) from None

    def _peer_of(self, to: Contact | PeerID) -> PeerID:
        if self.closed:
            raise ClosedError("this peer was shut down")
        if isinstance(to, Contact):
            self.learn(to)
            to = to.peer
        if to == self.peer_id:
            raise LocalError("a peer cannot call itself: name another peer")
        return to

    def _stream_released(self, connection: Connection, *, bulk: bool, reusable: bool) -> None:
        state = self._open.of(connection.peer_id)
        state.streams.discard(connection)
        if reusable:
            self._dialer.keep(connection, bulk=bulk)
        else:
            self._open.drop(connection)
        self._open.watch(connection.peer_id)
        self._open.forget(connection.peer_id)

    # ------------------------------------------------------------------------------------------------------- the end

    def _warn(self, where: str, error: Exception) -> None:
        _logger.error("internal error in %s", where, exc_info=error)
        self.env.events.emit(Warned(where=where, message=f"{type(error).__name__}: {error}"))

    def _task_failed(self, error: BaseException) -> None:
        if not isinstance(error, PeerError | ClosedError):
            self._warn("background task", error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def close(self) -> None:
        """Tell all peers that we leave, close everything. Safe to call twice."""
        if self.closed:
            return
        self._open.close()
        links = [link for state in self._open.peers.values() for link in state.links]
        await asyncio.gather(*(link.close(leaving=True) for link in links))
        for connection in list(self._open.connections):
            self._open.drop(connection)
        await self._tasks.cancel()
        for state in list(self._open.peers.values()):
            for link in list(state.links):
                link.abort()
        await self._transport.close()
        self._open.peers.clear()
