"""Optimizers of torch and of other libraries, by name, and the way that a state takes from one peer to another."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from shoal.protocol.wire import ManifestReply, decode, encode
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.join.shared_state import share, why_not_ours
from shoal.state.wire.manifest import Manifest, chunk_size, describe, read_manifest
from shoal.train.training_state import TrainingState

Make = Callable[[list[Any]], torch.optim.Optimizer]

SHAPES = ((6, 4), (4,), (3, 2, 3, 3), (5, 6))
"""A matrix, a vector, a kernel of a convolution, another matrix."""

MATRICES = ((6, 4), (4, 7), (3, 2), (5, 6))


def optimizer_by_name(name: str) -> Make:
    """`torch.optim.AdamW` or `module.Class`; skips the test if the library is not installed."""
    module_name, _, class_name = name.rpartition(".")
    module = pytest.importorskip(module_name)
    made: Any = getattr(module, class_name)
    options: dict[str, Any] = {"torch.optim.SGD": {"lr": 0.1, "momentum": 0.9}}.get(name, {})
    if name == "transformers.Adafactor":
        options = {"lr": None, "relative_step": True, "warmup_init": True}
    if class_name == "Ranger21":
        options = {"num_iterations": 100}
    if class_name == "AdamW8bit":
        options = {"min_8bit_size": 16}
    return lambda params: made(params, **options)


def shapes_for(name: str) -> tuple[tuple[int, ...], ...]:
    """Of parameters that this optimizer takes: Muon wants matrices."""
    return MATRICES if name == "torch.optim.Muon" else SHAPES


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """Some, always the same."""
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def training_of(make: Make, params: Sequence[torch.Tensor] | None = None, *, groups: bool = False) -> TrainingState:
    """A peer before its first step."""
    own = list(params) if params is not None else parameters()
    return TrainingState(make([{"params": own[:2]}, {"params": own[2:], "lr": 0.003}] if groups else own))


def step(training: TrainingState, number: int, without: Sequence[int] = ()) -> None:
    """One step from the gradients of this number; parameters in `without` have none."""
    generator = torch.Generator().manual_seed(number)
    for index, parameter in enumerate(training.trained):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if index in without else gradient
    assert training.accumulate(1)
    training.use_own_mean()
    torch.manual_seed(number)  # some draw numbers, of torch's, NumPy's (Kron) or Python's (SaRA)
    np.random.seed(number)  # noqa: NPY002 (the generator that they draw on)
    random.seed(number)
    training.step()


def offered(donor: TrainingState) -> tuple[Manifest, list[torch.Tensor]]:
    """What a newcomer has when it has downloaded the state: through the encoding of the manifest, with new tensors."""
    name = StateName(donor.epoch, b"d" * 32, donor.epoch)
    shared = share(donor, name, Committed())
    specs = describe(shared.tensors, shared.codecs)
    total = sum(spec.encoded_bytes for spec in specs)
    size = chunk_size(total)
    hashes = (b"h" * 32,) * -(-total // size)
    manifest = Manifest(b"s" * 16, name.epoch, shared.metadata, specs, size, hashes)
    reply = decode(encode(manifest.to_message()), ManifestReply)
    assert isinstance(reply, ManifestReply)
    tensors = [tensor.detach().cpu().contiguous().clone() for tensor in shared.tensors]
    return read_manifest(reply, max_state_bytes=1 << 30), tensors


def take_over(newcomer: TrainingState, donor: TrainingState) -> None:
    """Download the donor's state, and take it over."""
    manifest, tensors = offered(donor)
    why = why_not_ours(newcomer, manifest, None)
    assert why is None, why
    newcomer.load(manifest.metadata["training"], tensors)


def everything(training: TrainingState) -> tuple[Any, list[torch.Tensor]]:
    """All that a state is; tensors copied."""
    values, tensors = training.export()
    return values, [tensor.clone() for tensor in tensors]


def assert_equal(one: TrainingState, other: TrainingState) -> None:
    """Values, dtypes and every bit of the tensors."""
    (values, tensors), (other_values, other_tensors) = everything(one), everything(other)
    assert values == other_values
    assert [each.dtype for each in tensors] == [each.dtype for each in other_tensors]
    for index, (mine, theirs) in enumerate(zip(tensors, other_tensors, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {index} of {other_values}"


def installed(library: str) -> list[str]:
    """The names of all torch optimizers in a library; none if it is not there."""
    try:
        module = importlib.import_module(library)
    except ImportError:
        return []
    found = {name: getattr(module, name) for name in dir(module)}
    return [f"{library}.{name}" for name, each in found.items() if _is_optimizer(each)]


def _is_optimizer(each: object) -> bool:
    return isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
