"""One peer of `benchmarks.growth`, in a process of its own.

=========  ==========================================  =============================================================
request    meaning                                     answer
=========  ==========================================  =============================================================
start      join the peers at `invites` (none: begin)   `invite`
average    average `numel` float32 once                nothing
store      store `key`                                 nothing
get        get `key`, from all that should hold it     nothing
sent       what was sent so far                        `messages`, `bytes`
stop       leave                                       nothing
=========  ==========================================  =============================================================
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import shoal
from benchmarks.contenders.counting import Messages
from benchmarks.contenders.orders import obey


class Peer:
    """It averages with all the others."""

    def __init__(self, peers: int, numel: int) -> None:
        self.peers, self.numel = peers, numel
        self.messages = Messages()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "start":
                self.dht = shoal.DHT(initial_peers=request["invites"], start=True)
                self.averager = shoal.DecentralizedAverager(
                    [torch.ones(self.numel)],
                    self.dht,
                    start=True,
                    prefix="growth",
                    target_group_size=self.peers,
                    min_group_size=self.peers,
                )
                return {"invite": str(self.dht.get_visible_maddrs()[0])}
            case "average":
                self.averager.step(timeout=60.0)
            case "store":
                if not self.dht.store(request["key"], bytes(64), shoal.get_dht_time() + 600.0):
                    raise RuntimeError("not stored")
            case "get":
                if self.dht.get(request["key"], latest=True) is None:
                    raise RuntimeError("not found")
            case "sent":
                return {"messages": self.messages.sent, "bytes": self.dht.core().endpoint.traffic[0]}
            case "stop":
                self.averager.shutdown()
                self.dht.shutdown()
        return {}


if __name__ == "__main__":
    obey(Peer(int(sys.argv[1]), int(sys.argv[2])).answer)
