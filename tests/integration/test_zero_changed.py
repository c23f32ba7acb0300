"""`shoal.zero` where a program changes weights between steps: it takes effect, or an error names the weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import zero_changed as changes
from tests.integration.ranks import Failed, Ranks, ranks

DEFAULT = ("data = values", "copy_", "xavier_uniform_", "load_state_dict", "data from a model")
VECTORS = ("parameters_to_vector", "a vector and noise", "data = another's * 0.5", "data = a mean")
OUT = ("randn out= data", "zeros out=", "qr out= two", "mean out= a bias", "foreach of rows")
PARTS = (
    "trunc_normal_",
    "a row of data of zeros",
    "rows",
    "a part that was kept",
    "drawn rows",
    "dropout",
    "index_put_",
)
DEFAULT_REFUSED = ("set_", "share_memory", "tied", "replaced", "assign=True", "to bfloat16", "a gradient")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


def _as_in_one_process(pool: Ranks, cases: list[str], stage: int, steps: int) -> None:
    for found in pool.play(2, changes.changed, cases, stage, steps):
        for how, (words, apart) in found.items():
            assert words == "", how
            assert apart <= 1e-6, how


def _named(pool: Ranks, cases: list[str], stage: int, steps: int) -> None:
    for found in pool.play(2, changes.changed, cases, stage, steps):
        for how, (words, _) in found.items():
            assert words.startswith(("ConfigError", "LocalError")), (how, words)
            assert any(each in words for each in (".weight", ".bias", "load_state_dict(assign=True)")), (how, words)
            assert any(each in words for each in ("before", "copy_()", "leave assign out", "Change the loss")), (
                how,
                words,
            )


def test_weights_that_a_program_changes_in_stage_3(pool: Ranks) -> None:
    """`weight.data = …` was lost in silence, `torch.nn.init` gave all ranks the same rows; others were raw errors."""
    _as_in_one_process(pool, [*DEFAULT], 3, 1)


def test_weights_that_a_program_gives_other_memory(pool: Ranks) -> None:
    """Stages 1 and 2 refused the next step, and a checkpoint that was saved before it had the old values."""
    _as_in_one_process(pool, ["data = values", *changes.MOVED], 2, 1)
    _named(pool, ["tied data", "tied", "replaced"], 2, 1)
    assert pool.play(2, changes.saved_before_a_step) == [0.25] * 2


def test_parts_of_weights_that_a_program_changes_in_stage_3(pool: Ranks) -> None:
    """`weight[0].zero_()` and ``weight[1:3] = values`` were lost in silence; `trunc_normal_` was an error."""
    _as_in_one_process(pool, [*PARTS], 3, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_a_module_computes_are_assigned(pool: Ranks, stage: int) -> None:
    """Of `weight_norm` and others: stages 1 and 2 refused the next step, and stage 3 had a raw error of torch."""
    for found in pool.play(2, changes.assigned, stage):
        assert max(found.values()) <= 1e-6, found


def test_changes_of_weights_that_stage_3_cannot_carry(pool: Ranks) -> None:
    """A replaced or tied parameter was not trained, in silence; `share_memory` ended the process."""
    _named(pool, [*DEFAULT_REFUSED], 3, 1)


def test_weights_that_are_made_from_vectors_and_from_others(pool: Ranks) -> None:
    """`vector_to_parameters` of `parameters_to_vector`, and values computed from a weight, were taken to tie it."""
    _as_in_one_process(pool, [*VECTORS], 3, 1)


def test_weights_that_are_given_as_out(pool: Ranks) -> None:
    """The second of two weights was not written to, rows in a list were not, and `torch.zeros` did not freeze it."""
    _as_in_one_process(pool, [*OUT], 3, 1)
    _named(pool, ["a mask", "out= of another shape"], 3, 1)


def test_a_parametrization_that_is_taken_away(pool: Ranks) -> None:
    """Torch's error said that a class has no attribute."""
    for stage, key in ((2, "layers.0.weight"), (3, "layers.0.parametrizations.weight.original")):
        for found in pool.play(2, changes.parametrized, stage):
            assert all(key in words and "before shard()" in words for words in found), found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_is_swapped_with_another_tensor(pool: Ranks, stage: int) -> None:
    """It was not trained, in silence; stage 3 said that tensors have different slots, and exchanged two of its own."""
    for found in pool.play(2, changes.swapped, stage):
        for words in found:
            assert "copy_()" in words, words
            assert any(each in words for each in ("head.weight", "layers.0.weight")), words


