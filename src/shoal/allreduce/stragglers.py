"""Who keeps a round waiting although it lives and moves bytes: the decider's view, from what the members hold. Pure.

Silence is not the matter here (see `commit.DeciderRules.tick`), but slowness: a member at 1% of its speed makes
progress all the time, and would hold the others up a hundredfold. The measure is the others. First the owners: one is
done when somebody else holds each of its parts. When all are, the receivers: one is done when it holds every part. Who
is not done when the median has been for as long as that needed, and a margin more, is late. So nobody is late who needs
no more than twice as long as the median.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["Stragglers"]


class Stragglers:
    """Tells who is late.

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
        """Who is late, in order.

        Args:
            owner: of each part.
            held: for each member, the parts that it holds.
            takers: the members that are to hold every part.
            now: time.
        """
        if self._owner != owner:
            self._owner, self._moved_at = list(owner), now  # whoever is waited for now gets the whole time again
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
