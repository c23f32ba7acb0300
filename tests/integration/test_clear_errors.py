"""What goes wrong at the start is said clearly: a used port, a key that others can read, a broken invite, ..."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.averaging.core import PeerCore
from shoal.base.clock import Env
from shoal.dht.joining import _hint
from shoal.errors import LocalError, PeerUnreachable
from shoal.protocol.identity import Identity
from shoal.runtime.thread import LoopThread
from shoal.transport.tcp import TcpTransport
from tests.integration.workers import LONG_S, nobody


def test_used_port_is_named() -> None:
    """The address, what is wrong, and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(shoal.ConfigError, match=rf"127\.0\.0\.1:{port}.*in use.*port 0"):
            shoal.DHT(start=True, host_maddrs=f"/ip4/127.0.0.1/tcp/{port}")


def test_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """With the command that mends it; and a good one is the same peer every time."""
    path = tmp_path / "peer.key"
    first = shoal.DHT(identity_path=path)
    assert shoal.DHT(identity_path=path).peer_id == first.peer_id
    path.chmod(0o644)
    with pytest.raises(shoal.ConfigError, match="chmod 600"):
        shoal.DHT(identity_path=path)


@pytest.mark.parametrize("damage", [lambda text: text[:-3], lambda text: text.replace("shoal:e", "shoal:f"), str.upper])
def test_broken_invite_is_recognised(damage: Callable[[str], str]) -> None:
    """Before anything is dialed."""
    invite = str(shoal.Invite((nobody(),), "run"))
    with pytest.raises(shoal.ConfigError, match=r"invite|address"):
        shoal.DHT([damage(invite)], start=True)


def test_unreachable_initial_peer_is_named() -> None:
    """Where it was looked for, and what happened there."""
    address = nobody()
    with pytest.raises(PeerUnreachable, match=rf"{address.port}.*\(") as caught:
        shoal.DHT([address], start=True, startup_timeout=0.3)
    # On another machine than the peer's, which listens for its own only, this was all that the user saw.
    assert "127.0.0.1 is this machine itself. If that peer runs here, look whether it has ended" in str(caught.value)
    assert "If it runs on another one, it lets only its own machine in" in str(caught.value)
    assert "start it anew with host_maddrs='/ip4/0.0.0.0/tcp/0'" in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["127.0.0.1", "::1"], "127.0.0.1 is this machine itself"),
        (["10.0.0.1"], "10.0.0.1 is known within its private network only. On that network, look whether the peer"),
        (["100.64.0.1", "fd00::1"], "100.64.0.1 is known within"),
        (["127.0.0.1", "8.8.8.8"], ""),
        (["10.0.0.1", "a.org"], ""),
    ],
)
def test_an_address_that_leads_nowhere_else_is_explained(hosts: list[str], said: str) -> None:
    """A newcomer on another machine saw no more than "Connection refused"."""
    assert _hint(hosts).removeprefix(". ").startswith(said)
    assert bool(_hint(hosts)) == bool(said)


def test_a_peer_that_has_ended_is_not_said_to_be_elsewhere() -> None:
    """A newcomer read of private networks and public addresses, where the first program had been stopped."""
    assert "that peer has ended, or has another port now" in _hint(["10.0.0.1"], nobody_listens=True)
    assert "that peer has ended" in _hint(["8.8.8.8"], nobody_listens=True)


@pytest.mark.timeout(12)
def test_an_initial_peer_that_refuses_at_once_does_not_cost_15_seconds() -> None:
    """The limit of this test is below that; the error is one line."""
    address = nobody()
    with pytest.raises(PeerUnreachable, match=rf"^no initial peer answered: .*{address.port}: Connection refused\)"):
        shoal.DHT([address], start=True)


