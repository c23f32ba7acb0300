"""Strategies that merge, under faults: nothing is counted twice, nothing that peers share ever differs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytorch_optimizer
import torch

from shoal import sim
from shoal.averaging.allreduce.interface import Outcome
from shoal.averaging.allreduce.round import Round
from shoal.averaging.averager import Averager
from shoal.averaging.group import Group
from shoal.base.peer import PeerID
from shoal.compression import BlockwiseQuantization, CompressionBase, ErrorFeedback, TopKCompression
from shoal.errors import RoundFailed
from shoal.events import Event, Warned
from shoal.protocol.wire import Commit, Contact, Held, Member
from shoal.run.decide.phases import RunPhase
from shoal.run.participant import Participant
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, Merges, StreamingDiLoCo
from shoal.strategies.outer import LocalSteps
from tests.sim.averaging_kit import SETTINGS
from tests.sim.optimizer_kit import Run, Trainer, backward, make_optimizer, model
from tests.sim.strategy_kit import BATCH, MEAN, Counted, Weather, play
from tests.sim.test_optimizer_interrupted import Interrupted


def lose_a_verdict(participant: Participant) -> list[int]:
    """Its next round of at least two merges commits without its learning of it; returns a list that says when."""
    whole, lost = participant._rounds.run, list[int]()

    async def run(*args: Any, **options: Any) -> Any:
        if lost or participant.epoch < 2:
            return await whole(*args, **options)
        result = await whole(*args, **{**options, "apply": lambda vector: None})
        if result is not None:
            lost.append(participant.epoch)
        return None

    participant._rounds.run = run  # type: ignore[method-assign]
    return lost


def leave_out_of_all_but_the_first_tile(trainers: Sequence[Trainer], late: Participant) -> list[bool]:
    """The others count this peer's values in the first tile of each average only; says whether they did."""
    counted = list[bool]()

    def spoil(averager: Averager) -> None:
        begin = averager._begin_round

        async def begun(group: Group, *rest: Any) -> Round:
            round_, members = await begin(group, *rest), [member.contact.peer for member in group.members]
            if late.core.peer_id in members[1:] and members[0] != averager.core.peer_id:
                round_.machine.contributions.exclude(members.index(late.core.peer_id))
                counted.append(True)
            return round_

        averager._begin_round = begun  # type: ignore[method-assign, assignment]

    for trainer in trainers:
        if trainer.fragments[-1] is not late:
            spoil(trainer.fragments[-1]._averager)
    return counted


@pytest.mark.parametrize("in_part", [pytest.param(False, marks=pytest.mark.long), True], ids=["", "in part"])
@pytest.mark.parametrize(
    "strategy",
    [
        DiLoCo(4, MEAN),
        Decoupled(4, fragments=2, quorum=2, outer=MEAN),
        StreamingDiLoCo(6, fragments=2, overlap=2, mixing=None, outer=MEAN),
    ],
    ids=["DiLoCo", "Decoupled", "StreamingDiLoCo"],
)
def test_a_peer_that_lost_the_verdict_gives_the_same_batches_again(strategy: Merges, *, in_part: bool) -> None:
    """It does not: they are in the anchor that it downloads. What it has trained since then is kept.

    Nor does a peer whose values were counted in some tiles of the average only.
    """

    async def main() -> None:
        weather = Weather(strategy, 1, peers=3, counts=True)
        await weather.begin()
        trainer = weather.run.swarm.peer("p1")
        lost = lose_a_verdict(trainer.fragments[-1])
        others = list(weather.run.swarm.peers.values()) if in_part else []
        counted = leave_out_of_all_but_the_first_tile(others, trainer.fragments[-1])
        while trainer.fragments[-1].epoch < 5:
            await sim.sleep(0.1)
        assert lost
        assert counted or not in_part
        # The others are where they should be.
        assert not any(fragment.takeover.downloads for fragment in trainer.fragments[:-1])
        await weather.end(3, 60.0, calm_s=5.0)

    sim.run(main, seed=1)


