"""The pace of a run: how far each peer is on its way to the next swarm step, and when there is enough for it.

A peer names one number in its progress (`Progress.samples`). With synchronous training it is the samples that it has
accumulated, and there are enough when all of them together are `target_batch_size`. With a strategy that merges it is
how far the peer is, in thousandths: of its batches, or of the time between two merges. Pure: no clock, no network.
"""

from __future__ import annotations

import math
from typing import Protocol

from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.errors import ConfigError
from shoal.protocol.wire import Progress
from shoal.run.view.contribution import RateMeter
from shoal.run.view.progress import SwarmView
from shoal.strategies import Merging

__all__ = ["LOOKS", "WAY", "MergePace", "Pace", "SamplesPace"]

WAY = 1000
"""A peer that has trained for long enough since the last merge names this number, or a larger one."""


_SOONER = 0.9
"""A step that waits for others takes at most this part of the one before."""

_MOST_WAYS = 4
"""A peer counts for so many ways at most, whatever it claims. One that does not count itself waits for so many at most:
others may claim that they do nothing."""

_LEAST_WAY = 0.75
"""A way by time is at least this part of a whole one."""

_MARGIN = 1.1
"""Some batches take longer than the mean one."""

_GRACES = 10
"""By time a peer waits for its trainer for this part of the time between two merges."""

LOOKS = 50
"""So often at least a peer that merges looks at the swarm between two merges, and is looked at."""

_LEAST_GRACE_S = 0.5
"""Processes of a busy machine come this late, however short a merge is."""


class Pace(Protocol):
    """One peer's pace."""

    def done(self, samples: int, batches: int, now: float, epoch: int) -> int:
        """What this peer names: so much was trained since its state of this epoch began.

        `now` is local time, seconds. The trainer may just have taken a step of which the pace is not told yet.
        """

    def target(self, view: SwarmView) -> int:
        """About how much all peers of the view together name when there is enough."""

    def rate(self, view: SwarmView, speed: RateMeter) -> float:
        """About how much more all peers together name a second later; `speed` is this peer's."""

    def enough(self, view: SwarmView) -> bool:
        """Whether there is enough for a step, as far as it is known."""

    def reaches(self, samples: int, batches: int, epoch: int) -> bool:
        """Whether there is enough, by what this peer has trained now, and what the others named in the last view."""

    def missing(self, own: int, view: SwarmView) -> int:
        """How many more peers that train it takes for a step, though this one has done enough (`own`)."""

    def due_s(self, now: float) -> float | None:
        """The seconds until it is time for a step, whatever is trained until then; None if time does not matter."""

    def hold_s(self, batches: int, now: float, epoch: int) -> float:
        """A trainer that has just ended its batch of this number waits for so long before it begins another one.

        A step may be due before that batch is over, and where peers wait for merges it would be lost. Seconds; 0: it
        goes on. Any thread may ask.
        """

    def grace_s(self, now: float) -> float:
        """So long a round in which this peer takes part waits for its trainer, if that is in the middle of a batch."""

    def patience_s(self) -> float:
        """The longest wait for peers that are here and do not come to the round, since the last one came, seconds."""

    def round_took(self, seconds: float) -> None:
        """A round took so long."""

    def way_s(self, now: float) -> float:
        """The time since the last step, of which a round may take a part to wait for slow lines; 0 for none."""

    def state_changed(self, epoch: int, now: float) -> None:
        """This peer has another state, of this epoch, since `now`."""

    def ends_at(self, epoch: int | None, *, left_behind: bool) -> None:
        """The run ends at this epoch, as far as it is known; None: nobody knows yet.

        If the others have ended it and left, this peer goes there alone: no quorum comes any more.
        """


