"""Samples that the model counts: right, or a `ConfigError` that says what to give."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from shoal.errors import ConfigError
from shoal.train.batch_rows import BatchRows, rows_of, samples_of
from shoal.train.rows import rows_in


class Net(torch.nn.Module):
    """A layer, and parameters that have no part in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
        self.back = torch.nn.Linear(3, 4)  # has a part in no call
        self.holder = torch.nn.Parameter(torch.empty(0))  # models read their device from it
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.unused = torch.nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scale has a part in one batch of four."""
        self.calls += 1
        result: torch.Tensor = self.net(x) * self.scale if self.calls % 4 == 1 else self.net(x)
        return result

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """A method beside forward."""
        result: torch.Tensor = self.net(x).square().mean()
        return result


def made(**options: Any) -> tuple[Net, BatchRows]:
    """A model whose batches are counted."""
    net = Net()
    return net, BatchRows(net, list(net.parameters()), **options)


def train(net: torch.nn.Module, rows: int) -> torch.Tensor:
    """A loss of so many rows."""
    loss: torch.Tensor = net(torch.ones(rows, 4)).square().mean()
    return loss


def back(loss: torch.Tensor, **options: Any) -> None:
    """Its gradient."""
    torch.autograd.backward([loss], **options)


@pytest.mark.parametrize("mode", [True, False])
def test_micro_batches_count_whatever_has_a_part_in_them(mode: bool) -> None:
    """They were counted by the smallest parameter: 48 of 192 if it is empty, or has no gradient now and then."""
    net, rows = made()
    net.train(mode)
    for _ in range(3):
        for _ in range(4):
            back(train(net, 16))
        assert rows.take() == 64
        net.zero_grad()


def test_a_pass_without_backward_counts_nothing() -> None:
    """A rollout of 1,000 rows in train mode made a batch of 16 count 1,000."""
    net, rows = made()
    train(net, 1000)
    back(train(net, 16))
    train(net, 1000)
    with torch.no_grad():
        train(net, 500)
    assert rows.take() == 16


def slope(net: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Of the outputs, as a loss may use it."""
    x.requires_grad_()
    (found,) = torch.autograd.grad([net(x).sum()], [x], create_graph=True)
    return found


