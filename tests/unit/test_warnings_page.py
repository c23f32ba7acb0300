"""`docs/reference/warnings.md` quotes the warnings as the code says them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
WARN = {"Warned", "_warn", "warn", "warning"}
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


def quoted() -> list[str]:
    """The warnings that the page quotes."""
    page = (ROOT / "docs" / "reference" / "warnings.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]*)", page, re.MULTILINE)
    return [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]


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


def test_each_warning_has_a_row_on_the_page() -> None:
    """The demo's and the simulation's apart; a text without words of its own is the error that it names."""
    pieces = [piece.strip() for quote in quoted() for piece in quote.split("…") if len(piece.strip()) >= LEAST]
    left_out = [
        text
        for path in sorted(SOURCE.rglob("*.py"))
        if not {"demo", "sim"} & set(path.relative_to(SOURCE).parts)
        for text in warnings_of(path)
        if max(map(len, text.split("…"))) >= LEAST and not any(piece in text for piece in pieces)
    ]
    assert left_out == []


def test_the_page_quotes_warnings_as_they_are() -> None:
    """Each piece of a quoted warning, between its values, is in one text of the code, or in two joined ones."""
    quotes = quoted()
    assert len(quotes) > 20
    said = [text for path in sorted(SOURCE.rglob("*.py")) for text in texts(path)]

    def is_said(piece: str) -> bool:
        words = piece.split()
        cuts = [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(len(words))]
        return any(all(any(part in text for text in said) for part in cut) for cut in cuts)

    pieces = [piece.strip() for quote in quotes for piece in quote.split("…") if piece.strip()]
    assert [piece for piece in pieces if not is_said(piece)] == []
