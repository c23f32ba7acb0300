"""hivemind 1.1.12. Runs with the Python of hivemind's own environment (`--hivemind-python`); shoal is not there."""

from __future__ import annotations

import ctypes
import multiprocessing
from typing import Any

import hivemind  # type: ignore[import-not-found]
import torch

from benchmarks.contenders.worker import Contender, Join, Options, Pending, Times, now, serve

FORMED = multiprocessing.get_context("fork").Value("d", 0.0)
"""When the group was formed; the averager sees it in a process of its own."""


GROUP = multiprocessing.get_context("fork").Array(ctypes.c_char, 200)
"""Its size and name, with a space between."""


class TimedAverager(hivemind.DecentralizedAverager):  # type: ignore[misc]
    """Notes the moment that matchmaking hands its group over, and which it is."""

    async def _aggregate_with_group(self, group_info: Any, *args: Any, **kwargs: Any) -> Any:
        FORMED.value = now()
        GROUP.value = f"{len(group_info.peer_ids)} {group_info.group_id.hex()}".encode()
        return await super()._aggregate_with_group(group_info, *args, **kwargs)


class HivemindPeer(Contender):
    """One peer, with the library's defaults but for the group size and codec."""

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        self.options, self.tensor = options, tensor
        self.min_group_size = options.peers

    def start(self) -> str:
        self.listen = [f"/ip4/{self.options.host}/tcp/0"]
        if self.options.rank:
            return ""
        self.dht = hivemind.DHT(host_maddrs=self.listen, start=True)
        return str(self.dht.get_visible_maddrs()[0])

    def join(self, invites: list[str]) -> None:
        if self.options.rank:
            self.dht = hivemind.DHT(initial_peers=invites[:1], host_maddrs=self.listen, start=True)
        codecs = hivemind.compression
        codec = {
            "none": codecs.NoCompression,
            "float16": codecs.Float16Compression,
            "uniform8bit": codecs.Uniform8BitQuantization,
            "quantile8bit": codecs.Quantile8BitQuantization,
            "blockwise": codecs.BlockwiseQuantization,
        }[self.options.compression]
        self.averager = TimedAverager(
            [self.tensor],
            self.dht,
            start=True,
            prefix="benchmark",
            target_group_size=self.options.peers,
            min_group_size=self.min_group_size,
            compression=codec(),
        )

    def average(self) -> Times | Join:
        called = now()
        return self.times(called, self.averager.step(timeout=60.0, allow_retries=False), now())

    def begin(self) -> Pending:
        called = now()
        return Pending(called, self.averager.step(timeout=60.0, allow_retries=False, wait=False), self.times)

    def times(self, called: float, group: dict[Any, Any], done: float) -> Times:
        if len(group) != self.options.peers:
            raise RuntimeError(f"a group of {len(group)}")
        return Times(called, FORMED.value, done)

    def result(self, tensor: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        with self.averager.get_tensors() as (averaged,):
            return averaged.clone(), None

    def stop(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()


if __name__ == "__main__":
    serve(HivemindPeer)