def along(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The same in forward mode."""
    with forward_ad.dual_level():
        found: torch.Tensor = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x))).tangent  # type: ignore[no-untyped-call]
    return found


def raised(net: Net, x: torch.Tensor) -> torch.Tensor:
    """A layer apart, after a call that failed."""
    with pytest.raises(RuntimeError, match="shapes"):
        net(x[:, :2])
    result: torch.Tensor = net.net(x)
    return result


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(slope, id="a residual of a PINN: 64 points beside 4 counted 4"),
        pytest.param(lambda net, x: slope(net.net, x), id="a residual of a layer"),
        pytest.param(
            along,
            id="a derivative in forward mode",
            marks=pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning"),  # torch's own use of it
        ),
        pytest.param(lambda net, x: torch.func.vmap(net)(x), id="vmap of the model"),
        pytest.param(lambda net, x: torch.func.vmap(torch.func.grad(lambda row: net(row).sum()))(x), id="vmap of grad"),
        pytest.param(lambda net, x: net.net(x), id="a layer"),
        pytest.param(lambda net, x: torch.func.vmap(net.net)(x), id="vmap of a layer"),
        pytest.param(raised, id="a layer, after a call that failed"),
    ],
)
def test_a_call_does_not_vouch_for_other_data_in_its_backward_pass(beside: Callable[..., torch.Tensor]) -> None:
    """Its rows were counted alone, in silence: 5 of 25."""
    net, rows = made()
    for first in (True, False):
        early = train(net, 5) if first else 0
        other = beside(net, torch.ones(20, 4)).square().mean()
        back(other + (early if first else train(net, 5)))
        assert not net.net._forward_pre_hooks  # a look at a call is over with the call
        with pytest.raises(ConfigError, match="batch_size is missing"):
            rows.take()
        rows.forget()
        net.zero_grad()
    back(train(net, 3))
    assert rows.take() == 3


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda net, x: (slope(net, x), net(x)), id="a penalty on the slope at the same rows"),
        pytest.param(lambda net, x: (net(x), net.net(x)), id="a layer, of the same rows"),
        pytest.param(lambda net, x: (net.back(net(x)),), id="a layer, of the output"),
        pytest.param(lambda net, x: (net(net.back(x[:, :3])),), id="a layer, of which the model is given the output"),
        pytest.param(lambda net, x: (net(x), *net.parameters()), id="a penalty on the weights"),
        pytest.param(lambda net, x: (net(x), net.net(net.net.weight)), id="a layer, of weights"),
        pytest.param(lambda net, x: (net(x), [net.net(torch.ones(20, 4))])[:1], id="a metric of a layer"),
    ],
)
def test_what_belongs_to_the_batch_of_a_call_adds_nothing(loss: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """There is one batch of 5 in each."""
    net, rows = made()
    for _ in range(2):
        x = torch.ones(5, 4)
        back(torch.stack([each.square().sum() for each in loss(net, x)]).sum())
        assert rows.take() == 5
        net.zero_grad()


def test_a_gradient_for_the_loss_counts_nothing() -> None:
    """A direction to disturb a batch in (as in adversarial training) is of no batch that is trained on."""
    net, rows = made()
    x = torch.ones(9, 4, requires_grad=True)
    torch.autograd.grad([net(x).sum()], [x])
    back(train(net, 5))
    assert rows.take() == 5


@pytest.mark.parametrize("given", [False, True])
def test_what_a_layer_made_before_the_last_step_was_forgotten(given: bool) -> None:
    """5 of 25 rows counted, in silence; unless the model is given it, whose rows they are then."""
    net, rows = made()
    early = net.back(torch.ones(20, 3))
    back(train(net, 3))
    assert rows.take() == 3
    net.zero_grad()
    back(net(early).sum() if given else train(net, 5) + early.sum())
    if given:
        assert rows.take() == 20
        return
    with pytest.raises(ConfigError, match="a layer"):
        rows.take()


@pytest.mark.parametrize("apart", [True, False])
def test_layers_are_looked_at_for_as_long_as_one_is_called_apart(apart: bool) -> None:
    """The hooks of a plain loop go after 100 steps."""
    net, rows = made()
    for step in range(101):
        assert net.net._forward_hooks or (step == 100 and not apart)
        back(train(net, 5) + (net.net(torch.ones(20, 4)).mean() if apart else 0))
        if apart:
            with pytest.raises(ConfigError, match="a layer"):
                rows.take()
            rows.forget()
        else:
            assert rows.take() == 5
        net.zero_grad()


def test_a_model_that_calls_itself_calls_its_layers() -> None:
    """The inner call is over, and the outer one goes on: its layers are not called apart."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, inner: bool = False) -> torch.Tensor:
            result: torch.Tensor = self.net(x) if inner else self(x, inner=True) + self.net(torch.ones(1, 4))
            return result

    net = Twice()
    rows, x = BatchRows(net, list(net.parameters())), torch.ones(5, 4)
    back(net(x).sum())
    assert rows.take() == 5
    back(net(x).sum() + net.net(torch.ones(20, 4)).sum())
    with pytest.raises(ConfigError, match="a layer"):
        rows.take()


def test_a_call_that_was_interrupted_is_over_with_the_step() -> None:
    """In a notebook: all that followed seemed to be within that call, and a layer apart went uncounted."""
    net, rows = made()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = net.net.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(net, 5)
    hook.remove()
    back(train(net, 5))
    assert rows.take() == 5
    back(train(net, 5) + net.net(torch.ones(20, 4)).mean())
    with pytest.raises(ConfigError, match="a layer"):
        rows.take()


def test_layers_of_a_compiled_model_are_left_alone() -> None:
    """Nothing tells where its call begins, and dynamo may leave out a layer: that was no call apart from the model."""
    layer = torch.nn.Linear(4, 3)
    layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign, no-untyped-call]
    net = torch.nn.Sequential(layer)
    rows = BatchRows(net, list(net.parameters()))
    compiled: Any = torch.compile(net, backend="eager")
    for _ in range(2):
        back(train(compiled, 6))
        assert rows.take() == 6
    rows.close()
    assert layer._forward_hooks  # without them, all would be compiled once more
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_activation_checkpoints_count_once(reentrant: bool, whole: bool) -> None:
    """What is computed once more within backward is the same batch; and if all that is trained lies in there."""
    inner = torch.nn.Linear(4, 3)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x) if whole else checkpoint(self.inner, x, use_reentrant=reentrant)
            return result

    net = Outer()
    rows = BatchRows(net, list(net.parameters()))
    for count in (6, 5):
        x = torch.ones(count, 4, requires_grad=True)
        out: Any = checkpoint(net, x, use_reentrant=reentrant) if whole else net(x)
        back(out.sum())
    assert rows.take() == 11


