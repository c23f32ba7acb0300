"""Steps of the swarm, in the form in which peers that were not in them get them. No network, no loop.

A step leads from one named state to the next: the average of a round of gradients, or of states, or the mean of a peer
that stepped alone. Its header (`wire.StepTaken`) names both states: the second one follows from the first and the
round's commit, so a peer that has the first can check that it comes to the second. The averages of a round are checked
by the digests of the commit. Averages that only members can decode (differences to an average before) are sent decoded,
and believed like a state that is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shoal.averaging import StepResult
from shoal.averaging.allreduce.interface import Outcome
from shoal.averaging.allreduce.segments import common_reference
from shoal.averaging.allreduce.vector import TileDigests, Vector
from shoal.compression import view_bytes
from shoal.errors import ConfigError, PeerProtocolError
from shoal.protocol.wire import StepTaken, decode, encode
from shoal.run.decide.agreement import Agreement
from shoal.run.decide.state_name import StateName

__all__ = ["Step", "agreement_of", "check", "land", "name_after", "name_before", "of_round", "of_step_alone", "size_of"]

_CHANCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Step:
    """A step with its averages.

    Attributes:
        header: what names it.
        data: the averages, one after another.
    """

    header: StepTaken
    data: bytearray


def of_round(name: StateName, result: StepResult, vector: Vector, agreement: Agreement | None) -> Step | None:
    """A copy of a round's result, before the next round begins; None if peers that were not in it cannot have it.

    Args:
        name: of the state before.
        result: of the round.
        vector: that was averaged.
        agreement: how the step is taken; None if states were averaged.
    """
    raw = bool(vector.reference_name and common_reference(result.outcome.members))
    data = bytearray()
    if raw:
        for view in vector.averages():
            data += view
    else:
        digests = TileDigests(result.round_id)
        tiles = vector.tiling(result.shares, result.tile_bytes).tiles
        for tile, held in zip(tiles, result.outcome.commit.tiles, strict=True):
            wire = vector.average_bytes(tile, held, digests)
            if wire is None:
                return None
            data += wire
    header = StepTaken(
        *name,
        agreement=encode(agreement) if agreement is not None else b"",
        commit=result.outcome.commit,
        shares=list(result.shares),
        tile_bytes=result.tile_bytes,
        alone=b"",
        alone_samples=0,
        raw=raw,
        nbytes=len(data),
    )
    return Step(header, data)


def of_step_alone(
    name: StateName, chance: bytes, peer: bytes, samples: int, vector: Vector, agreement: Agreement
) -> Step:
    """A copy of the gradients from which a peer steps alone.

    Args:
        name: of the state before.
        chance: 16 random bytes that name the step.
        peer: the one that takes it.
        samples: that go into it.
        vector: of the tensors that hold their mean.
        agreement: how it is taken.
    """
    data = bytearray()
    for each in vector.in_order():
        data += view_bytes(each.detach().to("cpu").contiguous())
    header = StepTaken(
        *name,
        agreement=encode(agreement),
        commit=None,
        shares=[],
        tile_bytes=0,
        alone=chance + peer,
        alone_samples=samples,
        raw=True,
        nbytes=len(data),
    )
    return Step(header, data)


def name_before(header: StepTaken) -> StateName:
    """The state that the step leads from."""
    return StateName(header.epoch, header.digest, header.samples)


def name_after(header: StepTaken) -> StateName:
    """The state that it leads to. It follows from the one before, so nobody can say another one.

    Raises:
        PeerProtocolError: the header contradicts itself.
    """
    before, commit, agreement = name_before(header), header.commit, agreement_of(header)
    if commit is None:
        if agreement is None or not header.raw or len(header.alone) <= _CHANCE_BYTES:
            raise PeerProtocolError("a step of nobody")
        chance, peer = header.alone[:_CHANCE_BYTES], header.alone[_CHANCE_BYTES:]
        return before.after_step_alone(chance, peer, header.alone_samples)
    if not commit.tiles:
        raise PeerProtocolError("a step without tiles")
    outcome = Outcome.of(commit, ())
    result = StepResult(gathered={}, outcome=outcome, round_id=commit.round_id, duration_s=0.0)
    return before.after_averaging(result) if agreement is None else before.after_round(result, agreement.digest)


def agreement_of(header: StepTaken) -> Agreement | None:
    """The agreement on the step; None if states were averaged.

    Raises:
        PeerProtocolError: what it says of that cannot be.
    """
    if not header.agreement:
        return None
    try:
        agreement = decode(header.agreement, Agreement)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"a step with impossible options: {error}") from error
    if agreement.options is not None and (problem := agreement.options.problem()) is not None:
        raise PeerProtocolError(f"a step with impossible options: {problem}")
    return agreement


def size_of(header: StepTaken, vector: Vector) -> int:
    """The number of bytes that its averages take, by our own tensors: nothing else is received.

    Raises:
        PeerProtocolError: the header contradicts itself, or is of other tensors.
    """
    expected = sum(view.nbytes for view in vector.averages()) if header.raw else sum(_sizes(header, vector))
    if header.nbytes != expected:
        raise PeerProtocolError(f"a step of {header.nbytes} bytes, where it takes {expected}")
    return expected


def _sizes(header: StepTaken, vector: Vector) -> list[int]:
    vector.agree(on_reference=False)
    try:
        tiles = vector.tiling(header.shares, header.tile_bytes).tiles
    except ConfigError as error:
        raise PeerProtocolError(f"a step of other tensors: {error}") from error
    if header.commit is None or [held.tile for held in header.commit.tiles] != list(range(len(tiles))):
        raise PeerProtocolError("a step of other tiles")
    return [vector.encoded_bytes(tile) for tile in tiles]


def check(header: StepTaken, data: memoryview, vector: Vector) -> None:
    """Compare the averages with the digests of the commit.

    Raises:
        PeerProtocolError: they are others.
    """
    if header.raw or header.commit is None:
        return
    digests, start = TileDigests(header.commit.round_id), 0
    for held, size in zip(header.commit.tiles, _sizes(header, vector), strict=True):
        if digests.of(held, data[start : start + size]) != held.digest:
            raise PeerProtocolError("an average that is not the one that was committed")
        start += size


def land(header: StepTaken, data: memoryview, vector: Vector) -> None:
    """Put averages that were checked into the vector.

    Raises:
        PeerProtocolError: some are not finite.
    """
    if header.raw:
        vector.take_averages(data)
        return
    start = 0
    vector.agree(on_reference=False)
    for tile in vector.tiling(header.shares, header.tile_bytes).tiles:
        size = vector.encoded_bytes(tile)
        average, place = data[start : start + size], vector.landing(tile)
        if place is not None:
            place[:] = average
        vector.land(tile, average)
        start += size
