"""Which samples went into which step: every batch has a number, and is followed into the states that it made.

The audit looks over the shoulder of `GradientSum` and `SwarmStep`. What a peer brings to a round is written down when
its values are copied in. The verdict names, for each tile, the members that count there, so each state's samples are
known without asking the code that counts them.

**The law.** A member gives the samples of the batches that it holds at the moment when its values are copied in, but no
more than it may give at that moment. A tile of the round has what is given by all members that count in it. The step
names the mean over the tiles, rounded down. A batch counts in one step at most, in all tiles of that step or in some.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from shoal.averaging import Averager, StepResult
from shoal.averaging.allreduce.interface import has_member
from shoal.run.decide.state_name import StateName
from shoal.run.join.own_state import OwnState, Update
from shoal.run.swarm_step import SwarmStep
from shoal.train.gradient_sum import GradientSum
from shoal.train.training_state import TrainingState

__all__ = ["SampleAudit"]


class Give(NamedTuple):
    """What a peer brings to a round: its batches, and how many of their samples count."""

    batches: tuple[object, ...] = ()
    samples: int = 0


class Made(NamedTuple):
    """How a state was made: from which one, and the batches that went into it by the last step, with their samples."""

    before: StateName
    batches: tuple[object, ...]
    samples: int


class SampleAudit:
    """Follows batches into states.

    Args:
        patch: puts the audit in place until the test ends.
        batch_size: samples of each batch.

    Attributes:
        current: the number of the batch that is accumulated next; set it before `accumulate`.
        made: every state that any peer was about to take, by its digest.
        cut: how often a peer held more than it may give.
        in_part: how many of these states have a peer in some tiles only.
    """

    def __init__(self, patch: pytest.MonkeyPatch, batch_size: int) -> None:
        self.current: object = None
        self.made: dict[bytes, Made] = {}
        self.cut = 0
        self.in_part = set[bytes]()
        self._size = batch_size
        self._in: dict[int, list[object]] = {}  # the batches in a sum
        self._brought: dict[tuple[bytes, bytes], Give] = {}  # by round and peer
        self._wrap(patch)

    def _wrap(self, patch: pytest.MonkeyPatch) -> None:
        add, take_in, forget = GradientSum.add, GradientSum.take_in, GradientSum.forget
        contribute, begin, prepare = SwarmStep._contribute, Averager._begin_round, OwnState.prepare

        def adds(each: GradientSum, *args: Any) -> None:
            add(each, *args)
            self._in.setdefault(id(each), []).append(self.current)

        def takes_in(each: GradientSum, other: GradientSum) -> None:
            batches = list(self._in.get(id(other), ()))
            take_in(each, other)
            self._in.setdefault(id(each), []).extend(batches)

        def forgets(each: GradientSum) -> None:
            forget(each)
            self._in[id(each)] = []

        def contributes(each: SwarmStep, name: StateName, *args: Any) -> Any:
            own = each.outlook.own
            may_give = max(1, int(each._most_weight(each.outlook.core.peer_id)))
            found = contribute(each, name, *args)
            batches = self._of(own.training) if own.name == name else ()
            self.cut += len(batches) * self._size > may_give
            vars(own)["swarm_step"] = each
            vars(each.averager)["brings"] = Give(batches, min(len(batches) * self._size, may_give))
            return found

        async def begins(each: Averager, group: Any, *args: Any) -> Any:
            round_ = await begin(each, group, *args)
            self._brought[group.round_id, each.core.peer_id.to_bytes()] = vars(each).get("brings", Give())
            return round_

        def prepares(each: OwnState, *args: Any, **options: Any) -> Update:
            update, batches, samples = prepare(each, *args, **options), tuple[object, ...](), 0
            step = vars(each).get("swarm_step")
            last = None if step is None else step.last_round
            if update.is_step and last is None:
                batches = self._of(each.training)
                samples = len(batches) * self._size
            elif update.is_step and last is not None:
                batches, samples = self._taken(last, update.name)
            self.made[update.name.digest] = Made(each.name, tuple(sorted(batches, key=repr)), samples)
            return update

        patch.setattr(GradientSum, "add", adds)
        patch.setattr(GradientSum, "take_in", takes_in)
        patch.setattr(GradientSum, "forget", forgets)
        patch.setattr(SwarmStep, "_contribute", contributes)
        patch.setattr(Averager, "_begin_round", begins)
        patch.setattr(OwnState, "prepare", prepares)

    def _taken(self, result: StepResult, name: StateName) -> tuple[tuple[object, ...], int]:
        """The batches that are in a tile of this round, at least; and the samples that its step may name."""
        tiles, batches = result.outcome.commit.tiles, list[object]()
        samples = [0 for _ in tiles]
        for index, member in enumerate(result.outcome.members):
            counts = [has_member(tile.contributors, index) for tile in tiles]
            if any(counts):
                gave = self._brought[result.round_id, member.contact.peer.to_bytes()]
                batches.extend(gave.batches)
                samples = [tile + gave.samples * here for tile, here in zip(samples, counts, strict=True)]
                if not all(counts):
                    self.in_part.add(name.digest)
        return tuple(batches), int(fmean(samples))

    def _of(self, training: TrainingState) -> tuple[object, ...]:
        return tuple(self._in.get(id(training.pending.total), ()))

    def counted(self) -> set[Any]:
        """The numbers of all batches that went into a state, of whatever history."""
        return {batch for made in self.made.values() for batch in made.batches}

    def check(self, last: StateName) -> int:
        """Walk from this state back to the beginning; returns how many batches went into it.

        Raises:
            AssertionError: a batch went in twice, a state names other samples than it has, or an epoch was skipped.
        """
        counted: Counter[object] = Counter()
        name = last
        while name.epoch:
            before, batches, samples = self.made[name.digest]
            assert name.epoch - before.epoch in (0, 1)
            assert name.samples - before.samples == samples, f"epoch {name.epoch}, {len(batches)} batches"
            counted.update(batches)
            name = before
        twice = [batch for batch, times in counted.items() if times > 1]
        assert not twice, f"counted twice: {twice[:5]}"
        return counted.total()
