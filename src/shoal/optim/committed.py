"""The contributors to the last steps, with their samples: the weight of each peer's word. Pure bookkeeping.

Keys are free, so a word under a key counts by the work that was committed under it: see `words`. In a round a peer says
itself how many samples it has. So no peer has more weight than all the others together, nor more samples than it may
give.

These steps belong to a state, like the parameters. The members of a round know them from the round, a peer that follows
their steps knows them from these, and a newcomer gets them with the state. So all peers at one state conclude the same
from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec

from shoal.optim.agreement import Contributor, Contributors
from shoal.optim.words import RECORD, Record, may_give, recorded
from shoal.peer import PeerID
from shoal.wire import decode, encode

__all__ = ["Committed", "median_end"]

_STEPS = 10
"""So many of the last steps count."""

_Steps = Annotated[list[Contributors], msgspec.Meta(max_length=_STEPS)]


@dataclass(frozen=True)
class Committed:
    """The last steps that led to a state.

    Attributes:
        steps: for each step the words of its contributors, with the samples that count.
    """

    steps: Sequence[Sequence[Contributor]] = ()

    @cached_property
    def record(self) -> Record:
        """What these steps say of each contributor."""
        return Record(self.steps)

    @property
    def samples(self) -> Mapping[PeerID, int]:
        """The samples of each contributor, over all these steps."""
        return self.record.samples

    @property
    def weights(self) -> Mapping[PeerID, int]:
        """The weight of each contributor's word."""
        return self.record.weights

    @property
    def believed(self) -> Mapping[PeerID, int]:
        """The most samples for the next step that are believed of each contributor."""
        return self.record.believed

    @cached_property
    def ends(self) -> Mapping[PeerID, int | None]:
        """The end of the run that each contributor named last; None for no end."""
        return {each.peer: each.end for step in self.steps for each in step}

    @cached_property
    def end(self) -> int | None:
        """The epoch at which the run ends by these words and weights; None if it does not."""
        return median_end(self.ends, self.weights)

    def after(self, contributors: Sequence[Contributor], epoch: int) -> Committed:
        """These steps and one more, from the state of this epoch.

        An end that is over is ignored, unless the peer has named one in time before.
        """

        def end_of(each: Contributor) -> int | None:
            in_time = each.end is not None and (each.end >= epoch or self.ends.get(each.peer) is not None)
            return each.end if in_time else None

        # All members keep the same record, so it depends on nothing that each has measured: who comes back after some
        # steps may give more, and is recorded with what one step takes.
        most = {each.peer: may_give(self.record.rate(each.peer, each.site), 1) for each in contributors}
        kept = recorded({each.peer: each.samples for each in contributors}, most)
        rounds = {each.peer: each.rounds for step in self.steps for each in step}

        def rounds_of(each: Contributor) -> int:
            return min(RECORD, rounds.get(each.peer, 0) + (kept[each.peer] > 0))

        step = [
            Contributor(each.peer, kept[each.peer], end_of(each), each.site, rounds_of(each)) for each in contributors
        ]
        return Committed((*self.steps[1 - _STEPS :], step))

    @property
    def gave(self) -> Sequence[PeerID]:
        """The contributors to the last of them."""
        return [each.peer for each in self.steps[-1] if each.samples] if self.steps else []

    def gave_last(self, peer: PeerID) -> bool:
        """Whether this peer's values are in the last of them, or a part of them."""
        return bool(self.steps) and any(each.peer == peer for each in self.steps[-1])

    def samples_of(self, peer: PeerID, back: int) -> int:
        """What this peer gave to the last of them (`back` is 1), or to an earlier one; 0 if that is not known."""
        step = self.steps[-back] if 1 <= back <= len(self.steps) else ()
        return next((each.samples for each in step if each.peer == peer), 0)

    def export(self) -> bytes:
        """The form for a newcomer, sent with the state."""
        return encode(self.steps)

    @classmethod
    def read(cls, exported: object) -> Committed:
        """Read the form that a donor exported; empty if it cannot be read."""
        try:
            steps = decode(exported, _Steps) if isinstance(exported, bytes) else []
        except msgspec.MsgspecError:
            steps = []
        return cls(tuple(steps))


def median_end(ends: Mapping[PeerID, int | None], weights: Mapping[PeerID, int]) -> int | None:
    """The earliest epoch of which more than half say that the run ends there, or before; None if there is none."""
    said = sorted((end, weights.get(peer, 0)) for peer, end in ends.items() if end is not None)
    ended, total = 0, sum(weights.values())
    for end, weight in said:
        ended += weight
        if 2 * ended > total:
            return end
    return None
