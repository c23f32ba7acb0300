"""How many of its own samples a peer has in the state that it takes over, where the run has forked."""

from __future__ import annotations

from shoal.base.peer import PeerID
from shoal.run.decide.agreement import Contributor
from shoal.run.decide.committed import Committed, Left
from shoal.run.decide.lineage import Apart, Gives, Lineage, may_have_led
from shoal.run.decide.state_name import StateName


def named(epoch: int, side: str = "") -> StateName:
    """A state of this epoch, on one side of a fork."""
    return StateName(epoch, f"{epoch}{side}".encode().ljust(32, b"."), 8 * epoch)


def peer(number: int) -> PeerID:
    """A made-up peer."""
    return PeerID(number.to_bytes(32))


def led(*names: StateName, gave: int = 4) -> Lineage:
    """The way over these states, each step with so many samples of this peer."""
    lineage = Lineage()
    for name in names[:-1]:
        lineage = lineage.after(name, gave)
    return lineage


def test_merges_on_the_side_of_a_fork_that_is_given_up_stay_contributed() -> None:
    """They do not: what both states have is what the last state had that both came from."""
    ours = led(named(0), named(1), named(2, "a"), named(3, "a"))
    assert ours.contributed == 12
    theirs = [named(epoch, side).digest for epoch, side in ((0, ""), (1, ""), (2, "b"), (3, "b"))]
    found = ours.last_held(named(3, "a"), theirs)
    assert found is not None
    assert (found.digest, found.epoch, found.contributed) == (named(1).digest, 1, 4)


def test_a_peer_that_comes_back_to_a_side_that_it_was_on_has_again_what_it_gave_there() -> None:
    """Else that is called dropped, and is in the state that all go on from."""
    ours = led(named(0), named(1, "a"), named(2, "a"))
    ours = ours.taken_over(named(2, "a"), [named(0).digest], 0)  # the state 1 of side b
    assert ours.contributed == 0
    ours = ours.after(named(1, "b"), 4)
    found = ours.last_held(named(2, "b"), [named(epoch, side).digest for epoch, side in ((0, ""), (1, "a"), (2, "a"))])
    assert found is not None
    assert (found.digest, found.contributed) == (named(2, "a").digest, 8)


def test_a_way_that_has_gone_on_for_long_has_no_state_that_is_known() -> None:
    """What is sent with a state is bounded, as is what is remembered."""
    long = led(*(named(epoch) for epoch in range(4000)))
    assert len(long.history) == 1024
    assert len(long.held) == 2048
    assert led(named(0), named(1)).last_held(named(1), [*long.history, named(3999).digest]) is None


def test_what_is_given_up_counts_from_the_last_state_that_both_came_from() -> None:
    """Epochs and samples of the branch, and those of this peer."""
    ours = led(named(0), named(1), named(2, "a"), named(3, "a"), gave=3)
    last = ours.last_held(named(3, "a"), [named(0).digest, named(1).digest, named(2, "b").digest])
    assert last is not None
    assert ours.since(named(3, "a"), last) == Apart(epochs=2, samples=16, own=6)


def test_a_peer_that_was_away_for_long_is_not_said_to_give_anything_up() -> None:
    """But one that has just trained is, though the states before theirs that are known do not go back so far."""
    ours, theirs = named(2000), named(5000)
    assert may_have_led(ours, theirs, 1024, 3000.0)
    assert may_have_led(ours, theirs, 1024, None)
    assert not may_have_led(ours, theirs, 1024, 5.0)
    assert not may_have_led(named(4500), theirs, 1024, None)  # it would be among the states that are known
    assert may_have_led(named(4000), theirs, 1024, None)  # if each epoch has two
    assert not may_have_led(named(5100), theirs, 1024, None)


def test_after_two_gives_at_one_state_the_last_one_counts_though_the_first_was_committed() -> None:
    """The verdict of the first was lost, and the peer gave more, in vain. The record says which one it was."""
    gives, state = Gives(), named(3).digest
    gives.note(state, 96, 100)
    gives.note(state, 200, 212)
    assert gives.counted(state, 96) == 100
    assert gives.counted(state, 200) == 212
    assert gives.counted(state, 48) == 50  # in half of the parts
    assert gives.counted(state, 0) == 0
    assert gives.counted(state, 300) == 0  # of a process before, under the same key
    assert gives.counted(named(4).digest, 96) == 0


def test_what_a_peer_gave_before_a_branch_of_many_epochs_is_known() -> None:
    """It gave at each state of the branch, too: after 16 of them it had forgotten the first."""
    gives = Gives()
    for epoch in range(3000):
        gives.note(named(epoch).digest, 8, 8)
    assert gives.counted(named(1500).digest, 8) == 8
    assert gives.counted(named(0).digest, 8) == 0
    assert len(gives._at) <= 2048


def steps(*made: dict[int, int]) -> Committed:
    """These, each with the samples of each peer."""
    committed = Committed()
    for epoch, gave in enumerate(made):
        committed = committed.after([Contributor(peer(number), samples) for number, samples in gave.items()], epoch)
    return committed


def test_the_last_step_of_a_peer_that_left_is_known_after_more_than_ten_others() -> None:
    """It may have missed the verdict: then it has trained apart, and must know whether the others have what it gave."""
    committed = steps({1: 4, 2: 4, 3: 4}, {1: 4, 2: 6, 3: 4}, *({1: 4} for _ in range(30)), {1: 4, 3: 4}, {1: 4})
    assert [committed.samples_of(peer(2), epoch, 34) for epoch in (0, 1, 2)] == [0, 6, 0]
    assert [committed.samples_of(peer(3), epoch, 34) for epoch in (1, 32)] == [0, 4], "it is back"
    assert [committed.samples_of(peer(1), epoch, 34) for epoch in (1, 24, 33)] == [0, 4, 4]
    again = Committed.read(committed.export())
    assert (list(again.left), again.samples) == (list(committed.left), committed.samples)
    assert again.left == (Left(peer(2), 1, 6),)
    old = Committed.read({"steps": committed.export()["steps"]})
    assert (old.left, old.samples) == ((), committed.samples)


def test_no_more_than_256_peers_that_left_are_remembered() -> None:
    """The last ones: keys are free."""
    committed = steps(*({0: 4, number: 4} for number in range(1, 401)))
    assert [each.epoch for each in committed.left] == list(range(134, 390))
