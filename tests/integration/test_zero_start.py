"""A model that begins on the meta device trains as one that was built as usual."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration import zero_cases
from tests.integration import zero_start as cases
from tests.integration.ranks import Ranks, ranks
from tests.integration.test_zero_training import distance


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Processes for all tests of this module."""
    with ranks() as made:
        yield made


def same(found: list[Any], usual: list[Any], wanted: dict[str, torch.Tensor]) -> None:
    """First values are those wanted, and each rank has the bits of the same rank that began as usual."""
    for (first, after, _), (other_first, other, _) in zip(found, usual, strict=True):
        assert not wanted or distance([{name: first[name] for name in wanted}], wanted) == 0.0
        assert distance([first], other_first) == distance([after], other) == 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_modules_compute_the_values_of_a_model_that_was_built_as_usual(pool: Ranks, stage: int) -> None:
    """Each module's `reset_parameters`, from the random numbers of rank 0: the same bits at first and at last."""
    wanted = cases.state_of(cases.built(5))
    for count in (1, 3):
        same(pool.play(count, cases.started, stage, True), pool.play(count, cases.started, stage, False), wanted)


def write(folder: Path, how: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Weights in files, and the state dictionary that they stand for."""
    state = cases.built(9).state_dict()
    if how == "16 bits":
        state = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state.items()}
    files = {name: each.clone() for name, each in state.items() if name != "head.weight"}
    if how == "one file":
        save_file(files, folder / "weights.safetensors")
        return str(folder / "weights.safetensors"), state
    if how == "a folder of one file":
        save_file({**files, "head.weight": state["head.weight"].clone()}, folder / "model.safetensors")
        return str(folder), state
    names = list(files)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: files[name] for name in part}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder), state


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=pytest.mark.long) for how in ("one file", "a folder of one file", "16 bits")]
    + ["a folder of several files"],
)
def test_weights_in_files(pool: Ranks, tmp_path: Path, how: str) -> None:
    """The same bits as those of a model that had loaded them; in stage 3 each rank reads its own rows only."""
    source, state = write(tmp_path, how)
    floats = {name: each.float() if each.is_floating_point() else each for name, each in state.items()}
    parameters = sum(each.nbytes for name, each in state.items() if name in PARAMETERS)
    buffers = sum(each.nbytes for name, each in state.items() if name not in PARAMETERS | {"head.weight"})
    for stage in (1, 3):
        usual = pool.play(3, cases.started, stage, False, None, floats)
        found = pool.play(3, cases.started, stage, True, source)
        same(found, usual, floats)
        shares = [count - buffers for *_, count in found]
        assert shares == [parameters] * 3 if stage < 3 else sum(shares) == parameters
    same(pool.play(3, cases.started, 3, False, source), usual, floats)  # of a model that is not on the meta device


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_a_model_that_computes_in_16_bits(pool: Ranks, tmp_path: Path, stage: int) -> None:
    """The float32 values in the file are those that the optimizer steps."""
    state = zero_cases.Odd().state_dict()
    path = str(tmp_path / "weights.safetensors")
    save_file({name: each * 1.1 for name, each in state.items()}, path)
    given = {name: each * 1.1 for name, each in state.items()}
    found = pool.play(2, cases.started, stage, True, path, None, torch.bfloat16)
    same(found, pool.play(2, cases.started, stage, False, None, given, torch.bfloat16), {})


PARAMETERS = {name for name, _ in cases.built(0, meta=True).named_parameters()}


@pytest.mark.long
def test_weights_of_a_checkpoint(pool: Ranks, tmp_path: Path) -> None:
    """Of other stages and numbers of ranks: to the bit."""
    for stage, count in ((1, 2), (3, 3)):
        path = str(tmp_path / f"{stage}")
        state = pool.play(count, cases.saved, stage, path)[0]
        for now in (2, 3):
            same(pool.play(2, cases.started, now, True, path), pool.play(2, cases.started, now, False, None, state), {})


REFUSED = {
    "lacks two": "lacks layers.0.mix.in_proj_bias, scale.scale, which the model has",
    "has more": "has other, which the model has not",
    "shape": r"scale.scale in .* has the shape \[2\], and in the model \[1\]",
    "dtype": "norm.num_batches_tracked in .* is torch.float32, and in the model torch.int64",
    "cut": "is no whole safetensors file: it ends before",
    "no file": "weights must be a safetensors file",
    "another file on rank 1": "rank 1 gave something else than rank 0",
}


@pytest.mark.parametrize("how", list(REFUSED))
def test_weights_of_another_model_are_refused_by_all_ranks(pool: Ranks, tmp_path: Path, how: str) -> None:
    """Before anything is changed: the model is on the meta device still."""
    path, _ = write(tmp_path, "one file")
    tensors = load_file(path)
    if how == "lacks two":
        del tensors["scale.scale"], tensors["layers.0.mix.in_proj_bias"]
    if how == "has more":
        tensors["other"] = torch.zeros(3)
    if how == "shape":
        tensors["scale.scale"] = torch.zeros(2)
    if how == "dtype":
        tensors["norm.num_batches_tracked"] = torch.zeros(())
    save_file(tensors, path)
    if how == "cut":
        os.truncate(path, Path(path).stat().st_size - 8)
    second = str(tmp_path / "second.safetensors")
    save_file({**tensors, "blocks.0.out.bias": torch.zeros(11, dtype=torch.float64)}, second)
    if how == "no file":
        path = second = str(tmp_path)
    for message in pool.play(2, cases.refused, 3, path, second if how == "another file on rank 1" else path):
        assert re.search(REFUSED[how], message), message


@pytest.mark.parametrize("how", ["buffer", "parameter", "leaves", "hook", "spans", "fully_shard"])
def test_a_model_that_nothing_gives_values_is_refused(pool: Ranks, how: str) -> None:
    """By name, with what to do."""
    for message in pool.play(2, cases.without_values, how):
        assert re.search(cases.WITHOUT[how], message), message


@pytest.mark.long
@pytest.mark.timeout(600)  # 16 ranks, on however many cores
def test_a_model_four_times_larger_than_the_limit_of_a_rank(pool: Ranks, tmp_path: Path) -> None:
    """It starts, trains, and has the bits of one process; built as usual it does not even start."""
    limit, count = cases.LARGE // 4, 16
    with ranks() as others:  # what a start that failed leaves in the heap of its process does not count
        message = others.play(1, cases.within, limit, False, None)[0]
    assert "can't allocate memory" in message, message
    torch.manual_seed(3)
    model = cases.tower()
    path = str(tmp_path / "weights.safetensors")
    save_file(model.state_dict(), path)
    found = pool.play(count, cases.within, limit, True, path)
    optimizer = cases.sgd(list(model.parameters()))
    totals = [torch.zeros_like(each) for each in model.parameters()]
    for rank in range(count):
        torch.autograd.backward(cases.tower_loss(model, rank))
        for total, each in zip(totals, model.parameters(), strict=True):
            assert each.grad is not None
            total += each.grad
        optimizer.zero_grad()
    for total, each in zip(totals, model.parameters(), strict=True):
        each.grad = total / count
    optimizer.step()
    assert not any(isinstance(each, str) for each in found), [each for each in found if isinstance(each, str)][:1]
    for name, each in model.named_parameters():
        assert torch.equal(torch.cat([rows[name] for rows in found]), each)


@pytest.mark.parametrize("kind", ["Llama", pytest.param("Bert", marks=pytest.mark.long)])
def test_models_of_transformers(pool: Ranks, tmp_path: Path, kind: str) -> None:
    """A folder of `save_pretrained`, in several files; or `_init_weights`, which computes rotary angles, too."""
    usual = cases.tiny(kind)
    usual.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    losses = set()
    for stage in (2, 3):
        for first, loss in pool.play(2, cases.of_transformers, kind, stage, str(tmp_path)):
            assert distance([first], cases.state_of(usual)) == 0.0
            losses.add(loss)
    assert len(losses) == 1
    (one, _), (other, _) = (pool.play(2, cases.of_transformers, kind, stage, None)[0] for stage in (2, 3))
    assert distance([one], other) == 0.0
    for name, each in cases.state_of(usual).items():
        if each.ndim == 2 and each.is_floating_point():
            assert float(one[name].std()) == pytest.approx(0.02, rel=0.4), name
        else:
            assert torch.equal(one[name], each), name