class SamplesPace:
    """The pace of synchronous training.

    Claims are free, and a machine may be far faster than the others. So a step that one place has filled, while others
    are at their first batch since the last one, comes at most a tenth sooner than that one did: their samples are in
    it, unless they are slower than a step for long. What is trained meanwhile counts in it.

    Args:
        target_batch_size: samples of the whole swarm in one step.
    """

    def __init__(self, target_batch_size: int) -> None:
        if target_batch_size < 1:
            raise ConfigError(f"target_batch_size must be at least 1, got {target_batch_size}")
        self._target, self._others = target_batch_size, 0
        self._began, self._now, self._lasted_s = math.inf, 0.0, 0.0
        self._epoch, self._waits = 0, False

    def done(self, samples: int, batches: int, now: float, epoch: int) -> int:
        """See `Pace`."""
        self._now = now
        return samples

    def target(self, view: SwarmView) -> int:
        """See `Pace`."""
        return self._target

    def rate(self, view: SwarmView, speed: RateMeter) -> float:
        """See `Pace`."""
        return view.rate

    def enough(self, view: SwarmView) -> bool:
        """See `Pace`."""
        self._others = view.samples - view.own
        full = view.samples >= self._target
        self._waits = full and view.ahead and self._now < self._begins_at
        if self._waits:
            sometimes("a step waits for others that are at their first batch")
        return full and not self._waits

    @property
    def _begins_at(self) -> float:
        """When this step is due at the latest, once it is full."""
        return self._began + _SOONER * self._lasted_s

    def reaches(self, samples: int, batches: int, epoch: int) -> bool:
        """See `Pace`."""
        return samples + self._others >= self._target and not self._waits

    def missing(self, own: int, view: SwarmView) -> int:
        """See `Pace`."""
        return 0

    def due_s(self, now: float) -> float | None:
        """See `Pace`."""
        return max(0.0, self._begins_at - now) if self._waits else None

    def hold_s(self, batches: int, now: float, epoch: int) -> float:
        """See `Pace`: a batch that comes too late is dropped, or goes into the next step."""
        return 0.0

    def grace_s(self, now: float) -> float:
        """See `Pace`."""
        return 0.0

    def patience_s(self) -> float:
        """See `Pace`: it is the search's own."""
        return math.inf

    def round_took(self, seconds: float) -> None:
        """See `Pace`."""

    def way_s(self, now: float) -> float:
        """See `Pace`: rounds follow each other closely."""
        return 0.0

    def state_changed(self, epoch: int, now: float) -> None:
        """See `Pace`."""
        self._lasted_s = max(0.0, now - self._began) if epoch == self._epoch + 1 else 0.0
        self._epoch, self._began, self._waits = epoch, now, False

    def ends_at(self, epoch: int | None, *, left_behind: bool) -> None:
        """See `Pace`."""


def _trains(said: Progress) -> bool:
    return said.samples > 0 or said.rate > 0


def _done(view: SwarmView, peer: PeerID) -> int | None:
    """How far another peer is; None if it does not count."""
    said = view.others.get(peer)  # None: it was lost
    if said is None or peer not in view.together or not _trains(said):
        return None
    return 0 if peer in view.coming else min(said.samples, _MOST_WAYS * WAY)


class _Way:
    """How far each of some peers is.

    Attributes:
        done: thousandths, by peer.
        count: how many count, after `sum_up`.
        far: how far they are in all.
        there: how many of them have gone the whole way.
    """

    def __init__(self) -> None:
        self.done: dict[PeerID, int] = {}
        self.count = self.far = self.there = self._far = self._there = 0

    def set(self, peer: PeerID, done: int | None) -> None:
        """A peer is so far; None: it does not count."""
        before = self.done.pop(peer, None)
        if before is not None:
            self._far, self._there = self._far - before, self._there - (before >= WAY)
        if done is not None:
            self.done[peer] = done
            self._far, self._there = self._far + done, self._there + (done >= WAY)

    def is_among(self, most: int, peer: PeerID) -> bool:
        """Whether another peer beside these is among the first `most` of all."""
        return sum(each < peer for each in self.done) < most

    def sum_up(self, most: int | None = None) -> None:
        """Count all of them; of more than `most` the first ones, whose `there` does not say which of them are."""
        self.count, self.far, self.there = len(self.done), self._far, self._there
        if most is not None and self.count > most:
            self.count, self.far = most, sum(self.done[peer] for peer in sorted(self.done)[:most])


