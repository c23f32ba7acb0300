"""The collaborative optimizer on simulated hosts: equality, late joiners, forks, failures, the end."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.averaging import StepResult
from shoal.base.peer import PeerID
from shoal.errors import ConfigError, RoundFailed, StateUnavailable
from shoal.events import Event, LocalValuesRejected, Warned
from shoal.run.decide.state_name import StateName
from shoal.run.participant import Participant
from shoal.run.post import Post
from shoal.sim import SimNetwork
from tests.sim.averaging_kit import seize
from tests.sim.optimizer_kit import Run, backward, gradient, make_optimizer, model, reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize(
    ("peers", "dtype"),
    [*((peers, torch.float64) for peers in (1, 3, 5)), (2, torch.float32)],
)
def test_a_run_equals_one_process_with_all_batches(peers: int, dtype: torch.dtype) -> None:
    """Invariant 7: k epochs of N peers are k steps on the mean gradient of all their batches, to rounding."""
    epochs, batches, size = 4, 2, 3

    async def main() -> list[list[torch.Tensor]]:
        run = Run(target=peers * batches * size, dtype=dtype)
        for peer in range(peers):
            await run.add(f"p{peer}")

        async def train(name: str) -> None:
            trainer = run.swarm.peer(name)
            for epoch in range(epochs):
                for number in range(batches):
                    await trainer.take_batch(size, number=epoch * batches + number, duration_s=0.1)
                await trainer.finish_epoch(epoch + 1)

        await sim.sleep(3.0)  # everybody has seen everybody
        names = [f"p{peer}" for peer in range(peers)]
        await asyncio.gather(*(run.swarm.run_on(name, train, name) for name in names))
        assert run.agree(names)
        assert not run.warnings, run.warnings
        trainers = [run.swarm.peer(name) for name in names]
        assert (
            all([samples for _, _, samples, _ in t.epochs] == [peers * batches * size] * epochs for t in trainers)
            or peers == 1
        )
        await run.close()
        return [[p.detach() for p in trainer.parameters] for trainer in trainers]

    results = sim.run(main, seed=peers)
    expected = reference(peers, epochs, batches, size, dtype)
    for got, want in zip(results[0], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype])


def test_a_view_of_the_swarm_changes_nothing() -> None:
    """It is a query: it ended waits for others, moved the phase, told the user things, and woke waiters."""

    async def main() -> None:
        run = Run(target=24)
        for name in ("p0", "p1", "p2"):
            await run.add(name)
        await sim.sleep(3.0)
        backward(run.trainers["p0"].parameters, 0, 0, 24)
        run.trainers["p0"].participant.training.accumulate(24)
        participant = run.trainers["p0"].participant
        course, outlook = participant.course, participant._outlook
        moves = course, course.machine, course.moves, participant.swarm_step, participant.states_average
        seen = outlook.companions, outlook.attendance, outlook.end, outlook.forerunners, participant.takeover.beginning
        pure: list[Any] = [*moves, *seen, participant._notices, participant._news, participant.speed, participant.own]

        def marks() -> str:
            plain = {name: value for name, value in vars(participant).items() if isinstance(value, int | float)}
            return repr([plain, *map(vars, pure)])

        before = marks()
        assert participant.view().done >= 24, "enough for a round"
        assert participant.view() == participant.view()
        assert participant.progress() == participant.progress()
        assert marks() == before
        participant._look()
        assert participant.turn.enough == (participant.view().done >= run.target)
        await run.close()

    sim.run(main)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.long), torch.bfloat16])
def test_a_run_in_sixteen_bits_ends_with_equal_parameters(dtype: torch.dtype) -> None:
    """Gradients are summed in float32 and sent in 16 bits: all step from the same bits."""

    async def main() -> None:
        run = Run(target=24, dtype=dtype, average_state_every=2)
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name)
        await sim.sleep(3.0)
        run.announce_end(5)
        await asyncio.gather(
            *(run.swarm.run_on(n, run.swarm.peer(n).train, 4, duration_s=0.2, until=lambda: False) for n in names)
        )
        assert run.agree(names)
        assert all(parameter.dtype is dtype for parameter in run.swarm.peer("p0").parameters)
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=25)


def test_alone_it_is_plain_torch() -> None:
    """One peer without a swarm: bit by bit what the torch optimizer does with the accumulated mean."""

    async def main() -> None:
        run = Run(target=8)
        trainer = await run.add("p0")
        for number in range(6):
            await run.swarm.run_on("p0", trainer.take_batch, 4, number=number)
        plain = model()
        optimizer, scheduler = make_optimizer(plain)
        for epoch in range(3):
            sums = [torch.zeros_like(p) for p in plain]
            for number in (2 * epoch, 2 * epoch + 1):
                backward(plain, 0, number, 4)
                for total, parameter in zip(sums, plain, strict=True):
                    total.add_(gradient(parameter), alpha=4.0)
            for total, parameter in zip(sums, plain, strict=True):
                parameter.grad = total.mul_(1 / 8)
            optimizer.step()
            scheduler.step()
        assert trainer.participant.epoch == 3
        assert all(torch.equal(a, b) for a, b in zip(trainer.parameters, plain, strict=True))
        await run.close()

    sim.run(main, seed=1)


def test_creating_it_touches_no_state() -> None:
    """No parameter and no optimizer statistic changes before the first swarm step."""

    async def main() -> None:
        run = Run(target=1000)
        trainer = await run.add("p0")
        assert all(torch.equal(a, b) for a, b in zip(trainer.parameters, model(), strict=True))
        assert not trainer.participant.training.optimizer.state
        await run.close()

    sim.run(main, seed=1)


def test_unequal_peers_train_and_a_late_one_downloads_the_state() -> None:
    """Peers of unequal speed stay together; a newcomer takes over parameters, statistics, epoch and schedule."""

    async def main() -> None:
        run = Run(target=64, average_state_every=3)
        loop = asyncio.get_running_loop()
        names = ["p0", "p1", "p2"]
        for name in names:
            await run.add(name)
        tasks = {
            name: run.swarm.spawn(
                name, run.swarm.peer(name).train(4, duration_s=0.1 * (i + 1), until=lambda: loop.time() > 40)
            )
            for i, name in enumerate(names)
        }
        await sim.sleep(10)
        before = run.swarm.peer("p0").participant.epoch
        assert before >= 3
        late = await run.add("late", seed=99)
        tasks["late"] = run.swarm.spawn("late", late.train(4, duration_s=0.1, until=lambda: loop.time() > 40))
        await sim.sleep(5)
        run.announce_end(run.swarm.peer("p0").participant.epoch + 6)
        await asyncio.wait(list(tasks.values()))
        names.append("late")
        assert late.downloads >= 1
        assert all(run.swarm.peer(name).participant.finished for name in names)
        assert run.agree(names), {n: run.swarm.peer(n).participant.state for n in names}
        rates = {run.swarm.peer(name).participant.training.optimizer.param_groups[0]["lr"] for name in names}
        assert len(rates) == 1
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=2)


@pytest.mark.parametrize("diverged", [None, float("nan"), float("inf")])
def test_a_newcomer_gets_masks_with_infinities_but_no_parameters_that_went_wrong(diverged: float | None) -> None:
    """A buffer of minus infinity is part of the state; who has lost its parameters gives its state to nobody."""

    async def main() -> None:
        run = Run(target=8)
        mask = torch.full((5, 5), float("-inf")).triu(1)
        donor = await run.add("donor", extra_tensors=[mask])
        for number in range(4):
            await donor.take_batch(8, number=number)
        await donor.finish_epoch(2)
        if diverged is not None:
            donor.parameters[0].data[0, 0] = diverged
            donor.participant.training.weights.note()  # as if a step had done it
        mine = torch.zeros(5, 5)
        late = await run.add("late", seed=99, extra_tensors=[mine])
        before = late.parameters[0].clone()
        await sim.sleep(5.0)
        await late.take_turn()
        if diverged is None:
            assert late.downloads == 1
            assert torch.equal(mine, mask)
            assert run.agree(["donor", "late"])
        else:
            assert late.downloads == 0
            assert "tensor 0 of the state holds" in late.failed_downloads[0]
            assert torch.equal(late.parameters[0], before)
        await run.close()

    sim.run(main, seed=6)


def test_a_crash_costs_no_epoch_and_nobody_steps_alone() -> None:
    """When a peer dies, the survivors go on with what they have; all states stay equal."""

    async def main() -> None:
        run = Run(target=48)
        loop = asyncio.get_running_loop()
        names = ["p0", "p1", "p2", "p3"]
        for name in names:
            await run.add(name)
        tasks = [
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.2, until=lambda: loop.time() > 60))
            for name in names
        ]
        await sim.sleep(8)
        run.swarm.crash("p0")
        await sim.sleep(6)
        run.swarm.crash("p2")
        await sim.sleep(6)
        left = ["p1", "p3"]
        run.announce_end(run.swarm.peer("p1").participant.epoch + 3)
        await asyncio.wait(tasks)
        assert all(run.swarm.peer(name).participant.finished for name in left)
        assert run.agree(left)
        times = [at for at, _, _, _ in run.swarm.peer("p1").epochs]
        assert max(b - a for a, b in itertools.pairwise(times)) < 6.0
        assert all(samples >= 48 for trainer in run.swarm.peers.values() for _, _, samples, _ in trainer.epochs)
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.long(full=True)) for each in (1, 2, 3))])
def test_different_beginnings_become_one_state(seed: int) -> None:
    """Peers that begin with different parameters: one genesis wins, everybody else downloads it."""

    async def main() -> None:
        run = Run(target=32)
        loop = asyncio.get_running_loop()
        names = ["p0", "p1", "p2"]
        for i, name in enumerate(names):
            await run.add(name, seed=10 + i)
        tasks = [
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.2, until=lambda: loop.time() > 60))
            for name in names
        ]
        await sim.sleep(20)
        run.announce_end(run.swarm.peer("p2").participant.epoch + 4)
        await asyncio.wait(tasks)
        assert run.agree(names), {n: run.swarm.peer(n).participant.state for n in names}
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=seed)


def test_a_partition_forks_and_heals_to_the_better_branch() -> None:
    """Both sides go on alone; when they see each other again, everybody ends at one state."""

    async def main() -> None:
        run = Run(target=20)
        loop = asyncio.get_running_loop()
        names = ["p0", "p1", "p2", "p3", "p4"]
        for name in names:
            await run.add(name)
        tasks = [
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=1.0, until=lambda: loop.time() > 150))
            for name in names
        ]
        await sim.sleep(6)
        run.swarm.partition([["p0", "p1"], ["p2", "p3", "p4"]])
        await sim.sleep(15)
        sides = [run.swarm.peer("p0").participant.state, run.swarm.peer("p2").participant.state]
        assert sides[0].digest != sides[1].digest
        run.swarm.heal()
        await sim.sleep(20)
        best = max(run.swarm.peer(name).participant.epoch for name in names)
        run.announce_end(best + 4)
        await asyncio.wait(tasks)
        assert run.agree(names), {n: run.swarm.peer(n).participant.state for n in names}
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=5)


def test_a_batch_that_is_not_finite_costs_that_batch_and_is_told() -> None:
    """Once as a warning, and each time as an event; what was accumulated before stays."""

    async def main() -> None:
        run = Run(target=12)
        trainer = await run.add("p0")
        events: list[object] = []
        trainer.participant.core.env.events.subscribe(events.append)
        await run.swarm.run_on("p0", trainer.take_batch, 4)
        for number in (1, 2):
            for parameter in trainer.parameters:
                parameter.grad = torch.full_like(parameter, torch.nan)
            assert not trainer.participant.training.accumulate(4)
            await sim.sleep(2.0)
            assert len([event for event in events if isinstance(event, LocalValuesRejected)]) == number
        (warning,) = [event.message for event in events if isinstance(event, Warned)]
        assert warning.startswith(
            "1 batch was left out, because gradients are not finite, or too large to be summed (of"
        )
        assert trainer.participant.training.pending.samples == 4
        await run.swarm.run_on("p0", trainer.take_batch, 8)
        assert trainer.participant.epoch == 1
        await run.close()

    sim.run(main, seed=24)


def test_a_state_that_nobody_gives_stops_nobody() -> None:
    """One says that it is far ahead and shares nothing: the others try, and go on; it stays what it is."""

    async def main() -> None:
        run = Run(target=16)
        loop = asyncio.get_running_loop()
        names = ["p0", "p1"]
        for name in [*names, "ahead"]:
            await run.add(name)
        ahead = run.swarm.peer("ahead").participant
        ahead.own.name = StateName(100, b"d" * 32, 1600)
        ahead._states.sharing.disable()
        await asyncio.gather(
            *(
                run.swarm.run_on(name, run.swarm.peer(name).train, 4, duration_s=0.5, until=lambda: loop.time() > 40)
                for name in names
            )
        )
        for name in names:
            trainer = run.swarm.peer(name)
            assert trainer.participant.epoch > 20
            assert len(trainer.failed_downloads) == 2
        assert run.agree(names)
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=22)


@pytest.mark.parametrize(
    ("peers", "skew_s"),
    [
        *((2, each) for each in (-30.0, 12.0, 3000.0)),
        (3, -12.0),
        *(pytest.param(2, each, marks=pytest.mark.long(full=True)) for each in (-3000.0, -12.0, 30.0)),
        *(pytest.param(3, each, marks=pytest.mark.long(full=True)) for each in (-3000.0, -30.0, 12.0, 30.0, 3000.0)),
    ],
)
def test_a_clock_that_is_wrong_stops_nobody(peers: int, skew_s: float) -> None:
    """It goes by the time of the others, and says so."""

    async def main() -> None:
        run = Run(target=16 * peers)
        loop = asyncio.get_running_loop()
        names = [f"p{peer}" for peer in range(peers)]
        warned: list[str] = []

        def note(event: Event) -> None:
            if isinstance(event, Warned):
                warned.append(event.message)

        for name in names:
            await run.add(name, skew_s=skew_s if name == names[-1] else 0.0, events=note)
        await asyncio.gather(
            *(
                run.swarm.run_on(name, run.swarm.peer(name).train, 4, duration_s=0.25, until=lambda: loop.time() > 18)
                for name in names
            )
        )
        for name in names:
            assert run.swarm.peer(name).participant.epoch > 12
            assert run.swarm.peer(name).downloads == 0
        assert len(warned) == 1
        assert f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} that of the network" in warned[0]
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=17)


def test_who_never_finds_the_others_is_not_waited_for_again_and_again() -> None:
    """One of three whose search finds nobody: the others go on at their pace, and say so."""

    async def main() -> None:
        run = Run(target=24)
        loop = asyncio.get_running_loop()
        names = ["p0", "p1", "p2"]
        warned: list[str] = []
        for name in names:
            trainer = await run.add(name)
            trainer.participant.core.env.events.subscribe(
                lambda event: warned.append(event.message) if isinstance(event, Warned) else None
            )

        async def nobody(**_: Any) -> StepResult:
            await sim.sleep(5.0)
            raise RoundFailed("no group within 5.0 s: nobody else is looking for one")

        run.swarm.peer("p2").participant._averager.step = nobody  # type: ignore[assignment]
        tasks = [
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.2, until=lambda: loop.time() > 35))
            for name in names
        ]
        await asyncio.wait(tasks)
        assert run.swarm.peer("p0").participant.epoch > 20
        assert any("says that it is at our state, but it does not come" in message for message in warned)
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=18)


def test_clients_train_too() -> None:
    """A peer that only dials contributes gradients and stays in step."""

    async def main() -> None:
        run = Run(target=36)
        loop = asyncio.get_running_loop()
        await run.add("p0")
        await run.add("p1")
        await run.add("c2", client_mode=True)
        names = ["p0", "p1", "c2"]
        tasks = [
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.2, until=lambda: loop.time() > 60))
            for name in names
        ]
        await sim.sleep(10)
        run.announce_end(run.swarm.peer("c2").participant.epoch + 3)
        await asyncio.wait(tasks)
        assert run.agree(names)
        assert run.swarm.peer("c2").downloads <= 1
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=6)


def test_a_fast_client_does_not_run_away() -> None:
    """A state that only a client holds, which nobody can download, does not count: nodes and client end together."""

    async def main() -> None:
        run = Run(target=24)
        loop = asyncio.get_running_loop()
        await run.add("p0")
        await run.add("p1")
        await run.add("c2", client_mode=True, seed=5)
        names, durations = ["p0", "p1", "c2"], (1.0, 1.0, 0.1)
        await sim.sleep(1.0)  # they know each other: nobody takes the state of a stranger
        # The client has gone far alone before the others begin.
        run.swarm.partition([["c2"], ["p0", "p1"]])
        tasks = [
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=s, until=lambda: loop.time() > 90))
            for name, s in zip(names, durations, strict=True)
        ]
        await sim.sleep(15)
        assert run.swarm.peer("c2").participant.epoch > run.swarm.peer("p0").participant.epoch
        run.swarm.heal()
        await sim.sleep(30)
        run.announce_end(run.swarm.peer("p0").participant.epoch + 4)
        await asyncio.wait(tasks)
        states = {n: run.swarm.peer(n).participant.state for n in names}
        assert run.agree(names), {n: (state.epoch, state.samples) for n, state in states.items()}
        assert run.swarm.peer("p0").participant.finished
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=8)


def test_who_is_first_at_the_end_waits_for_the_others() -> None:
    """The last round fails for one of two, and the other has what it needs: it leaves when both hold it."""

    async def main() -> None:
        run = Run(target=24)
        names = ["p0", "p1"]
        for name in names:
            await run.add(name)
        unlucky = run.swarm.peer("p1").participant
        step = unlucky._averager.step

        async def lose_the_last(**options: Any) -> StepResult:
            result = await step(**{**options, "apply": lambda vector: None} if unlucky.epoch == 2 else options)
            if unlucky.epoch == 2:
                raise RoundFailed("committed, but nobody who holds the averages could be reached")
            return result

        unlucky._averager.step = lose_the_last  # type: ignore[assignment]
        run.announce_end(3)

        async def train(name: str) -> None:
            trainer = run.swarm.peer(name)
            await trainer.train(4, duration_s=0.2, until=lambda: False)
            await trainer.participant.close()
            await trainer.participant.core.close()

        await asyncio.gather(*(run.swarm.spawn(name, train(name)) for name in names))
        assert run.agree(names), {n: run.swarm.peer(n).participant.state for n in names}
        assert run.swarm.peer("p1").downloads == 1
        assert not run.warnings, run.warnings

    sim.run(main, seed=12)


def test_a_better_state_that_is_gone_is_no_better_state() -> None:
    """`load_state_from_peers` raised when its only donor died, though no better state was left: it says False."""

    async def main() -> None:
        run = Run(target=8, network=SimNetwork(3, latency_s=0.05))
        first = await run.add("p0")
        for _ in range(6):
            await run.swarm.run_on("p0", first.take_batch, 4)
        second = (await run.add("p1")).participant
        await sim.sleep(3.0)
        download = run.swarm.spawn("p1", second.turn.download(60.0))
        await sim.sleep(0.06)
        run.swarm.crash("p0")
        assert await download is False
        assert second.epoch == 0
        await run.close()

    sim.run(main, seed=3)


def test_a_better_state_that_nobody_gives_is_an_error() -> None:
    """Its holder lives, names it, and refuses: the caller is told why."""

    async def main() -> None:
        run = Run(target=8)
        first = await run.add("p0")
        for _ in range(6):
            await run.swarm.run_on("p0", first.take_batch, 4)
        first.participant._states.sharing.disable()
        second = (await run.add("p1")).participant
        await sim.sleep(3.0)
        with pytest.raises(StateUnavailable, match="no donor gave"):
            await run.swarm.spawn("p1", second.turn.download(60.0))
        assert second.epoch == 0
        await run.close()

    sim.run(main, seed=4)


def test_a_state_is_taken_over_whole_and_under_its_name_also_when_the_trainer_is_interrupted() -> None:
    """Ctrl+C while a thread writes the parameters: the lock is held until it has, and the state has its name."""

    class Slowly:
        """Loads a state in a second; as a thread, nobody can stop it."""

        def __init__(self) -> None:
            self.begun = asyncio.Event()

        async def run(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if getattr(function, "func", function).__name__ == "take_over":
                self.begun.set()
                await sim.sleep(1.0)
            return function(*args, **kwargs)

    async def main() -> None:
        run, executor = Run(target=8), Slowly()
        first = await run.add("p0")
        for _ in range(6):
            await run.swarm.run_on("p0", first.take_batch, 4)
        second = (await run.add("p1")).participant
        await sim.sleep(3.0)
        object.__setattr__(second.core.env, "executor", executor)
        download = run.swarm.spawn("p1", second.turn.download(60.0))
        await executor.begun.wait()
        for _ in range(2):
            download.cancel()
            await sim.sleep(0.1)
            assert second.own.lock.holder
        await asyncio.wait([download])
        assert download.cancelled()
        assert not second.own.lock.holder
        assert second.state == first.participant.state
        assert second.training.epoch == second.state.epoch == 3
        assert run.agree(["p0", "p1"])
        await run.close()

    sim.run(main, seed=15)


@pytest.mark.parametrize("peers", [1, 3])
def test_gradients_that_are_not_finite_are_dropped_when_nobody_has_others(peers: int) -> None:
    """Alone there is no mean to replace them; where all have such, every round would fail for ever."""

    async def main() -> None:
        run = Run(target=8 * peers)
        names = [f"p{peer}" for peer in range(peers)]
        dropped: list[LocalValuesRejected] = []
        for name in names:
            trainer = await run.add(name)
            trainer.participant.core.env.events.subscribe(
                lambda event: dropped.append(event) if isinstance(event, LocalValuesRejected) else None
            )
        await sim.sleep(3.0)
        loop = asyncio.get_running_loop()

        async def train(name: str) -> None:
            trainer = run.swarm.peer(name)
            await trainer.take_batch(4)
            training = trainer.participant.training
            training.pending.total.bound = torch.inf
            for accumulator in training.accumulators:
                accumulator[0, 0] = torch.nan
            await trainer.train(4, duration_s=0.2, until=lambda: loop.time() > 9)

        await asyncio.gather(*(run.swarm.run_on(name, train, name) for name in names))
        assert {event.prefix for event in dropped} >= {"run"}
        assert min(run.swarm.peer(name).participant.epoch for name in names) > 6
        assert all(p.isfinite().all() for name in names for p in run.swarm.peer(name).parameters)
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=14)


def test_who_has_nothing_new_to_say_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a second; each answer was taken for news, which was told at once: twenty times a second, for ever."""
    told: list[PeerID] = []
    call = Post._tell

    async def counted(post: Post, peer: PeerID) -> None:
        told.append(peer)
        await call(post, peer)

    monkeypatch.setattr(Post, "_tell", counted)

    async def main() -> None:
        run = Run(target=1000)
        for peer in range(4):
            await run.add(f"p{peer}")
        await sim.sleep(5.0)
        told.clear()
        await sim.sleep(20.0)
        assert 4 * 3 * 19 <= len(told) <= 4 * 3 * 21
        first, second = run.swarm.peer("p0").participant, run.swarm.peer("p1").participant
        for samples in (4, 8):  # the second while the first is on its way
            first.training.pending.total.samples = samples
            first.turn.accumulated()
            await sim.sleep(0.051)
        await sim.sleep(0.1)
        assert second.view().done == 8
        await run.close()

    sim.run(main, seed=21)


