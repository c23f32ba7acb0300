"""The background work of a DHT node: it keeps records where others look for them while nodes come and go.

==============  =========================================================================================
when            what
==============  =========================================================================================
table changed   after `repair_delay_s`: if a near neighbour is gone, it is dialed once more and the own neighbourhood
                is looked up; each key held here whose nearest nodes changed is given to the new ones among them,
                by the two nearest of its present holders
`republish_s`   what this node wrote is published again; keys held here that nobody renewed in this time are
                given to all nodes that should hold them, by the nearest holder
`refresh_s`     buckets without lookups are looked into, nodes without a sign of life are pinged
`retry_lost_s`  a few nodes that were lost, and initial peers that are missing, are pinged; when one answers, the
                own neighbourhood is looked up through it: two halves of a network grow together
table empty     the same, every few seconds: a node that was given peers does not stay alone if one comes back
==============  =========================================================================================

All of it is work in the background: errors of peers end there, and all periods carry some chance, so that nodes that
started together do not work together.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shoal.base.clock import Backoff
from shoal.base.peer import PeerID
from shoal.dht.crawl import Caller, Crawler, report
from shoal.dht.local import Local
from shoal.dht.publish import Publisher
from shoal.dht.routing import id_of_key, node_id
from shoal.errors import ClosedError, PeerError
from shoal.protocol.wire import Contact, DhtPing, Record

__all__ = ["Upkeep"]

_BUCKETS_AT_ONCE = 4
"""The most buckets that are refreshed at a time."""

_LOST_AT_ONCE = 3
"""The most lost nodes that are dialed at a time."""

_DUTY = 2
"""So many of a key's holders give it to new ones."""

_KEYS_AT_ONCE = 64
_KNOCK_S = 5.0


@dataclass(slots=True)
class _Placed:
    """The nodes that should hold a key, as of the last check, and when a record of the key last came in."""

    nodes: Sequence[PeerID]
    at: float


