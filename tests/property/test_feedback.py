"""Error feedback: whatever is lost, it is counted later. No network: rounds are played vector by vector."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.averaging.allreduce.vector import Vector, describe
from shoal.compression import (
    BlockwiseQuantization,
    CompressionBase,
    ErrorFeedback,
    Float16Compression,
    TopKCompression,
    Uniform8BitQuantization,
)
from shoal.layout import Tile
from tests.unit.test_vector import DTYPES, segment_of, tiles_of

NUMEL = 700

CODECS: list[CompressionBase] = [
    TopKCompression(0.01),
    TopKCompression(0.2, bits=2),
    BlockwiseQuantization(bits=2),
    Uniform8BitQuantization(),
    Float16Compression(),
]


@dataclass
class Played:
    """Rounds of one group, played on vectors.

    Attributes:
        counted: sum of all contributions that were counted, each times its weight.
        averaged: sum of all averages, each times its total weight.
        bound: largest difference that these two may have, element by element.
    """

    codec: CompressionBase
    dtype: torch.dtype
    vectors: list[Vector]
    counted: torch.Tensor
    averaged: torch.Tensor
    bound: torch.Tensor

    @classmethod
    def of(cls, codec: CompressionBase, dtype: torch.dtype, members: int) -> Played:
        """Nothing was averaged yet."""
        vectors = []
        for _ in range(members):
            tensors = [torch.zeros(NUMEL, dtype=dtype)]
            vectors.append(Vector(tensors, describe(tensors, [ErrorFeedback(codec)])))
        wide = torch.zeros(NUMEL, dtype=torch.float64)
        return cls(codec, dtype, vectors, wide, wide.clone(), torch.zeros(members, NUMEL, dtype=torch.float64))

    def residual(self, member: int) -> torch.Tensor:
        """What this member keeps."""
        residual = segment_of(self.vectors[member]).residual
        assert residual is not None
        return residual.kept

    def begin(self, values: list[torch.Tensor], weights: list[float]) -> list[Tile]:
        """Copy in; the tiles."""
        for vector, mine, weight in zip(self.vectors, values, weights, strict=True):
            vector.tensors[0].copy_(mine)
            assert vector.copy_in(weight=weight) is None
        return tiles_of(self.vectors[0])

    def average(self, tile: Tile, reducer: int, taking: list[int], weights: list[float]) -> None:
        """One tile is averaged by `reducer` from the values of `taking`, and committed."""
        total = sum(weights[member] for member in taking)
        where, made = slice(tile.start, tile.stop), self.vectors[reducer]
        before = [self.residual(member)[where].to(torch.float64, copy=True) for member in range(len(self.vectors))]
        made.begin_sum(tile, weights[reducer] if reducer in taking else 0.0)
        for member in taking:
            self.counted[where] += weights[member] * self.vectors[member].tensors[0][where].double()
            if member != reducer:
                data = memoryview(self.vectors[member].contribution(tile))
                made.add(tile, made.decoded(tile, data, weights[member]), weights[member])
        summed = made._sums[tile].to(torch.float64, copy=True)
        made.finish(tile, total)
        average = segment_of(made).result[where]
        self.averaged[where] += total * average.double()
        for member, vector in enumerate(self.vectors):
            if member == reducer:
                vector.settle(tile, averaged_here=True)
                self._expect(member, where, (summed + before[reducer]) / total, total)
            elif member in taking:
                vector.settle(tile, averaged_here=False)
                sent = vector.tensors[0][where].double() + before[member] / weights[member]
                self._expect(member, where, sent, weights[member])

    def _expect(self, member: int, where: slice, encoded: torch.Tensor, weight: float) -> None:
        """This was encoded last: its error bound is all that may be missing of this member."""
        narrow = encoded.to(self.dtype)
        rounding = (narrow.double() - encoded).abs() + 1e-5 * encoded.abs() + 1e-6
        if narrow.numel():
            rounding += torch.finfo(self.dtype).eps * encoded.abs().max()
        self.bound[member][where] = weight * (self.codec.error_bound(narrow) * 1.01 + rounding)


@settings(max_examples=60)
@given(st.sampled_from(CODECS), st.sampled_from(DTYPES), st.integers(1, 4), st.integers(0, 999), st.data())
def test_all_that_was_contributed_is_counted_but_for_one_rounds_error(
    codec: CompressionBase, dtype: torch.dtype, members: int, seed: int, data: st.DataObject
) -> None:
    """Other weights, reducers and contributors in every round and tile; some rounds fail."""
    played = Played.of(codec, dtype, members)
    generator = torch.Generator().manual_seed(seed)
    everyone = list(range(members))
    for _ in range(data.draw(st.integers(1, 8))):
        values = [torch.randn(NUMEL, generator=generator, dtype=torch.float64) for _ in everyone]
        weights = [data.draw(st.sampled_from([1.0, 0.5, 3.0, 100.0])) for _ in everyone]
        tiles = played.begin(values, weights)
        if data.draw(st.integers(0, 3)) == 0:  # it fails: what was encoded is forgotten
            for tile in tiles:
                played.vectors[-1].contribution(tile)
            continue
        for tile in tiles:
            reducer = data.draw(st.sampled_from(everyone))
            taking = data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
            played.average(tile, reducer, taking, weights)
    missing = sum((played.residual(member).double() for member in everyone), torch.zeros(()))
    size = max(float(played.counted.abs().max()), 1.0)
    torch.testing.assert_close(played.averaged + missing, played.counted, rtol=0.0, atol=1e-5 * size)
    assert bool(((played.averaged - played.counted).abs() <= played.bound.sum(0)).all())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_the_mean_of_many_rounds_comes_to_the_true_mean(codec: CompressionBase) -> None:
    """Also of what a single round never sends."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    rounds = 400
    played = Played.of(codec, torch.float32, 2)
    for turn in range(rounds):
        for tile in played.begin([values, values], [1.0, 1.0]):
            played.average(tile, turn % 2, [0, 1], [1.0, 1.0])
    once = codec.max_error(values)
    assert float((played.averaged / (2 * rounds) - values.double()).abs().max()) < 0.3 * once


