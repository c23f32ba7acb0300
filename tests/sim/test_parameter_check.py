"""Peers that name one state and hold different parameters: found, said, mended, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.events import Event, Warned
from shoal.run import parameter_check
from shoal.run.decide.check import Check, check_of
from shoal.train.stepper import Stepper
from tests.sim.optimizer_kit import Run, Trainer

NAMES = ["p0", "p1", "p2"]


async def train(
    names: list[str],
    epochs: int,
    change: Callable[[Trainer], None],
    prepare: Callable[[Trainer], None] | None = None,
    *,
    threads: Sequence[int] = (),
    **of_run: Any,
) -> tuple[Run, list[str]]:
    """Train with checks at epochs 2, 6, 10, ... and after the last step. Returns what was said.

    `change` is called after each batch.
    `threads` says how many the trainer's thread of each peer has; `of_run` are options of the run.
    """
    run, said = Run(target=24, **of_run), list[str]()

    def note(event: Event) -> None:
        if isinstance(event, Warned) and "check of the parameters" in event.message:
            said.append(event.message)

    for number, name in enumerate(names):
        torch.set_num_threads(threads[number] if threads else 1)
        trainer = await run.add(name, check_every=4)
        torch.set_num_threads(1)
        if prepare is not None:
            prepare(trainer)
        trainer.participant.core.env.events.subscribe(note)
    await sim.sleep(3.0)
    run.announce_end(epochs)

    async def loop(name: str) -> None:
        trainer = run.swarm.peer(name)
        while not trainer.participant.finished:
            await trainer.take_batch(4, duration_s=0.2)
            change(trainer)

    await asyncio.gather(*(run.swarm.run_on(name, loop, name) for name in names))
    await run.close()
    return run, said


def nothing(trainer: Trainer) -> None:
    """What should be."""


def test_equal_parameters_pass_the_check() -> None:
    """Nothing is said, and all tell the same of themselves."""

    async def main() -> None:
        run, said = await train(NAMES, 13, nothing)
        checks = {run.swarm.peer(name).participant.progress().check for name in NAMES}
        assert not said
        assert len(checks) == 1
        (check,) = checks
        assert check is not None
        assert check[0] == 13
        assert check[1] == check[2]

    sim.run(main, seed=1)


def test_a_peer_alone_makes_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to compare with, so its parameters are not read through."""
    made = list[str]()

    def count(*_: object) -> Check:
        made.append("a check")
        return Check(b"", bytes(16), b"")

    async def main() -> None:
        monkeypatch.setattr(parameter_check, "check_of", count)
        await train(NAMES[:1], 13, nothing)
        assert not made

    sim.run(main, seed=1)


@pytest.mark.parametrize("value", [0.25, float("nan")])
def test_one_weight_that_differs_is_found_and_mended_by_one_download(value: float) -> None:
    """Most hold something else: who is alone takes over theirs, and nobody else downloads."""

    def poke(trainer: Trainer) -> None:
        if trainer.index == 0 and trainer.batches_done == 9:
            trainer.parameters[0].data[1, 1] = value

    async def main() -> None:
        run, said = await train(NAMES, 16, poke)
        assert run.agree(NAMES)
        assert [run.swarm.peer(name).downloads for name in NAMES] == [1, 0, 0]
        assert sum("ours differ from those of 2 peers" in each for each in said) == 1
        assert sum("held other parameters" in each for each in said) == 2
        assert not any("look at both sides" in each for each in said)
        # What it gave at that check is in the step that it did not take: it counted as dropped.
        participants = [run.swarm.peer(name).participant for name in NAMES]
        assert sum(each.status().contributed for each in participants) == participants[0].state.samples

    sim.run(main, seed=2)


