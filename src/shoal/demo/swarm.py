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

__all__ = ["MeetingPoint", "Membership", "join", "open_meeting_point"]


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
    return MeetingPoint(_addresses(dht), dht.shutdown)


def _addresses(dht: DHT) -> tuple[str, ...]:
    return tuple(map(str, dht.get_visible_maddrs()))


class Membership:
    """A peer's place in the swarm. Made by `join`."""

    def __init__(self, dht: DHT, optimizer: Optimizer, run_id: str) -> None:
        self._dht, self._optimizer = dht, optimizer
        self.run_id = run_id

    @property
    def peer_id(self) -> str:
        """Printed identity."""
        return str(self._dht.peer_id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this peer listens."""
        return _addresses(self._dht)

    @property
    def epoch(self) -> int:
        """The swarm epoch of this peer's weights."""
        return int(self._optimizer.local_epoch)

    @property
    def finished(self) -> bool:
        """Whether the announced end of the run is reached."""
        return bool(self._optimizer.finished)

    def catch_up(self) -> None:
        """Take the state of the others, if there are any and they are ahead."""
        self._optimizer.load_state_from_peers()

    def step(self) -> None:
        """Hand in the gradients of one micro-batch; at the end of an epoch this takes the swarm's step."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def announce_end(self, epoch: int) -> None:
        """Tell the swarm that `epoch` is the last."""
        self._optimizer.announce_end(epoch)

    def leave(self) -> None:
        """Leave in order."""
        self._optimizer.shutdown()
        self._dht.shutdown()


def join(
    config: PeerConfig,
    run_id: str,
    parameters: Iterable[torch.Tensor],
    on_event: Callable[[events.Event], None],
) -> Membership:
    """Join the run.

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
    optimizer = Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=training.target_batch,
        batch_size_per_step=training.micro_batch,
        params=parameters,
        optimizer=lambda params: make_optimizer(training, params),
        scheduler=lambda optimizer: make_schedule(training, optimizer),
    )
    return Membership(dht, optimizer, run_id)
