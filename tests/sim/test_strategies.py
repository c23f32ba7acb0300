"""Strategies that merge: each equals its one-process reference, and nothing of what peers share ever differs."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from benchmarks.strategies import reference
from shoal import sim
from shoal.errors import ConfigError
from shoal.events import EpochAdvanced, Event, SamplesDropped, Warned
from shoal.optim import Participant, TrainingState
from shoal.protocol.wire import Progress
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, Merges, StreamingDiLoCo
from shoal.strategies.outer import LocalSteps
from shoal.train.run_schedule import RunSchedule
from tests.sim.optimizer_kit import Run, Trainer, backward, make_optimizer, model

T = TypeVar("T")

BATCH = 4
MEAN = dict[str, Any](lr=1.0)
NESTEROV = dict[str, Any](lr=0.7, momentum=0.9, nesterov=True)


async def train_to_end(run: Run, *durations_s: float) -> None:
    """Let each trainer take batches that last so long, until the run is over for all."""
    trains = (
        run.swarm.spawn(name, trainer.train(BATCH, duration_s=duration_s, until=lambda: False))
        for (name, trainer), duration_s in zip(run.trainers.items(), durations_s, strict=True)
    )
    await asyncio.gather(*trains)


def moving(compute: Callable[[int, int], None], extra: torch.Tensor, number: int, size: int) -> None:
    """A batch that also moves a tensor, as it does with batch norm statistics."""
    extra.add_(torch.rand(3, dtype=torch.float64))
    compute(number, size)


async def late(average: Callable[[], Awaitable[T]]) -> T:
    """Come to a merge a second late."""
    await sim.sleep(1.0)
    return await average()


def outer_sgd(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer of the authors."""
    return torch.optim.SGD(parameters, **NESTEROV)


def merged(sizes: Sequence[int], every: int, merges: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """One process: each peer takes `every` batches of its own, then the outer optimizer steps the anchor."""
    peers = [model() for _ in sizes]
    made = [make_optimizer(parameters) for parameters in peers]
    anchor = [torch.nn.Parameter(each.detach().clone()) for each in peers[0]]
    outer = torch.optim.SGD(anchor, **options)
    for merge in range(merges):
        for peer, (size, parameters) in enumerate(zip(sizes, peers, strict=True)):
            for number in range(every):
                backward(parameters, peer, merge * every + number, size)
                made[peer][0].step()
                made[peer][1].step()
        for index, each in enumerate(anchor):
            moved = [size * (each.detach() - peers[peer][index].detach()) for peer, size in enumerate(sizes)]
            each.grad = torch.stack(moved).sum(0) / sum(sizes)
        outer.step()
        for parameters in peers:
            for own, each in zip(parameters, anchor, strict=True):
                own.data.copy_(each)
    return [each.detach() for each in anchor]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "options"), [(LocalSGD(3), MEAN), (DiLoCo(3), NESTEROV), (DiLoCo(1), NESTEROV)], ids=str
)
@pytest.mark.parametrize("sizes", [(4, 4), (2, 6, 1)], ids=str)
def test_a_run_equals_one_process(sizes: tuple[int, ...], strategy: Merges, options: dict[str, Any]) -> None:
    """AdamW with a schedule in each peer, weights by samples; peers of equal speed."""
    every, merges = strategy.merging.steps or 0, 4

    async def main() -> list[torch.Tensor]:
        run = Run(target=1)
        names = [f"p{peer}" for peer in range(len(sizes))]
        for name in names:
            await run.add(name, strategy=strategy)
        await sim.sleep(3.0)

        async def train(name: str, size: int) -> None:
            trainer = run.swarm.peer(name)
            for merge in range(merges):
                for _ in range(every):
                    await trainer.take_batch(size)
                await trainer.finish_epoch(merge + 1)

        await asyncio.gather(*(run.swarm.run_on(n, train, n, size) for n, size in zip(names, sizes, strict=True)))
        assert run.agree(names)
        assert not run.warnings, run.warnings
        await run.close()
        return [parameter.detach() for parameter in run.trainers["p0"].parameters]

    for got, want in zip(sim.run(main, seed=len(sizes)), merged(sizes, every, merges, options), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        StreamingDiLoCo(4, fragments=2, overlap=1, mixing=0.5),
        StreamingDiLoCo(4, fragments=2, overlap=2, mixing=None),
        StreamingDiLoCo(3, fragments=1, overlap=2, mixing=0.0),
        Decoupled(4, fragments=2, quorum=3),
    ],
    ids=str,
)
def test_streams_equal_one_process(strategy: StreamingDiLoCo | Decoupled) -> None:
    """A batch takes a second, a merge far less: it is given after one batch, and taken `overlap` batches later."""
    sizes, batches = (2, 6, 1), 22

    async def main() -> list[list[torch.Tensor]]:
        run = Run(target=1)
        names = [f"p{peer}" for peer in range(len(sizes))]
        for name in names:
            await run.add(name, strategy=strategy)
        await sim.sleep(3.0)

        async def train(name: str, size: int) -> None:
            for _ in range(batches):
                await run.swarm.peer(name).take_batch(size, duration_s=1.0)

        await asyncio.gather(*(run.swarm.run_on(n, train, n, size) for n, size in zip(names, sizes, strict=True)))
        assert not run.warnings, run.warnings
        await run.close()
        return [[each.detach() for each in run.trainers[name].parameters] for name in names]

    merging = strategy.merging
    swarm = reference.Swarm(
        [_learner(peer, size) for peer, size in enumerate(sizes)],
        reference.Strategy(
            every=merging.steps or 0,
            outer=merging.outer,
            fragments=merging.fragments,
            overlap=merging.overlap or 1,
            mixing=merging.mixing,
            quorum=merging.quorum,
        ),
    )
    for _ in range(batches):
        swarm.step()
    for found, want in zip(sim.run(main, seed=5), swarm.peers, strict=True):
        for one, other in zip(found, want.parameters, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-12)
    assert all(fragment.version >= 5 for fragment in swarm.fragments)


