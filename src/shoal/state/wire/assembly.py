"""The buffers of a download, filled chunk by chunk, handed over only when all chunks are verified.

Invariants: the state is held once. A tensor that travels uncompressed is received into its final memory. The encoding
of a compressed one is received into the end of that memory, and decoded to its front, tile by tile, when all is
there. Small tensors that follow one another are received together, and copied out: else each would take a read of its
own. Memory is taken when a tensor's first byte arrives, not when a donor announces it. No tensor is handed over before
every chunk was verified and the values were checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.compression import allocate
from shoal.errors import ConfigError, PeerProtocolError
from shoal.state.finite import worst_values
from shoal.state.wire.manifest import Manifest, StateTensorSpec

__all__ = ["Assembly"]

_ROOM_BYTES = 64 << 10
"""Tensors are received together while their encodings take no more."""


class Assembly:
    """The buffers of one download.

    Args:
        manifest: the layout; the hashes in it are used by the plan only.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._rooms = list(_rooms(manifest.tensors))
        self._offsets = [*(manifest.offsets[room.start] for room in self._rooms), manifest.total_bytes]
        self._buffers: dict[int, tuple[torch.Tensor, memoryview]] = {}  # of the rooms

    def clear(self) -> None:
        """Free everything that was received."""
        self._buffers.clear()

    def buffers(self, chunk: int) -> list[memoryview]:
        """The places in memory, one after another, for the bytes of a chunk.

        Raises:
            MemoryError: this machine does not have the memory for a tensor. The message says how much is needed.
        """
        return [self._buffer(room)[1][start:stop] for room, start, stop in self._manifest.pieces(chunk, self._offsets)]

    def finish(self, share: range | None = None) -> list[torch.Tensor]:
        """Take tensors out, decoded, each once; different ones may be taken in different threads.

        Args:
            share: positions; None for all. Tensors that were received together belong to the share of the first one.

        Raises:
            PeerProtocolError: a tensor holds NaN, or infinities that the manifest does not tell of.
            MemoryError: this machine does not have the memory for a tensor.
        """
        tensors: list[torch.Tensor] = []
        for number, room in enumerate(self._rooms):
            if share is not None and room.start not in share:
                continue
            specs = self._manifest.tensors[room.start : room.stop]
            taken = [self._take(number, specs[0])] if len(room) == 1 else list(self._take_small(number, specs))
            for index, worst in worst_values(taken):
                if worst == "NaN" or room[index] not in self._manifest.infinite:
                    raise PeerProtocolError(f"tensor {room[index]} of its state holds {worst}")
            tensors += [tensor.view(spec.shape) for tensor, spec in zip(taken, specs, strict=True)]
        return tensors

    def _buffer(self, number: int) -> tuple[torch.Tensor, memoryview]:
        if number not in self._buffers:
            room = self._rooms[number]
            spec = self._manifest.tensors[room.start]
            if len(room) > 1:
                self._buffers[number] = self._allocate(self._offsets[number + 1] - self._offsets[number], torch.uint8)
            elif _is_final(spec):
                self._buffers[number] = self._allocate(spec.numel, spec.dtype)
            else:
                memory, data = self._allocate(_decoding_bytes(spec), torch.uint8)
                self._buffers[number] = memory, data[data.nbytes - spec.encoded_bytes :]
        return self._buffers[number]

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
        try:
            return allocate(numel, dtype)
        except (RuntimeError, MemoryError) as error:  # torch raises either where there is no memory
            needed, total = numel * dtype.itemsize, sum(spec.raw_bytes for spec in self._manifest.tensors)
            raise MemoryError(
                f"this machine has no memory for a tensor of {needed} bytes; the whole state needs {total} bytes, "
                "beside the tensors that are trained: end other programs here, or use a machine with more memory"
            ) from error

    def _take(self, number: int, spec: StateTensorSpec) -> torch.Tensor:
        tensor, data = self._buffer(number)
        del self._buffers[number]
        if _is_final(spec):
            return tensor
        return _decoded(spec, data, tensor[: spec.raw_bytes].view(spec.dtype), self._rooms[number].start)

    def _take_small(self, number: int, specs: Sequence[StateTensorSpec]) -> Iterator[torch.Tensor]:
        memory, data = self._buffer(number)
        del self._buffers[number]
        start = 0
        for position, spec in zip(self._rooms[number], specs, strict=True):
            stop = start + spec.encoded_bytes
            if _is_final(spec):
                yield memory[start:stop].clone().view(spec.dtype)
            else:
                yield _decoded(spec, data[start:stop], self._allocate(spec.numel, spec.dtype)[0], position)
            start = stop


def _rooms(specs: Sequence[StateTensorSpec]) -> Iterator[range]:
    """The positions of tensors that are received together."""
    first = nbytes = 0
    for position, spec in enumerate(specs):
        if position > first and nbytes + spec.encoded_bytes > _ROOM_BYTES:
            yield range(first, position)
            first, nbytes = position, 0
        nbytes += spec.encoded_bytes
    if specs:
        yield range(first, len(specs))


def _decoded(spec: StateTensorSpec, data: memoryview, into: torch.Tensor, position: int) -> torch.Tensor:
    try:
        for first, last, start, stop in spec.tiles():
            encoded = bytearray(data[start:stop])  # decoded values may be written over it
            spec.codec.decode_into(encoded, spec.dtype, into[first:last])
    except ConfigError as error:
        raise PeerProtocolError(f"tensor {position} of its state cannot be decoded: {error}") from error
    return into


def _is_final(spec: StateTensorSpec) -> bool:
    """Return whether the arriving bytes are the tensor. A bool must be checked first: its bytes need not be 0 or 1."""
    return spec.raw and spec.dtype is not torch.bool


def _decoding_bytes(spec: StateTensorSpec) -> int:
    """Room for a tensor and its encoding at the end, such that decoding a tile overwrites no later one's encoding.

    It has the tensor's own size, unless a codec needs more room for a tile than its values do: for a few elements at
    the end, or if a donor has chosen a bad codec.
    """
    left = spec.encoded_bytes
    most = left
    for _, last, start, stop in spec.tiles():
        left -= stop - start
        most = max(most, last * spec.dtype.itemsize + left)
    return most
