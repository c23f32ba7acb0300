"""What ordinary torch programs do with a model and its optimizer, on the ranks of the tests of `shoal.zero`."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import shoal
import shoal.zero
from shoal.errors import ConfigError, LocalError
from shoal.zero.flat import reduction
from shoal.zero.flat.engine import FlatEngine
from shoal.zero.flat.standins import StandIn
from shoal.zero.optimizer import ShardedOptimizer
from shoal.zero.parameters import unique_bytes
from shoal.zero.ranks import buckets, collectives
from tests.integration.zero_cases import Odd, Parts, alone, loss_of, make, train

State = dict[str, torch.Tensor]


def said(function: Callable[[], object]) -> str:
    """What it raises, in words; empty if it does not."""
    try:
        function()
    except (ConfigError, LocalError, RuntimeError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hooked(stage: int, when: str) -> tuple[float, int]:
    """Halve the gradients of two layers by hooks: how far from one process that does, and how often they ran."""
    model, plain = Odd(), Odd()
    ran: list[str] = []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        ran.append("once")
        return gradient / 2

    def register(module: torch.nn.Module) -> None:
        for name in ("layers.0.1.weight", "embedding.weight"):
            module.get_parameter(name).register_hook(halve)  # type: ignore[no-untyped-call]

    if when == "before":
        register(model)
    _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage)
    if when == "after":
        register(model)
    train(optimizer, model, steps=3)
    times = len(ran)
    register(plain)
    return moved(model, alone(dist.get_world_size(), "adamw", steps=3, model=plain)[0]), times


def hooked_behind(stage: int, when: str) -> tuple[int, str]:
    """A hook that runs when a gradient was added: how often it did, and what is said."""
    model, ran = Odd(), list[bool]()

    def look(parameter: torch.Tensor) -> None:
        ran.append(parameter.grad is not None and not isinstance(parameter.grad, StandIn))

    def run() -> None:
        if when == "before":
            model.scale.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
        _, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage)
        if when == "after":
            model.scale.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
        train(optimizer, model, steps=2)

    words = said(run)
    return sum(ran), words


class Tower(torch.nn.Sequential):
    """A Sequential as a root; the activation has no parameters."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))


def in_place() -> torch.nn.Module:
    """What a member returns is a view, and the next one writes over it."""
    torch.manual_seed(4)
    first, last = torch.nn.Linear(6, 6), torch.nn.Linear(8, 3)
    rows = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Flatten())
    return torch.nn.Sequential(first, torch.nn.Unflatten(1, (2, 3)), rows, torch.nn.ReLU(inplace=True), last)


def in_units(kind: str) -> tuple[list[str], bool]:
    """Stage 3: what is gathered together; and whether a few steps are those of one process."""
    models: list[Any] = [
        torch.nn.ModuleDict({"first": Tower(), "more": torch.nn.ModuleList([torch.nn.Linear(3, 3)])}) for _ in "12"
    ]
    if kind != "a dictionary":
        models = [in_place() if kind == "in place" else Tower() for _ in "12"]
    model, plain = models
    given = [model[2]] if kind == "given" else None
    _, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=3, units=given)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        inputs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        torch.autograd.backward(run_parts(model, inputs[dist.get_rank()]))
        optimizer.step()
        optimizer.zero_grad()
        totals: list[torch.Tensor] = []
        for each in inputs:
            torch.autograd.backward(run_parts(plain, each))
            mine = [value.grad for value in plain.parameters() if value.grad is not None]
            totals = [one + other for one, other in zip(totals, mine, strict=True)] if totals else mine
            plain.zero_grad()
        for value, total in zip(plain.parameters(), totals, strict=True):
            value.grad = total / 2
        alone.step()
        alone.zero_grad()
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return names, same(shoal.zero.full_state_dict(model), plain.state_dict())


