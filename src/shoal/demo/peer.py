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
from typing import TYPE_CHECKING

import msgspec

from shoal import events
from shoal.demo.lifeline import Lifeline
from shoal.demo.messages import TOLD, Finished, HeldOutLoss, PeerConfig, Ready, Working

if TYPE_CHECKING:
    from shoal.demo.batches import Batch, MaskedBatches
    from shoal.demo.model import MaskedLM
    from shoal.demo.swarm import Membership

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
        self._state, self._epoch = "loading torch", 0
        self._loss: float | None = None
        self._sent = self._received = self._samples = 0
        self._recent: deque[tuple[float, int]] = deque()  # (when, samples)
        self._due_s = 0.0

    def enter(self, state: str) -> None:
        """The peer does something else now."""
        with self._lock:
            self._state = state
            self._tell()

    def trained(self, samples: int, loss: float, epoch: int) -> None:
        """A micro-batch is done."""
        with self._lock:
            self._recent.append((time.monotonic(), samples))
            self._samples += samples
            self._loss, self._epoch = loss, epoch
            if self._state != "training" or time.monotonic() >= self._due_s:
                self._state = "training"
                self._tell()

    def happened(self, event: events.Event) -> None:
        """Something happened in the swarm; called in shoal's thread."""
        if isinstance(event, TOLD):
            self._line.say(event)
        with self._lock:
            if isinstance(event, events.GroupFormed):
                self._state = "averaging"
                self._tell()
            elif isinstance(event, events.RoundFinished):
                self._sent += event.bytes_sent
                self._received += event.bytes_received

    def _tell(self) -> None:
        now_s = time.monotonic()
        self._due_s = now_s + _REPORT_EVERY_S
        while self._recent and self._recent[0][0] < now_s - _RATE_OVER_S:
            self._recent.popleft()
        # Over the whole window, pauses included; right after the start over the time there has been.
        over_s = max(1.0, now_s - self._recent[0][0]) if self._recent else 1.0
        self._line.say(
            Working(
                state=self._state,
                epoch=self._epoch,
                samples=self._samples,
                samples_per_s=sum(samples for _, samples in self._recent) / over_s,
                loss=self._loss,
                bytes_sent=self._sent,
                bytes_received=self._received,
            )
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
        from shoal.demo.swarm import join
        from shoal.demo.text import load_corpus

        torch.set_num_threads(1)
        config = self._config
        corpus = load_corpus(vocabulary_size=config.training.vocabulary)
        model = learn.make_model(config.training)
        batches = learn.draw_batches(config.training, corpus, config.stream_seed)
        held_out = learn.held_out(config.training, corpus)

        self._report.enter("joining")
        member = join(config, f"{config.run_id}-{corpus.digest[:8]}", model.parameters(), self._report.happened)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._line.say(
            Ready(peer_id=member.peer_id, run_id=member.run_id, addresses=member.addresses, parameters=parameters)
        )
        member.catch_up()
        self._loop(member, model, batches, held_out)
        if member.finished:
            loss = learn.held_out_loss(model, held_out)
            digest = learn.weights_sha256(model.parameters())
            self._line.say(Finished(epoch=member.epoch, weights_sha256=digest, loss=loss))
            # Others may still need what this peer holds: it leaves when all are there.
            self._line.wait_for_leave(_LONGEST_WAIT_FOR_LEAVE_S)
        member.leave()

    def _loop(self, member: Membership, model: MaskedLM, batches: MaskedBatches, held_out: list[Batch]) -> None:
        judged = -1
        while not member.finished and not self._line.told_to_leave:
            if member.epoch != judged:
                judged = member.epoch
                self._judge(judged, model, held_out)
            begin_s = time.monotonic()
            loss = model.loss(next(batches))
            loss.backward()  # type: ignore[no-untyped-call]
            computed_s = time.monotonic() - begin_s
            member.step()
            self._report.trained(self._config.training.micro_batch, loss.item(), member.epoch)
            time.sleep(computed_s * (1 / self._config.speed - 1))
            last_epoch = self._line.stop_epoch()
            if last_epoch is not None:
                member.announce_end(last_epoch)

    def _judge(self, epoch: int, model: MaskedLM, held_out: list[Batch]) -> None:
        from shoal.demo.training import held_out_loss

        # All peers judge epoch 0: the first loss must not depend on one peer's life.
        if epoch == 0 or epoch % self._config.judge_every == self._config.judge_turn:
            self._line.say(HeldOutLoss(epoch=epoch, loss=held_out_loss(model, held_out)))


if __name__ == "__main__":
    main(sys.argv[1])
