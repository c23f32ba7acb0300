"""Peers that step on their own gradients: an epoch averages their parameters, and nothing that was trained is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.errors import ConfigError
from shoal.events import Warned
from shoal.sim import SimNetwork
from shoal.strategies.local_updates import LocalTrainingState
from tests.replay import is_mean
from tests.sim.optimizer_kit import Run, Trainer, backward, make_optimizer, model
from tests.sim.test_catch_up import Scene, held
from tests.sim.test_optimizer_interrupted import Interrupted

BATCH = 4
LOCAL: dict[str, Any] = {"use_local_updates": True, "delay_grad_averaging": True, "check_every": 0}
WAITS: dict[str, Any] = {**LOCAL, "delay_grad_averaging": False}


def local_sgd(sizes: Sequence[int], batches: int, epochs: int) -> list[torch.Tensor]:
    """One process: each peer takes `batches` steps of its own, then parameters are averaged by samples."""
    peers = [model() for _ in sizes]
    made = [make_optimizer(parameters) for parameters in peers]
    for epoch in range(epochs):
        for peer, (size, parameters) in enumerate(zip(sizes, peers, strict=True)):
            for number in range(batches):
                backward(parameters, peer, epoch * batches + number, size)
                made[peer][0].step()
        for each in zip(*peers, strict=True):
            average = sum(size * p.detach() for size, p in zip(sizes, each, strict=True)) / sum(sizes)
            for parameter in each:
                parameter.data.copy_(average)
        for _, scheduler in made:
            scheduler.step()
    return [parameter.detach() for parameter in peers[0]]


@pytest.mark.parametrize("sizes", [(4, 4), (2, 6), (1, 2, 3)])
def test_a_run_equals_local_sgd_of_one_process(sizes: tuple[int, ...]) -> None:
    """Three steps of AdamW each, then the average weighted by samples; the schedule follows the epochs."""
    batches, epochs = 3, 5

    async def main() -> list[torch.Tensor]:
        run = Run(target=batches * sum(sizes))
        names = [f"p{peer}" for peer in range(len(sizes))]
        for name in names:
            await run.add(name, **WAITS)
        await sim.sleep(3.0)

        async def train(name: str, size: int) -> None:
            trainer = run.swarm.peer(name)
            for epoch in range(epochs):
                for _ in range(batches):
                    await trainer.take_batch(size)
                await trainer.finish_epoch(epoch + 1)

        await asyncio.gather(*(run.swarm.run_on(n, train, n, size) for n, size in zip(names, sizes, strict=True)))
        assert run.agree(names)
        assert not run.warnings, run.warnings
        await run.close()
        return [parameter.detach() for parameter in run.trainers["p0"].parameters]

    for got, want in zip(sim.run(main, seed=len(sizes)), local_sgd(sizes, batches, epochs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_chosen_statistics_are_averaged_by_samples() -> None:
    """Peers of 2 and 6 samples; the other statistics stay each peer's own, and one without samples takes them over."""

    async def main() -> None:
        run = Run(target=8)
        for name in ("p0", "p1"):
            await run.add(name, **WAITS, statistics=["exp_avg_sq"])
        await sim.sleep(3.0)
        trainers = list(run.trainers.values())

        def kept(name: str) -> list[torch.Tensor]:
            return [t.participant.training.optimizer.state[t.parameters[0]][name].clone() for t in trainers]

        for trainer, size in zip(trainers, (2, 6), strict=True):
            backward(trainer.parameters, trainer.index, 0, size)
            trainer.participant.training.accumulate(size)
        first, second = kept("exp_avg_sq")
        means = kept("exp_avg")
        for trainer in trainers:
            trainer.participant.turn.accumulated()
        await asyncio.gather(*(run.swarm.run_on(f"p{t.index}", t.finish_epoch, 1) for t in trainers))
        for found in kept("exp_avg_sq"):
            torch.testing.assert_close(found, (2 * first + 6 * second) / 8, rtol=0, atol=1e-12)
        assert all(map(torch.equal, kept("exp_avg"), means))
        await run.close()

    sim.run(main, seed=8)


