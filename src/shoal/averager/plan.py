"""One step of an averager: what it is to do, which its owner may change until the round begins, and what came of it."""

from __future__ import annotations

import asyncio
import enum
import math
from contextlib import suppress
from typing import Any

import msgspec

from shoal.allreduce.round import Outcome
from shoal.clock import Clock
from shoal.errors import ConfigError, RoundFailed
from shoal.peer import PeerID
from shoal.wire import decode_plain

__all__ = ["AveragingStage", "StepPlan", "StepResult"]

_MAX_GATHER_BYTES = 65536


class AveragingStage(enum.Enum):
    """Where a step stands. After a failed attempt it looks for a group again."""

    IDLE = "idle"
    AWAITING_TRIGGER = "awaiting trigger"
    LOOKING_FOR_GROUP = "looking for group"
    RUNNING_ALLREDUCE = "running allreduce"
    FINISHED = "finished"


class StepPlan:
    """What one step is to do. Reading, `weight` and `scheduled_time` are for any thread; what notifies is loop only.

    Args:
        weight: of this peer's values: finite, 0 or more.
        gather: a MessagePack value that all members get.
        scheduled_time: no search for a group before this, wall-clock seconds; None: at once.
        triggered: False: no search for a group before `allow_allreduce`.

    Attributes:
        stage: where the step stands.
        began: whether values were copied in: from then on a change of the plan has no effect.

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
        self.stage, self.began = AveragingStage.IDLE, False
        self.weight, self.scheduled_time = weight, scheduled_time
        self.gathered = _pack(gather)
        self._changed = asyncio.Event()
        self._trigger = asyncio.Event()
        if triggered:
            self._trigger.set()

    @property
    def weight(self) -> float:
        """Of this peer's values."""
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        if not _finite(value) or value < 0:
            raise ConfigError(f"weight must be a finite number of at least 0, got {value!r}")
        self._weight = float(value)

    @property
    def scheduled_time(self) -> float | None:
        """No search for a group before this, wall-clock seconds."""
        return self._scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, value: float | None) -> None:
        if value is not None and not _finite(value):
            raise ConfigError(f"scheduled_time must be a time in seconds, as time.time() gives, got {value!r}")
        self._scheduled_time = None if value is None else float(value)

    @property
    def triggered(self) -> bool:
        """Whether a group may be looked for."""
        return self._trigger.is_set()

    def allow_allreduce(self) -> None:
        """Let a group be looked for, and the values be averaged."""
        self._trigger.set()

    def changed(self) -> None:
        """The scheduled time is another one."""
        self._changed.set()

    async def wait_until_ready(self, clock: Clock, deadline: float) -> None:
        """Wait for the scheduled time and the trigger. No group waits with us: one is found in milliseconds.

        Args:
            clock: tells wall-clock time.
            deadline: of the step, loop time.

        Raises:
            RoundFailed: the deadline came first.
        """
        loop = asyncio.get_running_loop()
        while self.scheduled_time is not None and (left_s := self.scheduled_time - clock.time()) > 0:
            if loop.time() >= deadline:
                raise RoundFailed("the step's scheduled_time lies after its timeout")
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, deadline - loop.time())):
                    await self._changed.wait()
        if not self.triggered:
            self.stage = AveragingStage.AWAITING_TRIGGER
            try:
                async with asyncio.timeout_at(deadline):
                    await self._trigger.wait()
            except TimeoutError:
                raise RoundFailed("allow_allreduce() was not called before the step's timeout") from None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One round that succeeded.

    Attributes:
        gathered: what each member gave, in the group's order.
        outcome: group, contributors, verdict.
        round_id: names the round.
        duration_s: from the group to the verdict.
    """

    gathered: dict[PeerID, Any]
    outcome: Outcome
    round_id: bytes
    duration_s: float


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pack(gather: object) -> bytes:
    try:
        packed = msgspec.msgpack.encode(gather)
        decode_plain(packed)  # what the others could not read is the caller's mistake, and said here
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"gather cannot be sent: {error} (use numbers, text, bytes, lists and dictionaries)"
        ) from error
    if len(packed) > _MAX_GATHER_BYTES:
        raise ConfigError(f"gather takes {len(packed)} bytes, the most is {_MAX_GATHER_BYTES}")
    return packed
