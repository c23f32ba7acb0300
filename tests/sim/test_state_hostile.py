"""Donors that lie, and every mixture of faults: the receiver ends with one true state, or with none and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.peer import PeerID
from shoal.errors import PeerRefused, StateUnavailable
from shoal.events import PeerDropped
from shoal.protocol.wire import Chunk, FetchChunks, GetManifest, ManifestPending, ManifestReply, MoreChunks
from shoal.rpc import Stream
from shoal.sim import SimNetwork, Swarm, run, sleep
from shoal.state.wire import Donor, DownloadLimits, ShareLimits, StateDonor
from shoal.state.wire.readers import Reader
from shoal.state.wire.snapshot import Snapshot
from tests.sim.state_kit import MIB, Box, Node, SlowExecutor, donors_of, fetch, new_swarm, node, random_tensors, same
from tests.situations import reaches

Send = Callable[[Stream[Chunk, MoreChunks], list[int], bytes], Awaitable[None]]


@pytest.mark.parametrize("nbytes", [4, 8 * MIB])
@pytest.mark.parametrize("epoch", [3, 4])
def test_a_donor_that_answers_first_gave_a_newcomer_a_state_of_its_own(nbytes: int, epoch: int) -> None:
    """The others were still copying theirs. It is named the same, and nobody looks at parameters for ten epochs."""

    async def main() -> None:
        swarm = new_swarm()
        true = torch.ones(nbytes // 4)
        liar = await swarm.start_peer("liar", node(Box([torch.zeros(nbytes // 4)], epoch=epoch)))
        honest = [
            await swarm.start_peer(
                name, node(Box([true], epoch=3), change_env=lambda env: replace(env, executor=SlowExecutor(1.0)))
            )
            for name in ("a", "b")
        ]
        await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(liar, *honest, priorities=[1, 1, 1]))
        assert same(state.tensors, [true])
        assert {donor.peer for donor in honest}.issuperset(state.donors)

    situation = "a complete state of one host waits for the word of another" if nbytes == 4 else ""
    with reaches("a state of one host is left for one that two hosts describe", *filter(None, [situation])):
        run(main)


class ChangesBytes(StateDonor):
    """Sends other bytes than it promised, in the middle."""

    async def _send_chunk(
        self, stream: Stream[Chunk, MoreChunks], reader: Reader, snapshot: Snapshot, chunk: int
    ) -> int:
        if chunk == 2:
            snapshot = replace(snapshot, data=memoryview(bytearray(snapshot.data)))
            snapshot.data[2 * MIB + 5] ^= 1
        return await super()._send_chunk(stream, reader, snapshot, chunk)


class ChangesManifest(StateDonor):
    """Describes its state wrongly; `changes` says how."""

    changes: dict[str, Any]

    async def _show(self, peer: PeerID, request: GetManifest) -> ManifestReply | ManifestPending:
        return msgspec.structs.replace(await super()._show(peer, request), **self.changes)


def sends(script: Send) -> type[StateDonor]:
    """A donor that serves streams by a script, given what was asked for and the true first chunk."""

    class Scripted(StateDonor):
        async def _send(self, stream: Stream[Chunk, MoreChunks], opening: FetchChunks) -> None:
            assert self.snapshot is not None
            await script(stream, opening.chunks, bytes(self.snapshot.data[:MIB]))

    return Scripted


def test_a_donor_that_sends_a_wrong_chunk_is_dropped_by_name_and_not_asked_again() -> None:
    """What it sent before stays, what is wrong is fetched from another; without another there is no state."""

    async def main() -> None:
        swarm = new_swarm()
        liar = await swarm.start_peer("liar", node(Box(random_tensors(1, 8)), kind=ChangesBytes))
        good = await swarm.start_peer("good", node(Box(random_tensors(1, 8))))
        me = await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(liar, good))
        assert same(state.tensors, random_tensors(1, 8))
        assert state.donors[0] == good.peer
        assert state.bytes_received < 15 * MIB
        [dropped] = me.seen(PeerDropped)
        assert (dropped.peer, dropped.reason) == (liar.peer, "chunk 2 does not match its hash")
        with pytest.raises(StateUnavailable, match="chunk 2 does not match its hash"):
            await fetch(swarm, "new", donors_of(liar))

    run(main)


@pytest.mark.parametrize(
    "changes",
    [
        {"kinds": [([1 << 40], "float32", "none", 1 << 42)], "hashes": [b"h" * 32] * 2},
        {"kinds": [([3 * MIB], "uint8", "none", MIB)]},
        {"kinds": [([MIB], "uint8", "zip", MIB)]},
        {"hashes": []},
        {"chunk_bytes": 1},
        {"metadata": b"\x92"},
    ],
    ids=["huge", "contradiction", "codec", "hashes", "chunks", "metadata"],
)
def test_a_manifest_that_cannot_be_costs_only_its_donor(changes: dict[str, Any]) -> None:
    """It is dropped by name, nothing is allocated for it, and the next donor gives the state."""

    async def main() -> None:
        swarm = new_swarm()
        kind = type("Liar", (ChangesManifest,), {"changes": changes})
        liar = await swarm.start_peer("liar", node(Box(random_tensors(1, 2)), kind=kind))
        good = await swarm.start_peer("good", node(Box(random_tensors(1, 2))))
        me = await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(liar, good), limits=DownloadLimits(max_state_bytes=1 << 30))
        assert state.donors == (good.peer,)
        assert [event.peer for event in me.seen(PeerDropped)] == [liar.peer]

    run(main)


def test_a_receiver_without_memory_for_a_state_blames_its_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dropped the donor as one that breaks the protocol. It says what it needs, and asks the donor again later."""

    def fails(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    async def main() -> None:
        swarm = new_swarm()
        donor = await swarm.start_peer("donor", node(Box(random_tensors(1, 2))))
        me = await swarm.start_peer("new", node())
        with monkeypatch.context() as patch:
            patch.setattr("shoal.state.wire.assembly.allocate", fails)
            with pytest.raises(
                StateUnavailable, match=r"^this machine has no memory for a tensor of .* bytes; the who"
            ):
                await fetch(swarm, "new", donors_of(donor))
        assert not me.seen(PeerDropped)
        assert same((await fetch(swarm, "new", donors_of(donor))).tensors, random_tensors(1, 2))

    run(main)


async def _other_chunk(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    await stream.send(Chunk(1), data)


async def _other_offset(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    await stream.send(Chunk(0), data[:1000])
    await stream.send(Chunk(0, 999), data[999:])


async def _too_much(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    await stream.send(Chunk(0), data + b"x")


async def _too_much_in_pieces(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    await stream.send(Chunk(0), data[:-5])
    await stream.send(Chunk(0, len(data) - 5), data[:6])


async def _nothing(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    await stream.send(Chunk(0))


async def _the_end(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    await stream.end()


async def _more_than_all(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    for index in range(5):
        await stream.send(Chunk(index), data)


async def _all_but_the_end(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    for index in range(2):
        await stream.send(Chunk(index), data)
    await sleep(1e5)


async def _another_message(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    await stream.send(ManifestPending(busy=True))  # type: ignore[arg-type]


async def _silence(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    if 0 in chunks:
        await stream.send(Chunk(0), data)
    await sleep(1e5)


async def _silence_within_a_chunk(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    if 0 in chunks:
        await stream.send(Chunk(0), data)
        await stream.send(Chunk(1), data[: MIB // 2])
    await sleep(1e5)


async def _a_drip(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    await stream.send(Chunk(0), data)
    for offset in range(0, MIB, 8 << 10):
        await stream.send(Chunk(1, offset), data[: 8 << 10])
        await sleep(4.9)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_other_chunk, "expected chunk 0"),
        (_other_offset, "expected chunk 0 at 1000"),
        (_too_much, "sent 1048577 bytes"),
        (_too_much_in_pieces, "sent 6 bytes"),
        (_nothing, "sent 0 bytes"),
        (_the_end, "ended before chunk 0"),
        (_another_message, "undecodable"),
    ],
)
def test_a_stream_that_breaks_the_rules_is_ended(script: Send, reason: str) -> None:
    """Wrong order, wrong place, too much, too little: dropped by name, and the next donor gives the state."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box([torch.zeros(2 * MIB, dtype=torch.uint8)])
        liar = await swarm.start_peer("liar", node(box, kind=sends(script)))
        good = await swarm.start_peer("good", node(box))
        me = await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(liar, good))
        assert same(state.tensors, box.tensors)
        assert good.peer in state.donors
        dropped = [event for event in me.seen(PeerDropped) if event.where == "state download"]
        assert [event.peer for event in dropped] == [liar.peer]
        with pytest.raises(StateUnavailable, match=reason):
            await fetch(swarm, "new", donors_of(liar))

    run(main)


@pytest.mark.parametrize("script", [_more_than_all, _all_but_the_end])
def test_what_follows_the_last_chunk_does_not_matter(script: Send) -> None:
    """All chunks were right: the state is complete, whatever its donor does then."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box([torch.zeros(2 * MIB, dtype=torch.uint8)])
        donor = await swarm.start_peer("donor", node(box, kind=sends(script)))
        me = await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(donor))
        assert same(state.tensors, box.tensors)
        assert state.duration_s < 3
        assert not me.seen(PeerDropped)

    run(main)


@pytest.mark.parametrize("script", [_silence, _silence_within_a_chunk])
def test_a_silent_stream_is_left(script: Send) -> None:
    """A live peer that stops sending holds nobody longer than the stall limit, again and again."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box([torch.zeros(2 * MIB, dtype=torch.uint8)])
        mute = await swarm.start_peer("mute", node(box, kind=sends(script)))
        good = await swarm.start_peer("good", node(box))
        await swarm.start_peer("new", node())
        state = await fetch(swarm, "new", donors_of(mute, good))
        assert set(state.donors) == {good.peer, mute.peer}
        assert state.duration_s < 7
        with pytest.raises(StateUnavailable, match="sent nothing for 5 s"):
            await fetch(swarm, "new", donors_of(mute))

    run(main)


def test_a_drip_is_bounded_by_the_deadline() -> None:
    """A donor that sends just enough not to be silent cannot hold a download beyond its time."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box([torch.zeros(2 * MIB, dtype=torch.uint8)])
        drip = await swarm.start_peer("drip", node(box, kind=sends(_a_drip)))
        await swarm.start_peer("new", node())
        with pytest.raises(StateUnavailable, match="within 30 s"):
            await fetch(swarm, "new", donors_of(drip), timeout_s=30.0)
        assert asyncio.get_running_loop().time() == pytest.approx(30.0, abs=1)

    run(main)


async def _a_byte_a_second(stream: Stream[Chunk, MoreChunks], chunks: list[int], data: bytes) -> None:
    for place in range(len(data)):
        await stream.send(Chunk(chunks[0], place), data[place : place + 1])
        await sleep(1.0)


async def duration_beside(swarm: Swarm[Node], better: Sequence[Node]) -> float:
    """How long "new" takes to have the state of a good donor, beside those that withhold a better one."""
    good = await swarm.start_peer("good", node(Box([torch.ones(2 * MIB, dtype=torch.uint8)], epoch=5)))
    await swarm.start_peer("new", node())
    donors = [Donor(each.endpoint.contact, 9.0, 9) for each in better] + [Donor(good.endpoint.contact, 5.0, 5)]
    state = await fetch(swarm, "new", donors, timeout_s=600.0)
    assert (state.epoch, state.donors) == (5, (good.peer,))
    return state.duration_s


def test_a_donor_of_a_byte_a_second_is_left_for_another_one() -> None:
    """Also for one of a worse state. Alone it is given up long before the deadline."""

    async def main() -> None:
        swarm = new_swarm()
        tensors = [torch.zeros(2 * MIB, dtype=torch.uint8)]
        drips = [
            await swarm.start_peer(f"drip{i}", node(Box(tensors, epoch=9), kind=sends(_a_byte_a_second)))
            for i in range(3)
        ]
        assert await duration_beside(swarm, drips) < 30
        began = asyncio.get_running_loop().time()
        with pytest.raises(StateUnavailable, match="fast enough"):
            await fetch(swarm, "new", donors_of(drips[0]), timeout_s=600.0)
        assert asyncio.get_running_loop().time() - began < 150

    with reaches("all donors are too slow for a state to come in time"):
        run(main)


async def beside_three_honest_donors(kinds: Sequence[type[StateDonor]], *, same: bool = False) -> float:
    """How long a newcomer takes beside these: each has a later state of its own, or the same one and is asked first."""
    network = SimNetwork(1, window_bytes=64 << 10)
    swarm = Swarm[Node](1, network=network)
    good = []
    for name in ("a", "b", "c"):
        network.add_host(name, up_bytes_s=MIB / 4)
        good.append(await swarm.start_peer(name, node(Box(random_tensors(1, 8), epoch=5))))
    bad = [
        await swarm.start_peer(
            f"liar{i}", node(Box(random_tensors(1 if same else 2 + i, 8), epoch=5 if same else 6 + i), kind=kind)
        )
        for i, kind in enumerate(kinds)
    ]
    await swarm.start_peer("new", node())
    donors = donors_of(*good, *bad, priorities=[1.0] * 3 + [9.0 if same else 1.0] * len(bad))
    state = await fetch(swarm, "new", donors, timeout_s=600.0)
    assert len({each.peer for each in good} & set(state.donors)) == (2 if same and bad else 3), "these give it"
    assert state.epoch == 5
    return state.duration_s


class Leaves(StateDonor):
    """Describes its state, and gives none of it."""

    async def _send(self, stream: Stream[Chunk, MoreChunks], opening: FetchChunks) -> None:
        raise PeerRefused("this snapshot is gone: ask for the manifest again")


class FastEnough(StateDonor):
    """Gives its state as slowly as it may: just so that it would be there in ten minutes."""

    async def _send_chunk(
        self, stream: Stream[Chunk, MoreChunks], reader: Reader, snapshot: Snapshot, chunk: int
    ) -> int:
        start, stop = snapshot.manifest.chunk_range(chunk)
        for place in range(start, stop, 4096):
            await stream.send(Chunk(chunk, place - start), snapshot.data[place : min(place + 4096, stop)])
            await sleep(0.32)
        return stop - start


@pytest.mark.parametrize("same", [True, False], ids=["the same state", "a later state"])
def test_a_donor_that_is_just_fast_enough_kept_a_newcomer_for_ten_minutes(same: bool) -> None:
    """Beside three that had the state to give at once: they were not asked, as it was asked first; or put aside."""

    async def main() -> None:
        calm_s = await beside_three_honest_donors([])
        assert await beside_three_honest_donors([FastEnough], same=same) < calm_s + 20.0

    run(main)


def test_a_slow_donor_that_comes_first_is_not_left_for_many_of_another_state() -> None:
    """Keys are free: no number of others outvotes a peer that is asked first, as the user gave it."""

    async def main() -> None:
        swarm = new_swarm()
        slow = await swarm.start_peer("slow", node(Box(random_tensors(1, 8), epoch=5), kind=FastEnough))
        box = Box(random_tensors(2, 8), epoch=6)
        others = [await swarm.start_peer(f"other{number}", node(box)) for number in range(12)]
        await swarm.start_peer("new", node())
        donors = donors_of(slow, *others, priorities=[2.0] + [1.0] * 12)
        state = await fetch(swarm, "new", donors, timeout_s=1000.0)
        assert (state.epoch, state.donors) == (5, (slow.peer,))
        assert box.holds == 2, "so many are asked beside it"

    run(main)


def test_one_donor_of_three_gave_the_state_after_that_of_a_liar_was_chosen() -> None:
    """The other two were put aside for the liar's state, and were not asked anew: it took three times as long."""

    async def main() -> None:
        calm_s = await beside_three_honest_donors([])
        assert await beside_three_honest_donors([Leaves]) < calm_s + 1.0
        assert await beside_three_honest_donors([sends(_a_byte_a_second)]) < calm_s + 12.0

    run(main)


def test_each_liar_with_a_later_state_of_its_own_cost_a_newcomer_10_seconds() -> None:
    """The latest state came first, again and again. After the first of them the state of most donors does."""

    async def main() -> None:
        calm_s = await beside_three_honest_donors([])
        assert await beside_three_honest_donors([sends(_a_byte_a_second)] * 6) < calm_s + 12.0

    run(main)


def test_busy_donors_of_a_better_state_keep_nobody_from_a_good_one() -> None:
    """However many there are: those of a worse state are asked, too, after two seconds."""

    async def main() -> None:
        swarm = new_swarm()
        box = Box([torch.zeros(2 * MIB, dtype=torch.uint8)], epoch=9)
        busy = [await swarm.start_peer(f"busy{i}", node(box, limits=ShareLimits(max_receivers=1))) for i in range(20)]
        for each in busy:
            assert each.donor is not None
            each.donor._busy = lambda peer: True  # type: ignore[method-assign]
        assert await duration_beside(swarm, busy) < 10

    run(main)


faults = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["crash", "vanish", "stall", "slow", "write", "restart", "partition", "stop"]),
        st.floats(0.0, 6.0),
    ),
    max_size=6,
)


class Story:
    """Three donors, of which two have the same state, and what happens to them."""

    def __init__(self, swarm: Swarm[Node], boxes: dict[str, Box]) -> None:
        self._swarm, self._boxes = swarm, boxes
        self.truths = [[tensor.clone() for tensor in box.tensors] for box in boxes.values()]

    async def tell(self, plan: list[tuple[str, str, float]]) -> None:
        """Each at its time."""
        now = 0.0
        for name, kind, at in sorted(plan, key=lambda fault: fault[2]):
            await sleep(at - now)
            now = at
            await self._happen(name, kind)

    async def _happen(self, name: str, kind: str) -> None:
        swarm, alive = self._swarm, self._swarm.is_alive(name)
        match kind:
            case "crash" | "vanish":
                getattr(swarm, kind)(name)
            case "restart" if not alive:
                await swarm.restart(name)
            case "stall" if alive:
                swarm.stall(name, 3.0)
            case "slow":
                swarm.slow(name, 4.0)
            case "partition":
                swarm.partition([[name]])
            case "write" if alive:
                await self._boxes[name].write(float(len(self.truths)))
                self.truths.append([tensor.clone() for tensor in self._boxes[name].tensors])
            case "stop" if name in swarm.peers:
                donor = swarm.peer(name).donor
                assert donor is not None
                donor.stop()


@settings(max_examples=30)
@given(faults, st.integers(0, 3), st.lists(st.integers(0, 2), min_size=3, max_size=3), st.integers(0, 1 << 16))
def test_any_faults_end_in_one_true_state_or_in_none(
    plan: list[tuple[str, str, float]], seed_of_c: int, priorities: list[int], seed: int
) -> None:
    """Every value of a result was in one donor's state at one moment, and every call ends by its deadline."""

    async def main() -> None:
        swarm = new_swarm(bandwidth_bytes_s=MIB)
        boxes = {name: Box(random_tensors(1, 1.5, 2.5), epoch=100) for name in ("a", "b")}
        boxes["c"] = Box(random_tensors(seed_of_c, 1.5, 2.5), epoch=200)
        donors = [await swarm.start_peer(name, node(box)) for name, box in boxes.items()]
        await swarm.start_peer("new", node())
        story = Story(swarm, boxes)
        telling = asyncio.create_task(story.tell(plan))
        try:
            state = await fetch(swarm, "new", donors_of(*donors, priorities=priorities), timeout_s=40.0)
        except StateUnavailable:
            assert plan  # without faults there is a state
        else:
            assert any(same(state.tensors, truth) for truth in story.truths)
        assert asyncio.get_running_loop().time() < 41
        telling.cancel()

    run(main, seed=seed)
