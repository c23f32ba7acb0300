"""`shoal status`: the peers that train in a run, and their progress.

It joins the network as a client, reads the entries that the peers of the run publish (`shoal.wire.Progress`, in the DHT
under `RUN_ID_progress`), and asks each peer for a sign of life. It leaves out a peer that gives none and has not
renewed its entry for some seconds: that peer is gone. An entry is shown as its peer wrote it; unreadable entries are
left out.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from shoal.cli.options import run_of, run_option, timeout_option
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shoal.core import PeerCore
    from shoal.runtime.dht import DHT
    from shoal.wire import Progress

__all__ = ["RunStatus", "read_run", "status", "summary_of", "table_of"]

EXIT_NOT_FOUND = 3
_ANSWER_S = 2.0
_RENEWED_S = 3.0
"""An entry that is older was not renewed: peers renew their entries every two seconds."""

_WATCH_S = 2.0
_MOST = 1e18
"""The highest rate that counts, samples a second, so that sums stay finite."""

_ABSURD = 1e12
"""Numbers from this one on are shown rounded."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as its peers describe it.

    Attributes:
        run_id: the run's name.
        peers: the entry of each peer, the best state first.
        answering: the ids of the peers that gave a sign of life.
    """

    run_id: str
    peers: tuple[Progress, ...]
    answering: frozenset[str]

    @property
    def best(self) -> Progress:
        """A peer at the best state, to which the others catch up."""
        return self.peers[0]

    @property
    def together(self) -> tuple[Progress, ...]:
        """The peers at the best state."""
        return tuple(peer for peer in self.peers if peer.digest == self.best.digest)

    def differs(self, peer: Progress) -> bool:
        """Whether a peer is at the best state by name, but had other parameters at the last check."""
        return peer in self.together and peer.check is not None and peer.check[2] != self._state_at(peer.check[0])

    def _state_at(self, epoch: int) -> bytes | None:
        """The digest of parameters that most peers at the best state found at the check of this epoch."""
        found = [peer.check[2] for peer in self.together if peer.check is not None and peer.check[0] == epoch]
        return max(sorted(set(found)), key=found.count, default=None)

    @property
    def checked(self) -> str | None:
        """The result of the last check of the parameters by the peers at the best state; None if there was none."""
        checks = [peer.check for peer in self.together if peer.check is not None]
        if not checks:
            return None
        epoch = max(check[0] for check in checks)
        newest = [check for check in checks if check[0] == epoch]
        others = sum(map(self.differs, self.together))
        if others:
            return f"{others} of {len(checks)} differ"
        equal = len({check[1] for check in newest}) == 1
        what = "identical" if equal else "identical but for rounding"
        return f"{what} at epoch {epoch} on {len(newest)} of {len(self.together)}"

    @property
    def samples(self) -> int:
        """The samples accumulated for the next step."""
        return sum(peer.samples for peer in self.together)

    @property
    def samples_per_s(self) -> float:
        """The rate of all peers together, samples per second."""
        return sum(map(_rate, self.peers))

    @property
    def target_batch_size(self) -> int | None:
        """The samples of one step; None if the peers do not say."""
        text = self.best.settings.get("target_batch_size", "")
        return int(text) if text.isdecimal() and len(text) < 16 else None

    @property
    def end_epoch(self) -> int | None:
        """The epoch by which the run ends, as more than half of the peers at its best state announce it."""
        said = sorted(math.inf if peer.end_epoch is None else peer.end_epoch for peer in self.together)
        middle = said[len(said) // 2] if said else math.inf
        return None if middle == math.inf else int(middle)

    def share(self, peer: Progress) -> float:
        """The part of all samples that comes from this peer, 0 to 1."""
        return _rate(peer) / self.samples_per_s if self.samples_per_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The whole status, for JSON."""
        return {
            "run_id": self.run_id,
            "epoch": self.best.epoch,
            "samples": self.samples,
            "target_batch_size": self.target_batch_size,
            "samples_per_s": self.samples_per_s,
            "end_epoch": self.end_epoch,
            "settings": dict(self.best.settings),
            "parameters": self.checked,
            "peers": [
                {
                    "peer_id": str(peer.contact.peer),
                    "epoch": peer.epoch,
                    "state_digest": peer.digest.hex(),
                    "differs": self.differs(peer),
                    "branch_samples": peer.branch_samples,
                    "samples": peer.samples,
                    "samples_per_s": _rate(peer),
                    "share": self.share(peer),
                    "alone": peer.alone,
                    "addresses": [str(address) for address in peer.contact.addresses],
                    "answers": str(peer.contact.peer) in self.answering,
                }
                for peer in self.peers
            ],
        }


