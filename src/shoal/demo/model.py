"""A small masked language model in plain torch, after ALBERT (Lan et al., 2020, arXiv:1909.11942).

Kept from ALBERT: one transformer layer whose weights are used at every depth, an embedding factorised into a narrow table
and a projection, an output head tied to the table, GELU. Changed: the layer normalises *before* attention and
feed-forward (pre-norm), because a run of one minute needs a learning rate that post-norm does not bear.

Shapes in the docstrings: B sequences, T tokens in each, V vocabulary, E embedding width, H hidden width.
The same `ModelConfig` and seed give bit-identical weights in every process; shoal never has to send the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.demo.batches import Batch

__all__ = ["MaskedLM", "ModelConfig", "build_model"]


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

    vocabulary: int = 2048
    sequence: int = 64
    embedding: int = 64
    hidden: int = 128
    heads: int = 4
    depth: int = 3


class SharedLayer(nn.Module):
    """One pre-norm transformer layer: attention over all tokens, then a feed-forward of four times the width."""

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
        offsets = torch.arange(config.sequence)
        self.distance = nn.Parameter(_first_distance_bias(config))
        self.register_buffer("_offsets", offsets[None, :] - offsets[:, None] + config.sequence - 1, persistent=False)

    def _distance_bias(self, time: int) -> Tensor:
        return self.distance[:, self._offsets[:time, :time]]

    def forward(self, hidden: Tensor) -> Tensor:
        """Refine `hidden` [B, T, H]; returns the same shape."""
        batch, time, width = hidden.shape
        parts = self.query_key_value(self.attention_norm(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(2, 3) * key.shape[3] ** -0.5
        attended = (scores + self._distance_bias(time)).softmax(dim=3) @ value
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.down(functional.gelu(self.up(self.feed_forward_norm(hidden))))


def _first_distance_bias(config: ModelConfig) -> Tensor:
    """[heads, 2T - 1]: what each head adds to its scores by the distance from reader to read token.

    The first heads begin as "the token before", "the token after", "two before", ... and the last one sees everything
    alike; from there all of them learn. Finding out where to look is otherwise most of what the first minute goes to.
    """
    offsets = torch.arange(1 - config.sequence, config.sequence, dtype=torch.float32)
    rows = []
    for head in range(config.heads - 1):
        centre = (head // 2 + 1) * (-1 if head % 2 == 0 else 1)
        rows.append(-3.0*(offsets - centre).abs().clamp(max=4) )
    rows.append(torch.zeros_like(offsets))
    return torch.stack(rows)


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
            if name.endswith("distance"): continue
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05 if "tokens" in name else parameter.shape[1]**-0.5*(0.5 if name.endswith(("out.weight","down.weight")) else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
    return model
