"""Whole searches under random arrivals, latencies and faults: what must hold in each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.peer import PeerID
from shoal.protocol.wire import MAX_GROUP_SIZE
from tests.property.matchmaking_world import Node, Setup, Weather, World

times = st.floats(0.0, 6.0, allow_nan=False).map(lambda value: round(value, 3))
soon = st.floats(0.0, 0.3, allow_nan=False).map(lambda value: round(value, 4))


@dataclass(frozen=True)
class PeerPlan:
    """What one peer does, and what befalls it."""

    calls_at: float
    leads: bool = True
    reduces: bool = True
    auxiliary: bool = False
    skew_s: float = 0.0
    expects_all: bool = False
    dies_at: float | None = None
    vanishes: bool = False
    cancels_at: float | None = None


def peer_plans(*, faults: bool) -> st.SearchStrategy[PeerPlan]:
    """Peers that mostly come together; with `faults`, some die, vanish or give up at any time."""
    never = st.none()
    sometimes = st.one_of(never, never, soon, times) if faults else never
    return st.builds(
        PeerPlan,
        calls_at=st.one_of(soon, soon, times),
        leads=st.sampled_from([True, True, True, False]),
        reduces=st.sampled_from([True, True, False]),
        auxiliary=st.sampled_from([False, False, True]),
        skew_s=st.sampled_from([0.0, 0.0, 2.0, -2.0]),
        expects_all=st.booleans(),
        dies_at=sometimes,
        vanishes=st.booleans(),
        cancels_at=sometimes,
    )


weathers = st.builds(
    Weather,
    latency_s=st.sampled_from([0.0, 0.002, 0.05]),
    jitter_s=st.sampled_from([0.0, 0.01, 0.1]),
    store_s=st.sampled_from([0.0, 0.02, 0.3]),
    read_s=st.sampled_from([0.0, 0.01, 0.2]),
    visible_after_s=st.sampled_from([0.0, 0.0, 0.3]),
)


def play(
    seed: int, weather: Weather, plans: list[PeerPlan], *, target: int | None, least: int, deadline_s: float | None
) -> tuple[World, list[Node]]:
    """Let it all happen and check the invariants on the way and at the end."""
    world = World(seed, weather)
    nodes = []
    for number, plan in enumerate(plans):
        setup = Setup(
            target_group_size=target,
            min_group_size=least,
            deadline_s=deadline_s,
            reduces=plan.reduces and plan.leads,
            contributes=not (plan.auxiliary and plan.reduces and plan.leads),
            leads=plan.leads,
        )
        node = world.add(number, setup, skew_s=plan.skew_s)
        nodes.append(node)
    everybody = frozenset(node.peer for node in nodes)
    for node, plan in zip(nodes, plans, strict=True):
        expected: Callable[[], frozenset[PeerID] | None] | None = (lambda: everybody) if plan.expects_all else None
        world.call(node, plan.calls_at, expected)
        if plan.dies_at is not None:
            world.crash(node, plan.dies_at, vanish=plan.vanishes)
        if plan.cancels_at is not None:
            world.cancel(node, plan.cancels_at)
    world.run()
    world.check_groups()
    return world, nodes


@given(
    seed=st.integers(0, 2**32),
    weather=weathers,
    plans=st.lists(peer_plans(faults=True), min_size=2, max_size=9),
    target=st.sampled_from([None, None, 2, 3, 4, 8]),
    least=st.sampled_from([2, 2, 2, 3]),
    deadline_s=st.sampled_from([None, 12.0]),
)
@settings(max_examples=200)
def test_groups_are_sound_whatever_happens(
    seed: int, weather: Weather, plans: list[PeerPlan], target: int | None, least: int, deadline_s: float | None
) -> None:
    """Each member once, nobody in two groups, all begun alike or without their leader, and every search ends."""
    target = None if target is None else max(target, least)
    world, nodes = play(seed, weather, plans, target=target, least=least, deadline_s=deadline_s)
    for group in world.groups:
        assert least <= len(group.members) <= (target or MAX_GROUP_SIZE)
        assert any(world.nodes[peer].setup.reduces for peer in group.members)
        assert group.leader.setup.leads
    for node in nodes:
        if node.ended_at is not None:
            # The deadline; or a window, an answer that comes late, and a leader that does not begin.
            bound_s = 5.0 + 3.0 + 7 * 3.0 if deadline_s is None else deadline_s + 1e-6
            assert node.ended_at - node.called_at <= bound_s


@given(
    seed=st.integers(0, 2**32),
    latency_s=st.sampled_from([0.0, 0.002, 0.02]),
    arrivals=st.lists(soon, min_size=2, max_size=12),
    skews=st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=12, max_size=12),
)
@settings(max_examples=100)
def test_full_group_forms_when_all_come_and_nothing_fails(
    seed: int, latency_s: float, arrivals: list[float], skews: list[float]
) -> None:
    """With a target that is reached, everybody ends in one group long before the window ends."""
    weather = Weather(latency_s=latency_s, store_s=6 * latency_s, read_s=4 * latency_s)
    plans = [PeerPlan(calls_at=at, skew_s=skew, expects_all=True) for at, skew in zip(arrivals, skews, strict=False)]
    world, nodes = play(seed, weather, plans, target=len(plans), least=2, deadline_s=None)
    assert len(world.groups) == 1
    assert set(world.groups[0].members) == {node.peer for node in nodes}
    assert world.groups[0].at < max(arrivals) + 2.0


@given(
    seed=st.integers(0, 2**32),
    plans=st.lists(peer_plans(faults=False), min_size=2, max_size=8),
    rounds=st.integers(2, 4),
)
@settings(max_examples=100)
def test_searches_one_after_another_are_sound(seed: int, plans: list[PeerPlan], rounds: int) -> None:
    """What a search leaves behind (memory, declarations) does no harm to the next ones."""
    world, nodes = play(seed, Weather(), plans, target=None, least=2, deadline_s=None)
    for _ in range(rounds):
        begin = world.now + 0.1
        world.groups.clear()
        for node, plan in zip(nodes, plans, strict=True):
            if node.group is not None:
                node.memory.companions = frozenset(node.group.members)
            world.call(node, begin + plan.calls_at)
        world.run()
        world.check_groups()


@pytest.mark.parametrize(("target", "sizes"), [(None, [16]), (16, [16]), (4, [4, 4, 4, 4])])
def test_rate_of_full_groups(target: int | None, sizes: list[int]) -> None:
    """Of 100 swarms of 16 that call within 200 ms, 99 form what they can form."""
    full = 0
    for seed in range(100):
        world = World(seed)
        for number in range(16):
            world.call(world.add(number, Setup(target_group_size=target)), world.rng.uniform(0.0, 0.2))
        world.run()
        world.check_groups()
        full += sorted(len(group.members) for group in world.groups) == sizes
    assert full >= 99
