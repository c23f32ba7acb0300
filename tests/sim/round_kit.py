"""Rounds without matchmaking: a group is made by hand, so that every member, message and moment is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.averaging.allreduce.interface import is_weight
from shoal.averaging.allreduce.round import Outcome, Round, RoundOptions
from shoal.averaging.allreduce.signed import SignedWords
from shoal.averaging.allreduce.table import RoundTable
from shoal.averaging.allreduce.vector import Vector, describe
from shoal.averaging.group import Group
from shoal.base.peer import PeerID
from shoal.compression import CompressionBase, NoCompression
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Abort, Assign, Commit, Gone, Leave, Member, Opening, Report, Shown
from shoal.rpc import Stream
from tests.sim.rpc_kit import Peer, SimNet

ROUND = b"round of a test!"
OPTIONS = RoundOptions(silence_s=2.0, timeout_s=60.0)


class OpenControl(Opening[Report | Leave, Assign | Gone | Shown | Commit | Abort], frozen=True):
    """Stands for the stream of a join."""


@dataclass
class RoundPeer:
    """One member: its endpoint, its numbers, and the group that it was given.

    Attributes:
        auxiliary: it only reduces for the others.
        client: it only dials, and reduces nothing.
    """

    peer: Peer
    table: RoundTable
    vector: Vector
    auxiliary: bool = False
    client: bool = False
    controls: dict[PeerID, Stream[Any, Any]] = field(default_factory=dict)
    _joined: asyncio.Event = field(default_factory=asyncio.Event)
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def make(
        cls,
        net: SimNet,
        name: str,
        tensor: torch.Tensor,
        codec: CompressionBase | None = None,
        *,
        auxiliary: bool = False,
        client: bool = False,
    ) -> RoundPeer:
        """Start one."""
        peer = await net.peer(name, client_mode=client)
        vector = Vector([tensor], describe([tensor], [codec or NoCompression()]))
        made = cls(peer, RoundTable(peer.endpoint, net.swarm.identity(name)), vector, auxiliary, client)
        peer.endpoint.serve_stream(OpenControl, made._take)
        return made

    async def _take(self, stream: Stream[Any, Any], opening: OpenControl) -> None:
        self.controls[stream.peer_id] = stream
        self._joined.set()
        await self._released.wait()

    async def gathered(self, followers: int) -> None:
        """Wait for the control streams of so many."""
        while len(self.controls) < followers:
            self._joined.clear()
            await self._joined.wait()

    def member(self) -> Member:
        """As others see it."""
        return Member(self.peer.contact, not self.client, None, b"\xc0", not self.auxiliary)

    async def follow(self, leader: RoundPeer) -> None:
        """Open the control stream to the coordinator."""
        stream = await self.peer.endpoint.open(leader.peer.contact, OpenControl(), timeout_s=5.0)
        self.controls[leader.peer.peer_id] = stream

    def round(
        self,
        group: Sequence[RoundPeer],
        shares: Sequence[int],
        *,
        weight: float = 1.0,
        options: RoundOptions = OPTIONS,
        round_id: bytes = ROUND,
        tile_bytes: int = 1024,
        on_lie: Callable[[PeerID], None] = lambda _: None,
    ) -> Round:
        """Its round; the first of the group decides. An auxiliary member's has weight 0, and reads no tensor."""
        if self.auxiliary:
            weight = 0.0
        else:
            assert self.vector.copy_in(weight=weight if is_weight(weight) else 1.0) is None
        formed = Group(
            round_id=round_id,
            members=tuple(each.member() for each in group),
            my_index=group.index(self),
            coordinator=0,
            shares=tuple(shares),
            tile_bytes=tile_bytes,
            controls=self.controls,
            on_release=lambda: None,
        )
        return Round(self.table, formed, self.vector, weight=weight, options=options, on_lie=on_lie)

    def release(self) -> None:
        """The round is over: control streams may end."""
        self._released.set()
        self._released = asyncio.Event()
        self.controls = {}


def signed_by(leader: Identity, round_: Round, message: Any) -> Any:
    """A commit that this leader of a round of three or more has signed; any other message as it is."""
    if not isinstance(message, Commit):
        return message
    return SignedWords(leader, round_.begun, [leader.peer_id] * 3, 0).signed(message)


async def gather_group(group: Sequence[RoundPeer]) -> None:
    """Open the control streams of all to the first."""
    for each in group[1:]:
        await each.follow(group[0])
    async with asyncio.timeout(5.0):
        await group[0].gathered(len(group) - 1)


async def run_round(group: Sequence[RoundPeer], shares: Sequence[int], **options: Any) -> list[Outcome]:
    """One whole round of all, applied and closed."""
    await gather_group(group)
    # The same peers may have another round: then under another id.
    round_id = bytes([len(group[0].table._used)]) + ROUND[1:]
    rounds = [each.round(group, shares, round_id=round_id, **options) for each in group]
    outcomes = await asyncio.gather(*(round_.run() for round_ in rounds))
    for each in group:
        if not each.auxiliary:
            each.vector.overwrite()
    await asyncio.gather(*(round_.close() for round_ in rounds))
    for each in group:
        each.release()
    return list(outcomes)
