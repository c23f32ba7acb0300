"""A peer that is frozen until the others of its run have ended it and left: every strategy, at many moments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from shoal import sim
from shoal.events import Event, Warned
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, LocalUpdates, Merges, Strategy, StreamingDiLoCo, Synchronous
from tests.sim import optimizer_kit
from tests.sim.optimizer_kit import Run, Trainer

TARGET, END = 24, 4
STRATEGIES: dict[str, Strategy] = {
    "drop": Synchronous(TARGET, late="drop"),
    "next": Synchronous(TARGET, late="next"),
    "overlap": Synchronous(TARGET, late="overlap"),
    "LocalUpdates": LocalUpdates(TARGET),
    "LocalSGD": LocalSGD(3),
    "DiLoCo": DiLoCo(3),
    "StreamingDiLoCo": StreamingDiLoCo(4, fragments=2, overlap=1),
    "Decoupled": Decoupled(4, fragments=2, quorum=2),
}
Epochs = list[int]
MOMENTS: dict[str, Callable[[Epochs], bool]] = {
    "at the beginning": lambda _: True,
    "in the middle": lambda epochs: min(epochs) == 2,
    "before the last step": lambda epochs: min(epochs) == END - 1,
    "between two fragments": lambda epochs: min(epochs) < max(epochs) == END,
    "between the first merges": lambda epochs: min(epochs) == 0 < max(epochs),
}
"""When a peer is frozen, by the epochs of the fragments of its model."""


class Others:
    """Peers that train to the end of a run, while some of them are frozen.

    Attributes:
        run: the swarm.
        said: what each has warned of the end of the run.
    """

    def __init__(self, strategy: Strategy, peers: int, frozen: Sequence[str]) -> None:
        self.run = Run(target=TARGET)
        self.names, self.frozen = [f"p{number}" for number in range(peers)], frozen
        self.said = {name: list[str]() for name in self.names}
        self._strategy = strategy

    async def end(self, moment: str, *, batch_s: Sequence[float] = ()) -> None:
        """All train; at this moment some are frozen, and the others come to the end."""
        times_s = batch_s or [0.25 + number / 100 for number in range(len(self.names))]
        for name in self.names:
            await self.run.add(name, strategy=self._strategy, events=partial(self.note, name))
        await sim.sleep(3.0)
        self.run.announce_end(END)
        swarm = self.run.swarm
        self.work = {
            name: swarm.spawn(name, swarm.peer(name).train(4, duration_s=duration_s, until=lambda: False))
            for name, duration_s in zip(self.names, times_s, strict=True)
        }
        await sim.sleep(0.4)
        first = swarm.peer((self.frozen or self.names)[0])
        while not MOMENTS[moment]([fragment.epoch for fragment in first.fragments]):
            assert not first.finished
            await sim.sleep(0.01)
        for name in self.frozen:
            swarm.stall(name)
        await asyncio.gather(*(self.work[name] for name in self.work if name not in self.frozen))

    async def help(self) -> None:
        """An auxiliary peer takes part."""
        helper = await self.run.add("helper", strategy=self._strategy, auxiliary=True, check_every=0)
        self.helping = self.run.swarm.spawn("helper", helper.help())

    def note(self, name: str, event: Event) -> None:
        """A peer tells something."""
        told = event.message if isinstance(event, Warned) else ""
        if any(words in told for words in ("ended without", "its steps alone")):
            self.said[name].append(told)

    async def leave(self, names: Sequence[str]) -> None:
        """These leave the run, and their programs end."""
        for name in names:
            for fragment in self.run.swarm.peer(name).fragments:
                await self.run.swarm.run_on(name, fragment.close)
            await self.run.swarm.run_on(name, self.run.swarm.peer(name).participant.core.close)

    async def wake(self) -> None:
        """The frozen ones go on, to the end."""
        for name in self.frozen:
            self.run.swarm.unstall(name)
        async with asyncio.timeout(120.0):
            await asyncio.gather(*(self.work[name] for name in self.frozen))

    def weights(self, name: str) -> list[torch.Tensor]:
        """The weights that a peer has, or had when it left."""
        return [each.detach().clone() for each in self.run.trainers[name].parameters]

    def differs(self, name: str) -> bool:
        """Whether this one has other weights than the first peer."""
        first = self.weights("p0")
        return not all(torch.equal(a, b) for a, b in zip(first, self.weights(name), strict=True))


CASES = [
    pytest.param(
        name,
        moment,
        marks=[] if number == 1 + fragments else pytest.mark.long(full=(place + number) % 3 > 0),
    )
    for place, (name, strategy) in enumerate(STRATEGIES.items())
    for fragments in [strategy.merging.fragments if isinstance(strategy, Merges) else 1]
    for number, moment in enumerate(list(MOMENTS)[: 2 + fragments])
]
"""In the short tests one moment of each strategy; a third of the others in the sample of the long ones."""


@pytest.mark.parametrize(("strategy", "moment"), CASES)
@pytest.mark.parametrize("frozen", [["p2"], pytest.param(["p2", "p3"], marks=pytest.mark.long)], ids=["one", "two"])
def test_who_is_left_without_the_others_says_that_its_weights_differ(
    strategy: str, moment: str, frozen: list[str]
) -> None:
    """Once, and it names those who have ended, and the epoch. Two that were frozen together make no step alone."""

    async def main() -> None:
        others = Others(STRATEGIES[strategy], 2 + len(frozen), frozen)
        await others.end(moment)
        await others.leave(["p0", "p1"])
        await sim.sleep(3.0)
        await others.wake()
        for name in frozen:
            said = others.said[name]
            assert len(said) == others.differs(name), said
            assert all(f"ended it at epoch {END} and left" in each for each in said)
            assert all(trainer.epoch == END for trainer in others.run.trainers[name].fragments)
        assert others.differs("p2")
        assert not others.said["p0"] + others.said["p1"]
        await others.leave(frozen)

    sim.run(main, seed=len(moment))


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=[] if name in {"drop", "LocalSGD"} else pytest.mark.long)
        for name, strategy in STRATEGIES.items()
        if not strategy.terms.quorum  # it would wait for the others
    ],
)
def test_who_outlived_others_with_whom_it_had_no_step_was_told_that_it_trains_alone(strategy: str) -> None:
    """They are lost at the end, and say nothing. That the run has ended was told only after a step with them."""

    async def main() -> None:
        others = Others(STRATEGIES[strategy], 3, ["p2"])
        await others.end("at the beginning")
        for name in ("p0", "p1"):
            others.run.swarm.crash(name)
        await sim.sleep(3.0)
        await others.wake()
        assert others.differs("p2")
        (said,) = others.said["p2"]
        assert f"ended at epoch {END}, and after epoch 0 this peer made its steps alone" in said
        await others.leave(["p2"])

    sim.run(main, seed=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("strategy", "moment"), CASES)
@pytest.mark.parametrize("stays", ["p1", "helper"])
def test_who_is_left_behind_takes_the_last_state_from_a_peer_that_stays(strategy: str, moment: str, stays: str) -> None:
    """And has nothing to tell. An auxiliary peer is enough."""

    async def main() -> None:
        others = Others(STRATEGIES[strategy], 3, ["p2"])
        if stays == "helper":
            await others.help()
        await others.end(moment)
        if stays == "helper":
            await others.helping
        leaving = [name for name in ("p0", "p1") if name != stays]
        await others.leave(leaving)
        await sim.sleep(3.0)
        await others.wake()
        assert not others.differs("p2")
        assert not any(others.said.values()), others.said
        await others.leave(["p2", stays])

    sim.run(main, seed=len(moment))


@pytest.mark.parametrize("strategy", ["drop", "next", pytest.param("overlap", marks=pytest.mark.long)])
def test_who_steps_alone_beside_a_peer_with_long_batches_was_told_that_it_ended_without_it(strategy: str) -> None:
    """Its last steps lack the other one's samples, but that one comes to the same state before both end."""

    async def main() -> None:
        others = Others(STRATEGIES[strategy], 2, [])
        await others.end("at the beginning", batch_s=(0.05, 1.5))
        assert others.run.trainers["p0"].alone
        assert not others.differs("p1")
        assert not any(others.said.values()), others.said
        await others.leave(others.names)

    sim.run(main, seed=0)


