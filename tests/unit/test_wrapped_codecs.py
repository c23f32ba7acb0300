"""Error feedback and differences as codecs: what they are chosen for, and what may be within what."""

from __future__ import annotations

import pytest
import torch

from shoal.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Differences,
    ErrorFeedback,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorRole,
    TopKCompression,
    Uniform8BitQuantization,
    codec_by_name,
    for_parameters,
)
from shoal.errors import ConfigError
from shoal.runtime.arguments import choose_codecs


def test_feedback_is_for_what_loses_something() -> None:
    """Integers and small tensors that are sent as they are get none; what another codec chooses gets it."""
    codec = ErrorFeedback(SizeAdaptiveCompression(100, NoCompression(), BlockwiseQuantization(bits=4)))
    for tensor, name in (
        (torch.zeros(99), "none"),
        (torch.zeros(100), "feedback:blockwise:4:64"),
        (torch.zeros(100, dtype=torch.int64), "none"),
    ):
        chosen = codec.choose(CompressionInfo.from_tensor(tensor))
        assert chosen.name == name
        assert codec_by_name(name) == chosen


def test_feedback_of_feedback_is_refused() -> None:
    """Once is all that there is."""
    with pytest.raises(ConfigError, match="give ErrorFeedback a codec such as"):
        ErrorFeedback(ErrorFeedback(TopKCompression()))
    with pytest.raises(ConfigError, match="give ErrorFeedback a codec such as"):
        ErrorFeedback("topk")  # type: ignore[arg-type]


def test_feedback_is_of_differences_and_not_the_other_way_round() -> None:
    """One order, so that equal codecs have equal names."""
    codec = Differences(ErrorFeedback(TopKCompression()))
    assert codec.name == "difference:feedback:topk:0.01"
    assert codec_by_name(codec.name) == codec
    for wrong in (lambda: ErrorFeedback(Differences(TopKCompression())), lambda: Differences(codec)):
        with pytest.raises(ConfigError, match="a codec such as"):
            wrong()


@pytest.mark.parametrize(
    ("codec", "dtype", "name"),
    [
        (NoCompression(), torch.float32, "none"),
        (Float16Compression(), torch.float32, "difference:scaled_float16"),
        (Float16Compression(), torch.float64, "difference:scaled_float16"),
        (Float16Compression(), torch.float16, "float16"),
        (Float16Compression(), torch.bfloat16, "difference:scaled_float16"),
        (BFloat16Compression(), torch.float32, "difference:bfloat16"),
        (BFloat16Compression(), torch.bfloat16, "bfloat16"),
        (BFloat16Compression(), torch.float16, "bfloat16"),
        (ScaledFloat16Compression(), torch.float32, "difference:scaled_float16"),
        (ScaledFloat16Compression(), torch.bfloat16, "scaled_float16"),
        (ErrorFeedback(Float16Compression()), torch.float32, "difference:feedback:float16"),
        (Uniform8BitQuantization(), torch.float32, "difference:uniform8bit"),
        (Uniform8BitQuantization(), torch.bfloat16, "difference:uniform8bit"),
        (Quantile8BitQuantization(), torch.float16, "difference:quantile8bit"),
        (BlockwiseQuantization(block_size=16), torch.float32, "difference:blockwise:8:16"),
        (ErrorFeedback(BlockwiseQuantization(bits=4)), torch.float32, "difference:feedback:blockwise:4:64"),
        (Differences(TopKCompression()), torch.float32, "difference:topk:0.01"),
        (TopKCompression(0.5), torch.float32, "difference:topk:0.5"),
    ],
)
def test_parameters_are_sent_as_differences_unless_the_codec_is_exact(
    codec: CompressionBase, dtype: torch.dtype, name: str
) -> None:
    """16 bits round small updates away too, where the tensor has more."""
    assert for_parameters(codec, dtype).name == name


def test_the_role_of_a_tensor_decides() -> None:
    """Parameters as differences; gradients, and tensors of no role, as they are."""
    tensors = [torch.zeros(100), torch.zeros(100), torch.zeros(100)]
    roles = [TensorRole.PARAMETER, TensorRole.GRADIENT, TensorRole.UNSPECIFIED]
    infos = [
        CompressionInfo.from_tensor(tensor, i, role)
        for i, (tensor, role) in enumerate(zip(tensors, roles, strict=True))
    ]
    codecs = choose_codecs(tensors, Uniform8BitQuantization(), infos)
    assert [codec.name for codec in codecs] == ["difference:uniform8bit", "uniform8bit", "uniform8bit"]


def test_a_parameter_of_a_module_needs_no_description() -> None:
    """Where no infos are given, `nn.Parameter` says what it is, and nothing is known of other tensors."""
    tensors = [torch.nn.Parameter(torch.zeros(100)), torch.zeros(100)]
    assert [codec.name for codec in choose_codecs(tensors, Uniform8BitQuantization(), None)] == [
        "difference:uniform8bit",
        "uniform8bit",
    ]
