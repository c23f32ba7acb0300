"""Which optimizers make values of several others, so that their rounding depends on more than the values."""

from __future__ import annotations

import warnings

import pytest
import torch

from shoal.base.thread_state import ThreadState, numerics_of
from shoal.train.trial import mixes_values
from tests.odd_torch import ODD
from tests.unit.optimizer_cases import optimizer_by_name, parameters, shapes_for

APART = [
    *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"),
]
MIXED = [
    "torch.optim.Adafactor",
    "torch.optim.Muon",
    *(f"pytorch_optimizer.{name}" for name in ("SOAP", "CAME", "Lamb")),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", APART)
def test_what_is_done_to_each_value_by_itself_does_not_mix(name: str, foreach: bool) -> None:
    """Such steps are taken with all threads that there are."""
    assert not mixes_values(getattr(torch.optim, name)(parameters(), lr=0.01, foreach=foreach))


@pytest.mark.parametrize("name", ["AdamW", "Rprop"])
def test_steps_that_do_not_mix_have_the_same_bits_with_any_number_of_threads(name: str) -> None:
    """So it need not be agreed on."""

    def stepped() -> torch.Tensor:
        (own,) = parameters(shapes=((70_001,),))
        optimizer = getattr(torch.optim, name)([own], lr=0.01)
        for number in range(2):
            own.grad = torch.randn(own.shape, generator=torch.Generator().manual_seed(number))
            optimizer.step()
        return own

    plain = stepped()
    with ODD["two threads"]():
        assert torch.equal(stepped(), plain)


@pytest.mark.parametrize("name", MIXED)
def test_sums_and_products_of_matrices_mix(name: str) -> None:
    """Their steps have other bits with other numbers of threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert mixes_values(optimizer_by_name(name)(parameters(shapes=shapes_for(name))))


def test_a_fused_step_does_not_mix_and_a_wrapper_is_not_tried() -> None:
    """A twin of an optimizer that wraps another one might step the parameters themselves."""
    own = parameters()
    assert not mixes_values(torch.optim.AdamW(own, fused=True))
    before = [each.detach().clone() for each in own]
    assert mixes_values(optimizer_by_name("pytorch_optimizer.Lookahead")([torch.optim.SGD(own, lr=0.1)][0]))  # type: ignore[arg-type]
    assert all(map(torch.equal, own, before))


def test_the_way_of_a_step_names_what_its_rounding_depends_on() -> None:
    """For people, and to tell peers apart that round otherwise; the processor only where values are mixed."""
    assert numerics_of(ThreadState.here(), mixes=False) == ""
    plain = numerics_of(ThreadState.here(), mixes=True)
    for odd in ("autocast", "deterministic algorithms", "products of less precision", "flushed denormals"):
        with ODD[odd]():
            assert numerics_of(ThreadState.here(), mixes=True) != plain
    with ODD["two threads"](), ODD["no_grad"]():
        assert numerics_of(ThreadState.here(), mixes=True) == plain
