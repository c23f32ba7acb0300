"""The samples of a peer: how fast it makes them, and how many go into the swarm's steps. Pure bookkeeping."""

from __future__ import annotations

from typing import NamedTuple

from shoal.events import duration

__all__ = ["Contribution", "Dropped", "RateMeter"]

_PERIOD_S, _NEW_SHARE = 0.5, 0.3

_LOST, _LOST_S = 5, 5.0
"""A peer is told if this number of states in a row, and this time, went by without its samples."""

_LOOKED_AT, _PART = 30, 5
"""The number of states that are looked at together. A peer is told if its samples count in no more than a fifth."""


_HOUR_S, _LEAST_S, _MUCH, _FEW_BATCHES = 3600.0, 60.0, 0.1, 2
"""A peer is told if it drops more than a tenth of what it computes in an hour, or in a whole run of a minute at least;
and once when it has dropped more than two batches: a newcomer computes its first one in vain."""


class Dropped(NamedTuple):
    """What a peer has computed, and how much of that went into no step.

    Attributes:
        samples: that went into none.
        computed: in all.
        seconds: the time in which that was.
        cut: those of these samples that were given to a round beyond what this peer may give at once.
    """

    samples: int
    computed: int
    seconds: float
    cut: int = 0


class RateMeter:
    """Measures the speed of a peer. It counts samples, from any thread; `measure` is called now and then.

    Attributes:
        rate: samples per second, smoothed over the last seconds; 0 before anything was measured.
        batches_per_s: as `rate`.
        processed: samples so far.
        batches: in how many batches.
    """

    def __init__(self) -> None:
        self.rate = self.batches_per_s = 0.0
        self.processed = self.batches = 0
        self._last: tuple[int, int, float] | None = None

    def count(self, samples: int) -> None:
        """A batch of these samples was processed, whether they counted for a step or not."""
        self.processed += samples
        self.batches += 1

    def measure(self, now: float) -> None:
        """Bring the rate up to date; `now` in seconds."""
        if self._last is None:
            self._last = self.processed, self.batches, now
        processed, batches, since = self._last
        if now - since >= _PERIOD_S:
            self.rate = _smoothed(self.rate, (self.processed - processed) / (now - since))
            self.batches_per_s = _smoothed(self.batches_per_s, (self.batches - batches) / (now - since))
            self._last = self.processed, self.batches, now


def _smoothed(before: float, now: float) -> float:
    return (1 - _NEW_SHARE) * before + _NEW_SHARE * now if before else now


class _Mark(NamedTuple):
    """The counts at a change of the state."""

    epoch: int
    contributed: int
    processed: int
    batches: int
    time: float


