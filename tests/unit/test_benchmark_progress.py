"""The simulated swarms of `benchmarks.progress`."""

from __future__ import annotations

from benchmarks.progress import simulated


def test_epochs_of_ten_seconds_last_ten_seconds() -> None:
    """Their peers stopped to look when the DHT was asked for initial peers: they lost each other, for 53 s each."""
    (epoch,) = simulated(8, 10.0, 1)
    assert epoch.duration_s <= 10.5
    assert epoch.turns == 2
