"""Gradients between two steps: what is summed, what is contributed, and whose `.grad` is whose."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import pytorch_optimizer
import torch

from shoal.averaging.allreduce.segments import LARGEST
from shoal.averaging.allreduce.vector import Vector, describe
from shoal.compression import NoCompression
from shoal.errors import ConfigError, StateUnavailable
from shoal.events import EventBus, Warned
from shoal.protocol.wire import decode_plain, encode
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import UNDECIDED, StateName
from shoal.run.join.shared_state import share, why_not_ours
from shoal.run.report.notices import Notices
from shoal.state.wire import Manifest, StateTensorSpec
from shoal.strategies import DiLoCo, LocalSGD, StreamingDiLoCo
from shoal.strategies.low_rank_training import LowRankTrainingState
from shoal.strategies.outer import LocalSteps
from shoal.train.inner import make_optimizer, make_scheduler
from shoal.train.offload import Offload
from shoal.train.options import options_of
from shoal.train.training_state import TrainingState


def state(*shapes: tuple[int, ...], unit: int = 4) -> tuple[TrainingState, list[torch.nn.Parameter]]:
    """One with SGD at learning rate 1 over parameters of zeros: after a step they are minus the gradient."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return TrainingState(torch.optim.SGD(parameters, lr=1.0), unit=unit), parameters


def accumulate(training: TrainingState, parameters: Sequence[torch.Tensor], value: float, samples: int) -> None:
    """One batch whose gradient is `value` everywhere."""
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    assert training.accumulate(samples)


def test_the_summary_says_in_words_how_tensors_differ() -> None:
    """Peers with another dtype, another order or a frozen weight were shown two hashes, and nothing else."""
    training, parameters = state((2, 3), (4,))
    start, shapes = training.tensors.summary().rsplit(" ", 1)
    assert start == "2 with 10 elements of float32, 2 trained, shapes in order"
    other_order = state((4,), (2, 3))[0].tensors.summary()
    assert other_order.startswith(start)
    assert not other_order.endswith(shapes)
    parameters[0].requires_grad_(False)
    assert "of float32, 1 trained" in training.tensors.summary()
    parameters[1].data = parameters[1].data.bfloat16()
    assert "of bfloat16 and float32, 1 trained" in training.tensors.summary()


@pytest.mark.parametrize("unit", [1, 4, 10])
def test_the_mean_counts_samples(unit: int) -> None:
    """Batches of 1 and 3 samples: the larger one has three times the weight; in the second step as in the first."""
    training, parameters = state((2, 3), (), unit=unit)
    for _ in range(2):
        accumulate(training, parameters, 1.0, 1)
        accumulate(training, parameters, 5.0, 3)
        weight, factor = training.contribute()
        assert weight == 4
        torch.testing.assert_close(training.accumulators[0] * factor, torch.full((2, 3), 4.0))
        training.use_own_mean()
        training.step()
    assert training.epoch == 2
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, -8.0))


def test_half_precision_sums_do_not_overflow() -> None:
    """A gradient of 100 from 1,024 samples is no more than that, though 100 x 1,024 is more than float16 can hold."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    training = TrainingState(torch.optim.SGD([parameter], lr=1.0), unit=2048)
    for _ in range(2):
        accumulate(training, [parameter], 100.0, 1024)
    training.use_own_mean()
    training.step()
    assert parameter.tolist() == [-100.0] * 3


def test_gradients_of_the_user_stay_the_users() -> None:
    """The step is taken from the average; `.grad` is afterwards what and where it was."""
    training, parameters = state((3,), (2,))
    accumulate(training, parameters, 1.0, 4)
    mine = [parameter.grad for parameter in parameters]
    parameters[1].grad = None
    training.use_own_mean()
    training.step()
    assert mine[0] is not None
    assert parameters[0].grad is mine[0]
    assert parameters[1].grad is None
    assert mine[0].tolist() == [1.0] * 3
    assert parameters[1].tolist() == [-1.0] * 2


def test_a_step_that_fails_gives_the_gradients_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the torch optimizer raises."""
    training, parameters = state((3,))
    accumulate(training, parameters, 1.0, 4)
    mine = parameters[0].grad
    training.use_own_mean()

    def broken() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(training.optimizer, "step", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        training.step()
    assert parameters[0].grad is mine


def test_what_was_stepped_from_is_forgotten() -> None:
    """A parameter without a gradient counts as zero, and a peer without samples contributes numbers, with weight 0."""
    training, parameters = state((3,), (2,))
    accumulate(training, parameters, 1.0, 4)
    training.use_own_mean()
    training.step()
    for accumulator in training.accumulators:
        accumulator.fill_(torch.nan)
    assert training.contribute() == (0.0, 0.0)
    assert [accumulator.tolist() for accumulator in training.accumulators] == [[0.0] * 3, [0.0] * 2]
    accumulate(training, parameters, 1.0, 4)
    training.discard()
    parameters[1].grad = None
    parameters[0].grad = torch.full((3,), 2.0)
    training.accumulate(4)
    assert [accumulator.tolist() for accumulator in training.accumulators] == [[2.0] * 3, [0.0] * 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("first", [False, True])
def test_a_batch_that_cannot_be_summed_is_left_out(first: bool, bad: float) -> None:
    """And no more than that: what was accumulated before, and comes after it, counts."""
    training, parameters = state((3,), (2,))
    if not first:
        accumulate(training, parameters, 1.0, 2)
    parameters[0].grad = torch.zeros(3)
    parameters[1].grad = torch.tensor([0.0, bad])
    assert not training.accumulate(2)
    assert (training.pending.left_out, training.pending.left_out_for) == (1, 1)
    if first:
        accumulate(training, parameters, 1.0, 2)
    accumulate(training, parameters, 3.0, 2)
    assert training.pending.samples == 4
    assert training.unfit() is None
    training.use_own_mean()
    training.step()
    assert [parameter.tolist() for parameter in parameters] == [[-2.0] * 3, [-2.0] * 2]


def told_of_left_out(training: TrainingState, batches: int = 1) -> list[str]:
    """What a user is warned of when so many more batches come with gradients that are not finite."""
    bus, said = EventBus(), list[str]()
    bus.subscribe(lambda event: said.append(event.message) if isinstance(event, Warned) else None)
    notices = Notices(bus, "run")
    for _ in range(batches):
        training.trained[-1].grad = torch.full_like(training.trained[-1], math.nan)
        assert not training.accumulate(1)
        notices.accumulated(training)
    return said


def test_adamw_made_nan_weights_in_float16_and_the_warning_blamed_the_gradients() -> None:
    """It said that batches are left out because of their gradients; but the weights are gone, and no batch counts."""
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2)]
    training = TrainingState(torch.optim.AdamW(parameters), unit=1)
    parameters[0].grad, parameters[1].grad = torch.ones(3).half(), torch.zeros(3).half()
    assert training.accumulate(1)
    training.use_own_mean()
    training.step()
    assert parameters[0].isfinite().all()
    assert parameters[1].isnan().all()
    (said,) = told_of_left_out(training, 20)
    assert "trained parameter 1 (float16) is not finite" in said
    assert "The optimizer's own step made it so" in said
    assert "eps of 1e-08 is 0 in float16, so AdamW divides by 0. Give eps=1e-4" in said
    assert "or keep the parameters in float32" in said


