"""Steps that are steered while they go on: scheduled, triggered, reweighted, cancelled; and group bits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.averaging import AveragingStage, DhtDirectory, StepRequest
from shoal.errors import ClosedError, LocalError, RoundFailed
from shoal.events import Event, GroupFormed, PeerDropped, RoundFinished, Warned
from shoal.protocol.wire import Join, JoinAccepted
from tests.sim.averaging_kit import SETTINGS, Trial, same_bits


async def _pair(trial: Trial) -> list[list[torch.Tensor]]:
    values = [[torch.zeros(3)], [torch.full((3,), 4.0)]]
    for peer in range(2):
        await trial.add(f"p{peer}", values[peer], target_group_size=2)
    return values


def _now() -> float:
    return asyncio.get_running_loop().time()


def _wall(trial: Trial, name: str) -> float:
    return trial.swarm.peer(name).core.env.clock.time()


def test_a_scheduled_step_waits_for_its_time() -> None:
    """No search for a group before it, and none of the timeout is lost."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        requests = [StepRequest(scheduled_time=_wall(trial, f"p{peer}") + 30.0) for peer in range(2)]
        began = _now()
        steps = [asyncio.ensure_future(trial.step(f"p{peer}", request=requests[peer])) for peer in range(2)]
        await sim.sleep(29.0)
        assert [request.stage for request in requests] == [AveragingStage.IDLE] * 2
        await asyncio.gather(*steps)
        assert 30.0 <= _now() - began < 31.0
        assert [request.stage for request in requests] == [AveragingStage.FINISHED] * 2
        assert values[0][0].tolist() == values[1][0].tolist() == [2.0] * 3
        await trial.close()

    sim.run(main, seed=1)


def test_a_schedule_can_be_moved() -> None:
    """Earlier, while the step waits: it begins then."""

    async def main() -> None:
        trial = Trial()
        await _pair(trial)
        requests = [StepRequest(scheduled_time=_wall(trial, f"p{peer}") + 200.0) for peer in range(2)]
        began = _now()
        steps = [asyncio.ensure_future(trial.step(f"p{peer}", request=requests[peer])) for peer in range(2)]
        await sim.sleep(1.0)
        for peer, request in enumerate(requests):
            request.scheduled_time = _wall(trial, f"p{peer}") + 5.0
            request.changed()
        await asyncio.gather(*steps)
        assert 6.0 <= _now() - began < 7.0
        await trial.close()

    sim.run(main, seed=2)


@pytest.mark.parametrize("stage", [AveragingStage.LOOKING_FOR_GROUP, AveragingStage.AWAITING_TRIGGER])
def test_a_schedule_is_set_while_something_else_is_waited_for(stage: AveragingStage) -> None:
    """While a group is looked for the search is given up: whoever looks meanwhile does not meet this peer."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        request = StepRequest(triggered=stage is not AveragingStage.AWAITING_TRIGGER)
        step, began = asyncio.ensure_future(trial.step("p0", request=request, timeout_s=100.0)), _now()
        await sim.sleep(1.0)
        assert request.stage is stage
        request.scheduled_time = _wall(trial, "p0") + 30.0
        request.changed()
        request.allow_allreduce()
        other = asyncio.ensure_future(trial.step("p1", timeout_s=100.0))
        await sim.sleep(29.0)
        assert request.stage is AveragingStage.IDLE
        await asyncio.gather(step, other)
        assert 31.0 <= _now() - began < 32.5
        assert values[0][0].tolist() == values[1][0].tolist() == [2.0] * 3
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=12)


def test_a_schedule_that_does_not_postpone_leaves_the_search_alone() -> None:
    """Set to None or to a time that is over: the same search finds its group, and is not begun anew."""

    async def main() -> None:
        trial = Trial()
        await _pair(trial)
        request = StepRequest()
        waited: list[float] = []
        trial.swarm.host("p0").env.events.subscribe(
            lambda event: waited.append(event.waited_s) if isinstance(event, GroupFormed) else None
        )
        step = asyncio.ensure_future(trial.step("p0", request=request))
        for scheduled_time in (None, _wall(trial, "p0")):
            await sim.sleep(1.0)
            request.scheduled_time = scheduled_time
            request.changed()
        await asyncio.gather(step, trial.step("p1"))
        assert waited[0] > 2.0
        await trial.close()

    sim.run(main, seed=13)


def test_what_is_set_counts_or_is_refused() -> None:
    """A schedule until there is a group, also in its last moment; a weight until the values are taken."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        request, late = StepRequest(), list[StepRequest]()

        def hear(event: Event) -> None:
            if isinstance(event, GroupFormed) and not late:
                late.append(request)  # there is a group, and the step does not know it yet
                request.scheduled_time = _wall(trial, "p0") + 10.0
                asyncio.get_running_loop().call_soon(request.changed)

        trial.swarm.host("p0").env.events.subscribe(hear)
        first = asyncio.ensure_future(trial.step("p1", timeout_s=60.0))
        step, began = asyncio.ensure_future(trial.step("p0", request=request, timeout_s=60.0)), _now()
        while not request.grouped:
            await sim.sleep(0.001)
        assert _now() - began > 10.0
        if not request.began:
            request.weight = 3.0
        with pytest.raises(LocalError, match="scheduled_time cannot be changed any more: this step has a group"):
            request.scheduled_time = None
        while not request.began:
            await sim.sleep(0.001)
        with pytest.raises(LocalError, match="weight cannot be changed any more: the values of this step were taken"):
            request.weight = 2.0
        await asyncio.gather(step, first)
        assert values[0][0].tolist() == values[1][0].tolist()
        await trial.close()

    sim.run(main, seed=14)


