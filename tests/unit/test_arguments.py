"""Arguments of a peer and of an averager that cannot be: the error names them. Nothing is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.base.checks import own_number, path, seconds, whole
from shoal.compression import CompressionInfo
from shoal.dht import DhtSettings
from shoal.errors import ConfigError
from shoal.train.inner import make_inner


def averager(dht: shoal.DHT | None = None, **options: Any) -> shoal.DecentralizedAverager:
    """Of one tensor, not started."""
    return shoal.DecentralizedAverager([torch.zeros(2)], dht or shoal.DHT(), prefix="run", start=False, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_maddrs": 4000}, "host_maddrs must be an address such as /ip4/127.0.0.1/tcp/0, got 4000"),
        ({"announce_maddrs": 4000}, "announce_maddrs must be an address such as .*, got 4000"),
        (
            {"announce_maddrs": "/ip4/192.0.2.7/tcp/4000", "client_mode": True},
            "announce_maddrs tells others an address to dial, and with client_mode=True nobody can dial this peer",
        ),
        ({"identity_path": 3}, "identity_path must be the path of a file or folder, got 3"),
        ({"identity_path": ""}, "identity_path must be the path of a file or folder, got ''"),
        ({"peers_file": 3}, "peers_file must be the path of a file or folder, got 3"),
        ({"peers_file": "a\0b"}, "peers_file must be the path of a file or folder, got 'a"),
        ({"initial_peers": "x"}, "initial_peers: neither an invite nor an address: 'x'"),
        ({"client_mode": torch.ones(2)}, "client_mode must be True or False, got tensor"),
        ({"record_validators": 3}, "record_validators must be a list of validators, got 3"),
        ({"num_replicas": True}, "num_replicas must be a whole number from 1 to 32, got True"),
        ({"num_replicas": 2.0}, "num_replicas must be a whole number from 1 to 32, got 2.0"),
        ({"upload_limit": "1MB"}, "upload_limit must be a number of bytes per second, or None, got '1MB'"),
        ({"upload_limit": True}, "upload_limit must be a number of bytes per second, or None, got True"),
        ({"upload_limit": 1000}, "upload_limit must be at least 32768 bytes per second, got 1000"),
        ({"startup_timeout": "5"}, "startup_timeout must be a number of seconds above 0, got '5'"),
        ({"bootstrap_timeout": 0}, "bootstrap_timeout must be a number of seconds above 0, got 0"),
        ({"shutdown_timeout": True}, "shutdown_timeout must be a number of seconds above 0, got True"),
    ],
)
def test_an_argument_of_a_peer_that_cannot_be_is_named(options: dict[str, Any], says: str) -> None:
    """They were raw TypeErrors from within, or were taken: `num_replicas=True` for one replica."""
    with pytest.raises(ConfigError, match=says):
        shoal.DHT(**options)


@pytest.mark.parametrize(
    ("infos", "says"),
    [
        (3, "tensor_infos must be a list of CompressionInfo, one for each tensor, got 3"),
        (iter([]), "tensor_infos must be a list of CompressionInfo"),
        ([None], r"tensor_infos\[0\] must be a CompressionInfo, got NoneType"),
        ([], "tensor_infos has 0 entries for 1 averaged tensors"),
    ],
)
def test_tensor_infos_that_cannot_be_are_named(infos: Any, says: str) -> None:
    """`tensor_infos=3`: object of type 'int' has no len()."""
    with pytest.raises(ConfigError, match=says):
        averager(tensor_infos=infos)
    averager(tensor_infos=[CompressionInfo.from_tensor(torch.zeros(2))])


def test_numbers_of_numpy_are_numbers_of_a_peer_and_of_an_averager() -> None:
    """The optimizer took `np.int64(4)`, the peer and the averager did not."""
    dht = shoal.DHT(
        num_replicas=np.int64(4),  # type: ignore[arg-type]
        state_upload_limit=np.float32(1e6),  # type: ignore[arg-type]
        startup_timeout=np.int64(5),  # type: ignore[arg-type]
        shutdown_timeout=np.float32(2),  # type: ignore[arg-type]
    )
    averager(
        dht,
        target_group_size=np.int64(4),
        min_group_size=np.int32(2),
        averaging_alpha=np.float32(0.5),
        part_size_bytes=np.int64(1 << 20),
        bandwidth=np.float32(1e6),
        min_vector_size=torch.tensor(8),
        declare_state_period=np.int64(30),
        averaging_expiration=np.float32(5),
    )
    with pytest.raises(ConfigError, match="target_group_size must be"):
        averager(dht, target_group_size=np.float64(4))


def test_a_number_of_another_library_becomes_pythons_own() -> None:
    """Messages hold Python's numbers; what is no number stays as it is, for a check that names it."""
    pairs: list[tuple[Any, Any]] = [(np.int64(3), 3), (np.float32(0.5), 0.5), (torch.tensor(3), 3)]
    for value, own in pairs:
        assert (type(own_number(value)), own_number(value)) == (type(own), own)
    others: list[Any] = [None, True, 3, 0.5, "3"]
    for value in others:
        assert own_number(value) is value
    assert whole("count", np.int64(3)) == 3
    assert seconds("timeout", None, 5.0) == 5.0
    assert path("file", "/name") == Path("/name")
    assert DhtSettings(replicas=4).replicas == 4


def test_a_rank_without_a_dht_is_told_of_the_group_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 1 of a torchrun group: "dht must be a shoal.DHT, got NoneType", and no word of what is right there."""
    none: Any = None
    with pytest.raises(ConfigError, match=r"got NoneType$"):
        shoal.Optimizer(dht=none, run_id="r", target_batch_size=1, optimizer=none)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"got NoneType\. Where rank 0 alone has one, .*GroupOptimizer"):
        shoal.Optimizer(dht=none, run_id="r", target_batch_size=1, optimizer=none)


def test_a_path_is_that_of_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After `os.chdir` (Hydra does it) a relative `checkpoint=` saved nothing more, and "~" was a folder's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    relative, at_home = path("checkpoint", "states/run"), path("checkpoint", "~/states")
    monkeypatch.chdir("/")
    assert relative == tmp_path / "states" / "run"
    assert at_home == Path("/home/me/states")
    with pytest.raises(ConfigError, match="checkpoint='~nobody-of-this-name/x' is no path here"):
        path("checkpoint", "~nobody-of-this-name/x")


@pytest.mark.parametrize("offload", [False, True])
def test_one_tensor_as_params_is_named(*, offload: bool) -> None:
    """It is an iterable of its rows: "can't optimize a non-leaf Tensor"."""
    with pytest.raises(ConfigError, match="put one tensor in a list"):
        make_inner(torch.nn.Parameter(torch.ones(2)), torch.optim.SGD, offload)
