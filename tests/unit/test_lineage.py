"""How many of its own samples a peer has in the state that it takes over, where the run has forked."""

from __future__ import annotations

from shoal.optim.lineage import Apart, Gives, Lineage, may_have_led
from shoal.optim.state_name import StateName


def named(epoch: int, side: str = "") -> StateName:
    """A state of this epoch, on one side of a fork."""
    return StateName(epoch, f"{epoch}{side}".encode().ljust(32, b"."), 8 * epoch)


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
