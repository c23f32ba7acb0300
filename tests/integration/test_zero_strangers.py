"""`shoal.zero` in programs that use weights in ways of their own: right, or an error that says what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration import zero_restarts
from tests.integration import zero_strangers as strangers
from tests.integration import zero_uses as uses
from tests.integration.ranks import Failed, Ranks, die_here, ranks
from tests.integration.workers import Talk


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


@pytest.mark.one_in(2)
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


PHASES = (
    *("full_state_dict", "full_state_dict of a part", "save", "consolidated", "load", "clip"),
    *("step", "forward", "backward", "averages", "update", "shard"),
)
DEFAULT = (("full_state_dict", 3), ("load", 3), ("clip", 2))


@pytest.mark.parametrize(
    ("phase", "stage"),
    [
        pytest.param(
            phase, stage, marks=() if (phase, stage) in DEFAULT else pytest.mark.long(full=(place + stage) % 3 > 0)
        )
        for place, phase in enumerate(PHASES, 2)
        for stage in (1, 2, 3)
        # In stages 1 and 2 weights are whole on each rank, and nobody waits for another.
        if stage == 3 or phase not in ("full_state_dict", "full_state_dict of a part", "forward")
    ],
)
def test_a_rank_that_dies_ends_every_collective_in_rank_lost(
    pool: Ranks, tmp_path: Path, phase: str, stage: int
) -> None:
    """In `full_state_dict` of stage 3 others raised gloo's RuntimeError: "Connection closed by peer"."""
    first, _, third = pool.outcomes(3, strangers.killed_before, phase, str(tmp_path), stage, die_here, killed=1)
    for each in (first, third):
        assert isinstance(each, Failed), each
        assert each.kind == "RankLost", each
        assert "rank 1 gone" in each.message, each


@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_helpers_for_optimizers(pool: Ranks, stage: int) -> None:
    """In stages 1 and 2 they ended in "KeyError: 0", and `join` in an AttributeError."""
    for found in pool.play(2, strangers.with_torchs_helpers, stage):
        assert found["own"] == found["weights"] == ""
        for how in ("get", "both"):
            assert found[how] == "" if stage == 3 else "shoal.zero.save(path, model, optimizer)" in found[how]
        for how in ("join", "Join"):
            assert found[how].startswith("LocalError: uneven inputs"), found[how]
        assert "unexpected keyword argument 'scale'" in found["unknown"]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_step_is_given_goes_to_the_inner_optimizer(pool: Ranks, stage: int) -> None:
    """It was a TypeError: torch's ZeroRedundancyOptimizer hands it on."""
    for apart, words in pool.play(2, strangers.stepped_with_options, stage):
        assert apart == 0.0
        assert words.startswith("ConfigError")
        assert "scale=" in words


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ranks_that_torchrun_starts_again_come_back(tmp_path: Path, soak: Callable[[int, int], int]) -> None:
    """Most ended in `init_process_group`: torch's store still had the addresses of the ranks before."""
    for number in range(soak(1, 20)):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", zero_restarts.__file__, str(folder), str(1 + number % 3)]
        with Talk(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as launcher:  # as docs/reference/zero.md says
            launcher.rest()
            assert launcher.wait() == 0, launcher.errors()[-4000:]
        for rank in range(2):
            assert (folder / f"done-{rank}").read_text() == str(zero_restarts.KILLED_AT)


_RIGHT = [("within", [*uses.WITHIN]), ("beside", [*uses.BESIDE])]
_REFUSED = [("outside", [*uses.OUTSIDE]), ("beside", [*uses.REFUSED])]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_operations_of_torch_with_weights(pool: Ranks, stage: int) -> None:
    """`copy.deepcopy` of a weight of stage 3 was torch's raw error."""
    for kind, cases in _RIGHT:
        for found in pool.play(2, uses.used, kind, cases, stage):
            for how, (words, apart) in found.items():
                assert words == "", how
                assert apart <= 1e-6, how


def test_a_unit_that_was_compiled_before_shard_met_torchs_type_error(pool: Ranks) -> None:
    """Dynamo had traced shoal's own functions, into a graph for weights of another class."""
    for words, apart in pool.play(2, uses.compiled):
        assert words == ""
        assert apart <= 1e-6


def test_operations_of_torch_that_stage_3_cannot_carry(pool: Ranks) -> None:
    """Most were torch's raw errors; numbers of a weight, and `full_tensor` in a graph, were wrong in silence."""
    for kind, cases in _REFUSED:
        for found in pool.play(2, uses.used, kind, cases, 3):
            for how, (words, _) in found.items():
                assert words.startswith(("ConfigError", "LocalError")), (how, words)
                named = "of unit layers.0", "unit the whole model", "unit layers.1", "of the model"
                assert any(each in words for each in named), (how, words)
                assert any(each in words for each in ("stage 1 or 2", "full_tensor()")), (how, words)
