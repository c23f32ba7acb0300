"""What stops training? ``python -m benchmarks.hardships``; ``--only NAME...``, ``--list``.

Replays, from outside, the plans with which a review stopped peers: pauses, signals, words of strangers, floods, wrong
clocks, addresses that nobody reaches. Peers are processes of their own that train with shoal's public interface;
strangers speak its protocol under fresh keys, from another address of this machine (127.0.0.2). Each line says `held`
or `broke`, and what was measured. The exit code is 1 if any broke. Two need root and nftables, for their routers:
without them they are `not run`.

Linux only. Paces are kept by timers; only `small_calls` measures speed, and wants two cores that do nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.hardships import costs, places, stops, words
from benchmarks.truth.kit import Verdict
from benchmarks.truth.playing import play

REPLAYS: dict[str, Callable[[], Verdict]] = {
    each.__name__: each for part in (stops, words, costs, places) for each in part.REPLAYS
}

if __name__ == "__main__":
    sys.exit(play(REPLAYS, prog="python -m benchmarks.hardships", doc=__doc__))
