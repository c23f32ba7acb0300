"""Sparse updates: only touched rows and chosen values are reduced, stepped and sent, as one process would do it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shoal.zero
from tests.integration import zero_sparse as cases
from tests.integration.ranks import Failed, Ranks, ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


def apart(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of any value."""
    assert state.keys() == wanted.keys()
    return max(float((state[name] - value).abs().max()) for name, value in wanted.items())


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.long), 3])
def test_lazy_steps_equal_one_process_to_the_bit(pool: Ranks, count: int) -> None:
    """Any optimizer is a lazy one, in both stages; with several micro-batches, too."""
    jobs: list[tuple[str, int, int]] = [("momentum", 2, 1), ("adagrad", 1, 1), ("rmsprop", 2, 1)]
    jobs += [("adamw", stage, micro) for stage in (1, 2) for micro in (1, 3)]
    for found in pool.play(count, cases.in_turn, jobs):
        for job, state in zip(jobs, found, strict=True):
            assert apart(state, cases.alone(count, job[0], micro=job[2])) == 0.0, job


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("kind", "bare", "bound"), [("sgd", False, 0.0), ("sparseadam", True, 0.0), ("adagrad", False, 1e-6)]
)
def test_torch_s_own_sparse_optimizers_give_the_same(pool: Ranks, kind: str, bare: bool, bound: float) -> None:
    """On one process with sparse gradients: to the bit; but Adagrad, which rounds otherwise there."""
    wanted = cases.alone(2, kind, own=True, bare=bare)
    for state in pool.play(2, cases.weights, kind, 2, 1, bare):
        assert apart(state, wanted) <= bound


def test_micro_batches_that_are_each_reduced(pool: Ranks) -> None:
    """Their means add up, in another order of the same sums."""
    jobs = [("momentum", stage, 3, False, share, True) for stage in (1, 2) for share in (None, 1.0)]
    for found in pool.play(2, cases.in_turn, jobs):
        for job, state in zip(jobs, found, strict=True):
            wanted = cases.alone(2, "momentum", micro=3, top_k=None if job[4] is None else (job[4], TILE))
            assert apart(state, wanted) < 1e-5, job


TILE = 64
"""Of so small a model."""


def test_top_k_equals_one_process_to_the_bit(pool: Ranks) -> None:
    """Each rank sends the largest values of each tile, keeps the rest, and adds it to its next gradient."""
    jobs = [("sgd", 2, 1, False, 1.0), ("momentum", 2, 1, False, 0.1), ("sgd", 1, 3, False, 0.1)]
    jobs += [("adamw", stage, 1, False, 0.1) for stage in (1, 2)]
    for found in pool.play(2, cases.in_turn, jobs):
        for job, state in zip(jobs, found, strict=True):
            kind, _, micro, _, share = job
            assert apart(state, cases.alone(2, kind, micro=micro, top_k=(share, TILE))) == 0.0, job


@pytest.mark.parametrize("share", [None, 0.1])
def test_statistics_in_files(pool: Ranks, tmp_path: Path, share: float | None) -> None:
    """The same bits with `offload`."""
    wanted = cases.alone(2, "adamw", top_k=None if share is None else (share, TILE))
    for state in pool.play(2, cases.offloaded, str(tmp_path), share):
        assert apart(state, wanted) == 0.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("share", [None, 0.1])
def test_bytes_are_those_of_the_law(pool: Ranks, share: float | None, count: int) -> None:
    """An index of 4 bytes and the values of each row, 8 bytes for how many rows come; what is dense as ever."""
    for found in pool.play(count, cases.traffic, share):
        assert found.reduced == found.reduced_law
        assert found.gathered == found.gathered_law
        assert len(set(found.reduced)) > 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("share", [None, 0.1])
@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_checkpoints_go_on(pool: Ranks, tmp_path: Path, kind: str, share: float | None) -> None:
    """On as many ranks to the bit; on any number, in any stage, it is the same state."""
    path = str(tmp_path / "saved")
    wanted = pool.play(2, cases.saves, path, kind, share, 3)[0]
    for state in pool.play(2, cases.goes_on, path, kind, share, 3):
        assert apart(state, wanted) == 0.0
    whole = shoal.zero.consolidate(path)
    for count, stage in ((1, 1), (2, 2), (3, 2), (2, 3)):
        for model, state in pool.play(count, cases.loaded, path, kind, stage, share):
            assert apart(model, whole["model"]) == 0.0
            assert state.keys() == whole["optimizer"]["state"].keys()
            for number, entry in whole["optimizer"]["state"].items():
                assert all(torch.equal(state[number][key], value) for key, value in entry.items())
        shutil.rmtree(f"{path}-{stage}")


