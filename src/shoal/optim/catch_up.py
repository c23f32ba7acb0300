"""How a peer that is behind gets in, although the others go on: it follows their steps while it loads a state.

It follows from before it asks for the state, so no step between is missed. Then it takes the steps one by one, each as
the others took it: the same averages, the same optimizer, and the name that follows from the commit. On equal
arithmetic it ends with their bits (`docs/decisions/0015-catching-up.md`). It follows until it has taken a step together
with the others; as long as it is led on from where it stands, it needs no state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from shoal.allreduce.run_buffers import RoundMemory
from shoal.allreduce.vector import Vector
from shoal.averager import Averager
from shoal.clock import shielded
from shoal.core import PeerCore
from shoal.events import duration
from shoal.optim.committed import Committed
from shoal.optim.following import Following
from shoal.optim.options import misfit, options_of
from shoal.optim.phases import Update
from shoal.optim.state_name import StateName
from shoal.optim.steps import Step, agreement_of, land, name_after
from shoal.optim.training_state import TrainingState
from shoal.peer import PeerID
from shoal.wire import Contact

__all__ = ["CatchUp"]

_LOOK_AGAIN_S = 1.0
_PATIENCE_S = 2.0
"""The others told us that they are further; the step itself may come a little later."""

_LATELY_S = 20.0


class CatchUp:
    """Follows others while this peer is behind. Loop only, but for what an `Update` does.

    Args:
        core: this peer.
        run_id: names the run.
        training: what takes the steps.
        gradients: of the run's rounds.
        states: of its averagings of states.
        max_bytes: the most that is kept.
    """

    def __init__(
        self,
        core: PeerCore,
        run_id: str,
        training: TrainingState,
        gradients: Averager,
        states: Averager,
        *,
        max_bytes: int,
    ) -> None:
        self._core, self._run_id, self._training, self._max_bytes = core, run_id, training, max_bytes
        self._averagers = {False: gradients, True: states}
        self._vectors: dict[bool, Vector] = {}
        self._following: Following | None = None
        self._since = self._received_before = 0.0
        self._told = False

    @property
    def from_epoch(self) -> int:
        """From a state of this epoch, or of a later one, steps lead on."""
        return self._following.base.epoch if self._following is not None and self._following.base is not None else 0

    def giving(self, now: float) -> set[PeerID]:
        """The members that have given us a step lately (`now`: loop time)."""
        gave_at = self._following.gave_at if self._following is not None else {}
        return {peer for peer, at in gave_at.items() if now - at < _LATELY_S}

    @asynccontextmanager
    async def following(self, contacts: Callable[[], Sequence[Contact]]) -> AsyncIterator[None]:
        """Follow two of these in the block, and afterwards until `leave`; others in place of those that are lost."""
        if self._following is None:
            self._since, self._received_before = self._now(), self._core.endpoint.traffic[1]
            self._following = Following(self._core, self._run_id, self._vector, max_bytes=self._max_bytes)
        following = self._following
        await following.follow(contacts())

        async def follow() -> None:
            while True:
                await asyncio.sleep(_LOOK_AGAIN_S)
                await following.follow(contacts())

        task = asyncio.get_running_loop().create_task(follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def steps_first(self) -> None:
        """Return when the steps come as fast as they are made: a state has time, and a step is kept for two epochs."""
        if self._following is not None:
            await self._following.first()

    async def next(self, state: StateName, committed: Committed) -> Update | None:
        """The update that leads on from this state, once it is here; None if nobody tells of one.

        Args:
            state: where we are.
            committed: the steps that led there.
        """
        if self._following is None:
            return None
        self._following.forget(state)
        step = await self._following.next(state, patience_s=_PATIENCE_S)
        if step is None:
            return None
        agreement, name = agreement_of(step.header), name_after(step.header)
        if agreement is not None:
            committed = committed.after(agreement.contributors, state.epoch)
            mine = options_of(self._training.optimizer.param_groups)
            if agreement.options is not None and (why := misfit(mine, agreement.options)) is not None:
                self._following.missed = f"their options are {why}"
                return None
        return Update(
            apply=partial(self._take, step),
            name=name,
            committed=committed,
            peers=0,
            samples=name.samples - state.samples,
            is_step=agreement is not None,
        )

    def _take(self, step: Step) -> None:
        """Do to parameters and optimizer what the step did to those of its members (under their lock)."""
        header, agreement = step.header, agreement_of(step.header)
        vector = self._vector(agreement is None)
        if agreement is None:
            vector.copy_in()
            land(header, memoryview(step.data), vector)
            vector.apply(self._averagers[True].settings.averaging_alpha)
        else:
            land(header, memoryview(step.data), vector)
            vector.overwrite()
            self._training.use_accumulators()
            self._training.step(agreement.options, agreement.absent)

    def _vector(self, averaging: bool) -> Vector:
        """Of our own tensors, beside the averager's: that may be in a round."""
        if not self._vectors:
            memory = RoundMemory(*(averager.tensors for averager in self._averagers.values()))
            for kind, averager in self._averagers.items():
                self._vectors[kind] = Vector(averager.tensors, averager.vector.layout, memory)
        return self._vectors[averaging]

    async def give_up(self, took_s: float) -> str | None:
        """Why nothing leads on from the state that we have, after so many seconds; None if nothing is missing.

        If something is, nobody is followed any more: with the next state it is tried anew. It is told once until this
        peer takes part.
        """
        following = self._following
        if following is None or not following.missed:
            return None
        rate = (self._core.endpoint.traffic[1] - self._received_before) / max(self._now() - self._since, 1e-3)
        (epoch, since), (last, until) = following.told or ((0, 0.0), (0, 0.0))
        pace = f"takes them about {duration((until - since) / (last - epoch))} and " if last > epoch else ""
        await self.leave()
        if self._told:
            return None
        self._told = True
        return (
            f"the download of the state took {duration(took_s)}, and one of the steps that the others took meanwhile "
            f"is missing: {following.missed}. A step {pace}has {following.step_bytes} bytes; this line carried "
            f"{rate:.0f} bytes/s. Raise target_batch_size so that a step takes longer, make steps smaller "
            "(grad_compression), or give this peer a faster line, or more catch_up_bytes"
        )

    async def joined(self) -> None:
        """This peer has taken a step of the swarm itself: it follows nobody any more."""
        self._told = False
        await self.leave()

    async def leave(self) -> None:
        """Follow nobody any more. Safe to call twice."""
        following, self._following = self._following, None
        self._vectors.clear()
        if following is not None:
            await shielded(following.close())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
