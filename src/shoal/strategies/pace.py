"""When peers meet: how far each of them is on its way to the next step of the swarm, and whether there is enough.

A peer names one whole number in its progress (`Progress.done`). The pace of its strategy says what is counted
(`Pace.counts_samples`): samples that were accumulated, or thousandths of the way to the next merge. Pure: no clock, no
network.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.errors import ConfigError
from shoal.protocol.wire import Progress

__all__ = ["Pace", "SamplesPace", "SwarmSeen"]

_SOONER = 0.9
"""A step that waits for others takes at most this part of the one before."""


class SwarmSeen(Protocol):
    """What a pace sees of the swarm. `shoal.run.view.progress.SwarmView` has all of it.

    Attributes:
        peers: all peers that are alive, this one first.
        others: the last words of the others.
        together: the peers at this peer's state, and those on their way there; this peer is among them.
        coming: those of `together` that are on their way.
        own: what this peer names.
        done: what all peers at this peer's state name together.
        rate: samples per second of all peers of `together`.
        trains: whether this peer trains.
        ahead: one place has most of what is named, and others are at their first batch since this state.
        contributors: the peers that contributed to the last steps.
        absent: peers that no round waits for.
        calling: the others at this peer's state that say that there is enough for the next step.
        log: of a view and later ones, while all else is the same, this is the same list: the peers whose words were
            taken in meanwhile are added to it.
    """

    @property
    def peers(self) -> Sequence[PeerID]: ...
    @property
    def others(self) -> Mapping[PeerID, Progress]: ...
    @property
    def together(self) -> Collection[PeerID]: ...
    @property
    def coming(self) -> Collection[PeerID]: ...
    @property
    def own(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def trains(self) -> bool: ...
    @property
    def ahead(self) -> bool: ...
    @property
    def contributors(self) -> Collection[PeerID]: ...
    @property
    def absent(self) -> Collection[PeerID]: ...
    @property
    def calling(self) -> Collection[PeerID]: ...
    @property
    def log(self) -> list[PeerID] | None: ...


class Pace(ABC):
    """One peer's pace. All times are local, in seconds.

    Attributes:
        counts_samples: the unit of `Progress.done`. True: samples, so peers can be held to what they have given. False:
            thousandths of the way to the next merge.
        near_at: before this number of batches no step is near, as far as it is known, and nothing follows from a batch.
    """

    counts_samples = True
    near_at = 0

    @abstractmethod
    def done(self, samples: int, batches: int, now: float, epoch: int) -> int:
        """What this peer names: it stands for what was trained since its state of this epoch began.

        The trainer may just have taken a step of which the pace is not told yet.
        """

    @abstractmethod
    def target(self, view: SwarmSeen) -> int:
        """About how much all peers of the view together name when there is enough."""

    @abstractmethod
    def rate(self, view: SwarmSeen, batches_per_s: float) -> float:
        """About how much more all peers together name a second later, if this one trains so many batches."""

    @abstractmethod
    def enough(self, view: SwarmSeen) -> bool:
        """Whether there is enough for a step, as far as it is known."""

    @abstractmethod
    def reaches(self, samples: int, batches: int, epoch: int) -> bool:
        """Whether there is enough, by what this peer has trained now, and what the others named in the last view."""

    def is_news(self, batches: int) -> bool:
        """Whether what was trained since the last look is worth one: thousands of short batches are not."""
        return True

    def missing(self, own: int, view: SwarmSeen) -> int:
        """How many more peers that train it takes for a step, though this one has done enough (`own`)."""
        return 0

    def due_s(self, now: float) -> float | None:
        """The seconds until it is time for a step, whatever is trained until then; None if time does not matter."""
        return None

    def hold_s(self, batches: int, now: float, epoch: int) -> float:
        """A trainer that has just ended its batch of this number waits for so long before it begins another one.

        A step may be due before that batch is over, and where it would be lost it is not begun. 0: the trainer goes on.
        Any thread may ask.
        """
        return 0.0

    def grace_s(self, now: float) -> float:
        """How long a round in which this peer takes part waits for its trainer, if that is in the middle of a batch."""
        return 0.0

    def patience_s(self) -> float:
        """The longest wait for peers that are here and do not come to the round, since the last one came.

        Infinite: it is the search's own.
        """
        return math.inf

    def since_last_s(self, now: float) -> float:
        """The time since the last step, of which a round may take a part to wait for slow lines; 0 for none."""
        return 0.0

    def round_took(self, seconds: float) -> None:  # noqa: B027 (not all paces care)
        """A round took so long."""

    def state_changed(self, epoch: int, now: float) -> None:  # noqa: B027 (not all paces care)
        """This peer has another state, of this epoch, since `now`."""

    def ends_at(self, epoch: int | None, *, others_left: bool) -> None:  # noqa: B027 (not all paces care)
        """The run ends at this epoch, as far as it is known; None: nobody knows yet.

        If the others have ended it and left, this peer goes there alone: no quorum comes any more.
        """


class SamplesPace(Pace):
    """Peers name the samples that they have accumulated; all together make `target_batch_size`.

    Claims are free, and a machine may be far faster than the others. So a step that one place has filled, while others
    are at their first batch since the last one, comes at most a tenth sooner than that one did: their samples are in
    it, unless they are slower than a step for long. What is trained meanwhile counts in it.

    Args:
        target_batch_size: samples of the whole swarm in one step.

    Raises:
        ConfigError: it is missing, or less than 1.
    """

    def __init__(self, target_batch_size: int | None) -> None:
        if target_batch_size is None:
            raise ConfigError("target_batch_size is missing: the samples of the whole swarm in one step")
        if target_batch_size < 1:
            raise ConfigError(f"target_batch_size must be at least 1, got {target_batch_size}")
        self._target, self._others = target_batch_size, 0
        self._began, self._now, self._lasted_s = math.inf, 0.0, 0.0
        self._epoch, self._held = 0, False

    def done(self, samples: int, batches: int, now: float, epoch: int) -> int:
        self._now = now
        return samples

    def target(self, view: SwarmSeen) -> int:
        return self._target

    def rate(self, view: SwarmSeen, batches_per_s: float) -> float:
        return view.rate

    def enough(self, view: SwarmSeen) -> bool:
        self._others = view.done - view.own
        full = view.done >= self._target
        self._held = full and view.ahead and self._now < self._begins_at
        if self._held:
            sometimes("a step waits for others that are at their first batch")
        return full and not self._held

    @property
    def _begins_at(self) -> float:
        """When this step is due at the latest, once it is full."""
        return self._began + _SOONER * self._lasted_s

    def reaches(self, samples: int, batches: int, epoch: int) -> bool:
        return samples + self._others >= self._target and not self._held

    def due_s(self, now: float) -> float | None:
        return max(0.0, self._begins_at - now) if self._held else None

    def state_changed(self, epoch: int, now: float) -> None:
        self._lasted_s = max(0.0, now - self._began) if epoch == self._epoch + 1 else 0.0
        self._epoch, self._began, self._held = epoch, now, False
