"""The demo: unequal processes on one machine train a small language model, lose a peer and take in another.

=================  ==========================================================================================
module             what it does
=================  ==========================================================================================
settings           the user's options, and the training settings all processes share
messages           the messages between supervisor and children (JSON lines)
state              everything known about a run: for screen, file and picture; pure
plan               the planned actions of the demo, and their times (sans-IO)
supervisor         processes, signals, time; `run_demo` is here
children           one child process: started, heard, told, ended
lifeline           the child's side of it
screen             the live screen and the plain lines
result             the result, in sentences and as JSON
report             the result, as a picture
peer               a peer process: the training loop
baseline           the single process it is compared with
training           batches, model, optimizer, schedule as peers and baseline share them
model              a small ALBERT-style masked language model in plain torch
text               English text and a tokenizer without a download
=================  ==========================================================================================

Only peer, baseline, training and model import torch; the supervisor's process never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy

if TYPE_CHECKING:
    from shoal.demo.settings import DemoOptions
    from shoal.demo.supervisor import run_demo
else:
    # On first use: a child process passes through here too, and needs neither the supervisor nor the screen.
    __getattr__, __dir__ = lazy(__name__, {"DemoOptions": "shoal.demo.settings", "run_demo": "shoal.demo.supervisor"})


__all__ = ["DemoOptions", "run_demo"]
