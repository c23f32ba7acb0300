"""Stage 3: PyTorch's FSDP2, and what it lacks."""
