"""The averager's async core: look for a group, average with it, commit; again after a failure, until the deadline.

Runs in one event loop (`shoal.runtime` gives it a thread, `shoal.sim` virtual time). The lock of the averaged tensors
is held to copy in and to apply, never while the network is waited for. A step waits for the lock until its deadline;
once there is a group, only as long as the others wait for a silent member. A failed round leaves the tensors as they
were, even if its average is agreed on and only could not be applied in time.

After each round that succeeded the group bits, unless they are empty, are drawn anew from the round's id, so that small
groups mix and all peers come to the global average in a logarithmic number of rounds (Moshpit SGD).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
import torch

from shoal.averaging.allreduce.interface import MostWeight
from shoal.averaging.allreduce.round import Outcome, Round, RoundOptions
from shoal.averaging.allreduce.segments import RoundMemory
from shoal.averaging.allreduce.vector import Vector, describe
from shoal.averaging.conduct import Conduct
from shoal.averaging.core import PeerCore
from shoal.averaging.group_finder import Expected, GroupFinder
from shoal.averaging.lock import TensorLock
from shoal.averaging.matchmaking import Group
from shoal.averaging.request import AveragingStage, StepRequest, StepResult
from shoal.averaging.settings import AveragerSettings
from shoal.averaging.sharing import StateSharing
from shoal.averaging.strangers import NO_STRANGERS, Strangers
from shoal.base.bounded import put_last
from shoal.base.clock import Backoff, own_clock, shielded
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Tasks
from shoal.compression import CompressionBase, NoCompression, choose_codecs
from shoal.errors import (
    ClosedError,
    ConfigError,
    LocalError,
    NobodyContributes,
    RoundFailed,
    SchemaMismatch,
    is_out_of_memory,
)
from shoal.events import LocalValuesRejected, PeerDropped, RoundAborted, RoundFinished, Warned
from shoal.protocol.wire import Member, decode_plain
from shoal.state.wire import SharedState

__all__ = ["Averager"]

_LEAST_MOST_MEMBERS = 256
"""The tiles of each vector can be divided among so many members, unless `target_group_size` says how many."""

_DIALED_AHEAD = 32
"""In larger groups open links cost each member more than they gain: two descriptors for each other member."""

_CLOSE_WITHIN_S = 10.0
"""The longest wait for the last round to let go of its memory; normally it takes less than 2 s. The next round fails
then, and the one after that waits again."""

_TOLD = 64
"""So many peers that make averages their own are remembered, so that each is told once."""

_STILL_S = 0.5
"""A peer that stood still for so long during a round judges nobody by it. Others wait for it for a second at most."""

Prepare = Callable[[Group], tuple[float, float]]
Apply = Callable[[Vector], None]


class Averager:
    """Averages a list of tensors with other peers.

    Args:
        core: the peer that this averager is part of.
        tensors: changed in place by a successful round; all floating point.
        prefix: peers with the same prefix meet.
        settings: see there.
        lock: the lock of the tensors.
        compression: codec for averaging.
        state: gives the state to share; default the averaged tensors. Called under the lock.
        codecs: one codec for each tensor, in place of `compression`.
        memory: memory for averagers whose rounds never overlap: call `release` of one before a `step` of another.
        stays: whether the tensors go on from the averages, as parameters do and gradients do not: then it is told if
            they do not move by them.

    Attributes:
        conduct: which peers it does not count on.
        sharing: the state that others can download from here.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    def __init__(  # noqa: PLR0913 (all but four by name)
        self,
        core: PeerCore,
        tensors: Sequence[torch.Tensor],
        prefix: str,
        settings: AveragerSettings,
        *,
        lock: TensorLock,
        compression: CompressionBase | None = None,
        codecs: Sequence[CompressionBase] | None = None,
        state: Callable[[], SharedState] | None = None,
        memory: RoundMemory | None = None,
        stays: bool = True,
    ) -> None:
        settings.check()
        if not isinstance(prefix, str) or not prefix or len(prefix) > 256:
            raise ConfigError(f"prefix must be a text of 1 to 256 characters, got {prefix!r}")
        self.core, self.prefix, self.settings, self.lock = core, prefix, settings, lock
        self.tensors = tuple(tensors)
        chosen = codecs or choose_codecs(compression or NoCompression(), self.tensors)
        self.vector = Vector(self.tensors, describe(self.tensors, chosen), memory)
        if stays:
            self.vector.watch_still()
        self.vector.check_tile_bytes(settings.part_size_bytes, settings.target_group_size or _LEAST_MOST_MEMBERS)
        self.conduct = Conduct(settings.window_s, self._warn)
        self.sharing = StateSharing(
            core, prefix, settings, lock=lock, state=state or (lambda: SharedState(metadata=None, tensors=self.tensors))
        )
        self._ending: asyncio.Task[None] | None = None
        self._leaving = False
        self._between_rounds = asyncio.Event()
        self._met: frozenset[PeerID] = frozenset()
        self._between_rounds.set()
        self._stepping: asyncio.Task[Any] | None = None
        self._outweighing: dict[PeerID, None] = {}  # those that were told
        self._finishing: asyncio.Task[None] | None = None  # of the last round
        self._finished_at = self._searched_at = -math.inf
        self._closing: asyncio.Task[None] | None = None
        self._last_round: Round | None = None
        self._tasks = Tasks(self._on_failure)
        core.rounds()  # from now on: a member that hears of a group before we do may open its streams at once
        self._finder = GroupFinder(core, prefix, settings, self.vector)
        core.leavers.append(self.leave)

    @property
    def group_bits(self) -> str:
        """Which of several groups the next search is for. A value that is set is not redrawn before that search."""
        return self._finder.bits.bits

    @group_bits.setter
    def group_bits(self, bits: str) -> None:
        self._finder.bits.bits = bits

    @property
    def looking(self) -> bool:
        """Whether a step looks for a group now, rather than averages."""
        return self._finder.looking

    @property
    def group_size(self) -> int:
        """The size of the group that joins us in this search, including this peer; 0 between searches."""
        return self._finder.matchmaker.group_size

    @property
    def joined_at(self) -> float:
        """When a peer joined us last in this search for a group, or it began (loop time, seconds)."""
        return self._finder.matchmaker.joined_at

    # ---------------------------------------------------------------------------------------------------- averaging

    async def step(  # noqa: PLR0913 (all but one by name)
        self,
        request: StepRequest | None = None,
        *,
        weight: float = 1.0,
        gather: object = None,
        prepare: Prepare | None = None,
        timeout_s: float = 300.0,
        allow_retries: bool = True,
        expected: Expected | None = None,
        apply: Apply | None = None,
        most_weight: MostWeight | None = None,
        strangers: Strangers = NO_STRANGERS,
        tag: str = "",
        since_last_s: float = 0.0,
    ) -> StepResult:
        """Find a group and average once.

        Args:
            request: for callers that want to change it while the step goes on; replaces `weight` and `gather`.
            weight: the weight of this peer's values: 0, or from 1e-9 to 1e12.
            gather: a MessagePack value that all members get.
            prepare: called with the group, under the lock, when the values are copied in, in a thread for work. Gives
                the weight, in place of that of the request, and a factor for the values.
            timeout_s: longest time for everything, retries included.
            allow_retries: after a failed round look for another group.
            expected: the peers that the group should wait for; None starts by the usual rule.
            apply: called under the lock with the averages in place of moving the tensors to them.
            most_weight: members that give a larger weight are refused; None: any weight is taken. Members may know it
                differently: each is to give no more than all others allow it.
            strangers: the peers of which nothing is known yet.
            tag: only peers with the same tag meet; empty or `@` and some text without dots.
            since_last_s: the time since the last round, seconds (`RoundOptions`).

        Raises:
            RoundFailed: there is no average; no tensor was touched.
            SchemaMismatch: only peers with other tensors or settings were met.
            NobodyContributes: this peer is auxiliary, and so are all that look for a group.
            ConfigError: `gather` or `weight` cannot be sent.
            LocalError: another step goes on. One that was cancelled is waited for.
            ClosedError: the averager was closed, also while the step went on.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._stepping is not None:
            if not self._stepping.cancelling():
                raise LocalError("step() is running already: wait for it, or make another averager")
            await asyncio.wait([self._stepping], timeout=max(0.0, deadline - loop.time()))
            if loop.time() >= deadline:
                raise RoundFailed("the step before was cancelled, and did not end in time")
        if self._ending is not None or self._leaving:
            raise ClosedError("the averager was shut down")
        request = request or StepRequest(weight=weight, gather=gather)
        prepare = prepare or (lambda _: (request.weight, 1.0))
        attempt = _Attempt(request, prepare, expected, apply, most_weight, strangers, tag, since_last_s)
        self._stepping = asyncio.current_task()
        try:
            return await self._try_until(deadline, attempt, allow_retries)
        except asyncio.CancelledError:
            if self._ending is not None:
                raise ClosedError("the averager was shut down") from None
            raise
        finally:
            request.stage = AveragingStage.FINISHED
            self._stepping = None

    async def _try_until(self, deadline: float, attempt: _Attempt, allow_retries: bool) -> StepResult:
        loop = asyncio.get_running_loop()
        backoff = Backoff(self.core.env.rng, first_s=0.05, max_s=2.0)
        last: RoundFailed | None = None
        while True:
            try:
                await attempt.request.wait_until_ready(self.core.env.clock, deadline)
                if not self.settings.auxiliary:
                    async with self._tensors(deadline):
                        pass  # a member that cannot give its values would only keep a group waiting
                with self.core.env.low_latency():
                    result = await self._try_once(attempt, deadline)
                if result is not None:
                    return result
            except (SchemaMismatch, NobodyContributes) as error:
                self._aborted(error)
                raise
            except RoundFailed as error:
                self._aborted(error)
                pause_s = backoff.next_s()
                if not allow_retries or self._leaving or loop.time() + pause_s >= deadline:
                    if last is None or last.reason == error.reason:
                        raise
                    # The last try had little time. The one before it says why there was no average.
                    reason, peers = f"{error.reason}; before that: {last.reason}", (*error.peers, *last.peers)
                    raise RoundFailed(reason, tuple(dict.fromkeys(peers)), round_id=error.round_id) from error
                last = error if last is None or error.round_id is not None else last
                await asyncio.sleep(pause_s)

    def _aborted(self, error: RoundFailed) -> None:
        self._finder.matchmaker.forget_leader()
        event = RoundAborted(prefix=self.prefix, round_id=error.round_id, reason=error.reason, peers=error.peers)
        self.core.env.events.emit(event)

    async def _try_once(self, attempt: _Attempt, deadline: float) -> StepResult | None:
        """One round; None if the step was told to begin later, before there was a group."""
        loop, events = asyncio.get_running_loop(), self.core.env.events
        self._searched_at = loop.time()
        try:
            group = await self._finder.find(
                attempt.request,
                tag=attempt.tag,
                deadline=deadline,
                expected=attempt.expected,
                precedence=self.conduct.precedence(attempt.strangers, loop.time()),
            )
        finally:
            idled, turned_away = self._finder.matchmaker.take_failures()
            self.conduct.searched(idled, turned_away, loop.time(), attempt.strangers)
        if group is None:
            return None
        if not any(member.contributes for member in group.members):
            group.release()
            size = len(group.members)
            raise NobodyContributes(f"all {size} peers that look for a group are auxiliary: nobody has values")
        try:
            gathered = await self._unpack(group.members)
        except BaseException:
            group.release()
            raise
        formed = loop.time()
        sent, received = self.core.endpoint.traffic
        outcome = await self._run_round(group, attempt, deadline)
        now_sent, now_received = self.core.endpoint.traffic
        events.emit(
            RoundFinished(
                prefix=self.prefix,
                round_id=group.round_id,
                peers=group.peers,
                left_out=outcome.left_out,
                bytes_sent=now_sent - sent,
                bytes_received=now_received - received,
                duration_s=loop.time() - formed,
            )
        )
        self._dial_ahead(group)
        self._finder.bits.averaged(round_id=group.round_id, place=group.my_index, size=len(group.members))
        return StepResult(
            gathered=gathered,
            outcome=outcome,
            round_id=group.round_id,
            duration_s=loop.time() - formed,
            shares=tuple(group.shares),
            tile_bytes=group.tile_bytes,
        )

    def _dial_ahead(self, group: Group) -> None:
        """Dial the last group's members: we may ask any of them next time. With group bits we will ask others."""
        if self.group_bits or len(group.members) > _DIALED_AHEAD:
            return
        asked = () if group.leads else group.controls
        for peer in group.peers:
            if peer != self.core.peer_id and peer not in asked:
                self.core.endpoint.dial_ahead(peer)

    def meet(self, peers: frozenset[PeerID], *, comes: bool) -> None:
        """Have connections ready to peers that will probably be in the next group: dialing takes four round trips.

        Args:
            peers: other peers; each is dialed once, until it is not among them any more.
            comes: whether this peer came to them. Then it makes the call links, else they do.
        """
        self._met &= peers
        if not self.group_bits and len(peers) < _DIALED_AHEAD:
            self._met |= {peer for peer in peers - self._met if self.core.endpoint.dial_ahead(peer, link=comes)}

    async def between_rounds(self) -> None:
        """Return when no round is under way. The search for a group is none."""
        await self._between_rounds.wait()

    async def _run_round(self, group: Group, attempt: _Attempt, deadline: float) -> Outcome:
        self._between_rounds.clear()
        try:
            return await self._run_to_verdict(group, attempt, deadline)
        finally:
            self._between_rounds.set()

    async def _run_to_verdict(self, group: Group, attempt: _Attempt, deadline: float) -> Outcome:
        loop, still_s = asyncio.get_running_loop(), self._still_s()
        formed = loop.time()
        try:
            round_ = await self._begin_round(group, attempt, deadline)
        except BaseException:
            group.release()
            raise
        outcome: Outcome | None = None
        try:
            outcome = await round_.run()
            # Not after the averages are applied, which may take long: the others wait for our streams to end.
            self._finishing = self._tasks.spawn(self._finish(round_, group, orderly=True))
            if not self.settings.auxiliary:
                async with self._tensors(deadline, group.round_id, "the average was agreed on, but not applied: "):
                    with _fails_without_memory("the average was agreed on, but not applied in full", group.round_id):
                        await shielded(self._apply(attempt.apply))
            return outcome
        finally:
            if outcome is None:
                self._finishing = self._tasks.spawn(self._finish(round_, group, orderly=False))
            self._last_round = round_
            self._tell_outweighing(round_)
            if self._still_s() < still_s + _STILL_S:  # else the others may have left us, not we them
                seen, leads, unfair = round_.seen(), round_.leads, self._finder.is_unfair(group)
                self.conduct.played(
                    seen, round_.leader, outcome, formed, loop.time(), attempt.strangers, leads=leads, unfair=unfair
                )
                if outcome is not None:
                    there = round_.there(outcome, seen)
                    self._finder.matchmaker.played(group, there, counted=round_.counted(outcome))
                if seen.decided_late and attempt.strangers.are_spent(loop.time()):
                    self._finder.matchmaker.avoid(group.peers[group.coordinator], len(group.members))

    def _tell_outweighing(self, round_: Round) -> None:
        if round_.outweighing is not None and round_.outweighing[0] not in self._outweighing:
            peer, weight, others = round_.outweighing
            put_last(self._outweighing, peer, None, _TOLD)
            self._warn(
                f"{peer.short()} gives its values the weight {weight:g}, and all others together have {others:g}: the "
                "average is that peer's values. Give all peers weights of one kind (samples, say); if that peer is not "
                "yours, leave it out",
                peer,
            )

    def _still_s(self) -> float:
        """For how long this process has stood still: the loop's time does not count that."""
        return own_clock(self.core.env.clock).monotonic() - asyncio.get_running_loop().time()

    async def _begin_round(self, group: Group, attempt: _Attempt, deadline: float) -> Round:
        await self.release()
        loop, settings = asyncio.get_running_loop(), self.settings
        formed = loop.time()
        weight = 0.0
        if not settings.auxiliary:
            # Wait no longer than the others wait for a silent member: if we decide, they cannot go on without us.
            async with self._tensors(min(deadline, formed + settings.silence_s), group.round_id):
                attempt.request.take_values()
                with _fails_without_memory("its values could not be copied", group.round_id):
                    weight, bad = await shielded(self.core.env.executor.run(self._copy_in, attempt.prepare, group))
            if bad is not None and weight > 0:
                reason = "values that are not finite, or too large to be summed"
                event = LocalValuesRejected(prefix=self.prefix, tensor=bad, reason=reason)
                self.core.env.events.emit(event)
                weight = 0.0
        options = RoundOptions(
            min_group_size=settings.min_group_size,
            timeout_s=max(0.001, min(deadline, formed + settings.allreduce_timeout_s) - loop.time()),
            silence_s=settings.silence_s,
            reducer_silence_s=settings.reducer_silence_s,
            spare_s=attempt.strangers.spare_s(formed),
            since_last_s=attempt.since_last_s,
            most_weight=attempt.most_weight,
        )
        try:
            return Round(
                self.core.rounds(),
                group,
                self.vector,
                weight=weight,
                options=options,
                brief_s=self.conduct.brief_s(group.peers, attempt.strangers, formed),
                bad_lines=self.conduct.bad_lines.pausing(formed),
                on_lie=lambda leader: self.conduct.was_lied_to(leader, loop.time()),
            )
        except ConfigError as error:
            leader = group.members[group.coordinator].contact.peer
            if not group.leads:
                self.conduct.led_badly(leader, loop.time() - formed, loop.time(), attempt.strangers)
            reason = f"the group's plan does not fit: {error}"
            raise RoundFailed(reason, [leader], round_id=group.round_id) from error

    def _copy_in(self, prepare: Prepare, group: Group) -> tuple[float, int | None]:
        """The weight of the tensors' values, which are copied; and which of them cannot be counted."""
        weight, scale = prepare(group)
        return weight, self.vector.copy_in(scale, weight)

    async def _finish(self, round_: Round, group: Group, *, orderly: bool) -> None:
        """Give the group's streams back when nothing of the round reads them any more."""
        try:
            if orderly:
                await round_.end_streams(group.release)
            else:
                await round_.close(orderly=False)
        finally:
            group.release()
            self._finished_at = asyncio.get_running_loop().time()

    async def release(self) -> None:
        """Close the last round, which gave its averages to members that were left out: its memory is free then.

        Raises:
            RoundFailed: the last round does not let go of it.
        """
        if self._last_round is None:
            return
        if self._closing is None:
            self._closing = self._tasks.spawn(self._close(self._last_round, self._finishing))
        closing = self._closing
        await asyncio.wait([closing], timeout=_CLOSE_WITHIN_S)  # a cancelled caller leaves it alone
        if closing.done():
            closing.result()
        else:
            reason = f"the last round has not ended within {_CLOSE_WITHIN_S:g} s, and still uses its memory"
            advice = "work on tensors (a codec, say) hangs or waits for memory or processors: if it stays so, restart"
            self._warn(f"{reason}: {advice} this peer")
            raise RoundFailed(reason)

    async def _close(self, round_: Round, finishing: asyncio.Task[None] | None) -> None:
        try:
            if finishing is not None:
                await asyncio.wait([finishing])  # `_on_failure` tells its errors
            now = asyncio.get_running_loop().time()
            self.conduct.ended(round_.kept, self._finished_at - self._searched_at, now)
            await round_.close(orderly=False)
        finally:
            self._closing = None
        self._last_round = None

    @asynccontextmanager
    async def _tensors(self, until: float, round_id: bytes | None = None, but: str = "") -> AsyncIterator[None]:
        """Hold the tensors' lock; at `until` (loop time) raise `RoundFailed` with `but` and the lock's holder."""
        async with self.lock.acquire(max(0.0, until - asyncio.get_running_loop().time())) as has_come:
            if not has_come:
                if but:
                    sometimes("the tensors are held for too long after an average was agreed on")
                reason = f"{but}no access to the tensors in time: {self.lock.holder or 'somebody'} held them"
                raise RoundFailed(reason, round_id=round_id)
            yield

    async def _apply(self, apply: Apply | None) -> None:
        executor = self.core.env.executor
        if apply is not None:
            await executor.run(apply, self.vector)
        else:
            await executor.run(self.vector.apply, self.settings.averaging_alpha)
        if (what := self.vector.stood_still()) is not None:
            self._warn(
                f"{what}. Each such change is lost, however often it comes: keep the tensors in float32 (compute under "
                "torch.autocast), or, where a codec of 16 bits rounds them, give them as parameters "
                "(TensorRole.PARAMETER in tensor_infos), or use no codec"
            )
        self.sharing.changed()

    async def _unpack(self, members: Sequence[Member]) -> dict[PeerID, Any]:
        """What each of them has given for all; None if it cannot be read."""
        given = [member.gathered for member in members]
        read = await self.core.env.read(sum(map(len, given)), _read_all, given)
        for member, found in zip(members, read, strict=True):
            if isinstance(found, msgspec.MsgspecError):
                event = PeerDropped(peer=member.contact.peer, where="gather", reason=str(found))
                self.core.env.events.emit(event)
        values = (None if isinstance(found, msgspec.MsgspecError) else found for found in read)
        return dict(zip((member.contact.peer for member in members), values, strict=True))

    # ------------------------------------------------------------------------------------------------------ closing

    def _on_failure(self, error: BaseException) -> None:
        self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, message: str, *about: PeerID) -> None:
        if about and self.core.endpoint.has_twin:
            return  # what these lack may have gone to the other process of this peer
        self.core.env.events.emit(Warned(where=f"averager {self.prefix}", message=message, about=about))

    async def leave(self, grace_s: float) -> None:
        """Begin nothing new, and close: a search ends at once, a round in progress may go on for `grace_s` seconds."""
        self._leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._between_rounds.wait()
        await self.close()

    async def close(self, timeout_s: float = 4.0) -> None:
        """Stop: no more steps, no more sharing. Safe to call twice.

        Args:
            timeout_s: returns after that; work that has not ended by then ends later.
        """
        if self._ending is None:
            self.core.leavers.remove(self.leave)
            self.sharing.disable()
            self._finder.matchmaker.stop_serving()  # another averager may use the same prefix now
            self._ending = self._tasks.spawn(self._end())
        await asyncio.wait({self._ending}, timeout=timeout_s)  # the rest of it goes on, and holds memory

    async def _end(self) -> None:
        # The round first: it still uses the streams of its group.
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait({self._stepping})
        await asyncio.gather(self.release(), return_exceptions=True)
        await self._tasks.cancel()
        await self._finder.matchmaker.close()


@contextmanager
def _fails_without_memory(what: str, round_id: bytes) -> Iterator[None]:
    """Where there is no memory for a tile, the round fails."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RoundFailed(f"{what}: this peer has no memory for it ({error})", round_id=round_id) from error


class _Attempt(msgspec.Struct, frozen=True):
    """The values that all attempts of one step share."""

    request: StepRequest
    prepare: Prepare
    expected: Expected | None
    apply: Apply | None
    most_weight: MostWeight | None
    strangers: Strangers
    tag: str
    since_last_s: float


def _read_all(packed: Sequence[bytes]) -> list[Any]:
    """The plain values in these bytes, or the errors that say why there are none."""
    found = list[Any]()
    for each in packed:
        try:
            found.append(decode_plain(each))
        except msgspec.MsgspecError as error:
            found.append(error)
    return found
