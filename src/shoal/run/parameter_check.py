"""One peer's part in the check of the parameters: it describes its own, and mends them if they differ.

The description is made beside the trainer's next batches. It is good only if the state still has its name afterwards (a
step gives it another one under the lock), and if no weights to evaluate with stood in its place meanwhile. If such are
there, it is tried again until the round comes, which then does without. `check` says what follows from the descriptions
of all.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from shoal.averaging import StepResult
from shoal.averaging.core import PeerCore
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import encode
from shoal.run.decide.agreement import checks_of, said_bytes
from shoal.run.decide.check import Check, Checks, Verdict, check_of, is_due, judge
from shoal.run.decide.state_name import StateName
from shoal.run.join.own_state import OwnState
from shoal.run.report.notices import Notices
from shoal.run.view.words import Weigh

__all__ = ["ParameterCheck"]

_LOOK_AGAIN_S = 0.1


class ParameterCheck:
    """Checks the parameters of one peer. Loop only.

    Args:
        core: this peer.
        own: its state.
        notices: tell the user of differences.
        every: how many epochs there are between two checks; 0 for none.
        is_last: whether the next step is the last one of the run: there is a check at it, too.
    """

    def __init__(
        self, core: PeerCore, own: OwnState, notices: Notices, *, every: int, is_last: Callable[[], bool]
    ) -> None:
        self._core, self._own, self._notices, self._every, self._is_last = core, own, notices, every, is_last
        self._awaited: StateName | None = None  # a round at this state waits for the description
        self._checks = Checks()
        self._described = self._known = 0  # changes up to this look are in what we said of a state, and in its verdict
        self._looking: tuple[StateName, asyncio.Task[Check | None]] | None = None

    @property
    def last(self) -> tuple[int, bytes, bytes] | None:
        """The conclusion of the last check: see `Checks.last`."""
        return self._checks.last

    def begin(self) -> None:
        """Look at the parameters of our state, if it is time to, beside the trainer's next batches."""
        name = self._own.name
        due = is_due(name.epoch, self._every) or (self._every > 0 and name.epoch > 0 and self._is_last())
        if due and (self._looking is None or self._looking[0] != name):
            self._looking = name, asyncio.get_running_loop().create_task(self._look(name))

    async def of(self, name: StateName) -> Check | None:
        """The description of our parameters at this state, if it is time for a check."""
        self.begin()
        self._awaited = name
        return await self._looking[1] if self._looking is not None and self._looking[0] == name else None

    async def _look(self, name: StateName) -> Check | None:
        training = self._own.training
        weights = training.weights
        evaluations = weights.evaluations
        if weights.are_away:
            return None
        describe = partial(
            check_of,
            on_host=training.stepper.on_host,
            way=training.stepper.way,
            holds=lambda: not weights.are_changed,
        )
        run, check = self._core.env.executor.run, None
        while check is None:
            while weights.are_changed or not weights.changes.are_over(name.epoch):
                sometimes("parameters are not those of the state when they are to be checked")
                if name == self._awaited or self._own.name != name:
                    return None
                await asyncio.sleep(_LOOK_AGAIN_S)
            try:
                check = await run(describe, training.optimizer, training.parameters, name.digest)
            except Exception as error:  # noqa: BLE001 (no memory for it: the others compare theirs)
                self._notices.skipped("the check of this peer's parameters was", error)
                return None
            if self._own.name != name:
                return None
        async with self._own.hold() as holds:  # a step renames under it: so they were those of this state all the time
            if not holds or self._own.name != name or weights.evaluations != evaluations:
                return None
            self._described = weights.changes.looks
            changed = weights.changes.since(self._known)
            return msgspec.structs.replace(check, changed=changed, followed=self._checks.differed)

    async def difference(self, result: StepResult, name: StateName, weigh: Weigh) -> frozenset[PeerID] | None:
        """The peers whose parameters are to replace ours, if ours differ; None if ours stay.

        If ours differ, our state has been renamed: it is worse than that of the others.
        """
        me, nbytes = self._core.peer_id, said_bytes(result.outcome.members)
        # Made of the values of all: nobody has known it before, as it may have known the id of the round.
        chance = hashlib.sha256(encode(result.outcome.commit)).digest()

        def judged() -> tuple[Mapping[PeerID, Check], Verdict | None]:
            checks = checks_of(result.gathered)
            return checks, judge(checks, weigh, chance)

        checks, verdict = await self._core.env.read(nbytes, judged)
        if verdict is None:
            return None
        to_mend = self._checks.concluded(name.epoch, verdict, checks, me)
        if me in checks:
            self._known = self._described
        if self._checks.count_difference(verdict) and me not in verdict.others:
            self._notices.differ(name.epoch, verdict, checks, again=self._checks.others_again)
        if apart := [peer for peer in checks if peer not in verdict.others and checks[peer].digest != verdict.digest]:
            self._notices.compute_otherwise(name.epoch, apart, verdict, checks, me)
        if not to_mend:
            return None
        self._notices.differs(name.epoch, verdict, me, checks, again=self._checks.again)
        async with self._own.hold() as holds:
            if not holds or self._own.name != name:
                return None  # the next check finds it, too
            self._own.differs()
            self._own.training.discard()
        return verdict.others[me]

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking[1].cancel()
            await asyncio.gather(self._looking[1], return_exceptions=True)
