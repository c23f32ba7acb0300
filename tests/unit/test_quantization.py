"""Codecs with scales and codebooks: what exactly they write, how exact they are, and what chooses among codecs."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
import torch

from shoal.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    Quantile8BitQuantization,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)
from shoal.compression.blockwise import _FARTHEST, _LEVELS
from shoal.errors import ConfigError, LocalError

COUNT = 1 << 17
SHARING = (
    *(ScaledFloat16Compression(), Uniform8BitQuantization(), Quantile8BitQuantization()),
    *(BlockwiseQuantization(), BlockwiseQuantization(4), BlockwiseQuantization(2)),
)
NONE, HALF, BYTE = NoCompression(), Float16Compression(), Uniform8BitQuantization()


def normal(count: int = COUNT) -> torch.Tensor:
    """Normally distributed values, the same each time."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def through(codec: CompressionBase, values: torch.Tensor) -> torch.Tensor:
    """Encoded and decoded."""
    return codec.decode(codec.encode(values), values.numel(), values.dtype).view(values.shape)


def rms(codec: CompressionBase, values: torch.Tensor) -> float:
    """Root of the mean squared error, relative to that of the values."""
    error = (through(codec, values) - values).double()
    return float(error.square().mean().sqrt() / values.double().square().mean().sqrt())


# ------------------------------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize(
    ("codec", "on_normal", "on_heavy_tails"),
    [
        (Float16Compression(), 0.0003, 0.0003),
        (ScaledFloat16Compression(), 0.0003, 0.0003),
        (BFloat16Compression(), 0.002, 0.002),
        (Uniform8BitQuantization(), 0.012, 0.06),
        (Quantile8BitQuantization(), 0.007, 0.015),
        (BlockwiseQuantization(), 0.007, 0.02),
        (BlockwiseQuantization(8, 1024), 0.009, 0.06),
        (BlockwiseQuantization(4), 0.1, 0.13),
        (BlockwiseQuantization(2), 0.38, 0.37),
    ],
    ids=repr,
)
def test_how_exact_it_is(codec: CompressionBase, on_normal: float, on_heavy_tails: float) -> None:
    """The root of the mean squared error, on normal data and on normal data to the third power."""
    assert rms(codec, normal()) < on_normal
    assert rms(codec, normal() ** 3) < on_heavy_tails


@pytest.mark.parametrize("codec", SHARING)
def test_errors_have_no_direction(codec: CompressionBase) -> None:
    """Errors cancel in the mean of many members: their own mean is far below their size."""
    error = (through(codec, normal()) - normal()).double()
    assert abs(error.mean()) < 0.02 * error.square().mean().sqrt()


def test_an_outlier_spoils_its_block_and_no_other() -> None:
    """One value of 10,000 among normal ones: elsewhere the blocks are as exact as without it."""
    values = normal(6400)
    values[100] = 1e4
    for bits, most in ((8, 0.02), (4, 0.5), (2, 2.0)):
        codec = BlockwiseQuantization(bits)
        error = (through(codec, values) - values).abs()
        error[64:128] = 0.0
        assert error.max() < most
        assert through(codec, values)[100] == pytest.approx(1e4, rel=0.005)


def test_quantiles_keep_an_outlier_and_what_is_around_it() -> None:
    """Hivemind's codebook of equal quantiles is off by 9747 here. This one has the outlier, and levels for the rest."""
    values = normal(10_000)
    values[1234] = 1e4
    error = (through(Quantile8BitQuantization(), values) - values).abs()
    assert error[1234] == 0.0
    assert error.median() < 0.01


def test_scaled_float16_keeps_any_size_and_what_values_have_in_common() -> None:
    """Too small or too large for float16, or close together and far from 0: still 11 bits."""
    for values in (normal() * 1e-12, normal() * 1e30):
        assert rms(ScaledFloat16Compression(), values) < 0.0003
    near = 1000 + normal()
    assert float((through(ScaledFloat16Compression(), near) - near).abs().max()) < 0.002
    assert float((through(HALF, near) - near).abs().max()) > 0.2


