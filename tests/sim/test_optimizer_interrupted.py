"""Trainers that are interrupted or away, while the swarm steps: what was begun is done once, and under its own name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.compression import view_bytes
from shoal.events import Warned
from shoal.run.decide.phases import RunPhase
from tests.sim.optimizer_kit import Run, Trainer

BATCH = 4


async def two_at_their_first_step(run: Run) -> tuple[Trainer, Trainer]:
    """Both have the first average, and have not stepped yet."""
    trainers = (await run.add("p0"), await run.add("p1"))
    await sim.sleep(3.0)
    for trainer in trainers:
        trainer.participant.training.accumulators[0].fill_(0.5)
        trainer.participant.training.pending.total.samples = BATCH
        trainer.participant.turn.accumulated()
    await sim.sleep(1.0)
    assert [trainer.participant.phase for trainer in trainers] == [RunPhase.STEPPING] * 2
    return trainers


async def train_until(run: Run, epoch: int) -> None:
    """All trainers take batches until they have this epoch."""

    async def train(trainer: Trainer) -> None:
        await trainer.train(BATCH, duration_s=0.1, until=lambda: trainer.participant.epoch >= epoch)

    await asyncio.gather(*(run.swarm.run_on(name, train, trainer) for name, trainer in run.swarm.peers.items()))


class Interrupted(BaseException):
    """As `KeyboardInterrupt`, which the test runner would take for its own."""


def interrupt_in_the_middle(trainer: Trainer, error: BaseException | None = None) -> None:
    """Its next optimizer step changes the first parameter only, and ends with this error."""
    optimizer: Any = trainer.participant.training.optimizer
    whole = optimizer.step

    def half() -> None:
        optimizer.step = whole
        kept = trainer.parameters[1].grad
        trainer.parameters[1].grad = None
        whole()
        trainer.parameters[1].grad = kept
        raise error or Interrupted

    optimizer.step = half


def test_a_trainer_interrupted_between_step_and_telling_goes_on() -> None:
    """The step was taken: the next call tells it, and the one after that trains on."""

    async def main() -> None:
        run = Run(target=2 * BATCH, average_state_every=1)
        for trainer in await two_at_their_first_step(run):
            trainer.participant.own.step()
        for name in ("p0", "p1"):
            await run.swarm.run_on(name, run.swarm.peer(name).take_turn)
        await asyncio.gather(*(run.swarm.run_on(n, run.swarm.peer(n).finish_epoch, 1) for n in ("p0", "p1")))
        await sim.sleep(3.0)
        for name in ("p0", "p1"):
            await run.swarm.run_on(name, run.swarm.peer(name).take_turn)
        assert [trainer.participant.training.epoch for trainer in run.swarm.peers.values()] == [1, 1]
        assert run.agree(["p0", "p1"])
        await train_until(run, epoch=3)
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=1)


def test_one_interrupt_while_a_step_is_told_disables_a_peer_for_good() -> None:
    """It was cancelled while it left those that it had followed: a step was due for ever, and there was none."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        first, second = await two_at_their_first_step(run)
        participant = first.participant
        leaving = asyncio.Event()

        async def left_slowly() -> None:
            leaving.set()
            await sim.sleep(1.0)

        participant._catch_up.joined = left_slowly  # type: ignore[method-assign]
        turn = run.swarm.spawn("p0", first.take_turn())
        await leaving.wait()
        turn.cancel()
        await run.swarm.run_on("p1", second.take_turn)
        await asyncio.wait([turn])
        await train_until(run, epoch=3)
        assert run.agree(["p0", "p1"])
        await run.close()

    sim.run(main, seed=2, max_time_s=600.0)


