"""The part of a test's cases that every commit plays (`one_in`, tests/conftest.py)."""

from __future__ import annotations

import pytest


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(("letter", "doubled"), [("x", "xx"), pytest.param("y", "yy"), ("z", "zz")])
def test_a_third_of_the_cases_is_played(request: pytest.FixtureRequest, letter: str, doubled: str, number: int) -> None:
    """Those whose places add up to a multiple of three; the long tests at full size play the others."""
    in_sample = ("xyz".index(letter) + number) % 3 == 0
    assert in_sample == (request.node.get_closest_marker("long") is None)
    assert doubled == 2 * letter
