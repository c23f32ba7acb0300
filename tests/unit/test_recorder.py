"""The flight recorder: the last events, in bounded memory, without anything that should stay here."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.base.peer import PeerID
from shoal.cli.debug import lines_of, to_dict
from shoal.events import Event, EventBus, GroupFormed, PeerLost, Warned
from shoal.protocol.wire import Trace, TraceEntry, decode, encode
from shoal.rpc.recorder import MAX_CHARACTERS, MAX_ENTRIES, MAX_LIST, MAX_OF_PEER, FlightRecorder, for_strangers, within

PEER, OTHER = PeerID(b"p" * 32), PeerID(b"o" * 32)


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return 1e9 + self.now

    def monotonic(self) -> float:
        return self.now


def recorded(*events: Event) -> Trace:
    """What a recorder holds after these, a second apart."""
    bus, watch = EventBus(), Watch()
    recorder = FlightRecorder(PEER, bus, clock=watch)
    for event in events:
        watch.now += 1
        bus.emit(event)
    return recorder.dump()


def test_events_are_kept_in_order_with_their_times() -> None:
    """Peers in full, times relative to the beginning."""
    trace = recorded(PeerLost(peer=OTHER, reason="silent"), Warned(where="here", message="hm"))
    assert [(entry.number, entry.at_s, entry.kind) for entry in trace.entries] == [
        (0, 1.0, "PeerLost"),
        (1, 2.0, "Warned"),
    ]
    assert trace.entries[0].fields == {"peer": str(OTHER), "reason": "silent"}
    assert (trace.peer, trace.began, trace.now_s) == (PEER, 1e9 + 100, 2.0)


def test_who_comes_and_goes_pushes_out_nobody_elses_events() -> None:
    """One peer's events take a quarter at most; what there was of others, and of none, stays."""
    others = [PeerLost(peer=PeerID(bytes([number]) * 32), reason="") for number in range(1, 20)]
    noise = [PeerLost(peer=OTHER, reason=str(number)) for number in range(5 * MAX_ENTRIES)]
    trace = recorded(Warned(where="", message="first"), *others, *noise, *others)
    numbers = [entry.number for entry in trace.entries]
    assert numbers == sorted(numbers)
    assert trace.entries[0].fields["message"] == "first"
    of_other = [entry.fields["reason"] for entry in trace.entries if entry.fields.get("peer") == str(OTHER)]
    assert of_other == [str(number) for number in range(5 * MAX_ENTRIES - MAX_OF_PEER, 5 * MAX_ENTRIES)]
    assert len(trace.entries) == 1 + 2 * len(others) + MAX_OF_PEER
    assert len(recorded(*noise[:MAX_OF_PEER], *(each for _ in range(100) for each in others)).entries) == MAX_ENTRIES


def test_only_the_last_thousand_are_kept() -> None:
    """And their numbers tell how many there were."""
    bus = EventBus()
    recorder = FlightRecorder(PEER, bus)
    for number in range(MAX_ENTRIES + 5):
        bus.emit(Warned(where="", message=str(number)))
    assert len(recorder._ring) == MAX_ENTRIES
    trace = recorder.dump()
    assert [trace.entries[0].number, trace.entries[-1].number] == [5, MAX_ENTRIES + 4]


def test_what_is_long_is_cut() -> None:
    """Texts and lists: one event cannot take much memory, however large it is; and the message holds what is left."""
    group = GroupFormed(prefix="x" * 10_000, round_id=b"r" * 16, peers=(OTHER,) * 200, coordinator=PEER, waited_s=1.0)
    trace = recorded(group)
    [entry] = trace.entries
    fields: dict[str, Any] = entry.fields
    assert len(fields["prefix"]) == MAX_CHARACTERS
    assert len(fields["peers"]) == MAX_LIST
    assert fields["peers"][-1] == f"and {200 - MAX_LIST + 1} more"
    assert fields["round_id"] == (b"r" * 16).hex()
    assert decode(encode(trace), Trace) == trace


def test_strangers_do_not_see_the_texts_of_warnings() -> None:
    """They may name files of this machine; nor do they see the number of the process."""
    trace = for_strangers(
        recorded(Warned(where="a", message="/home/somebody/secret"), PeerLost(peer=OTHER, reason="b"))
    )
    assert b"secret" not in encode(trace)
    assert trace.pid == 0
    assert trace.entries[1].fields["reason"] == "b"


def test_an_answer_is_cut_to_its_limit() -> None:
    """The oldest go first."""
    trace = recorded(*(Warned(where="w" * 100, message=str(number)) for number in range(MAX_ENTRIES)))
    less = within(trace, 10_000)
    assert 10 < len(less.entries) < 100
    assert len(encode(less)) <= 10_000
    assert less.entries[-1] == trace.entries[-1]


def test_who_stops_hears_no_more() -> None:
    """The ring keeps what it had."""
    bus = EventBus()
    recorder = FlightRecorder(PEER, bus)
    bus.emit(Warned(where="", message="before"))
    recorder.stop()
    bus.emit(Warned(where="", message="after"))
    assert [entry.fields["message"] for entry in recorder.dump().entries] == ["before"]


def test_the_time_line_is_for_people() -> None:
    """Seconds before now, short names; nothing that could move a terminal's cursor."""
    trace = recorded(PeerLost(peer=OTHER, reason="gone\x1b[2J"), Warned(where="w", message="m"))
    head, first, second = lines_of(trace)
    assert PEER.short() in head
    assert first.split() == ["-1.000", "PeerLost", f"peer={OTHER.short()}", "reason=gone?[2J"]
    assert second.lstrip().startswith("0.000")
    assert lines_of(trace, last=1)[0].endswith("(1 earlier ones are not shown)")


@pytest.mark.parametrize("name", ["number", "event"])
def test_json_keeps_every_field(name: str) -> None:
    """Also one that has the name of what every entry has."""
    found = to_dict(Trace(PEER, 7, 1.0, 2.0, [TraceEntry(3, 0.5, "Odd", {name: "x"})]))
    assert found["events"] == [{"number": 3, "at_s": 0.5, "event": "Odd", f"{name}_": "x"}]
