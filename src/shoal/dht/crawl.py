"""Drives lookups over the network: many keys at once, one call per node for all keys that want to ask it.

Every call that a DHT node makes goes through `Caller`, which tells `Neighbours` the result. Every record that comes
back is checked here before anything else sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.base.peer import PeerID
from shoal.base.tasks import Changes, Tasks, in_turns
from shoal.dht.local import CHECKED_BYTES, Local
from shoal.dht.lookup import Lookup
from shoal.dht.routing import id_of_key
from shoal.dht.storage import is_of_peer, wins, wire_bytes
from shoal.errors import ClosedError, PeerError, PeerProtocolError, PeerRefused, PeerUnreachable
from shoal.events import PeerDropped
from shoal.protocol.wire import Contact, DhtFind, DhtFindReply, Record, Request
from shoal.rpc import Endpoint, NotDialed

__all__ = ["Caller", "Crawler", "Findings", "KeySearch", "report"]

R = TypeVar("R")

KEYS_PER_CALL = 64
_CHECKED_AT_ONCE = 32

_LATE = 6.0
"""An answer that takes so many times as long as the slowest of the others is late, after twice `slow_s`. One over a new
connection takes five times as long as one over a link."""

_DOUBTED = 2.0
"""The answer of a doubtful node is late after so many times as long as the slowest of the others took."""


def report(where: str, error: BaseException) -> None:
    """Tell the loop's exception handler of a fault of ours that ended work in the background."""
    asyncio.get_running_loop().call_exception_handler({"message": f"{where} failed", "exception": error})


def _report(error: BaseException) -> None:
    if not isinstance(error, ClosedError):
        report("DHT task", error)


@dataclass(slots=True)
class _Gate:
    """The calls to one peer, under way or waiting; and when those under way began, the oldest first."""

    free: asyncio.Semaphore
    began: list[float] = field(default_factory=list)
    users: int = 0


class Caller:
    """Makes this node's calls, a bounded number per peer at a time.

    Args:
        endpoint: carries the calls.
        local: its neighbours are told the results.

    Attributes:
        tasks: this node's work in the background.
        calls: how many calls were made.
    """

    def __init__(self, endpoint: Endpoint, local: Local) -> None:
        self._endpoint, self._neighbours, self._settings = endpoint, local.neighbours, local.settings
        self._gates: dict[PeerID, _Gate] = {}
        self.tasks = Tasks(_report)
        self.calls = 0
        self._answered_at = float("-inf")

    @property
    def client_mode(self) -> bool:
        """Whether this node only dials: it has no address where others could reach it."""
        return not self._endpoint.contact.addresses

    @property
    def silent(self) -> frozenset[PeerID]:
        """The peers that were asked for a sign of life and gave none: they are not worth a call now."""
        return self._endpoint.silent

    def patience_s(self, peer: PeerID) -> float:
        """The time that a call to this peer may hold up others: 0 if some wait that long already, or did in vain."""
        if self._neighbours.table.doubtful(peer):
            return 0.0
        gate, slow_s, now = self._gates.get(peer), self._settings.slow_s, asyncio.get_running_loop().time()
        return max(0.0, (gate.began[0] if gate is not None and gate.began else now) + slow_s - now)

    async def call(self, contact: Contact, request: Request[R]) -> R:
        """Call a node.

        Raises:
            PeerError: it failed; the neighbours know already.
            ClosedError: we were shut down.
        """
        peer, loop = contact.peer, asyncio.get_running_loop()
        async with self._gate(peer):
            self.calls, began = self.calls + 1, loop.time()
            try:
                timeout_s = self._settings.call_timeout_s
                reply = await self._endpoint.call(self._way_to(contact), request, timeout_s=timeout_s)
            except NotDialed:
                self._neighbours.refused(peer, loop.time())  # there may be nothing wrong with it
                raise
            except PeerUnreachable:
                self._neighbours.unreachable(peer, loop.time())
                raise
            except PeerProtocolError:
                self._neighbours.lied(peer, loop.time())
                raise
            except PeerRefused:
                self._neighbours.refused(peer, loop.time())
                raise
            except PeerError:
                # Our own line may have been down, unless its link shows life, or somebody else has answered lately.
                alive = self._endpoint.connected(peer) and peer not in self.silent
                owes = alive or self._answered_at > began + self._settings.slow_s
                self._neighbours.silent(peer, loop.time(), owes=owes)
                raise
        self._answered_at = loop.time()
        self._neighbours.alive(self._known(contact), loop.time())
        return reply

    def _way_to(self, contact: Contact) -> Contact | PeerID:
        """Addresses that we know ourselves come first: those that others name could send us to the wrong place."""
        if self._endpoint.connected(contact.peer):
            return contact.peer
        return self._neighbours.table.contact(contact.peer) or contact

    def _known(self, contact: Contact) -> Contact:
        known = self._endpoint.contact_of(contact.peer)
        # A peer that only dials has answered on its own link: not where others say that it listens.
        return known if known.addresses or self._endpoint.connected(contact.peer) else contact

    @asynccontextmanager
    async def _gate(self, peer: PeerID) -> AsyncIterator[None]:
        """Wait until few enough calls to this peer are under way."""
        gate = self._gates.get(peer)
        if gate is None:
            gate = self._gates[peer] = _Gate(asyncio.Semaphore(self._settings.calls_per_peer))
        gate.users += 1
        try:
            async with gate.free:
                gate.began.append(began := asyncio.get_running_loop().time())
                try:
                    yield
                finally:
                    gate.began.remove(began)
        finally:
            gate.users -= 1
            if not gate.users:
                del self._gates[peer]