def test_a_peer_that_waits_for_a_quorum_took_the_farewells_of_an_earlier_run_for_the_end_of_its_own() -> None:
    """They lie in the DHT for a while. It made all steps of a run of the same name alone."""

    async def main() -> None:
        others = Others(STRATEGIES["Decoupled"], 2, [])
        await others.end("at the beginning")
        for name in others.names:
            for fragment in others.run.swarm.peer(name).fragments:
                await others.run.swarm.run_on(name, fragment.close)
        new = await others.run.add("new", strategy=STRATEGIES["Decoupled"])
        others.run.announce_end(END)
        others.work["new"] = others.run.swarm.spawn("new", new.train(4, duration_s=0.25, until=lambda: False))
        await sim.sleep(10.0)
        assert new.participant._known.left, "their farewells are not in the DHT"
        assert new.participant.epoch == 0
        others.work["new"].cancel()
        await others.run.close()

    sim.run(main, seed=1)


def test_who_lacks_a_quorum_looks_for_the_end_before_it_says_so() -> None:
    """The others may have given it up, and so told it nothing. It looks once: the disk may be far away."""

    async def main() -> None:
        run, told = Run(target=TARGET), list[str]()

        def note(event: Event) -> None:
            if isinstance(event, Warned) and "quorum is" in event.message:
                told.append(event.message)

        for name in ("p0", "p1"):
            await run.add(name, strategy=STRATEGIES["Decoupled"], events=note if name == "p1" else None)
        left = run.trainers["p1"]
        solitude = left.participant.solitude
        solitude._has_folder = True
        run.announce_end(END)
        run.swarm.spawn("p1", left.train(4, duration_s=0.25, until=lambda: False))
        await sim.sleep(3.0)
        run.swarm.crash("p0")
        async with asyncio.timeout(120.0):
            while solitude.untold is None:
                await sim.sleep(1.0)
        assert not told
        assert left.participant.ends_at == END
        solitude.looked_for_end(found=False)
        await sim.sleep(60.0)
        assert solitude.untold is None
        assert len(told) == 1
        await run.close()

    sim.run(main, seed=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("silent_s", [20.0, 1.5])
@pytest.mark.parametrize("peers", [2, 3])
def test_a_last_average_that_was_missed_left_other_weights_in_silence(peers: int, silent_s: float) -> None:
    """A peer is cut off between its last step and the average. It is waited for; who ends without it says so."""

    async def main() -> None:
        others = Others(LocalUpdates(TARGET), peers, [])
        swarm = others.run.swarm

        async def life(name: str, number: int) -> None:
            trainer = swarm.peer(name)
            await trainer.train(4, duration_s=0.25 + number / 20, until=lambda: False)
            await others.leave([name])

        for name in others.names:
            await others.run.add(name, strategy=LocalUpdates(TARGET), events=partial(others.note, name))
        await sim.sleep(3.0)
        others.run.announce_end(END)
        work = [swarm.spawn(name, life(name, number)) for number, name in enumerate(others.names)]
        last = swarm.peer("p1").participant
        while last.epoch < END:
            await sim.sleep(0.005)
        swarm.stall("p1")
        await sim.sleep(silent_s)
        swarm.unstall("p1")
        await asyncio.gather(*work)
        differing = [name for name in others.names if others.differs(name)]
        assert bool(differing) == any(others.said.values()), others.said
        if silent_s < 15.0:  # as long as peers at the end wait for each other
            assert not differing

    sim.run(main, seed=1)


class Wide(Trainer):
    """Trains a model of eight parameters."""

    def compute(self, number: int, size: int) -> None:
        """See `Trainer`."""
        for parameter in self.parameters:
            parameter.grad = parameter.detach() + float(self.index + number)


def test_a_model_with_a_fragment_at_its_beginning_waited_for_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others had ended and left. It was taken for a newcomer, and told that training begins at epoch 0."""

    def model(dtype: torch.dtype, seed: int, width: int) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.full((width,), float(seed), dtype=dtype)) for _ in range(8)]

    async def main() -> None:
        others = Others(StreamingDiLoCo(8, fragments=8, overlap=1), 3, ["p0"])
        others.run = Run(target=TARGET, trainer=Wide)
        await others.end("between the first merges", batch_s=(1.0, 0.11, 1.02))
        await others.leave(["p1", "p2"])
        await sim.sleep(20.0)
        await others.wake()
        assert len(others.said["p0"]) == 1
        await others.leave(["p0"])

    monkeypatch.setattr(optimizer_kit, "model", model)
    sim.run(main, seed=3)