def test_residuals_of_another_number_of_ranks(pool: Ranks, tmp_path: Path) -> None:
    """The mean over the ranks of what was not sent stays the same, to rounding."""
    path = tmp_path / "saved"
    pool.play(2, cases.saves, str(path), "sgd", 0.1, 3)

    def mean(folder: Path) -> dict[str, torch.Tensor]:
        files = sorted(folder.glob("*.safetensors"))
        found: dict[str, torch.Tensor] = {}
        for rank, tensors in enumerate(map(load_file, files)):
            for name, each in tensors.items():
                if name.endswith(f"|residual|{rank}"):
                    of = name.removesuffix(f"|residual|{rank}")
                    found[of] = found.get(of, torch.zeros(())) + each / len(files)
        assert found
        return found

    wanted = mean(path)
    assert all(each.any() for each in wanted.values())
    for count in (1, 3, 4):
        pool.play(count, cases.loaded, str(path), "sgd", 2, 0.1)
        assert apart(mean(Path(f"{path}-2")), wanted) < 1e-6
        shutil.rmtree(f"{path}-2")


def test_the_rest(pool: Ranks) -> None:
    """Steps left out, norms, frozen tables, dense gradients, padding, memory, 16 bits."""
    first, second = pool.play(2, cases.rest)
    for found in (first, second):
        assert all(abs(each - total / 2) <= 6 for each, total in zip(found["owned"], (53 * 6, 41 * 6), strict=True))
        assert found["skipped"] == (1, 0.0)
        assert abs(found["norm"]) < 1e-6
        assert found["gradients"][0] == found["gradients"][1] + 4 * 5  # a stand-in for each parameter
        assert max(found["not counted"]) <= 4
        rows, changed = found["rows"]
        assert rows == changed
        assert 0 < rows["users.weight"] < cases.USERS / 2
        assert found["padding"] == 0.0
        assert found["cleared"] == [0, 0]
        assert "no_sync" in found["no_sync"]
        assert found["wide"] == {"torch.float32"}
        assert 0.0 < found["narrow"] < 0.1
    assert first["dense"] + second["dense"] == 2
    assert apart(first["equal"], second["equal"]) == 0.0


WORDS = {
    "sparse differs": "users.weight (53, 6) torch.float32 on cpu trained",
    "max_norm": "has max_norm",
    "SparseAdam of dense ones": "head.weight has dense ones",
    "state that begins otherwise": "which does not begin with zeros",
    "whole tensors": "needs whole tensors, and only some rows of users.weight",
    "Rprop": "'step_size' for each value, which does not begin with zeros",
    "stage 3": "has sparse gradients, which FSDP2 cannot reduce",
    "top_k in stage 3": "top_k is for stages 1 and 2",
    "top_k": "top_k must be a number above 0",
    "top_k differs": "top_k 0.5' instead of",
    "top_k later": "only where shard() was called with one",
    "top_k to nothing": "top_k must be a number above 0",
}


def test_what_is_refused_is_refused_on_all_ranks(pool: Ranks) -> None:
    """And the error says what to do."""
    for found in pool.play(2, cases.refused):
        assert found.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in found[name], name


def test_a_table_that_is_a_head_is_dense(pool: Ranks) -> None:
    """It has gradients for all rows; two sparse embeddings may have one weight."""
    for found in pool.play(2, cases.tied):
        assert found == ["items.weight", "users.weight items.weight"]


@pytest.mark.parametrize("where", [pytest.param("exchange", marks=pytest.mark.long), "index"])
def test_a_lost_rank_is_named(pool: Ranks, where: str) -> None:
    """In the middle of an exchange of rows; by an index out of range, which ends its program."""
    first, _, third = pool.outcomes(3, cases.lost, where, killed=1)
    for failed in (first, third):
        assert isinstance(failed, Failed)
        assert failed.kind == "RankLost"
        assert "rank 1 gone" in failed.message
