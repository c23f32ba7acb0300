"""What stages 1 and 2 may share out of an optimizer: every one of torch and of pytorch_optimizer, tried."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import bitsandbytes
import numpy as np
import pytest
import pytorch_optimizer
import torch
from transformers.optimization import Adafactor

from shoal.zero.probe import Finding, Unit, finding, why_not_saved, why_not_sharded

EIGHT_BITS: Any = bitsandbytes.optim
WEIGHTS = "gives a tensor other weights if it is cut into pieces"
STATE = "keeps '"
NUMBER = "keeps another '"
APART = "gives a tensor other weights if another rank steps the other tensors"
STILL = "does not move small tensors"
RANDOM = "draws random numbers"
RAISES = "raises when it steps"
Verdict = Unit | str
"""What may be stepped by itself, or why nothing may."""

TORCH: dict[Verdict, str] = {
    Unit.VALUE: "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    Unit.TENSOR: "Adafactor Muon",
    RAISES: "LBFGS SparseAdam",
}
"""Of `torch.optim`. LBFGS needs a closure, SparseAdam sparse gradients."""
OTHERS: dict[Verdict, str] = {
    Unit.VALUE: (
        "accsgd adabelief adabound adadelta adam adamax adamc adamg adamod adamw adamwsn adan adapnm "
        "adasmooth ademamix adopt ano apollo bcos diffgrad dualadam emolynx emonavi exadam fira focus ftrl galore "
        "grams grokfastadamw kate laprop lion madgrad msvag nadam padam pid pnm qhadam qhm radam rmsprop "
        "schedulefreeadamw schedulefreeradam schedulefreesgd sgd sgdw signsgd simplifiedademamix srmm tiger vsgd "
        "yogi"
    ),
    Unit.TENSOR: (
        "a2grad adafactor adago adalite adammini adamp adamuon adanorm adatam aggmo aida amos apollodqn came emofact "
        "fadam flashadamw fromage lamb lars mars muon muonclip nero normuon novograd racs ranger rose scion scionlight "
        "sgdp sgdsai shampoo sm3 soap spam splus stableadamw stablespam swats tam"
    ),
    APART: "adagc adai adams asgd avagrad dadaptadagrad dadaptadam dadaptadan dadaptsgd prodigy ranger21",
    NUMBER: "dadaptlion",
    STATE: "adashift conda scalableshampoo",
    STILL: "sara",
    RANDOM: "alice dash gravity kron magma",
    RAISES: "adahessian adalomo alig bsam lbfgs lomo lorarite sophiah spectralsphere",
}
"""Of pytorch_optimizer, at their defaults. What raises needs a closure, second derivatives, the model, matrices or
pairs."""
DAILY = {
    *("adamp", "adafactor", "came", "lamb", "lars", "novograd", "sgdp", "soap", "stableadamw"),
    *("ademamix", "adopt", "lion", "madgrad", "schedulefreeadamw", "schedulefreesgd", "tiger"),
}
"""Of those of which ranks may step a part: the rest are among the long tests."""
UNBUILT = {"demo", "distributedmuon"}
"""They need another package, and a process group of their own."""


class Model(torch.nn.Module):
    """Parameters of one, two and four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images, self.matrix = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(20, 10)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(requires_grad=False)


