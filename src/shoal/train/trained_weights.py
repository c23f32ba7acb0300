"""The weights to train with: whether they stand in the parameters now, and what else than shoal has changed them.

Two kinds of others may stand there. An optimizer may have weights to evaluate with (ScheduleFree): they are put in
place here, and taken back to the bit. And a program may put values of its own there: see `value_mark`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from shoal.base.thread_state import forget_casts
from shoal.train.stepper import Stepper
from shoal.train.value_mark import Changed, OutsideChanges, ValueMark

__all__ = ["TrainedWeights"]


class TrainedWeights:
    """The weights that the parameters of one optimizer are trained with. All of it is done under their lock.

    Args:
        optimizer: may have weights to evaluate with.
        parameters: of it.
        stepper: its code computes there.

    Attributes:
        changes: of the parameters by something else than shoal, as batches have seen them.
        evaluations: how often weights to evaluate with were put into their place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], stepper: Stepper) -> None:
        self._optimizer, self._parameters, self._stepper = optimizer, parameters, stepper
        self._mark, self.changes = ValueMark(parameters), OutsideChanges()
        self._aside: list[torch.Tensor] | None = None  # the parameters, while others stand in their place
        self.evaluations = 0

    def are_private(self) -> None:
        """Nothing but shoal has the parameters: nobody looks for changes of them."""
        self._mark = ValueMark(())

    # ------------------------------------------------------------------------------------------------ to evaluate with

    @property
    def are_aside(self) -> bool:
        """Whether they were put aside by `evaluate`: then they `are_in_eval_mode`."""
        return self._aside is not None

    @property
    def are_in_eval_mode(self) -> bool:
        """Whether the parameters are those to evaluate with, and no step can be taken (ScheduleFree's `eval`)."""
        modes = [getattr(self._optimizer, "train_mode", None)]
        modes += [group.get("train_mode") for group in self._optimizer.param_groups]
        return self._aside is not None or any(mode is False for mode in modes)

    @property
    def are_hidden(self) -> bool:
        """Whether they are not at hand: somebody has called the inner optimizer's own `eval`."""
        return self.are_in_eval_mode and self._aside is None

    def evaluate(self) -> None:
        """Put the parameters to evaluate with into the place of those to train with, if the optimizer has such."""
        if callable(change := getattr(self._optimizer, "eval", None)) and self._aside is None:
            self._aside = [parameter.detach().clone() for parameter in self._parameters]
            self.evaluations += 1
            with self._stepper.at_work():
                change()
            forget_casts()

    def train(self) -> None:
        """Take that back: to the bit, as the optimizer's own way back rounds."""
        if callable(change := getattr(self._optimizer, "train", None)):
            with self._stepper.at_work():
                change()
        if self._aside is not None:
            with torch.no_grad():
                for parameter, own in zip(self._parameters, self._aside, strict=True):
                    parameter.copy_(own)
            self._aside = None
            if self._mark.agrees():
                self._mark.note()  # it was not somebody else who has written to them
        forget_casts()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let them stand in the parameters in the block; if they were aside, those to evaluate with do afterwards."""
        if evaluates := self.are_aside:
            self.train()  # else that would put back the weights before
        yield
        if evaluates:
            self.evaluate()

    def now(self) -> list[torch.Tensor]:
        """Their values, wherever they are."""
        return [*(self._aside or (parameter.detach() for parameter in self._parameters))]

    # ----------------------------------------------------------------------------------------------- changed by others

    @property
    def are_changed(self) -> bool:
        """Whether something else than shoal has changed the trained parameters since the last batch, or step."""
        return self._aside is None and not self._mark.agrees()

    @property
    def are_changed_unusually(self) -> bool:
        """Whether something else than shoal has put other values into the place of the trained parameters.

        They are the user's, for an evaluation for example, and not those that the name of the state stands for. Where
        a program changes them after its steps, what it has made of them is the state.
        """
        return self.are_changed and not self.changes.are_usual

    @property
    def were_written_to(self) -> bool:
        """Whether anything has written to the parameters since `note`, be it the same values."""
        return self._mark.changed() is not Changed.NOT

    def agree_with(self, copy: Callable[[int], memoryview]) -> bool:
        """Whether a copy of a state has them: it gives the bytes of the tensor of a number."""
        return self._mark.agrees_with(copy, now=self.changes.are_usual)

    def checksums(self) -> dict[int, int]:
        """Of some values of the parameters, by their numbers: to compare with another process's."""
        return self._mark.now()

    def forget(self) -> None:
        """The parameters are about to be set: until `note` they are nobody's."""
        self._mark.forget()

    def note(self) -> None:
        """The parameters are what they are to be: after whatever else comes they `are_changed_unusually`."""
        if self._aside is None:
            self._mark.note()

    def look(self, epoch: int, *, each_steps: bool) -> None:
        """A batch has come: what it was computed with counts as the state's from now on.

        Args:
            epoch: of the model.
            each_steps: whether each batch comes after a step of this peer.
        """
        knows = self._mark.knows
        changed = self._mark.changed() if knows else Changed.NOT
        self.changes.seen(changed, epoch, each_steps=each_steps)
        if changed is not Changed.NOT or not knows:
            self._mark.note()
