"""The receiver's side: get a complete, verified state from donors that may lie, stall, change or die.

Donors are tried in order of priority, ties by chance. From each: its manifest, checked; then the chunks that are still
missing, each checked against its hash. Rules:

- What is returned is exactly the snapshot of the last donor's manifest: complete, every chunk verified, metadata of
  the same manifest. Otherwise `StateUnavailable`, and nothing was handed over.
- When a donor fails midway the next one goes on: chunks whose hash is the same in its manifest are kept. If its state
  is laid out differently the download begins anew.
- A donor that breaks the protocol (a wrong hash, an impossible manifest) is dropped by name and not asked again. One
  that was lost or fell silent is asked again if its turn brought at least one chunk, and after that may fail twice in
  a row: so turns come to an end. One that is busy is asked again later.
- The state is held once (see `assembly`); a chunk is received straight into its place.

One donor sends at a time. The plan (`plan`) would let several.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from shoal.clock import Backoff, Env
from shoal.errors import ConfigError, PeerError, PeerProtocolError, PeerRefused, PeerTimeout, StateUnavailable
from shoal.events import PeerDropped, StateDownloaded
from shoal.peer import PeerID
from shoal.rpc import Endpoint, Stream
from shoal.state.assembly import Assembly
from shoal.state.manifest import Accept, Manifest, read_manifest
from shoal.state.plan import ChunkPlan
from shoal.wire import Chunk, Contact, FetchChunks, GetManifest, ManifestPending

__all__ = ["Donor", "DownloadLimits", "DownloadedState", "download_state"]

_READ_BYTES = 128 << 10
"""Bytes that must arrive within the stall limit: whoever is slower than 26 kB/s counts as stalled."""

_CHECKS_AT_ONCE = 4
_END_WITHIN_S = 1.0
_BUSY_REFUSALS = 5
_FAILURES_AFTER_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class Donor:
    """A peer that may have the state.

    Attributes:
        contact: how it is reached; a peer id alone for one that we have a link with.
        priority: donors of higher priority (usually the epoch) are asked first.
    """

    contact: Contact | PeerID
    priority: float = 0.0

    @property
    def peer(self) -> PeerID:
        """Who it is."""
        return self.contact.peer if isinstance(self.contact, Contact) else self.contact


class DownloadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a donor may cost us.

    Attributes:
        max_state_bytes: the largest state that is taken.
        stall_s: a donor that answers or sends nothing for this long is left.
        manifest_timeout_s: longest time that a donor may take to make its snapshot.
        require_finite: refuse a state that holds NaN or infinity.
    """

    max_state_bytes: int = 64 << 30
    stall_s: float = 5.0
    manifest_timeout_s: float = 60.0
    require_finite: bool = True


@dataclass(frozen=True)
class DownloadedState:
    """A complete and verified state.

    Attributes:
        metadata: plain values, from the donor whose snapshot this is.
        tensors: new tensors in host memory.
        epoch: the epoch that the donor says it is of.
        donors: whose chunks these are; the first is the one whose snapshot this is.
        bytes_received: payload received, what had to be fetched again included.
        duration_s: seconds.
    """

    metadata: Any
    tensors: list[torch.Tensor]
    epoch: int
    donors: tuple[PeerID, ...]
    bytes_received: int
    duration_s: float


async def download_state(
    endpoint: Endpoint,
    env: Env,
    prefix: str,
    donors: Sequence[Donor],
    *,
    timeout_s: float,
    accept: Accept | None = None,
    limits: DownloadLimits | None = None,
) -> DownloadedState:
    """Download the state that is shared under `prefix`.

    Args:
        endpoint: reaches the donors.
        env: chance (order of equal donors), executor (hashing), events.
        prefix: which state.
        donors: whom to ask.
        timeout_s: longest time in all, seconds.
        accept: looks at each manifest before anything is fetched; None takes any. See `matching`.
        limits: what a donor may cost.

    Raises:
        StateUnavailable: no donor gave it; the message has each donor's reason. Nothing was changed.
        ConfigError: `timeout_s` is not positive.
    """
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s}, must be more than 0 seconds")
    download = _Download(endpoint, env, prefix, accept, limits or DownloadLimits())
    try:
        async with asyncio.timeout(timeout_s):
            return await download.run(donors)
    except TimeoutError:
        raise StateUnavailable(download.describe(f"no complete state within {timeout_s:g} s")) from None


class _Busy(Exception):
    """The donor asks us to come again; no fault of its own."""


