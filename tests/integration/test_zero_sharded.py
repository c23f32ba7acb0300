"""What users do with sharded models beyond a plain loop, and with checkpoints that do not fit."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.zero.plan.laws import ENGINES
from tests.integration import zero_cases as cases
from tests.integration import zero_sharded as programs
from tests.integration.ranks import Ranks, ranks
from tests.integration.workers import Talk


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_may_be_cleared_anywhere(pool: Ranks, stage: int) -> None:
    """Whether the model holds its shards at that moment, or whole parameters."""
    for found in pool.play(2, programs.orders, stage):
        wanted = found["after the step"]
        for weights in found.values():
            assert all(torch.equal(weights[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_an_evaluation_changes_nothing(pool: Ranks, stage: int, tmp_path: Path) -> None:
    """Neither the norm of the gradients nor what `load` writes to."""
    for norm, again, loaded in pool.play(2, programs.after_an_evaluation, stage, str(tmp_path / "saved")):
        assert norm == again > 0
        assert loaded


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_passes_without_sync_are_cleared_too(pool: Ranks, stage: int) -> None:
    """And none of them is left out of a step without a word."""
    for wanted, found, said in pool.play(2, programs.forgotten, stage):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert "within no_sync()" in said


def test_stage_3_counts_what_one_rank_did_not_use_as_zero(pool: Ranks) -> None:
    """What none used is not stepped, though the optimizer decays."""
    for unused, once in pool.play(2, cases.unused, 3):
        assert unused == 0.0
        assert once > 0.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_frozen_in_turns_is_trained(pool: Ranks, stage: int, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """As generators and critics are, whichever half is frozen at first, and when a checkpoint is written."""
    for apart, loaded in pool.play(2, programs.frozen_in_turns, stage, dtype, str(tmp_path / "saved")):
        assert apart < (1e-6 if dtype is None else 0.02)
        assert loaded


def test_a_model_that_runs_by_another_method_is_trained(pool: Ranks) -> None:
    """`register_fsdp_forward_method`."""
    assert max(pool.play(2, programs.by_another_method)) < 1e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoint_wrappers_do_not_count(pool: Ranks, stage: int, tmp_path: Path) -> None:
    """Neither in training nor in the names of a checkpoint."""
    for apart, loaded in pool.play(2, programs.with_checkpoint_wrapper, stage, str(tmp_path / "saved")):
        assert apart < 1e-6
        assert loaded == [True, True]


def test_gradients_that_wait_are_not_changed_in_place(pool: Ranks) -> None:
    """In stage 3 they are whole and elsewhere: to write zeros into the shards' would clear nothing."""
    for said in pool.play(2, programs.changed_without_sync):
        assert "LocalError: the gradient of" in said
        assert "within no_sync() is whole" in said


def test_layers_in_several_lists_and_a_parameter_without_values(pool: Ranks, tmp_path: Path) -> None:
    """In stage 3 a layer is one unit, wherever it is found."""
    for apart, loaded in pool.play(2, programs.shared_layers, str(tmp_path / "saved")):
        assert apart < 1e-6
        assert loaded


def test_stage_2_of_fsdp2_gathers_in_each_micro_batch(pool: Ranks) -> None:
    """It lets go of the parameters behind each backward pass, as the law says."""
    (law,) = (each for each in ENGINES if (each.name, each.stage) == ("FSDP2", 2))
    once, thrice = (pool.play(2, programs.gathered_in_stage_2, count)[0] for count in (1, 3))
    assert once > 0
    assert thrice == once * (law.gathers + 3 * law.gathers_each) / (law.gathers + law.gathers_each)


def test_ranks_that_leave_out_other_layers_are_told(pool: Ranks) -> None:
    """In stage 3, where one rank's layer would be taken for another's."""
    first, second = pool.outcomes(2, programs.skipped_layer)
    assert first.kind == second.kind == "LocalError"
    assert "unit 2 (layers.1), and rank 1 gathers 36 of unit 1" in first.message
    assert "unit 1 (layers.0), and rank 0 gathers 36 of unit 2" in second.message


