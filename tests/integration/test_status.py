"""`Optimizer.status()` and `read_run`: what a person or a dashboard wants to know of a run."""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ClosedError, LocalError
from shoal.strategies import LocalSGD, StreamingDiLoCo
from tests.integration.workers import until

RUN: dict[str, Any] = {"run_id": "status", "target_batch_size": 8, "batch_size_per_step": 4}


def swarm_of(dht: shoal.DHT) -> tuple[shoal.Optimizer, torch.nn.Linear]:
    """An optimizer of a small model, equal on all."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return shoal.Optimizer(dht=dht, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **RUN), model


def batch(swarm: shoal.Optimizer, model: torch.nn.Linear) -> bool:
    """One batch of four samples; whether a speed is known then."""
    swarm.zero_grad()
    model(torch.ones(4, 3)).mean().backward()
    swarm.step()
    return swarm.status().eta_s is not None


def test_the_status_says_what_goes_on() -> None:
    """Before the first step, in the middle of an epoch, after a step of two; from another thread too; and as JSON."""
    with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], client_mode=True, start=True) as second:
        one, model = swarm_of(first)
        two, other = swarm_of(second)
        with one, two:
            until(lambda: len(one.status().peers) == 2)
            found = one.status()
            assert (found.run_id, found.epoch, found.samples, found.target_batch_size) == ("status", 0, 0, 8)
            assert (found.last_round, found.contributed, found.finished, found.alone_because) == (None, 0, False, ())
            assert [peer.role for peer in found.peers] == ["me", "client"]
            assert [peer.peer for peer in found.peers] == [first.peer_id, second.peer_id]

            partner = threading.Thread(target=lambda: batch(two, other))
            batch(one, model)
            assert one.status().peers[0].samples == 4
            partner.start()
            until(lambda: one.status().phase == "stepping")
            batch(one, model)
            partner.join()
            seen = []
            asker = threading.Thread(target=lambda: seen.append(one.status()))
            asker.start()
            asker.join()
            found = seen[0]
            assert found.epoch == 1
            assert found.last_round is not None
            assert set(found.last_round.contributors) == {first.peer_id, second.peer_id}
            assert set(found.last_round.members) == {first.peer_id, second.peer_id}
            assert found.last_round.duration_s > 0
            assert (found.contributed, found.dropped) == (4, 4)
            assert json.loads(json.dumps(found.as_dict()))["peers"][1]["peer"] == str(second.peer_id)
            assert one.is_alive()
            until(lambda: one.is_synchronized_with_peers() or two.is_synchronized_with_peers())
        assert not one.is_alive()
        assert one.status().last_round == found.last_round


def test_a_batch_that_is_not_finite_is_in_the_status() -> None:
    """Its samples were neither contributed nor dropped. A step without any gradient has no samples."""
    with shoal.DHT(start=True) as dht:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        swarm = shoal.Optimizer(dht=dht, run_id="run", target_batch_size=64, batch_size_per_step=4, optimizer=optimizer)
        swarm.step()
        for number in range(6):
            scale = float("nan") if number % 2 else 1.0
            (model(torch.ones(4, 3)).square().mean() * scale).backward()
            swarm.step()
            swarm.zero_grad()
        status = swarm.status()
        assert (status.contributed, status.dropped, status.samples) == (0, 12, 12)


def test_a_client_of_a_peer_that_listens_is_a_client_to_the_others() -> None:
    """Its DHT can be dialed, but it gives no state and leads no group: nobody is to ask it for one."""
    with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], start=True) as second:
        one, model = swarm_of(first)
        two = shoal.Optimizer(
            dht=second, optimizer=torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1), client_mode=True, **RUN
        )
        with one, two:
            until(lambda: [peer.role for peer in one.status().peers] == ["me", "client"])
            assert [peer.role for peer in two.status().peers] == ["me", "peer"]
            until(lambda: batch(one, model) or one.local_epoch)
            found = shoal.read_run(second, "status")
            assert found is not None
            assert str(second.peer_id) in found.answering  # the reader itself
            assert two.load_state_from_peers() or two.local_epoch >= 1


def test_the_status_has_an_eta_once_a_speed_is_known() -> None:
    """Samples that are missing, by the speed of all."""
    with shoal.DHT(start=True) as dht:
        swarm, model = swarm_of(dht)
        with swarm:
            assert swarm.status().eta_s is None
            until(lambda: batch(swarm, model))
            found = swarm.status()
            assert found.eta_s is not None
            assert found.peers[0].samples_per_s > 0
            assert 0 <= found.eta_s <= 8 / found.peers[0].samples_per_s


def test_the_status_of_a_model_in_fragments_is_that_of_the_whole_model() -> None:
    """It was that of the first fragment, which was ahead of the others most of the time, and merged first."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = StreamingDiLoCo(4, fragments=2, overlap=1)
    seen = set[tuple[int, ...]]()
    with (
        shoal.DHT(start=True) as dht,
        shoal.Optimizer(dht=dht, run_id="status", batch_size_per_step=4, optimizer=inner, strategy=strategy) as swarm,
    ):
        for batches in range(1, 13):
            swarm.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            swarm.step()
            found = swarm.status()
            assert found.epoch == found.swarm_epoch == swarm.local_epoch == (batches - 1) // 4
            assert [(peer.epoch, peer.samples) for peer in found.peers] == [(found.epoch, found.samples)]
            assert found.samples == found.target_batch_size * (batches - 4 * found.epoch) // 4
            assert (
                found.contributed
                <= min(each.contribution.contributed for each in swarm._chains.participants)
                <= 4 * batches
            )
            assert swarm.is_synchronized_with_peers()
            seen.add(tuple(fragment.epoch for fragment in swarm._chains.participants))
    assert any(len({*epochs}) > 1 for epochs in seen), seen


