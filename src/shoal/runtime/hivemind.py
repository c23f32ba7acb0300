"""Arguments of hivemind 1.1.12 that have no counterpart here, so that programs written for it run as they are.

Most of these arguments only tune things that shoal does in its own way, or does not have: they change nothing and are
accepted with any value. Others ask, with some values, for something that shoal cannot do: these values are refused, and
the error says what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypedDict

from shoal.errors import ConfigError

__all__ = [
    "DhtOptions",
    "OptimizerOptions",
    "StateAveragerOptions",
    "TrackerOptions",
    "check_dht_options",
    "check_optimizer_options",
    "check_state_averager_options",
    "check_tracker_options",
]


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


class OptimizerOptions(TypedDict, total=False):
    """Arguments of hivemind's `Optimizer`."""

    delay_optimizer_step: bool | None
    average_opt_statistics: Sequence[str]
    tracker_opts: Mapping[str, object] | None
    performance_ema_alpha: float


class StateAveragerOptions(TypedDict, total=False):
    """Arguments of hivemind's `TrainingStateAverager` and of its `step`."""

    custom_gradients: bool
    reuse_tensors: bool | None
    delay_optimizer_step: bool
    performance_ema_alpha: float
    status_loglevel: int


class TrackerOptions(TypedDict, total=False):
    """Arguments of hivemind's `ProgressTracker`."""

    min_refresh_period: float
    max_refresh_period: float
    default_refresh_period: float
    expected_drift_peers: float
    expected_drift_rate: float
    performance_ema_alpha: float
    metadata_expiration: float
    status_loglevel: int
    private_key: object
    daemon: bool


def _nothing(value: object) -> bool:
    return value is None or value in ((), [], {})


def _false(value: object) -> bool:
    return not value


def _true(value: object) -> bool:
    return bool(value)


_RELAYS = "no peer relays for others here: forward a port and give announce_maddrs, or set client_mode=True"

_DHT: dict[str, tuple[Callable[[object], bool], str]] = {
    "p2p": (_nothing, "there is no daemon to share: several averagers can share one DHT"),
    "node_id": (_nothing, "a node's place follows from its identity: give identity_path"),
    "cache_locally": (_true, "get(key, latest=True) asks the others each time"),
    "record_validator": (_nothing, "give record_validators"),
    "authorizer": (_nothing, "shoal does not restrict yet which peers may join"),
    "ensure_bootstrap_success": (
        _true,
        "a peer that reaches nobody would be alone: leave initial_peers out to begin alone",
    ),
    "dht_mode": (lambda value: value in ("server", "auto"), "set client_mode=True for a peer that only dials"),
    "force_reachability": (
        _nothing,
        "give announce_maddrs if others can reach this peer, set client_mode=True if they cannot",
    ),
    "tls": (_true, "encrypt=False turns encryption off"),
    "use_auto_relay": (_false, _RELAYS),
    "use_ipfs": (_false, "there is no public network to join by: give initial_peers"),
    "no_listen": (_false, "set client_mode=True"),
    "trusted_relays": (_nothing, _RELAYS),
}


_STATE_AVERAGER: dict[str, tuple[Callable[[object], bool], str]] = {
    "custom_gradients": (_false, "the optimizer steps from .grad"),
}

_TRACKER: dict[str, tuple[Callable[[object], bool], str]] = {
    "private_key": (_nothing, "a peer signs with its own key: give the DHT an identity_path"),
}


def check_dht_options(options: DhtOptions) -> None:
    """Raise for options of `DHT` that shoal cannot offer.

    Raises:
        ConfigError: an option asks for something that does not exist here; the message says what to use instead.
        TypeError: hivemind has no such argument either.
    """
    _check("DHT", DhtOptions.__annotations__, options, _DHT)


def check_optimizer_options(options: OptimizerOptions) -> None:
    """The same for options of `Optimizer`."""
    _check("Optimizer", OptimizerOptions.__annotations__, options, {})
    names = options.get("average_opt_statistics", ())
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(each, str) for each in names):
        raise ConfigError(f"average_opt_statistics must be a list of names such as 'exp_avg_sq', got {names!r:.80}")


def check_state_averager_options(options: Mapping[str, object]) -> None:
    """The same for options of `TrainingStateAverager`."""
    _check("TrainingStateAverager", StateAveragerOptions.__annotations__, options, _STATE_AVERAGER)


def check_tracker_options(options: TrackerOptions) -> None:
    """The same for options of `ProgressTracker`."""
    _check("ProgressTracker", TrackerOptions.__annotations__, options, _TRACKER)


def _check(
    kind: str,
    known: Mapping[str, object],
    options: Mapping[str, object],
    asking: Mapping[str, tuple[Callable[[object], bool], str]],
) -> None:
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}")
        is_harmless, instead = asking.get(name, (lambda _: True, ""))
        harmless = False
        with suppress(Exception):  # tensors and arrays of several values are neither true nor false
            harmless = is_harmless(value)
        if not harmless:
            raise ConfigError(f"{name}={value!r:.80} has no counterpart in shoal: {instead}")
