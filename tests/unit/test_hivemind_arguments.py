"""Programs written for hivemind 1.1.12: its arguments, each with its default, and what other values do here."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.compression import Float16Compression, NoCompression
from shoal.dht import RecordValidator
from shoal.errors import ConfigError, LocalError
from shoal.hivemind.arguments import strategy_of
from shoal.runtime.dht_options import DhtOptions
from shoal.strategies import (
    DiLoCo,
    Inner,
    LocalUpdates,
    Pace,
    SamplesPace,
    Strategy,
    Synchronous,
    Terms,
    TrainingState,
)

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

AVERAGER: dict[str, Any] = {
    "target_group_size": None,
    "min_group_size": 2,
    "initial_group_bits": "",
    "min_matchmaking_time": 5.0,
    "request_timeout": 3.0,
    "averaging_alpha": 1.0,
    "part_size_bytes": 524288,
    "allreduce_timeout": None,
    "next_chunk_timeout": None,
    "sender_timeout": None,
    "reducer_timeout": None,
    "compression": NoCompression(),
    "state_compression": NoCompression(),
    "tensor_infos": None,
    "bandwidth": None,
    "min_vector_size": 0,
    "auxiliary": False,
    "allow_state_sharing": None,
    "declare_state_period": 30,
    "client_mode": None,
    "daemon": True,
    "shutdown_timeout": 5,
}
"""Of `DecentralizedAverager`; its tensors, `dht`, `start` and `prefix` have none."""

OPTIMIZER: dict[str, Any] = {
    "batch_size_per_step": None,
    "scheduler": None,
    "matchmaking_time": 15.0,
    "averaging_timeout": 60.0,
    "allreduce_timeout": None,
    "next_chunk_timeout": None,
    "load_state_timeout": 600.0,
    "reuse_grad_buffers": False,
    "offload_optimizer": None,
    "delay_optimizer_step": None,
    "delay_grad_averaging": False,
    "delay_state_averaging": True,
    "average_state_every": 1,
    "use_local_updates": False,
    "client_mode": None,
    "grad_compression": NoCompression(),
    "state_averaging_compression": NoCompression(),
    "load_state_compression": NoCompression(),
    "grad_averager_factory": None,
    "average_opt_statistics": (),
    "extra_tensors": (),
    "averager_opts": None,
    "tracker_opts": None,
    "performance_ema_alpha": 0.1,
    "auxiliary": False,
    "shutdown_timeout": 5,
    "verbose": False,
}
"""Of `Optimizer`; that of `grad_averager_factory` is a class of hivemind's."""

ALL_OF_DHT: dict[str, Any] = DHT | NODE | P2P


def test_every_default_of_a_dht_is_taken() -> None:
    """Alone, and all at once; the table and the options that `DHT` takes for hivemind's sake are one list."""
    for name, value in ALL_OF_DHT.items():
        shoal.DHT(start=False, **{name: value})
    shoal.DHT(start=False, **ALL_OF_DHT)
    assert DhtOptions.__annotations__.keys() < ALL_OF_DHT.keys()


