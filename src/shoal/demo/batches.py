"""Masked-token batches from the demo's text, as tensors.

Each peer draws its own endless stream from its own seed, so that no two peers train on the same batches; the held-out
batches are the same for everybody, masks included, so losses measured by different peers can be compared.
Masking is BERT's (Devlin et al., 2019): of the tokens, 15% are to be guessed; of those 80% show the mask, 10% a random
token, 10% themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.demo.text import MASK, SPECIALS, Corpus

__all__ = ["Batch", "MaskedBatches", "held_out_batches"]

_CHOSEN, _SHOWN_AS_MASK, _SHOWN_AS_RANDOM = 0.15, 0.80, 0.10
_HELD_OUT_SEED = 20_000


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences to learn from, or to be judged on.

    Attributes:
        inputs: token indices [B, T], masked.
        chosen: indices into the flattened places [N] whose token is to be guessed.
        targets: the tokens that were there [N].
    """

    inputs: Tensor
    chosen: Tensor
    targets: Tensor


class MaskedBatches(Iterator[Batch]):
    """Endless masked batches of windows at random places of the training text.

    Args:
        corpus: the text.
        vocabulary: number of tokens, for the random replacements.
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