def run_parts(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A loss, through a model or the members of a container."""
    if not isinstance(model, torch.nn.ModuleDict):
        return model(inputs).square().sum()  # type: ignore[no-any-return]
    (last,) = model["more"].children()
    return last(model["first"](inputs)).square().sum()  # type: ignore[no-any-return]


def bad_units(kind: str) -> str:
    """What is said of units that cannot be."""
    model = Odd()
    odd: dict[str, Any] = {"another's": [torch.nn.Linear(2, 2)], "tied": [model.embedding], "a list": [model.layers]}
    given = odd.get(kind, model.layers)
    return said(lambda: shoal.zero.shard(model, make("sgd", model), stage=2 if kind == "stage 2" else 3, units=given))


def bad_containers(kind: str) -> str:
    """What is said of containers that cannot be called."""
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    if kind == "tied":
        second.weight = first.weight
    model = torch.nn.ModuleList([first, second])
    if kind == "of its own":
        model.scale = torch.nn.Parameter(torch.ones(3))
    return said(lambda: shoal.zero.shard(model, make("sgd", model), stage=3))


def of_whole_tensors(name: str) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Makes an optimizer that needs them."""
    import pytorch_optimizer
    from transformers.optimization import Adafactor

    if name == "Muon":
        return lambda each: torch.optim.Muon([value for value in each if value.ndim == 2], lr=1e-2)
    kinds: dict[str, Any] = {"Adafactor": torch.optim.Adafactor, "Hugging Face's": Adafactor}
    made: Any = kinds.get(name) or pytorch_optimizer.load_optimizer(name)
    return made  # type: ignore[no-any-return]


def stepped_whole(name: str) -> tuple[float, str]:
    """In stage 3, two steps: how far weights are from those of one process; and what `shard` says.

    A unit is how far they are if gradients differ by a thousandth: Muon computes in bfloat16.
    """
    model, plain, noisy = Odd(), Odd(), Odd()
    try:
        _, optimizer = shoal.zero.shard(model, of_whole_tensors(name), stage=3)
    except ConfigError as error:
        return math.inf, str(error)
    made = torch.Generator().manual_seed(0)
    alone = [(each, of_whole_tensors(name)([*each.parameters()])) for each in (plain, noisy)]
    for step in range(2):
        torch.autograd.backward(loss_of(model, step, 0))
        optimizer.step()
        optimizer.zero_grad()
        for each, stepper in alone:
            torch.autograd.backward(loss_of(each, step, 0))
            for value in each.parameters() if each is noisy else ():
                if value.grad is not None:
                    value.grad *= 1.0 + 1e-3 * torch.randn(value.shape, generator=made)
            stepper.step()
            stepper.zero_grad()
    return moved(model, plain.state_dict()) / moved(noisy, plain.state_dict()), ""


def given_to_the_swarm(stage: int) -> str:
    """What `shoal.Optimizer` says of a sharded optimizer."""
    _, optimizer = sharded(stage)
    return said(
        lambda: shoal.Optimizer(dht=shoal.DHT(start=False), run_id="any", target_batch_size=1, optimizer=optimizer)
    )


def backward(model: torch.nn.Module, step: int = 0, micro: int = 0, factor: float = 1.0) -> None:
    """Of this rank's micro-batch."""
    torch.autograd.backward(loss_of(model, step, dist.get_rank(), micro) * factor)


def sharded(stage: int, kind: str = "sgd", dtype: torch.dtype | None = None) -> tuple[Odd, ShardedOptimizer]:
    """The usual model."""
    model = Odd()
    return shoal.zero.shard(model, make(kind, model), stage=stage, dtype=dtype)


def same(one: State, other: State) -> bool:
    """To the bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def moved(model: torch.nn.Module, before: State) -> float:
    """How far any weight is from before."""
    after = shoal.zero.full_state_dict(model)
    return max(float((after[name] - value).abs().max()) for name, value in before.items())


def _none(model: torch.nn.Module) -> None:
    for each in model.parameters():
        each.grad = None


def _zeros(model: torch.nn.Module) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.zero_()


def _data(model: torch.nn.Module) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.data.zero_()


CLEARINGS: dict[str, Callable[[torch.nn.Module], None]] = {
    "the model's own": torch.nn.Module.zero_grad,
    "a module around it": lambda model: torch.nn.ModuleDict({"model": model}).zero_grad(),
    "to zeros": lambda model: model.zero_grad(set_to_none=False),
    "grad = None": _none,
    "grad.zero_()": _zeros,
    "grad.data.zero_()": _data,
}


TO_NONE = ("the model's own", "a module around it", "grad = None")


def cleared(stage: int, ways: Iterable[str]) -> dict[str, bool]:
    """For each way to clear gradients whether all is as with the optimizer's own.

    A pass whose gradients are infinite, and one within `no_sync`, are cleared before they are used.
    """

    def train(clear: Callable[[torch.nn.Module], None] | None) -> State:
        model, optimizer = sharded(stage)

        def forget() -> None:
            if clear is None:
                optimizer.zero_grad()
            else:
                clear(model)

        backward(model, 9, factor=float("inf"))
        forget()
        for step in range(3):
            with optimizer.no_sync():
                backward(model, 7)
            forget()
            backward(model, step)
            backward(model, step, 1)
            optimizer.step()
            forget()
        assert optimizer.skipped == 0
        return shoal.zero.full_state_dict(model)

    wanted = train(None)
    return {how: same(train(CLEARINGS[how]), wanted) for how in ways}


def cleared_in_part(stage: int) -> bool:
    """One layer's gradients are let go of, the others stay: whether all is as on one process."""
    model, optimizer = sharded(stage)
    alone = Odd()
    plain = make("sgd", alone)([each for each in alone.parameters() if each.requires_grad])
    for step in range(2):
        backward(model, step)
        (loss_of(alone, step, 0) / 2 + loss_of(alone, step, 1) / 2).backward()  # type: ignore[no-untyped-call]
        if step == 0:
            model.layers[1].zero_grad()
            alone.layers[1].zero_grad()
    optimizer.step()
    plain.step()
    return moved(model, alone.state_dict()) < 1e-6


def asked_in_between(stage: int) -> bool:
    """Whether a step is what it is without `torch.autograd.grad` of all parameters before it."""
    found = []
    for asks in (False, True):
        model, optimizer = sharded(stage)
        backward(model)
        if asks:
            torch.autograd.grad(loss_of(model, 1, 0), [each for each in model.parameters() if each.requires_grad])
        optimizer.step()
        found.append(shoal.zero.full_state_dict(model))
    return same(*found)


def asked_behind_no_sync(stage: int) -> tuple[str, bool]:
    """A step behind a pass within `no_sync`, and `torch.autograd.grad` of an activation outside it.

    Returns:
        What it says, and whether it is that behind an ordinary pass.
    """
    usual, stepped = sharded(stage)
    backward(usual)
    stepped.step()
    model, optimizer = sharded(stage)
    with optimizer.no_sync():
        backward(model)
    embedded: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda *args: embedded.append(args[-1]))
    torch.autograd.grad(loss_of(model, 1, 0), embedded)
    words = said(optimizer.step)
    return words, same(shoal.zero.full_state_dict(model), shoal.zero.full_state_dict(usual))


