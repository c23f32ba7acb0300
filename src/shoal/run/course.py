"""The course of one peer through the phases of a run: its background work and its trainer meet here. Loop only.

Whoever averages, takes over or loads a state says what has happened. The trainer waits at its step until it may go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.base.tasks import Changes
from shoal.run.decide.phases import Event, PhaseMachine, RunPhase

__all__ = ["Course"]


class Course:
    """The phase of one peer, and all else that its trainer waits for.

    Args:
        machine: decides which phase is next.

    Attributes:
        moves: of the phase, and of all else that the trainer may wait for.
        turns: calls of the trainer that are at its step now.
        has_asked: whether it has come to its first step.
        failure: the error that ended the background work, if any; the trainer's next call raises it.
        is_closed: whether this peer leaves the run, or has left.
    """

    def __init__(self, machine: PhaseMachine) -> None:
        self.machine, self.moves = machine, Changes()
        self.has_asked = self.is_closed = False
        self.failure: BaseException | None = None
        self.turns = 0

    @property
    def phase(self) -> RunPhase:
        """The phase of this peer between two steps of its trainer."""
        return self.machine.phase

    def happened(self, event: Event) -> None:
        """Go on to the next phase, and wake the trainer."""
        self.machine.happened(event)
        self.moves.notify()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The trainer is at its step."""
        self.has_asked, self.turns = True, self.turns + 1
        self.moves.notify()
        try:
            yield
        finally:
            self.turns -= 1

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for any more: this peer leaves, or its background work has failed."""
        return self.is_closed or self.failure is not None

    def fail(self, error: BaseException) -> None:
        """The background work has ended with this error."""
        self.failure = error
        self.moves.notify()

    def close(self) -> None:
        """This peer leaves the run."""
        self.is_closed = True
