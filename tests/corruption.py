"""Members that turn bad: a transport whose peer goes on as it should, while what leaves it is changed, or is nothing.

Works on frames, above the encryption: in the simulation and over real sockets alike. Nothing here sends wrong numbers
of the right form; against that nothing is promised (see `docs/why/protocol.md`, section 1).

========  ==============================================================================================================
kind      what leaves the peer
========  ==============================================================================================================
garbage   random bytes in place of each frame
nan       tensor payloads of nothing but NaN, whatever their type
size      tensor payloads that are a few bytes too short, in frames that are well formed
digest    reports and averages that name another digest
mute      nothing
========  ==============================================================================================================
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import Commit, Held, PartAverage, Report, decode, encode
from shoal.rpc.framing import PREFIX_BYTES, Kind
from shoal.sim.faults import HostFault
from shoal.sim.swarm import Swarm
from shoal.transport.base import Acceptor, Buffer, Connection, Transport
from shoal.transport.uplink import Uplink

__all__ = ["KINDS", "Corrupt", "CorruptibleTransport", "Gate"]

KINDS = ("garbage", "nan", "size", "digest", "mute")

_CUT_BYTES = 4
_DIGESTED = Report | PartAverage | Commit


class Gate:
    """What every frame of one peer goes through.

    Attributes:
        kind: how frames are changed now; None: they are not.
        changed: how many were, so far.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.kind: str | None = None
        self.changed = 0

    def through(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """What leaves in place of these buffers, which are one write of one or more frames."""
        after = list(buffers) if self.kind is None else self._change(list(buffers))
        self.changed += after != list(buffers)
        return after

    def _change(self, buffers: list[Buffer]) -> list[Buffer]:
        if self.kind == "mute":
            return []
        if self.kind == "garbage":
            return [self._rng.randbytes(max(PREFIX_BYTES, len(buffers[0])))]
        head = bytes(buffers[0])
        if head[0] != Kind.DATA:
            return buffers
        if self.kind == "digest":
            return [self._other_digest(head), *buffers[1:]]
        if len(buffers) < 2:
            return buffers
        nbytes = memoryview(buffers[1]).nbytes
        if self.kind == "nan":
            return [head, b"\xff" * nbytes]
        short = max(0, nbytes - _CUT_BYTES)
        cut = head[:5] + short.to_bytes(4, "big") + head[9:]
        return [cut, memoryview(buffers[1]).cast("B")[:short]]

    def _other_digest(self, head: bytes) -> bytes:
        try:
            message: _DIGESTED = decode(head[PREFIX_BYTES:], _DIGESTED)  # type: ignore[arg-type]
        except msgspec.MsgspecError:
            return head  # some other message
        changed: _DIGESTED
        match message:
            case Report(held=held):
                changed = msgspec.structs.replace(message, held=[_flip(each) for each in held])
            case PartAverage(held=held):
                changed = PartAverage(_flip(held))
            case Commit(tiles=tiles):
                changed = msgspec.structs.replace(message, tiles=[_flip(each) for each in tiles])
        header = encode(changed)
        return head[:1] + len(header).to_bytes(4, "big") + head[5:9] + header


def _flip(held: Held) -> Held:
    return msgspec.structs.replace(held, digest=bytes([held.digest[0] ^ 1]) + held.digest[1:])


class _Connection:
    """A connection whose writes go through the gate."""

    def __init__(self, inner: Connection, gate: Gate) -> None:
        self._inner, self._gate = inner, gate

    async def write(self, *buffers: Buffer) -> None:
        through = self._gate.through(buffers)
        if through:
            await self._inner.write(*through)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class CorruptibleTransport:
    """A transport whose connections go through one gate.

    Args:
        inner: what carries them.
        rng: makes the garbage.
    """

    def __init__(self, inner: Transport, rng: random.Random) -> None:
        self.inner = inner
        self.gate = Gate(rng)

    @property
    def peer_id(self) -> PeerID:
        return self.inner.peer_id

    @property
    def addresses(self) -> Sequence[Address]:
        return self.inner.addresses

    @property
    def uplink(self) -> Uplink:
        return self.inner.uplink

    async def listen(self, acceptor: Acceptor) -> None:
        await self.inner.listen(lambda connection: acceptor(_Connection(connection, self.gate)))

    async def dial(self, peer_id: PeerID, addresses: Sequence[Address], *, timeout_s: float) -> Connection:
        connection = await self.inner.dial(peer_id, addresses, timeout_s=timeout_s)
        return _Connection(connection, self.gate)

    async def close(self) -> None:
        await self.inner.close()


class Corrupt(HostFault, frozen=True, kw_only=True):
    """What leaves the host is changed (`KINDS`) for `duration_s`, then nothing leaves it for `mute_s`.

    For swarms whose peers have a `core` that stands on a `CorruptibleTransport`.
    """

    kind: str
    duration_s: float
    mute_s: float = 0.0

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.at_s + self.duration_s + self.mute_s

    def actions(self, swarm: Swarm[Any]) -> Sequence[tuple[float, Callable[[], None]]]:
        def turn(kind: str | None) -> None:
            if self.host in swarm.peers:
                swarm.peer(self.host).core.endpoint._transport.gate.kind = kind

        mute = [(self.at_s + self.duration_s, lambda: turn("mute"))] if self.mute_s else []
        return [(self.at_s, lambda: turn(self.kind)), *mute, (self.end_s, lambda: turn(None))]