def test_what_the_steps_change_in_the_groups_is_not_the_swarm_s() -> None:
    """A count of steps in a parameter group (Lion, ScheduleFree) goes on for each peer; a rate is one for all."""

    async def main() -> None:
        run = Run(target=12)
        batches = {"p0": 1, "p1": 2}
        for name in batches:
            group = (await run.add(name, **WAITS)).participant.training.optimizer.param_groups[0]
            group["taken"] = 0
            optimizer = run.trainers[name].participant.training.optimizer
            optimizer.register_step_post_hook(lambda made, *_: made.param_groups[0].update(taken=_taken(made) + 1))
        await sim.sleep(3.0)

        async def train(name: str) -> None:
            trainer = run.swarm.peer(name)
            for epoch in range(3):
                for _ in range(batches[name]):
                    await trainer.take_batch(BATCH)
                await trainer.finish_epoch(epoch + 1)

        await asyncio.gather(*(run.swarm.run_on(name, train, name) for name in batches))
        taken = {name: _taken(trainer.participant.training.optimizer) for name, trainer in run.trainers.items()}
        assert taken == {"p0": 3, "p1": 6}
        assert not run.warnings, run.warnings
        assert run.agree(list(batches))
        await run.close()

    def _taken(optimizer: torch.optim.Optimizer) -> int:
        return int(optimizer.param_groups[0]["taken"])

    sim.run(main, seed=5)


def test_sparse_gradients_leave_statistics_that_newcomers_can_be_given() -> None:
    """SGD's momentum was sparse, so nobody got in; Adam took no step at all. The batch's own gradient stays."""
    table = torch.nn.Parameter(torch.ones(5, 2))
    for inner in (torch.optim.SGD([table], lr=0.1, momentum=0.9), torch.optim.Adam([table], lr=0.1)):
        with torch.no_grad():
            table.fill_(1.0)
        training = LocalTrainingState(inner)
        table.grad = torch.tensor([[0.0, 0.0], [1.0, 1.0], *[[0.0, 0.0]] * 3]).to_sparse(1)
        assert training.accumulate(2)
        assert table.grad.is_sparse
        assert table[1].tolist() != [1.0, 1.0] == table[0].tolist()
        assert all(tensor.layout is torch.strided for tensor in training.export()[1])


def test_statistics_that_the_optimizer_does_not_keep_are_refused() -> None:
    """By name, with those that there are."""
    parameters = model()
    with pytest.raises(ConfigError, match=r"AdamW keeps no statistic 'momentum' .*such are: exp_avg, exp_avg_sq"):
        LocalTrainingState(torch.optim.AdamW(parameters), average_opt_statistics=["momentum"])
    with pytest.raises(ConfigError, match="AdamW keeps no statistic 'step' of the shape"):
        LocalTrainingState(torch.optim.AdamW(parameters), average_opt_statistics=["step"])
    with pytest.raises(ConfigError, match=r"SGD keeps no statistic 'exp_avg' .* such are: none"):
        LocalTrainingState(torch.optim.SGD(parameters), average_opt_statistics=["exp_avg"])


def test_batches_during_a_round_are_kept() -> None:
    """Each peer keeps what it has trained since the round began: it is added to the average, and counts later."""

    async def main() -> None:
        run = Run(target=2 * BATCH, network=SimNetwork(3, latency_s=0.2))
        trainers = [await run.add(name, **LOCAL) for name in ("p0", "p1")]
        await sim.sleep(3.0)
        for trainer in trainers:
            await run.swarm.run_on(f"p{trainer.index}", trainer.take_batch, BATCH)
        before = [[p.detach().clone() for p in trainer.parameters] for trainer in trainers]
        mean = [(a + b) / 2 for a, b in zip(*before, strict=True)]
        while not all(trainer.participant.training.pending.in_round for trainer in trainers):
            await sim.sleep(0.01)
        for trainer in trainers:
            backward(trainer.parameters, trainer.index, 1, BATCH)
            assert trainer.participant.training.accumulate(BATCH)
        moved = [
            [p.detach() - b for p, b in zip(t.parameters, bs, strict=True)]
            for t, bs in zip(trainers, before, strict=True)
        ]
        for trainer in trainers:
            await run.swarm.run_on(f"p{trainer.index}", trainer.finish_epoch, 1)
        for trainer, own in zip(trainers, moved, strict=True):
            for parameter, average, change in zip(trainer.parameters, mean, own, strict=True):
                torch.testing.assert_close(parameter.detach(), average + change, rtol=0, atol=1e-12)
            assert trainer.participant.training.pending.samples == BATCH
            assert trainer.participant.contribution.contributed == BATCH
        await run.close()

    sim.run(main, seed=3)


