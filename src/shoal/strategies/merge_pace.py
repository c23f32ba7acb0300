"""When a fragment of the model is merged: how far each peer is on its way to the next merge, in thousandths.

`BatchesPace` counts this peer's batches, `TimePace` the time since the last merge. Both count the peers alike, which
`MergePace` does: who counts, and whether a quorum is there. Pure: no clock, no network.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection

from shoal.base.peer import PeerID
from shoal.protocol.wire import Progress
from shoal.strategies.merging import Merging
from shoal.strategies.pace import Pace, SwarmSeen

__all__ = ["NEAR_WAY", "WAY", "BatchesPace", "MergePace", "TimePace", "merge_pace"]

WAY = 1000
"""A peer that has trained for long enough since the last merge names this number, or a larger one."""

_MOST_WAYS = 4
"""A peer counts for so many ways at most, whatever it claims. One that does not count itself waits for so many at most:
others may claim that they do nothing."""

_FASTER = 3
"""Among three to `_MANY` a peer counts for at most so many times what any other one names, or for one way: none makes a
merge due by a claim before the others have a batch."""

_MANY = 32
"""Among more than these the ways for which one peer counts at most bring a merge forward by little."""

_LEAST_WAY = 0.75
"""A way by time is at least this part of a whole one."""

_MARGIN = 1.1
"""Some batches take longer than the mean one."""

_GRACES = 10
"""By time a peer waits for its trainer for this part of the time between two merges."""

_LOOKS = 50
"""A peer that merges looks at the swarm this often on a way, or more rarely: when its batches may make a merge due."""

NEAR_WAY = 9 * WAY // 10
"""A merge is near once so much of the way to it is done."""

_LEAST_GRACE_S = 0.5
"""Processes of a busy machine come this late, however short a merge is."""


def _trains(said: Progress) -> bool:
    return said.done > 0 or said.rate > 0


def _done(view: SwarmSeen, peer: PeerID) -> int | None:
    """How far another peer is; None if it does not count."""
    said = view.others.get(peer)  # None: it was lost
    if said is None or peer not in view.together or not _trains(said):
        return None
    return 0 if peer in view.coming else min(said.done, _MOST_WAYS * WAY)


class _Way:
    """How far each of some peers is.

    Args:
        batch: thousandths that a batch or two take.

    Attributes:
        done: thousandths, by peer.
        count: how many count, after `sum_up`.
        far: how far they are in all.
        there: how many of them have gone the whole way.
        soon: how many will have after a batch or two.
        most: how far those two are that are furthest, if no more than `_MANY` count.
    """

    def __init__(self, batch: int = 0) -> None:
        self.done: dict[PeerID, int] = {}
        self.most: list[int] = []
        self.count = self.far = self.there = self.soon = self._far = self._there = self._soon = 0
        self._nearly = WAY - batch

    def set(self, peer: PeerID, done: int | None) -> None:
        """A peer is so far; None: it does not count."""
        before = self.done.pop(peer, None)
        if before is not None:
            self._far, self._there = self._far - before, self._there - (before >= WAY)
            self._soon -= before >= self._nearly
        if done is not None:
            self.done[peer] = done
            self._far, self._there = self._far + done, self._there + (done >= WAY)
            self._soon += done >= self._nearly

    def is_among(self, most: int, peer: PeerID) -> bool:
        """Whether another peer beside these is among the first `most` of all."""
        return sum(each < peer for each in self.done) < most

    def sum_up(self, most: int | None = None) -> None:
        """Count all of them; of more than `most` the first ones, whose `there` does not say which of them are."""
        self.count, self.far, self.there, self.soon = len(self.done), self._far, self._there, self._soon
        counted: Collection[int] = self.done.values()
        if most is not None and self.count > most:
            counted = [self.done[peer] for peer in sorted(self.done)[:most]]
            self.count, self.far = most, sum(counted)
        self.most = sorted(counted)[-2:] if len(counted) <= _MANY else []


class MergePace(Pace):
    """The pace of a fragment of the model, which is merged now and then.

    Strangers have not contributed to the last merges. At most as many of them count as contributors are here. If no
    contributor is here, the first two strangers count. All peers count the same ones, and come to a merge together. To
    a quorum strangers add no more than these do, or what is lacking if these are too few for it. Peers that no round
    waits for do not count, unless a quorum cannot be had without them: two peers that wait for each other no more would
    each stay alone otherwise.

    A peer that has named less to one peer than to the others would keep it away from the merge that they have begun. So
    what more than half of the others say is due is due for this peer, too.

    Args:
        merging: the way in which peers merge.
        fragment: the number of the fragment. The first merges of the fragments are spread over the way, and the last
            ones come together: then all that was trained is in them. (By steps `OuterTrainingState.batches` sees to
            that.) Only the first fragment goes the whole way from the beginning, so its merges end the epochs of the
            model: what it tells holds for all of it.

    Attributes:
        epoch: of the state that this peer has.
        began: when its way began, local time, seconds: as it got that state, or so much later or earlier as brings the
            fragment back to its place beside the first one.
    """

    counts_samples = False
    _batch = 0  # thousandths of the way that a batch takes, or two if not each one is told

    def __init__(self, merging: Merging, fragment: int = 0) -> None:
        self._ahead = WAY * fragment // merging.fragments
        self._is_first, self._waits_for_merges = fragment == 0, merging.waits
        self.began, self.epoch = math.inf, 0
        self._end: int | None = None
        self._quorum = self._asked_quorum = merging.quorum
        self._log: list[PeerID] | None = None  # of the last view, of which so many words were taken in
        self._taken = 0
        self._known, self._strange, self._absent = _Way(), _Way(), _Way()
        self._merge_s = 0.0
        self._trains, self._enough, self._counts = True, False, True
        self._called = False  # by others: it is time

    # ------------------------------------------------------------------------------- what batches and time do otherwise

    @abstractmethod
    def _ways_per_s(self, batches_per_s: float) -> float:
        """How many ways a peer goes in a second."""

    @abstractmethod
    def _is_due(self, own: int) -> bool:
        """Whether a merge without a quorum is due, as this peer has come so far."""

    @abstractmethod
    def _is_called(self, view: SwarmSeen) -> bool:
        """Whether the others, as they are known now, say that a merge is due."""

    @abstractmethod
    def _hold_batch_s(self, batches: int, now: float, epoch: int) -> float:
        """How long a trainer holds before its next batch, where that batch might be lost (`hold_s`)."""

    @abstractmethod
    def _batch_s(self, now: float) -> float:
        """About how long a batch takes, if this peer has gone its way."""

    def _heard(self) -> None:
        """The others are known anew."""

    def _out_of_place_s(self, now: float) -> float:
        """How much later than in a whole way the next merge is to come, so that fragments are not merged at once."""
        return 0.0

    # ------------------------------------------------------------------------------------------------- counting peers

    def _begins_at(self, epoch: int) -> int:
        """The fragment is so far ahead on its way: the first way is shorter, unless it is the last one, too."""
        return self._ahead if epoch == 0 and self._end != 1 else 0

    def _is_last(self, epoch: int) -> bool:
        """Whether the next merge from this epoch is the last one of the run, as far as it is known."""
        return self._end == epoch + 1

    def target(self, view: SwarmSeen) -> int:
        return WAY * (self._counts + self._others)

    def rate(self, view: SwarmSeen, batches_per_s: float) -> float:
        """About how much more all peers name a second later: the others are taken to be as fast as this peer."""
        return self._ways_per_s(batches_per_s) * self.target(view)

    @property
    def _others(self) -> int:
        """How many others count."""
        return self._known.count + self._strange.count

    def enough(self, view: SwarmSeen) -> bool:
        known, strange, absent = self._known, self._strange, self._absent
        if view.log is not None and view.log is self._log:  # a swarm of a thousand is looked at all the time
            words = view.log[self._taken :]
        else:
            known, strange, absent, words = _Way(self._batch), _Way(), _Way(), list(view.others)
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
        self._called = self._is_called(view)
        self._heard()
        self._trains = view.trains
        self._enough = self._reaches(view.own)
        return self._enough

    def _outnumber(self, some: int) -> bool:
        """Whether so many of the others that contribute are more than half of these."""
        return 2 * some > self._known.count

    def _lacking(self, known: _Way) -> int:
        """How many strangers a quorum takes, if all others and this peer are in it."""
        return max(0, (self._quorum or 0) - 1 - known.count)

    def _reaches(self, own: int) -> bool:
        if self._quorum is None:
            return self._is_due(own)
        there, more = (own >= WAY) + self._known.there, self._strange.there
        if 1 + self._others < self._quorum:
            more += self._absent.there
        return there + min(more, max(there, self._lacking(self._known))) >= self._quorum

    def missing(self, own: int, view: SwarmSeen) -> int:
        """Peers at other states are not missing: they, or this one, are on the way to the better state."""
        if self._quorum is None or own < WAY:
            return 0
        return max(0, self._quorum - 1 - sum(map(_trains, view.others.values())))

    # --------------------------------------------------------------------------------------------- waiting for others

    def hold_s(self, batches: int, now: float, epoch: int) -> float:
        """The time of a batch, once the batches that others have under way may be the last ones; else 0.

        So peers of equal speed train equally many batches, and none of them is lost. Else a peer waits in vain for one
        batch at most, as it would lose one at most by going on.
        """
        waits = self._waits_for_merges or (self._is_first and self._is_last(epoch))
        return self._hold_batch_s(batches, now, epoch) if waits and batches and epoch == self.epoch else 0.0

    def grace_s(self, now: float) -> float:
        """The time of the mean batch, where peers wait for merges: a batch that comes later is lost.

        It is the same with the last merge of each fragment.
        """
        return self._batch_s(now) if self._waits_for_merges or self._is_last(self.epoch) else 0.0

    def patience_s(self) -> float:
        """With a quorum it is the time that merges take: a peer that comes later gives to the next one.

        A thousand peers, or peers on lines of long delays, need longer to come together than a merge of them takes.
        """
        return math.inf if self._asked_quorum is None else max(_LEAST_GRACE_S, self._merge_s)

    def round_took(self, seconds: float) -> None:
        self._merge_s = (self._merge_s + seconds) / 2

    def since_last_s(self, now: float) -> float:
        return max(0.0, now - self.began)

    def state_changed(self, epoch: int, now: float) -> None:
        began = now + self._out_of_place_s(now) if epoch else now
        self.epoch, self.began, self._enough, self._log, self.near_at = epoch, began, False, None, 0
        self._called = False

    def ends_at(self, epoch: int | None, *, others_left: bool) -> None:
        if epoch != self._end:
            self._end, self.near_at = epoch, 0
        self._quorum = 1 if others_left and self._asked_quorum is not None else self._asked_quorum


class BatchesPace(MergePace):
    """Merges go by batches: one is due when the peers have trained `steps` in the mean.

    Args:
        merging: the way in which peers merge.
        steps: batches between two merges of the fragment.
        fragment: the number of the fragment.
    """

    def __init__(self, merging: Merging, steps: int, fragment: int = 0) -> None:
        super().__init__(merging, fragment)
        self._steps = steps
        self._batch = math.ceil(WAY * self._between_looks / steps)

    def done(self, samples: int, batches: int, now: float, epoch: int) -> int:
        return max(0, self._begins_at(epoch) + WAY * batches // self._steps)

    def reaches(self, samples: int, batches: int, epoch: int) -> bool:
        return self._reaches(self.done(samples, batches, 0.0, epoch))

    def is_news(self, batches: int) -> bool:
        return batches == self._steps or (batches % self._between_looks == 0 and batches >= self.near_at)

    def _heard(self) -> None:
        lacking = NEAR_WAY * (self._others + self._counts) - self._known.far - self._strange.far
        lacking = 0 if self._called else lacking
        mean_is_near = self._quorum is None and (self._counts or lacking <= 0)
        own = min(NEAR_WAY, lacking) if mean_is_near else NEAR_WAY
        self.near_at = math.ceil((own - self._begins_at(self.epoch)) * self._steps / WAY)

    def _is_called(self, view: SwarmSeen) -> bool:
        return self._quorum is None and self._outnumber(len(self._known.done.keys() & view.calling))

    def _far(self, own: int) -> int:
        """How far all that count are, where this one has come so far, if it counts."""
        own *= self._counts
        far = own + self._known.far + self._strange.far
        if not 2 < self._others + self._counts <= _MANY:  # of two nobody knows which one is too fast
            return far
        second, first = sorted((own, *self._known.most, *self._strange.most))[-2:]
        return far - max(0, first - max(WAY, _FASTER * second))

    @property
    def _between_looks(self) -> int:
        """Of a long way not each batch is told."""
        return max(1, self._steps // _LOOKS)

    def _ways_per_s(self, batches_per_s: float) -> float:
        return batches_per_s / self._steps

    def _is_due(self, own: int) -> bool:
        if self._called or (not self._counts and own >= _MOST_WAYS * WAY):
            return True
        # All see the same merge as due: a peer whose batches are worth nothing counts for nobody, nor for itself, and
        # a stranger counts for itself if it does for the contributors.
        counts = self._counts and (own > 0 or self._trains)
        count = self._others + counts
        return count > 0 and self._far(own * counts) >= WAY * count

    def _hold_batch_s(self, batches: int, now: float, epoch: int) -> float:
        own = self.done(0, batches, now, epoch)
        # Others may have been told more, and call us.
        calls = self.done(0, batches - 1, now, epoch) < WAY and self._outnumber(self._known.soon)
        return self.since_last_s(now) / batches if own >= WAY and (calls or self._may_be_due(own)) else 0.0

    def _may_be_due(self, own: int) -> bool:
        """Whether a merge is due as soon as each of the others that are on their way has ended a batch or two."""
        if self._quorum is not None:
            return 1 + self._others >= self._quorum
        under_way = self._others - self._known.there - self._strange.there
        return self._far(own) + under_way * self._batch >= WAY * (self._others + self._counts)

    def _batch_s(self, now: float) -> float:
        return self.since_last_s(now) / self._steps


class TimePace(MergePace):
    """Merges go by time: one is due so many seconds after the last one of its fragment.

    The fragments keep their places beside the first one: all that are overdue, as a quorum was lacking, are merged at
    the same moment.

    Args:
        merging: the way in which peers merge.
        every_s: seconds between two merges of the fragment.
        fragment: the number of the fragment.
        first: the pace of the first fragment, if this is of another one.

    Attributes:
        model: the paces of all fragments of the model, the first one first.
    """

    def __init__(self, merging: Merging, every_s: float, fragment: int = 0, first: TimePace | None = None) -> None:
        super().__init__(merging, fragment)
        self._every_s, self._first = every_s, first
        self.model: list[TimePace] = [] if first is None else first.model
        self.model.append(self)
        self._unbegun = True  # nobody has trained a batch yet, as far as it is known

    def done(self, samples: int, batches: int, now: float, epoch: int) -> int:
        if epoch != self.epoch:  # what is known of the time is of the way before: on it, others would merge again
            return min(1, batches)
        # The first batch may come long after the optimizer was made: all first merges would be due then.
        self._unbegun = self._unbegun and not batches
        if self._unbegun:
            self.began = now
        # It is not told all the time how late it is: a peer says when it is time, and then it is for all.
        # Before its first batch a peer calls nobody: a merge of nothing fails.
        return WAY if self._called or (batches and self.left_s(now) <= 0) else min(1, batches)

    def left_s(self, now: float) -> float:
        """The seconds until the next merge is due; less than 0 if it is overdue."""
        if not self._is_last(self.epoch):
            return self.way_left_s(now)
        # All last merges come when that of the first fragment is due, and after all others of each fragment.
        first = self.model[0]
        left_s = 0.0 if first.merges_left == 0 else (first if first.merges_left else self).way_left_s(now)
        for each in self.model:
            if (merges := each.merges_left or 0) > 1:
                left_s = max(left_s, max(0.0, each.way_left_s(now)) + self._every_s * (merges - 1))
        return left_s

    def way_left_s(self, now: float) -> float:
        """The seconds until this fragment has gone its way, whatever the others have done."""
        return self.began + self._every_s * (WAY - self._begins_at(self.epoch)) / WAY - now

    @property
    def merges_left(self) -> int | None:
        """How many merges of this fragment there are until the run ends; None if that is not known."""
        return None if self._end is None else max(0, self._end - self.epoch)

    def reaches(self, samples: int, batches: int, epoch: int) -> bool:
        return self._enough and epoch == self.epoch

    def due_s(self, now: float) -> float | None:
        left_s = self.left_s(now)
        return left_s if left_s > 0 else None

    def state_changed(self, epoch: int, now: float) -> None:
        self._called = False  # first: other threads ask, and this is of the way before
        super().state_changed(epoch, now)

    def _ways_per_s(self, batches_per_s: float) -> float:
        return 1 / self._every_s

    def _is_due(self, own: int) -> bool:
        return own >= WAY

    def _is_called(self, view: SwarmSeen) -> bool:
        return self._called or self._outnumber(self._known.there)

    def _heard(self) -> None:
        self._unbegun = self._unbegun and not (self._known.far or self._strange.far)

    def _hold_batch_s(self, batches: int, now: float, epoch: int) -> float:
        counted = batches - (epoch == 0)  # on the first way the clock starts when a batch is over
        batch_s, left_s = self.since_last_s(now) / max(1, counted), self.left_s(now)
        return left_s if 0 < left_s < _MARGIN * batch_s else 0.0

    def _batch_s(self, now: float) -> float:
        return self.since_last_s(now) / _GRACES

    def _out_of_place_s(self, now: float) -> float:
        if self._first is None or math.isinf(self._first.began):
            return 0.0
        later_s = (self._first.began - self._every_s * self._ahead / WAY - now) % self._every_s
        # A merge that comes much too early would have too few batches in it.
        return later_s if later_s <= _LEAST_WAY * self._every_s else later_s - self._every_s


def merge_pace(merging: Merging, fragment: int = 0, first: Pace | None = None) -> MergePace:
    """The pace of a fragment of this number; `first` is that of the first one, for another one."""
    if merging.steps is not None:
        return BatchesPace(merging, merging.steps, fragment)
    assert merging.seconds is not None
    return TimePace(merging, merging.seconds, fragment, first if isinstance(first, TimePace) else None)
