"""Modules that need more care than their parameters show."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["limited_embeddings"]


def limited_embeddings(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Embeddings that change their own trained weight in forward, row by row (`max_norm`): names and weights."""
    for name, module in model.named_modules():
        limited = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None
        if limited and module.weight.requires_grad:
            yield name or "model", module.weight
