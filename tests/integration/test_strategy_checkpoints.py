"""Checkpoints of runs that merge, as a user saves and loads them: in the middle of an interval, and of other runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LinearLR

import shoal
from shoal.base.peer import PeerID
from shoal.errors import ConfigError
from shoal.events import Warned
from shoal.run.chains import Chains
from shoal.run.join.own_state import OwnState
from shoal.strategies import (
    Decoupled,
    DiLoCo,
    LocalSGD,
    LocalUpdates,
    Merges,
    Strategy,
    StreamingDiLoCo,
    Synchronous,
)
from shoal.strategies.outer import OuterTrainingState
from shoal.train.training_state import TrainingState
from shoal.zero.disk.weights import weights_in
from tests.integration.scripts import digest
from tests.integration.workers import until
from tests.unit.test_outer_interrupts import code, interrupt


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    """A network of one."""
    with shoal.DHT(start=True) as started:
        yield started


def begin(dht: shoal.DHT, model: torch.nn.Module, strategy: Strategy, /, **options: Any) -> shoal.Optimizer:
    """A run that merges."""
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    return shoal.Optimizer(dht=dht, run_id="run", batch_size_per_step=4, optimizer=inner, strategy=strategy, **options)


def train(swarm: shoal.Optimizer, model: torch.nn.Module, batches: int) -> None:
    """So many batches."""
    for _ in range(batches):
        swarm.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
        swarm.step()


def network(seed: int) -> torch.nn.Module:
    """Two layers, the same for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


STREAMING = StreamingDiLoCo(4, fragments=2, overlap=1)


def states(swarm: shoal.Optimizer) -> list[tuple[int, bytes]]:
    """Of each fragment."""
    return [(each.epoch, each.state.digest) for each in swarm._chains.participants]


def anchors(swarm: shoal.Optimizer) -> list[torch.Tensor]:
    """Of all fragments."""
    return [each.detach().clone() for fragment in swarm._chains.participants for each in fragment.training.parameters]


@pytest.mark.parametrize("strategy", [DiLoCo(4), STREAMING], ids=["1", "2"])
def test_a_state_saved_in_the_middle_of_an_interval_is_the_last_merge(dht: shoal.DHT, strategy: Strategy) -> None:
    """The names and the anchors come back; what was trained since is not part of it. The schedule goes back, too."""
    model = network(0)
    with begin(dht, model, strategy, scheduler=lambda inner: LinearLR(inner, 0.1, total_iters=40)) as swarm:
        train(swarm, model, 10)
        saved, named, held = copy.deepcopy(swarm.state_dict()), states(swarm), anchors(swarm)
        schedule: Any = swarm._training.schedule.scheduler
        of_schedule = schedule.state_dict()
        assert min(epoch for epoch, _ in named) > 0
        train(swarm, model, 9)
        assert states(swarm) != named
        swarm.load_state_dict(saved)
        assert states(swarm) == named
        assert all(map(torch.equal, anchors(swarm), held))
        for fragment in swarm._chains.participants:
            assert all(map(torch.equal, fragment.training._own, fragment.training.parameters))  # type: ignore[attr-defined]
        schedule.load_state_dict(of_schedule)  # as Trainers do it, afterwards
        train(swarm, model, 1)
        batches = 4 * named[0][0] + 1
        assert schedule.last_epoch == batches < 10
        assert swarm.param_groups[0]["lr"] == pytest.approx(0.1 * (0.1 + 0.9 * batches / 40))
        train(swarm, model, 8)
        assert min(epoch for epoch, _ in states(swarm)) > min(epoch for epoch, _ in named)


