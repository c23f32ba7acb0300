"""Flat copies, sums, averages: each step of a round by itself, without a network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from benchmarks.by_hand import average_tile
from shoal.averaging.allreduce.interface import MAX_WEIGHT, MIN_WEIGHT, is_weight
from shoal.averaging.allreduce.segments import SegmentBuffers
from shoal.averaging.allreduce.vector import TileDigests, Vector, _same_bits, describe
from shoal.compression import CompressionBase, Float16Compression, NoCompression
from shoal.errors import ConfigError, PeerProtocolError
from shoal.layout import Tile
from shoal.protocol.wire import Held
from tests.codecs import CODECS

DIGESTS = TileDigests(b"r" * 16)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PLAIN, HALF = NoCompression(), Float16Compression()


def vector_of(tensors: Sequence[torch.Tensor], codec: CompressionBase = PLAIN) -> Vector:
    """A vector over these."""
    return Vector(tensors, describe(tensors, [codec] * len(tensors)))


def tiles_of(vector: Vector, tile_bytes: int = 1024) -> list[Tile]:
    """All of it, one reducer."""
    return list(vector.layout.tiling([vector.layout.numel], tile_bytes).tiles)


def segment_of(vector: Vector) -> SegmentBuffers:
    """Its only segment."""
    (found,) = vector._segments.values()
    return found


def average(vectors: Sequence[Vector], weights: Sequence[float], tile_bytes: int = 1024) -> list[Held]:
    """What a round does, without the network: the first vector owns every tile. Returns the averages' names."""
    return [
        average_tile(vectors, weights, tile, 0, DIGESTS, number)
        for number, tile in enumerate(tiles_of(vectors[0], tile_bytes))
    ]


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------------------------------------------------- describe


def test_tensors_are_described() -> None:
    """Shapes, dtypes and codecs in order; elements take on the wire what the codec says."""
    tensors = [torch.zeros(2, 3), torch.tensor(1.0, dtype=torch.float64), torch.zeros(0), torch.zeros(5)]
    layout = describe(tensors, [PLAIN, PLAIN, HALF, HALF])
    assert [(spec.shape, spec.dtype, spec.codec) for spec in layout.specs] == [
        ((2, 3), "float32", "none"),
        ((), "float64", "none"),
        ((0,), "float32", "float16"),
        ((5,), "float32", "float16"),
    ]
    assert [(segment.dtype, segment.codec) for segment in layout.segments] == [
        ("float32", "none"),
        ("float64", "none"),
        ("float32", "float16"),
    ]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_whoever_holds_an_average_gives_the_bytes_that_the_reducer_sent(codec: CompressionBase) -> None:
    """Encoded again, or kept: the digest is the same, and so are the values of all."""
    generator = torch.Generator().manual_seed(3)
    reducer, other = (vector_of([torch.randn(5000, generator=generator)], codec) for _ in range(2))
    for vector in (reducer, other):
        vector.copy_in()
    averages = average([reducer, other], [1.0, 2.0], tile_bytes=4096)
    for tile, held in zip(tiles_of(reducer, 4096), averages, strict=True):
        given = other.ready_bytes(tile) or other.average_bytes(tile, held, DIGESTS)
        assert given is not None
        assert DIGESTS.of(held, given) == held.digest
    for vector in (reducer, other):
        vector.apply(1.0)
    assert torch.equal(reducer.tensors[0], other.tensors[0])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_reducer_that_was_replaced_gives_the_average_of_its_successor(codec: CompressionBase) -> None:
    """It had averaged the tile itself, under an older attempt: those bytes are void."""
    generator = torch.Generator().manual_seed(4)
    first, successor = (vector_of([torch.randn(700, generator=generator)], codec) for _ in range(2))
    for vector in (first, successor):
        vector.copy_in()
    [tile] = tiles_of(first, 4096)
    old = average([first], [1.0], tile_bytes=4096)
    [new] = average([successor, first], [1.0, 1.0], tile_bytes=4096)
    assert new.digest != old[0].digest
    given = first.ready_bytes(tile) or first.average_bytes(tile, new, DIGESTS)
    assert given is not None
    assert DIGESTS.of(new, given) == new.digest


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ([1.0, 2.0], "list, not a torch.Tensor"),
        (torch.zeros(2, dtype=torch.int64), "only float64, float32, float16 and bfloat16"),
        (torch.zeros(2, dtype=torch.bool), "only float64"),
        (torch.zeros(2, dtype=torch.complex64), "only float64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "only float64"),
        (torch.zeros(2).to_sparse(), "sparse or on the meta device"),
        (torch.zeros(2, device="meta"), "sparse or on the meta device"),
    ],
)
def test_what_cannot_be_averaged_is_named(tensor: object, reason: str) -> None:
    """The position in `averaged_tensors`, and why."""
    with pytest.raises(ConfigError, match=r"averaged_tensors\[1\].*" + reason):
        describe([torch.zeros(1), tensor], [PLAIN, PLAIN])  # type: ignore[list-item]


