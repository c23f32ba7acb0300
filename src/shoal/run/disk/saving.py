"""Saves checkpoints of one peer: now and then beside the training, one at a time.

The training stands still for a copy of the state, whose memory is used again by the next one. A thread of its own
writes the copy. If that fails, training goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from shoal.averaging import TensorLock
from shoal.base.checks import path, whole
from shoal.base.clock import seconds_text
from shoal.base.pool import DaemonPool
from shoal.base.waiting import Gate
from shoal.errors import ConfigError
from shoal.events import CheckpointSaved, Event, Resumed, Warned
from shoal.run.decide.state_name import StateName
from shoal.run.disk.checkpoint import Content, Files, Saved, given_up, newest, write, write_given_up
from shoal.run.report.notices import passes_a_power_of_ten
from shoal.train.options import OUTER, merges

__all__ = ["Saver", "misfit", "saver_of"]

_EVERY, _KEEP = 10, 3
_LAST_S = 600.0
"""The longest wait for the checkpoint at the end of a run."""

_SAME = ("tensors", "optimizer", OUTER, "parameter names", "frozen tensors")
"""The settings in which a checkpoint must be equal, as far as both are known; the others may have been changed."""


class Saver:
    """Saves the checkpoints of one peer.

    Args:
        emit: takes events, in any thread.
        run_id: of the run.
        folder: of the automatic checkpoints; None for none.
        every: epochs between two of them; 0 for none.
        keep: so many states stay.
        given: names of settings of the program's own, in which a checkpoint must be equal, too.
        timeout_s: the longest wait for a write at the end.

    Attributes:
        folder, keep: as the arguments.
        last: the name of the state that was saved there last, or is being saved; or from which this peer goes on.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        run_id: str,
        folder: Path | None,
        *,
        every: int,
        keep: int,
        given: Sequence[str],
        timeout_s: float,
    ) -> None:
        self._emit, self._run_id, self.folder = emit, run_id, folder
        self._every, self.keep, self._timeout_s = every, keep, timeout_s
        self._same = (*_SAME, *given)
        self._one_write = TensorLock()  # no thread keeps it, whatever interrupts it
        self._writing: concurrent.futures.Future[None] | None = None
        self._giving_up: concurrent.futures.Future[None] | None = None
        self._ended = Gate()  # of that write
        self.last: StateName | None = None
        self._trouble, self._failures = "", 0  # why the last save failed, and how many have in a row for that reason
        self._ended_with: StateName | None = None  # the state at the end of the run, once it was to be saved
        self._memory: Files | None = None

    def warn(self, message: str) -> None:
        """Tell this."""
        self._emit(Warned(where="optimizer", message=message))

    def was_saved(self, name: StateName) -> None:
        """The state of this name is in a checkpoint, at the user's wish."""
        self.last = name

    def at_step(self, name: StateName, copy: Callable[[Files | None], Content], *, finished: bool) -> None:
        """Save this state if it is time to: every so many epochs, and at the end of the run (trainer).

        Args:
            name: of the state.
            copy: gives it, in this memory where it fits.
            finished: the run is over. Nothing else is to be done, so the write is waited for.
        """
        if self.folder is None or not self._is_due(name, finished=finished):
            return
        self.last = name
        if finished:
            self._ended_with = name
        began = time.monotonic()
        try:
            content = copy(self._memory)
        except Exception as error:  # noqa: BLE001 (no memory for it, or a state that cannot be saved)
            self._failed(error, finished=finished)
            return
        copy_s, self._memory = time.monotonic() - began, content.files
        pool, self._ended = DaemonPool(1, "shoal-checkpoint"), Gate()
        try:
            self._writing = pool.submit(
                partial(self._write, self.folder, content, copy_s, self._ended, finished=finished)
            )
        except RuntimeError as error:  # no thread is to be had
            self._ended.open()
            self._failed(error, finished=finished)
        pool.shutdown(wait=False)  # the thread ends with its work
        if finished:
            self._has_ended(_LAST_S)

    def keep_given_up(self, copy: Callable[[], Content]) -> Path | None:
        """Save a state that is about to be given up, in the background (any thread).

        Returns:
            The path where it will be; None if there is no folder, or it cannot be copied.
        """
        if self.folder is None:
            return None
        try:
            content, pool = copy(), DaemonPool(1, "shoal-given-up")
            self._giving_up = pool.submit(self._write_given_up, self.folder, content)
            pool.shutdown(wait=False)
        except Exception as error:  # noqa: BLE001 (no memory, no thread, or a state that cannot be saved)
            self._not_kept(error)
            return None
        return given_up(self.folder, content.name)

    def _write_given_up(self, folder: Path, content: Content) -> None:
        began = time.monotonic()
        try:
            with self._one_write.acquire_in_thread():
                size = write_given_up(folder, content)
        except Exception as error:  # noqa: BLE001 (training goes on)
            self._not_kept(error)
        else:
            self._tell_saved(content, given_up(folder, content.name), size, 0.0, time.monotonic() - began)

    def _not_kept(self, error: Exception) -> None:
        self.warn(f"the state that this peer gives up could not be saved in {self.folder}, and is lost: {_why(error)}")

    def _is_due(self, name: StateName, *, finished: bool) -> bool:
        """An epoch that comes while another one is written is left out; the last one is tried again if that failed."""
        if not self._every or name == self._ended_with:
            return False
        if finished:
            return self._has_ended(_LAST_S) and not self.has_saved(name)
        if name == self.last:
            return False
        before = 0 if self.last is None else self.last.epoch
        return name.epoch // self._every != before // self._every and self._has_ended(0.0)

    def has_saved(self, name: StateName) -> bool:
        """Whether this state is in the folder, once what is being written is there."""
        return self._has_ended(_LAST_S) and name == self.last and not self._trouble

    def _has_ended(self, timeout_s: float) -> bool:
        """Whether nothing is being written, after so long at most."""
        return self._writing is None or self._ended.wait(timeout_s)

    def _write(self, folder: Path, content: Content, copy_s: float, ended: Gate, *, finished: bool) -> None:
        try:
            self.write(folder, content, self.keep, copy_s)
            self._trouble = ""
        except Exception as error:  # noqa: BLE001 (training goes on)
            self._failed(error, finished=finished)
        finally:
            ended.open()

    def _failed(self, error: Exception, *, finished: bool) -> None:
        """Tell it the first, the tenth, … time in a row; and always at the end, as no other save comes."""
        why = _why(error)
        self._failures = self._failures + 1 if why == self._trouble else 1
        self._trouble = why
        often = "" if self._failures == 1 else f", {self._failures} times in a row"
        if finished:
            self.warn(
                f"no checkpoint was saved in {self.folder}: {why}{often}. The run has ended, and its last weights are "
                "in this program alone: save(folder) of the optimizer writes them to another folder"
            )
        elif passes_a_power_of_ten(self._failures - 1, self._failures):
            self.warn(
                f"no checkpoint was saved in {self.folder}: {why}{often}. Training goes on, and the next one will be "
                "tried. Mend the folder, or make room there"
            )

    def write(self, folder: Path, content: Content, keep: int | None, copy_s: float) -> Path:
        """Write a checkpoint, once no other one is being written (any thread).

        Raises:
            ConfigError: the state cannot be saved.
            OSError: the folder cannot be written.
        """
        with self._one_write.acquire_in_thread():
            began = time.monotonic()
            path, size = write(folder, content, keep)
        self._tell_saved(content, path, size, copy_s, time.monotonic() - began)
        return path

    def _tell_saved(self, content: Content, path: Path, size: int, copy_s: float, duration_s: float) -> None:
        self._emit(
            CheckpointSaved(
                run_id=content.run_id,
                epoch=content.name.epoch,
                path=str(path),
                bytes_written=size,
                copy_s=copy_s,
                duration_s=duration_s,
            )
        )

    async def close(self) -> None:
        """Wait for what is being written, if it does not take too long (loop)."""
        writing = [each for each in (self._writing, self._giving_up) if each is not None and not each.done()]
        if not writing:
            return
        ended = {asyncio.wrap_future(each) for each in writing}
        try:
            await asyncio.wait(ended, timeout=self._timeout_s)
        finally:
            for each in ended:
                each.cancel()  # the loop may be closed when it ends
            if not all(each.done() for each in writing):
                self.warn(
                    f"a checkpoint is still being written to {self.folder} after {seconds_text(self._timeout_s)}. It "
                    "is lost if the program ends before: give a larger shutdown_timeout"
                )

    # -------------------------------------------------------------------------------------------------------- resuming

    def find(self, folder: Path, settings: Mapping[str, str], among: Collection[bytes] | None = None) -> Saved | None:
        """The whole checkpoint of the best state in a folder, `among` those of these digests; None if there is none.

        Raises:
            ConfigError: the folder cannot be read, or its checkpoints are of another run, model or optimizer.
        """
        if (saved := newest(folder, self._run_id, self.warn, among)) is None:
            return None
        for name in self._same:
            here, there = settings.get(name), saved.settings.get(name)
            if None not in (here, there) and here != there:
                raise misfit(saved, f"{name} is {there} there and {here} here")
        if (merged := merges(saved.settings)) != merges(settings):
            acts = ("merge", "average gradients") if merged else ("average gradients", "merge")
            raise misfit(
                saved,
                f"it is of a run whose peers {acts[0]}, and here they {acts[1]}: its epochs and its optimizer's state "
                "are others",
                do="To begin with its weights, load its model.safetensors into the model, and give",
            )
        return saved

    def resumed(self, folder: Path, saved: Saved | None, epoch: int) -> None:
        """Tell from where this peer goes on; `epoch` is its own, if it has taken over nothing."""
        if saved is not None:
            self.last, epoch = saved.name, saved.name.epoch
        path = None if saved is None else str(saved.path)
        self._emit(Resumed(run_id=self._run_id, epoch=epoch, folder=str(folder), path=path))


