"""Does it still diverge in silence? ``python -m benchmarks.truth`` replays what a review saw, from outside."""