def test_a_schedule_after_the_timeout_fails_with_the_reason() -> None:
    """Also when it was moved there."""

    async def main() -> None:
        trial = Trial()
        await _pair(trial)
        request = StepRequest(scheduled_time=_wall(trial, "p0") + 200.0)
        with pytest.raises(RoundFailed, match="scheduled_time lies after its timeout"):
            await trial.step("p0", request=request, timeout_s=10.0)
        await trial.close()

    sim.run(main, seed=3)


def test_a_step_waits_for_its_trigger() -> None:
    """Values and weight are those of the moment it was allowed."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        request = StepRequest(triggered=False)
        steps = [
            asyncio.ensure_future(trial.step("p0", request=request)),
            asyncio.ensure_future(trial.step("p1", weight=1.0)),
        ]
        while request.stage is not AveragingStage.AWAITING_TRIGGER:
            await sim.sleep(0.1)
        assert not request.began
        values[0][0].fill_(8.0)
        request.weight = 3.0
        request.allow_allreduce()
        results = await asyncio.gather(*steps)
        assert request.began
        assert results[0].outcome.weight == 4.0
        assert values[0][0].tolist() == values[1][0].tolist() == [7.0] * 3
        await trial.close()

    sim.run(main, seed=4)


def test_a_trigger_that_comes_late_holds_nobody_up() -> None:
    """Two peers average without the third, which joins them in the next round."""

    async def main() -> None:
        trial = Trial()
        values = [[torch.full((3,), float(peer))] for peer in range(3)]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer])
        request = StepRequest(triggered=False)
        late = asyncio.ensure_future(trial.step("p0", request=request, timeout_s=100.0))
        began = _now()
        await asyncio.gather(trial.step("p1"), trial.step("p2"))
        assert _now() - began < 1.0
        assert values[1][0].tolist() == values[2][0].tolist() == [1.5] * 3
        request.allow_allreduce()
        await asyncio.gather(late, trial.step("p1"), trial.step("p2"))
        assert same_bits(values)
        assert values[0][0].tolist() == [1.0] * 3
        await trial.close()

    sim.run(main, seed=5)


def test_a_trigger_that_never_comes_fails_at_the_timeout() -> None:
    """With the reason, and untouched."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        other = asyncio.ensure_future(trial.step("p1", timeout_s=20.0))
        with pytest.raises(RoundFailed, match=r"allow_allreduce\(\) was not called"):
            await trial.step("p0", request=StepRequest(triggered=False), timeout_s=20.0)
        assert values[0][0].tolist() == [0.0] * 3
        await asyncio.gather(other, return_exceptions=True)
        await trial.close()

    sim.run(main, seed=6)


