"""D2: an epoch that was counted with no step, when Ctrl+C came between the two."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from shoal.train import gradient_sum, offload, pending, shared_tensors, stepper, training_state
from shoal.train.offload import Offload
from shoal.train.training_state import TrainingState


class Interrupted(BaseException):
    """As `KeyboardInterrupt`."""


class Interrupt:
    """Raises at one moment in the code of the state: where Python looks for signals."""

    def __init__(self, moment: int) -> None:
        self.moments, self._moment = 0, moment

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        modules = (training_state, shared_tensors, pending, stepper, gradient_sum, offload)
        files = [each.__file__ for each in modules]
        if frame.f_code.co_filename in files and event != "c_call":
            self.moments += 1
            if self.moments == self._moment:
                raise Interrupted

    def during(self, call: Callable[[], object]) -> None:
        """Make the call, and interrupt it."""
        sys.setprofile(self)
        try:
            with contextlib.suppress(Interrupted):
                call()
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_an_epoch_is_counted_with_its_step(late: bool, on_host: bool) -> None:
    """An interrupt at any moment: before the optimizer begins nothing has changed, and the next call takes the step.

    Samples that went into the step never count again. The late ones count for the next step, all of them or none.
    """

    def ready() -> tuple[TrainingState, list[int]]:
        weight = torch.nn.Parameter(torch.ones(3))
        inner, begun = torch.optim.SGD([weight], lr=0.5), list[int]()
        inner.register_step_pre_hook(lambda *_: begun.append(1))
        lender = Offload([weight]) if on_host else None
        training = TrainingState(inner, torch.optim.lr_scheduler.StepLR(inner, 10), late=late, offload=lender)
        homes.append(weight.data_ptr())
        weight.grad = torch.ones(3)
        training.accumulate(1)
        training.use_own_mean()
        weight.grad = torch.full((3,), 7.0)
        training.accumulate(2)
        training.whole = False  # as its caller does
        return training, begun

    homes = list[int]()
    before = sys.getprofile()
    whole = Interrupt(0)
    whole.during(ready()[0].step)
    assert whole.moments > 20
    retried = 0
    for moment in range(1, whole.moments + 1):
        training, begun = ready()
        Interrupt(moment).during(training.step)
        if training.epoch == 0:
            retried += 1
            assert not begun, moment
            training.step()
        (weight,) = training.parameters
        assert weight.data_ptr() == homes[-1], moment
        assert training.epoch == 1
        assert not training.pending.holds_average, moment
        assert training.pending.samples in ((0, 2) if late else (0,)), moment
        assert not training.pending.samples or (training.accumulators[0] == 14.0).all()
        assert len(begun) <= 1
        assert weight.grad is not None, moment
        assert weight.grad.tolist() == [7.0] * 3, moment
        if training.whole:
            assert weight.tolist() == [0.5] * 3, moment
    assert retried >= 3  # Python 3.12 makes fewer calls of what it inlines
    sys.setprofile(before)