def test_merges_of_one_batch_without_momentum_are_synchronous_training() -> None:
    """With plain SGD within and `SGD(lr=1)` outside: to rounding, by samples."""
    sizes = (2, 6)
    alike = model()
    single = TrainingState(torch.optim.SGD(alike, lr=0.1), unit=sum(sizes))
    peers = [model() for _ in sizes]
    merging = DiLoCo(1, partial(torch.optim.SGD, lr=1.0)).merging
    steps = [LocalSteps(torch.optim.SGD(each, lr=0.1), None, (), merging) for each in peers]
    for batch in range(5):
        for peer, size in enumerate(sizes):
            for parameters, training in ((alike, single), (peers[peer], steps[peer])):
                backward(parameters, peer, batch, size)
                assert training.accumulate(size)
        single.use_own_mean()
        single.step()
        fragments = [each.fragments[0] for each in steps]
        weights = [fragment.contribute()[0] for fragment in fragments]
        means = [
            sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True)) / sum(weights)
            for tensors in zip(*(fragment.accumulators for fragment in fragments), strict=True)
        ]
        for fragment in fragments:
            for accumulator, mean in zip(fragment.accumulators, means, strict=True):
                accumulator.copy_(mean)
            fragment.counted()
            fragment.use_accumulators()
            fragment.step()
        for parameters in peers:
            for one, other in zip(parameters, alike, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def _merge_alone(outer: Any) -> LocalSteps:
    """A peer that has merged two batches with nobody."""
    local = LocalSteps(*make_optimizer(model()), (), DiLoCo(2, outer).merging)
    for number in range(2):
        backward(list(local.trained), 0, number, BATCH)
        assert local.accumulate(BATCH)
    fragment = local.fragments[0]
    fragment.use_own_mean()
    fragment.counted()
    fragment.step()
    return local


def test_the_groups_of_an_outer_optimizer_may_be_in_any_order() -> None:
    """Each anchor stays that of its parameter, also in what is saved."""

    def backwards(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [each]} for each in reversed(parameters)], **NESTEROV)

    one, other = _merge_alone(outer_sgd), _merge_alone(backwards)
    assert all(map(torch.equal, one.trained, other.trained))
    fragment = other.fragments[0]
    assert all(map(torch.equal, fragment.places(), fragment.trained))


@pytest.mark.parametrize("outer", [lambda given: torch.optim.SGD(given[1:]), lambda _: torch.optim.SGD(model())])
def test_an_outer_optimizer_of_other_parameters_is_refused(outer: Any) -> None:
    """It left some as they were, or stepped the model's own in place of the anchor."""
    with pytest.raises(ConfigError, match="outer must make an optimizer of all"):
        _merge_alone(outer)


@pytest.mark.parametrize("outer", [partial(torch.optim.SGD, lr=-1.0), lambda: None], ids=["value", "type"])
def test_an_error_within_outer_is_one_of_that_argument(outer: Any) -> None:
    """It came as torch or Python raised it, from a function that is called again for each fragment."""
    with pytest.raises(ConfigError, match=r"outer, which makes .* raised (ValueError: Invalid learning|TypeError)"):
        _merge_alone(outer)


class Noisy(torch.optim.SGD):
    """Peers take different steps from equal averages."""

    def step(self, closure: Any = None) -> Any:
        """See `SGD`."""
        self.param_groups[0]["params"][0].grad.add_(torch.randn(()))
        return super().step(closure)