@pytest.mark.parametrize("strategy", [DiLoCo(4), STREAMING], ids=["1", "2"])
def test_a_checkpoint_is_saved_and_taken_over(dht: shoal.DHT, tmp_path: Path, strategy: Strategy) -> None:
    """Of several fragments none was ever saved: the names of their states are bytes, which JSON has not."""
    model, other, masks = network(0), network(1), torch.tensor([-torch.inf])
    with begin(dht, model, strategy, model=model, extra_tensors=[masks]) as swarm:
        train(swarm, model, 10)
        named, held = states(swarm), anchors(swarm)
        saved = swarm.save(tmp_path)
    options: dict[str, Any] = {"extra_tensors": [masks.clone()], "checkpoint": tmp_path, "save_every": 0}
    with begin(dht, other, strategy, model=other, **options) as swarm:
        assert min(epoch for epoch, _ in named) > 0
        assert states(swarm) == named
        assert all(map(torch.equal, anchors(swarm), held))
        for each in swarm._chains.participants:
            assert all(map(torch.equal, each.training._own, each.training.trained))  # type: ignore[attr-defined]
        weights = load_file(saved / "model.safetensors")
        assert all(torch.equal(weights[name], each) for name, each in other.state_dict().items())


def test_fragments_keep_their_names_when_other_weights_are_loaded(dht: shoal.DHT) -> None:
    """They do not: all but the first one had other bits than peers that held the state of their name."""
    model = network(0)
    with begin(dht, model, STREAMING) as swarm:
        plain = torch.optim.AdamW(network(1).parameters(), lr=0.1).state_dict()
        before = states(swarm)
        model.load_state_dict(network(1).state_dict())
        swarm.load_state_dict(plain)
        assert all(now != was for now, was in zip(states(swarm), before, strict=True))
        named = states(swarm)
    fresh = network(1)
    with begin(dht, fresh, STREAMING) as swarm:
        assert states(swarm) == named


@pytest.mark.parametrize(("of", "here"), [(Synchronous(), DiLoCo(4)), (STREAMING, Synchronous())], ids=["to", "from"])
def test_a_checkpoint_of_a_run_that_does_not_merge_is_refused(
    dht: shoal.DHT, tmp_path: Path, of: Strategy, here: Strategy
) -> None:
    """Its epochs were taken for merges, its schedule moved `every` times as far, and the inner moments were gone."""
    model = network(0)
    with begin(dht, model, of, target_batch_size=None if isinstance(of, Merges) else 4) as swarm:
        train(swarm, model, 5)
        swarm.save(tmp_path)
    with begin(dht, network(1), here, target_batch_size=None if isinstance(here, Merges) else 4) as swarm:
        with pytest.raises(ConfigError, match=r"it is of a run whose peers .*, and here they .* another folder$"):
            swarm.resume(tmp_path)
        assert swarm.local_epoch == 0


@pytest.mark.parametrize(
    "strategy",
    [DiLoCo(4), LocalSGD(4), STREAMING, Decoupled(4, fragments=1, quorum=1)],
    ids=["1", "sgd", "2", "quorum"],
)
def test_zero_takes_the_weights_alone_of_a_run_that_merges(dht: shoal.DHT, tmp_path: Path, strategy: Strategy) -> None:
    """Of one fragment it made the outer optimizer the model's: its rate was 0.7, and the loss soon infinite."""
    model = network(0)
    with begin(dht, model, strategy, model=model) as swarm:
        train(swarm, model, 5)
        saved = swarm.save(tmp_path)
    with pytest.raises(ConfigError, match=r"anchors of merges.*: load its weights alone, .*model\.safetensors"):
        shoal.zero.consolidate(saved)
    weights = load_file(saved / "model.safetensors")
    assert weights_in(saved).kinds.keys() == weights.keys() == model.state_dict().keys()


def test_zero_goes_on_from_local_updates(dht: shoal.DHT, tmp_path: Path) -> None:
    """Their checkpoints have the weights of the peer that saved, and its own optimizer's state."""
    model, strategy = network(0), LocalUpdates(8, statistics=["exp_avg_sq"])
    with begin(dht, model, strategy, model=model) as swarm:
        train(swarm, model, 5)
        found = shoal.zero.consolidate(swarm.save(tmp_path))
        for name, each in model.state_dict().items():
            assert torch.equal(found["model"][name], each)
        wanted = {key: value for key, value in swarm.state_dict().items() if key != "shoal"}
    plain = torch.optim.AdamW(network(0).parameters(), lr=0.5)
    plain.load_state_dict(found["optimizer"])
    assert plain.state_dict()["param_groups"] == wanted["param_groups"]
    for number, entry in wanted["state"].items():
        assert all(torch.equal(plain.state_dict()["state"][number][key], each) for key, each in entry.items())


