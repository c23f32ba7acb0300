"""Real peers behind real routers that translate addresses: who is reached, and what the others are told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.routers import HOME, Routers, why_not

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why_not()), reason=why_not())]

PEER = """
import json, sys, shoal
said = []
dht = shoal.DHT(sys.argv[1:], host_maddrs="/ip4/0.0.0.0/tcp/4000")
dht.events.subscribe(lambda event: said.append(event.message) if hasattr(event, "message") else None)
dht.run_in_background()
print(json.dumps([[str(each) for each in dht.get_visible_maddrs()], dht.client_mode, said]), flush=True)
sys.stdin.readline()
dht.shutdown()
"""


@contextmanager
def peer(net: Routers, home: int | None, *initial: str) -> Iterator[Any]:
    """A DHT on all interfaces, at a home or in public: its addresses, whether it is a client, and its warnings."""
    command = [*net.command(home), sys.executable, "-c", PEER, *initial]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def test_a_router_that_forwards_the_port_lets_its_peer_be_reached_and_another_makes_a_client() -> None:
    """A peer seen at its router's address announces that first; an unreached one announces nothing, and warns.

    No machine here has a default route but the homes, so the public one announces the address of its interface.
    """
    with Routers(2, forwarded=4000) as net, peer(net, None) as ((public,), client, said):
        assert public.startswith("/ip4/203.0.113.1/tcp/4000/")
        assert (client, said) == (False, [])
        with peer(net, 0, public) as (addresses, client, said), peer(net, 1, public) as hidden:
            assert [address.split("/")[2] for address in addresses] == ["203.0.113.2", HOME]
            assert (client, said) == (False, [])
            assert hidden[:2] == [[], True]
            (warning,) = hidden[2]
            assert "could not connect to this one at 203.0.113.3:4000" in warning
