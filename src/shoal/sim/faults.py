"""Faults and their times, as values: plans that can be generated, printed, shrunk and played again.

A plan says at which virtual time which host crashes, vanishes, stalls, gets slow or is cut off, and when it comes back.
Every plan can be played on every swarm that has its hosts. A fault that is impossible at its time (a crash of a host
that is down, a restart of one that is alive) is skipped. The repr of a plan is Python code that makes it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from shoal.errors import ClosedError, ConfigError, PeerError
from shoal.sim.swarm import Swarm

__all__ = [
    "Crash",
    "Fault",
    "FaultPlan",
    "HostFault",
    "Partition",
    "Restart",
    "Slow",
    "SlowLink",
    "Stall",
    "Throttle",
    "Vanish",
]

_WAKE_S = 0.01


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all faults.

    Attributes:
        at_s: the time of the fault, in virtual seconds after the plan began to play.

    Raises:
        ConfigError: a time, a duration or a factor is out of its range.
    """

    at_s: float

    def __post_init__(self) -> None:
        for name in ("at_s", "duration_s", "factor"):
            value = getattr(self, name, 1.0)
            if not 0 <= value < math.inf or (name == "factor" and value == 0):
                raise ConfigError(f"{name} of {type(self).__name__} must be a positive number, got {value}")

    @property
    def end_s(self) -> float:
        """The time at which the fault is over, virtual seconds after the plan began."""
        return self.at_s + float(getattr(self, "duration_s", 0.0))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that the fault names."""
        return (self.host,) if isinstance(self, HostFault) else ()

    def actions(self, swarm: Swarm[Any]) -> Sequence[tuple[float, Callable[[], None]]]:
        """The actions of this fault, each with virtual seconds since the plan began. Programs can override this."""
        raise ConfigError(f"unknown fault {self!r}: a kind of its own overrides actions()")


class HostFault(Fault, frozen=True, kw_only=True):
    """Base of the faults of one host."""

    host: str


class Crash(HostFault, frozen=True, kw_only=True):
    """The process is killed, and the others' connections to it break."""


class Vanish(HostFault, frozen=True, kw_only=True):
    """The machine is gone; the others hear nothing."""


class Restart(HostFault, frozen=True, kw_only=True):
    """A host that is down is started again."""


class Stall(HostFault, frozen=True, kw_only=True):
    """The process stands still for `duration_s`."""

    duration_s: float


class Slow(HostFault, frozen=True, kw_only=True):
    """The host's network is slower by `factor` for `duration_s`."""

    factor: float
    duration_s: float


class SlowLink(Fault, frozen=True, kw_only=True):
    """For `duration_s` the latency between two hosts is longer by `factor`, and each pipe there has a lower rate."""

    between: tuple[str, str]
    factor: float
    bandwidth_bytes_s: float
    duration_s: float

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.between


class Throttle(HostFault, frozen=True, kw_only=True):
    """For `duration_s` the process gets a moment of computing every `period_s`, and stands still in between.

    With a period of a second it looks from outside like a machine at 1% of its speed: it does everything, late.
    """

    duration_s: float
    period_s: float = 1.0


class Partition(Fault, frozen=True, kw_only=True):
    """Silence between `groups` for `duration_s`; hosts that no group names form one more."""

    groups: tuple[tuple[str, ...], ...]
    duration_s: float

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)