def test_an_outer_optimizer_that_draws_random_numbers_is_told() -> None:
    """Only the inner one was looked at, of which nothing travels: peers ended with other bits, and nobody said so."""

    async def main() -> None:
        run = Run(target=1)
        told: list[Event] = []
        await run.add("p0", strategy=DiLoCo(2, partial(Noisy, lr=1.0)), events=told.append)
        await sim.sleep(3.0)
        work = run.trainers["p0"].train(BATCH, duration_s=0.1, until=lambda: run.trainers["p0"].participant.epoch > 1)
        await run.swarm.run_on("p0", lambda: work)
        warned = [each.message for each in told if isinstance(each, Warned)]
        assert any("depend on more than its state (torch's random numbers)" in each for each in warned)
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize("slow", [0, 1])
def test_what_is_averaged_at_the_end_of_a_run_moves_no_more(slow: int) -> None:
    """Batch norm statistics moved on with the batches of the fragment whose last merge comes last."""

    async def main() -> None:
        run = Run(target=1)
        names = [f"p{number}" for number in range(2)]
        for name in names:
            extra = torch.zeros(3, dtype=torch.float64)
            trainer = await run.add(name, strategy=StreamingDiLoCo(4, fragments=2, overlap=1), extra_tensors=[extra])
            trainer.compute = partial(moving, trainer.compute, extra)  # type: ignore[method-assign]
            last = trainer.fragments[slow]
            last.swarm_step.average = partial(late, last.swarm_step.average)  # type: ignore[method-assign]
        await sim.sleep(3.0)
        run.announce_end(2)
        await train_to_end(run, 0.1, 0.12)
        found = [run.trainers[name].fragments[-1].training.extra_tensors[0] for name in names]
        assert torch.equal(*found)
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_fragment_that_is_ahead_of_the_end_ends_with_the_others(ahead: int) -> None:
    """Merges of the other one have failed for long. The run went on for ever."""

    async def fails() -> bool:
        await sim.sleep(0.2)
        return False

    async def main() -> None:
        run = Run(target=1)
        names = [f"p{number}" for number in range(3)]
        for name in names:
            extra = torch.zeros(3, dtype=torch.float64)
            trainer = await run.add(name, strategy=Decoupled(4, fragments=2, quorum=2), extra_tensors=[extra])
            trainer.compute = partial(moving, trainer.compute, extra)  # type: ignore[method-assign]
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=0.1, until=lambda: False))
            trainer.fragments[1 - ahead].swarm_step.average = fails  # type: ignore[method-assign]
        trainers = list(run.trainers.values())
        while trainers[0].fragments[ahead].epoch < 8:
            await sim.sleep(0.1)
        run.announce_end(4)
        for trainer in trainers:
            del trainer.fragments[1 - ahead].swarm_step.average
        while not all(trainer.finished for trainer in trainers):
            await sim.sleep(0.5)
        assert run.agree(names)
        assert {trainer.fragments[1 - ahead].epoch for trainer in trainers} == {4}
        assert len({trainer.fragments[ahead].state for trainer in trainers}) == 1
        found = [trainer.fragments[-1].training.extra_tensors[0] for trainer in trainers]
        assert all(torch.equal(each, found[0]) for each in found)
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize(("announced", "what"), [(2, "the run ends here"), (1, "goes on, though this peer announced")])
def test_an_end_that_peers_do_not_share_is_told_once_for_all_fragments(announced: int, what: str) -> None:
    """Each fragment told it, with an epoch of its own."""

    async def main() -> None:
        run, said = Run(target=1), list[str]()
        for number in range(3):
            trainer = await run.add(f"p{number}", strategy=Decoupled(4, fragments=2, quorum=2))
            run.swarm.spawn(f"p{number}", trainer.train(BATCH, duration_s=0.1, until=lambda: False))
        await sim.sleep(3.0)
        first, *_, last = (trainer.participant for trainer in run.trainers.values())
        told = last if announced == 2 else first
        told.core.env.events.subscribe(lambda event: said.append(event.message) if isinstance(event, Warned) else None)
        end = first.epoch + 2
        for trainer in list(run.trainers.values())[:announced]:
            for fragment in trainer.fragments:
                fragment.announce_end(end)
        while not (last.finished or last.epoch > end + 2):
            await sim.sleep(0.5)
        assert sum(what in each for each in said) == 1, said
        await run.close()

    sim.run(main, seed=4)


def _learner(peer: int, size: int) -> reference.Peer:
    """A peer of the reference, with the batches and the schedule of the trainers here."""
    parameters = model()
    inner, schedule = make_optimizer(parameters)
    inner.register_step_post_hook(lambda *_: schedule.step())
    numbers = itertools.count()

    def learn() -> int:
        backward(parameters, peer, next(numbers), size)
        return size

    return reference.Peer(parameters, inner, learn)


STRATEGIES: list[Merges] = [
    LocalSGD(4),
    DiLoCo(4, outer_sgd),
    DiLoCo("2s"),
    StreamingDiLoCo(4, fragments=2, overlap=1, mixing=0.5),
    StreamingDiLoCo(4, fragments=2, overlap=2, mixing=None),
    Decoupled(4, fragments=2, quorum=2),
    Decoupled("2s", fragments=2, quorum=2),
]


