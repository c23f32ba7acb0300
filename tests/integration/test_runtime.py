"""The synchronous face: signals, threads, forks, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.base.peer import PeerID
from shoal.base.pool import DaemonPool
from shoal.compression import CompressionInfo, TensorRole
from shoal.errors import ClosedError, ConfigError, LocalError, PeerUnreachable, ShoalError
from shoal.events import Event, GroupFormed, PeerConnected, PeerDropped, PeerLost, Warned
from shoal.protocol.wire import FollowSteps
from shoal.run.decide.phases import RunPhase
from shoal.runtime.low_latency import SWITCH_INTERVAL_S
from shoal.runtime.thread import LoopThread
from shoal.transport.layers import Scratch
from tests.integration import scripts
from tests.integration.workers import LONG_S, Worker, nobody, run_python, until

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)


def in_thread(work: Callable[[], Any]) -> Any:
    """Run it in a thread of its own, to the end; returns what it returns, raises what it raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:  # noqa: BLE001 (raised in the other thread)
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG_S)
    ((result, error),) = found
    if error is not None:
        raise error
    return result


async def nothing() -> None:
    """Nothing is left to be done."""


@contextmanager
def two_peers(**options: Any) -> Iterator[tuple[shoal.DHT, shoal.DHT]]:
    """Two peers in this process that know each other."""
    with shoal.DHT(start=True, **options) as first, shoal.DHT([first.invite()], start=True, **options) as second:
        yield first, second


def averager(dht: shoal.DHT, tensor: torch.Tensor, **options: Any) -> shoal.DecentralizedAverager:
    """One for a single tensor."""
    return shoal.DecentralizedAverager([tensor], dht, start=True, **{"prefix": "p", **options})


def optimizer(dht: shoal.DHT, model: torch.nn.Module, **options: Any) -> shoal.Optimizer:
    """One with Adam, that has statistics."""
    return shoal.Optimizer(
        **{
            "dht": dht,
            "run_id": "run",
            "target_batch_size": 16,
            "batch_size_per_step": 8,
            "params": model.parameters(),
            "optimizer": torch.optim.Adam,
            **options,
        }
    )


def small_run(dht: shoal.DHT, model: torch.nn.Module) -> dict[str, Any]:
    """The optimizer's arguments for the run of the script `train`."""
    return {
        "dht": dht,
        "run_id": "small",
        "target_batch_size": 1024,
        "batch_size_per_step": 8,
        "params": model.parameters(),
        "optimizer": partial(torch.optim.SGD, lr=0.01),
    }


def looking(averager: shoal.DecentralizedAverager) -> bool:
    """Whether it looks for a group now."""
    return averager._core().looking


def open_files() -> dict[str, str]:
    """What each descriptor of this process leads to."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            found[link.name] = str(link.readlink())
    return found


# ---------------------------------------------------------------------------------------- nothing of the user's changes


def test_ctrl_c_stays_the_users() -> None:
    """Creating every object, stepping and shutting down leaves all signal handlers as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    with shoal.DHT(start=True) as dht, averager(dht, torch.ones(3)) as first, optimizer(dht, torch.nn.Linear(2, 1)):
        assert {number: signal.getsignal(number) for number in SIGNALS} == before
        with pytest.raises(shoal.RoundFailed):
            first.step(timeout=0.2)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert signal.set_wakeup_fd(wakeup) == -1


def test_ctrl_c_interrupts_a_step_that_waits() -> None:
    """KeyboardInterrupt comes out of step() at once, the search ends, and the next step is possible."""
    with two_peers() as (first, second):
        mine, other = torch.zeros(4), torch.ones(4)
        one, two = averager(first, mine), averager(second, other)

        def interrupt() -> None:
            until(lambda: looking(one))
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            one.step(timeout=LONG_S)
        thread.join(LONG_S)
        until(lambda: not looking(one))
        assert mine.tolist() == [0, 0, 0, 0]
        coming = two.step(timeout=LONG_S, wait=False)
        one.step(timeout=LONG_S)
        coming.result(LONG_S)
        assert mine.tolist() == other.tolist() == [0.5] * 4


def test_ctrl_c_interrupts_a_training_step_that_waits() -> None:
    """An optimizer's step waits for a peer that is frozen: Ctrl+C ends the wait, and training can go on."""
    with shoal.DHT(start=True) as dht, Worker() as worker:
        worker.start("train", initial_peers=[str(dht.invite())], epochs=10**6, seed=1)
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        with shoal.Optimizer(**small_run(dht, model), matchmaking_time=60.0) as swarm:

            def train(over: Callable[[], bool]) -> None:
                while not over():
                    model(torch.ones(8, 8)).square().mean().backward()
                    swarm.step()
                    swarm.zero_grad()

            def averages() -> bool:
                return swarm.collaboration.phase is RunPhase.AVERAGING

            def waits() -> bool:
                """Whether a step goes on without the other peer for longer than a round that goes well."""
                until(averages)
                worker.signal(signal.SIGSTOP)
                for _ in range(30):
                    if not averages():  # the other one had done its part, or is not counted on
                        worker.signal(signal.SIGCONT)
                        return False
                    threading.Event().wait(0.01)
                return True

            def interrupt() -> None:
                until(waits)
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                train(lambda: False)
            assert averages(), "the step had ended by itself"
            thread.join(LONG_S)
            worker.signal(signal.SIGKILL)
            reached = swarm.local_epoch
            train(lambda: swarm.local_epoch >= reached + 2)


