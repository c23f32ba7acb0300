"""The buffers of a download: one per tensor, filled chunk by chunk, handed over only when all chunks are verified.

Invariants: the state is held once. A tensor that travels uncompressed is received into its final memory. The encoding
of a compressed one is received into the end of that memory, and decoded to its front, slice by slice, when all is
there. Memory is taken when a tensor's first byte arrives, not when a donor announces it. No tensor is handed over
before every chunk was verified and the values were checked.
"""

from __future__ import annotations

import torch

from shoal.compression import allocate
from shoal.errors import ConfigError, PeerProtocolError
from shoal.state.manifest import Manifest, StateTensorSpec, worst_value

__all__ = ["Assembly"]


class Assembly:
    """The buffers of one download.

    Args:
        manifest: the layout; the hashes in it are used by the plan only.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._buffers: dict[int, tuple[torch.Tensor, memoryview]] = {}

    def clear(self) -> None:
        """Free everything that was received."""
        self._buffers.clear()

    def buffers(self, chunk: int) -> list[memoryview]:
        """The places in memory, one after another, for the bytes of a chunk.

        Raises:
            MemoryError: this machine does not have the memory for a tensor. The message says how much is needed.
        """
        return [self._buffer(tensor)[1][start:stop] for tensor, start, stop in self._manifest.pieces(chunk)]

    def finish(self, share: range | None = None) -> list[torch.Tensor]:
        """Take tensors out, decoded, each once; different ones may be taken in different threads.

        Args:
            share: their positions; None for all.

        Raises:
            PeerProtocolError: a tensor holds NaN, or infinities that the manifest does not tell of.
            MemoryError: this machine does not have the memory for a tensor.
        """
        tensors: list[torch.Tensor] = []
        for position in range(len(self._manifest.tensors)) if share is None else share:
            spec = self._manifest.tensors[position]
            tensor = self._take(position, spec)
            worst = worst_value(tensor)
            if worst == "NaN" or (worst and position not in self._manifest.infinite):
                raise PeerProtocolError(f"tensor {position} of its state holds {worst}")
            tensors.append(tensor.view(spec.shape))
        return tensors

    def _buffer(self, position: int) -> tuple[torch.Tensor, memoryview]:
        if position not in self._buffers:
            spec = self._manifest.tensors[position]
            if _is_final(spec):
                self._buffers[position] = self._allocate(spec.numel, spec.dtype)
            else:
                memory, data = self._allocate(_decoding_bytes(spec), torch.uint8)
                self._buffers[position] = memory, data[data.nbytes - spec.encoded_bytes :]
        return self._buffers[position]

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
        try:
            return allocate(numel, dtype)
        except (RuntimeError, MemoryError) as error:  # torch raises either where there is no memory
            needed, total = numel * dtype.itemsize, sum(spec.raw_bytes for spec in self._manifest.tensors)
            raise MemoryError(
                f"this machine has no memory for a tensor of {needed} bytes; the whole state needs {total} bytes, "
                "beside the tensors that are trained: end other programs here, or use a machine with more memory"
            ) from error

    def _take(self, position: int, spec: StateTensorSpec) -> torch.Tensor:
        tensor, data = self._buffer(position)
        del self._buffers[position]
        if _is_final(spec):
            return tensor
        decoded = tensor[: spec.raw_bytes].view(spec.dtype)
        try:
            for first, last, start, stop in spec.slices():
                encoded = bytearray(data[start:stop])  # decoded values may be written over it
                spec.codec.decode_into(encoded, spec.dtype, decoded[first:last])
        except ConfigError as error:
            raise PeerProtocolError(f"tensor {position} of its state cannot be decoded: {error}") from error
        return decoded


def _is_final(spec: StateTensorSpec) -> bool:
    """Return whether the arriving bytes are the tensor. A bool must be checked first: its bytes need not be 0 or 1."""
    return spec.raw and spec.dtype is not torch.bool


def _decoding_bytes(spec: StateTensorSpec) -> int:
    """Room for a tensor and its encoding at the end, such that decoding a slice overwrites no later one's encoding.

    It has the tensor's own size, unless a codec needs more room for a slice than its values do: for a few elements at
    the end, or if a donor has chosen a bad codec.
    """
    left = spec.encoded_bytes
    most = left
    for _, last, start, stop in spec.slices():
        left -= stop - start
        most = max(most, last * spec.dtype.itemsize + left)
    return most
