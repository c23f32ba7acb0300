"""`PeerSampler` alone: what it gives, what it remembers, what it refuses; and how a step's samples are dealt."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

import shoal
from shoal.base.peer import PeerID
from shoal.data import PeerSampler, Shuffle
from shoal.errors import ConfigError
from shoal.run.decide.agreement import Contributor, Deal, deal_to

ANN, BEN, CAT = (PeerID(bytes([number]) * 32) for number in (1, 2, 3))


def swarm(peer: PeerID = ANN, *deals: Deal) -> Any:
    """As much of a `shoal.Optimizer` as a sampler sees."""
    return SimpleNamespace(run_id="run", dealt=deals, dht=SimpleNamespace(peer_id=peer))


def take(sampler: Iterator[int], count: int) -> list[int]:
    """The next samples."""
    return list(islice(sampler, count))


def test_an_iteration_is_a_pass_in_another_order() -> None:
    """Each sample once; the next iteration goes on with the next pass."""
    sampler = shoal.data.PeerSampler(range(100))
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert len(sampler) == 100


def test_iterations_of_any_length_go_on_where_the_last_one_ended() -> None:
    """Also after one that was left early."""
    sampler = PeerSampler(range(100), num_samples=40)
    found = [*sampler, *take(iter(sampler), 20), *sampler]
    assert sorted(found) == list(range(100))
    assert len(sampler) == 40


def test_an_endless_sampler_has_no_length() -> None:
    """As torch wants it: `TypeError`, so that its `DataLoader` has none."""
    sampler = PeerSampler([0] * 10, endless=True)
    assert len(take(iter(sampler), 35)) == 35
    with pytest.raises(TypeError):
        len(DataLoader([0] * 10, sampler=sampler))  # type: ignore[arg-type]


def test_a_loader_gives_batches_of_it() -> None:
    """As `sampler`, and within a `batch_sampler`."""
    data: Any = torch.arange(20)
    batches = [*DataLoader(data, batch_size=6, sampler=PeerSampler(data))]
    assert [len(batch) for batch in batches] == [6, 6, 6, 2]
    assert sorted(torch.cat(batches).tolist()) == list(range(20))
    whole = DataLoader(data, batch_sampler=BatchSampler(PeerSampler(data), 5, drop_last=True))
    assert sorted(torch.cat([*whole]).tolist()) == list(range(20))


def test_peers_draw_other_samples_unless_their_seeds_are_equal() -> None:
    """`torch.manual_seed` makes no difference; with a swarm equal seeds do no harm."""
    torch.manual_seed(0)
    one = list(PeerSampler(range(50)))
    torch.manual_seed(0)
    assert one != list(PeerSampler(range(50)))
    assert list(PeerSampler(range(50), seed=3)) == list(PeerSampler(range(50), seed=3))
    assert list(PeerSampler(range(50), swarm(ANN), seed=3)) != list(PeerSampler(range(50), swarm(BEN), seed=3))


def test_one_sample_is_given_again_and_again() -> None:
    """N = 1."""
    assert take(iter(PeerSampler(["x"], endless=True)), 5) == [0] * 5


def test_what_is_dealt_is_drawn_before_anything_else() -> None:
    """In its order, from the stream that all peers of the run have in common; then the peer's own again."""
    run = swarm()
    sampler = iter(PeerSampler(range(1000), run, endless=True, seed=1))
    own = take(sampler, 8)
    run.dealt = (Deal(1, 100, 104), Deal(2, 300, 303))
    common = Shuffle("run run", 1000)
    assert take(sampler, 7) == [common[place] for place in (100, 101, 102, 103, 300, 301, 302)]
    assert not set(own) & set(take(sampler, 100)), "its own permutation goes on"


def test_no_more_is_dealt_than_was_drawn() -> None:
    """Where `step` counts tokens, say: the rest is nobody's."""
    run = swarm()
    sampler = PeerSampler(range(1000), run, endless=True)
    take(iter(sampler), 10)
    run.dealt = (Deal(1, 0, 5000),)
    assert sampler.state_dict()["dealt"] == [(0, 10)]
    take(iter(sampler), 10)
    assert sampler.state_dict()["dealt"] == []
    run.dealt = (Deal(2, 5000, 9000),)
    assert sampler.state_dict()["dealt"] == [(5000, 5010)]


def test_deals_before_its_time_are_not_its_own() -> None:
    """A sampler that is made in the middle of a run: what was drawn for them was not drawn here."""
    run = swarm(ANN, Deal(6, 0, 50), Deal(7, 50, 100))
    sampler = PeerSampler(range(1000), run, endless=True)
    take(iter(sampler), 10)
    assert sampler.state_dict()["ahead"] == 10
    run.dealt = (*run.dealt, Deal(8, 100, 104))
    take(iter(sampler), 1)
    saved = sampler.state_dict()
    assert saved["dealt"] == [(101, 104)]
    again = PeerSampler(range(1000), run, endless=True)
    again.load_state_dict(saved)
    assert again.state_dict() == {**saved, "resumed": True}


