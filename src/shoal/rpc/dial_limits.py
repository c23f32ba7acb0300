"""How many dials are under way, and where: so that no message makes this peer knock at a stranger's door for long.

Messages name addresses: a leader those of its group, a DHT node those of its neighbours. Keys are free, so an address
in a message says nothing, signed or not: only a dial shows who is there. A *site* is a host, or where many hosts belong
to one owner all of these: the 64 bits of an IPv6 network, the last two labels of a name. It is *proved* once a peer has
proved its identity there (we dialed it, or it dialed us from there), or if the program itself named it. To other sites
few dials are under way at a time, with few addresses of each peer; and where several have failed, and none has
succeeded, the site is left alone for a while, then for longer. A proved site at which many dials fail one after another
is no longer proved.

Pure bookkeeping: `BoundedDials` waits and dials.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from shoal.base.bounded import put_last
from shoal.base.clock import seconds_text
from shoal.base.peer import Address, PeerID, site_of
from shoal.base.tasks import Changes
from shoal.errors import PeerError, PeerUnreachable
from shoal.transport.base import Connection, Transport

__all__ = ["BoundedDials", "DialLimits", "NotDialed"]

MOST_DIALS = 128
"""Dials that are under way at a time. More wait for their turn."""

MOST_UNPROVED, MOST_PER_UNPROVED_SITE, MOST_PER_SITE = 32, 4, 64
"""Of these to sites that are not proved, to one such site, and to one that is."""

ADDRESSES_TRIED = 2
"""At so many sites that are not proved a peer is dialed."""

FAILURES, FAILURES_WHERE_PROVED = 4, 32
"""After so many dials in a row that have failed, a site is left alone, or is no longer proved."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 960.0
"""It is left alone for so long, and at each further failure for twice as long.

Dials that were under way together fail together, where a machine stands still for a while: that is one failure more."""

_REMEMBERED = 4096


class NotDialed(PeerUnreachable):
    """The limits let us not dial at all: this says nothing about the peer, or the way to it."""


class _Site:
    """What is known of a site: failures since the last success, and from when until when it is left alone."""

    __slots__ = ("alone_from", "alone_until", "failures", "pause_s")

    def __init__(self) -> None:
        self.failures, self.alone_from, self.alone_until, self.pause_s = 0, -math.inf, 0.0, FIRST_PAUSE_S


class DialLimits:
    """Who may be dialed where, and now."""

    def __init__(self) -> None:
        self._proved: dict[str, None] = {}
        self._sites: dict[str, _Site] = {}
        self._under_way = Counter[str]()
        self._unproved = 0

    def is_proved(self, site: str) -> bool:
        """Whether a peer has proved itself at this site."""
        return site in self._proved

    def prove(self, site: str) -> None:
        """A peer has proved itself here, or the program has named it."""
        self._sites.pop(site, None)
        put_last(self._proved, site, None, _REMEMBERED)

    def left_alone_s(self, site: str, now: float) -> float:
        """How long this site is still left alone, seconds; 0 or less: it is not."""
        known = self._sites.get(site)
        return known.alone_until - now if known is not None and not self.is_proved(site) else 0.0

    def choose(self, addresses: Sequence[Address], now: float) -> list[Address]:
        """The addresses at which a peer is dialed: none if all their sites are left alone."""
        others = [site for site in dict.fromkeys(map(_site, addresses)) if not self.is_proved(site)]
        tried = [site for site in others if self.left_alone_s(site, now) <= 0.0][:ADDRESSES_TRIED]
        return [each for each in addresses if self.is_proved(_site(each)) or _site(each) in tried]

    def begin(self, sites: Iterable[str]) -> bool:
        """Begin a dial to these sites; False if it has to wait for others to end."""
        sites = set(sites)
        unproved = sites - self._proved.keys()
        if self._under_way.total() + len(sites) > MOST_DIALS or self._unproved + len(unproved) > MOST_UNPROVED:
            return False
        if any(self._under_way[site] >= MOST_PER_SITE for site in sites):
            return False
        if any(self._under_way[site] >= MOST_PER_UNPROVED_SITE for site in unproved):
            return False
        self._under_way.update(sites)
        self._unproved += len(unproved)
        return True

    def end(self, sites: Iterable[str], unproved: int) -> None:
        """The dial has ended; so many of its sites were not proved when it began."""
        self._under_way -= Counter(set(sites))
        self._unproved -= unproved

    def failed(self, sites: Iterable[str], began: float, now: float) -> None:
        """Nobody proved itself at any of these sites, in a dial that began then (local time, seconds)."""
        for site in set(sites):
            known = self._sites.get(site) or _Site()
            known.failures += 1
            put_last(self._sites, site, known, _REMEMBERED)
            if known.failures >= FAILURES_WHERE_PROVED:
                self._proved.pop(site, None)
            if known.failures >= FAILURES and not self.is_proved(site) and began >= known.alone_from:
                known.alone_from, known.alone_until = now, now + known.pause_s
                known.pause_s = min(2 * known.pause_s, LONGEST_PAUSE_S)


