"""The donor's side: snapshots shared by receivers, their number, their life, and the upload limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shoal.base.clock import Env
from shoal.errors import ConfigError, PeerRefused, StateUnavailable
from shoal.events import PeerDropped, StateServed, Warned
from shoal.protocol.wire import FetchChunks, GetManifest, ManifestReply, MoreChunks
from shoal.sim import run, sleep
from shoal.state.wire import DownloadLimits, Pacer, ShareLimits, StateDonor
from shoal.state.wire.upload import Upload
from tests.sim.state_kit import (
    MIB,
    PREFIX,
    Box,
    Node,
    SlowExecutor,
    donors_of,
    fetch,
    new_swarm,
    node,
    random_tensors,
    same,
)


def slow(delay_s: float) -> Callable[[Env], Env]:
    """Gives a host such an executor."""
    return lambda env: replace(env, executor=SlowExecutor(delay_s))


def donor_at(where: Node) -> StateDonor:
    """The donor of a node that has one."""
    assert where.donor is not None
    return where.donor


def test_a_donor_without_memory_for_a_copy_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It told newcomers "internal", and its user a name of an error. Later it has memory again."""

    def none_left(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {numel} bytes")

    async def main() -> None:
        swarm = new_swarm()
        box = Box(random_tensors(1, 2))
        donor = await swarm.start_peer("donor", node(box))
        await swarm.start_peer("new", node())
        with monkeypatch.context() as patch:
            patch.setattr("shoal.state.wire.snapshot.allocate", none_left)
            for _ in range(2):
                with pytest.raises(StateUnavailable, match="no copy of the state can be made for newcomers"):
                    await fetch(swarm, "new", donors_of(donor), timeout_s=20.0)
        (warning,) = donor.seen(Warned)
        assert "can't allocate memory" in warning.message
        assert "has no memory for one, give it more" in warning.message
        assert donor_at(donor).snapshot is None
        assert not box.lock.locked()
        await sleep(60.0)
        state = await fetch(swarm, "new", donors_of(donor))
        assert same(state.tensors, box.tensors)

    run(main, seed=3)


def test_receivers_that_come_together_share_one_snapshot() -> None:
    """Five newcomers, one hold of the state's lock, one copy; each is told in an event."""

    async def main() -> None:
        swarm = new_swarm(bandwidth_bytes_s=None)
        box = Box(random_tensors(1, 2, 3))
        donor = await swarm.start_peer("donor", node(box, change_env=slow(0.5)))
        names = [f"new{i}" for i in range(5)]
        await swarm.start_peers(names, node())
        states = await asyncio.gather(*(fetch(swarm, name, donors_of(donor)) for name in names))
        assert all(same(state.tensors, box.tensors) for state in states)
        assert box.holds == 1
        assert donor_at(donor).snapshot is not None
        served = donor.seen(StateServed)
        assert {event.peer for event in served} == {swarm.peer(name).peer for name in names}
        assert {event.bytes_sent for event in served} == {5 * MIB}

    run(main)


def test_a_snapshot_is_freed_when_nobody_took_it_for_a_while() -> None:
    """Memory comes back after `linger_s`; a receiver that keeps on taking keeps it."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box(random_tensors(1, 16))
        donor = await swarm.start_peer("donor", node(box, limits=ShareLimits(linger_s=2.0)))
        await swarm.start_peer("new", node())
        download = asyncio.create_task(fetch(swarm, "new", donors_of(donor)))
        await sleep(3.5)
        assert not download.done()
        assert donor_at(donor).snapshot is not None
        await download
        assert donor_at(donor).snapshot is not None
        await sleep(4.5)
        assert donor_at(donor).snapshot is None
        assert donor_at(donor).receivers == 0

    run(main)


def test_the_lock_is_held_to_copy_and_not_to_hash_or_send() -> None:
    """The owner goes on working while its state is hashed and sent: the lock is taken for two steps of the executor."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box(random_tensors(1, 8))
        donor = await swarm.start_peer("donor", node(box, change_env=slow(0.5)))
        await swarm.start_peer("new", node())
        held: list[float] = []
        download = asyncio.create_task(fetch(swarm, "new", donors_of(donor)))
        while not download.done():
            if box.lock.locked():
                held.append(asyncio.get_running_loop().time())
            await sleep(0.05)
        assert held
        assert max(held) - min(held) <= 1.0
        assert (await download).duration_s > 3.0

    run(main)


def test_a_snapshot_that_takes_long_to_make_is_waited_for() -> None:
    """Thirty seconds of looking, copying and hashing are no silence: the donor says "not yet" in time."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 1)), change_env=slow(10.0)))
        await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(donor))
        assert same(state.tensors, random_tensors(1, 1))
        assert 30 < state.duration_s < 33

    run(main)


def test_the_time_to_copy_is_not_the_silence_of_a_donor() -> None:
    """A receiver that leaves silent donors soon has the same patience while they copy and hash their states."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 4)), change_env=slow(1.5)))
        await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(donor), limits=DownloadLimits(stall_s=2.0))
        assert same(state.tensors, random_tensors(1, 4))

    run(main)


