"""The progress of the swarm: the state of each peer, the number of samples, and which state is the best one.

This is pure bookkeeping. A peer's word about itself (`wire.Progress`) is kept until the peer says something newer, is
lost, has left, or has been silent for `ttl_s`. `expire` forgets what is too old; `view` passes over it, and changes
nothing. A record in the DHT may be of a peer that was killed, or of an earlier
run of the same name. So a record that a peer wrote before it was lost does not bring it back, and two things are
believed only of live peers, that is of peers that say them directly or have
renewed their record: where the run ends for them, and that their settings differ.

**The fork rule.** Every state has a key: (samples that went into it, epoch, digest), and of two keys the one with more
samples is better. At equal samples the key with the higher epoch is better; at equal epochs the key with the *lower*
digest. A state of epoch 0 is worse than any other, whatever it says that went into it. The best state of all live peers
wins: a peer at another state downloads it. Nobody can dial a client, but it gives its state to a peer that it has
dialed. That peer counts the client's state if it has more samples and a later epoch than any state of the others. All
other peers ignore states that only clients hold, unless there are no others. A client that is alone with its state
takes the best of the others, unless that one has fewer samples and an earlier epoch than its own. A client that has
dialed nobody compares with the last state that it had with others instead. A state does not count either if its holders
were asked for it twice and did not give it; they are asked again after a while, ever more rarely. Keys are totally
ordered, and the key of a peer that can be dialed only grows. So all peers that can see each other end at one state, in
whatever order they hear things. See `docs/why/decisions/0001-commit-and-fork-rules.md` and 0065.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from shoal.base.bounded import bound, put_last
from shoal.base.ledger import Ledger
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Progress, Standing

__all__ = [
    "FEW",
    "NO_STATE",
    "RELAYED_S",
    "Farewell",
    "Heeded",
    "StateKey",
    "SwarmProgress",
    "SwarmView",
    "settings_difference",
]

_SHOWN = 120
_FIRST = "strategy", "optimizer"
"""If several settings differ, these are named first: others follow from them."""

_FROZEN = "frozen tensors"
_OF_MODEL = "parameter names", _FROZEN
"""These are known only where the optimizer was given the model."""

_MAX_REMEMBERED, _MAX_TELLERS = 4096, 32
_ASIDE_S, _LONGEST_ASIDE_S = 60.0, 960.0
"""The first and the longest pause in which a state does not count that was asked for twice and not given, seconds."""

FEW = 4
"""If there are no more others than this, each of us is told directly by all of them."""

RELAYED_S = 3.0
"""A peer's word about other peers holds for this time, unless it is said again or they say something themselves."""

_LARGEST_RATE = 1e15
"""Samples per second. Rates are added up and taken away again: with larger ones nothing would be left of the others."""

_ON_ITS_WAY_S = 0.5
"""A word travels for less than this, so we know how late it is at the peer that says it."""

_REFUSED_S = 1.0
"""A state that is not taken may be taken later: it is looked at again after this time."""

_INVERTED = bytes(range(255, -1, -1))


class StateKey(NamedTuple):
    """Orders states: the larger key is the better state.

    Attributes:
        trained: whether the swarm has taken a step. Before that `samples` counts steps of an optimizer that resumes.
        samples: that went into the state.
        epoch: swarm steps that went into it.
        inverted_digest: of two equal states otherwise, that with the lower digest is better.
    """

    trained: bool
    samples: int
    epoch: int
    inverted_digest: bytes

    @staticmethod
    @lru_cache(maxsize=64)
    def of(epoch: int, samples: int, digest: bytes) -> StateKey:
        """The key of a state."""
        return StateKey(epoch > 0, samples, epoch, digest.translate(_INVERTED))

    def is_before(self, other: StateKey) -> bool:
        """Whether fewer samples went into this state than into the other one, and fewer epochs."""
        return self < other and self.epoch < other.epoch

    @staticmethod
    def of_peer(progress: Progress) -> StateKey:
        """The key of the state that a peer is at."""
        return StateKey.of(progress.epoch, progress.branch_samples, progress.digest)


NO_STATE = StateKey.of(0, 0, b"")
"""Worse than every state."""


class Heeded(NamedTuple):
    """The peers whose states may be taken, whichever they name.

    Attributes:
        vouched: their words count: these states come before others.
        others: nobody's word counts more than theirs.
    """

    vouched: frozenset[PeerID]
    others: frozenset[PeerID]

    def keys(self, named: Mapping[PeerID, StateKey]) -> frozenset[StateKey]:
        """The states that may be taken, of these that peers name: from whoever has them."""
        return frozenset(named[peer] for peer in self.vouched | self.others if peer in named)


Heed = Callable[[StateKey, Mapping[PeerID, StateKey], Collection[PeerID]], Heeded]
"""Says which states may be taken. It is given this peer's state, the state of each other peer, and the others that can
give theirs: a client cannot give its state to a client."""