def test_creating_an_optimizer_changes_nothing() -> None:
    """No parameter, no gradient, no statistic, no random state, no default is touched before the first step."""
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), torch.get_default_dtype()
    with (
        shoal.DHT(start=True) as dht,
        optimizer(dht, model, params=None, optimizer=inner),
        averager(dht, torch.ones(3)),
    ):
        assert all(torch.equal(mine, before) for mine, before in zip(model.parameters(), parameters, strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not inner.state
        assert inner.param_groups[0]["lr"] == 0.1
    after = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), torch.get_default_dtype()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]


def test_tensor_work_leaves_the_users_threads_alone() -> None:
    """Averaging before the program's first own tensor work does not make torch single-threaded for the program."""
    done = run_python(
        """
import shoal, threading, torch

def fresh():
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start(), thread.join()

counts = []
fresh()  # decides nothing for others
with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], start=True) as second:
    one = shoal.DecentralizedAverager([torch.ones(9)], first, start=True, prefix="p")
    two = shoal.DecentralizedAverager([torch.ones(9)], second, start=True, prefix="p")
    coming = one.step(timeout=60, wait=False)
    two.step(timeout=60), coming.result(60)
counts.append(torch.get_num_threads())
fresh()
print(*counts)
""",
        OMP_NUM_THREADS="3",
    )
    assert done.stderr == ""
    before, main, fresh = map(int, done.stdout.split())
    if before == 1:
        pytest.skip("torch uses one thread on this machine")
    assert (main, fresh) == (before, before)


def test_the_programs_threads_give_way_sooner_while_a_round_goes_on() -> None:
    """Shoal's thread asks for the interpreter after 0.1 ms; before, and afterwards, after what the program wants."""
    usual, seen = sys.getswitchinterval(), []
    with two_peers() as (first, second):

        def note(event: Event) -> None:
            if isinstance(event, GroupFormed):
                seen.append(sys.getswitchinterval())

        first.events.subscribe(note)
        one, two = averager(first, torch.zeros(4)), averager(second, torch.ones(4))
        assert sys.getswitchinterval() == usual
        coming = one.step(timeout=LONG_S, wait=False)
        two.step(timeout=LONG_S)
        coming.result(LONG_S)
        assert seen == [pytest.approx(SWITCH_INTERVAL_S)]
        until(lambda: sys.getswitchinterval() == usual)
        assert two.load_state_from_peers(timeout=LONG_S) is not None
        until(lambda: sys.getswitchinterval() == usual)


