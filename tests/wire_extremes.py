"""The extremes of every field of a message, for tests that send them to a real peer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.protocol import wire

COUNTS = (0, -1, 1, 1023, 1024, 8191, 1 << 31, 1 << 62, (1 << 64) - 1)
NUMBERS: tuple[Any, ...] = (*COUNTS, math.nan, math.inf, 1e308, -1e308)
LONGEST = 1 << 17


def extremes(message: wire.Message) -> Iterator[tuple[str, Any]]:
    """Each field of a message with each value that it should not have, one at a time: (name, plain value)."""
    values = msgspec.msgpack.decode(wire.encode(message))[1:]
    for field, value in zip(msgspec.structs.fields(message), values, strict=False):
        for extreme in _extremes_of(value):
            yield field.name, extreme


def _extremes_of(value: Any) -> Iterator[Any]:
    """Of a plain value, and of each thing in a short list."""
    match value:
        case bool():
            yield from (not value, 2, None)
        case int() | float():
            yield from NUMBERS
        case str():
            yield from ("", "x" * LONGEST)
        case bytes():
            yield from (b"", b"\xff" * len(value), b"\xff" * LONGEST)
        case dict():
            yield from ({}, {f"{number}": "x" for number in range(LONGEST // 64)})
        case list():
            yield from ([], value * 2)
            if value:
                yield [value[-1]] * (LONGEST // 8)
            for place in range(len(value)) if len(value) <= 8 else (0, len(value) - 1):
                for extreme in _extremes_of(value[place]):
                    yield [*value[:place], extreme, *value[place + 1 :]]
        case None:
            yield from (0, b"", [])


def replaced(message: wire.Message, name: str, value: Any) -> bytes:
    """The bytes of a message in which one field has another, plain value."""
    tag, *values = msgspec.msgpack.decode(wire.encode(message))
    place = type(message).__struct_fields__.index(name)
    return msgspec.msgpack.encode([tag, *values[:place], value, *values[place + 1 :]])
