"""Checkpoints of the collaborative optimizer, as a user saves and loads them."""

from __future__ import annotations

import copy
import io
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import pytorch_optimizer
import torch

import shoal
from shoal.compression import Float16Compression
from shoal.errors import ClosedError, LocalError
from shoal.events import Warned
from shoal.run.decide.phases import RunPhase
from shoal.strategies import Decoupled, DiLoCo, LocalSGD, local_updates, outer
from shoal.train import finite, gradient_sum, pending, shared_tensors, stepper, training_state
from tests.integration.workers import until

TARGET = 4


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    """A network of one."""
    with shoal.DHT(start=True) as started:
        yield started


def begin(dht: shoal.DHT, model: torch.nn.Module, run_id: str, target: int = TARGET) -> tuple[shoal.Optimizer, Any]:
    """A run with a schedule."""
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    swarm = shoal.Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=target,
        batch_size_per_step=TARGET,
        optimizer=inner,
        scheduler=schedule,
    )
    return swarm, schedule


def train(swarm: shoal.Optimizer, model: torch.nn.Linear, epoch: int) -> None:
    """Until there; the same batch each time."""
    while swarm.local_epoch < epoch:
        swarm.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
        swarm.step()


def test_a_config_error_about_settings_appears_at_the_first_step_not_in_the_constructor(dht: shoal.DHT) -> None:
    """It comes where the mistake is; the DHT is as good as before."""
    first, _ = begin(dht, torch.nn.Linear(3, 2), "run")
    with shoal.DHT([dht.invite()], start=True) as there:
        model = torch.nn.Linear(3, 2)
        with pytest.raises(shoal.errors.ConfigError, match="target_batch_size is 8 here and 4 at another peer"):
            begin(there, model, "run", 2 * TARGET)
        again, _ = begin(there, model, "run")
        again.shutdown()
    first.shutdown()


def test_a_batch_whose_step_was_interrupted_counts_once(dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may call `step()` again: that counted the gradients twice, even in the next epoch."""

    def interrupt(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    model = torch.nn.Linear(3, 2)
    swarm, _ = begin(dht, model, "run", 10 * TARGET)
    for _ in range(2):
        swarm.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        for _ in range(2):
            monkeypatch.setattr(swarm._saver, "at_step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                swarm.step()
        swarm.step()
    monkeypatch.setattr(swarm._saver, "at_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        swarm.step()
    swarm.zero_grad()
    swarm.step()
    assert swarm.local_progress.samples_accumulated == 3 * TARGET
    swarm.shutdown()


class Interrupted(BaseException):
    """As `KeyboardInterrupt`."""


def interrupted(call: Callable[[], object], moment: int) -> bool:
    """Make the call, and interrupt it where the batch is counted; False if that has not so many moments."""
    modules = (finite, gradient_sum, shared_tensors, pending, stepper, local_updates, outer, training_state)
    left, files = moment, {each.__file__ for each in modules}

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        code = frame.f_code
        counts = code.co_filename in files and code.co_name != "<genexpr>"  # Python drops what is raised at its end
        if event in ("call", "return", "c_return") and (counts or code.co_name == "_accumulate"):
            left -= 1
            if left == 0:
                raise Interrupted

    sys.setprofile(look)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("options", [{"target_batch_size": 1 << 30}, {"strategy": LocalSGD(1 << 19)}])
def test_an_interrupted_batch_was_counted_nowhere_or_stepped_from_twice(
    dht: shoal.DHT, options: dict[str, Any]
) -> None:
    """At any moment: a call that comes again steps from it once, and its samples are held or dropped, once."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with shoal.Optimizer(dht=dht, run_id="run", optimizer=optimizer, batch_size_per_step=1, **options) as swarm:
        moment, goes_on, core = 0, True, swarm.collaboration
        while goes_on:
            moment, before = moment + 1, float(weight.detach())
            weight.grad = torch.full((1,), -1.0)
            if goes_on := interrupted(swarm.step, moment):
                swarm.step()
            held, dropped = core.training.pending.held, swarm.status().dropped
            assert held + dropped == moment, f"at moment {moment}"
            if "strategy" in options:  # a step of which the interrupt has left nothing else counts for nothing
                assert float(weight.detach()) - before in (0.0, 1.0), f"at moment {moment}"
                assert float(weight.detach()) >= held > moment - 40, f"at moment {moment}"
        assert moment > 50
    assert swarm.status().dropped == moment  # it was given to nobody


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.parametrize("where", ["before", "within", "after"])
@pytest.mark.parametrize(
    "options", [{"strategy": LocalSGD(1 << 19)}, {"use_local_updates": True, "target_batch_size": 99}]
)
def test_an_interrupt_within_the_inner_step_was_counted_nowhere(
    dht: shoal.DHT, error: type[BaseException], where: str, options: dict[str, Any]
) -> None:
    """The batch counts if something has moved, and is dropped else; a call that comes again does not step from it."""

    def fail(*_: object) -> None:
        if raises:
            raise error("now")

    class Fails(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """The second parameter is not stepped."""
            for number, parameter in enumerate(self.param_groups[0]["params"]):
                if number and where == "within":
                    fail()
                parameter -= parameter.grad

    weights, raises = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)], True
    optimizer = Fails(weights, lr=1.0)
    if where != "within":
        getattr(optimizer, f"register_step_{'pre' if where == 'before' else 'post'}_hook")(fail)
    with shoal.Optimizer(dht=dht, run_id="run", optimizer=optimizer, batch_size_per_step=1, **options) as swarm:
        for each in weights:
            each.grad = torch.full((1,), -1.0)
        with pytest.raises(error, match="now"):
            swarm.step()
        raises = False
        swarm.step()
        moved = {"before": [0.0, 0.0], "within": [1.0, 0.0], "after": [1.0, 1.0]}[where]
        assert [float(each.detach()) for each in weights] == moved
        held, seen = swarm.collaboration.training.pending.held, swarm.status()
        assert (held, seen.dropped) == ((0, 1) if where == "before" else (1, 0))


