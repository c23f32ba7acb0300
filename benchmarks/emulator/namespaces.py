"""Network namespaces, one for each host, with a TUN device in each whose other end the emulator's process holds.

Linux only, and only for who may make namespaces (root). Everything has the name of the process that made it; what a
killed one left is removed when the next one starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.emulator.star import Shape

__all__ = ["Emulator", "NotPermitted", "end_processes", "ip", "remove", "remove_leftovers"]

ROOT = Path(__file__).resolve().parent.parent.parent
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x400454CA, 0x0001, 0x1000, 0x4000
_TUNSETOFFLOAD, _TUN_F_CSUM, _TUN_F_TSO4 = 0x400454D0, 0x01, 0x02
_NAME = re.compile(r"^shoal-(\d+)-\d+$")
_QUEUE_PACKETS = 4096
_STOP_S = 5.0
_TRAINS = 14
"""`net.ipv4.tcp_tso_rtt_log` of the hosts. Senders put up to 64 KiB / 2^(round trip in us / 2^this) more into a train:
16 KiB at 40 ms, where the kernel's 9 leaves them 3 packets at 33 Mbit/s. It lets one core carry all hosts."""


class NotPermitted(Exception):
    """Network namespaces cannot be made here; says why."""


class Emulator:
    """Hosts in namespaces, joined by shaped lines. A context manager: it begins and ends with the block.

    Args:
        hosts: how many, at most 250.
        shape: of their lines.
        seed: draws which packets are lost.
        up_mbit: the rates of the first hosts' lines up, in place of that of the shape.

    Attributes:
        addresses: of the hosts, which can reach each other and themselves, and nothing else.
        counts: what happened, once the block has ended: packets, those lost by chance and those dropped from full
            queues, the longest time that one was late, the bytes that each host has sent in each
            `forward.PERIOD_S`, and the CPU seconds that the emulator took.

    Raises:
        NotPermitted: on entering the block.
    """

    def __init__(self, hosts: int, shape: Shape, *, seed: int = 0, up_mbit: Sequence[float] = ()) -> None:
        self.shape, self._seed, self._up_mbit = shape, seed, list(up_mbit)
        self.addresses = [f"10.201.0.{index + 1}" for index in range(hosts)]
        self.counts: dict[str, Any] = {}
        self._names = [f"shoal-{os.getpid()}-{index}" for index in range(hosts)]
        self._process: subprocess.Popen[str] | None = None

    def command(self, host: int) -> tuple[str, ...]:
        """What a command must begin with to run on a host."""
        return ("ip", "netns", "exec", self._names[host])

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            raise NotPermitted("there is no `ip` command (iproute2) here")
        remove_leftovers()
        devices: list[int] = []
        try:
            for index, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
                devices.append(_make_host(name, f"sh{os.getpid()}-{index}", address))
            self._start(devices)
        except BaseException:
            self._remove()
            raise
        finally:
            for device in devices:
                os.close(device)
        return self

    def _start(self, devices: list[int]) -> None:
        options = {"devices": devices, "addresses": self.addresses, "shape": self.shape._asdict(), "seed": self._seed}
        options["up_mbit"] = self._up_mbit
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulator.forward", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=devices,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for us: it ends when we do
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self._names:
            end_processes(name)
        if self._process is not None:
            try:
                answer, _ = self._process.communicate(timeout=_STOP_S)
                self.counts = json.loads(answer) if answer else {}
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for name in self._names:
            remove(name)


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone, and what still runs in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        name = line.split(" ")[0]
        if (found := _NAME.match(name)) and not Path("/proc", found[1]).exists():
            end_processes(name)
            remove(name)


def _make_host(name: str, device: str, address: str) -> int:
    """A namespace with a device; returns the device's other end."""
    ip("netns", "add", name)
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotPermitted(f"no TUN devices: {error}") from error
    try:
        kind = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), kind))
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        ip("link", "set", device, "netns", name)
        ip("-n", name, "address", "add", f"{address}/24", "dev", device)
        ip("-n", name, "link", "set", device, "txqueuelen", str(_QUEUE_PACKETS), "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("netns", "exec", name, "sh", "-c", f"echo {_TRAINS} > /proc/sys/net/ipv4/tcp_tso_rtt_log")
    except OSError as error:
        os.close(tun)
        raise NotPermitted(f"no TUN device could be made: {error}") from error
    except BaseException:
        os.close(tun)
        raise
    return tun


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"`ip {' '.join(arguments)}` said: {done.stderr.strip()}")


def end_processes(name: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def remove(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
