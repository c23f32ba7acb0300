"""What a stranger makes a peer spend: descriptors and time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.hardships.kit import (
    PREFIX,
    Stranger,
    address_of,
    ballast,
    beside,
    elsewhere,
    jobs,
    left,
    own_core,
    pace,
    strangers,
    swarm,
)
from benchmarks.truth.kit import Job, Report, Trainee, Verdict, changed, train
from benchmarks.truth.peers import Line, Peer, Peers
from shoal.errors import PeerError
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Call, Contact, GetManifest, Hello, ManifestReply
from shoal.rpc.framing import Kind, pack
from shoal.transport.tcp import TcpTransport

__all__ = ["REPLAYS"]

_FILES = 256
_CONNECTIONS = 1000
_CALLS_S = 5000
_TURN_S, _TURNS = 8.0, 3
_NIL = msgspec.Raw(b"\xc0")


# ---------------------------------------------------------------------------------------------------------- descriptors


def opens_files(_: Trainee) -> None:
    """As a data loader does."""
    with contextlib.ExitStack() as stack:
        for place in ["/dev/null"] * 40:
            stack.enter_context(Path(place).open("rb"))


def with_few_files(line: Line, job: Job) -> Report:
    """Train in a process that may open 256 files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    return train(line, job)


def descriptors() -> Verdict:
    """1,000 proved connections with fresh keys from one host, and 256 files: the program opens its own, peers train."""
    proved = 0

    async def attack(those: Sequence[Peer]) -> None:
        nonlocal proved
        held = list[TcpTransport]()
        with elsewhere():
            try:
                for number in range(_CONNECTIONS):
                    transport, to = TcpTransport(Identity.ephemeral(), client_mode=True), address_of(those[number % 2])
                    held.append(transport)
                    with contextlib.suppress(PeerError, OSError):
                        connection = await transport.dial(to.peer_id, (to,), timeout_s=5.0)
                        await connection.write(pack(Kind.HELLO, Hello(Contact(transport.peer_id))))
                        proved += 1
                await asyncio.sleep(1e9)
            finally:
                await asyncio.gather(*(transport.close() for transport in held))

    with Peers() as peers:
        those = swarm(peers, jobs(2, hook=opens_files), with_few_files)
        calm = pace(those[0], 8.0)

        def measured() -> tuple[float, float]:
            flooded = pace(those[0], 15.0)
            late = peers.start(
                train, job=changed(jobs(1)[0], index=9, entries=(str(address_of(those[0])),), target=160)
            )
            began = time.monotonic()
            late.until_steps(3, 60.0)
            took_s = time.monotonic() - began
            late.kill()
            return flooded, took_s

        flooded, took_s = asyncio.run(beside(attack(those), measured))
        left(those)
    said = f"{proved} proved; {calm:.1f} epochs a second, then {flooded:.1f}; a newcomer took part after {took_s:.1f} s"
    return Verdict(held=proved > 200 and flooded > 0.5 * calm and took_s < 30.0, measured=said)


# ---------------------------------------------------------------------------------------------------------------- calls


def on_first_core(line: Line, job: Job) -> Report:
    """Train on a core of its own."""
    own_core(0)
    return train(line, job)


def on_second_core(line: Line, address: str) -> None:
    """By turns: spin, or make calls that are refused, 5,000 a second."""
    own_core(1)
    asyncio.run(_by_turns(line, address))


async def _by_turns(line: Line, text: str) -> None:
    from shoal.base.peer import Address

    address = Address.parse(text)
    bunch = b"".join(pack(Kind.CALL, Call(number, "Nothing", 1.0, _NIL)) for number in range(50))
    for turn in range(2 * _TURNS):
        with elsewhere():
            transport = TcpTransport(Identity.ephemeral(), client_mode=True)
            connection = await transport.dial(address.peer_id, (address,), timeout_s=5.0)
        await connection.write(pack(Kind.HELLO, Hello(Contact(transport.peer_id))))
        reading = asyncio.create_task(_swallow(connection))
        began, sent = time.monotonic(), 0
        line.say("turn")
        while (now := time.monotonic()) < began + _TURN_S:
            if turn % 2 and sent < (now - began) * _CALLS_S:
                with contextlib.suppress(TimeoutError, PeerError):
                    async with asyncio.timeout(max(0.01, began + _TURN_S - now)):
                        await connection.write(bunch)
                sent += 50
            await asyncio.sleep(0)
        reading.cancel()
        await transport.close()
    line.say("done")


async def _swallow(connection: object) -> None:
    with contextlib.suppress(PeerError):
        while True:
            await connection.readinto(bytearray(64))  # type: ignore[attr-defined]


def small_calls() -> Verdict:
    """5,000 refused calls a second from one stranger: training keeps 0.9 of what it has beside one that only spins."""
    with Peers() as peers:
        [peer] = swarm_alone(peers)
        stranger = peers.start(on_second_core, address=str(address_of(peer)))
        rates = list[float]()
        for _ in range(2 * _TURNS):
            stranger.wait("turn")
            time.sleep(1.0)
            rates.append(pace(peer, _TURN_S - 2.0))
        left([peer])
    spun, called = statistics.median(rates[::2]), statistics.median(rates[1::2])
    measured = f"{spun:.1f} epochs a second beside spinning, {called:.1f} beside calls: {called / spun:.2f}"
    return Verdict(held=called >= 0.9 * spun, measured=measured)


def swarm_alone(peers: Peers) -> list[Peer]:
    """One peer that computes all the time."""
    peer = peers.start(on_first_core, job=changed(jobs(1)[0], pace_s=0.0, batch=64, target=640))
    peer.until_epoch(5)
    return [peer]


# --------------------------------------------------------------------------------------------------------------- copies


def manifests() -> Verdict:
    """Three keys of one host ask for the state (10 MB) without pause and never take it: peers train, newcomers come."""
    shown, answers = set[bytes](), 0

    async def ask(stranger: Stranger, peer: Peer) -> None:
        nonlocal answers
        address = address_of(peer)
        to = Contact(address.peer_id, (address,))
        while True:
            with contextlib.suppress(PeerError):
                reply = await stranger.endpoint.call(to, GetManifest(PREFIX), timeout_s=5.0)
                answers += 1
                if isinstance(reply, ManifestReply):
                    shown.add(reply.snapshot)

    async def attack(those: Sequence[Peer]) -> None:
        async with strangers(3) as asking:
            await asyncio.gather(*(ask(stranger, peer) for stranger in asking for peer in those))

    with Peers() as peers:
        those = swarm(peers, jobs(3, **ballast(10)))
        calm = pace(those[0], 15.0)

        def measured() -> tuple[float, float]:
            asked = pace(those[0], 30.0)
            job = changed(jobs(1, **ballast(10))[0], index=9, entries=(str(address_of(those[0])),), target=240)
            began = time.monotonic()
            late = peers.start(train, job=job)
            late.until_steps(3, 60.0)
            took_s = time.monotonic() - began
            late.kill()
            return asked, took_s

        asked, took_s = asyncio.run(beside(attack(those), measured))
        left(those)
    said = (
        f"{calm:.1f} epochs a second, then {asked:.1f} beside {answers} answers, with {len(shown)} copies of the three"
    )
    return Verdict(
        held=asked > 0.8 * calm and took_s < 30.0, measured=f"{said}; a newcomer took part after {took_s:.1f} s"
    )


REPLAYS = (descriptors, small_calls, manifests)
