"""A donor's snapshots: consistent copies of the state, shared by all peers that ask while the state is the same.

Invariants:

- A snapshot is one version: the owner holds the state still (its lock) while it is encoded, and no longer. Hashing and
  sending work on the copy.
- Copies that are still downloaded take `spare_bytes` at most when another one is made. So a small state is copied anew
  whatever others do, and of a large one there is one copy, including one that is being made.
- A receiver that comes while others download a copy of a state that has moved on gets that copy, if it will do and is
  young enough; otherwise it is given a new one, or waits until there is room for one. Readers that take little are left
  then (`crowded`), and all others when their copy is old. So no receiver, by reading slowly or coming again and again,
  keeps a state from the others for ever.
- A copy that nobody uses is freed `linger_s` after its last use, or at once when its place is needed.
- Hosts that ask again and again cause few copies (`CopyLimit`), and keep no copy by asking, whatever the number of
  keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch

from shoal.base.clock import Env
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.compression import CompressionBase, NoCompression, allocate, as_tensor
from shoal.errors import ClosedError, ConfigError, LocalError, PeerProtocolError
from shoal.protocol.wire import ManifestPending, ManifestReply, encode
from shoal.rpc.rate_limiter import RateLimiter
from shoal.state.digest import DIGEST_BYTES, digest_of
from shoal.state.finite import infinite_tensors
from shoal.state.wire.manifest import (
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    Manifest,
    StateTensorSpec,
    chunk_size,
    describe,
    read_manifest,
    shares,
)

__all__ = ["CopyLimit", "HoldState", "ShareLimits", "SharedState", "Snapshot", "SnapshotStore", "StateAway"]

_HASH_AT_ONCE = 16
"""Chunks hashed in one go, so that other work gets its turn in the executor."""

_HASHERS = 4

_SMALL_BYTES = 64 << 10

_HOST_SHARE, _SHARE = 0.1, 0.25
"""The share of the time that may go into copies for one host, and for all hosts."""

_HOST_BURST_S, _BURST_S = 5.0, 10.0
"""So much copying is free after a calm."""

_LEAST_COST_S = 0.05
"""A copy costs so much at least: its owner's lock is taken for it."""

_ABOUT_TO_OPEN_S = 2.0
"""A receiver that was told of a snapshot opens a stream for it within this time, or may have to ask again."""

_TOLD_S = 10.0
"""Only those receivers of a host count so that are told within this time after its first one."""


class StateAway(LocalError):
    """The owner's tensors hold something else than the state for now, so there is nothing to copy."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state of a donor while it is held still.

    Attributes:
        metadata: plain values (as MessagePack has them) that go with the tensors.
        tensors: the live tensors, on any device; they are read, not kept.
        codecs: one per tensor; None for no compression.
        epoch: the epoch of the state.
        may_be_infinite: positions of tensors that may hold infinities (masks). A state with infinities elsewhere,
            or with NaN, went wrong: it is not shared.
        holds: whether a copy is one of the state, and not of what came into its place while it was made. It is given
            what gives the bytes of the tensor of a number. None: nothing comes there. It goes with no codecs only.
        called: what people call the tensor of a position.
    """

    metadata: Any
    tensors: Sequence[torch.Tensor]
    codecs: Sequence[CompressionBase] | None = None
    epoch: int = 0
    may_be_infinite: Collection[int] = ()
    holds: Callable[[Callable[[int], memoryview]], bool] | None = None
    called: Callable[[int], str] = "tensor {} of the state".format


HoldState = Callable[[], AbstractAsyncContextManager[SharedState]]
"""`async with hold() as state:` no tensor of `state` changes within the block: the owner's lock is held. It raises
`StateAway` where there is none for now."""


@dataclass(eq=False, slots=True)
class Snapshot:
    """One copy of the state, encoded and hashed.

    Attributes:
        version: the owner's version of the state.
        manifest: the description of its content.
        message: the manifest as it is sent.
        message_bytes: its size.
        data: the encoded tensors, one after another.
        made_at: when it was made, seconds of the loop.
        took_s: how long that took.
        streams: how many receivers are taking it.
        told: the receivers that were told of it, and when first. Being told again does not keep the copy alive.
        hosts: their hosts, and when the first one of each was told.
        used_at: when a receiver was last told of it or had finished with it.
        over: whether its readers are to be sent away.
    """

    version: Hashable
    manifest: Manifest
    message: ManifestReply
    message_bytes: int
    data: memoryview
    made_at: float
    took_s: float
    streams: int = 0
    told: dict[PeerID, float] = field(default_factory=dict)
    hosts: dict[str, float] = field(default_factory=dict)
    used_at: float = 0.0
    over: bool = False

    def in_use(self, now: float) -> bool:
        """Return whether a receiver downloads it, or is about to."""
        return self.streams > 0 or any(now - at < _ABOUT_TO_OPEN_S for at in self.told.values())


class ShareLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on the costs of sharing state.

    Attributes:
        upload_bytes_per_s: the rate at which state is sent, over all receivers; None for no limit.
        beside_rounds: while this peer sends other things (rounds of averaging), states get at most this fraction of
            their traffic, so that newcomers do not slow them; None: no such limit.
        max_receivers: streams that are served at the same time; more are asked to come again.
        max_receivers_per_peer: how many of them may be one peer's.
        spare_bytes: the memory for copies that are still being taken, beside the last one.
        join_s: while a copy is being taken, newcomers are given the same one for so long after it was made, though the
            state has moved on; after that they get the next, as soon as `spare_bytes` allow one.
        hold_s: for so long after that, readers may keep an old copy while others wait for room for the next one; then
            the readers are sent away. As long as a download may take if its user does not say otherwise. Readers that
            take far less than their share of what the donor can send are left after seconds.
        linger_s: how long a copy that nobody downloads is kept, seconds.
        send_stall_s: a receiver that takes less than 1 KiB/s of a piece for this long, or asks for none though it has
            what it was sent, is left.
    """

    upload_bytes_per_s: float | None = None
    beside_rounds: float | None = 0.1
    max_receivers: int = 16
    max_receivers_per_peer: int = 4
    spare_bytes: int = 256 << 20
    join_s: float = 120.0
    hold_s: float = 600.0
    linger_s: float = 10.0
    send_stall_s: float = 30.0


class CopyLimit:
    """How often hosts may have the state copied: copying takes the trainer's time.

    Keys are free, so the host counts, with all its peers together. Copying for one host that does not download takes a
    tenth of the time at most, for all hosts a quarter; beside that, a few seconds of it are free. A host that is sent
    the copy gets back what it cost: half of the state pays for half of a copy. So whoever downloads is never limited.

    Time is counted, not copies: where a state is small, or the machine is fast, newcomers of one host never notice the
    limit. Whoever may not have a new copy is given the last one, if that will do, or is asked to come again.
    """

    def __init__(self) -> None:
        self._hosts, self._all = RateLimiter(_HOST_SHARE, _HOST_BURST_S), RateLimiter(_SHARE, _BURST_S)

    def allows(self, host: str, now: float) -> bool:
        """Whether this host may have the state copied now (`now`: local time, seconds)."""
        return self._all.allows(None, 0.0, now) and self._hosts.allows(host, 0.0, now)

    def copied(self, host: str, took_s: float, now: float) -> None:
        """A copy was made as this host asked for it; it took so long."""
        self._charge(host, max(took_s, _LEAST_COST_S), now)

    def sent(self, host: str, took_s: float, share: float, now: float) -> None:
        """This host was sent this share of a copy that had taken so long."""
        self._charge(host, -share * max(took_s, _LEAST_COST_S), now)

    def _charge(self, host: str, seconds: float, now: float) -> None:
        self._hosts.charge(host, seconds, now)
        self._all.charge(None, seconds, now)


class SnapshotStore:
    """Makes, shares and frees the snapshots of one state.

    Args:
        env: chance and executor.
        hold: gives the state, held still.
        version: the current version of the state: cheap, and different whenever the state is.
        limits: how long a copy is given to newcomers, kept for its readers, and kept without any.
        max_message_bytes: the largest manifest that can be sent.
        crowded: called (with the time) while a receiver waits for room for a new copy.
    """

    def __init__(
        self,
        env: Env,
        hold: HoldState,
        version: Callable[[], Hashable],
        limits: ShareLimits,
        *,
        max_message_bytes: int,
        crowded: Callable[[float], None],
    ) -> None:
        self._env, self._hold, self._version = env, hold, version
        self._limits, self._max_message_bytes, self._crowded = limits, max_message_bytes, crowded
        self._kept: dict[bytes, Snapshot] = {}  # by name, the last one at the end
        self._making: asyncio.Task[Snapshot] | None = None
        self._awaited_by: dict[PeerID, str] = {}  # with their hosts
        self._copies = CopyLimit()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def snapshot(self) -> Snapshot | None:
        """The last copy, if it is kept."""
        return next(reversed(self._kept.values()), None)

    async def offer(self, peer: PeerID, host: str, *, epoch: int, timeout_s: float) -> Snapshot | ManifestPending:
        """A snapshot for this peer: of the present state, or the one that others are downloading.

        Args:
            peer: the peer that asks.
            host: where it asks from.
            epoch: the peer has no use for a state of an earlier epoch.
            timeout_s: how long to wait while a snapshot is made. It is made to the end in any case, for the next peer
                that asks.

        Returns:
            The snapshot; or that it is still being made; or that it cannot be made before others are through, that the
            state is away, or that the peer's host has had too many made (`busy`).

        Raises:
            ConfigError: the state cannot be sent (see the message).
            LocalError: no copy can be made now: there is no memory for it, or the state was held all the time.
            ClosedError: the store is closed.
        """
        if self._closed:
            raise ClosedError("the state is not shared any more")
        if self._making is None:
            if (found := self._copy_for(peer, host, epoch)) is not None:
                return found
            self._keep(lambda each, now: each.in_use(now))  # before the next one takes memory
            self._making = asyncio.get_running_loop().create_task(self._make(host))
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits
        making = self._making
        self._awaited_by[peer] = host
        await asyncio.wait({making}, timeout=timeout_s)
        if not making.done():
            return ManifestPending(busy=False)
        if making.cancelled():
            raise ClosedError("the state is not shared any more")
        try:
            return self._tell(making.result(), peer, host)
        except StateAway:
            sometimes("a donor's parameters are not those of its state")
            return ManifestPending(busy=True)

    def _copy_for(self, peer: PeerID, host: str, epoch: int) -> Snapshot | ManifestPending | None:
        """The copy that exists, or that the peer has to come again; None if another one is to be made."""
        snapshot, now = self.snapshot, asyncio.get_running_loop().time()
        if snapshot is not None and snapshot.version == self._version():
            return self._tell(snapshot, peer, host)
        used = [each for each in self._kept.values() if each.in_use(now)]
        may = self._copies.allows(host, now)
        has_room = sum(each.data.nbytes for each in used) <= self._limits.spare_bytes
        if may and has_room and snapshot not in used:
            return None
        if snapshot is not None and now - snapshot.made_at <= self._limits.join_s and snapshot.manifest.epoch >= epoch:
            return self._tell(snapshot, peer, host)
        if may and has_room:
            sometimes("a state is copied anew while an older copy is taken")
            return None
        if may:
            for each in used:
                each.over = now - each.made_at > self._limits.join_s + self._limits.hold_s
            self._crowded(now)
        return ManifestPending(busy=True)

    def find(self, name: bytes) -> Snapshot | None:
        """The snapshot of this name, if it still exists."""
        found = self._kept.get(name)
        return found if found is not None and not found.over else None

    def begin(self, snapshot: Snapshot, peer: PeerID) -> None:
        """A receiver takes this snapshot from now on: it stays until `end`."""
        snapshot.streams += 1
        snapshot.told[peer] = float("-inf")

    def end(self, snapshot: Snapshot, host: str, sent_bytes: int) -> None:
        """A receiver at this host has done with it, and was sent so much."""
        snapshot.streams -= 1
        snapshot.used_at = now = asyncio.get_running_loop().time()
        if sent_bytes:
            self._copies.sent(host, snapshot.took_s, sent_bytes / snapshot.manifest.total_bytes, now)

    def close(self) -> None:
        """Free everything; a copy that is being made is given up."""
        self._closed = True
        if self._making is not None:
            self._making.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._kept.clear()

    # -------------------------------------------------------------------------------------------------------- making

    async def _make(self, host: str) -> Snapshot:
        try:
            snapshot = await self._copy(host)
            self._kept[snapshot.manifest.snapshot] = snapshot
            for peer, its_host in self._awaited_by.items():
                self._tell(snapshot, peer, its_host)
            self._free_later()
            return snapshot
        finally:
            self._making = None
            self._awaited_by.clear()

    async def _copy(self, host: str) -> Snapshot:
        run, time = self._env.executor.run, asyncio.get_running_loop().time
        began = time()
        try:
            async with self._hold() as state:
                began = time()  # it costs nobody anything to wait for the lock
                version = self._version()
                tensors = state.tensors
                specs = list(describe(tensors, state.codecs))
                parts = shares(specs)
                looks = (run(infinite_tensors, tensors, part, state.may_be_infinite, state.called) for part in parts)
                infinite = [position for found in await asyncio.gather(*looks) for position in found]
                layout = self._plan(state, specs, infinite)
                _, data = allocate(layout.total_bytes, torch.uint8)
                await asyncio.gather(*(run(_encode, layout, tensors, part, data) for part in parts))
                if state.holds is not None and not state.holds(partial(_bytes_of, layout, data)):
                    raise StateAway("other values came into the place of the state while it was copied")
            manifest = replace(layout, hashes=tuple(await self._hash(data, layout.chunk_bytes)))
        except (MemoryError, RuntimeError) as error:  # torch raises either where there is no memory
            raise LocalError(
                f"no copy of the state can be made for newcomers ({type(error).__name__}: {error!s:.200}): if this "
                "machine has no memory for one, give it more, or share the state on another peer"
            ) from error
        finally:
            self._copies.copied(host, time() - began, time())
        now, message = time(), manifest.to_message()
        size = len(encode(message))
        return Snapshot(version, manifest, message, size, data, made_at=now, took_s=now - began, used_at=now)

    def _plan(self, state: SharedState, specs: list[StateTensorSpec], infinite: Collection[int]) -> Manifest:
        """The manifest but for the hashes; a state that cannot be sent is found out before it is copied."""
        for position in infinite:  # a codec with a scale would make NaN of all that shares it
            specs[position] = replace(specs[position], codec=NoCompression())
        total = sum(spec.encoded_bytes for spec in specs)
        chunk_bytes = chunk_size(total)
        name = self._env.rng.randbytes(16)
        plan = Manifest(name, state.epoch, state.metadata, tuple(specs), chunk_bytes, (), tuple(infinite))
        message = replace(plan, hashes=(bytes(DIGEST_BYTES),) * -(-total // chunk_bytes)).to_message()
        try:
            read_manifest(message, max_state_bytes=MAX_CHUNK_BYTES * MAX_CHUNKS, max_tensors=len(specs))
        except PeerProtocolError as error:
            raise ConfigError(f"every receiver would refuse the state: {error.message}") from error
        size = len(encode(message))
        if size > self._max_message_bytes:
            raise ConfigError(
                f"the description of the state takes {size} bytes, at most {self._max_message_bytes} can be sent: "
                "share fewer tensors or less metadata"
            )
        return plan

    async def _hash(self, data: memoryview, chunk_bytes: int) -> list[bytes]:
        """The hashes of all chunks, by a few tasks at the same time."""
        batch = _HASH_AT_ONCE * chunk_bytes
        starts = range(0, data.nbytes, batch)
        found: dict[int, list[bytes]] = {}
        left = iter(starts)

        async def work() -> None:
            for start in left:
                run = self._env.executor.run
                found[start] = await run(_hash_chunks, data[start : start + batch], chunk_bytes)

        await asyncio.gather(*(work() for _ in range(_HASHERS)))
        return [digest for start in starts for digest in found[start]]

    # ------------------------------------------------------------------------------------------------------- freeing

    def _tell(self, snapshot: Snapshot, peer: PeerID, host: str) -> Snapshot:
        snapshot.used_at = now = asyncio.get_running_loop().time()
        if now - snapshot.hosts.setdefault(host, now) <= _TOLD_S:
            snapshot.told.setdefault(peer, now)
        return snapshot

    def _free_later(self) -> None:
        if self._timer is None and self._kept:
            self._timer = asyncio.get_running_loop().call_later(self._limits.linger_s, self._free)

    def _free(self) -> None:
        self._timer = None
        self._keep(lambda each, now: each.streams > 0 or now - each.used_at < self._limits.linger_s)
        self._free_later()

    def _keep(self, wanted: Callable[[Snapshot, float], bool]) -> None:
        now = asyncio.get_running_loop().time()
        self._kept = {name: each for name, each in self._kept.items() if wanted(each, now)}


def _bytes_of(layout: Manifest, data: memoryview, position: int) -> memoryview:
    return data[layout.offsets[position] : layout.offsets[position + 1]]


def _encode(layout: Manifest, tensors: Sequence[torch.Tensor], share: range, data: memoryview) -> None:
    """Copy some of the tensors. Runs in a thread."""
    for run in _runs(layout, tensors, share):
        place = data[layout.offsets[run.start] : layout.offsets[run.stop]]
        if len(run) == 1:
            layout.tensors[run.start].encode_into(tensors[run.start], place)
        else:
            parts = [tensors[position].detach().reshape(-1) for position in run]
            torch.cat(parts, out=as_tensor(place, layout.tensors[run.start].dtype))


def _runs(layout: Manifest, tensors: Sequence[torch.Tensor], share: range) -> Iterator[range]:
    """The positions of tensors that are copied together, since a call of torch takes longer than a small copy.

    Each is in host memory, and is sent as it is. All are of one dtype, and lie where such values can lie.
    """
    first, before = share.start, None
    for position in share:
        spec = layout.tensors[position]
        alone = not spec.raw or spec.raw_bytes > _SMALL_BYTES or not tensors[position].is_cpu
        kind = None if alone or layout.offsets[position] % spec.dtype.itemsize else spec.dtype
        if position > first and (kind is None or kind is not before):
            yield range(first, position)
            first = position
        before = kind
    if share:
        yield range(first, share.stop)


def _hash_chunks(data: memoryview, chunk_bytes: int) -> list[bytes]:
    return [digest_of([data[i : i + chunk_bytes]]) for i in range(0, data.nbytes, chunk_bytes)]
