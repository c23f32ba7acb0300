"""What the study trains: a small language model that predicts the next token, on the demo's text.

The demo's own model learns from the 15% of tokens that are masked. Here all tokens count: so in as much computing there
are seven times as many, and a run takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.strategies.reference import Peer
from shoal.demo.text import load_corpus

__all__ = ["CONTEXT", "PEERS", "NextToken", "Task"]

PEERS = 4
VOCABULARY, CONTEXT, WIDTH, HEADS, DEPTH = 256, 32, 32, 2, 1
_FIRST_RATE, _WARM_UP, _LAST_RATE = 8e-3, 0.02, 0.1
_JUDGED_AT_ONCE = 64


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    later: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("later", torch.full((CONTEXT, CONTEXT), -math.inf).triu(1), persistent=False)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, time, _ = hidden.shape
        parts = self.query_key_value(self.attention_norm(hidden)).view(rows, time, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(2, 3) * key.shape[3] ** -0.5 + self.later
        attended = scores.softmax(3) @ value
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(rows, time, WIDTH))
        wide: Tensor = functional.relu(self.up(self.feed_forward_norm(hidden)))
        return hidden + self.down(wide)


class NextToken(nn.Module):
    """Predicts each token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers, self.norm = nn.Sequential(*(Layer() for _ in range(DEPTH))), nn.LayerNorm(WIDTH)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, windows: Tensor) -> Tensor:
        """The mean cross-entropy of windows [rows, CONTEXT + 1], nats for each token."""
        hidden = self.norm(self.layers(self.tokens(windows[:, :-1]) + self.places.weight))
        scores = functional.linear(hidden, self.tokens.weight)
        return functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


@cache
def _text() -> tuple[Tensor, Tensor]:
    """To learn from, and held out."""
    corpus = load_corpus(vocabulary_size=VOCABULARY)
    return torch.tensor(corpus.train, dtype=torch.int64), torch.tensor(corpus.held_out, dtype=torch.int64)


def _learner(model: NextToken, seeds: Sequence[int], rows: int) -> Callable[[], int]:
    """Makes the gradients of one step, from the streams of these seeds."""
    text, window = _text()[0], torch.arange(CONTEXT + 1)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def learn() -> int:
        begins = [torch.randint(len(text) - CONTEXT, (rows, 1), generator=generator) for generator in generators]
        batch = text[torch.cat(begins) + window]
        torch.autograd.backward(model(batch))
        return len(batch)

    return learn


@cache
def _first_weights(seed: int, steps: int, rows: int) -> dict[str, Tensor]:
    """After so many synchronous steps, which every run has behind it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NextToken()
    inner = torch.optim.AdamW(model.parameters(), lr=_FIRST_RATE, betas=(0.9, 0.95), fused=True)
    learn = _learner(model, [1000 * seed + 100 + number for number in range(PEERS)], rows)
    for step in range(steps):
        inner.param_groups[0]["lr"] = _FIRST_RATE * min((step + 1) / 50, 1.0)
        inner.zero_grad()
        learn()
        inner.step()
    return model.state_dict()


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training: the same first weights and streams for the same seed.

    Attributes:
        seed: decides the first weights, and the samples of each peer.
        steps: of each peer, if all are as fast.
        rate: the inner learning rate, after a warm-up of a twentieth of the steps; at the end a tenth of it (cosine).
        rows: windows in a peer's step; 32 tokens each.
        beta2: of AdamW.
        begun: synchronous steps that the first weights have behind them, at a rate of 0.008.
    """

    seed: int
    steps: int = 1200
    rate: float = 4e-3
    rows: int = 16
    beta2: float = 0.95
    begun: int = 400

    @property
    def samples(self) -> int:
        """Of all peers, in the whole run."""
        return PEERS * self.rows * self.steps

    def model(self) -> NextToken:
        """With its first weights."""
        model = NextToken()
        model.load_state_dict(_first_weights(self.seed, self.begun, self.rows))
        return model

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return torch.optim.AdamW(parameters, lr=self.rate, betas=(0.9, self.beta2), fused=True)

    def rate_at(self, part: float) -> float:
        """The inner learning rate when this part of the samples is trained."""
        decay = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * part)) / 2
        return self.rate * min(part / _WARM_UP, 1.0) * decay

    def peer(self, *streams: int) -> Peer:
        """A peer, which learns from a stream of its own; with several streams from all of them at once."""
        model = self.model()
        parameters: list[Tensor] = list(model.parameters())
        seeds = [1000 * self.seed + number for number in streams]
        return Peer(parameters, self.optimizer(parameters), _learner(model, seeds, self.rows))

    @torch.no_grad()
    def loss(self, parameters: Sequence[Tensor]) -> float:
        """The held-out loss of these parameters, nats for each token."""
        model, text = self.model(), _text()[1]
        for own, value in zip(model.parameters(), parameters, strict=True):
            own.copy_(value)
        windows = text.unfold(0, CONTEXT + 1, CONTEXT)
        return sum(model(some).item() * len(some) for some in windows.split(_JUDGED_AT_ONCE)) / len(windows)
