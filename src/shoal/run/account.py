"""The account of the samples that one peer computes: which count, which still may, which were dropped. Loop only."""

from __future__ import annotations

from shoal.run.course import Course
from shoal.run.outlook import Outlook
from shoal.run.report.notices import Notices
from shoal.run.view.contribution import Contribution

__all__ = ["Account"]


class Account:
    """Settles what each sample of a peer came to, and tells its user of those that were dropped.

    Args:
        outlook: of this peer.
        course: says whether it has left.
        contribution: the counts.
        notices: tell the user.
    """

    def __init__(self, outlook: Outlook, course: Course, contribution: Contribution, notices: Notices) -> None:
        self._outlook, self._course, self._contribution, self._notices = outlook, course, contribution, notices
        self._own, self._speed, self._end = outlook.own, outlook.speed, outlook.end

    @property
    def held(self) -> int:
        """Samples that are in no step yet, and may still go into one: see `Pending.held`."""
        training = self._own.training
        over = self._end.over(self._own.name.epoch) if training.averages_parameters else self._outlook.at_end
        return 0 if self._course.is_closed or over else training.pending.held

    def settle(self) -> None:
        """Count what is in our state now, and what was in vain."""
        self._contribution.settle(self._own.lineage.contributed, self._speed.processed, self.held)

    def state_changed(self) -> None:
        """Our state has another name: see what was lost with the one before, and tell it."""
        own, speed = self._own, self._speed
        gave = {*own.committed.gave} - {self._outlook.core.peer_id}
        why = self._contribution.state_changed(
            own.name.epoch,
            by=next(iter(gave)).short() if len(own.committed.gave) == len(gave) == 1 else None,
            contributed=own.lineage.contributed,
            processed=speed.processed,
            batches=speed.batches,
            held=self.held,
            now=self._outlook.loop.time(),
        )
        if why is not None and not self._outlook.core.endpoint.has_twin:
            self._notices.warn(why)
        self._tell_dropped()

    def left(self) -> None:
        """This peer has left: what it holds is given to nobody any more."""
        self._tell_dropped(left=0 if self._outlook.at_end else self._own.training.pending.held)

    def _tell_dropped(self, *, left: int = 0) -> None:
        speed, contribution, now = self._speed, self._contribution, self._outlook.loop.time()
        self.settle()
        if contribution.first_dropped(processed=speed.processed, batches=speed.batches):
            self._notices.first_dropped(contribution.in_vain, speed.processed)
        over = self._outlook.at_end or self._course.is_closed
        if self._outlook.core.endpoint.has_twin:  # rounds take only one of the two: that was said
            return
        if (much := contribution.much_dropped(processed=speed.processed, now=now, over=over)) is not None:
            last = "merge" if self._outlook.terms.meets_rarely else "round"
            self._notices.much_dropped(much, self._own.training.why_dropped(), last=last, left=left)
