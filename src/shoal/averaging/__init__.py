"""The async core of an averager: matchmaking, then the all-reduce, then the commit; and the state that it shares.

`Averager` is the core; `settings` has its numbers, `timeouts` their relations, `request` what one step is to do,
`lock` the lock of the tensors, `sharing` the state for newcomers, `group_finder` the search for a group, `conduct` the
peers that are not counted on, `strangers` what may be lost to unknown ones, `directory` the records by which groups and
donors find each other in the DHT. The synchronous class that users hold is `shoal.DecentralizedAverager`, in
`shoal.runtime`.
"""

from shoal.averaging.averager import Averager
from shoal.averaging.directory import DhtDirectory, find_donors
from shoal.averaging.lock import TensorLock, Turn
from shoal.averaging.request import AveragingMode, AveragingStage, StepRequest, StepResult
from shoal.averaging.settings import AveragerSettings, check_group_bits
from shoal.averaging.sharing import StateSharing
from shoal.averaging.strangers import Strangers
from shoal.averaging.timeouts import choose_timeouts

__all__ = [
    "Averager",
    "AveragerSettings",
    "AveragingMode",
    "AveragingStage",
    "DhtDirectory",
    "StateSharing",
    "StepRequest",
    "StepResult",
    "Strangers",
    "TensorLock",
    "Turn",
    "check_group_bits",
    "choose_timeouts",
    "find_donors",
]
