"""What is known about a demo run: one value, from which the screen, the JSON file and the picture are all made.

`DemoState.apply(fact, now_s)` returns the next state. It is pure: no clock, no process, no file. Facts are what the
supervisor did or saw (`Started`, `Killing`, `Ended`, ...) and what a child said (`Said`). All times are seconds since the
demo's start.

Kept: an epoch counts once, when the first peer reaches it; so does its held-out loss. What a peer says after its end
was seen changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from shoal.demo import messages as say

__all__ = [
    "AnyFact",
    "BaselineEnded",
    "DemoState",
    "Ended",
    "EpochView",
    "Happening",
    "Killing",
    "LossPoint",
    "PeerView",
    "PhaseBegan",
    "RoundView",
    "RunEnded",
    "Said",
    "Started",
    "StopAnnounced",
]

Phase = Literal["starting", "training", "stopping", "leaving", "baseline", "done"]
Fate = Literal["alive", "killed", "died", "left"]
Tone = Literal["plain", "good", "bad"]

_LOG_KEPT = 500


# ------------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Started:
    """A peer process was started."""

    name: str
    pid: int
    newcomer: bool = False


@dataclass(frozen=True, slots=True)
class Killing:
    """The demo sends SIGKILL to this peer, as planned."""

    name: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A peer process is gone. `returncode` as in subprocess: negative for a signal; `detail`: its last words."""

    name: str
    returncode: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A peer (or the baseline, whose name is "baseline") reported something."""

    name: str
    report: say.Report


@dataclass(frozen=True, slots=True)
class StopAnnounced:
    """The peers were told that `epoch` is the last one."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """The run enters its next phase."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class BaselineEnded:
    """The single process is done, or was stopped."""

    complete: bool


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Everything is over. `reason` is "completed", "interrupted", or what went wrong."""

    reason: str


AnyFact = Started | Killing | Ended | Said | StopAnnounced | PhaseBegan | BaselineEnded | RunEnded


# ------------------------------------------------------------------------------------------------------------- views


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
        name: what people call it.
        pid: its process.
        newcomer: started after the others.
        state: what it does, in a word or two.
        fate: "killed" by plan, "died" of anything else, "left" in order, or still "alive".
        peer_id: printed identity; empty until it is ready.
        addresses: where it listens.
        epoch: the epoch of its weights.
        samples_per_s: what it adds to the swarm.
        bytes_sent: in averaging rounds.
        bytes_received: in averaging rounds.
        last_round: its last averaging round.
        stepped: it has taken a step of the swarm.
        training_since_s: when it first trained.
        ended_at_s: when its end was seen, or the demo killed it.
        noticed: another peer has noticed that it is gone.
        finished: what it reported at the last epoch.
    """

    name: str
    pid: int
    newcomer: bool = False
    state: str = "starting"
    fate: Fate = "alive"
    peer_id: str = ""
    addresses: tuple[str, ...] = ()
    epoch: int = 0
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
    """Everything known about the run. Start from `DemoState(seconds=..., target_batch=...)` and apply facts.

    Attributes:
        seconds: planned time from the start to the signal to stop.
        target_batch: planned sequences per epoch.
        phase: where the run is.
        peers: every peer process there ever was, in order of start.
        epochs: swarm epochs in order.
        losses: held-out losses in order of epoch.
        baseline: points of the single process.
        baseline_complete: whether it got through all epochs; None while it has not ended.
        log: what happened, newest last.
        run_id: full name of the run, once a peer has said it.
        parameters: weights of the model, once a peer has said it.
        stop_epoch: the announced last epoch.
        stopped_at_s: when it was announced.
        download: the state download of the newcomer.
        exit_reason: empty until the run is over.
    """

    seconds: float
    target_batch: int
    phase: Phase = "starting"
    peers: Mapping[str, PeerView] = field(default_factory=dict)
    epochs: tuple[EpochView, ...] = ()
    losses: tuple[LossPoint, ...] = ()
    baseline: tuple[say.BaselinePoint, ...] = ()
    baseline_complete: bool | None = None
    log: tuple[Happening, ...] = ()
    run_id: str = ""
    parameters: int = 0
    stop_epoch: int | None = None
    stopped_at_s: float | None = None
    download: say.Downloaded | None = None
    exit_reason: str = ""

    def apply(self, fact: AnyFact, now_s: float) -> DemoState:
        """The state after `fact`, which became known at `now_s` seconds since the start."""
        return _FACTS[type(fact)](self, fact, now_s)

    # ---------------------------------------------------------------------------------------------------- derived

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
        """Sequences in all epochs of the swarm. An epoch that nobody reported counts as the target."""
        seen = sum(epoch.samples for epoch in self.epochs)
        return seen + self.target_batch * (self.epoch - len(self.epochs))

    @property
    def epoch_samples(self) -> tuple[int, ...]:
        """Sequences in epoch 1, 2, ...; what `samples` sums up."""
        known = {view.epoch: view.samples for view in self.epochs}
        return tuple(known.get(epoch, self.target_batch) for epoch in range(1, self.epoch + 1))

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
        """What the peers that stood at the last epoch reported there, by name."""
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

    # ---------------------------------------------------------------------------------------------------- helpers

    def _logged(self, now_s: float, text: str, tone: Tone = "plain") -> DemoState:
        return replace(self, log=(*self.log, Happening(now_s, text, tone))[-_LOG_KEPT:])

    def _with(self, peer: PeerView) -> DemoState:
        return replace(self, peers={**self.peers, peer.name: peer})


