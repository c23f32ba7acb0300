"""What the callbacks of Hugging Face's Trainer and of Lightning's have in common."""

from __future__ import annotations

from shoal.errors import StateUnavailable
from shoal.events import Warned
from shoal.optim import Optimizer

__all__ = ["load_state", "warn"]


def warn(swarm: Optimizer, message: str) -> None:
    """Tell the user this."""
    warning = Warned(where="Trainer", message=message)
    swarm.dht.loop_thread.call_soon(lambda: swarm.dht.events.emit(warning))


def load_state(swarm: Optimizer) -> None:
    """Get the state of the others before the first batch. If nobody gives it, `step` tries again, or gives up."""
    try:
        swarm.load_state_from_peers()
    except StateUnavailable as error:
        warn(swarm, str(error))
