"""Runs the demo: starts the peers, kills one, brings a new one, ends the run, and reports the result. Without torch.

The supervisor decides nothing itself. It tells the `DemoState` what it does and sees; `Director` decides the actions
from that; screen, JSON file and picture are made from it. So this module has only the parts that need processes,
signals and time:

- every wait has a deadline (`Limits`), and a child that misses it is killed;
- whatever happens, also an error in here, no child is left when `run_demo` returns;
- the first Ctrl+C (or SIGTERM) ends the run in order, the second at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from shoal.base.extras import install_command
from shoal.demo.children import Child, python_module
from shoal.demo.messages import BaselineConfig, Leave, PeerConfig, Report, Stop, encode
from shoal.demo.plan import Action, Director, GiveUp, Kill, Limits, SendHome, StartNewcomer, TellStop
from shoal.demo.result import make_record, verdict, write_record
from shoal.demo.screen import Display, open_display
from shoal.demo.settings import NAMES, SPEEDS, DemoOptions, Training
from shoal.demo.state import DemoState
from shoal.errors import ConfigError

__all__ = ["MeetingPoint", "Wiring", "run_demo"]

COMPLETED, INTERRUPTED = "completed", "interrupted"
_EXIT_INTERRUPTED = 130
_TICK_S, _SHOW_EVERY_S, _RECORD_EVERY_S = 0.05, 0.25, 0.5
_BASELINE = "baseline"


class MeetingPoint(NamedTuple):
    """A node of the network that trains nothing: the first peers find each other through it.

    Attributes:
        addresses: the addresses that peers take as `initial_peers`.
        close: leaves the network.
    """

    addresses: tuple[str, ...]
    close: Callable[[], object]


def open_meeting_point() -> MeetingPoint:
    """Start the node on this machine, at a free port."""
    from shoal.runtime.dht import DHT

    dht = DHT(start=True)
    return MeetingPoint(tuple(map(str, dht.get_visible_maddrs())), dht.shutdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The programs that the supervisor starts; tests put something lighter here.

    Attributes:
        peer: the command of a peer process, from its configuration as JSON.
        baseline: the command of the single process, likewise.
        meeting: opens the place where the first peers meet.
        limits: the deadlines.
        training: the settings that all processes share, except the seed, which the options give.
    """

    peer: Callable[[bytes], list[str]] = lambda config: python_module("shoal.demo.peer", config)
    baseline: Callable[[bytes], list[str]] = lambda config: python_module("shoal.demo.baseline", config)
    meeting: Callable[[], MeetingPoint] = open_meeting_point
    limits: Limits = field(default_factory=Limits)
    training: Training = field(default_factory=Training)


def run_demo(options: DemoOptions, wiring: Wiring | None = None) -> int:
    """Run the demo from start to end.

    Args:
        options: the user's options.
        wiring: for tests; None for the real thing.

    Returns:
        The exit code: 0 if all surviving peers ended with the same weights, the loss fell and no process is left; 130
        after Ctrl+C; else 1.

    Raises:
        ConfigError: the report cannot be drawn or written here; said before anything is started.
    """
    started_s = time.monotonic()
    _check_outputs(options)
    display = open_display(options)
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as scratch:
        logs = options.report / "logs" if options.report is not None else Path(scratch)
        supervisor = _Supervisor(options, wiring or Wiring(), display, logs, started_s)
        try:
            with _signals(supervisor.interrupt):
                asyncio.run(supervisor.run())
        except KeyboardInterrupt:
            supervisor.conclude(INTERRUPTED)
        finally:
            display.close(supervisor.state, supervisor.now_s())
    if supervisor.state.exit_reason == INTERRUPTED:
        return _EXIT_INTERRUPTED
    return 0 if supervisor.state.exit_reason == COMPLETED else 1


def _check_outputs(options: DemoOptions) -> None:
    if options.report is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(f"the picture needs matplotlib: {install_command('demo')}, or give --no-report")
        try:
            (options.report / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"report={options.report}: cannot make this directory: {error}") from error
    if options.json is not None:
        parent = options.json.absolute().parent
        if not parent.is_dir() or not os.access(parent, os.W_OK) or options.json.is_dir():
            raise ConfigError(f"json={options.json}: no file can be written there")


