"""Codecs side by side: ``python -m benchmarks.compression --hivemind-python PATH``.

Each codec encodes and decodes tensors of four kinds with one thread, in each of the sizes in ``--numel``: as large as
the parts of a round, and smaller ones. The codecs take turns, and with ``--hivemind-python`` so do shoal's and
hivemind 1.1.12's codec of the same name, on the same tensor, in processes of their own; who is first alternates.
`benchmarks.allreduce` says how to make an environment for hivemind, whose blockwise codec needs bitsandbytes in it
(``DIR/bin/pip install bitsandbytes==0.50.2``; it runs on CPUs, too). In a turn a small tensor is encoded, and then
decoded, so often that it is as much work as a large one, at most `MOST_REPEATS` times. Printed are medians:

- *ratio*: bytes of the float32 tensor / bytes of the encoding;
- *rms*, *max*: error, in units of the root of the values' mean square; *bound*: what the codec promises as the largest;
- *encode*, *decode*: GB/s (10^9 bytes of float32 each second), decoding to a float32 tensor. `none` decodes without a
  copy, so its number says only what a call costs. With ``--cpu`` they are of processor time, whatever else runs;
- *times*: shoal's speed / hivemind's in the same turn, median and range; the last two columns of hivemind's rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TopKCompression,
    Uniform8BitQuantization,
)

ROOT = Path(__file__).resolve().parent.parent
CODECS: list[CompressionBase] = [
    NoCompression(),
    Float16Compression(),
    BFloat16Compression(),
    ScaledFloat16Compression(),
    Uniform8BitQuantization(),
    Quantile8BitQuantization(),
    BlockwiseQuantization(),
    BlockwiseQuantization(8, 256),
    BlockwiseQuantization(8, 4096),
    BlockwiseQuantization(4),
    BlockwiseQuantization(2),
    TopKCompression(0.01),
    TopKCompression(0.03, bits=2),
]

ALONE = {
    *("bfloat16", "blockwise:8:256", "blockwise:8:4096", "blockwise:4:64", "blockwise:2:64"),
    *("topk:0.01", "topk:0.03:2"),
}
"""hivemind has no such codec. Its blockwise one has blocks of 4096, and stands beside shoal's default."""

