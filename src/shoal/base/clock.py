"""Time, chance and threads as arguments, so that a whole swarm can run on virtual time from one seed.

Code above the sans-IO parts is async and waits through the running asyncio loop (`asyncio.timeout`, `call_later`),
whose time the simulator replaces. This module has the things that the loop does not give: the wall clock for the
expirations of records, the random source, and the executor for tensor work. `Env` carries all of them, and the event
bus, to every part.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Hashable
from concurrent.futures import Executor as ConcurrentExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from shoal.events import EventBus

__all__ = [
    "AT_ONCE_BYTES",
    "LONGEST_TURN_S",
    "Backoff",
    "Clock",
    "Elapsed",
    "Env",
    "Executor",
    "InlineExecutor",
    "SharedClock",
    "SystemClock",
    "ThreadExecutor",
    "get_dht_time",
    "own_clock",
    "seconds_text",
    "shielded",
]

AT_ONCE_BYTES = 8 << 10
"""So many bytes of others are worked on in a turn of the loop: Python may take a microsecond for each."""

LONGEST_TURN_S = 0.5
"""A turn of the loop counts as no longer than this, on every clock that limits use. After a longer turn the process was
stopped (SIGSTOP, a laptop's lid) or kept busy. It could not hear others meanwhile, so neither their silence nor a
deadline counts that time."""

P = ParamSpec("P")
T = TypeVar("T")


class Clock(Protocol):
    """Reads the time; never waits."""

    def time(self) -> float:
        """Wall-clock time in seconds since the epoch: for expirations that other peers read."""

    def monotonic(self) -> float:
        """Seconds that never go back: for deadlines and durations within this process."""


class SystemClock:
    """The clock of the machine."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class Elapsed:
    """Counts seconds, also those for which the machine sleeps. Where the wall clock is set back, it goes on.

    Args:
        clock: of this machine.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = own_clock(clock)
        self._last = self._clock.time(), self._clock.monotonic(), 0.0

    def time(self) -> float:
        """The seconds since it was made. Any thread may ask."""
        wall, steady, seconds = self._last
        now = self._clock.time(), self._clock.monotonic()
        seconds += max(0.0, now[0] - wall, now[1] - steady)
        self._last = *now, seconds  # at once: of two threads that ask, neither counts what the other one has counted
        return seconds


class SharedClock:
    """The wall clock that the peers of a network have in common: each corrects its own clock by those of the others.

    A peer that joins a network takes over its time. Later it follows the median of its own time and the times that the
    `VOTERS` longest connected hosts tell, if that median is more than `TOLERANCE_S` away. A host has one vote, the
    median of its peers, however many keys they have. If they differ, and among them are peers whose word counts
    (`rpc.trust`), only these vote: hosts are cheap. Otherwise a few hosts that lie change nothing, and new hosts do not
    count beside older ones. Of an even number of times the lower middle one counts, so that two peers that differ
    agree. A time that is more than `FURTHEST_S` away from our own, as it would be if nobody had set it, is ignored.

    A machine's clock may be set while we run. If it is set back, the network's time goes on here as if nothing had
    happened: nobody else need hear of it. If it jumps forward, it was set, or the machine has slept, and what others
    told before says nothing any more. They are asked anew. What more than half of their hosts tell decides which of the
    two it was; a host that does not know the time, or does not answer, has no vote. Until then nobody is judged by this
    clock, and others are not told its time.

    Args:
        own: the clock of this machine.
        settled: whether the network's time is known. A peer that begins a network knows it; a peer that joins one does
            not, and tells others so.

    Attributes:
        ahead_s: how far the network's time is ahead of our own.
        jumps: how many times the machine's clock has jumped: times that were read before are not comparable with it.
    """

    TOLERANCE_S = 1.0
    FURTHEST_S = 50 * 3600.0
    VOTERS = 16

    def __init__(self, own: Clock, *, settled: bool) -> None:
        self.own, self.settled, self.jumps = own, settled, 0
        self.ahead_s = self._set_s = 0.0
        self._never_set_s = 0.0  # how far our own clock would be ahead of what it shows, had nobody set it
        self._gap_s = own.time() - own.monotonic()
        # What their peers tell, the longest connected host first; None: it told once, and does not now.
        self._hosts: dict[str, dict[Hashable, float | None]] = {}
        self._host_of: dict[Hashable, str] = {}
        self._forward_s, self._awaited = 0.0, set[Hashable]()  # a jump that nobody has explained; who still may
        self._trusted: Callable[[], Collection[Hashable]] = tuple

    def time(self) -> float:
        own_s, before_s = self.own.time(), self._gap_s
        self._gap_s = own_s - self.own.monotonic()
        if abs(by_s := self._gap_s - before_s) > self.TOLERANCE_S:
            self._jumped(by_s)
        return own_s + self.ahead_s

    def known_time(self) -> float | None:
        """The network's time, for others; None while this peer does not know it."""
        now = self.time()
        return now if self.settled and not self.in_doubt else None

    def _jumped(self, by_s: float) -> None:
        self.jumps += 1
        if by_s < 0:
            self._was_set(by_s)
        elif self._host_of or self._forward_s:
            self._forward_s += by_s
            self._awaited.update(self._host_of)
        for told in self._hosts.values():
            for peer, ahead_s in told.items():
                told[peer] = ahead_s - by_s if ahead_s is not None and by_s < 0 else None

    def _was_set(self, by_s: float) -> None:
        self._set_s += by_s
        self.ahead_s -= by_s
        self._never_set_s -= by_s

    def take_set_s(self) -> float:
        """How far the machine's clock was set forward since the last call, seconds; below 0 if it was set back."""
        self.time()
        taken, self._set_s = self._set_s, 0.0
        return taken

    @property
    def in_doubt(self) -> bool:
        """Whether the machine's clock has jumped forward, and it is not known whether the machine has slept."""
        return bool(self._awaited)

    def monotonic(self) -> float:
        return self.own.monotonic()

    def heed(self, trusted: Callable[[], Collection[Hashable]]) -> None:
        """Where times differ, let only the peers vote that this returns, if it returns any that have told a time."""
        self._trusted = trusted

    def told(self, peer: Hashable, host: str, ahead_s: float) -> bool:
        """Take in how far a peer finds the network's time ahead of our own clock; True if our time changes by that.

        Args:
            peer: the peer.
            host: where it is: peers of one host have one vote.
            ahead_s: seconds.
        """
        self.time()
        if self._host_of.get(peer, host) != host:
            self.forget(peer)
        self._host_of[peer] = host
        self._hosts.setdefault(host, {})[peer] = ahead_s
        self._answered(peer)
        votes = self.told_s(plausible=True)
        if self.in_doubt or not votes or not self._is_plausible(ahead_s):
            return False
        if self.settled:
            votes.append(self.ahead_s)
        self.settled = True
        median_s = _middle(votes)
        if abs(median_s - self.ahead_s) <= self.TOLERANCE_S:
            return False
        self.ahead_s = median_s
        return True

    def abstained(self, peer: Hashable) -> None:
        """A peer has answered that it does not know the time: it has no vote until it tells one."""
        if (host := self._host_of.get(peer)) is not None:
            self._hosts[host][peer] = None
        self._answered(peer)

    def wait_no_more(self) -> None:
        """End a doubt without those that have not answered."""
        self._awaited.clear()
        self._explain()

    def _answered(self, peer: Hashable) -> None:
        self._awaited.discard(peer)
        self._explain()

    def _explain(self) -> None:
        """If our clock has jumped forward: it was set, or the machine has slept, once the votes decide which."""
        if not self._forward_s:
            return
        votes = self._votes(self._is_plausible)
        told = [vote for vote in votes.values() if vote is not None]
        were_set = sum(vote < self.ahead_s - self._forward_s / 2 for vote in told)
        was_set = 2 * were_set > len(votes)
        if was_set or 2 * (len(told) - were_set) > len(votes) or (told and len(told) == len(votes)):
            by_s, self._forward_s = self._forward_s, 0.0
            self._awaited.clear()
            if was_set:
                self._was_set(by_s)

    def _is_plausible(self, ahead_s: float) -> bool:
        expected_s = (self._never_set_s, self._never_set_s - self._forward_s)
        return any(abs(ahead_s - each) <= self.FURTHEST_S for each in expected_s)

    def _votes(self, counts: Callable[[float], bool]) -> dict[str, float | None]:
        """What the hosts tell that vote, of the times that count; None for a host that is waited for after a jump."""
        votes = self._of_hosts(counts, self._host_of)
        if any(vote is None or abs(vote - self.ahead_s) > self.TOLERANCE_S for vote in votes.values()):
            votes = self._of_hosts(counts, frozenset(self._trusted())) or votes
        return votes

    def _of_hosts(self, counts: Callable[[float], bool], peers: Collection[Hashable]) -> dict[str, float | None]:
        votes = dict[str, float | None]()
        for host, told in self._hosts.items():
            among = {peer: ahead_s for peer, ahead_s in told.items() if peer in peers}
            heard = [ahead_s for ahead_s in among.values() if ahead_s is not None and counts(ahead_s)]
            if heard or not self._awaited.isdisjoint(among):
                votes[host] = _middle(heard) if heard else None
            if len(votes) == self.VOTERS:
                break
        return votes

    def told_s(self, *, but: Hashable = None, plausible: bool = False) -> list[float]:
        """How far each host that votes finds the network's time ahead of our own clock.

        Args:
            but: leave out the host of this peer.
            plausible: leave out times that are never followed.
        """
        votes = self._votes(self._is_plausible if plausible else lambda _: True)
        left_out = self._host_of.get(but)
        return [vote for host, vote in votes.items() if vote is not None and host != left_out]

    def offset_s(self, peer: Hashable) -> float | None:
        """How far this peer finds the network's time ahead of our own clock; None if it does not tell (any more)."""
        return self._hosts[host][peer] if (host := self._host_of.get(peer)) is not None else None

    def forget(self, peer: Hashable) -> None:
        """Forget the time of a peer that is no longer connected."""
        if (host := self._host_of.pop(peer, None)) is not None:
            del self._hosts[host][peer]
            if not self._hosts[host]:
                del self._hosts[host]
        self._answered(peer)


def _middle(values: Collection[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def own_clock(clock: Clock) -> Clock:
    """The clock of this machine, which the program reads too."""
    return clock.own if isinstance(clock, SharedClock) else clock


def get_dht_time() -> float:
    """The wall-clock time, seconds: the unit of expirations of DHT records and of scheduled times."""
    return time.time()


def seconds_text(seconds: float) -> str:
    """A number of seconds for a message, with two places at most: what is left of a timeout is 2.99999."""
    return f"{round(seconds, 2):g} s"


class Executor(Protocol):
    """Runs functions that compute (encode, decode, reduce, hash) away from the loop."""

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` and return what it returns, or raise what it raises."""


class InlineExecutor:
    """Runs the function at once in the loop: for simulation, where everything must follow from the seed."""

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)


class ThreadExecutor:
    """Runs functions in a thread pool that another module (`runtime`) starts and stops."""

    def __init__(self, pool: ConcurrentExecutor) -> None:
        self._pool = pool

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))


async def shielded(work: Awaitable[T]) -> T:
    """Wait for work that must not be left half done. A cancellation takes effect only when the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # else asyncio complains that nobody asked for it
        raise


@dataclass(frozen=True, slots=True)
class Env:
    """The surroundings of a part of shoal, handed in so that tests can hand in something else.

    Attributes:
        clock: reads the time.
        rng: the only source of chance. Not used for keys and nonces of real peers.
        executor: runs tensor work.
        events: the bus to which the part emits its events.
        low_latency: makes a block in which the program's own threads do not keep the loop's thread waiting.
    """

    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.Random)
    executor: Executor = field(default_factory=InlineExecutor)
    events: EventBus = field(default_factory=EventBus)
    low_latency: Callable[[], AbstractContextManager[None]] = nullcontext

    async def read(self, nbytes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that reads so many bytes of others: at once if they are few, else in the executor."""
        if nbytes <= AT_ONCE_BYTES:
            return function(*args, **kwargs)
        return await self.executor.run(function, *args, **kwargs)


class Backoff:
    """Jittered pauses between tries, each twice as long as the one before.

    Args:
        rng: source of the jitter.
        first_s: the first pause, seconds.
        max_s: no pause is longer, seconds.
    """

    def __init__(self, rng: random.Random, *, first_s: float = 0.1, max_s: float = 5.0) -> None:
        self._rng, self._first_s, self._max_s = rng, first_s, max_s
        self._next_s = first_s

    def next_s(self) -> float:
        """The length of the next pause in seconds: between half of the current step and all of it."""
        pause_s = self._next_s * (0.5 + 0.5 * self._rng.random())
        self._next_s = min(self._max_s, 2 * self._next_s)
        return pause_s

    def reset(self) -> None:
        """Start again from `first_s`, after a success."""
        self._next_s = self._first_s
