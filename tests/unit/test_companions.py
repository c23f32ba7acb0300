"""The peers on their way to our state, and how long they are waited for."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest

from shoal.base.peer import PeerID
from shoal.run.view.companions import Companions
from shoal.run.view.progress import StateKey, SwarmView

ME, SLOW = (PeerID(bytes([number]) * 32) for number in range(2))
BEFORE = StateKey.of(4, 400, b"d" * 32)
TARGET = 100


def seen(samples: int, coming: Collection[PeerID]) -> SwarmView:
    """Both peers, of whom these are on their way."""
    return SwarmView(
        peers=(ME, SLOW),
        together=frozenset({ME, SLOW}),
        coming=frozenset(coming),
        done=samples,
        rate=0.0,
        epoch=5,
        behind=False,
    )


def stepped(companions: Companions, now: float) -> None:
    """A round of both, and our step."""
    companions.share([ME, SLOW], BEFORE, 0.0)
    companions.state_changed(now, step=True)


def test_a_member_is_waited_for_as_long_as_the_epoch_took() -> None:
    """Nothing runs out before the swarm has its samples; from then on the others wait for so long and no longer."""
    companions = Companions()
    stepped(companions, 100.0)
    assert companions.awaited >= {SLOW}
    assert companions.before == BEFORE
    assert not companions.observe(seen(TARGET - 1, [SLOW]), 107.9, enough=False)
    assert not companions.observe(seen(TARGET, [SLOW]), 108.0, enough=True)
    assert not companions.observe(seen(TARGET, [SLOW]), 115.9, enough=True)
    assert SLOW in companions.awaited
    assert companions.observe(seen(TARGET, [SLOW]), 116.0, enough=True)
    assert not companions.awaited
    assert not companions.observe(seen(TARGET, []), 117.0, enough=True)


def test_an_average_of_states_is_waited_for_anew_and_makes_no_epoch_longer() -> None:
    """Each change of the state is one batch more of a slow trainer; the time of the samples stays what it was."""
    companions = Companions()
    stepped(companions, 100.0)
    companions.observe(seen(TARGET, [SLOW]), 108.0, enough=True)
    companions.share([ME, SLOW], BEFORE, 0.0)
    companions.state_changed(114.0)
    assert not companions.observe(seen(TARGET, [SLOW]), 115.0, enough=True)
    assert companions.patience_s == 8.0
    assert not companions.observe(seen(TARGET, [SLOW]), 122.9, enough=True)
    assert companions.observe(seen(TARGET, [SLOW]), 123.0, enough=True)


def test_who_is_late_again_and_again_is_waited_for_ever_more_rarely() -> None:
    """A trainer whose batch lasts longer than an epoch and the patience slows the swarm down in few epochs only."""
    companions, now, waited = Companions(), 0.0, []
    for epoch in range(60):
        stepped(companions, now)
        if SLOW in companions.awaited:
            waited.append(epoch)
            companions.observe(seen(TARGET, [SLOW]), now + 1.0, enough=True)
            assert companions.observe(seen(TARGET, [SLOW]), now + 2.0, enough=True)
        now += 3.0
    assert waited == [0, 1, 4, 9, 18, 35]


def waits_in_vain(turns: int, *, gives: bool) -> int:
    """How often a peer is waited for in vain that in turns comes too late, is in no round, and is in one in time."""
    companions, now, waited = Companions(), 0.0, 0
    for _ in range(turns):
        for members, coming, gave in (([ME, SLOW], [SLOW], [ME]), ([ME], [], [ME]), ([ME, SLOW], [], [ME, SLOW])):
            companions.share(members, BEFORE, 0.0, gave=gave if gives else [ME])
            companions.state_changed(now, step=True)
            if SLOW in companions.awaited:
                waited += bool(coming)
                companions.observe(seen(TARGET, coming), now + 1.0, enough=True)
                companions.observe(seen(TARGET, coming), now + 2.0, enough=True)
            now += 3.0
    return waited


def test_a_peer_whose_samples_count_is_forgiven() -> None:
    """One batch that takes long costs nobody its place."""
    assert waits_in_vain(20, gives=True) == 20


def test_a_peer_that_gives_nothing_slows_the_others_down_for_good() -> None:
    """It is late, catches up, is in one round without samples, is late again: it was waited for every time."""
    assert waits_in_vain(20, gives=False) <= 6


def test_what_is_free_begins_no_pause() -> None:
    """A member that came half an epoch late is waited for as soon as the next average is there."""
    companions = Companions()
    stepped(companions, 100.0)
    companions.observe(seen(TARGET, [SLOW]), 108.0, enough=True)
    companions.observe(seen(TARGET, []), 112.0, enough=True)
    companions.share([ME, SLOW], BEFORE, 0.0, gave=[ME])
    assert SLOW in companions.awaited


def test_it_is_known_when_the_wait_ends() -> None:
    """So that somebody looks then: nothing else may happen at that time."""
    companions = Companions()
    stepped(companions, 100.0)
    companions.observe(seen(TARGET - 1, [SLOW]), 107.0, enough=False)
    assert companions.until is None
    companions.observe(seen(TARGET, [SLOW]), 108.0, enough=True)
    assert companions.until == 116.0
    assert companions.observe(seen(TARGET, [SLOW]), 116.0, enough=True)
    assert companions.until is None


def test_nobody_is_on_the_way_to_a_state_that_no_round_gave() -> None:
    """It was downloaded, loaded, or made alone."""
    companions = Companions()
    assert companions.before is None
    stepped(companions, 1.0)
    companions.forget()
    companions.state_changed(2.0)
    assert companions.before is None
    assert not companions.awaited


def test_a_member_is_waited_for_as_long_as_the_round_took_too() -> None:
    """Large states beside small epochs: their steps take long to take, as their rounds do."""
    companions = Companions()
    companions.share([ME, SLOW], BEFORE, 3.0)
    companions.state_changed(100.0, step=True)
    assert not companions.observe(seen(TARGET, [SLOW]), 101.0, enough=True)
    assert companions.patience_s == 4.0


def times_awaited(rounds: int, wait_s: float, *, gives: Collection[int] = (), states: bool = False) -> list[int]:
    """The rounds that wait for a peer which comes so long after the samples of an epoch of 1 s, and gives in some.

    Args:
        rounds: of gradients.
        wait_s: seconds.
        gives: the rounds that have samples of it.
        states: whether each is followed by an average of the states, to which it comes as late.
    """
    companions, now, awaited = Companions(), 0.0, list[int]()
    stepped(companions, now)
    for number in range(rounds):
        companions.observe(seen(TARGET, []), now := now + 1.0, enough=True)
        if SLOW in companions.awaited:
            awaited.append(number)
            assert not companions.observe(seen(TARGET, [SLOW]), now, enough=True)
            now += wait_s
            assert not companions.observe(seen(TARGET, []), now, enough=True)
        companions.share([ME, SLOW], BEFORE, 0.0, gave=[ME, SLOW] if number in gives else [ME])
        companions.state_changed(now, step=True)
        if states:
            companions.share([ME, SLOW], BEFORE, 0.0)
            companions.state_changed(now)
    return awaited


@pytest.mark.parametrize("states", [False, True])
def test_a_peer_that_comes_in_time_and_gives_nothing_is_charged_for_the_wait(states: bool) -> None:
    """Two epochs of waiting in all, at half an epoch each time; then ever more rarely."""
    awaited = times_awaited(60, 0.5, states=states)
    assert awaited[:5] == [0, 1, 2, 3, 4]
    assert len(awaited) < 5 + 6
    gaps = [b - a for a, b in itertools.pairwise(awaited[4:])]
    assert all(b > a for a, b in itertools.pairwise(gaps))


def test_a_wait_is_forgiven_when_samples_count() -> None:
    """A batch that is about as long as an epoch: its samples count now and then."""
    assert times_awaited(60, 0.5, gives=range(0, 60, 5)) == list(range(60))


def test_who_comes_a_moment_late_is_charged_nothing() -> None:
    """A link's delay, in a swarm with more peers than samples of an epoch."""
    assert times_awaited(60, 0.04) == list(range(60))