def test_the_eta_of_a_merge_that_is_due_at_a_time_is_what_is_left_until_then() -> None:
    """It was the whole time between two merges, all the while."""
    with shoal.DHT(start=True) as dht:
        model = torch.nn.Linear(3, 1)
        inner, every = torch.optim.SGD(model.parameters(), lr=0.1), LocalSGD("1h")
        with shoal.Optimizer(dht=dht, run_id="status", batch_size_per_step=4, optimizer=inner, strategy=every) as swarm:
            batch(swarm, model)  # until then no time is over
            etas = [swarm.status().eta_s or 0.0 for _ in range(2)]
            assert 3600 > etas[0] > etas[1] > 0


def test_a_run_is_read_by_one_that_is_no_peer_of_it() -> None:
    """It sees who trains and how far they are, and they do not see it; None before and after."""
    with shoal.DHT(start=True) as first, shoal.DHT([first.invite()], start=True) as reader:
        assert shoal.read_run(reader, "status") is None
        swarm, model = swarm_of(first)
        with swarm:
            swarm.announce_end(9)
            for _ in range(4):
                batch(swarm, model)
            until(lambda: (found := shoal.read_run(reader, "status")) is not None and found.best.epoch == 2)
            found = shoal.read_run(reader, "status")
            assert found is not None
            assert [peer.contact.peer for peer in found.peers] == [first.peer_id]
            assert (found.run_id, found.target_batch_size, found.end_epoch) == ("status", 8, 9)
            assert found.samples_per_s == found.rate(found.best) >= 0
            assert [peer.peer for peer in swarm.status().peers] == [first.peer_id]
        until(lambda: shoal.read_run(reader, "status") is None)


CHANGES = {
    *(
        "OptimizerPreHook",
        "add_param_group",
        "announce_end",
        "another_shares",
        "eval",
        "keep_given_up",
        "load_state_dict",
    ),
    *("load_state_from_peers", "profile_hook_step", "resume", "samples_are_given", "save", "save_last", "shutdown"),
    *("step", "train", "zero_grad", "run_in_background", "wait_until_ready", "store", "get", "run_coroutine"),
    *("add_validators", "at_shutdown", "start", "report_local_progress", "update_epoch", "pause_updates"),
}
"""Public names that do something. All others look at something only."""

