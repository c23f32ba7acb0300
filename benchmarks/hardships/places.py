"""Where peers are: at addresses that nobody reaches, where nobody gets in, and dead in the middle of a download."""

from __future__ import annotations

import random
import time

from benchmarks.hardships.kit import address_of, jobs, left, pace, swarm
from benchmarks.truth.kit import Report, Verdict, apart, changed, train
from benchmarks.truth.peers import Line, Peers

__all__ = ["REPLAYS"]

_NOWHERE = "/ip4/192.0.2.1/tcp/4000"
"""Of the addresses for documentation: nobody is there."""


def unreachable() -> Verdict:
    """One of four announces an address that nobody reaches: the others train on at their pace."""
    with Peers() as peers:
        those = swarm(peers, jobs(3, target=320))
        calm = pace(those[0], 8.0)
        entry = str(address_of(those[0]))
        job = changed(jobs(1)[0], index=9, entries=(entry,), target=320, dht={"announce_maddrs": _NOWHERE})
        odd = peers.start(train, job=job)
        odd.wait("address")
        time.sleep(10.0)
        after = pace(those[0], 15.0)
        reports = left([*those, odd])
    told = len(reports[3].warnings)
    measured = f"{calm:.1f} epochs a second, then {after:.1f}; {told} warnings there"
    return Verdict(held=after > 0.8 * calm and told >= 1, measured=measured)


def only_a_way_in(line: Line) -> None:
    """A DHT that trains nothing."""
    import shoal

    with shoal.DHT(start=True) as dht:
        line.say("address", str(dht.get_visible_maddrs()[0]))
        line.wait("leave")


def two_nats() -> Verdict:
    """Two peers that nobody can dial, with only a DHT between: both say within 30 s why they train alone."""
    with Peers() as peers:
        entry = peers.start(only_a_way_in).wait("address")
        two = [
            peers.start(train, job=changed(job, entries=(entry,), dht={"client_mode": True}))
            for job in jobs(2, target=80)
        ]
        for each in two:
            each.wait("epoch")
        time.sleep(30.0)
        reports = left(two)
    told = [report.warned("reach", "reached", "dial", "dialed", "client", "clients") for report in reports]
    return Verdict(held=all(told), measured=f"warnings about it: {told[0]} and {told[1]}")


def killed_downloads() -> Verdict:
    """Newcomers are killed at random points of their download, one after another: the run, and the last one, train."""
    draw = random.Random(3)
    with Peers() as peers:
        those = swarm(peers, jobs(3, target=240))
        calm = pace(those[0], 8.0)
        entry = str(address_of(those[0]))
        for number in range(8):
            new = peers.start(train, job=changed(jobs(1)[0], index=10 + number, entries=(entry,), target=240))
            new.wait("address")
            time.sleep(draw.uniform(0.0, 0.5))
            new.kill()
        last = peers.start(train, job=changed(jobs(1)[0], index=30, entries=(entry,), target=240))
        last.until_steps(3)
        after = pace(those[0], 8.0)
        reports: list[Report] = left([*those, last])
    differ, common = apart(reports)
    measured = f"{calm:.1f} epochs a second, then {after:.1f}; weights differ in {differ} of {common} epochs"
    return Verdict(held=after > 0.8 * calm and differ == 0 and common > 0, measured=measured)


REPLAYS = (unreachable, two_nats, killed_downloads)
