"""`shoal status`: the peers that train in a run, and their progress.

It joins the network as a client, and shows what `shoal.run.watching.read_run` reads.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, NoReturn

import click

from shoal.cli.options import run_of, run_option, timeout_option
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shoal.protocol.wire import Progress
    from shoal.run.watching import RunStatus
    from shoal.runtime.dht import DHT

__all__ = ["status", "summary_of", "table_of"]

EXIT_NOT_FOUND = 3
_WATCH_S = 2.0
_TIME = re.compile(r"every \d{1,9}(\.\d{1,9})? s(?=,)")
"""In the text of a strategy whose merges are due at a time (`Merging.text`)."""
_ABSURD = 1e12
"""Numbers from this one on are shown rounded."""


@click.command(short_help="Show the peers of a run.")
@click.argument("invite")
@run_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl+C; with --json a line each time.")
@timeout_option(5.0, "join")
def status(*, invite: str, run_id: str | None, as_json: bool, watch: bool, timeout: float) -> int:
    """Show the peers of the run that INVITE leads to (an invite or an address)."""
    from shoal.run.watching import read_run
    from shoal.runtime.dht import DHT

    run_id = run_of(invite) if run_id is None else run_id
    if not run_id:
        raise ConfigError("this invite names no run: give its name by --run")
    with DHT([invite], start=True, client_mode=True, startup_timeout=timeout) as dht:
        if watch:
            _watch(dht, run_id, as_json=as_json)
        found = read_run(dht, run_id)
    if found is None:
        click.echo(
            f"shoal: no peer of run {run_id!r} is there: check the name, and whether any peer trains it", err=True
        )
        return EXIT_NOT_FOUND
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        from rich.console import Console

        _print(found, Console(highlight=False))
    return 0


def _print(found: RunStatus, console: Console) -> None:
    console.print(table_of(found))
    console.print(summary_of(found), markup=False, soft_wrap=True)


def _watch(dht: DHT, run_id: str, *, as_json: bool) -> NoReturn:
    """Show the run again and again, at once when a link shows that a peer is gone; Ctrl+C ends it."""
    import threading

    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from shoal.events import Event, PeerLost
    from shoal.run.watching import read_run

    news, lost = threading.Event(), set[str]()

    def note(event: Event) -> None:
        if isinstance(event, PeerLost):
            lost.add(str(event.peer))
            news.set()

    dht.events.subscribe(note)
    nobody = f"no peer of run {run_id!r} is there"
    console = Console(highlight=False)
    # A pipe or a file would get the last picture of a live display only, when it ends.
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    with live or contextlib.nullcontext():
        while True:
            news.clear()
            found = read_run(dht, run_id, lost=frozenset(lost))
            lost.clear()
            if as_json:
                click.echo(json.dumps(None if found is None else found.to_dict()))
            elif live is not None:
                shown = Text(nobody) if found is None else Group(table_of(found), Text(summary_of(found)))
                live.update(shown, refresh=True)
            elif found is not None:
                _print(found, console)
            else:
                console.print(nobody, markup=False, soft_wrap=True)
            news.wait(_WATCH_S)


def table_of(found: RunStatus) -> Table:
    """A table with a row for each peer."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("peer", "epoch", "state", "on the way" if _merges(found) else "samples", "samples/s", "share"):
        table.add_column(name, justify="left" if name in ("peer", "state") else "right", no_wrap=True)
    table.add_column("address", overflow="fold")
    for peer in found.peers:
        best = peer.digest == found.best.digest and not found.differs(peer)
        table.add_row(
            Text(peer.contact.peer.short()),
            str(peer.epoch),
            Text(peer.digest.hex()[:8] + ("!" if found.differs(peer) else ""), style="" if best else "yellow"),
            _way(found, peer.done) if _merges(found) else _short(peer.done),
            _short(found.rate(peer)),
            f"{found.share(peer):.0%}",
            Text(_reached_by(found, peer)),
        )
    return table


def _reached_by(found: RunStatus, peer: Progress) -> str:
    if not peer.contact.addresses:
        return f"none: it only dials{_alone(peer)}"
    address = peer.contact.addresses[0]
    silent = "" if str(peer.contact.peer) in found.answering else " (silent)"
    return f"{address.where}{silent}{_alone(peer)}"


def _alone(peer: Progress) -> str:
    return " (trains alone)" if peer.alone else ""


def summary_of(found: RunStatus) -> str:
    """The whole run in a sentence."""
    peers, behind = len(found.peers), len(found.peers) - len(found.together)
    text = f"\nrun {found.run_id!r}: {peers} {'peer' if peers == 1 else 'peers'} at epoch {found.best.epoch}"
    if behind:
        text += f", {behind} of them at another state"
    target = found.target_batch_size
    if (time := _TIME.match(found.best.settings.get("strategy", ""))) is not None:
        text += f"; a merge {time[0]}"
    elif _merges(found):
        text += f"; {_way(found, found.samples / max(1, len(found.together)))} of the way to the next merge"
    else:
        text += f"; {_short(found.samples)} {f'of {target} ' if target else ''}samples for the next step"
    text += f", {_short(found.samples_per_s)} samples/s"
    if found.checked is not None:
        text += f"; parameters: {found.checked}"
    if alone := sum(peer.alone for peer in found.peers):
        text += f"; {alone} {'trains' if alone == 1 else 'train'} alone: their logs say why"
    if found.end_epoch is not None:
        text += f"; ends at epoch {found.end_epoch}"
    return text


def _merges(found: RunStatus) -> bool:
    """Whether peers merge what each has trained: then they say how far they are, in thousandths."""
    return "strategy" in found.best.settings


def _way(found: RunStatus, thousandths: float) -> str:
    """How far a peer is on its way to the next merge. If that is due at a time, peers say only that it is."""
    by_time = _TIME.match(found.best.settings.get("strategy", "")) is not None
    return "-" if by_time and thousandths < 1000 else f"{_short(thousandths / 10)}%"


def _short(number: float) -> str:
    """A peer's text in a few printable characters."""
    if number >= _ABSURD:
        return f"{number:.1e}"
    return str(number) if isinstance(number, int) else f"{number:.1f}"
