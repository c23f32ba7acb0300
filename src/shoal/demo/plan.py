"""The planned actions of the demo, and their times: kill one peer, bring a new one, announce the end, give up.

A sans-IO state machine: `Director.actions(state, now_s)` returns the actions that are due now, each one once. It
decides from the state of the run, not from the clock alone: no peer is killed before the swarm has trained, or if a
peer has died already; the newcomer comes after the survivors have gone on; where the peers start late, all of it
comes later; a run that cannot finish is given up at a deadline.
"""

from __future__ import annotations

from math import ceil

import msgspec

from shoal.demo.settings import DemoOptions
from shoal.demo.state import DemoState

__all__ = ["Action", "Director", "GiveUp", "Kill", "Limits", "SendHome", "StartNewcomer", "TellStop"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the supervisor's waits, in seconds. Nothing in the demo waits without a limit.

    Attributes:
        start_s: from the start until the first peer is in the network.
        stop_s: from the signal to stop until all living peers stand at the last epoch.
        leave_s: from being told to leave until a process is gone; then it is killed.
        baseline_s: training time of the single process.
        baseline_start_s: additional time for that process to start and to end.
        margin_s: the announced last epoch lies at least so far ahead, for the news to spread.
    """

    start_s: float = 120.0
    stop_s: float = 45.0
    leave_s: float = 10.0
    baseline_s: float = 60.0
    baseline_start_s: float = 30.0
    margin_s: float = 1.5


class Kill(msgspec.Struct, frozen=True):
    """Send SIGKILL to this peer."""

    name: str


class StartNewcomer(msgspec.Struct, frozen=True):
    """Start one more peer."""


class TellStop(msgspec.Struct, frozen=True):
    """Tell the peers that `epoch` is the last."""

    epoch: int


class SendHome(msgspec.Struct, frozen=True):
    """All peers stand at the last epoch: tell them to leave."""


class GiveUp(msgspec.Struct, frozen=True):
    """The run cannot succeed any more."""

    reason: str


Action = Kill | StartNewcomer | TellStop | SendHome | GiveUp

_BEGUN_BY = 1 / 4
_KILL_AT, _JOIN_AT, _NO_MORE_AFTER = 1 / 3, 1 / 2, 0.85


class Director:
    """Decides the supervisor's actions.

    Args:
        options: the user's options.
        limits: the deadlines.
    """

    def __init__(self, options: DemoOptions, limits: Limits) -> None:
        self._options, self._limits = options, limits
        self._killed_at_s: float | None = None
        self._newcomer_called = False
        self._over = False

    def actions(self, state: DemoState, now_s: float) -> list[Action]:
        """The actions that are due at `now_s` seconds since the start; empty if there are none."""
        if self._over:
            return []
        reason = self._hopeless(state, now_s)
        if reason:
            self._over = True
            return [GiveUp(reason)]
        now_s = self._by_the_plan(state, now_s)
        if state.phase == "stopping":
            self._over = all(peer.finished for peer in state.living)
            return [SendHome()] if self._over else []
        # The stop waits until a peer is there; `_hopeless` bounds that.
        if now_s >= self._options.seconds and any(peer.peer_id for peer in state.living):
            return [TellStop(self._last_epoch(state))]
        return [*self._kill(state, now_s), *self._newcomer(state, now_s)]

    def _by_the_plan(self, state: DemoState, now_s: float) -> float:
        """The time of the plan, which waits for two peers that train: a slow machine takes long to load torch."""
        training = sorted(peer.training_since_s for peer in state.peers.values() if peer.training_since_s is not None)
        if len(training) > 1:
            begun_s = training[1]
        else:
            begun_s = min(now_s, self._limits.start_s) if len(state.living) > 1 else 0.0
        return now_s - max(0.0, begun_s - _BEGUN_BY * self._options.seconds)

    def _hopeless(self, state: DemoState, now_s: float) -> str:
        if not state.living:
            return "no peer is left"
        if now_s >= self._limits.start_s and not any(peer.peer_id for peer in state.peers.values()):
            return f"no peer was ready within {self._limits.start_s:.0f} s"
        if state.stopped_at_s is not None and now_s >= state.stopped_at_s + self._limits.stop_s:
            late = ", ".join(peer.name for peer in state.living if peer.finished is None)
            return f"{late} did not reach the last epoch within {self._limits.stop_s:.0f} s"
        return ""

    def _last_epoch(self, state: DemoState) -> int:
        # Peers move on while the news travels: the end must lie ahead of all of them.
        return state.epoch + max(2, ceil(self._limits.margin_s / max(state.typical_epoch_s, 0.01)))

    def _kill(self, state: DemoState, now_s: float) -> list[Action]:
        if self._killed_at_s is not None or now_s < self._options.seconds * _KILL_AT:
            return []
        if any(not peer.alive for peer in state.peers.values()):
            self._killed_at_s = now_s  # a peer died by itself before: the demo shows one loss only
            return []
        trained = [peer for peer in state.living if peer.training_since_s is not None]
        all_there = len(trained) == len(state.living) or now_s > self._options.seconds * _JOIN_AT
        if len(trained) < 2 or not all_there or state.epoch < 2 or now_s > self._options.seconds * _NO_MORE_AFTER:
            return []
        self._killed_at_s = now_s
        # The fastest stays: the run should still have something to show.
        return [Kill(trained[1:][self._options.seed % (len(trained) - 1)].name)]

    def _newcomer(self, state: DemoState, now_s: float) -> list[Action]:
        if self._newcomer_called or state.epoch < 1 or now_s > self._options.seconds * _NO_MORE_AFTER:
            return []
        # It needs a while to load torch: started early, it joins at about half.
        first_trained_s = min(
            (peer.training_since_s for peer in state.peers.values() if peer.training_since_s is not None), default=0.0
        )
        loading_s = min(first_trained_s, 0.1 * self._options.seconds)
        after_the_kill_s = (self._killed_at_s or 0.0) + 2 * state.typical_epoch_s
        if now_s < max(self._options.seconds * _JOIN_AT - loading_s, after_the_kill_s):
            return []
        if self._killed_at_s is None and now_s < self._options.seconds * (_JOIN_AT + 0.1):
            return []
        self._newcomer_called = True
        return [StartNewcomer()]
