"""`docs/protocol.md` says what the code has: each message and field, each limit, default and constant in its tables."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from shoal import wire
from shoal.allreduce.round import RoundOptions
from shoal.averager import AveragerSettings
from shoal.dht import DhtSettings, StorageLimits
from shoal.matchmaking import machine
from shoal.matchmaking.signals import Rules
from shoal.optim import RunSettings
from shoal.rpc import Limits
from shoal.rpc.framing import Kind
from shoal.state import DownloadLimits, ShareLimits
from shoal.transport import handshake
from shoal.transport.tcp import TcpLimits

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
TEXT = PAGE.read_text(encoding="utf-8")

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}
WORDS: dict[str, Any] = {"none": None, "yes": True, "no": False, "required": msgspec.NODEFAULT, "empty": ()}

SETTINGS = [
    Limits,
    TcpLimits,
    DhtSettings,
    StorageLimits,
    Rules,
    AveragerSettings,
    RoundOptions,
    DownloadLimits,
    ShareLimits,
    RunSettings,
]


# ----------------------------------------------------------------------------------------------------- reading the page

Row = list[str]


def cells(line: str) -> Row:
    """The cells of one row of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text: str) -> Iterator[tuple[Row, list[Row]]]:
    """Every table: its head and its rows."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [line for line in block.splitlines() if line]
        if len(lines) > 2:
            yield cells(lines[0]), [cells(line) for line in lines[2:]]


def section(name: str) -> str:
    """What stands under the heading `### name`."""
    found = re.search(rf"^### {re.escape(name)}\n(.*?)(?=^###? |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"docs/protocol.md has no section {name!r}"
    return found[1]


def names(cell: str) -> list[str]:
    """What stands in code marks."""
    return re.findall(r"`([^`]+)`", cell)


def value(cell: str) -> Any:
    """The value that a cell gives: a number, with a unit perhaps, or one of a few words; else the text."""
    if cell in WORDS:
        return WORDS[cell]
    found = re.fullmatch(r"([\d.]+(?:e-?\d+)?)(?: (\w+))?", cell)
    return float(found[1]) * UNITS[found[2] or "s"] if found else cell.strip("`")


def numbers(cell: str) -> set[float]:
    """Every number in a cell, units counted in; a digest has 32 bytes."""
    found = re.findall(r"(\d+)(?: ([KMG]iB))?", cell.replace("digest", "32 bytes"))
    return {float(number) * UNITS.get(unit, 1) for number, unit in found}


def plain(default: Any) -> Any:
    """A default as `value` would read it."""
    if default is None or isinstance(default, bool) or default is msgspec.NODEFAULT:
        return default
    if isinstance(default, int | float):
        return float(default)
    return type(default).__name__ if isinstance(default, msgspec.Struct) else tuple(default)


def defaults(kind: type[Any]) -> dict[str, Any]:
    """The fields of a settings class, with their defaults."""
    if issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        found = {f.name: f.default if f.default_factory is msgspec.NODEFAULT else f.default_factory() for f in fields}
        return {name: plain(default) for name, default in found.items()}
    return {field.name: plain(field.default) for field in kind.__dataclass_fields__.values()}


# ------------------------------------------------------------------------------------------------------------- messages


def messages() -> dict[str, type[wire.Message]]:
    """Every message of the protocol."""
    bases = {wire.Message, wire.Request, wire.Opening}
    found = (kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, wire.Message))
    return {kind.__name__: kind for kind in found if kind not in bases}


def described() -> dict[str, list[Row]]:
    """What the tables of fields say: for each message its rows, in order."""
    found: dict[str, list[Row]] = {}
    for head, rows in tables(TEXT):
        if head[:2] == ["message", "field"]:
            for row in rows:
                if row[0]:
                    message = found.setdefault(row[0].strip("`"), [])
                message.append(row)
    return found


def flows() -> dict[str, Row]:
    """What the tables of who says what when say: one row for each message."""
    return {names(row[0])[0]: row for head, rows in tables(TEXT) if head[:2] == ["message", "sent by"] for row in rows}


def limits_of(annotation: Any) -> Iterator[int]:
    """The length limits that a field's type states, of what is within it included."""
    for part in get_args(annotation):
        if isinstance(part, msgspec.Meta):
            if part.max_length is not None:
                yield part.max_length
        else:
            yield from limits_of(part)


