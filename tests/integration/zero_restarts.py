"""A program for torchrun: of its first attempt a rank is killed in the middle, the next one goes on from a checkpoint.

python -m torch.distributed.run ... zero_restarts.py FOLDER STAGE
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shoal.zero

STEPS, KILLED_AT = 5, 3


def main(folder: Path, stage: int) -> None:
    """Train, and say from which step on."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model, optimizer = shoal.zero.shard(model, lambda each: torch.optim.AdamW(each, lr=1e-2), stage=stage)
    saved = sorted(folder.glob("step-*"))
    first = len(saved)
    if saved:
        shoal.zero.load(saved[-1], model, optimizer)
    for step in range(first, STEPS):
        model(torch.randn(4, 8)).square().mean().backward()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == KILLED_AT and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        shoal.zero.save(folder / f"step-{step}", model, optimizer)
    (folder / f"done-{dist.get_rank()}").write_text(str(first))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
