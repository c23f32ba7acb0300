"""The collaborative optimizer: one swarm-wide large-batch step behind an ordinary torch optimizer.

Read `training_state` (what a peer trains: no network), then `collaboration` (when the swarm steps: no threads), then
`optimizer` (the class that users hold).
"""

from shoal.optim.collaboration import Collaboration, CollaborationSettings
from shoal.optim.optimizer import Optimizer
from shoal.optim.training_state import TrainingState

__all__ = ["Collaboration", "CollaborationSettings", "Optimizer", "TrainingState"]
