"""The costs of each stage of ZeRO: bytes of memory per rank, and bytes that a rank sends in one optimizer step.

With P parameters on N ranks, an optimizer that keeps state for each of them, and A micro-batches in a step:

=====  ======================  ==========================  ==========================================================
stage  partitioned             memory per rank             sent per rank and step, in units of (N-1)/N of the
                                                           parameters' bytes
=====  ======================  ==========================  ==========================================================
0      nothing                 (p + g + s) P               2: an all-reduce of the gradients
1      optimizer state         (p + g) P + s P / N         2: reduce-scatter, then all-gather of the new parameters
2      and gradients           p P + (g + s) P / N         A + 1: a reduce-scatter for each micro-batch
3      and parameters          (p + g + s) P / N           3 A: two all-gathers and a reduce-scatter for each one
=====  ======================  ==========================  ==========================================================

p, g and s are bytes per parameter (`Precision`, `state_bytes`). This memory is held all through a step. Memory for a
part of a step comes on top: activations (`transformer` counts them), the buckets of collectives, one or two unsharded
layers in stage 3; so do up to N - 1 elements of padding per tensor. Between steps FSDP2 holds in stage 2 no more than
in stage 3. `shoal.zero` adds gradients of 16 bits up in float32: of a rank's share it holds the float32 means
(in stage 1 beside the gradients), and in stage 3 the float32 copies are the parameters.

Other engines pay more for the same stage, and so does gloo, whose reduce-scatter is an all-reduce of which a part is
kept (PyTorch issue 118911): it sends 2 instead of 1. `Engine` says which.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5
and 7; for 7.5 billion parameters on 64 ranks, mixed precision and Adam it has 120, 31.4, 16.6 and 1.9 GB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from shoal.zero.plan.transformer import Transformer

__all__ = [
    "BACKENDS",
    "ENGINES",
    "OPTIMIZERS",
    "Cost",
    "Engine",
    "Precision",
    "Sizes",
    "costs",
    "costs_of",
    "estimate",
    "state_bytes",
]

BACKENDS = ("nccl", "gloo")


class Precision(Enum):
    """In which format a model computes. The optimizer always works on float32 values.

    Attributes:
        width: bytes of a parameter, and of a gradient, as they are computed with and sent.
    """

    MIXED = "mixed"
    """bfloat16 or float16; the optimizer has a float32 copy of the parameters."""

    FLOAT32 = "float32"

    @property
    def width(self) -> int:
        return 2 if self is Precision.MIXED else 4


OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}
"""The number of float32 values that each optimizer keeps per parameter."""


def state_bytes(optimizer: str, precision: Precision) -> int:
    """Bytes of an optimizer's state per parameter; the float32 copy of mixed precision is part of it, as in the paper.

    Raises:
        ConfigError: there is no optimizer of this name.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    return 4 * OPTIMIZERS[optimizer] + (4 if precision is Precision.MIXED else 0)


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to carry a stage.

    Attributes:
        name: what users call it.
        stage: 0 to 3.
        gathers: all-gathers (or broadcasts) of all parameters in a step.
        gathers_each: further ones in each micro-batch.
        reduces: reduce-scatters of all gradients in a step.
        reduces_each: further ones in each micro-batch.
        own_scatter: its reduce-scatter does not become an all-reduce on gloo.
        means: all-reduces of a share's gradients among replicas in a step; of those engines that have replicas.
        means_each: further ones in each micro-batch.
    """

    name: str
    stage: int
    gathers: int = 0
    gathers_each: int = 0
    reduces: int = 0
    reduces_each: int = 0
    own_scatter: bool = False
    means: int = 0
    means_each: int = 0


ENGINES = (
    # An all-reduce is a reduce-scatter and an all-gather; gloo does it as such.
    Engine("DDP", 0, gathers=1, reduces=1, own_scatter=True),
    Engine("shoal.zero", 1, gathers=1, reduces=1, own_scatter=True, means=1),
    # Reduces everywhere, then broadcasts the parameters that each rank has stepped.
    Engine("ZeroRedundancyOptimizer", 1, gathers=2, reduces=1, own_scatter=True),
    Engine("DeepSpeed", 1, gathers=1, reduces=1),
    Engine("shoal.zero", 2, gathers=1, reduces_each=1, own_scatter=True, means=1),
    # With reshard_after_forward=False: it lets go of the parameters behind each backward pass.
    Engine("FSDP2", 2, gathers_each=1, reduces_each=1, means_each=1),
    Engine("DeepSpeed", 2, gathers=1, reduces_each=1),
    Engine("shoal.zero", 3, gathers_each=2, reduces_each=1, own_scatter=True, means=1),
    Engine("FSDP2", 3, gathers_each=2, reduces_each=1, means_each=1),
    Engine("DeepSpeed", 3, gathers_each=2, reduces_each=1),
)
"""Every engine that carries a stage, in the order of the stages."""


class Sizes(NamedTuple):
    """How large a model is, on one rank that partitions nothing. Bytes.

    Attributes:
        parameters: all of them, tied ones counted once.
        gradients: gradients of the trained parameters; as many bytes of the parameters change in a step.
        state: the state of the optimizer.
        wide: gradients in float32, as `shoal.zero` takes their mean over replicas.
        means: the float32 means of 16-bit gradients, which `shoal.zero` keeps of a rank's share.
    """

    parameters: float
    gradients: float
    state: float
    wide: float = 0.0
    means: float = 0.0


class Cost(NamedTuple):
    """The costs of one engine on each rank.

    Attributes:
        engine: which.
        parameters: bytes.
        gradients: bytes.
        state: bytes of the optimizer.
        sent: bytes in one optimizer step.
        activations: bytes kept for the backward pass; 0 where no shape was given. They are of a rank's own samples, so
            no stage partitions them.
        averages: bytes of the moving averages of weights; 0 unless they were asked for.
    """

    engine: Engine
    parameters: float
    gradients: float
    state: float
    sent: float
    activations: float = 0.0
    averages: float = 0.0

    @property
    def memory(self) -> float:
        """Bytes in all."""
        return self.parameters + self.gradients + self.state + self.activations + self.averages


def costs(  # noqa: PLR0913 (the choices of its users)
    parameters: float,
    ranks: int,
    *,
    stage: int | None = None,
    precision: Precision | str = Precision.MIXED,
    optimizer: str = "adam",
    micro_batches: int = 1,
    backend: str = "nccl",
    transformer: Transformer | None = None,
    replicas: int = 1,
) -> list[Cost]:
    """The laws for one model.

    Args:
        parameters: how many, above 0.
        ranks: how many share them, at least 1.
        stage: only this one, 0 to 3; None for all.
        precision: `mixed` or `float32`.
        optimizer: `adam` (also AdamW), `momentum` or `sgd`.
        micro_batches: in one optimizer step, at least 1.
        backend: `nccl` or `gloo`.
        transformer: its shape, to count activations: see `shoal.zero.Transformer`. None counts none.
        replicas: how many copies there are, each shared by ``ranks / replicas`` (`mesh` of `shoal.zero.shard`).

    Returns:
        One entry for each engine of `ENGINES`, bytes; with several replicas for those that have them.

    Raises:
        ConfigError: an argument is out of its range; it is named.
    """
    if not 0 < parameters < math.inf:
        raise ConfigError(f"parameters must be a number above 0, got {parameters!r}")
    try:
        kind = Precision(precision)
    except ValueError:
        raise ConfigError(f"precision must be mixed or float32, got {precision!r}") from None
    width = kind.width
    wide, means = 4 * parameters, 4 * parameters if kind is Precision.MIXED else 0
    sizes = Sizes(width * parameters, width * parameters, state_bytes(optimizer, kind) * parameters, wide, means)
    found = costs_of(sizes, ranks, stage=stage, micro_batches=micro_batches, backend=backend, replicas=replicas)
    if transformer is None:
        return found
    activations = transformer.activations(kind.width)
    return [cost._replace(activations=activations) for cost in found]


def costs_of(
    sizes: Sizes, ranks: int, *, stage: int | None, micro_batches: int, backend: str, replicas: int = 1
) -> list[Cost]:
    """As `costs`, for a model whose sizes are known."""
    if ranks < 1:
        raise ConfigError(f"ranks must be at least 1, got {ranks}")
    if replicas < 1 or ranks % replicas:
        raise ConfigError(f"replicas must divide the ranks: {ranks} ranks cannot form {replicas} replicas")
    shards = ranks // replicas
    if micro_batches < 1:
        raise ConfigError(f"micro_batches must be at least 1, got {micro_batches}")
    if stage is not None and stage not in range(4):
        raise ConfigError(f"stage must be 0, 1, 2 or 3, got {stage}")
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be {' or '.join(BACKENDS)}, got {backend!r}")

    def cost(engine: Engine) -> Cost:
        kept = [
            size / shards if engine.stage >= divided_from else size
            for size, divided_from in zip(sizes[:3], (3, 2, 1), strict=True)
        ]
        if engine.name == "shoal.zero":
            mean = sizes.means / shards  # twice the bytes of the 16-bit share that it takes the place of
            kept[1] += mean if engine.stage == 1 else mean / 2
            if engine.stage == 3:
                kept[0], kept[2] = kept[0] + mean / 2, kept[2] - mean
        # Parameters that were not trained have not changed; but stage 3 has to gather them, too.
        gathered = sizes.parameters if engine.stage == 3 else sizes.gradients
        gathers = engine.gathers + engine.gathers_each * micro_batches
        reduces = engine.reduces + engine.reduces_each * micro_batches
        if backend == "gloo" and not engine.own_scatter:
            reduces *= 2
        sent = (gathers * gathered + reduces * sizes.gradients) * (shards - 1) / shards
        means = engine.means * sizes.wide + engine.means_each * micro_batches * sizes.gradients
        sent += 2 * (replicas - 1) / replicas * means / shards
        return Cost(engine, kept[0], kept[1], kept[2], sent)

    able = [engine for engine in ENGINES if replicas == 1 or engine.means + engine.means_each]
    return [cost(engine) for engine in able if stage in (None, engine.stage)]


def estimate(
    model: torch.nn.Module,
    ranks: int | None = None,
    *,
    stage: int | None = None,
    optimizer: str = "adam",
    micro_batches: int = 1,
    backend: str = "gloo",
    sample: object = None,
) -> list[Cost]:
    """The costs of each stage and engine for this model: see `shoal.zero.costs`.

    The model's own dtypes count, tied parameters once, and frozen ones are neither trained nor reduced.

    Args:
        model: on any device, `meta` included; nothing is allocated.
        ranks: how many share it, at least 1; None for those of the default process group, 1 where there is none.
        stage: only this one, 0 to 3; None for all.
        optimizer: `adam` (also AdamW), `momentum` or `sgd`. It keeps float32 state for each parameter that requires a
            gradient, and a float32 copy of those that have 16 bits.
        micro_batches: in one optimizer step, at least 1.
        backend: `nccl` or `gloo`.
        sample: one micro-batch, to count the activations that `forward` keeps for the backward pass: a tensor, a tuple
            of arguments, or a dictionary of named ones; tensors on any device. Nothing is computed. None counts none.

    Returns:
        One entry for each engine, bytes per rank, without padding.

    Raises:
        ConfigError: the model has no parameters or cannot be followed through `sample`, or an argument is out of its
            range; it is named.
    """
    if ranks is None:
        import torch  # noqa: PLC0415 (the laws alone do without it)

        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = torch.distributed.get_world_size() if grouped else 1
    parameters = gradients = state = means = 0
    for parameter in model.parameters():  # tied ones come once
        nbytes = parameter.numel() * parameter.itemsize
        parameters += nbytes
        if parameter.requires_grad:
            precision = Precision.MIXED if parameter.itemsize == Precision.MIXED.width else Precision.FLOAT32
            gradients += nbytes
            state += parameter.numel() * state_bytes(optimizer, precision)
            means += 4 * parameter.numel() if precision is Precision.MIXED else 0
    if not parameters:
        raise ConfigError("model has no parameters: there is nothing to estimate")
    sizes = Sizes(parameters, gradients, state, means=means)
    found = costs_of(sizes, ranks, stage=stage, micro_batches=micro_batches, backend=backend)
    if sample is None:
        return found
    from shoal.zero.memory.activations import saved_bytes  # noqa: PLC0415 (as above)

    activations = saved_bytes(model, sample)
    return [cost._replace(activations=activations) for cost in found]
