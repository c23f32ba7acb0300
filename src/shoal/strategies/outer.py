"""The state of a fragment of the model that peers merge now and then: the anchor, and the optimizer that steps it.

It is a `TrainingState` whose parameters are the anchor, whose optimizer is the outer one, and whose gradient is the
outer gradient: the anchor minus this peer's parameters. So a merge is a round of gradients, and the named state, which
newcomers download and peers compare, has equal bits on all peers at any time. What a peer has trained since the last
merge is its own, as is its inner optimizer. See `shoal.strategies`.

The anchor of parameters in 16 bits is in float32, and so are the outer optimizer's statistics: a merge may move them by
less than 16 bits can hold, and many such merges add up. The parameters are the anchor in their dtype, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shoal.averaging.allreduce.segments import sum_dtype
from shoal.averaging.allreduce.vector import Vector
from shoal.base.names import known_as, learn
from shoal.base.sometimes import sometimes
from shoal.base.thread_state import forget_casts
from shoal.errors import ConfigError, is_out_of_memory
from shoal.layout import divide_whole
from shoal.strategies.local_updates import LocalTrainingState
from shoal.strategies.merging import Merging
from shoal.train.finite import not_finite
from shoal.train.gradient_sum import SampleCount
from shoal.train.inner import Scheduler, make_optimizer
from shoal.train.options import Options
from shoal.train.pending import Pending
from shoal.train.training_state import PreparedState, TrainingState, fingerprint_of
from shoal.train.trial import weight_copies

__all__ = ["LocalSteps", "OuterTrainingState"]

_MOST_SCHEDULED = 100_000_000
"""The most steps of the inner schedule to which a state of others may lead: minutes for a schedule of torch."""


def _divided(tensors: Sequence[torch.Tensor], fragments: int) -> list[list[int]]:
    """The numbers of the tensors in each fragment, so that the fragments have about equally many elements.

    Raises:
        ConfigError: there are more fragments than tensors with elements.
    """
    if fragments > (count := sum(each.numel() > 0 for each in tensors)):
        raise ConfigError(
            "fragments must be at most the number of trained tensors that are not empty, got "
            f"{fragments} for {count} tensors"
        )
    found: list[list[int]] = [[] for _ in range(fragments)]
    for index, number in enumerate(divide_whole([each.numel() for each in tensors], fragments)):
        found[number].append(index)
    return found[::-1]  # the last one, with the largest tensor, is merged first


class OuterTrainingState(TrainingState):
    """The anchor of a fragment of the model, on one peer.

    Args:
        local: the parameters that this peer steps, and their optimizer.
        merging: the way in which peers merge.
        fragment: the numbers of the trained parameters of this fragment.
        frozen: parameters of the optimizer that are not trained, and belong to this fragment of the state.
        extra_tensors: further tensors that belong to this fragment of the state.

    Attributes:
        merging: as given.
        end_epoch: where the run ends for this fragment, as far as it is known; None: nobody knows yet.

    Raises:
        ConfigError: the outer optimizer cannot step from an average, or its state cannot be given to newcomers.
    """

    keeps_anchor = True
    _strays = False  # the parameters are of no use
    _sound = True  # they were of use when the last merge came
    _passed = 0  # batches of the trainer since this peer gave to a merge
    _given: tuple[int, int] | None = None  # samples and batches that the last round of this state was given
    _counts = False  # they are in its average
    _older = False  # what was trained is older than a merge that this peer has missed
    _land: Callable[[], None] | None = None  # puts the average into the accumulators

    def __init__(
        self,
        local: LocalSteps,
        merging: Merging,
        fragment: Sequence[int],
        frozen: Sequence[torch.Tensor] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        self.merging, self._local = merging, local
        self.end_epoch: int | None = None
        own = [local.trained[index] for index in fragment]
        anchor = [torch.nn.Parameter(each.detach().to(sum_dtype(each.dtype), copy=True)) for each in own]
        named = [(known_as(each, ""), copy) for copy, each in zip(anchor, own, strict=True)]
        learn(self, ((name, copy) for name, copy in named if name))
        try:
            outer = make_optimizer([*anchor, *frozen], merging.outer)
        except ConfigError as error:
            raise ConfigError(f"outer: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"outer, which makes the outer optimizer of {len(anchor)} parameters, raised {type(error).__name__}: "
                f"{error}"
            ) from error
        taken = {id(each) for group in outer.param_groups for each in group["params"]}
        if taken != {id(each) for each in (*anchor, *frozen)}:
            raise ConfigError(
                "outer must make an optimizer of all parameters that it is given, which are copies of those of the "
                "model, and of no others: give outer=lambda params: torch.optim.SGD(params, lr=0.7), for example"
            )
        groups = outer.param_groups  # which may have them in another order
        self._trained = SampleCount([each for group in groups for each in group["params"] if each.requires_grad])
        self._later = SampleCount([])
        super().__init__(outer, None, extra_tensors, pending=Pending(self._trained, self._later))
        self.stepper.compute_as(local.stepper)
        self.weights.are_private()  # nothing but shoal has the anchor
        self._model_of = {id(each): of_model for each, of_model in zip(anchor, own, strict=True)}
        self._own = [self._model_of[id(each)] for each in self.trained]
        places = {id(each): index for index, each in enumerate(local.parameters)}
        self._places = [places[id(each)] for each in self._own]
        # The schedule moves by `every` for each epoch.
        self.last_epoch_taken = min(self.last_epoch_taken, _MOST_SCHEDULED // (merging.steps or 1))
        self.dtypes = [each.dtype for each in self._own]
        self.averaged_as = "outer gradients"
        if not self.averages_extras:
            self.state_tensors = tuple(self.trained)

    @property
    def local(self) -> TrainingState:
        """The parameters that this peer steps, and their optimizer."""
        return self._local

    def why_dropped(self) -> str:
        if self.merging.waits:
            return (
                "a batch that is under way when a merge begins is lost. Raise the strategy's every, or take Decoupled"
            )
        return "it comes too late to merges. Raise the strategy's every"

    def ends_at(self, epoch: int | None) -> None:
        self.end_epoch = epoch

    def places(self) -> list[torch.Tensor]:
        """The tensors of the model that `tensors` belong to."""
        return [self._model_of.get(id(each), each) for each in self.tensors.all]

    # ----------------------------------------------------------------------------------------------- what was trained

    @property
    def batches(self) -> int:
        """Batches that were trained since the last merge, as far as they go into the next one.

        Before the last merge of a run they are as many for all fragments as for the one that has fewest. So their last
        merges come together, and all that was trained is in each of them.
        """
        if self.merging.steps is None or self.pending.in_round or self._merges_left[0] != 1:
            return self._trained.batches
        ways = [each._merges_left for each in self._local.fragments]  # noqa: SLF001
        return min(batches if left == 1 else 0 for left, batches in ways if left > 0)

    @property
    def comes_to_its_end(self) -> bool:
        """Whether the next merge of this fragment is the last one of the run, or the last one was taken."""
        return self.end_epoch is not None and self.epoch + 1 >= self.end_epoch

    @property
    def _merges_left(self) -> tuple[int, int]:
        """The merges until the end of the run that this peer has not given to yet, and its batches for the next one.

        There are 0 of them also where the end is not known.
        """
        left = 0 if self.end_epoch is None else self.end_epoch - self.epoch - self.pending.in_round
        return left, (self._later if self.pending.in_round else self._trained).batches

    def batches_until(self, steps: int) -> int:
        """Batches that were trained since the last merge: of those that go into the next one `steps` at most."""
        return min(self._trained.batches, steps) + self._later.batches

    @property
    def waits(self) -> bool:
        """Whether the trainer has gone on for long enough while a merge is under way.

        What it trains while the last merges of the run are under way is in none of them.
        """
        overlap = self.merging.overlap
        if all(each.comes_to_its_end for each in self._local.fragments):
            return True
        return overlap is not None and self.pending.in_round and self._passed >= overlap

    @property
    def holds_back(self) -> bool:
        """Whether the trainer is to go on for some batches before it takes the merge, so that all take it alike."""
        return bool(self.merging.overlap) and not self.waits

    def count(self, samples: int) -> None:
        """A batch of so many samples was trained (trainer, under the lock)."""
        (self._later if self.pending.in_round else self._trained).count(samples)

    def pass_batch(self) -> None:
        """The trainer gives a batch, which may count or not (trainer, under the lock)."""
        self._passed += 1

    def _weights(self) -> list[torch.Tensor]:
        held = self._local.weights.now()
        return [held[place] for place in self._places]

    def contribute(self) -> tuple[float, float]:
        """The outer gradient goes into a merge now: see `TrainingState.contribute`."""
        self._given, self._counts = (self._trained.samples, self.batches), False
        weight, _ = super().contribute()
        self._passed = 0
        with torch.no_grad():
            # What was rounded off is no part of what was trained.
            for outer, anchor, own in zip(self.accumulators, self._anchor, self._weights(), strict=True):
                outer.copy_(anchor).sub_(own.to(outer.device))
        weights = self._local.weights
        return (0.0 if self._strays or weights.are_hidden or weights.are_changed_unusually else weight), 1.0

    def counted(self) -> None:
        self._counts = True

    def given_is_in(self) -> None:
        """What was given is taken out of what was trained, before that state is taken over: nothing is given twice."""
        given, self._given, self._counts = self._given, None, True
        if given is None or not self.merging.keeps:
            return
        sometimes("a merge has in it what this peer gave, though it missed the verdict")
        (samples, batches), self._counts, self._older = given, False, False
        self._trained.take_out(samples, batches)
        with torch.no_grad(), self._local.moving(self._own):
            torch._foreach_add_(self._own, self._outer_gradient())

    def _outer_gradient(self) -> list[torch.Tensor]:
        return [each.to(own) for each, own in zip(self.accumulators, self._own, strict=True)]

    def unfit(self) -> int | None:
        """The first parameter of this fragment that is not finite here; None if all are."""
        return not_finite(self._weights())

    def use_average(self, vector: Vector) -> None:
        """Let the next step be the merge. The trainer may be in the middle of a batch now."""
        self._land = vector.overwrite  # until then the accumulators say what was given
        self.use_accumulators()

    def step(self, options: Options | None = None, unused: Collection[int] | None = None, cores: int = 0) -> None:
        """Take the merge: see `TrainingState.step`. If it is interrupted, the parameters go back to the anchor."""
        try:
            super().step(options, unused, cores)
        except BaseException:
            if self._strays:  # now for a program that saves its model, and with what was counted before the next batch
                self._copy_anchor()
            raise
        self._strays = False

    def _copy_anchor(self) -> None:
        anchor = [each.detach() for each in self.trained]  # not copied first: there may be no memory for it
        with torch.no_grad():
            try:
                with self._local.moving(self._own):
                    torch._foreach_copy_(self._own, anchor)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                torch._foreach_copy_(self._own, anchor)
                self._local.stay_at(self._own)

    @property
    def _is_stale(self) -> bool:
        """Whether this merge is the second one in a row that this peer has missed: it drops what it has trained then.

        A peer that kept it each time would be ever further on its way, and call for merges ever sooner.
        """
        return self._older and not self._counts

    def _step_from_average(self, unused: Collection[int], cores: int) -> None:
        own, merging = self._own, self.merging
        if self._is_stale:
            sometimes("a peer misses two merges in a row")
        self._sound = sound = not (self._strays or self._is_stale) and self.unfit() is None
        keeps = sound and merging.keeps and (self._later.batches > 0 or not self._counts)
        self._strays = True  # until the whole step is taken
        with torch.no_grad(), self._local.moving(own):
            if keeps:  # leave of them what was trained and is in no average
                torch._foreach_sub_(own, self._anchor)
                if self._counts and self._given is not None:
                    torch._foreach_add_(own, self._outer_gradient())
            if self._land is not None:
                self._land()
            super()._step_from_average((), cores)
            if keeps:
                torch._foreach_add_(own, self._anchor)
            elif sound and merging.mixing is not None and not merging.waits:
                torch._foreach_lerp_(own, self._anchor, 1.0 - merging.mixing)
            else:
                torch._foreach_copy_(own, self._anchor)

    @property
    def _anchor(self) -> list[torch.Tensor]:
        """As the parameters hold it."""
        return [each.detach().to(own.dtype) for each, own in zip(self.trained, self._own, strict=True)]

    def _after_step(self, own: Sequence[torch.Tensor | None], *, taken: bool) -> None:
        samples, batches = 0, 0
        if taken and self.step_error is None and self.pending.holds_average:
            if not self._sound:
                self._later.forget()  # the parameters are the anchor
            elif self.merging.keeps and not self._counts:
                samples, batches = self._trained.samples, self._trained.batches
            self._given, self._older = None, batches > 0
        super()._after_step(own, taken=taken)
        self._counts, self._land = False, None
        self._trained.count(samples, batches)

    def take_over(self, prepared: PreparedState, *, follows: bool = False) -> None:
        """Take over a downloaded state. This peer's parameters become the anchor.

        This peer keeps what it has trained since its last merge if it has missed one merge only, and the strategy keeps
        such (`Merging.keeps`). A state that does not follow from the one here may have it already, if this peer was on
        the other side of a fork before.
        """
        with self._local.weights.in_place():
            keeps = follows and self.merging.keeps and not self._older
            # If it counts, the merge that has it is given up for a branch of this state.
            keeps = keeps and not self._strays and not self._counts and self.unfit() is None
            if keeps and self._trained.batches:
                sometimes("what a peer trained is kept over a state that it downloads")
            before = [each.clone() for each in self._anchor] if keeps else []
            trained = self._trained.samples + self._later.samples, self._trained.batches + self._later.batches
            if prepared.epoch < self.epoch:
                self._local.schedule.go_back()
            self._strays = True  # if this is interrupted, the parameters go back to the anchor
            super().take_over(prepared, follows=follows)
            with torch.no_grad(), self._local.moving(self._own):
                if keeps:
                    torch._foreach_sub_(self._own, before)
                    torch._foreach_add_(self._own, self._anchor)
                    self._trained.count(*trained)
                else:
                    torch._foreach_copy_(self._own, self._anchor)
            self._strays, self._older = False, keeps and trained[1] > 0

    def discard(self) -> None:
        """Forget what was trained. The parameters go back to the anchor before the next batch: see `settle`."""
        self._strays = self.strays
        self._land, self._given, self._counts, self._older = None, None, False, False
        super().discard()

    @property
    def strays(self) -> bool:
        """Whether the parameters may be others than the anchor. Any thread may ask."""
        return self._strays or self._trained.samples + self._later.samples > 0

    def copy_weights(self) -> None:
        """Let the anchor be what the parameters are (under the lock)."""
        with torch.no_grad():
            torch._foreach_copy_([each.detach() for each in self.trained], self._weights())

    def export(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        self._local.follow_model()
        return super().export()

    def settle(self) -> bool:
        """Let the parameters go back to the anchor, if what was trained was discarded (trainer, under the lock).

        Returns:
            Whether they did: a batch that began before counts for nothing.
        """
        if not self._strays:
            return False
        self.go_back()
        return True

    def begin_anew(self) -> None:
        """Let the anchor be what the parameters are (trainer, under the lock)."""
        self.discard()
        self.copy_weights()
        self._strays = False

    def go_back(self) -> None:
        """Let the parameters be the anchor, and forget what was trained (trainer, under the lock)."""
        self._strays, self._given, self._older = True, None, False  # if this is interrupted, it is done again
        self._trained.forget()
        self._later.forget()
        self._copy_anchor()
        self._strays = False


class LocalSteps(LocalTrainingState):
    """The parameters of a peer that steps on its own batches, and merges them in fragments.

    Args:
        optimizer: over the parameters that are trained.
        scheduler: moves with the batches, if `merging` counts batches, and with the merges otherwise; None for none.
        extra_tensors: they belong to the state of the last fragment: what is averaged of them at the end of the run
            must not move any more, and the other fragments have ended by then.
        merging: the way in which peers merge.

    Attributes:
        merging: as given.
        fragments: of the model, in order.

    Raises:
        ConfigError: there are more fragments than trained tensors; or the outer optimizer is of no use.
    """

    averages_parameters, keeps_anchor = False, True
    fragments: Sequence[OuterTrainingState] = ()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        extra_tensors: Sequence[torch.Tensor],
        merging: Merging,
    ) -> None:
        super().__init__(optimizer, scheduler, extra_tensors)
        self.merging, last = merging, merging.fragments - 1
        self._fresh = True  # no batch was trained yet
        self._fingerprint: tuple[list[int], bytes] | None = None
        # The names of weights among the inner optimizer's statistics: equal ones now, or as a trial will tell.
        self._copies, self._judged = frozenset(_equal_statistics(optimizer)), False
        self.fragments = [
            OuterTrainingState(
                self, merging, fragment, () if number else self.tensors.frozen, () if number < last else extra_tensors
            )
            for number, fragment in enumerate(_divided(self.trained, merging.fragments))
        ]

    @contextmanager
    def moving(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Weights that the inner optimizer keeps (`z` of ScheduleFree, for one) move as these parameters do.

        Its next steps would lead back to them otherwise.
        """
        copies = [(each, kept) for each in parameters for kept in self._copies_of(each)]
        before = [each.clone() for each, _ in copies]
        try:
            yield
        finally:
            for (each, kept), was in zip(copies, before, strict=True):
                moved = kept.reshape(each.shape) + (each - was).to(kept)
                # What was not finite has no place of its own.
                kept.copy_(torch.where(moved.isfinite(), moved, each.to(kept)).reshape(kept.shape))
            forget_casts()
            self.weights.note()

    def stay_at(self, parameters: Sequence[torch.Tensor]) -> None:
        """Weights that the inner optimizer keeps are what these parameters are. It takes no memory."""
        for each in parameters:
            for kept in self._copies_of(each):
                kept.copy_(each.reshape(kept.shape))
        forget_casts()
        self.weights.note()

    def _copies_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        if not self._judged and self.optimizer.state:
            self._copies, self._judged = self._copies | weight_copies(self.optimizer), True
        entry = self.optimizer.state.get(parameter) if self._copies else None
        if not isinstance(entry, dict):
            return []
        held = [value for name, value in entry.items() if name in self._copies and isinstance(value, torch.Tensor)]
        return [each for each in held if each.is_floating_point() and each.numel() == parameter.numel()]

    def accumulate(self, batch_size: int) -> bool:
        """Step on the gradients in `.grad`, and count the batch for the next merge of each fragment.

        Returns:
            Whether it counts: not if the gradients are not finite, or were computed at parameters that are no more, or
            soon will be: where peers wait for merges, a batch that comes after one has begun is not stepped from.

        Raises:
            ConfigError: see `TrainingState.accumulate`.
        """
        self.follow_model()
        self._fresh = False
        for fragment in self.fragments:
            fragment.pass_batch()
        settled = [fragment.settle() for fragment in self.fragments]
        if any(settled):
            self._loses, self.raised = True, None
            return False
        left_out = self.pending.left_out
        if not super().accumulate(batch_size):
            if self.pending.left_out != left_out and self.broken is not None:
                self.go_back()
            return False
        for fragment in self.fragments:
            fragment.count(batch_size)
        self.schedule.follow(self._run_is_at)
        return True

    @property
    def _waits_for_round(self) -> bool:
        return self.merging.waits and any(fragment.pending.in_round for fragment in self.fragments)

    def follow_model(self) -> None:
        """Before its first batch the model may still be given other weights, as with any optimizer (under the lock)."""
        if self._fresh and not self.strays and all(fragment.epoch == 0 for fragment in self.fragments):
            for fragment in self.fragments:
                fragment.copy_weights()

    def fingerprint_of_model(self) -> bytes:
        if len(self.fragments) == 1:
            return b""
        # Each fragment asks for it, and it takes a while for a large model.
        versions = [tensor._version for each in self.fragments for tensor in each.tensors.all]  # noqa: SLF001
        if self._fingerprint is None or self._fingerprint[0] != versions:
            self._fingerprint = versions, fingerprint_of(self.fragments)
        return self._fingerprint[1]

    def _why_broken(self) -> str | None:
        if (index := not_finite([parameter.detach() for parameter in self.trained])) is None:
            return None
        return (
            f"trained parameter {known_as(self.trained[index], index)} is not finite, so the batch does not count: "
            "this peer goes back to the last merge, and trains on from there. If it comes again, lower the learning "
            "rate"
        )

    def go_back(self) -> None:
        """Let the parameters be the anchor of each fragment: at the end of the run, or if they are of no use."""
        for fragment in self.fragments:
            fragment.go_back()

    def end(self, state: bytes) -> None:
        """The run is over: what was trained after the last merge is nobody else's, as is the schedule."""
        super().end(state)
        self.go_back()
        self.schedule.go_back()
        self.schedule.follow(self._run_is_at)

    @property
    def strays(self) -> bool:
        """Whether the parameters may be others than the anchors. Any thread may ask."""
        return any(fragment.strays for fragment in self.fragments)

    def begin_anew(self) -> None:
        """Let the anchor of each fragment be what the parameters are: other weights were loaded into the model."""
        for fragment in self.fragments:
            fragment.begin_anew()
        self.weights.note()

    def taken_over(self) -> None:
        """The parameters are the anchors now, and the schedule stands where the run is."""
        self.go_back()
        self.schedule.follow(self._run_is_at)

    def never_averaged(self, batches: int) -> str | None:
        merging, quorum = self.merging, self.merging.quorum or 0
        every = merging.every if merging.steps is None else f"{merging.steps} batches"
        trained = "1 batch was" if batches == 1 else f"{batches} batches were"
        return (
            f"{trained} trained, and none of them was merged: the strategy merges every {every}"
            f"{f', if {quorum} peers give it (its quorum)' if quorum > 1 else ''}. Train longer, or merge more often"
            f"{', or start more peers' if quorum > 1 else ''}"
        )

    @property
    def _run_is_at(self) -> int:
        """So many steps of the schedule: the merges of the first fragment are `every` batches apart.

        A peer that does not wait trains on while its last merge is under way. The schedule is over by then: a rate may
        have fallen to 0, and would go on below that.
        """
        first, steps = self.fragments[0], self.merging.steps
        if steps is None:
            return first.epoch
        at = first.epoch * steps + first.batches_until(steps)
        return at if first.end_epoch is None else min(at, max(first.epoch, first.end_epoch) * steps)


def _equal_statistics(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """The names of statistics that are equal to their parameters: Lookahead keeps such from its beginning."""
    for parameter, entry in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(entry, dict) and parameter.any():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and torch.equal(value, parameter):
                    yield name
