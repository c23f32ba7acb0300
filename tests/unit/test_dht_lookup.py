"""The lookup as a state machine: no network, each reply given by hand."""

from __future__ import annotations

import hashlib

from shoal.base.peer import Address, PeerID
from shoal.dht.lookup import Lookup
from shoal.dht.routing import node_id
from shoal.protocol.wire import Contact

OWN = PeerID(hashlib.sha256(b"own").digest())
TARGET = 0


def peer(number: int) -> PeerID:
    """A made-up peer."""
    return PeerID(hashlib.sha256(b"peer %d" % number).digest())


def contact(name: PeerID) -> Contact:
    """Where it listens."""
    return Contact(name, (Address("h", 4000, name),))


# Nearest to the target first.
NODES = [contact(name) for name in sorted((peer(number) for number in range(400)), key=node_id)]


def far(*indices: int) -> list[Contact]:
    """Nodes by their place in the order of distance."""
    return [NODES[index] for index in indices]


def test_lookup_without_seeds_is_done_and_found_nobody() -> None:
    """A lone node has nobody to ask."""
    lookup = Lookup(TARGET, OWN, [], count=4)
    assert lookup.done
    assert lookup.next_queries() == []
    assert (lookup.nearest, lookup.hops, lookup.queries) == ([], 0, 0)


def test_asks_alpha_nodes_at_a_time_nearest_first_each_once() -> None:
    """The places of those that answered, or failed, are taken by the next."""
    lookup = Lookup(TARGET, OWN, far(50, 10, 40, 20, 30), count=4, alpha=3)
    assert lookup.next_queries() == far(10, 20, 30)
    assert lookup.next_queries() == []
    lookup.reply(NODES[20].peer, [])
    lookup.failed(NODES[10].peer)
    assert lookup.next_queries() == far(40, 50)
    assert not lookup.done


def test_asks_the_rest_at_once_when_a_reply_brought_nobody_nearer() -> None:
    """The end of a lookup is one round, not several; and it narrows down again if somebody nearer turns up."""
    lookup = Lookup(TARGET, OWN, far(10, 20, 30, 40, 50, 60, 70), count=6, alpha=2)
    assert lookup.next_queries() == far(10, 20)
    lookup.reply(NODES[10].peer, far(5))
    assert lookup.next_queries() == far(5)
    lookup.reply(NODES[20].peer, far(99))
    assert lookup.next_queries() == far(30, 40, 50)
    lookup.reply(NODES[5].peer, far(1, 2, 3, 4))
    assert lookup.next_queries() == []
    for index in (30, 40):
        lookup.failed(NODES[index].peer)
    assert lookup.next_queries() == far(1)


def test_is_complete_when_all_that_it_heard_of_have_answered() -> None:
    """Then there is nobody else; a node that was not asked, or that failed, may know others."""
    lookup = Lookup(TARGET, OWN, far(10, 20), count=4)
    lookup.next_queries()
    lookup.reply(NODES[10].peer, far(30))
    lookup.reply(NODES[20].peer, [])
    assert not lookup.complete
    lookup.next_queries()
    lookup.reply(NODES[30].peer, far(10, 20))
    assert lookup.complete
    other = Lookup(TARGET, OWN, far(10, 20), count=4)
    other.next_queries()
    other.reply(NODES[10].peer, [])
    other.failed(NODES[20].peer)
    assert not other.complete


def test_ends_when_the_nearest_have_answered_though_others_were_not_asked() -> None:
    """What lies farther than the nearest `count` that answered cannot change the result."""
    lookup = Lookup(TARGET, OWN, far(9), count=2, alpha=3)
    assert lookup.next_queries() == far(9)
    lookup.reply(NODES[9].peer, far(1, 2, 3, 8))
    assert lookup.next_queries() == far(1, 2)
    lookup.reply(NODES[1].peer, [])
    assert not lookup.done
    lookup.reply(NODES[2].peer, far(5, 6))
    assert lookup.done
    assert lookup.next_queries() == []
    assert lookup.nearest == far(1, 2)
    assert lookup.queries == 3


def test_farther_query_under_way_does_not_hold_up_the_end() -> None:
    """Once the nearest have answered, nobody waits for the rest."""
    lookup = Lookup(TARGET, OWN, far(50, 60, 70), count=2, alpha=3)
    assert lookup.next_queries() == far(50, 60)
    lookup.reply(NODES[50].peer, far(1, 2))
    lookup.next_queries()
    lookup.reply(NODES[1].peer, [])
    lookup.reply(NODES[2].peer, [])
    assert lookup.done


def test_hops_count_the_calls_in_a_row_to_the_nearest() -> None:
    """A seed is one call away; whom it names, two."""
    lookup = Lookup(TARGET, OWN, far(100), count=1)
    lookup.next_queries()
    lookup.reply(NODES[100].peer, far(50))
    lookup.next_queries()
    lookup.reply(NODES[50].peer, far(7))
    lookup.next_queries()
    assert lookup.hops == 2
    lookup.reply(NODES[7].peer, [])
    assert lookup.done
    assert lookup.hops == 3


