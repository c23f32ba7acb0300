"""A round without its network: what happens to one part, on all vectors, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from shoal.averaging.allreduce.partition import Part
from shoal.averaging.allreduce.vector import PartDigests, Vector
from shoal.protocol.wire import Held

__all__ = ["average_part"]


def average_part(
    vectors: Sequence[Vector], weights: Sequence[float], part: Part, reducer: int, digests: PartDigests
) -> Held:
    """The reducer averages a part from all vectors, and all get its bytes. Nothing is settled.

    Args:
        vectors: of equal layout, copied in.
        weights: one for each.
        part: which.
        reducer: the vector that it is averaged in.
        digests: of the round.

    Returns:
        The average, with its digest.
    """
    made = vectors[reducer]
    made.begin_sum(part, weights[reducer])
    for peer, vector in enumerate(vectors):
        if peer != reducer:
            data = memoryview(bytearray(vector.contribution(part)))
            assert data.nbytes == made.encoded_bytes(part), "a contribution has another size than the reducer expects"
            made.add(part, made.decoded(part, data, weights[peer]), weights[peer])
    held = Held(part.number, 0, b"", sum(weights), b"")
    held = replace(held, digest=digests.of(held, made.finish(part, held.weight)))
    wire = made.average_bytes(part, held, digests)
    assert wire is not None, "the reducer of an average can give it"
    assert digests.of(held, wire) == held.digest, "the reducer gives what it has hashed"
    for peer, vector in enumerate(vectors):
        if peer != reducer:
            landing = vector.landing(part)
            place = memoryview(bytearray(memoryview(wire).nbytes)) if landing is None else landing
            place[:] = memoryview(wire).cast("B")
            vector.land(part, place)
    return held
