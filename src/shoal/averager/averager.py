"""The averager's async core: look for a group, average with it, commit; again after a failure, until the deadline.

Runs in one event loop (`shoal.runtime` gives it a thread, `shoal.sim` virtual time). The lock of the averaged tensors
is held to copy in and to apply, never while anything is waited for on the network. A failed round leaves them as they
were.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import msgspec
import torch

from shoal.allreduce.load_balancing import balance
from shoal.allreduce.partition import MAX_PART_BYTES, MIN_PART_BYTES, first_difference
from shoal.allreduce.round import Outcome, Round, RoundOptions
from shoal.allreduce.vector import Vector, describe
from shoal.averager.directory import DhtDirectory, declare_donor, find_donors
from shoal.clock import Backoff
from shoal.compression import CompressionBase, CompressionInfo, NoCompression
from shoal.core import PeerCore
from shoal.errors import ClosedError, ConfigError, LocalError, RoundFailed, SchemaMismatch, ShoalError, StateUnavailable
from shoal.events import LocalValuesRejected, PeerDropped, RoundAborted, RoundFinished, Warned
from shoal.matchmaking import Group, Matchmaker
from shoal.peer import PeerID
from shoal.state import Donor, DownloadedState, SharedState, StateDonor, download_state
from shoal.wire import Member

__all__ = ["Averager", "AveragerSettings", "StepResult", "TensorLock"]

_LOCK_PAUSE_S = (0.0005, 0.01)


class Lock(Protocol):
    """A lock that other threads may hold: `threading.Lock` has this shape."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Take it; False if it could not be taken."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


