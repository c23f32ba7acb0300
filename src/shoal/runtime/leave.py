"""Leaving on SIGTERM, for programs that want it: the others are told at once, and do not wait for a peer that is gone.

shoal never touches a program's signals by itself; this module does, only inside of a `with` block. Python runs a
handler in the main thread alone, and only once that thread executes Python again: not while it is deep in a long
computation, and not if the signal came in the instant before it fell asleep in a lock. So the signal is heard by a
thread of our own, through `signal.set_wakeup_fd`. It makes the loop finish the round in progress (or give it up),
withdraw its declarations, and say Bye. After that the same signal wakes the main thread, as often as needed, and the
main thread ends the program.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Collection
from types import FrameType, TracebackType
from typing import Any, Self

from shoal.averaging.core import PeerCore
from shoal.base.locks import SafeLock
from shoal.base.waiting import Gate
from shoal.errors import ClosedError, ConfigError, LocalError, PeerError
from shoal.runtime.dht import DHT
from shoal.runtime.thread import GRACE_S

__all__ = ["Leaving", "leave_on_sigterm"]

EXIT_TERMINATED = 143
"""The exit code that a shell shows for a process that SIGTERM has ended: 128 + 15."""

_POKE_S = 0.2


class Leaving:
    """The result of `leave_on_sigterm`: it knows whether this program was told to end. Use it in a `with` statement.

    Attributes:
        exit_code: the code with which the program ends; None leaves the end to the program.
    """

    def __init__(self, dhts: Collection[DHT], grace_s: float, exit_code: int | None) -> None:
        self._dhts, self._grace_s, self.exit_code = dhts, grace_s, exit_code
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._at_once = False  # the second signal came
        self._woken = Gate()  # the main thread need not be woken any more
        self._guard = SafeLock()  # nobody wakes it once its handler is gone
        self._before: Any = None
        self._ear: socket.socket | None = None
        self._ear_before = -1
        self._was_installed = False  # to the end of the block
        self._listener: threading.Thread | None = None

    @property
    def requested(self) -> bool:
        """Whether SIGTERM came."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether the others were told and the peers are shut down."""
        return self._done.is_set()

    def __enter__(self) -> Self:
        if self in _inside:
            raise LocalError("this leave_on_sigterm() is in use already: make another one")
        if threading.current_thread() is not threading.main_thread():
            raise LocalError(
                "leave_on_sigterm() must be entered in the main thread: Python lets no other one handle signals"
            )
        before = signal.getsignal(signal.SIGTERM)
        if before is None:
            raise LocalError("SIGTERM has a handler that was not set from Python, and could not be put back: leave it")
        self._before, self._was_installed = before, False
        self._woken = Gate()
        self._prick_up()
        signal.signal(signal.SIGTERM, self._handle)
        _inside.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._guard:
            self._woken.open()
        self.restore()
        if self._listener is not None:
            self._listener.join()  # it has heard all signals until now
        if self._thread is not None:
            self._thread.join()  # bounded: see `_limit_s`
        if self.requested and self.exit_code is not None and (error is None or isinstance(error, ClosedError)):
            raise SystemExit(self.exit_code) from None

    def restore(self) -> None:
        """Put the old handler back; also in a forked child, where SIGTERM is meant only for the child."""
        if self not in _inside:
            return
        _inside.remove(self)
        self._was_installed = self._is_installed  # for what the listener has not read yet
        signal.signal(signal.SIGTERM, self._before)
        if self._ear is not None:
            signal.set_wakeup_fd(self._ear_before)
            self._ear.close()
            self._ear = None

    # ------------------------------------------------------------------------------------------------------- hearing

    def _prick_up(self) -> None:
        """Start a thread that hears signals. If something else hears them already, the handler alone must do.

        An outer block of ours, as `shoal run` has one, hears nothing meanwhile.
        """
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._ear_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if self._ear_before not in (-1, *(each.ear for each in _inside)):
            signal.set_wakeup_fd(self._ear_before)
            reader.close()
            writer.close()
            return
        self._ear = writer
        self._listener = threading.Thread(target=self._listen, args=(reader,), name="shoal-signals", daemon=True)
        self._listener.start()

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while heard := reader.recv(64):
                for _ in range(heard.count(signal.SIGTERM) if self._is_installed else 0):
                    self._count()
                if self._at_once:
                    self._wake()

    @property
    def ear(self) -> int:
        """The descriptor to which Python writes signals for the listener; -1 for none."""
        return -1 if self._ear is None else self._ear.fileno()

    @property
    def _is_installed(self) -> bool:
        """Whether the program has set no other handler meanwhile. That one may call ours, as Lightning's does."""
        return self._was_installed or signal.getsignal(signal.SIGTERM) == self._handle

    def _count(self) -> None:
        """Count a SIGTERM: it came, or `_wake` sent it again to wake the main thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._leave, name="shoal-leave", daemon=True)
            self._thread.start()
        elif not self.done:
            self._at_once = True

    def _wake(self) -> None:
        """End any wait of the main thread by the signal itself. Once is not enough if the thread was about to wait."""
        main = threading.main_thread().ident
        while True:
            with self._guard:
                if self._woken.is_open:
                    return
                if hasattr(signal, "pthread_kill") and main is not None:
                    signal.pthread_kill(main, signal.SIGTERM)
                else:
                    _thread.interrupt_main(signal.SIGTERM)
            self._woken.wait(_POKE_S)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._woken.is_open:
            return
        if self._listener is None or not self._is_installed:
            self._count()
        if self._at_once:
            # Only the default handler itself can do this.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        if self.done and self.exit_code is not None:
            self._woken.open()
            raise SystemExit(self.exit_code)

    # ------------------------------------------------------------------------------------------------------- leaving

    def _leave(self) -> None:
        try:
            dhts = list(self._dhts)
            for leaving in [self._begin(dht) for dht in dhts]:
                if leaving is not None:
                    with contextlib.suppress(ClosedError, LocalError, PeerError, TimeoutError):
                        leaving.result(self._limit_s)
            for dht in dhts:
                dht.shutdown()
        finally:
            self._done.set()
            if self.exit_code is not None:
                self._wake()

    @property
    def _limit_s(self) -> float:
        return self._grace_s + 2 * GRACE_S

    def _begin(self, dht: DHT) -> Any:
        """Let a peer finish its work; None if it has no work."""
        if not dht.is_alive():
            return None
        try:
            core = dht.core(timeout=GRACE_S)
            return dht.loop_thread.submit(_finish(core, self._grace_s))
        except (ClosedError, LocalError, PeerError, ConfigError):
            return None  # it has not joined, or is shut down already


_inside: list[Leaving] = []
"""The `Leaving` objects whose `with` block is open, the innermost last."""


def _restore_in_child() -> None:
    for leaving in reversed(list(_inside)):
        leaving.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)


async def _finish(core: PeerCore, grace_s: float) -> None:
    await asyncio.gather(*(leave(grace_s) for leave in list(core.leavers)), return_exceptions=True)


def leave_on_sigterm(*dhts: DHT, grace_s: float = 30.0, exit_code: int | None = EXIT_TERMINATED) -> Leaving:
    """Leave in order when SIGTERM comes, as schedulers and spot instances send it before they kill.

    Inside of the block the first SIGTERM begins to leave: no new round begins, a search for a group ends at once, a
    round in progress goes on to its end for at most `grace_s`; then the other peers are told, and the program ends.
    A caller that waits in `step()` meanwhile gets its result, or `ClosedError`. A second SIGTERM ends the program at
    once. After the block the handler is the one that was there before.

    ::

        with shoal.DHT(invite, start=True) as dht, shoal.leave_on_sigterm(dht) as leaving:
            while not leaving.requested:
                train(...)

    The lines behind the block do not run then: put code that saves the model into a `finally:` around the block (the
    program may be ended at any moment within it), or give `exit_code=None`, with which the loop above ends by itself
    and the program goes on behind it.

    Args:
        dhts: the peers that leave; each is shut down.
        grace_s: seconds that a round in progress may still take.
        exit_code: the program ends by `SystemExit` with this, wherever its main thread is; None only leaves the
            network, and the program ends when it wants (see `Leaving.done`).

    Raises:
        ConfigError: no peer was given, or an argument is wrong.
        LocalError: at `with`: not in the main thread, or SIGTERM has a handler that Python does not know.
    """
    if not dhts or not all(isinstance(dht, DHT) for dht in dhts):
        raise ConfigError("leave_on_sigterm() needs the shoal.DHT that is to leave, or several")
    if isinstance(grace_s, bool) or not isinstance(grace_s, int | float) or not 0 <= grace_s < float("inf"):
        raise ConfigError(f"grace_s must be a number of seconds from 0, got {grace_s!r}")
    if exit_code is not None and (isinstance(exit_code, bool) or not isinstance(exit_code, int)):
        raise ConfigError(f"exit_code must be a whole number, or None, got {exit_code!r}")
    return Leaving(dhts, float(grace_s), exit_code)
