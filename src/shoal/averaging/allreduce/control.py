"""The streams between the coordinator of a round and each other member: orders one way, reports the other.

They are those by which the group was formed. When one ends before the verdict, the coordinator leaves that member out;
a member that loses the coordinator asks the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from shoal.averaging.allreduce.commit import Order
from shoal.averaging.allreduce.farewell import OpenStreams
from shoal.averaging.group import ControlStream
from shoal.base.tasks import Tasks
from shoal.errors import PeerError, PeerProtocolError
from shoal.protocol.wire import Abort, Commit, Leave, Report

__all__ = ["Control"]


class Control:
    """One member's part of them.

    Args:
        streams: at the coordinator those to each other member, at another member the one to the coordinator.
        tasks: those that read and write.
        heard: called with the index of a member and what it says: an order of the coordinator, or a report to it.
            False if that has no place in this round.
        lied: called with a member that broke the protocol, and how.
        lost: called with a member that can no more be heard, and why.

    Attributes:
        open: the streams that have not ended.
    """

    def __init__(
        self,
        streams: Mapping[int, ControlStream],
        tasks: Tasks,
        *,
        heard: Callable[[int, Order | Report], bool],
        lied: Callable[[int, str], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self._streams, self._tasks = streams, tasks
        self._heard, self._lied, self._lost = heard, lied, lost
        self._to_say: dict[int, asyncio.Queue[Order | None]] = {member: asyncio.Queue() for member in streams}
        self.open = OpenStreams()

    @property
    def members(self) -> frozenset[int]:
        """The members at the other ends."""
        return frozenset(self._streams)

    # ------------------------------------------------------------------------------------------- at the coordinator

    def hear_members(self) -> None:
        """Begin to hear all members, and to tell them what `say` is given."""
        for member in self._streams:
            self.open.keep(member, self._tasks.spawn(self._hear_member(member)))
            self.open.keep(member, self._tasks.spawn(self._talk(member)))

    def say(self, member: int, order: Order) -> None:
        """Tell a member this, unless it has no stream; a verdict is the last word."""
        if member in self._to_say:
            self._to_say[member].put_nowait(order)
            if isinstance(order, Commit | Abort):
                self._to_say[member].put_nowait(None)

    async def _hear_member(self, member: int) -> None:
        stream, reason = self._streams[member], "it gave up"
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                if isinstance(message, Leave):
                    break
                if nbytes or not isinstance(message, Report) or not self._heard(member, message):
                    stream.abort()
                    reason = "a malformed report"
                    break
        except PeerError as error:
            reason = error.message  # any error: without its stream a member cannot report
        self._lost(member, reason)

    async def _talk(self, member: int) -> None:
        try:
            while (order := await self._to_say[member].get()) is not None:
                await self._streams[member].send(order)
            await self._streams[member].end()
        except PeerError as error:
            self._lost(member, error.message)

    # ------------------------------------------------------------------------------------------- at another member

    def hear_coordinator(self) -> None:
        """Begin to hear the coordinator."""
        for coordinator in self._streams:
            self.open.keep(coordinator, self._tasks.spawn(self._hear_coordinator(coordinator)))

    async def _hear_coordinator(self, coordinator: int) -> None:
        stream = self._streams[coordinator]
        try:
            while (received := await stream.recv()) is not None:
                message, nbytes = received
                if nbytes or not isinstance(message, Order) or not self._heard(coordinator, message):
                    stream.abort()
                    self._lied(coordinator, f"a {type(message).__name__} that has no place in this round")
                    break
        except PeerProtocolError as error:
            self._lied(coordinator, error.message)
        except PeerError:
            pass  # the coordinator is lost, for whatever reason
        self._lost(coordinator, "its control stream ended")

    async def report(self, report: Report) -> bool:
        """Tell the coordinator; False if it cannot be told any more."""
        for coordinator, stream in self._streams.items():
            try:
                await stream.send(report)
            except PeerError as error:
                self._lost(coordinator, error.message)
                return False
        return True

    async def say_no_more(self) -> None:
        """This member has reported all: end its stream in order."""
        for stream in self._streams.values():
            try:
                await stream.end()
            except PeerError:
                stream.abort()

    def abort(self) -> None:
        """Nothing is heard or said any more."""
        for stream in self._streams.values():
            stream.abort()