@pytest.mark.parametrize(
    "strategy",
    [
        StreamingDiLoCo(6, fragments=2, overlap=2, mixing=None, outer=MEAN),
        Decoupled(4, fragments=2, quorum=2, outer=MEAN),
    ],
    ids=["StreamingDiLoCo", "Decoupled"],
)
def test_an_auxiliary_peer_waits_for_batches_of_its_own_before_it_takes_a_merge(strategy: Merges) -> None:
    """It does not, as it has none; nor does it wait for one fragment of the model while another one is merged."""

    async def main() -> None:
        run = Run(target=1)
        for name in ("p0", "p1"):
            await run.add(name, strategy=strategy)
        aux = await run.add("aux", strategy=strategy, auxiliary=True)

        async def help_others() -> None:
            await aux.help()
            aux.participant.training.local.go_back()  # type: ignore[attr-defined]

        run.swarm.spawn("aux", help_others())
        await sim.sleep(3.0)
        run.announce_end(6)
        for number, name in enumerate(("p0", "p1")):
            work = run.trainers[name].train(BATCH, duration_s=0.2 + 0.1 * number, until=lambda: False)
            run.swarm.spawn(name, work)
        limit = asyncio.get_running_loop().time() + 60.0
        while not all(trainer.finished for trainer in run.trainers.values()):
            assert asyncio.get_running_loop().time() < limit
            await sim.sleep(0.5)
        assert run.agree(["p0", "p1", "aux"])
        assert aux.downloads <= 2  # it may begin after the first merge
        await run.close()

    sim.run(main, seed=4)


def test_a_member_that_is_in_some_tiles_of_an_average_gives_them_again() -> None:
    """It does not, though it is no contributor: what is in an average once is in no other one."""
    members = [Member(Contact(PeerID(bytes([number]) * 32)), True, None, b"") for number in range(3)]
    held = [Held(tile, 0, bytes([mask]), 1.0, bytes(16)) for tile, mask in enumerate((0b111, 0b101))]
    outcome = Outcome.of(Commit(bytes(16), held), members, [1, 0])
    first, cut_off, last = (member.contact.peer for member in members)
    assert outcome.contributors == (first, last)
    assert outcome.counts(cut_off)
    assert outcome.counted_in_part == {cut_off: 0}  # it counts only in the tile that it averages
    assert Outcome.of(Commit(bytes(16), held), members, [0, 1]).counted_in_part == {cut_off: Fraction(1, 2)}
    assert not outcome.counts(PeerID(bytes([9]) * 32))


@pytest.mark.parametrize("strategy", [DiLoCo(4), Decoupled(4, fragments=1), StreamingDiLoCo(4, 1, 2, None)], ids=str)
def test_an_interrupt_in_the_outer_step_leaves_what_was_trained_to_be_given_again(strategy: Merges) -> None:
    """It does not: it is in the anchor, so the parameters go back to that before the next batch counts."""
    local = LocalSteps(*make_optimizer(model()), (), strategy.merging)
    fragment = local.fragments[0]
    backward(list(local.trained), 0, 0, BATCH)
    assert local.accumulate(BATCH)
    fragment.contribute()
    fragment.use_accumulators()
    fragment.counted()
    whole = fragment.optimizer.step

    def half() -> None:
        whole()
        raise Interrupted

    fragment.optimizer.step = half  # type: ignore[method-assign, assignment]
    with pytest.raises(Interrupted):
        fragment.step()
    assert fragment.epoch == 1
    backward(list(local.trained), 0, 1, BATCH)
    assert not local.accumulate(BATCH)
    assert (fragment.pending.samples, fragment.batches) == (0, 0)
    assert all(map(torch.equal, local.trained, fragment.trained))


def test_a_peer_with_broken_parameters_keeps_the_weight_of_what_it_has_lost() -> None:
    """It does not: its parameters are the anchor again, and nothing of them is still to be given."""
    local = LocalSteps(*make_optimizer(model()), (), Decoupled(4, fragments=1).merging)
    fragment = local.fragments[0]
    backward(list(local.trained), 0, 0, BATCH)
    assert local.accumulate(BATCH)
    with torch.no_grad():
        local.trained[0][0, 0] = torch.nan
    fragment.contribute()
    for each in fragment.accumulators:
        each.zero_()  # the average of the others
    fragment.use_accumulators()
    fragment.step()
    assert (fragment.pending.samples, fragment.batches) == (0, 0)
    assert all(map(torch.equal, local.trained, fragment.trained))


