"""The warnings of an optimizer: something is not as it should be, but the training goes on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from shoal.base.bounded import put_last
from shoal.base.names import known_as
from shoal.base.peer import PeerID
from shoal.errors import is_out_of_memory
from shoal.events import EventBus, LocalValuesRejected, SamplesDropped, Warned, duration
from shoal.protocol.wire import Progress
from shoal.run.decide.beginning import Beginning, Stance
from shoal.run.decide.check import Check, Verdict
from shoal.run.decide.lineage import Apart
from shoal.run.decide.state_name import StateName
from shoal.run.view.contribution import Dropped
from shoal.train.options import Difference
from shoal.train.training_state import TrainingState

__all__ = ["Notices", "left_out", "passes_a_power_of_ten"]

_NAMES_SHOWN = 4
_DOWNLOADS_TOLD = 4
"""A newcomer may need some downloads to catch up; a peer that never does is told why."""

_ROUNDS_TOLD, _LONG_ROUND_S, _MUCH_OF_IT = 3, 2.0, 0.5
"""Rounds in a row are told that last at least this long, and take more than this part of the time."""

_NUMERICS_SHOWN = 3
_OPTIONS_SHOWN = 4
_CHANGES_APART = 10
"""Epochs between two warnings of parameters that were changed."""

_REMEMBERED = 256
_REFUSED_S = 5.0
"""A peer whose state is not taken is named after this time, seconds."""


class Notices:
    """The notices of one run; each counts for itself what was told.

    Args:
        events: where they go.
        run_id: names the run.
        fragment: of the model. Only the notices of the first one tell what holds for all of the model.
        has_twin: whether another process has this peer's identity: then nothing is told that names peers, as what
            these lack may have gone to that process.
    """

    def __init__(
        self, events: EventBus, run_id: str, *, fragment: int = 0, has_twin: Callable[[], bool] = lambda: False
    ) -> None:
        self._events, self._run_id, self._tells_of_model = events, run_id, not fragment
        self._has_twin = has_twin
        self._left_out = self._downloads_in_a_row = self._long_rounds = 0
        self._changed_from = 0.0
        self._skipped: Counter[str] = Counter()
        self._round_at = math.inf
        self._options_told: set[tuple[str, int]] = set()
        self._last: dict[str, object] = {}
        self._refused_s: dict[PeerID, float] = {}  # for so long each peer has named a state that is not taken
        self._refused_last, self._refused_at = set[PeerID](), math.inf
        self._without: dict[PeerID, int] = {}  # how many times it was one of those without which this peer goes on

    def warn(self, message: str, about: Iterable[PeerID] = ()) -> None:
        """Tell this, which names these peers."""
        if (about := tuple(about)) and self._has_twin():
            return
        self._events.emit(Warned(where="optimizer", message=message, about=about))

    def skipped(self, what: str, error: BaseException) -> None:
        """This was left out as there was an error, for want of memory for example: the first time, the tenth, ..."""
        self._skipped[what] += 1
        if passes_a_power_of_ten(self._skipped[what] - 1, self._skipped[what]):
            often = "" if self._skipped[what] == 1 else f" {self._skipped[what]} times"
            reason = "no memory" if is_out_of_memory(error) else "an error"
            self.warn(
                f"{what} left out{often}, because of {reason} ({type(error).__name__}: {f'{error}'[:200]}): the "
                "training goes on"
            )

    def _note(self, what: str, value: object) -> bool:
        """Remember this value. True if the last one was another one, and this one is neither False nor None."""
        before, self._last[what] = self._last.get(what), value
        return value is not None and value is not False and value != before

    def absent(self, peers: Iterable[tuple[PeerID, int]]) -> None:
        """Rounds no longer wait for these peers; each comes with the number of rounds that it has missed."""
        for peer, missed in peers:
            self.warn(
                f"{peer.short()} says that it is at our state, but it does not come ({missed} rounds have waited for "
                "it, or others like it, in vain): rounds no longer wait. Check whether its batches take longer than "
                "an epoch, whether others can reach it, and its clock",
                (peer,),
            )

    def rejected(self, tensor: int, reason: str) -> None:
        """Gradients of this trained parameter were not taken."""
        self._events.emit(LocalValuesRejected(prefix=self._run_id, tensor=tensor, reason=reason))

    def accumulated(self, training: TrainingState, *, at_end: bool = False) -> None:
        """Look whether parameters were changed, or batches left out: an event each time, a warning for the first, ...

        Where the parameters themselves are the reason, that is told instead, once.
        """
        if self._tells_of_model and (error := training.pending.take_memory_error()) is not None:
            self.skipped("a batch, and those that were summed with it, were", error)
        changes = training.weights.changes
        if self._tells_of_model and (epoch := changes.at) is not None and epoch >= self._changed_from:
            # What it does after each step is told once: all peers may do so, and if not, the check finds it.
            self._changed_from = epoch + _CHANGES_APART if not changes.are_usual else math.inf
            when, effect = (
                "between two steps of the swarm",
                f"this peer trains on with other weights than the other peers have at epoch {epoch}",
            )
            if training.steps_alone:
                when, effect = (
                    "between two batches",
                    "the change counts as this peer's own training, and goes into the next average",
                )
            if at_end:
                when, effect = (
                    "after the last step",
                    "this peer ends the run with them, unless the other peers that end it hold something else",
                )
            self.warn(
                f"the trained parameters were changed {when}, by something else than shoal: {effect}. "
                "After an evaluation with other weights put back exactly those that were there. Change weights within "
                "the optimizer's step, on all peers (register_step_post_hook). To load a state, call load_state_dict() "
                "of the shoal.Optimizer after the model's, before the first step"
            )
        before, self._left_out, bad = self._left_out, training.pending.left_out, training.pending.left_out_for
        if self._left_out == before or not self._tells_of_model:
            return
        name = known_as(training.trained[bad], f"trained parameter {bad}")
        reason = f"gradients of {name} that are not finite, or too large to be summed: their batch is left out"
        self.rejected(bad, reason)
        is_news = self._note("broken", training.broken is not None)
        if training.broken is not None:
            if is_news:
                self.warn(training.broken)
        elif passes_a_power_of_ten(before, self._left_out):
            what = "1 batch was" if self._left_out == 1 else f"{self._left_out} batches were"
            self.warn(f"{what} left out, because gradients are not finite, or too large to be summed (of {name}, last)")

    def took_over(self, differences: Iterable[Difference]) -> None:
        """This peer had other options than the round, whose step is taken with the round's. Once for each option."""
        new = [each for each in differences if (each.name, each.group) not in self._options_told]
        if not new:
            return
        self._options_told.update((each.name, each.group) for each in new)
        named = [f"{each.name} of parameter group {each.group} is {each.theirs} ({each.mine} here)" for each in new]
        more = f" (and {len(named) - _OPTIONS_SHOWN} more)" if len(named) > _OPTIONS_SHOWN else ""
        self.warn(
            f"the swarm's step is taken with the options of most peers: {'; '.join(named[:_OPTIONS_SHOWN])}{more}. "
            "This peer takes them over. To train with other options, set them on most peers. Give a learning rate "
            "that changes as shoal.Optimizer(scheduler=...), the same on all peers"
        )

    def differ(self, epoch: int, verdict: Verdict, checks: Mapping[PeerID, Check], *, again: bool) -> None:
        """Other peers name the state of this epoch, and hold other parameters than its holders."""
        if again and all(checks[peer].is_near(checks[min(kept)]) for peer, kept in verdict.others.items()):
            self._differ_by_rounding(epoch)
            return
        who = ", ".join(peer.short() for peer in sorted(verdict.others))
        changed = all(checks[peer].changed for peer in verdict.others)
        why = ". They say that something else than shoal has written to theirs" if changed else ""
        self.warn(
            f"the check of the parameters at epoch {epoch}: {who} named the same state as {len(verdict.holders)} "
            f"others, but held other parameters; they download the parameters of the others{why}{_of_a_tie(verdict)}",
            verdict.others,
        )

    def differs(
        self,
        epoch: int,
        verdict: Verdict,
        me: PeerID,
        checks: Mapping[PeerID, Check],
        *,
        again: bool,
        stays: bool = False,
    ) -> None:
        """This peer names the state of this epoch, and holds other parameters than those that it should hold.

        `again`: so it was at the check before. `stays`: the run is over, and nobody gives them who counts for enough.
        """
        kept, do = verdict.others[me], "this peer downloads theirs"
        if stays:
            do = (
                "they do not give theirs, or those that count for more say nothing, so this peer ends with its own: "
                "take those that most peers hold, from one of their checkpoints"
            )
        if (other := checks[min(kept)]).arithmetic != checks[me].arithmetic:
            self.warn(
                f"the check of the parameters at epoch {epoch}: ours differ from those of {len(kept)} peers at the "
                f"same state; {do}. They compute otherwise, so steps are rounded otherwise: they "
                f"with {other.numerics!r}, this peer with {checks[me].numerics!r}. To keep equal parameters, train on "
                "machines of one kind with equal settings, or with an optimizer that works on each value by itself, "
                "such as AdamW; or let average_state_every bring them together"
            )
            return
        if again and not stays and checks[me].is_near(other):
            self._differ_by_rounding(epoch)
            return
        alike = "" if kept == verdict.holders else ", which compute as this peer does and the others do not"
        message = (
            f"the check of the parameters at epoch {epoch}: ours differ from those of {len(kept)} peers at the same "
            f"state{alike}; {do}{_of_a_tie(verdict)}"
        )
        if alike:
            message += ". Once this is nothing to worry about, if its state came from a peer that computes otherwise"
        if checks[me].changed:
            message += (
                ". Something else than shoal has written to the parameters of this peer since the check before. Change "
                "weights within the optimizer's step, on all peers (register_step_post_hook)"
            )
        elif again:
            message += (
                ". The check before found a difference, too, so the step itself differs on one side. Look for hooks of "
                "the optimizer, attributes, random numbers or code that changes parameters on this peer alone, and "
                "test its memory"
            )
        self.warn(message)

    def _differ_by_rounding(self, epoch: int) -> None:
        """Parameters of peers of equal arithmetic differ again, by little: told once."""
        if self._note("rounding", value=True):
            self.warn(
                f"the check of the parameters at epoch {epoch}: parameters differ at the same state, as at the check "
                "before, and by no more than rounding as far as is seen. So the step is computed otherwise on one side "
                "in a way that no setting shows: by another processor or build of a library, or by an optimizer that "
                "draws random numbers. The same peers take over the parameters of the others each time, at ever fewer "
                "checks. To keep equal parameters, train on machines of one kind with equal settings, or let "
                "average_state_every bring them together; on machines of one kind test their memory"
            )

    def compute_otherwise(
        self, epoch: int, apart: Collection[PeerID], verdict: Verdict, checks: Mapping[PeerID, Check], me: PeerID
    ) -> None:
        """These members hold the state to rounding only, as their arithmetic is not that of its holders. Told once."""
        if not self._note("arithmetic", value=True):
            return
        shown = sorted({*apart, min(verdict.holders)} - {me})[:_NUMERICS_SHOWN]
        found = [f"{peer.short()} with {checks[peer].numerics!r}" for peer in shown]
        found += [f"this peer with {checks[me].numerics!r}"] if me in checks else []
        self.warn(
            f"the check of the parameters at epoch {epoch}: peers hold equal parameters to rounding only, as they "
            f"compute their steps otherwise: {', '.join(found)}. The run goes on, and ends with weights that differ by "
            "as much. To keep equal bits, give all peers equal settings, on machines of one kind"
        )

    def round_took(self, duration_s: float, now: float, *, awaited: bool) -> None:
        """A round of gradients is over. The user is told of other ways, once, if the trainer does little but wait."""
        since_s, self._round_at = now - self._round_at, now
        long = awaited and duration_s >= _LONG_ROUND_S and duration_s > _MUCH_OF_IT * since_s > 0
        self._long_rounds = self._long_rounds + 1 if long else 0
        if self._long_rounds >= _ROUNDS_TOLD and self._note("long rounds", value=True):
            self.warn(
                f"rounds of gradients take {duration_s:.0f} s of every {since_s:.0f} s, and training stands still "
                "meanwhile: the line here, or that of another peer, is slow for this model. Send fewer bytes "
                "(the strategy's compression), or less often (a larger target_batch_size), or give all peers a "
                "strategy that merges now and then: strategy=shoal.strategies.Decoupled(every=100)"
            )

    def stepped(self, training: TrainingState) -> None:
        """The swarm's step was taken to its end. Look whether the schedule was moved, too."""
        self._downloads_in_a_row = 0
        if self._tells_of_model:
            self._look_at_schedule(training.local)
        # If peers merge, there are two optimizers; of the inner one nothing travels.
        for kind, what in (("kept back", training.stepper.kept_back), ("frozen here", training.tensors.frozen_here)):
            if what is not None and self._note(kind, value=True):
                self.warn(what)

    def _look_at_schedule(self, training: TrainingState) -> None:
        if (error := training.schedule.error) is not None and self._note("schedule", value=True):
            self.warn(f"{error}; the learning rates stay as they are")
        if self._note("schedule moved", training.schedule.was_moved):
            self.warn(
                "somebody else has moved the schedule of the run, and it was put back: the run moves it, and a call of "
                "its step() does nothing, unless that method was taken before shoal.Optimizer had the schedule (as in "
                "a list of callbacks). Leave that call out; between it and the next step() the learning rate is wrong"
            )
        if self._note("schedule ahead", value=bool(steps := training.schedule.steps_ahead)):
            self.warn(
                f"the run went back, and the schedule cannot: it waits for {steps} more steps of the run, and this "
                "peer's learning rates are not those of the others. Give the schedule state_dict() and "
                "load_state_dict(), as torch's have them"
            )

    def alone(self, epoch: int | None, reasons: Iterable[str]) -> None:
        """This peer trains alone; `epoch` is the one that it made so, if it has made one."""
        made = "" if epoch is None else f": epoch {epoch} was made by this peer alone"
        self.warn(
            f"run {self._run_id!r}: training alone{made}; {'; '.join(reasons)}. This peer keeps looking for others"
        )

    def ended_without(self, others: Mapping[PeerID, int], end: int) -> None:
        """The run is over here at the epoch `end`, and these others have ended it at other states (with their epochs).

        They have left, and nobody gives their state.
        """
        self.warn(
            f"run {self._run_id!r} ended without this peer: {_names(others)} ended it at epoch {max(others.values())} "
            f"and left while this program stood still or was cut off. It has ended at epoch {end} apart from them, "
            "and its weights differ from theirs: take theirs, from one of their checkpoints. So that this does not "
            "happen, let one peer stay until all have ended (an Optimizer(auxiliary=True), for example), or give all "
            "peers the same folder as checkpoint=",
            others,
        )

    def ended_alone(self, together: int, end: int) -> None:
        """The run is over, and this peer made its steps after the epoch `together` alone, or their last average."""
        alone = f"after epoch {together} this peer made its steps alone"
        if together == end:
            alone = "this peer ended without the last average of the states, as nobody was left for it"
        self.warn(
            f"run {self._run_id!r} ended at epoch {end}, and {alone}. If "
            "the others ended it, too, while this program stood still or was cut off, they have other weights than "
            "this peer: keep those of one of the others, or of their checkpoint"
        )

    def stragglers(self, peers: Collection[PeerID]) -> None:
        """There are samples for a step, and these peers at our state do not come to a round. Once until they do."""
        if self._note("stragglers", bool(peers)):
            self.warn(
                f"there are enough samples for a step, but {_names(peers)} do not come to a round, though they are at "
                "our state: this peer waits for them. Look whether their training stands still (py-spy dump), or a "
                "batch takes them long. A client cannot go on without a peer that others can dial: let one more train",
                peers,
            )

    def goes_back(self, epoch: int, to: int) -> None:
        """This client gives up its state for a worse one of the others."""
        self.warn(
            f"this client goes back from epoch {epoch} to a state of epoch {to}: the others cannot download its own, "
            "and do not go on without it. The batches since then are lost. Let more peers train that others can dial"
        )

    def lacks(self, missing: int, quorum: int) -> None:
        """This peer has trained enough, and these many others are missing for a merge. Told once until they come."""
        if self._note("lacks", bool(missing)):
            self.warn(
                f"run {self._run_id!r}: nothing is merged, as the strategy's quorum is {quorum}, and only "
                f"{quorum - missing} of the peers that train can be seen here. This peer trains on, and gives what it "
                "has to the first merge. Start more peers, see whether those that run can be reached, or give all "
                "peers a smaller quorum. If they have ended the run while this program stood still or was cut off, "
                "take their weights, from one of their checkpoints"
            )

    def beginning(self, beginning: Beginning, *, offered: bool, why_not: str = "") -> None:
        """A newcomer waits for a state, or begins, where none is `offered`. Each is told once, and why if known."""
        stance = Stance.FREE if offered else beginning.stance
        if not self._note("beginning", stance) or stance is Stance.FREE:
            return
        if not beginning.peers:
            self.warn(
                f"no peer that trains run {self._run_id!r} is known, and this one may not begin it "
                f"(require_state=True): it waits up to {beginning.patience_s:.0f} s (load_state_timeout), then step() "
                "raises StateUnavailable. Check that run_id is that of the others, that initial_peers lead to them, "
                "and that one peer trains without require_state"
            )
            return
        named = f"{_names(beginning.peers)} named a state of epoch {beginning.epoch}, but no peer gives it now"
        named += f" ({why_not})" if why_not else ""
        cure = "Mend that" if why_not else "Check whether these peers live and can be reached from here"
        if stance is Stance.WAITING:
            self.warn(
                f"{named}: this peer waits for it, up to {beginning.patience_s:.0f} s (load_state_timeout), before "
                f"{beginning.end}. {cure}",
                beginning.peers,
            )
        elif not beginning.required:
            self.warn(
                f"{named}: training begins at epoch 0, as a run of its own beside theirs. Start this peer again when "
                "they can be reached, or give require_state=True, so that it stops instead",
                beginning.peers,
            )

    def begins_anew(self, samples: int, *, written: bool = False) -> None:
        """The run begins with the first weights of another peer; this one has trained its own, or `written` them."""
        lost = [f"{samples} samples that this peer has trained on its own first weights"] if samples else []
        lost += ["the weights that this program has loaded or written since it made the optimizer"] if written else []
        self.warn(
            f"run {self._run_id!r} begins with the first weights of another peer: {' and '.join(lost)} are lost. Give "
            "all peers the same ones, with torch.manual_seed before the model is made or with a checkpoint that is "
            "loaded before the optimizer is made"
        )

    def gave_up(self, ours: StateName, apart: Apart | None, taken: StateName, kept: object = None) -> None:
        """The state of others was taken, and our own one (`ours`) was trained apart from them.

        Args:
            ours: the name of the state that is given up.
            apart: what was trained apart; None if that is not known, as it was for long.
            taken: the name of the state of the others.
            kept: the path where the state that is given up is kept; None if it is nowhere.
        """
        if kept is None:
            keep = "Give checkpoint=, and what is given up so is saved there"
        else:
            keep = (
                f"It is saved as {kept}, where it stays until two later ones are: what is to be kept of both is to be "
                "merged by hand"
            )
        if apart is None:
            lost = "what was trained apart from them, for longer than this peer remembers, does not count"
        else:
            lost = f"the {apart.samples} samples that were trained apart from them ({apart.own} here) do not count"
        self.warn(
            f"this peer goes on from epoch {taken.epoch} of the others ({taken.samples} samples) and gives up its own "
            f"epoch {ours.epoch} ({ours.samples} samples): {lost}, {_why_of(ours, taken)}. Before peers train apart "
            "again, see that they reach each other: let two of them be reachable (a port that is open, or a public "
            f"Optimizer(auxiliary=True)). {keep}"
        )

    def refused(self, named: Iterable[Progress], own: StateName, now: float) -> None:
        """These name better states, which are not taken. Once for each, when it has done so for a while.

        A newcomer may be ahead for a moment before those are whose words count.
        """
        before, self._refused_at = self._refused_at, now
        last, self._refused_last = self._refused_last, set()
        for each in named:
            peer = each.contact.peer
            self._refused_last.add(peer)
            seconds = self._refused_s.get(peer, 0.0)
            if peer in last:
                put_last(self._refused_s, peer, seconds + now - before, _REMEMBERED)
            if seconds < _REFUSED_S <= self._refused_s.get(peer, 0.0):
                self.warn(
                    f"the state of {peer.short()}, epoch {each.epoch} with {each.branch_samples} samples, is not taken "
                    f"in place of ours, epoch {own.epoch} with {own.samples}: nobody stands for it whose samples are "
                    "in the last steps, or were when it was last here, or it is further than the run can have come. "
                    "If that peer does not belong to the run, keep it out. If the run has gone on there, start this "
                    "peer again, without its checkpoint, with that peer among its initial_peers",
                    (peer,),
                )

    def without(self, further: Mapping[PeerID, int], epoch: int, why_not: str = "") -> None:
        """We go on from our own state, though these are further and have not given theirs. Once until none is.

        The first, the tenth, … time for each of them: a peer may say again and again what it does not give.
        """
        if not self._note("without", bool(further)):
            return
        before = {peer: self._without.get(peer, 0) for peer in further}
        for peer, times in before.items():
            put_last(self._without, peer, times + 1, _REMEMBERED)
        if any(passes_a_power_of_ten(times, times + 1) for times in before.values()):
            self.warn(
                f"{_names(further)} named a state of epoch {max(further.values())} and did not give it: training goes "
                f"on from epoch {epoch} without them, so there are two runs. "
                + (f"The reason: {why_not}. " if why_not else "Check whether they can be reached from here. ")
                + "This peer goes on asking them",
                further,
            )

    def first_dropped(self, dropped: int, computed: int) -> None:
        """This number of the samples that this peer has computed went into no step."""
        if self._tells_of_model:
            self._events.emit(SamplesDropped(run_id=self._run_id, dropped=dropped, computed=computed))

    def much_dropped(self, much: Dropped, why: str, *, last: str, left: int = 0) -> None:
        """Too much of what this peer has computed lately went into no step, as a rule because of `why`.

        Args:
            much: what was dropped.
            why: the reason, and what to do.
            last: what peers have taken part in: "round" or "merge".
            left: of the samples, those that are dropped as the peer leaves now.
        """
        if not self._tells_of_model:
            return
        if 2 * left > much.samples:
            why = (
                "this peer leaves between two steps of the swarm, and what it has computed since the last one is lost. "
                "A run that ends by announce_end() ends with a step"
            )
        elif 2 * much.cut > much.samples:
            why = (
                f"it gave more at once than the time since its last {last} allows: about twice what the fastest one of "
                "the regular peers gives in that time. Look whether all peers count samples alike (batch_size)"
            )
        self.warn(
            f"{much.samples / much.computed:.0%} of what this peer has computed in the last {duration(much.seconds)} "
            f"went into no step ({much.samples} of {much.computed} samples): {why}"
        )

    def ends(self, epoch: int | None, said: int | None, *, stepped: bool = True) -> None:
        """The run ends now, at `epoch` (None: it goes on); `said` is the end that this peer announced. Told once.

        `stepped`: this peer has made a step of it.
        """
        if not self._note("end", epoch) or (epoch == said and stepped):
            return
        if not stepped:
            self.warn(
                f"the run ends here, at epoch {epoch}, and this peer has made no step of it: run {self._run_id!r} was "
                "over when this peer came, or about to be. It has the state of that run, and trains nothing. To begin "
                "a new run, give another run_id, and another folder as checkpoint=; to train this one on, announce a "
                "later end (announce_end) on the peers that are there"
            )
            return
        own = "this peer announced none" if said is None else f"this peer announced epoch {said}"
        self.warn(
            f"the run ends here, at epoch {epoch}: peers that made more than half of the samples of the last rounds "
            f"announced it ({own}). Nothing more is trained; `finished` is true when the others are there"
        )

    def beyond(self, epoch: int, said: int | None) -> None:
        """The run goes on, and is beyond the end that this peer has announced. Once for each such end."""
        if said is None or epoch <= said or not self._note("beyond", said):
            return
        self.warn(
            f"the run is at epoch {epoch} and goes on, though this peer announced its end for epoch {said}: the peers "
            "that make most samples announced a later end or none, or that epoch was over already. This peer trains "
            "on: announce a later end on most peers, or stop this one"
        )

    def interrupted(self, error: str | None) -> None:
        """A step was not taken to its end: its optimizer raised this error; None if it was interrupted."""
        if error is None:
            self.warn(
                "the step was interrupted: this peer will download the state of a peer that has finished the step"
            )
            return
        self.warn(
            f"the optimizer's own step raised {error}. It may have changed some parameters, so this peer will download "
            "the state of a peer that has taken the step. If every step raises, mend the optimizer or its options"
        )

    def held(self, holder: str, seconds: float) -> None:
        """Somebody has kept the parameters for so long that what needed them was left out. Once for each holder."""
        if self._note("held", holder):
            self.warn(
                f"{holder or 'somebody'} has held the parameters for {seconds:g} s, and what needed them waits. If "
                "that is the training thread, its step takes that long or hangs: look at where it stands (py-spy dump)"
            )

    def slow(self, donors: Iterable[PeerID], received: int, missing: int, seconds: float) -> None:
        """These peers have sent a state for so long, and most of it is missing (bytes). Told once."""
        if self._note("slow", value=True):
            self.warn(
                f"the state of run {self._run_id!r} comes slowly: {received / 1e6:.1f} MB have come in {seconds:.0f} s "
                f"from {_names(donors)}, and {missing / 1e6:.1f} MB are missing, which take at most "
                f"{seconds * missing / received:.0f} s at this pace. Peers give a newcomer a tenth of what they send "
                "each other in rounds, and more between rounds. If it takes too long, raise target_batch_size (the "
                "strategy's every), so that rounds are fewer, let more peers share the state, or give this peer "
                "a faster line",
                donors,
            )

    def downloaded(self, duration_s: float, shut_out: Collection[PeerID]) -> None:
        """A state was taken over. Look whether this peer does nothing but download.

        Args:
            duration_s: of the download.
            shut_out: peers that have said that they cannot connect to this one.
        """
        self._downloads_in_a_row += 1
        if self._downloads_in_a_row % _DOWNLOADS_TOLD:
            return
        if shut_out:
            advice = (
                f"{_names(shut_out)} said that they cannot connect to it: open or forward its port, give "
                "announce_maddrs, or make it a client (client_mode=True), which only dials. `shoal doctor INVITE` "
                "tries the ways"
            )
        else:
            advice = (
                "Raise target_batch_size (the strategy's every), so that an epoch lasts longer than a download and a "
                "batch, or give this peer a faster line"
            )
        self.warn(
            f"{self._downloads_in_a_row} states were downloaded in a row, the last one in {duration(duration_s)}, "
            f"and the others were further each time: this peer does not take part. {advice}",
            shut_out,
        )


