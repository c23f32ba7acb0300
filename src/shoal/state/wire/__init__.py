"""Serve, fetch, verify and resume a peer's state.

`manifest` and `plan` are pure: the layout of a state, and its missing chunks. `snapshot` and `donor` are the donor's
side, `assembly` and `download` the receiver's. See those for their invariants.
"""

from shoal.state.wire.arrivals import Intake
from shoal.state.wire.donor import StateDonor
from shoal.state.wire.download import Donor, DownloadedState, DownloadLimits, download_state
from shoal.state.wire.manifest import Accept, Manifest, StateTensorSpec, matching
from shoal.state.wire.pace import Pacer
from shoal.state.wire.snapshot import HoldState, SharedState, ShareLimits, StateAway

__all__ = [
    "Accept",
    "Donor",
    "DownloadLimits",
    "DownloadedState",
    "HoldState",
    "Intake",
    "Manifest",
    "Pacer",
    "ShareLimits",
    "SharedState",
    "StateAway",
    "StateDonor",
    "StateTensorSpec",
    "download_state",
    "matching",
]