def test_the_bound_of_quantiles_is_no_more_than_it_must_be() -> None:
    """A few values between the common ones and the largest, where only every fourth level is: near the bound."""
    values = normal() * 1e-3
    values[::2000] = torch.rand(66, generator=torch.Generator().manual_seed(1))
    error = float((through(Quantile8BitQuantization(), values) - values).abs().max())
    reach = float(values.max() - values.min())
    assert reach / 150 < error < reach / 85 < Quantile8BitQuantization().max_error(values) < reach / 80


def test_quantiles_see_what_is_close_together_and_far_from_zero() -> None:
    """The table that finds the nearest level is finest at the median, not at 0."""
    values = 1000 + normal()
    assert rms(Quantile8BitQuantization(), values) < 0.007 / 1000


def test_values_of_one_sign_get_all_codes() -> None:
    """Second moments and what comes out of a ReLU are twice as exact, negative ones too."""
    values = normal().square()
    for sign in (1, -1):
        assert BYTE.max_error(sign * values) == pytest.approx(float(values.max()) / 510, rel=1e-3)
        assert bool(((through(BYTE, sign * values) - sign * values).abs() <= BYTE.error_bound(values)).all())


# ------------------------------------------------------------------------------------------------------ what is written


def test_uniform_writes_a_step_and_signed_or_unsigned_codes() -> None:
    """Three bytes of a float32 with a mark in them, and a code for each element; less 128 where all have one sign."""
    both, positive, negative = [1.0, -127.0, 63.0, 0.0], [255.0, 0.0, 7.0, -0.9], [-255.0, 0.0, -7.0, 0.9]
    assert bytes(BYTE.encode(torch.tensor(both))) == struct.pack("<f4b", 1.0, 1, -127, 63, 0)[1:]
    assert bytes(BYTE.encode(torch.tensor(positive))) == b"\x01" + struct.pack("<f4b", 1.0, 127, -128, -121, -128)[2:]
    assert bytes(BYTE.encode(torch.tensor(negative))) == b"\x01" + struct.pack("<f4b", -1.0, 127, -128, -121, -128)[2:]


def test_blockwise_writes_scales_and_codes() -> None:
    """A bfloat16 for each block, then bytes, or half bytes with the first element low."""
    values = torch.tensor([127.0, -127.0, 5.0, 0.0] + [0.0] * 12 + [254.0, 2.0, 1.9])
    scales = struct.pack("<HH", 0x3F80, 0x4000)
    eight = bytes(BlockwiseQuantization(8, 16).encode(values))
    assert eight == scales + struct.pack("<19b", 127, -127, 5, 0, *[0] * 12, 127, 1, 1)
    four = bytes(BlockwiseQuantization(4, 16).encode(values))
    assert four == scales + bytes([0x0F, 0x78, *[0x77] * 6, 0x7F, 0x77])


def test_two_bits_write_scales_with_the_sign_of_the_farthest_value() -> None:
    """Which takes the last code; the first element is lowest in its byte, and codes after the last one stand for 0."""
    values = torch.tensor([127.0, -127.0, 50.0, 24.0] + [0.0] * 12 + [-254.0, 252.0, 100.0, -101.0, 51.0])
    data = bytes(BlockwiseQuantization(2, 16).encode(values))
    codes = bytes([0b01_10_00_11, *[0b01_01_01_01] * 3, 0b10_00_00_11, 0b01_01_01_00])
    assert data == struct.pack("<HH", 0x3F80, 0xC000) + codes
    decoded = BlockwiseQuantization(2, 16).decode(data, 21, torch.float32).tolist()
    assert decoded == [127.0, -50.0, 50.0, 0.0] + [0.0] * 12 + [-254.0, 100.0, 100.0, -100.0, 100.0]


