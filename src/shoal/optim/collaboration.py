"""When the swarm steps: progress, gradient rounds, forks, state download. No threads, no waiting for the user.

One task in the loop watches the swarm and moves between five phases:

============  ====================================================================  ==================================
phase         the situation                                                         the trainer at its step
============  ====================================================================  ==================================
COLLECTING    the swarm has fewer than `target_batch_size` samples at our state     goes on with the next batch
AVERAGING     there are enough: the gradients are averaged with all at our state    waits for the round
STEPPING      the average is here, of the gradients or of the states                takes the step, or that average
BEHIND        somebody has a better state (a later epoch, or the winner of a fork)  downloads it
ENDING        this peer is at the announced end of the run, others are not yet      waits, some seconds at most
============  ====================================================================  ==================================

Only the trainer changes parameters, between its batches. A round takes the accumulators when the group begins, also
from a trainer that is in the middle of a batch: nobody waits for the slowest batch. After a failed round the
accumulators stay and it is tried again: a synchronous run never steps on local gradients while others are at the same
state.

A state is named by its digest: H(parent digest, round id, verdict). Peers meet under a key that holds their state's
digest, so gradients of different states are never averaged, and equal digests mean equal histories.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import partial

from shoal.allreduce.segments import RoundMemory
from shoal.allreduce.vector import Vector
from shoal.averager import StepResult, TensorLock
from shoal.clock import own_clock, shielded
from shoal.compression import CompressionBase
from shoal.core import PeerCore
from shoal.errors import ConfigError, StateUnavailable
from shoal.events import EpochAdvanced, RunEnded
from shoal.optim.agreement import Agreement, Contributor, Said, agree, checks_of
from shoal.optim.attendance import Attendance
from shoal.optim.beginning import Beginning, Stance
from shoal.optim.catch_up import CatchUp
from shoal.optim.check import Check, Checks, check_of, is_due, judge
from shoal.optim.committed import Committed
from shoal.optim.companions import Companions
from shoal.optim.contribution import Contribution
from shoal.optim.counts import Counts
from shoal.optim.fetching import Fetching
from shoal.optim.gossip import ProgressGossip
from shoal.optim.misfits import Misfits
from shoal.optim.notices import Notices
from shoal.optim.options import differences, misfit, options_of
from shoal.optim.rate import RateMeter
from shoal.optim.rounds import Rounds, gradient_averager, state_averager
from shoal.optim.run_end import RunEnd
from shoal.optim.settings import CollaborationSettings
from shoal.optim.shared_state import committed_of, name_of, share, why_not_ours
from shoal.optim.solitude import Solitude
from shoal.optim.state_name import StateName
from shoal.optim.step_feed import StepFeed
from shoal.optim.training_state import TrainingState
from shoal.optim.update import Update
from shoal.peer import PeerID
from shoal.progress import StateKey, SwarmProgress, SwarmView
from shoal.state import Donor, Intake, SharedState, download_state
from shoal.wire import Contact, FollowSteps, Progress

__all__ = ["Collaboration", "Phase"]


class Phase(enum.Enum):
    """Where this peer stands between two steps: see the module."""

    COLLECTING = "collecting"
    AVERAGING = "averaging"
    STEPPING = "stepping"
    BEHIND = "behind"
    ENDING = "ending"


_MOST_DONORS = 256

_BUSY = (Phase.AVERAGING, Phase.STEPPING)


class Collaboration:
    """One peer's part in a run. Loop only; the trainer's calls are marked.

    Args:
        core: this peer.
        training: what it trains. The trainer may touch it only under `lock`, or while it waits here.
        settings: of the run.
        lock: of accumulators, parameters and optimizer.
        compression: codec for gradients.
        state_compression: codec for averaging states.
    """

    def __init__(
        self,
        core: PeerCore,
        training: TrainingState,
        settings: CollaborationSettings,
        *,
        lock: TensorLock,
        compression: CompressionBase | None = None,
        state_compression: CompressionBase | None = None,
    ) -> None:
        if settings.target_batch_size < 1:
            raise ConfigError(f"target_batch_size must be at least 1, got {settings.target_batch_size}")
        if core.endpoint.serves_stream(FollowSteps, scope=settings.run_id):
            raise ConfigError(
                f"run {settings.run_id!r} is trained by another shoal.Optimizer of this DHT: call its shutdown() first "
                "(in a notebook, before the cell is run again), or give this one another run_id"
            )
        self.core, self.training, self.settings, self.lock = core, training, settings, lock
        self.phase = Phase.COLLECTING
        self.state = StateName.genesis(training.fingerprint(), training.steps_before())
        self._end = RunEnd(core.peer_id, settings.end_patience_s)
        self._committed = Committed()
        self._beginning = Beginning(settings.state_patience_s, required=settings.require_state)
        self.last_round: StepResult | None = None
        self.speed = RateMeter()
        self.contribution = Contribution()
        self._given = 0
        self.others_samples = 0
        self.downloads: list[tuple[int, float]] = []
        self._notices = Notices(core.env.events, settings.run_id)
        self._misfits = Misfits()
        self._counts = Counts(training.extra_tensors)
        self._attendance = Attendance(core.peer_id, settings.averager.window_s)
        self._companions = Companions()
        self._known = SwarmProgress(core.peer_id, settings.fingerprint, ttl_s=settings.ttl_s)
        memory = RoundMemory(training.accumulators, training.state_tensors)
        self._gradients = gradient_averager(core, training, settings, lock, compression, memory)
        self._states = state_averager(core, training, settings, lock, state_compression, self._share, memory)
        self._steps = StepFeed(core, settings.run_id, self._followed_from, self._between_rounds)
        self._catch_up = CatchUp(
            core, settings.run_id, training, self._gradients, self._states, max_bytes=settings.catch_up_bytes
        )
        self._took_over = self._goes_on = False
        self._claim: SwarmView
        self._intake: Intake | None = None  # of the download that is under way
        self._fetching = Fetching(self._fetch, on_change=self.accumulated, on_failure=self._fail)
        self._checks = Checks()
        self._checking: tuple[StateName, asyncio.Task[Check | None]] | None = None
        self._mend_from: frozenset[PeerID] = frozenset()
        self._news = asyncio.Event()
        self._rounds = Rounds(core.env, self._look, self._news)
        self._moved = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._update: Update | None = None
        self._average_due = False
        self._shared = False
        self._sought = False  # whether the others were looked for since somebody was known last
        self._told_at = -math.inf
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._gossip = ProgressGossip(core, settings, self._known, mine=self.mine, on_news=self.accumulated)
        self._solitude = Solitude(core, settings.run_id, self._known, self._gossip, self._notices)

    # ------------------------------------------------------------------------------------------------ life and death

    async def start(self) -> None:
        """Join the run: look where it stands, tell where we stand."""
        if not self.settings.averager.client_mode:
            self._states.sharing.enable()
        self.speed.measure(self._now())
        for work in (*self._gossip.start(), self._drive(), self._solitude.watch()):
            task = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(self._task_done)
            self._tasks.append(task)

    async def check_settings(self, timeout_s: float) -> None:
        """Wait until it is known how the others train, at most so long. Later findings are told at the next step.

        Raises:
            ConfigError: others train this run with other settings, and nobody with ours.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gossip.looked.wait()
        if (misfit := self._misfit()) is not None:
            raise misfit

    def _misfit(self) -> ConfigError | None:
        if self._known.mismatch is None or self.view().peers != (self.core.peer_id,):
            return None
        return ConfigError(f"this run is trained with other settings: {self._known.mismatch}")

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._notices.warn(f"{type(error).__name__}: {error}")
        self.failure = error
        self._move(self.phase)

    failure: BaseException | None = None
    """The error that ended the background work, if any; the trainer's next call raises it."""

    async def close(self) -> None:
        """Leave the run. Safe to call twice: an interrupted caller does not end it half way."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._leave())
        await asyncio.shield(self._closing)

    async def _leave(self) -> None:
        tasks = [*self._tasks, *(self._checking or ())[1:]]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetching.close()
        await self._gossip.leave()
        await self._gossip.close()
        self._steps.close()
        await self._catch_up.leave()
        await self._gradients.close()
        await self._states.close()
        self._move(self.phase)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------------------------------------------------ progress

    @property
    def epoch(self) -> int:
        """Swarm steps that went into this peer's parameters."""
        return self.state.epoch

    @property
    def at_end(self) -> bool:
        """Whether this peer has reached the announced end of the run: it trains no more."""
        return self._end.reached(self.epoch)

    @property
    def finished(self) -> bool:
        """Whether this peer is at the end, at the best state that is known here, and the others are too."""
        return self._end.over(self.epoch) and self.phase is not Phase.STEPPING and not self._average_due

    def mine(self) -> Progress:
        """Where this peer stands, as others are told."""
        return Progress(
            contact=self.core.endpoint.contact,
            epoch=self.state.epoch,
            digest=self.state.digest,
            branch_samples=self.state.samples,
            samples=self.training.samples,
            rate=self.speed.rate,
            time=self._time_to_tell(),
            settings=dict(self.settings.fingerprint),
            end_epoch=self._end.epoch,
            left=self._closed,
            check=self._checks.last,
            alone=self._solitude.told,
        )

    def _time_to_tell(self) -> float:
        """Our own wall clock, by which our messages are ordered; it never goes back."""
        self._told_at = max(math.nextafter(self._told_at, math.inf), own_clock(self.core.env.clock).time())
        return self._told_at

    def view(self) -> SwarmView:
        """The swarm as it is known here now."""
        companions, now = self._companions, self._now()
        view = claimed = self._claim = self._claimed()
        self._goes_on = claimed.behind and not self._fetching.waits(claimed, now)
        if self._goes_on:
            view = replace(claimed, behind=False)
        if companions.look(view, self.settings.target_batch_size, now):
            return self.view()
        if view.coming and companions.until is not None:
            self._gossip.look_again(companions.until)
        self.others_samples = view.samples - self.training.samples
        self._gossip.enough = view.samples >= self.settings.target_batch_size
        self._sought = self._sought and len(view.peers) == 1
        self._end.settle(self.epoch, self._committed, lambda: self._known.ends)
        if self._end.look(self.epoch, claimed if claimed.vouched else view, now):
            self._move(self.phase)
        self._notices.ends(self.epoch if self.at_end else None, self._end.said)
        if not self.at_end:
            self._notices.beyond(self.epoch, self._end.said)
        return view

    def _claimed(self) -> SwarmView:
        """As the others say, also where we go on with a state that is not the best one."""
        now, contributors = self._now(), self._committed.samples
        self._known.contributors = self._attendance.contributors = contributors
        return self._known.view(
            self.mine(),
            now,
            shared=self._shared,
            awaited=self._companions.awaited,
            before=self._companions.before,
            absent=self._attendance.absent(self._known.peers, now),
            silent=self.core.endpoint.silent,
        )

    def _look(self) -> SwarmView:
        view = self.view()
        self._gossip.tell(view)
        return view

    def announce_end(self, epoch: int | None) -> None:
        """Tell everybody where the run ends as far as this peer is concerned; None lifts that. See `run_end`."""
        self._end.say(epoch, self.epoch)
        self.accumulated()

    def accumulated(self) -> None:
        """The trainer has accumulated, or stepped: look again."""
        self._news.set()

    # ------------------------------------------------------------------------------------------------------- driving

    def _move(self, phase: Phase) -> None:
        self.phase = phase
        self._moved.set()
        self._moved = asyncio.Event()

    async def _drive(self) -> None:
        await self._gossip.looked.wait()
        if (misfit := self._misfit()) is not None:
            self.failure = misfit
            self._move(self.phase)
            return
        while True:
            self.speed.measure(self._now())
            self._notices.accumulated(self.training)
            self._news.clear()
            view = self.view()
            self._judge(view)
            claimed = self._claim
            if self._goes_on and self.phase not in (*_BUSY, Phase.BEHIND):
                self._fetching.look(claimed, self.settings.state_patience_s, self._now())
            elif self.phase not in _BUSY:
                self._fetching.prefer(claimed)
            self._gossip.tell(view, now=self.phase is Phase.AVERAGING)
            if self._average_due:
                await self._average_state()
                continue
            if self.phase is Phase.AVERAGING:
                await self._average()
                continue
            if self.phase is Phase.COLLECTING:
                self._gradients.meet(view.together - {self.core.peer_id}, comes=self._companions.before is None)
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._news.wait()

    def _judge(self, view: SwarmView) -> None:
        if self.phase in _BUSY or self._average_due or self._fetching.holds:
            return
        if self._may_not_begin(view) or view.behind or self._fetching.has_news:
            phase = Phase.BEHIND
        elif self.at_end and not self.finished:
            phase = Phase.ENDING
        elif self.at_end or view.samples < self.settings.target_batch_size:
            phase = Phase.COLLECTING
        else:
            phase = Phase.AVERAGING
        if phase is not self.phase:
            self._move(phase)

    def _may_not_begin(self, view: SwarmView) -> bool:
        """Whether this peer waits for the state of a run that is further than its own beginning."""
        further = self._known.further(self.epoch)
        on_its_own = self.epoch > 0 and not view.behind and not self.at_end
        self._notices.without(further if on_its_own else {}, self.epoch)
        stance = self._look_at_beginning(view)
        return stance is Stance.WAITING or (stance is Stance.GIVEN_UP and self.settings.require_state)

    def _look_at_beginning(self, view: SwarmView) -> Stance:
        """Whether this peer may go on with its own state, as far as a run that is further is concerned."""
        if self.epoch > 0:
            return Stance.FREE
        now, giving = self._now(), self._giving()
        stance = self._beginning.look(
            self._known.further(self.epoch),
            others_here=len(view.together) - 1,
            now=now,
            refusing=self._known.refusing(now),
            giving=giving,
        )
        self._notices.beginning(self._beginning, behind=view.behind or bool(giving))
        return stance

    def _giving(self) -> AbstractSet[PeerID]:
        """The donors of the download, if it may end before this peer begins without them.

        While it waits for a donor that is busy, the peers that give us steps.
        """
        intake, now = self._intake, self._now()
        if intake is None:
            return frozenset()
        if intake.missing_bytes is None:
            return self._catch_up.giving(now)
        return intake.donors if intake.in_time(now, self._beginning.until(now)) else frozenset()

    async def _average(self) -> None:
        """Average the gradients with everybody at our state; then STEPPING, or back to where we belong."""
        view = self.view()
        if view.behind:
            self._move(Phase.BEHIND)
            return
        if view.samples < self.settings.target_batch_size:
            self._move(Phase.COLLECTING)  # somebody left, with the samples
            return
        if self._alone(view):
            if len(view.peers) == 1 and not self._sought:
                self._sought = True
                await self._gossip.seek()
            else:
                await self._step_alone()
            return
        name, me = self.state, self.core.peer_id
        said = self._said(await self._check(name))
        self._attendance.search()
        result = await self._rounds.run(
            self._gradients,
            tag=name.group_tag,
            gather=said,
            hopeless=lambda view: view.behind or self._alone(view),
            expected=lambda: self._attendance.awaited(self.view().together - {me}, self._now()),
            prepare=lambda: self._contribute(name),
            apply=lambda vector: self._take_average(vector, name),
        )
        if result is None:
            if self._alone(self.view()):
                self._notices.absent(self._attendance.formed({me}, self._now()))
            async with self.lock.held():
                self._drop_unfit()  # it counts for nothing in any round: if nobody's does, every round fails
            return
        self.last_round = result
        members = [member.contact.peer for member in result.outcome.members]
        self._notices.absent(self._attendance.formed(members, self._now() - result.duration_s))
        if self.state == name:
            self._shared = True
            await self._take_step_of(result, said)

    def _alone(self, view: SwarmView) -> bool:
        """Whether nobody is at our state but this peer, and strangers that rounds do not wait for."""
        others = view.together - {self.core.peer_id}
        return others == self._attendance.given_up(others, self._now())

    def _said(self, check: Check | None = None) -> Said:
        training = self.training
        options = options_of(training.optimizer.param_groups)
        return Said(options, training.absent(), check, training.samples, self._end.said)

    async def _check(self, name: StateName) -> Check | None:
        """The description of our parameters at this state, if it is time for a check."""
        self._begin_check()
        return await self._checking[1] if self._checking is not None and self._checking[0] == name else None

    def _begin_check(self) -> None:
        """Look at the parameters of our state, if it is time to, beside the trainer's next batches."""
        name = self.state
        if is_due(name.epoch, self.settings.check_every) and (self._checking is None or self._checking[0] != name):
            self._checking = name, asyncio.get_running_loop().create_task(self._look_at_parameters(name))

    async def _look_at_parameters(self, name: StateName) -> Check | None:
        training = self.training
        if training.evaluates:
            return None
        check = await self.core.env.executor.run(check_of, training.optimizer, training.parameters, name.digest)
        async with self.lock.held():  # a step renames under it: so they were those of this state all the time
            return check if self.state == name else None

    async def _judge_parameters(self, result: StepResult, name: StateName) -> bool:
        """Whether we hold what the others hold; else our state is renamed: it is worse than theirs."""
        checks, me = checks_of(result.gathered), self.core.peer_id
        if (verdict := judge(checks)) is None:
            return True
        to_mend = self._checks.concluded(name.epoch, verdict, checks, me)
        if self._checks.is_news(verdict) and me not in verdict.others:
            self._notices.differ(name.epoch, verdict)
        if not to_mend:
            return True
        self._notices.differs(name.epoch, verdict, me, again=self._checks.again)
        async with self.lock.held():
            self.state = name.after_difference(self.core.env.rng.randbytes(16), me.raw)
            self.training.discard()
        self._mend_from = verdict.others[me]
        await self.tell_loaded()
        return False

    def _contribute(self, name: StateName) -> tuple[float, float]:
        """Weight and factor of the accumulators at this state."""
        self._given = self.training.samples if self.state == name else 0
        return self.training.contribution() if self.state == name else (0.0, 0.0)

    async def _take_step_of(self, result: StepResult, said: Said) -> None:
        """The step of a round, as all its members take it; not if this peer cannot: then it falls behind."""
        if self.core.peer_id in result.outcome.contributors:
            self.contribution.counted(self._given)
        agreement = agree(result.gathered, result.outcome.contributors)
        if not await self._judge_parameters(result, self.state):
            return
        if agreement.options is None:
            raise ConfigError(f"no step can be taken: the optimizer's option {said.options.problem()}")
        if (why := misfit(said.options, agreement.options)) is not None:
            self._notices.warn(f"the swarm's step is not taken here: its options are {why}")
            async with self.lock.held():
                self.training.discard()
            self._move(Phase.COLLECTING)
            return
        self._notices.took_over(differences(said.options, agreement.options))
        step = partial(self.training.step, agreement.options, agreement.absent)
        name, members = self.state, [member.contact.peer for member in result.outcome.members]
        gave = [each.peer for each in agreement.contributors if each.samples]
        self._companions.share(members, name.key, result.duration_s, gave=gave)
        self._ready(step, name.after_round(result, agreement.digest), len(members), agreement)
        await self._steps.add_round(name, result, self._gradients.vector, agreement)

    def _take_average(self, vector: Vector, name: StateName) -> None:
        if self.state == name:  # else another state was taken over meanwhile, and nothing of the round belongs to it
            vector.overwrite()
            self.training.use_accumulators()

    def _drop_unfit(self) -> bool:
        """Forget the accumulators if they are not finite, so that no epoch is made of them; True if so."""
        if (bad := self.training.unfit()) is None:
            return False
        self.training.discard()
        reason = "gradients that are not finite: they are dropped"
        self._notices.rejected(bad, reason)
        return True

    async def _step_alone(self) -> None:
        name = self.state
        async with self.lock.held():
            if self.state != name:
                return  # another state was taken over while we waited, and what was accumulated is forgotten
            if self._drop_unfit():
                self._move(Phase.COLLECTING)
                return
            samples = self.training.samples
            self.training.use_own_mean()
            chance = self.core.env.rng.randbytes(16)
            said = self._said()
            agreement = Agreement(said.options, said.absent, [Contributor(self.core.peer_id, samples, said.end)])
            self.contribution.counted(samples)
            await self._steps.add_alone(name, chance, samples, self.training.accumulators, agreement)
        self._shared = False
        self.last_round = None  # nobody takes this step with us: for the average of the states none is waited for
        self._companions.forget()
        self._ready(self.training.step, name.after_step_alone(chance, self.core.peer_id.raw, samples), 1, agreement)

    def _ready(
        self, apply: Callable[[], None], name: StateName, peers: int, agreement: Agreement | None = None
    ) -> None:
        committed = self._committed
        if agreement is not None:
            committed = committed.after(agreement.contributors, self.epoch)
        self._update = Update(
            apply=apply,
            name=name,
            committed=committed,
            peers=peers,
            samples=name.samples - self.state.samples,
            is_step=agreement is not None,
        )
        self._move(Phase.STEPPING)

    # ----------------------------------------------------------------------------------------------- the trainer's turn

    @property
    def _must_wait(self) -> bool:
        ending = self.phase is Phase.ENDING or (self._average_due and self.at_end)
        return self.phase is Phase.AVERAGING or (ending and self.phase is not Phase.STEPPING and not self.finished)

    async def decide(self, timeout_s: float) -> Phase:
        """Look at the accumulators just now, and say what is to be done (trainer).

        Waits while a round goes on, or the others come to the end; AVERAGING and ENDING only if time ran out.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gossip.looked.wait()
                await asyncio.sleep(0)  # the driver looks first: it may find that we do not belong here
                if self.phase not in _BUSY:
                    self._judge(self.view())
                    self._news.set()
                while self._must_wait and not self._closed and self.failure is None:
                    await self._moved.wait()
        if self.failure is not None:
            raise self.failure
        if self.settings.require_state and not self.view().behind:
            self.check_beginning()
        return self.phase

    def check_beginning(self) -> None:
        """Raise `StateUnavailable` if this peer needs a state that others have, and has waited for it long enough."""
        begins = self._beginning
        if self.epoch == 0 and self.settings.require_state and begins.stance is Stance.GIVEN_UP:
            raise StateUnavailable(
                f"no peer of the run gave a state within {begins.patience_s:.0f} s (load_state_timeout), and this one "
                "may not begin by itself (require_state=True): check whether initial_peers lead to the run, or start "
                "one peer without require_state"
            )

    def step(self) -> None:
        """Take the update of phase STEPPING, and name the state anew (trainer, in its own thread, under `lock`).

        It is taken once. An interruption leaves parameters that no other peer has. They get a name of their own, and
        any proper name is better.
        """
        update = self._update
        if update is None or update.taken:
            return
        chance, me = self.core.env.rng.randbytes(16), self.core.peer_id.raw
        interrupted = self.state.after_interruption(chance, me, step=update.is_step)
        training, epoch = self.training, self.training.epoch
        training.whole = False
        try:
            update.apply()
            training.whole = True
        finally:
            # Attributes alone: no interrupt comes in between.
            if training.whole:
                self.state, self._committed, update.taken = update.name, update.committed, True
            elif training.epoch != epoch or not update.is_step:
                self.state, self._committed, update.taken = interrupted, update.committed, True

    async def stepped(self) -> None:
        """After `step`: tell everybody (trainer). Without effect if that was done already."""
        update = self._update
        if update is None or not update.taken:
            return
        self._update = None
        self._companions.renamed(self._now(), step=update.is_step)
        if self.state != update.name:
            self._notices.interrupted()
        elif update.is_step:
            self._advanced(update)
        self._renewed(expected=self.state == update.name and update.peers > 1 and not self.at_end)
        self._move(Phase.COLLECTING)
        if update.is_step and self.state == update.name:
            await self._catch_up.joined()  # last: an interrupted trainer cancels this

    def loaded(self, saved: StateName | None, *, unchanged: bool = False) -> None:
        """The user has loaded a checkpoint: name the state anew (under `lock`, in the trainer's thread).

        Args:
            saved: the name that it was saved under; None if it has none.
            unchanged: the state now is the one that was saved, and has its name.
        """
        training, before = self.training, self.state
        if saved is not None and unchanged:
            self.state = saved
        elif saved is None and self.epoch == 0:
            self.state = StateName.genesis(training.fingerprint(), training.steps_before())
        else:
            self.state = (saved or self.state).after_loading(training.fingerprint())
        if self.state != before:
            self._committed = Committed()
        training.discard()

    async def tell_loaded(self) -> None:
        """After `loaded`: tell everybody (trainer)."""
        self._update, self._average_due = None, False
        self._companions.forget()
        self._companions.renamed(self._now())
        self._renewed()
        self._move(Phase.COLLECTING)

    def _advanced(self, update: Update) -> None:
        (epoch, digest, _), every = update.name, self.settings.average_state_every
        run_id, samples, peers = self.settings.run_id, update.samples, update.peers
        event = EpochAdvanced(run_id=run_id, epoch=epoch, samples=samples, peers=peers, digest=digest)
        self.core.env.events.emit(event)
        self._notices.stepped(self.training)
        if self.at_end:
            self.core.env.events.emit(RunEnded(run_id=run_id, epoch=epoch))
        self._solitude.stepped(epoch, peers)
        # The last step is followed by an average of the tensors that differ by design: batch norm statistics, say.
        last = self.training.averages_extras or bool(self._counts)
        self._average_due = last if self.at_end else bool(every) and epoch % every == 0

    def _renewed(self, *, expected: bool = False) -> None:
        """The state has another name: donors offer the new one, the others are told now, unless they expect it."""
        speed, held = self.speed, self.training.samples
        why = self.contribution.look(
            self.epoch, processed=speed.processed, batches=speed.batches, held=held, now=self._now()
        )
        if why is not None and not self._gossip.has_twin:  # rounds take only one of the two: that was said
            self._notices.warn(why)
        self._states.sharing.changed()
        self._states.sharing.priority = float(self.state.epoch)
        view = self.view()
        self._gossip.renamed(view, expected=expected)
        self._news.set()
        if len(view.peers) > 1:  # else there is nobody to compare with
            self._begin_check()

    async def _average_state(self) -> None:
        """Average the parameters with all of the last step. A peer that misses it has a worse state afterwards.

        The trainer goes on meanwhile, and takes the average at its next step: so nobody waits for the slowest trainer,
        nor for one that waits in another optimizer's step.
        """
        try:
            name, me = self.state, {self.core.peer_id}
            if self._stepped_with() <= me:
                return
            result = await self._rounds.run(
                self._states,
                tag=name.group_tag,
                hopeless=lambda view: view.behind or self._stepped_with() <= me,
                expected=self._stepped_with,
                prepare=lambda: (float(self.state == name and not self.training.evaluates), 1.0),
                apply=lambda vector: None,  # the trainer will
                gather=self._counts.said() if self.at_end and self._counts else None,
            )
        finally:
            self._average_due = False
            if self.at_end:
                self._move(self.phase)  # the trainer waits
        if result is not None and self.state == name:
            counts = self._counts.chosen(result.gathered, result.outcome.contributors)
            members = [member.contact.peer for member in result.outcome.members]
            self._companions.share(members, name.key, result.duration_s)
            self._ready(partial(self._take_states, counts), name.after_averaging(result), len(members))
            if counts is None:  # else a follower would lack them: it downloads the state, which is the last one
                await self._steps.add_round(name, result, self._states.vector)

    def _take_states(self, counts: bytes | None) -> None:
        self._states.vector.apply(self._states.settings.averaging_alpha)
        if counts is not None:
            self._counts.take(counts)

    async def _between_rounds(self, timeout_s: float) -> bool:
        """Return when no round is under way, or after so many seconds; whether there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gradients.between_rounds()
                await self._states.between_rounds()
                return True
        return False

    async def _followed_from(self) -> StateName:
        """Our state, once no step is about to be taken: that step was told already, to the followers of then."""
        while self._update is not None and not self._update.taken and not self._closed:
            await self._moved.wait()
        return self.state

    def _stepped_with(self) -> frozenset[PeerID]:
        """The peers that took the last step with us, or are about to, and are still here."""
        members = self.last_round.outcome.members if self.last_round is not None else ()
        return frozenset(member.contact.peer for member in members) & self.view().together

    # -------------------------------------------------------------------------------------------------------- the state

    def _share(self) -> SharedState:
        return share(self.training, self.state, self._committed)

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
            return patient or self._look_at_beginning(self.view()) is Stance.WAITING

        deadline, taken, needed = self._now() + timeout_s, False, True
        failure: StateUnavailable | None = None
        while not taken and needed and (left_s := deadline - self._now()) > 0:
            view = self._claimed()
            if not view.behind and not self._fetching.has_news:
                if failure is None or all(StateKey.of_peer(each) <= self.state.key for each in view.others.values()):
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
            self._move(Phase.COLLECTING)
        elif patient:
            raise failure or StateUnavailable(f"a better state is known, but did not arrive within {timeout_s:g} s")
        return taken

    async def _fetch(self, timeout_s: float) -> None:
        """Take over the best state, or the steps that lead to it."""
        began, self._took_over = self._now(), False
        try:
            async with self._catch_up.following(self._to_follow):
                if not await self._take_steps(began + timeout_s):
                    await self._take_state(began + timeout_s)
                    await self._take_steps(began + timeout_s)
        finally:
            if self._claimed().behind and (trouble := await self._catch_up.give_up(self._now() - began)) is not None:
                self._notices.warn(trouble)
            if self._took_over:
                self._beginning.had()
                self._companions.forget()
                self._companions.renamed(self._now())
                self._renewed()
            if self.phase is Phase.STEPPING and self._update is None:
                self._move(Phase.COLLECTING)  # what was due was of another state; the trainer may be interrupted

    def _to_follow(self) -> list[Contact]:
        """Peers with the best state that can be dialed, in random order, so that not all follow the same ones."""
        contacts = [self._gossip.contact(peer) for peer in self._claimed().leaders]
        contacts = [contact for contact in contacts if contact.addresses]
        self.core.env.rng.shuffle(contacts)
        return contacts

    async def _take_steps(self, deadline: float) -> int:
        """Take the steps that lead on from our state, as far as the others tell of them; returns how many."""
        steps = 0
        while self._claimed().behind and self._now() < deadline:
            before = self.state
            if (update := await self._catch_up.next(before, self._committed)) is None:
                break
            await self._fetching.parked()
            if self.state != before:
                continue  # by a step of our own, before the trainer stood still
            async with self.lock.held():
                self._update, self._average_due, self._took_over = update, False, True
                try:
                    await shielded(self.core.env.executor.run(self.step))
                finally:
                    self._update = None
            if self.state != update.name:
                break
            self._shared = True
            steps += 1
        return steps

    def _donors(self, view: SwarmView) -> list[Donor]:
        """The peers to ask: all that say that they have a better state, those at the best one first.

        A peer that says so and does not give its state cannot keep us from asking the others.
        """
        leaders = [peer for peer in view.leaders if peer in self._mend_from] or view.leaders
        donors = [Donor(self._gossip.contact(peer), float(view.epoch + view.vouched), view.epoch) for peer in leaders]
        if not self._mend_from:
            better = self._known.better(self.mine(), self._now())
            lower = sorted(peer for peer in better if peer not in leaders)
            # Below all epochs, in their order.
            donors += [Donor(self._gossip.contact(peer), -1.0 / (1 + better[peer]), better[peer]) for peer in lower]
        return donors[:_MOST_DONORS]

    async def _take_state(self, deadline: float) -> None:
        """Download the best state, and load it."""
        # A client's state is nobody else's: it takes that of the others also where its own came further.
        view, ours = self._claimed(), self.state.key if self.core.endpoint.contact.addresses else None
        donors, self._intake = self._donors(view), Intake(self._now())
        try:
            state = await download_state(
                self.core.endpoint,
                self.core.env,
                self._states.prefix,
                donors,
                timeout_s=max(0.001, deadline - self._now()),
                min_epoch=self._catch_up.from_epoch,
                accept=lambda manifest: why_not_ours(self.training, manifest, ours, self._misfits),
                limits=self._states.sharing.limits,
                may_read=self._catch_up.steps_first,
                intake=self._intake,
            )
        except StateUnavailable:
            self._withheld(view.leaders)
            raise
        finally:
            self._beginning.gave(self._giving())
            self._intake = None
        name, values = name_of(state.metadata), state.metadata["training"]

        await self._fetching.parked()
        if ours is not None and name.key <= self.state.key:
            return  # we came further meanwhile

        async def take_over() -> None:
            await self.core.env.executor.run(self.training.load, values, state.tensors)
            self.state, self._committed, self._took_over = name, committed_of(state.metadata), True
            self._mend_from = frozenset()
            self._update, self._average_due = None, False
            self._shared = True

        try:
            async with self.lock.held():
                await shielded(take_over())  # also when the trainer is interrupted: the parameters have one name
        except StateUnavailable as error:
            self._misfits.add(values, state.tensors, str(error))
            self._withheld(view.leaders)
            raise
        self._known.gave(state.donors)
        self.downloads.append((state.bytes_received, state.duration_s))
        self._notices.downloaded(state.duration_s, self.core.reachability.shut_out)

    def _withheld(self, peers: Iterable[PeerID]) -> None:
        self._known.withheld(peers, self._now())
        self.accumulated()
