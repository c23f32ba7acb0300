"""How often others may have the state copied: a copy costs time, and hosts have accounts of it. Bookkeeping.

Keys are free, so the host counts, with all its peers together. Copying for one host that does not download takes a
tenth of the time at most, for all hosts a quarter; beside that, a few seconds of it are free. A host that is sent the
copy gets back what it cost: half of the state pays for half of a copy. So whoever downloads is never limited here.

Time is counted, not copies: where a state is small, or the machine is fast, newcomers of one host never notice the
limit. Whoever may not have a new copy is given the last one, if that will do, or is asked to come again.
"""

from __future__ import annotations

__all__ = ["CopyAccounts"]

_HOST_SHARE, _SHARE = 0.1, 0.25
"""Of the time: for copies that one host causes, and that all cause."""

_HOST_BURST_S, _BURST_S = 5.0, 10.0
"""So much copying is free after a calm."""

_LEAST_COST_S = 0.05
"""A copy costs so much at least: its owner's lock is taken for it."""


class _Account:
    """Of seconds of copying: what is left, and since when."""

    def __init__(self, share: float, most_s: float, now: float) -> None:
        self._share, self._most_s = share, most_s
        self._left_s, self._at = most_s, now

    def left_s(self, now: float) -> float:
        return min(self._most_s, self._left_s + (now - self._at) * self._share)

    def add(self, seconds: float, now: float) -> None:
        self._left_s, self._at = min(self._most_s, self.left_s(now) + seconds), now

    def is_full(self, now: float) -> bool:
        return self.left_s(now) >= self._most_s


class CopyAccounts:
    """The accounts of all hosts, for one state.

    Args:
        now: local time, seconds.
    """

    def __init__(self, now: float) -> None:
        self._all = _Account(_SHARE, _BURST_S, now)
        self._hosts: dict[str, _Account] = {}

    def allow(self, host: str, now: float) -> bool:
        """Whether this host may have the state copied now."""
        own = self._hosts.get(host)
        return self._all.left_s(now) >= 0.0 and (own is None or own.left_s(now) >= 0.0)

    def copied(self, host: str, took_s: float, now: float) -> None:
        """A copy was made as this host asked for it; it took so long."""
        self._add(host, -max(took_s, _LEAST_COST_S), now)

    def sent(self, host: str, took_s: float, share: float, now: float) -> None:
        """This host was sent this share of a copy that had taken so long."""
        self._add(host, share * max(took_s, _LEAST_COST_S), now)

    def _add(self, host: str, seconds: float, now: float) -> None:
        for each in [each for each, account in self._hosts.items() if account.is_full(now)]:
            del self._hosts[each]
        own = self._hosts.setdefault(host, _Account(_HOST_SHARE, _HOST_BURST_S, now))
        for account in (own, self._all):
            account.add(seconds, now)
