"""`shoal dht`: a peer that trains nothing, through which others find each other.

Scripts need the invite: it is the only line on stdout. Information for people goes to stderr. The main thread prints
everything: a terminal that does not take more output must not hold up the peer.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from shoal.cli.options import WholePath, announced, checked_run, maddr_of, upload_limit_option
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.base.peer import PeerID
    from shoal.events import Event
    from shoal.runtime.dht import DHT

__all__ = ["dht"]


@click.command(short_help="Run a bootstrap peer; prints one invite.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Host to listen on; 0.0.0.0 lets others in.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port; 0 is any free one.")
@click.option("--announce", metavar="HOST[:PORT]", help="Address that others dial, if it is another one.")
@click.option("--identity", type=WholePath(dir_okay=False), help="Key file; made if missing.")
@click.option("--run", "run_id", callback=checked_run, help="Name of the run that the invite is for.")
@click.option("--join", metavar="INVITE", multiple=True, help="Join this network instead of a new one; repeatable.")
@upload_limit_option
@click.option("--invite-file", type=WholePath(dir_okay=False), help="Write the invite here as well.")
@click.option("--quiet", is_flag=True, help="Print nothing but the invite.")
def dht(  # noqa: PLR0913 (one for each option)
    *,
    host: str,
    port: int,
    announce: str | None,
    identity: Path | None,
    run_id: str | None,
    join: tuple[str, ...],
    upload_limit: float | None,
    invite_file: Path | None,
    quiet: bool,
) -> None:
    """Run a bootstrap peer: print an invite with which others join, and stay until Ctrl+C."""
    from shoal.base.peer import parse_peers
    from shoal.runtime.dht import DHT

    parse_peers(join, name="--join")
    places = [announced(announce)] if announce is not None else []
    news: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: leave now
    where = maddr_of(host, port)
    # A peer that only dials introduces nobody: this one announces its address in any case.
    peer = DHT(
        join,
        host_maddrs=where,
        announce_maddrs=places,
        identity_path=identity,
        client_mode=False,
        upload_limit=upload_limit,
    )
    if not quiet:
        peer.events.subscribe(news.put)
    peer.run_in_background()
    with _leave_on_signal(news), peer:
        invite = str(peer.invite(run_id or ""))
        if invite_file is not None:
            _write(invite_file, invite + "\n")
        if not quiet:
            _explain(peer, host, announced=announce is not None)
        click.echo(invite)  # flushes
        _tell_until_told_to_leave(news)


def _explain(peer: DHT, host: str, *, announced: bool) -> None:
    from shoal.transport.sockets import is_loopback

    address = peer.get_visible_maddrs()[0]
    click.echo(f"peer {peer.peer_id.short()} at {address.host} port {address.port}; Ctrl+C leaves", err=True)
    if is_loopback(host) and not announced:
        click.echo("only this machine can connect: --host 0.0.0.0 lets others in", err=True)
    click.echo("others join by this invite:", err=True)


def _tell_until_told_to_leave(news: queue.SimpleQueue[Event | None]) -> None:
    from shoal.events import PeerConnected, PeerLost

    known: set[PeerID] = set()
    while (event := news.get()) is not None:
        match event:
            case PeerConnected(peer=peer) if peer not in known:
                known.add(peer)
                _say(f"+ {peer.short()} came", len(known))
            case PeerLost(peer=peer, reason=reason) if peer in known:
                known.remove(peer)
                _say(f"- {peer.short()} is gone: {reason}", len(known))


def _say(what: str, peers: int) -> None:
    noun = "peer" if peers == 1 else "peers"
    click.echo(f"{time.strftime('%H:%M:%S')} {what} ({peers} {noun})", err=True)


@contextlib.contextmanager
def _leave_on_signal(news: queue.SimpleQueue[Event | None]) -> Iterator[None]:
    """The first Ctrl+C or SIGTERM ends the wait for news, the second one everything."""
    told = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal told
        if told:
            raise KeyboardInterrupt
        told = True
        news.put(None)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing, so that a reader never sees half an invite."""
    from shoal.base.files import replace_file

    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"--invite-file {path}: {error.strerror or error}") from error