@pytest.mark.parametrize("how", ["resume", "load_state_dict"])
def test_a_state_of_another_outer_optimizer_is_refused(dht: shoal.DHT, tmp_path: Path, how: str) -> None:
    """Its rate took the place of the one that was given, in silence."""
    model = network(0)
    with begin(dht, model, DiLoCo(4)) as swarm:
        train(swarm, model, 5)
        swarm.save(tmp_path)
        saved = swarm.state_dict()
    slower = DiLoCo(4, partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True))
    with begin(dht, network(1), slower) as swarm:
        with pytest.raises(ConfigError, match=r"outer optimizer is SGD .* lr 0\.7, .* lr 0\.5,"):
            swarm.resume(tmp_path) if how == "resume" else swarm.load_state_dict(saved)
        assert swarm.local_epoch == 0
        assert not swarm.state


def test_a_state_of_a_synchronous_run_begins_the_first_interval(dht: shoal.DHT) -> None:
    """Its epochs are no merges; the schedule stood still for as many batches as it had epochs."""
    model, warned = network(0), list[str]()
    dht.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
    with begin(dht, model, Synchronous(), target_batch_size=4) as swarm:
        train(swarm, model, 12)
        saved = copy.deepcopy(swarm.state_dict())
    with begin(dht, model, STREAMING, scheduler=lambda inner: LinearLR(inner, 0.1, total_iters=40)) as swarm:
        swarm.load_state_dict(saved)
        assert [(each.epoch, each.training.epoch) for each in swarm._chains.participants] == [(0, 0), (0, 0)]
        train(swarm, model, 1)
        assert swarm.param_groups[0]["lr"] == pytest.approx(0.1 * (0.1 + 0.9 / 40))
    assert [message.partition(":")[0] for message in warned if "averages gradients" in message] == [
        "the state that was loaded is of a run that averages gradients"
    ]


@pytest.mark.parametrize("of", [DiLoCo(4), STREAMING], ids=["1", "2"])
@pytest.mark.parametrize("here", [Synchronous(4), LocalUpdates(4)], ids=["gradients", "parameters"])
def test_a_state_of_a_run_that_merges_begins_the_first_epoch(dht: shoal.DHT, of: Strategy, here: Strategy) -> None:
    """Its merges were taken for epochs, with no word; the schedule went on from its batches."""
    model, warned = network(0), list[str]()
    dht.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
    schedule: Any = partial(LinearLR, start_factor=0.1, total_iters=40)
    with begin(dht, model, of, scheduler=schedule) as swarm:
        train(swarm, model, 12)
        weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(swarm.state_dict())
        assert swarm.local_epoch > 1
    model = network(1)
    with begin(dht, model, here, scheduler=schedule) as swarm:
        with pytest.raises(ConfigError, match="was saved with other weights than the model has now"):
            swarm.load_state_dict(copy.deepcopy(saved))
        model.load_state_dict(weights)
        swarm.load_state_dict(copy.deepcopy(saved))
        assert (swarm.local_epoch, swarm.param_groups[0]["lr"]) == (0, pytest.approx(0.01))
        for number, entry in swarm.state_dict()["state"].items():
            assert all(torch.equal(saved["state"][number][key], each) for key, each in entry.items())
        train(swarm, model, 2)
        until(lambda: swarm.local_epoch == 2)
        assert swarm.param_groups[0]["lr"] == pytest.approx(0.1 * (0.1 + 0.9 * 2 / 40))
        swarm.load_state_dict(copy.deepcopy(swarm.state_dict()))
        assert swarm.local_epoch == 2
    assert [message.partition(":")[0] for message in warned if "that was loaded" in message] == [
        "the state that was loaded is of a run that merges"
    ]