class TensorLock:
    """The lock of the averaged tensors, taken by the user's threads and by the loop.

    Args:
        lock: the lock itself.

    Attributes:
        generation: grows whenever a holder may have changed the tensors.
    """

    def __init__(self, lock: Lock) -> None:
        self.lock, self.generation = lock, 0

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold it, from the loop: waits without blocking the loop."""
        pause_s, longest_s = _LOCK_PAUSE_S
        while not self.lock.acquire(blocking=False):
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 2 * pause_s)
        try:
            yield
        finally:
            self.lock.release()


class AveragerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an averager finds groups and averages. Checked by `Averager`.

    Attributes:
        target_group_size: a group starts at once when it has this many members; None for no limit.
        min_group_size: no group is smaller, and a round that loses more members fails.
        averaging_expiration_s: how long one search for a group lasts before it starts again.
        request_timeout_s: longest wait for another peer's answer while searching.
        averaging_alpha: tensors move this fraction of the way to the average, 0 < alpha <= 1.
        part_size_bytes: the vector is sent in parts of at most this size, as encoded.
        allreduce_timeout_s: longest time from the group to the verdict.
        silence_s: a member that sends nothing for this long, while it owes something, is left out of the round.
        bandwidth: bytes per second of this peer; None if not known; 0 reduces nothing.
        client_mode: this peer cannot be dialed.
        group_bits: which of several groups; `0` and `1`.
        declare_state_period_s: how often a donor declares itself.
        fresh_state_s: a copy of the state that is older than this is not given to newcomers, as the state may change
            without a call of `Averager.changed`; None if it never does.
        settings: named values that must be equal on all peers; a difference is refused by name.
    """

    target_group_size: int | None = None
    min_group_size: int = 2
    averaging_expiration_s: float = 15.0
    request_timeout_s: float = 3.0
    averaging_alpha: float = 1.0
    part_size_bytes: int = 1 << 20
    allreduce_timeout_s: float = 120.0
    silence_s: float = 5.0
    bandwidth: float | None = None
    client_mode: bool = False
    group_bits: str = ""
    declare_state_period_s: float = 30.0
    fresh_state_s: float | None = None
    settings: Mapping[str, str] = {}

    def check(self) -> None:
        """Raise `ConfigError` for the first value that cannot be."""
        size, least = self.target_group_size, self.min_group_size
        _need(isinstance(least, int) and least >= 1, "min_group_size", least, "a whole number of at least 1")
        if size is not None:
            _need(isinstance(size, int) and least <= size <= 256, "target_group_size", size, f"None or {least}..256")
        for name in ("averaging_expiration", "request_timeout", "allreduce_timeout", "declare_state_period"):
            value = getattr(self, f"{name}_s")
            _need(_number(value) and value > 0, name, value, "a number of seconds above 0")
        _need(self.silence_s >= 1, "silence_s", self.silence_s, "at least 1 second")
        _need(
            self.request_timeout_s < self.averaging_expiration_s,
            "request_timeout",
            self.request_timeout_s,
            f"less than averaging_expiration={self.averaging_expiration_s:g}",
        )
        alpha = self.averaging_alpha
        _need(_number(alpha) and 0 < alpha <= 1, "averaging_alpha", alpha, "above 0 and at most 1")
        part = self.part_size_bytes
        _need(
            isinstance(part, int) and MIN_PART_BYTES <= part <= MAX_PART_BYTES,
            "part_size_bytes",
            part,
            f"{MIN_PART_BYTES}..{MAX_PART_BYTES}",
        )
        width = self.bandwidth
        _need(width is None or (_number(width) and width >= 0), "bandwidth", width, "None, or bytes per second from 0")
        bits = self.group_bits
        _need(isinstance(bits, str) and not set(bits) - {"0", "1"}, "initial_group_bits", bits, "a text of 0 and 1")


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One round that succeeded.

    Attributes:
        gathered: what each member gave, in the group's order.
        outcome: group, contributors, verdict.
        round_id: names the round.
        duration_s: from the group to the verdict.
    """

    gathered: dict[PeerID, Any]
    outcome: Outcome
    round_id: bytes
    duration_s: float


class Averager:
    """Averages a list of tensors with other peers.

    Args:
        core: the peer that this averager is part of.
        tensors: changed in place by a successful round; all floating point.
        prefix: peers with the same prefix meet.
        settings: see there.
        lock: of the tensors.
        compression: codec for averaging.
        state: gives the state to share; default the averaged tensors. Called under the lock.
        codecs: one codec for each tensor, in place of `compression`.

    Attributes:
        group_tag: only peers with the same tag meet; empty or `@` and some text without dots.
        looking: whether a step looks for a group now, rather than averages.
        state_priority: donors with a higher one are asked first.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    def __init__(
        self,
        core: PeerCore,
        tensors: Sequence[torch.Tensor],
        prefix: str,
        settings: AveragerSettings,
        *,
        lock: TensorLock,
        compression: CompressionBase | None = None,
        codecs: Sequence[CompressionBase] | None = None,
        state: Callable[[], SharedState] | None = None,
    ) -> None:
        settings.check()
        if not isinstance(prefix, str) or not prefix or len(prefix) > 256:
            raise ConfigError(f"prefix must be a text of 1 to 256 characters, got {prefix!r}")
        self.core, self.prefix, self.settings, self.lock = core, prefix, settings, lock
        self.tensors = tuple(tensors)
        codec = compression or NoCompression()
        chosen = codecs or [
            codec.choose(CompressionInfo.from_tensor(tensor, key=i)) if isinstance(tensor, torch.Tensor) else codec
            for i, tensor in enumerate(self.tensors)
        ]
        layout = describe(self.tensors, chosen)
        self.vector = Vector(self.tensors, layout)
        self.state_priority = 0.0
        self.group_bits = settings.group_bits
        self.group_tag = ""
        self.looking = False
        self._state = state or (lambda: SharedState(metadata=None, tensors=self.tensors))
        self._version = 0
        self._schema = layout.schema
        self._closed = False
        self._stepping: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._donor: StateDonor | None = None
        endpoint = core.endpoint
        core.rounds()  # from now on: whoever hears of a group before we do may open its streams at once
        self._directory = DhtDirectory(core.node, endpoint, timeout_s=0.8 * settings.request_timeout_s)
        self._matchmaker = Matchmaker(
            endpoint,
            core.env,
            self._directory,
            prefix=prefix,
            schema=self._schema,
            settings=dict(settings.settings),
            compare_schema=self._compare_schema,
            plan=self._plan,
            target_group_size=settings.target_group_size,
            min_group_size=settings.min_group_size,
            window_s=settings.averaging_expiration_s,
            request_timeout_s=settings.request_timeout_s,
            client_mode=settings.client_mode,
        )

    def _compare_schema(self, theirs: bytes) -> str | None:
        try:
            return first_difference(self._schema, theirs)
        except msgspec.MsgspecError as error:
            return f"the other peer's schema cannot be read: {error}"

    def _plan(self, members: Sequence[Member]) -> tuple[list[int], int]:
        bandwidths = [member.bandwidth for member in members]
        slices = balance(self.vector.layout.numel, bandwidths, [member.reduces for member in members])
        return slices, self.settings.part_size_bytes

    # ---------------------------------------------------------------------------------------------------- averaging

    async def step(
        self,
        *,
        weight: float = 1.0,
        prepare: Callable[[], tuple[float, float]] | None = None,
        gather: object = None,
        timeout_s: float = 300.0,
        allow_retries: bool = True,
        expected: Callable[[], frozenset[PeerID] | None] | None = None,
        apply: Callable[[Vector], None] | None = None,
    ) -> StepResult:
        """Find a group and average once.

        Args:
            weight: of this peer's values, finite, 0 or more.
            prepare: called under the lock when the values are copied in; gives the weight, in place of `weight`, and a
                factor for the values.
            gather: a MessagePack value that all members get.
            timeout_s: longest time for everything, retries included.
            allow_retries: after a failed round look for another group.
            expected: the peers that the group should wait for; None starts by the usual rule.
            apply: called under the lock with the averages in place of moving the tensors to them.

        Raises:
            RoundFailed: no average; no tensor was touched.
            SchemaMismatch: only peers with other tensors or settings were met.
            ConfigError: `gather` or `weight` cannot be sent.
            ClosedError: the averager was closed, also while the step went on.
        """
        if self._closed:
            raise ClosedError("the averager was shut down")
        if self._stepping is not None:
            raise LocalError("step() is running already: wait for it, or make another averager")
        gathered = _pack(gather)
        _check_weight(weight)
        self._stepping = asyncio.current_task()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        backoff = Backoff(self.core.env.rng, first_s=0.05, max_s=2.0)
        try:
            while True:
                try:
                    return await self._try_once(prepare or (lambda: (weight, 1.0)), gathered, deadline, expected, apply)
                except SchemaMismatch as error:
                    self._aborted(error)
                    raise
                except RoundFailed as error:
                    self._aborted(error)
                    pause_s = backoff.next_s()
                    if not allow_retries or loop.time() + pause_s >= deadline:
                        raise
                    await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            if self._closed:
                raise ClosedError("the averager was shut down") from None
            raise
        finally:
            self._stepping = None

    def _aborted(self, error: RoundFailed) -> None:
        event = RoundAborted(prefix=self.prefix, round_id=None, reason=error.reason, peers=error.peers)
        self.core.env.events.emit(event)

    async def _try_once(
        self,
        prepare: Callable[[], tuple[float, float]],
        gathered: bytes,
        deadline: float,
        expected: Callable[[], frozenset[PeerID] | None] | None,
        apply: Callable[[Vector], None] | None,
    ) -> StepResult:
        loop, events = asyncio.get_running_loop(), self.core.env.events
        began = loop.time()
        group = await self._form_group(gathered, deadline - began, expected)
        formed = loop.time()
        peers = tuple(member.contact.peer for member in group.members)
        sent, received = self.core.endpoint.traffic
        outcome = await self._run_round(group, prepare, deadline, apply)
        now_sent, now_received = self.core.endpoint.traffic
        events.emit(
            RoundFinished(
                prefix=self.prefix,
                round_id=group.round_id,
                peers=peers,
                left_out=outcome.left_out,
                bytes_sent=now_sent - sent,
                bytes_received=now_received - received,
                duration_s=loop.time() - formed,
            )
        )
        return StepResult(
            gathered={member.contact.peer: self._unpack(member) for member in group.members},
            outcome=outcome,
            round_id=group.round_id,
            duration_s=loop.time() - formed,
        )

    async def _form_group(
        self, gathered: bytes, timeout_s: float, expected: Callable[[], frozenset[PeerID] | None] | None
    ) -> Group:
        self.looking = True
        try:
            return await self._matchmaker.form_group(
                group_key=f"{self.prefix}.0b{self.group_bits}{self.group_tag}",
                gathered=gathered,
                bandwidth=self.settings.bandwidth,
                window_s=self.settings.averaging_expiration_s,
                deadline_s=max(0.001, timeout_s),
                expected=expected,
            )
        finally:
            self.looking = False

    async def _run_round(
        self,
        group: Group,
        prepare: Callable[[], tuple[float, float]],
        deadline: float,
        apply: Callable[[Vector], None] | None,
    ) -> Outcome:
        try:
            round_ = await self._begin_round(group, prepare, deadline)
        except BaseException:
            group.release()
            raise
        orderly = False
        try:
            outcome = await round_.run()
            orderly = True
            await _to_the_end(self._apply(apply))
            return outcome
        finally:
            # Gives the group's streams back when nothing of the round reads them any more.
            self._closing = self._spawn(_finish(round_, group, orderly=orderly))

    async def _begin_round(self, group: Group, prepare: Callable[[], tuple[float, float]], deadline: float) -> Round:
        if self._closing is not None:
            await self._closing  # the last round may still be giving its averages to somebody
        settings = self.settings
        async with self.lock.held():
            mine, scale = prepare()
            bad = await self.core.env.executor.run(self.vector.copy_in, scale)
        if bad is not None and mine > 0:
            reason = "values that are not finite"
            event = LocalValuesRejected(prefix=self.prefix, tensor=bad, reason=reason)
            self.core.env.events.emit(event)
            mine = 0.0
        options = RoundOptions(
            min_group_size=settings.min_group_size,
            timeout_s=max(0.001, min(settings.allreduce_timeout_s, deadline - asyncio.get_running_loop().time())),
            silence_s=settings.silence_s,
        )
        try:
            return Round(self.core.rounds(), group, self.vector, weight=mine, options=options)
        except ConfigError as error:
            leader = group.members[group.decider].contact.peer
            raise RoundFailed(f"the group's plan does not fit: {error}", [leader]) from error

    async def _apply(self, apply: Callable[[Vector], None] | None) -> None:
        executor = self.core.env.executor
        async with self.lock.held():
            if apply is not None:
                await executor.run(apply, self.vector)
            else:
                await executor.run(self.vector.apply, self.settings.averaging_alpha)
            self.changed()

    def changed(self) -> None:
        """The tensors changed: the next donor snapshot is a new one."""
        self._version += 1

    def _unpack(self, member: Member) -> Any:
        try:
            return msgspec.msgpack.decode(member.gathered)
        except msgspec.MsgspecError as error:
            peer = member.contact.peer
            self.core.env.events.emit(PeerDropped(peer=peer, where="gather", reason=str(error)))
            return None

    # -------------------------------------------------------------------------------------------------------- state

    def share_state(self, *, enabled: bool) -> None:
        """Begin, or stop, to give this peer's state to whoever asks."""
        if enabled and self._donor is None and not self._closed:
            self._donor = StateDonor(
                self.core.endpoint,
                self.core.env,
                self.prefix,
                self._hold_state,
                self._state_version,
            )
            self._spawn(self._declare_loop(self._donor))
        elif not enabled and self._donor is not None:
            self._donor.stop()
            self._donor = None

    def _state_version(self) -> tuple[int, int, int]:
        fresh_s = self.settings.fresh_state_s
        age = 0 if fresh_s is None else int(asyncio.get_running_loop().time() / fresh_s)
        return self._version, self.lock.generation, age

    @property
    def shares_state(self) -> bool:
        """Whether others can download the state from here."""
        return self._donor is not None

    @asynccontextmanager
    async def _hold_state(self) -> AsyncIterator[SharedState]:
        async with self.lock.held():
            yield await self.core.env.executor.run(self._state)

    async def _declare_loop(self, donor: StateDonor) -> None:
        period_s = self.settings.declare_state_period_s
        while self._donor is donor:
            with suppress(ShoalError):
                await self.declare_state()
            await asyncio.sleep(period_s)

    async def declare_state(self) -> None:
        """Tell the DHT now that this peer shares its state, with the present `state_priority`."""
        if self._donor is None:
            return
        expiration = self.core.env.clock.time() + 2 * self.settings.declare_state_period_s
        await declare_donor(self.core.node, self.core.endpoint, self.prefix, self.state_priority, expiration)

    async def load_state(self, *, timeout_s: float, **options: Any) -> DownloadedState:
        """Download the state of one of the other peers; nothing is applied.

        Args:
            timeout_s: longest time, seconds.
            options: for `download_state`.

        Raises:
            StateUnavailable: there is no donor, or none gave it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        found = await find_donors(self.core.node, self.prefix, timeout_s=min(timeout_s, 10.0))
        if not found:
            raise StateUnavailable(f"no peer shares a state under {self.prefix!r}")
        donors = [Donor(contact, priority) for contact, priority in found]
        left_s = max(0.001, deadline - loop.time())
        return await download_state(self.core.endpoint, self.core.env, self.prefix, donors, timeout_s=left_s, **options)

    # ------------------------------------------------------------------------------------------------------ closing

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.core.env.events.emit(
                Warned(where=f"averager {self.prefix}", message=f"{type(error).__name__}: {error}")
            )

    async def close(self) -> None:
        """Stop: no more steps, no more sharing. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.share_state(enabled=False)
        # The round first: it still uses the streams of its group.
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait({self._stepping}, timeout=2.0)
        if self._closing is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await asyncio.gather(self._closing, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._matchmaker.close()


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for something that must not be left half done, also when the waiting is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _finish(round_: Round, group: Group, *, orderly: bool) -> None:
    try:
        await round_.close(orderly=orderly)
    finally:
        group.release()


def _pack(gather: object) -> bytes:
    try:
        packed = msgspec.msgpack.encode(gather)
    except (TypeError, msgspec.MsgspecError, OverflowError) as error:
        raise ConfigError(
            f"gather cannot be sent: {error} (use numbers, text, bytes, lists and dictionaries)"
        ) from error
    if len(packed) > 65536:
        raise ConfigError(f"gather takes {len(packed)} bytes, the most is 65536")
    return packed


def _check_weight(weight: object) -> None:
    if not _number(weight) or not math.isfinite(weight) or weight < 0:  # type: ignore[arg-type, operator]
        raise ConfigError(f"weight must be a finite number of at least 0, got {weight!r}")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _need(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {what}, got {value!r}")
