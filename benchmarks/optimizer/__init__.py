"""Time to a loss, and what a step costs beyond the all-reduce: see `benchmarks.optimizer.__main__`."""
