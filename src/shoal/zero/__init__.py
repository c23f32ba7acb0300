"""ZeRO, the zero redundancy optimizer: the memory of training is partitioned instead of repeated.

`laws` has the cost of each stage, in memory and in bytes sent, also for a real model. Names are loaded on first use:
the laws, and with them the command line, do without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy

if TYPE_CHECKING:
    from shoal.zero.activations import save_on_disk
    from shoal.zero.checkpoint import load, save
    from shoal.zero.ema import EMA
    from shoal.zero.laws import ENGINES, Cost, Engine, Precision, costs, estimate
    from shoal.zero.optimizer import ShardedOptimizer
    from shoal.zero.partitioned import PartitionedActivations, partition_activations
    from shoal.zero.plain import full_state_dict
    from shoal.zero.planning import Plan, fewest_ranks, plans
    from shoal.zero.saved import consolidate
    from shoal.zero.shard import shard
    from shoal.zero.transformer import Transformer
else:
    _LAWS = dict.fromkeys(("ENGINES", "Cost", "Engine", "Precision", "costs", "estimate"), "shoal.zero.laws")

    # Hidden from type checkers: otherwise they would accept any misspelt name.
    _OTHERS = {
        "EMA": "shoal.zero.ema",
        "PartitionedActivations": "shoal.zero.partitioned",
        "Plan": "shoal.zero.planning",
        "ShardedOptimizer": "shoal.zero.optimizer",
        "Transformer": "shoal.zero.transformer",
        "consolidate": "shoal.zero.saved",
        "fewest_ranks": "shoal.zero.planning",
        "full_state_dict": "shoal.zero.plain",
        "load": "shoal.zero.checkpoint",
        "partition_activations": "shoal.zero.partitioned",
        "plans": "shoal.zero.planning",
        "save": "shoal.zero.checkpoint",
        "save_on_disk": "shoal.zero.activations",
        "shard": "shoal.zero.shard",
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
