"""A user puts other weights in place between two steps: what is shared under a state's name is still that state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.events import Event, Warned
from shoal.optim import Participant
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, Strategy
from tests.sim.optimizer_kit import Run, Trainer
from tests.situations import reaches

NAMES = ["p0", "p1", "p2"]


@contextmanager
def others(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Other weights are in place, by `.data`, as libraries for averaged weights do it; yields those of before."""
    before = [each.detach().clone() for each in parameters]
    for each in parameters:
        each.data.copy_(each.detach() + 1.0)
    yield before
    for each, own in zip(parameters, before, strict=True):
        each.data.copy_(own)


class Evaluating(Trainer):
    """Evaluates with other weights for a while, in each epoch once: after so many batches."""

    evaluates_s, after = 0.0, 0
    _seen, _batches = 0, 0

    async def take_batch(self, size: int, *, number: int | None = None, duration_s: float = 0.0) -> None:
        await super().take_batch(size, number=number, duration_s=duration_s)
        epoch = self.participant.epoch
        self._batches = 0 if epoch != self._seen else self._batches + 1
        self._seen = epoch
        if self.evaluates_s and epoch and self._batches == self.after and not self.finished:
            with others(self.parameters):
                await sim.sleep(self.evaluates_s)


async def train(
    epochs: int, evaluates_s: float, *, after: int = 0, of_run: Any = None, **of_peer: Any
) -> tuple[Run, list[str]]:
    """Three peers, of which the first evaluates; returns the run, and the warnings of all."""
    run, said = Run(target=24, **{"trainer": Evaluating, **(of_run or {})}), list[str]()

    def note(event: Event) -> None:
        if isinstance(event, Warned):
            said.append(event.message)

    for name in NAMES:
        await run.add(name, events=note, **of_peer)
    if isinstance(trainer := run.swarm.peer(NAMES[0]), Evaluating):
        trainer.evaluates_s, trainer.after = evaluates_s, after
    await sim.sleep(3.0)
    run.announce_end(epochs)

    async def loop(name: str) -> None:
        mine = run.swarm.peer(name)
        while not mine.finished:
            await mine.take_batch(4, duration_s=0.2)

    await asyncio.gather(*(run.swarm.run_on(name, loop, name) for name in NAMES))
    await run.close()
    return run, said


def test_a_newcomer_was_given_the_weights_that_its_donor_evaluates_with() -> None:
    """It waits until those of the state are back, and nobody warns of anything."""
    told = list[str]()

    def note(event: Event) -> None:
        if isinstance(event, Warned):
            told.append(event.message)

    async def main() -> None:
        run = Run(target=8)
        donor = await run.add("p0", events=note)
        await run.swarm.run_on(
            "p0", partial(donor.train, 4, duration_s=0.1), until=lambda: donor.participant.epoch == 3
        )
        with others(donor.parameters) as true:
            newcomer = await run.add("p1", seed=5, events=note)
            loading = asyncio.ensure_future(run.swarm.run_on("p1", newcomer.participant.turn.download, 60.0))
            await sim.sleep(8.0)
            assert not loading.done()
        assert await loading
        assert newcomer.participant.state == donor.participant.state
        assert all(map(torch.equal, newcomer.parameters, true))
        assert not [each for each in told if "cannot be sent" in each or "changed between" in each]
        await run.close()

    with reaches("a donor's parameters are not those of its state"):
        sim.run(main, seed=1)


@pytest.mark.parametrize("evaluates_s", [0.15, 1.5])
def test_the_check_blamed_a_peer_that_evaluated_with_other_weights(evaluates_s: float) -> None:
    """It looks when they are back, or leaves this one out; nobody downloads for it."""

    async def main() -> None:
        run, said = await train(14, evaluates_s, check_every=2)
        assert not [each for each in said if "check of the parameters" in each or "changed between" in each]
        assert run.agree(NAMES)
        check = run.swarm.peer(NAMES[0]).participant.progress().check
        assert check is not None
        assert check[1] == check[2]

    with reaches("parameters are not those of the state when they are to be checked"):
        sim.run(main, seed=2)


