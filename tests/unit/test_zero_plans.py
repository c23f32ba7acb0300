"""Activations of transformers: the law against the paper and against what torch keeps; and the stage that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

import shoal.zero
from shoal.errors import ConfigError
from shoal.zero import Transformer

GIB = 1024**3
GPT3 = Transformer(batch=1, sequence=2048, layers=96, hidden=12288, heads=96)


def test_the_numbers_of_the_paper() -> None:
    """GPT-3: 5as/h is 80, so that flash attention saves 70% of 114 sbh; MT-NLG has 64 (Korthikanti et al., 5)."""
    states = GPT3.batch * GPT3.sequence * GPT3.hidden
    assert GPT3.activations() == 96 * states * (34 + 80)
    assert replace(GPT3, flash=True).activations() == 96 * states * 34
    saved = 1 - replace(GPT3, flash=True).activations() / GPT3.activations()
    assert saved == pytest.approx(0.70, abs=0.005)
    larger = Transformer(batch=1, sequence=2048, layers=105, hidden=20480, heads=128)
    assert larger.activations() == 105 * larger.sequence * larger.hidden * (34 + 64)


def test_checkpoints_keep_the_input_of_each_layer() -> None:
    """Each further layer takes 2 sbh; all of one layer is there while it is recomputed."""
    one, two = (replace(GPT3, layers=each, checkpointing=True).activations() for each in (1, 2))
    states = GPT3.sequence * GPT3.hidden
    assert two - one == 2 * states
    assert one == 2 * states + replace(GPT3, layers=1).activations()


def test_values_of_32_bits_and_the_end_of_the_model() -> None:
    """Masks keep their byte; logits have 32 bits in any case."""
    states, scores = GPT3.sequence * GPT3.hidden, 96 * GPT3.sequence**2
    assert GPT3.activations(4) == 96 * (66 * states + 9 * scores)
    assert replace(GPT3, dropout=False).activations() == 96 * (32 * states + 2 * scores)
    end = replace(GPT3, vocabulary=50257).activations() - GPT3.activations()
    assert end == 5 * states + 4 * GPT3.sequence * 50257


@pytest.mark.parametrize(("parameters", "layers", "hidden"), [(6.7e9, 33, 4096), (175e9, 97, 12288), (1e6, 1, 256)])
def test_a_shape_from_the_number_of_parameters(parameters: float, layers: int, hidden: int) -> None:
    """GPT-3 has 32 x 4096 and 96 x 12288; heads of 128 divide the width."""
    shape = Transformer.of(parameters, batch=2, sequence=8)
    assert (shape.layers, shape.hidden, shape.heads) == (layers, hidden, hidden // 128)


def test_a_shape_of_which_a_part_is_given() -> None:
    """The rest is derived."""
    assert Transformer.of(7e9, batch=1, sequence=8, layers=32).hidden == 4224
    assert Transformer.of(7e9, batch=1, sequence=8, hidden=4096).layers == 35
    assert Transformer.of(1e6, batch=1, sequence=8, hidden=96).heads == 1
    assert Transformer.of(1e6, batch=1, sequence=8, hidden=448, heads=4).heads == 4


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"parameters": 0}, "parameters"),
        ({"parameters": float("nan")}, "parameters"),
        ({"batch": 0}, "batch"),
        ({"sequence": -1}, "sequence"),
        ({"layers": 0}, "layers"),
        ({"hidden": 0}, "hidden"),
        ({"heads": 3, "hidden": 128}, "heads must divide hidden"),
        ({"heads": 0}, "heads"),
        ({"hidden": 448}, "heads must be given"),
    ],
)
def test_a_wrong_shape_is_named(wrong: dict[str, Any], named: str) -> None:
    """Each error says which number."""
    arguments = {"parameters": 1e9, "batch": 1, "sequence": 8} | wrong
    with pytest.raises(ConfigError, match=named):
        Transformer.of(arguments.pop("parameters"), **arguments)
    with pytest.raises(ConfigError, match="vocabulary"):
        replace(GPT3, vocabulary=-1)


# ---------------------------------------------------------------------------------------------------- what torch keeps


def gpt2(shape: Transformer, dtype: torch.dtype, activation: str, *, checkpointing: bool = False) -> torch.nn.Module:
    """GPT-2 of transformers in a shape, with the attention that computes matrices of scores."""
    transformers = pytest.importorskip("transformers")
    probability = 0.1 if shape.dropout else 0.0
    config = transformers.GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.sequence,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function=activation,
        resid_pdrop=probability,
        attn_pdrop=probability,
        embd_pdrop=probability,
        attn_implementation="eager",
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config).to(dtype).train()
    if checkpointing:
        # The older name, which early releases of transformers 5 have, warns in later ones.
        enable: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return model


def kept_of(model: torch.nn.Module, sample: dict[str, torch.Tensor]) -> int:
    """Bytes of unique storages that a real forward pass keeps, parameters and buffers aside."""
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**sample)
    return sum(each.nbytes() for each in found.values())


SMALL = Transformer(batch=2, sequence=64, layers=3, hidden=128, heads=4, vocabulary=100, dropout=False)


@pytest.mark.parametrize(
    ("dtype", "activation", "dropout", "ratio"),
    [
        (torch.float32, "gelu", False, 1.00),
        (torch.bfloat16, "gelu", False, 1.00),
        # On the CPU the mask of a dropout is as wide as the values; on CUDA it has the law's one byte.
        (torch.float32, "gelu", True, 1.15),
        (torch.bfloat16, "gelu", True, 1.10),
        # GPT-2's own GELU is computed in eight operations, each of which keeps its input.
        (torch.float32, "gelu_new", False, 1.63),
        (torch.bfloat16, "gelu_new", True, 1.61),
    ],
)
def test_the_law_is_what_a_real_transformer_keeps(
    dtype: torch.dtype, activation: str, dropout: bool, ratio: float
) -> None:
    """And `estimate` counts to the byte what a real pass keeps."""
    shape = replace(SMALL, dropout=dropout)
    model = gpt2(shape, dtype, activation)
    tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.long)
    sample = {"input_ids": tokens, "labels": tokens}
    found = shoal.zero.estimate(model, 1, stage=0, sample=sample)[0].activations
    assert found == kept_of(model, sample)
    assert found / shape.activations(dtype.itemsize) == pytest.approx(ratio, abs=0.015)


def test_the_law_of_checkpoints_is_what_a_real_transformer_keeps() -> None:
    """Beyond the one layer that is recomputed, which is not there between the passes."""
    shape = replace(SMALL, checkpointing=True)
    model = gpt2(shape, torch.bfloat16, "gelu", checkpointing=True)
    tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.long)
    found = shoal.zero.estimate(model, 1, sample={"input_ids": tokens, "labels": tokens})[0].activations
    recomputed = replace(SMALL, layers=1, vocabulary=0).activations()
    assert found / (shape.activations() - recomputed) == pytest.approx(1.0, abs=0.11)  # the causal mask of s x s


@pytest.mark.parametrize("sample", [torch.ones(4, 30), (torch.ones(4, 30),), {"input": torch.ones(4, 30)}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_sample_for_an_estimate(device: str, sample: object) -> None:
    """By hand: inputs of both layers, the inputs of tanh are not kept, its results are."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(device)
    found = shoal.zero.estimate(model, 2, sample=sample)
    assert {each.activations for each in found} == {4 * (4 * 30 + 4 * 7)}
    assert all(each.memory == each.parameters + each.gradients + each.state + each.activations for each in found)


