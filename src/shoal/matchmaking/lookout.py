"""The pace of a search: a peer declares, reads and nudges, and waits for more peers to join. Sans-IO.

- A peer that declares sees at once which peers are there already: each holder of the group key takes the declaration
  and then lists its entries. So if two peers declare at the same time and share a holder, the one that the holder hears
  later sees the other. The directory is read (by a client at once) after each quiet time, and ever more rarely while
  nothing happens.
- The *quiet time* after a join is short if exactly the last group's members are there, long if one of them is missing,
  and otherwise depends on the gaps between joins; it is never shorter than a read of the directory, because a peer that
  another leader sent here needs about as many round trips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from shoal.matchmaking.declarers import Declarers
from shoal.matchmaking.signals import (
    Action,
    Declaration,
    Declare,
    Key,
    Memory,
    Nudge,
    ReadDirectory,
    Rules,
    Withdraw,
)
from shoal.peer import PeerID

__all__ = ["Lookout"]

_MAX_NUDGES = 4
_POLL_MAX_S = 1.0
_DECLARE_AGAIN_S = 0.5
# A quiet time of 8 mean gaps: if 16 peers come at random, evenly spread times, no gap is longer 99 times in 100.
_GAPS_WAITED = 8.0
_PRIOR_GAPS = 2

Followers = Mapping[PeerID, object]


class Lookout:
    """The pace of one search.

    Args:
        me: the searching peer.
        rules: sizes and times.
        memory: the memory that is kept between searches.
        declarers: the peers that are known to search; filled by reads.
        now: loop time, seconds.

    Attributes:
        declared_at: when the last declaration was stored, or failed; of a client: when the search began.
    """

    def __init__(self, me: PeerID, rules: Rules, memory: Memory, declarers: Declarers, *, now: float) -> None:
        self._me, self._rules, self._memory, self._declarers = me, rules, memory, declarers
        self._listed = self._declaring = False
        self._declare_begun = self.declared_at = self._last_join = now
        self._declare_again_at = math.inf
        self._reading = self._disappointed = False
        self._read_begun = self._last_read = -math.inf
        self._poll_s = rules.settle_s
        self._gaps: list[float] = []
        self._nudged: dict[PeerID, float] = {}
        self._nudges = 0

    # ------------------------------------------------------------------------------------------------- declaring

    def declare(self, expiration: float, now: float) -> list[Action]:
        """Declare if we do not stand in the directory, or if the last try failed a while ago."""
        if not self._rules.leads or (self._listed and now < self._declare_again_at):
            return []
        self._listed = self._declaring = True
        self._declare_begun, self._declare_again_at = now, math.inf
        return [Declare(expiration)]

    def declared(self, declarations: Iterable[Declaration], now: float) -> None:
        """The declaration is stored; `declarations` were there already."""
        if self._declaring:
            self._declaring, self.declared_at = False, now
            self._looked(declarations, self._declare_begun, now)

    def declare_failed(self, now: float) -> None:
        """The declaration is not stored, as far as is known: read at once, and try again in a while."""
        if self._declaring:
            self._declaring, self.declared_at = False, now
            self._declare_again_at = now + _DECLARE_AGAIN_S
            self.disappointed()

    def withdraw(self) -> list[Action]:
        """Take the declaration back if there is one."""
        if not self._listed:
            return []
        self.renew()
        return [Withdraw()]

    def renew(self) -> None:
        """The declaration that stands, if one does, is not ours any more: the next `declare` declares again."""
        self._listed = self._declaring = False
        self._declare_again_at = math.inf

    # --------------------------------------------------------------------------------------------------- reading

    def read(self, followers: Followers, now: float) -> list[Action]:
        """Read the directory if it is time to."""
        if self._reading or now < self._next_read(followers, now):
            return []
        if max(self._read_begun, self.declared_at) >= self._last_join:
            self._poll_s = min(2 * self._poll_s, _POLL_MAX_S)
        self._reading, self._read_begun = True, now
        return [ReadDirectory()]

    def read_done(self, declarations: Iterable[Declaration], now: float) -> None:
        """The directory answered the last `ReadDirectory` with these declarations."""
        self._reading = False
        self._looked(declarations, self._read_begun, now)

    def _looked(self, declarations: Iterable[Declaration], begun: float, now: float) -> None:
        self._memory.read_s = now - begun
        self._declarers.read(declarations, now)
        self._last_read, self._disappointed = begun, False

    def read_failed(self) -> None:
        """The directory did not answer the last `ReadDirectory`."""
        self._reading = self._disappointed = False

    def joined(self, now: float) -> None:
        """A peer joined."""
        self._gaps.append(now - self._last_join)
        self._last_join = now
        self._poll_s = self._rules.settle_s

    def disappointed(self) -> None:
        """A peer that we counted on did not take us or is gone: the last read is doubtful, so read again soon."""
        self._disappointed = True
        self._poll_s = self._rules.settle_s

    def outdated(self, now: float) -> bool:
        """Return whether to read again before asking anybody else."""
        return self._disappointed and now - self._last_read > 2 * self._rules.settle_s

    def all_joined(self, followers: Followers, now: float, silent: Callable[[PeerID], bool]) -> bool:
        """Return whether a read begun after the quiet time shows no live peer that may still join."""
        if self._declaring or self._last_read < self._settled(followers):
            return False
        return all(silent(each.peer) for each in self._declarers.unjoined(followers, now))

    def awaits_followers(self, now: float) -> bool:
        """Return whether so little time has passed that others may still be on their way to us."""
        wait_s = 4 * max(self._rules.settle_s, self._read_s)
        return now < max(self._last_join, self.declared_at) + wait_s

    def _next_read(self, followers: Followers, now: float) -> float:
        if self._disappointed or (self._read_begun == -math.inf and not self._rules.leads):
            return now
        if self._declaring:
            return math.inf
        poll = max(self._read_begun, self.declared_at) + self._poll_s
        if followers and self._read_begun < (settled := self._settled(followers)):
            return min(settled, poll)
        return poll

    def _settled(self, followers: Followers) -> float:
        return max(self._last_join, self.declared_at) + self.settle_s(followers)

    def settle_s(self, followers: Followers) -> float:
        """The quiet time, seconds."""
        rules, companions = self._rules, self._memory.companions - {self._me}
        if any(peer not in followers and not self._declarers.is_lost(peer) for peer in companions):
            quiet_s = rules.settle_max_s
        elif companions and followers.keys() <= companions:
            quiet_s = rules.settle_s
        else:
            prior_s = _PRIOR_GAPS * rules.settle_s / 2
            gap_s = (prior_s + sum(self._gaps)) / (_PRIOR_GAPS + len(self._gaps))
            quiet_s = min(max(_GAPS_WAITED * gap_s, rules.settle_s), rules.settle_max_s)
        return max(quiet_s, self._read_s)

    @property
    def _read_s(self) -> float:
        return min(self._memory.read_s, 2 * self._rules.settle_max_s)

    # --------------------------------------------------------------------------------------------------- nudging

    def nudge(self, key: Key, followers: Followers, now: float) -> list[Action]:
        """Nudge later peers that have stood in the directory for a while and have not joined."""
        out: list[Action] = []
        for each, at in self._to_nudge(key, followers, now):
            if at <= now and self._nudges < _MAX_NUDGES:
                self._nudges += 1
                self._nudged[each.peer] = each.expiration
                out.append(Nudge(each.contact, key[0]))
        return out

    def nudged(self, peer: PeerID) -> float:
        """A nudge was answered: the expiration that the nudged peer had declared."""
        self._nudges -= 1
        return self._nudged[peer]

    def _to_nudge(self, key: Key, followers: Followers, now: float) -> list[tuple[Declaration, float]]:
        if not self._rules.leads:
            return []
        after_s = max(self._rules.settle_s, self._read_s)
        later = [each for each in self._declarers.unjoined(followers, now) if each.key > key]
        # The next peer may lead others that belong to us, because it looked before it could find us: tell it at once.
        return [
            (each, self._declarers.seen_at(each.peer) + (after_s if index else 0.0))
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
