"""The last committed average, against which a later round may code: see decision 0011.

One buffer for each run whose codec is `Differences`. When a round is committed, the buffer is set part by part to the
committed average, which has the same bits at all members that succeeded. The reference gets the name of that round.
Every member says the name when it joins a group. If all members that contribute say the same name, values are sent as
differences from the reference, in the run's codec, and received averages are added to it. Otherwise this run is sent
without loss in this round, and all members that succeed have the same reference afterwards.

A round that fails leaves reference and name as they were.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.allreduce.partition import Part
from shoal.wire import Member

__all__ = ["Reference", "common_reference"]


def common_reference(members: Iterable[Member]) -> bytes:
    """The name of the reference that all contributing members have; empty if there is none."""
    names = {member.reference for member in members if member.contributes}
    return names.pop() if len(names) == 1 else b""


class Reference:
    """The reference of one run.

    Args:
        start: the run's first element in the flat vector.
        values: as long as the run, in its dtype.

    Attributes:
        agreed: whether this round codes against it.
    """

    def __init__(self, start: int, values: torch.Tensor) -> None:
        self._start, self.values = start, values
        self.agreed = False

    def difference(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        """These values less the reference, in their dtype. 16-bit values that are out of range are cut."""
        return _within(values - self._piece(part))

    def restore(self, part: Part, differences: torch.Tensor) -> None:
        """Make values of differences, in place: the same bits from the same bits, as each is rounded once."""
        _within(differences.add_(self._piece(part)))

    def keep(self, part: Part, average: torch.Tensor) -> None:
        """This average was committed."""
        self._piece(part).copy_(average)

    def _piece(self, part: Part) -> torch.Tensor:
        return self.values[part.start - self._start : part.stop - self._start]


def _within(values: torch.Tensor) -> torch.Tensor:
    if values.dtype.itemsize == 2:
        largest = torch.finfo(values.dtype).max
        values.clamp_(-largest, largest)  # NaN stays NaN
    return values