class Branching(torch.nn.Module):
    """Goes on by what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 4)."""
        hidden = self.layer(hidden)
        return hidden if float(hidden.sum().detach()) > 0 else -hidden


@pytest.mark.parametrize("sample", [torch.ones(3, 4), torch.ones(3, 5), {"wrong": torch.ones(3, 4)}])
def test_a_sample_that_cannot_be_followed(sample: object) -> None:
    """A model that looks at values, a wrong shape, a wrong name."""
    with pytest.raises(ConfigError, match="sample"):
        shoal.zero.estimate(Branching(), 2, sample=sample)


# ------------------------------------------------------------------------------------------------------ what fits


def test_plans_are_listed_by_what_they_send() -> None:
    """And of those that send as much, by the work that they add."""
    shape = Transformer.of(7.5e9, batch=1, sequence=2048)
    found = shoal.zero.plans(7.5e9, 8, transformer=shape)
    assert [(each.stage, each.checkpointing, each.offloaded > 0) for each in found] == [
        *[(stage, checkpointing, False) for checkpointing in (False, True) for stage in (0, 1, 2)],
        *[(stage, checkpointing, True) for checkpointing in (False, True) for stage in (1, 2)],
        *[(3, checkpointing, offload) for offload in (False, True) for checkpointing in (False, True)],
    ]
    assert [each.cost.sent for each in found] == sorted(each.cost.sent for each in found)
    best = next(each for each in found if each.memory <= 24e9)
    assert (best.stage, best.checkpointing, best.offloaded) == (2, True, 16 * 7.5e9 / 8)
    assert best.memory == 2 * 7.5e9 + replace(shape, checkpointing=True).activations()


