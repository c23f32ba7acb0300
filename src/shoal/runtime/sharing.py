"""The state that a `DecentralizedAverager` shares with newcomers, and the download of another peer's state."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from numbers import Real
from typing import Any, Literal, TypeVar, overload

import torch

from shoal.averaging import Averager
from shoal.base.checks import flag, seconds
from shoal.compression import CompressionBase, CompressionInfo
from shoal.errors import ConfigError, StateUnavailable
from shoal.events import Warned
from shoal.protocol.wire import MAX_EPOCH
from shoal.runtime.dht import DHT
from shoal.runtime.tensors import LockedTensors
from shoal.runtime.thread import GRACE_S, LoopFuture
from shoal.state.wire import SharedState

__all__ = ["SharesState"]

T = TypeVar("T")

DEFAULT_STATE_TIMEOUT_S = 600.0


class SharesState:
    """The part of `DecentralizedAverager` that shares and downloads states."""

    dht: DHT
    _shares_at_start: bool
    _priority_at_start: float
    _locked: LockedTensors
    _averager: Averager | None
    _state_compression: CompressionBase
    _tensor_infos: Sequence[CompressionInfo] | None

    @property
    def client_mode(self) -> bool:
        raise NotImplementedError

    def _core(self) -> Averager:
        raise NotImplementedError

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return self.dht.loop_thread.run(work, timeout_s + GRACE_S)

    def get_current_state(self) -> tuple[Any, ...]:
        """The state that others download from here. Override this; it is called in a worker thread, under the lock.

        It may use `get_tensors`, but must not wait for this averager. All peers that ask within about two seconds may
        get the same copy. While a peer downloads a copy, all others get it too, up to two minutes after it was made: a
        donor keeps one copy at a time. A state with NaN is not given to others. Neither is one with infinities in the
        averaged tensors themselves; in other tensors (masks) infinities go as they are.

        Returns:
            (metadata of plain values, tensors, one `CompressionInfo` for each tensor or None). The last value, or the
            last two, may be left out. The default: no metadata, the averaged tensors, and the averager's
            `tensor_infos`.
        """
        return None, self._locked.tensors, self._tensor_infos

    def _shared_state(self) -> SharedState:
        state = self._locked.export(self.get_current_state)
        if not isinstance(state, tuple | list) or not 1 <= len(state) <= 3:
            raise ConfigError(f"get_current_state must return a tuple of 1 to 3 values, got {state!r:.80}")
        metadata, tensors, infos = [*state, None, None][:3]
        tensors = tuple(tensors or ())
        if infos is not None and len(infos) != len(tensors):
            raise ConfigError(f"get_current_state returned {len(infos)} tensor infos for {len(tensors)} tensors")
        chosen = infos or [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
        codecs = [self._state_compression.choose(info) for info in chosen]
        # An epoch is a whole number from 0. It decides only between donors that have declared the same priority.
        epoch = min(max(0, int(self.state_sharing_priority)), MAX_EPOCH)
        averaged = {tensor.data_ptr() for tensor in self._locked.tensors}
        others = [i for i, tensor in enumerate(tensors) if tensor.data_ptr() not in averaged]
        return SharedState(
            metadata,
            tensors,
            codecs,
            epoch,
            may_be_infinite=others,
            called=lambda i: f"tensor {chosen[i].key} of the state",
        )

    @property
    def allow_state_sharing(self) -> bool:
        """Whether others can download the state from here.

        Raises:
            ConfigError: it is set to True in client mode, where nobody can dial this peer.
        """
        return self._shares_at_start if self._averager is None else self._core().sharing.enabled

    @allow_state_sharing.setter
    def allow_state_sharing(self, value: bool) -> None:
        if (value := flag("allow_state_sharing", value)) and self.client_mode:
            raise ConfigError("allow_state_sharing=True needs a peer that can be dialed: this one is in client mode")
        if self._averager is None:
            self._shares_at_start = value
            return
        averager = self._core()

        async def change() -> None:
            if value:
                averager.sharing.enable()
            else:
                averager.sharing.disable()

        self._run(change(), GRACE_S)

    @property
    def state_sharing_priority(self) -> float:
        """Any finite number: donors with a higher priority are asked first. 0 unless set.

        Raises:
            ConfigError: the value that is set is not a finite number.
        """
        return self._averager.sharing.priority if self._averager is not None else self._priority_at_start

    @state_sharing_priority.setter
    def state_sharing_priority(self, value: float) -> None:
        try:
            priority = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:
            priority = math.inf
        if not math.isfinite(priority):
            raise ConfigError(f"state_sharing_priority must be a finite number, got {value!r:.80}")
        if self._averager is None:
            self._priority_at_start = priority
            return
        averager = self._core()
        averager.sharing.set_priority(priority)
        self.dht.loop_thread.submit(averager.sharing.declare())

    @overload
    def load_state_from_peers(
        self, wait: Literal[True] = True, timeout: float | None = None
    ) -> tuple[Any, Sequence[torch.Tensor]] | None: ...
    @overload
    def load_state_from_peers(
        self, wait: Literal[False], timeout: float | None = None
    ) -> LoopFuture[tuple[Any, Sequence[torch.Tensor]] | None]: ...
    def load_state_from_peers(
        self, wait: bool = True, timeout: float | None = None
    ) -> tuple[Any, Sequence[torch.Tensor]] | LoopFuture[tuple[Any, Sequence[torch.Tensor]] | None] | None:
        """Download a state that was consistent at another peer, and verify it. Nothing is applied.

        Args:
            wait: False returns a future at once.
            timeout: seconds; None: 600.

        Returns:
            (metadata, tensors) as the donor's `get_current_state` gave them, the tensors in host memory. None if there
            is no donor, or no donor gave a state in time, which is a warning. The call does not wait for a donor to
            appear.

        Raises:
            ConfigError: `timeout` is wrong.
            ClosedError: the averager or its DHT was shut down.
        """
        timeout_s = seconds("timeout", timeout, DEFAULT_STATE_TIMEOUT_S)

        async def work() -> tuple[Any, Sequence[torch.Tensor]] | None:
            try:
                return await self._load_state(timeout_s)
            except StateUnavailable as error:
                self.dht.events.emit(Warned(where=f"averager {averager.prefix}", message=f"{error}"))
                return None

        averager = self._core()
        return self._run(work(), timeout_s) if wait else self.dht.loop_thread.submit(work())

    async def _load_state(self, timeout_s: float) -> tuple[Any, Sequence[torch.Tensor]] | None:
        """In the loop: as `load_state_from_peers`, but raises `StateUnavailable` where donors live and gave nothing."""
        state = await self._core().sharing.load(timeout_s=timeout_s)
        return None if state is None else (state.metadata, state.tensors)
