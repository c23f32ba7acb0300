"""Who is gone, when a collective fails.

`torch.distributed` says that a connection was closed or that time is up, not which rank is at fault: when one process
dies, others fail because of each other. So each rank counts up a key of its own in the group's store, and when
something fails, those whose count stands still are named. If all are alive, what each of them was about is: ranks that
do not call the same things in the same order wait for each other until the group's time is up.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.errors import RankLost

__all__ = ["Watch"]

BEAT_S = 0.5
VERDICT_S = 4 * BEAT_S
"""How long a count may stand still once something has failed."""
_VERDICT = "shoal.zero/lost"
_TOLD = "shoal.zero/told"
_JOIN_S = 2.0


class Watch:
    """The heartbeat of this rank, and an eye on the others'.

    A thread beats until the watch is dropped or closed, the process group is destroyed, or store or program are gone.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        store = group.get_group_store()
        # A client of its own, where the store can: a long wait in one thread would keep the other waiting.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._closed = threading.Event()
        self._turn = 0
        self._store.add(_key(self._rank), 1)
        thread = threading.Thread(target=_beat, args=(self._store, self._rank, self._closed), daemon=True)
        thread.start()
        # Also when the program ends: a thread that comes back from the store into a Python that is gone aborts it.
        self._end = weakref.finalize(self, _end, self._closed, thread)

    def close(self) -> None:
        """Stop to beat."""
        self._end()

    def turn(self, doing: str) -> str:
        """A name for what all ranks are about to do together: the how many-th it is, and what."""
        self._turn += 1
        return f"operation {self._turn}, {doing}"

    @contextlib.contextmanager
    def named(self, turn: str) -> Iterator[None]:
        """Turn the failure of what `turn` named into `RankLost`, which names the ranks that are gone."""
        try:
            yield
        except RuntimeError as error:  # what all backends raise
            raise self.verdict(error, turn) from error

    def verdict(self, error: RuntimeError, turn: str) -> RankLost:
        """Who is to blame for an error; takes up to `VERDICT_S`."""
        said = f"{turn}: {str(error).strip().split(chr(10), 1)[0]}"
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        try:
            self._store.set(_at(self._rank), turn)
            before = [self._count(rank) for rank in others]
            self._closed.wait(VERDICT_S)
            still = [rank for rank, count in zip(others, before, strict=True) if self._count(rank) == count]
            lost = self._agreed(still)
            at = [self._store.get(_at(rank)).decode() if self._store.check([_at(rank)]) else "" for rank in others]
            self._let_others_ask(lost)
        except RuntimeError:
            reason = (
                "the store of the process group is gone, and with it the process that held it (rank 0 or a launcher)"
            )
            return RankLost(f"{reason}; what failed: {said}")
        if not lost:
            elsewhere = [
                f"rank {rank} in {place or 'none that failed'}" for rank, place in zip(others, at, strict=True)
            ]
            return RankLost(f"a collective failed though all ranks are alive: {said}; {', '.join(elsewhere)}")
        names = " and ".join(f"rank {rank}" for rank in lost)
        return RankLost(f"{names} gone, without a sign of life for {VERDICT_S:g} s; what failed: {said}", lost)

    def _agreed(self, still: list[int]) -> list[int]:
        """The first verdict of all: whoever ends because of it stops to beat, and must not be blamed in its turn."""
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


def _beat(store: Store, rank: int, closed: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the store is gone: whoever asks will notice
        while not closed.wait(BEAT_S) and dist.is_initialized():
            store.add(_key(rank), 1)


def _end(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)


def _key(rank: int) -> str:
    return f"shoal.zero/alive/{rank}"


def _at(rank: int) -> str:
    return f"shoal.zero/at/{rank}"
