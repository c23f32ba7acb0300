"""Fault plans that several tests share: as a hypothesis strategy, and by number."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from shoal.sim import Crash, Fault, FaultPlan, Partition, Restart, Slow, SlowLink, Stall, Throttle, Vanish
from tests.corruption import KINDS, Corrupt

__all__ = ["fault_plans", "numbered_plan"]


def _instants(horizon_s: float) -> st.SearchStrategy[float]:
    """Times from 0 to the horizon, in hundredths of it: shrinks to short and round numbers."""
    return st.integers(0, 100).map(lambda percent: round(percent * horizon_s / 100, 6))


@st.composite
def _partitions(draw: st.DrawFn, hosts: Sequence[str], horizon_s: float) -> Partition:
    side = draw(st.lists(st.sampled_from(hosts), min_size=1, max_size=len(hosts) - 1, unique=True))
    return Partition(
        at_s=draw(_instants(horizon_s)),
        groups=(tuple(sorted(side)), tuple(host for host in hosts if host not in side)),
        duration_s=draw(_instants(horizon_s)),
    )


@st.composite
def fault_plans(
    draw: st.DrawFn,
    hosts: Sequence[str],
    horizon_s: float,
    *,
    max_faults: int = 6,
    kinds: Sequence[type[Fault]] = (Crash, Vanish, Stall, Slow, Partition, Restart),
) -> FaultPlan:
    """Plans of what goes wrong.

    Args:
        draw: given by hypothesis.
        hosts: whom it may happen to.
        horizon_s: every fault begins within this time, and none lasts longer than it.
        max_faults: at most so many faults (a restart belongs to the fault that it ends).
        kinds: which faults there may be; without `Restart` what is down stays down.
    """
    at, host = _instants(horizon_s), st.sampled_from(hosts)
    choices: dict[type[Fault], st.SearchStrategy[Fault]] = {
        Stall: st.builds(Stall, at_s=at, host=host, duration_s=at),
        Slow: st.builds(Slow, at_s=at, host=host, factor=st.sampled_from((2.0, 10.0, 100.0)), duration_s=at),
        Crash: st.builds(Crash, at_s=at, host=host),
        Vanish: st.builds(Vanish, at_s=at, host=host),
    }
    if len(hosts) > 1:
        choices[Partition] = _partitions(hosts, horizon_s)
    faults: list[Fault] = draw(
        st.lists(st.one_of([choices[kind] for kind in kinds if kind in choices]), max_size=max_faults)
    )
    restarts = [
        Restart(at_s=round(fault.at_s + draw(at), 6), host=fault.host)
        for fault in faults
        if isinstance(fault, Crash | Vanish) and Restart in kinds and draw(st.booleans())
    ]
    return FaultPlan(tuple(sorted([*faults, *restarts], key=lambda fault: fault.at_s)))


def numbered_plan(number: int, hosts: Sequence[str], horizon_s: float, *, bandwidth_bytes_s: float) -> FaultPlan:
    """The plan of this number, always the same: 1 to 6 faults of all kinds, some of them at one moment.

    Args:
        number: names the plan.
        hosts: whom it may happen to.
        horizon_s: every fault begins within this time, and none lasts longer than it, but silence: that lasts 0.2 to
            60 s, as often below 3.5 s as above.
        bandwidth_bytes_s: of a host; a slow link keeps 1% of it.
    """
    rng = random.Random(f"plan/{number}")
    faults: list[Fault] = []
    at_s = 0.0
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5, 6))):
        if not faults or rng.random() < 0.7:  # else at the same moment as the one before
            at_s = round(rng.uniform(0, horizon_s), 2)
        faults += _draw(rng, hosts, at_s, horizon_s, bandwidth_bytes_s)
    return FaultPlan(tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _draw(
    rng: random.Random, hosts: Sequence[str], at_s: float, horizon_s: float, bandwidth_bytes_s: float
) -> list[Fault]:
    """One fault; with it the restart that ends it, perhaps."""
    host, long_s = rng.choice(hosts), round(rng.uniform(0, horizon_s), 2)
    silent_s = round(0.2 * 300 ** (long_s / horizon_s), 2)
    kind = rng.choice((Crash, Vanish, Stall, Slow, SlowLink, Throttle, Partition, Corrupt, Corrupt))
    if kind in (Crash, Vanish):
        restart = [Restart(at_s=round(at_s + long_s, 2), host=host)] if rng.random() < 0.6 else []
        return [kind(at_s=at_s, host=host), *restart]
    if kind is Slow:
        return [Slow(at_s=at_s, host=host, factor=rng.choice((3.0, 100.0)), duration_s=long_s)]
    if kind is SlowLink:
        pair = tuple(sorted(rng.sample(list(hosts), 2)))
        narrow = bandwidth_bytes_s / 100
        return [
            SlowLink(at_s=at_s, between=(pair[0], pair[1]), factor=100.0, bandwidth_bytes_s=narrow, duration_s=long_s)
        ]
    if kind is Partition:
        side = tuple(sorted(rng.sample(list(hosts), rng.randrange(1, len(hosts)))))
        groups = (side, tuple(name for name in hosts if name not in side))
        return [Partition(at_s=at_s, groups=groups, duration_s=silent_s)]
    if kind is Corrupt:
        mute_s = round(rng.uniform(0, horizon_s), 2) if rng.random() < 0.4 else 0.0
        return [Corrupt(at_s=at_s, host=host, kind=rng.choice(KINDS), duration_s=long_s, mute_s=mute_s)]
    if kind is Stall:
        return [Stall(at_s=at_s, host=host, duration_s=silent_s)]
    return [Throttle(at_s=at_s, host=host, duration_s=long_s)]
