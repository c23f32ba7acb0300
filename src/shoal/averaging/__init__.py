"""The async core of an averager: matchmaking, then the all-reduce, then the commit; and the state that it shares.

`Averager` is the core; `settings` has its numbers, `timeouts` their relations, `request` what one step is to do,
`lock` the lock of the tensors, `sharing` the state for newcomers, `group_finder` the search for a group, `conduct` the
peers that are not counted on, `strangers` what may be lost to unknown ones, `directory` the records by which groups and
donors find each other in the DHT. The synchronous class that users hold is `shoal.DecentralizedAverager`, in
`shoal.runtime`. Names are loaded on first use: `core` and `strangers`, and with them a peer without tensors, do without
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy

if TYPE_CHECKING:
    from shoal.averaging.averager import Averager
    from shoal.averaging.directory import DhtDirectory, find_donors
    from shoal.averaging.lock import TensorLock, Turn
    from shoal.averaging.request import AveragingMode, AveragingStage, StepRequest, StepResult
    from shoal.averaging.settings import AveragerSettings, check_group_bits
    from shoal.averaging.sharing import StateSharing
    from shoal.averaging.strangers import Strangers
    from shoal.averaging.timeouts import choose_timeouts
else:
    _HOMES = {
        "Averager": "shoal.averaging.averager",
        "AveragerSettings": "shoal.averaging.settings",
        "AveragingMode": "shoal.averaging.request",
        "AveragingStage": "shoal.averaging.request",
        "DhtDirectory": "shoal.averaging.directory",
        "StateSharing": "shoal.averaging.sharing",
        "StepRequest": "shoal.averaging.request",
        "StepResult": "shoal.averaging.request",
        "Strangers": "shoal.averaging.strangers",
        "TensorLock": "shoal.averaging.lock",
        "Turn": "shoal.averaging.lock",
        "check_group_bits": "shoal.averaging.settings",
        "choose_timeouts": "shoal.averaging.timeouts",
        "find_donors": "shoal.averaging.directory",
    }
    __getattr__, __dir__ = lazy(__name__, _HOMES)

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