def test_two_losses_of_one_pass_count_once() -> None:
    """Each has a backward pass of its own, over the same batch."""
    net, rows = made()
    out = net(torch.ones(5, 4))
    back(out.mean(), retain_graph=True)
    back(out.square().mean())
    assert rows.take() == 5
    back(train(net, 3))
    assert rows.take() == 3


def test_several_calls_in_one_backward_pass() -> None:
    """One batch twice is one batch. Other tensors may be several batches, or views of one: the loop must say it."""
    net, rows = made()
    x = torch.ones(5, 4)
    back((net(x) - net(x)).square().mean())
    assert rows.take() == 5
    back(train(net, 4) + train(net, 4))
    with pytest.raises(
        ConfigError, match=r"batch_size is missing: one backward pass .* several calls .* step\(\), or b"
    ):
        rows.take()
    assert samples_of(4, rows, print) == 4
    back(train(net, 3))
    assert rows.take() == 3


def test_where_a_backward_pass_is_known_to_be_one_batch() -> None:
    """A Trainer has one for each of its batches: two towers of equal rows are that many samples."""
    net, rows = made(one_batch=True)
    back(train(net, 4) + train(net, 4))
    assert rows.take() == 4
    back(train(net, 4) + train(net, 12))
    with pytest.raises(ConfigError, match="several calls"):
        rows.take()


def test_gradients_from_elsewhere_are_told() -> None:
    """Another method than forward, alone or among other batches: the step would be weighted by a part of them."""
    net, rows = made()
    back(net.loss(torch.ones(5, 4)))
    with pytest.raises(ConfigError, match=r"batch_size is missing: .* another method than forward"):
        rows.take()
    net.zero_grad()
    back(train(net, 7))
    back(net.loss(torch.ones(5, 4)))
    with pytest.raises(ConfigError, match="another method than forward"):
        rows.take()
    net.zero_grad()
    back(net.loss(torch.ones(5, 4)))
    back(train(net, 7))
    with pytest.raises(ConfigError, match="another method than forward"):
        rows.take()
    net.zero_grad()
    back(train(net, 7))
    assert rows.take() == 7


@pytest.mark.parametrize("to_none", [True, False])
def test_what_was_cleared_does_not_count(to_none: bool) -> None:
    """A scaler leaves a step out: that batch was counted with the next one if the gradients were zeros."""
    net, rows = made()
    back(train(net, 5))
    loss = train(net, 3)
    net.zero_grad(set_to_none=to_none)
    back(loss)
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)  # clipped
    assert rows.take() == 3


def test_a_backward_pass_that_raises_counts_nothing() -> None:
    """Out of memory in the middle: the loop clears the gradients, and goes on."""
    net, rows = made()

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    with pytest.raises(MemoryError):
        back((net(Breaks.apply(torch.ones(5, 4, requires_grad=True)))).sum())  # type: ignore[no-untyped-call]
    net.zero_grad()
    back(train(net, 3))
    assert rows.take() == 3


def test_a_copy_does_not_count_and_nothing_does_afterwards() -> None:
    """A model that is copied or pickled, for an average of its weights for example, is another one."""
    net, rows = made()
    back(train(net, 2))
    for each in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        back(train(each, 7))
    assert rows.take() == 2
    rows.close()
    back(train(net, 2))
    assert not rows._known


def test_without_gradients_there_is_nothing_to_count() -> None:
    """`step` says so itself."""
    net, rows = made()
    train(net, 4)
    assert rows.take() == 1


