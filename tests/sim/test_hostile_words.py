"""What one peer says does not stop the others, whatever it says and under however many keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from shoal import sim
from shoal.averaging.core import PeerCore
from shoal.averaging.directory import DhtDirectory
from shoal.averaging.matchmaking.hidden import HiddenPeers
from shoal.base.peer import Address, PeerID
from shoal.dht.node import DhtNode
from shoal.dht.routing import id_of_key, key_of, node_id
from shoal.dht.validation import encode_subkey, encode_value
from shoal.protocol.wire import (
    Contact,
    DhtFind,
    DhtFindReply,
    DhtFound,
    DhtPing,
    DhtPong,
    DhtStore,
    DhtStoreReply,
    GetManifest,
    ManifestPending,
    Progress,
    Record,
    TellProgress,
    Trainers,
    encode,
)
from shoal.rpc import Endpoint
from shoal.run.gossip import ProgressGossip
from shoal.run.participant import Participant
from shoal.run.post import Post
from shoal.sim import SimHost, SimNetwork
from tests.sim.averaging_kit import start_core
from tests.sim.optimizer_kit import Run

NAMES = ["p0", "p1", "p2"]


class Liar:
    """A stranger with the run's invite and settings, under a key of its own."""

    def __init__(self, core: PeerCore, run: Run) -> None:
        self.core, self.run = core, run

    async def say(self, to: Participant, **changes: Any) -> None:
        """Tell one of the good ones where we stand: as that one says of itself, but for `changes`.

        A state of a later epoch has more samples.
        """
        truth = to.progress()
        words: dict[str, Any] = {name: getattr(truth, name) for name in truth.__struct_fields__}
        words |= {"contact": self.core.endpoint.contact, "time": self.core.env.clock.time(), "end_epoch": None}
        words["branch_samples"] += 1000 * max(0, changes.get("epoch", truth.epoch) - truth.epoch)
        progress = Progress(**(words | changes))
        request = TellProgress(self.run.settings.run_id, progress)
        contact: Contact = to.core.endpoint.contact
        await self.core.endpoint.call(contact, request, timeout_s=5.0)


async def liar(run: Run, name: str) -> Liar:
    """Start one."""

    async def factory(host: SimHost) -> Any:
        first = next(name for name in run.swarm.peers if name != host.name)
        return Liar(await start_core(host, run.swarm.host(first)), run)

    found: Liar = await run.swarm.start_peer(name, factory)  # type: ignore[assignment]
    return found


async def lied_to(
    run: Run, lie: Callable[[], Awaitable[None]], for_s: float = 60.0, names: Sequence[str] = NAMES
) -> tuple[float, float]:
    """Three train while somebody lies: epochs a second before, and while it does."""
    for name in names:
        await run.add(name)
    await sim.sleep(3.0)
    end = asyncio.Event()
    tasks = [run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.5, until=end.is_set)) for name in names]
    first = run.swarm.peer("p0").participant
    await sim.sleep(5.0)
    before = first.epoch
    await sim.sleep(12.0)
    calm, before = (first.epoch - before) / 12.0, first.epoch
    lying = asyncio.get_running_loop().create_task(_for_ever(lie))
    await sim.sleep(for_s)
    lying.cancel()
    lied = (first.epoch - before) / for_s
    end.set()
    await asyncio.wait(tasks, timeout=60.0)
    return calm, lied


async def _for_ever(lie: Callable[[], Awaitable[None]]) -> None:
    while True:
        await lie()


def test_free_keys_reset_the_patience() -> None:
    """10^12 samples at our state, a new key every 25 s, and nobody comes to a round: epochs go on, and are whole."""

    async def main() -> None:
        run, keys = Run(target=24), iter(range(1000))

        async def lie() -> None:
            stranger = await liar(run, f"liar{next(keys)}")
            for _ in range(12):
                for name in NAMES:
                    await stranger.say(run.swarm.peer(name).participant, done=10**12)
                await sim.sleep(2.0)

        calm, lied = await lied_to(run, lie, 50.0)
        samples = [count for at, _, count, _ in run.swarm.peer("p0").epochs if at > 25.0]
        assert lied > 0.75 * calm, (calm, lied)
        assert sum(samples) / len(samples) > 20, samples

    sim.run(main, seed=3)


async def claims_and_takes_back(run: Run, name: str, names: Sequence[str]) -> None:
    """For 10 s a stranger has 10^12 samples at our state, and takes that back every two seconds."""
    stranger = await liar(run, name)
    for _ in range(5):
        for claims in ({"done": 10**12}, {"left": True}):
            for other in names:
                await stranger.say(run.swarm.peer(other).participant, **claims)
            await sim.sleep(1.6 if "done" in claims else 0.4)


