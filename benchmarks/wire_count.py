"""Counts what simulated peers send, by kind: wraps the places where `shoal.rpc` sends, in this process only.

*progress*: where each peer stands. *dht*: finding others, and all that is written for it. *rounds*: joining a group and
deciding on its round. *state*: downloads. *beats*: signs of life. *values*: the tensors themselves, without the frames
around them. *other*: greetings, openings and ends of streams, and the frames around values. TLS is not there.
"""

# ruff: noqa: SLF001 (it counts where shoal itself hands bytes on)

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from shoal.rpc import framing
from shoal.rpc.link import CallLink
from shoal.rpc.stream import Stream
from shoal.transport.memory import MemoryConnection

__all__ = ["CONTROL", "Sent", "counted"]

CONTROL = ("progress", "dht", "rounds", "beats", "other")
"""All that is sent for the sake of the values and of states."""

_KINDS = {
    "progress": ("TellProgress", "ProgressTold", "TellChains", "ChainsTold", "WhoTrains", "Trainers"),
    "dht": ("DhtPing", "DhtPong", "DhtFind", "DhtFindReply", "DhtStore", "DhtStoreReply"),
    "rounds": (
        *("JoinAccepted", "JoinRefused", "JoinRedirected", "Begin", "Held", "Report", "Assign", "Commit", "Abort"),
        *("Gone", "Leave", "AskVerdict", "Verdict"),
    ),
    "state": (
        *("GetManifest", "ManifestReply", "ManifestPending", "Chunk", "MoreChunks"),
        *("WantStep", "StepsFrom", "StepTaken", "StepBytes", "StepGone"),
    ),
    "beats": ("Beat", "BeatReply"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_fields: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Sent:
    """What all peers have sent since counting began.

    Attributes:
        bytes: by kind.
        messages: by kind; of values, their tiles.
        begin: the bytes of the largest `Begin`.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.begin = 0
        self._last: tuple[object, int] = (None, 0)

    def add(self, kind: str, nbytes: int) -> None:
        """A message of this kind."""
        self.bytes[kind] += nbytes
        self.messages[kind] += 1

    def frame_bytes(self, message: object) -> int:
        """The bytes of a frame with this message; many in a row are the same object, as a leader's `Begin`."""
        if message is not self._last[0]:
            self._last = message, len(framing.pack(framing.Kind.DATA, message))
        return self._last[1]

    def clear(self) -> None:
        """Begin anew."""
        self.bytes.clear()
        self.messages.clear()


def _kind(frame: bytes) -> str:
    """Of a frame on a call link."""
    fields = _fields.decode(frame[framing.PREFIX_BYTES :])
    name = _text(fields[0])
    if name == "Note":
        return _KIND_OF.get(_text(fields[1]), "other")
    if name == "Call":
        return _KIND_OF.get(_text(fields[2]), "other")
    if name == "Reply":
        body = bytes(fields[2])
        return _KIND_OF.get(_text(_fields.decode(body)[0]), "other") if body[:1] >= b"\x90" else "other"
    return _KIND_OF.get(name, "other")


def _text(raw: msgspec.Raw) -> str:
    value: Any = msgspec.msgpack.decode(raw)
    return value if isinstance(value, str) else ""


@contextmanager
def counted() -> Iterator[Sent]:
    """Count, within this context."""
    sent = Sent()
    queue, write, send = CallLink._queue, MemoryConnection._send, Stream.send

    def queued(link: CallLink, frame: bytes) -> None:
        kind = _kind(frame)
        sent.add(kind, len(frame))
        sent.bytes["other"] -= len(frame)  # which counts all that is written
        queue(link, frame)

    def written(connection: MemoryConnection, pipe: Any, data: bytes) -> None:
        sent.bytes["other"] += len(data)
        write(connection, pipe, data)

    async def sending(stream: Stream[Any, Any], message: Any, payload: Any = None) -> None:
        name, nbytes = type(message).__name__, framing.payload_size(payload)
        kind = "values" if name in {"PartData", "PartAverage"} else _KIND_OF.get(name, "other")
        if kind != "other":
            nbytes += 0 if kind == "values" else sent.frame_bytes(message)
            sent.begin = max(sent.begin, nbytes if name == "Begin" else 0)
            sent.add(kind, nbytes)
            sent.bytes["other"] -= nbytes
        await send(stream, message, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallLink, "_queue", queued)
        patch.setattr(MemoryConnection, "_send", written)
        patch.setattr(Stream, "send", sending)
        yield sent
