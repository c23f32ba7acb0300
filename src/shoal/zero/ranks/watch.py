"""Names the rank that is gone when a collective fails.

`torch.distributed` says that a connection was closed or that time is up, not which rank is at fault: when one process
dies, others fail because of each other. So each rank counts up a key of its own in the group's store, and when
something fails, those whose count stands still are named. If all are alive, the operation of each one is named, and the
line of the program that called it. Ranks that do not call the same things in the same order would wait for each other:
that is noticed before the group's time is up (`parting`).

A process that is frozen (stopped, swapping, its machine asleep) closes no connection, and may wake: it is not lost
before the group's time is up. Meanwhile each rank that waits for it names it in a warning. The store may be in the
frozen process: so one thread asks it, and another one looks at the answers.

Ranks go on together or not at all (`Agreement`): an error on one is raised on all, so no rank waits for one that gave
up.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.base.warning_names import named
from shoal.errors import ConfigError, RankLost
from shoal.zero.ranks.parting import Parting, Turn, Waiting, at, parted

__all__ = ["Agreement", "Watch"]

BEAT_S = 0.5
VERDICT_S = 4 * BEAT_S
"""How long a count may stand still once something has failed."""
FROZEN_BEATS = 5
"""A rank whose count stands still so long, while another one waits, seems to be frozen."""
_WAITED_BEATS = 1
"""How long an operation waits before others' counts are read."""
_ANSWER_S = 5 * VERDICT_S
"""How long a verdict may take: the store may be in a process that is frozen."""
_NO_STORE = "the store of the process group, or the process that holds it (rank 0 or a launcher),"
_IN_ORDER = (
    "All ranks must call the same things in the same order (passes, step, save, what reads or changes weights of stage "
    "3, and others), also behind an error that only one of them has had. The group cannot be used any more: start anew"
)
_logger = logging.getLogger("shoal.zero")
_VERDICT = "shoal.zero/lost"
_TOLD = "shoal.zero/told"
_JOIN_S = 2.0
_SETTLE_S = 1.0
"""How long the end of the program waits for the threads of gloo, at most."""
_SWITCH_S = 0.005


