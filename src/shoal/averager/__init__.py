"""The async core of an averager: matchmaking, then the all-reduce, then the commit; and the state that it shares.

`Averager` is the core, `directory` how groups and donors find each other in the DHT. The synchronous class that users
hold is `shoal.DecentralizedAverager`, in `shoal.runtime`.
"""

from shoal.averager.averager import Averager, AveragerSettings, StepResult, TensorLock
from shoal.averager.directory import DhtDirectory, find_donors

__all__ = [
    "Averager",
    "AveragerSettings",
    "DhtDirectory",
    "StepResult",
    "TensorLock",
    "find_donors",
]
