"""Claims of samples, and weights, count as far as a peer has been able to give them; else it is named and left out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from shoal import sim
from shoal.averaging import Averager, TensorLock
from shoal.errors import ConfigError, RoundFailed
from shoal.events import Event, PeerDropped, Warned
from shoal.optim import Participant, TrainingState
from shoal.protocol.wire import Progress, TellProgress
from shoal.run.view import words
from shoal.strategies import Decoupled
from tests.sim.averaging_kit import Trial, start_core
from tests.sim.optimizer_kit import Run, Trainer, make_optimizer, model
from tests.sim.test_alone import until
from tests.situations import reaches

NAMES = ["p0", "p1", "p2"]


async def with_a_fourth(run: Run, heard: list[Event], end_s: float, *, client: bool = False) -> Trainer:
    """Three train until then, and soon a fourth one, which has a sixteenth of the samples."""
    for name in NAMES:
        await run.add(name, events=heard.append)
        run.swarm.spawn(name, run.swarm.peer(name).train(5, duration_s=0.5, until=until(end_s)))
    await sim.sleep(4.0)
    fourth = await run.add("liar", client_mode=client)
    run.swarm.spawn("liar", fourth.train(1, duration_s=0.5, until=until(end_s)))
    await sim.sleep(8.0)
    first = run.swarm.peer("p0").participant
    assert fourth.participant.core.peer_id in first.own.committed.weights
    return fourth


def test_a_contributor_that_claims_10_to_the_12_made_the_steps_small() -> None:
    """Steps of 53 samples instead of 384, and 86 rounds that were aborted in 20 s, without a word."""

    async def main() -> None:
        run = Run(target=32)
        liar = await with_a_fourth(run, [], 45.0)
        pace: Any = liar.participant.pace
        pace.done = lambda *_: 10**12
        began = asyncio.get_running_loop().time()
        await sim.sleep(11.0)
        samples = [count for at, _, count, _ in run.swarm.peer("p0").epochs if at > began + 3.0]
        assert len(samples) >= 4
        assert min(samples) >= 24, samples
        await run.close()

    sim.run(main, seed=51)


@pytest.mark.parametrize("client", [True, False], ids=["gives values only", "reduces too"])
def test_a_weight_above_what_a_peer_can_give_is_refused_and_blames_the_sender(client: bool) -> None:
    """With weights 1, 1 and 1e12 all tensors became the third one's. Each who reduces names it; the others go on."""

    async def main() -> None:
        run, heard = Run(target=32), list[Event]()
        liar = await with_a_fourth(run, heard, 45.0, client=client)
        lying: Any = liar.participant
        contribute = lying.swarm_step._contribute

        def lie(name: Any, said: int) -> tuple[float, float]:
            weight, factor = contribute(name, said)
            return 1e9 if weight else 0.0, 1e3 * factor

        lying.swarm_step._contribute = lie
        first: Participant = run.swarm.peer("p0").participant
        began, before = asyncio.get_running_loop().time(), first.epoch
        await sim.sleep(12.0)
        me = lying.core.peer_id
        reasons = {each.reason for each in heard if isinstance(each, PeerDropped) and each.peer == me}
        told = "weight 1e+09, which is more than the" if client else "average of tile 0 with the weight 1e+09"
        assert any(told in reason for reason in reasons), reasons
        assert not [each for each in heard if isinstance(each, PeerDropped) and each.peer != me]
        assert first.epoch >= before + 3
        since = [each for step in first.own.committed.steps[before - first.epoch + 1 :] for each in step]
        assert not [each for each in since if each.peer == me and each.samples]
        samples = [count for at, _, count, _ in run.swarm.peer("p0").epochs if at > began]
        assert max(samples) < 100, samples
        assert run.agree(NAMES) or run.swarm.peer("p1").participant.epoch != first.epoch
        assert all(float(each.detach().abs().max()) < 100.0 for each in run.swarm.peer("p0").parameters)
        await run.close()

    sim.run(main, seed=52)