SIZES = (1_000, 16_384, 262_144)
MOST_REPEATS = 64

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda normal: normal,
    "heavy tails (normal cubed)": lambda normal: normal**3,
    "one sign (normal squared)": lambda normal: normal.square(),
    "outliers (one in 1000 is 1000 times as large)": lambda normal: torch.where(
        torch.arange(normal.numel()) % 1000 == 500, normal * 1000, normal
    ),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--numel", default=",".join(map(str, SIZES)), help="elements of each tensor, with commas")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--hivemind-python", metavar="PATH", help="Python of an environment with hivemind 1.1.12")
    parser.add_argument("--cpu", action="store_true", help="count shoal's processor time: for a busy machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser.parse_args()


class Hivemind:
    """`contenders/hivemind_codecs.py` in a process of its own; silent without a Python for it."""

    def __init__(self, python: str | None) -> None:
        self.missing: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        if python is not None:
            self._process = subprocess.Popen(
                [python, str(ROOT / "benchmarks" / "contenders" / "hivemind_codecs.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def ask(self, **request: Any) -> dict[str, Any] | None:
        """None: it is not there, or has no such codec."""
        if self._process is None or request.get("codec") in self.missing:
            return None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it ended: so does what it writes
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or '{"error": "it ended"}')
        if "error" in answer:
            self.missing[request.get("codec", "hivemind")] = answer["error"]
            return None
        return answer

    def end(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)


def measure(codec: CompressionBase, values: torch.Tensor, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """One turn of shoal's codec."""
    begun = clock()
    for _ in range(repeats):
        data = codec.encode(values)
    encoded = clock()
    for _ in range(repeats):
        decoded = codec.decode(data, values.numel(), values.dtype).to(torch.float32)
    ended = clock()
    error = (decoded - values).double()
    return {
        "encode_s": (encoded - begun) / repeats,
        "decode_s": (ended - encoded) / repeats,
        "bytes": data.nbytes,
        "rms": float(error.square().mean().sqrt()),
        "max": float(error.abs().max()),
    }


def run(values: torch.Tensor, turns: int, hivemind: Hivemind, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """All codecs on one tensor: a row for each contender."""
    kept: dict[tuple[str, str], list[dict[str, Any]]] = {}
    repeats = max(1, min(MOST_REPEATS, SIZES[-1] // values.numel()))
    for turn in range(turns + 1):
        for codec in CODECS:
            theirs = None if codec.name in ALONE else type(codec).__name__
            others = None
            if theirs and turn % 2:
                others = hivemind.ask(do="measure", codec=theirs, repeats=repeats)
            ours = measure(codec, values, repeats, clock)
            if theirs and not turn % 2:
                others = hivemind.ask(do="measure", codec=theirs, repeats=repeats)
            if turn:  # the first one warms up
                kept.setdefault(("shoal", codec.name), []).append(ours)
                if others:
                    kept.setdefault(("hivemind", codec.name), []).append(others)
    scale = float(values.double().square().mean().sqrt())
    rows = []
    for (who, name), measured in kept.items():
        row: dict[str, Any] = {"codec": name, "who": who, "ratio": 4 * values.numel() / measured[-1]["bytes"]}
        row |= {key: measured[-1][key] / scale for key in ("rms", "max")}
        row |= {
            f"{step}_gb_s": 4e-9 * values.numel() / statistics.median(turn[f"{step}_s"] for turn in measured)
            for step in ("encode", "decode")
        }
        if who == "shoal":
            codec = next(codec for codec in CODECS if codec.name == name)
            row["bound"] = codec.max_error(values) / scale
            row["theirs"] = None if name in ALONE else type(codec).__name__
        else:
            for step in ("encode_s", "decode_s"):
                # One that fails is not asked again: what there is of it is of the first turns.
                ratios = sorted(b[step] / a[step] for a, b in zip(kept["shoal", name], measured, strict=False))
                row[f"times_{step[:6]}"] = (statistics.median(ratios), ratios[0], ratios[-1])
        rows.append(row)
    return rows


def show(kind: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{kind}\n")
    print("| codec | | ratio | rms | max | bound | encode GB/s | decode GB/s | times encode | times decode |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        bound = f"{row['bound']:.4g}" if "bound" in row else ""
        times = [
            "{:.1f} ({:.1f} to {:.1f})".format(*row[key]) if key in row else ""
            for key in ("times_encode", "times_decode")
        ]
        print(
            f"| `{row['codec']}` | {row['who']} | {row['ratio']:.2f} | {row['rms']:.3g} | {row['max']:.3g} | {bound} "
            f"| {row['encode_gb_s']:.2f} | {row['decode_gb_s']:.2f} | {times[0]} | {times[1]} |"
        )


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    clock = time.thread_time if args.cpu else time.perf_counter
    hivemind = Hivemind(args.hivemind_python)
    sizes: dict[str, dict[str, Any]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for numel in map(int, args.numel.split(",")):
                normal = torch.randn(numel, generator=torch.Generator().manual_seed(0))
                results = sizes[str(numel)] = {}
                for kind, make in KINDS.items():
                    values = make(normal)
                    torch.save(values, Path(folder) / "values.pt")
                    hivemind.ask(do="load", path=str(Path(folder) / "values.pt"))
                    results[kind] = run(values, args.turns, hivemind, clock)
                    if not args.json:
                        show(f"{numel:,} values, {kind}", results[kind])
    finally:
        hivemind.end()
    if args.json:
        json.dump({"turns": args.turns, "missing": hivemind.missing, "sizes": sizes}, sys.stdout)
    for codec, reason in hivemind.missing.items():
        print(f"\nnot measured: hivemind's {codec}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