def test_a_change_of_one_peer_near_the_end_was_neither_told_nor_mended() -> None:
    """The last check was before: the run ended with unequal weights, and nobody said a word."""

    async def main() -> None:
        run, told = Run(target=24), list[str]()

        def note(event: Event) -> None:
            if isinstance(event, Warned):
                told.append(event.message)

        for name in NAMES:
            await run.add(name, check_every=10, events=note if name == "p0" else None)
        await sim.sleep(3.0)
        run.announce_end(13)

        async def loop(name: str) -> None:
            mine, done = run.swarm.peer(name), False
            while not mine.participant.finished:
                await mine.take_batch(4, duration_s=0.2)
                if name == "p0" and mine.participant.epoch >= 9 and not done:
                    done = True
                    with torch.no_grad():
                        for each in mine.parameters:
                            each.mul_(0.5)

        await asyncio.gather(*(run.swarm.run_on(name, loop, name) for name in NAMES))
        assert run.agree(NAMES)
        assert len([each for each in told if "changed between two steps of the swarm" in each]) == 1
        assert len([each for each in told if "ours differ" in each]) == 1
        await run.close()

    sim.run(main, seed=3)


class EvaluatesAtOnce(Evaluating):
    """Has other weights in place as soon as a step is taken, and for a second."""

    async def step(self, participant: Participant) -> None:
        async with participant.own.hold():
            participant.own.step()
        if not self.evaluates_s:
            await participant.stepped()
            return
        with others(self.parameters):
            await participant.stepped()
            await sim.sleep(1.0)


def test_an_average_of_states_took_in_the_weights_of_an_evaluation() -> None:
    """A peer that evaluates gives none, and takes what the others have averaged, as it is."""

    async def main() -> None:
        run = {"average_state_every": 1, "trainer": EvaluatesAtOnce}
        ended, said = await train(7, 1.0, after=99, of_run=run, check_every=0)
        assert not [each for each in said if "changed between" in each]
        assert ended.agree(NAMES)
        for name in NAMES:
            assert max(float(each.detach().abs().max()) for each in ended.swarm.peer(name).parameters) < 1.0

    sim.run(main, seed=4)


@pytest.mark.parametrize("strategy", [None, DiLoCo(3), Decoupled(3, fragments=2)])
def test_a_merge_took_in_the_weights_of_an_evaluation(strategy: Strategy | None) -> None:
    """Neither with local updates nor with a strategy: what is trained stays as small as it begins."""

    async def main() -> None:
        local: dict[str, Any] = {"use_local_updates": True, "delay_grad_averaging": True} if strategy is None else {}
        run, said = await train(6, 2.0, after=1, strategy=strategy, check_every=0, **local)
        assert not [each for each in said if "changed between" in each]
        largest = max(float(each.detach().abs().max()) for name in NAMES for each in run.swarm.peer(name).parameters)
        assert largest < 1.5
        assert run.agree(NAMES)

    sim.run(main, seed=5)


class Clips(Trainer):
    """Clips its weights after each step, as critics of GANs do, and goes on training from what is left."""

    async def take_batch(self, size: int, *, number: int | None = None, duration_s: float = 0.0) -> None:
        await super().take_batch(size, number=number, duration_s=duration_s)
        with torch.no_grad():
            for each in self.parameters:
                each.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("strategy", [None, Decoupled(4, fragments=2)])
def test_peers_that_clip_their_weights_after_each_step_merged_nothing(strategy: Strategy | None) -> None:
    """Theirs counted as weights of an evaluation at any time: nobody had any weight in any merge."""

    async def main() -> None:
        local: dict[str, Any] = {"use_local_updates": True, "delay_grad_averaging": True} if strategy is None else {}
        run, _ = await train(4, 0.0, of_run={"trainer": Clips}, strategy=strategy, check_every=0, **local)
        peers = [run.swarm.peer(name) for name in NAMES]
        assert min(peer.participant.epoch for peer in peers) == 4
        for status in (peer.participant.status() for peer in peers):
            assert status.dropped < 0.2 * status.contributed

    sim.run(main, seed=6)