def test_decoding_rounds_nowhere() -> None:
    """Step times code is exact, so that no processor can come to another result."""
    values = normal(1000) * 1.2345
    uniform = BYTE.encode(values)
    (step,) = struct.unpack("<f", b"\0" + bytes(uniform[:3]))
    codes = torch.frombuffer(bytearray(uniform[3:]), dtype=torch.int8)
    assert torch.equal(BYTE.decode(uniform, 1000, torch.float32).double(), codes.double() * step)
    blockwise = BlockwiseQuantization(8, 256).encode(values)
    scales = torch.frombuffer(bytearray(blockwise[:8]), dtype=torch.bfloat16).double().repeat_interleave(256)[:1000]
    codes = torch.frombuffer(bytearray(blockwise[8:]), dtype=torch.int8)
    decoded = BlockwiseQuantization(8, 256).decode(blockwise, 1000, torch.float32)
    assert torch.equal(decoded.double(), codes.double() * scales)


def test_bfloat16_is_encoded_again_to_the_same_bytes_whatever_it_holds() -> None:
    """Under each of the 128 significands of the largest value, all smaller numbers, in one sign and in both."""
    numbers = torch.arange(0x3800, 0x4080, dtype=torch.int16).view(torch.bfloat16)  # 2^-15 to 4, not with it
    for top in numbers[numbers >= 2]:
        below = numbers[numbers <= top]
        for values in (below, -below, torch.cat([below, -below[::3]]), torch.cat([below[-5:], -below])):
            for codec in (BYTE, *(BlockwiseQuantization(bits, 4096) for bits in (8, 4, 2))):
                data, again = codec.encode(values), torch.empty_like(values)
                codec.decode_into(data, torch.bfloat16, again)
                assert bytes(codec.encode(again)) == bytes(data)


def test_what_is_not_called_idempotent_is_not() -> None:
    """The second encoding is another one: whoever needs the first has to keep it."""
    for codec, values in (
        (ScaledFloat16Compression(), torch.linspace(-1.99999, 1.99999, 100)),
        (Quantile8BitQuantization(), normal(1000)),
        (BlockwiseQuantization(4, 16), (normal(100_000) * 2e-7).half()),
        (BlockwiseQuantization(2, 16), (normal(100_000) * 4e-8).half()),
    ):
        data, again = codec.encode(values), torch.empty_like(values)
        codec.decode_into(data, values.dtype, again)
        assert not codec.idempotent(values.dtype)
        assert bytes(codec.encode(again)) != bytes(data)


@pytest.mark.parametrize("bits", [4, 2])
def test_four_and_two_bits_take_the_nearest_level(bits: int) -> None:
    """Every value goes to the level that is nearest, but for a tie of one step in the middle of an even gap."""
    levels = torch.tensor(_LEVELS[bits], dtype=torch.float32)
    gaps = [b - a for a, b in pairwise(_LEVELS[bits])]
    assert max(max(gaps) / 2, 127 + _LEVELS[bits][0]) == _FARTHEST[bits]
    values = torch.cat([torch.linspace(-127, 127, 4095), torch.tensor([127.0])])
    decoded = through(BlockwiseQuantization(bits, 4096), values)
    distances = (values[:, None] - levels).abs()
    assert bool((distances.min(dim=1).values + 1.0 >= (values - decoded).abs()).all())
    assert set(decoded.tolist()) == set(levels.tolist())
    assert int((distances.min(dim=1).values < (values - decoded).abs()).sum()) < 16 * sum(gap % 2 == 0 for gap in gaps)


INFINITE, WIDE_INFINITE = struct.pack("<H", 0x7F80), struct.pack("<f", math.inf)


