"""`docs/why/architecture.md` begins with the data, and names functions that exist."""

from __future__ import annotations

import ast

import pytest

from tests import reading_path
from tests.reading_path import PAGE, Place, lines_of, node_of, places, stories

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("place", sorted(set(places(TEXT))), ids=lambda place: f"{place.file}:{place.name}")
def test_a_function_that_the_page_names_is_there(place: Place) -> None:
    """Whoever follows the page comes to code."""
    assert lines_of(place) > 0


def test_the_data_comes_before_any_file() -> None:
    """Whoever has not seen the code reads on: two pictures, and no name of a file or function."""
    data = TEXT[: TEXT.index("\n## A tensor's round\n")]
    assert data.count("```mermaid") == 2
    assert not places(data)
    assert ".py" not in data


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
    """All six, with their functions in order."""
    told = stories(TEXT)
    gradients = ["A tensor's round", "A gradient's step", "A merge", "A newcomer", "A checkpoint"]
    assert list(told) == [*gradients, "A sharded parameter's day"]
    assert told["A tensor's round"][0] == Place("runtime/averager.py", "DecentralizedAverager.step")
    assert told["A gradient's step"][-1] == Place("run/participant.py", "Participant.stepped")
    assert reading_path.docstring_lines("averaging/allreduce/round.py") > 10
