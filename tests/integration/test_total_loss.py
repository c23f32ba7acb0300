"""All peers of a run have died, and come back in any order, from checkpoints of different ages, some damaged."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import shoal

BATCH, TARGET = 4, 8
AGES = (3, 6, 9, 12)
MORE = 10
"""The run goes on for so many epochs when all are there."""


class Ended(NamedTuple):
    """What one peer has at the end."""

    resumed: int
    epoch: int
    weights: torch.Tensor


def begin(dht: shoal.DHT, folder: Path, seed: int) -> tuple[torch.nn.Linear, shoal.Optimizer]:
    """A peer of the run, with its checkpoints in this folder."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3)
    swarm = shoal.Optimizer(
        dht=dht,
        run_id="run",
        target_batch_size=TARGET,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        model=model,
        checkpoint=folder,
        save_every=10_000,
    )
    return model, swarm


def train(model: torch.nn.Linear, swarm: shoal.Optimizer, over: Callable[[], bool]) -> None:
    """One batch after another, until it is over or the run has ended."""
    while not (over() or swarm.finished):
        swarm.zero_grad()
        model(torch.randn(BATCH, 5)).square().mean().backward()
        swarm.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A folder with one checkpoint for each age, of one run."""
    folders = {age: tmp_path_factory.mktemp(f"age-{age}") for age in AGES}
    with shoal.DHT(start=True) as dht:
        model, swarm = begin(dht, tmp_path_factory.mktemp("first"), 0)
        waiting = list(folders)

        def save_when_due() -> bool:
            if waiting and swarm.local_epoch >= waiting[0]:
                swarm.save(folders[waiting.pop(0)])
            return not waiting

        train(model, swarm, save_when_due)
        swarm.shutdown()
    return folders


def damage(folder: Path, rng: random.Random) -> str:
    """Let a disk spoil the checkpoint in this folder; returns what was done."""
    (checkpoint,) = folder.glob("epoch-*")
    how = rng.choice(("cut", "flipped", "removed", "nonsense"))
    victim = checkpoint / rng.choice(("checkpoint.json", "model.safetensors", "state.safetensors"))
    data = bytearray(victim.read_bytes())
    if how == "cut":
        victim.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[-5] ^= 0x55
        victim.write_bytes(data)
    elif how == "removed":
        victim.unlink()
    else:
        victim.write_bytes(rng.randbytes(len(data)))
    return f"{victim.name} {how}"


class Return:
    """Five peers come back: three of different ages, one whose checkpoint is damaged, one whose disk is empty.

    Args:
        saved: the checkpoints.
        folder: where the peers have theirs.
        seed: of ages, damage and order, and of whether all come at once or each when the one before trains.
    """

    def __init__(self, saved: dict[int, Path], folder: Path, seed: int) -> None:
        rng = random.Random(seed)
        self.folders = [folder / str(number) for number in range(5)]
        self.ages = rng.sample(AGES, 4)
        for place, age in zip(self.folders, self.ages, strict=False):
            shutil.copytree(saved[age], place)
        what = damage(self.folders[3], rng)
        self.order, self.at_once = rng.sample(range(5), 5), rng.random() < 0.5
        self.told = f"seed {seed}: ages {self.ages}, of the fourth {what}; order {self.order}; at once {self.at_once}"
        self.ended: dict[int, Ended] = {}
        self.trains = {number: threading.Event() for number in self.order}
        self.epochs: dict[int, int] = {}

    def peer(self, dht: shoal.DHT, number: int) -> None:
        """Train until all are there, and then on to the end of the run."""
        model, swarm = begin(dht, self.folders[number], number + 1)
        resumed = swarm.local_epoch
        train(model, swarm, lambda: swarm.local_epoch > resumed)
        self.trains[number].set()
        train(model, swarm, lambda: all(event.is_set() for event in self.trains.values()))
        self.epochs[number] = swarm.local_epoch
        train(model, swarm, lambda: len(self.epochs) == len(self.order))
        swarm.announce_end(max(self.epochs.values()) + MORE)
        train(model, swarm, lambda: False)
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        self.ended[number] = Ended(resumed, swarm.local_epoch, weights.clone())
        swarm.shutdown()

    def play(self) -> None:
        """All come, and train to the end. They have one state then."""
        networks, threads = [shoal.DHT(start=True)], list[threading.Thread]()
        try:
            for number in self.order:
                if threads:
                    networks.append(shoal.DHT([str(networks[0].get_visible_maddrs()[0])], start=True))
                threads.append(threading.Thread(target=self.peer, args=(networks[-1], number), daemon=True))
                threads[-1].start()
                if not self.at_once:
                    assert self.trains[number].wait(60.0), self.told
            for thread in threads:
                thread.join(60.0)
        finally:
            for network in reversed(networks):
                network.shutdown()
        ended = self.ended
        assert sorted(ended) == list(range(5)), self.told
        assert [ended[number].resumed for number in range(3)] == self.ages[:3], self.told
        assert {each.epoch for each in ended.values()} == {max(self.epochs.values()) + MORE}, f"{self.told}: {ended}"
        assert all(torch.equal(each.weights, ended[0].weights) for each in ended.values()), f"{self.told}: {ended}"


@pytest.mark.parametrize("seed", [1])
def test_all_have_died_and_come_back(saved: dict[int, Path], tmp_path: Path, seed: int) -> None:
    """All end with one state, whoever comes first, and no damaged checkpoint keeps its peer out."""
    Return(saved, tmp_path, seed).play()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_have_died_and_come_back_in_many_orders(
    saved: dict[int, Path], tmp_path: Path, soak: Callable[[int, int], int]
) -> None:
    """The same for many seeds: ages, damages, orders, at once or one after another."""
    for seed in range(2, 2 + soak(1, 60)):
        Return(saved, tmp_path / str(seed), seed).play()
