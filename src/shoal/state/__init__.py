"""Serve, fetch, verify and resume a peer's state.

`manifest` and `plan` are pure: the layout of a state, and its missing chunks. `snapshot` and `donor` are the donor's
side, `assembly` and `download` the receiver's. See those for their invariants.
"""

from shoal.state.arrivals import Intake
from shoal.state.donor import ShareLimits, StateDonor
from shoal.state.download import Donor, DownloadedState, DownloadLimits, download_state
from shoal.state.manifest import Accept, Manifest, TensorSpec, matching
from shoal.state.pace import Pacer
from shoal.state.snapshot import HoldState, SharedState

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
    "StateDonor",
    "TensorSpec",
    "download_state",
    "matching",
]
