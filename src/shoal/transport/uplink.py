"""The line up of one peer, which all of its connections share.

Bulk data goes at a pace that leaves room for calls (`pacing`), and everything within the limit that the user sets
(`upload_limit`). Bytes are admitted before they are encrypted. What packets then take more (headers, acknowledgements,
handshakes, what is sent twice) is counted ten times a second, where the system tells it, and charged afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

from shoal.transport.pacing import LOOK_S, Flow, Pacing
from shoal.transport.upload_limit import UploadLimit

__all__ = ["Uplink"]

_REST_LOOKS = 10
"""After so many looks at which nothing was to be sent, nobody looks until there is something again."""


class Paced(Protocol):
    """A connection, as the line sees it."""

    bulk: bool

    def flow(self) -> Flow | None:
        """What the system knows of its way; None if it tells nothing."""

    def pace(self, bytes_per_s: float) -> None:
        """Send no faster than this."""

    def packet_bytes(self) -> int:
        """All bytes of all packets so far, of headers, acknowledgements and what was sent twice, too; 0 if unknown."""


class Uplink:
    """The line up of one peer. Loop only.

    Args:
        connections: those that are open now, to be looked at again and again; None looks at none, as where there is no
            system that tells anything.
        limit: on all that is sent; None for none.
    """

    def __init__(self, connections: Iterable[Paced] | None = None, limit: UploadLimit | None = None) -> None:
        self._connections, self._limit = connections, limit
        self._pacing = Pacing[Paced]()
        self._timer: asyncio.TimerHandle | None = None
        self._rested = 0
        self._packet_bytes: WeakKeyDictionary[Paced, int] = WeakKeyDictionary()  # at the last look
        self._unseen = 0  # admitted bytes, less those of all packets

    @property
    def bytes_per_s(self) -> float | None:
        """What the line carries, or the limit allows; None as long as the line was never full, and without a limit."""
        known = [self._limit.bytes_per_s] if self._limit is not None else []
        return min([*known, *filter(None, [self._pacing.line_bytes_per_s])], default=None)

    @property
    def limited(self) -> bool:
        """Whether there is a limit, so that nothing may be sent without `admit`."""
        return self._limit is not None

    def piece_bytes(self, most: int) -> int:
        """How much to send at once, `most` at most."""
        return most if self._limit is None else min(most, self._limit.piece_bytes)

    async def admit(self, nbytes: int, *, bulk: bool) -> None:
        """Wait until so many bytes may go; they count as sent.

        Args:
            nbytes: `piece_bytes` at most.
            bulk: they are bulk data, or belong to more than `SMALL_BYTES`.
        """
        if bulk or self._limit is not None:
            self._watch()
        if self._limit is not None:
            wait_s = self._limit.reserve(nbytes, asyncio.get_running_loop().time(), bulk=bulk)
            if wait_s > 0.0:
                await asyncio.sleep(wait_s)
            self._unseen += nbytes

    def _watch(self) -> None:
        self._rested = 0
        if self._timer is None and self._connections is not None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        flows = {each: flow for each in self._connections or () if each.bulk and (flow := each.flow()) is not None}
        for connection, rate in self._pacing.look(loop.time(), flows).items():
            connection.pace(rate)
        if self._limit is not None:
            self._count_packets(self._limit, loop.time())
        self._rested = 0 if any(flow.waits for flow in flows.values()) else self._rested + 1
        self._timer = None if self._rested >= _REST_LOOKS else loop.call_later(LOOK_S, self._look)

    def _count_packets(self, limit: UploadLimit, now: float) -> None:
        """Charge what packets took more than was admitted."""
        for connection in self._connections or ():
            total = connection.packet_bytes()
            self._unseen -= total - self._packet_bytes.get(connection, 0)
            self._packet_bytes[connection] = total
        if self._unseen < 0:
            limit.charge(-self._unseen, now)
            self._unseen = 0
