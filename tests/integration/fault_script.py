"""A member that something happens to, at a moment that it finds by itself: run by workers, as `scripts`.

Each round the test tells all members the same `Case`. The one that it means strikes itself, once, when the moment
comes: no test has to guess a time. What is hooked stands in `hook`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import shoal
from shoal.allreduce.commit import DeciderRules, MemberRules
from shoal.allreduce.reducer import ReducerRules
from shoal.events import Event, GroupFormed, RoundFinished
from shoal.matchmaking.search import Search
from shoal.rpc import Stream
from shoal.runtime import dht as dht_module
from shoal.transport.base import Acceptor, Connection
from shoal.transport.tcp import TcpTransport
from shoal.wire import PartData
from tests.corruption import CorruptibleTransport, Gate
from tests.integration import scripts
from tests.integration.scripts import digest, hear, joined, say, tensors_of

MOMENTS = ("searching", "group formed", "sending", "reducing", "before commit", "after commit")
ROLES = ("sender", "reducer", "decider")
MEMBERS = 4


class Case(NamedTuple):
    """What happens to whom, and when.

    Attributes:
        role: `sender` (the member without bandwidth), `reducer` or `decider`.
        moment: see `MOMENTS`.
        what: `kill`, `stop`, or what is sent from then on (`tests.corruption.KINDS`).
        after: how many parts are sent or reduced first, for these two moments.
    """

    role: str
    moment: str
    what: str
    after: int


class Striker:
    """Knows the case and the group, and strikes when its moment comes."""

    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self.forget()

    def forget(self) -> None:
        """Nothing happens any more."""
        self.case: Case | None = None
        self.meant = False
        self.counts = dict.fromkeys(MOMENTS, 0)
        for gate in self.gates:
            gate.kind = None

    def arm(self, case: Case, rank: int) -> None:
        """The next round is begun."""
        self.forget()
        self.case, self.rank = case, rank
        self.meant = case.moment == "searching" and rank == MEMBERS - 1

    def group(self, event: GroupFormed, me: shoal.PeerID) -> None:
        """Find out whether we are the one."""
        if self.case is None or self.case.moment == "searching" or len(event.peers) != MEMBERS:
            return
        others = [peer for peer in event.peers if peer != event.decider]
        self.meant = {
            "sender": self.rank == MEMBERS - 1,
            "reducer": others[0] == me,
            "decider": event.decider == me,
        }[self.case.role]
        self.reached("group formed")

    def reached(self, moment: str) -> None:
        """Something of the round has come to this point."""
        self.counts[moment] += 1
        case = self.case
        if not self.meant or case is None or case.moment != moment or self.counts[moment] <= case.after:
            return
        self.meant = False
        say("struck", time.monotonic())
        if case.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif case.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            for gate in self.gates:
                gate.kind = case.what


STRIKER = Striker()


class _Transport(TcpTransport):
    """Over TCP and TLS, with a gate above the encryption."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        outer = self

        class Inner:
            async def listen(self, acceptor: Acceptor) -> None:
                await TcpTransport.listen(outer, acceptor)

            async def dial(self, *found: Any, **limits: Any) -> Connection:
                return await TcpTransport.dial(outer, *found, **limits)

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
    _before(Search, "run", "searching")
    _before(Stream, "send", "sending", if_=lambda _, message, *__: isinstance(message, PartData))
    _before(ReducerRules, "contributed", "reducing")
    # A member holds all and has not reported the last part yet; the decider has decided, and told nobody.
    _after(MemberRules, "averaged", "before commit", if_=lambda rules, _: rules.commit is None and not rules.missing())
    _after(DeciderRules, "_maybe_commit", "before commit", if_=lambda _, sends: bool(sends))
    _before(MemberRules, "committed", "after commit")


def fail(*, initial_peers: list[str], rank: int, shapes: list[list[int]]) -> None:
    """Average once for each case that the test tells, until it tells null."""
    with joined(initial_peers) as dht:
        sizes, rounds = [0], [""]

        def note(event: Event) -> None:
            if isinstance(event, GroupFormed):
                sizes.append(len(event.peers))
                STRIKER.group(event, dht.peer_id)
            elif isinstance(event, RoundFinished):
                rounds.append(event.round_id.hex())

        dht.events.subscribe(note)
        tensors = tensors_of(rank, shapes, "float32")
        averagers: dict[bool, shoal.DecentralizedAverager] = {}
        while (told := hear()) is not None:
            case = Case(*told)
            idle = case.role == "sender" and rank == MEMBERS - 1
            for averager in averagers.values():
                averager.shutdown()
            averagers[idle] = averager = shoal.DecentralizedAverager(
                tensors,
                dht,
                start=True,
                prefix="faults",
                sender_timeout=2.0,
                part_size_bytes=1 << 16,
                bandwidth=0.0 if idle else None,
            )
            said: dict[str, Any] = {}
            STRIKER.arm(case, rank)
            del sizes[1:]
            # Who was stopped in its search comes back when the others have ended: then it looks for nobody.
            timeout_s = 30.0 if case.moment == "searching" else 100.0
            while sizes[-1] != MEMBERS:
                with averager.get_tensors():
                    for tensor, first in zip(tensors, tensors_of(rank, shapes, "float32"), strict=True):
                        tensor.copy_(first)
                before = digest(tensors)
                try:
                    averager.step(gather=rank, timeout=timeout_s, allow_retries=False)
                    said = {"ok": True, "round": rounds[-1]}
                except shoal.RoundFailed as error:
                    said = {"ok": False, "reason": error.reason}
                said["untouched"] = digest(tensors) == before
                if case.moment == "searching":
                    break
            said.update(hash=digest(tensors), at=time.monotonic())
            say("round", said)
            hear()  # everybody has ended: the bad one may be good again
            STRIKER.forget()


if __name__ == "__main__":
    hook()
    scripts.SCRIPTS["fail"] = fail
    scripts.main()
