"""What the trainer is to do to the parameters at its next step: once, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.optim.state_name import StateName

__all__ = ["Update"]


@dataclass(slots=True, kw_only=True)
class Update:
    """The swarm's step, or the average of the states.

    Attributes:
        apply: changes the parameters; called under their lock.
        name: of the state afterwards.
        peers: that take it.
        samples: that go into the state by it.
        is_step: whether it is the swarm's step.
        taken: whether it was applied, or begun and interrupted.
    """

    apply: Callable[[], None]
    name: StateName
    peers: int
    samples: int
    is_step: bool = True
    taken: bool = False