class _Download:
    """One call of `download_state`."""

    def __init__(
        self, endpoint: Endpoint, env: Env, prefix: str, accept: Accept | None, limits: DownloadLimits
    ) -> None:
        self._endpoint, self._env, self._prefix = endpoint, env, prefix
        self._accept, self._limits = accept, limits
        self._plan: ChunkPlan[PeerID] | None = None
        self._assembly: Assembly | None = None
        self._reasons: dict[PeerID, str] = {}
        self._refusals: dict[PeerID, int] = {}
        self._failures_left: dict[PeerID, int] = {}
        self._bytes_received = 0
        self._chunks_received = 0
        self._started = asyncio.get_running_loop().time()

    def describe(self, what: str) -> str:
        """What happened, and what each donor did."""
        reasons = "; ".join(f"{peer.short()}: {reason}" for peer, reason in self._reasons.items())
        return f"{what} for {self._prefix!r} ({reasons or 'nobody to ask'})"

    async def run(self, donors: Sequence[Donor]) -> DownloadedState:
        """Ask the donors in turn until one download is complete."""
        queue = deque(self._in_order(donors))
        later: list[Donor] = []
        backoff = Backoff(self._env.rng, first_s=0.2, max_s=2.0)
        while queue or later:
            if not queue:
                await asyncio.sleep(backoff.next_s())
                queue.extend(later)
                later.clear()
            donor = queue.popleft()
            before = self._chunks_received
            try:
                return await self._take_from(donor)
            except _Busy:
                self._reasons[donor.peer] = "busy"
                later.append(donor)
            except PeerProtocolError as error:
                self._reasons[donor.peer] = error.message
                self._env.events.emit(PeerDropped(peer=donor.peer, where="state download", reason=error.message))
            except PeerError as error:
                self._reasons[donor.peer] = error.message
                if self._chunks_received > before:
                    self._failures_left[donor.peer] = _FAILURES_AFTER_CHUNKS
                    queue.append(donor)
                elif self._failures_left.get(donor.peer, 0) > 0:
                    self._failures_left[donor.peer] -= 1
                    later.append(donor)
        raise StateUnavailable(self.describe("no donor gave a complete state"))

    def _in_order(self, donors: Sequence[Donor]) -> list[Donor]:
        others = {donor.peer: donor for donor in donors if donor.peer != self._endpoint.peer_id}
        shuffled = sorted(others.values(), key=lambda donor: donor.peer)
        self._env.rng.shuffle(shuffled)
        return sorted(shuffled, key=lambda donor: -donor.priority)

    # ----------------------------------------------------------------------------------------------------- one donor

    async def _take_from(self, donor: Donor) -> DownloadedState:
        manifest = await self._ask(donor)
        if self._accept is not None and (reason := self._accept(manifest)):
            raise PeerRefused(reason, donor.peer)
        plan, assembly = self._move_to(manifest)
        plan.offer(donor.peer, manifest)
        if wanted := plan.take(donor.peer):
            try:
                await self._fetch(donor, plan, assembly, wanted)
            finally:
                plan.release(donor.peer)
        return await self._finish(donor, plan, assembly)

    async def _ask(self, donor: Donor) -> Manifest:
        """The donor's manifest, checked; waits while it is being made."""
        loop, limits = asyncio.get_running_loop(), self._limits
        give_up_at = loop.time() + limits.manifest_timeout_s
        while loop.time() < give_up_at:
            request = GetManifest(self._prefix)
            reply = await self._endpoint.call(donor.contact, request, timeout_s=limits.stall_s)
            if not isinstance(reply, ManifestPending):
                try:
                    return read_manifest(reply, max_state_bytes=limits.max_state_bytes)
                except PeerProtocolError as error:
                    raise PeerProtocolError(error.message, donor.peer) from error
            if reply.busy:
                raise _Busy
            await asyncio.sleep(0.05)  # it has waited for us already, unless it is out to make us spin
        raise PeerTimeout(f"made no snapshot within {limits.manifest_timeout_s:g} s", donor.peer)

    def _move_to(self, manifest: Manifest) -> tuple[ChunkPlan[PeerID], Assembly]:
        if self._plan is None:
            self._plan = ChunkPlan(manifest)
        elif not self._plan.move_to(manifest):
            self._assembly = None  # freed before the next one takes memory
        if self._assembly is None:
            self._assembly = Assembly(manifest)
        return self._plan, self._assembly

    async def _fetch(self, donor: Donor, plan: ChunkPlan[PeerID], assembly: Assembly, wanted: list[int]) -> None:
        opening = FetchChunks(self._prefix, plan.manifest.snapshot, wanted)
        stream = await self._endpoint.open(donor.contact, opening, timeout_s=self._limits.stall_s)
        checks: deque[tuple[int, asyncio.Task[bool]]] = deque()
        failure: PeerError | None = None
        before = self._chunks_received
        try:
            await self._receive(stream, plan, assembly, wanted, checks)
        except PeerError as error:
            failure = error
        finally:
            stream.abort()  # nothing to do after an orderly end
        await self._settle(donor.peer, plan, checks, leave=0)
        if isinstance(failure, PeerRefused) and self._chunks_received == before:
            self._refusals[donor.peer] = self._refusals.get(donor.peer, 0) + 1
            if self._refusals[donor.peer] < _BUSY_REFUSALS:
                raise _Busy from failure
        if failure is not None and not plan.complete:
            raise failure

    async def _receive(
        self,
        stream: Stream[Chunk, Chunk],
        plan: ChunkPlan[PeerID],
        assembly: Assembly,
        wanted: list[int],
        checks: deque[tuple[int, asyncio.Task[bool]]],
    ) -> None:
        loop, stall_s = asyncio.get_running_loop(), self._limits.stall_s
        try:
            async with asyncio.timeout(stall_s) as limit:
                await stream.end()
                for chunk in wanted:
                    await self._receive_chunk(stream, plan.manifest, assembly, chunk, limit)
                    limit.reschedule(None)  # hashing is our own time
                    digest = plan.manifest.hashes[chunk]
                    check = loop.create_task(self._env.executor.run(assembly.has, chunk, digest))
                    checks.append((chunk, check))
                    await self._settle(stream.peer_id, plan, checks, leave=_CHECKS_AT_ONCE)
                    limit.reschedule(loop.time() + stall_s)
                limit.reschedule(loop.time() + min(stall_s, _END_WITHIN_S))
                await stream.finish()  # so that the connection can carry the next stream
        except TimeoutError as error:
            if isinstance(error, PeerError):
                raise
            raise PeerTimeout(f"sent nothing for {stall_s:g} s", stream.peer_id) from None

    async def _receive_chunk(
        self, stream: Stream[Chunk, Chunk], manifest: Manifest, assembly: Assembly, chunk: int, limit: asyncio.Timeout
    ) -> None:
        start, stop = manifest.chunk_range(chunk)
        loop, stall_s = asyncio.get_running_loop(), self._limits.stall_s
        places = deque(assembly.buffers(chunk))
        received, announced = 0, 0
        while received < stop - start:
            if not announced:
                announced = await self._next_piece(stream, chunk, received, stop - start)
            place = places.popleft()
            part = place[: min(place.nbytes, announced, _READ_BYTES)]
            if part.nbytes < place.nbytes:
                places.appendleft(place[part.nbytes :])
            await stream.readinto(part)
            received, announced = received + part.nbytes, announced - part.nbytes
            self._bytes_received += part.nbytes
            limit.reschedule(loop.time() + stall_s)

    async def _next_piece(self, stream: Stream[Chunk, Chunk], chunk: int, received: int, total: int) -> int:
        came = await stream.recv()
        if came is None:
            raise PeerProtocolError(f"ended before chunk {chunk}", stream.peer_id)
        message, nbytes = came
        if message.index != chunk or message.offset != received or not 0 < nbytes <= total - received:
            raise PeerProtocolError(
                f"sent {nbytes} bytes of chunk {message.index} at {message.offset}, "
                f"expected chunk {chunk} at {received}",
                stream.peer_id,
            )
        return nbytes

    async def _settle(
        self, peer: PeerID, plan: ChunkPlan[PeerID], checks: deque[tuple[int, asyncio.Task[bool]]], *, leave: int
    ) -> None:
        """Wait for checks until at most `leave` are under way. A wrong one is the donor's fault."""
        wrong: int | None = None
        while len(checks) > leave:
            chunk, check = checks.popleft()
            if await check:
                plan.verify(chunk)
                self._chunks_received += 1
            else:
                wrong, leave = chunk, 0
        if wrong is not None:
            raise PeerProtocolError(f"chunk {wrong} does not match its hash", peer)

    # ----------------------------------------------------------------------------------------------------- all of it

    async def _finish(self, donor: Donor, plan: ChunkPlan[PeerID], assembly: Assembly) -> DownloadedState:
        manifest = plan.manifest
        # Whatever comes of it, the buffers are used up: another donor would begin anew.
        self._plan = self._assembly = None
        try:
            finish = assembly.finish
            tensors = await self._env.executor.run(finish, require_finite=self._limits.require_finite)
        except PeerProtocolError as error:
            raise PeerProtocolError(error.message, donor.peer) from error
        donors = tuple(dict.fromkeys((donor.peer, *plan.contributors)))
        duration_s = asyncio.get_running_loop().time() - self._started
        self._env.events.emit(
            StateDownloaded(
                prefix=self._prefix, donors=donors, bytes_received=self._bytes_received, duration_s=duration_s
            )
        )
        return DownloadedState(manifest.metadata, tensors, manifest.epoch, donors, self._bytes_received, duration_s)
