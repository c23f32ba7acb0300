"""`shoal.zero` behind an exception in the middle of a step, on all ranks or on one; ranks that call unlike things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import zero_broken as broken
from tests.integration.ranks import Failed, Ranks, ranks

_BOTH, _ONE = (0, 1), (1,)


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_that_is_freed_while_messages_are_under_way(pool: Ranks, stage: int) -> None:
    """In stages 1 and 2 the next `shard` waited until the group's time was up."""
    assert pool.play(2, broken.freed, stage) == ["", ""]


@pytest.mark.parametrize("stage", [1, 2])
def test_shard_hung_after_a_converted_model_that_was_let_go(pool: Ranks, stage: int) -> None:
    """Its pass had sent what nobody waited for any more; the memory of these messages was freed with the model."""
    assert pool.play(2, broken.converted, stage) == ["", ""]


def _cases(where: tuple[str, ...], default: tuple[tuple[str, int, str], ...]) -> list[object]:
    """All combinations; two for each place, in other stages and with other ends, are in the sample of every commit."""
    return [
        pytest.param(*case, marks=() if case in default else pytest.mark.long(full=(place + number) % 3 > 0))
        for place, each in enumerate(where)
        for number, case in enumerate((each, stage, then) for stage in (1, 2, 3) for then in broken.THEN)
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("where", "stage", "then"), _cases(broken.WHERE, (("interrupt", 2, "a new model"),)))
def test_an_exception_on_all_ranks(
    pool: Ranks, tmp_path: Path, where: str, stage: int, then: str, offload: bool
) -> None:
    """Training goes on as if nothing had been, with the same model or with a new one."""
    folder = str(tmp_path) if offload else None
    for words, behind, apart in pool.play(2, broken.broken, where, _BOTH, then, stage, folder):
        assert words.startswith(("ArithmeticError", "KeyboardInterrupt", "GeneratorExit"))
        assert behind == ""
        assert apart <= 1e-6


@pytest.mark.one_in(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("where", "stage", "then"),
    [
        case
        for case in _cases(broken.WITHIN, (("backward", 1, "a new model"), ("a hook", 2, "a retry")))
        if case.values[1] < 3  # type: ignore[attr-defined]
    ],
)
def test_a_backward_pass_that_breaks_off_on_one_rank(
    pool: Ranks, tmp_path: Path, where: str, stage: int, then: str, offload: bool
) -> None:
    """The others stepped with a part of the gradients, or waited until the group's time was up."""
    folder = str(tmp_path) if offload else None
    first, second = pool.play(2, broken.broken, where, _ONE, then, stage, folder)
    assert first[0].startswith("LocalError: the backward pass broke off on rank 1")
    assert "optimizer.zero_grad()" in first[0]
    assert second[0].startswith(("ArithmeticError: a bad batch", "KeyboardInterrupt"))
    for _, behind, apart in (first, second):
        assert behind == ""
        assert apart <= 1e-6


@pytest.mark.parametrize(
    ("where", "stage"),
    [
        pytest.param(
            where, stage, marks=() if (where, stage) in (("forward", 1), ("backward", 3)) else pytest.mark.long
        )
        for where in (*broken.BEFORE, *broken.WITHIN)
        for stage in (1, 2, 3)
        if stage == 3 or where in broken.BEFORE
    ],
)
def test_an_exception_on_one_rank_that_leaves_the_others_waiting(pool: Ranks, where: str, stage: int) -> None:
    """All are told where each of them is, long before the group's time is up."""
    for found in pool.outcomes(2, broken.broken, where, _ONE, "a new model", stage):
        words = str(found) if isinstance(found, Failed) else f"{found[0]} {found[1]}"
        assert "RankLost: ranks called different things, and waited for each other: rank 0 is in operation" in words
        assert words.count("called in zero_") == 2
        assert "shoal.zero.shard(" in words


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_raises_on_one_rank(pool: Ranks, stage: int) -> None:
    """All raise, and all have the same weights."""
    first, second = pool.play(2, broken.broken, "optimizer", _ONE, "a retry", stage)
    assert "ArithmeticError: in a step" in first[0]
    assert first[1] == second[1] == ""
    assert first[2] == second[2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("how", ["apart", "signal"])
def test_ctrl_c_within_a_step_leaves_all_ranks_with_the_same_weights(
    pool: Ranks, tmp_path: Path, how: str, stage: int
) -> None:
    """In stages 1 and 2 each rank had the new weights of its own part alone, and went on without a word."""
    first, second = pool.play(2, broken.interrupted, how, stage, str(tmp_path))
    for found in (first, second):
        assert found["step"] == "KeyboardInterrupt"
        assert found["digest"] == first["digest"]
        assert [found[each] for each in ("weights", "a part", "save", "next step", "load")] == [""] * 5
        assert found["apart"] <= 1e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_in_the_middle_of_a_step_are_refused_until_a_load(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """An interrupt while ranks exchange new weights: step, save and full_state_dict took them for whole ones."""
    for found in pool.play(2, broken.interrupted, "between", stage, str(tmp_path)):
        assert found["step"] == "KeyboardInterrupt"
        for each in ("weights", "a part", "save", "next step"):
            assert found[each].startswith("LocalError: the weights were changed"), (each, found[each])
            assert "shoal.zero.load" in found[each]
        assert found["load"] == ""
        assert found["apart"] <= 1e-6


@pytest.mark.parametrize(
    ("calls", "stage"),
    [
        pytest.param(calls, stage, marks=() if (calls, stage) == (("save", "step"), 2) else pytest.mark.long)
        for calls in (("save", "step"), ("step", "shard"), ("clip", "save"), ("shard", "save"), ("step", "weights"))
        for stage in (1, 2, 3)
        if stage == 3 or "weights" not in calls
    ],
)
def test_ranks_that_call_different_things(pool: Ranks, tmp_path: Path, calls: tuple[str, str], stage: int) -> None:
    """They waited until the group's time was up, and were told numbers of operations."""
    for found in pool.outcomes(2, broken.called, calls, stage, str(tmp_path)):
        assert isinstance(found, Failed)
        if found.kind == "RankLost":
            assert "ranks called different things" in found.message
            assert found.message.count("called in zero_") == 2
            assert "All ranks must call the same things in the same order" in found.message
        else:  # where they meet, they see it themselves
            assert "rank" in found.message