ASKING = [
    ({"reuse_grad_buffers": "no"}, "reuse_grad_buffers must be True or False, got 'no'"),
    ({"use_local_updates": "no"}, "use_local_updates must be True or False, got .no."),
    ({"use_local_updates": True, "late": "next"}, "late does not go with use_local_updates=True: .*stepped from"),
    (
        {"use_local_updates": True, "delay_grad_averaging": True},
        "delay_grad_averaging does not go with use_local_updates=True: give delay_state_averaging",
    ),
    ({"use_local_updates": True, "max_grad_norm": 1}, "max_grad_norm does not go with .*: clip the gradients of each"),
    (
        {"use_local_updates": True, "grad_compression": Float16Compression()},
        "grad_compression does not go with .*: give state_averaging_compression",
    ),
    ({"use_local_updates": True, "average_state_every": 5}, "must be 0 or 1 .*raise target_batch_size 5 times"),
    ({"offload_optimizer": 2}, "offload_optimizer must be True or False, got 2"),
    (
        {"offload_optimizer": True, "params": None, "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])},
        "offload_optimizer=True needs params, and a class or function as optimizer",
    ),
    ({"offload_optimizer": True, "use_local_updates": True}, "does not go with use_local_updates=True"),
    ({"offload_optimizer": True, "params": None}, "offload_optimizer=True needs params"),
    (
        {"offload_optimizer": True, "params": [torch.nn.Parameter(torch.ones(1, device="meta"))]},
        "cannot move trained parameter 0: it has no values yet",
    ),
    ({"average_opt_statistics": "exp_avg"}, "average_opt_statistics must be a list of names .*, got 'exp_avg'"),
    ({"average_opt_statistics": [1]}, r"average_opt_statistics must be a list of names .*, got \[1\]"),
    ({"average_opt_statistics": None}, "average_opt_statistics must be a list of names .*, got None"),
    ({"auxiliary": torch.ones(2)}, "auxiliary must be True or False, got tensor"),
    ({"auxiliary": True, "client_mode": True}, "auxiliary=True does not go with client_mode=True: others must be"),
    ({"auxiliary": True, "batch_size_per_step": 4}, "batch_size_per_step has no meaning with auxiliary=True"),
    ({"grad_averager_factory": dict}, "grad_averager_factory must be PowerSGDGradientAverager.get_factory"),
    (
        {"grad_averager_factory": shoal.PowerSGDGradientAverager.get_factory(averager_rank=1, warn=False)},
        "grad_averager_factory must be .* give other things to the shoal.Optimizer itself",
    ),
    ({"grad_averager_factory": shoal.PowerSGDGradientAverager}, "averager_rank is missing"),
    (
        {"grad_averager_factory": shoal.PowerSGDGradientAverager.get_factory(averager_rank=0)},
        "averager_rank must be a whole number .*, got 0",
    ),
    (
        {"grad_averager_factory": partial(shoal.PowerSGDGradientAverager, averager_rank=1, min_compression_ratio=1)},
        "min_compression_ratio must be a number from 0 to below 1, got 1",
    ),
    (
        {"grad_averager_factory": shoal.PowerSGDGradientAverager.get_factory(averager_rank=1)},
        "rank 1 saves too little on every parameter",
    ),
    (
        {
            "grad_averager_factory": shoal.PowerSGDGradientAverager.get_factory(averager_rank=1),
            "use_local_updates": True,
        },
        "grad_averager_factory does not go with use_local_updates=True",
    ),
    ({"averager_opts": [3]}, "averager_opts must be a dictionary, got"),
    (
        {"averager_opts": {"target_group_size": 4}},
        "averager_opts.'target_group_size'. has no counterpart .*there are al",
    ),
    ({"averager_opts": {"bandwidth": -3}}, "bandwidth must be None .*, got -3"),
    ({"averager_opts": {"bandwidth": 3}, "bandwidth": 3}, "bandwidth and averager_opts.'bandwidth'. are one thing"),
    (
        {"averager_opts": {"min_matchmaking_time": 3}, "matchmaking_time": 4},
        "matchmaking_time and averager_opts.'min_matchmaking_time'. are one thing",
    ),
    ({"averager_opts": {"request_timeout": 9}, "matchmaking_time": 4}, "request_timeout=9 must be less than matchm"),
    ({"late": "never"}, "late must be 'drop', 'next' or 'overlap', got 'never'"),
    (
        {"late": "drop", "delay_grad_averaging": True},
        "delay_grad_averaging=True does not go with late='drop': leave delay_grad_averaging out",
    ),
    ({"delay_grad_averaging": "no"}, "delay_grad_averaging must be True or False, got 'no'"),
    ({"max_grad_norm": 0}, "max_grad_norm must be a number above 0, or None for none, got 0"),
    ({"max_grad_norm": float("inf")}, "max_grad_norm must be a number above 0, or None for none, got inf"),
    ({"max_grad_norm": "1"}, "max_grad_norm must be a number above 0, or None for none, got '1'"),
]


@pytest.mark.parametrize(("given", "message"), ASKING)
def test_what_an_optimizer_cannot_do_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    """When it is made, with what to write instead."""
    with pytest.raises(ConfigError, match=message):
        optimizer(**given)


class OfAUser:
    """A strategy that shoal does not know, with one answer that is wrong."""

    terms: Any = Terms()

    def __init__(self, **wrong: Any) -> None:
        for name, answer in wrong.items():
            setattr(self, name, answer if name == "terms" else lambda *_, answer=answer: answer)

    def compared(self, training: TrainingState) -> Any:
        """See `Strategy`."""
        return {}

    def training(self, inner: Inner) -> Any:
        """See `Strategy`."""
        return TrainingState(inner.optimizer, inner.scheduler, inner.extra_tensors)

    def pace(self, fragment: int = 0, first: Pace | None = None) -> Any:
        """See `Strategy`."""
        return SamplesPace(8)


class OwnInit(Synchronous):
    """A strategy of a user's own with an `__init__` of its own."""

    def __init__(self, target: int) -> None:
        super().__init__(target)


CODEC = Float16Compression()
LOW_RANK = shoal.PowerSGDGradientAverager.get_factory(averager_rank=4, min_compression_ratio=0.25)


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({"target_batch_size": 8}, Synchronous(8)),
        ({"target_batch_size": 8, "strategy": Synchronous(max_grad_norm=1)}, Synchronous(8, max_grad_norm=1.0)),
        ({"target_batch_size": 8, "late": "next"}, Synchronous(8, late="next")),
        ({"target_batch_size": 8, "delay_grad_averaging": True}, Synchronous(8, late="overlap")),
        ({"target_batch_size": 8, "max_grad_norm": 2}, Synchronous(8, max_grad_norm=2.0)),
        (
            {"target_batch_size": 8, "grad_averager_factory": LOW_RANK},
            Synchronous(8, low_rank=4, min_compression_ratio=0.25),
        ),
        ({"target_batch_size": 8, "offload_optimizer": True}, Synchronous(8, offload=True)),
        ({"target_batch_size": 8, "grad_compression": CODEC}, Synchronous(8, compression=CODEC)),
        ({"target_batch_size": 8, "average_opt_statistics": ["exp_avg"]}, Synchronous(8)),
        ({"target_batch_size": 8, "use_local_updates": True}, LocalUpdates(8)),
        (
            {
                "target_batch_size": 8,
                "use_local_updates": True,
                "average_opt_statistics": ["exp_avg"],
                "delay_state_averaging": False,
            },
            LocalUpdates(8, statistics=["exp_avg"], waits=True),
        ),
        ({"strategy": DiLoCo(5), "grad_compression": CODEC}, DiLoCo(5, compression=CODEC)),
        ({"strategy": DiLoCo(5), "offload_optimizer": False, "max_grad_norm": None}, DiLoCo(5)),
    ],
)
def test_each_argument_is_a_field_of_a_strategy(given: dict[str, Any], strategy: Strategy) -> None:
    """Those that are compared among peers, and those that each peer chooses for itself."""
    options = {"strategy": None, **given}
    found = strategy_of(options.pop("strategy"), options)
    assert (vars(found), type(found)) == (vars(strategy), type(strategy))


