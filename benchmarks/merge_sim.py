"""Many peers that come and go merge a model: ``python -m benchmarks.merge_sim``, on virtual time.

Each peer takes a batch every second (its speed is drawn from within a fifth of that), lives for a time that is drawn
from an exponential distribution with a half-life of 10 minutes, crashes, and is replaced by a newcomer 2 s later, which
knows three that live. All code is shoal's; network and time are simulated. Each tensor is one fragment, and the codec
is that of 4 bits.

goodput  Batches that went into merges, over those that a perfect scheduler would count: one that loses none, of all
         peers that run, from the start of their program on. Of each fragment from its first merge that is counted to
         its last, so that nothing is half counted. `floor` beside it is what no merging can win back: a peer that dies
         loses half the way between two merges, in the mean.
law      Bytes of values that a member sends in a merge, over 2 (n - 1) / n of the fragment's encoded size.
control  Bytes a second and peer: all but values and states.
cpu s    Processor time of what is measured: on a free core it takes as long.

``--rest`` measures control traffic alone: no churn, the links' signs of life as users have them, and bytes and messages
a second and peer by kind; beside them what the values of ``--model`` parameters take in 4 bits. ``--strategy
synchronous`` is its other half: as many batches for a step as H batches of each peer.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import math
import pstats
import random
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from benchmarks.allreduce import write
from benchmarks.dht_sim import LIMITS, without_gc
from benchmarks.remembered import remembered
from benchmarks.shared_table import shared_table
from benchmarks.strategies.named import NAMES, named
from benchmarks.wire_count import CONTROL, Sent, counted
from shoal.averaging import TensorLock
from shoal.averaging.core import PeerCore
from shoal.base.peer import Address
from shoal.compression import BlockwiseQuantization
from shoal.errors import StateUnavailable
from shoal.events import EpochAdvanced, Event, RoundFinished, StateDownloaded
from shoal.optim import Participant, RunSettings, TrainingState
from shoal.protocol.wire import encode
from shoal.run import gossip
from shoal.run.chains import participants_of
from shoal.run.decide.phases import RunPhase
from shoal.run.settings import run_settings
from shoal.sim import SimHost, SimNetwork, Swarm, run, sleep
from shoal.strategies import Inner, Synchronous
from tests.sim.averaging_kit import SETTINGS

ENTRIES, RESTART_S, SPREAD = 3, 2.0, 0.2
LATENCY_S, JITTER_S = 0.02, 0.02
CODEC = BlockwiseQuantization(bits=4)


class Trainer:
    """One simulated peer: its participants, one for each fragment, and its loop."""

    def __init__(self, training: TrainingState, fragments: Sequence[Participant], batch_s: float) -> None:
        self.training, self.fragments, self.batch_s = training, fragments, batch_s
        self.longest_s = 0.0

    async def train(self) -> None:
        """As `shoal.Optimizer.step` does it, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await sleep(self.batch_s)
            began, joins = loop.time(), self.fragments[0].epoch == 0
            self.training.accumulate(1)
            self.fragments[0].speed.count(1)
            behind = []
            for fragment in self.fragments:
                if fragment.turn.is_due:
                    behind += [fragment] * await self._take_turn(fragment)
                elif fragment.turn.has_news:
                    fragment.turn.accumulated()
            downloads = (fragment.turn.download(600.0, patient=False) for fragment in behind)
            if StateUnavailable in map(type, await asyncio.gather(*downloads, return_exceptions=True)):
                await sleep(1.0)
            if not joins:
                self.longest_s = max(self.longest_s, loop.time() - began)

    async def _take_turn(self, fragment: Participant) -> bool:
        phase = await fragment.turn.decide(60.0)
        if phase is RunPhase.STEPPING and not fragment.turn.holds_update_back:
            fragment.own.step()
            await fragment.stepped()
        return phase is RunPhase.BEHIND and fragment.turn.waits_for_state


def come_late(participant: Participant, rng: random.Random, most_s: float) -> None:
    """Let it come late to each merge, by a time of up to `most_s` that is drawn."""
    average = participant.swarm_step.average

    async def averages() -> bool:
        await sleep(rng.uniform(0.0, most_s))
        return await average()

    participant.swarm_step.average = averages  # type: ignore[method-assign]


class Merge(NamedTuple):
    """A merge of the main line: when it was told of first, its number, its samples, and its members."""

    at: float
    number: int
    samples: int
    members: int


