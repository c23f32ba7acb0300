"""Gradients of matrices as factors of low rank: fewer bytes in a round, and what the factors lose is not lost.

A matrix M of m x n gradients is sent as P = M R and Q = M' L. L (m x r) and R (n x r) are its *bases*: orthonormal
columns, the same on all members. Each makes of the averages of P and Q

    L Q' + (P - L L' P) R'  =  M - (1 - L L') M (1 - R R')

with M the mean of all members' matrices. The rest, (1 - L L') M (1 - R R') of each member's own matrix, is its
*residual*: it is added to its next sum of gradients. As sums are of gradient times samples, every sample counts once,
whatever weight its peer has in each round.

The next bases are orthonormal bases of the columns of the averages of P and Q. That is PowerSGD
(https://arxiv.org/abs/1905.13727) with as many numbers, but P is that of the step before when Q is computed. So both
are averaged in one round, which is committed or fails as any other: nothing is half done, and nobody uses a P whose Q
failed. It is a projection, and linear: the factors of a mean are the mean of the factors.

Bases are computed from committed bits in a fixed order of operations, each of which IEEE 754 rounds in one way. So
they have the same bits on every machine, whatever its vector units are. Products of matrices are computed in float64:
neither autocast nor the precision that a program allows its products of float32 (TF32) changes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from shoal.averaging.allreduce.segments import sum_dtype
from shoal.base.thread_state import OWN
from shoal.errors import ConfigError

__all__ = ["NO_FEEDBACK", "LowRank"]

NO_FEEDBACK = (
    "ErrorFeedback does not go with PowerSGD, which makes good what it loses itself, and whose factors are of other "
    "bases in each round: give a codec without feedback, or none"
)

_AT_ONCE = 1 << 20
"""The values of a matrix of which there is a copy in float64 at a time."""

_TINY = 1e-6
"""A column that has less than this left of its length beside the others has no direction of its own."""


class LowRank:
    """The factors of one peer's gradients, the bases, and what the factors have lost. No lock.

    Args:
        parameters: whose gradients they are.
        rank: r. Matrices of fewer rows or columns have a smaller one.
        min_compression_ratio: the least part of a parameter's numbers that factors must save; others are sent whole.
        device: of the sums of gradients; None: that of each parameter.

    Attributes:
        bases: L and R of each matrix; equal on all members.
        tensors: that a round averages: P and Q of each matrix, then the sums that are sent whole.
        owners: for each of these, the number of its parameter.

    Raises:
        ConfigError: no parameter is worth it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        rank: int,
        min_compression_ratio: float,
        device: torch.device | None = None,
    ) -> None:
        self.rank = rank
        self._matrices = [
            _Matrix(index, split, rank, sum_dtype(each.dtype), device or each.device)
            for index, each in enumerate(parameters)
            if each.is_floating_point()
            and (split := _split(each.shape)) is not None
            and min(rank, *split) * sum(split) <= (1 - min_compression_ratio) * math.prod(split)
        ]
        if not self._matrices:
            raise ConfigError(
                f"low_rank: rank {rank} saves too little on every parameter: give a lower rank, or a lower "
                "min_compression_ratio, or let gradients travel whole"
            )
        self.bases = [each for matrix in self._matrices for each in (matrix.left, matrix.right)]
        matrices = {matrix.index for matrix in self._matrices}
        self._whole = [index for index in range(len(parameters)) if index not in matrices]
        self.owners = [matrix.index for matrix in self._matrices for _ in range(2)] + self._whole

    def tensors(self, sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a round averages: P and Q of each matrix, then the sums that are sent whole."""
        factors = [each for matrix in self._matrices for each in (matrix.p, matrix.q)]
        return factors + [sums[index] for index in self._whole]

    def begin(self, seed: int) -> None:
        """Draw bases that are the same for the same seed."""
        with OWN.in_force():
            for matrix in self._matrices:
                matrix.draw(seed)

    def use(self, bases: Sequence[torch.Tensor]) -> None:
        """Use a copy of these."""
        for own, other in zip(self.bases, bases, strict=True):
            own.copy_(other)

    def shrink(self, sums: Sequence[torch.Tensor]) -> None:
        """Make the factors of these sums and of the residuals. It may be done again: nothing else changes."""
        with OWN.in_force():
            for matrix in self._matrices:
                matrix.shrink(sums[matrix.index], 1.0)

    def shrink_means(self, means: Sequence[torch.Tensor], samples: int) -> None:
        """The same of means over so many samples: the factors are means, too."""
        with OWN.in_force():
            for matrix in self._matrices:
                matrix.shrink(means[matrix.index], float(samples))
                for factor in (matrix.p, matrix.q):
                    factor.mul_(1 / samples if samples else 0.0)

    def counted(self) -> None:
        """The factors went into a committed average: what they have lost is the residual now."""
        for matrix in self._matrices:
            matrix.counted()

    def expand(self, sums: Sequence[torch.Tensor], seed: int) -> None:
        """Make gradients of the average of the factors, in the place of the sums, and the next bases: see `advance`.

        Args:
            sums: they become the average.
            seed: equal on all members, and another one for each step: draws directions in place of those of no length.
        """
        with OWN.in_force():
            for matrix in self._matrices:
                matrix.expand(sums[matrix.index], seed)

    def advance(self) -> None:
        """The step was taken: the bases are those of the last average. It may be done again."""
        with torch.no_grad():
            for matrix in self._matrices:
                matrix.left.copy_(matrix.next[0])
                matrix.right.copy_(matrix.next[1])

    def forget(self) -> None:
        """Drop the residuals: they are of a state that is not ours any more."""
        for matrix in self._matrices:
            matrix.residual = matrix.lost = None


class _Matrix:
    """One parameter's gradient, as a matrix."""

    def __init__(self, index: int, split: tuple[int, int], rank: int, dtype: torch.dtype, device: torch.device) -> None:
        (m, n), rank = split, min(rank, *split)
        self.index, self._split = index, split
        self.p, self.q = (torch.zeros(size, rank, dtype=dtype, device=device) for size in (m, n))
        self.left, self.right = torch.zeros_like(self.p), torch.zeros_like(self.q)
        self.draw(0)
        self.next = self.left, self.right
        self.residual: torch.Tensor | None = None
        self.lost: torch.Tensor | None = None

    def draw(self, seed: int) -> None:
        for side, base in enumerate((self.left, self.right)):
            base.copy_(_orthonormal(base.zero_(), self._seed(seed) + side))

    def _seed(self, seed: int) -> int:
        return ((seed << 24) + 2 * self.index) % (1 << 63)

    def shrink(self, total: torch.Tensor, scale: float) -> None:
        left, right = self.left, self.right
        values = total.reshape(self._split)
        if self.lost is None:
            self.lost = torch.empty_like(values, dtype=self.p.dtype)
        lost = self.lost.copy_(values).mul_(scale)
        if self.residual is not None:
            lost += self.residual
        wide_left, wide_right = left.double(), right.double()
        columns = torch.zeros_like(self.q, dtype=torch.float64)
        for rows in self._rows():
            wide = lost[rows].double()
            self.p[rows] = wide @ wide_right
            columns += wide.T @ wide_left[rows]
        self.q.copy_(columns)
        for rows, values in self._made_of_factors():
            lost[rows] -= values

    def _rows(self) -> Iterator[slice]:
        m, n = self._split
        step = max(1, _AT_ONCE // n)
        return (slice(start, start + step) for start in range(0, m, step))

    def _made_of_factors(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some rows at a time of the matrix that P and Q stand for (float64)."""
        left, right, p, q = (each.double() for each in (self.left, self.right, self.p, self.q))
        beside_left = p - left @ (left.T @ p)
        for rows in self._rows():
            yield rows, left[rows] @ q.T + beside_left[rows] @ right.T

    def counted(self) -> None:
        self.residual, self.lost = self.lost, self.residual

    def expand(self, total: torch.Tensor, seed: int) -> None:
        matrix = total.view(self._split)
        for rows, values in self._made_of_factors():
            matrix[rows] = values
        first = self._seed(seed)
        self.next = _orthonormal(self.p, first), _orthonormal(self.q, first + 1)


def _split(shape: Sequence[int]) -> tuple[int, int] | None:
    """The rows and columns, of all ways to cut a shape in two, that give the smallest factors; None for a vector."""
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    return min((each for each in cuts if all(each)), key=sum, default=None)


def _orthonormal(columns: torch.Tensor, seed: int) -> torch.Tensor:
    """An orthonormal basis of these columns, by Gram and Schmidt, each twice. Equal bits from equal bits, everywhere.

    Columns without a direction of their own are replaced by drawn ones, so that the basis has all its columns.
    """
    draw = torch.Generator().manual_seed(seed)
    wide, found = columns.to(torch.float64), torch.empty_like(columns, dtype=torch.float64)
    for number in range(columns.shape[1]):
        column, before = wide[:, number], found[:, :number]
        while True:
            size = _length(column)
            if size > 0:
                rest = column / size
                for _ in range(2):
                    rest = rest - _sum_columns((before * _sum_rows(before * rest[:, None])).T)
                if (left := _length(rest)) > _TINY:
                    found[:, number] = rest / left
                    break
            # Whole numbers: normal ones are rounded in several ways.
            whole = torch.randint(-(1 << 20), 1 << 20, column.shape, generator=draw, dtype=torch.int64, device="cpu")
            column = whole.to(found)
    return found.to(columns.dtype)


def _length(column: torch.Tensor) -> float:
    return math.sqrt(float(_sum_rows((column * column)[:, None])))


def _sum_rows(values: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, in pairs: in one order everywhere, as `torch.sum` is not."""
    while (size := values.shape[0]) > 1:
        paired = values[: size // 2] + values[size // 2 : size // 2 * 2]
        values = torch.cat([paired, values[-1:]]) if size % 2 else paired
    return values.sum(0) if not values.shape[0] else values[0]


def _sum_columns(values: torch.Tensor) -> torch.Tensor:
    return _sum_rows(values) if values.shape[0] else values.new_zeros(values.shape[1])