@pytest.mark.parametrize("options", [{"target_batch_size": 1}, {"strategy": LocalSGD(1 << 19)}])
@pytest.mark.parametrize("way", ["closure", "scaler", "scaler given"])
def test_an_interrupt_in_a_closure_or_below_a_scaler_counts_nothing_twice(
    dht: shoal.DHT, way: str, options: dict[str, Any]
) -> None:
    """A closure is called before anything is counted; a scaler's step is one of ours, and unscales once."""
    weight, raises = torch.nn.Parameter(torch.zeros(1)), [True]

    def fail(*_: object) -> None:
        if raises and raises.pop():
            raise KeyboardInterrupt

    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with shoal.Optimizer(dht=dht, run_id="run", optimizer=optimizer, batch_size_per_step=1, **options) as swarm:
        if way == "closure":
            calls: Callable[[], object] = partial(swarm.step, fail)
            weight.grad = torch.full((1,), -1.0)
        else:
            optimizer.register_step_pre_hook(fail)
            scaler.scale((-weight).sum()).backward()  # type: ignore[no-untyped-call]
            calls = partial(scaler.step, swarm) if way == "scaler" else partial(swarm.step, grad_scaler=scaler)
        with pytest.raises(KeyboardInterrupt):
            calls()
        assert float(weight.detach()) == 0.0
        assert swarm.collaboration.training.pending.held == 0
        calls()
        until(lambda: swarm.collaboration.phase is not RunPhase.AVERAGING)
        found = swarm.status()
        counted = found.contributed + found.dropped + swarm.collaboration.training.pending.held
        assert counted == 1
        assert float(weight.detach()) in (0.0, 1.0)


