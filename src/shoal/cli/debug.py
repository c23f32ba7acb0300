"""`shoal debug dump`: the last events of a peer, from its flight recorder."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.options import timeout_option
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.protocol.wire import Trace, TraceEntry

__all__ = ["debug", "lines_of", "to_dict"]

_SHORT = 8
_PEER_ID_CHARACTERS = 52


@click.group(short_help="See what happened at a peer.")
def debug() -> None:
    """See what happened at a peer."""


@debug.command()
@click.argument("whom", metavar="PID|INVITE")
@click.option("--last", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Events to show.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@timeout_option(5.0, "wait")
def dump(*, whom: str, last: int, as_json: bool, timeout: float) -> None:
    """Print the last events of the process PID on this machine, or of the peer that INVITE leads to.

    A process of yours tells everything; a peer elsewhere answers every invited peer, without the texts of warnings.
    INVITE is an invite or an address; of several peers in an invite the first that answers is asked.
    """
    traces = _local(whom, timeout) if whom.isdecimal() else [_remote(whom, last, timeout)]
    if as_json:
        click.echo(json.dumps([to_dict(trace, last) for trace in traces], indent=2))
        return
    for trace in traces:
        for line in lines_of(trace, last):
            click.echo(line)


def _local(pid: str, timeout_s: float) -> list[Trace]:
    from shoal.runtime.debug import read_local

    return read_local(int(pid), timeout_s=timeout_s)


def _remote(invite: str, last: int, timeout_s: float) -> Trace:
    from shoal.base.peer import parse_peers
    from shoal.errors import PeerError, PeerUnreachable
    from shoal.protocol.wire import Contact, GetTrace
    from shoal.runtime.dht import DHT

    addresses = parse_peers(invite, name="INVITE")
    if not addresses:
        raise ConfigError(f"{invite!r} names no peer: give an invite, or the address of a peer")
    with DHT([invite], start=True, client_mode=True, startup_timeout=timeout_s) as dht:
        endpoint = dht.core().endpoint

        async def ask() -> Trace:
            error: PeerError | None = None
            for address in addresses:
                try:
                    contact = Contact(address.peer_id, (address,))
                    return await endpoint.call(contact, GetTrace(last), timeout_s=timeout_s)
                except PeerError as refused:
                    error = refused
            raise error or PeerUnreachable("nobody answered")

        return dht.loop_thread.run(ask(), len(addresses) * timeout_s)


def to_dict(trace: Trace, last: int = 1000) -> dict[str, Any]:
    """The whole trace, for JSON."""
    return {
        "peer_id": str(trace.peer),
        "pid": trace.pid or None,
        "began": trace.began,
        "seconds": trace.now_s,
        "events": [
            {"number": entry.number, "at_s": entry.at_s, "event": entry.kind, **_fields(entry)}
            for entry in trace.entries[-last:]
        ],
    }


def _fields(entry: TraceEntry) -> dict[str, Any]:
    return {f"{name}_" if name in ("number", "at_s", "event") else name: entry.fields[name] for name in entry.fields}


def lines_of(trace: Trace, last: int = 1000) -> list[str]:
    """A line for each event, for people: seconds before now, the event, the peer."""
    entries = trace.entries[-last:]
    began = time.strftime("%H:%M:%S", time.localtime(trace.began))
    process = f", process {trace.pid}" if trace.pid else ""
    forgotten = entries[0].number if entries else 0
    before = f" ({forgotten} earlier ones are not shown)" if forgotten else ""
    head = f"peer {trace.peer.short()}{process}: began at {began}, {trace.now_s:.1f} s ago; {len(entries)} events"
    return [head + before, *(_line(entry, trace.now_s) for entry in entries)]


def _line(entry: TraceEntry, now_s: float) -> str:
    told = "  ".join(f"{name}={_short(value)}" for name, value in entry.fields.items())
    return f"{entry.at_s - now_s:>10.3f}  {entry.kind:<20}{told}".rstrip()


def _short(value: object) -> str:
    """A value for people: peers by their short names, round ids by their first digits, numbers with three places."""
    if isinstance(value, list):
        return "[" + " ".join(map(_short, value)) + "]"
    if isinstance(value, float):
        return f"{value:.3f}"
    if not isinstance(value, str):
        return str(value)
    if len(value) in (32, 64) and set(value) <= set("0123456789abcdef"):
        return value[:8]
    if len(value) == _PEER_ID_CHARACTERS and value.isalnum():
        return value[:_SHORT]
    # Another machine's text must not be able to move the cursor.
    return "".join(char if char.isprintable() else "?" for char in value)
