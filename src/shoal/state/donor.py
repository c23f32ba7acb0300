"""The donor's side: shows what state there is, and sends it.

Invariants: what is sent is a snapshot, never a live tensor; receivers at a time, copies and upload are bounded; what a
receiver asks for is checked, and a wrong request costs it the stream; one that does not read is left after
`send_stall_s`.
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

__all__ = ["ShareLimits", "StateDonor"]

_ANSWER_WITHIN_S = 2.0
"""A snapshot that takes longer is answered with "not yet": so a receiver can tell a slow donor from a dead one."""

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
    """Shares one state, from now on until `stop`.

    Args:
        endpoint: where it is served; other donors may serve other prefixes there.
        env: chance, executor, events.
        prefix: what receivers ask for it by.
        hold: `async with hold() as state` gives the state and keeps it still (the owner's lock) until the end of the
            block, which lasts as long as it takes to copy the tensors.
        version: the current version of the state, such as (epoch, digest): any value, cheap to get, different whenever
            the state is. Receivers that ask at the same version share one copy.
        limits: what it may cost.
        pacer: an upload limit that is shared with others; None makes one from `limits`.

    Attributes:
        enabled: set it to False to refuse new receivers for a while; those being served are served on.

    Raises:
        ConfigError: a limit is out of range.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        env: Env,
        prefix: str,
        hold: HoldState,
        version: Callable[[], Hashable],
        *,
        limits: ShareLimits | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self._env, self._prefix, self._limits = env, prefix, limits or ShareLimits()
        for name in ("max_receivers", "max_receivers_per_peer", "max_snapshots"):
            if getattr(self._limits, name) < 1:
                raise ConfigError(f"{name} is {getattr(self._limits, name)}, must be at least 1")
        self.enabled = True
        self._pacer = pacer or Pacer(self._limits.upload_bytes_per_s)
        self._serving: Counter[PeerID] = Counter()
        self._store = SnapshotStore(
            env,
            hold,
            version,
            max_snapshots=self._limits.max_snapshots,
            linger_s=self._limits.linger_s,
            max_message_bytes=endpoint.limits.header_bytes - _MESSAGE_ROOM,
        )
        self._stopped = False
        self._unserve = (
            endpoint.serve(GetManifest, self._show, scope=prefix),
            endpoint.serve_stream(FetchChunks, self._send, scope=prefix),
        )

    @property
    def prefix(self) -> str:
        """What receivers ask for it by."""
        return self._prefix

    @property
    def receivers(self) -> int:
        """How many streams are being served."""
        return self._serving.total()

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The copies of the state that exist now, oldest first."""
        return self._store.held

    def stop(self) -> None:
        """Share it no more: frees the snapshots, and receivers being served are told so. Safe to call twice."""
        if not self._stopped:
            self._stopped = True
            for unserve in self._unserve:
                unserve()
            self._store.close()

    # ------------------------------------------------------------------------------------------------------- serving

    def _check_enabled(self) -> None:
        if self._stopped or not self.enabled:
            raise PeerRefused("state sharing is switched off here")

    def _busy(self, peer: PeerID) -> bool:
        limits = self._limits
        return self._serving.total() >= limits.max_receivers or self._serving[peer] >= limits.max_receivers_per_peer

    async def _show(self, peer: PeerID, request: GetManifest) -> ManifestReply | ManifestPending:
        self._check_enabled()
        if self._busy(peer):
            return ManifestPending(busy=True)
        try:
            snapshot = await self._store.current(timeout_s=_ANSWER_WITHIN_S)
        except ClosedError as error:
            raise PeerRefused(str(error)) from None
        except ConfigError as error:
            self._env.events.emit(Warned(where=f"state sharing under {self._prefix!r}", message=str(error)))
            raise PeerRefused(f"the state cannot be sent: {error}") from error
        return ManifestPending(busy=False) if snapshot is None else snapshot.message

    async def _send(self, stream: Stream[Chunk, Chunk], opening: FetchChunks) -> None:
        peer = stream.peer_id
        self._check_enabled()
        snapshot = self._store.find(opening.snapshot)
        if snapshot is None:
            raise PeerRefused("this snapshot is gone: ask for the manifest again")
        if self._busy(peer):
            raise PeerRefused("busy: too many receivers at the moment")
        known = len(snapshot.manifest.hashes)
        if len(set(opening.chunks)) != len(opening.chunks) or not all(0 <= chunk < known for chunk in opening.chunks):
            self._env.events.emit(PeerDropped(peer=peer, where="state sharing", reason="asked for impossible chunks"))
            raise PeerProtocolError("asked for chunks that do not exist, or twice for one", peer)
        self._serving[peer] += 1
        self._store.begin(snapshot)
        sent = 0
        try:
            for chunk in opening.chunks:
                sent += await self._send_chunk(stream, snapshot, chunk)
        finally:
            self._store.end(snapshot)
            self._serving -= Counter({peer: 1})
            if sent:
                self._env.events.emit(StateServed(prefix=self._prefix, peer=peer, bytes_sent=sent))

    async def _send_chunk(self, stream: Stream[Chunk, Chunk], snapshot: Snapshot, chunk: int) -> int:
        start, stop = snapshot.manifest.chunk_range(chunk)
        size = self._pacer.piece_bytes(stop - start)
        for first in range(start, stop, size):
            piece = snapshot.data[first : min(first + size, stop)]
            wait_s = self._pacer.reserve(piece.nbytes, asyncio.get_running_loop().time())
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if self._stopped:
                raise PeerRefused("the state is not shared any more")
            async with asyncio.timeout(self._limits.send_stall_s):
                await stream.send(Chunk(chunk, first - start), piece)
        return stop - start
