"""A function that the user compiles may call shoal: Dynamo calls its methods, and traces nothing in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.integrations.ddp import GroupOptimizer


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def optimizer(kind: str) -> Iterator[tuple[torch.nn.Module, Callable[[], Any]]]:
    """A model, and what a compiled function calls after each backward pass of it."""
    model = torch.nn.Linear(2, 1)
    build = partial(torch.optim.SGD, lr=0.1)
    if kind == "sharded":
        with alone():
            whole, sharded = shoal.zero.shard(model, build, stage=2)
            yield whole, lambda: (sharded.step(), sharded.zero_grad())
        return
    with shoal.DHT(start=True) as dht:
        options: dict[str, Any] = {"run_id": "run", "target_batch_size": 4, "batch_size_per_step": 4}
        options["optimizer"] = build(model.parameters())
        if kind == "optimizer":
            with shoal.Optimizer(dht=dht, model=model, **options) as swarm:
                yield model, lambda: (swarm.step(), swarm.zero_grad(), swarm.status())
        elif kind == "group":
            with alone():
                group = GroupOptimizer(dht=dht, **options)
                yield model, lambda: (group.step(), group.zero_grad())
                group.shutdown()
        else:
            with shoal.GradientAverager(model.parameters(), dht=dht, prefix="run", start=True) as averager:
                yield model, lambda: (averager.accumulate_grads_(4), averager.load_accumulators_into_averager_())


@pytest.mark.parametrize("kind", ["optimizer", "sharded", "group", "averager"])
def test_dynamo_traced_the_locks_and_threads_of_a_step_that_a_compiled_function_takes(kind: str) -> None:
    """51 s for 20 calls, with pages of warnings. Now it translates no code of shoal's."""
    traced = Counter[str]()
    transform: Any = torch._dynamo.convert_frame._compile

    def count(code: Any, *arguments: Any, **options: Any) -> Any:
        traced[code.co_filename] += 1
        return transform(code, *arguments, **options)

    with optimizer(kind) as (model, calls), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.convert_frame, "_compile", count)
        torch._dynamo.reset()

        @torch.compile(backend="eager")
        def compiled() -> None:
            calls()

        for _ in range(2):
            model(torch.ones(4, 2)).sum().backward()
            compiled()
    assert traced[__file__], traced
    assert not [name for name in traced if "/src/shoal/" in name and name != __file__], traced
