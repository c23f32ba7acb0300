"""hivemind 1.1.12, as `benchmarks.matchmaking` wants it: smaller groups are allowed, and told of."""

from __future__ import annotations

import torch

from benchmarks.contenders.hivemind_peer import FORMED, GROUP, HivemindPeer
from benchmarks.contenders.worker import Join, Options, now, serve

STEP_S = 60.0


class HivemindMatchmakingPeer(HivemindPeer):
    """As `HivemindPeer`, but a group that is not full is a result, and a step that fails, too."""

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        super().__init__(options, tensor)
        self.min_group_size = 2  # the default

    def average(self) -> Join:
        called, FORMED.value, failure = now(), 0.0, None
        try:
            self.averager.step(timeout=STEP_S, allow_retries=False)
        except Exception as error:  # noqa: BLE001 (whatever it is, the step failed)
            failure = f"{type(error).__name__}: {error}"
        if not FORMED.value:
            return Join(called, 0.0, 0, "", failure or "no group, but no failure")
        size, _, name = GROUP.value.decode().partition(" ")
        return Join(called, FORMED.value, int(size), name, failure)


if __name__ == "__main__":
    serve(HivemindMatchmakingPeer)
