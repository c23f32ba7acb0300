"""Makes `tests/data/hivemind_load_balancing.json`: what hivemind 1.1.12 answers to random groups.

Run it with the Python of an environment that has hivemind (`benchmarks.allreduce` says how to make one)::

    DIR/bin/python benchmarks/contenders/hivemind_load_balancing.py > tests/data/hivemind_load_balancing.json

A case is the number of elements, the bandwidths (null: not given; 0: reduces nothing), the smallest share, and the
shares that hivemind's `load_balance_peers` gave, or why it gave none. It imports nothing of shoal.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import warnings

CASES = 400


def draw(rng: random.Random) -> tuple[int, list[float | None], int]:
    """One group: up to 16 members, bandwidths over up to six decades, some not given, some 0."""
    count, numel, decades = rng.randint(2, 16), rng.choice([10, 1000, 10**6, 10**9]), rng.choice([0.5, 2.0, 6.0])
    unknown, none = rng.choice([0.0, 0.2, 1.0] if rng.random() < 0.2 else [0.0, 0.2]), rng.choice([0.0, 0.2])
    bandwidths: list[float | None] = []
    for _ in range(count):
        chance = rng.random()
        given = float(f"{10 ** rng.uniform(1, 1 + decades):.4g}")
        bandwidths.append(0.0 if chance < none else None if chance < none + unknown else given)
    if all(each == 0 for each in bandwidths):
        bandwidths[0] = 100.0
    return numel, bandwidths, int(numel * rng.choice([0.0, 0.0, 0.01, 0.05, 0.2, 0.5, 1.5]))


def main() -> None:
    """Print all cases."""
    from hivemind.averaging.load_balancing import load_balance_peers  # type: ignore[import-not-found]

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rng, lines = random.Random(1112), []
    for _ in range(CASES):
        numel, bandwidths, min_size = draw(rng)
        try:
            shares: list[int] | str = [int(each) for each in load_balance_peers(numel, bandwidths, min_size)]
        except Exception as error:  # noqa: BLE001 (what it raises is part of the answer)
            shares = f"{type(error).__name__}: {error}"
        lines.append(json.dumps([numel, bandwidths, min_size, shares]))
    sys.stdout.write("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
