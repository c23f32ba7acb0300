"""The store of records until they expire, in bounded space (sans-IO).

**Merging.** A slot is (key, subkey); no subkey is a slot, too. Of two records for one slot the later expiration wins;
between equal ones the greater (value, owner, signature) in byte order, so that all nodes agree without talking. Merging
is taking a maximum: in any order, grouping and repetition it ends the same.

**Plain value and dictionary.** A key can hold both: its plain value is one slot, its entries are others, and neither
displaces the other. A read decides which one `get` shows: the kind whose latest record expires later; the dictionary if
both expire at the same time.

**Bounds.** A record is refused if it has expired or expires too far ahead, or if its owner or the peer that sent it
holds too much already. Sizes count a flat overhead per record, so many tiny records are not free. When a key or the
whole store is full, the source that holds the most of it gives up its records that expire first, never a smaller
source: one peer can fill its own share and no more. When a cache (`fair=False`) is full, it drops the record that
expires first; a key that is full takes no more there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from shoal.base.peer import PeerID
from shoal.dht.validation import Subkey, decode_subkey, decode_value, encode_subkey
from shoal.errors import ConfigError
from shoal.protocol.wire import Record

__all__ = [
    "PEER_ENTRY_BYTES",
    "RECORD_OVERHEAD_BYTES",
    "RecordStore",
    "StorageLimits",
    "ValueWithExpiration",
    "is_of_peer",
    "merge",
    "record_bytes",
    "value_of",
    "wins",
    "wire_bytes",
]

K = TypeVar("K")

RECORD_OVERHEAD_BYTES = 1056
"""Memory of a held record beside its value and subkey: objects, index entries, signature."""

PEER_ENTRY_BYTES = 8 << 10
"""The largest entry that shoal itself reads: larger than peers write, and still cheap to decode."""

WIRE_OVERHEAD_BYTES = 192
"""Bytes of a record in a message beside its value and subkey: key, owner, signature, expiration, framing."""

_EVICTED_FRACTION = 16


class ValueWithExpiration(NamedTuple):
    """A value from the DHT and when it expires (wall clock, seconds).

    A dictionary's value is `{subkey: ValueWithExpiration}`, and it expires with its last entry.
    """

    value: Any
    expiration_time: float


class StorageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a node holds for others.

    Attributes:
        total_bytes: all records together.
        key_bytes: all entries of one key, as they are sent: one reply must be able to carry them.
        key_entries: entries of one key.
        owner_bytes: records of one owner.
        source_bytes: records that one peer sent, its own or others'.
        lifetime_s: the furthest expiration, from now.
        clock_slack_s: how much further it may seem, because clocks differ.
    """

    total_bytes: int = 64 << 20
    key_bytes: int = 896 << 10
    key_entries: int = 4096
    owner_bytes: int = 4 << 20
    source_bytes: int = 16 << 20
    lifetime_s: float = 3600.0
    clock_slack_s: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)!r}")


# -------------------------------------------------------------------------------------------------------------- merging


def record_bytes(record: Record) -> int:
    """The size for which a record counts, in bytes."""
    return len(record.value) + len(record.subkey or b"") + RECORD_OVERHEAD_BYTES


def wire_bytes(record: Record) -> int:
    """The size of a record in a message, in bytes; slightly more than it really takes."""
    return len(record.value) + len(record.subkey or b"") + WIRE_OVERHEAD_BYTES


def _rank(record: Record) -> tuple[float, bytes, bytes, bytes]:
    return record.expiration, record.value, record.owner or b"", record.signature


def wins(new: Record, old: Record) -> bool:
    """Whether `new` takes the place of `old`, in the same slot."""
    return _rank(new) > _rank(old)


def merge(records: Iterable[Record]) -> dict[bytes | None, Record]:
    """The winning record of each subkey, for records of one key."""
    merged: dict[bytes | None, Record] = {}
    for record in records:
        held = merged.get(record.subkey)
        if held is None or wins(record, held):
            merged[record.subkey] = record
    return merged


def value_of(records: Iterable[Record], now: float, *, of_peers: bool = False) -> ValueWithExpiration | None:
    """The content of one key's records at this time: its plain value, or its dictionary; None if all have expired.

    An entry that cannot be decoded does not exist.

    Args:
        records: the records of one key.
        now: wall clock, seconds.
        of_peers: only entries of its dictionary that peers wrote under their own ids, of at most `PEER_ENTRY_BYTES`.
    """
    plain: ValueWithExpiration | None = None
    entries: dict[Subkey, ValueWithExpiration] = {}
    for subkey, record in merge(record for record in records if record.expiration > now).items():
        if of_peers and not is_of_peer(record):
            continue
        try:
            shown = ValueWithExpiration(decode_value(record.value), record.expiration)
            if subkey is None:
                plain = shown
            else:
                entries[decode_subkey(subkey)] = shown
        except ValueError:
            continue
    if not entries:
        return plain
    latest = max(entry.expiration_time for entry in entries.values())
    return plain if plain is not None and plain.expiration_time > latest else ValueWithExpiration(entries, latest)


