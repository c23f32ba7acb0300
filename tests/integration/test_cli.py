"""The command line as users run it: processes, sockets, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shoal
from shoal.base.peer import Address
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Contact, Progress, encode
from tests.integration.routers import why_not
from tests.integration.workers import LONG_S, Talk, environment, nobody, until

# All warnings, but not `-X dev`: asyncio would then say on stderr how slow a busy machine is.
SHOAL = [sys.executable, "-W", "default", "-m", "shoal.cli"]


@contextmanager
def bootstrap(*options: str) -> Iterator[tuple[Talk, shoal.Invite]]:
    """`shoal dht` with these options, and the invite that it prints."""
    with Talk([*SHOAL, "dht", *options], fresh=True) as talk:
        yield talk, shoal.Invite.parse(talk.line())


def shoal_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to the end."""
    return subprocess.run(
        [*SHOAL, *arguments], capture_output=True, text=True, timeout=LONG_S, env=environment(), check=False
    )


def publish(dht: shoal.DHT, run_id: str, *, epoch: int, samples: int, rate: float) -> None:
    """Say, as a peer of a run does, where it stands."""
    contact = Contact(dht.peer_id, tuple(dht.get_visible_maddrs()))
    said = Progress(
        contact=contact,
        epoch=epoch,
        digest=bytes([epoch]) * 32,
        branch_samples=100 * epoch,
        done=samples,
        rate=rate,
        time=time.time(),
        settings={"target_batch_size": "100"},
    )
    assert dht.store(f"{run_id}_progress", encode(said), time.time() + 300, dht.peer_id.to_bytes())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bootstrap_peer_lives_until_it_is_told_to_leave(number: signal.Signals) -> None:
    """One invite, by which others join; the first signal ends it in order, with code 0 and a farewell."""
    lost: list[str] = []
    with bootstrap("--run", "albert") as (talk, invite):
        assert invite.run_id == "albert"
        with shoal.DHT([invite], start=True) as dht:
            dht.events.subscribe(lambda event: lost.append(str(event)) if "Lost" in type(event).__name__ else None)
            assert dht.store("key", 1, time.time() + 60)
            talk.signal(number)
            assert talk.wait() == 0
            until(lambda: lost)
        assert "the peer left" in lost[0]
        assert talk.rest() == []
        errors = talk.errors()
    assert "only this machine can connect: --host 0.0.0.0" in errors
    assert "Traceback" not in errors
    assert "Warning" not in errors


def test_bootstrap_peer_tells_who_comes_and_goes() -> None:
    """On stderr, and by name; with --quiet nothing but the invite is said."""
    with bootstrap() as (talk, invite), bootstrap("--quiet", "--join", str(invite)) as (quiet, other):
        assert other.run_id == ""
        with shoal.DHT([invite], start=True) as dht:
            name = dht.peer_id.short()
            until(lambda: f"+ {name} came (2 peers)" in talk.errors())
        until(lambda: f"- {name} is gone: the peer left (1 peer)" in talk.errors())
        quiet.signal(signal.SIGINT)
        assert quiet.wait() == 0
        assert (quiet.rest(), quiet.errors()) == ([], "")


def test_second_ctrl_c_ends_the_bootstrap_peer_at_once() -> None:
    """Also when leaving in order takes a while; without a traceback."""
    with bootstrap() as (talk, invite), shoal.DHT([invite], start=True):
        talk.signal(signal.SIGINT)
        talk.signal(signal.SIGINT)
        # The second one may come when the interpreter ends, and has no handler any more: then it dies of the signal.
        assert talk.wait() in (0, 130, -signal.SIGINT)
        assert "Traceback" not in talk.errors()


