"""Is it the average? A committed round against what its members brought to it.

What a member brings is written down when its group is formed. The commit names, for each tile, who is counted in it:
the average must be the mean of what those brought, by their weights, computed here in float64. So whoever is counted
twice, or is named and not counted, or counted and not named, shows. Allowed is what sums in the tensors' precision
lose, and what the codec says that it loses: of each contribution, and of the average.

With error feedback a member also brings what its earlier encodings lost; with differences the codec sees values less
the reference. That these are right is held elsewhere (`test_feedback.py`, `test_references.py`): here they are taken as
they are found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shoal.averaging import Averager, StepResult
from shoal.averaging.allreduce.interface import has_member
from shoal.averaging.allreduce.segments import SegmentBuffers, sum_dtype
from shoal.base.peer import PeerID
from shoal.compression import BFloat16Compression, CompressionBase, TopKCompression
from shoal.compression.wrapped import WrappedCompression
from shoal.layout import Tile
from shoal.protocol.wire import Held

__all__ = ["Audit"]

_SENT = BFloat16Compression()
"""What top-k sends the elements with that it sends."""


class Brought(NamedTuple):
    """What one member has when its group is formed; flat vectors of float64.

    Attributes:
        weight: of its values; 0 also for an auxiliary member.
        values: of its tensors.
        owed: what its encodings lost in earlier rounds, times the weights that it had in them.
        reference: the last average that it took over; 0 where its codec has no use for it.
    """

    weight: float
    values: torch.Tensor
    owed: torch.Tensor
    reference: torch.Tensor


class Audit:
    """All rounds of a swarm.

    Attributes:
        checked: how many averages were.
    """

    def __init__(self) -> None:
        self.checked = 0
        self._brought: dict[bytes, dict[PeerID, Brought]] = defaultdict(dict)
        self._told: dict[bytes, list[tuple[int, int, bytes, float]]] = {}
        self._right: dict[bytes, torch.Tensor] = {}

    def bring(self, round_id: bytes, averager: Averager, weight: float) -> None:
        """The group of this member is formed; its tensors hold what it will average."""
        segments = averager.vector._segments.values()
        self._brought[round_id][averager.core.peer_id] = Brought(
            weight=0.0 if averager.settings.auxiliary else weight,
            values=_flat(averager.tensors),
            owed=_flat(
                [
                    segment.residual.kept if segment.residual else torch.zeros(segment.local.numel())
                    for segment in segments
                ]
            ),
            reference=_flat(
                [
                    segment.reference.values if segment.reference else torch.zeros(segment.local.numel())
                    for segment in segments
                ]
            ),
        )

    def check(self, averager: Averager, result: StepResult) -> None:
        """A member has just succeeded, and its tensors are as they were left.

        Raises:
            AssertionError: the average is not what the commit says, or the commit says what cannot be.
        """
        outcome = result.outcome
        # Without the digests: a member that turns bad may lie about these, the same in all that it says.
        told = [(held.tile, held.attempt, held.contributors, held.weight) for held in outcome.commit.tiles]
        assert self._told.setdefault(result.round_id, told) == told, "two commits of one round"
        if averager.settings.auxiliary:
            return  # it has no average
        round_, average = averager._last_round, _flat(averager.tensors)
        assert round_ is not None
        assert len(outcome.commit.tiles) == len(round_.tiling.tiles)
        if result.round_id in self._right and torch.equal(average, self._right[result.round_id]):
            self.checked += 1  # the same bits, by the same commit
            return
        all_brought = self._brought[result.round_id]
        brought = [all_brought.get(member.contact.peer) for member in outcome.members]
        for tile, held in zip(round_.tiling.tiles, outcome.commit.tiles, strict=True):
            try:
                _check_tile(averager.vector._segments[tile.name], tile, held, brought, average)
            except AssertionError as error:
                error.add_note(f"in round {result.round_id.hex()}: {tile}, {held}")
                raise
        self._right[result.round_id] = average
        self.checked += 1


def _check_tile(
    segment: SegmentBuffers, tile: Tile, held: Held, brought: Sequence[Brought | None], average: torch.Tensor
) -> None:
    """One tile of one average."""
    counted, others = _sorted(held, brought)
    first = segment.segment.start + tile.start
    place = slice(first, first + tile.numel)
    weights = torch.tensor([[each.weight] for each in counted], dtype=torch.float64)
    total = float(weights.sum())
    assert abs(held.weight - total) <= 1e-9 * total, f"the weights are {held.weight} in all, counted are {total}"
    base = torch.zeros(tile.numel, dtype=torch.float64)
    if segment.against is not None:
        base = counted[0].reference[place]
        assert all(torch.equal(each.reference[place], base) for each in counted), "not all have the reference"
    # What the codec saw of each, if it was sent: who averages a tile does not send it, and loses nothing.
    seen = torch.stack([each.values[place] - base + each.owed[place] / each.weight for each in counted])
    mean, got = (weights * seen).sum(0) / total, average[place] - base
    lost = (weights * torch.stack([segment.codec.error_bound(row.to(segment.dtype)) for row in seen])).sum(0) / total
    size = (weights * seen.abs()).sum(0) / total + base.abs()
    lost += (len(counted) + 8) * torch.finfo(sum_dtype(segment.dtype)).eps * size
    # The peer that averaged it also paid its own debt, though it may not be counted.
    means = [mean, *(mean + each.owed[place] / total for each in others if each.owed[place].any())]
    wrong = min((_beyond(segment.codec, each, got, lost) for each in means), key=torch.max)
    at = int(wrong.argmax())
    assert wrong[at] <= 0, (
        f"the average is {average[place][at]:.9g} at {first + at}, the mean of the {len(counted)} counted is "
        f"{(mean + base)[at]:.9g}: {wrong[at]:.3g} more than what may be lost"
    )


def _sorted(held: Held, brought: Sequence[Brought | None]) -> tuple[list[Brought], list[Brought]]:
    """The members counted in a tile, and the others of the group."""
    counted, others = [], []
    for index, each in enumerate(brought):
        if not has_member(held.contributors, index):
            others += [] if each is None else [each]
            continue
        assert each is not None, f"member {index} is counted, and never had the group"
        assert each.weight > 0, f"member {index} is counted, and has no weight"
        counted.append(each)
    assert counted, "nobody is counted"
    return counted, others


def _beyond(codec: CompressionBase, mean: torch.Tensor, average: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """How much further the average is from the mean than it may be, as it was encoded."""
    while isinstance(codec, WrappedCompression):
        codec = codec.codec
    if isinstance(codec, TopKCompression):
        last = torch.where(average == 0, mean.abs(), _SENT.error_bound(average.float()) + _of_few_bits(codec, average))
    else:
        # It was encoded as it came out, not as it should be: the codec's steps may be a little wider there.
        last = 2 * codec.max_error(mean) + lost.max() / 4
    return (average - mean).abs() - lost - last


def _of_few_bits(codec: TopKCompression, average: torch.Tensor) -> float:
    """What a value that was sent in few bits may have lost, by the span of those that were decoded."""
    sent = average[average != 0].abs()
    if codec.bits is None or not sent.numel():
        return 0.0
    intervals = 1 << codec.bits - 1
    decoded = ((intervals - 0.5) ** 2 - 0.25) / intervals**2  # the part of a span between its first and its last level
    return 1.1 * float(sent.max() - sent.min()) / decoded * (intervals - 0.25) / intervals**2


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All elements in one vector, a copy."""
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
