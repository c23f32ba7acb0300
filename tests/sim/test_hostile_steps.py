"""A peer that is followed may lie about its steps, or never send them: that costs it its place, and nobody the run."""

from __future__ import annotations

import asyncio
import gc
import math
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from shoal import sim
from shoal.errors import PeerError, PeerRefused
from shoal.events import Event, PeerDropped
from shoal.optim import Participant
from shoal.protocol.wire import (
    FollowSteps,
    GetManifest,
    ManifestPending,
    StepBytes,
    StepsFrom,
    StepTaken,
    WantStep,
    encode,
)
from shoal.rpc import Stream
from shoal.run.decide.agreement import Agreement, Contributor
from shoal.run.join import step_feed
from shoal.run.join.step_feed import KEPT, MAX_FOLLOWERS, MOST_KEPT
from shoal.run.join.steps import Step
from shoal.strategies import DiLoCo
from shoal.train.options import Options, options_of
from tests.sim.optimizer_kit import Run
from tests.sim.test_hostile_words import Liar, liar
from tests.situations import reaches

BATCH = 4


def step_of(stranger: Liar, victim: Participant, *, later: int = 0, **options: float) -> StepTaken:
    """A step that leads on from where the victim stands; the stranger says that it has taken it alone.

    It says that this is so many epochs later than it is.
    """
    said, peer = options_of(victim.training.optimizer.param_groups), stranger.core.peer_id
    values: dict[str, Any] = {**said.values, **{name: [value] for name, value in options.items()}}
    said = Options(said.groups, values)
    return StepTaken(
        *victim.own.name._replace(epoch=victim.own.name.epoch + later),
        agreement=encode(Agreement(said, b"", [Contributor(peer, 8)])),
        commit=None,
        shares=[],
        tile_bytes=0,
        alone=b"c" * 16 + peer.to_bytes(),
        alone_samples=8,
        raw=True,
        nbytes=sum(each.nbytes for each in victim.training.averaged),
    )


async def lead_on(
    stranger: Liar,
    victim: Participant,
    data: bytes | None,
    pause_s: float = 0.0,
    *,
    later: int = 0,
    **options: float,
) -> None:
    """Let the victim follow a stranger, which tells it of a step, and gives no state.

    It sends this byte again and again as the averages, each after a pause if there is one; None: nothing.
    """

    async def serve(stream: Stream[Any, Any], opening: FollowSteps) -> None:
        step = step_of(stranger, victim, later=later, **options)
        await stream.send(StepsFrom(*victim.own.name))
        await stream.send(step)
        while (asked := await stream.recv()) is not None:
            size = 1 if pause_s else step.nbytes
            for offset in range(0, step.nbytes if data is not None else 0, size):
                await stream.send(StepBytes(asked[0].digest, offset), memoryview((data or b"") * size))
                await sim.sleep(pause_s)

    endpoint = stranger.core.endpoint
    endpoint.serve_stream(FollowSteps, serve, scope="run")
    endpoint.serve(GetManifest, lambda peer, request: ManifestPending(busy=True), scope="run_state")


async def followed_liar(dropped: list[str]) -> tuple[Liar, Participant, list[asyncio.Task[Any]]]:
    """Two peers train, and a stranger comes that one of them follows as it would a contributor.

    Args:
        dropped: gets the reasons for which that one drops peers while it catches up.

    Returns:
        The stranger, the one that follows it, and the two that train.
    """

    def note(event: Event) -> None:
        if isinstance(event, PeerDropped) and event.where == "catching up":
            dropped.append(event.reason)

    run = Run(target=1)
    for name in ("p0", "p1"):
        await run.add(name, strategy=DiLoCo(4), events=note if name == "p0" else None)
    await sim.sleep(3.0)
    tasks = [
        run.swarm.spawn(name, trainer.train(BATCH, duration_s=0.5, until=lambda: False))
        for name, trainer in run.trainers.items()
    ]
    await sim.sleep(6.0)
    stranger, victim = await liar(run, "liar"), run.trainers["p0"].participant
    lied_to: Any = victim._known
    lied_to._heed = lied_to._heed_all  # it is followed as a contributor would be
    return stranger, victim, tasks


