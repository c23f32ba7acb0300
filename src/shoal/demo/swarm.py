"""The seam between the demo and shoal's public interface: the only file of the demo that uses it.

`open_meeting_point` is the supervisor's side (no torch), `join` a peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from shoal import events
from shoal.demo.messages import PeerConfig

if TYPE_CHECKING:
    import torch

    from shoal.optim.optimizer import Optimizer
    from shoal.runtime.dht import DHT

__all__ = ["MeetingPoint", "join", "open_meeting_point"]


class MeetingPoint(NamedTuple):
    """A node of the network that trains nothing: the first peers find each other through it.

    Attributes:
        addresses: the addresses that peers take as `initial_peers`.
        close: leaves the network.
    """

    addresses: tuple[str, ...]
    close: Callable[[], object]


def open_meeting_point() -> MeetingPoint:
    """Start the node on this machine, at a free port."""
    from shoal.runtime.dht import DHT

    dht = DHT(start=True)
    return MeetingPoint(tuple(map(str, dht.get_visible_maddrs())), dht.shutdown)


def join(
    config: PeerConfig,
    run_id: str,
    parameters: Iterable[torch.Tensor],
    on_event: Callable[[events.Event], None],
) -> tuple[DHT, Optimizer]:
    """Join the run; both are to be shut down at the end, the optimizer first.

    Args:
        config: the peer's settings.
        run_id: full name of the run.
        parameters: of the model; in the order in which all peers have them.
        on_event: called with everything that happens, from shoal's own thread.
    """
    from shoal.demo.training import make_optimizer, make_schedule
    from shoal.optim.optimizer import Optimizer
    from shoal.runtime.dht import DHT

    training = config.training
    dht = DHT(initial_peers=list(config.initial_peers), start=True)
    dht.events.subscribe(on_event)
    return dht, Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=training.target_batch,
        batch_size_per_step=training.micro_batch,
        params=parameters,
        optimizer=lambda params: make_optimizer(training, params),
        scheduler=lambda optimizer: make_schedule(training, optimizer),
    )
