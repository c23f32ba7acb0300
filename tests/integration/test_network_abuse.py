"""Hostile strangers and hostile peers against two good ones that average all the while.

After each attack the good ones must have finished more rounds together, with equal and sensible averages and without an
internal error; and the peak of their memory must stay within a bound that an allocation by announced length breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.averaging.allreduce.schema import schema_of
from shoal.averaging.allreduce.vector import describe
from shoal.base.clock import Env
from shoal.base.peer import Address
from shoal.compression import NoCompression
from shoal.errors import PeerError
from shoal.protocol.identity import Identity
from shoal.protocol.wire import (
    Abort,
    AskVerdict,
    Assign,
    Begin,
    Call,
    Commit,
    Contact,
    DhtFind,
    DhtPing,
    DhtStore,
    FetchChunks,
    GetManifest,
    Gone,
    Held,
    Join,
    JoinAccepted,
    JoinRedirected,
    Leave,
    Member,
    Message,
    OpenStream,
    PartAbsent,
    PartAverage,
    PartData,
    PartRequest,
    Record,
    Reduce,
    Report,
    encode,
)
from shoal.rpc import Endpoint, Limits, Stream
from shoal.rpc.framing import Kind, pack
from shoal.transport.base import Connection
from shoal.transport.tcp import TcpTransport
from tests.integration.abuse_victim import NUMEL, PREFIX, TILE_BYTES
from tests.integration.workers import LONG_S, Talk
from tests.property.test_wire import MESSAGES, _mutate
from tests.sim.rpc_kit import ByHand, call_frame, open_frame

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")

GROWTH_BYTES = 64 << 20
"""How much the peak of a good peer's memory may grow, over all attacks."""


class Victim(Talk):
    """One good peer in a process of its own."""

    def __init__(self, rank: int, *addresses: str) -> None:
        super().__init__([sys.executable, "-m", "tests.integration.abuse_victim", str(rank), *addresses])
        self.rounds: dict[str, tuple[str, bool, int]] = {}
        self.warned: list[str] = []
        self.failed: list[str] = []
        [address] = self.expect("joined")
        self.address = Address.parse(address)
        self.contact = Contact(self.address.peer_id, (self.address,))

    def hear(self) -> str:
        """The next thing it says, noted; its kind."""
        kind, value = json.loads(self.line())
        if kind == "round":
            self.rounds[value[0]] = (value[1], value[2], value[3])
        elif kind in ("warned", "failed"):
            getattr(self, kind).append(value)
        self.last = value
        return str(kind)

    def expect(self, kind: str) -> Any:
        """What it says of this kind next."""
        while self.hear() != kind:
            pass
        return self.last

    def memory(self, field: str = "VmRSS") -> int:
        """Bytes of memory: `VmRSS` now, `VmHWM` at the most so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        [line] = [line for line in lines if line.startswith(f"{field}:")]
        return int(line.split()[1]) << 10

    def drain(self) -> None:
        """Hear what was said already."""
        while not self._lines.empty():
            self.hear()


class Swarm:
    """Both of them."""

    def __init__(self) -> None:
        self.first = Victim(1)
        self.second = Victim(2, str(self.first.address))
        self.good(3)
        self.before = self.first.memory()

    def good(self, count: int = 2) -> None:
        """Wait until they have finished so many rounds together, from now on; check what they say."""
        both = (self.first, self.second)
        for victim in both:
            victim.drain()
        old = set(self.first.rounds) | set(self.second.rounds)
        deadline = time.monotonic() + LONG_S
        while len(together := (set(self.first.rounds) & set(self.second.rounds)) - old) < count:
            assert time.monotonic() < deadline, f"no rounds any more: {[victim.failed[-3:] for victim in both]}"
            for victim in both:
                victim.expect("round")
        for name in together:
            assert self.first.rounds[name][:2] == self.second.rounds[name][:2]
            assert self.first.rounds[name][1], "an average that cannot be one of good values"
        assert [victim.warned for victim in both] == [[], []]

    def end(self) -> None:
        """Kill both."""
        self.first.end()
        self.second.end()


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    """Two good peers for this file; in the end their memory is looked at once more."""
    found = Swarm()
    try:
        yield found
    finally:
        found.end()


def attack(swarm: Swarm, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do it, and see that the good ones go on, with bounded memory."""
    asyncio.run(work())
    swarm.good()
    assert swarm.first.memory("VmHWM") - swarm.before < GROWTH_BYTES


