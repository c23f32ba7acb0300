"""One peer of a benchmark, in a process of its own, told what to do by lines of JSON. Imports nothing of shoal: it also
runs in other libraries' environments.

`benchmarks.allreduce` writes these requests, as `contenders.orders` says:

=========  ==========================================  =============================================================
request    meaning                                     answer
=========  ==========================================  =============================================================
start      make ready to be joined                     `invite`: how others find this peer
join       `invites` of all peers, in order: connect   nothing
fill       write the values of round `round`           nothing
average    average once                                `called`, `formed`, `done`: seconds on the machine's clock
average    … beside the training loop `loop`           as well `iterations` and `seconds` of the loop meanwhile
train      run the loop `loop` alone for `seconds`     its `iterations`, and in how many `seconds`
check      compare the result of round `round`         `wrong`: what is wrong with it, or null
touched    (of `counted_peer` only)                    bytes that passed each place since it was last asked
stop       leave                                       nothing
=========  ==========================================  =============================================================
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.contenders import loops
from benchmarks.contenders.orders import now, obey

__all__ = ["Contender", "Join", "Options", "Pending", "Times", "now", "serve", "tensors"]

ROUNDING = {"none": 1e-6, "float16": 2e-3, "uniform8bit": 0.05, "quantile8bit": 0.05, "blockwise": 0.05}
"""Largest error of an average, as a part of the largest value."""


class Options(NamedTuple):
    """What a peer is told when it is started."""

    rank: int
    peers: int
    numel: int
    compression: str
    part_bytes: int | None
    host: str = "127.0.0.1"
    sizes: tuple[int, ...] = ()
    """Elements of the tensors that are averaged, over and over; none: all values are one tensor."""
    encrypt: bool = True
    """False: as on a network that is trusted."""


class Times(NamedTuple):
    """When `step` was called, when it knew its group, and when it returned."""

    called: float
    formed: float
    done: float


class Join(NamedTuple):
    """One call of `step` for `benchmarks.matchmaking`: when, when it knew its group (0: never), the group's size and
    name, and why it failed.
    """

    called: float
    formed: float
    size: int
    group: str
    failure: str | None


class Pending:
    """An average that is under way in the background.

    Args:
        called: when it was asked for.
        future: of whatever `step` returns.
        times: what `average` would return, of `called`, the result and the time at which it was there.
    """

    def __init__(self, called: float, future: Future[Any], times: Callable[[float, Any, float], Times]) -> None:
        self._called, self._future, self._times = called, future, times
        self._ended: list[float] = []
        future.add_done_callback(lambda _: self._ended.append(now()))

    def done(self) -> bool:
        """Whether the result is there."""
        return bool(self._ended)

    def times(self) -> Times:
        """When it was called, had its group, and was done; raises what went wrong."""
        return self._times(self._called, self._future.result(), self._ended[0])


class Contender(Protocol):
    """One peer of the library that is measured."""

    def start(self) -> str:
        """Make ready; returns how others find this peer."""
        ...

    def join(self, invites: list[str]) -> None:
        """Connect to the others."""
        ...

    def average(self) -> Times | Join:
        """Average the tensor with the others, in place."""
        ...

    def begin(self) -> Pending:
        """As `average`, in the background."""
        raise NotImplementedError

    def stop(self) -> None:
        """Leave."""
        ...

    def result(self, tensor: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        """What is compared after a round, and with which factor of the values; None: that of the mean."""
        return tensor, None

    def touched(self) -> dict[str, int]:
        """Bytes that passed each place since the last call."""
        raise NotImplementedError


def serve(make: Callable[[Options, torch.Tensor], Contender]) -> None:
    """Be a peer until the input ends."""
    torch.set_num_threads(1)
    options = parse()
    tensor = torch.zeros(options.numel)
    values = Values(options)
    contender = make(options, tensor)
    obey(lambda request: answer(contender, values, tensor, request))


def answer(contender: Contender, values: Values, tensor: torch.Tensor, request: dict[str, Any]) -> dict[str, Any]:
    match request["do"]:
        case "start":
            return {"invite": contender.start()}
        case "join":
            contender.join(request["invites"])
        case "fill":
            values.fill(tensor, request["round"])
        case "average" if "loop" in request:
            pending = contender.begin()
            meanwhile = loops.run(request["loop"], pending.done)
            return {**pending.times()._asdict(), **meanwhile}
        case "average":
            return contender.average()._asdict()
        case "train":
            return loops.run_for(request["loop"], request["seconds"])
        case "check":
            got, factor = contender.result(tensor)
            return {"wrong": values.difference(got, request["round"], factor)}
        case "touched":
            return {**contender.touched()}
        case "stop":
            contender.stop()
    return {}


class Values:
    """What is averaged. In round r peer k contributes k (1, 2, 3 …) times (pattern + r)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pattern = torch.arange(options.numel, dtype=torch.float32).remainder_(1021.0).div_(1024.0)

    def fill(self, tensor: torch.Tensor, number: int) -> None:
        torch.add(self.pattern, number, out=tensor).mul_(self.options.rank + 1)

    def difference(self, got: torch.Tensor, number: int, factor: float | None) -> str | None:
        """Compare with `factor` (default: that of the mean) times (pattern + r); None if all is well."""
        factor = (self.options.peers + 1) / 2 if factor is None else factor
        allowed = ROUNDING[self.options.compression] * factor * (number + 1)
        worst = 0.0
        for mine, pattern in zip(got.split(1 << 16), self.pattern[: got.numel()].split(1 << 16), strict=True):
            worst = max(worst, float((mine - (pattern + number).mul_(factor)).abs_().max()))
        return None if worst <= allowed else f"values differ from what they should be by up to {worst:g}"


def parse() -> Options:
    parser = argparse.ArgumentParser()
    for name in ("rank", "peers", "numel"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--part-bytes", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), default=())
    parser.add_argument("--clear", action="store_false", dest="encrypt")
    return Options(**vars(parser.parse_args()))


def tensors(values: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut all values into tensors of these sizes, over and over; the last one may be shorter."""
    found, left, size = [], values, itertools.cycle(sizes or [values.numel()])
    while len(left):
        count = next(size)
        found.append(left[:count])
        left = left[count:]
    return found
