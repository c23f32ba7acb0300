"""What a peer says of the fragments of a model, and of the parameters that it ends with: every extreme, every lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shoal import sim
from shoal.averaging.core import PeerCore
from shoal.base.peer import PeerID
from shoal.events import Event, PeerDropped, Warned
from shoal.protocol import wire
from shoal.rpc.serving import tag_of
from shoal.run.decide.check import Check
from shoal.strategies import Decoupled
from shoal.train.value_mark import Changed
from tests.cost import Turns, most_lines
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.test_extremes import OTHERS, say
from tests.sim.test_hostile_words import liar
from tests.wire_extremes import LONGEST, extremes, replaced

BATCH, BATCH_S = 4, 0.5
HONEST = "p0", "p1", "p2"
STRATEGY = Decoupled(4, fragments=2)

CHECK = Check(b"a" * 8, b"d" * 16, bytes(4 * 256), numerics="torch", changed=Changed.NOT)
HELD = {
    "nothing": b"",
    "no check": b"\xc1" * 2048,
    "too long": b"\xff" * LONGEST,
    "deep": b"\x91" * 2048,
    "another": wire.encode(CHECK),
    "no numbers": wire.encode(replace(CHECK, sample=b"\xff" * 1024)),
    "half of a number": wire.encode(replace(CHECK, sample=bytes(1023))),
    "no text": wire.encode(CHECK).replace(b"torch", b"\xff\xfe\xfd\xfc\xfb"),
    "escapes": wire.encode(replace(CHECK, numerics="\x1b[2J" * 40)),
}
"""What a peer may say that it holds at the end of the run."""


async def begun(run: Run, seen: list[Event], names: Sequence[str]) -> list[Trainer]:
    """These train."""
    trainers = [await run.add(name, strategy=STRATEGY, events=seen.append) for name in names]
    for name, trainer in zip(names, trainers, strict=True):
        run.swarm.spawn(name, trainer.train(BATCH, duration_s=BATCH_S, until=lambda: False))
    return trainers


def words(victim: Trainer, core: PeerCore) -> tuple[wire.Progress, list[wire.Place]]:
    """What the victim says of itself, as if this peer said it."""
    said, places = victim.participant._gossip._post._word([0, 1])
    said = replace(said, contact=core.endpoint.contact, time=core.env.clock.time(), parameters=HELD["another"])
    standing = wire.Standing(victim.participant.core.peer_id, 5, said.time)
    return said, [replace(each, parameters=HELD["another"], others=[standing]) for each in places]


def lies(victim: Trainer, core: PeerCore) -> list[Callable[[], tuple[str, type[wire.Message], bytes]]]:
    """Each field with each extreme, in each message that has it: what it is, and its bytes, made when they are said."""

    def told(name: str, value: Any, *, of_place: bool, chains: bool) -> tuple[str, type[wire.Message], bytes]:
        said, places = words(victim, core)
        raw = msgspec.Raw(replaced(places[1] if of_place else said, name, value))
        kind = wire.TellChains if chains else wire.TellProgress
        words_of = (said, [places[0], raw]) if of_place else (raw, *([places] if chains else []))
        return f"{kind.__name__} {name}", kind, wire.encode([tag_of(kind), "run", *words_of])

    said, places = words(victim, core)
    found = [(name, value, False, chains) for name, value in extremes(said) for chains in (True, False)]
    found += [(name, value, True, True) for name, value in extremes(places[1])]
    found += [("parameters", value, of_place, True) for value in HELD.values() for of_place in (True, False)]
    # After a word of the year 5000 nothing of this peer is newer.
    found.sort(key=lambda each: each[0] == "time")

    def made(name: str, value: Any, of_place: bool, chains: bool) -> Callable[[], Any]:
        return lambda: told(name, value, of_place=of_place, chains=chains)

    return [made(*each) for each in found]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("contributes", [False, True], ids=["stranger", "contributor"])
@pytest.mark.parametrize("phase", ["beginning", "training", "end"])
@pytest.mark.parametrize(
    "count", [30, pytest.param(10_000, marks=[pytest.mark.long(full=True), pytest.mark.timeout(3600)])]
)
def test_an_extreme_of_a_fragment_costs_the_run_nothing(phase: str, contributes: bool, count: int) -> None:
    """From a stranger and a contributor, before the first merge, later, and at the end of the run."""
    seen = list[Event]()

    async def main() -> None:
        run = Run(target=1)
        victim, other, last = await begun(run, seen, HONEST)
        core = last.participant.core if contributes else (await liar(run, "liar")).core
        await sim.sleep(0.5 if phase == "beginning" else 8.0)
        if phase == "end":
            end = victim.participant.epoch + 2
            for fragment in (each for trainer in (victim, other, last) for each in trainer.fragments):
                fragment.announce_end(end)
            await sim.sleep(1.0)
        epoch, said = victim.participant.epoch, lies(victim, core)
        rng = random.Random(7)
        for lie in (
            said if count >= len(said) else [said[place] for place in sorted(rng.sample(range(len(said)), count))]
        ):
            name, kind, body = lie()
            with (turns := Turns()).counted():
                took_s = await say(tag_of(kind), msgspec.Raw(body), victim, SimpleNamespace(core=core))
            assert took_s < 1.0, name
            assert turns.most < most_lines(len(body), OTHERS), (name, turns.most)
        await sim.sleep(18.0)
        if phase == "end":
            assert victim.finished
            assert other.finished
        else:
            assert min(victim.participant.epoch, other.participant.epoch) >= epoch + 5
        warned = [each.message for each in seen if isinstance(each, Warned)]
        assert not [each for each in warned if "internal" in each]
        assert not [each for each in seen if isinstance(each, Warned) and each.where.startswith(("call", "note"))]
        assert {each.peer for each in seen if isinstance(each, PeerDropped)} <= {core.peer_id}

    sim.run(main, seed=5)


Lie = Callable[[wire.Progress, Sequence[wire.Standing]], tuple[wire.Progress, list[wire.Standing]]]


def changed(**fields: Any) -> Lie:
    """It says this of itself."""
    return lambda said, others: (replace(said, **fields), list(others))


def of_others(samples: int, at: float) -> Lie:
    """It says of all others that they are so far."""
    return lambda said, others: (said, [wire.Standing(each, samples, said.time + at) for each in PEERS])


PEERS = list[PeerID]()
"""Those of the run."""

LIES: dict[str, Lie] = {
    "far ahead": changed(epoch=wire.MAX_EPOCH, branch_samples=wire.MAX_SAMPLES, digest=b"x" * 32),
    "a step ahead": lambda said, others: (
        replace(said, epoch=said.epoch + 1, branch_samples=said.branch_samples + 64, digest=b"x" * 32),
        list(others),
    ),
    "behind": changed(epoch=0, branch_samples=0, digest=b"x" * 32),
    "much": changed(done=wire.MAX_SAMPLES),
    "nothing": changed(done=0),
    "fast": changed(rate=1e15),
    "at its end": lambda said, others: (replace(said, end_epoch=said.epoch), list(others)),
    "gone": changed(left=True),
    "alone": changed(alone=True),
    "others have nothing": of_others(0, 0.0),
    "others have nothing for ever": of_others(0, 1e9),
    "others have much": of_others(wire.MAX_SAMPLES, 0.0),
    "holds garbage": changed(parameters=b"\xc1" * 2048),
}


@pytest.mark.parametrize(
    "lie",
    [
        *list(LIES)[:2],
        "at its end",
        *(
            pytest.param(each, marks=pytest.mark.long(full=place % 3 > 0))
            for place, each in enumerate(each for each in LIES if each not in (*list(LIES)[:2], "at its end"))
        ),
    ],
)
def test_a_contributor_that_lies_of_fragments_keeps_nobody_from_training(lie: str) -> None:
    """In what it tells, and in what it answers."""
    seen = list[Event]()

    async def main() -> None:
        run = Run(target=1)
        trainers = await begun(run, seen, (*HONEST, "last"))
        good, bad = trainers[:3], trainers[3]
        PEERS[:] = [trainer.participant.core.peer_id for trainer in trainers]
        await sim.sleep(8.0)

        async def pace(seconds: float) -> float:
            before = sum(f.contribution.contributed for each in good for f in each.fragments)
            await sim.sleep(seconds)
            return (sum(f.contribution.contributed for each in good for f in each.fragments) - before) / seconds

        calm = await pace(12.0)
        for fragment in bad.fragments:
            gossip: Any = fragment._gossip
            knows = gossip.what_we_know
            gossip.what_we_know = lambda most=None, knows=knows: LIES[lie](*knows(most))
            gossip._next_word = lambda word=gossip._next_word: LIES[lie](word(), [])[0]
        lied = await pace(24.0)
        assert lied >= 0.8 * calm
        assert not [each for each in seen if isinstance(each, Warned) and "internal" in each.message]

    sim.run(main, seed=3)
