"""An exponential moving average of sharded weights, of which each rank keeps its share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from shoal.base.untraced import untraced
from shoal.errors import ConfigError, LocalError
from shoal.zero.optimizer import ShardedOptimizer, check_sharded
from shoal.zero.parameters import OwnTile

__all__ = ["EMA"]


class EMA:
    """The moving average of the weights that an optimizer trains, in float32.

    After an update it is ``decay * average + (1 - decay) * weight``.

    Each rank averages the share that it owns, so that memory and time are 4 bytes and one operation for each of P / N
    weights, and nothing is sent. The first `update` takes over the weights, as `torch.optim.swa_utils.AveragedModel`
    does with `get_ema_multi_avg_fn`. Buffers and frozen parameters have no average::

        ema = shoal.zero.EMA(optimizer, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
            ema.update()
        with ema.average_parameters():
            evaluate(model)

    `shoal.zero.save` and `load` take it as `ema`.

    Args:
        optimizer: as `shoal.zero.shard` returned it.
        decay: 0 to 1; may be changed between updates.

    Attributes:
        decay: as above.
        updates: how many there were.
    """

    def __init__(self, optimizer: ShardedOptimizer, decay: float = 0.999) -> None:
        check_sharded(optimizer)
        self.optimizer, self.decay, self.updates = optimizer, _decay(decay), 0
        self.averages = [own.values.detach().clone() for own in optimizer.carrier.own_tiles()]

    @untraced
    @torch.no_grad()
    def update(self) -> None:
        """Take in the present weights. Call it after `optimizer.step()`.

        Raises:
            LocalError: within `average_parameters`.
            ConfigError: `decay` is out of its range.
        """
        self._check()
        decay = _decay(self.decay)
        values = [own.values for own in self.optimizer.carrier.own_tiles()]
        if not self.updates:
            self.replace(values, 0)
        elif values:
            torch._foreach_lerp_(self.averages, values, 1 - decay)
        self.updates += 1

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """In this block the model has the averages, to be evaluated. All ranks call it.

        The weights take the place of the averages meanwhile, so that this needs no memory. A step, or a `load`, raises
        `LocalError` in this block. A `save` writes the averages as the model's weights.

        Raises:
            LocalError: within another such block.
            ConfigError: ranks have not updated equally often, or a program has changed weights on some alone: on all
                ranks.
            RankLost: a rank is gone.
        """
        with self.optimizer.agreement.together():
            self._check()
            written = self.optimizer.carrier.written()
        self.optimizer.agreement.alike(self.described, "updates of averages: call update() on all ranks")
        self.optimizer.check_written(written)
        try:
            self._swap("within average_parameters(), where it has the averages in place of its weights")
            yield
        finally:
            if not self.optimizer.whole:  # the swap itself has failed
                self.optimizer.lent = ""
            elif self.optimizer.lent:
                self._swap("")

    def _check(self) -> None:
        self.optimizer.check_whole()
        if self.optimizer.lent:
            raise LocalError("the model has the averages in place of its weights: leave the block first")

    @property
    def described(self) -> str:
        """What is the same on all ranks."""
        return f"averages after {self.updates} updates"

    @torch.no_grad()
    def _swap(self, lent: str) -> None:
        with self.optimizer.changing():
            for own, average in zip(self.optimizer.carrier.own_tiles(), self.averages, strict=True):
                weights = own.values.clone()
                own.values.copy_(average)
                average.copy_(weights)
            self.optimizer.lent = lent

    @torch.no_grad()
    def replace(self, averages: Sequence[torch.Tensor], updates: int) -> None:
        """Take over averages: of each tile of this rank, after so many updates."""
        for mine, given in zip(self.averages, averages, strict=True):
            mine.copy_(given)
        self.updates = updates

    def own_tiles(self) -> Iterator[tuple[OwnTile, torch.Tensor]]:
        """The tiles of this rank, and the average of each. Raises `LocalError` within `average_parameters`."""
        self._check()
        yield from zip(self.optimizer.carrier.own_tiles(), self.averages, strict=True)

    def state_dict(self) -> dict[str, Any]:
        """The part of this rank, for the same rank of a group that is sharded alike; `shoal.zero.save` writes all."""
        self._check()
        share = self.optimizer.share()
        return {"averages": self.averages, "updates": self.updates, "decay": self.decay, "share": share}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of this rank. Raises `ConfigError` if it is of another one."""
        self._check()
        if not isinstance(state_dict, Mapping) or state_dict.get("share") != self.optimizer.share():
            raise ConfigError(
                "state_dict is that of another rank or of another sharding: shoal.zero.save() and load() carry the "
                "averages of all ranks, to any number of them"
            )
        if missing := [key for key in ("averages", "updates", "decay") if key not in state_dict]:
            raise ConfigError(f"state_dict lacks {missing[0]!r}: give the result of state_dict() as it was")
        self.decay = _decay(state_dict["decay"])
        self.replace(state_dict["averages"], state_dict["updates"])


def _decay(value: object) -> float:
    """The value of `decay`. Raises `ConfigError` if it is none."""
    number = math.nan
    if isinstance(value, Real | torch.Tensor) and not isinstance(value, bool):
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # tensors of several values
            number = float(value)
    if not 0 <= number <= 1:
        raise ConfigError(f"decay must be a number from 0 to 1, got {value!r:.80}")
    return number
