"""shoal, with the bytes counted that pass each place in which a round copies or reads them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.contenders.shoal_peer import ShoalPeer
from benchmarks.contenders.worker import serve
from shoal.averaging.allreduce.vector import TileDigests, Vector
from shoal.transport import sealed
from shoal.transport.connection import TcpConnection
from shoal.transport.layers import ReceiveBuffer


class Touched:
    """Counts from when it is made. Threads of the executor count too, hence the lock."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), Counter[str]()
        for name in ("copy_in", "apply"):
            self._wrap(Vector, name, lambda vector, *_: 4 * vector.layout.numel)
        for name in ("begin_sum", "decoded", "add", "finish", "land"):
            self._wrap(Vector, name, lambda vector, part, *_: vector.encoded_bytes(part))
        self._wrap(TileDigests, "of", lambda _, held, data: memoryview(data).nbytes, "digest")
        self._wrap(sealed._Key, "seal", lambda _, plain, record: len(plain))  # noqa: SLF001
        self._wrap(sealed._Key, "open_into", lambda _, record, plain: len(plain), "open")  # noqa: SLF001
        self._wrap(TcpConnection, "_flush", lambda _, data: len(data), "written")
        self._wrap(TcpConnection, "buffer_updated", lambda _, nbytes: nbytes, "received")
        self._count_kept()

    def take(self) -> dict[str, int]:
        """The bytes since the last call."""
        with self._lock:
            counted, self._bytes = self._bytes, Counter()
        return dict(counted)

    def _count(self, place: str, nbytes: int) -> None:
        with self._lock:
            self._bytes[place] += nbytes

    def _wrap(self, owner: type, name: str, size: Callable[..., int], place: str = "") -> None:
        inner = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count(place or name, size(*args, **kwargs))
            return inner(*args, **kwargs)

        setattr(owner, name, counted)

    def _count_kept(self) -> None:
        """Received bytes are copied where a record has come in part: to memory of their own, and back before it."""
        keep, receive_buffer = ReceiveBuffer.keep, ReceiveBuffer.receive_buffer

        def counted_keep(self: ReceiveBuffer, rest: memoryview) -> None:
            keep(self, rest)
            count("kept", len(self) if self.view.obj is not rest.obj else 0)

        def counted_receive_buffer(self: ReceiveBuffer, wanted: int) -> memoryview:
            buffer = receive_buffer(self, wanted)
            count("kept", len(self) if buffer.obj is not self.view.obj else 0)
            return buffer

        count = self._count
        setattr(ReceiveBuffer, "keep", counted_keep)  # noqa: B010 (as `_wrap` does it)
        setattr(ReceiveBuffer, "receive_buffer", counted_receive_buffer)  # noqa: B010


class CountedPeer(ShoalPeer):
    """One peer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counter = Touched()

    def touched(self) -> dict[str, int]:
        return self.counter.take()


if __name__ == "__main__":
    serve(CountedPeer)
