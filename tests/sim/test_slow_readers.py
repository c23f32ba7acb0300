"""Strangers that take a donor's state slowly: a newcomer gets in beside them, and a slow line still gets its state."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.errors import PeerError
from shoal.protocol.wire import FetchChunks, GetManifest, ManifestReply
from shoal.sim import Swarm, run, sleep
from shoal.state.wire import ShareLimits
from tests.sim.state_kit import MIB, PREFIX, Box, Node, donors_of, fetch, new_swarm, node
from tests.situations import reaches

SLOW_BYTES_S = 2600
ONE_SITE, MANY_SITES = "k{}.strangers.net", "k{}.strangers{}.net"


async def start(spare_bytes: int, strangers: list[str]) -> tuple[Swarm[Node], Node]:
    """A donor of 4 MiB, strangers at these hosts that take its state slowly without end, and a newcomer `new`."""
    swarm = new_swarm(bandwidth_bytes_s=4 * MIB, window_bytes=MIB // 4)
    limits = ShareLimits(spare_bytes=spare_bytes)
    donor = await swarm.start_peer("donor", node(Box([torch.zeros(MIB)]), limits=limits))
    await swarm.start_peers([*strangers, "new"], node())
    for name in strangers:
        swarm.spawn(name, take_slowly(swarm.peer(name), donor))
    return swarm, donor


async def take_slowly(me: Node, donor: Node) -> None:
    """Ask for all, and take it so slowly that it moves all the time; begin again whenever the donor ends it."""
    contact = donor.endpoint.contact
    while True:
        try:
            reply = await me.endpoint.call(contact, GetManifest(PREFIX), timeout_s=5.0)
            if isinstance(reply, ManifestReply):
                opening = FetchChunks(PREFIX, reply.snapshot, list(range(len(reply.hashes))))
                stream = await me.endpoint.open(contact, opening, timeout_s=5.0)
                while (came := await stream.recv()) is not None:
                    left = came[1]
                    while left:
                        piece = min(left, 5 * SLOW_BYTES_S)
                        await stream.readinto(bytearray(piece))
                        left -= piece
                        await sleep(5.0)
        except PeerError:
            pass
        await sleep(0.2)


async def newcomer_s(swarm: Swarm[Node], donor: Node) -> float:
    """How long a newcomer takes that has no use for an older state than the present one."""
    assert donor.box is not None
    state = await fetch(swarm, "new", donors_of(donor), min_epoch=donor.box.epoch)
    assert float(state.tensors[0].max()) == float(state.epoch) == donor.box.epoch
    return state.duration_s


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hosts", [ONE_SITE, MANY_SITES], ids=["one site", "many sites"])
@pytest.mark.parametrize("many", [1, 3, 20])
@pytest.mark.parametrize("spare_bytes", [0, 256 * MIB], ids=["a large state", "a small state"])
def test_slow_strangers_keep_no_newcomer_out(spare_bytes: int, many: int, hosts: str) -> None:
    """They have the copies, and the places, and each end of theirs is a beginning: it takes seconds more than alone.

    A stranger that reads 2.6 kB/s kept everybody out for as long as it took, up to 720 s.
    """

    async def main() -> None:
        swarm, donor = await start(spare_bytes, [hosts.format(i, i) for i in range(many)])
        await sleep(20.0)
        assert donor.box is not None
        assert donor.donor is not None
        assert donor.donor.receivers >= min(many, 4)
        for epoch in range(1, 4):
            await donor.box.write(float(epoch))
            assert await newcomer_s(swarm, donor) < 1 + 10
            await sleep(10.0)

    run(main)


def test_a_slow_line_gets_the_state_beside_newcomers_that_come_again_and_again() -> None:
    """Of a small state: there is room for the copy that it takes and for those of the others."""

    async def main() -> None:
        swarm, donor = await start(8 * MIB, [])
        swarm.network.add_host("slow", down_bytes_s=32 << 10)
        await swarm.start_peer("slow", node())
        assert donor.box is not None
        slow = asyncio.create_task(fetch(swarm, "slow", donors_of(donor)))
        await sleep(1.0)
        while not slow.done():
            await donor.box.write(donor.box.epoch + 1.0)
            assert await newcomer_s(swarm, donor) < 3
            await sleep(5.0)
        assert (await slow).duration_s < 4 * 32 + 10

    with reaches("a state is copied anew while an older copy is taken"):
        run(main)


def test_a_slow_line_gets_a_large_state_when_nobody_waits() -> None:
    """While others want a newer one it is left, and afterwards it comes again; it has no time limit of its own."""

    async def main() -> None:
        swarm, donor = await start(0, [])
        swarm.network.add_host("slow", down_bytes_s=32 << 10)
        await swarm.start_peer("slow", node())
        assert donor.box is not None
        slow = asyncio.create_task(fetch(swarm, "slow", donors_of(donor)))
        await sleep(8.0)
        await donor.box.write(1.0)
        assert await newcomer_s(swarm, donor) < 10
        assert (await slow).epoch == 1

    with reaches("a donor leaves a slow reader, as others wait"):
        run(main)


def test_receivers_that_share_a_donors_line_are_not_slow() -> None:
    """Sixteen have all places, each gets a sixteenth, and others wait: nobody is left, and all get the state."""

    async def main() -> None:
        swarm = new_swarm(bandwidth_bytes_s=MIB, window_bytes=MIB // 4)
        donor = await swarm.start_peer("donor", node(Box([torch.zeros(MIB)])))
        names = [f"new{number}" for number in range(24)]
        await swarm.start_peers(names, node())
        states = await asyncio.gather(*(fetch(swarm, name, donors_of(donor)) for name in names))
        assert max(state.duration_s for state in states) < 4 * 24 * 1.2
        assert donor.donor is not None
        assert donor.donor.receivers == 0
        assert all(state.bytes_received < 5 * MIB for state in states)

    run(main)
