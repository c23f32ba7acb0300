"""Rare situations that simulations must have reached: how they are named and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import sim
from shoal.base.sometimes import reached, sometimes
from tests.situations import declared


def test_situations_are_counted_in_simulations_only() -> None:
    """A call counts within `sim.run`, and nowhere else."""
    situation = "a test of this module has reached its line"

    async def main() -> None:
        sometimes(situation)
        await sim.sleep(1.0)
        sometimes(situation)

    before = reached.pop(situation, 0)
    sometimes(situation)
    assert situation not in reached
    sim.run(main)
    assert reached.pop(situation) == before + 2


def test_the_code_names_many_situations_each_at_one_line() -> None:
    """There are at least 60, each with a text of its own."""
    named = declared()
    assert len(named) >= 60
    assert [situation for situation, calls in named.items() if calls > 1] == []


def test_a_situation_is_written_out_at_its_call(tmp_path: Path) -> None:
    """A text that is put together cannot be looked for in the code, nor be required."""
    (tmp_path / "module.py").write_text('sometimes(f"{word}")\n')
    with pytest.raises(AssertionError, match="one text"):
        declared(tmp_path)