def test_advice_for_weights_that_are_not_finite_fits_their_cause() -> None:
    """Weights of float32, and weights that were broken from the beginning, need other remedies."""
    training, parameters = state((3,))
    parameters[0].data[1] = math.inf
    training.weights.note()  # it was so from the beginning
    (said,) = told_of_left_out(training)
    assert said.endswith("No step was taken yet: look at how the model was made or loaded")
    training.epoch = 1
    (said,) = told_of_left_out(training)
    assert said.endswith(
        "(it is taken from finite gradients only). Lower the learning rate, and begin from a finite state"
    )
    parameters[0].data[1] = 0.0
    training.weights.note()
    (said,) = told_of_left_out(training)
    assert "left out, because gradients are not finite" in said


@pytest.mark.parametrize("value", [1e35, 9e35, 1.1e36, 1e38, math.nan])
@pytest.mark.parametrize("samples", [1, 4, 64])
def test_what_is_fit_is_taken_by_a_round(value: float, samples: int) -> None:
    """Else every round would fail, and the accumulators would never be dropped."""
    training, _ = state((3,), unit=64)
    training.accumulators[0].fill_(value / samples)
    total = training.pending.total
    total.samples, total.bound, total.is_spent = samples, math.inf, False
    weight, scale = training.contribute()
    vector = Vector(training.accumulators, describe(training.accumulators, [NoCompression()]))
    if vector.copy_in(scale, weight) is not None:
        assert training.unfit() == 0


def test_batches_that_fit_can_make_a_sum_that_does_not() -> None:
    """What is known of the batches spares a look at the sum; the late ones are part of it, and a new sum knows none."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    training, large = TrainingState(torch.optim.SGD([parameter], lr=1.0), late=True), LARGEST[torch.float32] * 0.4
    accumulate(training, [parameter], large, 1)
    assert training.unfit() is None
    training.contribute()
    accumulate(training, [parameter], large, 1)
    training.pending.round_failed()
    assert training.unfit() == 0
    training.discard()
    accumulate(training, [parameter], 2.0, 1)
    training.accumulators[0].fill_(math.nan)
    assert training.unfit() is None, "it was read, although no batch was large"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_lose_no_gradients(dtype: torch.dtype) -> None:
    """In bfloat16 a sum of 256 takes nothing more: the mean of 1,024 ones was a quarter."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    training = TrainingState(torch.optim.SGD([parameter], lr=1.0), unit=1)
    for _ in range(4096):
        accumulate(training, [parameter], 1.0, 1)
    training.use_own_mean()
    training.step()
    assert parameter.tolist() == [-1.0] * 3
    assert parameter.dtype is dtype


