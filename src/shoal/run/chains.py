"""The chains of states that a run has on one peer: one for each fragment of the model, with a participant of its own.

Where gradients are averaged there is one fragment, the whole model, and its state is that of the run. Where there are
several, a peer that misses a merge of one fragment takes part in those of the others. A checkpoint holds the states of
all of them together, and so does a state dict.

`Chains` is all that `shoal.Optimizer` knows of a run. The trainer calls it, in its own thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec.structs import asdict

from shoal.averaging import TensorLock
from shoal.averaging.core import PeerCore
from shoal.base.tasks import stopped
from shoal.errors import ClosedError, ConfigError, StateUnavailable
from shoal.events import Warned
from shoal.protocol.wire import MAX_SAMPLES, Epoch, Samples, decode_plain, encode
from shoal.run.decide.phases import RunPhase
from shoal.run.decide.state_name import StateName
from shoal.run.disk.checkpoint import Saved
from shoal.run.disk.saving import misfit
from shoal.run.join.own_state import Replaced
from shoal.run.join.shared_state import name_of
from shoal.run.participant import Participant
from shoal.run.report.status import Status
from shoal.run.settings import RunSettings, fragment_settings
from shoal.run.view.progress import StateKey
from shoal.runtime.thread import GRACE_S, LoopThread
from shoal.state.wire import SharedState
from shoal.train.optimizer_state import Prepared
from shoal.train.options import OUTER
from shoal.train.shared_tensors import digest_of_tensors
from shoal.train.training_state import PreparedState, TrainingState, fingerprint_of

__all__ = ["Chains", "first_asked", "participants_of"]

T = TypeVar("T")

_State = tuple[StateName, PreparedState]
"""The state of one fragment, as it was read: looked at whole, and ready to be taken over."""

_BEGIN_S = 60.0
"""The longest time to make the participants, or to join the run."""

_OTHERS_S = 3.0
"""To learn, when this peer joins the run, which settings the others have."""

_NOT_TAKEN_AGAIN_S = 600.0
"""Why a better state was not taken over is told once in this time."""


async def participants_of(
    core: PeerCore, training: TrainingState, settings: RunSettings, **options: Any
) -> list[Participant]:
    """Make a participant for each fragment of the model (loop).

    Args:
        core: this peer.
        training: what it trains.
        settings: of the run.
        options: for each `Participant`.
    """
    others, participants, count = len(core.leavers), list[Participant](), len(training.fragments)
    try:
        for number, fragment in enumerate(training.fragments):
            ours = settings if fragment is training else fragment_settings(settings, number, count)
            participants.append(Participant(core, fragment, ours, first=next(iter(participants), None), **options))
    except BaseException:
        for leave in core.leavers[others:]:  # it has made averagers, which hold the run's names
            await leave(0.0)
        raise
    return participants


class Chains:
    """What a run has on one peer. For the trainer's thread, but for `leave`.

    Making it joins the run.

    Args:
        thread: runs the loop.
        core: this peer.
        training: what it trains.
        settings: of the run.
        lock: of accumulators, parameters and optimizer.
        saved: the checkpoint to go on from; None: from what is here.
        folder: of the run's checkpoints, which other programs may use; None for none.
        options: for each `Participant`.

    Attributes:
        participants: of all fragments, in order.

    Raises:
        ConfigError: the checkpoint does not fit; or the run is trained here already, or by others with other settings.
    """

    def __init__(
        self,
        thread: LoopThread,
        core: PeerCore,
        training: TrainingState,
        settings: RunSettings,
        *,
        lock: TensorLock,
        saved: Saved | None = None,
        folder: Path | None = None,
        **options: Any,
    ) -> None:
        self._thread, self._core, self._training, self._lock = thread, core, training, lock
        self._not_taken_told_at = -math.inf  # why no better state was taken over (monotonic, seconds)
        self.untold = False
        """Whether nobody was told of the state that is here: it is being loaded, or was in part."""
        self.participants: Sequence[Participant] = ()
        try:
            made = participants_of(core, training, settings, lock=lock, **options)
            self.participants = self._run(made, _BEGIN_S)
            if saved is not None:
                with lock.acquire_in_thread():
                    self.resume(saved)
            self._run(self._begin(folder), _BEGIN_S)
        except BaseException:
            with suppress(ClosedError):
                self._run(self.leave(), GRACE_S)
            raise

    async def _begin(self, folder: Path | None) -> None:
        for each in self.participants:
            await each.start()
        await self._tell_loaded()
        await self.first.check_settings(_OTHERS_S)
        if folder is not None:
            self.first.watch_folder(folder)

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return self._thread.run(work, timeout_s + GRACE_S)

    def _ask(self, answer: Callable[[], T]) -> T:
        """Call a function in the loop."""

        async def ask() -> T:
            return answer()

        return self._run(ask(), GRACE_S)

    def _warn(self, message: str) -> None:
        self._thread.call_soon(partial(self._core.env.events.emit, Warned(where="optimizer", message=message)))

    async def leave(self) -> None:
        """Leave the run (loop). Safe to call twice."""
        await asyncio.gather(*(each.close() for each in self.participants))

    # ---------------------------------------------------------------------------------------------------------- status

    @property
    def first(self) -> Participant:
        """That of the first fragment, which says for all of them what is said once for each peer."""
        return self.participants[0]

    @property
    def epoch(self) -> int:
        """Steps that have gone into each fragment."""
        return min(each.epoch for each in self.participants)

    @property
    def at_end(self) -> bool:
        """Whether each chain is at the end of the run."""
        return all(each.at_end for each in self.participants)

    @property
    def finished(self) -> bool:
        """Whether each chain is at the end, and the others are there too; and the parameters are those of the state.

        A peer without which the others have ended looks for their state in its folder of checkpoints before.
        """
        # If the parameters have left the state, the next step takes them back to it.
        over = all(each.finished for each in self.participants) and not self._training.strays
        return over and self.first.solitude.untold is None

    def missed_ends(self) -> frozenset[bytes] | None:
        """The digests of the states (see `state`) at which the others have ended without this peer.

        Returns:
            None if they have not: as a rule. Empty if they may have, as they were lost and said nothing, or a quorum is
            lacking for long.
        """

        def look() -> frozenset[bytes]:
            peers = {peer for each in self.participants for peer in each.solitude.ended_without}
            ends = ([each.left_at(peer) or b"" for each in self.participants] for peer in peers)
            return frozenset(_digest_of(end) for end in ends if all(end))

        return None if self.first.solitude.untold is None else self._ask(look)

    @property
    def last_epoch(self) -> int | None:
        """The epoch at which the run ends, or has ended; None if this peer does not know it."""
        return self.epoch if self.at_end else self.first.ends_at

    def looked_for_end(self, *, found: bool) -> None:
        """Such a state was `found` and taken over, or nobody has it (not under the lock)."""

        def looked() -> None:
            self.first.solitude.looked_for_end(found=found)
            for each in self.participants:
                if found and not each.at_end:  # what the members of the last steps said is not known
                    each.announce_end(each.epoch)

        self.tell_loaded()
        self._ask(looked)

    def status(self) -> Status:
        """The run as this peer sees it now; the last look at it once this peer has left."""
        found = self._statuses()
        return replace(
            min(found, key=lambda each: each.epoch),
            swarm_epoch=min(each.swarm_epoch for each in found),
            contributed=min(each.contributed for each in found),
            dropped=max(each.dropped for each in found),
            finished=self.finished,
        )

    def _statuses(self) -> list[Status]:
        def look() -> list[Status]:
            return [each.status() for each in self.participants]

        try:
            return self._ask(look)
        except ClosedError:
            if any(each.last_status is None for each in self.participants):
                raise
            return look()

    def is_synchronized(self) -> bool:
        """Whether no better state is known of any fragment."""
        behind = RunPhase.BEHIND.value
        return all(each.epoch == each.swarm_epoch and each.phase != behind for each in self._statuses())

    def is_elected(self) -> bool:
        """Whether this peer is elected for its state of the first fragment."""
        return self._ask(self.first.is_elected)

    def announce_end(self, epoch: int | None) -> None:
        """Tell everybody where the run ends as far as this peer is concerned: all chains end there."""

        def announce() -> None:
            for each in self.participants:
                each.announce_end(epoch)

        self._ask(announce)

    def never_averaged(self) -> str | None:
        """What to tell a peer that has trained, and leaves before the first average; None: nothing."""
        batches, averaged = self.first.speed.batches, any(each.epoch for each in self.participants)
        return self._training.never_averaged(batches) if batches and not averaged else None

    # -------------------------------------------------------------------------------------------------------- the turn

    def count(self, samples: int, *, worth: bool) -> None:
        """Count a batch (under the lock). If it has gradients and is not `worth` counting, its samples are dropped."""
        if worth:
            self.first.speed.count(samples)
        elif any(each.grad is not None for each in self._training.trained):
            for each in self.participants:
                each.contribution.leave_out(samples)

    def take_turns(self, timeout_s: float, load_timeout_s: float, *, trained: bool) -> None:
        """Do what each fragment asks for now. Without a batch that was `trained` each of them is asked.

        The trainer's thread waits here in three places: `TrainerTurn.decide` waits for a round, for a merge that is due
        soon, and at the end of the run for the others; the lock of the parameters is waited for before a step; and
        `TrainerTurn.download` waits for a better state.
        """
        behind, asked = [], self.participants
        if self.first.settings.auxiliary:
            asked = self._run(first_asked(asked, timeout_s), timeout_s)
        for each in asked:
            if not trained or each.turn.is_due:
                if self._take_turn(each, timeout_s):
                    behind.append(each)
            elif each.turn.has_news:
                self._thread.call_soon(each.turn.accumulated)
        if behind:
            self._run(_all_of(self._catch_up(each, load_timeout_s) for each in behind), load_timeout_s)

    def _take_turn(self, participant: Participant, timeout_s: float) -> bool:
        """Do what a fragment asks for; returns whether to stand still for a better state of it."""
        if participant.at_end and not self.at_end:
            return False  # other fragments of the model are still trained
        phase = self._run(participant.turn.decide(timeout_s), timeout_s)
        if phase is not RunPhase.STEPPING:
            return phase is RunPhase.BEHIND and participant.turn.waits_for_state
        if participant.turn.holds_update_back:
            return False
        try:
            with self._lock.acquire_in_thread():
                participant.own.step()
        except Exception as error:  # of the optimizer: the others are told at once, as the program may end
            if not self._run(participant.stepped(error), GRACE_S):
                raise
        else:
            self._run(participant.stepped(), GRACE_S)
        return participant.at_end and self._take_turn(participant, timeout_s)  # the last one: wait for the others

    async def _catch_up(self, participant: Participant, timeout_s: float) -> None:
        """Stand still for a better state of this fragment (loop)."""
        try:
            await participant.turn.download(timeout_s, patient=participant.settings.auxiliary)
        except StateUnavailable as error:
            participant.takeover.check_beginning(participant.view())
            # Beside a peer that claims states and gives none, downloads of each fragment fail again and again.
            if time.monotonic() > self._not_taken_told_at + _NOT_TAKEN_AGAIN_S:
                self._not_taken_told_at = time.monotonic()
                self._warn(str(error))

    def load_from_peers(self, timeout_s: float) -> bool:
        """Download the better states that are known; returns whether any was taken over.

        Raises:
            StateUnavailable: there is one, and nobody gave it. Those of other fragments may have been taken over.
        """
        return any(self._run(_all_of(each.turn.download(timeout_s) for each in self.participants), timeout_s))

    def stay_at_end(self) -> None:
        """What a batch has changed beyond the end of the run is taken back."""
        with self._lock.acquire_in_thread():
            self._training.end(self.participants[-1].state.digest)

    # ---------------------------------------------------------------------------------------------------- what is saved

    @property
    def state(self) -> StateName:
        """One name for the states of all fragments; that of the state if there is one. The epoch is the lowest one."""
        names = [each.state for each in self.participants]
        if len(names) == 1:
            return names[0]
        digest = _digest_of([name.digest for name in names])
        samples = min(sum(name.samples for name in names), MAX_SAMPLES)
        return StateName(self.epoch, digest, samples)

    def export(self) -> SharedState:
        """The states of all fragments as one (under the lock): what a checkpoint holds."""
        states = [each.own.export() for each in self.participants]
        if len(states) == 1:
            return states[0]
        plain = msgspec.to_builtins  # checkpoints are JSON, which has no bytes
        fragments = [
            _Fragment(plain(state.metadata["state"]), state.metadata["training"], len(state.tensors))
            for state in states
        ]
        places = [(state, place) for state in states for place in range(len(state.tensors))]
        return SharedState(
            metadata={"state": list(self.state), "training": {"fragments": [*map(asdict, fragments)]}},
            tensors=[state.tensors[place] for state, place in places],
            may_be_infinite=[at for at, (state, place) in enumerate(places) if place in state.may_be_infinite],
            called=lambda at: places[at][0].called(places[at][1]),
        )

    def places(self) -> list[torch.Tensor]:
        """For each tensor of `export` the tensor of the model that it belongs to; itself where it belongs to none."""
        found: list[torch.Tensor] = []
        for training in self._training.fragments:
            known, (_, tensors) = training.places(), training.export()
            found += [*known, *tensors[len(known) :]]
        return found

    @property
    def shared(self) -> tuple[int, int]:
        """Epoch and samples of the last state that others had, too; of the first fragment."""
        last = self.first.own.with_others
        return last.epoch, last.samples

    def place(self) -> dict[str, Any]:
        """Where the run stands, for a state dict (under the lock)."""
        state, training, merged = self.state, self._training, None
        displaced = any(each.training.weights.are_changed_unusually for each in self.participants)
        if training.keeps_anchor:
            anchors = self.export()
            values = torch.frombuffer(bytearray(encode(anchors.metadata["training"])), dtype=torch.uint8)
            tensors = [tensor.detach().clone() for tensor in anchors.tensors]
            merged = {"outer": self._outer, "values": values, "tensors": tensors}
        place = Place(
            state.epoch,
            state.digest.hex(),
            state.samples,
            training.schedule.count,
            fingerprint="" if displaced else self._fingerprint,  # else that of other values has this name
            shared=self.shared,
            weights="" if displaced else self._digest_of_weights(),
            merged=merged,
        )
        return asdict(place)

    @property
    def _fingerprint(self) -> str:
        """A digest of what all fragments hold, in hexadecimal."""
        return fingerprint_of(self._training.fragments).hex()

    @property
    def _outer(self) -> str:
        """The outer optimizer with the options that it was made with."""
        return self.first.settings.fingerprint[OUTER]

    def _digest_of_weights(self) -> str:
        groups = self._training.optimizer.param_groups
        return digest_of_tensors(each for group in groups for each in group["params"]).hex()

    # --------------------------------------------------------------------------------------------------- what is loaded

    def _forget(self) -> list[Replaced]:
        """Forget the states that are here, as others are loaded (under the lock)."""
        self.untold = True
        return [each.own.loading() for each in self.participants]

    def _name(
        self,
        forgotten: list[Replaced],
        names: Sequence[StateName | None],
        shared: tuple[int, int] = (0, 0),
        *,
        unchanged: bool = False,
    ) -> None:
        """Name the states that were loaded (under the lock): see `OwnState.loaded`, and `shared`."""
        for each, before, name in zip(self.participants, forgotten, names, strict=True):
            each.own.loaded(before, name, unchanged=unchanged, floor=StateKey.of(*shared, b""))

    def tell_loaded(self) -> None:
        """Tell the others of a state that was loaded, if they were not told yet."""
        if self.untold:
            self._run(self._tell_loaded(), GRACE_S)

    async def _tell_loaded(self) -> None:
        for each in self.participants if self.untold else ():
            await each.tell_loaded()
        self.untold = False

    def follow_weights(self, *, named: bool) -> bool:
        """Let the state be other weights, if such were loaded into the model (under the lock); returns whether it is.

        Before anything was trained the state is `named` by them. Later it has a name of its own, and any state of
        others is better.
        """
        weights = self._training.weights
        # A write of a few values is known by its count alone. Before the first batch the name tells whether it was one.
        is_other = weights.are_changed_unusually or (named and weights.were_written_to)
        if not is_other or weights.are_in_eval_mode:
            return False
        forgotten = self._forget()
        self._training.begin_anew()
        if named:
            self._name(forgotten, [None] * len(forgotten))
        else:
            for each in self.participants:
                each.training.weights.note()
        return True

    def resume(self, saved: Saved) -> None:
        """Go on from a checkpoint (under the lock).

        Raises:
            ConfigError: it does not fit here; nothing was changed.
        """
        if self._training.weights.are_in_eval_mode:
            raise ConfigError("the optimizer is in eval mode: call train() before a checkpoint is taken over")
        try:
            states = self._read(saved.name, saved.values, saved.tensors)
        except StateUnavailable as error:
            raise misfit(saved, f"{error}") from error
        self._name(self._forget(), self._set(states), saved.shared, unchanged=True)

    def prepare(self, about: Any) -> tuple[Place, list[_State]] | None:
        """Look at what `place` gave (under the lock); nothing is changed. None stands for a plain optimizer's.

        Raises:
            ConfigError: it is anything else; or it does not fit here.
        """
        if about is None:
            return None
        try:
            place = msgspec.convert(about, Place)
            name = place.name
        except (TypeError, ValueError) as error:
            raise ConfigError(f"state_dict['shoal'] is not what state_dict() gave: {error}") from error
        if self._training.keeps_anchor and place.merged is not None:
            return place, self._read_anchors(name, place.merged)
        if place.weights not in ("", self._digest_of_weights()):
            raise ConfigError(
                "state_dict was saved with other weights than the model has now, and peers would take these for "
                f"what {name.samples} samples have trained: load the model's state before (with strict=False, look "
                "at what load_state_dict() of the model returns). To begin with these weights, leave out the entry "
                "'shoal'"
            )
        return place, []

    def _read_anchors(self, name: StateName, saved: Any) -> list[_State]:
        try:
            if (theirs := saved.get("outer", self._outer)) != self._outer:
                raise StateUnavailable(f"its outer optimizer is {theirs!s:.240}, and here it is {self._outer}")
            return self._read(name, decode_plain(bytes(saved["values"].numpy())), saved["tensors"])
        except (StateUnavailable, msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
            why = "" if isinstance(error, StateUnavailable) else "it is not what state_dict() gave: "
            raise ConfigError(f"state_dict['shoal'] does not fit here: {why}{error}") from error

    def _read(self, name: StateName, values: Any, tensors: Sequence[torch.Tensor]) -> list[_State]:
        """Look at a state that `export` gave: its name, plain values and tensors; nothing is changed.

        Raises:
            StateUnavailable: it does not fit here.
        """
        trainings = self._training.fragments
        saved = values.get("fragments") if isinstance(values, Mapping) else None
        if (count := len(saved) if isinstance(saved, list) else 1) != len(trainings):
            raise StateUnavailable(f"it is a state of a model in {count} fragments, and here it is in {len(trainings)}")
        if count == 1:
            return [(name, trainings[0].prepare(values, tensors))]
        try:
            fragments = msgspec.convert(saved, list[_Fragment])
        except msgspec.ValidationError as error:
            raise StateUnavailable(f"it is no state of {count} fragments: {error}") from error
        if sum(fragment.tensors for fragment in fragments) != len(tensors):
            raise StateUnavailable(f"it has {len(tensors)} tensors, and its fragments have others")
        rest = iter(tensors)
        return [
            (name_of({"state": each.state}), training.prepare(each.training, [*islice(rest, each.tensors)]))
            for training, each in zip(trainings, fragments, strict=True)
        ]

    def load(self, found: tuple[Place, list[_State]] | None, optimizer: Prepared) -> None:
        """Take over a state dict (under the lock): what `prepare` has found, and the inner optimizer."""
        training, was, had_others = self._training, self.first.state, self.first.own.shared
        place, states = found or (None, [])
        forgotten = self._forget()
        training.kept.switch(optimizer)
        others = place if place is not None and (place.merged is not None) != training.keeps_anchor else None
        if others is not None:
            place = None  # its epochs are others: what was loaded is a plain optimizer's state
            training.schedule.keep_place()
        elif place is not None:
            training.resume(place.epoch, place.scheduled)
        names: Sequence[StateName | None] = [None if place is None else place.name]
        if training.keeps_anchor:
            if place is None:
                training.begin_anew()
            names = [None for _ in forgotten] if place is None else self._set(states)
        shared, saved = ((0, 0), "") if place is None else (place.shared, place.fingerprint)
        self._name(forgotten, names, shared, unchanged=saved == self._fingerprint)
        now = self.first.state
        if had_others and now != was and now.key <= was.key:
            self._warn(
                f"load_state_dict() at epoch {was.epoch} put a state of epoch {now.epoch} in the place of the one "
                "that this peer had with others: the run takes the better one for all peers, so what was loaded may "
                "be undone. Load a state before the first step, on all peers"
            )
        if others is not None and (others.epoch or others.scheduled):
            stays = f"so this run stays at its own epoch {now.epoch}, and so does its schedule"
            if training.keeps_anchor:
                what = "the state that was loaded is of a run that averages gradients: its epochs are no merges"
            else:
                what = "the state that was loaded is of a run that merges: its epochs are its merges"
            self._warn(f"{what}, {stays}")

    def _set(self, states: Sequence[_State]) -> list[StateName]:
        """Set the values of states that were read (under the lock); returns the names of the states."""
        for fragment, (_, prepared) in zip(self._training.fragments, states, strict=True):
            fragment.take_over(prepared)
        self._training.taken_over()
        return [name for name, _ in states]


def _digest_of(digests: Sequence[bytes]) -> bytes:
    """The digest of the states of all fragments as one; that of the state if there is one."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"shoal fragments" + b"".join(digests)).digest()