def test_an_interrupt_at_the_end_leaves_the_extra_tensors_of_the_run(
    dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch after it moved batch norm statistics, and these stayed: peers ended with different ones."""

    def interrupt() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    swarm = shoal.Optimizer(
        dht=dht,
        run_id="run",
        target_batch_size=TARGET,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        extra_tensors=list(model.buffers()),
    )
    swarm.announce_end(1)
    monkeypatch.setattr(swarm._chains, "stay_at_end", interrupt)
    model(torch.randn(TARGET, 3)).square().mean().backward()
    with pytest.raises(KeyboardInterrupt):
        swarm.step()
    kept = [buffer.clone() for buffer in model.buffers()]
    model(torch.randn(TARGET, 3)).square().mean().backward()
    swarm.step()
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), kept, strict=True))
    swarm.shutdown()


def test_gradients_from_before_a_downloaded_state_do_not_count(dht: shoal.DHT) -> None:
    """`load_state_from_peers()` between backward and `step()`: they counted as if computed on the new weights."""
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    swarm, _ = begin(dht, model, "run")
    train(swarm, model, 1)
    with shoal.DHT([dht.invite()], start=True) as there:
        newcomer, _ = begin(there, other, "run")
        other(torch.ones(4, 3)).square().mean().backward()
        assert newcomer.load_state_from_peers()
        newcomer.step()
        assert newcomer.local_progress.samples_accumulated == 0
        newcomer.shutdown()
    swarm.shutdown()


def test_a_state_that_one_peer_loads_in_the_middle_of_a_run_is_told(dht: shoal.DHT) -> None:
    """Which of the two states won was chance, and nothing was said."""
    models, warned = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)], list[str]()
    with shoal.DHT([dht.invite()], start=True) as there, ThreadPoolExecutor(2) as threads:
        there.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
        swarms = [begin(each, model, "run", 2 * TARGET)[0] for each, model in zip((dht, there), models, strict=True)]
        second = swarms[1]
        second.load_state_dict(copy.deepcopy(second.state_dict()))
        list(threads.map(train, swarms, models, (1, 1)))
        saved, weights = copy.deepcopy((second.state_dict(), models[1].state_dict()))
        second.load_state_dict(copy.deepcopy(saved))
        list(threads.map(train, swarms, models, (3, 3)))
        models[1].load_state_dict(weights)
        second.load_state_dict(saved)
        for swarm in swarms:
            swarm.shutdown()
    assert [message.partition(" in the place")[0] for message in warned if "load_state_dict" in message] == [
        "load_state_dict() at epoch 3 put a state of epoch 1"  # neither of the two loads before
    ]


@pytest.mark.parametrize("own_schedule", ["not loaded", "before", "after"])
def test_a_run_goes_on_from_its_checkpoint(dht: shoal.DHT, own_schedule: str) -> None:
    """Epoch, schedule and statistics: what comes is what would have come without a break, whatever is loaded first."""
    torch.manual_seed(0)
    model, resumed = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    swarm, schedule = begin(dht, model, "first")
    train(swarm, model, 3)
    saved = io.BytesIO()
    torch.save([model.state_dict(), swarm.state_dict(), schedule.state_dict()], saved)
    train(swarm, model, 5)
    swarm.shutdown()

    saved.seek(0)
    weights, optimizer, count = torch.load(saved, weights_only=True)
    resumed.load_state_dict(weights)
    again, schedule = begin(dht, resumed, "second")
    if own_schedule == "before":
        schedule.load_state_dict(count)
    again.load_state_dict(optimizer)
    if own_schedule == "after":
        schedule.load_state_dict(count)
    assert again.local_epoch == 3
    assert again.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    train(again, resumed, 5)
    assert again.param_groups[0]["lr"] == pytest.approx(0.1 / 32)
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    again.shutdown()


@pytest.mark.parametrize("kind", ["LinearLR", "StepLR"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_schedule_over_the_swarm_goes_on_from_the_last_merge(dht: shoal.DHT, kind: str, fragments: int) -> None:
    """A state was saved between two merges: the run goes on from the first one, the rates went on from the second."""
    strategy = shoal.strategies.Decoupled(10, fragments=fragments, quorum=1)

    def schedule(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
        if kind == "StepLR":
            return torch.optim.lr_scheduler.StepLR(optimizer, 12)
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 0.0, total_iters=40)

    def rates(way: str, saved: Any = None) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"scheduler": schedule(inner)} if way == "given" else {}
        run_id = f"{kind} {fragments} {way} {saved is None}"
        swarm = shoal.Optimizer(
            dht=dht,
            run_id=run_id,
            strategy=strategy,
            optimizer=inner,
            batch_size_per_step=TARGET,
            model=model,
            **options,
        )
        with swarm:
            kept = schedule(swarm) if way == "before" else None
            if saved is not None:
                swarm.load_state_dict(copy.deepcopy(saved))
            kept = schedule(swarm) if way == "after" else kept
            found = []
            for _ in range(18):
                swarm.zero_grad()
                model(torch.ones(TARGET, 3)).square().mean().backward()
                swarm.step()
                found.append(round(float(inner.param_groups[0]["lr"]), 6))
            assert (kept is None) == (way == "given")
            return found, swarm.state_dict()

    wanted, _ = rates("given", rates("given")[1])
    assert wanted[0] > wanted[-1]
    _, saved = rates("before")
    for way in ("before", "after"):
        assert rates(way, saved)[0] == wanted, way


def test_a_later_end_that_is_announced_at_the_end_holds_at_once(dht: shoal.DHT) -> None:
    """`finished` was true for some milliseconds more: a loop that began anew ended."""
    model = torch.nn.Linear(3, 2)
    swarm, _ = begin(dht, model, "run")
    swarm.announce_end(1)
    train(swarm, model, 1)
    until(lambda: swarm.finished)
    for end in (3, None):
        swarm.announce_end(end)
        assert not swarm.finished
    swarm.shutdown()


def test_a_peer_that_comes_back_after_the_end_is_not_told_of_it_before_its_own_word(dht: shoal.DHT) -> None:
    """Programs load their checkpoint, and announce the end then. Others had announced it meanwhile, which was told."""
    warned: list[str] = []
    with shoal.DHT([dht.invite()], start=True) as second:
        second.events.subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)
        model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        one, _ = begin(dht, model, "run")
        train(one, model, 2)
        one.announce_end(one.local_epoch)
        two, _ = begin(second, other, "run")
        other.load_state_dict(model.state_dict())
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        until(lambda: two._chains.at_end)
        two.announce_end(two.local_epoch)
        until(lambda: two.finished)
        two.shutdown()
        one.shutdown()
    assert not warned


def test_a_checkpoint_of_plain_torch_is_better_than_a_beginning(dht: shoal.DHT) -> None:
    """It has no epoch, but its optimizer has taken steps; and it can be loaded by plain torch again."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(4, 3)).square().mean().backward()
        plain.step()
    swarm, _ = begin(dht, model, "run")
    before = swarm.collaboration.state
    swarm.load_state_dict(plain.state_dict())
    after = swarm.collaboration.state
    assert (after.epoch, after.samples) == (0, 5)
    assert after.key > before.key
    plain.load_state_dict(swarm.state_dict())
    for wrong in ({}, {"epoch": 3}, {"epoch": -1, "digest": "00" * 32, "samples": 0, "scheduled": 0}):
        with pytest.raises(shoal.errors.ConfigError, match=r"state_dict\['shoal'\] is not what"):
            swarm.load_state_dict({**plain.state_dict(), "shoal": wrong})
    swarm.shutdown()


def test_nothing_is_loaded_between_eval_and_train(dht: shoal.DHT) -> None:
    """`train` would put back the weights before, and the checkpoint's would be lost without a word."""
    model = torch.nn.Linear(3, 2)
    inner = pytorch_optimizer.ScheduleFreeAdamW(model.parameters(), lr=0.1)
    swarm = shoal.Optimizer(
        dht=dht, run_id="run", target_batch_size=TARGET, batch_size_per_step=TARGET, optimizer=inner
    )
    train(swarm, model, 3)
    saved = copy.deepcopy((model.state_dict(), swarm.state_dict()))
    train(swarm, model, 5)
    swarm.eval()
    with pytest.raises(shoal.errors.ConfigError, match=r"call train\(\) of the shoal\.Optimizer, then load"):
        swarm.load_state_dict(saved[1])
    swarm.train()
    model.load_state_dict(saved[0])
    swarm.load_state_dict(saved[1])
    assert swarm.local_epoch == 3
    assert torch.equal(model.weight, saved[0]["weight"])
    swarm.shutdown()


def test_one_thread_steps_at_a_time(dht: shoal.DHT) -> None:
    """A second one is told so, and the first one goes on."""
    model = torch.nn.Linear(3, 2)
    swarm, _ = begin(dht, model, "run")
    said: list[BaseException] = []

    def second() -> None:
        try:
            swarm.step()
        except shoal.errors.LocalError as error:
            said.append(error)

    def closure() -> float:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return float(loss.detach())

    assert swarm.step(closure) is not None
    assert "another step() is running" in str(said[0])
    assert swarm.local_epoch == 1
    swarm.shutdown()


def test_a_state_that_was_loaded_during_a_step_broke_that_step(dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread had forgotten the average that the step was about to be taken from: a bare `AssertionError`."""
    model = torch.nn.Linear(3, 2)
    swarm, _ = begin(dht, model, "run")
    said: list[str] = []
    run = swarm._chains._run  # no other way into the middle of a step

    def load() -> None:
        try:
            swarm.load_state_dict(swarm.state_dict())
        except shoal.errors.LocalError as error:
            said.append(str(error))

    def run_then_load(work: Any, timeout_s: float) -> Any:
        phase = run(work, timeout_s)
        if phase is RunPhase.STEPPING:
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
        return phase

    monkeypatch.setattr(swarm._chains, "_run", run_then_load)
    model(torch.ones(4, 3)).square().mean().backward()
    swarm.step()
    assert swarm.local_epoch == 1
    assert said == ["load_state_dict() is called while step() is running: call it between two steps"]
    monkeypatch.undo()
    swarm.load_state_dict(swarm.state_dict())
    train(swarm, model, 2)
    swarm.shutdown()


def test_a_newcomer_beside_a_lossy_load_state_compression(dht: shoal.DHT) -> None:
    """It went on with rounded weights and statistics under the donor's name, and differed for ever."""
    models = [torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)]
    told: list[str] = []
    dht.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    options: dict[str, Any] = {"run_id": "lossy", "target_batch_size": TARGET, "batch_size_per_step": TARGET}
    options |= {"optimizer": partial(torch.optim.AdamW, lr=0.1), "load_state_compression": Float16Compression()}
    with shoal.Optimizer(dht=dht, params=models[0].parameters(), **options) as donor:
        train(donor, models[0], 3)
        with (
            shoal.DHT(initial_peers=dht.get_visible_maddrs(), start=True) as other,
            shoal.Optimizer(dht=other, params=models[1].parameters(), **options) as newcomer,
        ):
            assert newcomer.load_state_from_peers()
            assert newcomer.local_epoch == 3
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    for kept, taken in zip(donor.state.values(), newcomer.state.values(), strict=True):
        assert torch.equal(kept["exp_avg"], taken["exp_avg"])
    assert [message for message in told if "load_state_compression" in message]


def in_turn(swarm: shoal.Optimizer, model: torch.nn.Linear, epoch: int) -> None:
    """Until there; one batch for each epoch, so that each peer takes each step."""
    while (before := swarm.local_epoch) < epoch:
        model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
        while swarm.local_epoch == before:
            swarm.step()
            swarm.zero_grad()


@pytest.mark.parametrize(("name", "options"), [("Ranger21", {"num_iterations": 100}), ("StableSPAM", {})])
def test_a_newcomer_to_an_optimizer_that_counts_in_attributes_steps_otherwise(
    dht: shoal.DHT, name: str, options: dict[str, Any]
) -> None:
    """Its counts began at 0, with a warning at the donor."""
    kind = getattr(pytest.importorskip("pytorch_optimizer"), name)
    models = [torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)]
    told: list[str] = []
    dht.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    run: dict[str, Any] = {"run_id": name, "target_batch_size": 2 * TARGET, "batch_size_per_step": TARGET}
    run["optimizer"] = partial(kind, **options)
    with shoal.Optimizer(dht=dht, params=models[0].parameters(), **run) as donor:
        train(donor, models[0], 8)
        with (
            shoal.DHT(initial_peers=dht.get_visible_maddrs(), start=True) as other,
            shoal.Optimizer(dht=other, params=models[1].parameters(), **run) as newcomer,
            ThreadPoolExecutor(2) as threads,
        ):
            assert newcomer.load_state_from_peers()
            steps: list[int] = []
            newcomer.collaboration.training.optimizer.register_step_post_hook(lambda *_: steps.append(1))
            list(threads.map(in_turn, (donor, newcomer), models, (11, 11)))
    assert sum(steps) == 3
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert not [message for message in told if "depend on more" in message]


