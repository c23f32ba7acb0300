"""Steps that an exception ends in the middle, on the ranks of the tests of `shoal.zero`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal.zero
from shoal.errors import ConfigError, LocalError
from shoal.zero.optimizer import ShardedOptimizer
from tests.integration.scripts import digest
from tests.integration.zero_cases import Odd, alone, train
from tests.integration.zero_programs import backward, moved, said, small_buckets

BEFORE = ("forward", "a layer", "no_sync", "generator")
"""Where a step may break off before its gradients are reduced."""
WITHIN = ("backward", "late in backward", "a hook", "interrupt", "behind no_sync")
"""And while they are."""
WHERE = (*BEFORE, *WITHIN, "optimizer")
THEN = ("a new model", "a retry")


class Breaks(torch.optim.SGD):
    """An optimizer that may raise."""

    breaks = False

    def step(self, closure: Any = None) -> Any:
        """As SGD."""
        if self.breaks:
            raise ArithmeticError("in a step")
        return super().step(closure)


class Interrupts(torch.autograd.Function):
    """Does nothing, but its backward pass breaks off."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, error: BaseException) -> torch.Tensor:
        """The same."""
        ctx.error = error
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *__: torch.Tensor) -> Any:
        """As Ctrl+C, or a lack of memory."""
        raise ctx.error


def _refuse(*_: object) -> None:
    raise ArithmeticError("a bad batch")


def _break(model: Odd, optimizer: ShardedOptimizer, where: str, breaks: bool) -> None:
    """A step in which something raises, if this rank breaks."""
    handles: list[Any] = []
    first = model.layers[0]  # its backward pass comes after that of the other layer

    def spoil(error: BaseException) -> Callable[..., Any]:
        return lambda _, __, output: Interrupts.apply(output, error)  # type: ignore[no-untyped-call]

    register: dict[str, Callable[[], Any]] = {
        "forward": lambda: model.register_forward_hook(_refuse),
        "a layer": lambda: model.layers[1].register_forward_pre_hook(_refuse),
        "backward": lambda: first.register_forward_hook(spoil(ArithmeticError("a bad batch"))),
        "late in backward": lambda: model.embedding.register_forward_hook(spoil(ArithmeticError("a bad batch"))),
        "a hook": lambda: model.get_parameter("layers.0.1.weight").register_hook(_refuse),  # type: ignore[no-untyped-call]
        "interrupt": lambda: first.register_forward_hook(spoil(KeyboardInterrupt())),
        "behind no_sync": lambda: first.register_forward_hook(spoil(ArithmeticError("a bad batch"))),
        "no_sync": lambda: first.register_forward_hook(spoil(ArithmeticError("a bad batch"))),
    }
    inner = optimizer.inner
    assert isinstance(inner, Breaks)
    try:
        if where == "optimizer":
            inner.breaks = breaks
        if where in ("no_sync", "behind no_sync", "generator"):
            with optimizer.no_sync():
                backward(model, 9)
                if where == "no_sync" and breaks:
                    handles.append(register[where]())
                backward(model, 9)
                if where == "generator" and breaks:
                    raise GeneratorExit
        if where in register and breaks:
            handles.append(register[where]())
        backward(model, 9)
        optimizer.step()
    finally:
        inner.breaks = False
        for handle in handles:
            handle.remove()


def broken(where: str, on: Sequence[int], then: str, stage: int, folder: str | None = None) -> tuple[str, str, float]:
    """A step breaks off on some ranks.

    Returns:
        What is said there; what is said of the training behind it; and how far that is from one process.
    """

    def made() -> tuple[Odd, ShardedOptimizer]:
        model = Odd()
        with small_buckets():
            return shoal.zero.shard(model, lambda each: Breaks(each, lr=0.1, momentum=0.9), stage=stage, offload=folder)

    model, optimizer = made()
    train(optimizer, model, steps=1)
    words, first = "", 1
    try:
        _break(model, optimizer, where, dist.get_rank() in on)
    except (ArithmeticError, KeyboardInterrupt, GeneratorExit, ConfigError, LocalError) as error:
        words = f"{type(error).__name__}: {error}"
    apart = -1.0

    def go_on() -> None:
        nonlocal model, optimizer, first, apart
        if then == "a new model":
            del model, optimizer
            model, optimizer = made()
            first = 0
        else:
            optimizer.zero_grad()
        train(optimizer, model, steps=3 - first, first=first)
        plain = Odd()
        wanted, *_ = alone(
            dist.get_world_size(), "", steps=3, model=plain, optimizer=torch.optim.SGD(plain.parameters(), 0.1, 0.9)
        )
        apart = moved(model, wanted)

    return words, said(go_on), apart


