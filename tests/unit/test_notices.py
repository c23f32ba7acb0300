"""What an optimizer advises where something is not as it should be."""

from __future__ import annotations

from shoal.events import Event, EventBus, Warned
from shoal.identity import Identity
from shoal.optim.notices import Notices
from shoal.peer import PeerID

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
