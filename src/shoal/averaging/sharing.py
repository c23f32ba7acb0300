"""The state that an averager shares with newcomers, and the download of another peer's state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from shoal.averaging.core import PeerCore
from shoal.averaging.directory import declare_donor, find_donors
from shoal.averaging.lock import TensorLock
from shoal.averaging.settings import AveragerSettings
from shoal.base.clock import shielded
from shoal.base.tasks import Tasks
from shoal.errors import ClosedError, LocalError, ShoalError, StateUnavailable
from shoal.events import Warned
from shoal.state.wire import Donor, DownloadedState, DownloadLimits, SharedState, StateDonor, download_state

__all__ = ["StateSharing"]

_FIND_DONORS_S = 10.0

_LOCK_WITHIN_S = 60.0
"""The longest wait for the tensors, to copy them for newcomers. Newcomers are refused then."""


class StateSharing:
    """Gives this peer's state to every peer that asks, once it is `enabled`; loop only.

    Args:
        core: this peer.
        prefix: the name of the state; donors and receivers use the same one.
        settings: how often a donor declares itself, how old a copy may be, when a silent donor is left.
        lock: the lock of the state's tensors.
        state: gives the state, called under the lock.

    Attributes:
        priority: donors with a higher one are asked first.
    """

    def __init__(
        self,
        core: PeerCore,
        prefix: str,
        settings: AveragerSettings,
        *,
        lock: TensorLock,
        state: Callable[[], SharedState],
    ) -> None:
        self._core, self._prefix, self._settings, self._lock, self._state = core, prefix, settings, lock, state
        self.priority = 0.0
        self._version = 0
        self._donor: StateDonor | None = None
        self._tasks = Tasks(self._on_failure)
        self._declaring: asyncio.Task[None] | None = None

    def set_priority(self, priority: float) -> None:
        """Have the next declaration say this priority; `declare` tells it at once."""
        self.priority = priority

    @property
    def enabled(self) -> bool:
        """Whether others can download the state from here."""
        return self._donor is not None

    def enable(self, *, declared: bool = True) -> None:
        """Begin to give the state to every peer that asks. Has no effect if it goes on already.

        Args:
            declared: tell the DHT. Without, only peers that know of this one otherwise can ask it.
        """
        if self._donor is None:
            core = self._core
            self._donor = StateDonor(
                core.endpoint, core.env, self._prefix, self._hold_state, self._state_version, pacer=core.pacer()
            )
            self._declaring = self._tasks.spawn(self._declare_loop()) if declared else None

    def disable(self) -> None:
        """Stop giving the state at once."""
        if self._donor is not None:
            self._donor.stop()
        if self._declaring is not None:
            self._declaring.cancel()
        self._donor = self._declaring = None

    def _on_failure(self, error: BaseException) -> None:
        self._core.env.events.emit(Warned(where=f"state of {self._prefix}", message=f"{type(error).__name__}: {error}"))

    def changed(self) -> None:
        """Tell that the state has changed: peers that ask from now on get a new copy."""
        self._version += 1

    def _state_version(self) -> tuple[int, int, int]:
        fresh_s = self._settings.fresh_state_s
        age = 0 if fresh_s is None else int(asyncio.get_running_loop().time() / fresh_s)
        return self._version, self._lock.generation, age

    @asynccontextmanager
    async def _hold_state(self) -> AsyncIterator[SharedState]:
        async with self._lock.acquire(_LOCK_WITHIN_S) as has_come:
            if not has_come:
                holder = self._lock.holder or "somebody"
                raise LocalError(f"{holder} has held the tensors for {_LOCK_WITHIN_S:g} s, so they cannot be copied")
            yield await shielded(self._core.env.executor.run(self._state))

    async def _declare_loop(self) -> None:
        while True:
            await self.declare()
            await asyncio.sleep(self._settings.declare_state_period_s)

    async def declare(self) -> None:
        """Tell the DHT now that this peer shares its state, with the present priority; a failure is an event."""
        if self._declaring is None or self._core.client_mode:
            return
        core, prefix = self._core, self._prefix
        expiration = core.env.clock.time() + 2 * self._settings.declare_state_period_s
        try:
            await declare_donor(core.node, core.endpoint, prefix, self.priority, expiration)
        except ClosedError:
            pass  # this peer leaves
        except ShoalError as error:  # the next declaration may succeed
            message = f"newcomers may not find this donor: {error}"
            core.env.events.emit(Warned(where=f"state of {prefix}", message=message))

    async def load(self, *, timeout_s: float, **options: Any) -> DownloadedState | None:
        """Download the state of another peer; nothing is applied.

        Args:
            timeout_s: longest time, seconds.
            options: arguments for `download_state`.

        Returns:
            The state; None if no donor lives.

        Raises:
            StateUnavailable: donors live, and none gave it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        found = await find_donors(self._core.node, self._prefix, timeout_s=min(timeout_s, _FIND_DONORS_S))
        if not found:
            return None
        donors = [Donor(self._core.endpoint.dialable(contact), priority) for contact, priority in found]
        left_s = max(0.001, deadline - loop.time())
        options.setdefault("limits", self.limits)
        endpoint, env = self._core.endpoint, self._core.env
        try:
            return await download_state(endpoint, env, self._prefix, donors, timeout_s=left_s, **options)
        except StateUnavailable:
            if any(endpoint.connected(donor.peer) for donor in donors):
                raise
            return None  # what declared them is older

    @property
    def limits(self) -> DownloadLimits:
        """The limits on what a donor may cost us."""
        return msgspec.structs.replace(DownloadLimits(), stall_s=self._settings.next_chunk_timeout_s)
