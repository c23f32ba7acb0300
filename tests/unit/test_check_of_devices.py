"""The check of the parameters between a peer on a CPU and one on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shoal.base.peer import PeerID
from shoal.run.decide.check import Check, check_of, judge
from shoal.run.view.words import weigh

NAME = bytes(32)
PEERS = PeerID(bytes(32)), PeerID(bytes([1]) * 32)


alike = partial(weigh, committed={}, sites={})


def stepped(device: str, dtype: torch.dtype) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """After 100 steps from the same gradients."""
    draw = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter((torch.randn(10_001, generator=draw) / 10).to(device, dtype))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    for _ in range(100):
        parameter.grad = torch.randn(10_001, generator=draw).to(device, dtype)
        optimizer.step()
    return optimizer, parameter


def checked(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Check:
    """Of its state."""
    found = check_of(optimizer, [parameter], NAME)
    assert found is not None
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_and_a_gpu_pass_the_check_unless_they_differ_by_more_than_rounding(dtype: torch.dtype) -> None:
    """Equal steps differ in some bits; parameters that are 2% larger are found."""
    (mine, ours), (theirs, other) = stepped("cpu", dtype), stepped("cuda", dtype)
    on_cpu, on_gpu = PEERS
    checks = {on_cpu: checked(mine, ours), on_gpu: checked(theirs, other)}
    assert checks[on_cpu].arithmetic != checks[on_gpu].arithmetic
    verdict = judge(checks, alike)
    assert verdict is not None
    assert not verdict.others
    with torch.no_grad():
        other.mul_(1.02)
    verdict = judge(checks | {on_gpu: checked(theirs, other)}, alike)
    assert verdict is not None
    assert len(verdict.others) == 1