def test_what_is_too_large_for_the_parameters_dtype_is_cut() -> None:
    """A mean that float16 cannot hold would make the parameter infinite."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    training = TrainingState(torch.optim.SGD([parameter], lr=0.5), unit=1)
    accumulate(training, [parameter], 1.0, 1)
    training.accumulators[0].fill_(1e6)
    training.use_own_mean()
    training.step()
    assert parameter.tolist() == [-65504.0 / 2] * 3


@pytest.mark.parametrize("by_others", [True, False])
def test_a_parameter_that_is_frozen_here_and_moved_by_others_is_told(*, by_others: bool) -> None:
    """Nothing was said, and the layer that was to stay as it is went on to change. Frozen on all peers, it stays."""
    training, (first, frozen) = state((3,), (2,))
    told: list[str] = []
    events = EventBus()
    events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    notices = Notices(events, "run")
    frozen.requires_grad_(False)
    for _ in range(4):
        accumulate(training, [first], 1.0, 4)
        training.accumulators[1].fill_(float(by_others))
        training.use_accumulators()
        training.step(unused=set() if by_others else {1})
        notices.stepped(training)
    assert frozen.tolist() == [-4.0 * by_others] * 2
    assert [message.split(" (")[0] for message in told] == ["trained parameter 1 is frozen here"] * by_others


def test_other_parameters_than_at_the_beginning_are_refused() -> None:
    """They would be stepped with this peer's own gradients, and the swarm's states drift apart."""
    first, frozen = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    frozen.requires_grad_(False)
    training = TrainingState(torch.optim.SGD([first, frozen], lr=1.0))
    first.grad = frozen.grad = torch.ones(3)  # of the time before it was frozen
    training.accumulate(1)
    training.use_own_mean()
    training.step()
    assert (first.tolist(), frozen.tolist()) == ([-1.0] * 3, [0.0] * 3)
    assert frozen.grad is not None
    frozen.requires_grad_(True)
    with pytest.raises(ConfigError, match="parameter 1 of the optimizer requires a gradient, and did not"):
        training.accumulate(1)
    frozen.requires_grad_(False)
    with torch.no_grad():
        frozen.data = frozen.data.double()
    with pytest.raises(ConfigError, match=r"parameter 1 of the optimizer is torch\.float64 .* now, and was"):
        training.accumulate(1)
    frozen.data = frozen.data.float()
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigError, match="has 3 parameters, and had 2"):
        training.accumulate(1)


def test_masks_are_part_of_the_state_and_not_averaged() -> None:
    """An infinity has no mean: no averaging of states would ever succeed."""
    parameter, mask, mean = torch.nn.Parameter(torch.zeros(3)), torch.tensor([0.0, -math.inf]), torch.zeros(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    training = TrainingState(optimizer, extra_tensors=[mask, mean, torch.tensor(3)])
    assert [id(tensor) for tensor in training.state_tensors] == [id(parameter), id(mean)]
    assert len(training.export()[1]) == 4


def test_sparse_gradients_are_summed() -> None:
    """Of an embedding, say: twice, as the first sum of a step goes another way than the second."""
    table = torch.nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    training = TrainingState(torch.optim.SGD(table.parameters(), lr=1.0), unit=4)
    for _ in range(2):
        for _ in range(2):
            table(torch.tensor([1, 3])).sum().backward()
            training.accumulate(2)
            table.zero_grad()
        training.use_own_mean()
        training.step()
    moved = torch.zeros(5, 2)
    moved[[1, 3]] = -2.0
    torch.testing.assert_close(table.weight.detach(), before + moved)


@pytest.mark.parametrize("kind", ["whole", "late", "offloaded", "low rank"])
@pytest.mark.parametrize(
    "factory", [partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)]
)
def test_a_sparse_embedding_trains_as_a_dense_one(kind: str, factory: Callable[[Any], torch.optim.Optimizer]) -> None:
    """To the bit, also with optimizers that take no sparse gradients; the user's own gradients stay sparse."""
    weights = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table, head = torch.nn.Embedding(50, 4, sparse=sparse), torch.nn.Linear(4, 1)
        parameters = [*table.parameters(), *head.parameters()]
        inner = factory(parameters)
        training = (
            LowRankTrainingState(inner, unit=4, rank=1, min_compression_ratio=0.1)
            if kind == "low rank"
            else TrainingState(
                inner, unit=4, late=kind == "late", offload=Offload(parameters) if kind == "offloaded" else None
            )
        )
        for number in range(8):
            rows = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(number))
            for parameter in parameters:
                parameter.grad = None
            torch.autograd.backward(head(table(rows)).square().mean())
            assert training.accumulate(2)
            if number % 2:
                training.use_own_mean()
                training.counted()
                training.step()
                assert table.weight.grad is not None
                assert table.weight.grad.is_sparse == sparse
        weights.append([parameter.detach() for parameter in parameters])
    assert all(map(torch.equal, *weights))


def test_gradients_that_come_after_the_average_are_dropped() -> None:
    """The round is over: they were computed from parameters that are about to change."""
    training, parameters = state((3,))
    accumulate(training, parameters, 1.0, 4)
    training.use_own_mean()
    parameters[0].grad = torch.full((3,), 7.0)
    assert not training.accumulate(4)
    training.step()
    assert parameters[0].tolist() == [-1.0] * 3


