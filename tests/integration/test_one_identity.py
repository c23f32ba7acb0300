"""Two programs with one key: an error for one that the other has invited; else a neighbour tells both."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.base.peer import Address
from shoal.events import Event, Warned


def free_port(*hosts: str) -> int:
    """A port that no program has at any of these hosts."""
    sockets = [socket.socket() for _ in hosts]
    try:
        sockets[0].bind((hosts[0], 0))
        port: int = sockets[0].getsockname()[1]
        for other, host in zip(sockets[1:], hosts[1:], strict=True):
            other.bind((host, port))
        return port
    finally:
        for each in sockets:
            each.close()


@pytest.mark.parametrize("place", ["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.2/tcp/{port}"])
def test_two_programs_with_one_key_file_trained_alone_and_nobody_said_so(tmp_path: Path, place: str) -> None:
    """Whether the second one listens at a port of its own, or on another machine at the same one."""
    port, key = free_port("127.0.0.1", "127.0.0.2"), tmp_path / "peer.key"
    with shoal.DHT(host_maddrs=f"/ip4/127.0.0.1/tcp/{port}", identity_path=key, start=True) as first:
        second = shoal.DHT(first.invite(), host_maddrs=place.format(port=port), identity_path=key)
        with pytest.raises(shoal.ConfigError, match=r"initial_peers: .* cannot share an identity file"):
            second.run_in_background()
        with pytest.raises(shoal.ConfigError, match="cannot share an identity file"):
            shoal.DHT(first.invite(), identity_path=key, client_mode=True, start=True)
        with shoal.DHT(first.invite(), identity_path=tmp_path / "other.key", start=True):
            pass


def test_a_peer_that_starts_again_with_its_own_invite_begins_a_network(tmp_path: Path) -> None:
    """Its port is fixed. Its host may be a public one that this machine does not know for its own."""
    port, key = free_port("127.0.0.1", "127.0.0.2"), tmp_path / "peer.key"
    options: dict[str, Any] = {"host_maddrs": f"/ip4/127.0.0.1/tcp/{port}", "identity_path": key, "start": True}
    with shoal.DHT(**options) as first:
        invite, own = first.invite(), first.peer_id
    for way_in in (invite, Address("127.0.0.2", port, own)):
        with shoal.DHT(way_in, **options) as again:
            assert again.peer_id == own
    every = f"/ip4/0.0.0.0/tcp/{port}"
    with shoal.DHT(Address("127.0.0.2", port, own), host_maddrs=every, identity_path=key, start=True) as again:
        assert again.peer_id == own, "it is reached there, and it is itself"


@pytest.mark.parametrize("client_mode", [False, True])
def test_two_programs_with_copies_of_one_key_were_not_told(tmp_path: Path, *, client_mode: bool) -> None:
    """They are on two machines, and know nothing of each other. A peer that both are connected with tells them."""
    key, copy = tmp_path / "peer.key", tmp_path / "copy.key"
    with shoal.DHT(start=True) as hub, shoal.DHT(hub.invite(), identity_path=key) as first:
        shutil.copy(key, copy)
        with shoal.DHT(hub.invite(), identity_path=copy, client_mode=client_mode) as second:
            told = [threading.Event(), threading.Event()]
            for dht, heard in zip((first, second), told, strict=True):
                dht.events.subscribe(into(heard))
                dht.run_in_background()
            assert all(heard.wait(20.0) for heard in told)


def into(heard: threading.Event) -> Callable[[Event], None]:
    """A subscriber that sets this once it is told that another process has the same identity."""
    said = "another process has this peer's identity"
    return lambda event: heard.set() if isinstance(event, Warned) and said in event.message else None
