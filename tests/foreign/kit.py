"""Two peers run one program, each with a DHT and a thread of its own, and end with equal weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

import shoal
from shoal.events import Event, Warned
from tests.integration.workers import LONG_S, until

PEERS = 2

_OF_PACE = ("the download of the state took", "training alone", "this peer has made no step of it")
"""Rightly said of epochs of some milliseconds, of which one of two threads misses some on a busy machine."""


class Ended(NamedTuple):
    """What one peer has at the end.

    Attributes:
        weights: all tensors of the models' state dictionaries.
        epochs: of its optimizers.
        counted: samples that its optimizers counted, whether they went into steps or not.
        warnings: that it was given.
    """

    weights: list[torch.Tensor]
    epochs: list[int]
    counted: list[int]
    warnings: list[str]


class Peer:
    """One of the two, as its program sees it.

    Args:
        number: 0 or 1.
        dht: its own.
        start: all programs have come so far.
    """

    def __init__(self, number: int, dht: shoal.DHT, start: threading.Barrier) -> None:
        self.number, self.dht, self._start = number, dht, start
        self.warnings: list[str] = []
        dht.events.subscribe(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, Warned) and not any(text in event.message for text in _OF_PACE):
            self.warnings.append(event.message)

    def meet(self, *optimizers: shoal.Optimizer) -> None:
        """Wait until both peers have made their optimizers and know each other."""
        self._start.wait(LONG_S)
        for optimizer in optimizers:
            until(lambda optimizer=optimizer: len(optimizer.status().peers) == PEERS)
        self._start.wait(LONG_S)

    def ended(self, models: list[torch.nn.Module], optimizers: list[shoal.Optimizer]) -> Ended:
        """The program is over."""
        weights = [each.detach().clone() for model in models for each in model.state_dict().values()]
        status = [optimizer.status() for optimizer in optimizers]
        epochs = [optimizer.local_epoch for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.shutdown()
        return Ended(weights, epochs, [each.contributed + each.dropped for each in status], self.warnings)


Program = Callable[[Peer], Ended]


def together(program: Program) -> list[Ended]:
    """Run the program as two peers; returns how each of them ended.

    Raises:
        BaseException: that of a program.
    """
    results: list[Ended | BaseException] = [RuntimeError("it did not end in time")] * PEERS
    start = threading.Barrier(PEERS)
    first = shoal.DHT(start=True)
    networks = [first, *(shoal.DHT([str(first.get_visible_maddrs()[0])], start=True) for _ in range(1, PEERS))]

    def run(number: int) -> None:
        try:
            results[number] = program(Peer(number, networks[number], start))
        except BaseException as error:  # noqa: BLE001 (raised below)
            results[number] = error
            start.abort()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(PEERS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
    finally:
        for network in reversed(networks):
            network.shutdown()
    broken = [each for each in results if isinstance(each, BaseException)]
    for error in sorted(broken, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return [each for each in results if isinstance(each, Ended)]
