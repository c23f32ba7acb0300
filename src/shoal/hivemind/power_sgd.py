"""`PowerSGDGradientAverager`: a `GradientAverager` that averages factors of low rank; how an `Optimizer` asks for it.

The members of a group have to use the same bases (see `low_rank`). Each says with which it would go on, as it joins:
by a digest of those that followed from the last average. If all say the same, these are used. Otherwise all draw bases
from the round's id. So a newcomer, a peer that missed a round, and peers of other groups are at one again after one
round, which sends less of the gradients than others; what it leaves out comes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from blake3 import blake3

from shoal.averaging import StepRequest, StepResult
from shoal.averaging.averager import Prepare
from shoal.averaging.matchmaking import Group
from shoal.base.checks import flag, share, whole
from shoal.base.peer import PeerID
from shoal.compression import ErrorFeedback, view_bytes
from shoal.errors import ConfigError
from shoal.hivemind.grad_averager import GradientAverager, succeeded
from shoal.protocol.wire import decode_plain
from shoal.runtime.control import StepControl
from shoal.strategies.low_rank import NO_FEEDBACK, LowRank
from shoal.strategies.synchronous import MOST_RANK

__all__ = ["PowerSGDGradientAverager", "low_rank_options"]

_KEPT = 3
"""Bases that are kept: a step that was scheduled while another one went on has told those before it."""


class PowerSGDGradientAverager(GradientAverager):
    """A `GradientAverager` that sends the gradients of matrices as factors of low rank.

    A matrix of m x n numbers takes `averager_rank * (m + n)` in a round. What the factors lose is added to this peer's
    next gradients. The name is that of hivemind 1.1.12; the method is PowerSGD (https://arxiv.org/abs/1905.13727) with
    both factors in one round, so a round succeeds whole or changes nothing.

    Args:
        parameters: in the same order on all peers.
        averager_rank: of the factors; the same on all peers.
        min_compression_ratio: the least part of a parameter's numbers that factors must save; others are sent whole.
        start: connect now; else at `run_in_background`.
        options: of `GradientAverager`.

    Raises:
        ConfigError: an argument is wrong, or the rank saves too little on every parameter; it is named.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        averager_rank: int,
        *,
        min_compression_ratio: float = 0.5,
        start: bool,
        **options: Any,
    ) -> None:
        self._options = _checked(averager_rank, min_compression_ratio)
        self._committed: tuple[int, bool] | None = None  # the last round: a number that names it, and whether we count
        super().__init__(parameters, start=False, **options)
        if any(isinstance(each, ErrorFeedback) for each in self._codecs):
            raise ConfigError(f"compression={NO_FEEDBACK}")
        if flag("start", start):
            self.run_in_background()

    def _travelling(self) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        self._low = LowRank(self._averages, **self._options)
        self._known: dict[bytes, list[torch.Tensor]] = {}
        self._remember()
        return self._low.tensors(self._averages), self._low.owners

    def _remember(self) -> None:
        digest = blake3()
        for each in self._low.bases:
            digest.update(view_bytes(each.to("cpu").contiguous()))
        self._digest = digest.digest(8)
        self._known[self._digest] = [each.clone() for each in self._low.bases]
        for old in list(self._known)[:-_KEPT]:
            del self._known[old]

    def schedule_step(self, scheduled_time: float | None = None, **options: Any) -> StepControl:
        """Prepare a step that `step(control=...)` takes: see `GradientAverager.schedule_step`."""
        self._settle()
        gather = [self._digest, options.pop("gather", None)]
        return super().schedule_step(scheduled_time, gather=gather, **options)

    def _prepare(self, request: StepRequest) -> Prepare:
        def prepare(group: Group) -> tuple[float, float]:
            said = {_said(member.gathered) for member in group.members if member.contributes}
            known = self._known.get(said.pop()) if len(said) == 1 else None
            if known is None:
                self._low.begin(_number(group.round_id))
            else:
                self._low.use(known)
            self._low.shrink_means(self._averages, self._in_average)
            return request.weight, 1.0

        return prepare

    def _gathered(self, result: StepResult) -> dict[PeerID, Any]:
        self._committed = _number(result.round_id), self.peer_id in result.outcome.contributors
        return {
            peer: word[1] if isinstance(word, list) and len(word) == 2 else None
            for peer, word in result.gathered.items()
        }

    def load_accumulators_into_averager_(self) -> None:
        """Set the averaged gradients to this peer's own mean, without the others: see `GradientAverager`."""
        super().load_accumulators_into_averager_()
        self._in_average = self.local_samples_accumulated

    def _settle(self) -> None:
        """Also make gradients of the factors that a step has averaged, once it has ended."""
        if self._committed is not None and self._control is not None and succeeded(self._control):
            (seed, counted), self._committed = self._committed, None
            with self.get_tensors():
                self._low.expand(self._averages, seed)
                if counted:
                    self._low.counted()
                self._low.advance()
                self._remember()
        super()._settle()


def _said(gathered: bytes) -> bytes:
    """The digest that a member has told; empty if it told none."""
    try:
        digest, _ = decode_plain(gathered)
    except (msgspec.MsgspecError, TypeError, ValueError):
        return b""
    return digest if isinstance(digest, bytes) else b""


def _number(round_id: bytes) -> int:
    return int.from_bytes(round_id[:4], "little")


def _checked(averager_rank: object, min_compression_ratio: object) -> dict[str, Any]:
    return {
        "rank": whole("averager_rank", averager_rank, most=MOST_RANK),
        "min_compression_ratio": share("min_compression_ratio", min_compression_ratio),
    }


def low_rank_options(factory: object) -> Mapping[str, Any] | None:
    """The rank and the ratio that a `grad_averager_factory` asks for; None: gradients are sent whole.

    Args:
        factory: None, `GradientAverager`, or `PowerSGDGradientAverager.get_factory(averager_rank=...)`.

    Raises:
        ConfigError: it is anything else.
    """
    kind, given = (factory.func, factory.keywords) if isinstance(factory, partial) else (factory, {})
    if kind in (None, GradientAverager) and not given:
        return None
    positional = isinstance(factory, partial) and factory.args
    if kind is not PowerSGDGradientAverager or positional or given.keys() - {"averager_rank", "min_compression_ratio"}:
        raise ConfigError(
            f"grad_averager_factory must be PowerSGDGradientAverager.get_factory(averager_rank=...), perhaps with "
            f"min_compression_ratio, or None, got {kind!r:.80}{' with ' if given else ''}{', '.join(sorted(given))}: "
            "give other things to the shoal.Optimizer itself"
        )
    if "averager_rank" not in given:
        raise ConfigError("averager_rank is missing: give PowerSGDGradientAverager.get_factory(averager_rank=4)")
    return _checked(given["averager_rank"], given.get("min_compression_ratio", 0.5))