def test_weights_to_evaluate_with_are_not_taken_for_those_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check reads beside the trainer, who may evaluate meanwhile (ScheduleFree): what it read does not count then."""
    read, real = list[int](), check_of

    async def main() -> None:
        def prepare(trainer: Trainer) -> None:
            training = trainer.participant.own.training
            mine: Any = training.optimizer

            def swap() -> None:
                for parameter in training.parameters:
                    parameter.data.add_(1.0)

            mine.eval, mine.train = swap, lambda: None

            def read_while_it_evaluates(optimizer: torch.optim.Optimizer, *others: Any, **about: Any) -> Check | None:
                if optimizer is not mine:
                    return real(optimizer, *others, **about)
                read.append(training.epoch)
                training.weights.evaluate()
                try:
                    return real(optimizer, *others, **about)
                finally:
                    training.weights.train()

            if trainer.index == 0:
                monkeypatch.setattr(parameter_check, "check_of", read_while_it_evaluates)

        run, said = await train(NAMES, 13, nothing, prepare)
        assert read == [2, 6, 10, 13]
        assert said == []
        assert [run.swarm.peer(name).downloads for name in NAMES] == [0, 0, 0]

    sim.run(main, seed=2)


def test_a_check_that_ends_in_a_tie_blames_nobody() -> None:
    """Of two peers either may be the wrong one, if its own step has made the difference: both say so."""

    def once(trainer: Trainer) -> None:
        def poke(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if trainer.participant.epoch == 3:
                trainer.parameters[0].data[1, 1] = 0.25

        if trainer.index == 0:
            trainer.participant.training.optimizer.register_step_post_hook(poke)

    async def main() -> None:
        run, said = await train(NAMES[:2], 16, nothing, once)
        assert run.agree(NAMES[:2])
        assert sum("look at both sides" in each for each in said) == 2
        assert sum(run.swarm.peer(name).downloads for name in NAMES[:2]) == 1

    sim.run(main, seed=2)


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_peers_the_one_whose_weights_were_changed_kept_them_and_gave_them_to_the_other(wrong: int) -> None:
    """It knows that its weights are not what its step has left, and takes the other's, wherever chance leads."""

    def poke(trainer: Trainer) -> None:
        if trainer.index == wrong and trainer.batches_done == 9:
            with torch.no_grad():
                for each in trainer.parameters:
                    each.mul_(0.5)

    async def main() -> None:
        run, said = await train(NAMES[:2], 16, poke)
        assert run.agree(NAMES[:2])
        assert [run.swarm.peer(name).downloads for name in NAMES[:2]] == [1 - wrong, wrong]
        assert len(said) == 2
        assert sum("Something else than shoal has written to the parameters of this peer" in each for each in said) == 1
        assert sum("They say that something else than shoal has written to theirs" in each for each in said) == 1
        assert not any("look at both sides" in each for each in said)

    sim.run(main, seed=2 + wrong)