def test_load_state_dict_of_an_unchanged_state_keeps_its_name(dht: shoal.DHT) -> None:
    """As Accelerate loads it when it wraps the optimizer: peers at one state stay at one state."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    swarm, _ = begin(dht, model, "run")
    for epoch in (0, 3):
        train(swarm, model, epoch)
        before = swarm.collaboration.state
        swarm.load_state_dict(swarm.state_dict())
        assert swarm.collaboration.state == before
    saved, rate = swarm.state_dict(), swarm.param_groups[0]["lr"]
    swarm.param_groups[0]["lr"] = 2 * rate
    changed = swarm.state_dict()
    swarm.param_groups[0]["lr"] = rate
    swarm.load_state_dict({**changed, "shoal": saved["shoal"]})
    assert swarm.collaboration.state != before
    swarm.shutdown()


@pytest.mark.parametrize("weights", ["left out", "keys of a compiled model", "without 'shoal'"])
def test_a_state_is_not_loaded_over_weights_that_it_was_not_saved_with(dht: shoal.DHT, weights: str) -> None:
    """A peer that missed its weights made all others take random ones: its state had more samples than theirs."""
    torch.manual_seed(0)
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first, _ = begin(dht, model, "first")
    train(first, model, 3)
    saved = copy.deepcopy(first.state_dict())
    first.shutdown()
    second, _ = begin(dht, other, "second")
    before = second.collaboration.state
    if weights == "without 'shoal'":
        del saved["shoal"]
        second.load_state_dict(saved)
        assert second.local_epoch == 0
    else:
        if weights == "keys of a compiled model":
            other.load_state_dict(
                {f"_orig_mod.{name}": each for name, each in model.state_dict().items()}, strict=False
            )
        with pytest.raises(shoal.errors.ConfigError, match="saved with other weights than the model has now"):
            second.load_state_dict(saved)
        assert second.collaboration.state == before
        other.load_state_dict(model.state_dict())
        second.load_state_dict(saved)
        assert second.local_epoch == 3
    second.shutdown()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda saved: saved["param_groups"][0].update(eps=1 << 60), "whole numbers up to 2\\^53"),
        (lambda saved: saved["shoal"].update(scheduled=1 << 70), "is not what state_dict\\(\\) gave"),
    ],
)
def test_load_state_dict_raises_and_has_loaded(
    dht: shoal.DHT, damage: Callable[[dict[str, Any]], None], what: str
) -> None:
    """The fingerprint of what was loaded could not be computed: options, statistics and epoch were others by then."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    first, _ = begin(dht, model, "first")
    train(first, model, 3)
    saved = copy.deepcopy(first.state_dict())
    first.shutdown()
    damage(saved)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    swarm = shoal.Optimizer(dht=dht, run_id="second", target_batch_size=TARGET, batch_size_per_step=4, optimizer=inner)
    before = swarm.state_dict()
    with pytest.raises(shoal.errors.ConfigError, match=what):
        swarm.load_state_dict(saved)
    assert swarm.state_dict() == before
    assert swarm.local_epoch == 0
    swarm.shutdown()


