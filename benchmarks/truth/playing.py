"""Plays replays one after another, and prints of each whether it held, or why it was not run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

from benchmarks.truth.kit import CannotRunError, Verdict
from benchmarks.truth.peers import Peers

__all__ = ["play"]


def play(replays: Mapping[str, Callable[[], Verdict]], *, prog: str, doc: str | None) -> int:
    """Replay them, as the command line says; the exit code is 1 if any broke. Some cannot be run on every machine."""
    parser = argparse.ArgumentParser(prog=prog, description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(replays), help="some of them; see --list")
    parser.add_argument("--list", action="store_true", help="the names, and what each replays")
    parser.add_argument("--verbose", action="store_true", help="of what broke, all that its peers saw")
    args = parser.parse_args()
    broke, not_run = list[str](), list[str]()
    for name in args.only or replays:
        replay = replays[name]
        if args.list:
            print(f"{name:22} {(replay.__doc__ or '').splitlines()[0]}")
            continue
        Peers.returned.clear()
        began = time.monotonic()
        try:
            verdict = replay()
        except CannotRunError as error:
            not_run.append(name)
            print(f"not run: {name}: {error}", flush=True)
            continue
        except Exception as error:  # noqa: BLE001 (a replay that cannot be played to its end has not held)
            verdict = Verdict(held=False, measured=f"{type(error).__name__}: {error}")
        if not verdict.held:
            broke.append(name)
            for report in Peers.returned if args.verbose else ():
                print(f"      {report}", file=sys.stderr)
        took_s = time.monotonic() - began
        print(f"{'held' if verdict.held else 'broke':6}{name:22}{took_s:5.1f} s  {verdict.measured}", flush=True)
    if not args.list:
        if not_run:
            print(f"not run: {', '.join(not_run)}")
        print(f"broke: {', '.join(broke)}" if broke else "all others hold" if not_run else "all hold")
    return 1 if broke else 0
