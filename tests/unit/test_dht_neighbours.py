"""Neighbours that are believed, avoided, forgotten and tried again."""

from __future__ import annotations

import hashlib
import random

from shoal.base.peer import Address, PeerID
from shoal.dht.neighbours import Neighbours
from shoal.protocol.wire import Contact

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


def test_calls_of_a_node_that_never_answers_kept_it_in_the_table() -> None:
    """After two calls in vain it is gone, and its own calls bring it back ever more rarely."""
    others = Neighbours(OWN, bucket_size=8)
    one, asked = contact(1), []
    for now in range(600):
        others.called(one, float(now))
        if one.peer in others.table:
            others.silent(one.peer, float(now))
            asked.append(now)
    assert asked == [0, 1, 6, 7, 17, 18, 38, 39, 79, 80, 160, 161, 281, 282, 402, 403, 523, 524]


def test_call_of_a_node_tells_where_it_is_and_is_no_sign_of_life() -> None:
    """A node that moved is called there; it is still the one that was silent for longest."""
    others = Neighbours(OWN, bucket_size=8)
    one = contact(1)
    others.alive(one, 0.0)
    moved = Contact(one.peer, (Address("elsewhere", 5, one.peer),))
    others.called(moved, 10.0)
    assert others.table.contact(one.peer) == moved
    assert others.table.quiet(5.0) == [moved]


def test_node_that_did_not_answer_is_not_relied_on_before_it_made_up_for_it() -> None:
    """1024 answers, however it left the table; where our own line may have been down, it owes nothing."""
    others = Neighbours(OWN, bucket_size=8)
    one, table = contact(1), others.table
    others.alive(one, 0.0)
    others.silent(one.peer, 1.0, owes=False)
    assert not table.doubtful(one.peer)
    for _ in range(5):
        others.silent(one.peer, 1.0)
    others.unreachable(one.peer, 1.0)
    for number in range(1024):
        assert table.doubtful(one.peer), number
        others.called(one, 1.0)
        others.alive(one, 1.0)
    assert not table.doubtful(one.peer)


def test_nodes_that_are_not_relied_on_come_and_go_without_new_routes() -> None:
    """A node that leaves every second call without an answer had all routes be looked up anew again and again."""
    others = Neighbours(OWN, bucket_size=8)
    one, changes = contact(1), []
    others.on_change = lambda: changes.append(others.version)
    others.alive(one, 0.0)
    for now in range(5):
        others.silent(one.peer, float(now))
        others.silent(one.peer, float(now))
        others.alive(one, float(now))
    assert changes == [1] * 11


def test_nodes_that_are_not_relied_on_are_named_last() -> None:
    """However near they are; where there are no others, they are named all the same."""
    others = Neighbours(OWN, bucket_size=8)
    for number in range(12):
        others.alive(contact(number), 0.0)
    everyone = others.table.nearest(0, 12)
    for each in everyone[:4]:
        others.silent(each.peer, 1.0)
    assert others.table.nearest(0, 8) == everyone[4:]
    assert others.table.nearest(0, 12) == everyone[4:] + everyone[:4]


def test_node_whose_words_lead_nowhere_is_believed_no_more() -> None:
    """After eight more in vain than not; those that are in the table may be asked all the same."""
    others = Neighbours(OWN, bucket_size=8)
    namer, known, new = contact(1).peer, contact(2), contact(3)
    others.alive(known, 0.0)
    others.led(namer, to_answer=True)
    for number in range(8):
        assert others.worth_asking([known, new], 0.0, namer=namer) == [known, new], number
        others.led(namer, to_answer=False)
    assert others.worth_asking([known, new], 0.0, namer=namer) == [known]
    others.led(namer, to_answer=True)
    assert others.worth_asking([known, new], 0.0, namer=namer) == [known, new]
