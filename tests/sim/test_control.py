"""The control of a round when the coordinator goes: who learns the verdict, who does not, and how soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from shoal.averaging.allreduce.round import Round, RoundOptions
from shoal.base.clock import Env
from shoal.compression import Uniform8BitQuantization
from shoal.errors import RoundFailed
from shoal.events import PeerDropped, Warned
from shoal.protocol.wire import Abort, Commit, Held, PartAverage, PartData, Reduce, Report
from shoal.sim import sleep
from tests.sim.round_kit import OPTIONS, ROUND, RoundPeer, gather_group, signed_by
from tests.sim.rpc_kit import SimNet, on_sim, together

P = ParamSpec("P")
T = TypeVar("T")

NUMEL = 200


def now() -> float:
    """Virtual time."""
    return asyncio.get_running_loop().time()


class HandCoordinator:
    """Three members; the first, which decides, is played by the test. The second owns everything."""

    def __init__(self, group: list[RoundPeer], options: RoundOptions) -> None:
        self.a, self.b, self.c = group
        self.group, self.options = group, options
        self.rounds: list[Round] = []
        self.running: list[asyncio.Task[object]] = []
        self.held: list[Held] = []

    @classmethod
    async def begin(
        cls, net: SimNet, options: RoundOptions = OPTIONS, *, auxiliary_owner: bool = False
    ) -> HandCoordinator:
        """Start the other two, contribute, and wait until both hold the average."""
        group = [
            await RoundPeer.make(net, name, torch.full((NUMEL,), i + 1.0), auxiliary=auxiliary_owner and name == "b")
            for i, name in enumerate("abc")
        ]
        made = cls(group, options)
        await gather_group(group)
        for member in group[1:]:
            made.rounds.append(member.round(group, [0, NUMEL, 0], options=options))
            made.running.append(asyncio.create_task(made.rounds[-1].run()))
        stream = await made.a.peer.endpoint.open(made.b.peer.contact, Reduce(ROUND), timeout_s=5.0)
        payload = torch.ones(NUMEL).numpy().tobytes()
        await stream.send(PartData(0, 0, 1.0), payload)
        received = await stream.recv()
        assert received is not None
        average, nbytes = received
        assert isinstance(average, PartAverage)
        await stream.readinto(bytearray(nbytes))
        made.held = [average.held]
        for member in (made.b, made.c):
            await made.report(member)
        return made

    async def report(self, member: RoundPeer) -> Report:
        """The next report of a member that tells of something held."""
        while True:
            received = await self.a.controls[member.peer.peer_id].recv()
            assert received is not None
            report = received[0]
            assert isinstance(report, Report)
            if report.held:
                return report

    async def tell(self, member: RoundPeer, verdict: Commit | Abort) -> None:
        """As the coordinator."""
        await self.a.controls[member.peer.peer_id].send(verdict)

    @property
    def commit(self) -> Commit:
        """The verdict that the reports allow."""
        return self.signed(self.held)

    def signed(self, held: list[Held]) -> Commit:
        """The coordinator's commit of these averages."""
        commit: Commit = signed_by(self.a.table.identity, self.rounds[0], Commit(ROUND, held))
        return commit

    async def close(self) -> None:
        """End the rounds."""
        await asyncio.gather(*(round_.close(orderly=False) for round_ in self.rounds))


def test_a_verdict_that_one_member_has_is_relayed() -> None:
    """The coordinator tells one and dies: the other learns it from that one, and both have the same average."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net)
        await trial.tell(trial.b, trial.commit)
        await trial.running[0]
        await trial.a.peer.endpoint.close()
        began = now()
        await trial.running[1]
        assert now() - began < 1.0
        for member in (trial.b, trial.c):
            member.vector.overwrite()
            assert torch.equal(member.vector.tensors[0], torch.full((NUMEL,), 2.0))
        await trial.close()

    on_sim(scenario)


def test_a_verdict_that_an_auxiliary_member_has_is_relayed() -> None:
    """It wants no averages, and knows as well as anybody that they count."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net, auxiliary_owner=True)
        await trial.tell(trial.b, trial.commit)
        await trial.running[0]
        await trial.a.peer.endpoint.close()
        await trial.running[1]
        trial.c.vector.overwrite()
        assert torch.equal(trial.c.vector.tensors[0], torch.full((NUMEL,), 2.0))  # of 1 and 3; 2 does not contribute
        assert torch.equal(trial.b.vector.tensors[0], torch.full((NUMEL,), 2.0))  # as it was
        await trial.close()

    on_sim(scenario)