def test_step_without_any_gradient_advances_no_epoch_and_is_told(dht: shoal.DHT) -> None:
    """So are gradients that are not cleared; each once."""
    told: list[str] = []
    dht.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    model = torch.nn.Linear(3, 2)
    swarm, _ = begin(dht, model, "run")
    for _ in range(3):
        swarm.step()
    assert swarm.local_epoch == 0
    for _ in range(3):
        model(torch.ones(4, 3)).square().mean().backward()
        swarm.step()
    assert swarm.local_epoch == 3
    assert sum("no parameter has a gradient" in each for each in told) == 1
    assert sum("batches are counted twice" in each for each in told) == 1
    swarm.shutdown()


def test_a_peer_that_leaves_within_a_round_warned_of_a_closed_error(dht: shoal.DHT) -> None:
    """As `leave_on_sigterm` lets it: its next step raises it, and that is how the loop ends."""
    heard: list[str] = []
    dht.events.subscribe(lambda event: heard.append(event.message) if isinstance(event, Warned) else None)
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.Optimizer(
        dht=dht, run_id="leaves", target_batch_size=4, batch_size_per_step=4, optimizer=inner
    ) as swarm:

        async def leave() -> None:
            swarm.collaboration._fail(ClosedError("the averager was shut down"))

        dht.loop_thread.run(leave(), 5.0)
        with pytest.raises(ClosedError, match="the averager was shut down"):
            swarm.step()
    assert not [message for message in heard if "ClosedError" in message]