CHANGES: dict[str, Callable[[Odd, ShardedOptimizer], object]] = {
    "optimizer.clip_grad_norm_()": lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "is used (clamp_)": lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "the gradient of scale is used (fill_)": lambda model, _: model.scale.grad.fill_(1.0),  # type: ignore[union-attr]
    "the gradient of scale was set by hand": lambda model, _: setattr(model.scale, "grad", torch.ones(1)),
    "gradients in param_groups were changed": lambda _, optimizer: torch.nn.utils.clip_grad_norm_(
        [each for group in optimizer.param_groups for each in group["params"]], 1e-3
    ),
}
"""Of gradients after a backward pass, by what is said of them."""


def changed_by_others(stage: int) -> dict[str, tuple[str, bool]]:
    """What each of `CHANGES`, or the step after it, says; and whether it leaves the weights as they are."""
    found = {}
    for name, change in CHANGES.items():
        model, optimizer = sharded(stage)
        before = shoal.zero.full_state_dict(model)
        backward(model)
        words = said(partial(change, model, optimizer)) or said(optimizer.step)
        found[name] = words, moved(model, before) == 0.0
    return found


def gone(stage: int) -> list[bool]:
    """Whether model, optimizer and engine are, when nobody refers to them any more."""
    model, optimizer = sharded(stage, "adamw")
    backward(model)
    optimizer.step()
    found = [weakref.ref(each) for each in (model, optimizer, optimizer.carrier)]
    del model, optimizer
    gc.collect()
    return [each() is None for each in found]


def state_of_rank_0(stage: int) -> tuple[str, str, bool]:
    """What each rank says to the state of rank 0, and to that of a plain optimizer; whether it takes its own back."""
    model, optimizer = sharded(stage, "adamw")
    backward(model)
    optimizer.step()
    box = [optimizer.state_dict() if dist.get_rank() == 0 and stage < 3 else {"share": {"rank": 0, "ranks": 2}}]
    dist.broadcast_object_list(box)
    plain = torch.optim.AdamW(Odd().parameters()).state_dict()
    own = optimizer.state_dict()
    optimizer.load_state_dict(own)
    entries = zip(own["state"].values(), optimizer.state_dict()["state"].values(), strict=True)
    kept = all(torch.equal(one["exp_avg"], other["exp_avg"]) for one, other in entries)
    return said(lambda: optimizer.load_state_dict(box[0])), said(lambda: optimizer.load_state_dict(plain)), kept


