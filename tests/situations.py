"""Counts how often simulations reach the rare situations that the code names (`shoal.base.sometimes`).

A plugin of pytest, which `tests/conftest.py` loads. `--situations=note` keeps the counts of this run, as `make test`
asks. `--situations=require` adds the counts that were kept, prints all, and fails the run if one situation was never
reached, as `make test-long-sample` asks. A run of some tests only (ARGS) does neither.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.base import sometimes

_SOURCE = Path(shoal.__file__).parent
_KEPT = "shoal/situations"


def declared(source: Path = _SOURCE) -> Counter[str]:
    """The situations that the code names, each with the number of calls that name it.

    Raises:
        AssertionError: a call does not have one text, written out.
    """
    found = Counter[str]()
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sometimes":
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                assert len(texts) == len(node.args) == 1, f"{path}:{node.lineno}: give the situation as one text"
                assert isinstance(texts[0], str), f"{path}:{node.lineno}: give the situation as one text"
                found[texts[0]] += 1
    return found


@contextmanager
def reaches(*situations: str) -> Iterator[None]:
    """The simulations of this block reach these situations: they cannot do without, whatever the order of a set is."""
    before = Counter(sometimes.reached)
    yield
    assert [each for each in situations if sometimes.reached[each] == before[each]] == [], "never reached"


class Situations:
    """Adds up the counts of all processes of a run.

    Args:
        mode: as given to `--situations`.
    """

    def __init__(self, mode: str) -> None:
        self._mode, self._counts, self.unreached = mode, Counter[str](), list[str]()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended (pytest-xdist): these are its counts."""
        self._counts.update(getattr(node, "workeroutput", {}).get(_KEPT, {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """All tests are over: pass the counts on, keep them, or fail the run."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # in a worker
            output[_KEPT] = dict(sometimes.reached)
            return
        self._counts.update(sometimes.reached)
        cache = session.config.cache
        assert cache is not None, "the cache of pytest is needed"
        if self._mode == "note":
            cache.set(_KEPT, dict(self._counts))
        if self._mode == "require":
            self._counts.update(cache.get(_KEPT, {}))
            self.unreached = sorted(declared().keys() - self._counts.keys())
            if self.unreached and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print what was reached."""
        if self._mode == "count":
            return
        named = declared()
        terminalreporter.section(f"{len(named.keys() & self._counts.keys())} of {len(named)} rare situations reached")
        if self._mode == "require":
            for situation in sorted(named, key=lambda each: (-self._counts[each], each)):
                terminalreporter.write_line(f"{self._counts[situation]:9,}  {situation}")
        for situation in self.unreached:
            terminalreporter.write_line(f"NEVER REACHED: {situation}", red=True)
