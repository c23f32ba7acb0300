"""How much a newcomer reads to follow the stories of `docs/why/architecture.md`: ``make reading-path``.

A story is the lines of the page that begin with a number and name a function as ``file.py:Class.function``, relative to
`src/shoal`. What counts is the function, and the docstring of each module that it stands in.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "why" / "architecture.md"
SOURCE = ROOT / "src" / "shoal"
NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")
STEP = re.compile(r"^\d+\. .*(?:\n {3,4}\S.*)*", re.MULTILINE)


class Place(NamedTuple):
    """A function, and where it stands."""

    file: str
    name: str


def places(text: str) -> list[Place]:
    """All functions that a text names, in its order."""
    return [Place(*found) for found in NAME.findall(text)]


def stories(page: str) -> dict[str, list[Place]]:
    """The functions of each story, by its heading; each function once."""
    found = {}
    for block in page.split("\n## ")[1:]:
        steps = dict.fromkeys(place for line in STEP.findall(block) for place in places(line))
        if steps:
            found[block.splitlines()[0]] = list(steps)
    return found


@lru_cache(maxsize=64)
def _module(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def node_of(place: Place) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function itself.

    Raises:
        LookupError: there is none of this name.
    """
    node: ast.AST = _module(place.file)
    for name in place.name.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, kinds) and each.name == name]
        if not inner:
            raise LookupError(f"{place.file} has no {place.name}")
        node = inner[-1]  # the last of several: the others are overloads
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), place
    return node


def lines_of(place: Place) -> int:
    """How many lines the function has."""
    node = node_of(place)
    return (node.end_lineno or 0) - min([node.lineno, *(each.lineno for each in node.decorator_list)]) + 1


def docstring_lines(file: str) -> int:
    """How many lines the docstring of a module has."""
    return len((ast.get_docstring(_module(file), clean=False) or "").splitlines())


def main() -> None:
    """Print each story: what is new in it, by file and function."""
    seen_files: set[str] = set()
    seen: set[Place] = set()
    for story, steps in stories(PAGE.read_text(encoding="utf-8")).items():
        new = [place for place in steps if place not in seen]
        files = dict.fromkeys(place.file for place in new if place.file not in seen_files)
        total = sum(map(lines_of, new)) + sum(map(docstring_lines, files))
        print(f"{story}: {len(new)} functions, {total} lines, {len(files)} files beyond those before")
        for file in dict.fromkeys(place.file for place in new):
            names = [place for place in new if place.file == file]
            docstring = docstring_lines(file) if file in files else 0
            print(f"  {file}: {sum(map(lines_of, names)) + docstring} lines")
            for place in names:
                print(f"    {lines_of(place):4} {place.name}")
        seen_files.update(files)
        seen.update(new)


if __name__ == "__main__":
    main()
