"""The laws of ZeRO's stages: the paper's numbers, hand-made ones, and what must hold for any model."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.zero import Cost, costs, estimate, plans

OURS = ("DDP", "shoal.zero")


def by_name(found: list[Cost]) -> dict[tuple[str, int], Cost]:
    """Engines may carry more than one stage."""
    return {(cost.engine.name, cost.engine.stage): cost for cost in found}


def test_the_numbers_of_the_paper() -> None:
    """7.5 billion parameters, 64 ranks, mixed precision, Adam (figure 1 there). shoal has means in float32 besides."""
    expected = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}
    ours = {1: 31.9, 2: 16.9, 3: 1.9}
    for cost in costs(7.5e9, 64):
        right = ours if cost.engine.name == "shoal.zero" else expected
        assert round(cost.memory / 1e9, 1) == right[cost.engine.stage], cost.engine


@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_one_plan_has_one_number(precision: str) -> None:
    """`shoal plan --stage 1` said 41.2 GB, and `--memory` 45.0 GB, of one plan."""
    told = {cost.engine.stage: cost for cost in costs(7.5e9, 8, precision=precision) if cost.engine.name in OURS}
    assert {plan.stage: plan.cost for plan in plans(7.5e9, 8, precision=precision) if not plan.offloaded} == told
    assert round(told[1].memory / 1e9, 1) == {"mixed": 45.0, "float32": 67.5}[precision]
    model = torch.nn.Linear(1000, 1000, dtype=torch.bfloat16 if precision == "mixed" else None, device="meta")
    (stage_1, *_) = estimate(model, 8, stage=1)
    (the_same, *_) = costs(1001 * 1000, 8, stage=1, precision=precision)
    assert stage_1.memory == the_same.memory


@pytest.mark.parametrize(
    ("name", "stage", "backend", "micro_batches", "times"),
    [
        ("DDP", 0, "nccl", 1, 2),
        ("DDP", 0, "gloo", 1, 2),
        ("DDP", 0, "nccl", 4, 2),
        ("shoal.zero", 1, "nccl", 1, 2),
        ("shoal.zero", 1, "gloo", 4, 2),
        ("ZeroRedundancyOptimizer", 1, "gloo", 1, 3),
        ("DeepSpeed", 1, "nccl", 1, 2),
        ("DeepSpeed", 1, "gloo", 1, 3),
        ("shoal.zero", 2, "gloo", 1, 2),
        ("shoal.zero", 2, "nccl", 4, 5),
        ("FSDP2", 2, "nccl", 1, 2),
        ("FSDP2", 2, "gloo", 1, 3),
        ("FSDP2", 2, "nccl", 4, 8),
        ("shoal.zero", 3, "gloo", 1, 3),
        ("shoal.zero", 3, "nccl", 4, 12),
        ("FSDP2", 3, "nccl", 1, 3),
        ("FSDP2", 3, "gloo", 1, 4),
    ],
)
def test_bytes_sent(name: str, stage: int, backend: str, micro_batches: int, times: int) -> None:
    """So many times (N-1)/N of the float32 parameters: what was measured for each of them with one micro-batch."""
    found = costs(1e6, 4, precision="float32", backend=backend, micro_batches=micro_batches)
    assert by_name(found)[name, stage].sent == times * 4e6 * 3 / 4


def test_float32_and_other_optimizers() -> None:
    """Nothing is kept twice in float32; SGD keeps nothing but the copy of mixed precision."""

    def parts(precision: str, optimizer: str) -> tuple[float, float, float]:
        cost = costs(100, 2, stage=1, precision=precision, optimizer=optimizer)[1]
        return cost.parameters, cost.gradients, cost.state

    assert parts("float32", "adam") == (400, 400, 400)
    assert parts("float32", "momentum") == (400, 400, 200)
    assert parts("float32", "sgd") == (400, 400, 0)
    assert parts("mixed", "adam") == (200, 200, 600)
    assert parts("mixed", "sgd") == (200, 200, 200)


@given(
    parameters=st.floats(1, 1e13),
    ranks=st.integers(1, 5000),
    precision=st.sampled_from(["mixed", "float32"]),
    optimizer=st.sampled_from(["adam", "momentum", "sgd"]),
    backend=st.sampled_from(["nccl", "gloo"]),
)
def test_a_higher_stage_never_takes_more_memory(
    parameters: float, ranks: int, precision: str, optimizer: str, backend: str
) -> None:
    """One rank alone holds everything in each stage, and sends nothing; none takes less than its share of it all."""
    found = costs(parameters, ranks, precision=precision, optimizer=optimizer, backend=backend)
    memory = [cost.memory for cost in found if precision == "float32" or cost.engine.name != "shoal.zero"]
    assert memory == sorted(memory, reverse=True)
    assert memory[-1] >= memory[0] / ranks * (1 - 1e-12)
    if ranks == 1:
        assert len(set(memory)) == 1
        assert not any(cost.sent for cost in found)
    ours = {cost.engine.stage: cost.sent for cost in found if cost.engine.name == "shoal.zero"}
    assert ours == {stage: min(cost.sent for cost in found if cost.engine.stage == stage) for stage in (1, 2, 3)}


@pytest.mark.parametrize(("precision", "width"), [("mixed", 2), ("float32", 4)])
def test_replicas_are_groups_of_fewer_ranks(precision: str, width: int) -> None:
    """Engines that have them take means of a share's gradients: shoal in float32, once in a step."""
    asked: dict[str, Any] = {"precision": precision, "micro_batches": 3}
    alone = {cost.engine: cost for cost in costs(12e6, 4, **asked)}
    for cost in costs(12e6, 12, replicas=3, **asked):
        usual = alone.pop(cost.engine)
        assert cost[:4] == usual[:4]
        mean = 4 if cost.engine.name == "shoal.zero" else 3 * width
        assert cost.sent - usual.sent == pytest.approx(2 * 2 / 3 * mean * 12e6 / 4)
    assert {engine.name for engine in alone} == {"DDP", "ZeroRedundancyOptimizer", "DeepSpeed"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_stage(stage: int) -> None:
    """Its engines, and no others."""
    assert {cost.engine.stage for cost in costs(1e6, 2, stage=stage)} == {stage}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"parameters": 0}, "parameters"),
        ({"parameters": float("inf")}, "parameters"),
        ({"ranks": 0}, "ranks"),
        ({"stage": 4}, "stage"),
        ({"precision": "int8"}, "precision"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"backend": "mpi"}, "backend"),
    ],
)
def test_bad_arguments_are_named(wrong: dict[str, object], named: str) -> None:
    """Each error says which one."""
    arguments: dict[str, object] = {"parameters": 1e6, "ranks": 4} | wrong
    with pytest.raises(ConfigError, match=named):
        costs(**arguments)  # type: ignore[arg-type]