async def _all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all of this at once, as each takes its round trips, and to its end; then the first error is raised."""
    results = await asyncio.gather(*work, return_exceptions=True)
    if errors := [each for each in results if isinstance(each, BaseException)]:
        raise errors[0]
    return [each for each in results if not isinstance(each, BaseException)]


async def first_asked(participants: Sequence[Participant], timeout_s: float) -> list[Participant]:
    """Wait until an auxiliary peer is asked for something; returns the fragments concerned, none if time runs out.

    It has no batches to go on with: its thread would wait for one fragment while the others were merged.
    """
    at_end = all(each.at_end for each in participants)
    waits_for = [each for each in participants if each.at_end == at_end and not each.finished] or participants
    turns = {asyncio.create_task(each.turn.decide(timeout_s)): each for each in waits_for}
    try:
        done, _ = await asyncio.wait(turns, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return [turns[each] for each in done]
    finally:
        await asyncio.gather(*map(stopped, turns))


class _Fragment(msgspec.Struct):
    """One fragment in the plain values of a state of several."""

    state: Any
    training: Any
    tensors: Annotated[int, msgspec.Meta(ge=0)]


class Place(msgspec.Struct, frozen=True):
    """Where a run stands, as a state dict says it.

    Attributes:
        epoch, digest, samples: the name of the state.
        scheduled: the count of its schedule.
        fingerprint: a digest of what it holds; empty if other values stood in the place of the parameters.
        shared: epoch and samples of the last state that was shared.
        weights: a digest of the model's weights; empty as that of what it holds.
        merged: the anchors, if peers merge.
    """

    epoch: Epoch
    digest: str
    samples: Samples
    scheduled: Epoch
    fingerprint: str = ""
    shared: tuple[Epoch, Samples] = (0, 0)
    weights: str = ""
    merged: Any = None

    @property
    def name(self) -> StateName:
        """Of the state; raises `ValueError` if it has none."""
        return msgspec.convert([self.epoch, bytes.fromhex(self.digest), self.samples], StateName)
