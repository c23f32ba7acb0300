"""Sharded training in ordinary torch programs: what they do beside `backward`, `step` and `zero_grad`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.integration import zero_cases as cases
from tests.integration import zero_programs as programs
from tests.integration.ranks import Ranks, ranks
from tests.integration.workers import LONG_S, environment


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_cleared_by_whoever_clears_them(pool: Ranks, stage: int) -> None:
    """However a program does it, nothing comes back of what was there: as with `optimizer.zero_grad`, to the bit."""
    ways = programs.CLEARINGS if stage < 3 else programs.TO_NONE
    for found in pool.play(2, programs.cleared, stage, list(ways)):
        assert found == dict.fromkeys(ways, True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_some_gradients_are_cleared(pool: Ranks, stage: int) -> None:
    """Those of the other layers still count."""
    assert all(pool.play(2, programs.cleared_in_part, stage))


@pytest.mark.parametrize("stage", [1, 2])
def test_to_ask_for_gradients_changes_none(pool: Ranks, stage: int) -> None:
    """`torch.autograd.grad` of the parameters, between the backward pass and the step."""
    assert all(pool.play(2, programs.asked_in_between, stage))


def test_to_ask_for_gradients_reduces_those_of_no_sync_in_stage_3_only(pool: Ranks) -> None:
    """FSDP2 reduces at the end of any pass, and the step is right; in the other stages it is refused."""
    assert pool.play(2, programs.asked_behind_no_sync, 3) == [("", True)] * 2
    for words, stepped in pool.play(2, programs.asked_behind_no_sync, 1):
        assert "LocalError: the last backward pass was within no_sync()" in words
        assert not stepped


@pytest.mark.parametrize("ranks", [2, 4])
def test_stage_1_receives_where_gradients_stay(pool: Ranks, ranks: int) -> None:
    """It kept memory for messages beside them. Each rank's pieces have one size here, and fit."""
    assert pool.play(ranks, programs.received) == [(True, 0)] * ranks


@pytest.mark.parametrize("stage", [1, 2])
def test_who_changes_a_reduced_gradient_is_told(pool: Ranks, stage: int) -> None:
    """Clipping by torch among others, which on one rank would see a part of the gradients, or none."""
    for found in pool.play(2, programs.changed_by_others, stage):
        for words, (said, unchanged) in found.items():
            assert words in said
            assert unchanged


@pytest.mark.parametrize("stage", [1, 2])
def test_what_nobody_refers_to_is_freed(pool: Ranks, stage: int) -> None:
    """Autograd's hooks do not keep a model, an optimizer or their memory alive."""
    for found in pool.play(2, programs.gone, stage):
        assert found == [True, True, True]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_state_of_another_rank_is_refused(pool: Ranks, stage: int) -> None:
    """`optimizer.state_dict()` of rank 0 on all ranks, as plain programs do it, would be other tiles' moments."""
    first, second = pool.play(2, programs.state_of_rank_0, stage)
    assert "state_dict is that of rank 0 of 2" in second[0]
    assert "this is rank 1 of 2" in second[0]
    assert "shoal.zero.save()" in second[0]
    assert (first[0] == "") == (stage < 3)
    for _, plain, kept in (first, second):
        assert "an optimizer that is not sharded" in plain
        assert kept


