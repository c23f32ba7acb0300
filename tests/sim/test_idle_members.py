"""A member that comes to each round and gives nothing: the others wait for it now and then, not in every round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.averaging import Averager
from shoal.averaging.allreduce.exchange import Exchange
from shoal.averaging.allreduce.round import Outcome, Round
from shoal.averaging.allreduce.streams import SenderStream
from shoal.averaging.matchmaking.machine import GroupMachine
from shoal.base.peer import PeerID
from shoal.errors import RoundFailed
from shoal.events import Event, Warned
from shoal.strategies import DiLoCo, Strategy
from tests.sim.averaging_kit import SETTINGS, Trial
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.strategy_kit import MEAN

BATCH, BATCH_S, BATCHES = 4, 0.5, 3


async def train_together(run: Run, count: int, *, strategy: Strategy | None = None) -> list[Trainer]:
    """So many peers, which have trained together for 10 s."""
    trainers = {name: await run.add(name, strategy=strategy) for name in (f"p{number}" for number in range(count))}
    for name, trainer in trainers.items():
        run.swarm.spawn(name, trainer.train(BATCH, duration_s=BATCH_S, until=asyncio.Event().is_set))
    await sim.sleep(10.0)
    return list(trainers.values())


def gives_nothing(averager: Averager, first: Trainer) -> None:
    """From now on it comes to each group, leads some, and does nothing until the others have gone on, or for 30 s."""
    begin: Any = averager._begin_round

    async def begin_nothing(group: Any, *rest: Any) -> Any:
        async def run() -> Outcome:
            before = first.participant.epoch
            for _ in range(150):
                if first.participant.epoch == before:
                    await sim.sleep(0.2)
            raise RoundFailed("it gives nothing", [], round_id=group.round_id)

        round_ = await begin(group, *rest)
        round_.run = run
        return round_

    averager._begin_round = begin_nothing  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        pytest.param(None, 4, id="synchronous"),
        pytest.param(None, 2, id="two"),
        pytest.param(DiLoCo(BATCHES, MEAN), 4, id="merges", marks=pytest.mark.long),
    ],
)
def test_a_member_that_gives_nothing_is_not_waited_for_in_each_round(strategy: Strategy | None, count: int) -> None:
    """It cost each round 12 s, and 120 s where it led: three peers made a sixth of their steps, with DiLoCo a tenth.

    One that trained with it alone made none.
    """

    async def main() -> None:
        run = Run(target=count * BATCH * BATCHES if strategy is None else 1)
        trainers = await train_together(run, count, strategy=strategy)
        first, idle = trainers[0], trainers[-1]

        async def steps(seconds: float) -> int:
            before = first.participant.epoch
            await sim.sleep(seconds)
            return first.participant.epoch - before

        calm = await steps(15.0)
        gives_nothing(idle.participant._averager, first)
        await sim.sleep(50.0)
        assert await steps(30.0) > 2 * 0.6 * calm * (count - 1) / count

    sim.run(main, seed=1)


def takes_none(averager: Averager) -> Callable[[], None]:
    """From now on it takes part in rounds, and reads no average of others; returns what mends it."""
    begin: Any = averager._begin_round

    async def begin_deaf(group: Any, *rest: Any) -> Any:
        async def never(*_: Any) -> None:
            await asyncio.Event().wait()

        round_ = await begin(group, *rest)
        round_._answered, round_._watch_coordinator = never, lambda now: None
        return round_

    averager._begin_round = begin_deaf  # type: ignore[method-assign, assignment]
    return lambda: setattr(averager, "_begin_round", begin)


@pytest.mark.parametrize("leader", ["either", "the other one", "it"])
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(None, id="synchronous"), pytest.param(DiLoCo(BATCHES, MEAN), id="merges", marks=pytest.mark.long)],
)
def test_one_of_two_stood_still_for_minutes_beside_one_that_takes_no_averages(
    strategy: Strategy | None, leader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left the other out, shunned it as a leader, and waited for it to follow: 250 s, again and again.

    After two lost rounds it goes on alone. When the other one is mended, the two come together within minutes.
    """

    async def main() -> None:
        run = Run(target=2 * BATCH * BATCHES if strategy is None else 1)
        first, bad = await train_together(run, 2, strategy=strategy)

        async def pace(seconds: float) -> float:
            before = first.participant.own.name.samples
            await sim.sleep(seconds)
            return (first.participant.own.name.samples - before) / seconds

        calm = await pace(15.0)
        mend = takes_none(bad.participant._averager)
        if leader != "either":
            leads((bad if leader == "it" else first).participant._averager, monkeypatch)
        await sim.sleep(20.0)
        assert await pace(100.0) >= 0.8 * calm / 2
        monkeypatch.undo()
        mend()
        async with asyncio.timeout(240.0):
            while len(first.participant.swarm_step.here) < 2:
                await sim.sleep(0.1)
        assert await pace(15.0) >= 0.8 * calm

    sim.run(main, seed=1)


