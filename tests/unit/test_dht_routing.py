"""The routing table: who is in it, who takes whose place, and what it says is near."""

from __future__ import annotations

import hashlib
import random

from shoal.base.peer import Address, PeerID
from shoal.dht.routing import ID_BITS, RoutingTable, id_of_key, key_of, node_id
from shoal.protocol.wire import Contact

OWN = PeerID(bytes(32))


def peer(number: int) -> PeerID:
    """A made-up peer."""
    return PeerID(hashlib.sha256(b"peer %d" % number).digest())


def contact(number: int) -> Contact:
    """A made-up peer that listens."""
    return Contact(peer(number), (Address(f"h{number}", 4000, peer(number)),))


def in_bucket(bucket: int, count: int) -> list[Contact]:
    """Contacts that all share exactly so many leading bits with `OWN`."""
    found: list[Contact] = []
    number = 0
    while len(found) < count:
        if ID_BITS - (node_id(OWN) ^ node_id(peer(number))).bit_length() == bucket:
            found.append(contact(number))
        number += 1
    return found


def test_ids_are_sha256_of_key_and_peer() -> None:
    """Text and its UTF-8 bytes are the same key; a node's id is not its peer id."""
    assert key_of("käse") == key_of("käse".encode()) == hashlib.sha256("käse".encode()).digest()
    assert id_of_key(key_of("a")) == int(hashlib.sha256(b"a").hexdigest(), 16)
    assert node_id(OWN) == int(hashlib.sha256(bytes(32)).hexdigest(), 16)


def test_neither_this_node_nor_one_without_addresses_is_taken_in() -> None:
    """Clients, and whatever calls itself by our name, stay out of the table."""
    table = RoutingTable(OWN, bucket_size=4)
    assert not table.seen(Contact(OWN, (Address("h", 1, OWN),)), 0.0)
    assert not table.seen(Contact(peer(1)), 0.0)
    assert len(table) == 0


def test_full_bucket_keeps_old_nodes_and_new_ones_wait() -> None:
    """Known nodes are not displaced, however many new ones appear, and no more of those are remembered than fit."""
    table = RoutingTable(OWN, bucket_size=4)
    nodes = in_bucket(1, 20)
    for now, each in enumerate(nodes):
        assert table.seen(each, float(now)) is (now < 4)
    assert list(table) == nodes[:4]
    assert sum(len(bucket.spares) for bucket in table._buckets.values()) == 4


def test_lost_node_is_replaced_at_once_by_the_spare_seen_last() -> None:
    """Of the waiting nodes the most recent one is the likeliest to live."""
    table = RoutingTable(OWN, bucket_size=2)
    first, second, third, fourth = in_bucket(0, 4)
    for now, each in enumerate([first, second, third, fourth]):
        table.seen(each, float(now))
    table.seen(third, 10.0)
    assert table.remove(first.peer)
    assert set(table) == {second, third}
    assert table.remove(second.peer)
    assert set(table) == {third, fourth}
    assert not table.remove(second.peer)
    assert len(table) == 2
    assert sum(len(bucket.spares) for bucket in table._buckets.values()) == 0


def test_lost_spare_does_not_come_back() -> None:
    """What is removed is gone from the waiting list, too."""
    table = RoutingTable(OWN, bucket_size=1)
    first, second = in_bucket(0, 2)
    table.seen(first, 0.0)
    table.seen(second, 1.0)
    assert not table.remove(second.peer)
    table.remove(first.peer)
    assert len(table) == 0


def test_one_silence_is_forgiven_two_in_a_row_are_not() -> None:
    """A sign of life in between starts the count again."""
    table = RoutingTable(OWN, bucket_size=4)
    table.seen(contact(1), 0.0)
    assert not table.failed(peer(1))
    table.seen(contact(1), 1.0)
    assert not table.failed(peer(1))
    assert table.failed(peer(1))
    assert peer(1) not in table
    assert not table.failed(peer(1))


def test_a_node_makes_up_for_a_call_without_an_answer() -> None:
    """By a thousand answers, not by millions; and no more debts are remembered than a few thousand."""
    table = RoutingTable(OWN, bucket_size=4)
    table.seen(contact(1), 0.0)
    table.failed(peer(1))
    for now in range(1023):
        table.seen(contact(1), float(now))
    assert table.doubtful(peer(1))
    table.seen(contact(1), 2000.0)
    assert not table.doubtful(peer(1))
    for number in range(5000):
        table.failed(peer(number))
    assert sum(table.doubtful(peer(number)) for number in range(5000)) == 4096


def test_new_address_of_a_known_node_replaces_the_old() -> None:
    """A node that moved is found where it is now."""
    table = RoutingTable(OWN, bucket_size=4)
    table.seen(contact(1), 0.0)
    moved = Contact(peer(1), (Address("elsewhere", 5, peer(1)),))
    table.seen(moved, 1.0)
    assert table.contact(peer(1)) == moved
    assert len(table) == 1


def test_nearest_leaves_out_who_asks() -> None:
    """The one that asks is not told about itself, and still gets as many as it wanted."""
    table = RoutingTable(OWN, bucket_size=8)
    for number in range(12):
        table.seen(contact(number), 0.0)
    target = id_of_key(key_of("k"))
    everyone = table.nearest(target, 100)
    asker = everyone[0].peer
    assert table.nearest(target, 5, without=asker) == everyone[1:6]


def test_quiet_names_the_node_silent_for_longest_in_each_bucket() -> None:
    """One per bucket at most, and none that was heard from since."""
    table = RoutingTable(OWN, bucket_size=4)
    far, near = in_bucket(0, 3), in_bucket(2, 1)
    for now, each in enumerate([*far, *near]):
        table.seen(each, float(now))
    table.seen(far[0], 9.0)
    assert table.quiet(5.0) == [far[1], near[0]]
    assert table.quiet(2.0) == [far[1]]


def test_due_buckets_are_those_without_a_lookup_up_to_the_deepest_in_use() -> None:
    """An empty bucket between others is due at once, one that was looked into is not, and there is an end to them."""
    table = RoutingTable(OWN, bucket_size=4)
    assert table.due(100.0) == []
    table.seen(in_bucket(0, 1)[0], 50.0)
    table.seen(in_bucket(3, 1)[0], 50.0)
    assert table.due(40.0) == [1, 2]
    assert table.due(60.0) == [0, 1, 2, 3]
    rng = random.Random(1)
    table.refreshed(table.random_id(1, rng), 70.0)
    assert table.due(60.0) == [0, 2, 3]


def test_random_ids_lie_in_their_bucket() -> None:
    """Each shares with this node exactly as many bits as it should."""
    table = RoutingTable(OWN, bucket_size=4)
    rng = random.Random(2)
    for bucket in (0, 1, 17, 254, 255):
        drawn = table.random_id(bucket, rng)
        assert ID_BITS - (drawn ^ table.own_id).bit_length() == bucket
