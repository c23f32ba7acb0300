"""Whole trainers on simulated hosts: a tiny regression, the participant, and the trainer's loop as a coroutine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from shoal import sim
from shoal.averaging import TensorLock
from shoal.compression import CompressionBase
from shoal.errors import StateUnavailable
from shoal.events import EpochAdvanced, Event
from shoal.optim import Participant, RunSettings
from shoal.run.chains import first_asked, participants_of
from shoal.run.decide.phases import RunPhase
from shoal.sim import SimHost, SimNetwork, Swarm
from shoal.strategies import Inner, LocalUpdates, Strategy, Synchronous
from shoal.train.offload import Offload
from tests.sim.averaging_kit import SETTINGS, note_internal_error, start_core

FEATURES = 6


def model(dtype: torch.dtype = torch.float64, seed: int = 0, width: int = 8) -> list[torch.Tensor]:
    """Parameters of a small network, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(FEATURES, width, generator=generator, dtype=torch.float64, device="cpu"),
        torch.randn(width, 1, generator=generator, dtype=torch.float64, device="cpu"),
    ]
    return [torch.nn.Parameter(weight.to(dtype) * 0.3) for weight in weights]


@functools.lru_cache(1000)
def batch(peer: int, number: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The `number`-th batch of a peer: many simulations train with the same ones."""
    generator = torch.Generator().manual_seed(1000 * peer + number)
    inputs = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64, device="cpu")
    targets = inputs.sum(dim=1, keepdim=True).sin() + 0.1 * peer
    return inputs.to(dtype), targets.to(dtype)


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The `.grad` that `backward` has set."""
    assert parameter.grad is not None
    return parameter.grad


def backward(parameters: list[torch.Tensor], peer: int, number: int, size: int) -> float:
    """Set `.grad` of the parameters to the gradient of one batch; returns the loss."""
    inputs, targets = batch(peer, number, size, parameters[0].dtype)
    first, second = (parameter.detach() for parameter in parameters)
    hidden = (inputs @ first).tanh()
    errors = hidden @ second - targets
    slopes = errors * (2 / len(errors))  # written out: autograd takes half of the time of a simulated batch
    parameters[0].grad = inputs.T @ (slopes @ second.T * (1 - hidden * hidden))
    parameters[1].grad = hidden.T @ slopes
    return float(errors.square().mean())


def reference(peers: int, epochs: int, batches: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One process that takes the peers' batches in order and averages their gradients (invariant 7)."""
    parameters = model(dtype)
    optimizer, scheduler = make_optimizer(parameters)
    for epoch in range(epochs):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for peer in range(peers):
            for number in range(batches):
                backward(parameters, peer, epoch * batches + number, size)
                for total, parameter in zip(sums, parameters, strict=True):
                    total += gradient(parameter)
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total / (peers * batches)
        optimizer.step()
        scheduler.step()
    return [parameter.detach() for parameter in parameters]


def make_optimizer(parameters: list[torch.Tensor], lr: float = 0.05) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW with a decaying schedule."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)


class Trainer:
    """One peer that trains: `participant`, parameters and how it went."""

    def __init__(
        self,
        index: int,
        parameters: list[torch.Tensor],
        participant: Participant,
        others: Sequence[Participant] = (),
    ) -> None:
        self.index, self.parameters, self.participant = index, parameters, participant
        self.fragments = [participant, *others]
        """Of the model, if they are merged one after another."""
        self.epochs: list[tuple[float, int, int, bytes]] = []
        self.alone = 0
        self.patience_s = participant.settings.state_patience_s
        self.batches_done = 0
        self.downloads = 0
        self.failed_downloads: list[str] = []

    async def take_batch(self, size: int, *, number: int | None = None, duration_s: float = 0.0) -> None:
        """One batch: compute (takes `duration_s`), accumulate, and whatever the participant asks for."""
        training = self.participant.training.local
        self.compute(self.batches_done if number is None else number, size)
        if duration_s:
            await sim.sleep(duration_s)
        if self.finished:
            training.end(self.fragments[-1].state.digest)
            return
        if not all(fragment.at_end for fragment in self.fragments):
            worth = training.accumulate(size) or training.comes_too_late
            if worth:
                self.participant.speed.count(size)
            self.batches_done += 1
        for fragment in self.fragments:
            fragment.turn.accumulated()
            if not fragment.at_end or all(each.at_end for each in self.fragments):
                await self.take_turn(fragment)
        if all(fragment.at_end for fragment in self.fragments):
            training.end(self.fragments[-1].state.digest)

    def compute(self, number: int, size: int) -> None:
        """Set `.grad` to the gradient of the batch of this number."""
        backward(self.parameters, self.index, number, size)

    @property
    def finished(self) -> bool:
        """Whether the run is over here."""
        return all(fragment.finished for fragment in self.fragments)

    async def take_turn(self, fragment: Participant | None = None) -> None:
        """Do what the participant asks for now."""
        participant = fragment or self.participant
        phase = await participant.turn.decide(60.0)
        if phase is RunPhase.STEPPING and not participant.turn.holds_update_back:
            await self.step(participant)
        elif phase is RunPhase.BEHIND and participant.turn.waits_for_state:
            try:
                patient = participant.settings.auxiliary
                self.downloads += await participant.turn.download(self.patience_s, patient=patient)
            except StateUnavailable as error:
                self.failed_downloads.append(str(error))

    async def step(self, participant: Participant) -> None:
        """Take the update that is ready, under the lock as `Chains` does: a copy of the state may be under way."""
        try:
            async with participant.own.hold():
                participant.own.step()
        except Exception as error:
            if not await participant.stepped(error):
                raise
        else:
            await participant.stepped()

    async def help(self) -> None:
        """The loop of an auxiliary peer. It must not turn without time."""
        while not (self.finished or self.participant.course.is_closed):
            for fragment in await first_asked(self.fragments, 60.0):
                await self.take_turn(fragment)

    async def finish_epoch(self, epoch: int) -> None:
        """Take no more batches until the swarm has made this epoch."""
        while self.participant.epoch < epoch:
            await sim.sleep(0.01)
            await self.take_turn()

    async def train(self, size: int, *, duration_s: float, until: Callable[[], bool]) -> None:
        """Batches of `duration_s` each, until `until()`."""
        while not until() and not self.finished:
            await self.take_batch(size, duration_s=duration_s)


class Run:
    """A swarm of trainers of one run."""

    def __init__(
        self,
        *,
        target: int,
        average_state_every: int = 0,
        dtype: torch.dtype = torch.float64,
        network: SimNetwork | None = None,
        averager: Any = SETTINGS,
        state_compression: CompressionBase | None = None,
        lr: float = 0.05,
        width: int = 8,
        compression: CompressionBase | None = None,
        state_upload_limit: float | None = None,
        make: Callable[[list[torch.Tensor], float], tuple[torch.optim.Optimizer, Any]] = make_optimizer,
        trainer: type[Trainer] = Trainer,
    ) -> None:
        self._make, self._trainer = make, trainer
        self.compression, self.state_upload_limit = compression, state_upload_limit
        self.state_compression, self.lr = state_compression, lr
        seed = asyncio.get_running_loop().seed  # type: ignore[attr-defined]
        self.swarm: Swarm[Trainer] = Swarm(network=network or SimNetwork(seed))
        self.dtype, self.width = dtype, width
        self.target, self.local = target, False
        """Whether peers average parameters, and go on meanwhile, unless they are added with something else."""
        strategy = Synchronous(target)
        self.settings = RunSettings(
            run_id="run", strategy=strategy, averager=averager, average_state_every=average_state_every
        )
        self.warnings: list[str] = []
        self.trainers: dict[str, Trainer] = {}
        self._first: SimHost | None = None

    async def add(
        self,
        name: str,
        *,
        seed: int = 0,
        client_mode: bool = False,
        extra_tensors: Sequence[torch.Tensor] = (),
        skew_s: float = 0.0,
        late: bool = False,
        statistics: Sequence[str] = (),
        offload: bool = False,
        rank: int | None = None,
        strategy: Strategy | None = None,
        use_local_updates: bool | None = None,
        delay_grad_averaging: bool | None = None,
        events: Callable[[Event], None] | None = None,
        **changes: Any,
    ) -> Trainer:
        """Start a trainer; `seed` makes its first parameters, and its clock is ahead by `skew_s`.

        What happens from its start on is told to `events`.
        """
        index = len(self.trainers)

        async def factory(host: SimHost) -> Trainer:
            bootstrap = next((self.swarm.host(n) for n in self.swarm.peers if n != name), self._first)
            self._first = self._first or host
            clock: Any = host.env.clock
            clock._offset_s += skew_s
            if events is not None:
                host.env.events.subscribe(events)
            parameters = model(self.dtype, seed, self.width)
            optimizer, scheduler = self._make(parameters, self.lr)
            limit = self.state_upload_limit
            core = await start_core(host, bootstrap, client_mode=client_mode, state_upload_limit=limit)
            averager = msgspec.structs.replace(self.settings.averager, client_mode=client_mode)
            chosen = strategy
            if strategy is None or strategy == Synchronous():
                local = self.local if use_local_updates is None else use_local_updates
                delay = self.local if delay_grad_averaging is None else delay_grad_averaging
                if local:
                    chosen = LocalUpdates(self.target, statistics=statistics, waits=not delay)
                else:
                    when = "overlap" if delay else "next" if late else "drop"
                    chosen = Synchronous(self.target, late=when, low_rank=rank, offload=offload)
            settings = msgspec.structs.replace(self.settings, averager=averager, strategy=chosen, **changes)
            lends = Offload(parameters) if offload else None
            training = settings.strategy.training(Inner(optimizer, scheduler, extra_tensors, lends))
            participants = await participants_of(
                core,
                training,
                settings,
                lock=TensorLock(),
                compression=self.compression,
                state_compression=self.state_compression,
            )
            trainer = self._trainer(index, parameters, participants[0], participants[1:])
            host.env.events.subscribe(lambda event: self._note(name, trainer, event))
            for participant in participants:
                await participant.start()
            self.trainers[name] = trainer
            return trainer

        return await self.swarm.start_peer(name, factory, client_mode=client_mode)

    def _note(self, name: str, trainer: Trainer, event: Event) -> None:
        note_internal_error(self.warnings, name, event)
        if isinstance(event, EpochAdvanced) and event.run_id == trainer.participant.settings.run_id:
            trainer.epochs.append((asyncio.get_running_loop().time(), event.epoch, event.samples, event.digest))
            trainer.alone += event.peers == 1

    def announce_end(self, epoch: int) -> None:
        """All who are there say that the run ends at this epoch."""
        for trainer in self.swarm.peers.values():
            for fragment in trainer.fragments:
                fragment.announce_end(epoch)

    async def close(self) -> None:
        """Shut all trainers down."""
        for name, trainer in self.swarm.peers.items():
            for fragment in trainer.fragments:
                await self.swarm.run_on(name, fragment.close)
            await self.swarm.run_on(name, trainer.participant.core.close)

    def agree(self, names: list[str]) -> bool:
        """Whether these trainers hold the same parameters, bit by bit, under the same name."""
        first, *others = (self.swarm.peer(name) for name in names)
        return all(
            [fragment.state for fragment in other.fragments] == [fragment.state for fragment in first.fragments]
            and all(torch.equal(a, b) for a, b in zip(other.parameters, first.parameters, strict=True))
            for other in others
        )
