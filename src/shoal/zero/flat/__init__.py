"""Stages 1 and 2: each rank keeps and steps the optimizer state of its own tiles."""
