"""The contributors to the last steps, with their samples: the weight of each peer's word. Pure bookkeeping.

Keys are free, so a word under a key counts by the work that was committed under it: see `words`. In a round a peer says
itself how many samples it has. So no peer has more weight than all the others together, nor more samples than it may
give.

Of a peer that gave to none of them, the last step to which it gave is known, too: it may have missed the verdict, and
have trained apart since then (see `lineage`).

These steps belong to a state, like the parameters. The members of a round know them from the round, a peer that follows
their steps knows them from these, and a newcomer gets them with the state. So all peers at one state conclude the same
from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from shoal.base.peer import PeerID
from shoal.protocol.wire import Epoch, Samples, decode, encode
from shoal.run.decide.agreement import Contributor, Contributors
from shoal.run.view.words import RECORD, Record, may_give, recorded
from shoal.train.options import Options

__all__ = ["Committed", "Left", "median_end"]

_STEPS = 10
"""The number of last steps that count."""

_MOST_LEFT = 256
"""The most peers that are remembered though they gave to none of them."""

_Steps = Annotated[list[Contributors], msgspec.Meta(max_length=_STEPS)]


class Left(NamedTuple):
    """A peer that gave to none of the last steps.

    Attributes:
        peer: its id.
        epoch: of the state from which the last step led that has samples of it.
        samples: that it gave to that step.
    """

    peer: PeerID
    epoch: Epoch
    samples: Samples


_Left = Annotated[list[Left], msgspec.Meta(max_length=_MOST_LEFT)]
T = TypeVar("T")


@dataclass(frozen=True)
class Committed:
    """The last steps that led to a state.

    Attributes:
        steps: for each step the words of its contributors, with the samples that count.
        left: the peers that gave to none of them, and to one before, the last one last.
        options: that the last one was taken with; None if that is not known.
    """

    steps: Sequence[Sequence[Contributor]] = ()
    left: Sequence[Left] = ()
    options: Options | None = None

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

    def after(self, contributors: Sequence[Contributor], epoch: int, options: Options | None = None) -> Committed:
        """These steps and one more, from the state of this epoch, with these options.

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
        steps = (*self.steps[1 - _STEPS :], step)
        first = self.steps[0] if len(self.steps) == _STEPS else ()  # it is kept no longer
        left = (*self.left, *(Left(each.peer, epoch - _STEPS, each.samples) for each in first if each.samples))
        here = {each.peer for step in steps for each in step if each.samples} if left else set[PeerID]()
        return Committed(steps, tuple(each for each in left if each.peer not in here)[-_MOST_LEFT:], options)

    @property
    def gave(self) -> Sequence[PeerID]:
        """The contributors to the last of them."""
        return [each.peer for each in self.steps[-1] if each.samples] if self.steps else []

    def gave_last(self, peer: PeerID) -> bool:
        """Whether this peer's values are in the last of them, or a part of them."""
        return bool(self.steps) and any(each.peer == peer for each in self.steps[-1])

    def samples_of(self, peer: PeerID, epoch: int, now: int) -> int:
        """What this peer gave to the step from the state of this epoch; 0 if that is not known (`now`: of ours)."""
        back = now - epoch
        step = self.steps[-back] if 1 <= back <= len(self.steps) else ()
        gave = {each.peer: each.samples for each in self.left if each.epoch == epoch}
        return next((each.samples for each in step if each.peer == peer), gave.get(peer, 0))

    def export(self) -> dict[str, bytes]:
        """The form for a newcomer, sent with the state."""
        return {"steps": encode(self.steps), "left": encode(self.left), "options": encode(self.options)}

    @classmethod
    def read(cls, exported: Mapping[str, object]) -> Committed:
        """Read the form that a donor exported, among other things; what cannot be read is left out."""
        steps, left = _read(exported.get("steps"), _Steps) or (), _read(exported.get("left"), _Left) or ()
        options = _read(exported.get("options"), Options)
        return cls(tuple(steps), tuple(left), None if options is None or options.problem() else options)


def _read(exported: object, kind: type[T]) -> T | None:
    try:
        return decode(exported, kind) if isinstance(exported, bytes) else None
    except msgspec.MsgspecError:
        return None


def median_end(ends: Mapping[PeerID, int | None], weights: Mapping[PeerID, int]) -> int | None:
    """The earliest epoch of which more than half say that the run ends there, or before; None if there is none."""
    said = sorted((end, weights.get(peer, 0)) for peer, end in ends.items() if end is not None)
    ended, total = 0, sum(weights.values())
    for end, weight in said:
        ended += weight
        if 2 * ended > total:
            return end
    return None
