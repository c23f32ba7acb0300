"""Ctrl+C at each line of what changes an anchor and the parameters: nothing stays half done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from shoal.strategies import Decoupled, DiLoCo, Merges, StreamingDiLoCo
from shoal.strategies.outer import LocalSteps, OuterTrainingState
from shoal.train.training_state import TrainingState
from tests.sim.optimizer_kit import backward, make_optimizer, model
from tests.sim.test_optimizer_interrupted import Interrupted

BATCH = 4
STRATEGIES = [DiLoCo(4), Decoupled(4, fragments=1), StreamingDiLoCo(4, 1, 2, 0.5)]


def code(function: Any) -> CodeType:
    """The code of a function."""
    found = function.__code__
    assert isinstance(found, CodeType)
    return found


STEP = [code(each) for each in (OuterTrainingState._step_from_average, OuterTrainingState._after_step)]
STEP += [code(each) for each in (TrainingState._step_from_average, TrainingState._after_step)]
TAKE_OVER = [code(each) for each in (OuterTrainingState.take_over, TrainingState.take_over)]
GO_BACK = [code(OuterTrainingState.go_back)]


def interrupt(place: int, codes: list[CodeType], work: Callable[[], object]) -> bool:
    """Do the work, interrupted before the line of this number that these functions come to; False if there is none."""
    lines = 0

    def local(_frame: FrameType, event: str, _about: object) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == place:
                raise Interrupted
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, _event, _about: local if frame.f_code in codes else None)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # `torch.no_grad` is left open by an interrupt at its end, as in `Optimizer.step`
    return False


class Scene:
    """One peer in the middle of a merge: it has given two batches, and trained one more.

    Args:
        strategy: of the peer.
        counts: whether what it has given is in the average.
    """

    def __init__(self, strategy: Merges, *, counts: bool) -> None:
        self.local = LocalSteps(*make_optimizer(model()), (), strategy.merging)
        self.fragment = self.local.fragments[0]
        self.batches = 0
        self.train()
        self.train()
        self.fragment.contribute()
        if counts:
            self.fragment.counted()
        self.train()

    def train(self) -> bool:
        """One batch; whether it counts."""
        backward(list(self.local.trained), 0, self.batches, BATCH)
        self.batches += 1
        return self.local.accumulate(BATCH)

    @property
    def anchor(self) -> list[torch.Tensor]:
        """A copy of it, with the statistics of the outer optimizer."""
        return [each.detach().clone() for each in self.fragment.export()[1]]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """A copy of them."""
        return [each.detach().clone() for each in self.local.trained]

    @property
    def trained(self) -> tuple[int, int]:
        """Samples and batches that go into a later merge."""
        fragment = self.fragment
        return fragment.pending.samples + fragment._later.samples, fragment.batches + fragment._later.batches

    def look(self) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[int, int], int]:
        """All of it."""
        return self.anchor, self.parameters, self.trained, self.fragment.epoch


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether these have equal bits."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def check(make: Callable[[], Scene], codes: list[CodeType], work: Callable[[Scene], None], least: int) -> None:
    """Interrupted anywhere, a peer is as before, or as afterwards; or its parameters are the anchor of one of these.

    What it finds at its next batch is checked; before that a checkpoint, which holds the anchor, loads.
    """
    whole, other = make(), make()
    before = whole.look()
    work(whole)
    after = whole.look()
    place = 1
    while interrupt(place, codes, partial(work, scene := make())):
        fragment, where = scene.fragment, f"at line {place}"
        if fragment.whole:
            assert any(alike(scene.anchor, each[0]) for each in (before, after)), f"half an anchor {where}"
        values, tensors = fragment.export()
        other.fragment.load(values, [each.clone() for each in tensors])
        weight, _ = fragment.contribute()
        if weight:
            assert any(alike(scene.parameters, each[1]) for each in (before, after)), f"half is given {where}"
        fragment.pending.round_failed()
        settled = fragment.settle()
        found = scene.look()
        if settled:
            assert found[2] == (0, 0), where
            assert alike(found[1], [each.detach() for each in fragment.trained]), where
        else:
            states = (before, after)
            assert any(alike(found[1], each[1]) and found[2] == each[2] for each in states), f"half is left {where}"
        place += 1
    assert place > least


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_merge_that_is_interrupted_is_taken_or_not(strategy: Merges, *, counts: bool) -> None:
    """What was trained may be lost, and is not given in part, nor with the wrong weight."""

    def merge(scene: Scene) -> None:
        if not scene.fragment.pending.holds_average:
            for each in scene.fragment.accumulators:
                each.fill_(0.01)  # the average of the others
            scene.fragment.use_accumulators()
        scene.fragment.step()

    check(lambda: Scene(strategy, counts=counts), STEP, merge, 25)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_state_is_taken_over_whole_when_that_is_interrupted(strategy: Merges) -> None:
    """Of the parameters: the anchor may be half of each, so a name is given to it only afterwards."""

    def take_over(scene: Scene) -> None:
        values, tensors = scene.fragment.export()
        prepared = scene.fragment.prepare({**values, "epoch": 1}, [each.clone() + 1.0 for each in tensors])
        scene.fragment.whole = False
        scene.fragment.take_over(prepared, follows=True)
        scene.fragment.whole = True

    check(lambda: Scene(strategy, counts=True), TAKE_OVER, take_over, 15)


def test_going_back_is_done_whole_when_that_is_interrupted() -> None:
    """It was noted as done before it was."""
    check(lambda: Scene(DiLoCo(4), counts=True), GO_BACK, lambda scene: scene.fragment.go_back(), 4)