class Watch:
    """The heartbeat of this rank, and an eye on the others'.

    Threads beat and look until the watch is dropped or closed, the process group is destroyed, or store or program are
    gone.

    Args:
        group: the ranks.

    Raises:
        RankLost: the group's store is gone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self._store = _store_of(group)
        self._closed = threading.Event()
        self.parting = Parting(group)
        self._pulse = _Pulse(self._rank, self._ranks)
        threads = [
            threading.Thread(target=task, args=(self._store, self._pulse, self.parting, self._closed), daemon=True)
            for task in (_beat, _look)
        ]
        for thread in threads:
            thread.start()
        # Also when the program ends: a thread that comes back from the store into a Python that is gone aborts it.
        self._end = weakref.finalize(self, _end, self._closed, threads)
        _settle_at_exit()

    def close(self) -> None:
        """Stop beating."""
        self._end()

    def turn(self, doing: str, size: str = "") -> Turn:
        """A name for the next operation of all ranks together.

        Args:
            doing: its kind, the same on all ranks.
            size: more, for people.
        """
        return self.parting.turn(doing, size)

    def end_block(self, *, broken: bool) -> None:
        """The block has ended, or an error has ended it on this rank."""
        self.parting.end_block(self._store, broken=broken)

    @contextlib.contextmanager
    def named(self, turn: Turn) -> Iterator[None]:
        """Turn the failure of an operation that `turn` named into `RankLost`, which names the ranks that are gone.

        A rank that is frozen while this waits is named in a warning.
        """
        self._pulse.waits[turn] = self._pulse.looks
        self.parting.begin(turn)
        try:
            yield
        except RuntimeError as error:  # the error of all backends
            raise self.verdict(error, turn) from error
        finally:
            self._pulse.waits.pop(turn, None)
            self.parting.end(turn)

    def verdict(self, error: RuntimeError, turn: Turn) -> RankLost:
        """The ranks to blame for an error; takes up to `VERDICT_S`, or a bit longer if the store does not answer."""
        found: list[RankLost] = []
        waiting = self.parting.waiting(turn, sys._getframe())  # noqa: SLF001 (there is no other way to ask)
        thread = threading.Thread(target=lambda: found.append(self._verdict(error, waiting)), daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        said = f"{turn}: {_first_line(error)}"
        return found[0] if found else RankLost(f"{_NO_STORE} does not answer; what failed: {said}")

    def _verdict(self, error: RuntimeError, waiting: Waiting) -> RankLost:
        said = f"{waiting.said}: {_first_line(error)}"
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        try:
            if where := parted(self._store):
                self._let_others_ask([])
                return RankLost(f"ranks called different things, and waited for each other: {where}. {_IN_ORDER}")
            self._store.set(at(self._rank), waiting.packed())
            before = [self._count(rank) for rank in others]
            self._closed.wait(VERDICT_S)
            still = [rank for rank, count in zip(others, before, strict=True) if self._count(rank) == count]
            lost = self._agreed(still)
            places = [self._store.get(at(rank)).decode() if self._store.check([at(rank)]) else "" for rank in others]
            self._let_others_ask(lost)
        except RuntimeError:
            return RankLost(f"{_NO_STORE} is gone; what failed: {said}")
        if not lost:
            elsewhere = [
                f"rank {rank} in {Waiting.unpacked(place).said if place else 'none that failed'}"
                for rank, place in zip(others, places, strict=True)
            ]
            return RankLost(
                f"a collective failed though all ranks are alive: {said}; {', '.join(elsewhere)}. {_IN_ORDER}"
            )
        names = " and ".join(f"rank {rank}" for rank in lost)
        return RankLost(f"{names} gone, without a sign of life for {VERDICT_S:g} s; what failed: {said}", lost)

    def _agreed(self, still: list[int]) -> list[int]:
        """The first verdict of all counts: a rank that ends because of it stops beating, and must not be blamed."""
        if not still:
            return []
        verdict = self._store.compare_set(_VERDICT, "", " ".join(map(str, still)))
        return [int(rank) for rank in verdict.split()]

    def _let_others_ask(self, lost: list[int]) -> None:
        """The store may live in the process of rank 0, which is about to end: the others need it for their verdict."""
        told = self._store.add(_TOLD, 1)
        if self._rank:
            return
        for _ in range(round(2 * VERDICT_S / BEAT_S)):
            if told >= self._ranks - len(lost):
                return
            self._closed.wait(BEAT_S)
            told = self._store.add(_TOLD, 0)

    def _count(self, rank: int) -> int:
        return self._store.add(_key(rank), 0)


class _Count(NamedTuple):
    """A number that a thread has read, and at which of its own beats it was last another one."""

    value: int
    since: int


class _Pulse:
    """The state that the threads of one rank share.

    Attributes:
        ranks: all but this one.
        waits: the operations that this rank waits for, and since which look.
        beats: how often this rank has beaten.
        looks: how often it has looked around.
        counts: the counts of the other ranks, as they were last read; empty while nothing waits.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.others = rank, [each for each in range(ranks) if each != rank]
        self.waits: dict[object, int] = {}
        self.beats = self.looks = 0
        self.counts: dict[int, _Count] = {}
        self._last = _Count(0, 0)  # the beats that were seen last, and at which look they were first

    def patient(self, turn: object) -> bool:
        """Whether an operation has waited for some time."""
        return self.looks - self.waits.get(turn, self.looks) >= _WAITED_BEATS

    @property
    def waiting(self) -> object:
        """The operation that has waited for some time; None if none has."""
        return next(filter(self.patient, list(self.waits)), None)

    def beat(self, count: Callable[[int], int]) -> None:
        """Read others' counts while this rank waits."""
        found = {rank: count(rank) for rank in self.others} if self.waiting is not None else {}
        known, self.beats = self.counts, self.beats + 1
        self.counts = {
            rank: each if (each := known.get(rank)) and each.value == value else _Count(value, self.beats)
            for rank, value in found.items()
        }

    def find_frozen(self) -> tuple[set[str], object]:
        """Those that seem to be frozen, and the operation in which this rank waits for them."""
        self.looks += 1
        if self._last.value != self.beats:
            self._last = _Count(self.beats, self.looks)
        if (turn := self.waiting) is None:
            return set(), None
        beats, counts = self.beats, self.counts
        still = [rank for rank, each in counts.items() if each.value and beats - each.since >= FROZEN_BEATS]
        store = {_NO_STORE} if self.looks - self._last.since >= FROZEN_BEATS else set()
        return {f"rank {rank}" for rank in still} | store, turn


