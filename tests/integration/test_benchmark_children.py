"""A benchmark that is ended leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

CHILD = "import sys, time; print('here', file=sys.stderr, flush=True); time.sleep(600)"
CONTENDER = f"""
import subprocess, sys, threading
from benchmarks.contenders.orders import obey
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
obey(lambda request: threading.Event().wait(), leave_s=0.1)
"""


@pytest.mark.parametrize("request_line", [b"", b'{"do": "hang"}\n'])
def test_contender_ends_with_its_input_and_takes_its_children_along(request_line: bytes) -> None:
    """Also while it answers a request that never ends, and if nobody can tell it any more."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTENDER], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().strip() == b"here"
        # Standard error ends when the last process that has it does.
        process.communicate(request_line, timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