@pytest.mark.parametrize(
    "name",
    ["lamb", "Adafactor"]
    + [pytest.param(name, marks=pytest.mark.long) for name in ("Muon", "Hugging Face's", "lars", "shampoo", "soap")],
)
def test_what_is_said_of_optimizers_of_whole_tensors_in_stage_3_is_true(pool: Ranks, name: str) -> None:
    """Muon steps DTensors, to bfloat16's rounding; the others raised at a step, and "use stage 3" was wrong advice."""
    for apart, words in pool.play(2, programs.stepped_whole, name):
        assert (apart < 2.0) == (name == "Muon")
        assert ("which raises when it steps DTensors: " in words) == (name != "Muon")
        assert ("use stage 1 or 2" in words) == (name != "Muon")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hooks_of_parameters_run_in_every_stage(pool: Ranks, stage: int, when: str) -> None:
    """`register_hook`, before or after sharding: stage 3 never ran them, and said nothing."""
    for apart, times in pool.play(2, programs.hooked, stage, when):
        assert apart == 0.0
        assert times == 6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hooks_behind_a_gradient_run_where_there_is_one_and_are_refused_elsewhere(pool: Ranks, stage: int) -> None:
    """`register_post_accumulate_grad_hook`: before sharding in stages 1 and 2, behind it in stage 3."""
    right, wrong = ("before", "after") if stage < 3 else ("after", "before")
    assert pool.play(2, programs.hooked_behind, stage, right) == [(2, "")] * 2
    for _, words in pool.play(2, programs.hooked_behind, stage, wrong):
        assert "scale" in words
        assert "register_post_accumulate_grad_hook" in words


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("a Sequential", ["", "0", "2", "3"]),
        ("given", ["", "2"]),
        ("in place", ["", "0", "2", "4"]),
        ("a dictionary", ["first", "first.0", "first.2", "first.3", "more.0"]),
    ],
)
def test_what_is_gathered_together_in_stage_3(pool: Ranks, kind: str, wanted: list[str]) -> None:
    """Members of a Sequential, which were all gathered at once; given units; and a container's, which raised late."""
    for names, equal in pool.play(2, programs.in_units, kind):
        assert names == wanted
        assert equal


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("another's", "units must be modules of the model, got Linear"),
        ("tied", "units lists embedding, which cannot be gathered by itself"),
        ("a list", "units lists layers, which cannot be gathered by itself"),
        ("stage 2", "units are for stage 3"),
    ],
)
def test_units_that_cannot_be(pool: Ranks, kind: str, words: str) -> None:
    """Named, on all ranks, before anything is sharded."""
    assert all(words in found for found in pool.play(2, programs.bad_units, kind))


@pytest.mark.parametrize(("kind", "words"), [("tied", "1 and 0 share a parameter"), ("of its own", "scale is in a")])
def test_a_container_that_cannot_be_sharded_is_refused_before_anything_is(pool: Ranks, kind: str, words: str) -> None:
    """A raw ValueError came when its layers were sharded already."""
    assert all(words in found for found in pool.play(2, programs.bad_containers, kind))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sharded_optimizer_is_refused_by_the_swarm_when_it_is_made(pool: Ranks, stage: int) -> None:
    """`shoal.Optimizer` shares whole models: it says so before it does anything, not in the middle of a run."""
    for found in pool.play(2, programs.given_to_the_swarm, stage):
        assert found.startswith("ConfigError: optimizer is sharded (ShardedOptimizer)")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_would_not_be_trained_is_named(pool: Ranks, stage: int) -> None:
    """Replaced, new or unfrozen after sharding: the step says so, instead of leaving it as it is."""
    for assigned, replaced, added, unfrozen in pool.play(2, programs.other_parameters, stage):
        for said, name in ((assigned, "scale"), (replaced, "scale"), (added, "extra")):
            assert f"LocalError: {name} is another parameter" in said or (stage == 3 and said.startswith("LocalError"))
        assert "LocalError: frozen.weight was frozen when the model was sharded" in unfrozen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_gradients_are_added_up_in_float32(pool: Ranks, stage: int, sync: bool) -> None:
    """64 equal ones, reduced each for itself or all at the end, are 64 times one of them: in bfloat16 they are not."""
    assert all(pool.play(2, programs.many_micro_batches, stage, sync, 64))