@dataclass(frozen=True, slots=True)
class SwarmView:
    """The swarm as one peer sees it.

    Attributes:
        peers: all peers that are alive, including this peer.
        together: the peers at this peer's state and the peers on their way there, including this peer. Peers for which
            the run ends at this state belong here only if it ends there for this peer too.
        coming: the peers of `together` that are on their way.
        done: of the next step, by all peers at this peer's state, as far as they can be believed: see
            `SwarmProgress.view`. In the unit of `Progress.done`, as `own`.
        rate: samples per second of all peers of `together`.
        epoch: the epoch of the best state.
        behind: the best state is another one than this peer's. `Outlook.view_of` makes it False where the trainer goes
            on all the same.
        vouched: the best state is another one than this peer's, and somebody whose word counts is at it.
        best: the key of the best state.
        others: the last words of the other peers.
        own: of `done`, this peer's part.
        mine: this peer's word, from which the swarm is seen.
        trains: whether this peer has anything accumulated, or is about to: it has a rate.
        ahead: one place has most of the samples (see `SwarmProgress.places`), and contributors at others are at their
            first batch since this state.
        contributors: the peers that contributed to the last steps, if there were any.
        absent: peers that no round waits for.
        vouching: the others whose words for a state count.
        refused: the others that name a better state, or for a client another one, which is not taken.
        steps_first: a better state is known, and the peers here make their own step all the same.
        calling: the others at this peer's state that say that there is enough for the next step.
        log: of a view and later ones, while all else is the same, this is the same list: the peers whose words were
            taken in meanwhile are added to it.
    """

    peers: tuple[PeerID, ...]
    together: frozenset[PeerID]
    coming: frozenset[PeerID]
    done: int
    rate: float
    epoch: int
    behind: bool
    vouched: bool = False
    best: StateKey = field(default=NO_STATE, compare=False)
    others: Mapping[PeerID, Progress] = field(default_factory=dict, compare=False)
    own: int = field(default=0, compare=False)
    mine: Progress | None = field(default=None, compare=False)
    trains: bool = field(default=True, compare=False)
    ahead: bool = False
    contributors: Collection[PeerID] = field(default=(), compare=False)
    absent: frozenset[PeerID] = field(default=frozenset(), compare=False)
    vouching: frozenset[PeerID] = field(default=frozenset(), compare=False)
    refused: frozenset[PeerID] = field(default=frozenset(), compare=False)
    steps_first: bool = field(default=False, compare=False)
    calling: frozenset[PeerID] = field(default=frozenset(), compare=False)
    log: list[PeerID] | None = field(default=None, compare=False)

    @property
    def leaders(self) -> tuple[PeerID, ...]:
        """The peers that have the best state, this peer left out; those that can be dialed come first."""
        at_best = [progress.contact for progress in self.others.values() if StateKey.of_peer(progress) == self.best]
        return tuple(contact.peer for contact in sorted(at_best, key=lambda each: (not each.addresses, each.peer)))


class _Word(NamedTuple):
    """The last word of a peer, the local time at which it was heard, and the least that its clock is ahead of ours."""

    said: Progress
    at: float
    ahead: float


class _Unheard(NamedTuple):
    """What peers have done that do not count here, as another peer at this state told it, and when (local time)."""

    key: StateKey
    done: dict[PeerID, int]
    at: float


class Farewell(NamedTuple):
    """The last word of a peer that has left in order.

    Attributes:
        epoch, digest: of its state.
        ended: whether it had ended the run there, and was one of the peers of this one.
        parameters: see `Progress.parameters`.
    """

    epoch: int
    digest: bytes
    ended: bool
    parameters: bytes | None = None


class _Loss(NamedTuple):
    """The loss of a peer: the local time at which it was lost.

    By the peer's own clock: the time of its last word, and the time until which it can have written to the DHT.
    """

    said: float
    wrote: float
    at: float


