"""How much one host may ask of us: calls cost, and a host that has spent too much is not read for a while.

This is pure bookkeeping. Keys are free, so a host counts with all its peers and links; so does a site of many hosts,
such as the 64 bits of an IPv6 network (`peer.site_of`). Honest peers stay far below the limit: the
messages of 1,000 others take 2% of a core, some 200 calls a second. TCP holds back data that is not read.

All hosts together have a limit, too. Only while they are over it does each get no more than its share: in a swarm of
hundreds a few peers say much of others for a while (the keepers of a count), and most say little.

An honest peer may share a host with one that floods: behind one router, or on one machine. So each link has an equal
share of the host's rate, and while the host is over its limit, only links that are over their own share are not read. A
new link begins with nothing: with ever new links a host gets no more than its rate.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from shoal.base.peer import site_of

__all__ = ["Allowance", "Allowances", "call_cost", "reply_cost", "stream_cost"]

_BURST_S = 4.0
"""A host may spend the allowance of this time at once."""

_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
"""The pause in which a link is not read. Each reading disturbs the trainer, so pauses are not shorter. In longer ones
the link would seem dead."""

_BYTES_PER_CALL = 256
"""So many bytes of a message cost as much as a small call; so do those of a reply beyond `_FREE_REPLY_BYTES`."""

_BYTES_PER_STREAM = 2048
"""So many bytes of the message that opens a stream cost as much as a small call. All members of a group open one to its
leader at the same time, and they may share an address: a hundred of them twice a second stay within the limit."""

_FREE_REPLY_BYTES = 64 << 10
"""These bytes of a reply cost nothing. They hold the entries of a hundred peers under one key of the DHT, which many
peers behind one address read again and again."""


_LEAST_CALLS_S = 10.0
"""A host may ask for so many small calls a second, however many others ask."""

_SWEEP_S = 1.0
"""The allowances of sites without links are looked through this often at most."""


def call_cost(nbytes: int) -> float:
    """The cost of a message of so many bytes, in small calls."""
    return 1.0 + nbytes / _BYTES_PER_CALL


def reply_cost(nbytes: int) -> float:
    """The cost of a reply of so many bytes, beside that of the message that asked for it."""
    return max(0, nbytes - _FREE_REPLY_BYTES) / _BYTES_PER_CALL


def stream_cost(nbytes: int) -> float:
    """The cost of a stream that a message of so many bytes opens, in small calls."""
    return 1.0 + nbytes / _BYTES_PER_STREAM


class _Account:
    """How many small calls are left, and the time for which this was computed."""

    def __init__(self, left: float, now: float) -> None:
        self.left, self.at = left, now

    def spend(self, cost: float, rate: float, now: float) -> None:
        # A debt is bounded as a pause is: when the flood has ended, those that took part in it go on soon.
        self.left = max(min(rate * _BURST_S, self.left + (now - self.at) * rate) - cost, -rate * _LONGEST_PAUSE_S)
        self.at = now


class Allowance:
    """The allowance of one host.

    Args:
        rate: small calls a second that the host may go on asking for.
        now: local time, seconds.
    """

    def __init__(self, rate: float, now: float) -> None:
        self._all = _Account(rate * _BURST_S, now)
        self._links: dict[Hashable, _Account] = {}

    def add(self, link: Hashable, now: float) -> None:
        """A link shares the allowance from now on."""
        self._links[link] = _Account(0.0, now)

    def remove(self, link: Hashable) -> None:
        """A link is gone."""
        self._links.pop(link, None)

    def is_unused(self, now: float) -> bool:
        """Whether no link shares this allowance, and a new one would have no more in it."""
        return not self._links and now - self._all.at > 2 * _BURST_S

    def spend(self, link: Hashable, cost: float, rate: float, now: float) -> float:
        """Count a message, and return how long nothing more is to be read from its link, seconds.

        Args:
            link: the link on which the message came.
            cost: the message's, in small calls.
            rate: the host's present rate, calls a second.
            now: local time, seconds.
        """
        own = self._links.get(link)
        self._all.spend(cost, rate, now)
        if own is not None:
            own.spend(cost, rate / len(self._links), now)
        if self._all.left >= 0.0 or (own is not None and own.left >= 0.0):
            return 0.0
        return min(max(-self._all.left / rate, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)


class Allowances:
    """The allowances of all hosts, and of all together. Hosts of one site share one.

    Args:
        per_host_s: small calls a second that one host may go on asking for.
        all_s: small calls a second of all hosts; beyond it each gets its share.
    """

    def __init__(self, per_host_s: float, all_s: float) -> None:
        self._per_host_s, self._all_s = per_host_s, all_s
        self._sites: dict[str, Allowance] = {}
        self._all = _Account(0.0, -math.inf)
        self._swept_at = -math.inf

    def add(self, host: str, link: Hashable, now: float) -> None:
        """There is a link with this host from now on."""
        self._of(site_of(host), now).add(link, now)

    def remove(self, host: str, link: Hashable) -> None:
        """A link is gone."""
        self._sites[site_of(host)].remove(link)

    def spend(self, host: str, link: Hashable, cost: float, now: float) -> float:
        """Count a message, and return how long nothing more is to be read from its link, seconds.

        Args:
            host: that has sent it.
            link: the link with its peer; None without one.
            cost: the message's, in small calls.
            now: local time, seconds.
        """
        rate = self._per_host_s
        self._all.spend(cost, self._all_s, now)
        if self._all.left < 0.0:
            rate = min(rate, max(self._all_s / max(1, len(self._sites)), _LEAST_CALLS_S))
        return self._of(site_of(host), now).spend(link, cost, rate, now)

    def _of(self, site: str, now: float) -> Allowance:
        """The allowance of a site. It is kept for a while after the last link, or a new link would bring a new one."""
        if now >= self._swept_at + _SWEEP_S:  # the leader of a large group gets a thousand links within a second
            self._swept_at = now
            for each in [each for each, allowance in self._sites.items() if allowance.is_unused(now)]:
                del self._sites[each]
        if (allowance := self._sites.get(site)) is None:
            allowance = self._sites[site] = Allowance(self._per_host_s, now)
        return allowance
