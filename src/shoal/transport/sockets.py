"""Sockets for the TCP transport, and their end in a forked child.

A forked child (a DataLoader worker) inherits descriptors: it would keep a killed parent's connections open, and the
other peers would wait for them. So every socket made here is closed in a child right after the fork. The parent's
connections do not notice: closing a copy of a descriptor sends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import socket
import struct
import sys
import weakref
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from shoal.transport.pacing import Flow

__all__ = [
    "NO_ADDRESS",
    "accept",
    "acked_bytes",
    "all_interfaces",
    "flow",
    "host_towards",
    "is_loopback",
    "is_private",
    "new_socket",
    "open_files_limit",
    "open_sockets",
    "outside_host",
    "pace",
    "packet_bytes",
    "resolve",
    "same_network",
    "takes_both_families",
    "tune",
]

NO_ADDRESS = (
    "this machine has no address that others can dial: connect it to a network, or give announce_maddrs (--announce)"
)
"""Said of a machine that listens on all interfaces, and has none but the loopback."""

open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Every socket of every transport of this process."""


def _close_in_child() -> None:
    """Close the copies of our sockets, in a forked child. The parent's connections do not notice."""
    for sock in list(open_sockets):
        # detach: the descriptor's number may soon be another file's, which the socket object must never close
        if (descriptor := sock.detach()) >= 0:
            os.close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


async def resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Socket families and addresses of a host. Only a name takes the resolver (and the loop's thread for it)."""
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return [(family, (host, port))]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def new_socket(family: int) -> socket.socket:
    """A TCP socket that is set up and will not live on in a forked child. Raises `OSError`."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    tune(sock)
    return sock


async def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
    """The next connection, and the address that it comes from. A cancelled call has accepted nothing.

    `loop.sock_accept` accepts in one step of the loop and hands over in the next: a caller that is cancelled in between
    loses a socket that nobody closes. Raises `OSError`.
    """
    loop = asyncio.get_running_loop()
    while True:
        readable = loop.create_future()
        loop.add_reader(listener, lambda made=readable: made.done() or made.set_result(None))  # type: ignore[misc]
        try:
            await readable
        finally:
            loop.remove_reader(listener)
        with contextlib.suppress(BlockingIOError):  # it hung up meanwhile
            sock, sockaddr = listener.accept()
            tune(sock)
            return sock, sockaddr


_KEEP_AWAKE = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 30),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
"""The options that keep a connection awake: times in seconds, and a number of tries."""


def tune(sock: socket.socket) -> None:
    """Set up a socket (also an accepted one): no waiting, no Nagle, BBR where the kernel lets a socket choose.

    At 1 % random loss on 100 Mbit/s and 50 ms BBR moves 83 Mbit/s, cubic 4. Connections that wait for their next stream
    send nothing, and home routers and load balancers forget connections that are silent for minutes. So the kernel
    keeps them awake, and notices when they are gone.
    """
    open_sockets.add(sock)
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for level, name, value in _KEEP_AWAKE:
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, value)
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # not built in, or not allowed: the system's choice stays
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


_ACKED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` of Linux's `struct tcp_info` (since 4.1)."""


def acked_bytes(sock: socket.socket) -> int:
    """Bytes that the other system has acknowledged; 0 if this system does not tell, or the socket is closed."""
    if sys.platform != "linux":
        return 0
    try:
        return int(_ACKED.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size))[0])
    except (OSError, struct.error):
        return 0


_FLOW = struct.Struct("=16xI48xI72xII40xI")
"""`tcpi_snd_mss`, `_rtt`, `_notsent_bytes`, `_min_rtt` and `_delivered` (since 4.18); times in microseconds."""

_SENT = struct.Struct("=136xI60xQ")
"""`tcpi_segs_out` and `tcpi_bytes_sent` (since 4.19), what was sent twice included."""

_HEADER_BYTES = {socket.AF_INET: 20 + 32, socket.AF_INET6: 40 + 32}
"""Of IP and of TCP with timestamps."""

_SO_MAX_PACING_RATE = 47
"""Of Linux (since 3.13); Python does not name it."""


def flow(sock: socket.socket) -> Flow | None:
    """What the system knows of the way of a connection; None if it does not tell, or the socket is closed."""
    if sys.platform != "linux":
        return None
    try:
        known = _FLOW.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FLOW.size))
    except (OSError, struct.error):
        return None
    segment, round_trip, unsent, least, delivered = known
    return Flow(unsent > 0, delivered * segment, max(0, round_trip - least) * 1e-6, round_trip * 1e-6)