@pytest.mark.parametrize(
    ("strategy", "given", "field"),
    [
        (Synchronous(8), {"target_batch_size": 9}, "target_batch_size=8"),
        (Synchronous(8, late="next"), {"delay_grad_averaging": True}, "late='next'"),
        (Synchronous(8, late="drop"), {"late": "next"}, "late='drop'"),
        (Synchronous(8, late="overlap"), {"delay_grad_averaging": False}, "late='overlap'"),
        (Synchronous(8, max_grad_norm=1.0), {"max_grad_norm": 2.0}, "max_grad_norm=1.0"),
        (Synchronous(8, low_rank=4), {"grad_averager_factory": LOW_RANK}, "min_compression_ratio=0.5"),
        (Synchronous(8, low_rank=2), {"grad_averager_factory": shoal.GradientAverager}, "low_rank=2"),
        (Synchronous(8, offload=True), {"offload_optimizer": False}, "offload=True"),
        (DiLoCo(5, compression=CODEC), {"grad_compression": NoCompression()}, "compression=.*"),
        (LocalUpdates(8, statistics=["exp_avg"]), {"average_opt_statistics": []}, r"statistics=\('exp_avg',\)"),
        (LocalUpdates(8, waits=True), {"delay_state_averaging": True}, "waits=True"),
        (LocalUpdates(8, waits=False), {"delay_state_averaging": False}, "waits=False"),
    ],
)
def test_another_value_than_the_strategy_has_is_refused(strategy: Strategy, given: dict[str, Any], field: str) -> None:
    """Also where one of them is the default. The error names both."""
    (name,) = given
    text = rf"{name}=.* does not go with {field} of strategy={type(strategy).__name__}\(...\): leave {name} out"
    with pytest.raises(ConfigError, match=text):
        strategy_of(strategy, given)


