"""The tensors that each peer of a run has, in one order: the parameters of the optimizer, and extra tensors.

They are fixed when a run begins. What the program does with them since then is looked at here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from shoal.averaging.allreduce.vector import check_tensors
from shoal.base.names import known_as
from shoal.compression import dtype_name, view_bytes
from shoal.errors import ConfigError
from shoal.protocol.wire import MAX_TRAINED
from shoal.state.digest import digest_of
from shoal.train.optimizer_state import AnyTensor

__all__ = ["SharedTensors", "digest_of_tensors"]

_MOST_TENSORS, _MOST_STATISTICS = 1024, 32
"""A state from the network may have so many tensors, and so many more for each parameter and extra tensor here."""

_FROZEN_FOR = 3
"""Steps in a row in which others move what is frozen here. Peers may freeze it with some batches between them."""


def digest_of_tensors(tensors: Iterable[torch.Tensor], before: bytes = b"") -> bytes:
    """BLAKE3 over the bytes of all values, behind those that are given."""
    return digest_of(chain((before,), (view_bytes(each.detach().to("cpu").contiguous()) for each in tensors)))


class SharedTensors:
    """The tensors of one peer.

    Args:
        optimizer: has the parameters.
        extra_tensors: beside these.

    Attributes:
        parameters: of the optimizer, in order.
        trained: those that require a gradient.
        frozen: those that do not.
        extra: the extra tensors.
        all: of these; the first tensors of a state.
        averaged: by state averaging: those of floating point, but for extra tensors that are not finite from the
            beginning (masks), which have no mean.
        frozen_here: says which trained parameter is frozen here only, so that the steps move it; None if none is.

    Raises:
        ConfigError: there is nothing to train, or too much; or a tensor cannot be shared.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, extra_tensors: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self.parameters: tuple[torch.Tensor, ...] = tuple(
            each for group in optimizer.param_groups for each in group["params"]
        )
        self.extra = tuple(extra_tensors)
        self.all = [*self.parameters, *self.extra]
        self.trained = _trained(self.parameters)
        self.frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        _check(self.parameters, self.extra)
        self._dtypes = [(parameter.dtype, parameter.shape) for parameter in self.parameters]
        finite = [*self.parameters, *(extra for extra in self.extra if bool(torch.isfinite(extra).all()))]
        self.averaged = tuple(each for each in finite if each.dtype.is_floating_point)
        self.frozen_here: str | None = None
        self._frozen_steps = 0

    def summary(self) -> str:
        """A text about them: shapes in order (as a hash), dtypes, and which are trained."""
        specs = [(tuple(each.shape), str(each.dtype), each.requires_grad) for each in self.all]
        digest = hashlib.sha256(repr(specs).encode()).hexdigest()[:8]
        dtypes = " and ".join(sorted({str(each.dtype).removeprefix("torch.") for each in self.all}))
        elements, trained = sum(each.numel() for each in self.all), sum(each.requires_grad for each in self.all)
        return f"{len(self.all)} with {elements} elements of {dtypes}, {trained} trained, shapes in order {digest}"

    # -------------------------------------------------------------------------------------- what the program has done

    def check(self) -> None:
        """Raise `ConfigError` if other parameters are to be trained than when the run began."""
        listed, known = [each for group in self._optimizer.param_groups for each in group["params"]], self.parameters
        if len(listed) != len(known):
            raise ConfigError(
                f"the optimizer has {len(listed)} parameters, and had {len(known)} when the run began: make a new "
                "shoal.Optimizer to train others"
            )
        for index, (parameter, before) in enumerate(zip(listed, known, strict=True)):
            if parameter is not before:
                raise ConfigError(
                    f"parameter {known_as(before, index)} of the optimizer was replaced since the run began: make a "
                    "new shoal.Optimizer to train others"
                )
        self.check_dtypes()
        for parameter in self.frozen:
            if parameter.requires_grad:
                index = next(i for i, each in enumerate(known) if each is parameter)
                raise ConfigError(
                    f"parameter {known_as(parameter, index)} of the optimizer requires a gradient, and did not when "
                    "the run began: unfreeze it before, or make a new shoal.Optimizer"
                )

    def check_dtypes(self) -> None:
        """Raise `ConfigError` if a parameter has another dtype or shape than when the run began: no peer has such."""
        for index, (parameter, (dtype, shape)) in enumerate(zip(self.parameters, self._dtypes, strict=True)):
            if parameter.dtype is not dtype or parameter.shape != shape:
                was, now = f"{dtype} {tuple(shape)}", f"{parameter.dtype} {tuple(parameter.shape)}"
                raise ConfigError(
                    f"parameter {known_as(parameter, index)} of the optimizer is {now} now, and was {was} when the run "
                    "began: convert the model before, or make a new shoal.Optimizer"
                )

    def look_for_frozen(self, had_gradient: Sequence[bool]) -> None:
        """Look whether the step is about to move what the user has frozen on this peer.

        Args:
            had_gradient: for each trained parameter, whether it had a gradient here.
        """
        pairs = enumerate(zip(self.trained, had_gradient, strict=True))
        moved = [i for i, (each, mine) in pairs if not (each.requires_grad or mine) and each.grad is not None]
        self._frozen_steps = self._frozen_steps + 1 if moved else 0
        if self._frozen_steps == _FROZEN_FOR:
            name = known_as(self.trained[moved[0]], moved[0])
            self.frozen_here = (
                f"trained parameter {name} is frozen here (requires_grad=False), and the swarm's steps go on to change "
                "it, because other peers train it: freeze it on all peers, or on none"
            )

    # ----------------------------------------------------------------------------------------------- a state of others

    @property
    def most(self) -> int:
        """The most tensors that a state of others may have, with the statistics of their optimizer."""
        return _MOST_TENSORS + _MOST_STATISTICS * len(self.all)

    def check_offered(self, count: object, tensors: Sequence[AnyTensor]) -> None:
        """Raise `ValueError` if the tensors of a state are others, of which so many are said to be no statistics."""
        if type(count) is not int or count != len(self.all) or len(tensors) < count:
            raise ValueError(f"{count!r:.20} parameters and extra tensors where there are {len(self.all)} here")
        for index, (mine, theirs) in enumerate(zip(self.all, tensors, strict=False)):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise ValueError(f"tensor {known_as(mine, index)} is {tuple(theirs.shape)} {theirs.dtype}")


def _trained(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not any(parameter.numel() for parameter in trained):
        raise ConfigError("params holds no parameter with elements that requires a gradient")
    if len(trained) > MAX_TRAINED:
        raise ConfigError(
            f"params holds {len(trained)} parameters that require a gradient, and a run trains {MAX_TRAINED} at "
            "most: put small ones together into larger tensors"
        )
    return trained


def _check(parameters: Sequence[torch.Tensor], extra: Sequence[torch.Tensor]) -> None:
    """Raise `ConfigError` if one of these cannot be shared; it is named."""
    named = [(f"parameter {known_as(each, index)} of the optimizer", each) for index, each in enumerate(parameters)]
    for index, each in enumerate(extra):
        name = known_as(each, "")
        named.append((f"extra_tensors[{index}]" + (f" ({name})" if name else ""), each))
    check_tensors([(name, each) for name, each in named if each.requires_grad or each.is_floating_point()])
    for name, each in named:
        try:
            dtype_name(each.dtype)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
