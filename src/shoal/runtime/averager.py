"""`DecentralizedAverager`: averaging with other peers, as users hold it.

The lock of the tensors is the user's for as long as a `with get_tensors()` block lasts, and shoal's for the
milliseconds of copying in and applying. It is never held while anything is waited for.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, Self, TypeVar, overload

import torch

from shoal.averager import Averager, AveragerSettings, TensorLock
from shoal.compression import CompressionBase, CompressionInfo, NoCompression
from shoal.errors import ClosedError, ConfigError, LocalError, StateUnavailable
from shoal.peer import PeerID
from shoal.runtime.dht import DHT
from shoal.runtime.thread import GRACE_S, LoopFuture
from shoal.state import SharedState

__all__ = ["DecentralizedAverager"]

T = TypeVar("T")

DEFAULT_STEP_TIMEOUT_S = 300.0
DEFAULT_STATE_TIMEOUT_S = 600.0

_LOCK_TIMEOUT_S = 300.0
"""Far longer than copying any state takes: somebody has forgotten that he holds the tensors."""

_FRESH_S = 2.0
"""Newcomers get a state that is not older than this, also where it changes without the lock of the tensors."""


class DecentralizedAverager:
    """Averages a list of tensors with the other peers of the same `prefix`, in groups, whoever comes and goes.

    A round that fails raises `RoundFailed` and touches no tensor. A round that succeeds leaves the same bits on every
    member of the group. All methods can be called from any thread.

    Args:
        averaged_tensors: floating-point tensors, averaged in place; shapes and dtypes must be equal on all peers.
        dht: this peer.
        start: connect now; else at `run_in_background`.
        prefix: peers with the same prefix meet.
        target_group_size: a group starts at once when it has this many members; None: when nobody else looks for one.
        min_group_size: no group is smaller, and a round that loses more members fails.
        initial_group_bits: which of several groups, as a text of 0 and 1.
        averaging_expiration: seconds that one search for a group lasts; a step begins another until its timeout.
        request_timeout: seconds to wait for another peer's answer while looking for a group.
        averaging_alpha: move this fraction of the way to the average, above 0 and at most 1.
        part_size_bytes: the tensors are sent in parts of at most this size.
        allreduce_timeout: longest time of a round once the group is formed, seconds; None: 120.
        compression: codec for averaging.
        state_compression: codec for `load_state_from_peers`.
        bandwidth: of this peer, bytes per second: who has more reduces more; 0 reduces nothing; None is taken as
            average.
        client_mode: this peer only dials; None takes it from `dht`.
        allow_state_sharing: whether others can download the state from here; None: yes, unless in client mode.
        sender_timeout: seconds of silence after which a member is left out of a round; None: 5.
        declare_state_period: how often this peer tells that it shares its state, seconds.
        daemon: kept for compatibility; there is no process.
        shutdown_timeout: seconds that `shutdown` may take.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    def __init__(  # noqa: PLR0913 (documented names that users of hivemind know)
        self,
        averaged_tensors: Sequence[torch.Tensor],
        dht: DHT,
        *,
        start: bool,
        prefix: str,
        target_group_size: int | None = None,
        min_group_size: int = 2,
        initial_group_bits: str = "",
        averaging_expiration: float = 15.0,
        request_timeout: float = 3.0,
        averaging_alpha: float = 1.0,
        part_size_bytes: int = 1 << 20,
        allreduce_timeout: float | None = None,
        compression: CompressionBase | None = None,
        state_compression: CompressionBase | None = None,
        bandwidth: float | None = None,
        client_mode: bool | None = None,
        allow_state_sharing: bool | None = None,
        sender_timeout: float | None = None,
        declare_state_period: float = 30.0,
        daemon: bool = True,
        shutdown_timeout: float = 5.0,
    ) -> None:
        if not isinstance(dht, DHT):
            raise ConfigError(f"dht must be a shoal.DHT, got {type(dht).__name__}")
        if isinstance(averaged_tensors, torch.Tensor) or not isinstance(averaged_tensors, Sequence):
            raise ConfigError("averaged_tensors must be a sequence of tensors: put it in a list")
        for name, codec in (("compression", compression), ("state_compression", state_compression)):
            if codec is not None and not isinstance(codec, CompressionBase):
                raise ConfigError(
                    f"{name} must be a codec such as shoal.compression.Float16Compression(), got {codec!r}"
                )
        self.dht, self.prefix = dht, prefix
        self.client_mode = dht.client_mode if client_mode is None else client_mode
        self._shares_at_start = not self.client_mode if allow_state_sharing is None else bool(allow_state_sharing)
        self._tensors = tuple(averaged_tensors)
        self._compression = compression or NoCompression()
        self._state_compression = state_compression or NoCompression()
        self._settings = AveragerSettings(
            target_group_size=target_group_size,
            min_group_size=min_group_size,
            averaging_expiration_s=averaging_expiration,
            request_timeout_s=request_timeout,
            averaging_alpha=averaging_alpha,
            part_size_bytes=part_size_bytes,
            allreduce_timeout_s=120.0 if allreduce_timeout is None else allreduce_timeout,
            silence_s=5.0 if sender_timeout is None else sender_timeout,
            bandwidth=bandwidth,
            client_mode=self.client_mode,
            group_bits=initial_group_bits,
            declare_state_period_s=declare_state_period,
            fresh_state_s=_FRESH_S,
        )
        self._settings.check()
        self._shutdown_timeout_s = _seconds("shutdown_timeout", shutdown_timeout, 5.0)
        self._lock = threading.Lock()
        self._shared_lock = TensorLock(self._lock)
        self._holder: int | None = None  # the thread within get_tensors()
        self._exporter: int | None = None  # the thread that calls get_current_state, while shoal holds the lock
        self._averager: Averager | None = None
        self._forget_closer: Callable[[], None] = lambda: None
        self._closed = False
        if start:
            self.run_in_background()

    # -------------------------------------------------------------------------------------------------- life and death

    def run_in_background(
        self,
        await_ready: bool = True,  # noqa: FBT002
        timeout: float | None = None,
    ) -> None:
        """Begin to serve and to declare the state.

        Args:
            await_ready: kept for compatibility: there is nothing to wait for beyond the DHT.
            timeout: seconds to wait for the DHT to be ready.

        Raises:
            ConfigError: the tensors cannot be averaged.
            LocalError: it runs already, or was shut down; or the DHT was not started.
        """
        if self._averager is not None:
            raise LocalError("this averager was started already, and is started only once: make another one")
        core = self.dht.core(timeout)

        async def begin() -> Averager:
            averager = Averager(
                core,
                self._tensors,
                self.prefix,
                self._settings,
                lock=self._shared_lock,
                compression=self._compression,
                state=self._shared_state,
            )
            averager.share_state(enabled=self._shares_at_start)
            return averager

        self._averager = self._run(begin(), GRACE_S)
        self._forget_closer = self.dht.at_shutdown(self._averager.close)

    def shutdown(self) -> None:
        """Stop averaging and sharing; a step that goes on ends. The DHT goes on. Safe to call twice."""
        self._closed = True
        if self._averager is not None and self.dht.is_alive():
            self._forget_closer()
            with suppress(ClosedError):  # the DHT ends too, and this averager with it
                self._run(self._averager.close(), self._shutdown_timeout_s)

    def is_alive(self) -> bool:
        """Whether steps can be made."""
        return self._averager is not None and not self._closed and self.dht.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "running" if self.is_alive() else "not running"
        return f"DecentralizedAverager({len(self._tensors)} tensors, prefix={self.prefix!r}, {state})"

    def _core(self) -> Averager:
        if self._averager is None:
            raise LocalError("this averager was not started: pass start=True or call run_in_background()")
        if self._closed:
            raise ClosedError("the averager was shut down")
        self.dht.loop_thread.check_alive()
        return self._averager

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return self.dht.loop_thread.run(work, timeout_s + GRACE_S)

    # ---------------------------------------------------------------------------------------------------------- tensors

    @property
    def peer_id(self) -> PeerID:
        """This peer."""
        return self.dht.peer_id

    @contextmanager
    def get_tensors(self) -> Iterator[Sequence[torch.Tensor]]:
        """The averaged tensors, locked: no round changes or reads them within the block. Keep it short.

        The lock is never held while a round waits for the network, so it is free within milliseconds.

        Raises:
            LocalError: this thread is within such a block already, and would wait for itself; or somebody else has been
                for minutes.
            ClosedError: this process is a fork of the one that made the averager.
        """
        if self._averager is not None and self.dht.loop_thread.forked:
            self.dht.loop_thread.check_alive()
        if self._exporter == threading.get_ident():
            yield self._tensors
            return
        if self._holder == threading.get_ident():
            raise LocalError("this thread holds the tensors already: leave the other `with get_tensors()` block first")
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise LocalError(f"no access to the tensors within {_LOCK_TIMEOUT_S:g} s: who else is in get_tensors()?")
        self._holder = threading.get_ident()
        try:
            yield self._tensors
        finally:
            self._shared_lock.generation += 1
            self._holder = None
            self._lock.release()

    @overload
    def step(
        self,
        gather: object = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,  # noqa: FBT002
        wait: Literal[True] = True,  # noqa: FBT002
    ) -> dict[PeerID, Any]: ...
    @overload
    def step(
        self,
        gather: object = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,  # noqa: FBT002
        *,
        wait: Literal[False],
    ) -> LoopFuture[dict[PeerID, Any]]: ...
    def step(
        self,
        gather: object = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,  # noqa: FBT002
        wait: bool = True,  # noqa: FBT002
    ) -> dict[PeerID, Any] | LoopFuture[dict[PeerID, Any]]:
        """Find a group and average once, in place.

        Args:
            gather: a small value (numbers, text, bytes, lists, dictionaries) that every member of the group gets.
            weight: of this peer's tensors, finite and at least 0; None: 1. With 0 it takes part without counting.
            timeout: seconds for everything, retries included; None: 300.
            allow_retries: after a failed round look for another group until the timeout.
            wait: False returns a future at once; cancelling it gives the step up.

        Returns:
            `{peer id: what it gathered}` of the group.

        Raises:
            RoundFailed: no average; no tensor was touched.
            SchemaMismatch: only peers with other tensors or settings were met; names the first difference.
            ConfigError: an argument is wrong.
            LocalError: a step goes on already; or the caller holds the tensors (`get_tensors`), or is shoal's thread.
            ClosedError: the averager or its DHT was shut down, also while the step went on.
        """
        timeout_s = _seconds("timeout", timeout, DEFAULT_STEP_TIMEOUT_S)
        averager = self._core()

        async def work() -> dict[PeerID, Any]:
            result = await averager.step(
                weight=1.0 if weight is None else weight,
                gather=gather,
                timeout_s=timeout_s,
                allow_retries=allow_retries,
            )
            return result.gathered

        if not wait:
            return self.dht.loop_thread.submit(work())
        self._check_not_holding()
        return self._run(work(), timeout_s)

    def _check_not_holding(self) -> None:
        if self._holder == threading.get_ident():
            raise LocalError("this thread holds the tensors: leave the `with get_tensors()` block before you wait")

    # ------------------------------------------------------------------------------------------------------------ state

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo] | None]:
        """What others download from here: override it. Called in a worker thread, under the lock of the tensors.

        `get_tensors` may be used within it; nothing of this averager may be waited for. All who ask within about two
        seconds may be given the same copy.

        Returns:
            (metadata of plain values, tensors, one `CompressionInfo` for each tensor or None).
        """
        return None, self._tensors, None

    def _shared_state(self) -> SharedState:
        self._exporter = threading.get_ident()
        try:
            metadata, tensors, infos = self.get_current_state()
        finally:
            self._exporter = None
        chosen = infos or [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
        codecs = [self._state_compression.choose(info) for info in chosen]
        return SharedState(metadata=metadata, tensors=tensors, codecs=codecs, epoch=int(self.state_sharing_priority))

    @property
    def allow_state_sharing(self) -> bool:
        """Whether others can download the state from here; can be set."""
        return self._core().shares_state

    @allow_state_sharing.setter
    def allow_state_sharing(self, value: bool) -> None:
        averager = self._core()

        async def change() -> None:
            averager.share_state(enabled=bool(value))

        self._run(change(), GRACE_S)

    @property
    def state_sharing_priority(self) -> float:
        """Donors with a higher priority are asked first; 0 as long as it is not set."""
        return self._averager.state_priority if self._averager is not None else 0.0

    @state_sharing_priority.setter
    def state_sharing_priority(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"state_sharing_priority must be a finite number, got {value!r}")
        averager = self._core()
        averager.state_priority = float(value)
        self.dht.loop_thread.submit(averager.declare_state())

    @overload
    def load_state_from_peers(
        self,
        wait: Literal[True] = True,  # noqa: FBT002
        timeout: float | None = None,
    ) -> tuple[Any, Sequence[torch.Tensor]] | None: ...
    @overload
    def load_state_from_peers(
        self, wait: Literal[False], timeout: float | None = None
    ) -> LoopFuture[tuple[Any, Sequence[torch.Tensor]] | None]: ...
    def load_state_from_peers(
        self,
        wait: bool = True,  # noqa: FBT002
        timeout: float | None = None,
    ) -> tuple[Any, Sequence[torch.Tensor]] | LoopFuture[tuple[Any, Sequence[torch.Tensor]] | None] | None:
        """Download the state of another peer: one that was consistent there, verified here. Nothing is applied.

        Args:
            wait: False returns a future at once.
            timeout: seconds; None: 600.

        Returns:
            (metadata, tensors) as the donor's `get_current_state` gave them, or None if no donor gave a state in time.

        Raises:
            ConfigError: `timeout` is wrong.
            ClosedError: the averager or its DHT was shut down.
        """
        timeout_s = _seconds("timeout", timeout, DEFAULT_STATE_TIMEOUT_S)
        averager = self._core()

        async def work() -> tuple[Any, Sequence[torch.Tensor]] | None:
            try:
                state = await averager.load_state(timeout_s=timeout_s)
            except StateUnavailable:
                return None
            return state.metadata, state.tensors

        return self._run(work(), timeout_s) if wait else self.dht.loop_thread.submit(work())

    # ----------------------------------------------------------------------------------------------------------- groups

    def get_group_bits(self) -> str:
        """Which of several groups this averager looks for."""
        return self._core().group_bits

    def set_group_bits(self, group_bits: str) -> None:
        """Look for this group from the next step on.

        Raises:
            ConfigError: it is not a text of 0 and 1.
        """
        if not isinstance(group_bits, str) or set(group_bits) - {"0", "1"}:
            raise ConfigError(f"group_bits must be a text of 0 and 1, got {group_bits!r}")
        self._core().group_bits = group_bits


def _seconds(name: str, value: object, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")
    return float(value)