class Lockstep(Trainer):
    """Notes each batch and whether it counts, each give, and the parameters after each average."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.events = list[tuple[str, Any]]()
        training = self.participant.training
        accumulate, contribute, after_step, epoch = (
            training.accumulate,
            training.contribute,
            training._after_step,
            training.epoch,
        )

        def accumulates(batch_size: int) -> bool:
            counts = accumulate(batch_size)
            self.events.append(("batch" if counts else "lost", self.batches_done))
            return counts

        def contributes() -> tuple[float, float]:
            self.events.append(("give", None))
            return contribute()

        def is_after_step(*args: Any, **options: Any) -> None:
            nonlocal epoch
            after_step(*args, **options)
            if training.epoch != epoch:  # it is called twice
                epoch = training.epoch
                self.events.append(("take", [each.detach().clone() for each in self.parameters]))

        training.accumulate = accumulates  # type: ignore[method-assign]
        training.contribute = contributes  # type: ignore[method-assign]
        training._after_step = is_after_step  # type: ignore[method-assign]


def replay(trainers: Sequence[Lockstep], *, waits: bool) -> int:
    """One process that trains as many peers by their events; returns the number of averages.

    Raises:
        AssertionError: after an average a peer has other bits than those of this process.
    """
    peers = [model() for _ in trainers]
    made = [make_optimizer(parameters) for parameters in peers]
    left = [list(trainer.events) for trainer in trainers]
    given: list[tuple[list[torch.Tensor], int]] = [([], 0) for _ in trainers]
    trained, averages = [0] * len(trainers), 0
    while True:
        for peer, events in enumerate(left):
            while events and events[0][0] != "take":
                what, number = events.pop(0)
                if what == "give":
                    given[peer], trained[peer] = ([each.detach().clone() for each in peers[peer]], trained[peer]), 0
                elif what == "batch":
                    backward(peers[peer], peer, number, BATCH)
                    made[peer][0].step()
                    trained[peer] += 1
        if not all(left):
            return averages
        taken, averages = [events.pop(0)[1] for events in left], averages + 1
        values, weights = [each for each, _ in given], [float(BATCH * batches) for _, batches in given]
        if waits:
            for own in taken[1:]:
                assert all(map(torch.equal, taken[0], own)), "peers that wait go on from other averages"
            assert is_mean(taken[0], values, weights), "the average is not that of these batches"
        for peer, own in enumerate(taken):
            average = [
                sum(w * t for w, t in zip(weights, each, strict=True)) / sum(weights)
                for each in zip(*values, strict=True)
            ]
            for parameter, before, mean, now in zip(peers[peer], values[peer], average, own, strict=True):
                torch.testing.assert_close(now, parameter.detach() + mean - before, rtol=0, atol=1e-13)
                parameter.data.copy_(now)
            made[peer][1].step()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("durations_s", [[1.0, 1.0], [0.31, 0.4, 0.7]], ids=str)
@pytest.mark.parametrize("mode", [LOCAL, WAITS], ids=["goes on", "waits"])
def test_a_peer_that_waits_keeps_the_batch_that_was_under_way(mode: dict[str, Any], durations_s: list[float]) -> None:
    """It does not: it goes on from the average, bit for bit as one process does. It was off by that batch for good.

    The batch is told as dropped. One that goes on keeps it, and gives it to the next average.
    """
    waits = mode is WAITS

    async def main() -> list[Lockstep]:
        run = Run(target=2 * BATCH * len(durations_s), trainer=Lockstep, make=make_optimizer)
        names = [f"p{number}" for number in range(len(durations_s))]
        for name in names:
            await run.add(name, **mode)
        await sim.sleep(3.0)
        for name, duration_s in zip(names, durations_s, strict=True):
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=duration_s, until=lambda: False))
        await sim.sleep(14.5)
        trainers = [trainer for trainer in run.trainers.values() if isinstance(trainer, Lockstep)]
        for trainer in trainers:
            trainer.events = list(trainer.events)  # those until now
            lost, said = sum(what == "lost" for what, _ in trainer.events), trainer.participant.status()
            assert said.dropped == lost * BATCH
            assert said.contributed + said.dropped + trainer.participant.account.held == trainer.batches_done * BATCH
        assert any(trainer.participant.contribution.dropped for trainer in trainers) == waits
        await run.close()
        return trainers

    assert replay(sim.run(main, seed=3), waits=waits) >= 4


def test_at_the_end_all_have_the_same_parameters() -> None:
    """What was trained while the last round went on is averaged, too; peers of any speed, none is lost."""

    async def main() -> None:
        run = Run(target=40 * BATCH)
        names = [f"p{number}" for number in range(4)]
        for name in names:
            await run.add(name, **LOCAL)
        await sim.sleep(3.0)
        run.announce_end(7)
        for number, name in enumerate(names):
            work = run.trainers[name].train(BATCH, duration_s=0.1 + 0.1 * number, until=lambda: False)
            run.swarm.spawn(name, work)
        while not all(trainer.participant.finished for trainer in run.trainers.values()):
            await sim.sleep(0.5)
        assert run.agree(names)
        assert run.trainers["p0"].participant.epoch == 7
        for trainer in run.trainers.values():
            assert not trainer.downloads
            assert trainer.participant.contribution.dropped == 0
            assert trainer.participant.contribution.contributed == BATCH * trainer.batches_done
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=4)


def test_nobody_may_leave_before_the_last_average() -> None:
    """All are at one state when the run ends, but that is not yet the last one."""

    async def main() -> None:
        run = Run(target=2 * BATCH, network=SimNetwork(3, latency_s=0.2))
        trainers = [await run.add(name, **LOCAL) for name in ("p0", "p1")]
        await sim.sleep(3.0)
        run.announce_end(2)
        for trainer in trainers:
            work = trainer.train(BATCH, duration_s=0.1, until=lambda: False)
            run.swarm.spawn(f"p{trainer.index}", work)
        averaging = 0
        while not all(trainer.participant.finished for trainer in trainers):
            for participant in (trainer.participant for trainer in trainers):
                due = participant.at_end and participant.course.machine.states_due
                assert not (due and participant._end.over(participant.epoch))
                averaging += due
            await sim.sleep(0.01)
        assert averaging
        assert run.agree(["p0", "p1"])
        await run.close()

    sim.run(main, seed=3)


@pytest.mark.parametrize("fails", [["p0"], ["p0", "p1"]])
def test_a_last_average_that_fails_is_tried_again(fails: list[str]) -> None:
    """Each peer left with its own parameters, on a machine so busy that a peer was silent for a second just then."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        for name in ("p0", "p1"):
            await run.add(name, **LOCAL)
        await sim.sleep(3.0)
        run.announce_end(3)
        failed: list[Trainer] = []

        def fail_once(trainer: Trainer) -> None:
            whole = trainer.participant._rounds.run

            async def fails_at_the_end(*args: Any, **options: Any) -> Any:
                if not trainer.participant.at_end or trainer in failed:
                    return await whole(*args, **options)
                failed.append(trainer)
                return None

            trainer.participant._rounds.run = fails_at_the_end  # type: ignore[method-assign]

        for name in fails:
            fail_once(run.trainers[name])

        async def train(trainer: Trainer) -> None:
            await trainer.train(BATCH, duration_s=0.1, until=lambda: False)

        await asyncio.gather(*(run.swarm.run_on(name, train, trainer) for name, trainer in run.trainers.items()))
        assert len(failed) == len(fails)
        assert run.agree(["p0", "p1"])
        await run.close()

    sim.run(main, seed=5)


