"""Trainers under whatever a program sets in torch: the same bits as without, and the same on peers that catch up."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from threading import Thread, current_thread
from typing import Any, TypeVar

import pytest
import torch

from shoal import sim
from shoal.compression import BlockwiseQuantization, ErrorFeedback, TopKCompression, Uniform8BitQuantization
from shoal.sim import SimNetwork
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, StreamingDiLoCo
from tests.odd_torch import ODD
from tests.sim.optimizer_kit import Run, Trainer, backward, gradient

T = TypeVar("T")
NAMES = ["p0", "p1"]
MODES = [odd for odd in ODD if odd != "inference_mode"]  # there a shoal.Optimizer refuses to train
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradients": ({"compression": Uniform8BitQuantization(), "average_state_every": 2}, {}),
    "largest values": ({"compression": ErrorFeedback(TopKCompression(0.1)), "width": 64}, {"late": True}),
    "low rank": ({"width": 32, "dtype": torch.float32}, {"rank": 2}),
    "offloaded": ({"compression": BlockwiseQuantization(bits=4), "dtype": torch.bfloat16}, {"offload": True}),
    "local updates": ({}, {"use_local_updates": True, "statistics": ["exp_avg_sq"]}),
    "LocalSGD": ({}, {"strategy": LocalSGD(every=2)}),
    "DiLoCo": ({"compression": BlockwiseQuantization(bits=4)}, {"strategy": DiLoCo(every=2)}),
    "StreamingDiLoCo": ({}, {"strategy": StreamingDiLoCo(every=4, fragments=2, overlap=1)}),
    "Decoupled": ({}, {"strategy": Decoupled(every=4, fragments=2)}),
}
"""Ways to train: options of the run, and of each trainer."""


class InAnotherThread:
    """An executor whose threads know nothing of what the program has set, as those of shoal."""

    async def run(self, function: Callable[..., T], /, *args: Any, **options: Any) -> T:
        """Call a function in a new thread, and wait for it."""
        found: list[Callable[[], T]] = []

        def work() -> None:
            try:
                result = function(*args, **options)
            except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                found.append(lambda error=error: _raise(error))  # type: ignore[misc]
            else:
                found.append(lambda: result)

        thread = Thread(target=work)
        thread.start()
        thread.join()
        return found[0]()


def _raise(error: BaseException) -> Any:
    raise error


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sim.swarm.InlineExecutor", InAnotherThread)


class Exact(Trainer):
    """A trainer whose own gradients are computed in float64, which no setting changes."""

    def compute(self, number: int, size: int) -> None:
        """See `Trainer`."""
        wide = [each.detach().double() for each in self.parameters]
        backward(wide, self.index, number, size)
        for parameter, each in zip(self.parameters, wide, strict=True):
            parameter.grad = gradient(each).to(parameter.dtype)


def trained(kind: str) -> tuple[object, ...]:
    """The state's name after some epochs of two peers, and a digest of what each of them holds."""
    of_run, of_trainer = KINDS[kind]

    async def main() -> tuple[object, ...]:
        run = Run(target=16, trainer=Exact, **of_run)
        for name in NAMES:
            await run.add(name, check_every=2, **of_trainer)
        await sim.sleep(3.0)
        run.announce_end(3)

        async def loop(name: str) -> None:
            trainer = run.swarm.peer(name)
            while not trainer.finished:
                await trainer.take_batch(4, duration_s=0.2)

        await asyncio.gather(*(run.swarm.run_on(name, loop, name) for name in NAMES))
        assert run.agree(NAMES), run.warnings
        digest = hashlib.sha256()
        for name in NAMES:
            for each in run.swarm.peer(name).parameters:
                digest.update(each.detach().float().numpy().tobytes())
        names = [fragment.state for fragment in run.swarm.peer("p0").fragments]
        await run.close()
        return *names, digest.hexdigest(), *run.warnings

    return sim.run(main, seed=1)


@cache
def trained_plainly(kind: str) -> object:
    """As torch is without any setting."""
    return trained(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_bits_whatever_torch_does_by_default(kind: str) -> None:
    """All at once: default dtype and device, autocast, deterministic algorithms, threads, precision."""
    plain = trained_plainly(kind)
    with ExitStack() as stack:
        for odd in MODES:
            if odd not in ("float16 by default", "float64 by default"):
                stack.enter_context(ODD[odd]())
        found = trained(kind)
    assert found == plain


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        pytest.param(kind, odd, marks=pytest.mark.long(full=(place + number) % 5 > 0))
        for place, kind in enumerate(KINDS)
        for number, odd in enumerate(MODES)
    ],
)
def test_training_gives_the_same_bits_under_each_default(kind: str, odd: str) -> None:
    """One at a time, so that none hides what another does; a fifth, with each kind and default, is in the sample."""
    plain = trained_plainly(kind)
    with ODD[odd]():
        assert trained(kind) == plain