def test_bootstrap_peer_keeps_its_identity_and_its_place(tmp_path: Path) -> None:
    """With a key file and a port the same invite is good after a restart; it also stands in the invite file."""
    key, file, port = tmp_path / "peer.key", tmp_path / "invite", str(nobody().port)
    invites = []
    for _ in range(2):
        with bootstrap("--identity", str(key), "--port", port, "--invite-file", str(file), "--run", "r") as (_, invite):
            invites.append(invite)
            assert shoal.Invite.parse(file.read_text()) == invite
    assert invites[0] == invites[1]
    assert invites[0].addresses == (Address("127.0.0.1", int(port), Identity.load(key).peer_id),)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["invite", "peer.key"]


@pytest.mark.parametrize(
    ("announce", "host", "port"),
    [
        ("example.org:4000", "example.org", 4000),
        ("192.0.2.1", "192.0.2.1", None),
        ("[2001:db8::1]:5", "2001:db8::1", 5),
    ],
)
def test_bootstrap_peer_announces_what_it_is_told(announce: str, host: str, port: int | None) -> None:
    """A host and a port, or a host alone."""
    with bootstrap("--announce", announce, "--quiet") as (_, invite):
        (address,) = invite.addresses
    assert address.host == host
    assert address.port == port if port is not None else address.port > 0


def test_bootstrap_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A used port and a key that others can read: code 2, one line, no traceback."""
    key = tmp_path / "peer.key"
    Identity.create(key)
    key.chmod(0o640)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, said in ((["--port", port], "in use"), (["--identity", str(key)], "chmod 600")):
            done = shoal_command("dht", *options)
            assert (done.returncode, done.stdout) == (2, "")
            assert said in done.stderr
            assert len(done.stderr.splitlines()) == 1


def test_status_shows_the_run_without_a_peer_that_was_killed() -> None:
    """The table for people, JSON for programs, by the invite alone; who neither answers nor renews its word is gone."""
    with bootstrap("--run", "albert") as (_, invite), shoal.DHT([invite], start=True) as dht:
        publish(dht, "albert", epoch=7, samples=40, rate=30.0)
        gone = shoal.DHT([invite], start=True)
        publish(gone, "albert", epoch=6, samples=10, rate=10.0)
        gone.shutdown()
        for_people = shoal_command("status", f" {invite}\n")  # as it was copied
        for_programs = shoal_command("status", str(invite), "--json")
    assert (for_people.returncode, for_people.stderr) == (0, "")
    assert f"{dht.peer_id.short()}      7  07070707       40       30.0   100%" in for_people.stdout
    assert "run 'albert': 1 peer at epoch 7; 40 of 100 samples" in for_people.stdout
    assert (for_programs.returncode, for_programs.stderr) == (0, "")
    found = json.loads(for_programs.stdout)
    assert [peer["peer_id"] for peer in found["peers"]] == [str(dht.peer_id)]
    assert found["samples_per_s"] == 30.0


def test_status_that_watches_drops_a_killed_peer_when_its_link_breaks() -> None:
    """The next line comes with the loss of the link, and without the peer; the record of it still lies in the DHT."""
    with bootstrap("--run", "albert") as (_, invite), shoal.DHT([invite], start=True) as dht:
        publish(dht, "albert", epoch=7, samples=40, rate=30.0)
        other = shoal.DHT([invite], start=True)
        publish(other, "albert", epoch=7, samples=10, rate=10.0)
        with Talk([*SHOAL, "status", str(invite), "--watch", "--json"], fresh=True) as talk:
            both = {str(dht.peer_id), str(other.peer_id)}
            assert {peer["peer_id"] for peer in json.loads(talk.line())["peers"]} == both
            other.shutdown()
            left = both
            while left == both:
                left = {peer["peer_id"] for peer in json.loads(talk.line())["peers"]}
            assert left == {str(dht.peer_id)}


def test_status_that_watches_prints_into_a_pipe_at_once() -> None:
    """Each look at the run is there for the reader when it is made, and not at the end of the command."""
    with bootstrap("--run", "albert") as (_, invite), shoal.DHT([invite], start=True) as dht:
        publish(dht, "albert", epoch=7, samples=40, rate=30.0)
        with Talk([*SHOAL, "status", str(invite), "--watch"], fresh=True) as talk:
            for _ in range(2):
                assert talk.line().split()[:2] == ["peer", "epoch"]
                assert dht.peer_id.short() in talk.line()
                assert talk.line() == "\n"
                assert talk.line().startswith("run 'albert': 1 peer at epoch 7")


def test_status_of_a_run_that_is_not_there() -> None:
    """Code 3 and a sentence; --run names another run than the invite's."""
    with bootstrap("--run", "albert") as (_, invite), shoal.DHT([invite], start=True) as dht:
        publish(dht, "albert", epoch=1, samples=1, rate=1.0)
        dht.store("broken_progress", b"garbage", time.time() + 60, dht.peer_id.to_bytes())
        dht.store("plain_progress", 5, time.time() + 60)
        for run_id in ("bert", "broken", "plain"):
            done = shoal_command("status", str(invite), "--run", run_id)
            assert (done.returncode, done.stdout) == (3, "")
            assert done.stderr.startswith(f"shoal: no peer of run '{run_id}' is there")
            assert len(done.stderr.splitlines()) == 1


