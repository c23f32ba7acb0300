"""`shoal key`: the file that keeps a peer's identity."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli.options import WholePath

__all__ = ["key"]

_FILE = WholePath()


@click.group(short_help="Make or show a key file.")
def key() -> None:
    """Make or show the key file that keeps a peer's identity over restarts."""


@key.command()
@click.argument("file", type=_FILE)
def new(file: Path) -> None:
    """Write a new identity to FILE, which only its owner can read; print the peer id. An existing FILE stays."""
    from shoal.protocol.identity import Identity

    click.echo(str(Identity.create(file).peer_id))


@key.command()
@click.argument("file", type=_FILE)
def show(file: Path) -> None:
    """Print the peer id of the identity in FILE."""
    from shoal.protocol.identity import Identity

    click.echo(str(Identity.load(file).peer_id))
