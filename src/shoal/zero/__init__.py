"""ZeRO, the zero redundancy optimizer: the memory of training is partitioned instead of repeated.

`laws` has the cost of each stage, in memory and in bytes sent, also for a real model. Names are loaded on first use:
the laws, and with them the command line, do without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import lazy

if TYPE_CHECKING:
    from shoal.zero.checkpoint import load, save
    from shoal.zero.laws import ENGINES, Cost, Engine, Precision, costs, estimate
    from shoal.zero.optimizer import ShardedOptimizer
    from shoal.zero.plain import full_state_dict
    from shoal.zero.saved import consolidate
    from shoal.zero.shard import shard
else:
    _LAWS = dict.fromkeys(("ENGINES", "Cost", "Engine", "Precision", "costs", "estimate"), "shoal.zero.laws")

    # Hidden from type checkers: otherwise they would accept any misspelt name.
    _OTHERS = {
        "ShardedOptimizer": "shoal.zero.optimizer",
        "consolidate": "shoal.zero.saved",
        "full_state_dict": "shoal.zero.plain",
        "load": "shoal.zero.checkpoint",
        "save": "shoal.zero.checkpoint",
        "shard": "shoal.zero.shard",
    }
    __getattr__, __dir__ = lazy(__name__, {**_LAWS, **_OTHERS})


__all__ = [
    "ENGINES",
    "Cost",
    "Engine",
    "Precision",
    "ShardedOptimizer",
    "consolidate",
    "costs",
    "estimate",
    "full_state_dict",
    "load",
    "save",
    "shard",
]
