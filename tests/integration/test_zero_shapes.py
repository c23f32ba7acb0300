"""`shoal.zero` with odd parameters: steps, a checkpoint, and other ranks in another stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration import zero_shapes as shapes
from tests.integration.ranks import Ranks, ranks

REFUSED = {
    ("an empty tensor", 3): "more.0 has no values, which FSDP2 cannot reduce: freeze it, or use stage 1 or 2",
    ("an empty matrix", 3): "more.0 has no values, which FSDP2 cannot reduce: freeze it, or use stage 1 or 2",
    ("a scalar", 3): "more.0 is a scalar, which FSDP2 cannot shard: make it a tensor of one value, or use stage 2",
    ("frozen at first", 1): "head.weight was frozen when the model was sharded, and would not be trained",
    ("frozen at first", 2): "head.weight was frozen when the model was sharded, and would not be trained",
    ("frozen at first", 3): "head.weight was frozen when shard() was called, and is trained since",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


def check(pool: Ranks, path: Path, stages: tuple[int, int], many: int) -> None:
    """Two ranks train and save, then three load and go on."""
    stage, other = stages
    for found in pool.play(2, shapes.lived, list(shapes.KINDS), stage, str(path), many):
        for kind, (words, apart) in found.items():
            assert REFUSED.get((kind, stage), "") in words, (kind, words)
            assert bool(words) == ((kind, stage) in REFUSED), (kind, words)
            assert apart == 0.0, kind
    saved = [kind for kind in shapes.KINDS if (kind, stage) not in REFUSED]
    for again in pool.play(3, shapes.went_on, saved, other, str(path), many):
        for kind, (words, apart, works) in again.items():
            if (kind, other) in REFUSED:
                assert REFUSED[kind, other] in words, (kind, words)
            else:
                assert (words, apart, works) == ("", 0.0, True), kind


@pytest.mark.parametrize(
    "stages",
    [pytest.param((1, 2), marks=pytest.mark.long(full=True)), pytest.param((2, 3), marks=pytest.mark.long), (3, 1)],
)
def test_odd_parameters_live_on(pool: Ranks, tmp_path: Path, stages: tuple[int, int]) -> None:
    """Empty, tiny, tied, without gradients: in stage 3 `full_state_dict` raised torch's "Expected cond to be True"."""
    check(pool, tmp_path, stages, 8)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [2, 3])
def test_very_many_small_parameters(pool: Ranks, tmp_path: Path, stage: int, soak: Callable[[int, int], int]) -> None:
    """A mixture of experts has 20,000."""
    many = soak(250, 20_000)
    assert pool.play(2, shapes.lived, ["many small"], stage, str(tmp_path), many)[0] == {"many small": ("", 0.0)}
    found = pool.play(3, shapes.went_on, ["many small"], 5 - stage, str(tmp_path), many)
    assert found[0] == {"many small": ("", 0.0, True)}