class Case(NamedTuple):
    """What is played.

    Attributes:
        strategy: of all peers.
        counts: whether the anchor shows which batches are in it: where no momentum moves it, nothing is mixed, and
            values travel as they are.
        codec: of the outer gradients.
        extras: a tensor is averaged, beside what is merged.
    """

    strategy: Merges
    counts: bool = False
    codec: CompressionBase | None = None
    extras: bool = False


_4_BITS = ErrorFeedback(BlockwiseQuantization(bits=4))
_2_BITS = ErrorFeedback(BlockwiseQuantization(bits=2))
_TOP = ErrorFeedback(TopKCompression(0.1, bits=2))

STRATEGIES = {
    "LocalSGD": Case(LocalSGD(4), counts=True),
    "DiLoCo": Case(DiLoCo(4)),
    "DiLoCo in seconds": Case(DiLoCo("2s", MEAN), counts=True),
    "StreamingDiLoCo that mixes": Case(StreamingDiLoCo(6, fragments=2, overlap=1, mixing=0.5)),
    "StreamingDiLoCo that keeps": Case(StreamingDiLoCo(6, 2, 2, mixing=None, outer=MEAN), counts=True),
    "Decoupled": Case(Decoupled(4, fragments=2, quorum=2, outer=MEAN), counts=True),
    "Decoupled in seconds": Case(Decoupled("2s", fragments=2, quorum=2, outer=MEAN), counts=True),
    "Decoupled with momentum": Case(Decoupled(4, fragments=2, quorum=2)),
    "LocalSGD in seconds": Case(LocalSGD("2s"), counts=True, extras=True),
    "LocalSGD with top-k": Case(LocalSGD(5), codec=ErrorFeedback(TopKCompression(0.2, bits=2))),
    "SparseLoCo": Case(DiLoCo(4, MEAN), codec=ErrorFeedback(TopKCompression(0.03, bits=2))),
    "DiLoCo with AdamW": Case(DiLoCo(4, partial(torch.optim.AdamW, lr=0.1)), extras=True),
    "StreamingDiLoCo in seconds": Case(StreamingDiLoCo("3s", 2, 1, outer=MEAN), counts=True, extras=True),
    "StreamingDiLoCo with top-k": Case(StreamingDiLoCo(6, 2, 2), codec=ErrorFeedback(TopKCompression(0.1))),
    "Decoupled with extra tensors": Case(Decoupled(4, fragments=2, quorum=3, outer=MEAN), counts=True, extras=True),
    "DiLoCo in 4 bits": Case(DiLoCo(4), codec=_4_BITS),
    "DiLoCo with top-k": Case(DiLoCo(4), codec=_TOP),
    "StreamingDiLoCo in 2 bits": Case(StreamingDiLoCo(6, fragments=2, overlap=2), codec=_2_BITS),
    "Decoupled in 4 bits": Case(Decoupled(4, fragments=2, quorum=2), codec=_4_BITS),
    "Decoupled in 2 bits": Case(Decoupled(4, fragments=2, quorum=2), codec=_2_BITS),
    "Decoupled with top-k": Case(Decoupled(4, fragments=2, quorum=2), codec=_TOP),
}

FULL = pytest.mark.long(full=True)
SAMPLE = (
    "LocalSGD in seconds",
    "LocalSGD with top-k",
    "DiLoCo in seconds",
    "DiLoCo with AdamW",
    "SparseLoCo",
    "StreamingDiLoCo that mixes",
    "StreamingDiLoCo in seconds",
    "Decoupled with momentum",
    "Decoupled with extra tensors",
)
"""Each way to merge, to count time, to send and to average more, once: others are in tests of one seed."""


def weather(name: str, seed: int, faults: int = 8) -> None:
    """A run with so many faults, drawn from the seed; and how long its trainers stood still for a fragment."""
    strategy, counts, codec, extras = STRATEGIES[name]
    played = play(strategy, seed, faults=faults, counts=counts, codec=codec, extras=extras)
    slowest_s = max(trainer.slowest_s for trainer in played.run.trainers.values() if isinstance(trainer, Counted))
    merging = strategy.merging
    assert slowest_s <= (FETCHED_S if merging.overlap is None else MOST_S), (
        f"a trainer stood still for {slowest_s:.2f} s"
    )


