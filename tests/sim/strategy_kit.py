"""Peers that merge, in bad weather: random faults from a seed, and an audit of all that peers share.

Each batch moves one number of the model that no other batch moves. So where the outer optimizer takes the mean alone
(`MEAN`), an anchor shows which batches are in it: a number that moves in two merges of one history is of a batch that
was counted twice. And a peer's own account is held against that: what it has trained it has contributed, or it has told
that it was dropped, or it has still to give it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from shoal import sim
from shoal.base.peer import PeerID
from shoal.compression import CompressionBase
from shoal.errors import ClosedError, PeerError
from shoal.events import Event, Warned
from shoal.optim import Participant
from shoal.run.decide.state_name import StateName
from shoal.sim import SimNetwork, Whims
from shoal.strategies import Merges
from shoal.strategies.outer import OuterTrainingState
from tests.sim.averaging_kit import SETTINGS
from tests.sim.fault_kit import hash_of
from tests.sim.optimizer_kit import Run, Trainer

BATCH = 4
MEAN = partial(torch.optim.SGD, lr=1.0)
_MOVED = 1e-9
"""Less than that is rounding: what a peer has trained is in its outer gradient, and is taken from it again."""


class Merge(NamedTuple):
    """A merge of one fragment.

    Attributes:
        before: the digest of the state before it.
        moved: the numbers of the batches that are in it. Each of them moves a number in one part of the average.
        in_part: the peers that count in some parts of the average only, and their share of the parts.
    """

    before: bytes
    moved: frozenset[int]
    in_part: Mapping[PeerID, Fraction]


class Give(NamedTuple):
    """What a peer gave to a round.

    Attributes:
        numbers: of its batches.
        samples: of these, as far as they count: see `SwarmStep._most_weight`.
    """

    numbers: frozenset[int]
    samples: int


class Audit:
    """All states that any peer has ever held, by fragment and name.

    Args:
        counts: whether each batch shows in the anchor: see this module.
    """

    def __init__(self, *, counts: bool) -> None:
        self.counts = counts
        self._bits: dict[tuple[int, bytes], str] = {}
        self._anchors: dict[tuple[int, bytes], torch.Tensor] = {}
        self._before: dict[tuple[int, bytes], tuple[int, bytes]] = {}
        self._in_part: dict[tuple[int, bytes], Mapping[PeerID, Fraction]] = {}

    def look(self, fragment: int, participant: Participant) -> None:
        """A peer holds this state now.

        Raises:
            AssertionError: others hold the state of this name with other bits.
        """
        training, state = participant.training, participant.state
        own = {extra.data_ptr() for extra in training.extra_tensors}  # they differ by design, until the end
        bits = hash_of([each for each in training.export()[1] if each.data_ptr() not in own])
        assert self._bits.setdefault((fragment, state.digest), bits) == bits, f"two states of one name: {state}"
        assert training.epoch == state.epoch

    def merged(
        self, fragment: int, before: StateName, anchor: Sequence[torch.Tensor], participant: Participant
    ) -> None:
        """A merge led from one state, which had this anchor, to the one that a peer holds now."""
        after, round_ = participant.state, participant.swarm_step.last_round
        if before != after:
            self._before[fragment, after.digest] = fragment, before.digest
            self._in_part[fragment, after.digest] = {} if round_ is None else round_.outcome.counted_in_part
            for state, tensors in ((before, anchor), (after, participant.training.trained)) if self.counts else ():
                self._anchors.setdefault((fragment, state.digest), _flat(tensors))

    def merges(self, fragment: int, state: StateName) -> Iterator[Merge]:
        """The merges that led to this state, the last one first."""
        key = fragment, state.digest
        while (before := self._before.get(key)) is not None:
            moved = numbers_of(self._anchors[key] - self._anchors[before]) if self.counts else ()
            yield Merge(before[1], frozenset(moved), self._in_part[key])
            key = before

    def check(self, fragment: int, state: StateName) -> int:
        """How many merges that led to this state were looked at.

        Raises:
            AssertionError: a batch was counted in two of them.
        """
        merges = list(self.merges(fragment, state))
        times = Counter(number for merge in merges for number in merge.moved)
        assert not (twice := [number for number, count in times.items() if count > 1]), f"counted twice: {twice}"
        return len(merges)


def numbers_of(change: torch.Tensor) -> set[int]:
    """The numbers of the batches that have moved something by so much."""
    return set((change.abs() > _MOVED).nonzero().view(-1).tolist())


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


class Counted(Trainer):
    """A trainer each of whose batches moves a number of its own, and that looks at what it holds after each turn."""

    audit: Audit
    numbers: Iterator[int]
    slowest_s = 0.0
    turns = 0
    place = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trained = list[int]()  # the number of each batch, but for those that were left out as not finite
        self.lost = [0 for _ in self.fragments]  # samples of each fragment before the end of the run came near
        self.given = defaultdict[tuple[int, bytes], list[Give]](list)  # by fragment and state
        for number, fragment in enumerate(self.fragments):
            self._note_gives(number, fragment)
        local: Any = self.participant.training.local
        accumulate = local.accumulate

        def accumulates(size: int) -> bool:
            counts: bool = accumulate(size)
            if counts or local.comes_too_late:
                self.trained.append(self.place)
            return counts

        local.accumulate = accumulates

    def _note_gives(self, number: int, fragment: Participant) -> None:
        training: Any = fragment.training
        contribute, into_round, limit = training.contribute, fragment.swarm_step._contribute, [sys.maxsize]

        def contributes() -> tuple[float, float]:
            weight: tuple[float, float] = contribute()
            moved = frozenset(numbers_of(_flat(training.accumulators)).intersection(self.trained))
            assert training.pending.samples == BATCH * len(moved) or not self.audit.counts
            give = Give(moved, min(training.pending.samples, limit[0]))
            self.given[number, fragment.state.digest].append(give)
            return weight

        def limited(name: StateName, said: int) -> tuple[float, float]:
            limit[0] = max(1, int(fragment.swarm_step._most_weight(fragment.core.peer_id)))
            try:
                return into_round(name, said)
            finally:
                limit[0] = sys.maxsize

        training.contribute = contributes
        fragment.swarm_step._contribute = limited  # type: ignore[method-assign]

    def lost_whole(self, number: int, fragment: Participant) -> int:
        """Samples that were dropped, but for what merges lack that have this peer in some of their parts only."""
        me, dropped = fragment.core.peer_id, fragment.status().dropped
        for merge in self.audit.merges(number, fragment.state):
            if me in merge.in_part and (gives := self.given.get((number, merge.before))):
                dropped -= gives[-1].samples - int(gives[-1].samples * merge.in_part[me])
        return dropped

    def compute(self, number: int, size: int) -> None:
        """See `Trainer`."""
        self.place = next(self.numbers)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.view(-1)[self.place] = -1.0
        for fragment in self.fragments:
            for extra in fragment.training.extra_tensors:
                extra.add_(1.0 + self.index)

    def check_account(self, *, over: bool = False) -> None:
        """Each batch of this peer was contributed, or dropped, or is still to be given; none if the run is `over`.

        The anchors of the states that led to its own show which were contributed, and its parameters which it holds.

        Raises:
            AssertionError: its account says otherwise.
        """
        for number, fragment in enumerate(self.fragments):
            said, told = fragment.status(), f"p{self.index}, fragment {number} at epoch {fragment.epoch}"
            assert said.contributed + said.dropped + fragment.account.held == len(self.trained) * BATCH, told
            assert not (over and fragment.account.held), told
            if self.audit.counts:
                least, most = self._contributed(number, fragment)
                assert least <= said.contributed <= most, f"{told}: {said.contributed} where it is {least} to {most}"
                training: Any = fragment.training
                moved = numbers_of(_flat(training.trained) - _flat(training._own)).intersection(self.trained)
                assert training.pending.held == (0 if training._strays else BATCH * len(moved)), told

    def _contributed(self, number: int, fragment: Participant) -> tuple[int, int]:
        """The fewest and the most samples of this peer in the merges that led to its state.

        They are one number where each merge has all that it gave. Of one that has it in some parts only, it is their
        share of a give at that state, of which there may be several.
        """
        me, mine, least, most = fragment.core.peer_id, set(self.trained), 0, 0
        for merge in self.audit.merges(number, fragment.state):
            gives, moved = self.given.get((number, merge.before), []), merge.moved & mine
            if me in merge.in_part:
                counts = [int(give.samples * merge.in_part[me]) for give in gives]
            else:
                counts = [give.samples for give in gives if give.numbers == moved]
                assert counts or not moved, "what is in the anchor was never given"
            least, most = least + min(counts, default=0), most + max(counts, default=0)
        return least, most

    async def take_turn(self, fragment: Participant | None = None) -> None:
        """See `Trainer`."""
        participant = fragment or self.participant
        before, began = participant.state, asyncio.get_running_loop().time()
        goes_on = before.epoch > 0 and not participant.at_end
        waits_for_last = isinstance(training := participant.training, OuterTrainingState) and training.comes_to_its_end
        await super().take_turn(fragment)
        after = participant.state
        if goes_on and not participant.at_end and not waits_for_last:
            self.slowest_s = max(self.slowest_s, asyncio.get_running_loop().time() - began)
        if before != after:
            self.check_account()
        self.turns += 1
        if participant.training.whole and (before != after or self.turns % 8 == 0):
            self.audit.look(self.fragments.index(participant), participant)
        if participant.core.endpoint.contact.addresses:
            assert after.key >= before.key, f"{participant.settings.run_id} went back from {before} to {after}"

    async def step(self, participant: Participant) -> None:
        """See `Trainer`."""
        async with participant.own.hold():
            before, anchor = participant.state, [each.detach().clone() for each in participant.training.trained]
            participant.own.step()
        self.audit.merged(self.fragments.index(participant), before, anchor, participant)
        await participant.stepped()


EXPECTED = re.compile(
    "training alone|rounds of .* in a row have failed|states were downloaded in a row|it does not come|"
    "no complete state within|named a state of epoch|none of the samples that|only .* of the .* samples that|"
    "do not come to a round|steps that the others took meanwhile is missing|the run ends here|the run is at epoch|"
    "could not withdraw a declaration|no DHT node took the declaration|rounds waiting, and gave nothing|"
    "brought them to no average|came to others in time, and not to this peer|this client goes back from epoch|"
    "this peer made its steps alone|of what this peer has computed in the last|gives up its own epoch|"
    "which has given nothing to this run yet"
)
"""Warnings that faults give rise to."""


_WIDTH = 2048
"""The numbers of the model; each batch moves one."""


class Weather:
    """A swarm that merges, and random faults.

    Args:
        strategy: of all peers.
        seed: of all chance.
        peers: at the beginning.
        counts: whether the audit counts batches: the outer optimizer must be `MEAN`, all that is trained be kept or
            dropped, and the codec lose nothing.
        codec: of the outer gradients.
        extras: there is a tensor that each batch moves, and that is averaged after every second merge and at the end.
    """

    def __init__(
        self,
        strategy: Merges,
        seed: int,
        *,
        peers: int = 4,
        counts: bool,
        codec: CompressionBase | None = None,
        extras: bool = False,
    ) -> None:
        self.rng = random.Random(f"weather/{seed}")
        self.strategy, self.extras = strategy, extras
        self.audit, self.warnings = Audit(counts=counts), list[str]()
        # Where nobody looks for numbers that moved twice, a long run uses them again.
        self.numbers: Iterator[int] = itertools.count() if counts else itertools.cycle(range(_WIDTH))
        self.lacking = list[str]()  # rightly said that the quorum is not there
        averager = msgspec.structs.replace(SETTINGS, part_size_bytes=self.rng.choice([4096, 65536]))
        network = SimNetwork(seed, latency_s=self.rng.choice([0.002, 0.02]))
        self.run = Run(
            target=1, network=network, averager=averager, width=_WIDTH, compression=codec, make=_sgd, trainer=Counted
        )
        self.names = [f"p{number}" for number in range(peers)]
        self.batch_s: dict[str, float] = {}
        self.work: list[asyncio.Task[None]] = []
        self.log: list[str] = []

    async def pass_over(self, faults: int) -> None:
        """All peers train, and then there are so many faults."""
        await self.begin()
        await sim.sleep(8.0)
        for _ in range(faults):
            await self.fault()
            await sim.sleep(self.rng.uniform(0.5, 4.0))

    async def begin(self) -> None:
        """All peers train."""
        for name in self.names:
            await self.add(name)

    async def add(self, name: str, *, client: bool = False) -> None:
        """One more peer trains."""
        options: dict[str, Any] = {"extra_tensors": [torch.zeros(8)], "average_state_every": 2} if self.extras else {}
        events = partial(self._note, name)
        await self.run.add(name, client_mode=client, strategy=self.strategy, events=events, **options)
        self.train(name)

    def _note(self, name: str, event: Event) -> None:
        if isinstance(event, Warned) and not EXPECTED.search(event.message):
            right = "nothing is merged, as the strategy's quorum" in event.message and self._lacks_peers(name)
            (self.lacking if right else self.warnings).append(f"{name}: {event.message}")

    def _lacks_peers(self, name: str) -> bool:
        """Whether so few peers are at this one's state, and can be reached from it, that there is no quorum.

        On a line that is 50 times slower a peer may see nobody.
        """
        swarm, merging = self.run.swarm, self.strategy.merging
        here, mine = swarm.network._host(name), swarm.peer(name).participant
        near = [
            other
            for other, trainer in swarm.peers.items()
            if trainer.participant.state.digest == mine.state.digest
            and (far := swarm.network._host(other)).group == here.group
            and far.stalled_until is None
            and max(far.slowness, here.slowness) < 50
        ]
        assert merging.quorum is not None
        return len(near) < merging.quorum

    def train(self, name: str) -> None:
        """Let it train until its process ends."""
        trainer = self.run.swarm.peer(name)
        assert isinstance(trainer, Counted)
        trainer.audit, trainer.numbers = self.audit, self.numbers
        self.batch_s[name] = self.rng.uniform(0.2, 0.6)
        work = trainer.train(BATCH, duration_s=self.batch_s[name], until=lambda: False)
        self.work.append(self.run.swarm.spawn(name, work))

    async def fault(self) -> None:
        """Something goes wrong."""
        swarm, rng = self.run.swarm, self.rng
        up = [name for name in self.names if swarm.is_alive(name)]
        down = [name for name in self.names if not swarm.is_alive(name)]
        how = rng.choice(["crash", "vanish", "leave", "pause", "join", "client", "back", "back", "slow", "split"])
        name = rng.choice(up)
        self.log.append(f"{asyncio.get_running_loop().time():.1f} {how} {name}")
        if how in ("crash", "vanish", "leave") and len(up) > 2 and name != "p0":
            if how == "leave":
                trainer = swarm.peer(name)
                for fragment in trainer.fragments:
                    await swarm.run_on(name, fragment.close)
                assert isinstance(trainer, Counted)
                trainer.check_account()
                assert not any(fragment.account.held for fragment in trainer.fragments)
            (swarm.vanish if how == "vanish" else swarm.crash)(name)
        elif how == "pause":
            swarm.stall(name, rng.uniform(0.5, 8.0))
        elif how in ("join", "client") and len(self.names) < 7:
            self.names.append(f"p{len(self.names)}")
            await self.add(self.names[-1], client=how == "client")
        elif how == "back" and down:
            with suppress(PeerError, ClosedError):
                await swarm.restart(down[0])
                self.train(down[0])
        elif how == "slow":
            swarm.slow(name, rng.choice([1.0, 10.0, 50.0]))
        elif how == "split":
            swarm.partition([rng.sample(self.names, len(self.names) // 2)])
            await sim.sleep(rng.uniform(1.0, 8.0))
            swarm.heal()

    def calm(self) -> None:
        """No more faults, and no more whims."""
        sim.calm()
        swarm = self.run.swarm
        swarm.heal()
        for name in swarm.peers:
            swarm.slow(name, 1.0)

    async def check_fairness(self, calm_s: float = 20.0) -> None:
        """After so long a calm, merges take the batches of each peer for as long again: it drops three in ten at most.

        A merge may come without a peer whose batch takes longer than half of the time between two merges.

        Raises:
            AssertionError: a peer trains for nothing.
        """
        self.calm()
        await sim.sleep(calm_s)
        peers = self.run.swarm.peers
        before = {name: [each.status() for each in trainer.fragments] for name, trainer in peers.items()}
        await sim.sleep(calm_s)
        for name, trainer in peers.items():
            for number, (old, fragment) in enumerate(zip(before[name], trainer.fragments, strict=True)):
                new = fragment.status()
                merges, given = new.epoch - old.epoch, new.contributed - old.contributed
                lost = new.dropped - old.dropped
                told = f"{name}, fragment {number}: of {given + lost} samples {lost} were lost in {merges} merges"
                assert merges, told
                if self.batch_s[name] <= calm_s / merges / 2:
                    assert given, told
                    assert lost <= 0.3 * (given + lost), told

    async def end(self, merges: int, patience_s: float, *, calm_s: float = 30.0) -> None:
        """No more faults, for so long; the run ends after so many more merges. All have equal parameters then.

        Raises:
            AssertionError: they have not; or one of the other promises was broken.
        """
        swarm = self.run.swarm
        self.calm()
        await sim.sleep(calm_s)  # a state that a silent peer has named is waited for 20 s
        trainers = [trainer for trainer in swarm.peers.values() if isinstance(trainer, Counted)]
        last = max(fragment.epoch for trainer in trainers for fragment in trainer.fragments)
        for trainer in trainers:
            trainer.lost = [trainer.lost_whole(*each) for each in enumerate(trainer.fragments)]
        self.run.announce_end(last + merges)
        limit = asyncio.get_running_loop().time() + patience_s
        while not all(trainer.finished for trainer in swarm.peers.values()):
            for work in self.work:
                if work.done() and not work.cancelled():
                    work.result()
            assert asyncio.get_running_loop().time() < limit, f"it does not end: {self._places()}"
            await sim.sleep(0.5)
        assert self.run.agree(sorted(swarm.peers)), self._places()
        if self.extras:
            ends: list[Any] = [trainer.participant.training.local._ended for trainer in trainers]
            averages = [each[1][0].tolist() for each in ends]  # batches that come later move it for a moment
            assert all(each == averages[0] for each in averages), averages
        for trainer in trainers:
            trainer.check_account(over=True)
            now = [trainer.lost_whole(*each) for each in enumerate(trainer.fragments)]
            lost = [after - before for after, before in zip(now, trainer.lost, strict=True)]
            assert max(lost) - min(lost) <= 2 * BATCH, f"p{trainer.index} loses more of one fragment: {lost}"
            assert len({fragment.epoch for fragment in trainer.fragments}) == 1, self._places()
        for number, fragment in enumerate(next(iter(swarm.peers.values())).fragments):
            if self.audit.counts:
                assert self.audit.check(number, fragment.state) > 2
        assert not self.warnings, self.warnings
        assert not self.run.warnings, self.run.warnings
        await self.run.close()

    def _places(self) -> str:
        peers = self.run.swarm.peers.items()
        return "; ".join(
            f"{name} {[(each.epoch, each.state.digest.hex()[:4], each.phase.value) for each in trainer.fragments]}"
            for name, trainer in peers
        )


def _sgd(parameters: list[torch.Tensor], lr: float) -> tuple[torch.optim.Optimizer, Any]:
    """Each batch moves its number by 1."""
    return torch.optim.SGD(parameters, lr=1.0), None


def play(
    strategy: Merges,
    seed: int,
    *,
    faults: int = 8,
    counts: bool,
    codec: CompressionBase | None = None,
    extras: bool = False,
    whims: Whims | None = None,
) -> Weather:
    """A run with so many faults, and these whims until they end."""
    played: list[Weather] = []

    async def main() -> None:
        weather = Weather(strategy, seed, counts=counts, codec=codec, extras=extras)
        played.append(weather)
        try:
            await weather.pass_over(faults)
            await weather.end(3, 120.0)
        except AssertionError as error:
            error.add_note("\n".join(weather.log))
            raise

    sim.run(main, seed=seed, whims=whims)
    return played[0]