class Scene:
    """The swarm, and what happened in it.

    Attributes:
        lives: begin and end of the program of each peer, local time.
        batch_s: of each peer.
        died: how many were killed.
    """

    def __init__(self, args: argparse.Namespace, peers: int, fragments: int) -> None:
        self.args, self.peers, self.fragments = args, peers, fragments
        self.swarm: Swarm[Trainer] = Swarm(
            args.seed, network=SimNetwork(args.seed, latency_s=LATENCY_S, jitter_s=JITTER_S)
        )
        self.rng = random.Random(f"{args.seed}/merges")
        self.lives: dict[str, tuple[float, float]] = {}
        self.batch_s: dict[str, float] = {}
        self.died = self._number = 0
        self.told: dict[str, dict[int, dict[bytes, list[tuple[float, int, int]]]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self.downloads: list[float] = []
        self.rounds: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, event: Event) -> None:
        """Of any peer."""
        now = asyncio.get_running_loop().time()
        if isinstance(event, EpochAdvanced):
            self.told[event.run_id][event.epoch].setdefault(event.digest, []).append((now, event.samples, event.peers))
        elif isinstance(event, StateDownloaded):
            self.downloads.append(event.duration_s)
        elif isinstance(event, RoundFinished):
            self.rounds.append(event.duration_s)

    async def make(self, host: SimHost, entries: Sequence[Address]) -> Trainer:
        """One peer, on this host."""
        args = self.args
        strategy = named(args.strategy, every=args.every, fragments=self.fragments, quorum=args.quorum)
        if isinstance(strategy, Synchronous):
            strategy = Synchronous(self.peers * args.every)
        host.env.events.subscribe(self.note)
        limits = None if args.rest else LIMITS
        core = await PeerCore.start(host.identity, host.transport, host.env, entries, limits=limits)
        chance = torch.Generator().manual_seed(host.env.rng.getrandbits(32))
        parameters = [torch.nn.Parameter(torch.zeros(args.numel // self.fragments)) for _ in range(self.fragments)]
        for each in parameters:
            each.grad = 0.1 * torch.randn(each.shape, generator=chance)
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        training = strategy.training(Inner(optimizer))
        settings = RunSettings(
            run_id="run",
            strategy=strategy,
            averager=msgspec.structs.replace(
                SETTINGS,
                part_size_bytes=1 << 18,
                silence_s=5.0,
                target_group_size=args.group,
                min_vector_size=args.share,
            ),
            fingerprint=run_settings(training, strategy, 0, grad_compression=CODEC),
            check_every=0,
        )
        participants = await participants_of(core, training, settings, lock=TensorLock(), compression=CODEC)
        for participant in participants:
            if args.late and int(host.name[1:]) % 4 == 0:
                come_late(participant, host.env.rng, args.late)
            await participant.start()
        return Trainer(training, participants, self.batch_s[host.name])

    async def add(self) -> None:
        """A newcomer; it trains, and dies some time."""
        name, loop = f"n{self._number}", asyncio.get_running_loop()
        self._number += 1
        known = [self.swarm.host(each).address for each in self.swarm.peers]
        entries = self.rng.sample(known, min(ENTRIES, len(known)))
        self.lives[name] = loop.time(), math.inf
        self.batch_s[name] = self.args.batch_s * self.rng.uniform(1 - SPREAD, 1 + SPREAD)
        if not self.args.rest:
            loop.call_later(self.rng.expovariate(math.log(2) / (60 * self.args.half_life)), self.crash, name)
        trainer = await self.swarm.start_peer(name, lambda host: self.make(host, entries))
        self.swarm.spawn(name, trainer.train())

    def crash(self, name: str) -> None:
        """It dies; another one comes."""
        loop = asyncio.get_running_loop()
        self.lives[name] = self.lives[name][0], loop.time()
        self.died += 1
        self.swarm.crash(name)
        loop.call_later(RESTART_S, self._begin_add)

    def _begin_add(self) -> None:
        task = asyncio.ensure_future(self.add())
        self._tasks.add(task)
        task.add_done_callback(self._added)

    def _added(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it died before it had joined

    def main_line(self, run_id: str) -> list[Merge]:
        """For each number the state that most peers told of."""
        line = []
        for number, states in sorted(self.told[run_id].items()):
            same = max(states.values(), key=len)
            line.append(Merge(same[0][0], number, same[0][1], same[0][2]))
        return line

    def forks(self) -> int:
        """How many numbers of merges have several states."""
        return sum(len(states) > 1 for numbers in self.told.values() for states in numbers.values())

    def perfect(self, begin: float, end: float) -> float:
        """The batches that all peers had time for."""
        lives = ((max(0.0, min(b, end) - max(a, begin)), self.batch_s[name]) for name, (a, b) in self.lives.items())
        return sum(lived_s / batch_s for lived_s, batch_s in lives)


class Found(NamedTuple):
    """What was measured with one number of peers."""

    peers: int
    fragments: int
    virtual_s: float
    cpu_s: float
    turns: int
    merges: int
    members: float
    forks: int
    died: int
    goodput: float
    floor: float
    law: float
    control: float
    sent: dict[str, float]
    messages: dict[str, float]
    longest_step_s: float
    download_s: float
    peer_mb: float
    merge_s: float
    begin_bytes: int
    word_bytes: int


async def play(args: argparse.Namespace, peers: int, fragments: int, sent: Sent, began: float) -> Found:
    """All of it, on virtual time."""
    loop: Any = asyncio.get_running_loop()
    before_mb = rss_mb()
    scene = Scene(args, peers, fragments)
    while (have := len(scene.swarm.peers)) < peers:
        await asyncio.gather(*(scene.add() for _ in range(min(max(1, have // 2), 50, peers - have))))
        said(f"{len(scene.swarm.peers)} peers", began, sent)
    until_s = loop.time() + args.warm_up * args.every * args.batch_s
    while loop.time() < until_s:
        await sleep(min(5.0, until_s - loop.time()))
        said(f"{until_s - loop.time():.0f} s of warm-up left", began, sent)
    sent.clear()
    begin, cpu_s, turns, died = loop.time(), time.process_time(), loop.turns, scene.died
    span_s = 60 * args.minutes
    while loop.time() < begin + span_s and time.process_time() - began < 60 * args.limit:
        await sleep(1.0)
        gc.collect(0)
        said(f"{begin + span_s - loop.time():.0f} s left", began, sent)
    end, cpu_s = loop.time(), time.process_time() - cpu_s
    counted_batches = perfect = 0.0
    members: list[int] = []
    for run_id in scene.told:
        line = [each for each in scene.main_line(run_id) if each.at >= begin]
        members += [each.members for each in line]
        if len(line) < 2:
            continue
        counted_batches += sum(each.samples for each in line[1:])
        perfect += scene.perfect(line[0].at, line[-1].at)
    elements = args.numel // fragments
    encoded = elements * 4.25 / 8
    lost_s = args.every * args.batch_s / 2
    mean_life_s = 60 * args.half_life / math.log(2)
    law = sum(2 * (each - 1) * encoded for each in members)  # of all members together
    per_peer = 1 / (peers * (end - begin))
    return Found(
        peers=peers,
        fragments=fragments,
        virtual_s=end - begin,
        cpu_s=cpu_s,
        turns=loop.turns - turns,
        merges=len(members),
        members=statistics.fmean(members) if members else math.nan,
        forks=scene.forks(),
        died=scene.died - died,
        goodput=counted_batches / max(1e-9, perfect),
        floor=1.0 if args.rest else 1.0 - lost_s / mean_life_s,
        law=sent.bytes["values"] / max(1.0, law),
        control=sum(sent.bytes[kind] for kind in CONTROL) * per_peer,
        sent={kind: count * per_peer for kind, count in sorted(sent.bytes.items())},
        messages={kind: count * per_peer for kind, count in sorted(sent.messages.items())},
        longest_step_s=max(trainer.longest_s for trainer in scene.swarm.peers.values()),
        download_s=statistics.median(scene.downloads) if scene.downloads else math.nan,
        peer_mb=(rss_mb() - before_mb) / peers,
        merge_s=statistics.median(scene.rounds) if scene.rounds else math.nan,
        begin_bytes=sent.begin,
        word_bytes=max(len(encode(trainer.fragments[0].progress())) for trainer in scene.swarm.peers.values()),
    )


def said(where: str, began: float, sent: Sent) -> None:
    """Say on stderr how far the simulation is."""
    at = asyncio.get_running_loop().time()
    kinds = " ".join(f"{kind} {count}" for kind, count in sorted(sent.messages.items()))
    print(
        f"{time.process_time() - began:7.1f} s, {at:7.1f} s there, {rss_mb():6.0f} MB: {where}; {kinds}",
        file=sys.stderr,
    )


def rss_mb() -> float:
    """Memory of this process now, 10^6 bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def measure(args: argparse.Namespace, peers: int, fragments: int) -> Found:
    """One swarm."""
    began = time.process_time()
    with (
        without_gc(),
        counted() as sent,
        remembered() if args.table else nullcontext(),
        shared_table() if args.table else nullcontext(),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("_ALL", "_ASKED_AT_FIRST") if args.meets is not None else ():
            patch.setattr(gossip, name, args.meets)
        main = play(args, peers, fragments, sent, began)
        return run(main, seed=args.seed, max_turns=10**10, max_time_s=1e9)


def show(found: Found) -> None:
    """A line of the table of merges."""
    print(
        f"{found.peers:5} {found.fragments:3} {found.virtual_s:7.0f} {found.died:5} {found.merges:6}"
        f" {found.members:7.1f} {found.forks:5} {found.goodput:8.3f} {found.floor:6.3f} {found.law:6.2f}"
        f" {found.control:9.0f}"
        f" {found.longest_step_s:7.2f} {found.download_s:8.2f} {found.peer_mb:6.2f} {found.turns / found.cpu_s:9.0f}"
        f" {found.cpu_s:8.1f}\n"
        f"      a merge takes {found.merge_s:.2f} s; the largest Begin had {found.begin_bytes} bytes,"
        f" a word of progress has {found.word_bytes}",
        flush=True,
    )


def show_rest(found: Found, args: argparse.Namespace) -> None:
    """A line of the table of control traffic."""
    values = 2 * (found.peers - 1) / found.peers * args.model * 4.25 / 8 / (args.every * args.batch_s)
    kinds = ("progress", "dht", "rounds", "beats", "other")
    each = " ".join(f"{found.sent.get(kind, 0.0):7.0f}" for kind in kinds)
    print(
        f"{args.strategy:11} {found.peers:5} {found.fragments:3} {each} {found.control:8.0f}"
        f" {sum(found.messages.get(kind, 0.0) for kind in CONTROL):7.1f} {values:9.0f} {found.control / values:7.2f}"
        f" {found.cpu_s:7.1f}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", default="16,64,256", help="numbers of peers, with commas")
    parser.add_argument("--strategy", default="decoupled", choices=NAMES)
    parser.add_argument("--fragments", default="4", help="numbers of fragments, with commas")
    parser.add_argument("--every", type=int, default=30, help="batches between two merges of a fragment")
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--group", type=int, default=None, help="the most members of a merge; default: 256")
    parser.add_argument("--share", type=int, default=0, help="the fewest parameters that a member averages")
    parser.add_argument("--batch-s", type=float, default=1.0)
    parser.add_argument("--numel", type=int, default=65536, help="parameters that are simulated")
    parser.add_argument("--half-life", type=float, default=10.0, help="minutes")
    parser.add_argument("--late", type=float, default=0.0, help="seconds by which every fourth peer is late, at most")
    parser.add_argument("--minutes", type=float, default=5.0, help="that are measured, of virtual time")
    parser.add_argument("--warm-up", type=float, default=2.0, help="times `every` batches, before it is measured")
    parser.add_argument("--limit", type=float, default=15.0, help="minutes of processor time for each number of peers")
    parser.add_argument(
        "--meets", type=int, default=None, help="others that each peer calls when it comes; default: 64"
    )
    parser.add_argument("--table", action="store_true", help="one table for a DHT; what all read is read once")
    parser.add_argument("--rest", action="store_true", help="control traffic, without churn")
    parser.add_argument(
        "--model", type=int, default=10_000_000, help="parameters that control traffic is compared with"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    if args.strategy in {"synchronous", "local", "diloco"}:
        args.fragments = "1"
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    if args.rest:
        print("                           bytes a second and peer                      messages    values  control")
        print(
            "strategy    peers  P progress     dht  rounds   beats   other  control     /s    bytes/s /values   cpu s"
        )
    else:
        print(
            "peers   P  time s  died merges members forks  goodput  floor    law control/s  step s download     MB"
            "   turns/s    cpu s"
        )
    results = []
    for peers in map(int, args.peers.split(",")):
        for fragments in map(int, args.fragments.split(",")):
            profile = cProfile.Profile()
            if args.profile:
                profile.enable()
            found = measure(args, peers, fragments)
            profile.disable()
            results.append(found._asdict())
            if args.rest:
                show_rest(found, args)
            else:
                show(found)
            if args.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    if args.json:
        write(
            args.json, {"settings": {key: value for key, value in vars(args).items() if key != "json"}, "rows": results}
        )


if __name__ == "__main__":
    main()
