"""Runs the demo's supervisor with stand-ins for its children: `demo_runner.py JSON`, or `run(...)` from a test.

JSON: `seconds`, `peers`, `json` (a path), `epoch_s`, `faults`, `limits` (fields of `Limits`).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from shoal.demo.plan import Limits
from shoal.demo.settings import NAMES, DemoOptions, Training
from shoal.demo.supervisor import Wiring, run_demo
from shoal.demo.swarm import MeetingPoint

CHILD = str(Path(__file__).with_name("demo_child.py"))


def run(
    *,
    record: Path,
    seconds: float = 1.5,
    peers: int = 3,
    epoch_s: float = 0.1,
    faults: dict[str, str] | None = None,
    limits: dict[str, float] | None = None,
) -> int:
    """Run the supervisor; returns its exit code."""
    story = {"began": time.time(), "epoch_s": epoch_s, "starters": NAMES[:peers], "faults": faults or {}}
    script = json.dumps(story)
    wiring = Wiring(
        peer=lambda config: [sys.executable, CHILD, "peer", script, config.decode()],
        baseline=lambda config: [sys.executable, CHILD, "baseline", script, config.decode()],
        meeting=lambda: MeetingPoint(("nowhere",), lambda: None),
        limits=Limits(**{"margin_s": 0.3, **(limits or {})}),
        training=Training(target_batch=16),
    )
    options = DemoOptions(seconds=seconds, peers=peers, headless=True, json=record, report=None)
    return run_demo(options, wiring)


if __name__ == "__main__":
    told: dict[str, Any] = json.loads(sys.argv[1])
    sys.exit(run(**{**told, "record": Path(told["record"])}))