def test_an_auxiliary_peer_is_not_told_to_call_backward(dht: shoal.DHT) -> None:
    """It has no batches."""
    told: list[str] = []
    dht.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.Optimizer(
        dht=dht, run_id="run", target_batch_size=TARGET, optimizer=inner, auxiliary=True, averaging_timeout=2.0
    ) as swarm:
        swarm.step()
    assert not told


def test_a_tensor_that_was_replaced_in_the_model_is_told(dht: shoal.DHT) -> None:
    """The peer would go on with a model that stands still."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    swarm = shoal.Optimizer(
        dht=dht, run_id="run", target_batch_size=4, batch_size_per_step=4, optimizer=inner, model=model
    )
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(shoal.errors.ConfigError, match=r"parameter 0\.weight of the model was replaced"):
        swarm.step()
    swarm.shutdown()


def test_why_a_better_state_is_not_taken_over_is_told_once(dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told after each download that did not fit."""

    def misfit(values: Any, tensors: Any) -> None:
        raise shoal.errors.StateUnavailable("the state does not fit here")

    models, told = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)], list[str]()
    options: dict[str, Any] = {"run_id": "misfit", "target_batch_size": TARGET, "batch_size_per_step": TARGET}
    options |= {"optimizer": partial(torch.optim.AdamW, lr=0.1), "load_state_timeout": 1.0}
    with (
        shoal.Optimizer(dht=dht, params=models[0].parameters(), **options) as donor,
        shoal.DHT(initial_peers=dht.get_visible_maddrs(), start=True) as other,
    ):
        train(donor, models[0], 2)
        other.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
        with shoal.Optimizer(dht=other, params=models[1].parameters(), **options) as newcomer:
            monkeypatch.setattr(newcomer._training, "prepare", misfit)
            for _ in range(6):
                models[1](torch.ones(4, 3)).square().mean().backward()
                newcomer.step()
                newcomer.zero_grad()
            assert sum(each.startswith("the state does not fit here") for each in told) == 1, told
            assert sum("no peer gives it now (the state does not fit here" in each for each in told) == 1, told


