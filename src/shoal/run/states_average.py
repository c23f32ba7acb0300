"""The average of the states after a step: of the parameters, and of what differs by design. Loop only.

It is due after a step of several peers, every so many epochs and, where anything differs by design, at the end of the
run. A peer that misses it has a worse state afterwards. The trainer goes on meanwhile, and takes the average at its
next step: so nobody waits for the slowest trainer, nor for one that waits in another optimizer's step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shoal.averaging import Averager, StepResult
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes
from shoal.compression import view_bytes
from shoal.run.course import Course
from shoal.run.decide.phases import Event
from shoal.run.decide.state_name import StateName
from shoal.run.join.step_feed import StepFeed
from shoal.run.outlook import Outlook
from shoal.run.rounds import Rounds, weigh_in
from shoal.run.swarm_step import SwarmStep
from shoal.run.view.words import Weigh, heaviest

__all__ = ["Counts", "StatesAverage"]

_MOST_BYTES = 4096


class StatesAverage:
    """Averages the states of one peer with those that took the last step with it.

    Args:
        outlook: of this peer.
        course: is told that an average is due, ready or over.
        rounds: of this peer.
        swarm_step: knows with whom the last step was taken.
        averager: of the states.
        feed: keeps the average for peers that catch up.
        news: what may bring the others to an average that failed.
    """

    def __init__(
        self,
        outlook: Outlook,
        course: Course,
        rounds: Rounds,
        swarm_step: SwarmStep,
        averager: Averager,
        *,
        feed: StepFeed,
        news: Changes,
    ) -> None:
        self._core, self._own, self._training = outlook.core, outlook.own, outlook.own.training
        self._outlook, self._course, self._rounds, self._swarm_step = outlook, course, rounds, swarm_step
        self._averager, self._feed, self._news, self._every = averager, feed, news, outlook.settings.average_state_every
        self._counts = Counts(self._training.extra_tensors)
        self._failed_at: StateName | None = None
        self._gave_others = False  # the last round was given other values than those that are trained

    # --------------------------------------------------------------------------------------------------- when it is due

    @property
    def follows(self) -> bool:
        """Whether the step to our state is followed by an average of the states."""
        return (
            self.follows_last if self._outlook.at_end else bool(self._every) and self._own.name.epoch % self._every == 0
        )

    @property
    def follows_last(self) -> bool:
        """Whether the last step of a run is followed by an average of the tensors that differ by design.

        Batch norm statistics do, and with local updates the parameters, by what was trained during the last round.
        """
        training = self._training
        return training.averages_extras or bool(self._counts) or training.averages_parameters

    def is_due(self) -> bool:
        """Whether other members of the round that led to our state are there, and their average is still to come.

        It does not matter how this peer came to the state: one that downloads it, or was away, is waited for, too.
        """
        name = self._own.name
        if name != self._swarm_step.led_to or name == self._failed_at or not self.follows:
            return False
        return self._own.update is None and len(self._swarm_step.here) > 1

    # -------------------------------------------------------------------------------------------------------- the round

    async def average(self) -> None:
        """Average the states with all of the last step, and make the average ready."""
        try:
            name, me, result = self._own.name, {self._core.peer_id}, None
            if self._swarm_step.here > me:
                result = await self._rounds.run(
                    self._averager,
                    tag=name.group_tag,
                    hopeless=lambda view: view.behind or self._swarm_step.here <= me,
                    expected=lambda: self._swarm_step.here,
                    prepare=lambda _: self._give(name),
                    most_weight=lambda _: 1.0,
                    strangers=self._outlook.attendance.strangers,
                    apply=lambda vector: None,  # the trainer will
                    gather=self._counts.said() if self._outlook.at_end and self._counts else None,
                )
        finally:
            self._course.happened(Event.STATES_OVER)
        if self._own.name != name:
            return
        if result is not None:
            await self._make_ready(name, result)
            return
        if self._swarm_step.here > me:
            self._failed_at = name
        if self._outlook.at_end:
            await self._last_one_failed(name)

    def _give(self, name: StateName) -> tuple[float, float]:
        """Weight and factor of the parameters as they are now; none if they are not those that are trained."""
        weights = self._training.weights
        self._gave_others = weights.are_in_eval_mode or weights.are_changed_unusually
        return float(self._own.name == name and not self._gave_others), 1.0

    async def _make_ready(self, name: StateName, result: StepResult) -> None:
        outcome, own = result.outcome, self._own
        share = outcome.share(self._core.peer_id) if self._is_of_what_is_held else 0
        counts = self._counts.chosen(result.gathered, outcome.contributors, weigh_in(result, own.committed))
        members = [member.contact.peer for member in outcome.members]
        self._outlook.companions.share(members, name.key, result.duration_s)
        gave = int(self._training.pending.held * share)
        own.prepare(partial(self._take, counts), name.after_averaging(result), len(members), gave=gave)
        self._course.happened(Event.STATES_AVERAGED)
        if counts is None:  # else a follower would lack them: it downloads the state, which is the last one
            await self._feed.add_round(name, result, self._averager.vector)

    @property
    def _is_of_what_is_held(self) -> bool:
        """Whether the average of the states is that of what peers have trained after their last step."""
        return self._outlook.at_end and self._training.averages_parameters

    def _take(self, counts: bytes | None) -> None:
        """Set the parameters to the average (trainer)."""
        alpha, vector = self._averager.settings.averaging_alpha, self._averager.vector
        # Also where a batch of another fragment has moved them since; or what was given was something else.
        if self._gave_others or (self._outlook.at_end and alpha == 1.0):
            vector.overwrite()
        else:
            vector.apply(alpha)
        if self._is_of_what_is_held:
            self._training.discard()
        if counts is not None:
            self._counts.take(counts)

    async def _last_one_failed(self, name: StateName) -> None:
        """The last average failed: no other one makes up for it, so it is tried again while a member may come back.

        Then what differs by design is this peer's own, and so its state has a name of its own.
        """
        view, members, left = self._outlook.view(), self._swarm_step.others, self._outlook.known.left
        may_come = members.intersection({*view.peers, *self._core.endpoint.silent}) - left.keys()
        if may_come and self._outlook.end.patient(asyncio.get_running_loop().time()):
            if not view.behind:
                sometimes("the last average of the states is tried again")
                self._course.machine.happened(Event.STATES_DUE)
                await self._news.next(1.0)
        elif members or len(view.peers) > 1:
            sometimes("nobody is left for the last average of the states")
            # Those who followed our last step, or were given a copy, have not what differs by design as it is now.
            last = name.after_last_average_alone(self._core.env.rng.randbytes(16), self._core.peer_id.to_bytes())
            self._own.prepare(lambda: None, last, 1)
            self._course.happened(Event.STATES_AVERAGED)


class Counts:
    """The whole numbers (and flags) among the extra tensors, as of batch norm: equal on all at the end of a run.

    They have no mean. So with the last averaging of states each member says its own, and all take those of most weight
    (see `words`), of the members whose values are in the average. They are few: what has more than
    `_MOST_BYTES` in all (an index, a large mask) is not said, and stays each peer's own.

    Args:
        extra_tensors: of the state.
    """

    def __init__(self, extra_tensors: Sequence[torch.Tensor]) -> None:
        found = [each for each in extra_tensors if not (each.is_floating_point() or each.is_complex())]
        self._bytes = sum(each.nbytes for each in found)
        self._tensors = found if self._bytes <= _MOST_BYTES else []

    def __bool__(self) -> bool:
        """Whether there are any that are said."""
        return bool(self._tensors)

    def said(self) -> bytes:
        """Their values now."""
        return b"".join(view_bytes(each.detach().to("cpu").contiguous()) for each in self._tensors)

    def chosen(self, gathered: Mapping[PeerID, Any], contributors: Collection[PeerID], weigh: Weigh) -> bytes | None:
        """The values that all members take; None if no contributor has said its own as it should."""
        fit = {peer: said for peer, said in gathered.items() if peer in contributors and self._fits(said)}
        return next(iter(heaviest(fit, weigh(fit))), None)

    def _fits(self, said: object) -> bool:
        return bool(self) and isinstance(said, bytes) and len(said) == self._bytes

    def take(self, said: bytes) -> None:
        """Write these values (under the lock of the state)."""
        begin = 0
        for tensor in self._tensors:
            stop = begin + tensor.nbytes
            values = torch.frombuffer(bytearray(said[begin:stop]), dtype=torch.uint8) if stop > begin else None
            if values is not None:
                # A flag is one byte, and any other than 0 and 1 would be no flag.
                typed = values != 0 if tensor.dtype is torch.bool else values.view(tensor.dtype)
                tensor.copy_(typed.view(tensor.shape))
            begin = stop