def test_slow_node_gives_its_place_to_another() -> None:
    """It is no longer waited for when enough others have answered."""
    lookup = Lookup(TARGET, OWN, far(1, 2, 3), count=2, alpha=1)
    assert lookup.next_queries() == far(1)
    lookup.slow(NODES[1].peer)
    assert lookup.next_queries() == far(2)
    lookup.reply(NODES[2].peer, [])
    assert lookup.next_queries() == far(3)
    lookup.reply(NODES[3].peer, [])
    assert lookup.done
    assert lookup.nearest == far(2, 3)


def test_slow_node_is_waited_for_when_there_are_too_few_others() -> None:
    """In a small network a slow answer is better than none; and if it comes, it counts."""
    lookup = Lookup(TARGET, OWN, far(1), count=2)
    lookup.next_queries()
    lookup.slow(NODES[1].peer)
    assert not lookup.done
    lookup.reply(NODES[1].peer, [])
    assert lookup.done
    assert lookup.nearest == far(1)


def test_slow_nodes_are_not_waited_for_when_four_have_answered_for_each() -> None:
    """Also in a network that has fewer nodes than are looked for."""
    lookup = Lookup(TARGET, OWN, far(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), count=16, alpha=16)
    assert len(lookup.next_queries()) == 10
    lookup.slow(NODES[1].peer)
    lookup.slow(NODES[2].peer)
    for number in range(3, 10):
        lookup.reply(NODES[number].peer, [])
    assert not lookup.done
    lookup.reply(NODES[10].peer, [])
    assert lookup.done


def test_slow_node_that_fails_in_the_end_lets_the_lookup_end() -> None:
    """The driver of a lookup gives each call an end."""
    lookup = Lookup(TARGET, OWN, far(1), count=2)
    lookup.next_queries()
    lookup.slow(NODES[1].peer)
    lookup.failed(NODES[1].peer)
    assert lookup.done
    assert lookup.nearest == []


def test_dead_nodes_are_stepped_over() -> None:
    """The nearest are the nearest of those that live."""
    lookup = Lookup(TARGET, OWN, far(1, 2, 3, 4, 5), count=2, alpha=5)
    asked = lookup.next_queries()
    assert asked == far(1, 2)
    lookup.failed(NODES[1].peer)
    assert lookup.next_queries() == far(3)
    lookup.failed(NODES[3].peer)
    lookup.reply(NODES[2].peer, [])
    assert lookup.next_queries() == far(4)
    lookup.reply(NODES[4].peer, [])
    assert lookup.done
    assert lookup.nearest == far(2, 4)


def test_liar_with_endless_contacts_is_cut_short() -> None:
    """A node that names ever nearer, made-up nodes costs a bounded number of queries."""
    lookup = Lookup(TARGET, OWN, far(399), count=2)
    fakes = iter(reversed(NODES[:399]))
    asked = 0
    while not lookup.done:
        for query in lookup.next_queries():
            asked += 1
            lookup.reply(query.peer, [next(fakes, NODES[0]) for _ in range(5)])
    assert asked == lookup.queries == 20


def test_one_reply_adds_a_bounded_number_of_candidates() -> None:
    """The rest of a long reply is not even remembered."""
    lookup = Lookup(TARGET, OWN, far(399), count=200, alpha=500)
    lookup.next_queries()
    lookup.reply(NODES[399].peer, NODES[:399])
    assert lookup.next_queries() == NODES[:32]


def test_what_cannot_be_dialed_or_belongs_to_another_is_ignored() -> None:
    """Clients, addresses of a foreign peer, ourselves, repetitions."""
    lookup = Lookup(TARGET, OWN, far(9), count=4)
    lookup.next_queries()
    stolen = Contact(NODES[1].peer, NODES[2].addresses)
    lookup.reply(NODES[9].peer, [Contact(NODES[3].peer), stolen, contact(OWN), *far(4, 4, 9)])
    assert lookup.next_queries() == far(4)


def test_replies_that_were_not_asked_for_change_nothing() -> None:
    """Also a second reply of the same node, and news of one that nobody knows."""
    lookup = Lookup(TARGET, OWN, far(5, 9), count=2, alpha=1)
    lookup.reply(NODES[9].peer, far(1))
    lookup.failed(NODES[77].peer)
    assert lookup.next_queries() == far(5)
    lookup.reply(NODES[5].peer, [])
    lookup.reply(NODES[5].peer, far(1))
    lookup.failed(NODES[5].peer)
    assert lookup.next_queries() == far(9)
    lookup.reply(NODES[9].peer, [])
    assert lookup.nearest == far(5, 9)


def test_widening_goes_on_beyond_the_nearest() -> None:
    """Nobody is asked twice."""
    lookup = Lookup(TARGET, OWN, far(1, 2, 3, 4), count=1, alpha=4)
    assert lookup.next_queries() == far(1)
    lookup.reply(NODES[1].peer, [])
    assert lookup.done
    lookup.widen(3)
    assert not lookup.done
    assert lookup.next_queries() == far(2, 3)
