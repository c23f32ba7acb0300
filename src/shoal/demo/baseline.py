"""The comparison: one process alone, with as many sequences per epoch, the same model, optimizer and schedule.

Started by the supervisor when the peers are gone. It may use all cores. It draws its own batches (no peer's), takes one
optimizer step per swarm epoch from as many sequences as the swarm had in it, and is judged on the same held-out text.
It stops at its time limit, done or not.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from shoal.demo.lifeline import Lifeline
from shoal.demo.messages import BaselineConfig, BaselinePoint

__all__ = ["main"]

_JUDGE_EVERY = 4
_ROWS = 64
"""Sequences computed at a time: more than a peer's, for speed. The gradient of an epoch is the same mean either way."""


def main(argument: str) -> None:
    """Train as `argument` (a `BaselineConfig` as JSON) says, and report on stdout."""
    line = Lifeline.hold()
    config = msgspec.json.decode(argument, type=BaselineConfig)
    _train(config, line)
    os._exit(0)  # nothing is left to tidy up, and torch's threads need not be waited for


def _train(config: BaselineConfig, line: Lifeline) -> None:
    # Read when torch loads. Threads that spin while they wait run five times slower as soon as they share their cores
    # with another program.
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
    import torch

    from shoal.demo import training as learn
    from shoal.demo.text import load_corpus

    torch.set_num_threads(os.cpu_count() or 1)
    training = config.training
    corpus = load_corpus(vocabulary_size=training.vocabulary)
    model = learn.make_model(training)
    optimizer = learn.make_optimizer(training, model.parameters())
    schedule = learn.make_schedule(training, optimizer)
    batches = learn.draw_batches(training, corpus, config.stream_seed)
    held_out = learn.held_out(training, corpus)
    line.say(BaselinePoint(epoch=0, samples=0, loss=learn.held_out_loss(model, held_out)))
    end_s = time.monotonic() + config.limit_s
    seen = 0
    for epoch, samples in enumerate(config.epoch_samples, start=1):
        for begin in range(0, samples, _ROWS):
            rows = min(_ROWS, samples - begin)
            loss = model.loss(batches.draw(rows)) * (rows / samples)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seen += samples
        last = epoch == len(config.epoch_samples) or time.monotonic() >= end_s
        if last or epoch % _JUDGE_EVERY == 0:
            line.say(BaselinePoint(epoch=epoch, samples=seen, loss=learn.held_out_loss(model, held_out)))
        if last:
            return


if __name__ == "__main__":
    main(sys.argv[1])