def other_parameters(stage: int) -> list[str]:
    """What a step says after a parameter was replaced, in several ways, or added, or is trained that was frozen."""

    def assign(model: Odd) -> None:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    def replace(model: Odd) -> None:
        model.scale = torch.nn.Parameter(model.scale.detach().clone())

    def add(model: Odd) -> None:
        model.extra = torch.nn.Parameter(torch.zeros(1))

    def unfreeze(model: Odd) -> None:
        model.frozen.requires_grad_()

    def step_behind(change: Callable[[Odd], None]) -> None:
        model, optimizer = sharded(stage)
        change(model)
        backward(model)
        optimizer.step()

    return [said(partial(step_behind, change)) for change in (assign, replace, add, unfreeze)]


class Sum(torch.nn.Module):
    """Its gradient is the same for each micro-batch: `factors`, which bfloat16 can hold."""

    factors: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64, 8))
        made = torch.Generator().manual_seed(1)
        self.register_buffer("factors", torch.randn(64, 8, generator=made).bfloat16().float())

    def forward(self) -> torch.Tensor:
        """A number."""
        return (self.weight * self.factors).sum()


def many_micro_batches(stage: int, sync: bool, count: int, tagged: bool = True) -> bool:
    """Whether a step of SGD in bfloat16 is to the bit the sum of so many equal gradients.

    Unless `tagged` the group is not taken for one of gloo.
    """
    model = Sum()
    before = collectives._is_gloo
    collectives._is_gloo = lambda *each: tagged and before(*each)
    try:
        model, optimizer = shoal.zero.shard(
            model, lambda each: torch.optim.SGD(each, lr=1.0), stage=stage, dtype=torch.bfloat16
        )
    finally:
        collectives._is_gloo = before
    if not tagged:
        model.set_force_sum_reduction_for_comms(enable=True)  # type: ignore[operator] # gloo knows no mean
    for number in range(count):
        with nullcontext() if sync or number == count - 1 else optimizer.no_sync():
            model().backward()
    optimizer.step()
    own = list(optimizer.carrier.own_tiles())
    wanted = -count * model.factors.reshape(-1)
    return bool(own) and all(torch.equal(each.values, each.tile.of(wanted)) for each in own)


def wide_values(stage: int) -> tuple[bool, bool, bool]:
    """After steps in bfloat16: whether whole float32 values are those of the tiles, or as before, or as written.

    Trained ones, frozen ones, and frozen ones that were replaced.
    """
    model = Odd()
    before = {name: value.clone() for name, value in model.named_parameters()}
    model, optimizer = shoal.zero.shard(model, make("adamw", model), stage=stage, dtype=torch.bfloat16)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    engine = optimizer.carrier
    assert isinstance(engine, FlatEngine)
    found = dict([*engine._copies.whole(), *engine.frozen()])
    assert found.keys() == before.keys()
    assert not any(torch.equal(found["scale"], each["scale"]) for each in (before, dict(model.named_parameters())))
    own = engine.own_tiles()
    equal = all(torch.equal(each.values, each.tile.of(found[each.tile.name].reshape(-1))) for each in own)
    kept = torch.equal(found["frozen.weight"], before["frozen.weight"])
    engine.write("frozen.weight", before["frozen.weight"] / 3)
    written = dict(engine.frozen())["frozen.weight"]
    return equal, kept, torch.equal(written, before["frozen.weight"] / 3)


