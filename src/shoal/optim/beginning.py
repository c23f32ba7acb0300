"""Whether a peer may train on from its own state, beside a run that is further. Pure bookkeeping: `now` is an argument.

A newcomer that cannot have the run's state does not begin a run of its own at once: its donor may have died in the
middle, and come back, or another one may. It waits `patience_s` from when it first heard of a run that is further, and
as long as two peers name such a state. Then it may begin, and says so.

Claims alone cannot keep a new swarm from beginning: a newcomer does not wait if more peers are at its own state than
have named another one. As many are enough if those that named one live and were asked in vain. But a peer that gives
its state does more than claim it, and so did one that was lost while it gave it: such a peer is waited for beside any
number of newcomers, for `patience_s` as well. A peer that has left in order gives its state no more: once all that
named one have left, the newcomer begins.

A peer that has a state of the run already goes on with it. With `required` a peer never begins alone: it gives up
instead.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping

from shoal.peer import PeerID
from shoal.progress import bound
from shoal.sometimes import sometimes

__all__ = ["Beginning", "Stance"]

_REMEMBERED = 64


class Stance(enum.Enum):
    """Whether a peer may use its own state."""

    FREE = "free"
    WAITING = "waiting"
    GIVEN_UP = "given up"


class Beginning:
    """Remembers which peers have named a state of a later epoch than ours.

    Args:
        patience_s: how long one is waited for.
        required: whether this peer needs a state that others have.

    Attributes:
        stance: what `judge` said last.
    """

    def __init__(self, patience_s: float, *, required: bool = False) -> None:
        self.patience_s, self.required = patience_s, required
        self.stance = Stance.FREE
        self._named: dict[PeerID, int] = {}
        self._gave: set[PeerID] = set()  # of those that are named
        self._since: float | None = None

    def state_taken(self) -> None:
        """A state of the run was taken over: states that were named before do not matter any more."""
        self._named.clear()
        self._gave.clear()
        self._since, self.stance = None, Stance.FREE

    @property
    def epoch(self) -> int:
        """The latest one that was named."""
        return max(self._named.values(), default=0)

    @property
    def peers(self) -> tuple[PeerID, ...]:
        """The peers that have named one."""
        return tuple(self._named)

    def until(self, now: float) -> float:
        """Until when a donor is waited for: local time, seconds."""
        return (now if self._since is None else self._since) + self.patience_s

    def note_giving(self, peers: Iterable[PeerID]) -> None:
        """These peers gave their state so fast that it could have been here in time, or steps of the run."""
        self._gave.update(peer for peer in peers if peer in self._named)

    def judge(
        self,
        named: Mapping[PeerID, int],
        *,
        others_here: int,
        now: float,
        refusing: Collection[PeerID] = (),
        giving: Collection[PeerID] = (),
        left: Collection[PeerID] = (),
    ) -> Stance:
        """Whether a newcomer may begin.

        Args:
            named: the live peers that name a state of a later epoch, with that epoch.
            others_here: how many others stand where we stand.
            now: local time, seconds.
            refusing: peers that were asked for their state, and did not give it.
            giving: peers that give theirs now, so fast that it may be here before `until`, or give the run's steps.
            left: peers that have left in order.
        """
        for peer in self._named.keys() & left:
            del self._named[peer]
        for peer in sorted(named)[:_REMEMBERED]:
            self._named[peer] = max(named[peer], self._named.get(peer, 0))
        bound(self._named, _REMEMBERED)
        self._gave &= self._named.keys()
        self.note_giving(giving)
        given = not self._gave.isdisjoint(giving) or not self._gave.issubset(named)
        refused = bool(self._named) and all(peer in named and peer in refusing for peer in self._named)
        self.stance = self._stance(len(named), others_here, now, refused=refused, given=given)
        return self.stance

    def _stance(self, naming: int, others_here: int, now: float, *, refused: bool, given: bool) -> Stance:
        alone = self.required and not others_here
        if not self._named and not alone:
            return Stance.FREE
        if self._since is None:
            self._since = now
        in_time = now < self.until(now)
        if others_here and others_here + refused > len(self._named) and not (given and in_time):
            sometimes("newcomers begin together beside a run that does not give its state")
            return Stance.FREE
        return Stance.WAITING if naming >= 2 or in_time else Stance.GIVEN_UP
