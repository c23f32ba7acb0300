"""The record store: what is held, for how long, at whose cost; and how values are read from records."""

from __future__ import annotations

import hashlib
import math
import random
import tracemalloc
from collections import Counter
from itertools import permutations

import pytest

from shoal.base.peer import PeerID
from shoal.dht.routing import key_of
from shoal.dht.storage import (
    PEER_ENTRY_BYTES,
    RecordStore,
    StorageLimits,
    ValueWithExpiration,
    is_of_peer,
    merge,
    record_bytes,
    value_of,
    wire_bytes,
)
from shoal.dht.validation import Subkey, encode_subkey, encode_value
from shoal.errors import ConfigError
from shoal.protocol.wire import Record

NOW = 1000.0
KEY = key_of("key")


def peer(number: int) -> PeerID:
    """A made-up peer."""
    return PeerID(hashlib.sha256(b"peer %d" % number).digest())


A, B, C = peer(1), peer(2), peer(3)


def record(
    value: object = 0,
    expiration: float = NOW + 60,
    *,
    subkey: Subkey | None = None,
    key: str = "key",
    owner: PeerID | None = None,
) -> Record:
    """A record as it lies in a store, where nobody looks at signatures any more."""
    name = None if subkey is None else encode_subkey(subkey)
    return Record(key_of(key), name, encode_value(value), expiration, owner, b"")


def put_all(store: RecordStore, *records: Record, source: PeerID = A) -> list[str]:
    """Put each; what the store said."""
    return [store.put(each, source, NOW) for each in records]


# ----------------------------------------------------------------------------------------------- expiration and merging


def test_record_is_there_until_it_expires_and_then_gone() -> None:
    """Not a moment longer, and its space is free again."""
    store = RecordStore(StorageLimits())
    short, long = record("short", NOW + 10, key="a"), record("long", NOW + 20, key="b")
    assert put_all(store, short, long) == ["", ""]
    assert store.records(key_of("a"), NOW + 9.999) == [short]
    assert store.records(key_of("a"), NOW + 10) == []
    assert store.keys(NOW + 10) == [key_of("b")]
    assert store.bytes == record_bytes(long)
    assert store.keys(NOW + 20) == []
    assert (len(store), store.bytes) == (0, 0)


def test_entries_of_a_dictionary_expire_one_by_one() -> None:
    """The others stay."""
    store = RecordStore(StorageLimits())
    put_all(store, record(1, NOW + 10, subkey="a"), record(2, NOW + 20, subkey="b"))
    assert value_of(store.records(KEY, NOW), NOW) == ({"a": (1, NOW + 10), "b": (2, NOW + 20)}, NOW + 20)
    assert value_of(store.records(KEY, NOW + 10), NOW + 10) == ({"b": (2, NOW + 20)}, NOW + 20)
    assert value_of(store.records(KEY, NOW + 20), NOW + 20) is None


@pytest.mark.parametrize("expiration", [NOW, NOW - 1, -math.inf, math.nan])
def test_expired_record_is_refused(expiration: float) -> None:
    """Nothing that could not be returned is held."""
    store = RecordStore(StorageLimits())
    assert put_all(store, record(expiration=expiration)) == ["expired"]
    assert len(store) == 0


def test_record_that_expires_too_far_ahead_is_refused() -> None:
    """An hour, and a little for clocks that differ."""
    store = RecordStore(StorageLimits(lifetime_s=3600.0, clock_slack_s=60.0))
    assert put_all(store, record(expiration=NOW + 3660)) == [""]
    assert (
        put_all(store, record(expiration=NOW + 3661), record(expiration=math.inf))
        == ["expires more than 3600 s ahead"] * 2
    )


def test_later_expiration_wins_and_an_earlier_one_is_told() -> None:
    """Whichever came first."""
    store = RecordStore(StorageLimits())
    early, late = record("early", NOW + 10), record("late", NOW + 20)
    assert put_all(store, late, early, late) == ["", "a later record is held", ""]
    assert store.records(KEY, NOW) == [late]
    # The loser's expiration must not take the winner with it.
    assert store.records(KEY, NOW + 10) == [late]


