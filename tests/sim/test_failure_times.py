"""One fault in one round of known length: whoever is left knows the outcome within the limits of `TimeLimits`.

The victim is drawn (coordinator or not), and what happens to it, and how far the round is. With it: the others agree,
or are untouched; and a victim that comes back in time learns the average too.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.errors import PeerUnreachable, RoundFailed
from shoal.events import Event, GroupFormed
from shoal.protocol.wire import Reduce
from shoal.rpc import Endpoint, Stream
from shoal.sim import Crash, Fault, FaultPlan, Slow, SlowLink, Stall, Throttle, Vanish
from shoal.sim.loop import world_time
from tests.corruption import KINDS, Corrupt
from tests.sim.averaging_kit import SETTINGS
from tests.sim.fault_kit import BANDWIDTH_BYTES_S, TimeLimits, corruptible_trial, hash_of

SIZES = (4, 3, 5)
NUMEL = 100_000
LONG_S = 60.0
PERIOD_S = 1.0
SETTINGS = msgspec.structs.replace(SETTINGS, part_size_bytes=16_384)
LIMITS = TimeLimits(SETTINGS)
KINDS_OF_FAULTS = ("crash", "vanish", "stall", "throttle", "slow", "slow link", *KINDS)


class OneRound:
    """So many members average once; from the moment at which the group is formed, `fault` is played.

    Attributes:
        formed_s: when the group was formed, virtual time.
        ended_s: when each member knew.
        reasons: why, of those that failed.
        hashes: what each member held that succeeded.
    """

    def __init__(self, size: int) -> None:
        self.names = tuple(f"p{place}" for place in range(size))
        self.loop = asyncio.get_running_loop()
        self.trial = corruptible_trial(SETTINGS)
        self.values = {name: [torch.full((NUMEL,), float(place))] for place, name in enumerate(self.names)}
        self.formed = asyncio.Event()
        self.formed_s = 0.0
        self.order: list[str] = []
        self.ended_s: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.hashes: dict[str, str] = {}
        self.touched: list[str] = []

    async def run(self, faults: Callable[[list[str]], Sequence[Fault]]) -> None:
        """Play it; `faults` is told the members, the coordinator first."""
        swarm = self.trial.swarm
        for name in self.names:
            await self.trial.add(name, self.values[name])
            swarm.host(name).env.events.subscribe(self.heard)
        workers = {name: swarm.spawn(name, self.member(name)) for name in self.names}
        await self.formed.wait()
        playing = asyncio.ensure_future(FaultPlan(tuple(faults(self.order))).play(swarm))
        await asyncio.wait(list(workers.values()), timeout=2 * LONG_S)
        await playing
        await asyncio.wait(list(workers.values()), timeout=LONG_S)
        for worker in workers.values():
            if worker.done() and not worker.cancelled():
                worker.result()
        assert not self.touched
        assert len(set(self.hashes.values())) <= 1, self.hashes
        assert not self.trial.warnings, self.trial.warnings
        await self.trial.close()

    def heard(self, event: Event) -> None:
        """The group is there; the first to know of it says so."""
        if isinstance(event, GroupFormed) and len(event.peers) == len(self.names) and not self.formed.is_set():
            self.formed_s = self.loop.time()
            by_id = {self.trial.swarm.host(name).peer_id: name for name in self.names}
            coordinator = by_id[event.coordinator]
            self.order = [coordinator, *(name for name in self.names if name != coordinator)]
            self.formed.set()

    async def member(self, name: str) -> None:
        """One step."""
        before = hash_of(self.values[name])
        try:
            await self.trial.swarm.peer(name).step(timeout_s=LONG_S, allow_retries=False)
        except RoundFailed as error:
            self.reasons[name] = error.reason
            if hash_of(self.values[name]) != before:
                self.touched.append(name)
        else:
            self.hashes[name] = hash_of(self.values[name])
        self.ended_s[name] = world_time(self.loop)  # the own clock of one that stood still is late


def fault_of(kind: str, victim: str, others: Sequence[str], at_s: float, rng: random.Random) -> Fault:
    """What happens to the victim."""
    if kind == "crash":
        return Crash(at_s=at_s, host=victim)
    if kind == "vanish":
        return Vanish(at_s=at_s, host=victim)
    if kind == "stall":
        return Stall(at_s=at_s, host=victim, duration_s=rng.choice((3.0, 20.0)))
    if kind == "throttle":
        return Throttle(at_s=at_s, host=victim, duration_s=20.0, period_s=PERIOD_S)
    if kind == "slow":
        return Slow(at_s=at_s, host=victim, factor=100.0, duration_s=20.0)
    if kind == "slow link":
        pair = (victim, rng.choice(others))
        narrow = BANDWIDTH_BYTES_S / 100
        return SlowLink(at_s=at_s, between=pair, factor=100.0, bandwidth_bytes_s=narrow, duration_s=20.0)
    return Corrupt(at_s=at_s, host=victim, kind=kind, duration_s=20.0)


@functools.cache
def normal_s(size: int) -> float:
    """How long the round takes when nothing happens."""

    async def play() -> float:
        one = OneRound(size)
        await one.run(lambda order: ())
        assert not one.reasons
        return max(one.ended_s.values()) - one.formed_s

    return sim.run(play)


def limit_of(kind: str, usual_s: float, *, decides: bool) -> float:
    """From the fault to the outcome at everybody else."""
    if kind == "crash":
        return LIMITS.after_kill_s(usual_s)
    if kind not in ("throttle", "slow", "slow link"):
        return LIMITS.after_silence_s(usual_s)
    limit_s = LIMITS.after_slowing_s(usual_s)
    if kind == "throttle":
        # It is not slow on the line, but late: by a period with each message that the others wait for (its values, its
        # averages, its report).
        return limit_s + 3 * PERIOD_S
    return limit_s + (LIMITS.words_s(BANDWIDTH_BYTES_S / 100) if decides else 0.0)


def check(number: int) -> str:
    """Play the case of this number; returns how it went, in a line."""
    rng = random.Random(f"time/{number}")
    kind = KINDS_OF_FAULTS[number % len(KINDS_OF_FAULTS)]
    size = SIZES[number // len(KINDS_OF_FAULTS) % len(SIZES)]
    usual_s = normal_s(size)
    decides, at_s = rng.random() < 0.4, round(rng.uniform(0, 1.05 * usual_s), 3)

    async def play() -> str:
        one, chosen = OneRound(size), []

        def faults(order: list[str]) -> list[Fault]:
            victim = order[0] if decides else rng.choice(order[1:])
            chosen.append(fault_of(kind, victim, [name for name in order if name != victim], at_s, rng))
            return chosen

        await one.run(faults)
        [event] = chosen
        victim = event.hosts[0]
        survivors = [name for name in one.names if name not in event.hosts]
        limit_s = limit_of(kind, usual_s, decides=decides)
        waits_s = {name: one.ended_s[name] - one.formed_s - at_s for name in survivors if name in one.ended_s}
        what = f"{number}: {event}, {'coordinator' if decides else 'member'} of {size}"
        assert set(waits_s) == set(survivors), f"{what}: somebody is left waiting"
        longest_s = max(waits_s.values())
        assert longest_s <= limit_s, f"{what}: known after {longest_s:.2f} s, the limit is {limit_s:.2f}; {one.reasons}"
        assert all(one.reasons.values())
        back = one.formed_s + event.end_s + 1.0 < max(one.ended_s[name] for name in survivors)
        if back and kind == "stall" and any(name in one.hashes for name in survivors):
            assert victim in one.hashes, f"{what}: came back in time, and did not learn the average: {one.reasons}"
        return f"{what}: {longest_s:.2f} s; succeeded {len(one.hashes)}, failed {one.reasons}"

    try:
        return sim.run(play, seed=number)
    except BaseException as error:
        error.add_note(f"again: python -m pytest -m long --plan {number} tests/sim/test_failure_times.py")
        raise


def test_one_fault_is_known_in_time() -> None:
    """Every kind of fault once, in groups of all sizes; below is each kind in a group of each size, and more."""
    kinds = len(KINDS_OF_FAULTS)
    for kind in range(kinds):
        check(kind + kinds * (kind % len(SIZES)))


def woken_s(seed: int, at_s: float) -> float:
    """One of five stands still for ten seconds, another one for ever: how long the first one still needs then."""

    async def play() -> float:
        one = OneRound(5)
        await one.run(
            lambda order: (Stall(at_s=at_s, host=order[1], duration_s=10.0), Vanish(at_s=at_s, host=order[2]))
        )
        return one.ended_s[one.order[1]] - one.formed_s - at_s - 10.0

    return sim.run(play, seed=seed)


def test_a_member_that_wakes_asks_a_silent_one_for_averages_until_a_dial_to_it_fails() -> None:
    """It does not: it asks the next member a second later."""
    usual_s = normal_s(5)
    assert max(woken_s(seed, share * usual_s) for seed in (1, 2) for share in (0.6, 0.7)) <= 4.0


def test_a_connection_that_died_since_the_last_round_keeps_the_others_for_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not: its member makes another one. After a cut of 10 s its reducer waited for the values in vain."""
    usual_s, opened, broken = normal_s(4), Endpoint.open, list[object]()

    async def open_(self: Endpoint, to: Any, opening: Any, *, timeout_s: float) -> Stream[Any, Any]:
        if isinstance(opening, Reduce) and not broken:
            broken.append(opening)
            raise PeerUnreachable("closed by the other side", self.peer_id)
        return await opened(self, to, opening, timeout_s=timeout_s)

    monkeypatch.setattr(Endpoint, "open", open_)

    async def play() -> float:
        one = OneRound(4)
        await one.run(lambda order: ())
        assert not one.reasons
        assert all((values[0] == 1.5).all() for values in one.values.values())
        return max(one.ended_s.values()) - one.formed_s

    assert sim.run(play) <= usual_s + 0.5
    assert broken


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_one_fault_is_known_in_time_wherever_it_strikes(
    soak: Callable[[int, int], int], numbers: Callable[[int], Sequence[int]]
) -> None:
    """The same, many times."""
    for number in numbers(soak(40, 5_000)):
        print(check(number))