def test_a_snapshot_that_never_comes_is_given_up() -> None:
    """A donor that only ever says "not yet" keeps nobody from the next one, which is asked beside it after 2 s.

    The state of that one is handed over 5 s later, as no other host says that it has it, too.
    """

    async def main() -> None:
        swarm = new_swarm()
        never = await swarm.start_peer("never", node(Box([torch.zeros(1)]), change_env=slow(1e5)))
        good = await swarm.start_peer("good", node(Box([torch.ones(1)])))
        await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(never, good))
        assert state.donors == (good.peer,)
        assert 2 < state.duration_s < 8

    run(main)


@pytest.mark.parametrize(("receivers", "seconds"), [(1, 4.0), (3, 12.0)])
def test_the_upload_limit_is_kept_over_all_receivers(receivers: int, seconds: float) -> None:
    """4 MiB for each at 1 MiB/s in all, less the quarter of a second that may go at once."""

    async def main() -> None:
        swarm = new_swarm(bandwidth_bytes_s=None)
        box = Box(random_tensors(1, 4))
        donor = await swarm.start_peer("donor", node(box, limits=ShareLimits(upload_bytes_per_s=MIB)))
        names = [f"new{i}" for i in range(receivers)]
        await swarm.start_peers(names, node())
        states = await asyncio.gather(*(fetch(swarm, name, donors_of(donor)) for name in names))
        assert all(same(state.tensors, box.tensors) for state in states)
        assert max(state.duration_s for state in states) == pytest.approx(seconds - 0.25, abs=0.3)
        assert min(state.duration_s for state in states) > seconds - 1.5

    run(main)


def test_the_lowest_upload_limit_does_not_look_like_silence() -> None:
    """At 32 KiB/s over sixteen receivers none is left hanging for five seconds."""

    async def main() -> None:
        swarm = new_swarm(bandwidth_bytes_s=None)
        box = Box(random_tensors(1, 0.125))
        donor = await swarm.start_peer("donor", node(box, limits=ShareLimits(upload_bytes_per_s=32 << 10)))
        names = [f"new{i}" for i in range(16)]
        await swarm.start_peers(names, node())
        states = await asyncio.gather(*(fetch(swarm, name, donors_of(donor)) for name in names))
        assert sum(state.bytes_received for state in states) == 16 * 0.125 * MIB
        assert max(state.duration_s for state in states) == pytest.approx(64, abs=2)

    run(main)


def test_donors_of_one_peer_can_share_an_upload_limit() -> None:
    """Two states, one pacer: together they keep to the rate."""

    async def main() -> None:
        swarm = new_swarm(bandwidth_bytes_s=None)
        donor = await swarm.start_peer("donor", node())
        pacer = Pacer(MIB)
        boxes = {prefix: Box(random_tensors(i, 2)) for i, prefix in enumerate(("one", "two"))}
        for prefix, box in boxes.items():
            StateDonor(donor.endpoint, donor.env, prefix, box.hold, box.version, pacer=pacer)
        await swarm.start_peer("new", node())
        states = await asyncio.gather(
            *(fetch(swarm, "new", donors_of(donor), prefix=prefix) for prefix in boxes),
        )
        assert all(same(state.tensors, box.tensors) for state, box in zip(states, boxes.values(), strict=True))
        assert max(state.duration_s for state in states) == pytest.approx(3.75, abs=0.3)

    run(main)