ones, images = torch.ones, [torch.ones(3, 20, 20) for _ in range(8)]


@pytest.mark.parametrize(
    ("expected", "batch"),
    [
        (4, (ones(()), ones(4, 2))),
        (3, {"text": "text", "x": {"y": [ones(3), ones(3, 2)]}}),
        (5, UserDict(input_ids=ones(5, 9), attention_mask=ones(5, 9), labels=ones(5))),
        (5, {"pixel_values": ones(40, 9), "input_ids": ones(5, 9), "labels": ones(5, 9)}),
        (2, pack_sequence([ones(3, 4), ones(2, 4)])),
        (8, (images, [{"boxes": ones(2, 4)} for _ in images])),
        (2, {"input_ids": ones(2, 9), "position_ids": ones(2, 9)}),
        ("no tensor with rows", (ones(()), "text")),
        ("list of tensors", {0: images}),
        ("different numbers of rows (4, 9)", {"x": ones(4, 9), "mask": ones(9, 9)}),
        ("one row, in which several", {"input_ids": ones(1, 90), "position_ids": ones(1, 90), "labels": ones(1, 90)}),
    ],
)
def test_rows_of_what_a_model_is_given(expected: int | str, batch: Any) -> None:
    """A list of 8 images counted 3, for their channels. What is not sure is said."""
    found = rows_in(batch)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert isinstance(found, str)
        assert expected in found


def test_lists_of_collated_batches_hold_fields() -> None:
    """`default_collate` makes lists of inputs and targets."""
    assert rows_in([ones(4, 3), ones(4, 3)], collated=True) == 4
    assert isinstance(rows_in([ones(4, 3), ones(4, 3)]), str)


