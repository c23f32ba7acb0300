"""The donor's side: describes the state, and sends it.

Invariants: a donor sends a snapshot, never a live tensor. Receivers, upload, the memory for snapshots and the time that
copying takes are bounded. Requests are checked, and a wrong request costs the receiver its stream. A receiver that does
not read, or that keeps its stream and asks for nothing, is dropped after `send_stall_s`. What is still under way to it
is no such time. While others wait, a receiver that takes little is left after seconds (`readers`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

from shoal.base.clock import Env, seconds_text
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import LEAST_BYTES_PER_S, Changes, WhileMoving, stopped
from shoal.errors import ClosedError, ConfigError, LocalError, PeerProtocolError, PeerRefused
from shoal.events import PeerDropped, StateServed, Warned
from shoal.protocol.wire import Chunk, FetchChunks, GetManifest, ManifestPending, ManifestReply, MoreChunks
from shoal.rpc import Endpoint, Stream
from shoal.state.wire.pace import Pacer
from shoal.state.wire.readers import Reader, Readers
from shoal.state.wire.snapshot import HoldState, ShareLimits, Snapshot, SnapshotStore
from shoal.state.wire.upload import Upload

__all__ = ["StateDonor"]

_ANSWER_WITHIN_S = 2.0
"""A snapshot that takes longer is answered with "not yet": so a receiver can tell a slow donor from a dead one."""

_MESSAGE_ROOM = 1024


class StateDonor:
    """Shares one state, from now on until `stop`.

    Args:
        endpoint: the endpoint that serves it; other donors may serve other prefixes there.
        env: chance, executor, events.
        prefix: the name by which receivers ask for it.
        hold: `async with hold() as state` gives the state and keeps it still (the owner's lock) until the end of the
            block, which lasts as long as it takes to copy the tensors.
        version: the current version of the state, such as (epoch, digest): any value, cheap to get, different whenever
            the state is. Receivers that ask at the same version share one copy.
        limits: the limits on its costs.
        pacer: an upload limit that is shared with others; None makes one from `limits`.

    Attributes:
        prefix: the name by which receivers ask for it.
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
        self._env, self.prefix, self._limits = env, prefix, limits or ShareLimits()
        for name in ("max_receivers", "max_receivers_per_peer"):
            if getattr(self._limits, name) < 1:
                raise ConfigError(f"{name} is {getattr(self._limits, name)}, must be at least 1")
        if self._limits.beside_rounds is not None and not self._limits.beside_rounds > 0:
            raise ConfigError(f"beside_rounds is {self._limits.beside_rounds}, must be above 0, or None for no limit")
        self.enabled = True
        self._upload = Upload.of(endpoint)
        self._pacer = pacer or Pacer(self._limits.upload_bytes_per_s)
        self._endpoint = endpoint
        self._readers = Readers()
        message_bytes = endpoint.limits.header_bytes - _MESSAGE_ROOM
        self._store = SnapshotStore(
            env, hold, version, self._limits, max_message_bytes=message_bytes, crowded=self._readers.make_way
        )
        self._stopped, self._told = False, ""
        self._unserve = (
            endpoint.serve(GetManifest, self._show, scope=prefix),
            endpoint.serve_stream(FetchChunks, self._send, scope=prefix),
        )

    @property
    def receivers(self) -> int:
        """Return how many streams are being served."""
        return len(self._readers)

    @property
    def snapshot(self) -> Snapshot | None:
        """The copy of the state, if there is one now."""
        return self._store.snapshot

    def stop(self) -> None:
        """Stop sharing: free the snapshots, and tell the receivers that are being served. Safe to call twice."""
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
        limits, readers = self._limits, self._readers
        if readers.of_peer(peer) >= limits.max_receivers_per_peer:
            return True
        # Keys and hosts are free: a site that has all other places does not get the last quarter.
        most_of_site = limits.max_receivers - limits.max_receivers // 4
        if len(readers) < limits.max_receivers and readers.of_site(self._endpoint.site_of(peer)) < most_of_site:
            return False
        readers.make_way(asyncio.get_running_loop().time())
        return True

    async def _show(self, peer: PeerID, request: GetManifest) -> ManifestReply | ManifestPending:
        self._check_enabled()
        if self._busy(peer):
            sometimes("a donor is asked for its state while it is busy")
            return ManifestPending(busy=True)
        self._upload.watch()
        site = self._endpoint.site_of(peer)
        try:
            offered = await self._store.offer(peer, site, epoch=request.epoch, timeout_s=_ANSWER_WITHIN_S)
        except ClosedError as error:
            raise PeerRefused(str(error)) from None
        except (ConfigError, LocalError) as error:
            if self._told != str(error):  # newcomers ask again and again
                self._told = str(error)
                self._env.events.emit(Warned(where=f"state sharing under {self.prefix!r}", message=self._told))
            raise PeerRefused(f"the state cannot be sent: {error}") from error
        self._told = ""
        if not isinstance(offered, Snapshot):
            return offered
        self._upload.count(offered.message_bytes)
        return offered.message

    async def _send(self, stream: Stream[Chunk, MoreChunks], opening: FetchChunks) -> None:
        peer = stream.peer_id
        self._check_enabled()
        snapshot = self._store.find(opening.snapshot)
        if snapshot is None:
            sometimes("a copy of the state is gone when its chunks are asked for")
            raise PeerRefused("this snapshot is gone: ask for the manifest again")
        if self._busy(peer):
            raise PeerRefused("busy: too many receivers at the moment")
        loop, site, sent = asyncio.get_running_loop(), self._endpoint.site_of(peer), 0
        wishes = _Wishes(stream, len(snapshot.manifest.hashes))
        async with asyncio.timeout(None) as limit:
            reader = Reader(
                peer,
                site,
                lambda: stream.bytes_acked or stream.bytes_sent,
                lambda: limit.reschedule(loop.time()),
                loop.time(),
            )
            self._readers.add(reader)
            self._store.begin(snapshot, peer)
            try:
                wishes.add(opening.chunks)
                with self._upload.stream(stream):
                    while (chunk := await self._next_wish(wishes, reader)) is not None:
                        sent += await self._send_chunk(stream, reader, snapshot, chunk)
            except PeerProtocolError as error:
                self._env.events.emit(PeerDropped(peer=peer, where="state sharing", reason=error.message))
                raise
            finally:
                self._readers.remove(reader, loop.time())
                self._store.end(snapshot, site, sent)
                await wishes.close()
                if sent:
                    self._env.events.emit(StateServed(prefix=self.prefix, peer=peer, bytes_sent=sent))

    async def _next_wish(self, wishes: _Wishes, reader: Reader) -> int | None:
        with reader.awaited(asyncio.get_running_loop().time):
            return await wishes.next(self._limits.send_stall_s)

    async def _send_chunk(
        self, stream: Stream[Chunk, MoreChunks], reader: Reader, snapshot: Snapshot, chunk: int
    ) -> int:
        start, stop = snapshot.manifest.chunk_range(chunk)
        pacer, fraction = self._pacer, self._limits.beside_rounds
        first, time = start, asyncio.get_running_loop().time
        while first < stop:
            piece = snapshot.data[first : first + self._upload.piece_bytes(stop - first, pacer, fraction)]
            await self._upload.admit(piece.nbytes, pacer, fraction)
            if self._stopped:
                raise PeerRefused("the state is not shared any more")
            if snapshot.over:
                raise PeerRefused("others have waited long for a newer state: ask for the manifest again")
            with reader.awaited(time):
                async with WhileMoving(self._limits.send_stall_s, lambda: stream.bytes_moved):
                    await stream.send(Chunk(chunk, first - start), piece)
            first += piece.nbytes
        return stop - start


class _Wishes:
    """The chunks that one receiver has asked for and not yet got; reads on while chunks are sent.

    Args:
        stream: the receiver's.
        known: how many chunks there are.
    """

    def __init__(self, stream: Stream[Chunk, MoreChunks], known: int) -> None:
        self._stream, self._known = stream, known
        self._asked: set[int] = set()
        self._queue: deque[int] = deque()
        self._changes = Changes()
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self._reader.add_done_callback(lambda _: self._changes.notify())

    def add(self, chunks: list[int]) -> None:
        """Queue them.

        Raises:
            PeerProtocolError: one does not exist, or was asked for before.
        """
        if not all(0 <= chunk < self._known for chunk in chunks):
            raise PeerProtocolError("asked for chunks that do not exist", self._stream.peer_id)
        if len(set(chunks)) != len(chunks) or not self._asked.isdisjoint(chunks):
            raise PeerProtocolError("asked twice for one chunk", self._stream.peer_id)
        self._asked.update(chunks)
        self._queue.extend(chunks)
        self._changes.notify()

    async def next(self, timeout_s: float) -> int | None:
        """The next chunk to send; None at the end.

        Raises:
            PeerError: the receiver is gone, or has broken the protocol.
            PeerRefused: the receiver has asked for nothing for `timeout_s`, though it has what it was sent.
        """
        taken = self._stream.bytes_acked
        while not self._queue and not self._reader.done():
            if not await self._changes.next(timeout_s):
                before, taken = taken, self._stream.bytes_acked  # a slow line's queues hold more than it carries soon
                if taken - before < LEAST_BYTES_PER_S * timeout_s:
                    raise PeerRefused(f"no chunk was asked for within {seconds_text(timeout_s)}")
        if self._reader.done():
            self._reader.result()
        return self._queue.popleft() if self._queue else None

    async def close(self) -> None:
        """Read no more."""
        reader = self._reader
        del self._reader
        await stopped(reader)  # the stream has ended for a reason that its sender knows, or will learn

    async def _read(self) -> None:
        while True:
            await self._stream.ready()  # a `recv` that is cancelled would end the connection before we can say why
            if (wish := await self._stream.recv()) is None:
                return
            message, nbytes = wish
            if nbytes:
                raise PeerProtocolError(f"sent {nbytes} bytes to the donor", self._stream.peer_id)
            self.add(message.chunks)
