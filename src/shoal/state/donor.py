"""The donor's side: shows what state there is, and sends it.

One `StateServer` per endpoint serves all states that this peer shares, each under its prefix, and keeps their bounds:
how many receivers at a time, how much upload. What a receiver asks for is checked; a wrong request costs it the stream.
A receiver that does not read is left after `send_stall_s`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable

import msgspec

from shoal.clock import Env
from shoal.errors import ClosedError, ConfigError, PeerProtocolError, PeerRefused
from shoal.events import PeerDropped, StateServed, Warned
from shoal.peer import PeerID
from shoal.rpc import Endpoint, Stream
from shoal.state.pace import Pacer
from shoal.state.snapshot import HoldState, Snapshot, SnapshotStore
from shoal.wire import Chunk, FetchChunks, GetManifest, ManifestPending, ManifestReply

__all__ = ["ShareLimits", "StateDonor", "StateServer"]

_ANSWER_WITHIN_S = 2.0
"""A snapshot that takes longer to make is answered with "not yet": so a receiver can tell a slow donor from a dead one."""

_MESSAGE_ROOM = 1024


class ShareLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What sharing state may cost this peer.

    Attributes:
        upload_bytes_per_s: the rate at which state is sent, over all receivers; None for no limit.
        max_receivers: streams that are served at the same time; more are asked to come again.
        max_receivers_per_peer: how many of them may be one peer's.
        max_snapshots: copies of one state at any time.
        linger_s: how long a copy that nobody takes is kept, seconds.
        send_stall_s: a receiver that does not take a piece of a chunk within this time is left.
    """

    upload_bytes_per_s: float | None = None
    max_receivers: int = 16
    max_receivers_per_peer: int = 4
    max_snapshots: int = 2
    linger_s: float = 10.0
    send_stall_s: float = 30.0


