"""Typed events on an in-process bus.

The log, the demo's screen and the tests read these instead of parsing text.
Each event is a frozen struct; `peer` fields hold the other peer's id. Events hold no times: a subscriber that records
them uses its own clock.
"""

from __future__ import annotations

import _thread
import logging
import re
import sys
import threading
from collections.abc import Callable
from typing import ClassVar

import msgspec

from shoal.base.bounded import put_last
from shoal.base.peer import PeerID
from shoal.base.warning_names import named

__all__ = [
    "CheckpointSaved",
    "EpochAdvanced",
    "Evaluated",
    "Event",
    "EventBus",
    "GroupFormed",
    "Joined",
    "LocalValuesRejected",
    "PeerConnected",
    "PeerDropped",
    "PeerLost",
    "PeerSilent",
    "Resumed",
    "RoundAborted",
    "RoundFinished",
    "RunEnded",
    "SamplesDropped",
    "StateDownloaded",
    "StateServed",
    "SteppedAlone",
    "Warned",
    "duration",
    "print_log",
]

_logger = logging.getLogger("shoal.events")
_MAX_WARNED = 256
_KIND_CHARACTERS = 60
_TOLD_ONE_BY_ONE = 4
"""So many warnings of one kind are told one by one: keys are free, and a stranger can have one for each second."""


def _run(run_id: str, fragment: int) -> str:
    """What the log calls a run, or a fragment of its model, which has a run of its own."""
    return f"run {run_id.removesuffix(f'/{fragment}')!r}, fragment {fragment}" if fragment else f"run {run_id!r}"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of all events. Encoded, each has its name as the tag `type`.

    Attributes:
        level: the log level: INFO for events that a user cares about, once or once in an epoch; DEBUG for the rest.
    """

    level: ClassVar[int] = logging.DEBUG

    def line(self) -> str:
        """The log's text for this event: names in place of bytes, and no terminal control sequences."""
        fields = (f"{name}={_plain(getattr(self, name))}" for name in self.__struct_fields__)
        return f"{type(self).__name__} {' '.join(fields)}"


class Joined(Event, frozen=True, kw_only=True):
    """This peer is in the network: it knows `peers` other nodes, and others can dial it at `addresses`."""

    level: ClassVar[int] = logging.INFO

    peers: int
    addresses: tuple[str, ...]
    only_here: bool
    """Whether only peers on this machine can use the addresses."""

    def line(self) -> str:
        met = f"joined the network, {_count(self.peers, 'other node')} known" if self.peers else "began a network"
        where = f"others reach this peer at {', '.join(self.addresses)}" if self.addresses else "this peer only dials"
        if self.only_here:
            where += ": only from this machine; host_maddrs='/ip4/0.0.0.0/tcp/PORT' lets others in, if it has a network"
        return f"{met}; {where}"


class PeerConnected(Event, frozen=True, kw_only=True):
    """The first connection to this peer is up and authenticated."""

    level: ClassVar[int] = logging.INFO

    peer: PeerID

    def line(self) -> str:
        return f"connected with {self.peer.short()}"


class PeerLost(Event, frozen=True, kw_only=True):
    """The last connection that carries calls to this peer is gone, or the peer went silent."""

    level: ClassVar[int] = logging.INFO

    peer: PeerID
    reason: str

    def line(self) -> str:
        return f"{self.peer.short()} is gone: {_plain(self.reason)}"


class PeerSilent(Event, frozen=True, kw_only=True):
    """This peer was asked for a sign of life and gave none: nothing here waits for it until it says something."""

    peer: PeerID
    waited_s: float


class PeerDropped(Event, frozen=True, kw_only=True):
    """This peer broke the protocol, or was too slow, and was left out of the activity that `where` names."""

    level: ClassVar[int] = logging.INFO

    peer: PeerID
    where: str
    reason: str

    def line(self) -> str:
        return f"{self.peer.short()} is left out of {self.where}: {_plain(self.reason)}"


class GroupFormed(Event, frozen=True, kw_only=True):
    """Matchmaking formed a group; `coordinator` is the member that led it, and it decides the round."""

    prefix: str
    round_id: bytes
    peers: tuple[PeerID, ...]
    coordinator: PeerID
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

    `round_id` is None if there was no group; `peers` are the peers to blame, as far as this peer could see.
    """

    level: ClassVar[int] = logging.INFO

    prefix: str
    round_id: bytes | None
    reason: str
    peers: tuple[PeerID, ...]

    def line(self) -> str:
        blamed = f" ({', '.join(peer.short() for peer in self.peers)})" if self.peers else ""
        return f"a round of {self.prefix!r} failed, nothing was changed: {_plain(self.reason)}{blamed}"


class LocalValuesRejected(Event, frozen=True, kw_only=True):
    """This peer's own values were not finite: it takes part with weight 0."""

    prefix: str
    tensor: int
    reason: str


