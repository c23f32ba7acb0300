"""A program that is interrupted again and again, at random microseconds, by real signals; says what came of it.

Run as `python -m tests.integration.interrupts COUNT SEED`. The main thread trains and averages with a companion in
another thread, and is interrupted `COUNT` times: by Ctrl+C, and by an alarm whose handler raises an exception of its
own. Every `LOOK_EVERY` signals it must get on without them. Prints one JSON line.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

import shoal
from shoal.errors import RoundFailed, StateUnavailable
from shoal.events import EpochAdvanced, Event
from tests.integration.scripts import digest

LOOK_EVERY = 50
BATCH, TARGET = 4, 16
LIMIT_S = 60.0


class Alarmed(Exception):
    """As a handler of SIGALRM raises it."""


class TooLongError(BaseException):
    """The program did not get on in time without any signal."""


def alarmed(_number: int, _frame: object) -> None:
    """A program's own time limit."""
    raise Alarmed


class Peer:
    """One that trains a small model and averages a few numbers.

    Attributes:
        states: what the parameters and Adam's statistics were, by the name of the state, after each step of the swarm.
        taken: how many of them were taken here.
    """

    def __init__(self, name: str, initial_peers: list[str]) -> None:
        self.name, self.initial_peers = name, initial_peers
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.inner = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.states: dict[bytes, str] = {}
        self.taken = 0
        self.tensor = torch.zeros(64)
        self.join()

    def join(self) -> None:
        """Enter the network, and make optimizer and averager."""
        self.dht = shoal.DHT(self.initial_peers, start=True)
        self.make()
        self.dht.events.subscribe(self._note)

    def make(self) -> None:
        """Make optimizer and averager, as at the start of the program."""
        self.swarm = shoal.Optimizer(
            dht=self.dht, run_id="run", target_batch_size=TARGET, batch_size_per_step=BATCH, optimizer=self.inner
        )
        self.averager = shoal.DecentralizedAverager([self.tensor], self.dht, start=True, prefix="numbers")

    def _note(self, event: Event) -> None:
        if isinstance(event, EpochAdvanced):
            self.taken += 1
            kept = [self.inner.state.get(parameter, {}) for parameter in self.model.parameters()]
            statistics = [each[name] for each in kept for name in sorted(each)]
            self.states[event.digest] = digest([*self.model.parameters(), *statistics])

    def step(self) -> None:
        """One batch."""
        self.model(torch.randn(BATCH, 8)).square().mean().backward()
        self.swarm.step()
        self.swarm.zero_grad()

    def average(self) -> None:
        """One round of the averager; it may find nobody."""
        with suppress(RoundFailed):
            self.averager.step(timeout=3.0)

    def load(self) -> None:
        """Download if somebody is better."""
        with suppress(StateUnavailable):
            self.swarm.load_state_from_peers(timeout=10.0)

    def hold(self) -> None:
        """Have the tensors for a moment."""
        with self.averager.get_tensors() as tensors:
            tensors[0].add_(0.0)

    def leave_and_return(self) -> None:
        """Shut averager and optimizer down, and make others. Interrupted, it is done again."""
        self.averager.shutdown()
        self.swarm.shutdown()

    def leave_the_network(self) -> None:
        """Shut the DHT down, with all that stands on it."""
        self.dht.shutdown()

    def close(self) -> None:
        """The end of the program, or what is done again after an interrupted shutdown of the DHT."""
        self.averager.shutdown()
        self.swarm.shutdown()
        self.dht.shutdown()


def accompany(peer: Peer, over: threading.Event, errors: list[str]) -> None:
    """Train and average until it is over."""
    pause = threading.Event()

    def average() -> None:
        while not over.is_set():
            peer.average()

    averaging = threading.Thread(target=average)
    averaging.start()
    try:
        while not over.is_set():
            peer.step()
            pause.wait(0.02)
    except Exception:  # noqa: BLE001 (the main thread tells it)
        errors.append(traceback.format_exc())
    averaging.join()


