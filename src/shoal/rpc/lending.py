"""Connections for streams to a peer that only dials, or is dialed in vain: it dials one itself, when it is asked to.

The asker opens its streams on that connection as on any other. The peer dials nobody but the one that asks, where that
one has said that it listens; so nobody can be made to dial anybody else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shoal.base.peer import PeerID
from shoal.errors import PeerTimeout
from shoal.protocol.wire import LendConnection, encode
from shoal.rpc.link import CallLink
from shoal.rpc.serving import tag_of
from shoal.transport.base import Connection

__all__ = ["Lending"]


class Lending:
    """The connections that one endpoint has asked others for.

    Args:
        timeout_s: the longest wait for one.
        drop: ends a connection that nobody needs any more.
    """

    def __init__(self, timeout_s: float, drop: Callable[[Connection], None]) -> None:
        self._timeout_s, self._drop = timeout_s, drop
        self._asked: dict[PeerID, deque[asyncio.Future[Connection]]] = {}

    async def borrow(self, link: CallLink) -> Connection:
        """Ask the peer of this link for a connection.

        Raises:
            PeerTimeout, PeerUnreachable, PeerRefused: it does not come.
        """
        peer, coming = link.peer_id, asyncio.get_running_loop().create_future()
        asked = self._asked.setdefault(peer, deque())
        asked.append(coming)
        try:
            async with asyncio.timeout(self._timeout_s):
                await link.call(tag_of(LendConnection), encode(LendConnection()), self._timeout_s)
                return await asyncio.shield(coming)
        except TimeoutError:
            self._give_up(coming)
            raise PeerTimeout(
                "it cannot be dialed, and the connection that it was asked for did not come", peer
            ) from None
        except BaseException:
            self._give_up(coming)
            raise
        finally:
            if coming in asked:
                asked.remove(coming)
            if not asked:
                self._asked.pop(peer, None)

    def _give_up(self, coming: asyncio.Future[Connection]) -> None:
        if coming.done() and not coming.cancelled():
            self._drop(coming.result())
        coming.cancel()

    def lent(self, connection: Connection) -> bool:
        """A peer has dialed a connection for our streams. False if it was not asked for."""
        asked = self._asked.get(connection.peer_id)
        while asked:
            coming = asked.popleft()
            if not coming.done():
                coming.set_result(connection)
                return True
        return False