@pytest.mark.parametrize(("infinite", "taken"), [((), True), ((1,), True), ((0,), False), ((1, 2), False)])
def test_a_state_with_infinities_in_what_is_trained_is_not_taken(infinite: tuple[int, ...], taken: bool) -> None:
    """Extra tensors may hold some; of parameters and the optimizer's statistics a donor may say it, and is refused."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    training = TrainingState(torch.optim.SGD([parameter], lr=1.0), extra_tensors=[torch.zeros(3)])
    optimizer = training.optimizer
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(3)
    specs = tuple(StateTensorSpec((3,), torch.float32, NoCompression()) for _ in range(3))
    metadata = {"state": [4, b"d" * 32, 100], "training": training.export()[0]}
    manifest = Manifest(b"s" * 16, 4, metadata, specs, 1 << 20, (b"h" * 32,), infinite)
    why = why_not_ours(training, manifest, None)
    assert (why is None) == taken
    assert why is None or f"tensor {infinite[-1] if 1 in infinite else 0} of its state" in why


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"state": [4, b"d" * 32, 101]}, None),
        ({"state": [4, b"d" * 32, 100]}, "no better than ours"),
        ({"state": [4, b"d" * 32, 99]}, "no better than ours"),
        ({"state": [5, b"d" * 32, 0]}, "of epoch 5, and offered as one of epoch 4"),
        ({"state": "?"}, "no name"),
        ({"state": [4, b"d", 101]}, "no name"),
        ({"state": [-1, b"d" * 32, 101]}, "no name"),
        ({"state": [1 << 60, b"d" * 32, 101]}, "no name"),
        ({"state": [4, b"d" * 32, -1]}, "no name"),
        ({"state": [4, b"d" * 32, 1 << 63]}, "no name"),
        ({}, "no name"),
        (7, "no name"),
    ],
)
def test_a_copy_that_is_no_better_than_ours_is_not_fetched(metadata: object, why: str | None) -> None:
    """Its name stands in the manifest: that it is of no use is found out before it was downloaded, not after."""
    training = TrainingState(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0))
    spec = StateTensorSpec((3,), torch.float32, NoCompression())
    if isinstance(metadata, dict):
        metadata = {**metadata, "training": training.export()[0]}
    manifest = Manifest(b"s" * 16, 4, metadata, (spec,), 1 << 20, (b"h" * 32,))
    found = why_not_ours(training, manifest, StateName(4, b"d" * 32, 100).key)
    assert found is None if why is None else why in (found or "")


def test_a_copy_that_names_a_state_of_ours_otherwise_was_taken_for_a_better_one() -> None:
    """Nobody else could have it: peers at that digest meet under the epoch that it has."""
    training = TrainingState(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0))
    spec = StateTensorSpec((3,), torch.float32, NoCompression())
    ours, theirs = StateName(4, b"d" * 32, 100), StateName(9, b"d" * 32, 900)
    metadata = {"state": [*theirs], "training": training.export()[0]}
    manifest = Manifest(b"s" * 16, 9, metadata, (spec,), 1 << 20, (b"h" * 32,))
    assert why_not_ours(training, manifest, ours.key) is None
    found = why_not_ours(training, manifest, ours.key, is_false=lambda key: key == theirs.key)
    assert "has other samples, or another epoch" in (found or "")


KEEPERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "z": pytorch_optimizer.ScheduleFreeAdamW,
    "lookahead_params": partial(pytorch_optimizer.Ranger21, num_iterations=100),
    "p0": pytorch_optimizer.Prodigy,
    "slow_params": lambda params: pytorch_optimizer.Lookahead(torch.optim.SGD(params, lr=0.1), k=5),
}


@pytest.mark.parametrize("name", KEEPERS)
@pytest.mark.parametrize(
    "strategy", [LocalSGD(4), DiLoCo(4), StreamingDiLoCo(4, fragments=1, overlap=2, mixing=0.5)], ids=str
)
def test_weights_that_the_inner_optimizer_keeps_move_with_the_parameters(name: str, strategy: Any) -> None:
    """They stayed: the next steps of ScheduleFree and Lookahead led a newcomer back to its first weights."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(1))]
    training = LocalSteps(KEEPERS[name](parameters), None, (), strategy.merging)
    fragment = training.fragments[0]

    def apart() -> list[torch.Tensor]:
        return [training.optimizer.state[each][name].view_as(each) - each.detach() for each in parameters]

    def train() -> None:
        for _ in range(4):
            for each in parameters:
                each.grad = torch.randn_like(each)
            training.accumulate(4)

    train()
    before, weights = apart(), [each.detach().clone() for each in parameters]
    for each in parameters:
        each.grad = torch.ones_like(each)
    with training.moving(parameters):  # to look for such weights moves none
        pass
    torch.testing.assert_close([each.detach() for each in parameters], weights, rtol=0, atol=0)
    values, tensors = fragment.export()
    fragment.load({**values, "epoch": 3}, [each + 5.0 for each in tensors])
    assert all(bool((each.detach() > 1.0).all()) for each in parameters)
    torch.testing.assert_close(apart(), before, rtol=0, atol=1e-5)
    train()
    before = apart()
    fragment.contribute()
    fragment.use_accumulators()
    fragment.step()
    torch.testing.assert_close(apart(), before, rtol=0, atol=1e-5)


