"""The coordinator of a round: who is slow, who is lost, who averages in their place. Pure: events in, actions out.

`CommitRules` says what may be committed. All that is decided here matters for progress alone: whoever is left out, and
whoever averages a tile anew, members that succeed hold equal averages.

A member is left out

- when its connection is lost, or when it is silent (the caller tells);
- when it keeps the others waiting and makes no progress for `stall_s`: it reports no tile and moves no bytes;
- when it is far slower than the others (`Lateness`, and `Coordinator.slow`);
- when it is waited for briefly, and nobody else is any more (`Brief`).

The tiles that it owned get another reducer. So does a tile of which members hold different averages, if its maker does
not say which it made. If only the line between two members is bad, none of them is left out: the one that lacks tiles
gets another source for them, and a reducer that nobody can get tiles from owns none any more. The coordinator may be
the slow one. Then it leaves itself out as a member, and goes on deciding.

The coordinator is also a member. It learns about itself through `reported` as about others; its messages to itself are
a `Send` to its own index.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from shoal.averaging.allreduce.brief import Brief
from shoal.averaging.allreduce.commit import CommitRules, Order
from shoal.averaging.allreduce.lateness import LEAST_S, Lateness
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Abort, Assign, Commit, Gone, Report, Shown

__all__ = [
    "COORDINATOR_TRANSITIONS",
    "Coordinator",
    "CoordinatorAction",
    "CoordinatorPhase",
    "LeftOut",
    "Lied",
    "Replaced",
    "Send",
]

_SOURCES = 16
"""A tile that a member cannot get from its source is asked from one of so many others that hold it."""


class Send(NamedTuple):
    """Tell `member` this."""

    member: int
    message: Order


@dataclass(slots=True)
class _Word:
    """A report in which a member tells of averages that it made.

    Attributes:
        report: the report.
        is_signed: whether that member has signed it; None until it matters.
        shown: the members that it was shown.
    """

    report: Report
    is_signed: bool | None = None
    shown: set[int] = field(default_factory=set)


class LeftOut(NamedTuple):
    """Nobody waits for this member any more."""

    member: int
    reason: str


class Replaced(NamedTuple):
    """Nobody can get tiles from this member: others average its tiles. It is still waited for."""

    member: int


class Lied(NamedTuple):
    """A member's words contradict those of others."""

    member: int
    reason: str


CoordinatorAction = Send | LeftOut | Replaced | Lied


class CoordinatorPhase(enum.Enum):
    """Whether there is a verdict, which never changes."""

    DECIDING = "deciding"
    COMMITTED = "committed"
    ABORTED = "aborted"


_DECIDING, _COMMITTED, _ABORTED = CoordinatorPhase
COORDINATOR_TRANSITIONS: Mapping[tuple[CoordinatorPhase, str, CoordinatorPhase], str] = MappingProxyType(
    {
        (_DECIDING, "reported", _COMMITTED): "every member that contributes and is not left out holds every tile",
        (_DECIDING, "reported", _ABORTED): "no weight counts in a tile, or no member is left that can average a tile",
        (_DECIDING, "leave_out", _COMMITTED): "every other member that contributes holds every tile",
        (_DECIDING, "leave_out", _ABORTED): "too few members are left, none that contributes, or none that reduces",
        (_DECIDING, "give_up", _ABORTED): "its own time is over, or its caller cancels",
    }
)
"""Every change of the coordinator's phase, by method of `Coordinator` (`gone` and `tick` use `leave_out`), and when.

`tick` may also abort as `reported` does, where no member is left that can average a tile.
"""


