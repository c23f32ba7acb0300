"""Updates of parameters that are far smaller than the parameters, through codecs of 16 bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import shoal
from shoal.compression import (
    BFloat16Compression,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    TensorRole,
)
from shoal.events import Warned
from tests.integration.test_runtime import two_peers
from tests.integration.workers import LONG_S

ROUNDS = 30
FLOAT16 = Float16Compression()
CODECS: list[CompressionBase] = [
    FLOAT16,
    BFloat16Compression(),
    RoleAdaptiveCompression(parameter=FLOAT16),
    SizeAdaptiveCompression(threshold=10, less=BFloat16Compression(), greater_equal=FLOAT16),
]


def moved(start: float, by: float, codec: CompressionBase, *, described: bool) -> list[float]:
    """Two peers add `by` to a parameter and average it, `ROUNDS` times; by how much each has moved in the end."""
    values = [torch.nn.Parameter(torch.full((1000,), start)) for _ in range(2)]
    tensors = [value.detach() for value in values] if described else values
    infos = [CompressionInfo.from_tensor(tensors[0], 0, TensorRole.PARAMETER)] if described else None
    with two_peers() as peers, ThreadPoolExecutor() as threads:
        averagers = [
            shoal.DecentralizedAverager(
                [tensor], dht, start=True, prefix="p", compression=codec, tensor_infos=infos, target_group_size=2
            )
            for tensor, dht in zip(tensors, peers, strict=True)
        ]
        for _ in range(ROUNDS):
            for averager in averagers:
                with averager.get_tensors() as [tensor], torch.no_grad():
                    tensor.add_(by)
            list(threads.map(lambda averager: averager.step(timeout=LONG_S), averagers))
    assert torch.equal(values[0], values[1])
    return [float((value.detach().double() - torch.tensor(start).double()).mean()) for value in values]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name[:23])
@pytest.mark.parametrize("described", [True, False], ids=["role given", "nn.Parameter"])
def test_16_bit_codecs_round_no_small_updates_of_parameters_away(codec: CompressionBase, *, described: bool) -> None:
    """1e-4 onto 1.0, 30 times: within 2% of the exact sum, where 1.0 in 16 bits has steps of 1e-3."""
    assert moved(1.0, 1e-4, codec, described=described) == pytest.approx([ROUNDS * 1e-4] * 2, rel=0.02)


def test_updates_that_float16_cannot_hold_are_kept() -> None:
    """1e-8 onto 0.01: half of the least float16."""
    assert moved(0.01, 1e-8, FLOAT16, described=True) == pytest.approx([ROUNDS * 1e-8] * 2, rel=0.1)


def told(dtype: torch.dtype, by: float, codec: CompressionBase | None, *, rounds: int = 10) -> list[str]:
    """The warnings of two peers of plain tensors, of which the first one adds `by` before each round."""
    warnings: list[str] = []
    with two_peers() as peers, ThreadPoolExecutor() as threads:
        for dht in peers:
            dht.events.subscribe(lambda event: warnings.append(event.line()) if isinstance(event, Warned) else None)
        averagers = [
            shoal.DecentralizedAverager(
                [torch.ones(1000, dtype=dtype)], dht, start=True, prefix="p", compression=codec, target_group_size=2
            )
            for dht in peers
        ]
        for _ in range(rounds):
            with averagers[0].get_tensors() as [tensor]:
                tensor.add_(by)
            list(
                threads.map(
                    lambda averager, weight: averager.step(weight=weight, timeout=LONG_S), averagers, (1.0, 3.0)
                )
            )
    return warnings


@pytest.mark.parametrize(
    ("dtype", "by", "codec", "narrow"),
    [
        (torch.bfloat16, 2**-7, None, "bfloat16"),
        (torch.float16, 2**-10, None, "float16"),
        (torch.float32, 1e-4, FLOAT16, "float16"),
    ],
)
def test_plain_tensors_in_16_bits_that_hardly_move_are_told(
    dtype: torch.dtype, by: float, codec: CompressionBase | None, narrow: str
) -> None:
    """They lost each update in silence. Whoever averages them knows, and says which share stood still."""
    found = told(dtype, by, codec)
    assert 1 <= len(found) <= 2  # each peer that averages some of them
    assert all(
        f"100% of the elements did not move by the average, because {narrow} cannot hold" in each for each in found
    )


@pytest.mark.parametrize(
    ("dtype", "by", "codec"),
    [
        (torch.float32, 1e-4, None),
        (torch.bfloat16, 0.25, None),
        (torch.bfloat16, 0.0, None),
        (torch.float32, 0.1, FLOAT16),
    ],
)
def test_tensors_that_move_are_not_told(dtype: torch.dtype, by: float, codec: CompressionBase | None) -> None:
    """By as much as they can hold, or not at all."""
    assert not told(dtype, by, codec)
