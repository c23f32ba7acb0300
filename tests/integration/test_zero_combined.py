"""Parts of `shoal.zero` that are used together: offload, whole tensors, sparse updates, averages, replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import zero_combined as cases
from tests.integration import zero_replicas
from tests.integration.ranks import Ranks, ranks
from tests.integration.test_zero_training import distance
from tests.integration.zero_combined import Way


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


CHEAP = [(2, Way(2, "Adafactor", replicas=2, offloaded=True)), (2, Way(1, top_k=0.1, rows=True, offloaded=True))]
REST = [
    *((4, Way(stage, replicas=2, offloaded=True, narrow=True, micro=2)) for stage in (1, 2, 3)),
    *((2, Way(stage, "Adafactor", offloaded=offloaded)) for stage in (1, 2) for offloaded in (False, True)),
    *((2, Way(stage, narrow=narrow, offloaded=True)) for stage in (1, 2, 3) for narrow in (False, True)),
    *((2, Way(stage, top_k=0.1, rows=rows)) for stage in (1, 2) for rows in (False, True)),
    (2, Way(2, top_k=0.1, rows=True, offloaded=True)),
    *((4, Way(stage, "Adafactor", replicas=2, offloaded=offloaded)) for stage in (1, 2) for offloaded in (False, True)),
    *((4, Way(stage, replicas=2, offloaded=True, micro=2)) for stage in (1, 2, 3)),
    *((3, Way(stage, replicas=3, offloaded=True)) for stage in (1, 2, 3)),
]


@pytest.mark.parametrize(
    ("count", "way"), [*CHEAP, *(pytest.param(*each, marks=pytest.mark.long) for each in REST)], ids=str
)
def test_parts_that_are_used_together(pool: Ranks, tmp_path: Path, count: int, way: Way) -> None:
    """The bits of a run that keeps everything in memory, also if it goes on from a checkpoint, with its averages.

    A checkpoint with averages of sparse tables was not loaded: their weights stayed as they were.
    """
    for plain, whole, resumed in pool.play(count, cases.used_together, way, str(tmp_path)):
        assert distance([whole, resumed], plain) == 0.0


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long)])
def test_gradients_in_files_are_clipped_a_window_at_a_time(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """The same norm and gradients as in memory. A file that cannot be read is said on all ranks."""
    found = pool.play(2, cases.clipped_from_files, stage, str(tmp_path))
    for norms, gradients, words in found:
        assert norms
        assert gradients
        assert "cannot be read or written" in words
    assert [words.split(":")[0] for *_, words in found] == ["ConfigError", "LocalError"]


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("replicas", "count"), [(3, 1), pytest.param(4, 1, marks=pytest.mark.long(full=True)), (3, 2)])
def test_many_replicas_equal_one_process_to_the_bit(pool: Ranks, stage: int, replicas: int, count: int) -> None:
    """Three and four replicas, of one rank and of two."""
    found = pool.play(replicas * count, zero_replicas.trained, stage, replicas)
    assert distance([state for state, *_ in found], zero_replicas.alone(replicas, count)) == 0.0