def test_newcomers_beyond_the_limit_wait_for_their_turn() -> None:
    """A crowd does not choke the donor, and nobody of the crowd fails."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box(random_tensors(1, 24))
        donor = await swarm.start_peer("donor", node(box, limits=ShareLimits(max_receivers=2)))
        names = [f"new{i}" for i in range(5)]
        await swarm.start_peers(names, node())
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, donor_at(donor).receivers)
                await sleep(0.05)

        swarm.spawn("donor", watch())
        states = await asyncio.gather(*(fetch(swarm, name, donors_of(donor)) for name in names))
        assert all(same(state.tensors, box.tensors) for state in states)
        assert most == 2

    run(main)


def test_a_busy_donor_is_passed_over_for_a_free_one() -> None:
    """Priority says whom to ask first, not whom to wait for."""

    async def main() -> None:
        swarm = new_swarm()
        busy = await swarm.start_peer("busy", node(Box(random_tensors(1, 16)), limits=ShareLimits(max_receivers=1)))
        free = await swarm.start_peer("free", node(Box(random_tensors(1, 16))))
        await swarm.start_peers(["new0", "new1"], node())
        first = asyncio.create_task(fetch(swarm, "new0", donors_of(busy, free)))
        await sleep(1.0)
        second = await fetch(swarm, "new1", donors_of(busy, free))
        assert second.donors[0] == free.peer
        assert (await first).donors == (busy.peer,)

    run(main)


def test_sharing_can_be_switched_off_and_on() -> None:
    """New receivers are refused with the reason, the one being served is served to the end."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 8))))
        await swarm.start_peers(["new0", "new1"], node())
        first = asyncio.create_task(fetch(swarm, "new0", donors_of(donor)))
        await sleep(1.5)
        donor_at(donor).enabled = False
        with pytest.raises(StateUnavailable, match="switched off"):
            await fetch(swarm, "new1", donors_of(donor))
        await first
        donor_at(donor).enabled = True
        await fetch(swarm, "new1", donors_of(donor))

    run(main)


def test_a_stopped_donor_frees_everything_and_sends_its_receivers_away() -> None:
    """Nothing is left: no copy, no handler; the receiver goes on with another donor."""

    async def main() -> None:
        swarm = new_swarm()
        first = await swarm.start_peer("first", node(Box(random_tensors(1, 16))))
        second = await swarm.start_peer("second", node(Box(random_tensors(1, 16))))
        await swarm.start_peer("new", node())
        download = asyncio.create_task(fetch(swarm, "new", donors_of(first, second)))
        await sleep(2.0)
        donor_at(first).stop()
        donor_at(first).stop()
        state = await download
        assert state.donors == (second.peer, first.peer)
        assert state.bytes_received < 17 * MIB
        assert (donor_at(first).snapshot, donor_at(first).receivers) == (None, 0)

    run(main)


def test_stopping_while_a_snapshot_is_made_refuses_who_waits_for_it() -> None:
    """A receiver that waits for the snapshot is told at once."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box([torch.zeros(1)]), change_env=slow(30.0)))
        await swarm.start_peer("new", node())
        download = asyncio.create_task(fetch(swarm, "new", donors_of(donor)))
        await sleep(1.0)
        donor_at(donor).stop()
        with pytest.raises(StateUnavailable, match="not shared any more"):
            await download
        assert asyncio.get_running_loop().time() < 1.5

    run(main)


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        (lambda: Box([torch.zeros(1, dtype=torch.complex64)]), "complex64"),
        (lambda: Box([torch.zeros(1)], metadata=object()), "plain"),
        (lambda: Box([torch.zeros(1)], metadata="x" * (MIB - 100)), "description of the state"),
        (lambda: Box([torch.zeros(1)], codecs=[]), "as many codecs"),
    ],
    ids=["dtype", "metadata", "size", "codecs"],
)
def test_a_state_that_cannot_be_sent_is_said_at_the_donor_too(box: Callable[[], Box], reason: str) -> None:
    """The owner made the mistake, so it gets a warning; the receiver gets a refusal."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(box()))
        await swarm.start_peer("new", node())
        with pytest.raises(StateUnavailable, match=reason):
            await fetch(swarm, "new", donors_of(donor))
        [warning] = donor.seen(Warned)
        assert reason in warning.message
        assert donor_at(donor).snapshot is None

    run(main)


