"""One member of a round: what it holds, what it waits for, whom it asks. Pure: events in, actions out.

`MemberRules` says which averages count. `Contributions` are the values that this member waits for as the reducer of
tiles. Before the verdict, a source that fails is reported to the coordinator, which names another one. After the commit
a member asks one holder after another for the averages that it lacks. A member that loses the coordinator asks the
others for the verdict.
"""

from __future__ import annotations

import enum
import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from types import MappingProxyType
from typing import NamedTuple

from shoal.averaging.allreduce.brief import Brief
from shoal.averaging.allreduce.commit import Ask, Average, Contribute, MemberRules, Order, TileAction
from shoal.averaging.allreduce.interface import MostWeight, any_weight, has_member, is_sound
from shoal.averaging.allreduce.lateness import LEAST_S, Lateness
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Abort, Assign, Commit, Gone, Held, Member, PartAbsent, Report, Shown

__all__ = [
    "MEMBER_TRANSITIONS",
    "AskOthers",
    "Blame",
    "Contributions",
    "CutOff",
    "Finish",
    "LookAt",
    "MemberAction",
    "MemberMachine",
    "MemberPhase",
    "Work",
]

Work = tuple[int, int]
"""(tile, attempt)."""


class Finish(NamedTuple):
    """All contributions that are waited for are here: divide the sum of this tile."""

    tile: int
    attempt: int


class CutOff(NamedTuple):
    """The values of the others do not come here: another member must average the tiles that are owned here."""

    reason: str


class Blame(NamedTuple):
    """A member did not do its part, or lied: that counts after the verdict, too."""

    member: int
    reason: str
    lied: bool = False


class LookAt(NamedTuple):
    """The coordinator says that a member is gone: see whether it is."""

    member: int


class AskOthers(NamedTuple):
    """The coordinator is lost: ask the others for its verdict."""


MemberAction = TileAction | Finish | Blame | CutOff | LookAt | AskOthers


class MemberPhase(enum.Enum):
    """How far a member is in a round."""

    AVERAGING = "averaging"
    """There is no verdict here."""
    FETCHING = "fetching"
    """The round is committed, and averages are missing here."""
    SUCCEEDED = "succeeded"
    """The round is committed, and all its averages are here."""
    FAILED = "failed"


_AVERAGING, _FETCHING, _SUCCEEDED, _FAILED = MemberPhase
MEMBER_TRANSITIONS: Mapping[tuple[MemberPhase, str, MemberPhase], str] = MappingProxyType(
    {
        (_AVERAGING, "Commit", _SUCCEEDED): "its averages are held here, or this member is auxiliary",
        (_AVERAGING, "Commit", _FETCHING): "missing averages are asked from one member after another",
        (_AVERAGING, "Commit", _FAILED): "no other member can be asked for an average that is missing",
        (_AVERAGING, "Abort", _FAILED): "",
        (_AVERAGING, "give_up", _FAILED): "time is over, the caller cancels, or no verdict can be learned any more",
        (_FETCHING, "averaged", _SUCCEEDED): "the last missing average is here",
        (_FETCHING, "source_lost", _FAILED): "no other member can be asked for an average that is missing",
        (_FETCHING, "give_up", _FAILED): "time is over, or the caller cancels",
    }
)
"""Every change of a member's phase, by message or method of `MemberMachine`, and when it happens."""


