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
import math
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import nullcontext, suppress
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import msgspec

from shoal.base.bounded import put_last
from shoal.base.clock import Env, SharedClock, seconds_text
from shoal.base.peer import Address, PeerID, site_of
from shoal.base.tasks import Tasks, while_moving
from shoal.errors import ClosedError, LocalError, PeerError, PeerProtocolError, PeerTimeout, PeerUnreachable
from shoal.events import PeerConnected, PeerDropped, PeerLost, PeerSilent, Warned
from shoal.protocol.wire import (
    Contact,
    Hello,
    LendConnection,
    Message,
    Note,
    Noted,
    Opening,
    OpenStream,
    Request,
    decode,
    encode,
    reply_type,
    stream_types,
)
from shoal.rpc.allowance import Account, Allowance, call_cost, reply_cost, stream_cost
from shoal.rpc.connections import Connections
from shoal.rpc.dial_limits import NotDialed
from shoal.rpc.dialing import Dialer
from shoal.rpc.framing import Kind, Limits, pack, read_frame
from shoal.rpc.link import THE_PEER_LEFT, CallLink, LinkRetired
from shoal.rpc.rhythm import LOOK_S, Rhythm
from shoal.rpc.serving import Services, tag_of
from shoal.rpc.stream import Stream
from shoal.rpc.trust import Trust
from shoal.rpc.twins import TWO_PROCESSES, Twins
from shoal.transport.base import Connection, Transport

__all__ = ["Endpoint"]

R = TypeVar("R")
T = TypeVar("T")
Up = TypeVar("Up", bound=Message)
Down = TypeVar("Down", bound=Message)
Callback = TypeVar("Callback", bound=Callable[..., None])

_OPEN_TIMEOUT_S = 10.0
"""The longest wait for the first frame of an incoming connection, while little comes."""

_MAX_LINKS = 4
"""Call links with one peer; of more the oldest is closed. Two come about if both peers dial at once, another one if a
line broke and nobody has noticed yet."""

_MAX_LINKING_ANEW = 32
"""Silent peers that are dialed anew at a time."""

CLOCKS_DIFFER_S = 10.0
"""A clock that is wrong by more than this is worth a warning."""

_SWEEP_S = 1.0
"""The allowances of sites without links are looked through this often at most."""

_LEAST_CALLS_S = 10.0

_LENDING_COST = 20.0
"""A call that makes us dial costs as much as so many small ones: each dial is a handshake, with signatures."""

_MOST_TOLD = 16
"""So many peers with two processes are told of: keys are free, and whoever has one may show two."""

_MOST_INCOMING = 1024
"""So many peers that have dialed us are remembered."""

_logger = logging.getLogger("shoal.rpc")


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


