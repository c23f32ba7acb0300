"""A peer that averages without end: what the abuse tests attack. Says in JSON lines on stdout what happens to it.

Run as `python -m tests.integration.abuse_victim RANK [ADDRESS]`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from shoal.averaging import Averager, AveragerSettings, TensorLock
from shoal.averaging.core import PeerCore
from shoal.base.clock import Env, ThreadExecutor
from shoal.base.peer import Address
from shoal.compression import view_bytes
from shoal.errors import RoundFailed
from shoal.events import Event, Warned
from shoal.protocol.identity import Identity
from shoal.transport.tcp import TcpTransport

PREFIX = "abuse"
NUMEL = 60_000
TILE_BYTES = 65_536
SETTINGS = AveragerSettings(
    window_s=4.0,
    request_timeout_s=2.0,
    silence_s=2.0,
    part_size_bytes=TILE_BYTES,
    allreduce_timeout_s=20.0,
)


def say(kind: str, value: Any) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps([kind, value]) + "\n")
    sys.stdout.flush()


def tell(event: Event) -> None:
    """Internal errors must not happen, whatever others send."""
    if isinstance(event, Warned):
        say("warned", f"{event.where}: {event.message}")


async def main(rank: int, addresses: list[str]) -> None:
    """Join, and average until killed."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as pool:
        env = Env(executor=ThreadExecutor(pool))
        env.events.subscribe(tell)
        identity = Identity.ephemeral()
        peers = [Address.parse(address) for address in addresses]
        core = await PeerCore.start(identity, TcpTransport(identity), env, peers)
        tensor = torch.zeros(NUMEL)
        averager = Averager(core, [tensor], PREFIX, SETTINGS, lock=TensorLock())
        averager.sharing.enable()
        say("joined", [str(address) for address in core.endpoint.contact.addresses])
        generator = torch.Generator().manual_seed(rank)
        while True:
            tensor.uniform_(-1.0, 1.0, generator=generator)
            try:
                result = await averager.step(timeout_s=30.0, allow_retries=False, gather={"rank": rank})
            except RoundFailed as error:
                say("failed", error.reason)
                continue
            finite = bool(torch.isfinite(tensor).all()) and float(tensor.abs().max()) <= 1.0
            sha = hashlib.sha256(view_bytes(tensor)).hexdigest()
            say("round", [result.round_id.hex(), sha, finite, len(result.outcome.contributors)])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
