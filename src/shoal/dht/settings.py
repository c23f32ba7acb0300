"""Everything about a DHT node that can be set, with defaults that fit both a swarm of four and one of thousands."""

from __future__ import annotations

import msgspec

from shoal.dht.storage import StorageLimits
from shoal.errors import ConfigError

__all__ = ["DhtSettings"]

_COUNTS = {"bucket_size": 32, "replicas": 32, "alpha": 16, "parallel_operations": 1024, "calls_per_peer": 64}


class DhtSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one DHT node. Nodes of one network may differ; those that share `replicas` share duties better.

    Attributes:
        bucket_size: Kademlia's k: nodes known per distance, and named in a reply (1 to 32).
        replicas: how many nodes hold a record (1 to 32). When half of all nodes die at once a record survives with
            probability 1 - 2**-replicas: 96.9% with 5, 99.6% with 8, 99.9% with 10.
        alpha: calls that one lookup has under way at the same time (1 to 16).
        parallel_operations: get and store operations under way at the same time; others wait in line.
        calls_per_peer: calls to one peer under way at the same time; others wait in line.
        call_timeout_s: longest wait for one call, dialing included, seconds.
        slow_s: a call that takes longer no longer holds up a lookup: another node is asked meanwhile.
        timeout_s: longest time for one operation (`get`, `store`, …) that was not given its own.
        cache_s: for how long `get(latest=False)` may answer with the result of an earlier `get`.
        cache_bytes: memory for these results.
        route_s: for how long the next `store` of a key goes to the nodes that were found, while the table is the same.
        refresh_s: a bucket without lookups, and a node without a sign of life, for so long are looked after.
        republish_s: records that were not written again for so long are given to the nodes that should hold them now.
        repair_delay_s: so long after a node came or went (plus a random time) records are moved to where they belong.
        retry_lost_s: how often a few lost nodes are dialed again, so that two halves of a network find each other.
        find_keys_per_s: keys that one peer may look up here per second, in the long run.
        store_records_per_s: records that one peer may send per second, in the long run. Bursts of 16 s are allowed.
        storage: bounds of the records held for others.
    """

    bucket_size: int = 16
    replicas: int = 10
    alpha: int = 3
    parallel_operations: int = 32
    calls_per_peer: int = 32
    call_timeout_s: float = 3.0
    slow_s: float = 0.5
    timeout_s: float = 15.0
    cache_s: float = 10.0
    route_s: float = 10.0
    cache_bytes: int = 8 << 20
    refresh_s: float = 300.0
    republish_s: float = 600.0
    repair_delay_s: float = 1.0
    retry_lost_s: float = 20.0
    find_keys_per_s: float = 1000.0
    store_records_per_s: float = 500.0
    storage: StorageLimits = StorageLimits()

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in _COUNTS and (type(value) is not int or not 1 <= value <= _COUNTS[name]):
                raise ConfigError(f"{name} must be a whole number from 1 to {_COUNTS[name]}, got {value!r}")
            if isinstance(value, int | float) and not value > 0:
                raise ConfigError(f"{name} must be positive, got {value!r}")
