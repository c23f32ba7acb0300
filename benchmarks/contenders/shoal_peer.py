"""shoal, through its public API."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

import shoal
from benchmarks.contenders.worker import Contender, Join, Options, Pending, Times, now, serve, tensors
from shoal.compression import BlockwiseQuantization, CompressionBase, codec_by_name
from shoal.events import Event, GroupFormed, PeerConnected, RoundFinished


def codec(name: str) -> CompressionBase:
    """The codec that benchmarks call so; `blockwise` is the default of that family."""
    return BlockwiseQuantization() if name == "blockwise" else codec_by_name(name)


class ShoalPeer(Contender):
    """One peer: the events tell when the group was formed and when the average was applied."""

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        self.options, self.tensor = options, tensor
        self.min_group_size = options.peers
        self.formed = self.finished = 0.0
        self.left_out: tuple[shoal.PeerID, ...] = ()
        self.troubles: deque[str] = deque(maxlen=3)

    def start(self) -> str:
        self.listen = f"/ip4/{self.options.host}/tcp/0"
        if self.options.rank:
            return ""
        self.dht = shoal.DHT(host_maddrs=self.listen, encrypt=self.options.encrypt, start=True)
        return str(self.dht.get_visible_maddrs()[0])

    def join(self, invites: list[str]) -> None:
        if self.options.rank:
            self.dht = shoal.DHT(
                initial_peers=invites[:1], host_maddrs=self.listen, encrypt=self.options.encrypt, start=True
            )
        self.dht.events.subscribe(self.note)
        part: dict[str, Any] = {"part_size_bytes": self.options.part_bytes} if self.options.part_bytes else {}
        self.averager = shoal.DecentralizedAverager(
            tensors(self.tensor, self.options.sizes),
            self.dht,
            start=True,
            prefix="benchmark",
            target_group_size=self.options.peers,
            min_group_size=self.min_group_size,
            compression=codec(self.options.compression),
            **part,
        )

    def note(self, event: Event) -> None:
        if isinstance(event, GroupFormed):
            self.formed = now()
        elif isinstance(event, RoundFinished):
            self.finished, self.left_out = now(), event.left_out
        elif not isinstance(event, PeerConnected):
            self.troubles.append(str(event))

    def average(self) -> Times | Join:
        called = now()
        return self.times(called, self.averager.step(timeout=60.0, allow_retries=False), now())

    def begin(self) -> Pending:
        called = now()
        return Pending(called, self.averager.step(timeout=60.0, allow_retries=False, wait=False), self.times)

    def times(self, called: float, group: dict[shoal.PeerID, Any], done: float) -> Times:
        if len(group) != self.options.peers or self.left_out:
            raise RuntimeError(f"{len(group)} peers, {len(self.left_out)} of them left out: {list(self.troubles)}")
        if not called <= self.formed <= self.finished <= done:
            raise RuntimeError("events out of order")
        return Times(called, self.formed, done)

    def stop(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()


if __name__ == "__main__":
    serve(ShoalPeer)
