"""Which peers keep the rounds of this one waiting, or lead them to nothing (decisions 0053 and 0054).

A peer judges by what it has seen itself: nothing that others say counts, else a liar could have an honest peer shut
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.allreduce.round import Outcome, Round
from shoal.averager.pauses import Pauses
from shoal.peer import PeerID

__all__ = ["Conduct"]


class Conduct:
    """Remembers how peers behave in rounds, and on which of them nobody counts for a while.

    Args:
        window_s: see `Pauses`.
        warn: called with what the user is told.

    Attributes:
        idle: the members that keep rounds waiting and give nothing. While their pause lasts they lead no group of this
            peer, and it waits for nothing of theirs.
        bad_leaders: the peers that lead groups, and bring their rounds to no end, or far too late. While their pause
            lasts they lead no group of this peer; they may be members.
        bad_lines: the members whose values or averages do not come here, and come to others. While their pause lasts
            this peer does not wait for them.
    """

    def __init__(self, window_s: float, warn: Callable[[str], None]) -> None:
        self.idle, self.bad_leaders, self.bad_lines = (Pauses(window_s) for _ in range(3))
        self._window_s, self._warn = window_s, warn

    def shunned(self, now: float) -> frozenset[PeerID]:
        """The peers that lead no group of this one (`now`: the loop's time, seconds)."""
        return self.idle.now(now) | self.bad_leaders.now(now)

    def searched(self, idled: Iterable[PeerID], now: float) -> None:
        """A search is over. These took this peer, and began no group in all the time that there was."""
        for peer in idled:
            self._led_badly(peer, self._window_s, now)

    def played(self, round_: Round, outcome: Outcome | None, began: float, now: float) -> None:
        """A round is over; `outcome` is None if it failed here."""
        seen, cost_s = round_.seen, now - began
        gave = reduced = frozenset[PeerID]()
        if outcome is not None:
            in_part = (peer for peer, share in outcome.counted_in_part.items() if share)
            gave = frozenset((*outcome.contributors, *in_part))
            reduced = seen.reduced - self.idle.now(now)  # one without values of its own gives the averages of its parts
        late, unheard = seen.late | (seen.unheard - gave), (seen.unheard & gave) - seen.late
        for peer in (gave | reduced) - late:
            self.idle.forgive(peer, now)
        for peer in gave - unheard - seen.bad_lines:
            self.bad_lines.forgive(peer, now)
        for peer in sorted(late):
            if times := self.idle.failed(peer, now, cost_s):
                self._warn(
                    f"{peer.short()} kept {times} rounds waiting, and gave nothing to them, or too late: the next ones "
                    "go on without it. Check its line (`shoal doctor INVITE` there), and whether its process hangs"
                )
        for peer in sorted(unheard):
            if times := self.bad_lines.failed(peer, now, cost_s):
                self._warn(
                    f"what {peer.short()} gave in {times} rounds came to others in time, and not to this peer, which "
                    "does not wait for it in the next ones. Check the line between the two: it may lose large packets "
                    "(try a smaller MTU), or be far slower than other lines"
                )
        leader = round_.members[round_.coordinator].contact.peer
        if seen.led_badly:
            self._led_badly(leader, cost_s, now)
        elif outcome is not None:
            self.bad_leaders.forgive(leader, now)

    def _led_badly(self, leader: PeerID, cost_s: float, now: float) -> None:
        if times := self.bad_leaders.failed(leader, now, cost_s):
            self._warn(
                f"{leader.short()} led {times} groups, and brought them to no average, or far too late: it leads none "
                "of the next ones here. See in its log why"
            )
