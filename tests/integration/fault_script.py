"""Members that something happens to, at moments that they find by themselves: run by workers, as `scripts`.

Each round the test tells all members the same cases. Whom one of them means strikes itself, once, when the moment
comes: no test has to guess a time. What is hooked stands in `hook`.

A slow member is slow on its line: each of its connections takes and gives `SLOW_BYTES_S`, paced above the encryption,
where the load of the machine makes no difference. SIGCONT makes it fast again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import shoal
from shoal.averaging import AveragerSettings
from shoal.averaging.allreduce.commit import CommitRules, MemberRules
from shoal.averaging.allreduce.member import Contributions
from shoal.averaging.matchmaking import Matchmaker
from shoal.events import Event, GroupFormed, RoundFinished
from shoal.protocol.wire import PartData
from shoal.rpc import Stream
from shoal.runtime import dht as dht_module
from shoal.transport.base import Acceptor, Buffer, Connection
from shoal.transport.tcp import TcpTransport
from tests.corruption import CorruptibleTransport, Gate
from tests.integration import scripts
from tests.integration.scripts import digest, hear, joined, say, tensors_of

MOMENTS = ("searching", "group formed", "sending", "reducing", "before commit", "after commit")
ROLES = ("sender", "reducer", "coordinator")
MEMBERS = 4
SETTINGS = AveragerSettings(silence_s=2.0, part_size_bytes=1 << 16)
SLOW_BYTES_S = 30_000.0
"""Of each connection of a slow member, each way. In the test's rounds 1 MB goes on each: half a minute, in place of a
third of a second."""


class Case(NamedTuple):
    """What happens to whom, and when.

    Attributes:
        role: `sender` (the member without bandwidth), `reducer` or `coordinator`.
        moment: see `MOMENTS`.
        what: `kill`, `stop`, `slow`, or what is sent from then on (`tests.corruption.KINDS`).
        after: how many tiles are sent or reduced first, for these two moments.
    """

    role: str
    moment: str
    what: str
    after: int


class Striker:
    """Knows the cases and the group, and strikes when the moment of its own comes.

    Attributes:
        bytes_s: what each connection carries each way; None: no limit.
    """

    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self.bytes_s: float | None = None
        self.forget()

    def forget(self) -> None:
        """Nothing happens any more."""
        self.cases: Sequence[Case] = ()
        self.mine: Case | None = None
        self.counts = dict.fromkeys(MOMENTS, 0)
        self.bytes_s = None
        for gate in self.gates:
            gate.kind = None

    def arm(self, cases: Sequence[Case], rank: int, sender: str) -> None:
        """The next round is begun; `sender` is the id of the last member."""
        self.forget()
        self.cases, self.sender = cases, sender
        if rank == MEMBERS - 1:
            self.mine = next((case for case in cases if case.moment == "searching"), None)

    def group(self, event: GroupFormed, me: shoal.PeerID) -> None:
        """Find out whether we are one of those who are meant. Nobody is meant twice."""
        if len(event.peers) != MEMBERS or any(case.moment == "searching" for case in self.cases):
            return
        sender = next(peer for peer in event.peers if str(peer) == self.sender)
        reducer = next(peer for peer in event.peers if peer not in (event.coordinator, sender))
        # The sender first: it may decide too, and then it reduces nothing all the same.
        for role, peer in (("reducer", reducer), ("coordinator", event.coordinator), ("sender", sender)):
            for case in self.cases:
                if case.role == role and peer == me:
                    self.mine = case
        self.reached("group formed")

    def reached(self, moment: str) -> None:
        """Something of the round has come to this point."""
        self.counts[moment] += 1
        case = self.mine
        if case is None or case.moment != moment or self.counts[moment] <= case.after:
            return
        self.mine = None
        say("struck", [case.role, time.monotonic()])
        if case.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif case.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif case.what == "slow":
            self.bytes_s = SLOW_BYTES_S
        else:
            for gate in self.gates:
                gate.kind = case.what


STRIKER = Striker()


class _SlowConnection:
    """A connection that takes its time while the striker says how much."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self._free_s = {"in": 0.0, "out": 0.0}

    async def write(self, *buffers: Buffer) -> None:
        await self._carry("out", sum(memoryview(buffer).nbytes for buffer in buffers))
        await self._inner.write(*buffers)

    async def readinto(self, buffer: bytearray | memoryview) -> None:
        # Before it is read: who gives up waiting has taken nothing.
        await self._carry("in", memoryview(buffer).nbytes)
        await self._inner.readinto(buffer)

    async def _carry(self, way: str, nbytes: int) -> None:
        """Wait until so much has gone through, behind what is on its way already."""
        if STRIKER.bytes_s is not None:
            loop = asyncio.get_running_loop()
            self._free_s[way] = max(self._free_s[way], loop.time()) + nbytes / STRIKER.bytes_s
            await asyncio.sleep(self._free_s[way] - loop.time())  # noqa: TID251 (the slowness that is tested)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Transport(TcpTransport):
    """Over TCP, with a gate and slowness above the encryption."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        outer = self

        class Inner:
            async def listen(self, acceptor: Acceptor) -> None:
                await TcpTransport.listen(outer, lambda connection: acceptor(_SlowConnection(connection)))

            async def dial(self, *found: Any, **limits: Any) -> Connection:
                return _SlowConnection(await TcpTransport.dial(outer, *found, **limits))

        self._gated = CorruptibleTransport(Inner(), random.Random(1))  # type: ignore[arg-type]
        STRIKER.gates.append(self._gated.gate)

    async def listen(self, acceptor: Acceptor) -> None:
        await self._gated.listen(acceptor)

    async def dial(self, *found: Any, **limits: Any) -> Any:
        return await self._gated.dial(*found, **limits)


def _before(owner: type, name: str, moment: str, *, if_: Callable[..., bool] = lambda *_: True) -> None:
    """Say that a moment has come when a method is called."""
    method = getattr(owner, name)

    def hooked(self: Any, *arguments: Any, **options: Any) -> Any:
        if if_(self, *arguments):
            STRIKER.reached(moment)
        return method(self, *arguments, **options)

    setattr(owner, name, hooked)


def _after(owner: type, name: str, moment: str, *, if_: Callable[[Any, Any], bool]) -> None:
    """Say that a moment has come when a method has returned, and before anybody hears what."""
    method = getattr(owner, name)

    def hooked(self: Any, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        if if_(self, result):
            STRIKER.reached(moment)
        return result

    setattr(owner, name, hooked)


def hook() -> None:
    """Put all hooks in place."""
    dht_module.TcpTransport = _Transport  # type: ignore[attr-defined]
    _before(Matchmaker, "form_group", "searching")
    _before(Stream, "send", "sending", if_=lambda _, message, *__: isinstance(message, PartData))
    _before(Contributions, "contributed", "reducing")
    # A member holds all and has not reported the last tile yet; the coordinator has decided, and told nobody.
    _after(MemberRules, "averaged", "before commit", if_=lambda rules, _: rules.commit is None and not rules.missing())
    _after(CommitRules, "commit", "before commit", if_=lambda _, decided: bool(decided))
    _before(MemberRules, "committed", "after commit")


def fail(*, initial_peers: list[str], rank: int, shapes: list[list[int]]) -> None:
    """Average once for the cases that the test tells, again and again until it tells null."""
    signal.signal(signal.SIGCONT, lambda *_: setattr(STRIKER, "bytes_s", None))
    with joined(initial_peers) as dht:
        formed: list[GroupFormed] = []
        rounds, times = [""], {"formed": 0.0}

        def note(event: Event) -> None:
            if isinstance(event, GroupFormed):
                formed.append(event)
                times["formed"] = time.monotonic()
                STRIKER.group(event, dht.peer_id)
            elif isinstance(event, RoundFinished):
                rounds.append(event.round_id.hex())

        dht.events.subscribe(note)
        tensors = tensors_of(rank, shapes, "float32")
        averager: shoal.DecentralizedAverager | None = None
        while (told := hear()) is not None:
            cases = [Case(*case) for case in told["cases"]]
            searching = any(case.moment == "searching" for case in cases)
            idle = rank == MEMBERS - 1 and any(case.role == "sender" for case in cases)
            if averager is not None:
                averager.shutdown()
            averager = shoal.DecentralizedAverager(
                tensors,
                dht,
                start=True,
                prefix="faults",
                sender_timeout=SETTINGS.silence_s,
                part_size_bytes=SETTINGS.part_size_bytes,
                bandwidth=0.0 if idle else None,
            )
            said: dict[str, Any] = {}
            STRIKER.arm(cases, rank, told["sender"])
            formed.clear()
            # A peer that was stopped in its search comes back when the others have ended: then it looks for nobody.
            timeout_s = 30.0 if searching else 100.0
            while not formed or len(formed[-1].peers) != MEMBERS:
                with averager.get_tensors():
                    for tensor, first in zip(tensors, tensors_of(rank, shapes, "float32"), strict=True):
                        tensor.copy_(first)
                before = digest(tensors)
                times["called"] = time.monotonic()
                try:
                    averager.step(gather=rank, timeout=timeout_s, allow_retries=False)
                    said = {"ok": True, "round": rounds[-1]}
                except shoal.RoundFailed as error:
                    said = {"ok": False, "reason": error.reason}
                times["known"] = time.monotonic()
                said["untouched"] = digest(tensors) == before
                if searching:
                    break
            said.update(times, hash=digest(tensors))
            say("round", said)
            hear()  # everybody has ended: the bad one may be good again
            STRIKER.forget()


if __name__ == "__main__":
    hook()
    scripts.SCRIPTS["fail"] = fail
    scripts.main()
