"""The collaborative optimizer: one swarm-wide large-batch step behind an ordinary torch optimizer.

Read `training_state` (what a peer trains: no network), then `collaboration` (when the swarm steps: no threads), then
`optimizer` (the class that users hold). Beside them: `state_name` (what a state is called), `gossip` (how peers tell
where they stand), `shared_state` (what newcomers download), `rate`, `settings`.
"""

from shoal.optim.collaboration import Collaboration
from shoal.optim.optimizer import Optimizer
from shoal.optim.settings import CollaborationSettings
from shoal.optim.training_state import TrainingState

__all__ = ["Collaboration", "CollaborationSettings", "Optimizer", "TrainingState"]
