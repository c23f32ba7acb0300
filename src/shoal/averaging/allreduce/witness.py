"""A member of a round judges the others: by lateness, by breaches of the protocol, by words that were false."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from shoal.averaging.allreduce.brief import Brief
from shoal.averaging.allreduce.member import MemberMachine
from shoal.averaging.allreduce.signed import SignedWords
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.errors import PeerProtocolError
from shoal.events import EventBus, PeerDropped
from shoal.protocol.wire import CommitDigest

__all__ = ["Seen", "Witness"]


class Seen(NamedTuple):
    """What one member saw of the others in a round.

    Attributes:
        late: they kept all others waiting: their averages were late, see `MemberMachine.late`; or they were the
            coordinator, and were lost, or did not decide in time; or they made no progress, see
            `Coordinator.stalled`.
        unheard: their values or averages did not come to this member in time.
        bad_lines: this member did not wait for what they give (see `Round`).
        hurried: they were waited for briefly, and left out, as all others were done.
        waited_s: the time in which nobody was waited for but those that are waited for briefly.
        lost_s: the time for which the slowest of the others were waited for, see `MemberMachine.lost_s`.
        reduced: they own tiles, after all that were moved.
        led_badly: another member led the round, and aborted it though we gave values, was lost, or decided far too
            late; or what it said was false.
        decided_late: another member led the round, and decided it later than is usual, see
            `MemberMachine.decided_late`.
    """

    late: frozenset[PeerID]
    unheard: frozenset[PeerID]
    bad_lines: frozenset[PeerID]
    hurried: frozenset[PeerID]
    waited_s: float
    lost_s: float
    reduced: frozenset[PeerID]
    led_badly: bool
    decided_late: bool


class Witness:
    """What this member has seen in a round so far.

    Args:
        machine: this member.
        words: what the members sign.
        events: hears of each member that did not do its part.
        on_lie: called, with the coordinator, if its signatures prove that it has told members different commits.
        gives: whether this member gives values.
        away: the members that are waited for briefly: nobody blames them for what comes late.
        bad_lines: this member waits for no values and averages of these, unless that is more than half of all others:
            then its own line may be the bad one.

    Attributes:
        gives: as given.
        bad_lines: those that it does not wait for.
        looked_at: the members that the coordinator has called gone; whether they gave us something since.
    """

    def __init__(
        self,
        machine: MemberMachine,
        words: SignedWords,
        events: EventBus,
        *,
        on_lie: Callable[[PeerID], None],
        gives: bool,
        away: Collection[int],
        bad_lines: Collection[int],
    ) -> None:
        self._machine, self._words, self._events, self._on_lie = machine, words, events, on_lie
        self.gives, self._away = gives, {*away, machine.me}
        self.bad_lines = set(bad_lines) if 2 * len(bad_lines) <= len(machine.members) - 1 else set[int]()
        self.looked_at: dict[int, bool] = {}
        self._late, self._led_badly = set[int](), False
        self._told_otherwise = set[int]()
        self._blamed: dict[tuple[PeerID, str], None] = {}

    @property
    def leads(self) -> bool:
        """Whether this member decides the round."""
        return self._machine.me == self._machine.coordinator

    # ------------------------------------------------------------------------------------------------- what it notes

    def blame(self, member: int, reason: str, *, lied: bool = False) -> None:
        """A member did not do its part: an event says so, once, and the error does if the round fails."""
        if self._machine.decided and not lied:
            return  # a member that leaves after the verdict harms nobody
        peer = self._machine.members[member].contact.peer
        if (peer, reason) not in self._blamed:
            self._blamed[peer, reason] = None
            self._events.emit(PeerDropped(peer=peer, where="all-reduce", reason=reason))

    def lied(self, member: int, reason: str) -> None:
        """A member broke the protocol: it is named, whatever the verdict, and the next rounds do not wait for it."""
        self._machine.unheard.add(member)
        self._led_badly |= member == self._machine.coordinator
        self.blame(member, reason, lied=True)

    def told_otherwise(self, member: int) -> bool:
        """A member was told of other members, words or shares than this one: the two cannot take the same step.

        Or it says so: then others believe it once or twice, as it gives nothing to them.

        Returns:
            Whether more than half of the others say so: then this round is over.
        """
        self._machine.unheard.add(member)
        if self.leads:  # we know what we have told all
            self.lied(member, "says that we have begun another group with it")
        elif member not in self._away:
            self._told_otherwise.add(member)
            other = self._machine.members[member].contact.peer.short()
            self.lied(self._machine.coordinator, f"has begun another group with {other}")
        others = len(self._machine.members) - 2
        return others > 0 and 2 * len(self._told_otherwise) > others

    def compare(self, told: CommitDigest, nbytes: int, teller: PeerID) -> CommitDigest | None:
        """Look whether another member has got our commit. If the leader has lied: what that member is to know of ours.

        Raises:
            PeerProtocolError: it says what the leader has not said.
        """
        if nbytes:
            raise PeerProtocolError("a digest of a commit with a payload", teller)
        commit, known = self._machine.rules.commit, self._words.proved
        if commit is None or not self._words.prove_a_lie(commit, told, teller):
            return None
        if not known:
            sometimes("a coordinator has signed two commits of one round")
            self.blame(self._machine.coordinator, "has signed two different commits of one round", lied=True)
            self._on_lie(self._machine.members[self._machine.coordinator].contact.peer)
        return self._words.told(commit)

    def lives(self, member: int) -> None:
        """A member has just given us something, or answered."""
        if member in self.looked_at:
            sometimes("a member that the coordinator calls gone is there")
            self.looked_at[member] = True

    def doubt(self, member: int) -> None:
        """The coordinator calls a member gone that may be there, or this one, which is."""
        self.looked_at[member] = member == self._machine.me

    def lost(self, member: int) -> None:
        """A member is gone, as this one sees for itself."""
        self.looked_at.pop(member, None)

    def aborted(self, *, after_silence: bool) -> None:
        """The coordinator has aborted the round.

        Of two with values, what one lacks comes from the other one, whoever leads. After a silence that one is late.
        """
        two = sum(member.contributes for member in self._machine.members) == 2
        if two and after_silence and self.gives:
            self.led_late()
        else:
            self.led_badly()

    def led_badly(self) -> None:
        """The coordinator has aborted the round, is lost, or gives nothing."""
        self._led_badly |= self.gives and not self.leads

    def led_late(self) -> None:
        """The coordinator keeps all others waiting."""
        self._late.add(self._machine.coordinator)

    # ----------------------------------------------------------------------------------------------- what it has seen

    @property
    def blamed(self) -> tuple[PeerID, ...]:
        """The members that did not do their part."""
        return tuple(dict.fromkeys(peer for peer, _ in self._blamed))

    def seen(
        self, ended: float, margin_s: float, least_s: float, briefs: Sequence[Brief], stalled: AbstractSet[int]
    ) -> Seen:
        """What it saw, once the round is over.

        Args:
            ended: when it was over for this member.
            margin_s: see `MemberMachine.late`.
            least_s: see there.
            briefs: the members that were waited for briefly, for values and for averages.
            stalled: if this member leads: those that it left out as they made no progress.
        """
        machine = self._machine

        def peers(members: Iterable[int]) -> frozenset[PeerID]:
            return frozenset(machine.members[member].contact.peer for member in members)

        # Where the round fails here alone, our own line may be the bad one: then only a lost coordinator counts. And
        # nobody is to blame for what comes late where the coordinator has not told all members the same.
        judges = (self.leads or machine.rules.succeeded) and not self._word_was_false
        unheard = machine.unheard if judges else set[int]()
        late = self._late | (machine.late(margin_s, least_s) if judges else set())
        if machine.rules.contributes:  # else others were kept waiting
            late |= stalled
        waited_s = sum(brief.waited_s for brief in briefs)
        return Seen(
            late=peers(late - self._away),
            unheard=peers(unheard - self._away - self.bad_lines),
            bad_lines=peers(self.bad_lines),
            hurried=peers(set[int]().union(*(brief.left for brief in briefs))),
            waited_s=waited_s,
            lost_s=machine.lost_s(ended, waited_s),
            reduced=peers(set(machine.rules.reducer)),
            led_badly=self._led_badly or self._word_was_false or machine.committed_in_vain,
            decided_late=machine.decided_late(ended),
        )

    @property
    def _word_was_false(self) -> bool:
        """Whether members that the coordinator called gone, or left out, were there, or it had most reducers replaced.

        Those that have lied are replaced for a reason.
        """
        machine = self._machine
        replaced, reducers = machine.rules.replaced - machine.liars, set(machine.first_reducer)
        return not self.leads and (
            (machine.left_out and self.gives)
            or any(self.looked_at.values())
            or (len(replaced) > 1 and 2 * len(replaced) > len(reducers))
        )