FETCHED_S = 0.1
"""A trainer that never waits for a merge stands still for the work on a state that was fetched, and for no line."""

MOST_S = SETTINGS.window_s + SETTINGS.allreduce_timeout_s
"""The longest round; most end much sooner, also if one of the members is silent or on a slow line."""


def test_peers_that_merge_in_bad_weather_end_with_one_state() -> None:
    """Crashes, silence, pauses, newcomers, slow lines, partitions: no batch counts twice, one name has one state."""
    weather("Decoupled", 0, faults=3)


def test_the_sides_of_a_fork_of_one_fragment_hear_of_each_other_as_soon_as_the_network_is_whole() -> None:
    """They found each other for another fragment, and merged this one apart until the end of the run."""
    weather("StreamingDiLoCo in 2 bits", 48)


def test_a_peer_at_the_same_epoch_of_a_fork_asks_for_no_copy_of_an_earlier_state() -> None:
    """It did, as steps lead on from that, and refused it; after two such tries it did not ask for a minute."""
    weather("StreamingDiLoCo in 2 bits", 185)


def test_a_client_and_a_peer_behind_it_that_need_each_other_for_a_quorum_go_on() -> None:
    """The one that the client had come further with was gone. Nobody could have its state, and it kept it for ever."""
    weather("Decoupled in 4 bits", 55)


@pytest.mark.parametrize(
    "strategy",
    [DiLoCo(4, MEAN), StreamingDiLoCo(6, fragments=2, overlap=2, mixing=None, outer=MEAN)],
    ids=["DiLoCo", "StreamingDiLoCo"],
)
def test_a_peer_that_merged_alone_gives_up_its_state_for_that_of_more_samples(strategy: Merges) -> None:
    """It merges more often than three others together, so it has the later epoch: their samples were thrown away."""
    warned = list[str]()

    def note(event: Event) -> None:
        if isinstance(event, Warned):
            warned.append(event.message)

    async def main() -> None:
        run = Run(target=1)
        for number in range(4):
            await run.add(f"p{number}", strategy=strategy, events=note)
        for name, trainer in run.trainers.items():
            batches = trainer.train(BATCH, duration_s=0.2 if name == "p3" else 0.3, until=lambda: False)
            run.swarm.spawn(name, batches)
        alone, others = run.trainers["p3"], [run.trainers[f"p{number}"] for number in range(3)]
        while alone.participant.epoch < 3:
            await sim.sleep(0.1)
        before = alone.downloads, sum(each.downloads for each in others)
        run.swarm.partition([["p3"]])
        while alone.participant.epoch < others[0].participant.epoch + 4:
            await sim.sleep(0.1)
        ours, theirs = ([each.state for each in trainer.fragments] for trainer in (alone, others[0]))
        assert all(mine.epoch > other.epoch for mine, other in zip(ours, theirs, strict=True))
        assert all(mine.samples < other.samples for mine, other in zip(ours, theirs, strict=True))
        run.swarm.heal()
        run.announce_end(alone.participant.epoch + 4)
        limit = asyncio.get_running_loop().time() + 60.0
        while not all(trainer.finished for trainer in run.trainers.values()):
            assert asyncio.get_running_loop().time() < limit
            await sim.sleep(0.5)
        assert run.agree(sorted(run.trainers))
        assert alone.downloads > before[0]
        assert sum(each.downloads for each in others) == before[1]
        assert not [message for message in warned if "did not give it" in message]
        await run.close()

    sim.run(main, seed=7)


