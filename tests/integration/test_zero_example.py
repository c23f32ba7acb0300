"""examples/zero_bert.py: one script for every stage, by plain python and by torchrun. And other examples of ZeRO."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.workers import LONG_S, Talk

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "zero_bert.py"
RECOMMENDER = EXAMPLE.with_name("recommender.py")
ALBERT = EXAMPLE.with_name("zero_albert.py")
SMALL = ["--steps", "3", "--layers", "1", "--width", "64"]


def lines(
    *command: str,
    example: Path = EXAMPLE,
    size: Sequence[str] = SMALL,
    begin: tuple[str, ...] = tuple("0123"),
) -> list[list[str]]:
    """The table's lines, in words: those that begin so."""
    with Talk([sys.executable, *command, str(example), *size], OMP_NUM_THREADS="1") as talk:
        said = talk.rest(2 * LONG_S)
        assert talk.wait() == 0, talk.errors()
    return [line.replace("(DDP)", "").split() for line in said if line.startswith(begin)]


@pytest.mark.long
def test_all_stages_on_two_ranks_end_with_the_same_loss() -> None:
    """Each stage holds less than the one before, and stage 3 sends half as much again."""
    table = lines("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert [line[0] for line in table] == ["0", "1", "2", "3", "3+ckpt", "2+disk"]
    activations = [float(line[6]) for line in table]
    assert len(set(activations[:4])) == 1
    assert activations[4] < 0.8 * activations[3]  # of a single layer, and of the logits
    held = [float(line[4]) for line in table]
    assert held == sorted(held, reverse=True)
    assert held[3] < 0.6 * held[0]
    assert float(table[5][2]) == float(table[5][3]) == 0.0  # gradients and state are on the disk
    sent = [float(line[8]) for line in table]
    assert sent[0] == sent[1] == sent[2] == sent[5]
    assert sent[4] == sent[3] == pytest.approx(1.5 * sent[0], rel=0.1)
    assert len({line[-1] for line in table}) == 1


def test_one_process_without_a_launcher() -> None:
    """The same script."""
    table = lines()
    assert [line[0] for line in table] == ["0", "1", "2", "3", "3+ckpt", "2+disk"]
    assert {line[8] for line in table} == {"0.0"}
    assert len({line[-1] for line in table}) == 1


@pytest.mark.long
def test_the_recommender_sends_few_rows(tmp_path: Path) -> None:
    """A small one, on two ranks: much less is sent, both ways learn, and there is a picture."""
    pytest.importorskip("matplotlib")
    size = ["--items", "20000", "--batch", "64", "--steps", "60", "--picture", str(tmp_path / "picture.png")]
    table = {
        name: [float(each) for each in numbers]
        for name, *numbers in lines(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            example=RECOMMENDER,
            size=size,
            begin=("dense ", "sparse  "),
        )
    }
    dense, sparse = table["dense"], table["sparse"]
    assert sparse[0] < 0.06 * dense[0]
    assert dense[-1] == pytest.approx(sparse[-1], abs=1e-3)
    assert sparse[-1] < 4.0  # the first loss is that of guessing among 64: 4.16
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.long
def test_albert_with_lamb_which_needs_whole_tensors() -> None:
    """The state of each tensor is on one of three ranks, and the loss is that without sharding."""
    pytest.importorskip("pytorch_optimizer")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    alone, sharded = lines(*launch, example=ALBERT, begin=("DDP", "stage 2"))
    assert len({*alone[1:4]}) == 1
    assert sum(map(float, sharded[2:5])) == pytest.approx(float(alone[1]), abs=0.02)
    assert float(sharded[6]) < 2.0
    assert float(sharded[-1]) == pytest.approx(float(alone[-1]), abs=2e-5)
