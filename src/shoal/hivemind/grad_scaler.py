"""`GradScaler`: torch's own, which also takes parameters in float16."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch's `GradScaler` for a `shoal.Optimizer`. Arguments and methods are those of torch.

    Torch's own does as well, unless parameters are in float16: it refuses their gradients, because those below 6e-8 are
    lost when they are unscaled in float16. This class takes them all the same, as that of hivemind does.

    Call `scaler.step(swarm)` or `swarm.step(grad_scaler=scaler)`, then `scaler.update()`. Each peer scales for itself.
    A batch whose gradients are not finite does not count, and makes this peer's scale smaller.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's. With `reuse_grad_buffers` the gradients are cleared, also where the step is left out."""
        found = super().step(optimizer, *args, **kwargs)
        if getattr(optimizer, "reuse_grad_buffers", False):
            optimizer.zero_grad()
        return found

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
