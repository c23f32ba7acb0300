"""Whether others can dial this peer: they are asked to try, and it acts on what they say.

**The question** (`DialBack`) names a port and nothing else: the peer that is asked dials the address that the question
came from, so nobody can have it dial a third party (libp2p's AutoNAT has the same rule, for the same reason). It never
dials its own machine or a link-local address; it dials a host `_PER_HOST` times in a burst and then every
`_EVERY_S`, at most `_AT_ONCE` at a time, and answers with yes or no only: it is no scanner of ports either.

**The verdict.** Up to `_ASKED` peers on different hosts are asked. If more say yes than no, others can dial this peer.
Otherwise it becomes a client: it goes on without announcing an address, so that nobody waits for it. If nobody answers,
it announces where it listens, as before. A client asks again after `_AGAIN_S`, then ever more rarely: somebody may have
opened the way.

**`NoWayIn`.** If a peer finds that it cannot dial another, live peer (`rpc.ways`), it says so. This alone changes
nothing, as anybody can say it: the other peer asks peers of its own choice again, at most every `_LOOK_AGAIN_S`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.bounded import put_last
from shoal.errors import ClosedError, ConfigError, PeerError, PeerRefused
from shoal.events import Warned
from shoal.peer import Address, PeerID
from shoal.rpc.endpoint import Endpoint
from shoal.rpc.rate_limiter import RateLimiter
from shoal.rpc.rhythm import LOOK_S
from shoal.sometimes import sometimes
from shoal.tasks import Tasks
from shoal.transport.sockets import is_loopback
from shoal.wire import Ballast, DialBack, DialedBack, Noted, NoWayIn, Whereabouts

__all__ = ["Reachability", "Verdict"]

T = TypeVar("T")

_DIAL_S = 3.0
_ANSWER_S = 4.0
_ASKED = 3
_AT_ONCE = 8
_PER_HOST, _EVERY_S = 32.0, 2.0
_MAX_HOSTS = 1024
_LOOK_AGAIN_S = 60.0
_AGAIN_S, _LONGEST_PAUSE_S = 300.0, 3600.0
_TELL_S = 3.0
_KEPT_S, _MAX_KEPT = 1800.0, 16
_PIECE_BYTES, _PIECES_AT_ONCE, _PROBE_BYTES = 1 << 15, 4, 384 << 10
"""The probe stays below what one host may send at once (`allowance`): beyond that it would measure the allowance."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answers of the others.

    Attributes:
        reached: the peers that could dial us, each with the address at which it sees us.
        failed: the peers that could not, each with the address that it tried.
    """

    reached: tuple[tuple[PeerID, str], ...]
    failed: tuple[tuple[PeerID, str], ...]

    @property
    def asked(self) -> int:
        """How many peers have tried."""
        return len(self.reached) + len(self.failed)

    @property
    def can_be_reached(self) -> bool:
        """Whether to announce an address: nobody has tried, or most could dial us."""
        return len(self.reached) > len(self.failed) or not self.asked


class Reachability:
    """Dials others back, and asks others to dial this peer back. Loop only.

    Args:
        endpoint: this peer's.

    Attributes:
        verdict: the last verdict; None if nobody was asked yet.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.verdict: Verdict | None = None
        self._dialing = 0
        self._questions = RateLimiter(1.0 / _EVERY_S, _PER_HOST, max_askers=_MAX_HOSTS)
        self._looking: asyncio.Task[Any] | None = None
        self._looked_at = float("-inf")
        self._shut_out: dict[PeerID, tuple[float, frozenset[Address]]] = {}
        self._tasks = Tasks(_report)
        endpoint.serve(DialBack, self._dial_back)
        endpoint.serve(Whereabouts, self._moved)
        endpoint.serve(NoWayIn, self._told_no_way)
        endpoint.serve(Ballast, lambda _peer, _request: Noted())
        endpoint.on_way_shut(self._way_shut)

    # ----------------------------------------------------------------------------------------------------- for others

    async def _dial_back(self, peer: PeerID, request: DialBack) -> DialedBack:
        own, host = self._endpoint.hosts_of(peer)
        if not _may_be_dialed(host) or host == own:
            raise PeerRefused("from here nobody can tell whether others reach you", peer)
        now = asyncio.get_running_loop().time()
        if self._dialing >= _AT_ONCE or not self._questions.allows(host, 1.0, now):
            raise PeerRefused("too many questions", peer, code="busy")
        self._dialing += 1
        try:
            reached = await self._endpoint.gets_in(Address(host, request.port, peer), timeout_s=_DIAL_S)
        finally:
            self._dialing -= 1
        return DialedBack(reached, host)

    def _moved(self, peer: PeerID, request: Whereabouts) -> Noted:
        if request.contact.peer != peer:
            raise PeerError("addresses of another peer", peer)
        self._endpoint.moved(request.contact)
        return Noted()

    # ------------------------------------------------------------------------------------------------------- for us

    async def find_out(self) -> Verdict:
        """Ask connected peers whether they can dial us, and announce the result to all of them.

        If nobody answers, this counts as yes the first time, and changes nothing later.
        """
        answers = await self._of_each(self._ask, self._whom_to_ask())
        tried = [answer for answer in answers if answer is not None]
        if not tried and self.verdict is not None:
            return self.verdict
        told, before = self.verdict is not None and not self.verdict.can_be_reached, self._endpoint.contact
        verdict = self.verdict = Verdict(
            tuple((peer, host) for peer, host, reached in tried if reached),
            tuple((peer, host) for peer, host, reached in tried if not reached),
        )
        if verdict.can_be_reached:
            self._endpoint.announce(*self._seen_at(verdict))
        else:
            self._endpoint.withhold()
            if not told:
                self._endpoint.env.events.emit(Warned(where="reachability", message=self._unreachable(verdict)))
        if self._endpoint.contact != before:
            await self._of_each(self._tell, self._endpoint.peers)
        return verdict

    async def _of_each(self, call: Callable[[PeerID], Coroutine[Any, Any, T]], peers: Iterable[PeerID]) -> list[T]:
        """Call these peers at once; returns what came of it. A silent one is not waited for: it may have vanished."""
        calls = {peer: self._tasks.spawn(call(peer)) for peer in peers}
        try:
            while due := [each for peer, each in calls.items() if not (each.done() or self._endpoint.is_silent(peer))]:
                await asyncio.wait(due, timeout=LOOK_S)
        except BaseException:
            for each in calls.values():
                each.cancel()
            raise
        return [each.result() for each in calls.values() if each.done()]

    def watch(self, look_around: Callable[[], Awaitable[None]], on_opened: Callable[[], None]) -> None:
        """Ask again now and then while others cannot dial us.

        Args:
            look_around: connects with neighbours, and makes us known to them.
            on_opened: called once others can dial us.
        """
        self._tasks.spawn(self._watch(look_around, on_opened))

    async def _watch(self, look_around: Callable[[], Awaitable[None]], on_opened: Callable[[], None]) -> None:
        pause_s = _AGAIN_S
        while True:
            await asyncio.sleep(pause_s * self._endpoint.env.rng.uniform(0.8, 1.0))
            if self.verdict is None or self.verdict.can_be_reached:
                pause_s = _AGAIN_S
                continue
            await look_around()  # idle links are closed: there must be somebody to ask
            if (await self.find_out()).can_be_reached:
                await look_around()
                on_opened()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _whom_to_ask(self) -> list[PeerID]:
        """Peers on different hosts, none of them ours."""
        chosen: dict[str, PeerID] = {}
        for peer in self._endpoint.peers:
            own, host = self._endpoint.hosts_of(peer)
            if host and host != own:
                chosen.setdefault(host, peer)
        peers = list(chosen.values())
        return self._endpoint.env.rng.sample(peers, min(_ASKED, len(peers)))

    async def _ask(self, peer: PeerID) -> tuple[PeerID, str, bool] | None:
        listens_at = self._endpoint.listens_at
        if not listens_at:
            return None
        try:
            answer = await self._endpoint.call(peer, DialBack(listens_at[0].port), timeout_s=_ANSWER_S)
        except (PeerError, ClosedError):
            return None
        with suppress(ConfigError):
            return peer, Address(answer.host, 1, peer).host, answer.reached
        return None

    def _seen_at(self, verdict: Verdict) -> tuple[Address, ...]:
        """The address at which most have reached us, unless we announce it already: that of a router, for example."""
        hosts = Counter(host for _, host in verdict.reached)
        if not hosts:
            return ()
        (host, votes), port = hosts.most_common(1)[0], self._endpoint.listens_at[0].port
        return (Address(host, port, self._endpoint.peer_id),) if 2 * votes > len(verdict.reached) else ()

    async def _tell(self, peer: PeerID) -> None:
        with suppress(PeerError, ClosedError):
            await self._endpoint.call(peer, Whereabouts(self._endpoint.contact), timeout_s=_TELL_S)

    def _unreachable(self, verdict: Verdict) -> str:
        listens_at = self._endpoint.listens_at[0]
        listen = ""
        if is_loopback(listens_at.host):
            listen = " and listen on all interfaces (host_maddrs='/ip4/0.0.0.0/tcp/PORT')"
        tried = ", ".join(sorted({f"{host}:{listens_at.port}" for _, host in verdict.failed}))
        return (
            f"{len(verdict.failed)} of {verdict.asked} peers that were asked could not connect to this one at {tried}: "
            "it goes on as a client, which only dials. It averages only with peers that can be reached. To be reached, "
            f"open or forward this port{listen}, or give announce_maddrs. client_mode=False announces the address "
            "without asking first; client_mode=True makes this peer a client without this warning"
        )

    async def upload_rate(self, peer: PeerID, *, nbytes: int = _PROBE_BYTES, timeout_s: float = 5.0) -> float:
        """How many bytes per second this peer takes from us. Measured by sending it `Ballast`.

        Raises:
            PeerError: the peer did not take the bytes in time, or refuses them.
        """
        loop = asyncio.get_running_loop()
        began, pieces = loop.time(), max(1, nbytes // _PIECE_BYTES)
        at_once = asyncio.Semaphore(_PIECES_AT_ONCE)

        async def send() -> None:
            async with at_once:
                data = self._endpoint.env.rng.randbytes(_PIECE_BYTES)
                await self._endpoint.call(peer, Ballast(data), timeout_s=timeout_s)

        await asyncio.gather(*(send() for _ in range(pieces)))
        return pieces * _PIECE_BYTES / max(1e-6, loop.time() - began)

    # ------------------------------------------------------------------------------------------- when it turns out so

    def _way_shut(self, peer: PeerID, addresses: tuple[Address, ...]) -> None:
        self._tasks.spawn(self._tell_no_way(peer, addresses))

    async def _tell_no_way(self, peer: PeerID, addresses: tuple[Address, ...]) -> None:
        with suppress(PeerError):
            await self._endpoint.call(peer, NoWayIn(addresses), timeout_s=_TELL_S)

    @property
    def shut_out(self) -> list[PeerID]:
        """The peers that said lately that they cannot connect to us at an address that we announce.

        This is only their word: use it for advice.
        """
        since = asyncio.get_running_loop().time() - _KEPT_S
        announced = set(self._endpoint.contact.addresses)
        return [peer for peer, (at, tried) in self._shut_out.items() if at >= since and announced & tried]

    def _told_no_way(self, peer: PeerID, request: NoWayIn) -> Noted:
        now = asyncio.get_running_loop().time()
        tried = frozenset(self._endpoint.contact.addresses) & frozenset(request.addresses)
        if not tried:
            return Noted()
        sometimes("a peer hears that another one cannot dial it")
        put_last(self._shut_out, peer, (now, tried), _MAX_KEPT)
        busy = self._looking is not None and not self._looking.done()
        if not busy and now >= self._looked_at + _LOOK_AGAIN_S:
            self._looked_at = now
            self._looking = self._tasks.spawn(self.find_out())
        return Noted()

    async def close(self) -> None:
        """Stop asking."""
        await self._tasks.cancel()


def _report(error: BaseException) -> None:
    """A fault of ours: nobody waits for these tasks."""
    asyncio.get_running_loop().call_exception_handler({"message": "asking for reachability failed", "exception": error})


def _may_be_dialed(host: str) -> bool:
    """Whether this is the address of another machine that packets are routed to."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return bool(host)  # a simulated host
    return not (address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified)
