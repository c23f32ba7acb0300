"""Ranks that wait for each other for good, since they call different things: one saves, another one steps.

Each rank numbers its operations (`Turn`). A rank that has waited for a while puts into the group's store what it waits
in, which operations it has begun, and the line of the program that called it. When all ranks wait, and nothing changes,
each of them looks whether they can ever meet (`apart`). If not, their connections are closed, so that all raise.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["Parting", "Turn", "Waiting", "apart", "line_of"]

UNCHANGED_BEATS = 4
"""How long nothing may change, while all ranks wait."""
_WATCHES, _OPERATIONS = 64, 1024
"""So many of a group are remembered, those that were begun last."""
_NOBODY = (1 << 29) + 1
"""A tag that no message has."""
_PARTED = "shoal.zero/parted"
_STUCK_BEATS = 2
"""How long a collective of the program's own may take in a block that another rank has left by an error."""
_ENDED, _BROKE = "the end of a block", "an error in a block"
_OWN = tuple(f"{Path(str(file)).parents[up]}/" for file, up in ((__file__, 2), (torch.__file__, 0), (json.__file__, 1)))
"""Folders of modules that are not the program's: of shoal, torch and Python."""


class Turn(NamedTuple):
    """An operation of all ranks together.

    Attributes:
        watch: the how many-th watch of its group it is of.
        number: the how many-th operation of that watch.
        doing: what, the same on all ranks.
        size: more, for people.
    """

    watch: int
    number: int
    doing: str
    size: str = ""

    def __str__(self) -> str:
        return f"operation {self.number}, {self.doing}{self.size}"


class Waiting(NamedTuple):
    """What a rank waits in.

    Attributes:
        watch: as in `Turn`; so are `number` and `doing`.
        begun: how many operations of each watch this rank has begun.
        said: all of it, for people.
    """

    watch: int
    number: int
    doing: str
    begun: dict[int, int]
    said: str

    def has_begun(self, watch: int, number: int) -> bool:
        """Whether the rank has begun an operation."""
        if watch in self.begun:
            return self.begun[watch] >= number
        return watch < max(self.begun, default=0)  # it is forgotten, so long ago was its last one

    def packed(self) -> str:
        """For the store."""
        return json.dumps(self)

    @classmethod
    def unpacked(cls, text: str) -> Waiting:
        """From the store."""
        watch, number, doing, begun, said = json.loads(text)
        return cls(watch, number, doing, {int(key): count for key, count in begun.items()}, said)


def apart(waits: Sequence[Waiting], done: Callable[[int, int], str | None]) -> bool:
    """Whether ranks that all wait can never meet.

    Args:
        waits: of all ranks.
        done: what this rank did in an operation, by its watch and number; None if it has not begun it, or forgot.
    """
    if all(any(not other.has_begun(each.watch, each.number) for other in waits) for each in waits):
        return True  # each waits for one that itself waits before it begins that
    return any(done(each.watch, each.number) not in (None, each.doing) for each in waits)


def line_of(frame: FrameType | None) -> str:
    """The line of the program by which a frame of ours was called."""
    while frame is not None and frame.f_code.co_filename.startswith((*_OWN, "<")):
        frame = frame.f_back
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, number).strip()
    return f", called in {Path(file).name}:{number}{f' ({text:.100})' if text else ''}"


class _Ours:
    """What the watches of one group have in common, in this process."""

    def __init__(self) -> None:
        self.count = 0
        self.begun: dict[int, int] = {}
        self.done: dict[tuple[int, int], str] = {}
        self.told: object = None  # the watch that has told last that it waits

    def note(self, watch: int, number: int) -> None:
        """A watch has begun so many operations."""
        self.begun.pop(watch, None)
        self.begun[watch] = number
        _shorten(self.begun, _WATCHES)


def _shorten(known: dict[Any, Any], count: int) -> None:
    while len(known) > count:
        del known[next(iter(known))]


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ours] = weakref.WeakKeyDictionary()