@pytest.mark.parametrize(
    ("strategy", "given"),
    [
        (Synchronous(8), {"target_batch_size": 8}),
        (Synchronous(8, late="overlap"), {"late": "overlap", "delay_grad_averaging": True}),
        (Synchronous(8, late="next"), {"delay_grad_averaging": False}),
        (Synchronous(8, low_rank=4, min_compression_ratio=0.25), {"grad_averager_factory": LOW_RANK}),
        (Synchronous(8, offload=True), {"offload_optimizer": True}),
        (DiLoCo(5, compression=CODEC), {"grad_compression": CODEC}),
        (LocalUpdates(8, statistics=["exp_avg"]), {"average_opt_statistics": ["exp_avg"], "use_local_updates": True}),
        (LocalUpdates(8, waits=True), {"delay_state_averaging": False}),
        (OwnInit(8), {"target_batch_size": 8}),
    ],
)
def test_the_value_that_the_strategy_has_is_taken(strategy: Strategy, given: dict[str, Any]) -> None:
    """It says nothing new."""
    assert strategy_of(strategy, given) is strategy


def test_the_order_of_statistics_does_not_matter() -> None:
    """Peers that named them in another order were refused: they are averaged in one order."""
    names = ["exp_avg_sq", "exp_avg"]
    given = {"target_batch_size": 8, "use_local_updates": True, "average_opt_statistics": names}
    found = strategy_of(LocalUpdates(8, statistics=names), {"average_opt_statistics": names[::-1]})
    assert found == strategy_of(None, given) == LocalUpdates(8, statistics=names[::-1])
    assert found.training(Inner(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]))).averaged_statistics == (
        "exp_avg",
        "exp_avg_sq",
    )


def test_older_arguments_say_one_thing() -> None:
    """`late="overlap"` was refused beside the argument that means it, and taken beside the opposite."""
    same = {"target_batch_size": 8, "late": "overlap", "delay_grad_averaging": True}
    assert strategy_of(None, same) == Synchronous(8, late="overlap")
    with pytest.raises(ConfigError, match="delay_grad_averaging=False does not go with late='overlap'"):
        strategy_of(None, {**same, "delay_grad_averaging": False})


@pytest.mark.parametrize(
    ("strategy", "given", "text"),
    [
        (OfAUser(), {"target_batch_size": 8}, r"target_batch_size does not go with strategy=OfAUser\(...\): .* itself"),
        (
            OfAUser(),
            {"grad_compression": CODEC},
            "grad_compression does not go with .*: give it to the strategy itself",
        ),
        (OwnInit(8), {"max_grad_norm": 1.0}, r"max_grad_norm does not go with strategy=OwnInit\(...\): .* itself"),
        (LocalUpdates(8), {"use_local_updates": False}, "use_local_updates=False and strategy=.* are two strategies"),
        (DiLoCo(5), {"late": "next"}, "late does not go with strategy=DiLoCo"),
        (DiLoCo(5), {"target_batch_size": 8}, "target_batch_size does not go with strategy=DiLoCo.* leave"),
        (
            DiLoCo(5),
            {"delay_grad_averaging": True},
            "delay_grad_averaging does not go with strategy=.* Decoupled",
        ),
        (DiLoCo(5), {"average_opt_statistics": ["exp_avg"]}, "average_opt_statistics does not go with"),
        (DiLoCo(5), {"offload_optimizer": True}, "offload_optimizer does not go with strategy=DiLoCo"),
        (DiLoCo(5), {"use_local_updates": True}, "use_local_updates=True and strategy=DiLoCo.* are two strategies"),
        (None, {}, "target_batch_size is missing"),
        (LocalUpdates(), {}, "target_batch_size is missing"),
    ],
)
def test_what_a_strategy_does_not_have_is_refused(strategy: Strategy | None, given: dict[str, Any], text: str) -> None:
    """By one rule: there is no field of it."""
    with pytest.raises(ConfigError, match=text):
        strategy_of(strategy, given)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"terms": None}, r"terms of strategy=OfAUser\(...\) must be a Terms, got None"),
        ({"pace": None}, r"pace\(\) of strategy=OfAUser\(...\) must be a Pace, got None"),
        ({"training": None}, r"training\(\) of strategy=OfAUser\(...\) must be a TrainingState, got None"),
        ({"compared": None}, r"compared\(\) of strategy=OfAUser\(...\) must be a Mapping, got None"),
        ({"compared": {"n": 5}}, r"compared\(\) of strategy=OfAUser\(...\): n must be a text of .* got 5: give str"),
        ({"compared": {"n": "x" * 600}}, r"compared\(\) of strategy=OfAUser\(...\): n must be .* a hash"),
        ({"compared": {"optimizer": "mine"}}, r"compared\(\) of .*: 'optimizer' is a setting of shoal's own"),
    ],
)
def test_a_wrong_answer_of_a_users_strategy_is_named(wrong: dict[str, Any], text: str) -> None:
    """Peers took no word of each other's, and trained two runs; or it failed deep inside."""
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    given: dict[str, Any] = {"strategy": OfAUser(**wrong), "params": parameters, "optimizer": torch.optim.Adam}
    with shoal.DHT(start=True) as dht, pytest.raises(ConfigError, match=text):
        shoal.Optimizer(dht=dht, run_id="run", **given)


