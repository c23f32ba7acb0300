"""The peers that look for a group, as far as one peer can know. Sans-IO.

Knowledge comes from the directory, which may be late, and from peers that asked us, which is newer. A declaration is
left aside when it is

- *expired*: past its expiration and the grace for differing clocks. A declaration that a peer told us itself while it
  was looking holds for a window from then, whatever its clock shows;
- *spent*: its peer has answered that it is of no use (its group has started, its schema differs, or it no longer looks
for a group);
- *lost*: the link to its peer was lost after it was made (`Memory.lost`);
- *paused*: its peer is to be asked again, but not before some time.

Spent and lost are tied to the expiration, so a peer that declares anew counts again.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

from shoal.matchmaking.signals import Declaration, Key, Memory, Rules
from shoal.peer import PeerID

__all__ = ["Declarers"]

_MAX_DECLARERS = 1024


class Declarers:
    """The declarations that one searching peer knows, and its judgement of each.

    Args:
        me: the searching peer; its own declaration is never returned.
        rules: grace and patience.
        memory: the memory that is kept from one search to the next.
        wall_offset_s: wall clock minus the loop's time, seconds.
    """

    def __init__(self, me: PeerID, rules: Rules, memory: Memory, *, wall_offset_s: float) -> None:
        self._me, self._rules, self._memory, self.wall_offset_s = me, rules, memory, wall_offset_s
        self._listed: dict[PeerID, Declaration] = {}
        self._heard: dict[PeerID, Declaration] = {}
        self._heard_at: dict[PeerID, float] = {}
        self._spent: dict[PeerID, float] = {}
        self._paused: dict[PeerID, float] = {}
        self._seen: dict[PeerID, tuple[float, float]] = {}

    # -------------------------------------------------------------------------------------------------- learning

    def read(self, declarations: Iterable[Declaration], now: float) -> None:
        """Replace the directory's earlier entries by its current ones."""
        earliest = sorted((each for each in declarations if math.isfinite(each.expiration)), key=lambda each: each.key)
        self._listed = {}
        seen: dict[PeerID, tuple[float, float]] = {}
        for each in earliest[:_MAX_DECLARERS]:
            if not each.contact.addresses:
                continue  # cannot be asked
            self._listed[each.peer] = each  # of several by one peer, the last
            before = self._seen.get(each.peer)
            seen[each.peer] = before if before and before[0] == each.expiration else (each.expiration, now)
        self._seen = seen

    def hear(self, declaration: Declaration, now: float) -> None:
        """A peer that asked us told its own declaration: it is alive, even if it was taken for lost."""
        self._memory.lost.pop(declaration.peer, None)
        self._paused.pop(declaration.peer, None)
        if (
            declaration.contact.addresses
            and math.isfinite(declaration.expiration)
            and len(self._heard) < _MAX_DECLARERS
        ):
            self._heard[declaration.peer] = declaration
            self._heard_at[declaration.peer] = now

    def spend(self, peer: PeerID, expiration: float) -> None:
        """The declarations of this peer up to `expiration` are of no use."""
        self._spent[peer] = max(expiration, self._spent.pop(peer, -math.inf))
        if len(self._spent) > 4 * _MAX_DECLARERS:
            del self._spent[next(iter(self._spent))]

    def pause(self, peer: PeerID, until: float) -> None:
        """Do not ask this peer before `until` (loop time)."""
        self._paused[peer] = until

    # --------------------------------------------------------------------------------------------------- knowing

    def expiration_of(self, peer: PeerID) -> float | None:
        """The latest expiration known of this peer; None if it never declared as far as is known."""
        known = [held[peer].expiration for held in (self._listed, self._heard) if peer in held]
        return max(known) if known else None

    def earlier(self, before: Key | None, joined: Container[PeerID], now: float) -> list[Declaration]:
        """The useful declarations earlier than `before` (None: all), in order, without those of peers in `joined`."""
        found: dict[PeerID, Declaration] = {}
        for each in sorted((*self._listed.values(), *self._heard.values()), key=lambda each: each.key):
            if (
                (before is None or each.key < before)
                and each.peer not in found
                and self._paused.get(each.peer, -math.inf) <= now
                and self._useful(each, joined, now)
            ):
                found[each.peer] = each
        return list(found.values())

    def unjoined(self, joined: Container[PeerID], now: float) -> list[Declaration]:
        """The peers that stand in the directory, may still join, and have not joined; earliest first."""
        return [
            each
            for each in self._listed.values()
            if self._useful(each, joined, now) and now < self._seen[each.peer][1] + self._rules.patience_s
        ]

    def seen_at(self, peer: PeerID) -> float:
        """Return when the declaration of this peer was first read (loop time); it must stand in the directory."""
        return self._seen[peer][1]

    def is_lost(self, peer: PeerID) -> bool:
        """Return whether the link to this peer was lost and it has not been heard of since."""
        expiration = self.expiration_of(peer)
        return peer in self._memory.lost and (expiration is None or expiration <= self._memory.lost[peer])

    def set_aside(self, peer: PeerID, now: float) -> bool:
        """Return whether this peer is lost, of no use, or paused: then it is not asked, whoever names it."""
        expiration, spent = self.expiration_of(peer), self._spent.get(peer, -math.inf)
        useless = spent > -math.inf and (expiration is None or expiration <= spent)
        return useless or self.is_lost(peer) or self._paused.get(peer, -math.inf) > now

    def next_change(self, now: float) -> float:
        """Return when the next pause ends; infinity if nobody is paused."""
        return min((until for until in self._paused.values() if until > now), default=math.inf)

    def _useful(self, each: Declaration, joined: Container[PeerID], now: float) -> bool:
        peer = each.peer
        return (
            peer != self._me
            and peer not in joined
            and not self._expired(each, now)
            and each.expiration > self._spent.get(peer, -math.inf)
            and each.expiration > self._memory.lost.get(peer, -math.inf)
        )

    def _expired(self, each: Declaration, now: float) -> bool:
        grace_s = self._rules.grace_s
        if each.expiration + grace_s > now + self.wall_offset_s:
            return False
        heard = self._heard.get(each.peer)
        told = heard is not None and heard.expiration == each.expiration
        return not told or now > self._heard_at[each.peer] + self._rules.window_s + grace_s