@pytest.mark.parametrize(
    "stage", [AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP, AveragingStage.AWAITING_TRIGGER]
)
def test_a_step_can_be_given_up_in_every_stage(stage: AveragingStage) -> None:
    """Nothing is touched, and the next step works."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        averager = trial.swarm.peer("p0")
        scheduled = _wall(trial, "p0") + 100.0 if stage is AveragingStage.IDLE else None
        request = StepRequest(scheduled_time=scheduled, triggered=stage is not AveragingStage.AWAITING_TRIGGER)
        step = trial.swarm.spawn("p0", averager.step(request))
        waiting = [asyncio.ensure_future(trial.step("p1"))] if stage is AveragingStage.AWAITING_TRIGGER else []
        await sim.sleep(0.01)
        while request.stage is not stage:
            await sim.sleep(0.01)
        step.cancel()
        await asyncio.wait([step])
        assert request.stage is AveragingStage.FINISHED
        assert values[0][0].tolist() == [0.0] * 3
        waiting = waiting or [asyncio.ensure_future(trial.step("p1"))]
        await asyncio.gather(trial.step("p0"), *waiting)
        assert values[0][0].tolist() == values[1][0].tolist() == [2.0] * 3
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=7)


def test_a_step_waits_for_the_end_of_one_that_was_given_up() -> None:
    """A round takes a moment to end in order: the next step is not refused meanwhile."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        averager, request = trial.swarm.peer("p0"), StepRequest()
        step = trial.swarm.spawn("p0", averager.step(request))
        other = asyncio.ensure_future(trial.step("p1"))
        while request.stage is not AveragingStage.RUNNING_ALLREDUCE:
            await sim.sleep(0.001)
        with pytest.raises(LocalError, match="running already"):
            await trial.step("p0")
        step.cancel()
        await asyncio.gather(other, trial.step("p0"))
        assert values[0][0].tolist() == values[1][0].tolist() == [2.0] * 3
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=9)


@pytest.mark.parametrize("bad", [b"\x91" * 60_000 + b"\xc0", b"\xa1\xff", b"\xc1"], ids=["nested", "text", "code"])
def test_what_a_peer_gathers_and_nobody_can_read_costs_its_value_only(bad: bytes) -> None:
    """The average was applied when it is looked at: the step succeeds, an event names the peer."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        request = StepRequest()
        request.gathered = bad
        steps = (trial.step("p0", request=request), trial.step("p1", gather=[7]))
        dropped: list[PeerDropped] = []
        trial.swarm.host("p1").env.events.subscribe(
            lambda event: dropped.append(event) if isinstance(event, PeerDropped) else None
        )
        for result in await asyncio.gather(*steps):
            liar, honest = (trial.swarm.peer(name).core.peer_id for name in ("p0", "p1"))
            assert result.gathered == {liar: None, honest: [7]}
        assert [(event.peer, event.where) for event in dropped] == [(liar, "gather")]
        assert values[0][0].tolist() == values[1][0].tolist() == [2.0] * 3
        await trial.close()

    sim.run(main, seed=7)


@pytest.mark.parametrize("answers", [False, True])
def test_a_search_that_has_found_a_leader_ends_with_the_step(answers: bool) -> None:
    """The peer that it asks says nothing at all, or promises a group that never begins: the step's timeout ends it."""

    async def main() -> None:
        settings = msgspec.structs.replace(SETTINGS, window_s=15.0, request_timeout_s=12.0)
        trial = Trial(settings=settings)
        await _pair(trial)
        bad = await trial.add("bad", [torch.zeros(3)])

        async def lead(stream: Any, join: Join) -> None:
            if answers:
                await stream.send(JoinAccepted())
            await sim.sleep(1000.0)

        async def declare() -> None:
            await bad.close()
            endpoint = bad.core.endpoint
            endpoint.serve_stream(Join, lead, scope="trial")
            directory = DhtDirectory(bad.core.node, endpoint, timeout_s=2.0)
            await directory.declare("trial.0b", _wall(trial, "bad") + 2.0, endpoint.contact)

        await trial.swarm.run_on("bad", declare)
        began = _now()
        with pytest.raises(RoundFailed, match="the peer that was asked to lead") as failure:
            await trial.step("p0", timeout_s=3.0)
        assert failure.value.peers == (bad.core.peer_id,)
        assert _now() - began == pytest.approx(3.0)
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=9)


