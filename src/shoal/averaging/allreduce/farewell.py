"""The end of a round's streams: each side gives the others a moment to end them in order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from shoal.base.tasks import Changes

__all__ = ["OpenStreams"]


class OpenStreams:
    """The streams of one kind with each member that have not ended.

    Attributes:
        kept: the members that had not ended theirs when `farewell` stopped waiting.
    """

    def __init__(self) -> None:
        self.kept = frozenset[int]()
        self._open, self._one_ended = Counter[int](), Changes()

    def opened(self, member: int) -> None:
        """One more with this member is open."""
        self._open[member] += 1

    def ended(self, member: int) -> None:
        """One of those with this member is over."""
        self._open[member] -= 1
        if not self._open[member]:
            del self._open[member]
        self._one_ended.notify()

    def keep(self, member: int, task: asyncio.Task[None]) -> None:
        """One with this member is open until this task ends."""
        self.opened(member)
        task.add_done_callback(lambda _: self.ended(member))

    async def farewell(self, most_s: float, brief_s: Mapping[int, float]) -> None:
        """Wait for the others to end theirs.

        Args:
            most_s: no longer than so many seconds.
            brief_s: nobody waits longer than so many seconds for these members.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        briefs = {member: min(most_s, patience_s) for member, patience_s in brief_s.items()}
        for until_s in sorted({most_s, *briefs.values()}):
            others = {member for member, patience_s in briefs.items() if patience_s < until_s}
            while not self._open.keys() <= others and (left_s := began + until_s - loop.time()) > 0:
                await self._one_ended.next(left_s)
        self.kept = frozenset(self._open)

    async def one_ended(self) -> None:
        """Wait until the next one is over."""
        await self._one_ended.next()