@pytest.mark.parametrize(
    ("given", "patient"),
    [({}, False), ({"startup_timeout": 9.0}, True), ({"bootstrap_timeout": 9.0}, True), ({"peers_file": "p"}, True)],
)
def test_who_says_how_long_to_wait_waits_for_peers_that_refuse(
    given: dict[str, Any], patient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of peers that are started together the first may come up last. A file of peers does the same."""
    asked: list[bool] = []

    async def start(*_: object, patient: bool, **__: object) -> PeerCore:
        asked.append(patient)
        raise PeerUnreachable("no initial peer answered")

    monkeypatch.setattr(PeerCore, "start", start)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PeerUnreachable):
        shoal.DHT([nobody()], start=True, **given)
    assert asked == [patient]


def test_other_protocol_version_is_refused_clearly() -> None:
    """A peer of another version answers: the error says so, and joining does not go on until the time is up."""
    thread = LoopThread("other-version")
    identity = Identity.ephemeral()

    async def serve() -> PeerCore:
        transport = TcpTransport(identity, protocol_versions=(77, 78))
        return await PeerCore.start(identity, transport, Env(executor=thread.executor))

    core = thread.run(serve(), LONG_S)
    try:
        with pytest.raises(PeerUnreachable, match=r"version.*78"):
            shoal.DHT(list(core.endpoint.contact.addresses), start=True, startup_timeout=LONG_S)
    finally:
        thread.stop(core.close, LONG_S)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"host_maddrs": "127.0.0.1:0"}, "host_maddrs"),
        ({"host_maddrs": "/ip4/::1/tcp/0"}, "host_maddrs"),
        ({"host_maddrs": "/ip4/127.0.0.1/tcp/70000"}, "host_maddrs"),
        ({"host_maddrs": []}, "host_maddrs"),
        ({"host_maddrs": "/tcp/70000"}, "host_maddrs"),
        ({"host_maddrs": "/dns4/127.0.0.1/tcp/0"}, "host_maddrs"),
        ({"announce_maddrs": ["/ip4/127.0.0.1/udp/1"]}, "announce_maddrs"),
        ({"initial_peers": "nonsense"}, "address"),
        ({"initial_peers": 3}, "initial_peers"),
        ({"startup_timeout": 0}, "startup_timeout"),
        ({"shutdown_timeout": "long"}, "shutdown_timeout"),
        ({"num_replicas": 0}, "num_replicas must be a whole number from 1 to 32, got 0"),
        ({"num_replicas": 5.0}, "num_replicas"),
        ({"state_upload_limit": 1000}, "state_upload_limit.*allow 32768"),
        ({"state_upload_limit": "fast"}, "state_upload_limit"),
        ({"state_upload_limit": float("nan")}, "state_upload_limit"),
    ],
)
def test_wrong_arguments_of_a_dht_are_named(arguments: dict[str, Any], named: str) -> None:
    """A ConfigError that says which."""
    with pytest.raises(shoal.ConfigError, match=named):
        shoal.DHT(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dht": None}, "dht"),
        ({"averaged_tensors": torch.ones(1)}, "averaged_tensors"),
        ({"averaged_tensors": [1.0]}, "tensor"),
        ({"averaged_tensors": [torch.ones(1, dtype=torch.int64)]}, "tensor"),
        ({"prefix": ""}, "prefix"),
        ({"compression": "float16"}, "compression"),
        ({"target_group_size": 1}, "target_group_size"),
        ({"min_group_size": 0}, "min_group_size"),
        ({"averaging_alpha": 0}, "averaging_alpha"),
        ({"bandwidth": -1}, "bandwidth"),
        ({"initial_group_bits": "2"}, "initial_group_bits"),
        ({"allreduce_timeout": -1}, "allreduce_timeout"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
    ],
)
def test_wrong_arguments_of_an_averager_are_named(arguments: dict[str, Any], named: str) -> None:
    """A ConfigError that says which; as for the arguments of its methods."""
    with shoal.DHT(start=True) as dht:
        right: dict[str, Any] = {"averaged_tensors": [torch.ones(1)], "dht": dht, "start": True, "prefix": "p"}
        with pytest.raises(shoal.ConfigError, match=named):
            shoal.DecentralizedAverager(**{**right, **arguments})


def test_who_cannot_be_dialed_has_no_averager_that_can() -> None:
    """Others would try for nothing, again and again."""
    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), client_mode=True, start=True) as dht:
        tensors = [torch.ones(1)]
        with pytest.raises(shoal.ConfigError, match="client_mode=False needs a dht that can be dialed"):
            shoal.DecentralizedAverager(tensors, dht, start=True, prefix="p", client_mode=False)
        assert shoal.DecentralizedAverager(tensors, dht, start=True, prefix="p").client_mode
        assert shoal.DecentralizedAverager(tensors, first, start=True, prefix="p", client_mode=True).client_mode


def test_too_many_parts_are_named_before_there_is_a_group() -> None:
    """A part size that is too small for the tensors."""
    with shoal.DHT(start=True) as dht, pytest.raises(shoal.ConfigError, match="choose a larger part_size_bytes"):
        shoal.DecentralizedAverager([torch.ones(1 << 22)], dht, start=True, prefix="p", part_size_bytes=1024)


def test_wrong_arguments_of_a_step_are_named() -> None:
    """Weight, timeout, gather, group bits and priority."""
    with shoal.DHT(start=True) as dht, shoal.DecentralizedAverager([torch.ones(1)], dht, start=True, prefix="p") as one:
        for call, named in (
            (lambda: one.step(weight=-1), "weight"),
            (lambda: one.step(weight=float("nan")), "weight"),
            (lambda: one.step(timeout=0), "timeout"),
            (lambda: one.step(timeout=float("nan")), "timeout"),
            (lambda: one.step(gather=object()), "gather"),
            (lambda: one.load_state_from_peers(timeout=-1), "timeout"),
            (lambda: one.set_group_bits("12"), "group_bits"),
            (lambda: setattr(one, "state_sharing_priority", float("inf")), "state_sharing_priority"),
            (lambda: setattr(one, "state_sharing_priority", float("nan")), "state_sharing_priority"),
            (lambda: setattr(one, "state_sharing_priority", 10**400), "state_sharing_priority"),
            (lambda: setattr(one, "state_sharing_priority", True), "state_sharing_priority"),
            (lambda: setattr(one, "state_sharing_priority", "1"), "state_sharing_priority"),
        ):
            with pytest.raises(shoal.ConfigError, match=named):
                call()


def test_announced_place_stands_in_the_invite() -> None:
    """For a forwarded port; port 0 stands for the one that is listened on."""
    with shoal.DHT(start=True, announce_maddrs="/dns/peer.example.org/tcp/4000") as dht:
        (address,) = shoal.Invite.parse(str(dht.invite("run"))).addresses
        assert (address.host, address.port) == ("peer.example.org", 4000)
    with shoal.DHT(start=True, announce_maddrs=["/ip4/192.0.2.7/tcp/0"]) as dht:
        (address,) = dht.get_visible_maddrs()
        assert address.host == "192.0.2.7"
        assert address.port > 0


def test_client_has_no_invite() -> None:
    """Nobody can dial it."""
    with shoal.DHT(start=True, client_mode=True) as dht:
        assert dht.get_visible_maddrs() == []
        with pytest.raises(LocalError, match="client mode"):
            dht.invite()


def test_an_unreachable_peer_costs_no_page_of_traceback() -> None:
    """Its error is raised where the program called: nothing of shoal's own thread is shown, and no cause."""
    with shoal.DHT(start=True) as gone:
        address = gone.get_visible_maddrs()[0]
    with pytest.raises(PeerUnreachable) as caught:
        shoal.DHT([address], start=True, startup_timeout=0.5)
    assert caught.value.__cause__ is None
    assert len(caught.traceback) <= 5
