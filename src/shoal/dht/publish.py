"""Brings records to the nodes that should hold them: the `replicas` nodes nearest to the key, this one included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from shoal.clock import Env
from shoal.dht.crawl import Caller, Crawler
from shoal.dht.routing import id_of_key, node_id
from shoal.dht.settings import DhtSettings
from shoal.dht.storage import wire_bytes
from shoal.dht.vault import Vault
from shoal.errors import PeerError, PeerProtocolError
from shoal.peer import PeerID
from shoal.wire import Contact, DhtStore, Record

__all__ = ["Publisher"]

_RECORDS_PER_CALL = 256
_BYTES_PER_CALL = 512 << 10


class Publisher:
    """Sends records to where they belong.

    Args:
        caller: makes the calls.
        crawler: finds the nodes.
        vault: holds this node's share.
        env: wall clock.
        settings: `replicas`.
        own: this node.
        holds: whether this node holds records for others (it is not in client mode).
        on_held: called with each record that was taken in here.
    """

    def __init__(
        self,
        caller: Caller,
        crawler: Crawler,
        vault: Vault,
        env: Env,
        settings: DhtSettings,
        own: PeerID,
        holds: Callable[[], bool],
        on_held: Callable[[Record], None],
    ) -> None:
        self._caller, self._crawler, self._vault, self._env = caller, crawler, vault, env
        self._replicas, self._own, self._holds, self._on_held = settings.replicas, own, holds, on_held

    async def publish(self, records: Sequence[Record], copies: list[int]) -> None:
        """Find where the records belong and bring them there. When it is cancelled, `copies` is what was done so far.

        Args:
            records: the records, checked.
            copies: one number per record; raised for each node that holds it now.
        """
        keys = dict.fromkeys(record.key for record in records)
        searches = {key: self._crawler.search(key) for key in keys}
        await self._crawler.run(list(searches.values()), values=False)
        answered = {key: search.lookup.answered for key, search in searches.items()}
        missing: dict[int, None] = {}
        wanted: dict[PeerID, tuple[Contact, list[int]]] = {}
        for number, record in enumerate(records):
            nodes = answered[record.key]
            mine = self._holds() and self._among_nearest(record.key, nodes)
            if mine and not self._vault.accept(record, self._own, self._env.clock.time()):
                copies[number] += 1
                self._on_held(record)
            for contact in nodes[: self._replicas - mine]:
                wanted.setdefault(contact.peer, (contact, []))[1].append(number)
        await self._send_all(wanted, records, copies, missing)
        if missing:
            # Nodes that failed just now: the next ones take their place.
            wanted = {}
            for number in missing:
                for contact in answered[records[number].key][self._replicas :][:2]:
                    wanted.setdefault(contact.peer, (contact, []))[1].append(number)
            await self._send_all(wanted, records, copies, {})

    def _among_nearest(self, key: bytes, nodes: Sequence[Contact]) -> bool:
        if len(nodes) < self._replicas:
            return True
        target = id_of_key(key)
        return node_id(self._own) ^ target < node_id(nodes[self._replicas - 1].peer) ^ target

    async def _send_all(
        self,
        wanted: dict[PeerID, tuple[Contact, list[int]]],
        records: Sequence[Record],
        copies: list[int],
        missing: dict[int, None],
    ) -> None:
        async def send(contact: Contact, numbers: list[int]) -> None:
            for chunk in _chunks(numbers, records):
                answers = await self.send(contact, [records[number] for number in chunk])
                for number, refusal in zip(chunk, answers, strict=True):
                    copies[number] += refusal == ""
                    if refusal is None:
                        missing[number] = None

        await asyncio.gather(*(send(contact, numbers) for contact, numbers in wanted.values()))

    async def send(self, contact: Contact, records: Sequence[Record]) -> list[str | None]:
        """Send records, few enough for one call, to one node.

        Returns:
            For each record: empty if the node holds it now, else why not; None if the call failed.
        """
        try:
            reply = await self._caller.call(contact, DhtStore(list(records)))
            if len(reply.refused) != len(records):
                raise PeerProtocolError(f"{len(reply.refused)} answers for {len(records)} records", contact.peer)
        except PeerError:
            return [None] * len(records)
        return list(reply.refused)

    async def hand_over(self, contact: Contact, records: Sequence[Record]) -> None:
        """Send any number of records to one node; what it says does not matter."""
        for chunk in _chunks(range(len(records)), records):
            if None in await self.send(contact, [records[number] for number in chunk]):
                return


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
