"""What torch keeps for each thread, and what a computation there depends on: autocast, modes, default device, cores.

A program sets it for the thread in which it trains: by `torch.autocast` around its loop, for example. The user's code
(a step of an optimizer, a schedule) that runs in a thread of shoal's has to compute as it does there, or a peer that
catches up with the others gets other weights than they have. So the state of the trainer's thread is taken when the
trainer calls, and put in force around such code. What shoal computes itself depends on none of that: see `OWN`.

The default dtype, deterministic algorithms and the precision of products are those of the whole process.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

import torch

from shoal.base.pool import use_cores

__all__ = ["OWN", "ThreadState", "forget_casts", "numerics_of"]

_HOST = torch.device("cpu")
_SMALLEST = sys.float_info.min


class ThreadState(NamedTuple):
    """The state of one thread.

    Attributes:
        autocast: the dtype of each type of device for which it is enabled.
        gradients: whether operations are recorded.
        inference: whether it is in inference mode, where nothing can be trained.
        device: on which tensors are made by default.
        cores: that one operation uses.
        flushes: whether numbers too small to be normal become 0.
    """

    autocast: Mapping[str, torch.dtype]
    gradients: bool
    inference: bool
    device: torch.device
    cores: int
    flushes: bool

    @classmethod
    def here(cls) -> Self:
        """The state of the calling thread."""
        return cls(
            autocast={kind: torch.get_autocast_dtype(kind) for kind in _KINDS if torch.is_autocast_enabled(kind)},
            gradients=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            device=torch.get_default_device(),
            cores=torch.get_num_threads(),
            flushes=_SMALLEST / 2 == 0.0,
        )

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Compute in this state in the block, whichever thread it is."""
        before = self.here()
        if before == self:
            yield
            return
        with ExitStack() as stack:
            if self.inference != before.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))  # after inference mode, which sets it
            for kind in {**before.autocast, **self.autocast}:
                stack.enter_context(torch.autocast(kind, self.autocast.get(kind), enabled=kind in self.autocast))
            if self.device != before.device:
                stack.enter_context(self.device)
            if self.cores != before.cores:
                stack.callback(use_cores, before.cores)
                use_cores(self.cores)
            if self.flushes != before.flushes:
                stack.callback(torch.set_flush_denormal, before.flushes)
                torch.set_flush_denormal(self.flushes)
            yield


def _kinds() -> list[str]:
    """The types of devices of this machine."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


_KINDS = _kinds()

OWN = ThreadState(autocast={}, gradients=False, inference=False, device=_HOST, cores=1, flushes=False)
"""The state in which shoal computes: equal on all peers, whatever their programs have set. One core, as beside a
training loop."""


def forget_casts() -> None:
    """Weights were changed: within one `torch.autocast` torch would go on to compute with casts that it made before."""
    torch.clear_autocast_cache()


def numerics_of(state: ThreadState, *, mixes: bool) -> str:
    """What decides how steps are rounded in a thread of this state, in words; the cores are agreed on, and not in it.

    Args:
        state: of the thread.
        mixes: whether they make values of several others: these depend on the processor and its libraries, too.
    """
    found = [f"autocast to {str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in state.autocast.items()]
    found += ["denormals flushed"] * state.flushes
    if mixes:
        found += [f"products of {torch.get_float32_matmul_precision()} precision"]
        found += ["deterministic algorithms"] * torch.are_deterministic_algorithms_enabled()
        found += ["no oneDNN"] * (not torch._C._get_mkldnn_enabled())  # noqa: SLF001 (its public name has no type)
        found += [_processor()]
    return ", ".join(found)


@cache
def _processor() -> str:
    """The processor's name; libraries of matrices choose their ways by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
