"""The seam between the demo and shoal's public interface: the only file of the demo that uses it.

`open_meeting` is the supervisor's side (no torch), `join` a peer's. shoal's events come in, and the demo's reports go
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from shoal import events
from shoal.demo import messages as say

if TYPE_CHECKING:
    import torch

    import shoal
    from shoal.demo.messages import PeerConfig

__all__ = ["Meeting", "Membership", "join", "open_meeting", "translate"]


class Meeting:
    """A node of the network that trains nothing; the first peers find each other through it."""

    def __init__(self, dht: shoal.DHT) -> None:
        self._dht = dht
        self.addresses: Sequence[str] = tuple(str(address) for address in dht.get_visible_maddrs())

    def close(self) -> None:
        """Leave the network."""
        self._dht.shutdown()


def open_meeting() -> Meeting:
    """Start the node on this machine, at a free port."""
    import shoal

    return Meeting(shoal.DHT(start=True))


class Membership:
    """A peer's place in the swarm. Made by `join`."""

    def __init__(self, dht: shoal.DHT, optimizer: shoal.Optimizer, run_id: str) -> None:
        self._dht, self._optimizer = dht, optimizer
        self.run_id = run_id

    @property
    def peer_id(self) -> str:
        """Printed identity."""
        return str(self._dht.peer_id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this peer listens."""
        return tuple(str(address) for address in self._dht.get_visible_maddrs())

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
    import shoal
    from shoal.demo.training import make_optimizer, make_schedule

    training = config.training
    dht = shoal.DHT(initial_peers=list(config.initial_peers), start=True)
    dht.events.subscribe(on_event)
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=training.target_batch,
        batch_size_per_step=training.micro_batch,
        params=parameters,
        optimizer=lambda params: make_optimizer(training, params),
        scheduler=lambda optimizer: make_schedule(training, optimizer),
    )
    return Membership(dht, optimizer, run_id)


def translate(event: events.Event) -> say.Report | None:
    """The report that tells the supervisor of `event`; None if it need not know of it."""
    match event:
        case events.EpochAdvanced():
            return say.EpochReached(epoch=event.epoch, samples=event.samples, peers=event.peers)
        case events.RoundFinished():
            return say.RoundDone(peers=len(event.peers), left_out=len(event.left_out), duration_s=event.duration_s)
        case events.RoundAborted():
            return say.RoundLost(reason=event.reason)
        case events.PeerLost():
            return say.PeerGone(peer_id=str(event.peer), reason=event.reason)
        case events.StateDownloaded():
            return say.Downloaded(
                donors=tuple(str(donor) for donor in event.donors),
                bytes_received=event.bytes_received,
                duration_s=event.duration_s,
            )
        case events.PeerDropped():
            return say.Note(text=f"left {event.peer.short()} out of {event.where}: {event.reason}")
        case events.Warned():
            return say.Note(text=f"{event.where}: {event.message}")
        case _:
            return None
