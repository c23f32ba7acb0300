"""Names of parameters, as `model.state_dict()` has them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["named_parameters"]

_WRAPPED = "_checkpoint_wrapped_module."
"""The part that torch's `checkpoint_wrapper` puts into names, and takes out of names in state dictionaries."""


def named_parameters(
    model: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """As `model.named_parameters`, with the same names whether activation checkpoints are around layers or not."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield name.replace(_WRAPPED, ""), parameter
