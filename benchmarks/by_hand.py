"""A round without its network: what happens to one part, on all vectors, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.allreduce.partition import Part
from shoal.allreduce.vector import PartDigests, Vector

__all__ = ["average_part"]


def average_part(
    vectors: Sequence[Vector], weights: Sequence[float], part: Part, owner: int, digests: PartDigests
) -> bytes:
    """The owner averages a part from all vectors, and all get its bytes. Nothing is settled.

    Args:
        vectors: of equal layout, copied in.
        weights: one for each.
        part: which.
        owner: the vector that it is averaged in.
        digests: of the round.

    Returns:
        The digest of the average.
    """
    made = vectors[owner]
    made.begin_sum(part, weights[owner])
    for peer, vector in enumerate(vectors):
        if peer != owner:
            data = memoryview(bytearray(vector.contribution(part)))
            assert data.nbytes == made.encoded_bytes(part), "a contribution has another size than the owner expects"
            made.add(part, made.decoded(part, data, weights[peer]), weights[peer])
    digest = made.finish(part, sum(weights), digests)
    wire = made.average_bytes(part, digest, digests)
    assert wire is not None, "the owner of an average can give it"
    assert digests.of(part.number, wire) == digest, "the owner gives what it has hashed"
    for peer, vector in enumerate(vectors):
        if peer != owner:
            landing = vector.landing(part)
            place = memoryview(bytearray(memoryview(wire).nbytes)) if landing is None else landing
            place[:] = memoryview(wire).cast("B")
            vector.land(part, place)
    return digest
