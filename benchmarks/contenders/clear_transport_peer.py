"""shoal's transport alone, without encryption."""

from __future__ import annotations

from benchmarks.contenders.transport_peer import TransportPeer
from benchmarks.contenders.worker import serve


class ClearTransportPeer(TransportPeer):
    """One peer for a network that is trusted."""

    encrypt = False


if __name__ == "__main__":
    serve(ClearTransportPeer)
