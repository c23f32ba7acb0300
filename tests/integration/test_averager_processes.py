"""Averaging between real processes over real sockets: agreement, deaths in mid-round, consistent state."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from tests.integration.scripts import tensors_of
from tests.integration.workers import Worker, Workers, open_workers, same

SMALL = [[3], [1000, 3], [], [70_000]]
LARGE = [[6_000_000]]
"""Long enough on its way that a member can be killed before it is through."""


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


def begin(meeting: shoal.DHT, workers: list[Worker], script: str, **arguments: Any) -> dict[str, Worker]:
    """Start a script on all of them; returns them by peer id."""
    addresses = [str(address) for address in meeting.get_visible_maddrs()]
    for rank, worker in enumerate(workers):
        worker.start(script, initial_peers=addresses, **{"rank": rank, **arguments})
    return {worker.expect("joined")[0]: worker for worker in workers}


def mean(ranks: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """What the average has to be, in float64."""
    values = [tensors_of(rank, shapes, "float32") for rank in ranks]
    return [torch.stack([tensor.double() for tensor in same_place]).mean(0) for same_place in zip(*values, strict=True)]


def test_processes_average_and_agree(workers: Workers, meeting: shoal.DHT) -> None:
    """Four peers end with the same bits, and these are the mean."""
    members = begin(meeting, workers.take(4), "average", shapes=SMALL, group=4)
    rounds = {peer: worker.expect("round") for peer, worker in members.items()}
    for worker in members.values():
        worker.finish()
    assert all(found["ok"] and found["ranks"] == [0, 1, 2, 3] for found in rounds.values()), rounds
    assert same({peer: found["hash"] for peer, found in rounds.items()})
    wanted = [float(tensor.flatten()[0]) for tensor in mean([0, 1, 2, 3], SMALL)]
    for found in rounds.values():
        assert found["first"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_kill_in_mid_round_leaves_the_others_in_agreement(workers: Workers, meeting: shoal.DHT, victim: int) -> None:
    """kill -9 of a member as its round begins: the others end the round soon, agree or are untouched, and meet again."""
    members = begin(
        meeting, workers.take(3), "average", shapes=LARGE, group=3, rounds=2, part_size_bytes=1 << 16, min_group_size=2
    )
    order = next(iter(members.values())).expect("group")
    for worker in list(members.values())[1:]:
        worker.expect("group")
    # The first of the group leads and decides, the others only reduce: each place is killed once.
    members.pop(order[victim]).signal(signal.SIGKILL)
    rounds = {peer: worker.expect("round", timeout_s=30) for peer, worker in members.items()}
    assert same({peer: found["hash"] for peer, found in rounds.items() if found["ok"]}), rounds
    assert all(found["untouched"] for found in rounds.values() if not found["ok"]), rounds
    for worker in members.values():
        worker.tell(2)
    again = {peer: worker.expect("round", timeout_s=30) for peer, worker in members.items()}
    for worker in members.values():
        worker.finish()
    assert all(found["ok"] for found in again.values()), again
    assert same({peer: found["hash"] for peer, found in again.items()})


def test_frozen_peer_does_not_hold_up_the_others(workers: Workers, meeting: shoal.DHT) -> None:
    """SIGSTOP as the round begins: the others go on without it, and it is untouched or agrees when it wakes up."""
    members = begin(
        meeting, workers.take(3), "average", shapes=LARGE, group=3, part_size_bytes=1 << 16, sender_timeout=2.0
    )
    order = next(iter(members.values())).expect("group")
    for worker in list(members.values())[1:]:
        worker.expect("group")
    frozen = members.pop(order[1])
    frozen.signal(signal.SIGSTOP)
    try:
        rounds = {peer: worker.expect("round", timeout_s=45) for peer, worker in members.items()}
        assert same({peer: found["hash"] for peer, found in rounds.items() if found["ok"]}), rounds
        assert all(found["untouched"] for found in rounds.values() if not found["ok"]), rounds
    finally:
        frozen.signal(signal.SIGCONT)
    late = frozen.expect("round")
    assert late["untouched"] or late["hash"] in {found["hash"] for found in rounds.values()}
    for worker in (frozen, *members.values()):
        worker.finish()


def test_bfloat16_through_float16_compression_averages(workers: Workers, meeting: shoal.DHT) -> None:
    """bfloat16 tensors with Float16Compression: a result, the same for all, where other systems hang for ever."""
    members = begin(meeting, workers.take(2), "average", shapes=SMALL, group=2, dtype="bfloat16", codec="float16")
    rounds = {peer: worker.expect("round") for peer, worker in members.items()}
    for worker in members.values():
        worker.finish()
    assert all(found["ok"] for found in rounds.values()), rounds
    assert same({peer: found["hash"] for peer, found in rounds.items()})
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
    versions = []
    with shoal.DecentralizedAverager(mine, meeting, start=True, prefix="state", allow_state_sharing=False) as averager:
        while len(versions) < 4:
            if (found := averager.load_state_from_peers(timeout=60)) is not None:
                _, tensors = found
                assert len({float(tensor.min()) for tensor in tensors} | {float(tensor.max()) for tensor in tensors}) == 1
                versions.append(float(tensors[0][0]))
    assert all(float(tensor.abs().max()) == 0 for tensor in mine), "a download was applied"
    donor.tell("enough")
    assert versions == sorted(versions)
    assert 0 < versions[0] < versions[-1] <= donor.expect("versions")
    donor.finish()


def test_nobody_shares_a_state(meeting: shoal.DHT) -> None:
    """`load_state_from_peers` says None, soon, where there is no donor; one's own state does not count."""
    with shoal.DecentralizedAverager([torch.ones(3)], meeting, start=True, prefix="lonely") as averager:
        assert averager.load_state_from_peers(timeout=20) is None
