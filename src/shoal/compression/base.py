"""The definition of a codec: a pure, named mapping between tensor values and bytes.

Invariants that every codec keeps, and that one set of property tests holds:

- **The name says it all.** `codec.name` (family and parameters, such as `float16`) goes on the wire; `codec_by_name`
  gives an equal codec on any machine. A codec has no other state, and nothing is pickled.
- **The size is known before.** `encoded_bytes` depends on the number of elements and the dtype only, so tiles, limits
  and buffers are fixed before a byte arrives.
- **No scale crosses a tensor's border.** Several tensors may be encoded at once: `sizes` says how many
  elements each has. By default their encodings stand one after another; codecs with scales do them all together.
- **The error is stated.** Each decoded element differs from its value by at most `error_bound`.
- **Finite stays finite, and the rest is never hidden.** A tensor without NaN and infinities decodes to one without,
  also when it is then converted back to its dtype. A value that is not finite decodes to one that is not: to itself
  under a codec that keeps elements apart (`none`, `float16`, `bfloat16`). Under a codec whose elements share a scale or
  a codebook, all that shares it (a block, or all elements encoded at once) decodes to NaN. Code that applies
  decoded values has to check them, and needs to check nothing else.
- **Any bytes of the right size decode**, whichever peer made them: to some values, finite or not, and without any other
effect.
- **Decoding is exact.** Equal bytes give equal bits on every machine: each computed value is rounded once, or not at
  all, so that neither the processor's instructions nor the order of operations show. The averages of a round rely on
  it.
- **Decoded values can be encoded again**, and give the same bytes if `idempotent` says so.

Which codec a tensor gets is decided by `choose`, from a `CompressionInfo`: a codec that picks by role, size or key
returns the concrete one. Class and argument names are those of hivemind 1.1.12 where it has them.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shoal.compression.memory import allocate, dtype_name
from shoal.errors import ConfigError, LocalError

__all__ = [
    "MAX_NAME",
    "CompressionBase",
    "CompressionInfo",
    "TensorDescriptor",
    "TensorRole",
    "codec_by_name",
    "register_codec",
]

MAX_NAME = 64
"""The longest name of a codec, characters."""

_SHOWN = 48
_FEW_BYTES = 1 << 16


class TensorRole(enum.Enum):
    """The role of a tensor; codecs may be chosen by it."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True)
class TensorDescriptor:
    """Shape and dtype of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorDescriptor:
        """Describe this tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, slots=True)
class CompressionInfo:
    """The facts about a tensor by which its codec is chosen.

    Attributes:
        key: name or position of the tensor, the same on all peers.
        descriptor: its shape and dtype.
        role: its role.
    """

    key: str | int | None
    descriptor: TensorDescriptor
    role: TensorRole = TensorRole.UNSPECIFIED

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, key: str | int | None = None, role: TensorRole = TensorRole.UNSPECIFIED
    ) -> CompressionInfo:
        """Describe this tensor."""
        return cls(key, TensorDescriptor.from_tensor(tensor), role)


_HERE = "shoal.compression"
_ON_THE_WIRE = frozenset(
    {"encode", "encode_into", "encoded_bytes", "decode", "decode_into", "tensors_bytes"}
    | {"_encode", "_decode", "_encode_tensors", "_decode_tensors", "_fill"}
)


