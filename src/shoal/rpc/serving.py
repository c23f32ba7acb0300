"""The handlers of calls, notes and streams, and the answers to a peer when a handler cannot answer.

A peer's message is decoded into the declared type before a handler sees it. A handler's `PeerError` is told to the
peer. Any other exception is a bug here: it is logged, told as "internal", and costs one call or stream. Notes have no
answer: a peer that sends a bad one is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from shoal.base.peer import PeerID
from shoal.base.tasks import Tasks
from shoal.errors import ClosedError, ConfigError, PeerError, PeerProtocolError, PeerRefused, PeerUnreachable
from shoal.protocol.wire import Call, Failure, Message, Note, OpenStream, Reply, decode, stream_types
from shoal.rpc.allowance import reply_cost
from shoal.rpc.connections import Connections
from shoal.rpc.framing import Frame, Kind, Limits
from shoal.rpc.link import CallLink, reply_frame
from shoal.rpc.stream import Stream
from shoal.rpc.twins import TWO_PROCESSES
from shoal.transport.base import Connection

__all__ = ["CallHandler", "NoteHandler", "Services", "StreamHandler", "tag_of"]

CallHandler = Callable[[PeerID, Any], Any]
"""A function that returns the reply, or a coroutine that returns it."""

NoteHandler = Callable[[PeerID, Any], None]

StreamHandler = Callable[[Stream[Any, Any], Any], Awaitable[None]]

_Handler = TypeVar("_Handler")

_FINISH_TIMEOUT_S = 10.0
"""The longest time for the orderly end of a stream."""

_MAX_SERVING_S = 600.0
"""No call is served for longer, whatever its caller asks for."""

_logger = logging.getLogger("shoal.rpc")


@dataclass(slots=True)
class _Served(Generic[_Handler]):
    """A message type that is served, with one handler for each scope."""

    kind: type[Any]
    handlers: dict[str, _Handler]


class Table(dict[str, _Served[_Handler]]):
    """The message types that are served in one way, by their names on the wire."""

    def add(self, kind: type[Any], scope: str, handler: _Handler) -> Callable[[], None]:
        """Serve this type and scope; returns a function that ends it.

        Raises:
            ConfigError: this scope is served already.
        """
        served = self.setdefault(tag_of(kind), _Served(kind, {}))
        if scope and scope in served.handlers:  # a name that users give; without one the last handler counts
            raise ConfigError(
                f"{scope!r} is in use on this DHT already: shut the older one down (in a notebook, before a cell is "
                "run again), or give each user of it another name"
            )
        served.handlers[scope] = handler

        def remove() -> None:
            if served.handlers.get(scope) is handler:
                del served.handlers[scope]

        return remove

    def has(self, kind: type[Any], scope: str) -> bool:
        """Whether this type and scope are served."""
        return (served := self.get(tag_of(kind))) is not None and scope in served.handlers


class Services:
    """The handlers of one endpoint.

    Args:
        connections: the open connections.
        limits: what one peer may cost.
        tasks: the endpoint's.
        warn: called for a bug in a handler, with its place and the exception.

    Attributes:
        calls: the handlers of calls.
        notes: the handlers of notes.
        streams: the handlers of streams.
    """

    def __init__(
        self,
        connections: Connections,
        limits: Limits,
        *,
        tasks: Tasks,
        warn: Callable[[str, Exception], None],
    ) -> None:
        self._open, self._limits, self._tasks, self._warn = connections, limits, tasks, warn
        self.calls, self.notes, self.streams = Table[CallHandler](), Table[NoteHandler](), Table[StreamHandler]()

    # ------------------------------------------------------------------------------------------------------- streams

    async def serve_stream(self, connection: Connection, frame: Frame) -> bool:
        """Serve one stream; True if the connection can carry another.

        Raises:
            PeerProtocolError, msgspec.MsgspecError: the peer does not begin a stream in order.
        """
        peer = connection.peer_id
        if frame.kind is not Kind.OPEN:
            raise PeerProtocolError(f"{frame.kind.name} frame where a stream should begin", peer)
        opening = decode(frame.header, OpenStream)
        reusable = False

        def released(ok: bool) -> None:
            nonlocal reusable
            reusable = ok

        served = self.streams.get(opening.method)
        kind = stream_types(served.kind)[0] if served else Message
        stream: Stream[Any, Any] = Stream(connection, kind, self._limits, released)
        if self._open.is_mute(peer):
            await stream.fail("refused", TWO_PROCESSES)
            return False
        if served is None:
            await stream.fail("unknown", f"no stream {opening.method[:200]} is served here")
            return False
        try:
            message = decode(opening.body, served.kind)
        except msgspec.MsgspecError as error:
            await stream.fail("bad", str(error))
            raise
        handler = served.handlers.get(message.scope)
        state = self._open.of(peer)
        if handler is None:
            await stream.fail("unknown", f"no stream {opening.method} {message.scope[:200]} is served here")
        elif state.inbound >= self._limits.streams_per_peer:
            await stream.fail("busy", f"more than {self._limits.streams_per_peer} streams at once")
        else:
            state.inbound += 1
            state.streams.add(connection)
            connection.bulk = message.bulk
            self._open.watch(peer)
            try:
                await self._run_stream_handler(stream, handler, message)
            finally:
                state.inbound -= 1
                state.streams.discard(connection)
                self._open.watch(peer)
        self._open.forget(peer)
        return reusable and not connection.closed

    async def _run_stream_handler(self, stream: Stream[Any, Any], handler: StreamHandler, opening: Message) -> None:
        try:
            await handler(stream, opening)
            if not stream.closed:
                async with asyncio.timeout(_FINISH_TIMEOUT_S):
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

    # --------------------------------------------------------------------------------------------------------- calls

    def serve_call(self, link: CallLink, call: Call) -> None:
        """Serve an incoming call: at once, or in a task if the handler wants to wait."""
        served = self.calls.get(call.method)
        if self._open.is_mute(link.peer_id):
            _post(link, Failure(call.id, "refused", TWO_PROCESSES))
            return
        if served is None:
            link.post(Failure(call.id, "unknown", f"no method {call.method[:200]!r} is served here"))
            return
        if link.serving >= self._limits.calls_per_peer:
            link.post(Failure(call.id, "busy", f"more than {self._limits.calls_per_peer} calls at once"))
            return
        try:
            request = decode(call.body, served.kind)
        except msgspec.MsgspecError as error:
            _post(link, Failure(call.id, "bad", str(error)[:1000]))
            return
        handler = served.handlers.get(request.scope)
        if handler is None:
            _post(link, Failure(call.id, "unknown", f"{call.method} {request.scope[:200]} is not served here"))
            return
        try:
            answer = handler(link.peer_id, request)
            if asyncio.iscoroutine(answer):
                link.serving += 1
                task = self._tasks.spawn(self._wait_for_answer(link, call, answer))
                task.add_done_callback(lambda _: answer.close())  # it may have been cancelled before it began
            else:
                self._reply(link, reply_frame(call.id, answer))
        except Exception as error:  # noqa: BLE001 (the fault of one call)
            _post(link, self._failure(call, error))

    def take_note(self, peer: PeerID, note: Note) -> None:
        """Take an incoming note. If no handler takes it, it is ignored: the peer cannot know that.

        Raises:
            PeerProtocolError: the note cannot be decoded, or its handler says that it breaks a rule.
        """
        if (served := self.notes.get(note.method)) is None or self._open.is_mute(peer):
            return
        try:
            message = decode(note.body, served.kind)
            if (handler := served.handlers.get(message.scope)) is not None:
                handler(peer, message)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"undecodable {note.method}: {error}", peer) from error
        except PeerError as error:
            raise PeerProtocolError(f"{note.method}: {error.message}", peer) from error
        except Exception as error:  # noqa: BLE001 (the fault of one note)
            self._warn(f"note {note.method}", error)

    async def _wait_for_answer(self, link: CallLink, call: Call, answer: Coroutine[Any, Any, Any]) -> None:
        limit = asyncio.timeout(min(call.timeout_s, _MAX_SERVING_S))
        try:
            async with limit:
                reply = reply_frame(call.id, await answer)
            if not link.closed:
                self._reply(link, reply)
        except Exception as error:  # noqa: BLE001 (the fault of one call)
            if isinstance(error, TimeoutError) and limit.expired():
                return  # the caller has stopped waiting
            if not link.closed:
                _post(link, self._failure(call, error))
        finally:
            link.serving -= 1
            link.used()

    def _reply(self, link: CallLink, reply: Reply) -> None:
        _post(link, reply)
        link.spend(reply_cost(len(reply.body)))  # the effect of a long one shows when the peer's next message comes

    def _failure(self, call: Call, error: Exception) -> Failure:
        """The answer to the caller for an exception of a handler."""
        if isinstance(error, PeerRefused):
            return Failure(call.id, _told(error), error.message[:1000])
        if isinstance(error, PeerError):
            code = "bad" if isinstance(error, PeerProtocolError) else "refused"
            return Failure(call.id, code, error.message[:1000])
        if isinstance(error, ClosedError):
            return Failure(call.id, "refused", "shutting down")
        self._warn(f"call {call.method}", error)
        return Failure(call.id, "internal", type(error).__name__)


def _post(link: CallLink, answer: Reply | Failure) -> None:
    with suppress(PeerUnreachable):  # it does not read
        link.post(answer)


def _told(refusal: PeerRefused) -> str:
    """The code with which a handler's refusal is told. The other codes speak of the endpoint, not of handlers."""
    return "busy" if refusal.code == "busy" else "refused"


def tag_of(kind: type[Any]) -> str:
    """The name of a message type on the wire."""
    tag = kind.__struct_config__.tag
    return str(tag)
