"""The time limits and the result of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from operator import and_, or_
from statistics import fmean

import msgspec

from shoal.base.peer import PeerID
from shoal.protocol.wire import Commit, Held, Member

__all__ = [
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "OUTWEIGHS",
    "MostWeight",
    "Outcome",
    "RoundOptions",
    "any_weight",
    "has_member",
    "is_sound",
    "is_weight",
]

MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e12
"""A weight that is not 0 lies between these: sums and quotients in float32 then stay exact enough."""

_OTHERWISE = 4
"""Members may know otherwise how much each of them may give: an average may have so many times as much weight."""

OUTWEIGHS = 999
"""A member with more than so many times the weight of all others together makes the average its own: it is told."""


MostWeight = Callable[[PeerID], float]
"""The largest weight that a member may give."""


def any_weight(_: PeerID) -> float:
    """A member may give any weight that can be counted."""
    return MAX_WEIGHT


class RoundOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The time limits of a round.

    Attributes:
        min_group_size: with fewer members left the round fails; auxiliary members count.
        timeout_s: the round fails here after this.
        silence_s: a member that sends nothing for this long, while it owes values, is left out.
        reducer_silence_s: a member that makes no progress for this long, while it owes averages, is left out by the
            coordinator; more than `silence_s`, as a reducer may be waiting for a sender. None: twice as long.
        spare_s: members that are slower than the others are waited for no longer than this, beyond the time that such a
            round usually needs (twice that of the median member).
        report_s: the longest time between two reports to the coordinator.
        since_last_s: the time since the last round, in which members have worked for this one: so that those with slow
            lines may be worth waiting for (`slow_lines`); 0: members are compared with each other alone.
        most_weight: a larger weight of a member is refused, and so is an average with far more for each; None: any is
            taken.
    """

    min_group_size: int = 2
    timeout_s: float = 120.0
    silence_s: float = 5.0
    reducer_silence_s: float | None = None
    spare_s: float = math.inf
    report_s: float = 1.0
    since_last_s: float = 0.0
    most_weight: MostWeight | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A round that succeeded.

    Attributes:
        commit: the verdict, without its signature; its digests name the averages.
        members: the group, in order.
        contributors: members that count in every tile.
        left_out: members that had values and are missing in at least one tile; never an auxiliary member.
        weight: total weight of a tile, on average; the same in all tiles, if nobody was left out on the way.
        reducers: for each tile, the index of the member that was to average it at first.
    """

    commit: Commit
    members: tuple[Member, ...]
    weight: float
    contributors: tuple[PeerID, ...]
    left_out: tuple[PeerID, ...]
    reducers: tuple[int, ...] = ()

    @classmethod
    def of(cls, commit: Commit, members: Sequence[Member], reducers: Sequence[int] = ()) -> Outcome:
        """The result that this verdict means for this group; `reducers` as the attribute."""
        peers = [member.contact.peer for member in members]
        mask = reduce(and_, (int.from_bytes(held.contributors, "little") for held in commit.tiles))
        everywhere = {i for i in range(len(members)) if mask >> i & 1}
        missing = {i for i, member in enumerate(members) if member.contributes and i not in everywhere}
        return cls(
            commit=commit.unsigned,
            members=tuple(members),
            weight=fmean(held.weight for held in commit.tiles),
            contributors=tuple(peers[i] for i in sorted(everywhere)),
            left_out=tuple(peers[i] for i in sorted(missing)),
            reducers=tuple(reducers),
        )

    @property
    def counted_in_part(self) -> dict[PeerID, Fraction]:
        """The members that count in some tiles, and are missing in others; the share of the tiles in which each counts.

        The share is 0 if it counts in no tile that another member was to average: then it has given nothing.
        """
        masks = [int.from_bytes(held.contributors, "little") for held in self.commit.tiles]
        somewhere, places = reduce(or_, masks, 0), {each.contact.peer: i for i, each in enumerate(self.members)}
        return {peer: self._share(places[peer], masks) for peer in self.left_out if somewhere >> places[peer] & 1}

    def _share(self, place: int, masks: Sequence[int]) -> Fraction:
        counts = [mask >> place & 1 for mask in masks]
        gave = any(counted and reducer != place for counted, reducer in zip(counts, self.reducers, strict=True))
        return Fraction(sum(counts), len(counts)) if gave else Fraction(0)

    @property
    def gave(self) -> frozenset[PeerID]:
        """The members that count in all tiles, or in some that another member was to average."""
        return frozenset((*self.contributors, *(peer for peer, share in self.counted_in_part.items() if share)))

    def share(self, peer: PeerID) -> Fraction:
        """The share of the tiles in which this member counts: see `counted_in_part`."""
        return Fraction(1) if peer in self.contributors else self.counted_in_part.get(peer, Fraction(0))

    def counts(self, peer: PeerID) -> bool:
        """Return whether this member counts in at least one tile."""
        places = [index for index, member in enumerate(self.members) if member.contact.peer == peer]
        return any(has_member(held.contributors, index) for held in self.commit.tiles for index in places)


def is_weight(weight: float) -> bool:
    """Return whether values can be counted with this weight."""
    return weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT


def is_sound(held: Held, members: int, most_weight: float) -> bool:
    """Return whether an average may have this attempt, contributors and weight, where no member may give a larger one.

    The peer that names them may be lying; weights become part of the names of states, which others read.
    """
    named = int.from_bytes(held.contributors, "little")
    if len(held.contributors) != (members + 7) // 8 or named >> members or held.attempt > members:
        return False
    most = _OTHERWISE * named.bit_count() * most_weight
    return 0 < held.weight <= 1.001 * most if named else held.weight == 0


def has_member(mask: bytes, index: int) -> bool:
    """Return whether a mask of contributors names this member."""
    return bool(mask[index // 8] >> index % 8 & 1) if index // 8 < len(mask) else False