def test_an_owner_that_fails_to_hold_its_state_costs_one_answer() -> None:
    """An exception of the owner's code is a warning here and "internal" there; the next receiver is served."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box([torch.ones(3)])
        donor = await swarm.start_peer("donor", node(box))
        await swarm.start_peer("new", node())
        tensors, box.tensors = box.tensors, None  # type: ignore[assignment]
        with pytest.raises(StateUnavailable, match="TypeError"):
            await fetch(swarm, "new", donors_of(donor))
        assert len(donor.seen(Warned)) == 1
        box.tensors = tensors
        assert same((await fetch(swarm, "new", donors_of(donor))).tensors, tensors)

    run(main)


async def first_manifest(me: Node, donor: Node) -> ManifestReply:
    """The donor's manifest, asked for by hand."""
    reply = await me.endpoint.call(donor.endpoint.contact, GetManifest(PREFIX), timeout_s=5.0)
    assert isinstance(reply, ManifestReply)
    return reply


def test_a_receiver_that_does_not_read_is_left() -> None:
    """It holds a snapshot for `send_stall_s`, not for ever."""

    async def main() -> None:
        swarm = new_swarm(window_bytes=MIB)
        limits = ShareLimits(send_stall_s=5.0, linger_s=2.0)
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 16)), limits=limits))
        me = await swarm.start_peer("new", node())

        async def take_and_sleep() -> None:
            manifest = await first_manifest(me, donor)
            opening = FetchChunks(PREFIX, manifest.snapshot, list(range(16)))
            stream = await me.endpoint.open(donor.endpoint.contact, opening, timeout_s=5.0)
            await sleep(20.0)
            stream.abort()

        sleeper = swarm.spawn("new", take_and_sleep())
        await sleep(3.0)
        assert donor_at(donor).receivers == 1
        await sleep(8.0)
        assert (donor_at(donor).receivers, donor_at(donor).snapshot) == (0, None)
        await sleeper

    run(main)


@pytest.mark.parametrize("chunks", [[0, 0], [2], [-1], [0, 1, 2], [1 << 62]])
def test_impossible_chunks_are_refused(chunks: list[int]) -> None:
    """Twice the same, or one that does not exist: nothing is sent, and the receiver is dropped by name."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 1.5))))
        me = await swarm.start_peer("new", node())

        async def ask() -> None:
            manifest = await first_manifest(me, donor)
            opening = FetchChunks(PREFIX, manifest.snapshot, chunks)
            stream = await me.endpoint.open(donor.endpoint.contact, opening, timeout_s=5.0)
            with pytest.raises(PeerRefused) as refusal:
                await stream.recv()
            assert refusal.value.code == "bad"

        await swarm.run_on("new", ask)
        assert not donor.seen(StateServed)
        assert [event.peer for event in donor.seen(PeerDropped)] == [me.peer]
        assert donor_at(donor).receivers == 0

    run(main)


@pytest.mark.parametrize("more", [[1], [0], [2, 2], [7]])
def test_impossible_chunks_are_refused_also_later(more: list[int]) -> None:
    """Chunks that are added to a stream are held to the same rule: none twice, none that is not there."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 4))))
        me = await swarm.start_peer("new", node())

        async def ask() -> None:
            manifest = await first_manifest(me, donor)
            opening = FetchChunks(PREFIX, manifest.snapshot, [0, 1])
            stream = await me.endpoint.open(donor.endpoint.contact, opening, timeout_s=5.0)
            await stream.send(MoreChunks([3]))
            await stream.send(MoreChunks(more))

            async def take_all() -> None:
                while (came := await stream.recv()) is not None:
                    await stream.readinto(bytearray(came[1]))

            with pytest.raises(PeerRefused) as refusal:
                await take_all()
            assert refusal.value.code == "bad"

        await swarm.run_on("new", ask)
        assert [event.peer for event in donor.seen(PeerDropped)] == [me.peer]
        assert donor_at(donor).receivers == 0

    run(main)


