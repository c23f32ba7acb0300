"""Sharded training equals training on one process; it holds and sends what the laws say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import shoal.zero
from shoal.errors import ConfigError
from shoal.layout import tile_numel
from shoal.zero.plan.laws import ENGINES, Sizes, costs_of
from tests.integration import zero_cases as cases
from tests.integration.ranks import Failed, Ranks, ranks

TRAINED = sum(each.numel() for each in cases.Odd().parameters() if each.requires_grad)
FROZEN = sum(each.numel() for each in cases.Odd().parameters() if not each.requires_grad)
TENSORS = len(list(cases.Odd().parameters()))


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


def distance(states: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of any value of any rank."""
    for state in states:
        assert state.keys() == wanted.keys()
    return max(float((state[name] - value).abs().max()) for state in states for name, value in wanted.items())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_equals_one_process_to_the_bit(pool: Ranks, kind: str, stage: int, count: int) -> None:
    """Sums are in the order of the ranks, so several steps give the same bits on any number of them."""
    wanted, _, _ = cases.alone(count, kind)
    found = pool.play(count, cases.sharded, stage, kind)
    assert distance([state for state, *_ in found], wanted) == 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_has_state_from_the_beginning(pool: Ranks, stage: int) -> None:
    """Adagrad's sums are shared out with the parameters: to the bit."""
    wanted, _, _ = cases.alone(2, "adagrad")
    assert distance([state for state, *_ in pool.play(2, cases.sharded, stage, "adagrad")], wanted) == 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_without_sync_equals_one_process(pool: Ranks, stage: int) -> None:
    """Four micro-batches, of which the last one is reduced: to the bit."""
    wanted, _, _ = cases.alone(2, "adamw", micro=4)
    found = pool.play(2, cases.sharded, stage, "adamw", 4)
    assert distance([state for state, *_ in found], wanted) == 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_with_every_micro_batch_reduced(pool: Ranks, stage: int) -> None:
    """Another order of the same sums."""
    wanted, _, _ = cases.alone(3, "sgd", micro=3)
    found = pool.play(3, cases.sharded, stage, "sgd", 3, None, True)
    assert distance([state for state, *_ in found], wanted) < 1e-6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("count", "kind"), [(2, "sgd"), (3, "adamw"), (4, "sgd")])
def test_clipping_by_the_norm_of_all_shards(pool: Ranks, stage: int, count: int, kind: str) -> None:
    """Norms and weights, as of one process; every rank has the same norm."""
    wanted, norms, _ = cases.alone(count, kind, clip=0.05)
    assert min(norms) > 0.05, "the test clips"
    found = pool.play(count, cases.sharded, stage, kind, 1, 0.05)
    assert distance([state for state, *_ in found], wanted) < 1e-6
    assert all(each[1] == found[0][1] for each in found)
    assert found[0][1] == pytest.approx(norms, rel=1e-5)