def test_equal_expirations_are_decided_by_value_then_owner_then_signature() -> None:
    """So all nodes end with the same record, whatever came first."""
    small, large = record(1), record(2)
    mine, yours = record(2, owner=min(A, B)), record(2, owner=max(A, B))
    signed = Record(mine.key, None, mine.value, mine.expiration, max(A, B), b"signature")
    for order in permutations([small, large, mine, yours, signed]):
        store = RecordStore(StorageLimits())
        put_all(store, *order)
        assert store.records(KEY, NOW) == [signed]


def test_plain_value_and_dictionary_live_side_by_side_and_the_later_is_shown() -> None:
    """Neither displaces the other: when the one that is shown expires, the other is there."""
    store = RecordStore(StorageLimits())
    put_all(store, record("plain", NOW + 20), record(1, NOW + 10, subkey="a"), record(2, NOW + 30, subkey="b"))
    assert value_of(store.records(KEY, NOW), NOW) == ({"a": (1, NOW + 10), "b": (2, NOW + 30)}, NOW + 30)
    put_all(store, record("plain", NOW + 40))
    assert value_of(store.records(KEY, NOW), NOW) == ("plain", NOW + 40)
    assert value_of([record("plain", NOW + 9), record(1, NOW + 9, subkey="a")], NOW) == ({"a": (1, NOW + 9)}, NOW + 9)


def test_entries_can_be_read_whatever_the_plain_value_is() -> None:
    """Anybody can write a plain value that expires last: it must not hide who has declared himself."""
    mine = record(1, NOW + 10, subkey=A.to_bytes(), owner=A)
    others = [
        record("plain", NOW + 40),
        record(2, NOW + 40, subkey="nobody's"),
        record(2, NOW + 40, subkey="another's", owner=C),
        record("x" * PEER_ENTRY_BYTES, NOW + 40, subkey=B.to_bytes(), owner=B),
    ]
    assert value_of([mine, *others], NOW, of_peers=True) == ({A.to_bytes(): (1, NOW + 10)}, NOW + 10)
    assert value_of(others, NOW, of_peers=True) is None


def test_undecodable_values_do_not_exist() -> None:
    """One bad entry does not hide the good ones."""
    good = record(1, subkey="a")
    broken = Record(KEY, encode_subkey("b"), b"\xc1", NOW + 60)
    bad_name = Record(KEY, b"\xc1", encode_value(1), NOW + 60)
    assert value_of([good, broken, bad_name], NOW) == ({"a": (1, NOW + 60)}, NOW + 60)
    assert value_of([Record(KEY, None, b"\x91" * 60000, NOW + 60)], NOW) is None


def test_value_with_expiration_reads_like_a_pair() -> None:
    """By name and by position."""
    value = ValueWithExpiration("v", 5.0)
    assert (value.value, value.expiration_time) == ("v", 5.0)
    assert tuple(value) == ("v", 5.0)


def test_merge_keeps_one_record_per_subkey() -> None:
    """The one that wins."""
    old, new, plain = record(1, NOW + 1, subkey="a"), record(0, NOW + 2, subkey="a"), record(5)
    assert merge([old, plain, new]) == {encode_subkey("a"): new, None: plain}


# --------------------------------------------------------------------------------------------------------------- bounds


def test_key_takes_no_more_entries_than_its_limit_but_renews_those_it_has() -> None:
    """A full dictionary still works for who is in it."""
    store = RecordStore(StorageLimits(key_entries=2))
    assert put_all(store, record(subkey="a"), record(subkey="b"), record(subkey="c")) == [
        "",
        "",
        "the key holds 2 entries already",
    ]
    assert put_all(store, record(subkey="a", expiration=NOW + 99)) == [""]