def _site(address: Address) -> str:
    return site_of(address.host)


class BoundedDials:
    """Dials within these limits.

    Args:
        transport: dials.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._limits, self._ended = transport, DialLimits(), Changes()

    def prove(self, host: str) -> None:
        """A peer has proved itself at this host, or the program has named it."""
        self._limits.prove(site_of(host))

    async def gets_in(self, address: Address, *, timeout_s: float) -> bool:
        """Whether a connection to this address can be made and its peer proves itself there. It is closed at once.

        Raises:
            NotDialed: this peer dials too much already, or must leave this address alone.
        """
        try:
            connection = await self._dial(address.peer_id, (address,), timeout_s=timeout_s, only_to_see=True)
        except NotDialed:
            raise
        except PeerError:
            return False
        connection.abort()
        return True

    async def dial(self, peer: PeerID, addresses: Sequence[Address], *, timeout_s: float) -> Connection:
        """As `Transport.dial`. Waiting for a turn counts.

        Raises:
            PeerUnreachable, PeerTimeout, PeerRefused: as there.
            NotDialed: the addresses are left alone, or no turn came.
        """
        return await self._dial(peer, addresses, timeout_s=timeout_s, only_to_see=False)

    async def _dial(
        self, peer: PeerID, addresses: Sequence[Address], *, timeout_s: float, only_to_see: bool
    ) -> Connection:
        """With `only_to_see` a failure is an answer like any other: it says nothing against the site."""
        loop, limits = asyncio.get_running_loop(), self._limits
        deadline = loop.time() + timeout_s
        while True:
            chosen = limits.choose(addresses, loop.time())
            if addresses and not chosen:
                alone_s = min(limits.left_alone_s(_site(each), loop.time()) for each in addresses)
                raise NotDialed(
                    f"nobody has proved an identity at {addresses[0].host}, and {FAILURES} dials there have failed: it "
                    f"is not dialed for another {seconds_text(alone_s)}",
                    peer,
                )
            sites = {_site(each) for each in chosen}
            seen, unproved = self._ended.count, sum(not limits.is_proved(site) for site in sites)
            if limits.begin(sites):
                break
            await self._ended.after(seen, max(0.0, deadline - loop.time()))
            if loop.time() >= deadline:
                raise NotDialed("too many other dials are under way", peer)
        began = loop.time()
        try:
            connection = await self._transport.dial(peer, chosen, timeout_s=max(0.0, deadline - loop.time()))
        except PeerError:
            if not only_to_see:
                limits.failed(sites, began, loop.time())
            raise
        finally:
            limits.end(sites, unproved)
            self._ended.notify()
        self.prove(connection.remote_host)
        if len(chosen) == 1:
            self.prove(chosen[0].host)  # a name
        return connection
