"""Does it stop training? ``python -m benchmarks.hardships`` replays what stopped peers in a review, from outside."""