@pytest.mark.parametrize("name", ["StreamingDiLoCo that keeps", "Decoupled in seconds"])
def test_what_a_peer_gave_to_merges_that_are_given_up_stays_contributed(name: str) -> None:
    """It does not: where a fork is resolved, it is dropped. `Weather.end` compares the account with the anchors."""
    strategy, counts, *_ = STRATEGIES[name]

    async def main() -> None:
        weather = Weather(strategy, 3, counts=counts)
        await weather.begin()
        await sim.sleep(8.0)
        swarm = weather.run.swarm
        swarm.partition([["p2", "p3"]])
        await sim.sleep(10.0)
        swarm.heal()
        fragments = [each for trainer in swarm.peers.values() for each in trainer.fragments]
        gave = {fragment: fragment.own.lineage.contributed for fragment in fragments}
        limit, fell = asyncio.get_running_loop().time() + 20.0, False
        while not fell:
            assert asyncio.get_running_loop().time() < limit
            await sim.sleep(0.01)
            fell = any(fragment.own.lineage.contributed < gave[fragment] for fragment in fragments)
        await weather.end(3, 120.0, calm_s=5.0)

    sim.run(main, seed=3)


def test_a_newcomer_that_followed_the_losing_side_takes_the_better_state_at_once() -> None:
    """The steps that it was told of led on from a later epoch, so it refused the better state as too old."""

    async def main() -> None:
        run, strategy = Run(target=1), DiLoCo(4, MEAN)

        def train(name: str, duration_s: float) -> None:
            run.swarm.spawn(name, run.trainers[name].train(BATCH, duration_s=duration_s, until=lambda: False))

        for number in range(4):
            await run.add(f"p{number}", strategy=strategy)
        for name in list(run.trainers):
            train(name, 0.2 if name == "p0" else 0.3)
        first, second = run.trainers["p0"].participant, run.trainers["p1"].participant
        while first.epoch < 3:
            await sim.sleep(0.1)
        run.swarm.partition([["p1", "p2", "p3"]])
        while first.epoch < second.epoch + 6:
            await sim.sleep(0.1)
        new = await run.add("new", strategy=strategy)  # at p0
        train("new", 0.6)
        while not new.downloads:
            await sim.sleep(0.02)
        assert new.participant.epoch > second.epoch + 3
        run.swarm.heal()
        healed_at = asyncio.get_running_loop().time()
        while len({trainer.participant.state for trainer in run.trainers.values()}) > 1:
            await sim.sleep(0.1)
        assert asyncio.get_running_loop().time() - healed_at < 4.0
        await run.close()

    sim.run(main, seed=1)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [pytest.param("StreamingDiLoCo that keeps", marks=FULL), "Decoupled"])
def test_two_halves_of_a_swarm_that_went_on_apart_end_with_one_state(
    name: str, soak: Callable[[int, int], int], numbers: Callable[[int], Sequence[int]]
) -> None:
    """Each fragment goes on from the better of its two states. No batch counts twice, nor in what others give up."""
    strategy, counts, *_ = STRATEGIES[name]

    async def main() -> None:
        weather = Weather(strategy, seed, counts=counts)
        await weather.begin()
        await sim.sleep(8.0)
        swarm = weather.run.swarm
        swarm.partition([weather.rng.sample(weather.names, 2)])
        await sim.sleep(weather.rng.uniform(6.0, 15.0))
        states = {fragment.state.digest for trainer in swarm.peers.values() for fragment in trainer.fragments}
        apart.append(len(states) > len(swarm.peer("p0").fragments))
        swarm.heal()
        await weather.end(3, 120.0)

    apart = list[bool]()
    for seed in numbers(soak(1, 25)):
        sim.run(main, seed=seed)
    assert any(apart)


