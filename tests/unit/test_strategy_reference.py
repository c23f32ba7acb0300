"""The one-process reference of the strategies of low communication: against loops of its papers, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.strategies import __main__ as command
from benchmarks.strategies.cases import SYNCHRONOUS, groups
from benchmarks.strategies.reference import DILOCO, LOCAL_SGD, Feedback, Peer, Strategy, Swarm, split
from benchmarks.strategies.study import Case, bytes_per_token, train
from benchmarks.strategies.task import Task

FIRST = [1.0, -2.0, 0.5, 3.0]


def walker(*shifts: float, samples: int = 1) -> Peer:
    """A peer whose tensors, each of one value, begin at 0 and move by these shifts in each step."""
    parameters = [torch.zeros(1, dtype=torch.float64) for _ in shifts]

    def learn() -> int:
        for tensor, shift in zip(parameters, shifts, strict=True):
            tensor.grad = torch.full_like(tensor, -shift)
        return samples

    return Peer(parameters, torch.optim.SGD(parameters, lr=1.0), learn)


def learner(seed: int, inner: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Peer:
    """A peer that fits two tensors to noisy samples of its own."""
    parameters = [torch.tensor(FIRST[:3], dtype=torch.float64), torch.tensor(FIRST[3:], dtype=torch.float64)]
    draw = torch.Generator().manual_seed(seed)

    def learn() -> int:
        for tensor, gradient in zip(parameters, gradients(parameters, draw), strict=True):
            tensor.grad = gradient
        return 8

    return Peer(parameters, inner(parameters), learn)


def gradients(parameters: Sequence[Tensor], draw: torch.Generator) -> list[Tensor]:
    """Of a squared error on eight samples."""
    inputs = torch.randn((8, 3), generator=draw, dtype=torch.float64)
    error = inputs @ (parameters[0] - 1.0) + parameters[1] * inputs.square().sum(1)
    return [(error[:, None] * inputs).mean(0), (error * inputs.square().sum(1)).mean().view(1)]


def run(peers: list[Peer], steps: int, **settings: Any) -> Swarm:
    """The swarm after so many steps of each peer."""
    swarm = Swarm(peers, Strategy(**settings))
    for _ in range(steps):
        swarm.step()
    return swarm


def values(tensors: Sequence[Tensor]) -> list[float]:
    """Of all tensors, one after another."""
    return torch.cat(list(tensors)).tolist()


sgd = partial(torch.optim.SGD, lr=0.02)
adamw = partial(torch.optim.AdamW, lr=0.02)


def test_merges_after_every_step_are_synchronous_training() -> None:
    """With SGD inside and outside, of which the outer one takes the mean as it is."""
    swarm = run([learner(seed, sgd) for seed in range(4)], 10, every=1, outer=LOCAL_SGD)
    parameters = [torch.tensor(FIRST[:3], dtype=torch.float64), torch.tensor(FIRST[3:], dtype=torch.float64)]
    draws = [torch.Generator().manual_seed(seed) for seed in range(4)]
    for _ in range(10):
        found = [gradients(parameters, draw) for draw in draws]
        for place, tensor in enumerate(parameters):
            tensor -= 0.02 * sum(each[place] for each in found) / 4
    assert values(swarm.fragments[0].anchor) == pytest.approx(values(parameters), rel=1e-12)


def test_one_peer_that_merges_with_nobody_trains_as_without() -> None:
    """An outer step of rate 1 takes a peer's own parameters back."""
    swarm = run([learner(1, adamw)], 12, every=3, outer=LOCAL_SGD)
    alone = learner(1, adamw)
    for _ in range(12):
        alone.step()
    assert values(swarm.mean()) == pytest.approx(values(alone.parameters), rel=1e-12)


@pytest.mark.parametrize("settings", [{}, {"fragments": 1, "overlap": 0, "mixing": 0.5}])
def test_diloco_is_algorithm_1_of_its_paper(settings: dict[str, Any]) -> None:
    """So is streaming with one fragment and no overlap."""
    swarm = run([learner(seed, adamw) for seed in range(3)], 12, every=4, **settings)
    anchor = [torch.tensor(FIRST[:3], dtype=torch.float64), torch.tensor(FIRST[3:], dtype=torch.float64)]
    outer, peers = DILOCO(anchor), [learner(seed, adamw) for seed in range(3)]
    for _ in range(3):
        for peer in peers:
            for tensor, value in zip(peer.parameters, anchor, strict=True):
                tensor.copy_(value)
            for _ in range(4):
                peer.step()
        for place, tensor in enumerate(anchor):
            tensor.grad = sum((tensor - peer.parameters[place] for peer in peers), torch.zeros_like(tensor)) / 3
        outer.step()
    assert values(swarm.fragments[0].anchor) == pytest.approx(values(anchor), rel=1e-12)
    assert all(values(peer.parameters) == values(swarm.fragments[0].anchor) for peer in swarm.peers)


def test_samples_are_the_weights() -> None:
    """A peer that has trained three times as many counts three times."""
    swarm = run([walker(1.0, samples=1), walker(5.0, samples=3)], 2, every=2, outer=LOCAL_SGD)
    assert values(swarm.mean()) == [8.0]


def test_a_slower_peer_gives_the_steps_that_it_has() -> None:
    """A merge is due when the peers have done `every` steps on average."""
    swarm = Swarm([walker(1.0), walker(1.0)], Strategy(every=3, outer=LOCAL_SGD))
    for step in range(4):
        swarm.step([0, 1] if step % 2 else [0])
    assert swarm.fragments[0].version == 1
    assert values(swarm.mean()) == [pytest.approx((4 * 4 + 2 * 2) / 6)]


