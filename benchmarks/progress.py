"""What does it cost to tell of progress? ``python -m benchmarks.progress``.

First, what messages cost: two processes, one link with TLS on loopback, messages a few milliseconds apart; processor
time of both ends, less that of the same pauses without messages. Then, how many there are: swarms of simulated peers on
virtual time with the code that tells (`ProgressGossip`, `SwarmProgress`), on a wire that only counts. All are linked.
Each peer takes batches of 0.2 s, and a step is taken by all at once when all know that there are enough samples: rounds
cost nothing here. The processor time of the telling itself (who is told, what was heard) is measured in the simulation.

Reads and writes of the DHT cost `replicas` calls each, at both ends. How often they happen is computed, as a swarm of a
thousand does so once a minute. `--check` counts in whole swarms with rounds, too (`tests/sim/test_many_peers.py`).

Printed are, for each swarm and length of an epoch, what a peer sends and receives in a second, and both as a share of a
core: of all peers on average, of those that do not keep the count (`ordinary`), and of a keeper in the epoch in which
it is one. These hold none of what is written in the DHT; a `holder` answers all reads and writes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from benchmarks.allreduce import write
from benchmarks.processes import Line, Peers
from shoal import sim
from shoal.averaging import AveragerSettings
from shoal.base.clock import Env
from shoal.base.peer import Address, PeerID
from shoal.base.tasks import Changes
from shoal.dht.local import DhtSettings
from shoal.dht.validation import RECORD_CONTEXT, signed_record
from shoal.events import EventBus
from shoal.optim import RunSettings
from shoal.protocol.identity import Identity, verify
from shoal.protocol.wire import (
    Contact,
    DhtFindReply,
    DhtFound,
    DhtStore,
    DhtStoreReply,
    Message,
    Progress,
    ProgressTold,
    Request,
    Standing,
    TellProgress,
    decode,
    encode,
)
from shoal.rpc import Endpoint, Limits
from shoal.run.gossip import ProgressGossip
from shoal.run.view.progress import StateKey, SwarmProgress
from shoal.run.view.tellers import look_s, write_s
from shoal.strategies import Synchronous
from shoal.transport.tcp import TcpTransport
from tests.sim.test_many_peers import measure

BATCH_S, BATCH, LATENCY_S, ROUND_S = 0.2, 16, 0.02, 0.08
COSTS = ("note", "standing", "call", "write", "read", "verified")
_PAUSE_S, _WARM_UP_EPOCHS = 0.004, 3
_SETTINGS = dict.fromkeys(("target", "optimizer", "schedule", "options", "tensors", "codecs", "shoal"), "0123456789")


def progress(peer: PeerID, **changes: Any) -> Progress:
    """A word of ordinary size."""
    values: dict[str, Any] = {"epoch": 1, "digest": bytes(32), "branch_samples": 10**6, "done": 100, "rate": 80.0}
    contact = Contact(peer, (Address("192.168.100.100", 40000, peer),))
    return Progress(**(values | {"contact": contact, "time": 1e9, "settings": _SETTINGS} | changes))


# ------------------------------------------------------------------------------------------------- what a message costs


class CpuReply(Message, frozen=True):
    """Processor time of a process, seconds."""

    cpu_s: float


class Cpu(Request[CpuReply], frozen=True):
    """How much was it?"""


class ReadAll(Request[DhtFindReply], frozen=True):
    """Everything under a key that so many peers write."""

    peers: int


def answerer(line: Line) -> None:
    """The other process."""

    async def main() -> None:
        endpoint = Endpoint(TcpTransport(Identity.from_seed(b"b" * 32)), Env(), limits=Limits(calls_per_host_s=1e9))
        await endpoint.start()
        me, words = endpoint.peer_id, dict[int, DhtFindReply]()
        endpoint.take_notes(TellProgress, lambda peer, note: None, scope="run")
        endpoint.serve(TellProgress, lambda peer, request: ProgressTold(progress(me)), scope="run")
        endpoint.serve(DhtStore, lambda peer, request: DhtStoreReply([""]))
        endpoint.serve(Cpu, lambda peer, request: CpuReply(time.process_time()))

        def read(_: PeerID, request: ReadAll) -> DhtFindReply:
            if request.peers not in words:
                records = [signed(number) for number in range(request.peers)]
                words[request.peers] = DhtFindReply([DhtFound(records, [endpoint.contact] * 16)])
            return words[request.peers]

        endpoint.serve(ReadAll, read)
        line.say("at", str(endpoint.listens_at[0]))
        await asyncio.get_running_loop().run_in_executor(None, line.wait, "end")
        await endpoint.close()

    asyncio.run(main())


def signed(number: int) -> Any:
    """What a peer has written."""
    identity = Identity.from_seed(number.to_bytes(4, "big") * 8)
    value = encode(progress(identity.peer_id))
    return signed_record(identity, bytes(32), identity.peer_id.to_bytes(), value, 2e9)


async def measured(times: int, address: str, peers: int) -> dict[str, tuple[float, float]]:
    """Processor time of a message at its sender and its receiver, seconds."""
    endpoint = Endpoint(TcpTransport(Identity.from_seed(b"a" * 32)), Env(), limits=Limits(calls_per_host_s=1e9))
    await endpoint.start()
    to, me = Address.parse(address), endpoint.peer_id
    contact = Contact(to.peer_id, (to,))
    word, record = progress(me), signed(1)
    others = [Standing(PeerID(hashlib.sha256(bytes([n % 256, n // 256])).digest()), 100, 1e9) for n in range(peers)]

    def note(others: list[Standing]) -> TellProgress:
        return TellProgress("run", word, others)

    def encoded(message: TellProgress) -> float:
        """To make the message: a keeper does that once for all whom it tells, and it is counted with the telling."""
        began = time.process_time()
        for _ in range(100):
            encode(message)
        return (time.process_time() - began) / 100

    async def cost(say: Callable[[], Any] | None) -> tuple[float, float]:
        before = (await endpoint.call(contact, Cpu(), timeout_s=10.0)).cpu_s, time.process_time()
        for _ in range(times):
            if say is not None and asyncio.iscoroutine(said := say()):
                await said
            await asyncio.sleep(_PAUSE_S)
        mine_s = time.process_time() - before[1]
        return mine_s / times, ((await endpoint.call(contact, Cpu(), timeout_s=10.0)).cpu_s - before[0]) / times

    def call(request: Request[Any]) -> Callable[[], Any]:
        return lambda: endpoint.call(to.peer_id, request, timeout_s=10.0)

    kinds = {
        "note": lambda: endpoint.tell([to.peer_id], note([])),
        "note_of_all": lambda: endpoint.tell([to.peer_id], note(others)),
        "call": call(TellProgress("run", word)),
        "write": call(DhtStore([record])),
        "read": call(ReadAll(peers)),
    }
    await cost(kinds["call"])
    pauses, found = [], {name: list[tuple[float, float]]() for name in kinds}
    for _ in range(3):
        pauses.append(await cost(None))
        for name, say in kinds.items():
            found[name].append(await cost(say))
    await endpoint.close()
    rest = [min(pause[end] for pause in pauses) for end in (0, 1)]
    ends = {
        name: tuple(statistics.median(c[end] for c in each) - rest[end] for end in (0, 1))
        for name, each in found.items()
    }
    began = time.process_time()
    for _ in range(times):
        assert record.owner is not None
        verify(record.owner, RECORD_CONTEXT, encode(record), record.signature)
        decode(record.value, Progress)
    ends["verified"] = ((time.process_time() - began) / times, 0.0)
    (sent, received), (all_sent, all_received) = ends["note"], ends.pop("note_of_all")
    all_sent -= encoded(note(others)) - encoded(note([]))
    ends["standing"] = (max(0.0, all_sent - sent) / peers, max(0.0, all_received - received) / peers)
    return ends  # type: ignore[return-value]


def costs(times: int, peers: int) -> dict[str, tuple[float, float]]:
    """As `measured`, with a process at the other end."""
    with Peers() as processes:
        other = processes.start(answerer)
        found = asyncio.run(measured(times, other.wait("at"), peers))
        other.tell("end")
        other.result()
    return found


# ------------------------------------------------------------------------------------------------ how many there are


@dataclass
class Count:
    """What one peer did.

    Attributes:
        sent, received: notes, and the standings of others in them.
        sent_bytes, received_bytes: of these.
        cpu_s: processor time of the telling itself.
    """

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0
    cpu_s: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.sent + other.sent,
            self.received + other.received,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.cpu_s + other.cpu_s,
        )


class Member:
    """One simulated peer: trains, tells and hears. It is its own endpoint and DHT node."""

    def __init__(self, swarm: SimulatedSwarm, number: int) -> None:
        self.swarm, self.peer_id = swarm, Identity.from_seed(number.to_bytes(4, "big") * 8).peer_id
        self.contact, self.count = progress(self.peer_id).contact, Count()
        self.env = SimpleNamespace(
            events=EventBus(), rng=random.Random(number), clock=SimpleNamespace(time=swarm.loop.time)
        )
        self.endpoint = self.node = self
        self.samples, self.news = 0, Changes()
        self.known = SwarmProgress(self.peer_id, _SETTINGS, ttl_s=20.0)
        settings = RunSettings(
            run_id="run",
            strategy=Synchronous(swarm.target),
            averager=AveragerSettings(),
            ttl_s=math.inf,
            fingerprint=_SETTINGS,
        )
        core: Any = self
        self.gossip = ProgressGossip(core, settings, self.known, self.news, next_word=self.mine)
        self.gossip.target = swarm.target

    # as an endpoint and a node of the DHT

    initial_peers = ()

    def serve(self, *_: Any, **__: Any) -> Callable[[], None]:
        return lambda: None

    on_lost = serve

    def take_notes(self, _: Any, take: Callable[[PeerID, TellProgress], None], **__: Any) -> Callable[[], None]:
        self.noted = take
        return lambda: None

    async def call(self, peer: PeerID, request: TellProgress, *, timeout_s: float) -> ProgressTold:
        return ProgressTold(self.swarm.members[peer].mine())  # the first words, which make a link

    def connected(self, peer: PeerID) -> bool:
        return True

    reachable = connected

    def is_silent(self, peer: PeerID) -> bool:
        return False

    def learn(self, contact: Contact) -> None:
        pass

    def is_mute(self, peer: PeerID) -> bool:
        """No two processes have one key here."""
        return False

    def dialable(self, contact: Contact) -> Contact:
        return contact

    def tell(self, peers: Iterable[PeerID], message: TellProgress) -> list[PeerID]:
        peers = list(peers)
        nbytes = len(encode(message)) + 20
        self.count.sent += {"note": len(peers), "standing": len(peers) * len(message.others)}
        self.count.sent_bytes += nbytes * len(peers)
        for peer in peers:
            self.swarm.loop.call_later(LATENCY_S, self.swarm.members[peer].take, self.peer_id, message, nbytes)
        return peers

    def take(self, peer: PeerID, message: TellProgress, nbytes: int) -> None:
        self.count.received += {"note": 1, "standing": len(message.others)}
        self.count.received_bytes += nbytes
        began = time.process_time()
        self.noted(peer, message)
        self.count.cpu_s += time.process_time() - began

    async def store(self, key: str, value: bytes, expiration: float, subkey: bytes) -> None:
        pass

    async def get(self, key: str, **options: Any) -> None:
        pass

    # as a trainer

    def mine(self) -> Progress:
        return Progress(
            contact=self.contact,
            epoch=self.swarm.epoch,
            digest=self.swarm.digest,
            branch_samples=self.swarm.epoch,
            done=self.samples,
            rate=BATCH / BATCH_S,
            time=next(self.swarm.times),
            settings=_SETTINGS,
        )

    async def attend(self) -> None:
        while True:
            seen = self.news.count
            self.look()
            await self.news.after(seen)

    def look(self) -> None:
        began = time.process_time()
        now, swarm = self.swarm.loop.time(), self.swarm
        view = self.known.view(self.mine(), now, awaited=swarm.all, before=swarm.before)
        self.gossip.saw(enough=view.done >= swarm.target, target=swarm.target, rate=self.gossip.rate)
        self.gossip.tell(view)
        self.count.cpu_s += time.process_time() - began
        swarm.ready(self, enough=self.gossip.enough)

    async def train(self) -> None:
        rng = self.env.rng
        await asyncio.sleep(BATCH_S * rng.random())
        while True:
            await asyncio.sleep(BATCH_S * (0.9 + 0.2 * rng.random()))
            self.samples += BATCH
            self.look()


class Epoch(NamedTuple):
    """How long one took, what those did who kept the count and the others, and how many kept it."""

    duration_s: float
    ordinary: Count
    keepers: Count
    turns: int


class SimulatedSwarm:
    """Peers that know each other and are linked."""

    def __init__(self, peers: int, epoch_s: float) -> None:
        self.loop, self.target = asyncio.get_running_loop(), int(peers * BATCH * epoch_s / BATCH_S)
        self.times = itertools.count(1.0)
        self.epoch, self.digest, self.before = 0, bytes(32), StateKey.of(0, 0, bytes(32))
        made = [Member(self, number) for number in range(peers)]
        self.members = {member.peer_id: member for member in made}
        self.all = frozenset(self.members)
        self.knowing, self.epochs, self.steps = set[PeerID](), list[Epoch](), 0
        self.began = self.loop.time()
        self.over = asyncio.Event()
        words = [member.mine() for member in made]
        for member in made:
            for word in words:
                member.known.heard(word, self.loop.time())
            member.known.contributed(self.all)

    def ready(self, member: Member, *, enough: bool) -> None:
        """A peer has looked; when all know that there is enough they step together."""
        if not enough or member.peer_id in self.knowing:
            return
        self.knowing.add(member.peer_id)
        if len(self.knowing) == len(self.members):
            self.loop.call_later(ROUND_S, self.step)

    def step(self) -> None:
        """All take it."""
        now, members = self.loop.time(), list(self.members.values())
        kept = [member.count.sent["standing"] > len(members) for member in members]
        counts = [Count(), Count()]
        for member, keeps in zip(members, kept, strict=True):
            counts[keeps] += member.count
            member.count = Count()
        self.steps += 1
        if self.steps > _WARM_UP_EPOCHS:
            self.epochs.append(Epoch(now - self.began, counts[0], counts[1], sum(kept)))
        self.knowing, self.began = set(), now
        self.before = StateKey.of(self.epoch, self.epoch, self.digest)
        self.epoch += 1
        self.digest = hashlib.sha256(self.digest).digest()
        for member in members:
            member.samples = 0
            member.news.notify()
        if len(self.epochs) == self.wanted:
            self.over.set()

    wanted = 0

    async def run(self, epochs: int) -> list[Epoch]:
        """Train so many epochs, after the first ones, in which nobody knows who is there and how long one takes."""
        self.wanted = epochs
        works = [
            work
            for member in self.members.values()
            for work in (member.train(), member.attend(), *(begin() for begin in member.gossip.start()))
        ]
        tasks = [self.loop.create_task(work) for work in works]
        over = self.loop.create_task(self.over.wait())
        await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found
        await over
        return self.epochs


def simulated(peers: int, epoch_s: float, epochs: int) -> list[Epoch]:
    """The epochs of one swarm."""

    async def main() -> list[Epoch]:
        return await SimulatedSwarm(peers, epoch_s).run(epochs)

    gc.disable()  # it would look at what all of them know again and again
    try:
        return sim.run(main, seed=peers)
    finally:
        gc.enable()
        gc.collect()


# --------------------------------------------------------------------------------------------------------------- report


def core(count: Count, cost: dict[str, tuple[float, float]]) -> float:
    """Processor time, seconds."""
    sent = sum(number * cost[kind][0] for kind, number in count.sent.items())
    return sent + sum(number * cost[kind][1] for kind, number in count.received.items()) + count.cpu_s


def summary(epochs: list[Epoch], peers: int, cost: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Of one swarm: per peer and second."""
    seconds, turns = sum(epoch.duration_s for epoch in epochs), sum(epoch.turns for epoch in epochs)
    ordinary, keepers = Count(), Count()
    for epoch in epochs:
        ordinary, keepers = ordinary + epoch.ordinary, keepers + epoch.keepers
    in_turn_s = sum(epoch.turns * epoch.duration_s for epoch in epochs)

    period_s = RunSettings(run_id="run", strategy=Synchronous(1), averager=AveragerSettings()).publish_period_s
    replicas = min(DhtSettings().replicas, peers - 1)
    words = {"write": 1 / write_s(peers, period_s), "read": 1 / look_s(peers)}
    asking, answering = (replicas * sum(words[kind] * cost[kind][end] for kind in words) for end in (0, 1))
    asking += words["read"] * peers * cost["verified"][0]  # of those that were renewed: all, at most

    def per(count: Count, peer_seconds: float) -> dict[str, float]:
        return {
            "notes_sent": count.sent["note"] / peer_seconds,
            "notes_received": count.received["note"] / peer_seconds,
            "sent_bytes": count.sent_bytes / peer_seconds,
            "received_bytes": count.received_bytes / peer_seconds,
            "telling": count.cpu_s / peer_seconds,
            "dht": asking + answering,
            "core": core(count, cost) / peer_seconds + asking + answering,
        }

    return {
        "peers": peers,
        "epoch_s": seconds / len(epochs),
        "keepers": turns / len(epochs),
        "words": sum(words.values()),
        "all": per(ordinary + keepers, peers * seconds),
        "ordinary": per(ordinary, peers * seconds - in_turn_s),
        "keeper": per(keepers, in_turn_s),
        "holder": answering * peers / replicas,
        "turn_s": core(keepers, cost) / turns,
    }