def test_a_sharded_optimizer_that_is_copied(pool: Ranks) -> None:
    """It had lost its ranks."""
    for words in pool.play(2, changes.copied):
        assert words.startswith("LocalError: a sharded optimizer is copied"), words


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sharded_model_in_distributed_data_parallel(pool: Ranks, stage: int) -> None:
    """Torch said that elements share memory, in a backward pass, or that an operator has no sharding strategy."""
    for words, *of_a_copy in pool.play(2, changes.wrapped, stage):
        assert words.startswith("ConfigError: a model of shoal.zero is given to DistributedDataParallel"), words
        assert of_a_copy in ([], [""])


def test_a_value_that_one_rank_changes_unseen(pool: Ranks) -> None:
    """It spared the values that were looked at, and was taken over or lost by whoever keeps this tile."""
    for clipped, stepped, saved, after in pool.play(2, changes.hidden):
        assert stepped.startswith("ConfigError: the program has changed layers.0.weight to other values on rank 1")
        assert (clipped, saved, after) == (stepped, stepped, "")


def test_parts_that_are_read(pool: Ranks) -> None:
    """A part is blank until it is read."""
    for found in pool.play(2, changes.read_parts):
        assert found == [True] * len(found)


@pytest.mark.parametrize("how", ["less its mean", "divided by its norm", "cumsum_"])
def test_a_change_for_which_a_rank_waits_for_others(pool: Ranks, how: str) -> None:
    """It depends on rows of others, which do something else: the error did not say for which weight it waits."""
    for found in pool.outcomes(2, changes.needs_others, how):
        assert isinstance(found, Failed), found
        assert found.kind == "RankLost", found
        assert "rank 0 is in operation" in found.message, found
        assert "to gather layers.0.weight of unit layers.0" in found.message, found
        assert "what reads or changes weights of stage 3" in found.message, found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_weights_that_ranks_change_apart(pool: Ranks, stage: int) -> None:
    """They were mixed in silence: each rank went on from its share of its own change."""
    for found in pool.play(2, changes.apart, [*changes.APART], stage):
        for how, (clipped, stepped, saved, after) in found.items():
            who, words = changes.APART[how][0], stepped
            assert clipped == words, how
            assert words.startswith("ConfigError: the program has changed"), (how, words)
            assert any(f"changed {each}" in words for each in ("layers.", "head.")), (how, words)
            assert ("to other values on rank 1" if who is None else f"on rank {who} alone") in words, (how, words)
            assert saved == words, (how, saved)
            assert after == "", (how, after)


def test_weights_that_one_rank_changes_and_puts_back(pool: Ranks) -> None:
    """As a rank does that evaluates others: in stages 1 and 2 it has changed nothing."""
    assert pool.play(2, changes.put_back, 2) == [""] * 2
    assert pool.play(2, changes.frozen_in_inference_mode) == [""] * 2


@pytest.mark.long
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_change_of_weights(pool: Ranks, stage: int, steps: int) -> None:
    """Before the first step, and between steps."""
    _as_in_one_process(pool, [*changes.RIGHT, *changes.MOVED], stage, steps)
    _named(pool, [*changes.REFUSED] if stage == 3 else ["tied data", "tied", "replaced"], stage, steps)
