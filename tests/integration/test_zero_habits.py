"""`shoal.zero` under habits of programs and odd models; what raised, hung or was wrong in silence before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration import zero_habits as habits
from tests.integration.ranks import Ranks, ranks
from tests.odd_torch import ODD


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks(probe_anew=True) as made:
        yield made


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_clipping_under_another_default_dtype(pool: Ranks, default: torch.dtype) -> None:
    """A rank without gradients told its part of the norm in the default dtype: the process was aborted."""
    assert pool.play(2, habits.clipped_by_a_rank_without_gradients, default) == [(5.0, "torch.float32")] * 2


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_weights_have_the_same_bits_whatever_torch_does_by_default(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """Default dtype and device, autocast, modes, threads: around sharding, steps, checkpoints and gathering."""
    for found in pool.play(
        2, habits.trained_within, [odd for odd in ODD if odd != "inference_mode"], stage, str(tmp_path)
    ):
        assert len(found) == len(ODD)
        assert set(found.values()) == {found[""]}, [odd for odd in found if found[odd] != found[""]]


@pytest.mark.parametrize("stage", [2, 3])
def test_norms_of_64_bits_are_not_rounded(pool: Ranks, stage: int) -> None:
    """The norm of a model in float64 was rounded to float32, and so were its clipped gradients."""
    assert max(pool.play(2, habits.clipped_in_64_bits, stage)) < 1e-14


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_clip_otherwise(pool: Ranks, stage: int) -> None:
    """Others waited, or the process was aborted; with other limits each rank scaled its share in its own way."""
    of_arguments = ("must be a number above 0",) * 4
    unlike = ("norm_type=2.0", "norm_type=inf", "to step", "gradients of 0 passes")
    for found in pool.play(2, habits.clipped_unlike, stage):
        assert all(words.startswith("ConfigError") for words in found.values()), found
        for wanted, words in zip((*of_arguments, *unlike), found.values(), strict=True):
            assert wanted in words, found


@pytest.mark.parametrize("everywhere", [True, False])
def test_wrong_arguments(pool: Ranks, tmp_path: Path, everywhere: bool) -> None:
    """They raised errors of Python's, were taken for True, or let other ranks wait."""
    named = {"full_state_dict": "model"} | dict.fromkeys(
        ("load_state_dict", "less of it", "another share"), "state_dict"
    )
    for found in pool.play(2, habits.wrong_arguments, str(tmp_path), everywhere):
        for name, words in found.items():
            assert words.startswith("ConfigError"), (name, words)
            assert named.get(name, name) in words, (name, words)


@pytest.mark.parametrize("stage", [1, 3])
def test_no_sync_within_no_sync(pool: Ranks, stage: int) -> None:
    """In stage 3 the end of the inner block ended the outer one: later passes in it were sent."""
    assert pool.play(2, habits.reduced_within_nested_blocks, stage) == [0, 0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["the optimizer clears", "the model clears"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_pass_that_broke_off_is_left_behind(pool: Ranks, stage: int, how: str) -> None:
    """A bad batch is skipped on all ranks: in stage 3 no later step was possible, for a reason that was not true."""
    assert pool.play(2, habits.broken_off, stage, how) == [(0.0, "")] * 2


def test_gradients_of_a_pass_that_broke_off_are_not_stepped(pool: Ranks) -> None:
    """In stage 3 a part of them is lost: the rest must be cleared first."""
    for apart, words in pool.play(2, habits.broken_off, 3, "nobody clears"):
        assert "broke off" in words
        assert "optimizer.zero_grad()" in words
        assert apart == 0.0


def test_a_layer_that_returns_an_object_of_its_own(pool: Ranks) -> None:
    """Stage 3 read freed memory in the backward pass, which torch refused with words about storages."""
    assert pool.play(2, habits.of_a_class_of_its_own, 2) == ["", ""]
    for words in pool.play(2, habits.of_a_class_of_its_own, 3):
        assert "Opaque returns an object of the class SimpleNamespace" in words
        assert "dataclasses" in words


@pytest.mark.parametrize("stage", [1, 3])
def test_a_buffer_that_is_a_conjugate_view(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """It raised in `shard`."""
    assert pool.play(2, habits.with_views_of_conjugates, stage, str(tmp_path / "saved")) == [True, True]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("what", ["max_norm", "share memory", "lazy", "DistributedDataParallel"])
def test_models_that_would_be_trained_wrongly_are_refused(pool: Ranks, what: str, stage: int) -> None:
    """A buffer kept old values, embeddings had other rows on each rank; others raised errors of torch's."""
    for words in pool.play(2, habits.refused, what, stage):
        assert words.startswith("ConfigError")
        assert what in words
