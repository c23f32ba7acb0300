"""Nobody steps alone before it has looked for the others, and nobody does so in silence."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal import sim
from shoal.averaging.core import PeerCore
from shoal.events import Event, SteppedAlone, Warned
from shoal.protocol.identity import Identity
from shoal.run.solitude import Circumstances
from shoal.sim import SimHost
from shoal.sim.loop import world_time
from shoal.strategies import Decoupled
from tests.sim.averaging_kit import start_core
from tests.sim.optimizer_kit import Run, Trainer


def notes(trainer: Trainer) -> tuple[list[int], list[str]]:
    """The epochs that it makes alone, and what it warns of that, from now on."""
    alone, warned = list[int](), list[str]()

    def note(event: Event) -> None:
        if isinstance(event, SteppedAlone):
            alone.append(event.epoch)
        elif isinstance(event, Warned) and "training alone" in event.message:
            warned.append(event.message)

    trainer.participant.core.env.events.subscribe(note)
    return alone, warned


def until(time_s: float) -> Callable[[], bool]:
    """Whether it is so late."""
    loop = asyncio.get_running_loop()
    return lambda: world_time(loop) > time_s


async def three_of_which_one_parts(after_s: float, end_s: float) -> tuple[Run, list[int], list[str], list[Any]]:
    """Three peers train until `end_s`; the line of "p2" is down from `after_s` on. Its notes, and their tasks."""
    run = Run(target=24)
    names = ["p0", "p1", "p2"]
    for name in names:
        await run.add(name)
    alone, warned = notes(run.swarm.peer("p2"))
    tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=1.0, until=until(end_s))) for n in names]
    await sim.sleep(after_s)
    run.swarm.partition([["p0", "p1"], ["p2"]])
    return run, alone, warned, tasks


def test_a_newcomer_whose_entry_dies_says_that_it_is_alone_and_goes_on_looking() -> None:
    """Its only entry was killed 0.3 s after it had joined; it trained alone to the end, without a word."""

    async def main() -> None:
        run = Run(target=16)
        await run.add("entry")
        newcomer = await run.add("newcomer")
        alone, warned = notes(newcomer)
        await sim.sleep(0.3)
        run.swarm.crash("entry")
        training = run.swarm.spawn("newcomer", newcomer.train(4, duration_s=1.0, until=until(90.0)))
        await sim.sleep(25.0)
        assert alone[:3] == [1, 2, 3]
        assert len(warned) == 1
        assert "'run'" in warned[0]
        assert "none of its initial peers answers" in warned[0]
        again = await run.swarm.restart("entry")
        back = run.swarm.spawn("entry", again.train(4, duration_s=1.0, until=until(90.0)))
        await asyncio.wait([training, back])
        assert again.participant.epoch > alone[-1] + 5
        assert len(warned) == 1
        await run.close()

    sim.run(main, seed=31)


def test_a_peer_says_once_that_it_is_alone_with_all_fragments_of_its_model() -> None:
    """Each said it, by a name of a run that the user does not know; all but the first blamed the invite for that."""

    async def main() -> None:
        run, strategy = Run(target=1), Decoupled(4, fragments=2, quorum=1)
        await run.add("entry", strategy=strategy)
        newcomer = await run.add("newcomer", strategy=strategy)
        _, warned = notes(newcomer)
        await sim.sleep(0.3)
        run.swarm.crash("entry")
        work = newcomer.train(4, duration_s=1.0, until=until(30.0))
        await run.swarm.run_on("newcomer", lambda: work)
        assert [message.partition(":")[0] for message in warned] == ["run 'run'"]
        await run.close()

    sim.run(main, seed=31)


def test_a_peer_that_wakes_looks_for_the_others_before_it_steps() -> None:
    """It slept for longer than what it had heard counts, and would find itself alone with its samples."""

    async def main() -> None:
        run = Run(target=24)
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name)
        sleeper = run.swarm.peer("p2")
        alone, warned = notes(sleeper)
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=1.0, until=until(95.0))) for n in names]
        await sim.sleep(4.0)
        run.swarm.stall("p2", 70.0)
        await asyncio.wait(tasks)
        assert not alone
        assert not warned
        assert sleeper.participant.epoch > 20  # it has taken the state that the others have made meanwhile
        await run.close()

    sim.run(main, seed=32)


def test_a_peer_that_lost_its_links_looks_for_the_others_before_it_steps() -> None:
    """Its line was down for a minute, and its first batch after that would be a step of its own."""

    async def main() -> None:
        run = Run(target=24)
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name)
        back = run.swarm.peer("p2")
        alone, _ = notes(back)
        tasks = [run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=1.0, until=until(90.0))) for n in names[:2]]
        await run.swarm.run_on("p2", back.train, 4, duration_s=1.0, until=until(10.0))
        run.swarm.partition([["p0", "p1"], ["p2"]])
        await sim.sleep(60.0)
        assert len(back.participant.view().peers) == 1
        run.swarm.heal()
        await run.swarm.run_on("p2", back.take_batch, 24)
        assert not alone
        await sim.sleep(2.0)
        await run.swarm.run_on("p2", back.train, 4, duration_s=1.0, until=until(90.0))
        await asyncio.wait(tasks)
        assert not alone
        assert back.participant.epoch >= run.swarm.peer("p0").participant.epoch - 1
        await run.close()

    sim.run(main, seed=33)


def test_a_line_that_is_down_is_told_once() -> None:
    """The peer is alone meanwhile, and with the others again when it can."""

    async def main() -> None:
        run, alone, warned, tasks = await three_of_which_one_parts(4.0, 75.0)
        await sim.sleep(40.0)
        assert len(warned) == 1
        run.swarm.heal()
        await sim.sleep(20.0)
        last = alone[-1]
        await asyncio.wait(tasks)
        assert alone[-1] == last
        assert len(warned) == 1
        await run.close()

    sim.run(main, seed=33)


def test_steps_alone_for_a_few_seconds_are_no_warning() -> None:
    """It cried wolf: peers that start together, or whose line is down for a moment, find each other soon."""

    async def main() -> None:
        run, alone, warned, tasks = await three_of_which_one_parts(5.0, 60.0)
        await sim.sleep(16.0)
        run.swarm.heal()
        await asyncio.wait(tasks)
        assert alone
        assert not warned
        assert run.swarm.peer("p2").participant.epoch >= run.swarm.peer("p0").participant.epoch - 1
        await run.close()

    sim.run(main, seed=33)


@pytest.mark.parametrize("how", ["dies", "leaves", "ends"])
def test_who_ends_a_run_alone_after_steps_with_others_says_so(how: str) -> None:
    """A program that was frozen while the others ended the run made the last steps alone, and held other weights.

    If the other one leaves in the middle of the run, it has ended nothing.
    """

    async def main() -> None:
        run = Run(target=8)
        for name in ("p0", "p1"):
            await run.add(name)
        trainer, told = run.swarm.peer("p1"), list[str]()

        def note(event: Event) -> None:
            if isinstance(event, Warned) and "made its steps alone" in event.message:
                told.append(event.message)

        trainer.participant.core.env.events.subscribe(note)
        await sim.sleep(3.0)
        run.announce_end(12)
        tasks = {
            n: run.swarm.spawn(n, run.swarm.peer(n).train(4, duration_s=0.5, until=until(60.0))) for n in ("p0", "p1")
        }
        while trainer.participant.epoch < 6:
            await sim.sleep(0.5)
        if how == "ends":
            run.swarm.stall("p1", 40.0)
            await asyncio.wait([tasks["p0"]])
        if how != "dies":
            await run.swarm.run_on("p0", run.swarm.peer("p0").participant.close)
        run.swarm.crash("p0")
        await asyncio.wait([tasks["p1"]])
        assert trainer.finished
        assert len(told) == (how != "leaves")
        assert all(re.search(r"ended at epoch 12, and after epoch [5-8] ", message) for message in told)
        await run.close()

    sim.run(main, seed=33)


@pytest.mark.parametrize(
    ("epoch", "told"), [(3, "after epoch [3-5] this peer made its steps alone"), (0, "training alone")]
)
def test_who_comes_when_the_others_are_about_to_leave_ends_the_run_alone_and_says_so(epoch: int, told: str) -> None:
    """It took the last steps, or all of them, in less than 20 s, and held other weights in silence."""

    async def main() -> None:
        run = Run(target=8)
        first = await run.add("p0")
        await run.swarm.run_on("p0", lambda: first.train(4, duration_s=0.2, until=lambda: first.participant.epoch >= 3))
        if not epoch:
            await first.participant.close()  # its DHT is still there
        events = list[Event]()
        trainer = await run.add("p1", seed=1, events=events.append)
        await sim.sleep(3.0)
        await run.swarm.run_on(
            "p1", lambda: trainer.train(4, duration_s=0.2, until=lambda: trainer.downloads == (epoch > 0))
        )
        if epoch:
            run.swarm.crash("p0")
        trainer.participant.announce_end(12)
        await run.swarm.run_on("p1", lambda: trainer.train(4, duration_s=0.2, until=lambda: False))
        assert trainer.participant.epoch == 12
        (warned,) = [event.message for event in events if isinstance(event, Warned)]
        assert re.search(told, warned)
        await run.close()

    sim.run(main, seed=33)


def test_who_was_given_nobody_trains_alone_without_a_warning() -> None:
    """The first peer of a network: it is an event, and all as it should be."""

    async def main() -> None:
        run = Run(target=8)
        trainer = await run.add("p0")
        alone, warned = notes(trainer)
        for number in range(6):
            await run.swarm.run_on("p0", trainer.take_batch, 4, number=number)
        assert alone == [1, 2, 3]
        assert not warned
        await run.close()

    sim.run(main, seed=34)


async def entered(run: Run) -> None:
    """Begin with a peer that only introduces the others, as `shoal dht` does."""

    async def factory(host: SimHost) -> PeerCore:
        run._first = host
        return await start_core(host, None)

    await run.swarm.start_peer("entry", factory)  # type: ignore[arg-type]


def test_two_clients_with_only_an_entry_between_say_so() -> None:
    """Each sees the other in the DHT and nobody can be dialed: within 30 s both say it, and what is to be done."""

    async def main() -> None:
        run = Run(target=16)
        await entered(run)
        notices = {}
        for name in ("a", "b"):
            notices[name] = notes(await run.add(name, client_mode=True))
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=1.0, until=until(60.0)))
        await sim.sleep(30.0)
        for _, warned in notices.values():
            (text,) = warned
            assert "(it only dials)" in text
            assert "open a port at one of the others" in text
            assert "let two machines that all can reach help, each with a shoal.Optimizer(auxiliary=True)" in text
        assert all(run.swarm.peer(name).participant.progress().alone for name in notices)

    sim.run(main, seed=35)


def test_a_run_of_another_name_than_the_invites_is_told() -> None:
    """It trains by itself under a name that nobody else has."""

    async def main() -> None:
        run = Run(target=400)
        await entered(run)
        trainer = await run.add("a")
        trainer.participant.core.invited_to = frozenset({"theirs"})
        _, warned = notes(trainer)
        run.swarm.spawn("a", trainer.train(4, duration_s=1.0, until=until(60.0)))
        await sim.sleep(30.0)
        assert len(warned) == 1
        assert "its invite is for run 'theirs'" in warned[0]

    sim.run(main, seed=36)


def test_peers_that_cannot_be_reached_are_named_with_the_reason() -> None:
    """The others are there, as the DHT says, and no answer comes from where they listen."""

    async def main() -> None:
        run = Run(target=4000)
        await entered(run)
        for name in ("p0", "p1"):
            await run.add(name)
            run.swarm.network.wall(name, refuses=True)
        run.swarm.network.wall("newcomer")
        newcomer = await run.add("newcomer")
        _, warned = notes(newcomer)
        run.swarm.spawn("newcomer", newcomer.train(4, duration_s=1.0, until=until(60.0)))
        await sim.sleep(30.0)
        assert len(warned) == 1
        assert "other peers of the run are there" in warned[0]
        assert "refused" in warned[0]

    sim.run(main, seed=37)


def test_a_peer_that_listens_for_its_own_machine_only_is_told_so() -> None:
    """Its first peer is elsewhere, and the other one of the run only dials: nobody can come to it."""

    async def main() -> None:
        run = Run(target=400)
        await entered(run)
        await run.add("client", client_mode=True)
        run.swarm.network.wall("mine.localhost", refuses=True)
        newcomer = await run.add("mine.localhost")
        _, warned = notes(newcomer)
        run.swarm.spawn("mine.localhost", newcomer.train(4, duration_s=1.0, until=until(60.0)))
        await sim.sleep(30.0)
        (text,) = warned
        assert "it listens for its own machine only, and its initial peers are elsewhere" in text
        assert "host_maddrs='/ip4/0.0.0.0/tcp/PORT'" in text

    sim.run(main, seed=39)


@pytest.mark.parametrize(("skew_s", "how"), [(7200.0, "7200 s ahead of"), (-5 * 3600.0, "18000 s behind")])
def test_a_peer_alone_whose_clock_is_hours_off_is_told_so(skew_s: float, how: str) -> None:
    """Among the reasons, with the difference from the peer that let it in, though a clock alone parts nobody."""

    async def main() -> None:
        run = Run(target=400)
        await entered(run)
        trainer = await run.add("a", skew_s=skew_s)
        _, warned = notes(trainer)
        run.swarm.spawn("a", trainer.train(4, duration_s=1.0, until=until(60.0)))
        await sim.sleep(30.0)
        (text,) = warned
        assert f"the clock here is {how} those of the others: set it" in text

    sim.run(main, seed=40)


CALM = Circumstances(
    run_id="run",
    unreached={},
    elsewhere=0,
    given_peers=True,
    connected=True,
    client=False,
    begun_anew=None,
    only_here=False,
    clock_ahead_s=0.0,
    invited_to=("run",),
    mismatch=None,
)


def test_each_reason_says_what_to_check() -> None:
    """One sentence for each thing that is seen to be wrong; if nothing is, all that may be."""
    peer = Identity.from_seed(b"x" * 32).peer_id
    cases = [
        (replace(CALM, clock_ahead_s=7200.0), "the clock here is 7200 s ahead of"),
        (replace(CALM, clock_ahead_s=-60.0), "the clock here is 60 s behind"),
        (replace(CALM, connected=False), "none of its initial peers answers"),
        (replace(CALM, unreached={peer: "refused"}), f"{peer.short()} (refused)"),
        (replace(CALM, only_here=True), "listens for its own machine only"),
        (replace(CALM, mismatch="lr is 1 here and 2 there"), "with other settings: lr is 1 here"),
        (replace(CALM, invited_to=("other",)), "its invite is for run 'other'"),
        (CALM, "`shoal doctor INVITE`"),
        (
            replace(CALM, client=True, begun_anew=(9, 4)),
            "are at epoch 4 only, and have not taken the state of this client",
        ),
        (replace(CALM, elsewhere=1), "1 other peer of the run is at other states"),
        (replace(CALM, elsewhere=2), "2 other peers of the run are at other states"),
    ]
    for circumstances, sentence in cases:
        (reason,) = circumstances.reasons()
        assert sentence in reason
    assert not replace(CALM, given_peers=False).expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("before_s", [0.5, 6.0])
@pytest.mark.parametrize(
    "ends", ["crashed", "vanished", "other settings", "vanished, other settings", "clients vanished", "clients crashed"]
)
def test_what_a_run_that_is_over_left_delays_a_new_one_by_two_seconds_at_most(ends: str, before_s: float) -> None:
    """Its records lie in the DHT for twenty seconds; who wrote them gives no answer, or cannot be asked."""

    async def first_epoch(left: bool) -> float:
        run = Run(target=16)
        await entered(run)
        if left:
            for name in ("a", "b"):
                trainer = await run.add(name, client_mode="clients" in ends)
                run.swarm.spawn(name, trainer.train(8, duration_s=1.0, until=until(1e9)))
            await sim.sleep(5.0)
            assert "clients" in ends or run.swarm.peer("a").participant.epoch > 1
            for name in ("a", "b"):
                (run.swarm.vanish if "vanished" in ends else run.swarm.crash)(name)
            await sim.sleep(before_s)
        loop = asyncio.get_running_loop()
        changes: dict[str, Any] = {"fingerprint": {"lr": "another"}} if "other settings" in ends else {}
        newcomer = await run.add("newcomer", **changes)
        began = loop.time()  # before that the DHT may have waited for its own dead
        run.swarm.spawn("newcomer", newcomer.train(8, duration_s=1.0, until=until(1e9)))
        while not newcomer.epochs:
            await sim.sleep(0.05)
        assert newcomer.epochs[0][1] == 1
        return newcomer.epochs[0][0] - began

    times = [sim.run(lambda left=left: first_epoch(left), seed=38) for left in (False, True)]  # type: ignore[misc]
    assert times[1] <= times[0] + 2.0, times


def test_a_client_whose_only_companion_trains_no_more_goes_on_alone_and_says_so() -> None:
    """The companion's process lives, and its trainer stands still. When it trains again it takes the client's state."""

    async def main() -> None:
        run, told = Run(target=8), list[str]()
        first = await run.add("p0")
        client = await run.add(
            "p1",
            client_mode=True,
            events=lambda event: told.append(event.message) if isinstance(event, Warned) else None,
        )
        await sim.sleep(3.0)
        run.swarm.spawn("p1", client.train(4, duration_s=0.5, until=until(200.0)))
        await run.swarm.run_on("p0", first.train, 4, duration_s=0.5, until=lambda: first.participant.epoch >= 5)
        await sim.sleep(60.0)
        (text,) = told
        assert "training alone" in text
        assert "are at epoch 5 only, and have not taken the state of this client" in text
        assert "look whether their training stands still" in text
        before = client.participant.state
        assert before.epoch > 20
        await run.swarm.run_on("p0", first.train, 4, duration_s=0.5, until=until(90.0))
        assert first.participant.state.samples > before.samples
        assert abs(first.participant.epoch - client.participant.epoch) <= 1
        assert len(told) == 1
        await run.close()

    sim.run(main, seed=2)


def test_clients_keep_what_they_have_trained_if_the_only_peer_that_can_be_dialed_begins_anew() -> None:
    """They took its blank state as soon as they had stepped alone, and the run was lost. It takes theirs."""

    async def main() -> None:
        run = Run(target=24)
        names = ["server", "c1", "c2"]
        await run.add("server")
        for name in names[1:]:
            await run.add(name, client_mode=True)
        for name in names:
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=1.0, until=until(200.0)))
        await sim.sleep(30.0)
        before = run.swarm.peer("c1").participant.state
        run.swarm.crash("server")
        await sim.sleep(5.0)
        again = await run.swarm.restart("server")
        run.swarm.spawn("server", again.train(4, duration_s=1.0, until=until(200.0)))
        for _ in range(10):
            await sim.sleep(1.0)
            assert all(run.swarm.peer(name).participant.epoch >= before.epoch for name in names[1:])
        await sim.sleep(30.0)
        assert all(run.swarm.peer(name).participant.state.samples > before.samples for name in names)
        assert run.swarm.peer("server").participant.contribution.contributed > 40
        await run.close()

    sim.run(main, seed=31)


def test_a_peer_that_stood_still_over_the_end_of_a_run_with_a_quorum_ends() -> None:
    """The others had ended the run and left: it waited for a quorum for ever."""

    async def main() -> None:
        run, strategy = Run(target=1), Decoupled(4, fragments=2, quorum=2)
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name, strategy=strategy)
        run.announce_end(6)

        async def train(name: str) -> None:
            await run.swarm.peer(name).train(4, duration_s=0.5, until=until(300.0))
            if name != "p2":
                for fragment in run.swarm.peer(name).fragments:
                    await fragment.close()

        tasks = {name: run.swarm.spawn(name, train(name)) for name in names}
        while run.swarm.peer("p2").participant.epoch < 5:
            await sim.sleep(0.1)
        run.swarm.stall("p2", 8.0)
        await asyncio.wait(tasks.values(), timeout=100.0)
        assert all(task.done() for task in tasks.values())
        assert run.swarm.peer("p2").participant.epoch == 6
        await run.close()

    sim.run(main, seed=5)
