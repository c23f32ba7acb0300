"""Error feedback: the losses of this member's encodings, kept until a later round can count them.

One flat *residual* R for each run whose codec is `ErrorFeedback`, in units of value times weight, as sums are. With x
for this member's values and w for its weight, W for the total weight, ^ for encoded and decoded:

=============================  ================================  ======================================================
in a round, for each part      what is encoded                   the residual after it, if the round was committed
=============================  ================================  ======================================================
another member averages it     x + R / w                         R + w x - w (x + R / w)^, if these values were counted
this member averages it        (sum of contributions + R) / W    (sum + R) - W ((sum + R) / W)^
else                                                             R
=============================  ================================  ======================================================

So over all committed rounds the sum of W times the average, plus the residuals of all members, is exactly (to rounding)
the sum of all contributions: every sample counts once, whatever weight its peer has in each round. A member's own
values need no encoding if it averages them itself. The member that encodes an *average* keeps the loss of that
encoding. It keeps it in the same vector. So the loss counts whichever member averages these elements next time, even if
this member has no weight then, or never has any (an auxiliary one). A residual is never more than the codec's error
bound for the last encoded values, times their weight. The sums never differ by more than that, however many rounds
there were.

A round that failed leaves the residual as it was, and so does one that this member took no part in. If a member cannot
learn whether its values were counted, they may count twice.

`begin` comes before a round, then the encodings, and after the commit `settle` for each part, before the values that
the round was begun with are changed.
"""

from __future__ import annotations

import torch

from shoal.allreduce.partition import Part
from shoal.compression import CompressionBase

__all__ = ["Residual"]


class Residual:
    """The losses of one run's encodings.

    Args:
        dtype: the dtype of the run's tensors.
        start: its first element in the flat vector.
        kept: the residual itself, in the dtype of sums; as long as the run.
        limit: a value times a weight of more than this cannot be summed.
    """

    def __init__(self, dtype: torch.dtype, start: int, kept: torch.Tensor, *, limit: float) -> None:
        self.kept = kept
        self._dtype, self._start, self._limit = dtype, start, limit
        self._weight = 0.0
        self._sent: dict[int, memoryview] = {}
        self._lost: dict[int, torch.Tensor] = {}

    def begin(self, weight: float) -> None:
        """A round begins in which this member's values have this weight; forget the encodings of the last one."""
        self._weight = weight
        self._sent.clear()
        self._lost.clear()

    def contribution(self, part: Part, values: torch.Tensor, codec: CompressionBase) -> memoryview:
        """My values of a part plus the residual of earlier rounds, encoded; always the same bytes in one round."""
        if (data := self._sent.get(part.number)) is None:
            due = self._piece(part).div(self._weight).add_(values)
            data = self._sent[part.number] = codec.encode(self._within(due, max(self._weight, 1.0)), part.sizes)
        return data

    def average(
        self, part: Part, sums: torch.Tensor, total_weight: float, codec: CompressionBase, out: torch.Tensor
    ) -> memoryview:
        """The average, encoded; `out` gets its decoded values, and may be the memory of `sums`."""
        due = sums + self._piece(part)
        data = codec.encode(self._within(due / total_weight, 1.0), part.sizes)
        codec.decode_into(data, self._dtype, out, part.sizes)
        self._lost[part.number] = due.sub_(out, alpha=total_weight)
        return data

    def settle(self, part: Part, values: torch.Tensor, codec: CompressionBase, *, averaged_here: bool) -> None:
        """The round was committed with the average that was made here, or else with the values that were sent."""
        kept = self._piece(part)
        if averaged_here:
            kept.copy_(self._lost[part.number])
        elif (data := self._sent.get(part.number)) is not None:
            # The difference first: it is small where the codec is good.
            decoded = codec.decode(data, part.numel, self._dtype, part.sizes)
            kept.add_(values.to(kept.dtype).sub(decoded), alpha=self._weight)

    def _piece(self, part: Part) -> torch.Tensor:
        return self.kept[part.start - self._start : part.stop - self._start]

    def _within(self, values: torch.Tensor, weight: float) -> torch.Tensor:
        """The values cut to the range that others accept, in the tensors' dtype; the rest stays in the residual."""
        limit = min(self._limit / weight, torch.finfo(self._dtype).max)
        return values.clamp_(-limit, limit).to(self._dtype)
