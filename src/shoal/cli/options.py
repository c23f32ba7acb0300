"""Options that several subcommands share, and what an invite on the command line names."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from shoal.errors import ConfigError

__all__ = [
    "Real",
    "WholePath",
    "announced",
    "checked_run",
    "maddr_of",
    "run_of",
    "run_option",
    "timeout_option",
    "upload_limit_option",
]

F = TypeVar("F", bound=Callable[..., Any])


class WholePath(click.Path):
    """A path as it is now: the program may change its folder. `~` is the user's home, also where no shell reads it."""

    def __init__(self, **options: bool) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(Path(value).expanduser().absolute(), param, ctx)


class Real(click.FloatRange):
    """A finite number within a range: `nan` is within every range of click's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def timeout_option(default: float, what: str) -> Callable[[F], F]:
    """`--timeout SECONDS`."""
    return click.option(
        "--timeout", type=Real(0.1, 300), default=default, show_default=True, help=f"Seconds to {what}."
    )


def checked_run(_: click.Context, __: click.Parameter, run_id: str | None) -> str | None:
    """The name of a run as `--run` gives it. Raises `ConfigError` for a text that no run can have as its name."""
    from shoal.base.peer import check_run_id

    if run_id is not None:
        check_run_id(run_id, "--run")
    return run_id


run_option = click.option(
    "--run", "run_id", callback=checked_run, help="Name of the run; by default the one that the invite is for."
)


upload_limit_option = click.option(
    "--upload-limit",
    type=Real(32 << 10, 1e15),
    metavar="BYTES",
    help="Bytes per second that this peer sends in all. Default: no limit.",
)


def run_of(invite: str | None) -> str:
    """The run that an invite or an address names; empty if it names none.

    Raises:
        ConfigError: this is neither an invite nor an address.
    """
    from shoal.base.peer import parse_peers

    runs = [""]
    parse_peers(invite, name="INVITE", invited=runs.append)
    return runs[-1]


def maddr_of(host: str | None, port: int, option: str = "--host") -> str:
    """A place as `shoal.DHT` takes it. Raises `ConfigError` that names the option for a text that is no host.

    Without a host `shoal.DHT` chooses it.
    """
    from shoal.base.peer import host_kind, is_host

    if host is None:
        return f"/tcp/{port}"
    if not is_host(host):
        raise ConfigError(f"{option} must be an IP address or a name, got {host!r:.80}")
    return f"/{host_kind(host)}/{host}/tcp/{port}"


def announced(announce: str) -> str:
    """What `--announce` names, as `shoal.DHT` takes it. Raises `ConfigError` for anything else."""
    return maddr_of(*_host_and_port(announce), "--announce")


def _host_and_port(announce: str) -> tuple[str, int]:
    """Read `HOST`, `HOST:PORT` or `[IPV6]:PORT`. Port 0 stands for the port on which we listen."""
    host, port = announce, "0"
    if announce.startswith("[") and "]" in announce:
        host, _, rest = announce[1:].partition("]")
        port = rest.removeprefix(":") or "0"
    elif announce.count(":") == 1:
        host, _, port = announce.partition(":")
    if not port.isdecimal() or not 0 <= int(port) <= 65535 or not host:
        raise ConfigError(f"--announce must be HOST or HOST:PORT, got {announce!r}")
    return host, int(port)
