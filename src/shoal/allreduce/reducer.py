"""The senders that the owner of a slice waits for. Bookkeeping only: the numbers are added elsewhere.

Senders do not move in lock step: a fast sender may be many parts ahead, a slow one delays only the parts that it still
owes. A sender is left out of parts that are not done yet

- when it is lost (`exclude`);
- when it was *silent*: no byte for `silence_s` while it owes something;
- when it is *far behind*: the median of the other senders passed its place longer ago than `silence_s` plus the time
  that the median needed to get there. So it would need more than twice as long as the others, plus `silence_s`. With
  two other senders the median is the slower one, so that three senders of which two are slow go on together. Its
  contributions to parts that are done stay. A part is ready when the owner waits for no more senders.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

__all__ = ["ReducerRules"]

Work = tuple[int, int]
"""(part, attempt)."""


class ReducerRules:
    """The contributions that an owner of parts has got and still waits for.

    Args:
        me: index of the owner in its group; its own contribution is counted like the others'.
        members: indices of all members that contribute; the owner is among them unless it is an auxiliary member.
        silence_s: see the module.
        now: time at the beginning.
    """

    def __init__(self, me: int, members: Iterable[int], *, silence_s: float, now: float) -> None:
        self.me, self.silence_s, self._start = me, silence_s, now
        self.senders = set(members)
        self.excluded: set[int] = set()
        self._waiting: dict[Work, set[int]] = {}
        self.contributors: dict[Work, set[int]] = {}
        self._others: dict[Work, int] = {}
        self._heard = dict.fromkeys(self.senders, now)
        self._delivered = {sender: array("d") for sender in self.senders}  # when: its 1st, 2nd, 3rd … contribution

    def begin(self, now: float) -> None:
        """Nobody was silent or behind before this moment."""
        self._start = now
        for sender in self._heard:
            self._heard[sender] = now

    def own(self, part: int, attempt: int, now: float) -> list[Work]:
        """Start to collect contributions for a part. Older attempts of it are forgotten."""
        for work in [old for old in self._waiting if old[0] == part]:
            del self._waiting[work]
        work = (part, attempt)
        self._waiting[work] = self.senders - self.excluded
        self.contributors[work] = set()
        self._others[work] = 0
        for sender in self._heard:
            self._heard[sender] = now
        return self._ready([work])

    def expects(self, part: int, attempt: int, sender: int) -> bool:
        """Return whether a contribution of this sender to this part would still count."""
        return sender in self._waiting.get((part, attempt), ())

    def heard(self, sender: int, now: float) -> None:
        """Bytes came from this sender."""
        self._heard[sender] = now

    def contributed(self, part: int, attempt: int, sender: int, *, counts: bool, now: float) -> list[Work]:
        """A contribution is complete and added (`counts`: its weight is above 0). Returns the parts that are ready."""
        work = (part, attempt)
        if not self.expects(part, attempt, sender):
            return []
        self._waiting[work].discard(sender)
        if counts:
            self.contributors[work].add(sender)
        self._others[work] += sender != self.me
        self._heard[sender] = now
        self._delivered[sender].append(now)
        return self._ready([work])

    def exclude(self, sender: int) -> list[Work]:
        """Wait for this sender no longer. Returns the parts that are ready now."""
        if sender in self.excluded or sender == self.me:
            return []
        self.excluded.add(sender)
        for waiting in self._waiting.values():
            waiting.discard(sender)
        return self._ready(list(self._waiting))

    def cut_off(self, part: int, attempt: int) -> bool:
        """Return whether a member that should contribute to this part, even with weight 0, is missing in it."""
        return self._others[part, attempt] < len(self.senders - {self.me})

    def deadline(self) -> float | None:
        """Return when `stalled` should be asked next."""
        return min(self._limits().values(), default=None)

    def stalled(self, now: float) -> list[int]:
        """Senders to leave out: silent, or far behind the others."""
        return [sender for sender, limit in self._limits().items() if now >= limit]

    def _limits(self) -> dict[int, float]:
        """For each sender that owes something, the time until which the owner waits if nothing more comes from it."""
        owing = sorted(set().union(*self._waiting.values()) - {self.me}) if self._waiting else []
        passed = {place: self._passed(place) for place in {len(self._delivered[sender]) for sender in owing}}
        limits = {}
        for sender in owing:
            silent = self._heard[sender] + self.silence_s
            at = passed[len(self._delivered[sender])]
            limits[sender] = silent if at is None else min(silent, at + (at - self._start) + self.silence_s)
        return limits

    def _passed(self, place: int) -> float | None:
        """Return when the median of the other senders passed this place; None if it has not."""
        senders = self.senders - self.excluded - {self.me}
        others = len(senders) - 1
        needed = others - (others - 1) // 2
        times = sorted(times[place] for sender in senders if len(times := self._delivered[sender]) > place)
        return times[needed - 1] if 0 < needed <= len(times) else None

    def _ready(self, works: Iterable[Work]) -> list[Work]:
        ready = [work for work in works if not self._waiting[work]]
        for work in ready:
            del self._waiting[work]
        return ready
