"""The commit rule, exhaustively: the pure model, and the protocol's own state machines, in every reachable state."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from shoal.allreduce.commit import Ask, Average, CommitRules, Contribute, MemberRules
from shoal.allreduce.coordinator import Coordinator, CoordinatorAction, Send
from shoal.wire import Assign, Commit, Held, Report
from tests.model import commit_model
from tests.model.commit_model import DECIDER, PARTS, PEERS, Broken

REDUCERS = [(1, 2), (1, 1), (0, 1)]

AUXILIARY = [
    ((1, 2), {0}),
    ((0, 1), {0}),
    ((1, 2), {1}),
    ((1, 1), {1}),
    ((0, 1), {1}),
    ((0, 1), {0, 1}),
    ((1, 2), {1, 2}),
]
"""Reducers of the two parts, and auxiliary members: the coordinator, a reducer, the only reducer, two of three."""


@pytest.mark.parametrize("reducer", REDUCERS)
def test_model_keeps_agreement_and_always_ends(reducer: tuple[int, int]) -> None:
    """No order of messages, crashes and suspicions breaks agreement, or leaves a living member without the average."""
    assert commit_model.explore(reducer, crashes=2) > 5_000


@pytest.mark.parametrize(("reducer", "auxiliary"), AUXILIARY)
def test_model_with_auxiliary_members_keeps_agreement_and_always_ends(
    reducer: tuple[int, int], auxiliary: set[int]
) -> None:
    """Members that only assist own parts, decide, die and are suspected: the same holds."""
    assert commit_model.explore(reducer, crashes=2, auxiliary=frozenset(auxiliary)) > 500


@pytest.mark.parametrize(("reducer", "crashes"), [((1, 2), 1), ((0, 1), 0)])
def test_model_with_a_coordinator_that_may_step_aside_keeps_agreement_and_always_ends(
    reducer: tuple[int, int], crashes: int
) -> None:
    """One that is slow leaves itself out, and goes on deciding: the same holds, whatever it owned."""
    assert commit_model.explore(reducer, crashes, aside=True) > 5_000


def test_model_finds_a_coordinator_that_steps_aside_and_decides_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for ever: nobody can take its place."""
    coordinator_steps = commit_model._coordinator_steps

    def silent(state: commit_model.State) -> Iterator[tuple[str, bool, commit_model.State]]:
        if not state.aside:
            yield from coordinator_steps(state)

    monkeypatch.setattr(commit_model, "_coordinator_steps", silent)
    with pytest.raises(Broken, match="no verdict"):
        commit_model.explore((1, 2), 0, aside=True)


@pytest.mark.parametrize(
    ("reducer", "crashes", "auxiliary"),
    [
        ((1, 2), 0, set()),
        ((0, 1), 0, set()),
        pytest.param((1, 1), 0, set(), marks=pytest.mark.long),
        pytest.param((1, 2), 1, set(), marks=pytest.mark.long),
        pytest.param((0, 1), 1, set(), marks=pytest.mark.long),
        ((1, 2), 0, {0}),
        ((0, 1), 0, {0}),
        ((1, 2), 1, {1}),
        ((0, 1), 0, {1}),
        ((0, 1), 1, {0, 1}),
        ((1, 2), 1, {1, 2}),
    ],
)
def test_model_with_members_that_doubt_the_coordinator_keeps_agreement_and_always_ends(
    reducer: tuple[int, int], crashes: int, auxiliary: set[int]
) -> None:
    """It was silent: they ask each other, and nobody gives up what another one knows."""
    assert commit_model.explore(reducer, crashes, frozenset(auxiliary), doubts=True) > 1_000


def test_model_finds_members_that_give_up_on_a_coordinator_that_had_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asking the others, one of whom has the commit."""
    monkeypatch.setattr(commit_model, "_may_give_up", lambda state, peer: True)
    with pytest.raises(Broken, match="another knows the verdict"):
        commit_model.explore((1, 2), 0, doubts=True)


def test_model_finds_a_coordinator_that_waits_for_auxiliary_members_to_hold_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody sends them averages: there would never be a verdict."""
    monkeypatch.setattr(commit_model, "_need", lambda state, live: live)
    with pytest.raises(Broken, match="no verdict"):
        commit_model.explore((1, 2), crashes=0, auxiliary=frozenset({1}))


