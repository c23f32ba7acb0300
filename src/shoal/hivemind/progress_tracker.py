"""`ProgressTracker`: how far the peers of a run are with their next step, for loops that take their own steps."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import msgspec

from shoal.averaging import AveragerSettings
from shoal.averaging.core import PeerCore
from shoal.base.checks import flag, whole
from shoal.base.clock import get_dht_time, own_clock
from shoal.base.peer import PeerID, check_run_id
from shoal.base.tasks import Changes, Tasks
from shoal.errors import ClosedError, ConfigError, LocalError
from shoal.events import Warned
from shoal.hivemind.arguments import TrackerOptions, check_tracker_options
from shoal.protocol.wire import MAX_EPOCH, MAX_SAMPLES, Progress
from shoal.run.gossip import ProgressGossip
from shoal.run.settings import RunSettings
from shoal.run.view.contribution import RateMeter
from shoal.run.view.progress import SwarmProgress, SwarmView
from shoal.runtime.arguments import client_argument
from shoal.runtime.dht import DHT
from shoal.runtime.thread import GRACE_S
from shoal.strategies.synchronous import Synchronous

__all__ = ["GlobalTrainingProgress", "LocalTrainingProgress", "PerformanceEMA", "ProgressTracker", "Tracked"]

_OTHERS_S = 3.0
"""At the start: to learn where the others are."""


@dataclass
class GlobalTrainingProgress:
    """The progress of all peers.

    Attributes:
        epoch: the highest epoch of a peer that others can dial, or of this one.
        samples_accumulated: by all peers at that epoch.
        target_batch_size: samples of all peers in one epoch.
        num_peers: peers, this one included.
        num_clients: those of them that only dial.
        eta_next_epoch: when there will be enough samples, as `shoal.get_dht_time()`; infinite if no speed is known.
    """

    epoch: int
    samples_accumulated: int
    target_batch_size: int
    num_peers: int
    num_clients: int
    eta_next_epoch: float


@dataclass(frozen=True)
class LocalTrainingProgress:
    """The progress of this peer: its epoch, the samples that it has accumulated since, and its speed."""

    peer_id: PeerID
    epoch: int
    samples_accumulated: int
    samples_per_second: float
    time: float
    client_mode: bool


class PerformanceEMA(NamedTuple):
    """The speed of this peer, smoothed over the last seconds."""

    samples_per_second: float


class Tracked(ABC):
    """The questions to the progress of a run that follow from where all peers are, and this one."""

    @property
    @abstractmethod
    def global_progress(self) -> GlobalTrainingProgress:
        """The progress of all peers."""

    @property
    @abstractmethod
    def local_progress(self) -> LocalTrainingProgress:
        """The progress of this peer."""

    @property
    @abstractmethod
    def own_epoch(self) -> int:
        """The epoch of this peer."""

    @property
    def performance_ema(self) -> PerformanceEMA:
        """The speed of `local_progress`, under hivemind's name."""
        return PerformanceEMA(self.local_progress.samples_per_second)

    @property
    def global_epoch(self) -> int:
        """The epoch of `global_progress`."""
        return self.global_progress.epoch

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether there are enough samples for the next epoch, or others are at a later one than this peer."""
        progress = self.global_progress
        return progress.epoch > self.own_epoch or progress.samples_accumulated >= progress.target_batch_size

    @property
    def estimated_next_update_time(self) -> float:
        """When this peer should increment its epoch, as `shoal.get_dht_time()`."""
        return get_dht_time() if self.ready_to_update_epoch else self.global_progress.eta_next_epoch


class _Place(NamedTuple):
    epoch: int
    samples: int


class _Tracking:
    """The part of a tracker that runs in the loop. Any thread may set `place` and call `speed.count`."""

    def __init__(self, core: PeerCore, settings: RunSettings, target_batch_size: int) -> None:
        self.core, self.settings, self.target = core, settings, target_batch_size
        self.place, self.speed, self.paused_s = _Place(0, 0), RateMeter(), 0.0
        self.known = SwarmProgress(core.peer_id, settings.fingerprint, ttl_s=settings.ttl_s)
        self.news, self._tasks = Changes(), Tasks(self._fail)
        self.gossip = ProgressGossip(core, settings, self.known, self.news, next_word=self._next_word)
        self._told_at, self.left, self.pause_began = -math.inf, False, 0.0

    async def start(self) -> None:
        for work in (*self.gossip.start(), self._drive):
            self._tasks.spawn(work())
        with suppress(TimeoutError):
            async with asyncio.timeout(_OTHERS_S):
                await self.gossip.looked.wait()

    async def close(self) -> None:
        if not self.left:
            self.left = True
            await self._tasks.cancel()
            await self.gossip.leave()
            await self.gossip.close()

    def _fail(self, error: BaseException) -> None:
        self.core.env.events.emit(Warned(where="progress", message=f"{type(error).__name__}: {error}"))

    def word(self) -> Progress:
        (epoch, samples), contact = self.place, self.core.endpoint.contact
        if self.settings.averager.client_mode:
            contact = msgspec.structs.replace(contact, addresses=())
        return Progress(
            contact=contact,
            epoch=epoch,
            digest=hashlib.sha256(f"epoch {epoch}".encode()).digest(),
            branch_samples=0,
            done=samples,
            rate=self.speed.rate,
            time=self._told_at,
            settings=dict(self.settings.fingerprint),
            left=self.left,
        )

    def _next_word(self) -> Progress:
        self._told_at = max(math.nextafter(self._told_at, math.inf), own_clock(self.core.env.clock).time())
        return self.word()

    def look(self) -> SwarmView:
        """The swarm as it is known here now."""
        now = asyncio.get_running_loop().time()
        self.known.expire(now)
        view = self.known.view(self.word(), now)
        self.gossip.saw(enough=view.done >= self.target, target=self.target, rate=view.rate)
        return view

    def epoch_changed(self) -> None:
        """Tell it at once."""
        self.gossip.announce_state(self.look(), expected=True)
        self.news.notify()

    async def _drive(self) -> None:
        while True:
            seen = self.news.count
            self.speed.measure((self.pause_began or time.monotonic()) - self.paused_s)
            self.gossip.tell(self.look())
            await self.news.after(seen, 1.0)


class ProgressTracker(Tracked):
    """Keeps track of the epochs and the samples of all peers that give the same `prefix`, and tells them of its own.

    Report your samples after each batch. When `ready_to_update_epoch`, take the step together with the others (a
    `GradientAverager`, for example) within `pause_updates()`, and call `update_epoch` there. Peers tell each other
    directly and through the DHT; what `global_progress` says is up to date. The names are those of hivemind 1.1.12.

    Args:
        dht: this peer, started.
        prefix: names the run.
        target_batch_size: samples of all peers in one epoch; the same on all.
        client_mode: this peer only dials; None takes it from `dht`.
        start: begin now; else at `start()`.
        options: arguments of hivemind that change nothing here, such as `min_refresh_period`.

    Raises:
        ConfigError: an argument is wrong; or all other peers have another `target_batch_size`.
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        target_batch_size: int,
        *,
        client_mode: bool | None = None,
        start: bool,
        **options: Unpack[TrackerOptions],
    ) -> None:
        check_tracker_options(options)
        if not isinstance(dht, DHT):
            raise ConfigError(f"dht must be a shoal.DHT, got {type(dht).__name__}")
        check_run_id(prefix)
        self.dht, self.prefix = dht, prefix
        self.target_batch_size = whole("target_batch_size", target_batch_size)
        self.client_mode = client_argument(client_mode, only_dials=dht.only_dials, is_client=dht.client_mode)
        self._tracking: _Tracking | None = None
        self._snapshot: GlobalTrainingProgress | None = None  # while updates are paused
        self._end: Callable[[], object] = lambda: None
        if flag("start", start):
            self.start()

    def start(self) -> None:
        """Begin, once. Returns when it is known where the others are, within 3 s."""
        if self._tracking is not None:
            raise LocalError("this tracker was started already, and is started only once: make another one")
        core = self.dht.core()
        settings = RunSettings(
            run_id=self.prefix,
            strategy=Synchronous(self.target_batch_size),
            averager=AveragerSettings(client_mode=self.client_mode),
            fingerprint={"target_batch_size": str(self.target_batch_size)},
        )

        async def begin() -> _Tracking:
            tracking = _Tracking(core, settings, self.target_batch_size)
            await tracking.start()
            return tracking

        tracking = self._tracking = self.dht.loop_thread.run(begin(), _OTHERS_S + GRACE_S)
        forget_closer, thread = self.dht.at_shutdown(lambda *_: tracking.close()), self.dht.loop_thread

        async def close() -> None:
            await tracking.close()
            forget_closer()  # until now the end of the DHT waits for it

        def end() -> None:
            with suppress(ClosedError):
                thread.submit(close())

        self._end = weakref.finalize(self, end)
        self._end.atexit = False  # the DHT sees to that
        try:
            self._now()
        except ConfigError:
            self.shutdown()
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        """Tell the others that this peer takes part no more. Safe to call twice.

        Args:
            timeout: kept for compatibility: it takes a second at most.
        """
        if self._tracking is not None and self.dht.is_alive():
            self.dht.loop_thread.run(self._tracking.close(), GRACE_S)
        self._end()

    # ------------------------------------------------------------------------------------------------------- progress

    def _core(self) -> _Tracking:
        if self._tracking is None:
            raise LocalError("this tracker was not started: pass start=True or call start()")
        return self._tracking

    def _now(self) -> GlobalTrainingProgress:
        tracking = self._core()

        async def look() -> tuple[SwarmView, list[Progress]]:
            view = tracking.look()
            return view, [*view.others.values()]  # the loop goes on to change what it has seen

        (view, others), mine = self.dht.loop_thread.run(look(), GRACE_S), self.local_progress
        if not others and (mismatch := tracking.known.mismatch) is not None:
            if not mismatch.startswith("target_batch_size "):  # the one setting that trackers have
                mismatch += (
                    ". That is a run of shoal.Optimizer, in which a tracker takes no part: look at it with "
                    f"shoal.read_run(dht, {self.prefix!r}), or with `tracker` and `status()` of a peer's own optimizer"
                )
            raise ConfigError(f"the other peers of {self.prefix!r} differ: {mismatch}")
        epoch = max(mine.epoch, view.epoch)
        samples = sum(each.done for each in others if each.epoch == epoch)
        samples += mine.samples_accumulated if mine.epoch == epoch else 0
        missing = max(0, self.target_batch_size - samples)
        rate = mine.samples_per_second + sum(max(0.0, each.rate) for each in others)
        return GlobalTrainingProgress(
            epoch=epoch,
            samples_accumulated=samples,
            target_batch_size=self.target_batch_size,
            num_peers=len(view.peers),
            num_clients=self.client_mode + sum(not each.contact.addresses for each in others),
            eta_next_epoch=get_dht_time() + (missing / rate if rate > 0 else math.inf if missing else 0.0),
        )

    @property
    def global_progress(self) -> GlobalTrainingProgress:
        """The progress of all peers: now, or as it was when updates were paused.

        Raises:
            ConfigError: all other peers have another `target_batch_size`.
            ClosedError: the DHT was shut down.
        """
        return self._now() if self._snapshot is None else self._snapshot

    @property
    def local_progress(self) -> LocalTrainingProgress:
        """The progress of this peer, as it was reported."""
        tracking = self._core()
        (epoch, samples), rate = tracking.place, tracking.speed.rate
        return LocalTrainingProgress(self.dht.peer_id, epoch, samples, rate, get_dht_time(), self.client_mode)

    @property
    def own_epoch(self) -> int:
        """The epoch that this peer has reported."""
        return self._core().place.epoch

    def report_local_progress(
        self,
        local_epoch: int,
        samples_accumulated: int,
        update_global_samples: bool = True,  # noqa: FBT002
    ) -> None:
        """Say where this peer is; the others are told.

        Args:
            local_epoch: its epoch.
            samples_accumulated: since that epoch began.
            update_global_samples: kept for compatibility: `global_progress` always counts them.
        """
        tracking, before = self._core(), self._core().place
        place = _Place(
            whole("local_epoch", local_epoch, least=0, most=MAX_EPOCH),
            whole("samples_accumulated", samples_accumulated, least=0, most=MAX_SAMPLES),
        )
        if (extra := place.samples - (before.samples if place.epoch == before.epoch else 0)) > 0:
            tracking.speed.count(extra)
        tracking.place = place
        changed = place.epoch != before.epoch
        self.dht.loop_thread.call_soon(tracking.epoch_changed if changed else tracking.news.notify)

    @contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Within this block `global_progress` stays as it is, and the time does not count for this peer's speed."""
        tracking, self._snapshot = self._core(), self.global_progress
        tracking.pause_began = time.monotonic()
        try:
            yield
        finally:
            self._snapshot = None
            tracking.paused_s += time.monotonic() - tracking.pause_began
            tracking.pause_began = 0.0

    def update_epoch(self, new_epoch: int | None = None) -> int:
        """Go on to an epoch, with no samples, and tell the others. Call it within `pause_updates()`.

        Args:
            new_epoch: None: the next one.

        Returns:
            The new epoch.

        Raises:
            LocalError: updates are not paused.
        """
        if self._snapshot is None:
            raise LocalError("update_epoch() is called within `with tracker.pause_updates():` only")
        epoch = self._core().place.epoch + 1 if new_epoch is None else new_epoch
        self.report_local_progress(epoch, 0)
        if epoch > self._snapshot.epoch:
            self._snapshot.epoch, self._snapshot.samples_accumulated = epoch, 0
            self._snapshot.eta_next_epoch = math.inf
        return epoch

    def is_alive(self) -> bool:
        """Whether it was started, and not shut down."""
        return self._tracking is not None and not self._tracking.left and self.dht.is_alive()