def test_a_round_that_does_not_end_fails_the_next_one_in_time() -> None:
    """Work on tensors may hang; the next step waited for the end of the last round without a limit."""

    async def main() -> None:
        trial = Trial()
        values = await _pair(trial)
        await asyncio.gather(trial.step("p0"), trial.step("p1"))
        averager, warned, ends = trial.swarm.peer("p0"), list[str](), asyncio.Event()
        last = averager._last_round
        assert last is not None
        close = last.close

        async def close_late(**options: Any) -> None:
            await ends.wait()
            await close(**options)

        last.close = close_late  # type: ignore[method-assign]

        def note(event: Event) -> None:
            if isinstance(event, Warned):
                warned.append(event.message)

        averager.core.env.events.subscribe(note)
        other = asyncio.ensure_future(trial.step("p1", timeout_s=20.0, allow_retries=False))
        async with asyncio.timeout(60.0):
            with pytest.raises(RoundFailed, match="the last round has not ended within 10 s"):
                await trial.step("p0", timeout_s=30.0, allow_retries=False)
        assert len(warned) == 1
        assert "restart this peer" in warned[0]
        await asyncio.gather(other, return_exceptions=True)
        ends.set()
        await asyncio.gather(trial.step("p0"), trial.step("p1"))
        assert same_bits(values)
        await trial.close()

    sim.run(main, seed=8)


@pytest.mark.parametrize("timeout_s", [0.0, 4.0])
def test_whatever_its_patience_a_close_ends_the_round(timeout_s: float) -> None:
    """In the middle of a round, with no time to wait: it returns, what is left ends, and nothing keeps the vector."""

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=200_000)
        for peer in range(2):
            await trial.add(f"p{peer}", [torch.full((30_000,), float(peer))], target_group_size=2)
        averager, request = trial.swarm.peer("p0"), StepRequest()
        rounds, callbacks = averager.core.rounds(), averager.core.endpoint._links._lost_callbacks
        step = trial.swarm.spawn("p0", averager.step(request, timeout_s=60.0))
        other = trial.swarm.spawn("p1", trial.swarm.peer("p1").step(timeout_s=5.0))
        while not request.began:
            await sim.sleep(0.01)
        assert rounds._rounds
        began = asyncio.get_running_loop().time()
        await trial.swarm.run_on("p0", averager.close, timeout_s)
        assert asyncio.get_running_loop().time() - began <= timeout_s
        [ended] = await asyncio.gather(step, return_exceptions=True)
        assert isinstance(ended, ClosedError)
        await asyncio.gather(other, return_exceptions=True)
        await trial.swarm.run_on("p0", averager.close, 60.0)  # waits for the end of the first one
        assert not rounds._rounds
        assert callbacks == [averager.core.endpoint.arrivals._lost, averager.core.node._peer_lost]
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=5)


def test_a_step_that_is_given_up_while_the_last_round_ends_leaves_it_alone() -> None:
    """A slow line keeps the end of a round waiting; the step after it is cancelled there. Those after that work."""

    async def main() -> None:
        trial = Trial()
        values = [[torch.full((3000,), float(peer))] for peer in range(3)]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=2)
        averager = trial.swarm.peer("p0")

        def far_away(event: Event) -> None:
            if isinstance(event, RoundFinished):
                trial.swarm.network.set_link("p0", "p1", latency_s=0.45)

        averager.core.env.events.subscribe(far_away)
        first = [asyncio.ensure_future(trial.step(f"p{peer}")) for peer in range(2)]
        await first[0]
        other = asyncio.ensure_future(trial.step("p2", timeout_s=30.0, allow_retries=False))
        request = StepRequest()
        step = trial.swarm.spawn("p0", averager.step(request, timeout_s=30.0))
        while not averager.looking:
            await sim.sleep(0.001)
        while averager.looking:
            await sim.sleep(0.001)
        assert not request.began, "the end of the last round was not waited for"
        step.cancel()
        await asyncio.wait([step])
        await asyncio.gather(other, *first, return_exceptions=True)
        for _ in range(2):
            results = await asyncio.gather(trial.step("p0", timeout_s=10.0), trial.step("p2", timeout_s=10.0))
            assert [len(result.gathered) for result in results] == [2, 2]
        assert same_bits([values[0], values[2]])
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=8)


