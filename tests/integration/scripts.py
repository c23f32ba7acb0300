"""What a worker process can run (see `workers`). Each script is a function; `say` and `hear` are its lines to the test.

Run as `python -m tests.integration.scripts`: reads `[script, arguments]` from stdin, one after another.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import shoal
from shoal.compression import CompressionBase, Float16Compression, NoCompression
from shoal.events import Event, GroupFormed, PeerLost

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
        both.update(bytes(tensor.detach().contiguous().view(torch.uint8).flatten().numpy()))
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
    group: int,
    dtype: str = "float32",
    codec: str = "none",
    rounds: int = 1,
    **options: Any,
) -> None:
    """Average at the test's word, once for each of `rounds`; says the outcome and a hash of the values each time.

    The word is the size of the group to wait for; in the first round it is `group`.
    """
    with joined(initial_peers) as dht:
        for round_ in range(rounds):
            tensors = tensors_of(rank + 100 * round_, shapes, dtype)
            before = digest(tensors)
            size = group if round_ == 0 else hear()
            averager = shoal.DecentralizedAverager(
                tensors,
                dht,
                start=True,
                prefix=f"average{round_}",
                target_group_size=size,
                compression=CODECS[codec],
                **options,
            )
            said: dict[str, Any]
            try:
                gathered = averager.step(gather=rank, timeout=60, allow_retries=round_ > 0)
                said = {"ok": True, "ranks": sorted(gathered.values())}
            except shoal.RoundFailed as error:
                said = {"ok": False, "reason": error.reason, "blamed": [str(peer) for peer in error.peers]}
            said["hash"], said["untouched"] = digest(tensors), digest(tensors) == before
            said["first"] = [float(tensor.flatten()[0]) for tensor in tensors]
            averager.shutdown()
            say("round", said)


def rewrite(*, initial_peers: Sequence[str], count: int, numel: int) -> None:
    """A donor that rewrites all its tensors as fast as it can, under the lock, until the test says something."""
    tensors = [torch.zeros(numel) for _ in range(count)]
    over = threading.Event()
    threading.Thread(target=lambda: (hear(), over.set()), daemon=True).start()
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


def wait_alone(*, initial_peers: Sequence[str]) -> None:
    """Step where nobody comes, until Ctrl+C; says how it ended and whether signal handlers are the user's still."""
    before = signal.getsignal(signal.SIGINT)
    with joined(initial_peers) as dht:
        tensor = torch.ones(4)
        with shoal.DecentralizedAverager([tensor], dht, start=True, prefix="alone") as averager:
            say("handlers kept", signal.getsignal(signal.SIGINT) is before)
            threading.Thread(target=_say_when_looking, args=(averager,), daemon=True).start()
            began = time.monotonic()
            try:
                averager.step(timeout=300)
            except KeyboardInterrupt:
                say("interrupted", time.monotonic() - began)
            hear()
            try:
                averager.step(timeout=0.5)
            except shoal.RoundFailed as error:
                say("again", error.reason)


def _say_when_looking(averager: Any) -> None:
    pause = threading.Event()
    while not averager._averager.looking:
        pause.wait(0.01)
    say("looking")


def train(*, initial_peers: Sequence[str], epochs: int, seed: int) -> None:
    """A small run with the optimizer; says where it stands each time the epoch changes, and the weights at its end."""
    with joined(initial_peers) as dht:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        swarm = shoal.Optimizer(
            dht=dht,
            run_id="small",
            target_batch_size=64,
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


SCRIPTS: dict[str, Callable[..., None]] = {
    script.__name__: script for script in (average, rewrite, wait_alone, train, load_with_forked_workers)
}


def main() -> None:
    """Run what the test asks for, until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            SCRIPTS[name](**arguments)
        except BaseException:
            say("failed", traceback.format_exc())
        else:
            say("ended")


if __name__ == "__main__":
    main()
