"""What the fault simulations share: a swarm that can be corrupted, and how long anything may take at most.

The limits are formulas of the settings, and stand here only; `docs/why/protocol.md`, section 8, has them in words.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shoal.averaging import AveragerSettings
from shoal.averaging.allreduce.round import RoundOptions
from shoal.compression import view_bytes
from shoal.rpc import Limits
from shoal.sim import FaultPlan, SimHost, Stall, Throttle
from shoal.transport.base import Transport
from tests.corruption import CorruptibleTransport
from tests.sim.averaging_kit import Trial

BANDWIDTH_BYTES_S = 400_000.0

_FAREWELL_S = 3.0
"""An end in order takes this at most: the round's streams 1 s, its control streams 1 s, what matchmaking holds 3 s, and
these overlap."""


@dataclass(frozen=True)
class TimeLimits:
    """How long it takes at most, in seconds, until a member knows.

    Attributes:
        settings: of the averagers.
        network: of the endpoints.
    """

    settings: AveragerSettings
    network: Limits = field(default_factory=Limits)

    def step_s(self, timeout_s: float) -> float:
        """One step: its timeout, and the end of the round before, if a group was found in the last moment."""
        return timeout_s + _FAREWELL_S

    @property
    def stall_s(self) -> float:
        """From the last sign of a silent or slow member until nobody waits for it any more."""
        options = RoundOptions()
        silent_link_s = self.network.silence_s + 2 * self.network.beat_s
        sender_s = self.settings.silence_s
        reducer_s = (self.settings.reducer_silence_s or 2 * sender_s) + 2 * options.report_s
        return max(silent_link_s, sender_s, reducer_s) + options.report_s

    def after_kill_s(self, normal_s: float) -> float:
        """From a kill to the outcome at every survivor: the work of the dead is done again, at most all of it."""
        return normal_s + 1.0

    def after_silence_s(self, normal_s: float) -> float:
        """From the moment at which a member falls silent, or sends nonsense, to the outcome at every other member."""
        return self.stall_s + self.after_kill_s(normal_s)

    def after_slowing_s(self, normal_s: float) -> float:
        """The same for a member that is slow.

        First the reducers leave it out as a sender, when it would need more than twice as long as the others; then the
        coordinator gives it twice the time that these needed with that, and half of the stall limit.
        """
        others_s = 2 * normal_s + self.settings.silence_s + RoundOptions().report_s
        return 2 * others_s + self.stall_s / 2 + self.after_kill_s(normal_s)

    def words_s(self, bytes_s: float) -> float:
        """What a coordinator on a slow line needs for its words: assignments, the reports to it, and the commits."""
        return 20_000 / bytes_s


def corruptible(host: SimHost) -> Transport:
    """The host's transport, with a gate; the garbage follows from the swarm's seed."""
    return CorruptibleTransport(host.transport, random.Random(f"{host.name}/{host.life}/{host.env.rng.random()}"))


def corruptible_trial(settings: AveragerSettings, **options: Any) -> Trial:
    """A swarm whose members can turn bad."""
    return Trial(settings=settings, bandwidth_bytes_s=BANDWIDTH_BYTES_S, transport_of=corruptible, **options)


class Participant(NamedTuple):
    """One of those whom a numbered plan is played against.

    Attributes:
        name: of its host.
        weight: of its values in every round.
        client: it only dials.
        auxiliary: it only reduces.
    """

    name: str
    weight: float
    client: bool
    auxiliary: bool

    @property
    def counts(self) -> bool:
        """Whether its values make a difference."""
        return self.weight > 0 and not self.auxiliary


def numbered_participants(number: int) -> tuple[Participant, ...]:
    """The peers in the plan of this number, always the same: 2 to 6, of all kinds.

    The first can be dialed, since all others join at it; the second counts.
    """
    rng = random.Random(f"participants/{number}")
    found: list[Participant] = []
    for place in range(rng.choice((2, 3, 4, 4, 5, 5, 6, 6))):
        client = place > 0 and rng.random() < 0.25
        auxiliary = place != 1 and not client and rng.random() < 0.2
        weight = rng.choice((0.1, 1.0, 1.0, 2.0, 30.0) if place == 1 else (0.0, 0.1, 1.0, 1.0, 2.0, 30.0))
        found.append(Participant(f"p{place}", weight, client, auxiliary))
    return tuple(found)


def can_average(participants: Sequence[Participant]) -> bool:
    """Whether these can form a group that has an average."""
    reachable = any(not each.client for each in participants)
    return len(participants) > 1 and reachable and any(each.counts for each in participants)


def standstill_s(plan: FaultPlan, host: str) -> float:
    """How long the plan lets a host stand still, in all: its own clock does not run meanwhile."""
    return sum(fault.duration_s for fault in plan.events if isinstance(fault, Stall | Throttle) and fault.host == host)


def hash_of(tensors: Sequence[torch.Tensor]) -> str:
    """A hash of all bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(view_bytes(tensor))
    return digest.hexdigest()
