"""How peers that look for a group, or share a state, find each other: dictionary records in the DHT.

=========================  ==========================================  ==========================================
key                        subkey: entry                               written by
=========================  ==========================================  ==========================================
``PREFIX.0bBITS``          peer id: addresses and until when, or nil   a peer that looks for a group
``PREFIX.all_averagers``   peer id: addresses and priority             a peer that shares its state
=========================  ==========================================  ==========================================

An entry whose subkey is a peer id can only be written by that peer (see `shoal.dht.validation`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.base.bounded import put_last
from shoal.base.peer import Address, PeerID
from shoal.base.tasks import in_turns
from shoal.dht import DhtNode, Item, ValueWithExpiration
from shoal.errors import ConfigError, PeerUnreachable, ShoalError
from shoal.protocol.wire import Contact
from shoal.rpc import Endpoint

__all__ = ["DhtDirectory", "declare_donor", "find_donors"]

_KEEP_S = 5.0
"""Entries outlive the window that they announce: clocks differ, and readers judge for themselves."""

_DONOR_TIMEOUT_S = 5.0
"""The longest time for a donor's declaration."""

_READ_AT_ONCE = 16
"""Entries that are read in one turn of the loop."""

_Addresses = Annotated[list[Annotated[str, msgspec.Meta(max_length=400)]], msgspec.Meta(max_length=8)]
_Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class DhtDirectory:
    """The group directory that matchmaking asks for, kept in the DHT.

    In the DHT the entry that expires later wins, so each entry of ours is given a later record expiration than the one
    before it, whatever window it announces: the last call wins.

    Args:
        node: the DHT node.
        endpoint: tells our own contact.
        timeout_s: after this time, only results found so far count. It is less than matchmaking waits for the
            directory, so that a node that does not answer costs time and not the whole read.
    """

    def __init__(self, node: DhtNode, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._node, self._endpoint, self._timeout_s = node, endpoint, timeout_s
        self._last: dict[str, float] = {}

    async def declare(self, group_key: str, expiration: float, contact: Contact) -> list[tuple[Contact, float]]:
        """Say that this peer looks for a group until `expiration` (wall clock, seconds); returns the others that do."""
        entry = [[str(address) for address in contact.addresses], expiration]
        stored, found = await self._node.exchange(self._item(group_key, entry, expiration), timeout_s=self._timeout_s)
        if not stored:
            raise PeerUnreachable("no DHT node took the declaration")
        return await _entries(found)

    async def withdraw(self, group_key: str) -> None:
        """Take the entry back, by an empty one."""
        if (last := self._last.get(group_key)) is not None:
            item = self._item(group_key, None, last - _KEEP_S)
            if not (await self._node.store_many([item], timeout_s=self._timeout_s))[0]:
                raise PeerUnreachable("no DHT node took the withdrawal")

    def _item(self, group_key: str, value: object, expiration: float) -> Item:
        record_expiration = max(expiration + _KEEP_S, self._last.get(group_key, 0.0) + 0.001)
        put_last(self._last, group_key, record_expiration, 64)
        return Item(group_key, value, record_expiration, self._endpoint.peer_id)

    async def read(self, group_key: str) -> list[tuple[Contact, float]]:
        """The peers that look for a group under this key now, and until when."""
        return await _entries(await self._node.get(group_key, latest=True, of_peers=True, timeout_s=self._timeout_s))


async def declare_donor(node: DhtNode, endpoint: Endpoint, prefix: str, priority: float, expiration: float) -> None:
    """Say that this peer shares its state under `prefix`.

    Args:
        node: the DHT node.
        endpoint: tells our own contact.
        prefix: which state.
        priority: donors with a higher one are asked first.
        expiration: until when this holds, wall clock, seconds.

    Raises:
        PeerUnreachable: no DHT node took it.
        ConfigError: the DHT does not keep a record for so long.
    """
    addresses = [str(address) for address in endpoint.contact.addresses]
    value = [addresses, float(priority)]
    key, me = f"{prefix}.all_averagers", endpoint.peer_id
    if not await node.store(key, value, expiration, me, timeout_s=_DONOR_TIMEOUT_S):
        raise PeerUnreachable("no DHT node took the declaration of a donor")


async def find_donors(node: DhtNode, prefix: str, *, timeout_s: float) -> list[tuple[Contact, float]]:
    """The peers that share a state under `prefix` now, with their priorities, without this peer itself."""
    found = await node.get(f"{prefix}.all_averagers", latest=True, of_peers=True, timeout_s=timeout_s)
    return [each for each in await _entries(found) if each[0].peer != node.peer_id]


async def _entries(found: ValueWithExpiration | None) -> list[tuple[Contact, float]]:
    """The entries of peers, each a contact and a number; those that were taken back or are malformed are left out."""
    entries = []
    items = found.value.items() if found is not None and isinstance(found.value, dict) else ()
    async for subkey, entry in in_turns(items, _READ_AT_ONCE):
        try:
            peer, (addresses, number) = PeerID(subkey), msgspec.convert(entry.value, tuple[_Addresses, _Number])
        except (ShoalError, msgspec.ValidationError):
            continue  # it hides that peer only
        entries.append((Contact(peer, _addresses(addresses, peer)), number))
    return entries


def _addresses(texts: list[str], peer: PeerID) -> tuple[Address, ...]:
    try:
        parsed = [Address.parse(text) for text in texts]
    except ConfigError:
        return ()
    return tuple(address for address in parsed if address.peer_id == peer)
