"""The state of a demo run, as values: one `DemoState`, of which screen, JSON file and picture are made.

Only `shoal.demo.reducer.apply` makes new states. All times are seconds since the demo's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

from shoal.demo import messages as say

__all__ = ["DemoState", "EpochView", "Fate", "Happening", "LossPoint", "PeerView", "Phase", "RoundView", "Tone"]

Phase = Literal["starting", "training", "stopping", "leaving", "baseline", "done"]
Fate = Literal["alive", "killed", "died", "left"]
Tone = Literal["plain", "good", "bad"]


@dataclass(frozen=True, slots=True)
class RoundView:
    """The last averaging round of a peer."""

    peers: int
    left_out: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer process, from its start to after its end.

    Attributes:
        name: the name that people see.
        pid: its process.
        started_at_s: when the process was started.
        newcomer: started after the others.
        state: its present work, in a word or two.
        fate: "killed" by plan, "died" of anything else, "left" in order, or still "alive".
        peer_id: printed identity; empty until it is ready.
        addresses: where it listens.
        epoch: the epoch of its weights.
        samples: sequences it has computed.
        samples_per_s: its present contribution to the swarm.
        bytes_sent: in averaging rounds.
        bytes_received: in averaging rounds.
        last_round: its last averaging round.
        stepped: it has taken a step of the swarm.
        training_since_s: when it first trained.
        ended_at_s: when its end was seen, or the demo killed it.
        noticed: another peer has noticed that it is gone.
        finished: its report at the last epoch.
    """

    name: str
    pid: int
    started_at_s: float = 0.0
    newcomer: bool = False
    state: str = "starting"
    fate: Fate = "alive"
    peer_id: str = ""
    addresses: tuple[str, ...] = ()
    epoch: int = 0
    samples: int = 0
    samples_per_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    last_round: RoundView | None = None
    stepped: bool = False
    training_since_s: float | None = None
    ended_at_s: float | None = None
    noticed: bool = False
    finished: say.Finished | None = None

    @property
    def alive(self) -> bool:
        """Whether its process is thought to run."""
        return self.ended_at_s is None

    @property
    def lost(self) -> bool:
        """Whether it ended without leaving in order, by plan or not."""
        return self.fate in {"killed", "died"}


@dataclass(frozen=True, slots=True)
class EpochView:
    """One swarm epoch: reached at `at_s` with `samples` sequences from `peers` peers."""

    epoch: int
    at_s: float
    samples: int
    peers: int


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Held-out loss of the weights of `epoch`, which the swarm reached at `at_s`."""

    epoch: int
    at_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class Happening:
    """A line of the log."""

    at_s: float
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoState:
    """Everything known about the run. The first one is `DemoState(seconds=...)`.

    Attributes:
        seconds: planned time from the start to the signal to stop.
        phase: the phase of the run.
        peers: every peer process there ever was, in order of start.
        epochs: swarm epochs in order.
        losses: held-out losses in order of epoch.
        baseline: points of the single process.
        baseline_complete: whether it got through all epochs; None while it has not ended.
        log: the events, newest last; only the last few hundred lines.
        logged: how many lines there have been in all.
        run_id: full name of the run, once a peer has said it.
        parameters: weights of the model, once a peer has said it.
        stop_epoch: the announced last epoch.
        stopped_at_s: when it was announced.
        download: the state download of the newcomer.
        exit_reason: empty until the run is over.
    """

    seconds: float
    phase: Phase = "starting"
    peers: Mapping[str, PeerView] = field(default_factory=dict)
    epochs: tuple[EpochView, ...] = ()
    losses: tuple[LossPoint, ...] = ()
    baseline: tuple[say.BaselinePoint, ...] = ()
    baseline_complete: bool | None = None
    log: tuple[Happening, ...] = ()
    logged: int = 0
    run_id: str = ""
    parameters: int = 0
    stop_epoch: int | None = None
    stopped_at_s: float | None = None
    download: say.Downloaded | None = None
    exit_reason: str = ""

    @property
    def living(self) -> tuple[PeerView, ...]:
        """Peers whose process is thought to run."""
        return tuple(peer for peer in self.peers.values() if peer.alive)

    @property
    def epoch(self) -> int:
        """The newest epoch of the swarm."""
        return self.epochs[-1].epoch if self.epochs else 0

    @property
    def samples(self) -> int:
        """Sequences in all epochs of the swarm."""
        return sum(self.epoch_samples)

    @property
    def epoch_samples(self) -> tuple[int, ...]:
        """Sequences in epoch 1, 2, ...; an epoch that nobody reported counts like the next one that was."""
        found: list[int] = []
        for view in self.epochs:
            found += [view.samples] * (view.epoch - len(found))
        return tuple(found)

    @property
    def typical_epoch_s(self) -> float:
        """Median time between the last ten epochs, in seconds; 1.0 before there are two."""
        recent = [view.at_s for view in self.epochs[-11:]]
        return median(later - earlier for earlier, later in pairwise(recent)) if len(recent) > 1 else 1.0

    def max_stall_s(self, now_s: float) -> float:
        """The longest time without a new epoch, from the first epoch on; up to `now_s` while the swarm trains."""
        times = [view.at_s for view in self.epochs]
        if times and self.phase in {"training", "stopping"} and self.epoch != self.stop_epoch:
            times.append(now_s)
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    def share(self, peer: PeerView) -> float:
        """The part of the swarm's present sequences per second that `peer` gives, 0 to 1."""
        total = sum(other.samples_per_s for other in self.living)
        return peer.samples_per_s / total if total and peer.alive else 0.0

    @property
    def finished(self) -> Mapping[str, say.Finished]:
        """The reports of the peers at the last epoch, by name."""
        return {peer.name: peer.finished for peer in self.peers.values() if peer.finished is not None}

    @property
    def loss_first(self) -> float | None:
        """Held-out loss at the first epoch it is known for."""
        return self.losses[0].loss if self.losses else None

    @property
    def loss_last(self) -> float | None:
        """Held-out loss at the last epoch it is known for."""
        return self.losses[-1].loss if self.losses else None

    @property
    def baseline_loss_last(self) -> float | None:
        """Held-out loss of the single process at its end."""
        return self.baseline[-1].loss if self.baseline else None

    def name_of(self, peer_id: str) -> str:
        """The name of the peer with this identity; the identity's first 8 characters for a stranger."""
        return next((peer.name for peer in self.peers.values() if peer.peer_id == peer_id), peer_id[:8])
