"""The receiver's side: get a complete, verified state from donors that may lie, stall, change or die.

The donors of the highest priority are asked together (see `candidates` for the order), up to `max_donors` at a time;
the others stand by for those that fail. Of the snapshots that they describe one is chosen. All donors whose tensors are
the same, chunk hash by chunk hash, feed the download in parallel (see `feed`). Rules:

- The result is exactly one donor's snapshot: complete, every chunk verified, with the metadata and the epoch of its
  manifest. Otherwise `StateUnavailable` is raised, and nothing was handed over. Metadata does not tell states apart: if
  several donors have the same tensors, the metadata is the chosen donor's, even if that donor is lost on the way.
- Of several states one that donors at two hosts describe is chosen; then that of the latest epoch; then the one that
  most donors have; then that of the donor asked first. Once a state was chosen and not given, the one that most donors
  have comes before the latest.
- A state that only one host describes is fetched, too, while donors at other hosts have yet to describe theirs. But it
  is not handed over before they have, or had time to; and one that two hosts describe is fetched in its place. So a
  donor that is first gives nobody a state of its own.
- Donors of another state wait until no donor is left that has the chosen one. Then all are asked anew: chunks whose
  hash is the same are kept. If the state is laid out differently the download begins anew.
- A state that comes so slowly that it would not be complete in time is given up: after `_SLOW_S` if there is another
  donor to ask, else after `_HOPELESS_S`. If the rest would take longer than `_HOPELESS_S`, two donors of lower priority
  are asked, too, for the same state. And if more donors of the same priority have another state, that one is fetched in
  its place, once. So a donor that gives little keeps nobody from a good state, or from going on without one.
- A donor that breaks the protocol (a wrong hash, an impossible manifest, a state with NaN or with infinities that it
  did not tell of) is dropped by name and not asked again.
- A donor is not at fault if this machine has no memory for its state: `NoMemoryForState` says how much is needed.
- The state is held once (see `assembly`); a chunk is received straight into its place.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from shoal.base.clock import Env, seconds_text
from shoal.base.peer import PeerID, site_of
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Changes
from shoal.errors import (
    ConfigError,
    NoMemoryForState,
    PeerError,
    PeerProtocolError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    StateUnavailable,
)
from shoal.events import PeerDropped, StateDownloaded
from shoal.protocol.wire import GetManifest, ManifestPending
from shoal.rpc import Endpoint
from shoal.state.wire.arrivals import HOPE, Intake
from shoal.state.wire.candidates import Candidates, Donor
from shoal.state.wire.feed import END_WITHIN_S, Feed, MayRead, Target
from shoal.state.wire.manifest import MAX_TENSORS, Accept, Manifest, read_manifest, shares

__all__ = ["Donor", "DownloadLimits", "DownloadedState", "download_state"]

_PROMPT_S = 2.0
"""Donors of lower priority are asked, too, where those above have described nothing within this time."""

_SLOW_S, _HOPELESS_S = 10.0, 120.0
"""The pace of a state is watched for so long before more donors are asked for it, or it is given up for another one; or
for good."""

_MORE_DONORS = 2
"""So many of lower priority are asked for a state that comes slowly. Each may have to copy its own for that, and our
own line may be the slow one."""

_CHOOSE_WITHIN_S = 0.3
"""After the first donor has described its state, the others have so long before one of the states is chosen."""

_CONFIRM_WITHIN_S = 5.0
"""The same, before a state is handed over that only one host has described."""


class DownloadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on what a donor may cost us, and we may cost donors.

    Attributes:
        max_state_bytes: the largest state that is taken.
        max_tensors: the most tensors that a state may have. A receiver that has a model of its own takes some for each
            of its tensors instead.
        answer_timeout_s: limit for each answer of a donor that is asked for its state. A donor that needs longer to
            make its snapshot says "not yet" after two seconds.
        stall_s: a donor that sends nothing for this long is dropped, even if it gives signs of life; on a slow line
            later.
        manifest_timeout_s: longest time that a donor may take to make its snapshot.
        max_donors: donors that are asked, and send, at the same time; others take the places of those that end.
    """

    max_state_bytes: int = 64 << 30
    max_tensors: int = MAX_TENSORS
    answer_timeout_s: float = 5.0
    stall_s: float = 5.0
    manifest_timeout_s: float = 60.0
    max_donors: int = 16