def test_an_argument_that_hivemind_does_not_have_is_a_type_error() -> None:
    """As in Python, not one more that changes nothing."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'target_batch'"):
        optimizer(target_batch=3)


@pytest.mark.parametrize(
    "given",
    [
        {"late": "next"},
        {"delay_grad_averaging": True},
        {"delay_grad_averaging": True, "late": "next", "delay_optimizer_step": True},
        {"auxiliary": True},
        {"reuse_grad_buffers": True},
        {"averager_opts": {"request_timeout": 0.5, "min_group_size": 2, "bandwidth": 3}, "matchmaking_time": 1.0},
        {"auxiliary": True, "use_local_updates": True},
        {"reuse_grad_buffers": True, "use_local_updates": True},
        {"delay_state_averaging": False},
        {"use_local_updates": True, "average_state_every": 1, "grad_compression": NoCompression()},
        {"max_grad_norm": 1},
        {"tracker_opts": {"min_refresh_period": 0.1}},
        {"average_opt_statistics": ("exp_avg_sq",)},
        {"offload_optimizer": True},
        {"offload_optimizer": False},
        {"grad_averager_factory": shoal.GradientAverager},
        {"grad_averager_factory": shoal.GradientAverager.get_factory()},
        {
            "grad_averager_factory": shoal.PowerSGDGradientAverager.get_factory(averager_rank=2),
            "params": [torch.nn.Parameter(torch.zeros(20, 30))],
        },
    ],
)
def test_modes_are_taken(given: dict[str, Any]) -> None:
    """All that is wrong is that the DHT was not started."""
    with pytest.raises(LocalError, match="this DHT was not started"):
        optimizer(**given)


def averager(**given: Any) -> shoal.DecentralizedAverager:
    """One that is not started."""
    dht = shoal.DHT(start=False)
    return shoal.DecentralizedAverager([torch.zeros(3)], dht, start=False, prefix="test", **given)


def optimizer(**given: Any) -> shoal.Optimizer:
    """One whose DHT is not started: `LocalError`, once all arguments were found good."""
    arguments: dict[str, Any] = {"params": [torch.nn.Parameter(torch.zeros(3))], "optimizer": torch.optim.Adam, **given}
    return shoal.Optimizer(dht=shoal.DHT(start=False), run_id="run", target_batch_size=8, **arguments)


def test_every_default_of_an_averager_is_taken() -> None:
    """Alone, and all at once."""
    for name, value in AVERAGER.items():
        averager(**{name: value})
    averager(**AVERAGER)


def test_every_default_of_an_optimizer_is_taken() -> None:
    """Alone, and all at once; and None where hivemind allows it."""
    nothing = {"matchmaking_time": None, "averaging_timeout": None}
    for given in ({}, OPTIMIZER, nothing, *({name: value} for name, value in OPTIMIZER.items())):
        with pytest.raises(LocalError, match="this DHT was not started"):
            optimizer(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"averaging_timeout": 5},
        {"averaging_timeout": 2},
        {"allreduce_timeout": 4.0},
        {"matchmaking_time": 0.5},
        {"matchmaking_time": 2},
        {"sender_timeout": 90.0},
    ],
)
def test_averaging_timeout_5_fails_with_an_error_that_names_sender_timeout(given: dict[str, float]) -> None:
    """Not any more, nor do others that ask for something of those that were not given."""
    with pytest.raises(LocalError, match="this DHT was not started"):
        optimizer(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"averaging_timeout": 5, "sender_timeout": 6}, "sender_timeout=6 must be less than averaging_timeout=5"),
        ({"allreduce_timeout": 5, "sender_timeout": 6}, "sender_timeout=6 must be less than allreduce_timeout=5"),
        ({"averaging_timeout": 1}, "averaging_timeout must be more than 1 second, got 1"),
        ({"matchmaking_time": 2000}, "matchmaking_time must be at most 1800 seconds, got 2000"),
        ({"matchmaking_time": 0}, "matchmaking_time must be a number of seconds above 0, got 0"),
        ({"matchmaking_time": "long"}, "matchmaking_time must be a number of seconds above 0, got 'long'"),
        ({"averaging_timeout": "long"}, "averaging_timeout must be a number of seconds above 0, got 'long'"),
    ],
)
def test_errors_about_time_limits_name_what_was_given(given: dict[str, Any], message: str) -> None:
    """By the optimizer's names, not those of the averagers within."""
    with pytest.raises(ConfigError) as caught:
        optimizer(**given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "given", [{"min_matchmaking_time": 2}, {"averaging_expiration": 1}, {"next_chunk_timeout": 200}]
)
def test_min_matchmaking_time_2_fails_for_request_timeout(given: dict[str, Any]) -> None:
    """Not any more: nobody has given it."""
    averager(**given)
    with pytest.raises(ConfigError, match="request_timeout=3 must be less than min_matchmaking_time=2: lower"):
        averager(min_matchmaking_time=2, request_timeout=3)


