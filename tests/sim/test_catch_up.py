"""Newcomers get in, however long their download takes: they follow the steps of the others meanwhile."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.averaging.allreduce.vector import Vector, describe
from shoal.compression import BlockwiseQuantization, CompressionBase, Float16Compression, NoCompression
from shoal.events import Warned
from shoal.protocol.wire import StepBytes, StepTaken
from shoal.run.decide.agreement import Agreement
from shoal.run.decide.state_name import StateName
from shoal.run.join.catch_up import Following, _Coming, _Source
from shoal.run.join.steps import Step, land, of_step_alone
from shoal.sim import SimNetwork
from tests.sim.optimizer_kit import Run, Trainer

MEMBERS = ["p0", "p1", "p2"]
MIB = 1 << 20
EPOCH_S = 1.25


def ballast(seed: int, nbytes: int) -> list[torch.Tensor]:
    """Part of the state that no gradient and no average has: whole numbers."""
    return [torch.randint(1 << 30, (nbytes // 4,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))]


class Scene:
    """A swarm of three that goes on, and newcomers whose lines are slow.

    Args:
        download_s: how long the newcomer's line takes for the state, if there is nothing else on it.
        state_bytes: size of what no gradient has of the state.
        batch_s: how long half of a batch takes; an epoch is five of these.
        run: options of the run.
    """

    def __init__(self, download_s: float = 6.0, state_bytes: int = MIB, *, batch_s: float = 0.25, **run: Any) -> None:
        self.batch_s = batch_s
        loop: Any = asyncio.get_running_loop()
        self.loop = loop
        self.network = SimNetwork(loop.seed, window_bytes=32 << 10)
        self.network.add_host("late", down_bytes_s=state_bytes / download_s)
        self.state_bytes = state_bytes
        run.setdefault("target", 24)
        self.run = Run(network=self.network, **run)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.until = float("inf")

    async def begin(self, members: list[str] = MEMBERS) -> None:
        """The members train: an epoch takes them about a second. They have made a few when it returns."""
        for name in members:
            await self.run.add(name, extra_tensors=ballast(0, self.state_bytes))
        await sim.sleep(3.0)
        for name in members:
            self.train(name)
        await sim.sleep(20 * self.batch_s)

    def train(self, name: str) -> None:
        """This one trains until the end."""
        trainer = self.run.swarm.peer(name)
        work = trainer.train(4, duration_s=2 * self.batch_s, until=lambda: self.loop.time() > self.until)
        self.tasks[name] = self.run.swarm.spawn(name, work)

    async def newcomer(self, name: str = "late", **changes: Any) -> Trainer:
        """One more comes, with another beginning."""
        late = await self.run.add(name, seed=99, extra_tensors=ballast(99, self.state_bytes), **changes)
        self.train(name)
        return late

    async def first_epoch(self, late: Trainer, within_s: float) -> float:
        """When it takes its first step together with the others."""
        until = self.loop.time() + within_s
        while not late.epochs:
            assert self.loop.time() < until, f"{late.downloads} downloads, and never in a round"
            await sim.sleep(0.1)
        return late.epochs[0][0]

    async def end(self, epochs: int) -> list[str]:
        """Announce the end of the run so many epochs from now, and wait for it; who is alive then."""
        first = next(iter(self.run.swarm.peers.values())).participant
        self.run.announce_end(first.epoch + epochs)
        names = [name for name in self.tasks if self.run.swarm.is_alive(name)]
        await asyncio.wait([self.tasks[name] for name in names])
        return names


def paces(trainer: Trainer, since: float, until: float) -> list[float]:
    """How long each epoch of a trainer lasted."""
    times = [time for time, *_ in trainer.epochs if since <= time <= until]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("epochs", [1, 8])
def test_a_newcomer_whose_download_takes_longer_than_an_epoch_takes_part(epochs: int) -> None:
    """It takes part right after one download, with the bits of the others, who are not slower for it."""

    async def main() -> None:
        scene = Scene(EPOCH_S * epochs, 8 * MIB)
        await scene.begin()
        came = scene.loop.time()
        late = await scene.newcomer()
        first = await scene.first_epoch(late, 2 * EPOCH_S * epochs + 20)
        names = await scene.end(3)
        assert len(late.participant.takeover.downloads) == 1
        assert scene.run.agree(names), {name: scene.run.swarm.peer(name).participant.state for name in names}
        member = scene.run.swarm.peer("p0")
        missed = sum(came < time < first for time, *_ in member.epochs)
        assert epochs <= missed <= 1.5 * epochs + 4, missed
        assert not scene.run.warnings, scene.run.warnings
        # The last one is that of the first round with the newcomer, which has to be dialed.
        alone, beside = paces(member, 0.0, came), paces(member, came, first)[:-1]
        if beside:  # else it took part in the first round after its download
            assert sum(beside) / len(beside) <= 1.05 * sum(alone) / len(alone), (alone, beside)
        await scene.run.close()

    sim.run(main, seed=epochs)


async def held(scene: Scene, late: Trainer, within_s: float, epochs: int = 3) -> None:
    """The newcomer takes part after one download, and ends with the bits of all who are alive."""
    await scene.first_epoch(late, within_s)
    names = await scene.end(epochs)
    assert len(late.participant.takeover.downloads) == 1, late.failed_downloads
    assert scene.run.agree(names), {name: scene.run.swarm.peer(name).participant.state for name in names}
    assert not scene.run.warnings, scene.run.warnings
    await scene.run.close()


@pytest.mark.parametrize("dies", ["a donor", "who is followed", "the coordinator"])
def test_a_donor_that_dies_in_the_middle_costs_the_newcomer_nothing(dies: str) -> None:
    """The others have the same snapshot, and the steps that the dead one was to give."""

    async def main() -> None:
        scene = Scene()
        members = [*MEMBERS, "p3"]
        await scene.begin(members)
        late = await scene.newcomer()
        await sim.sleep(3.0)
        followed = [name for name in members if scene.run.swarm.peer(name).participant._steps._followers]
        assert len(followed) == 2
        others = [name for name in members if name not in followed]
        last = scene.run.swarm.peer(members[0]).participant.swarm_step.last_round
        assert last is not None
        victim = {"a donor": others[0], "who is followed": followed[0], "the coordinator": members[0]}[dies]
        scene.run.swarm.crash(victim)
        await held(scene, late, 60.0)

    sim.run(main, seed=5)


@pytest.mark.parametrize(
    "codec", [pytest.param(Float16Compression(), marks=pytest.mark.long(full=True)), BlockwiseQuantization()]
)
def test_averagings_of_states_are_among_the_steps_that_a_newcomer_takes(codec: CompressionBase) -> None:
    """Also those that are coded against an average which the newcomer has not got."""

    async def main() -> None:
        scene = Scene(average_state_every=2, state_compression=codec)
        await scene.begin()
        late = await scene.newcomer()
        await held(scene, late, 60.0)

    sim.run(main, seed=6)


def test_an_averaging_that_a_newcomer_takes_counted_as_weights_that_its_program_changed() -> None:
    """It was told to change weights within the optimizer's step only."""
    told = list[str]()

    async def main() -> None:
        scene = Scene(average_state_every=1)
        await scene.begin()
        late = await scene.newcomer(
            events=lambda event: told.append(event.message) if isinstance(event, Warned) else None
        )
        await held(scene, late, 60.0)

    sim.run(main, seed=6)
    assert not [each for each in told if "were changed between" in each]


