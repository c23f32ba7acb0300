"""`shoal plan`: the costs of each stage of ZeRO, before anything runs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from shoal.zero.plan.laws import BACKENDS, OPTIMIZERS, Cost, Precision, costs
from shoal.zero.plan.planning import Plan, fewest_ranks, plans
from shoal.zero.plan.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

__all__ = ["plan"]

_ABSURD = 1e18
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNT = click.IntRange(min=1)
_WIDTH = 110
_LEAST_BYTES = 1e6
"""Nobody has a device with less memory: a smaller number without a unit is meant in another one."""

_LEAST_PARAMETERS = 1000
"""Nobody shares out so few: a smaller number without a unit is meant in another one."""

_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_AMOUNT = re.compile(r"([0-9][0-9_.]*(?:e[+-]?[0-9]+)?) *([kmbgt]?)", re.IGNORECASE)
_SIZE = re.compile(r"([0-9][0-9_.]*(?:e[+-]?[0-9]+)?) *(?:([kmgtp])(i?))?b?", re.IGNORECASE)


class _Number(click.ParamType[float]):
    """A number of parameters as people write it: 7B, 350M, 7.5e9, 7_500_000_000."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Calls `fail` for anything else."""
        found = _AMOUNT.fullmatch(str(value).strip())
        number = _read(found[1]) if found else math.nan
        if found is None or not 0 < number < math.inf:
            self.fail(f"{value!r} is no number above 0, such as 7B, 350M or 7.5e9.", param, ctx)
        if not found[2] and number < _LEAST_PARAMETERS:
            self.fail(f"{value!r} would be {number:g} parameters: write {number:g}B, or {number:g}M.", param, ctx)
        return number * _THOUSANDS[found[2].lower() if found[2] else ""]


class _Bytes(click.ParamType[float]):
    """A number of bytes as people write it: 24GB, 24 GiB, 24g, 24e9."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Calls `fail` for anything else."""
        found = _SIZE.fullmatch(str(value).strip())
        number = _read(found[1]) if found else math.nan
        if not 0 < number < math.inf or found is None:
            self.fail(f"{value!r} is not a size above 0, such as 24GB or 24GiB.", param, ctx)
        prefix = " kmgtp".index((found[2] or " ").lower())
        if not prefix and number < _LEAST_BYTES:
            self.fail(f"{value!r} would be {number:g} bytes: write {number:g}GB, or {number:g}GiB.", param, ctx)
        return float(number * (1024 if found[3] else 1000) ** prefix)


def _read(digits: str) -> float:
    """The number, or NaN."""
    try:
        return float(digits)
    except ValueError:  # two points
        return math.nan


@click.command(short_help="Memory and traffic of each ZeRO stage.")
@click.option(
    "--params",
    required=True,
    type=_Number(),
    metavar="N",
    help="Parameters of the model, such as 7B or 7.5e9.",
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
@click.option("--replicas", type=_COUNT, default=1, show_default=True, help="Copies, each shared by peers / N.")
@click.option("--ema", is_flag=True, help="With --memory: count moving averages of the weights.")
@click.option("--memory", type=_Bytes(), metavar="SIZE", help="Of each rank's device, such as 24GB: show what fits.")
@click.option("--batch", type=_COUNT, metavar="B", help="Count activations: samples in one micro-batch of a rank ...")
@click.option("--sequence", type=_COUNT, metavar="S", help="... and tokens in each sample.")
@click.option("--layers", type=_COUNT, metavar="L", help="Of a transformer; default: derived from --params.")
@click.option("--hidden", type=_COUNT, metavar="H", help="Width of its hidden states; default: derived from --params.")
@click.option("--heads", type=_COUNT, metavar="A", help="They divide --hidden; default: one for each 128.")
@click.option("--vocabulary", type=_COUNT, metavar="V", help="Words whose logits are computed; default: not counted.")
@click.option("--no-dropout", is_flag=True, help="The transformer has no dropout.")
@click.option("--flash", is_flag=True, help="Attention recomputes its scores, as flash attention does.")
def plan(  # noqa: PLR0913, PLR0917 (click gives each option)
    params: float,
    peers: int,
    stage: int | None,
    precision: str,
    optimizer: str,
    micro_batches: int,
    backend: str,
    replicas: int,
    ema: bool,
    memory: float | None,
    **shape: int | None,
) -> None:
    """Print the memory per rank and the bytes that it sends per optimizer step, for each ZeRO stage and engine.

    With --memory, print instead which stages of shoal.zero fit it, with activation checkpoints and offload or without,
    and which of these to use: the one that sends least.

    The numbers come from the laws of the stages, not from a measurement, for memory that is held all through a step.
    Activations of a transformer count if --batch and --sequence are given. Memory for a part of the step comes on top:
    buckets of messages, one or two unsharded layers in stage 3, and what the allocator keeps.
    """
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)  # a table that is cut says nothing
    transformer = _transformer(params, shape)
    asked: dict[str, Any] = {
        "stage": stage,
        "precision": precision,
        "optimizer": optimizer,
        "micro_batches": micro_batches,
        "backend": backend,
        "transformer": transformer,
        "replicas": replicas,
    }
    if memory is None:
        if ema:
            raise click.UsageError("--ema is for shoal.zero, of which --memory shows the ways: give that, too.")
        found = costs(params, peers, **asked)
        checked = (
            costs(params, peers, **asked | {"transformer": replace(transformer, checkpointing=True)})
            if transformer
            else []
        )
        console.print(_table(found, checked))
    else:
        asked["ema"] = ema
        ways = plans(params, peers, **asked)
        console.print(_ways(ways, memory))
        others = [] if stage is None else plans(params, peers, **asked | {"stage": None})
        console.print(_advice(ways, others, memory, fewest_ranks(memory, params, **asked)), soft_wrap=True)
    if transformer or memory:
        console.print(_counted(transformer), soft_wrap=True)