@pytest.mark.parametrize("timeout_s", [40.0, 4.0])
def test_peers_that_are_left_under_different_bits_meet(timeout_s: float) -> None:
    """Two of groups of two over two bits: after three windows at the latest, in one step or in as many short ones."""

    async def main() -> None:
        trial = Trial()
        values = [[torch.full((5,), 2.0 * peer)] for peer in range(2)]
        for peer in range(2):
            await trial.add(f"p{peer}", values[peer], target_group_size=2, group_bits=("00", "11")[peer])

        async def average(peer: int) -> int:
            for tries in range(1, 10):
                with suppress(RoundFailed):
                    await trial.step(f"p{peer}", timeout_s=timeout_s)
                    return tries
            return 10

        window_s = min(timeout_s, SETTINGS.window_s)
        for _ in range(3):  # each round sends them to different keys again
            began = _now()
            tries = await asyncio.gather(average(0), average(1))
            assert max(tries) <= (1 if timeout_s > window_s else 3)
            assert _now() - began < 3 * window_s
            assert values[0][0].tolist() == values[1][0].tolist() == [1.0] * 5
        await trial.close()
        assert not trial.warnings

    for seed in range(5):
        sim.run(main, seed=seed)


def test_a_search_under_one_key_after_another_says_so() -> None:
    """A peer that is alone fails at its timeout, and not before."""

    async def main() -> None:
        trial = Trial()
        await trial.add("p0", [torch.zeros(3)], target_group_size=2, group_bits="11")
        began = _now()
        with pytest.raises(RoundFailed, match=r"nobody else is looking for one \(the last of 5 searches"):
            await trial.step("p0", timeout_s=22.0, allow_retries=False)
        assert _now() - began == pytest.approx(22.0)
        assert trial.swarm.peer("p0").group_bits == "00"
        await trial.close()

    sim.run(main, seed=11)


def test_group_bits_that_are_set_during_a_round_count() -> None:
    """The round draws none in their place; the other member's are drawn as ever."""

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=100_000)
        for peer in range(2):
            tensors = [torch.full((30_000,), float(peer))]
            await trial.add(f"p{peer}", tensors, target_group_size=2, group_bits="0000")
        request = StepRequest()
        steps = asyncio.gather(trial.step("p0", request=request), trial.step("p1"))
        while not request.began:
            await sim.sleep(0.01)
        trial.swarm.peer("p0").group_bits = "1111"
        await steps
        assert trial.swarm.peer("p0").group_bits == "1111"
        assert trial.swarm.peer("p1").group_bits in ("0000", "0001")
        await trial.close()

    sim.run(main, seed=10)


def test_eight_peers_in_groups_of_two_reach_the_global_average_in_three_rounds() -> None:
    """Three digits of a bit each: two of them are the key, and are drawn anew after every round."""

    async def main() -> None:
        trial = Trial()
        values: list[list[torch.Tensor]] = [
            [torch.full((5,), float(peer**2), dtype=torch.float64)] for peer in range(8)
        ]
        mean = sum(peer**2 for peer in range(8)) / 8
        for peer in range(8):
            bits = f"{peer // 2:02b}"
            await trial.add(f"p{peer}", values[peer], target_group_size=2, group_bits=bits)
        met: list[set[frozenset[Any]]] = []
        for _ in range(3):
            results = await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(8)))
            met.append({frozenset(result.gathered) for result in results})
            assert len(met[-1]) == 4
        assert len(set().union(*met)) == 12, "some pair met twice"
        for tensors in values:
            torch.testing.assert_close(tensors[0], torch.full((5,), mean, dtype=torch.float64), rtol=1e-14, atol=0)
        assert all(len(trial.swarm.peer(f"p{peer}").group_bits) == 2 for peer in range(8))
        await trial.close()
        assert not trial.warnings

    for seed in range(5):
        sim.run(main, seed=seed)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_step_that_fails_again_and_again_says_why_though_its_last_try_was_short(seed: int) -> None:
    """All weights are 0. It ended with "no group within 0.4 s": what the last, short search had come to."""

    async def main() -> None:
        trial = Trial()
        for name in ("p0", "p1", "p2"):
            await trial.add(name, [torch.zeros(3)], target_group_size=3)

        async def step(place: int) -> None:
            await sim.sleep(0.3 * place)  # so that they do not all give up at once
            await trial.step(f"p{place}", weight=0.0, timeout_s=6.0)

        for failure in await asyncio.gather(*map(step, range(3)), return_exceptions=True):
            assert isinstance(failure, RoundFailed)
            assert "the total weight of the group is zero" in failure.reason
        await trial.close()

    sim.run(main, seed=seed)