@pytest.mark.parametrize("what", ["its values", "its answers", "control"])
def test_a_member_that_does_not_end_its_streams_is_not_waited_for_in_each_round(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round of all others took 1.1 s in place of 0.2 s, for ever, and nobody was named."""

    async def main() -> None:
        run, warned = Run(target=4 * BATCH, dtype=torch.float32), dict[str, set[PeerID]]()
        finish, serve, say = SenderStream.finish, Exchange.serve, Round._say_no_more
        evil: PeerID | None = None

        async def finish_late(sender: SenderStream, commit: Any) -> None:
            if sender._endpoint.peer_id == evil and sender._reader is not None:
                await asyncio.wait([sender._reader])
            await finish(sender, commit)

        async def serve_on(exchange: Exchange, stream: Any, sender: int) -> None:
            await serve(exchange, stream, sender)
            if exchange._endpoint.peer_id == evil:
                await sim.sleep(30.0)

        async def say_on(round_: Round) -> None:
            if round_.endpoint.peer_id == evil:
                await sim.sleep(30.0)
            await say(round_)

        trainers = dict[str, Trainer]()
        for name in ("p0", "p1", "p2", "p3"):

            def note(event: Event, name: str = name) -> None:
                if isinstance(event, Warned):
                    warned.setdefault(name, set()).update(event.about)

            trainers[name] = await run.add(name, events=note)
        for name, trainer in trainers.items():
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=0.2, until=asyncio.Event().is_set))
        await sim.sleep(3.0)
        first = trainers["p0"]

        async def steps() -> int:
            before = first.participant.epoch
            await sim.sleep(3.0)
            return first.participant.epoch - before

        calm = await steps()
        follower = next(
            n
            for n, t in trainers.items()
            if n != "p0" and not t.participant._averager._finder.matchmaker._memory.leaders.led
        )
        evil = trainers[follower].participant.core.peer_id
        way: tuple[type, str, Any] = {
            "its values": (SenderStream, "finish", finish_late),
            "its answers": (Exchange, "serve", serve_on),
            "control": (Round, "_say_no_more", say_on),
        }[what]
        monkeypatch.setattr(*way)
        await sim.sleep(12.0)  # another peer leads for once, and learns of it by itself
        assert await steps() > 0.6 * calm
        if what != "control":
            assert warned["p0"] == {evil}

    sim.run(main, seed=1)


def test_one_bad_line_between_two_members_slows_nobody_for_long() -> None:
    """Each round waited for what the two give each other: four peers made a quarter of their steps."""

    async def main() -> None:
        run = Run(target=4 * BATCH * BATCHES, width=2000)
        trainers = await train_together(run, 4)

        async def steps(seconds: float) -> int:
            before = trainers[1].participant.epoch
            await sim.sleep(seconds)
            return trainers[1].participant.epoch - before

        calm = await steps(15.0)
        run.swarm.network.set_link("p0", "p3", bandwidth_bytes_s=2e3)
        await sim.sleep(40.0)
        assert await steps(30.0) > 2 * 0.7 * calm
        assert {trainer.alone for trainer in trainers} == {0}
        for one, other in ((0, 3), (3, 0)):
            averager = trainers[one].participant._averager
            assert list(averager.conduct.bad_lines._failed) == [trainers[other].participant.core.peer_id]
            assert not averager.conduct.idle._failed

    sim.run(main, seed=1)


def test_who_has_a_bad_line_to_another_member_missed_it_under_every_leader() -> None:
    """Its values came to all others. The two put each honest leader on trial, and the group fell apart."""

    async def main() -> None:
        run = Run(target=3 * BATCH * BATCHES, width=2000)
        trainers = await train_together(run, 3)
        leads = [trainer.participant._averager._finder.matchmaker._memory.leaders.led for trainer in trainers]
        one, other = (f"p{number}" for number, leader in enumerate(leads) if not leader)
        run.swarm.network.set_link(one, other, bandwidth_bytes_s=2e3)
        await sim.sleep(60.0)
        assert not any(
            trainer.participant._averager._finder.matchmaker._memory.leaders.stranded for trainer in trainers
        )
        assert not any(trainer.downloads for trainer in trainers)

    sim.run(main, seed=1)


def test_a_peer_that_the_others_reach_takes_the_lead_from_one_that_another_peer_does_not_reach() -> None:
    """That peer was in no group, and downloaded each state, for as long as the line between the two was bad."""

    async def main() -> None:
        run = Run(target=4 * BATCH * BATCHES, width=2000)
        trainers = await train_together(run, 4)
        leads = [trainer.participant._averager._finder.matchmaker._memory.leaders.led for trainer in trainers]
        leader = leads.index(True)
        other = (leader + 1) % 4
        run.swarm.network.set_link(f"p{leader}", f"p{other}", bandwidth_bytes_s=30.0)
        await sim.sleep(40.0)
        contribution = trainers[other].participant.contribution
        before, batches = contribution.contributed, trainers[other].batches_done
        await sim.sleep(30.0)
        assert contribution.contributed - before > 0.5 * BATCH * (trainers[other].batches_done - batches)

    sim.run(main, seed=1)


@pytest.mark.parametrize("still", ["a", "b"])
def test_a_peer_that_stood_still_blames_nobody(still: str) -> None:
    """It finds that the others have left it. After two such rounds it counted on none of them, and trained alone."""

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=1e5)
        averagers = {name: await trial.add(name, [torch.ones(100_000)]) for name in "ab"}
        steps = [asyncio.ensure_future(trial.begin(name, allow_retries=False, timeout_s=20.0)) for name in "ab"]
        while averagers[still]._between_rounds.is_set():
            await sim.sleep(0.01)
        trial.swarm.stall(still, 5.0)
        await asyncio.gather(*steps, return_exceptions=True)
        conduct = averagers[still].conduct
        for each in (conduct.idle, conduct.bad_leaders):
            assert not each._failed
        await trial.close()

    sim.run(main, seed=1)


def leads(averager: Averager, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it declares itself earlier than all others, and asks nobody to lead."""
    begin, memory = GroupMachine._begin_window, averager._finder.matchmaker._memory

    def begin_earlier(machine: GroupMachine, now: float) -> None:
        begin(machine, now)
        if machine._memory is memory:
            machine._window.expiration -= 2.0
            memory.leaders.last = None

    monkeypatch.setattr(GroupMachine, "_begin_window", begin_earlier)


def aborts(averager: Averager) -> None:
    """From now on it gives up each round that it leads."""
    begin: Any = averager._begin_round

    async def begin_and_abort(group: Any, *rest: Any) -> Any:
        round_ = await begin(group, *rest)
        if group.leads:
            asyncio.get_running_loop().call_soon(round_.give_up, "it aborts")
        return round_

    averager._begin_round = begin_and_abort  # type: ignore[method-assign, assignment]


def does_not_come(averager: Averager) -> None:
    """From now on it says where it stands, and is in no group."""

    async def find(*_: Any, **__: Any) -> None:
        await sim.sleep(1e9)

    averager._finder.find = find  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize(("trouble", "count"), [("aborts", 4), ("aborts", 2), ("does not come", 2)])
def test_a_peer_that_leads_to_nothing_does_not_stop_the_others(
    trouble: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these stopped all others for good."""

    async def main() -> None:
        run = Run(target=count * BATCH * BATCHES, averager=msgspec.structs.replace(SETTINGS, allreduce_timeout_s=20.0))
        trainers = await train_together(run, count)
        first, bad = trainers[0], trainers[-1]
        averager = bad.participant._averager
        if trouble == "does not come":
            does_not_come(averager)
        else:
            leads(averager, monkeypatch)
            aborts(averager)
        await sim.sleep(120.0)
        before = first.participant.epoch
        await sim.sleep(120.0)
        least = 0.4
        assert first.participant.epoch - before > least * 120.0 / (BATCHES * BATCH_S) * (count - 1) / count

    sim.run(main, seed=1)


@pytest.mark.long
def test_an_auxiliary_peer_is_forgiven_as_it_reduces() -> None:
    """It has no values that could count. One pause a minute added up, until nobody gave it anything to reduce."""

    async def main() -> None:
        run = Run(target=3 * BATCH * BATCHES)
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name)
        helper = await run.add("aux", seed=7, auxiliary=True)
        end = asyncio.Event()
        run.swarm.spawn("aux", helper.help())
        for name in names:
            run.swarm.spawn(name, run.swarm.peer(name).train(BATCH, duration_s=BATCH_S, until=end.is_set))
        await sim.sleep(10.0)
        first = run.swarm.peer("p0").participant
        for _ in range(3):
            while first.phase.value != "averaging" or first._averager.looking:
                await sim.sleep(0.002)
            run.swarm.stall("aux", 3.0)
            await sim.sleep(60.0)
        now = asyncio.get_running_loop().time()
        assert not any(run.swarm.peer(name).participant._averager.conduct.idle.pausing(now - 50.0) for name in names)

    sim.run(main, seed=1)