class StateDownloaded(Event, frozen=True, kw_only=True):
    """A complete state was downloaded, verified and handed over."""

    level: ClassVar[int] = logging.INFO

    prefix: str
    donors: tuple[PeerID, ...]
    bytes_received: int
    duration_s: float

    def line(self) -> str:
        size, donors = f"{self.bytes_received / 1e6:.1f} MB", _count(len(self.donors), "peer")
        return f"the state of {self.prefix!r} was downloaded from {donors}: {size} in {duration(self.duration_s)}"


class StateServed(Event, frozen=True, kw_only=True):
    """A newcomer took the state, or part of it, from here."""

    level: ClassVar[int] = logging.INFO

    prefix: str
    peer: PeerID
    bytes_sent: int

    def line(self) -> str:
        return f"{self.peer.short()} took {self.bytes_sent / 1e6:.1f} MB of the state of {self.prefix!r}"


class EpochAdvanced(Event, frozen=True, kw_only=True):
    """The optimizer took a swarm step."""

    level: ClassVar[int] = logging.INFO

    run_id: str
    epoch: int
    samples: int
    peers: int
    digest: bytes
    fragment: int = 0
    """Of a model whose fragments are merged: `run_id` is then that of the fragment."""

    def line(self) -> str:
        run = _run(self.run_id, self.fragment)
        return f"{run}: epoch {self.epoch}, {self.samples} samples of {_count(self.peers, 'peer')}"