@pytest.mark.parametrize("given", [{"host_maddrs": None}, {"use_ipfs": False}, {"num_workers": 4}, {"num_workers": 16}])
def test_arguments_that_change_nothing_are_refused(given: dict[str, Any]) -> None:
    """Not any more."""
    shoal.DHT(None, start=False, **given)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"p2p": object()}, "share one DHT"),
        ({"node_id": 5}, "identity_path"),
        ({"cache_locally": False}, "latest=True"),
        ({"record_validator": object()}, "record_validators"),
        ({"authorizer": object()}, "does not restrict yet"),
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


def test_bootstrap_timeout_is_startup_timeout() -> None:
    """Where both are given, it counts."""
    shoal.DHT(start=False, bootstrap_timeout=45, startup_timeout=15)
    with pytest.raises(ConfigError, match="bootstrap_timeout must be a number of seconds"):
        shoal.DHT(start=False, bootstrap_timeout=0)


def test_the_page_for_hiveminds_users_names_every_option() -> None:
    """Whether it is taken, and what is to be used in its place."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "migrating.md").read_text(encoding="utf-8")
    assert [name for name in DhtOptions.__annotations__ if f"`{name}" not in page] == []


def test_a_validator_as_hivemind_has_them_accepts_everything() -> None:
    """It never does: one with `validate` in place of `refuses` is refused, also where it derives from the protocol."""

    class Mine(RecordValidator):
        def validate(self, record: object) -> bool:
            return False

    for validator in (Mine(), object()):  # type: ignore[abstract]
        with pytest.raises(ConfigError, match=r"must have a method refuses\(record\) -> str"):
            shoal.DHT(start=False, record_validators=[validator])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match=r"must have a method refuses\(record\) -> str"):
            shoal.DHT(start=False).add_validators([validator])  # type: ignore[list-item]


def test_a_misspelt_argument_is_no_option() -> None:
    """As Python says it."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_worker'"):
        shoal.DHT(start=False, num_worker=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("argument", "cure"), [("host_maddrs", "/ip6/::/tcp/PORT listens by"), ("announce_maddrs", "/dns/HOST/tcp/PORT")]
)
def test_two_addresses_are_refused_with_the_one_that_does_for_both(argument: str, cure: str) -> None:
    """The error only counted them."""
    given: dict[str, Any] = {argument: ["/ip4/0.0.0.0/tcp/4000", "/ip6/::/tcp/4000"]}
    with pytest.raises(ConfigError, match=f"^{argument} must be one address, got 2: .*{cure}"):
        shoal.DHT(start=False, **given)


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
