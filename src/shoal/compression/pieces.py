"""Units that share a scale: finding and applying scales when values of several tensors are encoded at once.

A part of a round holds pieces of several tensors, one after another, and no scale crosses a tensor's border. A piece of
many values is worked on by itself, as fast as torch is. With short pieces, for instance biases, the number of
operations takes the time: neighbours are worked on together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import torch

__all__ = ["Blocks", "Pieces", "blocks_of", "pieces_of"]

_SHORT = 1 << 10
"""A piece of fewer values is worked on together with its neighbours."""

_FEW = 4
"""So many neighbours, or fewer, are faster worked on one by one."""


class Pieces:
    """Pieces of tensors with a scale for each.

    Args:
        sizes: their numbers of values.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._groups: list[tuple[int, int, torch.Tensor | None]] = []  # of one piece, or of short ones with lengths
        first = 0
        for short, group in groupby(sizes, lambda size: size < _SHORT):
            found = list(group)
            last = first + len(found)
            if short and len(found) > _FEW:
                self._groups.append((first, last, torch.tensor(found)))
            else:
                self._groups += [(piece, piece + 1, None) for piece in range(first, last)]
            first = last
        self._cuts = [sum(sizes[first:last]) for first, last, _ in self._groups]

    def extremes(self, values: torch.Tensor) -> list[tuple[float, float]]:
        """The smallest and the largest value of each piece; both NaN if it holds one."""
        found: list[tuple[float, float]] = []
        for part, (_, _, lengths) in zip(self._split(values), self._groups, strict=True):
            if lengths is None:
                low, high = torch.aminmax(part)
                found.append((low.item(), high.item()))
            else:
                lows, highs = (
                    torch.segment_reduce(part, which, lengths=lengths, unsafe=True) for which in ("min", "max")
                )
                found += zip(lows.tolist(), highs.tolist(), strict=True)
        return found

    def affine(self, addends: Sequence[float], factors: Sequence[float], values: torch.Tensor) -> torch.Tensor:
        """The addend of its piece plus each value times the factor of its piece."""
        out = torch.empty_like(values)
        alone = torch.tensor([addends[first] for first, _, lengths in self._groups if lengths is None])
        singles = iter(alone.unbind())
        for part, made, (first, last, lengths) in zip(self._split(values), self._split(out), self._groups, strict=True):
            if lengths is None:
                torch.add(next(singles), part, alpha=factors[first], out=made)
            else:
                addend, factor = (_spread(each[first:last], lengths, part) for each in (addends, factors))
                torch.addcmul(addend, part, factor, out=made)
        return out

    def scale(self, values: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
        """Multiply each value by the factor of its piece, in place."""
        for part, (first, last, lengths) in zip(self._split(values), self._groups, strict=True):
            part.mul_(factors[first] if lengths is None else _spread(factors[first:last], lengths, part))
        return values

    def shift(self, values: torch.Tensor, addends: Sequence[float]) -> torch.Tensor:
        """Add the addend of its piece to each value, in place."""
        for part, (first, last, lengths) in zip(self._split(values), self._groups, strict=True):
            if any(addends[first:last]):
                part.add_(addends[first] if lengths is None else _spread(addends[first:last], lengths, part))
        return values

    def spread(self, each: Sequence[float]) -> torch.Tensor:
        """Repeat the number of each piece for each of its values (float64)."""
        return torch.repeat_interleave(torch.tensor(each, dtype=torch.float64), torch.tensor(self.sizes))

    def _split(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return (values,) if len(self._cuts) == 1 else torch.split(values, self._cuts)


def _spread(each: Sequence[float], lengths: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor(each, dtype=like.dtype), lengths, output_size=like.numel())


class Blocks:
    """Blocks of neighbours with a scale for each; the last one of a piece may be shorter.

    Args:
        sizes: numbers of values of the pieces.
        width: the number of values in a block.

    Attributes:
        count: how many blocks there are.
    """

    def __init__(self, sizes: tuple[int, ...], width: int) -> None:
        self._width = width
        self._groups: list[tuple[int, int, list[int]]] = []  # blocks first to last; sizes to fill up, none if all whole
        self._cuts: list[int] = []
        self.count = 0
        whole, short = 0, list[int]()  # of neighbours: in whole blocks, or sizes of which some are not
        for size in sizes:
            rest = size % width
            if size < _SHORT and (short or rest):
                self._add([whole])
                whole = 0
                short.append(size)
                continue
            self._add(short)
            short = []
            whole += size - rest
            if rest:
                self._add([whole])
                whole, short = 0, [rest]
        self._add([whole])
        self._add(short)

    def _add(self, sizes: list[int]) -> None:
        if any(sizes):
            first, self.count = self.count, self.count + sum(-(-size // self._width) for size in sizes)
            whole = all(size % self._width == 0 for size in sizes)
            self._groups.append((first, self.count, [] if whole else sizes))
            self._cuts.append(sum(sizes))

    def top(self, values: torch.Tensor) -> torch.Tensor:
        """The largest absolute value of each block; NaN if it holds one."""
        out = torch.empty(self.count, dtype=values.dtype)
        for part, (first, last, sizes) in zip(self._split(values), self._groups, strict=True):
            blocks = self._whole(part, sizes)
            if blocks.numel() < _SHORT << 4:  # few operations
                torch.amax(blocks.abs(), dim=1, out=out[first:last])
            else:  # few passes: ten times as fast as aminmax
                torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_(), out=out[first:last])
        return out

    def scale(self, values: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Each value times the factor of its block; `out` may be `values`."""
        for part, made, (first, last, sizes) in zip(self._split(values), self._split(out), self._groups, strict=True):
            factor = factors[first:last, None]
            if sizes:
                filled = (self._whole(part, sizes) * factor).view(-1)
                if len(sizes) == 1:
                    made.copy_(filled[: sizes[0]])
                else:
                    torch.cat(torch.split(filled, self._filled(sizes))[::2], out=made)
            else:
                torch.mul(part.view(-1, self._width), factor, out=made.view(-1, self._width))
        return out

    def spread(self, each: torch.Tensor) -> torch.Tensor:
        """Repeat the number of each block for each of its values."""
        return self.scale(
            torch.ones(sum(self._cuts), dtype=each.dtype), each, torch.empty(sum(self._cuts), dtype=each.dtype)
        )

    def _whole(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """As whole blocks: pieces are filled up with zeros."""
        if len(sizes) == 1:
            part = torch.constant_pad_nd(part, (0, -part.numel() % self._width))
        elif sizes:
            zeros = torch.zeros(self._width, dtype=part.dtype)
            pieces = torch.split(part, sizes)
            part = torch.cat([each for piece in pieces for each in (piece, zeros[: -piece.numel() % self._width])])
        return part.view(-1, self._width)

    def _filled(self, sizes: list[int]) -> list[int]:
        """Each size, and after it how many zeros fill its last block."""
        return [each for size in sizes for each in (size, -size % self._width)]

    def _split(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return (values,) if len(self._cuts) == 1 else torch.split(values, self._cuts)


@lru_cache(maxsize=256)
def pieces_of(sizes: tuple[int, ...]) -> Pieces:
    """The same ones each time."""
    return Pieces(sizes)


@lru_cache(maxsize=256)
def blocks_of(sizes: tuple[int, ...], width: int) -> Blocks:
    """The same ones each time."""
    return Blocks(sizes, width)