def test_the_laws_do_without_torch() -> None:
    """The command line asks for them."""
    code = "import sys, shoal.zero; shoal.zero.costs(1e6, 2); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


class Tied(torch.nn.Module):
    """An embedding that is the output layer, too; a frozen layer in between; a bias."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8, dtype=dtype, device=device)
        self.frozen = torch.nn.Linear(8, 8, bias=False, dtype=dtype, device=device).requires_grad_(requires_grad=False)
        self.head = torch.nn.Linear(8, 100, dtype=dtype, device=device)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_with_tied_and_frozen_parameters(device: str) -> None:
    """800 shared, 64 frozen, 100 of the bias; by hand."""
    found = by_name(estimate(Tied(torch.float32, device), 4))
    whole = found["DDP", 0]
    assert (whole.parameters, whole.gradients, whole.state) == (4 * 964, 4 * 900, 8 * 900)
    assert whole.sent == 2 * 4 * 900 * 3 / 4
    assert found["shoal.zero", 1].sent == whole.sent
    third = found["shoal.zero", 3]
    assert (third.parameters, third.gradients, third.state) == (964, 900, 1800)
    assert third.sent == (2 * 4 * 964 + 4 * 900) * 3 / 4


def test_a_model_in_bfloat16() -> None:
    """The optimizer has a float32 copy of what is trained."""
    whole = estimate(Tied(torch.bfloat16, "cpu"), 4, optimizer="sgd", stage=0)[0]
    assert (whole.parameters, whole.gradients, whole.state) == (2 * 964, 2 * 900, 4 * 900)


def test_an_estimate_is_what_torch_holds() -> None:
    """Bytes of the unique storages of parameters, gradients and AdamW's moments after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    whole = estimate(model, stage=0)[0]  # there is no process group
    assert whole.parameters == sum(each.nbytes for each in model.parameters())
    assert whole.gradients == sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
    moments = [each for state in optimizer.state.values() for name, each in state.items() if name != "step"]
    assert whole.state == sum(each.nbytes for each in moments)


def test_the_ranks_are_those_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says how many."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert estimate(torch.nn.Linear(3, 3)) == estimate(torch.nn.Linear(3, 3), 4)


def test_a_model_without_parameters_is_refused() -> None:
    """There is nothing to say of it."""
    with pytest.raises(ConfigError, match="model"):
        estimate(torch.nn.ReLU(), 2)
