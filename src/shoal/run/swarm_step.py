"""One peer's part in the steps of the swarm: gradients are averaged, and a step is made ready. Loop only.

A round takes the accumulators when the group begins, also from a trainer that is in the middle of a batch: nobody waits
for the slowest batch. Its members say what they would step with, and conclude the same from all that was said. Beside
nobody at its state a peer steps from its own mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from shoal.averaging import Averager, StepResult
from shoal.averaging.allreduce.interface import MAX_WEIGHT
from shoal.averaging.allreduce.vector import Vector
from shoal.base.names import known_as
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.errors import ConfigError
from shoal.run.course import Course
from shoal.run.decide.agreement import MOST_CORES, Agreement, Contributor, Said, agree, said_bytes
from shoal.run.decide.check import Check
from shoal.run.decide.phases import Event
from shoal.run.decide.state_name import StateName
from shoal.run.gossip import ProgressGossip
from shoal.run.join.step_feed import StepFeed
from shoal.run.outlook import Outlook
from shoal.run.parameter_check import ParameterCheck
from shoal.run.report.notices import Notices
from shoal.run.rounds import Rounds, sites_in, weigh_in
from shoal.run.view.contribution import Contribution
from shoal.run.view.words import MOST_STEPS, may_give, sites_of
from shoal.train.options import differences, misfit

__all__ = ["SwarmStep"]

_FEW_STEPS = 3
"""Before that nobody knows how much a step takes: the first ones may have come late, or lack most peers."""


@dataclass(kw_only=True)
class SwarmStep:
    """Makes the steps of the swarm ready for the trainer of one peer, with these parts of it.

    Attributes:
        outlook: of this peer.
        course: told of a step that is ready, or cannot be taken.
        rounds: of this peer.
        averager: of the gradients.
        check: compares the parameters of the members.
        feed: keeps the step for peers that catch up.
        contribution: told of samples that were more than this peer may give.
        gossip: knows whether another peer has our identity.
        notices: tell the user.
        last_round: the last one; None if there was none, or if a step was taken alone since.
        led_to: the state to which the members of a round were to step last.
    """

    outlook: Outlook
    course: Course
    rounds: Rounds
    averager: Averager
    check: ParameterCheck
    feed: StepFeed
    contribution: Contribution
    gossip: ProgressGossip
    notices: Notices
    last_round: StepResult | None = None
    led_to: StateName | None = None

    def __post_init__(self) -> None:
        self._own, self._training, self._me = self.outlook.own, self.outlook.own.training, self.outlook.core.peer_id
        self._now = self.outlook.loop.time
        self._given = self._cut = 0  # samples of the round that may count, and those that it does not take

    @property
    def others(self) -> frozenset[PeerID]:
        """The other members of the last round."""
        members = self.last_round.outcome.members if self.last_round is not None else ()
        return frozenset(member.contact.peer for member in members) - {self._me}

    @property
    def here(self) -> frozenset[PeerID]:
        """The peers that took the last step with us, or are about to, and are still here; this one is among them."""
        members = self.others | {self._me} if self.last_round is not None else frozenset()
        return members & self.outlook.view().together

    async def average(self) -> bool:
        """Average the gradients with everybody at our state, and make the step ready.

        Returns:
            Whether our state has another name, as the check of this round says that our parameters differ.
        """
        outlook, name, pace = self.outlook, self._own.name, self.outlook.pace
        if (grace_s := pace.grace_s(self._now())) and not self.course.turns:
            await self._trainer_comes(grace_s)
        said = self._said(await self.check.of(name))
        outlook.attendance.search(outlook.companions.patience_s)
        result = await self.rounds.run(
            self.averager,
            tag=name.group_tag,
            since_last_s=pace.since_last_s(self._now()),
            gather=said,
            hopeless=lambda view: view.behind or outlook.alone(view),
            expected=self._awaited,
            prepare=lambda _: self._contribute(name, said.samples),
            most_weight=self._most_weight,
            strangers=outlook.attendance.strangers,
            apply=lambda vector: self._take_average(vector, name),
        )
        if result is None:
            await self._failed()
            return False
        self.last_round = result
        pace.round_took(result.duration_s)
        terms = outlook.terms
        waits = not (terms.goes_on or terms.meets_rarely)
        self.notices.round_took(result.duration_s, self._now(), awaited=waits)
        members = [member.contact.peer for member in result.outcome.members]
        self._tell_absent(members, self._now() - result.duration_s)
        if self._own.name != name:
            return False
        self._own.is_shared()
        return await self._take_step_of(result, said)

    async def _failed(self) -> None:
        """A round has failed, or has become hopeless: what was accumulated stays for the next one."""
        outlook = self.outlook
        outlook.forerunners.round_failed()
        view = outlook.view()
        if self.rounds.in_vain or outlook.alone(view):
            # Where several are at one better state, they have met without us: alone we would only be further away.
            met = view.leaders if view.behind else ()
            self._tell_absent({self._me}, self._now(), elsewhere=met if len(met) > 1 else ())
        async with self._own.hold() as holds:
            if holds:
                self._training.pending.round_failed()
                self._drop_unfit()  # it counts for nothing in any round: if nobody's does, every round fails

    async def _trainer_comes(self, within_s: float) -> None:
        """Wait for a trainer that is in the middle of a batch."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.course.turns and not self.outlook.view().behind:
                    await self.course.moves.next(1.0)

    # ------------------------------------------------------------------------------------------------ who, and how much

    def _awaited(self) -> frozenset[PeerID]:
        """The peers that our search waits for now: nobody once none has come for as long as the pace allows.

        A smaller part of those that are here waits for the others even then: the larger part may have begun without it,
        and soon has a better state than the one that it would make.
        """
        attendance = self.outlook.attendance
        awaited = attendance.wait_for(self.outlook.view().together - {self._me}, self._now())
        patience_s = min(self.outlook.pace.patience_s(), attendance.patience_s)
        late = self._now() > self.averager.joined_at + patience_s
        return frozenset() if late and 2 * self.averager.group_size > 1 + len(awaited) else awaited

    def _tell_absent(self, members: Collection[PeerID], now: float, elsewhere: Collection[PeerID] = ()) -> None:
        """A round has formed, or was waited for in vain: name those that are no longer waited for."""
        self.notices.absent(self.outlook.attendance.formed(members, now, elsewhere))

    def _most_weight(self, peer: PeerID) -> float:
        """The largest weight that a peer may give to the round now.

        It grows with the time since that peer gave last. Members measure this time differently, so others may give
        twice as much as we count for them.
        """
        committed, own = self._own.committed, peer == self._me
        steps = self.outlook.witness.steps_since(peer)
        if len(committed.steps) < _FEW_STEPS:
            steps = MOST_STEPS
        elif steps is None:
            steps = 1.0 if own else MOST_STEPS
        return min(MAX_WEIGHT, may_give(committed.record.rate(peer), max(1.0, steps)) * (1 if own else 2))

    def _contribute(self, name: StateName, said: int) -> tuple[float, float]:
        """Weight and factor of the accumulators at this state; the others refuse a larger weight than it may give."""
        # Now, and not when the search began: a trainer that goes on has trained for as long as the search took.
        most = max(1, int(self._most_weight(self._me)))  # whole samples: they are what it has contributed
        samples = self._training.pending.samples if self._own.name == name else 0
        self._given = min(samples, most)  # of more no more counts
        self._own.gives.note(name.digest, said, self._given)
        self._cut = samples - self._given
        weight, factor = self._training.contribute() if self._own.name == name else (0.0, 0.0)
        return min(weight, most), factor

    def _said(self, check: Check | None = None) -> Said:
        training, end = self._training, self.outlook.end
        word = end.word(self._own.name.epoch, training.model_epoch)
        cores = min(training.stepper.cores, MOST_CORES)
        return Said(training.options(), training.pending.total.unused(), check, training.pending.samples, word, cores)

    # --------------------------------------------------------------------------------------------------------- the step

    def _take_average(self, vector: Vector, name: StateName) -> None:
        if self._own.name == name:  # else another state was taken over, and nothing of the round belongs to it
            try:
                self._training.use_average(vector)
            except Exception:
                self._training.discard()  # a part of it may be here
                raise

    async def _take_step_of(self, result: StepResult, said: Said) -> bool:
        """The step of a round, as all its members take it; not if this peer cannot: then it falls behind.

        Returns:
            As `average`.
        """
        own, training, outcome, me = self._own, self._training, result.outcome, self._me
        if outcome.counts(me):  # in each part, or in some, as where one line is bad
            self.contribution.was_cut(self._cut)
            training.counted()
        run, name, committed = self.outlook.core.env.executor.run, own.name, own.committed
        weighed = weigh_in(result, committed)

        def concluded() -> Agreement:
            return agree(
                result.gathered,
                outcome.contributors,
                outcome.counted_in_part,
                weigh=weighed,
                total=max(held.weight for held in outcome.commit.tiles),
                sites=sites_in(result),
                mine=said.options,
                last=committed.options,
            )

        agreement = await self.outlook.core.env.read(said_bytes(outcome.members), concluded)
        if own.name != name:
            return False  # another state was taken over meanwhile, and nothing of the round belongs to it
        if await self.check.difference(result, own.name, weighed):
            sometimes("a check finds that our parameters differ")
            return True
        if agreement.options is None:
            raise ConfigError(f"no step can be taken: the optimizer's option {said.options.problem()}")
        why = misfit(said.options, agreement.options)
        others = differences(said.options, agreement.options) if why is None else []
        if others:
            why = await run(training.why_not, agreement.options)
        if own.name != name:
            return False  # as above
        if why is not None:
            sometimes("the options of the swarm's step cannot be set here")
            self.notices.warn(f"the swarm's step is not taken here: its options are {why}")
            await self.give_up()
            return False
        if said.samples:  # else its own were no proposal
            self.notices.took_over(others)
        step = partial(training.step, agreement.options, agreement.unused, agreement.cores)
        members = [member.contact.peer for member in outcome.members]
        gave = [each.peer for each in agreement.contributors if each.samples]
        self.outlook.witness.gave(gave)
        self.outlook.companions.share(members, name.key, result.duration_s, gave=gave)
        after = name.after_round(result, agreement.digest)
        self.led_to = after
        own.prepare(step, after, len(members), agreement, gave=int(self._given * outcome.share(me)))
        self.course.happened(Event.AVERAGED)
        await self.feed.add_round(name, result, self.averager.vector, agreement)
        return False

    async def step_alone(self) -> None:
        """Make a step of the own mean ready: nobody else at our state takes part in a round."""
        own, training, me, name = self._own, self._training, self._me, self._own.name
        async with own.hold() as holds:
            if not holds or own.name != name:
                sometimes("a state is taken over while a step alone is due")
                return  # another state was taken over while we waited, and what was accumulated is forgotten
            if self._drop_unfit():
                self.course.happened(Event.UNFIT)
                return
            samples = training.pending.samples
            if training.is_own_mean:
                training.use_own_mean()  # at once: another thread may take longer to wake than a small step takes
            else:
                await self.outlook.core.env.executor.run(training.use_own_mean)
            training.counted()
            self.outlook.witness.gave([me])
            chance = self.outlook.core.env.rng.randbytes(16)
            said = self._said()
            contributors = [Contributor(me, samples, said.end, sites_of([self.outlook.contact])[me])]
            agreement = Agreement(said.options, said.unused, contributors, said.cores)
            await self.feed.add_alone(name, chance, samples, self.averager.vector, agreement)
        own.steps_alone()
        self.last_round = None  # nobody takes this step with us: for the average of the states none is waited for
        self.outlook.companions.forget()
        step = partial(training.step, cores=agreement.cores)
        own.prepare(step, name.after_step_alone(chance, me.to_bytes(), samples), 1, agreement, gave=samples)
        self.course.happened(Event.AVERAGED)

    # -------------------------------------------------------------------------------------------------- what is dropped

    def _drop_unfit(self) -> bool:
        """Forget the accumulators if they are not finite, so that no epoch is made of them; True if so."""
        if (bad := self._training.unfit()) is None:
            return False
        sometimes("accumulated gradients are not finite, and are dropped")
        self._training.discard()
        name = known_as(self._training.trained[bad], f"trained parameter {bad}")
        reason = f"gradients of {name} that are not finite: they are dropped"
        self.notices.rejected(bad, reason)
        return True

    async def give_up(self) -> None:
        """Forget the accumulated gradients, or what a round has left in their place: the others step without us."""
        async with self._own.hold() as holds:
            if holds and self._own.update is None:  # if the lock does not come, the next state discards it
                self._training.discard()
        if self._own.update is None and self.course.machine.is_busy:
            self.course.happened(Event.MISFIT)
