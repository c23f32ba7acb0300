"""The phases of a run, as one peer goes through them: a pure machine. It knows no network, no clock and no loop.

`PHASES` and `TRANSITIONS` are the two tables of `docs/why/protocol.md` (section 10), which `help()` shows below. The
participant, which owns the tasks and the waiting, makes a `Situation` of what it sees, and tells the machine each
`Event`. `PhaseMachine.work` says what its background task does now. Nothing else changes the machine.

Only the trainer changes parameters, between its batches. After a failed round the accumulators stay and it is tried
again: no peer steps on its own gradients while others are at the same state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "PHASES",
    "TRANSITIONS",
    "Event",
    "PhaseMachine",
    "RunPhase",
    "Situation",
    "Work",
    "tables",
]


class RunPhase(enum.Enum):
    """The phases of a run, between two steps of a trainer: see `PHASES`."""

    COLLECTING = "collecting"
    AVERAGING = "averaging"
    STEPPING = "stepping"
    BEHIND = "behind"
    ENDING = "ending"


PHASES = {
    RunPhase.COLLECTING: (
        "the swarm has fewer than `target_batch_size` samples at our state",
        "goes on with the next batch; an auxiliary peer has none, and waits",
    ),
    RunPhase.AVERAGING: (
        "there are enough: the gradients are averaged with all at our state",
        "waits for the round, or for the step alone; with a strategy that goes on it does in a round, unless auxiliary",
    ),
    RunPhase.STEPPING: (
        "an average is here, of the gradients or of the states",
        "takes the optimizer step, or that average",
    ),
    RunPhase.BEHIND: (
        "another peer has a better state (more samples went into it)",
        "downloads it; if no donor gave it, tries again at its next step",
    ),
    RunPhase.ENDING: (
        "this peer is at the announced end, and others that it knows are not",
        "waits, some seconds at most",
    ),
}
"""For each phase, the situation and what the trainer does at its step."""


class Event(enum.Enum):
    """The events of a run. The first five are looks at the swarm: the first of them that is true is the one."""

    BETTER = (
        "a peer at a better state counts; or this peer may not begin beside a run that is further; or a fetched state "
        "waits for the trainer to stand still"
    )
    MAY_LEAVE = "the run is over here, and all peers that count are at our state, or `end_patience_s` have passed"
    AT_END = "the run is over here, and other peers are not at our state yet"
    ENOUGH = "the samples of all at our state reach the target"
    FEW = "the samples of all at our state do not reach the target"
    AVERAGED = "a round of gradients succeeded; or nobody else takes part, and the own mean is taken"
    STATES_AVERAGED = "a round of states succeeded"
    UNFIT = "nobody else takes part, and the own mean is not finite: it is dropped"
    MISFIT = (
        "a round of gradients succeeded, but its step cannot be taken here, for its options or for want of memory: "
        "what was accumulated is dropped"
    )
    STEPPED = "the trainer took the step or the average, or it was interrupted or raised: the renamed state is told"
    TAKEN_OVER = "a better state was taken over, or the steps that lead to it"
    RENAMED = "a checkpoint was loaded; or the check says that our parameters differ, and our state is renamed as worse"
    OVERTAKEN = "the state that the average was for is no longer ours"
    STATES_DUE = "the states are to be averaged after the step, with the other members of its round"
    STATES_OVER = "no average of the states is due any more: it is here, it failed, or our state is another one"


_FREE = (RunPhase.COLLECTING, RunPhase.BEHIND, RunPhase.ENDING)
_ANY = tuple(RunPhase)

_ROWS = (
    (_FREE, Event.BETTER, RunPhase.BEHIND),
    (_FREE, Event.MAY_LEAVE, RunPhase.COLLECTING),
    (_FREE, Event.AT_END, RunPhase.ENDING),
    (_FREE, Event.ENOUGH, RunPhase.AVERAGING),
    (_FREE, Event.FEW, RunPhase.COLLECTING),
    ((RunPhase.AVERAGING,), Event.BETTER, RunPhase.BEHIND),
    ((RunPhase.AVERAGING,), Event.FEW, RunPhase.COLLECTING),
    # The work of AVERAGING ends when it ends: meanwhile a state may have been taken over, or a checkpoint loaded.
    (_ANY, Event.UNFIT, RunPhase.COLLECTING),
    (_ANY, Event.MISFIT, RunPhase.COLLECTING),
    (_ANY, Event.AVERAGED, RunPhase.STEPPING),
    (_ANY, Event.STATES_AVERAGED, RunPhase.STEPPING),
    ((RunPhase.STEPPING,), Event.STEPPED, RunPhase.COLLECTING),
    ((RunPhase.STEPPING,), Event.OVERTAKEN, RunPhase.COLLECTING),
    (_ANY, Event.TAKEN_OVER, RunPhase.COLLECTING),
    (_ANY, Event.RENAMED, RunPhase.COLLECTING),
    # Between two steps the states are averaged beside the trainer's batches: in any phase.
    (_ANY, Event.STATES_DUE, None),
    (_ANY, Event.STATES_OVER, None),
)
"""(phases, event, next phase): a row of the table. None: the phase stays the same."""

_NEXT = {(phase, event): then or phase for phases, event, then in _ROWS for phase in phases}

_STATES_DUE = {Event.STATES_DUE: True, Event.STATES_OVER: False, Event.STEPPED: False, Event.RENAMED: False}
"""Whether the states are to be averaged after each of these events. The others change nothing in that."""

TRANSITIONS: Mapping[tuple[RunPhase, str, RunPhase], str] = MappingProxyType(
    {(phase, event.name, then): event.value for (phase, event), then in _NEXT.items()}
)
"""Every transition of a run, by the name of its event, and when it happens. The phase may stay the same."""


def tables() -> str:
    """The phases and the transitions as Markdown tables."""
    lines = ["| phase | what goes on | the trainer, at its step |", "| --- | --- | --- |"]
    lines += [f"| {phase.name} | {what} | {trainer} |" for phase, (what, trainer) in PHASES.items()]
    lines += ["", "| phase | event | next |", "| --- | --- | --- |"]
    for phases, event, then in _ROWS:
        names = "any" if phases == _ANY else ", ".join(phase.name for phase in phases)
        lines.append(f"| {names} | {event.value} | {'the same' if then is None else then.name} |")
    return "\n".join(lines)


__doc__ = f"{__doc__}\n{tables()}\n"


class Work(enum.Enum):
    """The next work of the background task."""

    WAIT = "wait for news"
    LOOK_AGAIN = "look at the swarm again"
    SEEK = "look for other peers of the run"
    STEP_ALONE = "make a step of the own gradients"
    AVERAGE_GRADIENTS = "average the gradients with all at our state"
    AVERAGE_STATES = "average the states with all that took the last step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One look of a peer at the swarm.

    Attributes:
        behind: a better state than ours counts.
        must_fetch: this peer may not begin from its own state, or a fetched state waits to be taken over.
        at_end: the run is over here.
        may_leave: the others know all that this peer knows, or were waited for.
        enough: the samples at our state reach the target.
    """

    behind: bool
    must_fetch: bool = False
    at_end: bool = False
    may_leave: bool = False
    enough: bool

    @property
    def event(self) -> Event:
        """The event that this look is."""
        if self.behind or self.must_fetch:
            return Event.BETTER
        if self.at_end:
            return Event.MAY_LEAVE if self.may_leave else Event.AT_END
        return Event.ENOUGH if self.enough else Event.FEW