def test_a_followed_step_from_the_right_digest_and_another_epoch_renamed_a_peer() -> None:
    """It was at a state then that nobody else could have: those of its digest meet under another epoch."""
    dropped = list[str]()

    async def main() -> None:
        stranger, victim, _ = await followed_liar(dropped)
        await lead_on(stranger, victim, b"\0", later=500)
        epoch = victim.epoch
        await stranger.say(victim, epoch=epoch + 1000, digest=b"x" * 32)
        await sim.sleep(40.0)
        assert dropped == ["its step leads on from a state that has another epoch, or other samples"]
        assert epoch + 2 < victim.epoch < epoch + 100

    sim.run(main, seed=3)


@pytest.mark.parametrize("wrong", ["averages", "options"])
def test_a_followed_step_that_cannot_be_taken_ended_the_program(wrong: str) -> None:
    """NaN, or a momentum that makes NaN: the error was raised in the trainer of every peer. Its giver is dropped."""
    dropped = list[str]()

    async def main() -> None:
        stranger, victim, tasks = await followed_liar(dropped)
        if wrong == "averages":
            await lead_on(stranger, victim, b"\xff")
        else:
            await lead_on(stranger, victim, b"\0", momentum=math.inf)
        epoch = victim.epoch
        await stranger.say(victim, epoch=epoch + 1000, digest=b"x" * 32)
        await sim.sleep(40.0)
        assert not any(task.done() for task in tasks)
        assert dropped
        assert all("not finite" in reason for reason in dropped)
        assert victim.epoch > epoch + 2

    with reaches(*(["a step that was fetched cannot be taken"] if wrong == "averages" else [])):
        sim.run(main, seed=3)


@pytest.mark.parametrize("pause_s", [0.0, 2.0], ids=["silent", "slow"])
def test_a_newcomer_waited_for_ever_for_the_step_of_a_peer_that_it_followed(pause_s: float) -> None:
    """The only one that names the best state sends nothing of a step, or little: the state of the others is taken."""

    async def main() -> None:
        run = Run(target=1)
        for name in ("p0", "p1"):
            await run.add(name, strategy=DiLoCo(8))
        await sim.sleep(3.0)
        for name, trainer in run.trainers.items():
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=1.0, until=lambda: False))
        await sim.sleep(12.0)
        new, stranger = await run.add("new", seed=9, strategy=DiLoCo(8)), await liar(run, "liar")
        await lead_on(stranger, new.participant, b"\0" if pause_s else None, pause_s)
        await stranger.say(new.participant, epoch=1000, digest=b"x" * 32)
        run.swarm.spawn("new", new.train(BATCH, duration_s=1.0, until=lambda: False))
        began = asyncio.get_running_loop().time()
        while not new.participant.epoch:
            assert asyncio.get_running_loop().time() < began + 20.0
            await stranger.say(new.participant, epoch=1000, digest=b"x" * 32)
            await sim.sleep(1.0)

    sim.run(main, seed=3)


def test_one_host_kept_all_others_from_following() -> None:
    """Under however many keys, and as long as it likes: a quarter of the places is for others."""

    async def main() -> None:
        run = Run(target=1)
        first = await run.add("p0", strategy=DiLoCo(4))
        stranger, other = await liar(run, "liar"), await liar(run, "other")
        contact, opening = first.participant.core.endpoint.contact, FollowSteps("run")
        for _ in range(MAX_FOLLOWERS):
            await stranger.core.endpoint.open(contact, opening, timeout_s=5.0)
        stream = await other.core.endpoint.open(contact, opening, timeout_s=5.0)
        received = await stream.recv()
        assert received is not None
        assert isinstance(received[0], StepsFrom)

    sim.run(main, seed=3)


