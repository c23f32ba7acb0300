"""The facade: `Optimizer`, one swarm-wide step behind an ordinary torch optimizer.

It puts together a strategy (`shoal.strategies`), what one peer trains (`shoal.train`) and its part in a run
(`shoal.run`). `arguments` checks what tunes a run. The names of hivemind 1.1.12 are in `shoal.hivemind`; some of them
can be had here, too.
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
