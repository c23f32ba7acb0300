"""Brings records to the nodes that should hold them: the `replicas` nodes nearest to the key, this one included.

Peers write the same keys again and again (progress, declarations). So the nodes that a lookup found are remembered for
`route_s`, and as long as no node that is relied on came into the table, left it, or failed: most stores take one round
of calls. If all nodes of the network answered one lookup, as in a small network, these nodes serve every key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeGuard

from shoal.base.bounded import put_last
from shoal.base.peer import PeerID
from shoal.dht.crawl import Caller, Crawler, Findings, KeySearch
from shoal.dht.local import Local
from shoal.dht.routing import id_of_key, node_id
from shoal.dht.storage import wire_bytes
from shoal.errors import PeerError, PeerProtocolError
from shoal.protocol.wire import Contact, DhtStore, Record

__all__ = ["Publisher", "StoreAndFind"]

_RECORDS_PER_CALL = 256
"""The most records in one `DhtStore`."""

_BYTES_PER_CALL = 512 << 10
"""The most bytes of records in one `DhtStore`."""

_SPARE_NODES = 2
"""Nodes that take the place of those that fail to store a record."""

_MAX_ROUTES = 1024


class _Route(NamedTuple):
    """The nodes for a key, as found at this time, with this state of the table."""

    nodes: list[Contact]
    at: float
    version: int


class StoreAndFind(Findings):
    """A record on its way to the nodes that should hold it, and the records that they hold under its key.

    Args:
        record: the record, checked.
        of_peers: of `Findings`.

    Attributes:
        copies: one number: how many nodes hold the record now.
        answered: done once one of the other nodes has answered.
    """

    def __init__(self, record: Record, *, of_peers: bool) -> None:
        super().__init__(record.key, of_peers=of_peers)
        self.record, self.copies = record, [0]
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Publisher:
    """Sends records to where they belong.

    Args:
        caller: makes the calls.
        crawler: finds the nodes.
        local: holds this node's share.
    """

    def __init__(self, caller: Caller, crawler: Crawler, local: Local) -> None:
        self._caller, self._crawler = caller, crawler
        self._own, self._env, self._neighbours, self._vault = local.own, local.env, local.neighbours, local.vault
        self._replicas, self._route_s = local.settings.replicas, local.settings.route_s
        self._slow_s = local.settings.slow_s
        self._known: dict[bytes, _Route] = {}
        self._everyone = _Route([], float("-inf"), 0)

    async def exchange(self, exchange: StoreAndFind) -> None:
        """Bring a record to the nodes that should hold it, and take the records that they hold under its key.

        Once a node has answered, the others have `slow_s` more to do so: a silent node does not hold up the caller. The
        rest is done in the background.
        """
        work = self._caller.tasks.spawn(self.publish([exchange.record], exchange.copies, exchange))
        await asyncio.wait((work, exchange.answered), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((work,), timeout=self._slow_s)

    async def publish(self, records: Sequence[Record], copies: list[int], exchange: StoreAndFind | None = None) -> None:
        """Find where the records belong and bring them there. If it is cancelled, `copies` says how far it came.

        Args:
            records: the records, checked.
            copies: one number per record; raised for each node that holds it now.
            exchange: takes what the nodes hold under its key; None: they are not asked.
        """
        answered = await self._routes(dict.fromkeys(record.key for record in records))
        missing: dict[int, None] = {}
        wanted: dict[PeerID, tuple[Contact, list[int]]] = {}
        for number, record in enumerate(records):
            nodes = answered[record.key] = self._relied_first(answered[record.key])
            mine = not self._caller.client_mode and self._among_nearest(record.key, nodes)
            if mine and not self._vault.accept(record, self._own, self._env.clock.time()):
                copies[number] += 1
            for contact in nodes[: self._replicas - mine]:
                wanted.setdefault(contact.peer, (contact, []))[1].append(number)
        await self._send_all(wanted, records, copies, missing, exchange)
        if missing:
            # Nodes that failed just now: the next ones take their place.
            wanted = {}
            for number in missing:
                self._known.pop(records[number].key, None)
                for contact in answered[records[number].key][self._replicas :]:
                    wanted.setdefault(contact.peer, (contact, []))[1].append(number)
            await self._send_all(wanted, records, copies, {}, exchange)

    async def _routes(self, keys: Iterable[bytes]) -> dict[bytes, list[Contact]]:
        """The nodes nearest to each key, and others, nearest first."""
        now, version = asyncio.get_running_loop().time(), self._neighbours.version
        routes: dict[bytes, list[Contact]] = {}
        searches: list[KeySearch] = []
        for key in keys:
            if self._holds_good(known := self._known.get(key), now, version):
                routes[key] = known.nodes
            elif self._holds_good(everyone := self._everyone, now, version):
                routes[key] = _sorted_by_distance(everyone.nodes, key)
            else:
                searches.append(self._crawler.search(key))
        await self._crawler.run(searches, values=False)
        now, version = asyncio.get_running_loop().time(), self._neighbours.version
        for search in searches:
            routes[search.key] = nodes = search.lookup.answered
            put_last(self._known, search.key, _Route(nodes, now, version), _MAX_ROUTES)
            if search.lookup.complete and nodes:
                self._everyone = _Route(search.lookup.answered, now, version)
        return routes

    def _holds_good(self, route: _Route | None, now: float, version: int) -> TypeGuard[_Route]:
        return route is not None and route.version == version and route.at > now - self._route_s

    def _relied_first(self, nodes: Sequence[Contact]) -> list[Contact]:
        """As many as a record needs, and a few more; those that have left a call without an answer come last."""
        doubtful = self._neighbours.table.doubtful
        return sorted(nodes, key=lambda each: doubtful(each.peer))[: self._replicas + _SPARE_NODES]

    def _among_nearest(self, key: bytes, nodes: Sequence[Contact]) -> bool:
        if len(nodes) < self._replicas or self._neighbours.table.doubtful(nodes[self._replicas - 1].peer):
            return True
        target = id_of_key(key)
        return node_id(self._own) ^ target < node_id(nodes[self._replicas - 1].peer) ^ target

    async def _send_all(
        self,
        wanted: dict[PeerID, tuple[Contact, list[int]]],
        records: Sequence[Record],
        copies: list[int],
        missing: dict[int, None],
        exchange: StoreAndFind | None,
    ) -> None:
        async def send(contact: Contact, numbers: list[int]) -> None:
            for chunk in _chunks(numbers, records):
                answers = await self.send(contact, [records[number] for number in chunk], exchange)
                for number, refusal in zip(chunk, answers, strict=True):
                    copies[number] += refusal == ""
                    if refusal is None:
                        missing[number] = None

        sends = {peer: self._caller.tasks.spawn(send(*wanted[peer])) for peer in wanted}
        # What goes to nodes that others wait for already, or have waited for in vain, goes on in the background.
        relied = [sends[peer] for peer in wanted if self._caller.patience_s(peer)]
        await asyncio.gather(*(relied or sends.values()))

    async def send(
        self, contact: Contact, records: Sequence[Record], exchange: StoreAndFind | None = None
    ) -> list[str | None]:
        """Send records, few enough for one call, to one node.

        Returns:
            For each record: empty if the node holds it now, else why not; None if the call failed.
        """
        try:
            wanted = (None, False) if exchange is None else (exchange.key, exchange.of_peers)
            reply = await self._caller.call(contact, DhtStore(list(records), *wanted))
            if len(reply.refused) != len(records):
                raise PeerProtocolError(f"{len(reply.refused)} answers for {len(records)} records", contact.peer)
            if exchange is not None:
                await self._crawler.take_records(contact.peer, [(exchange, each) for each in reply.records])
                if not exchange.answered.done():
                    exchange.answered.set_result(None)
        except PeerError:
            return [None] * len(records)
        return list(reply.refused)

    async def hand_over(self, contact: Contact, records: Sequence[Record]) -> None:
        """Send any number of records to one node; its answers do not matter."""
        for chunk in _chunks(range(len(records)), records):
            if None in await self.send(contact, [records[number] for number in chunk]):
                return


def _sorted_by_distance(nodes: Iterable[Contact], key: bytes) -> list[Contact]:
    target = id_of_key(key)
    return sorted(nodes, key=lambda each: node_id(each.peer) ^ target)


def _chunks(numbers: Sequence[int], records: Sequence[Record]) -> Iterator[list[int]]:
    """Numbers of records, cut to what one call may carry."""
    chunk: list[int] = []
    size = 0
    for number in numbers:
        more = wire_bytes(records[number])
        if chunk and (len(chunk) >= _RECORDS_PER_CALL or size + more > _BYTES_PER_CALL):
            yield chunk
            chunk, size = [], 0
        chunk.append(number)
        size += more
    if chunk:
        yield chunk