@pytest.mark.parametrize(
    ("codec", "header", "trailer"),
    [
        (ScaledFloat16Compression(), b"", WIDE_INFINITE + b"\x7f"),
        (ScaledFloat16Compression(), b"", bytes(4) + b"\xff"),
        (BYTE, WIDE_INFINITE[1:], b""),
        (Quantile8BitQuantization(), WIDE_INFINITE * 256 + bytes(4) + b"\x7f", b""),
        (Quantile8BitQuantization(), bytes(1024) + WIDE_INFINITE + b"\x7f", b""),
        (Quantile8BitQuantization(), bytes(1024) + bytes(4) + b"\xff", b""),
        (BlockwiseQuantization(), INFINITE * 8, b""),
        (BlockwiseQuantization(4), INFINITE * 8, b""),
        (BlockwiseQuantization(2), INFINITE * 8, b""),
    ],
    ids=repr,
)
def test_what_a_hostile_header_says_is_seen(codec: CompressionBase, header: bytes, trailer: bytes) -> None:
    """Scales, centers and codebooks of infinity or NaN decode to what is not finite."""
    size = codec.encoded_bytes(500, torch.float32)
    codes = size - len(header) - len(trailer)
    for data in (header + b"\x03" * codes + trailer, header + bytes(codes) + trailer, b"\xff" * size):
        assert not bool(torch.isfinite(codec.decode(data, 500, torch.float32)).any())


def test_a_step_beyond_the_range_of_half_precision_is_cut() -> None:
    """The largest float16, rounded up with its step, would be infinite."""
    values = torch.full((4096,), 65504.0, dtype=torch.float16)
    for codec in (BYTE, *map(BlockwiseQuantization, (8, 4, 2))):
        back = torch.empty_like(values)
        codec.decode_into(codec.encode(values), torch.float16, back)
        assert torch.equal(back, values)


@pytest.mark.parametrize(("bits", "block_size"), [(5, 64), (8, 0), (8, 8), (8, 63), (8, 1 << 17), (4, -64)])
def test_blockwise_names_the_wrong_argument(bits: int, block_size: int) -> None:
    """And says what is possible."""
    with pytest.raises(ConfigError, match=r"bits=5.*8, 4 and 2" if bits == 5 else rf"block_size={block_size} .*16"):
        BlockwiseQuantization(bits, block_size)


# --------------------------------------------------------------------------------------------------------- what chooses


def info(numel: int = 20, key: str | int | None = None, role: TensorRole = TensorRole.UNSPECIFIED) -> CompressionInfo:
    """Of a float32 tensor."""
    return CompressionInfo.from_tensor(torch.zeros(numel), key, role)


def test_size_adaptive_chooses_by_the_number_of_elements() -> None:
    """Fewer than the threshold, or as many and more."""
    codec = SizeAdaptiveCompression(threshold=20, less=HALF, greater_equal=BYTE)
    assert [codec.choose(info(numel)) for numel in (0, 19, 20, 21)] == [HALF, HALF, BYTE, BYTE]


def test_role_adaptive_chooses_by_role() -> None:
    """What has no codec of its own gets the default, which is none at all."""
    codec = RoleAdaptiveCompression(gradient=BYTE, parameter=HALF)
    roles = (TensorRole.GRADIENT, TensorRole.PARAMETER, TensorRole.OPTIMIZER, TensorRole.UNSPECIFIED)
    assert [codec.choose(info(role=role)) for role in roles] == [BYTE, HALF, NONE, NONE]
    other = RoleAdaptiveCompression(activation=BYTE, optimizer=NONE, default=HALF)
    roles = (TensorRole.ACTIVATION, TensorRole.OPTIMIZER, TensorRole.UNSPECIFIED, TensorRole.GRADIENT)
    assert [other.choose(info(role=role)) for role in roles] == [BYTE, NONE, HALF, HALF]


