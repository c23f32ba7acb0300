"""What must hold for any records and any nodes: merging is a maximum, the table sorts rightly, bounds are bounds."""

from __future__ import annotations

import hashlib
import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.peer import Address, PeerID
from shoal.dht.lookup import Lookup
from shoal.dht.routing import RoutingTable, key_of, node_id
from shoal.dht.storage import RecordStore, StorageLimits, merge, record_bytes, value_of, wire_bytes
from shoal.dht.validation import encode_subkey, encode_value
from shoal.protocol.wire import Contact, Record

NOW = 1000.0
PEERS = [PeerID(hashlib.sha256(b"peer %d" % number).digest()) for number in range(60)]

# Few values each, so that records meet in one slot with equal and unequal expirations, values and owners.
records = st.builds(
    Record,
    st.sampled_from([key_of("a"), key_of("b")]),
    st.sampled_from([None, encode_subkey("x"), encode_subkey(b"y")]),
    st.sampled_from([encode_value(value) for value in (0, 1, "large" * 50)]),
    st.sampled_from([NOW + step for step in (-1.0, 0.0, 1.0, 2.0, 3.0)]),
    st.sampled_from([None, PEERS[0], PEERS[1]]),
    st.sampled_from([b"", b"signature"]),
)
one_key = records.map(lambda record: msgspec.structs.replace(record, key=key_of("a")))
nodes = st.lists(st.sampled_from(PEERS), unique=True).map(lambda peers: [_contact(peer) for peer in peers])
targets = st.one_of(st.integers(0, 2**256 - 1), st.sampled_from(PEERS).map(node_id))


def _contact(peer: PeerID) -> Contact:
    return Contact(peer, (Address("h", 4000, peer),))


@given(st.lists(one_key), st.lists(one_key), st.lists(one_key))
def test_merging_is_commutative_associative_and_idempotent(a: list[Record], b: list[Record], c: list[Record]) -> None:
    """So it does not matter in what order nodes hear of records, nor how often."""

    def join(*parts: dict[bytes | None, Record]) -> dict[bytes | None, Record]:
        return merge(record for part in parts for record in part.values())

    x, y, z = merge(a), merge(b), merge(c)
    assert join(x, y) == join(y, x)
    assert join(join(x, y), z) == join(x, join(y, z)) == merge([*a, *b, *c])
    assert join(x, x) == x


@given(st.lists(records), st.randoms(use_true_random=False))
def test_store_ends_the_same_in_any_order(sent: list[Record], rng: random.Random) -> None:
    """Two nodes that were sent the same records hold the same ones: the winners among the unexpired."""
    shuffled = [*sent, *sent]
    rng.shuffle(shuffled)
    stores = [RecordStore(StorageLimits()) for _ in range(2)]
    for store, order in zip(stores, (sent, shuffled), strict=True):
        for record in order:
            store.put(record, PEERS[2], NOW)
    for key in (key_of("a"), key_of("b")):
        valid = [record for record in sent if record.key == key and record.expiration > NOW]
        expected = {(each.subkey, each) for each in merge(valid).values()}
        assert all({(each.subkey, each) for each in store.records(key, NOW)} == expected for store in stores)


@given(st.lists(one_key), st.floats(NOW - 2, NOW + 4))
def test_nothing_expired_is_ever_shown(sent: list[Record], now: float) -> None:
    """Neither as a value nor as an entry, and a dictionary is never shown empty."""
    shown = value_of(sent, now)
    assert (shown is None) == (not any(record.expiration > now for record in sent))
    if shown is not None:
        assert shown.expiration_time > now
        if isinstance(shown.value, dict):
            assert shown.value
            assert all(entry.expiration_time > now for entry in shown.value.values())


