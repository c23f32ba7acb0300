"""Which live peers cannot be dialed where they say that they listen, so that nobody waits for them twice.

A peer behind a router or a firewall that lets nobody in has links that it made itself, and everything that opens a
stream to it waits in vain. So a dial that fails, or takes long, puts the route to that peer in *doubt*; a second dial a
moment later decides. Its failure counts only if the peer answers on its link before that dial and after it: so a peer
that is dead, frozen or cut off, or wakes meanwhile, is not meant. A doubt is void when the peer has another link than
at the first dial: it was cut off then.

Meanwhile the peer is asked over its link to dial us (`Lending`). If it can, streams go that way, and the peer counts as
before: it may be the only one that there is. If not, dialing fails at once while there is doubt, and once the route is
*shut*.

A shut route is tried again ever more rarely, in the background, so that no round pays for it. It is forgotten when the
peer names other addresses or its link is lost. Only a peer's own attempts count here: the word of others shuts none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from shoal.base.peer import Address, PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Tasks
from shoal.errors import PeerError
from shoal.rpc.dial_limits import BoundedDials, NotDialed
from shoal.rpc.link import CallLink
from shoal.transport.base import Connection

__all__ = ["Routes"]

_DOUBT_S = 1.5
"""A dial that takes longer puts the route in doubt. A live peer answers within four round trips."""

_AGAIN_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 960.0
_MAX_DOUBTS = 256


class _Route:
    """The route to one peer."""

    __slots__ = ("addresses", "lends", "link", "shut")

    def __init__(self, addresses: tuple[Address, ...], link: CallLink | None) -> None:
        self.addresses, self.link, self.shut, self.lends = addresses, link, False, False


class Routes:
    """The routes to the live peers of one endpoint.

    Args:
        dials: dials.
        dial_timeout_s: longest time of one dial.
        link: the call link with a peer, if there is one.
        borrow: has the peer of a link dial us.
        tasks: the endpoint's.
        keep: takes a connection that a second try made.
    """

    def __init__(
        self,
        dials: BoundedDials,
        dial_timeout_s: float,
        *,
        link: Callable[[PeerID], CallLink | None],
        borrow: Callable[[CallLink], Awaitable[Connection]],
        tasks: Tasks,
        keep: Callable[[Connection], None],
    ) -> None:
        self._dials, self._dial_timeout_s = dials, dial_timeout_s
        self._link, self._borrow, self._tasks, self._keep = link, borrow, tasks, keep
        self._shut_callbacks: list[Callable[[PeerID, tuple[Address, ...]], None]] = []
        self._routes: dict[PeerID, _Route] = {}

    def closed(self, peer: PeerID, addresses: tuple[Address, ...]) -> bool:
        """Whether this peer should not be dialed at these addresses now."""
        route = self._routes.get(peer)
        if route is None or route.lends:
            return False
        return self._holds(peer, route) and set(addresses) <= set(route.addresses)

    def lends(self, peer: PeerID) -> bool:
        """Whether this peer is dialed in vain, and can dial us."""
        route = self._routes.get(peer)
        return route is not None and route.lends

    def _holds(self, peer: PeerID, route: _Route) -> bool:
        """Whether this doubt is not void. A route that is shut stays so with another link, as clients make many."""
        return route.shut or self._link(peer) is route.link

    def shut(self, peer: PeerID) -> bool:
        """Whether two dials have failed, and none has succeeded since."""
        route = self._routes.get(peer)
        return route is not None and route.shut

    def on_shut(self, callback: Callable[[PeerID, tuple[Address, ...]], None]) -> None:
        """Call `callback(peer, addresses)` for each route that is shut, with the addresses that were tried."""
        self._shut_callbacks.append(callback)

    def forget(self, peer: PeerID) -> None:
        """Forget the doubts about a peer: it is gone, or was reached."""
        self._routes.pop(peer, None)

    async def dial(self, peer: PeerID, addresses: tuple[Address, ...]) -> Connection:
        """Dial a peer; if it fails, and the peer has a link with us all the same, the route is in doubt.

        Raises:
            PeerUnreachable, PeerTimeout, PeerRefused: as `BoundedDials.dial`.
        """
        route = _Route(addresses, self._link(peer))
        doubt = asyncio.get_running_loop().call_later(_DOUBT_S, self._doubt, peer, route)
        try:
            connection = await self._dials.dial(peer, addresses, timeout_s=self._dial_timeout_s)
        except PeerError as error:
            if not isinstance(error, NotDialed):
                self._doubt(peer, route)
            raise
        except BaseException:
            if self._routes.get(peer) is route:
                self.forget(peer)
            raise
        finally:
            doubt.cancel()
        self.forget(peer)
        return connection

    def _doubt(self, peer: PeerID, route: _Route) -> None:
        if route.link is None or not self._holds(peer, route):
            return
        known = self._routes.get(peer)
        if (known is None or not self._holds(peer, known)) and len(self._routes) < _MAX_DOUBTS:
            self._routes[peer] = route
            self._tasks.spawn(self._try_again(peer, route))

    async def _try_again(self, peer: PeerID, route: _Route) -> None:
        """Try until the route is open, or nobody needs it any more."""
        pause_s, next_pause_s = _AGAIN_S, _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            if self._routes.get(peer) is not route:
                return
            link = self._link(peer)
            if link is None or not self._holds(peer, route):
                break
            if not route.shut and not await _lives(link):
                break  # dead or frozen, as far as can be told
            self._tasks.spawn(self._ask_to_lend(route, link))
            try:
                connection = await self._dials.dial(peer, route.addresses, timeout_s=self._dial_timeout_s)
            except PeerError as error:
                if self._routes.get(peer) is not route:
                    return
                if not route.shut:
                    if isinstance(error, NotDialed):
                        break  # nobody has tried
                    if not await _lives(link):
                        break  # it was frozen while it was dialed
                    sometimes("a peer lives that cannot be dialed")
                    self._shut(peer, route)
                pause_s, next_pause_s = next_pause_s, min(2 * next_pause_s, _LONGEST_PAUSE_S)
            else:
                self._keep(connection)
                break
        if self._routes.get(peer) is route:
            self.forget(peer)

    def _shut(self, peer: PeerID, route: _Route) -> None:
        route.shut = True
        for callback in self._shut_callbacks:
            callback(peer, route.addresses)

    async def _ask_to_lend(self, route: _Route, link: CallLink) -> None:
        """Have the peer dial us."""
        try:
            connection = await self._borrow(link)
        except PeerError:
            route.lends = False
        else:
            sometimes("a peer that is dialed in vain dials us")
            route.lends = True
            self._keep(connection)


async def _lives(link: CallLink) -> bool:
    """Whether the peer answers on this link now."""
    link.heard.clear()
    link.ask()
    with suppress(TimeoutError):
        async with asyncio.timeout(_DOUBT_S):
            await link.heard.wait()
    return link.heard.is_set() and not link.closed