def test_a_receiver_that_asks_for_nothing_more_is_left() -> None:
    """A stream that is kept open for nothing takes a place no longer than `send_stall_s`; it is told why."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 4)), limits=ShareLimits(send_stall_s=5.0)))
        me = await swarm.start_peer("new", node())

        async def ask() -> None:
            manifest = await first_manifest(me, donor)
            opening = FetchChunks(PREFIX, manifest.snapshot, [0])
            stream = await me.endpoint.open(donor.endpoint.contact, opening, timeout_s=5.0)
            left = 2 * MIB
            while left:
                came = await stream.recv()
                assert came is not None
                await stream.readinto(bytearray(came[1]))
                left -= came[1]
                if left == MIB:
                    await sleep(3.0)
                    await stream.send(MoreChunks([2]))
            assert donor_at(donor).receivers == 1
            with pytest.raises(PeerRefused, match="no chunk was asked for within 5 s"):
                await stream.recv()

        await swarm.run_on("new", ask)
        assert donor_at(donor).receivers == 0

    run(main)


def test_a_snapshot_that_is_gone_is_refused() -> None:
    """The receiver is told to ask again."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 1))))
        me = await swarm.start_peer("new", node())

        async def ask() -> None:
            opening = FetchChunks(PREFIX, b"?" * 16, [0])
            stream = await me.endpoint.open(donor.endpoint.contact, opening, timeout_s=5.0)
            with pytest.raises(PeerRefused, match="gone"):
                await stream.recv()

        await swarm.run_on("new", ask)

    run(main)


@pytest.mark.parametrize(
    "limits",
    [{"max_receivers": 0}, {"beside_rounds": 0.0}, {"max_receivers_per_peer": -1}, {"upload_bytes_per_s": 10.0}],
    ids=str,
)
def test_limits_out_of_range_are_named(limits: dict[str, float]) -> None:
    """A donor that could serve nobody is a mistake."""

    async def main() -> None:
        swarm = new_swarm()
        name = next(iter(limits))
        with pytest.raises(ConfigError, match="upload limit" if name == "upload_bytes_per_s" else name):
            await swarm.start_peer("donor", node(Box([]), limits=ShareLimits(**limits)))  # type: ignore[arg-type]

    run(main)


def test_pieces_grow_where_they_go_in_no_time() -> None:
    """So that a fast line costs fewer messages, and a slow one does not keep a round waiting."""

    async def main() -> None:
        swarm = new_swarm()
        upload = Upload.of((await swarm.start_peer("donor", node())).endpoint)
        upload.watch()
        await sleep(1.0)

        async def send(pause_s: float) -> int:
            nbytes = upload.piece_bytes(8 * MIB, Pacer(None), 0.1)
            await upload.admit(nbytes, Pacer(None), 0.1)
            await sleep(pause_s)
            return nbytes >> 10

        assert [await send(0.001) for _ in range(5)] == [256, 256, 512, 1024, 1024]
        assert [await send(0.1) for _ in range(3)] == [1024, 1024, 256]

    run(main)


def test_a_state_that_every_receiver_would_refuse_is_not_offered() -> None:
    """A tensor of 33 dimensions was copied and offered again and again, and each receiver called its donor a liar."""

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box([torch.zeros((1,) * 33)])))
        me = await swarm.start_peer("new", node())
        with pytest.raises(StateUnavailable, match="every receiver would refuse the state"):
            await fetch(swarm, "new", donors_of(donor), timeout_s=20.0)
        (warning,) = donor.seen(Warned)
        assert "a tensor has the shape" in warning.message
        assert not me.seen(PeerDropped)

    run(main, seed=4)
