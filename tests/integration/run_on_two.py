"""Runs a program as one of two peers, and ends it early: `python -m tests.integration.run_on_two EPOCHS PROGRAM ARGS…`.

The program stays as it is. A `shoal.Optimizer` waits until both peers of the run are there before it says where the run
ends, and says so much earlier. At the end a line tells how many peers took the largest step.
"""

from __future__ import annotations

import runpy
import sys
import threading

import shoal
from shoal.events import EpochAdvanced, Event

announce_end = shoal.Optimizer.announce_end
together = [0]


def hear(event: Event) -> None:
    """Note how many peers took a step."""
    if isinstance(event, EpochAdvanced):
        together.append(event.peers)


def announce_end_early(self: shoal.Optimizer, epoch: int | None) -> None:
    """As `announce_end`, once both are there."""
    self.dht.events.subscribe(hear)
    while len(self.status().peers) < 2:
        threading.Event().wait(0.02)
    announce_end(self, None if epoch is None else min(epoch, int(epochs)))


_, epochs, program, *arguments = sys.argv
shoal.Optimizer.announce_end = announce_end_early  # type: ignore[method-assign]
sys.argv[:] = [program, *arguments]
runpy.run_path(program, run_name="__main__")
print(f"{max(together)} peers together", flush=True)