def test_a_name_server_that_does_not_answer_holds_up_no_tensor_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name lookups have threads of their own: whoever names such hosts makes nobody look silent in a round."""
    answers, asked = threading.Event(), asyncio.Event()
    thread = LoopThread("test")

    def lookup(*args: Any, **kwargs: Any) -> Any:
        thread.call_soon(asked.set)
        answers.wait(LONG_S)
        raise OSError("no such host")

    monkeypatch.setattr("socket.getaddrinfo", lookup)

    async def work() -> str:
        loop = asyncio.get_running_loop()
        lookups = [loop.create_task(loop.getaddrinfo("nowhere.example", 1)) for _ in range(4)]
        await asked.wait()
        done = await thread.executor.run(lambda: "done")
        for each in lookups:
            each.cancel()
        return done

    try:
        assert thread.run(work(), LONG_S) == "done"
        assert not answers.is_set()
    finally:
        answers.set()
        thread.stop(nothing, 1.0)


def test_threads_that_take_one_core_at_once_leave_the_users_alone() -> None:
    """None of them takes another's one core for what the user wants."""
    done = run_python(
        """
import threading, torch
from shoal.base.pool import use_cores

def together():
    barrier.wait(60)
    use_cores(1)

torch.set_num_threads(3)
for _ in range(200):
    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=together) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
counts = []
thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
thread.start(), thread.join()
print(*counts)
"""
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_any_thread() -> None:
    """Objects are made, stepped and shut down in different threads, none of them the main thread."""
    first = in_thread(lambda: shoal.DHT(start=True))
    second = in_thread(lambda: shoal.DHT([first.invite()], start=True))
    tensors = [torch.zeros(4), torch.ones(4)]
    averagers = [in_thread(partial(averager, *pair)) for pair in zip((first, second), tensors, strict=True)]
    coming = in_thread(lambda: averagers[0].step(timeout=LONG_S, wait=False))
    in_thread(lambda: averagers[1].step(timeout=LONG_S))
    in_thread(lambda: coming.result(LONG_S))
    assert tensors[0].tolist() == tensors[1].tolist() == [0.5] * 4
    swarm = in_thread(lambda: optimizer(first, torch.nn.Linear(2, 1)))
    in_thread(swarm.step)
    in_thread(swarm.shutdown)
    in_thread(second.shutdown)
    in_thread(first.shutdown)
    assert not first.is_alive()


def test_many_threads_and_a_shutdown_among_them() -> None:
    """Calls from many threads end with a result, or with ClosedError once the DHT is shut down; none hangs."""
    ends: list[type[BaseException] | None] = []
    with two_peers() as (first, second):
        started = threading.Barrier(9)

        def work(number: int) -> None:
            started.wait(LONG_S)
            try:
                while True:
                    second.store(f"key{number}", number, time.time() + 60)
                    first.get(f"key{number}", latest=True)
            except ShoalError as error:
                ends.append(type(error))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        started.wait(LONG_S)
        until(lambda: second.get("key0", latest=True))
        second.shutdown()
        first.shutdown()
        for thread in threads:
            thread.join(LONG_S)
    assert ends == [ClosedError] * 8


# --------------------------------------------------------------------------------------------------- shoal's own thread


def test_waiting_in_the_loop_thread_is_refused() -> None:
    """`.result()` and blocking calls in shoal's own thread raise LocalError instead of waiting for themselves."""
    caught: list[BaseException] = []
    with two_peers() as (first, second), averager(first, torch.ones(2)) as one:

        def attempt(*attempts: Callable[[], object]) -> None:
            for attempted in attempts:
                try:
                    attempted()
                except ShoalError as error:
                    caught.append(error)

        def callback(_: object) -> None:
            attempt(
                lambda: first.get("key"),
                lambda: first.get("key", return_future=True).result(),
                lambda: first.get("key", return_future=True).exception(1.0),
                one.step,
                lambda: one.step(wait=False).result(),
                lambda: optimizer(first, torch.nn.Linear(2, 1)),
            )

        second.store("key", 1, time.time() + 60)
        added = threading.Event()
        first.loop_thread.call_soon(lambda: added.wait(LONG_S))  # a future that is done calls back in this thread
        first.get("key", return_future=True).add_done_callback(callback)
        added.set()
        until(lambda: len(caught) == 6)
    assert [type(error) for error in caught] == [LocalError] * 6


def test_future_can_be_cancelled() -> None:
    """Cancelling the future of a step gives the step up."""
    with shoal.DHT(start=True) as dht, averager(dht, torch.ones(2)) as one:
        coming = one.step(timeout=LONG_S, wait=False)
        until(lambda: looking(one))
        assert coming.cancel()
        until(lambda: not looking(one))
        with pytest.raises(shoal.RoundFailed):
            one.step(timeout=0.2)


def test_call_that_the_loop_never_answers_has_an_end() -> None:
    """A subscriber that blocks shoal's thread costs the caller a LocalError that says so, not for ever."""
    release = threading.Event()
    thread = LoopThread("blocked")

    try:
        thread.call_soon(lambda: release.wait(LONG_S))
        with pytest.raises(LocalError, match="block"):
            thread.run(nothing(), 0.1)
    finally:
        release.set()
        thread.stop(nothing, 1.0)
    assert not thread.alive


def test_held_tensors_are_not_waited_for_in_a_circle() -> None:
    """Within get_tensors() a second get_tensors() or a blocking step() would wait for itself: refused."""
    with shoal.DHT(start=True) as dht, averager(dht, torch.ones(2)) as one:
        with one.get_tensors(), pytest.raises(LocalError, match="get_tensors"):
            one.get_tensors().__enter__()
        with one.get_tensors(), pytest.raises(LocalError, match="get_tensors"):
            one.step(timeout=1)
        with one.get_tensors() as tensors:  # free again
            assert len(tensors) == 1


def test_tensors_are_free_while_a_step_looks_for_a_group() -> None:
    """The lock is never held while others are waited for."""
    with shoal.DHT(start=True) as dht, averager(dht, torch.ones(2)) as one:
        coming = one.step(timeout=LONG_S, wait=False)
        until(lambda: looking(one))
        with one.get_tensors() as tensors:
            tensors[0] += 1
        assert not coming.done()
        coming.cancel()


def test_shared_state_may_be_read_under_the_lock() -> None:
    """`get_current_state` is overridden, and uses `get_tensors` as one would anywhere else."""

    class Mine(shoal.DecentralizedAverager):
        def get_current_state(self) -> Any:
            with self.get_tensors() as tensors:
                return {"epoch": 7}, [tensors[0] + 1], None

    with two_peers() as (first, second), Mine([torch.ones(3)], first, start=True, prefix="p"):
        other = averager(second, torch.zeros(3))
        found = until(lambda: other.load_state_from_peers(timeout=10))
    metadata, tensors = found
    assert metadata == {"epoch": 7}
    assert tensors[0].tolist() == [2, 2, 2]


def test_shared_state_is_a_present_one() -> None:
    """Newcomers get what `get_current_state` says now, also when no tensor has changed under the lock."""
    calls = iter(range(10**6))

    class Mine(shoal.DecentralizedAverager):
        def get_current_state(self) -> Any:
            with self.get_tensors() as tensors:
                return next(calls), tensors, None

    with two_peers() as (first, second), Mine([torch.ones(3)], first, start=True, prefix="p"):
        other = averager(second, torch.zeros(3))
        until(lambda: (other.load_state_from_peers(timeout=10) or (0, None))[0] >= 2)


def test_infinities_are_for_tensors_beside_the_averaged_ones() -> None:
    """A mask in `get_current_state` arrives; as soon as an averaged tensor is infinite, nobody gets the state."""

    class Mine(shoal.DecentralizedAverager):
        def get_current_state(self) -> Any:
            with self.get_tensors() as tensors:
                return None, [*tensors, torch.full((3, 3), float("-inf")).triu(1)], None

    with two_peers() as (first, second), Mine([torch.ones(3)], first, start=True, prefix="p") as donor:
        other = averager(second, torch.zeros(3), allow_state_sharing=False)
        _, tensors = until(lambda: other.load_state_from_peers(timeout=10))
        assert tensors[1].tolist() == torch.full((3, 3), float("-inf")).triu(1).tolist()
        warned = threading.Event()
        first.events.subscribe(lambda event: warned.set() if isinstance(event, Warned) else None)
        with donor.get_tensors() as held:
            held[0][1] = float("inf")
        assert other.load_state_from_peers(timeout=10) is None
        assert warned.wait(LONG_S)


@pytest.mark.parametrize(("low", "high"), [(-7.5, -7.25), (0.25, 0.5), (2.0**64, 1e300)])
def test_any_finite_priority_orders_donors(low: float, high: float) -> None:
    """Below zero, broken, beyond 64 bits: the donor with the higher one gives the state, and nobody lied."""
    with two_peers() as (first, second), shoal.DHT([first.invite()], start=True) as third:
        donors = [averager(first, torch.full((3,), 1.0)), averager(second, torch.full((3,), 2.0))]
        seen: list[Event] = []
        third.events.subscribe(seen.append)
        receiver = averager(third, torch.zeros(3), allow_state_sharing=False)
        for donor, priority in zip(donors, (low, high), strict=True):
            donor.state_sharing_priority = priority
            assert donor.state_sharing_priority == priority

        def declared() -> set[float]:
            found = third.get("p.all_averagers", latest=True)
            return {entry.value[1] for entry in found.value.values()} if found else set()

        until(lambda: declared() == {low, high})
        state = receiver.load_state_from_peers(timeout=10)
        assert state is not None
        assert state[1][0].tolist() == [2.0] * 3
        assert not [event for event in seen if isinstance(event, PeerDropped)]


def test_shutdown_in_mid_round_leaves_the_tensors_alone() -> None:
    """The step ends with ClosedError; the other member is untouched or has an average, and can go on with others."""
    with two_peers() as (first, second):
        mine, other = torch.zeros(4_000_000), torch.ones(4_000_000)
        one, two = (averager(*pair, part_size_bytes=1 << 16) for pair in ((first, mine), (second, other)))
        formed = threading.Event()
        first.events.subscribe(lambda event: formed.set() if isinstance(event, GroupFormed) else None)
        steps = [each.step(timeout=LONG_S, wait=False, allow_retries=False) for each in (one, two)]
        assert formed.wait(LONG_S)
        one.shutdown()
        with pytest.raises(ClosedError):
            steps[0].result(LONG_S)
        assert not mine.any()
        with suppress(shoal.RoundFailed):
            steps[1].result(LONG_S)
        assert (float(other.min()), float(other.max())) in ((1.0, 1.0), (0.5, 0.5))
        with averager(first, torch.zeros(4_000_000)) as three:
            steps = [each.step(timeout=LONG_S, wait=False) for each in (three, two)]
            assert [len(step.result(LONG_S)) for step in steps] == [2, 2]


# ----------------------------------------------------------------------------------------------------------------- ends


def test_nothing_is_left_after_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread, no descriptor, no file, after a round, a download and a shutdown."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # tests beside this one have files of their own in /tmp
    threads, files = set(threading.enumerate()), open_files()
    with two_peers() as (first, second):
        one, two = averager(first, torch.zeros(1000)), averager(second, torch.ones(1000))
        coming = one.step(timeout=LONG_S, wait=False)
        two.step(timeout=LONG_S)
        coming.result(LONG_S)
        until(lambda: two.load_state_from_peers(timeout=10))
        with optimizer(first, torch.nn.Linear(2, 1)) as swarm:
            swarm.step()
        assert set(threading.enumerate()) > threads
    assert set(threading.enumerate()) == threads
    assert open_files() == files
    assert not list(tmp_path.glob("shoal*"))  # torch keeps a folder of its own there


def test_nothing_is_left_after_a_failed_start() -> None:
    """A DHT that could not join leaves no thread and no descriptor."""
    threads, files = set(threading.enumerate()), open_files()
    with pytest.raises(PeerUnreachable):
        shoal.DHT([nobody()], start=True, startup_timeout=0.3)
    assert (set(threading.enumerate()), open_files()) == (threads, files)


@pytest.mark.parametrize("victim", ["averager", "dht"])
def test_shutdown_ends_whoever_waits(victim: str) -> None:
    """A step that another thread waits for ends with ClosedError when the averager, or its DHT, is shut down."""
    ended: list[ShoalError] = []
    with shoal.DHT(start=True) as dht, averager(dht, torch.ones(2)) as one:

        def wait() -> None:
            try:
                one.step(timeout=LONG_S)
            except ShoalError as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: looking(one))
        (one if victim == "averager" else dht).shutdown()
        thread.join(LONG_S / 3)
    assert [type(error) for error in ended] == [ClosedError]


