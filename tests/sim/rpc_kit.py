"""Endpoints for the tests of calls and streams: over the simulated network on virtual time, and over real sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec

from shoal import sim
from shoal.base.clock import Env
from shoal.base.peer import Address, PeerID
from shoal.errors import PeerError
from shoal.events import Event
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Beat, Call, Contact, Hello, Message, Note, Opening, OpenStream, Request, decode, encode
from shoal.rpc import Endpoint, Limits, Stream
from shoal.rpc.framing import Frame, Kind, pack, read_frame
from shoal.sim import SimNetwork, Swarm
from shoal.transport import sockets
from shoal.transport.base import Acceptor, Connection, Transport
from shoal.transport.memory import MemoryTransport
from shoal.transport.tcp import TcpTransport
from shoal.transport.uplink import Uplink

E = TypeVar("E", bound=Event)

QUICK = Limits(beat_s=1.0, silence_s=5.0, idle_beat_s=10.0, idle_close_s=120.0)


class Said(Message, frozen=True):
    """An echo."""

    text: str


class Say(Request[Said], frozen=True):
    """Echo this; `scope` chooses the handler."""

    text: str
    where: str = ""

    @property
    def scope(self) -> str:
        """Which handler."""
        return self.where


class Shout(Request[Said], frozen=True):
    """Another method, which nobody serves unless a test says so."""


class Up(Message, frozen=True):
    """From the opener of a pipe."""

    number: int


class Down(Message, frozen=True):
    """From its acceptor."""

    number: int


class OpenPipe(Opening[Up, Down], frozen=True):
    """A stream of numbers, perhaps with payloads."""

    name: str = ""
    where: str = ""

    @property
    def scope(self) -> str:
        """Which handler."""
        return self.where


class OpenBulk(Opening[Up, Down], frozen=True):
    """The same for bulk data."""

    bulk: ClassVar[bool] = True


class OpenOther(Opening[Up, Down], frozen=True):
    """A stream that nobody serves."""


PipeUp = Stream[Up, Down]
PipeDown = Stream[Down, Up]


class CountingTransport:
    """A transport that remembers whom it dialed."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.dials: list[PeerID] = []

    @property
    def peer_id(self) -> PeerID:
        return self._inner.peer_id

    @property
    def addresses(self) -> Sequence[Address]:
        return self._inner.addresses

    @property
    def uplink(self) -> Uplink:
        return self._inner.uplink

    async def listen(self, acceptor: Acceptor) -> None:
        await self._inner.listen(acceptor)

    async def dial(self, peer_id: PeerID, addresses: Sequence[Address], *, timeout_s: float) -> Connection:
        self.dials.append(peer_id)
        return await self._inner.dial(peer_id, addresses, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._inner.close()


@dataclass
class Peer:
    """An endpoint, whom it dialed, and what it told."""

    endpoint: Endpoint
    transport: CountingTransport
    events: list[Event] = field(default_factory=list)
    waiting: list[tuple[type[Event], asyncio.Future[Event]]] = field(default_factory=list)

    @property
    def contact(self) -> Contact:
        """How others reach it."""
        return self.endpoint.contact

    @property
    def peer_id(self) -> PeerID:
        """Its id."""
        return self.endpoint.peer_id

    def seen(self, kind: type[E]) -> list[E]:
        """The events of this kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def note(self, event: Event) -> None:
        """Something happened."""
        self.events.append(event)
        for kind, waiter in self.waiting:
            if isinstance(event, kind) and not waiter.done():
                waiter.set_result(event)

    async def event(self, kind: type[E]) -> E:
        """The first event of this kind, as soon as there is one."""
        if found := self.seen(kind):
            return found[0]
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.append((kind, waiter))
        async with asyncio.timeout(60.0):
            found_one: E = await waiter
        return found_one


class Net:
    """Where peers meet; subclasses say how."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    async def peer(self, name: str, *, limits: Limits = QUICK, client_mode: bool = False) -> Peer:
        """Start an endpoint."""
        raise NotImplementedError

    def transport(self, name: str) -> Transport:
        """A transport of somebody who speaks frames by hand."""
        raise NotImplementedError

    async def _made(self, transport: Transport, env: Env, limits: Limits, *, client_mode: bool) -> Peer:
        counting = CountingTransport(transport)
        peer = Peer(Endpoint(counting, env, limits=limits), counting)
        env.events.subscribe(peer.note)
        await peer.endpoint.start(listen=not client_mode)
        self.peers.append(peer)
        return peer

    async def close(self) -> None:
        """Close all endpoints."""
        for peer in self.peers:
            await peer.endpoint.close()


class SimNet(Net):
    """Hosts of a simulated network.

    Attributes:
        swarm: for faults, and to run things on hosts.
    """

    def __init__(self, **network: Any) -> None:
        super().__init__()
        self.swarm: Swarm[Peer] = Swarm(network=SimNetwork(1, **network))

    async def peer(self, name: str, *, limits: Limits = QUICK, client_mode: bool = False) -> Peer:
        async def factory(host: sim.SimHost) -> Peer:
            return await self._made(host.transport, host.env, limits, client_mode=client_mode)

        return await self.swarm.start_peer(name, factory, client_mode=client_mode)

    def transport(self, name: str) -> Transport:
        return MemoryTransport(self.swarm.identity(name), self.swarm.network, host=name)

    async def close(self) -> None:
        """Let all that is left go on, and close."""
        self.swarm.heal()
        for name in self.swarm.network.hosts:
            self.swarm.network.unstall(name)
        await super().close()


class TcpNet(Net):
    """Real sockets on this machine."""

    async def peer(self, name: str, *, limits: Limits = QUICK, client_mode: bool = False) -> Peer:
        transport = TcpTransport(identity_of(name), client_mode=client_mode)
        return await self._made(transport, Env(), limits, client_mode=client_mode)

    def transport(self, name: str) -> Transport:
        return TcpTransport(identity_of(name))


def identity_of(name: str) -> Identity:
    """A key made from a name."""
    return Identity.from_seed(name.encode().ljust(32, b"."))


Scenario = Callable[[Net], Coroutine[Any, Any, None]]


def on_sim(scenario: Callable[[SimNet], Coroutine[Any, Any, None]], **network: Any) -> None:
    """Run on virtual time; options are those of `SimNetwork`."""

    async def main() -> None:
        net = SimNet(**network)
        await scenario(net)
        await net.close()

    sim.run(main, seed=1)


def on_tcp(scenario: Scenario) -> None:
    """Run on real sockets; no task and no socket may be left."""

    async def main() -> None:
        net = TcpNet()
        try:
            async with asyncio.timeout(60.0):
                await scenario(net)
        finally:
            await net.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    gc.collect()  # what was not closed warns now, in the test whose fault it is
    assert not [sock for sock in sockets.open_sockets if sock.fileno() >= 0]


async def echo(peer: PeerID, request: Say) -> Said:
    """The handler of most tests."""
    return Said(request.text)


# ------------------------------------------------------------------------------------------------------ by hand


class ByHand:
    """A peer that is authenticated and speaks frames by hand, in order or not.

    Args:
        transport: its own.
        target: whom it talks to.
    """

    def __init__(self, transport: Transport, target: Contact) -> None:
        self.transport, self.target = transport, target

    async def dial(self) -> Connection:
        """A connection to the target."""
        return await self.transport.dial(self.target.peer, self.target.addresses, timeout_s=20.0)

    async def link(self, contact: Contact | None = None) -> Connection:
        """A call link."""
        connection = await self.dial()
        await connection.write(pack(Kind.HELLO, Hello(contact or Contact(self.transport.peer_id))))
        return connection

    async def open(self, opening: Message) -> Connection:
        """A stream."""
        connection = await self.dial()
        await connection.write(open_frame(type(opening).__name__, encode(opening)))
        return connection

    async def close(self) -> None:
        """Go."""
        await self.transport.close()


def call_frame(number: int, method: str, body: bytes, *, timeout_s: float = 5.0) -> bytes:
    """A call, whatever is in it."""
    return pack(Kind.CALL, Call(number, method, timeout_s, msgspec.Raw(body)))


def note_frame(method: str, body: bytes) -> bytes:
    """A note, whatever is in it."""
    return pack(Kind.CALL, Note(method, msgspec.Raw(body)))


def open_frame(method: str, body: bytes) -> bytes:
    """The begin of a stream, whatever is in it."""
    return pack(Kind.OPEN, OpenStream(method, msgspec.Raw(body)))


async def receive(connection: Connection, kind: Any) -> Any:
    """The message of the next frame, decoded. The question for the time, with which a link begins, is passed over."""
    while True:
        frame: Frame = await read_frame(connection, Limits())
        if kind is Beat or frame.kind is not Kind.CALL or msgspec.msgpack.decode(frame.header)[0] != "Beat":
            return decode(frame.header, kind)


async def ends(connection: Connection) -> bool:
    """Wait for the end of a connection, whatever comes before it."""
    try:
        while True:
            await connection.readinto(bytearray(1))
    except PeerError:
        return True


async def together(*works: Awaitable[Any]) -> list[Any]:
    """`asyncio.gather` that gives exceptions as results."""
    return await asyncio.gather(*works, return_exceptions=True)
