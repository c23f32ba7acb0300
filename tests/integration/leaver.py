"""A program that leaves on SIGTERM: what the tests of `leave_on_sigterm` run, as a process of its own.

Run as `python -m tests.integration.leaver HOW ADDRESS`, HOW being what its main thread does when the signal comes:
`search` (in step(), nobody is there), `round` (in step(), in a round), `compute` (a loop of its own), `again` (that, in
a block that is entered for the second time), `outside` (the block is over), `nowhere` (another thread enters the
block), `polite` (with exit_code=None); `asleep` (as `search`, and the signal is delivered to another thread), `fork` (a
child of this program gets it), `impatient` (as `round`, with next to no grace), `train` (an optimizer). JSON lines on
stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import torch

import shoal
from shoal.events import Event, GroupFormed, RoundFinished
from shoal.runtime.leave import Leaving

NUMEL = 8_000_000


def say(kind: str, value: Any = None) -> None:
    """Tell the test; from any thread."""
    sys.stdout.write(json.dumps([kind, value]) + "\n")
    sys.stdout.flush()


def main(how: str, address: str) -> None:
    """Do it."""
    torch.set_num_threads(1)
    numel = NUMEL if how == "round" else 100
    grace_s = 0.2 if how == "impatient" else 20.0
    with shoal.DHT([address], start=True) as dht:
        dht.events.subscribe(tell)
        tensor = torch.full((numel,), 2.0)
        averager = shoal.DecentralizedAverager([tensor], dht, start=True, prefix="leave")
        if how == "nowhere":
            thread = threading.Thread(target=enter, args=(dht,))
            thread.start()
            thread.join()
            return
        before = signal.getsignal(signal.SIGTERM)
        try:
            leaving = shoal.leave_on_sigterm(dht, grace_s=grace_s, exit_code=None if how == "polite" else 143)
            if how == "again":
                with leaving:
                    pass
            with leaving:
                work(how, averager, leaving)
        finally:
            say("restored", signal.getsignal(signal.SIGTERM) is before)
        if how == "outside":
            say("ready", str(dht.peer_id))
            sys.stdin.readline()
        say("end", [float(tensor[0]), leaving.requested])


def tell(event: Event) -> None:
    """What the test waits for."""
    if isinstance(event, GroupFormed | RoundFinished):
        say(type(event).__name__, [str(peer) for peer in event.peers])


def watch(leaving: Leaving) -> None:
    """Say when the signal was noticed."""
    while not leaving.requested:
        threading.Event().wait(0.005)
    say("requested")


def hear() -> None:
    """Take the signal for this thread: the main one sleeps on, as if it had come just before that fell asleep."""
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def train(dht: shoal.DHT, leaving: Leaving) -> None:
    """An ordinary loop; says each epoch."""
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="leave",
        target_batch_size=64,
        batch_size_per_step=1,
        optimizer=torch.optim.SGD([weight], lr=0.01),
        matchmaking_time=2.0,
    )
    while not leaving.requested:
        (weight - 1.0).square().sum().backward()  # type: ignore[no-untyped-call]
        epoch = optimizer.local_epoch
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.local_epoch != epoch:
            say("epoch", optimizer.local_epoch)


def enter(dht: shoal.DHT) -> None:
    """Where it cannot work."""
    try:
        with shoal.leave_on_sigterm(dht):
            say("entered")
    except shoal.ShoalError as error:
        say("refused", str(error))


def work(how: str, averager: shoal.DecentralizedAverager, leaving: Leaving) -> None:
    """What the main thread is at."""
    threading.Thread(target=watch, args=(leaving,), daemon=True).start()
    say("ready", str(averager.peer_id))
    if how == "asleep":
        threading.Thread(target=hear, daemon=True).start()
        averager.step(timeout=60)
    elif how == "fork":
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writes, b"!")
            signal.pause()
        os.read(reads, 1)
        os.kill(child, signal.SIGTERM)
        say("child", os.WTERMSIG(os.waitpid(child, 0)[1]))
        say("requested", leaving.requested)
    elif how == "train":
        train(averager.dht, leaving)
    elif how in ("search", "round", "impatient"):
        averager.step(timeout=60)
        say("stepped")
        averager.step(timeout=60)
    elif how in ("compute", "again"):
        matrix = torch.ones(200, 200)
        while True:
            matrix = (matrix @ matrix).clamp_(-1, 1)
    elif how == "polite":
        try:
            averager.step(timeout=60)
        except shoal.ShoalError as error:
            say("step", type(error).__name__)
        while not leaving.done:
            threading.Event().wait(0.01)
        say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
