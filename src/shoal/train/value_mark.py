"""Whether tensors hold the values that they had: known from a few of these, wherever a change came from.

Torch counts changes of a tensor (`_version`), but not those through `.data`, by which libraries put averaged weights in
place for an evaluation; and a tensor whose values were put back has another count. So values are compared: of
`_PLACES` places, in up to so many of the tensors, spread evenly. An exchange of all weights is seen. That of a few
values may go unseen: the check of the parameters (`check`) finds it. The count is a hint then, of all of the tensors.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from shoal.compression import view_bytes

__all__ = ["Changed", "OutsideChanges", "ValueMark"]

_PLACES = 64
"""So many values are read each time, however many tensors there are: with 20,000 of them that is nothing for each."""

_USUAL, _OF_STEPS = 0.3, 10
"""It is usual that something else changes the parameters if it has done so after such a part of the last steps."""


class Changed(IntEnum):
    """What is known of changes of some tensors that nobody was to change."""

    NOT = 0
    """Of none."""

    WRITTEN = 1
    """They were written to. Those values that are looked at are what they were: they may have been put back."""

    VALUES = 2
    """They had other values."""


class ValueMark:
    """Remembers a few values of some tensors, the present ones at first.

    Args:
        tensors: those that require a gradient are looked at; where none does, they always agree.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        trained = [number for number, each in enumerate(tensors) if each.requires_grad]
        full = [number for number in trained if tensors[number].numel() and tensors[number].layout is torch.strided]
        count = min(len(full), _PLACES)
        taken = [full[index * (len(full) - 1) // max(1, count - 1)] for index in range(count)]
        self._counted = [each for each in tensors if each.requires_grad and not each.is_inference()]
        self._looked_at = [tensors[number] for number in taken]
        self._at = list[int]()
        self._kept = list[_Alike]()
        self._places: list[tuple[int, int]] = []
        for number in taken:
            size = tensors[number].numel()
            each = min(size, _PLACES // count)
            self._places += [(number, (2 * place + 1) * size // (2 * each)) for place in range(each)]
        self.note()

    def note(self) -> None:
        """Remember the present values."""
        self._noted, self._writes = self._raw(), self._count()

    def forget(self) -> None:
        """The values are about to change: until `note` nothing agrees."""
        self._noted = []

    @property
    def knows(self) -> bool:
        """Whether values are remembered."""
        return bool(self._noted) or not self._places

    def changed(self) -> Changed:
        """What has happened to the tensors since `note`, as far as it can be seen."""
        if not self.agrees():
            return Changed.VALUES
        return Changed.NOT if self._count() == self._writes else Changed.WRITTEN

    def agrees(self) -> bool:
        """Whether the tensors hold what they held at `note`, as far as it is looked at."""
        return self._raw() == self._noted

    def agrees_with(self, copy: Callable[[int], memoryview], *, now: bool = False) -> bool:
        """Whether a copy of the tensors does: it gives the bytes of the tensor of a number, its values in order.

        `now`: whether it holds what the tensors do.
        """
        if not self.knows:
            return False
        for (number, index), value in zip(self._places, self._each(self._raw() if now else self._noted), strict=True):
            if bytes(copy(number)[index * len(value) : (index + 1) * len(value)]) != value:
                return False
        return True

    def now(self) -> dict[int, int]:
        """A checksum of the values of each tensor that is looked at, by its number: equal for equal tensors."""
        found: dict[int, int] = {}
        for (number, _), value in zip(self._places, self._each(self._raw()), strict=True):
            found[number] = zlib.crc32(value, found.get(number, 0))
        return found

    def _count(self) -> int:
        return sum([each._version for each in self._counted])  # noqa: SLF001 (a list: there may be thousands)

    def _raw(self) -> list[bytes]:
        """The present values: those of one device and dtype together, as each device is waited for once."""
        with torch.no_grad():
            return [alike.read() for alike in self._alike()]

    def _each(self, raw: Sequence[bytes]) -> list[bytes]:
        """The value of each place, of what `_raw` has read."""
        found = [b""] * len(self._places)
        for alike, values in zip(self._kept, raw, strict=True):
            size = len(values) // len(alike.places)
            for number, place in enumerate(alike.places):
                found[place] = values[number * size : (number + 1) * size]
        return found

    def _alike(self) -> list[_Alike]:
        """Views of all places. To make them takes longer than to read them: they stay while tensors keep their memory.

        Where a tensor has got other memory, they are made anew, and the former memory is let go of.
        """
        at = [tensor.data_ptr() for tensor in self._looked_at]
        if at != self._at or 0 in at:
            groups: dict[tuple[torch.device, torch.dtype], _Alike] = {}
            for place, (number, index) in enumerate(self._places):
                view = _value(self._tensors[number], index)
                alike = groups.setdefault((view.device, view.dtype), _Alike([], [], []))
                alike.places.append(place)
                alike.views.append(view)
                if view.is_cpu:
                    alike.memory.append(view_bytes(view))
            self._at, self._kept = at, [*groups.values()]
        return self._kept


class _Alike(NamedTuple):
    """The places whose values are of one device and dtype: a view of each value, and on a CPU its memory."""

    places: list[int]
    views: list[torch.Tensor]
    memory: list[memoryview]

    def read(self) -> bytes:
        """The values, one after another."""
        # To join views of memory takes a tenth of what `torch.cat` does.
        return b"".join(self.memory) if self.memory else bytes(view_bytes(torch.cat(self.views).cpu()))


class OutsideChanges:
    """The changes of the trained parameters by something else than shoal, as far as batches have seen them.

    There are two kinds of programs. One puts other values in place, for an evaluation, and the first ones back before
    the next batch: what stands there meanwhile is not the state. The other one changes the parameters after its steps,
    as it clips them, or keeps some of them at zero, and trains on with what it has made of them: that is the state.
    Which kind it is tell the batches that came.

    Attributes:
        looks: of batches, so far.
        at: the epoch at which a batch came last with other values than those that were left there; None: none has.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.at: int | None = None
        self._last: dict[Changed, int] = {}  # in the state here, by the number of the look that found it
        self._after_steps = deque[bool](maxlen=_OF_STEPS)
        self._epoch = -1  # at the last look

    def seen(self, changed: Changed, epoch: int, *, each_steps: bool = False) -> None:
        """A batch has found this, at this epoch. `each_steps`: whether each batch comes after a step of this peer."""
        self.looks += 1
        if each_steps or epoch != self._epoch:
            self._after_steps.append(changed is Changed.VALUES)
        self._epoch = epoch
        if changed is Changed.VALUES:
            self.at = epoch
        if changed is not Changed.NOT:
            self._last[changed] = self.looks

    def since(self, look: int) -> Changed:
        """What was done to the state here after the look of this number."""
        return max((what for what, last in self._last.items() if last > look), default=Changed.NOT)

    def forget(self) -> None:
        """Another state is here: it has nothing of all that."""
        self._last.clear()

    @property
    def are_usual(self) -> bool:
        """Whether this program changes the parameters after its steps, and trains on with what it has made of them."""
        return sum(self._after_steps) >= max(1.0, _USUAL * len(self._after_steps))

    def are_over(self, epoch: int) -> bool:
        """Whether what is usual was done at this epoch: it was, once a batch has come."""
        return self._epoch == epoch or not self.are_usual


def _value(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The value of this number, as a tensor that shares its memory: `tensor.flatten()[index]` copies some tensors."""
    offset = tensor.storage_offset()
    if tensor.is_contiguous():
        return tensor.as_strided((1,), (1,), offset + index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        index, at = divmod(index, size)
        offset += at * stride
    return tensor.as_strided((1,), (1,), offset)
