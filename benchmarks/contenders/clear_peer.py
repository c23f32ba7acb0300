"""shoal without encryption."""

from __future__ import annotations

from benchmarks.contenders.shoal_peer import ShoalPeer
from benchmarks.contenders.worker import serve


class ClearPeer(ShoalPeer):
    """One peer for a network that is trusted."""

    encrypt = False


if __name__ == "__main__":
    serve(ClearPeer)
