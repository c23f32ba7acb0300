"""Who has contributed to the last steps, and with how many samples: what a peer's word weighs. Pure bookkeeping.

Keys are free, so what is said under a key counts by what was committed under it: a key that has contributed to none of
the last rounds weighs nothing. In a round a peer says itself how many samples it has; so nobody weighs more than all
the others of its round together.

It belongs to a state, like the parameters: the members of a round know it from the round, a peer that follows their
steps from these, and a newcomer gets it with the state. So all who are at one state conclude the same from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec

from shoal.optim.agreement import Contributor, Contributors
from shoal.peer import PeerID
from shoal.wire import decode, encode

__all__ = ["Committed"]

_STEPS = 10
"""So many of the last steps count."""

_Steps = Annotated[list[Contributors], msgspec.Meta(max_length=_STEPS)]


@dataclass(frozen=True)
class Committed:
    """The last steps that led to a state.

    Attributes:
        steps: what the contributors to each said, with what counts of that.
    """

    steps: Sequence[Sequence[Contributor]] = ()

    @cached_property
    def samples(self) -> Mapping[PeerID, int]:
        """Of each contributor to these steps, all of them together."""
        samples: dict[PeerID, int] = {}
        for each in (each for step in self.steps for each in step if each.samples):
            samples[each.peer] = samples.get(each.peer, 0) + each.samples
        return samples

    @cached_property
    def ends(self) -> Mapping[PeerID, int | None]:
        """Where the run ends, as each of these has said last; None for nowhere."""
        return {each.peer: each.end for step in self.steps for each in step}

    def after(self, contributors: Sequence[Contributor], epoch: int) -> Committed:
        """With a step from the state of this epoch. An end that was over already when it was first said is none."""

        def end_of(each: Contributor) -> int | None:
            in_time = each.end is not None and (each.end >= epoch or each.end == self.ends.get(each.peer))
            return each.end if in_time else None

        total = sum(each.samples for each in contributors)
        step = [
            Contributor(
                each.peer,
                min(each.samples, total - each.samples) if len(contributors) > 1 else each.samples,
                end_of(each),
            )
            for each in contributors
        ]
        return Committed((*self.steps[1 - _STEPS :], step))

    def export(self) -> bytes:
        """For a newcomer, with the state."""
        return encode(self.steps)

    @classmethod
    def read(cls, exported: object) -> Committed:
        """As a donor has exported it; nothing is known if it cannot be read."""
        try:
            steps = decode(exported, _Steps) if isinstance(exported, bytes) else []
        except msgspec.MsgspecError:
            steps = []
        return cls(tuple(steps))
