"""The stream of one peer that joins another: its terms, its two sides, and the checks of what comes through it.

Everything that comes from the network is checked here before it is used: a `Join` before the machine hears of it, a
`Begin` before it becomes a `Group`. A message that does not pass costs its sender its place and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.averaging.group import ControlStream
from shoal.base.peer import PeerID
from shoal.errors import LocalError, PeerError, PeerProtocolError
from shoal.protocol.wire import (
    MAX_GROUP_SIZE,
    Begin,
    Join,
    JoinAccepted,
    JoinRedirected,
    JoinRefused,
    Leave,
    Member,
    encode,
)

__all__ = [
    "BEGIN_OVERHEAD_BYTES",
    "JoinRequest",
    "JoinTerms",
    "check_join",
    "check_last_answer",
    "end_stream",
    "member_bytes",
    "receive_answer",
]

BEGIN_OVERHEAD_BYTES = 1 << 12
"""A `Begin` takes so many bytes, and those of its members (`member_bytes`)."""

_SLICE_BYTES = 9
_SHOWN_CHARACTERS = 120
_TEXT_CHARACTERS = 1000
_END_STREAM_S = 3.0
"""The longest time for a stream to end in order."""


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """The terms on which others join: what must be the same at all members of a group.

    Attributes:
        schema: describes our tensors; equal bytes are equal schemas.
        settings: named values that must be equal in the whole run.
        compare_schema: takes the schema and the id of another peer; returns a sentence naming the first difference, or
            None if both can average together. Raises `PeerProtocolError` for bytes that are no schema.
    """

    schema: bytes
    settings: Mapping[str, str]
    compare_schema: Callable[[bytes, PeerID], str | None]

    def refusal(self, join: Join, me: PeerID) -> JoinRefused | None:
        """The reason why the sender can never be in a group with us; None if it can.

        Raises:
            PeerProtocolError: it has sent no schema.
        """
        peer = join.member.contact.peer
        for name in sorted({*self.settings, *join.settings}):
            here, there = self.settings.get(name), join.settings.get(name)
            if here != there:
                differs = f"{_shown(here)} at peer {me.short()}, {_shown(there)} at peer {peer.short()}"
                text = f"setting {name[:_SHOWN_CHARACTERS]!r} differs: {differs}"
                return JoinRefused("settings", text[:_TEXT_CHARACTERS])
        difference = None if join.schema == self.schema else self.compare_schema(join.schema, peer)
        return None if difference is None else JoinRefused("schema", difference[:_TEXT_CHARACTERS])


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value[:_SHOWN_CHARACTERS])


class JoinRequest:
    """One peer that asked us to lead it: its stream, from `Join` until it is refused, leaves, or its group is released.

    Answers leave in the order in which they were posted; the stream is watched without taking from it.

    Args:
        stream: the accepted stream.
        join: the message that opened it.

    Attributes:
        begun: done once `Begin` was sent, cancelled if it could not be.
        nbytes: that its member takes in `Begin`.
    """

    def __init__(self, stream: ControlStream, join: Join) -> None:
        self.stream, self.member, self.expiration = stream, join.member, join.expiration
        self.nbytes = member_bytes(join.member)
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox: asyncio.Queue[JoinAccepted | JoinRefused | JoinRedirected | Begin | None] = asyncio.Queue()
        self._released = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._watch())

    def post(self, answer: JoinAccepted | JoinRefused | JoinRedirected | Begin) -> None:
        """Send this after all messages that were posted before. After `Begin` another object reads the stream."""
        if isinstance(answer, Begin):
            self._unwatch()
        self._outbox.put_nowait(answer)

    def release(self) -> None:
        """The round is over: end the stream."""
        self._released.set()

    async def run(self) -> None:
        """Serve until the peer is refused, redirected or gone, or its group is released.

        Raises:
            PeerError: the stream is lost.
        """
        try:
            while (answer := await self._outbox.get()) is not None:
                await self.stream.send(answer)
                if isinstance(answer, Begin):
                    self.begun.set_result(None)
                    await self._released.wait()
                if not isinstance(answer, JoinAccepted):
                    return
        finally:
            self._unwatch()
            if not self.begun.done():
                self.begun.cancel()

    def _unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # its traceback knows us

    async def _watch(self) -> None:
        try:
            await self.stream.ready()
            received = await self.stream.recv()  # Leave, the end, or a message that has no place here
            if received is not None and received[1]:
                self.stream.abort()
        except PeerError:
            pass  # the peer is gone; nothing else matters here
        self._outbox.put_nowait(None)


async def receive_answer(stream: ControlStream) -> object:
    """The next message of a peer that we asked.

    Raises:
        PeerError: the stream ended, or carried something that it must not.
    """
    received = await stream.recv()
    if received is None:
        raise PeerProtocolError("the stream ended without an answer", stream.peer_id)
    message, payload_bytes = received
    if payload_bytes:
        stream.abort()
        raise PeerProtocolError("a payload where there is none", stream.peer_id)
    return message


async def end_stream(stream: ControlStream, *, leave: bool) -> None:
    """End a stream in order if the other side lets us; `leave` says `Leave` first. Takes 3 s at most."""
    try:
        async with asyncio.timeout(_END_STREAM_S):
            if leave:
                await stream.send(Leave())
            await stream.finish()
    except (PeerError, LocalError, TimeoutError):
        pass  # the other side is gone, or says something else: the stream cannot end in order
    finally:
        stream.abort()


# -------------------------------------------------------------------------------------------------------------- checks


def member_bytes(member: Member) -> int:
    """The bytes that this member takes in a `Begin`."""
    return len(encode(member)) + _SLICE_BYTES


def _check_member(member: Member, peer: PeerID) -> None:
    contact, bandwidth = member.contact, member.bandwidth
    if any(address.peer_id != contact.peer for address in contact.addresses):
        raise PeerProtocolError("a member's address names another peer", peer)
    if member.reduces and (not contact.addresses or bandwidth == 0):
        raise PeerProtocolError("a member would reduce, but has no address or no bandwidth", peer)
    if not member.reduces and not member.contributes:
        raise PeerProtocolError("a member neither contributes nor reduces", peer)


def check_join(join: Join, peer: PeerID) -> None:
    """Check a peer's word about itself when it asks to join.

    Raises:
        PeerProtocolError: it names another peer, or contradicts itself.
    """
    if join.member.contact.peer != peer:
        raise PeerProtocolError("asks to join in another peer's name", peer)
    _check_member(join.member, peer)


def check_last_answer(
    answer: object, leader: PeerID, member: Member, min_group_size: int
) -> JoinRefused | JoinRedirected | Begin:
    """Check what ends a join at the asking side. A `Begin` must name a group of `min_group_size` that `member` is in.

    Raises:
        PeerProtocolError: the answer has no place here, or its group contradicts itself.
    """
    if isinstance(answer, JoinRefused | JoinRedirected):
        return answer
    if not isinstance(answer, Begin):
        raise PeerProtocolError(f"{type(answer).__name__} before Begin", leader)
    members, count = answer.members, len(answer.members)
    peers = [each.contact.peer for each in members]
    if len(set(peers)) != count:
        raise PeerProtocolError("begins a group with a member twice", leader)
    if not min_group_size <= count <= MAX_GROUP_SIZE:
        raise PeerProtocolError(f"begins a group of {count}", leader)
    if member not in members:
        raise PeerProtocolError("begins a group without us, or says of us what we did not say", leader)
    if answer.coordinator >= count or peers[answer.coordinator] != leader:
        raise PeerProtocolError("begins a group with another coordinator than itself", leader)
    if len(answer.shares) != count or answer.tile_bytes < 1:
        raise PeerProtocolError("begins a group without a share for each member", leader)
    for each, elements in zip(members, answer.shares, strict=True):
        _check_member(each, leader)
        if elements and not each.reduces:
            raise PeerProtocolError("begins a group in which one reduces that cannot", leader)
    return answer