def test_claims_that_are_taken_back_cost_no_more() -> None:
    """Each ends before it is a missed round; rounds wait for all of them together for 4 s, and 2% of the time."""

    async def main() -> None:
        run, keys = Run(target=24), iter(range(1000))
        calm, lied = await lied_to(run, lambda: claims_and_takes_back(run, f"liar{next(keys)}", NAMES), 50.0)
        assert 50.0 * (1 - lied / calm) < 8.0, (calm, lied)

    sim.run(main, seed=3)


def test_claims_do_not_stop_a_peer_that_trains_alone() -> None:
    """It waits for two windows of 5 s, and a tenth of the time, and otherwise goes on alone."""

    async def main() -> None:
        run, keys = Run(target=8), iter(range(1000))
        calm, lied = await lied_to(run, lambda: claims_and_takes_back(run, f"liar{next(keys)}", ["p0"]), 80.0, ["p0"])
        assert 80.0 * (1 - lied / calm) < 20.0, (calm, lied)

    sim.run(main, seed=3)


def test_a_newcomer_on_a_slow_line_comes_to_one_that_trains_alone() -> None:
    """Round trips of 0.6 s: it takes 4 s to come to its first round, and is waited for."""

    async def main() -> None:
        run, done = Run(target=16, network=SimNetwork(5, latency_s=0.3)), asyncio.Event()
        tasks = []
        for name in NAMES[:2]:
            trainer = await run.add(name)
            tasks.append(run.swarm.spawn(name, trainer.train(4, duration_s=0.5, until=done.is_set)))
            await sim.sleep(20.0)
        await sim.sleep(10.0)
        alone = trainer.alone, run.swarm.peer("p0").alone
        await sim.sleep(20.0)
        assert (trainer.alone, run.swarm.peer("p0").alone) == alone
        assert len(trainer.epochs) > 5
        done.set()
        await asyncio.wait(tasks, timeout=60.0)

    sim.run(main, seed=5)


async def claims_and_is_busy(run: Run, name: str, epochs: int = 1000) -> None:
    """A stranger claims a better state, and asks everybody to come again."""
    stranger = await liar(run, name)
    stranger.core.endpoint.serve(GetManifest, lambda peer, request: ManifestPending(busy=True), scope="run_state")
    for other in list(run.swarm.peers):
        if not other.startswith("liar"):
            trainer = run.swarm.peer(other).participant
            await stranger.say(trainer, epoch=trainer.epoch + epochs, digest=hashlib.sha256(name.encode()).digest())


def test_one_peer_freezes_everybody_with_busy() -> None:
    """A better state that is never given, named under a new key every 10 s, costs 20 s of waiting."""

    async def main() -> None:
        run, keys = Run(target=24), iter(range(1000))

        async def lie() -> None:
            await claims_and_is_busy(run, f"liar{next(keys)}")
            await sim.sleep(10.0)

        calm, lied = await lied_to(run, lie, 80.0)
        assert 80.0 * (1 - lied / calm) < 26.0, (calm, lied)

    sim.run(main, seed=3)


def test_a_newcomer_finds_the_state_among_claims_of_better_ones() -> None:
    """Twelve strangers say that they have a better one, and are busy: it asks the others, too."""

    async def main() -> None:
        run, keys = Run(target=24), iter(range(1000))
        waited = asyncio.Event()

        async def lie() -> None:
            if not waited.is_set():
                await run.add("new", seed=7)
                for _ in range(12):
                    await claims_and_is_busy(run, f"liar{next(keys)}")
                began = asyncio.get_running_loop().time()
                new = run.swarm.peer("new")
                task = run.swarm.spawn("new", new.train(4, duration_s=0.5, until=waited.is_set))
                while not new.epochs:
                    await sim.sleep(0.1)
                assert asyncio.get_running_loop().time() - began < 30
                waited.set()
                await asyncio.wait([task])
            await sim.sleep(10.0)

        await lied_to(run, lie, 40.0)
        assert waited.is_set()

    sim.run(main, seed=3)


def test_one_message_ends_the_run() -> None:
    """`end_epoch` of a stranger, told to everybody: nobody stops."""

    async def main() -> None:
        run = Run(target=24)
        keys = iter(range(1000))

        async def lie() -> None:
            stranger = await liar(run, f"liar{next(keys)}")
            for name in NAMES:
                trainer = run.swarm.peer(name).participant
                await stranger.say(trainer, epoch=0, digest=bytes(32), end_epoch=trainer.epoch + 1)
            await sim.sleep(5.0)

        calm, lied = await lied_to(run, lie, 20.0)
        assert lied > 0.8 * calm, (calm, lied)

    sim.run(main, seed=3)


