"""`TrainingAverager`, as programs written for hivemind use it: their own optimizer's steps, averaged now and then."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ConfigError, LocalError, RoundFailed, StateUnavailable
from tests.integration.test_pages import last_lines_of_two, python_blocks
from tests.integration.test_runtime import two_peers
from tests.integration.workers import LONG_S, until


class Peer:
    """A model with other values on each peer, an Adam, and an averager."""

    def __init__(self, dht: shoal.DHT, seed: int, *, steps: int = 0, empty: bool = False, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.net = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        groups: list[dict[str, Any]] = [{"params": [*self.net.parameters()]}, *([{"params": []}] if empty else [])]
        self.opt = torch.optim.Adam(groups, lr=0.1 * (seed + 1))
        self.extra = torch.full((2,), float(seed))
        for _ in range(steps):
            self.train()
        given = {"average_parameters": True, "average_gradients": False, "target_group_size": 2, **options}
        self.averager = shoal.TrainingAverager(self.opt, dht=dht, prefix="t", start=True, **given)

    def train(self) -> None:
        """One step."""
        self.opt.zero_grad()
        self.net(torch.ones(4, 3)).square().sum().backward()
        self.opt.step()

    def tensors(self) -> list[torch.Tensor]:
        """Copies of all that may be averaged, or None in place of what is not there."""
        return [each.detach().clone() for each in self.averager.local_tensors()]


@contextmanager
def pair(**options: Any) -> Iterator[tuple[Peer, Peer]]:
    """Two of them."""
    with two_peers() as (first, second):
        yield Peer(first, 0, **options), Peer(second, 1, **options)


def average(peers: tuple[Peer, Peer], **options: Any) -> None:
    """One step of both."""
    with ThreadPoolExecutor() as threads:
        steps = [threads.submit(each.averager.step, timeout=LONG_S, **options) for each in peers]
        assert [len(step.result()) for step in steps] == [2, 2]


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"average_gradients": True},
        {"average_parameters": False, "average_gradients": True},
        {"average_gradients": True, "average_opt_statistics": ("exp_avg", "exp_avg_sq", "step")},
    ],
)
def test_what_is_chosen_is_averaged(chosen: dict[str, Any]) -> None:
    """To the mean, bit by bit on both; all else stays."""
    with pair(steps=2, **chosen) as peers:
        before, parameters = [each.tensors() for each in peers], [each.net.weight.detach().clone() for each in peers]
        average(peers)
        one, two = (each.tensors() for each in peers)
        assert all(map(torch.equal, one, two))
        for mean, mine, theirs in zip(one, *before, strict=True):
            torch.testing.assert_close(mean, (mine + theirs) / 2)
        if not chosen.get("average_parameters", True):
            assert all(torch.equal(each.net.weight, kept) for each, kept in zip(peers, parameters, strict=True))
        assert [each.averager.local_step for each in peers] == [1, 1]


def test_weights_and_extra_tensors() -> None:
    """As those of any averager."""
    with two_peers() as (first, second):
        extras = torch.zeros(2), torch.ones(2)
        one, two = (Peer(dht, seed, extra_tensors=[extras[seed]]) for seed, dht in enumerate((first, second)))
        other = one.averager.step(weight=1.0, gather="one", wait=False, timeout=LONG_S)
        assert isinstance(other, Future)
        assert sorted(two.averager.step(weight=3.0, gather="two", timeout=LONG_S).values()) == ["one", "two"]
        other.result(LONG_S)
        assert extras[0].tolist() == extras[1].tolist() == [0.75, 0.75]


def test_changes_during_a_step_are_kept_with_a_lock() -> None:
    """They are added to the average; tensors that nobody changed hold exactly the average."""
    lock = threading.Lock()
    with pair() as (one, two):
        before = one.tensors()
        step = one.averager.step(lock, wait=False, timeout=LONG_S)
        until(lambda: one.averager._core().looking)
        with pytest.raises(LocalError, match="another step of this averager is under way"):
            one.averager.step(timeout=LONG_S)
        with lock, torch.no_grad():
            one.net.bias.add_(1)
        theirs = two.tensors()
        two.averager.step(timeout=LONG_S)
        step.result(LONG_S)
        assert torch.equal(one.net.weight, two.net.weight)
        torch.testing.assert_close(one.net.bias.detach(), (before[1] + theirs[1]) / 2 + 1)


def test_a_failed_step_changes_nothing() -> None:
    """Neither at once nor in the background."""
    with shoal.DHT(start=True) as dht:
        one = Peer(dht, 0, average_gradients=True, steps=1)
        before = one.tensors()
        with pytest.raises(RoundFailed):
            one.averager.step(timeout=0.2)
        with pytest.raises(RoundFailed):
            one.averager.step(timeout=0.2, wait=False).result(LONG_S)
        assert all(map(torch.equal, before, one.tensors()))
        assert one.averager.local_step == 0


@pytest.mark.parametrize("empty", [False, True])
def test_a_newcomer_takes_over_all_or_nothing(*, empty: bool) -> None:
    """Parameters, extra tensors, statistics, options; then both take equal steps. One that does not fit: an error."""
    with two_peers() as (first, second):
        donor = Peer(first, 0, steps=3, empty=empty, extra_tensors=[torch.ones(2)])
        donor.averager.local_step = 5
        extra = torch.zeros(2)
        newcomer = Peer(second, 1, empty=empty, extra_tensors=[extra])
        until(lambda: newcomer.averager.load_state_from_peers(timeout=LONG_S))
        assert (newcomer.averager.local_step, extra.tolist()) == (5, [1, 1])
        assert newcomer.opt.param_groups[0]["lr"] == 0.1
        for each in (donor, newcomer):
            each.train()
        assert all(map(torch.equal, donor.tensors(), newcomer.tensors()))
        newcomer.averager.shutdown()
        other = Peer(second, 1)
        before = other.tensors()
        with pytest.raises(StateUnavailable, match="the state does not fit here"):
            until(lambda: other.averager.load_state_from_peers(timeout=LONG_S))
        assert all(map(torch.equal, before, other.tensors()))


def test_a_state_that_a_donor_cannot_give_is_one_that_nobody_has() -> None:
    """The newcomer went on with its own weights, and neither side said why. The plain averager says it in a warning."""
    with two_peers() as (first, second):
        donor, newcomer = Peer(first, 0), Peer(second, 1)
        with torch.no_grad():
            donor.net.weight.fill_(math.nan)
        said: list[str] = []
        second.events.subscribe(lambda event: said.append(getattr(event, "message", "")))
        with pytest.raises(StateUnavailable, match="the state cannot be sent: tensor 0 of the state holds NaN"):
            until(lambda: newcomer.averager.load_state_from_peers(timeout=LONG_S))
        assert shoal.DecentralizedAverager.load_state_from_peers(newcomer.averager, timeout=LONG_S) is None
        assert any("holds NaN" in each for each in said)


@pytest.mark.long
def test_two_processes_run_the_program_of_the_page(tmp_path: Path) -> None:
    """Local steps, averaged every ten: both end with the same bits."""
    (code,) = (block for block in python_blocks("docs/how-to/own-steps.md") if "TrainingAverager" in block)
    said = last_lines_of_two(tmp_path, code)
    assert said[0] == said[1]
    assert said[0].startswith("5 rounds, weights ")


def test_statistics_are_made_without_a_change_of_the_parameters() -> None:
    """Also with weight decay and gradients that are there; those that are there already stay."""
    with shoal.DHT(start=False) as dht:

        def made(opt: torch.optim.Optimizer, **options: Any) -> shoal.TrainingAverager:
            given: dict[str, Any] = {"average_parameters": True, "average_gradients": False, **options}
            return shoal.TrainingAverager(opt, dht=dht, prefix="t", start=False, **given)

        net = torch.nn.Linear(3, 2)
        net.bias.requires_grad_(False)
        net(torch.ones(4, 3)).sum().backward()
        assert net.weight.grad is not None
        before, gradient = net.weight.detach().clone(), net.weight.grad.clone()
        opt = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        with pytest.raises(ConfigError, match="state of parameter 0 has no tensor 'exp_avg'"):
            made(opt, average_opt_statistics=["exp_avg"], initialize_optimizer=False)
        named = torch.optim.AdamW(net.named_parameters())
        with pytest.raises(ConfigError, match="state of parameter weight has no tensor 'exp_avg'"):
            made(named, average_opt_statistics=["exp_avg"], initialize_optimizer=False)
        made(opt, average_opt_statistics=["exp_avg"])
        assert torch.equal(net.weight, before)
        assert torch.equal(net.weight.grad, gradient)
        assert opt.state[net.weight]["exp_avg"].count_nonzero() == 0
        opt.state[net.weight]["exp_avg"] += 1
        made(opt, average_opt_statistics=["exp_avg"])
        assert opt.state[net.weight]["exp_avg"].eq(1).all()
        with pytest.raises(ConfigError, match="has no tensor 'exp'"):
            made(opt, average_opt_statistics=["exp"])
        with pytest.raises(ConfigError, match="average_opt_statistics must be a list of names, got 'exp_avg'"):
            made(opt, average_opt_statistics="exp_avg")
        with pytest.raises(ConfigError, match="opt must be a torch optimizer, got Linear"):
            made(net)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="average_parameters must be True or False, got 'no'"):
            made(opt, average_parameters="no")
        with pytest.raises(ConfigError, match="there is nothing to average"):
            made(opt, average_parameters=False)
        with pytest.raises(ConfigError, match="parameter_names has 1 names for 2 parameters"):
            made(opt, parameter_names=["weight"])