def says_otherwise(liar: Trainer, changes: Callable[[Progress], dict[str, int]]) -> None:
    """Let this contributor say other things of its state, in all of its words from now on, and ten times a second."""
    participant = liar.participant
    gossip: Any = participant._gossip
    next_word = gossip._next_word

    def lie() -> Progress:
        word: Progress = next_word()
        return replace(word, **changes(word))

    async def tell() -> None:
        endpoint = participant.core.endpoint
        while True:
            endpoint.tell(endpoint.peers, TellProgress("run", lie(), []))
            await sim.sleep(0.1)

    gossip._next_word = lie
    asyncio.get_running_loop().create_task(tell())


@pytest.mark.parametrize("turns", [False, True], ids=["the next one", "others in turns"])
def test_a_contributor_that_names_other_epochs_for_the_digest_of_all_split_the_run(turns: bool) -> None:
    """They had 0.7 of their pace, nine false warnings of two runs, and one trained apart for ten steps."""

    async def main() -> None:
        run, heard, rng = Run(target=48), list[Event](), random.Random(5)
        for name in (*NAMES, "liar"):
            await run.add(name, events=heard.append)
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.5, until=until(75.0)))
        await sim.sleep(9.0)
        first = run.swarm.peer("p0").participant

        async def pace() -> int:
            before = first.contribution.contributed
            await sim.sleep(15.0)
            return first.contribution.contributed - before

        calm = await pace()
        says_otherwise(
            run.swarm.peer("liar"),
            lambda word: {
                "epoch": max(1, word.epoch + (rng.randint(-2, 2) if turns else 1)),
                "branch_samples": word.branch_samples + (rng.randint(-96, 96) if turns else 48),
            },
        )
        assert await pace() >= 0.9 * calm
        assert not [each.message for each in heard if isinstance(each, Warned)]
        assert not any(trainer.downloads for trainer in run.trainers.values())
        assert run.agree(NAMES)
        await run.close()

    with reaches("a peer says of a state what others know better"):
        sim.run(main, seed=1)


def test_one_weight_beside_which_no_other_counts_is_told() -> None:
    """An averager without a run takes any weight: it is its user's. The others are told whose values they have got."""

    async def main() -> None:
        told = list[str]()
        trial = Trial(
            heard=lambda name, event: told.append(f"{name}: {event.message}") if isinstance(event, Warned) else None
        )
        values = [[torch.full((3000,), float(peer))] for peer in range(3)]
        for name, tensors in zip(NAMES, values, strict=True):
            await trial.add(name, tensors)
        for _ in range(2):
            steps = (trial.step(name, weight=weight) for name, weight in zip(NAMES, (1.0, 1.0, 1e12), strict=True))
            await asyncio.gather(*steps)
        heavy = trial.swarm.peer("p2").core.peer_id.short()
        assert told
        assert all(f"{heavy} gives its values the weight 1e+12, and all others together have" in each for each in told)
        assert len(told) == len({each.split(":")[0] for each in told}), "each tells it once"
        await trial.close()

    sim.run(main, seed=53)


def test_weights_that_users_choose_are_told_only_if_nothing_else_counts() -> None:
    """A hundred times the weight of another peer is no reason."""

    async def main() -> None:
        told = list[Event]()
        trial = Trial(heard=lambda name, event: told.append(event) if isinstance(event, Warned) else None)
        for peer, name in enumerate(NAMES):
            await trial.add(name, [torch.full((30,), float(peer))])
        await asyncio.gather(*(trial.step(name, weight=10.0**peer) for peer, name in enumerate(NAMES)))
        assert not told
        await trial.close()

    sim.run(main, seed=54)


