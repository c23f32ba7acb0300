"""Values of tensors are known again, wherever a change of them came from."""

from __future__ import annotations

import math

import pytest
import pytorch_optimizer
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.compression import view_bytes
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.join.shared_state import share
from shoal.state.wire import StateAway
from shoal.strategies.local_updates import LocalTrainingState
from shoal.train import value_mark
from shoal.train.training_state import TrainingState
from shoal.train.value_mark import Changed, ValueMark


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of several forms; one of them is not contiguous, one has no values, and one value is no number."""
    tensors = [torch.randn(4, 6).t(), torch.randn(3, 1, 2), torch.randn(()), torch.empty(0), torch.tensor([math.nan])]
    return [torch.nn.Parameter(each.to(dtype)) for each in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_that_were_put_back_are_those_of_before(dtype: torch.dtype) -> None:
    """The count of torch (`_version`) is another one then; and a change through `.data` does not count."""
    tensors = parameters(dtype)
    mark, before = ValueMark(tensors), [each.detach().clone() for each in tensors]
    assert mark.agrees()
    for each in tensors:
        each.data.copy_(each.data * 0.9 + 0.1)
    assert not mark.agrees()
    with torch.no_grad():
        for each, own in zip(tensors, before, strict=True):
            each.copy_(own)
    assert mark.agrees()
    mark.forget()
    assert not mark.agrees()
    mark.note()
    assert mark.agrees()


def test_a_change_of_a_row_that_is_not_looked_at_was_not_known() -> None:
    """Torch counts it. A change through `.data` is known by its values only."""
    table = torch.nn.Parameter(torch.randn(1000, 8))
    mark = ValueMark([table])
    assert mark.changed() is Changed.NOT
    with torch.no_grad():
        table[0].zero_()
    assert mark.changed() is Changed.WRITTEN
    mark.note()
    assert mark.changed() is Changed.NOT
    table.data.mul_(2.0)
    assert mark.changed() is Changed.VALUES


def test_changes_are_those_of_the_state_here_since_the_last_check() -> None:
    """What an earlier check has seen is over, and so is what was changed in a state before another was loaded."""
    parameter = torch.nn.Parameter(torch.ones(300))
    training = TrainingState(torch.optim.SGD([parameter], lr=0.1))
    parameter.grad = torch.ones(300)

    def batch() -> None:
        assert training.accumulate(1)

    batch()
    parameter.data.fill_(2.0)
    batch()
    with torch.no_grad():
        parameter[0] = 7.0
    batch()
    assert [training.weights.changes.since(look) for look in range(4)] == [
        Changed.VALUES,
        Changed.VALUES,
        Changed.WRITTEN,
        Changed.NOT,
    ]
    values, tensors = training.export()
    training.load(values, [each.clone() for each in tensors])
    assert training.weights.changes.since(0) is Changed.NOT
    batch()
    assert training.weights.changes.since(0) is Changed.NOT


def test_a_peer_that_evaluated_with_the_weights_of_its_optimizer_counted_as_changed() -> None:
    """ScheduleFree's are put in place and taken back by shoal itself."""
    parameter = torch.nn.Parameter(torch.ones(300))
    training = TrainingState(pytorch_optimizer.ScheduleFreeAdamW([parameter], lr=0.1))
    training.weights.train()
    stepped(training)
    training.weights.evaluate()
    training.weights.train()
    stepped(training)
    assert training.weights.changes.since(0) is Changed.NOT


def test_a_copy_of_other_values_is_seen() -> None:
    """Also if the tensors are what they were again: the copy was made in between, of one of them."""
    tensors = parameters()
    mark = ValueMark(tensors)
    copies = [view_bytes(each.detach().clone().contiguous()) for each in tensors]
    assert mark.agrees_with(copies.__getitem__)
    copies[1] = view_bytes(tensors[1].detach() + 1)
    assert not mark.agrees_with(copies.__getitem__)