def test_there_are_messages_to_look_for() -> None:
    """The search for messages finds them: else the tests below would hold whatever the page says."""
    assert len(messages()) > 40
    assert {"Contact", "Record", "Join", "Begin", "Commit", "Progress", "Chunk"} <= messages().keys()


@pytest.mark.parametrize("name", sorted(messages()))
def test_a_message_is_described_with_its_fields_in_order(name: str) -> None:
    """The table of fields has each message, with exactly its fields, in the order in which they are sent."""
    rows = described().get(name, [])
    assert rows, f"docs/protocol.md does not describe {name}"
    fields = [field for row in rows for field in names(row[1])]
    assert fields == list(messages()[name].__struct_fields__)


@pytest.mark.parametrize("name", sorted(messages()))
def test_a_message_is_described_with_its_limits(name: str) -> None:
    """What a field may hold at most, as the decoder enforces it, stands in its row."""
    kind = messages()[name]
    hints = get_type_hints(kind, include_extras=True)
    for row in described()[name]:
        for field in names(row[1]):
            for limit in limits_of(hints[field]):
                assert limit in numbers(row[2]), f"{name}.{field} holds at most {limit}"


@pytest.mark.parametrize("name", sorted(messages()))
def test_a_message_is_said_to_be_answered_by_what_answers_it(name: str) -> None:
    """The page tells each message's sender and its answer: a reply, or the messages of both sides of the stream."""
    kind, row = messages()[name], flows().get(name)
    assert row is not None, f"docs/protocol.md does not tell who sends {name}"
    answers: list[Any] = []
    if issubclass(kind, wire.Request):
        answers = [wire.reply_type(kind)]
    elif issubclass(kind, wire.Opening):
        answers = list(wire.stream_types(kind))
    for answer in answers:
        for one in get_args(answer) or [answer]:
            assert one.__name__ in names(row[3]), f"{name} is answered by {one.__name__}"


def test_no_message_is_described_that_does_not_exist() -> None:
    """A message that was taken out of the protocol is taken off the page."""
    assert described().keys() == messages().keys() == flows().keys()


def test_frames_have_their_numbers() -> None:
    """The kinds of frame, with the numbers on the wire."""
    rows = next(rows for head, rows in tables(TEXT) if head[:2] == ["kind", "number"])
    assert {row[0].strip("`"): int(row[1]) for row in rows} == {kind.name: kind.value for kind in Kind}


def test_the_handshake_has_its_frames_and_fields() -> None:
    """The frames of the proof of identity, each with its fields in order."""
    rows = next(rows for head, rows in tables(TEXT) if head[:2] == ["step", "frame"])
    for frame in (handshake._Hello, handshake._Proof, handshake._Welcome, handshake._Refusal):
        told = [row for row in rows if row[1] == f"`{frame.__struct_config__.tag}`"]
        assert told, frame
        assert all(tuple(names(row[3])) == frame.__struct_fields__ for row in told), frame


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_settings_are_listed_with_their_defaults(kind: type[Any]) -> None:
    """Each settings class has a table with all of its fields, in order, and their defaults."""
    head, rows = next(tables(section(kind.__name__)))
    assert head[:2] == ["name", "default"]
    told = {names(row[0])[0]: value(row[1]) for row in rows}
    assert told == defaults(kind)
    assert list(told) == list(defaults(kind))


def constants() -> list[tuple[str, str]]:
    """Name and value of each constant in the table of constants."""
    _, rows = next(tables(section("Constants")))
    return [(names(row[0])[0], row[1]) for row in rows]


@pytest.mark.parametrize(("name", "told"), constants())
def test_a_constant_has_the_value_that_is_listed(name: str, told: str) -> None:
    """The table of constants names each by module, with its value."""
    module, _, attribute = name.rpartition(".")
    assert plain(getattr(importlib.import_module(module), attribute)) == value(told)


def test_states_are_named_as_in_the_code() -> None:
    """The states of a search for a group, and the phases of a run, have a row each in the tables of states."""
    from shoal.optim.phases import RunPhase

    first = {row[0] for head, rows in tables(TEXT) if head[0] in ("state", "phase") for row in rows}
    kinds: list[type[Enum]] = [machine.Phase, RunPhase]
    for states in kinds:
        assert {state.name for state in states} <= first


def test_refusals_are_named() -> None:
    """The codes that the group machine reads in a refusal stand in the section on matchmaking."""
    matchmaking = TEXT.split("## 7. Matchmaking")[-1].split("\n## ")[0]
    assert set(names(matchmaking)) >= machine.MISMATCH_CODES | machine.SOFT_CODES
