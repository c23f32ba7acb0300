"""Rare situations, each named at the line of the code where it is reached, so that simulations can be held to them.

A test that plays random faults says little if the faults never meet: a coordinator that is lost between its verdict and
the telling, two forks of equal weight, a donor that is lost at its last chunk. `sometimes` stands at such a line.
`shoal.sim.run` counts them; the long tests fail where one of them was not reached in any simulation
(`tests/situations.py`). Elsewhere a call looks at one variable, and does nothing. The idea is Antithesis' and
FoundationDB's, whose names the module keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["counted", "reached", "sometimes"]

reached: Counter[str] = Counter()
"""How often each situation was reached in the simulations of this process."""

_counting = False


def sometimes(situation: str) -> None:
    """Note that this rare situation is reached now.

    Args:
        situation: a sentence without an end, written out at the call: no other call has it.
    """
    if _counting:
        reached[situation] += 1


@contextmanager
def counted() -> Iterator[None]:
    """Count the situations that are reached within this block."""
    global _counting  # noqa: PLW0603 (one process, one count)
    before, _counting = _counting, True
    try:
        yield
    finally:
        _counting = before
