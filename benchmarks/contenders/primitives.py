"""What moving bytes cannot do without, each by itself: one process of several that do the same at the same time.

`benchmarks.cost` asks for `memcpy`, `crypto` or `sockets`; the answer is `cpu_s` of this process and `bytes`. Sizes are
those of a round: vectors of 40 MB, records of 512 KiB, two of them in one write, reads of a little more.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import torch

from benchmarks.contenders.orders import obey
from shoal.compression import view_bytes
from shoal.transport.layers import BUNCH_BYTES, RECORD_BYTES, Scratch
from shoal.transport.sealed import KEY_BYTES, _Key
from shoal.transport.sockets import tune

NUMEL = 10_000_000
TIMES = 4
TAG_BYTES = 16


class Primitives:
    """The memory that all of them work on."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.source, self.target = torch.rand(NUMEL), torch.zeros(NUMEL)
        self.scratch = Scratch()
        self.ends = connected()

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "stop":
            return {}
        work = {"memcpy": self.memcpy, "crypto": self.crypto, "sockets": self.sockets}[request["do"]]
        before = time.process_time()
        for _ in range(TIMES):
            work()
        return {"cpu_s": time.process_time() - before, "bytes": TIMES * self.source.nbytes}

    def memcpy(self) -> None:
        self.target.copy_(self.source)

    def crypto(self) -> None:
        """Seal and open: from one vector to a record to the other vector."""
        secret = os.urandom(KEY_BYTES)
        sealing, opening = _Key(secret), _Key(secret)
        source, target = view_bytes(self.source), view_bytes(self.target)
        for start in range(0, len(source), RECORD_BYTES):
            plain = source[start : start + RECORD_BYTES]
            record = self.scratch.sending[: len(plain) + TAG_BYTES]
            sealing.seal(plain, record)
            opening.open_into(record, target[start : start + RECORD_BYTES])

    def sockets(self) -> None:
        """Write and read, both ends in this process."""
        total = self.source.nbytes
        writer = threading.Thread(target=self.write, args=(total,))
        writer.start()
        received = 0
        while received < total:
            received += self.ends[1].recv_into(self.scratch.receiving)
        writer.join()

    def write(self, total: int) -> None:
        for start in range(0, total, BUNCH_BYTES):
            self.ends[0].sendall(self.scratch.sending[: min(BUNCH_BYTES, total - start)])


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends on loopback, set up as shoal's are, that wait."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        tune(end)
        end.setblocking(True)
    return near, far


if __name__ == "__main__":
    obey(Primitives().measure)
