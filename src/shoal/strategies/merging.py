"""Merging: peers step on their own batches at once, and now and then they merge what they have trained.

All peers hold the same *anchor*, a copy of the parameters as the last merge has left them. Each peer gives the *outer
gradient*, the anchor minus its own parameters, with the samples that it has trained since as its weight. From the
average the *outer optimizer* steps the anchor, and each peer goes on from there. `Merging` says in which way: `outer`
has what is given and how it is taken, `merge_pace` when, and `Merges` is a strategy of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from shoal.base.checks import whole
from shoal.errors import ConfigError
from shoal.protocol.wire import MAX_FRAGMENTS

__all__ = ["MEAN", "MOST_QUORUM", "MOST_STEPS", "Merging", "Outer", "nesterov"]

Outer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
"""Makes the outer optimizer over the anchor."""

nesterov: Outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of DiLoCo's authors."""

MEAN: Outer = partial(torch.optim.SGD, lr=1.0)
"""The anchor becomes the mean of the peers' parameters."""

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
MOST_STEPS, _MOST_SECONDS, MOST_QUORUM = 1_000_000, 7 * 86400.0, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Merging:
    """The way in which peers merge.

    Attributes:
        every: the mean number of batches that the peers train between two merges of a fragment of the model; or a time,
            such as `"30s"`, `"5min"`, `"1h"`.
        outer: makes the outer optimizer over the anchor.
        fragments: parts of the model that are merged one after another, each by itself.
        overlap: the batches that a peer goes on with while a merge is under way. 0: it waits for the merge, and goes on
            from the anchor; a batch that was under way when the merge began is lost. None: it never waits.
        mixing: the share of its own parameters that a peer keeps at a merge it has not waited for. None: it keeps all
            that it has trained since it gave its outer gradient, and moves by what the merge has changed.
        quorum: a merge begins when so many peers have trained for long enough, and needs so many. None: when the peers
            have in the mean, and whoever is there counts.

    Raises:
        ConfigError: an attribute is wrong; it is named.
    """

    every: int | str
    outer: Outer = field(default=nesterov, compare=False)
    fragments: int = 1
    overlap: int | None = 0
    mixing: float | None = None
    quorum: int | None = None
    steps: int | None = field(init=False)
    seconds: float | None = field(init=False)
    _outer: object = field(init=False, repr=False)

    def __post_init__(self) -> None:
        steps = seconds = None
        if isinstance(self.every, str):
            seconds = _seconds(self.every)
        else:
            steps = whole("every", self.every, most=MOST_STEPS)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "seconds", seconds)
        outer: object = self.outer
        if isinstance(outer, partial):  # which is equal to no copy of it
            outer = outer.func, outer.args, tuple(sorted(outer.keywords.items()))
        object.__setattr__(self, "_outer", outer)
        if not callable(self.outer):
            raise ConfigError(
                f"outer must be a function that makes a torch optimizer of parameters, such as "
                f"functools.partial(torch.optim.SGD, lr=0.7), got {self.outer!r:.80}"
            )
        whole("fragments", self.fragments, most=MAX_FRAGMENTS)
        if self.overlap is not None:
            whole("overlap", self.overlap, least=0, most=MOST_STEPS)
            if self.overlap and steps is not None and self.overlap >= steps:
                raise ConfigError(f"overlap must be less than every, got {self.overlap} of {steps} steps")
        mixing = self.mixing
        is_number = isinstance(mixing, int | float) and not isinstance(mixing, bool)
        if mixing is not None and not (is_number and 0 <= mixing <= 1):
            raise ConfigError(f"mixing must be a number from 0 to 1, or None, got {mixing!r:.80}")
        if self.quorum is not None:
            whole("quorum", self.quorum, most=MOST_QUORUM)

    @property
    def waits(self) -> bool:
        """Whether peers wait for a merge. After it each one is at the anchor: what no merge has counted is lost."""
        return self.overlap == 0

    @property
    def keeps(self) -> bool:
        """Whether a peer keeps what it has trained, and no merge has counted, when it goes on from a new anchor."""
        return not self.waits and self.mixing is None

    @property
    def text(self) -> str:
        """All of it but the outer optimizer, in words that are equal for equal ones."""
        overlap = "any" if self.overlap is None else f"{self.overlap}"
        every = f"{self.steps} steps" if self.steps is not None else f"{self.seconds:g} s"
        mixing = "none" if self.mixing is None else f"{self.mixing:g}"
        quorum = "none" if self.quorum is None else f"{self.quorum}"
        return f"every {every}, fragments {self.fragments}, overlap {overlap}, mixing {mixing}, quorum {quorum}"


def _seconds(text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0.1 <= seconds <= _MOST_SECONDS:
        raise ConfigError(
            f'every must be a number of steps, or a time from 0.1 s to 7 days such as "30s", "5min" or "1h", got '
            f"{text!r:.80}"
        )
    return seconds