@pytest.mark.parametrize("stage", [1, 2])
def test_float32_values_of_all_that_computes_in_bfloat16(pool: Ranks, stage: int) -> None:
    """Every rank can have them whole: trained ones as they are stepped, frozen ones as they were before sharding."""
    assert pool.play(2, programs.wide_values, stage) == [(True, True, True)] * 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_written_into_parameters_counts(pool: Ranks, stage: int, dtype: torch.dtype | None) -> None:
    """Any code may write it; with float32 copies as without, the next step begins with it."""
    for found in pool.play(2, programs.written, stage, dtype):
        assert found == dict.fromkeys(programs.WRITINGS, True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_training_goes_on_after_a_backward_pass_that_broke_off(pool: Ranks, stage: int, clears: bool) -> None:
    """On all ranks, some buckets sent: nobody waits for the others, and nothing is left of it."""
    wanted, _, _ = cases.alone(2, "sgd", steps=2)
    for found in pool.play(2, programs.broken_off, stage, clears):
        assert found.keys() == wanted.keys()
        assert all(
            torch.allclose(value, wanted[name], rtol=0, atol=0 if clears else 1e-6) for name, value in found.items()
        )


@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_stage_1_are_in_memory_once(pool: Ranks, again: bool) -> None:
    """Each goes to its place in the bucket when it comes, and leaves a stand-in, which has one value."""
    for nbytes in pool.play(2, programs.beside_their_places, again):
        assert 0 < nbytes <= 4 * len(list(cases.Odd().parameters()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bucket_bytes", [1000, 300])
@pytest.mark.parametrize("stage", [1, 2])
def test_activation_checkpoints_are_one_backward_pass(pool: Ranks, stage: int, bucket_bytes: int) -> None:
    """Reentrant ones, too, which run one for each segment: the same weights, and nothing sent for each.

    Only a layer that comes again after its bucket was sent has all of them sent again.
    """
    for plain, new, reentrant in pool.play(2, programs.checkpointed, stage, bucket_bytes):
        assert plain == new == (True, plain[1])
        assert reentrant == (True, plain[1] * (1 if bucket_bytes == 1000 else 2))


@pytest.mark.parametrize("stage", [1, 2])
def test_scaled_losses_are_refused(pool: Ranks, stage: int) -> None:
    """Each rank would decide for itself whether it steps."""
    assert all("GradScaler cannot be used" in said for said in pool.play(2, programs.scaled_loss, stage))


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_with_a_graph_are_refused(pool: Ranks, stage: int) -> None:
    """What is sent to owners has none."""
    assert all("create_graph=True" in said for said in pool.play(2, programs.graph_of_gradients, stage))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_counts_what_the_optimizer_lists(pool: Ranks, stage: int) -> None:
    """In all stages, though others have gradients in stage 3."""
    for norm, wanted in pool.play(2, programs.norm_of_listed, stage):
        assert norm == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_learning_rates_that_part_are_told_on_all_ranks(pool: Ranks, stage: int) -> None:
    """A schedule that goes by each rank's own loss: every owner would step its tiles with its own rate."""
    for said in pool.play(2, programs.rates_that_part, stage):
        assert "ConfigError: rank 1 gave something else than rank 0: 'group 0 lr=0.00" in said


@pytest.mark.parametrize("stage", [1, 2])
def test_who_cannot_step_tells_all(pool: Ranks, stage: int) -> None:
    """Nobody waits for it."""
    first, second = pool.play(2, programs.one_cannot_step, stage)
    assert "LocalError: another rank cannot step" in first
    assert "LocalError: scale is another parameter" in second


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_without_values(pool: Ranks, stage: int) -> None:
    """It has no tiles, and needs none."""
    assert pool.play(2, programs.without_values, stage) == [([0, 3], True)] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_that_an_optimizer_lists(pool: Ranks, stage: int) -> None:
    """`AdamW(model.parameters())`: they are named in their place, and not trained."""
    for listed, names, changed in pool.play(2, programs.frozen_listed, stage):
        assert listed == [["frozen.weight", "frozen.bias", "scale"]]
        assert names == [["scale"]]
        assert changed == {"scale"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
def test_copies_of_a_model_are_plain_models(pool: Ranks, stage: int, dtype: torch.dtype | None) -> None:
    """`deepcopy`, `AveragedModel`, `torch.save(model)`: without the optimizer; whoever trains them sends nothing."""
    assert pool.play(2, programs.copied, stage, dtype) == [(True, True, True)] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_models_in_one_backward_pass(pool: Ranks, stage: int) -> None:
    """Each gets its own gradients, as long as ranks have the same order; all are told if they have not."""
    for said, apart in pool.play(2, programs.two_models, stage, True):
        assert said == ""
        assert apart < 1e-6
    for rank, (said, _) in enumerate(pool.play(2, programs.two_models, stage, False)):
        assert "LocalError: this rank is at the sharded model number" in said
        assert f"and rank {1 - rank} at number" in said


def test_clipping_by_the_largest_value(pool: Ranks) -> None:
    """In stage 3, where a rank has no row of some parameters."""
    first, second = pool.play(2, programs.largest_gradient)
    assert first[0] == second[0] == pytest.approx(first[1], rel=1e-5)


def test_stage_3_over_other_backends(pool: Ranks) -> None:
    """Their own reduce-scatter gets bfloat16, and what is added up before is float32."""
    assert all(pool.play(2, programs.many_micro_batches, 3, False, 64, False))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_one_rank_clears(pool: Ranks, stage: int, late: bool) -> None:
    """Half of a step would be taken, or a gradient half as large: all ranks are told, and nothing is stepped."""
    for said, distance in pool.play(2, programs.cleared_on_one_rank, stage, late):
        assert "ConfigError: rank 1 gave something else than rank 0: 'gradients of" in said
        assert "passes for layers.1." in said
        assert distance == 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_inner_optimizer_that_raises_on_one_rank(pool: Ranks, stage: int) -> None:
    """Is told on all ranks, and they still have the same weights."""
    first, second = pool.play(2, programs.inner_fails, stage)
    assert first == ("ConfigError: another rank cannot go on: rank 1: ArithmeticError: no more memory", True)
    assert second == ("ArithmeticError: no more memory", True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_graph_from_before_a_step(pool: Ranks, stage: int, dtype: torch.dtype | None) -> None:
    """Is not differentiated with the new weights: torch says so, on every rank, whoever owns which."""
    for first, second in pool.play(2, programs.old_graph, stage, dtype):
        assert first == ""
        assert "modified by an inplace operation" in second


@pytest.mark.parametrize("stage", [1, 2])
def test_a_layer_that_comes_again_on_one_rank_behind_its_bucket(pool: Ranks, stage: int) -> None:
    """With reentrant activation checkpoints: nobody waits for a second reduction that others do not start."""
    assert max(pool.play(2, programs.unlike_checkpoints, stage)) < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_of_a_program_in_its_backward_pass(pool: Ranks, stage: int) -> None:
    """A rank that waits for buckets goes on, since another may wait for it there."""
    for distance, alike in pool.play(2, programs.collective_in_backward, stage):
        assert distance > 0
        assert alike


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_call_of_shard_that_failed_is_called_again(pool: Ranks, stage: int) -> None:
    """It leaves the model's values as they were, and nothing that a second call would find twice."""
    for said, kept, alike in pool.play(2, programs.shared_again, stage):
        assert "ConfigError: rank 1 gave something else than rank 0: 'group 0 lr=1.1'" in said
        assert kept
        assert alike


def test_reentrant_checkpoints_within_each_other_in_stage_3(pool: Ranks) -> None:
    """FSDP2 does not reduce what they leave: told, with what to do."""
    assert all("use use_reentrant=False" in said for said in pool.play(2, programs.nested_checkpoints))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_that_some_micro_batches_do_not_use(pool: Ranks, stage: int) -> None:
    """In bfloat16, whose sums are float32: what has waited and what has come are reduced at once."""
    assert max(pool.play(2, programs.used_in_the_last_micro_batch, stage)) < 0.02


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for threads that hardly run")
def test_a_program_ends_well_with_threads_of_gloo_behind() -> None:
    """They want Python's lock to let go of tensors: once Python was ending, that aborted such programs."""
    command = [sys.executable, "-m", "tests.integration.late_threads"]
    ended = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, timeout=LONG_S, check=False)
    assert ended.returncode == 0, ended.stderr
