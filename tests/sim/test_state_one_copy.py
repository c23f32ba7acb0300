"""A donor holds few copies of its state: who comes while others take an older one shares it, or waits for the next."""

from __future__ import annotations

import asyncio

import torch

from shoal.errors import PeerRefused
from shoal.protocol.wire import FetchChunks, GetManifest, ManifestPending, ManifestReply, MoreChunks
from shoal.sim import Swarm, run, sleep
from shoal.state.wire import DownloadedState, ShareLimits
from tests.sim.state_kit import MIB, PREFIX, Box, Node, donors_of, fetch, new_swarm, node


def now() -> float:
    """Seconds of the loop."""
    return asyncio.get_running_loop().time()


async def start(
    limits: ShareLimits | None = None, *, mebibytes: int = 8, newcomers: int = 3, down_bytes_s: float | None = None
) -> tuple[Swarm[Node], Node]:
    """A donor, and newcomers called `new0`, `new1` and so on. Lines have 4 MiB/s, unless the newcomers' have less."""
    swarm = new_swarm(bandwidth_bytes_s=None if down_bytes_s else 4 * MIB, window_bytes=MIB)
    donor = await swarm.start_peer("donor", node(Box([torch.zeros(mebibytes * MIB // 4)]), limits=limits))
    names = [f"new{i}" for i in range(newcomers)]
    for name in names:
        if down_bytes_s:
            swarm.network.add_host(name, down_bytes_s=down_bytes_s)
    await swarm.start_peers(names, node())
    return swarm, donor


def begin(swarm: Swarm[Node], donor: Node, number: int, *, min_epoch: int = 0) -> asyncio.Task[DownloadedState]:
    """A newcomer begins to download."""
    return asyncio.create_task(fetch(swarm, f"new{number}", donors_of(donor), min_epoch=min_epoch))


async def train(donor: Node, period_s: float) -> None:
    """The state moves on again and again; each value is that of its epoch."""
    assert donor.box is not None
    while True:
        await sleep(period_s)
        await donor.box.write(donor.box.epoch + 1.0)


def is_whole(state: DownloadedState) -> bool:
    """Whether all of it is of its epoch."""
    return {float(state.tensors[0].min()), float(state.tensors[0].max())} == {float(state.epoch)}


def test_newcomers_share_the_copy_that_is_being_taken() -> None:
    """Also where the state has moved on since: it is a state, and nothing else has room."""

    async def main() -> None:
        swarm, donor = await start()
        assert donor.box is not None
        downloads = []
        for number in range(3):
            downloads.append(begin(swarm, donor, number))
            await sleep(0.7)
            await donor.box.write(number + 1.0)
        states = await asyncio.gather(*downloads)
        assert [state.epoch for state in states] == [0, 0, 0]
        assert all(is_whole(state) for state in states)
        assert donor.box.holds == 1
        again = await begin(swarm, donor, 0)
        assert (again.epoch, is_whole(again)) == (3, True)

    run(main)


def test_whoever_asks_when_nobody_takes_it_gets_the_present_state() -> None:
    """At once, however short ago the last download was."""

    async def main() -> None:
        swarm, donor = await start(mebibytes=1)
        assert donor.box is not None
        for epoch in range(3):
            assert (await begin(swarm, donor, epoch)).epoch == epoch
            await donor.box.write(epoch + 1.0)

    run(main)


def test_who_has_no_use_for_the_older_state_waits_until_it_is_taken() -> None:
    """Then all who have waited share one copy; never is there one beside that which is read, if it has no room."""

    async def main() -> None:
        swarm, donor = await start(ShareLimits(spare_bytes=8 * MIB - 1))
        assert donor.box is not None
        first = begin(swarm, donor, 0)
        await sleep(1.0)
        await donor.box.write(1.0)
        waiting = [begin(swarm, donor, number, min_epoch=1) for number in (1, 2)]
        while not first.done():
            assert donor.box.holds == 1
            await sleep(0.05)
        states = [await first, *await asyncio.gather(*waiting)]
        assert [state.epoch for state in states] == [0, 1, 1]
        assert all(is_whole(state) for state in states)
        assert donor.box.holds == 2

    run(main)


def test_a_stream_of_newcomers_does_not_keep_an_old_copy() -> None:
    """One every second, each reads for eight: nobody begins with a state older than the limit, or waits long for it."""

    async def main() -> None:
        swarm, donor = await start(ShareLimits(join_s=4.0), newcomers=20, down_bytes_s=MIB)
        swarm.spawn("donor", train(donor, 1.0))
        assert donor.box is not None
        downloads = []
        for number in range(20):
            downloads.append((donor.box.epoch, begin(swarm, donor, number)))
            await sleep(1.0)
        longest_s = 0.0
        for epoch, download in downloads:
            state = await download
            assert is_whole(state)
            assert state.epoch >= epoch - 5
            longest_s = max(longest_s, state.duration_s)
        assert longest_s < 8 + 8 + 4
        assert donor.box.holds >= 3

    run(main)


async def hold_on(me: Node, donor: Node, every_s: float) -> str:
    """Take one chunk after another as slowly as that; returns with what the donor said at the end."""
    reply = await me.endpoint.call(donor.endpoint.contact, GetManifest(PREFIX), timeout_s=5.0)
    assert isinstance(reply, ManifestReply)
    opening = FetchChunks(PREFIX, reply.snapshot, [0])
    stream = await me.endpoint.open(donor.endpoint.contact, opening, timeout_s=5.0)
    chunk, left = 0, MIB
    try:
        while (came := await stream.recv()) is not None:
            await stream.readinto(bytearray(came[1]))
            left -= came[1]
            if left == 0:
                chunk, left = chunk + 1, MIB
                await sleep(every_s)
                await stream.send(MoreChunks([chunk]))
    except PeerRefused as error:
        return str(error)
    return "end"


def test_a_reader_that_does_not_come_to_an_end_is_sent_away_when_others_wait() -> None:
    """Not before: as long as the state is the same, or nobody wants another, it may take all its time."""

    async def main() -> None:
        swarm, donor = await start(ShareLimits(spare_bytes=0, join_s=5.0, hold_s=20.0), mebibytes=64)
        assert donor.box is not None
        slow = swarm.spawn("new0", hold_on(swarm.peer("new0"), donor, 4.0))
        await sleep(40.0)
        assert not slow.done()
        await donor.box.write(1.0)
        await sleep(40.0)
        assert not slow.done()
        began = now()
        state = await begin(swarm, donor, 1)
        assert (state.epoch, is_whole(state)) == (1, True)
        assert now() - began < 64 / 4 + 10
        assert "others have waited long" in await slow
        again = swarm.spawn("new0", hold_on(swarm.peer("new0"), donor, 0.7))
        await sleep(1.0)
        await donor.box.write(2.0)
        began = now()
        await begin(swarm, donor, 2, min_epoch=2)
        assert 5 + 20 - 2 < now() - began < 5 + 20 + 64 / 4 + 10
        assert "others have waited long" in await again

    run(main)


def test_an_honest_reader_that_was_sent_away_gets_the_newer_state() -> None:
    """It is no failure of its donor: it asks again, and shares the copy with who had waited."""

    async def main() -> None:
        limits = ShareLimits(spare_bytes=0, join_s=1.0, hold_s=2.0, upload_bytes_per_s=2 * MIB)
        swarm, donor = await start(limits, mebibytes=16)
        assert donor.box is not None
        first = begin(swarm, donor, 0)
        await sleep(1.0)
        await donor.box.write(1.0)
        second = begin(swarm, donor, 1, min_epoch=1)
        states = await asyncio.gather(first, second)
        assert [state.epoch for state in states] == [1, 1]
        assert all(is_whole(state) for state in states)
        assert donor.box.holds == 2

    run(main)


def test_asking_again_and_again_keeps_no_copy() -> None:
    """A peer that is told of a copy and never takes it counts for two seconds, once."""

    async def main() -> None:
        swarm, donor = await start(mebibytes=1)
        me = swarm.peer("new0")

        async def ask() -> None:
            while True:
                reply = await me.endpoint.call(donor.endpoint.contact, GetManifest(PREFIX), timeout_s=5.0)
                assert isinstance(reply, ManifestReply | ManifestPending)
                await sleep(0.2)

        swarm.spawn("new0", ask())
        swarm.spawn("donor", train(donor, 0.1))
        await sleep(1.0)
        assert donor.box is not None
        wanted = donor.box.epoch
        state = await begin(swarm, donor, 1, min_epoch=wanted)
        assert state.epoch >= wanted
        assert state.duration_s < 5

    run(main)