def test_one_stranger_with_other_settings_ended_a_founders_program() -> None:
    """It raised ConfigError at the founder, which had nobody to join. The stranger takes no part, and is told of.

    The stranger had begun before the founder: it trained to the end alone, and was never refused.
    """

    async def main() -> None:
        run, told = Run(target=8), list[str]()
        core = await run.swarm.start_peer("founder", lambda host: start_core(host, None))  # type: ignore[arg-type, return-value]
        run._first = run.swarm.host("founder")
        other = await run.add("stranger", fingerprint={"lr": "1e4"})
        alone = run.swarm.spawn("stranger", other.train(4, duration_s=0.5, until=until(60.0)))
        await sim.sleep(5.0)
        parameters = model()

        def hear(event: Event) -> None:
            if isinstance(event, Warned):
                told.append(event.message)

        optimizer, scheduler = make_optimizer(parameters)

        async def found() -> Participant:
            training = TrainingState(optimizer, scheduler, ())
            settings = msgspec.structs.replace(run.settings, fingerprint={"lr": "0.05"})
            made = Participant(core, training, settings, lock=TensorLock())  # type: ignore[arg-type]
            made.core.env.events.subscribe(hear)
            await made.start()
            await made.check_settings(20.0)
            return made

        participant = await run.swarm.run_on("founder", found)
        trainer = Trainer(9, parameters, participant)
        run.swarm.spawn("founder", trainer.train(4, duration_s=0.5, until=until(60.0)))
        await sim.sleep(30.0)
        with pytest.raises(ConfigError, match=r"lr is 1e4 here and 0\.05 at another peer"):
            await alone
        assert participant.course.failure is None
        assert participant.epoch > 10
        assert any("with other settings: lr is 0.05 here and 1e4 at another" in each for each in told)
        await participant.close()

    sim.run(main, seed=55)


def test_a_liar_took_64_times_the_most_of_the_last_merges() -> None:
    """A peer may give what the time since it gave last allows. It gave far more, and nobody refused it."""

    async def main() -> None:
        run, heard = Run(target=32), list[Event]()
        strategy = Decoupled(every=4, fragments=1)
        for name in (*NAMES, "liar"):
            await run.add(name, events=heard.append, strategy=strategy, client_mode=name == "liar")
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.5, until=until(60.0)))
        await sim.sleep(10.0)
        lying: Any = run.swarm.peer("liar").participant
        first: Participant = run.swarm.peer("p0").participant
        contribute, before = lying.swarm_step._contribute, first.epoch
        assert lying.core.peer_id in first.own.committed.weights

        def lie(name: Any, said: int) -> tuple[float, float]:
            weight, factor = contribute(name, said)
            return 300 * weight, factor

        lying.swarm_step._contribute = lie
        await sim.sleep(14.0)
        refused = {each.peer for each in heard if isinstance(each, PeerDropped) and each.reason.startswith("weight")}
        assert refused == {lying.core.peer_id}
        assert first.epoch >= before + 4
        given = [each for step in first.own.committed.steps[before - first.epoch + 1 :] for each in step]
        assert not [each for each in given if each.peer == lying.core.peer_id and each.samples]

    sim.run(main, seed=56)


