"""`shoal.zero` in programs that use weights in ways of their own: right, or an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import zero_strangers as strangers
from tests.integration.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2])
def test_weights_may_be_used_in_any_way(pool: Ranks, stage: int) -> None:
    """In stages 1 and 2 parameters are the program's own, whole and always there: all is as in one process."""
    cases = [*strangers.RIGHT, *strangers.REFUSED]
    for found in pool.play(2, strangers.used_so, cases, stage):
        assert found == dict.fromkeys(cases, ("", 0.0))


def test_a_layer_that_hands_out_its_weights(pool: Ranks) -> None:
    """In stage 3 a layer that returned its own bias ended the process: "Segmentation fault"."""
    for found in pool.play(2, strangers.used_so, strangers.RIGHT, 3):
        assert found == dict.fromkeys(strangers.RIGHT, ("", 0.0))


def test_weights_used_outside_their_unit(pool: Ranks) -> None:
    """In stage 3 these ended the process, changed nothing in silence, or said "mixed torch.Tensor and DTensor"."""
    for found in pool.play(2, strangers.used_so, list(strangers.REFUSED), 3):
        for how, (words, _) in found.items():
            assert words.startswith("ConfigError"), (how, words)
            assert strangers.REFUSED[how] in words, (how, words)
            assert "stage 1 or 2" in words, (how, words)


@pytest.mark.parametrize("stage", [1, 3])
def test_methods_other_than_forward(pool: Ranks, stage: int) -> None:
    """One way for all stages: torch's own `register_fsdp_forward_method`, also for a head that is given chunks."""
    for found in pool.play(2, strangers.used_so, strangers.REGISTERED, stage, True):
        assert found == dict.fromkeys(strangers.REGISTERED, ("", 0.0))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_without_gradients_between_steps(pool: Ranks, stage: int, mode: str) -> None:
    """As generation does: the same values as in one process, before a step and behind it."""
    assert pool.play(2, strangers.evaluated, stage, mode) == [("", 0.0)] * 2


def test_no_way_to_read_a_freed_weight_ends_the_process(pool: Ranks) -> None:
    """Most ended it. Of those that torch lets nobody see no error can tell: they read NaN."""
    for found in pool.play(2, strangers.read_when_freed):
        unseen = False
        for how, results in found.items():
            unseen = unseen or how == "torch.tensor"
            for words in results:
                assert words == "nan" or words.startswith(
                    ("ConfigError", "RuntimeError") if unseen else "ConfigError"
                ), (
                    how,
                    words,
                )