def test_status_by_an_invite_that_leads_nowhere() -> None:
    """Code 1 and one line that names the address."""
    invite = shoal.Invite((nobody(),), "albert")
    done = shoal_command("status", str(invite), "--timeout", "0.5")
    assert (done.returncode, done.stdout) == (1, "")
    assert str(invite.addresses[0].port) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_doctor_says_a_verdict_for_each_thing_that_it_looks_at() -> None:
    """The way there, the clock, the bandwidth and the run with its settings; nobody can tell the way back."""
    with bootstrap("--run", "bees") as (_, invite), shoal.DHT([invite], start=True) as trainer:
        publish(trainer, "bees", epoch=3, samples=40, rate=20.0)
        done = shoal_command("doctor", str(invite), "--host", "127.0.0.1")
    verdicts = {line[6:19].strip(): (line[:6].strip(), line[19:]) for line in done.stdout.splitlines()}
    assert list(verdicts) == [
        "versions", "descriptors", "memory", "port", "way there", "way back", "clock", "bandwidth", "run", "settings"
    ]  # fmt: skip
    assert [verdicts[what][0] for what in ("way there", "way back", "clock", "run", "settings")] == [
        "ok", "?", "ok", "ok", "ok"
    ]  # fmt: skip
    assert "the clocks of the connected peers (2)" in verdicts["clock"][1]
    assert "bit/s" in verdicts["bandwidth"][1]  # how much is the machine's business
    assert verdicts["port"][0] == "so-so"
    assert "--host 0.0.0.0" in verdicts["port"][1]
    assert "1 peer at epoch 3" in verdicts["run"][1]
    assert "target_batch_size=100" in verdicts["settings"][1]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_machine_without_a_network_is_not_told_to_listen_on_all_interfaces() -> None:
    """It does so already: the doctor and a warning say that it has no address, and what to do."""
    alone = ["unshare", "--net", "/bin/sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    with Talk([*alone, *SHOAL, "dht", "--host", "0.0.0.0", "--quiet"]) as talk:
        (address,) = shoal.Invite.parse(talk.line()).addresses
        assert address.host == "127.0.0.1"
        assert "this machine has no address that others can dial" in talk.errors()
        assert "connect it to a network, or give announce_maddrs (--announce)" in talk.errors()
    done = subprocess.run(
        [*alone, *SHOAL, "doctor"], capture_output=True, text=True, timeout=LONG_S, env=environment(), check=False
    )
    (port,) = [line for line in done.stdout.splitlines() if line[6:].startswith("port")]
    assert port.startswith("so-so")
    assert "this machine has no address that others can dial" in port
    assert "--host 0.0.0.0" not in port


def test_the_doctor_of_a_network_that_is_gone_says_what_to_look_at() -> None:
    """One bad line, and an exit code for scripts."""
    with bootstrap() as (_, invite):
        pass
    done = shoal_command("doctor", str(invite), "--timeout", "1")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("bad   way there")
    assert "no initial peer answered" in last
    assert done.returncode == 1
