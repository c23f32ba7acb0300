"""Hypothesis strategies that several tests share."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from shoal.sim import Crash, Fault, FaultPlan, Partition, Restart, Slow, Stall, Vanish

__all__ = ["fault_plans"]


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
