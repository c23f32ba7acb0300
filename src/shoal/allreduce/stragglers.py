"""Members that keep a round waiting although they live and move bytes, as the decider sees it. Pure.

This is about slowness, not silence (see `commit.DeciderRules.tick` for that): a member at 1% of its speed makes
progress all the time, and would make the round a hundred times as long. Members are compared with each other. First the
owners: an owner is done when another member holds each of its parts. When all owners are done, the receivers: a
receiver is done when it holds every part. The median takes some time to be done; a member that is not done after twice
that time and a margin is late. So no member is late that needs at most twice as long as the median.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["Stragglers"]


class Stragglers:
    """Finds the members that are late.

    Args:
        margin_s: how much longer than twice the median's time a member may take, seconds.
        now: when the round began.
    """

    def __init__(self, *, margin_s: float, now: float) -> None:
        self._margin_s, self._began, self._moved_at = margin_s, now, now
        self._owner: list[int] = []
        self._delivered_at: dict[int, float] = {}
        self._complete_at: dict[int, float] = {}

    def late(
        self, owner: Sequence[int], held: Sequence[Mapping[int, object]], takers: Collection[int], now: float
    ) -> list[int]:
        """The members that are late, in order.

        Args:
            owner: of each part.
            held: for each member, the parts that it holds.
            takers: the members that are to hold every part.
            now: time.
        """
        if self._owner != owner:
            self._owner, self._moved_at = list(owner), now  # members that others wait for now get the whole time again
        owners = set(owner)
        waiting = {of for part, of in enumerate(owner) if not any(part in held[each] for each in takers if each != of)}
        lacking = {each for each in takers if len(held[each]) < len(owner)}
        _note(self._delivered_at, owners - waiting, now)
        _note(self._complete_at, set(takers) - lacking, now)
        if waiting:
            return self._past_limit(waiting, self._delivered_at, len(owners), now)
        return self._past_limit(lacking, self._complete_at, len(takers), now)

    def _past_limit(self, waiting: Iterable[int], done_at: Mapping[int, float], count: int, now: float) -> list[int]:
        middle = (count - 1) // 2
        if len(done_at) <= middle:
            return []
        median = sorted(done_at.values())[middle]
        limit = max(median, self._moved_at) + (median - self._began) + self._margin_s
        return sorted(waiting) if now >= limit else []


def _note(done_at: dict[int, float], done: set[int], now: float) -> None:
    """Remember since when these are done; forget those that are not any more."""
    for member in set(done_at) - done:
        del done_at[member]
    for member in done:
        done_at.setdefault(member, now)
