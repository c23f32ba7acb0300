"""The answers of a DHT node to others.

Each request costs its sender tokens: keys looked up and records sent are limited per peer and second. A reply is kept
under the size that one message may have: keys that do not fit are marked `more`, and the asker asks for them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from shoal.base.peer import PeerID
from shoal.base.tasks import in_turns
from shoal.dht.local import CHECKED_BYTES, Local
from shoal.dht.routing import id_of_key
from shoal.dht.storage import wire_bytes
from shoal.errors import ClosedError, PeerRefused
from shoal.protocol.wire import (
    Contact,
    DhtFind,
    DhtFindReply,
    DhtFound,
    DhtPing,
    DhtPong,
    DhtStore,
    DhtStoreReply,
    Record,
)
from shoal.rpc import Endpoint
from shoal.rpc.rate_limiter import RateLimiter

__all__ = ["Service"]

_BURST_S = 16.0
"""A peer may use its rates of this time at once."""

_CHECKED_AT_ONCE = 4
_SPARE_BYTES = 4096
_BYTES_PER_TOKEN = 16384
"""So many bytes of a reply cost as much as one key."""


class Service:
    """Serves `DhtPing`, `DhtFind` and `DhtStore`.

    Args:
        endpoint: receives the calls.
        local: its neighbours learn which peers called, and are named to others; its vault holds the records.
    """

    def __init__(self, endpoint: Endpoint, local: Local) -> None:
        settings = local.settings
        self._endpoint, self._env, self._neighbours, self._vault = endpoint, local.env, local.neighbours, local.vault
        self._bucket_size = settings.bucket_size
        self._closed = False
        self._finds = RateLimiter(settings.find_keys_per_s, settings.find_keys_per_s * _BURST_S)
        self._stores = RateLimiter(settings.store_records_per_s, settings.store_records_per_s * _BURST_S)
        endpoint.serve(DhtPing, self.ping)
        endpoint.serve(DhtFind, self.find)
        endpoint.serve(DhtStore, self.store)

    def ping(self, peer: PeerID, _: DhtPing) -> DhtPong:
        """Answer that we are a node, with our addresses."""
        self._meet(peer)
        self._pay(self._finds, peer, 1, "calls")
        return DhtPong(self._endpoint.contact)

    def find(self, peer: PeerID, request: DhtFind) -> DhtFindReply:
        """The records held here, and the nearest nodes known here, for each key."""
        self._meet(peer)
        self._pay(self._finds, peer, max(1, len(request.keys)), "keys")
        now = self._env.clock.time()
        room = left = self._endpoint.limits.header_bytes - _SPARE_BYTES
        found: list[DhtFound] = []
        of_peers = request.of_peers
        for number, key in enumerate(request.keys):
            nearest = self._neighbours.table.nearest(id_of_key(key), self._bucket_size, without=peer)
            size = sum(map(_contact_bytes, nearest))
            size += self._vault.shown_bytes(key, of_peers=of_peers) if request.values else 0
            # The first key always gets its answer, so that asking again gets on. Records that do not fit are not even
            # looked at: a key may have thousands, and be asked for 64 times.
            if number and size > left:
                found.append(DhtFound([], [], True))
            else:
                records = self._vault.shown(key, now, of_peers=of_peers) if request.values else []
                found.append(DhtFound(records, nearest))
                left -= size
        self._charge(peer, room - left)
        return DhtFindReply(found)

    def store(self, peer: PeerID, request: DhtStore) -> DhtStoreReply | Coroutine[Any, Any, DhtStoreReply]:
        """Hold these records, as far as the rules allow, then return the records of the key that is asked for.

        The order matters: if two peers store and ask under one key, the second one is shown the first one's record.
        With many records, checking signatures takes a while.
        """
        self._meet(peer)
        self._pay(self._stores, peer, max(1, len(request.records)), "records")
        if request.find is not None:
            self._pay(self._finds, peer, 1, "keys")
        if not self._endpoint.contact.addresses:
            raise PeerRefused("this peer only dials: it holds no records for others", peer)
        if len(request.records) > _CHECKED_AT_ONCE or sum(map(wire_bytes, request.records)) > CHECKED_BYTES:
            return self._store_many(peer, request)
        refused = [self._hold(peer, record) for record in request.records]
        return DhtStoreReply(refused, self._shown(peer, request))

    async def _store_many(self, peer: PeerID, request: DhtStore) -> DhtStoreReply:
        in_order = in_turns(request.records, _CHECKED_AT_ONCE, CHECKED_BYTES, wire_bytes)
        refused = [self._hold(peer, record) async for record in in_order]
        return DhtStoreReply(refused, self._shown(peer, request))

    def _shown(self, peer: PeerID, request: DhtStore) -> list[Record]:
        """The records that a storing peer is shown under the key that it asks for."""
        if request.find is None:
            return []
        records = self._vault.shown(request.find, self._env.clock.time(), of_peers=request.of_peers)
        self._charge(peer, sum(map(wire_bytes, records)))
        return records

    def _hold(self, peer: PeerID, record: Record) -> str:
        """Why the record is not held; empty if it is."""
        return self._vault.accept(record, peer, self._env.clock.time())[:256]

    def close(self) -> None:
        """Answer no more calls."""
        self._closed = True

    def _meet(self, peer: PeerID) -> None:
        if self._closed:
            raise ClosedError("this DHT node was closed")
        self._neighbours.called(self._endpoint.contact_of(peer), asyncio.get_running_loop().time())

    def _charge(self, peer: PeerID, nbytes: int) -> None:
        """Large answers cost more than small ones, but nobody knows their size before."""
        self._finds.charge(peer, nbytes / _BYTES_PER_TOKEN, asyncio.get_running_loop().time())

    def _pay(self, limiter: RateLimiter, peer: PeerID, cost: float, what: str) -> None:
        if not limiter.allows(peer, cost, asyncio.get_running_loop().time()):
            raise PeerRefused(f"too many {what} per second from you", peer)


def _contact_bytes(contact: Contact) -> int:
    """The size of a contact in a message, in bytes; slightly more than it really takes."""
    return 48 + sum(len(address.host) + 96 for address in contact.addresses)
