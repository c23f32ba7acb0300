"""The declarations of the peers that look for a group: what one of them knows, and when it looks again. Sans-IO.

Knowledge comes from the directory, which may be late, and from peers that asked us, which is newer. A declaration is
left aside when it is

- *expired*: past its expiration and the grace for differing clocks. A declaration that a peer told us itself while it
  was looking holds for a window from then, whatever its clock shows;
- *spent*: its peer has answered that it is of no use (its group has started, its schema differs, or it no longer looks
  for a group), and has not asked us since;
- *lost*: the link to its peer was lost after it was made (`Memory.lost`);
- *paused*: its peer is to be asked again, but not before some time.

Spent and lost are tied to the expiration, so a peer that declares anew counts again.

A peer that declares sees at once which peers are there already: each holder of the group key takes the declaration and
then lists its entries. So if two peers declare at the same time and share a holder, the one that the holder hears later
sees the other. The directory is read (by a client at once) after each quiet time, and ever more rarely while nothing
happens. The *quiet time* after a join is short if exactly the last group's members are there, long if one of them is
missing, and otherwise depends on the gaps between joins. It is never shorter than a read of the directory, because a
peer that another leader sent here needs about as many round trips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.averaging.matchmaking.config import CLOCK_GRACE_S, SETTLE_MAX_S, SETTLE_S, MatchmakingConfig
from shoal.averaging.matchmaking.events import (
    Action,
    Declaration,
    Declare,
    Key,
    Nudge,
    Precedence,
    ReadDirectory,
    Withdraw,
)
from shoal.averaging.matchmaking.leaders import LeaderMemory
from shoal.base.bounded import put_last
from shoal.base.peer import PeerID

__all__ = ["DirectoryPoller", "KnownDeclarations", "Memory"]

_MAX_DECLARATIONS = 1024
_MAX_LOST = 1024
_MAX_NUDGES = 4
"""The most nudges at a time."""

_POLL_MAX_S = 1.0
"""The longest pause between two reads of the directory."""

_DECLARE_AGAIN_S = 0.5
"""The pause after a declaration that failed."""

# A quiet time of 8 mean gaps: if 16 peers come at random, evenly spread times, no gap is longer 99 times in 100.
_GAPS_WAITED = 8.0
"""The quiet time is so many mean gaps between joins."""

_PRIOR_GAPS = 2


@dataclass(slots=True)
class Memory:
    """The memory of a peer from one search to the next. Bounded.

    Attributes:
        lost: peers whose link was lost; their declarations with expirations up to the value are dead.
        companions: the members of the last group under the same key, which are likely to come again.
        read_s: how long the last read of the directory took: a measure of how far away the others are.
        declared: the latest expiration that we declared ourselves with.
        leaders: what is known of those that led us.
    """

    lost: dict[PeerID, float] = field(default_factory=dict)
    companions: frozenset[PeerID] = frozenset()
    read_s: float = 0.0
    declared: float = -math.inf
    leaders: LeaderMemory = field(default_factory=LeaderMemory)

    def lose(self, peer: PeerID, expiration: float) -> None:
        """Note that declarations of this peer up to `expiration` are dead."""
        put_last(self.lost, peer, max(expiration, self.lost.get(peer, -math.inf)), _MAX_LOST)


class KnownDeclarations:
    """The declarations that one searching peer knows, and its judgement of each.

    Args:
        me: the searching peer; its own declaration is never returned.
        config: window and patience.
        memory: the memory that is kept from one search to the next.
        wall_offset_s: wall clock minus the loop's time, seconds; can be set.
        precedence: of the others: in which order peers lead.
    """

    def __init__(
        self, me: PeerID, config: MatchmakingConfig, memory: Memory, *, wall_offset_s: float, precedence: Precedence
    ) -> None:
        self._precedence = precedence
        self._me, self._config, self._memory, self.wall_offset_s = me, config, memory, wall_offset_s
        self._listed: dict[PeerID, Declaration] = {}
        self._heard: dict[PeerID, tuple[Declaration, float]] = {}
        self._first_read: dict[PeerID, tuple[float, float]] = {}
        self._spent: dict[PeerID, float] = {}
        self._paused: dict[PeerID, float] = {}

    # -------------------------------------------------------------------------------------------------- learning

    def replace_listed(self, declarations: Iterable[Declaration], now: float) -> None:
        """Replace the directory's earlier entries by its current ones."""
        earliest = sorted((each for each in declarations if math.isfinite(each.expiration)), key=self.key_of)
        # Without an address a peer cannot be asked. Of several declarations by one peer the last one counts.
        self._listed = {each.peer: each for each in earliest[:_MAX_DECLARATIONS] if each.contact.addresses}
        before = self._first_read
        self._first_read = {
            peer: before[peer] if peer in before and before[peer][0] == each.expiration else (each.expiration, now)
            for peer, each in self._listed.items()
        }

    def hear(self, declaration: Declaration, now: float) -> None:
        """A peer that asked us told its own declaration: it looks for a group, whatever was known before."""
        self._memory.lost.pop(declaration.peer, None)
        if self._spent.get(declaration.peer) != math.inf:  # else it can never be in a group with us, or is shunned
            self._spent.pop(declaration.peer, None)
        self._paused.pop(declaration.peer, None)
        valid = declaration.contact.addresses and math.isfinite(declaration.expiration)
        if valid and len(self._heard) < _MAX_DECLARATIONS:
            self._heard[declaration.peer] = declaration, now

    def spend(self, peer: PeerID, expiration: float) -> None:
        """Note that the declarations of this peer up to `expiration` are of no use."""
        put_last(self._spent, peer, max(expiration, self._spent.get(peer, -math.inf)), 4 * _MAX_DECLARATIONS)

    def pause(self, peer: PeerID, until: float) -> None:
        """Do not ask this peer before `until` (loop time)."""
        self._paused[peer] = until

    # --------------------------------------------------------------------------------------------------- knowing

    def key_of(self, declaration: Declaration) -> Key:
        """The place of a declarer in the order of leaders."""
        return self._precedence.key(declaration.peer, declaration.expiration)

    def expiration_of(self, peer: PeerID) -> float | None:
        """The latest expiration known of this peer; None if it never declared as far as is known."""
        listed, (heard, _) = self._listed.get(peer), self._heard.get(peer, (None, 0.0))
        return max((each.expiration for each in (listed, heard) if each is not None), default=None)

    def earlier(self, before: Key | None, joined: Container[PeerID], now: float) -> list[Declaration]:
        """The useful declarations earlier than `before` (None: all), in order, without those of peers in `joined`."""
        found: dict[PeerID, Declaration] = {}
        heard = (declaration for declaration, _ in self._heard.values())
        for each in sorted((*self._listed.values(), *heard), key=self.key_of):
            if (
                (before is None or self.key_of(each) < before)
                and self._paused.get(each.peer, -math.inf) <= now
                and self._is_useful(each, joined, now)
            ):
                found.setdefault(each.peer, each)
        return list(found.values())

    def missing(self, joined: Container[PeerID], now: float) -> list[Declaration]:
        """The peers that stand in the directory, may still join, and have not joined; earliest first."""
        return [
            each
            for each in self._listed.values()
            if self._is_useful(each, joined, now) and now < self.read_at(each.peer) + self._config.request_timeout_s
        ]

    def read_at(self, peer: PeerID) -> float:
        """Return when the declaration of this peer was first read (loop time); it must stand in the directory."""
        return self._first_read[peer][1]

    def is_lost(self, peer: PeerID, now: float) -> bool:
        """Return whether the link to this peer was lost and it has not been heard of since.

        If others say that it looks for a group, and its declaration is not known, that ends later than now.
        """
        expiration = self.expiration_of(peer)
        ends = now + self.wall_offset_s if expiration is None else expiration
        return ends <= self._memory.lost.get(peer, -math.inf)

    def is_set_aside(self, peer: PeerID, now: float) -> bool:
        """Return whether this peer is lost, of no use, or paused: then it is not asked, whoever names it."""
        expiration, spent = self.expiration_of(peer), self._spent.get(peer, -math.inf)
        useless = spent > -math.inf and (expiration is None or expiration <= spent)
        return useless or self.is_lost(peer, now) or self._paused.get(peer, -math.inf) > now

    def next_change(self, now: float) -> float:
        """Return when the next pause ends; infinity if nobody is paused."""
        return min((until for until in self._paused.values() if until > now), default=math.inf)

    def _is_useful(self, each: Declaration, joined: Container[PeerID], now: float) -> bool:
        peer = each.peer
        return (
            peer != self._me
            and peer not in joined
            and not self._is_expired(each, now)
            and each.expiration > self._spent.get(peer, -math.inf)
            and each.expiration > self._memory.lost.get(peer, -math.inf)
        )

    def _is_expired(self, each: Declaration, now: float) -> bool:
        if each.expiration + CLOCK_GRACE_S > now + self.wall_offset_s:
            return False
        heard, heard_at = self._heard.get(each.peer, (None, now))
        told = heard is not None and heard.expiration == each.expiration
        return not told or now > heard_at + self._config.window_s + CLOCK_GRACE_S