def _inner(trainer: Trainer) -> torch.optim.Optimizer:
    return trainer.participant.training.local.optimizer


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: type(each).__name__)
def test_peers_of_any_speed_end_with_equal_bits(strategy: Merges) -> None:
    """Nobody stands still for the slowest, and its batches count all the same. Their learning rates are equal, too."""

    async def main() -> None:
        run = Run(target=1)
        names = [f"p{number}" for number in range(3)]
        for name in names:
            await run.add(name, strategy=strategy)
        await sim.sleep(3.0)
        run.announce_end(4)
        await train_to_end(run, 0.1, 0.3, 0.5)
        assert run.agree(names)
        rates = {_inner(trainer).param_groups[0]["lr"] for trainer in run.trainers.values()}
        assert len(rates) == 1, rates
        for trainer in run.trainers.values():
            assert [fragment.epoch for fragment in trainer.fragments] == [4] * len(trainer.fragments)
            assert not trainer.downloads
            assert trainer.participant.contribution.contributed > 0
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize(
    "strategy",
    [LocalSGD("2s"), StreamingDiLoCo("2s", fragments=2, overlap=1), Decoupled("2s", fragments=2, quorum=2)],
    ids=lambda each: type(each).__name__,
)
def test_merges_by_time_follow_each_other_at_once(strategy: Merges, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not: before it was told of a step of its trainer, a peer said at the new state that a merge was due."""
    stepped = Participant.stepped

    async def is_told_late(self: Participant) -> None:
        if self.own.update is not None and self.own.update.taken:
            await sim.sleep(0.1)
        await stepped(self)

    monkeypatch.setattr(Participant, "stepped", is_told_late)

    async def main() -> None:
        run = Run(target=1)
        for name in ("p0", "p1", "p2"):
            await run.add(name, strategy=strategy)
        await sim.sleep(3.0)
        run.announce_end(4)
        await train_to_end(run, 0.1, 0.11, 0.13)
        for trainer in run.trainers.values():
            times = [at for at, *_ in trainer.epochs]
            assert min(later - earlier for earlier, later in itertools.pairwise(times)) > 1.5, times
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize(
    "strategy", [each for each in STRATEGIES if each.merging.steps], ids=lambda e: type(e).__name__
)
def test_the_schedule_goes_beyond_the_end_of_the_run(strategy: Merges, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not: a peer that trains on while the last merge is under way had rates below 0 by then."""
    move, moved = RunSchedule.follow, set[int]()

    def note(self: RunSchedule, at: int) -> None:
        moved.add(at)
        move(self, at)

    monkeypatch.setattr(RunSchedule, "follow", note)

    async def main() -> None:
        run = Run(target=1)
        for name in ("p0", "p1"):
            await run.add(name, strategy=strategy)
        await sim.sleep(3.0)
        run.announce_end(3)
        await train_to_end(run, 0.1, 0.3)
        assert [trainer.participant.training.local.schedule.count for trainer in run.trainers.values()] == [3 * 4] * 2
        await run.close()

    sim.run(main, seed=4)
    assert max(moved) == 3 * 4


def test_a_peer_that_does_not_come_holds_up_no_merge_of_a_quorum() -> None:
    """It says that it is there and ready: the others wait for it as long as a merge takes, and not a whole window."""

    async def main() -> None:
        run = Run(target=1)
        names = [f"p{number}" for number in range(3)]
        for name in names:
            await run.add(name, strategy=Decoupled(4, fragments=1, quorum=2))
        await sim.sleep(3.0)

        async def stays_away() -> bool:
            await sim.sleep(0.2)
            return False

        run.trainers["p2"].participant.swarm_step.average = stays_away  # type: ignore[method-assign]
        for name in names:
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=0.5, until=lambda: False))
        await sim.sleep(24.0)
        times = [at for at, *_ in run.trainers["p0"].epochs]
        assert len(times) >= 6
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 4 * 0.5 + 1.5
        await run.close()

    sim.run(main, seed=4)


BEGINNINGS = pytest.mark.parametrize(
    "strategy", [None, Decoupled(4, fragments=2, quorum=2)], ids=["synchronous", "fragments"]
)