@pytest.mark.parametrize(
    ("precision", "optimizer", "kept"),
    [
        # For each stage the bytes of a parameter that each rank has, and those that are shared; then with offload.
        ("mixed", "adam", {0: (16, 0), 1: (4, 16), 2: (2, 16), 3: (0, 16), -1: (4, 0), -2: (2, 0), -3: (0, 0)}),
        ("mixed", "sgd", {0: (8, 0), 1: (4, 8), 2: (2, 8), 3: (0, 8), -1: (4, 0), -2: (2, 0), -3: (0, 0)}),
        ("float32", "adam", {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16), -1: (8, 0), -2: (4, 0), -3: (0, 0)}),
        ("float32", "sgd", {0: (8, 0), 1: (8, 0), 2: (4, 4), 3: (0, 8), -2: (4, 0), -3: (0, 0)}),
    ],
)
def test_plans_are_of_what_shoal_keeps(precision: str, optimizer: str, kept: dict[int, tuple[int, int]]) -> None:
    """Stages with offload are negative here. Nothing that a rank keeps gets lost by offload."""
    found = shoal.zero.plans(1e6, 4, precision=precision, optimizer=optimizer)
    memory = {each.stage * (-1 if each.offloaded else 1): each.memory for each in found}
    assert memory == {stage: 1e6 * (whole + shared / 4) for stage, (whole, shared) in kept.items()}
    for each in found:
        assert each.memory + each.offloaded == memory[each.stage]


def test_plans_with_averages_and_replicas() -> None:
    """Averages take 4 bytes for each weight of a share, also with offload; ranks form whole replicas."""
    usual = shoal.zero.plans(1e6, 4, stage=2)
    found = shoal.zero.plans(1e6, 8, stage=2, replicas=2, ema=True)
    assert [each.memory - one.memory for each, one in zip(found, usual, strict=True)] == [4 * 1e6 / 4] * 2
    assert [each.offloaded for each in found] == [each.offloaded for each in usual]
    assert shoal.zero.fewest_ranks(1e6, 1e6, stage=3, replicas=3, ema=True) == 3 * 4


@given(
    memory=st.floats(1e9, 1e12),
    parameters=st.floats(1e8, 1e12),
    stage=st.sampled_from([None, 0, 1, 2, 3]),
    counted=st.booleans(),
)
def test_the_fewest_ranks_on_which_it_fits(memory: float, parameters: float, stage: int | None, counted: bool) -> None:
    """One less would be too few."""
    shape = Transformer.of(parameters, batch=1, sequence=128) if counted else None
    ranks = shoal.zero.fewest_ranks(memory, parameters, stage=stage, transformer=shape)

    def least(count: int) -> float:
        return min(each.memory for each in shoal.zero.plans(parameters, count, stage=stage, transformer=shape))

    if ranks is None:
        assert least(10**12) > memory * (1 - 1e-6)
    else:
        assert least(ranks) <= memory * (1 + 1e-9)
        assert ranks == 1 or least(ranks - 1) > memory * (1 - 1e-9)


def test_no_rank_keeps_less_than_a_parameter() -> None:
    """It took 60,000,000,000 ranks for 7,500,000,000 parameters."""
    assert shoal.zero.fewest_ranks(1.0, 7.5e9, ema=True) is None


@pytest.mark.parametrize("memory", [0, -1.0, float("nan")])
def test_memory_must_be_above_0(memory: float) -> None:
    """Named."""
    with pytest.raises(ConfigError, match="memory"):
        shoal.zero.fewest_ranks(memory, 1e9)