@pytest.mark.parametrize("how", ["json", "torch"])
def test_a_saved_sampler_gives_the_rest(how: str) -> None:
    """Of its iteration, and the next ones."""

    def through_file(state: dict[str, Any]) -> Any:
        if how == "json":
            return json.loads(json.dumps(state))
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    run = swarm()
    sampler = PeerSampler(range(100), run, seed=5)
    drawing = iter(sampler)
    take(drawing, 10)
    run.dealt = (Deal(1, 30, 38),)
    take(drawing, 4)
    saved = through_file(sampler.state_dict())
    rest = [*drawing, *sampler]
    assert len(rest) == 86 + 100
    other = PeerSampler(range(100), swarm())
    other.load_state_dict(saved)
    assert [*other, *other] == rest


def test_another_peers_state_is_no_way_to_its_samples() -> None:
    """All peers load one checkpoint: they draw other samples all the same."""
    run = swarm(ANN)
    sampler = PeerSampler(range(1000), run, endless=True)
    take(iter(sampler), 10)
    run.dealt = (Deal(1, 30, 40),)
    take(iter(sampler), 1)
    saved = sampler.state_dict()
    other = PeerSampler(range(1000), swarm(BEN), endless=True)
    other.load_state_dict(saved)
    assert other.state_dict()["dealt"] == []
    assert take(iter(other), 20) != take(iter(sampler), 20)


def test_a_grown_data_set_begins_a_new_pass() -> None:
    """At the next iteration, also of a saved sampler. What was dealt by the old length is nobody's."""
    data = list(range(10))
    run = swarm()
    sampler = PeerSampler(data, run)
    take(iter(sampler), 5)
    run.dealt = (Deal(1, 0, 5),)
    take(iter(sampler), 1)
    saved = sampler.state_dict()
    data += range(10, 30)
    assert sorted(sampler) == list(range(30))
    other = PeerSampler(data, swarm(), num_samples=36)
    other.load_state_dict(saved)
    given = list(other)
    assert len(given) == 36 - 1
    assert set(given) == set(range(30))


def test_set_epoch_goes_on_to_an_iteration_and_never_back() -> None:
    """Trainers call it before each iteration, and to skip those that are done."""
    one, other = (PeerSampler(range(30), num_samples=20, seed=2) for _ in range(2))
    said = []
    for epoch in range(3):
        one.set_epoch(epoch)
        said.append(list(one))
    other.set_epoch(2)
    assert list(other) == said[2]
    other.set_epoch(0)
    assert list(other) == list(one)
    with pytest.raises(ConfigError, match="epoch"):
        other.set_epoch(-1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dataset": []}, "dataset has 0 samples"),
        ({"dataset": iter([1])}, "dataset has no length"),
        ({"swarm": torch.optim.SGD([torch.zeros(1)])}, r"swarm must be a shoal\.Optimizer"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"num_samples": 5, "endless": True}, "exclude each other"),
        ({"endless": "no"}, "endless must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 1 << 64}, "seed must be"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], named: str) -> None:
    """By a `ConfigError`."""
    with pytest.raises(ConfigError, match=named):
        PeerSampler(**{"dataset": [1, 2], **arguments})


@pytest.mark.parametrize("change", [{"place": -1}, {"dealt": [[3]]}, {"size": 0}, {"seed": None}, {"peer": 3}])
def test_a_wrong_state_is_refused(change: dict[str, Any]) -> None:
    """Nothing of it is loaded."""
    sampler = PeerSampler(range(10))
    before = sampler.state_dict()
    for wrong in ({**before, **change}, None, {}):
        with pytest.raises(ConfigError, match="state_dict"):
            sampler.load_state_dict(wrong)  # type: ignore[arg-type]
    assert sampler.state_dict() == before


def test_a_step_is_dealt_to_its_contributors_by_their_samples() -> None:
    """In the order of their ids, without a gap; others get nothing."""
    words = [Contributor(CAT, 30), Contributor(ANN, 10)]
    assert deal_to(ANN, words, 100, 140) == (100, 110)
    assert deal_to(CAT, words, 100, 140) == (110, 140)
    assert deal_to(BEN, words, 100, 140) == (100, 100)
    # more samples came while the group was formed
    assert [deal_to(peer, words, 0, 43) for peer in (ANN, CAT)] == [(0, 10), (10, 43)]
    assert deal_to(ANN, [Contributor(ANN, 0)], 5, 5) == (5, 5)
