"""The matchmaker of one averager: forms one group after another.

It outlives each search and keeps the knowledge for the next search (`Memory`): peers whose links were lost, the members
of the last group, how long the directory takes. It owns all tasks, so that each task that a search leaves behind (a
farewell, a withdrawal) ends in bounded time, at the latest with `close`.

If the expected peers are known and the last round succeeded, the leader of the last group leads the next one too. It
declares itself a little earlier than the others, and they ask it at once, without the directory. A peer that asks while
we do not search is refused: its read is stale, and it finds us again by our next declaration. If we led the last such
group, we wait a moment before refusing: the news that made the other peer search may be on its way to us.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.clock import Env
from shoal.errors import ClosedError, ConfigError, LocalError, PeerError, ShoalError
from shoal.events import GroupFormed, Warned
from shoal.matchmaking.group import MAX_GATHERED_BYTES, WHERE, ControlStream, Group, GroupDirectory
from shoal.matchmaking.inbound import Inbound
from shoal.matchmaking.machine import LOOKED_AT, GroupMachine
from shoal.matchmaking.search import Search
from shoal.matchmaking.signals import MAX_GROUP_SIZE, Memory, PeerGone, Rules
from shoal.matchmaking.terms import Plan, Terms
from shoal.peer import PeerID
from shoal.rpc import LOOK_S, Endpoint
from shoal.wire import Contact, Join, JoinRefused, Leave, Member

__all__ = ["Matchmaker"]

_FAREWELL_S = 3.0

_HELD_S = 0.5
"""If the leader of the last group does not search yet, it waits so long before it answers a peer that asks it."""


class Matchmaker:
    """Forms groups for one averager. Loop thread only.

    Args:
        endpoint: calls and streams of this peer; not owned.
        env: clock, chance, events.
        directory: the directory in which peers declare themselves.
        prefix: the averager's name; group keys are `prefix.0b` and bits.
        schema: describes our tensors; equal bytes are equal schemas.
        settings: named values that must be equal in the whole run.
        compare_schema: takes the schema and the id of another peer; returns a sentence naming the first difference, or
            None if both can average together. Must take any bytes.
        plan: takes a group's members, in order; returns how many elements each reduces, and the bytes of one part.
        target_group_size: a group of this many starts at once; None: a group of any size starts as soon as all peers
            that look are in it.
        min_group_size: a smaller group never starts.
        window_s: how long a declaration stands; then the group starts with the peers that are there.
        request_timeout_s: how long another peer or the directory may take to answer.
        settle_s: shortest quiet time after a join before a group that is not full may start; longer while members of
            the last group are missing, or if joins come with gaps.
        client_mode: only follow; never declare, lead or reduce.
        auxiliary: reduce for the others, with no values of our own. Others must be able to dial such a peer.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(  # noqa: PLR0913 (all but three are named by the caller)
        self,
        endpoint: Endpoint,
        env: Env,
        directory: GroupDirectory,
        *,
        prefix: str,
        schema: bytes,
        settings: Mapping[str, str],
        compare_schema: Callable[[bytes, PeerID], str | None],
        plan: Plan,
        target_group_size: int | None = None,
        min_group_size: int = 2,
        window_s: float = 5.0,
        request_timeout_s: float = 3.0,
        settle_s: float = 0.05,
        client_mode: bool = False,
        auxiliary: bool = False,
    ) -> None:
        _check_sizes(target_group_size, min_group_size)
        for name, value in (("window_s", window_s), ("request_timeout_s", request_timeout_s), ("settle_s", settle_s)):
            _check_seconds(name, value)
        if not prefix:
            raise ConfigError("prefix is empty: give the averager a name that is the same on all peers")
        self._endpoint, self._env, self._directory = endpoint, env, directory
        self._prefix, self._schema, self._settings = prefix, schema, dict(settings)
        self._compare_schema, self._plan = compare_schema, plan
        self._target_size, self._min_size = target_group_size, min_group_size
        self._window_s, self._request_timeout_s, self._settle_s = window_s, request_timeout_s, settle_s
        self._longest_window_s = window_s
        self._client_mode, self._auxiliary = client_mode, auxiliary
        self._memory = Memory()
        self._companions: tuple[str, frozenset[PeerID]] = ("", frozenset())
        self._search: Search | None = None
        self._searching = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._held: set[Inbound] = set()
        self._closed = self._ended = False
        self._stop_serving = endpoint.serve_stream(Join, self._serve_join, scope=prefix)
        self._unsubscribe = endpoint.on_lost(self._on_lost)

    # --------------------------------------------------------------------------------------------------- the work

    async def form_group(
        self,
        *,
        group_key: str,
        gathered: bytes = b"",
        reference: bytes = b"",
        bandwidth: float | None = None,
        window_s: float | None = None,
        deadline_s: float | None = None,
        one_window: bool = False,
        expected: Callable[[], frozenset[PeerID] | None] | None = None,
    ) -> Group:
        """Find a group and agree on it.

        Args:
            group_key: `prefix.0b` and bits: peers that look under the same key can meet.
            gathered: our value for all other members, at most 64 KiB.
            reference: the name of the average that our values may be coded against; empty: none.
            bandwidth: bytes/s that we say we have; None: unknown; 0: we reduce nothing.
            window_s: in place of the matchmaker's own.
            deadline_s: the search ends then, counted from now; None: one window only, and a few `request_timeout_s`
                more if another peer was found to lead.
            one_window: search for one window only, as without a deadline, but not beyond `deadline_s`.
            expected: returns the peers that are expected to join, None if not known. If we lead, the group starts as
                soon as all of them that are alive are there, and waits for them until the end of the window. Called
                often.

        Returns:
            The group. Its owner must `release` it.

        Raises:
            RoundFailed: there is no group; says why.
            SchemaMismatch: only peers whose tensors or settings differ were met; names the first difference.
            LocalError: a search is going on.
            ConfigError: an argument is out of its range.
            ClosedError: the matchmaker was closed.
        """
        if self._closed:
            raise ClosedError("this matchmaker was closed")
        if self._search is not None:
            raise LocalError("form_group was called while another form_group is running: one group at a time")
        member = self._member(gathered, bandwidth, reference)
        rules = self._rules(window_s, deadline_s, member, one_window=one_window)
        if not group_key.startswith(f"{self._prefix}.0b"):
            raise ConfigError(f"group_key is {group_key!r}, it must be '{self._prefix}.0b' followed by bits")
        started = asyncio.get_running_loop().time()
        search = self._search = self._new_search(group_key, member, rules, started, expected)
        self._searching.set()
        try:
            group = await search.run()
        except BaseException:
            search.abandon()
            raise
        finally:
            self._search = None
            self._searching.clear()
            search.close()
        self._companions = (group_key, frozenset(group.peers))
        self._remember(group if expected is not None else None)
        waited_s = asyncio.get_running_loop().time() - started
        self._env.events.emit(
            GroupFormed(
                prefix=self._prefix,
                round_id=group.round_id,
                peers=group.peers,
                coordinator=group.peers[group.coordinator],
                waited_s=waited_s,
            )
        )
        return group

    def _remember(self, group: Group | None) -> None:
        self._memory.led = group is not None and group.leads
        self._memory.leader = None if group is None or group.leads else group.members[group.coordinator].contact
        if group is not None and self._looking is None and len(group.members) <= LOOKED_AT:
            self._looking = self.spawn(self._look_loop())

    async def _look_loop(self) -> None:
        """Between searches: look at the peers that the next one would wait for, so that it knows which are silent.

        Members of a large group are not looked at: a silent one is noticed in the search.
        A follower will ask the leader of the last group first; the leader will wait for its members.
        """
        while (awaited := self._awaited()) and not self._closed:
            for peer in awaited if self._search is None else ():
                self._endpoint.is_silent(peer, soon=self._memory.led)
            await asyncio.sleep(LOOK_S)
        self._looking = None

    def _is_silent(self, peer: PeerID, soon: bool) -> bool:
        return self._endpoint.is_silent(peer, soon=soon)

    def _awaited(self) -> frozenset[PeerID]:
        if self._memory.led:
            return self._companions[1] if len(self._companions[1]) <= LOOKED_AT else frozenset()
        return frozenset() if self._memory.leader is None else frozenset({self._memory.leader.peer})

    def forget_leader(self) -> None:
        """The round of the last group failed: its leader has no privilege in the next one."""
        self._remember(None)

    def _member(self, gathered: bytes, bandwidth: float | None, reference: bytes) -> Member:
        if len(gathered) > MAX_GATHERED_BYTES:
            raise ConfigError(f"gathered is {len(gathered)} bytes long, at most {MAX_GATHERED_BYTES} can travel")
        if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth >= 0):
            raise ConfigError(f"bandwidth must be a number of bytes/s, 0 or None, got {bandwidth}")
        contact = Contact(self._endpoint.peer_id) if self._client_mode else self._endpoint.contact
        reduces = bool(contact.addresses) and bandwidth != 0
        if self._auxiliary and not reduces:
            raise ConfigError(
                "auxiliary=True needs a peer that can be dialed, and a bandwidth other than 0: give it both"
            )
        return Member(contact, reduces, bandwidth, gathered, contributes=not self._auxiliary, reference=reference)

    def _rules(self, window_s: float | None, deadline_s: float | None, member: Member, *, one_window: bool) -> Rules:
        window_s = self._window_s if window_s is None else window_s
        _check_seconds("window_s", window_s)
        self._longest_window_s = max(self._longest_window_s, window_s)
        if deadline_s is not None:
            _check_seconds("deadline_s", deadline_s)
        return Rules(
            target_size=self._target_size,
            min_size=self._min_size,
            window_s=window_s,
            deadline_s=deadline_s,
            one_window=one_window,
            settle_s=self._settle_s,
            settle_max_s=10 * self._settle_s,
            patience_s=self._request_timeout_s,
            reduces=member.reduces,
            contributes=member.contributes,
            leads=bool(member.contact.addresses),
            follow_grace_s=self._request_timeout_s,
        )

    def _new_search(
        self,
        group_key: str,
        member: Member,
        rules: Rules,
        now: float,
        expected: Callable[[], frozenset[PeerID] | None] | None,
    ) -> Search:
        last_key, companions = self._companions
        self._memory.companions = companions if last_key == group_key else frozenset()
        machine = GroupMachine(
            self._endpoint.peer_id,
            rules,
            self._memory,
            now=now,
            wall_offset_s=self._env.clock.time() - now,
            expected=expected,
            silent=self._is_silent,
            contact_of=self._endpoint.contact_of,
        )
        terms = Terms(
            group_key=group_key,
            schema=self._schema,
            settings=self._settings,
            compare_schema=self._compare_schema,
            plan=self._plan,
            member=member,
            min_size=self._min_size,
            request_timeout_s=self._request_timeout_s,
        )
        return Search(self._endpoint, self._env, self._directory, self, terms, machine)

    # ---------------------------------------------------------------------------------------------- from outside

    async def _serve_join(self, stream: ControlStream, join: Join) -> None:
        if self._search is None and self._memory.led:
            # The news that began its search is on its way to us too.
            with suppress(TimeoutError):
                async with asyncio.timeout(_HELD_S):
                    await self._searching.wait()
        if self._search is None:
            await stream.send(JoinRefused("not-looking", "not looking for a group now"))
        else:
            await self._search.serve(stream, join)

    def _on_lost(self, peer: PeerID, _reason: str) -> None:
        # Each declaration that it made before now ends at the latest one window from now.
        self._memory.lose(peer, self._env.clock.time() + self._longest_window_s)
        if self._search is not None:
            self._search.feed(PeerGone(peer))

    # --------------------------------------------------------------------------------------- for the search (Owner)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends with the matchmaker at the latest; the caller handles its exception."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def write(self, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Stop the write to the directory that goes on, then write this."""
        self._writer = self.spawn(self._write(self._writer, write))

    async def _write(self, before: asyncio.Task[None] | None, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if before is not None and not before.done():
            before.cancel()
            await asyncio.wait((before,), timeout=self._request_timeout_s)
        try:
            await write()
        except (ShoalError, TimeoutError) as error:
            text = str(error) or "no answer in time"
            self._env.events.emit(Warned(where=WHERE, message=f"could not withdraw a declaration: {text}"))

    def farewell(self, stream: ControlStream, *, leave: bool) -> None:
        """End a stream in order, in the background."""
        if self._ended:
            stream.abort()
        elif not stream.closed:
            self.spawn(_end(stream, leave=leave))

    def hold(self, inbounds: Sequence[Inbound]) -> None:
        """Note that these streams belong to a group now, until `release`."""
        self._held.update(inbounds)

    def release(self, streams: Sequence[ControlStream], inbounds: Sequence[Inbound]) -> None:
        """A group is over: end its control streams."""
        for stream in streams:
            self.farewell(stream, leave=False)
        for inbound in inbounds:
            inbound.release()
        self._held.difference_update(inbounds)

    # --------------------------------------------------------------------------------------------------- the end

    def stop_serving(self) -> None:
        """Let nobody join here any more. Safe to call twice."""
        self._stop_serving()

    async def close(self) -> None:
        """Stop: a running `form_group` raises `ClosedError`, groups are released, our declaration is withdrawn.

        Takes a few seconds at most. Safe to call twice.
        """
        if self._closed:
            return
        self._closed = True
        self.stop_serving()
        self._unsubscribe()
        if self._search is not None:
            self._search.fail(ClosedError("this matchmaker was closed"))
            self._search.close()
        self.release((), tuple(self._held))
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_FAREWELL_S)
        self._ended = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end(stream: ControlStream, *, leave: bool) -> None:
    try:
        async with asyncio.timeout(_FAREWELL_S):
            if leave:
                await stream.send(Leave())
            await stream.finish()
    except (PeerError, LocalError, TimeoutError):
        pass  # the other side is gone, or says something else: the stream cannot end in order
    finally:
        stream.abort()


def _check_sizes(target: int | None, least: int) -> None:
    if least < 1:
        raise ConfigError(f"min_group_size must be at least 1, got {least}")
    if target is not None and not max(least, 2) <= target <= MAX_GROUP_SIZE:
        raise ConfigError(
            f"target_group_size must be from {max(least, 2)} (min_group_size, or 2) to {MAX_GROUP_SIZE}, got {target}"
        )


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a positive number of seconds, got {value}")
