"""Replays of peers that train alone, or in vain: each says it."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.emulator.namespaces import Emulator, NotPermitted
from benchmarks.emulator.star import Shape
from benchmarks.hardships.kit import at_home, only_a_way_in
from benchmarks.truth.kit import (
    RUN,
    CannotRunError,
    Job,
    Report,
    Trainee,
    Verdict,
    changed,
    counted,
    joined,
    together,
    train,
)
from benchmarks.truth.peers import Peer, Peers
from shoal.base.peer import Address, Invite

__all__ = ["REPLAYS"]

TOLD_WITHIN_S = 30.0
EPOCHS = 10**6


def left_after(seconds: float, *those: Peer) -> list[Report]:
    """What they report when they are told to leave, so long after the first of them has taken a step."""
    those[0].wait("epoch")
    time.sleep(seconds)
    for each in those:
        each.tell("leave")
    return [each.result() for each in those]


def together_or_told(reports: list[Report], word: str) -> Verdict:
    """All take steps with all others, or each has a warning with this word."""
    least = min(sum(count == len(reports) for count in report.steps.values()) for report in reports)
    told = [report.warned(word) for report in reports]
    return Verdict(least > 10 or all(told), f"{least} epochs together, {told} warnings with {word!r}")


def another_run() -> Verdict:
    """A peer trains another `run_id` than that of its invite: it is warned within 30 s."""
    with Peers() as peers:
        (old,) = joined(peers, [Job(epochs=EPOCHS)])
        invite = Invite((Address.parse(dict(old.said)["address"]),), RUN)
        job = Job(index=1, epochs=EPOCHS, entries=(str(invite),), options={"run_id": "truht"})
        reports = left_after(TOLD_WITHIN_S, peers.start(train, job=job), old)
    told = [text for text in reports[0].warnings if "its invite is for run" in text]
    return Verdict(len(told) == 1, f"{len(told)} warnings{f': {told[0][:150]}' if told else ''}")


def in_namespaces(hosts: int, replay: Callable[[Peers, Callable[[int], str]], list[Report]]) -> Verdict:
    """What becomes of peers on machines of one network."""
    try:
        with Emulator(hosts, Shape(delay_ms=0.1)) as net, Peers() as peers:
            return together_or_told(
                replay(peers, lambda host: f"/var/run/netns/{net.command(host)[-1]}"), "own machine"
            )
    except NotPermitted as error:
        raise CannotRunError(f"needs network namespaces: {error}") from error


def of_loopback(peers: Peers, path: Callable[[int], str]) -> list[Report]:
    """Two that listen where they do by default, with a DHT in between that both reach."""
    entry = peers.start(only_a_way_in, namespace=path(0)).wait("address")
    jobs = [Job(index=i, epochs=EPOCHS, target=80, pace_s=0.05, entries=(entry,)) for i in range(2)]
    return left_after(TOLD_WITHIN_S, *(peers.start(at_home, job=job, namespace=path(job.index)) for job in jobs))


def loopback_default() -> Verdict:
    """Two machines whose peers listen on loopback, as by default: they train together, or say why not."""
    return in_namespaces(2, of_loopback)


def of_three(peers: Peers, path: Callable[[int], str]) -> list[Report]:
    """Three that listen everywhere; the first one is the entry of the others."""
    job = Job(epochs=EPOCHS, target=120, pace_s=0.05, dht={"host_maddrs": "/ip4/0.0.0.0/tcp/4000"})
    first = peers.start(at_home, job=job, namespace=path(0))
    first.wait("address")
    entry = Address.parse(dict(first.said)["address"])
    entries = (str(Address("10.201.0.1", entry.port, entry.peer_id)),)
    others = (changed(job, index=index, entries=entries) for index in (1, 2))
    return left_after(20.0, first, *(peers.start(at_home, job=each, namespace=path(each.index)) for each in others))


def no_default_route() -> Verdict:
    """`0.0.0.0` on three machines without a default route, which reach each other: one swarm, or told why not."""
    return in_namespaces(3, of_three)


def keep_contribution(trainee: Trainee) -> None:
    """How many of its samples have counted."""
    trainee.report.values["contributed"] = trainee.swarm.collaboration.contribution.contributed


def long_batches() -> Verdict:
    """One of three has batches of 1.2 epochs: its samples count, or it is told so, once and with numbers."""
    usual = Job(epochs=60, target=160, batch=16, pace_s=0.1, hook=keep_contribution)
    with Peers() as peers:
        reports = together(peers, [usual, changed(usual, index=1), changed(usual, index=2, pace_s=0.6)])
    given, told = reports[2].values["contributed"], reports[2].warned("none of the samples")
    measured = f"{counted(given, 16 * 50, 'samples count')}, {told} warnings"
    return Verdict(given > 0 or told == 1, measured)


REPLAYS: tuple[Callable[[], Verdict], ...] = (another_run, loopback_default, no_default_route, long_batches)
