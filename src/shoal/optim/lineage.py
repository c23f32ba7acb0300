"""The states that led to this peer's state, and how many of its own samples are in each of them. Pure bookkeeping.

What a peer has contributed is a property of its state: the samples that it gave to the steps that led there. Two states
differ in it where the run has forked. So a peer that takes over a state looks for the last state of that one's history
that it has held itself. What it gave to other steps after that is in a branch that is given up: nobody goes on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.optim.state_name import StateName
from shoal.progress import bound

__all__ = ["Gives", "Lineage", "Mark"]

_STATES = 128
"""So many states before it a state names, of 32 bytes each: forks mostly last for fewer epochs."""

_HELD = 2 * _STATES
_GIVES = 16


class Mark(NamedTuple):
    """A state that this peer has held.

    Attributes:
        digest: of its name.
        epoch: of its name.
        contributed: samples of this peer in the steps that led there.
    """

    digest: bytes
    epoch: int
    contributed: int


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
        """The way to a state to which a change led from the one of this name; it has so many samples of this peer."""
        history = (*self.history[1 - _STATES :], name.digest)
        return Lineage(self.contributed + gave, history, self._with(name)[-_HELD:])

    def taken_over(self, name: StateName, history: Sequence[bytes], contributed: int) -> Lineage:
        """The way to a state with this history, which is taken over in place of the one of this name."""
        return Lineage(contributed, tuple(history[-_STATES:]), self._with(name)[-_HELD:])

    def last_held(self, name: StateName, history: Sequence[bytes]) -> Mark | None:
        """The last state of this history that this peer has held or holds now, under `name`; None if there is none."""
        known = {mark.digest: mark for mark in self._with(name)}
        return next((known[digest] for digest in reversed(history) if digest in known), None)

    def _with(self, name: StateName) -> tuple[Mark, ...]:
        return (*self.held, Mark(name.digest, name.epoch, self.contributed))


class Gives:
    """What a peer gave to rounds, as it may miss the verdict of one, and give again at the same state."""

    def __init__(self) -> None:
        self._at: dict[bytes, list[tuple[int, int]]] = {}

    def note(self, state: bytes, said: int, given: int) -> None:
        """At the state of this digest it said that it had so many samples, and gave so many when the round began."""
        gives = self._at.setdefault(state, [])
        gives.append((max(1, said), given))
        del gives[:-_GIVES]
        bound(self._at, _GIVES)

    def counted(self, state: bytes, recorded: int) -> int:
        """How many of the samples that it gave at this state are in a step whose record has so many of it.

        The record has those that the peer said before the round, or of these the share of the parts that count. Each
        time the peer says no fewer than before.
        """
        for said, given in self._at.get(state, ()):
            if said >= recorded:
                return given * recorded // said
        return 0
