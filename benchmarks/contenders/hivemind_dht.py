"""hivemind 1.1.12's DHT. Runs with the Python of hivemind's own environment; shoal is not there."""

from __future__ import annotations

from typing import Any

import hivemind  # type: ignore[import-not-found]
from hivemind.utils.timed_storage import get_dht_time  # type: ignore[import-not-found]

from benchmarks.contenders.dht_worker import Node, Result, serve


class HivemindNode(Node):
    """One node: this process, hivemind's DHT process, and its daemon."""

    def start(self, invites: list[str], **options: Any) -> str:
        self.dht = hivemind.DHT(initial_peers=invites, start=True, **options)
        return str(self.dht.get_visible_maddrs()[0])

    def store(self, key: str, value: bytes, lifetime_s: float) -> Result:
        expires = get_dht_time() + lifetime_s
        return self.dht.store(key, value, expires, return_future=True)

    def get(self, key: str, *, latest: bool) -> Result:
        return self.dht.get(key, latest=latest, return_future=True)

    def stop(self) -> None:
        self.dht.shutdown()


if __name__ == "__main__":
    serve(HivemindNode)