@pytest.mark.parametrize("local", [True, False])
def test_a_newcomer_left_with_the_state_from_before_the_last_average(local: bool) -> None:
    """It had downloaded it while the others averaged, and all that it knew were at its state: it waits for theirs."""

    async def main() -> None:
        run = Run(target=2 * BATCH)

        async def add(name: str, seed: int = 0) -> Trainer:
            statistics = [] if local else [torch.zeros(2)]
            return await run.add(name, seed=seed, extra_tensors=statistics, **(LOCAL if local else {}))

        for name in ("p0", "p1"):
            await add(name)
        await sim.sleep(3.0)
        run.announce_end(3)
        averages: list[Trainer] = []

        def average_late(trainer: Trainer) -> None:
            whole = trainer.participant._rounds.run

            async def later(*args: Any, **options: Any) -> Any:
                if trainer.participant.at_end:
                    averages.append(trainer)
                    for statistic in trainer.participant.training.extra_tensors:
                        statistic.fill_(trainer.index)
                    await sim.sleep(3.0)
                return await whole(*args, **options)

            trainer.participant._rounds.run = later  # type: ignore[method-assign]

        for trainer in run.trainers.values():
            average_late(trainer)

        async def train(trainer: Trainer) -> None:
            await trainer.train(BATCH, duration_s=0.1, until=lambda: False)

        begun = [run.swarm.spawn(name, train(trainer)) for name, trainer in run.trainers.items()]
        while len(averages) < 2:
            await sim.sleep(0.01)
        late = await add("late", 99)
        await run.swarm.run_on("late", train, late)
        assert late.downloads == 2
        await asyncio.gather(*begun)
        assert run.agree(["p0", "p1", "late"])
        assert [each.tolist() for each in late.participant.training.extra_tensors] == ([] if local else [[0.5, 0.5]])
        await run.close()

    sim.run(main, seed=5)