class MemberMachine:
    """One member of a round.

    Args:
        round_id: the id of the round.
        me: index of this member in the group.
        coordinator: index of the member that decides.
        members: the group.
        reducers: for each tile, the index of the member that averages it at first.
        silence_s: how long a sender may be silent that owes values.
        now: time at the beginning.
        promised_s: see `slow_lines`.
        spare_s: see `RoundOptions`.
        brief_s: see `Brief.patience_s`.
        most_weight: the largest weight that each member may give.

    Attributes:
        most_weights: the same, by index.
        first_reducer: for each tile, the member that averages it at first.
        rules: what is held, and the verdict.
        contributions: of the tiles that are owned here.
        unheard: the members whose values or averages did not come here in time; those that are gone are not among them.
        liars: the reducers that gave this member another average than they have signed.
        may_learn: whether the verdict can still come from the coordinator.
        committed_in_vain: whether the round has failed as an average was committed that others say they do not have.
        left_out: whether the coordinator has left this member out, and nobody else has, see `_is_left_out`.
    """

    def __init__(  # noqa: PLR0913 (half of them by name)
        self,
        round_id: bytes,
        me: int,
        coordinator: int,
        members: Sequence[Member],
        reducers: Sequence[int],
        *,
        silence_s: float,
        now: float,
        promised_s: Sequence[float] = (),
        spare_s: float = math.inf,
        brief_s: Mapping[int, float] = MappingProxyType({}),
        most_weight: MostWeight = any_weight,
    ) -> None:
        self.me, self.coordinator = me, coordinator
        self.most_weights = [most_weight(member.contact.peer) for member in members]
        self._most_weight = max(self.most_weights)
        self.rules = MemberRules(me, reducers, contributes=members[me].contributes)
        contributing = [index for index, member in enumerate(members) if member.contributes]
        self.contributions = Contributions(
            me,
            contributing,
            silence_s=silence_s,
            now=now,
            promised_s=promised_s,
            spare_s=spare_s,
            brief_s=brief_s,
        )
        self.first_reducer, self._owed, self._has_brief = tuple(reducers), Counter(reducers), bool(brief_s)
        others = set(reducers) - {me} - brief_s.keys()
        self._promised_s = max(promised_s, default=0.0)
        self._reducing = Lateness(others, now=now, least_s=self._promised_s)
        self.may_learn, self.committed_in_vain, self.left_out = True, False, False
        self._began, self._complete_at = now, math.inf
        self.unheard: set[int] = set()
        self.liars: set[int] = set()
        self.round_id, self.members = round_id, members
        # Contributors, and auxiliary members, that can be asked for averages.
        can_give = [index for index, member in enumerate(members) if member.reduces and index != me]
        self._able = [[each for each in can_give if members[each].contributes == does] for does in (True, False)]
        self._lost_sources: set[int] = set()
        self._asked: dict[int, int] = {}  # after the commit: tile -> the member that was asked for it last
        self._has_refusals = False  # after the commit: of averages that the commit says all members held
        self._giver: dict[int, int] = {}  # tile -> the member that gave the average that is held here
        self._words: dict[int, Held] = {}  # tile -> the average of it that its maker has signed, where we have another
        self._disputed: dict[int, int] = {}  # after the commit: tile -> the member that gave another average of it

    @property
    def phase(self) -> MemberPhase:
        """How far this member is."""
        if self.rules.failed is not None:
            return _FAILED
        if self.rules.commit is None:
            return _AVERAGING
        return _SUCCEEDED if self.rules.succeeded else _FETCHING

    def is_sound(self, held: Held) -> bool:
        """Return whether there may be such an average in this round."""
        return is_sound(held, len(self.members), self._most_weight)

    @property
    def decided(self) -> bool:
        """Return whether a verdict is known, or was given up."""
        return self.rules.commit is not None or self.rules.failed is not None

    @property
    def news(self) -> bool:
        """Return whether there is something to report."""
        return bool(self._lost_sources or self.rules.unreported)

    @property
    def urgent(self) -> bool:
        """Return whether the others may be waiting for the news: all is held here, or a source is lost."""
        return bool(self._lost_sources) or (bool(self.rules.unreported) and self.rules.complete)

    @property
    def awaited(self) -> Counter[int]:
        """After the commit: the members that were asked for averages, and how many of these are still missing."""
        return Counter(self._asked[tile] for tile in self.rules.missing() if tile in self._asked)

    # -------------------------------------------------------------------------------------------------------- events

    def start(self, now: float, bad_lines: Iterable[int] = ()) -> list[MemberAction]:
        """Send values to every reducer, and begin to average the tiles that are owned here.

        Nothing is waited for that comes from members with `bad_lines` to this one.
        """
        actions: list[MemberAction] = []
        for member in bad_lines:
            sometimes("a member with a bad line is not waited for")
            self.contributions.exclude(member)
            self._reducing.leave(member)
            self._lost_sources.add(member)  # if it owns tiles
        for tile, reducer in enumerate(self.rules.reducer):
            if reducer == self.me:
                actions += [Average(tile, 0), *self.contributions.own(tile, 0, now)]
            elif self.rules.contributes:
                actions.append(Contribute(tile, 0, reducer))
        return actions

    def obey(self, message: Order, now: float) -> list[MemberAction]:
        """The coordinator says something (or another member relays its commit)."""
        rules, actions = self.rules, list[MemberAction]()
        match message:
            case _ if not self.fits(message):
                return []
            case Assign():
                sources, replaced = list(rules.reducer), set(rules.replaced)
                found = rules.assigned(message)
                for member in rules.replaced - replaced:
                    actions += self._replaced(member, now)
                for action in found:
                    actions.append(action)
                    if isinstance(action, Ask):  # somebody else has got it
                        self.unheard.add(sources[action.tile])
                    if isinstance(action, Average):
                        actions += self.contributions.own(action.tile, action.attempt, now)
            case Shown(maker):
                actions += self._note(maker, self._unknown_words(message))
            case Gone(member) if self.me != self.coordinator:  # it knows
                actions.append(LookAt(member))
            case Commit() if rules.commit is None:
                self.left_out = self._is_left_out(message)
                actions += self._compare(message)
                for tile in rules.committed(message) if rules.failed is None else ():
                    actions += self._fetch(tile)
            case Abort() if rules.commit is None:
                self.give_up(message.reason)
        return actions

    def is_new(self, shown: Shown) -> bool:
        """Return whether this tells of an average that was made here what is not known yet."""
        return bool(self._unknown_words(shown))

    def _unknown_words(self, shown: Shown) -> list[Held]:
        """What is said of the present attempts that this reducer has made. Of others its word does not count."""
        rules, words = self.rules, self._words
        return [
            said
            for said in shown.report.held
            if said.tile < len(rules.held)
            and rules.averages(shown.member, said.tile, said.attempt)
            and ((word := words.get(said.tile)) is None or word.attempt != said.attempt)
        ]

    def _note(self, maker: int, words: Iterable[Held]) -> list[Blame]:
        """A reducer has signed these words about averages that it has made. If it gave another one here, it lied."""
        lies = list[Blame]()
        for said in words:
            tile, held = said.tile, self.rules.held[said.tile]
            self._words[tile] = said
            if held is None or held.attempt != said.attempt or self._giver[tile] != maker:
                continue
            if held.digest != said.digest:
                sometimes("a reducer has signed another average than it gave to a member")
                self.liars.add(maker)
                lies.append(
                    Blame(maker, f"gave this peer another average of tile {tile} than it has signed", lied=True)
                )
        return lies

    def _replaced(self, member: int, now: float) -> list[Finish]:
        """Others average the tiles of this one. If it is late by what was seen here, it is waited for no longer."""
        contributions = self.contributions
        self._reducing.leave_out(member, now)
        owes = contributions.awaits(member) and now > contributions.lateness.usual_until
        if owes or member in self._reducing.late(0.0):
            sometimes("a late reducer is replaced")
            contributions.brief.add(member)
        if owes:
            self.unheard.add(member)
        return contributions.hurry(now)

    def fits(self, message: Order) -> bool:
        """Return whether the coordinator of this round can say this: `obey` ignores anything else.

        A commit must say of each average that is held here what its reducer has said. The digest is of both, so all
        members that succeed were told the same. A coordinator that has committed says nothing else any more; a commit
        that came from another member, after the coordinator was lost, says nothing of what that one had to say.
        """
        members, tiles = len(self.members), len(self.rules.reducer)
        if (commit := self.rules.commit) is not None and self.may_learn and isinstance(message, Commit | Abort):
            return message == commit
        match message:
            case Assign(numbers, attempt, reducer):
                known = 0 <= reducer < members and attempt <= members and all(0 <= tile < tiles for tile in numbers)
                return known and len(set(numbers)) == len(numbers) and self.rules.may_assign(message)
            case Gone(member) | Shown(member):
                return 0 <= member < members
            case Abort():
                return message.round_id == self.round_id
        return (
            message.round_id == self.round_id
            and [held.tile for held in message.tiles] == list(range(tiles))
            and all(map(self.is_sound, message.tiles))
            and not any(
                held is not None and held.digest == due.digest and held != due
                for held, due in zip(self.rules.held, message.tiles, strict=True)
            )
        )

    def _is_left_out(self, commit: Commit) -> bool:
        """Whether the coordinator has left out this member although its values came to most others in time.

        It had tiles averaged anew, and told that to the others alone. An honest one does that to a member that is slow,
        or that it has lost: but then its words do not come here either.
        """
        rules, me, counts = self.rules, self.me, list[bool]()
        told = [due for due in commit.tiles if due.attempt <= rules.attempt[due.tile]]
        if len(told) == len(commit.tiles) or not self.may_learn:
            return False
        for due in told:
            if not any(rules.averages(each, due.tile, due.attempt) for each in (me, self.coordinator)):
                counts.append(has_member(due.contributors, me))
        return 2 * sum(counts) > len(counts)

    def _compare(self, commit: Commit) -> list[MemberAction]:
        """Look whether the committed averages are those that this member made, or was given.

        If one is not the average that this member made itself, the coordinator lies. If its maker has signed it,
        anybody is asked for it. If nothing signed was shown, the giver of another one lies, or the coordinator: only
        the giver is asked (`given`, `source_lost`).
        """
        rules, actions = self.rules, list[MemberAction]()
        for held, due in zip(rules.held, commit.tiles, strict=True):
            differs = held is None or held.digest != due.digest
            if differs and rules.averages(self.me, due.tile, due.attempt):
                sometimes("another average is committed than its reducer made")
                other = f"another average of tile {due.tile} than this peer made"
                actions.append(Blame(self.coordinator, f"committed {other}", lied=True))
                self.give_up(f"committed was {other}")
                return actions
            if differs and held is not None and held.attempt == due.attempt:
                word = self._words.get(due.tile)
                if word is None or (word.attempt, word.digest) != (due.attempt, due.digest):
                    self._disputed[due.tile] = self._giver[due.tile]
        return actions

    def is_ahead(self, tile: int, attempt: int) -> bool:
        """Return whether this attempt is not known here, and may become so."""
        return attempt > self.rules.attempt[tile] and not self.decided

    def takes(self, tile: int, attempt: int, giver: int) -> bool:
        """Return whether an average of this attempt would be news, and this member can give it."""
        rules = self.rules
        if rules.commit is None:
            return rules.may_give(giver, tile) and rules.wants(tile, attempt)
        return self._disputed.get(tile, giver) == giver and rules.wants(tile, attempt)

    def averaged(self, held: Held, now: float, giver: int) -> bool:
        """This tile was averaged here, or received whole. False if it is not wanted (any more)."""
        news, reducer = self.rules.averaged(held), self.first_reducer[held.tile]
        if news:
            self._giver[held.tile] = giver
        if self.rules.complete and self.rules.commit is None:
            self._complete_at = now
        if news and not held.attempt:
            self._owed[reducer] -= 1
            if not self._owed[reducer]:
                self._reducing.done((reducer,), now)
        return news

    def given(self, tile: int) -> list[MemberAction]:
        """A wanted average has come. If its giver gave another one before, it has lied."""
        if (giver := self._disputed.pop(tile, None)) is None:
            return []
        sometimes("a reducer gives a member two averages of one tile")
        return [Blame(giver, f"gave this peer another average of tile {tile} than others", lied=True)]

    def lost_s(self, now: float, waited_s: float) -> float:
        """How long the slowest were waited for, as senders or as reducers, or as those that report, seconds.

        Beside members that are waited for briefly the coordinator may wait for one of these in the end: then the time
        counts until the last of the other reducers has given its averages.

        Args:
            now: the end of the round.
            waited_s: so long only those were waited for that are waited for briefly: that is not lost to the others.
        """
        given = self._reducing.lost_s(None if self._has_brief else now) - waited_s
        return max(self.contributions.lateness.lost_s(), given, 0.0)

    def late(self, margin_s: float, least_s: float) -> set[int]:
        """The members whose averages were late, here and at all others.

        Those that were replaced gave some to nobody. The coordinator should have left itself out.

        Args:
            margin_s: of this peer, for the coordinator: see `Lateness`.
            least_s: the least margin of any coordinator, for those that were replaced.
        """
        late = self._reducing.late
        return late(margin_s) & {self.coordinator} | late(least_s) & self.rules.replaced

    def decided_late(self, now: float) -> bool:
        """Whether the coordinator's verdict came later than usual, by what this member needed until it held all.

        Once a member holds all, a coordinator waits for receivers only. But this member may be faster than most: so
        such a coordinator may be honest.
        """
        usual = max(2 * self._complete_at - self._began, self._began + self._promised_s)
        judges = self.rules.contributes and self.me != self.coordinator
        return judges and now > usual + 2 * LEAST_S

    def member_lost(self, member: int) -> list[Finish]:
        """A member is gone: nothing is waited for that it owes."""
        self.unheard.discard(member)
        self._reducing.forget(member)
        return self.contributions.exclude(member)

    def coordinator_lost(self, reason: str) -> list[MemberAction]:
        """The coordinator tells nothing any more."""
        if not self.may_learn or self.me == self.coordinator:
            return []
        self.may_learn = False
        blame = Blame(self.coordinator, f"lost, and it was to decide: {reason}")
        if self.decided:
            sometimes("a coordinator is lost after its verdict is known here")
            return [blame]
        sometimes("a coordinator is lost before its verdict is known here")
        return [blame, AskOthers()]

    def source_lost(self, member: int, refusal: PartAbsent | None) -> list[MemberAction]:
        """A member does not give a tile that it was asked for (None: it gives no tile at all)."""
        rules = self.rules
        if (commit := rules.commit) is None:
            self._lost_sources.add(member)
            return []
        actions: list[MemberAction] = []
        self._has_refusals |= refusal is not None and self.members[member].contributes
        for tile in [refusal.tile] if refusal is not None else rules.missing():
            old = refusal is not None and refusal.attempt != commit.tiles[tile].attempt
            # Others may still be giving the tile: only a refusal by the member asked last leaves us without it.
            if rules.held[tile] is None and self._asked.get(tile) == member and not old:
                disputed = tile in self._disputed and refusal is not None and rules.failed is None
                if disputed and rules.averages(member, tile, commit.tiles[tile].attempt):
                    reason = "committed an average of tile {} that its reducer, {}, says that it has not made"
                    peer = self.members[member].contact.peer.short()
                    actions.append(Blame(self.coordinator, reason.format(tile, peer), lied=True))
                actions += self._fetch(tile)
        return actions

    def _fetch(self, tile: int) -> list[MemberAction]:
        """After the commit: ask one member after another for a tile that is missing here.

        For a disputed one only its giver is asked: anybody else may have made up what was committed.
        """
        assert self.rules.commit is not None
        sources = iter((self._disputed[tile],)) if tile in self._disputed else self._sources(tile)
        if (last := self._asked.get(tile)) is not None:
            sometimes("a committed average is asked for a second time, elsewhere")
            sources = islice(dropwhile(lambda each: each != last, sources), 1, None)
        if (source := next(sources, None)) is None:
            if tile in self._disputed:
                giver = self.members[self._disputed[tile]].contact.peer.short()
                self.give_up(f"committed was another average of tile {tile} than {giver} gave this peer")
                return []
            sometimes("nobody can give an average that was committed")
            self.give_up("committed, but nobody who holds the averages could be reached")
            self.committed_in_vain = self._has_refusals
            if not self._has_refusals:
                return []
            return [Blame(self.coordinator, "committed averages that nobody gives", lied=True)]
        self._asked[tile] = source
        return [Ask(tile, self.rules.commit.tiles[tile].attempt, source)]

    def _sources(self, tile: int) -> Iterator[int]:
        """The members that can be asked for a tile, in order; lazily, as there may be thousands of tiles.

        The reducer comes late: this member has probably waited for it in vain, if all others hold the tile. Auxiliary
        members come last: they hold only tiles that they averaged themselves. The rest are spread over the tiles.
        """
        reducer = self.rules.reducer[tile]
        for able in self._able:
            start = bisect_left(able, -tile % len(self.members))
            yield from (each for place in range(len(able)) if (each := able[start + place - len(able)]) != reducer)
            if reducer in able:
                yield reducer

    def tick(self, now: float) -> list[MemberAction]:
        """Time passes: senders that are silent, or far behind the others, are waited for no longer."""
        actions: list[MemberAction] = []
        for sender in self.contributions.stalled(now):
            sometimes("a sender is too slow for a reducer")
            actions.append(Blame(sender, "too slow: left out of the tiles that are not averaged yet"))
            actions += self.contributions.exclude(sender)
            self.unheard.add(sender)
        return actions + self.contributions.hurry(now)

    def report(self, moved_bytes: int) -> Report:
        """The news for the coordinator; without any it tells the bytes that were moved."""
        lost, self._lost_sources = self._lost_sources, set()
        return Report(self.rules.take_report(), sorted(lost), moved_bytes)

    def has_made(self, report: Report) -> bool:
        """Return whether this member has made an average that it reports."""
        return any(self._giver.get(held.tile) == self.me for held in report.held)

    def give_up(self, reason: str) -> bool:
        """Fail the round here; False if it has succeeded already."""
        failed = self.rules.give_up(reason)
        if failed and self.me != self.coordinator:
            self.may_learn = False
        return failed


