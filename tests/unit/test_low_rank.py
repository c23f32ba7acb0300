"""Gradients as factors of low rank: what they keep, what they lose, and that nothing is lost for good."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.strategies.low_rank import LowRank
from shoal.strategies.low_rank_training import LowRankTrainingState


def low_rank(*shapes: tuple[int, ...], rank: int = 2, ratio: float = 0.0) -> LowRank:
    """For parameters of these shapes."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    return LowRank(parameters, rank=rank, min_compression_ratio=ratio)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def take(low: LowRank, *sums: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """One round of one member: what it makes of its own factors."""
    low.shrink(sums)
    made = [each.clone() for each in sums]
    low.expand(made, seed)
    low.counted()
    low.advance()
    return made


@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (4, 2, 3), (20, 1, 3)])
def test_what_is_lost_comes_later(shape: tuple[int, ...]) -> None:
    """Over all steps the averages, and what is kept back at the end, are all the gradients."""
    low, total, made = low_rank(shape), torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for seed in range(10):
        gradient = drawn(*shape, seed=seed)
        total += gradient
        made += take(low, gradient)[0]
    (matrix,) = low._matrices
    assert matrix.residual is not None
    assert matrix.residual.abs().max() > 0.1
    torch.testing.assert_close(made + matrix.residual.view(shape), total)


def test_a_gradient_of_low_rank_is_sent_whole_from_the_second_step_on() -> None:
    """The bases are then those of its rows and columns."""
    low = low_rank((9, 7))
    gradient = drawn(9, 2) @ drawn(2, 7, seed=1)
    take(low, gradient)
    low.forget()
    torch.testing.assert_close(take(low, gradient)[0], gradient)


def test_a_step_of_a_projection_is_never_larger_than_its_gradient() -> None:
    """Nor is what it keeps back."""
    low, gradient = low_rank((9, 7)), drawn(9, 7)
    (made,) = take(low, gradient)
    kept = low._matrices[0].residual
    assert kept is not None
    squares = made.square().sum() + kept.square().sum()
    torch.testing.assert_close(squares, gradient.square().sum())


def test_the_average_of_factors_is_the_factors_of_the_average() -> None:
    """So members whose gradients differ make of the averaged factors what one member makes of the mean."""
    one, members = low_rank((8, 6)), [low_rank((8, 6)) for _ in range(3)]
    for step in range(4):
        gradients = [drawn(8, 6, seed=10 * step + each) for each in range(3)]
        (expected,) = take(one, torch.stack(gradients).mean(0), seed=step)
        for member, gradient in zip(members, gradients, strict=True):
            member.shrink([gradient])
        for factors in zip(*(member.tensors([torch.zeros(0)]) for member in members), strict=True):
            mean = torch.stack(factors).mean(0)
            for each in factors:
                each.copy_(mean)
        for member in members:
            made = torch.zeros(8, 6, dtype=torch.float64)
            member.expand([made], step)
            member.counted()
            member.advance()
            torch.testing.assert_close(made, expected)


def test_a_failed_round_changes_nothing() -> None:
    """The factors are made again, of more gradients; what is kept back changes with a commit only."""
    low, other = low_rank((8, 6)), low_rank((8, 6))
    take(low, drawn(8, 6))
    take(other, drawn(8, 6))
    low.shrink([drawn(8, 6, seed=1)])  # fails
    low.shrink([drawn(8, 6, seed=3)])  # fails, too
    assert torch.equal(take(low, drawn(8, 6, seed=2))[0], take(other, drawn(8, 6, seed=2))[0])
    for ours, theirs in zip(low.bases, other.bases, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("true_rank", [0, 1, 3])
def test_bases_are_orthonormal_whatever_the_gradients_are(rank: int, true_rank: int) -> None:
    """Columns without a direction of their own are drawn: zeros, or fewer directions than the rank."""
    low = low_rank((8, 6), rank=rank, ratio=-9.0)
    gradient = drawn(8, true_rank) @ drawn(true_rank, 6, seed=1)
    for step in range(3):
        take(low, gradient, seed=step)
        for base in low.bases:
            torch.testing.assert_close(base.T @ base, torch.eye(rank, dtype=torch.float64))
    other = low_rank((8, 6), rank=rank, ratio=-9.0)
    for step in range(3):
        take(other, gradient, seed=step)
    assert all(map(torch.equal, low.bases, other.bases))


def test_the_bits_of_the_bases_are_those_of_any_machine() -> None:
    """They were computed with and without vector units (`ATEN_CPU_CAPABILITY=default`), by torch 2.13."""
    low = LowRank([torch.nn.Parameter(torch.zeros(300, 200))], rank=4, min_compression_ratio=0.5)
    matrix = low._matrices[0]
    for each in (matrix.p, matrix.q):
        each.copy_(torch.arange(each.numel()).mul(7919).remainder(1009).sub(500).view(each.shape) / 64)
    low.expand([torch.zeros(300, 200)], 3)
    bits = [int(each.view(torch.int32).to(torch.int64).sum()) for each in matrix.next]
    assert bits == BITS


BITS = [-89921233313, -53575821967]


def test_only_what_is_worth_it_is_sent_as_factors() -> None:
    """Vectors, and matrices that save too little, are sent whole; the factors take fewer numbers."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((100, 50), (7,), (4, 4), (16, 3, 5, 5), ())]
    low = LowRank(parameters, rank=2, min_compression_ratio=0.5)
    sums = [torch.zeros(each.shape) for each in parameters]
    assert [tuple(each.shape) for each in low.tensors(sums)] == [(100, 2), (50, 2), (48, 2), (25, 2), (7,), (4, 4), ()]
    assert low.owners == [0, 0, 3, 3, 1, 2, 4]
    assert low.tensors(sums)[5] is sums[2]
    with pytest.raises(ConfigError, match="rank 40 saves too little on every parameter"):
        LowRank(parameters, rank=40, min_compression_ratio=0.5)


def test_the_state_of_a_peer_holds_the_bases_and_no_residual() -> None:
    """A newcomer takes them over; of gradients of another state nothing is left."""

    def made() -> tuple[LowRankTrainingState, list[torch.nn.Parameter]]:
        parameters = [torch.nn.Parameter(drawn(8, 6)), torch.nn.Parameter(drawn(5))]
        inner = torch.optim.AdamW(parameters, lr=0.1)
        return LowRankTrainingState(inner, unit=4, rank=1), parameters

    def step(training: LowRankTrainingState, parameters: list[Any], seed: int) -> None:
        for parameter in parameters:
            parameter.grad = drawn(*parameter.shape, seed=seed)
        assert training.accumulate(4)
        training.use_own_mean()
        training.counted()
        training.step()

    (old, parameters), (new, others) = made(), made()
    for seed in range(3):
        step(old, parameters, seed)
    assert math.prod(old.averaged[0].shape) == 8
    new.load(*copy.deepcopy(old.export()))
    assert new.fingerprint() == old.fingerprint()
    old.discard()
    for training, trained in ((old, parameters), (new, others)):
        step(training, trained, 7)
    assert new.fingerprint() == old.fingerprint()
    assert [tuple(each.shape) for each in old.state_tensors] == [(8, 6), (5,)]