def test_a_look_at_many_tensors_reads_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 tensors it reads 64, the first and the last among them: nothing for each of them at each step."""
    tensors, read, real = [torch.nn.Parameter(torch.zeros(2)) for _ in range(20_000)], list[int](), value_mark._value

    def count(tensor: torch.Tensor, index: int) -> torch.Tensor:
        read.append(tensor.data_ptr())
        return real(tensor, index)

    monkeypatch.setattr(value_mark, "_value", count)
    mark = ValueMark(tensors)
    assert mark.agrees()
    assert len(read) == 64
    assert {tensors[0].data_ptr(), tensors[-1].data_ptr()} <= set(read)


def test_a_state_was_shared_while_other_weights_stood_in_its_place() -> None:
    """A donor and a checkpoint are refused until they are back."""
    parameter = torch.nn.Parameter(torch.ones(3))
    training = TrainingState(torch.optim.SGD([parameter], lr=0.1))
    parameter.data.fill_(2.0)
    with pytest.raises(StateAway, match="put those back first"):
        share(training, StateName.genesis(b""), Committed())
    parameter.data.fill_(1.0)
    state = share(training, StateName.genesis(b""), Committed())
    assert state.holds is not None
    assert state.holds(lambda _: view_bytes(torch.ones(3)))
    assert not state.holds(lambda _: view_bytes(torch.full((3,), 2.0)))


def stepped(training: TrainingState) -> None:
    """A batch, and a step from it."""
    for each in training.parameters:
        each.grad = torch.ones_like(each)
    assert training.accumulate(2)
    training.use_own_mean()
    training.step()


def test_a_program_that_clips_weights_after_each_step_could_not_save_nor_give_its_state() -> None:
    """What it has made of a step is what it trains from. A copy that was made while it did so is none, as before."""
    parameter = torch.nn.Parameter(torch.zeros(8))
    training = TrainingState(torch.optim.SGD([parameter], lr=1.0))
    for _ in range(4):
        stepped(training)
        parameter.data.clamp_(-0.5, 0.5)
    state = share(training, StateName.genesis(b""), Committed())
    assert state.holds is not None
    assert state.holds(lambda _: view_bytes(torch.full((8,), -0.5)))
    assert not state.holds(lambda _: view_bytes(torch.full((8,), -1.5)))
    assert training.weights.changes.since(0) is Changed.VALUES  # the check says so to others


def test_a_program_that_evaluates_between_all_steps_does_not_count_as_one_that_changes_weights() -> None:
    """It has put the weights back when the next batch comes."""
    parameter = torch.nn.Parameter(torch.zeros(8))
    training = TrainingState(torch.optim.SGD([parameter], lr=1.0))
    for _ in range(12):
        stepped(training)
        own = parameter.detach().clone()
        parameter.data.fill_(7.0)
        with pytest.raises(StateAway):
            share(training, StateName.genesis(b""), Committed())
        parameter.data.copy_(own)
    assert training.weights.changes.since(0) is Changed.NOT


def test_a_program_that_changed_its_weights_once_does_not_do_so_after_each_step() -> None:
    """It has loaded others between two steps: after some more, what stands there is an evaluation's."""
    parameter = torch.nn.Parameter(torch.zeros(8))
    training = TrainingState(torch.optim.SGD([parameter], lr=1.0))
    for number in range(6):
        stepped(training)
        if number == 1:
            parameter.data.fill_(3.0)
    assert not training.weights.changes.are_usual
    assert training.weights.changes.at == 2


class Moves:
    """In place of the vector of a round: says how it is taken."""

    taken = ""

    def overwrite(self) -> None:
        """The average is taken as it is."""
        self.taken = "overwrite"

    def apply(self, alpha: float) -> None:
        """What changed since the round began is added."""
        self.taken = f"apply {alpha:g}"


@pytest.mark.parametrize(("evaluates", "weight", "taken"), [(False, 2.0, "apply 1"), (True, 0.0, "overwrite")])
def test_local_updates_averaged_the_weights_of_an_evaluation(evaluates: bool, weight: float, taken: str) -> None:
    """They have no weight; and the difference to what was given is not added, as that is not what was trained."""
    parameter = torch.nn.Parameter(torch.ones(3))
    training, vector = LocalTrainingState(torch.optim.SGD([parameter], lr=0.1)), Moves()
    parameter.grad = torch.ones(3)
    assert training.accumulate(2)
    own = parameter.detach().clone()
    if evaluates:
        parameter.data.fill_(7.0)
    assert training.contribute()[0] == weight
    parameter.data.copy_(own)
    training.use_average(vector)  # type: ignore[arg-type]
    training.step()
    assert vector.taken == taken
    assert not training.weights.are_changed_unusually


def test_other_memory_is_looked_at_instead() -> None:
    """A tensor that `.data` gave other memory is read there, and its former memory is let go of."""
    tensors = parameters()
    mark = ValueMark(tensors)
    before = StorageWeakRef(tensors[0].untyped_storage())  # type: ignore[no-untyped-call]
    tensors[0].data = tensors[0].detach().clone()
    assert mark.agrees()
    tensors[0].data += 1
    assert not mark.agrees()
    assert before.expired()  # type: ignore[no-untyped-call]