@pytest.mark.one_in(2)
@BEGINNINGS
@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
def test_a_newcomer_takes_the_first_weights_of_those_that_were_there(
    strategy: Merges | None, seeds: tuple[int, int]
) -> None:
    """Whichever they are. A newcomer with random weights won every second time over a model that was trained before.

    And each took a fragment of the other's: nobody's model was left.
    """

    async def main() -> None:
        run, told = Run(target=1000), list[str]()
        for name, seed in zip(("first", "second", "third"), (*seeds, seeds[1]), strict=True):
            await run.add(
                name,
                seed=seed,
                strategy=strategy,
                events=lambda event: told.append(event.message) if isinstance(event, Warned) else None,
            )
            batch_s = 0.5 if name == "first" else 12.0  # the others are slow: else a quorum of two would merge
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=batch_s, until=lambda: False))
            await sim.sleep(15.0)
        taken = {name: [len(each.takeover.downloads) for each in run.trainers[name].fragments] for name in run.trainers}
        count = len(run.trainers["first"].fragments)
        assert taken == {"first": [0] * count, "second": [1] * count, "third": [1] * count}
        assert len({tuple(each.state for each in trainer.fragments) for trainer in run.trainers.values()}) == 1
        assert not any("the first weights of another peer" in message for message in told)
        await run.close()

    sim.run(main, seed=4)


@BEGINNINGS
def test_of_two_that_began_apart_one_takes_all_of_the_other_and_is_told_what_is_lost(strategy: Merges | None) -> None:
    """Neither saw the other when it began, so both have the first rank."""

    async def main() -> None:
        run, lost = Run(target=1000), list[str]()

        def note(name: str, event: Event) -> None:
            if isinstance(event, Warned) and "the first weights of another peer" in event.message:
                lost.append(name)
                assert ": 124 samples that this peer has trained" in event.message

        await run.add("entry", auxiliary=True, strategy=strategy)
        names = ["left", "right"]
        for name, seed in zip(names, (0, 1), strict=True):
            await run.add(name, seed=seed, strategy=strategy, events=partial(note, name))
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=0.5, until=lambda: False))
            if name == "left":
                run.swarm.partition([["left"]])
        await sim.sleep(15.0)
        run.swarm.heal()
        await sim.sleep(30.0)
        taken = {name: {len(each.takeover.downloads) for each in run.trainers[name].fragments} for name in names}
        assert sorted(taken.values(), key=sorted) == [{0}, {1}], taken
        assert lost == [name for name in names if taken[name] == {1}]
        await run.close()

    sim.run(main, seed=4)


def test_two_that_come_late_to_a_merge_make_none_of_their_own() -> None:
    """They did, if they were a quorum: what they gave to it was lost with their state, the worse one of two."""

    async def main() -> None:
        run, names = Run(target=1), [f"p{number}" for number in range(6)]
        for name in names:
            await run.add(name, strategy=Decoupled(4, fragments=1, quorum=2))
        await sim.sleep(3.0)
        for name in names[:2]:
            participant = run.trainers[name].participant
            participant.swarm_step.average = partial(late, participant.swarm_step.average)  # type: ignore[method-assign]
        for number, name in enumerate(names):
            work = run.trainers[name].train(BATCH, duration_s=2.0 + 0.01 * number, until=lambda: False)
            run.swarm.spawn(name, work)
        await sim.sleep(48.0)
        told = {(epoch, digest) for trainer in run.trainers.values() for _, epoch, _, digest in trainer.epochs}
        assert len(told) == max(epoch for epoch, _ in told) >= 5
        assert run.trainers["p0"].participant.contribution.contributed > 0
        await run.close()

    sim.run(main, seed=4)


def test_a_quorum_waits_for_as_long_as_others_come() -> None:
    """Half a second after the last one of them, while merges are short; and for more than half of all."""

    async def main() -> None:
        run, names = Run(target=1), ["p0", "p1", "p2"]
        for name in names:
            await run.add(name, strategy=Decoupled(4, fragments=1, quorum=2))
        await sim.sleep(3.0)
        participant: Any = run.trainers["p0"].participant
        averager = participant.swarm_step.averager
        search = SimpleNamespace(joined_at=asyncio.get_running_loop().time(), group_size=1, meet=lambda *_, **__: None)
        participant.swarm_step.averager = search
        found = []
        for come in (False, True, False, False):
            if come:
                search.joined_at = asyncio.get_running_loop().time()
            found.append(len(participant.swarm_step._awaited()))
            await sim.sleep(0.3)
        search.group_size = 2
        found.append(len(participant.swarm_step._awaited()))
        assert found == [2, 2, 2, 2, 0]
        participant.swarm_step.averager = averager
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize("away_s", [120.0, pytest.param(3600.0, marks=pytest.mark.long(full=True))])
@pytest.mark.parametrize("strategy", [Decoupled(6, fragments=2, quorum=2), StreamingDiLoCo(6, 2, 2)], ids=str)
def test_a_peer_that_was_away_downloads_the_fragments_that_it_lacks(strategy: Merges, away_s: float) -> None:
    """And no bytes of the others, though it was away for longer than others keep the steps."""

    async def main() -> None:
        run, names = Run(target=1, width=16384), ["p0", "p1", "p2"]
        for name in names:
            await run.add(name, strategy=strategy)
        await sim.sleep(3.0)
        trainers = [run.trainers[name] for name in names]

        async def train(trainer: Trainer, until: Callable[[], bool]) -> None:
            await trainer.train(BATCH, duration_s=0.5, until=until)

        def large_one_is_ahead() -> bool:
            return all([each.epoch for each in trainer.fragments] == [2, 3] for trainer in trainers)

        await asyncio.gather(*(run.swarm.run_on(n, train, run.trainers[n], large_one_is_ahead) for n in names))
        away = trainers[2]
        run.swarm.stall("p2", away_s)
        before = away.participant.core.endpoint.traffic[1]

        def merged_thrice() -> bool:
            return all(trainer.fragments[0].epoch >= 5 for trainer in trainers[:2])

        async def fails() -> bool:
            await sim.sleep(1.0)
            return False

        for trainer in trainers[:2]:
            for each in trainer.fragments[1:]:
                each.swarm_step.average = fails  # type: ignore[method-assign]  # it is merged no more
        await asyncio.gather(*(run.swarm.run_on(n, train, run.trainers[n], merged_thrice) for n in names[:2]))
        assert away.fragments[0].epoch == 2
        await sim.sleep(away_s + 1.0)
        while away.fragments[0].epoch < 5:
            await sim.sleep(0.5)
            for each in away.fragments:
                await run.swarm.run_on("p2", away.take_turn, each)
        received = away.participant.core.endpoint.traffic[1] - before
        anchor = away.parameters[1].nbytes
        assert not away.fragments[1].takeover.downloads
        # The anchor and its momentum, and words of all kinds; the other fragment has 12 times as many bytes.
        assert anchor < received < 4 * anchor, (received, anchor)
        await run.close()

    sim.run(main, seed=6)


