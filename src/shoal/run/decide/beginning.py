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

A peer that others have invited stops, too, if their run goes on without it (see `is_left_out`), unless its user allows
that: what it trains would be lost, and nobody would notice. Claims cost nothing, so they stop nobody who has trained
with others.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping

from shoal.base.bounded import bound
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes

__all__ = ["Beginning", "Stance"]

_REMEMBERED = 64


class Stance(enum.Enum):
    """Whether a peer may use its own state."""

    FREE = "free"
    WAITING = "waiting"
    TIMED_OUT = "timed out"


class Beginning:
    """Remembers which peers have named a state of a later epoch than ours.

    Args:
        patience_s: how long one is waited for.
        required: whether this peer needs a state that others have; None: where they have invited it and their run goes
            on.
        hosts: the peers that it was given when it joined the network.

    Attributes:
        stance: what `judge` said last.
    """

    def __init__(self, patience_s: float, *, required: bool | None = False, hosts: Collection[PeerID] = ()) -> None:
        self.patience_s, self.required = patience_s, required
        self.stance = Stance.FREE
        self._hosts, self._joined = frozenset(hosts), False
        self._further_since: float | None = None
        self._named: dict[PeerID, int] = {}
        self._gave: set[PeerID] = set()  # of those that are named
        self._since: float | None = None

    def state_taken(self) -> None:
        """A state of the run was taken over: states that were named before do not matter any more."""
        self._named.clear()
        self._gave.clear()
        self._since, self.stance = None, Stance.FREE
        self.joined()

    def joined(self) -> None:
        """This peer has a part in the run: it took a state over, or a step with others while nobody was further."""
        self._joined = True

    @property
    def end(self) -> str:
        """The end of the wait for a state, in words."""
        if self.required:
            return "step() raises StateUnavailable (require_state=True)"
        begins = "training begins at epoch 0"
        return begins if self.required is False or not self._hosts else f"step() raises StateUnavailable, or {begins}"

    def is_left_out(self, further: Collection[PeerID], *, others_here: int, now: float) -> bool:
        """Whether the run has gone on without this peer, which was invited to it, for longer than it may.

        That is where others are further for `patience_s`, and it has had no part in the run all the time. Either one of
        the peers that it was given is further, or more peers are than stand where it stands.

        Args:
            further: the live peers that name a better state.
            others_here: how many others stand where this peer stands.
            now: local time, seconds.
        """
        if not further or self._joined or self.required is False or not self._hosts:
            self._further_since = None
            return False
        if self._further_since is None:
            self._further_since = now if self._since is None else self._since
        counts = others_here < len(further) or not self._hosts.isdisjoint(further)
        return counts and now >= self._further_since + self.patience_s

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
        return Stance.WAITING if naming >= 2 or in_time else Stance.TIMED_OUT
