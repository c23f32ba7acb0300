"""What a newcomer does that cannot have the state of the run: it waits, and says what it does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from shoal import sim
from shoal.errors import ConfigError, StateUnavailable
from shoal.events import Warned
from shoal.sim import SimNetwork
from shoal.state.wire.pace import MIN_BYTES_PER_S
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.test_catch_up import ballast


def warnings_of(trainer: Trainer) -> list[str]:
    """Filled with what the user of this peer is warned of."""
    warned: list[str] = []
    trainer.participant.core.env.events.subscribe(
        lambda event: warned.append(event.message) if isinstance(event, Warned) and event.where == "optimizer" else None
    )
    return warned


async def run_beside_a_donor_that_dies(run: Run, **changes: Any) -> tuple[Trainer, list[str]]:
    """A donor that is at some epoch, and a newcomer whose only donor dies before it has given anything."""
    donor = await run.add("donor")
    run.swarm.spawn("donor", donor.train(4, duration_s=0.25, until=lambda: False))
    await sim.sleep(10.0)
    late = await run.add("late", seed=99, **changes)
    warned = warnings_of(late)
    while not late.participant.view().behind:
        await sim.sleep(0.1)
    run.swarm.crash("donor")
    assert donor.participant.epoch > 5
    return late, warned


def until(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed from now."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    return lambda: loop.time() > end


def test_a_newcomer_does_not_wait_for_the_state_of_one_that_has_left_in_order() -> None:
    """It waited for 600 s for a state that nobody had any more."""

    async def main() -> None:
        network = SimNetwork(8)
        network.add_host("late", down_bytes_s=20_000)  # the state takes it 100 s
        run = Run(target=8, network=network)
        donor = await run.add("donor", extra_tensors=ballast(0, 2 << 20))
        run.swarm.spawn("donor", donor.train(4, duration_s=0.25, until=lambda: donor.participant.course.is_closed))
        await sim.sleep(10.0)
        late = await run.add("late", seed=99, extra_tensors=ballast(99, 2 << 20))
        while not late.participant.takeover.beginning.peers:
            await sim.sleep(0.1)
        training = run.swarm.spawn("late", late.train(4, duration_s=0.5, until=until(30.0)))
        await sim.sleep(5.0)
        assert late.participant.epoch == 0
        await run.swarm.run_on("donor", donor.participant.close)
        run.swarm.crash("donor")
        await sim.sleep(5.0)
        assert late.participant.epoch > 2
        await training
        await run.close()

    sim.run(main, seed=8)


def test_a_newcomer_whose_only_donor_dies_does_not_begin_at_epoch_0_at_once() -> None:
    """It trained from epoch 0, and no event said so: now it waits for `load_state_timeout`, begins, and says both."""

    async def main() -> None:
        run = Run(target=8)
        late, warned = await run_beside_a_donor_that_dies(run, state_patience_s=60.0)
        await run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=until(50.0))
        assert late.participant.epoch == 0
        assert [message for message in warned if "this peer waits for it, up to 60 s" in message], warned
        await run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=until(30.0))
        assert late.participant.epoch > 5
        told = [message for message in warned if "training begins at epoch 0" in message and "require_state" in message]
        assert len(told) == 1, warned
        await run.close()

    sim.run(main, seed=1)


def test_a_newcomer_whose_state_comes_slowly_says_how_much_is_missing_and_how_long_it_takes() -> None:
    """It stood in its first step for minutes, and nobody said that the donors gave it a tenth of their traffic."""

    async def told(state_bytes: int) -> tuple[int, list[str]]:
        run = Run(target=8, state_upload_limit=float(MIN_BYTES_PER_S))
        donor = await run.add("donor", extra_tensors=ballast(0, state_bytes))
        run.swarm.spawn("donor", donor.train(4, duration_s=5.0, until=lambda: False))
        await sim.sleep(25.0)
        late = await run.add("late", seed=99, extra_tensors=ballast(99, state_bytes))
        warned = warnings_of(late)
        await run.swarm.run_on("late", late.train, 4, duration_s=5.0, until=lambda: late.participant.epoch > 0)
        await run.close()
        return late.downloads, [message for message in warned if "comes slowly" in message]

    downloads, (message,) = sim.run(lambda: told(80 * MIN_BYTES_PER_S), seed=1)
    assert downloads > 0
    came, missing = (float(found) for found in re.findall(r"([0-9.]+) MB", message))
    total = 80 * MIN_BYTES_PER_S / 1e6
    assert came == pytest.approx(total / 4, abs=0.1)
    assert total - came - 0.1 <= missing <= total + 0.1  # a chunk is missing until all of it is here
    (rest_s,) = re.findall(r"at most ([0-9]+) s", message)
    assert 55 < float(rest_s) < 90
    assert "target_batch_size" in message
    assert sim.run(lambda: told(15 * MIN_BYTES_PER_S), seed=1)[1] == []


def test_a_donor_that_comes_back_in_time_is_joined() -> None:
    """The newcomer has waited for it, and is at its state."""

    async def main() -> None:
        run = Run(target=8)
        late, _ = await run_beside_a_donor_that_dies(run, state_patience_s=600.0)
        await run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=until(30.0))
        assert late.participant.epoch == 0
        other = await run.add("other")
        for number in range(20):
            await run.swarm.run_on("other", other.take_batch, 8, number=number)
        await run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=until(10.0))
        assert late.downloads == 1
        await run.close()

    sim.run(main, seed=2)


@pytest.mark.parametrize("anybody", [True, False])
def test_with_require_state_a_newcomer_raises_rather_than_begin(anybody: bool) -> None:
    """After `load_state_timeout`, whether it has heard of another run or of nobody at all."""

    async def main() -> None:
        run = Run(target=8)
        if anybody:
            late, _ = await run_beside_a_donor_that_dies(run, state_patience_s=20.0, require_state=True)
        else:
            late = await run.add("late", state_patience_s=20.0, require_state=True)
        await run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=until(15.0))
        with pytest.raises(StateUnavailable, match=r"within 20 s \(load_state_timeout\).*require_state=True"):
            await run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=until(30.0))
        assert late.participant.epoch == 0
        await run.close()

    sim.run(main, seed=3)


def test_peers_that_begin_together_may_all_require_a_state() -> None:
    """A beginning that others have too is the swarm's."""

    async def main() -> None:
        run = Run(target=16)
        names = ["p0", "p1"]
        for name in names:
            await run.add(name, require_state=True)
        trains = (run.swarm.peer(name).train(4, duration_s=0.5, until=until(20.0)) for name in names)
        await asyncio.gather(*(run.swarm.spawn(name, train) for name, train in zip(names, trains, strict=True)))
        assert run.swarm.peer("p0").participant.epoch > 5
        await run.close()

    sim.run(main, seed=4)


