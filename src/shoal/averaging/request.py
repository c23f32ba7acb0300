"""One step of an averager: the request, which its owner may change until it is too late, and the result."""

from __future__ import annotations

import asyncio
import enum
import math
from numbers import Real
from typing import Any

import msgspec

from shoal.averaging.allreduce.interface import MAX_WEIGHT, MIN_WEIGHT, is_weight
from shoal.averaging.allreduce.round import Outcome
from shoal.base.clock import Clock, own_clock
from shoal.base.locks import SafeLock
from shoal.base.peer import PeerID
from shoal.base.tasks import Changes
from shoal.errors import ConfigError, LocalError, RoundFailed
from shoal.protocol.wire import encode_plain

__all__ = ["AveragingMode", "AveragingStage", "StepRequest", "StepResult"]

MAX_GATHERED_BYTES = 65536
"""The longest `gather` value of one member, packed."""


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


class StepRequest:
    """What one step is to do. Any thread may read it, and set `weight` and `scheduled_time`; the methods are loop only.

    Args:
        weight: the weight of this peer's values: 0, or from 1e-9 to 1e12.
        gather: a MessagePack value that all members get.
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
        self, *, weight: float = 1.0, gather: object = None, scheduled_time: float | None = None, triggered: bool = True
    ) -> None:
        self.stage = AveragingStage.IDLE
        self.grouped = self.began = False
        self._guard = SafeLock()  # a value that is set either counts or is refused
        self.weight, self.scheduled_time = weight, scheduled_time
        self.gathered = _pack(gather)
        self._triggered = triggered
        self._changes = Changes()

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
        self._changes.notify()

    def changed(self) -> None:
        """Tell that the scheduled time was changed."""
        self._changes.notify()

    def early_s(self, clock: Clock) -> float:
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
        while (early_s := self.early_s(clock)) > 0 or not self._triggered:
            self.stage = AveragingStage.IDLE if early_s > 0 else AveragingStage.AWAITING_TRIGGER
            if loop.time() >= deadline:
                if early_s > 0:
                    raise RoundFailed("the step's scheduled_time lies after its timeout")
                raise RoundFailed("allow_allreduce() was not called before the step's timeout")
            await self._changes.next(min(early_s or math.inf, deadline - loop.time()))

    async def wait_until_postponed(self, clock: Clock) -> None:
        """Wait until the scheduled time lies in the future."""
        while self.early_s(clock) == 0:
            await self._changes.next()

    def take_group(self, clock: Clock) -> bool:
        """Note that there is a group, unless the step is to begin later now; returns whether it is noted."""
        with self._guard:
            self.grouped = self.early_s(clock) == 0
        return self.grouped

    def take_values(self) -> None:
        """Note that the values are taken now."""
        with self._guard:
            self.began = True


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One round that succeeded.

    Attributes:
        gathered: the `gather` values of the members, in the group's order.
        outcome: group, contributors, verdict.
        round_id: names the round.
        duration_s: from the group to the verdict.
        shares: elements of the vector that each member owned.
        tile_bytes: upper bound on a tile, as encoded.
    """

    gathered: dict[PeerID, Any]
    outcome: Outcome
    round_id: bytes
    duration_s: float
    shares: tuple[int, ...] = ()
    tile_bytes: int = 0


def _finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _pack(gather: object) -> bytes:
    try:
        packed = encode_plain(gather)
    except ValueError as error:
        raise ConfigError(f"gather cannot be sent: {error}") from error
    if len(packed) > MAX_GATHERED_BYTES:
        raise ConfigError(f"gather takes {len(packed)} bytes, the most is {MAX_GATHERED_BYTES}")
    return packed
