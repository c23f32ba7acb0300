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


@pytest.mark.parametrize(("how", "stage"), [("optimizer", 2), ("optimizer", 3), ("model", 1)])
def test_gradients_that_are_cleared_to_zeros(pool: Ranks, how: str, stage: int) -> None:
    """A parameter without a gradient is not stepped with zeros, as in one process it is; nobody said so."""
    for said in pool.play(2, gradients.cleared_to_zeros, how, stage):
        assert len(said) == 1, said
        assert "set_to_none=False" in said[0]
