"""Every change of phase in the machine's table happens in some search, and no other one does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shoal.averaging.matchmaking.declarations import Memory
from shoal.averaging.matchmaking.events import (
    TRANSITIONS,
    Answered,
    Cancel,
    LeaderLost,
    Nudged,
    PeerLost,
    SearchPhase,
    Tick,
)
from shoal.averaging.matchmaking.leaders import LeaderMemory
from shoal.averaging.matchmaking.machine import GroupMachine
from shoal.protocol.wire import JoinRedirected, JoinRefused
from tests.property.matchmaking_world import BEGIN, Setup, Weather, contact_of, peer_id
from tests.property.test_matchmaking_properties import PeerPlan, play
from tests.transitions import Recorder
from tests.unit.test_matchmaking_machine import Play, declared, following, join

SWARMS = 300


def simulate(seed: int) -> None:
    """A swarm of random peers, of which some die, vanish or give up."""
    rng = random.Random(seed)

    def sometimes() -> float | None:
        return rng.choice([None, None, rng.uniform(0.0, 0.3), rng.uniform(0.0, 6.0)])

    plans = [
        PeerPlan(
            calls_at=rng.choice([rng.uniform(0.0, 0.3), rng.uniform(0.0, 6.0)]),
            leads=rng.random() < 0.8,
            reduces=rng.random() < 0.7,
            skew_s=rng.choice([0.0, 2.0, -2.0]),
            expects_all=rng.random() < 0.3,
            dies_at=sometimes(),
            vanishes=rng.random() < 0.5,
            cancels_at=sometimes(),
        )
        for _ in range(rng.randint(2, 9))
    ]
    weather = Weather(latency_s=rng.choice([0.002, 0.05]), jitter_s=rng.choice([0.0, 0.1]), visible_after_s=0.3)
    play(seed, weather, plans, target=rng.choice([None, 2, 4]), least=2, deadline_s=rng.choice([None, 6.0]))


def asking(**options: object) -> Play:
    """A search that has asked the peer of number 1."""
    game = Play(**options)  # type: ignore[arg-type]
    game.settle(declared(1))
    assert game.machine.phase is SearchPhase.ASKING
    return game


def at_the_deadline(begin: Callable[..., Play]) -> None:
    """No time is left for a round."""
    begin(setup=Setup(deadline_s=5.5)).hear(Tick(), at=5.5)


def silent(begin: Callable[..., Play]) -> None:
    """The leader gives no sign of life."""
    game = begin()
    game.silent.add(peer_id(1))
    game.hear(Tick(), at=1.0)


def last_leader_is_expected() -> None:
    """The last round succeeded under a leader that comes again."""
    Play(memory=Memory(leaders=LeaderMemory(last=contact_of(1))), expected=lambda: frozenset({peer_id(1)}))


def nudged_peer_follows_another() -> None:
    """Two leaders meet through a follower."""
    game = Play()
    game.settle(declared(60))
    game.hear(Nudged(peer_id(60), JoinRedirected(contact_of(70))))


SCRIPTS: tuple[Callable[[], object], ...] = (
    last_leader_is_expected,
    nudged_peer_follows_another,
    lambda: Play().hear(Cancel()),
    *(lambda begin=begin: at_the_deadline(begin) for begin in (asking, following)),
    *(lambda begin=begin: silent(begin) for begin in (asking, following)),
    *(
        lambda begin=begin, event=event: begin().hear(event)
        for begin in (asking, following)
        for event in (
            Answered(peer_id(1), JoinRefused("full", "")),
            Answered(peer_id(1), JoinRedirected(contact_of(2))),
            Answered(peer_id(1), JoinRedirected(contact_of(1))),
            Answered(peer_id(1), BEGIN),
            LeaderLost(peer_id(1), "lost"),
            PeerLost(peer_id(1)),
            Cancel(),
        )
    ),
    *(lambda begin=begin: begin().hear(join(1, expiration=2_000_000.0)) for begin in (asking, following)),
    lambda: Play(setup=Setup(min_group_size=1)).wait(6.0),
)


def test_every_transition_of_the_table_is_covered() -> None:
    """Random swarms and scripts together make each change of phase in the table; it is printed with its counts."""
    with Recorder(
        GroupMachine, ["_change_phase"], event=lambda machine, *_: machine._cause, also_same=True
    ) as recorder:
        for seed in range(SWARMS):
            simulate(seed)
        for script in SCRIPTS:
            script()
    recorder.check(TRANSITIONS)


def test_a_change_of_phase_that_is_not_in_the_table_is_refused() -> None:
    """A rule that is added to the machine is added to the table too."""
    game = following()
    with pytest.raises(AssertionError):
        game.machine._change_phase(SearchPhase.FOLLOWING)
