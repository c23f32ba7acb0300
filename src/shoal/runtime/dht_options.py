"""Arguments of hivemind's `DHT` that have no counterpart here, so that programs written for it run as they are.

Most of these arguments only tune things that shoal does in its own way, or does not have: they change nothing and are
accepted with any value. Others ask, with some values, for something that shoal cannot do: these values are refused, and
the error says what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypedDict

from shoal.errors import ConfigError

__all__ = ["DhtOptions", "check_dht_options", "check_options", "is_false", "is_nothing"]


class DhtOptions(TypedDict, total=False):
    """Arguments of hivemind's `DHT`, `DHTNode.create` and `P2P.create`; `bootstrap_timeout` is `startup_timeout`."""

    p2p: object
    num_workers: int
    node_id: object
    bucket_size: int
    depth_modulo: int
    parallel_rpc: int | None
    wait_timeout: float
    refresh_timeout: float | None
    bootstrap_timeout: float | None
    cache_locally: bool
    cache_nearest: int
    cache_size: int | None
    cache_refresh_before_expiry: float
    cache_on_store: bool
    reuse_get_requests: bool
    chunk_size: int
    blacklist_time: float
    backoff_rate: float
    record_validator: object
    authorizer: object
    ensure_bootstrap_success: bool
    strict: bool
    auto_nat: bool
    conn_manager: bool
    dht_mode: str
    force_reachability: str | None
    idle_timeout: float
    nat_port_map: bool
    relay_hop_limit: int
    tls: bool
    use_auto_relay: bool
    use_ipfs: bool
    use_relay: bool
    persistent_conn_max_msg_size: int
    quic: bool | None
    use_relay_hop: bool | None
    use_relay_discovery: bool | None
    check_if_identity_free: bool
    no_listen: bool
    trusted_relays: Sequence[object] | None


def is_nothing(value: object) -> bool:
    """Whether an argument asks for nothing."""
    return value is None or value in ((), [], {})


def is_false(value: object) -> bool:
    """Whether an argument asks for something not to be done."""
    return not value


def _true(value: object) -> bool:
    return bool(value)


_RELAYS = "no peer relays for others here: forward a port and give announce_maddrs, or set client_mode=True"

_DHT: dict[str, tuple[Callable[[object], bool], str]] = {
    "p2p": (is_nothing, "there is no daemon to share: several averagers can share one DHT"),
    "node_id": (is_nothing, "a node's place follows from its identity: give identity_path"),
    "cache_locally": (_true, "get(key, latest=True) asks the others each time"),
    "record_validator": (is_nothing, "give record_validators"),
    "authorizer": (is_nothing, "shoal does not restrict yet which peers may join"),
    "ensure_bootstrap_success": (
        _true,
        "a peer that reaches nobody would be alone: leave initial_peers out to begin alone",
    ),
    "dht_mode": (lambda value: value in ("server", "auto"), "set client_mode=True for a peer that only dials"),
    "force_reachability": (
        is_nothing,
        "give announce_maddrs if others can reach this peer, set client_mode=True if they cannot",
    ),
    "tls": (_true, "encrypt=False turns encryption off"),
    "use_auto_relay": (is_false, _RELAYS),
    "use_ipfs": (is_false, "there is no public network to join by: give initial_peers"),
    "no_listen": (is_false, "set client_mode=True"),
    "trusted_relays": (is_nothing, _RELAYS),
}


def check_dht_options(options: DhtOptions) -> None:
    """Raise for options of `DHT` that shoal cannot offer.

    Raises:
        ConfigError: an option asks for something that does not exist here; the message says what to use instead.
        TypeError: hivemind has no such argument either.
    """
    check_options("DHT", DhtOptions.__annotations__, options, _DHT)


def check_options(
    kind: str,
    known: Mapping[str, object],
    options: Mapping[str, object],
    asking: Mapping[str, tuple[Callable[[object], bool], str]],
) -> None:
    """Raise for options that a class of hivemind's has, and its namesake here cannot offer.

    Args:
        kind: the class.
        known: the options that it takes, by name.
        options: as given.
        asking: for some of them, which values are harmless, and what to use instead of others.

    Raises:
        ConfigError: an option asks for something that does not exist here; the message says what to use instead.
        TypeError: hivemind has no such argument either.
    """
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}")
        is_harmless, instead = asking.get(name, (lambda _: True, ""))
        harmless = False
        with suppress(Exception):  # tensors and arrays of several values are neither true nor false
            harmless = is_harmless(value)
        if not harmless:
            raise ConfigError(f"{name}={value!r:.80} has no counterpart in shoal: {instead}")