@given(
    st.lists(st.tuples(records, st.sampled_from(PEERS[:4]), st.sampled_from([0.0, 0.5, 1.0]))),
    st.integers(0, 6000),
    st.integers(0, 6000),
    st.integers(0, 6000),
    st.booleans(),
)
def test_store_never_exceeds_its_bounds_and_counts_rightly(
    sent: list[tuple[Record, PeerID, float]], total: int, owner: int, source: int, fair: bool
) -> None:
    """Whatever comes, from whomever, whenever."""
    limits = StorageLimits(total_bytes=total, key_bytes=1500, key_entries=2, owner_bytes=owner, source_bytes=source)
    store = RecordStore(limits, fair=fair)
    now = NOW
    for record, peer, step in sent:
        now += step
        refusal = store.put(record, peer, now)
        assert store.holds(record) == (not refusal)
        held = [each for key in store.keys(now) for each in store.records(key, now)]
        assert store.bytes == sum(map(record_bytes, held)) <= total
        assert len(store) == len(held)
        for key in (key_of("a"), key_of("b")):
            entries = store.records(key, now)
            assert len(entries) <= 2
            assert sum(map(wire_bytes, entries)) <= 1500
        for name in PEERS[:2]:
            assert sum(record_bytes(each) for each in held if each.owner == name) <= owner
        assert all(each.expiration > now for each in held)
    store.purge(NOW + 10**6)
    assert (len(store), store.bytes) == (0, 0)
    assert [store._owner_bytes, store._source_bytes, store._key_bytes] == [{}] * 3


@given(nodes, targets, st.integers(1, 20))
def test_nearest_is_what_sorting_everybody_gives(known: list[Contact], target: int, count: int) -> None:
    """For any id, also our own and those of nodes in the table."""
    table = RoutingTable(PEERS[0], bucket_size=64)
    for contact in known:
        table.seen(contact, 0.0)
    everybody = sorted(table, key=lambda contact: node_id(contact.peer) ^ target)
    assert set(everybody) == {contact for contact in known if contact.peer != PEERS[0]}
    assert table.nearest(target, count) == everybody[:count]


@given(st.lists(st.tuples(st.sampled_from(["seen", "remove", "failed"]), st.sampled_from(PEERS))), st.integers(1, 4))
def test_table_stays_within_its_bounds_and_agrees_with_itself(steps: list[tuple[str, PeerID]], size: int) -> None:
    """After any sequence of sightings and losses."""
    table = RoutingTable(PEERS[0], bucket_size=size)
    for now, (step, peer) in enumerate(steps):
        before = peer in table
        if step == "seen":
            assert table.seen(_contact(peer), float(now)) == (peer in table and not before)
        elif step == "remove":
            assert table.remove(peer) == before
        elif table.failed(peer):
            assert before
        if step == "remove":
            assert peer not in table
        members = list(table)
        assert len(table) == len(members) == len({contact.peer for contact in members})
        for bucket in table._buckets.values():
            assert len(bucket.nodes) <= size
            assert len(bucket.spares) <= size
            assert not bucket.nodes.keys() & bucket.spares.keys()
            assert not bucket.spares or len(bucket.nodes) == size
            seen = [node.last_seen for node in bucket.nodes.values()]
            assert seen == sorted(seen)


@given(
    st.data(),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sets(st.sampled_from(PEERS)),
    st.integers(0, 2**256 - 1),
)
def test_lookup_ends_within_its_bounds_and_never_asks_twice(
    data: st.DataObject, count: int, alpha: int, dead: set[PeerID], target: int
) -> None:
    """For any network, any dead nodes, any order of replies; who answered is told in order of distance."""
    lookup = Lookup(target, PEERS[0], map(_contact, PEERS[1:4]), count=count, alpha=alpha, max_queries=15)
    asked: list[PeerID] = []
    waiting: list[PeerID] = []
    slow: list[PeerID] = []
    while not lookup.done:
        new = [contact.peer for contact in lookup.next_queries()]
        assert len(waiting) + len(new) <= max(alpha, count)
        asked += new
        waiting += new
        assert waiting or slow
        peer = data.draw(st.sampled_from([*waiting, *slow]))
        if peer in waiting and data.draw(st.booleans()):
            lookup.slow(peer)
            slow.append(peer)
            waiting.remove(peer)
            continue
        (waiting if peer in waiting else slow).remove(peer)
        if peer in dead:
            lookup.failed(peer)
        else:
            named = data.draw(st.lists(st.sampled_from(PEERS), max_size=4))
            lookup.reply(peer, map(_contact, named))
    assert len(asked) == len(set(asked)) == lookup.queries <= 15
    distances = [node_id(contact.peer) ^ target for contact in lookup.answered]
    assert distances == sorted(distances)
    assert not {contact.peer for contact in lookup.answered} & (dead | {PEERS[0]})
    assert len(lookup.nearest) <= count
