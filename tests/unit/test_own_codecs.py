"""Codecs that users wrote for hivemind, by `compress` and `extract`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.compression import (
    AdaptiveCompression,
    CompressionBase,
    CompressionInfo,
    Differences,
    ErrorFeedback,
    Float16Compression,
    NoCompression,
    SerializedTensor,
    codec_by_name,
    for_parameters,
)
from shoal.errors import ConfigError
from tests.sim.averaging_kit import Trial, same_bits


class Signs(CompressionBase):
    """Mean size and signs, as programs for hivemind have it."""

    def __init__(self, extra: int = 0) -> None:
        self.extra = extra

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        size = tensor.float().abs().mean().view(1)
        buffer = size.numpy().tobytes() + (tensor < 0).to(torch.uint8).numpy().tobytes() + bytes(self.extra)
        return SerializedTensor(compression=0, buffer=buffer, size=tuple(tensor.shape), dtype=str(tensor.dtype))

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        count = serialized_tensor.size[0]
        size = torch.frombuffer(bytearray(serialized_tensor.buffer), dtype=torch.float32, count=1)
        signs = torch.frombuffer(bytearray(serialized_tensor.buffer), dtype=torch.uint8, count=count, offset=4)
        if int(signs.max()) > 1:
            raise ValueError("no signs")
        return (1 - 2 * signs.float()) * size

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return 0.25


def signs(**options: int) -> Any:
    """One of them; a type checker does not see that it is whole."""
    kind: Any = Signs
    return kind(**options)


def info(count: int = 100, dtype: torch.dtype = torch.float32) -> CompressionInfo:
    """Of a tensor of so many elements."""
    return CompressionInfo.from_tensor(torch.zeros(count, dtype=dtype))


def test_a_codec_by_compress_and_extract_works() -> None:
    """Its size is counted, its name is that of the class, and each piece is coded by itself."""
    codec = signs().choose(info())
    assert codec.name == "own:Signs(extra=0)"
    assert codec_by_name(codec.name) is codec
    assert codec.encoded_bytes(10, torch.bfloat16) == 14
    values = torch.tensor([1.0, -1.0, 1.0, 30.0, -30.0])
    data = codec.encode(values, (3, 2))
    assert data.nbytes == 4 + 3 + 4 + 2
    assert torch.equal(codec.decode(data, 5, torch.float32, (3, 2)), values)
    assert codec.choose(info(dtype=torch.int64)) == NoCompression()
    assert for_parameters(codec, torch.float32) == Differences(codec)
    assert codec_by_name(ErrorFeedback(codec).name) == ErrorFeedback(codec)
    assert signs(extra=2).choose(info()).name == "own:Signs(extra=2)"


def test_bytes_that_it_cannot_read_are_not_numbers() -> None:
    """What a peer sends may be anything: it decodes to NaN, which that peer answers for."""
    codec = signs().choose(info())
    assert bool(codec.decode(b"\xff" * 14, 10, torch.float32).isnan().all())
    with pytest.raises(ConfigError, match=r"no codec own:.Other"):
        codec_by_name("own:Other")


def test_it_averages() -> None:
    """In a round, as any other codec: the signs of two tensors of very different sizes come to the same mean."""

    async def main() -> None:
        trial = Trial(compression=signs())
        values = [[torch.tensor([1.0, -1.0] * 500), torch.tensor([-40.0, 40.0] * 100)] for _ in range(3)]
        wanted = [tensor.clone() for tensor in values[0]]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=3)
        await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(3)))
        assert same_bits([*values, wanted])
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=1)


def test_what_cannot_work_is_refused_by_name() -> None:
    """And says what to do."""

    def nothing(self: Any, *arguments: Any) -> bytes:
        return b""

    with pytest.raises(ConfigError, match=r"Half has no extract"):
        type("Half", (CompressionBase,), {"compress": nothing})
    with pytest.raises(ConfigError, match=r"Louder overrides compress .* of Float16Compression.*derive Louder from"):
        type("Louder", (Float16Compression,), {"compress": nothing, "extract": nothing})
    text = type("Text", (Signs,), {"compress": lambda *_, **__: "text", "extract": nothing})()
    with pytest.raises(ConfigError, match=r"Text.compress returned str: return bytes"):
        text.choose(info())
    wrong = type("Wrong", (Signs,), {"extract": nothing})()
    with pytest.raises(ConfigError, match=r"Wrong.extract returned no tensor of 257 floats"):
        wrong.choose(info())
    grows = type("Grows", (Signs,), {"compress": lambda self, tensor, *_, **__: bytes(int(tensor.abs().sum()) + 9)})()
    with pytest.raises(ConfigError, match=r"Grows.compress made 138 bytes of 257 values and 9 of as many zeros"):
        grows.choose(info())
    unnamed = signs()
    unnamed.table = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"Signs.table is Tensor, which no name can say"):
        unnamed.choose(info())


def test_any_codec_says_its_ratio() -> None:
    """Encoded by raw."""
    assert Float16Compression().estimate_compression_ratio(info()) == 0.5
    assert NoCompression().estimate_compression_ratio(info(0)) == 1.0


@pytest.mark.parametrize("method", ["encode", "decode", "_encode", "encoded_bytes"])
def test_a_codec_of_shoals_that_is_changed_is_refused(method: str) -> None:
    """Its name says the codec that it was derived from, which all peers make anew: the change was ignored."""
    with pytest.raises(ConfigError, match=rf"Mine overrides {method} of Float16Compression, and nothing calls that"):
        type("Mine", (Float16Compression,), {method: lambda *_: None, "__module__": "users"})
    type("Mine", (Float16Compression,), {"choose": lambda *_: None, "__module__": "users"})


class ByKey(AdaptiveCompression):
    """Some tensors in 16 bits, as programs for hivemind have it under `AdaptiveCompressionBase`."""

    name = "ByKey"

    def pick(self, info: CompressionInfo) -> CompressionBase:
        return Float16Compression() if info.key == "weight" else NoCompression()


def test_a_choice_of_your_own_is_a_codec() -> None:
    """Its base was not public, though docs/reference/migrating.md named what it does."""
    tensor = torch.randn(8)
    chosen = [ByKey().choose(CompressionInfo.from_tensor(tensor, key=key)) for key in ("weight", "bias")]
    assert chosen == [Float16Compression(), NoCompression()]
    assert ByKey() == ByKey() != Float16Compression()