def test_shutdown_twice_and_from_several_threads() -> None:
    """Each call returns when all has ended, whoever began it."""
    dht = shoal.DHT(start=True)
    threads = [threading.Thread(target=dht.shutdown) for _ in range(4)]
    for thread in threads:
        thread.start()
    dht.shutdown()
    assert not dht.loop_thread._thread.is_alive()
    for thread in threads:
        thread.join(LONG_S)
    dht.shutdown()


def test_shutdown_in_the_loop_thread_ends_the_peer() -> None:
    """An event subscriber may shut the DHT down: it returns at once, and the rest follows."""
    first, second = shoal.DHT(start=True), shoal.DHT()
    first.events.subscribe(lambda event: first.shutdown() if isinstance(event, PeerConnected) else None)
    second._initial_peers = tuple(first.get_visible_maddrs())
    with second:
        second.run_in_background(await_ready=False)
        until(lambda: not first.loop_thread._thread.is_alive())
    assert not first.is_alive()


def test_an_averager_is_shut_down_in_the_loop_thread() -> None:
    """As above; also while it looks for a group."""
    with shoal.DHT(start=True) as dht:
        one = shoal.DecentralizedAverager([torch.ones(1)], dht, start=True, prefix="p")
        step = one.step(wait=False)
        dht.loop_thread.call_soon(one.shutdown)
        with pytest.raises(ClosedError):
            step.result(LONG_S)
        until(lambda: not one.is_alive())
        again = shoal.DecentralizedAverager([torch.ones(1)], dht, start=True, prefix="p")
        again.shutdown()


