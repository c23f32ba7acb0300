"""shoal, through its public API, as `benchmarks.matchmaking` wants it: smaller groups are allowed, and told of."""

from __future__ import annotations

from typing import NamedTuple

import shoal
from benchmarks.contenders.shoal_peer import ShoalPeer
from benchmarks.contenders.worker import Times, now, serve
from shoal.errors import RoundFailed, SchemaMismatch
from shoal.events import Event, GroupFormed

STEP_S = 60.0


class Join(NamedTuple):
    """One call of `step`: when, when it knew its group (0: never), the group's size and name, and why it failed."""

    called: float
    formed: float
    size: int
    group: str
    failure: str | None


class MatchmakingPeer(ShoalPeer):
    """As `ShoalPeer`, but a group that is not full is a result, and a step that fails, too."""

    def join(self, invites: list[str]) -> None:
        if self.options.rank:
            self.dht = shoal.DHT(initial_peers=invites[:1], start=True)
        self.dht.events.subscribe(self.note)
        self.group: GroupFormed | None = None
        self.averager = shoal.DecentralizedAverager(
            [self.tensor],
            self.dht,
            start=True,
            prefix="benchmark",
            target_group_size=self.options.peers,
            min_group_size=2,
        )

    def note(self, event: Event) -> None:
        if isinstance(event, GroupFormed):
            self.formed, self.group = now(), event

    def average(self) -> Times | Join:  # type: ignore[override]
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