class FaultPlan(msgspec.Struct, frozen=True):
    """Faults, in any order.

    Attributes:
        events: the faults.
    """

    events: tuple[Fault, ...] = ()

    @property
    def end_s(self) -> float:
        """The time at which the last fault is over, virtual seconds after the plan began. Restarts may take longer."""
        return max((event.end_s for event in self.events), default=0.0)

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts that the plan names."""
        return tuple(dict.fromkeys(name for event in self.events for name in event.hosts))

    async def play(self, swarm: Swarm[Any]) -> Sequence[tuple[Restart, PeerError]]:
        """Play the plan from now on; returns when all is over and every restarted peer has started or given up.

        Returns:
            The restarts whose peer could not start because of other peers (perhaps a partition), each with the reason.

        Raises:
            ConfigError: the swarm has no such host.
            BaseException: any other error of a restarted peer's factory.
        """
        for name in self.hosts:
            swarm.host(name)
        return await _Player(swarm).play(self)


class _Player:
    """Plays one plan on one swarm. If two slow-downs or partitions overlap, the later one holds, to its own end."""

    def __init__(self, swarm: Swarm[Any]) -> None:
        self._swarm = swarm
        self._slow: dict[str, Slow] = {}
        self._partition: Partition | None = None
        self._restarts: list[asyncio.Task[tuple[Restart, PeerError] | None]] = []

    async def play(self, plan: FaultPlan) -> Sequence[tuple[Restart, PeerError]]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        timeline: list[tuple[float, int, Callable[[], None]]] = []
        for event in plan.events:
            for at_s, action in self._actions(event):
                timeline.append((at_s, len(timeline), action))
        try:
            for at_s, _, action in sorted(timeline, key=lambda entry: entry[:2]):
                await asyncio.sleep(max(0.0, start + at_s - loop.time()))
                action()
            failed = await asyncio.gather(*self._restarts)
        finally:
            for task in self._restarts:
                task.cancel()
        return [failure for failure in failed if failure is not None]

    def _actions(self, event: Fault) -> list[tuple[float, Callable[[], None]]]:
        swarm = self._swarm
        match event:
            case Crash(host=host) | Vanish(host=host):
                end = swarm.crash if isinstance(event, Crash) else swarm.vanish
                return [(event.at_s, lambda: end(host))]
            case Restart():
                return [(event.at_s, lambda: self._begin_restart(event))]
            case Stall(host=host, duration_s=duration_s):
                return [(event.at_s, lambda: swarm.stall(host, duration_s))]
            case Slow():
                return [(event.at_s, lambda: self._begin_slow(event)), (event.end_s, lambda: self._end_slow(event))]
            case SlowLink():
                return self._slow_link(event)
            case Throttle(host=host, period_s=period_s):
                count = math.ceil(event.duration_s / period_s)
                stand_still = partial(swarm.stall, host, max(0.0, period_s - _WAKE_S))
                return [(event.at_s + turn * period_s, stand_still) for turn in range(count)]
            case Partition():
                return [
                    (event.at_s, lambda: self._begin_partition(event)),
                    (event.end_s, lambda: self._end_partition(event)),
                ]
        return list(event.actions(swarm))

    def _slow_link(self, event: SlowLink) -> list[tuple[float, Callable[[], None]]]:
        network, (a, b) = self._swarm.network, event.between
        before = network.link(a, b)
        begin = partial(
            network.set_link, a, b, latency_s=before.latency_s * event.factor, bandwidth_bytes_s=event.bandwidth_bytes_s
        )
        end = partial(network.set_link, a, b, latency_s=before.latency_s, bandwidth_bytes_s=math.inf)
        return [(event.at_s, begin), (event.end_s, end)]

    def _begin_slow(self, event: Slow) -> None:
        self._slow[event.host] = event
        self._swarm.slow(event.host, event.factor)

    def _end_slow(self, event: Slow) -> None:
        if self._slow.get(event.host) is event:
            self._swarm.slow(event.host, 1.0)

    def _begin_partition(self, event: Partition) -> None:
        self._partition = event
        self._swarm.partition(event.groups)

    def _end_partition(self, event: Partition) -> None:
        if self._partition is event:
            self._swarm.heal()

    def _begin_restart(self, event: Restart) -> None:
        if not self._swarm.is_alive(event.host):
            self._restarts.append(asyncio.create_task(self._restart(event)))

    async def _restart(self, event: Restart) -> tuple[Restart, PeerError] | None:
        # Within one instant another restart of this host may have come first.
        if self._swarm.is_alive(event.host):
            return None
        try:
            await self._swarm.restart(event.host)
        except ClosedError:
            return None  # the plan took it down again
        except PeerError as error:
            return event, error
        return None
