"""`shoal doctor`: finds what keeps this machine from training with others. Each line has a verdict and a remedy.

Without an invite it looks at this machine. With one it joins the network for some seconds, as a training peer would,
and asks the peers that it meets: whether they can dial this machine, what time their clocks show, how fast they take
bytes. It listens where a `shoal.DHT` with the same invite, host and port does.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli.options import run_of, run_option, timeout_option

if TYPE_CHECKING:
    from shoal.averaging.core import PeerCore
    from shoal.base.peer import Address
    from shoal.runtime.dht import DHT

__all__ = ["Finding", "doctor", "look_at_machine", "look_at_network"]

EXIT_UNWELL = 1

_FEW_DESCRIPTORS, _LITTLE_MEMORY = 1024, 2 << 30
_CLOCK_S = 1.0
_SLOW_BYTES_S = 1e6
_ANSWER_S = 4.0
_ALL = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: `ok`, `so-so` or `bad`; empty if this could not be found out.
        what: the thing that was checked.
        text: the finding, and the remedy.
    """

    verdict: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict or '?':<6}{self.what:<13}{self.text}"


@click.command(short_help="Say what keeps this machine from training with others.")
@click.argument("invite", required=False)
@click.option("--host", help="Host that the program gives its DHT to listen on. Default: none, as for shoal.DHT.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Its port; default: any that is free.")
@run_option
@timeout_option(10.0, "join")
def doctor(*, invite: str | None, host: str | None, port: int, run_id: str | None, timeout: float) -> int:
    """Look at this machine, and with INVITE (or an address) at the way to its network and back, line by line."""
    logger, bad = logging.getLogger("shoal"), False
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the report says all that the log would
    try:
        for finding in _all(invite, host, port, run_id, timeout):
            click.echo(str(finding))
            bad |= finding.verdict == "bad"
    finally:
        logger.setLevel(level)
    return EXIT_UNWELL if bad else 0


def _all(invite: str | None, host: str | None, port: int, run_id: str | None, timeout_s: float) -> Iterator[Finding]:
    from shoal.base.peer import parse_peers
    from shoal.cli.options import maddr_of
    from shoal.errors import ShoalError
    from shoal.runtime.dht import DHT

    addresses, listen_at = parse_peers(invite, name="INVITE"), maddr_of(host, port)
    run_id = run_of(invite) if run_id is None else run_id
    yield from look_at_machine()
    try:
        dht = DHT(addresses, start=True, host_maddrs=listen_at, startup_timeout=timeout_s)
    except ShoalError as error:
        if addresses:
            text = f"{error}: check whether these peers run, their addresses, and the firewalls between"
            yield Finding("bad", "way there", text)
        else:
            yield Finding("bad", "port", f"{error}")
        return
    with dht:
        yield from look_at_port(dht, host)
        if not addresses:
            yield Finding("", "network", "give an invite, so that the way to others and back is tried, too")
            return
        yield from look_at_network(dht, addresses)
        yield from look_at_run(dht, run_id)


# ---------------------------------------------------------------------------------------------------------- the machine


def look_at_machine() -> Iterator[Finding]:
    """Look at versions, descriptors and memory."""
    from shoal.protocol.wire import PROTOCOL_VERSION
    from shoal.version import __version__

    found = [f"shoal {__version__} (protocol {PROTOCOL_VERSION})", f"Python {platform.python_version()}"]
    try:
        found.append(f"torch {importlib.metadata.version('torch')}")
    except importlib.metadata.PackageNotFoundError:
        text = f"{', '.join(found)}, but no torch: this machine can introduce peers to each other, but not train"
        yield Finding("bad", "versions", text)
    else:
        yield Finding("ok", "versions", ", ".join(found))
    yield _descriptors()
    yield _memory()


def _descriptors() -> Finding:
    try:
        import resource
    except ImportError:
        return Finding("", "descriptors", "this system does not say how many it allows")
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _FEW_DESCRIPTORS:
        return Finding("ok", "descriptors", "no limit" if most == resource.RLIM_INFINITY else f"{most} allowed")
    text = f"{most} allowed, and each peer takes several: `ulimit -n 4096` before training"
    return Finding("so-so", "descriptors", text)


def _memory() -> Finding:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in text.splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return Finding("", "memory", "this system does not say how much is free")
    text = f"{free / 2**30:.1f} GiB free"
    if free < _LITTLE_MEMORY:
        return Finding("so-so", "memory", f"{text}: AdamW takes 28 bytes for each parameter, beside the activations")
    return Finding("ok", "memory", f"{text}: with AdamW for about {free / 28 / 1e9:.1f} billion parameters")