def rows_of_one(parameters: Iterable[torch.Tensor], ranks: int) -> int:
    """Values that a rank has of these with FSDP2: of each the same number of rows, filled up."""
    return sum(-(-len(each) // ranks) * each[0].numel() for each in parameters)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_and_traffic_are_those_of_the_laws(pool: Ranks, stage: int, count: int) -> None:
    """Bytes of unique storages to padding; bytes sent to a tile."""
    found = pool.play(count, cases.sharded, stage, "adamw")
    (law,) = (
        each
        for each in costs_of(
            Sizes(4 * (TRAINED + FROZEN), 4 * TRAINED, 8 * TRAINED), count, stage=stage, micro_batches=1, backend="gloo"
        )
        if each.engine.name == "shoal.zero"
    )
    # FSDP2 fills up each parameter's rows; tiles are shared out to one. The state has a step counter for each.
    padding = 4 * tile_numel(TRAINED)
    counters = 4 * (TENSORS if stage == 3 else TRAINED // tile_numel(TRAINED) + TENSORS)
    for _, _, (parameters, gradients, state), _ in found:
        if stage == 3:
            assert parameters == 4 * rows_of_one(cases.Odd().parameters(), count)
            assert gradients == 4 * rows_of_one(
                (each for each in cases.Odd().parameters() if each.requires_grad), count
            )
            assert state <= 2 * gradients + counters
        else:
            assert abs(parameters - law.parameters) <= padding
            assert abs(gradients - law.gradients) <= padding
            assert abs(state - law.state) <= 2 * padding + counters
    in_all = sum(state for _, _, (_, _, state), _ in found)
    assert 8 * TRAINED <= in_all <= 8 * TRAINED + count * counters
    mean = sum(traffic.sent / traffic.steps for *_, traffic in found) / count
    assert mean == pytest.approx(law.sent, rel=1e-9 if stage < 3 else 0.1)
    assert all(traffic.steps == cases.STEPS for *_, traffic in found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_traffic_of_accumulation(pool: Ranks, stage: int, sync: bool) -> None:
    """What is reduced: once in a step, or once for each micro-batch. What is gathered: in stage 3 for each pass."""
    once = [traffic for *_, traffic in pool.play(2, cases.sharded, stage, "sgd")]
    found = [traffic for *_, traffic in pool.play(2, cases.sharded, stage, "sgd", 3, None, sync)]
    for more, one in zip(found, once, strict=True):
        assert more.reduced == one.reduced * (3 if sync else 1)
        assert more.gathered == one.gathered * (3 if stage == 3 else 1)


def test_stages_partition_more_and_more(pool: Ranks) -> None:
    """What the engines of the laws say, seen: each stage holds less than the one before."""
    held = [sum(pool.play(4, cases.sharded, stage, "adamw")[0][2]) for stage in (1, 2, 3)]
    assert held[0] > held[1] > held[2]
    assert {engine.stage for engine in ENGINES if engine.name == "shoal.zero"} == {1, 2, 3}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_sent_within_no_sync(pool: Ranks, stage: int) -> None:
    """Gradients stay where they are; a step without any that was reduced is refused."""
    for reduced, message in pool.play(2, cases.without_sync, stage):
        assert reduced == 0
        assert "no_sync" in message


@pytest.mark.one_in(3)
@pytest.mark.parametrize("factor", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_with_a_gradient_that_is_not_finite_is_left_out_by_all(pool: Ranks, stage: int, factor: float) -> None:
    """One rank's micro-batch is bad: no rank changes anything, and all go on."""
    for changed, skipped, changed_after in pool.play(3, cases.bad_gradient, stage, factor):
        assert (changed, skipped, changed_after) == (False, 1, True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_computes_narrow_and_steps_wide(pool: Ranks, stage: int) -> None:
    """Losses come near those of float32; the copies that are stepped are float32; a rank holds what the law says."""
    for dtype, wide, losses, plain, memory in pool.play(2, cases.narrow, stage):
        assert dtype == "torch.bfloat16"
        assert wide == {"torch.float32"}
        assert losses == pytest.approx(plain, abs=0.05)
        assert losses[-1] < losses[0]
        assert memory < 16 * (TRAINED + FROZEN) * 1.3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_schedule_is_that_of_one_process(pool: Ranks, stage: int) -> None:
    """To the bit: every group's learning rate changes on every rank, before and after each step."""
    wanted = cases.scheduled_alone(2)
    assert distance(pool.play(2, cases.scheduled, stage), wanted) == 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_schedulers_and_trainers_see_an_ordinary_optimizer(pool: Ranks, stage: int) -> None:
    """A learning-rate schedule works; `model.zero_grad` clears; groups cannot be added; the state goes out and in."""
    for rates, cleared, refused, same in pool.play(2, cases.ordinary, stage):
        assert rates == pytest.approx([1e-2, 5e-3, 2.5e-3])
        assert cleared
        assert "cannot be added" in refused
        assert same


@pytest.mark.parametrize("stage", [1, 2])
def test_what_no_rank_used_is_not_stepped(pool: Ranks, stage: int) -> None:
    """A parameter without gradient keeps its value, though the optimizer decays; one that a single rank used counts."""
    for unused, once in pool.play(2, cases.unused, stage):
        assert unused == 0.0
        assert once > 0.0


@pytest.mark.parametrize("stage", [1, 2])
def test_any_table_of_owners_will_do(pool: Ranks, stage: int) -> None:
    """Owners are looked up: scattered ones give what equal shares give, in many more pieces."""
    wanted, _, _ = cases.alone(3, "adamw", micro=2, clip=10.0)
    found = pool.play(3, cases.any_owners, stage)
    assert found[0][1] > 20
    assert distance([state for state, _ in found], wanted) < 1e-6


def test_a_model_that_was_sharded_already(pool: Ranks) -> None:
    """`fully_shard` by the user: taken as it is in stages 2 and 3, refused in 1."""
    wanted, _, _ = cases.alone(2, "adamw")
    for stage in (2, 3):
        found = pool.play(2, cases.sharded_by_user, stage)
        assert distance(found, wanted) == 0.0
    for failed in pool.outcomes(2, cases.sharded_by_user, 1):
        assert isinstance(failed, Failed)
        assert "stage 2 or 3, not 1" in failed.message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_full_state_dict_on_rank_0_alone(pool: Ranks, stage: int) -> None:
    """The others hold nothing; tied parameters come under both names."""
    first, second = pool.play(2, cases.full_on_rank_0, stage)
    assert first.keys() == cases.Odd().state_dict().keys()
    assert torch.equal(first["head.weight"], first["embedding.weight"])
    assert second == {}


BAD: dict[str, tuple[Any, str]] = {
    "stage": (cases.bad_stage, "stage must be 1, 2 or 3"),
    "built before": (cases.bad_built_before, "built before sharding"),
    "other tensors": (cases.bad_other_tensors, "other tensors than the model's"),
    "no optimizer": (cases.bad_no_optimizer, "must return a torch optimizer"),
    "models differ": (cases.bad_models_differ, "rank 1 gave something else than rank 0: 'extra.weight"),
    "groups differ": (cases.bad_groups_differ, "'group 0 lr=1.1' instead of 'group 0 lr=0.1'"),
    "tied on one rank": (cases.bad_tied_on_one_rank, "rank 1 gave something else than rank 0: 'head.weight"),
    "sharded on one rank": (cases.bad_sharded_on_one_rank, "'fully_shard was not applied' instead of"),
    "skips on one rank": (cases.bad_skips_on_one_rank, "skip_nonfinite False' instead of"),
    "one rank alone": (cases.bad_on_one_rank, "stage must be 1, 2 or 3, got 7"),
    "shared memory": (cases.bad_shared_memory, "share memory"),
    "a view in stage 3": (cases.bad_view, "share memory"),
    "empty": (cases.bad_empty, "empty has no values"),
    "sparse buffer": (cases.bad_sparse_buffer, "mask is a buffer with the layout torch.sparse_coo"),
    "scalar": (cases.bad_scalar, "is a scalar"),
    "mixed dtypes": (cases.bad_mixed_dtypes, "stage 3 computes the whole model in one dtype"),
    "dtype of sharded": (cases.bad_dtype_of_sharded, "MixedPrecisionPolicy"),
    "sparse": (cases.bad_sparse, "0 has sparse gradients"),
    "all at once": (cases.bad_together, "built Prodigy, which gives a tensor other weights if another rank steps"),
    "an object": (cases.bad_kept, "keeps 'pre_conditioner', of type PreConditioner, which cannot be saved"),
    "nothing to train": (cases.bad_nothing, "nothing to train"),
    "meta": (cases.bad_meta, "meta device"),
    "twice": (cases.bad_twice, "sharded already"),
    "moved": (cases.bad_moved, "was moved, converted or tied"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said_on_every_rank(pool: Ranks, name: str) -> None:
    """Nobody hangs, whoever made the mistake; and the next test can use the processes."""
    function, message = BAD[name]
    for failed in pool.outcomes(2, function):
        assert isinstance(failed, Failed), failed
        assert failed.kind in ("ConfigError", "LocalError")
        assert message in failed.message


def test_arguments_of_wrong_types(pool: Ranks) -> None:
    """Python's own errors came out of these, or another argument was named."""
    for said in pool.play(2, cases.said_of_arguments):
        assert "units must be a list of modules of the model, got 5" in said["units"]
        assert "weights must be a path" in said["weights"]
        assert "sharded already" in said["twice"]
        assert "max_norm must be a number above 0, got None" in said["max_norm"]
        assert "norm_type must be a number above 0, got 'two'" in said["norm_type"]
        assert "model must be the one that shard() returned" in said["save another"]
        assert "model must be the one that shard() returned" in said["load another"]
        assert "optimizer must be the one that shard() returned, got a SGD" in said["save unsharded"]


def test_without_a_process_group() -> None:
    """Says what to do."""
    with pytest.raises(ConfigError, match="torchrun"):
        shoal.zero.shard(cases.Odd(), torch.optim.SGD, stage=1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_is_killed_is_named_by_all_others(pool: Ranks, stage: int) -> None:
    """In the middle of a step; nobody waits longer than the group's timeout."""
    outcomes = pool.outcomes(3, cases.killed, stage, killed=1)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], Failed), outcomes[rank]
        assert outcomes[rank].kind == "RankLost"
        assert "rank 1 gone" in outcomes[rank].message


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_frozen_rank_is_named_while_others_wait_for_it(pool: Ranks, stage: int) -> None:
    """By a warning, before the group's timeout; when it wakes, all goes on as before. How soon: test_zero_watch.py."""
    first, second, third = pool.outcomes(3, cases.frozen, stage, frozen=1)
    for named, same in (first, third):
        assert [words.partition(" gives no sign of life")[0] for words in named] == ["rank 1"]
        assert same
    assert second == ([], True)


def test_ranks_that_do_different_things_are_told_what(pool: Ranks) -> None:
    """Nobody is gone, and all wait in vain: each learns where it and the others are."""
    first, second = pool.outcomes(2, cases.out_of_step)
    assert first.kind == second.kind == "RankLost"
    assert "operation 1, an all-gather of 20 bytes" in first.message
    assert "rank 1 in operation 1, a reduce-scatter of 12 bytes" in first.message
    assert "rank 0 in operation 1, an all-gather of 20 bytes" in second.message