def test_key_takes_no_more_bytes_than_its_limit() -> None:
    """One reply must be able to carry all of it; a smaller value in the place of a larger one fits."""
    large = record("x" * 1000, subkey="a")
    store = RecordStore(StorageLimits(key_bytes=wire_bytes(large) + 100))
    assert put_all(store, large)[0] == ""
    assert "bytes already" in put_all(store, record("y", subkey="b"))[0]
    assert put_all(store, record("x" * 900, NOW + 99, subkey="a")) == [""]
    assert put_all(store, record("", key="other")) == [""]


@pytest.mark.parametrize(
    "limits", [StorageLimits(key_entries=8), StorageLimits(key_bytes=8 * wire_bytes(record(subkey="a")))]
)
def test_a_flooded_key_makes_room_at_the_cost_of_who_holds_the_most(limits: StorageLimits) -> None:
    """A peer that fills a key keeps nobody out; a cache just keeps the first records."""
    flood = [record(subkey=f"{number:02}", expiration=NOW + 10 + number) for number in range(20)]
    store, cache = RecordStore(limits), RecordStore(limits, fair=False)
    for each in (store, cache):
        assert put_all(each, *flood).count("") >= 6
    late = [record(subkey=f"late {number}") for number in range(3)]
    assert put_all(store, *late, source=B) == [""] * 3
    assert {each.subkey for each in store} >= {each.subkey for each in late}
    assert flood[0].subkey not in {each.subkey for each in store}  # the one that would have expired first
    assert all(put_all(cache, *late, source=B))
    assert put_all(store, record(1, NOW + 99, subkey="late 0"), source=C) == [""]  # in the place of another's
    assert all(put_all(store, record(subkey="one more")))  # the flooder is refused
    counted = Counter[PeerID]()
    for held in store._keys[KEY].values():
        counted[held.source] += wire_bytes(held.record)
    assert store._crowded == {KEY: counted}
    store.purge(NOW + 1e6)
    assert store._crowded == {}


def test_owner_is_held_to_its_share_whoever_sends_its_records() -> None:
    """A key pair is an account; other owners are not affected."""
    size = record_bytes(record(owner=C))
    store = RecordStore(StorageLimits(owner_bytes=2 * size))
    assert store.put(record(key="a", owner=C), A, NOW) == ""
    assert store.put(record(key="b", owner=C), B, NOW) == ""
    assert "its owner has" in store.put(record(key="c", owner=C), A, NOW)
    assert store.put(record(key="c", owner=B), A, NOW) == ""
    assert store.put(record(key="a", owner=C, expiration=NOW + 99), B, NOW) == ""


def test_source_is_held_to_its_share_whoever_owns_the_records() -> None:
    """Making up owners does not help."""
    size = record_bytes(record(owner=C))
    store = RecordStore(StorageLimits(source_bytes=3 * size))
    said = [store.put(record(key=f"k{number}", owner=peer(number)), A, NOW) for number in range(5)]
    assert said == ["", "", ""] + [f"you have {3 * size} bytes here already"] * 2
    assert store.put(record(key="k4", owner=peer(4)), B, NOW) == ""


def test_full_store_makes_room_at_the_cost_of_who_holds_the_most() -> None:
    """A flood displaces the flooder, not the small ones; and the flooder itself is refused."""
    size = record_bytes(record())
    store = RecordStore(StorageLimits(total_bytes=20 * size, source_bytes=20 * size))
    put_all(store, *(record(key=f"small {number}") for number in range(3)), source=B)
    said = put_all(store, *(record(key=f"flood {number}", expiration=NOW + 10 + number) for number in range(40)))
    assert said.count("") == 17
    assert set(said[17:]) == {"full"}
    put_all(store, *(record(key=f"more {number}") for number in range(5)), source=C)
    assert store.bytes <= 20 * size
    held = {each.key for each in store}
    assert all(key_of(f"small {number}") in held for number in range(3))
    assert all(key_of(f"more {number}") in held for number in range(5))
    # What the flooder loses is what would have expired first.
    assert key_of("flood 0") not in held
    assert key_of("flood 16") in held


