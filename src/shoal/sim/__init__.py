"""A kit for testing distributed code: whole swarms in one thread, on virtual time, from one seed.

- `run(main, seed=…)` runs a coroutine on a `VirtualLoop`, where hours take milliseconds, and hides no failure.
- `SimNetwork` has hosts, latency, bandwidth, stalls, partitions and crashes; `transport.memory` runs over it.
- `Swarm` makes peers on it from a factory: each with its own clock, chance, identity and transport.
- `FaultPlan` lists faults and their times; `Whims` are small ones at any time: short reads, late timers, slow work.

shoal's own tests use it, and so can the tests of programs that use shoal.
"""

from shoal.sim.faults import (
    Crash,
    Fault,
    FaultPlan,
    HostFault,
    Partition,
    Restart,
    Slow,
    SlowLink,
    Stall,
    Throttle,
    Vanish,
)
from shoal.sim.loop import VirtualLoop
from shoal.sim.medium import Delivery
from shoal.sim.network import SimNetwork
from shoal.sim.owner import Owner, current_owner
from shoal.sim.running import calm, run, sleep
from shoal.sim.swarm import SimClock, SimHost, Swarm
from shoal.sim.whims import Whims

__all__ = [
    "Crash",
    "Delivery",
    "Fault",
    "FaultPlan",
    "HostFault",
    "Owner",
    "Partition",
    "Restart",
    "SimClock",
    "SimHost",
    "SimNetwork",
    "Slow",
    "SlowLink",
    "Stall",
    "Swarm",
    "Throttle",
    "Vanish",
    "VirtualLoop",
    "Whims",
    "calm",
    "current_owner",
    "run",
    "sleep",
]
