"""How a benchmark's child process is told what to do: it reads a line of JSON from standard input, and answers with one
on standard output. Imports nothing of shoal nor of torch.

An answer may be `error` instead of what was asked for. The process ends after the request `stop`, and when its input
does, also while it answers, so that it never outlives the benchmark. Where it leads a process group, that ends with it:
what a library started of its own is not left behind.
"""

from __future__ import annotations

import json
import os
import queue
import signal
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
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, leave_s), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    while (line := requests.get()) is not None:
        request = json.loads(line)
        try:
            reply = answer(request)
        except Exception as error:  # noqa: BLE001 (told to whoever asked)
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)
        if request["do"] == "stop":
            break
    threading.Timer(leave_s, _end).start()


def _listen(requests: queue.SimpleQueue[bytes | None], leave_s: float) -> None:
    """Hand requests on; when the input ends, so do we, soon.

    Not through `sys.stdin`: we would hold its lock, and a library that forks would wait for that in the child.
    """
    begun = b""
    while read := os.read(0, 1 << 16):
        *lines, begun = (begun + read).split(b"\n")
        for line in lines:
            requests.put(line)
    requests.put(None)
    threading.Timer(leave_s, _end).start()


def _end() -> None:
    """End at once, with all of our process group if we lead it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