def test_one_interrupt_after_a_download_disables_a_peer_for_good() -> None:
    """A step was due, of the state before: it was due for ever, if nobody was told of the download's end."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        first, second = await two_at_their_first_step(run)
        await run.swarm.run_on("p1", second.take_turn)
        await sim.sleep(1.0)
        participant = first.participant
        wait = participant._fetching.wait

        async def interrupted(*args: Any, **options: Any) -> bool:
            await wait(*args, **options)
            raise asyncio.CancelledError

        participant._fetching.wait = interrupted  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await run.swarm.run_on("p0", participant.turn.download, 30.0)
        participant._fetching.wait = wait  # type: ignore[method-assign]
        assert participant.epoch == 1
        await train_until(run, epoch=3)
        assert run.agree(["p0", "p1"])
        await run.close()

    sim.run(main, seed=2, max_time_s=600.0)


@pytest.mark.parametrize("how", ["downloads", "interrupted"])
def test_a_member_that_downloads_the_state_of_its_round_stops_the_run(how: str) -> None:
    """The others averaged their states with it, and waited for it for ever, as it knew of no average that is due."""

    async def main() -> None:
        run = Run(target=2 * BATCH, average_state_every=1)
        first, second = await two_at_their_first_step(run)
        await run.swarm.run_on("p1", second.take_turn)
        if how == "interrupted":
            interrupt_in_the_middle(first)
            with pytest.raises(Interrupted):
                await run.swarm.run_on("p0", first.take_turn)
            await run.swarm.run_on("p0", first.participant.stepped)
        await sim.sleep(1.0)
        assert await run.swarm.run_on("p0", first.participant.turn.download, 30.0)
        await train_until(run, epoch=3)
        assert run.agree(["p0", "p1"])
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=2, max_time_s=60.0)


def test_an_average_of_states_keeps_no_trainer_waiting() -> None:
    """It is computed while one trains and the other is away, and each takes it at its next step.

    So two optimizers in one loop do not wait for each other: what the one waits for needs no step of the other.
    """

    async def main() -> None:
        run = Run(target=2 * BATCH, average_state_every=1)
        first, second = await two_at_their_first_step(run)
        loop = asyncio.get_running_loop()
        before = loop.time()
        await run.swarm.run_on("p0", first.take_turn)
        assert loop.time() - before < 0.1
        await sim.sleep(2.0)  # the other one is in the middle of a long batch
        await run.swarm.run_on("p1", second.take_turn)
        await sim.sleep(2.0)
        states = [trainer.participant.state for trainer in (first, second)]
        assert states[0] == states[1]
        for name in ("p0", "p1"):
            await run.swarm.run_on(name, run.swarm.peer(name).take_turn)
        assert run.agree(["p0", "p1"])
        assert first.participant.state.samples == states[0].samples + 1
        assert first.downloads == second.downloads == 0
        await run.close()

    sim.run(main, seed=2)


def test_a_step_that_was_interrupted_is_not_taken_again_and_the_others_state_is_downloaded() -> None:
    """Half of the parameters have moved: they are not what the others call by that name, and it is not done twice."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        first, second = await two_at_their_first_step(run)
        interrupt_in_the_middle(second)
        await run.swarm.run_on("p0", first.take_turn)
        with pytest.raises(Interrupted):
            await run.swarm.run_on("p1", second.take_turn)
        states = [trainer.participant.state for trainer in (first, second)]
        assert states[0] != states[1]
        assert states[0].key > states[1].key
        moved = second.parameters[0].clone()
        await run.swarm.run_on("p1", second.take_turn)
        assert torch.equal(second.parameters[0], moved)
        await sim.sleep(1.0)
        await run.swarm.run_on("p1", second.take_turn)
        assert second.downloads == 1
        assert run.agree(["p0", "p1"])
        assert second.participant.training.epoch == 1
        await run.close()

    sim.run(main, seed=3)


@pytest.mark.parametrize("others", [0, 1])
def test_an_error_of_the_inner_optimizer_counts_as_an_epoch_without_a_step(others: int) -> None:
    """The peer named a state of the next epoch, and the warning spoke of an interruption."""

    async def main() -> None:
        run = Run(target=BATCH * (1 + others))
        trainers = await two_at_their_first_step(run) if others else [await run.add("p0")]
        trainer, before, told = trainers[0], trainers[0].participant.state, list[str]()
        trainer.participant.core.env.events.subscribe(
            lambda event: told.append(event.message) if isinstance(event, Warned) else None
        )
        interrupt_in_the_middle(trainer, RuntimeError("no such kernel"))
        with pytest.raises(RuntimeError, match="no such kernel"):
            await run.swarm.run_on("p0", trainer.take_turn if others else partial(trainer.take_batch, BATCH))
        participant = trainer.participant
        assert participant.epoch == participant.training.epoch == 0
        assert participant.state != before
        assert participant.state.samples == 0
        await run.swarm.run_on("p0", trainer.take_turn)
        assert any("own step raised RuntimeError: no such kernel" in each for each in told), told
        assert not any("interrupted" in each for each in told)
        if others:
            await run.swarm.run_on("p1", trainers[1].take_turn)
            await train_until(run, epoch=3)
            assert run.agree(["p0", "p1"])
            assert trainer.downloads <= 2  # the other may not have stepped yet: then its state before comes first
            gave = [each.participant.own.lineage.contributed for each in trainers]
            assert sum(gave) == participant.state.samples  # also what was in the step that it did not take
        else:
            await run.swarm.run_on("p0", trainer.take_batch, BATCH)
            await run.swarm.run_on("p0", trainer.finish_epoch, 1)
        await run.close()

    sim.run(main, seed=4)


@pytest.mark.parametrize("known", [True, False])
def test_samples_of_steps_stayed_contributed_when_an_earlier_state_was_loaded(*, known: bool) -> None:
    """They are dropped with the steps, as where the state of others is taken over."""

    async def main() -> None:
        run = Run(target=BATCH)
        trainer = await run.add("p0")
        await train_until(run, epoch=3)
        own, earlier = trainer.participant.own, trainer.participant.state
        before = own.lineage.contributed
        await train_until(run, epoch=5)
        assert own.lineage.contributed > before > 0
        saved = earlier if known else earlier._replace(digest=b"of another peer".ljust(32))
        own.loaded(own.loading(), saved, unchanged=True)
        assert own.lineage.contributed == (before if known else 0)  # nobody else has held what it has trained alone
        await run.close()

    sim.run(main, seed=4)


