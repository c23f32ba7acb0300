"""Offload: state, copies, gradients and stage 3's shards lie on the CPU beside a device, or in files, between uses.

In files (`mapped`), the optimizer steps some tiles at a time, a window: meanwhile the next window is read, and the last
one is written back. So memory for three windows is enough, however large the state is. State that the optimizer makes
in its first step moves into the files behind each window; so does state that a program loads.

Tensors in files are tensors like any others: whoever reads or changes them between steps just does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shoal.base.checks import path
from shoal.errors import ConfigError, LocalError
from shoal.layout import flat, like, order_of
from shoal.zero.memory.mapped import Extent, fetch, give_back, let_go, room_for, write_back
from shoal.zero.parameters import local, wide_dtype
from shoal.zero.probe import tried_in_windows

__all__ = ["Offload", "in_windows", "problem_of"]

WINDOW_NUMEL = 1 << 21
"""Values in a window: with Adam 24 MiB of state and gradients."""
_SLACK, _LEAST_SLACK = 0.01, 1 << 20
"""Shares are equal to a tile only."""
_LEAST_BYTES = 16 << 20
"""The size of a file that was not allocated before it was needed."""
_NUMBERS: tuple[type, ...] = (bool, int, float, torch.Tensor)
_PLAIN: tuple[type, ...] = (*_NUMBERS, str, list, tuple, dict, type(None))


def problem_of(offload: object) -> str | None:
    """The problem with what a user gave, on this machine; None if there is none."""
    if offload is None or offload == "cpu":
        return None
    if not isinstance(offload, str | os.PathLike) or not os.fspath(offload):
        return f"offload must be None, 'cpu' or the path of a folder, got {offload!r}"
    if sys.platform != "linux":
        return "offload to a folder needs Linux: give 'cpu' or None"
    folder = path("offload", os.fsdecode(offload))
    if not folder.is_dir():
        return f"offload must be a folder that exists on every machine, and {folder} does not, or is none: make it"
    return None


class Offload:
    """The places where one rank keeps what only the optimizer needs.

    Args:
        where: None for the device itself, "cpu" for host memory, or a folder, for files in it.
        device: the device of the parameters.

    Attributes:
        elsewhere: whether the optimizer's values are not on the device of the parameters.
    """

    def __init__(self, where: str | os.PathLike[str] | None, device: torch.device) -> None:
        self.folder = None if where is None or where == "cpu" else path("offload", os.fsdecode(where))
        self.elsewhere = where is not None and device.type != "cpu"
        self._extents: list[Extent] = []
        self._aside: Extent | None = None
        self._places: dict[int, int] = {}  # address and size of each tensor in files
        self._new = False  # whether state has moved into files since the last step
        self._slots: dict[tuple[torch.Tensor, Any], torch.Tensor] = {}
        self._tensors: dict[torch.Tensor, list[torch.Tensor]] = {}  # of each stepped one: what it needs beside state

    # ---------------------------------------------------------------------------------------------------------- places

    def prepare(
        self, inner: torch.optim.Optimizer, model: torch.nn.Module, stage: int, dtype: torch.dtype | None, ranks: int
    ) -> None:
        """Allocate room in a file for what the optimizer will keep, as far as that is known before its first step.

        Args:
            inner: the optimizer, built of the model's parameters.
            model: the model.
            stage: of ZeRO.
            dtype: the dtype in which the model will compute; None for its own.
            ranks: how many share the parameters of the optimizer.

        Raises:
            ConfigError: the disk has not so much room, or the optimizer cannot be stepped in windows.
        """
        if self.folder is None:
            return
        problem, kept = tried_in_windows(inner, model, in_windows)
        if problem is not None:
            raise ConfigError(
                f"optimizer_factory built {type(inner).__name__}, which {problem}: it cannot be offloaded to a folder, "
                "from which some parameters are stepped at a time. Give offload='cpu' or None, or another optimizer"
            )
        listed = {id(each) for group in inner.param_groups for each in group["params"] if each.requires_grad}
        total = 0.0
        for each in model.parameters():
            wide, trained = wide_dtype(each.dtype).itemsize, id(each) in listed
            copied = stage < 3 and (self.elsewhere or each.itemsize < wide or (dtype is not None and wide == 4))
            means = stage < 3 and trained and (copied or stage == 2)
            total += local(each).numel() / ranks * (wide * (copied + means) + trained * kept)
        if total:
            self._extents.append(self._file(round(total * (1 + _SLACK)) + _LEAST_SLACK))

    def rooms(self, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory in one file for tensors of these dtypes and shapes, as `room` gives it. Raises as `room` does."""
        if total := sum(room_for(each.nbytes) for each in likes):
            self._extents.append(self._file(total))
        return [self.room(each) for each in likes]

    def _file(self, nbytes: int) -> Extent:
        assert self.folder is not None
        try:
            return Extent(self.folder, nbytes)
        except OSError as error:
            raise ConfigError(
                f"offload: {nbytes / 1e6:,.1f} MB cannot be allocated in {self.folder}: {error.strerror or error}. "
                "Free that much, give another folder, or use more ranks"
            ) from error

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Memory there for a tensor of this dtype and shape; anything may be in it.

        Raises:
            ConfigError: the disk is full, or the folder is gone.
        """
        if self.folder is None:
            pinned = self.elsewhere and torch.cuda.is_available()
            return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
        found = self._extents[-1].take(like) if self._extents else None
        if found is None:
            self._extents.append(self._file(max(room_for(like.nbytes), _LEAST_BYTES)))
            found = self._extents[-1].take(like)
        assert found is not None
        self._places[found.data_ptr()] = found.nbytes
        return found

    def copy(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of values there, in a dtype; None for their own. Raises as `room` does."""
        if self.folder is None and not self.elsewhere:
            return values.to(dtype, copy=True)
        found = self.room(torch.empty_like(values, dtype=dtype, device="meta"))
        found.copy_(values)
        self.let_go([found])
        return found

    def aside(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same state of one tensor, with its values in files of their own, until nobody refers to them.

        Raises:
            ConfigError: the disk is full.
        """
        if self.folder is None:
            return dict(state)
        found = dict(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.is_cpu and value.is_contiguous():
                room = self._aside.take(value) if self._aside is not None else None
                if room is None:
                    self._aside = self._file(max(room_for(value.nbytes), _LEAST_BYTES))
                    room = self._aside.take(value)
                assert room is not None
                found[key] = room.copy_(value)
                let_go([room])
        return found

    def let_go(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave memory of tensors in files to the system, for now."""
        let_go(each for each in tensors if each.data_ptr() in self._places)

    def attach(self, stepped: torch.Tensor, needed: torch.Tensor) -> None:
        """A step of one tensor needs another one, in a file."""
        self._tensors.setdefault(stepped, []).append(needed)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in a file; or on the CPU, beside a device."""
        here = local(tensor)
        return here.data_ptr() in self._places or (self.elsewhere and here.is_cpu)

    # ----------------------------------------------------------------------------------------------------------- steps

    def windows(self, inner: torch.optim.Optimizer) -> Generator[Sequence[torch.Tensor]]:
        """The tensors of each window, which alone the optimizer has until the next one is asked for.

        Without files there is one window, of all.

        Raises:
            LocalError: a file cannot be read or written any more.
            ConfigError: the disk is full: new state stays in memory; the step is taken.
        """
        every = [each for group in inner.param_groups for each in group["params"]]
        if self.folder is None:
            yield every
            return
        problem: ConfigError | None = None
        parts = _cut(every)
        with self._named(), ThreadPoolExecutor(2, "shoal-offload") as pool, in_windows(inner, parts) as windows:
            coming = pool.submit(fetch, self._ahead(inner, parts[0]))
            going: Future[None] | None = None
            for part, following in zip(windows, [*parts[1:], []], strict=True):
                coming.result()
                coming = pool.submit(fetch, self._ahead(inner, following))
                yield part
                try:
                    self.settle(inner, part)
                except ConfigError as error:
                    problem = error
                if going is not None:
                    going.result()
                going = pool.submit(write_back, self._needed(inner, part))
            if going is not None:
                going.result()
        if self._new:
            give_back()
            self._new = False
        if problem is not None:
            raise problem

    def in_turns(self, tensors: Sequence[torch.Tensor], *, written: bool = False) -> Iterator[Sequence[torch.Tensor]]:
        """Some tensors, a window at a time: those in files are in memory only while their turn lasts.

        Args:
            tensors: any.
            written: whether they are written to.

        Raises:
            LocalError: a file cannot be read or written any more.
        """
        if self.folder is None:
            yield from [tensors] if tensors else []
            return
        with self._named():
            for part in _cut(tensors) if tensors else []:
                held = [each for each in part if each.data_ptr() in self._places]
                fetch(held, written=written)
                yield part
                let_go(held)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LocalError(
                f"offload: a file in {self.folder} cannot be read or written ({error.strerror or error}), and what the "
                "optimizer keeps in it is lost: go on from the last checkpoint, with another folder"
            ) from error

    def _ahead(self, inner: torch.optim.Optimizer, part: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What is worth reading ahead: of state that is larger than a tensor (of a sparse table) little is touched."""
        return [each for one in part for each in self._needed(inner, [one]) if each.numel() <= local(one).numel()]

    def _needed(self, inner: torch.optim.Optimizer, part: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What is in files of what a window needs."""
        found = []
        for stepped in part:
            state = (local(each) for each in inner.state.get(stepped, {}).values() if isinstance(each, torch.Tensor))
            found += [each for each in (*state, *self._tensors.get(stepped, ())) if each.data_ptr() in self._places]
        return found

    def settle(self, inner: torch.optim.Optimizer, part: Iterable[torch.Tensor] | None = None) -> None:
        """Move state that is in memory into files.

        Args:
            inner: the optimizer.
            part: of these tensors; None for all.

        Raises:
            ConfigError: the disk is full: the rest stays in memory.
        """
        if self.folder is None:
            return
        for stepped in [each for group in inner.param_groups for each in group["params"]] if part is None else part:
            state = inner.state.get(stepped, {})
            for key, value in state.items():
                if _moves(value, stepped):
                    state[key] = self._settled(stepped, key, value)
            if part is None:
                let_go(self._needed(inner, [stepped]))

    def _settled(self, stepped: torch.Tensor, key: object, value: torch.Tensor) -> torch.Tensor:
        """A tensor of state, in its place in a file."""
        here, slot = local(value), self._slots.get((stepped, key))
        values = flat(here, order_of(here))
        if slot is None or (slot.dtype, slot.shape) != (values.dtype, values.shape):
            slot = self._slots[stepped, key] = self.room(values)
        if slot.data_ptr() == values.data_ptr():
            return value
        self._new = True
        found = like(slot.copy_(values), here)
        if isinstance(value, DTensor):
            return DTensor.from_local(
                found, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        return found


def _moves(value: object, stepped: torch.Tensor) -> bool:
    """Whether it is state for files: counters are not, nor what is the stepped tensor itself."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, DTensor):
        return False
    assert isinstance(value, torch.Tensor)
    here = local(value)
    apart = here.untyped_storage().data_ptr() != local(stepped).untyped_storage().data_ptr()
    dense = here.is_contiguous() or order_of(here) is not None
    return here.is_cpu and here.ndim > 0 and here.numel() > 1 and dense and apart


def _cut(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Windows. At least one: an optimizer without parameters counts its steps, too."""
    found: list[list[torch.Tensor]] = [[]]
    numel = 0
    for each in tensors:
        if found[-1] and numel + local(each).numel() > WINDOW_NUMEL:
            found.append([])
            numel = 0
        found[-1].append(each)
        numel += local(each).numel()
    return found


@contextmanager
def in_windows(
    inner: torch.optim.Optimizer, parts: Sequence[Sequence[torch.Tensor]]
) -> Iterator[Iterator[Sequence[torch.Tensor]]]:
    """Let an optimizer step its parameters part by part, as if it stepped all of them at once.

    Counters that all parameters have in common are put back before each part but the first.

    Args:
        inner: the optimizer.
        parts: of the parameters in its groups; each is in one part.
    """
    groups = inner.param_groups
    listed = [group["params"] for group in groups]
    of = {id(each): number for number, group in enumerate(listed) for each in group}
    common = _InCommon(inner) if len(parts) > 1 else None

    def one_by_one() -> Iterator[Sequence[torch.Tensor]]:
        for count, part in enumerate(parts):
            if count and common is not None:
                common.put_back()
            mine: list[list[torch.Tensor]] = [[] for _ in groups]
            for each in part:
                mine[of[id(each)]].append(each)
            for group, chosen in zip(groups, mine, strict=True):
                group["params"] = chosen
            yield part

    try:
        yield one_by_one()
    finally:
        for group, every in zip(groups, listed, strict=True):
            group["params"] = every


class _InCommon:
    """What an optimizer keeps of no single parameter, as it is now: in its attributes, its state, and its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # Attributes hold much else: those that count something are numbers.
        places: list[Any] = [inner.state, *inner.param_groups]
        self._places = [(vars(inner), _NUMBERS), *((place, _PLAIN) for place in places)]
        self._before = [{key: _copied(place[key]) for key in _common(place, kinds)} for place, kinds in self._places]

    def put_back(self) -> None:
        """Tensors in place: others may refer to them."""
        for (place, kinds), before in zip(self._places, self._before, strict=True):
            for key in _common(place, kinds):
                if key not in before:
                    del place[key]
                elif isinstance(place[key], torch.Tensor) and isinstance(before[key], torch.Tensor):
                    place[key].copy_(before[key])
                else:
                    place[key] = _copied(before[key])


def _common(place: Mapping[Any, Any], kinds: tuple[type, ...]) -> list[Any]:
    """Keys of values that belong to no single parameter."""
    return [
        key
        for key, value in place.items()
        if isinstance(value, kinds) and not isinstance(key, torch.Tensor) and key != "params"
    ]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
