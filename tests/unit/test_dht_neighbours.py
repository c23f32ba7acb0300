"""Neighbours that are believed, avoided, forgotten and tried again."""

from __future__ import annotations

import hashlib
import random

from shoal.dht.neighbours import Neighbours
from shoal.peer import Address, PeerID
from shoal.wire import Contact

OWN = PeerID(bytes(32))


def contact(number: int) -> Contact:
    """A made-up node."""
    name = PeerID(hashlib.sha256(b"peer %d" % number).digest())
    return Contact(name, (Address(f"h{number}", 4000, name),))


def test_unreachable_node_leaves_at_once_and_silent_one_at_the_second_time() -> None:
    """And each change is told once."""
    changes: list[None] = []
    others = Neighbours(OWN, bucket_size=8)
    others.on_change = lambda: changes.append(None)
    one, two = contact(1), contact(2)
    assert others.alive(one, 0.0)
    assert others.alive(two, 0.0)
    assert others.take_changes() == ([one.peer, two.peer], [])
    others.unreachable(one.peer, 1.0)
    others.silent(two.peer, 1.0)
    assert list(others.table) == [two]
    others.silent(two.peer, 2.0)
    assert list(others.table) == []
    assert others.take_changes() == ([], [one.peer, two.peer])
    assert others.take_changes() == ([], [])
    assert len(changes) == 4


def test_node_that_comes_and_goes_between_two_looks_counts_as_gone() -> None:
    """What matters is where it is now."""
    others = Neighbours(OWN, bucket_size=8)
    others.alive(contact(1), 0.0)
    others.unreachable(contact(1).peer, 1.0)
    assert others.take_changes() == ([], [contact(1).peer])
    others.alive(contact(1), 2.0)
    assert others.take_changes() == ([contact(1).peer], [])


def test_node_that_is_connected_again_is_not_avoided() -> None:
    """Whoever of them failed for minutes; unless it lied. One that was in the table is worth a question at once."""
    others, dead, liar, lost = Neighbours(OWN, bucket_size=8), contact(1), contact(2), contact(3)
    others.alive(lost, 0.0)
    for _ in range(4):
        others.unreachable(dead.peer, 1.0)
        others.unreachable(lost.peer, 1.0)
    others.lied(liar.peer, 1.0)
    assert others.worth_asking([dead, liar, lost], 2.0) == []
    assert [others.linked(each.peer) for each in (dead, liar, lost)] == [None, None, lost]
    assert others.worth_asking([dead, liar, lost], 2.0) == [dead, lost]
    assert list(others.table) == [], "it has not spoken as a node"


def test_liar_is_not_believed_again_for_ten_minutes() -> None:
    """However alive it is; then it may come back."""
    others = Neighbours(OWN, bucket_size=8)
    others.alive(contact(1), 0.0)
    others.lied(contact(1).peer, 10.0)
    assert not others.alive(contact(1), 609.0)
    assert others.worth_asking([contact(1)], 609.0) == []
    assert others.missed(5, random.Random(1), 609.0) == []
    assert others.alive(contact(1), 611.0)


def test_dead_nodes_that_others_name_are_avoided_for_a_growing_while() -> None:
    """Until they give a sign of life."""
    others = Neighbours(OWN, bucket_size=8)
    one, two = contact(1), contact(2)
    others.unreachable(one.peer, 0.0)
    assert others.worth_asking([one, two], 4.9) == [two]
    assert others.worth_asking([one, two], 5.0) == [one, two]
    others.unreachable(one.peer, 5.0)
    assert others.worth_asking([one, two], 14.9) == [two]
    others.alive(one, 15.0)
    assert others.worth_asking([one, two], 15.0) == [one, two]
    for number in range(20):
        others.unreachable(two.peer, 1000.0 * number)
    assert others.avoids(two.peer, 19000.0 + 119.0)
    assert not others.avoids(two.peer, 19000.0 + 121.0)


def test_node_in_the_table_is_asked_though_it_was_silent_once() -> None:
    """In a network of two there is nobody else."""
    others = Neighbours(OWN, bucket_size=8)
    others.alive(contact(1), 0.0)
    others.silent(contact(1).peer, 1.0)
    assert others.worth_asking([contact(1)], 1.0) == [contact(1)]


def test_refusal_is_a_sign_of_life() -> None:
    """A node that is too busy for us is not lost."""
    others = Neighbours(OWN, bucket_size=8)
    others.alive(contact(1), 0.0)
    for _ in range(5):
        others.refused(contact(1).peer, 1.0)
        others.refused(contact(2).peer, 1.0)
    assert contact(1).peer in others.table
    assert others.worth_asking([contact(1), contact(2)], 1.0) == [contact(1)]


def test_lost_nodes_and_missing_initial_peers_are_worth_another_try() -> None:
    """Lost ones for an hour, initial ones for ever, neither while it is there."""
    others = Neighbours(OWN, bucket_size=8)
    initial, lost = contact(1), contact(2)
    rng = random.Random(1)
    others.always_remember([initial])
    others.alive(lost, 0.0)
    assert others.missed(5, rng, 0.0) == [initial]
    others.unreachable(lost.peer, 1.0)
    assert sorted(others.missed(5, rng, 2.0), key=str) == sorted([initial, lost], key=str)
    assert len(others.missed(1, rng, 2.0)) == 1
    others.alive(initial, 3.0)
    assert others.missed(5, rng, 3.0) == [lost]
    assert others.missed(5, rng, 3700.0) == []
    others.unreachable(initial.peer, 3700.0)
    assert others.missed(5, rng, 10**6) == [initial]


def test_clients_are_alive_but_never_neighbours() -> None:
    """A node without addresses cannot be asked."""
    others = Neighbours(OWN, bucket_size=8)
    assert not others.alive(Contact(contact(1).peer), 0.0)
    others.unreachable(contact(1).peer, 1.0)
    assert others.take_changes() == ([], [])


def test_memory_for_the_dead_is_bounded() -> None:
    """However many are named to us."""
    others = Neighbours(OWN, bucket_size=8)
    for number in range(5000):
        each = contact(number)
        others.alive(each, float(number))
        others.unreachable(each.peer, float(number))
    assert len(others._avoided) == 4096
    assert len(others._lost) == 256
    assert len(others.table) == 0
