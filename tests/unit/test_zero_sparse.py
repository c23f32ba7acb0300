"""Sparse updates, without ranks: who owns the rows, what is added up, what top-k leaves behind."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ConfigError
from shoal.layout import Scattered, flat, shaped
from shoal.zero.flat.sparse import Rows, add_up, declared
from shoal.zero.flat.topk import Fraction, Residual, share


@pytest.mark.parametrize("count", [1, 2, 3, 10, 97, 1000, 65_536])
def test_an_order_of_rows_has_each_row_once(count: int) -> None:
    """And leads back; `flat` and `shaped` go there and back, too."""
    order, rows = Scattered.of(count), torch.arange(count)
    places = order.places(rows)
    assert torch.equal(places.sort().values, rows)
    assert torch.equal(order.rows(places), rows)
    values = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    there = flat(values, order)
    assert torch.equal(there.view(count, 3)[places], values)
    assert torch.equal(shaped(there, values.shape, order), values)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_frequent_rows_are_shared_out_evenly(ranks: int) -> None:
    """A million rows, sorted by how often they come: of the first ones each rank has its share, to 1% of it."""
    order = Scattered.of(1_000_000)
    for frequent in (1_000, 10_000):
        owned = torch.bincount(order.places(torch.arange(frequent)) * ranks // 1_000_000, minlength=ranks)
        assert float((owned * ranks / frequent - 1).abs().max()) < 0.01
    draws = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = (1_000_001**draws).long().sub(1).clamp(max=999_999)
    touched = torch.unique(drawn)
    assert len(touched) == 2555
    assert float((touched < 500_000).float().mean()) > 0.9  # those of the first of two ranks, if it owned a range
    owned = torch.bincount(order.places(touched) * ranks // 1_000_000, minlength=ranks)
    assert float((owned * ranks / len(touched) - 1).abs().max()) < 0.13


def test_rows_are_added_first_to_last() -> None:
    """In float32, if they have 16 bits; a row that one part lacks is as the others have it."""
    first = Rows(torch.tensor([1, 4]), torch.tensor([[1.0], [1e8]]).bfloat16())
    second = Rows(torch.tensor([4, 5]), torch.tensor([[1.0], [2.0]]).bfloat16())
    found = add_up([first, second, Rows(torch.tensor([4]), torch.tensor([[-1e8]]).bfloat16())])
    assert found.places.tolist() == [1, 4, 5]
    assert found.values.dtype == torch.float32
    assert found.values[:, 0].tolist() == [1.0, 0.0, 2.0]  # 1e8 + 1 is 1e8


def test_what_top_k_does_not_send_is_kept() -> None:
    """And sent later; a step that is left out changes nothing; rounding to 16 bits is made good."""
    residual = Residual(torch.zeros(10, dtype=torch.bfloat16), 4, Fraction(0.25))
    gradient = torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, -1.001])
    places, sent = residual.choose(gradient, torch.bfloat16)
    assert places.tolist() == [1, 9]  # the largest of each four; zeros are not sent
    assert sent.tolist() == [-3.0, -1.0]
    residual.keep()
    assert not residual.kept.any()
    residual.choose(gradient, torch.bfloat16)
    residual.advance()
    assert residual.kept.tolist() == pytest.approx([1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, -0.001], abs=1e-6)
    places, sent = residual.choose(torch.zeros(10), torch.bfloat16)
    assert places.tolist() == [2, 8]
    places, sent = residual.choose(torch.full((10,), torch.nan), torch.bfloat16)
    assert sent.isnan().all()
    assert len(sent) == 3
    residual.keep()
    assert residual.kept.isfinite().all()


def test_which_weights_are_sparse() -> None:
    """Those of modules that say so; not one that another module has as well."""
    model = torch.nn.Module()
    model.one = torch.nn.Embedding(5, 3, sparse=True)
    model.bag = torch.nn.EmbeddingBag(5, 3, sparse=True)
    model.dense = torch.nn.Embedding(5, 3)
    model.tied = torch.nn.Embedding(5, 3, sparse=True)
    model.head = torch.nn.Linear(3, 5, bias=False)
    model.head.weight = model.tied.weight
    assert declared(model) == {"one.weight", "bag.weight"}


@pytest.mark.parametrize("value", [0, -0.1, 1.1, float("nan"), "1%", True, None])
def test_a_share_is_above_0_and_at_most_1(value: object) -> None:
    """All else is refused."""
    with pytest.raises(ConfigError, match="top_k must be a number above 0"):
        share(value)
