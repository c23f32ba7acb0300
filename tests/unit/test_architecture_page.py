"""`docs/why/architecture.md` names functions that exist, and its stories stay short enough to be read."""

from __future__ import annotations

import ast
import re

import pytest

from tests import reading_path
from tests.reading_path import PAGE, Place, lines_of, node_of, places, stories

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("place", sorted(set(places(TEXT))), ids=lambda place: f"{place.file}:{place.name}")
def test_a_function_that_the_page_names_is_there(place: Place) -> None:
    """Whoever follows the page comes to code."""
    assert lines_of(place) > 0


def test_every_arrow_of_the_diagrams_names_a_function_of_its_story() -> None:
    """A file, and functions of it that the steps, or other lines of the page, name in full."""
    known = {place.file for place in places(TEXT)}
    arrows = re.findall(r"^    \w+-{1,2}>>\w+: (.*)$", TEXT, re.MULTILINE)
    assert len(arrows) > 15
    for arrow in arrows:
        files = re.findall(r"[\w/]+\.py", arrow)
        assert set(files) <= known, arrow
        assert files or arrow == "phase STEPPING"


ROWS = [found for line in TEXT.split("## Where is")[1].splitlines() if (found := places(line))]


@pytest.mark.parametrize(("first", "then"), ROWS, ids=lambda place: place.name)
def test_a_row_of_where_is_needs_no_third_hop(first: Place, then: Place) -> None:
    """The function that the page names first calls the second one itself."""
    called = {name for node in ast.walk(node_of(first)) if (name := _used(node))}
    assert then.name.rpartition(".")[2] in called


def _used(node: ast.AST) -> str | None:
    """The name of what is called here, or read from an object."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    return node.attr if isinstance(node, ast.Attribute) else None


def test_what_is_not_there_is_found_out() -> None:
    """A name that is gone fails the test above."""
    with pytest.raises(LookupError, match=r"has no Round\.nothing"):
        lines_of(Place("averaging/allreduce/round.py", "Round.nothing"))


def test_the_stories_are_counted() -> None:
    """Both, with their functions in order."""
    first, second = stories(TEXT).values()
    assert first[0] == Place("runtime/averager.py", "DecentralizedAverager.step")
    assert second[-1] == Place("run/participant.py", "Participant.stepped")
    assert reading_path.docstring_lines("averaging/allreduce/round.py") > 10