@pytest.mark.parametrize(
    "strategy", [DiLoCo(4), StreamingDiLoCo(4, fragments=2, overlap=2)], ids=["diloco", "streaming"]
)
def test_a_peer_whose_batches_are_worth_nothing_holds_up_nobody(strategy: Merges) -> None:
    """It takes part in each merge without a weight, and ends with the others' bits."""

    async def main() -> None:
        run = Run(target=1)
        for name in ("p0", "p1"):
            await run.add(name, strategy=strategy)
        await sim.sleep(3.0)
        broken = run.trainers["p1"]
        compute = broken.compute

        def nan(number: int, size: int) -> None:
            compute(number, size)
            for parameter in broken.parameters:
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)

        broken.compute = nan  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        run.announce_end(6)
        for name, trainer in run.trainers.items():
            run.swarm.spawn(name, trainer.train(BATCH, duration_s=0.5, until=lambda: False))
        while not all(trainer.finished for trainer in run.trainers.values()):
            assert asyncio.get_running_loop().time() - began < 6 * 4 * 0.5 + 8.0, "somebody was held up"
            await sim.sleep(0.5)
        assert run.agree(["p0", "p1"])
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize(("every", "apart"), [(4, 1), ("6s", 2)])
def test_all_that_was_trained_of_each_fragment_is_merged_at_the_end(every: int | str, apart: int) -> None:
    """The first merges are spread over the way. The last ones are not: else the first fragment loses batches."""

    async def main() -> None:
        run = Run(target=1)
        for name in ("p0", "p1"):
            await run.add(name, strategy=StreamingDiLoCo(every, fragments=2, overlap=1))
        await sim.sleep(3.0)
        run.announce_end(3)
        await train_to_end(run, 0.5, 0.5)
        assert run.agree(["p0", "p1"])
        for trainer in run.trainers.values():
            counted = [fragment.contribution.contributed for fragment in trainer.fragments]
            assert max(counted) - min(counted) <= apart * BATCH, counted
            assert trainer.batches_done * BATCH - min(counted) <= 3 * BATCH, counted
        assert not any("rounds" in warning for warning in run.warnings), run.warnings
        await run.close()

    sim.run(main, seed=4)


class LastGive:
    """Notes the epoch at which a peer gave to a merge of a fragment last, and how many batches it had done then."""

    def __init__(self, trainer: Trainer, fragment: Participant) -> None:
        self.epoch, self.batches = -1, 0
        training, contribute = fragment.training, fragment.training.contribute

        def contributes() -> tuple[float, float]:
            self.epoch, self.batches = training.epoch, trainer.batches_done
            return contribute()

        training.contribute = contributes  # type: ignore[method-assign]