def test_averaged_weights_were_saved_under_the_name_of_the_state(dht: shoal.DHT, tmp_path: Path) -> None:
    """A checkpoint is refused while they are in place; a state dict of them is not that of the state."""
    model = torch.nn.Linear(3, 1)
    swarm, _ = begin(dht, model, "averaged")
    train(swarm, model, 2)
    true = copy.deepcopy(model.state_dict())
    for each in model.parameters():
        each.data.add_(1.0)
    with pytest.raises(LocalError, match="put those back first"):
        swarm.save(tmp_path)
    other, named = copy.deepcopy(model.state_dict()), copy.deepcopy(swarm.state_dict())
    model.load_state_dict(true)
    assert swarm.save(tmp_path).is_dir()
    right, state = copy.deepcopy(swarm.state_dict()), swarm.collaboration.state
    model.load_state_dict(other)
    swarm.load_state_dict(named)
    assert swarm.collaboration.state.epoch == 2
    assert swarm.collaboration.state.digest != state.digest
    model.load_state_dict(true)
    swarm.load_state_dict(right)
    assert swarm.collaboration.state == state
    swarm.shutdown()


def test_first_weights_that_came_after_the_optimizer_had_the_name_of_those_before(dht: shoal.DHT) -> None:
    """A run begins with what the model holds at the first step, and nobody is warned."""
    told = list[str]()
    dht.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    model = torch.nn.Linear(3, 1)
    swarm, _ = begin(dht, model, "first", target=100)
    before = swarm.collaboration.state
    with torch.no_grad():
        model.weight.fill_(0.5)
    for _ in range(2):
        model(torch.ones(TARGET, 3)).square().mean().backward()
        swarm.step()
        swarm.zero_grad()
    assert swarm.collaboration.state != before
    assert swarm.collaboration.training.pending.samples == 2 * TARGET
    assert not [each for each in told if "changed between" in each]
    swarm.shutdown()


