"""A peer process of the demo: an ordinary training loop with shoal's optimizer, and reports on stdout.

The main part is `_loop`: loss, backward, step. Around it are the slower machine that this peer plays (it idles in
proportion to its computing), the held-out loss when it is this peer's turn, and the supervisor's few commands.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from shoal import events
from shoal.demo.lifeline import Lifeline
from shoal.demo.messages import TOLD, Finished, HeldOutLoss, PeerConfig, Ready, Working

if TYPE_CHECKING:
    import torch

    from shoal.demo.model import Batch, MaskedLM
    from shoal.demo.training import MaskedBatches
    from shoal.optim.optimizer import Optimizer
    from shoal.runtime.dht import DHT

__all__ = ["main"]

_REPORT_EVERY_S = 0.5
_RATE_OVER_S = 4.0
_LONGEST_WAIT_FOR_LEAVE_S = 300.0


def main(argument: str) -> None:
    """Be the peer that `argument` (a `PeerConfig` as JSON) describes, until the run ends or the supervisor says so."""
    line = Lifeline.hold()
    config = msgspec.json.decode(argument, type=PeerConfig)
    Peer(config, line).run()
    # Everything was left in order; work that other libraries' threads still do is not worth waiting for.
    os._exit(0)


class Reporter:
    """Keeps the supervisor's data and reports it: about twice a second, and at once when the state changes.

    Used from the training loop and, for events, from shoal's thread.

    Args:
        line: the way to the supervisor.
    """

    def __init__(self, line: Lifeline) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._work = Working(state="loading torch")
        self._recent: deque[tuple[float, int]] = deque()  # (when, samples)
        self._due_s = 0.0

    def enter(self, state: str) -> None:
        """The peer does something else now."""
        with self._lock:
            self._work.state = state
            self._tell()

    def trained(self, samples: int, loss: float, epoch: int) -> None:
        """A micro-batch is done."""
        with self._lock:
            work = self._work
            self._recent.append((time.monotonic(), samples))
            work.samples, work.loss, work.epoch = work.samples + samples, loss, epoch
            if work.state != "training" or time.monotonic() >= self._due_s:
                work.state = "training"
                self._tell()

    def happened(self, event: events.Event) -> None:
        """Something happened in the swarm; called in shoal's thread."""
        if isinstance(event, TOLD):
            self._line.say(event)
        with self._lock:
            if isinstance(event, events.GroupFormed):
                self._work.state = "averaging"
                self._tell()
            elif isinstance(event, events.RoundFinished):
                self._work.bytes_sent += event.bytes_sent
                self._work.bytes_received += event.bytes_received

    def _tell(self) -> None:
        now_s = time.monotonic()
        self._due_s = now_s + _REPORT_EVERY_S
        while self._recent and self._recent[0][0] < now_s - _RATE_OVER_S:
            self._recent.popleft()
        # Over the whole window, pauses included; right after the start over the time there has been.
        over_s = max(1.0, now_s - self._recent[0][0]) if self._recent else 1.0
        self._work.samples_per_s = sum(samples for _, samples in self._recent) / over_s
        self._line.say(self._work)


def _join(
    config: PeerConfig, run_id: str, parameters: Iterable[torch.Tensor], on_event: Callable[[events.Event], None]
) -> tuple[DHT, Optimizer]:
    """Join the run; both are to be shut down at the end, the optimizer first.

    Args:
        config: the peer's settings.
        run_id: full name of the run.
        parameters: the model's; in the order in which all peers have them.
        on_event: called with everything that happens, from shoal's own thread.
    """
    from shoal.demo.training import make_optimizer, make_schedule
    from shoal.optim.optimizer import Optimizer
    from shoal.runtime.dht import DHT
    from shoal.strategies import Synchronous

    training = config.training
    dht = DHT(initial_peers=list(config.initial_peers), start=True)
    dht.events.subscribe(on_event)
    return dht, Optimizer(
        dht=dht,
        run_id=run_id,
        strategy=Synchronous(training.target_batch),
        batch_size_per_step=training.micro_batch,
        params=parameters,
        optimizer=lambda params: make_optimizer(training, params),
        scheduler=lambda optimizer: make_schedule(training, optimizer),
    )


class Peer:
    """One peer, from loading torch to leaving.

    Args:
        config: the supervisor's settings for this peer.
        line: the way to it.
    """

    def __init__(self, config: PeerConfig, line: Lifeline) -> None:
        self._config, self._line = config, line
        self._report = Reporter(line)

    def run(self) -> None:
        """Load, join, train to the end, report, leave."""
        self._report.enter("loading torch")
        import torch

        from shoal.demo import training as learn
        from shoal.demo.text import load_corpus

        torch.set_num_threads(1)
        config = self._config
        corpus = load_corpus(vocabulary_size=config.training.vocabulary)
        model = learn.make_model(config.training)
        batches = learn.draw_batches(config.training, corpus, config.stream_seed)
        held_out = learn.held_out(config.training, corpus)

        self._report.enter("joining")
        run_id = f"{config.run_id}-{corpus.digest[:8]}"
        dht, optimizer = _join(config, run_id, model.parameters(), self._report.happened)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._line.say(
            Ready(
                peer_id=str(dht.peer_id),
                run_id=run_id,
                addresses=tuple(map(str, dht.get_visible_maddrs())),
                parameters=parameters,
            )
        )
        optimizer.load_state_from_peers()
        self._loop(optimizer, model, batches, held_out)
        if optimizer.finished:
            loss = learn.held_out_loss(model, held_out)
            digest = learn.weights_sha256(model.parameters())
            self._line.say(Finished(epoch=optimizer.local_epoch, weights_sha256=digest, loss=loss))
            # Others may still need what this peer holds: it leaves when all are there.
            self._line.wait_for_leave(_LONGEST_WAIT_FOR_LEAVE_S)
        optimizer.shutdown()
        dht.shutdown()

    def _loop(self, optimizer: Optimizer, model: MaskedLM, batches: MaskedBatches, held_out: list[Batch]) -> None:
        judged = -1
        while not optimizer.finished and not self._line.wait_for_leave(0):
            if optimizer.local_epoch != judged:
                judged = optimizer.local_epoch
                self._judge(judged, model, held_out)
            begin_s = time.monotonic()
            loss = model.loss(next(batches))
            loss.backward()  # type: ignore[no-untyped-call]
            computed_s = time.monotonic() - begin_s
            optimizer.step()
            optimizer.zero_grad()
            self._report.trained(self._config.training.micro_batch, loss.item(), optimizer.local_epoch)
            time.sleep(computed_s * (1 / self._config.speed - 1))
            last_epoch = self._line.stop_epoch()
            if last_epoch is not None:
                optimizer.announce_end(last_epoch)

    def _judge(self, epoch: int, model: MaskedLM, held_out: list[Batch]) -> None:
        from shoal.demo.training import held_out_loss

        # All peers judge epoch 0: the first loss must not depend on one peer's life.
        if epoch == 0 or epoch % self._config.judge_every == self._config.judge_turn:
            self._line.say(HeldOutLoss(epoch=epoch, loss=held_out_loss(model, held_out)))


if __name__ == "__main__":
    main(sys.argv[1])