@click.command(short_help="Show the peers of a run.")
@click.argument("invite")
@run_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl+C; with --json a line each time.")
@timeout_option(5.0, "join")
def status(*, invite: str, run_id: str | None, as_json: bool, watch: bool, timeout: float) -> int:
    """Show the peers of the run that INVITE leads to (an invite or an address)."""
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


def read_run(dht: DHT, run_id: str, *, lost: frozenset[str] = frozenset()) -> RunStatus | None:
    """Read the progress of a run's peers from the network; None if there are none.

    Args:
        dht: the peer that reads.
        run_id: the run's name.
        lost: peers whose link was lost a moment ago, so that they are not waited for.
    """
    import asyncio

    peers = _read(dht, run_id)
    answering = dht.loop_thread.run(_answering(dht.core(), peers), 2 * _ANSWER_S)
    silent = {str(peer.contact.peer): peer.time for peer in peers if str(peer.contact.peer) not in answering}
    if silent.keys() - lost:
        dht.loop_thread.run(asyncio.sleep(_RENEWED_S), 2 * _RENEWED_S)
        peers = _read(dht, run_id)
    peers = [peer for peer in peers if peer.time > silent.get(str(peer.contact.peer), -math.inf)]
    return RunStatus(run_id, tuple(peers), frozenset(answering)) if peers else None


def _read(dht: DHT, run_id: str) -> list[Progress]:
    record = dht.get(f"{run_id}_progress", latest=True)
    return _decode(record.value if record is not None else None)


def _decode(entries: object) -> list[Progress]:
    """The readable entries, the best state first."""
    import msgspec

    from shoal.progress import StateKey
    from shoal.wire import Progress, decode

    peers = []
    for subkey, entry in entries.items() if isinstance(entries, Mapping) else ():
        try:
            progress = decode(entry.value, Progress)
        except (msgspec.MsgspecError, TypeError, ConfigError):
            continue
        if progress.contact.peer.raw == subkey and not progress.left:
            peers.append(progress)

    def rank(peer: Progress) -> tuple[StateKey, float, str]:
        return StateKey.of(peer.epoch, peer.branch_samples, peer.digest), _rate(peer), str(peer.contact.peer)

    return sorted(peers, key=rank, reverse=True)


async def _answering(core: PeerCore, peers: Sequence[Progress]) -> list[str]:
    """The ids of the peers that answer a ping."""
    import asyncio

    from shoal.errors import PeerError
    from shoal.wire import DhtPing

    async def ping(peer: Progress) -> bool:
        try:
            await core.endpoint.call(peer.contact, DhtPing(), timeout_s=_ANSWER_S)
        except PeerError:
            return False
        return True

    answers = await asyncio.gather(*map(ping, peers))
    return [str(peer.contact.peer) for peer, answered in zip(peers, answers, strict=True) if answered]


def table_of(found: RunStatus) -> Table:
    """A table with a row for each peer."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("peer", "epoch", "state", "samples", "samples/s", "share"):
        table.add_column(name, justify="left" if name in ("peer", "state") else "right", no_wrap=True)
    table.add_column("address", overflow="fold")
    for peer in found.peers:
        best = peer.digest == found.best.digest and not found.differs(peer)
        table.add_row(
            Text(peer.contact.peer.short()),
            str(peer.epoch),
            Text(peer.digest.hex()[:8] + ("!" if found.differs(peer) else ""), style="" if best else "yellow"),
            _short(peer.samples),
            _short(_rate(peer)),
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
    text += f"; {_short(found.samples)} {f'of {target} ' if target else ''}samples for the next step"
    text += f", {_short(found.samples_per_s)} samples/s"
    if found.checked is not None:
        text += f"; parameters: {found.checked}"
    if alone := sum(peer.alone for peer in found.peers):
        text += f"; {alone} {'trains' if alone == 1 else 'train'} alone: their logs say why"
    if found.end_epoch is not None:
        text += f"; ends at epoch {found.end_epoch}"
    return text


def _rate(peer: Progress) -> float:
    return min(max(0.0, peer.rate), _MOST) if math.isfinite(peer.rate) else 0.0


def _short(number: float) -> str:
    """A peer's text in a few printable characters."""
    if number >= _ABSURD:
        return f"{number:.1e}"
    return str(number) if isinstance(number, int) else f"{number:.1f}"
