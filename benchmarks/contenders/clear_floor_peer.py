"""The least that a round of shoal can be, without encryption."""

from __future__ import annotations

from benchmarks.contenders.floor_peer import FloorPeer
from benchmarks.contenders.worker import serve


class ClearFloorPeer(FloorPeer):
    """One peer for a network that is trusted."""

    encrypt = False


if __name__ == "__main__":
    serve(ClearFloorPeer)
