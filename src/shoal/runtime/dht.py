"""`DHT`: this peer, as users hold it."""

from __future__ import annotations

import atexit
import os
import random
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from shoal.clock import Env, SystemClock
from shoal.core import PeerCore
from shoal.dht import RecordValidator, Subkey, ValueWithExpiration
from shoal.errors import ConfigError, LocalError
from shoal.events import EventBus
from shoal.identity import Identity
from shoal.peer import Address, Invite, PeerID, parse_peers
from shoal.runtime.thread import GRACE_S, LoopFuture, LoopThread
from shoal.transport.tcp import TcpTransport

__all__ = ["DHT"]

T = TypeVar("T")


class DHT:
    """This peer: its identity, its listening socket, its place in the network. The first object to make.

    Args:
        initial_peers: addresses or invites (text or objects) of peers to join; none begins a new network.
        start: connect now; else at `run_in_background`.
        host_maddrs: where to listen, as `/ip4/HOST/tcp/PORT`; port 0 takes a free one. `/ip4/0.0.0.0/tcp/PORT` lets other
            machines connect.
        announce_maddrs: what to tell others in place of where we listen, in the same form; for a forwarded port.
        identity_path: file with this peer's key (made if missing, mode 0600); None for a new identity each time.
        client_mode: never listen, only dial.
        record_validators: further rules for records, beside signatures.
        await_ready: with `start`, wait until the network is joined.
        daemon: kept for compatibility: shoal starts no processes, and its thread never keeps a program alive.
        shutdown_timeout: seconds that an orderly leave may take.
        startup_timeout: seconds that joining may take.

    Raises:
        ConfigError: an argument is wrong, the port is used, or the key file can be read by others.
        PeerUnreachable: no initial peer answered.
    """

    def __init__(
        self,
        initial_peers: str | Iterable[str | Address | Invite] = (),
        *,
        start: bool = False,
        host_maddrs: str | Sequence[str] = "/ip4/127.0.0.1/tcp/0",
        announce_maddrs: str | Sequence[str] = (),
        identity_path: str | os.PathLike[str] | None = None,
        client_mode: bool = False,
        record_validators: Iterable[RecordValidator] = (),
        await_ready: bool = True,
        daemon: bool = True,
        shutdown_timeout: float = 3.0,
        startup_timeout: float = 15.0,
    ) -> None:
        self._initial_peers = parse_peers(initial_peers)
        self._host, self._port = _listen_address(host_maddrs)
        self._announce = _announced(announce_maddrs)
        self._identity = Identity.ephemeral() if identity_path is None else Identity.load_or_create(Path(identity_path))
        self.client_mode = client_mode
        self.events = EventBus()
        self._validators = tuple(record_validators)
        self._shutdown_timeout, self._startup_timeout = shutdown_timeout, startup_timeout
        self._thread: LoopThread | None = None
        self._core: PeerCore | None = None
        self._ready: LoopFuture[PeerCore] | None = None
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        if start:
            self.run_in_background(await_ready=await_ready)

    # -------------------------------------------------------------------------------------------------- life and death

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Listen and join the network.

        Args:
            await_ready: wait until it is done.
            timeout: seconds; default `startup_timeout`.

        Raises:
            ConfigError: the address cannot be listened on.
            PeerUnreachable: no initial peer answered.
            LocalError: it runs already, or was shut down.
        """
        if self._thread is not None:
            raise LocalError("this DHT was started already")
        self._thread = LoopThread("shoal")
        atexit.register(_shutdown_at_exit, weakref.ref(self))
        limit_s = timeout or self._startup_timeout
        self._ready = self._thread.submit(self._start(limit_s))
        if await_ready:
            try:
                self._core = self._ready.result(limit_s + GRACE_S)
            except BaseException:
                self.shutdown()
                raise

    async def _start(self, timeout_s: float) -> PeerCore:
        assert self._thread is not None
        transport = TcpTransport(
            self._identity,
            host=self._host,
            port=self._port,
            announce_host=self._announce[0][0] if self._announce else None,
            client_mode=self.client_mode,
        )
        env = Env(SystemClock(), random.Random(), self._thread.executor, self.events)  # noqa: S311 (no secrets)
        return await PeerCore.start(
            self._identity,
            transport,
            env,
            self._initial_peers,
            client_mode=self.client_mode,
            validators=self._validators,
            timeout_s=timeout_s,
        )

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the network is joined; raises what went wrong."""
        self.core(timeout)

    def core(self, timeout: float | None = None) -> PeerCore:
        """The async core, for what runs in the loop (`submit`)."""
        if self._core is None:
            if self._ready is None:
                raise LocalError("this DHT was not started: pass start=True or call run_in_background()")
            self._core = self._ready.result(timeout or self._startup_timeout + GRACE_S)
        return self._core

    @property
    def loop_thread(self) -> LoopThread:
        """The thread that everything of this peer runs in."""
        if self._thread is None:
            raise LocalError("this DHT was not started: pass start=True or call run_in_background()")
        return self._thread

    def is_alive(self) -> bool:
        """Whether it was started, and not shut down."""
        return self._thread is not None and self._thread.alive

    def at_shutdown(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `closer` in the loop before the endpoint closes (for what is built on this DHT)."""
        self._closers.append(closer)

    def shutdown(self) -> None:
        """Leave the network in order; averagers of this DHT end too. Safe to call twice, and from any thread."""
        if self._thread is not None:
            self._thread.stop(self._leave, self._shutdown_timeout)
            atexit.unregister(_shutdown_at_exit)

    async def _leave(self) -> None:
        for closer in reversed(self._closers):
            await closer()
        if self._ready is not None:
            if not self._ready.done():
                self.loop_thread.cancel(self._ready)
            elif self._ready.exception() is None:
                await self._ready.result().close()

    def __enter__(self) -> DHT:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"DHT({self.peer_id.short()}, {'running' if self.is_alive() else 'not running'})"

    # ------------------------------------------------------------------------------------------------------ who we are

    @property
    def peer_id(self) -> PeerID:
        """This peer's identity."""
        return self._identity.peer_id

    def get_visible_maddrs(self, latest: bool = False) -> list[Address]:
        """Where others can reach this peer: their `str` is what others pass as `initial_peers`. Empty in client mode."""
        return list(self.core().endpoint.contact.addresses)

    def invite(self, run_id: str = "") -> Invite:
        """One line that others can join by.

        Raises:
            LocalError: in client mode nobody can dial this peer.
        """
        addresses = tuple(self.get_visible_maddrs())
        if not addresses:
            raise LocalError("a peer in client mode cannot be dialed: invite with an address of another peer")
        return Invite(addresses, run_id)

    # --------------------------------------------------------------------------------------------------- store and get

    @overload
    def store(self, key: str | bytes, value: object, expiration_time: float, subkey: Subkey | None = None) -> bool: ...
    @overload
    def store(
        self,
        key: str | bytes,
        value: object,
        expiration_time: float,
        subkey: Subkey | None = None,
        *,
        return_future: Literal[True],
    ) -> LoopFuture[bool]: ...
    def store(
        self,
        key: str | bytes,
        value: object,
        expiration_time: float,
        subkey: Subkey | None = None,
        *,
        return_future: bool = False,
    ) -> bool | LoopFuture[bool]:
        """Store a value, or with `subkey` one entry of a dictionary, until `expiration_time`.

        Args:
            key: any text or bytes.
            value: anything that MessagePack can hold, up to 64 KiB.
            expiration_time: wall-clock seconds, at most an hour ahead; of two values the later expiration wins.
            subkey: entry of a dictionary; this peer's own id (32 bytes) is an entry that only this peer can write.
            return_future: return at once.

        Returns:
            Whether some peer holds it now (a future of that with `return_future`).
        """
        work = self.core().node.store(key, value, expiration_time, subkey)
        return self.loop_thread.submit(work) if return_future else self._wait(work)

    @overload
    def get(self, key: str | bytes, latest: bool = False) -> ValueWithExpiration | None: ...
    @overload
    def get(
        self, key: str | bytes, latest: bool = False, *, return_future: Literal[True]
    ) -> LoopFuture[ValueWithExpiration | None]: ...
    def get(
        self, key: str | bytes, latest: bool = False, *, return_future: bool = False
    ) -> ValueWithExpiration | None | LoopFuture[ValueWithExpiration | None]:
        """The value of a key with its expiration; for a dictionary `{subkey: ValueWithExpiration}`; None if not found.

        Args:
            key: what was given to `store`.
            latest: ask all peers that should hold it, and take what expires last; else the first answer.
            return_future: return at once.
        """
        work = self.core().node.get(key, latest=latest)
        return self.loop_thread.submit(work) if return_future else self._wait(work)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop_thread.run(work, self.core().node.settings.timeout_s + GRACE_S)


def _shutdown_at_exit(reference: weakref.ref[DHT]) -> None:
    if (dht := reference()) is not None:
        dht.shutdown()


def _listen_address(maddrs: str | Sequence[str]) -> tuple[str, int]:
    texts = [maddrs] if isinstance(maddrs, str) else list(maddrs)
    if len(texts) != 1:
        raise ConfigError(f"host_maddrs must be one address to listen on, got {len(texts)}")
    return _host_and_port(texts[0], "host_maddrs")


def _announced(maddrs: str | Sequence[str]) -> tuple[tuple[str, int], ...]:
    texts = [maddrs] if isinstance(maddrs, str) else list(maddrs)
    return tuple(_host_and_port(text, "announce_maddrs") for text in texts)


def _host_and_port(text: object, argument: str) -> tuple[str, int]:
    pieces = str(text).split("/")
    well_formed = len(pieces) == 5 and not pieces[0] and pieces[1] in ("ip4", "ip6", "dns") and pieces[3] == "tcp"
    if not well_formed or not pieces[4].isdigit() or int(pieces[4]) > 65535:
        raise ConfigError(f"{argument} must look like /ip4/127.0.0.1/tcp/0, got {text!r}")
    return pieces[2], int(pieces[4])
