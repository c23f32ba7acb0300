"""shoal computes the same, whatever a program has set in torch: default dtype and device, autocast, modes, threads."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal
import shoal.compression
from shoal.compression import CompressionBase, Differences, ErrorFeedback, Uniform8BitQuantization
from shoal.strategies.low_rank import LowRank
from tests.codecs import CODECS
from tests.odd_torch import ODD

_FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("tensor", "tril_indices", "triu_indices", "zeros"),
}
_PROGRAMS = ("demo/",)
"""Programs of their own, which nothing else runs in: what they make takes torch's defaults as they are."""


def _made_by_default(source: str) -> Iterator[tuple[int, str]]:
    """Calls of torch that leave the dtype or the device to the defaults of the process: line and what is missing."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{each}" for each in _FACTORIES}:
            given = {each.arg for each in node.keywords}
            if None not in given and (missing := {"dtype", "device"} - given):  # `**options` say both
                yield node.lineno, f"{ast.unparse(node.func)} without {' and '.join(sorted(missing))}"


def test_a_call_that_leaves_the_dtype_to_the_process_is_found() -> None:
    """The rule below can fail."""
    assert list(_made_by_default("torch.tensor([1.0], device='cpu')")) == [(1, "torch.tensor without dtype")]
    assert not list(_made_by_default("torch.zeros(3, dtype=dtype, device='cpu'); torch.zeros_like(values)"))


def test_no_tensor_of_the_library_is_made_with_the_dtype_or_the_device_that_the_process_has_by_default() -> None:
    """`torch.set_default_dtype(bfloat16)` made an 8-bit codec lose 200 times as much, in silence."""
    root = Path(shoal.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.py"))}
    found = [
        f"{name}:{line}: {what}"
        for name, path in files.items()
        if not name.startswith(_PROGRAMS)
        for line, what in _made_by_default(path.read_text())
    ]
    assert not found, "\n".join(found)


# ----------------------------------------------------------------------------------------------------------- codecs

_CODECS = [each for each in CODECS if not isinstance(each, ErrorFeedback | Differences)]  # these encode by the others
_SIZES = [(70,), (700, 3, 900), (*range(1, 30), 1000)]


def _values(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(sizes))
    drawn = torch.randn(sum(sizes), generator=generator, dtype=torch.float64, device="cpu")
    return (drawn + 1.5).to(dtype)


def _forget() -> None:
    """Drop all tables that the codecs keep."""
    for module in pkgutil.iter_modules(shoal.compression.__path__):
        for each in vars(importlib.import_module(f"shoal.compression.{module.name}")).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()


def _results(codec: CompressionBase) -> list[object]:
    """The bytes that a codec makes of several tensors, the values that it makes of these, and the bounds."""
    found = list[object]()
    for sizes in _SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            values = _values(sizes, dtype)
            data = codec.encode(values, sizes)
            into = torch.zeros(values.shape, dtype=torch.float32, device="cpu")
            codec.decode_into(data, dtype, into, sizes)
            found += [bytes(data), into.numpy().tobytes(), codec.decode(data, sum(sizes), dtype, sizes).dtype]
            found.append(codec.tensors_bound(values, sizes).numpy().tobytes())
    return found


@pytest.fixture(scope="module", name="plain")
def _plain() -> dict[str, list[object]]:
    return {codec.name: _results(codec) for codec in _CODECS}


@pytest.mark.parametrize("odd", ODD)
def test_a_codec_makes_the_same_bytes_and_values_whatever_torch_does_by_default(
    plain: dict[str, list[object]], odd: str
) -> None:
    """Its tables are made anew meanwhile."""
    _forget()
    with ODD[odd]():
        for codec in _CODECS:
            assert _results(codec) == plain[codec.name], codec.name


def test_an_8_bit_codec_is_as_exact_as_it_says_under_a_default_dtype_of_16_bits() -> None:
    """It erred by 1.26 on values from 1 to 2."""
    values = _values((5000,), torch.float32)
    for odd in ("bfloat16 by default", "float16 by default"):
        with ODD[odd]():
            codec = Uniform8BitQuantization()
            found = codec.decode(codec.encode(values), values.numel(), torch.float32)
            assert bool(((found - values).abs() <= codec.error_bound(values)).all())


# ---------------------------------------------------------------------------------------------- factors of low rank


def _factors() -> list[bytes]:
    """Two steps of one peer that sends factors: what it sends, what it makes of it, and the bases."""
    parameters = [torch.zeros(300, 200, dtype=torch.float32, device="cpu")]
    low, found = LowRank(parameters, rank=4, min_compression_ratio=0.5, device=torch.device("cpu")), list[bytes]()
    for step in range(2):
        sums = [_values((300 * 200,), torch.float32).view(300, 200) * (step + 1)]
        low.shrink(sums)
        low.counted()
        low.expand(sums, step)
        low.advance()
        found += [each.numpy().tobytes() for each in (*low.tensors(sums), *sums, *low.bases)]
    return found


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd != "inference_mode"])
def test_factors_of_low_rank_have_the_same_bits_whatever_torch_does_by_default(odd: str) -> None:
    """Within autocast they were products of 16 bits."""
    plain = _factors()
    with ODD[odd]():
        assert _factors() == plain