def ends(seed: int) -> tuple[Merges, list[float], int, list[float]]:
    """A strategy, seconds for a batch of each peer, the number of the end, and how late merges of a fragment are."""
    rng = random.Random(f"ends/{seed}")
    choices: list[int | str] = [4, 6, 10, "2s"]
    every = rng.choice(choices)
    strategies: list[Merges] = [StreamingDiLoCo(every, 2, rng.choice([1, 2, 3]), rng.choice([None, 0.5]))]
    strategy = rng.choice([*strategies, Decoupled(every, 2, 2)])
    speeds = [rng.uniform(0.1, 0.5) for _ in range(rng.choice([2, 3, 4]))]
    return strategy, speeds, rng.choice([1, 2, 4, 6]), [rng.choice([0.0, 0.0, 1.0, 6.0]) for _ in range(12)]


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(number, marks=pytest.mark.long(full=number > 4)) for number in range(3, 60))]
)
def test_a_fragment_whose_merge_waits_for_a_peer_ends_behind_the_others(seed: int) -> None:
    """The others had their last merge long before, and what was trained until the last of all was in that one only.

    All last merges come together: a peer that gives to them has one batch or two under way then.
    """
    strategy, speeds, last, late_s = ends(seed)
    rng = random.Random(seed)

    async def main() -> None:
        run = Run(target=1, width=64)
        for number in range(len(speeds)):
            await run.add(f"p{number}", strategy=strategy)
        await sim.sleep(3.0)
        waits = rng.choice(rng.choice(list(run.trainers.values())).fragments)
        average, left_s = waits.swarm_step.average, iter(late_s)

        async def averages() -> bool:
            await sim.sleep(next(left_s, 0.0))
            return await average()

        waits.swarm_step.average = averages  # type: ignore[method-assign]
        trainers = list(run.trainers.values())
        gives = [[LastGive(trainer, fragment) for fragment in trainer.fragments] for trainer in trainers]
        run.announce_end(last)
        await train_to_end(run, *speeds)
        assert run.agree(list(run.trainers))
        for trainer, gave in zip(trainers, gives, strict=True):
            found = [fragment.status() for fragment in trainer.fragments]
            assert {each.epoch for each in found} == {last}
            assert all(each.contributed + each.dropped == BATCH * trainer.batches_done for each in found), found
            if all(each.epoch == last - 1 for each in gave):  # the peer that is late may be left out
                assert trainer.batches_done - min(each.batches for each in gave) <= 2
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize("strategy", [None, DiLoCo(400), StreamingDiLoCo(400, 2, 1), Decoupled(400, 2)], ids=str)
def test_what_a_peer_had_not_given_when_it_left_was_neither_contributed_nor_dropped(strategy: Merges | None) -> None:
    """Nobody was told of it: now it is dropped, as anything that goes into no step, and the warning says why."""

    async def main() -> None:
        run, told = Run(target=1000 * BATCH), list[Event]()
        leaves = await run.add("p0", strategy=strategy, events=told.append)
        work = leaves.train(BATCH, duration_s=0.5, until=lambda: leaves.batches_done == 150)
        await run.swarm.run_on("p0", lambda: work)
        assert all(fragment.account.held == 150 * BATCH for fragment in leaves.fragments)
        for fragment in leaves.fragments:
            await run.swarm.run_on("p0", fragment.close)
            assert (fragment.contribution.dropped, fragment.account.held) == (150 * BATCH, 0)
        dropped = [(each.dropped, each.computed) for each in told if isinstance(each, SamplesDropped)]
        assert dropped == [(150 * BATCH, 150 * BATCH)]
        warned = [each.message for each in told if isinstance(each, Warned)]
        assert sum("this peer leaves between two steps of the swarm" in each for each in warned) == 1, warned
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize("every", ["2s", 20])
def test_fragments_for_which_a_quorum_was_lacking_stay_together(every: int | str) -> None:
    """They do not: all were merged at the moment when it came. Yet the last merges are together, with all batches."""

    async def main() -> None:
        run, at = Run(target=1), dict[str, list[float]]()
        await run.add("p0", strategy=Decoupled(every, fragments=2, quorum=2))
        loop, first = asyncio.get_running_loop(), run.trainers["p0"]

        def note(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                at.setdefault(event.run_id, []).append(loop.time())

        first.participant.core.env.events.subscribe(note)
        run.swarm.spawn("p0", first.train(BATCH, duration_s=0.1, until=lambda: False))
        await sim.sleep(9.0)
        await run.add("p1", strategy=Decoupled(every, fragments=2, quorum=2))
        run.announce_end(7)
        run.swarm.spawn("p1", run.trainers["p1"].train(BATCH, duration_s=0.1, until=lambda: False))
        while not all(trainer.finished for trainer in run.trainers.values()):
            await sim.sleep(0.5)
        counted = [fragment.contribution.contributed for fragment in first.fragments]
        assert max(counted) - min(counted) <= 2 * BATCH, counted
        assert max(times[-1] for times in at.values()) - min(times[-1] for times in at.values()) < 0.4
        fifth = sorted(times[4] for times in at.values())
        assert min(later - earlier for earlier, later in itertools.pairwise(fifth)) > 0.5
        await run.close()

    sim.run(main, seed=4)


def _newcomers(number: int) -> tuple[Merges, list[float], str]:
    """A strategy, seconds for a batch of the peer that was there first and of each newcomer, and what it does then."""
    rng = random.Random(number)
    every = rng.choice([4, 10, 20, 40])
    strategies: list[Merges] = [DiLoCo(every), LocalSGD(every), StreamingDiLoCo(every, fragments=2, overlap=1)]
    merging = rng.choice(strategies)
    base_s = rng.choice([0.1, 0.3, 1.0])
    speeds = [base_s * rng.choice([0.25, 1.0, 1.0, 1.2, 1.5, 2.0]) for _ in range(rng.choice([2, 3, 5, 8]))]
    return merging, [base_s, *speeds], rng.choice(["stays", "leaves", "dies"])


UNEQUAL = [0.3, 0.08, 0.3, 0.33, 0.36]


@pytest.mark.parametrize(
    ("strategy", "speeds", "first"),
    [
        (DiLoCo(20), UNEQUAL, "stays"),
        (DiLoCo(20), UNEQUAL, "leaves"),
        (DiLoCo(20), UNEQUAL[:4], "dies"),
        *(pytest.param(*_newcomers(number), marks=pytest.mark.long(full=number > 0)) for number in range(40)),
    ],
)
def test_newcomers_of_other_speeds_give_to_each_merge(strategy: Merges, speeds: list[float], first: str) -> None:
    """The fastest one waited for the others once, in vain. Then it made all merges alone, and what they gave was lost.

    They counted themselves beside the one that was there before, and came later than it expected. Where that one left,
    the fastest waited for them no longer than for strangers beside a run.
    """

    async def main() -> None:
        run, told = Run(target=1), list[str]()
        names = [f"p{number}" for number in range(len(speeds))]
        for name, batch_s in zip(names, speeds, strict=True):
            await run.add(
                name,
                strategy=strategy,
                events=lambda event: told.append(event.message) if isinstance(event, Warned) else None,
            )
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=batch_s, until=lambda: False))
            while name == "p0" and run.trainers["p0"].participant.epoch < 3:
                await sim.sleep(0.1)
        newcomers = [run.trainers[name] for name in names[1:]]
        while any(trainer.participant.epoch < 3 for trainer in newcomers):
            await sim.sleep(0.1)
        if first == "leaves":
            await run.swarm.run_on("p0", run.trainers["p0"].participant.close)
        elif first == "dies":
            run.swarm.crash("p0")
        merge_s = (strategy.merging.steps or 0) * max(speeds)
        await sim.sleep(10.0 + 5 * merge_s)  # the first ones wait for others that come late, once
        assert not any("does not come" in message or "none of the samples" in message for message in told), told
        for batch_s, trainer in zip(speeds[1:], newcomers, strict=True):
            status = trainer.participant.status()
            assert trainer.alone == 0
            # Where peers wait for a merge, a batch that was under way when it began is lost; and to a newcomer that
            # comes late to its first one, what it has trained until then.
            lost = 2 + (len(trainer.epochs) + 2 * (strategy.merging.steps or 0) if strategy.merging.waits else 0)
            # Of one that is faster than all others were, the first merges count in part only (`words.may_give`).
            cut = 0.1 * status.contributed if batch_s < speeds[0] else 0.0
            assert status.dropped <= lost * BATCH + cut
            assert lost * BATCH < status.contributed
            assert len(trainer.epochs) >= 5
        await run.close()

    sim.run(main, seed=3)