async def split(weather: Weather) -> bool:
    """Cut the network in two in the middle of a merge of one fragment, with a kill and a late joiner, and heal it.

    Returns:
        Whether that fragment had two states then, or more.
    """
    swarm, rng = weather.run.swarm, weather.rng
    others = [name for name in weather.names if name != "p0" and swarm.is_alive(name)]  # newcomers join at p0
    name, number = rng.choice(others), rng.randrange(len(swarm.peer("p0").fragments))
    merging = swarm.peer(name).fragments[number]
    while merging.phase is not RunPhase.AVERAGING or merging._averager.looking:
        await sim.sleep(0.002)
    await sim.sleep(rng.uniform(0.0, 0.1))
    swarm.partition([rng.sample(others, 2)])
    if rng.random() < 0.5:
        swarm.crash(rng.choice(others))
    await sim.sleep(rng.uniform(2.0, 6.0))
    if rng.random() < 0.5:
        weather.names.append(f"p{len(weather.names)}")
        await weather.add(weather.names[-1])
    await sim.sleep(rng.uniform(2.0, 8.0))
    digests = {trainer.fragments[number].state.digest for trainer in swarm.peers.values()}
    swarm.heal()
    return len(digests) > 1


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["StreamingDiLoCo that keeps", pytest.param("Decoupled", marks=FULL)])
def test_a_split_in_the_middle_of_a_merge_of_one_fragment_is_healed(
    name: str, soak: Callable[[int, int], int], numbers: Callable[[int], Sequence[int]]
) -> None:
    """Split twice: a peer may come back to a side that it was on before. All end with one state, no batch twice."""
    strategy, counts, *_ = STRATEGIES[name]

    async def main() -> None:
        weather = Weather(strategy, seed, peers=5, counts=counts)
        await weather.begin()
        await sim.sleep(8.0)
        for _ in range(2):
            forked.append(await split(weather))
            await sim.sleep(weather.rng.uniform(0.5, 4.0))
        await weather.end(3, 120.0)

    forked = list[bool]()
    for seed in numbers(soak(1, 50)):
        sim.run(main, seed=seed)
    assert any(forked)


def fair(name: str, seed: int, *, faults: int = 8) -> None:
    """Some faults; then each peer's batches count again."""
    strategy, _, codec, _ = STRATEGIES[name]

    async def main() -> None:
        weather = Weather(strategy, seed, counts=False, codec=codec)
        await weather.pass_over(faults)
        await weather.check_fairness()
        await weather.run.close()

    sim.run(main, seed=seed)


def test_a_peer_trains_for_nothing_after_faults() -> None:
    """It does not: once the network is whole again, merges take what each peer gives."""
    fair("Decoupled", 1, faults=3)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "name",
    [
        *("DiLoCo in seconds", "StreamingDiLoCo that keeps"),
        *(pytest.param(each, marks=FULL) for each in ("LocalSGD", "Decoupled")),
    ],
)
def test_no_peer_trains_for_nothing_in_many_runs(
    name: str, soak: Callable[[int, int], int], numbers: Callable[[int], Sequence[int]]
) -> None:
    """What the audit of batches does not show: a peer that is in no merge breaks no promise about them."""
    for seed in numbers(soak(1, 50)):
        fair(name, 1 + seed)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [each if each in SAMPLE else pytest.param(each, marks=FULL) for each in STRATEGIES])
def test_they_do_so_in_many_runs(
    name: str, soak: Callable[[int, int], int], numbers: Callable[[int], Sequence[int]]
) -> None:
    """200 plans of eight faults each. Trainers of Decoupled wait for no merge, others for a round at most."""
    for number in numbers(soak(1, 200)):
        try:
            weather(name, 1 + number)
        except BaseException as error:
            test = f"tests/sim/{Path(__file__).name}::test_they_do_so_in_many_runs[{name}]"
            error.add_note(f"again: python -m pytest -m long --plan {number} '{test}'")
            raise


def test_a_quorum_that_is_not_there_is_told_once() -> None:
    """The peers train on, and merge what they have as soon as there are enough of them."""

    async def main() -> None:
        weather = Weather(Decoupled(4, fragments=2, quorum=3, outer=MEAN), 1, peers=2, counts=True)
        await weather.begin()
        await sim.sleep(32.0)
        told = "nothing is merged, as the strategy's quorum is 3, and only 2 of the peers"
        assert [told in warning for warning in weather.lacking] == [True, True], weather.warnings
        trainers = weather.run.swarm.peers.values()
        assert all(fragment.epoch == 0 for trainer in trainers for fragment in trainer.fragments)
        await weather.add("p2")
        while min(fragment.epoch for trainer in trainers for fragment in trainer.fragments) < 2:
            await sim.sleep(0.5)
        await weather.run.close()

    sim.run(main, seed=1)


