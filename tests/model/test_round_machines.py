"""The machines that run in a round, exhaustively: every order of messages, crashes and suspicions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.averaging.allreduce.commit import CommitRules
from shoal.averaging.allreduce.coordinator import COORDINATOR_TRANSITIONS, Coordinator
from shoal.averaging.allreduce.member import MEMBER_TRANSITIONS, MemberMachine
from shoal.base.peer import PeerID
from shoal.protocol.wire import Abort, Commit, Contact, Held, Member, Report
from tests.model.commit_model import COORDINATOR, Broken
from tests.model.round_world import ROUND, Decider, World, search
from tests.transitions import Recorder

pytestmark = pytest.mark.timeout(600)

SEARCHES = [
    ((1,), 1, set()),
    ((0, 1), 2, {0, 1}),
    pytest.param((1, 2), 0, set(), marks=pytest.mark.long),
    pytest.param((1, 2), 1, set(), marks=pytest.mark.long(full=True)),
    pytest.param((0, 1), 2, set(), marks=pytest.mark.long(full=True)),
    pytest.param((1, 2), 2, {0}, marks=pytest.mark.long(full=True)),
    pytest.param((0, 1), 2, {0}, marks=pytest.mark.long(full=True)),
    pytest.param((1, 2), 2, {1}, marks=pytest.mark.long(full=True)),
    pytest.param((1, 2), 2, {1, 2}, marks=pytest.mark.long(full=True)),
]
"""For each tile its reducer; the crashes; the auxiliary members. One tile takes a tenth of the time of two."""


@pytest.mark.parametrize(("reducer", "crashes", "auxiliary"), SEARCHES)
def test_state_machines_keep_agreement_and_always_end(
    reducer: tuple[int, ...], crashes: int, auxiliary: set[int]
) -> None:
    """The code that runs in the protocol, in every order of messages, crashes and suspicions."""
    assert search(World(reducer, auxiliary), crashes) > 1_000


@pytest.mark.parametrize(
    ("reducer", "auxiliary"),
    [
        ((0,), set()),
        ((0, 1), {1}),
        pytest.param((0, 1), set(), marks=pytest.mark.long(full=True)),
        pytest.param((1, 2), set(), marks=pytest.mark.long(full=True)),
    ],
)
def test_state_machines_with_a_coordinator_that_may_step_aside(reducer: tuple[int, ...], auxiliary: set[int]) -> None:
    """The code again: it is left out like any other member, and commits for the others."""
    assert search(World(reducer, auxiliary, may_step_aside=True), 0) > 500


DOUBTS = [
    pytest.param((0, 1), 0, set(), marks=pytest.mark.long(full=True)),
    pytest.param((1, 2), 0, {0}, marks=pytest.mark.long),
    pytest.param((0, 1), 0, {0}, marks=pytest.mark.long(full=True)),
    pytest.param((1, 2), 0, {1}, marks=pytest.mark.long(full=True)),
    pytest.param((0, 1), 0, {1}, marks=pytest.mark.long(full=True)),
    ((0, 1), 1, {0, 1}),
    pytest.param((1,), 1, {1, 2}, marks=pytest.mark.long),
    pytest.param((1, 2), 1, {1, 2}, marks=pytest.mark.long(full=True)),
]
"""Three that all contribute, of which the coordinator reduces nothing, take many minutes: only the model does that."""


@pytest.mark.parametrize(("reducer", "crashes", "auxiliary"), DOUBTS)
def test_state_machines_with_members_that_doubt_the_coordinator(
    reducer: tuple[int, ...], crashes: int, auxiliary: set[int]
) -> None:
    """The code again: a member that gives up, and others that have the commit or not."""
    assert search(World(reducer, auxiliary, may_doubt=True), crashes) > 1_000


def test_the_search_finds_members_that_give_up_on_a_coordinator_that_had_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without asking the others, one of whom has the commit."""
    monkeypatch.setattr(World, "hopes", lambda world, peer: False)
    with pytest.raises(Broken, match="another knows the verdict"):
        search(World((1, 2), {0}, may_doubt=True), 0)


@pytest.mark.parametrize(
    ("reducer", "auxiliary", "crashes", "broken"),
    [
        ((2,), {1}, 0, lambda rules: rules.live),  # waits for everybody
        ((0, 1), {0, 1}, 1, lambda rules: {COORDINATOR}),  # is content with what it holds itself
    ],
)
def test_the_search_finds_a_coordinator_that_counts_the_wrong_members(
    reducer: tuple[int, ...],
    auxiliary: set[int],
    crashes: int,
    broken: Callable[[CommitRules], set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the model: who must hold all tiles before the commit is what makes the verdict possible, and worth it."""
    monkeypatch.setattr(CommitRules, "takers", property(broken))
    with pytest.raises(Broken):
        search(World(reducer, auxiliary), crashes)


def test_the_search_finds_a_member_that_asks_again_when_it_hears_the_verdict_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would run out of members to ask, and fail, while the first one is about to give the average."""
    obey = MemberMachine.obey

    def forgetful(self: MemberMachine, message: object, now: float) -> list[object]:
        actions = obey(self, message, now)  # type: ignore[arg-type]
        if isinstance(message, Commit) and self.rules.commit is not None and not actions:
            return [action for tile in self.rules.missing() for action in self._fetch(tile)]
        return list(actions)

    monkeypatch.setattr(MemberMachine, "obey", forgetful)
    with pytest.raises(Broken, match="never gets the average"):
        search(World((1, 2), {0}), 0)


def test_every_transition_of_a_round_is_visited(capsys: pytest.CaptureFixture[str]) -> None:
    """The tables of the docs name all changes of a member's and of the coordinator's phase, and no other."""
    member = Recorder(MemberMachine, ("obey", "averaged", "source_lost", "coordinator_lost", "tick", "give_up"))
    coordinator = Recorder(Coordinator, ("reported", "leave_out", "give_up"))
    with member, coordinator:
        search(World((1,), {0}), 1)
        search(World((1,), {1, 2}), 0)
        search(World((1, 2), {0}), 0)
        _by_hand()
    with capsys.disabled():
        print()
        member.check(MEMBER_TRANSITIONS)
        coordinator.check(COORDINATOR_TRANSITIONS)


def _by_hand() -> None:
    """What the world has not: time limits, and groups in which there is nobody to turn to."""

    def member(*reduces: bool) -> MemberMachine:
        peers = [PeerID(bytes([index]) * 32) for index in range(len(reduces))]
        group = [Member(Contact(peer), able, None, b"") for peer, able in zip(peers, reduces, strict=True)]
        return MemberMachine(ROUND, 1, COORDINATOR, group, [1], silence_s=1.0, now=0.0)

    verdict = Commit(ROUND, [Held(0, 0, b"\x03", 2.0, bytes(16))])
    member(True, True).give_up("time is over")
    member(True, True).obey(Abort(ROUND, "no"), 0.0)
    late = member(True, True)
    late.obey(verdict, 0.0)
    late.give_up("time is over")
    member(False, True).obey(verdict, 0.0)  # the other one is a client: it cannot be asked
    Decider([1], [True, True]).give_up("time is over")
    weightless = Report(held=[Held(0, 0, b"\x00", 0.0, bytes(16))])
    Decider([1], [True, True]).reported(1, weightless, 0.0)
