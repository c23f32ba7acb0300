"""The endpoint: every call and every stream of this peer goes through it.

- One call link per peer carries small calls either way, whoever dialed. A peer that only dials (client mode) is reached
  over the link that it made.
- Each stream has a connection of its own, taken from a small pool, so bulk data never delays a call. Before a stream is
  opened there is a call link, whose heartbeat tells when a silent peer is gone; then all its streams are aborted.
- What a peer sends is decoded into the declared type before a handler sees it. What is not decodable, too long or too
  much costs that peer its connection or an answer of `busy`; it never raises here.
- Loop thread only. After `close` nothing is left: no task, no connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from shoal.clock import Env
from shoal.errors import (
    ClosedError,
    LocalError,
    PeerError,
    PeerProtocolError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
)
from shoal.events import PeerConnected, PeerDropped, PeerLost, Warned
from shoal.peer import PeerID
from shoal.rpc.framing import Frame, Kind, Limits, pack, read_frame
from shoal.rpc.link import CallLink, LinkRetired, reply_frame
from shoal.rpc.stream import Stream
from shoal.transport.base import Connection, Transport
from shoal.wire import (
    Call,
    Contact,
    Failure,
    Hello,
    Message,
    Opening,
    OpenStream,
    Reply,
    Request,
    decode,
    encode,
    reply_type,
    stream_types,
)

__all__ = ["Endpoint"]

R = TypeVar("R")
Q = TypeVar("Q", bound=Request[Any])
Up = TypeVar("Up", bound=Message)
Down = TypeVar("Down", bound=Message)

CallHandler = Callable[[PeerID, Any], Awaitable[Any]]
StreamHandler = Callable[[Stream[Any, Any], Any], Awaitable[None]]

_Handler = TypeVar("_Handler")

_MAX_CONTACTS = 8192
_OPEN_TIMEOUT_S = 10.0
_MAX_SERVING_S = 600.0
"""No call is served for longer, whatever its caller asks for."""

_logger = logging.getLogger("shoal.rpc")


@dataclass(slots=True)
class _Served(Generic[_Handler]):
    """A message type that is served, with one handler for each scope."""

    kind: type[Any]
    handlers: dict[str, _Handler]


class _Peer:
    """What is open between us and one peer."""

    __slots__ = ("dialing", "idle", "inbound", "links", "streams")

    def __init__(self) -> None:
        self.links: list[CallLink] = []
        self.dialing: asyncio.Task[CallLink] | None = None
        self.streams: set[Connection] = set()
        self.inbound = 0
        self.idle: list[Connection] = []

    @property
    def link(self) -> CallLink | None:
        """A link that can carry a call."""
        return next((link for link in self.links if not link.closed), None)

    @property
    def empty(self) -> bool:
        return not (self.links or self.dialing or self.streams or self.idle)


class Endpoint:
    """Calls and streams of one peer.

    Args:
        transport: how peers are reached; the endpoint owns and closes it.
        env: clock, chance, executor, events.
        limits: what one peer may cost, and heartbeat periods.
    """

    def __init__(self, transport: Transport, env: Env, *, limits: Limits | None = None) -> None:
        self.env = env
        self.limits = limits or Limits()
        self._transport = transport
        self._peers: dict[PeerID, _Peer] = {}
        self._contacts: dict[PeerID, Contact] = {}
        self._calls: dict[str, _Served[CallHandler]] = {}
        self._streams: dict[str, _Served[StreamHandler]] = {}
        self._lost_callbacks: list[Callable[[PeerID, str], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._closed_traffic = (0, 0)
        self._connections: set[Connection] = set()

    # ------------------------------------------------------------------------------------------------- what we are

    @property
    def peer_id(self) -> PeerID:
        """Our own identity."""
        return self._transport.peer_id

    @property
    def contact(self) -> Contact:
        """How others reach us."""
        return Contact(self.peer_id, tuple(self._transport.addresses)[:8])

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    @property
    def peers(self) -> tuple[PeerID, ...]:
        """The peers that we have a call link with now."""
        return tuple(peer for peer, state in self._peers.items() if state.link is not None)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since the start, over all connections."""
        sent, received = self._closed_traffic
        for connection in self._connections:
            sent, received = sent + connection.bytes_sent, received + connection.bytes_received
        return sent, received

    def clock_offset_s(self, peer: PeerID) -> float:
        """How far the peer's wall clock is ahead of ours, as last estimated; 0.0 if unknown."""
        state = self._peers.get(peer)
        return state.link.clock_offset_s if state is not None and state.link is not None else 0.0

    async def start(self, *, listen: bool = True) -> None:
        """Begin to accept connections (unless `listen` is False: client mode).

        Raises:
            ConfigError: the address cannot be listened on.
        """
        if listen:
            await self._transport.listen(self._accept)

    # ------------------------------------------------------------------------------------------------ what we serve

    def serve(
        self, request: type[Request[R]], handler: Callable[[PeerID, Any], Awaitable[R]], *, scope: str = ""
    ) -> Callable[[], None]:
        """Answer requests of this type (and `scope`, see `wire.Message.scope`) with `await handler(peer, request)`.

        A `PeerError` that the handler raises is told to the caller; anything else is logged and told as "internal".

        Returns:
            A function that ends it.
        """
        return _register(self._calls, request, scope, handler)

    def serve_stream(
        self, opening: type[Opening[Up, Down]], handler: Callable[..., Awaitable[None]], *, scope: str = ""
    ) -> Callable[[], None]:
        """Run `await handler(stream, opening)` for each stream of this type (and `scope`) that a peer opens.

        When the handler returns, the stream is finished in order (END both ways); when it raises, given up.

        Returns:
            A function that ends it.
        """
        return _register(self._streams, opening, scope, handler)

    def on_lost(self, callback: Callable[[PeerID, str], None]) -> Callable[[], None]:
        """Call `callback(peer, reason)` whenever a connected peer is gone; returns a function that ends it."""
        self._lost_callbacks.append(callback)

        def unsubscribe() -> None:
            with suppress(ValueError):
                self._lost_callbacks.remove(callback)

        return unsubscribe

    # ---------------------------------------------------------------------------------------------------- addresses

    def learn(self, contact: Contact) -> None:
        """Remember where a peer listens. A contact without addresses teaches nothing; foreign addresses are ignored."""
        addresses = tuple(address for address in contact.addresses if address.peer_id == contact.peer)
        if addresses and contact.peer != self.peer_id:
            self._contacts.pop(contact.peer, None)
            self._contacts[contact.peer] = Contact(contact.peer, addresses)
            if len(self._contacts) > _MAX_CONTACTS:
                self._contacts.pop(next(iter(self._contacts)))

    def contact_of(self, peer: PeerID) -> Contact:
        """What is known of a peer's addresses."""
        return self._contacts.get(peer) or Contact(peer)

    def connected(self, peer: PeerID) -> bool:
        """Whether there is a call link now: a call would not dial."""
        state = self._peers.get(peer)
        return state is not None and state.link is not None

    def reachable(self, peer: PeerID) -> bool:
        """Whether there is a call link, or an address to dial."""
        return self.connected(peer) or peer in self._contacts

    # --------------------------------------------------------------------------------------------- calls and streams

    async def call(self, to: Contact | PeerID, request: Request[R], *, timeout_s: float) -> R:
        """Send a request and wait for its reply; dials if there is no link.

        Raises:
            PeerTimeout: not done within `timeout_s` seconds, dialing included.
            PeerUnreachable: no connection, or it broke.
            PeerRefused: the peer said no; `code` says how.
            PeerProtocolError: the reply is not of the declared type.
            ClosedError: this endpoint is closed, or was before the call was sent.
            LocalError: the peer is this one, or the request is too long.
        """
        peer = self._peer_of(to)
        method, packed = _tag(type(request)), encode(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            link = await self._link(peer, max(deadline - loop.time(), 0.0))
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

    async def open(self, to: Contact | PeerID, opening: Opening[Up, Down], *, timeout_s: float) -> Stream[Up, Down]:
        """Open a stream. The other side may still refuse it: that shows at the first `recv`.

        Raises:
            PeerTimeout, PeerUnreachable, PeerRefused: no connection could be made.
            ClosedError: this endpoint is closed.
            LocalError: the peer is this one, or the opening message is too long.
        """
        peer = self._peer_of(to)
        frame = pack(Kind.OPEN, OpenStream(_tag(type(opening)), msgspec.Raw(encode(opening))), limits=self.limits)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._stream_connection(peer, timeout_s)
                state = self._state(peer)
                state.streams.add(connection)
                self._watch(peer)
                stream: Stream[Up, Down] = Stream(
                    connection,
                    stream_types(type(opening))[1],
                    self.limits,
                    lambda reusable: self._stream_released(connection, reusable=reusable),
                )
                try:
                    await connection.write(frame)
                except BaseException:
                    stream.abort()
                    raise
                return stream
        except PeerTimeout:
            raise
        except TimeoutError:
            raise PeerTimeout(f"no stream within {timeout_s:g} s", peer) from None

    def _peer_of(self, to: Contact | PeerID) -> PeerID:
        if self._closed:
            raise ClosedError("this peer was shut down")
        if isinstance(to, Contact):
            self.learn(to)
            to = to.peer
        if to == self.peer_id:
            raise LocalError("a peer does not call itself")
        return to

    # ------------------------------------------------------------------------------------------------------- dialing

    async def _link(self, peer: PeerID, timeout_s: float) -> CallLink:
        state = self._state(peer)
        if state.link is not None:
            return state.link
        if state.dialing is None:
            state.dialing = self._spawn(self._dial_link(peer))
        dialing, current = state.dialing, asyncio.current_task()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dialing)
        except PeerTimeout:
            raise
        except TimeoutError:
            raise PeerTimeout(f"not connected within {timeout_s:g} s", peer) from None
        except asyncio.CancelledError:
            if dialing.cancelled() and current is not None and not current.cancelling():  # by `close`, not our caller
                raise ClosedError("this peer was shut down") from None
            raise

    async def _dial_link(self, peer: PeerID) -> CallLink:
        state = self._state(peer)
        try:
            connection = await self._dial(peer)
            await connection.write(pack(Kind.HELLO, Hello(self.contact)))
            return self._add_link(connection)
        finally:
            state.dialing = None
            self._forget(peer)

    async def _dial(self, peer: PeerID) -> Connection:
        contact = self._contacts.get(peer)
        if contact is None:
            raise PeerUnreachable("no address is known, and it has not dialed us", peer)
        connection = await self._transport.dial(peer, contact.addresses, timeout_s=self.limits.dial_timeout_s)
        if self._closed:
            connection.abort()
            raise ClosedError("this peer was shut down")
        self._connections.add(connection)
        return connection

    async def _stream_connection(self, peer: PeerID, timeout_s: float) -> Connection:
        """A connection for a stream, from the pool or new; when this returns there is a call link too."""
        await self._link(peer, timeout_s)
        idle = self._state(peer).idle
        while idle:
            connection = idle.pop()
            if not connection.closed:
                return connection
            self._drop(connection)
        connection = await self._dial(peer)
        try:
            await self._link(peer, timeout_s)  # it may be gone by now
        except BaseException:
            self._drop(connection)
            raise
        return connection

    # ----------------------------------------------------------------------------------------------------- accepting

    def _accept(self, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        self._connections.add(connection)
        self._spawn(self._serve_connection(connection))

    async def _serve_connection(self, connection: Connection) -> None:
        is_link = False
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                frame = await read_frame(connection, self.limits)
            if frame.kind is Kind.HELLO:
                hello = decode(frame.header, Hello)
                if hello.contact.peer == connection.peer_id:
                    self.learn(hello.contact)
                self._add_link(connection)
                is_link = True  # and reads on by itself
                return
            while await self._serve_stream(connection, frame):
                frame = await read_frame(connection, self.limits)
        except TimeoutError:
            pass  # said nothing: dropped below
        except PeerUnreachable:
            pass  # the dialer closed an idle stream connection, as it may
        except (PeerProtocolError, msgspec.MsgspecError) as error:
            self.env.events.emit(PeerDropped(peer=connection.peer_id, where="rpc", reason=str(error)))
        finally:
            if not is_link:
                self._drop(connection)

    async def _serve_stream(self, connection: Connection, frame: Frame) -> bool:
        """Serve one stream; True if the connection can carry another."""
        peer = connection.peer_id
        if frame.kind is not Kind.OPEN:
            raise PeerProtocolError(f"{frame.kind.name} frame where a stream should begin", peer)
        opening = decode(frame.header, OpenStream)
        reusable = False

        def released(ok: bool) -> None:
            nonlocal reusable
            reusable = ok

        served = self._streams.get(opening.method)
        kind = stream_types(served.kind)[0] if served else Message
        stream: Stream[Any, Any] = Stream(connection, kind, self.limits, released)
        if served is None:
            await stream.fail("unknown", f"no stream {opening.method[:200]} is served here")
            return False
        try:
            message = decode(opening.body, served.kind)
        except msgspec.MsgspecError as error:
            await stream.fail("bad", str(error))
            raise
        handler = served.handlers.get(message.scope)
        state = self._state(peer)
        if handler is None:
            await stream.fail("unknown", f"no stream {opening.method} {message.scope[:200]} is served here")
        elif state.inbound >= self.limits.streams_per_peer:
            await stream.fail("busy", f"more than {self.limits.streams_per_peer} streams at once")
        else:
            state.inbound += 1
            state.streams.add(connection)
            self._watch(peer)
            try:
                await self._run_stream_handler(stream, handler, message)
            finally:
                state.inbound -= 1
                state.streams.discard(connection)
                self._watch(peer)
        self._forget(peer)
        return reusable and not connection.closed

    async def _run_stream_handler(self, stream: Stream[Any, Any], handler: StreamHandler, opening: Message) -> None:
        try:
            await handler(stream, opening)
            if not stream.closed:
                async with asyncio.timeout(_OPEN_TIMEOUT_S):
                    await stream.finish()
        except PeerRefused as refusal:
            await stream.fail(_told(refusal), refusal.message)
        except PeerProtocolError as error:  # the handler knows best what else to do about it
            await stream.fail("bad", error.message)
        except (PeerError, TimeoutError) as error:
            _logger.debug("stream %s given up: %s", type(opening).__name__, error)
        except ClosedError:
            await stream.fail("refused", "shutting down")
        except Exception as error:  # noqa: BLE001 (a handler's bug is told, and costs one stream)
            self._warn(f"stream {type(opening).__name__}", error)
            await stream.fail("internal", type(error).__name__)
        finally:
            stream.abort()

    def serve_call(self, link: CallLink, call: Call) -> None:
        """Serve an incoming call (for `CallLink`)."""
        served = self._calls.get(call.method)
        if served is None:
            link.post(Failure(call.id, "unknown", f"no method {call.method[:200]!r} is served here"))
        elif link.serving >= self.limits.calls_per_peer:
            link.post(Failure(call.id, "busy", f"more than {self.limits.calls_per_peer} calls at once"))
        else:
            link.serving += 1
            self._spawn(self._run_call_handler(link, call, served))

    async def _run_call_handler(self, link: CallLink, call: Call, served: _Served[CallHandler]) -> None:
        # Not a number, or below 0, is 0.
        limit = asyncio.timeout(min(call.timeout_s, _MAX_SERVING_S) if call.timeout_s > 0 else 0.0)
        answer: Reply | Failure
        try:
            async with limit:
                answer = await self._answer(link.peer_id, call, served)
            if not link.closed:
                link.post(answer)
        except PeerUnreachable:
            pass  # it does not read
        except Exception as error:  # noqa: BLE001 (a handler's bug is told, and costs one call)
            if isinstance(error, TimeoutError) and limit.expired():
                return  # the caller has stopped waiting
            self._warn(f"call {call.method}", error)
            with suppress(PeerUnreachable):
                link.post(Failure(call.id, "internal", type(error).__name__))
        finally:
            link.serving -= 1
            link.used()

    async def _answer(self, peer: PeerID, call: Call, served: _Served[CallHandler]) -> Reply | Failure:
        try:
            request = decode(call.body, served.kind)
        except msgspec.MsgspecError as error:
            return Failure(call.id, "bad", str(error)[:1000])
        handler = served.handlers.get(request.scope)
        if handler is None:
            return Failure(call.id, "unknown", f"{call.method} {request.scope[:200]} is not served here")
        try:
            return reply_frame(call.id, await handler(peer, request))
        except PeerRefused as refusal:
            return Failure(call.id, _told(refusal), refusal.message[:1000])
        except PeerError as error:
            code = "bad" if isinstance(error, PeerProtocolError) else "refused"
            return Failure(call.id, code, error.message[:1000])
        except ClosedError:
            return Failure(call.id, "refused", "shutting down")

    # -------------------------------------------------------------------------------------------------- bookkeeping

    def _state(self, peer: PeerID) -> _Peer:
        return self._peers.setdefault(peer, _Peer())

    def _forget(self, peer: PeerID) -> None:
        if (state := self._peers.get(peer)) and state.empty:
            del self._peers[peer]

    def has_streams(self, peer: PeerID) -> bool:
        """Whether a stream with this peer is open (for `CallLink`)."""
        state = self._peers.get(peer)
        return bool(state and state.streams)

    def wall_time(self) -> float:
        """Wall clock, seconds (for `CallLink`)."""
        return self.env.clock.time()

    def _watch(self, peer: PeerID) -> None:
        """A stream with this peer began or ended."""
        if (state := self._peers.get(peer)) is not None:
            for link in state.links:
                link.used()
                link.watch()

    def _add_link(self, connection: Connection) -> CallLink:
        state = self._state(connection.peer_id)
        link = CallLink(connection, self, self.limits, self._spawn)
        state.links.append(link)
        link.start()
        if len(state.links) == 1:
            self.env.events.emit(PeerConnected(peer=connection.peer_id))
        return link

    def link_closed(self, link: CallLink, error: PeerError, expected: bool) -> None:
        """A call link is gone (for `CallLink`)."""
        peer = link.peer_id
        self._count(link.connection)
        state = self._state(peer)
        with suppress(ValueError):
            state.links.remove(link)
        if isinstance(error, PeerProtocolError):
            self.env.events.emit(PeerDropped(peer=peer, where="rpc", reason=error.message))
        if not state.links and not self._closed:
            if not expected:
                self._peer_lost(peer, error.message)
            elif state.streams and peer in self._contacts:
                self._spawn(self._link_again(peer))
            else:
                self._drop_all(state.idle)
        self._forget(peer)

    async def _link_again(self, peer: PeerID) -> None:
        """The other side thought that its link with us was idle, but there are streams, which need its heartbeat."""
        try:
            await self._link(peer, self.limits.dial_timeout_s)
        except PeerError as error:
            self._peer_lost(peer, error.message)

    def _peer_lost(self, peer: PeerID, reason: str) -> None:
        state = self._state(peer)
        self._drop_all(state.streams)
        self._drop_all(state.idle)
        self._forget(peer)
        self.env.events.emit(PeerLost(peer=peer, reason=reason))
        for callback in list(self._lost_callbacks):
            callback(peer, reason)

    def _drop_all(self, connections: set[Connection] | list[Connection]) -> None:
        dropped = list(connections)
        connections.clear()
        for connection in dropped:
            self._drop(connection)

    def _stream_released(self, connection: Connection, *, reusable: bool) -> None:
        state = self._state(connection.peer_id)
        state.streams.discard(connection)
        if reusable and state.links and not self._closed and len(state.idle) < self.limits.idle_streams:
            state.idle.append(connection)
        else:
            self._drop(connection)
        self._watch(connection.peer_id)
        self._forget(connection.peer_id)

    def _count(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            sent, received = self._closed_traffic
            self._closed_traffic = (sent + connection.bytes_sent, received + connection.bytes_received)

    def _drop(self, connection: Connection) -> None:
        connection.abort()
        self._count(connection)

    def _warn(self, where: str, error: Exception) -> None:
        _logger.error("internal error in %s", where, exc_info=error)
        self.env.events.emit(Warned(where=where, message=f"{type(error).__name__}: {error}"))

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, PeerError | ClosedError):
            self._warn("background task", error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def close(self) -> None:
        """Tell all peers that we leave, close everything. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        links = [link for state in self._peers.values() for link in state.links]
        await asyncio.gather(*(link.close(leaving=True) for link in links))
        for connection in list(self._connections):
            self._drop(connection)
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for state in list(self._peers.values()):
            for link in list(state.links):
                link.abort()
        await self._transport.close()
        self._peers.clear()


def _register(
    table: dict[str, _Served[_Handler]], kind: type[Any], scope: str, handler: _Handler
) -> Callable[[], None]:
    served = table.setdefault(_tag(kind), _Served(kind, {}))
    served.handlers[scope] = handler

    def unregister() -> None:
        if served.handlers.get(scope) is handler:
            del served.handlers[scope]

    return unregister


def _told(refusal: PeerRefused) -> str:
    """The code that a handler's refusal is told with: the others speak of the endpoint, not of handlers."""
    return "busy" if refusal.code == "busy" else "refused"


def _tag(kind: type[Any]) -> str:
    tag = kind.__struct_config__.tag
    return str(tag)
