"""One peer of `benchmarks.soak`: averages without end, and says on stdout how each round ended. Ends with its stdin."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time

import torch

import shoal
from shoal.compression import view_bytes
from shoal.events import Event, RoundFinished, Warned


def main(address: str, numel: int, timeout_s: float) -> None:
    """Average until killed."""
    torch.set_num_threads(1)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    rounds = [""]

    def note(event: Event) -> None:
        if isinstance(event, RoundFinished):
            rounds.append(event.round_id.hex())
            del rounds[:-1]
        elif isinstance(event, Warned):
            say(warned=f"{event.where}: {event.message}")

    with shoal.DHT([address], start=True, startup_timeout=60.0) as dht:
        dht.events.subscribe(note)
        tensor = torch.zeros(numel)
        averager = shoal.DecentralizedAverager([tensor], dht, start=True, prefix="soak", sender_timeout=2.0)
        say(ready=str(dht.peer_id))
        generator = torch.Generator().manual_seed(os.getpid())
        while True:
            with averager.get_tensors():
                tensor.uniform_(-1.0, 1.0, generator=generator)
            began = time.monotonic()
            try:
                group = averager.step(timeout=timeout_s, allow_retries=False)
            except shoal.RoundFailed as error:
                say(failed=error.reason, took=time.monotonic() - began)
            else:
                digest = hashlib.blake2b(view_bytes(tensor), digest_size=8).hexdigest()
                say(round=rounds[-1], digest=digest, size=len(group), took=time.monotonic() - began)


def say(**value: object) -> None:
    """Tell the supervisor."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def end_with_stdin() -> None:
    """The supervisor is gone, or has had enough."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
