"""hivemind's codecs, for `benchmarks.compression`; run by a Python that has hivemind 1.1.12. Imports nothing of shoal.

Reads requests from standard input and answers on standard output, a line of JSON each: ``{"do": "load", "path": …}``
takes a tensor, ``{"do": "measure", "codec": NAME, "repeats": N}`` encodes it N times, then decodes it N times, and
tells what once took. What fails is ``{"error": …}``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from typing import Any


def main() -> None:
    """Answer until there are no more requests."""
    warnings.simplefilter("ignore")
    import torch
    from hivemind import compression  # type: ignore[import-not-found]

    logging.disable()
    torch.set_num_threads(1)
    values = torch.empty(0)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if request["do"] == "load":
                values = torch.load(request["path"])
            else:
                codec = getattr(compression, request["codec"])()
                answer = measure(codec, values, compression.CompressionInfo.from_tensor(values), request["repeats"])
        except Exception as error:  # noqa: BLE001 (told to whoever asked)
            answer = {"error": " ".join(str(error).split())}
        print(json.dumps(answer), flush=True)


def measure(codec, values, info, repeats: int) -> dict[str, float]:
    """One turn. The message is made and read, not sent."""
    begun = time.perf_counter()
    for _ in range(repeats):
        message = codec.compress(values, info)
    encoded = time.perf_counter()
    for _ in range(repeats):
        decoded = codec.extract(message)
    ended = time.perf_counter()
    error = (decoded - values).double()
    return {
        "encode_s": (encoded - begun) / repeats,
        "decode_s": (ended - encoded) / repeats,
        "bytes": len(message.buffer),
        "rms": float(error.square().mean().sqrt()),
        "max": float(error.abs().max()),
    }


if __name__ == "__main__":
    main()
