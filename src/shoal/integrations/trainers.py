"""What the callbacks of Hugging Face's Trainer and of Lightning's have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from shoal.base.checks import whole
from shoal.errors import ClosedError, ConfigError, ShoalError, StateUnavailable
from shoal.events import Warned
from shoal.hivemind.arguments import takes
from shoal.integrations.evaluation import Evaluation
from shoal.optim import Optimizer
from shoal.strategies import Strategy

__all__ = [
    "Evaluate",
    "announce_end",
    "check_batch_size",
    "check_evaluate",
    "clips_each_batch",
    "epochs_of",
    "evaluated",
    "evaluation_of",
    "leave",
    "length_of",
    "load_state",
    "of_all",
    "warn",
]

Evaluate = Callable[[], float | Mapping[str, float]]


def warn(swarm: Optimizer, message: str, *, where: str = "Trainer") -> None:
    """Tell the user this."""
    warning = Warned(where=where, message=message)
    swarm.dht.loop_thread.call_soon(lambda: swarm.dht.events.emit(warning))


def epochs_of(strategy: Strategy, steps: int) -> int:
    """The epoch at which the run ends: after so many steps of the swarm, or batches of each peer in the mean."""
    batches = strategy.terms.epoch_batches
    return steps if batches is None else math.ceil(steps / batches)


def clips_each_batch(strategy: Strategy) -> bool:
    """Whether a Trainer's own clipping, of each batch, is the right one: else the strategy clips the average."""
    if getattr(strategy, "max_grad_norm", None) is not None:
        return False
    return strategy.terms.steps_alone or not takes(strategy, "max_grad_norm")


def length_of(strategy: Strategy, steps: int) -> int:
    """As many steps as a schedule counts until then: the run ends with an epoch."""
    batches = strategy.terms.epoch_batches
    return steps if batches is None else epochs_of(strategy, steps) * batches


def announce_end(swarm: Optimizer, steps: int) -> None:
    """Say where the run ends; and that it is later than the user may think, if it is."""
    swarm.announce_end(epochs_of(swarm.strategy, steps))
    if (length := length_of(swarm.strategy, steps)) != steps:
        warn(
            swarm,
            f"max_steps={steps} is no multiple of the strategy's every={swarm.strategy.terms.epoch_batches}: the run "
            f"ends with a merge, at {length} batches. A schedule of your own must be as long; give such a max_steps",
        )


def leave(swarm: Optimizer, end: int | None) -> None:
    """Leave the run: the Trainer's loop is over, and it may load or move the model now.

    Args:
        swarm: what trained; it is shut down.
        end: the epoch at which the run ends; None for a training that need not come to it, or was told of already.
    """
    if end is not None and swarm.is_alive() and not swarm.finished:
        warn(
            swarm,
            f"something else ends the training of this peer at epoch {swarm.local_epoch} of {end} (early stopping, for "
            "example): it leaves the run, and the others go on",
        )
    swarm.shutdown()


def load_state(swarm: Optimizer) -> None:
    """Get the state of the others before the first batch. If nobody gives it, `step` tries again, or gives up."""
    try:
        swarm.load_state_from_peers()
    except StateUnavailable as error:
        warn(swarm, str(error))


def check_batch_size(batch_size: object) -> None:
    """Raise `ConfigError` if this cannot be the `batch_size` of a callback."""
    if batch_size is not None and not callable(batch_size):
        raise ConfigError(
            f"batch_size must be a function, such as lambda batch: len(batch['x']), got {batch_size!r:.80}"
        )


def check_evaluate(evaluate: Evaluate | None, every: int) -> None:
    """Raise `ConfigError` if these cannot be the `evaluate` and `evaluate_every` of a callback."""
    if evaluate is not None and not callable(evaluate):
        raise ConfigError(f"evaluate must be a function without arguments, got {evaluate!r:.80}")
    whole("evaluate_every", every)


def evaluation_of(swarm: Optimizer, model: torch.nn.Module, evaluate: Evaluate | None, every: int) -> Evaluation | None:
    """The evaluation of this run, with the model in its mode to evaluate; None without a function."""
    if evaluate is None:
        return None

    def in_eval_mode() -> float | Mapping[str, float]:
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            return evaluate()
        finally:
            for module, mode in modes:
                module.training = mode

    return Evaluation(swarm, in_eval_mode, every=every)


def of_all(swarm: Optimizer) -> dict[str, float]:
    """What the peers of the run are together, to be logged; nothing once it was shut down."""
    try:
        status = swarm.status()
    except ShoalError:  # within the batch
        return {}
    return {"swarm_peers": len(status.peers), "swarm_samples_per_s": status.samples_per_s}


def evaluated(evaluation: Evaluation | None) -> dict[str, float]:
    """After a step: the numbers to log of a result that is new here, by name; none if there is none."""
    try:
        found = None if evaluation is None else evaluation.after_step()
    except ClosedError:  # shut down within the batch; the next step says so
        return {}
    if found is None:
        return {}
    return {**{f"evaluated_{name}": value for name, value in found.values.items()}, "evaluated_epoch": found.epoch}