@pytest.mark.parametrize(
    ("of", "here", "counts"), [(DiLoCo(2), STREAMING, "in 1 .* 2"), (STREAMING, DiLoCo(2), "in 2 .* 1")]
)
def test_a_state_that_does_not_fit_changes_nothing(dht: shoal.DHT, of: Strategy, here: Strategy, counts: str) -> None:
    """Of another number of fragments: also the inner optimizer stays as it is. One was refused for `'epoch'`."""
    model, other = network(0), network(0)
    with begin(dht, other, of) as swarm:
        train(swarm, other, 5)
        saved = copy.deepcopy(swarm.state_dict())
    with begin(dht, model, here) as swarm:
        named = states(swarm)
        with pytest.raises(ConfigError, match=rf"state_dict\['shoal'\] does not fit here: .* {counts}$"):
            swarm.load_state_dict(saved)
        assert states(swarm) == named
        assert not swarm.state


def test_a_run_shorter_than_an_interval_says_that_nothing_was_merged(dht: shoal.DHT) -> None:
    """Nothing told, and nothing was saved; a run that merged says nothing."""
    warned: list[str] = []
    dht.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
    alone, of_two = "merges every 4 batches. Train longer", "if 2 peers give it (its quorum)"
    for strategy, batches, told in (
        (DiLoCo(4), 3, alone),
        (DiLoCo(4), 5, ""),
        (StreamingDiLoCo(8, fragments=2, overlap=1), 7, ""),  # only the second fragment was merged
        (Decoupled(4, fragments=1, quorum=2), 5, of_two),
    ):
        model = network(0)
        swarm = begin(dht, model, strategy)
        train(swarm, model, batches)
        swarm.shutdown()
        said = [message for message in warned if "none of them was merged" in message]
        assert len(said) == bool(told)
        assert all(told in message for message in said)
        warned.clear()


def test_a_peer_that_hears_of_the_end_later_ends_with_the_last_merge(dht: shoal.DHT) -> None:
    """It was finished at once, with what it had trained since: other weights than those of all others."""
    model = network(0)
    with begin(dht, model, DiLoCo(4)) as swarm:
        train(swarm, model, 6)
        swarm.announce_end(swarm.local_epoch)
        while not swarm.collaboration.finished:
            pass
        while not swarm.finished:
            train(swarm, model, 1)
        assert all(map(torch.equal, model.parameters(), anchors(swarm)))


@pytest.mark.parametrize("strategy", [DiLoCo(4), STREAMING], ids=["1", "2"])
def test_weights_may_be_put_into_the_model_until_the_first_batch(dht: shoal.DHT, strategy: Strategy) -> None:
    """They passed for what this peer has trained: the first merge went 1.33 times the way from the weights before."""
    model, trained = network(0), network(1)
    wanted = sorted(float(each.detach().sum()) for each in trained.parameters())
    with begin(dht, model, strategy) as swarm:
        model.load_state_dict(trained.state_dict())
        before = states(swarm)
        swarm.load_state_dict(swarm.state_dict())  # as Accelerate does; the model had the weights before then
        assert sorted(float(each.detach().sum()) for each in model.parameters()) == wanted
        assert states(swarm) == before
        model.load_state_dict(network(2).state_dict())
        model.load_state_dict(trained.state_dict())
        train(swarm, model, 1)
        assert sorted(float(each.sum()) for each in anchors(swarm)) == wanted
        model.load_state_dict(network(2).state_dict())
        swarm.state_dict()
        assert sorted(float(each.sum()) for each in anchors(swarm)) == wanted


def test_a_loop_that_looks_at_finished_is_not_told_to_do_so(dht: shoal.DHT) -> None:
    """The last peer came to the end while a batch was computed: its step said that the loop went on after the end."""
    warned: list[str] = []
    dht.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
    model = network(0)
    with begin(dht, model, DiLoCo(4)) as swarm:
        train(swarm, model, 4)
        swarm.announce_end(swarm.local_epoch)
        until(lambda: swarm.finished)
        train(swarm, model, 1)
        swarm.status()  # what was said before is heard by then
        assert not warned
        train(swarm, model, 98)
        swarm.status()
        assert not warned, "a program of two optimizers goes on until both runs have ended"
        train(swarm, model, 2)
        swarm.status()
    assert ["the run has ended" in message for message in warned] == [True]


