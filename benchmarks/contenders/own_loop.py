"""An event loop in a thread of its own, as shoal has one: for contenders that are made of connections alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OwnLoop:
    """What has such a loop.

    Attributes:
        loop: it runs until the process ends, or is stopped.
        limit_s: how long anything may take, seconds.
    """

    limit_s = 60.0

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there, to the end."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(self.limit_s)