def test_a_shutdown_that_takes_long_returns_and_goes_on() -> None:
    """Whatever keeps shoal's thread: `shutdown_timeout` is how long the caller waits, and the end comes."""
    with shoal.DHT(start=True) as dht:
        one = shoal.DecentralizedAverager([torch.ones(1)], dht, start=True, prefix="p", shutdown_timeout=0.01)
        step, free = one.step(wait=False), threading.Event()
        dht.loop_thread.call_soon(lambda: free.wait(LONG_S))
        one.shutdown()
        assert not one.is_alive()
        free.set()
        with pytest.raises(ClosedError):
            step.result(LONG_S)
        shoal.DecentralizedAverager([torch.ones(1)], dht, start=True, prefix="p").shutdown()


def test_calls_before_start_and_after_shutdown() -> None:
    """LocalError before, ClosedError after; neither waits."""
    dht = shoal.DHT()
    with pytest.raises(LocalError, match="not started"):
        dht.get("key")
    dht.run_in_background()
    one = shoal.DecentralizedAverager([torch.ones(1)], dht, start=False, prefix="p")
    with pytest.raises(LocalError, match="not started"):
        one.step()
    with shoal.DecentralizedAverager([torch.ones(1)], dht, start=False, prefix="never") as never:
        pass
    with pytest.raises(ClosedError, match="shut down"):
        never.run_in_background()
    one.run_in_background()
    swarm = optimizer(dht, torch.nn.Linear(2, 1))
    for again in (one, dht):
        with pytest.raises(LocalError, match="only once"):
            again.run_in_background()
    dht.shutdown()
    one.shutdown()
    with pytest.raises(ClosedError):
        one.step()
    for call in (dht.get_visible_maddrs, dht.invite, lambda: dht.get("key"), swarm.step, one.load_state_from_peers):
        with pytest.raises(ClosedError):
            call()
    with shoal.DHT() as never_started:
        pass
    for each in (dht, never_started):
        with pytest.raises(ClosedError, match="make another one"):
            each.run_in_background()
        assert not each.is_alive()


def test_tensor_infos_are_those_of_the_state() -> None:
    """Unless `get_current_state` says something else: the codec for downloads chooses by them too."""
    tensors = [torch.ones(3)]
    infos = [CompressionInfo.from_tensor(tensors[0], key="weight", role=TensorRole.PARAMETER)]
    with shoal.DHT(start=True) as dht:
        one = shoal.DecentralizedAverager(tensors, dht, prefix="p", start=True, tensor_infos=infos)
        assert list(one.get_current_state()[2] or ()) == infos


def test_a_client_cannot_share_its_state() -> None:
    """Nobody can dial it: said when it is asked to, not by downloads that fail elsewhere."""
    with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], client_mode=True, start=True) as client:
        with pytest.raises(ConfigError, match="allow_state_sharing=True needs a peer that can be dialed"):
            shoal.DecentralizedAverager([torch.ones(1)], client, prefix="p", start=False, allow_state_sharing=True)
        one = shoal.DecentralizedAverager([torch.ones(1)], client, prefix="p", start=True)
        assert not one.allow_state_sharing
        with pytest.raises(ConfigError, match="in client mode"):
            one.allow_state_sharing = True


