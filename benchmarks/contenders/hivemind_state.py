"""hivemind 1.1.12. Runs with the Python of hivemind's own environment (`--hivemind-python`); shoal is not there."""

from __future__ import annotations

import hivemind  # type: ignore[import-not-found]
import torch

from benchmarks.contenders.state_worker import Options, StatePeer, serve, state


class HivemindPeer(StatePeer):
    """One peer: its averaged tensors are the state."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def start(self, invites: list[str]) -> str:
        receives = self.options.role == "receiver"
        self.dht = hivemind.DHT(initial_peers=invites, start=True)
        tensors = [torch.zeros(1)] if receives else state(self.options.state_bytes)
        self.averager = hivemind.DecentralizedAverager(
            tensors, self.dht, start=True, prefix="benchmark", target_group_size=2, allow_state_sharing=not receives
        )
        return str(self.dht.get_visible_maddrs()[0])

    def load(self) -> list[torch.Tensor]:
        loaded = self.averager.load_state_from_peers(timeout=120)
        if loaded is None:
            raise RuntimeError("no state")
        return list(loaded[1])

    def average(self) -> None:
        raise NotImplementedError("only its state download is measured")

    def stop(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()


if __name__ == "__main__":
    serve(HivemindPeer)
