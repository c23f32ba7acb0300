"""What a worker process can run (see `workers`). Each script is a function; `say` and `hear` are its lines to the test.

Run as `python -m tests.integration.scripts`: reads `[script, arguments]` from stdin, one after another.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import shoal
from shoal.base.clock import SystemClock
from shoal.compression import CompressionBase, Float16Compression, NoCompression, view_bytes
from shoal.events import EpochAdvanced, Event, GroupFormed, PeerLost

CODECS: dict[str, CompressionBase] = {"none": NoCompression(), "float16": Float16Compression()}

_saying = threading.Lock()


def say(kind: str, value: Any = None) -> None:
    """Tell the test something; from any thread."""
    with _saying:
        sys.stdout.write(json.dumps([kind, value]) + "\n")
        sys.stdout.flush()


def hear() -> Any:
    """What the test says next."""
    return json.loads(sys.stdin.readline())


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """A hash of all bits."""
    both = hashlib.sha256()
    for tensor in tensors:
        both.update(view_bytes(tensor.detach().contiguous()))
    return both.hexdigest()


@contextmanager
def joined(initial_peers: Sequence[str], **options: Any) -> Iterator[shoal.DHT]:
    """A peer, for as long as the block lasts; says what happens that tests wait for."""
    dht = shoal.DHT(initial_peers, start=True, **options)

    def tell(event: Event) -> None:
        if isinstance(event, GroupFormed):
            say("group", [str(peer) for peer in event.peers])
        elif isinstance(event, PeerLost):
            say("lost", [str(event.peer), event.reason])

    dht.events.subscribe(tell)
    with dht:
        say("joined", [str(dht.peer_id), [str(address) for address in dht.get_visible_maddrs()]])
        yield dht


def tensors_of(rank: int, shapes: Sequence[Sequence[int]], dtype: str) -> list[torch.Tensor]:
    """This peer's values: they follow from its rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes]


def average(
    *,
    initial_peers: Sequence[str],
    rank: int,
    shapes: Sequence[Sequence[int]],
    dtype: str = "float32",
    codec: str = "none",
    **options: Any,
) -> None:
    """Average once for each word of the test, until the word is null; says the outcome and a hash of the values.

    The word is the size of the group that counts: smaller groups, that form while others are not there yet, do not.
    """
    with joined(initial_peers) as dht:
        sizes = [0]
        dht.events.subscribe(lambda event: sizes.append(len(event.peers)) if isinstance(event, GroupFormed) else None)
        tensors = tensors_of(rank, shapes, dtype)
        averager = shoal.DecentralizedAverager(
            tensors, dht, start=True, prefix="average", compression=CODECS[codec], **options
        )
        while (size := hear()) is not None:
            said: dict[str, Any] = {}
            del sizes[1:]
            while sizes[-1] != size:
                with averager.get_tensors():
                    for tensor, first in zip(tensors, tensors_of(rank, shapes, dtype), strict=True):
                        tensor.copy_(first)
                before = digest(tensors)
                try:
                    gathered = averager.step(gather=rank, timeout=20, allow_retries=False)
                    said = {"ok": True, "ranks": sorted(gathered.values())}
                except shoal.RoundFailed as error:
                    said = {"ok": False, "reason": error.reason, "blamed": [str(peer) for peer in error.peers]}
                said["untouched"] = digest(tensors) == before
            said["hash"] = digest(tensors)
            said["first"] = [float(tensor.flatten()[0]) for tensor in tensors]
            say("round", said)


def rewrite(*, initial_peers: Sequence[str], count: int, numel: int) -> None:
    """A donor that rewrites all its tensors as fast as it can, under the lock, until the test says something."""
    tensors = [torch.zeros(numel) for _ in range(count)]
    over = threading.Event()

    def wait_for_the_end() -> None:
        hear()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with (
        joined(initial_peers) as dht,
        shoal.DecentralizedAverager(tensors, dht, start=True, prefix="state", declare_state_period=1.0) as averager,
    ):
        version = 0
        while not over.wait(0.002):
            version += 1
            with averager.get_tensors() as held:
                for tensor in held:
                    tensor.fill_(version)
        say("versions", version)


def train(*, initial_peers: Sequence[str], epochs: int, seed: int) -> None:
    """A small run with the optimizer; says where it stands each time the epoch changes, and the weights at its end."""
    with joined(initial_peers) as dht:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        swarm = shoal.Optimizer(
            dht=dht,
            run_id="small",
            target_batch_size=1024,
            batch_size_per_step=8,
            params=model.parameters(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        )
        swarm.announce_end(epochs)
        generator = torch.Generator().manual_seed(seed)
        said = -1
        while not swarm.finished:
            inputs = torch.randn(8, 8, generator=generator)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            swarm.step()
            swarm.zero_grad()
            if swarm.local_epoch != said:
                said = swarm.local_epoch
                say("epoch", said)
        say("weights", digest(list(model.parameters())))
        hear()


def keep_training(*, initial_peers: Sequence[str], seed: int, clock_ahead_s: float = 0.0) -> None:
    """A small run until the epoch that the test names; says each epoch, and the weights at its end."""
    if clock_ahead_s:
        wrong: Any = lambda self: time.time() + clock_ahead_s  # noqa: E731
        SystemClock.time = wrong  # type: ignore[method-assign]
    with joined(initial_peers) as dht:

        def tell(event: Event) -> None:
            if isinstance(event, EpochAdvanced):
                say("epoch", [event.epoch, event.peers])

        dht.events.subscribe(tell)
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        swarm = shoal.Optimizer(
            dht=dht,
            run_id="small",
            target_batch_size=64,
            batch_size_per_step=8,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        )
        say("ready")
        hearing, pace = threading.Thread(target=lambda: swarm.announce_end(hear()), daemon=True), threading.Event()
        hearing.start()
        generator = torch.Generator().manual_seed(seed)
        while not swarm.finished:
            inputs = torch.randn(8, 8, generator=generator)
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            pace.wait(0.02)
            swarm.step()
            swarm.zero_grad()
        say("weights", digest(list(model.parameters())))
        hearing.join()
        hear()


def load_with_forked_workers(*, initial_peers: Sequence[str]) -> None:
    """Have two forked DataLoader workers, and do nothing."""
    with joined(initial_peers):
        data = torch.utils.data.TensorDataset(torch.arange(1000))
        loader = torch.utils.data.DataLoader(
            data, num_workers=2, multiprocessing_context="fork", persistent_workers=True
        )
        batches = iter(loader)
        next(batches)
        say("workers", [worker.pid for worker in batches._workers])  # type: ignore[attr-defined]
        hear()


def average_once(invite: str, prefix: str) -> None:
    """Average ones with whoever is there; for a process that `multiprocessing` has started."""
    with shoal.DHT([invite], start=True) as dht:
        tensor = torch.ones(4)
        with shoal.DecentralizedAverager([tensor], dht, start=True, prefix=prefix) as averager:
            averager.step(timeout=60)
        assert tensor.tolist() == [0.5] * 4


SCRIPTS: dict[str, Callable[..., None]] = {
    script.__name__: script for script in (average, rewrite, train, keep_training, load_with_forked_workers)
}


def main() -> None:
    """Run what the test asks for, until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            SCRIPTS[name](**arguments)
        except BaseException:  # noqa: BLE001 (the test is told, and fails)
            say("failed", traceback.format_exc())
        else:
            say("ended")


if __name__ == "__main__":
    main()