@pytest.mark.parametrize("merges", [False, True], ids=["synchronous", "merges"])
def test_samples_that_were_cut_were_said_to_come_too_late(merges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that gives more at once than it may is told so, and not to change the length of an epoch."""
    monkeypatch.setattr("shoal.run.swarm_step.may_give", lambda _typical, _steps: 1.0)

    async def main() -> None:
        run, heard, every_s = Run(target=128), list[Event](), 4.0 if merges else 1.0
        for name in NAMES:
            strategy = Decoupled(every=1, fragments=1) if merges else None
            await run.add(name, events=heard.append, strategy=strategy)
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=every_s, until=until(65.0)))
        await sim.sleep(70.0)
        for name in NAMES:
            await run.swarm.peer(name).participant.close()
        told = [each.message for each in heard if isinstance(each, Warned) and "went into no step" in each.message]
        assert told
        assert all(f"than the time since its last {'merge' if merges else 'round'} allows" in each for each in told), (
            told
        )

    sim.run(main, seed=58)


@pytest.mark.parametrize("merges", [False, True], ids=["synchronous", "merges"])
def test_what_was_trained_while_rounds_failed_was_cut(merges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 80 steps' worth could not be given, all of it counts afterwards: it was cut to 64, or to four."""

    async def main() -> None:
        run, heard = Run(target=32), list[Event]()
        for name in NAMES:
            strategy = Decoupled(every=1, fragments=1) if merges else None
            await run.add(name, events=heard.append, strategy=strategy, delay_grad_averaging=not merges)
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.5, until=until(80.0)))
        await sim.sleep(20.0)
        step = Averager.step

        async def fail(averager: Averager, **options: Any) -> Any:
            await sim.sleep(1.0)
            raise RoundFailed("the line is down")

        monkeypatch.setattr(Averager, "step", fail)
        await sim.sleep(40.0)
        monkeypatch.setattr(Averager, "step", step)
        before = [run.swarm.peer(name).participant.contribution.contributed for name in NAMES]
        await sim.sleep(8.0)
        after = [run.swarm.peer(name).participant.contribution.contributed for name in NAMES]
        given = [now - then for now, then in zip(after, before, strict=True)]
        assert min(given) > 0.9 * 40.0 * 4 / 0.5, given
        assert not [each for each in heard if isinstance(each, PeerDropped) and "more than the" in each.reason]

    sim.run(main, seed=57)


@pytest.mark.parametrize("keys", [1, pytest.param(2, marks=pytest.mark.long)])
def test_one_key_without_work_takes_the_weight_of_a_run(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives zeros, and says a million samples. Its claims filled the steps, and within 30 s it ended the run.

    Two keys of one machine do no more. The others are in each step with a batch, and nobody ends the run but they.
    """
    liars = [f"liar{number}" for number in range(keys)]

    async def main() -> None:
        run, heard, trains = Run(target=32), list[Event](), list[asyncio.Task[None]]()
        sites_of, mine = words.sites_of, {run.swarm.identity(name).peer_id for name in liars}
        for module in ("participant", "rounds", "swarm_step"):
            monkeypatch.setattr(
                f"shoal.run.{module}.sites_of",
                lambda contacts: {peer: b"one" if peer in mine else site for peer, site in sites_of(contacts).items()},
            )
        honest = [*NAMES, "p3"]
        for name in honest:
            await run.add(name, events=heard.append)
            trains.append(run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.5, until=until(80.0))))
        await sim.sleep(8.0)
        for name in liars:
            liar = await run.add(name)

            def zeros(_number: int, _size: int, liar: Trainer = liar) -> None:
                for parameter in liar.parameters:
                    parameter.grad = torch.zeros_like(parameter)

            monkeypatch.setattr(liar, "compute", zeros)
            trains.append(run.swarm.spawn(name, liar.train(10**6, duration_s=0.5, until=until(80.0))))
        first: Participant = run.swarm.peer("p0").participant
        await sim.sleep(14.0)
        before = {name: run.swarm.peer(name).participant.contribution.contributed for name in honest}
        epoch = first.epoch
        await sim.sleep(10.0)
        gave = [run.swarm.peer(name).participant.contribution.contributed - before[name] for name in honest]
        assert min(gave) >= 4 * 0.8 * (first.epoch - epoch), (gave, first.epoch - epoch)
        assert min(gave) > 0.4 * 10.0 * 4 / 0.5, gave
        weights = first.own.committed.weights
        assert keys > 1 or mine <= weights.keys()
        assert sum(weights.get(peer, 0) for peer in mine) < sum(weights.values()) / 2
        for name in liars:
            run.swarm.peer(name).participant.announce_end(first.epoch + 2)
        await sim.sleep(10.0)
        assert first.epoch > epoch + 10
        assert not any(run.swarm.peer(name).participant.at_end for name in honest)
        for each in trains:
            each.cancel()  # one may be in a download
        await asyncio.wait(trains)
        await run.close()

    sim.run(main, seed=59)
