"""The weighted mean against a float64 reference: any dtypes, shapes, strides, weights, scales and tile sizes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.averaging.allreduce.vector import Vector, describe
from shoal.compression import CompressionBase, Float16Compression, NoCompression
from tests.unit.test_vector import average

_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
_CODECS: list[CompressionBase] = [NoCompression(), Float16Compression()]

shapes = st.lists(st.integers(0, 9), max_size=3)
kinds = st.tuples(shapes, st.sampled_from(_DTYPES), st.sampled_from(_CODECS), st.booleans())
groups = st.lists(kinds, min_size=1, max_size=6).filter(lambda found: any(all(shape) for shape, *_ in found))
weights = st.lists(
    st.floats(1e-6, 1e6, allow_subnormal=False) | st.sampled_from([1.0, 2.0, 1e-9, 1e12]), min_size=1, max_size=5
)


def _tensor(generator: torch.Generator, shape: list[int], dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    size = list(reversed(shape)) if transposed else shape
    made = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return made.permute(list(reversed(range(made.dim())))) if transposed else made


def _tolerance(dtype: torch.dtype, codec: CompressionBase) -> float:
    """Relative to the largest value in the mean: rounding of the sum, of the codec (twice), and of the result."""
    sum_eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    codec_eps = 0.0 if codec.name == "none" else 2**-10
    return 16 * sum_eps + 2 * codec_eps + torch.finfo(dtype).eps


@settings(max_examples=150)
@given(groups, weights, st.sampled_from([1.0, 0.5, -3.0, 1 / 7]), st.sampled_from([1024, 1500, 65536]), st.data())
def test_the_weighted_mean(
    found: list[tuple[list[int], torch.dtype, CompressionBase, bool]],
    weight: list[float],
    scale: float,
    tile_bytes: int,
    data: st.DataObject,
) -> None:
    """Every member ends with the same bits, within rounding of the reference; `apply` moves by the difference."""
    generator = torch.Generator().manual_seed(len(found) * 100 + len(weight))
    codecs = [codec for _, _, codec, _ in found]
    vectors = []
    for _ in weight:
        tensors = [_tensor(generator, shape, dtype, transposed) for shape, dtype, _, transposed in found]
        vectors.append(Vector(tensors, describe(tensors, codecs)))
    before = [[tensor.double().clone() for tensor in vector.tensors] for vector in vectors]
    for vector, each in zip(vectors, weight, strict=True):
        assert vector.copy_in(scale, each) is None
    average(vectors, weight, tile_bytes)
    alpha = data.draw(st.sampled_from([None, 1.0, 0.5]))
    for vector in vectors:
        vector.overwrite() if alpha is None else vector.apply(alpha)
    for index, (_, dtype, codec, _) in enumerate(found):
        copies = [old[index] * scale for old in before]
        mean = sum((w * copy for w, copy in zip(weight, copies, strict=True)), torch.zeros(())) / sum(weight)
        size = max((float(copy.abs().max()) for copy in copies if copy.numel()), default=0.0) + 1e-3
        for peer, vector in enumerate(vectors):
            got, own = vector.tensors[index], before[peer][index]
            wanted = mean.expand(got.shape)
            if alpha is not None and not (alpha == 1.0 and scale == 1.0):
                wanted = own + alpha * (wanted - copies[peer])
            largest = 4 * (size + float(own.abs().max() if own.numel() else 0.0))
            torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=largest * _tolerance(dtype, codec))
            if alpha is None:
                assert torch.equal(got, vectors[0].tensors[index])


@given(st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=8), st.floats(-1e3, 1e3))
def test_equal_values_average_to_themselves(weight: list[float], value: float) -> None:
    """Whatever the weights: to rounding."""
    vectors = []
    for _ in weight:
        tensors = [torch.full((3,), value, dtype=torch.float64), torch.full((3,), value)]
        vectors.append(Vector(tensors, describe(tensors, [NoCompression()] * 2)))
        assert vectors[-1].copy_in() is None
    average(vectors, weight)
    vectors[-1].overwrite()
    wide, narrow = vectors[-1].tensors
    torch.testing.assert_close(wide, torch.full((3,), value, dtype=torch.float64), rtol=1e-14, atol=1e-300)
    torch.testing.assert_close(narrow, torch.full((3,), value), rtol=2e-6, atol=1e-30)