class SwarmProgress:
    """Remembers what the other peers of a run say of themselves.

    Args:
        me: this peer.
        settings: the run's settings; peers with other settings do not count, see `mismatch`.
        ttl_s: a peer that says nothing new for this long is no longer counted.
        auxiliary: this peer has no samples, so what others may claim beside them cannot follow from them. Where no
            contributor is left at its state, it believes all.
        heed: says whose states may be taken; None: all may, those of contributors first.
    """

    def __init__(
        self,
        me: PeerID,
        settings: Mapping[str, str],
        *,
        ttl_s: float,
        auxiliary: bool = False,
        heed: Heed | None = None,
    ) -> None:
        self._heed = heed or self._heed_all
        self._me, self._settings, self.ttl_s, self._auxiliary = me, dict(settings), ttl_s, auxiliary
        self._known: dict[PeerID, _Word] = {}
        self._alive: set[PeerID] = set()  # of those known
        self._other_settings: dict[PeerID, float] = {}  # of each such peer, the time of its last word
        self._lost: dict[PeerID, _Loss] = {}
        self._withheld = Ledger[PeerID](_ASIDE_S, _LONGEST_ASIDE_S)  # by those that did not give their states
        self._relayed: dict[PeerID, tuple[Progress, float]] = {}  # the word of others about known peers
        self._unheard: dict[PeerID, _Unheard] = {}  # the last word of others about peers that do not count here
        self._direct: set[PeerID] = set()  # of those known: each has said something over a link that lives
        self._calling: dict[PeerID, StateKey] = {}  # that there is enough at this state
        self._tellers: dict[PeerID, PeerID] = {}  # of peers that were not known when these told of them
        self._now, self._oldest = float("-inf"), float("inf")  # no known word is older
        self._best = self._best_of_clients = NO_STATE  # no peer, and no client, has named a better one
        self._clients: set[PeerID] = set()  # of those known
        self._seen: _Seen | None = None
        self._key: StateKey | None = None  # of the state that the swarm was seen from last
        self._own: dict[bytes, StateKey] = {}  # of this peer's last states, by their inverted digests
        self._silent = frozenset[PeerID]()  # at that time
        self.contributors: Collection[PeerID] = ()
        """The peers that `contributed` to the last steps, if there were any."""
        self._believed: Mapping[PeerID, int] = {}
        self._places: Mapping[PeerID, bytes] = {}
        self.left: dict[PeerID, Farewell] = {}
        """The peers that have left in order, and have not come back."""
        self.mismatches: dict[PeerID, str] = {}
        """The live peers with other settings, and a sentence for each that says how they differ; the last one at the
        end."""

    @property
    def mismatch(self) -> str | None:
        """A sentence that says how the last live peer with other settings differs; None if there was none."""
        return next(reversed(self.mismatches.values()), None)

    @property
    def other_settings(self) -> int:
        """Return how many peers with other settings there are, alive or not."""
        return len(self._other_settings)

    def heard(self, progress: Progress, now: float, *, direct: bool = True) -> bool:
        """A peer told where it stands. True if it was news.

        Args:
            progress: the peer's word.
            now: local time, seconds.
            direct: False if it was read from the DHT: then the peer may be gone.

        A lost peer counts again when it says something new, or writes something after it was lost. What it wrote
        before may still lie in the DHT. But `ttl_s` later nothing of it is left there, and a peer whose clock was set
        back counts again.
        """
        self._now = max(self._now, now)
        peer = progress.contact.peer
        if peer == self._me or not math.isfinite(progress.time) or not abs(progress.rate) <= _LARGEST_RATE:
            return False
        if progress.left:
            return self._left(progress)
        difference = settings_difference(self._settings, progress.settings)
        if difference is not None:
            if direct or progress.time > self._other_settings.get(peer, math.inf):
                put_last(self.mismatches, peer, difference, _MAX_REMEMBERED)
            self._other_settings.setdefault(peer, progress.time)
            bound(self._other_settings, _MAX_REMEMBERED)
            return False
        if progress.time <= self._last_time(peer, now, direct=direct):
            return False
        progress = self._as_known(progress)
        if direct or peer in self._known:
            self._alive.add(peer)
        if direct:
            self._relayed.pop(peer, None)
            self._direct.add(peer)
        before = self._known.get(peer)
        ahead = progress.time - now
        self._known[peer] = _Word(progress, now, ahead if before is None else max(ahead, before.ahead))
        self._oldest = min(self._oldest, now)
        self._best = max(self._best, StateKey.of_peer(progress))
        if progress.contact.addresses:
            self._clients.discard(peer)
        else:
            self._clients.add(peer)
            self._best_of_clients = max(self._best_of_clients, StateKey.of_peer(progress))
        self._lost.pop(peer, None)
        self.left.pop(peer, None)
        if self._seen is not None:
            self._seen.until = min(self._seen.until, now + self.ttl_s)
            if peer in self._relayed or not self._seen.takes(progress):
                self._seen = None
        return True

    def relayed(self, teller: Progress, others: Iterable[Standing], now: float) -> bool:
        """A peer told of other peers that are at its own state. True if it was news.

        Such words count only for peers that are known already, for a while, and until they say something themselves. So
        nobody can silence a peer by speaking in its name. They count as long as we are at the teller's state: else one
        contributor could tell each of us that all others are somewhere else.

        Of peers that we do not hear only what they have done counts, as that of strangers: the line to them may be bad,
        while the teller hears them. Else this peer would come late to each round.

        Where we are few, each of us tells all others. So nobody is believed about a peer that says itself where it is,
        over a link that lives: else one contributor could tell each of us that all others have done enough.

        A peer that tells of others calls us to the next step: by all that it knows there is enough. It calls until it
        has another state: its trainer may stand still for that step, whatever it has heard since.
        """
        teller = self._as_known(teller)
        is_here = self._key in (None, StateKey.of_peer(teller))
        at_state = {"epoch": teller.epoch, "digest": teller.digest, "branch_samples": teller.branch_samples}
        others = list(others) if not self.contributors or teller.contact.peer in self.contributors else []
        news = self._keep_unheard(teller, others, now) and is_here
        news = (self._calls(teller, others) and is_here) or news
        few = len(self._known) <= FEW
        for other in others:
            known = self._known.get(other.peer)
            if known is None and other.peer != self._me and other.peer not in self._lost:
                self._tellers[other.peer] = teller.contact.peer
                bound(self._tellers, _MAX_REMEMBERED)
            if known is None or (few and other.peer in self._direct):
                continue
            said = self._said_last(other.peer, now)
            if not is_here and said is not known.said:
                continue  # it is told to be here, and what was told of it would be forgotten
            if said is not known.said and said.time == other.time:
                self._relayed[other.peer] = said, now  # told again: it holds for longer
            if not said.time < other.time < math.inf:
                continue
            progress = replace(known.said, done=other.done, time=other.time, **at_state)
            self._relayed[other.peer] = progress, now
            news = news or is_here
            if self._seen is not None and is_here:
                self._seen.until = min(self._seen.until, now + RELAYED_S)
                if not self._seen.takes(progress):
                    self._seen = None
        return news

    def _calls(self, teller: Progress, others: Sequence[Standing]) -> bool:
        """Note whether this peer calls us to the next step. True if it did not before."""
        peer, key = teller.contact.peer, StateKey.of_peer(teller)
        if not others or self._calling.get(peer) == key:
            return False
        put_last(self._calling, peer, key, _MAX_TELLERS)
        if self._seen is not None:
            self._seen.calling = None
        return True

    def take_tellers(self) -> list[PeerID]:
        """The peers that have told of others which are not known here even now; they are named once."""
        tellers = [teller for peer, teller in self._tellers.items() if peer not in self._known]
        self._tellers.clear()
        return tellers

    def set_ttl(self, seconds: float) -> None:
        """A peer that says nothing new for this long is no longer counted."""
        self.ttl_s = seconds

    def contributed(
        self,
        peers: Collection[PeerID],
        *,
        believed: Mapping[PeerID, int] | None = None,
        places: Mapping[PeerID, bytes] | None = None,
    ) -> None:
        """These peers contributed to the last steps.

        A new key costs an attacker nothing. So the samples of all other peers together count for no more than those of
        this peer and the contributors, and only contributors are believed about others.

        Args:
            peers: the contributors; none if there were none.
            believed: the most samples that each of them may have, as far as it is bounded: more does not count.
            places: where they are; of those at one place nobody knows that they are more than one.
        """
        if peers is not self.contributors:
            self._seen = None
        self.contributors, self._believed, self._places = peers, believed or {}, places or {}

    def is_false(self, key: StateKey) -> bool:
        """Whether this names a state at which this peer has been, with other samples, or another epoch, than it has.

        Both follow from the digest (see `run.decide.state_name`).
        """
        return self._own.get(key.inverted_digest, key) != key

    def _as_known(self, progress: Progress) -> Progress:
        """A peer's word, with what its state is in place of what it says: what is ours is nothing better than ours."""
        key = StateKey.of_peer(progress)
        if not self.is_false(key):
            return progress
        sometimes("a peer says of a state what others know better")
        own = self._own[key.inverted_digest]
        return replace(progress, epoch=own.epoch, branch_samples=own.samples)

    def _note_own(self, key: StateKey) -> None:
        """This peer is at another state now, and knows what it is."""
        if key.trained and not self.is_false(key):  # the digest of a beginning does not say how many steps came before
            put_last(self._own, key.inverted_digest, key, _MAX_REMEMBERED)
            for peer, word in self._known.items():
                if self.is_false(StateKey.of_peer(word.said)):
                    self._known[peer] = word._replace(said=self._as_known(word.said))

    def _keep_unheard(self, teller: Progress, others: Sequence[Standing], now: float) -> bool:
        """Keep what this peer says of those that do not count here, in place of what it said before. True if news."""
        peer, known, silent = teller.contact.peer, self._known, self._silent
        done = {each.peer: each.done for each in others if each.peer not in known or each.peer in silent}
        done.pop(self._me, None)
        before, told = self._unheard.pop(peer, None), _Unheard(StateKey.of_peer(teller), done, now)
        if done:
            self._unheard[peer] = told
            bound(self._unheard, _MAX_TELLERS)
        if not done and before is None:
            return False
        if before is None or (before.key, before.done) != (told.key, done) or now - before.at > RELAYED_S:
            self._seen = None  # else it is told again, and a view need not be made anew
        return before is None or before.done != done

    def lacks(self, others: Iterable[Standing]) -> int:
        """How many peers are not known here that another one told of."""
        return sum(other.peer not in self._known and other.peer != self._me for other in others)

    def _said_last(self, peer: PeerID, now: float) -> Progress:
        """The last word of a known peer, said by itself or by others."""
        own = self._known[peer].said
        if (relayed := self._relayed.get(peer)) is None:
            return own
        progress, at = relayed
        counts = progress.time > own.time and now - at <= RELAYED_S
        return progress if counts and self._key in (None, StateKey.of_peer(progress)) else own

    def standings(self, mine: Progress, now: float, *, told: bool = True, most: int | None = None) -> list[Standing]:
        """What the peers at the same state as this peer have done: of so many of them at most.

        Unless `told`, only by their own words.
        """
        relayed = self._relayed if told else ()
        known = self._known.items()
        said = (self._said_last(peer, now) if peer in relayed else word.said for peer, word in known)
        here = islice((each for each in said if each.digest == mine.digest), most)
        return [Standing(each.contact.peer, each.done, each.time) for each in here]

    def _left(self, progress: Progress) -> bool:
        peer = progress.contact.peer
        self._other_settings.pop(peer, None)
        self.mismatches.pop(peer, None)
        if progress.time <= self._last_time(peer, self._now):
            return False
        sometimes("a peer leaves the run in order")
        # The word of a peer that was never here may be of an earlier run of this name: it lies in the DHT for a while.
        was_here = peer in self._known or peer in self._lost
        ended = was_here and progress.end_epoch is not None and progress.epoch >= progress.end_epoch
        self._lose(peer, progress.time)
        farewell = Farewell(progress.epoch, progress.digest, ended, progress.parameters)
        put_last(self.left, peer, farewell, _MAX_REMEMBERED)
        return True

    def _last_time(self, peer: PeerID, now: float, *, direct: bool = True) -> float:
        """A peer's word must be newer than this, by the peer's own clock, to count."""
        if (known := self._known.get(peer)) is not None:
            return known.said.time
        loss = self._lost.get(peer)
        if loss is None or now - loss.at > self.ttl_s:
            return float("-inf")
        return loss.said if direct else loss.wrote

    def lost(self, peer: PeerID, now: float) -> bool:
        """A peer is gone (`now`: local time, seconds): nothing that it said before counts any more.

        Returns:
            Whether it was known.
        """
        self._now = max(self._now, now)
        known = self._known.get(peer)
        if known is not None:
            self._lose(peer, known.said.time, known.ahead + self._now + _ON_ITS_WAY_S)
        return known is not None

    def expire(self, now: float) -> None:
        """Forget the peers that have said nothing for `ttl_s` (`now`: local time, seconds). Cheap if there are none."""
        self._now = max(self._now, now)
        if now - self._oldest <= self.ttl_s:
            return
        for peer in [peer for peer, word in self._known.items() if now - word.at > self.ttl_s]:
            self._lose(peer, self._known[peer].said.time)
        self._oldest = min((word.at for word in self._known.values()), default=math.inf)

    def silent(self, peer: PeerID, *, said_before: float) -> None:
        """A peer gives no answer, and only its record was read: it does not count until it renews its record.

        Args:
            peer: the silent peer.
            said_before: a record that is newer than this (by the peer's own clock) counts all the same.
        """
        if self._other_settings.get(peer, math.inf) < said_before:
            del self._other_settings[peer]
        if peer in self._known and peer not in self._alive and self._known[peer].said.time < said_before:
            self._lose(peer, self._known[peer].said.time)

    def _lose(self, peer: PeerID, said: float, wrote: float = -math.inf) -> None:
        if self._seen is not None and (peer in self._relayed or self._unheard or not self._seen.loses(peer)):
            self._seen = None
        self._known.pop(peer, None)
        self._relayed.pop(peer, None)
        self._unheard.pop(peer, None)
        self._calling.pop(peer, None)
        self._direct.discard(peer)
        self._alive.discard(peer)
        self._clients.discard(peer)
        put_last(self._lost, peer, _Loss(said, max(said, wrote), self._now), _MAX_REMEMBERED)

    @property
    def ends(self) -> dict[PeerID, int | None]:
        """For each peer that is known to live, the epoch at which it says the run ends; None if it has said none."""
        return {peer: self._known[peer].said.end_epoch for peer in self._alive}

    @property
    def peers(self) -> tuple[PeerID, ...]:
        """The peers that count, as of the last `expire`."""
        return tuple(self._known)

    def note_withheld(self, peers: Iterable[PeerID], now: float) -> None:
        """These peers were asked for their state and did not give it: after two tries others go on without it."""
        self._seen = None
        for peer in peers:
            self._withheld.failed(peer, now)

    def note_given(self, peers: Iterable[PeerID]) -> None:
        """These peers gave their state."""
        self._seen = None
        for peer in peers:
            self._withheld.forgive(peer)

    def forget_withheld(self) -> None:
        """Let the states of those count again that did not give them: the reason was here, and is gone."""
        self._seen = None
        self._withheld.clear()

    def _offers(self, progress: Progress, now: float, end: int | None, *, at_end: bool) -> bool:
        """Return whether a peer's state may be taken by one for which the run ends there, and that may be at that end.

        A peer at the end takes no state beyond it. Before that only contributors are believed one: else one stranger
        with a state of a late epoch would end the run.
        """
        peer = progress.contact.peer
        beyond = end is not None and progress.epoch > end
        if beyond and (at_end or (self.contributors and peer not in self.contributors)):
            return False
        return self._withheld.until(peer) <= now

    def progress_of(self, peer: PeerID) -> Progress | None:
        """The last direct word of this peer."""
        known = self._known.get(peer)
        return known.said if known else None

    def refusing(self, now: float) -> frozenset[PeerID]:
        """The peers that were asked for their state too often without success: their states do not count now."""
        return self._withheld.pausing(now)

    def clients_before(self, key: StateKey) -> Collection[PeerID]:
        """The known clients, if any of them may have a state that this one is before."""
        return self._clients if key.is_before(self._best_of_clients) else ()

    def further(self, key: StateKey, giving: Collection[PeerID] = ()) -> dict[PeerID, int]:
        """Peers that are known to live, and say they have a better state, with its epoch: at least 1.

        Only such as can be dialed, and clients that give us their states all the same (`giving`).
        """
        if key >= self._best:  # asked whenever something is heard: so not all are looked at
            return {}
        said = [self._known[peer].said for peer in self._alive]
        further = (each for each in said if each.epoch and self._beats(StateKey.of_peer(each), each, key, giving))
        return {each.contact.peer: each.epoch for each in further}

    @staticmethod
    def _beats(theirs: StateKey, progress: Progress, key: StateKey, giving: Collection[PeerID]) -> bool:
        """Whether this peer's state is better than that of this key, and can be had."""
        if progress.contact.addresses:
            return theirs > key
        return progress.contact.peer in giving and key.is_before(theirs)

    def better(self, mine: Progress, now: float, giving: Collection[PeerID] = ()) -> dict[PeerID, StateKey]:
        """Peers that say they have a better state than this one, which may be taken, and do not refuse it; its key."""
        said = {peer: self._said_last(peer, now) for peer in self._known}
        own = StateKey.of_peer(mine)
        named = {peer: StateKey.of_peer(progress) for peer, progress in said.items()}
        keys = self._heed(own, named, _can_give(mine, said)).keys(named)
        return {
            peer: key
            for peer, progress in said.items()
            if named[peer] in keys
            and self._offers(progress, now, mine.end_epoch, at_end=False)
            and self._beats(key := StateKey.of_peer(progress), progress, own, giving)
        }

    def _heed_all(self, _: StateKey, named: Mapping[PeerID, StateKey], __: Collection[PeerID]) -> Heeded:
        return Heeded(frozenset(self.contributors), frozenset(named))

    def view(  # noqa: PLR0913 (all but two by name)
        self,
        mine: Progress,
        now: float,
        *,
        shared: bool = True,
        floor: StateKey = NO_STATE,
        awaited: frozenset[PeerID] = frozenset(),
        before: StateKey | None = None,
        absent: Collection[PeerID] = (),
        silent: frozenset[PeerID] = frozenset(),
        giving: frozenset[PeerID] = frozenset(),
        mends: frozenset[PeerID] = frozenset(),
    ) -> SwarmView:
        """The swarm, seen from a peer that stands at `mine`.

        Args:
            mine: this peer's word about itself.
            now: local time, seconds.
            shared: whether others should hold this peer's state too, even if they have not said so yet. This matters
                only for a client: its state counts for itself if it is shared.
            floor: the last state that this peer had with others. A client whose state does not count goes back to none
                that is before it: it would lose what all have trained.
            awaited: peers that are on their way to this peer's state, unless they have named another state since.
            before: the state that the awaited peers come from.
            absent: peers that no round waits for; what they have done does not count.
            silent: peers that do not count now, whatever they said.
            giving: clients that give this peer their states. (For a client `floor` says whether it gives its own.)
            mends: peers whose state is to replace this one: it counts though they may be clients that are no further.
        """
        key, dialed = StateKey.of_peer(mine), bool(mine.contact.addresses)
        if key != self._key:
            self._note_own(key)
        self._key, self._silent = key, silent
        asked = _Asked(
            mine.digest,
            key,
            dialed,
            mine.end_epoch,
            _at_end(mine),
            shared,
            floor,
            awaited,
            before,
            frozenset(absent),
            silent,
            giving,
            mends,
        )
        seen = self._seen
        if seen is None or seen.asked != asked or now >= seen.until:
            seen = self._seen = self._look(mine, now, asked)
        if seen.calling is None:
            calling = {peer for peer, at in self._calling.items() if at == key}
            seen.calling = frozenset(calling.intersection(seen.here))
        return seen.view(mine)

    def _look(self, mine: Progress, now: float, asked: _Asked) -> _Seen:
        counted = ((peer, word) for peer, word in self._known.items() if now - word.at <= self.ttl_s)
        others = {peer: word.said for peer, word in counted if peer not in asked.silent}
        others.update((peer, self._said_last(peer, now)) for peer in self._relayed if peer in others)
        # A state can be had from a peer that can be dialed, or that gives it to us. If there is none, all states count.
        end, at_end = asked.end, asked.at_end
        named = {peer: StateKey.of_peer(progress) for peer, progress in others.items()}
        heeded = self._heed(asked.key, named, _can_give(mine, others))
        keys = heeded.keys(named)
        refused = frozenset(peer for peer, key in named.items() if key not in keys and not self._is_worse(key, asked))
        offering = [mine]
        offering += [
            each for peer, each in others.items() if named[peer] in keys and self._offers(each, now, end, at_end=at_end)
        ]
        offered = {StateKey.of_peer(progress) for progress in offering if progress.contact.addresses}
        if not offered:
            offered = {StateKey.of_peer(progress) for progress in offering[1:]}
        if asked.shared or not offered or max(offered).is_before(asked.floor):
            offered.add(asked.key)
        if asked.giving:
            most = max(offered)
            lent = (StateKey.of_peer(each) for each in offering[1:] if each.contact.peer in asked.giving)
            offered.update(key for key in lent if most.is_before(key))
        offered.update(StateKey.of_peer(each) for each in offering[1:] if each.contact.peer in asked.mends)
        vouchers = [asked.key] if asked.key in offered else []
        vouchers += [named[peer] for peer in heeded.vouched if peer in named]
        best = max(offered.intersection(vouchers), default=asked.key)
        vouched = best != asked.key
        if not vouched:
            best = max(offered)
        together = {
            peer
            for peer, progress in others.items()
            if progress.digest == mine.digest and (at_end or not _at_end(progress))
        }
        coming = {
            peer
            for peer in (asked.awaited & others.keys()) - together
            if asked.before is not None and StateKey.of_peer(others[peer]) <= asked.before
        }
        unheard: dict[PeerID, int] = {}
        for told in self._unheard.values():
            for peer, done in told.done.items() if told.key == asked.key and now - told.at <= RELAYED_S else ():
                if peer not in others and peer not in asked.absent:
                    unheard[peer] = max(done, unheard.get(peer, 0))
        return _Seen(
            asked=asked,
            until=min(self._changes_at(now), now + _REFUSED_S if refused else math.inf),
            contributors=self.contributors,
            believed=self._believed,
            places=self._places,
            others=others,
            peers=(self._me, *sorted(others)),
            here=together,
            coming=coming,
            unheard=unheard,
            best=best,
            vouched=vouched,
            vouching=heeded.vouched,
            refused=refused,
            auxiliary=self._auxiliary,
        )

    @staticmethod
    def _is_worse(key: StateKey, asked: _Asked) -> bool:
        """Whether this state would not be taken by whoever asks. A client may give up its own for a worse one."""
        return not key.trained or key == asked.key or (asked.dialed and key < asked.key)

    def _changes_at(self, now: float) -> float:
        """Return when the swarm looks different though nobody has said anything: local time, seconds."""
        until = [word.at + self.ttl_s for word in self._known.values()]
        until += [at + RELAYED_S for _, at in self._relayed.values() if now - at <= RELAYED_S]
        until += [told.at + RELAYED_S for told in self._unheard.values() if now - told.at <= RELAYED_S]
        until += map(self._withheld.until, self._withheld.pausing(now))
        return min(until, default=math.inf)


