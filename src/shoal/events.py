"""What happened, as typed values on an in-process bus.

The log, the demo's screen, later the dashboard and the metrics, and the tests all read these instead of parsing text.
Each event is a frozen struct; `peer` fields hold the other peer's id. Times are not in the events: whoever records them
knows its own clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from shoal.peer import PeerID

__all__ = [
    "EpochAdvanced",
    "Event",
    "EventBus",
    "GroupFormed",
    "LocalValuesRejected",
    "PeerConnected",
    "PeerDropped",
    "PeerLost",
    "RoundAborted",
    "RoundFinished",
    "StateDownloaded",
    "StateServed",
    "SteppedAlone",
    "Warned",
]

_logger = logging.getLogger("shoal.events")
_MAX_WARNED = 256


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


class PeerConnected(Event, frozen=True, kw_only=True):
    """The first connection to this peer is up and authenticated."""

    peer: PeerID


class PeerLost(Event, frozen=True, kw_only=True):
    """The last connection that carries calls to this peer is gone, or it went silent."""

    peer: PeerID
    reason: str


class PeerDropped(Event, frozen=True, kw_only=True):
    """This peer broke the protocol, or was too slow, and was left out of what is named in `where`."""

    peer: PeerID
    where: str
    reason: str


class GroupFormed(Event, frozen=True, kw_only=True):
    """Matchmaking gave a group; `decider` is the member that led it there, and decides the round."""

    prefix: str
    round_id: bytes
    peers: tuple[PeerID, ...]
    decider: PeerID
    waited_s: float


class RoundFinished(Event, frozen=True, kw_only=True):
    """An averaging round was committed and applied here."""

    prefix: str
    round_id: bytes
    peers: tuple[PeerID, ...]
    left_out: tuple[PeerID, ...]
    bytes_sent: int
    bytes_received: int
    duration_s: float


class RoundAborted(Event, frozen=True, kw_only=True):
    """An averaging round failed here; no tensor was touched.

    `round_id` is None if there was no group; `peers` are those to blame, as far as it was seen from here.
    """

    prefix: str
    round_id: bytes | None
    reason: str
    peers: tuple[PeerID, ...]


class LocalValuesRejected(Event, frozen=True, kw_only=True):
    """This peer's own values were not finite: it takes part with weight 0."""

    prefix: str
    tensor: int
    reason: str


class StateDownloaded(Event, frozen=True, kw_only=True):
    """A complete state was downloaded, verified and handed over."""

    prefix: str
    donors: tuple[PeerID, ...]
    bytes_received: int
    duration_s: float


class StateServed(Event, frozen=True, kw_only=True):
    """A newcomer took (part of) the state from here."""

    prefix: str
    peer: PeerID
    bytes_sent: int


class EpochAdvanced(Event, frozen=True, kw_only=True):
    """The optimizer took a swarm step."""

    run_id: str
    epoch: int
    samples: int
    peers: int
    digest: bytes


class SteppedAlone(Event, frozen=True, kw_only=True):
    """The optimizer took a swarm step (`EpochAdvanced` comes, too) in which nobody else had a part."""

    run_id: str
    epoch: int
    others: int
    """How many other peers of the run are known here; they are at other states."""


class Warned(Event, frozen=True, kw_only=True):
    """Something went wrong that did not stop the run."""

    where: str
    message: str


class EventBus:
    """Hands each event to every subscriber, in order, in the thread that emits it.

    A subscriber must be quick and must not raise; one that raises is logged and stays subscribed. All events go to the
    log `shoal.events` as DEBUG, but `Warned` as WARNING, as long as it does not say the same again.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Event], None]] = []
        self._warned: dict[str, str] = {}

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Call `subscriber(event)` for every event from now on; returns a function that ends it."""
        self._subscribers = [*self._subscribers, subscriber]

        def unsubscribe() -> None:
            self._subscribers = [kept for kept in self._subscribers if kept is not subscriber]

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Tell all subscribers."""
        _logger.log(logging.WARNING if self._is_new_warning(event) else logging.DEBUG, "%s", event)
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:
                _logger.exception("a subscriber failed on %s", type(event).__name__)

    def _is_new_warning(self, event: Event) -> bool:
        if not isinstance(event, Warned) or self._warned.get(event.where) == event.message:
            return False
        if len(self._warned) >= _MAX_WARNED:
            self._warned.clear()
        self._warned[event.where] = event.message
        return True