# -------------------------------------------------------------------------------------------------------------- copy in


@pytest.mark.parametrize("numel", [0, 1, 8])
def test_a_tensor_that_was_resized_is_named(numel: int) -> None:
    """It raised an error of torch, and with one element its value was taken for all."""
    vector = vector_of([torch.ones(2), torch.ones(4)])
    vector.tensors[1].resize_(numel)
    with pytest.raises(ConfigError, match=rf"averaged_tensors\[1\] has {numel} elements now, and had 4"):
        vector.copy_in()


def test_copies_are_copies() -> None:
    """What the user does to the tensors after `copy_in` does not show, and nothing of the round shows in them."""
    tensor = values(1, 100)
    before = tensor.clone()
    vector = vector_of([tensor])
    assert vector.copy_in() is None
    tensor.mul_(2)
    [tile] = tiles_of(vector)
    assert bytes(vector.contribution(tile)) == before.numpy().tobytes()
    vector.begin_sum(tile, 3.0)
    vector.finish(tile, 3.0)
    torch.testing.assert_close(tensor, before * 2, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_strides_and_gradients_do_not_matter(dtype: torch.dtype) -> None:
    """Transposed, sliced, expanded, scalar, empty, parameters: read and written element by element."""
    base = values(2, 12, 10, dtype=dtype)
    tensors = [
        base.clone().T,
        base.clone()[::3, 1:9:2],
        torch.nn.Parameter(base.clone()[:, :1].clone()),
        torch.tensor(1.5, dtype=dtype),
        torch.zeros(3, 0, dtype=dtype),
        base.clone().reshape(2, 6, 10).permute(2, 0, 1),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    vector = vector_of(tensors)
    assert vector.copy_in(scale=0.5) is None
    average([vector], [1.0])
    vector.overwrite()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), old * 0.5)
    assert vector.copy_in(scale=3.0) is None
    average([vector], [1.0])
    vector.apply(1.0)  # what was copied in is the average: there is nothing to move by
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), old * 0.5)
    assert isinstance(tensors[2], torch.nn.Parameter)
    assert tensors[2].requires_grad
    assert tensors[2].grad is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_found(dtype: torch.dtype, bad: float) -> None:
    """Anywhere: the first tensor that has one is named; the others are copied all the same."""
    for place in (0, 500, 999):
        tensors = [torch.zeros(3, dtype=dtype), torch.zeros(0, dtype=dtype), torch.zeros(10, 100, dtype=dtype)]
        vector = vector_of(tensors)
        assert vector.copy_in() is None
        tensors[2].view(-1)[place] = bad
        assert vector.copy_in() == 2
        tensors[0][1] = bad
        assert vector.copy_in() == 0
        tensors[0][1] = 0.0
        tensors[2].view(-1)[place] = 1.0
        assert vector.copy_in() is None


def test_values_that_are_too_large_to_be_summed_are_found() -> None:
    """Finite, but times the weight, in a group of 256, beyond what float32 holds; float64 holds more."""
    large = vector_of([torch.tensor([1.0, -1e35])])
    assert large.copy_in() is None
    assert large.copy_in(weight=5.0) is None
    assert large.copy_in(weight=100.0) == 0
    assert large.copy_in(scale=1e5) == 0
    assert vector_of([torch.tensor([1e300], dtype=torch.float64)]).copy_in(weight=1e4) is None
    assert vector_of([torch.tensor([1e300], dtype=torch.float64)]).copy_in(weight=1e6) == 0
    assert vector_of([torch.tensor([65504.0], dtype=torch.float16)]).copy_in(weight=MAX_WEIGHT) is None


def test_weights_are_zero_or_within_limits() -> None:
    """What the sums can be exact with."""
    assert all(is_weight(weight) for weight in (0, 0.0, MIN_WEIGHT, 1, 1e6, MAX_WEIGHT))
    assert not any(
        is_weight(weight) for weight in (-1.0, math.nan, math.inf, -math.inf, 1e-300, MIN_WEIGHT / 2, MAX_WEIGHT * 2)
    )