def test_weights_to_evaluate_with_are_those_of_the_run_at_its_end(dht: shoal.DHT) -> None:
    """ScheduleFree computes others, from statistics that are each peer's own: peers ended with different models."""
    kind = pytest.importorskip("pytorch_optimizer").ScheduleFreeAdamW
    model = network(0)
    inner = kind(model.parameters(), lr=0.1)
    with shoal.Optimizer(dht=dht, run_id="run", batch_size_per_step=4, optimizer=inner, strategy=DiLoCo(4)) as swarm:
        swarm.announce_end(2)
        train(swarm, model, 6)
        swarm.eval()
        assert not all(map(torch.equal, model.parameters(), anchors(swarm)))
        swarm.train()
        while not swarm.finished:
            train(swarm, model, 1)
        swarm.eval()
        assert all(map(torch.equal, model.parameters(), anchors(swarm)))


LOADING = [
    *(code(each) for each in (Chains.resume, Chains.load, Chains._forget, Chains._set, Chains._name)),
    *(code(each) for each in (OwnState.loading, OwnState.loaded)),
    *(code(each) for each in (OuterTrainingState.take_over, TrainingState.take_over)),
]


@pytest.mark.parametrize("how", ["load_state_dict", "resume"])
def test_what_is_half_loaded_has_no_other_states_name(dht: shoal.DHT, tmp_path: Path, how: str) -> None:
    """Ctrl+C left half of a state under the name of the one before, and others could download it. Training goes on."""
    model, known, place = network(0), dict[tuple[int, bytes], str](), 1
    with begin(dht, model, STREAMING) as swarm:
        fragments = swarm._chains.participants

        def look() -> None:
            for number, fragment in enumerate(fragments):
                held = digest(fragment.own.export().tensors)
                assert known.setdefault((number, fragment.state.digest), held) == held, f"at line {place}"

        train(swarm, model, 10)
        swarm.save(tmp_path)
        saved = copy.deepcopy(swarm.state_dict())
        look()
    model = network(1)
    with begin(dht, model, STREAMING) as swarm:
        fragments = swarm._chains.participants
        train(swarm, model, 5)
        look()
        load = partial(swarm.resume, tmp_path) if how == "resume" else partial(swarm.load_state_dict, saved)
        while interrupt(place, LOADING, load):
            look()
            place += 1
        look()
        assert place > 30
        swarm.load_state_dict(copy.deepcopy(swarm.state_dict()))
        assert interrupt(place // 2, LOADING, partial(swarm.load_state_dict, saved))
        train(swarm, model, 9)
        look()
        assert all(fragment.training.epoch == fragment.epoch > 0 for fragment in fragments)


def test_a_peer_is_elected_for_the_epoch_of_the_whole_model(dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was for that of a fragment that is ahead on some peers, so two or none held themselves elected."""
    asked: list[int] = []

    def elected(_run_id: str, epoch: int, candidates: Iterable[PeerID]) -> PeerID:
        asked.append(epoch)
        return next(iter(candidates))

    monkeypatch.setattr("shoal.run.participant.elected", elected)
    model, ahead = network(0), 0
    with begin(dht, model, STREAMING) as swarm:
        for _ in range(20):
            train(swarm, model, 1)
            swarm.is_elected()
            assert asked.pop() == swarm.local_epoch
            ahead += swarm._chains.participants[-1].epoch > swarm.local_epoch
    assert ahead > 3


def test_batch_norm_statistics_stay_when_the_run_is_over(dht: shoal.DHT) -> None:
    """A batch that a loop computes after the last average, while it waits for the others, moved them on this peer."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with begin(dht, model, STREAMING, extra_tensors=[*model.buffers()]) as swarm:
        swarm.announce_end(1)
        while not swarm.finished:
            train(swarm, model, 1)
        before = [buffer.clone() for buffer in model.buffers()]
        train(swarm, model, 2)
        assert all(map(torch.equal, model.buffers(), before))