def test_a_peer_alone_trains_as_without_a_swarm() -> None:
    """An epoch changes its schedule only."""

    async def main() -> list[torch.Tensor]:
        run = Run(target=2 * BATCH)
        trainer = await run.add("p0", **LOCAL)
        await sim.sleep(3.0)
        for _ in range(8):
            await run.swarm.run_on("p0", trainer.take_batch, BATCH)
        assert trainer.participant.epoch == 4
        await run.close()
        return [parameter.detach() for parameter in trainer.parameters]

    for got, want in zip(sim.run(main, seed=5), local_sgd([BATCH], 2, 4), strict=True):
        assert torch.equal(got, want)


def test_a_newcomer_whose_download_takes_many_epochs_gets_in() -> None:
    """It follows the averages of the others meanwhile, as with gradients."""

    async def main() -> None:
        scene = Scene(download_s=12.0)
        scene.run.local = True
        scene.run.settings = msgspec.structs.replace(scene.run.settings, check_every=0)
        await scene.begin()
        late = await scene.newcomer()
        await held(scene, late, 120.0)

    sim.run(main, seed=6)


def test_an_interrupted_average_is_not_taken_twice() -> None:
    """The difference to the average would be added again: the peer downloads instead."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        trainers = [await run.add(name, **WAITS) for name in ("p0", "p1")]
        await sim.sleep(3.0)
        vector = trainers[0].participant._averager.vector
        apply = vector.apply

        def half(alpha: float) -> None:
            vector.apply = apply  # type: ignore[method-assign]
            apply(alpha)
            raise Interrupted

        vector.apply = half  # type: ignore[method-assign]

        async def interrupted() -> None:
            await trainers[0].take_batch(BATCH)
            with pytest.raises(Interrupted):
                await trainers[0].finish_epoch(1)

        await asyncio.gather(run.swarm.run_on("p0", interrupted), run.swarm.run_on("p1", trainers[1].take_batch, BATCH))
        assert trainers[0].participant.training.epoch == 1

        async def train(trainer: Trainer) -> None:
            await trainer.train(BATCH, duration_s=0.1, until=lambda: trainer.participant.epoch >= 3)

        await asyncio.gather(*(run.swarm.run_on(f"p{t.index}", train, t) for t in trainers))
        assert trainers[0].downloads == 1
        await run.close()

    sim.run(main, seed=7)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_peers_that_join_leave_and_crash_end_with_one_state(seed: int) -> None:
    """No epoch counts twice, and all who are there at the end agree bit by bit."""
    weather(seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_they_do_so_in_many_runs(soak: Callable[[int, int], int]) -> None:
    """Of 16 epochs each."""
    for seed in range(2, 2 + soak(2, 48)):
        weather(seed)


def weather(seed: int) -> None:
    """Six peers; now and then one of them is replaced."""
    rng = random.Random(seed)

    async def main() -> None:
        run = Run(target=24 * BATCH, network=SimNetwork(seed, latency_s=0.01))
        born = 0

        async def add() -> None:
            nonlocal born
            name, born = f"p{born}", born + 1
            trainer = await run.add(name, **rng.choice([LOCAL, WAITS]), statistics=["exp_avg_sq"] if seed % 2 else [])
            pace_s = rng.uniform(0.1, 0.4)
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=pace_s, until=lambda: False))

        for _ in range(6):
            await add()
        while max(each.participant.epoch for each in run.swarm.peers.values()) < 12:
            await sim.sleep(rng.uniform(0.5, 4.0))
            victim = rng.choice(sorted(run.swarm.peers))
            how = rng.choice(["crash", "vanish", "leave", "nothing"])
            if how == "leave":
                await run.swarm.run_on(victim, run.swarm.peer(victim).participant.close)
            if how != "nothing":
                (run.swarm.vanish if how == "vanish" else run.swarm.crash)(victim)
                await add()
        run.announce_end(max(each.participant.epoch for each in run.swarm.peers.values()) + 4)
        while not all(each.participant.finished for each in run.swarm.peers.values()):
            await sim.sleep(0.5)
        assert run.agree(sorted(run.swarm.peers))
        for trainer in run.swarm.peers.values():
            epochs_seen = [number for _, number, _, _ in trainer.epochs]
            assert epochs_seen == sorted(set(epochs_seen)), "an epoch was counted twice"
        await run.close()

    sim.run(main, seed=seed)


def test_a_follower_of_the_last_step_of_a_peer_alone_ended_with_other_parameters() -> None:
    """It had those that the step began with, and not what was trained before it was taken: so their name is another."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        first, second = await run.add("p0", **LOCAL), await run.add("p1", **LOCAL)
        await sim.sleep(3.0)
        run.announce_end(2)
        work = run.swarm.spawn("p0", first.train(BATCH, duration_s=0.1, until=lambda: False))
        while not first.participant.at_end:
            await sim.sleep(0.01)
        stepped = first.participant.state
        await run.swarm.run_on("p1", second.train, BATCH, duration_s=0.1, until=lambda: False)
        await work
        assert run.agree(["p0", "p1"])
        assert first.participant.state.samples == stepped.samples + 1
        await run.close()

    sim.run(main, seed=1)


