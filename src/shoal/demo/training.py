"""The parts that peers and the single process share: model, optimizer, schedule, judging, the hash of the weights.

Both build everything here, so that swarm and baseline differ only in the processes that compute the gradients.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shoal.demo.batches import Batch, MaskedBatches, held_out_batches
from shoal.demo.model import MaskedLM, ModelConfig, build_model
from shoal.demo.settings import Training, warm_up
from shoal.demo.text import Corpus

__all__ = [
    "draw_batches",
    "held_out",
    "held_out_loss",
    "make_model",
    "make_optimizer",
    "make_schedule",
    "weights_sha256",
]


def make_model(training: Training) -> MaskedLM:
    """The model with its first weights."""
    config = ModelConfig(
        vocabulary=training.vocabulary,
        sequence=training.sequence,
        embedding=training.embedding,
        hidden=training.hidden,
        heads=training.heads,
        depth=training.depth,
    )
    return build_model(config, seed=training.seed)


def make_optimizer(training: Training, params: Iterable[Tensor]) -> Optimizer:
    """AdamW with the run's settings."""
    return AdamW(params, lr=training.learning_rate, betas=training.betas)


def make_schedule(training: Training, optimizer: Optimizer) -> LambdaLR:
    """Linear warm-up, then constant; stepped once per epoch."""
    return LambdaLR(optimizer, lambda epoch: warm_up(training, epoch))


def draw_batches(training: Training, corpus: Corpus, stream_seed: int) -> MaskedBatches:
    """An endless stream of masked batches that only `stream_seed` decides."""
    return MaskedBatches(corpus, batch_size=training.micro_batch, sequence=training.sequence, seed=stream_seed)


def held_out(training: Training, corpus: Corpus) -> list[Batch]:
    """The batches on which every loss in the report is measured."""
    return held_out_batches(corpus, batch_size=32, sequence=training.sequence)


@torch.no_grad()
def held_out_loss(model: MaskedLM, batches: Sequence[Batch]) -> float:
    """Mean loss per masked token of `batches`, nats."""
    guesses = sum(len(batch.targets) for batch in batches)
    return sum(model.loss(batch).item() * len(batch.targets) for batch in batches) / guesses


def weights_sha256(parameters: Iterable[Tensor]) -> str:
    """SHA-256 over the bytes of all parameters in order, hexadecimal. Needs no numpy."""
    digest = hashlib.sha256()
    for parameter in parameters:
        tensor = parameter.detach().cpu().contiguous()
        digest.update(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    return digest.hexdigest()
