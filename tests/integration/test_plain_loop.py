"""The example of the README, as its readers run it: two terminals and an invite."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.integration.workers import Talk

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"

JOINING = """
import runpy, sys
import shoal, torch  # takes seconds: the other one begins when they are over, else it may be through first
print("ready", flush=True)
sys.argv[1:] = [input()]
runpy.run_path({example!r}, run_name="__main__")
"""


def test_two_terminals_end_with_the_same_weights() -> None:
    """One prints an invite, the other joins by it; both end by themselves, at one epoch, with one hash."""
    joining = [sys.executable, "-W", "error", "-c", JOINING.format(example=str(EXAMPLE))]
    with Talk(joining, EPOCHS="50") as second:
        assert second.line() == "ready\n"
        with Talk([sys.executable, "-W", "error", str(EXAMPLE)], EPOCHS="50") as first:
            second.write(first.line().strip())
            said = [talk.rest() for talk in (first, second)]
            assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
            assert [talk.errors() for talk in (first, second)] == ["", ""]
    ends = [re.fullmatch(r"loss (\d+\.\d+), weights ([0-9a-f]{16}) at epoch 50\n", lines[-1]) for lines in said]
    assert all(ends), said
    (one, two) = (end for end in ends if end is not None)
    assert one[2] == two[2]
    assert float(one[1]) < 4
    assert not any("epoch 0:" in line for line in said[1]), "it trained from the beginning instead of joining"


def test_example_is_short_and_differs_by_a_few_lines() -> None:
    """60 lines at most; at most 4 statements are shoal's."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert sum(line.rstrip().endswith("# shoal") for line in lines) <= 4
