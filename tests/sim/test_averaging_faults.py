"""Random faults against whole averagers: who crashes, stalls, is slow or cut off, and when, is drawn by hypothesis.

Held in every plan: members that succeed in a round hold the same bits; a failed step leaves its tensors untouched; when
the faults are over, those who live form the next group and average.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal import sim
from shoal.compression import view_bytes
from shoal.errors import RoundFailed
from shoal.sim import FaultPlan
from tests.sim.averaging_kit import Trial
from tests.strategies import fault_plans

NAMES = ("p0", "p1", "p2", "p3")
HORIZON_S = 6.0


def _hash(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(view_bytes(tensor))
    return digest.hexdigest()


async def play(plan: FaultPlan) -> None:
    """Average again and again while the plan is played, then once more."""
    trial = Trial(bandwidth_bytes_s=400_000)
    loop = asyncio.get_running_loop()
    values = {name: [torch.zeros(12_000), torch.zeros(3, 5, dtype=torch.float64)] for name in NAMES}
    for name in NAMES:
        await trial.add(name, values[name])
    held: dict[bytes, dict[str, str]] = defaultdict(dict)

    async def work(name: str) -> None:
        averager = trial.swarm.peer(name)
        for attempt in range(40):
            if loop.time() > HORIZON_S + 3:
                return
            for position, tensor in enumerate(values[name]):
                tensor.fill_(NAMES.index(name) + attempt / 8 + position)
            before = _hash(values[name])
            try:
                result = await averager.step(weight=1.0 + NAMES.index(name), timeout_s=20.0, allow_retries=False)
            except RoundFailed:
                assert _hash(values[name]) == before, f"{name} was touched by a round that failed"
            else:
                held[result.round_id][name] = _hash(values[name])
            await sim.sleep(0.3)  # rounds that nothing happens to teach nothing

    workers = {name: trial.swarm.spawn(name, work(name)) for name in NAMES}
    await plan.play(trial.swarm)
    await asyncio.wait(list(workers.values()), timeout=120.0)
    for name, worker in workers.items():
        if worker.done() and not worker.cancelled() and worker.exception() is not None:
            raise worker.exception()  # type: ignore[misc]
        assert worker.done() or not trial.swarm.is_alive(name), f"{name} is left waiting"
    for round_id, results in held.items():
        assert len(set(results.values())) == 1, f"round {round_id.hex()} ended differently: {results}"
    alive = [name for name in NAMES if trial.swarm.is_alive(name) and name in trial.swarm.peers]
    if len(alive) >= 2:
        for name in alive:
            values[name][0].fill_(float(NAMES.index(name)))
        waiting = set(alive)

        async def rejoin(name: str) -> None:
            # Whoever succeeded goes on: the last one must not be left without anybody to average with.
            while waiting and loop.time() < HORIZON_S + 300:
                try:
                    await trial.step(name, timeout_s=20.0, allow_retries=False)
                except RoundFailed:
                    continue
                waiting.discard(name)

        await asyncio.gather(*(rejoin(name) for name in alive))
        assert not waiting, f"{sorted(waiting)} live, and find no group any more"
    assert not trial.warnings, trial.warnings
    await trial.close()


PLANS = fault_plans(NAMES, HORIZON_S)
# A plan takes long enough that shrinking one would take minutes; a plan is short enough to be read as it is.
PHASES = (Phase.explicit, Phase.generate)


@pytest.mark.timeout(300)
@settings(max_examples=25, phases=PHASES)
@given(plan=PLANS, seed=st.integers(0, 2**16))
def test_agreement_under_random_faults(plan: FaultPlan, seed: int) -> None:
    """A sample of the plans of the long test."""
    sim.run(lambda: play(plan), seed=seed)


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_agreement_under_many_random_faults(soak: Callable[[int, int], int]) -> None:
    """500 plans in every CI run, many more in the full soak."""

    @settings(max_examples=soak(500, 20_000), phases=PHASES, derandomize=False, database=None)
    @given(plan=PLANS, seed=st.integers(0, 2**16))
    def many(plan: FaultPlan, seed: int) -> None:
        sim.run(lambda: play(plan), seed=seed)

    many()
