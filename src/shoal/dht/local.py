"""One DHT node's own part: its settings, its records, and everything that its other parts share.

There are three stores of records: `held` for others, as one of the nodes nearest to the key; `own`, the records that
this node wrote and keeps renewing; `cache`, the records that it found lately. A record that lies in one of them was
checked, and is not checked again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shoal.base.clock import Env
from shoal.base.peer import PeerID
from shoal.dht.neighbours import Neighbours
from shoal.dht.storage import RecordStore, StorageLimits
from shoal.dht.validation import CompositeValidator, RecordRules
from shoal.errors import ConfigError
from shoal.protocol.wire import Record

__all__ = ["CHECKED_BYTES", "DhtSettings", "Local", "Vault"]

_COUNTS = {"bucket_size": 32, "replicas": 32, "alpha": 16, "parallel_operations": 1024, "calls_per_peer": 64}


CHECKED_BYTES = 16 << 10
"""Records of so many bytes are checked at a time, then others go first: a value of 64 KiB can take 10 ms."""


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
        route_s: for how long the next `store` of a key goes to the nodes that were found, while the table has the
            same nodes, but for doubtful ones.
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


class Vault:
    """The records of one node. Wall-clock times; `now` of the cache is seconds on a clock that never goes back.

    Args:
        own: this node.
        settings: bounds.
        validators: the user's.

    Attributes:
        on_held: called with each record that `accept` let in.
    """

    def __init__(self, own: PeerID, settings: DhtSettings, validators: CompositeValidator) -> None:
        limits = settings.storage
        self.held = RecordStore(limits)
        self.own = RecordStore(_unshared(limits, limits.total_bytes))
        self.cache = RecordStore(_unshared(limits, settings.cache_bytes), fair=False)
        self._cached_at: dict[bytes, float] = {}
        self._cache_s = settings.cache_s
        self._peer = own
        self._limits = limits
        self._rules = CompositeValidator([RecordRules()])
        self._validators = validators
        self.on_held: Callable[[Record], None] = lambda _: None

    # ------------------------------------------------------------------------------------------------------ letting in

    def timely(self, record: Record, now: float) -> bool:
        """Whether the record has not expired, and does not expire too far ahead."""
        return now < record.expiration <= now + self._limits.lifetime_s + self._limits.clock_slack_s

    def forged(self, record: Record) -> str:
        """Why no honest node can hold this record; empty if one can."""
        if self.held.holds(record) or self.own.holds(record) or self.cache.holds(record):
            return ""
        return self._rules.refuses(record)

    def unwanted(self, record: Record) -> str:
        """Why the user's validators refuse the record; empty if they do not."""
        return self._validators.refuses(record)

    def accept(self, record: Record, source: PeerID, now: float) -> str:
        """Hold a record that `source` sent, if all rules allow it; else say why not. This node never forges records."""
        if not self.timely(record, now):
            return "expired, or expires too far ahead"
        if not self.held.holds(record):
            forged = "" if source == self._peer else self.forged(record)
            if refusal := forged or self.unwanted(record) or self.held.put(record, source, now):
                return refusal
        self.on_held(record)
        return ""

    def wrote(self, record: Record, now: float) -> None:
        """Keep a record that this node wrote, to renew it."""
        self.own.put(record, self._peer, now)

    def found(self, key: bytes, records: list[Record], now: float, at: float, *, of_peers: bool) -> None:
        """Keep the records that a `get` found for a short time. `now` is wall-clock time, `at` the other clock."""
        for record in records:
            self.cache.put(record, self._peer, now)
        if of_peers:
            return  # they are not all; but they need not be checked again
        self._cached_at[key] = at
        if len(self._cached_at) > 64 and len(self._cached_at) > 2 * len(self.cache):
            self._cached_at = {kept: when for kept, when in self._cached_at.items() if when > at - self._cache_s}

    # --------------------------------------------------------------------------------------------------------- reading

    def known(self, key: bytes, now: float) -> list[Record]:
        """All that is held or was written here under a key."""
        return self.held.records(key, now) + self.own.records(key, now)

    def shown(self, key: bytes, now: float, *, of_peers: bool = False) -> list[Record]:
        """The records that others are shown: all that are known here, so that this node's own are found at least here.

        The nodes that should hold a record may all belong to one attacker, who chose their keys for that.
        """
        held, own = self.held.records(key, now, of_peers=of_peers), self.own.records(key, now, of_peers=of_peers)
        return held + [record for record in own if not self.held.holds(record)]

    def shown_bytes(self, key: bytes, *, of_peers: bool = False) -> int:
        """The size of what others are shown under a key, in a message; slightly more than it really takes."""
        return self.held.wire_bytes(key, of_peers=of_peers) + self.own.wire_bytes(key, of_peers=of_peers)

    def at_hand(self, key: bytes, now: float, at: float) -> list[Record]:
        """Records that answer a `get` without asking anyone; empty if it takes others.

        This node is one of those that hold the key; or it wrote the (plain) value; or it looked a moment ago. An entry
        that it wrote itself does not answer for the whole dictionary.
        """
        held, own = self.held.records(key, now), self.own.records(key, now)
        if held or any(record.subkey is None for record in own):
            return held + own
        if self._cached_at.get(key, float("-inf")) > at - self._cache_s and (cached := self.cache.records(key, now)):
            return cached + own
        return []


def _unshared(limits: StorageLimits, total_bytes: int) -> StorageLimits:
    """The same for this node's own writes and reads, which are bounded only as a whole."""
    most = dict.fromkeys(("total_bytes", "owner_bytes", "source_bytes"), total_bytes)
    return msgspec.structs.replace(limits, key_bytes=min(limits.key_bytes, total_bytes), **most)


@dataclass(frozen=True, slots=True)
class Local:
    """The state of one node.

    Attributes:
        own: this node.
        env: clock, chance and events.
        settings: everything that can be set.
        neighbours: the knowledge of the other nodes.
        vault: all records here.
    """

    own: PeerID
    env: Env
    settings: DhtSettings
    neighbours: Neighbours
    vault: Vault
