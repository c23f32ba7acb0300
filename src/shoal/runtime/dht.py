"""`DHT`: this peer, as users hold it.

`DHT` is only a face: the running part is `RunningPeer`, which has no reference to it. So a `DHT` that nobody holds any
more can be collected, and then leaves the network. A `DHT` that is never shut down leaves when the program ends.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from shoal.averaging.core import PeerCore
from shoal.base.checks import flag, own_number, path, seconds
from shoal.base.clock import seconds_text
from shoal.base.peer import Address, Invite, PeerID, parse_peers
from shoal.dht import DhtNode, DhtSettings, RecordValidator, Subkey, ValueWithExpiration, check_validators
from shoal.errors import ClosedError, ConfigError, LocalError, PeerTimeout, PeerUnreachable
from shoal.events import EventBus, Warned
from shoal.protocol.identity import Identity
from shoal.runtime.dht_options import DhtOptions, check_dht_options
from shoal.runtime.launch import launched
from shoal.runtime.peers_file import PeersFile
from shoal.runtime.places import one_place
from shoal.runtime.running import Closer, RunningPeer
from shoal.runtime.thread import GRACE_S, LoopFuture, LoopThread
from shoal.transport.tcp import TcpTransport
from shoal.transport.upload_limit import UploadLimit

__all__ = ["DHT"]

T = TypeVar("T")

_MOST_WAYS_IN = 8
_SHUTDOWN_S, _STARTUP_S, _COROUTINE_S = 3.0, 15.0, 300.0


class DHT:
    """This peer: its identity, its listening socket, its place in the network. Make it first.

    Args:
        initial_peers: addresses or invites (text or objects) of peers to join. Without any, a new network begins.
            Addresses that cannot be used (QUIC, relays) are skipped with a warning, as long as there are others.
        start: connect now; else at `run_in_background`.
        host_maddrs: where to listen, as `/ip4/HOST/tcp/PORT`; port 0 takes a free one. `/ip4/0.0.0.0/tcp/PORT` lets
            all other machines connect: the first peer of a swarm needs it, if others are to join from elsewhere. None:
            if an initial peer is on another machine, the address that this machine uses towards it; else
            `/ip4/127.0.0.1/tcp/0`, so that only this machine can connect. `/tcp/PORT` is the same with this port.
        announce_maddrs: the address to tell others in place of the one where we listen, in the same form, for a
            forwarded port or a public name; port 0 stands for the port that we listen on. Not with `client_mode=True`.
        identity_path: file with this peer's key (made if missing, mode 0600), not to be shared by programs that run at
            a time; None for a new identity each time.
        peers_file: a file that keeps the known peers, made if missing. A peer that is started again tries these, too.
            Give the other peers an `identity_path` and a fixed port, so that their addresses stay. If there are no
            `initial_peers`, and no peer in the file answers, a new network begins, with a warning.
        client_mode: True: never listen, only dial. False: listen, and announce the address. None: ask the first peers
            that are met to dial this one. If they cannot, it announces no address and only dials, says so in a warning,
            and asks again every few minutes, ever more rarely. Peers on this machine are not asked.
        encrypt: False sends data unencrypted and unprotected to peers that also have False. Only for a network in which
            nobody else can listen or meddle. Identities are proved all the same.
        record_validators: further rules for records, beside signatures.
        num_replicas: how many nodes hold the records that this peer stores, and are asked by its `get(latest=True)`; 1
            to 32. All peers should have the same number. When half of all nodes die at once, one record in a thousand
            is lost with 10 replicas, and thirty in a thousand with 5.
        state_upload_limit: bytes per second that this peer sends to all peers together that download states from it; at
            least 32 KiB/s. None: no fixed limit, and a tenth of its other traffic during rounds.
        upload_limit: bytes per second that this peer sends in all: rounds, states, calls, handshakes, and on Linux the
            headers of packets and what is sent twice. At least 32 KiB/s. Small messages go first. None: no limit.
        await_ready: with `start`, wait until the network is joined.
        daemon: kept for compatibility: shoal starts no processes, and its thread never keeps a program alive.
        shutdown_timeout: seconds that an orderly leave may take.
        startup_timeout: seconds that joining may take. None: 15, and about 3 if no program listens at any address of
            the initial peers. Give a number if peers are started together, and the first may come up last.
        options: arguments of hivemind 1.1.12 that change nothing here, such as `num_workers=4` and `use_ipfs=False`;
            docs/reference/migrating.md lists them.

    Attributes:
        events: the bus of `shoal.events`; subscribers are called in shoal's own thread.

    Raises:
        ConfigError: an argument is wrong, the port is used, or the key file can be read by others.
        PeerUnreachable: no initial peer answered.
    """

    @launched("DHT")
    def __init__(  # noqa: PLR0913 (documented names that users of hivemind know)
        self,
        initial_peers: str | Address | Invite | Iterable[object] | None = None,
        *,
        start: bool = False,
        host_maddrs: str | Sequence[object] | None = None,
        announce_maddrs: str | Sequence[object] | None = None,
        identity_path: str | os.PathLike[str] | None = None,
        peers_file: str | os.PathLike[str] | None = None,
        client_mode: bool | None = None,
        encrypt: bool = True,
        record_validators: Iterable[RecordValidator] = (),
        num_replicas: int = 10,
        state_upload_limit: float | None = None,
        upload_limit: float | None = None,
        await_ready: bool = True,
        daemon: bool = True,
        shutdown_timeout: float = _SHUTDOWN_S,
        startup_timeout: float | None = None,
        **options: Unpack[DhtOptions],
    ) -> None:
        check_dht_options(options)
        given = options.get("bootstrap_timeout")
        self._patient = startup_timeout is not None or given is not None
        startup_timeout = seconds("startup_timeout", startup_timeout, _STARTUP_S)
        self._startup_timeout = seconds("bootstrap_timeout", given, startup_timeout)
        self._shutdown_timeout = seconds("shutdown_timeout", shutdown_timeout, _SHUTDOWN_S)
        self.events = EventBus()
        runs: list[str] = []
        self._initial_peers = parse_peers(
            initial_peers, skipped=lambda why: self._skip("initial_peers", why), invited=runs.append
        )
        self._invited_to = frozenset(runs)
        self._listen = one_place("/tcp/0" if host_maddrs is None else host_maddrs, "host_maddrs", self._skip)
        self._announce = one_place(announce_maddrs or "/tcp/0", "announce_maddrs", self._skip)
        self._identity = (
            Identity.ephemeral()
            if identity_path is None
            else Identity.load_or_create(path("identity_path", identity_path))
        )
        self._peers_file = None if peers_file is None else PeersFile(path("peers_file", peers_file))
        self._client_mode = None if client_mode is None else flag("client_mode", client_mode)
        if self._client_mode and announce_maddrs:
            raise ConfigError(
                "announce_maddrs tells others an address to dial, and with client_mode=True nobody can dial this peer: "
                "leave one of the two out"
            )
        self._encrypt = flag("encrypt", encrypt)
        self._validators = check_validators(record_validators)
        self._dht_settings = _dht_settings(num_replicas)
        self._state_upload_limit = _checked_limit(state_upload_limit)
        self._upload_limit = None if upload_limit is None else UploadLimit(own_number(upload_limit))
        self._joining_s = self._startup_timeout + GRACE_S
        self._running: RunningPeer | None = None
        self._shut_down = False
        if flag("start", start):
            self.run_in_background(await_ready=await_ready)

    def _skip(self, argument: str, why: str) -> None:
        self.events.emit(Warned(where=argument, message=f"one address is skipped: {why}"))

    # -------------------------------------------------------------------------------------------------- life and death

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Listen and join the network.

        Args:
            await_ready: wait until the network is joined; otherwise `wait_until_ready`, or the next call, waits.
            timeout: seconds; default `startup_timeout`.

        Raises:
            ConfigError: the address cannot be listened on, or the initial peer is another program with this identity.
            PeerUnreachable: no initial peer answered.
            LocalError: this object runs already.
            ClosedError: this object was shut down.
        """
        if self._shut_down:
            raise ClosedError("the DHT was shut down: make another one")
        if self._running is not None:
            self._running.thread.check_alive()
            raise LocalError("this DHT was started already, and is started only once: make another one")
        limit_s = seconds("timeout", timeout, self._startup_timeout)
        self._joining_s = limit_s + GRACE_S
        kept = () if self._peers_file is None else self._peers_file.read(self._identity.peer_id)
        transport = TcpTransport(
            self._identity,
            host=self._listen[0],
            port=self._listen[1],
            towards=(*self._initial_peers, *kept),
            announce_host=self._announce[0],
            announce_port=self._announce[1],
            client_mode=bool(self._client_mode),
            encrypt=self._encrypt,
            upload_limit=self._upload_limit,
        )
        self._running = running = RunningPeer(self._identity, transport, self.events, self._shutdown_timeout)
        weakref.finalize(self, running.stop, wait=False).atexit = False
        running.start(
            self._initial_peers,
            kept=kept,
            peers_file=self._peers_file,
            invited_to=self._invited_to,
            client_mode=self._client_mode,
            dht_settings=self._dht_settings,
            validators=self._validators,
            state_upload_limit=self._state_upload_limit,
            timeout_s=limit_s,
            patient=self._patient or timeout is not None,
        )
        if await_ready:
            try:
                self.wait_until_ready()
            except BaseException:
                self.shutdown()
                raise

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the network is joined; raises the error of joining.

        Args:
            timeout: seconds; default: the time that joining may take.

        Raises:
            PeerTimeout: the network was not joined within `timeout`.
            ConfigError, PeerUnreachable: as `run_in_background`.
        """
        try:
            self.core(timeout)
        except (ConfigError, PeerUnreachable) as error:
            raise error.with_traceback(None) from None  # its traceback in the loop helps nobody

    def core(self, timeout: float | None = None) -> PeerCore:
        """The async core, for code that runs in the loop (`loop_thread`). Waits until the network is joined.

        Args:
            timeout: seconds; default: the time that joining may take.

        Raises:
            ClosedError: the DHT was shut down, or this process is a fork of the one that made it.
            LocalError: the DHT was not started; or shoal's own thread called before the network was joined.
            PeerTimeout, ConfigError, PeerUnreachable: as `wait_until_ready`.
        """
        running = self._started()
        running.thread.check_alive()
        limit_s = self._joining_s if timeout is None else timeout
        if not running.thread.is_current() and not running.ready.wait(limit_s):
            raise PeerTimeout(f"the network was not joined within {seconds_text(limit_s)}")
        return running.ready.result()

    def _started(self) -> RunningPeer:
        if self._running is None:
            raise LocalError("this DHT was not started: pass start=True or call run_in_background()")
        return self._running

    @property
    def loop_thread(self) -> LoopThread:
        """The thread in which this peer runs."""
        return self._started().thread

    def is_alive(self) -> bool:
        """Whether this object was started and not shut down. False in a forked child."""
        return self._running is not None and self._running.thread.alive

    def at_shutdown(self, closer: Closer) -> Callable[[], None]:
        """Run `closer` in the loop before the endpoint closes, for an object built on this DHT. The last runs first.

        Returns:
            A function that removes `closer`.
        """
        return self._started().add_closer(closer)

    def shutdown(self) -> None:
        """Leave the network in order; averagers and optimizers of this DHT end too.

        Afterwards no thread, socket or task of this peer is left. Safe to call twice, and from any thread; from shoal's
        own thread (an event subscriber) it returns at once, and the rest follows.
        """
        self._shut_down = True
        if self._running is not None:
            self._running.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        raise LocalError(
            "a shoal.DHT is a running peer, and cannot be copied or pickled: give the other process its invite(), and "
            "start a shoal.DHT with that there"
        )

    def __repr__(self) -> str:
        return f"DHT({self.peer_id.short()}, {'running' if self.is_alive() else 'not running'})"

    # ------------------------------------------------------------------------------------------------------ who we are

    @property
    def peer_id(self) -> PeerID:
        """This peer's identity."""
        return self._identity.peer_id

    @property
    def client_mode(self) -> bool:
        """Whether this peer only dials now. With `client_mode=None` this waits until the network is joined."""
        if self._client_mode is None and self._running is not None:
            return self.core().client_mode
        return bool(self._client_mode)

    @property
    def only_dials(self) -> bool:
        """Whether this peer was made with `client_mode=True`, so that it never listens and cannot be reached later."""
        return bool(self._client_mode)

    def get_visible_maddrs(self, latest: bool = False) -> list[Address]:
        """The addresses of this peer: others pass their `str` as `initial_peers`. Empty in client mode.

        Args:
            latest: kept for compatibility: the addresses are always the present ones.
        """
        return list(self.core().endpoint.contact.addresses)

    def invite(self, run_id: str = "") -> Invite:
        """An invite: one line of text with which others can join.

        In client mode nobody can dial this peer, so the invite leads to the peers that it was given itself.

        Args:
            run_id: the run to which it invites; empty: only to the network.

        Raises:
            LocalError: in client mode this peer was given none.
        """
        core = self.core()
        ways_in = core.node.initial_peers if core.client_mode else [core.endpoint.contact]
        addresses = [address for contact in ways_in for address in contact.addresses]
        if not addresses:
            raise LocalError(
                "a peer in client mode cannot be dialed, and this one was given no peer that can: invite with an "
                "address of another peer"
            )
        return Invite(tuple(addresses[:_MOST_WAYS_IN]), run_id)

    def add_validators(self, record_validators: Iterable[RecordValidator]) -> None:
        """Apply further rules to records from now on; before the start, from the start on.

        Raises:
            ConfigError: an argument is no validator.
        """
        further = check_validators(record_validators)
        if self._running is None:
            self._validators += further
            return
        node = self.core().node

        async def add() -> None:
            node.add_validators(*further)

        self.loop_thread.run(add(), GRACE_S)

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
            return_future: once the network is joined, return at once.

        Returns:
            Whether some peer holds it now (with `return_future` a future of that). Also False if this peer's own
            validators refuse it (with a warning), or those of all others.

        Raises:
            ConfigError: an argument is wrong.
            ClosedError: the DHT was shut down.
        """
        if ahead_s := self.core().endpoint.clock.ahead_s:
            expiration_time += ahead_s
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
    ) -> ValueWithExpiration | LoopFuture[ValueWithExpiration | None] | None:
        """The value of a key with its expiration; for a dictionary `{subkey: ValueWithExpiration}`; None if not found.

        Args:
            key: the key that was given to `store`.
            latest: ask all peers that should hold it, and take the record that expires last. Otherwise the first answer
                counts.
            return_future: once the network is joined, return at once.

        Raises:
            ConfigError: the key is neither text nor bytes.
            ClosedError: the DHT was shut down.
        """
        work = _get(self.core(), key, latest=latest)
        return self.loop_thread.submit(work) if return_future else self._wait(work)

    @overload
    def run_coroutine(
        self,
        function: Callable[[DHT, DhtNode], Coroutine[Any, Any, T]],
        return_future: Literal[False] = False,
        timeout: float | None = None,
    ) -> T: ...
    @overload
    def run_coroutine(
        self, function: Callable[[DHT, DhtNode], Coroutine[Any, Any, T]], return_future: Literal[True]
    ) -> LoopFuture[T]: ...
    def run_coroutine(
        self,
        function: Callable[[DHT, DhtNode], Coroutine[Any, Any, T]],
        return_future: bool = False,
        timeout: float | None = None,
    ) -> T | LoopFuture[T]:
        """Await `function(dht, node)` in shoal's own thread: for several operations on the node in a row.

        Args:
            function: a coroutine function. It must not block: nothing else of this peer goes on meanwhile. Expirations
                are in the network's time here (`dht.core().env.clock.time()`).
            return_future: once the network is joined, return at once.
            timeout: seconds to wait for the result; None: 300.

        Returns:
            The result of the function; raises its errors. Interrupting the wait, or cancelling the future, cancels it.

        Raises:
            ClosedError: the DHT was shut down, perhaps while the function ran.
            LocalError: shoal's own thread called, which would wait for itself; or no result came within `timeout`.
        """
        limit_s = seconds("timeout", timeout, _COROUTINE_S)
        work = function(self, self.core().node)
        return self.loop_thread.submit(work) if return_future else self.loop_thread.run(work, limit_s)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop_thread.run(work, self.core().node.settings.timeout_s + GRACE_S)


async def _get(core: PeerCore, key: str | bytes, *, latest: bool) -> ValueWithExpiration | None:
    found = await core.node.get(key, latest=latest)
    return None if found is None else _by_our_clock(found, core.endpoint.clock.ahead_s)


def _by_our_clock(found: ValueWithExpiration, ahead_s: float) -> ValueWithExpiration:
    """Translate an expiration: records have the network's time, and the program reads the time of its machine."""
    value = found.value
    if isinstance(value, dict):
        value = {
            name: _by_our_clock(entry, ahead_s) if isinstance(entry, ValueWithExpiration) else entry
            for name, entry in value.items()
        }
    return ValueWithExpiration(value, found.expiration_time - ahead_s)


def _dht_settings(replicas: int) -> DhtSettings:
    try:
        return DhtSettings(replicas=own_number(replicas))
    except ConfigError as error:
        raise ConfigError(f"num_{error}") from None


def _checked_limit(limit: float | None) -> float | None:
    if (limit := own_number(limit)) is None:
        return None
    from shoal.state.wire import Pacer  # noqa: PLC0415 (a peer without tensors does without torch)

    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise ConfigError(f"state_upload_limit must be a number of bytes per second, or None, got {limit!r}")
    try:
        Pacer(limit)
    except ConfigError as error:
        raise ConfigError(f"state_upload_limit: {error}") from None
    return float(limit)
