"""A program that ends while the threads of gloo still have tensors: they run only when nothing else of it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.zero.ranks.watch import Watch

GROUPS = 8

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
groups = [dist.group.WORLD, *(dist.new_group() for _ in range(GROUPS))]
watch = Watch(groups[0])  # as each sharded model has it
core = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, core)
for task in Path("/proc/self/task").glob("*"):
    if (task / "comm").read_text().strip() == "pt_gloo_runloop":
        os.sched_setaffinity(int(task.name), core)
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
sys.setswitchinterval(100)  # Python's lock changes hands only where it is given away
for each in groups:
    dist.all_reduce(torch.ones(1000), group=each)
dist.destroy_process_group()  # their threads go on: `groups` still has them
