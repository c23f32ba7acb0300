"""Does it diverge in silence? ``python -m benchmarks.truth``; ``--only NAME...``, ``--list``.

Replays, from outside, what a review saw go wrong without a word: peers that are processes of their own train with
shoal's public interface and with the optimizers, trainers and schedules of others, as they come. Each line says `held`
or `broke`, and what was measured. The exit code is 1 if any broke.

It is a check, and measures no speed: paces are kept by timers, so that a busy machine changes little. On two cores it
takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from benchmarks.truth import attacks, numbers, sharded, state, step
from benchmarks.truth.kit import Verdict
from benchmarks.truth.peers import Peers

REPLAYS: dict[str, Callable[[], Verdict]] = {
    each.__name__: each for part in (step, attacks, state, numbers, sharded) for each in part.REPLAYS
}


def main() -> int:
    """Replay them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(REPLAYS), help="some of them; see --list")
    parser.add_argument("--list", action="store_true", help="the names, and what each replays")
    parser.add_argument("--verbose", action="store_true", help="of what broke, all that its peers saw")
    args = parser.parse_args()
    broke = list[str]()
    for name in args.only or REPLAYS:
        replay = REPLAYS[name]
        if args.list:
            print(f"{name:22} {(replay.__doc__ or '').splitlines()[0]}")
            continue
        Peers.returned.clear()
        began = time.monotonic()
        try:
            verdict = replay()
        except Exception as error:  # noqa: BLE001 (a replay that cannot be played to its end has not held)
            verdict = Verdict(held=False, measured=f"{type(error).__name__}: {error}")
        if not verdict.held:
            broke.append(name)
            for report in Peers.returned if args.verbose else ():
                print(f"      {report}", file=sys.stderr)
        took_s = time.monotonic() - began
        print(f"{'held' if verdict.held else 'broke':6}{name:22}{took_s:5.1f} s  {verdict.measured}", flush=True)
    if not args.list:
        print(f"broke: {', '.join(broke)}" if broke else "all hold")
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main())
