"""Checkpoints of a run on disk: what a newcomer downloads, in files.

A folder of checkpoints holds a folder for each one::

    epoch-00000120-3f9c2a1b5d6e7f80/
        checkpoint.json      the name of the state, plain values, where each tensor is, and digests
        model.safetensors    what is trained and the buffers, under the names of the model, if it is known
        state.safetensors    the other tensors of the state, by number

Such a folder has the format of `shoal.state.disk`. Its values are those of `_Values`.

A state that is given up for that of others is a folder of another name, `given-up-epoch-…`. It is taken only if it is
named, and the next checkpoints do not remove it.

Invariants:

- A checkpoint loses its name before anything of it is removed, as it gets its name after all else: so a kill at any
  moment leaves whole checkpoints only.
- The name ends with a digest of the content. So peers that share a folder write one checkpoint of one state, and never
  write over another one.
- A peer removes no checkpoint of another run, and none whose state is better than the one that it has saved.
- All of it is looked at before anything is taken over.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.errors import ConfigError
from shoal.run.decide.state_name import StateName
from shoal.state.digest import digest_of
from shoal.state.disk.folder import INDEX, MODEL, Later, finish, index_of, is_state, part_of, read_index, read_state
from shoal.state.disk.old import Index
from shoal.state.disk.tensor_file import Damaged, Draft
from shoal.state.finite import infinite_tensors
from shoal.state.wire import SharedState

__all__ = ["Content", "Files", "Saved", "copy_of", "given_up", "newest", "write", "write_given_up"]

STATE = "state.safetensors"
_CHECKPOINT = re.compile(r"epoch-\d{8,}-[0-9a-f]{16}")
_GIVEN_UP = "given-up-"
_GIVEN_UP_KEPT = 2
"""So many of a run stay in a folder."""

_LEFT_S = 600.0
"""A part in which nothing was written for so long, by the clock of its file system, is one that a kill has left."""

Files = Mapping[str, Mapping[str, torch.Tensor]]
"""The tensors of each file, by their keys."""

_LOOKS = 3
"""Another peer may remove a checkpoint while it is read: then the folder is looked at again."""


class Content(NamedTuple):
    """What is saved: a copy that training does not change.

    Attributes:
        run_id: of the run.
        name: of the state.
        values: plain values of the state, as `TrainingState.export` gives them.
        settings: of the run.
        tensors: file and key of each tensor of the state, in its order.
        files: the tensors of each file.
        may_be_infinite: places of the tensors that may hold infinities (masks).
        shared: epoch and samples of the last state before it that was shared, or of itself.
        called: what people call the tensor of a place.
    """

    run_id: str
    name: StateName
    values: Any
    settings: Mapping[str, str]
    tensors: Sequence[tuple[str, str]]
    files: Files
    may_be_infinite: Collection[int]
    shared: tuple[int, int]
    called: Callable[[int], str]


class Saved(NamedTuple):
    """A checkpoint that was read whole.

    Attributes:
        path: of its folder.
        name: of the state.
        values: as they were saved.
        settings: of the run, when it was saved.
        tensors: of the state.
        model: all tensors in the model's file, by name.
        shared: as of `Content`; none if it is not known.
    """

    path: Path
    name: StateName
    values: Any
    settings: Mapping[str, str]
    tensors: list[torch.Tensor]
    model: Mapping[str, torch.Tensor]
    shared: tuple[int, int]


class _Values(msgspec.Struct):
    """The values of a checkpoint. `state` is the name of the state, with its digest in hexadecimal."""

    run_id: str
    state: tuple[int, str, int]
    values: Any
    settings: dict[str, str]
    tensors: list[tuple[str, str]]
    shared: tuple[int, int] = (0, 0)  # those of before 2026-11-29 do not have it

    @property
    def name(self) -> StateName:
        epoch, digest, samples = self.state
        return msgspec.convert([epoch, bytes.fromhex(digest), samples], StateName)


class _Found(NamedTuple):
    """A checkpoint of which the index was read."""

    path: Path
    stored: Index
    values: _Values


# -------------------------------------------------------------------------------------------------------------- saving


def copy_of(
    run_id: str,
    state: SharedState,
    name: StateName,
    settings: Mapping[str, str],
    described: Sequence[torch.Tensor],
    model: Mapping[str, torch.Tensor],
    memory: Files | None = None,
    shared: tuple[int, int] = (0, 0),
) -> Content:
    """Copy a state, and the rest of the model, to the CPU. Hold their lock.

    Args:
        run_id: of the run.
        state: as a donor gives it.
        name: of the state.
        settings: of the run.
        described: the tensors of the model that the first tensors of the state are the values of.
        model: its tensors, by their names. Of several names of one tensor the first counts.
        memory: of an earlier copy, which is written over where it fits: to touch new memory takes longer than to copy.
        shared: epoch and samples of the last state that was shared.
    """
    names: dict[object, str] = {}
    for key, tensor in model.items():
        names.setdefault(_place(tensor), key)
    files: dict[str, dict[str, torch.Tensor]] = {MODEL: {}, STATE: {}}
    places = []

    def copy(file: str, key: str, tensor: torch.Tensor) -> None:
        files[file][key] = _copied(tensor, None if memory is None else memory.get(file, {}).get(key))

    for index, tensor in enumerate(state.tensors):
        own = names.pop(_place(described[index]), None) if index < len(described) else None
        places.append((MODEL, own) if own is not None else (STATE, f"|{index}"))  # no tensor of a model has that name
        copy(*places[-1], tensor)
    for key in names.values():
        copy(MODEL, key, model[key])
    written = {file: tensors for file, tensors in files.items() if tensors}
    values, infinite = state.metadata["training"], state.may_be_infinite
    return Content(run_id, name, values, dict(settings), places, written, infinite, shared, state.called)


def _place(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are one."""
    if not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _copied(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is None or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
        into = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    with torch.no_grad():
        return into.copy_(tensor)


def write(folder: Path, content: Content, keep: int | None) -> tuple[Path, int]:
    """Write a checkpoint, then remove those of worse states but for `keep`.

    Args:
        folder: of the checkpoints; it exists.
        content: what is saved.
        keep: so many states of this run stay, of those that are no better than this one; None: all.

    Returns:
        The folder of the checkpoint, and the bytes that were written: 0 if this very checkpoint was there.

    Raises:
        ConfigError: the state went wrong: there is NaN in it, for example.
        OSError: it cannot be written, or another one cannot be removed.
    """
    files, index = _drafts(content)
    _remove_left_parts(folder)  # first: their place may be needed
    target, written = folder / f"epoch-{content.name.epoch:08}-{digest_of([index.encode()]).hex()[:16]}", 0
    if not _is_whole(target):
        written = _write(target, files, index)
    if keep is not None:
        _prune(folder, content, keep)
    return target, written


def given_up(folder: Path, name: StateName) -> Path:
    """Where this state is kept when it is given up."""
    return folder / f"{_GIVEN_UP}epoch-{name.epoch:08}-{name.digest.hex()[:16]}"


def write_given_up(folder: Path, content: Content) -> int:
    """Write a state that is given up, and keep the newest ones of its run.

    Returns:
        The bytes that were written.

    Raises:
        ConfigError, OSError: as `write`.
    """
    target, found = given_up(folder, content.name), []
    written = _write(target, *_drafts(content))
    for path in folder.glob(f"{_GIVEN_UP}epoch-*"):
        with suppress(ConfigError, OSError):
            if _find(path).values.run_id == content.run_id:
                found.append(((path / INDEX).stat().st_mtime_ns, path))
    for _, path in sorted(found)[:-_GIVEN_UP_KEPT]:
        _remove(path)
    return written


def _drafts(content: Content) -> tuple[dict[str, Draft], str]:
    """The files of a checkpoint, and its index. Raises `ConfigError` if the state went wrong."""
    try:
        every = [content.files[file][key] for file, key in content.tensors]
        infinite_tensors(every, range(len(every)), content.may_be_infinite, content.called)
    except ConfigError as error:
        raise ConfigError(f"the state went wrong: {error}, and is not saved") from error
    epoch, digest, samples = content.name
    values = _Values(
        content.run_id,
        (epoch, digest.hex(), samples),
        content.values,
        dict(content.settings),
        list(content.tensors),
        content.shared,
    )
    files = {file: Draft(tensors) for file, tensors in content.files.items()}
    return files, index_of({file: each.entry for file, each in files.items()}, msgspec.to_builtins(values), {})


def _is_whole(path: Path) -> bool:
    try:
        _read(_find(path))
    except ConfigError:
        return False
    return True


def _write(target: Path, files: Mapping[str, Draft], index: str) -> int:
    part = part_of(target)
    try:
        part.mkdir()
        for file, draft in files.items():
            draft.write(part / file)
        try:
            finish(part, target, index)
        except OSError:
            if not _is_whole(target):  # else another peer has just written the same
                _remove(target)
                finish(part, target, index)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return len(index.encode()) + sum(draft.nbytes for draft in files.values())


def _remove(path: Path) -> None:
    """Take a checkpoint's name away, then remove it. Another peer may have done so."""
    with suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        part = part_of(path)
        path.rename(part)
        shutil.rmtree(part, ignore_errors=True)


def _prune(folder: Path, content: Content, keep: int) -> None:
    found, tensors = [], content.settings.get("tensors")
    for path in _checkpoints(folder):
        with suppress(ConfigError):  # whose it is, is not known
            values = _find(path).values
            ours = values.run_id == content.run_id and values.settings.get("tensors") == tensors
            if ours and values.name.key <= content.name.key:
                found.append((values.name.key, path))
    stay = sorted({key for key, _ in found}, reverse=True)[:keep]
    for key, path in found:
        if key not in stay:
            _remove(path)


def _remove_left_parts(folder: Path) -> None:
    """Remove what kills have left behind."""
    clock = part_of(folder / "epoch")
    clock.mkdir()
    try:
        now = clock.stat().st_mtime
        for part in folder.glob(".*epoch*.part"):
            with suppress(OSError):  # another peer removes it, for example
                if now - max(each.stat().st_mtime for each in (part, *part.iterdir())) > _LEFT_S:
                    shutil.rmtree(part, ignore_errors=True)
    finally:
        clock.rmdir()


# ------------------------------------------------------------------------------------------------------------- reading


def newest(
    path: Path, run_id: str, warn: Callable[[str], None], among: Collection[bytes] | None = None
) -> Saved | None:
    """The whole checkpoint of the best state of a run; None if there is none.

    Args:
        path: of a folder of checkpoints, or of one checkpoint.
        run_id: of the run.
        warn: is told of each checkpoint that is passed over: it is damaged, or of a later version.
        among: the digests of the states that are looked for in a folder; None for all.

    Raises:
        ConfigError: the folder cannot be read; there are checkpoints of other runs or of later versions only; or the
            one checkpoint that `path` names is damaged.
    """
    if is_state(path):
        try:
            found = _find(path)
            _check_run({found.values.run_id}, run_id, path)
            return _read(found)
        except Damaged as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
    told = set[Path]()
    for _ in range(_LOOKS):
        candidates, later, vanished = _look(path, run_id, warn, told)
        for each in candidates:
            if among is not None and each.values.name.digest not in among:
                continue
            try:
                saved = _read(each)
            except Damaged as error:
                vanished = _say(each.path, error, warn, told) or vanished
                continue
            for unread in later:
                warn(f"a checkpoint is of a later version of shoal, and is passed over: {unread}")
            return saved
        if not vanished:
            break
    if later:  # nothing else is there: to begin anew beside it would be no resuming
        raise later[0]
    return None


def _look(
    folder: Path, run_id: str, warn: Callable[[str], None], told: set[Path]
) -> tuple[list[_Found], list[Later], bool]:
    """The checkpoints of a run, the best first; the errors of those of later versions; and whether one has vanished."""
    found, later, others, vanished = [], list[Later](), set[str](), False
    for path in _checkpoints(folder):
        try:
            each = _find(path)
            if each.values.run_id == run_id:
                found.append((each.values.name.key, (path / INDEX).stat().st_mtime_ns, each))
            else:
                others.add(each.values.run_id)
        except Later as error:
            later.append(error)
        except (Damaged, FileNotFoundError) as error:
            vanished = _say(path, error, warn, told) or vanished
    if not found and others and not later:
        _check_run(others, run_id, folder)
    found.sort(key=lambda each: each[:2], reverse=True)
    return [each for _, _, each in found], later, vanished


def _say(path: Path, error: Exception, warn: Callable[[str], None], told: set[Path]) -> bool:
    """Warn of a damaged checkpoint, once. True if it is gone: another peer has removed it, and nothing is wrong."""
    if not os.path.lexists(path):
        return True
    if path not in told:
        told.add(path)
        warn(f"the checkpoint {path} is damaged, and is passed over: {error}")
    return False


def _check_run(found: set[str], run_id: str, path: Path) -> None:
    if run_id not in found:
        raise ConfigError(
            f"{path} holds checkpoints of run {min(found)!r}, and this is run {run_id!r}: give another folder, or that "
            "run_id. To begin another run with those weights, load model.safetensors into the model"
        )


def _checkpoints(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if _CHECKPOINT.fullmatch(each.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"the folder of checkpoints cannot be read: {error}") from error


def _find(path: Path) -> _Found:
    """Raises `Damaged`, or `ConfigError` if it is of a later version, or none of a run."""
    index = read_index(path)
    if "run_id" not in index.values:
        raise ConfigError(
            f"{path} is a checkpoint of shoal.zero, and no run goes on from it: begin a run with what "
            "shoal.zero.consolidate() reads from it"
        )
    try:
        values = msgspec.convert(index.values, _Values)
        _ = values.name
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{error}") from error
    return _Found(path, index, values)


def _read(found: _Found) -> Saved:
    """Raises `Damaged` unless all of it is what was written. The tensors have memory of their own."""
    path, stored, values = found
    try:
        state = read_state(path, stored)
        with state.opened():
            read = {file: {key: each.whole(key) for key in each.kinds} for file, each in state.files.items()}
        tensors = [read[file][key] for file, key in values.tensors]
    except (OSError, LookupError) as error:
        raise Damaged(f"{error}") from error
    return Saved(path, values.name, values.values, values.settings, tensors, read.get(MODEL, {}), values.shared)
