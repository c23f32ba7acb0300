"""The uploads of one peer to newcomers: the open streams, and when the next piece may go.

All states that are served on an endpoint share one object, since they share the peer's line and processor. Invariant: a
piece waits for the fixed limit (`Pacer`), and for rounds (`BackgroundLimit`) `LONGEST_HOLD_S` at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

from shoal.rpc import Endpoint, Stream
from shoal.state.wire.pace import LONGEST_HOLD_S, LOOK_AGAIN_S, BackgroundLimit, Pacer

__all__ = ["Upload"]


class Upload:
    """The streams of states of one endpoint. Take it with `of`.

    Args:
        endpoint: the endpoint whose other traffic is watched.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = ref(endpoint)  # the key in the table of uploads: this object must not keep it alive
        self._background = BackgroundLimit()
        self._streams: dict[Stream[Any, Any], int] = {}  # and what their connections had sent before
        self._ended_bytes = 0

    @classmethod
    def of(cls, endpoint: Endpoint) -> Upload:
        """The one of this endpoint."""
        if endpoint not in _uploads:
            _uploads[endpoint] = cls(endpoint)
        return _uploads[endpoint]

    @contextmanager
    def stream(self, stream: Stream[Any, Any]) -> Iterator[None]:
        """Count this stream's traffic in the block as that of a state."""
        self._streams[stream] = stream.bytes_sent
        try:
            with self._serving.env.low_latency():
                yield
        finally:
            self._ended_bytes += stream.bytes_sent - self._streams.pop(stream)

    def count(self, nbytes: int) -> None:
        """So much is sent beside the streams for states: it is no round."""
        self._ended_bytes += nbytes

    def watch(self) -> None:
        """Begin to watch the other traffic: a receiver will soon ask for a state."""
        self._background.must_wait(0.0, asyncio.get_running_loop().time(), self._other_bytes)

    def piece_bytes(self, nbytes: int, pacer: Pacer, fraction: float | None) -> int:
        """Return how many of `nbytes` to send at once."""
        size = pacer.piece_bytes(nbytes)
        return size if fraction is None else min(size, self._background.piece_bytes)

    async def admit(self, nbytes: int, pacer: Pacer, fraction: float | None) -> None:
        """Wait until so many bytes may go; they count as sent.

        Args:
            nbytes: one piece.
            pacer: the fixed limit.
            fraction: the fraction of this peer's other traffic that states may have; None for no such limit.
        """
        loop = asyncio.get_running_loop()
        if fraction is not None:
            for _ in range(round(LONGEST_HOLD_S / LOOK_AGAIN_S)):
                if not self._background.must_wait(fraction, loop.time(), self._other_bytes):
                    break
                await asyncio.sleep(LOOK_AGAIN_S)
        self._background.sent(nbytes, loop.time())
        if (wait_s := pacer.reserve(nbytes, loop.time())) > 0:
            await asyncio.sleep(wait_s)

    def _other_bytes(self) -> int:
        served = sum(stream.bytes_sent - before for stream, before in self._streams.items())
        return self._serving.traffic[0] - self._ended_bytes - served

    @property
    def _serving(self) -> Endpoint:
        endpoint = self._endpoint()
        assert endpoint is not None, "somebody is served by an endpoint that is gone"
        return endpoint


_uploads: WeakKeyDictionary[Endpoint, Upload] = WeakKeyDictionary()