def halved(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A hook that the others do not have."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


def rounded(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """The last bits of a step, as another processor may compute them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.mul_(1 + 2e-7)


@pytest.mark.parametrize("names", [NAMES[:2], NAMES], ids=len)
def test_a_step_that_always_differs_is_not_mended_for_ever(names: list[str]) -> None:
    """A hook on one peer only: the first, second and fourth check in a row, with what to look for.

    Each is mended by one download, and by a second one if the donor has stepped meanwhile. Of two peers ties had
    another order each time: either mended, each for the first time.
    """

    def hook(trainer: Trainer) -> None:
        if trainer.index == 1:
            trainer.participant.training.optimizer.register_step_pre_hook(halved)

    async def main() -> None:
        run, said = await train(names, 25, nothing, hook)
        downloads = [run.swarm.peer(name).downloads for name in names]
        assert 2 <= sum(downloads) <= 6  # of seven checks three
        assert sum(map(bool, downloads)) == 1  # always the same one
        assert sum("the step itself differs on one side" in each for each in said) >= 1

    sim.run(main, seed=3)


def test_two_peers_that_round_otherwise_were_told_to_test_their_memory_at_each_check() -> None:
    """They are told once what it is, and the same one follows, ever more rarely."""

    def hook(trainer: Trainer) -> None:
        if trainer.index == 1:
            trainer.participant.training.optimizer.register_step_post_hook(rounded)

    async def main() -> None:
        run, said = await train(NAMES[:2], 41, nothing, hook)
        downloads = [run.swarm.peer(name).downloads for name in NAMES[:2]]
        assert 2 <= sum(downloads) <= 8
        assert sum(map(bool, downloads)) == 1
        assert ["by no more than rounding" in each for each in said] == [False, False, True, True]  # on both peers

    sim.run(main, seed=3)


def test_another_arithmetic_is_no_difference_and_is_told() -> None:
    """The same step computed in another order: last bits differ, and nobody downloads. It was never said."""

    def way(trainer: Trainer) -> None:
        for group in trainer.participant.training.optimizer.param_groups:
            group["foreach"] = trainer.index == 1
            group["fused"] = trainer.index == 2

    def shift(trainer: Trainer) -> None:
        if trainer.index == 1 and trainer.batches_done == 5:
            trainer.parameters[0].data.mul_(1 + 1e-9)

    async def main() -> None:
        run, said = await train(NAMES, 12, shift, way)
        assert len(said) == len(NAMES)
        assert all("to rounding only, as they compute their steps otherwise" in each for each in said)
        assert all("fused" in each for each in said)
        assert not any(run.swarm.peer(name).downloads for name in NAMES)
        checks = [run.swarm.peer(name).participant.progress().check for name in NAMES]
        assert len({check[1] for check in checks if check is not None}) > 1
        assert len({check[2] for check in checks if check is not None}) == 1

    sim.run(main, seed=4)


def test_a_peer_that_differs_among_others_than_the_holders_takes_over_from_its_own_kind() -> None:
    """Two builds, two peers of each: one of the second build differs by less than the samples' bound."""
    names = [*NAMES, "p3"]

    def way(trainer: Trainer) -> None:
        for group in trainer.participant.training.optimizer.param_groups:
            group["foreach"] = trainer.index >= 2

    def shift(trainer: Trainer) -> None:
        if trainer.batches_done == 5 and trainer.index >= 2:  # rounding
            trainer.parameters[0].data.mul_(1 + 1e-6)
        if trainer.batches_done == 9 and trainer.index == 3:
            trainer.parameters[0].data[1, 1] += 1e-6

    async def main() -> None:
        run, said = await train(names, 16, shift, way)
        # Of two that differ chance decides which one is kept.
        assert [run.swarm.peer(name).downloads for name in names] in ([0, 0, 0, 1], [0, 0, 1, 0])
        assert sum("compute as this peer does" in each for each in said) == 1
        assert sum("to rounding only" in each for each in said) == 4  # on each peer
        assert len(said) == 8
        checks = [run.swarm.peer(name).participant.progress().check for name in names]
        assert len({check[2] for check in checks if check is not None}) == 1
        assert run.agree(names[:2])
        assert run.agree(names[2:])
        assert not run.agree(names)

    sim.run(main, seed=5)


# ------------------------------------------------------------------------------------------- peers that round otherwise


class ByThreads(torch.optim.Optimizer):
    """Multiplies matrices; its step depends on the number of threads, as that of SOAP does: by more than rounding."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "off": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        for group in self.param_groups:
            by = 1.0 + 0.01 * torch.get_num_threads()
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * by * (parameter @ parameter.t() @ parameter.grad))


def by_threads(parameters: list[torch.Tensor], lr: float) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer, without a schedule."""
    return ByThreads(parameters), None


@pytest.mark.parametrize("threads", [(2, 1, 2), (4, 3, 2)])
def test_peers_with_other_numbers_of_threads_keep_equal_bits_and_nobody_is_accused(threads: Sequence[int]) -> None:
    """With SOAP most states were unequal under one name, and the third peer was told to test its memory."""

    async def main() -> None:
        run, said = await train(NAMES, 12, nothing, threads=threads, make=by_threads)
        assert not said
        assert not any(run.swarm.peer(name).downloads for name in NAMES)
        assert run.agree(NAMES)

    sim.run(main, seed=6)


def test_a_peer_that_rounds_otherwise_is_told_of_both_ways_and_not_to_test_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On another processor: nothing that could be agreed on makes its bits equal."""

    def elsewhere(trainer: Trainer) -> None:
        if trainer.index == 2:
            training = trainer.participant.training
            elsewhere = type("Elsewhere", (Stepper,), {"numerics": "another processor"})
            monkeypatch.setattr(training.stepper, "__class__", elsewhere)
            take = training.optimizer.step

            def step(closure: Any = None) -> None:
                for group in training.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad.mul_(1.01)
                take()

            monkeypatch.setattr(training.optimizer, "step", step)

    async def main() -> None:
        run, said = await train(NAMES, 24, nothing, elsewhere, make=by_threads)
        ours = [each for each in said if "this peer downloads theirs" in each]
        assert 1 <= len(ours) <= 4
        assert all("another processor" in each and "average_state_every" in each for each in ours)
        assert not any("memory" in each for each in said)
        assert run.swarm.peer("p0").participant.epoch == 24

    sim.run(main, seed=6)
