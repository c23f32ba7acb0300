"""The state that the parts of one DHT node share: its identity, surroundings, neighbours and records."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.clock import Env
from shoal.dht.neighbours import Neighbours
from shoal.dht.settings import DhtSettings
from shoal.dht.vault import Vault
from shoal.peer import PeerID

__all__ = ["Local"]


@dataclass(frozen=True, slots=True)
class Local:
    """The state of one node.

    Attributes:
        own: this node.
        env: clock, chance and events.
        settings: everything that can be set.
        neighbours: the knowledge of the other nodes.
        vault: all records here.
    """

    own: PeerID
    env: Env
    settings: DhtSettings
    neighbours: Neighbours
    vault: Vault
