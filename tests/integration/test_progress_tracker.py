"""`ProgressTracker`, as programs written for hivemind use it: their own loop, and their own steps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ClosedError, ConfigError, LocalError
from tests.integration.test_pages import last_lines_of_two, python_blocks
from tests.integration.test_runtime import two_peers
from tests.integration.workers import until

TARGET = 100


def tracker(dht: shoal.DHT, target: int = TARGET, **options: Any) -> shoal.ProgressTracker:
    """One of the run."""
    return shoal.ProgressTracker(dht, "run", target, **{"start": True, **options})


def sees(one: shoal.ProgressTracker, epoch: int, samples: int, peers: int = 2) -> Callable[[], bool]:
    """Whether it knows that this is where all are."""

    def check() -> bool:
        progress = one.global_progress
        return (progress.epoch, progress.samples_accumulated, progress.num_peers) == (epoch, samples, peers)

    return check


def test_samples_add_up_and_an_epoch_begins_anew() -> None:
    """Of both; the one that is behind is told so, and its samples do not count."""
    with two_peers() as (first, second):
        one, two = tracker(first), tracker(second)
        one.report_local_progress(0, 60)
        two.report_local_progress(0, 30)
        for each in (one, two):
            until(sees(each, 0, 90))
            assert not each.ready_to_update_epoch
        two.report_local_progress(0, 50)
        assert two.local_progress.samples_accumulated == 50
        until(lambda: one.ready_to_update_epoch and two.ready_to_update_epoch)
        with one.pause_updates():
            before = one.global_progress
            two.report_local_progress(0, 55)
            until(sees(two, 0, 115))
            assert one.global_progress is before
            assert before.samples_accumulated == 110
            assert one.update_epoch() == 1
            assert (before.epoch, before.samples_accumulated, before.eta_next_epoch) == (1, 0, math.inf)
        assert one.local_progress.epoch == 1
        until(sees(two, 1, 0))
        assert two.ready_to_update_epoch
        one.report_local_progress(1, 20)
        until(sees(two, 1, 20))
        with two.pause_updates():
            assert two.update_epoch(1) == 1
        until(sees(one, 1, 20))
        one.shutdown()
        until(sees(two, 1, 0, peers=1))
        assert not one.is_alive()
        one.shutdown()


def test_the_time_of_the_next_epoch_follows_from_the_speeds() -> None:
    """Unknown at first."""
    with two_peers() as (first, second):
        one, two = tracker(first, 1000), tracker(second, 1000)
        assert one.global_progress.eta_next_epoch == math.inf
        done = 0

        def trained() -> bool:
            nonlocal done
            done += 1
            two.report_local_progress(0, done)
            return one.global_progress.eta_next_epoch < math.inf

        until(trained)
        assert two.local_progress.samples_per_second > 0
        assert two.performance_ema.samples_per_second > 0
        assert one.estimated_next_update_time > shoal.get_dht_time()
        two.report_local_progress(0, 1000)
        until(lambda: one.ready_to_update_epoch)
        assert one.estimated_next_update_time <= shoal.get_dht_time()


def test_workers_of_other_batch_sizes_go_through_the_epochs_and_a_watcher_sees_them() -> None:
    """No epoch turns without its samples; who is slower goes on with the others; the watcher reports nothing itself."""
    with two_peers() as (first, second), shoal.DHT(first.get_visible_maddrs(), start=True) as third:
        watcher, sizes = tracker(first), {second: 12, third: 30}
        workers = {tracker(dht, client_mode=dht is third): size for dht, size in sizes.items()}
        until(sees(watcher, 0, 0, peers=3))
        last = 0

        def work(one: shoal.ProgressTracker, size: int) -> None:
            mine = one.local_progress
            one.report_local_progress(mine.epoch, mine.samples_accumulated + size)
            with one.pause_updates():  # else the client may go on between two looks: its epoch is not that of the run
                if one.ready_to_update_epoch:
                    seen = one.global_progress
                    assert seen.epoch > mine.epoch or seen.samples_accumulated >= TARGET
                    one.update_epoch(max(seen.epoch, mine.epoch + 1))

        while watcher.global_epoch < 3:
            for one, size in workers.items():
                if one.own_epoch < 3:
                    work(one, size)
            seen = watcher.global_progress
            assert last <= seen.epoch <= max(one.own_epoch for one in workers)
            assert (seen.target_batch_size, seen.num_peers, seen.num_clients) == (TARGET, 3, 1)
            last = seen.epoch
        for one in workers:
            until(lambda one=one: one.global_epoch == 3)
        assert watcher.own_epoch == 0
        assert watcher.ready_to_update_epoch, "the others are further"


class OfTheLoop(dict[Any, Any]):
    """The last words of others, which the loop changes as it hears more."""

    def values(self) -> Any:
        asyncio.get_running_loop()
        return super().values()


def test_the_words_of_others_were_counted_in_another_thread_while_more_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum was of words that did not hold at one time, or a dictionary had changed its size."""
    with two_peers() as (first, second):
        one, two = tracker(first), tracker(second)
        two.report_local_progress(0, 30)
        until(sees(one, 0, 30))
        look = one._core().look

        def looked() -> Any:
            view = look()
            return replace(view, others=OfTheLoop(view.others))

        monkeypatch.setattr(one._core(), "look", looked)
        assert one.global_progress.samples_accumulated == 30


