"""The benchmarks' network emulator with real namespaces, devices and TCP. Skipped where they cannot be made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.emulator.namespaces import Emulator, NotPermitted
from benchmarks.emulator.star import Shape

BYTES = 400_000
SERVER = f"""
import socket
with socket.create_server(("10.201.0.1", 5000)) as listener:
    print("ready", flush=True)
    connection, _ = listener.accept()
    received = 0
    while received < {BYTES}:
        received += len(connection.recv(1 << 16))
    connection.sendall(b"done")
    print(received, flush=True)
"""
CLIENT = f"""
import socket
with socket.create_connection(("10.201.0.1", 5000)) as connection:
    connection.sendall(bytes({BYTES}))
    assert connection.recv(4) == b"done"
"""


@pytest.fixture
def net() -> Iterator[Emulator]:
    """Two hosts, 50 Mbit/s, 8 ms for a round trip, 1% of the packets lost."""
    emulator = Emulator(2, Shape(rate_mbit=50.0, delay_ms=2.0, loss=0.01), seed=1)
    try:
        emulator.__enter__()
    except NotPermitted as reason:
        pytest.skip(f"network namespaces cannot be made here: {reason}")
    try:
        yield emulator
    finally:
        emulator.__exit__(None, None, None)


def namespaces() -> str:
    """What `ip` lists."""
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_bytes_cross_the_network_and_nothing_is_left(net: Emulator) -> None:
    """TCP moves its bytes through lossy lines whole; afterwards the packets are counted and the namespaces gone."""
    name = net.command(0)[-1]
    assert name in namespaces()
    server = subprocess.Popen((*net.command(0), sys.executable, "-c", SERVER), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        subprocess.run((*net.command(1), sys.executable, "-c", CLIENT), check=True, timeout=30)
        assert server.communicate(timeout=30)[0] == f"{BYTES}\n"
    finally:
        server.kill()
        server.communicate()
    net.__exit__(None, None, None)
    assert net.counts["packets"] >= BYTES / 1448
    assert name not in namespaces()


def test_what_runs_on_a_host_ends_with_the_network(net: Emulator) -> None:
    """A process that nobody stopped does not outlive its namespace."""
    command = (*net.command(1), "sh", "-c", "echo ready; exec sleep 600")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        net.__exit__(None, None, None)
        assert process.wait(timeout=10) != 0
    finally:
        process.kill()
        process.communicate()
