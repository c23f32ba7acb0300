"""`docs/training.md` quotes the warnings as the code says them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def texts(path: Path) -> list[str]:
    """The texts in a module, with `…` for each value in them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_the_page_quotes_warnings_as_they_are() -> None:
    """Each piece of a quoted warning, between its values, is in one text of `shoal.optim`, or in two joined ones."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    section = page[page.index("\n## What the warnings mean\n") :]
    quotes = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    assert len(quotes) > 20
    said = [text for path in sorted((ROOT / "src" / "shoal" / "optim").glob("*.py")) for text in texts(path)]

    def is_said(piece: str) -> bool:
        words = piece.split()
        cuts = [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(len(words))]
        return any(all(any(part in text for text in said) for part in cut) for cut in cuts)

    pieces = [piece.strip() for quote in quotes for piece in quote.split("…") if piece.strip()]
    assert [piece for piece in pieces if not is_said(piece)] == []