def test_clients_are_counted() -> None:
    """One by its argument, on a peer that could be dialed."""
    with two_peers() as (first, second):
        one, two = tracker(first), tracker(second, client_mode=True)
        two.report_local_progress(0, 7)
        until(sees(one, 0, 7))
        assert one.global_progress.num_clients == two.global_progress.num_clients == 1
        assert two.local_progress.client_mode


def test_one_that_is_dropped_has_left() -> None:
    """The others see it at once, and its prefix is free; it is not while another one has it."""
    with two_peers() as (first, second):
        one, two = tracker(first), tracker(second)
        until(sees(one, 0, 0))
        with pytest.raises(ConfigError):
            tracker(second)
        del two
        until(sees(one, 0, 0, peers=1))
        tracker(second).shutdown()


def test_what_is_wrong_is_named() -> None:
    """Arguments, another target than the others have, and calls that come too early or too late."""
    with two_peers() as (first, second):
        one = tracker(first)
        with pytest.raises(ConfigError, match="target_batch_size is 50 here and 100 at another peer"):
            tracker(second, 50)
        with pytest.raises(ConfigError, match=r"private_key=.* has no counterpart .* identity_path"):
            tracker(second, private_key=object())
        with pytest.raises(ConfigError, match="target_batch_size must be a whole number of at least 1, got 0"):
            tracker(second, 0)
        with pytest.raises(TypeError, match="unexpected keyword argument 'refresh'"):
            tracker(second, refresh=1)
        two = tracker(second, start=False, min_refresh_period=0.1, private_key=None, daemon=True)
        with pytest.raises(LocalError, match="this tracker was not started"):
            two.report_local_progress(0, 1)
        two.start()
        with pytest.raises(LocalError, match="started only once"):
            two.start()
        with pytest.raises(LocalError, match="pause_updates"):
            two.update_epoch()
        with pytest.raises(ConfigError, match="samples_accumulated must be a whole number of at least 0, got -1"):
            two.report_local_progress(0, -1)
        until(sees(one, 0, 0))
    with pytest.raises(ClosedError):
        _ = one.global_progress
    one.shutdown()


@pytest.mark.long
def test_two_processes_run_the_program_of_the_page(tmp_path: Path) -> None:
    """Steps of the swarm by a tracker and a `GradientAverager`: both end with the same bits."""
    (code,) = (block for block in python_blocks("docs/how-to/own-steps.md") if "ProgressTracker" in block)
    said = last_lines_of_two(tmp_path, code)
    assert said[0] == said[1]
    assert said[0].startswith("epoch 5, weights ")


def test_a_tracker_in_a_run_of_an_optimizer_says_how_to_look_at_it() -> None:
    """It told only which setting differs: the peers of such a run compare more than trackers have."""
    with two_peers() as (first, second):
        inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        swarm = shoal.Optimizer(
            dht=first, run_id="run", target_batch_size=TARGET, batch_size_per_step=1, optimizer=inner
        )
        with pytest.raises(ConfigError, match=r"optimizer is not set here and SGD .* shoal\.read_run\(dht, 'run'\)"):
            tracker(second)
        status = shoal.read_run(second, "run")
        assert status is not None
        assert [peer.contact.peer for peer in status.peers] == [first.peer_id]
        swarm.shutdown()
