"""Runs a program as one of two peers, and ends it early: `python -m tests.integration.run_on_two EPOCHS PROGRAM ARGS…`.

The program stays as it is. A `shoal.Optimizer` waits until both peers of the run are there before it says where the run
ends. After the first step that both took it says so anew: so many epochs later. At the end a line tells how many peers
took the largest step.
"""

from __future__ import annotations

import runpy
import sys
import threading
from typing import Any

import shoal
from shoal.events import EpochAdvanced, Event

announce_end, step = shoal.Optimizer.announce_end, shoal.Optimizer.step
together = [0]
ends: dict[shoal.Optimizer, int | None] = {}
"""What the program has said, of each optimizer whose run is not said to end early yet."""


def hear(event: Event) -> None:
    """Note how many peers took a step."""
    if isinstance(event, EpochAdvanced):
        together.append(event.peers)


def announce_end_together(self: shoal.Optimizer, epoch: int | None) -> None:
    """As `announce_end`, once both are there."""
    self.dht.events.subscribe(hear)
    while len(self.status().peers) < 2:
        threading.Event().wait(0.02)
    announce_end(self, epoch)
    ends[self] = epoch


def step_and_end(self: shoal.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """As `step`; the run ends soon after the first step of both."""
    result = step(self, *args, **kwargs)
    if max(together) >= 2 and self in ends:
        said, soon = ends.pop(self), self.local_epoch + int(epochs)
        announce_end(self, soon if said is None else min(said, soon))
    return result


_, epochs, program, *arguments = sys.argv
shoal.Optimizer.announce_end = announce_end_together  # type: ignore[method-assign]
shoal.Optimizer.step = step_and_end  # type: ignore[method-assign]
sys.argv[:] = [program, *arguments]
runpy.run_path(program, run_name="__main__")
print(f"{max(together)} peers together", flush=True)