def test_peers_that_clip_their_weights_after_each_step_were_warned_for_ever() -> None:
    """All of them do it, so they hold one state. That it is done at all is told twice at most."""

    async def main() -> None:
        run, said = await train(23, 0.0, of_run={"trainer": Clips}, check_every=4)
        check = run.swarm.peer(NAMES[0]).participant.progress().check
        assert check is not None
        assert check[1] == check[2]
        assert not [each for each in said if "check of the parameters" in each]
        assert len([each for each in said if "changed between two steps" in each]) <= 2 * len(NAMES)

    sim.run(main, seed=6)


@pytest.mark.parametrize("same", [True, False], ids=["on all", "on one"])
def test_first_weights_that_a_program_has_written_were_lost_without_a_word(same: bool) -> None:
    """After the optimizer was made, and before the first step. If all write the same, nobody is told anything."""

    async def main() -> None:
        run, told = Run(target=24), dict[str, list[str]](p0=[], p1=[])

        def note(name: str, event: Event) -> None:
            if isinstance(event, Warned):
                told[name].append(event.message)

        for name in told:
            await run.add(name, events=partial(note, name))
        await sim.sleep(3.0)
        first, other = (run.trainers[name].participant for name in told)

        async def write(participant: Participant, factor: float) -> None:
            async with participant.own.hold():
                forgotten = participant.own.loading()
                for each in participant.training.parameters:
                    each.data.mul_(factor)
                participant.own.loaded(forgotten, None)
            await participant.tell_loaded()

        for factor in (0.5, 0.75, 1.25, 1.5):  # until this one has the worse state
            await write(first, factor)
            if first.state.key < other.state.key:
                break
            await write(first, 1 / factor)
        if same:
            await write(other, factor)
        run.announce_end(2)

        async def loop(name: str) -> None:
            mine = run.trainers[name]
            while not mine.finished:
                await mine.take_batch(4, duration_s=0.2)

        await asyncio.gather(*(run.swarm.run_on(name, loop, name) for name in told))
        assert run.agree(list(told))
        assert not told["p1"]
        assert ["this program has loaded or written" in each for each in told["p0"]] == ([] if same else [True])
        await run.close()

    sim.run(main, seed=8)


class WritesOnce(Trainer):
    """Adds to one of its parameters, once."""

    writes = False

    async def take_batch(self, size: int, *, number: int | None = None, duration_s: float = 0.0) -> None:
        await super().take_batch(size, number=number, duration_s=duration_s)
        if self.writes and self.batches_done == 7:
            self.writes = False
            with torch.no_grad():
                self.parameters[0] += 3.0


_MEAN = partial(torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize(
    "strategy", [None, LocalSGD(3), DiLoCo(3, outer=_MEAN), Decoupled(3, fragments=2, outer=_MEAN)]
)
def test_weights_that_a_program_writes_were_merged_without_a_word(strategy: Strategy | None) -> None:
    """A write is a change of this peer: the next average has its share of it, and the user is told so, once."""

    async def main() -> None:
        run, told = Run(target=24, lr=1e-9, trainer=WritesOnce), list[str]()

        def note(event: Event) -> None:
            if isinstance(event, Warned):
                told.append(event.message)

        local: dict[str, Any] = {"use_local_updates": True, "delay_grad_averaging": True} if strategy is None else {}
        for name in NAMES:
            await run.add(name, events=note if name == "p0" else None, strategy=strategy, check_every=0, **local)
        first = run.swarm.peer("p0")
        before = first.parameters[0].detach().clone()
        assert isinstance(first, WritesOnce)
        first.writes = True
        await sim.sleep(3.0)
        run.announce_end(8)

        async def loop(name: str) -> None:
            mine = run.swarm.peer(name)
            while not mine.finished:
                await mine.take_batch(4, duration_s=0.2)

        await asyncio.gather(*(run.swarm.run_on(name, loop, name) for name in NAMES))
        assert run.agree(NAMES)
        moved = first.parameters[0].detach() - before
        assert float(moved.min()) == pytest.approx(float(moved.max()), abs=1e-6)
        assert 0.5 < float(moved.mean()) < 1.5
        assert len([each for each in told if "changed between two batches" in each]) == 1
        await run.close()

    sim.run(main, seed=7)
