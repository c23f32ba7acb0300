"""Whether others can dial this peer: they are asked to try, and it acts on what they say.

**The question** (`DialBack`) names a port and nothing else: the peer that is asked dials the address that the question
came from, so nobody can have it dial a third party (libp2p's AutoNAT has the same rule, for the same reason). It never
dials its own machine or a link-local address; it dials a site `_PER_SITE` times in a burst and then every
`_EVERY_S`, at most `_AT_ONCE` at a time, and answers with yes or no only: it is no scanner of ports either.

**Yes is a connection, never a word.** Whoever has dialed this peer has proved its identity on that connection with
nonces of both sides (`transport.handshake`), so the connection itself proves that the way is open, from where it came.
An answer of yes without one counts as no.

**The verdict.** Up to `_ASKED` peers at different sites are asked, those first whose word counts (`rpc.trust`).

- Somebody from another network got in, lately or now: others can dial this peer, however many say that they cannot.
- Only neighbours got in (`same_network`): so too, unless a peer that the user gave says from another network that it
  cannot: behind a home's router, say.
- Nobody got in of all that were asked, and among these was one whose word counts: this peer becomes a client. It goes
  on without announcing an address, so that nobody waits for it. It asks again after `_AGAIN_S`, then ever more rarely.
- Otherwise nobody can tell, and all stays as it is. At first a peer announces where it listens.

**The address.** A host that others name, a router's for example, is announced if a peer whose word counts has come in
there: only that peer knows where it dialed. A stranger's word counts if its connection came to that very address.

**`NoWayIn`.** If a peer finds that it cannot dial another, live peer (`rpc.routes`), it says so. This alone changes
nothing, as anybody can say it: the other peer asks peers of its own choice again, at most every `_ASK_AGAIN_S`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.base.bounded import put_last
from shoal.base.peer import Address, PeerID, site_of
from shoal.base.sometimes import sometimes
from shoal.base.tasks import Tasks
from shoal.errors import ClosedError, ConfigError, PeerError, PeerRefused
from shoal.events import Warned
from shoal.protocol.wire import Ballast, DialBack, DialedBack, Noted, NoWayIn, Whereabouts
from shoal.rpc.arrivals import Incoming
from shoal.rpc.dial_limits import NotDialed
from shoal.rpc.endpoint import Endpoint
from shoal.rpc.rate_limiter import RateLimiter
from shoal.rpc.rhythm import LOOK_S
from shoal.rpc.trust import Rank
from shoal.transport.sockets import is_loopback, same_network

__all__ = ["Reachability", "Verdict"]

T = TypeVar("T")

_DIAL_S = 3.0
_ANSWER_S = 4.0
_ASKED, _ASKED_OF_GIVEN = 5, 3
_AT_ONCE = 8
_PER_SITE, _EVERY_S = 32.0, 2.0
_MAX_SITES = 1024
_ASK_AGAIN_S = 60.0
_LATELY_S = 60.0
"""A connection that came so long ago shows that the way is open."""

_AGAIN_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_TELL_S = 3.0
_KEPT_S, _MAX_KEPT = 1800.0, 16
_PIECE_BYTES, _PIECES_AT_ONCE, _PROBE_BYTES, _PIECE_S = 1 << 15, 4, 384 << 10, 5.0
"""The probe stays below what one host may send at once (`allowance`): beyond that it would measure the allowance."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of asking.

    Attributes:
        reached: the peers that dialed us when they were asked, each with the address at which it says that it sees us.
        failed: the peers that did not get in, each with the address that it says it tried.
        can_be_reached: whether to announce an address.
        sure: False if peers whose word counts did not get in, though others have lately: it may be over.
    """

    reached: tuple[tuple[PeerID, str], ...]
    failed: tuple[tuple[PeerID, str], ...]
    can_be_reached: bool
    sure: bool = True

    @property
    def asked(self) -> int:
        """How many peers have tried."""
        return len(self.reached) + len(self.failed)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a peer that was asked says.

    Attributes:
        peer: that was asked.
        rank: how much its word counts.
        near: whether it is in our own network.
        host: at which it says that it sees us.
        came: the connection that it made to us meanwhile, if it made one.
    """

    peer: PeerID
    rank: Rank
    near: bool
    host: str
    came: Incoming | None


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
        self._questions = RateLimiter(1.0 / _EVERY_S, _PER_SITE, max_askers=_MAX_SITES)
        self._asking: asyncio.Task[Any] | None = None
        self._asked_at = float("-inf")
        self._shut_out: dict[PeerID, tuple[float, frozenset[Address]]] = {}
        self._tasks = Tasks(_report)
        endpoint.serve(DialBack, self._dial_back)
        endpoint.serve(Whereabouts, self._moved)
        endpoint.serve(NoWayIn, self._told_no_way)
        endpoint.serve(Ballast, lambda _peer, _request: Noted())
        endpoint.on_route_shut(self._route_shut)

    # ----------------------------------------------------------------------------------------------------- for others

    async def _dial_back(self, peer: PeerID, request: DialBack) -> DialedBack:
        own, host = self._endpoint.hosts_of(peer)
        if not _may_be_dialed(host) or host == own:
            raise PeerRefused("from here nobody can tell whether others reach you", peer)
        now = asyncio.get_running_loop().time()
        if self._dialing >= _AT_ONCE or not self._questions.allows(site_of(host), 1.0, now):
            raise PeerRefused("too many questions", peer, code="busy")
        self._dialing += 1
        try:
            reached = await self._endpoint.dials.gets_in(Address(host, request.port, peer), timeout_s=_DIAL_S)
        except NotDialed as error:
            raise PeerRefused(error.message, peer, code="busy") from None
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
        """Ask peers whether they can dial us, and announce the result to all connected ones.

        If nobody can tell, this counts as yes the first time, and changes nothing later.
        """
        asked = self._whom_to_ask()
        found = await self._of_each(lambda peer: self._ask(peer, asked[peer]), asked)
        answers = [each for each in found if each is not None]
        if not answers and self.verdict is not None:
            return self.verdict
        told, before = self.verdict is not None and not self.verdict.can_be_reached, self._endpoint.contact
        verdict = self.verdict = self._judge(answers)
        if verdict.can_be_reached:
            self._endpoint.announce(*self._seen_at([each for each in answers if each.came is not None]))
        else:
            self._endpoint.withhold()
            if not told:
                self._endpoint.env.events.emit(Warned(where="reachability", message=self._unreachable(verdict)))
        if self._endpoint.contact != before:
            await self._of_each(self._tell, self._endpoint.peers)
        return verdict

    def _judge(self, answers: list[_Answer]) -> Verdict:
        since = asyncio.get_running_loop().time() - _LATELY_S
        from_near = [same_network(each.own, each.host) for each in self._endpoint.arrivals.since(since)]
        came, failed = [each for each in answers if each.came], [each for each in answers if not each.came]
        no, no_from_afar = (
            any(each.rank < Rank.STRANGER for each in failed),
            any(each.rank is Rank.GIVEN and not each.near for each in failed),
        )
        open_ = not all(from_near) or (bool(from_near) and not no_from_afar)
        if not open_ and not no:
            open_ = self.verdict is None or self.verdict.can_be_reached
        return Verdict(
            tuple((each.peer, each.host) for each in came),
            tuple((each.peer, each.host) for each in failed),
            open_,
            sure=not no or any(not each.near for each in came),
        )

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
        """Ask again now and then while others cannot dial us, or may no longer be able to.

        Args:
            look_around: connects with neighbours, and makes us known to them.
            on_opened: called once others can dial us.
        """
        self._tasks.spawn(self._watch(look_around, on_opened))

    async def _watch(self, look_around: Callable[[], Awaitable[None]], on_opened: Callable[[], None]) -> None:
        pause_s = _AGAIN_S
        while True:
            await asyncio.sleep(pause_s * self._endpoint.env.rng.uniform(0.8, 1.0))
            if (before := self.verdict) is None or (before.can_be_reached and before.sure):
                pause_s = _AGAIN_S
                continue
            await look_around()  # idle links are closed: there must be somebody to ask
            if (await self.find_out()).can_be_reached and not before.can_be_reached:
                await look_around()
                on_opened()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _whom_to_ask(self) -> dict[PeerID, Rank]:
        """Peers at different sites, none of them ours: those first whose word counts."""
        endpoint, trust = self._endpoint, self._endpoint.trust
        connected = list(endpoint.peers)
        endpoint.env.rng.shuffle(connected)
        chosen: dict[str, tuple[PeerID, Rank]] = {}
        for peer, rank in trust.ranks((*trust.given, *connected)).items():
            own, host = endpoint.hosts_of(peer)
            if not host:
                host = next((address.host for address in endpoint.contact_of(peer).addresses), "")
            if host and host != own and len(chosen) < (_ASKED_OF_GIVEN if rank is Rank.GIVEN else _ASKED):
                chosen.setdefault(site_of(host), (peer, rank))
        return dict(chosen.values())

    async def _ask(self, peer: PeerID, rank: Rank) -> _Answer | None:
        endpoint, began = self._endpoint, asyncio.get_running_loop().time()
        if not (listens_at := endpoint.listens_at):
            return None
        try:
            answer = await endpoint.call(peer, DialBack(listens_at[0].port), timeout_s=_ANSWER_S)
            host = Address(answer.host, 1, peer).host
        except (PeerError, ClosedError, ConfigError):
            return None
        came = next((each for each in endpoint.arrivals.since(began) if each.peer == peer), None)
        return _Answer(peer, rank, same_network(*endpoint.hosts_of(peer)), host, came)

    def _seen_at(self, came: list[_Answer]) -> tuple[Address, ...]:
        """The address at which most say that they have reached us, unless we announce it already."""
        known, port = {address.host for address in self._endpoint.listens_at}, self._endpoint.listens_at[0].port
        best = min((each.rank for each in came), default=Rank.STRANGER)
        believed = [
            each.host
            for each in came
            if (each.came is not None and each.came.own == each.host) or each.rank == best < Rank.STRANGER
        ]
        words = Counter(host for host in believed if host not in known)
        if not words:
            return ()
        (host, votes) = words.most_common(1)[0]
        return (Address(host, port, self._endpoint.peer_id),) if 2 * votes > words.total() else ()

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

    async def upload_rate(self, peer: PeerID) -> float:
        """How many bytes per second this peer takes from us. Measured by sending it `Ballast`.

        Raises:
            PeerError: the peer did not take the bytes in time, or refuses them.
        """
        loop = asyncio.get_running_loop()
        began, pieces = loop.time(), _PROBE_BYTES // _PIECE_BYTES
        at_once = asyncio.Semaphore(_PIECES_AT_ONCE)

        async def send() -> None:
            async with at_once:
                data = self._endpoint.env.rng.randbytes(_PIECE_BYTES)
                await self._endpoint.call(peer, Ballast(data), timeout_s=_PIECE_S)

        await asyncio.gather(*(send() for _ in range(pieces)))
        return pieces * _PIECE_BYTES / max(1e-6, loop.time() - began)

    # ------------------------------------------------------------------------------------------- when it turns out so

    def _route_shut(self, peer: PeerID, addresses: tuple[Address, ...]) -> None:
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
        if self._asking is None or self._asking.done():
            self._asking = self._tasks.spawn(self._ask_again(max(0.0, self._asked_at + _ASK_AGAIN_S - now)))
        return Noted()

    async def _ask_again(self, in_s: float) -> None:
        """Ask others, once this may be done again: what was told meanwhile may be news."""
        await asyncio.sleep(in_s)
        self._asked_at = asyncio.get_running_loop().time()
        await self.find_out()

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