class MergePace:
    """The pace of a fragment of the model, which is merged now and then.

    Strangers, that have not contributed to the last merges, count for no more peers than the contributors that are
    here; the two first ones where none is. All peers count the same ones, and come to a merge together. To a quorum
    strangers add no more than these do, or what is lacking if these are too few for it. Peers that no round waits for
    do not count, unless a quorum cannot be had without them: two peers that wait for each other no more would each stay
    alone otherwise.

    Args:
        merging: the way in which peers merge.
        fragment: the number of the fragment. The first merges of the fragments are spread over the way, and the last
            ones come together: then all that was trained is in them. (By steps `OuterTrainingState.batches` sees to
            that.) Only the first fragment goes the whole way from the beginning, so its merges end the epochs of the
            model: what it tells holds for all of it.
        first: the pace of the first fragment, if this is of another one. By time the fragments keep their places
            beside it: all that are overdue, as a quorum was lacking, are merged at the same moment.

    Attributes:
        epoch: of the state that this peer has.
        began: when its way began, local time, seconds: as it got that state, or so much later or earlier as brings the
            fragment back to its place beside the first one.
        model: the paces of all fragments of the model, the first one first.
    """

    def __init__(self, merging: Merging, fragment: int = 0, first: MergePace | None = None) -> None:
        self._merging, self._first = merging, first
        self.model: list[MergePace] = [] if first is None else first.model
        self.model.append(self)
        self._ahead = WAY * fragment // merging.fragments
        self.began, self.epoch = math.inf, 0
        self._end: int | None = None
        self._quorum = merging.quorum
        self._called = False  # another peer says that it is time
        self._waits = True  # nobody has trained a batch yet, as far as it is known
        self._log: list[PeerID] | None = None  # of the last view, of which so many words were taken in
        self._taken = 0
        self._known, self._strange, self._absent = _Way(), _Way(), _Way()
        self._merge_s = 0.0
        self._trains, self._enough, self._counts = True, False, True

    def done(self, samples: int, batches: int, now: float, epoch: int) -> int:
        """See `Pace`."""
        if self._merging.steps is not None:
            return max(0, self._begins_at(epoch) + WAY * batches // self._merging.steps)
        if epoch != self.epoch:  # what is known of the time is of the way before: on it, others would merge again
            return min(1, batches)
        # The first batch may come long after the optimizer was made: all first merges would be due then.
        self._waits = self._waits and not batches
        if self._waits:
            self.began = now
        # It is not told all the time how late it is: a peer says when it is time, and then it is for all.
        # Before its first batch a peer calls nobody: a merge of nothing fails.
        return WAY if self._called or (batches and self.left_s(now) <= 0) else min(1, batches)

    def left_s(self, now: float) -> float:
        """The seconds until the next merge is due, if merges go by time; less than 0 if it is overdue."""
        if not self._is_last(self.epoch):
            return self.way_left_s(now)
        # All last merges come when that of the first fragment is due, and after all others of each fragment.
        first, seconds = self.model[0], self._merging.seconds or 0.0
        left_s = 0.0 if first.merges_left == 0 else (first if first.merges_left else self).way_left_s(now)
        for each in self.model:
            if (merges := each.merges_left or 0) > 1:
                left_s = max(left_s, max(0.0, each.way_left_s(now)) + seconds * (merges - 1))
        return left_s

    def way_left_s(self, now: float) -> float:
        """The seconds until this fragment has gone its way, if merges go by time, whatever the others have done."""
        assert self._merging.seconds is not None
        return self.began + self._merging.seconds * (WAY - self._begins_at(self.epoch)) / WAY - now

    @property
    def merges_left(self) -> int | None:
        """How many merges of this fragment there are until the run ends; None if that is not known."""
        return None if self._end is None else max(0, self._end - self.epoch)

    def _begins_at(self, epoch: int) -> int:
        """The fragment is so far ahead on its way: the first way is shorter, unless it is the last one, too."""
        return self._ahead if epoch == 0 and self._end != 1 else 0

    def _is_last(self, epoch: int) -> bool:
        """Whether the next merge from this epoch is the last one of the run, as far as it is known."""
        return self._end == epoch + 1

    def target(self, view: SwarmView) -> int:
        """See `Pace`."""
        return WAY * (self._counts + self._others)

    def rate(self, view: SwarmView, speed: RateMeter) -> float:
        """See `Pace`: the others are taken to be as fast as this peer."""
        own = speed.batches_per_s / self._merging.steps if self._merging.steps else 1 / (self._merging.seconds or 1)
        return own * self.target(view)

    @property
    def _others(self) -> int:
        """How many others count."""
        return self._known.count + self._strange.count

    def enough(self, view: SwarmView) -> bool:
        """See `Pace`."""
        known, strange, absent = self._known, self._strange, self._absent
        if view.log is not None and view.log is self._log:  # a swarm of a thousand is looked at all the time
            words = view.log[self._taken :]
        else:
            known, strange, absent, words = _Way(), _Way(), _Way(), list(view.others)
        self._log, self._taken = view.log, len(view.log or ())
        for peer in words:
            way = known if not view.contributors or peer in view.contributors else strange
            way = absent if peer in view.absent else way
            way.set(peer, _done(view, peer))
        known.sum_up()
        absent.sum_up()
        counts, most = True, max(1 + known.count, self._lacking(known))
        me = view.peers[0]
        if self._quorum is None and view.contributors and me not in view.contributors:  # a stranger itself
            among = known.count or 2  # as a contributor counts them; without one as a peer that counts itself
            counts = strange.is_among(among, me)
            most = among - counts
        strange.sum_up(most)
        # Last, as other threads ask.
        self._known, self._strange, self._absent, self._counts = known, strange, absent, counts
        if self._merging.seconds is not None:
            self._called = self._called or known.there > 0
            self._waits = self._waits and not (known.far or strange.far)
        self._trains = view.trains
        self._enough = self._reaches(view.own)
        return self._enough

    def _lacking(self, known: _Way) -> int:
        """How many strangers a quorum takes, if all others and this peer are in it."""
        return max(0, (self._quorum or 0) - 1 - known.count)

    def reaches(self, samples: int, batches: int, epoch: int) -> bool:
        """See `Pace`."""
        if self._merging.steps is None:
            return self._enough and epoch == self.epoch
        return self._reaches(self.done(samples, batches, 0.0, epoch))

    def _reaches(self, own: int) -> bool:
        if self._quorum is not None:
            there, more = (own >= WAY) + self._known.there, self._strange.there
            if 1 + self._others < self._quorum:
                more += self._absent.there
            return there + min(more, max(there, self._lacking(self._known))) >= self._quorum
        if self._merging.seconds is not None:
            return own >= WAY
        if not self._counts and own >= _MOST_WAYS * WAY:
            return True
        # All see the same merge as due: a peer whose batches are worth nothing counts for nobody, nor for itself, and
        # a stranger counts for itself if it does for the contributors.
        counts = self._counts and (own > 0 or self._trains)
        count = self._others + counts
        return count > 0 and own * counts + self._known.far + self._strange.far >= WAY * count

    def missing(self, own: int, view: SwarmView) -> int:
        """See `Pace`. Peers at other states are not missing: they, or this one, are on the way to the better state."""
        if self._quorum is None or own < WAY:
            return 0
        return max(0, self._quorum - 1 - sum(map(_trains, view.others.values())))

    def due_s(self, now: float) -> float | None:
        """See `Pace`."""
        if self._merging.seconds is None or (left_s := self.left_s(now)) <= 0:
            return None
        return left_s

    def hold_s(self, batches: int, now: float, epoch: int) -> float:
        """See `Pace`. Once the batches that others have under way may be the last ones, it is the time of a batch.

        So peers of equal speed train equally many batches, and none of them is lost. Else a peer waits in vain for one
        batch at most, as it would lose one at most by going on.
        """
        waits = self._merging.waits or (self._first is None and self._is_last(epoch))
        if not waits or not batches or epoch != self.epoch:
            return 0.0
        # On the first way by time the clock starts when a batch is over.
        counted = batches - (epoch == 0 and self._merging.steps is None)
        batch_s = self.way_s(now) / max(1, counted)
        if self._merging.steps is None:
            left_s = self.left_s(now)
            return left_s if 0 < left_s < _MARGIN * batch_s else 0.0
        own = self.done(0, batches, now, epoch)
        return batch_s if own >= WAY and self._may_be_due(own) else 0.0

    def grace_s(self, now: float) -> float:
        """See `Pace`: where peers wait for merges a batch that comes later is lost. It is what the mean batch takes.

        It is the same with the last merge of each fragment.
        """
        if not (self._merging.waits or self._is_last(self.epoch)):
            return 0.0
        return self.way_s(now) / (self._merging.steps or _GRACES)

    def _may_be_due(self, own: int) -> bool:
        """Whether a merge is due as soon as each of the others that are on their way has ended a batch or two."""
        steps, under_way = self._merging.steps or 1, self._others - self._known.there - self._strange.there
        if self._quorum is not None:
            return 1 + self._others >= self._quorum
        # Of a long way not each batch is told.
        batch = math.ceil(WAY * max(1, steps // LOOKS) / steps)
        return own + self._known.far + self._strange.far + under_way * batch >= WAY * (self._others + self._counts)

    def patience_s(self) -> float:
        """See `Pace`. With a quorum it is what merges take: who comes later gives to the next one.

        A thousand peers, or peers on lines of long delays, need longer to come together than a merge of them takes.
        """
        return math.inf if self._merging.quorum is None else max(_LEAST_GRACE_S, self._merge_s)

    def round_took(self, seconds: float) -> None:
        """See `Pace`."""
        self._merge_s = (self._merge_s + seconds) / 2

    def way_s(self, now: float) -> float:
        """See `Pace`."""
        return max(0.0, now - self.began)

    def state_changed(self, epoch: int, now: float) -> None:
        """See `Pace`."""
        began = now + self._out_of_place_s(now) if epoch else now
        self.epoch, self.began, self._called, self._enough, self._log = epoch, began, False, False, None

    def _out_of_place_s(self, now: float) -> float:
        """How much later than in a whole way the next merge is to come, so that fragments are not merged at once."""
        seconds, first = self._merging.seconds, self._first
        if seconds is None or first is None or math.isinf(first.began):
            return 0.0
        later_s = (first.began - seconds * self._ahead / WAY - now) % seconds
        # A merge that comes much too early would have too few batches in it.
        return later_s if later_s <= _LEAST_WAY * seconds else later_s - seconds

    def ends_at(self, epoch: int | None, *, left_behind: bool) -> None:
        """See `Pace`."""
        self._end = epoch
        self._quorum = 1 if left_behind and self._merging.quorum is not None else self._merging.quorum
