"""What the trainer's thread may not wait by: an interrupt would leave it locked, or a living thread marked as dead."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shoal"

ROOMS = ("base", "averaging", "hivemind", "optim", "run", "runtime", "state", "strategies", "train")

EXCEPT = {
    ("base/pool.py", "threading.Condition"): "only the loop and its workers take it",
    ("runtime/leave.py", "threading.Event"): "nobody waits for it: it is set and asked",
    ("runtime/launch.py", "is_alive"): "of a DHT or an Optimizer",
    ("hivemind/faces.py", "is_alive"): "of the Optimizer",
}

REFUSED = {
    *(f"threading.{name}" for name in ("Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier")),
    *(f"concurrent.futures.{name}" for name in ("wait", "as_completed")),
    *(f"futures.{name}" for name in ("wait", "as_completed")),
}


def refused(source: str) -> set[str]:
    """What stands in a module's code and may not. `is_alive` of a DHT, or of an averager itself, asks no thread."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if (name := ast.unparse(node)) in REFUSED:
                found.add(name)
            if node.attr == "is_alive" and ast.unparse(node.value).rpartition(".")[2] not in {"dht", "self"}:
                found.add("is_alive")
        elif isinstance(node, ast.ImportFrom):
            found |= REFUSED & {f"{node.module}.{each.name}" for each in node.names}
    return found


def test_nothing_on_the_trainers_path_waits_in_code_that_an_interrupt_can_break() -> None:
    """A `Gate`, a `SafeLock` or a `TensorLock` does instead; an exception has its reason, and is needed."""
    paths = sorted(path for room in ROOMS for path in (SOURCE / room).rglob("*.py"))
    names = {path.relative_to(SOURCE).as_posix() for path in paths}
    assert names >= {
        *(f"runtime/{name}.py" for name in ("averager", "dht", "thread", "control", "sharing", "tensors")),
        *("averaging/lock.py", "optim/optimizer.py", "base/locks.py", "base/waiting.py"),
    }
    found = {(path.relative_to(SOURCE).as_posix(), each) for path in paths for each in refused(path.read_text("utf-8"))}
    assert found == EXCEPT.keys()


def test_nobody_waits_for_the_event_of_the_way_out() -> None:
    """The main thread may be interrupted there at any time."""
    assert "_done.wait" not in (SOURCE / "runtime" / "leave.py").read_text("utf-8")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import threading\nlock = threading.Condition()", {"threading.Condition"}),
        ("import threading\nthreading.Event().wait(3)", {"threading.Event"}),
        ("from threading import Event\nEvent().wait()", {"threading.Event"}),
        ("while self._thread.is_alive(): pass", {"is_alive"}),
        ("from concurrent import futures\nfutures.wait([])", {"futures.wait"}),
        ("import concurrent.futures\nconcurrent.futures.wait([])", {"concurrent.futures.wait"}),
        ("from concurrent.futures import wait\nwait([])", {"concurrent.futures.wait"}),
        ("self.dht.is_alive() and asyncio.Event() and asyncio.wait(tasks)", set()),
    ],
)
def test_the_search_finds_them(source: str, what: set[str]) -> None:
    """However they are imported; asyncio's own are the loop's, and no thread waits for those."""
    assert refused(source) == what