@contextlib.asynccontextmanager
async def by_hand(victim: Victim) -> AsyncIterator[ByHand]:
    """An authenticated peer that speaks frames by hand."""
    hand = ByHand(TcpTransport(Identity.ephemeral(), client_mode=True), victim.contact)
    try:
        yield hand
    finally:
        await hand.close()


async def _swallow(connection: Connection) -> None:
    """Read whatever comes."""
    with contextlib.suppress(PeerError):
        while True:
            await connection.readinto(bytearray(1))


@contextlib.asynccontextmanager
async def reading(connection: Connection) -> AsyncIterator[Connection]:
    """Read away all answers meanwhile."""
    task = asyncio.create_task(_swallow(connection))
    try:
        yield connection
    finally:
        connection.abort()
        await task


# ------------------------------------------------------------------------------------------------------------ strangers


def test_thousands_of_connections_that_say_nothing(swarm: Swarm) -> None:
    """Two thousand at once, and the good ones still find each other."""
    host = swarm.first.address.host, swarm.first.address.port
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(host)
        swarm.good()
        assert swarm.first.memory("VmHWM") - swarm.before < GROWTH_BYTES
    swarm.good(1)


def test_noise_instead_of_tls(swarm: Swarm) -> None:
    """Random bytes, other protocols, the begin of a handshake that never ends."""
    rng = random.Random(1)
    hello = bytes.fromhex("1603010200010001fc0303") + rng.randbytes(32)
    for i in range(150):
        with socket.create_connection((swarm.first.address.host, swarm.first.address.port), timeout=10.0) as noisy:
            noise = (rng.randbytes(rng.randrange(1, 3000)), b"GET / HTTP/1.1\r\n\r\n", hello, b"\x16\x03\x01\xff\xff")
            noisy.sendall(noise[i % 4])
    swarm.good()
    assert swarm.first.memory("VmHWM") - swarm.before < GROWTH_BYTES


# --------------------------------------------------------------------------------------------------------------- frames


def test_lengths_that_are_announced_and_do_not_come(swarm: Swarm) -> None:
    """240 connections of four peers, each with a frame of a megabyte on the way, or a payload of sixteen."""

    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                hand = await stack.enter_async_context(by_hand(swarm.first))
                for i in range(60):
                    connection = await hand.dial()
                    header = (1 << 20).to_bytes(4, "big")
                    match i % 3:
                        case 0:
                            await connection.write(bytes([1 + i % 6]) + header + bytes(4) + b"x" * 10)
                        case 1:
                            await connection.write(pack(Kind.OPEN, OpenStream("Reduce", _raw(Reduce(b"?" * 16)))))
                            await connection.write(bytes([4]) + header + (16 << 20).to_bytes(4, "big") + b"x")
                        case 2:
                            join = _join(hand, b"")
                            await connection.write(pack(Kind.OPEN, OpenStream("Join", _raw(join))))
                            await connection.write(pack(Kind.DATA, Report(), 16 << 20) + b"x")
            await asyncio.to_thread(swarm.good)
            assert swarm.first.memory("VmHWM") - swarm.before < GROWTH_BYTES

    attack(swarm, work)


