"""Processes that form `torch.distributed` groups: each runs functions that a test names, one after another.

A process is used again by the next test, in a new group, unless it was killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.integration.forks import LIBRARIES, PRELOADED
from tests.integration.workers import LONG_S

TIMEOUT_S = 60.0
"""Of the groups."""


class Failed(Exception):
    """What a function raised: the name of its type, and the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)  # as it is made again from
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Ranks:
    """The processes.

    Args:
        probe_anew: each call of `shoal.zero.shard` tries its optimizer out, as in a program. Else a process tries out
            but once what it is asked of the commonest optimizers (`_remember_findings`).
    """

    def __init__(self, *, probe_anew: bool = False) -> None:
        self._probe_anew = probe_anew
        # One process imports torch, once for all tests, and all ranks are forked from it: an import takes seconds, and
        # so do the modules that torch imports for the first optimizer (`torch._dynamo`), and the libraries that some
        # tests use, which the ranks of each file imported anew.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, *LIBRARIES["transformers"], "pytorch_optimizer"])
        self._idle: list[tuple[Any, Connection]] = []
        # Lives as long as the processes do: whoever still beats in the store of an ended group makes its file anew.
        self._stores = tempfile.TemporaryDirectory(prefix="shoal-ranks-")
        self._groups = itertools.count()

    def play(self, ranks: int, function: Callable[..., Any], *args: object) -> list[Any]:
        """Run `function(*args)` on each rank of a group; returns what each returned. Raises the first `Failed`."""
        results = self.outcomes(ranks, function, *args)
        for result in results:
            if isinstance(result, Failed):
                raise result
        return results

    def outcomes(
        self,
        ranks: int,
        function: Callable[..., Any],
        *args: object,
        killed: int | None = None,
        frozen: int | None = None,
    ) -> list[Any]:
        """As `play`, but a rank's `Failed` is what it returned; None for `killed`, which is killed when it says so.

        `frozen` stops itself, and is woken when all others have asked for that.
        """
        while len(self._idle) < ranks:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, self._probe_anew), daemon=True)
            process.start()
            there.close()
            self._idle.append((process, here))
        crew, self._idle = self._idle[:ranks], self._idle[ranks:]
        store = str(Path(self._stores.name) / str(next(self._groups)))
        for rank, (_, pipe) in enumerate(crew):
            pipe.send((function, args, rank, ranks, store))
        results: list[Any] = []
        for rank, (process, pipe) in enumerate(crew):
            if rank == killed:
                assert pipe.poll(LONG_S)
                assert pipe.recv_bytes() == b"kill me"
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                pipe.close()
        for rank, (_, pipe) in enumerate(crew):
            if frozen not in (None, rank):
                assert pipe.poll(LONG_S), f"rank {rank} does not notice"
                assert pipe.recv_bytes() == b"wake it"
        if frozen is not None:
            os.kill(crew[frozen][0].pid, signal.SIGCONT)
        for rank, (process, pipe) in enumerate(crew):
            if rank == killed:
                results.append(None)
                continue
            assert pipe.poll(LONG_S), f"rank {rank} does not answer"
            try:
                results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                process.join(LONG_S)
                raise AssertionError(f"rank {rank} ended with exit code {process.exitcode}; see its stderr") from None
        self._idle += [each for rank, each in enumerate(crew) if rank != killed]
        return results

    def reverse(self) -> None:
        """The processes of the last group get their ranks the other way round in the next one of that size."""
        self._idle.reverse()

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._idle:
            pipe.close()
            process.join(LONG_S)
        self._stores.cleanup()


@contextlib.contextmanager
def ranks(*, probe_anew: bool = False) -> Iterator[Ranks]:
    """The processes, for as long as the block lasts."""
    made = Ranks(probe_anew=probe_anew)
    try:
        yield made
    finally:
        made.close()


_pipe: Connection | None = None


def die_here() -> None:
    """Have this rank's process killed, now."""
    assert _pipe is not None
    _pipe.send_bytes(b"kill me")
    signal.pause()


def freeze_here() -> None:
    """Stop this rank's process, now."""
    os.kill(os.getpid(), signal.SIGSTOP)


def wake_the_frozen() -> None:
    """Have the rank that has frozen woken."""
    assert _pipe is not None
    _pipe.send_bytes(b"wake it")


def _serve(pipe: Connection, probe_anew: bool) -> None:
    global _pipe  # noqa: PLW0603 (one for each process)
    _pipe = pipe
    faulthandler.enable()  # an abort in C++ says at which line of Python, in each thread
    torch.set_num_threads(1)
    if not probe_anew:
        _remember_findings()
    place = (0, 0)
    while True:
        try:
            function, args, rank, count, path = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        if place != (place := (rank, count)):
            _forget_meshes()
        store = dist.FileStore(path, count)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT_S))
        # A rank that has nothing to say to the others would be gone while they are still connecting to each other.
        dist.barrier()
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 (said to the test)
            result = Failed(type(error).__name__, str(error))
        if len(dist.distributed_c10d._world.pg_map) > 1:
            _forget_meshes()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(result))  # tensors by value: the pipe's own pickling shares their memory


def _forget_meshes() -> None:
    """Torch remembers the results of DTensor's operations, with a mesh whose process group is gone.

    It takes a third of what a model in stage 3 does to compute them anew. So they stay while they hold: a mesh of all
    ranks is named alike in each group of as many, and knows which of them this process is.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # torch before 2.9 has none


def _remember_findings() -> None:
    """Try the same optimizer of the same kinds of parameters out once in this process.

    Each call of `shoal.zero.shard` steps copies of the optimizer for a tenth of a second (`shoal.zero.probe`): that was
    a fifth of what ranks computed. What is found depends on nothing else for these classes, whose steps draw no random
    numbers, treat each value by itself, and are no collectives: so it does not matter that other ranks try it out.
    """
    import shoal.zero.memory.offload
    import shoal.zero.sharding

    sharding, offload = vars(shoal.zero.sharding), vars(shoal.zero.memory.offload)
    for names, name in (
        (sharding, "finding"),
        (sharding, "why_not_sharded"),
        (sharding, "why_not_by_rows"),
        (offload, "tried_in_windows"),
    ):
        names[name] = _remembering(names[name])


def _remembering(probe: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[object, Any] = {}

    @functools.wraps(probe)
    def found(inner: torch.optim.Optimizer, *args: Any) -> Any:
        kinds = _kinds(inner)
        if kinds is None:
            return probe(inner, *args)
        if kinds not in known:
            known[kinds] = probe(inner, *args)
        return known[kinds]

    return found


def _kinds(inner: torch.optim.Optimizer) -> object:
    """What a probe of this optimizer depends on; None if that is more than its settings and kinds of parameters."""
    if type(inner) not in (torch.optim.AdamW, torch.optim.SGD) or "step" in vars(inner) or inner.state:
        return None
    if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
        return None
    kinds: list[object] = [type(inner)]
    for group in inner.param_groups:
        kinds.append(repr({key: value for key, value in group.items() if key != "params"}))
        kinds.append(frozenset(map(_kind, group["params"])))
    return tuple(kinds)


def _kind(each: torch.Tensor) -> tuple[object, ...]:
    rows = None
    if isinstance(each, DTensor):
        ranks = each.device_mesh.size()
        rows = (ranks, len(each) % ranks > 0, each.placements)
    return each.ndim, each.dtype, each.device, each.requires_grad, each.numel() > 0, rows
