"""The line up of one peer, which all of its connections share: bulk data goes at a pace that leaves room for calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from shoal.transport.pacing import LOOK_S, Flow, Pacing

__all__ = ["Uplink"]

_REST_LOOKS = 10
"""After so many looks at which nothing was to be sent, nobody looks until there is bulk data again."""


class Paced(Protocol):
    """A connection, as the line sees it."""

    bulk: bool

    def flow(self) -> Flow | None:
        """What the system knows of its way; None if it tells nothing."""

    def pace(self, bytes_per_s: float) -> None:
        """Send no faster than this."""


class Uplink:
    """The line up of one peer. Loop only.

    Args:
        connections: the connections that are open now; it is looked at again and again.
    """

    def __init__(self, connections: Iterable[Paced]) -> None:
        self._connections = connections
        self._pacing = Pacing[Paced]()
        self._timer: asyncio.TimerHandle | None = None
        self._rested = 0

    @property
    def bytes_per_s(self) -> float | None:
        """What the line carries, as far as it was full so far; None as long as it was not."""
        return self._pacing.line_bytes_per_s

    def bulk_begins(self) -> None:
        """Bulk data is about to be sent."""
        self._rested = 0
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        flows = {each: flow for each in self._connections if each.bulk and (flow := each.flow()) is not None}
        for connection, rate in self._pacing.look(loop.time(), flows).items():
            connection.pace(rate)
        self._rested = 0 if any(flow.waits for flow in flows.values()) else self._rested + 1
        self._timer = None if self._rested >= _REST_LOOKS else loop.call_later(LOOK_S, self._look)
