"""One peer's part in a run: it watches the swarm, runs the rounds, and serves the trainer. Loop only, no threads.

`PhaseMachine` (see `phases`) decides what is to be done; this shell does it. One task in the loop looks at the swarm
whenever there is news, and once a second. The trainer asks `TrainerTurn.decide` at its step, and changes the parameters
itself: `OwnState.step`, `TrainerTurn.download`. A round takes the accumulators when the group begins, also from a
trainer that is in the middle of a batch: nobody waits for the slowest batch.

A state is named by its digest: H(parent digest, round id, verdict, agreement). Peers meet under a key that holds their
state's digest, so gradients of different states are never averaged, and equal digests mean equal histories.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from shoal.averaging import TensorLock
from shoal.averaging.allreduce.segments import RoundMemory
from shoal.averaging.core import PeerCore
from shoal.base.clock import Elapsed, ThreadExecutor
from shoal.base.peer import PeerID
from shoal.base.pool import DaemonPool
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes, Tasks
from shoal.compression import CompressionBase
from shoal.errors import ClosedError, ConfigError, NoMemoryForState, is_out_of_memory
from shoal.events import EpochAdvanced, RunEnded
from shoal.protocol.wire import FollowSteps, Progress
from shoal.run.account import Account
from shoal.run.course import Course
from shoal.run.decide.beginning import Beginning
from shoal.run.decide.election import elected
from shoal.run.decide.forerunners import Forerunners
from shoal.run.decide.phases import Event, PhaseMachine, RunPhase, Situation, Work
from shoal.run.decide.run_end import RunEnd
from shoal.run.decide.state_name import StateName
from shoal.run.disk.folder_users import FolderUsers
from shoal.run.gossip import ProgressGossip
from shoal.run.join.catch_up import CatchUp
from shoal.run.join.fetching import Fetching
from shoal.run.join.own_state import OwnState, Update
from shoal.run.join.step_feed import StepFeed
from shoal.run.outlook import Outlook
from shoal.run.parameter_check import ParameterCheck
from shoal.run.post import Post
from shoal.run.report.notices import Notices
from shoal.run.report.status import Status, status_of
from shoal.run.rounds import Rounds, gradient_averager, state_averager
from shoal.run.settings import RunSettings
from shoal.run.solitude import Solitude
from shoal.run.states_average import StatesAverage
from shoal.run.swarm_step import SwarmStep
from shoal.run.takeover import Takeover
from shoal.run.trainer_turn import TrainerTurn
from shoal.run.view.attendance import Attendance
from shoal.run.view.companions import Companions
from shoal.run.view.contribution import Contribution, RateMeter
from shoal.run.view.progress import NO_STATE, StateKey, SwarmProgress, SwarmView
from shoal.run.view.witness import Witness
from shoal.run.view.words import believes, sites_of, weigh
from shoal.strategies.pace import Pace
from shoal.train.training_state import TrainingState

__all__ = ["Participant"]

_FEW_PEERS = 32
"""A swarm of at most this many peers is small: each peer knows all others."""

_LOOK_S, _LONGEST_LOOK_S = 1.0, 8.0
"""The swarm is looked at this long after the last look, if nothing is heard of it: for each fragment of a model that is
on its way to a merge this number of times as rarely, and no more rarely than that, seconds."""

_AGAIN_S = 1.0
"""Until work is tried again that this machine had no memory for, seconds."""


class Participant:
    """One peer's part in a run. Loop only; the trainer's calls are marked.

    Args:
        core: this peer.
        training: what it trains. The trainer may touch it only under `lock`, or while it waits here.
        settings: of the run.
        lock: of accumulators, parameters and optimizer.
        compression: codec for gradients.
        state_compression: codec for averaging states.
        first: the participant of the model's first fragment, if this is one of another. It decides the rank of all.
        keep: saves the state before it is given up: see `Takeover`. None: the program has no folder of checkpoints.

    Attributes:
        course: its phase, and all else that its trainer waits for.
        own: the state that this peer trains.
        pace: how far it is on its way to the next step.
        speed: how fast it trains.
        contribution: counts its samples.
        account: of these samples.
        post: calls the others, for all fragments.
        model_rank: of the model's beginning, once the others are known: all fragments take it, see `StateName`.
        solitude: says whether this peer is alone, and whether the others have ended the run without it.
        swarm_step: makes the steps of the swarm ready.
        states_average: averages the states after a step.
        takeover: takes over better states.
        turn: what its trainer asks for at its step.
    """

    def __init__(
        self,
        core: PeerCore,
        training: TrainingState,
        settings: RunSettings,
        *,
        lock: TensorLock,
        compression: CompressionBase | None = None,
        state_compression: CompressionBase | None = None,
        first: Participant | None = None,
        keep: Callable[[], object] | None = None,
    ) -> None:
        if core.endpoint.serves_stream(FollowSteps, scope=settings.run_id):
            raise ConfigError(
                f"run {settings.run_id!r} is trained by another shoal.Optimizer of this DHT: call its shutdown() first "
                "(in a notebook, before the cell is run again), or give this one another run_id"
            )
        self.core, self.training, self.settings = core, training, settings
        terms, given = settings.strategy.terms, [contact.peer for contact in core.node.initial_peers]
        self._notices = notices = Notices(
            core.env.events,
            settings.run_id,
            fragment=settings.fragment,
            has_twin=lambda: core.endpoint.has_twin,
        )
        self.course = course = Course(PhaseMachine(auxiliary=settings.auxiliary, delays_gradients=terms.goes_on))
        self._news = news = Changes()  # reasons to look at the swarm

        # What it holds: its state, and the tensors that it averages.
        self.own = own = OwnState(core, training, lock, notices, auxiliary=settings.auxiliary)
        ours, memory = (core, training, settings), RoundMemory(training.averaged, training.state_tensors)
        self._states = states = state_averager(*ours, state_compression, lock=lock, memory=memory, state=own.export)
        self._averager = averager = states
        if not training.averages_parameters:
            self._averager = averager = gradient_averager(*ours, compression, lock=lock, memory=memory)

        # What it knows: of itself, of the others and of the run.
        self.pace: Pace = settings.strategy.pace(settings.fragment, None if first is None else first.pace)
        self.speed: RateMeter = RateMeter() if first is None else first.speed  # each batch is one of all fragments
        self.contribution, self._companions = Contribution(), Companions()
        self._end = RunEnd(core.peer_id, settings.end_patience_s)
        begins_s, time = settings.state_patience_s, Elapsed(core.env.clock).time
        witness = Witness(core.peer_id, given=given, begins_s=begins_s, time=time)
        heed, ttl_s = witness.heeded, settings.ttl_s
        self._known = known = SwarmProgress(
            core.peer_id, settings.fingerprint, ttl_s=ttl_s, auxiliary=settings.auxiliary, heed=heed
        )
        self._fetching = Fetching(self._fetch, news, on_failure=self._fail)
        self._outlook = outlook = Outlook(
            core=core,
            settings=settings,
            terms=terms,
            pace=self.pace,
            own=own,
            speed=self.speed,
            end=self._end,
            known=known,
            companions=self._companions,
            attendance=Attendance(settings.averager.window_s, averager.conduct.idle),
            fetching=self._fetching,
            witness=witness,
            forerunners=Forerunners(core.peer_id),
        )
        self.model_rank: asyncio.Future[int] = outlook.loop.create_future() if first is None else first.model_rank

        # What it says: its place, its steps, what it holds, and what its user is to know.
        self._told_at = -math.inf
        self.post: Post = Post(core) if first is None else first.post
        self._gossip = gossip = ProgressGossip(
            core, settings, known, news, next_word=self._next_word, is_due=self._is_due, post=self.post
        )
        self._steps = feed = StepFeed(core, settings.run_id, self._followed_from, (averager, states), notices)
        self._check = check = ParameterCheck(
            core,
            own,
            notices,
            every=settings.check_every,
            is_last=lambda: self._is_last_state,
            trainer_stands=lambda: course.turns > 0,
            described=self._described,
            tell_all=gossip.tell_all,
        )
        self.account = Account(outlook, course, self.contribution, notices)
        self.solitude: Solitude = Solitude(
            outlook,
            gossip,
            notices,
            searches=lambda: course.phase is RunPhase.AVERAGING and averager.looking,
            missing=self._missing,
            first=None if first is None else first.solitude,
            has_folder=keep is not None,
        )

        # What it does: it averages, takes over better states, and serves its trainer.
        self._tasks = Tasks(self._fail)
        self._closing: asyncio.Task[None] | None = None
        self._distrust: Callable[[], None] = lambda: None
        self._rounds = rounds = Rounds(core.env, self._look_and_tell, news)
        self.swarm_step: SwarmStep = SwarmStep(
            outlook=outlook,
            course=course,
            rounds=rounds,
            averager=averager,
            check=check,
            feed=feed,
            contribution=self.contribution,
            gossip=gossip,
            notices=notices,
        )
        self.states_average: StatesAverage = StatesAverage(
            outlook, course, rounds, self.swarm_step, states, feed=feed, news=news
        )
        most_bytes, counted = settings.catch_up_bytes, own.gives.counted
        self._catch_up = CatchUp(
            core, settings.run_id, training, averager, states, max_bytes=most_bytes, counted=counted
        )
        self.takeover: Takeover = Takeover(
            core=core,
            own=own,
            outlook=outlook,
            machine=course.machine,
            beginning=Beginning(settings.state_patience_s, required=settings.require_state, hosts=given),
            gossip=gossip,
            catch_up=self._catch_up,
            states=states,
            notices=notices,
            news=news,
            keep=keep,
            first=None if first is None else first.takeover,
        )
        self.turn: TrainerTurn = TrainerTurn(
            outlook, course, self.takeover, gossip, news, look=self._look, judge=self._judge
        )

    # ------------------------------------------------------------------------------------------------ life and death

    async def start(self) -> None:
        """Join the run: look where it stands, tell where we stand."""
        self._distrust = self.core.endpoint.trust.add_contributors(lambda: self.own.committed.weights)
        self._states.sharing.enable(declared=False)  # others know from our progress which state is here
        self.speed.measure(self._now())
        self.pace.state_changed(self.epoch, self._now())
        for work in self._gossip.start():
            self._tasks.spawn(self._lasting("what it tells others, and hears from them, was", work))
        self._tasks.spawn(self._drive())
        if not self.settings.fragment:  # a peer is alone with all fragments of its model, and says it once
            self._tasks.spawn(self._lasting("a look for others was", self.solitude.watch))

    def watch_folder(self, folder: Path) -> None:
        """Tell of other programs that save in this folder of checkpoints, and train apart, from now on."""

        async def watch() -> None:
            pool = DaemonPool(1, "shoal-folder")
            users = FolderUsers(folder, self.settings.run_id, self.core.peer_id)
            try:
                with suppress(MemoryError, RuntimeError):  # no thread, for example: it can do without
                    await users.watch(ThreadExecutor(pool), self._trains_with, self._notices.warn)
            finally:
                pool.shutdown(wait=False)

        self._tasks.spawn(watch())

    async def check_settings(self, timeout_s: float) -> None:
        """Wait until it is known how the others train, or until `timeout_s`. Later findings are told at the next step.

        Raises:
            ConfigError: others train this run with other settings, and nobody with ours.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gossip.looked.wait()
        self._check_fit()

    def _trains_with(self, peer: str) -> bool:
        """Whether a peer of this id is known here, or may be: in a large swarm a peer does not know all."""
        known = self._known.peers
        return len(known) > _FEW_PEERS or peer in map(str, known)

    def _check_fit(self) -> None:
        known, own = self._known, self.own
        if not known.mismatches or self.view().peers != (self.core.peer_id,):
            return
        given = self.core.endpoint.trust.given
        if believes(known.mismatches, committed=own.committed.weights, given=given, begun=own.name.epoch > 0):
            raise ConfigError(f"this run is trained with other settings: {known.mismatch}")
        # Else it is told if this peer stays alone.

    def _fail(self, error: BaseException) -> None:
        # A ClosedError: this peer leaves, by `leave_on_sigterm` for example. A ConfigError: the trainer is told.
        if not isinstance(error, ClosedError | ConfigError):
            self._notices.warn(f"{type(error).__name__}: {error}")
        self.course.fail(error)

    async def close(self) -> None:
        """Leave the run. Safe to call twice: an interrupted caller does not end it half way."""
        self.course.close()
        if self._closing is None:
            self._last_status = self.status()
            self._closing = asyncio.get_running_loop().create_task(self._leave())
        await asyncio.shield(self._closing)

    async def _leave(self) -> None:
        await self._tasks.cancel()
        self.solitude.looked_for_end(found=False)
        self.account.left()
        await self._check.close()
        await self._fetching.close()
        await self._gossip.leave()
        await self._gossip.close()
        self._steps.close()
        await self._catch_up.leave()
        await self._averager.close()
        await self._states.close()
        self._distrust()
        self.course.moves.notify()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------------------------------------------------ progress

    @property
    def phase(self) -> RunPhase:
        """The phase of this peer between two steps of its trainer."""
        return self.course.phase

    @property
    def state(self) -> StateName:
        """The name of this peer's state."""
        return self.own.name

    @property
    def epoch(self) -> int:
        """Swarm steps that went into this peer's parameters."""
        return self.own.name.epoch

    def is_elected(self) -> bool:
        """Whether this peer is the one that is elected for its state, of those that contributed to the step to it.

        All peers at a state know these, from the round or with the download. Where no step is known (the state was
        loaded, or is an average), the candidates are the live peers of the run, which peers may see differently.
        """
        made = self.own.committed.gave or self.view().peers
        return elected(self.settings.run_id, self.epoch, made) == self.core.peer_id

    @property
    def at_end(self) -> bool:
        """Whether this peer has reached the announced end of the run: it trains no more."""
        return self._outlook.at_end

    @property
    def ends_at(self) -> int | None:
        """The epoch at which the run ends, as far as this peer knows: at least as it has announced itself."""
        return self._end.said if self._end.epoch is None else self._end.epoch

    @property
    def finished(self) -> bool:
        """Whether this peer is at the end, at the best state that is known here, and the others are too."""
        return self._is_over and self.solitude.looked_at == self.own.name

    @property
    def _is_over(self) -> bool:
        """Whether nobody is waited for at the end, nor any average."""
        machine = self.course.machine
        return self._end.over(self.epoch) and machine.phase is not RunPhase.STEPPING and not machine.states_due

    def progress(self) -> Progress:
        """The progress of this peer, with the time of its last word to others."""
        left, alone = self.course.is_closed, self.solitude.told
        place, parameters = self._outlook.place(), self._check.said if self._is_last_state else None
        return msgspec.structs.replace(
            place, time=self._told_at, left=left, check=self._check.last, alone=alone, parameters=parameters
        )

    def _next_word(self) -> Progress:
        """The progress of this peer, to be told to others."""
        self._told_at = self.post.next_time()
        return self.progress()

    _last_status: Status | None = None

    @property
    def last_status(self) -> Status | None:
        """The status at the time when this peer left the run; None as long as it has not. Any thread may look.

        Samples that it had not given by then are among those dropped, also of a batch that ended later.
        """
        if self._last_status is None:
            return None
        self.account.settle()
        given = self.contribution
        return replace(self._last_status, contributed=given.contributed, dropped=given.dropped)

    def status(self) -> Status:
        """The run as this peer sees it now; once it has left, `last_status`."""
        if (last := self.last_status) is not None:
            return last
        view = self.view()
        self.account.settle()
        return status_of(
            view,
            self.progress(),
            self.settings,
            target=self.pace.target(view),
            eta_s=self._eta_s(view),
            phase=self.phase.value,
            last_round=self.swarm_step.last_round,
            contribution=self.contribution,
            finished=self.finished,
            alone_because=self.solitude.reasons,
        )

    def _eta_s(self, view: SwarmView) -> float | None:
        if self.turn.enough:
            return 0.0
        if (due_s := self.pace.due_s(self._now())) is not None:
            return due_s
        rate, missing = self.pace.rate(view, self.speed.batches_per_s), self.pace.target(view) - view.done
        return max(0.0, missing / rate) if rate > 0 else None

    def left_at(self, peer: PeerID) -> bytes | None:
        """The digest of the state at which this peer has left the run in order; None if it has not."""
        farewell = self._known.left.get(peer)
        return None if farewell is None else farewell.digest

    def view(self) -> SwarmView:
        """The swarm as it is known here now; `behind` only as long as this peer stands still for a better state."""
        return self._outlook.view()

    def _look(self) -> tuple[SwarmView, SwarmView]:
        """Take in what is known now: whom a round waits for, where the run ends, what the user is to be told.

        Returns:
            The view, and the swarm as the others claim it to be: see `Outlook`.
        """
        companions, now = self._companions, self._now()
        claimed = self._outlook.look()
        if (worse := self._outlook.go_back(claimed)) is not None:
            self._notices.goes_back(self.epoch, worse.epoch)
            claimed = self._outlook.claimed()
        if not self.settings.fragment:
            further = (claimed.others[peer] for peer in claimed.refused)
            self._notices.refused(
                [each for each in further if StateKey.of_peer(each) > self.own.name.key], self.state, now
            )
        view = self._outlook.view_of(claimed)
        enough = self.pace.enough(view)
        if companions.observe(view, now, enough=enough):
            return self._look()
        if view.coming and companions.until is not None:
            self._gossip.look_again(companions.until)
        if (due_s := self.pace.due_s(now)) is not None:
            self._gossip.look_again(now + due_s)
        rate = self.pace.rate(view, self.speed.batches_per_s)
        self._gossip.saw(enough=enough, target=self.pace.target(view), rate=rate)
        if len(view.peers) > 1:
            self.course.machine.found()
        self._settle_end()
        if not self.course.machine.is_busy and self.states_average.is_due():
            self.course.machine.happened(Event.STATES_DUE)
        averages = self.course.machine.states_due or self.own.update is not None
        due = self.states_average.follows_last and (averages or self.own.name == self.own.followed)
        best = claimed if claimed.vouched else view
        unlike = self._unlike(view.others) if self._is_last_state else ()
        if self._end.observe(self.epoch, best, now, average_due=due, unlike=unlike, client=self._outlook.is_client):
            self.course.moves.notify()
        if self._is_over:
            self.solitude.ended()
        if not self.settings.fragment:  # the fragments of a model end together, and it is told once
            # Before its first step the program may not have come to its own word yet.
            over = self.at_end and self.course.has_asked
            # A helper that announces none follows the trainers: their end is the one that it expects.
            said = self.epoch if self.settings.auxiliary and self._end.said is None else self._end.said
            self._notices.ends(self.epoch if over else None, said, stepped=self.takeover.has_stepped)
            if not self.at_end:
                self._notices.beyond(self.training.model_epoch, self._end.said)
        return view, claimed

    def _settle_end(self) -> None:
        self._end.settle(self.epoch, self.own.committed, lambda: self._known.ends, self._sites)
        end = self._end.expected(self.epoch, self.training.model_epoch)
        self.pace.ends_at(end, others_left=self._outlook.others_left)
        self.training.ends_at(end)

    @property
    def _is_last_state(self) -> bool:
        """Whether the run ends with the parameters that are here: no step changes them any more, and no average."""
        machine, own = self.course.machine, self.own
        if not self.at_end or machine.is_busy or machine.states_due or own.update is not None:
            return False
        return own.name != own.followed or not self.states_average.follows_last

    def _unlike(self, others: Mapping[PeerID, Progress]) -> frozenset[PeerID]:
        """Those of these others that may hold other parameters at the last state of the run."""
        sites = {**self._sites(), **sites_of([self._outlook.contact])}
        weighed = partial(weigh, committed=self.own.committed.weights, sites=sites)
        return self._check.unlike(others, self._known.left, weighed, client=self._outlook.is_client)

    def _described(self) -> None:
        """The parameters are described. At the end the others wait for that."""
        if self._is_last_state and not self.course.is_closed:
            # A client hears a client through the DHT alone.
            self._gossip.announce(self.view(), written=self._outlook.is_client)
            self._news.notify()

    def _sites(self) -> dict[PeerID, bytes]:
        return sites_of(map(self._gossip.contact, self._known.peers))

    def _is_due(self) -> bool:
        """Whether there is enough for the next step, by all that is known now."""
        return self.pace.enough(self.view())

    def _missing(self) -> tuple[int, int]:
        """How many peers the next merge lacks, though this one is ready for it, and how many it takes.

        It is told for the first fragment of the model only.
        """
        quorum = 0 if self.settings.fragment else self._outlook.terms.quorum
        return (self.pace.missing(self._outlook.place().done, self.view()) if quorum else 0), quorum

    def _look_and_tell(self) -> SwarmView:
        view, _ = self._look()
        self._gossip.tell(view)
        return view

    def announce_end(self, epoch: int | None) -> None:
        """Tell everybody where the run ends as far as this peer is concerned; None lifts that. See `run_end`."""
        self._end.say(epoch, self.epoch)
        self._settle_end()
        self._news.notify()

    # ------------------------------------------------------------------------------------------------------- driving

    async def _drive(self) -> None:
        await self._gossip.looked.wait()
        self._check_fit()
        await self._decide_rank()
        await self._lasting("a round or a step was", self._go_on, self.swarm_step.give_up)

    async def _lasting(
        self,
        what: str,
        work: Callable[[], Awaitable[None]],
        first: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Do this until it is cancelled; again, with `first` before, where this machine had no memory for it."""
        while True:
            try:
                await work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._notices.skipped(what, error)
                if first is not None:
                    await first()
                await asyncio.sleep(_AGAIN_S)

    async def _go_on(self) -> None:
        machine = self.course.machine
        while True:
            self.speed.measure(self._now())
            self._notices.accumulated(self.training.local, at_end=self.at_end)
            seen = self._news.count
            self.takeover.look_at_options()
            view, claimed = self._look()
            # Others may have come to the run since it began here, or have been heard late.
            if self.own.with_others == NO_STATE:
                self._check_fit()
            if await self._check.difference_at_end(late=not self._end.patient(self._now())):
                await self.tell_loaded()
                continue
            self._gossip.ask(self._check.lacking)
            self._judge(view)
            if not machine.is_busy:
                trains_on = self._outlook.trains_on
                goes_on = claimed.behind and (trains_on or not view.behind)
                begin = goes_on and (trains_on or machine.phase is not RunPhase.BEHIND)
                self._fetching.idles(claimed, self._now(), idle=trains_on and view.behind)
                self._fetching.observe(claimed, self.settings.state_patience_s if begin else None, self._now())
            self._gossip.tell(view, now=machine.phase is RunPhase.AVERAGING)
            alone = machine.phase is RunPhase.AVERAGING and self._outlook.alone(view)
            work = machine.work(self._situation(view), alone=alone, nobody=len(view.peers) == 1)
            await self._do(work, view, seen)

    async def _do(self, work: Work, view: SwarmView, seen: int) -> None:
        """Do what this view calls for; `seen` is the news that was in it."""
        match work:
            case Work.AVERAGE_GRADIENTS:
                self.course.moves.notify()  # a trainer that goes on while gradients are averaged waits until here
                if await self.swarm_step.average():
                    await self.tell_loaded()
            case Work.AVERAGE_STATES:
                await self.states_average.average()
            case Work.STEP_ALONE:
                await self.swarm_step.step_alone()
            case Work.SEEK:
                await self._gossip.seek()
            case Work.LOOK_AGAIN:
                self.course.moves.notify()
            case Work.WAIT:
                if self.phase is RunPhase.COLLECTING:
                    others = view.together - {self.core.peer_id}
                    self._averager.meet(others, comes=self._companions.before is None)
                await self._news.after(seen, self._idle_s(view))

    def _idle_s(self, view: SwarmView) -> float:
        """How long to wait for news: the fragments of a model that are merely on their ways are looked at by turns."""
        on_its_way = self.phase is RunPhase.COLLECTING and not (view.behind or view.coming or view.refused)
        return min(self.settings.fragments * _LOOK_S, _LONGEST_LOOK_S) if on_its_way and not self.at_end else _LOOK_S

    async def _decide_rank(self) -> None:
        """Let the weights win that were there before ours, if the run has not begun. All fragments have one rank."""
        if not self.settings.fragment:
            others = self._outlook.claimed().others.values()
            digests = [said.digest for said in others if said.epoch == 0]
            self.model_rank.set_result(self.own.name.rank_among(digests))
        rank = await asyncio.shield(self.model_rank)  # of all fragments, so one that is closed does not cancel it
        before = self.own.name
        while self.own.rank != rank:
            await self.own.decide_rank(rank)
        if self.own.name != before:
            self._announce_other_state()

    def _situation(self, view: SwarmView, *, must_fetch: bool = False) -> Situation:
        at_end, may_leave, enough = self.at_end, self.finished, self._gossip.enough  # as of the last look
        return Situation(behind=view.behind, must_fetch=must_fetch, at_end=at_end, may_leave=may_leave, enough=enough)

    def _judge(self, view: SwarmView) -> None:
        """Let the machine go on from this look, unless it waits for an average, or a state is being taken over."""
        machine, before = self.course.machine, self.phase
        if machine.is_busy or machine.states_due or self._fetching.holds:
            return
        must_fetch = self.takeover.may_not_begin(view) or self._fetching.has_news
        machine.happened(self._situation(view, must_fetch=must_fetch).event)
        if machine.phase is not before:
            self.course.moves.notify()

    # ----------------------------------------------------------------------------------------- a state has another name

    async def stepped(self, error: Exception | None = None) -> bool:
        """After `own.step`: tell everybody (trainer). Without effect if that was done already.

        Args:
            error: that `own.step` raised.

        Returns:
            Whether that is dealt with: shoal's own part of the step had no memory, and the step is left out.
        """
        update, skipped = self.own.update, False
        if update is not None and error is not None and is_out_of_memory(error):
            # The optimizer's own step is the program's, unless it only merges what others have trained.
            own = update.is_step and self.training.step_error is not None and not self.training.local.steps_alone
            if skipped := not own:
                self._notices.skipped("an average of the swarm was", error)
                if not update.taken:  # nothing has changed: the others go on without us
                    self.own.drop_update()
                    await self.swarm_step.give_up()
                    return True
        if update is None or not update.taken:
            return False
        self.own.drop_update()
        self._companions.state_changed(self._now(), step=update.is_step)
        if self.own.name != update.name:
            sometimes("a step of the swarm is interrupted")
            if not skipped:
                self._notices.interrupted(self.training.step_error if update.is_step else None)
        elif update.is_step:
            self._advanced(update)
        elif update.peers == 1:
            self.solitude.averaged_alone(self.epoch)
        self.course.happened(Event.STEPPED)
        if update.is_step and self.own.name == update.name and self.states_average.follows:
            self.course.machine.happened(Event.STATES_DUE)
        self._announce_state(expected=self.own.name == update.name and update.peers > 1 and not self.at_end)
        if update.is_step and self.own.name == update.name:
            await self._catch_up.joined()  # last: an interrupted trainer cancels this
        return skipped

    async def tell_loaded(self) -> None:
        """After `own.loaded`: tell everybody (trainer)."""
        self.own.drop_update()
        self.training.set_epoch(self.epoch)  # another one, if the loading was interrupted before the state had a name
        self.course.happened(Event.RENAMED)
        self._announce_other_state()

    def _advanced(self, update: Update) -> None:
        epoch, digest, all_samples = update.name
        committed = self.own.committed
        self._outlook.witness.stepped(epoch, all_samples, gave=committed.gave, weights=committed.weights)
        run_id, samples, peers = self.settings.run_id, update.samples, update.peers
        fragment = self.settings.fragment
        event = EpochAdvanced(
            run_id=run_id, epoch=epoch, samples=samples, peers=peers, digest=digest, fragment=fragment
        )
        self.core.env.events.emit(event)
        self._notices.stepped(self.training)
        self._settle_end()  # its members may have said where the run ends
        if self.at_end:
            self.core.env.events.emit(RunEnded(run_id=run_id, epoch=epoch, fragment=fragment))
        self.solitude.stepped(epoch, self.swarm_step.others if peers > 1 else ())
        self.takeover.stepped(peers)

    def _announce_other_state(self) -> None:
        """Our state is one to which no round has led: nobody is on the way to it."""
        self._outlook.state_replaced()
        self._companions.forget()
        self._companions.state_changed(self._now())
        self._announce_state()

    def _announce_state(self, *, expected: bool = False) -> None:
        """The state has another name: donors offer the new one, the others are told now, unless they expect it."""
        self.pace.state_changed(self.epoch, self._now())
        self.account.state_changed()
        self._states.sharing.changed()
        view, _ = self._look()
        self._gossip.announce_state(view, expected=expected)
        self._news.notify()
        if len(view.peers) > 1:  # else there is nobody to compare with
            self._check.begin()

    async def _followed_from(self) -> StateName:
        """Our state, once no step is about to be taken: that step was told already, to the followers of then."""
        while self.own.update is not None and not self.own.update.taken and not self.course.is_closed:
            await self.course.moves.next()
        return self.own.name

    # -------------------------------------------------------------------------------------------------------- the state

    async def _fetch(self, timeout_s: float) -> bool:
        """Take over the best state, or the steps that lead to it; returns whether anything was taken over."""
        before = self.own.name
        try:
            await self.takeover.run(timeout_s)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._notices.skipped("what others have trained was", error)
            raise NoMemoryForState(f"this machine has no memory to take over the state: {error}") from error
        finally:
            if self.takeover.took_over:
                self.solitude.took_over(self.epoch)
            if self.takeover.took_over or self.own.name != before:
                self._announce_other_state()
            if self.phase is RunPhase.STEPPING and self.own.update is None:  # also when the trainer is interrupted
                self.course.happened(Event.OVERTAKEN)
        return self.takeover.took_over
