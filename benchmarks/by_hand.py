"""A round without its network: what happens to one tile, on all vectors, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from shoal.averaging.allreduce.vector import TileDigests, Vector
from shoal.layout import Tile
from shoal.protocol.wire import Held

__all__ = ["average_tile"]


def average_tile(
    vectors: Sequence[Vector], weights: Sequence[float], tile: Tile, reducer: int, digests: TileDigests, number: int = 0
) -> Held:
    """The reducer averages a tile from all vectors, and all get its bytes. Nothing is settled.

    Args:
        vectors: of equal layout, copied in.
        weights: one for each.
        tile: which.
        reducer: the vector that it is averaged in.
        digests: of the round.
        number: the tile's.

    Returns:
        The average, with its digest.
    """
    made = vectors[reducer]
    made.begin_sum(tile, weights[reducer])
    for peer, vector in enumerate(vectors):
        if peer != reducer:
            data = memoryview(bytearray(vector.contribution(tile)))
            assert data.nbytes == made.encoded_bytes(tile), "a contribution has another size than the reducer expects"
            made.add(tile, made.decoded(tile, data, weights[peer]), weights[peer])
    held = Held(number, 0, b"", sum(weights), b"")
    held = replace(held, digest=digests.of(held, made.finish(tile, held.weight)))
    wire = made.average_bytes(tile, held, digests)
    assert wire is not None, "the reducer of an average can give it"
    assert digests.of(held, wire) == held.digest, "the reducer gives what it has hashed"
    for peer, vector in enumerate(vectors):
        if peer != reducer:
            landing = vector.landing(tile)
            place = memoryview(bytearray(memoryview(wire).nbytes)) if landing is None else landing
            place[:] = memoryview(wire).cast("B")
            vector.land(tile, place)
    return held
