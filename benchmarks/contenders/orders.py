"""How a benchmark's child process is told what to do: it reads a line of JSON from standard input, and answers with one
on standard output. Imports nothing of shoal nor of torch.

An answer may be `error` instead of what was asked for. The process ends after the request `stop`, and when its input
does, so that it never outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["now", "obey"]


def now() -> float:
    """Seconds, the same for all processes of this machine."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def obey(answer: Callable[[dict[str, Any]], dict[str, Any]], *, leave_s: float = 3.0) -> None:
    """Answer requests until there are no more; libraries that hang while they close have `leave_s` seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = answer(request)
        except Exception as error:  # noqa: BLE001 (told to whoever asked)
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)
        if request["do"] == "stop":
            break
    threading.Timer(leave_s, os._exit, (0,)).start()