class Contributions:
    """The contributions that a reducer of tiles has got and still waits for. The numbers are added elsewhere.

    Senders do not move in lock step: a fast sender may be many tiles ahead, a slow one delays only the tiles that it
    still owes. A sender is left out of tiles that are not done yet

    - when it is lost (`exclude`);
    - when it was *silent*: no byte for `silence_s` while it owes something;
    - when it is *far behind*: the median of the other senders passed its place longer ago than `silence_s` (`spare_s`,
      if that is less) plus the time that the median needed to get there. So it would need more than twice as long as
      the others, plus that. With two other senders the median is the slower one, so that three senders of which two are
      slow go on together. One that has announced a slow line, and is worth waiting for, is behind only when it is also
      later than it promised, in proportion to what it has sent (`slow_lines`).

    - when it is waited for briefly, and nobody else is any more (`Brief`).

    Its contributions to tiles that are done stay. A tile is ready when the reducer waits for no more senders.

    Args:
        me: index of the reducer in its group; its own contribution is counted like the others'.
        members: indices of all members that contribute; the reducer is among them unless it is an auxiliary member.
        silence_s: see above.
        now: time at the beginning.
        promised_s: for each member, the time within which it sends all, if it is waited for beyond the median; else 0.
        spare_s: see above.
        brief_s: see `Brief.patience_s`.

    Attributes:
        brief: the members that are waited for briefly.
        lateness: compares the senders; the silent, and those that were far behind, were given up.
    """

    def __init__(
        self,
        me: int,
        members: Iterable[int],
        *,
        silence_s: float,
        now: float,
        promised_s: Sequence[float] = (),
        spare_s: float = math.inf,
        brief_s: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        self.brief = Brief(brief_s)
        self.me, self.silence_s, self._start, self._promised_s = me, silence_s, now, promised_s
        self._spare_s = min(silence_s, spare_s)
        self.senders = set(members)
        self.lateness = Lateness(self.senders - {me} - brief_s.keys(), now=now)
        self.excluded: set[int] = set()
        self._waiting: dict[Work, set[int]] = {}
        self.contributors: dict[Work, set[int]] = {}
        self._others: dict[Work, int] = {}
        self._owned_at = array("d")  # when: the 1st, 2nd, 3rd … tile
        self._heard = dict.fromkeys(self.senders, now)
        self._delivered = {sender: array("d") for sender in self.senders}  # when: its 1st, 2nd, 3rd … contribution

    def begin(self, now: float) -> None:
        """Nobody was silent or behind before this moment."""
        self._start, self._heard = now, dict.fromkeys(self.senders, now)
        self._owned_at = array("d", [now] * len(self._owned_at))
        self.lateness.begin(now)

    def own(self, tile: int, attempt: int, now: float) -> list[Finish]:
        """Start to collect contributions for a tile. Older attempts of it are forgotten."""
        for older in [work for work in self._waiting if work[0] == tile and work[1] < attempt]:
            del self._waiting[older]
        work = (tile, attempt)
        self._waiting[work] = self.senders - self.excluded
        self.contributors[work] = set()
        self._others[work] = 0
        self._owned_at.append(now)
        self._heard = dict.fromkeys(self.senders, now)
        return self._ready([work])

    def expects(self, tile: int, attempt: int, sender: int) -> bool:
        """Return whether a contribution of this sender to this tile would still count."""
        return sender in self._waiting.get((tile, attempt), ())

    def awaits(self, sender: int) -> bool:
        """Return whether this sender owes values now."""
        return any(sender in waiting for waiting in self._waiting.values())

    def heard(self, sender: int, now: float) -> None:
        """Bytes came from this sender."""
        self._heard[sender] = now

    def contributed(self, tile: int, attempt: int, sender: int, *, counts: bool, now: float) -> list[Finish]:
        """A contribution is complete and added (`counts`: its weight is above 0). Returns the tiles that are ready."""
        work = (tile, attempt)
        if not self.expects(tile, attempt, sender):
            sometimes("a contribution does not count any more")
            return []
        self._waiting[work].discard(sender)
        if counts:
            self.contributors[work].add(sender)
        self._others[work] += sender != self.me
        self._heard[sender] = now
        self._delivered[sender].append(now)
        if len(self._delivered[sender]) >= len(self._owned_at):
            self.lateness.done((sender,), now)
        return [*self._ready([work]), *self.hurry(now)]

    def hurry(self, now: float) -> list[Finish]:
        """Leave out those that are waited for briefly, if it is time. Returns the tiles that are ready now."""
        if not self.brief.patience_s:
            return []
        late = self.brief.late(set().union(*self._waiting.values()), now, self.lateness.usual_until)
        return [finish for member in late for finish in self.exclude(member)]

    def exclude(self, sender: int) -> list[Finish]:
        """Wait for this sender no longer. Returns the tiles that are ready now."""
        if sender in self.excluded or sender == self.me:
            return []
        self.excluded.add(sender)
        self.lateness.leave(sender)
        for waiting in self._waiting.values():
            waiting.discard(sender)
        return self._ready(list(self._waiting))

    def cut_off(self, tile: int, attempt: int) -> bool:
        """Return whether a member that should contribute to this tile, even with weight 0, is missing in it."""
        return self._others[tile, attempt] < len(self.senders - {self.me})

    def stalled(self, now: float) -> list[int]:
        """Senders to leave out: silent, or far behind the others."""
        stalled = [sender for sender, limit in self._limits().items() if now >= limit]
        for sender in stalled:
            self.lateness.leave_out(sender, now)
        return stalled

    def _limits(self) -> dict[int, float]:
        """For each sender that owes something, the time until which the reducer waits if nothing more comes from it."""
        owing = sorted(set().union(*self._waiting.values()) - {self.me}) if self._waiting else []
        passed = {place: self._passed(place) for place in {len(self._delivered[sender]) for sender in owing}}
        limits = {}
        for sender in owing:
            silent = self._heard[sender] + self.silence_s
            at = passed[place := len(self._delivered[sender])]
            since = self._owned_at[min(place, len(self._owned_at) - 1)]
            straggles_at = math.inf if at is None else at + (at - since) + self._spare_s
            limits[sender] = min(silent, max(straggles_at, self._promised(sender, place)))
        return limits

    def _promised(self, sender: int, place: int) -> float:
        """Return when this sender has promised to pass this place."""
        promised_s = self._promised_s[sender] if self._promised_s else 0.0
        return self._start + promised_s * min(1.0, (place + 1) / len(self._others))

    def _passed(self, place: int) -> float | None:
        """Return when the median of the other senders passed this place; None if it has not."""
        senders = self.senders - self.excluded - {self.me}
        others = len(senders) - 1
        needed = others - (others - 1) // 2
        times = sorted(times[place] for sender in senders if len(times := self._delivered[sender]) > place)
        return times[needed - 1] if 0 < needed <= len(times) else None

    def _ready(self, works: Iterable[Work]) -> list[Finish]:
        ready = [Finish(*work) for work in works if not self._waiting[work]]
        for work in ready:
            del self._waiting[work]
        return ready
