"""All records of one node, and the rules for letting one in.

Three stores: `held` for others, as one of the nodes nearest to the key; `own`, the records that this node wrote and
keeps renewing; `cache`, the records that it found lately. A record that lies in one of them was checked, and is not
checked again.
"""

from __future__ import annotations

from shoal.dht.settings import DhtSettings
from shoal.dht.storage import RecordStore, StorageLimits
from shoal.dht.validation import CompositeValidator, FormValidator, SignatureValidator
from shoal.peer import PeerID
from shoal.wire import Record

__all__ = ["Vault"]


class Vault:
    """The records of one node. Wall-clock times; `now` of the cache is seconds on a clock that never goes back.

    Args:
        own: this node.
        settings: bounds.
        validators: the user's.
    """

    def __init__(self, own: PeerID, settings: DhtSettings, validators: CompositeValidator) -> None:
        limits = settings.storage
        unshared = limits.total_bytes  # this node's own writes and reads are bounded only as a whole
        self.held = RecordStore(limits)
        self.own = RecordStore(_unshared(limits, unshared))
        self.cache = RecordStore(_unshared(limits, settings.cache_bytes), fair=False)
        self._cached_at: dict[bytes, float] = {}
        self._cache_s = settings.cache_s
        self._peer = own
        self._limits = limits
        self._rules = CompositeValidator([FormValidator(), SignatureValidator()])
        self._validators = validators

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
        if self.held.holds(record) and self.timely(record, now):
            return ""
        if not self.timely(record, now):
            return "expired, or expires too far ahead"
        forged = "" if source == self._peer else self.forged(record)
        return forged or self.unwanted(record) or self.held.put(record, source, now)

    def wrote(self, record: Record, now: float) -> None:
        """Keep a record that this node wrote, to renew it."""
        self.own.put(record, self._peer, now)

    def found(self, key: bytes, records: list[Record], now: float, at: float) -> None:
        """Keep the records that a `get` found for a short time. `now` is wall-clock time, `at` the other clock."""
        for record in records:
            self.cache.put(record, self._peer, now)
        self._cached_at[key] = at
        if len(self._cached_at) > 64 and len(self._cached_at) > 2 * len(self.cache):
            self._cached_at = {kept: when for kept, when in self._cached_at.items() if when > at - self._cache_s}

    # --------------------------------------------------------------------------------------------------------- reading

    def known(self, key: bytes, now: float) -> list[Record]:
        """All that is held or was written here under a key."""
        return self.held.records(key, now) + self.own.records(key, now)

    def shown(self, key: bytes, now: float) -> list[Record]:
        """The records that others are shown: all that are known here, so that this node's own are found at least here.

        The nodes that should hold a record may all belong to one attacker, who chose their keys for that.
        """
        held = self.held.records(key, now)
        return held + [record for record in self.own.records(key, now) if not self.held.holds(record)]

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
    return StorageLimits(
        total_bytes=total_bytes,
        key_bytes=min(limits.key_bytes, total_bytes),
        key_entries=limits.key_entries,
        owner_bytes=total_bytes,
        source_bytes=total_bytes,
        lifetime_s=limits.lifetime_s,
        clock_slack_s=limits.clock_slack_s,
    )