class Upkeep:
    """The background work of one node.

    Args:
        local: the node.
        caller: makes pings.
        crawler: makes lookups.
        publisher: moves records.
    """

    def __init__(self, local: Local, caller: Caller, crawler: Crawler, publisher: Publisher) -> None:
        self._env, self._settings, self._own = local.env, local.settings, local.own
        self._neighbours, self._vault = local.neighbours, local.vault
        self._caller, self._crawler, self._publisher = caller, crawler, publisher
        self._placed: dict[bytes, _Placed] = {}
        self._repairing = self._knocking = False
        self._started = False
        self._neighbours.on_change, self._vault.on_held = self._table_changed, self._record_held

    def start(self) -> None:
        """Begin the periodic work. Safe to call twice."""
        if self._started:
            return
        self._started = True
        settings = self._settings
        for period_s, work in (
            (settings.refresh_s, self.refresh),
            (settings.republish_s, self.republish),
            (settings.retry_lost_s, self.retry_lost),
        ):
            if math.isfinite(period_s):
                self._caller.tasks.spawn(self._every(period_s, work))

    async def _every(self, period_s: float, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(period_s * (0.75 + 0.5 * self._env.rng.random()))
            try:
                await work()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001 (reported, not hidden)
                # A fault of ours in one kind of upkeep must be seen, and must not end it for good.
                report(f"DHT {work.__name__}", error)

    # ------------------------------------------------------------------------------------------------------- records

    def _record_held(self, record: Record) -> None:
        """A record was taken in: its sender also gave it to the nodes that are nearest now."""
        now = asyncio.get_running_loop().time()
        placed = self._placed.get(record.key)
        if placed is not None:
            placed.at = now
            return
        if len(self._placed) > 64 and len(self._placed) > 2 * len(self._vault.held):
            self._forget_gone()
        self._placed[record.key] = _Placed(self._holders(record.key), now)

    def _forget_gone(self) -> None:
        held = dict.fromkeys(self._vault.held.keys(self._env.clock.time()))
        self._placed = {key: placed for key, placed in self._placed.items() if key in held}

    def _holders(self, key: bytes) -> list[PeerID]:
        """The nodes that should hold a key, as far as is known here, nearest first."""
        target, replicas = id_of_key(key), self._settings.replicas
        nodes = [contact.peer for contact in self._neighbours.table.nearest(target, replicas)]
        nodes.append(self._own)
        return sorted(nodes, key=lambda peer: node_id(peer) ^ target)[:replicas]

    def _table_changed(self) -> None:
        """A node came into the table, or left it."""
        if not self._repairing:
            self._repairing = True
            self._caller.tasks.spawn(self._repair_soon())
        if not len(self._neighbours.table) and not self._knocking and math.isfinite(self._settings.retry_lost_s):
            self._knocking = True
            self._caller.tasks.spawn(self.knock())

    async def knock(self) -> None:
        """Ask the lost and the initial peers, again and again, until this node knows a node that is there."""
        backoff = Backoff(self._env.rng, first_s=0.5, max_s=_KNOCK_S)
        try:
            while not len(self._neighbours.table) and self._neighbours.initial:
                await asyncio.sleep(backoff.next_s())
                await self.retry_lost()
        except ClosedError:
            pass  # this node was shut down
        finally:
            self._knocking = False

    async def _repair_soon(self) -> None:
        await asyncio.sleep(self._settings.repair_delay_s * (1.0 + self._env.rng.random()))
        self._repairing = False
        await self.repair()

    async def repair(self) -> None:
        """Mend the neighbourhood, and give keys to nodes that should hold them since the table changed."""
        joined, lost = self._neighbours.take_changes()
        if self._lost_near(lost):
            # Perhaps only the connection broke: in a network of two that must not leave each alone for long.
            await asyncio.gather(self._ping(self._neighbours.lately_lost(_LOST_AT_ONCE)), self.look_around())
            found, lost_now = self._neighbours.take_changes()
            joined, lost = joined + found, lost + lost_now
        moves: dict[PeerID, list[bytes]] = {}
        for number, key in enumerate(self._vault.held.keys(self._env.clock.time())):
            placed = self._placed.get(key)
            if placed is not None and self._affected(id_of_key(key), placed, joined, lost):
                self._reassign(key, placed, moves)
            if number % _KEYS_AT_ONCE == _KEYS_AT_ONCE - 1:
                await asyncio.sleep(0)
        await self._move(moves)

    def _lost_near(self, lost: list[PeerID]) -> bool:
        """Whether one of these was among the nearest to this node, so that others have to take its place."""
        own = node_id(self._own)
        nearest = self._neighbours.table.nearest(own, self._settings.bucket_size)
        if len(nearest) < self._settings.bucket_size:
            return bool(lost)
        farthest = node_id(nearest[-1].peer) ^ own
        return any(node_id(peer) ^ own < farthest for peer in lost)

    def _affected(self, target: int, placed: _Placed, joined: list[PeerID], lost: list[PeerID]) -> bool:
        if any(peer in placed.nodes for peer in lost):
            return True
        if len(placed.nodes) < self._settings.replicas:
            return bool(joined)
        farthest = max(node_id(peer) ^ target for peer in placed.nodes)
        return any(node_id(peer) ^ target < farthest for peer in joined)

    def _reassign(self, key: bytes, placed: _Placed, moves: dict[PeerID, list[bytes]]) -> None:
        """Note which nodes have to get the key from here."""
        target, table = id_of_key(key), self._neighbours.table
        present = [peer for peer in placed.nodes if peer == self._own or peer in table]
        present.sort(key=lambda peer: node_id(peer) ^ target)
        holders = self._holders(key)
        if self._own in present[:_DUTY]:
            for peer in holders:
                if peer not in placed.nodes:
                    moves.setdefault(peer, []).append(key)
        placed.nodes = holders

    async def _move(self, moves: dict[PeerID, list[bytes]]) -> None:
        now = self._env.clock.time()
        for peer, keys in moves.items():
            contact = self._neighbours.table.contact(peer)
            records = [record for key in keys for record in self._vault.held.records(key, now)]
            if contact is not None and records:
                await self._publisher.hand_over(contact, records)

    async def republish(self) -> None:
        """Publish again this node's records, and keys held here that nobody renewed and no nearer node looks after."""
        now, at = self._env.clock.time(), asyncio.get_running_loop().time()
        self._vault.own.purge(now)
        own = list(self._vault.own)
        if own:
            await self._publisher.publish(own, [0] * len(own))
        moves: dict[PeerID, list[bytes]] = {}
        self._forget_gone()
        for key in self._vault.held.keys(now):
            holders = self._holders(key)
            placed = self._placed.setdefault(key, _Placed(holders, float("-inf")))
            if placed.at < at - self._settings.republish_s / 2 and holders[0] == self._own:
                placed.at = at
                placed.nodes = holders
                for peer in holders[1:]:
                    moves.setdefault(peer, []).append(key)
        await self._move(moves)

    # --------------------------------------------------------------------------------------------------------- nodes

    async def look_around(self) -> None:
        """Look up this node's own id, so that it and its neighbours learn of each other."""
        search = self._crawler.search(node_id(self._own).to_bytes(32), count=self._settings.bucket_size)
        await self._crawler.run([search], values=False)

    async def refresh(self) -> None:
        """Look into buckets that saw no lookup for long, and ask nodes that were silent for long."""
        table, rng = self._neighbours.table, self._env.rng
        before = asyncio.get_running_loop().time() - self._settings.refresh_s
        due = table.due(before)
        chosen = rng.sample(due, min(_BUCKETS_AT_ONCE, len(due)))
        searches = [self._crawler.search(table.random_id(bucket, rng).to_bytes(32)) for bucket in chosen]
        await self._crawler.run(searches, values=False)
        await self._ping(table.quiet(before))

    async def retry_lost(self) -> None:
        """Ask a few lost nodes; if one is back, or was never gone, get to know its neighbourhood."""
        now = asyncio.get_running_loop().time()
        missed = self._neighbours.missed(_LOST_AT_ONCE, self._env.rng, now)
        if missed and await self._ping(missed):
            await self.look_around()

    def ask(self, lost: Contact) -> None:
        """Ask a lost node in the background, which is connected again: others may not know of it, nor name it."""
        self._caller.tasks.spawn(self._ping((lost,)))

    async def _ping(self, contacts: Sequence[Contact]) -> int:
        """Ask nodes for a sign of life; the number that gave one."""
        return sum(await asyncio.gather(*(self._answers(contact) for contact in contacts)))

    async def _answers(self, contact: Contact) -> bool:
        try:
            await self._caller.call(contact, DhtPing())
        except PeerError:
            return False
        return True
