"""`DecentralizedAverager`: averaging with other peers, as users hold it.

The lock of the tensors is the user's for as long as a `with get_tensors()` block lasts, and shoal's for the
milliseconds of copying in and applying. shoal never holds it while it waits for anything. Threads get it in the order
in which they ask.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Self, overload

import msgspec
import torch

from shoal.averaging import (
    Averager,
    AveragerSettings,
    AveragingMode,
    StepRequest,
    StepResult,
    check_group_bits,
    choose_timeouts,
)
from shoal.averaging.averager import Prepare
from shoal.base.checks import flag, own_number, seconds
from shoal.base.peer import PeerID
from shoal.base.untraced import untraced
from shoal.compression import CompressionBase, CompressionInfo
from shoal.errors import ClosedError, ConfigError, LocalError
from shoal.runtime.arguments import check_tensors, choose_codecs, client_argument, codec_argument, first
from shoal.runtime.control import StepControl, check_schedule
from shoal.runtime.dht import DHT
from shoal.runtime.sharing import SharesState
from shoal.runtime.tensors import LockedTensors
from shoal.runtime.thread import GRACE_S, LoopFuture, LoopThread
from shoal.state.wire import SharedState

__all__ = ["DecentralizedAverager"]

DEFAULT_STEP_TIMEOUT_S = 300.0

_FRESH_S = 2.0
"""A copy of the state that is older than this is not given to newcomers, as the state may have changed without the lock
of the tensors."""


class DecentralizedAverager(SharesState):
    """Averages a list of tensors with the other peers of the same `prefix`, in groups, while peers come and go.

    A round that fails raises `RoundFailed` and touches no tensor. A round that succeeds leaves the same bits on every
    member of the group. All methods can be called from any thread. Seconds and bytes throughout;
    `docs/reference/averaging.md` has every argument beside that of hivemind 1.1.12.

    Args:
        averaged_tensors: floating-point tensors, averaged in place; shapes and dtypes must be equal on all peers.
        dht: this peer.
        start: connect now; else at `run_in_background`.
        prefix: peers with the same prefix meet.
        target_group_size: a group starts at once when it has this many members; None: when nobody else looks for one.
        min_group_size: no group is smaller, and a round that loses more members fails.
        initial_group_bits: which of several groups to begin with, as a text of 0 and 1; drawn anew after each round,
            and after a search that found no group.
        averaging_expiration: how long one search for a group lasts; a step begins another until its timeout. None: 15.
            This and all other time limits that are not given follow from those that are.
        min_matchmaking_time: another name of `averaging_expiration`.
        request_timeout: how long to wait for another peer's answer while looking for a group; less than
            `averaging_expiration`. None: 3.
        averaging_alpha: move this fraction of the way to the average, above 0 and at most 1.
        part_size_bytes: the tensors are sent in tiles of at most this size.
        allreduce_timeout: longest time of a round once the group is formed; None: 120.
        next_chunk_timeout: silence after which a donor of state is left, and the default of `sender_timeout`; None: 5.
        sender_timeout: silence after which a member that owes values is left out of a round; None: 5.
        reducer_timeout: lack of progress after which a member that owes averages is replaced; None: 2 x sender_timeout.
        compression: codec for averaging.
        state_compression: codec for `load_state_from_peers`.
        tensor_infos: the description of each tensor by which `compression` chooses; None: shape, dtype and position.
            For tensors with the role of parameters, lossy codecs send the changes since the last average.
        bandwidth: bytes per second of this peer: a peer with more reduces more; 0 reduces nothing. None: what its line
            carried while it was full, or its `upload_limit`; without either it counts as the fastest of the others.
        min_vector_size: a peer that would reduce fewer elements than this reduces none.
        auxiliary: only reduce for others: the tensors here are neither read nor changed.
        allow_state_sharing: whether others can download the state from here; None: yes, unless in client mode or
            auxiliary.
        declare_state_period: how often this peer declares that it shares its state, seconds.
        client_mode: this peer only dials; None takes it from `dht`.
        daemon: kept for compatibility; there is no process.
        shutdown_timeout: how long `shutdown` may take.

    Raises:
        ConfigError: an argument is wrong, or does not fit another one; both are named.
    """

    _stays = True  # the tensors go on from the averages, as parameters do

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
        averaging_expiration: float | None = None,
        min_matchmaking_time: float | None = None,
        request_timeout: float | None = None,
        averaging_alpha: float = 1.0,
        part_size_bytes: int = 1 << 20,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        compression: CompressionBase | None = None,
        state_compression: CompressionBase | None = None,
        tensor_infos: Sequence[CompressionInfo] | None = None,
        bandwidth: float | None = None,
        min_vector_size: int = 0,
        auxiliary: bool = False,
        allow_state_sharing: bool | None = None,
        declare_state_period: float = 30.0,
        client_mode: bool | None = None,
        daemon: bool = True,
        shutdown_timeout: float = 5.0,
    ) -> None:
        if not isinstance(dht, DHT):
            raise ConfigError(f"dht must be a shoal.DHT, got {type(dht).__name__}")
        if averaging_expiration is not None and min_matchmaking_time is not None:
            raise ConfigError("averaging_expiration and min_matchmaking_time are two names of one thing: give only one")
        check_tensors(averaged_tensors)
        auxiliary = flag("auxiliary", auxiliary)
        self.dht, self.prefix = dht, prefix
        self._only_dials = client_argument(client_mode, only_dials=dht.only_dials, is_client=dht.client_mode)
        other_name = {} if min_matchmaking_time is None else {"averaging_expiration": "min_matchmaking_time"}
        timeouts = {
            "averaging_expiration": first(averaging_expiration, min_matchmaking_time),
            "request_timeout": request_timeout,
            "allreduce_timeout": allreduce_timeout,
            "sender_timeout": sender_timeout,
            "reducer_timeout": reducer_timeout,
            "next_chunk_timeout": next_chunk_timeout,
        }
        settings = AveragerSettings(
            target_group_size=own_number(target_group_size),
            min_group_size=own_number(min_group_size),
            averaging_alpha=own_number(averaging_alpha),
            part_size_bytes=own_number(part_size_bytes),
            bandwidth=own_number(bandwidth),
            min_vector_size=own_number(min_vector_size),
            auxiliary=auxiliary,
            client_mode=self._only_dials or (auxiliary and dht.client_mode),
            group_bits=initial_group_bits,
            declare_state_period_s=own_number(declare_state_period),
            fresh_state_s=_FRESH_S,
        )
        self._settings = msgspec.structs.replace(settings, **choose_timeouts(timeouts, names=other_name))
        self._settings.check()
        if self.client_mode and allow_state_sharing:
            raise ConfigError(
                "allow_state_sharing=True needs a peer that can be dialed, and this one is in client mode: leave it out"
            )
        shares = not (self._only_dials or auxiliary)
        self._shares_at_start = (
            shares if allow_state_sharing is None else flag("allow_state_sharing", allow_state_sharing)
        )
        self._priority_at_start = 0.0
        self._codecs = choose_codecs(averaged_tensors, codec_argument("compression", compression), tensor_infos)
        self._state_compression = codec_argument("state_compression", state_compression)
        self._shutdown_timeout_s = seconds("shutdown_timeout", shutdown_timeout, 5.0)
        self._tensor_infos = None if tensor_infos is None else tuple(tensor_infos)
        self._locked = LockedTensors(averaged_tensors)
        self._averager: Averager | None = None
        self._end: Callable[[], LoopFuture[None] | None] = lambda: None
        self._closed = False
        if flag("start", start):
            self.run_in_background()

    # -------------------------------------------------------------------------------------------------- life and death

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Begin to serve and to declare the state.

        Args:
            await_ready: kept for compatibility: there is nothing to wait for beyond the DHT.
            timeout: seconds to wait for the DHT to be ready.

        Raises:
            ConfigError: the tensors cannot be averaged.
            LocalError: the averager runs already, or the DHT was not started.
            ClosedError: the averager was shut down.
            PeerTimeout, PeerUnreachable: as `DHT.core`.
        """
        if self._closed:
            raise ClosedError("the averager was shut down: make another one")
        if self._averager is not None:
            raise LocalError("this averager was started already, and is started only once: make another one")
        core, get_state = self.dht.core(timeout), weakref.WeakMethod(self._shared_state)

        def state() -> SharedState:
            # Code in the loop refers to this object weakly: otherwise neither it nor its DHT could be collected.
            if (get := get_state()) is None:
                raise ClosedError("the averager was dropped")
            return get()

        async def begin() -> Averager:
            averager = Averager(
                core,
                self._locked.tensors,
                self.prefix,
                self._settings,
                lock=self._locked.lock,
                codecs=self._codecs,
                state=state,
                stays=self._stays,
            )
            averager.sharing.set_priority(self._priority_at_start)
            if self._shares_at_start:
                averager.sharing.enable()
            return averager

        self._averager = self._run(begin(), GRACE_S)
        forget_closer = self.dht.at_shutdown(self._averager.close)
        self._end = partial(_close, self._averager, self.dht.loop_thread, forget_closer, self._shutdown_timeout_s)
        weakref.finalize(self, self._end).atexit = False  # the DHT sees to that

    def shutdown(self) -> None:
        """Stop averaging and sharing, and end a running step. The DHT goes on. Safe to call twice, from any thread.

        This returns when all of it has ended, or after `shutdown_timeout`; in shoal's own thread at once.
        """
        self._closed = True
        closing = self._end()
        if closing is not None and not self.dht.loop_thread.is_current():
            closing.wait(self._shutdown_timeout_s)  # the rest of it ends by itself

    def is_alive(self) -> bool:
        """Whether steps can be made."""
        return self._averager is not None and not self._closed and self.dht.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        raise LocalError(
            f"a {type(self).__name__} is one peer's part in averaging, and cannot be copied or pickled: copy the "
            "tensors within get_tensors(), and make an averager of them where they are needed"
        )

    def __repr__(self) -> str:
        state = "running" if self.is_alive() else "not running"
        return f"{type(self).__name__}({len(self._locked.tensors)} tensors, prefix={self.prefix!r}, {state})"

    def _core(self) -> Averager:
        if self._averager is None:
            raise LocalError("this averager was not started: pass start=True or call run_in_background()")
        if self._closed:
            raise ClosedError("the averager was shut down")
        self.dht.loop_thread.check_alive()
        return self._averager

    # ------------------------------------------------------------------------------------------------------ averaging

    @property
    def peer_id(self) -> PeerID:
        """This peer."""
        return self.dht.peer_id

    @property
    def client_mode(self) -> bool:
        """Whether this averager only dials: as the user said, or because nobody can dial this peer now."""
        return self._only_dials or (self.dht.is_alive() and self.dht.client_mode)

    @property
    def mode(self) -> AveragingMode:
        """The part of this averager in a round: whether it has values, and whether it reduces those of others."""
        if self.client_mode:
            return AveragingMode.CLIENT
        return AveragingMode.AUX if self._settings.auxiliary else AveragingMode.NODE

    def get_tensors(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The averaged tensors, locked: no round changes or reads them within the block. Keep the block short.

        shoal never holds the lock while a round waits for the network, so it is free once values were copied: after
        milliseconds, or the time of copying a large state. A step waits for the end of the block, behind others that
        asked before it, before it looks for a group. A step that has a group loses it after `sender_timeout`, and looks
        for another one until its own timeout.

        Raises:
            LocalError: this thread is within such a block already, and would wait for itself; or another thread has
                been in a block for minutes; or, in shoal's own thread, any thread holds the lock.
            ClosedError: this process is a fork of the one that made the averager.
        """
        in_loop = False
        if self._averager is not None:
            if self.dht.loop_thread.forked:
                self.dht.loop_thread.check_alive()
            in_loop = self.dht.loop_thread.is_current()
        return self._locked.acquire(wait=not in_loop)

    @overload
    def step(
        self,
        gather: object = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: Literal[True] = True,
    ) -> dict[PeerID, Any]: ...
    @overload
    def step(
        self,
        gather: object = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        *,
        wait: Literal[False],
    ) -> StepControl: ...
    @untraced
    def step(
        self,
        gather: object = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> dict[PeerID, Any] | StepControl:
        """Find a group and average once, in place.

        Args:
            gather: a small value (numbers, text, bytes, lists, dictionaries) that every member of the group gets.
            scheduled_time: look for a group only from this time on, wall-clock seconds (`time.time()`); None: now.
            weight: the weight of this peer's tensors, from 1e-9 to 1e12, or 0: it takes part without counting; None: 1.
            timeout: seconds for everything, retries included; None: 300.
            allow_retries: after a failed round look for another group until the timeout.
            require_trigger: begin only when `allow_allreduce()` of the returned `StepControl` is called; needs
                `wait=False`.
            wait: False returns at once; the returned `StepControl` steers the step.

        Returns:
            `{peer id: its `gather` value}` of the group; with `wait=False` a `StepControl`, a future of it.

        Raises:
            RoundFailed: no average; no tensor was touched.
            SchemaMismatch: only peers with other tensors or settings were met; names the first difference.
            NobodyContributes: this peer is auxiliary, and so are all that look for a group.
            ConfigError: an argument is wrong.
            LocalError: another step is under way; or the caller holds the tensors (`get_tensors`), or is shoal's
                thread.
            ClosedError: the averager or its DHT was shut down, also while the step went on.
        """
        timeout_s = seconds("timeout", timeout, DEFAULT_STEP_TIMEOUT_S)
        deadline = time.time() + timeout_s
        wait, allow_retries = flag("wait", wait), flag("allow_retries", allow_retries)
        if (require_trigger := flag("require_trigger", require_trigger)) and wait:
            raise ConfigError("require_trigger=True with wait=True would wait for ever: pass wait=False")
        scheduled_time = own_number(scheduled_time)
        check_schedule(scheduled_time, deadline)
        request = StepRequest(
            weight=1.0 if weight is None else weight,
            gather=gather,
            scheduled_time=scheduled_time,
            triggered=not require_trigger,
        )
        averager = self._core()

        async def work() -> dict[PeerID, Any]:
            prepare = self._prepare(request)
            return self._gathered(
                await averager.step(request, timeout_s=timeout_s, allow_retries=allow_retries, prepare=prepare)
            )

        if not wait:
            control = StepControl(self, self.dht.loop_thread, request, deadline=deadline, allow_retries=allow_retries)
            self.dht.loop_thread.answer(control, work())
            return control
        self._locked.check_not_held()
        return self._run(work(), timeout_s)

    def _prepare(self, request: StepRequest) -> Prepare | None:
        """What is done when the values are copied in, once there is a group; None: nothing."""
        return None

    def _gathered(self, result: StepResult) -> dict[PeerID, Any]:
        """The result of a step."""
        return result.gathered

    # ----------------------------------------------------------------------------------------------------------- groups

    @overload
    def get_group_bits(self, wait: Literal[True] = True) -> str: ...
    @overload
    def get_group_bits(self, wait: Literal[False]) -> LoopFuture[str]: ...
    def get_group_bits(self, wait: bool = True) -> str | LoopFuture[str]:
        """The bits of the group that the next step looks for.

        Args:
            wait: False returns a future of it.
        """
        averager = self._core()

        async def get() -> str:
            return averager.group_bits

        return averager.group_bits if wait else self.dht.loop_thread.submit(get())

    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[True] = True) -> None: ...
    @overload
    def set_group_bits(self, group_bits: str, wait: Literal[False]) -> LoopFuture[None]: ...
    def set_group_bits(self, group_bits: str, wait: bool = True) -> LoopFuture[None] | None:
        """Look for this group from the next search on. A round or search that is under way does not change it.

        Args:
            group_bits: a text of 0 and 1; empty: one group for all, and none is drawn after a round.
            wait: until it is set; False returns a future.

        Raises:
            ConfigError: it is not a text of 0 and 1.
        """
        averager, bits = self._core(), check_group_bits("group_bits", group_bits)

        async def change() -> None:
            averager.group_bits = bits

        return self._run(change(), GRACE_S) if wait else self.dht.loop_thread.submit(change())


def _close(
    averager: Averager, thread: LoopThread, forget_closer: Callable[[], None], timeout_s: float
) -> LoopFuture[None] | None:
    """Begin to close the running part of an averager, from any thread; None if its DHT ends, which closes it too."""

    async def close() -> None:
        await averager.close(timeout_s)
        forget_closer()

    try:
        return thread.submit(close())
    except ClosedError:
        return None