def left_out(by: Mapping[PeerID, int], epoch: int, patience_s: float, why_not: str) -> str:
    """The error of a peer at this epoch that had no part in the run of these, which are at theirs."""
    return (
        f"the run goes on at epoch {max(by.values())} without this peer, which is at epoch {epoch}: within "
        f"{patience_s:.0f} s (load_state_timeout) it could not take over a state of {_names(by)}: "
        f"{why_not or 'they did not give it'}. Mend that and start this peer again; with require_state=False it trains "
        "a run of its own beside theirs"
    )


def _of_a_tie(verdict: Verdict) -> str:
    if not verdict.is_tie:
        return ""
    return ". Equally many peers hold either, so the wrong parameters may be those that are kept: look at both sides"


def passes_a_power_of_ten(before: int, now: int) -> bool:
    """Whether a count that was lower before has now come to 1, 10, 100, …: what goes on is told ever less often."""
    return len(str(now)) > (len(str(before)) if before else 0)


def _why_of(ours: StateName, taken: StateName) -> str:
    """Why the state of others counts, and not our own."""
    if taken.key < ours.key:
        return "as the others go on from their state without this one"
    if taken.samples > ours.samples:
        return "as the state with more samples does"
    if taken.epoch > ours.epoch:
        return "as of two states with equally many samples the one with more epochs does"
    return "as both states are equally far, and of two such the one with the lower digest counts on all peers"


def _names(peers: Iterable[PeerID]) -> str:
    names = sorted(peer.short() for peer in peers)
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if names[_NAMES_SHOWN:] else "")