def packet_bytes(sock: socket.socket) -> int:
    """The bytes of all packets sent so far; 0 if this system does not tell, or the socket is closed."""
    if sys.platform != "linux":
        return 0
    try:
        packets, payload = _SENT.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT.size))
    except (OSError, struct.error):
        return 0
    return int(payload + packets * _HEADER_BYTES.get(sock.family, 0))


def pace(sock: socket.socket, bytes_per_s: float) -> None:
    """Let the system send no faster than this, also what it has already; where it can (`flow` says so)."""
    rate = int(bytes_per_s) if bytes_per_s < math.inf else (1 << 64) - 1
    with contextlib.suppress(OSError):  # closed
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))


_ANY = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")


def all_interfaces(host: str) -> bool:
    """Whether `host` stands for every address of this machine."""
    return host in _ANY


@lru_cache(maxsize=256)  # a peer that trains alone asks at each step
def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can dial `host`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def is_private(host: str) -> bool:
    """Whether `host` is an address that only its own network knows."""
    with contextlib.suppress(ValueError):
        return not ((address := ipaddress.ip_address(host)).is_global or address.is_loopback)
    return False


_PRIVATE = [
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
]
"""The networks whose addresses mean other machines in each home, and behind each provider (RFC 1918, 6598, 4193)."""

_NEAR_BITS = {4: 24, 6: 64}
"""Machines whose addresses begin with as many equal bits count as one network."""


@lru_cache(maxsize=4096)
def same_network(own: str, host: str) -> bool:
    """Whether a host seems to be in the network of our own address: behind the same router, or in a private one.

    Args:
        own: an address of this machine.
        host: the other one.
    """
    if own == host:
        return True
    try:
        ours, other = ipaddress.ip_address(own), ipaddress.ip_address(host)
    except ValueError:
        return False
    if other.is_loopback or other.is_link_local or any(other in network for network in _PRIVATE):
        return True
    bits = _NEAR_BITS[ours.version]
    return other in ipaddress.ip_network((own, bits), strict=False)


def open_files_limit() -> int:
    """How many files this process may have open."""
    try:
        import resource  # noqa: PLC0415 (not on every system)
    except ImportError:
        return 1 << 16
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else soft


def outside_host(host: str) -> str:
    """The address to announce for `host`. For all interfaces it is the one that this machine uses towards the outside.

    Without a default route it is that of the first interface that has one; 127.0.0.1 or ::1 if none has.
    """
    if host not in _ANY:
        return host
    family, somewhere = _ANY[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))  # UDP: asks the routing table, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return next(_addresses_of_interfaces(family), _LOOPBACK[host])


async def host_towards(host: str, port: int) -> str:
    """The address that this machine uses towards another one; empty if there is no way to it, or no such name."""
    try:
        targets = await resolve(host, port)
    except (OSError, UnicodeError):
        return ""
    for family, sockaddr in targets:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(sockaddr)  # UDP: asks the routing table, sends nothing
            return str(probe.getsockname()[0])
    return ""


def takes_both_families(listener: socket.socket) -> bool:
    """Let a socket for all IPv6 addresses take IPv4, too; False if it is another one, or the system refuses."""
    if listener.family != socket.AF_INET6:
        return False
    try:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        return False
    return True


def _addresses_of_interfaces(family: int) -> Iterator[str]:
    """Addresses of this machine that others may reach; on Linux only."""
    if family == socket.AF_INET6:
        yield from _ipv6_addresses()
        return
    if not hasattr(socket, "if_nameindex"):
        return
    with contextlib.suppress(OSError, ImportError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        import fcntl  # noqa: PLC0415 (not on every system)

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
                if not is_loopback(address):
                    yield address


def _ipv6_addresses() -> Iterator[str]:
    """Each line: address, interface, length of the prefix, scope (0: the whole network), flags, name."""
    with contextlib.suppress(OSError, ValueError), _IF_INET6.open(encoding="ascii") as lines:
        for line in lines:
            digits, _, _, scope, *_ = line.split()
            if int(scope, 16) == 0:
                yield str(ipaddress.IPv6Address(int(digits, 16)))
