"""The collaborative optimizer: one swarm-wide large-batch step behind an ordinary torch optimizer.

Read `training_state` (what a peer trains: no network), then `phases` (when the swarm steps: a pure machine), then
`participant` (the shell that does it, in the loop), then `optimizer` (the class that users hold). Beside them:
`own_state` (the state that a peer trains), `outlook` (the swarm as it sees it), `takeover` (of a better state),
`state_name` (how a state is named), `gossip` (how peers tell where they stand), `shared_state` (what newcomers
download), `checkpoint` (the same on disk) and `saving` (when it is written). With a strategy that merges: `outer` (the
anchor and its optimizer), `pace` (when a merge is due) and `fragments` (of the model, each with its participant). For
loops that take their own steps, as with hivemind: `grad_averager`, `power_sgd`, `training_averager`, `state_averager`,
`progress_tracker`; and for float16: `grad_scaler`.
"""

from shoal.hivemind.grad_averager import GradientAverager
from shoal.hivemind.grad_scaler import GradScaler
from shoal.hivemind.power_sgd import PowerSGDGradientAverager
from shoal.hivemind.progress_tracker import ProgressTracker
from shoal.hivemind.state_averager import TrainingStateAverager
from shoal.hivemind.training_averager import TrainingAverager
from shoal.optim.optimizer import Optimizer
from shoal.run.participant import Participant
from shoal.run.report.status import PeerStatus, RoundStatus, Status
from shoal.run.settings import RunSettings
from shoal.train.training_state import TrainingState

__all__ = [
    "GradScaler",
    "GradientAverager",
    "Optimizer",
    "Participant",
    "PeerStatus",
    "PowerSGDGradientAverager",
    "ProgressTracker",
    "RoundStatus",
    "RunSettings",
    "Status",
    "TrainingAverager",
    "TrainingState",
    "TrainingStateAverager",
]
