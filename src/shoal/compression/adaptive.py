"""Codecs that only choose another one for each tensor, by its size, its role or its key.

`choose` returns the concrete codec, whose name goes on the wire. If the chosen codec is of this kind itself, it chooses
in its turn. The choice follows from the `CompressionInfo` alone, so peers with equal tensors agree. Argument names are
those of hivemind 1.1.12.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from shoal.compression.base import CompressionBase, CompressionInfo, TensorRole
from shoal.compression.floating import NoCompression
from shoal.errors import ConfigError, LocalError

__all__ = [
    "AdaptiveCompression",
    "PerTensorCompression",
    "RoleAdaptiveCompression",
    "SizeAdaptiveCompression",
    "choose_codecs",
]


class AdaptiveCompression(CompressionBase):
    """Base of codecs that choose, also of your own: they need `pick` and `name`.

    The name must say all that the choice depends on, as codecs of equal names are equal, and peers compare them. All
    methods but `choose`, `name` and equality raise `LocalError`.
    """

    @abstractmethod
    def pick(self, info: CompressionInfo) -> CompressionBase:
        """The codec for this tensor, which may itself be one that chooses."""

    def choose(self, info: CompressionInfo) -> CompressionBase:
        """The concrete codec for this tensor.

        Raises:
            ConfigError: there is no codec for the tensor's key, or none can send its dtype.
        """
        return self.pick(info).choose(info)

    def __repr__(self) -> str:
        return self.name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise LocalError(f"{type(self).__name__} only chooses a codec: call choose(info), and use what it returns")

    supports = encoded_bytes = error_bound = idempotent = _encode = _decode = _refuse


class SizeAdaptiveCompression(AdaptiveCompression):
    """One codec for small tensors, another for large ones.

    Args:
        threshold: number of elements from which a tensor is large, at least 0.
        less: codec for tensors with fewer elements.
        greater_equal: codec for the others.

    Raises:
        ConfigError: `threshold` is no such number, or another argument is no codec.
    """

    def __init__(self, threshold: int, less: CompressionBase, greater_equal: CompressionBase) -> None:
        if not isinstance(threshold, int) or threshold < 0:
            raise ConfigError(f"threshold={threshold!r} is no number of elements: give an integer of at least 0")
        self.threshold = threshold
        self.less, self.greater_equal = _codec("less", less), _codec("greater_equal", greater_equal)

    @property
    def name(self) -> str:
        return (
            f"SizeAdaptiveCompression(threshold={self.threshold}, less={self.less.name}, "
            f"greater_equal={self.greater_equal.name})"
        )

    def pick(self, info: CompressionInfo) -> CompressionBase:
        return self.greater_equal if info.descriptor.numel >= self.threshold else self.less


class RoleAdaptiveCompression(AdaptiveCompression):
    """A codec for each role of a tensor.

    Args:
        activation: codec for `TensorRole.ACTIVATION`; None: `default`.
        parameter: codec for `TensorRole.PARAMETER`; None: `default`.
        gradient: codec for `TensorRole.GRADIENT`; None: `default`.
        optimizer: codec for `TensorRole.OPTIMIZER`; None: `default`.
        default: codec for roles that have none of their own, and for tensors without a role; None: no compression.

    Raises:
        ConfigError: an argument is no codec.
    """

    def __init__(
        self,
        *,
        activation: CompressionBase | None = None,
        parameter: CompressionBase | None = None,
        gradient: CompressionBase | None = None,
        optimizer: CompressionBase | None = None,
        default: CompressionBase | None = None,
    ) -> None:
        given = {"activation": activation, "parameter": parameter, "gradient": gradient, "optimizer": optimizer}
        self.default = NoCompression() if default is None else _codec("default", default)
        self.codecs = {
            TensorRole(role): self.default if codec is None else _codec(role, codec) for role, codec in given.items()
        }

    @property
    def name(self) -> str:
        roles = "".join(f"{role.value}={codec.name}, " for role, codec in self.codecs.items())
        return f"RoleAdaptiveCompression({roles}default={self.default.name})"

    def pick(self, info: CompressionInfo) -> CompressionBase:
        return self.codecs.get(info.role, self.default)


class PerTensorCompression(AdaptiveCompression):
    """A codec for each tensor, by its key.

    Args:
        tensor_compressions: a mapping from keys to codecs, or a sequence where the key is the position.

    Raises:
        ConfigError: the argument is neither, or holds values that are no codecs.
    """

    def __init__(self, tensor_compressions: Sequence[CompressionBase] | Mapping[str | int, CompressionBase]) -> None:
        if isinstance(tensor_compressions, Mapping):
            items = list(tensor_compressions.items())
        elif isinstance(tensor_compressions, Sequence):
            items = list(enumerate(tensor_compressions))
        else:
            raise ConfigError(
                f"tensor_compressions is {type(tensor_compressions).__name__}: give a sequence or a mapping of codecs"
            )
        self.codecs = {key: _codec(f"tensor_compressions[{key!r}]", codec) for key, codec in items}

    @property
    def name(self) -> str:
        return f"PerTensorCompression({', '.join(f'{key!r}: {codec.name}' for key, codec in self.codecs.items())})"

    def pick(self, info: CompressionInfo) -> CompressionBase:
        if info.key is None or info.key not in self.codecs:
            known = ", ".join(repr(key) for key in list(self.codecs)[:8]) or "none"
            raise ConfigError(f"tensor_compressions has no codec for the key {info.key!r}; its first keys are: {known}")
        return self.codecs[info.key]


def choose_codecs(
    codec: CompressionBase, tensors: Sequence[object], role: TensorRole = TensorRole.UNSPECIFIED
) -> list[CompressionBase]:
    """The codec of each tensor, chosen by its shape, dtype, role and position.

    A value that is not a tensor keeps `codec`: it is refused when the tensors are described.

    Args:
        codec: the codec that chooses.
        tensors: the tensors, in order.
        role: the role of all tensors.
    """
    return [
        codec.choose(CompressionInfo.from_tensor(tensor, key=key, role=role))
        if isinstance(tensor, torch.Tensor)
        else codec
        for key, tensor in enumerate(tensors)
    ]


def _codec(argument: str, codec: CompressionBase) -> CompressionBase:
    if not isinstance(codec, CompressionBase):
        raise ConfigError(f"{argument} is {type(codec).__name__}, not a codec such as NoCompression()")
    return codec