@contextlib.contextmanager
def _signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """First Ctrl+C or SIGTERM: `interrupt`; second: KeyboardInterrupt. Outside the main thread: as they were."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        interrupt()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Supervisor:
    """One run of the demo. `state` is all that is known of it."""

    def __init__(self, options: DemoOptions, wiring: Wiring, display: Display, logs: Path, started_s: float) -> None:
        self._options, self._wiring, self._display, self._logs = options, wiring, display, logs
        self._started_s = started_s
        self._training = msgspec.structs.replace(wiring.training, seed=options.seed)
        self._director = Director(options, wiring.limits)
        self._run_id = f"demo-{random.SystemRandom().randbytes(3).hex()}"
        self._children: dict[str, Child] = {}
        self._meeting: MeetingPoint | None = None
        self._interrupted = False
        self._shown_s = self._recorded_s = -1e9
        self.state = DemoState(seconds=options.seconds)
        self._refresh()

    def now_s(self) -> float:
        """Seconds since the start of the demo."""
        return time.monotonic() - self._started_s

    def interrupt(self) -> None:
        """End the run in order, as after Ctrl+C. Callable from a signal handler."""
        self._interrupted = True

    def conclude(self, reason: str) -> None:
        """Write down how the run ended."""
        self.state.over(reason)
        self._refresh(at_once=True)

    async def run(self) -> None:
        """The whole run; afterwards `state.exit_reason` says how it went."""
        try:
            reason = await self._acts()
        finally:
            await self._clear_away()
        left = [child.name for child in self._children.values() if child.returncode is None]
        if left and not reason:
            reason = f"processes are left: {', '.join(left)}"
        if not reason:
            reason = self._draw()
        self.conclude(reason or COMPLETED)

    async def _acts(self) -> str:
        """Swarm, then goodbye, then baseline; returns the failure, empty if there was none."""
        reason = await self._meet()
        if reason:
            return reason
        for index in range(self._options.peers):
            await self._start_peer(index)
        reason = await self._train()
        await self._send_home()
        reason = reason or verdict(self.state)
        return reason or await self._compare()

    # ----------------------------------------------------------------------------------------------------- the swarm

    async def _meet(self) -> str:
        try:
            async with asyncio.timeout(self._wiring.limits.start_s):
                self._meeting = await asyncio.to_thread(self._wiring.meeting)
        except TimeoutError:
            return "the network could not be started in time"
        return INTERRUPTED if self._interrupted else ""

    async def _start_peer(self, index: int, *, newcomer: bool = False) -> None:
        every = 2 * self._options.peers
        lost = [turn for turn, peer in enumerate(self.state.peers.values()) if peer.lost]
        known = [address for peer in self.state.living for address in peer.addresses]
        config = PeerConfig(
            name=NAMES[index],
            run_id=self._run_id,
            initial_peers=(*(self._meeting.addresses if self._meeting else ()), *known),
            speed=SPEEDS[index % len(SPEEDS)],
            stream_seed=1000 * self._options.seed + index + 1,
            judge_turn=2 * (lost[0] if newcomer and lost else index) % every,
            judge_every=every,
            training=self._training,
        )
        child = await self._start_child(config.name, self._wiring.peer(encode(config)), self._on_peer_end)
        self.state.started(child.name, child.pid, self.now_s(), newcomer=newcomer)
        self._refresh(at_once=True)

    async def _train(self) -> str:
        """Run until all living peers stand at the last epoch. Returns the failure, empty if there was none."""
        while not self._interrupted:
            for action in self._director.actions(self.state, self.now_s()):
                if isinstance(action, SendHome):
                    return ""
                if isinstance(action, GiveUp):
                    return action.reason
                await self._act(action)
            await self._pause()
        return INTERRUPTED

    async def _act(self, action: Action) -> None:
        match action:
            case Kill(name):
                # Noted before the kill: all later reports of the others are reactions to it.
                self.state.killing(name, self.now_s())
                self._children[name].kill()
            case StartNewcomer():
                await self._start_peer(self._options.peers, newcomer=True)
            case TellStop(epoch):
                self.state.stop_announced(epoch, self.now_s())
                # All are told, because a single peer may die before it has passed the news on.
                for peer in self.state.living:
                    self._children[peer.name].tell(Stop(epoch=epoch))
        self._refresh(at_once=True)

    async def _send_home(self) -> None:
        self.state.leaving(self.now_s())
        self._refresh(at_once=True)
        children = [self._children[peer.name] for peer in self.state.living]
        for peer, child in zip(self.state.living, children, strict=True):
            if peer.peer_id:
                child.tell(Leave())
            else:
                child.kill()  # it is still loading torch, and has met nobody
        deadline_s = self.now_s() + self._wiring.limits.leave_s
        while any(child.returncode is None for child in children) and self.now_s() < deadline_s:
            await self._pause()
        for child in children:
            child.kill()
            await child.gone(self._wiring.limits.leave_s)

    # -------------------------------------------------------------------------------------------------- the baseline

    async def _compare(self) -> str:
        limits = self._wiring.limits
        self.state.baseline_began(self.now_s())
        config = BaselineConfig(
            epoch_samples=self.state.epoch_samples,
            limit_s=limits.baseline_s,
            stream_seed=1000 * self._options.seed,
            training=self._training,
        )
        child = await self._start_child(_BASELINE, self._wiring.baseline(encode(config)), self._on_baseline_end)
        deadline_s = self.now_s() + limits.baseline_s + limits.baseline_start_s
        while self.state.baseline_complete is None and self.now_s() < deadline_s and not self._interrupted:
            await self._pause()
        child.kill()
        await child.gone(limits.leave_s)
        if self._interrupted:
            return INTERRUPTED
        return "" if child.returncode == 0 else f"the single process failed: {child.last_words() or child.returncode}"

    # ------------------------------------------------------------------------------------------------------- helpers

    async def _start_child(self, name: str, command: list[str], on_end: Callable[[str, int, str], None]) -> Child:
        log = self._logs / f"{name}.log"
        child = await Child.start(name, command, log=log, on_report=self._on_report, on_end=on_end)
        self._children[name] = child
        return child

    def _on_report(self, name: str, report: Report) -> None:
        self.state.said(name, report, self.now_s())

    def _on_peer_end(self, name: str, returncode: int, detail: str) -> None:
        self.state.ended(name, returncode, detail, self.now_s())

    def _on_baseline_end(self, _name: str, returncode: int, _detail: str) -> None:
        last = self.state.baseline[-1].samples if self.state.baseline else 0
        self.state.baseline_complete = returncode == 0 and last >= self.state.samples

    async def _pause(self) -> None:
        """Wait a moment; then bring screen and file up to date."""
        await asyncio.sleep(_TICK_S)
        self._refresh()

    def _refresh(self, *, at_once: bool = False) -> None:
        now_s = self.now_s()
        if at_once or now_s - self._shown_s >= _SHOW_EVERY_S:
            self._shown_s = now_s
            self._display.show(self.state, now_s)
        if self._options.json is not None and (at_once or now_s - self._recorded_s >= _RECORD_EVERY_S):
            self._recorded_s = now_s
            write_record(self._options.json, make_record(self.state, self._options, now_s))

    async def _clear_away(self) -> None:
        """End all children and the meeting point, in every case."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            await child.gone(self._wiring.limits.leave_s)
        if self._meeting is not None:
            meeting, self._meeting = self._meeting, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wiring.limits.leave_s):
                    await asyncio.to_thread(meeting.close)

    def _draw(self) -> str:
        if self._options.report is None:
            return ""
        from shoal.demo.report import draw_report

        try:
            draw_report(self.state, self._options.report / "report.png")
        except OSError as error:
            return f"the picture could not be written: {error}"
        return ""
