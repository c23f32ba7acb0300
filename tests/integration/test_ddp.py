"""A group of processes as one peer: `GroupOptimizer`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.integration import ddp_cases as cases
from tests.integration.ranks import Failed, Ranks, ranks


@pytest.fixture(scope="module")
def processes() -> Iterator[Ranks]:
    """Processes that form groups."""
    with ranks() as made:
        yield made


def test_a_group_and_a_peer_equal_one_process(processes: Ranks) -> None:
    """Two ranks and another peer train as one process does on all of their samples; all hold the same bits."""
    outcomes = processes.play(3, cases.train_with_another_peer)
    model, inner, schedule = cases.make()
    rates = []
    for epoch in range(cases.EPOCHS):
        torch.autograd.backward([cases.loss_of(model, torch.cat([cases.batch(epoch, rank) for rank in range(3)]))])
        inner.step()
        inner.zero_grad()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    for each in outcomes:
        assert each[0] == rates
        assert each[1] == outcomes[0][1]
        for mine, theirs in zip(each[2], model.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), theirs.detach(), rtol=0, atol=1e-12)


def test_a_group_that_is_asked_for_statistics_takes_no_step(processes: Ranks) -> None:
    """`get_optimizer_state_dict` was a step of the swarm with zero gradients."""
    expected = [0, ["bias", "weight"], ["exp_avg", "exp_avg_sq", "step"], {}, [1.0, 1.0]]
    assert processes.play(2, cases.statistics_alone) == [expected, expected]


REFUSED = {
    "dht on rank 1": ("ConfigError", "dht must be None on all ranks but rank 0"),
    "no dht": ("ConfigError", "dht is missing on rank 0"),
    "local updates": ("ConfigError", "LocalUpdates does not work in a group"),
    "auxiliary": ("ConfigError", "auxiliary=True does not work in a group"),
    "batch size of rank 1": ("ConfigError", "batch_size_per_step must be"),
    "rank 0's argument": ("ConfigError", "averaging_timeout must be"),
    "other model": ("ConfigError", "all ranks must give the same model and optimizer"),
    "unknown": ("ConfigError", "warm_up"),
    "batch size missing": ("ConfigError", "batch_size is missing"),
    "gradients": ("ConfigError", "give each rank's model to DistributedDataParallel"),
    "gradients beside an empty parameter": ("ConfigError", "the ranks of the group have different gradients"),
    "calls": ("LocalError", r"different things (rank 0 step(), rank 1 load_state_from_peers())"),
    "closed": ("ClosedError", "shut down"),
    "a state": ("StateUnavailable", "the state does not fit here: it is too square"),
    "group of parameters": ("ConfigError", "parameters cannot be added"),
    "copy": ("LocalError", "cannot be copied"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_is_raised_on_all_ranks(processes: Ranks, case: str) -> None:
    """Whichever rank is at fault: each rank raises an error that says why, and none waits."""
    kind, text = REFUSED[case]
    outcomes = processes.outcomes(2, cases.wrong, case)
    for outcome in outcomes:
        assert isinstance(outcome, Failed), outcome
        assert text in outcome.message
    assert kind in {outcome.kind for outcome in outcomes}


@pytest.mark.parametrize(("changed", "name"), [(0, "0"), (1, "weight")])
def test_a_weight_that_one_rank_changes_is_named(processes: Ranks, changed: int, name: str) -> None:
    """Its gradients went into the mean of the group, and rank 0's change was trained on, in silence."""
    found = processes.play(2, partial(cases.change_on_one_rank, with_model=name != "0"), changed)
    assert found[0] == found[1]
    assert found[0][0].startswith(f"parameter {name} of the optimizer has other values on rank 1 than on rank 0"), found
    assert found[0][1] == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_group(processes: Ranks, lost: int) -> None:
    """A rank is killed: the next call on the other one names it."""
    said = processes.outcomes(2, cases.lose_a_rank, lost, killed=lost)
    assert f"rank {lost} gone" in str(said[1 - lost])


def test_an_interrupt_of_rank_0_is_told(processes: Ranks) -> None:
    """Ctrl+C on rank 0 within a step: the others raise, and all can go on."""
    here, there = processes.play(2, cases.interrupt_rank_0)
    assert here[0] == "KeyboardInterrupt: "
    assert there[0] == "LocalError: rank 0 of the group cannot go on: KeyboardInterrupt: "
    assert here[1:] == there[1:]
    assert here[1] == 2


def test_an_interrupt_that_leaves_ranks_apart_is_said(processes: Ranks) -> None:
    """A rank that was interrupted while it waited may be at another call than the others: it does not go on."""
    _, said = processes.play(2, cases.interrupt_rank_1)
    assert "step() of the GroupOptimizer was interrupted on this rank" in said


def test_checkpoints_of_a_group(processes: Ranks, tmp_path: Path) -> None:
    """A group goes on from what it has saved, in each way, and all ranks hold those bits."""
    here, there = processes.play(2, cases.save_and_resume, str(tmp_path))
    assert [each[:3] for each in here] == [[way, 2, True] for way in ("resume", "checkpoint", "load_state_dict")]
    assert here == there
    assert len({each[3] for each in here}) == 1


def test_a_group_trains_to_the_end(processes: Ranks) -> None:
    """Scaler, schedule over the group, clipping and the end of the run are the same on all ranks."""
    here, there = processes.play(2, cases.to_the_end)
    assert here == there
    assert here[1:3] == [3, [1e-2 / 4]]
    assert 6 <= here[0] <= 8


def test_a_group_counts_its_batches(processes: Ranks) -> None:
    """Without a number, with the model: each rank's rows are counted, and nothing if there was no batch."""
    assert processes.play(2, cases.count_the_batches) == [[8, 12, 12], [None, None, None]]


def test_a_group_with_an_empty_parameter_group_trains(processes: Ranks) -> None:
    """Rank 1 raised "list index out of range", and rank 0 waited until the group's timeout."""
    here, there = processes.play(2, cases.train_with_an_empty_group)
    assert here == there
    assert here[0] == 3


def test_a_group_joins_late(processes: Ranks) -> None:
    """All ranks of a group that joins hold what the run's peer holds: parameters, statistics, schedule."""
    outcomes = processes.play(3, cases.join_late)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][:2] == [3, 3]