def _transformer(parameters: float, given: Mapping[str, int | None]) -> Transformer | None:
    """The shape that options ask for; None if they ask for none. Raises `click.UsageError` that names an option."""
    if given["batch"] is None or given["sequence"] is None:
        if named := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
            raise click.UsageError(f"{named[0]} is for activations: give both --batch and --sequence, too.")
        return None
    found = Transformer.of(
        parameters,
        batch=given["batch"],
        sequence=given["sequence"],
        layers=given["layers"],
        hidden=given["hidden"],
        heads=given["heads"],
    )
    return replace(
        found, vocabulary=given["vocabulary"] or 0, dropout=not given["no_dropout"], flash=bool(given["flash"])
    )


def _counted(shape: Transformer | None) -> str:
    """A line about the activations that the numbers are for."""
    if shape is None:
        return "Activations come on top: to count them, give --batch and --sequence."
    return (
        f"Activations: {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, "
        f"batch {shape.batch}, sequence {shape.sequence}."
    )


def _table(found: Sequence[Cost], checked: Sequence[Cost]) -> Table:
    """The costs of engines; `checked` are the same with activation checkpoints, or none."""
    names = ["params", "gradients", "optimizer", *["activations"] * bool(checked), "memory"]
    table = _empty(["stage", "engine"], [*names, *["checkpointed"] * bool(checked), "sent"])
    last = None
    for number, cost in enumerate(found):
        stage = "" if cost.engine.stage == last else str(cost.engine.stage)
        last = cost.engine.stage
        sizes = [cost.parameters, cost.gradients, cost.state, cost.memory, cost.sent]
        if checked:
            sizes.insert(3, cost.activations)
            sizes.insert(5, checked[number].memory)
        table.add_row(stage, cost.engine.name, *map(size_of, sizes))
    return table


def _ways(ways: Sequence[Plan], memory: float) -> Table:
    """The plans, and which of them fit."""
    averaged = any(way.cost.averages for way in ways)
    numbers = [
        "params",
        "gradients",
        "optimizer",
        *["averages"] * averaged,
        "offloaded",
        "activations",
        "memory",
        "sent",
    ]
    table = _empty(["stage", "checkpoints", "fits"], numbers)
    for way in ways:
        cost = way.cost
        kept = (cost.parameters, cost.gradients, cost.state, *[cost.averages] * averaged)
        sizes = (*kept, way.offloaded, cost.activations, cost.memory, cost.sent)
        words = ("yes" if way.checkpointing else "no", "yes" if way.memory <= memory else "no")
        table.add_row(str(way.stage), *words, *map(size_of, sizes))
    return table


def _advice(ways: Sequence[Plan], others: Sequence[Plan], memory: float, peers: int | None) -> str:
    """The plan to use; or what it takes until one fits: one of the others, or as many peers as are enough."""
    fitting = [way for way in ways if way.memory <= memory]
    if fitting:
        best = fitting[0]
        gathered = " One or two layers are whole while they run: leave room for them." if best.stage == 3 else ""
        used = f"{size_of(best.memory)} of {size_of(memory)}"
        return f"Use {_named(best)}: {used}. Of those that fit it sends least.{gathered}"
    least = min(ways, key=lambda way: (way.memory, -way.stage))
    if elsewhere := [way for way in others if way.memory <= memory]:
        would = f"Without --stage there is one that fits: {_named(elsewhere[0])}."
    elif peers:
        would = f"{peers} peers would be enough."
    else:
        would = "More peers would not do: make the micro-batch, its samples or the model smaller."
    return (
        f"Nothing fits {size_of(memory)}: {_named(least)} takes least, {size_of(least.memory)}, "
        f"which is {size_of(least.memory - memory)} too much. {would}"
    )


def _named(way: Plan) -> str:
    extras = ["activation checkpoints"] * way.checkpointing + ["offload to the CPU or to disk"] * (way.offloaded > 0)
    return f"stage {way.stage}{' (DDP)' * (way.stage == 0)}" + (f" with {' and '.join(extras)}" if extras else "")


def _empty(words: Sequence[str], numbers: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
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
