"""The emulator's own process: reads what hosts send from their TUN devices, and writes it to others when its time has
come. Started by `benchmarks.emulator.namespaces`, with the devices open. Ends when its standard input does, and then
prints what it did as one line of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.emulator.star import Shape, Star
from benchmarks.emulator.train import HEAD_BYTES

_BATCH = 64
"""Trains that are read from one device before the others have their turn."""

_LARGEST_BYTES = 65536 + HEAD_BYTES
_TARGET = slice(HEAD_BYTES + 16, HEAD_BYTES + 20)
_REST_S = 0.0005
"""How long the loop rests in each turn, so that it finds more than one train to do: packets are at most so much late,
like those of a network card that raises few interrupts."""


PERIOD_S = 0.1
"""What hosts have sent is counted for each period of this length."""


def forward(devices: list[int], addresses: list[str], star: Star) -> dict[str, Any]:
    """Carry packets between `devices` until the standard input ends. Returns counts, and how late the loop was."""
    hosts = {socket.inet_aton(address): index for index, address in enumerate(addresses)}
    stdin = sys.stdin.fileno()
    watched = [*devices, stdin]
    latest_s, now = 0.0, time.monotonic()
    began, sent = now, [Counter[int]() for _ in devices]
    while True:
        due = star.next_at
        ready = select.select(watched, (), (), None if due is None else max(due - now, 0.0))[0]
        if stdin in ready:
            break
        time.sleep(_REST_S)
        now = time.monotonic()
        if due is not None:
            latest_s = max(latest_s, now - due)
        for source, device in enumerate(devices):
            if device in ready:
                for train in _read(device):
                    # Of an IPv4 packet; others, as when IPv6 looks for routers, have none.
                    if (target := hosts.get(train[_TARGET])) is not None:
                        sent[source][int((now - began) / PERIOD_S)] += star.send(now, source, target, train)
        for host, train in star.arrivals(now):
            with contextlib.suppress(OSError):  # the device is being taken away
                os.write(devices[host], train)
    lines = (*star.up, *star.down)
    return {
        "packets": sum(line.carried for line in star.up),
        "lost": star.lost,
        "dropped": sum(line.dropped for line in lines),
        "latest_ms": latest_s * 1e3,
        "sent_bytes": [[each[number] for number in range(max(each, default=-1) + 1)] for each in sent],
        "cpu_s": time.process_time(),
    }


def _read(device: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(_BATCH):
            yield os.read(device, _LARGEST_BYTES)


def main() -> None:
    gc.disable()  # nothing here is a cycle, and there are many tuples to look through
    with contextlib.suppress(OSError):  # lines do not wait for processors that others keep busy
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    options = json.loads(sys.argv[1])
    star = Star(len(options["addresses"]), Shape(**options["shape"]), options["seed"], options["up_mbit"])
    print(json.dumps(forward(options["devices"], options["addresses"], star)), flush=True)


if __name__ == "__main__":
    main()
