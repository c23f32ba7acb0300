"""How an averager finds a group: searches under the key of its group bits, one after another, until the deadline.

With group bits a search lasts one window, and after a search without a group the bits are drawn anew: otherwise peers
that are left under different keys would wait there for each other for ever. Without bits all peers have the same key,
and one search goes on as long as there is time. A search is given up when its step is to begin later now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache

import msgspec

from shoal.averaging.allreduce.schema import MAX_TILE_BYTES, first_difference, schema_of
from shoal.averaging.allreduce.vector import Vector
from shoal.averaging.core import PeerCore
from shoal.averaging.directory import DhtDirectory
from shoal.averaging.matchmaking import Group, GroupBits, JoinTerms, Matchmaker
from shoal.averaging.matchmaking.config import MANY
from shoal.averaging.matchmaking.events import Precedence
from shoal.averaging.request import AveragingStage, StepRequest
from shoal.averaging.settings import AveragerSettings
from shoal.base.peer import PeerID
from shoal.errors import ConfigError, PeerProtocolError, RoundFailed, SchemaMismatch
from shoal.layout import alike, balance, is_slower
from shoal.protocol.wire import Member

__all__ = ["Expected", "GroupFinder"]

_TILE_S = 0.25
"""A tile is at most what the slowest member sends in this time, where that is known."""

_LEAST_TILE_BYTES, _SMALL_TILES = 64 << 10, 1024
"""For a slow line tiles are made smaller, but not below `_LEAST_TILE_BYTES`, and not below the part of all values (as
float32) of which there are `_SMALL_TILES`."""

_MOST_REDUCERS = 128
"""A group of more than `MANY` has so many reducers at most: each member has a connection with each of them."""

Expected = Callable[[], frozenset[PeerID] | None]


class GroupFinder:
    """Finds groups for one averager, one at a time. Loop only.

    Args:
        core: the peer that the averager is part of.
        prefix: peers with the same prefix meet.
        settings: the settings of the averager.
        vector: the averaged tensors.

    Attributes:
        bits: which of several groups is looked for.
        looking: whether a search goes on.
        matchmaker: forms the groups.
    """

    def __init__(self, core: PeerCore, prefix: str, settings: AveragerSettings, vector: Vector) -> None:
        self._prefix, self._settings, self._vector = prefix, settings, vector
        self._me, self._clock, self._schema = core.peer_id, core.env.clock, schema_of(vector.layout.specs)
        self.bits = GroupBits(settings.group_bits, target_group_size=settings.target_group_size, rng=core.env.rng)
        self.looking = False
        full_size = settings.target_group_size or vector.most_members(settings.part_size_bytes)
        self.matchmaker = Matchmaker(
            core.endpoint,
            core.env,
            DhtDirectory(core.node, core.endpoint, timeout_s=0.8 * settings.request_timeout_s),
            msgspec.structs.replace(settings, target_group_size=full_size),
            prefix=prefix,
            terms=JoinTerms(self._schema, settings.settings, self._compare_schema),
            plan=self._plan,
        )

    def _compare_schema(self, theirs: bytes, peer: PeerID) -> str | None:
        me, other = f"peer {self._me.short()}", f"peer {peer.short()}"
        try:
            return first_difference(self._schema, theirs, me=me, other=other)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"a schema that cannot be read: {error}", peer) from error

    def _plan(self, members: Sequence[Member]) -> tuple[list[int], int]:
        # The order of members is drawn anew for each round. If not all own a share, the same members should own one
        # again: the connections with them exist, and a new one takes two round trips.
        order = sorted(range(len(members)), key=lambda index: members[index].contact.peer)
        known = [members[index] for index in order]
        widths = alike([member.bandwidth for member in known])
        kinds = tuple((width, member.reduces, member.contributes) for width, member in zip(widths, known, strict=True))
        numel, least = self._vector.layout.numel, self._settings.min_vector_size
        if len(members) > MANY:
            least = max(least, -(-numel // _MOST_REDUCERS))
        sizes = _shares(numel, kinds, least)
        shares = [size for _, size in sorted(zip(order, sizes, strict=True))]
        return shares, self._tile_bytes(widths, self._settings.part_size_bytes)

    def is_unfair(self, group: Group) -> bool:
        """Whether the leader has planned a round that is far slower than it need be, as no honest leader does.

        It may have its reasons to leave out a few members, and a `part_size_bytes` of its own.
        """
        if not group.fair:
            return False
        widths = alike([member.bandwidth for member in group.members])
        contributes = [member.contributes for member in group.members]
        too_large = group.tile_bytes > self._tile_bytes(widths, MAX_TILE_BYTES)
        return too_large or is_slower(group.shares, group.fair, widths, contributes)

    def _tile_bytes(self, bandwidths: Sequence[float | None], most: int) -> int:
        """The size of tiles. On a slow line a large tile comes late, and its average goes when nothing else is left."""
        slowest = min(filter(None, bandwidths), default=None)
        if slowest is None:
            return most
        smaller = max(_LEAST_TILE_BYTES, int(slowest * _TILE_S), 4 * self._vector.layout.numel // _SMALL_TILES)
        with suppress(ConfigError):  # too many of them
            self._vector.check_tile_bytes(min(smaller, most), len(bandwidths))
            return min(smaller, most)
        return most

    async def find(
        self,
        request: StepRequest,
        *,
        tag: str,
        deadline: float,
        expected: Expected | None,
        precedence: Precedence,
    ) -> Group | None:
        """Find a group, which its owner must `release`; None if the step is to begin later now.

        Args:
            request: the step.
            tag: only peers with the same one meet.
            deadline: loop time at which the search ends.
            expected: the peers that the group should wait for; None starts by the usual rule.
            precedence: of the others: see `Precedence`.

        Raises:
            RoundFailed: there is none.
            SchemaMismatch: only peers with other tensors or settings were met.
            ClosedError: this was closed meanwhile.
        """
        if request.early_s(self._clock) > 0:
            return None
        request.stage = AveragingStage.LOOKING_FOR_GROUP
        loop, scope = asyncio.get_running_loop(), asyncio.timeout(None)

        async def give_up() -> None:
            await request.wait_until_postponed(self._clock)
            scope.reschedule(loop.time())

        watcher = loop.create_task(give_up())
        try:
            async with scope:
                group = await self._search(request.gathered, tag, deadline, expected, precedence)
        except TimeoutError:
            if not scope.expired():
                raise
            return None
        finally:
            watcher.cancel()
        if not request.take_group(self._clock):  # postponed in this moment
            group.release()
            return None
        request.stage = AveragingStage.RUNNING_ALLREDUCE
        return group

    async def _search(
        self, gathered: bytes, tag: str, deadline: float, expected: Expected | None, precedence: Precedence
    ) -> Group:
        loop, window_s = asyncio.get_running_loop(), self._settings.window_s
        searches = 0
        self.looking = True
        try:
            while True:
                began, bits = loop.time(), self.bits.search()
                searches += 1
                try:
                    return await self.matchmaker.form_group(
                        group_key=f"{self._prefix}.0b{bits}{tag}",
                        gathered=gathered,
                        reference=self._vector.reference_name,
                        deadline_s=max(0.001, deadline - began),
                        one_window=bool(bits),
                        expected=expected,
                        precedence=precedence,
                    )
                except SchemaMismatch:
                    raise
                except RoundFailed as error:
                    self.bits.missed()
                    if bits and began + window_s <= loop.time() < deadline:
                        continue
                    if searches == 1:
                        raise
                    reason = f"{error.reason} (the last of {searches} searches, under other group bits each)"
                    raise RoundFailed(reason, error.peers) from None
        finally:
            self.looking = False


@lru_cache(maxsize=64)
def _shares(numel: int, members: tuple[tuple[float | None, bool, bool], ...], min_size: int) -> tuple[int, ...]:
    """What `balance` gives for members of these (bandwidth, reduces, contributes): mostly those of the last round."""
    bandwidths, reduces, contributes = zip(*members, strict=True)
    return tuple(balance(numel, bandwidths, reduces, min_size=min_size, contributes=contributes))
