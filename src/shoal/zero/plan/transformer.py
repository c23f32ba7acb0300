"""How many bytes of activations a transformer keeps for its backward pass.

Of each layer, with b samples of s tokens, hidden states of width h, and a heads, in 16 bits:

======================================  ==========================================================
kept                                    bytes
======================================  ==========================================================
everything                              sbh (34 + 5 as/h)
everything, with flash attention        34 sbh: it computes the matrices of s x s scores again
only the layer's input (checkpointing)  2 sbh; and everything of the one layer that is recomputed
======================================  ==========================================================

Of the 34 are 32 in sixteen values of 2 bytes (inputs of two norms, of the linear layers and of GELU; queries, keys,
values), and 2 in the masks of two dropouts. Of the 5 are 4 in the softmax and in what dropout makes of it, and 1 in its
mask. So values of 4 bytes make it 66 and 9, and a model without dropout 32 and 2.

With a vocabulary of v words the last norm, the last linear layer and the embedding's dropout add 5 sbh, and the logits,
which are in 32 bits, 4 sbv. Not counted are memory that is only needed within an operation, and the allocator's.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), sections 4 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import ConfigError

__all__ = ["Transformer"]

_HEAD = 128
"""The width of a head, and the ratio of width to depth, of GPT-3 (6.7 and 175 billion parameters) and of Llama 7B."""
_LAYER = 12
"""A layer has so many times its width squared parameters: 4 in attention, 8 in the two linear layers behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The shape of a transformer, and of one micro-batch of a rank.

    Attributes:
        batch: samples in the micro-batch.
        sequence: tokens in each.
        layers: how many.
        hidden: the width of the hidden states; the linear layers within are 4 times as wide.
        heads: of attention; they divide `hidden`.
        vocabulary: words whose logits are computed; 0 leaves out the model's end, as the paper's law of a layer does.
        dropout: whether the layers have it.
        flash: whether attention recomputes its scores, as flash attention does.
        checkpointing: whether only the input of each layer is kept; all of one layer is there while it is recomputed.

    Raises:
        ConfigError: a number is below 1 (`vocabulary`: below 0), or `heads` do not divide `hidden`; it is named.
    """

    batch: int
    sequence: int
    layers: int
    hidden: int
    heads: int
    vocabulary: int = 0
    dropout: bool = True
    flash: bool = False
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "layers", "hidden", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vocabulary < 0:
            raise ConfigError(f"vocabulary must be at least 0, got {self.vocabulary}")
        if self.hidden % self.heads:
            raise ConfigError(f"heads must divide hidden: {self.heads} do not divide {self.hidden}")

    @classmethod
    def of(
        cls,
        parameters: float,
        *,
        batch: int,
        sequence: int,
        layers: int | None = None,
        hidden: int | None = None,
        heads: int | None = None,
    ) -> Transformer:
        """The shape of a model of which the number of parameters is known; what is not given is derived from it.

        A layer has 12 h^2 parameters. Without `layers` and `hidden` there is a layer for each 128 of the width, which
        is a multiple of 128. A head is 128 wide; the only head of a narrower model is all of it. The other attributes
        are set with `dataclasses.replace`.

        Raises:
            ConfigError: a number is out of its range, or `heads` must be given; it is named.
        """
        if not 0 < parameters < math.inf:
            raise ConfigError(f"parameters must be a number above 0, got {parameters!r}")
        for name, given in (("layers", layers), ("hidden", hidden)):
            if given is not None and given < 1:
                raise ConfigError(f"{name} must be at least 1, got {given}")
        if hidden is None:
            wanted = math.sqrt(parameters / (_LAYER * layers)) if layers else (parameters * _HEAD / _LAYER) ** (1 / 3)
            hidden = max(1, round(wanted / _HEAD)) * _HEAD
        if layers is None:
            layers = max(1, round(parameters / (_LAYER * hidden**2)))
        if heads is None:
            heads = max(1, hidden // _HEAD)
            if hidden % heads:
                raise ConfigError(f"heads must be given for hidden {hidden}, which is no multiple of {_HEAD}")
        return cls(batch=batch, sequence=sequence, layers=layers, hidden=hidden, heads=heads)

    def activations(self, width: int = 2) -> float:
        """Bytes that one rank keeps between the forward and the backward pass, at their most.

        Args:
            width: bytes of a value: 2 in mixed precision, 4 in float32.
        """
        states, mask = self.sequence * self.batch * self.hidden, int(self.dropout)
        scores = self.heads * self.sequence**2 * self.batch
        layer = states * (16 * width + 2 * mask)
        if not self.flash:
            layer += scores * (2 * width + mask if self.dropout else width)
        end = 0
        if self.vocabulary:
            end = states * (2 * width + mask) + 4 * self.sequence * self.batch * self.vocabulary
        kept = self.layers * width * states + layer if self.checkpointing else self.layers * layer
        return float(kept + end)
