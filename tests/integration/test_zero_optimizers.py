"""Each optimizer of torch and of pytorch_optimizer in real training, on 2 ranks: it is refused, or as on one process.

`tests/unit/test_zero_probe.py` has the verdicts that are expected of stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shoal.zero.probe import Unit
from tests.integration import zero_optimizers as programs
from tests.integration.ranks import Ranks, ranks
from tests.unit.test_zero_probe import OTHERS, RANDOM, TORCH, Verdict, cases, of_others, of_torch

DIFFER = {"Muon", "conda"}
"""In stage 3 by more than 1e-6: Muon computes in bfloat16, Conda makes rounding larger. Others take means of rows, or
powers with broken exponents, which are rounded otherwise at the end of a shard than within a whole: 1e-10 to 3e-7 after
50 steps."""

OF_A_MODEL = {"adalomo", "adammini", "lomo"}
"""They are made of a model rather than of parameters."""

OF_ITS_COURSE = {"swats"}
"""The rate of a group changes when a tensor of it has come so far: on one of the models it is seen to."""

UNSAVED = {"stablespam"}
"""They fit, and are refused because a checkpoint would lack a number."""

SAMPLE = {"Adagrad", "AdamW", "Muon", "adams", "gravity", "kron", "lamb", "schedulefreeadamw", "soap"}
"""Verdicts of all kinds."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks(probe_anew=True) as made:
        yield made


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", programs.MODELS)
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        pytest.param(*each, marks=pytest.mark.long(full=each[0] not in SAMPLE))
        for each in [*cases(TORCH), *cases(OTHERS)]
        if each[0] not in OF_A_MODEL
    ],
)
def test_an_optimizer_is_refused_or_trains_as_on_one_process(
    pool: Ranks, soak: Callable[[int, int], int], model: str, name: str, verdict: Verdict
) -> None:
    """SGDP and AdamS trained in stages 1 and 2, and Gravity in stage 3, and differed without a word."""
    of = of_torch if name in TORCH_NAMES else of_others
    for found in pool.play(2, programs.verdicts, of, name, model, soak(8, 50)):
        wanted = {"equal"} if isinstance(verdict, Unit) and name not in UNSAVED else {"refused"}
        assert set(found[:2]) == wanted or (name in OF_ITS_COURSE and set(found[:2]) == {"refused"})
        if verdict == RANDOM:
            assert found[2] == "refused"
        elif name not in DIFFER:
            assert found[2] in ("equal", "rounded", "refused")


TORCH_NAMES = {name for name, _ in cases(TORCH)}