# ------------------------------------------------------------------------------------------- the user's code elsewhere


_stepped_in = set[str]()


def _seen() -> float:
    """A number that says what torch has set in this thread."""
    marks = [
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.get_default_device(),
    ]
    tiny = torch.tensor(1e-40, dtype=torch.float32, device="cpu") / 2
    return int(hashlib.sha256(repr([*marks, bool(tiny)]).encode()).hexdigest()[:8], 16) / 2**32


class Telltale(torch.optim.Optimizer):
    """Its step depends on all that torch has set where it runs, and it leaves it to its caller to record nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        _stepped_in.add(current_thread().name)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (1.0 + _seen()) * parameter.grad)


def telltale(parameters: list[torch.Tensor], lr: float) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer, and a schedule whose rates depend on what torch has set where it moves."""
    optimizer = Telltale(parameters)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.99**epoch * (1.0 + _seen()))


class Multiplying(torch.optim.Optimizer):
    """Multiplies matrices, as SOAP, Shampoo and Muon do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        _stepped_in.add(current_thread().name)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (parameter.grad.float() @ parameter.t().float() @ parameter.float()))


def newcomer_agrees(make: Callable[[list[torch.Tensor], float], tuple[torch.optim.Optimizer, Any]]) -> None:
    """One that downloads for some epochs, and takes the steps of the others meanwhile, ends with their bits."""
    _stepped_in.clear()

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        network = SimNetwork(loop.seed, window_bytes=32 << 10)
        network.add_host("late", down_bytes_s=100_000)
        run = Run(target=24, make=make, network=network)
        state = [torch.zeros(1 << 18, dtype=torch.int32, device="cpu")]
        for name in NAMES:
            await run.add(name, extra_tensors=state)
        await sim.sleep(3.0)

        async def train(name: str) -> None:
            trainer = run.swarm.peer(name)
            while not trainer.finished:
                await trainer.take_batch(3, duration_s=0.25)

        tasks = [run.swarm.spawn(name, train(name)) for name in NAMES]
        await sim.sleep(8.0)
        late = await run.add("late", seed=99, extra_tensors=[state[0].clone()])
        tasks.append(run.swarm.spawn("late", train("late")))
        while not late.epochs:
            assert loop.time() < 90, late.failed_downloads
            await sim.sleep(0.1)
        run.announce_end(late.participant.epoch + 3)
        await asyncio.wait(tasks)
        assert run.agree([*NAMES, "late"]), run.warnings
        assert len(late.participant.takeover.downloads) == 1, late.failed_downloads
        assert not run.warnings
        await run.close()

    sim.run(main, seed=4)
    assert len(_stepped_in) > 1, "nothing was stepped on a thread of shoal's"


def test_steps_that_a_newcomer_catches_up_with_compute_as_in_the_trainers_thread() -> None:
    """An optimizer without `no_grad` raised on the newcomer alone; one that depends on modes gave other weights."""
    with torch.no_grad(), ODD["no memory by default"](), ODD["two threads"](), ODD["flushed denormals"]():
        newcomer_agrees(telltale)


def test_a_newcomer_beside_peers_whose_loop_is_within_autocast_gets_their_bits() -> None:
    """With an optimizer that multiplies matrices it differed again and again."""
    with torch.autocast("cpu", torch.bfloat16):
        newcomer_agrees(lambda parameters, lr: (Multiplying(parameters), None))


@pytest.mark.parametrize("kind", ["gradients", "local updates", "LocalSGD"])
def test_weights_are_used_as_they_are_within_one_autocast(kind: str) -> None:
    """Torch keeps casts of weights until autocast ends: a loop within it computed on with those before the step."""
    _, of_trainer = KINDS[kind]

    async def main() -> None:
        run = Run(target=8, dtype=torch.float32, trainer=Exact)
        trainer = await run.add("p0", **of_trainer)
        await sim.sleep(3.0)
        weights, one = trainer.parameters[0], torch.eye(8, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(8):
                before = weights.detach().clone()
                await trainer.take_batch(4, duration_s=0.2)
                assert torch.equal(weights @ one, weights.to(torch.bfloat16) @ one)
                assert torch.equal(weights, before) or trainer.participant.epoch or of_trainer
        assert trainer.participant.epoch >= 2
        await run.close()

    sim.run(main, seed=2)
