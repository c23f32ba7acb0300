"""ZeRO, the zero redundancy optimizer: the memory of training is partitioned instead of repeated.

`laws` has the cost of each stage, in memory and in bytes sent, also for a real model. Names are loaded on first use:
the laws, and with them the command line, do without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy

if TYPE_CHECKING:
    from shoal.zero.disk.checkpoint import load, save
    from shoal.zero.disk.plain import full_state_dict
    from shoal.zero.disk.saved import consolidate
    from shoal.zero.ema import EMA
    from shoal.zero.memory.activations import save_on_disk
    from shoal.zero.memory.partitioned import PartitionedActivations, partition_activations
    from shoal.zero.optimizer import ShardedOptimizer
    from shoal.zero.plan.laws import ENGINES, Cost, Engine, Precision, costs, estimate
    from shoal.zero.plan.planning import Plan, fewest_ranks, plans
    from shoal.zero.plan.transformer import Transformer
    from shoal.zero.sharding import shard
else:
    _LAWS = dict.fromkeys(("ENGINES", "Cost", "Engine", "Precision", "costs", "estimate"), "shoal.zero.plan.laws")

    # Hidden from type checkers: otherwise they would accept any misspelt name.
    _OTHERS = {
        "EMA": "shoal.zero.ema",
        "PartitionedActivations": "shoal.zero.memory.partitioned",
        "Plan": "shoal.zero.plan.planning",
        "ShardedOptimizer": "shoal.zero.optimizer",
        "Transformer": "shoal.zero.plan.transformer",
        "consolidate": "shoal.zero.disk.saved",
        "fewest_ranks": "shoal.zero.plan.planning",
        "full_state_dict": "shoal.zero.disk.plain",
        "load": "shoal.zero.disk.checkpoint",
        "partition_activations": "shoal.zero.memory.partitioned",
        "plans": "shoal.zero.plan.planning",
        "save": "shoal.zero.disk.checkpoint",
        "save_on_disk": "shoal.zero.memory.activations",
        "shard": "shoal.zero.sharding",
    }
    __getattr__, __dir__ = lazy(__name__, {**_LAWS, **_OTHERS})


__all__ = [
    "EMA",
    "ENGINES",
    "Cost",
    "Engine",
    "PartitionedActivations",
    "Plan",
    "Precision",
    "ShardedOptimizer",
    "Transformer",
    "consolidate",
    "costs",
    "estimate",
    "fewest_ranks",
    "full_state_dict",
    "load",
    "partition_activations",
    "plans",
    "save",
    "save_on_disk",
    "shard",
]
