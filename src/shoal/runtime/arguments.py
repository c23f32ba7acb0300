"""Checks of arguments that concern tensors. Each message names the argument and says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from shoal import compression
from shoal.base.checks import flag
from shoal.compression import CompressionBase, CompressionInfo, NoCompression, TensorDescriptor, TensorRole
from shoal.errors import ConfigError

__all__ = ["check_tensors", "choose_codecs", "client_argument", "codec_argument", "first"]

T = TypeVar("T")


def check_tensors(tensors: object) -> None:
    """Raise `ConfigError` for anything but a sequence of tensors."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise ConfigError("averaged_tensors must be a sequence of tensors: put it in a list")


def codec_argument(name: str, codec: CompressionBase | None) -> CompressionBase:
    """The codec, `NoCompression` for None; raises `ConfigError` for anything that is no codec."""
    if codec is not None and not isinstance(codec, CompressionBase):
        raise ConfigError(f"{name} must be a codec such as shoal.compression.Float16Compression(), got {codec!r}")
    return codec or NoCompression()


def choose_codecs(
    tensors: Sequence[torch.Tensor], codec: CompressionBase, infos: Sequence[CompressionInfo] | None
) -> list[CompressionBase]:
    """One codec for each tensor. A value that is no tensor is refused later.

    Raises:
        ConfigError: `infos` do not describe these tensors.
    """
    if infos is not None and not isinstance(infos, Sequence):
        raise ConfigError(f"tensor_infos must be a list of CompressionInfo, one for each tensor, got {infos!r:.80}")
    if infos is None:
        infos = [
            CompressionInfo.from_tensor(tensor, i, _role(tensor))
            for i, tensor in enumerate(tensors)
            if isinstance(tensor, torch.Tensor)
        ]
        if len(infos) != len(tensors):
            return [codec] * len(tensors)
    if len(infos) != len(tensors):
        raise ConfigError(
            f"tensor_infos has {len(infos)} entries for {len(tensors)} averaged tensors: give one for each"
        )
    for i, (info, tensor) in enumerate(zip(infos, tensors, strict=True)):
        if not isinstance(info, CompressionInfo):
            raise ConfigError(f"tensor_infos[{i}] must be a CompressionInfo, got {type(info).__name__}")
        if isinstance(tensor, torch.Tensor) and info.descriptor != TensorDescriptor.from_tensor(tensor):
            described = info.descriptor
            raise ConfigError(
                f"tensor_infos[{i}] describes {described.shape} {described.dtype}, "
                f"averaged_tensors[{i}] is {tuple(tensor.shape)} {tensor.dtype}"
            )
    return [
        compression.for_parameters(codec.choose(info), info.descriptor.dtype)
        if info.role is TensorRole.PARAMETER
        else codec.choose(info)
        for info in infos
    ]


def _role(tensor: torch.Tensor) -> TensorRole:
    """The role of a tensor that no `CompressionInfo` describes."""
    return TensorRole.PARAMETER if isinstance(tensor, torch.nn.Parameter) else TensorRole.UNSPECIFIED


def client_argument(client_mode: bool | None, *, only_dials: bool, is_client: bool) -> bool:
    """Whether a part of a peer never listens: like the peer itself, unless the argument says otherwise.

    Args:
        client_mode: the user's argument.
        only_dials: whether the peer never listens. A peer that nobody can dial now may be dialed again later.
        is_client: whether nobody can dial the peer now.

    Raises:
        ConfigError: `client_mode` is neither True, False nor None; or it is False, and nobody can dial the peer.
    """
    if client_mode is None:
        return only_dials
    if not (listens_never := flag("client_mode", client_mode)) and is_client:
        raise ConfigError("client_mode=False needs a dht that can be dialed, and this one is in client mode")
    return listens_never


def first(*values: T | None) -> T | None:
    """The first value that was given."""
    return next((value for value in values if value is not None), None)
