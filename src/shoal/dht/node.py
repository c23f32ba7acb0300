"""One node of the distributed hash table: the async core behind `shoal.DHT`.

Kademlia (Maymounkov and Mazieres 2002) with records that expire, dictionaries whose entries expire one by one, and
signatures. The parts: `routing`, `lookup` and `storage` decide, without I/O; `crawl` and `publish` call other nodes;
`service` answers them; `upkeep` works in the background; this module checks arguments and puts them together.

Rules:

- Every public method ends within its `timeout_s`, and answers with its results so far. Peers that fail, lie or stall
  make answers poorer, but never raise an exception here. Only wrong arguments, and use after `close`, raise.
- A node without addresses (client mode) stores and gets, but holds nothing for others and is in nobody's table.
- `get` may miss a value that was stored a moment ago elsewhere; `get(latest=True)` asks all nodes that should hold the
key.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from shoal.base.clock import Env
from shoal.base.peer import Address, PeerID
from shoal.dht.crawl import Caller, Crawler, Findings, KeySearch
from shoal.dht.joining import Knocking, contacts_of, is_here
from shoal.dht.local import DhtSettings, Local, Vault
from shoal.dht.neighbours import Neighbours
from shoal.dht.publish import Publisher, StoreAndFind
from shoal.dht.routing import key_of, node_id
from shoal.dht.service import Service
from shoal.dht.storage import ValueWithExpiration, value_of
from shoal.dht.upkeep import Upkeep
from shoal.dht.validation import CompositeValidator, RecordValidator, Subkey, encode_subkey, encode_value, signed_record
from shoal.errors import ClosedError, ConfigError, PeerUnreachable
from shoal.events import Warned
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Contact, Record
from shoal.rpc import Endpoint

__all__ = ["DhtNode", "Found", "Item"]

Key = str | bytes


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to store. See `DhtNode.store`."""

    key: Key
    value: object
    expiration_time: float
    subkey: Subkey | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a lookup.

    Attributes:
        nodes: the nearest nodes that answered, nearest first.
        hops: calls in a row that led to the nearest of them.
        queries: calls made in all.
    """

    nodes: tuple[Contact, ...]
    hops: int
    queries: int


class DhtNode:
    """One node of the DHT. Make it when the endpoint has started; loop thread only.

    Args:
        endpoint: carries its calls. Not closed by `close`.
        env: clock and chance.
        identity: signs what this node writes; the endpoint's own.
        settings: everything that can be set; see `DhtSettings`.
        validators: further rules for records, beside signatures; see `shoal.dht.validation`.

    Raises:
        ConfigError: the identity is not the endpoint's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        env: Env,
        identity: Identity,
        *,
        settings: DhtSettings | None = None,
        validators: Iterable[RecordValidator] = (),
    ) -> None:
        if identity.peer_id != endpoint.peer_id:
            raise ConfigError(f"identity is {identity.peer_id}, but the endpoint is {endpoint.peer_id}")
        own = endpoint.peer_id
        self.settings = settings = settings or DhtSettings()
        self._endpoint, self._env, self._identity = endpoint, env, identity
        self._validators = CompositeValidator(validators)
        self._vault = Vault(own, settings, self._validators)
        self._neighbours = Neighbours(own, bucket_size=settings.bucket_size)
        local = Local(own, env, settings, self._neighbours, self._vault)
        self._caller = Caller(endpoint, local)
        self._crawler = Crawler(self._caller, local)
        self._publisher = Publisher(self._caller, self._crawler, local)
        self._upkeep = Upkeep(local, self._caller, self._crawler, self._publisher)
        self._service = Service(endpoint, local)
        self._turn = asyncio.Semaphore(settings.parallel_operations)
        self._unsubscribe = endpoint.on_lost(self._peer_lost), endpoint.on_linked(self._peer_linked)
        self._closed = False

    # ------------------------------------------------------------------------------------------------------ what we are

    @property
    def peer_id(self) -> PeerID:
        """This node's identity."""
        return self._endpoint.peer_id

    @property
    def client_mode(self) -> bool:
        """Whether this node only dials: it has no address where others could reach it."""
        return self._caller.client_mode

    @property
    def neighbours(self) -> int:
        """How many nodes are in the routing table."""
        return len(self._neighbours.table)

    @property
    def records_held(self) -> int:
        """How many records this node holds for others."""
        return len(self._vault.held)

    @property
    def calls_made(self) -> int:
        """How many calls this node has made to others."""
        return self._caller.calls

    def _peer_lost(self, peer: PeerID, _: str) -> None:
        self._neighbours.unreachable(peer, asyncio.get_running_loop().time())

    def _peer_linked(self, peer: PeerID) -> None:
        if (lost := self._neighbours.linked(peer)) is not None:
            self._upkeep.ask(lost)

    def add_validators(self, *validators: RecordValidator) -> None:
        """Apply further rules to records from now on."""
        self._validators.add(*validators)

    # ---------------------------------------------------------------------------------------------------------- joining

    async def bootstrap(
        self,
        addresses: Iterable[Address],
        *,
        timeout_s: float | None = None,
        required: bool = True,
        patient: bool = True,
    ) -> None:
        """Join the network of the peers at these addresses; without addresses, begin a new one.

        Tries all at once, again and again while nobody answers, and goes on as soon as one does. The others are tried
        in the background for as long as the node lives.

        Args:
            addresses: where initial peers listen. One that is this node itself is left out; if all are, a new network
                begins.
            timeout_s: seconds until it is given up; default `settings.timeout_s`.
            required: False begins a new network if nobody answers, with a warning, and keeps trying.
            patient: False gives up within about three seconds if no program listens at any of the addresses.

        Raises:
            ConfigError: all addresses are those of another program that has this node's identity, too.
            PeerUnreachable: nobody answered; names every address and what went wrong there.
        """
        self._check_open()
        limit_s = self._limit_s(timeout_s)
        addresses = list(addresses)
        contacts = contacts_of(addresses, without=self.peer_id)
        if addresses and not contacts and not await is_here(self._endpoint, addresses, timeout_s=limit_s):
            raise ConfigError(
                f"initial_peers: {addresses[0]} has the identity of this peer itself, and another program listens "
                "there, or none. Programs that run at a time cannot share an identity file: give this one another "
                "identity_path (identity), or none. If that program has ended, leave initial_peers (invite) out, or "
                "listen at its port (host_maddrs)"
            )
        for address in [each for contact in contacts for each in contact.addresses]:
            self._endpoint.dials.prove(address.host)
        self._upkeep.start()
        if not contacts:
            return
        self._neighbours.always_remember(contacts)
        knocking = Knocking(contacts, self._caller, self._env.rng, self._upkeep.look_around, patient=patient)
        await knocking.join(limit_s)
        self._check_open()
        try:
            knocking.check()
        except PeerUnreachable as error:
            if required:
                raise
            message = f"{error}; this peer begins alone, and keeps trying to reach them"
            self._env.events.emit(Warned(where="DHT", message=message))
            self._neighbours.on_change()

    def contacts(self, count: int) -> list[Contact]:
        """Addresses to join by after a restart: of recently seen nodes, the nearest ones, and initial peers."""
        known = self._neighbours.table.nearest(node_id(self.peer_id), count)
        return [*known, *self._neighbours.missing_initial()][:count]

    @property
    def initial_peers(self) -> list[Contact]:
        """The peers that this node was given when it began."""
        return list(self._neighbours.initial.values())

    async def look_around(self) -> None:
        """Look up this node's own id: so it and its neighbours learn of each other, and they learn its addresses."""
        self._check_open()
        await self._upkeep.look_around()

    async def find_lost(self) -> None:
        """Ask a few of the nodes that were lost, and of the initial peers that are missing, whether they are there."""
        self._check_open()
        await self._upkeep.retry_lost()

    # ---------------------------------------------------------------------------------------------------------- storing

    async def store(
        self,
        key: Key,
        value: object,
        expiration_time: float,
        subkey: Subkey | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bool:
        """Store a value, or with `subkey` one entry of a dictionary, until `expiration_time`.

        While this node lives it renews its own records. Of two values for one key (and subkey) the one that expires
        later wins. An entry whose subkey is the 32 bytes of a peer's id can only be written by that peer.

        Args:
            key: any text or bytes.
            value: anything that MessagePack can hold, up to 64 KiB encoded; lists and dictionaries at most 256 deep.
            expiration_time: wall-clock time, seconds, at most an hour ahead (`settings.storage.lifetime_s`).
            subkey: text, bytes or an integer; None for a plain value.
            timeout_s: longest time; default `settings.timeout_s`.

        Returns:
            Whether at least one node holds it now. False if it has expired, if the nodes hold a later value, if
            validators refuse it (this node's own: with a warning), or if no node could be reached in time.

        Raises:
            ConfigError: an argument is wrong; says which and why.
            ClosedError: the node was closed.
        """
        return (await self.store_many([Item(key, value, expiration_time, subkey)], timeout_s=timeout_s))[0]

    async def store_many(self, items: Sequence[Item], *, timeout_s: float | None = None) -> list[bool]:
        """Store many things at once, with one call per node for all that it should hold. As `store`, for each."""
        self._check_open()
        records = [self._record(item) for item in items]
        copies = [0] * len(records)
        now = self._env.clock.time()
        # Of several items for one slot the one that wins is sent; the others lost already.
        slots: dict[tuple[bytes, bytes | None], int] = {}
        for number, (item, record) in enumerate(zip(items, records, strict=True)):
            if refusal := self._refusal(item, record):
                self._env.events.emit(Warned(where="DHT", message=refusal))
                continue
            before = slots.get((record.key, record.subkey))
            if record.expiration > now and (before is None or records[before].expiration <= record.expiration):
                slots[record.key, record.subkey] = number
        numbers = list(slots.values())
        sent = [0] * len(numbers)
        await self._operate(self._publisher.publish([records[number] for number in numbers], sent), timeout_s)
        for number, count in zip(numbers, sent, strict=True):
            copies[number] = count
            if count:
                self._vault.wrote(records[number], self._env.clock.time())
        return [count > 0 for count in copies]

    async def exchange(self, item: Item, *, timeout_s: float | None = None) -> tuple[bool, ValueWithExpiration | None]:
        """Store one thing, and get the records under its key from the nodes that take it, in one call to each node.

        Each node takes the record before it answers. So if two peers exchange under one key and reach the same honest
        node, at least one is shown the other's record. Once a node has answered, silent ones are waited for no longer
        than `settings.slow_s`.

        Args:
            item: the thing to store; see `store`.
            timeout_s: longest time; default `settings.timeout_s`.

        Returns:
            The results of `store` and of `get(latest=True)`, with `of_peers` if the entry is under our own id.

        Raises:
            ConfigError: as `store`; or this node's own validators refuse it.
            ClosedError: the node was closed.
        """
        self._check_open()
        record = self._record(item)
        if refusal := self._refusal(item, record):
            raise ConfigError(refusal)
        exchange = StoreAndFind(record, of_peers=item.subkey == self.peer_id)
        await self._operate(self._publisher.exchange(exchange), timeout_s)
        now = self._env.clock.time()
        if stored := exchange.copies[0] > 0:
            self._vault.wrote(exchange.record, now)
        return stored, await self._value_of(self._all_known(exchange, now), now, of_peers=exchange.of_peers)

    def _record(self, item: Item) -> Record:
        key = key_of(_checked_key(item.key))
        expiration = item.expiration_time
        if isinstance(expiration, bool) or not isinstance(expiration, Real) or not math.isfinite(expiration):
            raise ConfigError(f"expiration_time must be a time in seconds, got {expiration!r}")
        most = self.settings.storage.lifetime_s
        ahead = expiration - self._env.clock.time()
        if ahead > most:
            raise ConfigError(
                f"expiration_time is {ahead:.0f} s ahead, the most is {most:g} s: store again before it ends"
            )
        subkey = None if item.subkey is None else encode_subkey(item.subkey)
        if isinstance(item.subkey, bytes) and len(item.subkey) == 32 and item.subkey != self.peer_id:
            raise ConfigError(
                "subkey is 32 bytes, so it names a peer, and not this one: only that peer can write the entry"
            )
        return signed_record(self._identity, key, subkey, encode_value(item.value), float(expiration))

    def _refusal(self, item: Item, record: Record) -> str:
        """The objection of this node's own validators to a record that it should store; empty if there is none."""
        refusal = self._validators.refuses(record)
        return refusal and f"value for key {item.key!r:.80} is refused by this node's own validators: {refusal}"

    # ---------------------------------------------------------------------------------------------------------- getting

    async def get(
        self, key: Key, *, latest: bool = False, of_peers: bool = False, timeout_s: float | None = None
    ) -> ValueWithExpiration | None:
        """The value of a key, with its expiration; None if nothing was found.

        Args:
            key: the key that was given to `store`.
            latest: True asks all nodes that should hold the key and merges their answers. False takes the first answer,
                which may be a record that this node holds, wrote, or found within `settings.cache_s`.
            of_peers: return only the entries of the dictionary that peers wrote under their own ids. Anybody can write
                other entries, or a plain value that hides the dictionary. Entries above `PEER_ENTRY_BYTES` are passed
                over.
            timeout_s: longest time; default `settings.timeout_s`.

        Returns:
            A plain value, or for a dictionary `{subkey: ValueWithExpiration}`, with the expiration of its last entry.
            Nothing in it had expired when it was returned.

        Raises:
            ConfigError: the key is neither text nor bytes.
            ClosedError: the node was closed.
        """
        return (await self.get_many([key], latest=latest, of_peers=of_peers, timeout_s=timeout_s))[key]

    async def get_many(
        self, keys: Iterable[Key], *, latest: bool = False, of_peers: bool = False, timeout_s: float | None = None
    ) -> Mapping[Key, ValueWithExpiration | None]:
        """The values of many keys, with one call per node for all keys that lead to it. As `get`, for each."""
        self._check_open()
        names = {key: key_of(_checked_key(key)) for key in keys}
        now, at = self._env.clock.time(), asyncio.get_running_loop().time()
        shown: dict[bytes, ValueWithExpiration | None] = {}
        searches: dict[bytes, KeySearch] = {}
        for name in names.values():
            at_hand = [] if latest else self._vault.at_hand(name, now, at)
            shown[name] = await self._value_of(at_hand, now, of_peers=of_peers)
            if shown[name] is None:
                searches[name] = self._crawler.search(name, first=not latest, of_peers=of_peers)
        if searches:
            await self._operate(self._crawler.find_values(list(searches.values())), timeout_s)
        now = self._env.clock.time()
        for name, search in searches.items():
            shown[name] = await self._value_of(self._all_known(search, now), now, of_peers=of_peers)
        return {key: shown[name] for key, name in names.items()}

    async def _value_of(self, records: Sequence[Record], now: float, *, of_peers: bool) -> ValueWithExpiration | None:
        nbytes = sum(len(each.value) + len(each.subkey or b"") for each in records)
        return await self._env.read(nbytes, partial(value_of, of_peers=of_peers), records, now)

    def _all_known(self, findings: Findings, now: float) -> list[Record]:
        """The records found under a key, which are kept for a while, together with the records held here."""
        found = list(findings.records.values())
        if found:
            at = asyncio.get_running_loop().time()
            self._vault.found(findings.key, found, now, at, of_peers=findings.of_peers)
        return [*found, *self._vault.known(findings.key, now)]

    # ---------------------------------------------------------------------------------------------------------- looking

    async def nearest(self, key: Key, count: int | None = None, *, timeout_s: float | None = None) -> Found:
        """Look up the nodes nearest to a key, without asking for records.

        Args:
            key: text or bytes.
            count: how many; default `settings.replicas`.
            timeout_s: longest time; default `settings.timeout_s`.
        """
        self._check_open()
        search = self._crawler.search(key_of(_checked_key(key)), count=count)
        await self._operate(self._crawler.run([search], values=False), timeout_s)
        return Found(tuple(search.lookup.nearest), search.lookup.hops, search.lookup.queries)

    # ---------------------------------------------------------------------------------------------------------- closing

    async def close(self) -> None:
        """Stop all work. Operations under way return what they have. The endpoint stays open. Safe to call twice."""
        self._closed = True
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._service.close()
        await self._caller.tasks.cancel()

    def _check_open(self) -> None:
        if self._closed or self._endpoint.closed:
            raise ClosedError("this DHT node was closed")

    def _limit_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.settings.timeout_s
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s!r}")
        return timeout_s

    async def _operate(self, work: Coroutine[Any, Any, None], timeout_s: float | None) -> None:
        """Wait in line, then work, both within the time limit. After it, the work done so far counts."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limit_s(timeout_s)), self._turn:
                    await work
        finally:
            work.close()  # its turn may not have come
        self._check_open()


def _checked_key(key: Key) -> Key:
    if not isinstance(key, str | bytes):
        raise ConfigError(f"key must be str or bytes, got {type(key).__name__}")
    return key
