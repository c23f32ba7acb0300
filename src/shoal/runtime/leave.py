"""Leaving on SIGTERM, for programs that want it: the others are told at once, and do not wait for who is gone.

shoal never touches a program's signals by itself; this does, inside of a `with` block only. The handler runs in the
main thread and does next to nothing: it starts a thread, which has the loop finish the round in progress (or give it
up), withdraw what was declared, and say Bye. So it works while the main thread waits in `step()`, and while it
computes. When all is said, the main thread is woken by the same signal, and ends the program.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from shoal.core import PeerCore
from shoal.errors import ClosedError, ConfigError, LocalError, PeerError
from shoal.runtime.dht import DHT
from shoal.runtime.thread import GRACE_S

__all__ = ["Leaving", "leave_on_sigterm"]

EXIT_TERMINATED = 143
"""128 + 15: what a shell shows of a process that SIGTERM has ended."""


class Leaving:
    """What `leave_on_sigterm` gives: whether this program is told to end. Use it in a `with` statement.

    Attributes:
        exit_code: the code that the program ends with; None leaves the end to the program.
    """

    def __init__(self, dhts: tuple[DHT, ...], grace_s: float, exit_code: int | None) -> None:
        self._dhts, self._grace_s, self.exit_code = dhts, grace_s, exit_code
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._before: Any = None
        self._inside = False

    @property
    def requested(self) -> bool:
        """Whether SIGTERM came."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether everything was said and the peers are shut down."""
        return self._done.is_set()

    def __enter__(self) -> Self:
        if self._inside:
            raise LocalError("this leave_on_sigterm() is in use already: make another one")
        if threading.current_thread() is not threading.main_thread():
            raise LocalError(
                "leave_on_sigterm() must be entered in the main thread: Python lets no other one handle signals"
            )
        before = signal.getsignal(signal.SIGTERM)
        if before is None:
            raise LocalError("SIGTERM has a handler that was not set from Python, and could not be put back: leave it")
        self._before, self._inside = before, True
        signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if self._thread is not None:
                self._thread.join()  # bounded: see `_limit_s`
        finally:
            signal.signal(signal.SIGTERM, self._before)
            self._inside = False
        if self.requested and self.exit_code is not None and (error is None or isinstance(error, ClosedError)):
            raise SystemExit(self.exit_code) from None

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._leave, name="shoal-leave", daemon=True)
            self._thread.start()
        elif not self._done.is_set():
            # The second time: at once. What the default does cannot be done from here but by its own means.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        elif self.exit_code is not None:
            raise SystemExit(self.exit_code)

    def _leave(self) -> None:
        try:
            for leaving in [self._begin(dht) for dht in self._dhts]:
                if leaving is not None:
                    with contextlib.suppress(ClosedError, LocalError, PeerError, TimeoutError):
                        leaving.result(self._limit_s)
            for dht in self._dhts:
                dht.shutdown()
        finally:
            self._done.set()
            if self.exit_code is not None and self._inside:
                _wake_main_thread()

    @property
    def _limit_s(self) -> float:
        return self._grace_s + 2 * GRACE_S

    def _begin(self, dht: DHT) -> Any:
        """Have a peer finish what it does; None if it does nothing."""
        if not dht.is_alive():
            return None
        try:
            core = dht.core(timeout=GRACE_S)
            return dht.loop_thread.submit(_finish(core, self._grace_s))
        except (ClosedError, LocalError, PeerError, ConfigError):
            return None  # it has not joined, or is shut down already


def _wake_main_thread() -> None:
    """By the signal itself: it ends whatever wait the main thread is in."""
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGTERM)
    else:
        _thread.interrupt_main(signal.SIGTERM)


async def _finish(core: PeerCore, grace_s: float) -> None:
    await asyncio.gather(*(leave(grace_s) for leave in list(core.leavers)), return_exceptions=True)


def leave_on_sigterm(*dhts: DHT, grace_s: float = 30.0, exit_code: int | None = EXIT_TERMINATED) -> Leaving:
    """Leave in order when SIGTERM comes, as schedulers and spot instances send it before they kill.

    Inside of the block the first SIGTERM begins to leave: no new round begins, a search for a group ends at once, a
    round in progress goes on to its end for at most `grace_s`; then the other peers are told, and the program ends.
    What waits in `step()` meanwhile gets its result, or `ClosedError`. A second SIGTERM ends the program at once. After
    the block the handler is the one that was there before.

    ::

        with shoal.DHT(invite, start=True) as dht, shoal.leave_on_sigterm(dht) as leaving:
            while not leaving.requested:
                train(...)

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
