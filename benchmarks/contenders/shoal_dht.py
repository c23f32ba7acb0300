"""shoal's DHT, through its public API."""

from __future__ import annotations

from typing import Any

import shoal
from benchmarks.contenders.dht_worker import Node, Result, serve


class ShoalNode(Node):
    """One node."""

    def start(self, invites: list[str], **options: Any) -> str:
        self.dht = shoal.DHT(initial_peers=invites, start=True, startup_timeout=60.0, **options)
        return str(self.dht.get_visible_maddrs()[0])

    def store(self, key: str, value: bytes, lifetime_s: float) -> Result:
        return self.dht.store(key, value, shoal.get_dht_time() + lifetime_s, return_future=True)

    def get(self, key: str, *, latest: bool) -> Result:
        return self.dht.get(key, latest=latest, return_future=True)

    def stop(self) -> None:
        self.dht.shutdown()


if __name__ == "__main__":
    serve(ShoalNode)
