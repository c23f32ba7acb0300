"""Peers over TCP and TLS 1.3: listening, dialing, limits.

`connection` is one connection, `layers` its layers (`tls`, then `sealed` or `clear`), `handshake` proves identities,
`certificate` has the TLS settings, `sockets` the sockets; here connections are made, counted and closed. Strangers are
cheap: at most `max_unauthenticated` connections have not proved who they are, each for at most `auth_timeout_s`. When
one more arrives, the oldest of the host that holds most of them goes: closing the new one instead would let a few
silent connections a second keep every good peer out.

Invariant: after `close` there is no task, no socket and no timer of this transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from shoal.base.clock import seconds_text
from shoal.base.peer import Address, PeerID, site_of
from shoal.base.warning_names import named
from shoal.errors import (
    ClosedError,
    ConfigError,
    LocalError,
    PeerError,
    PeerProtocolError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
)
from shoal.protocol.identity import Identity
from shoal.protocol.wire import PROTOCOL_VERSIONS
from shoal.transport.base import Acceptor
from shoal.transport.certificate import client_context, server_context
from shoal.transport.connection import TcpConnection
from shoal.transport.handshake import OTHER_VERSION, Versions, greet_as_client, greet_as_server
from shoal.transport.layers import Scratch
from shoal.transport.sockets import (
    NO_ADDRESS,
    accept,
    all_interfaces,
    host_towards,
    is_loopback,
    new_socket,
    open_files_limit,
    outside_host,
    resolve,
    takes_both_families,
)
from shoal.transport.uplink import Uplink
from shoal.transport.upload_limit import UploadLimit

__all__ = ["TcpLimits", "TcpTransport"]

_logger = logging.getLogger(__name__)

_BACKLOG = 512
_ACCEPT_PAUSE_S = 0.1
_LEAST_FILES = 64
_LOOPBACK = "127.0.0.1"
_RESOLVE_S = 3.0
_STAGGER_S = 0.5
"""The next address of a peer is tried so long after the one before, beside it (as in RFC 8305)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpLimits:
    """The limits on what others may ask of a `TcpTransport`.

    Attributes:
        max_unauthenticated: connections that have not proved who they are; at most a quarter of `max_connections`.
        auth_timeout_s: for the TLS handshake and both proofs together.
        max_connections_per_peer: connections with one peer, counted both ways. More are refused when the peer dials.
        max_connections: connections with all peers, counted both ways. At most three fifths of the files that this
            process may open (`ulimit -n`, at least 64): the rest is the program's. When a peer dials and the limit is
            reached, the host that has most connections loses the one that has carried least.
    """

    max_unauthenticated: int = 256
    auth_timeout_s: float = 5.0
    max_connections_per_peer: int = 96
    max_connections: int = 2048

    def within(self, files: int) -> TcpLimits:
        """The limits that fit into so many open files.

        Raises:
            ConfigError: these are too few: even in a small swarm others would wait for this peer in vain.
        """
        if files < _LEAST_FILES:
            raise ConfigError(
                f"this process may open only {files} files (`ulimit -n`), and needs {_LEAST_FILES} at least: 8 for "
                "each peer that it trains with. Raise the limit first, say by `ulimit -n 4096`"
            )
        most = min(self.max_connections, files * 3 // 5)
        return replace(self, max_connections=most, max_unauthenticated=min(self.max_unauthenticated, max(4, most // 4)))

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)!r}")


class TcpTransport:
    """A `shoal.transport.base.Transport` over TCP and TLS 1.3. Used from the loop thread only.

    Args:
        identity: our key.
        host: where to listen: an IP address or name of this machine; `0.0.0.0` or `::` for all its interfaces. None:
            the address that this machine uses towards the first of `towards` on another machine; the loopback, if there
            is none.
        port: where to listen; 0 takes any free port.
        towards: addresses of peers that this one is going to join.
        announce_host: the host that others should dial, if that is not `host` (behind a port forwarding, or for a
            public name). By default `host`, or for all interfaces the address that this machine uses towards the first
            peer that it dials, until then towards the outside.
        announce_port: the port that others should dial; None or 0: the port on which we listen.
        client_mode: never listen, only dial.
        protocol_versions: lowest and highest protocol version that this side speaks.
        limits: the limits on what others may cost us.
        encrypt: False sends data as it is to peers that also have False: only for networks where nobody can listen or
            meddle. Identities are proved all the same.
        upload_limit: bytes per second of all that is sent; None for no limit.

    Attributes:
        peer_id: our own identity.
        addresses: where others can dial us; empty before `listen` and in client mode.
        uplink: this peer's line up.

    Raises:
        ConfigError: an argument is wrong, or this process may open too few files.
    """

    def __init__(  # noqa: PLR0913 (keyword-only, and each of its own)
        self,
        identity: Identity,
        *,
        host: str | None = None,
        port: int = 0,
        towards: Sequence[Address] = (),
        announce_host: str | None = None,
        announce_port: int | None = None,
        client_mode: bool = False,
        protocol_versions: tuple[int, int] = PROTOCOL_VERSIONS,
        limits: TcpLimits | None = None,
        encrypt: bool = True,
        upload_limit: UploadLimit | None = None,
    ) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ConfigError(f"port must be a number within 0..65535, got {port!r}")
        if host is not None and (not host or not isinstance(host, str)):
            raise ConfigError(f"host must be an IP address or a name, got {host!r}")
        if isinstance(announce_port, bool) or not isinstance(announce_port or 0, int):
            raise ConfigError(f"announce_port must be a number within 0..65535, got {announce_port!r}")
        self._versions = Versions(*protocol_versions)
        if not 1 <= self._versions.lowest <= self._versions.highest <= 65535:
            raise ConfigError(f"protocol_versions must be (lowest, highest), got {protocol_versions!r}")
        if announce_host is not None or announce_port:
            try:
                Address(announce_host or "127.0.0.1", announce_port or port or 1, identity.peer_id)
            except ConfigError as error:
                raise ConfigError(f"announce_host or announce_port: {error}") from None
        self._identity, self._host, self._port = identity, host or _LOOPBACK, port
        self._towards = tuple(towards) if host is None else ()
        self._announce_host, self._announce_port = announce_host, announce_port
        self._client_mode, self._clear = client_mode, not encrypt
        self._limits = (limits or TcpLimits()).within(open_files_limit())
        self._client_context = client_context()
        self._scratch = Scratch()
        self._alive: set[TcpConnection] = set()
        self.uplink = Uplink(self._alive, upload_limit)
        self._pending: dict[TcpConnection, str] = {}
        self._resolving: set[str] = set()  # names that the resolver has not found, or not yet
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: list[socket.socket] = []
        self.peer_id, self.addresses = identity.peer_id, tuple[Address, ...]()
        self._guessed = announce_host is None and all_interfaces(self._host)
        self._takes_both = False
        self._seen: set[str] = set()  # the families whose address is no guess any more
        self._closed = self._crowded = self._told_of_version = False

    @property
    def connections(self) -> int:
        """The number of open connections with proved peers."""
        return sum(connection.proved_peer_id is not None for connection in self._alive)

    @property
    def unauthenticated(self) -> int:
        """The number of accepted connections that have not proved who they are."""
        return len(self._pending)

    async def listen(self, acceptor: Acceptor) -> None:
        """Start to accept connections; in client mode this does nothing."""
        if self._closed:
            raise ClosedError("this transport is closed")
        if self._client_mode:
            return
        if self._listeners:
            raise LocalError("this transport listens already")
        self._host = await self._host_towards() or self._host
        listener = await self._bind()
        self._listeners.append(listener)
        port: int = self._announce_port or listener.getsockname()[1]
        hosts = [self._announce_host or outside_host(self._host)]
        if self._guessed and self._takes_both:
            hosts = sorted(dict.fromkeys([*hosts, outside_host("0.0.0.0")]), key=is_loopback)  # others reach the first
            hosts = [host for host in hosts if not is_loopback(host)] or hosts[:1]
        self.addresses = tuple(Address(host, port, self.peer_id) for host in hosts)
        if self._guessed and is_loopback(hosts[0]):
            _logger.warning(named("listening at %s, but %s"), self.addresses[0].where, NO_ADDRESS)
        context, certificate = server_context()
        self._spawn(self._accept(listener, context, certificate, acceptor))

    async def dial(self, peer_id: PeerID, addresses: Sequence[Address], *, timeout_s: float) -> TcpConnection:
        """Connect to a peer. If an address leads to nothing within half a second, the next one is tried beside it.

        Addresses of other peers are ignored.
        """
        if self._closed:
            raise ClosedError("this transport is closed")
        if self.connections >= self._limits.max_connections:
            self._make_place()
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._dial_first(peer_id, [each for each in addresses if each.peer_id == peer_id])
            self._saw_ourselves(connection.local_host)
            return connection
        except PeerError as error:
            if self._closed:
                raise ClosedError("this transport was closed while it dialed") from error
            raise
        except TimeoutError as error:
            names = ", ".join(sorted(self._resolving & {address.host for address in addresses}))
            what = f"the system's resolver has not found {names}" if names else "no connection"
            raise PeerTimeout(f"{what} within {seconds_text(timeout_s)}", peer_id) from error
        finally:
            self._resolving.difference_update(address.host for address in addresses)

    async def close(self) -> None:
        self._closed = True
        self.uplink.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self.addresses = ()
        dying = list(self._alive)
        for connection in dying:
            connection.abort("the transport was closed")
        await asyncio.gather(*(connection.wait_lost() for connection in dying))
        self._scratch.close()

    # Listening

    async def _host_towards(self) -> str:
        """Our address on the network of the peers that we join; empty if they are all on this machine."""
        elsewhere = [address for address in self._towards if not is_loopback(address.host)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESOLVE_S):
                for address in sorted(elsewhere, key=lambda each: each.kind == "dns"):  # names take the resolver
                    if (host := await host_towards(address.host, address.port)) and not is_loopback(host):
                        _logger.info(
                            "this peer listens on %s, as it joins a peer on another machine (%s); host_maddrs= says it "
                            "otherwise",
                            host,
                            address.where,
                        )
                        return host
        return ""

    async def _bind(self) -> socket.socket:
        try:
            family, sockaddr = (await resolve(self._host, self._port))[0]
            listener = new_socket(family)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {why or error}") from error
        try:
            if os.name == "posix":  # elsewhere it would let two processes share the port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._takes_both = all_interfaces(self._host) and takes_both_families(listener)
            listener.bind(sockaddr)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}; "
                "choose another host or port (port 0 takes a free one)"
            ) from error
        return listener

    async def _accept(
        self, listener: socket.socket, context: ssl.SSLContext, certificate: bytes, acceptor: Acceptor
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, sockaddr = await accept(listener)
            except ConnectionError:
                continue
            except OSError as error:  # out of descriptors or memory: others will end
                todo = "; raise `ulimit -n`" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
                _logger.warning(named("cannot accept connections for now: %s%s"), error, todo)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            connection = self._connection(context, dialed=False)
            self._make_room()
            self._pending[connection] = site_of(sockaddr[0])
            try:
                await loop.connect_accepted_socket(lambda made=connection: made, sock)  # type: ignore[misc]
            except OSError:  # it was closed while it waited
                sock.close()
                del self._pending[connection]
            else:
                self._spawn(self._authenticate(connection, certificate, acceptor))

    def _make_room(self) -> None:
        if len(self._pending) < self._limits.max_unauthenticated:
            return
        crowded = Counter(self._pending.values()).most_common(1)[0][0]
        oldest = next(connection for connection, site in self._pending.items() if site == crowded)
        del self._pending[oldest]
        oldest.abort("too many unauthenticated connections")

    def _tell_of_version(self, host: str, refusal: PeerRefused) -> None:
        """Warn of a peer of another version, once: anybody can dial, and say anything."""
        if not self._told_of_version:
            self._told_of_version = True
            _logger.warning(
                named(
                    "a peer at %s dialed this one, and was %s; this one speaks version %s. If it is meant to take "
                    "part, install the same version of shoal on both (further ones are not told)"
                ),
                host,
                refusal.message,
                self._versions,
            )

    async def _authenticate(self, connection: TcpConnection, certificate: bytes, acceptor: Acceptor) -> None:
        try:
            async with asyncio.timeout(self._limits.auth_timeout_s):
                await greet_as_server(
                    connection,
                    self._identity,
                    self._versions,
                    certificate=certificate,
                    admit=self._objection,
                    clear=self._clear,
                )
        except (PeerError, TimeoutError) as error:
            _logger.debug("an incoming connection did not authenticate: %s", str(error) or "not in time")
            if isinstance(error, PeerRefused) and error.code == OTHER_VERSION:
                self._tell_of_version(connection.remote_host, error)
            return
        except Exception:
            _logger.exception("the greeting failed")  # our own mistake: the connection goes all the same
            return
        finally:
            self._pending.pop(connection, None)
            if connection.proved_peer_id is None:
                connection.abort("not authenticated")
        if self._guessed and is_loopback(self.addresses[0].host):
            self._saw_ourselves(connection.local_host)
        try:
            acceptor(connection)
        except Exception:
            _logger.exception("the acceptor failed")
            connection.abort()

    def _saw_ourselves(self, host: str) -> None:
        """Announce the local address of a connection, if we listen on all interfaces and only guessed an address."""
        if not self._guessed or not self.addresses or not host or is_loopback(host):
            return
        seen = Address(host, self.addresses[0].port, self.peer_id)
        listens_there = self._takes_both or (":" in host) == (":" in self._host)
        if listens_there and seen.kind not in self._seen:
            self._seen.add(seen.kind)
            others = [each for each in self.addresses if each.kind != seen.kind and not is_loopback(each.host)]
            self.addresses = (seen, *others)

    def _objection(self, client: PeerID) -> str | None:
        """The reason why one more connection from `client` is too many, or None."""
        limits = self._limits
        if sum(connection.proved_peer_id == client for connection in self._alive) >= limits.max_connections_per_peer:
            return f"it has {limits.max_connections_per_peer} connections with this peer already, the most allowed"
        if self.connections >= limits.max_connections:
            self._make_place()
        return None

    def _make_place(self) -> None:
        """Close a connection of the site with most of them: the one that carried least, so an idle or a new one."""
        proved = [each for each in self._alive if each.proved_peer_id is not None and not each.closed]
        crowded = Counter(site_of(each.remote_host) for each in proved).most_common(1)[0][0]
        least = min(
            (each for each in proved if site_of(each.remote_host) == crowded),
            key=lambda each: (each.bytes_received + each.bytes_sent, each.opened_at),
        )
        if not self._crowded:
            self._crowded = True
            _logger.warning(
                named(
                    "%d connections are open, the most that this peer allows: the host with most loses those that "
                    "carry least. If it trains with many peers, raise `ulimit -n` to 8 for each of them"
                ),
                len(proved),
            )
        least.abort("too many connections: this one has carried least")

    # Dialing

    async def _dial_first(self, peer_id: PeerID, addresses: Sequence[Address]) -> TcpConnection:
        waiting = deque(addresses)
        racing: set[asyncio.Task[TcpConnection]] = set()
        failure: PeerError | None = None
        task: asyncio.Task[TcpConnection] | None = None
        try:
            while waiting or racing:
                if waiting:
                    racing.add(self._spawn(self._attempt(waiting.popleft())))
                patience_s = _STAGGER_S if waiting else None
                await asyncio.wait(racing, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                for task in [each for each in racing if each.done()]:
                    racing.remove(task)
                    try:
                        return task.result()
                    except PeerError as error:
                        if failure is None or not (isinstance(failure, PeerRefused) or _nobody_listens(error)):
                            failure = error
                    except asyncio.CancelledError as error:  # of the attempt, by `close`
                        raise ClosedError("this transport was closed while it dialed") from error
            raise failure or PeerUnreachable("no address to dial", peer_id)
        finally:
            task = None  # tasks hold their exceptions, whose tracebacks hold this frame
            del failure
            for each in racing:  # not awaited: a caller that is cancelled while it waits would lose the winner
                each.cancel()
                each.add_done_callback(_abort)

    async def _attempt(self, address: Address) -> TcpConnection:
        connection, limit_s = await self._connect(address), self._limits.auth_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await greet_as_client(connection, self._identity, address.peer_id, self._versions, clear=self._clear)
        except PeerUnreachable as error:
            reason = f"lost {address.where} while proving identities: {error.message}"
            raise PeerUnreachable(reason, address.peer_id) from error
        except PeerProtocolError as error:  # the fault of the host at this address, which has not proved to be the peer
            reason = f"{address.where} does not greet as peers do: {error.message}"
            raise PeerUnreachable(reason, address.peer_id) from error
        except TimeoutError as error:
            reason = f"{address.where} answered, but proved no identity within {seconds_text(limit_s)}"
            raise PeerTimeout(reason, address.peer_id) from error
        finally:
            if connection.proved_peer_id is None:
                connection.abort()
        return connection

    async def _connect(self, address: Address) -> TcpConnection:
        """Make a TCP connection. Raises `PeerUnreachable`."""
        loop = asyncio.get_running_loop()
        failure, refused = "it has no address", 0
        self._resolving.add(address.host)
        try:
            targets = await resolve(address.host, address.port)
            self._resolving.discard(address.host)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise PeerUnreachable(f"cannot resolve {address.host}: {why or error}", address.peer_id) from error
        for family, sockaddr in targets:
            connection = self._connection(self._client_context, dialed=True)
            try:
                sock = new_socket(family)
            except OSError as error:
                failure = error.strerror or str(error)
                continue
            try:
                await loop.sock_connect(sock, sockaddr)
                await loop.create_connection(lambda made=connection: made, sock=sock)  # type: ignore[misc]
            except OSError as error:
                sock.close()
                # asyncio's own text is "Connect call failed", with the address once more
                failure = os.strerror(error.errno) if error.errno else str(error)
                refused += isinstance(error, ConnectionRefusedError)
            except BaseException:
                sock.close()
                raise
            else:
                return connection
        reason = f"no connection to {address.where}: {failure}"
        raise PeerUnreachable(reason, address.peer_id, nobody_listens=0 < refused == len(targets))

    def _connection(self, context: ssl.SSLContext, *, dialed: bool) -> TcpConnection:
        return TcpConnection(context, dialed=dialed, scratch=self._scratch, uplink=self.uplink, alive=self._alive)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _nobody_listens(error: PeerError) -> bool:
    return isinstance(error, PeerUnreachable) and error.nobody_listens


def _abort(attempt: asyncio.Task[TcpConnection]) -> None:
    """Close the result of an attempt to connect."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().abort("another address was faster")
