"""Activation checkpoints, offload and partitioning under each stage: the same bits, and the bytes of the law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.zero
from shoal.errors import ConfigError
from tests.integration import zero_activations as cases
from tests.integration.ranks import Failed, Ranks, ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("which", [pytest.param("gpt2", marks=pytest.mark.long), "encoder"])  # imports transformers
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_checkpoints_and_offload_change_no_bit(pool: Ranks, tmp_path: Path, stage: int, which: str) -> None:
    """Each way of torch's to keep fewer activations, with dropout; nothing is left in the folder of the files."""
    if which == "gpt2":
        pytest.importorskip("transformers")
    for found in pool.play(2, cases.apart, stage, which, str(tmp_path)):
        assert found.pop("moved") > 0.01
        assert found == dict.fromkeys(cases.WAYS, 0.0)
    assert not list(tmp_path.iterdir())


STATES = 4 * cases.TOKENS * cases.STATES * 4
"""Bytes of the hidden states between two layers."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "how", ["plain", "checkpoints", "checkpoints, on the CPU", "within checkpoints", "within reentrant checkpoints"]
)
@pytest.mark.parametrize("across", [2, 3])
def test_partitioned_activations_change_no_bit(pool: Ranks, across: int, how: str) -> None:
    """A rank keeps 1/N of what the law says: the input of each layer, and sends 1/N of it to each other rank."""
    shares = [cases.LAYERS * len(part) for part in torch.arange(STATES).chunk(across)]
    found = pool.play(across, cases.partitioned_apart, 0, across, how)
    for share, (apart, counts, sent) in zip(shares, found, strict=True):
        assert apart == 0.0
        assert counts == (cases.LAYERS, cases.LAYERS * STATES, share)
        assert sent == (across - 1) * share


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitioned_activations_within_each_stage(pool: Ranks, stage: int) -> None:
    """Two ranks of tensor parallelism, and two of a stage across it."""
    for apart, counts, _ in pool.play(4, cases.partitioned_apart, stage, 2, "checkpoints"):
        assert (apart, counts) == (0.0, (cases.LAYERS, cases.LAYERS * STATES, cases.LAYERS * STATES // 2))


def test_partitioned_activations_of_dtensors(pool: Ranks) -> None:
    """Layers that `parallelize_module` cuts save DTensors: the inputs of layers, and of the linear layers in them."""
    for apart, counts in pool.play(2, cases.by_dtensors_apart):
        assert apart == 0.0
        assert counts == (2 * cases.LAYERS, 2 * cases.LAYERS * STATES, cases.LAYERS * STATES)


def test_other_tensors_are_kept_as_they_are(pool: Ranks) -> None:
    """And memory that three layers have saved is partitioned once."""
    assert pool.play(2, cases.kept_whole) == [((0, 0, 0), True)] * 2


@pytest.mark.long
def test_compiled_layers(pool: Ranks) -> None:
    """The compiler took the hooks in, and printed errors that nobody could catch."""
    assert pool.play(2, cases.compiled) == [(0.0, 2, [])] * 2


@pytest.mark.parametrize(
    ("case", "kinds", "message"),
    [
        (cases.other_values, ["ConfigError"] * 3, "rank 1 gave something else than rank 0: 'tensor 1 of 9600 bytes"),
        (cases.another_layer, ["ConfigError"] * 3, "one has more than the other"),
        (cases.raises_on_one_rank, ["ConfigError", "ArithmeticError", "ConfigError"], "a bad batch"),
        (cases.another_order, ["LocalError"] * 3, "ranks are at different activations in the backward pass"),
        (cases.changed_in_place, ["LocalError"] * 3, "changed in place"),
        (cases.entered_twice, ["LocalError"] * 3, "entered already"),
    ],
)
def test_ranks_that_differ_all_raise(pool: Ranks, case: Callable[[], None], kinds: list[str], message: str) -> None:
    """Nobody waits for another, and the processes can be used again."""
    found = pool.outcomes(3, case)
    assert all(isinstance(each, Failed) and message in each.message for each in found), found
    assert [each.kind for each in found] == kinds


@pytest.mark.parametrize("kind", ["ArithmeticError", "KeyboardInterrupt"])
def test_a_forward_pass_that_one_rank_leaves(pool: Ranks, kind: str) -> None:
    """Ctrl+C on one rank left the others waiting; behind any error all refused the next pass."""
    (others, *nexts), here, last = ([*each] for each in pool.play(3, cases.left_by_one_rank, kind, False))
    assert others.startswith("ConfigError: another rank cannot go on: rank 1: "), others
    assert last == [others, ""]
    assert here == [f"{kind}: stop", ""]
    assert nexts == [""]


def test_a_forward_pass_that_one_rank_leaves_while_others_communicate(pool: Ranks) -> None:
    """They waited for the group's timeout; it is known within seconds that nobody comes."""
    for said, _ in pool.play(2, cases.left_by_one_rank, "ArithmeticError", True):
        assert said.startswith("RankLost: ranks called different things"), said
        assert "zero_activations.py" in said, said


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no modules", "modules must be a list of at least one torch.nn.Module, got []"),
        ("no module", "modules must be a list of at least one torch.nn.Module, got ['0']"),
        ("no parameters", "modules have no parameters"),
        ("offload", "'2 modules, offload True' instead of '2 modules, offload False'"),
        ("other ranks", "group must be a process group that this process belongs to"),
        ("no group", "group must be a process group that this process belongs to, got None"),
    ],
)
def test_bad_arguments_are_said_on_every_rank(pool: Ranks, what: str, message: str) -> None:
    """Whoever gave them."""
    for failed in pool.outcomes(2, cases.bad_arguments, what):
        assert isinstance(failed, Failed), failed
        assert failed.kind == "ConfigError"
        assert message in failed.message


def test_without_a_process_group() -> None:
    """Says what to do."""
    nothing: Any = None
    with pytest.raises(ConfigError, match="torchrun"):
        shoal.zero.partition_activations([torch.nn.Linear(2, 2)], nothing)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_is_what_ranks_hold(pool: Ranks, tmp_path: Path, stage: int, narrow: bool) -> None:
    """Without offload and with it, to a tile."""
    for folder in (None, str(tmp_path)):
        for count, found in pool.play(2, cases.held, stage, narrow, folder):
            (plan,) = (
                each
                for each in shoal.zero.plans(count, 2, stage=stage, precision="mixed" if narrow else "float32")
                if (each.offloaded > 0) == (folder is not None)
            )
            wanted = (plan.cost.parameters, plan.cost.gradients, plan.cost.state, plan.offloaded)
            assert found == pytest.approx(wanted, rel=0.02, abs=0.02 * count)