WRITINGS: dict[str, Callable[[Odd], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(
        {name: torch.full_like(each, 0.25) for name, each in model.state_dict().items()}
    ),
    "that of a part": lambda model: (
        [
            each.load_state_dict({name: torch.full_like(value, 0.25) for name, value in each.state_dict().items()})
            for each in model.children()
        ]
        + [torch.nn.init.constant_(model.scale, 0.25)]
    ),
    "in place": lambda model: [torch.nn.init.constant_(each, 0.25) for each in model.parameters()],
    "data": lambda model: [each.data.fill_(0.25) for each in model.parameters()],
}


def written(stage: int, dtype: torch.dtype | None) -> dict[str, bool]:
    """For each way to write into parameters whether it counts: in a step without decay whose gradients are zero."""
    found = {}
    for how, write in WRITINGS.items():
        model, optimizer = sharded(stage, "sgd", dtype)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        with torch.no_grad():
            write(model)
        backward(model, factor=0.0)
        optimizer.step()
        values = [value for name, value in shoal.zero.full_state_dict(model).items() if name != "shift"]
        found[how] = all(bool((value == 0.25).all()) for value in values)
    return found


class Breaks(torch.autograd.Function):
    """Does nothing, but its backward pass may break off."""

    @staticmethod
    def forward(_: object, hidden: torch.Tensor) -> torch.Tensor:
        """The same."""
        return hidden.clone()

    @staticmethod
    def backward(_: object, *__: torch.Tensor) -> torch.Tensor:
        """Out of memory, say."""
        raise ArithmeticError("too large")


def broken_off(stage: int, clears: bool) -> State:
    """A backward pass that breaks off on all ranks, when some buckets were sent; then training as if nothing had been.

    Or without clearing: what had come counts, as everywhere.
    """
    with small_buckets():
        model, optimizer = sharded(stage)
    handle = model.layers[0].register_forward_hook(lambda *each: Breaks.apply(each[-1]))  # type: ignore[no-untyped-call]
    try:
        backward(model, 9, factor=0.0 if not clears else 100.0)
    except ArithmeticError:
        handle.remove()
    if clears:
        optimizer.zero_grad()
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return shoal.zero.full_state_dict(model)


def beside_their_places(again: bool) -> int:
    """Bytes of gradients in `.grad` while the one bucket of all parameters waits for its last gradient, in stage 1.

    Args:
        again: behind a backward pass within `no_sync`.
    """
    model, optimizer = sharded(1)
    found: list[int] = []

    def look(_: torch.Tensor) -> None:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found.append(unique_bytes(gradients))

    if again:
        with optimizer.no_sync():
            backward(model, 1)
    model.embedding.weight.register_hook(look)  # type: ignore[no-untyped-call]
    backward(model, 2)
    return found[-1]


@contextmanager
def small_buckets(nbytes: int = 1000) -> Iterator[None]:
    """Models that are sharded in this block have many, as large ones do."""
    before, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, nbytes
    try:
        yield
    finally:
        buckets.BUCKET_BYTES = before


def received() -> tuple[bool, int]:
    """Stage 1 of equal layers in many buckets: whether it is as one process, and the memory for messages alone.

    That is of steps with one pass: the third begins within `no_sync`, and the last adds up two passes that are reduced.
    """

    def layers() -> torch.nn.Sequential:
        torch.manual_seed(1)
        return torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(8)])

    def loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        made: torch.Tensor = model(torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank)))
        return made.square().sum()

    def factory(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    ranks, plain = dist.get_world_size(), layers()
    with small_buckets(2048):
        model, optimizer = shoal.zero.shard(layers(), factory, stage=1)
    stepped, nbytes = factory(plain.parameters()), -1
    for step in range(6):
        with optimizer.no_sync() if step == 2 else nullcontext():
            torch.autograd.backward(loss(model, step, dist.get_rank()))
        mine = [torch.autograd.grad(loss(plain, step, rank), [*plain.parameters()]) for rank in range(ranks)]
        for each, *gradients in zip(plain.parameters(), *mine, strict=True):
            mean = torch.stack(gradients).mean(0)
            each.grad = mean if each.grad is None else each.grad + mean
        nbytes = optimizer.memory().messages if step < 2 else nbytes
        if step not in (2, 4):
            for either in (optimizer, stepped):
                either.step()
                either.zero_grad()
    return moved(model, plain.state_dict()) < 1e-6, nbytes


class Segments(torch.nn.Module):
    """Layers, one of them twice, whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
        """`reentrant` as in `torch.utils.checkpoint`; None for no checkpoints."""
        for layer in [*self.layers, self.layers[1]]:
            if reentrant is None:
                hidden = layer(hidden).tanh()
            else:
                segment = torch.nn.Sequential(layer, torch.nn.Tanh())
                within = partial(checkpoint, segment, use_reentrant=reentrant)
                hidden = checkpoint(within, hidden, use_reentrant=reentrant)
        return hidden


def checkpointed(stage: int, bucket_bytes: int) -> list[tuple[bool, int]]:
    """Whether weights are those without activation checkpoints, and bytes reduced: with none, new, reentrant ones."""
    found: list[tuple[bool, int]] = []
    wanted: State | None = None
    for reentrant in (None, False, True):
        model = Segments()
        with small_buckets(bucket_bytes):
            model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
        for step in range(4):
            made = torch.Generator().manual_seed(10 * step + dist.get_rank())
            inputs = torch.randn(3, 8, generator=made).requires_grad_()
            with optimizer.no_sync() if step == 1 else nullcontext():
                torch.autograd.backward(model(inputs, reentrant).square().sum())
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
        state = shoal.zero.full_state_dict(model)
        wanted = wanted or state
        close = all(torch.allclose(value, wanted[name], rtol=0, atol=1e-6) for name, value in state.items())
        found.append((close, optimizer.traffic().reduced))
    return found


def scaled_loss(stage: int) -> str:
    """What a step with torch's loss scaling says."""
    model, optimizer = sharded(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.autograd.backward(scaler.scale(loss_of(model, 0, dist.get_rank())))
    return said(lambda: scaler.step(optimizer))


def graph_of_gradients(stage: int) -> str:
    """What a backward pass that is to be differentiated says."""
    model, _ = sharded(stage)
    return said(lambda: torch.autograd.backward(loss_of(model, 0, dist.get_rank()), create_graph=True))


def largest_gradient() -> tuple[float, float]:
    """The norm for an infinite exponent, sharded and of one process."""
    model, optimizer = sharded(3)
    backward(model)
    alone = Odd()
    (loss_of(alone, 0, 0) / 2 + loss_of(alone, 0, 1) / 2).backward()  # type: ignore[no-untyped-call]
    trained = [each for each in alone.parameters() if each.requires_grad]
    kind = float("inf")
    return float(optimizer.clip_grad_norm_(1e9, kind)), float(torch.nn.utils.clip_grad_norm_(trained, 1e9, kind))


class Pair(torch.nn.Module):
    """Two layers, of which an optimizer may list one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.listed, self.other = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 6)."""
        hidden: torch.Tensor = self.other(self.listed(inputs).tanh())
        return hidden


def norm_of_listed(stage: int) -> tuple[float, float]:
    """The norm that clipping returns, and that of one process, of the gradients of what the optimizer lists."""
    model, alone = Pair(), Pair()
    model, optimizer = shoal.zero.shard(
        model, lambda _: torch.optim.SGD(model.listed.parameters(), lr=1.0), stage=stage
    )
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    for each in (model, alone):
        torch.autograd.backward(each(inputs).square().sum())
    return float(optimizer.clip_grad_norm_(1.0)), float(torch.nn.utils.clip_grad_norm_(alone.listed.parameters(), 1.0))


def rates_that_part(stage: int) -> str:
    """What a step says when a schedule has looked at this rank's own losses."""
    model, optimizer = sharded(stage)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    backward(model)
    optimizer.step()
    for loss in range(3):
        schedule.step(loss if dist.get_rank() else -loss)
    before = shoal.zero.full_state_dict(model)
    backward(model)
    words = said(optimizer.step)
    assert moved(model, before) == 0.0
    return words


def one_cannot_step(stage: int) -> str:
    """What a step says when something was done to the model on rank 1 alone."""
    model, optimizer = sharded(stage)
    backward(model)
    if dist.get_rank() == 1:
        model.scale = torch.nn.Parameter(torch.ones(1))
    return said(optimizer.step)


def without_values(stage: int) -> tuple[list[int], bool]:
    """Train a model with parameters of no values, a frozen one among them; the shape of one, and whether it moved."""
    model = Pair()
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("gone", torch.nn.Parameter(torch.empty(0), requires_grad=False))
    model, optimizer = shoal.zero.shard(
        model, lambda each: torch.optim.AdamW(each, lr=0.1), stage=stage, dtype=torch.bfloat16
    )
    before = shoal.zero.full_state_dict(model)
    torch.autograd.backward(model(torch.ones(2, 6)).sum() + model.empty.sum())  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    after = shoal.zero.full_state_dict(model)
    return list(after["empty"].shape), not same(before, after)


def frozen_listed(stage: int) -> tuple[list[list[str]], list[list[str]], set[str]]:
    """What an optimizer lists that was given frozen parameters, too; what it trains; and what a step changes."""
    model = Odd()
    model, optimizer = shoal.zero.shard(
        model, lambda _: torch.optim.AdamW([*model.frozen.parameters(), model.scale], lr=0.1), stage=stage
    )
    before = shoal.zero.full_state_dict(model)
    backward(model)
    optimizer.step()
    after = shoal.zero.full_state_dict(model)
    return optimizer.listed, optimizer.names, {name for name in before if not torch.equal(before[name], after[name])}


def copied(stage: int, dtype: torch.dtype | None) -> tuple[bool, bool, bool]:
    """Whether a copy, a mean of weights and a pickled model are plain models of the same weights, without optimizer."""
    model, optimizer = sharded(stage, "adamw", dtype)
    backward(model)
    optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    mean = torch.optim.swa_utils.AveragedModel(model)
    mean.update_parameters(model)
    found = []
    for other in (copy.deepcopy(model), mean.module, torch.load(file, weights_only=False)):
        equal = same(other.state_dict(), model.state_dict())
        sent = optimizer.traffic().reduced
        plain = torch.optim.SGD(other.parameters(), lr=0.1)
        torch.autograd.backward(loss_of(other, 1, dist.get_rank()))
        plain.step()
        other.zero_grad()
        trained = not same(other.state_dict(), model.state_dict())
        held = {id(each) for each in gc.get_referents(other.__dict__)}
        apart = optimizer.traffic().reduced == sent and id(optimizer) not in held and "zero_grad" not in other.__dict__
        found.append(equal and trained and apart)
    return found[0], found[1], found[2]


def two_models(stage: int, alike: bool) -> tuple[str, float]:
    """Two models in one backward pass, on each rank in an order of its own unless `alike`.

    What is said, or how far the weights are from those of one process.
    """
    models, plain = [Pair(), Pair()], [Pair(), Pair()]
    optimizers = [
        shoal.zero.shard(each, lambda listed: torch.optim.SGD(listed, lr=0.1), stage=stage)[1] for each in models
    ]
    steppers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in plain]
    order = [0, 1] if alike or dist.get_rank() == 0 else [1, 0]

    def loss(pair: list[Pair]) -> torch.Tensor:
        return sum((pair[which](torch.ones(2, 6)) * (1 + which) for which in order), torch.zeros(())).sum()

    words = said(lambda: torch.autograd.backward(loss(models)))
    if not words:
        torch.autograd.backward(loss(plain))
        for each in (*optimizers, *steppers):
            each.step()
    return words, max(moved(each, other.state_dict()) for each, other in zip(models, plain, strict=True))


def cleared_on_one_rank(stage: int, late: bool) -> tuple[str, float]:
    """Rank 1 clears the gradients of a layer, before the last backward pass or behind it; what a step says and does."""
    model, optimizer = sharded(stage)
    before = shoal.zero.full_state_dict(model)
    for step in range(2):
        backward(model, step)
        if dist.get_rank() == 1 and step == late:
            model.layers[1].zero_grad()
    return said(optimizer.step), moved(model, before)


class Fails(torch.optim.SGD):
    """Its second step breaks off on rank 1, when some parameters are stepped. Not when it is tried."""

    armed = False

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps."""
        self.calls = getattr(self, "calls", 0) + 1
        super().step()
        if self.armed and self.calls == 2 and dist.get_rank() == 1:
            raise ArithmeticError("no more memory")
        return None


def inner_fails(stage: int) -> tuple[str, bool]:
    """What is said on each rank; and whether all have the same weights afterwards, and go on with them."""
    model = Odd()
    model, optimizer = shoal.zero.shard(model, lambda each: Fails(each, lr=0.1), stage=stage)
    optimizer.inner.armed = True  # type: ignore[attr-defined]
    words = ""
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        words += said(optimizer.step)
    states: list[State] = [{}] * dist.get_world_size()
    dist.all_gather_object(states, {name: value.clone() for name, value in shoal.zero.full_state_dict(model).items()})
    return words, all(same(state, states[0]) for state in states)


def old_graph(stage: int, dtype: torch.dtype | None) -> tuple[str, str]:
    """What a second backward pass of a loss says, before a step and behind it."""
    model, optimizer = shoal.zero.shard(Pair(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage, dtype=dtype)
    loss = model(torch.ones(2, 6)).sum()  # its gradient needs a parameter that one rank owns
    torch.autograd.backward(loss, retain_graph=True)
    first = said(lambda: torch.autograd.backward(loss, retain_graph=True))
    optimizer.step()
    return first, said(lambda: torch.autograd.backward(loss))


class Twice(torch.nn.Module):
    """A layer that comes twice, in reentrant activation checkpoints, and one that a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, *, both: bool, reentrant: bool) -> torch.Tensor:
        """Shape (batch, 8)."""
        for _ in range(2):
            hidden = (
                checkpoint(self.layer, hidden.tanh(), use_reentrant=True) if reentrant else self.layer(hidden.tanh())
            )
        found: torch.Tensor = self.other(hidden) if both else hidden
        return found


