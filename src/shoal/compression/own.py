"""Codecs that users write as for hivemind: `compress(tensor, info, allow_inplace)` and `extract(serialized)`.

A subclass of `CompressionBase` that has both becomes a whole codec: it gets its missing methods from here when the
class is made. Each call sees values of one tensor, in one dimension. Sizes must be known before a byte arrives, so the
encoding of as many zeros is measured: its size must depend only on the number of elements and the dtype. The name on
the wire consists of the names of the class and its attributes. All peers make the codec themselves; nothing is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shoal.compression.base import MAX_NAME, CompressionBase, CompressionInfo, register_codec
from shoal.compression.floating import FLOATS
from shoal.compression.memory import dtype_name
from shoal.errors import ConfigError

__all__ = ["SerializedTensor", "complete"]

_FAMILY = "own"
_TRIED = 257
"""The number of elements with which a new codec is tried."""

_made: dict[str, CompressionBase] = {}


@dataclass(frozen=True)
class SerializedTensor:
    """The result of `compress` and the argument of `extract`. Only `buffer` is sent; the receiver makes the rest anew.

    Attributes:
        buffer: the bytes.
        size: the tensor's shape.
        dtype: the name of the tensor's dtype, such as `float32`.
        requires_grad: the tensor's; False at the receiver.
        compression: any value; at the receiver the name of the codec.
    """

    buffer: bytes
    size: tuple[int, ...] = ()
    dtype: str = ""
    requires_grad: bool = False
    compression: Any = None


class _Own(CompressionBase):
    """The methods that a class with only `compress` and `extract` lacks."""

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, *, allow_inplace: bool) -> Any:
        raise NotImplementedError

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        raise NotImplementedError

    @property
    def name(self) -> str:
        made_of = ",".join(f"{key}={_plain(self, key, value)}" for key, value in sorted(vars(self).items()))
        return f"{_FAMILY}:{type(self).__name__}" + (f"({made_of})" if made_of else "")

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return _size_of(self, numel, dtype) if numel else 0

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return torch.full(values.shape, torch.inf, dtype=torch.float64, device="cpu")

    def idempotent(self, dtype: torch.dtype) -> bool:
        return False

    def choose(self, info: CompressionInfo) -> CompressionBase:
        """The codec for this tensor. The first time it is tried, and known by its name from then on."""
        chosen = CompressionBase.choose(self, info)
        if chosen is self and len(self.name) > MAX_NAME:
            raise ConfigError(f"{self.name!r} is longer than {MAX_NAME} characters: give the class a shorter name")
        if chosen is self and self.name not in _made:
            if not self.name.startswith(f"{_FAMILY}:"):
                raise ConfigError(f"{self.name!r} is the name of a codec with compress: begin it with '{_FAMILY}:'")
            _try(self)
            _made[self.name] = self
        return chosen

    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        data = _bytes_of(self, values)
        if len(data) != out.nbytes:
            raise ConfigError(
                f"{type(self).__name__}.compress made {len(data)} bytes of {values.numel()} values and {out.nbytes} of "
                "as many zeros: the size must follow from the number of values and their dtype, so fill it up"
            )
        out[:] = data

    def _decode(self, data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        serialized = SerializedTensor(bytes(data), (numel,), dtype_name(dtype), compression=self.name)
        try:
            values = self.extract(serialized).detach().cpu().reshape(-1)
        except Exception:  # noqa: BLE001 (a peer may send any bytes: as no numbers they cost it its part in the round)
            values = torch.empty(0, dtype=dtype, device="cpu")
        if values.numel() != numel or values.dtype not in FLOATS:
            return torch.full((numel,), torch.nan, dtype=torch.float32, device="cpu")
        return values


_MISSING = (*("name", "supports", "encoded_bytes", "error_bound", "idempotent", "choose", "_encode", "_decode"),)


def complete(codec: type[CompressionBase]) -> None:
    """Make a class that has `compress` or `extract` a codec.

    Raises:
        ConfigError: the class has only one of them, or changes a codec that does not work through them.
    """
    title, parent = codec.__name__, codec.__mro__[1]
    encodes = next(vars(base)["_encode"] for base in codec.__mro__[1:] if "_encode" in vars(base))
    if encodes not in (vars(CompressionBase)["_encode"], vars(_Own)["_encode"]):
        raise ConfigError(
            f"{title} overrides compress or extract of {parent.__name__}, which nothing calls: derive {title} from "
            f"CompressionBase, and call encode and decode of a {parent.__name__} in it"
        )
    for method in ("compress", "extract"):
        if not hasattr(codec, method):
            raise ConfigError(f"{title} has no {method}: a codec needs compress and extract")
    for attribute in _MISSING:
        if getattr(codec, attribute) is getattr(CompressionBase, attribute):
            setattr(codec, attribute, vars(_Own)[attribute])


@lru_cache(maxsize=1024)
def _size_of(codec: CompressionBase, numel: int, dtype: torch.dtype) -> int:
    return len(_bytes_of(codec, torch.zeros(numel, dtype=dtype, device="cpu")))


def _bytes_of(codec: CompressionBase, values: torch.Tensor) -> memoryview:
    made = codec.compress(values, CompressionInfo.from_tensor(values), allow_inplace=False)  # type: ignore[attr-defined]
    data = getattr(made, "buffer", made)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ConfigError(
            f"{type(codec).__name__}.compress returned {type(made).__name__}: return bytes, or a "
            "shoal.compression.SerializedTensor(buffer=...)"
        )
    return memoryview(data).cast("B")


def _plain(codec: CompressionBase, key: str, value: object) -> str:
    if isinstance(value, CompressionBase):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise ConfigError(
        f"{type(codec).__name__}.{key} is {type(value).__name__}, which no name can say to other peers: keep numbers "
        f"and texts in attributes, or give the class a property `name` that begins with '{_FAMILY}:'"
    )


def _try(codec: CompressionBase) -> None:
    """Raise `ConfigError` if the codec does not return the values that it is given, or values near them."""
    values = torch.linspace(-1.0, 1.0, _TRIED, dtype=torch.float32, device="cpu")
    data = codec.encode(values)
    decoded = codec.extract(SerializedTensor(bytes(data), (_TRIED,), "float32", compression=codec.name))  # type: ignore[attr-defined]
    if not isinstance(decoded, torch.Tensor) or decoded.numel() != _TRIED or decoded.dtype not in FLOATS:
        raise ConfigError(f"{type(codec).__name__}.extract returned no tensor of {_TRIED} floats for as many values")


def _find(parameters: str) -> CompressionBase:
    if (codec := _made.get(f"{_FAMILY}:{parameters}")) is None:
        raise ConfigError(
            f"no codec {_FAMILY}:{parameters[:32]!r} is in use here: make one, and give it to what uses it"
        )
    return codec


register_codec(_FAMILY, _find)
