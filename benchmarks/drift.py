"""How far parameters drift apart with another arithmetic: ``python -m benchmarks.drift``.

The same gradients of 100,003 numbers (standard normal; the parameters are a tenth of that) are stepped in processes of
their own, with one thread each: by torch's native code for this processor, by its code without vectors
(`ATEN_CPU_CAPABILITY=default`) and, where there is one, on a GPU. Printed for each after so many steps: how many
numbers differ from the native ones, by how much at most and in the root mean square, and the latter relative to the
parameters' own root mean square. The check of the parameters compares that with its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from benchmarks.allreduce import ROOT
from shoal.run.decide.check import BOUND

NUMEL = 100_003
WAYS = {"native": "", "default": "default", "cuda": ""}
CASES: dict[str, tuple[torch.dtype, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]]] = {
    "AdamW": (torch.float32, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)),
    "SGD with momentum": (torch.float32, lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)),
    "AdamW, bfloat16": (torch.bfloat16, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)),
}


def step(way: str, looks: list[int], into: str) -> None:
    """Take the steps of all cases; writes the parameters after each number of steps that is in `looks`."""
    torch.set_num_threads(1)
    device, found = "cuda" if way == "cuda" else "cpu", dict[tuple[str, int], torch.Tensor]()
    for name, (dtype, make) in CASES.items():
        draw = np.random.default_rng(0)  # torch's own numbers follow from its arithmetic

        def numbers(draw: np.random.Generator = draw, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.from_numpy(draw.standard_normal(NUMEL, dtype=np.float32)).to(device, dtype)

        parameter = torch.nn.Parameter(numbers() / 10)
        optimizer = make([parameter])
        for number in range(1, looks[-1] + 1):
            parameter.grad = numbers()
            optimizer.step()
            if number in looks:
                found[name, number] = parameter.detach().to("cpu", copy=True)
    torch.save(found, into)


def stepped(way: str, looks: list[int]) -> dict[tuple[str, int], torch.Tensor]:
    """The same in a process of its own: how torch computes is decided as it starts."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "found")
        command = [sys.executable, "-m", "benchmarks.drift", "--steps", *map(str, looks), "--way", way, "--into", path]
        paths = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
        env = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"} | {"PYTHONPATH": paths}
        subprocess.run(
            command, check=True, cwd=ROOT, env=env | ({"ATEN_CPU_CAPABILITY": WAYS[way]} if WAYS[way] else {})
        )
        found: dict[tuple[str, int], torch.Tensor] = torch.load(path)
        return found


def drift(mine: torch.Tensor, native: torch.Tensor) -> dict[str, float]:
    """How far these are apart."""
    apart, size = mine.double() - native.double(), float(native.double().square().mean().sqrt())
    rms = float(apart.square().mean().sqrt())
    most = float(apart.abs().max())
    return {"differ": float((apart != 0).double().mean()), "most": most, "rms": rms, "relative": rms / size}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100, 1000], help="when to look")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    looks = sorted(args.steps)
    if args.way:
        step(args.way, looks, args.into)
        return 0
    print(f"native: torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; the check's bound: {BOUND:g}")
    native, results = stepped("native", looks), list[dict[str, object]]()
    for way in ["default", *(["cuda"] if torch.cuda.is_available() else [])]:
        for (name, number), mine in stepped(way, looks).items():
            found = drift(mine, native[name, number])
            results.append({"way": way, "case": name, "steps": number, **found})
            print(
                f"{way:8} {name:18} {number:5} steps: {found['differ']:6.2%} differ, at most {found['most']:.1e}, "
                f"rms {found['rms']:.1e}, relative {found['relative']:.1e}",
                flush=True,
            )
    if not torch.cuda.is_available():
        print("cuda: not measured, there is no GPU here")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
