"""Replays of ZeRO: checkpoints from stage to stage, and optimizers that need whole tensors."""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shoal.zero
from benchmarks.truth.kit import Verdict
from benchmarks.truth.peers import Failed, Line, Peers
from shoal.errors import ShoalError

__all__ = ["REPLAYS"]

STEPS, FURTHER = 3, 3
WHOLE = ("NovoGrad", "AdaFactor", "StableAdamW", "CAME", "SM3", "AdamP", "Ranger", "AdamMini")


def model() -> nn.Module:
    """Its first weight is four tiles."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 1))


def small() -> nn.Module:
    """Of several tiles as well, and quick."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(384, 512), nn.Tanh(), nn.Linear(512, 1))


def step(module: nn.Module, optimizer: Any, number: int, rank: int, ranks: int = 2) -> None:
    """One step from a batch of each rank's own; alone, from all of them."""
    optimizer.zero_grad()
    width = 512 if module[0].out_features == 1024 else 384  # type: ignore[index]
    for each in [rank] if ranks > 1 else range(2):
        inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(10 * number + each))
        loss = (module(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        (loss / (1 if ranks > 1 else 2)).backward()
    optimizer.step()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Of torch."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def begin(rank: int, store: str) -> None:
    """Join the other rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def saves(_: Line, rank: int, folder: str, stage: int) -> Any:
    """Trains, saves, and trains on; gives the weights."""
    begin(rank, f"{folder}/save")
    module, optimizer = shoal.zero.shard(model(), adamw, stage=stage)
    for number in range(STEPS):
        step(module, optimizer, number, rank)
    shoal.zero.save(f"{folder}/checkpoint", module, optimizer)
    for number in range(FURTHER):
        step(module, optimizer, STEPS + number, rank)
    return weights(module)


def weights(module: nn.Module) -> dict[str, Any]:
    """As arrays, which travel better than tensors."""
    return {name: each.double().numpy() for name, each in shoal.zero.full_state_dict(module).items()}


def loads(_: Line, rank: int, folder: str, stage: int) -> Any:
    """Loads, and trains on; gives the weights and all step counters."""
    begin(rank, f"{folder}/load{stage}")
    module, optimizer = shoal.zero.shard(model(), adamw, stage=stage)
    shoal.zero.load(f"{folder}/checkpoint", module, optimizer)
    for number in range(FURTHER):
        step(module, optimizer, STEPS + number, rank)
    found = weights(module)
    counters = sorted({float(each["step"]) for each in inner(optimizer).state.values() if "step" in each})
    return found, counters


def inner(optimizer: Any) -> Any:
    """The optimizer that is stepped, wherever it is kept."""
    return getattr(optimizer, "inner", None) or getattr(optimizer, "optimizer", None) or optimizer


def of_both(work: Callable[..., Any], **options: Any) -> list[Any]:
    """What two ranks give."""
    with Peers() as peers:
        started = [peers.start(work, rank=rank, **options) for rank in range(2)]
        return [each.result() for each in started]


def checkpoints() -> Verdict:
    """A checkpoint of stage 3, loaded by stages 1 and 2 (2 ranks, four tiles in one weight): three further steps."""
    said, held = list[str](), True
    with tempfile.TemporaryDirectory() as folder:
        expected = of_both(saves, folder=folder, stage=3)[0]
        for stage in (1, 2):
            found, counters = of_both(loads, folder=folder, stage=stage)[0]
            off = max(float(abs(found[name] - each).max()) for name, each in expected.items())
            held &= off < 1e-6 and counters == [float(STEPS + FURTHER)]
            said.append(f"stage {stage}: off by {off:.1e}, counters {counters}")
    return Verdict(held, "; ".join(said))


def of_pytorch_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """A factory of it, with its default settings."""
    import pytorch_optimizer

    class Given(nn.Module):
        def __init__(self, parameters: Any) -> None:
            super().__init__()
            self.layers = nn.ParameterList(parameters)

    kind = getattr(pytorch_optimizer, name)
    return lambda parameters: kind(Given(parameters)) if name == "AdamMini" else kind(parameters)


def tries(_: Line, rank: int, folder: str) -> Any:
    """Each of them in stage 1, beside one process: what became of it."""
    begin(rank, f"{folder}/tries")
    found: dict[str, str] = {}
    for name in WHOLE:
        alone = small()
        single = of_pytorch_optimizer(name)(list(alone.parameters()))
        try:
            module, optimizer = shoal.zero.shard(small(), of_pytorch_optimizer(name), stage=1)
            for number in range(STEPS + FURTHER):
                step(module, optimizer, number, rank)
                step(alone, single, number, rank, ranks=1)
        except (ShoalError, RuntimeError) as error:
            found[name] = f"refused: {error}"
            continue
        sharded = shoal.zero.full_state_dict(module)
        moved = max(float((each - small().get_parameter(n)).abs().max()) for n, each in alone.named_parameters())
        off = max(float((sharded[n] - each).abs().max()) for n, each in alone.named_parameters()) / moved
        found[name] = f"off by {off:.1%}" if off > 1e-3 else "right"
    return found


def whole_tensors() -> Verdict:
    """Optimizers of pytorch_optimizer that need whole tensors, in stage 1: refused or right."""
    with tempfile.TemporaryDirectory() as folder:
        found = of_both(tries, folder=folder)[0]
    wrong = {name: what for name, what in found.items() if what.startswith("off")}
    refused = sum(what.startswith("refused") for what in found.values())
    words = ", ".join(f"{name} {what}" for name, what in wrong.items()) or "none wrong"
    return Verdict(not wrong, f"{refused} of {len(found)} refused; {words}")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Of torch: what a step changes is what the gradient is."""
    return torch.optim.SGD(parameters, lr=0.1)


def hooked(_: Line, rank: int, folder: str, *, early: bool) -> Any:
    """A step in stage 3 with a hook on each parameter, registered before the model is sharded or after, beside one
    process: how far the weights are off."""
    begin(rank, f"{folder}/hooked{early}")
    alone, given = model(), model()
    if early:
        double(given)
    module, optimizer = shoal.zero.shard(given, sgd, stage=3)
    if not early:
        double(module)
    step(module, optimizer, 0, rank)
    double(alone)
    step(alone, sgd(alone.parameters()), 0, rank, ranks=1)
    found = shoal.zero.full_state_dict(module)
    return max(float((found[name] - each).abs().max()) for name, each in alone.named_parameters())


def double(module: nn.Module) -> None:
    """By a hook on each parameter."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def parameter_hooks() -> Verdict:
    """`parameter.register_hook` in stage 3, before and after the model is sharded: run or refused."""
    said, held = list[str](), True
    for early in (True, False):
        when = "before" if early else "after"
        with tempfile.TemporaryDirectory() as folder:
            try:
                off = of_both(hooked, folder=folder, early=early)[0]
                held &= off < 1e-6
                said.append(f"{when} sharding: off by {off:.1e}")
            except Failed as error:
                said.append(f"{when} sharding: {error}")
                held &= "ConfigError" in str(error)
    return Verdict(held, "; ".join(said))


def goes_on(line: Line, rank: int, folder: str) -> None:
    """Trains until it is killed; says each step, and each warning."""
    begin(rank, f"{folder}/frozen")
    logging.getLogger("shoal.zero").addHandler(Says(line))
    module, optimizer = shoal.zero.shard(small(), adamw, stage=2)
    for number in range(10**6):
        step(module, optimizer, number, rank)
        line.say("stepped")
        time.sleep(0.05)


class Says(logging.Handler):
    """Says what is logged."""

    def __init__(self, line: Line) -> None:
        super().__init__(logging.WARNING)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        self._line.say("warned", record.getMessage())


def frozen_rank() -> Verdict:
    """A rank is stopped (SIGSTOP): the other one names it within 5 s."""
    with tempfile.TemporaryDirectory() as folder, Peers() as peers:
        first, second = (peers.start(goes_on, rank=rank, folder=folder) for rank in range(2))
        second.wait("stepped")
        second.signal(signal.SIGSTOP)
        began = time.monotonic()
        said = first.wait("warned")
        after_s = time.monotonic() - began
    return Verdict("rank 1" in said and after_s <= 5.0, f"a frozen rank is named after {after_s:.1f} s")


REPLAYS: tuple[Callable[[], Verdict], ...] = (checkpoints, whole_tensors, parameter_hooks, frozen_rank)