class Findings:
    """The records of one key that were found so far.

    Args:
        key: the wire key.
        of_peers: only those are looked for that peers wrote under their own ids.
    """

    def __init__(self, key: bytes, *, of_peers: bool = False) -> None:
        self.key, self.of_peers = key, of_peers
        self.records: dict[bytes | None, Record] = {}

    def improves(self, record: Record) -> bool:
        """Whether the record would replace the ones found so far."""
        held = self.records.get(record.subkey)
        return held is None or wins(record, held)


class KeySearch(Findings):
    """One key that is looked for: its lookup, and the records found so far.

    Args:
        key: the wire key.
        lookup: the lookup of its id.
        first: whether the first record found ends the search.
        of_peers: of `Findings`.
    """

    def __init__(self, key: bytes, lookup: Lookup, *, first: bool = False, of_peers: bool = False) -> None:
        super().__init__(key, of_peers=of_peers)
        self.lookup, self.first = lookup, first

    @property
    def done(self) -> bool:
        """Whether no further call is needed."""
        return bool(self.first and self.records) or self.lookup.done


@dataclass(slots=True)
class _Queue:
    """The keys to ask one node for in one run: one call at a time; keys that come up meanwhile go into the next."""

    contact: Contact
    waiting: list[KeySearch] = field(default_factory=list)
    members: list[KeySearch] = field(default_factory=list)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class _Run:
    """The searches of one `Crawler.run`, and those of them that may be able to go on."""

    def __init__(self, searches: Sequence[KeySearch], *, values: bool) -> None:
        self.values = values
        self.open: dict[bytes, KeySearch] = {search.key: search for search in searches}
        self.ready: dict[bytes, KeySearch] = dict(self.open)
        self.queues: dict[PeerID, _Queue] = {}
        self.named_by: dict[PeerID, PeerID] = {}
        self.over = self.waited = False
        self.slowest_s = 0.0
        self.doubted: list[tuple[_Queue, Sequence[KeySearch], float]] = []
        self.changes = Changes()

    def touch(self, searches: Sequence[KeySearch]) -> None:
        """Note searches that may be able to go on."""
        self.ready.update((search.key, search) for search in searches)
        self.changes.notify()

    def slow(self, peer: PeerID, searches: Sequence[KeySearch]) -> None:
        """The node keeps these waiting."""
        for search in searches:
            search.lookup.slow(peer)
        self.touch(searches)

    def answered(self, after_s: float) -> None:
        """A node has answered after so long."""
        self.slowest_s = max(self.slowest_s, after_s)
        doubted, self.doubted = self.doubted, []
        for queue, searches, asked_at in doubted:
            self.late(queue, searches, asked_at, True)

    def late(self, queue: _Queue, searches: Sequence[KeySearch], asked_at: float, doubtful: bool) -> None:
        """The node may be keeping these waiting for much longer than others have."""
        if doubtful and not self.slowest_s:
            self.doubted.append((queue, searches, asked_at))  # the first answer tells how much time it has
            return
        loop, due = asyncio.get_running_loop(), asked_at + (_DOUBTED if doubtful else _LATE) * self.slowest_s
        if loop.time() < due:
            queue.timers.append(loop.call_at(due, self.late, queue, searches, asked_at, doubtful))
            return
        self.waited |= not doubtful
        for search in searches:
            search.lookup.late(queue.contact.peer)
        self.touch(searches)


