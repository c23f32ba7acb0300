"""The result of `DecentralizedAverager.step(wait=False)`: a future that also steers the step."""

from __future__ import annotations

import time
from typing import Any

from shoal.averaging import AveragingStage, StepRequest
from shoal.base.peer import PeerID
from shoal.errors import ConfigError, LocalError
from shoal.runtime.thread import LoopFuture, LoopThread

__all__ = ["StepControl"]


class StepControl(LoopFuture[dict[PeerID, Any]]):
    """One step of an averager that is under way: a `concurrent.futures.Future` of `{peer id: its `gather` value}`.

    The scheduled time can be changed until there is a group, the weight until the values are taken, from any thread.
    `cancel` gives the step up and tells the others at once.

    Args:
        averager: the owner of the step. It is not dropped before its step ends.
        thread: the thread in which the step runs.
        request: the step.
        deadline: wall-clock seconds at which the step's timeout is over.
        allow_retries: whether the step looks for another group after a failed round.
    """

    def __init__(
        self, averager: object, thread: LoopThread, request: StepRequest, *, deadline: float, allow_retries: bool
    ) -> None:
        super().__init__(thread)
        self._averager: object = averager
        self.add_done_callback(StepControl._let_go)  # type: ignore[arg-type]
        self._request, self._deadline, self._allow_retries = request, deadline, allow_retries

    def _let_go(self) -> None:
        """The step is over: an averager that keeps its last control is dropped with its last reference."""
        self._averager = None

    @property
    def stage(self) -> AveragingStage:
        """The stage of the step."""
        return AveragingStage.FINISHED if self.done() else self._request.stage

    @property
    def began_allreduce(self) -> bool:
        """Whether this peer's values were taken. From then on changes of the step are refused, unless it is retried."""
        return self._request.began

    @property
    def triggered(self) -> bool:
        """Whether averaging was allowed. Always true unless the step was begun with `require_trigger`."""
        return self._request.triggered

    def allow_allreduce(self) -> None:
        """Let the step look for a group and average. A second call has no effect."""
        self._thread.call_soon(self._request.allow_allreduce)

    @property
    def weight(self) -> float:
        """The weight of this peer's values. It can be set until they are taken.

        Raises:
            ConfigError: the new value is neither 0 nor a number from 1e-9 to 1e12.
            LocalError: the values were taken already.
        """
        return self._request.weight

    @weight.setter
    def weight(self, value: float) -> None:
        self._check_changeable("weight")
        self._request.weight = value

    @property
    def scheduled_time(self) -> float | None:
        """The time before which no search for a group begins, wall-clock seconds; None: at once.

        It can be set until there is a group. A running search is given up, and another one begins at the later time.

        Raises:
            ConfigError: the new value is not a time before the step's deadline.
            LocalError: there is a group already.
        """
        return self._request.scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, value: float | None) -> None:
        self._check_changeable("scheduled_time")
        check_schedule(value, self._deadline)
        self._request.scheduled_time = value
        self._thread.call_soon(self._request.changed)

    def _check_changeable(self, name: str) -> None:
        if self.done():
            raise LocalError(f"{name} cannot be changed any more: this step is over")

    @property
    def deadline(self) -> float:
        """The end of the step's timeout, wall-clock seconds. The step ends by then, or with its last round."""
        return self._deadline

    def get_timeout(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._deadline - time.time())

    @property
    def allow_retries(self) -> bool:
        """Whether the step looks for another group after a failed round."""
        return self._allow_retries


def check_schedule(scheduled_time: float | None, deadline: float) -> None:
    """Raise `ConfigError` for a step that would begin after its end."""
    if isinstance(scheduled_time, int | float) and scheduled_time >= deadline:
        raise ConfigError(
            f"scheduled_time={scheduled_time:.3f} must be before the step's end at {deadline:.3f}: "
            "give an earlier one, or a longer timeout"
        )
