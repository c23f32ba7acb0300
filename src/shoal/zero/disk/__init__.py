"""Checkpoints of sharded training, and a model's first weights from files."""