class CompressionBase(ABC):
    """Base of all codecs. Codecs are values: two are equal if their names are.

    Attributes:
        has_scales: whether the code of an element may depend on the size of its neighbours, so that those of several
            tensors have to be kept apart.
    """

    has_scales = True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(_HERE):
            return
        if not vars(cls).keys().isdisjoint(("compress", "extract")):
            from shoal.compression import own  # noqa: PLC0415 (it is made of this class)

            own.complete(cls)
        named = next(base for base in cls.__mro__ if "name" in vars(base))
        if named.__module__.startswith(_HERE) and (changed := sorted(vars(cls).keys() & _ON_THE_WIRE)):
            raise ConfigError(
                f"{cls.__name__} overrides {changed[0]} of {named.__name__}, and nothing calls that: peers make the "
                f"codec by its name, which says {named.__name__}. Derive {cls.__name__} from CompressionBase, with "
                f"compress and extract, and call encode and decode of a {named.__name__} in it"
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """The codec's name on the wire: `family` or `family:parameters`, at most 64 characters."""

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded."""

    @abstractmethod
    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The exact size of the encoding of `numel` elements of `dtype`, bytes."""

    @abstractmethod
    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """An upper bound of |decoded - value| for each element (float64), if all values are finite.

        The bound holds for the result of `decode`; `decode_into` a narrower dtype adds the rounding to that dtype. A
        codec that keeps elements apart holds it for each finite value.
        """

    @abstractmethod
    def idempotent(self, dtype: torch.dtype) -> bool:
        """Whether finite values of `dtype`, encoded, decoded into `dtype` and encoded again, give the same bytes.

        If they do, a holder of decoded values can prove, or serve, the encoding that they came from.
        """

    @abstractmethod
    def _encode(self, values: torch.Tensor, out: memoryview) -> None:
        """Encode to `out`, which has the right size and is not empty."""

    @abstractmethod
    def _decode(self, data: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The `numel` values in `data`, which has the right size and is not empty."""

    def choose(self, info: CompressionInfo) -> CompressionBase:
        """The codec for this tensor: this one if it supports the dtype, otherwise `NoCompression`.

        So integer tensors (step counters, masks) stay exact under any codec.

        Raises:
            ConfigError: no codec can send this dtype.
        """
        dtype_name(info.descriptor.dtype)
        return self if self.supports(info.descriptor.dtype) else codec_by_name("none")

    def tensors_bytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """The exact size of the encoding of several tensors that have so many elements each, bytes."""
        if not self.has_scales:
            return self.encoded_bytes(sum(sizes), dtype)
        return sum(self.encoded_bytes(size, dtype) for size in sizes)

    def tensors_bound(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The `error_bound` of values that are such tensors, one after another."""
        if not self.has_scales:
            return self.error_bound(values)
        return torch.cat([self.error_bound(tensor) for tensor in torch.split(values, list(sizes))])

    def _encode_tensors(self, values: torch.Tensor, out: memoryview, sizes: tuple[int, ...]) -> None:
        """Encode several tensors, as `_encode`; `values` is 1-D."""
        stop = 0
        for tensor in torch.split(values, list(sizes)):
            start, stop = stop, stop + self.encoded_bytes(tensor.numel(), tensor.dtype)
            self._encode(tensor, out[start:stop])

    def _decode_tensors(self, data: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """Decode several tensors, as `_decode`."""
        stop, tensors = 0, []
        for size in sizes:
            start, stop = stop, stop + self.encoded_bytes(size, dtype)
            tensors.append(self._decode(data[start:stop], size, dtype))
        return torch.cat(tensors)

    def encode_into(self, values: torch.Tensor, out: memoryview, sizes: Sequence[int] = ()) -> None:
        """Encode a tensor of any shape, strides and device, in row-major order.

        Args:
            values: the tensor to encode; it is not changed.
            out: writable bytes, exactly `encoded_bytes(values.numel(), values.dtype)` of them.
            sizes: the number of elements of each tensor, none of them 0, if `values` are several tensors, one
                after another in one dimension. `out` then has `tensors_bytes(sizes, values.dtype)`.

        Raises:
            ConfigError: the codec does not support the dtype.
            LocalError: `out` has another size.
        """
        self._check_dtype(values.dtype)
        needed = self._needed(values.numel(), values.dtype, sizes)
        if out.nbytes != needed or out.readonly:
            raise LocalError(f"{self.name} needs a writable buffer of {needed} bytes, got {out.nbytes}")
        self._fill(values.detach(), out, sizes)

    def encode(self, values: torch.Tensor, sizes: Sequence[int] = ()) -> memoryview:
        """Encode to new memory; see `encode_into`."""
        self._check_dtype(values.dtype)
        nbytes = self._needed(values.numel(), values.dtype, sizes)
        # To set few bytes to 0 takes less time than to see a tensor as bytes.
        out = memoryview(bytearray(nbytes)) if nbytes <= _FEW_BYTES else allocate(nbytes, torch.uint8)[1]
        self._fill(values.detach(), out, sizes)
        return out

    def _needed(self, numel: int, dtype: torch.dtype, sizes: Sequence[int]) -> int:
        return self.tensors_bytes(sizes, dtype) if sizes else self.encoded_bytes(numel, dtype)

    def _fill(self, values: torch.Tensor, out: memoryview, sizes: Sequence[int]) -> None:
        if len(sizes) > 1 and self.has_scales:
            self._encode_tensors(values, out, tuple(sizes))
        elif out.nbytes:
            self._encode(values, out)

    def decode(
        self, data: bytes | bytearray | memoryview, numel: int, dtype: torch.dtype, sizes: Sequence[int] = ()
    ) -> torch.Tensor:
        """The values as a 1-D tensor in host memory, of some dtype that holds them exactly.

        The tensor may be a view of `data`: read it, do not write it, and not after `data` is used for something else.
        `total.add_(codec.decode(data, numel, dtype), alpha=weight)` is the cheapest way to accumulate.

        Args:
            data: one encoding, writable or not.
            numel: the number of elements that were encoded.
            dtype: the dtype that they had.
            sizes: as in `encode_into`.

        Raises:
            ConfigError: the size of `data` is not that of such an encoding, or the codec does not support `dtype`.
        """
        view = self._checked(data, numel, dtype, sizes)
        if len(sizes) > 1 and self.has_scales:
            return self._decode_tensors(view, dtype, tuple(sizes))
        return self._decode(view, numel, dtype) if numel else torch.empty(0, dtype=dtype, device="cpu")

    def decode_into(
        self, data: bytes | bytearray | memoryview, dtype: torch.dtype, out: torch.Tensor, sizes: Sequence[int] = ()
    ) -> None:
        """Decode values that had `dtype` into `out` (any shape and dtype), converting to its dtype.

        Raises:
            ConfigError: as `decode`.
        """
        with torch.no_grad():
            out.copy_(self.decode(data, out.numel(), dtype, sizes).view(out.shape))

    def _checked(
        self, data: bytes | bytearray | memoryview, numel: int, dtype: torch.dtype, sizes: Sequence[int]
    ) -> memoryview:
        """The bytes of one encoding; raises `ConfigError` as `decode`."""
        self._check_dtype(dtype)
        view, needed = memoryview(data).cast("B"), self._needed(numel, dtype, sizes)
        if view.nbytes != needed:
            raise ConfigError(
                f"{self.name} encodes {numel} elements of {dtype_name(dtype)} in {needed} bytes, not in {view.nbytes}"
            )
        return view

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """The encoded bytes of a tensor like this, divided by its own bytes; 1 for an empty one."""
        raw = info.descriptor.numel * info.descriptor.dtype.itemsize
        return self.encoded_bytes(info.descriptor.numel, info.descriptor.dtype) / raw if raw else 1.0

    def max_error(self, values: torch.Tensor) -> float:
        """The largest `error_bound` over a tensor; 0.0 for an empty one."""
        return float(self.error_bound(values).max()) if values.numel() else 0.0

    def _check_dtype(self, dtype: torch.dtype) -> None:
        dtype_name(dtype)  # raises if no codec can send this dtype
        if not self.supports(dtype):
            raise ConfigError(f"codec {self.name!r} does not support {dtype}: use NoCompression for such tensors")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompressionBase) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


CodecFactory = Callable[[str], CompressionBase]

_factories: dict[str, CodecFactory] = {}


def register_codec(family: str, factory: CodecFactory) -> None:
    """Make a family of codecs known by name.

    Args:
        family: the part of the name before `:`.
        factory: makes a codec from the part after `:` (empty if there is none); raises `ConfigError` if it is wrong.

    Raises:
        ConfigError: the family is taken.
    """
    if family in _factories:
        raise ConfigError(f"a codec family {family!r} is registered already: choose another name")
    _factories[family] = factory


def codec_by_name(name: str) -> CompressionBase:
    """The codec of this name, which may have come over the wire.

    Raises:
        ConfigError: no such codec is known here.
    """
    family, _, parameters = name.partition(":")
    factory = _factories.get(family)
    codec = factory(parameters) if factory is not None and len(name) <= MAX_NAME else None
    if codec is None or codec.name != name:
        raise ConfigError(f"unknown codec {name[:_SHOWN]!r}; known are {', '.join(sorted(_factories))}")
    return codec


def wire_view(out: memoryview, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """A tensor to write the bytes `out` through; False if it has other memory, because `out` is not aligned."""
    tensor = torch.frombuffer(out, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:
        return torch.empty_like(tensor), False
    return tensor, True