def test_who_goes_on_beside_a_state_that_it_cannot_have_is_told_so_once() -> None:
    """A peer that is further and gives nothing keeps nobody from training; that there are two runs is a warning."""

    async def main() -> None:
        run = Run(target=8)
        first = await run.add("first")
        for number in range(4):
            await run.swarm.run_on("first", first.take_batch, 4, number=number)
        further = await run.add("further")
        await run.swarm.run_on("further", further.train, 4, duration_s=0.1, until=until(3.0))
        further.participant._states.sharing.disable()
        run.swarm.spawn("further", further.train(4, duration_s=0.2, until=until(60.0)))
        # Further by itself: it is at another state than ours, of a later epoch.
        later = further.participant.state._replace(epoch=further.participant.epoch + 10, digest=bytes(32))
        further.participant.own.name = later
        warned = warnings_of(first)
        await run.swarm.run_on("first", first.train, 4, duration_s=0.5, until=until(40.0))
        told = [message for message in warned if "did not give it: training goes on from epoch" in message]
        assert len(told) == 1, warned
        await run.close()

    sim.run(main, seed=5)


def cannot_give(*_: object) -> Any:
    """In place of what takes a state out."""
    raise ConfigError("the metadata is too long")


def cannot_take(*_: object) -> Any:
    """In place of what puts a state in."""
    raise StateUnavailable("the state does not fit here: it is too square")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at", ["donor", "late"])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_peer_that_cannot_be_given_a_state_trains_to_the_end_as_if_all_were_well(
    at: str, monkeypatch: pytest.MonkeyPatch, *, allowed: bool
) -> None:
    """It was told to check whether these peers live, and ended with weights of its own. Both sides say the reason."""

    async def main() -> None:
        run = Run(target=8)
        told: list[str] = []
        donor = await run.add("donor", events=lambda event: told.append(getattr(event, "message", "")))
        run.swarm.spawn("donor", donor.train(4, duration_s=0.25, until=lambda: False))
        await sim.sleep(10.0)
        late = await run.add("late", seed=99, state_patience_s=20.0, require_state=False if allowed else None)
        warned = warnings_of(late)
        if at == "donor":
            monkeypatch.setattr(donor.participant.training, "export", cannot_give)
        else:
            monkeypatch.setattr(late.participant.training, "prepare", cannot_take)
        training = run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=until(60.0))
        if allowed:
            await training
            assert late.participant.epoch > 5
            assert [each for each in warned if "a run of its own" in each or "so there are two runs" in each], warned
        else:
            with pytest.raises(
                StateUnavailable, match=r"the run goes on at epoch \d+ without this peer, which is at"
            ) as raised:
                await training
            warned.append(str(raised.value))
            assert late.participant.epoch == 0
            assert donor.participant.epoch > 50
        about = [each for each in warned if "state" in each and "made by this peer alone" not in each]
        assert len(about) >= 2
        assert all("too long" in each or "too square" in each for each in about), about
        assert not [each for each in warned if "whether these peers live" in each], warned
        assert at == "late" or [each for each in told if "too long" in each], told
        await run.close()

    sim.run(main, seed=1)


