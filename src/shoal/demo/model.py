"""A small masked language model in plain torch, after ALBERT (Lan et al., 2020, arXiv:1909.11942).

Kept from ALBERT: one transformer layer whose weights are used at every depth, an embedding factorised into a narrow
table and a projection, an output head tied to the table, GELU. Changed, because the run lasts one minute:

- the layer normalises *before* attention and feed-forward (pre-norm), which bears a larger learning rate;
- positions are encoded by a learned bias on the distance between reader and read token (Shaw et al., 2018; T5) instead
of
  absolute positions, and most heads begin by looking at one near neighbour each. With absolute positions the model
  spent its whole minute at the loss of guessing by frequency; with this it leaves that plateau within ten steps.

Shapes in the docstrings: B sequences, T tokens in each, V vocabulary, E embedding width, H hidden width.
The same `ModelConfig` and seed give bit-identical weights in every process; shoal never has to send the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Batch", "MaskedLM", "ModelConfig", "build_model"]

_NEIGHBOUR_SLOPE, _NEIGHBOUR_REACH = 3.0, 4.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        vocabulary: number of tokens V.
        sequence: longest sequence T in tokens.
        embedding: width E of the token table.
        hidden: width H of the layer.
        heads: attention heads; divides `hidden`.
        depth: how many times the one shared layer is applied.
    """

    vocabulary: int
    sequence: int
    embedding: int
    hidden: int
    heads: int
    depth: int


class SharedLayer(nn.Module):
    """One pre-norm transformer layer: attention over all tokens, then a feed-forward of four times the width."""

    distance_index: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.distance_bias = nn.Parameter(_first_distance_bias(config))
        places = torch.arange(config.sequence)
        index = places[None, :] - places[:, None] + config.sequence - 1
        self.register_buffer("distance_index", index, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Refine `hidden` [B, T, H]; returns the same shape."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        wide: Tensor = functional.gelu(self.up(self.feed_forward_norm(hidden)))
        down: Tensor = self.down(wide)
        return hidden + down

    def _attend(self, normed: Tensor) -> Tensor:
        batch, time, width = normed.shape
        parts = self.query_key_value(normed).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [B, heads, T, H / heads]
        bias = self.distance_bias[:, self.distance_index[:time, :time]]
        scores = query @ key.transpose(2, 3) * key.shape[3] ** -0.5 + bias
        attended = scores.softmax(dim=3) @ value
        out: Tensor = self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        return out


class MaskedLM(nn.Module):
    """Guesses masked tokens from the tokens on both sides."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.embedding)
        self.widen = nn.Linear(config.embedding, config.hidden, bias=False)
        self.in_norm = nn.LayerNorm(config.hidden)
        self.layer = SharedLayer(config)
        self.norm = nn.LayerNorm(config.hidden)
        self.narrow = nn.Linear(config.hidden, config.embedding)
        self.out_norm = nn.LayerNorm(config.embedding)
        self.out_bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, inputs: Tensor, chosen: Tensor) -> Tensor:
        """Scores for the chosen places.

        Args:
            inputs: token indices [B, T], some of them masked.
            chosen: indices into the flattened B * T places, [N]: where a guess is wanted.

        Returns:
            Logits [N, V].
        """
        hidden = self.in_norm(self.widen(self.tokens(inputs)))
        for _ in range(self.config.depth):
            hidden = self.layer(hidden)
        guessed = self.norm(hidden).flatten(0, 1).index_select(0, chosen)
        narrow = self.out_norm(functional.gelu(self.narrow(guessed)))
        return functional.linear(narrow, self.tokens.weight, self.out_bias)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats over the masked tokens of `batch`."""
        return functional.cross_entropy(self(batch.inputs, batch.chosen), batch.targets)


def build_model(config: ModelConfig, *, seed: int) -> MaskedLM:
    """The model with its first weights, the same for the same seed; torch's global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MaskedLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and parameter.dim() == 1:
                nn.init.zeros_(parameter)
            elif name == "tokens.weight":
                nn.init.normal_(parameter, std=0.05)  # small: it is also the output head
            elif parameter.dim() == 2 and not name.endswith("distance_bias"):
                # Values added to the residual stream begin at half the size, so that depth does not blow it up.
                damping = 0.5 if name.endswith(("attention_out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=damping * parameter.shape[1] ** -0.5)
    return model


def _first_distance_bias(config: ModelConfig) -> Tensor:
    """[heads, 2T - 1]: the first bias of each head on its scores, by the distance from the reader to the read token.

    The first heads begin as "the token before", "the token after", "two before", ...; the last one sees everything
    alike. From there all of them learn.
    """
    distance = torch.arange(1 - config.sequence, config.sequence, dtype=torch.float32)
    bias = torch.zeros(config.heads, len(distance))
    for head in range(config.heads - 1):
        neighbour = (head // 2 + 1) * (-1 if head % 2 == 0 else 1)
        bias[head] = -_NEIGHBOUR_SLOPE * (distance - neighbour).abs().clamp(max=_NEIGHBOUR_REACH)
    return bias