def look_at_port(dht: DHT, host: str | None) -> Iterator[Finding]:
    """Look at the address where a peer listens here, given this host or none, and the one that it announces."""
    from shoal.transport.sockets import NO_ADDRESS, all_interfaces, is_loopback, outside_host

    listens_at = dht.core().endpoint.listens_at[0]
    where = listens_at.where
    if not is_loopback(listens_at.host):
        yield Finding("ok", "port", f"a peer can listen, and would announce {where}")
    elif all_interfaces(host or _ALL) and is_loopback(outside_host(host or _ALL)):
        yield Finding("so-so", "port", f"a peer can listen, but {NO_ADDRESS}")
    else:
        text = (
            f"only this machine can dial {where}: host_maddrs='/ip4/0.0.0.0/tcp/0' (--host 0.0.0.0), or "
            "announce_maddrs, lets others in"
        )
        yield Finding("so-so", "port", text)


# ---------------------------------------------------------------------------------------------------------- the network


def look_at_network(dht: DHT, addresses: tuple[Address, ...]) -> Iterator[Finding]:
    """Look at the way to each peer of the invite, the way back, clocks, and how fast a peer takes bytes."""
    core = dht.core()
    for address in addresses:
        took_s = dht.loop_thread.run(_way_there(core, address), 2 * _ANSWER_S)
        where = address.where
        if took_s is None:
            text = f"{where} does not answer as that peer: is it up, and is the port open and forwarded?"
            yield Finding("so-so", "way there", text)
        else:
            yield Finding("ok", "way there", f"{where} in {took_s * 1000:.0f} ms, and it proved its identity")
    yield _way_back(core)
    yield dht.loop_thread.run(_clock(core), 2 * _ANSWER_S)
    yield dht.loop_thread.run(_speed(core), 3 * _ANSWER_S)


async def _way_there(core: PeerCore, address: Address) -> float | None:
    import asyncio

    from shoal.rpc import NotDialed

    began = asyncio.get_running_loop().time()
    try:
        reached = await core.endpoint.dials.gets_in(address, timeout_s=_ANSWER_S)
    except NotDialed:
        return None
    return asyncio.get_running_loop().time() - began if reached else None


def _way_back(core: PeerCore) -> Finding:
    verdict = core.reachability.verdict
    port = core.endpoint.listens_at[0].port
    if verdict is None or not verdict.asked:
        return Finding("", "way back", "no peer on another machine could be asked to dial this one")
    hosts = ", ".join(sorted({host for _, host in (verdict.reached or verdict.failed)}))
    if verdict.can_be_reached and verdict.reached:
        return Finding(
            "ok", "way back", f"{len(verdict.reached)} of {verdict.asked} peers could dial this machine, at {hosts}"
        )
    return Finding(
        "so-so",
        "way back",
        f"{len(verdict.failed)} of {verdict.asked} peers could not dial {hosts}, port {port}: a peer here only dials "
        "(client mode), and needs one that can be reached. Open this port in the firewall, and forward it in the "
        "router (--port tries a fixed one)",
    )


async def _clock(core: PeerCore) -> Finding:
    import asyncio

    from shoal.rpc.clocks import CLOCKS_DIFFER_S

    peers = core.endpoint.peers
    for peer in peers:
        core.endpoint.ask(peer)
    await asyncio.sleep(1.0)
    if not peers:
        return Finding("", "clock", "there is no peer to compare it with")
    ahead_s = core.endpoint.clock_ahead_s
    where = "ahead of" if ahead_s > 0 else "behind"
    text = f"{abs(ahead_s):.2f} s {where} the clocks of the connected peers ({len(peers)})"
    if abs(ahead_s) < _CLOCK_S:
        return Finding("ok", "clock", text)
    return Finding(
        "bad" if abs(ahead_s) > CLOCKS_DIFFER_S else "so-so", "clock", f"{text}: set this machine's clock (NTP)"
    )


async def _speed(core: PeerCore) -> Finding:
    from shoal.errors import PeerError

    for peer in core.endpoint.peers[:3]:
        try:
            rate = await core.reachability.upload_rate(peer)
        except PeerError:
            continue
        text = f"{peer.short()} takes {8 * rate / 1e6:.0f} Mbit/s from here"
        if rate < _SLOW_BYTES_S:
            text += ": compress gradients (docs/how-to/codec.md), use larger batches"
            return Finding("so-so", "bandwidth", text)
        return Finding("ok", "bandwidth", text)
    return Finding("", "bandwidth", "no peer took bytes to measure it with")


def look_at_run(dht: DHT, run_id: str | None) -> Iterator[Finding]:
    """Look at the peers that train the run, and at its settings, which must be equal here."""
    from shoal.cli.status import summary_of
    from shoal.run.watching import read_run

    if not run_id:
        yield Finding("", "run", "the invite names no run: give its name by --run")
        return
    found = read_run(dht, run_id)
    if found is None:
        yield Finding("so-so", "run", f"nobody trains {run_id!r} now: check the name")
        return
    silent = len(found.peers) - len(found.answering)
    text = summary_of(found).strip() + (f"; {silent} give no answer to this machine" if silent else "")
    yield Finding("so-so" if silent or any(peer.alone for peer in found.peers) else "ok", "run", text)
    settings = ", ".join(f"{name}={value[:60]}" for name, value in sorted(found.best.settings.items()))
    yield Finding("ok", "settings", f"must be equal here: {settings}" if settings else "the peers tell none")
