"""Every number, text, list and map that comes from the network has a bound in its type."""

from __future__ import annotations

import types
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from shoal.base.peer import Address, PeerID
from shoal.layout import TensorSpec
from shoal.protocol import wire
from shoal.run.decide.agreement import Agreement, Contributor, Said
from shoal.run.decide.check import Check
from shoal.transport import handshake
from tests.property.test_wire import KINDS, MESSAGES
from tests.wire_extremes import extremes, replaced

CHECKED_WHEN_MADE = {PeerID, Address}
"""32 bytes; a host of 253 characters and a port: their constructors refuse everything else."""

BY_ITS_FRAME = {msgspec.Raw}
"""A part of a message, which `Limits.header_bytes` bounds."""

OTHERS: list[type[msgspec.Struct]] = [TensorSpec, Said, Contributor, Agreement, Check]
"""What stands in the bytes of messages."""

HANDSHAKE = [each for each in vars(handshake).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def unbounded(hint: Any) -> list[str]:
    """What has no bound in a type."""
    limits = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, msgspec.Meta)]
    plain: Any = hint.__origin__ if limits else hint
    origin, arguments = get_origin(plain), get_args(plain)
    if origin in (Union, types.UnionType):
        return [fault for each in arguments for fault in unbounded(each)]
    if plain in (bool, type(None)) or plain in CHECKED_WHEN_MADE | BY_ITS_FRAME:
        return []
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct | Enum):
        return []  # a message is looked at by itself, and an enumeration has no other values
    faults = [fault for each in arguments if each is not ... for fault in unbounded(each)]
    if plain in (int, float):
        bound = any(limit.ge is not None and limit.le is not None for limit in limits)
    elif origin is tuple and ... not in arguments:
        bound = True
    else:
        bound = any(limit.max_length is not None for limit in limits)
    return faults if bound else [*faults, str(plain)]


@pytest.mark.parametrize("kind", [*KINDS, *HANDSHAKE, *OTHERS], ids=lambda kind: kind.__name__)
def test_every_field_of_every_message_has_a_bound(kind: type[msgspec.Struct]) -> None:
    """A field that says how often a loop runs, or how much memory is taken, cannot be left without one."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.name: hints[field.name] for field in msgspec.structs.fields(kind)}
    assert {name: faults for name, hint in fields.items() if (faults := unbounded(hint))} == {}


def test_a_field_without_a_bound_is_found() -> None:
    """The check above sees through unions, lists, tuples and maps."""
    few = msgspec.Meta(max_length=3)
    assert unbounded(int | None) == [str(int)]
    assert unbounded(Annotated[list[float], few]) == [str(float)]
    assert unbounded(tuple[Annotated[int, msgspec.Meta(ge=0)], bool]) == [str(int)]
    assert unbounded(Annotated[dict[str, bool], few]) == [str(str)]
    assert len(unbounded(list[bytes])) == 2


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_extreme_is_beyond_its_bound(message: wire.Message) -> None:
    """What the decoder lets pass of 0, -1, 2^62, infinity, NaN, 1e308, nothing and the longest is within bounds."""
    for name, value in extremes(message):
        try:
            decoded = wire.decode(replaced(message, name, value), type(message))
        except msgspec.MsgspecError:
            continue
        for number in _numbers(getattr(decoded, name)):
            assert abs(number) <= wire.MAX_SAMPLES, (name, value)


def _numbers(value: object) -> list[float]:
    if isinstance(value, int | float):
        return [value]
    if isinstance(value, list | tuple):
        return [number for each in value for number in _numbers(each)]
    return []


@pytest.mark.parametrize("attempt", [-1, wire.MAX_GROUP_SIZE + 1, 1 << 62])
def test_an_assign_of_attempt_2_to_62_is_no_message(attempt: int) -> None:
    """It made its receiver count for ever; so did the attempts of a commit and of an average."""
    held = wire.Held(0, attempt, b"\x01", 1.0, b"d" * 16)
    for message in (wire.Assign([0], attempt, 0), wire.Commit(b"r" * 16, [held]), wire.Report([held])):
        with pytest.raises(msgspec.ValidationError):
            wire.decode(wire.encode(message), type(message))


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -float("inf"), 1e308])
def test_a_time_that_is_no_time_is_no_message(time: float) -> None:
    """NaN and infinity come through no bound; a peer that does not know the time says None."""
    for message in (wire.Beat(time), wire.BeatReply(0.0, time), wire.Record(b"k" * 32, None, b"", time)):
        with pytest.raises(msgspec.ValidationError):
            wire.decode(wire.encode(message), type(message))
    unknown = wire.BeatReply(0.0, None)
    assert wire.decode(wire.encode(unknown), wire.BeatReply) == unknown