Followers = Mapping[PeerID, object]


class DirectoryPoller:
    """The pace of one search: it declares, reads and nudges, and says when everybody that is to come has joined.

    Args:
        me: the searching peer.
        leads: whether it can lead; a client declares nothing and nudges nobody.
        memory: the memory that is kept between searches.
        known: the declarations that are known; filled by reads.
        now: loop time, seconds.

    Attributes:
        declared_at: when the last declaration was stored, or failed; of a client: when the search began.
        joined_at: when the last peer joined, or the search began.
    """

    def __init__(self, me: PeerID, *, leads: bool, memory: Memory, known: KnownDeclarations, now: float) -> None:
        self._me, self._leads, self._memory, self._known = me, leads, memory, known
        self._stands = self._declaring = False
        self._declare_begun = self.declared_at = self.joined_at = now
        self._declare_again_at = math.inf
        self._reading = self._in_doubt = False
        self._read_begun = self._last_read = -math.inf
        self._poll_s = SETTLE_S
        self._gaps: list[float] = []
        self._nudged: dict[PeerID, float] = {}
        self._nudges = 0

    # ------------------------------------------------------------------------------------------------- declaring

    def declare(self, expiration: float, now: float) -> list[Action]:
        """Declare if we do not stand in the directory, or if the last try failed a while ago."""
        if not self._leads or (self._stands and now < self._declare_again_at):
            return []
        self._stands = self._declaring = True
        self._declare_begun, self._declare_again_at = now, math.inf
        return [Declare(expiration)]

    def note_declared(self, declarations: Iterable[Declaration] | None, now: float) -> None:
        """Note that the declaration is stored, and what was there already; None: it is not stored, as far as is known.

        In that case read at once, and try again in a while.
        """
        if self._declaring:
            self._declaring, self.declared_at = False, now
            if declarations is None:
                self._declare_again_at = now + _DECLARE_AGAIN_S
                self.doubt()
            else:
                self._note_listed(declarations, self._declare_begun, now)

    def withdraw(self) -> list[Action]:
        """Take the declaration back if there is one."""
        if not self._stands:
            return []
        self.renew()
        return [Withdraw()]

    def renew(self) -> None:
        """The declaration that stands, if one does, is not ours any more: the next `declare` declares again."""
        self._stands = self._declaring = False
        self._declare_again_at = math.inf

    # --------------------------------------------------------------------------------------------------- reading

    def read(self, followers: Followers, now: float) -> list[Action]:
        """Read the directory if it is time to."""
        if self._reading or now < self._next_read(followers, now):
            return []
        if max(self._read_begun, self.declared_at) >= self.joined_at:
            self._poll_s = min(2 * self._poll_s, _POLL_MAX_S)
        self._reading, self._read_begun = True, now
        return [ReadDirectory()]

    def note_read(self, declarations: Iterable[Declaration] | None, now: float) -> None:
        """Note the directory's answer to the last `ReadDirectory`; None: it gave none."""
        self._reading = False
        if declarations is None:
            self._in_doubt = False
        else:
            self._note_listed(declarations, self._read_begun, now)

    def _note_listed(self, declarations: Iterable[Declaration], begun: float, now: float) -> None:
        self._memory.read_s = now - begun
        self._known.replace_listed(declarations, now)
        self._last_read, self._in_doubt = begun, False

    def note_join(self, now: float) -> None:
        """Note that a peer joined."""
        self._gaps.append(now - self.joined_at)
        self.joined_at = now
        self._poll_s = SETTLE_S

    def doubt(self) -> None:
        """A peer that we counted on did not take us or is gone: the last read is doubtful, so read again soon."""
        self._in_doubt = True
        self._poll_s = SETTLE_S

    def is_outdated(self, now: float) -> bool:
        """Return whether to read again before asking anybody else."""
        return self._in_doubt and now - self._last_read > 2 * SETTLE_S

    def all_joined(self, followers: Followers, now: float, is_silent: Callable[[PeerID], bool]) -> bool:
        """Return whether a read begun after the quiet time shows no live peer that may still join."""
        if self._declaring or self._last_read < self._quiet_end(followers, now):
            return False
        return all(is_silent(each.peer) for each in self._known.missing(followers, now))

    def awaits_followers(self, now: float) -> bool:
        """Return whether so little time has passed that others may still be on their way to us."""
        return now < max(self.joined_at, self.declared_at) + 4 * max(SETTLE_S, self._read_s)

    def _next_read(self, followers: Followers, now: float) -> float:
        if self._in_doubt or (self._read_begun == -math.inf and not self._leads):
            return now
        if self._declaring:
            return math.inf
        poll = max(self._read_begun, self.declared_at) + self._poll_s
        quiet_end = self._quiet_end(followers, now)
        return min(quiet_end, poll) if followers and self._read_begun < quiet_end else poll

    def _quiet_end(self, followers: Followers, now: float) -> float:
        companions = self._memory.companions - {self._me}
        if any(peer not in followers and not self._known.is_lost(peer, now) for peer in companions):
            quiet_s = SETTLE_MAX_S
        elif companions and followers.keys() <= companions:
            quiet_s = SETTLE_S
        else:
            gap_s = (_PRIOR_GAPS * SETTLE_S / 2 + sum(self._gaps)) / (_PRIOR_GAPS + len(self._gaps))
            quiet_s = min(max(_GAPS_WAITED * gap_s, SETTLE_S), SETTLE_MAX_S)
        return max(self.joined_at, self.declared_at) + max(quiet_s, self._read_s)

    @property
    def _read_s(self) -> float:
        return min(self._memory.read_s, 2 * SETTLE_MAX_S)

    # --------------------------------------------------------------------------------------------------- nudging

    def nudge(self, key: Key, followers: Followers, now: float) -> list[Action]:
        """Nudge later peers that have stood in the directory for a while and have not joined."""
        due = [each for each, at in self._to_nudge(key, followers, now) if at <= now][: _MAX_NUDGES - self._nudges]
        self._nudges += len(due)
        self._nudged |= {each.peer: each.expiration for each in due}
        return [Nudge(each.contact, key[1]) for each in due]

    def note_nudged(self, peer: PeerID) -> float:
        """Note that a nudge was answered; returns the expiration that the nudged peer had declared."""
        self._nudges -= 1
        return self._nudged[peer]

    def _to_nudge(self, key: Key, followers: Followers, now: float) -> list[tuple[Declaration, float]]:
        if not self._leads:
            return []
        after_s = max(SETTLE_S, self._read_s)
        later = [each for each in self._known.missing(followers, now) if self._known.key_of(each) > key]
        # The next peer may lead others that belong to us, because it looked before it could find us: tell it at once.
        return [
            (each, self._known.read_at(each.peer) + (after_s if index else 0.0))
            for index, each in enumerate(later)
            if self._nudged.get(each.peer) != each.expiration
        ]

    # ------------------------------------------------------------------------------------------------------ time

    def due(self, key: Key, followers: Followers, now: float) -> float:
        """Return when `declare`, `read` or `nudge` will have something to do, if nothing happens before."""
        due = [self._declare_again_at]
        if not self._reading:
            due.append(self._next_read(followers, now))
        if self._nudges < _MAX_NUDGES:
            due += [at for _, at in self._to_nudge(key, followers, now)]
        return min(due)
