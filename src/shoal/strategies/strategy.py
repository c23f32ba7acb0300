"""What a strategy is: it owns when peers meet, what each of them gives, and how the result is taken.

The rest of shoal asks a strategy these questions, and never which one it is. A strategy of your own is one class with
the four names of `Strategy`; docs/how-to/strategies.md has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from shoal.compression import CompressionBase
from shoal.errors import ConfigError
from shoal.strategies.pace import Pace
from shoal.train.inner import Scheduler
from shoal.train.offload import Offload
from shoal.train.training_state import TrainingState

__all__ = ["Inner", "Strategy", "Terms", "answer_of", "text_of_strategy"]


class Inner(NamedTuple):
    """What one peer trains with.

    Attributes:
        optimizer: the torch optimizer, over the parameters that are trained.
        scheduler: the schedule that was given for it; None for none.
        extra_tensors: further tensors of the state, such as batch norm statistics.
        offload: lends the parameters host memory for a step; None: steps are taken where the parameters are.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None = None
    extra_tensors: Sequence[torch.Tensor] = ()
    offload: Offload | None = None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a strategy asks of the run. The defaults are those of a run in which all peers take each step together.

    Attributes:
        compression: the codec of what peers give; None: it travels as it is.
        offload: the optimizer's statistics and the sums of gradients are kept on the CPU.
        steps_alone: each peer steps from each of its batches at once, so its gradients stay its own.
        goes_on: the trainer goes on while a round is under way; else it waits for the result.
        waits_for_nobody: also a peer that missed a meeting goes on, until it has what the others have made.
        meets_rarely: minutes lie between two meetings, so peers tell each other more rarely where they stand.
        quorum: of peers that a meeting takes; 0: whoever is there meets.
        epoch_batches: the batches of a peer, in the mean, in an epoch of the swarm. Schedules, and `max_steps` of a
            Trainer, count batches then. None: they count epochs.
        counted_in: what schedules count, in words.
    """

    compression: CompressionBase | None = None
    offload: bool = False
    steps_alone: bool = False
    goes_on: bool = False
    waits_for_nobody: bool = False
    meets_rarely: bool = False
    quorum: int = 0
    epoch_batches: int | None = None
    counted_in: str = "epochs"


@runtime_checkable
class Strategy(Protocol):
    """How the batches of each peer become one model. All peers of a run give an equal one."""

    @property
    def terms(self) -> Terms:
        """What it asks of the run."""

    def compared(self, training: TrainingState) -> Mapping[str, str]:
        """The settings that must be equal on all peers, as short texts by name; `training` is this strategy's."""

    def training(self, inner: Inner) -> TrainingState:
        """What a peer gives, and how it takes the result.

        The peers average the tensors `averaged` of what is returned, as `contribute` has made them, and
        `use_accumulators` makes of the average what `step` takes.

        Raises:
            ConfigError: these parameters, or this optimizer, cannot be trained so.
        """

    def pace(self, fragment: int = 0, first: Pace | None = None) -> Pace:
        """When the peers meet.

        Args:
            fragment: the number of the fragment of the model, if `training` divides it (`TrainingState.fragments`).
            first: the pace of the first fragment, for another one.
        """


def text_of_strategy(strategy: object) -> str:
    """How errors name this strategy."""
    return f"strategy={type(strategy).__name__}(...)"


def answer_of(strategy: object, name: str, answer: Any, kind: type) -> Any:
    """What a strategy has answered, if it is of this kind.

    Raises:
        ConfigError: it is anything else, as that of a strategy of the user's own may be; `name` is in the message.
    """
    if not isinstance(answer, kind):
        raise ConfigError(f"{name} of {text_of_strategy(strategy)} must be a {kind.__name__}, got {answer!r:.80}")
    return answer
