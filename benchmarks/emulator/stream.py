"""Plain TCP streams between hosts, to see what the emulator itself lets through.

One process on each host sends to some of the others, and counts for a while what comes in.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection

from benchmarks.emulator.namespaces import ROOT, Emulator

__all__ = ["streams_mbit"]

_PORT = 5001
_BUFFER_BYTES = 1 << 18
_PATIENCE_S = 30.0


def streams_mbit(net: Emulator, congestion: str, seconds: float, pairs: Collection[tuple[int, int]]) -> list[float]:
    """What each host receives, in 10^6 bits of payload per second, from the first byte sent on.

    Args:
        net: the hosts.
        congestion: name of the congestion control, as the kernel has it.
        seconds: how long to count.
        pairs: of sender and receiver, one stream each, all at once.

    Raises:
        OSError: the kernel does not have it, or the streams could not be made.
    """
    hosts = sorted({host for pair in pairs for host in pair})
    processes: list[subprocess.Popen[str]] = []
    try:
        for host in hosts:
            targets = [net.addresses[target] for source, target in pairs if source == host]
            senders = sum(target == host for _, target in pairs)
            options = json.dumps([net.addresses[host], targets, senders, congestion, seconds])
            processes.append(
                subprocess.Popen(
                    (*net.command(host), sys.executable, "-m", "benchmarks.emulator.stream", options),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                )
            )
        answers = []
        for told in ("listen", "connect", "send"):  # each when all have done what was before
            for process in processes:
                assert process.stdin is not None
                print(told, file=process.stdin, flush=True)
            answers = [_answer(process) for process in processes]
        return [float(answer) for answer in answers]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    answer = process.stdout.readline().strip()
    if not answer or answer.startswith("error"):
        raise OSError(answer or "a host's process ended")
    return answer


class Count:
    """Bytes received until a time."""

    def __init__(self) -> None:
        self.received, self.until = 0, 0.0

    def receive(self, connection: socket.socket) -> None:
        buffer = bytearray(_BUFFER_BYTES)
        with contextlib.suppress(OSError):
            while count := connection.recv_into(buffer):
                if not self.until or time.monotonic() <= self.until:
                    self.received += count


def send(connection: socket.socket) -> None:
    data = bytes(_BUFFER_BYTES)
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(data)


def serve(host: str, targets: list[str], senders: int, congestion: str, seconds: float) -> None:
    """Be one host: obey the words on the standard input."""
    count, streams = Count(), []
    sys.stdin.readline()
    listener = socket.create_server((host, _PORT))
    listener.settimeout(_PATIENCE_S)
    print("listening", flush=True)
    sys.stdin.readline()
    for target in targets:
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        sock.connect((target, _PORT))
        streams.append(sock)
    accepted = [listener.accept()[0] for _ in range(senders)]
    print("connected", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    count.until = begin + seconds
    for stream in streams:
        threading.Thread(target=send, args=(stream,), daemon=True).start()
    for connection in accepted:
        threading.Thread(target=count.receive, args=(connection,), daemon=True).start()
    time.sleep(seconds)
    print(count.received * 8e-6 / seconds, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    try:
        serve(*json.loads(sys.argv[1]))
    except OSError as error:
        print(f"error: {error}", flush=True)