def test_cache_drops_what_expires_first() -> None:
    """No matter which peer brought it."""
    size = record_bytes(record())
    store = RecordStore(StorageLimits(total_bytes=3 * size, source_bytes=3 * size), fair=False)
    records = [record(key=f"k{number}", expiration=NOW + 50 - number) for number in range(5)]
    assert [store.put(each, peer(number), NOW) for number, each in enumerate(records)] == [""] * 5
    assert {each.key for each in store} == {each.key for each in [records[0], records[1], records[4]]}


def test_record_larger_than_the_whole_store_is_refused() -> None:
    """And nothing is thrown out for it."""
    store = RecordStore(StorageLimits(total_bytes=3000))
    assert put_all(store, record(1, key="a"), record("x" * 4000, key="b")) == ["", "full"]
    assert len(store) == 1


def test_flood_of_tiny_records_stays_within_the_memory_it_is_counted_for() -> None:
    """What Python really needs for a record is no more than what the limits count."""
    limits = StorageLimits(total_bytes=2 << 20, source_bytes=2 << 20, owner_bytes=2 << 20)
    tracemalloc.start()
    try:
        store = RecordStore(limits)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(10_000):
            owner = PeerID(hashlib.sha256(b"owner %d" % number).digest())
            each = Record(
                key_of(f"k{number}"), bytes(40 + number % 2), bytes(1), NOW + 60, owner, bytes(64 + number % 2)
            )
            store.put(each, A, NOW)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 1900 < len(store) < 2100
    assert used < limits.total_bytes


def test_endless_renewal_of_one_record_costs_no_memory() -> None:
    """Queued expirations of replaced records are forgotten."""
    store = RecordStore(StorageLimits())
    for number in range(1000):
        put_all(store, record(number, NOW + 10 + number))
    assert len(store._by_expiration) <= 66
    assert store.records(KEY, NOW + 1000) == [record(999, NOW + 1009)]


def test_what_expires_gives_all_space_back() -> None:
    """Also the accounts of owners and sources."""
    store = RecordStore(StorageLimits())
    put_all(store, record(subkey="a", owner=A), record(subkey="b", owner=B), record(key="other"))
    store.purge(NOW + 1e6)
    assert (len(store), store.bytes) == (0, 0)
    assert [store._owner_bytes, store._source_bytes, store._key_bytes, store._keys] == [{}] * 4


def test_negative_limits_are_refused_by_name() -> None:
    """A typing error in a setting is told when it is made."""
    with pytest.raises(ConfigError, match="key_entries"):
        StorageLimits(key_entries=-1)


def test_what_peers_wrote_under_their_own_ids_is_found_without_the_rest() -> None:
    """A reader that wants only that gets no other byte: anybody can fill a key with entries that nobody signed."""
    store, rng = RecordStore(StorageLimits(key_bytes=4000)), random.Random(0)
    for number in range(400):
        owner = rng.choice([A, B, None])
        subkey = encode_subkey((owner or C).to_bytes() if rng.random() < 0.5 else "text")
        value = encode_value(b"x" * rng.choice([1, 50, PEER_ENTRY_BYTES]))
        store.put(
            Record(KEY, subkey, value, NOW + rng.randint(1, 90), owner, b""), rng.choice([A, B]), NOW + number / 9
        )
        now = NOW + number / 9
        wanted = [each for each in store.records(KEY, now) if is_of_peer(each)]
        assert store.records(KEY, now, of_peers=True) == wanted
        assert store.wire_bytes(KEY, of_peers=True) == sum(map(wire_bytes, wanted))
    assert store.records(KEY, NOW + 200, of_peers=True) == []
    assert store.wire_bytes(KEY, of_peers=True) == 0
