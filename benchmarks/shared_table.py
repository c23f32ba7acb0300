"""One table in place of a DHT, for simulations of many peers: `shared_table` puts it under each peer that starts.

A write or a read takes two round trips of virtual time, and always succeeds. Nothing is sent for it, and no links are
made. What the DHT costs is measured on its own (``benchmarks.dht_sim``, ``benchmarks.merge_sim`` without this).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.base.clock import Env
from shoal.dht import Item, ValueWithExpiration
from shoal.rpc import Endpoint

__all__ = ["shared_table"]

_TAKES_S = 0.1


class _Node:
    """What the rest of a peer asks of its DHT node."""

    neighbours = 0
    initial_peers: Sequence[object] = ()

    def __init__(self, table: dict[object, dict[object, ValueWithExpiration]], endpoint: Endpoint, env: Env) -> None:
        self._table, self._env, self.peer_id = table, env, endpoint.peer_id

    async def bootstrap(self, *_: object, **__: object) -> None:
        """It is there."""
        await asyncio.sleep(_TAKES_S)

    async def find_lost(self) -> None:
        """Nobody is lost."""

    async def look_around(self) -> None:
        """There is nothing to see."""

    async def close(self) -> None:
        """Nothing is held here."""

    async def store(self, key: object, value: object, expiration: float, subkey: object = None, **_: object) -> bool:
        """See `DhtNode.store`."""
        await asyncio.sleep(_TAKES_S)
        self._write(Item(key, value, expiration, subkey))  # type: ignore[arg-type]
        return True

    async def store_many(self, items: Sequence[Item], **_: object) -> list[bool]:
        """See `DhtNode.store_many`."""
        await asyncio.sleep(_TAKES_S)
        for item in items:
            self._write(item)
        return [True] * len(items)

    async def exchange(self, item: Item, **_: object) -> tuple[bool, ValueWithExpiration | None]:
        """See `DhtNode.exchange`."""
        await asyncio.sleep(_TAKES_S)
        self._write(item)
        return True, self._read(item.key)

    async def get(self, key: object, **_: object) -> ValueWithExpiration | None:
        """See `DhtNode.get`."""
        await asyncio.sleep(_TAKES_S)
        return self._read(key)

    def _write(self, item: Item) -> None:
        entries = self._table.setdefault(item.key, {})
        held = entries.get(item.subkey)
        if held is None or held.expiration_time < item.expiration_time:
            entries[item.subkey] = ValueWithExpiration(item.value, item.expiration_time)

    def _read(self, key: object) -> ValueWithExpiration | None:
        now, entries = self._env.clock.time(), self._table.get(key, {})
        for subkey in [subkey for subkey, entry in entries.items() if entry.expiration_time <= now]:
            del entries[subkey]
        if not entries:
            return None
        return ValueWithExpiration(dict(entries), max(entry.expiration_time for entry in entries.values()))


@contextmanager
def shared_table() -> Iterator[None]:
    """Peers that start within this context share one table."""
    table: dict[object, dict[object, ValueWithExpiration]] = {}

    def node(endpoint: Endpoint, env: Env, *_: object, **__: object) -> Any:
        return _Node(table, endpoint, env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.averaging.core.DhtNode", node)
        yield
