"""The state that a peer trains: its name, the steps that led to it, and the change that the trainer makes to it next.

The parameters, the name and the steps change together, under the lock of the parameters. So whoever holds the lock sees
one state. A change is made ready in the loop, and the trainer takes it in its own thread: see `Update`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from shoal.averaging import TensorLock
from shoal.averaging.core import PeerCore
from shoal.base.peer import PeerID
from shoal.base.thread_state import forget_casts
from shoal.run.decide.agreement import Agreement, Deal, deal_to
from shoal.run.decide.committed import Committed
from shoal.run.decide.lineage import Apart, Gives, Lineage, Mark
from shoal.run.decide.state_name import UNDECIDED, StateName
from shoal.run.join.shared_state import share
from shoal.run.report.notices import Notices
from shoal.run.view.progress import NO_STATE, StateKey
from shoal.state.wire import SharedState
from shoal.train.training_state import TrainingState

__all__ = ["OwnState", "Replaced", "Update"]

_LOCK_WITHIN_S = 60.0
"""The longest wait for the parameters. What needed them is left out then, or tried again."""

_DEALS = 16
"""The number of deals that are kept for a sampler: a loop may call `step` several times between two of its draws."""


@dataclass(slots=True, kw_only=True)
class Update:
    """The change that the trainer makes to the parameters in STEPPING: the swarm's step, or an average of states.

    Attributes:
        apply: changes the parameters; called under their lock.
        name: of the state afterwards.
        committed: the last steps that led to it.
        peers: that take it.
        samples: that go into the state by it.
        is_step: whether it is the swarm's step.
        gave: samples of this peer that go into the state by it.
        dealt: the first number that the step deals to this peer, and the first after these; none in an average.
        taken: whether it was applied, or begun and not taken to its end.
    """

    apply: Callable[[], None]
    name: StateName
    committed: Committed
    peers: int
    samples: int
    is_step: bool = True
    gave: int = 0
    dealt: tuple[int, int] = (0, 0)
    taken: bool = False


class Replaced(NamedTuple):
    """The state that a loaded checkpoint replaces: see `OwnState`."""

    name: StateName
    committed: Committed
    before: bytes
    is_average: bool
    lineage: Lineage


class OwnState:
    """The state of one peer. Loop only, but for `step`, `loading` and `loaded`.

    Args:
        core: this peer.
        training: what it trains.
        lock: of accumulators, parameters and optimizer.
        notices: say who keeps the lock for long.
        auxiliary: this peer has no data, and its beginning is nothing to go on from.

    Attributes:
        rank: of its beginning, see `StateName.rank_among`.
        name: of the state.
        committed: the last steps that led to it.
        before: the digest of the state before the last of them; empty if it is not known.
        lineage: the way to it, and how many samples of this peer are in it.
        gives: what this peer gave to rounds.
        dealt: the samples that the last steps taken here dealt to this peer.
        shared: whether other peers hold it too, as far as this one knows.
        floor: the last state that was shared.
        update: the change that the trainer makes next; None if there is none.
        is_average: whether the state is an average of states, and not what a step has led to.
        followed: the last state that others have still to average: this peer took their step, or downloaded the state
            to which it led, and is no member of the average.
        written: the beginning whose weights this program has loaded or written since it was first named; None: none.
    """

    def __init__(
        self, core: PeerCore, training: TrainingState, lock: TensorLock, notices: Notices, *, auxiliary: bool = False
    ) -> None:
        self.training, self.lock, self.rank = training, lock, UNDECIDED
        self._core, self._notices, self._auxiliary = core, notices, auxiliary
        self.name = self._beginning()
        self.committed, self.before = Committed(), b""
        self.lineage, self.gives = Lineage(), Gives()
        self._at_floor = 0  # samples of this peer in the floor
        self.dealt: tuple[Deal, ...] = ()
        self.shared = self.is_average = False
        self.floor = NO_STATE
        self.update: Update | None = None
        self.followed: StateName | None = None
        self.written: StateName | None = None
        self._mended: tuple[StateName, frozenset[PeerID]] | None = None  # a state that a check found to be wrong

    def _beginning(self) -> StateName:
        training, fingerprint = self.training, self.training.fingerprint()
        if self._auxiliary:
            return StateName.of_auxiliary(fingerprint)
        local = training.local
        model = local.fingerprint_of_model()
        return StateName.genesis(fingerprint, local.kept.steps_taken, model=model, rank=self.rank)

    async def decide_rank(self, rank: int) -> None:
        """The others are known: name the beginning by its rank. Not if the lock of the parameters does not come."""
        async with self.hold() as holds:  # a checkpoint may be loaded now
            if holds:
                self.rank = rank
                self.name = self._ranked(self.name)
                self.written = self.written and self._ranked(self.written)

    def _ranked(self, name: StateName) -> StateName:
        """A beginning gets the rank of this one, if it was named before that was decided."""
        return name.ranked(self.rank) if name.epoch == 0 and name.digest[0] == UNDECIDED else name

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[bool]:
        """Hold the lock of the parameters; yields False, and says who has it, if it does not come in time."""
        async with self.lock.acquire(_LOCK_WITHIN_S) as has_come:
            if not has_come:
                self._notices.held(self.lock.holder, _LOCK_WITHIN_S)
            yield has_come

    def is_shared(self) -> None:
        """Other peers hold this state, too."""
        self.shared, self.floor, self._at_floor = True, self.name.key, self.lineage.contributed

    def steps_alone(self) -> None:
        """This peer is about to take a step alone: nobody else holds the state after it."""
        self.shared = False

    def go_back_to(self, worse: StateKey) -> None:
        """This peer is to take over a worse state than its own: nobody can have that from it."""
        self.shared, self.floor = False, worse

    @property
    def with_others(self) -> StateKey:
        """The last state that was shared: this one, or the floor."""
        return self.name.key if self.shared else self.floor

    def export(self) -> SharedState:
        """The state as a donor gives it (under `lock`)."""
        history = self.lineage.history
        return share(
            self.training, self.name, self.committed, before=self.before, history=history, average=self.is_average
        )

    def prepare(
        self,
        apply: Callable[[], None],
        name: StateName,
        peers: int,
        agreement: Agreement | None = None,
        *,
        gave: int = 0,
    ) -> Update:
        """Make a change ready for the trainer; returns it.

        Args:
            apply: makes it.
            name: of the state afterwards.
            peers: that make it.
            agreement: of its members, if it is the swarm's step; None for an average of states.
            gave: samples of this peer that go into the state by it.
        """
        committed, dealt = self.committed, (0, 0)
        if agreement is not None:
            committed = committed.after(agreement.contributors, self.name.epoch, agreement.options)
            dealt = deal_to(self._core.peer_id, agreement.contributors, self.name.samples, name.samples)
        self.update = Update(
            apply=apply,
            name=name,
            committed=committed,
            peers=peers,
            samples=name.samples - self.name.samples,
            is_step=agreement is not None,
            gave=gave,
            dealt=dealt,
        )
        return self.update

    def follow(self, update: Update) -> None:
        """This change, which others have made, is taken next."""
        self.update = update

    def has_followed(self, update: Update) -> None:
        """That change was taken."""
        self.is_shared()
        self.followed = update.name if update.is_step else None

    def drop_update(self) -> None:
        """No change waits for the trainer any more: it was taken, or belongs to a state that is gone."""
        self.update = None

    def step(self) -> None:
        """Take the update, and name the state anew (trainer, in its own thread, under `lock`).

        It is taken once. An interruption leaves parameters that no other peer has. They get a name of their own, and
        any proper name is better. The same holds after an error of the optimizer; such a step does not count.
        """
        update = self.update
        if update is None or update.taken:
            return
        chance, me = self._core.env.rng.randbytes(16), self._core.peer_id.to_bytes()
        interrupted = self.name.after_interruption(chance, me, step=update.is_step)
        failed = self.name.after_difference(chance, me)
        dealt = self.dealt
        if update.dealt[0] < update.dealt[1]:
            dealt = (*dealt[1 - _DEALS :], Deal(dealt[-1].number + 1 if dealt else 1, *update.dealt))
        training, epoch, lineage = self.training, self.training.epoch, self.lineage.after(self.name, update.gave)
        passed = self.lineage.after(self.name, 0)  # others may go on from there, with what this peer gave
        try:
            with training.changing():
                update.apply()
        finally:
            forget_casts()
            # Attributes alone: no interrupt comes in between.
            if training.whole:
                self.is_average = not update.is_step
                self.before = self.name.digest if update.is_step else self.before
                self.name, self.committed, self.dealt, update.taken = update.name, update.committed, dealt, True
                self.lineage = lineage
            elif update.is_step and training.step_error is not None:
                self.name, self.before, self.is_average, update.taken = failed, b"", False, True
                self.lineage = passed
            elif training.epoch != epoch or not update.is_step:
                self.is_average, self.before = False, b""
                self.name, self.committed, update.taken = interrupted, update.committed, True
                self.lineage = lineage if update.is_step else passed

    def differs(self, holders: frozenset[PeerID] = frozenset()) -> None:
        """The parameters are not those of this name, or soon will not be (under `lock`): they get a name of their own.

        Any proper name of their epoch is better.

        Args:
            holders: a check has found that these peers hold those of the name.
        """
        self.lineage = self.lineage.after(self.name, 0)
        self.name = self.name.after_difference(self._core.env.rng.randbytes(16), self._core.peer_id.to_bytes())
        self._mended = self.name, holders

    @property
    def mend_from(self) -> frozenset[PeerID]:
        """The only peers whose state is to replace this one, as a check has found it to be wrong; empty: it has not."""
        return self._mended[1] if self._mended is not None and self._mended[0] == self.name else frozenset()

    def take_over(
        self, name: StateName, committed: Committed, before: bytes, history: Sequence[bytes], *, average: bool
    ) -> None:
        """A state of others has taken the place of the one here (under `lock`): name it.

        Args:
            name: of the state.
            committed: the last steps that led to it.
            before: the digest of the state before the last of them; empty if it is not known.
            history: the digests of the states that led to it, as far as they are known, the last one last.
            average: whether it is an average of states.
        """
        contributed = self._contributed_in(name, history, committed)
        self.lineage = self.lineage.taken_over(self.name, history, contributed)
        self.name, self.committed, self.before, self.is_average = name, committed, before, average
        self.followed, self.update = None if average else name, None
        self.is_shared()

    def apart_from(self, name: StateName, history: Sequence[bytes]) -> Apart | None:
        """What is given up if a state of others takes the place of the one here; see `take_over` for the arguments.

        Returns:
            None if none of the states is known that both came from: this peer was away for long, or apart for long.
        """
        last = self.lineage.last_held(self.name, (*history, name.digest))
        if last is None and not self.shared:  # they have none of what it has trained alone
            last = Mark(b"", self.floor.epoch, self.floor.samples, self._at_floor)
        return None if last is None else self.lineage.since(self.name, last)

    def _contributed_in(self, name: StateName, history: Sequence[bytes], committed: Committed) -> int:
        """How many samples of this peer are in a state that takes the place of the one here."""
        if (last := self.lineage.last_held(self.name, (*history, name.digest))) is not None:
            recorded = committed.samples_of(self._core.peer_id, last.epoch, name.epoch)
            return last.contributed + self.gives.counted(last.digest, recorded)
        # It has gone on for long since.
        return self.lineage.contributed if self.shared else self._at_floor

    def loading(self) -> Replaced:
        """The user loads a checkpoint: forget the state that is here (under `lock`, in the trainer's thread).

        Until `loaded` names the new one, what is here has a name of its own, which is worse than any of its epoch. So
        if the loading is interrupted, nobody is given half of a state under the name of the one before.

        Returns:
            What is forgotten, for `loaded`.
        """
        replaced = Replaced(self.name, self.committed, self.before, self.is_average, self.lineage)
        self.differs()
        self.committed, self.before, self.is_average, self.update = Committed(), b"", False, None
        self.training.discard()
        self.training.weights.forget()
        return replaced

    def loaded(
        self, replaced: Replaced, saved: StateName | None, *, unchanged: bool = False, floor: StateKey = NO_STATE
    ) -> None:
        """The user has loaded a checkpoint: name the state anew (under `lock`, in the trainer's thread).

        Args:
            replaced: what `loading` gave.
            saved: the name that it was saved under; None if it has none.
            unchanged: the state now is the one that was saved, and has its name.
            floor: the last state before it that was shared, as far as that was saved.
        """
        before = replaced.name
        self.training.weights.note()
        if saved is not None and unchanged:
            name = self._ranked(saved)
        elif saved is None and before.epoch == 0:
            name = self._beginning()
            self.written = None if name == before else name
        else:
            name = (saved or before).after_loading(self.training.fingerprint())
        if name == before:
            self.name, self.committed, self.before, self.is_average, self.lineage = replaced
        else:
            if saved is not None:
                contributed = self._contributed_in(saved, (), Committed())
                self.lineage = self.lineage.taken_over(self.name, (saved.digest,), contributed)
            self.name = name
            self.floor = max(self.floor, floor)