def test_a_layer_is_gathered_while_the_one_before_runs(pool: Ranks, tmp_path: Path) -> None:
    """In the order of the pass before. A layer that was expected and does not run changes nothing."""
    for passes, equal in pool.play(2, programs.gathered_ahead, str(tmp_path / "saved")):
        first, second = passes[:2]
        assert first[:6] == ["gathers 0", "ran 0", "gathers 1", "ran 1", "gathers 2", "ran 2"]
        assert second[:6] == ["gathers 0", "gathers 1", "ran 0", "gathers 2", "ran 1", "ran 2"]
        assert equal


def test_a_mesh_of_other_startedthan_the_group(pool: Ranks) -> None:
    """Says which group to give."""
    for failed in pool.outcomes(4, programs.mesh_of_others):
        assert failed.kind == "ConfigError"
        assert "pass their process group as group" in failed.message


def test_a_narrow_model_keeps_its_buffers(pool: Ranks) -> None:
    """Its parameters get float32 shards."""
    for buffer, stepped in pool.play(2, programs.narrow_with_buffer):
        assert (buffer, stepped) == ("torch.bfloat16", "torch.float32")


def test_a_replaced_parameter_is_noticed(pool: Ranks) -> None:
    """It would not be trained."""
    for failed in pool.outcomes(2, programs.replaced):
        assert failed.kind == "LocalError"
        assert "scale was replaced" in failed.message


def test_ranks_that_save_under_different_paths(pool: Ranks, tmp_path: Path) -> None:
    """There is no checkpoint then, nor anything else."""
    for failed in pool.outcomes(2, programs.save_elsewhere, str(tmp_path / "saved")):
        assert failed.kind == "ConfigError"
        assert "the same path" in failed.message
    assert not list(tmp_path.iterdir())


def test_ranks_that_do_not_share_a_file_system(pool: Ranks, tmp_path: Path) -> None:
    """There is no checkpoint then, nor what would have become one."""
    for failed in pool.outcomes(2, programs.save_not_shared, str(tmp_path)):
        assert failed.kind == "ConfigError"
        assert "file system that all ranks share" in failed.message
    assert not [each for folder in tmp_path.iterdir() for each in folder.iterdir()]


def test_a_path_that_cannot_be_written(pool: Ranks, tmp_path: Path) -> None:
    """All ranks raise the same."""
    (tmp_path / "file").write_text("no folder")
    for failed in pool.outcomes(2, programs.save_unwritable, str(tmp_path)):
        assert failed.kind == "ConfigError"
        assert "cannot be written" in failed.message


@pytest.mark.parametrize("what", ["a buffer", "one more", "one less"])
def test_a_checkpoint_with_other_frozen_parameters_or_buffers(pool: Ranks, tmp_path: Path, what: str) -> None:
    """Is refused before anything is changed."""
    path = tmp_path / "saved"
    pool.play(2, programs.save_plain, str(path))
    for said, same in pool.play(2, programs.load_other_frozen, str(path), what):
        assert "which is not trained, with shape" in said
        assert same


@pytest.mark.parametrize("plain", [True, False])
def test_ranks_that_load_other_checkpoints(pool: Ranks, tmp_path: Path, plain: bool) -> None:
    """Are told, and nothing is changed: of folders and of files of plain torch, which differ in values alone."""
    for rank in range(2):
        if plain:
            model = cases.Odd()
            torch.nn.init.constant_(model.scale, rank)
            optimizer = cases.make("sgd", model)([each for each in model.parameters() if each.requires_grad])
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"saved-{rank}")
        else:
            pool.play(2, programs.save_plain, str(tmp_path / f"saved-{rank}"), 1 + rank)
    for said, unchanged in pool.play(2, programs.load_of_each, str(tmp_path / "saved")):
        assert "rank 0 gave" in said
        assert f"and rank 1 gave {tmp_path / 'saved-1'}, which is another one" in said
        assert unchanged


