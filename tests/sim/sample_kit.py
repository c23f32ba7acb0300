"""Which samples went into which step: every batch has a number, and is followed into the states that it made.

The audit looks over the shoulder of `GradientSum` and `Participant`. What a peer brings to a round is written down when
its values are copied in. The verdict names the contributors, so each state's samples are known without asking the code
that counts them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest

from shoal.averager import Averager
from shoal.optim.gradient_sum import GradientSum
from shoal.optim.participant import Participant
from shoal.optim.phases import Update
from shoal.optim.state_name import StateName

__all__ = ["SampleAudit"]


class Made(NamedTuple):
    """How a state was made: from which one, and the batches that went into it by the last step."""

    before: StateName
    batches: tuple[object, ...]


class SampleAudit:
    """Follows batches into states.

    Args:
        patch: puts the audit in place until the test ends.

    Attributes:
        current: the number of the batch that is accumulated next; set it before `accumulate`.
        made: every state that any peer was about to take, by its digest.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current: object = None
        self.made: dict[bytes, Made] = {}
        self._in: dict[int, list[object]] = {}  # the batches in a sum
        self._brought: dict[tuple[bytes, bytes], list[object]] = {}  # by round and peer
        self._wrap(patch)

    def _wrap(self, patch: pytest.MonkeyPatch) -> None:
        add, take_in, forget = GradientSum.add, GradientSum.take_in, GradientSum.forget
        contribute, begin, ready = Participant._contribute, Averager._begin_round, Participant._is_ready

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

        def contributes(each: Participant, name: StateName, said: int, most: int) -> Any:
            found = contribute(each, name, said, most)
            vars(each._averager)["brings"] = self._of(each) if each.own.name == name else []
            return found

        async def begins(each: Averager, group: Any, *args: Any) -> Any:
            round_ = await begin(each, group, *args)
            self._brought[group.round_id, each.core.peer_id.raw] = vars(each).get("brings", [])
            return round_

        def is_ready(each: Participant, update: Update) -> None:
            batches: list[object] = []
            if update.is_step and each.last_round is None:
                batches = self._of(each)
            elif update.is_step and each.last_round is not None:
                by = [peer.raw for peer in each.last_round.outcome.contributors]
                batches = [batch for peer in by for batch in self._brought[each.last_round.round_id, peer]]
            self.made[update.name.digest] = Made(each.own.name, tuple(sorted(batches, key=repr)))
            ready(each, update)

        patch.setattr(GradientSum, "add", adds)
        patch.setattr(GradientSum, "take_in", takes_in)
        patch.setattr(GradientSum, "forget", forgets)
        patch.setattr(Participant, "_contribute", contributes)
        patch.setattr(Averager, "_begin_round", begins)
        patch.setattr(Participant, "_is_ready", is_ready)

    def _of(self, participant: Participant) -> list[object]:
        return list(self._in.get(id(participant.training._sum), ()))

    def counted(self) -> set[Any]:
        """The numbers of all batches that went into a state, of whatever history."""
        return {batch for made in self.made.values() for batch in made.batches}

    def check(self, last: StateName, batch_size: int) -> int:
        """Walk from this state back to the beginning; returns how many batches went into it.

        Raises:
            AssertionError: a batch went in twice or was not counted, or an epoch was skipped.
        """
        counted: Counter[object] = Counter()
        name = last
        while name.epoch:
            before, batches = self.made[name.digest]
            assert name.epoch - before.epoch in (0, 1)
            # A member that crashed in the round may count in some parts only: it is no contributor by the verdict.
            assert name.samples - before.samples >= batch_size * len(batches), f"epoch {name.epoch}"
            counted.update(batches)
            name = before
        twice = [batch for batch, times in counted.items() if times > 1]
        assert not twice, f"counted twice: {twice[:5]}"
        return counted.total()