class StateDonor:
    """One shared state. Made by `StateServer.share`.

    Attributes:
        prefix: what receivers ask for it by.
        enabled: set it to False to refuse new receivers for a while; those being served are served on.
    """

    def __init__(self, prefix: str, store: SnapshotStore, stop: Callable[[StateDonor], None]) -> None:
        self.prefix = prefix
        self.enabled = True
        self.store = store
        self._stop = stop
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once `stop` was called."""
        return self._stopped

    def stop(self) -> None:
        """Share it no more; receivers being served are told so. Frees the snapshots. Safe to call twice."""
        if not self._stopped:
            self._stopped = True
            self.store.close()
            self._stop(self)


class StateServer:
    """Serves the states that this peer shares. One per endpoint.

    Args:
        endpoint: where it is served.
        env: chance, executor, events.
        limits: what it may cost.

    Raises:
        ConfigError: a limit is out of range.
    """

    def __init__(self, endpoint: Endpoint, env: Env, *, limits: ShareLimits | None = None) -> None:
        self._endpoint, self._env, self._limits = endpoint, env, limits or ShareLimits()
        for name in ("max_receivers", "max_receivers_per_peer", "max_snapshots"):
            if getattr(self._limits, name) < 1:
                raise ConfigError(f"{name} is {getattr(self._limits, name)}, must be at least 1")
        self._pacer = Pacer(self._limits.upload_bytes_per_s)
        self._donors: dict[str, StateDonor] = {}
        self._serving: Counter[PeerID] = Counter()
        endpoint.serve(GetManifest, self._show)
        endpoint.serve_stream(FetchChunks, self._send)

    def share(self, prefix: str, hold: HoldState, version: Callable[[], Hashable]) -> StateDonor:
        """Share a state until the donor's `stop` is called.

        Args:
            prefix: what receivers ask for it by.
            hold: `async with hold() as state` gives the state and keeps it still (the owner's lock) until the end of
                the block, which lasts as long as it takes to copy the tensors.
            version: the current version of the state, such as (epoch, digest): any value, cheap to get, different
                whenever the state is. Receivers that ask at the same version share one copy.

        Raises:
            ConfigError: something is shared under this prefix already.
        """
        if prefix in self._donors:
            raise ConfigError(f"a state is shared under {prefix!r} already: choose another prefix or stop that one")
        store = SnapshotStore(
            self._env,
            hold,
            version,
            max_snapshots=self._limits.max_snapshots,
            linger_s=self._limits.linger_s,
            max_message_bytes=self._endpoint.limits.header_bytes - _MESSAGE_ROOM,
        )
        donor = self._donors[prefix] = StateDonor(prefix, store, self._forget)
        return donor

    def close(self) -> None:
        """Share nothing any more. Safe to call twice."""
        for donor in list(self._donors.values()):
            donor.stop()

    def _forget(self, donor: StateDonor) -> None:
        self._donors.pop(donor.prefix, None)

    # ------------------------------------------------------------------------------------------------------- serving

    def _donor(self, prefix: str) -> StateDonor:
        donor = self._donors.get(prefix)
        if donor is None:
            raise PeerRefused(f"no state is shared here under {prefix[:64]!r}")
        if not donor.enabled:
            raise PeerRefused("state sharing is switched off here")
        return donor

    def _busy(self, peer: PeerID) -> bool:
        limits = self._limits
        return self._serving.total() >= limits.max_receivers or self._serving[peer] >= limits.max_receivers_per_peer

    async def _show(self, peer: PeerID, request: GetManifest) -> ManifestReply | ManifestPending:
        donor = self._donor(request.prefix)
        if self._busy(peer):
            return ManifestPending(busy=True)
        try:
            snapshot = await donor.store.current(timeout_s=_ANSWER_WITHIN_S)
        except ClosedError as error:
            raise PeerRefused(str(error)) from None
        except ConfigError as error:
            self._env.events.emit(Warned(where=f"state sharing under {donor.prefix}", message=str(error)))
            raise PeerRefused(f"the state cannot be sent: {error}") from error
        return ManifestPending(busy=False) if snapshot is None else snapshot.message

    async def _send(self, stream: Stream[Chunk, Chunk], opening: FetchChunks) -> None:
        peer = stream.peer_id
        donor = self._donor(opening.prefix)
        snapshot = donor.store.find(opening.snapshot)
        if snapshot is None:
            raise PeerRefused("this snapshot is gone: ask for the manifest again")
        if self._busy(peer):
            raise PeerRefused("busy: too many receivers at the moment")
        known = len(snapshot.manifest.hashes)
        if len(set(opening.chunks)) != len(opening.chunks) or not all(0 <= chunk < known for chunk in opening.chunks):
            self._env.events.emit(PeerDropped(peer=peer, where="state sharing", reason="asked for impossible chunks"))
            raise PeerProtocolError("asked for chunks that do not exist, or twice for one", peer)
        self._serving[peer] += 1
        donor.store.begin(snapshot)
        sent = 0
        try:
            for chunk in opening.chunks:
                sent += await self._send_chunk(stream, donor, snapshot, chunk)
        finally:
            donor.store.end(snapshot)
            self._serving -= Counter({peer: 1})
            if sent:
                self._env.events.emit(StateServed(prefix=donor.prefix, peer=peer, bytes_sent=sent))

    async def _send_chunk(self, stream: Stream[Chunk, Chunk], donor: StateDonor, snapshot: Snapshot, chunk: int) -> int:
        start, stop = snapshot.manifest.chunk_range(chunk)
        size = self._pacer.piece_bytes(stop - start)
        for first in range(start, stop, size):
            piece = snapshot.data[first : min(first + size, stop)]
            wait_s = self._pacer.reserve(piece.nbytes, asyncio.get_running_loop().time())
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if donor.stopped:
                raise PeerRefused("the state is not shared any more")
            async with asyncio.timeout(self._limits.send_stall_s):
                await stream.send(Chunk(chunk, first - start), piece)
        return stop - start
