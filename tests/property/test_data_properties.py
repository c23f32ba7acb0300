"""Of any data set and swarm: shuffles are permutations, resuming changes nothing, repeats stay within the bound."""

from __future__ import annotations

from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.data import Swarm, expected, play
from shoal.base.peer import PeerID
from shoal.data import PeerSampler, Shuffle, permuted
from shoal.run.decide.agreement import Contributor, Deal, deal_to


@given(st.integers(1, 5000), st.text(max_size=8))
def test_a_shuffle_is_a_permutation(size: int, key: str) -> None:
    """Of all numbers below any size."""
    assert sorted(permuted(np.arange(size, dtype=np.uint64), size, key).tolist()) == list(range(size))


@given(st.integers(1, 1 << 62), st.data())
def test_a_shuffle_of_any_size_keeps_numbers_apart(size: int, data: st.DataObject) -> None:
    """No two of them come together, none comes out beyond the size."""
    numbers = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=200))
    found = permuted(np.array(sorted(numbers), dtype=np.uint64), size, "key").tolist()
    assert len(set(found)) == len(numbers)
    assert 0 <= min(found) <= max(found) < size


@given(st.integers(1, 700), st.integers(0, 2000))
def test_a_stream_has_every_number_in_each_pass(size: int, place: int) -> None:
    """Wherever it is read."""
    stream = Shuffle("key", size)
    start = place // size * size
    assert sorted(stream[number] for number in range(start, start + size)) == list(range(size))


@pytest.mark.parametrize("size", [4, *(pytest.param(each, marks=pytest.mark.long(full=True)) for each in (3, 5, 6))])
def test_all_orders_are_equally_likely(size: int) -> None:
    """Chi squared over 12,000 keys: within 4 standard deviations of what random orders have."""
    counts: dict[tuple[int, ...], int] = {}
    keys, orders = 12_000, int(np.prod(range(1, size + 1)))
    for key in range(keys):
        order = tuple(permuted(np.arange(size, dtype=np.uint64), size, str(key)).tolist())
        counts[order] = counts.get(order, 0) + 1
    mean = keys / orders
    chi_squared = sum((count - mean) ** 2 / mean for count in counts.values()) + mean * (orders - len(counts))
    freedom = orders - 1
    assert abs(chi_squared - freedom) < 4 * (2 * freedom) ** 0.5


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=6),
    st.integers(0, 200),
    st.booleans(),
)
def test_resuming_gives_the_same_rest(size: int, turns: list[tuple[int, int]], rest: int, endless: bool) -> None:
    """Whatever was drawn and dealt before, within an iteration or behind its end."""

    def sampler() -> tuple[PeerSampler, Any]:
        peer = SimpleNamespace(run_id="run", dealt=(), dht=SimpleNamespace(peer_id=PeerID(bytes(32))))
        found: Any = PeerSampler(range(size), peer, endless=endless, seed=9)  # type: ignore[arg-type]
        return found, peer

    one, run = sampler()
    drawing = iter(one)
    for number, (draws, dealt) in enumerate(turns, start=1):
        list(islice(drawing, draws))
        run.dealt = (*run.dealt, Deal(number, 50 * number, 50 * number + dealt))
    saved = one.state_dict()
    two, _ = sampler()
    two.load_state_dict(saved)
    assert list(islice(two, rest)) == list(islice(drawing, rest))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(0, 1 << 40), st.integers(0, 5000))
def test_deals_of_a_step_cover_it_once(samples: list[int], start: int, count: int) -> None:
    """For any contributors, also where their words do not add up to what went into the step."""
    peers = [PeerID(number.to_bytes(32, "big")) for number in range(len(samples))]
    words = [Contributor(peer, max(1, each)) for peer, each in zip(peers, samples, strict=True)]
    shares = [deal_to(peer, words, start, start + count) for peer in peers]
    assert shares[0][0] == start
    assert shares[-1][1] == start + count
    assert all(before[1] == after[0] for before, after in pairwise(shares))


swarms = st.builds(
    Swarm,
    samples=st.integers(2000, 4000),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=12).map(tuple),
    target=st.integers(60, 400),
    batch=st.sampled_from([4, 8, 16]),
    ahead=st.integers(0, 2),
    churn=st.sampled_from([0.0, 0.3, 1.0]),
)


@settings(max_examples=15)
@given(swarms, st.integers(0, 1000))
def test_repeats_stay_within_what_was_not_dealt(plan: Swarm, seed: int) -> None:
    """Peers of any speeds, deaths and joins: in the first pass, and nearly none is left unused by the second."""
    first, second = play(plan, "dealt", seed)
    bound = expected(plan, "dealt", 1)
    assert bound is not None
    assert first <= bound
    assert second <= bound / 2


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=8).map(tuple), st.integers(0, 1000))
def test_own_permutations_repeat_as_expected(speeds: tuple[float, ...], seed: int) -> None:
    """Peers that know nothing of each other: prod(1 - share), and a spread of at most 1 in sqrt(N)."""
    plan = Swarm(4000, speeds, target=200)
    for found, passes in zip(play(plan, "own", seed), (1, 2), strict=True):
        assert found == pytest.approx(expected(plan, "own", passes), abs=0.03)