def _beat(store: Store, pulse: _Pulse, parting: Parting, closed: threading.Event) -> None:
    """Count up, and read others' counts while this rank waits."""
    with contextlib.suppress(RuntimeError):  # the store is gone: the next caller will notice
        while not closed.wait(BEAT_S) and dist.is_initialized():
            store.add(_key(pulse.rank), 1)
            pulse.beat(lambda rank: store.add(_key(rank), 0))
            parting.look(store, pulse.patient)


def _look(_: Store, pulse: _Pulse, __: Parting, closed: threading.Event) -> None:
    """Warn of ranks that seem to be frozen, once for each time."""
    said: set[str] = set()
    while not closed.wait(BEAT_S) and dist.is_initialized():
        frozen, turn = pulse.find_frozen()
        for who in sorted(frozen - said):
            _logger.warning(
                named(
                    "%s gives no sign of life for %g s, and this rank waits in %s: that process seems to be frozen. "
                    "Wake it (kill -CONT) or end it; training goes on if it wakes within the group's timeout"
                ),
                who,
                FROZEN_BEATS * BEAT_S,
                turn,
            )
        said = frozen


def _end(closed: threading.Event, threads: list[threading.Thread]) -> None:
    closed.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)


@functools.cache  # once for all groups of the program
def _settle_at_exit() -> None:
    atexit.register(_settle)


def _settle() -> None:
    """Wait until the threads of gloo have let go of the tensors of their last operations.

    They take Python's lock for that, and abort a program whose Python is already ending (pytorch/pytorch#190489).
    `destroy_process_group` ends them only if nothing else has the group: models that are sharded by rows have it, and
    so has `torch.distributed.nn` if it is imported after the group was made.
    """
    for _ in range(round(_SETTLE_S / _SWITCH_S)):
        time.sleep(_SWITCH_S)  # a thread that waits for Python's lock takes it now; then it sleeps
        if not any(map(_runs_gloo, Path("/proc/self/task").glob("*"))):
            return


def _runs_gloo(task: Path) -> bool:
    """Whether a thread of this process, by its folder in /proc of Linux, is one of gloo that does not sleep."""
    try:
        name, state = (task / "stat").read_text().rsplit(")", 1)
    except OSError:  # it has ended
        return False
    return "(pt_gloo_runloop" in name and state.split()[0] != "S"


def _store_of(group: dist.ProcessGroup) -> Store:
    """A client of the group's store, of its own: a long wait in one thread would keep the others waiting.

    The group's client is asked first. It has a connection, whose end it notices at once; a new one would try to connect
    for twice the group's timeout.
    """
    known: Any = group.get_group_store()  # torch does not declare it
    try:
        known.add(_key(group.rank()), 1)
        own: Store = known.clone()
    except RuntimeError as error:
        raise RankLost(f"{_NO_STORE} is gone: {_first_line(error)}") from error
    return own


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().split("\n", 1)[0]


def _key(rank: int) -> str:
    return f"shoal.zero/alive/{rank}"


class Agreement:
    """Agreement among the ranks of one process group.

    Args:
        group: the ranks.
        watch: the watch of the same ranks.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self._group, self._watch = group, watch

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """If a rank raises in this block, all raise at its end: that rank its own error, the others `ConfigError`."""
        problem: BaseException | None = None
        try:
            yield
        except RankLost:
            raise
        except BaseException as error:  # noqa: BLE001 (also an interrupt: raised again below)
            problem = error
        texts = self.gather("" if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        if wrong := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise ConfigError("another rank cannot go on: " + "; ".join(wrong))

    def alike(self, description: str, what: str) -> None:
        """Raise `ConfigError` on all ranks unless all describe the same.

        Args:
            description: lines; those that differ are named.
            what: the thing that must be the same on all ranks.
        """
        first, *others = self.gather(description)
        for rank, other in enumerate(others, 1):
            if first != other:
                raise ConfigError(
                    f"rank {rank} gave something else than rank 0: {_difference(first, other)}; all ranks must give "
                    f"the same {what}"
                )

    def gather(self, text: str) -> list[str]:
        """The text of each rank."""
        said = [""] * self._group.size()
        with self._watch.named(self._watch.turn("to agree")):
            dist.all_gather_object(said, text, group=self._group)
        return said


def _difference(first: str, second: str) -> str:
    """The first lines that differ."""
    for here, there in zip(first.split("\n"), second.split("\n"), strict=False):
        if here != there:
            return f"{there!r} instead of {here!r}"
    return "one has more than the other"
