"""`DecentralizedAverager`: averaging with other peers, as users hold it."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

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


class DecentralizedAverager:
    """Averages a list of tensors with the other peers of the same `prefix`, in groups, whoever comes and goes.

    A round that fails raises `RoundFailed` and touches no tensor. A round that succeeds leaves the same bits on every
    member of the group.

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
        bandwidth: of this peer, bytes per second: who has more reduces more; 0 reduces nothing; None is taken as average.
        client_mode: this peer only dials; None takes it from `dht`.
        allow_state_sharing: whether others can download the state from here; None: yes, unless in client mode.
        sender_timeout: seconds of silence after which a member is left out of a round; None: 5.
        declare_state_period: how often this peer tells that it shares its state, seconds.
        daemon: kept for compatibility; there is no process.
        shutdown_timeout: seconds that `shutdown` may take.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    def __init__(
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
        self.allow_state_sharing_at_start = not self.client_mode if allow_state_sharing is None else allow_state_sharing
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
        )
        self._settings.check()
        self._shutdown_timeout = shutdown_timeout
        self._lock = TensorLock(threading.Lock())
        self._averager: Averager | None = None
        self._closed = False
        if start:
            self.run_in_background()

    # -------------------------------------------------------------------------------------------------- life and death

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Begin to serve and to declare the state.

        Args:
            await_ready: kept for compatibility: there is nothing to wait for beyond the DHT.
            timeout: seconds to wait for the DHT.
        """
        core = self.dht.core(timeout)

        async def begin() -> Averager:
            averager = Averager(
                core,
                self._tensors,
                self.prefix,
                self._settings,
                lock=self._lock,
                compression=self._compression,
                state=self._shared_state,
            )
            averager.share_state(enabled=self.allow_state_sharing_at_start)
            return averager

        self._averager = self._run(begin(), DEFAULT_STEP_TIMEOUT_S)
        self.dht.at_shutdown(self._averager.close)

    def shutdown(self) -> None:
        """Stop averaging and sharing. The DHT goes on. Safe to call twice."""
        if self._averager is not None and not self._closed and self.dht.is_alive():
            self._closed = True
            self._run(self._averager.close(), self._shutdown_timeout + GRACE_S)
        self._closed = True

    def is_alive(self) -> bool:
        """Whether steps can be made."""
        return self._averager is not None and not self._closed and self.dht.is_alive()

    def __enter__(self) -> DecentralizedAverager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _core(self) -> Averager:
        if self._closed:
            raise ClosedError("the averager was shut down")
        if self._averager is None:
            raise LocalError("this averager was not started: pass start=True or call run_in_background()")
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
        """
        with self._lock.lock:  # type: ignore[attr-defined]
            try:
                yield self._tensors
            finally:
                self._lock.generation += 1

    @overload
    def step(
        self,
        gather: object = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        wait: Literal[True] = True,
    ) -> dict[PeerID, Any]: ...
    @overload
    def step(
        self,
        gather: object = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        *,
        wait: Literal[False],
    ) -> LoopFuture[dict[PeerID, Any]]: ...
    def step(
        self,
        gather: object = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        wait: bool = True,
    ) -> dict[PeerID, Any] | LoopFuture[dict[PeerID, Any]]:
        """Find a group and average once, in place.

        Args:
            gather: a small value (numbers, text, bytes, lists, dictionaries) that every member of the group gets.
            weight: of this peer's tensors, finite and at least 0; None: 1. With 0 it takes part without counting.
            timeout: seconds for everything, retries included; None: 300.
            allow_retries: after a failed round look for another group until the timeout.
            wait: False returns a future at once.

        Returns:
            `{peer id: what it gathered}` of the group.

        Raises:
            RoundFailed: no average; no tensor was touched.
            SchemaMismatch: only peers with other tensors or settings were met; names the first difference.
            ConfigError: an argument is wrong.
        """
        timeout_s = DEFAULT_STEP_TIMEOUT_S if timeout is None else timeout
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        averager = self._core()

        async def work() -> dict[PeerID, Any]:
            result = await averager.step(
                weight=1.0 if weight is None else weight,
                gather=gather,
                timeout_s=timeout_s,
                allow_retries=allow_retries,
            )
            return result.gathered

        if wait:
            return self._run(work(), timeout_s)
        return self.dht.loop_thread.submit(work())

    # ------------------------------------------------------------------------------------------------------------ state

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo] | None]:
        """What others download from here: override it. Called in a worker thread, under the lock of the tensors.

        Returns:
            (metadata of plain values, tensors, one `CompressionInfo` for each tensor or None).
        """
        return None, self._tensors, None

    def _shared_state(self) -> SharedState:
        metadata, tensors, infos = self.get_current_state()
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
        """Donors with a higher priority are asked first; can be set."""
        return self._averager.state_priority if self._averager is not None else 0.0

    @state_sharing_priority.setter
    def state_sharing_priority(self, value: float) -> None:
        averager = self._core()
        averager.state_priority = float(value)
        self.dht.loop_thread.submit(averager.declare_state())

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
        """Download the state of another peer: one that was consistent there, verified here. Nothing is applied.

        Args:
            wait: False returns a future at once.
            timeout: seconds; None: 600.

        Returns:
            (metadata, tensors) as the donor's `get_current_state` gave them, or None if no donor gave a state in time.
        """
        timeout_s = DEFAULT_STATE_TIMEOUT_S if timeout is None else timeout
        averager = self._core()

        async def work() -> tuple[Any, Sequence[torch.Tensor]] | None:
            try:
                state = await averager.load_state(timeout_s=timeout_s)
            except StateUnavailable:
                return None
            return state.metadata, state.tensors

        if wait:
            return self._run(work(), timeout_s)
        return self.dht.loop_thread.submit(work())

    # ----------------------------------------------------------------------------------------------------------- groups

    def get_group_bits(self) -> str:
        """Which of several groups this averager looks for."""
        return self._core().group_bits

    def set_group_bits(self, group_bits: str) -> None:
        """Look for this group from the next step on."""
        if not isinstance(group_bits, str) or set(group_bits) - {"0", "1"}:
            raise ConfigError(f"group_bits must be a text of 0 and 1, got {group_bits!r}")
        self._core().group_bits = group_bits