def test_a_peer_that_goes_on_from_a_checkpoint_trains_to_the_end_beside_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trained a run of its own from epoch 3 on, with warnings; its batches up to the error are lost either way."""

    async def main() -> None:
        run = Run(target=8)
        donor = await run.add("donor")
        run.swarm.spawn("donor", donor.train(4, duration_s=0.25, until=lambda: False))
        await sim.sleep(10.0)
        late = await run.add("late", state_patience_s=30.0)
        participant = late.participant
        participant.own.name = participant.own.name._replace(epoch=3, samples=24)
        participant.training.epoch = 3
        monkeypatch.setattr(participant.training, "prepare", cannot_take)
        training = run.swarm.run_on("late", late.train, 4, duration_s=0.5, until=until(60.0))
        with pytest.raises(StateUnavailable, match=r"goes on at epoch .* within 30 s .*it is too square\. Mend that"):
            await training
        assert participant.epoch >= 3
        await run.close()

    sim.run(main, seed=2)


@pytest.mark.parametrize("epochs", [1.2, 5.0])
def test_a_slow_peer_whose_batches_count_for_nothing_is_told_so(epochs: float) -> None:
    """A batch of so many epochs: it contributed 0 of its samples, or few, and nobody said so."""

    async def main() -> None:
        run = Run(target=16)
        names = ["p0", "p1"]
        for name in names:
            await run.add(name)
        slow = await run.add("slow")
        warned = warnings_of(slow)
        await sim.sleep(3.0)
        for name in names:
            run.swarm.spawn(name, run.swarm.peer(name).train(2, duration_s=0.25, until=until(42.0)))
        await run.swarm.run_on("slow", slow.train, 2, duration_s=1.25 * epochs, until=until(42.0))
        contribution = slow.participant.contribution
        (told,) = (message for message in warned if "samples that this peer computed" in message)
        assert "over before the batch is done. Give this peer smaller batches" in told
        fast_epochs = run.swarm.peer("p0").participant.epoch
        assert 39.0 / fast_epochs == pytest.approx(1.25, rel=0.1)  # so the batches were as long as that
        total = contribution.contributed + contribution.dropped + slow.participant.training.pending.samples
        assert total >= slow.participant.speed.processed - 4
        fast = run.swarm.peer("p0").participant.contribution
        assert fast.contributed > 10 * contribution.contributed
        await run.close()

    sim.run(main, seed=6)