def test_gradients_that_were_sent_with_a_codec_are_taken_as_the_members_took_them() -> None:
    """What is kept is as small as what the members were sent, and becomes the same bits."""

    async def main() -> None:
        scene = Scene(compression=BlockwiseQuantization(), width=512, dtype=torch.float32)
        await scene.begin()
        late = await scene.newcomer()
        await held(scene, late, 60.0)

    sim.run(main, seed=7)


def test_a_newcomer_gets_in_beside_a_peer_that_is_alone() -> None:
    """Its steps are no rounds, and can be followed like these."""

    async def main() -> None:
        scene = Scene(target=8)
        await scene.begin(["p0"])
        late = await scene.newcomer()
        await held(scene, late, 60.0)

    sim.run(main, seed=8)


def test_a_newcomer_that_is_interrupted_while_it_takes_steps_has_a_state_of_the_swarm() -> None:
    """Ctrl+C between two of them: the parameters are those of their name, and the next call goes on."""

    async def main() -> None:
        scene = Scene()
        await scene.begin()
        late = await scene.run.add("late", seed=99, extra_tensors=ballast(99, scene.state_bytes))
        participant, names = late.participant, dict[bytes, list[torch.Tensor]]()
        await sim.sleep(3.0)
        member = scene.run.swarm.peer("p0")
        member.participant.core.env.events.subscribe(lambda event: note(member, names))
        download = scene.run.swarm.spawn("late", participant.turn.download(60.0))
        taken, take = 0, participant.own.step

        def step() -> None:
            nonlocal taken
            take()
            taken += 1
            if taken == 2:
                download.cancel()

        participant.own.step = step  # type: ignore[method-assign]
        await asyncio.wait([download])
        assert download.cancelled()
        assert taken == 2
        assert participant.state.digest in names, "a state that nobody else ever had"
        pairs = zip(names[participant.state.digest], late.parameters, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        scene.train("late")
        await scene.first_epoch(late, 30.0)
        assert scene.run.agree(await scene.end(3))
        await scene.run.close()

    sim.run(main, seed=9)


def note(member: Trainer, names: dict[bytes, list[torch.Tensor]]) -> None:
    """Remember the parameters of the state that this member is at."""
    parameters = [parameter.detach().clone() for parameter in member.parameters]
    names.setdefault(member.participant.state.digest, parameters)


@pytest.mark.parametrize(
    "why", [pytest.param("its line is too slow", marks=pytest.mark.long), "it may not keep so much"]
)
def test_a_newcomer_that_cannot_get_in_is_told_so_with_numbers(why: str) -> None:
    """How long a download and a step take, how large one is, what the line carries, and what to change."""

    async def main() -> None:
        slow = why == "its line is too slow"
        scene = Scene(8.0, MIB, width=4096 if slow else 8)
        warned: list[str] = []
        await scene.begin()
        late = await scene.newcomer(catch_up_bytes=1 << 30 if slow else 2000)
        late.participant.core.env.events.subscribe(
            lambda event: warned.append(event.message) if isinstance(event, Warned) else None
        )
        scene.until = scene.loop.time() + 40.0
        await asyncio.wait(list(scene.tasks.values()))
        assert late.downloads >= 1
        told = [message for message in warned if "steps that the others took meanwhile is missing" in message]
        assert len(told) == 1, warned
        expected = (
            r"took \d+\.\d s, .* A step takes them about 1\.\d s and has \d+ bytes; this line carried \d+ bytes/s"
        )
        assert re.search(expected, told[0]), told
        await scene.run.close()

    sim.run(main, seed=10)


def test_a_line_that_carries_little_more_than_the_steps_is_enough() -> None:
    """The steps come first, and the state has what is left of the line."""

    async def main() -> None:
        # A step has 229 kB and takes about 5 s: 46 kB/s, of 100.
        scene = Scene(MIB / 4 / 100e3, MIB // 4, batch_s=1.0, width=4096)
        await scene.begin()
        late = await scene.newcomer()
        await held(scene, late, 120.0)

    sim.run(main, seed=11)


def test_steps_that_are_large_beside_short_epochs_are_followed() -> None:
    """Between two rounds a member has time for a whole step; where one cannot send them all, the other one helps."""

    async def main() -> None:
        # A step has 57 kB and takes 0.5 s, of which the round is a small part.
        scene = Scene(0.5, MIB // 8, batch_s=0.1, width=1024, state_upload_limit=112e3)
        await scene.begin()
        late = await scene.newcomer()
        await held(scene, late, 60.0)

    sim.run(main, seed=12)


def test_a_peer_that_has_caught_up_keeps_nobody_waiting() -> None:
    """It is at the state of the others: it takes part, and does not wait for a step that it is to take itself."""

    async def main() -> None:
        scene = Scene(2.0, MIB)
        await scene.begin()
        came = scene.loop.time()
        late = await scene.newcomer()
        await scene.first_epoch(late, 60.0)
        await scene.end(3)
        member = scene.run.swarm.peer("p0")
        assert max(paces(member, came, scene.loop.time())) < 1.25 * EPOCH_S
        await scene.run.close()

    sim.run(main, seed=13)


def test_a_follower_waits_in_vain_for_a_step_that_its_member_is_about_to_take() -> None:
    """The round was committed before it followed, and its member's trainer is in a long batch: nobody told it the step.

    It took the state before that step, and waited for the step for two seconds. Now it waits for the state after it.
    """

    async def main() -> None:
        run, loop = Run(target=8), asyncio.get_running_loop()
        slow, fast = await run.add("p0"), await run.add("p1", client_mode=True)
        await sim.sleep(3.0)
        for act in (lambda trainer: trainer.take_batch(4), lambda trainer: trainer.finish_epoch(1)):
            await asyncio.gather(*(run.swarm.run_on(name, act, run.swarm.peer(name)) for name in ("p0", "p1")))
        batch = loop.create_task(run.swarm.run_on("p0", slow.take_batch, 4, duration_s=10.0))
        await sim.sleep(0.1)
        while fast.participant.epoch < 2:  # it leaves the other one time for a batch
            await run.swarm.run_on("p1", fast.take_batch, 4, duration_s=0.5)
        assert (fast.participant.epoch, slow.participant.epoch) == (2, 1)
        late = await run.add("late", seed=1)
        catching_up = loop.create_task(run.swarm.run_on("late", late.finish_epoch, 2))
        await batch
        stepped_at = loop.time()
        await catching_up
        assert loop.time() < stepped_at + 1.0
        assert run.agree(["p0", "late"])
        await run.close()

    sim.run(main, seed=12)


def test_a_step_alone_was_followed_with_the_gradients_of_other_tensors() -> None:
    """Tensors of one codec lie together in a vector: what a follower got was in the order of the parameters."""
    codecs = [Float16Compression(), NoCompression(), Float16Compression()]

    def vector(*values: float) -> Vector:
        tensors = [torch.full((4,), value) for value in values]
        return Vector(tensors, describe(tensors, codecs))

    name, agreement = StateName.genesis(b""), Agreement(None, b"", [])
    step = of_step_alone(name, bytes(16), b"peer", 8, vector(1.0, 2.0, 3.0), agreement)
    follower = vector(0.0, 0.0, 0.0)
    land(step.header, memoryview(step.data), follower)
    follower.overwrite()
    assert [each.tolist() for each in follower.tensors] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_a_newcomer_on_a_line_of_8_kb_a_second_takes_part() -> None:
    """Its state comes from one of three donors, beside all other traffic, in minutes; it never had one."""

    async def main() -> None:
        scene = Scene(MIB / 16 / 8e3, MIB // 16, batch_s=1.0)
        await scene.begin()
        late = await scene.newcomer()
        await scene.first_epoch(late, 300.0)
        assert len(late.participant.takeover.downloads) == 1
        names = await scene.end(3)
        assert scene.run.agree(names)
        await scene.run.close()

    sim.run(main, seed=15)


class SlowStream:
    """What comes on a line of 8 kB/s."""

    async def readinto(self, buffer: memoryview) -> None:
        await sim.sleep(buffer.nbytes / 8e3)


def test_a_piece_of_a_step_that_took_longer_than_30_s_cost_its_sender_the_place() -> None:
    """Bytes came all the time: 256 KiB at 8 kB/s."""

    async def main() -> None:
        scene = Scene()
        await scene.begin(["p0"])
        core = scene.run.swarm.peer("p0").participant.core
        following = Following(core, "run", lambda _: Vector([], describe([], [])), max_bytes=MIB)
        source = _Source(core.endpoint.contact)
        stream: Any = SlowStream()
        source.stream = stream
        header = StepTaken(0, b"d" * 32, 0, b"", None, [], 0, b"", 0, raw=True, nbytes=MIB)
        now = scene.loop.time()
        coming = following._coming[b"d" * 32] = _Coming(Step(header, bytearray(MIB)), source, now, now)
        await following._receive(source, StepBytes(b"d" * 32, 0), MIB // 4)
        assert coming.received == MIB // 4
        assert coming.at == scene.loop.time() > now + 30.0
        await scene.run.close()

    sim.run(main, seed=13)