@pytest.mark.parametrize("end", [2, 3], ids=["the end", "on the way"])
def test_who_lacks_a_quorum_did_not_look_for_the_end_of_the_run(dht: shoal.DHT, tmp_path: Path, end: int) -> None:
    """The others have ended it, and told nobody whom they had given up. A state on the way is no end."""
    models, told = [torch.nn.Linear(3, 1) for _ in range(2)], list[str]()
    models[1].load_state_dict(models[0].state_dict())
    folder = tmp_path / "its"
    options: dict[str, Any] = {"run_id": "lacks", "target_batch_size": TARGET, "batch_size_per_step": TARGET}
    ended = shoal.Optimizer(dht=dht, optimizer=torch.optim.SGD(models[0].parameters(), lr=0.1), **options)
    train(ended, models[0], 2)
    state = ended.collaboration.state
    with shoal.DHT(start=True) as other:
        late = shoal.Optimizer(
            dht=other, optimizer=torch.optim.SGD(models[1].parameters(), lr=0.1), checkpoint=folder, **options
        )
        ended.save(folder)
        late.announce_end(end)
        late._chains.first.solitude.untold = partial(told.append, "lacks")
        models[1](torch.ones(TARGET, 3)).square().mean().backward()
        late.step()
        assert (late.collaboration.state == state) == (end == 2)
        assert told == ([] if end == 2 else ["lacks"])
        late.shutdown()
    ended.shutdown()


def test_a_few_first_weights_that_were_written_had_the_name_of_those_before(dht: shoal.DHT) -> None:
    """Nobody looks at each value: the run went on with unequal weights until the first check."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 200) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    swarm, _ = begin(dht, models[0], "few", target=100)
    before = swarm.collaboration.state
    for model in models:
        with torch.no_grad():
            model.weight[0, 0] = 0.5
    models[0](torch.ones(TARGET, 3)).square().mean().backward()
    swarm.step()
    state = swarm.collaboration.state
    assert state != before
    swarm.shutdown()
    like, _ = begin(dht, models[1], "few", target=100)
    assert like.collaboration.state == state
    like.shutdown()


@pytest.mark.parametrize(
    "options", [{"strategy": LocalSGD(3)}, {"strategy": Decoupled(3, fragments=2)}, {"use_local_updates": True}]
)
def test_a_file_that_is_loaded_into_the_model_of_one_peer_was_merged(dht: shoal.DHT, options: dict[str, Any]) -> None:
    """Its weights are no training: this peer takes over the state of the others. They moved all peers' weights."""
    models, told = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)], list[str]()
    chosen = {"run_id": "run", "batch_size_per_step": TARGET, **options}
    if "strategy" not in options:
        chosen["target_batch_size"] = 6 * TARGET
    with shoal.DHT([dht.invite()], start=True) as there, ThreadPoolExecutor(2) as threads:
        there.events.subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
        swarms = [
            shoal.Optimizer(dht=each, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-9), **chosen)
            for each, model in zip((dht, there), models, strict=True)
        ]
        until(lambda: all(len(swarm.status().peers) == 2 for swarm in swarms))
        list(threads.map(train, swarms, models, (2, 2)))
        saved = {name: value + 100.0 for name, value in models[1].state_dict().items()}
        before, kept = models[0].weight.detach().clone(), models[1].state_dict()
        kept = {name: value.clone() for name, value in kept.items()}
        models[1].load_state_dict(saved)  # for an evaluation
        models[1].load_state_dict(kept)
        list(threads.map(train, swarms, models, (4, 4)))
        assert not told
        models[1].load_state_dict(saved)
        list(threads.map(train, swarms, models, (7, 7)))
        assert all(torch.allclose(model.weight, before, atol=1e-3) for model in models)
        assert len([each for each in told if "weights were loaded into the model at epoch" in each]) == 1
        for swarm in swarms:
            swarm.shutdown()


def test_a_file_that_is_loaded_into_the_model_of_a_peer_alone_is_its_state(dht: shoal.DHT) -> None:
    """It trains on from these weights, also with an outer optimizer of momentum: that took them for a large step."""
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1e-9)
    with shoal.Optimizer(
        dht=dht, run_id="run", model=model, batch_size_per_step=4, optimizer=inner, strategy=DiLoCo(3)
    ) as swarm:
        train(swarm, model, 2)
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        train(swarm, model, 5)
        assert torch.allclose(model.weight, torch.ones(2, 3), atol=1e-5)
        assert copy.deepcopy(model).load_state_dict(model.state_dict())
    assert not model._load_state_dict_post_hooks