def test_moments_do_not_move_with_the_parameters() -> None:
    """They are no weights."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    training = LocalSteps(torch.optim.AdamW([parameter]), None, (), DiLoCo(4).merging)
    accumulate(training, [parameter], 1.0, 4)
    moments = {name: each.clone() for name, each in training.optimizer.state[parameter].items()}
    values, tensors = training.fragments[0].export()
    training.fragments[0].load({**values, "epoch": 3}, [each + 5.0 for each in tensors])
    assert bool((parameter.detach() > 4.0).all())
    torch.testing.assert_close(dict(training.optimizer.state[parameter]), moments, rtol=0, atol=0)


def test_of_models_with_other_first_weights_one_has_the_better_state_of_each_fragment() -> None:
    """Each fragment was taken of either peer: the model was put together of the first weights of both."""
    keys = []
    for seed in range(8):
        torch.manual_seed(seed)
        parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(4)]
        training = LocalSteps(torch.optim.SGD(parameters, lr=1.0), None, (), StreamingDiLoCo(8, fragments=4).merging)
        names = [
            StateName.genesis(each.fingerprint(), each.local.kept.steps_taken, model=training.fingerprint_of_model())
            for each in training.fragments
        ]
        assert len({name.digest for name in names}) == 4
        keys.append([name.key for name in names])
    assert {key.samples for row in keys for key in row} == {0}
    orders = [[keys.index(row) for row in sorted(keys, key=itemgetter(number))] for number in range(4)]
    assert orders == [orders[0]] * 4
    before = training.fingerprint_of_model()
    with torch.no_grad():
        parameters[0].add_(1.0)
    training.begin_anew()
    assert training.fingerprint_of_model() != before


def test_the_rank_of_a_beginning_is_that_of_its_weights_or_behind_all_that_are_there() -> None:
    """A newcomer with other weights never has the better state, whatever the digests."""
    ours, *others = (StateName.genesis(bytes([weights]), rank=UNDECIDED) for weights in range(4))
    alone = StateName.of_auxiliary(b"")
    assert ours.rank_among([]) == ours.rank_among([each.digest for each in (*others, ours, alone)]) == 0
    first, second = others[0].ranked(0), others[1].ranked(1)
    assert ours.rank_among([second.digest, first.digest, others[2].digest]) == 2
    assert ours.rank_among([first.digest, ours.ranked(4).digest, ours.ranked(2).digest]) == 2
    assert ours.rank_among([others[0].ranked(UNDECIDED - 1).digest]) == UNDECIDED - 1
    for weights in range(64):
        there, comes, auxiliary = (StateName.genesis(bytes([weights, peer]), rank=UNDECIDED) for peer in range(3))
        there = there.ranked(there.rank_among([]))
        assert comes.ranked(comes.rank_among([there.digest])).key < there.key
        assert StateName.of_auxiliary(auxiliary.digest).key < comes.key < comes.ranked(0).key


def test_a_checkpoint_without_a_step_of_the_swarm_has_the_rank_of_what_was_there() -> None:
    """Else its rank would be any; half of a state that was loaded is worse than any proper beginning."""
    before = StateName.genesis(b"weights", 5, rank=3)
    loaded, differs = before.after_loading(b"others"), before.after_difference(bytes(16), b"peer")
    assert (loaded.digest[0], loaded.samples) == (3, 5)
    assert differs.key < before.key
    unstepped = StateName.genesis(b"weights", rank=3)
    assert unstepped.after_difference(bytes(16), b"peer").key < unstepped.key


def test_who_begins_with_steps_of_the_inner_optimizer_has_the_better_state() -> None:
    """They were counted of the outer one, which has none: of a checkpoint of plain torch and random weights one won."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(7):
        parameter.grad = torch.ones(3)
        optimizer.step()
    fragment = LocalSteps(optimizer, None, (), DiLoCo(4).merging).fragments[0]
    assert fragment.local.kept.steps_taken == 7


@pytest.mark.parametrize(("epoch", "taken"), [(200_000, True), (200_001, False)])
def test_a_state_up_to_which_the_inner_schedule_moves_for_hours_is_not_taken(epoch: int, *, taken: bool) -> None:
    """The last epoch of any run, times 500 batches between two merges, was 5 billion steps of the schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    training = LocalSteps(optimizer, None, (), DiLoCo(500).merging).fragments[0]
    spec = StateTensorSpec((3,), torch.float32, NoCompression())
    metadata = {"state": [epoch, b"d" * 32, 101], "training": training.export()[0]}
    manifest = Manifest(b"s" * 16, epoch, metadata, (spec,), 1 << 20, (b"h" * 32,))
    found = why_not_ours(training, manifest, None)
    assert found is None if taken else "beyond any run with this strategy" in (found or "")


def test_the_inner_schedule_goes_back_with_a_state_of_an_earlier_epoch() -> None:
    """It stood still until the run came to where it was: the peer trained with another rate than the others."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    training = LocalSteps(optimizer, schedule, (), DiLoCo(4).merging)
    fragment = training.fragments[0]
    values, tensors = fragment.export()
    for epoch in (10, 3, 5):
        fragment.load({**values, "epoch": epoch}, tensors)
        accumulate(training, [parameter], 0.0, 4)
        batches = 4 * epoch + 1
        assert (training.schedule.count, optimizer.param_groups[0]["lr"]) == (batches, 1 / (1 + batches))