def test_model_finds_a_coordinator_that_is_content_with_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """If digests from the reducers are enough to commit, an auxiliary reducer's crash takes the average with it."""
    coordinator_steps = commit_model._coordinator_steps

    def content(state: commit_model.State) -> Iterator[tuple[str, bool, commit_model.State]]:
        if state.commit is None and all(state.reported[state.reducer[p]][p] == state.attempt[p] for p in PARTS):
            state = state._replace(reported=(state.attempt,) * 3)
        yield from coordinator_steps(state)

    monkeypatch.setattr(commit_model, "_coordinator_steps", content)
    with pytest.raises(Broken, match="never learns"):
        commit_model.explore((1, 2), crashes=1, auxiliary=frozenset({1}))


def test_model_finds_a_coordinator_that_commits_without_any_contributor(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody is left that must hold anything, there is nothing to commit: what is committed then, nobody holds."""
    suspect, need = commit_model._suspect, commit_model._need

    def careless(state: commit_model.State, lost: int) -> commit_model.State:
        monkeypatch.setattr(commit_model, "_need", lambda state, live: need(state, live) or [DECIDER])
        after = suspect(state, lost)
        monkeypatch.setattr(commit_model, "_need", need)
        return after

    monkeypatch.setattr(commit_model, "_suspect", careless)
    with pytest.raises(Broken):
        commit_model.explore((0, 1), crashes=0, auxiliary=frozenset({0, 1}))


@pytest.mark.parametrize("auxiliary", [set(), {1}])
def test_model_finds_a_rule_that_averages_again_without_a_new_attempt(
    monkeypatch: pytest.MonkeyPatch, auxiliary: set[int]
) -> None:
    """If a part is averaged again under its old number, two different averages have one name: the search finds it."""
    suspect = commit_model._suspect

    def careless(state: commit_model.State, lost: int) -> commit_model.State:
        after = suspect(state, lost)
        control = tuple(
            tuple((m[0], m[1], state.attempt[m[1]], m[3]) if m[0] == "assign" else m for m in queue)  # type: ignore[index]
            for queue in after.control
        )
        return after._replace(attempt=state.attempt, control=control)

    monkeypatch.setattr(commit_model, "_suspect", careless)
    with pytest.raises(Broken):
        commit_model.explore((1, 2), crashes=1, auxiliary=frozenset(auxiliary))


def test_model_finds_a_coordinator_that_commits_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the coordinator commits what one other member holds, that member's crash can take the average with it."""
    coordinator_steps = commit_model._coordinator_steps

    def hasty(state: commit_model.State) -> Iterator[tuple[str, bool, commit_model.State]]:
        theirs = state.reported[1]
        if state.commit is None and theirs == state.attempt:
            state = state._replace(reported=(theirs, theirs, theirs))
        yield from coordinator_steps(state)

    monkeypatch.setattr(commit_model, "_coordinator_steps", hasty)
    with pytest.raises(Broken):
        commit_model.explore((1, 2), crashes=1)


def test_model_finds_a_member_that_does_not_wait_for_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a member succeeds as soon as it holds every part, two members can end with different averages."""
    with_member = commit_model._with_member

    def impatient(state: commit_model.State, peer: int, member: commit_model.Member) -> commit_model.State:
        if commit_model.NONE not in member.held and member.succeeded is None:
            member = member._replace(succeeded=member.held)
        return with_member(state, peer, member)

    monkeypatch.setattr(commit_model, "_with_member", impatient)
    with pytest.raises(Broken):
        commit_model.explore((1, 2), crashes=1)


def _coordinator(reducer: Sequence[int], reduces: Sequence[bool], contributes: Sequence[bool]) -> Coordinator:
    return Coordinator(b"r" * 16, reducer, reduces, contributes, DECIDER, min_group_size=2, stall_s=1.0, now=0.0)


class World:
    """The real state machines of three members, and every message on its way: one state of the search."""

    def __init__(
        self, reducer: tuple[int, int], auxiliary: set[int], *, may_step_aside: bool = False, doubts: bool = False
    ) -> None:
        self.may_step_aside, self.aside = may_step_aside, False
        self.doubts: list[int] | None = [] if doubts else None  # who doubts the coordinator, or has; None: nobody does
        self.gave_up: list[int] = []  # for that reason; as if they had crashed
        self.alive = [True] * 3
        self.contributes = [peer not in auxiliary for peer in PEERS]
        self.members = [MemberRules(peer, reducer, contributes=self.contributes[peer]) for peer in PEERS]
        self.coordinator = _coordinator(reducer, [True] * 3, self.contributes)
        self.averaging: list[tuple[int, int, int]] = sorted((reducer[p], p, 0) for p in PARTS)
        self.finished: list[tuple[int, int]] = []
        self.averages: list[tuple[int, int, int, int]] = []  # part, attempt, sender, receiver
        self.reports: list[list[Report]] = [[], [], []]
        self.control: list[list[Any]] = [[], [], []]

    def key(self) -> bytes:
        """The state as bytes, without what can make no difference any more."""
        return pickle.dumps(self)

    # -- steps ---------------------------------------------------------------------------------------------------

    def finish(self, peer: int, part: int, attempt: int) -> None:
        """The reducer averages a part and sends it to everybody."""
        self.averaging.remove((peer, part, attempt))
        if attempt < self.members[peer].attempt[part]:
            return
        if (part, attempt) in self.finished:
            raise Broken(f"part {part} attempt {attempt} was averaged twice")
        self.finished.append((part, attempt))
        self.finished.sort()
        self.obtain(peer, part, attempt)
        self.averages += [(part, attempt, peer, other) for other in PEERS if other != peer and self.contributes[other]]

    def obtain(self, peer: int, part: int, attempt: int) -> None:
        """The bytes of an average reach a member."""
        member = self.members[peer]
        if member.wants(part, attempt):
            member.expect(part, attempt)
            digest = f"{part}/{attempt}".encode().ljust(16)
            member.averaged(Held(part, attempt, b"\x07", 3.0, digest))
        if news := member.take_report():
            self.reports[peer].append(Report(held=news))

    def hear(self, peer: int) -> None:
        """The coordinator reads a member's next report."""
        self.tell(self.coordinator.reported(peer, self.reports[peer].pop(0), 0.0))

    def tell(self, actions: list[CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.control[action.member].append(action.message)

    def obey(self, peer: int) -> None:
        """A member reads the coordinator's next message."""
        message = self.control[peer].pop(0)
        member = self.members[peer]
        if isinstance(message, Commit):
            member.committed(message)
        elif isinstance(message, Assign):
            for action in member.assigned(message):
                match action:
                    case Average(part, attempt):
                        self.averaging = sorted({*self.averaging, (peer, part, attempt)})
                    case Ask(part, attempt, reducer):
                        held = self.members[reducer].held[part] if self.alive[reducer] else None
                        if held is not None:
                            self.averages.append((part, held.attempt, reducer, peer))
                    case Contribute():
                        pass  # a reducer may average whenever it likes here
        else:
            member.give_up("aborted")

    def leave(self, peer: int) -> None:
        """A member gives up on a coordinator that it doubts."""
        if self.members[peer].give_up("outcome unknown"):
            self.alive[peer] = False
            self.gave_up = sorted([*self.gave_up, peer])

    def tidy(self) -> None:
        """Drop what can make no difference any more."""
        for peer in PEERS:
            if not self.alive[peer]:
                self.control[peer] = []
                self.averaging = [work for work in self.averaging if work[0] != peer]
            if self.members[peer].succeeded:
                self.averaging = [work for work in self.averaging if work[0] != peer]
                self.members[peer].reducer = []
            elif not self.alive[peer]:
                self.members[peer] = MemberRules(peer, (), contributes=self.contributes[peer])
                self.members[peer].failed = "dead"
        if self.coordinator.rules.verdict is not None or not self.alive[DECIDER]:
            verdict = self.coordinator.rules.verdict
            self.coordinator = _coordinator((), (), ())
            self.coordinator.rules.verdict = verdict
        self.reports = [queue if peer in self.coordinator.rules.live else [] for peer, queue in enumerate(self.reports)]
        self.averages = sorted({a for a in self.averages if self.members[a[3]].wants(a[0], a[1])})


def _moves(world: World, crashes: int) -> Iterator[tuple[str, bool, tuple[Any, ...]]]:
    """Every step from here: (method, whether it must happen sooner or later, arguments)."""
    rules = world.coordinator.rules
    for work in world.averaging:
        yield "finish", True, work
    for average in world.averages:
        yield "obtain", True, (average[3], average[0], average[1])
        if not world.alive[average[2]]:
            yield "lose", False, (average,)
    for peer in PEERS:
        if world.reports[peer] and world.alive[DECIDER]:
            yield "hear", True, (peer,)
        if world.control[peer]:
            yield "obey", True, (peer,)
        if world.control[peer] and not world.alive[DECIDER] and peer != DECIDER:
            yield "cut", False, (peer,)
        if peer != DECIDER and peer in rules.live and world.alive[DECIDER] and rules.verdict is None:
            yield "suspect", not world.alive[peer], (peer,)
        if peer == DECIDER and world.may_step_aside and len(rules.live) == len(PEERS) and world.alive[peer]:
            yield "step_aside", False, ()
        commit = world.members[peer].commit
        for other in PEERS:
            if other != peer and world.alive[peer] and world.alive[other] and commit is not None:
                if world.members[other].commit is None and world.members[other].failed is None:
                    yield "relay", True, (other, peer)
                for part in world.members[other].missing():
                    held = world.members[peer].held[part]
                    if world.members[other].commit is not None and held is not None and held.attempt >= 0:
                        yield "obtain", True, (other, part, held.attempt)
        yield from _doubts(world, peer)
        if world.alive[peer] and world.alive.count(False) - len(world.gave_up) < crashes:
            yield "crash", False, (peer,)


def _doubts(world: World, peer: int) -> Iterator[tuple[str, bool, tuple[Any, ...]]]:
    member = world.members[peer]
    if world.doubts is None or peer == DECIDER or not world.alive[peer] or member.commit or member.failed:
        return
    if peer not in world.doubts:
        yield "doubt", False, (peer,)
    elif _may_leave(world, peer):
        yield "leave", True, (peer,)


def _may_leave(world: World, peer: int) -> bool:
    """As `commit_model._may_give_up`."""
    others = [other for other in PEERS if other not in (peer, DECIDER) and world.alive[other]]
    return all(other in (world.doubts or ()) and world.members[other].commit is None for other in others)


def _apply(world: World, name: str, arguments: tuple[Any, ...]) -> None:
    match name:
        case "lose":
            world.averages.remove(arguments[0])
        case "cut":
            world.control[arguments[0]] = []
        case "suspect":
            world.tell(world.coordinator.leave_out(arguments[0], "suspected", 0.0))
        case "doubt":
            world.doubts = sorted([*(world.doubts or ()), arguments[0]])
        case "step_aside":
            world.aside = True
            world.tell(world.coordinator.leave_out(DECIDER, "suspected", 0.0))
        case "relay":
            commit = world.members[arguments[1]].commit
            assert commit is not None
            world.members[arguments[0]].committed(commit)
        case "crash":
            world.alive[arguments[0]] = False
        case _:
            getattr(world, name)(*arguments)
    world.tidy()


def _check(world: World) -> None:
    done = [(peer, member) for peer, member in enumerate(world.members) if member.succeeded]
    commits = [tuple(due.digest for due in member.commit.parts) for _, member in done if member.commit is not None]
    if len(set(commits)) > 1:
        raise Broken(f"members succeeded with different verdicts: {commits}")
    for peer, member in done:
        held = [h.digest if h else None for h in member.held]
        if any(mine != due and (mine or world.contributes[peer]) for mine, due in zip(held, commits[0], strict=True)):
            raise Broken(f"peer {peer} succeeded with {held}, committed was {commits[0]}")


def _check_end(world: World) -> None:
    if not world.alive[DECIDER] or world.coordinator.rules.verdict is None:
        if world.alive[DECIDER]:
            raise Broken("the coordinator lives and there is no verdict")
        return
    for peer in world.gave_up if isinstance(world.coordinator.rules.verdict, Commit) else ():
        if any(world.alive[other] and other not in (world.doubts or ()) for other in PEERS if other != DECIDER):
            raise Broken(f"peer {peer} gave up a round that was committed, and another knows the verdict")
    for peer in PEERS:
        others = [other for other in PEERS if other != peer and world.contributes[other]]
        without = world.aside or not world.contributes[DECIDER]
        if without and others and not any(world.alive[other] for other in others):
            continue  # see `commit_model.check_end`
        if (
            isinstance(world.coordinator.rules.verdict, Commit)
            and world.alive[peer]
            and not world.members[peer].succeeded
        ):
            raise Broken(f"peer {peer} lives and never gets the average")


REAL = [
    ((1, 2), 0, set()),
    pytest.param((1, 2), 1, set(), marks=pytest.mark.long),
    pytest.param((0, 1), 2, set(), marks=pytest.mark.long),
    ((1, 2), 2, {0}),
    ((0, 1), 2, {0}),
    pytest.param((1, 2), 2, {1}, marks=pytest.mark.long),
    ((0, 1), 2, {0, 1}),
    ((1, 2), 2, {1, 2}),
]


@pytest.mark.parametrize(("reducer", "crashes", "auxiliary"), REAL)
def test_state_machines_keep_agreement_and_always_end(
    reducer: tuple[int, int], crashes: int, auxiliary: set[int]
) -> None:
    """The code that runs in the protocol, in every order of messages, crashes and suspicions."""
    assert _search(World(reducer, auxiliary), crashes) > 1_000


@pytest.mark.parametrize(("reducer", "crashes"), [((1, 2), 0), ((0, 1), 0)])
def test_state_machines_with_a_coordinator_that_may_step_aside(reducer: tuple[int, int], crashes: int) -> None:
    """The code again: it is left out like any other member, and commits for the others."""
    assert _search(World(reducer, set(), may_step_aside=True), crashes) > 1_000


DOUBTS = [
    pytest.param((0, 1), 0, set(), marks=pytest.mark.long),
    ((1, 2), 0, {0}),
    pytest.param((0, 1), 0, {0}, marks=pytest.mark.long),
    pytest.param((1, 2), 0, {1}, marks=pytest.mark.long),
    pytest.param((0, 1), 0, {1}, marks=pytest.mark.long),
    ((0, 1), 1, {0, 1}),
    pytest.param((1, 2), 1, {1, 2}, marks=pytest.mark.long),
]
"""Three that all contribute and of which two own, not the coordinator, take many minutes: only the model does that."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("reducer", "crashes", "auxiliary"), DOUBTS)
def test_state_machines_with_members_that_doubt_the_coordinator(
    reducer: tuple[int, int], crashes: int, auxiliary: set[int]
) -> None:
    """The code again: a member that gives up, and others that have the commit or not."""
    assert _search(World(reducer, auxiliary, doubts=True), crashes) > 1_000


def test_the_search_finds_members_that_give_up_on_a_coordinator_that_had_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without asking the others, one of whom has the commit."""
    monkeypatch.setitem(globals(), "_may_leave", lambda world, peer: True)
    with pytest.raises(Broken, match="another knows the verdict"):
        _search(World((1, 2), {0}, doubts=True), 0)


def _search(world: World, crashes: int) -> int:
    first = world.key()
    seen = {first}
    frontier = [first]
    while frontier:
        state = frontier.pop()
        here: World = pickle.loads(state)
        _check(here)
        must = False
        for name, fair, arguments in list(_moves(here, crashes)):
            world = pickle.loads(state)
            _apply(world, name, arguments)
            after = world.key()
            must = must or (fair and after != state)
            if after not in seen:
                seen.add(after)
                frontier.append(after)
        if not must:
            _check_end(here)
    return len(seen)


@pytest.mark.parametrize(
    ("reducer", "auxiliary", "crashes", "broken"),
    [
        ((1, 2), {1}, 0, lambda rules: rules.live),  # waits for everybody
        ((0, 1), {0, 1}, 1, lambda rules: {DECIDER}),  # is content with what it holds itself
    ],
)
def test_the_search_finds_a_coordinator_that_counts_the_wrong_members(
    reducer: tuple[int, int],
    auxiliary: set[int],
    crashes: int,
    broken: Callable[[CommitRules], set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the model: who must hold all parts before the commit is what makes the verdict possible, and worth it."""
    monkeypatch.setattr(CommitRules, "takers", property(broken))
    with pytest.raises(Broken):
        _search(World(reducer, auxiliary), crashes)
