"""`shoal.zero` in programs that ask for gradients, watch or clear them in ways of their own: right, or an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import zero_gradients as gradients
from tests.integration.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_pass_that_names_its_inputs(pool: Ranks, stage: int) -> None:
    """In stage 3 `backward(inputs=parameters)` trained nothing, in silence."""
    for found in pool.play(2, gradients.named, list(gradients.NAMED), stage):
        assert set(found) == set(gradients.NAMED)
        assert max(found.values()) <= 1e-6, found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_hook_of_several_parameters(pool: Ranks, stage: int) -> None:
    """In stage 3 torch's `register_multi_grad_hook` never ran, in silence."""
    used = [True] * 6 + [False] * 2  # the other head has no part in it
    assert pool.play(2, gradients.watched, stage) == [[used, used]] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_set_to_zeros(pool: Ranks, stage: int) -> None:
    """`zero_grad(set_to_none=False)` cleared them to None; a parameter was not stepped with zeros then."""
    for found in pool.play(2, gradients.cleared_to_zeros, stage):
        assert set(found) == set(gradients.CLEARS)
        assert max(found.values()) <= 1e-6, found


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_a_program_uses_behind_a_pass(pool: Ranks, stage: int) -> None:
    """They were NaN in silence, with which a program skipped each step; torch's clipping was a raw error."""
    for found in pool.play(2, gradients.used, stage):
        for how, words in found.items():
            assert words.startswith("LocalError: the gradient of "), (how, words)
            assert "optimizer.clip_grad_norm_()" in words, (how, words)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_that_is_called_before_the_model(pool: Ranks, stage: int) -> None:
    """In stage 3 the model then raised "FSDP state has already been lazily initialized"."""
    assert max(pool.play(2, gradients.a_unit_before_the_model, stage)) <= 1e-6


def test_what_stage_3_cannot_carry_is_named(pool: Ranks) -> None:
    """Forward-mode derivatives and copies of a model ended in raw errors of torch."""
    for found in pool.play(2, gradients.what_stage_3_cannot):
        for cure, words in found.items():
            assert words.startswith(("ConfigError", "LocalError")), (cure, words)
            assert cure in words, (cure, words)


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_of_an_optimizers_state_run(pool: Ranks, stage: int) -> None:
    """They were taken, and never called."""
    wanted = ["before saving", "behind saving", "before loading", "behind loading"]
    assert pool.play(2, gradients.hooks_of_states, stage) == [wanted] * 2