def unlike_checkpoints(stage: int) -> float:
    """How far weights are from those of one process, if a bucket is complete early on one rank, and late on the other.

    So the layer's second gradient comes behind it, or in time.
    """
    model, alone = Twice(), Twice()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)

    def loss(each: Twice, rank: int, *, reentrant: bool) -> torch.Tensor:
        inputs = torch.full((2, 8), 0.3 + rank, requires_grad=True)
        made: torch.Tensor = each(inputs, both=rank == 1, reentrant=reentrant)
        return made.square().sum()

    for _ in range(2):
        torch.autograd.backward(loss(model, dist.get_rank(), reentrant=True))
        torch.autograd.backward(loss(alone, 0, reentrant=False) / 2 + loss(alone, 1, reentrant=False) / 2)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    return moved(model, alone.state_dict())


class Summed(torch.autograd.Function):
    """The same, whose gradient is summed over the ranks: as in a loss over the batches of all."""

    @staticmethod
    def forward(_: object, hidden: torch.Tensor) -> torch.Tensor:
        """The same."""
        return hidden.clone()

    @staticmethod
    def backward(_: object, *gradients: torch.Tensor) -> torch.Tensor:
        """With an all-reduce."""
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class Meets(torch.nn.Module):
    """Many layers, a collective behind them in the backward pass, and a layer at the end that one rank leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(8))
        self.last = torch.nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, *, whole: bool) -> torch.Tensor:
        """Shape (batch, 8)."""
        hidden = Summed.apply(self.layers[0](hidden))  # type: ignore[no-untyped-call]
        for layer in self.layers[1:]:
            hidden = layer(hidden).tanh()
        found: torch.Tensor = self.last(hidden) if whole else hidden
        return found


def collective_in_backward(stage: int) -> tuple[float, bool]:
    """How far the layer went that one rank left out; whether all ranks have the same weights."""
    before, reduction.PATIENCE_S = reduction.PATIENCE_S, 0.1
    try:
        with small_buckets(300):
            model, optimizer = shoal.zero.shard(Meets(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    finally:
        reduction.PATIENCE_S = before
    start = shoal.zero.full_state_dict(model)
    for _ in range(2):
        torch.autograd.backward(model(torch.ones(2, 8), whole=dist.get_rank() == 1).sum())
        optimizer.step()
        optimizer.zero_grad()
    found = shoal.zero.full_state_dict(model)
    states: list[State] = [{}] * dist.get_world_size()
    dist.all_gather_object(states, found)
    return float((found["last.weight"] - start["last.weight"]).abs().max()), all(same(each, found) for each in states)


def shared_again(stage: int) -> tuple[str, bool, bool]:
    """What a factory's error is; whether the model is as before; and whether training goes on after a second call."""
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = said(
        lambda: shoal.zero.shard(
            model,
            lambda each: torch.optim.SGD(each, lr=0.1 + dist.get_rank()),
            stage=stage,
            dtype=torch.bfloat16,
        )
    )
    kept = same(shoal.zero.full_state_dict(model), before)
    _, optimizer = shoal.zero.shard(model, make("sgd", model), stage=stage, dtype=torch.bfloat16)
    _, wanted = fresh = sharded(stage, "sgd", torch.bfloat16)
    for each, stepped in ((model, optimizer), (fresh[0], wanted)):
        backward(each)
        stepped.step()
    return words, kept, same(shoal.zero.full_state_dict(model), shoal.zero.full_state_dict(fresh[0]))


def nested_checkpoints() -> str:
    """What a step of stage 3 says after a pass with reentrant checkpoints within each other."""
    model, optimizer = shoal.zero.shard(Segments(), lambda each: torch.optim.SGD(each, lr=0.1), stage=3)
    torch.autograd.backward(model(torch.ones(3, 8, requires_grad=True), reentrant=True).sum())
    return said(optimizer.step)


def used_in_the_last_micro_batch(stage: int) -> float:
    """How far weights are from those of one process, if a layer has a gradient of one of two micro-batches alone."""
    model, alone = Parts(), Parts()
    alone.load_state_dict(model.state_dict())
    model, optimizer = shoal.zero.shard(
        model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage, dtype=torch.bfloat16
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    start = shoal.zero.full_state_dict(model)
    alone.load_state_dict(start)
    for last in (False, True):
        with nullcontext() if last else optimizer.no_sync():
            torch.autograd.backward(model(torch.ones(2, 5), first=last).sum())
        torch.autograd.backward(alone(torch.ones(2, 5), first=last).sum())
    for each in (optimizer, plain):
        each.step()
    assert moved(model, start) > 0.1
    return moved(model, alone.state_dict())
