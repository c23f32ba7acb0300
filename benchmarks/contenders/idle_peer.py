"""A process of `benchmarks.idle`: imports, and starts, what `--what` says, and tells how long each took (seconds).

Imports nothing but what it measures, so that nothing is there before. ``shoal`` and ``torch`` only import;
``shoal-peer`` and ``hivemind-peer`` also start a DHT and an averager of a tiny tensor, and then do nothing.
"""

from __future__ import annotations

import json
import sys
import time


def main(what: str) -> None:
    began = time.perf_counter()
    answer = {}
    if what == "torch":
        import torch
    elif what == "shoal":
        import shoal
    elif what == "shoal-peer":
        import torch

        import shoal

        shoal.DHT, shoal.DecentralizedAverager  # noqa: B018 (they are loaded when they are first named)
    elif what == "hivemind-peer":
        import hivemind  # type: ignore[import-not-found]
        import torch
    imported = time.perf_counter()
    answer["import_s"] = imported - began
    if what.endswith("-peer"):
        library = shoal if what == "shoal-peer" else hivemind
        dht = library.DHT(start=True)
        answer["dht_s"] = time.perf_counter() - imported
        averager = library.DecentralizedAverager([torch.zeros(4)], dht, start=True, prefix="idle", target_group_size=2)
        answer["start_s"] = time.perf_counter() - imported
    print(json.dumps(answer), flush=True)
    sys.stdin.read()
    if what.endswith("-peer"):
        averager.shutdown()
        dht.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
