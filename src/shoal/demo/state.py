"""Everything that is known about a demo run: one `DemoState`, of which screen, JSON file and picture are made.

The supervisor tells it what was done (`started`, `killing`, ...) and what the children report (`said`). Nothing here
knows a clock, a process or a file. All times are seconds since the demo's start.

Invariants: an epoch counts once, when the first peer reaches it; so does its held-out loss. Reports of a peer after its
end was seen change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from shoal import events
from shoal.demo.messages import BaselinePoint, Finished, HeldOutLoss, Ready, Report, Working

__all__ = ["DemoEpoch", "DemoPeer", "DemoState", "Fate", "Happening", "LossPoint", "Phase", "Tone"]

Phase = Literal["starting", "training", "stopping", "leaving", "baseline", "done"]
Fate = Literal["alive", "killed", "died", "left"]
Tone = Literal["plain", "good", "bad"]

_LOG_KEPT = 500


@dataclass(slots=True, kw_only=True)
class DemoPeer:
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
        work: its last report on its work.
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
    work: Working = field(default_factory=lambda: Working(state="starting"))
    last_round: events.RoundFinished | None = None
    stepped: bool = False
    training_since_s: float | None = None
    ended_at_s: float | None = None
    noticed: bool = False
    finished: Finished | None = None

    @property
    def alive(self) -> bool:
        """Whether its process is thought to run."""
        return self.ended_at_s is None

    @property
    def lost(self) -> bool:
        """Whether it ended without leaving in order, by plan or not."""
        return self.fate in {"killed", "died"}

    def end(self, fate: Fate, now_s: float) -> None:
        """Its process is gone, or is about to be."""
        self.fate, self.state, self.ended_at_s = fate, "left" if fate == "left" else "DEAD", now_s


class DemoEpoch(NamedTuple):
    """One swarm epoch: reached at `at_s`, with `samples` sequences."""

    epoch: int
    at_s: float
    samples: int


class LossPoint(NamedTuple):
    """Held-out loss of the weights of `epoch`, which the swarm reached at `at_s`."""

    epoch: int
    at_s: float
    loss: float


class Happening(NamedTuple):
    """A line of the log."""

    at_s: float
    text: str
    tone: Tone = "plain"


@dataclass(slots=True, kw_only=True)
class DemoState:
    """Everything known about the run. It begins as `DemoState(seconds=...)`.

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
        exit_reason: empty until the run is over; then "completed", "interrupted", or what went wrong.
    """

    seconds: float
    phase: Phase = "starting"
    peers: dict[str, DemoPeer] = field(default_factory=dict)
    epochs: list[DemoEpoch] = field(default_factory=list)
    losses: list[LossPoint] = field(default_factory=list)
    baseline: list[BaselinePoint] = field(default_factory=list)
    baseline_complete: bool | None = None
    log: list[Happening] = field(default_factory=list)
    logged: int = 0
    run_id: str = ""
    parameters: int = 0
    stop_epoch: int | None = None
    stopped_at_s: float | None = None
    download: events.StateDownloaded | None = None
    exit_reason: str = ""

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def living(self) -> tuple[DemoPeer, ...]:
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

    def share(self, peer: DemoPeer) -> float:
        """The part of the swarm's present sequences per second that `peer` gives, 0 to 1."""
        total = sum(other.work.samples_per_s for other in self.living)
        return peer.work.samples_per_s / total if total and peer.alive else 0.0

    @property
    def finished(self) -> Mapping[str, Finished]:
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

    # ------------------------------------------------------------------------------ the supervisor's acts and sights

    def _tell(self, now_s: float, text: str, tone: Tone = "plain") -> None:
        self.log.append(Happening(now_s, text, tone))
        del self.log[:-_LOG_KEPT]
        self.logged += 1

    def started(self, name: str, pid: int, now_s: float, *, newcomer: bool = False) -> None:
        """A peer process was started."""
        self.peers[name] = DemoPeer(name=name, pid=pid, started_at_s=now_s, newcomer=newcomer)
        self._tell(now_s, f"{name} starts (pid {pid})" + (" to join the run" if newcomer else ""))

    def killing(self, name: str, now_s: float) -> None:
        """The demo sends SIGKILL to this peer, as planned."""
        peer = self.peers[name]
        peer.end("killed", now_s)
        self._tell(now_s, f"kill -9 {peer.pid}: {name} is gone without a word", "bad")

    def ended(self, name: str, returncode: int, last_words: str, now_s: float) -> None:
        """A peer process is gone. `returncode` as in subprocess: negative for a signal."""
        peer = self.peers[name]
        if not peer.alive:
            return
        met_nobody = self.phase == "leaving" and not peer.peer_id
        if met_nobody or (returncode == 0 and self.phase not in {"starting", "training"}):
            peer.end("left", now_s)
            return
        peer.end("died", now_s)
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        self._tell(now_s, f"{name} died ({how})" + (f": {last_words}" if last_words else ""), "bad")

    def stop_announced(self, epoch: int, now_s: float) -> None:
        """The peers were told that `epoch` is the last one."""
        self.phase, self.stop_epoch, self.stopped_at_s = "stopping", epoch, now_s
        self._tell(now_s, f"signal to stop: epoch {epoch} will be the last")

    def leaving(self, now_s: float) -> None:
        """The peers are told to leave."""
        if self.phase != "stopping":
            self._tell(now_s, "all peers leave; Ctrl+C again ends everything at once")
        self.phase = "leaving"

    def baseline_began(self, now_s: float) -> None:
        """The single process is about to start."""
        self.phase = "baseline"
        self._tell(now_s, f"one process alone now trains on as much: {self.samples:,} sequences")

    def over(self, reason: str) -> None:
        """Everything is over."""
        self.phase, self.exit_reason = "done", reason

    # -------------------------------------------------------------------------------------------- what a child reports

    def said(self, name: str, report: Report, now_s: float) -> None:
        """A peer (or the baseline, whose name is "baseline") reported something."""
        if isinstance(report, BaselinePoint):
            self.baseline.append(report)
        elif (peer := self.peers.get(name)) is None or not peer.alive:
            pass
        elif isinstance(report, events.Event):
            self._happened(peer, report, now_s)
        else:
            self._reported(peer, report, now_s)

    def _reported(self, peer: DemoPeer, report: Working | Ready | HeldOutLoss | Finished, now_s: float) -> None:
        match report:
            case Working():
                peer.state, peer.work, peer.epoch = report.state, report, max(peer.epoch, report.epoch)
                if peer.training_since_s is None and report.state == "training":
                    peer.training_since_s = now_s
                    self.phase = "training" if self.phase == "starting" else self.phase
            case Ready():
                peer.peer_id, peer.addresses = report.peer_id, report.addresses
                self.run_id, self.parameters = report.run_id, report.parameters
                self._tell(now_s, f"{peer.name} is in the network as {report.peer_id[:8]}", "good")
            case HeldOutLoss():
                self._measured(report.epoch, report.loss, now_s)
            case Finished():
                peer.finished, peer.state, peer.epoch = report, "finished", report.epoch
                peer.work = msgspec.structs.replace(peer.work, samples_per_s=0.0)
                self._measured(report.epoch, report.loss, now_s)
                text = f"{peer.name} stands at epoch {report.epoch}, weights {report.weights_sha256[:8]}…"
                self._tell(now_s, text)

    def _measured(self, epoch: int, loss: float, now_s: float) -> None:
        """The loss at an epoch was measured."""
        if all(point.epoch != epoch for point in self.losses):
            at_s = next((view.at_s for view in self.epochs if view.epoch == epoch), now_s)
            self.losses = sorted((*self.losses, LossPoint(epoch, at_s, loss)))

    def _happened(self, peer: DemoPeer, event: events.Event, now_s: float) -> None:
        """An event of shoal, in a peer's process."""
        match event:
            case events.EpochAdvanced():
                self._epoch_reached(peer, event, now_s)
            case events.RoundFinished():
                peer.last_round = event
            case events.RoundAborted():
                self._tell(now_s, f"{peer.name}: round failed ({event.reason}); it is tried again", "bad")
            case events.PeerLost():
                gone = next((other for other in self.peers.values() if other.peer_id == str(event.peer)), None)
                if gone is not None and gone.lost and gone.ended_at_s is not None and not gone.noticed:
                    gone.noticed = True
                    late_s = max(0.0, now_s - gone.ended_at_s)
                    self._tell(now_s, f"{peer.name} noticed within {late_s:.2f} s that {gone.name} is gone")
            case events.StateDownloaded():
                donors = " and ".join(self.name_of(str(donor)) for donor in event.donors) or "the others"
                size = f"{event.bytes_received / 1e6:.1f} MB in {event.duration_s:.2f} s"
                self._tell(now_s, f"{peer.name} downloaded the state from {donors}: {size}, verified", "good")
                self.download = event if peer.newcomer else self.download
            case events.PeerDropped():
                what = f"left {event.peer.short()} out of {event.where}: {event.reason}"
                self._tell(now_s, f"{peer.name}: {what}")
            case events.Warned():
                self._tell(now_s, f"{peer.name}: {event.where}: {event.message}")

    def _epoch_reached(self, peer: DemoPeer, event: events.EpochAdvanced, now_s: float) -> None:
        if peer.newcomer and not peer.stepped:
            text = f"{peer.name} takes its first step with the others, into epoch {event.epoch}"
            self._tell(now_s, text, "good")
        peer.stepped, peer.epoch = True, max(peer.epoch, event.epoch)
        if event.epoch <= self.epoch:
            return
        before_s = self.epochs[-1].at_s if self.epochs else now_s
        self.epochs.append(DemoEpoch(event.epoch, now_s, event.samples))
        for other in self.peers.values():
            if other.lost and other.ended_at_s is not None and other.ended_at_s >= before_s:
                late_s = now_s - other.ended_at_s
                text = f"epoch {event.epoch} done {late_s:.1f} s after the loss of {other.name}: the others go on"
                self._tell(now_s, text, "good")
