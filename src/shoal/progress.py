"""Where the swarm stands: who is at which state, how many samples there are, and which state is the best one.

Pure bookkeeping. What a peer says of itself (`wire.Progress`) is kept until it says something newer, is lost, has left,
or has been silent for `ttl_s`. A record in the DHT may be of a peer that was killed, also of a run of the same name
before this one. So two things are believed of live peers only, that is of who says them directly or has renewed its
record: where the run ends for them, and that their settings are others.

**The fork rule.** Every state has a key: (epoch, samples that went into it, digest), and of two keys the one with the
higher epoch is better; at one epoch the one with more samples; with as many, the *lower* digest. The best state of all
live peers wins: whoever is at another one downloads it. A state that only clients hold does not count while there are
others, because nobody can download it: a client that is alone with its state takes the best of the others. Nor does one
whose holders have not given it when they were asked twice; it is asked for again after a while, ever more rarely. Keys
are totally ordered and the key of a peer that can be dialed only grows, so all who can see each other end at one state,
whatever order they hear things in. See `docs/decisions/0001-commit-and-fork-rules.md`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from shoal.peer import PeerID
from shoal.wire import Progress, Standing

__all__ = ["StateKey", "SwarmProgress", "SwarmView", "settings_difference"]

_SHOWN = 120
_MAX_REMEMBERED = 4096
_TRIES = 2
_ASIDE_S, _LONGEST_ASIDE_S = 60.0, 960.0
_RELAYED_S = 3.0
"""What somebody tells of others holds for so long: by then they have written it to the DHT themselves."""

_INVERTED = bytes(range(255, -1, -1))


class StateKey(NamedTuple):
    """Orders states: the larger key is the better state."""

    epoch: int
    samples: int
    inverted_digest: bytes

    @classmethod
    def of(cls, epoch: int, samples: int, digest: bytes) -> StateKey:
        """The key of a state."""
        return cls(epoch, samples, digest.translate(_INVERTED))


@dataclass(frozen=True, slots=True)
class SwarmView:
    """The swarm as one peer sees it.

    Attributes:
        peers: everybody who is alive, this peer included.
        together: those at this peer's state, and those on their way there; this peer included. Those for which the run
            ends at this state only if it does so for this peer.
        coming: those of `together` who are on their way.
        samples: accumulated at this peer's state, by all who are there and can be believed: see `SwarmProgress.view`.
        rate: samples per second of all who are there.
        epoch: of the best state.
        behind: the best state is another one than this peer's.
        leaders: who has the best state, this peer left out; those that can be dialed first.
        vouched: it is another one than this peer's, and a contributor to the last rounds is at it.
    """

    peers: tuple[PeerID, ...]
    together: frozenset[PeerID]
    coming: frozenset[PeerID]
    samples: int
    rate: float
    epoch: int
    behind: bool
    leaders: tuple[PeerID, ...]
    vouched: bool = False

    def eta_s(self, target: int) -> float:
        """Seconds until `target` samples are there, at the present rate; infinity if nobody moves."""
        missing = max(0, target - self.samples)
        return 0.0 if not missing else missing / self.rate if self.rate > 0 else float("inf")


class SwarmProgress:
    """Remembers what the other peers of a run say of themselves.

    Args:
        me: this peer.
        settings: of the run; peers with other settings do not count, see `mismatch`.
        ttl_s: a peer that says nothing new for this long is no longer counted.
    """

    def __init__(self, me: PeerID, settings: Mapping[str, str], *, ttl_s: float) -> None:
        self._me, self._settings, self._ttl_s = me, dict(settings), ttl_s
        self._known: dict[PeerID, tuple[Progress, float]] = {}
        self._alive: set[PeerID] = set()  # of those known
        self._strangers: dict[PeerID, float] = {}  # their settings differ, if they live: what they said last
        self._lost: dict[PeerID, tuple[float, float]] = {}  # what it said last: its own time, and when it was lost here
        self._withheld: dict[PeerID, tuple[int, float]] = {}  # how often, and until when it does not count
        self._relayed: dict[PeerID, tuple[Progress, float]] = {}  # of those known, as others say
        self._now = float("-inf")
        self.contributors: Collection[PeerID] = ()
        """To the last steps, if there were any. To say something under a new key costs nothing. So a better state that
        a contributor is at comes before those that only others are at; the samples of all others together count for no
        more than those of this peer and of the contributors; and only contributors are believed what they tell of
        others."""
        self.mismatch: str | None = None
        """How the last live peer with other settings differs; None if there was none."""

    @property
    def strangers(self) -> int:
        """How many peers with other settings there are, alive or not."""
        return len(self._strangers)

    def heard(self, progress: Progress, now: float, *, direct: bool = True) -> bool:
        """Somebody told where it stands (`now`: local time, seconds). True if it was news.

        Args:
            progress: what it says.
            now: local time, seconds.
            direct: False if it was read from the DHT: then the peer may be gone.

        What a lost peer said before it was lost is not: it may still lie in the DHT. But `ttl_s` later nothing of that
        is left there, and a peer whose clock was set back counts again.
        """
        self._now = max(self._now, now)
        peer = progress.contact.peer
        if peer == self._me or not math.isfinite(progress.time) or not math.isfinite(progress.rate):
            return False
        if progress.left:
            return self._left(progress)
        difference = settings_difference(self._settings, progress.settings)
        if difference is not None:
            if direct or progress.time > self._strangers.get(peer, math.inf):
                self.mismatch = difference
            self._strangers.setdefault(peer, progress.time)
            _bound(self._strangers)
            return False
        if progress.time <= self._last_time(peer, now):
            return False
        if direct or peer in self._known:
            self._alive.add(peer)
        if direct:
            self._relayed.pop(peer, None)
        self._known[peer] = (progress, now)
        self._lost.pop(peer, None)
        return True

    def relayed(self, teller: Progress, others: Iterable[Standing], now: float) -> bool:
        """Somebody told of others who are at its own state. True if it was news.

        It counts for those that are known already, for a while, and until they say something themselves: so nobody can
        be silenced by what is said in its name.
        """
        news = False
        for other in others if not self.contributors or teller.contact.peer in self.contributors else ():
            known = self._known.get(other.peer)
            if known is None or not self._said_last(other.peer, now).time < other.time < math.inf:
                continue
            at_state = {"epoch": teller.epoch, "digest": teller.digest, "branch_samples": teller.branch_samples}
            progress = replace(known[0], samples=other.samples, time=other.time, **at_state)
            self._relayed[other.peer] = progress, now
            news = True
        return news

    def _said_last(self, peer: PeerID, now: float) -> Progress:
        """What a known peer said last, itself or through others."""
        own = self._known[peer][0]
        progress, at = self._relayed.get(peer, (own, now))
        return progress if progress.time > own.time and now - at <= _RELAYED_S else own

    def standings(self, mine: Progress, now: float) -> list[Standing]:
        """What is known here of those who are at the same state as this peer."""
        said = [self._said_last(peer, now) for peer in self._known]
        return [Standing(p.contact.peer, p.samples, p.time) for p in said if p.digest == mine.digest]

    def _left(self, progress: Progress) -> bool:
        peer = progress.contact.peer
        self._strangers.pop(peer, None)
        if progress.time <= self._last_time(peer, self._now):
            return False
        self._lose(peer, progress.time)
        return True

    def _last_time(self, peer: PeerID, now: float) -> float:
        """What a peer says must be newer than this, by its own clock."""
        if (known := self._known.get(peer)) is not None:
            return known[0].time
        said, lost_at = self._lost.get(peer, (float("-inf"), now))
        return said if now - lost_at <= self._ttl_s else float("-inf")

    def lost(self, peer: PeerID) -> bool:
        """A peer is gone: what it said before does not count any more. True if it was known."""
        known = self._known.get(peer)
        if known is not None:
            self._lose(peer, known[0].time)
        return known is not None

    def silent(self, peer: PeerID, *, said_before: float) -> None:
        """A peer that was only read of gives no answer: it does not count until it renews its record.

        Args:
            peer: who.
            said_before: what is newer than this (its own clock) counts all the same.
        """
        if self._strangers.get(peer, math.inf) < said_before:
            del self._strangers[peer]
        if peer in self._known and peer not in self._alive and self._known[peer][0].time < said_before:
            self._lose(peer, self._known[peer][0].time)

    def _lose(self, peer: PeerID, said: float) -> None:
        self._known.pop(peer, None)
        self._relayed.pop(peer, None)
        self._alive.discard(peer)
        self._lost.pop(peer, None)
        self._lost[peer] = (said, self._now)
        _bound(self._lost)

    @property
    def ends(self) -> dict[PeerID, int | None]:
        """Where the run ends, as everybody says who is known to live; None if that peer has not said so."""
        return {peer: self._known[peer][0].end_epoch for peer in self._alive}

    @property
    def peers(self) -> tuple[PeerID, ...]:
        """Who counts, as far as it was known when somebody looked last."""
        return tuple(self._known)

    def withheld(self, peers: Iterable[PeerID], now: float) -> None:
        """These were asked for their state, and did not give it: in the end it keeps nobody from going on without."""
        for peer in peers:
            times = self._withheld.pop(peer, (0, now))[0] + 1
            aside_s = min(_ASIDE_S * 2.0 ** (times - _TRIES), _LONGEST_ASIDE_S) if times >= _TRIES else 0.0
            self._withheld[peer] = times, now + aside_s
        _bound(self._withheld)

    def gave(self, peers: Iterable[PeerID]) -> None:
        """These gave their state."""
        for peer in peers:
            self._withheld.pop(peer, None)

    def _offers(self, progress: Progress, now: float) -> bool:
        return self._withheld.get(progress.contact.peer, (0, now))[1] <= now

    def progress_of(self, peer: PeerID) -> Progress | None:
        """What this peer said last."""
        known = self._known.get(peer)
        return known[0] if known else None

    def refusing(self, now: float) -> frozenset[PeerID]:
        """Who was asked for its state too often in vain: it does not count now."""
        return frozenset(peer for peer, (_, until) in self._withheld.items() if now < until)

    def further(self, epoch: int) -> dict[PeerID, int]:
        """Who is known to live, can be dialed, and says that it is at a later epoch than this one: and at which."""
        said = {peer: self._known[peer][0] for peer in self._alive}
        return {peer: each.epoch for peer, each in said.items() if each.epoch > epoch and each.contact.addresses}

    def better(self, mine: Progress, now: float) -> dict[PeerID, int]:
        """Who says that it has a better state than this peer, can be dialed, and was not asked in vain: its epoch."""
        said = {peer: self._said_last(peer, now) for peer in self._known}
        return {
            peer: progress.epoch
            for peer, progress in said.items()
            if progress.contact.addresses and self._offers(progress, now) and _key(progress) > _key(mine)
        }

    def next_expiry(self) -> float | None:
        """When the next peer would have been silent for too long."""
        return min((heard + self._ttl_s for _, heard in self._known.values()), default=None)

    def view(
        self,
        mine: Progress,
        now: float,
        *,
        shared: bool = True,
        awaited: frozenset[PeerID] = frozenset(),
        before: StateKey | None = None,
        absent: Collection[PeerID] = (),
        silent: frozenset[PeerID] = frozenset(),
    ) -> SwarmView:
        """The swarm, seen from a peer that stands at `mine`.

        Args:
            mine: what this peer says of itself.
            now: local time, seconds.
            shared: whether others should hold this peer's state too, whether they said so yet or not. Matters for a
                client only: its state counts for itself if it is shared.
            awaited: who is on its way to this peer's state, unless it has named a state since.
            before: the state that they come from.
            absent: who is not waited for in a round; its samples do not count.
            silent: who does not count now, whatever it said.
        """
        self._now = max(self._now, now)
        for peer in [peer for peer, (_, heard) in self._known.items() if now - heard > self._ttl_s]:
            self.lost(peer)
        own_key = _key(mine)
        others = {peer: self._said_last(peer, now) for peer in self._known if peer not in silent}
        # What can be dialed can be downloaded from. If nobody can be dialed, all count, and nothing can be done.
        last = mine.end_epoch if mine.end_epoch is not None and _at_end(mine) else math.inf
        others_offer = (each for each in others.values() if each.epoch <= last and self._offers(each, now))
        offering = [mine, *others_offer]
        offered = {_key(progress) for progress in offering if progress.contact.addresses}
        if not offered:
            offered = {_key(progress) for progress in offering[1:]}
        if shared or not offered:
            offered.add(own_key)
        vouchers = [own_key] if own_key in offered else []
        vouchers += [_key(others[peer]) for peer in self.contributors if peer in others]
        best = max(offered.intersection(vouchers), default=own_key)
        vouched = best != own_key
        if not vouched:
            best = max(offered)
        together = {
            peer: progress
            for peer, progress in others.items()
            if progress.digest == mine.digest and (_at_end(mine) or not _at_end(progress))
        }
        coming = frozenset(
            peer
            for peer in awaited
            if before is not None and peer in others and peer not in together and _key(others[peer]) <= before
        )
        return SwarmView(
            peers=(self._me, *sorted(others)),
            together=frozenset({self._me, *together, *coming}),
            coming=coming,
            samples=_believed(mine, [p for peer, p in together.items() if peer not in absent], self.contributors),
            rate=mine.rate + sum(max(0.0, progress.rate) for progress in together.values()),
            epoch=best.epoch,
            behind=best != own_key,
            leaders=tuple(
                sorted(
                    (peer for peer, progress in others.items() if _key(progress) == best),
                    key=lambda peer: (not others[peer].contact.addresses, peer),
                )
            ),
            vouched=vouched,
        )


def _at_end(progress: Progress) -> bool:
    """Whether the run is over for this peer: it is in no round any more."""
    return progress.end_epoch is not None and progress.end_epoch <= progress.epoch


def _believed(mine: Progress, others: Iterable[Progress], contributors: Collection[PeerID]) -> int:
    """The samples of all, as far as they can be believed."""
    if not contributors:
        return mine.samples + sum(progress.samples for progress in others)
    known, strange = mine.samples, 0
    for progress in others:
        if progress.contact.peer in contributors:
            known += progress.samples
        else:
            strange += progress.samples
    return known + min(known, strange)


def _bound(remembered: dict[PeerID, Any]) -> None:
    while len(remembered) > _MAX_REMEMBERED:
        remembered.pop(next(iter(remembered)))


def settings_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """A sentence that names the first setting that differs, None if all are equal."""
    for name in sorted({*mine, *theirs}, key=lambda name: (name != "optimizer", name)):  # its options follow from it
        if mine.get(name) != theirs.get(name):
            here, there = mine.get(name, "not set"), theirs.get(name, "not set")
            return f"{name[:_SHOWN]} is {here[:_SHOWN]} here and {there[:_SHOWN]} at another peer of the run"
    return None


def _key(progress: Progress) -> StateKey:
    return StateKey.of(progress.epoch, progress.branch_samples, progress.digest)
