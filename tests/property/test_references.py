"""Rounds that code against the last average, and lossless ones between them, vector by vector."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.by_hand import average_tile
from shoal.averaging.allreduce.vector import TileDigests, Vector, describe
from shoal.compression import (
    BlockwiseQuantization,
    CompressionBase,
    Differences,
    ErrorFeedback,
    Quantile8BitQuantization,
    TopKCompression,
    Uniform8BitQuantization,
)
from tests.unit.test_vector import DTYPES

DIGESTS = TileDigests(b"r" * 16)
NUMEL = 1500
PLAIN: list[CompressionBase] = [Uniform8BitQuantization(), Quantile8BitQuantization(), BlockwiseQuantization(bits=4)]
FEEDBACK: list[CompressionBase] = [ErrorFeedback(BlockwiseQuantization(bits=4)), ErrorFeedback(TopKCompression(0.1))]


def members(codec: CompressionBase, dtype: torch.dtype, seed: int) -> list[Vector]:
    """Three with parameters of their own."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(3):
        tensors = [torch.randn(NUMEL, generator=generator).to(dtype)]
        made.append(Vector(tensors, describe(tensors, [Differences(codec)])))
    return made


def play(vectors: list[Vector], weights: list[float], *, on_reference: bool, reducers: list[int]) -> None:
    """One round that succeeds; all members have its averages as their tensors."""
    for vector, weight in zip(vectors, weights, strict=True):
        assert vector.copy_in(weight=weight) is None
        vector.agree(on_reference=on_reference)
    tiling = vectors[0].tiling([500, 600, 400], 1024)
    for tile, owner in zip(tiling.tiles, tiling.owners, strict=True):
        reducer = reducers[owner]
        held = average_tile(vectors, weights, tile, reducer, DIGESTS)
        for peer, vector in enumerate(vectors):
            if peer != reducer:
                given_on = vector.average_bytes(tile, held, DIGESTS)
                assert given_on is not None, "who holds an average can give it"
                assert DIGESTS.of(held, given_on) == held.digest
            vector.settle(tile, averaged_here=peer == reducer)
    for vector in vectors:
        vector.name_reference(b"round")
        vector.overwrite()


@settings(max_examples=60)
@given(
    st.sampled_from([*PLAIN, *FEEDBACK]),
    st.sampled_from(DTYPES),
    st.integers(0, 999),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.permutations([0, 1, 2]),
)
def test_all_have_the_same_bits_and_the_error_is_that_of_the_update(
    codec: CompressionBase, dtype: torch.dtype, seed: int, coded: list[bool], reducers: list[int]
) -> None:
    """However large the parameters are: twice the codec's bound for what changed, and rounding to the dtype."""
    vectors = members(codec, dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    play(vectors, [1.0, 1.0, 1.0], on_reference=False, reducers=reducers)
    eps = torch.finfo(dtype).eps
    for on_reference in coded:
        before = vectors[0].tensors[0].double()
        size = max(1e-3, 8 * eps)
        for vector in vectors:
            vector.tensors[0].add_(torch.randn(NUMEL, generator=generator).to(dtype), alpha=size)
        wanted = torch.stack([vector.tensors[0].double() for vector in vectors]).mean(0)
        largest = max(float((vector.tensors[0].double() - before).abs().max()) for vector in vectors)
        play(vectors, [1.0, 1.0, 1.0], on_reference=on_reference, reducers=reducers)
        assert all(torch.equal(vectors[0].tensors[0], vector.tensors[0]) for vector in vectors)
        if codec in PLAIN:
            # No bound of these codecs is more than 0.14 of the largest value that is encoded.
            bound = 0.3 * largest if on_reference else 0.0
            rounding = 4 * eps * float(wanted.abs().max())
            assert float((vectors[0].tensors[0].double() - wanted).abs().max()) <= bound + rounding


@settings(max_examples=40)
@given(
    st.sampled_from(FEEDBACK),
    st.integers(0, 999),
    st.lists(st.tuples(st.booleans(), st.sampled_from([1.0, 3.0, 50.0])), min_size=1, max_size=6),
)
def test_updates_add_up_with_feedback(codec: CompressionBase, seed: int, rounds: list[tuple[bool, float]]) -> None:
    """What was sent as differences, and what is kept, is all that the peers changed; lossless rounds send all of it."""
    vectors = members(codec, torch.float32, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    play(vectors, [1.0, 1.0, 1.0], on_reference=False, reducers=[0, 1, 2])
    counted, averaged = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for number, (on_reference, weight) in enumerate(rounds):
        before = vectors[0].tensors[0].double()
        for vector in vectors:
            vector.tensors[0].add_(torch.randn(NUMEL, generator=generator), alpha=0.01)
        weights = [1.0, weight, 2.0]
        for vector, each in zip(vectors, weights, strict=True):
            counted += each * (vector.tensors[0].double() - before)
        play(vectors, weights, on_reference=on_reference, reducers=[number % 3, (number + 1) % 3, (number + 2) % 3])
        averaged += sum(weights) * (vectors[0].tensors[0].double() - before)
    kept = [
        segment.residual.kept.double()
        for vector in vectors
        for segment in vector._segments.values()
        if segment.residual is not None
    ]
    missing = torch.stack(kept).sum(0)
    torch.testing.assert_close(averaged + missing, counted, rtol=0.0, atol=2e-4)
    if not rounds[-1][0]:
        assert float(missing.abs().max()) < 2e-4