def test_a_look_at_a_swarm_in_which_nothing_has_changed_is_cheap() -> None:
    """It made 176 calls, as words were made that nobody was told, and questions asked that the others had answered."""

    async def main() -> None:
        run = Run(target=8)
        trainers = [await run.add(name) for name in ("a", "b")]
        await sim.sleep(3.0)
        await asyncio.gather(
            *(
                run.swarm.run_on(name, each.train, 4, duration_s=0.1, until=lambda: len(trainers[0].epochs) >= 5)
                for name, each in zip(("a", "b"), trainers, strict=True)
            )
        )
        await sim.sleep(0.5)
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        async def look() -> None:
            trainers[0].participant._look_and_tell()
            sys.setprofile(count)
            try:
                trainers[0].participant._look_and_tell()
            finally:
                sys.setprofile(None)

        await run.swarm.run_on("a", look)
        assert calls <= 140
        await run.close()

    sim.run(main, seed=1)


def test_short_batches_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of batches a second cost the program a look at the swarm. The last one is looked at, too."""
    seen, look = list[int](), Participant._look

    def counted(participant: Participant) -> Any:
        seen.append(participant.training.pending.samples)
        return look(participant)

    monkeypatch.setattr(Participant, "_look", counted)

    async def main() -> None:
        run = Run(target=1000)
        participant = (await run.add("p0")).participant
        await sim.sleep(5.0)
        seen.clear()
        for samples in range(1, 101):
            participant.training.pending.total.samples = samples
            if participant.turn.has_news:
                participant.turn.accumulated()
            await sim.sleep(0.0001)
        await sim.sleep(0.01)
        assert seen[0] == 1
        assert seen[-1] == 100
        assert len(seen) <= 8
        await run.close()

    sim.run(main, seed=22)


def test_who_leaves_the_run_and_stays_in_the_network_is_not_waited_for() -> None:
    """`Optimizer.shutdown()` says so: no link is lost by which the others could know."""

    async def main() -> None:
        run = Run(target=16)
        first, second = await run.add("p0"), await run.add("p1")
        await sim.sleep(3.0)
        assert len(first.participant.view().peers) == 2
        await run.swarm.run_on("p1", second.participant.close)
        await sim.sleep(0.1)
        assert len(first.participant.view().peers) == 1
        await sim.sleep(10.0)  # nor does its record in the DHT bring it back
        assert len(first.participant.view().peers) == 1
        third = await run.add("p2")
        await sim.sleep(3.0)
        assert len(third.participant.view().peers) == 2
        await run.close()

    sim.run(main, seed=19)


@pytest.mark.parametrize("end", ["in order", "killed"])
def test_a_run_of_the_same_name_is_another_run(end: str) -> None:
    """Right after the last one, whose peers left or were killed: its end and its settings are not those of this one."""

    async def main() -> None:
        run = Run(target=16)
        first = await run.add("p0", fingerprint={"target_batch_size": "32"})
        second = await run.add("p1", fingerprint={"target_batch_size": "32"})
        second.participant.announce_end(5)
        await sim.sleep(3.0)
        await run.swarm.run_on("p0", first.participant.close)  # its DHT stays
        if end == "killed":
            run.swarm.crash("p1")
        else:
            await run.swarm.run_on("p1", second.participant.close)
        other = await run.add("p2", fingerprint={"target_batch_size": "16"})
        await run.swarm.run_on("p2", other.take_batch, 4)
        await run.swarm.run_on("p2", other.participant.close)
        again = await run.add("p3", fingerprint={"target_batch_size": "32"})
        await run.swarm.run_on("p3", again.take_batch, 4)
        assert again.participant._end.epoch is None
        await run.close()

    sim.run(main, seed=20)


def test_a_run_with_other_settings_is_refused_by_name() -> None:
    """A newcomer with another target batch learns which setting differs; the run goes on without it."""

    async def main() -> None:
        run = Run(target=16)
        loop = asyncio.get_running_loop()
        first = await run.add("p0", fingerprint={"target_batch_size": "16"})
        task = run.swarm.spawn("p0", first.train(4, duration_s=0.2, until=lambda: loop.time() > 20))
        await sim.sleep(5)
        other = await run.add("p1", fingerprint={"target_batch_size": "32"})
        with pytest.raises(ConfigError, match="target_batch_size is 32 here and 16 at another peer"):
            await run.swarm.run_on("p1", other.take_batch, 4)
        await task
        assert first.participant.epoch > 10
        await run.close()

    sim.run(main, seed=7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("average_state_every", [0, 4])
@pytest.mark.parametrize("end", [6, 8])
def test_extra_tensors_are_equal_on_all_at_the_end_of_a_run(average_state_every: int, end: int) -> None:
    """Batch norm statistics follow each peer's own batches: all end with one mean of them, and one count of batches.

    The counts ended at 18, 15 and 12.
    """

    async def main() -> None:
        run = Run(target=24, average_state_every=average_state_every)
        names = ["p0", "p1", "p2"]
        own = {name: torch.zeros(3) for name in names}
        counts = {name: torch.tensor(0) for name in names}
        for name in names:
            await run.add(name, extra_tensors=[own[name], torch.tensor([7]), counts[name]])
        await sim.sleep(3.0)
        run.announce_end(end)

        async def loop(name: str, duration_s: float) -> None:
            trainer = run.swarm.peer(name)
            while not trainer.participant.finished:
                await trainer.take_batch(4, duration_s=duration_s)
                if not trainer.participant.at_end:
                    own[name].add_(0.25 * trainer.index)
                    counts[name].add_(1)

        await asyncio.gather(*(run.swarm.run_on(n, loop, n, 0.2 + 0.05 * i) for i, n in enumerate(names)))
        assert run.agree(names)
        assert torch.equal(own["p0"], own["p1"])
        assert torch.equal(own["p0"], own["p2"])
        assert counts["p0"] == counts["p1"] == counts["p2"]
        assert counts["p0"] > end
        assert not run.warnings, run.warnings
        assert not any(run.swarm.peer(name).downloads for name in names)
        await run.close()

    sim.run(main, seed=8)


def test_parameters_that_somebody_keeps_are_told_and_cost_no_step() -> None:
    """A step that hangs in another thread keeps the lock: the run waited for it for ever, without a word."""

    async def main() -> None:
        run, warned = Run(target=4), list[str]()
        trainer = await run.add("p0")
        participant = trainer.participant

        def note(event: Event) -> None:
            if isinstance(event, Warned):
                warned.append(event.message)

        participant.core.env.events.subscribe(note)
        await participant.turn.decide(1.0)
        backward(trainer.parameters, 0, 0, 4)
        assert participant.training.accumulate(4)
        give_back = seize(participant.own.lock, "thread 'a'")
        participant.turn.accumulated()
        await sim.sleep(70.0)
        assert [text for text in warned if "thread 'a' has held the parameters for 60 s" in text] == warned[:1] != []
        give_back()
        await trainer.take_turn()
        assert participant.epoch == 1
        await run.close()

    sim.run(main, seed=5)