def test_frames_that_are_none(swarm: Swarm) -> None:
    """Random bytes, unknown kinds, giant lengths, truncated and mutated frames: each costs its connection."""
    rng = random.Random(2)
    frames = [pack(rng.choice(list(Kind)), message) for message in MESSAGES]

    async def work() -> None:
        async with by_hand(swarm.first) as hand:
            for i in range(120):
                async with reading(await hand.dial()) as connection:
                    match i % 4:
                        case 0:
                            data = rng.randbytes(rng.randrange(1, 500))
                        case 1:
                            data = bytes([rng.randrange(256)]) + b"\xff" * 8
                        case 2:
                            frame = rng.choice(frames)
                            data = frame[: rng.randrange(len(frame))]
                        case _:
                            data = bytes(_mutate(rng, bytearray(rng.choice(frames)), frames))
                    with contextlib.suppress(PeerError):
                        await connection.write(data)

    attack(swarm, work)


# ---------------------------------------------------------------------------------------------------------------- calls


def _raw(message: object) -> Any:
    import msgspec

    return msgspec.Raw(encode(message))


def _join(hand: ByHand, schema: bytes, **changes: Any) -> Join:
    member = Member(Contact(hand.transport.peer_id), False, None, b"\xc0")
    return Join(f"{PREFIX}.0b", schema, {}, time.time() + 5.0, changes.get("member", member))


def _records(owner: Identity, victim: Victim) -> list[Record]:
    """What must not be believed: no signature, a wrong one, another's name, times that are none."""
    key, peer = b"k" * 32, victim.address.peer_id
    value, wide = encode(1), b"x" * 60_000
    times = (math.nan, math.inf, -math.inf, 1e300, 0.0, time.time() + 1e6, time.time() + 60.0)
    forged = [Record(key, peer.to_bytes(), value, when, peer, b"s" * 64) for when in times]
    forged += [Record(key, b"\xa1a", wide, when) for when in times]
    forged += [Record(key, None, b"\xc1\xff", times[-1]), Record(key, b"", b"", times[-1], owner.peer_id, b"")]
    return forged


def test_calls_that_are_none(swarm: Swarm) -> None:
    """Every method with every mutation of every message, absurd numbers, forged records, unknown methods."""
    rng = random.Random(3)
    bodies = [encode(message) for message in MESSAGES]
    methods = [type(message).__name__ for message in MESSAGES] + ["", "?" * 5000]
    owner = Identity.ephemeral()
    absurd: list[Message] = [
        DhtStore(_records(owner, swarm.first)),
        DhtFind([b"k" * 32] * 64),
        AskVerdict(b"?" * 16),
        GetManifest(PREFIX),
        GetManifest("x" * 100_000),
        DhtPing(),
    ]

    async def work() -> None:
        async with by_hand(swarm.first) as hand:
            for _ in range(20):
                async with reading(await hand.link()) as link:
                    with contextlib.suppress(PeerError):
                        for number in range(100):
                            body = rng.choice(bodies)
                            if rng.random() < 0.7:
                                body = bytes(_mutate(rng, bytearray(body), bodies))
                            timeout_s = rng.choice((0.0, -1.0, 1.0, math.nan, math.inf, 1e300))
                            await link.write(call_frame(number, rng.choice(methods), body, timeout_s=timeout_s))
                        for number, message in enumerate(absurd):
                            await link.write(call_frame(number, type(message).__name__, encode(message)))
                        await link.write(pack(Kind.CALL, Call(1 << 63, "DhtPing", 1.0, _raw(DhtPing()))))

    attack(swarm, work)


@pytest.mark.long
def test_a_flood_of_calls_whose_answers_nobody_reads(swarm: Swarm) -> None:
    """Answers pile up to a limit, and then the link is gone."""

    async def work() -> None:
        async with by_hand(swarm.first) as hand:
            link = await hand.link()
            asking = call_frame(1, "DhtFind", encode(DhtFind([bytes([i]) * 32 for i in range(64)])))
            with contextlib.suppress(PeerError, TimeoutError):
                async with asyncio.timeout(10.0):
                    for _ in range(100):
                        await link.write(asking * 100)

    attack(swarm, work)


