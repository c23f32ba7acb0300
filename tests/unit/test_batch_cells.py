"""Cells of recurrent layers, which are given a batch step by step: the samples are counted right, or asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.test_batch_kinds import BATCH, IDS, STEPS, TOKENS, WIDTH, WORDS, Model, counted, head, time_first

SAMPLES = torch.randn(BATCH, STEPS, WIDTH)


def results(self: Any, x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """A loop over time in the manner of users: the result of each step."""
    state, found = None, []
    for step in x.unbind(dim):
        state = self.cell(step, state)
        found.append(self.head(state[0] if isinstance(state, tuple) else state))
    return found


def last(self: Any, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The result of the last step."""
    return results(self, x, dim)[-1]


def cell(forward: Any, kind: Any = nn.GRUCell, **layers: nn.Module) -> Model:
    """A model with a cell."""
    return Model(forward, cell=kind(WIDTH, WIDTH), head=head(), **layers)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_that_are_fed_time_first_were_counted_by_their_steps(kind: Any) -> None:
    """A loop over the first dimension of steps, samples, features counted the steps in place of the samples."""
    assert counted(cell(last, kind), (time_first(),), (time_first(5),)) == BATCH + 5
    assert counted(cell(last, kind), (time_first(STEPS),), (time_first(),)) == STEPS + BATCH, "equal sizes say nothing"
    assert counted(cell(lambda self, x: last(self, x, 1), kind), (SAMPLES,), (SAMPLES[:2],)) == BATCH + 2
    assert counted(Model(lambda self, x: self.net(x), net=cell(last, kind)), (time_first(),)) == BATCH, "within another"


def mean_loss(self: Any, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """A number alone."""
    return (last(self, x).sum(1) - (0 if y is None else y)).square().mean()


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (cell(lambda self, x: torch.stack(results(self, x))), (time_first(),)),
        (cell(lambda self, x: torch.stack(results(self, x[:-1]))), (time_first(),)),
        (cell(lambda self, x: last(self, x) + last(self, x.flip(0))), (time_first(),)),
        (cell(mean_loss), (time_first(),)),
        (cell(mean_loss), {"x": time_first(), "y": torch.ones(BATCH)}),
        (cell(lambda self, x: last(self, self.words(x)), words=WORDS), (TOKENS,)),
        (cell(lambda self, x: last(self, self.words(x), 1), words=WORDS), (TOKENS.t(),)),
        (cell(lambda self, x: last(self, self.net(x)), net=nn.Linear(2, WIDTH)), (torch.randn(STEPS, BATCH, 2),)),
        (cell(lambda self, x, h: self.head(self.cell(x, h))), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))),
        (cell(lambda self, x: torch.stack([last(self, each) for each in x])), (SAMPLES,)),
        (cell(lambda self, x: torch.stack([self.cell(each) for each in x])), (SAMPLES[:, 0],)),
        (cell(lambda self, x: self.cell(x[:, :2].flatten(0, 1)).unflatten(0, (-1, 2))), (SAMPLES,)),
    ],
)
def test_cells_of_many_models_count_the_samples(model: nn.Module, batch: Any) -> None:
    """Results of each step, other numbers of steps, embeddings, one step alone, loops over samples, slots."""
    assert counted(model, batch) == BATCH


def test_one_sequence_for_a_cell_is_one_sample_or_is_asked_for() -> None:
    """Its steps were counted, with a batch of one and without a batch."""
    rows = SAMPLES[0]
    assert counted(cell(last), (rows,), (rows[:4],)) == 2
    assert counted(cell(lambda self, x: last(self, x[:, None])), (rows,)) == 1
    assert counted(cell(lambda self, x: last(self, self.words(x)), words=WORDS), (IDS,)) == 1
    found = counted(cell(lambda self, x: torch.stack(results(self, x))), (rows,))
    assert f"one sequence or {STEPS} samples" in str(found)
    found = counted(cell(lambda self, x: last(self, x[:-1])), (rows,))
    assert f"in {STEPS - 1} steps, and it is not clear which of {STEPS} rows they are" in str(found)


def test_what_a_cell_does_not_decide_is_asked_for() -> None:
    """A result for each row of the steps; parts without a state; rows that are none of what the model was given."""
    whether = f"whether a batch has {STEPS} samples or {BATCH}"
    each_step: Any = cell(lambda self, x: torch.stack(results(self, x)).square().mean((1, 2)))
    assert whether in str(counted(each_step, (time_first(),)))
    apart: Any = cell(lambda self, x: torch.stack([self.cell(each) for each in x]))
    assert whether in str(counted(apart, (time_first(),)))
    chosen: Any = cell(lambda self, x: last(self, x[:, :2]))
    assert "which of 7 rows" in str(counted(chosen, (time_first(),)))


def test_a_compiled_model_with_a_cell_is_asked_by_its_results() -> None:
    """Nobody looks at the cell of one, which counted the steps, too."""
    for model, batch in ((cell(last), time_first()), (cell(lambda self, x: last(self, x, 1)), SAMPLES)):
        compiled: Any = torch.compile(model, backend="eager")
        assert counted(compiled, (batch,)) == BATCH
    stacked: Any = torch.compile(cell(lambda self, x: torch.stack(results(self, x))), backend="eager")
    assert f"{STEPS} samples or {BATCH}" in str(counted(stacked, (time_first(),)))
    one_step: Any = torch.compile(cell(lambda self, x: self.cell(x)), backend="eager")
    assert counted(one_step, (torch.randn(6, WIDTH),)) == 6
    torch._dynamo.reset()
