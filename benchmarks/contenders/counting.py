"""Counts what shoal's peers in this process send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shoal.rpc.dialing
import shoal.rpc.endpoint
import shoal.rpc.link
import shoal.rpc.stream

__all__ = ["Messages"]


class Messages:
    """Counts the frames that are made from now on: calls, replies, heartbeats, and what goes over streams."""

    def __init__(self) -> None:
        self.sent = 0
        for module in (shoal.rpc.dialing, shoal.rpc.endpoint, shoal.rpc.link, shoal.rpc.stream):
            module.pack = self._counted(module.pack)  # type: ignore[attr-defined]

    def _counted(self, pack: Callable[..., bytes]) -> Callable[..., bytes]:
        def counted(*args: Any, **kwargs: Any) -> bytes:
            self.sent += 1
            return pack(*args, **kwargs)

        return counted
