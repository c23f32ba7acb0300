"""The settings by which one peer takes part in a run."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.averager import AveragerSettings

__all__ = ["RunSettings"]


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is trained together.

    Attributes:
        run_id: names the run; all its peers give the same.
        target_batch_size: samples of the whole swarm in one step.
        averager: of gradients and of states.
        average_state_every: epochs between two averagings of the states; 0 for never.
        check_every: epochs between two checks of the parameters themselves; 0 for never.
        publish_period_s: how often progress is written to the DHT when nothing changes.
        tell_period_s: the shortest time between two messages of progress to the other peers.
        ttl_s: a peer that says nothing for this long is no longer counted.
        end_patience_s: how long a peer at the announced end of the run waits for the others that it knows.
        state_patience_s: how long a newcomer waits for the state of a run that is further, before it begins its own.
        require_state: never train from a state that nobody else has.
        catch_up_bytes: the most that a peer which is behind keeps of the steps that the others take meanwhile.
        fingerprint: named values that must be equal on all peers of the run.
    """

    run_id: str
    target_batch_size: int
    averager: AveragerSettings
    average_state_every: int = 0
    check_every: int = 10
    publish_period_s: float = 2.0
    tell_period_s: float = 0.05
    ttl_s: float = 20.0
    end_patience_s: float = 15.0
    state_patience_s: float = 600.0
    require_state: bool = False
    catch_up_bytes: int = 4 << 30
    fingerprint: Mapping[str, str] = {}
