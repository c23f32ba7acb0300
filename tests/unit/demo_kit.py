"""What peers of a demo say in tests."""

from __future__ import annotations

from shoal import events
from shoal.base.peer import PeerID


def id_of(name: str) -> PeerID:
    """A peer's identity, made of its name."""
    return PeerID(name.encode().ljust(32, b"-"))


def stepped_into(epoch: int, samples: int = 16) -> events.EpochAdvanced:
    """A step of the swarm."""
    return events.EpochAdvanced(run_id="run", epoch=epoch, samples=samples, peers=3, digest=bytes(32))


def round_of(peers: int, duration_s: float) -> events.RoundFinished:
    """A round of averaging."""
    members = tuple(id_of(str(number)) for number in range(peers))
    return events.RoundFinished(
        prefix="run", round_id=b"", peers=members, left_out=(), bytes_sent=1, bytes_received=1, duration_s=duration_s
    )


def noted(text: str) -> events.Warned:
    """A line for the log."""
    return events.Warned(where="test", message=text)
