"""Which processes have one key: whether they live at a time, or one after another."""

from __future__ import annotations

import random

from shoal.base.peer import PeerID
from shoal.rpc.twins import Twins

PEER = PeerID(bytes(32))


def test_an_earlier_process_that_answers_a_later_question_is_a_twin() -> None:
    """It is news when another process answers, and when the one before still does: then all are asked."""
    twins = Twins(random.Random())
    assert not twins.answered(PEER, b"first", asked_at=1.0, now=1.1)
    assert twins.answered(PEER, b"second", asked_at=2.0, now=2.1)
    assert not twins.answered(PEER, b"first", asked_at=2.05, now=3.0), "it may have ended before the second one began"
    assert not twins.has(PEER)
    assert twins.answered(PEER, b"first", asked_at=2.1, now=3.1)
    assert twins.has(PEER)
    assert not twins.answered(PEER, b"first", asked_at=4.0, now=4.1), "it was told"
    assert not twins.answered(PEER, b"second", asked_at=4.0, now=4.1)
    assert twins.has(PEER)


def test_processes_that_follow_each_other_are_no_twins() -> None:
    """After a restart nothing is told, whatever was before; a process without a name says nothing."""
    twins = Twins(random.Random())
    twins.answered(PEER, b"first", asked_at=1.0, now=1.1)
    twins.answered(PEER, b"second", asked_at=2.0, now=2.1)
    twins.answered(PEER, b"first", asked_at=3.0, now=3.1)
    assert twins.answered(PEER, b"third", asked_at=4.0, now=4.1)
    assert not twins.has(PEER)
    assert not twins.answered(PEER, b"", asked_at=5.0, now=5.1)
    assert twins.process != Twins(random.Random()).process


def test_what_many_keys_and_processes_say_takes_bounded_memory() -> None:
    """Keys are free, and so are names of processes."""
    twins = Twins(random.Random())
    for number in range(3000):
        key = PeerID(number.to_bytes(32))
        for name in range(2, 20) if number > 2990 else (1,):
            twins.answered(key, bytes([name]), asked_at=float(name), now=float(name))
    assert len(twins._lives) == 1024
    assert max(len(each.earlier) for each in twins._lives.values()) == 8
