"""The states that led to this peer's state, and how many of its own samples are in each of them. Pure bookkeeping.

What a peer has contributed is a property of its state: the samples that it gave to the steps that led there. Two states
differ in it where the run has forked. So a peer that takes over a state looks for the last state of that one's history
that it has held itself. What it gave to other steps after that is in a branch that is given up: nobody goes on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.base.bounded import bound
from shoal.run.decide.state_name import StateName
from shoal.run.view.witness import FASTER

__all__ = ["Apart", "Gives", "Lineage", "Mark", "may_have_led"]

_STATES = 1024
"""A state names this number of states before it, of 32 bytes each: forks mostly last for fewer epochs."""

_HELD = 2 * _STATES
_GIVES = 16

_STATES_OF_AN_EPOCH = 2
"""The step's, and the average of the states after it."""


class Mark(NamedTuple):
    """A state that this peer has held.

    Attributes:
        digest: of its name.
        epoch: of its name.
        samples: of its name.
        contributed: samples of this peer in the steps that led there.
    """

    digest: bytes
    epoch: int
    samples: int
    contributed: int


class Apart(NamedTuple):
    """What is given up with a state: all that was trained since the last state that it and the other one came from.

    Attributes:
        epochs: since then.
        samples: of all peers since then.
        own: those of this peer among them.
    """

    epochs: int
    samples: int
    own: int


class Lineage(NamedTuple):
    """The way that led to this peer's state. A value: who changes the state replaces it in one assignment.

    Attributes:
        contributed: samples of this peer in the steps that led to its state.
        history: the digests of the states before it, as far as they are known, the last one last.
        held: the last states before it that this peer has held, also in branches that it has given up.
    """

    contributed: int = 0
    history: tuple[bytes, ...] = ()
    held: tuple[Mark, ...] = ()

    def after(self, name: StateName, gave: int) -> Lineage:
        """The way to a state to which a change led from the one of this name; `gave` samples of this peer are in it."""
        history = (*self.history[1 - _STATES :], name.digest)
        return Lineage(self.contributed + gave, history, self._with(name)[-_HELD:])

    def taken_over(self, name: StateName, history: Sequence[bytes], contributed: int) -> Lineage:
        """The way to a state with this history, which is taken over in place of the one of this name."""
        return Lineage(contributed, tuple(history[-_STATES:]), self._with(name)[-_HELD:])

    def last_held(self, name: StateName, history: Sequence[bytes]) -> Mark | None:
        """The last state of this history that this peer has held or holds now, under `name`; None if there is none."""
        known = {mark.digest: mark for mark in self._with(name)}
        return next((known[digest] for digest in reversed(history) if digest in known), None)

    def since(self, name: StateName, last: Mark) -> Apart:
        """What was trained from a state on until the one of this name."""
        return Apart(name.epoch - last.epoch, name.samples - last.samples, self.contributed - last.contributed)

    def _with(self, name: StateName) -> tuple[Mark, ...]:
        return (*self.held, Mark(name.digest, name.epoch, name.samples, self.contributed))


def may_have_led(ours: StateName, theirs: StateName, known: int, steps: float | None) -> bool:
    """Whether the run may have come from our state to theirs, though it is none of the last states before that.

    Args:
        ours: the name of the state of a peer that may have been away.
        theirs: the name of the other one.
        known: the number of states before it that are known.
        steps: the time since this peer was in a step, in the time that a step takes; None if it is not known.
    """
    epochs = theirs.epoch - ours.epoch
    return epochs * _STATES_OF_AN_EPOCH >= known and (steps is None or epochs <= FASTER * (steps + 2))


class Gives:
    """What a peer gave to rounds, as it may miss the verdict of one, and give again at the same state."""

    def __init__(self) -> None:
        self._at: dict[bytes, list[tuple[int, int]]] = {}

    def note(self, state: bytes, said: int, given: int) -> None:
        """At the state of this digest it said that it had `said` samples, and gave `given` when the round began."""
        gives = self._at.setdefault(state, [])
        gives.append((max(1, said), given))
        del gives[:-_GIVES]
        bound(self._at, _HELD)  # as the others may have taken the step from any of these, and this peer another one

    def counted(self, state: bytes, recorded: int) -> int:
        """How many of the samples that it gave at this state are in a step whose record has `recorded` of it.

        The record has those that the peer said before the round, or of these the share of the parts that count. Each
        time the peer says no fewer than before.
        """
        for said, given in self._at.get(state, ()):
            if said >= recorded:
                return given * recorded // said
        return 0