@dataclass(frozen=True)
class DownloadedState:
    """A complete and verified state.

    Attributes:
        metadata: plain values, from the donor whose snapshot this is.
        tensors: new tensors in host memory.
        epoch: the epoch that the donor says it is of.
        donors: the donors that sent the chunks; the first is the one whose snapshot this is.
        bytes_received: payload received, including chunks that were fetched again.
        duration_s: seconds.
    """

    metadata: Any
    tensors: list[torch.Tensor]
    epoch: int
    donors: tuple[PeerID, ...]
    bytes_received: int
    duration_s: float


async def download_state(  # noqa: PLR0913 (all but four by name)
    endpoint: Endpoint,
    env: Env,
    prefix: str,
    donors: Sequence[Donor],
    *,
    timeout_s: float,
    min_epoch: int = 0,
    accept: Accept | None = None,
    limits: DownloadLimits | None = None,
    may_read: MayRead | None = None,
    intake: Intake | None = None,
) -> DownloadedState:
    """Download the state that is shared under `prefix`.

    Args:
        endpoint: reaches the donors.
        env: chance (order of equal donors), executor (memory, last checks), events.
        prefix: which state.
        donors: the donors to ask.
        timeout_s: longest time in all, seconds.
        min_epoch: a state of an earlier epoch is not wanted.
        accept: looks at each manifest before anything is fetched; None takes any. See `matching`.
        limits: the limits on what a donor may cost.
        may_read: awaited before every read, so that other traffic can come first on our line.
        intake: told what comes.

    Raises:
        StateUnavailable: no donor gave the state; the message has each donor's reason. Nothing was changed.
        NoMemoryForState: the same, and this machine has no memory for a state that was offered.
        ConfigError: `timeout_s` is not positive, or no donor may be asked.
    """
    limits = limits or DownloadLimits()
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s}, must be more than 0 seconds")
    if limits.max_donors < 1:
        raise ConfigError(f"max_donors is {limits.max_donors}, must be at least 1")
    download = _Download(endpoint, env, prefix, donors, min_epoch, accept, limits, may_read, intake)
    try:
        async with asyncio.timeout(timeout_s):
            with env.low_latency():
                return await download.run(timeout_s)
    except TimeoutError:
        raise StateUnavailable(download.describe(f"no complete state within {seconds_text(timeout_s)}")) from None


class _Busy(Exception):
    """The donor asks us to come again; no fault of its own."""


class _OtherState(Exception):
    """The donor's state is not the one that is being fetched; no fault of its own."""


