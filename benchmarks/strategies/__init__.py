"""What low-communication training costs in loss: see `benchmarks.strategies.__main__`."""