class SteppedAlone(Event, frozen=True, kw_only=True):
    """The optimizer took a swarm step in which no other peer took part; `EpochAdvanced` is emitted too."""

    run_id: str
    epoch: int
    others: int
    """The number of other peers of the run that are known here. They are at other states."""


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A checkpoint is on the disk. The training stood still for `copy_s`; 0 bytes: this very checkpoint was there."""

    level: ClassVar[int] = logging.INFO

    run_id: str
    epoch: int
    path: str
    bytes_written: int
    copy_s: float
    duration_s: float

    def line(self) -> str:
        size, took = f"{self.bytes_written / 1e6:.1f} MB", f"{duration(self.copy_s)} for the copy"
        return f"run {self.run_id!r}: epoch {self.epoch} is saved in {_plain(self.path)}: {size}, {took}"


class Evaluated(Event, frozen=True, kw_only=True):
    """`peer` has evaluated the state of this epoch (`shoal.integrations.evaluation`), with these values by name."""

    level: ClassVar[int] = logging.INFO

    run_id: str
    epoch: int
    peer: PeerID
    values: dict[str, float]

    def line(self) -> str:
        values = ", ".join(f"{_plain(name)} {value:.5g}" for name, value in self.values.items())
        return f"run {self.run_id!r}: epoch {self.epoch} was evaluated by {self.peer.short()}: {values}"


class Resumed(Event, frozen=True, kw_only=True):
    """This peer goes on from the checkpoint `path`; None: there is none in `folder`, or its own state is better."""

    level: ClassVar[int] = logging.INFO

    run_id: str
    epoch: int
    folder: str
    path: str | None

    def line(self) -> str:
        run = f"run {self.run_id!r}"
        if self.path is not None:
            return f"{run}: resumed at epoch {self.epoch} from {_plain(self.path)}"
        if self.epoch:
            return f"{run}: the checkpoints in {_plain(self.folder)} are no better than the state of epoch {self.epoch}"
        return f"{run}: no checkpoint in {_plain(self.folder)}, so training starts anew"


class RunEnded(Event, frozen=True, kw_only=True):
    """This peer is at the announced end of the run."""

    level: ClassVar[int] = logging.INFO

    run_id: str
    epoch: int
    fragment: int = 0
    """As of `EpochAdvanced`."""

    def line(self) -> str:
        return f"{_run(self.run_id, self.fragment)} has ended, with epoch {self.epoch}"


class SamplesDropped(Event, frozen=True, kw_only=True):
    """Of the samples that this peer has computed so far, so many went into no step. Told once, with the first ones."""

    level: ClassVar[int] = logging.INFO

    run_id: str
    dropped: int
    computed: int

    def line(self) -> str:
        return (
            f"run {self.run_id!r}: {self.dropped} of the {self.computed} samples that this peer has computed went into "
            "no step: they came too late, or were more than it may give at once; status().dropped counts them"
        )


class Warned(Event, frozen=True, kw_only=True):
    """Something went wrong that did not stop the run. Its line names its row in `docs/reference/warnings.md`."""

    where: str
    message: str
    about: tuple[PeerID, ...] = ()
    """The peers that the message names. In the log, warnings are bundled that say the same of other peers."""

    def line(self) -> str:
        return named(f"{self.where}: {_plain(self.message)}")

    @property
    def kind(self) -> str:
        """What is the same for all peers: the beginning of the message, without names and numbers."""
        names = "|".join(peer.short() for peer in self.about)
        named = rf"({names})(, ({names}))*( and \d+ more)?|\d+(\.\d+)?"
        return f"{self.where}: {re.sub(named, '#', self.message)[:_KIND_CHARACTERS]}"


def _report(event: Event, error: BaseException) -> None:
    """Log the error of a callback; to stderr if the log itself fails."""
    try:
        _logger.error("a subscriber failed on %s", type(event).__name__, exc_info=error)
    except BaseException:  # noqa: BLE001 (a handler of the user's: `SystemExit` from it ends nothing, either)
        sys.__excepthook__(*sys.exc_info())


class EventBus:
    """Hands each event to every subscriber, in order, in the thread that emits it.

    A subscriber must be quick and must not raise; one that raises anything is logged and stays subscribed: `SystemExit`
    ends nothing, and `KeyboardInterrupt` is raised in the main thread, as Ctrl+C is. All events go to the log
    `shoal.events`, one line each, at their own level; the same holds for its handlers. `Warned` goes there as WARNING,
    unless it repeats the last text of its `where`. Of the warnings of one kind about peers the first four are told,
    then the eighth, the sixteenth, …, each with the number of those before it that were not.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Event], None]] = []
        self._warned: dict[str, str] = {}
        self._counted: dict[str, int] = {}  # the warnings about peers, by their kind

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Call `subscriber(event)` for every event from now on; returns a function that ends it."""
        self._subscribers = [*self._subscribers, subscriber]

        def unsubscribe() -> None:
            self._subscribers = [kept for kept in self._subscribers if kept is not subscriber]

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Tell all subscribers."""
        for callback in (self._log, *self._subscribers):  # handlers and filters of the log may be the user's, too
            try:
                callback(event)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    if threading.current_thread() is threading.main_thread():
                        raise
                    _thread.interrupt_main()
                _report(event, error)

    def _log(self, event: Event) -> None:
        level, more = event.level, ""
        if isinstance(event, Warned) and (others := self._others_like(event)) is not None:
            level, more = logging.WARNING, f" (and {others} others like it)" if others else ""
        if _logger.isEnabledFor(level):
            _logger.log(level, "%s%s", event.line(), more)

    def _others_like(self, warned: Warned) -> int | None:
        """How many warnings of its kind were not told since the last one that was; None if this one is not, either."""
        if self._warned.get(warned.where) == warned.message:
            return None
        put_last(self._warned, warned.where, warned.message, _MAX_WARNED)
        if not warned.about:
            return 0
        count = self._counted.get(warned.kind, 0) + 1
        put_last(self._counted, warned.kind, count, _MAX_WARNED)
        if count <= _TOLD_ONE_BY_ONE:
            return 0
        return count // 2 - 1 if count & (count - 1) == 0 else None


def print_log() -> None:
    """Show the log from INFO on, on stderr, if the program has not set up logging itself."""
    shoal = logging.getLogger("shoal")
    if shoal.level == logging.NOTSET:
        shoal.setLevel(logging.INFO)
    if not shoal.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        shoal.addHandler(handler)


def duration(seconds: float) -> str:
    """A duration for people, such as `60 min`, `1.5 s`, `250 ms` or `0.31 ms`."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.2g} ms"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _plain(value: object) -> str:
    """A value for a log: peers by their first letters, bytes by their first digits, no control characters."""
    match value:
        case PeerID():
            return value.short()
        case bytes():
            return value.hex()[:8]
        case tuple():
            return f"[{', '.join(map(_plain, value))}]"
        case str():
            return "".join(letter if letter.isprintable() else "?" for letter in value)
        case _:
            return str(value)