def test_an_auxiliary_member_without_a_verdict_fails_too() -> None:
    """The coordinator dies before it tells anybody: the outcome is unknown to it as to the others."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net, auxiliary_owner=True)
        began = now()
        await trial.a.peer.endpoint.close()
        failures = await together(*trial.running)
        assert now() - began < 5.0
        assert all(isinstance(failure, RoundFailed) and "outcome unknown" in failure.reason for failure in failures)
        await trial.close()

    on_sim(scenario)


def test_a_verdict_is_relayed_by_a_round_that_is_closed() -> None:
    """Recent verdicts stay known after the round."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net)
        await trial.tell(trial.b, trial.commit)
        await trial.running[0]
        await trial.rounds[0].close(orderly=False)
        await trial.a.peer.endpoint.close()
        await trial.running[1]
        await trial.rounds[1].close(orderly=False)

    on_sim(scenario)


def test_without_a_verdict_the_outcome_is_unknown() -> None:
    """The coordinator dies before it tells anybody: all fail within seconds, untouched; none waits for the deadline."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net)
        began = now()
        await trial.a.peer.endpoint.close()
        failures = await together(*trial.running)
        assert now() - began < 5.0
        assert all(isinstance(failure, RoundFailed) and "outcome unknown" in failure.reason for failure in failures)
        for value, member in ((2.0, trial.b), (3.0, trial.c)):
            assert torch.equal(member.vector.tensors[0], torch.full((NUMEL,), value))
        await trial.close()

    on_sim(scenario)


def test_who_lost_the_coordinator_alone_hopes_for_the_others() -> None:
    """Its stream to the coordinator broke, another member's did not: it goes on asking until that one knows."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net)
        trial.a.controls[trial.c.peer.peer_id].abort()
        await sleep(8.0)
        assert not trial.running[1].done()
        await trial.tell(trial.b, trial.commit)
        began = now()
        await asyncio.gather(*trial.running)
        assert now() - began < 1.0
        await trial.close()

    on_sim(scenario)


def test_an_abort_ends_the_round_at_once() -> None:
    """With the coordinator's reason; the tensors are as they were."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net)
        for member in (trial.b, trial.c):
            await trial.tell(member, Abort(ROUND, "too few members are left"))
        failures = await together(*trial.running)
        assert all(isinstance(each, RoundFailed) and each.reason == "too few members are left" for each in failures)
        assert torch.equal(trial.c.vector.tensors[0], torch.full((NUMEL,), 3.0))
        await trial.close()

    on_sim(scenario)


def test_a_silent_coordinator_is_given_up_by_the_deadline() -> None:
    """It lives and says nothing: the round's own deadline ends it."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net, RoundOptions(timeout_s=9.0))
        failures = await together(*trial.running)
        assert all(isinstance(each, RoundFailed) and "not decided within 9 s" in each.reason for each in failures)
        await trial.close()

    on_sim(scenario)


def test_a_commit_of_other_bytes_is_fetched_or_given_up() -> None:
    """The verdict names an average that this member does not hold: it never succeeds with its own."""

    async def scenario(net: SimNet) -> None:
        trial = await HandCoordinator.begin(net)
        [held] = trial.held
        other = trial.signed([Held(0, 0, held.contributors, held.weight, b"?" * 16)])
        for member in (trial.b, trial.c):
            await trial.tell(member, other)
        failures = await together(*trial.running)
        assert all(isinstance(each, RoundFailed) for each in failures)
        await trial.close()

    on_sim(scenario)