def test_alone_an_interrupted_step_counts_and_training_goes_on() -> None:
    """There is nobody to download from."""

    async def main() -> None:
        run = Run(target=BATCH)
        trainer = await run.add("p0")
        interrupt_in_the_middle(trainer)
        with pytest.raises(Interrupted):
            await run.swarm.run_on("p0", trainer.take_batch, BATCH)
        for epoch in (1, 2, 3):
            assert trainer.participant.epoch == trainer.participant.training.epoch == epoch
            await run.swarm.run_on("p0", trainer.take_batch, BATCH)
            await run.swarm.run_on("p0", trainer.finish_epoch, epoch + 1)
        await run.close()

    sim.run(main, seed=4)


def test_a_state_that_is_taken_over_while_a_step_alone_waits_for_the_lock_is_not_stepped_from() -> None:
    """The accumulators were forgotten: what they hold belongs to no state."""

    async def main() -> None:
        run = Run(target=BATCH)
        trainer = await run.add("p0")
        await sim.sleep(3.0)
        participant = trainer.participant
        async with participant.own.lock.acquire():
            participant.training.accumulators[0].fill_(7.0)
            participant.training.pending.total.samples = BATCH
            participant.turn.accumulated()
            await sim.sleep(1.0)
            before = participant.phase
            participant.training.discard()
            other = participant.state.after_step_alone(b"x" * 16, b"y" * 32, 3)
            participant.own.name = other
        await sim.sleep(1.0)
        assert (before, participant.phase) == (RunPhase.AVERAGING, RunPhase.COLLECTING)
        assert participant.state == other
        assert await participant.turn.decide(1.0) is RunPhase.COLLECTING
        await run.close()

    sim.run(main, seed=5)


def test_a_state_that_is_taken_over_during_a_round_is_not_stepped_with_its_average() -> None:
    """The average belongs to the state before; the others have stepped from it, and are better now."""

    async def main() -> None:
        run = Run(target=2 * BATCH)
        first, second = await run.add("p0"), await run.add("p1")
        await sim.sleep(3.0)
        late = second.participant
        take = late._averager.vector.copy_in

        def replaced(*args: Any) -> Any:
            found = take(*args)
            late.training.discard()
            late.own.name = late.state.after_step_alone(b"x" * 16, b"y" * 32, 0)
            return found

        late._averager.vector.copy_in = replaced  # type: ignore[assignment]
        for trainer in (first, second):
            trainer.participant.training.pending.total.samples = BATCH
            trainer.participant.turn.accumulated()
        await sim.sleep(3.0)
        assert late.phase is RunPhase.BEHIND or late.phase is RunPhase.COLLECTING
        assert late.training.pending.samples == 0
        assert first.participant.phase is RunPhase.STEPPING
        await run.close()

    sim.run(main, seed=6)


def test_under_one_name_there_is_one_state_whenever_the_lock_is_free() -> None:
    """A donor copies under the lock: what it finds there must be what the name says, also right after an averaging."""

    async def main() -> None:
        run = Run(target=2 * BATCH, average_state_every=1)
        extra = [torch.zeros(3), torch.zeros(3)]
        names = ["p0", "p1"]
        for name, tensor in zip(names, extra, strict=True):
            await run.add(name, extra_tensors=[tensor])
        found: dict[str, dict[bytes, set[bytes]]] = {name: {} for name in names}

        def look_before_each_release(name: str, participant: Any) -> None:
            acquire, tensors = participant.own.lock.acquire, participant.training.tensors.all

            @asynccontextmanager
            async def looked_at(timeout_s: float | None = None) -> AsyncIterator[bool]:
                async with acquire(timeout_s) as has_come:
                    yield has_come
                    content = b"".join(bytes(view_bytes(tensor.detach())) for tensor in tensors)
                    found[name].setdefault(participant.state.digest, set()).add(content)

            participant.own.lock.acquire = looked_at

        await sim.sleep(3.0)
        extra[1].fill_(1.0)  # as statistics of other batches
        for name in names:
            look_before_each_release(name, run.swarm.peer(name).participant)
        await train_until(run, epoch=4)
        assert all(len(contents) == 1 for of_one in found.values() for contents in of_one.values())
        assert len(found["p0"]) > 4
        assert not run.warnings, run.warnings
        await run.close()

    sim.run(main, seed=7)


def test_a_schedule_that_has_an_end_does_not_end_the_run() -> None:
    """`OneCycleLR` raises beyond its last step: the rates stay, the steps go on, and the user is told once."""

    async def main() -> None:
        run = Run(target=BATCH)
        trainer = await run.add("p0")
        training = trainer.participant.training
        training.schedule.scheduler = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.1, total_steps=3)
        warned: list[str] = []
        trainer.participant.core.env.events.subscribe(
            lambda event: warned.append(event.message) if isinstance(event, Warned) else None
        )
        for _ in range(6):
            await run.swarm.run_on("p0", trainer.take_batch, BATCH)
        assert trainer.participant.epoch == training.epoch == 6
        assert [message for message in warned if "the schedule goes no further than 3 steps" in message] == warned
        assert len(warned) == 1
        await run.close()

    sim.run(main, seed=8)