# ----------------------------------------------------------------------------------------------------------- averaging


@pytest.mark.parametrize("codec", [PLAIN, HALF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_members_end_with_the_same_bits(dtype: torch.dtype, codec: CompressionBase) -> None:
    """The reducer uses the encoded average like everybody else, lossy or not."""
    vectors = [
        vector_of([values(seed, 900, dtype=dtype), values(seed + 50, 33, dtype=dtype)], codec) for seed in (1, 2, 3)
    ]
    for vector in vectors:
        assert vector.copy_in() is None
    average(vectors, [1.0, 2.0, 4.5])
    for vector in vectors:
        vector.overwrite()
    for other in vectors[1:]:
        for mine, theirs in zip(vectors[0].tensors, other.tensors, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("codec", [PLAIN, HALF])
def test_contributions_that_are_not_finite_are_refused(codec: CompressionBase, bad: float) -> None:
    """Before they are added: the sum stays what it was."""
    mine, theirs = vector_of([torch.ones(10)], codec), vector_of([torch.ones(10)], codec)
    mine.copy_in()
    theirs.tensors[0][3] = bad
    assert theirs.copy_in() == 0
    [tile] = tiles_of(mine)
    mine.begin_sum(tile, 1.0)
    with pytest.raises(PeerProtocolError, match="not finite"):
        mine.decoded(tile, memoryview(bytearray(theirs.contribution(tile))), 1.0)
    mine.finish(tile, 1.0)
    mine.overwrite()
    assert torch.equal(mine.tensors[0], torch.ones(10))


def test_contributions_that_would_overflow_the_sum_are_refused() -> None:
    """A large finite value with a large weight: the average of the others stays finite."""
    mine = vector_of([torch.ones(10)])
    mine.copy_in()
    [tile] = tiles_of(mine)
    theirs = memoryview(bytearray(torch.full((10,), 3e38).numpy().tobytes()))
    with pytest.raises(PeerProtocolError, match="too large"):
        mine.decoded(tile, theirs, 1.0)
    theirs = memoryview(bytearray(torch.full((10,), 1e30).numpy().tobytes()))
    assert mine.decoded(tile, theirs, 1.0)[0] == 1e30
    with pytest.raises(PeerProtocolError, match="too large"):
        mine.decoded(tile, theirs, 1e12)


@pytest.mark.parametrize("codec", [PLAIN, HALF])
def test_averages_that_are_not_finite_are_refused(codec: CompressionBase) -> None:
    """The peer that averaged them is at fault."""
    vector = vector_of([torch.ones(10)], codec)
    vector.copy_in()
    [tile] = tiles_of(vector)
    landing = vector.landing(tile)
    assert (landing is None) == (codec is HALF)
    place = memoryview(bytearray(vector.encoded_bytes(tile))) if landing is None else landing
    place[:] = b"\xff" * len(place)
    with pytest.raises(PeerProtocolError, match="not finite"):
        vector.land(tile, place)


def test_a_sum_begun_again_forgets_the_first() -> None:
    """A new attempt starts from zero, and the old average is not given any more."""
    vector = vector_of([torch.full((10,), 2.0)])
    vector.copy_in()
    [tile] = tiles_of(vector)
    vector.begin_sum(tile, 5.0)
    vector.begin_sum(tile, 1.0)
    vector.finish(tile, 1.0)
    vector.overwrite()
    assert torch.equal(vector.tensors[0], torch.full((10,), 2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [PLAIN, HALF])
def test_a_member_gives_on_what_it_received(dtype: torch.dtype, codec: CompressionBase) -> None:
    """Encoded again it has the same digest: whoever holds an average can replace its reducer."""
    reducer, other = (vector_of([values(seed, 700, dtype=dtype)], codec) for seed in (1, 2))
    for vector in (reducer, other):
        vector.copy_in()
    averages = average([reducer, other], [1.0, 3.0])
    for tile, held in zip(tiles_of(reducer), averages, strict=True):
        given = other.average_bytes(tile, held, DIGESTS)
        assert given is not None
        assert bytes(given) == bytes(reducer.average_bytes(tile, held, DIGESTS) or b"")
        assert other.average_bytes(tile, replace(held, digest=b"?" * 16), DIGESTS) is None


def test_a_new_round_forgets_the_last_one() -> None:
    """`copy_in` drops sums and encoded averages."""
    vector = vector_of([torch.ones(10)], HALF)
    vector.copy_in()
    [first] = average([vector], [1.0])
    [tile] = tiles_of(vector)
    vector.tensors[0].fill_(3.0)
    vector.copy_in()
    [again] = average([vector], [1.0])
    assert again.digest != first.digest
    assert vector.average_bytes(tile, again, DIGESTS) is not None


# ---------------------------------------------------------------------------------------------------------------- apply


def _averaged(tensor: torch.Tensor, target: torch.Tensor) -> Vector:
    """A vector that copied in `tensor` and holds `target` as the average."""
    vector = vector_of([tensor])
    vector.copy_in()
    for tile in tiles_of(vector):
        landing = vector.landing(tile)
        assert landing is not None
        landing[:] = memoryview(bytearray(target[tile.start : tile.stop].view(torch.uint8).tolist()))
        vector.land(tile, landing)
    return vector


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unchanged_tensor_is_set_to_the_average_bit_by_bit(dtype: torch.dtype) -> None:
    """With alpha 1 no rounding: also where x + (average - x) would not be the average."""
    tensor, target = values(1, 500, dtype=dtype) * 1000, values(2, 500, dtype=dtype) * 1e-3
    _averaged(tensor, target).apply(1.0)
    assert torch.equal(tensor, target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_tensor_is_moved_by_the_difference(dtype: torch.dtype) -> None:
    """What the user did to it meanwhile is kept."""
    tensor, target = values(1, 500, dtype=dtype), values(2, 500, dtype=dtype)
    before = tensor.clone()
    vector = _averaged(tensor, target)
    tensor[7] += 0.5
    changed = tensor.clone()
    vector.apply(1.0)
    wanted = changed.double() + (target.double() - before.double())
    torch.testing.assert_close(tensor.double(), wanted, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.999])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_of_the_way(dtype: torch.dtype, alpha: float) -> None:
    """By `alpha` of the difference between the average and what was copied in."""
    tensor, target = values(1, 500, dtype=dtype), values(2, 500, dtype=dtype)
    before = tensor.clone()
    _averaged(tensor, target).apply(alpha)
    wanted = before.double() + alpha * (target.double() - before.double())
    torch.testing.assert_close(tensor.double(), wanted, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * 4)


def test_one_changed_tensor_does_not_touch_the_others() -> None:
    """Each is judged by itself."""
    tensors = [torch.ones(4), torch.ones(4)]
    vector = vector_of(tensors)
    vector.copy_in()
    for tile in tiles_of(vector):
        landing = vector.landing(tile)
        assert landing is not None
        landing[:] = torch.full((8,), 1 / 3).numpy().tobytes()
        vector.land(tile, landing)
    tensors[1].add_(1.0)
    vector.apply(1.0)
    assert torch.equal(tensors[0], torch.full((4,), 1 / 3))
    torch.testing.assert_close(tensors[1], torch.full((4,), 4 / 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_full_of_nan_takes_the_average(dtype: torch.dtype) -> None:
    """Its own values count nothing; unchanged since copy-in, bit by bit, it is set and not moved."""
    tensor = torch.full((50,), math.nan, dtype=dtype)
    target = values(3, 50, dtype=dtype)
    _averaged(tensor, target).apply(1.0)
    assert torch.equal(tensor, target)


def test_minus_zero_is_a_change() -> None:
    """Bits are compared, not values: 0.0 that became -0.0 was written to."""
    tensor, target = torch.zeros(5), torch.full((5,), 0.1)
    vector = _averaged(tensor, target)
    tensor.neg_()
    vector.apply(1.0)
    torch.testing.assert_close(tensor, target)


def test_a_difference_beyond_float16_does_not_overflow() -> None:
    """From the lowest to the highest value: the way is twice the range of the dtype."""
    tensor = torch.tensor([-65504.0, 65504.0, 0.0], dtype=torch.float16)
    vector = _averaged(tensor, torch.tensor([65504.0, -65504.0, 1.0], dtype=torch.float16))
    vector.apply(0.5)
    assert tensor.tolist() == [0.0, 0.0, 0.5]


def test_overwrite_sets_whatever_they_are() -> None:
    """Changed or not, of any stride."""
    tensor = torch.zeros(10, 5).T
    vector = _averaged(tensor, values(1, 50))
    tensor.fill_(math.nan)
    vector.overwrite()
    assert torch.equal(tensor.reshape(-1), values(1, 50))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_tensors_on_a_gpu() -> None:
    """Copied in, averaged on the host, and written back."""
    tensors = [values(1, 100).cuda(), values(2, 7, dtype=torch.float64), values(3, 10, dtype=torch.bfloat16).cuda()]
    before = [tensor.clone() for tensor in tensors]
    vector = vector_of(tensors)
    assert vector.copy_in(scale=2.0) is None
    average([vector], [1.0])
    vector.overwrite()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old * 2)
    vector.copy_in()
    average([vector], [1.0])
    tensors[0].add_(1.0)
    vector.apply(1.0)
    torch.testing.assert_close(tensors[0], before[0] * 2 + 1.0)
    assert tensors[0].is_cuda


def test_memory_that_is_given_twice_is_refused() -> None:
    """Tied weights, twice in the list: the second would be moved once more, by each member to other values."""
    weight = torch.zeros(4, 6)
    for tensors in ([weight, torch.zeros(2), weight], [weight, weight[1:3]], [weight.view(24), weight]):
        with pytest.raises(ConfigError, match="share memory"):
            vector_of(tensors)
    apart = [weight[:2], weight[2:], torch.zeros(0), torch.zeros(0)]
    assert vector_of(apart).layout.numel == 24
    columns = [weight[:, :3], weight[:, 3:]]
    assert vector_of(columns).layout.numel == 24


def test_a_tied_convolution_in_channels_last_is_not_averaged_twice() -> None:
    """Only contiguous tensors were looked at: peers with 1.0 and 3.0 ended with 3.0 and 1.0."""
    kernel = torch.zeros(4, 3, 3, 3).to(memory_format=torch.channels_last)
    matrix = torch.zeros(4, 6)
    for first, second in [
        (kernel, kernel.detach()),
        (kernel, kernel[1:2]),
        (kernel, kernel.permute(1, 0, 2, 3)),
        (matrix, matrix.t()),
        (matrix.t(), matrix[1]),
        (matrix[:, ::2], matrix[:, 1:3]),
        (matrix[:, ::2], matrix.view(-1)[8:]),
        (matrix, matrix.view(torch.float64)),
        (matrix.view(torch.float16)[:, 3:9:2], matrix[2]),
    ]:
        others = [torch.zeros(2), matrix.new_zeros(3, 3).t()]
        for pair in ([first, second], [second, first]):
            with pytest.raises(ConfigError, match=r"averaged_tensors\[1\] and averaged_tensors\[3\] share memory"):
                vector_of([others[0], pair[0], others[1], pair[1]])


def test_tensors_that_lie_between_one_another_share_nothing() -> None:
    """Columns, every second element, and tensors of two dtypes in one memory."""
    matrix = torch.zeros(6, 6)
    flat = torch.zeros(24)
    for apart in (
        [matrix[:, :3], matrix[:, 3:]],
        [matrix[:, ::2], matrix[:, 1::2].t()],
        [matrix.view(-1)[::2], matrix.view(-1)[1::2]],
        [flat.as_strided((2, 3), (3, 2)), flat[1:2], flat[8:].view(torch.float16)],
        [matrix[:, :2].view(torch.float64), matrix[:, 2:]],
    ):
        assert vector_of(apart).layout.numel == sum(each.numel() for each in apart)


@pytest.mark.parametrize(
    ("tensor", "refused"),
    [
        (torch.zeros(3, 1).expand(3, 4), True),
        (torch.zeros(6).as_strided((3, 3), (1, 1)), True),
        (torch.zeros(0, 1).expand(0, 4), False),
        (torch.zeros(1, 1).expand(1, 1), False),
        (torch.zeros(3, 4).t(), False),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), False),
        (torch.zeros(10)[::2], False),
    ],
)
def test_elements_that_share_memory_cannot_be_averaged(tensor: torch.Tensor, refused: bool) -> None:
    """They could not be set one by one: found when the averager is made, not after a round that succeeded."""
    tensors = [torch.zeros(2), tensor]
    if not refused:
        assert vector_of(tensors).layout.numel == 2 + tensor.numel()
        return
    with pytest.raises(ConfigError, match=r"averaged_tensors\[1\] has elements that share memory"):
        vector_of(tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_whose_elements_lie_apart_was_half_of_an_average(dtype: torch.dtype) -> None:
    """Eight bytes were looked at at a time: an error of torch came when the tensors before it were averages already."""
    column = torch.arange(16, dtype=dtype).view(8, 2)[:, :1]
    assert _same_bits(column, column.reshape(-1).clone())
    other = column.reshape(-1).clone()
    other[3] = 99
    assert not _same_bits(column, other)