@pytest.mark.parametrize("wrap", [lambda net: torch.compile(net, backend="eager"), torch.nn.DataParallel])
def test_a_model_that_is_wrapped_counts(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """By the wrapper, or by the model in it."""
    for give in (True, False):
        net = torch.nn.Linear(4, 3)
        wrapped = wrap(net)
        rows = BatchRows(wrapped if give else net, list(net.parameters()))
        back(train(wrapped, 6))
        back(train(wrapped, 5))
        assert rows.take() == 11
        rows.close()
        torch._dynamo.reset()  # it would run the code of the first model, which had no hook, for the second


def test_a_model_that_is_to_be_scripted_is_told_what_to_do() -> None:
    """TorchScript compiles hooks: it raised AttributeError, '_BeforeForward' object has no attribute '__name__'."""
    net = torch.nn.Linear(4, 3)
    rows = BatchRows(net, list(net.parameters()))
    with pytest.raises(ConfigError, match="batch_size_per_step"), pytest.warns(match="jit.script"):
        torch.jit.script(net)
    rows.close()


def test_a_scripted_model_is_taken_and_its_samples_are_asked_for() -> None:
    """It takes no hooks: RuntimeError, "register_forward_hook is not supported on ScriptModules"."""
    with pytest.warns(match="jit.script"):
        scripted = torch.jit.script(torch.nn.Linear(4, 3))
    rows = rows_of(scripted, None, list(scripted.parameters()))
    back(train(scripted, 4))
    assert rows is None
    with pytest.raises(ConfigError, match="batch_size is missing"):
        samples_of(None, rows, print)
    assert samples_of(4, rows, print) == 4


def elsewhere(what: Callable[[], object]) -> None:
    """In another thread, which ends before this returns."""
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()


@pytest.mark.parametrize("with_gradients", [True, False])
def test_an_actor_thread_calls_the_model_within_a_backward_pass(*, with_gradients: bool) -> None:
    """Its call forgot the pass that was under way in the trainer's thread, and `step` failed with a false reason."""
    net, rows = made()
    calls = []

    def act() -> None:
        with torch.set_grad_enabled(with_gradients):
            calls.append(net(torch.ones(3, 4)))

    net.net.weight.register_hook(lambda _: elsewhere(act))  # type: ignore[no-untyped-call]
    for _ in range(2):
        for micro in range(1, 4):
            back(train(net, 8))
            assert rows._samples == 8 * micro
        assert rows.take() == 24
        net.zero_grad()
    assert len(calls) == 6


class Interrupted(torch.nn.Module):
    """A layer; in its first call an actor does something in another thread."""

    def __init__(self, layer: torch.nn.Module, act: Callable[[torch.nn.Module], object]) -> None:
        super().__init__()
        self.layer, self.acts, self.act = layer, True, act

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Of the rows, each with its weight."""
        if self.acts:
            self.acts = False
            elsewhere(lambda: self.act(self))
        result = self.layer(x)
        rows: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return rows if weights is None else rows * weights[:, None]


def test_an_actor_thread_calls_the_model_within_a_call_of_the_trainer() -> None:
    """It ended the look at the layers, and nobody knew that the batch is in the second dimension."""

    def act(net: torch.nn.Module) -> None:
        with torch.no_grad():
            net(torch.ones(5, 4, 4))

    net = Interrupted(torch.nn.GRU(4, 3), act)
    rows = BatchRows(net, list(net.parameters()))
    back(net(torch.ones(7, 2, 4))[-1].sum())
    assert rows.take() == 2


def test_what_an_actor_does_in_a_layer_says_nothing_of_the_trainers_call() -> None:
    """The hooks of a look are in the layers, which both threads call: a batch was taken for one sample."""

    def act(net: torch.nn.Module) -> None:
        assert isinstance(net, Interrupted)
        net.layer(torch.ones(4))

    net = Interrupted(torch.nn.Linear(4, 3), act)
    rows = BatchRows(net, list(net.parameters()))
    back(net(torch.ones(4, 4), torch.ones(4)).sum())
    assert rows.take() == 4


def test_a_backward_pass_that_raised_is_forgotten_beside_one_that_goes_on() -> None:
    """Each thread forgets its own."""
    net, rows = made()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("mistake")

    hook = net.net.weight.register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="mistake"):
        back(train(net, 8))
    hook.remove()
    elsewhere(lambda: train(net, 3))
    assert rows._under_way
    net.zero_grad()
    back(train(net, 16))
    assert rows.take() == 16
    assert not rows._under_way


def test_a_told_batch_whose_gradients_come_in_a_thread_of_torchs() -> None:
    """As on a GPU: what the layers were given in the loop's thread says where the batch is."""
    layer = torch.nn.LSTM(3, 5)
    rows = BatchRows(layer, list(layer.parameters()), by_batch=True)
    for count in (4, 6):
        batch = torch.ones(7, count, 3)
        rows.begin_batch(batch)
        assert rows.samples_of_batch == 0
        loss = layer(batch)[0][-1].sum()
        other = threading.Thread(target=back, args=[loss])
        other.start()
        other.join()
        assert rows.samples_of_batch == count
        assert rows.take() == count


@pytest.mark.parametrize("to_none", [True, False])
def test_told_batches_whose_gradients_are_written_by_hand(to_none: bool) -> None:
    """`torch.autograd.grad`, then `.grad = ...`, as gradient surgery does; what is cleared again does not count."""
    net = torch.nn.Linear(4, 3)
    rows = BatchRows(net, list(net.parameters()), by_batch=True)
    for count in (5, 6, 7):
        rows.begin_batch(torch.ones(count, 4))
        for parameter, gradient in zip(
            net.parameters(), torch.autograd.grad(train(net, count), list(net.parameters())), strict=True
        ):
            parameter.grad = gradient if count == 5 or parameter.grad is None else parameter.grad + gradient
        if count == 5:
            net.zero_grad(set_to_none=to_none)
    assert rows.take() == 13


def test_a_told_batch_without_a_backward_pass() -> None:
    """Gradients that were counted before, or are zeros, count nothing; those of no told batch are asked for."""
    net = torch.nn.Linear(4, 3)
    rows = BatchRows(net, list(net.parameters()), by_batch=True)
    back(train(net, 5))
    with pytest.raises(ConfigError, match="batch_size is missing"):
        rows.take()
    net.zero_grad()
    rows.begin_batch(torch.ones(6, 4))
    back(train(net, 6))
    assert rows.take() == 6
    rows.begin_batch(torch.ones(7, 4))
    assert rows.take() == 1
    assert net.weight.grad is None
