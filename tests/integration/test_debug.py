"""`shoal debug dump` on real processes: by number, by invite, while a step waits, and after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.errors import LocalError, PeerRefused
from shoal.events import Warned
from shoal.protocol.wire import Contact, GetTrace
from shoal.runtime import debug
from shoal.runtime.debug import read_local
from tests.integration.test_leave import Leaver
from tests.integration.workers import LONG_S, environment, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract Unix sockets are Linux's")


def names(pid: int) -> list[str]:
    """The sockets of a process, as the kernel lists them."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.split()[-1] for line in lines if f"@shoal/{pid}/" in line]


def dump(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-X", "importtime", "-m", "shoal.cli", "debug", "dump", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, env=environment(), check=False)


@pytest.fixture
def meeting() -> Iterator[shoal.DHT]:
    """A peer in this process."""
    with shoal.DHT(start=True) as dht:
        yield dht


def test_a_process_that_waits_in_a_step_tells_all(meeting: shoal.DHT) -> None:
    """By its number, as text and as JSON; the command does without torch."""
    with Leaver("search", meeting) as searching:
        peer = searching.expect("ready")
        pid = str(searching.process.pid)
        done = dump(pid)
        assert done.returncode == 0, done.stderr
        assert peer[:8] in done.stdout
        assert "PeerConnected" in done.stdout
        assert f"peer={meeting.peer_id.short()}" in done.stdout
        assert "| torch" not in done.stderr
        [found] = json.loads(dump(pid, "--json").stdout)
        assert found["peer_id"] == peer
        assert found["events"][0] == {
            "number": 0,
            "at_s": found["events"][0]["at_s"],
            "event": "PeerConnected",
            "peer": str(meeting.peer_id),
        }


def test_nothing_is_left_after_kill_9_and_a_stopped_process_is_told_apart(meeting: shoal.DHT) -> None:
    """The name goes with the process."""
    with Leaver("compute", meeting) as computing:
        computing.expect("ready")
        pid = computing.process.pid
        assert len(names(pid)) == 1
        assert len(read_local(pid)) == 1
        computing.signal(signal.SIGSTOP)
        assert until(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text())
        with pytest.raises(LocalError, match="does not answer"):
            read_local(pid, timeout_s=0.5)
        computing.signal(signal.SIGKILL)
        computing.wait()
        assert names(pid) == []
        with pytest.raises(LocalError, match="no process"):
            read_local(pid)


def test_an_invited_peer_is_answered_without_the_texts_of_warnings(meeting: shoal.DHT) -> None:
    """By invite and by address."""
    meeting.events.emit(Warned(where="a", message="/home/somebody"))
    done = dump(str(meeting.invite()))
    assert done.returncode == 0, done.stderr
    assert "Warned" in done.stdout
    assert "somebody" not in done.stdout
    address = str(meeting.get_visible_maddrs()[0])
    assert until(lambda: dump(address, "--last", "1").returncode == 0)  # not within a second


def test_a_second_question_within_a_second_is_told_to_wait(meeting: shoal.DHT) -> None:
    """However many ask: the answers of a second are one."""
    with shoal.DHT([str(address) for address in meeting.get_visible_maddrs()], start=True) as asking:
        contact = Contact(meeting.peer_id, tuple(meeting.get_visible_maddrs()))
        endpoint = asking.core().endpoint

        async def ask() -> Any:
            await endpoint.call(contact, GetTrace(), timeout_s=5.0)
            return await endpoint.call(contact, GetTrace(), timeout_s=5.0)

        with pytest.raises(PeerRefused, match="ask again"):
            asking.loop_thread.run(ask(), 15.0)


def test_another_user_gets_nothing(meeting: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says who asks."""
    monkeypatch.setattr(debug, "user_of", lambda connected: os.getuid() + 12345)
    with pytest.raises(LocalError, match="another user"):
        read_local(os.getpid())


def test_after_shutdown_the_name_is_free() -> None:
    """Nothing is left."""
    with shoal.DHT(start=True):
        assert len(names(os.getpid())) == 1
    assert until(lambda: not names(os.getpid()))


def test_a_wrong_number_is_told_clearly() -> None:
    """One line, and what to do."""
    done = dump("1")
    assert done.returncode == 1
    assert "no process 1 on this machine runs shoal" in done.stderr
