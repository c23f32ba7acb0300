"""The running part of a peer, and its end. It has no reference to the users' `DHT`, which may be dropped.

Invariant: after `stop` there is no thread, task or socket of the peer, however badly the objects built on it behave.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from shoal.averaging.core import PeerCore
from shoal.base.clock import Env, SystemClock
from shoal.base.peer import Address
from shoal.base.warning_names import named
from shoal.dht import DhtSettings, RecordValidator
from shoal.events import EventBus, Warned
from shoal.protocol.identity import Identity
from shoal.rpc.recorder import FlightRecorder
from shoal.runtime.debug import DebugService, warning_of
from shoal.runtime.low_latency import low_latency
from shoal.runtime.peers_file import PeersFile
from shoal.runtime.thread import LoopFuture, LoopThread
from shoal.transport.tcp import TcpTransport

__all__ = ["Closer", "RunningPeer"]

Closer = Callable[[], Coroutine[Any, Any, None]]
"""A function that ends an object built on a peer. It runs in the loop."""

_logger = logging.getLogger("shoal.runtime")

_GOODBYE_S = 2.0
"""The time for the farewell and the end of all connections, after the `shutdown_timeout` of objects on the DHT."""


class RunningPeer:
    """The running part of a peer: the thread, the core, and their end.

    Args:
        identity: the peer's key.
        transport: the transport; this object owns it from now on.
        events: the bus for the peer's events.
        shutdown_timeout_s: the time for the objects built on this peer to end in order.
    """

    def __init__(
        self, identity: Identity, transport: TcpTransport, events: EventBus, shutdown_timeout_s: float
    ) -> None:
        self._identity, self._transport, self._events = identity, transport, events
        self._shutdown_timeout_s = shutdown_timeout_s
        self._closers: list[Closer] = []
        self._starting: asyncio.Task[Any] | None = None
        self._core: PeerCore | None = None
        self._debug = DebugService(FlightRecorder(identity.peer_id, events), identity.peer_id)
        self.ready: LoopFuture[PeerCore]
        self.thread = LoopThread(f"shoal-{identity.peer_id.short()}")
        atexit.register(self._stop_at_exit)

    def start(  # noqa: PLR0913 (by name, but for the first)
        self,
        initial_peers: Sequence[Address],
        *,
        kept: Sequence[Address],
        peers_file: PeersFile | None,
        invited_to: frozenset[str],
        client_mode: bool | None,
        dht_settings: DhtSettings,
        validators: Sequence[RecordValidator],
        state_upload_limit: float | None,
        timeout_s: float,
        patient: bool,
    ) -> None:
        """Begin to join; `ready` has the result.

        `kept` are the peers in the file; the other arguments are those of `PeerCore.start` and `DHT`.
        """

        async def join() -> PeerCore:
            self._starting = asyncio.current_task()
            try:
                self._debug.listen()
            except OSError as error:  # a sandbox without Unix sockets: no reason not to train
                self._events.emit(warning_of(error))
            self._core = await PeerCore.start(
                self._identity,
                self._transport,
                Env(SystemClock(), random.Random(), self.thread.executor, self._events, low_latency),
                initial_peers,
                kept=kept,
                client_mode=client_mode,
                dht_settings=dht_settings,
                validators=validators,
                state_upload_limit=state_upload_limit,
                timeout_s=timeout_s,
                must_join=bool(initial_peers),
                patient=patient or peers_file is not None,
                invited_to=invited_to,
            )
            if peers_file is not None:
                self._keep_peers(peers_file, self._core)
            self._debug.serve(self._core.endpoint)
            return self._core

        self.ready = self.thread.submit(join())

    def _keep_peers(self, file: PeersFile, core: PeerCore) -> None:
        def warn(message: str) -> None:
            self._events.emit(Warned(where="peers_file", message=message))

        keeping = asyncio.get_running_loop().create_task(file.keep(core, warn))

        async def write() -> None:
            keeping.cancel()
            await file.write(core, warn)

        self._closers.append(write)

    def add_closer(self, closer: Closer) -> Callable[[], None]:
        """Run `closer` before the endpoint closes, the last one first. Returns a function that removes it."""
        self._closers.append(closer)

        def take_back() -> None:
            with suppress(ValueError):
                self._closers.remove(closer)

        return take_back

    def stop(self, *, wait: bool = True) -> None:
        """End everything; with `wait`, return when nothing is left. Safe to call twice, and in a forked child.

        Without `wait`, the end of the program waits for it.
        """
        self.thread.stop(self._leave, self._shutdown_timeout_s + _GOODBYE_S, wait=wait)

    def _stop_at_exit(self) -> None:
        self.thread.stop(self._leave, self._shutdown_timeout_s + _GOODBYE_S, answer=False)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(self._shutdown_timeout_s):
                while self._closers:
                    await _close(self._closers.pop())
        except TimeoutError:
            _logger.warning(
                named("a round, or a checkpoint that is being written, did not end within shutdown_timeout=%g s"),
                self._shutdown_timeout_s,
            )
        try:
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.gather(self._starting, return_exceptions=True)
            if self._core is not None:
                await self._core.close()
        finally:
            await self._debug.close()
            await self._transport.close()
            atexit.unregister(self._stop_at_exit)


async def _close(closer: Closer) -> None:
    try:
        await closer()
    except Exception:
        _logger.exception("something that uses the DHT did not close")
