"""Joint encoding: finding and applying scales when values of several tensors are encoded at once.

A tile of a round holds values of several tensors, one after another, and no scale crosses a tensor's border. A few
tensors are worked on one by one, as fast as torch is. With many tensors, such as biases between weights, the number of
operations would take the time: they are worked on together, as rows of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

__all__ = ["Blocks", "Tensors", "blocks_of", "tensors_of"]

_FEW = 24
"""Up to so many tensors it is faster to work on them one by one, whatever their sizes."""

_ROW = 64
"""The values in a row. Most tensors are whole rows. Shorter rows take longer for each value."""

_SHORT = 1 << 10
"""A tensor of fewer values is cut to blocks together with its neighbours."""


class Tensors:
    """Tensors whose values lie one after another, with a scale for each.

    Many tensors are seen as rows, which begin where most tensors do. The values before and after all rows, and those
    of rows that a border crosses, are *loose*: the tensor of each such value is known.

    Args:
        sizes: the number of values of each tensor.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, numel = sizes, sum(sizes)
        self._apart = len(sizes) <= _FEW
        if self._apart:
            return
        stops = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0)
        start = int(stops[:-1].remainder(_ROW).mode().values)
        self._ends = start, numel - (numel - start) % _ROW
        firsts = torch.arange(*self._ends, _ROW, dtype=torch.int64, device="cpu")
        self._owners = torch.bucketize(firsts, stops, right=True)
        crossed = torch.bucketize(firsts + (_ROW - 1), stops, right=True) != self._owners
        self._crossed = crossed.nonzero().view(-1)
        places = torch.arange(numel, dtype=torch.int64, device="cpu")
        loose = torch.bucketize(self._loose(places), stops, right=True)
        self._loose_tensors, self._counts = torch.unique_consecutive(loose, return_counts=True)

    def extremes(self, values: torch.Tensor) -> list[tuple[float, float]]:
        """The smallest and the largest value of each tensor; both NaN if it holds a NaN."""
        if self._apart:
            pairs = map(torch.aminmax, self._split(values))
            return [(low.item(), high.item()) for low, high in pairs]
        rows = self._rows(values)
        lows = self._extreme("amin", math.inf, rows.amin(1), values)
        highs = self._extreme("amax", -math.inf, rows.amax(1), values)
        return list(zip(lows.tolist(), highs.tolist(), strict=True))

    def _extreme(self, which: str, none: float, of_rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(self.sizes),), none, dtype=values.dtype, device="cpu")
        if self._counts.numel():
            of_rows.index_fill_(0, self._crossed, none)
            out.scatter_reduce_(0, self._loose_owners(), self._loose(values), which)
        return out.scatter_reduce_(0, self._owners, of_rows, which)

    def affine(self, addends: Sequence[float], factors: Sequence[float], values: torch.Tensor) -> torch.Tensor:
        """Each value times the factor of its tensor, plus the addend of its tensor."""
        out = torch.empty_like(values)
        if not self._apart:
            return self.shift(self._each(torch.mul, values, factors, out), addends)
        singles = torch.tensor(addends, dtype=values.dtype, device="cpu").unbind()
        for one, made, addend, factor in zip(self._split(values), self._split(out), singles, factors, strict=True):
            torch.add(addend, one, alpha=factor, out=made)
        return out

    def scale(self, values: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
        """Multiply each value by the factor of its tensor, in place."""
        return self._each(torch.mul, values, factors, values)

    def shift(self, values: torch.Tensor, addends: Sequence[float]) -> torch.Tensor:
        """Add the addend of its tensor to each value, in place."""
        if not any(addends):
            return values
        if len(set(addends)) == 1:
            return values.add_(addends[0])
        return self._each(torch.add, values, addends, values)

    def spread(self, each: Sequence[float]) -> torch.Tensor:
        """Repeat the number of each tensor for each of its values (float64)."""
        sizes = torch.tensor(self.sizes, dtype=torch.int64, device="cpu")
        return torch.repeat_interleave(torch.tensor(each, dtype=torch.float64, device="cpu"), sizes)

    def _each(
        self, do: Callable[..., torch.Tensor], values: torch.Tensor, each: Sequence[float], out: torch.Tensor
    ) -> torch.Tensor:
        """Write to `out` the result of `do` for each value and the number of its tensor."""
        if self._apart:
            for one, number, made in zip(self._split(values), each, self._split(out), strict=True):
                do(one, number, out=made)
            return out
        numbers = torch.tensor(each, dtype=values.dtype, device="cpu")
        loose = do(self._loose(values), numbers.index_select(0, self._loose_owners())) if self._counts.numel() else None
        do(self._rows(values), numbers.index_select(0, self._owners)[:, None], out=self._rows(out))
        if loose is not None:
            start, stop = self._ends
            middle = loose.numel() - (out.numel() - stop)
            out[:start], out[stop:] = loose[:start], loose[middle:]
            self._rows(out).index_copy_(0, self._crossed, loose[start:middle].view(-1, _ROW))
        return out

    def _split(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return (values,) if len(self.sizes) == 1 else torch.split(values, list(self.sizes))

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        start, stop = self._ends
        return values[start:stop].view(-1, _ROW)

    def _loose(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of the loose values: before the rows, within them, behind them."""
        start, stop = self._ends
        return torch.cat([values[:start], self._rows(values).index_select(0, self._crossed).view(-1), values[stop:]])

    def _loose_owners(self) -> torch.Tensor:
        return torch.repeat_interleave(self._loose_tensors, self._counts)


class Blocks:
    """Blocks of neighbours with a scale for each; the last one of a tensor may be shorter.

    Args:
        sizes: the number of values of each tensor.
        width: the number of values in a block.

    Attributes:
        count: the number of blocks.
    """

    def __init__(self, sizes: tuple[int, ...], width: int) -> None:
        self._width = width
        # Blocks first to last, and their lengths unless all are whole.
        self._groups: list[tuple[int, int, torch.Tensor | None]] = []
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
            width = self._width
            first, self.count = self.count, self.count + sum(-(-size // width) for size in sizes)
            ragged = None
            if any(size % width for size in sizes):
                lengths = [min(width, size - at) for size in sizes for at in range(0, size, width)]
                ragged = torch.tensor(lengths, dtype=torch.int64, device="cpu")
            self._groups.append((first, self.count, ragged))
            self._cuts.append(sum(sizes))

    def top(self, values: torch.Tensor) -> torch.Tensor:
        """The largest absolute value of each block; NaN if it holds a NaN."""
        out = torch.empty(self.count, dtype=values.dtype, device="cpu")
        for part, (first, last, lengths) in zip(self._split(values), self._groups, strict=True):
            if lengths is not None:
                block = _numbered(lengths, part.numel())
                out[first:last].zero_().scatter_reduce_(0, block, part.abs(), "amax")
                continue
            blocks = part.view(-1, self._width)
            if blocks.numel() < _SHORT << 4:  # few operations
                torch.amax(blocks.abs(), dim=1, out=out[first:last])
            else:  # few passes: ten times as fast as aminmax
                torch.maximum(blocks.amax(dim=1), blocks.amin(dim=1).neg_(), out=out[first:last])
        return out

    def extremes(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The smallest and the largest value of each block; both NaN if it holds a NaN."""
        low, high = torch.empty(2, self.count, dtype=values.dtype, device="cpu")
        for part, (first, last, lengths) in zip(self._split(values), self._groups, strict=True):
            if lengths is not None:
                block = _numbered(lengths, part.numel())
                low[first:last].scatter_reduce_(0, block, part, "amin", include_self=False)
                high[first:last].scatter_reduce_(0, block, part, "amax", include_self=False)
            else:
                torch.amin(part.view(-1, self._width), dim=1, out=low[first:last])
                torch.amax(part.view(-1, self._width), dim=1, out=high[first:last])
        return low, high

    def scale(self, values: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Each value times the factor of its block; `out` may be `values`."""
        for part, made, (first, last, lengths) in zip(self._split(values), self._split(out), self._groups, strict=True):
            factor = factors[first:last]
            if lengths is None:
                torch.mul(part.view(-1, self._width), factor[:, None], out=made.view(-1, self._width))
            else:
                torch.mul(part, torch.repeat_interleave(factor, lengths, output_size=part.numel()), out=made)
        return out

    def spread(self, each: torch.Tensor) -> torch.Tensor:
        """Repeat the number of each block for each of its values."""
        parts = [
            torch.repeat_interleave(each[first:last], self._width if lengths is None else lengths)
            for first, last, lengths in self._groups
        ]
        return torch.cat(parts)

    def _split(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return (values,) if len(self._cuts) == 1 else torch.split(values, self._cuts)


def _numbered(lengths: torch.Tensor, numel: int) -> torch.Tensor:
    """For each value the number of its block, of blocks that have these lengths and so many values."""
    numbers = torch.arange(lengths.numel(), dtype=torch.int64, device="cpu")
    return torch.repeat_interleave(numbers, lengths, output_size=numel)


@lru_cache(maxsize=256)
def tensors_of(sizes: tuple[int, ...]) -> Tensors:
    """The same ones each time."""
    return Tensors(sizes)


@lru_cache(maxsize=256)
def blocks_of(sizes: tuple[int, ...], width: int) -> Blocks:
    """The same ones each time."""
    return Blocks(sizes, width)
