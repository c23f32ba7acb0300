"""The commit rule: which averages may a round succeed with? Pure: no input or output, no time.

Every tile of the vector has a *reducer*, the member that averages it, and an *attempt* number. One member, the
*coordinator*, is named when the group begins and is never replaced.

- A member keeps the newest attempt of each tile (`MemberRules`) and tells the coordinator what it holds (`Report`).
- When the coordinator leaves a member out, the tiles that this member owned get another reducer: a member that already
  holds the average (same attempt), or otherwise one that averages the tile again (next attempt; older bytes are void).
- When every member that is not left out holds the current attempt of every tile, the coordinator commits
  (`CommitRules`). The commit names the digest of each tile. A member succeeds when it has a commit and holds exactly
  these digests.
- An *auxiliary* member contributes no values and wants no averages. It may own tiles, and decide. Nobody waits for it
  to hold tiles of others, and the commit alone makes it succeed. At least one member that contributes must be left.

**Agreement**: two members that succeed hold the same averages, however messages, crashes and (wrong) suspicions fall.
The argument: there is one coordinator, and `CommitRules.verdict` is set once; it names one digest for each tile; a
member succeeds only while each average that it holds has the digest of the commit; and a digest names its bytes. So
the choice of members that the coordinator leaves out (module `coordinator`) matters for progress alone.
**Not promised**: that all survivors learn the verdict. `docs/why/decisions/0001-commit-and-fork-rules.md` has more;
`tests/model` visits every state for three peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Abort, Assign, Commit, Gone, Held, Shown

__all__ = ["Ask", "Average", "CommitRules", "Contribute", "MemberRules", "Order", "TileAction"]


class Contribute(NamedTuple):
    """Send (again) my values of this tile to `reducer`."""

    tile: int
    attempt: int
    reducer: int


class Ask(NamedTuple):
    """Ask `reducer` for the average of this tile, which it has."""

    tile: int
    attempt: int
    reducer: int


class Average(NamedTuple):
    """I own this tile now: collect contributions for this attempt and average them."""

    tile: int
    attempt: int


Order = Assign | Gone | Shown | Commit | Abort
"""The messages of the coordinator."""

TileAction = Contribute | Ask | Average


class MemberRules:
    """The rules of one member of a round.

    Args:
        me: index of this member in the group.
        reducers: for each tile, the index of the member that averages it at first.
        contributes: False for an auxiliary member.

    Attributes:
        replaced: the members whose tiles were averaged anew by others. They average nothing in this round any more.
    """

    def __init__(self, me: int, reducers: Sequence[int], *, contributes: bool = True) -> None:
        self.me, self.contributes = me, contributes
        self.reducer = list(reducers)
        self._owner = list(reducers)  # of the present attempt, as far as it is known here
        self.replaced: set[int] = set()
        self._named: dict[int, set[int]] = {}  # tile -> members named as its source under the present attempt
        self.attempt = [0] * len(reducers)
        self.held: list[Held | None] = [None] * len(reducers)
        self.commit: Commit | None = None
        self.failed: str | None = None
        self.unreported: list[Held] = []

    @property
    def succeeded(self) -> bool:
        """True once this member may apply the averages that it holds."""
        return self.commit is not None and self.failed is None and self.complete

    @property
    def complete(self) -> bool:
        """Return whether nothing is `missing`."""
        return not self.contributes or all(held is not None for held in self.held)

    def missing(self) -> list[int]:
        """The tiles that this member lacks: of the commit if there is one, else of the current attempts.

        An auxiliary member lacks none.
        """
        if not self.contributes:
            return []
        return [tile for tile, held in enumerate(self.held) if held is None]

    def wants(self, tile: int, attempt: int) -> bool:
        """Return whether an average of this attempt would be news."""
        if self.failed is not None or not 0 <= tile < len(self.held):
            return False
        held = self.held[tile]
        if self.commit is not None:
            return held is None and attempt == self.commit.tiles[tile].attempt
        return attempt >= self.attempt[tile] and (held is None or attempt > held.attempt)

    def averages(self, member: int, tile: int, attempt: int) -> bool:
        """Return whether this member averages the tile in this attempt, as far as is known here."""
        return self._owner[tile] == member and self.attempt[tile] == attempt

    def may_give(self, member: int, tile: int) -> bool:
        """Return whether this member can have an average that nobody has committed yet."""
        return member in (self.reducer[tile], self._owner[tile])

    def expect(self, tile: int, attempt: int) -> None:
        """Bytes of this attempt are about to be received into the place of the tile: its old content is void."""
        self.attempt[tile] = max(self.attempt[tile], attempt)
        self.held[tile] = None

    def averaged(self, held: Held) -> bool:
        """This tile was averaged here, or received whole. False if it is not wanted (any more)."""
        if not self.wants(held.tile, held.attempt):
            return False
        if self.commit is not None and held.digest != self.commit.tiles[held.tile].digest:
            sometimes("an average comes that is not the committed one")
            return False
        self.attempt[held.tile] = held.attempt
        self.held[held.tile] = held
        if self.commit is None:
            self.unreported.append(held)
        return True

    def may_assign(self, assign: Assign) -> bool:
        """Whether an honest coordinator can say this: each member loses its tiles once, and gets none after that.

        So it can have the values sent again only as often as members of the group can fail.
        """
        raised = [tile for tile in assign.tiles if assign.attempt > self.attempt[tile]]
        return not raised or not (
            assign.reducer in self.replaced or any(self._owner[tile] == assign.reducer for tile in raised)
        )

    def assigned(self, assign: Assign) -> list[TileAction]:
        """The coordinator gave tiles another reducer."""
        actions: list[TileAction] = []
        for tile in assign.tiles:
            if self.commit is not None or self.failed is not None or assign.attempt < self.attempt[tile]:
                continue
            raised = assign.attempt > self.attempt[tile]
            if raised:
                self.replaced.add(self._owner[tile])
                self._owner[tile] = assign.reducer
                self._named.pop(tile, None)
            else:
                named = self._named.setdefault(tile, set())
                if assign.reducer in named:
                    continue  # once is enough: else a tile could be asked for as often as the coordinator likes
                named.add(assign.reducer)
            self.attempt[tile], self.reducer[tile] = assign.attempt, assign.reducer
            if (held := self.held[tile]) is not None and held.attempt >= assign.attempt:
                continue
            self.held[tile] = None
            if assign.reducer == self.me:
                if raised:  # else it holds the average, or the coordinator lies: one attempt is averaged once
                    actions.append(Average(tile, assign.attempt))
            elif self.contributes:
                action = Contribute if raised else Ask
                actions.append(action(tile, assign.attempt, assign.reducer))
        return actions

    def committed(self, commit: Commit) -> list[int]:
        """The verdict arrived. Returns the tiles that are still to be fetched, from anybody who holds them."""
        if self.failed is None and self.commit is None:
            self.commit = commit
            self.unreported.clear()
            for tile, due in enumerate(commit.tiles):
                held = self.held[tile]
                self.attempt[tile] = due.attempt
                if held is not None and held.digest != due.digest:
                    sometimes("a member holds another average than the committed one")
                    self.held[tile] = None
        return self.missing() if self.commit is not None else []

    def give_up(self, reason: str) -> bool:
        """Fail, for good; the first reason stays. False if the round has succeeded already."""
        if self.succeeded:
            sometimes("a round is given up in the moment in which it succeeds here")
            return False
        self.failed = self.failed or reason
        return True

    def take_report(self) -> list[Held]:
        """The averages that are held and were not reported yet."""
        news = [held for held in self.unreported if self.held[held.tile] is held]
        self.unreported.clear()
        return news


class CommitRules:
    """What the coordinator of a round may commit.

    Args:
        round_id: the id of the round.
        reducers: for each tile, the index of the member that averages it at first.
        contributes: for each member, whether it has values and wants averages; False for an auxiliary one.
        min_group_size: with fewer members left, auxiliary ones counted, the round is aborted.
        me: index of the coordinator.

    Attributes:
        reducer: of each tile, now.
        maker: of each tile: the member that averages it in the present attempt, or has done so.
        attempt: of each tile, now.
        live: the members that are not left out.
        held: for each member, what it has reported of the current attempts, by tile.
        holders: the same, by tile: the members that have reported it, the first one first.
        disputed: the tiles of which members report different averages, under the present attempt.
        unknown: those of them of which the maker has not said what it made.
        verdict: set once, and never changed.
    """

    def __init__(
        self,
        round_id: bytes,
        reducers: Sequence[int],
        contributes: Sequence[bool],
        *,
        min_group_size: int,
        me: int,
    ) -> None:
        self.round_id, self.min_group_size, self.me = round_id, min_group_size, me
        self.reducer = list(reducers)
        self.maker = list(reducers)
        self.attempt = [0] * len(reducers)
        self.live = set(range(len(contributes)))
        self.held: list[dict[int, Held]] = [{} for _ in contributes]
        self.holders: dict[int, list[int]] = {}
        self.verdict: Commit | Abort | None = None
        self._first: dict[int, Held] = {}  # tile -> what was reported of it first, under its present attempt
        self.disputed: set[int] = set()
        self.unknown: set[int] = set()
        self._takers = {member for member, values in enumerate(contributes) if values}

    @property
    def takers(self) -> set[int]:
        """The members that are to hold every tile: those that contribute, and are not left out."""
        return self._takers

    def holds(self, member: int, held: Held) -> bool:
        """Note what a member reports. False if it is of another attempt, or the round has ended for this member."""
        tile = held.tile
        known = 0 <= tile < len(self.reducer) and held.attempt == self.attempt[tile]
        if not known or self.verdict is not None or member not in self.live:
            return False
        if not any(held.contributors):
            self.abort(
                "the total weight of the group is zero: each member gave weight 0, or values that are not finite or "
                "too large to be summed (its log names the tensor)"
            )
            return False
        if tile not in self.held[member]:
            self.holders.setdefault(tile, []).append(member)
        self.held[member][tile] = held
        if self._first.setdefault(tile, held) != held:
            self.disputed.add(tile)
        if tile in self.disputed:
            if tile in self.held[self.maker[tile]]:
                self.unknown.discard(tile)
            else:
                self.unknown.add(tile)
        return True

    def leave_out(self, member: int) -> None:
        """Wait for this member no longer. The caller gives the tiles that it owns other reducers."""
        self.live.discard(member)
        self._takers = self._takers - {member}  # another set: callers may hold the one before
        if len(self.live) < self.min_group_size:
            sometimes("too few members of a round are left")
            self.abort("too few members are left")
        elif not self.takers:
            sometimes("no member of a round that contributes is left")
            self.abort("no member that contributes values is left")

    def assign(self, tile: int, attempt: int, reducer: int) -> None:
        """Give a tile another reducer. With a higher attempt nobody holds it any more."""
        if attempt > self.attempt[tile]:
            for held in self.held:
                held.pop(tile, None)
            self._first.pop(tile, None)
            self.holders.pop(tile, None)
            self.disputed.discard(tile)
            self.unknown.discard(tile)
            self.maker[tile] = reducer
        self.attempt[tile], self.reducer[tile] = attempt, reducer

    def distrust(self, tile: int) -> None:
        """What its maker has said of this tile does not count."""
        self.held[self.maker[tile]].pop(tile, None)
        self.unknown.add(tile)

    @property
    def complete(self) -> bool:
        """Return whether there is no verdict yet, and every taker holds the current attempt of every tile."""
        complete = self.takers and all(len(self.held[each]) == len(self.reducer) for each in self.takers)
        return bool(complete) and self.verdict is None

    @property
    def may_commit(self) -> bool:
        """Return whether it is `complete`, and of each disputed tile it is known what was made."""
        return self.complete and not self.unknown

    def commit(self) -> None:
        """Commit, if it may."""
        if self.may_commit:
            self.verdict = Commit(self.round_id, [self._agreed(tile) for tile in range(len(self.reducer))])

    def _agreed(self, tile: int) -> Held:
        """What is committed of a tile: if it is disputed, the average that its maker says that it made.

        No number of members outvotes that: keys are free. The digest is also of what is said of the average: so of one
        digest the coordinator's own word is the true one. Where it has none, of equally many words those of others than
        the maker count: a false one keeps nobody from the average but who said it.
        """
        if tile not in self.disputed:
            return self._first[tile]
        digest = self.held[self.maker[tile]][tile].digest
        mine = self.held[self.me].get(tile)
        if mine is not None and mine.digest == digest:
            return mine
        holders = sorted(range(len(self.held)), key=lambda member: member == self.maker[tile])  # those left out, too
        reported = (self.held[member][tile] for member in holders if tile in self.held[member])
        return Counter(held for held in reported if held.digest == digest).most_common(1)[0][0]

    def lies(self) -> dict[int, str]:
        """After the commit: the members that say of an average that the coordinator holds what it does not say.

        A member hashes what it gets, and reports that. If it reports another average, its reducer may have given it
        another, or it lies.
        """
        found: dict[int, str] = {}
        if not isinstance(self.verdict, Commit):
            return found
        for tile in sorted(self.disputed):
            agreed = self.verdict.tiles[tile]
            if self.held[self.me].get(tile) != agreed:
                continue
            for each in sorted(self.takers):
                if (held := self.held[each][tile]).digest == agreed.digest and held != agreed:
                    found.setdefault(each, f"said of tile {tile} what its average does not")
        return found

    def abort(self, reason: str) -> None:
        """End the round without averages, unless there is a verdict already."""
        self.verdict = self.verdict or Abort(self.round_id, reason)
