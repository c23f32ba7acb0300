"""`torch.distributed` with gloo: no encryption, no fault tolerance, nobody to find. The speed reference."""

from __future__ import annotations

import datetime as dt

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.contenders.worker import Contender, Options, Times, now, serve

DEADLINE = dt.timedelta(seconds=60)


class GlooPeer(Contender):
    """One rank."""

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        if options.compression != "none":
            raise SystemExit("gloo does not compress")
        self.options, self.tensor = options, tensor

    def start(self) -> str:
        if self.options.rank:
            return ""
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=DEADLINE)
        return str(self.store.port)

    def join(self, invites: list[str]) -> None:
        if self.options.rank:
            self.store = TCPStore("127.0.0.1", int(invites[0]), timeout=DEADLINE)
        dist.init_process_group(
            "gloo", store=self.store, rank=self.options.rank, world_size=self.options.peers, timeout=DEADLINE
        )

    def average(self) -> Times:
        called = now()
        dist.all_reduce(self.tensor)
        self.tensor.div_(self.options.peers)
        return Times(called, called, now())

    def stop(self) -> None:
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(GlooPeer)
