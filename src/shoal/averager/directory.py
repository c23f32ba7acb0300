"""How peers that look for a group, or share a state, find each other: dictionary records in the DHT.

=========================  ==========================================  ==========================================
key                        subkey: entry                               written by
=========================  ==========================================  ==========================================
``PREFIX.0bBITS``          peer id: addresses, or nil (withdrawn)      a peer that looks for a group
``PREFIX.all_averagers``   peer id: addresses and priority             a peer that shares its state
=========================  ==========================================  ==========================================

An entry whose subkey is a peer id can only be written by that peer (see `shoal.dht.validation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from shoal.dht import DhtNode
from shoal.errors import ConfigError, ShoalError
from shoal.peer import Address, PeerID
from shoal.rpc import Endpoint
from shoal.wire import Contact

__all__ = ["DhtDirectory", "declare_donor", "find_donors"]

_TOMBSTONE_S = 0.5
_READ_TIMEOUT_S = 5.0

_Addresses = Annotated[list[str], msgspec.Meta(max_length=8)]


class DhtDirectory:
    """The group directory that matchmaking asks for, kept in the DHT.

    Args:
        node: the DHT node.
        endpoint: tells our own contact.
    """

    def __init__(self, node: DhtNode, endpoint: Endpoint) -> None:
        self._node, self._endpoint = node, endpoint
        self._declared: dict[str, float] = {}

    async def declare(self, group_key: str, expiration: float, contact: Contact) -> None:
        """Say that this peer looks for a group until `expiration` (wall clock, seconds)."""
        self._declared[group_key] = max(expiration, self._declared.get(group_key, 0.0))
        addresses = [str(address) for address in contact.addresses]
        await self._node.store(group_key, addresses, expiration, contact.peer.raw, timeout_s=_READ_TIMEOUT_S)

    async def withdraw(self, group_key: str) -> None:
        """Take it back: an entry that expires later and says nothing."""
        expiration = self._declared.pop(group_key, None)
        if expiration is not None:
            own = self._endpoint.peer_id.raw
            await self._node.store(group_key, None, expiration + _TOMBSTONE_S, own, timeout_s=_READ_TIMEOUT_S)

    async def read(self, group_key: str) -> list[tuple[Contact, float]]:
        """Who looks for a group under this key now, and until when."""
        found = await self._node.get(group_key, latest=True, timeout_s=_READ_TIMEOUT_S)
        return [
            (Contact(peer, addresses), expiration)
            for peer, value, expiration in _entries(found.value if found else None)
            if value is not None and (addresses := _addresses(value, peer))
        ]


async def declare_donor(node: DhtNode, endpoint: Endpoint, prefix: str, priority: float, expiration: float) -> None:
    """Say that this peer shares its state under `prefix`."""
    addresses = [str(address) for address in endpoint.contact.addresses]
    value = [addresses, float(priority)]
    await node.store(f"{prefix}.all_averagers", value, expiration, endpoint.peer_id.raw, timeout_s=_READ_TIMEOUT_S)


async def find_donors(node: DhtNode, prefix: str, *, timeout_s: float) -> list[tuple[Contact, float]]:
    """Who shares a state under `prefix` now, with its priority; this peer itself left out."""
    found = await node.get(f"{prefix}.all_averagers", latest=True, timeout_s=timeout_s)
    donors = []
    for peer, value, _ in _entries(found.value if found else None):
        try:
            addresses, priority = msgspec.convert(value, tuple[_Addresses, float])
        except msgspec.ValidationError:
            continue  # another peer's malformed entry hides that peer only
        if peer != node.peer_id:
            donors.append((Contact(peer, _addresses(addresses, peer)), priority))
    return donors


def _entries(value: object) -> Iterator[tuple[PeerID, object, float]]:
    if isinstance(value, dict):
        for subkey, entry in value.items():
            try:
                yield PeerID(subkey), entry.value, entry.expiration_time
            except ShoalError:
                continue  # not an entry of a peer


def _addresses(value: object, peer: PeerID) -> tuple[Address, ...]:
    try:
        parsed = [Address.parse(text) for text in msgspec.convert(value, _Addresses)]
    except (msgspec.ValidationError, ConfigError):
        return ()
    return tuple(address for address in parsed if address.peer_id == peer)