def test_fragments_take_turns() -> None:
    """Each is merged every H steps, H / P after the one before."""
    swarm = Swarm([walker(1.0, 1.0, 1.0, 1.0), walker(3.0, 3.0, 3.0, 3.0)], Strategy(every=8, fragments=4))
    versions = []
    for _ in range(16):
        swarm.step()
        versions.append([fragment.version for fragment in swarm.fragments])
    assert versions[1] == [1, 0, 0, 0]
    assert versions[6] == [1, 1, 1, 0]
    assert versions[7] == [1, 1, 1, 1]
    assert versions[9] == [2, 1, 1, 1]
    assert versions[15] == [2, 2, 2, 2]


@pytest.mark.parametrize(("mixing", "found"), [(None, [8 + 1.0, 8 + 3.0]), (0.5, [6.5, 11.5]), (0.0, [8.0, 8.0])])
def test_an_overlap_keeps_mixes_or_overwrites(mixing: float | None, found: list[float]) -> None:
    """The peers give after 4 steps and take after one more."""
    swarm = run([walker(1.0), walker(3.0)], 5, every=4, outer=LOCAL_SGD, overlap=1, mixing=mixing)
    assert [values(peer.parameters)[0] for peer in swarm.peers] == found


def test_a_late_peer_keeps_its_progress_and_gives_it_later() -> None:
    """A quorum of one merges without the slower peer, which moves with the anchor."""
    swarm = Swarm([walker(1.0), walker(10.0)], Strategy(every=2, outer=LOCAL_SGD, quorum=1))
    swarm.step()
    swarm.step([0])
    assert values(swarm.fragments[0].anchor) == [2.0]
    assert values(swarm.peers[1].parameters) == [12.0]
    swarm.step([0, 1])
    assert values(swarm.fragments[0].anchor) == [22.0]
    assert values(swarm.peers[0].parameters) == [23.0]


def test_a_peer_that_missed_too_many_merges_drops_its_progress() -> None:
    """One within its patience keeps it."""
    for patience, found in ((1, 4.0), (2, 4.0 + 40.0)):
        swarm = Swarm([walker(1.0), walker(10.0)], Strategy(every=2, outer=LOCAL_SGD, patience=patience))
        for _ in range(4):
            swarm.step(present=[0])
        assert swarm.fragments[0].version == 2
        swarm.step([])
        assert values(swarm.peers[1].parameters) == [found]


def test_what_a_codec_loses_is_sent_later() -> None:
    """All that arrived, and what is still lost, are all that was sent."""
    feedback, draw = Feedback("topk:0.1"), torch.Generator().manual_seed(1)
    sent = [[torch.randn(20, generator=draw), torch.randn((5, 4), generator=draw)] for _ in range(4)]
    arrived = [feedback.send(each) for each in sent]
    assert all(torch.count_nonzero(torch.cat([tensor.flatten() for tensor in each])) == 4 for each in arrived)
    assert feedback.lost is not None
    for place, lost in enumerate(feedback.lost):
        total = sum((each[place] for each in arrived), lost)
        torch.testing.assert_close(total, sum((each[place] for each in sent), torch.zeros(())))


def test_tensors_are_split_by_their_sizes() -> None:
    """Each is in one run, and the runs are about as large."""
    assert split([4, 4, 1, 1, 1, 1, 4], 4) == [[0], [1], [2, 3, 4, 5], [6]]
    assert split([5, 5], 1) == [[0, 1]]


def test_each_case_of_the_study_stands_beside_one_of_its_group() -> None:
    """Names are given once, and a case is judged by one that is there."""
    for cases in groups(["none", "topk:0.03:2"]).values():
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        assert {case.against for case in cases} - {None} <= set(names)


def test_each_half_of_an_all_reduce_counts_by_its_own_codec() -> None:
    """An average that is sent whole takes half the bytes of synchronous training, whatever the outer gradients take."""
    sent = {}
    for average in ("none", "topk:0.01:2"):
        strategy = Strategy(every=1, codec="topk:0.01:2", average_codec=average)
        case = Case(name="sparse", strategy=strategy, rate=0.1)
        sent[average] = bytes_per_token(case, Task(seed=1)) / bytes_per_token(SYNCHRONOUS, Task(seed=1))
    assert sent["none"] == pytest.approx(0.5, abs=0.01)
    assert sent["topk:0.01:2"] == pytest.approx(2 * (sent["none"] - 0.5))


def test_shoal_trains_a_case_as_the_reference_does() -> None:
    """To rounding, for peers in lockstep: the study's table is of shoal's own code on every step."""
    task = Task(seed=1, steps=12, rows=2, begun=0, rate=8e-3)
    case = Case(name="DiLoCo", strategy=Strategy(every=4), rate=8e-3)
    assert train(replace(case, by_shoal=True), task) == pytest.approx(train(case, task), rel=1e-6)


def test_the_command_prints_a_line_for_each_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first seed on that is asked for; nothing is trained here."""
    seeds = set()

    def train(case: Case, task: Task) -> float:
        seeds.add(task.seed)
        return 1.0

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr("sys.argv", ["strategies", "--only", "quality", "--seeds", "2", "--first-seed", "7"])
    command.main()
    printed = capsys.readouterr().out
    assert seeds == {7, 8}
    assert all(f"| {case.name} |" in printed for case in groups(command.CODECS)["quality"])
