"""`docs/why/protocol.md` and `docs/reference/arguments.md` say what the code has: their tables are made from it."""

from __future__ import annotations

import functools
import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

import shoal
from shoal import DecentralizedAverager
from shoal.averaging import AveragerSettings
from shoal.averaging.matchmaking import machine
from shoal.averaging.matchmaking.events import SearchPhase
from shoal.base.peer import PeerID
from shoal.protocol import wire
from tests.protocol_tables import ARGUMENTS, PAGE, constants, documented, filled, quantity, setters, structs, type_text

TEXT = PAGE.read_text(encoding="utf-8")
SOURCES = Path(shoal.__file__).parent


@pytest.mark.parametrize("page", [PAGE, ARGUMENTS], ids=lambda page: page.name)
def test_the_tables_are_those_of_the_code(page: Path) -> None:
    """Whoever changes a message, an argument, a default, a limit or its docstring makes the tables anew."""
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "run `make tables`"


def test_every_message_is_on_the_page() -> None:
    """A new message stands in a part of `shoal.protocol.wire` of which the page has the table."""
    parts = re.findall(r"<!-- generated: messages shoal\.protocol\.wire (.+) -->", TEXT)
    on_page = [kind for part in parts for kind in structs("shoal.protocol.wire", part)]
    bases = [wire.Message, wire.Request, wire.Opening]
    assert on_page == [kind for kind in structs("shoal.protocol.wire") if kind not in bases]
    assert len(on_page) > 40


def test_states_are_named_as_in_the_code() -> None:
    """The states of a search for a group, and the phases of a run, have a row each in the tables of states."""
    from shoal.run.decide.phases import RunPhase

    first = set(re.findall(r"^\| `?([A-Z]+)`? \|", TEXT, re.MULTILINE))
    kinds: list[type[Enum]] = [SearchPhase, RunPhase]
    for states in kinds:
        assert {state.name for state in states} <= first


def test_refusals_are_named() -> None:
    """The codes that the group machine reads in a refusal are explained at the field, and so on the page."""
    codes = set(re.findall(r"`([^`]+)`", documented(wire.JoinRefused)[1]["code"]))
    assert codes >= machine.MISMATCH_CODES | machine.SOFT_CODES


def unknown_names(page: str) -> set[str]:
    """The names in the tables that are written by hand of which the code knows nothing."""
    by_hand = re.sub(r"<!-- generated.*?<!-- end -->", "", page, flags=re.DOTALL)
    rows = re.findall(r"^\|.*\|$", by_hand, re.MULTILINE)
    names = {name.partition("(")[0] for row in rows for name in re.findall(r"`([\w.-]+(?:\([^`]*)?)`", row)}
    return names - words_of_the_code()


@functools.cache
def words_of_the_code() -> set[str]:
    """Dotted names, and what they begin with: of `a.b.c` also `a` and `a.b`."""
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    dotted = (word.split(".") for word in set(re.findall(r"[\w.-]+", code)))
    return {".".join(parts[: count + 1]) for parts in dotted for count in range(len(parts))}


def test_rows_that_are_written_by_hand_name_what_the_code_has() -> None:
    """A message, a setting or a code that is renamed is renamed in the tables of events, too."""
    assert unknown_names(TEXT) == set()
    assert unknown_names("| `Comit` | `Commit` | `too-few-peers` | `too-few` |") == {"Comit", "too-few-peers"}


# ------------------------------------------------------------------------------------------------------- the generator


_LOOKING, _ASKING, *_ = SearchPhase
TRANSITIONS = {(_LOOKING, "JoinAsked", _ASKING): "an earlier peer is known"}


def written() -> str:
    """A text that code gives."""
    return "| written by code |"


def test_transitions_are_a_mapping() -> None:
    """A machine gives its table as data: from (phase, event, next phase) to when it goes that way."""
    page = f"before\n<!-- generated: transitions {__name__}.TRANSITIONS -->\n| old |\n<!-- end -->\nafter\n"
    made = filled(page)
    assert "\n| LOOKING | `JoinAsked` | ASKING | an earlier peer is known |\n" in made
    assert "old" not in made
    assert (made.splitlines()[0], made.splitlines()[-1]) == ("before", "after")
    assert filled(made) == made


def test_settings_name_the_arguments_that_set_them() -> None:
    """Also where the name differs, where the user may give one of two, and not where only a default is possible."""
    found = setters(AveragerSettings, DecentralizedAverager)
    assert found["group_bits"] == ["initial_group_bits"]
    assert found["window_s"] == ["averaging_expiration", "min_matchmaking_time"]
    assert "fresh_state_s" not in found
    made = filled(
        "<!-- generated: settings shoal.averaging.AveragerSettings shoal.DecentralizedAverager -->\n<!-- end -->\n"
    )
    assert "| `silence_s` | 5 s | `sender_timeout` | a member" in made


def test_a_text_comes_from_a_function() -> None:
    """For tables of another form."""
    made = filled(f"<!-- generated: text {__name__}.written -->\n<!-- end -->\n")
    assert made.splitlines()[2] == "| written by code |"
    assert filled(made) == made


def test_a_constant_is_added_by_its_name() -> None:
    """Its value and its docstring come from the module; one without a docstring is refused."""
    page = "<!-- generated: constants -->\n| `shoal.protocol.wire.PROTOCOL_VERSION` |\n<!-- end -->\n"
    assert "| `shoal.protocol.wire.PROTOCOL_VERSION` | 4 | The version spoken by this code. |" in filled(page)
    with pytest.raises(KeyError, match="_UNEXPLAINED_S"):
        list(constants([f"{__name__}._UNEXPLAINED_S"]))


_UNEXPLAINED_S = 1.5


@pytest.mark.parametrize(
    "marker", ["transitions shoal.protocol.wire.NOTHING", "messages shoal.nothing", "settings shoal.rpc.Nothing"]
)
def test_what_is_not_there_is_found_out(marker: str) -> None:
    """A table of code that was removed or renamed is an error."""
    with pytest.raises((AttributeError, ImportError)):
        filled(f"<!-- generated: {marker} -->\n<!-- end -->\n")


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (PeerID | None, "peer id or none"),
        (Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)], "16 bytes"),
        (Annotated[bytes, msgspec.Meta(max_length=65536)] | None, "bytes (at most 64 KiB) or none"),
        (Annotated[list[wire.Contact], msgspec.Meta(max_length=8)], "list (at most 8) of `Contact`"),
        (Annotated[int, msgspec.Meta(ge=0, le=1 << 62)], "int from 0 to 2^62"),
        (tuple[int, str], "(int, text)"),
        (dict[str, Annotated[str, msgspec.Meta(max_length=5)]], "map of text to text (at most 5 characters)"),
    ],
)
def test_types_are_told_with_their_limits(hint: object, text: str) -> None:
    """As the decoder enforces them."""
    assert type_text(hint) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("part_bytes", 1 << 20, "1 MiB"),
        ("timeout_s", 0.25, "0.25 s"),
        ("upload_bytes_per_s", 32 << 10, "32 KiB/s"),
        ("calls_s", 4000.0, "4000/s"),
        ("replicas", 10, "10"),
    ],
)
def test_quantities_have_the_units_of_their_names(name: str, value: float, text: str) -> None:
    """Names carry units; the tables show them."""
    assert quantity(name, value) == text