def interrupted(how: str, stage: int, folder: str) -> dict[str, Any]:
    """Ctrl+C within a step on all ranks, at another moment on each; then a checkpoint from before, and another step.

    Args:
        how: "apart" for rank 0 behind the inner optimizer's step, and the others before; "between" where new weights
            are about to be sent, by an exception; "signal" there, by a real signal.
        stage: 1, 2 or 3.
        folder: a new one.

    Returns:
        What is said of the step (``step``), and of uses of the weights behind it; the weights' digests behind it, and
        how far they are from one process behind one more step (``apart``).
    """
    model = Odd()
    with small_buckets():
        model, optimizer = shoal.zero.shard(
            model, lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9), stage=stage
        )
    train(optimizer, model, steps=1)
    shoal.zero.save(f"{folder}/before", model, optimizer)
    backward(model, 1)
    inner, publish = optimizer.inner.step, optimizer.carrier.publish

    def step() -> None:
        if dist.get_rank():
            raise KeyboardInterrupt
        inner()
        raise KeyboardInterrupt

    def interrupt() -> None:
        if how == "between":
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)
        publish()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        if how == "apart":
            patch.setattr(optimizer.inner, "step", step)
        else:
            patch.setattr(optimizer.carrier, "publish", interrupt)
        try:
            optimizer.step()
            found = {"step": ""}
        except KeyboardInterrupt:
            found = {"step": "KeyboardInterrupt"}
    optimizer.zero_grad()
    found["weights"] = said(lambda: found.update(digest=digest([*shoal.zero.full_state_dict(model).values()])))
    found["a part"] = said(lambda: shoal.zero.full_state_dict(model.layers))
    found["save"] = said(lambda: shoal.zero.save(f"{folder}/behind", model, optimizer))
    found["next step"] = said(optimizer.step)
    found["load"] = said(lambda: shoal.zero.load(f"{folder}/before", model, optimizer))
    train(optimizer, model, steps=1, first=1)
    signal.signal(signal.SIGINT, before)
    plain = Odd()
    wanted, *_ = alone(
        dist.get_world_size(), "", steps=2, model=plain, optimizer=torch.optim.SGD(plain.parameters(), 0.1, 0.9)
    )
    return {**found, "apart": moved(model, wanted)}


class Wide(torch.nn.Sequential):
    """Its messages do not fit into the buffers of a connection."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(*(torch.nn.Linear(512, 512) for _ in range(6)))


def wide(stage: int, bucket_bytes: int) -> tuple[Wide, ShardedOptimizer]:
    """Such a model, sharded, with buckets of that size."""
    with small_buckets(bucket_bytes):
        return shoal.zero.shard(Wide(), lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)


def step_anew(model: Wide, optimizer: ShardedOptimizer, batch: torch.Tensor) -> None:
    """The first step of a model that was made after another one was freed."""
    model(batch).sum().backward()
    optimizer.step()


def freed(stage: int) -> str:
    """A pass breaks off while large messages are under way, and the model is freed: what is said of the next one."""
    made = partial(wide, stage, 1 << 20)
    model, optimizer = made()
    batch = torch.ones(1, 512)
    handle = model[2].register_forward_hook(
        lambda _, __, output: Interrupts.apply(output, ArithmeticError("a bad batch"))  # type: ignore[no-untyped-call]
    )
    loss = model(batch).sum()
    assert "a bad batch" in said(loss.backward)
    handle.remove()
    del model, optimizer, handle, loss
    return said(lambda: step_anew(*made(), batch))


def converted(stage: int) -> str:
    """A model is converted after a step, its next pass is refused, and it is freed: what is said of the next one."""
    made = partial(wide, stage, 1 << 12)
    model, optimizer = made()
    batch = torch.ones(1, 512)
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.double()
    loss = model(batch.double()).sum()
    assert "converted" in said(loss.backward)
    del model, optimizer, loss
    return said(lambda: step_anew(*made(), batch))


def _step(model: Odd, optimizer: ShardedOptimizer, _: str) -> None:
    backward(model, 1)
    optimizer.step()


CALLS: dict[str, Callable[[Odd, ShardedOptimizer, str], object]] = {
    "step": _step,
    "save": lambda model, optimizer, folder: shoal.zero.save(f"{folder}/saved", model, optimizer),
    "clip": lambda _, optimizer, __: optimizer.clip_grad_norm_(1.0),
    "shard": lambda *_: shoal.zero.shard(Odd(), lambda each: torch.optim.SGD(each, lr=0.1), stage=1),
    "weights": lambda model, *_: shoal.zero.full_state_dict(model),
}
"""What a rank may call."""


def called(calls: Sequence[str], stage: int, folder: str) -> None:
    """Each rank calls something else."""
    model = Odd()
    _, optimizer = shoal.zero.shard(model, lambda each: torch.optim.SGD(each, lr=0.1), stage=stage)
    backward(model, 0)
    CALLS[calls[dist.get_rank()]](model, optimizer, folder)