async def hide(run: Run, count: int) -> None:
    """So many DHT nodes, nearest to the key of the run's progress, take everything and show each other alone."""
    key = id_of_key(key_of("run_progress"))
    names = sorted(map("evil{}".format, range(800)), key=lambda name: node_id(run.swarm.identity(name).peer_id) ^ key)
    evil: list[Contact] = []

    async def start(host: SimHost) -> Any:
        endpoint = Endpoint(host.transport, host.env)
        endpoint.serve(DhtPing, lambda peer, _: DhtPong(endpoint.contact))
        endpoint.serve(DhtFind, lambda peer, asked: DhtFindReply([DhtFound([], evil[:16]) for _ in asked.keys]))
        endpoint.serve(DhtStore, lambda peer, asked: DhtStoreReply(["" for _ in asked.records]))
        await endpoint.start()
        evil.append(endpoint.contact)
        for name in NAMES:
            victim = run.swarm.peer(name).participant.core.endpoint.contact
            await endpoint.call(victim, DhtPing(), timeout_s=5.0)
        return endpoint

    for name in names[:count]:
        await run.swarm.start_peer(name, start)


async def _joined_hidden(run: Run, newcomers: Sequence[str], for_s: float, *, keys: int = 20) -> None:
    """Three train; twenty DHT nodes hide all from these newcomers, who train with them for so long."""
    done = asyncio.Event()
    for name in NAMES:
        await run.add(name)
    tasks = [run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.5, until=done.is_set)) for name in NAMES]
    await sim.sleep(5.0)
    await hide(run, keys)
    await sim.sleep(15.0)
    for seed, name in enumerate(newcomers, 7):
        await run.add(name, seed=seed)
    trainers = [(name, run.swarm.peer(name)) for name in newcomers]
    tasks += [run.swarm.spawn(name, new.train(4, duration_s=0.5, until=done.is_set)) for name, new in trainers]
    await sim.sleep(for_s)
    done.set()
    await asyncio.wait(tasks, timeout=60.0)


def test_twenty_keys_in_the_dht_hide_a_run_from_a_newcomer() -> None:
    """It asks the peer that it was given, has the state of the run, and does not begin its own."""

    async def main() -> None:
        run = Run(target=24)
        await _joined_hidden(run, ["new"], 10.0)
        first, new = run.swarm.peer("p0").participant.epoch, run.swarm.peer("new")
        assert first > 10
        assert new.alone == 0
        assert first - 1 <= new.participant.epoch <= first + 1

    sim.run(main, seed=5)


def hide_searches(patch: pytest.MonkeyPatch, hidden: Callable[[], set[PeerID]]) -> None:
    """No search of these peers shows in the directory of groups, and none shows there to them.

    Keys near that of a group do so: its name is known as long as its epoch lasts.
    """
    declare, read = DhtDirectory.declare, DhtDirectory.read

    async def shown(directory: DhtDirectory, found: list[tuple[Contact, float]]) -> list[tuple[Contact, float]]:
        blind = directory._endpoint.peer_id in hidden()
        return [] if blind else [each for each in found if each[0].peer not in hidden()]

    async def declared(directory: DhtDirectory, *entry: Any) -> list[tuple[Contact, float]]:
        return await shown(directory, await declare(directory, *entry))

    async def listed(directory: DhtDirectory, group_key: str) -> list[tuple[Contact, float]]:
        return await shown(directory, await read(directory, group_key))

    patch.setattr(DhtDirectory, "declare", declared)
    patch.setattr(DhtDirectory, "read", listed)


def test_twenty_keys_in_the_dht_keep_newcomers_out_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask a peer that they know for the others of the run, and one at their state for its group."""

    async def main() -> None:
        run, newcomers = Run(target=24), ["new", "too"]
        hide_searches(monkeypatch, lambda: {run.swarm.identity(name).peer_id for name in newcomers})
        await _joined_hidden(run, newcomers, 20.0)
        committed = run.swarm.peer("p0").participant.own.committed.samples
        peers = [run.swarm.identity(name).peer_id for name in (*NAMES, *newcomers)]
        counted = [committed.get(peer, 0) for peer in peers]
        assert min(counted) > 0.5 * max(counted), counted
        assert run.agree([*NAMES, *newcomers])

    sim.run(main, seed=5)


def test_nobody_is_asked_beside_the_directory_where_that_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message more, where nothing is hidden: three train, and two others come."""
    asked: list[object] = []
    next_to_ask, introduce = HiddenPeers.next_to_ask, ProgressGossip._introduce

    def noted_hidden(*args: Any) -> Contact | None:
        if (found := next_to_ask(*args)) is not None:
            asked.append(found)
        return found

    monkeypatch.setattr(HiddenPeers, "next_to_ask", noted_hidden)

    def noted_introduce(*args: Any) -> Trainers:
        asked.append(args)
        return introduce(*args)

    monkeypatch.setattr(ProgressGossip, "_introduce", noted_introduce)

    async def main() -> None:
        run = Run(target=24)
        await _joined_hidden(run, ["new", "too"], 10.0, keys=0)
        assert run.swarm.peer("new").participant.epoch > 5

    sim.run(main, seed=5)
    assert not asked


