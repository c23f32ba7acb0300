"""Processes that are forked from one that has torch: they are as interpreters of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.forks import fork
from tests.integration.workers import Talk, environment

TELLS = """
import atexit, json, os, random, sys, threading, warnings
import numpy
atexit.register(print, '"bye"', flush=True)
own = sys.modules["__main__"].__dict__ is globals()
print(json.dumps([__name__, own, sys.argv, sys.path[0], os.getcwd(), os.environ.get("TOLD"), "torch" in sys.modules]))
print(json.dumps([random.random(), numpy.random.random()]), flush=True)
"""


@pytest.mark.parametrize("how", ["code", "program", "module"])
def test_a_fork_is_the_main_module(tmp_path: Path, how: str) -> None:
    """With the arguments, the folders and the variables that an interpreter would have; torch is there."""
    (tmp_path / "tells.py").write_text(TELLS)
    command = {"code": ["-c", TELLS], "program": [str(tmp_path / "tells.py")], "module": ["-m", "tells"]}[how]
    said = []
    for fresh in (False, True):
        with Talk([sys.executable, *command, "a", "-b"], fresh=fresh, cwd=tmp_path, TOLD="yes") as talk:
            said.append([json.loads(line) for line in talk.rest()])
            assert (talk.wait(), talk.errors()) == (0, "")
    (fork, numbers, bye), (fresh_one, other_numbers, _) = said
    assert fork[:-1] == fresh_one[:-1]
    assert (fork[-1], fresh_one[-1], bye) == (True, False, "bye")
    assert numbers[0] != other_numbers[0]


def test_forks_draw_their_own_numbers() -> None:
    """Of Python and of numpy."""
    drawn = []
    for _ in range(2):
        with Talk([sys.executable, "-c", TELLS]) as talk:
            drawn += json.loads(talk.rest()[1])
    assert len(set(drawn)) == 4


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("import sys; sys.exit()", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(9)", 9, ""),
        ("import warnings; warnings.warn('mind')", 1, "UserWarning: mind\n"),
        ("import threading; threading.Thread(target=lambda: print('late')).start()", 0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); input()", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_a_fork_ends_as_an_interpreter_does(code: str, exit_code: int, says: str) -> None:
    """With its exit code, or by a signal; what it says of an error ends with the same line."""
    for fresh in (False, True):
        with Talk([sys.executable, "-W", "error", "-c", code], fresh=fresh) as talk:
            talk.rest()
            assert talk.wait() == exit_code
            assert talk.errors()[-len(says) :] == says if says else talk.errors() == ""


def test_a_fork_can_be_killed_and_waited_for() -> None:
    """As a process that `subprocess` starts."""
    with Talk([sys.executable, "-c", "print('here', flush=True); input(); input()"]) as talk:
        talk.line()
        assert talk.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            talk.process.wait(0.0)
        os.kill(talk.process.pid, 0)
        talk.signal(signal.SIGKILL)
        assert talk.wait() == talk.process.poll() == -signal.SIGKILL
        talk.signal(signal.SIGKILL)  # nobody is hit


def test_what_counts_at_the_import_needs_a_process_of_its_own() -> None:
    """A variable that torch reads when it is imported would have no effect."""
    with pytest.raises(AssertionError, match="fresh=True"):
        fork(["-c", "pass"], environment(ATEN_CPU_CAPABILITY="default"), 2)