def is_of_peer(record: Record) -> bool:
    """Whether a peer wrote this entry under its own id, of at most `PEER_ENTRY_BYTES`: shoal itself reads no others."""
    named = record.owner is not None and record.subkey == encode_subkey(record.owner)
    return named and len(record.value) <= PEER_ENTRY_BYTES


# ---------------------------------------------------------------------------------------------------------------- store


class _Entry(NamedTuple):
    record: Record
    source: PeerID


class RecordStore:
    """Records by key and subkey, in bounded space.

    Args:
        limits: the bounds.
        fair: the records that make room in a full store: True, those of the largest source; False, those that expire
            first.
    """

    def __init__(self, limits: StorageLimits, *, fair: bool = True) -> None:
        self.limits = limits
        self._fair = fair
        self._keys: dict[bytes, dict[bytes | None, _Entry]] = {}
        self._key_bytes: dict[bytes, int] = {}
        self._of_peers: dict[bytes, dict[bytes | None, _Entry]] = {}  # see `is_of_peer`: all that shoal itself reads
        self._of_peers_bytes: dict[bytes, int] = {}
        self._owner_bytes: dict[PeerID, int] = {}
        self._source_bytes: dict[PeerID, int] = {}
        self._crowded: dict[bytes, dict[PeerID, int]] = {}  # see `_sources_of`
        self._by_expiration: list[tuple[float, int, bytes, bytes | None]] = []
        self._serial = 0
        self._count = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self._count

    # ------------------------------------------------------------------------------------------------------- reading

    def records(self, key: bytes, now: float, *, of_peers: bool = False) -> list[Record]:
        """The unexpired records of one key; or only those that peers wrote under their own ids."""
        self.purge(now)
        return [held.record for held in (self._of_peers if of_peers else self._keys).get(key, {}).values()]

    def wire_bytes(self, key: bytes, *, of_peers: bool = False) -> int:
        """The size of `records` in a message, expired ones that were not yet dropped included."""
        return (self._of_peers_bytes if of_peers else self._key_bytes).get(key, 0)

    def holds(self, record: Record) -> bool:
        """Whether exactly this record is here: then it was checked before."""
        held = self._keys.get(record.key, {}).get(record.subkey)
        return held is not None and held.record == record

    def keys(self, now: float) -> list[bytes]:
        """All keys with unexpired records."""
        self.purge(now)
        return list(self._keys)

    def __iter__(self) -> Iterator[Record]:
        """All records, expired ones that were not yet dropped included."""
        for slots in self._keys.values():
            for held in slots.values():
                yield held.record

    # ------------------------------------------------------------------------------------------------------- changing

    def put(self, record: Record, source: PeerID, now: float) -> str:
        """Hold a record until it expires. Its form and signature were checked before.

        Args:
            record: the record.
            source: the peer that sent it.
            now: wall clock, seconds.

        Returns:
            Empty if the record is held now; else why not.
        """
        limits = self.limits
        self.purge(now)
        # Written so that an expiration that is not a number is refused, too.
        if not record.expiration > now:
            return "expired"
        if not record.expiration <= now + limits.lifetime_s + limits.clock_slack_s:
            return f"expires more than {limits.lifetime_s:g} s ahead"
        slots = self._keys.get(record.key, {})
        held = slots.get(record.subkey)
        if held is not None and not wins(record, held.record):
            return "" if held.record == record else "a later record is held"
        refusal = self._no_room(record, source, held)
        if not refusal:
            self._remove(record.key, record.subkey)
            self._insert(_Entry(record, source))
        return refusal

    def purge(self, now: float) -> None:
        """Drop all expired records."""
        queue = self._by_expiration
        while queue and queue[0][0] <= now:
            self._pop_first()

    # -------------------------------------------------------------------------------------------------------- bounds

    def _no_room(self, record: Record, source: PeerID, old: _Entry | None) -> str:
        """Why there is no room for a record that takes the place of `old`; makes room in the whole store if need be."""
        limits, size = self.limits, record_bytes(record)

        def over(held: int, limit: int, freed: bool) -> bool:
            return held + size - (record_bytes(old.record) if old is not None and freed else 0) > limit

        if record.owner is not None:
            freed = old is not None and old.record.owner == record.owner
            if over(self._owner_bytes.get(record.owner, 0), limits.owner_bytes, freed):
                return f"its owner has {limits.owner_bytes} bytes here already"
        freed = old is not None and old.source == source
        if over(self._source_bytes.get(source, 0), limits.source_bytes, freed):
            return f"you have {limits.source_bytes} bytes here already"
        if refusal := self._no_room_in_key(record, source, old):
            return refusal
        if size > limits.total_bytes or (over(self.bytes, limits.total_bytes, True) and not self._evict(source, size)):
            return "full"
        return ""

    def _no_room_in_key(self, record: Record, source: PeerID, old: _Entry | None) -> str:
        """Why its key has no room for a record; makes some, if that is not at the cost of a source that holds less."""
        limits, key, size = self.limits, record.key, wire_bytes(record)
        slots = self._keys.get(key, {})
        more, entry = size - (wire_bytes(old.record) if old is not None else 0), old is None
        while True:
            if len(slots) + entry > limits.key_entries:
                refusal = f"the key holds {limits.key_entries} entries already"
            elif self._key_bytes.get(key, 0) + more > limits.key_bytes:
                refusal = f"the key holds {limits.key_bytes} bytes already"
            else:
                return ""
            if not self._fair or not slots:
                return refusal
            sources = self._sources_of(key)
            largest, most = max(sources.items(), key=lambda item: item[1])
            if sources.get(source, 0) + size > most:
                return refusal
            theirs = [subkey for subkey, each in slots.items() if each.source == largest and each is not old]
            if not theirs:
                return refusal
            for subkey in sorted(theirs, key=lambda name: slots[name].record.expiration)[: 1 + len(theirs) // 16]:
                self._remove(key, subkey)

    def _sources_of(self, key: bytes) -> dict[PeerID, int]:
        """Bytes under a key by the peer that sent them: counted when it is full for the first time, then kept up."""
        if (sources := self._crowded.get(key)) is None:
            sources = self._crowded[key] = {}
            for each in self._keys[key].values():
                _add(sources, each.source, wire_bytes(each.record))
        return sources

    def _evict(self, source: PeerID, size: int) -> bool:
        """Make room for `size` bytes from `source`; False if that would cost a source that holds less."""
        if not self._fair:
            while self._by_expiration and self.bytes + size > self.limits.total_bytes:
                self._pop_first()
            return True
        while self.bytes + size > self.limits.total_bytes:
            largest, most = max(self._source_bytes.items(), key=lambda item: item[1])
            if self._source_bytes.get(source, 0) + size > most:
                return False
            self._evict_from(largest, max(size, most // _EVICTED_FRACTION))
        return True

    def _evict_from(self, source: PeerID, size: int) -> None:
        """Drop records of one source, first the ones that expire first. A batch, since finding them costs a scan."""
        theirs = [held.record for slots in self._keys.values() for held in slots.values() if held.source == source]
        for record in sorted(theirs, key=lambda each: each.expiration):
            if size <= 0:
                break
            size -= record_bytes(record)
            self._remove(record.key, record.subkey)

    # ----------------------------------------------------------------------------------------------------- bookkeeping

    def _insert(self, held: _Entry) -> None:
        record = held.record
        self._keys.setdefault(record.key, {})[record.subkey] = held
        if is_of_peer(record):
            self._of_peers.setdefault(record.key, {})[record.subkey] = held
            _add(self._of_peers_bytes, record.key, wire_bytes(record))
        self._account(held, 1)
        self._count += 1
        self._serial += 1
        heapq.heappush(self._by_expiration, (record.expiration, self._serial, record.key, record.subkey))
        if len(self._by_expiration) > 2 * self._count + 64:
            self._rebuild_queue()

    def _remove(self, key: bytes, subkey: bytes | None) -> None:
        slots = self._keys.get(key)
        if slots is None or (held := slots.pop(subkey, None)) is None:
            return
        if not slots:
            del self._keys[key]
        if (of_peers := self._of_peers.get(key)) is not None and of_peers.pop(subkey, None) is not None:
            _add(self._of_peers_bytes, key, -wire_bytes(held.record))
            if not of_peers:
                del self._of_peers[key]
        self._account(held, -1)
        self._count -= 1

    def _account(self, held: _Entry, sign: int) -> None:
        size = sign * record_bytes(held.record)
        self.bytes += size
        key, on_wire = held.record.key, sign * wire_bytes(held.record)
        _add(self._key_bytes, key, on_wire)
        if (sources := self._crowded.get(key)) is not None:
            _add(sources, held.source, on_wire)
            if not sources:
                del self._crowded[key]
        _add(self._source_bytes, held.source, size)
        if held.record.owner is not None:
            _add(self._owner_bytes, held.record.owner, size)

    def _pop_first(self) -> None:
        """Take the first of the queue, and drop its record unless a newer one lies in its slot."""
        expiration, _, key, subkey = heapq.heappop(self._by_expiration)
        held = self._keys.get(key, {}).get(subkey)
        if held is not None and held.record.expiration == expiration:
            self._remove(key, subkey)

    def _rebuild_queue(self) -> None:
        """Forget queued expirations of records that were replaced."""
        self._by_expiration = [
            (held.record.expiration, number, key, subkey)
            for number, (key, subkey, held) in enumerate(
                (key, subkey, held) for key, slots in self._keys.items() for subkey, held in slots.items()
            )
        ]
        self._serial = len(self._by_expiration)
        heapq.heapify(self._by_expiration)


def _add(counts: dict[K, int], name: K, size: int) -> None:
    counts[name] = counts.get(name, 0) + size
    if not counts[name]:
        del counts[name]
