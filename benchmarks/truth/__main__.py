"""Does it diverge in silence? ``python -m benchmarks.truth``; ``--only NAME...``, ``--list``.

Replays, from outside, what a review saw go wrong without a word: peers that are processes of their own train with
shoal's public interface and with the optimizers, trainers and schedules of others, as they come. Each line says `held`
or `broke` (or `not run`, and why), and what was measured. The exit code is 1 if any broke.

It is a check, and measures no speed: paces are kept by timers, so that a busy machine changes little. On two cores it
takes some minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.truth import attacks, company, newcomers, numbers, sharded, state, step
from benchmarks.truth.kit import Verdict
from benchmarks.truth.playing import play

REPLAYS: dict[str, Callable[[], Verdict]] = {
    each.__name__: each
    for part in (step, company, attacks, state, newcomers, numbers, sharded)
    for each in part.REPLAYS
}


def main() -> int:
    """Replay them."""
    return play(REPLAYS, prog="python -m benchmarks.truth", doc=__doc__)


if __name__ == "__main__":
    sys.exit(main())