def tried(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Finding:
    """What the probe says of what `make` builds; nothing may have changed."""
    model = Model()
    optimizer = make([each for each in model.parameters() if each.requires_grad])
    before = snapshot(model, optimizer)
    found = finding(optimizer, model)
    assert snapshot(model, optimizer) == before
    return found


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a probe must leave alone: values, gradients, groups, state, and generators of random numbers."""
    return [
        [(id(each), each.tolist(), each.grad, each.requires_grad) for each in model.parameters()],
        [{**group, "params": [*map(id, group["params"])]} for group in optimizer.param_groups],
        str(dict(optimizer.state)),
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.get_default_device(),
    ]


def is_verdict(found: Finding, verdict: Verdict) -> bool:
    """Whether this was found."""
    if isinstance(verdict, Unit):
        return found.unit is verdict
    return found.unit is None and found.reason.startswith(verdict)


def of_torch(name: str) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Muon takes matrices only."""
    kind = getattr(torch.optim, name)
    return lambda parameters: kind([each for each in parameters if each.ndim == 2] if name == "Muon" else parameters)


def of_others(name: str) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Some need to be told more than parameters."""
    kind: Any = pytorch_optimizer.load_optimizer(name)
    if name in ("adago", "adamuon", "muon", "muonclip", "normuon"):
        return lambda parameters: kind(muon_groups(parameters, matrices=True))
    if name in ("adalomo", "adammini", "lomo"):
        return lambda _: kind(Model())
    more = {"ranger21": {"num_iterations": 100}, "bsam": {"num_data": 100}}
    return lambda parameters: kind(parameters, **more.get(name, {}))


def muon_groups(parameters: list[torch.nn.Parameter], *, matrices: bool) -> list[dict[str, Any]]:
    """Vectors by AdamW, in a group of their own; matrices by Muon, or not."""
    return [
        {"params": [each for each in parameters if each.ndim > 1], "use_muon": matrices},
        {"params": [each for each in parameters if each.ndim < 2], "use_muon": False},
    ]


def cases(table: dict[Verdict, str]) -> list[tuple[str, Verdict]]:
    """Each name with its verdict."""
    return [(name, verdict) for verdict, names in table.items() for name in names.split()]


def test_every_optimizer_of_torch_and_of_pytorch_optimizer_has_a_verdict() -> None:
    """One that comes with a later version is missed here, not in somebody's training."""
    kinds = {name for name, each in vars(torch.optim).items() if isinstance(each, type)} - {"Optimizer"}
    assert sorted(name for name, _ in cases(TORCH)) == sorted(kinds)
    names = pytorch_optimizer.get_supported_optimizers()
    assert sorted([*(name for name, _ in cases(OTHERS)), *UNBUILT]) == sorted(names)


@pytest.mark.parametrize(("name", "verdict"), cases(TORCH))
def test_optimizers_of_torch(name: str, verdict: Verdict) -> None:
    """What treats each value by itself may be cut, and nothing else."""
    assert is_verdict(tried(of_torch(name)), verdict)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        pytest.param(*each, marks=pytest.mark.long if isinstance(each[1], Unit) and each[0] not in DAILY else ())
        for each in cases(OTHERS)
    ],
)
def test_optimizers_that_need_whole_tensors_are_found_by_trying(name: str, verdict: Verdict) -> None:
    """They were refused by the names of some classes: NovoGrad, AdamP, CAME and others gave wrong weights, silently."""
    assert is_verdict(tried(of_others(name)), verdict)