def test_a_client_invites_to_the_peer_that_it_was_given() -> None:
    """All programs print an invite, and this raised in client mode: the second machine's program ended there."""
    with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], client_mode=True, start=True) as client:
        assert client.invite("bees") == first.invite("bees")
        with shoal.DHT([client.invite("bees")], start=True) as third:
            assert third.invite() != first.invite()
    with (
        shoal.DHT(client_mode=True, start=True) as alone,
        pytest.raises(LocalError, match="was given no peer that can"),
    ):
        alone.invite()


def test_another_model_is_refused_by_name() -> None:
    """A run that is trained with other tensors is not joined: this is said at once, instead of never an epoch."""
    with two_peers() as (first, second):
        model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 3)
        one = optimizer(first, model)
        model(torch.ones(1, 2)).sum().backward()
        one.step()
        with pytest.raises(ConfigError, match="other settings: tensors is 2 with 9 elements"):
            optimizer(second, other)


def test_other_settings_of_the_program_are_refused_by_name() -> None:
    """Peers with other tokens have equal tensors, and would spoil the model together."""
    with two_peers() as (first, second):
        model = torch.nn.Linear(2, 1)
        one = optimizer(first, model, settings={"tokenizer": "ab"})
        model(torch.ones(1, 2)).sum().backward()
        one.step()
        with pytest.raises(ConfigError, match="other settings: tokenizer is cd here and ab at another peer"):
            optimizer(second, torch.nn.Linear(2, 1), settings={"tokenizer": "cd"})


def test_dropped_dht_leaves() -> None:
    """A DHT that nobody holds any more leaves the network, and its thread ends."""
    lost: list[Event] = []
    with shoal.DHT(start=True) as other:
        other.events.subscribe(lambda event: lost.append(event) if isinstance(event, PeerLost) else None)
        dht = shoal.DHT([other.invite()], start=True)
        thread = dht.loop_thread._thread
        del dht
        gc.collect()
        until(lambda: not thread.is_alive())
        until(lambda: lost)


def test_dropped_averager_ends() -> None:
    """Once nobody holds it, and no step of it goes on, its name is free; a DHT that was held by it alone leaves."""
    with shoal.DHT(start=True) as dht:
        one = shoal.DecentralizedAverager([torch.ones(1)], dht, start=True, prefix="p")
        core = one._core()
        step = one.step(wait=False)
        del one
        gc.collect()
        assert core._ending is None
        step.cancel()
        del step
        running = dht._started()
        until(lambda: gc.collect() is not None and not running._closers)
        assert core._ending is not None
        shoal.DecentralizedAverager([torch.ones(1)], dht, start=True, prefix="p").shutdown()
    two = shoal.DecentralizedAverager([torch.ones(1)], shoal.DHT(start=True), start=True, prefix="p")
    thread = two.dht.loop_thread._thread
    del two
    gc.collect()
    until(lambda: not thread.is_alive())


def test_an_optimizer_that_was_shut_down_is_forgotten() -> None:
    """The DHT goes on, and holds nothing of it; the same run can be joined again from it."""
    with shoal.DHT(start=True) as dht:
        model = torch.nn.Linear(2, 2)
        one = optimizer(dht, model)
        with pytest.raises(
            ConfigError, match=rf"^run '{one.run_id}' is trained by another .* call its shutdown\(\) first"
        ):
            optimizer(dht, torch.nn.Linear(2, 2))
        one.shutdown()
        assert not dht._started()._closers
        optimizer(dht, model).shutdown()


def test_an_optimizer_that_nobody_holds_leaves_its_run() -> None:
    """After `del swarm`, in a notebook: its name was in use for ever, and other peers waited for it."""
    with shoal.DHT(start=True) as dht:
        model = torch.nn.Linear(2, 2)
        one = optimizer(dht, model)
        tasks, endpoint = one.collaboration._tasks, one.collaboration.core.endpoint
        del one
        gc.collect()
        until(lambda: not dht._started()._closers and not tasks)
        until(lambda: not endpoint.serves_stream(FollowSteps, scope="run"))
        optimizer(dht, model).shutdown()


def test_two_averagers_of_one_name_do_not_replace_each_other() -> None:
    """On one DHT the second one is refused, and says what to do; the first one goes on."""
    with shoal.DHT(start=True) as dht, shoal.DHT([dht.invite()], start=True) as other:
        one, two = (averager(each, torch.ones(1)) for each in (dht, other))
        with pytest.raises(ConfigError, match="give each user of it another name"):
            averager(dht, torch.ones(1))
        steps = [each.step(timeout=LONG_S, wait=False) for each in (one, two)]
        assert [len(step.result(LONG_S)) for step in steps] == [2, 2]
        one.shutdown()
        averager(dht, torch.ones(1)).shutdown()
        two.shutdown()