@pytest.mark.long
def test_a_flood_of_records(swarm: Swarm) -> None:
    """One peer stores as much as it can: the DHT takes its share and no more."""

    async def work() -> None:
        async with by_hand(swarm.first) as hand, reading(await hand.link()) as link:
            rng = random.Random(4)
            with contextlib.suppress(PeerError, TimeoutError):
                async with asyncio.timeout(10.0):  # it is read ever more slowly
                    for number in range(300):
                        records = [
                            Record(rng.randbytes(32), None, b"\xc5\xff\xfd" + bytes(65_533), time.time() + 600.0)
                            for _ in range(4)
                        ]
                        await link.write(call_frame(number, "DhtStore", encode(DhtStore(records))))

    attack(swarm, work)


# -------------------------------------------------------------------------------------------------------------- streams


def test_streams_that_are_none(swarm: Swarm) -> None:
    """Openings and stream messages, mutated; payloads where there are none; frames out of place; no end."""
    rng = random.Random(5)
    bodies = [encode(message) for message in MESSAGES]

    async def work() -> None:
        async with by_hand(swarm.first) as hand:
            openings: list[Message] = [
                Reduce(b"?" * 16),
                FetchChunks(PREFIX, b"?" * 16, [0, -1, 1 << 60]),
                FetchChunks(PREFIX, b"?" * 16, list(range(100_000))),
                _join(hand, b"schema"),
                _join(hand, b"", member=Member(Contact(swarm.second.address.peer_id), True, math.nan, b"\xc1")),
                _join(hand, b"", member=Member(Contact(hand.transport.peer_id), True, -1.0, b"\xa1\xff")),
            ]
            for i in range(120):
                opening = openings[i % len(openings)]
                body = encode(opening)
                if i % 2:
                    body = bytes(_mutate(rng, bytearray(body), bodies))
                async with reading(await hand.dial()) as stream:
                    with contextlib.suppress(PeerError):
                        await stream.write(open_frame(type(opening).__name__, body))
                        for _ in range(5):
                            message = rng.choice(MESSAGES)
                            frame = pack(rng.choice(list(Kind)), message, rng.choice((0, 0, 10, 1 << 20)))
                            await stream.write(bytes(_mutate(rng, bytearray(frame), bodies)) if i % 3 else frame)

    attack(swarm, work)


# ------------------------------------------------------------------------------------------------ a member of the group

HELD = Held(0, 0, b"\x07", 3.0, b"d" * 16)
SIZES = sorted({0, 1, 4, 100, TILE_BYTES - 4, TILE_BYTES, TILE_BYTES + 4, 1 << 20})

CONTRIBUTIONS: list[tuple[Message, bytes]] = [
    *((PartData(0, 0, weight), b"x" * size) for weight in (0.0, 1.0, math.nan, -1.0, 1e300) for size in SIZES[:4]),
    *((PartData(tile, attempt, 1.0), b"") for tile in (-1, 9999, 1 << 62) for attempt in (-1, 0, 1 << 62)),
    (PartRequest(-5, 0), b""),
    (PartRequest(0, 1 << 62), b"x"),
    (PartAverage(HELD), b"\xff" * 400),
    (PartAbsent(1 << 62, -1), b""),
    (Leave(), b""),
]
AVERAGES: list[tuple[Message, bytes]] = [
    *(
        (PartAverage(Held(tile, attempt, b"\x07", 3.0, b"d" * 16)), b"\xff" * 100)
        for tile in (-1, 0, 9)
        for attempt in (0, 9)
    ),
    (PartAverage(Held(0, 0, b"", math.nan, b"d" * 16)), b""),
    (PartAbsent(-1, 0), b""),
    (PartAbsent(1 << 62, 0), b"x"),
    (PartData(0, 0, 1.0), b"x" * 4),
    (Leave(), b""),
]
REPORTS: list[Message] = [
    Report(held=[HELD] * 1000),
    Report(held=[Held(1 << 62, -1, b"", math.inf, b"d" * 16)], lost=[-1, 0, 1, 2, 99], moved_bytes=1 << 62),
    Assign([0], 1, 0),
    Gone(0),
    Commit(b"?" * 16, []),
    Abort(b"?" * 16, "because"),
    PartData(0, 0, 1.0),
]
NUMBERS = range(0, len(CONTRIBUTIONS), 5)
"""Which of them are tried here; `tests/sim/test_exchange.py` tries each."""


