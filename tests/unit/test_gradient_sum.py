"""Sums of gradients of a model that is on another device than its sum."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.train.gradient_sum import GradientSum


def test_a_model_that_is_moved_after_the_sum_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Accelerate moves it, in `prepare`: gradients come from the GPU, and the sum stays where it is.

    The tensors have no values, so that no GPU is needed.
    """
    add = torch._foreach_add_

    def add_on_one_device(tensors: list[torch.Tensor], others: list[torch.Tensor], alpha: float) -> None:
        assert all(one.device == other.device for one, other in zip(tensors, others, strict=True))
        add(tensors, others, alpha=alpha)

    monkeypatch.setattr(torch, "_foreach_add_", add_on_one_device)
    with FakeTensorMode():
        trained = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
        total = GradientSum(trained, 1)
        trained[:] = [torch.nn.Parameter(torch.zeros(each.shape, device="cuda")) for each in trained]
        for count in (1, 2):
            for each in trained:
                each.grad = torch.ones(each.shape, device="cuda")
            total.add([0, 1], 4)
            assert total.samples == 4 * count
        total.forget()
        total.add([0, 1], 4)
        assert {each.device.type for each in total.tensors} == {"cpu"}
