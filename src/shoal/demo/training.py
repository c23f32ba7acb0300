"""The parts that peers and the single process share: batches, model, optimizer, judging, the hash of the weights.

Both build everything here, so that swarm and baseline differ only in the processes that compute the gradients.

Each peer draws its own endless stream of masked batches from its own seed, so that no two peers train on the same ones;
the held-out batches are the same for everybody, masks included, so losses measured by different peers can be compared.
Masking is BERT's (Devlin et al., 2019): of the tokens, 15% are to be guessed; of those 80% show the mask, 10% a random
token, 10% themselves.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shoal.demo.model import Batch, MaskedLM, ModelConfig, build_model
from shoal.demo.settings import Training, warm_up
from shoal.demo.text import MASK, SPECIALS, Corpus

__all__ = [
    "MaskedBatches",
    "draw_batches",
    "held_out",
    "held_out_batches",
    "held_out_loss",
    "make_model",
    "make_optimizer",
    "make_schedule",
    "weights_sha256",
]

_CHOSEN, _SHOWN_AS_MASK, _SHOWN_AS_RANDOM = 0.15, 0.80, 0.10
_HELD_OUT_SEED = 20_000


class MaskedBatches(Iterator[Batch]):
    """Endless masked batches of windows at random places of the training text.

    Args:
        corpus: the text.
        batch_size: sequences per batch.
        sequence: tokens per sequence.
        seed: decides the windows and the masks; another one gives another stream.
    """

    def __init__(self, corpus: Corpus, *, batch_size: int, sequence: int, seed: int) -> None:
        self._tokens = _as_tensor(corpus.train)
        self._vocabulary = len(corpus.tokenizer)
        self._batch_size, self._window = batch_size, torch.arange(sequence)
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Batch:
        return self.draw(self._batch_size)

    def draw(self, rows: int) -> Batch:
        """The next `rows` sequences of the stream."""
        last = len(self._tokens) - len(self._window)
        begins = torch.randint(last + 1, (rows, 1), generator=self._generator)
        return _masked(self._tokens[begins + self._window], self._vocabulary, self._generator)


def held_out_batches(corpus: Corpus, *, batch_size: int, sequence: int, at_most: int = 128) -> list[Batch]:
    """The held-out text in windows that do not overlap, `at_most` sequences, always with the same masks."""
    tokens = _as_tensor(corpus.held_out)
    rows = min(at_most, len(tokens) // sequence)
    windows = tokens[: rows * sequence].view(rows, sequence)
    generator = torch.Generator().manual_seed(_HELD_OUT_SEED)
    return [_masked(window, len(corpus.tokenizer), generator) for window in torch.split(windows, batch_size)]


def _as_tensor(tokens: array[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def _masked(windows: Tensor, vocabulary: int, generator: torch.Generator) -> Batch:
    draw = torch.rand(windows.shape, generator=generator)
    # One draw decides both: below 15% a place is chosen, and its place in that range decides which token is shown.
    chosen = (draw < _CHOSEN).flatten().nonzero().squeeze(1)
    shown = windows.clone()
    shown[draw < _CHOSEN * _SHOWN_AS_MASK] = MASK
    randoms = torch.randint(len(SPECIALS), vocabulary, windows.shape, generator=generator)
    shown = torch.where(
        (draw >= _CHOSEN * _SHOWN_AS_MASK) & (draw < _CHOSEN * (_SHOWN_AS_MASK + _SHOWN_AS_RANDOM)), randoms, shown
    )
    return Batch(shown, chosen, windows.flatten().index_select(0, chosen))


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