def _can_give(mine: Progress, others: Mapping[PeerID, Progress]) -> Collection[PeerID]:
    """The others that this peer can have a state from. A client gives its state to the peers that it has dialed."""
    if mine.contact.addresses:
        return others.keys()
    return {peer for peer, progress in others.items() if progress.contact.addresses}


def _at_end(progress: Progress) -> bool:
    """Return whether the run is over for this peer: it takes part in no more rounds."""
    return progress.end_epoch is not None and progress.end_epoch <= progress.epoch


def _same_state(one: Progress, other: Progress) -> bool:
    return one.digest == other.digest and one.epoch == other.epoch and one.branch_samples == other.branch_samples


class _Asked(NamedTuple):
    """The question that `view` is asked, but for what this peer has done, and its rate."""

    digest: bytes
    key: StateKey
    dialed: bool
    end: int | None
    at_end: bool
    shared: bool
    floor: StateKey
    awaited: frozenset[PeerID]
    before: StateKey | None
    absent: frozenset[PeerID]
    silent: frozenset[PeerID]
    giving: frozenset[PeerID]
    mends: frozenset[PeerID]


@dataclass(slots=True)
class _Seen:
    """The swarm as it looked last: the findings of `view`, kept up to date while peers count.

    To look at a thousand peers takes milliseconds, and a peer looks whenever it hears something.

    Attributes:
        asked: the question that `view` was asked.
        until: from then on it looks different though nobody has said anything (local time, seconds).
        contributors: of `SwarmProgress`, as they were.
        believed: the same.
        places: the same.
        peers: all.
        others: the last words of all but this peer.
        here: those of them that are at this peer's state.
        coming: those that are on their way to it.
        unheard: what peers have done that do not count here, as others told it.
        best: the best state.
        vouched: see `SwarmView`.
        vouching: the same.
        refused: the same.
        auxiliary: of `SwarmProgress`.
        calling: see `SwarmView`; None: not looked for since others are here, or call.
    """

    asked: _Asked
    until: float
    contributors: Collection[PeerID]
    believed: Mapping[PeerID, int]
    places: Mapping[PeerID, bytes]
    peers: tuple[PeerID, ...]
    others: dict[PeerID, Progress]
    here: set[PeerID]
    coming: set[PeerID]
    unheard: dict[PeerID, int]
    best: StateKey
    vouched: bool
    vouching: frozenset[PeerID]
    refused: frozenset[PeerID]
    auxiliary: bool
    calling: frozenset[PeerID] | None = None
    _known: int = 0
    _known_at: Counter[bytes] = field(default_factory=Counter)  # by place
    _first_place: bytes = b""  # that with most of them
    _strange: int = 0
    _rate: float = 0.0
    _together: frozenset[PeerID] | None = None
    _coming: frozenset[PeerID] | None = None
    _log: list[PeerID] = field(default_factory=list)

    def __post_init__(self) -> None:
        for peer in self.here:
            self._count(peer, self.others[peer].done)
        self._strange += sum(self.unheard.values())
        self._rate = sum(max(0.0, self.others[peer].rate) for peer in (*self.here, *self.coming))

    def _count(self, peer: PeerID, done: int, before: int = 0) -> None:
        """Count what a peer has done, where it had `before`."""
        if peer in self.asked.absent:
            return
        if peer in self.contributors:
            most = self.believed.get(peer, max(done, before))
            more = min(done, most) - min(before, most)
            self._known += more
            place = self.places.get(peer, peer)
            self._known_at[place] += more
            if self._known_at[place] > self._known_at[self._first_place]:
                self._first_place = place
            elif more < 0 and place == self._first_place:
                self._first_place = max(self._known_at, key=self._known_at.__getitem__)
        else:
            self._strange += done - before

    def _is_ahead(self, mine: Progress) -> bool:
        """Whether one place has most of the samples, and contributors at others are at their first batch."""
        me = self.peers[0]
        own = self.places.get(me, me)
        place, most = self._first_place, self._known_at.get(self._first_place, 0)
        if (ours := self._known_at.get(own, 0) + mine.done) >= most:
            place, most = own, ours
        if 2 * most <= mine.done + self._known:
            return False
        return any(self.places.get(each, each) != place for each in self._first_batches(mine))

    def _first_batches(self, mine: Progress) -> Iterator[PeerID]:
        """The contributors at our state that have done nothing yet, and train."""
        if self.peers[0] in self.contributors and not mine.done and mine.rate > 0:
            yield self.peers[0]
        for peer in self.here:
            said = self.others[peer]
            if peer in self.contributors and not said.done and said.rate > 0 and peer not in self.asked.absent:
                yield peer

    def takes(self, progress: Progress) -> bool:
        """Add the words of a peer to what was seen; False if all has to be looked at again instead."""
        peer, own_key = progress.contact.peer, self.asked.key
        said = self.others.get(peer)
        if said is None:
            return self._adds(progress)
        if bool(said.contact.addresses) != bool(progress.contact.addresses):
            return False
        if self.asked.at_end or _at_end(progress) or _at_end(said):
            return False
        is_ours = progress.digest == self.asked.digest
        if not _same_state(progress, said):
            key = StateKey.of_peer(progress)
            if is_ours != (key == own_key) or not StateKey.of_peer(said) < key == own_key <= self.best:
                return False
        self.others[peer] = progress
        self._log.append(peer)
        here, coming = peer in self.here, peer in self.coming
        if is_ours or coming:
            self._rate += max(0.0, progress.rate) - (max(0.0, said.rate) if here or coming else 0.0)
        if is_ours:
            self._count(peer, progress.done, said.done if here else 0)
        if is_ours and not here:
            self.here.add(peer)
            self.coming.discard(peer)
            self._coming = None
            if not coming:
                self._together = self.calling = None
        return True

    def _adds(self, progress: Progress) -> bool:
        """The same for a peer that is new here. In a large swarm somebody comes all the time."""
        peer, asked, key = progress.contact.peer, self.asked, StateKey.of_peer(progress)
        is_ours = progress.digest == asked.digest
        if asked.at_end or _at_end(progress) or peer in asked.silent or peer in asked.awaited or not asked.dialed:
            return False
        if peer in self.unheard:
            return False
        if is_ours != (key == asked.key) or key > (asked.key if peer in self.contributors else self.best):
            return False
        self.others[peer] = progress
        self._log.append(peer)
        me, *others = self.peers
        insort(others, peer)
        self.peers = (me, *others)
        if is_ours:
            self.here.add(peer)
            self._rate += max(0.0, progress.rate)
            self._count(peer, progress.done)
            self._together = self.calling = None
        return True

    def loses(self, peer: PeerID) -> bool:
        """Take a peer away from what was seen; False if all has to be looked at again instead."""
        if peer not in self.others:  # it did not count
            return True
        if self.best != self.asked.key or self.refused or not self.asked.dialed or peer in self.coming:
            return False
        said = self.others.pop(peer)
        self._log.append(peer)
        me, *others = self.peers
        del others[bisect_left(others, peer)]
        self.peers = (me, *others)
        if peer in self.here:
            self.here.discard(peer)
            self._rate -= max(0.0, said.rate)
            self._count(peer, 0, said.done)
            self._together = self.calling = None
        return True

    def view(self, mine: Progress) -> SwarmView:
        """The view of the peer that says this of itself."""
        if self._together is None:
            self._together = frozenset({self.peers[0], *self.here, *self.coming})
        if self._coming is None:
            self._coming = frozenset(self.coming)
        known, strange = mine.done + self._known, self._strange
        believed = not self.contributors or (self.auxiliary and self.here.isdisjoint(self.contributors))
        return SwarmView(
            peers=self.peers,
            together=self._together,
            coming=self._coming,
            done=known + (strange if believed else min(known, strange)),
            rate=mine.rate + self._rate,
            epoch=self.best.epoch,
            behind=self.best != self.asked.key,
            vouched=self.vouched,
            best=self.best,
            others=self.others,
            own=mine.done,
            mine=mine,
            trains=mine.done > 0 or mine.rate > 0,
            ahead=self._is_ahead(mine),
            contributors=self.contributors,
            absent=self.asked.absent,
            vouching=self.vouching,
            refused=self.refused,
            calling=self.calling or frozenset(),
            log=self._log,
        )


def settings_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """A sentence that names the first setting that differs, None if all are equal."""
    if mine == theirs:
        return None
    for name in sorted({*mine, *theirs}, key=lambda name: (*(name != first for first in _FIRST), name)):
        if mine.get(name) != theirs.get(name):
            here, there = mine.get(name, "not set"), theirs.get(name, "not set")
            cure = ""
            if name in _OF_MODEL and (name in mine) != (name in theirs):
                cure = ": give model= on all peers, or on none"
            elif name == _FROZEN:
                cure = (
                    ": the weights and buffers that are not trained differ (the base model, under LoRA). Load the same "
                    "checkpoint on all peers, or call torch.manual_seed(0) on all of them before the model is made"
                )
            return f"{name[:_SHOWN]} is {here[:_SHOWN]} here and {there[:_SHOWN]} at another peer of the run{cure}"
    return None