class Endpoint:
    """Calls and streams of one peer.

    Args:
        transport: how peers are reached; the endpoint owns and closes it.
        env: clock, chance, executor, events.
        limits: what one peer may cost, and heartbeat periods.

    Attributes:
        clock: our machine's wall clock, and the network's.
        trust: the peers whose word counts on what we cannot see ourselves.
        twins: the processes of the peers that we are connected with.
        has_twin: whether a peer is, or was, connected with another process that has our identity; it was said.
        closed: whether `close` was called.
    """

    def __init__(self, transport: Transport, env: Env, *, limits: Limits | None = None) -> None:
        self.env = env
        self.limits = limits or Limits()
        self._transport = transport
        self._open = Connections()
        self._tasks = Tasks(self._task_failed)
        self._services = Services(self._open, self.limits, tasks=self._tasks, warn=self._warn, answered=self._answered)
        self._dialer = Dialer(
            transport,
            self._open,
            self.limits,
            me=lambda: self.contact,
            add_link=self._add_link,
            tasks=self._tasks,
            on_shut=self._route_shut,
        )
        self.serve(LendConnection, self._lend)
        self.trust, self.twins, self.has_twin = Trust(), Twins(env.rng), False
        self._doubled_told = set[PeerID]()
        self._incoming: dict[PeerID, Incoming] = {}  # the last one of each peer; the newest at the end
        self._withheld = False
        self._reached_at: tuple[Address, ...] = ()
        self._named: tuple[object, Contact] = None, Contact(self.peer_id)  # our contact, and what it is made of
        self._shut_callbacks: list[Callable[[PeerID, tuple[Address, ...]], None]] = []
        self._allowances: dict[str, Allowance] = {}  # by site
        self._all_sites = Account(0.0, -math.inf)
        self._swept_at = -math.inf
        self._rhythm = Rhythm(
            self._ask,
            self._open.bytes_received,
            self._open.bytes_acked,
            self._fell_silent,
            most_s=self.limits.silence_s,
        )
        self._linking_anew: set[PeerID] = set()
        self._looking = False
        self._linked_callbacks: list[Callable[[PeerID], None]] = []
        self._lost_callbacks: list[Callable[[PeerID, str], None]] = []
        self.closed = False
        self._clock_told, self._jumps = False, 0
        self.clock = env.clock if isinstance(env.clock, SharedClock) else SharedClock(env.clock, settled=True)

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
        return tuple(peer for peer, state in self._open.peers.items() if state.link is not None)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since the start, over all connections."""
        return self._open.traffic

    @property
    def upload_bytes_per_s(self) -> float | None:
        """What this peer can send, bytes per second, as its line was full or is limited; None if this is not known."""
        return self._transport.uplink.bytes_per_s

    def clock_offset_s(self, peer: PeerID) -> float:
        """How far the peer's wall clock is ahead of our machine's, seconds; 0.0 if unknown, or too small to tell."""
        return self.clock.offset_s(peer) or 0.0

    @property
    def clock_ahead_s(self) -> float:
        """How far our machine's clock is ahead of the connected peers' clocks (median), seconds; 0.0 without peers."""
        offsets_s = [self.clock_offset_s(peer) for peer in self.peers]
        return -statistics.median(offsets_s) if offsets_s else 0.0

    def ask(self, peer: PeerID) -> None:
        """Ask a connected peer for a sign of life, which also tells its time; never waits."""
        if (link := self._open.link(peer)) is not None:
            link.ask()

    async def start(self, *, listen: bool = True) -> None:
        """Begin to accept connections (unless `listen` is False: client mode).

        Raises:
            ConfigError: the address cannot be listened on.
        """
        if listen:
            await self._transport.listen(self._accept)

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
        return _listed(self._lost_callbacks, callback)

    def on_linked(self, callback: Callable[[PeerID], None]) -> Callable[[], None]:
        """Call `callback(peer)` whenever a peer is connected that was not; returns a function that ends it."""
        return _listed(self._linked_callbacks, callback)

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

    def _ask(self, peer: PeerID) -> bool:
        """Ask a peer for a sign of life; False if it cannot be asked."""
        state = self._open.peers.get(peer)
        links = [link for link in state.links if not link.closed] if state is not None else []
        for link in links:
            link.ask()
        if not links and self._dialer.contact(peer).addresses and not self.closed:
            self._tasks.spawn(self._dial_and_ask(peer))
            return True
        return bool(links)

    async def _look_loop(self) -> None:
        """Look at peers that have not answered a call yet, as long as there are any."""
        waiting = [self.peer_id]
        while waiting:
            await asyncio.sleep(LOOK_S)
            waiting = [peer for peer, state in self._open.peers.items() if any(link.pending for link in state.links)]
            for peer in waiting:
                self.is_silent(peer)
        self._looking = False

    def _fell_silent(self, peer: PeerID, waited_s: float) -> None:
        self.env.events.emit(PeerSilent(peer=peer, waited_s=waited_s))
        if (state := self._open.peers.get(peer)) is None or self.closed:
            return
        self._open.drop_all(state.idle)  # its line may have been cut: these would be as late as its links
        if peer not in self._linking_anew and len(self._linking_anew) < _MAX_LINKING_ANEW:
            self._linking_anew.add(peer)
            self._tasks.spawn(self._link_anew(peer))

    async def _link_anew(self, peer: PeerID) -> None:
        try:
            await self._dialer.link_anew(peer, lambda: self.is_silent(peer), self.env.rng)
        finally:
            self._linking_anew.discard(peer)

    async def _dial_and_ask(self, peer: PeerID) -> None:
        (await self._dialer.link(peer, self.limits.dial_timeout_s)).ask()

    # ---------------------------------------------------------------------------------------------------- addresses

    def learn(self, contact: Contact) -> None:
        """Remember where a peer listens, by the word of another. The addresses that the peer itself names come first.

        A contact without addresses teaches nothing; addresses of another peer are ignored.
        """
        self._dialer.learn(contact, by_itself=False)

    def vouch(self, addresses: Iterable[Address]) -> None:
        """The program names these addresses: they are dialed as those are where a peer has proved itself."""
        for address in addresses:
            self._dialer.dials.prove(address.host)

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
        self._shut_callbacks.append(callback)

    def _route_shut(self, peer: PeerID, addresses: tuple[Address, ...]) -> None:
        for callback in self._shut_callbacks:
            callback(peer, addresses)

    def hosts_of(self, peer: PeerID) -> tuple[str, str]:
        """The addresses of this machine and of the other one on the call link with a peer; empty without a link."""
        link = self._open.link(peer)
        return (link.connection.local_host, link.connection.remote_host) if link is not None else ("", "")

    def site_of(self, peer: PeerID) -> str:
        """The site that the call link with a peer comes from, for limits that all keys of one owner share."""
        return site_of(self.hosts_of(peer)[1])

    async def gets_in(self, address: Address, *, timeout_s: float) -> bool:
        """Whether a connection to this address can be made and its peer proves itself there. It is closed at once.

        Raises:
            NotDialed: this peer dials too much already, or must leave this address alone.
        """
        try:
            dials, peer = self._dialer.dials, address.peer_id
            connection = await dials.dial(peer, (address,), timeout_s=timeout_s, only_to_see=True)
        except NotDialed:
            raise
        except PeerError:
            return False
        connection.abort()
        return True

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
        if not self._looking:
            self._looking = True
            self._tasks.spawn(self._look_loop())
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
                async with while_moving(timeout_s, lambda: stream.bytes_moved):
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

    # ----------------------------------------------------------------------------------------------------- accepting

    def _accept(self, connection: Connection) -> None:
        if self.closed:
            connection.abort()
            return
        peer, now = connection.peer_id, asyncio.get_running_loop().time()
        came = Incoming(peer, now, connection.local_host, connection.remote_host)
        put_last(self._incoming, peer, came, _MOST_INCOMING)
        self._open.connections.add(connection)
        self._tasks.spawn(self._serve_connection(connection))

    def came_in(self, since: float) -> list[Incoming]:
        """The last connection that each peer has made to us, of those since then (the loop's time), newest first."""
        return list(takewhile(lambda each: each.at >= since, reversed(self._incoming.values())))

    async def _lend(self, peer: PeerID, _: LendConnection) -> Noted:
        if (link := self._open.link(peer)) is not None:
            self._spend(link.connection, link, _LENDING_COST)
        connection = await self._dialer.lend(peer)
        self._tasks.spawn(self._serve_connection(connection))
        return Noted()

    async def _serve_connection(self, connection: Connection) -> None:
        handed_on, peer = False, connection.peer_id
        self._open.of(peer).accepted.add(connection)
        try:
            # A peer that we have a link with may dial ahead of its next stream.
            limit = while_moving(_OPEN_TIMEOUT_S, lambda: connection.bytes_received)
            async with nullcontext() if self.connected(peer) else limit:
                frame = await read_frame(connection, self.limits)
            if frame.kind is Kind.HELLO:
                hello = decode(frame.header, Hello)
                if hello.contact.peer == peer:
                    self._dialer.learn(hello.contact, by_itself=True)
                if hello.lends:
                    handed_on = self._dialer.lending.lent(connection)
                    return
                self._add_link(connection)
                handed_on = True  # the link reads on by itself
                return
            while True:
                # A stream costs as much as a call: whoever opens too many waits, as with calls.
                cost = stream_cost(len(frame.header))
                if (pause_s := self._spend(connection, self._open.link(peer), cost)) > 0.0:
                    await asyncio.sleep(pause_s)
                if not await self._services.serve_stream(connection, frame):
                    break
                frame = await read_frame(connection, self.limits)
        except TimeoutError:
            pass  # said nothing: dropped below
        except PeerUnreachable:
            pass  # the dialer closed an idle stream connection, as it may
        except (PeerProtocolError, msgspec.MsgspecError) as error:
            self.env.events.emit(PeerDropped(peer=peer, where="rpc", reason=str(error)))
        finally:
            if not handed_on:
                self._open.drop(connection)
            self._open.of(peer).accepted.discard(connection)
            self._open.forget(peer)

    # -------------------------------------------------------------------------------------------------- bookkeeping

    def spent(self, link: CallLink, nbytes: int) -> float:
        """Count a message of a peer, and return how long its link is not to be read, seconds (for `CallLink`)."""
        return self._spend(link.connection, link, call_cost(nbytes))

    def _answered(self, link: CallLink, nbytes: int) -> None:
        """Count a reply to a peer. The effect of a long one shows when the peer's next message comes."""
        self._spend(link.connection, link, reply_cost(nbytes))

    def _spend(self, connection: Connection, link: CallLink | None, cost: float) -> float:
        limits, now = self.limits, asyncio.get_running_loop().time()
        rate = limits.calls_per_host_s
        self._all_sites.spend(cost, limits.calls_s, now)
        if self._all_sites.left < 0.0:
            rate = min(rate, max(limits.calls_s / max(1, len(self._allowances)), _LEAST_CALLS_S))
        return self._allowance(site_of(connection.remote_host)).spend(link, cost, rate, now)

    def _allowance(self, site: str) -> Allowance:
        """The allowance of a site. It is kept for a while after the last link, or a new link would bring a new one."""
        now = asyncio.get_running_loop().time()
        if now >= self._swept_at + _SWEEP_S:  # the leader of a large group gets a thousand links within a second
            self._swept_at = now
            for each in [each for each, allowance in self._allowances.items() if allowance.is_unused(now)]:
                del self._allowances[each]
        if (allowance := self._allowances.get(site)) is None:
            allowance = self._allowances[site] = Allowance(self.limits.calls_per_host_s, now)
        return allowance

    def look_at_clock(self) -> None:
        """Warn if the machine's clock was set, and ask the peers for their times if it has jumped (for `CallLink`)."""
        if abs(set_s := self.clock.take_set_s()) > CLOCKS_DIFFER_S:
            message = (
                f"the clock of this machine was set {'forward' if set_s > 0 else 'back'} by {abs(set_s):.0f} s. Shoal "
                "goes on by the network's time: if the clock was right before, set it again"
            )
            self.env.events.emit(Warned(where="clock", message=message))
        if self.clock.jumps != self._jumps:
            self._jumps = self.clock.jumps
            for peer in self.peers:
                self.ask(peer)

    def process_told(self, peer: PeerID, process: bytes, asked_at: float) -> None:
        """A process has answered that has this peer's key, and was asked at this time of the loop (for `CallLink`)."""
        now, state = asyncio.get_running_loop().time(), self._open.of(peer)
        if self.twins.answered(peer, process, asked_at=asked_at, now=now):
            for link in [*state.links]:
                link.ask()
        if self.twins.has(peer) and state.processes > 1 and not state.doubled:
            self._set_mute(peer, doubled=True)
            self._tell_doubled(peer)

    def _set_mute(self, peer: PeerID, *, doubled: bool | None = None, doubles_us: bool | None = None) -> None:
        """Two processes have the key of this peer, or by its word our own, or have not any more; None: as before."""
        state = self._open.of(peer)
        before, state.doubled = state.mute, state.doubled if doubled is None else doubled
        state.doubles_us = state.doubles_us if doubles_us is None else doubles_us
        for link in [*state.links] if doubled is not None else ():
            link.ask()  # which tells it
        if state.mute and not before:
            self._peer_lost(peer, TWO_PROCESSES)
            self._open.watch(peer)
        elif before and state.link is not None:
            self._linked(peer)

    def _tell_doubled(self, peer: PeerID) -> None:
        if peer not in self._doubled_told and len(self._doubled_told) < _MOST_TOLD:
            self._doubled_told.add(peer)
            message = (
                f"two processes have the identity of {peer.short()}, and this peer is connected with both. What is "
                "sent to one of them may reach the other, so it counts on neither until one ends. Both were told. If "
                "they are yours, end one; give each an identity file of its own (identity_path), or none"
            )
            self.env.events.emit(Warned(where="DHT", message=message, about=(peer,)))

    def twin_told(self, teller: PeerID, *, has_twin: bool) -> None:
        """A peer says whether it is connected with two processes that have our identity (for `CallLink`)."""
        if has_twin != self._open.of(teller).doubles_us:
            self._set_mute(teller, doubles_us=has_twin)
        if has_twin and not self.has_twin:
            self.has_twin = True
            message = (
                f"another process has this peer's identity ({self.peer_id.short()}), as {teller.short()} says, which "
                "is connected with both. What is sent to one of them may reach the other, so only one of them can take "
                "part. End one; give each an identity file of its own (identity_path), or none"
            )
            self.env.events.emit(Warned(where="DHT", message=message))

    def clock_told(self, link: CallLink, offset_s: float) -> None:
        """A link has measured how far the peer's clock is ahead of our own (for `CallLink`)."""
        self.look_at_clock()
        before_s = self.clock.ahead_s
        changed = self.clock.told(
            link.peer_id,
            site_of(link.connection.remote_host),
            offset_s,
            trusted=lambda: self.trust.among(self.peers),
        )
        self.look_at_clock()
        if changed and abs(self.clock.ahead_s - before_s) > CLOCKS_DIFFER_S:
            off_s, peer = self.clock.ahead_s, link.peer_id.short()
            if abs(off_s) <= CLOCKS_DIFFER_S:
                message = "shoal goes by this machine's clock again: it agrees with those of the other peers"
            else:
                message = (
                    f"the clock of this machine is {abs(off_s):.0f} s {'behind' if off_s > 0 else 'ahead of'} that of "
                    f"the network (as {peer} tells it). Shoal goes by the network's: set the clock that is wrong"
                )
            self.env.events.emit(Warned(where="clock", message=message))
        elif abs(self.clock.ahead_s - offset_s) > CLOCKS_DIFFER_S and not self._clock_told and not self.clock.in_doubt:
            self._clock_told = True
            how, off_s = ("ahead of", offset_s) if offset_s > 0 else ("behind", -offset_s)
            told = [self.clock.offset_s(other) for other in self.peers if other != link.peer_id]
            others = [each for each in told if each is not None]
            agree = sum(abs(each - self.clock.ahead_s) <= CLOCKS_DIFFER_S for each in others)
            advice = "set the clock that is wrong"
            if 2 * agree > len(others):
                advice = f"that one is wrong, as {agree} of {len(others)} others agree with ours"
            message = f"the clock of {link.peer_id.short()} is {off_s:.0f} s {how} ours: {advice}"
            self.env.events.emit(Warned(where="clock", message=message, about=(link.peer_id,)))

    def _add_link(self, connection: Connection) -> CallLink:
        state = self._open.of(connection.peer_id)
        self._dialer.dials.prove(connection.remote_host)
        link = CallLink(connection, self, self._open, self._services, self._tasks)
        self._allowance(site_of(connection.remote_host)).add(link, asyncio.get_running_loop().time())
        state.links.append(link)
        state.leaves = False
        link.start()
        if len(state.links) > _MAX_LINKS:
            state.links[0].abort()
        if len(state.links) == 1:
            self._linked(connection.peer_id)
        return link

    def _linked(self, peer: PeerID) -> None:
        self.env.events.emit(PeerConnected(peer=peer))
        for callback in list(self._linked_callbacks):
            callback(peer)

    def link_closed(self, link: CallLink, error: PeerError, expected: bool) -> None:
        """A call link is gone (for `CallLink`)."""
        peer = link.peer_id
        self._allowances[site_of(link.connection.remote_host)].remove(link)
        self._open.count(link.connection)
        state = self._open.of(peer)
        state.leaves |= link.leaves
        with suppress(ValueError):
            state.links.remove(link)
        if isinstance(error, PeerProtocolError):
            self.env.events.emit(PeerDropped(peer=peer, where="rpc", reason=error.message))
        if state.doubled and state.processes < 2:
            self._set_mute(peer, doubled=False)
        if not state.links:
            state.doubles_us = False
            self.clock.forget(peer)
        if not state.links and not self.closed:
            self._dialer.routes.forget(peer)
            if not expected:
                self._peer_lost(peer, THE_PEER_LEFT if state.leaves else error.message)
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
            self._peer_lost(peer, error.message)

    def _peer_lost(self, peer: PeerID, reason: str) -> None:
        state = self._open.of(peer)
        self._rhythm.forget(peer)
        self._open.drop_all(state.streams)
        self._open.drop_all(state.idle)
        if state.accepted:
            self._tasks.spawn(self._drop_accepted(peer))
        self._open.forget(peer)
        self.env.events.emit(PeerLost(peer=peer, reason=reason))
        for callback in list(self._lost_callbacks):
            callback(peer, reason)

    async def _drop_accepted(self, peer: PeerID) -> None:
        """Drop what a lost peer has open here, unless it makes a new link: it may have lost only the old one."""
        await asyncio.sleep(_OPEN_TIMEOUT_S)
        if (state := self._open.peers.get(peer)) is not None and not state.links:
            self._open.drop_all(state.accepted)

    def _stream_released(self, connection: Connection, *, bulk: bool, reusable: bool) -> None:
        state = self._open.of(connection.peer_id)
        state.streams.discard(connection)
        if reusable:
            self._dialer.keep(connection, bulk=bulk)
        else:
            self._open.drop(connection)
        self._open.watch(connection.peer_id)
        self._open.forget(connection.peer_id)

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
        self.closed = True
        self._dialer.close()
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


def _listed(callbacks: list[Callback], callback: Callback) -> Callable[[], None]:
    """Have this callback called, too; returns a function that ends it, and is safe to call twice."""
    callbacks.append(callback)

    def unsubscribe() -> None:
        with suppress(ValueError):
            callbacks.remove(callback)

    return unsubscribe