class Crawler:
    """Runs searches.

    Args:
        caller: makes the calls.
        local: gives the seeds, and knows which records were checked before.
    """

    def __init__(self, caller: Caller, local: Local) -> None:
        self._caller = caller
        self._neighbours, self._vault = local.neighbours, local.vault
        self._env, self._settings, self._own = local.env, local.settings, local.own

    def search(self, key: bytes, *, count: int | None = None, first: bool = False, of_peers: bool = False) -> KeySearch:
        """A search for a wire key, seeded with the nearest nodes known here."""
        target, now = id_of_key(key), asyncio.get_running_loop().time()
        self._neighbours.table.refreshed(target, now)
        seeds = self._neighbours.table.nearest(target, self._settings.bucket_size)
        count = count or self._settings.replicas
        # If we know only a few nodes, all will be asked anyway: ask them at once, unless one answer is enough.
        few = len(self._neighbours.table) <= count
        alpha = count if few and not first else self._settings.alpha
        lookup = Lookup(target, self._own, seeds, count=count, alpha=alpha)
        return KeySearch(key, lookup, first=first, of_peers=of_peers)

    async def run(self, searches: Sequence[KeySearch], *, values: bool) -> None:
        """Run searches (of different keys) to their end. If it is cancelled, they hold all that was found so far."""
        run = _Run(searches, values=values)
        try:
            while True:
                self._ask_on(run)
                if not run.open:
                    return
                await run.changes.next()
        finally:
            # Calls under way are not awaited, nor cancelled: a late answer still tells whether that node lives.
            run.over = True

    def _ask_on(self, run: _Run) -> None:
        """Let each search that may be able to go on ask the next nodes."""
        wanted: dict[PeerID, tuple[Contact, list[KeySearch]]] = {}
        for search in run.ready.values():
            if search.done:
                run.open.pop(search.key, None)
                continue
            for contact in search.lookup.next_queries():
                wanted.setdefault(contact.peer, (contact, []))[1].append(search)
        run.ready.clear()
        silent = self._caller.silent
        for peer, (contact, group) in wanted.items():
            if peer in silent:  # an answer would come late, if ever
                for search in group:
                    search.lookup.failed(peer)
                    run.ready[search.key] = search
                continue
            queue = run.queues.get(peer)
            if queue is None:
                queue = run.queues[peer] = _Queue(contact)
                self._caller.tasks.spawn(self._work(queue, run))
            queue.waiting += group
            queue.members += group
            loop, patience_s = asyncio.get_running_loop(), self._caller.patience_s(peer)
            if run.waited and peer not in self._neighbours.table:
                patience_s = 0.0  # others that were only named have been waited for: once is enough
            queue.timers.append(loop.call_later(patience_s, run.slow, peer, group))
            doubtful = self._neighbours.table.doubtful(peer)
            queue.timers.append(loop.call_later(2 * patience_s, run.late, queue, group, loop.time(), doubtful))
        if run.ready:
            self._ask_on(run)

    async def find_values(self, searches: Sequence[KeySearch]) -> None:
        """Run searches for records; where the nodes that should hold a key have none, ask as many again beyond them.

        After many nodes died at once, their neighbours do not know all nodes that are left, and a key may lie farther
        out.
        """
        await self.run(searches, values=True)
        empty = [search for search in searches if not search.records]
        for search in empty:
            search.lookup.widen(2 * search.lookup.count)
        await self.run(empty, values=True)

    async def _work(self, queue: _Queue, run: _Run) -> None:
        """Ask one node until no search in this run needs more from it, or it fails."""
        peer = queue.contact.peer
        try:
            while queue.waiting and not run.over:
                group = [search for search in queue.waiting[:KEYS_PER_CALL] if not search.done]
                del queue.waiting[:KEYS_PER_CALL]
                if group:
                    queue.waiting += await self._ask(queue.contact, group, run)
        except (PeerRefused, NotDialed, ClosedError):
            pass  # the neighbours know; the lookups are told below
        except PeerError:
            self._neighbours.led(run.named_by.get(peer), to_answer=False)
        finally:
            del run.queues[peer]
            for timer in queue.timers:
                timer.cancel()
            for search in queue.members:
                search.lookup.failed(peer)  # no effect on those that got their reply
            run.touch(queue.members)

    async def _ask(self, contact: Contact, group: list[KeySearch], run: _Run) -> list[KeySearch]:
        """Ask one node for the keys of these searches; those to ask again, whose records did not fit in the reply."""
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        of_peers = all(search.of_peers for search in group)
        reply = await self._caller.call(contact, DhtFind([search.key for search in group], run.values, of_peers))
        run.answered(loop.time() - began)
        self._neighbours.led(run.named_by.get(contact.peer), to_answer=True)
        rest = self._check_shape(contact.peer, group, reply)
        taken = [(search, found) for search, found in zip(group, reply.found, strict=True) if not found.more]
        if run.values:
            await self.take_records(contact.peer, [(search, each) for search, found in taken for each in found.records])
        for search, found in taken:
            nearest = self._neighbours.worth_asking(found.nearest, loop.time(), namer=contact.peer)
            for each in nearest:
                run.named_by.setdefault(each.peer, contact.peer)
            search.lookup.reply(contact.peer, nearest)
        run.touch(group)
        return rest

    def _check_shape(self, peer: PeerID, group: list[KeySearch], reply: DhtFindReply) -> list[KeySearch]:
        """The searches that have to be asked again."""
        if len(reply.found) != len(group):
            raise self._lie(peer, f"{len(reply.found)} answers for {len(group)} keys")
        rest = [search for search, found in zip(group, reply.found, strict=True) if found.more]
        if len(rest) == len(group):
            raise self._lie(peer, "answers none of the keys it was asked for")
        return rest

    async def take_records(self, peer: PeerID, given: Iterable[tuple[Findings, Record]]) -> None:
        """Check the records that a node gave in one answer, and add them to the findings that they are for.

        Raises:
            PeerProtocolError: the node gave a record that no honest node holds.
        """
        now = self._env.clock.time()
        in_order = in_turns(given, _CHECKED_AT_ONCE, CHECKED_BYTES, lambda each: wire_bytes(each[1]))
        async for findings, record in in_order:
            if record.key != findings.key:
                raise self._lie(peer, "a record of another key")
            if findings.of_peers and not is_of_peer(record):
                raise self._lie(peer, "a record that no peer wrote under its own id, though only such were asked for")
            if not self._vault.timely(record, now) or not findings.improves(record):
                continue
            if forged := self._vault.forged(record):
                raise self._lie(peer, f"holds an invalid record: {forged}")
            if not self._vault.unwanted(record):
                findings.records[record.subkey] = record

    def _lie(self, peer: PeerID, what: str) -> PeerProtocolError:
        self._neighbours.lied(peer, asyncio.get_running_loop().time())
        self._env.events.emit(PeerDropped(peer=peer, where="dht", reason=what))
        return PeerProtocolError(what, peer)