class PhaseMachine:
    """The phase of one peer.

    Args:
        auxiliary: it has no batches.
        delays_gradients: its trainer goes on with the next batches while gradients are averaged.

    Attributes:
        phase: now.
        states_due: the states are to be averaged, or are being averaged: until then looks change nothing.
    """

    def __init__(self, *, auxiliary: bool = False, delays_gradients: bool = False) -> None:
        self._auxiliary, self._delays_gradients = auxiliary, delays_gradients
        self.phase = RunPhase.COLLECTING
        self.states_due = False
        self._work = Work.WAIT  # of the background task, now
        self._sought = False

    @property
    def is_busy(self) -> bool:
        """Whether there is an average of gradients to wait for, or an average to take."""
        return self.phase in (RunPhase.AVERAGING, RunPhase.STEPPING)

    def happened(self, event: Event) -> None:
        """Go on to the next phase. The event must be one that can happen in this phase."""
        self.phase = _NEXT[self.phase, event]
        self.states_due = _STATES_DUE.get(event, self.states_due)

    def work(self, seen: Situation, *, alone: bool, nobody: bool) -> Work:
        """The next work of the background task. Between two rounds AVERAGING ends if there is no reason for a round.

        Args:
            seen: the last look; what follows from the end of the run, and from fetched states, waits for the average.
            alone: no other peer at our state takes part in a round.
            nobody: no other peer of the run is known at all. It is looked for once until somebody is known.
        """
        self._work = self._next_work(seen, alone=alone, nobody=nobody)
        return self._work

    def _next_work(self, seen: Situation, *, alone: bool, nobody: bool) -> Work:
        if self.states_due:
            return Work.AVERAGE_STATES
        if self.phase is not RunPhase.AVERAGING:
            return Work.WAIT
        if seen.behind or not seen.enough:
            self.happened(Event.BETTER if seen.behind else Event.FEW)
            return Work.LOOK_AGAIN
        if not alone:
            return Work.AVERAGE_GRADIENTS
        if nobody and not self._sought:
            self._sought = True
            return Work.SEEK
        return Work.STEP_ALONE

    def found(self) -> None:
        """Another peer of the run is known."""
        self._sought = False

    def trainer_waits(self, *, needs_round: bool, at_end: bool, may_leave: bool) -> bool:
        """Whether the trainer stands still at its step.

        Args:
            needs_round: the trainer cannot go on while gradients are averaged.
            at_end: the run is over here.
            may_leave: the run is over here, and the others know all that this peer knows, or were waited for.
        """
        averages = self.phase is RunPhase.AVERAGING
        idle = self._auxiliary and (averages or self.phase is RunPhase.COLLECTING)
        if idle or self.phase is RunPhase.ENDING:
            return self.states_due or not may_leave
        if averages:
            # Before the round begins it is not known yet that this peer does not step alone.
            goes_on = self._work is Work.AVERAGE_GRADIENTS and self._delays_gradients and not needs_round
            return not goes_on
        return self.states_due and at_end and self.phase is not RunPhase.STEPPING
