"""Silent peers: the count of looks, and how the limit follows the answers."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from shoal.base.peer import PeerID
from shoal.rpc.rhythm import LEAST_S, LOOK_S, SOON_S, Rhythm

MOST_S = 5.0


def peer(number: int) -> PeerID:
    """Somebody."""
    return PeerID(hashlib.sha256(b"%d" % number).digest())


class World:
    """A rhythm, and what comes from its peers."""

    def __init__(self, *, there_is_a_way: bool = True) -> None:
        self.now, self.received, self.asked, self.found = 100.0, Counter[PeerID](), Counter[PeerID](), list[PeerID]()
        self.way, self.acked_a_second, self.acked = there_is_a_way, 0.0, 0.0
        self.rhythm = Rhythm(
            self._ask,
            lambda who: self.received[who],
            lambda _: int(self.acked + self.acked_a_second * self.now),
            lambda who, _: self.found.append(who),
            most_s=MOST_S,
        )

    def _ask(self, who: PeerID) -> bool:
        self.asked[who] += self.way
        return self.way

    def silent_after(self, who: PeerID, longest_s: float = 30.0, look_s: float = LOOK_S) -> float | None:
        """Look again and again; how long it takes until it is silent, None if it takes too long."""
        began = self.now
        while not self.rhythm.is_silent(who, self.now):
            self.now += look_s
            if self.now > began + longest_s:
                return None
        return self.now - began

    def answer(self, who: PeerID, after_s: float) -> bool:
        """Look until a word comes `after_s` after it was asked; whether it was taken for silent before."""
        self.now += 10.0
        was_silent, asked = False, self.asked[who]
        while self.asked[who] == asked:
            self.rhythm.is_silent(who, self.now)
        until = self.now + after_s
        while self.now + LOOK_S < until:
            self.now += LOOK_S
            was_silent |= self.rhythm.is_silent(who, self.now)
        self.now = until
        self.received[who] += 1
        assert not self.rhythm.is_silent(who, self.now)
        return was_silent


def test_nobody_is_silent_before_it_was_asked_for_a_second() -> None:
    """It is asked once, and found once."""
    world = World()
    took_s = world.silent_after(peer(1))
    assert took_s is not None
    assert LEAST_S <= took_s <= LEAST_S + 2 * LOOK_S
    assert world.asked == {peer(1): 1}
    assert world.found == [peer(1)]
    assert world.rhythm.silent(world.now) == {peer(1)}


def test_where_it_costs_little_half_a_second_is_enough_unless_answers_take_longer() -> None:
    """A member that is given up loses one contribution, and those who wait for it have waited half as long."""
    world = World()
    began = world.now
    while not world.rhythm.is_silent(peer(1), world.now, soon=True):
        world.now += LOOK_S
    assert SOON_S <= world.now - began <= SOON_S + 2 * LOOK_S
    for _ in range(3):
        world.answer(peer(2), 0.4)
    world.now += 10.0
    began = world.now
    while not world.rhythm.is_silent(peer(2), world.now, soon=True):
        world.now += LOOK_S
    assert 0.8 <= world.now - began <= 0.8 + 2 * LOOK_S


def test_any_byte_is_a_sign_of_life_and_who_speaks_is_not_asked() -> None:
    """A peer heard within half a second is not asked; with its first byte a silent one counts again."""
    world = World()
    for _ in range(40):
        world.received[peer(1)] += 1
        assert not world.rhythm.is_silent(peer(1), world.now)
        world.now += LOOK_S
    assert world.asked[peer(1)] <= 1
    assert world.silent_after(peer(1)) is not None
    world.received[peer(1)] += 1
    assert world.rhythm.silent(world.now) == frozenset()
    assert not world.rhythm.is_silent(peer(1), world.now)


def test_what_keeps_us_from_looking_is_not_the_silence_of_others() -> None:
    """A process that stands still for a minute between two looks counts a quarter of a second."""
    world = World()
    world.rhythm.is_silent(peer(1), world.now)
    for _ in range(3):
        world.now += 60.0
        assert not world.rhythm.is_silent(peer(1), world.now)


@pytest.mark.parametrize(("slow_s", "limit_s"), [(0.1, LEAST_S), (0.9, 1.8), (4.0, MOST_S)])
def test_the_limit_follows_the_slowest_answer(slow_s: float, limit_s: float) -> None:
    """Twice as long as the slowest of its last answers; never less than a second, never more than the fixed limit."""
    world = World()
    for answer_s in (0.6, 0.9, 1.5, 2.5, 4.0):
        if answer_s <= slow_s or answer_s == 0.6:
            world.answer(peer(1), min(answer_s, slow_s))
    world.now += 10.0
    took_s = world.silent_after(peer(1))
    assert took_s is not None
    assert limit_s <= took_s <= limit_s + 3 * LOOK_S


def test_an_outage_is_no_rhythm() -> None:
    """A peer that was gone for ten seconds is silent after a second the next time, too."""
    world = World()
    assert world.answer(peer(1), 10.0)
    world.now += 10.0
    took_s = world.silent_after(peer(1))
    assert took_s is not None
    assert took_s <= LEAST_S + 2 * LOOK_S


def test_a_cut_of_our_own_line_raises_no_limit() -> None:
    """All others answer at once when it is over. Silent peers were looked at rarely, so each cut raised the limit."""
    world = World()
    others = [peer(number) for number in range(15)]
    for _ in range(3):
        world.now += 10.0
        cut_at = world.now
        while sum(world.rhythm.is_silent(each, world.now) for each in others) < len(others):
            world.now += LOOK_S
        world.now = cut_at + 9.0
        for each in others:
            world.received[each] += 1
            assert not world.rhythm.is_silent(each, world.now)
    world.now += 10.0
    took_s = [world.silent_after(each) for each in (peer(0), peer(99))]
    assert all(each is not None and each <= LEAST_S + 2 * LOOK_S for each in took_s), took_s


def test_the_others_answers_count_too_but_for_the_slowest_two() -> None:
    """On a slow line or a busy machine all answer late: who was never asked before is given as long."""
    world = World()
    for number in range(10):
        world.answer(peer(number), 0.9 if number < 2 else 0.1)
    stranger_s = world.silent_after(peer(99))
    for number in range(10, 14):
        world.answer(peer(number), 0.9)
    later_s = world.silent_after(peer(98))
    assert stranger_s is not None
    assert later_s is not None
    assert stranger_s <= LEAST_S + 2 * LOOK_S < 1.8 <= later_s


def test_whom_there_is_no_way_to_ask_is_not_silent() -> None:
    """A client without a link: nothing is known of it, so other limits hold."""
    world = World(there_is_a_way=False)
    assert world.silent_after(peer(1)) is None


def test_a_connection_that_is_closed_is_no_word() -> None:
    """Then fewer bytes have come over what is open; the peer is as silent as before."""
    world = World()
    world.received[peer(1)] = 1000
    assert world.silent_after(peer(1)) is not None
    world.received[peer(1)] = 10
    assert world.rhythm.is_silent(peer(1), world.now)


def test_a_verdict_that_nobody_has_looked_at_for_long_counts_no_more() -> None:
    """A silent peer that is back may have had no reason to say so: it is asked anew, and has its second."""
    world = World()
    assert world.silent_after(peer(1)) is not None
    world.now += MOST_S + LOOK_S
    asked = world.asked[peer(1)]
    assert not world.rhythm.is_silent(peer(1), world.now)
    assert world.asked[peer(1)] == asked + 1
    assert world.silent_after(peer(1)) is not None


def test_while_its_line_is_busy_a_peer_has_more_time_and_never_more_than_the_fixed_limit() -> None:
    """Its answer waits behind what others send it, which its machine goes on to acknowledge."""
    world = World()
    world.acked_a_second = 100_000.0
    took_s = world.silent_after(peer(1))
    assert took_s is not None
    assert MOST_S <= took_s <= MOST_S + 2 * LOOK_S


def test_a_machine_whose_process_stands_still_takes_what_comes_for_a_moment() -> None:
    """Its buffers fill at once: that is a quarter of a second. Reports, for which there is room, are too little."""
    world = World()
    world.acked_a_second = 1_000.0
    world.rhythm.is_silent(peer(1), world.now)
    world.acked += 6e6
    took_s = world.silent_after(peer(1))
    assert took_s is not None
    assert LEAST_S <= took_s <= LEAST_S + 2 * LOOK_S


def test_several_who_wait_for_a_peer_see_its_line_busy_as_one_does() -> None:
    """Between looks that follow each other at once next to nothing is acknowledged."""
    world = World()
    world.acked_a_second = 100_000.0
    world.rhythm.is_silent(peer(1), world.now)
    for _ in range(int((MOST_S - 1.0) / LOOK_S)):
        world.now += LOOK_S
        for _ in range(3):
            world.now += 0.001
            assert not world.rhythm.is_silent(peer(1), world.now)