class Coordinator:
    """Decides on one round.

    Args:
        round_id: the id of the round.
        reducers: for each tile, the index of the member that averages it at first.
        reduces: for each member, whether it can own tiles (is reachable, and has bandwidth).
        contributes: for each member, whether it has values and wants averages; False for an auxiliary one.
        me: index of the coordinator.
        min_group_size: with fewer members left, auxiliary ones counted, the round is aborted.
        stall_s: a member that owes tiles and neither reports one nor moves any bytes for this long is left out.
        margin_s: of reducers: see `Lateness`; None: half of `stall_s`.
        now: time at the beginning.
        brief_s: see `Brief.patience_s`.
        allowed_s: reducers may wait so long for members with slow lines (`slow_lines`).
        is_signed: whether a member has signed its report; asked only where members report different averages.

    Attributes:
        brief: the members that are waited for briefly.
        rules: what is held, and the verdict.
        stalled: the members that were left out as they made no progress for `stall_s`.
    """

    def __init__(  # noqa: PLR0913 (half of them by name)
        self,
        round_id: bytes,
        reducers: Sequence[int],
        reduces: Sequence[bool],
        contributes: Sequence[bool],
        me: int,
        *,
        min_group_size: int,
        stall_s: float,
        now: float,
        margin_s: float | None = None,
        brief_s: Mapping[int, float] = MappingProxyType({}),
        allowed_s: float = 0.0,
        is_signed: Callable[[int, Report], bool] = lambda member, report: True,
    ) -> None:
        self.brief = Brief(brief_s)
        self.rules = CommitRules(round_id, reducers, contributes, min_group_size=min_group_size, me=me)
        self.me, self.stall_s, self._allowed_s = me, stall_s, allowed_s
        self._margin_s = stall_s / 2 if margin_s is None else margin_s
        self.reduces, self.stalled = list(reduces), set[int]()
        self._told, self._is_signed = False, is_signed
        self._words: dict[int, _Word] = {}  # tile -> in which its maker has told of it
        self._unreachable: dict[int, set[int]] = {}  # per member: those it gets no tiles from
        self._source: list[dict[int, int]] = [{} for _ in reduces]  # per member: tile -> source other than the reducer
        self._moved: list[int] = []  # tiles that have got another reducer since the last report
        self._given_at: dict[int, float] = {}  # tile -> since when a member other than its reducer holds it
        self._named_at: list[dict[int, float]] = [{} for _ in reduces]  # per member: tile -> when its source was named
        self._moved_bytes = [0] * len(reduces)
        self._turn, self._ticked = me, now
        self._unsaid_at = math.inf  # since when only words about disputed tiles are waited for
        self.begin(now)

    @property
    def phase(self) -> CoordinatorPhase:
        """Whether there is a verdict."""
        match self.rules.verdict:
            case Commit():
                return _COMMITTED
            case Abort():
                return _ABORTED
        return _DECIDING

    # ------------------------------------------------------------------------------------------------------- events

    def begin(self, now: float) -> None:
        """Nobody owed progress before this moment."""
        self._began = now
        self._progress = [now] * len(self.reduces)
        self._heard = [now] * len(self.reduces)
        self._reducing = Lateness(self.rules.reducer, now=now, least_s=self._allowed_s)
        self._receiving = Lateness(self._compared, now=now, least_s=self._allowed_s, first=3)

    def reported(self, member: int, report: Report, now: float) -> list[CoordinatorAction]:
        """A member reported the tiles that it newly holds, and the reducers that it cannot get tiles from.

        Reports cost their sender little, so only what is new in them is looked at: for the member all tiles from the
        reducers that it newly lost, for the others the tiles that it newly holds. A second word of
        a member about an attempt is not new, whatever it says: an honest member has one average of each.
        """
        rules, given, lost, word = self.rules, list[int](), set[int](), _Word(report)
        self._heard[member] = now
        if rules.verdict is not None or member not in rules.live:
            sometimes("a report comes too late to count")
            return []
        for held in report.held:
            if held.tile not in rules.held[member] and rules.holds(member, held):
                self._progress[member] = now
                given.append(held.tile)
                if member == rules.maker[held.tile] and member != self.me:
                    self._words[held.tile] = word
                if member != rules.reducer[held.tile]:
                    self._given_at.setdefault(held.tile, now)
        if len(rules.held[member]) == len(rules.reducer):
            self._receiving.done((member,), now)
        if report.moved_bytes > self._moved_bytes[member]:
            self._moved_bytes[member], self._progress[member] = report.moved_bytes, now
        if report.lost and member in rules.takers:
            unreachable = self._unreachable.setdefault(member, set())
            lost = (rules.live & set(report.lost)) - unreachable - {member}
            unreachable |= lost
        actions = self._replace_reducers(now) if lost else []
        if lost:
            actions += self._help(member, now, self._tiles_from(lost, member))
        moved, self._moved = self._moved, []
        for other in sorted(self._unreachable.keys() & rules.live) if given or moved else ():
            actions += self._help(other, now, moved) + self._help(other, now, given, (member,))
        gone = [tile for tile in given if tile in rules.unknown and rules.maker[tile] not in rules.live]
        actions += self._move(gone, now) + self._settle(now) + self._decide()
        return actions + (self._leave_brief(now) if given or lost else [])

    def _settle(self, now: float) -> list[CoordinatorAction]:
        """Of a tile of which members hold different averages that one is committed which its maker says that it made.

        If it has not signed that, or nobody else has got it, the tile is averaged anew, and not by this maker.
        """
        rules, void, lies = self.rules, list[int](), dict[int, str]()
        for tile in sorted(rules.disputed) if rules.may_commit else ():
            maker, word = rules.maker[tile], self._words.get(tile)
            if word is None:  # it was made here
                continue
            said, mine = rules.held[maker][tile].digest, rules.held[self.me].get(tile)
            if not self._is_right(maker, word):
                lies.setdefault(maker, "has not signed its reports")
            elif any(
                tile in held and held[tile].digest == said for held in rules.held if held is not rules.held[maker]
            ):
                continue
            elif mine is not None and self._source[self.me].get(tile, rules.reducer[tile]) == maker:
                lies.setdefault(maker, f"gave this peer another average of tile {tile} than it has signed")
            sometimes("a disputed tile is averaged anew")
            void.append(tile)
        return self._void(void, lies, now)

    def _void(self, tiles: Sequence[int], lies: Mapping[int, str], now: float) -> list[CoordinatorAction]:
        """Have others average these tiles anew. The words of their makers about them do not count.

        Members to which a maker gave something else are shown its signed word. So they know why it is replaced.
        """
        shown = list[Send]()
        for tile in tiles:
            maker = self.rules.maker[tile]
            if (word := self._words.get(tile)) is not None and self._is_right(maker, word):
                shown += self._show(tile, word, self.rules.held[maker][tile].digest)
            self.reduces[maker] = False
            self._reducing.leave(maker)
            self.rules.distrust(tile)
        return [*(Lied(maker, lie) for maker, lie in lies.items()), *shown, *self._move(tiles, now)]

    def _show(self, tile: int, word: _Word, digest: bytes) -> list[Send]:
        """Show those that hold another average of a tile than this one the word of its maker, each of them once."""
        rules = self.rules
        differ = {member for member, held in enumerate(rules.held) if tile in held and held[tile].digest != digest}
        differ -= word.shown | {rules.maker[tile]}
        word.shown |= differ
        shown = Shown(rules.maker[tile], replace(word.report, lost=[], moved_bytes=0))
        return [Send(member, shown) for member in sorted(differ)]

    def _leave_unsaid(self, now: float) -> list[CoordinatorAction]:
        """Wait no longer for makers of disputed tiles that say only late what they made, or never.

        They have the margin of a reducer, once nothing else is waited for: then no values delay their words any more.
        The bytes that they move meanwhile help nobody.
        """
        rules = self.rules
        self._unsaid_at = min(self._unsaid_at, now) if rules.unknown and rules.complete else math.inf
        if now < self._unsaid_at + self._margin_s:
            return []
        tiles = [tile for tile in sorted(rules.unknown) if rules.maker[tile] != self.me]
        if tiles:
            sometimes("the maker of a disputed tile does not say what it made")
        lies = {rules.maker[tile]: f"gave averages of tile {tile}, and does not say which it made" for tile in tiles}
        return self._void(tiles, lies, now) + self._decide()

    def _is_right(self, maker: int, word: _Word) -> bool:
        """Return whether the maker has signed this word."""
        if word.is_signed is None:
            word.is_signed = self._is_signed(maker, word.report)
        return word.is_signed

    def gone(self, member: int, reason: str, now: float) -> list[CoordinatorAction]:
        """As `leave_out`, and the others are told, because only the coordinator has a connection with every member."""
        actions = self.leave_out(member, reason, now)
        if actions and self.rules.verdict is None:
            actions += [Send(other, Gone(member)) for other in sorted(self.rules.live)]
        return actions

    def leave_out(self, member: int, reason: str, now: float) -> list[CoordinatorAction]:
        """Wait for a member no longer: it is silent, or it gave up."""
        rules = self.rules
        if rules.verdict is not None or member not in rules.live:
            return []
        rules.leave_out(member)
        self._reducing.leave(member)
        self._receiving.leave(member)
        tiles = [tile for tile, reducer in enumerate(rules.reducer) if reducer == member]
        tiles = [tile for tile in tiles if not all(tile in rules.held[other] for other in rules.takers)]
        tiles += [tile for tile in sorted(rules.unknown.difference(tiles)) if rules.maker[tile] == member]
        return [LeftOut(member, reason), *self._move(tiles, now), *self._settle(now), *self._decide()]

    def tick(self, now: float, left_out: Collection[int] = ()) -> list[CoordinatorAction]:
        """Leave out members that keep the others waiting, or the coordinator itself if it cannot hear them.

        Those of which it waits for no values any more, as a reducer, do not get their time once more as reducers.
        """
        if now - self._ticked > self.stall_s / 4:
            # This peer itself stood still: reports that are not read yet are no sign of a bad line, nor of a lie.
            self._heard, self._unsaid_at = [now] * len(self.reduces), math.inf
        self._ticked = now
        actions = list[CoordinatorAction]()
        if self._cannot_hear(now):
            sometimes("a coordinator that hears nobody leaves itself out")
            actions += self.leave_out(self.me, "no progress", now)
        for member in self._owing():
            stalls = now - self._progress[member] >= self.stall_s
            if (stalls or member in left_out) and self._may_leave_out(member):
                self.stalled |= {member} if stalls else set()
                actions += self.leave_out(member, "no progress", now)
        actions += self._hurry(now) + self._leave_brief(now) + self._leave_unsaid(now)
        for member in self.slow(now):
            sometimes("a member is left out because it is slow")
            actions += self.leave_out(member, "far slower than the others", now)
        return actions

    def _leave_brief(self, now: float) -> list[CoordinatorAction]:
        """Leave out those that are waited for briefly, if it is time. Where too few others are left, it waits."""
        actions, rules, brief = list[CoordinatorAction](), self.rules, self.brief.patience_s.keys()
        awaited = set(self._owing()) if brief else set[int]()
        if awaited and awaited <= brief:
            others = {tile for tile, reducer in enumerate(rules.reducer) if reducer not in brief}
            awaited |= {member for member in rules.takers - brief if not rules.held[member].keys() >= others}
        for member in self.brief.late(awaited, now, self._receiving.usual_until):
            if len(rules.live) > max(rules.min_group_size, 2):
                actions += self.leave_out(member, "gave nothing yet, or to the last rounds, and others are done", now)
        return actions

    def give_up(self, reason: str) -> list[CoordinatorAction]:
        """The coordinator itself cannot go on (its deadline, or its caller cancelled)."""
        if self.rules.verdict is None:
            sometimes("a coordinator gives its round up before the verdict")
        self.rules.abort(reason)
        return self._decide()

    def _decide(self) -> list[CoordinatorAction]:
        """Commit if that is possible; tell everybody the verdict, once."""
        self.rules.commit()
        if self._told or (verdict := self.rules.verdict) is None:
            return []
        self._told = True
        lied = [Lied(member, reason) for member, reason in self.rules.lies().items()]
        shown = list[Send]()
        if isinstance(verdict, Commit):
            for tile in sorted(self.rules.disputed & self._words.keys()):
                shown += self._show(tile, self._words[tile], verdict.tiles[tile].digest)
        return [*lied, *shown, *(Send(member, verdict) for member in range(len(self.reduces)))]

    # ------------------------------------------------------------------------------------------------- other reducers

    def _move(self, tiles: Iterable[int], now: float) -> list[CoordinatorAction]:
        """Give these tiles other reducers."""
        moved: dict[tuple[int, int], list[int]] = {}
        for tile in tiles if self.rules.verdict is None else ():
            new_reducer, attempt = self._new_reducer(tile)
            if new_reducer is None:
                self.rules.abort("no member is left that can reduce")
                return []
            moved.setdefault((new_reducer, attempt), []).append(tile)
        return [
            send for (reducer, attempt), found in moved.items() for send in self._assign(found, attempt, reducer, now)
        ]

    def _new_reducer(self, tile: int) -> tuple[int | None, int]:
        """A member that can reduce and already holds the tile; else the next in turn, which averages it again."""
        rules = self.rules
        able = sorted(member for member in rules.live if self.reduces[member])
        if not able:
            sometimes("the last member that can reduce is lost")
            return None, 0
        holders = [member for member in able if tile in rules.held[member]]
        if holders and tile not in rules.unknown:
            sometimes("a reducer is lost, and another member holds its tile")
            return holders[tile % len(holders)], rules.attempt[tile]
        sometimes("a tile is averaged again by another member")
        self._turn += 1
        return able[self._turn % len(able)], rules.attempt[tile] + 1

    def _assign(self, tiles: list[int], attempt: int, reducer: int, now: float) -> list[CoordinatorAction]:
        self._reducing.again(now)
        self._receiving.again(now)
        for tile in tiles:
            if attempt > self.rules.attempt[tile]:
                self._given_at.pop(tile, None)
                self._words.pop(tile, None)
            for source, named_at in zip(self._source, self._named_at, strict=True):
                source.pop(tile, None)
                named_at[tile] = now
            self.rules.assign(tile, attempt, reducer)
        self._moved += tiles
        self._progress[reducer] = now
        return [Send(other, Assign(tiles, attempt, reducer)) for other in sorted(self.rules.live)]

    def _tiles_from(self, sources: Collection[int], member: int) -> list[int]:
        """The tiles that `member` is to get from one of these."""
        own = self._source[member]
        return [tile for tile, reducer in enumerate(self.rules.reducer) if own.get(tile, reducer) in sources]

    def _help(
        self, member: int, now: float, tiles: Sequence[int], among: Collection[int] | None = None
    ) -> list[CoordinatorAction]:
        """Name another source for tiles that `member` cannot get from its present source, as soon as there is one.

        Args:
            member: of the group.
            now: time.
            tiles: to look at.
            among: the members that may be the source; None: all.
        """
        moved: dict[tuple[int, int], list[int]] = {}
        rules, unreachable, sources = self.rules, self._unreachable.get(member, set()), self._source[member]
        others = (rules.live if among is None else rules.live & set(among)) - unreachable - {member}
        for tile in tiles if others else ():
            if tile in rules.held[member] or sources.get(tile, rules.reducer[tile]) not in unreachable:
                continue
            able = (other for other in rules.holders.get(tile, ()) if other in others and self.reduces[other])
            if holders := sorted(islice(able, _SOURCES)):
                sometimes("a member that cannot get a tile is named another source")
                sources[tile] = holders[tile % len(holders)]
                self._named_at[member][tile] = now
                moved.setdefault((rules.attempt[tile], sources[tile]), []).append(tile)
        return [Send(member, Assign(tiles, attempt, source)) for (attempt, source), tiles in moved.items()]

    def _replace_reducers(self, now: float) -> list[CoordinatorAction]:
        """A member that cannot give its tiles to anybody loses them, even if it holds their averages itself."""
        rules, actions = self.rules, list[CoordinatorAction]()
        for reducer in sorted(set(rules.reducer) & rules.live):
            if all(reducer in self._unreachable.get(other, ()) for other in rules.takers if other != reducer):
                others = rules.takers - {reducer}
                tiles = [tile for tile, of in enumerate(rules.reducer) if of == reducer]
                tiles = [tile for tile in tiles if not any(tile in rules.held[other] for other in others)]
                if others and tiles and rules.verdict is None:
                    sometimes("nobody gets tiles from a reducer that lives")
                    self.reduces[reducer] = False
                    self._reducing.leave(reducer)
                    actions += [Replaced(reducer), *self._move(tiles, now)]
        return actions

    def _hurry(self, now: float) -> list[CoordinatorAction]:
        """Name another source for tiles that a member has waited for far longer than another member had to.

        If only the line between two members is slow, neither of them is slow: each can get the missing tiles from a
        third one. Far longer means twice as long plus half of the margin: before the member itself counts as slow.
        """

        def limit(since: float, given_at: float) -> float:
            return since + (given_at - self._began) + self._margin_s / 2

        rules, actions = self.rules, list[CoordinatorAction]()
        late = {tile: at for tile, at in self._given_at.items() if now >= limit(at, at)}
        for member in sorted(rules.takers) if late and rules.verdict is None else ():
            source, named_at = self._source[member], self._named_at[member]
            waited_for = {
                source.get(tile, rules.reducer[tile])
                for tile, at in late.items()
                if tile not in rules.held[member] and now >= limit(named_at.get(tile, at), at)
            } - {member}
            if waited_for:
                sometimes("a member waits for a tile far longer than another had to")
                self._unreachable.setdefault(member, set()).update(waited_for)
                actions += self._help(member, now, self._tiles_from(self._unreachable[member], member))
        return actions

    # --------------------------------------------------------------------------------------------------- who is slow

    def slow(self, now: float) -> list[int]:
        """The members that are far slower than the others; the coordinator may be one, and then goes on deciding.

        Nobody if too few members would be left, or none that contributes: waiting costs less than failing.
        """
        rules, slow = self.rules, set[int]()
        for each in self._late(now) if rules.verdict is None else ():
            left = rules.live - slow - {each}
            if each not in rules.live or (each == self.me and not self._may_step_aside()):
                continue
            if len(left) >= max(rules.min_group_size, 2) and left & rules.takers:
                if each == self.me:
                    sometimes("a coordinator is far slower than the others, and steps aside")
                slow.add(each)
        return sorted(slow)

    def _late(self, now: float) -> list[int]:
        """The reducers that have not given each of their tiles to another member, if it is time.

        When all have: the members that lack tiles.
        """
        rules, takers = self.rules, self._compared
        waiting = _undelivered(rules.reducer, rules.held, takers)
        self._reducing.done(set(rules.reducer) - waiting, now)
        if waiting:
            return sorted(self._deaf(waiting) or waiting) if now >= self._reducing.usual_until + self._margin_s else []
        lacking = (each for each in takers if len(rules.held[each]) < len(rules.reducer))
        return sorted(lacking) if now >= self._receiving.usual_until + LEAST_S else []

    def _deaf(self, waiting: Collection[int]) -> set[int]:
        """Of only two members that are to hold all tiles: the one that lacks what others have given to the other one.

        Each of the two gives to the other one alone, so neither outvotes the other (an auxiliary coordinator takes
        nothing). The one that takes nothing of others either is the bad one.
        """
        rules, takers = self.rules, self._compared
        given = {tile for tile, reducer in enumerate(rules.reducer) if reducer not in waiting}
        deaf = {member for member in takers if not given <= rules.held[member].keys()}
        return deaf if len(takers) == 2 and len(deaf) == 1 else set()

    @property
    def _compared(self) -> set[int]:
        """The members that are to hold all tiles; those that are waited for briefly are not compared with others."""
        return self.rules.takers - self.brief.patience_s.keys() or self.rules.takers

    def _cannot_hear(self, now: float) -> bool:
        """Return whether the coordinator's own line is slow: for half of the limit most others' reports are missing.

        Everybody reports once a second. On a slow line the values to and from the coordinator delay the reports.
        """
        others = self.rules.live - {self.me} - self.brief.patience_s.keys()
        missing = sum(now - self._heard[member] >= self.stall_s / 2 for member in others)
        return self._may_step_aside() and 2 * missing > len(others)

    def _may_step_aside(self) -> bool:
        """Return whether the others can go on without the coordinator's values: at least two of them have values.

        With only one, nobody could tell which of the two is slow.
        """
        live = self.rules.live
        return self.me in live and len(self.rules.takers - {self.me}) >= 2 and len(live) > self.rules.min_group_size

    def _may_leave_out(self, member: int) -> bool:
        """Return whether silence is the member's fault: it may be the coordinator's own, or nobody's."""
        if member != self.me:
            return True
        others = self.rules.takers - {member}
        complete = all(len(self.rules.held[other]) == len(self.rules.reducer) for other in others)
        return complete or (self._sole_holders() == {member} and self._may_step_aside())

    def _owing(self) -> list[int]:
        """Members that keep the others waiting: reducers of tiles that nobody else holds, else members without some.

        If only the coordinator's own tiles are held by nobody else, and the others cannot go on without it, these wait
        for themselves: either line may be the bad one, but the round comes to nothing either way.
        """
        rules = self.rules
        if rules.verdict is not None:
            return []
        somewhere = {tile for member in rules.live for tile in rules.held[member]}
        unheld = {reducer for tile, reducer in enumerate(rules.reducer) if tile not in somewhere}
        if owing := unheld & rules.live:
            return sorted(owing)
        if (owing := self._sole_holders()) and (owing != {self.me} or self._may_leave_out(self.me)):
            return sorted(owing)
        lacking = sorted(member for member in rules.takers if len(rules.held[member]) < len(rules.reducer))
        return lacking or sorted({rules.maker[tile] for tile in rules.unknown} & rules.live)

    def _sole_holders(self) -> set[int]:
        """The members that have tiles which no other member that should hold them holds."""
        rules, takers = self.rules, self.rules.takers
        found = _undelivered(rules.reducer, rules.held, takers) & rules.live
        return found if len(takers) > 1 else found - takers  # from the only taker nobody else wants a tile


def _undelivered(reducer: Sequence[int], held: Sequence[Mapping[int, object]], takers: Collection[int]) -> set[int]:
    """The reducers of tiles that no other member holds which is to hold them."""
    return {of for tile, of in enumerate(reducer) if not any(tile in held[each] for each in takers if each != of)}