def test_followers_that_fetch_nothing_kept_all_places() -> None:
    """From two sites and more they had all sixteen, for ever: nobody could catch up. Now each makes way in seconds."""

    async def main() -> None:
        run = Run(target=1)
        first = await run.add("p0", strategy=DiLoCo(4))
        await run.add("p1", strategy=DiLoCo(4))
        idle, other = [await liar(run, f"liar{number}") for number in range(3)], await liar(run, "other")
        contact, opening = first.participant.core.endpoint.contact, FollowSteps("run")
        for number in range(MAX_FOLLOWERS):
            await idle[number % 3].core.endpoint.open(contact, opening, timeout_s=5.0)
        for name, trainer in run.trainers.items():
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=0.25, until=lambda: False))
        began = asyncio.get_running_loop().time()
        while True:
            assert asyncio.get_running_loop().time() < began + 30.0
            stream = await other.core.endpoint.open(contact, opening, timeout_s=5.0)
            try:
                received = await stream.recv()
                break
            except PeerRefused:
                await sim.sleep(1.0)
        assert received is not None
        assert isinstance(received[0], StepsFrom)

    with reaches("a follower that fetches nothing makes way"):
        sim.run(main, seed=3)


@pytest.mark.parametrize(("spare", "most"), [(256 << 20, MOST_KEPT), (20 << 20, KEPT + 1), (1 << 20, KEPT)])
def test_followers_that_read_slowly_held_a_copy_of_a_step_each(
    monkeypatch: pytest.MonkeyPatch, spare: int, most: int
) -> None:
    """24 of them held 45 copies: all share the few that are kept, and nothing is left once they are gone.

    Four copies of a small step, two of one that takes more than the bytes that there are for such followers.
    """
    monkeypatch.setattr(step_feed, "SPARE_BYTES", spare)

    def alive() -> list[Step]:
        return [each for each in gc.get_objects() if isinstance(each, Step)]

    async def main() -> None:
        run, size, held = Run(target=1), 14 << 20, list[int]()
        first = await run.add("p0", strategy=DiLoCo(4))
        stranger, feed = await liar(run, "liar"), first.participant._steps
        contact = first.participant.core.endpoint.contact
        streams = [await stranger.core.endpoint.open(contact, FollowSteps("run"), timeout_s=5.0) for _ in range(6)]
        for stream in streams:
            assert await stream.recv() is not None  # where it stands
        for number, stream in enumerate(streams):  # each asks for another step, and reads none of it
            header = replace(step_of(stranger, first.participant), digest=bytes([number]) * 32, nbytes=size)
            with feed._whole():
                assert feed.kept_bytes <= (most - 1) * size  # before the next one is made
                feed._add(Step(header, bytearray(size)))
            while (received := await stream.recv()) is not None and received[0].digest != bytes([number]) * 32:
                assert isinstance(received[0], StepTaken)
            await stream.send(WantStep(bytes([number]) * 32))
            await sim.sleep(3.0)
            assert feed.kept_bytes <= most * size
            held.append(len(alive()))
        assert max(held) == most  # some that are no longer among the last were still being sent
        for stream in streams:
            stream.abort()
        await sim.sleep(5.0)
        assert alive() == []

    gc.collect()
    gc.disable()
    try:
        sim.run(main, seed=4)
    finally:
        gc.enable()


@pytest.mark.parametrize("what", ["wants", "is told"])
def test_a_follower_that_reads_nothing_has_few_steps_wait_for_it(what: str) -> None:
    """It is dropped at once when it is to be told of many. One that wants many is read no more, and dropped later."""

    async def main() -> None:
        run, size = Run(target=1), 14 << 20
        first = await run.add("p0", strategy=DiLoCo(4))
        stranger, feed = await liar(run, "liar"), first.participant._steps
        stream = await stranger.core.endpoint.open(
            first.participant.core.endpoint.contact, FollowSteps("run"), timeout_s=5.0
        )
        assert await stream.recv() is not None
        header = step_of(stranger, first.participant)
        with feed._whole():
            feed._add(Step(replace(header, digest=bytes(32), nbytes=size), bytearray(size)))
        await stream.send(WantStep(bytes(32)))
        await sim.sleep(3.0)
        assert len(feed._followers) == 1
        for number in range(1, 40):
            digest = bytes([number]) * 32
            if what == "wants":
                with suppress(PeerError):
                    await stream.send(WantStep(digest))
            else:
                feed._add(Step(replace(header, digest=digest, nbytes=1), bytearray(1)))
        await sim.sleep(3.0)
        assert sum(len(each._wanted) for each in feed._followers) == (17 if what == "wants" else 0)
        await sim.sleep(90.0)
        assert not feed._followers

    sim.run(main, seed=4)
