"""A state: served to newcomers, fetched from donors, saved to a disk and read from there.

`manifest` and `plan` are pure: the layout of a state, and its missing chunks. `snapshot` and `donor` are the donor's
side, `assembly` and `download` the receiver's. `disk` has the folders in which states are saved. See those for their
invariants. Names are loaded on first use: who reads a folder needs no network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy

if TYPE_CHECKING:
    from shoal.state.arrivals import Intake
    from shoal.state.donor import StateDonor
    from shoal.state.download import Donor, DownloadedState, DownloadLimits, download_state
    from shoal.state.manifest import Accept, Manifest, StateTensorSpec, matching
    from shoal.state.pace import Pacer
    from shoal.state.snapshot import HoldState, SharedState, ShareLimits, StateAway
else:
    # Hidden from type checkers: otherwise they would accept any misspelt name.
    _DOWNLOAD = dict.fromkeys(("Donor", "DownloadLimits", "DownloadedState", "download_state"), "shoal.state.download")
    _MANIFEST = dict.fromkeys(("Accept", "Manifest", "StateTensorSpec", "matching"), "shoal.state.manifest")
    _SNAPSHOT = dict.fromkeys(("HoldState", "ShareLimits", "SharedState", "StateAway"), "shoal.state.snapshot")
    _OTHERS = {
        "Intake": "shoal.state.arrivals",
        "Pacer": "shoal.state.pace",
        "StateDonor": "shoal.state.donor",
    }
    __getattr__, __dir__ = lazy(__name__, {**_DOWNLOAD, **_MANIFEST, **_SNAPSHOT, **_OTHERS})

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
