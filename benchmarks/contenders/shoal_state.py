"""shoal, through its public API; a donor with a limited upload is made by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

import shoal
from benchmarks.contenders.state_worker import Options, StatePeer, serve, state
from shoal.compression import CompressionInfo
from shoal.state.wire import SharedState, ShareLimits, StateDonor

PREFIX = "benchmark"


class StateAverager(shoal.DecentralizedAverager):
    """Shares another state than what it averages."""

    shared: list[torch.Tensor]

    def get_current_state(self) -> tuple[Any, list[torch.Tensor], list[CompressionInfo] | None]:
        return "state", self.shared, None


class ShoalPeer(StatePeer):
    """One peer."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.averaged = torch.ones(max(1, options.train_bytes // 4))
        self.shared = [] if options.role == "receiver" else state(options.state_bytes)

    def start(self, invites: list[str]) -> str:
        self.dht = shoal.DHT(initial_peers=invites, start=True)
        options = self.options
        self.averager = StateAverager(
            [self.averaged],
            self.dht,
            start=False,
            prefix=PREFIX,
            target_group_size=max(options.trainers, 2),
            min_group_size=max(options.trainers, 2),
            allow_state_sharing=options.role != "receiver" and not options.cap_bytes_s,
        )
        self.averager.shared = self.shared
        self.averager.run_in_background()
        if options.role == "donor" and options.cap_bytes_s:
            self.dht.loop_thread.run(self.share(), 10.0)
        return str(self.dht.get_visible_maddrs()[0])

    async def share(self) -> None:
        """Be a donor with a limit."""
        from shoal.averaging.directory import declare_donor  # here, so that `benchmarks.turns` runs older code

        @asynccontextmanager
        async def hold() -> AsyncIterator[SharedState]:
            yield SharedState("state", self.shared)

        core = self.dht.core()
        limits = ShareLimits(upload_bytes_per_s=self.options.cap_bytes_s)
        StateDonor(core.endpoint, core.env, PREFIX, hold, lambda: 0, limits=limits)
        await declare_donor(core.node, core.endpoint, PREFIX, 0.0, core.env.clock.time() + 3000)

    def load(self) -> list[torch.Tensor]:
        loaded = self.averager.load_state_from_peers(timeout=300)
        if loaded is None:
            raise RuntimeError("no state")
        return list(loaded[1])

    def average(self) -> None:
        self.averager.step(timeout=60.0, allow_retries=False)

    def stop(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()


if __name__ == "__main__":
    serve(ShoalPeer)
