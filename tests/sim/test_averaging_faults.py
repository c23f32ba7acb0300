"""Random faults against whole averagers: who crashes, stalls, is slow, turns bad or is cut off, and when.

Every plan has a codec and participants by its number: 2 to 6, some that only dial, some that only reduce, of different
weights. Held in every plan: members that succeed in a round hold the same bits, and these are the weighted mean of
those whom the commit names, each counted once (`audit_kit`); a failed step leaves its tensors untouched; every step
ends within its limit, and its failure has a reason; when the faults are over, those who live form the next group and
average. A plan has a number, which a failure names: `pytest --plan NUMBER` plays it again alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch

from shoal import sim
from shoal.averaging import StepResult
from shoal.compression import CompressionBase
from shoal.errors import RoundFailed
from shoal.events import Event, GroupFormed
from shoal.sim import FaultPlan, Whims
from tests.codecs import CODECS
from tests.sim.audit_kit import Audit
from tests.sim.averaging_kit import SETTINGS
from tests.sim.fault_kit import (
    BANDWIDTH_BYTES_S,
    Participant,
    TimeLimits,
    can_average,
    corruptible_trial,
    hash_of,
    numbered_participants,
    standstill_s,
)
from tests.strategies import numbered_plan

HORIZON_S = 6.0
STEP_TIMEOUT_S = 20.0
LIMITS = TimeLimits(SETTINGS)


class Play:
    """One plan: its participants average again and again while it is played, then once more.

    Attributes:
        audit: of all averages.
    """

    def __init__(self, plan: FaultPlan, participants: Sequence[Participant], codec: CompressionBase) -> None:
        self.plan, self.participants = plan, {each.name: each for each in participants}
        self.trial = corruptible_trial(SETTINGS, compression=codec, heard=self.heard)
        self.loop, self.audit = asyncio.get_running_loop(), Audit()
        self.values = {
            name: [torch.zeros(12_000), torch.zeros(3, 5, dtype=torch.float64)] for name in self.participants
        }
        self.places = {name: place for place, name in enumerate(self.participants)}
        self.ramp = [torch.empty(tensor.numel(), dtype=tensor.dtype) for tensor in self.values["p0"]]
        self.held: dict[bytes, dict[str, str]] = defaultdict(dict)
        self.reasons: list[str] = []

    async def run(self) -> None:
        """Everything, in order."""
        trial = self.trial
        for name, each in self.participants.items():
            await trial.add(name, self.values[name], client_mode=each.client, auxiliary=each.auxiliary)
        workers = {name: trial.swarm.spawn(name, self.work(name)) for name in self.participants}
        await self.plan.play(trial.swarm)
        await asyncio.wait(list(workers.values()), timeout=120.0)
        for name, worker in workers.items():
            if worker.done() and not worker.cancelled() and worker.exception() is not None:
                raise worker.exception()  # type: ignore[misc]
            assert worker.done() or not trial.swarm.is_alive(name), f"{name} is left waiting"
        for round_id, results in self.held.items():
            assert len(set(results.values())) == 1, f"round {round_id.hex()} ended differently: {results}"
        assert all(self.reasons), "a round failed without a reason"
        await self.meet_again()
        assert not trial.warnings, trial.warnings
        await trial.close()

    def heard(self, name: str, event: Event) -> None:
        """A group is formed: write down what this member brings to it."""
        if isinstance(event, GroupFormed):
            self.audit.bring(event.round_id, self.trial.swarm.peer(name), self.participants[name].weight)

    async def work(self, name: str) -> None:
        """Average until the plan is over."""
        averager, values = self.trial.swarm.peer(name), self.values[name]
        limit_s = LIMITS.step_s(STEP_TIMEOUT_S) + standstill_s(self.plan, name)
        for attempt in range(40):
            began = self.loop.time()
            if began > HORIZON_S + 3:
                return
            for position, tensor in enumerate(values):
                torch.linspace(-1.0, self.places[name], tensor.numel(), out=self.ramp[position])
                tensor.copy_(self.ramp[position].view(tensor.shape)).add_(attempt / 8 + position)
            before = hash_of(values)
            try:
                result = await averager.step(
                    weight=self.participants[name].weight, timeout_s=STEP_TIMEOUT_S, allow_retries=False
                )
            except RoundFailed as error:
                assert hash_of(values) == before, f"{name} was touched by a round that failed"
                self.reasons.append(error.reason)
            else:
                self.succeeded(name, result, before)
            took_s = self.loop.time() - began
            assert took_s <= limit_s, f"{name}: a step took {took_s:.2f} s, the limit is {limit_s:.2f} s"
            await sim.sleep(0.3)  # rounds that nothing happens to teach nothing

    def succeeded(self, name: str, result: StepResult, before: str) -> None:
        """What this member holds now is the average, and everybody's; one that only reduces was left alone."""
        self.audit.check(self.trial.swarm.peer(name), result)
        after = hash_of(self.values[name])
        if self.participants[name].auxiliary:
            assert after == before, f"{name} only reduces, and was touched"
        else:
            self.held[result.round_id][name] = after

    async def meet_again(self) -> None:
        """Those who live average once more, without any fault or whim."""
        sim.calm()
        swarm = self.trial.swarm
        alive = [name for name in self.participants if swarm.is_alive(name) and name in swarm.peers]
        if not can_average([self.participants[name] for name in alive]):
            return
        for name in alive:
            self.values[name][0].fill_(float(self.places[name]))
        waiting = set(alive)

        async def rejoin(name: str) -> None:
            # A peer that succeeded goes on: the last one must not be left without anybody to average with.
            weight = self.participants[name].weight
            while waiting and self.loop.time() < HORIZON_S + 300:
                before = hash_of(self.values[name])
                try:
                    result = await self.trial.step(name, weight=weight, timeout_s=STEP_TIMEOUT_S, allow_retries=False)
                except RoundFailed:
                    continue
                self.succeeded(name, result, before)
                waiting.discard(name)

        await asyncio.gather(*(rejoin(name) for name in alive))
        assert not waiting, f"{sorted(waiting)} live, and find no group any more"


async def run(plan: FaultPlan, participants: Sequence[Participant], codec: CompressionBase) -> int:
    """On virtual time; returns how many averages were checked."""
    play = Play(plan, participants, codec)
    await play.run()
    return play.audit.checked


def play(number: int) -> int:
    """Play the plan of this number (odd ones have whims); returns how many averages were checked."""
    whims = Whims.drawn(random.Random(f"whims/{number}")) if number % 2 else None
    participants, codec = numbered_participants(number), CODECS[number % len(CODECS)]
    names = [each.name for each in participants]
    plan = numbered_plan(number, names, HORIZON_S, bandwidth_bytes_s=BANDWIDTH_BYTES_S)
    try:
        return sim.run(lambda: run(plan, participants, codec), seed=number, whims=whims)
    except BaseException as error:
        error.add_note(f"plan {number}: {plan}, {codec}, {participants}")
        error.add_note(f"again: python -m pytest -m long --plan {number} tests/sim/test_averaging_faults.py")
        raise


@pytest.mark.timeout(300)
def test_agreement_under_random_faults() -> None:
    """A sample of the plans of the long test."""
    for number in range(6):
        play(number)


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_agreement_under_many_random_faults(
    soak: Callable[[int, int], int], numbers: Callable[[int], Sequence[int]]
) -> None:
    """40 plans in every CI run, 10,000 in the full soak; `--shard I/N` plays every Nth of them."""
    played = numbers(soak(40, 10_000))
    for number in played:
        play(number)
    print(f"{len(played)} plans were played")