class OnlySteps:
    """A schedule without `state_dict`: the rate is one over its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self) -> None:
        """One step on."""
        self.last_epoch += 1
        self.optimizer.param_groups[0]["lr"] = 1 / (1 + self.last_epoch)


def test_a_schedule_that_cannot_go_back_waits_for_the_run() -> None:
    """It went on from where it was, 15 steps ahead of all others to the end, and nobody was told."""
    (mine, here), (theirs, there) = (
        (parameter, TrainingState(optimizer := torch.optim.SGD([parameter], lr=1.0), OnlySteps(optimizer), unit=4))
        for parameter in (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    )

    def step(parameter: torch.nn.Parameter, training: TrainingState) -> float:
        parameter.grad = torch.ones(3)
        training.accumulate(4)
        training.use_own_mean()
        training.step()
        return float(training.optimizer.param_groups[0]["lr"])

    for _ in range(40):
        step(mine, here)
    for _ in range(25):
        step(theirs, there)
    values, tensors = there.export()
    here.load(values, [tensor.clone() for tensor in tensors])
    assert here.schedule.steps_ahead == 15
    events, told = EventBus(), list[str]()
    events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    notices, rates = Notices(events, "run"), list[tuple[float, float]]()
    for _ in range(20):
        rates.append((step(mine, here), step(theirs, there)))
        notices.stepped(here)
    assert here.schedule.count == there.schedule.count == 45
    assert [left == right for left, right in rates] == [False] * 15 + [True] * 5
    assert [message.split(", and this")[0] for message in told] == [
        "the run went back, and the schedule cannot: it waits for 14 more steps of the run"
    ]


@pytest.mark.parametrize("epoch", [math.inf, math.nan, -1, 2.0, "3", None, 1 << 60])
def test_an_epoch_that_cannot_be_is_not_taken_over(epoch: object) -> None:
    """It decides how many steps the schedule is moved: nothing is changed, and nobody waits for the end of time."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    training = TrainingState(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10))
    values, tensors = training.export()
    with pytest.raises(StateUnavailable, match="does not fit here: an epoch of"):
        training.load({**values, "epoch": epoch}, [tensor + 1 for tensor in tensors])
    assert parameter.tolist() == [0.0] * 3
    training.load({**values, "epoch": 7}, [tensor + 1 for tensor in tensors])
    assert (training.epoch, parameter.tolist()) == (7, [1.0] * 3)


def test_groups_and_statistics_stay_the_same_objects_when_a_state_is_taken_over() -> None:
    """`swarm.param_groups` is the list of the inner optimizer: a rate that the user sets there must have an effect."""
    parameter, donors = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    donor = TrainingState(torch.optim.SGD([donors], lr=0.5, momentum=0.9), unit=4)
    accumulate(donor, [donors], 1.0, 4)
    donor.use_own_mean()
    donor.step()
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    groups, group, statistics = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    training = TrainingState(optimizer, unit=4)
    training.load(*donor.export())
    assert group["lr"] == 0.5
    assert statistics[parameter]["momentum_buffer"].tolist() == [1.0] * 3
    assert group["params"] == [parameter]
    assert optimizer.param_groups is groups
    assert optimizer.state is statistics
    group["lr"] = 2.0
    accumulate(training, [parameter], 1.0, 4)
    training.use_own_mean()
    training.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.5 - 2.0 * 1.9))


def test_a_learning_rate_of_numpys_own_kind_can_be_shared() -> None:
    """A schedule by `np.cos` leaves one, a float that no encoder takes: newcomers could never have had the state."""

    class Rate(float):
        """As `np.float64`."""

    parameter = torch.nn.Parameter(torch.zeros(3))
    training = TrainingState(torch.optim.SGD([parameter], lr=Rate(0.25)))
    values, _ = training.export()
    packed = decode_plain(encode(values))
    assert packed == values
    assert "0.25" in str(packed)


def test_the_name_of_a_beginning_tells_what_the_optimizer_has_kept() -> None:
    """Two with the same parameters and other statistics would step differently; who resumes has the better state."""
    parameter = torch.nn.Parameter(torch.zeros(3))

    def genesis(steps: int) -> StateName:
        optimizer = torch.optim.Adam([parameter], lr=0.0)
        for _ in range(steps):
            parameter.grad = torch.ones(3)
            optimizer.step()
        training = TrainingState(optimizer)
        return StateName.genesis(training.fingerprint(), training.local.kept.steps_taken)

    fresh, begun, resumed = genesis(0), genesis(2), genesis(7)
    assert fresh == genesis(0)
    assert begun == genesis(2)
    assert fresh.key < begun.key < resumed.key
    assert [name.epoch for name in (fresh, begun, resumed)] == [0, 0, 0]


def test_a_schedule_that_was_resumed_goes_on_at_a_newcomers() -> None:
    """It stands at another count than the epoch: the newcomer's follows the donor's, not the epoch."""

    def scheduled() -> TrainingState:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
        return TrainingState(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count)))

    def step(training: TrainingState) -> float:
        accumulate(training, training.trained, 1.0, 1)
        training.use_own_mean()
        training.step()
        return float(training.optimizer.param_groups[0]["lr"])

    donor, newcomer = scheduled(), scheduled()
    schedule: Any = donor.schedule.scheduler
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 9, "_step_count": 10})
    assert step(donor) == pytest.approx(1 / 11)
    newcomer.load(*donor.export())
    assert newcomer.epoch == donor.epoch == 1
    assert step(newcomer) == step(donor) == pytest.approx(1 / 12)


