"""Peers as processes of their own, which say how it went.

A peer is a function of a module, run in a new process (forked from one that has imported torch already). It says things
(`Line.say`), and the benchmark waits for them; in the end it has returned something, or failed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Self

import torch

__all__ = ["Failed", "Line", "Peer", "Peers"]

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch"])

_LIMIT_S = 100.0
"""A benchmark waits no longer for one of its peers."""


class Failed(Exception):
    """A peer raised, or died."""


class Line:
    """What a peer says, and hears: its end."""

    def __init__(self, pipe: multiprocessing.connection.Connection) -> None:
        self._pipe, self._guard = pipe, threading.Lock()

    def say(self, what: str, value: Any = None) -> None:
        """Tell the benchmark."""
        with self._guard:
            self._pipe.send((what, value))

    def heard(self, what: str, within_s: float = 0.0) -> bool:
        """Whether the benchmark has told this, or tells it within so many seconds."""
        return self._pipe.poll(within_s) and self._pipe.recv() == what

    def wait(self, what: str, limit_s: float = _LIMIT_S) -> None:
        """Wait for a word of the benchmark."""
        if self._pipe.poll(limit_s):
            assert self._pipe.recv() == what


def _begin(pipe: multiprocessing.connection.Connection, work: Callable[..., Any], options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.dup2(2, 1)  # trainers print
    try:
        pipe.send(("returned", work(Line(pipe), **options)))
    except BaseException as error:  # noqa: BLE001 (the benchmark says it)
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


class Peer:
    """One process: the benchmark's end."""

    def __init__(self, work: Callable[..., Any], options: dict[str, Any]) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_begin, args=(theirs, work, options), daemon=True)
        self._process.start()
        theirs.close()
        self.returned: Any = None
        self.said: list[tuple[str, Any]] = []
        # Read at once: a pipe holds 64 KiB, and a peer that nobody listens to would stand still when it is full.
        self._heard = queue.SimpleQueue[tuple[str, Any] | None]()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._heard.put(self._pipe.recv())
        self._heard.put(None)

    def wait(self, what: str, limit_s: float = _LIMIT_S) -> Any:
        """The next thing of this name that it says. Raises `Failed` if it fails or dies, else `TimeoutError`."""
        end = time.monotonic() + limit_s
        while True:
            try:
                heard = self._heard.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"a peer did not say {what!r} within {limit_s:.0f} s") from None
            if heard is None:
                self._heard.put(None)  # also for the next one who asks
                raise Failed("a peer died")
            self.said.append(heard)
            name, value = heard
            if name == what:
                return value
            if name == "failed":
                raise Failed(value)

    def result(self, limit_s: float = _LIMIT_S) -> Any:
        """What it returns in the end."""
        self.returned = self.wait("returned", limit_s)
        return self.returned

    def tell(self, what: str) -> None:
        """Say something to it."""
        self._pipe.send(what)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()


class Peers:
    """The peers of a benchmark; none outlives it."""

    def __init__(self) -> None:
        self._all: list[Peer] = []

    def start(self, work: Callable[..., Any], **options: Any) -> Peer:
        """One more."""
        self._all.append(Peer(work, options))
        return self._all[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._all:
            peer.kill()