# ------------------------------------------------------------------------------------- what the supervisor did or saw


def _started(state: DemoState, fact: Started, now_s: float) -> DemoState:
    state = state._with(PeerView(name=fact.name, pid=fact.pid, newcomer=fact.newcomer))
    return state._logged(now_s, f"{fact.name} starts (pid {fact.pid})" + (" to join the run" if fact.newcomer else ""))


def _killing(state: DemoState, fact: Killing, now_s: float) -> DemoState:
    peer = replace(state.peers[fact.name], fate="killed", state="DEAD", ended_at_s=now_s)
    return state._with(peer)._logged(now_s, f"kill -9 {peer.pid}: {peer.name} is gone without a word", "bad")


def _ended(state: DemoState, fact: Ended, now_s: float) -> DemoState:
    peer = state.peers[fact.name]
    if not peer.alive:
        return state
    if fact.returncode == 0 and state.phase not in {"starting", "training"}:
        return state._with(replace(peer, fate="left", state="left", ended_at_s=now_s))
    how = f"signal {-fact.returncode}" if fact.returncode < 0 else f"exit code {fact.returncode}"
    state = state._with(replace(peer, fate="died", state="DEAD", ended_at_s=now_s))
    last_words = f": {fact.detail}" if fact.detail else ""
    return state._logged(now_s, f"{peer.name} died ({how}){last_words}", "bad")


def _stop_announced(state: DemoState, fact: StopAnnounced, now_s: float) -> DemoState:
    state = replace(state, phase="stopping", stop_epoch=fact.epoch, stopped_at_s=now_s)
    return state._logged(now_s, f"signal to stop: epoch {fact.epoch} will be the last")


def _phase_began(state: DemoState, fact: PhaseBegan, now_s: float) -> DemoState:
    state = replace(state, phase=fact.phase)
    if fact.phase == "baseline":
        return state._logged(now_s, f"one process alone now trains on as much: {state.samples:,} sequences")
    return state


def _baseline_ended(state: DemoState, fact: BaselineEnded, _now_s: float) -> DemoState:
    return replace(state, baseline_complete=fact.complete)


def _run_ended(state: DemoState, fact: RunEnded, _now_s: float) -> DemoState:
    return replace(state, phase="done", exit_reason=fact.reason)


def _said(state: DemoState, fact: Said, now_s: float) -> DemoState:
    if isinstance(fact.report, say.BaselinePoint):
        return replace(state, baseline=(*state.baseline, fact.report))
    peer = state.peers.get(fact.name)
    handle = _REPORTS.get(type(fact.report))
    if peer is None or not peer.alive or handle is None:
        return state
    return handle(state, peer, fact.report, now_s)


# ------------------------------------------------------------------------------------------------ what the peers said


def _working(state: DemoState, peer: PeerView, report: say.Working, now_s: float) -> DemoState:
    since = peer.training_since_s
    if since is None and report.state == "training":
        since = now_s
        if state.phase == "starting":
            state = replace(state, phase="training")
    return state._with(
        replace(
            peer,
            state=report.state,
            epoch=max(peer.epoch, report.epoch),
            samples_per_s=report.samples_per_s,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            training_since_s=since,
        )
    )


def _ready(state: DemoState, peer: PeerView, report: say.Ready, now_s: float) -> DemoState:
    state = state._with(replace(peer, peer_id=report.peer_id, addresses=report.addresses))
    state = replace(state, run_id=report.run_id, parameters=report.parameters)
    return state._logged(now_s, f"{peer.name} is in the network as {report.peer_id[:8]}", "good")