def test_per_tensor_chooses_by_key_or_position() -> None:
    """A key without a codec is an error that names it."""
    by_position = PerTensorCompression([HALF, BYTE])
    assert [by_position.choose(info(key=key)) for key in (0, 1)] == [HALF, BYTE]
    by_name = PerTensorCompression({"weight": BYTE, "bias": NONE})
    assert [by_name.choose(info(key=key)) for key in ("weight", "bias")] == [BYTE, NONE]
    for codec, key in ((by_position, 2), (by_position, -1), (by_name, "head"), (by_name, None)):
        with pytest.raises(ConfigError, match=rf"key {key!r}"):
            codec.choose(info(key=key))


def test_what_chooses_may_choose_what_chooses() -> None:
    """And integers stay exact at the end of it."""
    sizes = SizeAdaptiveCompression(100, NONE, BlockwiseQuantization(4))
    codec = RoleAdaptiveCompression(gradient=sizes, default=PerTensorCompression({"x": HALF}))
    assert codec.choose(info(100, role=TensorRole.GRADIENT)) == BlockwiseQuantization(4)
    assert codec.choose(info(99, role=TensorRole.GRADIENT)) == NONE
    assert codec.choose(info(key="x")) == HALF
    steps = CompressionInfo.from_tensor(torch.zeros(1000, dtype=torch.int64), role=TensorRole.GRADIENT)
    assert codec.choose(steps) == NONE


def test_what_chooses_says_all_that_it_does_and_encodes_nothing() -> None:
    """Equal if they choose alike; whoever forgets to choose is told."""
    codecs = [
        SizeAdaptiveCompression(10, HALF, BYTE),
        SizeAdaptiveCompression(11, HALF, BYTE),
        RoleAdaptiveCompression(gradient=HALF),
        RoleAdaptiveCompression(gradient=HALF, default=BYTE),
        PerTensorCompression([HALF]),
        PerTensorCompression({"0": HALF}),
    ]
    assert len({repr(codec) for codec in codecs}) == len(set(codecs)) == len(codecs)
    assert SizeAdaptiveCompression(10, Float16Compression(), Uniform8BitQuantization()) == codecs[0]
    for codec in codecs:
        for misuse in (codec.encode, codec.error_bound):
            with pytest.raises(LocalError, match="choose"):
                misuse(torch.zeros(3))
        for misused in (codec.supports, codec.idempotent):
            with pytest.raises(LocalError, match="choose"):
                misused(torch.float32)
        with pytest.raises(LocalError, match="choose"):
            codec.decode(bytearray(4), 1, torch.float32)


def test_wrong_arguments_are_named() -> None:
    """A number or a class where a codec belongs, a threshold that is none."""
    with pytest.raises(ConfigError, match="threshold=-1"):
        SizeAdaptiveCompression(-1, HALF, HALF)
    with pytest.raises(ConfigError, match="greater_equal is ABCMeta"):
        SizeAdaptiveCompression(1, HALF, Float16Compression)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gradient is int"):
        RoleAdaptiveCompression(gradient=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="default is str"):
        RoleAdaptiveCompression(default="none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tensor_compressions\['w'\] is NoneType"):
        PerTensorCompression({"w": None})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="Uniform8BitQuantization: give a sequence"):
        PerTensorCompression(BYTE)  # type: ignore[arg-type]


def test_steps_of_the_smallest_and_the_largest_values() -> None:
    """Subnormal numbers become 0, and the largest float32 does not become infinite."""
    for codec in SHARING:
        tiny = torch.full((1000,), 1e-45)
        assert bool(torch.isfinite(through(codec, tiny)).all())
        largest = torch.finfo(torch.float32).max
        huge = torch.tensor([largest, -largest, 0.0] * 400)
        for values in (huge, huge.abs(), -huge.abs(), torch.full((1000,), largest)):
            assert math.isfinite(codec.max_error(values))
            back = through(codec, values)
            assert bool(torch.isfinite(back).all())
            # Two bits have but one level for values of the sign that the largest has not.
            assert (values is huge and codec == BlockwiseQuantization(2)) or torch.allclose(back, values, rtol=2**-7)
