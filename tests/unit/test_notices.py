"""What an optimizer advises where something is not as it should be."""

from __future__ import annotations

import pytest

from shoal.base.peer import PeerID
from shoal.events import Event, EventBus, Warned
from shoal.protocol.identity import Identity
from shoal.run.decide.beginning import Beginning
from shoal.run.decide.lineage import Apart
from shoal.run.decide.state_name import StateName
from shoal.run.report.notices import Notices

OTHER = Identity.from_seed(bytes(32)).peer_id


def told_after_downloads(shut_out: list[PeerID]) -> list[str]:
    """The warnings of four downloads in a row."""
    bus, said = EventBus(), list[Event]()
    bus.subscribe(said.append)
    notices = Notices(bus, "run")
    for _ in range(4):
        notices.downloaded(2.0, shut_out)
    return [event.message for event in said if isinstance(event, Warned)]


def test_a_peer_that_others_cannot_reach_is_not_told_to_raise_the_batch_size() -> None:
    """It kept downloading as rounds did without it, and `target_batch_size` would have changed nothing."""
    (message,) = told_after_downloads([OTHER])
    assert f"{OTHER.short()} said that they cannot connect to it: open or forward its port" in message
    assert "target_batch_size" not in message


def test_a_peer_that_can_be_reached_and_keeps_downloading_is_told_to_raise_the_batch_size() -> None:
    """Nobody has said that it cannot connect, so an epoch is too short."""
    (message,) = told_after_downloads([])
    assert "4 states were downloaded in a row, the last one in 2.0 s" in message
    assert "Raise target_batch_size" in message
    assert "connect" not in message


def test_the_first_peer_with_require_state_is_told_why_it_waits() -> None:
    """It was told to check "these peers", of which there are none, and that training would begin at epoch 0."""
    bus, said = EventBus(), list[Event]()
    bus.subscribe(said.append)
    beginning = Beginning(600.0, required=True)
    beginning.judge({}, others_here=0, now=0.0)
    Notices(bus, "bees").beginning(beginning, offered=False)
    (message,) = [event.message for event in said if isinstance(event, Warned)]
    assert message == (
        "no peer that trains run 'bees' is known, and this one may not begin it (require_state=True): it waits up to "
        "600 s (load_state_timeout), then step() raises StateUnavailable. Check that run_id is that of the others, "
        "that initial_peers lead to them, and that one peer trains without require_state"
    )


def test_a_peer_with_require_state_is_not_told_that_it_will_begin() -> None:
    """Beside a run whose state nobody gives: at the end of the wait it stops."""
    bus, said = EventBus(), list[Event]()
    bus.subscribe(said.append)
    beginning = Beginning(600.0, required=True)
    beginning.judge({OTHER: 7}, others_here=0, now=0.0)
    Notices(bus, "bees").beginning(beginning, offered=False)
    (message,) = [event.message for event in said if isinstance(event, Warned)]
    assert "up to 600 s (load_state_timeout), before step() raises StateUnavailable (require_state=True)" in message
    assert "epoch 0" not in message


def test_who_says_again_and_again_what_it_does_not_give_is_not_told_each_time() -> None:
    """A peer that changed its word every half second filled the others' logs."""
    bus, said = EventBus(), list[Event]()
    bus.subscribe(said.append)
    notices = Notices(bus, "run")
    for _ in range(25):
        notices.without({OTHER: 3}, 2)
        notices.without({OTHER: 3}, 2)
        notices.without({}, 2)
    assert len(said) == 2  # the first time, and the tenth
    notices.without({OTHER: 3, Identity.from_seed(bytes(31) + b"1").peer_id: 4}, 2)
    assert len(said) == 3


def told_of_rounds(*rounds: tuple[float, float], awaited: bool = True) -> list[str]:
    """The warnings after rounds that took so long, each so long after the one before."""
    bus, said, now = EventBus(), list[Event](), 100.0
    bus.subscribe(said.append)
    notices = Notices(bus, "run")
    for duration_s, since_s in rounds:
        now += since_s
        notices.round_took(duration_s, now, awaited=awaited)
    return [event.message for event in said if isinstance(event, Warned)]


def test_a_trainer_that_waits_most_of_the_time_is_told_of_strategies() -> None:
    """A synchronous run on a slow line waited for 12 of 14 s, and nothing said that there is another way."""
    (message,) = told_of_rounds(*[(12.0, 14.0)] * 10)
    assert "rounds of gradients take 12 s of every 14 s" in message
    assert "strategy=shoal.strategies.Decoupled(every=100)" in message


def test_rounds_that_are_short_or_seldom_are_not_told() -> None:
    """Nor two long ones in a row; nor those beside which training goes on."""
    assert told_of_rounds(*[(1.0, 1.5)] * 10) == told_of_rounds(*[(12.0, 60.0)] * 10) == []
    assert told_of_rounds(*[(12.0, 14.0), (12.0, 14.0), (1.0, 3.0)] * 3) == []
    assert told_of_rounds(*[(12.0, 14.0)] * 10, awaited=False) == []


@pytest.mark.parametrize(
    ("ours", "taken", "why"),
    [
        ((10, 400, 2), (10, 500, 1), "as the state with more samples does"),
        ((10, 400, 2), (11, 400, 3), "as of two states with equally many samples the one with more epochs does"),
        ((10, 400, 2), (10, 400, 1), "as both states are equally far, and of two such the one with the lower digest "),
        ((10, 400, 1), (9, 300, 2), "as the others go on from their state without this one"),
    ],
)
def test_a_state_of_equal_numbers_is_not_said_to_have_more_samples(
    ours: tuple[int, int, int], taken: tuple[int, int, int], why: str
) -> None:
    """It was said of every state that was taken, also of those with as many samples, or fewer."""
    bus, said = EventBus(), list[Event]()
    bus.subscribe(said.append)
    names = [StateName(epoch, bytes([digest]) * 32, samples) for epoch, samples, digest in (ours, taken)]
    Notices(bus, "run").gave_up(names[0], Apart(4, 8, 8), names[1])
    (message,) = (event.message for event in said if isinstance(event, Warned))
    assert f"do not count, {why}" in message


def test_what_was_trained_apart_for_long_is_told_without_a_number() -> None:
    """Nobody knows it: the two states came from one that neither remembers."""
    bus, said = EventBus(), list[Event]()
    bus.subscribe(said.append)
    Notices(bus, "run").gave_up(StateName(9_000, b"\1" * 32, 90_000), None, StateName(20_000, b"\2" * 32, 200_000))
    (message,) = (event.message for event in said if isinstance(event, Warned))
    assert "goes on from epoch 20000 of the others (200000 samples) and gives up its own epoch 9000 (90000" in message
    assert "for longer than this peer remembers, does not count, as the state with more samples does" in message
