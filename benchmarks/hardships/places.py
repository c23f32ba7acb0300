"""Where peers are: at addresses that nobody reaches, where nobody gets in, and dead in the middle of a download."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

from benchmarks.hardships.kit import ALL, address_of, at_home, ballast, jobs, left, only_a_way_in, pace, swarm
from benchmarks.truth.kit import CannotRunError, Job, Report, Verdict, apart, changed, train
from benchmarks.truth.peers import Failed, Line, Peers
from tests.integration.routers import Routers, why_not

__all__ = ["REPLAYS"]


def unreachable() -> Verdict:
    """One of four says that it listens where its router lets nobody in: the others train on at their pace."""
    if reason := why_not():
        raise CannotRunError(reason)
    with Routers(1) as net, Peers() as peers:
        public = jobs(3, target=320, dht={"host_maddrs": ALL})
        those = swarm(peers, public, partial(at_home, namespace=net.path(None)))
        calm = pace(those[0], 8.0)
        dht = {"host_maddrs": "/ip4/0.0.0.0/tcp/4000", "announce_maddrs": "/ip4/203.0.113.2/tcp/4000"}
        job = changed(jobs(1)[0], index=9, entries=(str(address_of(those[0])),), target=320)
        odd = peers.start(at_home, job=changed(job, dht=dht | {"client_mode": False}), namespace=net.path(0))
        odd.until_steps(1)
        after = pace(those[0], 25.0)
        reports = left([*those, odd])
    told, shared = reports[3].warned("client"), sum(count == 4 for count in reports[0].steps.values())
    measured = f"{calm:.1f} epochs a second, then {after:.1f}, {shared} of them with all four; {told} warnings there"
    return Verdict(held=after > 0.8 * calm and shared > 10 and told >= 1, measured=measured)


def two_nats() -> Verdict:
    """Two peers behind routers, with only a DHT between: both say within 30 s why they are alone."""
    if reason := why_not():
        raise CannotRunError(reason)
    with Routers(2) as net, Peers() as peers:
        entry = peers.start(only_a_way_in, namespace=net.path(None)).wait("address")
        two = [
            peers.start(
                at_home,
                job=changed(job, entries=(entry,), target=80, dht={"host_maddrs": ALL}),
                namespace=net.path(job.index),
            )
            for job in jobs(2)
        ]
        for each in two:
            each.wait("epoch")
        time.sleep(30.0)
        reports = left(two)
    clients = [report.warned("goes on as a client") for report in reports]
    told = [report.warned("training alone") for report in reports]
    measured = f"{clients} warnings that it only dials, {told} that and why it trains alone"
    return Verdict(held=all(clients) and all(told), measured=measured)


def telling(line: Line, job: Job) -> Report:
    """Train, and say which share of the state is here: when one was chosen, and after each chunk."""
    from shoal.state.wire.feed import Target

    target: Any = Target
    verified, begin = target.verified, target.__init__

    def begun(self: Target, *arguments: Any) -> None:
        begin(self, *arguments)
        line.say("share", 0.0)

    def came(self: Target, *arguments: Any) -> None:
        verified(self, *arguments)
        line.say("share", self.plan.verified / len(self.manifest.hashes))

    target.__init__, target.verified = begun, came
    return train(line, job)


def killed_downloads() -> Verdict:
    """Eight newcomers are killed, each at another share of its download of 40 MB: the run, and the last one, train."""
    work, killed_at = ballast(40), list[float]()
    with Peers() as peers:
        those = swarm(peers, jobs(3, target=240, **work))
        calm = pace(those[0], 8.0)
        job = changed(jobs(1, **work)[0], entries=(str(address_of(those[0])),), target=240)
        for number in range(8):
            new = peers.start(telling, job=changed(job, index=10 + number))
            while new.wait("share") < number / 7:
                pass
            new.kill()
            with contextlib.suppress(Failed):  # all that it had said
                new.wait("returned")
            killed_at.append(next(share for name, share in reversed(new.said) if name == "share"))
        last = peers.start(train, job=changed(job, index=30))
        last.until_steps(3)
        after = pace(those[0], 8.0)
        reports: list[Report] = left([*those, last])
    differ, common = apart(reports)
    shares = " ".join(f"{share:.2f}" for share in killed_at)
    measured = (
        f"{calm:.1f} epochs a second, then {after:.1f}; killed at {shares} of their downloads; "
        f"weights differ in {differ} of {common} epochs"
    )
    held = after > 0.8 * calm and differ == 0 and common > 0 and sum(share < 1.0 for share in killed_at) >= 4
    return Verdict(held=held, measured=measured)


REPLAYS = (unreachable, two_nats, killed_downloads)
