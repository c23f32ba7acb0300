"""The optimizer's state and its steps on the CPU, while the parameters stay on their device.

For as long as the optimizer works, each parameter has its values in host memory: it is the same object, with other
memory. So the optimizer keeps its statistics there, and groups, hooks, schedules, `zero_grad` and a `GradScaler` know
of one set of parameters. Afterwards each parameter has the memory of its device again, with the new values. That memory
is the only place where values are kept between two steps: nothing has to be brought up to date when a state is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["Offload"]


class Offload:
    """Lends host memory to parameters.

    It may not overlap with another use of them: the caller holds their lock, and stands still.

    Args:
        parameters: those that the optimizer steps.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._host = [torch.empty_like(each, device="cpu", requires_grad=False) for each in self._parameters]
        self._homes: list[torch.Tensor] = []

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """`lend` before the block, `back` after it."""
        try:
            self.lend()
            yield
        finally:
            self.back()

    @contextmanager
    def with_gradients(self) -> Iterator[None]:
        """As `on_host`; `.grad` is on the CPU in the block, too, and as it was after it."""
        own = [each.grad for each in self._parameters]
        try:
            self._set_gradients([None] * len(own))  # torch keeps a gradient where its parameter is
            self.lend()
            self._set_gradients([None if each is None else each.to("cpu") for each in own])
            yield
        finally:
            self._set_gradients([None] * len(own))
            self.back()
            self._set_gradients(own)

    def _set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def lend(self) -> None:
        """Move the parameters to the CPU. Their `.grad` is the caller's: the optimizer needs one there, too."""
        self.back()  # if an interrupt kept it from being done
        with torch.no_grad():
            for parameter, lent in zip(self._parameters, self._host, strict=True):
                lent.copy_(parameter)
        self._homes = [each.data for each in self._parameters]
        for parameter, lent in zip(self._parameters, self._host, strict=True):
            parameter.data = lent

    def back(self) -> None:
        """Move them back to their device, with the values that they have now. Without effect if they are there.

        It can be called again if it was interrupted.
        """
        for parameter, home, lent in zip(self._parameters, self._homes, self._host, strict=False):
            parameter.data = home
            with torch.no_grad():
                parameter.copy_(lent)
        self._homes = []  # last: until then all of this is to be done
