"""The commit rule, exhaustively: the pure model, in every reachable state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model import commit_model
from tests.model.commit_model import COORDINATOR, TILES, Broken

REDUCERS = [(1, 2), pytest.param((1, 1), marks=pytest.mark.long), (0, 1)]

AUXILIARY = [
    ((1, 2), {0}),
    ((0, 1), {0}),
    ((1, 2), {1}),
    pytest.param((1, 1), {1}, marks=pytest.mark.long),
    ((0, 1), {1}),
    ((0, 1), {0, 1}),
    ((1, 2), {1, 2}),
]
"""Reducers of the two tiles, and auxiliary members: the coordinator, a reducer, the only reducer, two of three."""


@pytest.mark.parametrize("reducer", REDUCERS)
def test_model_keeps_agreement_and_always_ends(reducer: tuple[int, int]) -> None:
    """No order of messages, crashes and suspicions breaks agreement, or leaves a living member without the average."""
    assert commit_model.explore(reducer, crashes=2) > 5_000


@pytest.mark.parametrize(("reducer", "auxiliary"), AUXILIARY)
def test_model_with_auxiliary_members_keeps_agreement_and_always_ends(
    reducer: tuple[int, int], auxiliary: set[int]
) -> None:
    """Members that only assist own tiles, decide, die and are suspected: the same holds."""
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
        pytest.param((1, 1), 0, set(), marks=pytest.mark.long(full=True)),
        pytest.param((1, 2), 1, set(), marks=pytest.mark.long),
        pytest.param((0, 1), 1, set(), marks=pytest.mark.long(full=True)),
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
        if state.commit is None and all(state.reported[state.reducer[p]][p] == state.attempt[p] for p in TILES):
            state = state._replace(reported=(state.attempt,) * 3)
        yield from coordinator_steps(state)

    monkeypatch.setattr(commit_model, "_coordinator_steps", content)
    with pytest.raises(Broken, match="never learns"):
        commit_model.explore((1, 2), crashes=1, auxiliary=frozenset({1}))


def test_model_finds_a_coordinator_that_commits_without_any_contributor(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody is left that must hold anything, there is nothing to commit: what is committed then, nobody holds."""
    suspect, need = commit_model._suspect, commit_model._need

    def careless(state: commit_model.State, lost: int) -> commit_model.State:
        monkeypatch.setattr(commit_model, "_need", lambda state, live: need(state, live) or [COORDINATOR])
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
    """If a tile is averaged again under its old number, two different averages have one name: the search finds it."""
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
    """If a member succeeds as soon as it holds every tile, two members can end with different averages."""
    with_member = commit_model._with_member

    def impatient(state: commit_model.State, peer: int, member: commit_model.Member) -> commit_model.State:
        if commit_model.NONE not in member.held and member.succeeded is None:
            member = member._replace(succeeded=member.held)
        return with_member(state, peer, member)

    monkeypatch.setattr(commit_model, "_with_member", impatient)
    with pytest.raises(Broken):
        commit_model.explore((1, 2), crashes=1)
