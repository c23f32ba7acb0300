"""What ranks do in the tests of parts of `shoal.zero` that are used together; each function runs on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shoal.zero
from shoal.zero.memory import offload
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration.zero_cases import Odd as Dense
from tests.integration.zero_cases import loss_of, make, train
from tests.integration.zero_programs import said

State = dict[str, torch.Tensor]
STEPS, SAVED, DECAY, CLIP = 4, 2, 0.9, 0.1
WINDOW_NUMEL = 500
"""So that a model of the tests has several windows."""


class Way(NamedTuple):
    """Which parts are used together.

    Attributes:
        stage: of ZeRO.
        kind: the optimizer: one that needs whole tensors, or one of `zero_cases`.
        replicas: how many there are; 0 for no mesh.
        offloaded: state is in files.
        averaged: with moving averages.
        top_k: the share that is sent; None for all.
        narrow: the model computes in bfloat16.
        rows: the model has an embedding of which only some rows are sent.
        micro: micro-batches in a step.
    """

    stage: int
    kind: str = "adamw"
    replicas: int = 0
    offloaded: bool = False
    averaged: bool = True
    top_k: float | None = None
    narrow: bool = False
    rows: bool = False
    micro: int = 1

    @property
    def plain(self) -> Way:
        """The same with everything in memory."""
        return self._replace(offloaded=False)


class Odd(Dense):
    """The model of the other tests, whose embedding may have sparse gradients, and a head of its own then."""

    def __init__(self, *, rows: bool = False) -> None:
        super().__init__()
        if rows:
            self.head.weight = torch.nn.Parameter(self.embedding.weight.detach().clone())
            self.embedding.sparse = True


class Run:
    """One model of this rank."""

    def __init__(self, way: Way, folder: str) -> None:
        self._way = way
        model, options = Odd(rows=way.rows), dict[str, Any]()
        if way.replicas:
            options["mesh"] = init_device_mesh("cpu", (way.replicas, dist.get_world_size() // way.replicas))
        factory = make(way.kind, model)
        if way.kind == "Adafactor":
            factory = partial(torch.optim.Adafactor, lr=1e-2)
        self.model: torch.nn.Module = model
        self.optimizer: ShardedOptimizer
        self.model, self.optimizer = shoal.zero.shard(
            model,
            factory,
            stage=way.stage,
            offload=folder if way.offloaded else None,
            top_k=way.top_k,
            dtype=torch.bfloat16 if way.narrow else None,
            **options,
        )
        self.ema = shoal.zero.EMA(self.optimizer, DECAY) if way.averaged else None

    def train(self, first: int, stop: int) -> None:
        """Some steps."""
        for step in range(first, stop):
            train(self.optimizer, self.model, steps=1, first=step, micro=self._way.micro, clip=CLIP)
            if self.ema is not None:
                self.ema.update()

    def found(self) -> State:
        """Weights, their averages, and a norm of gradients."""
        found = shoal.zero.full_state_dict(self.model)
        with self.ema.average_parameters() if self.ema is not None else nullcontext():
            found |= {f"average of {name}": each for name, each in shoal.zero.full_state_dict(self.model).items()}
        torch.autograd.backward(loss_of(self.model, STEPS, dist.get_rank()))
        return found | {"norm": self.optimizer.clip_grad_norm_(CLIP)}


def used_together(way: Way, folder: str) -> tuple[State, State, State]:
    """What is found with everything in memory; the way that was asked for; and that one, resumed in the middle."""
    offload.WINDOW_NUMEL = WINDOW_NUMEL
    plain, whole, resumed = Run(way.plain, folder), Run(way, folder), Run(way, folder)
    plain.train(0, STEPS)
    whole.train(0, SAVED)
    shoal.zero.save(f"{folder}/saved", whole.model, whole.optimizer, ema=whole.ema)
    shoal.zero.load(f"{folder}/saved", resumed.model, resumed.optimizer, ema=resumed.ema)
    whole.train(SAVED, STEPS)
    resumed.train(SAVED, STEPS)
    return plain.found(), whole.found(), resumed.found()


def clipped_from_files(stage: int, folder: str) -> tuple[bool, bool, str]:
    """Norms of both kinds and clipped gradients from files and from memory: whether they are the same.

    And what the ranks say, in which one of them cannot read its file.
    """
    offload.WINDOW_NUMEL = WINDOW_NUMEL
    way = Way(stage, offloaded=True, averaged=False, narrow=True)
    one, other = Run(way.plain, folder), Run(way, folder)
    norms = []
    for kind in (2.0, float("inf")):
        for each in (one, other):
            each.optimizer.zero_grad()
            torch.autograd.backward(loss_of(each.model, 0, dist.get_rank()))
        norms.append([float(each.optimizer.clip_grad_norm_(CLIP, kind)) for each in (one, other)])
    pairs = zip(one.optimizer.reduction.gradients(), other.optimizer.reduction.gradients(), strict=True)
    same = all(torch.equal(here, there) for here, there in pairs)

    failure = mock.patch.object(offload, "fetch", side_effect=OSError(5, "Input/output error"))
    with failure if dist.get_rank() == 1 else nullcontext():
        words = said(lambda: other.optimizer.clip_grad_norm_(CLIP))
    return all(here == there for here, there in norms), same, words
