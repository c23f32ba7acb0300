"""The change that the trainer is to make to the parameters at its next step: once, even if it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.optim.committed import Committed
from shoal.optim.state_name import StateName

__all__ = ["Update"]


@dataclass(slots=True, kw_only=True)
class Update:
    """The swarm's step, or the average of the states.

    Attributes:
        apply: changes the parameters; called under their lock.
        name: of the state afterwards.
        committed: the last steps that led to it.
        peers: that take it.
        samples: that go into the state by it.
        is_step: whether it is the swarm's step.
        taken: whether it was applied, or begun and interrupted.
    """

    apply: Callable[[], None]
    name: StateName
    committed: Committed
    peers: int
    samples: int
    is_step: bool = True
    taken: bool = False