class Contribution:
    """Counts a peer's samples, and finds out that none of them count, or few.

    Attributes:
        contributed: samples in the steps that led to this peer's state: of what went into some parts of a step, the
            share of these. As of the last `settle`, as `in_vain`.
        in_vain: samples that were computed and are in none of them: their state was over before they came, or was given
            up for that of others, or the run was over, or this peer has left, or gave more at once than it may.
    """

    def __init__(self) -> None:
        self.contributed = self.in_vain = self._left_out = self._cut = 0
        self._last: _Mark | None = None
        self._by: str | None = None  # who took all steps of the states that were lost in a row, alone
        self._widest = 0
        self._since = self._begun = _Mark(0, 0, 0, 0, 0.0)
        self._told = False
        # States that ended with batches of ours: in vain since some counted last; since `_begun`, all and those of use.
        self._lost = self._states = self._used = 0
        self._hour: tuple[int, int, int, float] | None = None  # dropped, cut, processed and the time when it began
        self._told_first = False

    @property
    def dropped(self) -> int:
        """Samples that are in no step: those in vain, and those of batches that were left out."""
        return self.in_vain + self._left_out

    def leave_out(self, samples: int) -> None:
        """These samples go into no step, and no warning of lost ones is due.

        Their gradients cannot be summed, which `Notices.accumulated` tells; or the run was over when they came.
        """
        self._left_out += samples

    def first_dropped(self, *, processed: int, batches: int) -> bool:
        """Whether it is to be told that samples were dropped: true once."""
        if self._told_first or self.in_vain * batches <= _FEW_BATCHES * processed:
            return False
        self._told_first = True
        return True

    def much_dropped(self, *, processed: int, now: float, over: bool) -> Dropped | None:
        """What was dropped, if it is much; asked at each change of the state, after `state_changed`.

        Args:
            processed: samples that were computed so far.
            now: seconds.
            over: the run is over: it need not have taken an hour, but a minute.
        """
        if self._hour is None:
            self._hour = self.in_vain, self._cut, processed, now
        dropped, cut, computed, since = self._hour
        if now < since + (_LEAST_S if over else _HOUR_S):
            return None
        self._hour = self.in_vain, self._cut, processed, now
        samples, cut, computed = self.in_vain - dropped, self._cut - cut, processed - computed
        # What was held at the beginning of the hour may have been dropped in it.
        much = samples > _MUCH * computed > 0
        return Dropped(min(samples, computed), computed, now - since, cut) if much else None

    def was_cut(self, samples: int) -> None:
        """These samples were given to a round that counted, beyond what this peer may give at once."""
        self._cut += samples

    def settle(self, contributed: int, processed: int, held: int) -> None:
        """Of the samples `processed`, `contributed` are in the state, and `held` may still go into a step."""
        self.contributed = contributed
        # A batch is held before it is counted as computed, so another thread may see one too many.
        self.in_vain = max(0, processed - contributed - held)

    def state_changed(
        self,
        epoch: int,
        *,
        contributed: int,
        processed: int,
        batches: int,
        held: int,
        now: float,
        by: str | None = None,
    ) -> str | None:
        """The state has changed. Returns a warning for the user, once, if few of this peer's samples count, or none.

        Args:
            epoch: of the state.
            contributed: samples of this peer that are in it.
            processed: samples that were computed so far.
            batches: the number of their batches.
            held: samples that are accumulated for the next step.
            now: seconds.
            by: another peer that took the last step to this state alone; None if several did, or this one.
        """
        self.settle(contributed, processed, held)
        before, now_at = self._last, _Mark(epoch, self.contributed, processed, batches, now)
        self._last = now_at
        leap = 0 if before is None else epoch - before.epoch
        leaps, self._widest = leap > max(_LOST, 2 * self._widest), max(leap, self._widest)
        if before is None or leaps or self.contributed < before.contributed:
            # It was stopped, or parted from the others whose state it takes now: those epochs went by without it. What
            # it gives up with a branch of its own is told as that (see `Takeover`), and counts in no window.
            self._since = self._begun = now_at
            self._lost = self._states = self._used = 0
            return None
        used = self.contributed > before.contributed
        in_vain = not used and batches != before.batches
        if self._states >= _LOOKED_AT:
            self._begun, self._states, self._used = before, 0, 0
        if used:
            self._since, self._lost = now_at, 0
        elif in_vain:
            self._lost += 1  # once for epochs that went by together: a peer that was stopped missed them, and no more
            self._by = by if self._lost == 1 or self._by == by else None
        self._states += used or in_vain
        self._used += used
        few = self._states >= _LOOKED_AT and self._used * _PART <= self._states
        none = self._lost >= _LOST and now - self._since.time >= _LOST_S
        first = self._since if none else self._begun
        if self._told or not (few or none) or epoch <= first.epoch:  # states that were loaded are of no later epoch
            return None
        self._told = True
        return _why(first, now_at, self._by if none else None)


def _why(first: _Mark, last: _Mark, by: str | None) -> str:
    epochs, done, spent_s = last.epoch - first.epoch, last.batches - first.batches, last.time - first.time
    batch_s, epoch_s, counted = spent_s / done, spent_s / epochs, last.contributed - first.contributed
    numbers = f"a batch takes it {duration(batch_s)}, and an epoch of the swarm {duration(epoch_s)}"
    if by is not None:
        why = (
            f"{by} took the last steps alone, before this peer gave anything to them, and its state has more samples "
            "than this peer's. It does not hear what this peer says, or not in time: check the line between the two "
            "(`shoal doctor INVITE` on both machines). If another peer has the same identity (identity_path), only one "
            "of the two can take part"
        )
    elif batch_s < epoch_s / 2:
        why = (
            f"{numbers}, so its batches are short enough, and the rounds go on without it. `shoal debug dump PID` "
            "shows why; `shoal doctor INVITE` checks its line, its descriptors and its memory. If another peer has "
            "the same identity (identity_path), only one of the two can take part"
        )
    else:
        why = (
            f"{numbers}, so its state is {'mostly ' if counted else ''}over before the batch is done. Give this "
            "peer smaller batches, or raise target_batch_size (the strategy's every) on all, so that an epoch lasts "
            "longer"
        )
    few = f"only {counted} of the {last.processed - first.processed}" if counted else "none of the"
    return f"{few} samples that this peer computed in the last {epochs} epochs count: {why}"