def _why(error: Exception) -> str:
    """Without the name of a part, which is another one each time."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{error}" if isinstance(error, OSError | ConfigError) else f"{type(error).__name__}: {error}"


def misfit(
    saved: Saved,
    why: str,
    *,
    do: str = "Give the model, the optimizer and the strategy that it was saved with, or",
) -> ConfigError:
    """The error for a checkpoint that is not of this model or optimizer, or of another kind of run."""
    return ConfigError(f"the checkpoint {saved.path} does not fit: {why}. {do} another folder")


def saver_of(
    emit: Callable[[Event], None],
    run_id: str,
    folder: object,
    every: object,
    keep: object,
    given: Sequence[str],
    *,
    timeout_s: float,
) -> Saver:
    """Check the arguments of `Optimizer`.

    Raises:
        ConfigError: one is wrong, or the folder cannot be written.
    """
    for name, value in (("save_every", every), ("keep_checkpoints", keep)):
        if folder is None and value is not None:
            raise ConfigError(f"{name} needs checkpoint=, the path of the folder for checkpoints")
    every = _EVERY if every is None else whole("save_every", every, least=0)
    keep = _KEEP if keep is None else whole("keep_checkpoints", keep)
    place = None if folder is None else path("checkpoint", folder)
    if place is not None and every:
        try:
            place.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(f"checkpoint={str(place)!r} is a file: give the path of a folder") from error
        except OSError as error:
            raise ConfigError(f"checkpoint={str(place)!r}: the folder cannot be made: {error}") from error
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(f"checkpoint={str(place)!r}: the folder cannot be written: change its rights")
    return Saver(emit, run_id, place, every=every, keep=keep, given=given, timeout_s=timeout_s)
