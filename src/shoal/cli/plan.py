"""`shoal plan`: the costs of each stage of ZeRO, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.options import Real
from shoal.zero.laws import BACKENDS, OPTIMIZERS, Cost, Precision, costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

__all__ = ["plan"]

_ABSURD = 1e18
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@click.command(short_help="Memory and traffic of each ZeRO stage.")
@click.option(
    "--params",
    required=True,
    type=Real(min=0, min_open=True),
    metavar="N",
    help="Parameters of the model, such as 7.5e9.",
)
@click.option("--peers", required=True, type=click.IntRange(min=1), metavar="N", help="Ranks that share them.")
@click.option("--stage", type=click.IntRange(0, 3), help="Show only this stage; default: all.")
@click.option("--precision", type=click.Choice([each.value for each in Precision]), default="mixed", show_default=True)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adam", show_default=True)
@click.option(
    "--micro-batches",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Micro-batches in one optimizer step.",
)
@click.option("--backend", type=click.Choice(BACKENDS), default="nccl", show_default=True)
def plan(
    params: float, peers: int, stage: int | None, precision: str, optimizer: str, micro_batches: int, backend: str
) -> None:
    """Print the memory per rank and the bytes that it sends per optimizer step, for each ZeRO stage and engine.

    The numbers come from the laws of the stages, not from a measurement, for memory that is held all through a step.
    Activations, and memory for a part of the step, come on top.
    """
    from rich.console import Console

    found = costs(
        params,
        peers,
        stage=stage,
        precision=precision,
        optimizer=optimizer,
        micro_batches=micro_batches,
        backend=backend,
    )
    Console(highlight=False).print(_table(found))


def _table(found: Sequence[Cost]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage")
    table.add_column("engine", no_wrap=True)
    for name in ("params", "gradients", "optimizer", "memory", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for cost in found:
        stage = "" if cost.engine.stage == last else str(cost.engine.stage)
        last = cost.engine.stage
        sizes = (cost.parameters, cost.gradients, cost.state, cost.memory, cost.sent)
        table.add_row(stage, cost.engine.name, *map(size_of, sizes))
    return table


def size_of(nbytes: float) -> str:
    """A number of bytes for people: about three digits, and a decimal unit."""
    if nbytes >= _ABSURD:
        return f"{nbytes:.1e} B"
    for unit, name in _UNITS:
        if nbytes >= unit:
            value = nbytes / unit
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.1f} {name}"
    return f"{nbytes:.0f} B"
