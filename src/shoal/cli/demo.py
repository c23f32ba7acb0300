"""`shoal demo`: hands the options on to `shoal.demo`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from shoal.base.extras import install_command

__all__ = ["demo"]


@click.command(short_help="A swarm on this machine trains a real model.")
@click.option(
    "--seconds",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds until the stop signal; more if peers start late.",
)
@click.option("--peers", type=int, default=4, show_default=True, help="Processes at the start.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of weights, batches, and of the peer to kill.")
@click.option("--headless", is_flag=True, help="Print plain lines, without the live screen.")
@click.option("--json", "record", type=click.Path(dir_okay=False, path_type=Path), help="File for the run's numbers.")
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the picture and the processes' logs.  [default: demo-report, if matplotlib is installed]",
)
@click.option("--no-report", is_flag=True, help="Make no picture; needs no matplotlib.")
def demo(
    *, seconds: float, peers: int, seed: int, headless: bool, record: Path | None, report: Path | None, no_report: bool
) -> int:
    """A swarm on this machine trains a small language model on real text.

    It loses one peer to kill -9, takes in a new one that downloads the state from the others, and ends with a picture
    and the proof that all peers hold the same weights. Exit code 0 only if they do, and the loss fell.
    """
    from shoal.demo import DemoOptions, run_demo

    if report is None and not no_report:
        if importlib.util.find_spec("matplotlib") is None:
            click.echo(f"no picture is made: it needs matplotlib ({install_command('demo')})", err=True)
        else:
            report = Path("demo-report")
    options = DemoOptions(
        seconds=seconds, seed=seed, peers=peers, headless=headless, json=record, report=None if no_report else report
    )
    return run_demo(options)
