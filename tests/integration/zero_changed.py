"""Ways in which programs change weights between steps, on the ranks of the tests of `shoal.zero`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters

import shoal.zero
from tests.integration.zero_programs import said

WIDTH = 4


class Net(torch.nn.Module):
    """Two units, and a head that is in none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (batch, WIDTH)."""
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        found: torch.Tensor = self.head(hidden)
        return found


def values() -> torch.Tensor:
    """Of a weight, each another one."""
    return torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH) / 20 - 0.3


def _whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.full(each.shape, 0.25) for name, each in model.state_dict().items()}


def _set(weight: Any, found: torch.Tensor) -> None:
    weight.data = found


def _from_another(model: Any, write: Callable[[Any, torch.Tensor], object]) -> None:
    for one, name in zip(model.parameters(), _whole(model), strict=True):
        write(one, _whole(Net())[name])


def _replace(module: Any, key: str, found: Any) -> None:
    setattr(module, key, found)


def _grow(weight: Any) -> None:
    weight.data += 0.5


def _put(weight: Any, where: Any, found: Any) -> None:
    weight[where] = found


def _add_to_row(weight: Any) -> None:
    weight[1] += 2.0


def _kept_part(weight: Any) -> None:
    """A part that is taken before the weight changes is that of the new values."""
    part = weight[1]
    weight.mul_(2.0)
    weight[0].copy_(part)


def _by_vector(source: Any, target: Any) -> None:
    vector = parameters_to_vector(source.parameters())
    vector_to_parameters(vector.detach() * 0.5 + 0.1 * torch.randn(len(vector)), target.parameters())


def _unseeded(model: Any, init: Callable[[torch.Tensor], object]) -> None:
    torch.manual_seed(0)
    init(model.layers[0].weight)


RIGHT: dict[str, Callable[[Any], object]] = {
    "data = values": lambda model: _set(model.layers[0].weight, values()),
    "data = data * 2": lambda model: _set(model.layers[0].weight, model.layers[0].weight.data * 0.5),
    "data += 1": lambda model: _grow(model.layers[0].weight),
    "data.copy_": lambda model: model.layers[0].weight.data.copy_(values()),
    "copy_": lambda model: model.layers[0].weight.copy_(values()),
    "add_": lambda model: model.layers[0].weight.add_(values()),
    "lerp_": lambda model: model.layers[0].weight.lerp_(values(), 0.5),
    "mul_": lambda model: model.layers[0].weight.mul_(0.5),
    "fill_": lambda model: model.head.weight.data.fill_(0.25),
    "out=": lambda model: torch.mul(model.head.weight, 0.5, out=model.head.weight),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "clamp_ of all": lambda model: [each.data.clamp_(-0.1, 0.1) for each in model.parameters()],
    "divided by its norm": lambda model: model.layers[0].weight.div_(model.layers[0].weight.norm()),
    "constant_": lambda model: torch.nn.init.constant_(model.layers[0].weight, 0.25),
    "eye_": lambda model: torch.nn.init.eye_(model.layers[0].weight),
    "xavier_uniform_": lambda model: _unseeded(model, torch.nn.init.xavier_uniform_),
    "kaiming_normal_": lambda model: _unseeded(model, torch.nn.init.kaiming_normal_),
    "orthogonal_": lambda model: _unseeded(model, torch.nn.init.orthogonal_),
    "normal_": lambda model: _unseeded(model, lambda each: each.normal_()),
    "noise": lambda model: _unseeded(model, lambda each: each.add_(torch.randn_like(each), alpha=0.1)),
    "reset_parameters": lambda model: _unseeded(model, lambda _: model.layers[1].reset_parameters()),
    "apply": lambda model: model.layers.apply(lambda each: hasattr(each, "weight") and each.weight.data.fill_(0.1)),
    "trunc_normal_": lambda model: _unseeded(model, torch.nn.init.trunc_normal_),
    "trunc_normal_ of a tail": lambda model: _unseeded(model, lambda each: torch.nn.init.trunc_normal_(each, a=1, b=2)),
    "sparse_": lambda model: _unseeded(model, lambda each: torch.nn.init.sparse_(each, 0.5)),
    "erfinv_": lambda model: _unseeded(model, lambda each: each.uniform_(-0.9, 0.9).erfinv_().mul_(0.5)),
    "dropout": lambda model: _unseeded(model, lambda each: torch.nn.functional.dropout(each, inplace=True)),
    "of dropout": lambda model: _unseeded(model, lambda each: each.copy_(torch.nn.functional.dropout(each))),
    "a row": lambda model: _put(model.layers[0].weight, 0, 0.25),
    "a row of data": lambda model: _put(model.layers[0].weight.data, 0, 0.25),
    "rows": lambda model: _put(model.layers[0].weight, slice(1, 3), values()[:2]),
    "rows of its own": lambda model: _put(model.layers[0].weight, slice(0, 2), model.layers[0].weight[2:]),
    "columns": lambda model: _put(model.layers[0].weight, (slice(None), slice(1, 3)), 0.25),
    "a value": lambda model: _put(model.layers[0].bias.data, 3, 0.25),
    "values by a mask": lambda model: _put(model.layers[0].weight, values() > 0, 0.25),
    "values by its own mask": lambda model: _put(model.layers[0].weight, model.layers[0].weight > 0, 0.25),
    "rows by numbers": lambda model: _put(model.layers[0].weight, [3, 0], 0.25),
    "a row added to": lambda model: _add_to_row(model.layers[0].weight.data),
    "a row of zeros": lambda model: model.layers[0].weight[0].zero_(),
    "a row of data of zeros": lambda model: model.layers[0].weight.data[3].zero_(),
    "a row of rows": lambda model: model.layers[0].weight[1:3][1].fill_(0.25),
    "a part that was kept": lambda model: _kept_part(model.layers[0].weight),
    "drawn rows": lambda model: _unseeded(model, lambda each: torch.nn.init.normal_(each[1:3])),
    "drawn columns": lambda model: _unseeded(model, lambda each: torch.nn.init.normal_(each[:, 1:3])),
    "chunks": lambda model: [each.mul_(k) for k, each in enumerate(model.layers[0].weight.chunk(4))],
    "diagonal": lambda model: model.layers[0].weight.diagonal().fill_(0.25),
    "index_put_": lambda model: model.layers[0].weight.index_put_((torch.tensor([1, 1]),), values()[:2], True),
    "index_add_": lambda model: model.layers[0].weight.index_add_(0, torch.tensor([3]), values()[:1]),
    "index_fill_": lambda model: model.layers[0].weight.index_fill_(0, torch.tensor([3]), 0.25),
    "scatter_": lambda model: model.layers[0].weight.scatter_(0, torch.full((1, WIDTH), 3), 0.25),
    "masked_scatter_": lambda model: model.layers[0].weight.masked_scatter_(values() > 0, values()),
    "tril_": lambda model: model.layers[0].weight.tril_(),
    "renorm_": lambda model: model.layers[0].weight.renorm_(2, 1, 0.5),
    "cumsum_": lambda model: model.layers[0].weight.cumsum_(0),
    "less its mean": lambda model: model.layers[0].weight.sub_(model.layers[0].weight.mean(0)),
    "its transpose": lambda model: model.layers[0].weight.copy_(model.layers[0].weight.t().clone()),
    "foreach_copy": lambda model: torch._foreach_copy_([*model.parameters()], [*_whole(model).values()]),
    "load_state_dict": lambda model: model.load_state_dict(_whole(model)),
    "that of a layer": lambda model: model.layers[1].load_state_dict(_whole(model.layers[1])),
    "copies from a model": lambda model: _from_another(model, lambda one, other: one.data.copy_(other)),
    "foreach of rows": lambda model: torch._foreach_add_([model.head.weight[0], model.head.weight.data[2]], 1.0),
    "randn out= data": lambda model: _unseeded(model, lambda each: torch.randn(WIDTH, WIDTH, out=each.data)),
    "normal out=": lambda model: _unseeded(model, lambda each: torch.normal(each, 0.1, out=each)),
    "zeros out=": lambda model: torch.zeros(WIDTH, WIDTH, out=model.layers[0].weight),
    "rand out=": lambda model: _unseeded(model, lambda each: torch.rand(WIDTH, WIDTH, out=each)),
    "add out= a row": lambda model: torch.add(values()[0], 1.0, out=model.layers[0].weight[0]),
    "mean out= a bias": lambda model: torch.mean(model.layers[0].weight, 0, out=model.layers[0].bias),
    "cumsum out=": lambda model: torch.cumsum(model.layers[0].weight, 0, out=model.layers[0].weight),
    "qr out= two": lambda model: torch.linalg.qr(
        values() + torch.eye(WIDTH), out=(model.layers[0].weight, model.layers[1].weight)
    ),
    "pruned": lambda model: prune.remove(prune.l1_unstructured(model.layers[0], "weight", 0.5), "weight"),  # type: ignore[no-untyped-call]
    "data = another's * 0.5": lambda model: _set(model.layers[0].weight, model.layers[1].weight.data * 0.5),
    "data = a clone of another": lambda model: _set(model.layers[0].weight, model.layers[1].weight.detach().clone()),
    "data = a mean": lambda model: _set(
        model.layers[0].weight, torch.stack([model.layers[0].weight, model.head.weight]).mean(0)
    ),
    "frozen": lambda model: model.layers[0].weight.requires_grad_(requires_grad=False),
    "all but the head frozen": lambda model: (model.requires_grad_(requires_grad=False), model.head.requires_grad_()),
}
"""What is as in one process in each stage."""
MOVED: dict[str, Callable[[Any], object]] = {
    "vector_to_parameters": lambda model: vector_to_parameters(
        torch.full((sum(each.numel() for each in model.parameters()),), 0.25), model.parameters()
    ),
    "parameters_to_vector": lambda model: vector_to_parameters(
        parameters_to_vector(model.parameters()), model.parameters()
    ),
    "a vector and noise": lambda model: _unseeded(model, lambda _: _by_vector(model, model)),
    "a vector of another layer": lambda model: _unseeded(model, lambda _: _by_vector(model.layers[1], model.layers[0])),
    "data from a model": lambda model: _from_another(model, _set),
}
"""The same, where values come in other memory."""
REFUSED: dict[str, Callable[[Any], object]] = {
    "set_": lambda model: model.layers[0].weight.set_(values()),
    "data.set_": lambda model: model.layers[0].weight.data.set_(values()),
    "share_memory": lambda model: model.share_memory(),
    "one by one": lambda model: [each.mul_(k) for k, each in enumerate(model.layers[0].weight)],
    "as an array": lambda model: model.layers[0].weight.detach().numpy().fill(0.25),
    "another shape": lambda model: _set(model.layers[0].weight, torch.zeros(2, 2)),
    "another dtype": lambda model: _set(model.layers[0].weight, values().double()),
    "tied data": lambda model: _set(model.layers[0].weight, model.layers[1].weight.data),
    "tied": lambda model: _replace(model.layers[0], "weight", model.layers[1].weight),
    "replaced": lambda model: _replace(model.layers[0], "weight", torch.nn.Parameter(values())),
    "a new layer": lambda model: model.layers.__setitem__(0, torch.nn.Linear(WIDTH, WIDTH)),
    "taken away": lambda model: model.layers[0].register_parameter("weight", None),
    "added": lambda model: model.layers[0].register_parameter("weights", torch.nn.Parameter(values())),
    "assign=True": lambda model: model.load_state_dict(_whole(model), assign=True),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.layers[0].double(),
    "a gradient": lambda model: setattr(model.layers[0].weight, "grad", torch.ones(WIDTH, WIDTH)),
    "spectral_norm": lambda model: parametrizations.spectral_norm(model.layers[0]),
    "orthogonal": lambda model: parametrizations.orthogonal(model.layers[0]),
    "a mask": lambda model: prune.custom_from_mask(model.layers[0], "weight", values() > 0),  # type: ignore[no-untyped-call]
    "out= of another shape": lambda model: torch.randn(2, 2, out=model.layers[0].weight.data),
}
"""What is an error in stage 3 that names the weight."""


GRADED = ("spectral_norm", "orthogonal", "a mask", "another dtype", "parameters_to_vector", "a vector and noise")


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def changed(cases: Sequence[str], stage: int, steps: int) -> dict[str, tuple[str, float]]:
    """What is said where a program changes a weight so, behind some steps; and how far all is from one process then."""
    ways = RIGHT | MOVED | REFUSED
    return {how: _changed(ways[how], stage, steps, graded=how in GRADED) for how in cases}


def _changed(write: Callable[[Any], object], stage: int, steps: int, graded: bool) -> tuple[str, float]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, plain = Net(), Net()
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)

    def train(step: int) -> None:
        model(_batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train_alone(step: int) -> None:
        torch.stack([plain(_batch(step, each)).square().mean() for each in range(ranks)]).mean().backward()  # type: ignore[no-untyped-call]
        stepper.step()
        stepper.zero_grad()

    def do(each: torch.nn.Module) -> None:
        with torch.set_grad_enabled(graded):
            write(each)

    for step in range(steps):
        train(step)
        train_alone(step)
    if words := said(lambda: do(model)) or said(lambda: train(9)):
        return words, -1.0
    do(plain)
    train_alone(9)
    after = shoal.zero.full_state_dict(model)
    return "", max(float((after[name] - value).abs().max()) for name, value in plain.state_dict().items())


def assigned(stage: int) -> dict[str, float]:
    """How far a model is from one process where a program assigns weights that are computed from others."""
    found = {}
    for how in ("weight_norm", "spectral_norm", "orthogonal"):
        nets = [Net(), Net()]
        for each in nets:
            torch.manual_seed(2)
            getattr(parametrizations, how)(each.layers[0])
        model, optimizer = shoal.zero.shard(nets[0], lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
        stepper = torch.optim.SGD(nets[1].parameters(), lr=0.1)
        for step in range(3):
            for each, stepped in ((model, optimizer), (nets[1], stepper)):
                each(_batch(step, 0)).square().mean().backward()
                stepped.step()
                stepped.zero_grad()
                if step == 1:
                    each.layers[0].weight = torch.eye(WIDTH) * 0.5 if how != "orthogonal" else torch.eye(WIDTH).flip(0)
        after = shoal.zero.full_state_dict(model)
        found[how] = max(float((after[name] - value).abs().max()) for name, value in nets[1].state_dict().items())
    return found


def parametrized(stage: int) -> list[str]:
    """What is said where a program takes a parametrization away, of one original tensor and of two, and trains on."""
    found = []
    for how in ("spectral_norm", "weight_norm"):
        model = Net()
        getattr(parametrizations, how)(model.layers[0])
        model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)

        def go_on(model: Any = model, optimizer: Any = optimizer) -> None:
            parametrize.remove_parametrizations(model.layers[0], "weight")
            model(_batch(0, 0)).square().mean().backward()
            optimizer.step()

        found.append(said(go_on))
    return found


def _put_back(model: Any) -> None:
    before = [each.detach().clone() for each in model.parameters()]
    torch._foreach_mul_([*model.parameters()], 2.0)
    for each, old in zip(model.parameters(), before, strict=True):
        each.copy_(old)


APART: dict[str, tuple[int | None, Callable[[Any], object]]] = {
    "mul_": (0, lambda model: model.layers[0].weight.mul_(2.0)),
    "data.mul_ of rank 1": (1, lambda model: model.head.bias.data.add_(2.0)),
    "data = values": (0, lambda model: _set(model.layers[0].weight, values())),
    "load_state_dict": (0, lambda model: model.load_state_dict(_whole(model))),
    "foreach": (1, lambda model: torch._foreach_mul_([*model.parameters()], 2.0)),
    "normal_": (0, lambda model: torch.nn.init.normal_(model.layers[1].weight)),
    "unlike seeds": (None, lambda model: (torch.manual_seed(dist.get_rank()), model.layers[1].weight.normal_())),
    "unlike numbers": (None, lambda model: model.layers[0].weight.mul_(2.0 + dist.get_rank())),
    "unlike values": (None, lambda model: model.layers[0].weight.copy_(values() + dist.get_rank())),
    "a row": (0, lambda model: _put(model.layers[0].weight, 0, 0.25)),
    "a row of zeros": (1, lambda model: model.layers[0].weight[0].zero_()),
    "a row added to": (0, lambda model: _add_to_row(model.layers[0].weight)),
    "diagonal": (1, lambda model: model.layers[0].weight.diagonal().fill_(0.25)),
    "drawn rows": (0, lambda model: torch.nn.init.normal_(model.layers[0].weight[1:3])),
    "rows by numbers": (1, lambda model: _put(model.layers[0].weight, [3, 0], 0.25)),
    "a row by out=": (0, lambda model: torch.add(values()[0], 1.0, out=model.layers[0].weight[0])),
    "copy_": (1, lambda model: model.head.weight.copy_(values())),
    "unlike places": (None, lambda model: model.layers[0].weight[dist.get_rank()].zero_()),
    "unlike rows": (None, lambda model: _put(model.layers[0].weight.data, 0, 2.0 + dist.get_rank())),
}
"""Changes that one rank alone makes, or all of them otherwise (None)."""


def apart(cases: Sequence[str], stage: int) -> dict[str, list[str]]:
    """What a step, a clipping or `save` says behind such a change, and a step that follows a `load` of weights."""
    return {how: _apart(*APART[how], stage) for how in cases}


def _apart(who: int | None, write: Callable[[Any], object], stage: int) -> list[str]:
    model, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)

    def train() -> None:
        model(_batch(0, dist.get_rank())).square().mean().backward()
        optimizer.step()

    train()
    if who in (None, dist.get_rank()):
        with torch.no_grad():
            write(model)
    model(_batch(0, dist.get_rank())).square().mean().backward()
    words = [
        said(lambda: optimizer.clip_grad_norm_(1.0)),
        said(optimizer.step),
        said(lambda: shoal.zero.save("/proc/nowhere", model, optimizer)),
    ]
    optimizer.zero_grad()
    shoal.zero.load({name: torch.full(each.shape, 0.25) for name, each in Net().state_dict().items()}, model, optimizer)
    return [*words, said(train)]


def put_back(stage: int) -> str:
    """What a step says behind a change that one rank alone has made, and taken back."""
    return _apart(0, _put_back, stage)[1]


def frozen_in_inference_mode() -> str:
    """What a step of stage 2 says where a frozen weight was made in inference mode: torch counts no changes of it."""
    model = Net()
    with torch.inference_mode():
        model.layers[0] = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=2)
    model(_batch(0, dist.get_rank())).square().mean().backward()
    return said(optimizer.step)


def swapped(stage: int) -> list[str]:
    """What is said where a parameter is swapped: with another tensor, with another parameter, by `load_state_dict`."""
    found = []
    for how in ("tensor", "parameter", "load_state_dict"):
        model, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
        model.to("cpu")  # swaps, too, and changes nothing

        def swap(model: Any = model, how: str = how) -> None:
            if how == "load_state_dict":
                torch.__future__.set_swap_module_params_on_conversion(True)
                model.load_state_dict(_whole(model))
                return
            other = model.layers[0].weight if how == "parameter" else torch.nn.Parameter(values())
            torch.utils.swap_tensors(model.head.weight, other)  # type: ignore[no-untyped-call]

        def train(model: Any = model, optimizer: Any = optimizer) -> None:
            model(_batch(0, 0)).square().mean().backward()
            optimizer.step()

        try:
            found.append(said(swap) or said(train))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    return found


def copied() -> str:
    """What is said where a sharded optimizer is copied."""
    _, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=2)
    return said(lambda: copy.deepcopy(optimizer))


def wrapped(stage: int) -> list[str]:
    """What `DistributedDataParallel` says of a sharded model, and of a copy of one, which is no more sharded."""
    model, _ = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    words = [said(lambda: DistributedDataParallel(model))]
    return words if stage == 3 else [*words, said(lambda: DistributedDataParallel(copy.deepcopy(model)))]


def hidden() -> list[str]:
    """What a step says behind a change of one value, through ``.data``, on one rank alone."""
    return _apart(1, lambda model: _put(model.layers[0].weight.data, (0, 1), 5.0), 2)


def read_parts() -> list[bool]:
    """Whether parts of a weight of stage 3 that a program reads are those of one process."""
    weight: Any = Net().state_dict()["layers.0.weight"]
    model, _ = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=3)
    ways: list[Callable[[Any], Any]] = [
        lambda each: each[1],
        lambda each: each[1:3][1],
        lambda each: each.chunk(2)[1],
        lambda each: each.flatten()[3:9] * 2,
        lambda each: each.diagonal().sum(),
    ]
    found = []
    for way in ways:
        with torch.no_grad():
            part = way(model.layers[0].weight)
            found.append(bool(torch.equal(part.full_tensor(), way(weight))))
    return found


def needs_others(how: str) -> str:
    """What is said where one rank alone changes a weight by what depends on rows of others."""
    model, _ = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=3)
    with torch.no_grad():
        if dist.get_rank() == 0:
            RIGHT[how](model)
        model(_batch(0, 0))
    return ""


def saved_before_a_step() -> float:
    """A weight in a checkpoint that was saved behind ``data = values``."""
    model, optimizer = shoal.zero.shard(Net(), lambda each: torch.optim.SGD(each, lr=0.1), stage=1)
    model.head.weight.data = torch.full((WIDTH, WIDTH), 0.25)
    places = [tempfile.mkdtemp()]
    dist.broadcast_object_list(places)
    shoal.zero.save(f"{places[0]}/saved", model, optimizer)
    model.head.weight.data.zero_()
    shoal.zero.load(f"{places[0]}/saved", model, optimizer)
    return float(model.head.weight.detach().mean())