def test_1400_made_up_records_kept_a_newcomer_beside_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as they were renewed: it asked 64 of all. It asks the peers that it was given, and knows, first.

    The others are asked a few at a time, and those that say nothing themselves give it no company at its beginning.
    """

    async def main() -> None:
        run, fakes = Run(target=24), [PeerID(hashlib.sha256(b"%d" % number).digest()) for number in range(1400)]
        me, get, asked = run.swarm.identity("new").peer_id, DhtNode.get, list[PeerID]()
        begin = Post._begin

        async def found(node: DhtNode, key: Any, **options: Any) -> Any:
            real = await get(node, key, **options)
            if node._endpoint.peer_id != me or real is None or not str(key).endswith("_progress"):
                return real
            now, entries = asyncio.get_running_loop().time(), dict(real.value)
            truth = run.swarm.peer("p0").participant.progress()
            for index, fake in enumerate(fakes):
                contact = Contact(fake, (Address(f"10.9.{index % 200}.{index // 200}", 4000, fake),))
                said = msgspec.structs.replace(truth, contact=contact, time=now, epoch=0, digest=b"f" * 32)
                entries[fake.to_bytes()] = next(iter(real.value.values()))._replace(value=encode(said))
            return real._replace(value=entries)

        def tell(post: Post, peer: PeerID) -> None:
            if post._core.peer_id == me:
                asked.append(peer)
            begin(post, peer)

        monkeypatch.setattr(Post, "_begin", tell)
        monkeypatch.setattr(DhtNode, "get", found)
        done = asyncio.Event()
        for name in NAMES:
            await run.add(name)
            run.swarm.spawn(name, run.swarm.peer(name).train(4, duration_s=0.5, until=done.is_set))
        await sim.sleep(10.0)
        new = await run.add("new", client_mode=True)
        given = [contact.peer for contact in new.participant.core.node.initial_peers]
        run.swarm.spawn("new", new.train(4, duration_s=0.5, until=done.is_set))
        await sim.sleep(20.0)
        assert given
        assert set(given) <= set(asked[:64])
        assert len(set(asked).intersection(fakes)) < 400
        first = run.swarm.peer("p0").participant
        assert me in first.own.committed.samples
        assert abs(first.epoch - new.participant.epoch) <= 1
        done.set()

    sim.run(main, seed=9)


def test_whoever_filled_the_key_of_a_run_took_the_lines_of_all() -> None:
    """Each peer reads that key about once a second, and was sent 840 kB each time. What nobody signed is not sent."""

    async def main() -> None:
        run = Run(target=1, network=SimNetwork(1, bandwidth_bytes_s=500e3, latency_s=0.02))
        for name in NAMES:
            await run.add(name)
        stranger = (await liar(run, "stranger")).core
        for name in NAMES:
            run.swarm.spawn(name, run.trainers[name].train(4, duration_s=0.5, until=lambda: False))
        key, expiration, value = key_of("run_progress"), stranger.env.clock.time() + 3000.0, encode_value(b"x" * 60_000)
        records = [Record(key, encode_subkey(f"s{number}"), value, expiration, None, b"") for number in range(14)]

        async def fill() -> None:
            for name in NAMES:
                contact = run.trainers[name].participant.core.endpoint.contact
                for half in (records[:7], records[7:]):
                    stored = await stranger.endpoint.call(contact, DhtStore(half), timeout_s=10.0)
                    assert not any(stored.refused)

        await sim.sleep(10.0)
        await run.swarm.run_on("stranger", fill)
        run.swarm.crash("stranger")
        trainers = [run.trainers[name].participant for name in NAMES]
        sent = [run.swarm.network.traffic(name)[0] for name in NAMES]
        given = [each.contribution.contributed for each in trainers]
        await sim.sleep(30.0)
        for name, before in zip(NAMES, sent, strict=True):
            assert run.swarm.network.traffic(name)[0] - before < 30 * 20e3
        for each, before in zip(trainers, given, strict=True):  # 6.4 a second without a stranger
            assert each.contribution.contributed - before > 30 * 4
        await run.close()

    sim.run(main, seed=1)
