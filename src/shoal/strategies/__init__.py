"""Strategies: how the batches of each peer become one model. `shoal.Optimizer(..., strategy=...)` takes one.

`Synchronous` averages gradients, and every peer takes the same step: it wants a fast line. With `LocalUpdates` a peer
steps on its own batches at once, and the peers average their parameters. With the others they *merge* now and then what
they have trained. That takes 25 to 500 times fewer bytes. docs/how-to/strategies.md says which one is for which line.

Each one is a file, which owns *when* peers meet (`pace`), *what* a peer gives, and *how* the result is taken. All that
the rest of shoal asks of one is in `Strategy`, so one of your own takes one class, and no change elsewhere.

Sources: local SGD (https://arxiv.org/abs/1805.09767), DiLoCo (https://arxiv.org/abs/2311.08105), Streaming DiLoCo
(https://arxiv.org/abs/2501.18512), Decoupled DiLoCo (https://arxiv.org/abs/2604.21428).
"""

from __future__ import annotations

from shoal.strategies.decoupled import Decoupled
from shoal.strategies.diloco import DiLoCo
from shoal.strategies.local_sgd import LocalSGD
from shoal.strategies.local_updates import LocalUpdates
from shoal.strategies.merges import Merges
from shoal.strategies.merging import Merging, Outer, nesterov
from shoal.strategies.pace import Pace, SamplesPace
from shoal.strategies.strategy import Inner, Strategy, Terms
from shoal.strategies.streaming import StreamingDiLoCo
from shoal.strategies.synchronous import Synchronous
from shoal.train.training_state import TrainingState

__all__ = [
    "Decoupled",
    "DiLoCo",
    "Inner",
    "LocalSGD",
    "LocalUpdates",
    "Merges",
    "Merging",
    "Outer",
    "Pace",
    "SamplesPace",
    "Strategy",
    "StreamingDiLoCo",
    "Synchronous",
    "Terms",
    "TrainingState",
    "nesterov",
]
