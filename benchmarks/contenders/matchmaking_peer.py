"""shoal, through its public API, as `benchmarks.matchmaking` wants it: smaller groups are allowed, and told of."""

from __future__ import annotations

import torch

from benchmarks.contenders.shoal_peer import ShoalPeer
from benchmarks.contenders.worker import Join, Options, now, serve
from shoal.errors import RoundFailed, SchemaMismatch
from shoal.events import Event, GroupFormed

STEP_S = 60.0


class MatchmakingPeer(ShoalPeer):
    """As `ShoalPeer`, but a group that is not full is a result, and a step that fails, too."""

    def __init__(self, options: Options, tensor: torch.Tensor) -> None:
        super().__init__(options, tensor)
        self.min_group_size = 2  # the default
        self.group: GroupFormed | None = None

    def note(self, event: Event) -> None:
        if isinstance(event, GroupFormed):
            self.formed, self.group = now(), event

    def average(self) -> Join:
        called, self.group, failure = now(), None, None
        try:
            self.averager.step(timeout=STEP_S, allow_retries=False)
        except (RoundFailed, SchemaMismatch) as error:
            failure = str(error)
        if self.group is None:
            return Join(called, 0.0, 0, "", failure or "no group, but no failure")
        return Join(called, self.formed, len(self.group.peers), self.group.round_id.hex(), failure)


if __name__ == "__main__":
    serve(MatchmakingPeer)
