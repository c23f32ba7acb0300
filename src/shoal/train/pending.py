"""What one peer has trained and no step was taken from yet, on its way through a round. No network, no lock.

Gradients are summed until a round begins. From then on, until its average was stepped from or it has failed, further
ones are late. With a sum of their own (`late`) they are kept in it: they are the first of the next step, or join the
others if the round fails. Without one they are added to the sum that the round has taken: they count if the round
fails, and are dropped with that sum if its step is taken. Once the average is here they are not added any more.

A batch whose gradients are not finite, or too large to be summed, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.averaging.allreduce.segments import LARGEST, sum_dtype
from shoal.errors import is_out_of_memory
from shoal.train.finite import first_beyond, rough_norm
from shoal.train.gradient_sum import GradientSum, values_of

__all__ = ["Pending"]


class Pending:
    """The gradients that wait for a step.

    Args:
        total: sums those that go into the next step.
        late: sums late ones; None: they are dropped.

    Attributes:
        total: as given.
        late: as given.
        in_round: whether a round has them, which has not failed, and whose average was not stepped from.
        holds_average: whether that average is here: what comes for the next step now counts for nothing.
        left_out: batches whose gradients could not be summed, so far.
        left_out_for: which trained parameter's gradient it was, the last time.
    """

    def __init__(self, total: GradientSum, late: GradientSum | None = None) -> None:
        self.total, self.late = total, late
        self.in_round = self.holds_average = False
        self.left_out = self.left_out_for = 0
        self._no_memory: Exception | None = None

    @property
    def samples(self) -> int:
        """Samples that go into the next step, as far as they are accumulated."""
        return self.total.samples

    @property
    def held(self) -> int:
        """Samples that are in no step that was taken here, and may still go into one. Any thread may ask.

        After each step all that was trained is in a step, is held, or is dropped.
        """
        return self.total.samples + (self.late.samples if self.late is not None else 0)

    def take_memory_error(self) -> Exception | None:
        """The error of the last batch that was lost for want of memory; None if there was none since the last call."""
        error, self._no_memory = self._no_memory, None
        return error

    def add(self, trained: Sequence[torch.Tensor], batch_size: int) -> bool:
        """Add the gradients of these parameters, the mean over a batch; those without one count as 0.

        Returns:
            Whether they were added: not if there are none, if they cannot be summed, or if the average of their step is
            here. That says not yet that they count: with `late=None`, those added while a round is under way count only
            if that round fails.
        """
        numbers = [index for index, parameter in enumerate(trained) if parameter.grad is not None]
        chosen = self.late if self.in_round and self.late is not None else self.total
        if not numbers or (self.holds_average and chosen is self.total):
            return False
        values = [values_of(gradient) for parameter in trained if (gradient := parameter.grad) is not None]
        norm = rough_norm(values)
        if (bad := first_beyond(values, lambda dtype: LARGEST[sum_dtype(dtype)] / (2 * batch_size), norm)) is not None:
            self.left_out, self.left_out_for = self.left_out + 1, numbers[bad]
            return False
        try:
            chosen.add(numbers, batch_size, norm)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._no_memory = error  # it has forgotten what it held: nothing is half added
            return False
        return True

    def give(self) -> tuple[float, float]:
        """They go into a round now: the weight of their mean, and the factor that makes it from the sum."""
        if self.total.is_spent:  # nothing to contribute, but what is copied must be numbers
            self.total.clear()
        self.in_round = True
        return float(self.samples), self.total.unit / self.samples if self.samples else 0.0

    def round_failed(self) -> None:
        """The round gave no average: late gradients were computed at the state of the others, and join them."""
        self.in_round = False
        if self.late is not None:
            self.total.take_in(self.late)

    def average_came(self) -> None:
        """The next step is taken from the average that is here now."""
        self.holds_average = True

    def stepped(self) -> None:
        """It was: the late ones are the first of the next step. It can be called again if it was interrupted."""
        self.total.forget()
        if self.late is not None:
            self.total.take_in(self.late)
        self.holds_average = self.in_round = False  # last: until then all of this is to be done

    def forget(self) -> None:
        """Forget all, the late ones too: they are of a state that is not ours any more."""
        self.holds_average = self.in_round = False
        self.total.forget()
        if self.late is not None:
            self.late.forget()