def test_a_member_that_names_better_states_keeps_nobody_out() -> None:
    """Its steps were followed, so it seemed to give what it had named: one peer stayed behind it for good."""

    async def main() -> None:
        run, names = Run(target=1), ["p0", "p1", "p2", "liar"]
        for name, batch_s in zip(names, (0.3, 0.3, 0.2, 0.25), strict=True):
            if name == "liar":
                await sim.sleep(5.0)
            await run.add(name, strategy=StreamingDiLoCo(8, fragments=2, overlap=1))
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=batch_s, until=lambda: False))
        for fragment in run.trainers["liar"].fragments:
            fragment.progress = partial(_better, fragment.progress)  # type: ignore[method-assign]
        for pause_s, name, silent_s in (
            (2.06, "p0", 1.29),
            (2.77, "p1", 0.67),
            (1.09, "p2", 1.05),
        ):  # they follow steps
            await sim.sleep(pause_s)
            run.swarm.partition([[name]])
            await sim.sleep(silent_s)
            run.swarm.heal()
        await sim.sleep(12.0)
        honest = [fragment for name in names[:3] for fragment in run.trainers[name].fragments]
        before = [fragment.status().contributed for fragment in honest]
        await sim.sleep(12.0)
        gave = [fragment.status().contributed - earlier for fragment, earlier in zip(honest, before, strict=True)]
        assert min(gave) > 0.5 * 12.0 / 0.3 * BATCH, gave
        await run.close()

    sim.run(main, seed=3)


def _better(said: Callable[[], Progress]) -> Progress:
    word = said()
    samples = word.branch_samples + 10**6
    return msgspec.structs.replace(word, epoch=word.epoch + 1000, branch_samples=samples, digest=bytes(32))
