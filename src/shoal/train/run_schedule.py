"""The schedule of a run on one peer: it is moved with the steps of the run, and says which rates are in force.

The user's own code moves it, so it may fail: then the rates stay as they are, and training goes on. See `schedule` for
schedules of torch that a trainer steps, too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from shoal.train.inner import Scheduler
from shoal.train.schedule import advance, count_of, put_back, rates_of, restore_rates, set_rate, tell_rates
from shoal.train.stepper import Stepper

__all__ = ["RunSchedule"]


class RunSchedule:
    """The schedule of one optimizer.

    Args:
        optimizer: whose rates it moves.
        scheduler: that was given; None for none, until one is adopted.
        stepper: its code computes there.

    Attributes:
        scheduler: that is moved; None if there is none.
        error: why it does not follow the steps any more (a `OneCycleLR` has an end): the learning rates stay as they
            are; None if it does.
        steps_ahead: how many steps it is ahead of the run, and stands still for: the run went back, and it could not.
        was_moved: whether somebody else has moved it, and it was put back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, stepper: Stepper) -> None:
        self._optimizer, self._stepper, self.scheduler = optimizer, stepper, scheduler
        self._steps, self._first = 0, _copy_of_state(scheduler)
        self.error: str | None = None
        self.steps_ahead, self.was_moved = 0, False
        self._resumed_rates: list[float] | None = None  # until the next step: those of a state that had a count
        self._left_at: int | None = self.count  # see `follow`
        self._begins_anew = False  # one that is adopted begins with its own first rates

    @property
    def count(self) -> int:
        """The steps that it was moved, by its own count, which the user may have loaded."""
        count = None if self._first is None else count_of(self.scheduler)
        return max(0, count) if isinstance(count, int) else self._steps

    def stepped(self) -> None:
        """The run has taken a step."""
        self._resumed_rates = None
        self._move(self.count + 1)

    def resume(self, count: int) -> None:
        """Go on from this count with the rates that the optimizer has now."""
        rates = self._rates()
        if count < self.count:
            # A peer that ran ahead on the worse side of a fork goes back: its schedule begins anew.
            self._restart()
        self._move_alone(count, rates)
        self._resumed_rates = rates if count else None

    def keep_place(self) -> None:
        """Go on where this run is: the optimizer that was loaded has the rates of a run that counts other epochs."""
        at = self.count
        self._restart()
        self._move(at)
        self._resumed_rates = None

    def follow(self, at: int) -> None:
        """Move it to this count, where the run is now."""
        # If a state was loaded it is of the middle of an interval, or of another run.
        if self.count != self._left_at and self.count > at:
            self._restart()
            self._resumed_rates, self._begins_anew = None, self.scheduler is None
        self._move(at)
        self._left_at = self.count

    def go_back(self) -> None:
        """If it is ahead of the run, it goes back when it follows next. Otherwise it would wait for the run."""
        self._left_at = None

    def adopt(self, scheduler: Scheduler) -> None:
        """Let this be the schedule of the run: it is brought to the steps that were taken, if it is not further.

        If a state was loaded since the last step, its rates stay, or those that were set by hand since; not if they are
        of a later place than the run.
        """
        if self._begins_anew:
            self._begins_anew = False
            restore_rates(scheduler, self._optimizer.param_groups)
        count, rates = self.count, self._rates()
        self.scheduler, self._steps, self.error = scheduler, 0, None
        self.steps_ahead = 0
        self._first = _copy_of_state(scheduler)
        if self._resumed_rates is None:
            self._move(count)
        else:
            # A schedule that is made after the state was loaded writes the rates of its first step.
            written = [float(rate) for rate in rates_of(scheduler)] == rates
            self._move_alone(count, self._resumed_rates if written else rates)

    def put_back(self) -> None:
        """If somebody else has moved it, bring it back to the steps that were taken."""
        self.was_moved = put_back(self.scheduler) or self.was_moved

    def restore_rates(self) -> None:
        """Somebody else has set the rates: let them be those of the schedule again."""
        restore_rates(self.scheduler, self._optimizer.param_groups)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._rated_groups]

    @property
    def _rated_groups(self) -> list[dict[str, Any]]:
        return [group for group in self._optimizer.param_groups if group.get("lr") is not None]

    def _move_alone(self, to: int, rates: Sequence[float]) -> None:
        """Bring it to this count, and let these rates be in force: most schedules go on from such."""
        self._move(to)
        for group, rate in zip(self._rated_groups, rates, strict=True):
            set_rate(group, rate)
        tell_rates(self.scheduler, self._rated_groups)

    def _move(self, to: int) -> None:
        if self.scheduler is None:
            self._steps = to  # one that comes later begins there
        self.put_back()
        if self.scheduler is None or self.error is not None:
            return
        with self._stepper.thread.in_force():
            for count in range(self.count, to):
                try:
                    if self.steps_ahead:
                        self.steps_ahead -= 1
                    else:
                        advance(self.scheduler)
                except Exception as error:  # noqa: BLE001 (its end, or the user's own code: the state is whole without)
                    what = f"{type(error).__name__}: {error}"
                    self.error = f"the schedule goes no further than {count} steps: {what}"
                    return
                self._steps += 1

    def _restart(self) -> None:
        if self.scheduler is not None:
            if self._first is None:
                self.steps_ahead += self._steps
                self._steps = 0
                return
            try:
                with self._stepper.thread.in_force():
                    self.scheduler.load_state_dict(copy.deepcopy(self._first))
            except Exception as error:  # noqa: BLE001 (the user's own code)
                self.error = f"the schedule does not go back: {type(error).__name__}: {error}"
                return
            self._steps, self.error = 0, None
        for group in self._rated_groups:
            set_rate(group, group.get("initial_lr", group["lr"]))
        self.restore_rates()  # the first ones may be others: LinearLR computes each from the one before


def _copy_of_state(scheduler: Scheduler | None) -> dict[str, Any] | None:
    """The state of a schedule, to go back to; None if it cannot be copied, as it holds a lock or a file."""
    try:
        return copy.deepcopy(scheduler.state_dict())  # type: ignore[no-any-return, union-attr]
    except Exception:  # noqa: BLE001 (there is none, or the user's own code; `waits` does without)
        return None