def test_a_member_that_gives_up_is_left_out() -> None:
    """Cancelled in the middle: the coordinator hears the stream end, and the others go on without it."""

    async def scenario(net: SimNet) -> None:
        group = [await RoundPeer.make(net, name, torch.full((NUMEL,), i + 1.0)) for i, name in enumerate("abc")]
        await gather_group(group)
        rounds = [member.round(group, [100, 100, 0]) for member in group]
        running = [asyncio.create_task(round_.run()) for round_ in rounds[:2]]
        group[2].controls[group[0].peer.peer_id].abort()
        outcomes = await asyncio.gather(*running)
        assert [outcome.left_out for outcome in outcomes] == [(group[2].peer.peer_id,)] * 2
        await asyncio.gather(*(round_.close() for round_ in rounds[:2]))
        await rounds[2].close(orderly=False)

    on_sim(scenario)


def test_a_member_that_makes_no_progress_is_left_out_by_name() -> None:
    """It owns a tile, is connected, and does nothing: after the stall limit the others go on."""

    async def scenario(net: SimNet) -> None:
        group = [await RoundPeer.make(net, name, torch.full((NUMEL,), i + 1.0)) for i, name in enumerate("abc")]
        await gather_group(group)
        rounds = [member.round(group, [0, 0, NUMEL]) for member in group]
        began = now()
        outcomes = await asyncio.gather(*(round_.run() for round_ in rounds[:2]))
        assert now() - began < 2 * OPTIONS.silence_s + 2 * OPTIONS.report_s + 8.0
        assert outcomes[0].left_out == (group[2].peer.peer_id,)
        dropped = group[0].peer.seen(PeerDropped)
        assert [(event.peer, event.where) for event in dropped] == [(group[2].peer.peer_id, "all-reduce")]
        await asyncio.gather(*(round_.close() for round_ in rounds[:2]))
        await rounds[2].close(orderly=False)

    on_sim(scenario)


class GatedExecutor:
    """Holds every function back until the gate opens: a thread that is slow."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.inside = 0

    @classmethod
    def of(cls, member: RoundPeer) -> GatedExecutor:
        """Such an executor for this member."""
        made, endpoint = cls(), member.peer.endpoint
        endpoint.env = Env(endpoint.env.clock, endpoint.env.rng, made, endpoint.env.events)
        return made

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.inside += 1
        try:
            await self.gate.wait()
            return function(*args, **kwargs)
        finally:
            self.inside -= 1


def test_a_closed_round_leaves_no_work_in_other_threads() -> None:
    """What a thread still computes for it is waited for: afterwards the vector may be used for the next round."""

    async def scenario(net: SimNet) -> None:
        codec = Uniform8BitQuantization()
        group = [await RoundPeer.make(net, name, torch.full((100_000,), i + 1.0), codec) for i, name in enumerate("ab")]
        executor = GatedExecutor.of(group[0])
        await gather_group(group)
        rounds = [member.round(group, [100_000, 0], tile_bytes=1 << 20) for member in group]
        running = [asyncio.create_task(round_.run()) for round_ in rounds]
        await sleep(1.0)
        assert executor.inside
        running[0].cancel()
        await together(running[0])
        closing = asyncio.create_task(rounds[0].close(orderly=False))
        await sleep(30.0)
        assert not closing.done()
        executor.gate.set()
        await closing
        assert not executor.inside
        assert not group[0].peer.seen(Warned)
        await together(running[1])
        await rounds[1].close(orderly=False)

    on_sim(scenario)


def test_tiles_that_are_sent_as_they_are_wait_for_no_other_thread() -> None:
    """To add them, to finish them and to check them is so little work that a hop to a thread would cost more."""

    async def scenario(net: SimNet) -> None:
        group = [await RoundPeer.make(net, name, torch.full((100_000,), i + 1.0)) for i, name in enumerate("ab")]
        for member in group:
            GatedExecutor.of(member)
        await gather_group(group)
        rounds = [member.round(group, [50_000, 50_000], tile_bytes=1 << 20) for member in group]
        await asyncio.gather(*(round_.run() for round_ in rounds))
        await asyncio.gather(*(round_.close() for round_ in rounds))

    on_sim(scenario)
