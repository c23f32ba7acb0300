"""The whole numbers among the extra tensors (batch norm counts its batches): equal on all at the end of a run.

They have no mean. So with the last averaging of states each member says its own, and all take those of one member: of
those whose values are in the average, the one with the lowest peer id. They are few: what has more than `_MOST_BYTES`
in all (an index, a large mask) is not said, and stays each peer's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shoal.compression import view_bytes
from shoal.peer import PeerID

__all__ = ["Counts"]

_MOST_BYTES = 4096


class Counts:
    """The whole numbers (and flags) among these tensors.

    Args:
        extra_tensors: of the state.
    """

    def __init__(self, extra_tensors: Sequence[torch.Tensor]) -> None:
        found = [each for each in extra_tensors if not (each.is_floating_point() or each.is_complex())]
        self._bytes = sum(each.nbytes for each in found)
        self._tensors = found if self._bytes <= _MOST_BYTES else []

    def __bool__(self) -> bool:
        """Whether there are any that are said."""
        return bool(self._tensors)

    def said(self) -> bytes:
        """Their values now."""
        return b"".join(view_bytes(each.detach().to("cpu").contiguous()) for each in self._tensors)

    def chosen(self, gathered: Mapping[PeerID, Any], contributors: Collection[PeerID]) -> bytes | None:
        """What all members take; None if no contributor has said its own as it should."""
        fit = (said for peer, said in sorted(gathered.items()) if peer in contributors and self._fits(said))
        return next(fit, None)

    def _fits(self, said: object) -> bool:
        return bool(self) and isinstance(said, bytes) and len(said) == self._bytes

    def take(self, said: bytes) -> None:
        """Write these values (under the lock of the state)."""
        begin = 0
        for tensor in self._tensors:
            stop = begin + tensor.nbytes
            values = torch.frombuffer(bytearray(said[begin:stop]), dtype=torch.uint8) if stop > begin else None
            if values is not None:
                # A flag is one byte, and any other than 0 and 1 would be no flag.
                typed = values != 0 if tensor.dtype is torch.bool else values.view(tensor.dtype)
                tensor.copy_(typed.view(tensor.shape))
            begin = stop
