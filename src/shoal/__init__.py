"""shoal trains one PyTorch model on machines that nobody controls.

The public names of the package. They are loaded on first use, so that `import shoal`, and with it the command line,
starts without torch. A module below this one never imports from here: it names the module it means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy
from shoal.version import __version__

if TYPE_CHECKING:
    from shoal import compression, data, sim, strategies, zero
    from shoal.base.clock import get_dht_time
    from shoal.base.peer import Address, Invite, PeerID
    from shoal.errors import ConfigError, RoundFailed, SchemaMismatch, ShoalError, StateUnavailable
    from shoal.optim import (
        GradientAverager,
        GradScaler,
        Optimizer,
        PowerSGDGradientAverager,
        ProgressTracker,
        TrainingAverager,
        TrainingStateAverager,
    )
    from shoal.run.watching import read_run
    from shoal.runtime.averager import DecentralizedAverager
    from shoal.runtime.dht import DHT
    from shoal.runtime.leave import leave_on_sigterm
else:
    _HOMES = {
        "DHT": "shoal.runtime.dht",
        "Address": "shoal.base.peer",
        "ConfigError": "shoal.errors",
        "DecentralizedAverager": "shoal.runtime.averager",
        "GradScaler": "shoal.optim",
        "GradientAverager": "shoal.optim",
        "Invite": "shoal.base.peer",
        "Optimizer": "shoal.optim",
        "PeerID": "shoal.base.peer",
        "PowerSGDGradientAverager": "shoal.optim",
        "ProgressTracker": "shoal.optim",
        "RoundFailed": "shoal.errors",
        "SchemaMismatch": "shoal.errors",
        "ShoalError": "shoal.errors",
        "StateUnavailable": "shoal.errors",
        "TrainingAverager": "shoal.optim",
        "TrainingStateAverager": "shoal.optim",
        "compression": "shoal",
        "data": "shoal",
        "leave_on_sigterm": "shoal.runtime.leave",
        "get_dht_time": "shoal.base.clock",
        "read_run": "shoal.run.watching",
        "sim": "shoal",
        "strategies": "shoal",
        "zero": "shoal",
    }

    # Hidden from type checkers: otherwise they would accept any misspelt name.
    __getattr__, __dir__ = lazy(__name__, _HOMES)


__all__ = [
    "DHT",
    "Address",
    "ConfigError",
    "DecentralizedAverager",
    "GradScaler",
    "GradientAverager",
    "Invite",
    "Optimizer",
    "PeerID",
    "PowerSGDGradientAverager",
    "ProgressTracker",
    "RoundFailed",
    "SchemaMismatch",
    "ShoalError",
    "StateUnavailable",
    "TrainingAverager",
    "TrainingStateAverager",
    "__version__",
    "compression",
    "data",
    "get_dht_time",
    "leave_on_sigterm",
    "read_run",
    "sim",
    "strategies",
    "zero",
]
