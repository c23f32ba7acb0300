"""The settings of a demo run: the user's options, and the training settings that all its processes share. No torch.

The numbers of `Training` were found by measuring: with them one thread of a 2.5 GHz core does about 290 sequences a
second, and the 20,000 sequences that four peers see in a minute on two such cores bring the held-out loss from 7.7
(guessing among 2,048 tokens) to about 4.4, well below the 6.0 of always guessing by frequency.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import ConfigError

__all__ = ["MOST_PEERS", "NAMES", "SPEEDS", "DemoOptions", "Training", "warm_up"]

NAMES = (
    *("oak", "elm", "fir", "yew", "ash", "bay", "fig", "box", "hop"),
    *("ivy", "sal", "tea", "gum", "nut", "plum", "pine", "rose", "thyme"),
)
"""The names of the peers, in the order they start; the newcomer takes the next one."""

SPEEDS = (1.0, 0.65, 0.45, 0.3)
"""The share of the time that the first, second, ... peer computes; after the last it begins again."""

MOST_PEERS = 16


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that every process of a run must share.

    Attributes:
        seed: decides the model's first weights.
        vocabulary: tokens in the vocabulary.
        sequence: tokens in a sequence.
        embedding: width of the token table.
        hidden: width of the layer.
        heads: attention heads.
        depth: how often the shared layer is applied.
        target_batch: sequences of the whole swarm in one optimizer step (one epoch).
        micro_batch: sequences a peer computes at a time.
        learning_rate: AdamW's, after the warm-up.
        warm_up_epochs: the learning rate grows linearly over so many epochs.
        betas: AdamW's.
    """

    seed: int = 1
    vocabulary: int = 2048
    sequence: int = 64
    embedding: int = 64
    hidden: int = 128
    heads: int = 4
    depth: int = 2
    target_batch: int = 256
    micro_batch: int = 16
    learning_rate: float = 8e-3
    warm_up_epochs: int = 10
    betas: tuple[float, float] = (0.9, 0.95)


def warm_up(training: Training, epoch: int) -> float:
    """Factor on the learning rate for the step out of `epoch` (counted from 0)."""
    return min(1.0, (epoch + 1) / training.warm_up_epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The user's options.

    Attributes:
        seconds: from the start to the signal to stop, and more if the peers start late; the last epoch, the baseline
            and the picture come after it.
        seed: decides the first weights, the batches and the peer that is killed.
        peers: processes at the start, 2 to 16; one is killed on the way and one more joins.
        headless: plain lines instead of the live screen, as also when stdout is not a terminal.
        json: file for the numbers, rewritten as the run goes; None for no file.
        report: directory for `report.png` and the processes' logs, made if missing; None for no picture.

    Raises:
        ConfigError: a value out of its range.
    """

    seconds: float = 60.0
    seed: int = 1
    peers: int = 4
    headless: bool = False
    json: Path | None = None
    report: Path | None = Path("demo-report")

    def __post_init__(self) -> None:
        if not 1 <= self.seconds <= 86400:
            raise ConfigError(f"seconds={self.seconds} is not within 1..86400")
        if not 2 <= self.peers <= MOST_PEERS:
            raise ConfigError(f"peers={self.peers} is not within 2..{MOST_PEERS}")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed={self.seed} is not within 0..{2**31 - 1}")