class Parting:
    """Of one watch.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self._ours = _groups.setdefault(group, _Ours())
        self._ours.count += 1
        self._watch, self._turns = self._ours.count, 0
        self._ours.note(self._watch, 0)
        self._blocked: dict[Turn, int] = {}  # the threads that wait
        self._aside: set[int] = set()  # threads that wait while the program goes on
        self._known: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet([group])
        self._seen: list[str] = []
        self._unchanged = 0
        self._told = ""
        self._block: int | None = None  # the thread in one
        self._stuck_at: object = None
        self._stuck_beats = 0

    def begin_block(self) -> None:
        """This thread runs code of the program, which may wait for other ranks in collectives of its own."""
        self._block = threading.get_ident()

    def end_block(self, store: Store, *, broken: bool) -> None:
        """It has ended, or an error has ended it on this rank: then others wait in vain in such a collective."""
        self._block = None
        turn = self.turn(_BROKE if broken else _ENDED, "")
        if broken:
            store.set(_broken(turn), "")

    def _stuck(self, store: Store) -> Turn | None:
        """The end of the block, if this rank does not get there since another one has left it by an error."""
        frame = None if self._block is None else sys._current_frames().get(self._block)  # noqa: SLF001 (as below)
        place = (id(frame), frame.f_lasti) if frame is not None and _communicates(frame) else None
        self._stuck_beats = self._stuck_beats + 1 if place is not None and place == self._stuck_at else 0
        self._stuck_at = place
        turn = Turn(self._watch, self._turns + 1, _ENDED)
        return turn if self._stuck_beats >= _STUCK_BEATS and store.check([_broken(turn)]) else None

    def cover(self, group: dist.ProcessGroup) -> None:
        """Some of the ranks wait in this group, too."""
        self._known.add(group)

    def turn(self, doing: str, size: str) -> Turn:
        """The next operation."""
        self._turns += 1
        self._ours.note(self._watch, self._turns)
        self._ours.done[self._watch, self._turns] = doing
        _shorten(self._ours.done, _OPERATIONS)
        return Turn(self._watch, self._turns, doing, size)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What this thread waits for in this block holds up nobody."""
        self._aside.add(threading.get_ident())
        try:
            yield
        finally:
            self._aside.discard(threading.get_ident())

    def begin(self, turn: Turn) -> None:
        """This thread waits."""
        if threading.get_ident() not in self._aside:
            self._blocked[turn] = threading.get_ident()

    def end(self, turn: Turn) -> None:
        """It waits no more."""
        self._blocked.pop(turn, None)

    def waiting(self, turn: Turn, frame: FrameType | None) -> Waiting:
        """What this rank waits in, in a frame."""
        return Waiting(turn.watch, turn.number, turn.doing, dict(self._ours.begun), f"{turn}{line_of(frame)}")

    def look(self, store: Store, patient: Callable[[Turn], bool]) -> None:
        """Tell the others what this rank waits in; and close its connections if ranks are apart.

        Args:
            store: of the group.
            patient: whether an operation has waited for some time.
        """
        turn = next((each for each in list(self._blocked) if patient(each)), None)
        thread = -1 if turn is None else self._blocked.get(turn, -1)
        if turn is None and (turn := self._stuck(store)) is not None:
            thread = self._block or -1
        frame = None if turn is None else sys._current_frames().get(thread)  # noqa: SLF001 (there is no other way)
        text = "" if turn is None or frame is None else self.waiting(turn, frame).packed()
        if text != self._told and (text or self._ours.told is self):
            store.set(at(self._rank), text)
            self._ours.told = self
        self._told = text
        if not text:
            self._unchanged = 0
            return
        texts = [store.get(at(rank)).decode() if store.check([at(rank)]) else "" for rank in range(self._ranks)]
        self._unchanged = self._unchanged + 1 if texts == self._seen else 0
        self._seen = texts
        if self._unchanged >= UNCHANGED_BEATS and all(texts):
            waits = [Waiting.unpacked(each) for each in texts]
            if apart(waits, lambda watch, number: self._ours.done.get((watch, number))):
                places = "; ".join(f"rank {rank} is in {each.said}" for rank, each in enumerate(waits))
                store.compare_set(_PARTED, "", places)
        if parted(store):
            for group in list(self._known):
                _close(group)


def _broken(turn: Turn) -> str:
    """The key of a block that a rank has left by an error."""
    return f"shoal.zero/broken/{turn.watch}/{turn.number}"


def _communicates(frame: FrameType | None) -> bool:
    """Whether a thread is in a collective of torch, by its innermost frame."""
    while frame is not None and frame.f_code.co_filename.startswith((_OWN[1], "<")):
        if frame.f_code.co_filename.startswith(f"{_OWN[1]}distributed/"):
            return True
        frame = frame.f_back
    return False


def at(rank: int) -> str:
    """The key of what a rank waits in."""
    return f"shoal.zero/at/{rank}"


def parted(store: Store) -> str:
    """Where all ranks are, if they are apart; empty otherwise."""
    return store.get(_PARTED).decode() if store.check([_PARTED]) else ""


def _close(group: dist.ProcessGroup) -> None:
    """Have all that waits in a group of gloo fail. There is no other way than that something waits too long."""
    with contextlib.suppress(RuntimeError, ValueError):
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        group.recv([nothing], (group.rank() + 1) % group.size(), _NOBODY).wait(timedelta(milliseconds=1))
