"""The donors of a state: the order in which they are asked, and their record so far. No loop: `now` is an argument.

- Donors of higher priority come first, equal ones in an order drawn by chance. Priority says which donor to ask first,
  not which to wait for: a busy donor is passed over, and asked again later.
- Keys are free, hosts less so: donors at an address where others have failed, or were busy, come after those elsewhere.
- A donor that breaks the protocol is not asked again. A donor that was lost or fell silent is asked again if one of its
  turns brought a chunk; after that it may fail twice in a row. So turns come to an end.
- A donor whose state is not the one being fetched is put aside until no donor is left that has that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.base.clock import Backoff
from shoal.base.peer import PeerID
from shoal.protocol.wire import Contact

if TYPE_CHECKING:
    import random

__all__ = ["Candidates", "Donor"]

_BUSY_REFUSALS = 5
"""A donor is left after so many refusals of chunks."""

_FAILURES_AFTER_CHUNKS = 2
"""A donor that has given chunks is left after so many failures in a row."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A peer that may have the state.

    Attributes:
        contact: how it is reached; a peer id alone for one that we have a link with.
        priority: donors of higher priority are asked first; equal ones together.
        min_epoch: a state of an earlier epoch is not wanted from this one.
    """

    contact: Contact | PeerID
    priority: float = 0.0
    min_epoch: int = 0

    @property
    def peer(self) -> PeerID:
        """The id of the peer."""
        return self.contact.peer if isinstance(self.contact, Contact) else self.contact

    @property
    def host(self) -> str:
        """The host that it announces; empty if it announces none."""
        addresses = self.contact.addresses if isinstance(self.contact, Contact) else ()
        return addresses[0].host if addresses else ""


@dataclass(eq=False, slots=True)
class _Standing:
    """The record of one donor."""

    donor: Donor
    backoff: Backoff
    waiting: bool = True
    aside: bool = False
    out: bool = False
    ready_at: float = float("-inf")
    refusals: int = 0
    failures: int = 0
    failures_left: int = 0


class Candidates:
    """The donors of one download. Each is waiting, has its turn, or is out.

    Args:
        donors: in any order; of two entries for a peer the last one counts.
        rng: draws the order of equal donors, and pauses.
        me: this peer, which is not asked.
    """

    def __init__(self, donors: Sequence[Donor], rng: random.Random, me: PeerID) -> None:
        others = {donor.peer: donor for donor in donors if donor.peer != me}
        shuffled = sorted(others.values(), key=lambda donor: donor.peer)
        rng.shuffle(shuffled)
        ordered = sorted(shuffled, key=lambda donor: -donor.priority)
        self._all = {donor.peer: _Standing(donor, Backoff(rng, first_s=0.2, max_s=2.0)) for donor in ordered}
        self._reasons: dict[PeerID, str] = {}
        self._vain: Counter[str] = Counter()  # turns without success, by host

    def next(self, now: float, level: float | None) -> Donor | None:
        """Give the next donor its turn.

        Args:
            now: seconds.
            level: the lowest priority of the donors that have a turn; None if no donor has. Then donors put aside, and
                donors of lower priority, have a chance too.
        """
        if level is None:  # no state is chosen, so each of them may have the next one
            for each in self._all.values():
                each.aside = False
        waiting = [each for each in self._eligible(level) if each.ready_at <= now]
        # Donors that have not failed yet go first.
        chosen = min(waiting, key=self._order, default=None)
        if chosen is None:
            return None
        chosen.waiting, chosen.aside = False, False
        return chosen.donor

    def _order(self, each: _Standing) -> tuple[int, int, float]:
        return each.failures, self._vain[each.donor.host], -each.donor.priority

    def ready_at(self, level: float | None) -> float | None:
        """Return when `next` will return a donor; None if no waiting donor could come next."""
        return min((each.ready_at for each in self._eligible(level)), default=None)

    def _eligible(self, level: float | None) -> list[_Standing]:
        waiting = (each for each in self._all.values() if each.waiting)
        return [each for each in waiting if level is None or (each.donor.priority >= level and not each.aside)]

    def describe(self) -> str:
        """A text with the record of each donor."""
        return "; ".join(f"{peer.short()}: {reason}" for peer, reason in self._reasons.items()) or "nobody to ask"

    # --------------------------------------------------------------------------------------------- how a turn has ended

    def busy(self, donor: Donor, now: float) -> None:
        """The donor asked us to come again."""
        self._reasons[donor.peer] = "busy"
        self._vain[donor.host] += 1
        self._wait(donor, now, pause=True)

    def refused(self, donor: Donor, reason: str, now: float) -> None:
        """The donor described its state but sent no chunk: it is probably busy, unless this happens again and again."""
        each = self._all[donor.peer]
        each.refusals += 1
        if each.refusals < _BUSY_REFUSALS:
            self.busy(donor, now)
        else:
            self._reasons[donor.peer] = reason

    def other_state(self, donor: Donor, now: float) -> None:
        """The donor's state is not the one that is being fetched."""
        self._reasons[donor.peer] = "has another state"
        self._wait(donor, now, pause=False)
        self._all[donor.peer].aside = True

    def again(self, donor: Donor, now: float) -> None:
        """We ended the donor's turn."""
        self._wait(donor, now, pause=False)

    def beaten(self, donor: Donor, now: float) -> None:
        """Others were faster with the donor's chunks; no fault of its own."""
        self._reasons[donor.peer] = "slower than the others"
        self._wait(donor, now, pause=True)

    def failed(self, donor: Donor, reason: str, now: float, *, brought_chunks: bool) -> None:
        """The donor was lost, fell silent or refused."""
        each = self._all[donor.peer]
        each.failures += 1
        self._vain[donor.host] += not brought_chunks
        self._reasons[donor.peer] = reason
        if brought_chunks:
            each.failures_left = _FAILURES_AFTER_CHUNKS
            self._wait(donor, now, pause=False)
        elif each.failures_left > 0:
            each.failures_left -= 1
            self._wait(donor, now, pause=True)

    def dropped(self, peer: PeerID, reason: str) -> None:
        """The donor broke the protocol: it is never asked again."""
        self._reasons[peer] = reason
        self._all[peer].waiting, self._all[peer].out = False, True

    def _wait(self, donor: Donor, now: float, *, pause: bool) -> None:
        each = self._all[donor.peer]
        each.waiting = not each.out
        each.ready_at = now + each.backoff.next_s() if pause else now
