"""The parts of hivemind's `Optimizer` that its programs look at: faces of a `shoal.Optimizer`, which change nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from shoal.base.clock import get_dht_time
from shoal.hivemind.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, Tracked
from shoal.train.training_state import TrainingState

if TYPE_CHECKING:
    from shoal.optim.optimizer import Optimizer

__all__ = ["AveragerFace", "HivemindNames", "TrackerFace"]


class TrackerFace(Tracked):
    """The progress of a run and of this peer, as `shoal.ProgressTracker` has it. After `shutdown` it is the last one.

    Args:
        swarm: what trains.
    """

    def __init__(self, swarm: Optimizer) -> None:
        self._swarm = swarm

    def is_alive(self) -> bool:
        """Whether progress is still kept track of."""
        return self._swarm.is_alive()

    @property
    def global_progress(self) -> GlobalTrainingProgress:
        """The progress of all peers."""
        status = self._swarm.status()
        eta_s = math.inf if status.eta_s is None else status.eta_s
        return GlobalTrainingProgress(
            epoch=status.swarm_epoch,
            samples_accumulated=status.samples,
            target_batch_size=status.target_batch_size,
            num_peers=len(status.peers),
            num_clients=sum(peer.role == "client" for peer in status.peers[1:]) + self._only_dials,
            eta_next_epoch=get_dht_time() + eta_s,
        )

    @property
    def local_progress(self) -> LocalTrainingProgress:
        """The progress of this peer."""
        me = self._swarm.status().peers[0]
        return LocalTrainingProgress(me.peer, me.epoch, me.samples, me.samples_per_s, get_dht_time(), self._only_dials)

    @property
    def _only_dials(self) -> bool:
        return self._swarm.collaboration.settings.averager.client_mode

    @property
    def own_epoch(self) -> int:
        """The epoch of this peer."""
        return self._swarm.local_epoch


class AveragerFace:
    """What is averaged, of the state or of the gradients.

    Args:
        swarm: what trains.
        optimizer: the inner torch optimizer.
        scheduler: the schedule of the run; None for none.
        extra_tensors: of the state.
    """

    def __init__(
        self, swarm: Optimizer, optimizer: torch.optim.Optimizer, scheduler: Any, extra_tensors: Sequence[torch.Tensor]
    ) -> None:
        self._swarm = swarm
        self.optimizer, self.scheduler, self.extra_tensors = optimizer, scheduler, tuple(extra_tensors)

    def is_alive(self) -> bool:
        """Whether it still averages."""
        return self._swarm.is_alive()

    @property
    def local_epoch(self) -> int:
        """Swarm steps that went into this peer's parameters."""
        return self._swarm.local_epoch

    @property
    def main_parameters(self) -> tuple[torch.Tensor, ...]:
        """The parameters of the model that the optimizer has."""
        return tuple(each for group in self.optimizer.param_groups for each in group["params"])

    def load_state_from_peers(self, timeout: float | None = None) -> bool:
        """Download the best state of the run. True if it is ours now."""
        return self._swarm.load_state_from_peers(timeout=timeout)


class HivemindNames:
    """Attributes of hivemind's `Optimizer`; `shoal.Optimizer` inherits them."""

    scheduled_grads = scheduled_state = None
    """No round is scheduled ahead of time: groups form when there are enough samples."""

    _training: TrainingState

    @property
    def tracker(self) -> TrackerFace:
        """Progress by hivemind's names; `status` says more."""
        return TrackerFace(cast("Optimizer", self))

    @property
    def local_progress(self) -> LocalTrainingProgress:
        """The progress of this peer by hivemind's names."""
        return self.tracker.local_progress

    @property
    def opt(self) -> torch.optim.Optimizer:
        """The inner torch optimizer. Only the `shoal.Optimizer` calls its `step`."""
        return self._training.optimizer

    @property
    def state_averager(self) -> AveragerFace:
        """What is averaged of the state, by hivemind's names."""
        training = self._training
        return AveragerFace(
            cast("Optimizer", self), training.optimizer, training.schedule.scheduler, training.extra_tensors
        )

    @property
    def grad_averager(self) -> AveragerFace | None:
        """As `state_averager`; None with `use_local_updates`, where no gradients are averaged."""
        return None if cast("Optimizer", self).use_local_updates else self.state_averager
