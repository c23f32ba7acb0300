"""The fetch of a better state, beside the trainer's batches, and how long the trainer stands still for it.

Parameters may be changed only while the trainer stands still. So a fetch that has something to take over says so
(`parked`), and the trainer stops at its next step until the fetch is over. Before that it waits as long as its patience
lasts, and goes on with its own state when that is used up. A newcomer that may not begin yet (see `beginning`) has no
state to go on with, and uses up no patience. Loop only.

A claim of a better state costs nothing, and nobody can tell beforehand whether the state will be given. So the time of
all such waits is bounded together, under however many keys: `_LIMIT_S` in all, less than 4% of the time in the long
run. If a state was taken over, its wait does not count. When the time is used up, the trainer goes on with its own
state. Meanwhile the better one is fetched, and it is taken over when it is here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from shoal.base.ledger import Budget
from shoal.base.tasks import Changes
from shoal.errors import ShoalError
from shoal.run.view.progress import SwarmView

__all__ = ["Fetching", "Patience"]

_FIRST_PAUSE_S, _PAUSE_S = 1.0, 5.0
"""After a fetch that failed, while the trainer goes on: the first one since one did not, and the others. A peer that
has just woken finds its connections lost: a second later it has new ones."""

_LOOK_AGAIN_S = 1.0

_LIMIT_S = 20.0
_REGAINED_S = 600.0
"""All of it comes back in this time."""

_USED_UP_S, _ENOUGH_S = 0.01, _LIMIT_S / 2
"""A peer that has waited in vain waits again only when it has this much time: not for a moment at each step."""


class Patience:
    """The budget of the time that a trainer stands still for states that others only claim. Pure."""

    def __init__(self) -> None:
        self._used_up = False
        self.rewarded()

    def left_s(self, now: float) -> float:
        """The seconds that may be waited now (`now`: local time, seconds); 0 for not at all."""
        left_s = self._budget.left_s(now)
        return 0.0 if self._used_up and left_s < _ENOUGH_S else left_s

    def waited(self, seconds: float, since: float) -> None:
        """The trainer waited in vain for these seconds, from `since` on (local time, seconds)."""
        recovers = self._used_up and self._budget.left_s(since) < _ENOUGH_S
        self._budget.pay(seconds, since + seconds)
        self._used_up = recovers or self._budget.left_s(since + seconds) < _USED_UP_S

    def rewarded(self) -> None:
        """A state was taken over."""
        self._budget, self._used_up = Budget(_LIMIT_S, _LIMIT_S / _REGAINED_S), False


class Fetching:
    """At most one fetch at a time.

    Args:
        fetch: takes over the best state; told how long that may take, seconds. Returns whether it took over anything:
            the trainer may have come further meanwhile.
        news: told when it is time to look again.
        on_failure: told what went wrong while nobody waited, unless it was the others' fault.
    """

    def __init__(
        self,
        fetch: Callable[[float], Coroutine[Any, Any, bool]],
        news: Changes,
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._fetch, self._news, self._on_failure = fetch, news, on_failure
        self._patience = {True: Patience(), False: Patience()}  # for claims of contributors, and of others
        self._task: asyncio.Task[bool] | None = None
        self._vouched = False  # whether contributors claimed the state that is fetched
        self._has_news = False
        self._parked = asyncio.Event()
        self._again_at, self._pause_s = float("-inf"), _FIRST_PAUSE_S
        self._idle_since: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the trainer stands still now."""
        return self._parked.is_set()

    @property
    def has_news(self) -> bool:
        """Whether there is something to take over, as soon as the trainer stands still."""
        return self._has_news

    def waits(self, view: SwarmView, now: float) -> bool:
        """Whether the trainer is to stand still, for a better state or to take it over."""
        return self._has_news or self._patience[view.vouched].left_s(now) > 0

    def observe(self, view: SwarmView, timeout_s: float | None, now: float) -> None:
        """Take in a view of the swarm.

        Args:
            view: as others claim it.
            timeout_s: for a fetch that begins now, though nobody waits for it, seconds; None: none is to begin.
            now: local time, seconds.
        """
        self._prefer(view)
        if timeout_s is not None and self._task is None and now >= self._again_at:
            self._begin(view, timeout_s)

    def idles(self, view: SwarmView, now: float, *, idle: bool) -> None:
        """Let patience be used up while the trainer goes on, but takes part in nothing.

        Args:
            view: as others claim it.
            now: local time, seconds.
            idle: whether it is so.
        """
        if idle and self._idle_since is not None:
            self._patience[view.vouched].waited(now - self._idle_since, self._idle_since)
        self._idle_since = now if idle else None

    def _prefer(self, view: SwarmView) -> None:
        """A contributor's state is fetched in place of one that others only claim."""
        if self._task is not None and view.vouched and not self._vouched and not self._has_news:
            self._task.cancel()
            self._task = None

    def _begin(self, view: SwarmView, timeout_s: float) -> asyncio.Task[bool]:
        self._vouched = view.vouched
        self._task = task = asyncio.get_running_loop().create_task(self._fetch(timeout_s))
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[bool]) -> None:
        if self._task is task:
            self._task, self._has_news = None, False
            if task.cancelled() or task.exception() is not None:  # else the others may have gone on meanwhile
                self._again_at, self._pause_s = asyncio.get_running_loop().time() + self._pause_s, _PAUSE_S
            else:
                self._pause_s = _FIRST_PAUSE_S
        if not task.cancelled():
            if (error := task.exception()) is None:
                if task.result():
                    self._patience[self._vouched].rewarded()
            elif not self.holds and not isinstance(error, ShoalError):
                self._on_failure(error)
        self._news.notify()

    def again(self) -> None:
        """The reason why a fetch failed is gone: the next one may begin at once."""
        self._again_at, self._pause_s = -math.inf, _FIRST_PAUSE_S
        for patience in self._patience.values():
            patience.rewarded()
        self._news.notify()

    async def parked(self) -> None:
        """There is something to take over: return when the trainer stands still. It does until the fetch is over."""
        self._has_news = True
        self._news.notify()
        await self._parked.wait()

    async def wait(self, view: SwarmView, timeout_s: float, *, patient: Callable[[], bool]) -> bool:
        """Stand still until the fetch is over (trainer). False if it took nothing over, or the trainer goes on before.

        Args:
            view: the swarm as it is now.
            timeout_s: for a fetch that begins now.
            patient: whether the trainer waits for all this time. It is asked every second. While it says so, no
                patience is used up.

        Raises:
            StateUnavailable: it failed; nothing was changed.
        """
        loop = asyncio.get_running_loop()
        self._prefer(view)
        task, began = self._task or self._begin(view, timeout_s), loop.time()
        patience, in_vain_s = self._patience[view.vouched], 0.0
        most_s = patience.left_s(began)
        self._parked.set()
        try:
            while not (task.done() or self._has_news):
                now, waits = loop.time(), patient()
                left_s = timeout_s - (now - began) if waits else most_s - in_vain_s
                if left_s < _USED_UP_S:
                    break
                await asyncio.wait({task}, timeout=min(left_s, _LOOK_AGAIN_S))
                in_vain_s += 0.0 if waits else loop.time() - now
            if self._has_news:
                await asyncio.wait({task})
        except asyncio.CancelledError:
            if self._has_news:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._parked.clear()
        over = task.done() and not task.cancelled()
        if not over or task.exception() is not None or not task.result():
            patience.waited(in_vain_s, began)
        return over and task.result()

    async def close(self) -> None:
        """Fetch nothing any more. Safe to call twice."""
        if self._task is not None:
            task = self._task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