class HostileMember:
    """Joins groups of the good ones properly, and then sends them nonsense of one kind in every place.

    Args:
        victim: whom it asks to lead it.
        number: which nonsense.
    """

    def __init__(self, victim: Victim, number: int) -> None:
        self.victim, self.number = victim, number
        self.begun = 0
        self.endpoint = Endpoint(TcpTransport(Identity.ephemeral()), Env(), limits=Limits())

    async def once(self) -> bool:
        """Be in one round; False if no group would have us."""
        leader, found = self.victim.contact, False
        for _ in range(40):
            schema = schema_of(describe([torch.zeros(NUMEL)], [NoCompression()]).specs)
            member = Member(self.endpoint.contact, self.number % 2 == 0, None, b"\xc0")
            join = Join(f"{PREFIX}.0b", schema, {}, time.time() + 4.0, member)
            with contextlib.suppress(PeerError, TimeoutError):
                async with asyncio.timeout(6.0):
                    stream = await self.endpoint.open(leader, join, timeout_s=4.0)
                    try:
                        answer = await self._answer(stream)
                        if isinstance(answer, JoinRedirected):
                            leader = answer.leader
                        elif isinstance(answer, Begin):
                            found = True
                            await self._misbehave(answer, stream)
                    finally:
                        stream.abort()
            if found:
                return True
        return False

    async def _answer(self, stream: Stream[Any, Any]) -> Message | None:
        while (received := await stream.recv()) is not None:
            if not isinstance(received[0], JoinAccepted):
                answer: Message = received[0]
                return answer
        return None

    async def _misbehave(self, begin: Begin, control: Stream[Any, Any]) -> None:
        self.begun += 1
        others = [member.contact for member in begin.members if member.contact.peer != self.endpoint.peer_id]
        works = [self._contribute(begin.round_id, other) for other in others]
        await asyncio.gather(*works, self._report(control), return_exceptions=True)

    async def _contribute(self, round_id: bytes, other: Contact) -> None:
        stream: Any = await self.endpoint.open(other, Reduce(round_id), timeout_s=4.0)
        try:
            message, payload = CONTRIBUTIONS[self.number % len(CONTRIBUTIONS)]
            for _ in range(3):
                await stream.send(message, payload or None)
        finally:
            stream.abort()

    async def _report(self, control: Stream[Any, Any]) -> None:
        for _ in range(3):
            await control.send(REPORTS[self.number % len(REPORTS)])

    async def serve(self, stream: Stream[Any, Any], opening: Reduce) -> None:
        """As the owner of a share: nonsense for everybody, whatever they contribute."""
        message, payload = AVERAGES[self.number % len(AVERAGES)]
        await stream.send(message, payload or None)
        while (received := await stream.recv()) is not None:
            await stream.readinto(bytearray(received[1]))


def test_members_of_the_group_that_send_nonsense(swarm: Swarm) -> None:
    """Absurd tiles, attempts, weights, sizes, values, averages, reports: rounds go on with the good ones."""
    joined = 0

    async def work() -> None:
        nonlocal joined
        for number in NUMBERS:
            member = HostileMember((swarm.first, swarm.second)[number % 2], number)
            member.endpoint.serve_stream(Reduce, member.serve)
            await member.endpoint.start()
            try:
                joined += await member.once()
            finally:
                await member.endpoint.close()

    attack(swarm, work)
    assert joined >= len(NUMBERS) // 2