def check(peers: int) -> None:
    """Notes, and reads and writes of the DHT, that a peer has in a second: in a whole swarm with rounds, and here."""
    found = summary(simulated(peers, 1.0, 6), peers, dict.fromkeys(COSTS, (0.0, 0.0)))
    with pytest.MonkeyPatch.context() as patch:
        whole = measure(patch, peers, LATENCY_S)
    print(
        f"{peers} peers: {found['all']['notes_sent']:.1f} notes and {found['words']:.2f} reads and writes; "
        f"in a whole swarm {whole.told_s:.1f} and {whole.words_s:.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", default="16,64,1000", help="with commas")
    parser.add_argument("--epochs-s", default="1,10", help="lengths of an epoch, with commas")
    parser.add_argument("--epochs", type=int, default=6, help="that count, of each swarm")
    parser.add_argument("--times", type=int, default=400, help="messages of each kind whose cost is measured")
    parser.add_argument("--check", action="store_true", help="compare with whole swarms, and nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    if args.check:
        for peers in map(int, args.peers.split(",")):
            check(peers)
        return 0
    found = []
    for peers in map(int, args.peers.split(",")):
        cost = costs(args.times, peers)
        ends = (f"{kind} {1e6 * there:.3g} + {1e6 * here:.3g}" for kind, (there, here) in cost.items())
        print(f"{peers} peers; µs of a core, sent + received: {', '.join(ends)}", flush=True)
        for epoch_s in map(float, args.epochs_s.split(",")):
            found.append(result := summary(simulated(peers, epoch_s, args.epochs), peers, cost))
            for who in ("all", "ordinary", "keeper"):
                each = result[who]
                print(
                    f"  epochs of {result['epoch_s']:4.1f} s, {who:8}: {each['notes_sent']:6.1f} notes sent, "
                    f"{each['notes_received']:6.1f} received, {each['sent_bytes'] / 1e3:6.1f} + "
                    f"{each['received_bytes'] / 1e3:6.1f} kB; the DHT {each['dht']:.2%}, telling "
                    f"{each['telling']:.2%}: {each['core']:.2%} of a core",
                    flush=True,
                )
            print(
                f"  {result['keepers']:.0f} keepers, a turn costs each {1e3 * result['turn_s']:.0f} ms; "
                f"a holder answers for {result['holder']:.2%} of a core",
                flush=True,
            )
    if args.json:
        write(args.json, {"progress": found})
    return 0 if all(each["all"]["core"] <= 0.02 for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