def test_a_state_that_is_taken_over_while_others_weights_are_in_place_comes_back() -> None:
    """The weights before do not come back: `train` puts the anchor of the new state in place."""
    parameters = model(torch.float32)
    inner: Any = pytorch_optimizer.ScheduleFreeAdamW(parameters, lr=0.1)
    local = LocalSteps(inner, None, (), DiLoCo(4, MEAN).merging)
    fragment = local.fragments[0]
    values, tensors = fragment.export()
    given = fragment.prepare({**values, "epoch": 3}, [each.clone() + 1.0 for each in tensors])
    inner.train()
    for number in range(2):
        backward(parameters, 0, number, BATCH)
        assert local.accumulate(BATCH)
    local.weights.evaluate()
    fragment.take_over(given)
    local.weights.train()
    assert all(map(torch.equal, local.trained, fragment.trained))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("follows", [True, False])
def test_what_was_trained_is_kept_if_the_state_follows_from_ours(*, follows: bool, waits: bool) -> None:
    """It was kept for any state of the next epoch: on the other side of a fork it may be in that state already.

    A peer that waits for merges goes on from the anchor in any case.
    """
    strategy = DiLoCo(4, MEAN) if waits else Decoupled(4, fragments=1, outer=MEAN)
    local = LocalSteps(*make_optimizer(model()), (), strategy.merging)
    fragment = local.fragments[0]
    values, tensors = fragment.export()
    given = fragment.prepare({**values, "epoch": 1}, [each.clone() + 1.0 for each in tensors])
    backward(list(local.trained), 0, 0, BATCH)
    assert local.accumulate(BATCH)
    fragment.take_over(given, follows=follows)
    kept = follows and not waits
    assert fragment.batches == kept
    assert all(map(torch.equal, local.trained, fragment.trained)) == (not kept)


@pytest.mark.parametrize("by", ["a download", "the steps of others"])
def test_what_was_trained_is_kept_for_one_merge_that_was_missed_and_not_for_two_in_a_row(by: str) -> None:
    """It was kept each time: such a peer had ever more weight, at weights that are ever older."""
    local = LocalSteps(*make_optimizer(model()), (), Decoupled(4, fragments=1, outer=MEAN).merging)
    fragment = local.fragments[0]
    for merge, kept in enumerate((1, 0, 1), 1):
        backward(list(local.trained), 0, merge, BATCH)
        assert local.accumulate(BATCH)
        if by == "a download":
            values, tensors = fragment.export()
            given = fragment.prepare({**values, "epoch": merge}, [each.clone() + 1.0 for each in tensors])
            fragment.take_over(given, follows=True)
        else:
            for each in fragment.accumulators:
                each.fill_(-1.0)
            fragment.use_accumulators()
            fragment.step()
        assert (fragment.epoch, fragment.batches) == (merge, kept)
        assert all(map(torch.equal, local.trained, fragment.trained)) == (not kept)


def test_a_peer_that_gets_into_no_merge_does_not_make_merges_more_frequent() -> None:
    """It did: it kept all that it had trained, so it was far ahead on its way, and the next merge was due at once."""

    async def main() -> None:
        run = Run(target=1)
        for name in ("p0", "p1", "p2"):
            await run.add(name, strategy=DiLoCo(8, MEAN))
            run.swarm.spawn(name, run.swarm.peer(name).train(BATCH, duration_s=0.5, until=lambda: False))
        first, misses = run.swarm.peer("p0").participant, run.swarm.peer("p2")
        await sim.sleep(8.0)

        async def fails(*args: Any) -> Round:
            raise RoundFailed("as it always does here")

        misses.participant._averager._begin_round = fails  # type: ignore[method-assign, assignment]
        before = first.epoch
        await sim.sleep(40.0)
        assert misses.downloads > 5
        assert 8 <= first.epoch - before <= 12  # 10 of 8 batches each
        await run.close()

    sim.run(main, seed=1)


def test_a_peer_whose_parameters_are_broken_trains_nothing_any_more() -> None:
    """It goes back to the last merge, also if it is alone, and says so."""
    local = LocalSteps(*make_optimizer(model()), (), DiLoCo(4).merging)
    for number in range(4):
        if number == 1:
            with torch.no_grad():
                local.trained[0][0, 0] = torch.nan
        backward(list(local.trained), 0, number, BATCH)
        assert local.accumulate(BATCH) == (number != 1)
        assert (local.broken is None) == (number == 0)
    assert local.fragments[0].batches == 2