WAITING = """
idle = shoal.DecentralizedAverager([torch.ones(4_000_000)], dhts[0], start=True, prefix='idle')
searching = shoal.DecentralizedAverager([torch.ones(4_000_000)], dhts[1], start=True, prefix='searching')
future = searching.step(timeout=300, wait=False)
in_a_thread = shoal.DecentralizedAverager([torch.ones(4_000_000)], dhts[2], start=True, prefix='in a thread')
threading.Thread(target=in_a_thread.step, daemon=True).start()
dhts[3].shutdown()
"""

IN_A_ROUND = """
averagers = [shoal.DecentralizedAverager([torch.ones(4_000_000)], dht, start=True, prefix='p') for dht in dhts]
formed = threading.Event()
dhts[0].events.subscribe(lambda event: formed.set() if type(event).__name__ == 'GroupFormed' else None)
futures = [each.step(wait=False) for each in averagers]
formed.wait(60)
"""


@pytest.mark.parametrize(("peers", "what"), [(4, WAITING), (2, IN_A_ROUND)], ids=["waiting", "in a round"])
def test_exit_without_shutdown(peers: int, what: str) -> None:
    """A program that just ends, with peers that wait or average: no hang, no word on stderr, a farewell from each."""
    lost: list[PeerLost] = []
    with shoal.DHT(start=True) as meeting:
        meeting.events.subscribe(lambda event: lost.append(event) if isinstance(event, PeerLost) else None)
        done = run_python(
            "import shoal, threading, torch\n"
            f"dhts = [shoal.DHT([{str(meeting.invite())!r}], start=True) for _ in range({peers})]\n"
            f"{what}\nprint('end')"
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
        until(lambda: len(lost) == peers)
    assert {event.reason for event in lost} == {"the peer left"}


# ---------------------------------------------------------------------------------------------------------------- forks


def test_forked_child_is_refused(tmp_path: Path) -> None:
    """In a forked child every call says what to do, exit is quiet, and the parent's peer does not notice."""
    told = tmp_path / "told"
    with two_peers() as (first, second), averager(first, torch.ones(2)) as one:
        swarm = optimizer(first, torch.nn.Linear(2, 1))
        coming = first.get("key", return_future=True)
        coming.result(LONG_S)
        calls: list[Callable[[], object]] = [
            lambda: first.get("key"),
            lambda: first.store("key", 1, time.time() + 60),
            first.get_visible_maddrs,
            one.step,
            lambda: one.step(wait=False),
            lambda: one.get_tensors().__enter__(),
            one.load_state_from_peers,
            swarm.step,
            lambda: swarm.announce_end(1),
            swarm.load_state_from_peers,
            first.run_in_background,
            lambda: averager(first, torch.ones(1)),
            lambda: optimizer(first, torch.nn.Linear(2, 1)),
        ]
        with one.get_tensors():  # also when a lock was held at the fork
            child = os.fork()
        if child == 0:  # no assert in here: pytest must not go on in the child
            try:
                ends = []
                for call in calls:
                    try:
                        ends.append(str(call()))
                    except ClosedError as error:
                        ends.append(str(error))
                    except BaseException as error:  # noqa: BLE001 (told to the parent)
                        ends.append(repr(error))
                ends.append(str(first.is_alive()))
                first.shutdown()
                one.shutdown()
                swarm.shutdown()
                told.write_text("\n".join(ends))
            finally:
                os._exit(0)
        until(lambda: os.waitpid(child, os.WNOHANG) != (0, 0))
        said = "objects of shoal do not survive a fork: make the DHT, and all that uses it, in this process"
        assert told.read_text().splitlines() == [said] * len(calls) + ["False"]
        assert second.store("after", 1, time.time() + 60)
        found = first.get("after", latest=True)
        assert found is not None
        assert found.value == 1


def test_forked_data_loader_workers_do_not_keep_a_dead_peer_alive() -> None:
    """SIGKILL for a peer with two forked DataLoader workers: its connections close at once, while the workers live."""
    lost: list[PeerLost] = []
    with shoal.DHT(start=True) as meeting, Worker() as worker:
        meeting.events.subscribe(lambda event: lost.append(event) if isinstance(event, PeerLost) else None)
        worker.start(
            "load_with_forked_workers", initial_peers=[str(address) for address in meeting.get_visible_maddrs()]
        )
        peer = PeerID.parse(worker.expect("joined")[0])
        children = worker.expect("workers")
        for child in children:
            os.kill(child, signal.SIGSTOP)  # they would notice the death of their parent, in a while
        try:
            worker.signal(signal.SIGKILL)
            until(lambda: lost)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
    assert lost[0].peer == peer
    assert "silent" not in lost[0].reason


def test_spawned_process_can_be_a_peer() -> None:
    """The start method spawn of multiprocessing works: the child makes its own DHT and averages with the parent."""
    with shoal.DHT(start=True) as dht, averager(dht, torch.zeros(4), prefix="spawned") as one:
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=scripts.average_once, args=(str(dht.invite()), "spawned"))
        child.start()
        one.step(timeout=LONG_S)
        with one.get_tensors() as tensors:
            assert tensors[0].tolist() == [0.5] * 4
        child.join(LONG_S)
        assert child.exitcode == 0
        child.close()


