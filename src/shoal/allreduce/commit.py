"""The commit rule: when does a round succeed, and with which averages? Pure state machines, no input or output.

Every part of the vector has an *owner*, the member that averages it, and an *attempt* number. One member, the
*decider*, is named when the group begins and is never replaced.

- A member keeps the newest attempt of each part and tells the decider what it holds (`Report`).
- When the decider leaves a member out, the parts that this member owned get another owner: a member that already holds
  the average (same attempt), or otherwise one that averages the part again (next attempt; older bytes are void).
- When every member that is not left out holds the current attempt of every part, the decider says `Commit`, which names
  the digest of each part. A member succeeds when it has a commit and holds exactly these digests.
- An *auxiliary* member contributes no values and wants no averages. It may own parts, and decide. Nobody waits for it
  to hold parts of others, and the commit alone makes it succeed. At least one member that contributes must be left.

**Agreement**: two members that succeed hold the same averages, however messages, crashes and (wrong) suspicions fall.
There is one decider, it commits once, and a digest names its bytes. **Not promised**: that all survivors learn the
verdict. `docs/decisions/0001-commit-and-fork-rules.md` has the argument; `tests/model` visits every state for three
peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.allreduce.stragglers import Stragglers
from shoal.wire import Abort, Assign, Commit, Gone, Held, Report

__all__ = ["Ask", "Average", "Contribute", "DeciderRules", "MemberAction", "MemberRules", "Order", "Send"]


class Contribute(NamedTuple):
    """Send (again) my values of this part to `owner`."""

    part: int
    attempt: int
    owner: int


class Ask(NamedTuple):
    """Ask `owner` for the average of this part, which it has."""

    part: int
    attempt: int
    owner: int


class Average(NamedTuple):
    """I own this part now: collect contributions for this attempt and average them."""

    part: int
    attempt: int


Order = Assign | Gone | Commit | Abort
"""The messages of the decider."""


class Send(NamedTuple):
    """The decider tells `member` something (never itself: see `DeciderRules`)."""

    member: int
    message: Order


MemberAction = Contribute | Ask | Average


class MemberRules:
    """The rules of one member of a round.

    Args:
        me: index of this member in the group.
        owners: for each part, the index of the member that averages it at first.
        contributes: False for an auxiliary member.
    """

    def __init__(self, me: int, owners: Sequence[int], *, contributes: bool = True) -> None:
        self.me, self.contributes = me, contributes
        self.owner = list(owners)
        self.attempt = [0] * len(owners)
        self.held: list[Held | None] = [None] * len(owners)
        self.commit: Commit | None = None
        self.failed: str | None = None
        self._unreported: list[Held] = []

    @property
    def succeeded(self) -> bool:
        """True once this member may apply the averages that it holds."""
        return self.commit is not None and self.failed is None and not self.missing()

    def missing(self) -> list[int]:
        """The parts that this member lacks: of the commit if there is one, else of the current attempts.

        An auxiliary member lacks none.
        """
        if not self.contributes:
            return []
        return [part for part, held in enumerate(self.held) if held is None]

    def wants(self, part: int, attempt: int) -> bool:
        """Return whether an average of this attempt would be news."""
        if self.failed is not None or not 0 <= part < len(self.held):
            return False
        held = self.held[part]
        if self.commit is not None:
            return held is None and attempt == self.commit.parts[part].attempt
        return attempt >= self.attempt[part] and (held is None or attempt > held.attempt)

    def expect(self, part: int, attempt: int) -> None:
        """Bytes of this attempt are about to be received into the place of the part: its old content is void."""
        self.attempt[part] = max(self.attempt[part], attempt)
        self.held[part] = None

    def averaged(self, held: Held) -> bool:
        """This part was averaged here, or received whole. False if it is not wanted (any more)."""
        if not self.wants(held.part, held.attempt):
            return False
        if self.commit is not None and held.digest != self.commit.parts[held.part].digest:
            return False
        self.attempt[held.part] = held.attempt
        self.held[held.part] = held
        if self.commit is None:
            self._unreported.append(held)
        return True

    def assigned(self, assign: Assign) -> list[MemberAction]:
        """The decider gave parts another owner."""
        actions: list[MemberAction] = []
        for part in assign.parts:
            if self.commit is not None or self.failed is not None or assign.attempt < self.attempt[part]:
                continue
            raised = assign.attempt > self.attempt[part]
            self.attempt[part], self.owner[part] = assign.attempt, assign.owner
            held = self.held[part]
            if held is not None and held.attempt < assign.attempt:
                self.held[part] = held = None
            if held is not None:
                continue
            if assign.owner == self.me:
                actions.append(Average(part, assign.attempt))
            elif not self.contributes:
                continue
            elif raised:
                actions.append(Contribute(part, assign.attempt, assign.owner))
            else:
                actions.append(Ask(part, assign.attempt, assign.owner))
        return actions

    def committed(self, commit: Commit) -> list[int]:
        """The verdict arrived. Returns the parts that are still to be fetched, from anybody who holds them."""
        if self.failed is None and self.commit is None:
            self.commit = commit
            self._unreported.clear()
            for part, due in enumerate(commit.parts):
                held = self.held[part]
                self.attempt[part] = due.attempt
                if held is not None and held.digest != due.digest:
                    self.held[part] = None
        return self.missing() if self.commit is not None else []

    def give_up(self, reason: str) -> bool:
        """Fail, for good; the first reason stays. False if the round has succeeded already."""
        if self.succeeded:
            return False
        self.failed = self.failed or reason
        return True

    def take_report(self) -> list[Held]:
        """The averages that are held and were not reported yet."""
        news = [held for held in self._unreported if self.held[held.part] is held]
        self._unreported.clear()
        return news


class DeciderRules:
    """The rules of the decider.

    The decider is also a member, and learns about itself through `reported` as about others; its messages to itself
    come back as a `Send` to its own index.

    Args:
        round_id: the id of the round.
        owners: for each part, the index of the member that averages it at first.
        reduces: for each member, whether it can own parts (is reachable, and has bandwidth).
        contributes: for each member, whether it has values and wants averages; False for an auxiliary one.
        me: index of the decider.
        min_group_size: with fewer members left, auxiliary ones counted, the round is aborted.
        stall_s: a member that owes parts and neither reports one nor moves any bytes for this long is left out.
        now: time at the beginning.
    """

    def __init__(
        self,
        round_id: bytes,
        owners: Sequence[int],
        reduces: Sequence[bool],
        contributes: Sequence[bool],
        me: int,
        *,
        min_group_size: int,
        stall_s: float,
        now: float,
    ) -> None:
        self.round_id, self.me, self.stall_s, self.min_group_size = round_id, me, stall_s, min_group_size
        self.owner = list(owners)
        self.attempt = [0] * len(owners)
        self.reduces = list(reduces)
        self.live = set(range(len(reduces)))
        self._auxiliary = {member for member, values in enumerate(contributes) if not values}
        self.verdict: Commit | Abort | None = None
        self._held: list[dict[int, Held]] = [{} for _ in reduces]
        self._unreachable: list[set[int]] = [set() for _ in reduces]  # per member: those it gets no parts from
        self._source: list[dict[int, int]] = [{} for _ in reduces]  # per member: part -> source other than the owner
        self._given_at: dict[int, float] = {}  # part -> since when a member other than its owner holds it
        self._named_at: list[dict[int, float]] = [{} for _ in reduces]  # per member: part -> when its source was named
        self._began = now
        self._progress = [now] * len(reduces)
        self._heard = [now] * len(reduces)
        self._ticked = now
        self._moved_bytes = [0] * len(reduces)
        self._turn = me

    # ------------------------------------------------------------------------------------------------------- events

    def begin(self, now: float) -> None:
        """Nobody owed progress before this moment."""
        self._began = now
        self._progress = [now] * len(self.reduces)
        self._heard = list(self._progress)

    def reported(self, member: int, report: Report, now: float) -> list[Send]:
        """A member reported the parts that it newly holds, and the owners that it cannot get parts from."""
        self._heard[member] = now
        if self.verdict is not None or member not in self.live:
            return []
        for held in report.held:
            if 0 <= held.part < len(self.owner) and held.attempt == self.attempt[held.part]:
                if not any(held.contributors):
                    return self._abort("the total weight of the group is zero")
                self._held[member][held.part] = held
                self._progress[member] = now
                if member != self.owner[held.part]:
                    self._given_at.setdefault(held.part, now)
        if report.moved_bytes > self._moved_bytes[member]:
            self._moved_bytes[member], self._progress[member] = report.moved_bytes, now
        if member not in self._auxiliary:
            self._unreachable[member].update(lost for lost in report.lost if lost in self.live and lost != member)
        sends = self._replace_owners(now) if report.lost else []
        sends += [send for other in sorted(self.live) if self._unreachable[other] for send in self._help(other, now)]
        return sends + self._maybe_commit()

    def gone(self, member: int, now: float) -> list[Send]:
        """As `lost`, and the others are told, because only the decider has a connection with every member."""
        before = set(self.live)
        sends = self.lost(member, now)
        if self.verdict is None and member in before:
            sends += [Send(other, Gone(member)) for other in sorted(self.live)]
        return sends

    def lost(self, member: int, now: float) -> list[Send]:
        """Leave a member out: its link closed, it was silent, or it gave up."""
        if self.verdict is not None or member not in self.live:
            return []
        self.live.discard(member)
        if len(self.live) < self.min_group_size:
            return self._abort("too few members are left")
        if not self._takers():
            return self._abort("no member that contributes values is left")
        takers = self._takers()
        parts = [part for part, owner in enumerate(self.owner) if owner == member]
        parts = [part for part in parts if not all(part in self._held[other] for other in takers)]
        return self._move(parts, now) + self._maybe_commit()

    def _move(self, parts: Iterable[int], now: float) -> list[Send]:
        """Give these parts other owners."""
        moved: dict[tuple[int, int], list[int]] = {}
        for part in parts:
            new_owner, attempt = self._new_owner(part)
            if new_owner is None:
                return self._abort("no member is left that can reduce")
            moved.setdefault((new_owner, attempt), []).append(part)
        return [send for (owner, attempt), found in moved.items() for send in self._assign(found, attempt, owner, now)]

    def _assign(self, parts: list[int], attempt: int, owner: int, now: float) -> list[Send]:
        for part in parts:
            if attempt > self.attempt[part]:
                self._given_at.pop(part, None)
                for held in self._held:
                    held.pop(part, None)
            for source, named_at in zip(self._source, self._named_at, strict=True):
                source.pop(part, None)
                named_at[part] = now
            self.attempt[part], self.owner[part] = attempt, owner
        self._progress[owner] = now
        return [Send(other, Assign(parts, attempt, owner)) for other in sorted(self.live)]

    def deadline(self) -> float | None:
        """Return when `tick` should be called next."""
        if self.verdict is not None:
            return None
        return min((self._progress[member] + self.stall_s for member in self._owing()), default=None)

    def tick(self, now: float) -> list[Send]:
        """Leave out members that owe parts and made no progress in the stall limit; the decider if it cannot hear."""
        if now - self._ticked > self.stall_s / 4:
            self._heard = [now] * len(self.reduces)  # this peer itself stood still: that is no sign of a bad line
        self._ticked = now
        sends = self.lost(self.me, now) if self._cannot_hear(now) else []
        for member in self._owing():
            if now - self._progress[member] >= self.stall_s and self._may_leave_out(member):
                sends += self.lost(member, now)
        return sends + self._hurry(now)

    def _hurry(self, now: float) -> list[Send]:
        """Name another source for parts that a member has waited for far longer than another member had to.

        If only the line between two members is slow, neither of them is slow: each can get the missing parts from a
        third one. Far longer means twice as long plus a quarter of the limit of silence: before the member itself
        counts as slow.
        """

        def limit(since: float, given_at: float) -> float:
            return since + (given_at - self._began) + self.stall_s / 4

        late = {part: at for part, at in self._given_at.items() if now >= limit(at, at)}
        if self.verdict is not None or not late:
            return []
        sends: list[Send] = []
        for member in sorted(self._takers()):
            held, source, named_at = self._held[member], self._source[member], self._named_at[member]
            waited_for = {
                source.get(part, self.owner[part])
                for part, at in late.items()
                if part not in held and now >= limit(named_at.get(part, at), at)
            } - {member}
            if waited_for:
                self._unreachable[member] |= waited_for
                sends += self._help(member, now)
        return sends

    def _cannot_hear(self, now: float) -> bool:
        """Return whether the decider's own line is slow: for half of the limit most others' reports are missing.

        Everybody reports once a second. On a slow line the values to and from the decider delay the reports.
        """
        others = self.live - {self.me}
        missing = sum(now - self._heard[member] >= self.stall_s / 2 for member in others)
        return self._may_step_aside() and 2 * missing > len(others)

    def _may_step_aside(self) -> bool:
        """Return whether the others can go on without the decider's values: at least two of them have values.

        With only one, nobody could tell which of the two is slow.
        """
        others = self._takers() - {self.me}
        return self.me in self.live and len(others) >= 2 and len(self.live) > self.min_group_size

    def _may_leave_out(self, member: int) -> bool:
        """Return whether silence is the member's fault: it may be the decider's own, or nobody's."""
        others = self._takers() - {member}
        complete = all(len(self._held[other]) == len(self.owner) for other in others)
        return member != self.me or complete or (self._kept() == {member} and self._may_step_aside())

    def slow(self, stragglers: Stragglers, now: float) -> list[int]:
        """The members that are far slower than the others; the decider may be one, and then goes on deciding.

        Nobody if too few members would be left, or none that contributes: waiting costs less than failing.
        """
        if self.verdict is not None:
            return []
        takers, slow = self._takers(), set[int]()
        for each in stragglers.late(self.owner, self._held, takers, now):
            left = self.live - slow - {each}
            if each not in self.live or (each == self.me and not self._may_step_aside()):
                continue
            if len(left) >= max(self.min_group_size, 2) and left & takers:
                slow.add(each)
        return sorted(slow)

    # ------------------------------------------------------------------------------------------------------ decisions

    def _takers(self) -> set[int]:
        """The members that are to hold every part: those that contribute, and are not left out."""
        return self.live - self._auxiliary

    def _owing(self) -> list[int]:
        """Members that keep the others waiting: owners of parts that nobody else holds, else those that lack parts."""
        if self.verdict is not None:
            return []
        unheld = {
            owner for part, owner in enumerate(self.owner) if not any(part in self._held[other] for other in self.live)
        }
        if unheld:
            return sorted(unheld & self.live)
        if kept := self._kept():
            return sorted(kept)
        return sorted(member for member in self._takers() if len(self._held[member]) < len(self.owner))

    def _kept(self) -> set[int]:
        """The members that have parts which no other member that should hold them holds."""
        takers = self._takers()
        kept = {
            owner
            for part, owner in enumerate(self.owner)
            if takers - {owner} and not any(part in self._held[other] for other in takers - {owner})
        }
        return kept & self.live

    def _new_owner(self, part: int) -> tuple[int | None, int]:
        """A member that can reduce and already holds the part; else the next in turn, which averages it again."""
        able = sorted(member for member in self.live if self.reduces[member])
        if not able:
            return None, 0
        holders = [member for member in able if part in self._held[member]]
        if holders:
            return holders[part % len(holders)], self.attempt[part]
        self._turn += 1
        return able[self._turn % len(able)], self.attempt[part] + 1

    def _help(self, member: int, now: float) -> list[Send]:
        """Name another source for parts that `member` cannot get from its present source, as soon as there is one."""
        moved: dict[tuple[int, int], list[int]] = {}
        unreachable, sources = self._unreachable[member], self._source[member]
        for part, owner in enumerate(self.owner):
            if part in self._held[member] or sources.get(part, owner) not in unreachable:
                continue
            holders = [
                other
                for other in sorted(self.live - unreachable - {member})
                if self.reduces[other] and part in self._held[other]
            ]
            if holders:
                sources[part] = holders[part % len(holders)]
                self._named_at[member][part] = now
                moved.setdefault((self.attempt[part], sources[part]), []).append(part)
        return [Send(member, Assign(parts, attempt, source)) for (attempt, source), parts in moved.items()]

    def _replace_owners(self, now: float) -> list[Send]:
        """A member that cannot give its parts to anybody loses them, even if it holds their averages itself."""
        sends: list[Send] = []
        for owner in sorted(set(self.owner) & self.live):
            others = self._takers() - {owner}
            if others and all(owner in self._unreachable[other] for other in others):
                parts = [part for part, of in enumerate(self.owner) if of == owner]
                parts = [part for part in parts if not any(part in self._held[other] for other in others)]
                if parts and self.verdict is None:
                    self.reduces[owner] = False
                    sends += self._move(parts, now)
        return sends

    def _maybe_commit(self) -> list[Send]:
        takers = self._takers()
        if self.verdict is not None or not takers or any(len(self._held[each]) < len(self.owner) for each in takers):
            return []
        held = self._held[min(takers)]
        commit = Commit(self.round_id, [held[part] for part in range(len(self.owner))])
        self.verdict = commit
        return self._tell_all(commit)

    def _abort(self, reason: str) -> list[Send]:
        self.verdict = Abort(self.round_id, reason)
        return self._tell_all(self.verdict)

    def give_up(self, reason: str) -> list[Send]:
        """The decider itself cannot go on (its deadline, or its caller cancelled)."""
        return [] if self.verdict is not None else self._abort(reason)

    def _tell_all(self, verdict: Commit | Abort) -> list[Send]:
        everyone: Iterable[int] = range(len(self.reduces))
        return [Send(member, verdict) for member in everyone]
