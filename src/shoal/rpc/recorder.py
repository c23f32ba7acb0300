"""The flight recorder: the last events of this peer, for people who look for the cause of a problem.

Every event of the peer's bus goes into a ring of the last 1,000, from the first moment to the last, with the time at
which it came. Events of one other peer take at most a quarter of it: a peer that comes and goes all the time pushes out
only its own earlier events. Entries are small and harmless by construction: each field is turned into a number or a
short text at once; no event holds tensors, gathered values, keys or secrets. So memory is bounded: `MAX_ENTRIES`
entries of at most `MAX_FIELDS` fields, each a text of `MAX_CHARACTERS` or a list of `MAX_LIST` of them.

The ring is written in the loop's thread, and may be read from any other: a copy is taken in one step.
"""

from __future__ import annotations

import os
from collections import deque

from shoal.base.clock import Clock, SystemClock
from shoal.base.peer import PeerID
from shoal.events import Event, EventBus, Warned
from shoal.protocol.wire import MAX_SAMPLES, PlainValue, Trace, TraceEntry, encode

__all__ = [
    "MAX_CHARACTERS",
    "MAX_ENTRIES",
    "MAX_FIELDS",
    "MAX_LIST",
    "MAX_OF_PEER",
    "FlightRecorder",
    "for_strangers",
    "within",
]

MAX_ENTRIES = 1000
"""The number of events that are remembered."""

MAX_OF_PEER = MAX_ENTRIES // 4
MAX_CHARACTERS = 200
MAX_FIELDS = 16
MAX_LIST = 16


class FlightRecorder:
    """Keeps the last events of one peer.

    Args:
        peer: the peer that owns the bus.
        events: the bus; the recorder listens to it until `stop()`.
        clock: gives the times.
    """

    def __init__(self, peer: PeerID, events: EventBus, *, clock: Clock | None = None) -> None:
        self._peer, self._clock = peer, clock or SystemClock()
        self._began, self._began_s = self._clock.time(), self._clock.monotonic()
        self._ring: dict[int, TraceEntry] = {}  # by their numbers
        self._of: dict[object, deque[int]] = {}  # the numbers, for each other peer; None: of none
        self._count = 0
        self.stop = events.subscribe(self._record)

    def _record(self, event: Event) -> None:
        names = type(event).__struct_fields__[:MAX_FIELDS]
        fields = {name: _plain(getattr(event, name)) for name in names}
        peer = fields.get("peer")
        if peer is not None and len(self._of.get(peer, ())) >= MAX_OF_PEER:
            self._forget(peer)
        elif len(self._ring) >= MAX_ENTRIES:
            self._forget(next(iter(self._ring.values())).fields.get("peer"))
        self._ring[self._count] = TraceEntry(self._count, self._now_s(), _text(type(event).__name__), fields)
        self._of.setdefault(peer, deque()).append(self._count)
        self._count += 1

    def _forget(self, peer: object) -> None:
        """Drop the oldest entry of a peer."""
        numbers = self._of[peer]
        del self._ring[numbers.popleft()]
        if not numbers:
            del self._of[peer]

    def _now_s(self) -> float:
        return round(self._clock.monotonic() - self._began_s, 6)

    def dump(self, last: int = MAX_ENTRIES) -> Trace:
        """A copy of the last entries. Any thread may call this."""
        entries = list(self._ring.copy().values())
        return Trace(self._peer, os.getpid(), self._began, self._now_s(), entries[-last:] if last > 0 else [])


def for_strangers(trace: Trace) -> Trace:
    """The trace without the texts that only this machine should see: warnings may hold names of files."""
    entries = [entry if entry.kind != Warned.__name__ else _without_message(entry) for entry in trace.entries]
    return Trace(trace.peer, 0, trace.began, trace.now_s, entries)


def _without_message(entry: TraceEntry) -> TraceEntry:
    return TraceEntry(entry.number, entry.at_s, entry.kind, {**entry.fields, "message": "(not told to other machines)"})


def within(trace: Trace, limit_bytes: int) -> Trace:
    """The trace, or as many of its last entries as fit into so many bytes when it is encoded."""
    entries = trace.entries
    while entries and len(encode(Trace(trace.peer, trace.pid, trace.began, trace.now_s, entries))) > limit_bytes:
        entries = entries[len(entries) // 4 + 1 :]
    return Trace(trace.peer, trace.pid, trace.began, trace.now_s, entries)


def _plain(value: object) -> PlainValue:
    match value:
        case None | bool():
            return value
        case int() | float():
            # A larger number, infinity or NaN is not a count of anything, and `PlainValue` has bounds.
            return value if abs(value) <= MAX_SAMPLES else _text(value)
        case tuple() | list():
            texts = [_text(each) for each in value[:MAX_LIST]]
            return texts if len(value) <= MAX_LIST else [*texts[:-1], f"and {len(value) - MAX_LIST + 1} more"]
        case _:
            return _text(value)


def _text(value: object) -> str:
    text = value.hex() if type(value) is bytes else str(value)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