# ----------------------------------------------------------------------------------------------------------------- pool


def test_pool_runs_reports_and_ends() -> None:
    """Results, errors, cancelled work; more work than threads; nothing after shutdown, and no thread."""
    pool = DaemonPool(2, "test-pool")
    assert [future.result(LONG_S) for future in [pool.submit(pow, 2, n) for n in range(20)]] == [
        2**n for n in range(20)
    ]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(LONG_S)
    busy, release = [threading.Event(), threading.Event()], threading.Event()

    def block(number: int) -> int:
        busy[number].set()
        release.wait(LONG_S)
        return number

    blocked = [pool.submit(block, number) for number in range(2)]
    assert all(event.wait(LONG_S) for event in busy), "two at the same time"
    waiting = pool.submit(block, 0)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    release.set()
    assert [future.result(LONG_S) for future in blocked] == [0, 1]
    pool.shutdown()
    assert not any(thread.name.startswith("test-pool") for thread in threading.enumerate())
    with pytest.raises(RuntimeError):
        pool.submit(int)


def test_pool_where_no_more_threads_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the pool died of that in the middle of its work, and whoever waited for it waited for ever."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    cores = torch.get_num_threads()
    pool = DaemonPool(2, "test-pool")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    try:
        assert [future.result(LONG_S) for future in [pool.submit(pow, 2, n) for n in range(20)]] == [
            2**n for n in range(20)
        ]
        with pytest.raises(RuntimeError, match="raise the limits"):
            DaemonPool(2, "test-pool").submit(int)
    finally:
        pool.shutdown()
    assert torch.get_num_threads() == cores
    assert not started[0].is_alive()


def test_a_batch_that_no_message_can_hold_is_refused() -> None:
    """With 10^30 samples in one batch this peer could not say anything any more, and failed when it left."""
    with shoal.DHT(start=True) as dht:
        model = torch.nn.Linear(2, 1)
        one = optimizer(dht, model)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ConfigError, match="batch_size must be at most 68,719,476,736"):
            one.step(batch_size=10**30)
        one.step()


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("run_id", "\ud800", "run_id has a character"),
        ("run_id", "r" * 241, "run_id must be a text of 1 to 240 characters"),
        ("grad_compression", "float16", "grad_compression must be a codec"),
        ("state_averaging_compression", shoal.compression.Float16Compression, "state_averaging_compression must be"),
        ("extra_tensors", torch.zeros(2), "extra_tensors must be a list of tensors"),
        ("extra_tensors", [1, 2], "extra_tensors must be a list of tensors"),
        ("shutdown_timeout", "5", "shutdown_timeout must be a number of seconds"),
    ],
)
def test_a_wrong_argument_is_told_when_the_optimizer_is_made(argument: str, value: Any, says: str) -> None:
    """These were raw errors from within, some a minute later, or at `shutdown`, or were taken."""
    with shoal.DHT(start=True) as dht, pytest.raises(shoal.errors.ConfigError, match=says):
        optimizer(dht, torch.nn.Linear(2, 1), **{argument: value})


def test_an_optimizer_that_was_shut_down_says_so() -> None:
    """`load_state_from_peers` found "no better state", and `announce_end` announced to nobody."""
    with shoal.DHT(start=True) as dht:
        swarm = optimizer(dht, torch.nn.Linear(2, 1))
        swarm.shutdown()
        for call in (swarm.load_state_from_peers, partial(swarm.announce_end, 5), swarm.step):
            with pytest.raises(shoal.errors.ClosedError):
                call()
        assert swarm.state_dict()["shoal"]["epoch"] == 0


@pytest.mark.parametrize("gradient", [None, float("nan")])
def test_batches_without_gradients_are_no_samples(gradient: float | None) -> None:
    """They were told as samples for which "the rounds go on without" this peer, and as its pace."""
    with shoal.DHT(start=True) as dht:
        model = torch.nn.Linear(2, 1)
        with optimizer(dht, model) as swarm:
            for _ in range(3):
                if gradient is not None:
                    for parameter in model.parameters():
                        parameter.grad = torch.full_like(parameter, gradient)
                swarm.step()
            assert swarm.collaboration.speed.processed == 0
            model(torch.ones(8, 2)).sum().backward()
            swarm.zero_grad()
            model(torch.ones(8, 2)).sum().backward()
            swarm.step()
            assert swarm.collaboration.speed.processed == 8


def test_a_peer_that_was_shut_down_keeps_no_memory_of_its_connections() -> None:
    """It is in cycles, which are found long after: each peer that was made and closed left 3 MB behind."""
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, Scratch)}
    gc.disable()
    try:
        with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], start=True):
            pass
        kept = [each for each in gc.get_objects() if isinstance(each, Scratch) and id(each) not in before]
        assert not any(len(each.receiving) or len(each.sending) for each in kept)
    finally:
        gc.enable()
