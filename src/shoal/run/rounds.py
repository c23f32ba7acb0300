"""The rounds of a run: the tensors that are averaged, and how long a peer takes part. Loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from shoal.averaging import Averager, StepResult, Strangers
from shoal.averaging.allreduce.interface import MostWeight
from shoal.averaging.averager import Apply, Prepare
from shoal.averaging.core import PeerCore
from shoal.base.clock import Env
from shoal.base.peer import PeerID
from shoal.base.tasks import Changes
from shoal.compression import (
    BFloat16Compression,
    CompressionBase,
    ErrorFeedback,
    Float16Compression,
    NoCompression,
    TensorRole,
    choose_codecs,
    for_parameters,
)
from shoal.errors import ConfigError, RoundFailed, SchemaMismatch
from shoal.events import Warned
from shoal.run.decide.committed import Committed
from shoal.run.settings import RunSettings
from shoal.run.view.progress import SwarmView
from shoal.run.view.words import Weigh, sites_of, weigh
from shoal.train.training_state import TrainingState

__all__ = ["Rounds", "gradient_averager", "sites_in", "state_averager", "weigh_in"]

_TOLD_AFTER = 3
"""A round fails now and then. If this many fail in a row the run stands still, and the user is told why."""


def gradient_averager(
    core: PeerCore,
    training: TrainingState,
    settings: RunSettings,
    compression: CompressionBase | None,
    **options: Any,
) -> Averager:
    """The averager of the gradients. Without a codec they travel as wide as their parameters.

    Args:
        core: this peer.
        training: what it trains.
        settings: of the run.
        compression: codec; None for none.
        options: for `Averager`.
    """
    if compression is None:
        narrow: dict[torch.dtype, CompressionBase] = {
            torch.float16: Float16Compression(),
            torch.bfloat16: BFloat16Compression(),
        }
        codecs = [narrow.get(training.dtypes[index], NoCompression()) for index in training.averaged_for]
    else:
        codecs = choose_codecs(compression, training.averaged, TensorRole.GRADIENT)
        if training.no_feedback and any(isinstance(each, ErrorFeedback) for each in codecs):
            raise ConfigError(f"compression of the strategy: {training.no_feedback}")
    averaging = msgspec.structs.replace(settings.averager, settings=settings.fingerprint)
    name = f"{settings.run_id}_grad"
    return Averager(core, training.averaged, name, averaging, codecs=codecs, stays=False, **options)


def state_averager(
    core: PeerCore,
    training: TrainingState,
    settings: RunSettings,
    compression: CompressionBase | None,
    **options: Any,
) -> Averager:
    """The averager of the parameters and extra tensors; arguments as for `gradient_averager`."""
    tensors = training.state_tensors
    chosen = choose_codecs(compression or NoCompression(), tensors, TensorRole.PARAMETER)
    codecs = [for_parameters(codec, tensor.dtype) for codec, tensor in zip(chosen, tensors, strict=True)]
    averaging = msgspec.structs.replace(settings.averager, settings=settings.fingerprint)
    return Averager(core, tensors, f"{settings.run_id}_state", averaging, codecs=codecs, **options)


class Rounds:
    """Runs the rounds of one peer, one at a time. Loop only.

    Args:
        env: chance and events.
        look: looks at the swarm as it is now, and tells the others where we stand.
        news: reasons to look.

    Attributes:
        in_vain: whether the last round failed as no group was found in all the time that there was.
    """

    def __init__(self, env: Env, look: Callable[[], SwarmView], news: Changes) -> None:
        self._env, self._look, self._news = env, look, news
        self._failed: dict[str, int] = {}
        self._last: Averager | None = None
        self.in_vain = False

    async def run(  # noqa: PLR0913 (all but one by name)
        self,
        averager: Averager,
        *,
        tag: str,
        hopeless: Callable[[SwarmView], bool],
        expected: Callable[[], frozenset[PeerID]],
        prepare: Prepare,
        most_weight: MostWeight,
        strangers: Strangers,
        apply: Apply,
        gather: object = None,
        since_last_s: float = 0.0,
    ) -> StepResult | None:
        """One round; None if it failed, or became hopeless before there was a group.

        Args:
            averager: of the tensors.
            tag: of the state; only peers with the same one meet.
            hopeless: whether there is nothing to be had from it any more.
            expected: the peers to wait for.
            prepare: gives the weight and a factor of our values, once there is a group. This and all that follows are
                as in `Averager.step`.
            most_weight: says which weight a peer may give.
            strangers: the peers of which nothing is known yet.
            apply: takes the averages.
            gather: what all members get of this one.
            since_last_s: the time since the last round, seconds.
        """
        settings = averager.settings
        self.in_vain = False

        async def step() -> StepResult:
            if self._last is not None and self._last is not averager:
                await self._last.release()  # they share their memory
            self._last = averager
            return await averager.step(
                timeout_s=settings.window_s + settings.allreduce_timeout_s,
                allow_retries=False,
                expected=expected,
                tag=tag,
                prepare=prepare,
                most_weight=most_weight,
                strangers=strangers,
                apply=apply,
                gather=gather,
                since_last_s=since_last_s,
            )

        round_ = asyncio.get_running_loop().create_task(step())
        round_.add_done_callback(lambda _: self._news.notify())
        try:
            while True:
                await self._news.next(1.0)
                if round_.done():
                    break
                view = self._look()
                if averager.looking and hopeless(view):
                    return None
            result = round_.result()
            self._failed[averager.prefix] = 0
            return result
        except SchemaMismatch as error:
            self._warn(str(error))
            await asyncio.sleep(1.0)
        except RoundFailed as error:
            self.in_vain = error.round_id is None
            failed = self._failed[averager.prefix] = self._failed.get(averager.prefix, 0) + 1
            if failed % _TOLD_AFTER == 0:
                self._warn(f"{failed} rounds of {averager.prefix} in a row have failed, the last one because: {error}")
            await asyncio.sleep(0.05 + 0.1 * self._env.rng.random())
        finally:
            if round_.cancel():
                await asyncio.gather(round_, return_exceptions=True)
        return None

    def _warn(self, message: str) -> None:
        self._env.events.emit(Warned(where="optimizer", message=message))


def sites_in(result: StepResult) -> dict[PeerID, bytes]:
    """The sites of the members of this round, as all of them know them."""
    return sites_of(member.contact for member in result.outcome.members)


def weigh_in(result: StepResult, committed: Committed) -> Weigh:
    """Weighs the words of the members of this round, as all of them do where these are the last steps."""
    return partial(weigh, committed=committed.weights, sites=sites_in(result))