@pytest.mark.parametrize(
    ("name", "verdict"), [("sgdp", Unit.TENSOR), ("adams", APART), ("adamp", Unit.TENSOR), ("adamw", Unit.VALUE)]
)
def test_what_differs_from_whole_tensors_is_accepted_for_a_model_of_linear_layers(name: str, verdict: Verdict) -> None:
    """SGDP, that projects nothing where gradient and weight are wholly orthogonal; AdamS by 1e-5 in 300 steps."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Linear(10, 7))
    assert is_verdict(finding(of_others(name)(list(model.parameters())), model), verdict)


@pytest.mark.parametrize("name", ["gravity", "alice", "dash", "kron", "magma", "adamw", "lamb", "adafactor"])
def test_stage_3_takes_an_optimizer_that_draws_random_numbers(name: str) -> None:
    """Gravity trained in stage 3, where each rank drew its own. Others are not judged there: they step whole rows."""
    model = Model()
    optimizer = of_others(name)([each for each in model.parameters() if each.requires_grad])
    before = snapshot(model, optimizer)
    found = why_not_sharded(optimizer, model)
    assert (found is not None and found.startswith(RANDOM)) is (name in OTHERS[RANDOM].split())
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize("name", ["adamw", "lamb", "prodigy"])
def test_a_probe_finds_the_same_again(name: str) -> None:
    """All ranks must find the same."""
    assert tried(of_others(name)) == tried(of_others(name))


def projected(**more: Any) -> dict[str, Any]:
    """Options of a group whose gradients are projected to few dimensions."""
    return {"rank": 4, "update_proj_gap": 200, "scale": 1.0, "projection_type": "std", **more}


OPTIONS: dict[str, tuple[Callable[[Any], Any], Verdict]] = {
    "foreach": (lambda each: torch.optim.AdamW(each, foreach=True), Unit.VALUE),
    "fused": (lambda each: torch.optim.AdamW(each, fused=True), Unit.VALUE),
    "a rate of 0": (lambda each: torch.optim.AdamW(each, lr=0.0), Unit.VALUE),
    "a rate that is a tensor": (lambda each: torch.optim.AdamW(each, lr=torch.tensor(0.0)), Unit.VALUE),
    "a high rate": (lambda each: torch.optim.SGD(each, lr=10.0, momentum=0.9), Unit.VALUE),
    "state from the beginning": (lambda each: torch.optim.Adagrad(each, initial_accumulator_value=0.1), Unit.VALUE),
    "without matrices": (lambda each: of_class("muon")(muon_groups(each, matrices=False)), Unit.VALUE),
    "of vectors alone": (lambda each: of_class("adamp")([value for value in each if value.ndim < 2]), Unit.VALUE),
    "around another": (lambda each: pytorch_optimizer.Lookahead(torch.optim.AdamW(each)), Unit.VALUE),
    "around one of many attributes": (lambda each: pytorch_optimizer.OrthoGrad(of_class("lamb")(each)), Unit.TENSOR),
    "with a schedule": (lambda each: scheduled(torch.optim.AdamW(each)), Unit.VALUE),
    "clips": (lambda each: of_class("adan")(each, max_grad_norm=1.0), APART),
    "in one group": (
        lambda each: of_class("galore")([{"params": each[:1]}, {"params": each[1:], **projected()}]),
        STATE,
    ),
    "a random projection": (
        lambda each: of_class("apollo")([{"params": each, **projected(scale_type="tensor")}]),
        RANDOM,
    ),
    "Hugging Face": (Adafactor, Unit.TENSOR),
    "8 bits": (EIGHT_BITS.AdamW8bit, Unit.TENSOR),
    "32 bits": (EIGHT_BITS.AdamW32bit, Unit.VALUE),
    "LAMB": (EIGHT_BITS.LAMB, Unit.TENSOR),
    "a closure": (lambda each: pytorch_optimizer.SAM(each, base_optimizer=torch.optim.AdamW), RAISES),
}


def of_class(name: str) -> Any:
    """Of pytorch_optimizer."""
    return pytorch_optimizer.load_optimizer(name)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A schedule puts a step of its own in the place of the optimizer's."""
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return optimizer


@pytest.mark.parametrize("name", OPTIONS)
def test_options_decide_too(name: str) -> None:
    """Of the optimizer, and of each of its groups: what is tried is what the factory built."""
    make, verdict = OPTIONS[name]
    assert is_verdict(tried(make), verdict)


def test_statistics_of_a_wrapped_optimizer_are_missed() -> None:
    """Checkpoints had those of Lookahead, and none of the AdamW in it."""
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    adamw = torch.optim.AdamW(parameters)
    assert why_not_saved(adamw) is why_not_saved(pytorch_optimizer.OrthoGrad(adamw)) is None
    assert "the AdamW that it wraps ('optimizer')" in (why_not_saved(pytorch_optimizer.Lookahead(adamw)) or "")
    assert "the number 'total_step'" in (why_not_saved(of_class("stablespam")(parameters)) or "")


def test_the_verdict_does_not_depend_on_the_default_dtype() -> None:
    """Nor does a probe change it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert tried(torch.optim.AdamW) == Finding(Unit.VALUE, "")
        assert tried(of_class("lamb")) == Finding(Unit.TENSOR, WEIGHTS)
    finally:
        torch.set_default_dtype(before)
