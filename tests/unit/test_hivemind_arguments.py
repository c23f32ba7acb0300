"""Programs written for hivemind 1.1.12: its arguments, each with its default, and what other values do here."""

from __future__ import annotations

from typing import Any

import pytest

import shoal
from shoal.errors import ConfigError
from shoal.runtime.hivemind import DhtOptions

DHT = {
    "initial_peers": None,
    "p2p": None,
    "daemon": True,
    "num_workers": 4,
    "record_validators": (),
    "shutdown_timeout": 3,
    "await_ready": True,
}
"""Of `hivemind.DHT`; `start` has none."""

NODE = {
    "node_id": None,
    "bucket_size": 20,
    "num_replicas": 5,
    "depth_modulo": 5,
    "parallel_rpc": None,
    "wait_timeout": 3,
    "refresh_timeout": None,
    "bootstrap_timeout": None,
    "cache_locally": True,
    "cache_nearest": 1,
    "cache_size": None,
    "cache_refresh_before_expiry": 5,
    "cache_on_store": True,
    "reuse_get_requests": True,
    "chunk_size": 16,
    "blacklist_time": 5.0,
    "backoff_rate": 2.0,
    "client_mode": False,
    "record_validator": None,
    "authorizer": None,
    "ensure_bootstrap_success": True,
    "strict": True,
}
"""Of `DHTNode.create`, which `DHT` hands its further arguments to."""

P2P = {
    "announce_maddrs": None,
    "auto_nat": True,
    "conn_manager": True,
    "dht_mode": "server",
    "force_reachability": None,
    "host_maddrs": ("/ip4/127.0.0.1/tcp/0",),
    "identity_path": None,
    "idle_timeout": 30,
    "nat_port_map": True,
    "relay_hop_limit": 0,
    "startup_timeout": 15,
    "tls": True,
    "use_auto_relay": False,
    "use_ipfs": False,
    "use_relay": True,
    "persistent_conn_max_msg_size": 4 << 20,
    "quic": None,
    "use_relay_hop": None,
    "use_relay_discovery": None,
    "check_if_identity_free": True,
    "no_listen": False,
    "trusted_relays": None,
}
"""Of `P2P.create`, which the node hands its own to."""

ALL_OF_DHT: dict[str, Any] = DHT | NODE | P2P


def test_every_default_of_a_dht_is_taken() -> None:
    """Alone, and all at once; the table and the options that `DHT` takes for hivemind's sake are one list."""
    for name, value in ALL_OF_DHT.items():
        shoal.DHT(start=False, **{name: value})
    shoal.DHT(start=False, **ALL_OF_DHT)
    assert DhtOptions.__annotations__.keys() < ALL_OF_DHT.keys()


@pytest.mark.parametrize("given", [{"host_maddrs": None}, {"use_ipfs": False}, {"num_workers": 4}, {"num_workers": 16}])
def test_arguments_that_change_nothing_are_refused(given: dict[str, Any]) -> None:
    """Not any more."""
    shoal.DHT(None, start=False, **given)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"p2p": object()}, "share one DHT"),
        ({"node_id": 5}, "identity_path"),
        ({"bootstrap_timeout": 10}, "startup_timeout"),
        ({"cache_locally": False}, "latest=True"),
        ({"record_validator": object()}, "record_validators"),
        ({"authorizer": object()}, "not restricted yet"),
        ({"ensure_bootstrap_success": False}, "initial_peers"),
        ({"dht_mode": "client"}, "client_mode=True"),
        ({"force_reachability": "private"}, "client_mode=True"),
        ({"tls": False}, "encrypt=False"),
        ({"use_auto_relay": True}, "announce_maddrs"),
        ({"use_ipfs": True}, "initial_peers"),
        ({"no_listen": True}, "client_mode=True"),
        ({"trusted_relays": ["/ip4/192.0.2.7/tcp/1"]}, "announce_maddrs"),
    ],
)
def test_what_does_not_exist_here_is_refused_with_what_does(given: dict[str, Any], instead: str) -> None:
    """A ConfigError that names the argument and what to give in its place."""
    ((name, _),) = given.items()
    with pytest.raises(ConfigError, match=f"^{name}=.* has no counterpart in shoal: .*{instead}"):
        shoal.DHT(start=False, **given)


def test_a_misspelt_argument_is_no_option() -> None:
    """As Python says it."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_worker'"):
        shoal.DHT(start=False, num_worker=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("argument", ["host_maddrs", "announce_maddrs"])
def test_listening_by_quic_too_is_skipped(argument: str, caplog: pytest.LogCaptureFixture) -> None:
    """As hivemind's documentation gives it: TCP and QUIC. Two places by TCP are one too many."""
    both = ["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic"]
    given: dict[str, Any] = {argument: both}
    shoal.DHT(start=False, **given)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert argument in record.getMessage()
    assert "not /ip4/0.0.0.0/udp/0/quic" in record.getMessage()
    given = {argument: [*both, "/ip4/192.0.2.7/tcp/0"]}
    with pytest.raises(ConfigError, match=f"{argument} must be one address, got 2"):
        shoal.DHT(start=False, **given)


def test_a_useless_initial_peer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It names the address."""
    peer = shoal.DHT(start=False).peer_id
    good, useless = f"/ip4/192.0.2.7/tcp/4000/p2p/{peer}", f"/ip4/192.0.2.7/udp/4000/quic/p2p/{peer}"
    shoal.DHT([useless, good], start=False)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert useless in record.getMessage()
