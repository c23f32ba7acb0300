"""`docs/reference/warnings.md` has a row for each warning, which the warning names, and quotes it as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from shoal.base.warning_names import NAMES, named
from shoal.events import Warned

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
WARN = {"Warned", "_warn", "named", "warn", "warning"}
LEAST = 12
"""Characters of a text between its values: shorter ones are no words of a warning."""


def texts(path: Path) -> list[str]:
    """The texts in a module, with `…` for each value in them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def rows() -> dict[str, str]:
    """The rows of the page, by the names that their anchors have."""
    page = (ROOT / "docs" / "reference" / "warnings.md").read_text(encoding="utf-8")
    return dict(re.findall(r'^\| <a id="([\w-]+)"></a>\1 \| (.*) \|$', page, re.MULTILINE))


def quotes(row: str) -> list[str]:
    """The warnings that a row quotes."""
    return re.findall(r"`([^`]+)`", row.partition(" | ")[0])


def warnings_of(path: Path) -> list[str]:
    """The texts of a module that stand in a call which warns, with `…` for each value in them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in WARN:
            said = [*node.args, *(each.value for each in node.keywords if each.arg == "message")]
            for text in said:
                if isinstance(text, ast.JoinedStr):
                    parts = (str(each.value) if isinstance(each, ast.Constant) else "…" for each in text.values)
                    found.append("".join(parts))
                elif isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found.append(text.value)
    return found


def name_of(text: str) -> str:
    """The name that a warning of this text ends with; empty without one."""
    _, _, name = named(text).rpartition(" (docs: warnings#")
    return name.removesuffix(")") if name != text else ""


def test_each_name_has_a_row_on_the_page_and_each_row_a_name() -> None:
    """A row quotes what its name goes by."""
    found = rows()
    assert found.keys() == NAMES.keys()
    unnamed = [name for name, words in NAMES.items() if not any(each in found[name] for each in words)]
    assert unnamed == []


def test_each_warning_of_the_code_has_a_name() -> None:
    """The demo's and the simulation's apart; a text without words of its own is the error that it names."""
    without = [
        text
        for path in sorted(SOURCE.rglob("*.py"))
        if not {"demo", "sim"} & set(path.relative_to(SOURCE).parts)
        for text in warnings_of(path)
        if max(map(len, text.split("…"))) >= LEAST and not name_of(text)
    ]
    assert without == []


def test_each_name_goes_by_words_of_the_code() -> None:
    """A warning that is gone, or has other words now, takes its row with it."""
    said = [text for path in sorted(SOURCE.rglob("*.py")) if path.name != "warning_names.py" for text in texts(path)]
    assert [each for words in NAMES.values() for each in words if not any(each in text for text in said)] == []


def test_a_warning_ends_with_the_name_of_its_row() -> None:
    """In the log and in `line()`; the first name counts."""
    slow = Warned(where="optimizer", message="the state of run 'x' comes slowly: 3 MB have come")
    assert slow.line().endswith("comes slowly: 3 MB have come (docs: warnings#slow-state)")
    assert Warned(where="averager", message="TypeError: 3").line() == "averager: TypeError: 3"
    assert name_of("run 'x': training alone; 1 peers have not taken the state of this client") == "client-state"
    assert name_of("3 rounds in a row have failed, the last one because: training alone") == "rounds-fail"


def test_the_page_quotes_warnings_as_they_are() -> None:
    """Each piece of a quoted warning, between its values, is in one text of the code, or in two joined ones."""
    said = [text for path in sorted(SOURCE.rglob("*.py")) for text in texts(path)]

    def is_said(piece: str) -> bool:
        words = piece.split()
        cuts = [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(len(words))]
        return any(all(any(part in text for text in said) for part in cut) for cut in cuts)

    quoted = [quote for row in rows().values() for quote in quotes(row)]
    pieces = [piece.strip() for quote in quoted for piece in quote.split("…") if piece.strip()]
    assert len(pieces) > 100
    assert [piece for piece in pieces if not is_said(piece)] == []