def _epoch_reached(state: DemoState, peer: PeerView, report: say.EpochReached, now_s: float) -> DemoState:
    if peer.newcomer and not peer.stepped:
        state = state._logged(now_s, f"{peer.name} takes its first step with the others, into epoch {report.epoch}", "good")
    state = state._with(replace(peer, stepped=True, epoch=max(peer.epoch, report.epoch)))
    if report.epoch <= state.epoch:
        return state
    before_s = state.epochs[-1].at_s if state.epochs else now_s
    state = replace(state, epochs=(*state.epochs, EpochView(report.epoch, now_s, report.samples, report.peers)))
    for other in state.peers.values():
        if other.lost and other.ended_at_s is not None and other.ended_at_s >= before_s:
            late_s = now_s - other.ended_at_s
            text = f"epoch {report.epoch} done {late_s:.1f} s after the loss of {other.name}: the others go on"
            state = state._logged(now_s, text, "good")
    return state


def _held_out_loss(state: DemoState, _peer: PeerView, report: say.HeldOutLoss, now_s: float) -> DemoState:
    return _with_loss(state, report.epoch, report.loss, now_s)


def _with_loss(state: DemoState, epoch: int, loss: float, now_s: float) -> DemoState:
    if any(point.epoch == epoch for point in state.losses):
        return state
    at_s = next((view.at_s for view in state.epochs if view.epoch == epoch), now_s)
    points = sorted((*state.losses, LossPoint(epoch, at_s, loss)), key=lambda point: point.epoch)
    return replace(state, losses=tuple(points))


def _round_done(state: DemoState, peer: PeerView, report: say.RoundDone, _now_s: float) -> DemoState:
    return state._with(replace(peer, last_round=RoundView(report.peers, report.left_out, report.duration_s)))


def _round_lost(state: DemoState, peer: PeerView, report: say.RoundLost, now_s: float) -> DemoState:
    return state._logged(now_s, f"{peer.name}: round failed ({report.reason}); it is tried again", "bad")


def _peer_gone(state: DemoState, peer: PeerView, report: say.PeerGone, now_s: float) -> DemoState:
    gone = next((other for other in state.peers.values() if other.peer_id == report.peer_id), None)
    if gone is None or gone.noticed or not gone.lost or gone.ended_at_s is None:
        return state
    state = state._with(replace(gone, noticed=True))
    late_s = max(0.0, now_s - gone.ended_at_s)
    return state._logged(now_s, f"{peer.name} noticed within {late_s:.2f} s that {gone.name} is gone")


def _downloaded(state: DemoState, peer: PeerView, report: say.Downloaded, now_s: float) -> DemoState:
    donors = " and ".join(state.name_of(donor) for donor in report.donors) or "the others"
    size = f"{report.bytes_received / 1e6:.1f} MB"
    text = f"{peer.name} downloaded the state from {donors}: {size} in {report.duration_s:.2f} s, verified"
    if peer.newcomer:
        state = replace(state, download=report)
    return state._logged(now_s, text, "good")


def _note(state: DemoState, peer: PeerView, report: say.Note, now_s: float) -> DemoState:
    return state._logged(now_s, f"{peer.name}: {report.text}")


def _finished(state: DemoState, peer: PeerView, report: say.Finished, now_s: float) -> DemoState:
    state = state._with(replace(peer, finished=report, state="finished", epoch=report.epoch, samples_per_s=0.0))
    state = _with_loss(state, report.epoch, report.loss, now_s)
    return state._logged(now_s, f"{peer.name} stands at epoch {report.epoch}, weights {report.weights_sha256[:8]}…")


_FACTS: Mapping[type, Callable[..., DemoState]] = {
    Started: _started,
    Killing: _killing,
    Ended: _ended,
    Said: _said,
    StopAnnounced: _stop_announced,
    PhaseBegan: _phase_began,
    BaselineEnded: _baseline_ended,
    RunEnded: _run_ended,
}

_REPORTS: Mapping[type, Callable[..., DemoState]] = {
    say.Working: _working,
    say.Ready: _ready,
    say.EpochReached: _epoch_reached,
    say.HeldOutLoss: _held_out_loss,
    say.RoundDone: _round_done,
    say.RoundLost: _round_lost,
    say.PeerGone: _peer_gone,
    say.Downloaded: _downloaded,
    say.Note: _note,
    say.Finished: _finished,
}
