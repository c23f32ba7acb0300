"""Averaging between real processes over real sockets: agreement, deaths in mid-round, consistent state."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from tests.integration.scripts import tensors_of
from tests.integration.workers import LONG_S, Worker, Workers, open_workers, same

SMALL = [[3], [1000, 3], [], [70_000]]
LARGE = [[6_000_000]]
"""Long enough on its way that a member can be killed before it is through."""

SOON_S = 45.0
"""The survivors' limit: far below the 120 s that a round may take, far above what they need."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Processes for this file."""
    with open_workers() as found:
        yield found


@pytest.fixture(scope="module")
def meeting() -> Iterator[shoal.DHT]:
    """A peer by which the others find each other."""
    with shoal.DHT(start=True) as dht:
        yield dht


def begin(meeting: shoal.DHT, workers: list[Worker], **arguments: Any) -> dict[str, Worker]:
    """Have all of them ready to average; returns them by peer id."""
    addresses = [str(address) for address in meeting.get_visible_maddrs()]
    for rank, worker in enumerate(workers):
        worker.start("average", initial_peers=addresses, rank=rank, **arguments)
    return {worker.expect("joined")[0]: worker for worker in workers}


def step(members: dict[str, Worker]) -> list[str]:
    """Let all of them average once; returns when they are in one group: its peers, the leader first."""
    for worker in members.values():
        worker.tell(len(members))
    for worker in members.values():
        while len(order := worker.expect("group")) < len(members):
            pass
    return list(order)


def outcomes(members: dict[str, Worker], timeout_s: float = LONG_S) -> dict[str, Any]:
    """How the step ended for each."""
    return {peer: worker.expect("round", timeout_s) for peer, worker in members.items()}


def finish(members: dict[str, Worker]) -> None:
    """Let them leave."""
    for worker in members.values():
        worker.tell(None)
    for worker in members.values():
        worker.finish()


def mean(ranks: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """What the average has to be, in float64."""
    values = [tensors_of(rank, shapes, "float32") for rank in ranks]
    return [torch.stack([tensor.double() for tensor in same_place]).mean(0) for same_place in zip(*values, strict=True)]


def check_agreement(rounds: dict[str, Any]) -> None:
    """Peers that succeeded hold the same bits; those that failed are untouched."""
    assert same({peer: found["hash"] for peer, found in rounds.items() if found["ok"]}), rounds
    assert all(found["untouched"] for found in rounds.values() if not found["ok"]), rounds


def test_processes_average_and_agree(workers: Workers, meeting: shoal.DHT) -> None:
    """Four peers end with the same bits, and these are the mean."""
    members = begin(meeting, workers.take(4), shapes=SMALL)
    step(members)
    rounds = outcomes(members)
    finish(members)
    assert all(found["ok"] and found["ranks"] == [0, 1, 2, 3] for found in rounds.values()), rounds
    check_agreement(rounds)
    wanted = [float(tensor.flatten()[0]) for tensor in mean([0, 1, 2, 3], SMALL)]
    for found in rounds.values():
        assert found["first"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_kill_in_mid_round_leaves_the_others_in_agreement(workers: Workers, meeting: shoal.DHT, victim: int) -> None:
    """A member is killed as its round begins: the others end it soon, agree or are untouched, and meet again."""
    members = begin(meeting, workers.take(3), shapes=LARGE, part_size_bytes=1 << 16)
    order = step(members)
    # The first of the group leads and decides, the others only reduce: each place is killed once.
    members.pop(order[victim]).signal(signal.SIGKILL)
    check_agreement(outcomes(members, SOON_S))
    step(members)
    again = outcomes(members, SOON_S)
    finish(members)
    assert all(found["ok"] for found in again.values()), again
    check_agreement(again)


def test_frozen_peer_does_not_hold_up_the_others(workers: Workers, meeting: shoal.DHT) -> None:
    """SIGSTOP as the round begins: the others go on without it, and it is untouched or agrees when it wakes up."""
    members = begin(meeting, workers.take(3), shapes=LARGE, part_size_bytes=1 << 16, sender_timeout=2.0)
    frozen = step(members)[1]
    members[frozen].signal(signal.SIGSTOP)
    try:
        rounds = outcomes({peer: worker for peer, worker in members.items() if peer != frozen}, SOON_S)
    finally:
        members[frozen].signal(signal.SIGCONT)
    rounds[frozen] = members[frozen].expect("round")
    finish(members)
    check_agreement(rounds)


def test_bfloat16_through_float16_compression_averages(workers: Workers, meeting: shoal.DHT) -> None:
    """bfloat16 tensors with Float16Compression: a result, the same for all, where other systems hang for ever."""
    members = begin(meeting, workers.take(2), shapes=SMALL, dtype="bfloat16", codec="float16")
    step(members)
    rounds = outcomes(members)
    finish(members)
    assert all(found["ok"] for found in rounds.values()), rounds
    check_agreement(rounds)
    wanted = [float(tensor.flatten()[0]) for tensor in mean([0, 1], SMALL)]
    assert next(iter(rounds.values()))["first"] == pytest.approx(wanted, abs=0.05)


def test_downloaded_state_is_of_one_version(workers: Workers, meeting: shoal.DHT) -> None:
    """A donor in another process rewrites all tensors all the time: no download mixes two versions."""
    count, numel = 20, 50_000
    (donor,) = workers.take(1)
    donor.start(
        "rewrite", initial_peers=[str(address) for address in meeting.get_visible_maddrs()], count=count, numel=numel
    )
    donor.expect("joined")
    mine = [torch.zeros(numel) for _ in range(count)]
    versions: list[float] = []
    with shoal.DecentralizedAverager(mine, meeting, start=True, prefix="state", allow_state_sharing=False) as averager:
        while len(set(versions)) < 4:
            if (found := averager.load_state_from_peers(timeout=60)) is not None:
                _, tensors = found
                assert (
                    len({float(tensor.min()) for tensor in tensors} | {float(tensor.max()) for tensor in tensors}) == 1
                )
                versions.append(float(tensors[0][0]))
    assert all(float(tensor.abs().max()) == 0 for tensor in mine), "a download was applied"
    donor.tell("enough")
    assert versions == sorted(versions)
    # The first download may be of version 0: nothing says that the donor has begun to rewrite by then.
    assert versions[-1] <= donor.expect("versions")
    donor.finish()


def test_nobody_shares_a_state(meeting: shoal.DHT) -> None:
    """`load_state_from_peers` says None, soon, where there is no donor; one's own state does not count."""
    with shoal.DecentralizedAverager([torch.ones(3)], meeting, start=True, prefix="lonely") as averager:
        assert averager.load_state_from_peers(timeout=20) is None