def test_a_round_that_fails_leaves_the_residual_as_it_was() -> None:
    """The next round sends what it would have sent without the one that failed."""
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(NUMEL, generator=generator) for _ in range(3)]
    sent = []
    for fails in (False, True):
        played = Played.of(TopKCompression(0.05), torch.float32, 2)
        for tile in played.begin([values[0]] * 2, [1.0, 2.0]):
            played.average(tile, 0, [0, 1], [1.0, 2.0])
        before = played.residual(1).clone()
        assert bool(before.any())
        if fails:
            for tile in played.begin([values[1]] * 2, [5.0, 7.0]):
                for vector in played.vectors:
                    vector.contribution(tile)
            played.vectors[0].begin_sum(tile, 5.0)
            played.vectors[0].finish(tile, 5.0)
        assert torch.equal(played.residual(1), before)
        tiles = played.begin([values[2]] * 2, [1.0, 1.0])
        sent.append([bytes(vector.contribution(tile)) for tile in tiles for vector in played.vectors])
    assert sent[0] == sent[1]


def test_a_contribution_that_is_sent_again_has_the_same_bytes() -> None:
    """To another reducer, under a new attempt."""
    played = Played.of(BlockwiseQuantization(bits=4), torch.float32, 1)
    for _ in range(2):
        [tile, *_] = played.begin([torch.randn(NUMEL)], [2.0])
        first = bytes(played.vectors[0].contribution(tile))
        assert bytes(played.vectors[0].contribution(tile)) == first
        played.vectors[0].settle(tile, averaged_here=False)


def test_a_residual_counts_with_the_weight_that_it_was_lost_with() -> None:
    """A peer that has 100 samples now and 1 next time owes 100 samples' worth, not one."""
    played = Played.of(TopKCompression(0.01), torch.float32, 2)
    values = torch.linspace(1.0, 2.0, NUMEL)
    [tile, *_] = played.begin([values, values], [1.0, 100.0])
    played.average(tile, 0, [0, 1], [1.0, 100.0])
    lost = played.residual(1)[tile.start : tile.stop].clone()
    unsent = lost > 50
    assert int(unsent.sum()) >= tile.numel - 10
    torch.testing.assert_close(lost[unsent], 100 * values[tile.start : tile.stop][unsent])
    played.begin([values * 0, values * 0], [1.0, 1.0])
    encoded = played.vectors[1].contribution(tile)
    decoded = TopKCompression(0.01).decode(memoryview(encoded), tile.numel, torch.float32)
    assert float(decoded.max()) == pytest.approx(float(lost.max()), rel=2**-8)


def test_what_a_dtype_cannot_hold_is_sent_later() -> None:
    """A residual that was lost with a large weight is too large for float16 when the weight is small."""
    played = Played.of(TopKCompression(0.01), torch.float16, 2)
    values = torch.linspace(100.0, 200.0, NUMEL)
    tiles = played.begin([values, values], [1.0, 1e6])
    for tile in tiles:
        played.average(tile, 0, [0, 1], [1.0, 1e6])
    tiles = played.begin([values, values], [1.0, 1.0])
    for tile in tiles:
        played.average(tile, 0, [0, 1], [1.0, 1.0])
    missing = played.residual(0).double() + played.residual(1).double()
    assert bool(torch.isfinite(missing).all())
    torch.testing.assert_close(played.averaged + missing, played.counted, rtol=1e-5, atol=0.0)
