"""The bus: every subscriber, in order, whatever the others do."""

from __future__ import annotations

import logging

import msgspec
import pytest

from shoal import events
from shoal.events import Event, EventBus, PeerConnected, Warned
from shoal.peer import PeerID

PEER = PeerID(b"e" * 32)


def test_events_reach_all_subscribers_in_order() -> None:
    """At once, in the order of subscription."""
    bus, heard = EventBus(), list[tuple[int, Event]]()
    for number in range(3):
        bus.subscribe(lambda event, number=number: heard.append((number, event)))  # type: ignore[misc]
    first, second = Warned(where="here", message="a"), PeerConnected(peer=PEER)
    bus.emit(first)
    bus.emit(second)
    assert heard == [(number, event) for event in (first, second) for number in range(3)]


def test_who_unsubscribes_hears_no_more() -> None:
    """Also twice, and from within a subscriber: the others still hear the event that is being told."""
    bus, heard = EventBus(), list[str]()

    def once(event: Event) -> None:
        heard.append("once")
        end_once()

    end_once = bus.subscribe(once)
    end_other = bus.subscribe(lambda event: heard.append("other"))
    for _ in range(2):
        bus.emit(Warned(where="", message=""))
    end_other()
    end_other()
    bus.emit(Warned(where="", message=""))
    assert heard == ["once", "other", "other"]


def test_a_subscriber_that_fails_is_logged_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the emitter nor the other subscribers notice."""
    bus, heard = EventBus(), list[Event]()

    def broken(event: Event) -> None:
        raise ValueError("no")

    bus.subscribe(broken)
    bus.subscribe(heard.append)
    with caplog.at_level(logging.ERROR, logger="shoal.events"):
        for _ in range(2):
            bus.emit(Warned(where="", message=""))
    assert len(heard) == 2
    assert [record.message for record in caplog.records] == ["a subscriber failed on Warned"] * 2


def test_a_warning_is_logged_once_and_other_events_are_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    """What is said again and again, with each step, is in the log once, until something else is said of that place."""
    bus = EventBus()
    with caplog.at_level(logging.WARNING, logger="shoal.events"):
        for message in ("no donor", "no donor", "no disk", "no donor"):
            bus.emit(Warned(where="state", message=message))
            bus.emit(PeerConnected(peer=PEER))
            bus.emit(Warned(where="elsewhere", message="as before"))
    assert [record.message.split("'")[1:4:2] for record in caplog.records] == [
        ["state", "no donor"],
        ["elsewhere", "as before"],
        ["state", "no disk"],
        ["state", "no donor"],
    ]


def test_every_event_is_named_and_frozen() -> None:
    """What is exported is what there is, and none can be changed by who hears it first."""
    kinds = {name: kind for name, kind in vars(events).items() if isinstance(kind, type) and issubclass(kind, Event)}
    assert set(kinds) == set(events.__all__) - {"EventBus"}
    assert all(kind.__struct_config__.frozen for kind in kinds.values())
    with pytest.raises(AttributeError):
        Warned(where="", message="").where = "x"  # type: ignore[misc]
    assert msgspec.structs.asdict(PeerConnected(peer=PEER)) == {"peer": PEER}
