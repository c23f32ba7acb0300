"""One step of an averager: its plan, which its owner may change until it is too late, and its result."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Coroutine
from contextlib import suppress
from numbers import Real
from typing import Any

import msgspec

from shoal.allreduce.interface import MAX_WEIGHT, MIN_WEIGHT, is_weight
from shoal.allreduce.round import Outcome
from shoal.clock import Clock, own_clock
from shoal.errors import ConfigError, LocalError, RoundFailed
from shoal.locks import SafeLock
from shoal.matchmaking import Group
from shoal.peer import PeerID
from shoal.wire import encode_plain

__all__ = ["AveragingMode", "AveragingStage", "StepPlan", "StepResult"]

_MAX_GATHER_BYTES = 65536


class AveragingMode(enum.Enum):
    """How a peer takes part."""

    NODE = 0
    """Has values, and reduces those of others."""
    CLIENT = 1
    """Has values, and only dials."""
    AUX = 2
    """Has no values, and reduces those of others."""


class AveragingStage(enum.Enum):
    """The stages of a step. After a failed attempt it looks for a group again."""

    IDLE = "idle"
    AWAITING_TRIGGER = "awaiting trigger"
    LOOKING_FOR_GROUP = "looking for group"
    RUNNING_ALLREDUCE = "running allreduce"
    FINISHED = "finished"


class StepPlan:
    """The plan of one step. Any thread may read it, and set `weight` and `scheduled_time`; the methods are loop only.

    Args:
        weight: the weight of this peer's values: 0, or from 1e-9 to 1e12. gather: a MessagePack value that all members
        get.
        scheduled_time: no search for a group before this, wall-clock seconds; None: at once.
        triggered: False: no search for a group before `allow_allreduce`.

    Attributes:
        stage: the stage of the step.
        grouped: whether there is a group: too late for another `scheduled_time`, unless the step is retried.
        began: whether the values were taken: too late for another `weight`, unless the step is retried.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        *,
        weight: float = 1.0,
        gather: object = None,
        scheduled_time: float | None = None,
        triggered: bool = True,
    ) -> None:
        self.stage = AveragingStage.IDLE
        self.grouped = self.began = False
        self._guard = SafeLock()  # a value that is set either counts or is refused
        self.weight, self.scheduled_time = weight, scheduled_time
        self.gathered = _pack(gather)
        self._triggered = triggered
        self._changed = asyncio.Event()
        self._search: tuple[asyncio.Timeout, Clock] | None = None

    @property
    def weight(self) -> float:
        """The weight of this peer's values. Setting it raises `LocalError` once the values were taken."""
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        if not _finite(value) or not is_weight(value):
            raise ConfigError(f"weight must be 0, or a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, got {value!r}")
        with self._guard:
            if self.began:
                raise LocalError("weight cannot be changed any more: the values of this step were taken already")
            self._weight = float(value)

    @property
    def scheduled_time(self) -> float | None:
        """No search for a group before this, wall-clock seconds. Setting it raises `LocalError` once there is a group.

        Call `changed` afterwards: a search that goes on is given up for a later time.
        """
        return self._scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, value: float | None) -> None:
        if value is not None and not _finite(value):
            raise ConfigError(f"scheduled_time must be a time in seconds, as time.time() gives, got {value!r}")
        with self._guard:
            if self.grouped:
                raise LocalError("scheduled_time cannot be changed any more: this step has a group already")
            self._scheduled_time = None if value is None else float(value)

    @property
    def triggered(self) -> bool:
        """Whether a group may be looked for."""
        return self._triggered

    def allow_allreduce(self) -> None:
        """Let a group be looked for, and the values be averaged."""
        self._triggered = True
        self._changed.set()

    def changed(self) -> None:
        """Tell that the scheduled time was changed."""
        self._changed.set()
        if self._search is not None and self._early_s(self._search[1]) > 0:
            self._search[0].reschedule(asyncio.get_running_loop().time())
            self._search = None

    def _early_s(self, clock: Clock) -> float:
        """Seconds until the scheduled time; 0 from then on."""
        return 0.0 if self.scheduled_time is None else max(0.0, self.scheduled_time - own_clock(clock).time())

    async def wait_until_ready(self, clock: Clock, deadline: float) -> None:
        """Wait for the scheduled time and the trigger. No group waits with us: one is found in milliseconds.

        Args:
            clock: tells wall-clock time.
            deadline: the deadline of the step, loop time.

        Raises:
            RoundFailed: the deadline came first.
        """
        loop = asyncio.get_running_loop()
        self.grouped = self.began = False
        while (early_s := self._early_s(clock)) > 0 or not self._triggered:
            self.stage = AveragingStage.IDLE if early_s > 0 else AveragingStage.AWAITING_TRIGGER
            if loop.time() >= deadline:
                if early_s > 0:
                    raise RoundFailed("the step's scheduled_time lies after its timeout")
                raise RoundFailed("allow_allreduce() was not called before the step's timeout")
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(early_s or math.inf, deadline - loop.time())):
                    await self._changed.wait()

    async def find(self, search: Coroutine[Any, Any, Group], clock: Clock) -> Group | None:
        """The group that `search` finds; None if it was given up, because the step is to begin later now."""
        if self._early_s(clock) > 0:
            search.close()
            return None
        self.stage = AveragingStage.LOOKING_FOR_GROUP
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._search = scope, clock
                group = await search
        except TimeoutError:
            if not scope.expired():
                raise
            return None
        finally:
            self._search = None
        with self._guard:
            self.grouped = self._early_s(clock) == 0
        if not self.grouped:  # it was set in this moment
            group.release()
            return None
        self.stage = AveragingStage.RUNNING_ALLREDUCE
        return group

    def take_values(self) -> None:
        """Mark the values as taken now; returns the present weight."""
        with self._guard:
            self.began = True


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One round that succeeded.

    Attributes:
        gathered: the `gather` values of the members, in the group's order.
        outcome: group, contributors, verdict.
        round_id: names the round.
        duration_s: from the group to the verdict.
        slices: elements of the vector that each member owned.
        part_bytes: upper bound on a part, as encoded.
    """

    gathered: dict[PeerID, Any]
    outcome: Outcome
    round_id: bytes
    duration_s: float
    slices: tuple[int, ...] = ()
    part_bytes: int = 0


def _finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _pack(gather: object) -> bytes:
    try:
        packed = encode_plain(gather)
    except ValueError as error:
        raise ConfigError(f"gather cannot be sent: {error}") from error
    if len(packed) > _MAX_GATHER_BYTES:
        raise ConfigError(f"gather takes {len(packed)} bytes, the most is {_MAX_GATHER_BYTES}")
    return packed
