"""The trainer's turn: what it is asked for at its step, where it waits, and for what. Loop, but where marked.

The trainer changes the parameters itself, between two batches. At its step it asks whether there is anything to do. It
waits for a round, where it cannot go on beside one; for a merge that may be due soon; for a better state, when it is
behind; and at the end of the run for the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from shoal.base.clock import seconds_text
from shoal.base.tasks import Changes
from shoal.errors import StateUnavailable
from shoal.run.course import Course
from shoal.run.decide.beginning import Stance
from shoal.run.decide.phases import Event, RunPhase
from shoal.run.decide.state_name import StateName
from shoal.run.gossip import ProgressGossip
from shoal.run.outlook import Outlook
from shoal.run.takeover import Takeover
from shoal.run.view.progress import StateKey, SwarmView

__all__ = ["TrainerTurn"]

_LOOKS_S = 2e-3
"""The trainer's batches cause one look in this time, however short they are: a look takes a tenth of it."""


class TrainerTurn:
    """The turns of the trainer of one peer.

    Args:
        outlook: of this peer.
        course: where its phase is waited for.
        takeover: of better states.
        gossip: says when others were looked for.
        news: reasons for the driver to look.
        look: looks at the swarm now; returns the view, and the swarm as the others claim it to be.
        judge: lets the phase go on from such a view.
    """

    def __init__(
        self,
        outlook: Outlook,
        course: Course,
        takeover: Takeover,
        gossip: ProgressGossip,
        news: Changes,
        *,
        look: Callable[[], tuple[SwarmView, SwarmView]],
        judge: Callable[[SwarmView], None],
    ) -> None:
        self._outlook, self._course, self._takeover, self._gossip = outlook, course, takeover, gossip
        self._own, self._pace, self._fetching = outlook.own, outlook.pace, outlook.fetching
        self._news, self._look, self._judge, self._now = news, look, judge, outlook.loop.time
        self._held_at: StateName | None = None  # there the trainer has waited for a merge that was not due
        self._looked_at, self._look_is_due = -math.inf, False  # because of the trainer

    # -------------------------------------------------------------------------------------- what any thread may ask for

    @property
    def enough(self) -> bool:
        """Whether there is enough for a step, as far as it is known. Any thread may ask."""
        own, training = self._own, self._own.training
        return self._pace.reaches(training.pending.samples, training.batches, own.name.epoch)

    @property
    def is_due(self) -> bool:
        """Whether the trainer has something to do or to ask at its step, as far as it is known. Any thread may ask."""
        rarely = self._outlook.terms.meets_rarely
        if self._course.phase is not RunPhase.COLLECTING:
            return True
        if self._own.name.epoch == 0 and not (rarely and self._course.has_asked):
            return True
        return self._own.training.batches >= self._pace.near_at and (self.enough or self._hold_s() > 0)

    def _hold_s(self) -> float:
        """How long the trainer holds before its next batch, by its pace; once at each state."""
        own = self._own
        if self._held_at == own.name:
            return 0.0
        return self._pace.hold_s(own.training.batches, self._now(), own.name.epoch)

    @property
    def has_news(self) -> bool:
        """Whether what was trained since the last look is worth one, and none is due: thousands of batches are not."""
        return not self._look_is_due and self._pace.is_news(self._own.training.batches)

    @property
    def waits_for_state(self) -> bool:
        """Whether the trainer stands still for a better state; if not, until it is here."""
        return not self._outlook.trains_on or self._fetching.has_news

    @property
    def holds_update_back(self) -> bool:
        """Whether the trainer is to take the average that is here at a later batch."""
        own, outlook = self._own, self._outlook
        has_batches = not (outlook.settings.auxiliary or outlook.at_end)
        return own.update is not None and own.update.is_step and has_batches and own.training.holds_back

    # ----------------------------------------------------------------------------------------------------- at its step

    def accumulated(self) -> None:
        """The trainer has accumulated, or stepped: look again, at once or `_LOOKS_S` after the last look."""
        if self._look_is_due:
            return
        if (due_at := self._looked_at + _LOOKS_S) <= self._now():
            self._look_again()
        else:
            self._look_is_due = True
            asyncio.get_running_loop().call_at(due_at, self._look_again)

    def _look_again(self) -> None:
        self._looked_at, self._look_is_due = self._now(), False
        self._news.notify()

    async def decide(self, timeout_s: float) -> RunPhase:
        """Look at the accumulators just now, and say what is to be done (trainer).

        Waits while a round goes on, or the others come to the end; AVERAGING and ENDING only if time ran out.
        """
        with self._course.turn(), suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._take()
        if self._course.failure is not None:
            raise self._course.failure
        self._takeover.check_beginning(self._outlook.view())
        return self._course.phase

    async def _take(self) -> None:
        await self._gossip.looked.wait()
        await asyncio.sleep(0)  # the driver looks first: it may find that we do not belong here
        if not self._course.machine.is_busy:
            view, _ = self._look()
            self._judge(view)
            self._news.notify()
            await self._hold()
        while self._waits():
            await self._course.moves.next()

    async def _hold(self) -> None:
        """Wait for a merge that may be due soon."""
        course = self._course
        if course.phase is not RunPhase.COLLECTING or not (hold_s := self._hold_s()):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                while course.phase is RunPhase.COLLECTING and not course.is_over:
                    await course.moves.next()
        if course.phase is RunPhase.COLLECTING:
            self._held_at = self._own.name

    def _waits(self) -> bool:
        own, outlook = self._own, self._outlook
        return not self._course.is_over and self._course.machine.trainer_waits(
            needs_round=own.training.waits, at_end=outlook.at_end, may_leave=outlook.end.over(own.name.epoch)
        )

    async def download(self, timeout_s: float, *, patient: bool = True) -> bool:
        """Download the best state and take it over (trainer). False if there is nothing better than ours.

        Args:
            timeout_s: how long it may take, seconds.
            patient: False to go on, with False, when the trainer has stood still for as long as claims are worth: the
                download goes on, and the trainer is told when there is something to take over.

        Raises:
            StateUnavailable: there is a better one, and no donor gave it; nothing was changed.
        """
        await self._gossip.looked.wait()

        def waits() -> bool:  # a newcomer that may not begin has nothing else to do
            return patient or self._takeover.stance(self._look()[0]) is Stance.WAITING

        deadline, taken, needed = self._now() + timeout_s, False, True
        failure: StateUnavailable | None = None
        while not taken and needed and (left_s := deadline - self._now()) > 0:
            view = self._outlook.claimed()
            if not view.behind and not self._fetching.has_news:
                may_give = (each for peer, each in view.others.items() if peer not in view.refused)
                if failure is None or all(StateKey.of_peer(each) <= self._own.name.key for each in may_give):
                    return False
                raise failure
            try:
                taken = await self._fetching.wait(view, left_s, patient=waits)
            except StateUnavailable as error:
                if not patient:
                    raise
                failure = error  # its holders may be gone by now, or be where we are
            needed = waits()
        if taken:
            self._course.happened(Event.TAKEN_OVER)
        elif patient:
            late = f"a better state is known, but did not arrive within {seconds_text(timeout_s)}"
            raise failure or StateUnavailable(late)
        return taken
