"""How facts change the state of a demo run: `apply(state, fact, now_s)`, the only way to a new `DemoState`.

Pure: no clock, no process, no file. Facts are actions or observations of the supervisor (`Started`, `Killing`, `Ended`,
...) and reports of a child (`Said`).

Invariants: an epoch counts once, when the first peer reaches it; so does its held-out loss. Reports of a peer after its
end was seen change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shoal.demo import messages as say
from shoal.demo.state import DemoState, EpochView, Happening, LossPoint, PeerView, Phase, RoundView, Tone

__all__ = [
    "AnyFact",
    "BaselineEnded",
    "Ended",
    "Killing",
    "PhaseBegan",
    "RunEnded",
    "Said",
    "Started",
    "StopAnnounced",
    "apply",
]

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


def apply(state: DemoState, fact: AnyFact, now_s: float) -> DemoState:
    """The state after `fact`, which became known at `now_s` seconds since the start."""
    return _FACTS[type(fact)](state, fact, now_s)


def _logged(state: DemoState, now_s: float, text: str, tone: Tone = "plain") -> DemoState:
    kept = (*state.log, Happening(now_s, text, tone))[-_LOG_KEPT:]
    return replace(state, logged=state.logged + 1, log=kept)


def _with(state: DemoState, peer: PeerView) -> DemoState:
    return replace(state, peers={**state.peers, peer.name: peer})


# --------------------------------------------------------------------------------- the supervisor's acts and sights


def _started(state: DemoState, fact: Started, now_s: float) -> DemoState:
    state = _with(state, PeerView(name=fact.name, pid=fact.pid, started_at_s=now_s, newcomer=fact.newcomer))
    return _logged(state, now_s, f"{fact.name} starts (pid {fact.pid})" + (" to join the run" if fact.newcomer else ""))


def _killing(state: DemoState, fact: Killing, now_s: float) -> DemoState:
    peer = replace(state.peers[fact.name], fate="killed", state="DEAD", ended_at_s=now_s)
    return _logged(_with(state, peer), now_s, f"kill -9 {peer.pid}: {peer.name} is gone without a word", "bad")


def _ended(state: DemoState, fact: Ended, now_s: float) -> DemoState:
    peer = state.peers[fact.name]
    if not peer.alive:
        return state
    met_nobody = state.phase == "leaving" and not peer.peer_id
    if met_nobody or (fact.returncode == 0 and state.phase not in {"starting", "training"}):
        return _with(state, replace(peer, fate="left", state="left", ended_at_s=now_s))
    how = f"signal {-fact.returncode}" if fact.returncode < 0 else f"exit code {fact.returncode}"
    state = _with(state, replace(peer, fate="died", state="DEAD", ended_at_s=now_s))
    last_words = f": {fact.detail}" if fact.detail else ""
    return _logged(state, now_s, f"{peer.name} died ({how}){last_words}", "bad")


def _stop_announced(state: DemoState, fact: StopAnnounced, now_s: float) -> DemoState:
    state = replace(state, phase="stopping", stop_epoch=fact.epoch, stopped_at_s=now_s)
    return _logged(state, now_s, f"signal to stop: epoch {fact.epoch} will be the last")


def _phase_began(state: DemoState, fact: PhaseBegan, now_s: float) -> DemoState:
    early, state = state.phase != "stopping", replace(state, phase=fact.phase)
    if fact.phase == "leaving" and early:
        return _logged(state, now_s, "all peers leave; Ctrl+C again ends everything at once")
    if fact.phase == "baseline":
        return _logged(state, now_s, f"one process alone now trains on as much: {state.samples:,} sequences")
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
    return _with(
        state,
        replace(
            peer,
            state=report.state,
            epoch=max(peer.epoch, report.epoch),
            samples=report.samples,
            samples_per_s=report.samples_per_s,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            training_since_s=since,
        ),
    )


def _ready(state: DemoState, peer: PeerView, report: say.Ready, now_s: float) -> DemoState:
    state = _with(state, replace(peer, peer_id=report.peer_id, addresses=report.addresses))
    state = replace(state, run_id=report.run_id, parameters=report.parameters)
    return _logged(state, now_s, f"{peer.name} is in the network as {report.peer_id[:8]}", "good")


def _epoch_reached(state: DemoState, peer: PeerView, report: say.EpochReached, now_s: float) -> DemoState:
    if peer.newcomer and not peer.stepped:
        state = _logged(
            state, now_s, f"{peer.name} takes its first step with the others, into epoch {report.epoch}", "good"
        )
    state = _with(state, replace(peer, stepped=True, epoch=max(peer.epoch, report.epoch)))
    if report.epoch <= state.epoch:
        return state
    before_s = state.epochs[-1].at_s if state.epochs else now_s
    state = replace(state, epochs=(*state.epochs, EpochView(report.epoch, now_s, report.samples, report.peers)))
    for other in state.peers.values():
        if other.lost and other.ended_at_s is not None and other.ended_at_s >= before_s:
            late_s = now_s - other.ended_at_s
            text = f"epoch {report.epoch} done {late_s:.1f} s after the loss of {other.name}: the others go on"
            state = _logged(state, now_s, text, "good")
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
    return _with(state, replace(peer, last_round=RoundView(report.peers, report.left_out, report.duration_s)))


def _round_lost(state: DemoState, peer: PeerView, report: say.RoundLost, now_s: float) -> DemoState:
    return _logged(state, now_s, f"{peer.name}: round failed ({report.reason}); it is tried again", "bad")


def _peer_gone(state: DemoState, peer: PeerView, report: say.PeerGone, now_s: float) -> DemoState:
    gone = next((other for other in state.peers.values() if other.peer_id == report.peer_id), None)
    if gone is None or gone.noticed or not gone.lost or gone.ended_at_s is None:
        return state
    state = _with(state, replace(gone, noticed=True))
    late_s = max(0.0, now_s - gone.ended_at_s)
    return _logged(state, now_s, f"{peer.name} noticed within {late_s:.2f} s that {gone.name} is gone")


def _downloaded(state: DemoState, peer: PeerView, report: say.Downloaded, now_s: float) -> DemoState:
    donors = " and ".join(state.name_of(donor) for donor in report.donors) or "the others"
    size = f"{report.bytes_received / 1e6:.1f} MB"
    text = f"{peer.name} downloaded the state from {donors}: {size} in {report.duration_s:.2f} s, verified"
    if peer.newcomer:
        state = replace(state, download=report)
    return _logged(state, now_s, text, "good")


def _note(state: DemoState, peer: PeerView, report: say.Note, now_s: float) -> DemoState:
    return _logged(state, now_s, f"{peer.name}: {report.text}")


def _finished(state: DemoState, peer: PeerView, report: say.Finished, now_s: float) -> DemoState:
    state = _with(state, replace(peer, finished=report, state="finished", epoch=report.epoch, samples_per_s=0.0))
    state = _with_loss(state, report.epoch, report.loss, now_s)
    return _logged(state, now_s, f"{peer.name} stands at epoch {report.epoch}, weights {report.weights_sha256[:8]}…")


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
