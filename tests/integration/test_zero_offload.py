"""`shard(offload=)`: state in files changes no bit, and a disk that is full or gone is an error on every rank."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import zero_offload as cases
from tests.integration.ranks import Ranks, ranks
from tests.integration.workers import LONG_S, environment
from tests.integration.zero_limited import own_cgroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux only")

KINDS = ("sgd", "adamw", "adagrad", "schedulefreeadamw", "madgrad")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize(
    ("stage", "dtype", "kinds"),
    [
        (1, None, ["madgrad"]),
        (2, torch.bfloat16, ["adamw"]),
        (3, None, ["schedulefreeadamw"]),
        *(
            # MADGRAD does not step DTensors.
            pytest.param(stage, dtype, KINDS if stage < 3 else KINDS[:-1], marks=pytest.mark.long)
            for stage in (1, 2, 3)
            for dtype in (None, torch.bfloat16)
        ),
    ],
)
def test_state_in_files_changes_no_bit(
    pool: Ranks, stage: int, dtype: torch.dtype | None, kinds: Sequence[str], tmp_path: Path
) -> None:
    """Several micro-batches, clipping, a schedule, state dictionaries and checkpoints, in windows of a few tiles."""
    for found in pool.play(2, cases.lives, stage, kinds, dtype, str(tmp_path)):
        assert list(found) == list(kinds)
        for kind, (equal, loaded, memory, less) in found.items():
            assert equal, kind
            assert loaded, kind
            assert memory.offloaded == 0
            assert less.state < 0.1 * memory.state
            # In stage 3 all of it is in files; in stage 1 not the gradients, but the float32 means of 16-bit ones.
            assert less.parameters == (memory.parameters if stage < 3 else 0)
            moved = memory.gradients - less.gradients
            assert (moved > 0) == (stage > 1 or dtype is not None)
            assert less.gradients == 0 or stage < 3
            exactly = moved + memory.state - less.state + memory.parameters - less.parameters
            assert less.offloaded == (exactly if stage < 3 else pytest.approx(exactly, rel=0.1))  # FSDP2 fills up rows


@pytest.mark.parametrize("stage", [1, 3])
def test_a_folder_that_cannot_be_used_is_refused_on_every_rank(pool: Ranks, stage: int, tmp_path: Path) -> None:
    """On one rank or on all; the model is as it was, and can be sharded with another folder."""
    first, second = pool.play(2, cases.refused, stage, str(tmp_path))
    for found, missing, full in (
        (first, "another rank cannot go on: rank 1: ConfigError", "another rank cannot go on: rank 1: ConfigError"),
        (second, "make it", "MB cannot be allocated in"),
    ):
        words = [said for said, _ in found]
        assert missing in words[0]
        assert "offload must be None, 'cpu' or the path of a folder, got 3" in words[1]
        assert "'offload cpu' instead of 'offload to a folder'" in words[2]
        assert full in words[3]
        assert all(kept for _, kept in found)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_disk_that_is_full_later_harms_nothing(pool: Ranks, stage: int, tmp_path: Path) -> None:
    """At the first step, which is whole on every rank; in `load`, which changes nothing; and in `save`."""
    first, second = pool.play(2, cases.full_later, stage, str(tmp_path))
    other = "another rank cannot go on: rank 1"
    for found, words in (
        (first, (f"{other}: ConfigError: offload: ", f"{other}: ConfigError: offload: ", other)),
        (second, ("cannot be allocated in", "16.8 MB cannot be allocated in", "path cannot be written")),
    ):
        assert [wanted in said for wanted, (said, _) in zip(words, found, strict=True)] == [True] * 3, found
        assert all(fine for _, fine in found)


def test_a_folder_that_is_gone_is_an_error_on_every_rank(pool: Ranks, tmp_path: Path) -> None:
    """If something is still to be put there."""
    first, second = pool.play(2, cases.gone_folder, str(tmp_path))
    assert "another rank cannot go on: rank 1: ConfigError: offload" in first
    assert "No such file or directory" in second


def test_what_looks_at_all_parameters_is_refused(pool: Ranks, tmp_path: Path) -> None:
    """Stage 3 takes it without offload."""
    for words in pool.play(2, cases.of_all_parameters, str(tmp_path)):
        assert "ConfigError: optimizer_factory built Prodigy, which" in words
        assert "cannot be offloaded to a folder" in words


def run_limited(ranks: int, store: Path, *options: str, limit_s: float = 4 * LONG_S) -> list[dict[str, Any] | int]:
    """What each rank of `zero_limited` printed; its exit status if that is not 0, or if it has not ended in time."""
    store.unlink(missing_ok=True)
    shutil.rmtree(f"{store}-saved", ignore_errors=True)
    module = [sys.executable, "-m", "tests.integration.zero_limited", f"--store={store}", f"--ranks={ranks}"]
    # glibc keeps freed memory for later: by this it gives large pieces back, so that limits count what is in use.
    found = environment(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536")
    started = [
        subprocess.Popen(
            [*module, f"--rank={rank}", *options], env=found, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    until, printed = time.monotonic() + limit_s, list[str]()
    for each in started:
        try:
            printed.append(each.communicate(timeout=max(0.0, until - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            each.kill()
            printed.append(each.communicate()[0])
    return [each.returncode or json.loads(text.splitlines()[-1]) for each, text in zip(started, printed, strict=True)]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stage", "ranks", "layers", "mib", "kind"),
    [
        (2, 2, 96, 64, "data"),
        *(
            pytest.param(*each, marks=pytest.mark.long(full=True))
            for each in [
                (3, 2, 96, 40, "cgroup"),
                (2, 1, 48, 64, "data"),
                (2, 1, 48, 64, "cgroup"),
                (2, 2, 96, 64, "cgroup"),
                (3, 2, 96, 40, "data"),
                (2, 1, 400, 64, "data"),
                (2, 1, 400, 64, "cgroup"),
            ]
        ),
    ],
)
def test_state_that_is_larger_than_the_memory_trains_on(
    kind: str, stage: int, ranks: int, layers: int, mib: int, tmp_path: Path
) -> None:
    """With the same bits and checkpoints, under a limit of this process, under which training without offload fails.

    So much is left for training as ``mib`` says; in stage 3 gradients alone take more. The state of the last case is
    larger than all that the process has (RLIMIT_DATA: libraries and parameters, too). A control group counts pages of
    files as well.
    """
    if kind == "cgroup":
        if (found := own_cgroup()) is None:
            pytest.skip("this process may not make a control group")
        found[0].rmdir()
    store, limit = tmp_path / "store", ("--limit", kind, "--limit-mib", str(mib))
    size = (f"--layers={layers}", f"--stage={stage}")
    plain = run_limited(ranks, store, *size)
    limited = run_limited(ranks, store, *size, *limit, "--offload", str(tmp_path))
    for one, other in zip(plain, limited, strict=True):
        assert isinstance(one, dict)
        assert isinstance(other, dict), f"a rank ended with {other}"
        assert other["weights"] == one["weights"]
        assert one["offloaded"] == 0
        assert other["offloaded"] > 1.4 * mib * 2**20
        assert other["taken"] < (0.5 if stage < 3 else 0.7) * one["taken"]
    # Without memory it may also hang: of a thread that has none to begin with, Python tells nobody.
    failed = run_limited(ranks, store, *size, *limit, limit_s=LONG_S)
    assert not all(isinstance(each, dict) for each in failed)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", ["cpu", "a folder"])
@pytest.mark.parametrize("stage", [1, 2])
def test_values_beside_a_device_have_the_same_bits(pool: Ranks, stage: int, place: str, tmp_path: Path) -> None:
    """Where the CPU stands in for the device: copies are stepped, and written into the parameters."""
    where = "cpu" if place == "cpu" else str(tmp_path)
    for equal, memory in pool.play(2, cases.beside_a_device, stage, "adamw", None, where, "cpu"):
        assert equal
        assert memory.offloaded > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("place", ["cpu", "a folder"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gpu_keeps_no_state(pool: Ranks, stage: int, dtype: torch.dtype | None, place: str, tmp_path: Path) -> None:
    """On one rank. SGD on the CPU and on a GPU rounds alike."""
    where = "cpu" if place == "cpu" else str(tmp_path)
    for equal, memory in pool.play(1, cases.beside_a_device, stage, "sgd", dtype, where, "cuda"):
        assert equal
        assert memory.offloaded > 0
        assert memory.state == 0