ALWAYS = {
    "Optimizer": {"repr", "status", "local_epoch", "finished", "tracker", "local_progress", "is_alive", "state_dict"},
    "ProgressTracker": {"repr", "local_progress", "is_alive"},
    "DecentralizedAverager": {"repr", "is_alive"},
    "DHT": {"repr", "peer_id", "is_alive"},
}
"""What answers also when nothing goes on any more."""

MADE: dict[str, Callable[[shoal.DHT], Any]] = {
    "Optimizer": lambda dht: swarm_of(dht)[0],
    "Optimizer that merges": lambda dht: shoal.Optimizer(
        dht=dht, run_id="merges", strategy=LocalSGD(2), optimizer=torch.optim.SGD(torch.nn.Linear(3, 1).parameters())
    ),
    "ProgressTracker": lambda dht: shoal.ProgressTracker(dht, "tracker", 4, start=True),
    "DecentralizedAverager": lambda dht: shoal.DecentralizedAverager([torch.zeros(3)], dht, prefix="run", start=True),
    "DHT": lambda dht: dht,
}


def looks(of: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All public ways to look at an object, by name."""
    yield "repr", partial(repr, of)
    for name in sorted(set(dir(type(of))) - CHANGES):
        kind = inspect.getattr_static(type(of), name)
        if name.startswith(("_", "register_", "Optimizer")) or isinstance(kind, staticmethod | classmethod):
            continue
        if isinstance(kind, property):
            yield name, partial(getattr, of, name)
        elif callable(kind):
            parameters = list(inspect.signature(kind).parameters.values())[1:]
            if all(each.default is not each.empty for each in parameters):
                yield name, partial(kind, of)


def answers(of: Any) -> dict[str, str]:
    """What each look gives: an empty text, or its error. An error that is none of shoal's is raised."""
    found = {}
    for name, look in looks(of):
        try:
            look()
            found[name] = ""
        except (ClosedError, LocalError) as error:
            found[name] = str(error)
    return found


def in_a_child(of: Any) -> dict[str, str]:
    """As `answers`, in a forked child."""
    read, write = os.pipe()
    if not (child := os.fork()):
        said = "{}"
        try:
            said = json.dumps(answers(of))
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found: dict[str, str] = json.load(pipe)
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("kind", MADE)
def test_status_raised_after_shutdown(kind: str) -> None:
    """Whatever only looks answers at any time, or says clearly why not; `status()` has what it had last."""
    with shoal.DHT(start=True) as dht:
        made = MADE[kind](dht)
        always = ALWAYS[kind.partition(" ")[0]]
        assert set(answers(made).values()) == {""}, "before the first step"
        child = in_a_child(made)
        assert child.keys() >= always
        assert {why for why in child.values() if why} <= {
            "objects of shoal do not survive a fork: make the DHT, and all that uses it, in this process"
        }
        begun, during, over = threading.Event(), list[dict[str, str]](), threading.Event()

        def look_on() -> None:
            while not over.is_set() or not during:
                during.append(answers(made))
                begun.set()

        looker = threading.Thread(target=look_on)
        looker.start()
        assert begun.wait(60.0)
        made.shutdown()
        over.set()
        looker.join()
        during.append(answers(made))
        dht.shutdown()
        during.append(answers(made))
    for found in during:
        assert all(found[name] == "" for name in always), found
        assert all("was shut down" in why for why in found.values() if why), found


def test_status_raised_where_the_dht_was_shut_down_first() -> None:
    """Its optimizers leave then; what they saw last is kept, with the samples that they had not given yet."""
    with shoal.DHT(start=True) as dht:
        swarm, model = swarm_of(dht)
        batch(swarm, model)
        before = swarm.status()
    found = swarm.status()
    assert (found.epoch, found.peers[0].peer, found.dropped) == (before.epoch, dht.peer_id, 4)
    assert swarm.tracker.global_progress.num_peers == 1