class OneMoves(Trainer):
    """Only the first peer's batches move anything."""

    def compute(self, number: int, size: int) -> None:
        """The others have gradients of zero."""
        super().compute(number, size)
        for parameter in self.parameters if self.index else ():
            torch.zero_(parameter.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_in_16_bits_that_averages_hardly_move_are_told(dtype: torch.dtype) -> None:
    """What one of two peers moves by the least that 16 bits can is lost at each average, and nobody knew."""
    told: list[str] = []

    def sign_steps(parameters: list[torch.Tensor], lr: float) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.Adam(parameters, lr=lr, betas=(0.0, 0.0), eps=1e-4), None

    async def main() -> None:
        lr = 0.1 * torch.finfo(torch.bfloat16 if dtype is torch.float32 else dtype).eps
        run = Run(target=8, dtype=dtype, lr=lr, make=sign_steps, trainer=OneMoves)
        for name in ("p0", "p1"):
            await run.add(name, events=lambda e: told.append(e.line()) if isinstance(e, Warned) else None, **WAITS)
        await sim.sleep(3.0)

        async def train(name: str, size: int) -> None:
            trainer = run.swarm.peer(name)
            for epoch in range(12):
                await trainer.take_batch(size)
                await trainer.finish_epoch(epoch + 1)

        await asyncio.gather(run.swarm.run_on("p0", train, "p0", 2), run.swarm.run_on("p1", train, "p1", 6))
        assert run.agree(["p0", "p1"])
        await run.close()

    sim.run(main, seed=5)
    if dtype is torch.float32:
        assert not told
    else:
        assert told
        assert all("of the elements did not move by the average" in each for each in told)