class _Download:
    """One call of `download_state`."""

    def __init__(  # noqa: PLR0913, PLR0917 (those of `download_state`)
        self,
        endpoint: Endpoint,
        env: Env,
        prefix: str,
        donors: Sequence[Donor],
        min_epoch: int,
        accept: Accept | None,
        limits: DownloadLimits,
        may_read: MayRead | None,
        intake: Intake | None,
    ) -> None:
        self._endpoint, self._env, self._prefix = endpoint, env, prefix
        self._min_epoch, self._accept, self._limits, self._may_read = min_epoch, accept, limits, may_read
        self._candidates = Candidates(donors, env.rng, endpoint.peer_id)
        self._turns: dict[asyncio.Task[None], Donor] = {}
        self._described: dict[Donor, Manifest] = {}  # the last manifest of each
        self._offers: dict[Donor, Manifest] = {}  # the states described while none is chosen
        self._described_at = self._now()  # the first of those among which one was chosen, or is to be
        self._chosen = asyncio.Event()
        self._changes = Changes()
        self._target: Target | None = None
        self._first: PeerID | None = None  # the donor whose snapshot is fetched
        self._spoiled: list[Manifest] = []
        self._no_memory: MemoryError | None = None
        self._bytes_before = 0  # received for states that were given up
        self._started = self._now()
        self._intake = intake or Intake(self._started)
        self._deadline = math.inf
        self._asked_at = self._started  # since then donors are asked, and none has described a state
        self._least = -math.inf  # the priority of those among whose states one was chosen
        self._slow = False  # the rest would take longer than `_HOPELESS_S`
        self._more = _MORE_DONORS  # of lower priority, that may be asked yet
        self._moved = False  # to the state that most donors have, as that of fewer came slowly
        self._doubted = False  # a state of one host was left for that of two
        self._looked = (self._started, 0)  # the pace is counted from here: time, and bytes until then

    def describe(self, what: str) -> str:
        """The summary of the download, with the record of each donor."""
        return f"{what} for {self._prefix!r} ({self._candidates.describe()})"

    async def run(self, timeout_s: float) -> DownloadedState:
        """Let donors feed until one state is complete; it is given up where that would take longer than `timeout_s`."""
        self._deadline = self._started + timeout_s
        try:
            while True:
                seen = self._changes.count
                self._collect_turns()
                if self._target is not None and self._chosen.is_set() and self._is_doubtful(self._target.manifest):
                    sometimes("a state of one host is left for one that two hosts describe")
                    self._doubted = True
                    await self._end_turns()
                    self._chosen.clear()
                if self._target is not None and self._is_ready(self._target):
                    if (state := await self._finish(self._target)) is not None:
                        return state
                    continue
                self._give_up_slow()
                self._start_turns()
                self._choose()
                if not self._turns and self._candidates.ready_at(None) is None:
                    if self._no_memory is not None:
                        raise NoMemoryForState(str(self._no_memory)) from self._no_memory
                    raise StateUnavailable(self.describe("no donor gave a complete state"))
                await self._wait(seen)
        finally:
            await self._end_turns()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # --------------------------------------------------------------------------------------------------------- turns

    @property
    def _level(self) -> float | None:
        """The least priority of donors that are asked; None: also those that were put aside for another state."""
        if not self._turns:
            return None
        if not self._chosen.is_set():
            in_vain = not self._offers and self._now() >= self._asked_at + _PROMPT_S
            return None if in_vain else min(each.priority for each in self._turns.values())
        # Who has the chosen state may give it, whoever that is: each chunk has its hash.
        return -math.inf if self._slow and self._more else self._least

    def _start_turns(self) -> None:
        while len(self._turns) < self._limits.max_donors:
            level = self._level
            donor = self._candidates.next(self._now(), level)
            if donor is None:
                return
            self._more -= level == -math.inf
            if not self._turns:  # no donor is left that has the chosen state
                self._offers.clear()
                self._chosen.clear()
                self._asked_at = self._now()
            task = asyncio.get_running_loop().create_task(self._turn(donor))
            task.add_done_callback(lambda _: self._changes.notify())
            self._turns[task] = donor

    def _collect_turns(self) -> None:
        for task in [task for task in self._turns if task.done()]:
            donor = self._turns.pop(task)
            if task.cancelled():
                self._candidates.failed(donor, "too slow", self._now(), brought_chunks=False)
            else:
                task.result()  # a turn handles all errors of a donor: others are for our caller

    async def _end_turns(self) -> None:
        for task, donor in self._turns.items():
            task.cancel()
            self._candidates.again(donor, self._now())
        if self._turns:
            await asyncio.wait(self._turns)
        self._turns.clear()

    async def _wait(self, seen: int) -> None:
        """Wait until a turn has ended, the state is complete, or it is time to choose a state or to ask a donor."""
        now, since = self._now(), self._looked[0]
        looks = [since + _SLOW_S, since + _HOPELESS_S]
        looks += [self._described_at + _CHOOSE_WITHIN_S, self._described_at + _CONFIRM_WITHIN_S]
        times: list[float | None] = [at for at in looks if at > now]
        if not self._chosen.is_set() and now < self._asked_at + _PROMPT_S:
            times.append(self._asked_at + _PROMPT_S)
        if len(self._turns) < self._limits.max_donors:
            times.append(self._candidates.ready_at(self._level))
        until = min((at for at in times if at is not None), default=None)
        await self._changes.after(seen, None if until is None else until - now)

    def _give_up_slow(self) -> None:
        """Leave donors whose state would not be complete in time, at the pace of the last seconds."""
        now, target = self._now(), self._target
        (since, before), received = self._looked, self._bytes_before + (target.bytes_received if target else 0)
        if now < since + _SLOW_S:
            return
        missing = target.missing_bytes if target is not None else 1
        pace = (received - before) / (now - since)
        self._slow = target is not None and pace * _HOPELESS_S < missing
        if HOPE * pace * (self._deadline - now) >= missing and not self._should_move(target):
            self._looked = now, received
            return
        feeding = [task for task, donor in self._turns.items() if target is not None and donor.peer in target.feeds]
        if feeding and self._candidates.ready_at(None) is not None:
            for task in feeding:
                sometimes("a donor is too slow for a state to come in time")
                task.cancel()
            self._looked = now, received
        elif now >= since + _HOPELESS_S:
            sometimes("all donors are too slow for a state to come in time")
            raise StateUnavailable(self.describe("no donor gives a state fast enough"))

    def _should_move(self, target: Target | None) -> bool:
        """Whether a state that comes slowly is given up for one that more donors have, of no lower priority; once.

        A later state costs nothing to name. Given slowly, that of one donor would take all the time that there is.
        """
        if self._moved or target is None or not self._slow:
            return False
        ours = _having(target.manifest, self._described)
        level = max((donor.priority for donor in ours), default=math.inf)
        others = [each for donor, each in self._described.items() if donor.priority >= level and donor not in ours]
        self._moved = max((sum(map(each.same_content, others)) for each in others), default=0) > len(ours)
        return self._moved

    async def _turn(self, donor: Donor) -> None:
        """One donor describes its state, and feeds it if it is the chosen one."""
        candidates, feed = self._candidates, None
        try:
            manifest = await self._describe_state(donor)
            feed = await self._join(donor, manifest)
            await feed.run()
            if feed.beaten:
                candidates.beaten(donor, self._now())
        except _Busy:
            candidates.busy(donor, self._now())
        except _OtherState:
            candidates.other_state(donor, self._now())
        except MemoryError as error:
            self._no_memory = error  # a donor of another state, with smaller tensors, may still help
            candidates.failed(donor, str(error), self._now(), brought_chunks=False)
        except PeerProtocolError as error:
            self._drop(donor.peer, error.message)
        except PeerError as error:
            brought = feed is not None and feed.chunks_brought > 0
            if brought:
                sometimes("a donor is lost that gave a part of the state")
            if self._target is not None and not self._target.plan.missing:
                sometimes("a donor is lost when only chunks under way are missing")
            # One that was giving may have left us for others that waited: we come again, as to one that is busy.
            left = isinstance(error, PeerUnreachable) and feed is not None and feed.was_giving
            if (left or isinstance(error, PeerRefused)) and feed is not None and not brought:
                candidates.refused(donor, error.message, self._now())
            else:
                candidates.failed(donor, error.message, self._now(), brought_chunks=brought)

    def _drop(self, peer: PeerID, reason: str) -> None:
        sometimes("a donor breaks the protocol")
        self._candidates.dropped(peer, reason)
        self._intake.dropped(peer)
        self._env.events.emit(PeerDropped(peer=peer, where="state download", reason=reason))

    async def _describe_state(self, donor: Donor) -> Manifest:
        """The donor's manifest, checked; waits while it is being made."""
        limits, min_epoch = self._limits, max(self._min_epoch, donor.min_epoch)
        give_up_at = self._now() + limits.manifest_timeout_s
        while self._now() < give_up_at:
            request = GetManifest(self._prefix, min_epoch)
            try:
                reply = await self._endpoint.call(donor.contact, request, timeout_s=limits.answer_timeout_s)
            except PeerTimeout:
                if self._endpoint.is_silent(donor.peer) or not self._endpoint.connected(donor.peer):
                    raise
                continue  # it lives: the answer may wait behind other traffic on a slow line
            if not isinstance(reply, ManifestPending):
                # In a thread, both: there may be hundreds of thousands of tensors.
                run = self._env.executor.run
                read = partial(read_manifest, max_state_bytes=limits.max_state_bytes, max_tensors=limits.max_tensors)
                manifest = await run(read, reply)
                if manifest.epoch < min_epoch:
                    wanted = f"wanted is {min_epoch} or later"
                    raise PeerRefused(f"its state is of epoch {manifest.epoch}, {wanted}", donor.peer)
                if self._accept is not None and (reason := await run(self._accept, manifest)):
                    raise PeerRefused(reason, donor.peer)
                if any(manifest.same_content(spoiled) for spoiled in self._spoiled):
                    raise PeerProtocolError("its state is one that was refused already", donor.peer)
                return manifest
            if reply.busy:
                raise _Busy
            await asyncio.sleep(0.05)  # a good donor has waited already; a bad one could make us spin
        raise PeerTimeout(f"made no snapshot within {seconds_text(limits.manifest_timeout_s)}", donor.peer)

    async def _join(self, donor: Donor, manifest: Manifest) -> Feed:
        self._described[donor] = manifest
        if not self._chosen.is_set():
            if not self._offers:
                self._described_at = self._now()
            self._offers[donor] = manifest
            self._changes.notify()
            await self._chosen.wait()
        target = self._target
        assert target is not None, "a state was chosen"
        if not target.manifest.same_content(manifest):
            raise _OtherState
        self._intake.asked.add(donor.peer)
        where = self._endpoint, self._env, self._prefix, donor.contact, manifest.snapshot
        return Feed(*where, target, stall_s=self._limits.stall_s, may_read=self._may_read)

    def _choose(self) -> None:
        """Choose a state once all donors that were asked have described theirs, or had time to.

        One that is dead or stopped keeps nobody waiting if three quarters of all describe the same state.
        """
        if self._chosen.is_set() or not self._offers:
            return
        asked, described = len(self._turns), list(self._offers.values())
        waits = len(described) < asked and self._now() < self._described_at + _CHOOSE_WITHIN_S
        if waits and 4 * len(described) < 3 * asked:  # before they are compared: their hashes may be many
            return
        having = {donor: _having(manifest, self._offers) for donor, manifest in self._offers.items()}

        def order(each: tuple[Donor, Manifest]) -> tuple[float, bool, int, int]:
            (donor, manifest), votes = each, len(having[each[0]])
            # A later state costs nothing to name: once one was chosen and not given, those of many donors come first.
            by_epoch = (manifest.epoch, votes) if self._target is None else (votes, manifest.epoch)
            return donor.priority, _at_two_hosts(having[donor]), *by_epoch

        donor, manifest = max(self._offers.items(), key=order)
        if waits and 4 * len(having[donor]) < 3 * asked:
            return
        self._first, self._least = donor.peer, min(each.priority for each in self._turns.values())
        if self._target is None:
            self._target = Target(manifest, self._changes, self._intake)
        else:
            sometimes("another state is fetched in place of one that has no donor left")
            self._target.move_to(manifest)
        self._offers.clear()
        self._chosen.set()
        self._changes.notify()

    def _is_doubtful(self, manifest: Manifest) -> bool:
        """Whether one host alone describes the state that is fetched, and two describe another, of no lower priority.

        That is looked at once: donors may have newer states each time that they are asked.
        """
        if self._doubted or _at_two_hosts(ours := _having(manifest, self._described)):
            return False
        level = max((donor.priority for donor in ours), default=math.inf)
        others = {
            donor: each for donor, each in self._described.items() if donor.priority >= level and donor not in ours
        }
        return any(_at_two_hosts(_having(each, others)) for each in others.values())

    # ----------------------------------------------------------------------------------------------------- all of it

    def _is_ready(self, target: Target) -> bool:
        """Whether the state is complete, and two hosts describe it, or no other host may yet do so in time."""
        if not target.plan.complete or not self._chosen.is_set():
            return False
        ours = _having(target.manifest, self._described)
        if self._now() >= self._described_at + _CONFIRM_WITHIN_S or _at_two_hosts(ours):
            return True
        hosts = set(map(_site, ours))
        waits = any(
            each not in self._described and _site(each) not in hosts and not self._endpoint.is_silent(each.peer)
            for each in self._turns.values()
        )
        if waits:
            sometimes("a complete state of one host waits for the word of another")
        return not waits

    async def _finish(self, target: Target) -> DownloadedState | None:
        """Hand the state over; None if its values are bad."""
        assert self._first is not None, "a state was chosen"
        manifest, first = target.manifest, self._first
        ending = [task for task, donor in self._turns.items() if self._ends(target, donor)]
        if ending:
            await asyncio.wait(ending, timeout=END_WITHIN_S)
        await self._end_turns()
        donors = tuple(dict.fromkeys((first, *target.plan.contributors)))
        bytes_received = self._bytes_before + target.bytes_received
        # In every case the buffers are used up: another state would begin anew.
        self._target, self._bytes_before = None, bytes_received
        try:
            parts = shares(manifest.tensors)
            taken = await asyncio.gather(*(self._env.executor.run(target.assembly.finish, part) for part in parts))
        except MemoryError as error:
            raise NoMemoryForState(str(error) or "this machine has no memory to decode the state") from error
        except PeerProtocolError as error:
            sometimes("a complete state has bad values")
            self._spoiled.append(manifest)
            for donor, theirs in self._described.items():
                if theirs.same_content(manifest):
                    self._drop(donor.peer, error.message)
            return None
        tensors = [tensor for part in taken for tensor in part]
        duration_s = self._now() - self._started
        self._env.events.emit(
            StateDownloaded(prefix=self._prefix, donors=donors, bytes_received=bytes_received, duration_s=duration_s)
        )
        return DownloadedState(manifest.metadata, tensors, manifest.epoch, donors, bytes_received, duration_s)

    def _ends(self, target: Target, donor: Donor) -> bool:
        feed = target.feeds.get(donor.peer)
        return feed is not None and feed.idle


def _having(manifest: Manifest, described: Mapping[Donor, Manifest]) -> list[Donor]:
    """Those of these donors that describe this state."""
    return [donor for donor, each in described.items() if each.same_content(manifest)]


def _site(donor: Donor) -> str:
    """The host of a donor; one that announces none counts by itself."""
    return site_of(donor.host) if donor.host else str(donor.peer)


def _at_two_hosts(donors: Iterable[Donor]) -> bool:
    return len(set(map(_site, donors))) > 1