class Interrupter:
    """Sends one signal within a call, at a random microsecond of what such calls take.

    Attributes:
        counts: signals that came in the middle of each kind of call.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._usual_s: dict[str, float] = {}
        self.sent = 0
        self.counts: collections.Counter[str] = collections.Counter()

    def during(self, name: str, call: Callable[[], object]) -> None:
        """Make the call, and interrupt it."""
        usual_s = self._usual_s.get(name, 0.01)
        delay_s = max(1e-6, self._rng.uniform(0.0, 1.3 * usual_s))
        handler: Any = self._rng.choice((signal.default_int_handler, alarmed))
        began = time.monotonic()
        interrupted = False
        try:
            signal.signal(signal.SIGALRM, handler)
            self.sent += 1
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            call()
            self._usual_s[name] = 0.9 * usual_s + 0.1 * (time.monotonic() - began)
            for _ in range(1000):  # it comes, unless in a weak reference's callback, where Python drops what is raised
                select.select([], [], [], 0.001)
        except (KeyboardInterrupt, Alarmed) as error:
            interrupted = any("shoal" in str(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
            self.kept = error  # as a notebook keeps the last one, with all its frames
        if interrupted:
            self.counts[name] += 1


@contextmanager
def limited(what: str) -> Iterator[None]:
    """No signals but the one that says that it took too long."""

    def late(_number: int, _frame: object) -> None:
        faulthandler.dump_traceback()
        raise TooLongError(what)

    signal.signal(signal.SIGALRM, late)
    signal.alarm(int(LIMIT_S))
    try:
        yield
    finally:
        signal.alarm(0)


def look(peer: Peer) -> None:
    """Without signals it must get on: two epochs, a round, the tensors."""
    with limited("training"):
        taken = peer.taken
        while peer.taken < taken + 2:
            peer.step()
        assert peer.swarm.local_epoch == peer.swarm._training.epoch, "an epoch was counted without its step"
        assert peer.swarm._lock.holder == "", "the lock is kept"
    with limited("averaging"):
        while True:
            try:
                peer.averager.step(timeout=LIMIT_S)
                break
            except RoundFailed:
                continue
    with limited("holding"):
        peer.hold()
    assert peer.averager._locked.lock.holder in ("", "shoal itself"), "the averager's lock is kept"


def main(count: int, seed: int) -> None:
    """Interrupt so often."""
    faulthandler.enable()
    rng = random.Random(seed)
    companion = Peer("companion", [])
    me = Peer("me", [str(companion.dht.invite())])
    over, errors = threading.Event(), list[str]()
    thread = threading.Thread(target=accompany, args=(companion, over, errors), daemon=True)
    thread.start()
    look(me)
    interrupter, calls = Interrupter(rng), [("step", me.step)] * 10
    calls += [("average", me.average), ("load", me.load), ("hold", me.hold), ("leave", me.leave_and_return)]
    calls += [("network", me.leave_the_network)]
    looks, slowest_s = 0, 0.0
    while interrupter.sent < count and not errors:
        name, call = rng.choice(calls)
        interrupter.during(name, call)
        if name == "leave":
            with limited("shutdown"):
                me.leave_and_return()
                me.make()
        elif name == "network":
            with limited("shutdown of the DHT"):
                me.close()
                left = f"shoal-{me.dht.peer_id.short()}"
                assert not [each.name for each in threading.enumerate() if each.name.startswith(left)], "a thread stays"
                me.join()
        if interrupter.sent // LOOK_EVERY > looks:
            looks = interrupter.sent // LOOK_EVERY
            began = time.monotonic()
            look(me)
            slowest_s = max(slowest_s, time.monotonic() - began)
            print(f"{interrupter.sent} signals, epoch {me.swarm.local_epoch}", file=sys.stderr, flush=True)
    if not errors:
        look(me)
    over.set()
    with limited("the companion's end"):
        thread.join()
    common = me.states.keys() & companion.states.keys()
    with limited("the end"):
        for peer in (me, companion):
            peer.close()
    print(
        json.dumps(
            {
                "sent": interrupter.sent,
                "interrupted": dict(interrupter.counts),
                "epochs": len(me.states),
                "common": len(common),
                "unequal": len([each for each in common if me.states[each] != companion.states[each]]),
                "errors": errors,
                "slowest_look_s": slowest_s,
                "threads": sorted(each.name for each in threading.enumerate() if each.name.startswith("shoal")),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