def test_a_copy_is_the_same_checkpoint(pool: Ranks, tmp_path: Path) -> None:
    """Ranks may have one each."""
    pool.play(2, programs.save_plain, str(tmp_path / "saved-0"))
    shutil.copytree(tmp_path / "saved-0", tmp_path / "saved-1")
    assert [said for said, _ in pool.play(2, programs.load_of_each, str(tmp_path / "saved"))] == ["", ""]


@pytest.mark.parametrize("order", [["gain", "layer.weight", "layer.bias"], ["gain", "layer.bias", "layer.weight"]])
def test_a_scalar_and_the_order_of_a_plain_optimizer(pool: Ranks, tmp_path: Path, order: list[str]) -> None:
    """What is kept for a scalar looks like a counter, and is none; another order of parameters is told on all ranks."""
    model, path = programs.Scalar(), tmp_path / "plain.pt"
    optimizer = torch.optim.NAdam([model.get_parameter(name) for name in order])
    programs.scalar_steps(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    found = pool.outcomes(2, programs.load_scalar, str(path))
    wanted = programs.scalar_steps(model, optimizer).state_dict()
    for each in found:
        if order[1] == "layer.weight":
            assert all(torch.allclose(each[name], value, rtol=0, atol=1e-6) for name, value in wanted.items())
        else:
            assert each.kind == "ConfigError"
            assert "it was built of other parameters, or in another order" in each.message


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_formats_and_odd_buffers(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """Channels last, expanded, without dimensions: sharded, saved and loaded as any other."""
    assert pool.play(2, programs.save_in_formats, str(tmp_path / "saved"), stage) == ["", ""]


def test_a_full_disk(pool: Ranks, tmp_path: Path) -> None:
    """Is told on all ranks, and leaves nothing."""
    for said in pool.play(2, programs.save_on_a_full_disk, str(tmp_path / "saved")):
        assert "ConfigError" in said
        assert "path cannot be written" in said
    assert not list(tmp_path.iterdir())


def test_frozen_parameters_that_a_plain_optimizer_lists(pool: Ranks, tmp_path: Path) -> None:
    """Such as that of all of a model's parameters: it takes the checkpoint."""
    path = tmp_path / "plain.pt"
    wanted = pool.play(2, programs.frozen_listed, str(path))[0]
    found, model = torch.load(path), cases.Odd()
    model.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert torch.count_nonzero(optimizer.state[model.scale]["exp_avg"])
    assert model.frozen.weight not in optimizer.state


def test_extra_state_of_modules(pool: Ranks, tmp_path: Path) -> None:
    """Is in `full_state_dict`, and too much for `save`, which says so."""
    for found, said in pool.play(2, programs.extra_state, str(tmp_path / "saved")):
        assert found == {"calls": 3}
        assert "_extra_state is no tensor" in said


def test_rank_0_of_a_smaller_group(pool: Ranks) -> None:
    """Is not that of all ranks."""
    outside, first, second = pool.play(3, programs.in_a_smaller_group)
    assert outside is None
    assert first.keys() == cases.Odd().state_dict().keys()
    assert second == {}


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.long)])
def test_the_store_outlives_the_verdict(how: str) -> None:
    """Without a launcher it ends with rank 0: that waits until the others know who is gone, and no longer."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    meeting: dict[str, Any] = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(Talk([sys.executable, "-m", programs.__name__, how], RANK=str(rank), **meeting))
            for rank in range(3)
        ]
        for rank in (0, 2):
            assert started[rank].line().startswith("rank 1 gone"), rank
            started[rank].rest()
            assert started[rank].wait() == 0
    assert started[1].wait() == -signal.SIGKILL