def test_statistics_by_rows_and_columns_are_taken_over() -> None:
    """Adafactor keeps no more than those of a matrix; what has another shape than any optimizer keeps is refused."""

    def adafactor() -> tuple[TrainingState, list[torch.nn.Parameter]]:
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 3), (5,), (2, 4, 3))]
        return TrainingState(torch.optim.Adafactor(parameters, lr=0.1), unit=4), parameters

    (donor, theirs), (newcomer, ours) = adafactor(), adafactor()
    for training in (donor, donor, newcomer):
        accumulate(training, training.trained, 1.0, 4)
        training.use_own_mean()
        training.step()
        if training is donor:
            newcomer.load(*donor.export())
    accumulate(donor, theirs, 1.0, 4)
    donor.use_own_mean()
    donor.step()
    newcomer.load(*donor.export())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    values, tensors = donor.export()
    fresh, _ = adafactor()
    wrong = [torch.zeros(7, 7) if tensor.shape == (4, 1) else tensor for tensor in tensors]
    for training in (newcomer, fresh):
        with pytest.raises(StateUnavailable, match=r"parameter 0 .* 'row_var' has shape \(7, 7\), and \(4, 1\) here"):
            training.load(values, wrong)


def test_learning_rates_that_are_tensors_follow_the_schedule() -> None:
    """Schedules change them in place: what is kept of them must not be the same tensor."""

    def scheduled() -> TrainingState:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=torch.tensor(1.0), foreach=False)
        return TrainingState(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    donor, newcomer = scheduled(), scheduled()
    rate = newcomer.optimizer.param_groups[0]
    for training in (donor, donor, newcomer, newcomer, newcomer, newcomer):
        accumulate(training, training.trained, 1.0, 1)
        training.use_own_mean()
        training.step()
    assert float(rate["lr"]) == 1 / 16
    newcomer.load(*donor.export())  # a client that ran ahead alone goes back
    assert float(rate["lr"]) == 1 / 4
    assert isinstance(rate["lr"], torch.Tensor)
    assert float(rate["initial_lr"]) == 1.0
    for training in (newcomer, donor):
        accumulate(training, training.trained, 1.0, 1)
        training.use_own_mean()
        training.step()
        assert float(training.optimizer.param_groups[0]["lr"]) == 1 / 8


def test_a_state_is_offered_without_loss() -> None:
    """Rounded, it would be another one under the same name; in float16 the 5,001st step would be the 5,000th."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    training = TrainingState(torch.optim.AdamW([parameter], lr=0.1))
    accumulate(training, [parameter], 1.0, 1)
    training.use_own_mean()
    training.step()
    assert share(training, StateName.genesis(b""), Committed()).codecs is None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch.optim.LBFGS, "is of type LBFGS, which computes the loss within its step"),
        (
            partial(pytorch_optimizer.SAM, base_optimizer=torch.optim.SGD),
            "is of type SAM, .* in place of SAM and its like",
        ),
        (pytorch_optimizer.AliG, "is of type AliG, which computes the loss within its step"),
        (pytorch_optimizer.AdaHessian, "is of type AdaHessian, which differentiates the gradients within its step"),
        (pytorch_optimizer.SophiaH, "is of type SophiaH, which differentiates the gradients within its step"),
        (torch.optim.SparseAdam, "is a SparseAdam, which takes sparse gradients only"),
    ],
)
def test_optimizers_that_cannot_step_from_an_average_are_refused(
    make: Callable[[Any], torch.optim.Optimizer], why: str
) -> None:
    """When the run is made, not by an internal error at its first step."""
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    for params, optimizer in ((parameters, make), (None, make(parameters))):
        with pytest.raises(ConfigError, match=why):
            make_optimizer(params, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_clipped_as_torch_clips(dtype: torch.dtype) -> None:
    """Over all parameters together; one below the limit stays as it is, and `.grad` is the user's."""
    for size, limit in ((3.0, 0.5), (0.01, 0.5)):
        parameters = [torch.nn.Parameter(torch.zeros(4, dtype=dtype)), torch.nn.Parameter(torch.zeros(2, dtype=dtype))]
        training = TrainingState(torch.optim.SGD(parameters, lr=1.0), max_grad_norm=limit)
        accumulate(training, parameters, size, 1)
        training.use_own_mean()
        training.step()
        plain = [torch.nn.Parameter(torch.zeros(4, dtype=dtype)), torch.nn.Parameter(torch.zeros(2, dtype=dtype))]
        for each in plain:
            each.grad = torch.full_like(each, size)
        torch.nn.utils.clip_grad_norm_(plain, limit)
        torch.optim.SGD(plain, lr=1.0).step()
        for got, want in zip(parameters, plain, strict=True):
            torch.testing.assert_close(
                got.detach(), want.detach(), rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=0
            )
            assert got.grad is not None
            assert bool((got.grad == torch.full_like(got, size)).all())


def late_one() -> tuple[TrainingState, list[torch.nn.Parameter]]:
    """With one batch of ones in a round, and one of threes after it."""
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    training = TrainingState(torch.optim.SGD(parameters, lr=1.0), unit=4, late=True)
    accumulate(training, parameters, 1.0, 4)
    assert training.contribute() == (4.0, 1.0)
    accumulate(training, parameters, 3.0, 8)
    return training, parameters


def test_a_late_batch_goes_into_the_next_step() -> None:
    """The step is of the batch that was in the round, the next one of the late batch, with its samples."""
    training, parameters = late_one()
    assert training.pending.samples == 4
    training.use_accumulators()
    accumulate(training, parameters, 5.0, 4)
    training.step()
    assert [each[0].item() for each in parameters] == [-1.0, -1.0]
    assert training.pending.samples == 12
    training.use_own_mean()
    training.step()
    assert [each[0].item() for each in parameters] == pytest.approx([-1 - (8 * 3 + 4 * 5) / 12] * 2)
    assert training.pending.samples == 0


def test_a_late_batch_joins_the_others_if_the_round_fails() -> None:
    """All of them were computed at one state."""
    training, parameters = late_one()
    training.pending.round_failed()
    assert training.pending.samples == 12
    accumulate(training, parameters, 0.0, 4)
    assert training.pending.samples == 16
    training.use_own_mean()
    training.step()
    assert [each[0].item() for each in parameters] == pytest.approx([-(4 * 1 + 8 * 3) / 16] * 2)


@pytest.mark.parametrize("event", ["discarded", "an error"])
def test_a_late_batch_of_a_state_that_is_over_counts_for_nothing(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another state was taken over; or the optimizer's step failed, and the state is no other peer's."""
    training, parameters = late_one()
    training.use_accumulators()
    if event == "discarded":
        training.discard()
    else:
        monkeypatch.setattr(training.optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            training.step()
    assert training.pending.samples == 0
    training.pending.round_failed()
    assert training.pending.samples == 0
    accumulate(training, parameters, 2.0, 4)
    assert training.contribute() == (4.0, 1.0)
    assert bool((training.accumulators[0] == 2.0).all())


def test_an_interrupt_within_a_late_batch_leaves_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the step that waits for the trainer could never be taken."""
    training, parameters = late_one()
    training.use_accumulators()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_add_", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            training.accumulate(4)
    training.step()
    assert parameters[0].tolist() == [-1.0] * 3
    assert training.pending.samples == 0, "of the late batches a part may be added: none counts"


@pytest.mark.parametrize("make", [pytorch_optimizer.LOMO, pytorch_optimizer.AdaLOMO])
def test_an_optimizer_that_steps_within_backward_is_refused(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """It would train alone: its gradients are gone when `step` is called."""
    with pytest.raises(ConfigError, match=r"has no step\(\)\. If it steps within backward"):
        make_optimizer(None, make(torch.nn.Linear(2, 1)))


def test_a_schedule_that_needs_a_measurement_is_refused() -> None:
    """Each peer has its own loss, and there is one schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    with pytest.raises(ConfigError, match="is a ReduceLROnPlateau, which needs a measurement"):
        make_scheduler(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_a_parameter_without_a_gradient_stays_as_torch_leaves_it() -> None:
    """Torch skips it; a gradient of zeros would be decayed. A member that joins with none and then gets one is in."""
    used, unused, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    training = TrainingState(torch.optim.AdamW([used, unused, late], lr=0.1, weight_decay=0.5), unit=1)
    used.grad = torch.ones(2)
    assert training.accumulate(1)
    assert training.pending.total.unused() == b"\x06"
    late.grad = torch.ones(2)
    assert training.accumulate(1)
    training.use_own_mean()
    training.step(unused=[1, 2])
    assert torch.equal(unused.detach(), torch.ones(2))
    assert unused not in training.optimizer.state
    assert not torch.equal(late.detach(), torch.ones(2))
    assert training.pending.total.unused() == b"\x07"


def test_a_step_is_taken_with_the_options_of_the_round() -> None:
    """Whatever the groups were set to meanwhile."""
    training, parameters = state((2,))
    agreed = options_of(training.optimizer.param_groups)
    training.optimizer.param_groups[0]["lr"] = 100.0
    accumulate(training, parameters, 1.0, 1)
    training.use_own_mean()
    training.step(agreed)
    assert torch.equal(parameters[0].detach(), torch.full((2,), -1.0))
    assert training.optimizer.param_groups[0]["lr"] == 1.0


def test_an_optimizer_in_eval_mode_takes_no_step() -> None:
    """ScheduleFree turns the parameters to those that are evaluated: gradients at them are of another point."""
    training, parameters = state((2,))
    training.optimizer.param_groups[0]["train_mode"] = False
    with pytest.raises(ConfigError, match="call train"):
        accumulate(training, parameters, 1.0, 1)
    training.optimizer.param_groups[0]["train_mode"] = True
    accumulate(training, parameters, 1.0, 1)


class Locked:
    """A schedule of a user's own, with a lock, as one has that logs to a file or a queue."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.lock = optimizer, threading.Lock()

    def step(self) -> None:
        """Half the rate."""
        self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        """All but the optimizer, as torch's own do."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As torch's own do."""
        vars(self).update(state)


def test_a_schedule_whose_state_cannot_be_copied_is_taken() -> None:
    """It raised TypeError: cannot pickle '_thread.lock' object. Such a schedule waits if the run goes back."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    here = TrainingState(optimizer, Locked(optimizer))
    here.resume(3, 3)
    assert optimizer.param_groups[0]["lr"] == 1.0  # that of the state
    here.resume(1, 1)
    assert here.schedule.error is None
    assert here.schedule.steps_ahead
